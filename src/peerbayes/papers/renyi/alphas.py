"""Numbers of the figures over alphas, for JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean

import torch
from torch import Tensor

from peerbayes.engine.processes import pick_device
from peerbayes.errors import InputError
from peerbayes.math.divergences import renyi
from peerbayes.math.noise import Address, permutation
from peerbayes.metrics.flatness import loss_along, sharpness
from peerbayes.reports.groups import Group, by_experiment, final, gather, over_seeds, read_record
from peerbayes.reports.record import Record, alpha_title
from peerbayes.runs.run import Run

AVERAGE = "average"

ORDERS = (0.0, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0)
FIXED = 0.4  # the probability that the fixed distribution of the divergence figure gives to the first class

DISTANCES = tuple(tenth / 10 for tenth in range(-5, 6))
DIRECTIONS = 10
IMAGES = 512  # of the training split, that flatness is measured on


def divergence() -> Record:
    """D_α(P‖Q) of two-class distributions: over p with Q = (0.4, 0.6), and over q with P = (0.4, 0.6)."""
    points = torch.linspace(0.001, 0.999, 499, dtype=torch.float64)
    moving = torch.stack([points, 1 - points], -1).log()
    fixed = torch.tensor([FIXED, 1 - FIXED], dtype=torch.float64).log()
    return {
        "points": points.tolist(),
        "fixed": [FIXED, 1 - FIXED],
        "over_p": {f"{order:g}": renyi(moving, fixed, order).tolist() for order in ORDERS},
        "over_q": {f"{order:g}": renyi(fixed, moving, order).tolist() for order in ORDERS},
    }


def best_alpha(folders: Iterable[str | Path]) -> Record:
    """Return accuracy against alpha by network and data set, and the alpha with the highest mean."""
    groups = gather(folders)
    split, figure = final(groups)
    experiments = []
    for about, experiment in by_experiment(groups):
        alphas: list[Record] = [
            {"alpha": g.alpha, "accuracy": over_seeds(g.runs, functools.partial(figure, "accuracy"))}
            for g in experiment
        ]
        best = max(alphas, key=lambda row: row["accuracy"]["mean"])["alpha"]
        experiments.append({**about, "best": best, "alphas": alphas})
    return {"split": split, "experiments": experiments}


def spread(folders: Iterable[str | Path]) -> Record:
    """Return how much the peers' predictions on the test split differ, against alpha."""
    groups = gather(folders)
    records = {run.folder: read_record(run) for group in groups for run in group.runs.values()}
    for folder, record in records.items():
        if "cohort" not in record:
            raise InputError(f"{folder}: has one peer; expected runs of several, whose predictions can differ")
    keys = ["pairwise_diversity", "disagreement_rate", "probability_variance"]
    keys = [key for key in keys if all(key in record["cohort"] for record in records.values())]

    def figure(key: str, run: Run) -> float:
        return float(records[run.folder]["cohort"][key])

    experiments = []
    for about, experiment in by_experiment(groups):
        alphas = [
            {"alpha": g.alpha, **{key: over_seeds(g.runs, functools.partial(figure, key)) for key in keys}}
            for g in experiment
        ]
        experiments.append({**about, "alphas": alphas})
    return {"split": "test", "figures": keys, "experiments": experiments}


def grid(folders: Iterable[str | Path]) -> Record:
    """Return NLL and accuracy over the weight ψ of the mutual term and alpha, means over seeds."""
    groups = gather(folders, varied=("alpha", "weight"))
    for group in groups:
        if group.weight is None:
            raise InputError(
                f"{next(iter(group.runs.values())).folder}: has no mutual term, so it cannot be in the grid"
            )
    split, figure = final(groups)
    experiments = []
    for about, experiment_groups in by_experiment(groups):
        alphas = list({alpha_title(group.alpha): group.alpha for group in experiment_groups}.values())
        weights = sorted({group.weight for group in experiment_groups if group.weight is not None})
        cells = {(group.weight, alpha_title(group.alpha)): group for group in experiment_groups}
        experiment: Record = {**about, "alphas": alphas, "weights": weights}
        for key in ("nll", "accuracy"):
            experiment[key] = [
                [
                    over_seeds(cells[cell].runs, functools.partial(figure, key)) if cell in cells else None
                    for cell in ((weight, alpha_title(alpha)) for alpha in alphas)
                ]
                for weight in weights
            ]
        experiments.append(experiment)
    return {"split": split, "experiments": experiments}


def curves(folders: Iterable[str | Path], by_peer: bool = False) -> Record:
    """Return test loss and accuracy over the epochs by alpha: mean, lowest and highest seed.

    Args:
        folders: run folders, or folders of them.
        by_peer: each peer, not their average.
    """
    return _over_epochs(gather(folders), by_peer, ("test_nll", "test_accuracy"), lambda _run, _line, peer: peer)


def gap(folders: Iterable[str | Path], by_peer: bool = False) -> Record:
    """Return training loss, test loss and their difference over the epochs by alpha.

    The training loss is the likelihood term without its weight, the mean over an epoch's steps.

    Args:
        folders: run folders, or folders of them.
        by_peer: each peer, not their average.
    """

    def figures(run: Run, line: Record, peer: Record) -> Record:
        terms = run.recipe.stages[line["stage"] - 1].terms
        weight = terms.get("likelihood", {}).get("weight", 0)
        if weight == 0:
            raise InputError(f"{run.folder}: stage {line['stage']} has no likelihood term, so no training loss")
        train = peer["terms"]["likelihood"] / weight
        return {"train_nll": train, "test_nll": peer["test_nll"], "gap": peer["test_nll"] - train}

    return _over_epochs(gather(folders), by_peer, ("train_nll", "test_nll", "gap"), figures)


def _over_epochs(
    groups: Sequence[Group],
    by_peer: bool,
    keys: Sequence[str],
    figures: Callable[[Run, Record, Record], Record],
) -> Record:
    experiments = []
    for about, experiment in by_experiment(groups):
        series = []
        for group in experiment:
            tables = {seed: _epochs(run, by_peer, keys, figures) for seed, run in sorted(group.runs.items())}
            for peer in dict.fromkeys(peer for table in tables.values() for peer in table):
                series.append({"alpha": group.alpha, "peer": peer, **_band([t[peer] for t in tables.values()], keys)})
        experiments.append({**about, "series": series})
    return {"band": "lowest to highest seed", "experiments": experiments}


def _epochs(
    run: Run, by_peer: bool, keys: Sequence[str], figures: Callable[[Run, Record, Record], Record]
) -> dict[str, dict[int, Record]]:
    """Return the figures of epochs with an evaluation of the test split, by peer (or their average)."""
    lines: dict[str, dict[int, Record]] = {}
    for epoch, line in enumerate(run.metrics, start=1):
        looked = {name: figures(run, line, peer) for name, peer in line["peers"].items() if "test_nll" in peer}
        if looked and not by_peer:
            looked = {AVERAGE: {key: mean(peer[key] for peer in looked.values()) for key in keys}}
        for name, figure in looked.items():
            lines.setdefault(name, {})[epoch] = figure
    if not lines:
        raise InputError(f"{run.folder}: metrics.jsonl has no test figures; train with --set evaluation.test_every=1")
    return lines


def _band(seeds: Sequence[Mapping[int, Record]], keys: Sequence[str]) -> Record:
    # Seeds may have been evaluated after different epochs: those they share count.
    epochs = sorted(set.intersection(*(set(seed) for seed in seeds)))
    band: Record = {"epochs": epochs, "seeds": len(seeds)}
    for key in keys:
        values = [[seed[epoch][key] for seed in seeds] for epoch in epochs]
        band[key] = {name: [of(v) for v in values] for name, of in (("mean", mean), ("low", min), ("high", max))}
    return band


def flatness(
    folders: Iterable[str | Path], device: str | torch.device = "auto", root: str | Path | None = None
) -> Record:
    """Return training loss along random filter-normalised directions around each peer's mean weights, by alpha.

    All networks of one architecture move along the same directions. The band is from the lowest to the highest
    network; the sharpness is the rise at the largest distance, averaged over peers.

    Args:
        folders: run folders, or folders of them.
        device: where to predict.
        root: the data root.
    """
    where = pick_device(device)
    experiments = []
    for about, experiment in by_experiment(gather(folders)):
        first = next(iter(experiment[0].runs.values()))
        loaded = first.data(root)
        count = min(IMAGES, len(loaded.train))
        data = loaded.train.batch(permutation(Address(0, "data", "flatness"), len(loaded.train), "cpu")[:count], where)
        series = [_landscape(group, data, where) for group in experiment]
        experiments.append({**about, "images": count, "series": series})
    return {
        "split": "training",
        "directions": DIRECTIONS,
        "distances": list(DISTANCES),
        "band": "lowest to highest network",
        "experiments": experiments,
    }


def _landscape(group: Group, data: tuple[Tensor, Tensor], device: torch.device) -> Record:
    address = Address(0, "flatness", "direction")
    losses = {
        (seed, name): loss_along(run[name].to(device), data, DISTANCES, DIRECTIONS, address)
        for seed, run in sorted(group.runs.items())
        for name in run
    }
    lines = torch.stack([loss.mean(0) for loss in losses.values()])

    def rise(run: Run) -> float:
        return mean(sharpness(losses[run.seed, name], DISTANCES, DISTANCES[-1]) for name in run)

    band = {"mean": lines.mean(0).tolist(), "low": lines.amin(0).tolist(), "high": lines.amax(0).tolist()}
    return {"alpha": group.alpha, "networks": len(lines), "loss": band, "sharpness": over_seeds(group.runs, rise)}
