"""The report page: one HTML file with the table, the differences and the figures, that needs nothing beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from peerbayes.posteriors import storage
from peerbayes.reports import figures, tables
from peerbayes.reports import knowledge_graph as graph
from peerbayes.reports.record import Record
from peerbayes.reports.records import write_record
from peerbayes.reports.weights import shared_picture
from peerbayes.runs.run import Run
from peerbayes.showing import html_table


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
        records: what to show.
        heading: of the page.
        metrics: epochs' lines to draw, by caption.
        more: other figures, by caption.
        summaries: tables to begin with: rows, the first of them its head.
        findings: sentences below them.
    """
    drawn = [
        ("Accuracy on the images a peer is surest of, by entropy and by disagreement. A point's disagreement is 0 for "
         "every image, so its line is flat there: the accuracy of all images.",
         figures.retention_figure(records)),
        ("Reliability: accuracy against confidence.", figures.reliability_figure(records)),
        *((f"Entropy of predictions, on the test split and on {other}.", figures.entropy_figure(records, other))
          for other in tables.outside_names(records) if _has_entropy(records, other)),
        *((caption, figures.training_figure(lines)) for caption, lines in metrics.items() if lines),
        *(more or {}).items(),
    ]  # fmt: skip
    pictures = [_picture(caption, figure) for caption, figure in drawn] + _graphs(records)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(resources.files("peerbayes.reports").joinpath("page.html").read_text("utf-8"))
    return template.render(
        heading=heading,
        summaries=[html_table(lines, 1) for lines in summaries],
        findings=findings,
        subheading=", ".join(dict.fromkeys(" · ".join(filter(None, (r["dataset"], r["network"]))) for r in records)),
        main=_table(records, tables.FIGURES),
        last={heading: _table(found, tables.LAST) for heading, found in tables.last_headings(records).items()},
        kept={heading: _table(*found) for heading, found in tables.retention_headings(records).items()},
        outside={
            other: _table(tables.only_outside(records, other), tables.DETECTED)
            for other in tables.outside_names(records)
        },
        differences=tables.differences(records) + [tables.ONE_SEED] * tables.has_lone_seed(records),
        pictures=pictures,
        provenance=_provenance(records),
    )


def _has_entropy(records: Sequence[Record], other: str) -> bool:
    return any("entropy" in peer for record in tables.only_outside(records, other) for peer in record["peers"])


def _table(records: Sequence[Record], columns: tables.Columns) -> dict[str, Any]:
    found = tables.rows(records, columns)
    rows = [
        {**row.__dict__, "first": place == 0 or found[place - 1].method != row.method}
        for place, row in enumerate(found)
    ]
    return {"columns": list(columns), "rows": rows}


def write_report(run: Run, record: Record) -> None:
    """Write a run's record and its page into its folder.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> pb.reports.write_report(run, pb.evaluate(run, device="cpu"))
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


def write_page(path: Path, records: Sequence[Record], heading: str) -> None:
    """Write the page of some records to a file, atomically."""
    storage.write_bytes(path, report_page(records, heading, {}).encode())


def _picture(caption: str, figure: Figure, words: str = "") -> dict[str, str]:
    return {"caption": caption, "words": words or caption, "data": base64.b64encode(figures.png(figure)).decode()}


def _graphs(records: Sequence[Record]) -> list[dict[str, str]]:
    """Return the knowledge graphs of cohorts, each once, with the methods that have it."""
    methods: dict[str, list[str]] = {}
    drawn: dict[str, Record] = {}
    for group in tables.grouped(records).values():
        if "lessons" in group[0]:
            words = graph.graph_words(group[0])
            drawn[words] = group[0]
            methods.setdefault(words, []).append(tables.title(group[0]["method"]))
    return [
        _picture(f"{', '.join(methods[words])}. {graph.graph_caption(record)}", graph.graph_figure(record), words)
        for words, record in drawn.items()
    ]


def _provenance(records: Sequence[Record]) -> list[str]:
    lines = []
    for group in tables.grouped(records).values():
        first = group[0]
        seeds = ", ".join(str(r["seed"]) for r in group)
        bins = f"ECE with {first['ece_bins']} bins"
        if "inputs" in first:  # judged, wherever it came from
            files = ", ".join(dict.fromkeys(r["folder"] for r in group))
            lines.append(f"{tables.title(first['method'])}: {files}, seeds {seeds}, {first['inputs']:,} inputs, {bins}")
            continue
        seconds = sum(r["seconds"] for r in group) / len(group)
        draws = "1 draw" if first["draws"] == 1 else f"{first['draws']} draws"
        lines.append(
            f"{tables.title(first['method'])}: recipe {first['recipe']}, seeds {seeds}, {first['epochs']} epochs, "
            f"{seconds:.1f} s a seed, {draws} at test, {bins}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in records[0]["versions"].items())
    lines.append("; ".join(filter(None, (records[0].get("hardware"), versions))))
    return lines
