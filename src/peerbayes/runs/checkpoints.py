"""Checkpoints that a run resumes from: their files in its folder.

`peerbayes.training.learner.Learner` says what they hold (`checkpoint`, `restore`), and when one is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.posteriors import storage

KEEP = 2  # newest checkpoints in a folder


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step, whole or not at all, then drop all but the newest `KEEP`.

    Args:
        folder: the run's.
        step: since the run began.
        tensors: by name.
        about: the description, JSON-ready.
    """
    path = folder / f"checkpoint-{step:09d}.safetensors"
    storage.write(path, tensors, {**about, "step": step})
    for old in _checkpoints(folder)[:-KEEP]:
        old.unlink()
    storage.sync_folder(folder)
    return path


def newest_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
    """Return tensors, description and complaints about damaged files; None where there is no checkpoint.

    A damaged newest one falls back to the one before.

    Raises:
        InputError: there are checkpoints, and none can be read.
    """
    files = _checkpoints(folder)
    complaints: list[str] = []
    for path in reversed(files):
        try:
            tensors, about = storage.read(path)
        except InputError as error:
            complaints.append(str(error))
            continue
        return tensors, about, complaints
    if files:
        raise InputError(f"no checkpoint can be read: {'; '.join(complaints)}; delete the run folder to start anew")
    return None
