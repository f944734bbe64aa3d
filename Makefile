# The two commands: `make demo` and `make test`. They, and `make docs`, set up what they need in .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOWEST ?= .venv-lowest
DOCS_READY := $(VENV)/.docs-ready

.PHONY: demo test test-gpu test-lowest lint bench docs clean

demo: $(READY)
	$(BIN)/peerbayes demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder  # what a file sets up, it sets up once

test-gpu: $(READY)  # the record is of the commit that is checked out, and written by the tests themselves
	$(BIN)/pytest -m gpu --record results/gpu-tests.json

# The lowest versions that pyproject.toml allows. Their own warnings are no errors, as they are in the other tests.
test-lowest: $(LOWEST)/.ready
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -o filterwarnings=default tests/test_doctor.py tests/test_completion.py \
	    tests/test_front_door.py tests/test_networks.py tests/math/test_noise.py tests/posteriors/test_storage.py \
	    tests/recipes tests/reports/test_judging.py tests/runs/test_loggers.py tests/exporting/test_export.py tests/serving/test_serving.py

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install -q --disable-pip-version-check -c constraints-lowest.txt -e ".[zoo,sweep,text,export,serve,tensorboard,mlflow,wandb]" \
	    pytest hypothesis httpx
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/peerbayes bench

docs: $(DOCS_READY)  # the site, in docs/_build/html; a warning, such as a link that leads nowhere, is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	@echo docs/_build/html/index.html

$(DOCS_READY): $(READY)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $(DOCS_READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("peerbayes needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[zoo,sweep,export,serve,test]"
	touch $(READY)

clean:
	rm -rf $(VENV) $(LOWEST) demo build docs/_build docs/generated src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
