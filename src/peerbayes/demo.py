"""The main job on embedded data: four methods, several seeds, one table, two figures, one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from peerbayes.api.fitting import train
from peerbayes.posteriors.storage import write_bytes
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.figures import png, reliability_figure, retention_figure
from peerbayes.reports.page import report_page
from peerbayes.reports.record import Record
from peerbayes.reports.records import evaluate, write_record
from peerbayes.runs.run import Run, default_folder
from peerbayes.training.reporters import Reporter

SOURCE, OTHERS = "dnn", ("vanilla", "dml", "ours")


def run(out: Path, seeds: Sequence[int], reporter: Reporter) -> list[Record]:
    """Train (or go on with) ``mutual/digits-*`` over some seeds into ``out``, and return the records.

    The networks are far too small to keep several cores busy, so the runs go side by side, one core each.
    """
    first = [(SOURCE, seed) for seed in seeds]
    rest = [(method, seed) for method in OTHERS for seed in seeds]
    records: dict[tuple[str, int], Record] = {}
    reporter.headline(f"{len(first) + len(rest)} runs on digits, a core each")
    workers = min(os.cpu_count() or 1, len(rest))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        for wave in (first, rest):  # the others start from the deterministic networks
            futures = {pool.submit(_work, out, *job): job for job in wave}
            for future in as_completed(futures):
                job = futures[future]
                records[job] = future.result()
                done = f"{len(records):>2}/{len(first) + len(rest)}"
                reporter.headline(f"{done}  {job[0]:<8} seed {job[1]}  {records[job]['seconds']:.1f} s")
    ordered = [records[job] for job in (*first, *rest)]
    _report(out, ordered, seeds[-1])
    return ordered


def _one_thread() -> None:
    torch.set_num_threads(1)


def _work(out: Path, method: str, seed: int) -> Record:
    name = f"mutual/digits-{method}"
    folder = default_folder(name, seed, out / "runs")
    done = train(load_recipe(name), folder, seed=seed, resume=folder.exists(), device="cpu")
    record = evaluate(done, device="cpu")
    write_record(folder / "evaluation.json", record)
    return record


def _report(out: Path, records: list[Record], seed: int) -> None:
    write_record(out / "records.json", records)
    write_bytes(out / "retention.png", png(retention_figure(records)))
    write_bytes(out / "reliability.png", png(reliability_figure(records)))
    last = Run(default_folder("mutual/digits-ours", seed, out / "runs"))
    caption = f"Ours, seed {seed}: what each term contributes, averaged over peers."
    page = report_page(records, "Learning from one another, on digits", {caption: last.metrics})
    write_bytes(out / "report.html", page.encode())
