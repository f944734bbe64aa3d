"""One thread a process: the tests run side by side, and results must not depend on who else is running."""

import functools
import gc
import json
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from peerbayes import terms
from peerbayes.data import data_root
from peerbayes.engine import engines as engine
from peerbayes.terms import definition as registry

torch.set_num_threads(1)
settings.register_profile("unhurried", deadline=None)  # how long a case takes is the machine's affair
settings.load_profile("unhurried")
pytest.register_assert_rewrite("commands", "learners")
# Runs of tests survive no power cut: to wait for the disk takes a twentieth of the time. Tests of what has to be on
# it, and in which order, put a function of their own in this place; processes of their own wait as users do.
os.fsync = lambda _descriptor: None


@pytest.fixture(autouse=True, scope="module")
def _what_is_loaded_is_no_garbage():
    """Let collections, of which each training asks for one, pass by the half a million objects of tests and torch."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # libraries complain of what is left at the end


def pytest_collection_modifyitems(items):
    """Skip tests marked `gpu` where there is none: the only place that asks (`test_gpu_marker.py` holds that)."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_addoption(parser):
    parser.addoption(
        "--record", type=Path, metavar="FILE", help="write counts, commit, versions and GPU to a JSON file"
    )


def pytest_configure(config):
    if config.getoption("--record") and not torch.cuda.is_available():
        raise pytest.UsageError("--record is for tests on a GPU, and there is none: nothing is run or written")


def pytest_sessionfinish(session, exitstatus):
    """Write the record of a session that was not interrupted: which tests, at which commit, on which machine."""
    path, finished = (
        session.config.getoption("--record"),
        exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
    )
    if path is None or not finished or hasattr(session.config, "workerinput"):  # a worker's
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    outcomes = {
        kind: sorted(report.nodeid for report in stats.get(kind, [])) for kind in ("skipped", "failed", "error")
    }
    record = {
        "passed": len(stats.get("passed", [])),
        **outcomes,
        "commit": _git("rev-parse", "HEAD").strip(),
        "uncommitted": [line[3:] for line in _git("status", "--porcelain").splitlines() if line[3:] != str(path)],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _git(*words):
    root = Path(__file__).parent
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def user_term():
    """The decorator, with the terms of the test taken back afterwards."""
    before = dict(registry._TERMS)
    yield terms.term
    registry._TERMS.clear()
    registry._TERMS.update(before)


@pytest.fixture
def traced(monkeypatch):
    """Compiling as far as the split into forward and backward, where things can go wrong; the rest is torch's."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    engine.compiled.cache_clear()
    yield
    engine.compiled.cache_clear()


@pytest.fixture(scope="session")
def clinc_root():
    """Where the real CLINC150 is: the data root."""
    if not (data_root() / "clinc150.json").is_file():
        pytest.skip("needs clinc150.json under PEERBAYES_DATA")
    return data_root()
