"""Class labels that are numbers, however they are written."""

from __future__ import annotations

import math
from collections.abc import Iterable


def whole_number(label: str | int) -> int | None:
    """Return the whole number that a label is, also as ``3.0``; None for another one.

    Args:
        label: as it is written.

    Example:
        >>> whole_number("11.0"), whole_number("3"), whole_number("0.5"), whole_number("cat")
        (11, 3, None, None)
    """
    if isinstance(label, int):
        return label
    digits, _, decimals = label.removeprefix("-").partition(".")
    if not digits.isdecimal() or decimals.strip("0"):
        return None
    return -int(digits) if label.startswith("-") else int(digits)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names sorted: by value where all of them are numbers, else as texts.

    Args:
        names: each once.

    Example:
        >>> in_order(["10", "2"]), in_order(["10", "2", "cat"])
        (('2', '10'), ('10', '2', 'cat'))
    """
    names = sorted(names)
    try:
        values = {name: float(name) for name in names}
    except ValueError:
        return tuple(names)
    return tuple(sorted(names, key=values.__getitem__) if all(map(math.isfinite, values.values())) else names)
