"""Define numbers that change over the epochs of a stage, as functions of the epoch alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from peerbayes.schema import Strict

NotNegative = Annotated[float, Field(ge=0)]
Temperature = Annotated[float, Field(gt=0)]


class Schedule(Strict):
    """A number ≥ 0 over the epochs e of a stage.

    ``cosine``: end + (start − end) (1 + cos π t) / 2, ``linear``: start + (end − start) t, with t = min(e / epochs, 1).
    ``steps``: the first of ``values``, and the next one from each epoch in ``at`` on.
    """

    schedule: Literal["cosine", "linear", "steps"]
    start: NotNegative | None = None
    end: NotNegative | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    values: list[NotNegative] | None = None
    at: list[Annotated[float, Field(gt=0)]] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Schedule:
        if self.schedule == "steps":
            if self.values is None or self.at is None or len(self.values) != len(self.at) + 1:
                raise ValueError("a schedule of steps needs 'values' and one epoch less in 'at'")
            if sorted(self.at) != self.at:
                raise ValueError("the epochs in 'at' must rise")
        elif self.start is None or self.end is None or self.epochs is None:
            raise ValueError(f"a {self.schedule} schedule needs 'start', 'end' and 'epochs'")
        others = ("start", "end", "epochs") if self.schedule == "steps" else ("values", "at")
        for key in others:
            if getattr(self, key) is not None:
                raise ValueError(f"a schedule of kind '{self.schedule}' has no '{key}'")
        return self


def value_at(number: float | Mapping[str, Any], epoch: float | Tensor) -> float | Tensor:
    """Return a number, or a schedule's value at an epoch.

    Args:
        number: a number, or the table of a `Schedule`.
        epoch: epochs since the stage began; the value is a tensor if this is one.
    """
    if not isinstance(number, Mapping):
        return number
    if number["schedule"] == "steps":
        value, *rest = number["values"]
        for when, after in zip(number["at"], rest, strict=True):
            passed = (epoch >= when) * 1.0  # multiplied by 0 or 1, not summed: a step to 0 must be exactly 0
            value = value * (1 - passed) + after * passed
        return value  # type: ignore[no-any-return]
    start, end = number["start"], number["end"]
    if number["schedule"] == "linear":
        return start + (end - start) * _capped(epoch / number["epochs"])  # type: ignore[no-any-return]
    angle = math.pi * _capped(epoch / number["epochs"])
    cosine = angle.cos() if isinstance(angle, Tensor) else math.cos(angle)
    return end + (start - end) * (1 + cosine) / 2  # type: ignore[no-any-return]


def _capped(share: float | Tensor) -> float | Tensor:
    return share.clamp(max=1.0) if isinstance(share, Tensor) else min(share, 1.0)
