"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peerbayes.choices import Engine, Precision
from peerbayes.cli.completing import loggers
from peerbayes.errors import InputError

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
