"""Recipes that come with the library, by name. Importing this loads nothing heavy: shells complete names by it."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peerbayes.errors import InputError
from peerbayes.recipes.matrix import expand

DEPTH = 64  # parts of a key in a recipe's file
_DEEP = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEPTH}}}""")


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
            raise InputError(f"{origin}: a key has more than {DEPTH} parts")
        table: dict[str, Any] = tomllib.loads(text)
        return table
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{origin}: not valid TOML ({error})") from None
