"""Recipes that come with the library, by name. Importing this loads nothing heavy: shells complete names by it.

Those of a paper are in a matrix, one TOML file of bases, axes, and rows that combine them:

    prefix = "renyi/"

    [base.images]                 # a table as of a recipe
    ...
    [axes.data.cifar10]           # a value of an axis: words for templates, and lines that change the base
    title = "CIFAR-10"
    [axes.method.alpha2]
    title = "Rényi mutual learning (order 2)"
    set = ["stages.*.terms.mutual.alpha=2.0"]

    [[rows]]
    name = "{data}-{network}-{method}"
    base = "images"               # or extends = the name of another recipe
    over = { data = ["cifar10"], network = ["resnet34"], method = ["dml", "alpha2"] }
    title = "{method.title} of two {network.title}s on {data.title}"
    set = ["data.name={data}"]

``{axis}`` is the name of a value, and ``{axis.word}`` one of its words; values of an axis that is not declared have
none. ``over`` may be a list of such tables. The lines of the values, axis by axis, come before those of the row. A row
without a base amends an earlier one of its name.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peerbayes.errors import InputError

MAX_KEY_PARTS = 64  # parts of a key in a recipe's file
_DEEP = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}""")


@functools.cache
def packaged() -> Mapping[str, Path]:
    """Return the recipes that come with the library by name (``mutual/digits-ours``), and the files that hold them."""
    root = _package() / "recipes"
    alone = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.toml")}
    every = {**alone, **{name: path for name, (path, _) in rows().items()}}
    # Those that are named by what one wants come first.
    return MappingProxyType(dict(sorted(every.items(), key=lambda item: ("/" in item[0], item[0]))))


@functools.cache
def rows() -> Mapping[str, tuple[Path, dict[str, Any]]]:
    """Return the recipes of the papers' matrices by name, with the files that hold them."""
    files = sorted((_package() / "papers").rglob("*.toml"))
    return {name: (path, row) for path in files for name, row in expand(parsed(path, path.name), path.name).items()}


def _package() -> Path:
    return Path(str(resources.files("peerbayes")))


def parsed(path: Path, origin: str) -> dict[str, Any]:
    """Return what a TOML file holds.

    Args:
        path: of the file.
        origin: its name, for messages.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if _DEEP.search(text):  # which takes the parser minutes
            raise InputError(f"{origin}: a key has more than {MAX_KEY_PARTS} parts")
        table: dict[str, Any] = tomllib.loads(text)
        return table
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{origin}: not valid TOML ({error})") from None


def expand(file: Mapping[str, Any], origin: str) -> dict[str, dict[str, Any]]:
    """Return the recipes of a matrix file by name; each as in a file of its own, its ``base`` filled in.

    Args:
        file: the parsed file.
        origin: its name, for messages.
    """
    recipes: dict[str, dict[str, Any]] = {}
    axes, bases = file.get("axes", {}), file.get("base", {})
    for row in file["rows"]:
        over = row.get("over", {})
        tables: list[dict[str, list[str]]] = over if isinstance(over, list) else [over]
        for names in (dict(zip(t, values)) for t in tables for values in itertools.product(*t.values())):
            words = {a: (axes[a][value] if a in axes else {}) | {"": value} for a, value in names.items()}
            recipe = {key: _filled(text, words, origin) for key, text in row.items() if isinstance(text, str)}
            name, lines = file.get("prefix", "") + recipe.pop("name"), row.get("set", [])
            if "base" in recipe or "extends" in recipe:
                lines = [*(line for value in words.values() for line in value.get("set", [])), *lines]
            if "base" in recipe:
                recipe["base"] = bases[recipe["base"]]
            before = recipes.get(name, {"set": []})
            recipes[name] = (
                before | recipe | {"set": [*before["set"], *(_filled(line, words, origin) for line in lines)]}
            )
    return recipes


def _filled(text: str, words: Mapping[str, Mapping[str, Any]], origin: str) -> str:
    def word(match: re.Match[str]) -> str:
        axis, _, key = match.group(1).partition(".")
        try:
            return _filled(str(words[axis][key]), words, origin)
        except KeyError:
            raise InputError(
                f"{origin}: '{text}' names {match.group(0)}, which is no word of the row's values"
            ) from None

    return re.sub(r"\{(\w+(?:\.\w+)?)\}", word, text)
