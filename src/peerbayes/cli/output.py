"""Output of verbs: progress, plans and records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peerbayes.errors import printable

if TYPE_CHECKING:
    from peerbayes.reports.record import Record
    from peerbayes.runs.executor import DataCache
    from peerbayes.runs.run import Run
    from peerbayes.training.reporters import Reporter


def say(text: str, err: bool = False) -> None:
    """Print a text that may hold names from files.

    Args:
        text: printed without control characters.
        err: to stderr.
    """
    typer.echo(printable(text), err=err)


def reporter(quiet: bool) -> Reporter:
    """Return a reporter of progress on standard error, or a silent one."""
    from peerbayes.training.reporters import ConsoleReporter, Reporter

    return Reporter() if quiet else ConsoleReporter()


def waiting(quiet: bool = False, patience: float = 1.0) -> AbstractContextManager[None]:
    """Show the progress of predictions within the block; see `peerbayes.training.reporters.waiting`.

    Args:
        quiet: show nothing.
        patience: seconds before anything is shown.
    """
    from peerbayes.training.reporters import waiting as shown

    return shown(quiet, patience)


def evaluate_run(run: Run, device: str, loaded: DataCache, quiet: bool = False, **how: Any) -> Record:
    """Evaluate a run on its test split, with data that other runs may share.

    Args:
        run: a trained one.
        device: where to predict.
        loaded: data sets that have been loaded.
        quiet: show no progress.
        how: further arguments of `peerbayes.evaluate`.
    """
    from peerbayes.reports.evaluating import SHOWN, evaluate

    data = loaded.of(run)
    with waiting(quiet):
        return evaluate(run, data=data, examples=SHOWN, device=device, root=loaded.root, **how)


def show_plan(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print the plan of `peerbayes.runs.executor.dry_run`.

    Args:
        rows: one for each run.
        as_json: as JSON, not as text.
    """
    if as_json:
        say(json.dumps(rows, indent=1))
        return
    for number, row in enumerate(rows, start=1):
        peers = ", ".join(f"{name} ({network})" for name, network in row["peers"].items())
        say(f"{number}. {row['folder']}: {row['recipe']} on {row['data']}, seed {row['seed']}")
        say(f"   peers {peers}; {row['epochs']} epochs, {row['steps']:,} steps")
        for name, start in row["starts"].items():
            say(f"   {name} starts from {start}")
        for teacher in row["teachers"]:
            say(f"   learns from {teacher}")
        say(f"   writes {', '.join(Path(file).name for file in row['files'])}")
    say("nothing to train" if not rows else "nothing was written")


def placed(records: Sequence[Record], folders: Sequence[Path]) -> list[Record]:
    """Return records with the folders of their runs, which label the rows of tables.

    Args:
        records: of runs.
        folders: of the same runs.
    """
    return [{**record, "folder": str(folder)} for record, folder in zip(records, folders, strict=True)]


def show(records: list[Record], as_json: bool, many: bool, folders: Sequence[Path] = (), **table: bool) -> None:
    """Print records as a table, or as JSON.

    Args:
        records: of runs.
        as_json: as JSON, not as a table.
        many: whether JSON is a list, even of one record.
        folders: of the runs, which label the rows of a table.
        table: options of `text_table`.
    """
    from peerbayes.reports.certified import promises
    from peerbayes.reports.record import written
    from peerbayes.reports.tables import text_table

    if as_json:
        figures = list(map(written, records))
        say(json.dumps(figures if many else figures[0], indent=1))
        return
    records = placed(records, folders) if folders else records
    promised = "\n".join(promise.sentence for promise in promises(records))
    say("\n\n".join(filter(None, [text_table(records, **table), promised])))
    for record in records:
        for peer in record["peers"]:
            if record["settle"] is not None:
                spent = f"{peer['draws_spent']:.1f} of at most {record['draws']} draws an image"
                say(f"seed {record['seed']} {peer['name']}: {spent}, settled at level {record['settle']}")
