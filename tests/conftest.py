"""One thread a process: the tests run side by side, and results must not depend on who else is running."""

import functools

import pytest
import torch
from hypothesis import settings

from peerbayes import terms
from peerbayes.data import data_root
from peerbayes.learning import engine
from peerbayes.terms import registry

torch.set_num_threads(1)
settings.register_profile("unhurried", deadline=None)  # how long a case takes is the machine's affair
settings.load_profile("unhurried")
pytest.register_assert_rewrite("commands", "learners")


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
