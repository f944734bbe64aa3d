"""Define what a sweep varies: recipe keys, with lists of values or ranges."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from peerbayes.errors import InputError, nearest
from peerbayes.recipes.recipe import Recipe, keys, keys_meant, read_value
from peerbayes.terms.definition import find as find_term

Value = bool | int | float | str
Setting = dict[str, Value]

_NAME_LENGTH = 120  # of a run folder, below the 255 bytes of file systems


@dataclass(frozen=True)
class Axis:
    """A key that a sweep varies.

    Args:
        key: as given: a recipe's key or TERM.OPTION.
        paths: the recipe's keys that it changes.
        values: the values of a list, or the two ends of a range.
        is_range: whether any value between the two may be taken.
        log: whether a range is searched by its logarithm.
    """

    key: str
    paths: tuple[str, ...]
    values: tuple[Value, ...]
    is_range: bool = False
    log: bool = False

    def describe(self) -> str:
        """Return the values as they are written: ``0.5,1``, ``1e-4:1e-1:log``."""
        return (":" if self.is_range else ",").join(map(shown, self.values)) + ":log" * self.log

    def overrides(self, value: Value) -> list[str]:
        """Return the changes of the recipe that set this key, as ``--set`` takes them."""
        text = tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
        return [f"{path}={text}" for path in self.paths]


def parse_axes(given: Sequence[str], recipe: Recipe) -> list[Axis]:
    """Read ``KEY=VALUES`` items: ``mutual.alpha=0.5,1,2``, ``stages.*.optimizer.lr=1e-4:1e-1:log``.

    Args:
        given: the items.
        recipe: with these keys.
    """
    if not given:
        raise InputError("a sweep needs at least one key: --over KEY=VALUES, such as mutual.alpha=0.5,1,2")
    axes = [_axis(item, recipe) for item in given]
    paths = [path for axis in axes for path in axis.paths]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"--over: '{path}' is varied twice")
    return axes


def _axis(item: str, recipe: Recipe) -> Axis:
    key, equals, text = item.partition("=")
    if not equals or not key or not text:
        raise InputError(f"--over {item}: expected KEY=VALUES, such as mutual.alpha=0.5,1,2")
    paths = _paths(key, recipe)
    parts = text.split(":")
    if len(parts) > 1 and _is_number(_value(parts[0])):
        low, high, log = _range(item, parts)
        return Axis(key, paths, (low, high), is_range=True, log=log)
    values = [_value(part) for part in text.split(",")]
    if "" in values:
        raise InputError(f"--over {item}: a value is empty")
    if all(map(_is_number, values)) and any(isinstance(value, float) for value in values):
        values = [float(value) for value in values]
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"--over {item}: a value is given twice")
    return Axis(key, paths, tuple(values))


def _paths(key: str, recipe: Recipe) -> tuple[str, ...]:
    head, *below = keys(key)
    option = ".".join(below)
    if head in Recipe.model_fields or head in ("stage", "peer"):
        return (key,)
    present = {name for stage in recipe.stages for name in stage.terms}
    if head not in present and (meant := keys_meant([head, *below], recipe)):
        raise InputError(f"--over {key}: there is no key '{key}'{meant}")
    if not option:
        options = (f"{name}.{field}" for name in present for field in find_term(name).schema.model_fields)
        candidates = [*Recipe.model_fields, *options]
        raise InputError(f"--over {key}: expected a key of the recipe or TERM.OPTION{nearest(key, candidates)}")
    if head not in present:
        raise InputError(f"--over {key}: the recipe has no term '{head}'{nearest(head, present)}")
    fields = find_term(head).schema.model_fields
    if option not in fields:
        raise InputError(f"--over {key}: term '{head}' has no option '{option}'{nearest(option, fields)}")
    return tuple(f"stages.{n}.terms.{key}" for n, stage in enumerate(recipe.stages) if head in stage.terms)


def _range(item: str, parts: list[str]) -> tuple[int | float, int | float, bool]:
    log = parts[2:] == ["log"]
    ends = [_value(part) for part in parts[:2]]
    low, high = (end if isinstance(end, int | float) and math.isfinite(end) else math.nan for end in ends)
    if len(parts) > 3 or (len(parts) == 3 and not log) or not low < high:
        raise InputError(f"--over {item}: expected LOW:HIGH or LOW:HIGH:log, LOW below HIGH")
    if log and low <= 0:
        raise InputError(f"--over {item}: a logarithmic range must be above 0")
    if isinstance(low, int) and isinstance(high, int):
        return low, high, log
    return float(low), float(high), log


def _value(text: str) -> Any:
    value = read_value(text.strip())
    return value if isinstance(value, bool | int | float | str) else text.strip()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def corners(axes: Sequence[Axis]) -> list[Setting]:
    """Return the grid of all lists; a range gives its two ends."""
    return [dict(zip((a.key for a in axes), values)) for values in itertools.product(*(a.values for a in axes))]


def overrides(axes: Iterable[Axis], setting: Mapping[str, Value]) -> list[str]:
    """Return the changes of the recipe that make a setting.

    Args:
        axes: the keys that are varied.
        setting: a value by key.
    """
    return [change for axis in axes for change in axis.overrides(setting[axis.key])]


def shown(value: Value, digits: int | None = None) -> str:
    """Return a value in short notation: ``0.5``, ``1``, ``1e-05``, ``true``.

    Args:
        value: the value.
        digits: significant digits; by default the text is exact.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.{digits or 6}g}" if digits or float(f"{value:.6g}") == value else repr(value)
    return str(value)


def setting_title(setting: Mapping[str, Value], digits: int | None = None) -> str:
    """Return a setting in words: ``mutual.alpha=0.5, kl.weight=1``.

    Args:
        setting: a value by key.
        digits: significant digits; by default the text is exact.
    """
    return ", ".join(f"{key}={shown(value, digits)}" for key, value in setting.items())


def folder_name(setting: Mapping[str, Value]) -> str:
    """Return a name for a setting's run folders; a digest distinguishes settings whose names would be too long."""
    text = setting_title(setting).replace(", ", ",")
    plain = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", text)
    if plain == text and len(text) <= _NAME_LENGTH:
        return text
    return f"{plain[:_NAME_LENGTH]}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
