"""The main job on embedded data: four methods, several seeds, one table, two figures, one page."""

from __future__ import annotations

from pathlib import Path

from peerbayes import reporting
from peerbayes.learning import Reporter, Run, default_folder, load_recipe, train
from peerbayes.posteriors.storage import write_bytes
from peerbayes.reporting.figures import png, reliability_figure, retention_figure

METHODS = ("dnn", "vanilla", "dml", "ours")


def run(out: Path, seeds: list[int], reporter: Reporter) -> list[reporting.Record]:
    """Train (or go on with) ``mutual/digits-*`` over some seeds into ``out``, and return the records."""
    records = []
    last: Run | None = None
    for method in METHODS:
        name = f"mutual/digits-{method}"
        for seed in seeds:
            folder = default_folder(name, seed, out / "runs")
            last = train(load_recipe(name), folder, seed=seed, resume=folder.exists(), device="cpu", reporter=reporter)
            record = reporting.evaluate(last, device="cpu")
            reporting.write_record(folder / "evaluation.json", record)
            records.append(record)
    assert last is not None
    reporting.write_record(out / "records.json", records)
    write_bytes(out / "retention.png", png(retention_figure(records)))
    write_bytes(out / "reliability.png", png(reliability_figure(records)))
    caption = f"Ours, seed {last.seed}: what each term contributes, averaged over peers."
    page = reporting.report_page(records, "Learning from one another, on digits", {caption: last.metrics})
    write_bytes(out / "report.html", page.encode())
    return records
