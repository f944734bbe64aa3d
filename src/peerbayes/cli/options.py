"""Options that several verbs share, and what shells complete. Nothing heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import typer

from peerbayes.choices import Engine, LoggerName, Precision
from peerbayes.errors import InputError

MAX_DEPTH, MAX_FOLDERS = 4, 2000  # of folders in which runs are searched


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
    while left and seen < MAX_FOLDERS:
        parent, depth = left.pop(0)
        try:
            inner = sorted(entry.name for entry in os.scandir(parent or ".") if entry.is_dir())
        except OSError:
            continue
        for name in inner:
            path, seen = os.path.join(parent, name), seen + 1
            if os.path.isfile(os.path.join(path, "recipe.toml")) and os.path.isfile(os.path.join(path, "run.json")):
                yield path
            elif depth + 1 < MAX_DEPTH and not name.startswith("."):
                left.append((path, depth + 1))


Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run, or start a new one.")]
Changes = Annotated[list[str], typer.Option("--set", help="Change the recipe: stages.0.epochs=5; * stands for all.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print what would be trained, and write nothing.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Log = Annotated[
    str,
    typer.Option(
        help="Also log to tensorboard, mlflow, wandb or trackio; separate several by commas.",
        show_default="metrics.jsonl only",
        autocompletion=loggers,
    ),
]
Draws = Annotated[int | None, typer.Option(min=1, help="Draws averaged.", show_default="the recipe's")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of data sets.", envvar="PEERBAYES_DATA", show_default="~/.cache/peerbayes/data"),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import what run folders name as package.module:name; this runs their code.",
    ),
]
Seeds = Annotated[str | None, typer.Option(help="Several seeds, such as 0,1,2; one run each.")]


CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, help="Steps between checkpoints.", show_default="an epoch, at most every 30 s")
]
AsInTrain = Annotated[Engine, typer.Option(help="How steps are run; see train.")]
PrecisionAsInTrain = Annotated[Precision, typer.Option(help="Precision of networks; see train.")]


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of ``0,1,2``."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"seeds '{text}': expected whole numbers separated by commas, such as 0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise InputError(f"seeds '{text}': a seed is given twice")
    if min(seeds) < 0:
        raise InputError(f"seeds '{text}': expected seeds that are 0 or more")
    return seeds
