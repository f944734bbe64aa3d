"""The notebooks in examples/ run from their first cell to their last, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
# As a notebook does: cells share their names, and the value of a last expression is shown.
RUNNER = """
import ast, sys
names = {}
for cell in sys.stdin.read().split("\\0"):
    *before, last = ast.parse(cell).body
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        print("" if value is None else getattr(value, "_repr_html_", lambda: repr(value))())
    else:
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
"""


def cells_of(path, kind):
    book = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


def ran(cells, folder):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER],
        input="\0".join(cells),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "agg"},
        timeout=600,
    )


def test_there_are_two_notebooks():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    done = ran(cells_of(path, "code"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_explains_itself_and_holds_no_output(path):
    assert cells_of(path, "markdown")[0].startswith("# ")
    book = json.loads(path.read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book["cells"])


def test_a_cell_that_fails_is_seen(tmp_path):
    assert ran(["x = 1", "x.nothing"], tmp_path).returncode
    assert ran(["x = 1", "import warnings; warnings.warn('old')"], tmp_path).returncode
    assert ran(["x = 'seen'", "x"], tmp_path).stdout.strip() == "'seen'"
