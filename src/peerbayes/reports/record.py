"""What a record is, and how its settings read in tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peerbayes.errors import InputError

Record = dict[str, Any]
Alpha = float | Mapping[str, Any]
MIXED = "mixed"  # each test image corrupted once, in turn: as many images as there are, not 75 times as many
KEPT = "0.8"  # share of images, those of lowest entropy, whose accuracy is shown


def alpha_title(alpha: Alpha) -> str:
    """Return an alpha as figures show it: ``1.5``, or ``linear 2→0 in 30 epochs`` of a schedule."""
    if not isinstance(alpha, Mapping):
        return f"{alpha:g}"
    if alpha["schedule"] == "steps":
        return f"{'→'.join(f'{v:g}' for v in alpha['values'])} at epoch {', '.join(f'{v:g}' for v in alpha['at'])}"
    epochs = f"{alpha['epochs']:g} epoch{'s' * (alpha['epochs'] != 1)}"
    return f"{alpha['schedule']} {alpha['start']:g}→{alpha['end']:g} in {epochs}"


def check_page(path: str | Path, option: str = "--out") -> Path:
    """Return where a page is to be written; refuse what may be another file, before any work is done.

    Args:
        path: where to.
        option: what the path was given as, for the message.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise InputError(f"{option}: '{path}' is no name of a page; expected a file that ends in .html")
    return path


def written(record: Record) -> Record:
    """Return a record as files and ``--json`` have it: without the inputs that a page shows of it.

    Args:
        record: of `peerbayes.reports.evaluate`.
    """
    return {key: value for key, value in record.items() if key != "examples"}
