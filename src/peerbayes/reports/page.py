"""The report page: one HTML file with tables, charts, pictures and examples, that needs nothing beside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from peerbayes.posteriors import storage
from peerbayes.reports import charts, figures, tables
from peerbayes.reports.certified import promises
from peerbayes.reports.charts import COLOURS, Chart
from peerbayes.reports.evaluating import LEAST, MOST, WRONG, write_record
from peerbayes.reports.record import Record
from peerbayes.reports.tables import FurtherTable
from peerbayes.reports.weights import shared_picture
from peerbayes.runs.run import Run

PARTS = ("page.html", "page.css", "page.js")
ELSEWHERE = {  # headings and words of further tables, by their kind
    tables.CORRUPTED: ("Corrupted images", "{}."),
    tables.AVERAGED: ("In one pass ({})", "As one plain network, its weights averaged."),
    tables.LAST_EPOCHS: ("The last epochs", "{}."),
}


@dataclass(frozen=True)
class ReportRow:
    """A row of a table: its cells, the number of its method, and whether others of the method stand above it.

    ``remarks`` are of its last cells, or none.
    """

    cells: Sequence[str]
    group: int | None = None
    again: bool = False
    average: bool = False
    remarks: Sequence[str] = ()

    @property
    def parts(self) -> Iterator[tuple[str, str]]:
        """Cells with their remarks."""
        before = len(self.cells) - len(self.remarks)
        return zip(self.cells, [*[""] * before, *self.remarks], strict=True)


@dataclass(frozen=True)
class ReportTable:
    """A table of the page; the first ``left`` columns are names."""

    head: Sequence[str]
    lines: Sequence[ReportRow]
    left: int = 1
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and what is below it, in this order; what is empty is left out."""

    heading: str
    words: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    panels: Sequence[Chart] = ()
    tables: Sequence[ReportTable] = ()
    after: Sequence[str] = ()
    pictures: Sequence[Mapping[str, str]] = ()
    examples: Sequence[Mapping[str, Any]] = ()
    lines: Sequence[str] = ()

    @property
    def shows(self) -> bool:
        """Whether there is anything below the heading."""
        return any(value for name, value in vars(self).items() if name != "heading")


def sections(
    records: Sequence[Record],
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
    more: Mapping[str, Figure],
    summaries: Sequence[Sequence[Sequence[str]]],
    findings: Sequence[str],
) -> list[Section]:
    """Return the sections of a page, some of which may show nothing.

    Args:
        records: of runs.
        metrics: epochs' lines to draw, by caption.
        more: other figures, by caption.
        summaries: tables to begin with: rows, the first of them its head.
        findings: sentences below them.
    """
    further = list(tables.further_tables(records))
    return [
        Section("Summary", tables=[_summary(lines) for lines in summaries], after=findings),
        _results(records, bool(summaries)),
        _differences(records),
        Section("Calibration", charts=charts.reliability_chart(records)),
        _retention(records, [table for table in further if table.kind == tables.RETENTION]),
        *(_outside(records, table) for table in further if table.kind == tables.OUTSIDE),
        *(_elsewhere(records, table) for kind in ELSEWHERE for table in further if table.kind == kind),
        _promises(records),
        _examples(records),
        _training(metrics, more),
        Section("Who teaches whom", pictures=_graphs(records)),
        Section("How it was made", lines=_provenance(records)),
    ]


def method_name(record: Record, records: Sequence[Record]) -> str:
    """Return what a reader calls the group of a record.

    Args:
        record: of a run.
        records: all of the page, whose data may differ.
    """
    several = len({other["dataset"] for other in records}) > 1
    return tables.title(record["method"]) + (f" · {record['dataset']}" if several else "")


def _table(
    records: Sequence[Record], every: Sequence[Record], columns: tables.Columns, title: str = "", note: str = ""
) -> ReportTable:
    """Return a table of records, whose groups have the numbers that they have among ``every`` one of the page."""
    rows = tables.rows(records, columns)
    numbers = {key: number for number, key in enumerate(tables.grouped(every))}
    with_data = len({record["dataset"] for record in every}) > 1
    with_peers = any(len(record["peers"]) > 1 for record in records)
    lines = [
        ReportRow(
            [row.method, *[row.data] * with_data, *[row.peer] * with_peers, *row.cells, str(row.seeds)],
            numbers.get(row.group),
            again=index > 0 and rows[index - 1].group == row.group,
            average=row.peer == tables.AVERAGE,
        )
        for index, row in enumerate(rows)
    ]
    head = ["method", *["data"] * with_data, *["peer"] * with_peers, *columns, "seeds"]
    return ReportTable(head, lines, 1 + with_data + with_peers, title, note)


def _summary(lines: Sequence[Sequence[str]]) -> ReportTable:
    head, *rows = lines
    return ReportTable(head, [ReportRow(row) for row in rows])


def _results(records: Sequence[Record], below_summary: bool) -> Section:
    note = "ACC in percent; mean ± standard error over seeds"
    note += " (one seed: no spread)." if all(len(group) == 1 for group in tables.grouped(records).values()) else "."
    columns = dict(tables.COLUMNS)
    judged = [judged for r in records for judged in (*r["peers"], *filter(None, [r.get("ensemble")]))]
    if all("cnll" in one for one in judged):
        columns |= tables.CALIBRATED
        note += " cNLL and cECE: after temperature scaling on the validation split."
    heading = "Runs as they are, without a temperature" if below_summary else "Results"
    return Section(heading, tables=[_table(records, records, columns, note=note)])


def _differences(records: Sequence[Record]) -> Section:
    lines = []
    for difference in tables.compared(records):
        cells = [", ".join(filter(None, [difference.names, difference.peers])), str(difference.seeds)]
        figures = [difference.figures.get(name) for name in tables.COLUMNS]
        cells += ["" if figure is None else figure.value for figure in figures]
        lines.append(ReportRow(cells, remarks=["" if figure is None else figure.remark for figure in figures]))
    if not lines:
        return Section("")
    lone = [f"{_sentence(tables.ONE_SEED)}."] * tables.has_lone_seed(records)
    table = ReportTable(["difference", "seeds", *tables.COLUMNS], lines)
    return Section("Differences, paired over seeds", lone, tables=[table])


def _retention(records: Sequence[Record], further: Sequence[FurtherTable]) -> Section:
    drawn = [chart for ranking in tables.RANKINGS for chart in charts.retention_chart(records, ranking)]
    shown = [_table(table.records, records, table.columns, _sentence(table.of)) for table in further]
    return Section("Answering only what is certain", charts=drawn, tables=shown)


def _outside(records: Sequence[Record], table: FurtherTable) -> Section:
    other = table.of
    panels, words = charts.entropy_charts(records, other), f"How well entropy tells {other} from the test split."
    if panels:
        words += f" Shares of inputs by entropy: the test split is filled, {other} outlined; heights are square roots."
    drawn = _table(table.records, records, table.columns)
    return Section(f"Out of distribution: {other}", [words], panels=panels, tables=[drawn])


def _elsewhere(records: Sequence[Record], table: FurtherTable) -> Section:
    heading, words = (text.format(table.of) for text in ELSEWHERE[table.kind])
    return Section(heading, [_sentence(words)], tables=[_table(table.records, records, table.columns)])


def _promises(records: Sequence[Record]) -> Section:
    numbers = {key: number for number, key in enumerate(tables.grouped(records))}
    several = any(len(record["peers"]) > 1 for record in records)
    lines = []
    for promise in promises(records):
        who = [tables.title(promise.record["method"]), str(promise.record["seed"]), *[promise.peer] * several]
        cells = [*who, promise.promised, promise.shown, promise.threshold, promise.found, promise.kept]
        lines.append(ReportRow(cells, numbers[tables.key_of(promise.record)]))
    if not lines:
        return Section("")
    head = ["method", "seed", *["peer"] * several, "promised", "shown on", "threshold"]
    head += ["found on the test split", "kept"]
    return Section("Promises", tables=[ReportTable(head, lines, len(head))])


def _examples(records: Sequence[Record]) -> Section:
    """Return the inputs of each method's first record that has any, by kind."""
    examples, kind = [], "image"
    for number, group in enumerate(tables.grouped(records).values()):
        record = next((one for one in group if any(one.get("examples", {}).get(name) for name in (LEAST, MOST))), None)
        if record is None:
            continue
        kind = record["examples"]["kind"]
        lists = [(_sentence(name), record["examples"][name]) for name in (LEAST, MOST, WRONG)]
        heading = f"{tables.title(record['method'])}, seed {record['seed']}"
        heading += f", {tables.ENSEMBLE}" * (len(record["peers"]) > 1)
        examples.append({"group": number, "heading": heading, "kind": kind, "lists": [one for one in lists if one[1]]})
    words = ["By entropy (H, in nats) of predictions on the test split; p is the probability of the predicted class."]
    heading = f"Most and least certain {kind}s"
    return Section(heading, words, examples=examples) if examples else Section("")


def _training(metrics: Mapping[str, Sequence[Mapping[str, Any]]], more: Mapping[str, Figure]) -> Section:
    drawn = {caption: figures.training_figure(lines) for caption, lines in metrics.items() if lines} | dict(more)
    return Section("Training", pictures=[_picture(caption, figure) for caption, figure in drawn.items()])


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _picture(caption: str, figure: Figure, words: str = "") -> dict[str, str]:
    return {"caption": caption, "words": words or caption, "data": base64.b64encode(figures.png(figure)).decode()}


def _graphs(records: Sequence[Record]) -> list[dict[str, str]]:
    """Return the knowledge graphs of cohorts, each once, with the methods that have it."""
    methods: dict[str, list[str]] = {}
    drawn: dict[str, Record] = {}
    for group in tables.grouped(records).values():
        if "lessons" in group[0]:
            words = figures.graph_words(group[0])
            drawn[words] = group[0]
            methods.setdefault(words, []).append(tables.title(group[0]["method"]))
    return [
        _picture(f"{', '.join(methods[words])}. {figures.graph_caption(record)}", figures.graph_figure(record), words)
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
