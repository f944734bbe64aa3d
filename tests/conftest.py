"""One thread a process: the tests run side by side, and results must not depend on who else is running."""

import pytest
import torch

from peerbayes import terms
from peerbayes.terms import registry

torch.set_num_threads(1)
pytest.register_assert_rewrite("commands")


@pytest.fixture
def user_term():
    """The decorator, with the terms of the test taken back afterwards."""
    before = dict(registry._TERMS)
    yield terms.term
    registry._TERMS.clear()
    registry._TERMS.update(before)
