"""Tests that need a GPU: marked, so that one command runs them all, and checked without one as far as that goes."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
FILES = [path for path in sorted(TESTS.rglob("*.py")) if path not in (TESTS / "conftest.py", Path(__file__))]
NAMES = ("attr-defined", "name-defined", "call-arg")
ROTTEN = """
import pytest
from peerbayes.training.learner import Learner

@pytest.mark.gpu
def test_rotten(learner: Learner):
    assert learner.cohort.images is learner.cohort._images
"""


def asks_for_a_gpu(source):
    """Return whether source asks whether there is a GPU (or pretends that there is one by assignment)."""
    return any(isinstance(node, ast.Attribute) and node.attr == "is_available" for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_test_skips_itself_without_a_gpu(path):
    """One that needs a GPU fails without it unless it is marked, or asks for itself."""
    assert not asks_for_a_gpu(path.read_text())


def test_a_test_that_asks_is_seen():
    assert asks_for_a_gpu("@pytest.mark.skipif(not torch.cuda.is_available(), reason='x')\ndef test(): pass")
    assert not asks_for_a_gpu("monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)")


def lines_of_gpu_tests(path):
    """Return the numbers of the lines that nobody runs without a GPU."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    marked = [node for node in functions if any(ast.unparse(mark) == "pytest.mark.gpu" for mark in node.decorator_list)]
    return {number for node in marked for number in range(node.lineno, node.end_lineno + 1)}


def test_names_that_gpu_tests_use_exist(tmp_path):
    """Nobody runs them here; mypy reads them instead, and a rotten one, which shows that it looks."""
    rotten = tmp_path / "test_rotten.py"
    rotten.write_text(ROTTEN)
    lines = {path: found for path in (rotten, *FILES) if (found := lines_of_gpu_tests(path))}
    assert len(lines) > 5
    paths = [TESTS.parent / "src", *{path.parent for path in (*lines, *FILES)}]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--check-untyped-defs", *map(str, lines)],
        cwd=TESTS.parent,
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    said = re.findall(rf"([^/\n]+\.py):(\d+): error: (.+?)(?:; maybe .*)?  \[(?:{'|'.join(NAMES)})\]\n", done.stdout)
    numbers = {path.name: found for path, found in lines.items()}
    found = [(name, words) for name, line, words in said if int(line) in numbers.get(name, ())]
    assert found == [("test_rotten.py", '"Cohort" has no attribute "_images"')]


# ---- make test-gpu --------------------------------------------------------------------------------------------------

PRETENDED = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "a GPU of the test"
"""
MIXED = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1, 2])
def test_marked(number):
    assert number < 2

@pytest.mark.gpu
def test_skipped():
    pytest.skip("no Triton")

def test_unmarked():
    raise AssertionError("was not asked for")
"""


def recorded(folder, *words):
    (folder / "test_mixed.py").write_text(MIXED)
    (folder / "pretended.py").write_text(PRETENDED)
    paths = [str(TESTS), str(TESTS.parent / "src"), str(folder)]
    words = [*words, "-p", "conftest", "-m", "gpu", "--record", "record.json", "test_mixed.py", "--strict-markers"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", ".", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    path = folder / "record.json"
    return done, json.loads(path.read_text()) if path.is_file() else None


@pytest.mark.parametrize("side_by_side", [(), ("-n", "1")], ids=["alone", "a_worker"])
def test_the_record_says_what_came_of_which_tests_where(tmp_path, side_by_side):
    done, record = recorded(tmp_path, "-p", "pretended", *side_by_side)
    assert done.returncode == 1, done.stdout + done.stderr
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TESTS, capture_output=True, text=True, check=True).stdout
    assert record.pop("uncommitted") is not None
    assert record.pop("python").startswith("3.")
    assert record == {
        "passed": 2,
        "skipped": ["test_mixed.py::test_skipped"],
        "failed": ["test_mixed.py::test_marked[2]"],
        "error": [],
        "commit": commit.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": "a GPU of the test",
    }


def test_without_a_gpu_nothing_is_recorded(tmp_path):
    done, record = recorded(tmp_path)
    assert done.returncode == 4
    assert "--record is for tests on a GPU, and there is none" in done.stderr
    assert record is None
