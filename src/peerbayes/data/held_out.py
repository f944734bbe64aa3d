"""Which images or texts are kept back to choose by."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor

from peerbayes.data.datasets.sources import Texts
from peerbayes.data.splits import held_out
from peerbayes.errors import InputError


class _Divisible(Protocol):
    @property
    def labels(self) -> Tensor | None: ...

    def __len__(self) -> int: ...

    def select(self, index: Tensor) -> Self: ...


Part = TypeVar("Part", bound=_Divisible)
Validation = int | float | Literal["auto", "half"]


def divided(
    name: str | Path,
    train: Part | None,
    valid: Part | None,
    test: Part | None,
    validation: Validation,
    called: str = "validation",
) -> tuple[tuple[Part, Part | None, Part], list[str]]:
    """Return training, validation and test split, and what is said of those that had to be cut.

    Args:
        name: of the data, for messages.
        train: the data's training split.
        valid: its validation split.
        test: its test split; a fifth of ``train`` is held out where there is none.
        validation: how many of ``train`` to hold out, which fraction, or ``"auto"``: a tenth unless there is ``valid``;
            or ``"half"``: as ``"auto"``, but half of ``valid`` is the test split where there is none.
        called: what the data call ``valid``.
    """
    assert train is not None
    notes: list[str] = []
    items = "texts" if isinstance(train, Texts) else "images"
    if validation == "half" and valid is not None and test is None:
        if len(valid) < 2:
            raise InputError(f"{name}: expected at least two {items} in '{called}' to halve them, got {len(valid)}")
        assert valid.labels is not None
        tested, choosing = held_out(valid.labels, len(valid) // 2, "half")
        note = f"half of the {len(valid):,} {items} of '{called}' choose, the other half is the test split"
        notes.append(f"{name}: no test split: {note}")
        valid, test = valid.select(choosing), valid.select(tested)
    if test is None:
        if len(train) < 2:
            raise InputError(f"{name}: expected at least two {items} to hold out a test split, got {len(train)}")
        assert train.labels is not None
        kept, held = held_out(train.labels, max(1, len(train) // 5), "test")
        # A class that has too few to be tested is learnt at least.
        present = torch.isin(train.labels[held], train.labels[kept])
        if not present.any():
            raise InputError(f"{name}: expected a class with two {items} at least, to hold out a test split")
        kept = torch.cat([kept, held[~present]]).sort().values
        total = len(train)
        train, test = train.select(kept), train.select(held[present])
        notes.append(f"{name}: no test split: {len(test):,} of {total:,} {items} are held out, the same every time")
    if isinstance(validation, str) and validation not in ("auto", "half"):
        raise InputError(f"validation = '{validation}': expected a number, a fraction, 'auto' or 'half'")
    if isinstance(validation, str):
        validation = 0 if valid is not None else len(train) // 10
        if validation:
            note = f"{validation:,} of {len(train):,} training {items} are held out, the same every time"
            notes.append(f"{name}: no validation split: {note}")
    count = _validation_count(name, validation, len(train), items)
    if count and valid is not None:
        raise InputError(f"{name} has its own validation split of {len(valid)} {items}: leave validation at 0")
    if count:
        assert train.labels is not None
        kept, held = _validation_split(train.labels, count)
        train, valid = train.select(kept), train.select(held)
    return (train, valid, test), notes


def _validation_split(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    runs = 1 + int((labels[1:] != labels[:-1]).sum())
    if runs == len(labels.unique()):
        return held_out(labels, count, "validation")
    index = torch.arange(len(labels))
    return index[:-count], index[-count:]


def _validation_count(name: str | Path, validation: int | float, total: int, items: str) -> int:
    if isinstance(validation, float) and not 0 <= validation < 1:
        raise InputError(f"validation as a fraction must be in [0, 1), got {validation}")
    count = round(validation * total) if isinstance(validation, float) else int(validation)
    if not 0 <= count < total:
        raise InputError(f"validation must leave training {items}: got {validation}, {name} has {total}")
    return count
