"""Runs over alphas and seeds, grouped by network, data and alpha, and what a figure may take from them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean as mean
from typing import Annotated, Any

from pydantic import Field

from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.metrics.spread import summarise
from peerbayes.recipes.settings import CUSTOM
from peerbayes.reports.evaluating import find_runs
from peerbayes.reports.record import Alpha, Record, alpha_title
from peerbayes.runs.plan import folder_of, parents_of
from peerbayes.runs.run import Run, read_json
from peerbayes.schema import Table


@dataclass(frozen=True)
class Group:
    """Runs over seeds of one setting; alpha is 0 and ``weight`` None where there is no mutual term."""

    network: str
    dataset: str
    alpha: Alpha
    weight: float | None
    runs: dict[int, Run] = field(default_factory=dict)


class _Peer(Table):
    accuracy: float
    nll: float


class _Judged(Table):
    """What figures look for in a record."""

    peers: Annotated[list[_Peer], Field(min_length=1)]
    cohort: dict[str, float] | None = None


def gather(folders: Iterable[str | Path], varied: Sequence[str] = ("alpha",)) -> list[Group]:
    """Return the runs in some folders, grouped by network, data, alpha and weight, in that order.

    Runs of one network and data set may differ in the seed and in the ``varied`` options of the mutual term alone; one
    without a mutual term counts as alpha 0, and may have other peers.

    Args:
        folders: run folders, or folders of them.
        varied: options of the mutual term that runs may differ in.
    """
    runs = open_runs(folders, sources=False)
    first: dict[tuple[str, str], Run] = {}
    for run in sorted(runs, key=_has_mutual, reverse=True):
        _check_same(run, first.setdefault(experiment_of(run), run), varied)
    groups: dict[tuple[Any, ...], Group] = {}
    for run in runs:
        mutual = [stage.terms["mutual"] for stage in run.recipe.stages if "mutual" in stage.terms]
        alpha, weight = (mutual[-1]["alpha"], mutual[-1]["weight"]) if mutual else (0.0, None)
        setting = (*experiment_of(run), alpha_title(alpha), weight if "weight" in varied else None)
        group = groups.setdefault(setting, Group(*experiment_of(run), alpha, weight))
        if run.seed in group.runs:
            raise InputError(
                f"{run.folder} and {group.runs[run.seed].folder}: both are alpha {alpha_title(alpha)}, seed {run.seed} "
                f"of {group.network} on {group.dataset}; leave one out"
            )
        group.runs[run.seed] = run
    return sorted(groups.values(), key=_rank)


def open_runs(
    folders: Iterable[str | Path], *, finished: bool = True, sources: bool = True, custom: bool = True
) -> list[Run]:
    """Open the runs in some folders, each once.

    Of a folder of runs, those that can't be looked at are left out with a warning, as long as others are left; a run
    that is named itself has to be finished.

    Args:
        folders: run folders, or folders of runs.
        finished: whether runs have to be.
        sources: whether what other runs of a folder have started from counts, too.
        custom: whether runs with networks of one's own do, which can't be built to be evaluated.
    """
    runs: dict[Path, Run] = {}
    for folder in map(Path, folders):
        opened = [Run(path) for path in find_runs(folder)]
        whys = {run.folder: _why_not(run, finished, custom) for run in opened}
        useful = [run for run in opened if not whys[run.folder]]
        if not useful:
            raise InputError(next(iter(whys.values())))
        for why in filter(None, whys.values()):
            warnings.warn(f"{why}; it is left out", PeerbayesWarning, stacklevel=3)
        if not sources and folder not in whys:
            begun = {folder_of(start).resolve() for run in useful for start in parents_of(run).starts.values()}
            useful = [run for run in useful if run.folder.resolve() not in begun or _has_mutual(run)]
        runs |= {run.folder: run for run in useful}
    return list(runs.values())


def _why_not(run: Run, finished: bool, custom: bool) -> str:
    """Return why a run can't be looked at; nothing if it can."""
    if finished and not run.finished:
        return run.unfinished
    unknown = [peer.name for peer in run.recipe.peers if peer.network == CUSTOM]
    if custom or not unknown or (run.folder / "evaluation.json").is_file():
        return ""
    return f"{run.folder}: peer '{unknown[0]}' has a network of your own"


def by_setting(runs: Iterable[Run]) -> list[dict[int, Run]]:
    """Group runs that differ in the seed, and in what they start from, alone; by seed, in the order they come.

    A second run of the same settings and seed begins a group of its own.
    """
    groups: dict[tuple[Any, ...], dict[int, Run]] = {}
    for run in runs:
        table = _flat(run.recipe.model_dump(exclude_none=True))
        setting = tuple((key, str(value)) for key, value in table if not key.endswith("start_from"))
        number = 0
        while run.seed in groups.get((setting, number), {}):
            number += 1
        groups.setdefault((setting, number), {})[run.seed] = run
    return list(groups.values())


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all tables."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({str(table.get(key)) for table in tables}) > 1]


def experiment_of(run: Run) -> tuple[str, str]:
    """Return the networks and the data set of a run, as figures name them."""
    network = ", ".join(dict.fromkeys(peer.network for peer in run.recipe.peers))
    return network, Path(run.recipe.data.name).stem


def _rank(group: Group) -> tuple[Any, ...]:
    # Plain alphas by value, then schedules by name.
    alpha = (1, 0.0) if isinstance(group.alpha, Mapping) else (0, group.alpha)
    return group.network, group.dataset, *alpha, alpha_title(group.alpha), group.weight or 0.0


def _has_mutual(run: Run) -> bool:
    return any("mutual" in stage.terms for stage in run.recipe.stages)


_LABELS = ("name", "title", "reproduces", "method", "evaluation", "gradient_share_every")


def _check_same(run: Run, other: Run, varied: Sequence[str]) -> None:
    both = _has_mutual(run) and _has_mutual(other)
    mine, theirs = (dict(_flat(r.recipe.model_dump(exclude_none=True))) for r in (run, other))
    for key in dict.fromkeys([*mine, *theirs]):
        parts = key.split(".")
        free = parts[0] in _LABELS or parts[-1] == "start_from" or (not both and parts[0] == "peers")
        if "mutual" in parts:
            free |= not both or parts[parts.index("mutual") + 1] in varied
        if not free and mine.get(key) != theirs.get(key):
            raise InputError(
                f"{run.folder} and {other.folder}: differ in {key} ({mine.get(key)} and {theirs.get(key)}); expected "
                f"runs that differ in {' and '.join(varied)} and the seed alone"
            )


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        yield path, node
        return
    for key, value in items:
        yield from _flat(value, f"{path}.{key}" if path else str(key))


def by_experiment(groups: Sequence[Group]) -> Iterator[tuple[Record, list[Group]]]:
    """Return network and data set, with the groups that they have in common."""
    for (network, dataset), members in itertools.groupby(groups, key=lambda group: (group.network, group.dataset)):
        yield {"network": network, "dataset": dataset}, list(members)


def read_record(run: Run) -> Record:
    """Return what was measured of a run."""
    path = run.folder / "evaluation.json"
    if not path.is_file():
        raise InputError(f"{run.folder}: has no evaluation.json; 'peerbayes evaluate {run.folder}' makes it")
    record = read_json(path)
    _Judged.parse(record, str(path))
    return record


def over_seeds(runs: Mapping[int, Run], value: Callable[[Run], float]) -> Record:
    """Return mean and standard error of a figure over runs by seed, and its value by seed.

    Args:
        runs: by seed.
        value: of a run.
    """
    values = {seed: value(run) for seed, run in sorted(runs.items())}
    summary = summarise(values.values())
    return {"mean": summary.mean, "standard_error": summary.standard_error, "seeds": values}


def final(groups: Sequence[Group]) -> tuple[str, Callable[[str, Run], float]]:
    """Return the split that settings are chosen on, and a run's figure there, averaged over peers.

    That is the validation split, as of the last epoch, where all runs have one; else the test split, of the records.
    """
    runs = [run for group in groups for run in group.runs.values()]
    last = {run.folder: run.metrics[-1]["peers"].values() if run.metrics else () for run in runs}
    if all(peers and all("valid_nll" in peer for peer in peers) for peers in last.values()):
        return "validation", lambda key, run: mean(peer[f"valid_{key}"] for peer in last[run.folder])
    records = {run.folder: read_record(run) for run in runs}
    return "test", lambda key, run: mean(peer[key] for peer in records[run.folder]["peers"])
