"""What `adopt` makes of a plain network, on embedded data: several seeds, one table, one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from peerbayes.api.fitting import train
from peerbayes.data.dataset import Dataset, from_arrays, load
from peerbayes.metrics.spread import PairedDifference, paired_difference
from peerbayes.reports.evaluating import write_record
from peerbayes.reports.page import write_page
from peerbayes.reports.record import KEPT, Record
from peerbayes.reports.tables import cell
from peerbayes.runs.run import Run
from peerbayes.showing import aligned
from peerbayes.training.reporters import Reporter

TRAIN, VALIDATION = 300, 500  # digits to learn and to choose by; the other 997 are the test split
NETWORK, EPOCHS, MORE = "resnet8", 60, 20  # of the plain network, and of all that is made of it
OUTSIDE = "photographs"
PAIR = "two plain networks"
TEMPERED, SHIPPED = "plain + temperature", "what adopt ships"
WAYS = {  # rows of the table, by their names in the rows of an adoption
    "plain": "plain",
    TEMPERED: TEMPERED,
    f"plain, {MORE} more epochs + temperature": "plain, trained on + temperature",
    SHIPPED: "",
    "one Bayesian network + temperature": "Bayesian + temperature",
    "two peers + temperature": "ensemble of peers + temperature",
    f"{PAIR} + temperature": f"{PAIR} + temperature",
}
Figure = Callable[[Record], float | None]
COLUMNS: Mapping[str, tuple[Figure, float]] = {
    "ACC": (lambda row: row["accuracy"], 100),
    "NLL": (lambda row: row["nll"], 1),
    "ECE": (lambda row: row["ece"], 1),
    f"surest {100 * float(KEPT):g} %": (lambda row: row["kept_accuracy"], 100),
    "NLL, corrupted": (lambda row: row["corrupted"]["nll"], 1),
    "ECE, corrupted": (lambda row: row["corrupted"]["ece"], 1),
    "OOD AUROC": (lambda row: row["auroc"], 1),
}
COMPARED = ("NLL", "NLL, corrupted")


def few_digits() -> Dataset:
    """Return scikit-learn's digits with few of them to learn; the split is the same every time."""
    whole = load("digits")
    parts = [split.batch(torch.arange(len(split)), torch.device("cpu")) for split in (whole.train, whole.test)]
    images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    split = order.split([TRAIN, VALIDATION, len(order) - TRAIN - VALIDATION])
    learnt, held, test = ((images[rows], labels[rows]) for rows in split)
    return from_arrays(learnt, test, held, name=f"{TRAIN} digits")


def run(out: Path, seeds: Sequence[int], reporter: Reporter) -> list[Record]:
    """Train (or go on with) plain networks over some seeds, and adopt them; return a record of adoption a seed.

    Args:
        out: folder of all runs, the records and the page.
        seeds: what begins and orders training; the data are split the same way.
        reporter: is told which seeds are done.
    """
    done: dict[int, tuple[Record, list[Record]]] = {}
    reporter.headline(f"{len(seeds)} seeds of 9 networks on {TRAIN} digits, a core a seed")
    # The networks are far too small to keep several cores busy, so the seeds go side by side, one core each.
    workers = min(os.cpu_count() or 1, len(seeds))
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(_work, out, seed): seed for seed in seeds}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            reporter.headline(f"seed {futures[future]} is done ({len(done)} of {len(seeds)})")
    records = [done[seed][0] for seed in seeds]
    write_record(out / "records.json", records)
    evaluations = [done[seed][1][index] for index in range(len(done[seeds[0]][1])) for seed in seeds]
    heading = f"What adopting makes of a plain network, on {TRAIN} digits"
    first = [table(records), differences(records)]
    write_page(out / "report.html", evaluations, heading, summaries=first, findings=findings(records))
    return records


def _work(out: Path, seed: int) -> tuple[Record, list[Record]]:
    from peerbayes.adopting import adopt, by_run

    data, seed_folder = few_digits(), out / f"seed{seed}"

    def trained(recipe: str) -> Run:
        folder = seed_folder / recipe
        shorter = ["peers.*.network=" + NETWORK, f"stages.0.epochs={EPOCHS}", "data.batch_size=64"]
        return train(recipe, folder, data=data, seed=seed, overrides=shorter, resume=folder.exists(), device="cpu")

    plain, pair = trained("plain"), trained("ensemble")
    adopted = adopt(
        plain.weights_file("net"), name=NETWORK, data=data, run=seed_folder / "adopted", peers=2, epochs=MORE,
        extra_epochs=True, compare={PAIR: pair}, seed=seed, resume=True, device="cpu",
        overrides=[f"evaluation.out_of_distribution=['{OUTSIDE}']"], reporter=Reporter(),
    )  # fmt: skip
    return adopted.record, by_run(adopted.evaluations)


def _row(record: Record, way: str) -> Record:
    """Return the figures of a way to predict; those by entropies are of before any temperature."""
    rows = {row["who"]: row for row in record["rows"]}
    name = WAYS[way] or record["ship"]["who"]
    before = rows[name.removesuffix(" + temperature")]
    return {**rows[name], "kept_accuracy": before["kept_accuracy"], "auroc": before["auroc"]}


def _values(records: Sequence[Record], way: str, heading: str) -> dict[int, float]:
    figure, scale = COLUMNS[heading]
    return {record["seed"]: scale * (figure(_row(record, way)) or 0.0) for record in records}


def table(records: Sequence[Record]) -> list[list[str]]:
    """Return a row a way to predict, mean ± standard error over the seeds, below a row of heads."""
    lines = [["", *COLUMNS, "passes"]]
    for way in WAYS:
        cells = [cell([*_values(records, way, heading).values()], scale) for heading, (_, scale) in COLUMNS.items()]
        passes = sorted({_row(record, way)["passes"] for record in records})
        lines.append([way, *cells, " to ".join(map(str, dict.fromkeys((passes[0], passes[-1]))))])
    return lines


def differences(records: Sequence[Record]) -> list[list[str]]:
    """Return a row a way, paired differences from the temperature alone, below a row of heads."""
    lines = [[f"minus {TEMPERED}, paired", *COMPARED]]
    for way in list(WAYS)[2:]:
        compared = (_difference(records, way, heading) for heading in COMPARED)
        lines.append([way, *(difference.value + " " + " *"[difference.distinguishable] for difference in compared)])
    return lines


def _difference(records: Sequence[Record], way: str, heading: str) -> PairedDifference:
    return paired_difference(_values(records, way, heading), _values(records, TEMPERED, heading))


def findings(records: Sequence[Record]) -> list[str]:
    """Return what the marks mean, what was shipped, and who is ahead of the temperature by more than an error."""
    shipped = "; ".join(f"seed {record['seed']}: {record['ship']['who']}" for record in records)
    ahead = [way for way in list(WAYS)[2:] if all(_ahead(records, way, heading) for heading in COMPARED)]
    best = f"Ahead of {TEMPERED} by more than a standard error in both: {'; '.join(ahead) or 'nothing'}."
    if SHIPPED not in ahead:
        best += " What adopt ships is not."
    return [
        f"ACC in percent; mean ± standard error over {len(records)} seeds; *: p < .05 in a paired t-test.",
        f"Shipped, by {VALIDATION} validation images: {shipped}.",
        best,
    ]


def _ahead(records: Sequence[Record], way: str, heading: str) -> bool:
    difference = _difference(records, way, heading)
    return -difference.difference > (difference.standard_error or 0.0)


def text(records: Sequence[Record]) -> str:
    """Return the tables and findings as plain text."""
    tables = ("\n".join(aligned(lines, left=1)) for lines in (table(records), differences(records)))
    return "\n\n".join([*tables, "\n".join(findings(records))])
