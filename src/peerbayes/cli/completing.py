"""What shells complete words by: names of recipes, and run folders. Nothing heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import get_args

from peerbayes.choices import LoggerName

DEPTH, MOST = 4, 2000  # how far below, and in how many folders, runs are looked for


def recipe_names(incomplete: str) -> list[str]:
    """Return the packaged recipes whose names begin so."""
    from peerbayes.recipes.packaged import packaged

    return [name for name in packaged() if name.startswith(incomplete)]


def recipe_words(incomplete: str) -> list[str]:
    """Return what may follow ``recipes``."""
    return [word for word in ("list", "show") if word.startswith(incomplete)] + recipe_names(incomplete)


def loggers(incomplete: str) -> list[str]:
    """Return the loggers that may come next in a list with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in get_args(LoggerName) if name.startswith(last)]


def run_folders(incomplete: str) -> list[str]:
    """Return the run folders whose paths begin so, and folders of several runs."""
    runs = [path for path in _below(os.path.dirname(incomplete)) if path.startswith(incomplete)]
    above = [os.path.dirname(path) for path in runs]
    several = {folder for folder in above if above.count(folder) > 1 and folder.startswith(incomplete) and folder}
    return sorted({*runs, *several})


def _below(folder: str) -> Iterator[str]:
    """Yield the run folders below one, as paths that begin with it as it was written."""
    left, seen = [(folder, 0)], 0
    while left and seen < MOST:
        place, depth = left.pop(0)
        try:
            inner = sorted(entry.name for entry in os.scandir(place or ".") if entry.is_dir())
        except OSError:
            continue
        for name in inner:
            path, seen = os.path.join(place, name), seen + 1
            if os.path.isfile(os.path.join(path, "recipe.toml")) and os.path.isfile(os.path.join(path, "run.json")):
                yield path
            elif depth + 1 < DEPTH and not name.startswith("."):
                left.append((path, depth + 1))
