"""Where a run stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Position:
    """Where a run stands, with what an epoch has gathered so far."""

    stage: int = 0
    stage_step: int = 0
    step: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    inert: dict[str, int] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    still: list[str] = field(default_factory=list)  # peers' groups of parameters that were told of, once a run

    def begin_stage(self, number: int) -> None:
        """Go to the first step of a stage."""
        self.stage, self.stage_step = number, 0
        self.shares, self.inert, self.best = {}, {}, {}

    def add(self, keys: Sequence[str], sums: Sequence[float]) -> None:
        """Add sums of steps' figures, named ``peer|kind|name``, to those of the epoch, in the order of the keys.

        Args:
            keys: names of the figures.
            sums: of their values over some steps.
        """
        # Those of a checkpoint come by the alphabet.
        self.sums = {key: self.sums.get(key, 0.0) + value for key, value in zip(keys, sums, strict=True)}

    def end_epoch(self, steps: int) -> dict[str, dict[str, Any]]:
        """Return what the epoch was to each peer, on average over its steps; the sums begin anew."""
        peers: dict[str, dict[str, Any]] = {}
        for key, value in self.sums.items():
            peer, kind, name = key.split("|", 2)
            peers.setdefault(peer, {"terms": {}, "notes": {}, "train": {}})[kind][name] = value / steps
        for name, line in peers.items():
            line["loss"] = sum(line["terms"].values())
            line["train_accuracy"] = line.pop("train")["accuracy"]
            if name in self.shares:
                line["gradient_share"] = {t: self.shares[name][t] for t in line["terms"] if t in self.shares[name]}
        self.sums = {}
        return peers
