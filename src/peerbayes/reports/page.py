"""The report page: one HTML file with tables, charts and examples, that needs nothing beside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from peerbayes.posteriors import storage
from peerbayes.reports import tables
from peerbayes.reports.evaluating import write_record
from peerbayes.reports.record import Record
from peerbayes.reports.sections import method_name, sections
from peerbayes.reports.svg import COLOURS
from peerbayes.reports.weights import shared_picture
from peerbayes.runs.run import Run

PARTS = ("page.html", "page.css", "page.js")


def report_page(
    records: Sequence[Record],
    heading: str,
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
    more: Mapping[str, Figure] | None = None,
    summaries: Sequence[Sequence[Sequence[str]]] = (),
    findings: Sequence[str] = (),
) -> str:
    """Return the page for some records.

    Args:
        records: what to show; those that `peerbayes.reports.evaluate` gave ``examples`` show these, too.
        heading: of the page.
        metrics: epochs' lines to draw, by caption.
        more: other figures, by caption.
        summaries: tables to begin with: rows, the first of them its head.
        findings: sentences below them.
    """
    groups = tables.grouped(records)
    records = [record for group in groups.values() for record in group]  # with the names that tell them apart
    parts = sections(records, metrics, more or {}, summaries, findings)
    html, style, script = (resources.files("peerbayes.reports").joinpath(name).read_text("utf-8") for name in PARTS)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(html).render(
        heading=heading,
        subheading=", ".join(dict.fromkeys(" · ".join(filter(None, (r["dataset"], r["network"]))) for r in records)),
        methods=[method_name(group[0], records) for group in groups.values()],
        sections=[section for section in parts if section.shows],
        colours=COLOURS,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def write_report(run: Run, record: Record) -> None:
    """Write a run's record and its page into its folder.

    Args:
        run: a trained one.
        record: of its evaluation.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> pb.reports.write_report(run, pb.evaluate(run, examples=8, device="cpu"))
        >>> (run.folder / "report.html").exists()
        True
        >>> folder.cleanup()
    """
    lines = {"The terms over the epochs, averaged over peers.": run.metrics}
    page = report_page([record], run.recipe.title, lines, shared_picture(run))
    for stale in (".evaluation.json.*.tmp", ".report.html.*.tmp"):  # of a process that was killed while it wrote
        for path in run.folder.glob(stale):
            path.unlink(missing_ok=True)
    write_record(run.folder / "evaluation.json", record)
    storage.write_bytes(run.folder / "report.html", page.encode())


def write_page(
    path: Path,
    records: Sequence[Record],
    heading: str,
    summaries: Sequence[Sequence[Sequence[str]]] = (),
    findings: Sequence[str] = (),
) -> None:
    """Write the page of some records to a file, atomically.

    Args:
        path: the file.
        records: of runs.
        heading: of the page.
        summaries: tables to begin with: rows, the first of them its head.
        findings: sentences below them.
    """
    page = report_page(records, heading, {}, summaries=summaries, findings=findings)
    storage.write_bytes(path, page.encode())
