"""One thread a process: the tests run side by side, and results must not depend on who else is running."""

import lzma
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from peerbayes import terms
from peerbayes.data import data_root
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


@pytest.fixture(scope="session")
def clinc_root(tmp_path_factory):
    """Where the real CLINC150 is: the data root, or unpacked from the folder shared with the repository."""
    if (data_root() / "clinc150.json").is_file():
        return data_root()
    packed = Path(__file__).resolve().parents[2] / "shared" / "data" / "clinc150.json.xz"
    if not packed.is_file():
        pytest.skip("needs clinc150.json under PEERBAYES_DATA")
    root = tmp_path_factory.mktemp("clinc")
    (root / "clinc150.json").write_bytes(lzma.decompress(packed.read_bytes()))
    return root
