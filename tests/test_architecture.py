"""What docs/architecture.md says of the tree is true of the tree."""

import importlib
import re
from pathlib import Path

import pytest

import peerbayes

ROOT = Path(peerbayes.__file__).parent
PAGE = (ROOT.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.py)?)`", PAGE)))
OUTSIDE = {"results/", "src/", "tests/", "docs/", "benchmarks/", "examples/"}


@pytest.mark.parametrize("path", [path for path in NAMED if path.partition("/")[0] + "/" not in OUTSIDE])
def test_a_file_that_is_named_exists(path):
    assert (ROOT / path).exists()


def test_many_are_named():
    assert len(NAMED) > 25


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("COLUMNS", "reports.tables"),
        ("AUGMENTATIONS", "data.transforms.augment"),
        ("make_optimizer", "engine.optimizers"),
        ("Optimizer", "recipes.settings"),
        ("Lesson", "terms.mutual"),
        ("alpha_title", "reports.record"),
        ("_CROP", "data.loader"),
        ("SEVERAL", "engine.perturbation"),
        ("PICKS", "engine.perturbation"),
        ("Kind", "recipes.settings"),
        ("Position", "engine.diagnostics"),
        ("RunOptions", "runs.session"),
        ("CheckpointEvery", "cli.options"),
        ("basic_figures", "reports.scoring"),
        ("recalibrated", "reports.scoring"),
        ("CALIBRATED", "reports.tables"),
        ("ExportFormat", "choices"),
        ("FILES", "exporting.export"),
        ("LOGGERS", "runs.loggers"),
        ("LoggerName", "choices"),
        ("RESUMED", "cli.__init__"),
    ],
)
def test_where_a_change_belongs_is_there(name, module):
    path = module.replace(".", "/") + ".py"
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line)
    assert f"`{path}`" in row
    assert hasattr(importlib.import_module(f"peerbayes.{module}"), name)


def test_every_room_has_a_line():
    tree = PAGE[PAGE.index("src/peerbayes/\n") : PAGE.index("### The way of the data")]
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    rooms |= {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {room for room in rooms if f"{room}/" not in tree} == set()
