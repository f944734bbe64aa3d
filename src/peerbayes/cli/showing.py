"""What verbs show: progress, and what runs are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from peerbayes.learning import Loaded, Reporter, Run
    from peerbayes.reporting import Record


def reporter(quiet: bool) -> Reporter:
    """Return who tells about progress on standard error, or nobody."""
    from peerbayes.learning import ConsoleReporter, Reporter

    return Reporter() if quiet else ConsoleReporter()


def judge(run: Run, device: str, loaded: Loaded, **how: Any) -> Record:
    """Judge a run on its test split, with data that other runs may share."""
    from peerbayes import reporting

    data = loaded.of(run)
    return reporting.evaluate(run, data=data, device=device, root=loaded.root, **how)


def show(records: list[Record], as_json: bool, many: bool, folders: Sequence[Path] = (), **table: bool) -> None:
    """Print records as JSON, a list of them where there may be many, or as a table, with options of `text_table`.

    ``folders`` tell the rows of a table apart.
    """
    from peerbayes import reporting

    if as_json:
        typer.echo(json.dumps(records if many else records[0], indent=1))
        return
    placed = [{**record, "folder": str(folder)} for record, folder in zip(records, folders, strict=False)]
    typer.echo(reporting.text_table(placed or records, **table))
    for record in records:
        for peer in record["peers"]:
            if record["settle"] is not None:
                spent = f"{peer['draws_spent']:.1f} of at most {record['draws']} draws an image"
                typer.echo(f"seed {record['seed']} {peer['name']}: {spent}, settled at level {record['settle']}")
