"""Record where a posterior's weights came from; runs keep it, and no posterior reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Provenance:
    """Origin of weights, as far as it is known.

    Attributes:
        parent: hash of the weights that it started from; empty where it started from nothing.
        depth: lineage depth, the number of trainings behind it; -1 for initial weights, 0 for an unknown run.
        run: the run directory it was loaded from, or was trained into.
        mark: of that directory's state, which changes when the run is made anew.
        state: whether a run is changing it (``training``), or has done so (``trained``): then its own hash is the
            parent of whatever starts from it.

    Example:
        >>> from peerbayes.posteriors import Provenance
        >>> Provenance().state, Provenance(parent="1f3a", depth=0).depth
        ('untrained', 0)
    """

    parent: str = ""
    depth: int = -1
    run: Path | None = None
    mark: Any = None
    state: Literal["untrained", "training", "trained"] = "untrained"
