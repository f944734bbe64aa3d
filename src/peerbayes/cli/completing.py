"""Shell completion: recipes, loggers and run folders. Nothing heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import get_args

from peerbayes.choices import LoggerName

DEPTH, MOST = 4, 2000  # depth, and number of folders, in which runs are searched


def recipe_names(incomplete: str) -> list[str]:
    """Return the packaged recipes whose names begin with ``incomplete``."""
    from peerbayes.recipes.packaged import packaged

    return [name for name in packaged() if name.startswith(incomplete)]


def recipe_words(incomplete: str) -> list[str]:
    """Return what may follow ``recipes``."""
    return [word for word in ("list", "show") if word.startswith(incomplete)] + recipe_names(incomplete)


def loggers(incomplete: str) -> list[str]:
    """Return the loggers that may come next in a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in get_args(LoggerName) if name.startswith(last)]


def run_folders(incomplete: str) -> list[str]:
    """Return run folders, and folders of several runs, whose paths begin with ``incomplete``."""
    runs = [path for path in _below(os.path.dirname(incomplete)) if path.startswith(incomplete)]
    above = [os.path.dirname(path) for path in runs]
    several = {folder for folder in above if above.count(folder) > 1 and folder.startswith(incomplete) and folder}
    return sorted({*runs, *several})


def _below(folder: str) -> Iterator[str]:
    """Yield the run folders below a folder, as paths that begin with it as given."""
    left, seen = [(folder, 0)], 0
    while left and seen < MOST:
        parent, depth = left.pop(0)
        try:
            inner = sorted(entry.name for entry in os.scandir(parent or ".") if entry.is_dir())
        except OSError:
            continue
        for name in inner:
            path, seen = os.path.join(parent, name), seen + 1
            if os.path.isfile(os.path.join(path, "recipe.toml")) and os.path.isfile(os.path.join(path, "run.json")):
                yield path
            elif depth + 1 < DEPTH and not name.startswith("."):
                left.append((path, depth + 1))
