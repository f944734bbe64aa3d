"""Tables with error bars: mean ± standard error over seeds, paired differences, and what they could have shown."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerbayes.errors import InputError
from peerbayes.metrics.spread import PairedDifference, paired_difference, summarise
from peerbayes.reports.record import MIXED, Record, alpha_title
from peerbayes.showing import aligned

TITLES = {"dnn": "DNN", "vanilla": "Vanilla", "dml": "DML", "ours": "Ours"}
# Columns of every table of results. A figure of `scoring.scored` needs a line here to be one; records, ensembles and
# corrupted images that lack it have an empty cell.
COLUMNS = {"ACC": ("accuracy", 100.0), "NLL": ("nll", 1.0), "ECE": ("ece", 1.0)}
LAST = {name: COLUMNS[name] for name in ("ACC", "NLL")}  # what is looked at in the last epochs
CALIBRATED = {"cNLL": ("cnll", 1.0), "cECE": ("cece", 1.0)}  # after temperature scaling on the validation split
CORRUPTED, OUTSIDE = "corrupted", "out_of_distribution"  # where a peer's figures on other images stand
RANKINGS = ("entropy", "disagreement")  # by which images are kept
AVERAGED = "averaged"  # where figures of a peer's weights as one network stand
LAST_EPOCHS, RETENTION = "last_epochs", "retention"
HEADINGS = {  # of further tables as text, by their kind
    AVERAGED: "in one pass ({}):",
    LAST_EPOCHS: "{}:",
    RETENTION: "{}:",
    CORRUPTED: "on corrupted images, {}:",
    OUTSIDE: "{} told from the test split by entropy:",
}
DETECTED = {"AUROC": ("auroc", 1.0), "AUPR": ("aupr", 1.0), "FPR85": ("fpr85", 1.0)}  # of images from elsewhere
Columns = Mapping[str, tuple[str, float]]  # by heading: a figure's key, and what it is multiplied by
ONE_SEED = "one seed has no spread: no difference of 1 seed is distinguishable"
AVERAGE, ENSEMBLE = "average", "ensemble"  # of peers: the mean of their figures, and the figures of their mean


@dataclass(frozen=True)
class Row:
    """One line of a table: a method, a peer (or the average over peers), a cell a figure, and the data they are of.

    ``group`` is the method's key in `grouped`.
    """

    method: str
    peer: str
    seeds: int
    cells: tuple[str, ...]
    data: str
    group: str


@dataclass(frozen=True)
class Difference:
    """A method against the one before it: figures by heading, paired over the seeds that both have."""

    names: str
    peers: str
    seeds: int
    figures: Mapping[str, PairedDifference]


@dataclass(frozen=True)
class FurtherTable:
    """A table below that of the test split: records with other figures in the place of those.

    Attributes:
        kind: a key of `HEADINGS`.
        of: what the figures are of: a way, epochs, images, or a data set.
        records: of runs that have such figures.
        columns: keys of figures and their scale, by heading.
    """

    kind: str
    of: str
    records: Sequence[Record]
    columns: Columns


def title(method: str) -> str:
    """Return a method's name as the paper prints it."""
    return TITLES.get(method, method)


def label(record: Record) -> str:
    """Return what tells a record's group apart: its method, with its data and network."""
    return f"{record['dataset']} · {record['network']} · {title(record['method'])}"


def grouped(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records that differ in the seed alone, in the order in which they come.

    A run with other settings, or a second one of the same seed, begins a group of its own: ``Ours (2)``. Those of Rényi
    divergences are told apart by the order: ``Rényi 1.5``, or ``Independent`` for order 0. Where records say in which
    ``folder`` their runs are, groups of one title are told apart by that instead: ``Ours (mine)``.
    """
    groups: dict[str, list[Record]] = {}
    alike: dict[str, dict[str, None]] = {}  # groups by title
    for given in map(_with_order, records):
        record, number = given, 1
        while any(
            r["seed"] == record["seed"] or not _differ_by_seed_alone(r, record) for r in groups.get(key_of(record), [])
        ):
            number += 1
            record = {**given, "method": f"{title(given['method'])} ({number})"}
        groups.setdefault(key_of(record), []).append(record)
        alike.setdefault(title(given["method"]), {})[key_of(record)] = None
    for name, keys in alike.items():
        if len(keys) > 1 and all("folder" in record for key in keys for record in groups[key]):
            for key, folder in zip(keys, _places([groups[key] for key in keys]), strict=True):
                groups[key] = [{**record, "method": f"{name} ({folder})"} for record in groups[key]]
    return groups


def _differ_by_seed_alone(one: Record, two: Record) -> bool:
    """Whether two runs have one recipe, or start from runs of their own seeds each."""
    of_seed = one.get("settings_of_seed")
    return one.get("settings") == two.get("settings") or (
        of_seed is not None and of_seed == two.get("settings_of_seed")
    )


def _places(groups: Sequence[Sequence[Record]]) -> list[str]:
    """Return the folder of each group's runs: by its name, or as it was given where names do not tell them apart."""

    def home(record: Record) -> Path:
        folder = Path(record["folder"])
        return folder.parent if re.fullmatch(r"seed\d+", folder.name) else folder

    ways: list[Callable[[Record], str]]
    ways = [lambda r: home(r).resolve().name, lambda r: str(home(r)), lambda r: str(r["folder"])]
    for way in ways:
        ends = [dict.fromkeys((way(group[0]), way(group[-1]))) for group in groups]
        labels = [" … ".join(both) for both in ends]
        if len(set(labels)) == len(labels):
            break
    return labels


def _with_order(record: Record) -> Record:
    if record["method"] != "renyi" or "alpha" not in record:
        return record
    orders = [lesson["alpha"] for lesson in record.get("lessons", ())] or [record["alpha"]]
    if len(record["peers"]) == 1 or all(order == 0 for order in orders):  # nobody to learn from, or nothing
        return {**record, "method": "Independent"}
    alike = all(order == orders[0] for order in orders)
    return {**record, "method": f"Rényi {alpha_title(orders[0]) if alike else 'by edge'}"}


def key_of(record: Record) -> str:
    """Return a record's key in `grouped`, once it has the name that it gets there."""
    return f"{record['recipe']}\0{label(record)}"


def _values(records: Sequence[Record], peer: str, key: str) -> dict[int, float]:
    """Return a peer's figure by seed, of the records that have it."""
    by_seed: dict[int, float] = {}
    for record in records:
        chosen = [record["ensemble"]] if peer == ENSEMBLE else record["peers"]
        values = [p.get(key) for p in chosen if peer in (AVERAGE, ENSEMBLE, p.get("name"))]
        numbers = [value for value in values if value is not None]
        if numbers and len(numbers) == len(values):
            by_seed[record["seed"]] = sum(numbers) / len(numbers)
    return by_seed


def retention_by(ranking: str, judged: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the accuracy of the images kept by a ranking, by the share kept; None where it was not measured.

    Records without ``selective`` have one ranking: a point's by entropy, and any other's by disagreement.

    Args:
        ranking: ``entropy`` or ``disagreement``.
        judged: the figures of a peer, or of an ensemble.
    """
    if "selective" in judged:
        by_share: dict[str, float] = judged["selective"][ranking]["retention"]
        return by_share
    return judged.get("retention") if (judged.get("disagreement") == 0) == (ranking == "entropy") else None


def retention_headings(records: Sequence[Record]) -> dict[str, tuple[list[Record], Columns]]:
    """Return the records, and columns, of the accuracy of the images kept, by a heading a ranking.

    A single point does not disagree with itself, and is not ranked by that.
    """
    by_heading: dict[str, tuple[list[Record], Columns]] = {}
    for ranking in RANKINGS:
        ranked = [record for record in records if ranking == "entropy" or _disagrees(record)]
        kept = _elsewhere(ranked, functools.partial(retention_by, ranking))
        shares = [set(peer) - {"name"} for record in kept for peer in record["peers"]]
        common = sorted(set.intersection(*shares), key=float) if shares else []
        if common:
            heading = f"accuracy (%) of the images of lowest {ranking}, by the share kept"
            by_heading[heading] = kept, {f"{100 * float(share):g} %": (share, 100.0) for share in common}
    return by_heading


def _disagrees(record: Record) -> bool:
    return "ensemble" in record or any(peer.get("disagreement") != 0 for peer in record["peers"])


def last_headings(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records with means over their last epochs, by a heading; those stand in the place of the figures."""
    by_heading: dict[str, list[Record]] = {}
    for record in records:
        if "last_epochs" in record:
            epochs = record["last_epochs"]["epochs"]
            peers = [{"name": name, **figures} for name, figures in record["last_epochs"]["peers"].items()]
            rest = {key: value for key, value in record.items() if key != "ensemble"}
            heading = f"the mean over the last {epochs} epochs" if epochs > 1 else "the last epoch"
            by_heading.setdefault(f"{heading}, on the test split", []).append(rest | {"peers": peers})
    return by_heading


def sorted_peers(records: Sequence[Record]) -> list[Record]:
    """Return the records with peers by rising accuracy on the test split instead of by name, each record by itself.

    Means over the last epochs, and members as one network, are sorted by their own accuracies. A single peer keeps its
    name.
    """
    return [_sorted_record(record) if len(record["peers"]) > 1 else record for record in records]


def _sorted_record(record: Record) -> Record:
    count = len(record["peers"])
    names = ["worst", *(f"{rank} of {count}" for rank in range(2, count)), "best"]
    peers = sorted(record["peers"], key=lambda peer: peer["accuracy"])
    renamed = {**record, "peers": [{**peer, "name": name} for name, peer in zip(names, peers, strict=True)]}
    if "last_epochs" in record:
        last = sorted(record["last_epochs"]["peers"].values(), key=lambda peer: peer["accuracy"])
        renamed["last_epochs"] = {**record["last_epochs"], "peers": dict(zip(names, last, strict=True))}
    return renamed


def _named(records: Sequence[Record], key: str) -> dict[str, list[Record]]:
    """Return the records with figures under a key and a name in the place of the others, by name."""
    names = dict.fromkeys(name for record in records for peer in record["peers"] for name in peer.get(key, ()))
    by_name = {name: _elsewhere(records, functools.partial(_figures, key, name)) for name in names}
    return {name: those for name, those in by_name.items() if those}


def _figures(key: str, name: str, judged: Record) -> Record | None:
    figures: Record | None = judged.get(key, {}).get(name)
    return figures


def _elsewhere(records: Sequence[Record], figures: Callable[[Record], Record | None]) -> list[Record]:
    moved = []
    for record in records:
        if all(figures(peer) is not None for peer in record["peers"]):
            peers = [{"name": peer["name"], **(figures(peer) or {})} for peer in record["peers"]]
            whole = figures(record.get("ensemble", {}))
            rest = {key: value for key, value in record.items() if key != "ensemble"}
            moved.append(rest | {"peers": peers} | ({} if whole is None else {"ensemble": whole}))
    return moved


def rows(records: Sequence[Record], columns: Columns = COLUMNS) -> list[Row]:
    """Return a row a method and peer, and for several peers one of their average and one of them as an ensemble.

    Args:
        records: of runs.
        columns: keys of figures and their scale, by heading.
    """
    lines = []
    for key, group in grouped(records).items():
        names = [peer["name"] for peer in group[0]["peers"]]
        more = [AVERAGE] if len(names) > 1 else []
        more += [ENSEMBLE] if all("ensemble" in record for record in group) else []
        for peer in [*names, *more]:
            cells = []
            for figure, scale in columns.values():
                values = _values(group, peer, figure).values()
                cells.append(cell([value * scale for value in values], scale) if values else "")
            lines.append(Row(title(group[0]["method"]), peer, len(group), tuple(cells), group[0]["dataset"], key))
    return lines


def cell(values: Sequence[float], scale: float) -> str:
    """Return mean ± standard error over seeds; percentages (scale 100) with two digits, others with three.

    Args:
        values: of a figure, one a seed.
        scale: 100 for percentages, by which they have been multiplied.
    """
    summary = summarise(values)
    digits = 2 if scale == 100 else 3
    text = f"{summary.mean:z.{digits}f}"
    if summary.standard_error is not None:
        text += f" ± {summary.standard_error:.{digits}f}"
    return text


def differences(records: Sequence[Record], columns: Columns = COLUMNS) -> list[str]:
    """Return a sentence for each method against the one before it, paired over the seeds they share.

    Methods with one seed in common are compared, too, but what that is worth is left to `ONE_SEED`.

    Args:
        records: of runs.
        columns: keys of figures and their scale, by heading.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> pb.reports.differences([pb.evaluate(run, device="cpu")])  # of several methods it has sentences
        []
        >>> folder.cleanup()
    """
    sentences = []
    for difference in compared(records, columns):
        parts = [f"{name} {figure.describe(one_seed='')}" for name, figure in difference.figures.items()]
        paired = f"paired over {difference.seeds} seeds" if difference.seeds > 1 else "1 seed"
        sentences.append(f"{', '.join(filter(None, [difference.names, difference.peers, paired]))}: {'; '.join(parts)}")
    return sentences


def compared(records: Sequence[Record], columns: Columns = COLUMNS) -> list[Difference]:
    """Return each method against the one before it, over the seeds they share.

    Args:
        records: of runs.
        columns: keys of figures and their scale, by heading.
    """
    pairs = []
    for before, after, seeds in _neighbours(records):
        figures = {}
        for name, (key, scale) in columns.items():
            a, b = (
                {seed: value * scale for seed, value in _values(group, AVERAGE, key).items()}
                for group in (after, before)
            )
            if a.keys() & b.keys():
                figures[name] = paired_difference(a, b)
        names = f"{title(after[0]['method'])} − {title(before[0]['method'])}"
        peers = "average of peers" if any(len(group[0]["peers"]) > 1 for group in (before, after)) else ""
        pairs.append(Difference(names, peers, seeds, figures))
    return pairs


def _neighbours(records: Sequence[Record]) -> list[tuple[list[Record], list[Record], int]]:
    """Return the groups that follow one another and are of one data set, with how many seeds they share."""
    neighbours = []
    for before, after in itertools.pairwise(grouped(records).values()):
        shared = {r["seed"] for r in before} & {r["seed"] for r in after}
        if shared and before[0]["dataset"] == after[0]["dataset"]:
            neighbours.append((before, after, len(shared)))
    return neighbours


def has_lone_seed(records: Sequence[Record]) -> bool:
    """Return whether any of the differences is that of one seed."""
    return any(seeds == 1 for _, _, seeds in _neighbours(records))


def text_table(
    records: Sequence[Record], calibrated: bool = False, sort_peers: bool = False, retention: bool = False
) -> str:
    """Return the table and the differences as plain text.

    Args:
        records: what to show.
        calibrated: add figures after temperature scaling.
        sort_peers: show peers by rising accuracy instead of by name; see `sorted_peers`.
        retention: add the accuracy of the images of lowest entropy, and of lowest disagreement.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> print(pb.reports.text_table([pb.evaluate(run, device="cpu")]).splitlines()[0].split())
        ['ACC', 'NLL', 'ECE']
        >>> folder.cleanup()
    """
    without = [r["recipe"] for r in records if calibrated and any("cnll" not in peer for peer in r["peers"])]
    if without:
        raise InputError(f"{without[0]}: has no validation split, on which a temperature could be chosen")
    columns = COLUMNS | (CALIBRATED if calibrated else {})
    sections: list[tuple[str, Sequence[Record], Columns]]
    sections = [("", sorted_peers(records) if sort_peers else records, columns)]
    for table in further_tables(records, columns, sort_peers):
        if retention or table.kind != RETENTION:
            sections.append((HEADINGS[table.kind].format(table.of), table.records, table.columns))
    with_data = len({record["dataset"] for record in records}) > 1
    text = [_section(*section, with_data) for section in sections]
    return "\n\n".join(text + [ONE_SEED] * any(has_lone_seed(found) for _, found, _ in sections))


def further_tables(
    records: Sequence[Record], columns: Columns = COLUMNS, sort_peers: bool = False
) -> Iterator[FurtherTable]:
    """Return the tables below that of the test split, in the order of text.

    Args:
        records: of runs.
        columns: of the figures of averaged weights.
        sort_peers: peers by rising accuracy instead of by name; see `sorted_peers`.
    """
    ranked = sorted_peers if sort_peers else list[Record]
    # Peers that are plain networks have no weights to average, and are left out.
    bayesian = [{**record, "peers": [peer for peer in record["peers"] if AVERAGED in peer]} for record in records]
    for way, merged in _named([record for record in bayesian if record["peers"]], AVERAGED).items():
        yield FurtherTable(AVERAGED, way, ranked(merged), columns)
    records = ranked(records)
    for epochs, last in last_headings(records).items():
        yield FurtherTable(LAST_EPOCHS, epochs, last, LAST)
    for kept_by, (kept, shares) in retention_headings(records).items():
        yield FurtherTable(RETENTION, kept_by, kept, shares)
    if corrupted := _elsewhere(records, lambda judged: judged.get(CORRUPTED)):
        yield FurtherTable(CORRUPTED, corruptions(records), corrupted, COLUMNS)
    for other, outside in _named(records, OUTSIDE).items():
        yield FurtherTable(OUTSIDE, other, outside, DETECTED)


def corruptions(records: Sequence[Record]) -> str:
    """Return what the figures on corrupted images are made of, the end of a heading.

    Args:
        records: of evaluations.
    """
    sources = {one["corrupted"].get("source") for record in records for one in record["peers"] if "corrupted" in one}
    each = "each by one of 15 types and 5 severities"
    every = "the mean over 15 types and 5 severities"
    return each if sources == {MIXED} else f"{every} (or {each})" if MIXED in sources else every


def _section(heading: str, records: Sequence[Record], columns: Columns, with_data: bool) -> str:
    lines = [("", *["data"] * with_data, "", *columns)]
    previous = ("", "")
    for row in rows(records, columns):
        first = (row.method, row.data) != previous
        names = [row.method, *[row.data] * with_data]
        lines.append((*(name * first for name in names), row.peer, *row.cells))
        previous = row.method, row.data
    found = differences(records, {name: figure for name, figure in columns.items() if name not in CALIBRATED})
    table = aligned(lines, left=2 + with_data)
    return "\n".join([*([heading] if heading else []), *table, *([""] if found else []), *found])
