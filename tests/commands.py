"""The command line, as tests call it, and the small data and recipes that they call it with."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from peerbayes import cli

QUIET = ("--quiet", "--device", "cpu")
RECIPE = """
title = "Small"
method = "METHOD"
data = { name = "DATA", classes = 3, batch_size = 12, validation = 12 }
peers = [
  { name = "a", network = "mlp", posterior = { kind = "mean_field" } },
  { name = "b", network = "mlp", posterior = { kind = "mean_field" } },
]
evaluation = { draws = 3 }
[[stages]]
epochs = 2
optimizer = { lr = 1e-3 }
terms = { likelihood = {}, kl = { scheme = "layer_mean" }, mutual = {}, weight_diversity = {} }
"""
SOURCE = """
title = "Source"
method = "dnn"
data = { name = "DATA", classes = 3, batch_size = 12, validation = 12 }
peers = [{ name = "only", network = "mlp", posterior = { kind = "point" } }]
evaluation = { draws = 1 }
[[stages]]
epochs = 1
optimizer = { name = "sgd", lr = 0.1 }
terms = { likelihood = {} }
"""


def ended(*arguments):
    """Run the command in this process; return its exit code."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code or 0


def called(*arguments, code=0):
    """Run the command in this process; return what it printed on standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert ended(*arguments) == code
    return out.getvalue()


def refused(capsys, *arguments):
    """Run a command that must fail; return its one sentence."""
    code, printed = ended(*arguments), capsys.readouterr()
    assert code == 2, printed.err
    assert printed.out == ""
    assert printed.err.startswith("peerbayes: ")
    assert printed.err.count("\n") == 1, printed.err
    assert "Traceback" not in printed.err
    return printed.err.removeprefix("peerbayes: ").rstrip("\n")


def process(*arguments, **options):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "peerbayes", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def change(*pairs):
    """Return the words that change a recipe: ``stages.0.epochs=5``."""
    return [word for pair in pairs for word in ("--set", pair)]


def contents(folder):
    """Return the bytes of a folder's files by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def save_npz(path, count=60, held=30, classes=3, images=None):
    """Write noise (or images) with labels: ``count`` of them to train on, the others to test."""
    if images is None:
        images = np.random.default_rng(0).integers(0, 255, (count + held, 8, 8), dtype=np.uint8)
    labels = np.arange(len(images)) % classes
    np.savez(
        path,
        train_images=images[:count],
        train_labels=labels[:count],
        test_images=images[count:],
        test_labels=labels[count:],
    )
    return path


def write_small(folder):
    """Write ``small.npz`` with recipes for it: a pair, the same under another name, and what a peer may start from."""
    data = str(save_npz(folder / "small.npz"))
    (folder / "small.toml").write_text(RECIPE.replace("DATA", data).replace("METHOD", "dml"))
    (folder / "other.toml").write_text(RECIPE.replace("DATA", data).replace("METHOD", "ours"))
    (folder / "source.toml").write_text(SOURCE.replace("DATA", data))
    return folder
