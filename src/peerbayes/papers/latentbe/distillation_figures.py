"""Figures of distillation, and of how unsure runs are out of distribution; the numbers behind them, ready for JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from peerbayes.data.dataset import Dataset
from peerbayes.engine.processes import pick_device
from peerbayes.engine.teachers import PICKS, Perturbation, Teachers, all_logits
from peerbayes.errors import InputError
from peerbayes.math.noise import Address, permutation
from peerbayes.metrics.flatness import barrier, loss_between
from peerbayes.metrics.scores import pairwise_diversity
from peerbayes.metrics.spread import summarise
from peerbayes.networks.inputs import to_unit
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.settings import Kind, Perturb
from peerbayes.reports.evaluating import evaluate
from peerbayes.reports.figures import COLOURS, entropy_shares, name_epochs, panels, scale_by_logarithm
from peerbayes.reports.groups import open_runs
from peerbayes.reports.record import Record
from peerbayes.reports.tables import ENSEMBLE, OUTSIDE, grouped, title
from peerbayes.runs.building import build_teachers
from peerbayes.runs.executor import DataCache
from peerbayes.runs.plan import parents_of
from peerbayes.runs.run import Run

POINTS = tuple(place / 10 for place in range(11))
IMAGES = 1000  # of a split, that the loss between networks and the perturbations are measured on
PAIRS = 6  # of networks, at most
BAND = 0.15  # how dark the range over pairs is
WHO = ("teachers", "members")
NOTES = (
    *(f"distil.{who}_apart" for who in WHO),
    *(f"perturb.{who}_{when}" for who in WHO for when in ("before", "after")),
)  # of an epoch
KINDS: tuple[Kind, ...] = ("gaussian", "ods", "conf_ods", "tdiv", "tdiv_sdiv", "bald")


def line(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """Loss on the test split along the line between two networks of a run: a student's members, or its peers.

    Args:
        folders: run folders, or folders of them.
        device: where to predict.
        root: the data root.
    """
    where, series = pick_device(device), []
    for run in open_runs(folders):
        posterior, ends = _ends(run, where)
        loaded = run.data(root)
        data = _some(loaded, "test", where)
        pairs = list(itertools.islice(itertools.combinations(ends, 2), PAIRS))
        losses = torch.stack([loss_between(posterior, a, b, data, POINTS) for a, b in pairs])
        heights = [barrier(loss, POINTS) for loss in losses]
        band = {"mean": losses.mean(0).tolist(), "low": losses.amin(0).tolist(), "high": losses.amax(0).tolist()}
        about = {"label": _label(run), "folder": str(run.folder), "pairs": len(pairs), "images": len(data[1])}
        series.append({**about, "loss": band, "barrier": {"mean": mean(heights), "highest": max(heights)}})
    return {"split": "test", "points": list(POINTS), "series": _told_apart(series)}


def _ends(run: Run, device: torch.device) -> tuple[Posterior, list[Mapping[str, Tensor]]]:
    """Return the networks of a run that have one form, as tensors by name, and a posterior over that form."""
    peers = {name: run[name].to(device) for name in run}
    first = next(iter(peers.values()))
    if len(peers) == 1 and first.members > 1:
        return first, [first.member(number) for number in range(first.members)]
    if len(peers) < 2 or any(peer.layout.shapes != first.layout.shapes for peer in peers.values()):
        raise InputError(f"{run.folder}: expected a rank-one student, or several peers of one network")
    return first, [dict(peer.centre()) | dict(peer.network.named_buffers()) for peer in peers.values()]


def diversity(folders: Iterable[str | Path]) -> Record:
    """How far apart teachers and members are over the epochs: the mean KL of pairs, for the images that were learnt.

    And for training images before and after the step that the recipe perturbs them by, in evaluation mode. None where
    an epoch has no such figure.
    """
    series: list[Record] = []
    for run in open_runs(folders, finished=False):
        lines, before = run.metrics, len(series)
        for name in run:
            notes = [line["peers"].get(name, {}).get("notes", {}) for line in lines]
            known = [key for key in NOTES if any(key in own for own in notes)]
            if known:
                found = {key.partition(".")[2]: [own.get(key) for own in notes] for key in known}
                label = _label(run) + (f", {name}" if len(run) > 1 else "")
                series.append({"label": label, "folder": str(run.folder), **found})
        if len(series) == before:
            raise InputError(f"{run.folder}: was not distilled from several teachers, so nobody was apart")
    return {"series": _told_apart(series)}


def perturbations(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """How far apart teachers and members are for training images as they are, and after each kind of step.

    Of the kinds that are possible: two of the teachers can't be compared where their networks differ, nor members
    where there is not one for each teacher.

    Args:
        folders: run folders, or folders of them.
        device: where to predict.
        root: the data root.
    """
    where, series = pick_device(device), []
    for run in open_runs(folders):
        loaded = run.data(root)
        teachers = build_teachers(parents_of(run), loaded, where)
        if teachers is None or len(teachers) < 2:
            raise InputError(f"{run.folder}: expected a student of two teachers or more")
        if loaded.vocabulary is not None:
            raise InputError(f"{run.folder}: learnt texts, which take no steps: expected a run that learnt images")
        name = next(iter(run))
        student = run[name].to(where)
        images = to_unit(_some(loaded, "train", where)[0])
        kinds = [kind for kind in KINDS if teachers.alike or kind not in PICKS]
        kinds = [kind for kind in kinds if kind != "tdiv_sdiv" or student.members == len(teachers)]
        distances = {"as they are": _apart(images, teachers, student)}
        for kind in kinds:
            perturb = Perturbation(_as_in(run, kind), teachers, {name: student}, run.seed)
            distances[kind] = _apart(perturb.in_parts(images, 0, teachers.tensors(0)), teachers, student)
        series.append({"label": _label(run), "folder": str(run.folder), "images": len(images), "kinds": distances})
    return {"split": "training", "series": _told_apart(series)}


def _as_in(run: Run, kind: Kind) -> Perturb:
    """Return a kind of step as the run has taken it, or would have: at the temperature that it was distilled at."""
    stage = run.recipe.stages[-1]
    if stage.perturb is not None and stage.perturb.kind == kind:
        return stage.perturb
    return Perturb(kind=kind, temperature=stage.terms.get("distil", {}).get("temperature", 1.0))


def _apart(images: Tensor, teachers: Teachers, student: Posterior) -> Record:
    logits = all_logits(images, teachers, teachers.tensors(0), student)
    return {who: pairwise_diversity(found.log_softmax(-1)) for who, found in logits.items()}


def _some(loaded: Dataset, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
    chosen = getattr(loaded, split)
    order = permutation(Address(0, "data", "distilled"), len(chosen), "cpu")[:IMAGES]
    images, labels = chosen.batch(order, device)
    return images, labels


def _label(run: Run) -> str:
    return f"{run.recipe.method}, seed {run.seed}"


def _told_apart(series: Sequence[Record]) -> list[Record]:
    """Return the series with their folders' names in labels that would be those of others, too."""
    labels = [curve["label"] for curve in series]
    return [
        curve | {"label": f"{curve['label']} ({Path(curve['folder']).name})"}
        if labels.count(curve["label"]) > 1
        else curve
        for curve in series
    ]


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw_line(found: Record) -> Figure:
    """Loss between networks; a line a run, with the height of the barrier, and a band where there are several pairs."""
    figure, ((axes,),) = panels(1, 1, 5.2, 3.8)
    for one, colour in zip(found["series"], itertools.cycle(COLOURS)):
        label = f"{one['label']}: barrier {one['barrier']['mean']:.3g}"
        axes.plot(found["points"], one["loss"]["mean"], "o-", color=colour, label=label, markersize=3)
        low, high = one["loss"]["low"], one["loss"]["high"]
        axes.fill_between(found["points"], low, high, color=colour, alpha=BAND, linewidth=0)
    if several := sorted({one["pairs"] for one in found["series"] if one["pairs"] > 1}):
        words = f"lowest to highest of {' or '.join(map(str, several))} pairs; the line is their mean"
        axes.fill_between([], [], [], color="black", alpha=BAND, linewidth=0, label=words)
    axes.set_xlabel("from one network to another")
    axes.set_ylabel("test loss (nats per image)")
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_diversity(found: Record) -> Figure:
    """Teachers (dashed) and members (solid) apart over the epochs; a colour a run.

    Where images were perturbed, two more panels: how much further apart a step of images takes each of them.
    """
    moved = [who for who in WHO if any(f"{who}_after" in one for one in found["series"])]
    figure, ((axes, *others),) = panels(1, 1 + len(moved), 5.2, 3.8)
    for one, colour in zip(found["series"], itertools.cycle(COLOURS)):
        for who, style in zip(WHO, ("--", "-"), strict=True):
            _over_epochs(axes, one.get(f"{who}_apart"), style, color=colour, label=f"{one['label']}, {who}")
        for place, who in zip(others, moved, strict=True):
            both = zip(one.get(f"{who}_before", ()), one.get(f"{who}_after", ()), strict=True)
            change = [None if before is None else after - before for before, after in both]
            _over_epochs(place, change, "-", color=colour, label=one["label"])
    axes.set_ylabel("KL between two (nats per image)")
    scale_by_logarithm(axes)
    for place, who in zip(others, moved, strict=True):
        place.axhline(0, color="black", linewidth=0.8)
        place.set_ylabel(f"change of KL between two {who} (nats)")
    for place in (axes, *others):
        name_epochs(place)
        place.legend(frameon=False, fontsize=7)
    return figure


def _over_epochs(axes: Any, values: Sequence[float | None] | None, style: str, **look: Any) -> None:
    known = {epoch: value for epoch, value in enumerate(values or (), 1) if value is not None}
    if known:
        axes.plot(list(known), list(known.values()), style, **look)


def draw_perturbations(found: Record) -> Figure:
    """Teachers and members apart, for images as they are and after each kind of step; a colour a run."""
    figure, (places,) = panels(1, 2, 5.2, 3.8)
    coloured = list(zip(found["series"], itertools.cycle(COLOURS)))
    for axes, who in zip(places, WHO, strict=True):
        shown = [(one, colour) for one, colour in coloured if who in one["kinds"]["as they are"]]
        # Not every run has every kind: each kind has one place for all.
        names = [name for name in ("as they are", *KINDS) if any(name in one["kinds"] for one, _ in shown)]
        width = 1 / (len(shown) + 1)
        for number, (one, colour) in enumerate(shown):
            where = [names.index(kind) + number * width for kind in one["kinds"]]
            heights = [values[who] for values in one["kinds"].values()]
            axes.bar(where, heights, width, color=colour, label=one["label"])
        axes.set_xticks(range(len(names)), [name.replace("_", "−") for name in names], rotation=30)
        axes.set_title(who)
        axes.set_ylabel("KL between two (nats per image)")
        if shown:
            axes.legend(frameon=False, fontsize=7)
    return figure


def entropy(
    folders: Iterable[str | Path],
    ood: Sequence[str] = (),
    by_peer: bool = False,
    device: str = "auto",
    root: str | Path | None = None,
) -> Record:
    """Shares of images by predictive entropy, on the test split and on other data sets; means over seeds.

    Predictions are those of `peerbayes evaluate`. Peers of a run predict as one, unless ``by_peer``. ``ood`` names the
    other data sets; by default they are those of the recipes.

    Args:
        folders: run folders, or folders of them.
        ood: names of data sets out of distribution.
        by_peer: each peer by itself.
        device: where to predict.
        root: the data root.
    """
    runs = open_runs(folders)
    names = list(ood) or list(dict.fromkeys(name for r in runs for name in r.recipe.evaluation.out_of_distribution))
    if not names:
        raise InputError("figure entropy: no recipe names a data set from elsewhere; give one by --ood")
    loaded, records = DataCache(root), []
    for run in runs:
        data = loaded.of(run)
        record = evaluate(run, out_of_distribution=names, data=data, device=device, root=root)
        records.append({**record, "folder": str(run.folder)})
    series = []
    for group in grouped(records).values():
        peers = [peer["name"] for peer in group[0]["peers"]]
        as_one = len(peers) > 1 and not by_peer
        for place, name in enumerate([ENSEMBLE] if as_one else peers):
            judged = [record["ensemble"] if as_one else record["peers"][place] for record in group]
            label = title(group[0]["method"]) + (f" {name}" if by_peer and len(peers) > 1 else "")
            seeds = [record["seed"] for record in group]
            outside = {other: _over_seeds([one[OUTSIDE][other] for one in judged]) for other in names}
            about = {key: group[0][key] for key in ("dataset", "network")}
            series.append({"label": label, **about, "peer": name, "seeds": seeds, "outside": outside})
    return {"split": "test", "series": series}


def _over_seeds(found: Sequence[Record]) -> Record:
    auroc = summarise([figures["auroc"] for figures in found])
    shares = entropy_shares([figures["entropy"] for figures in found])
    return {**shares, "auroc": {"mean": auroc.mean, "standard_error": auroc.standard_error}}


def draw_entropy(found: Record) -> Figure:
    """A column a run, a row a data set from elsewhere: histograms in (blue) and out of distribution (red)."""
    names = list(found["series"][0]["outside"])
    figure, rows = panels(len(names), len(found["series"]), 3.2, 2.8)
    for row, name in zip(rows, names, strict=True):
        for axes, one in zip(row, found["series"], strict=True):
            outside = one["outside"][name]
            labels = f"in: {one['dataset']}", f"out: {Path(name).stem}"
            for key, label, colour in zip(("inside", "outside"), labels, COLOURS, strict=False):
                shares = [100 * share for share in outside[key]]
                axes.stairs(shares, outside["edges"], color=colour, fill=True, alpha=0.45, label=label)
                axes.stairs(shares, outside["edges"], color=colour, linewidth=1)
            axes.sharey(row[0])  # heights are to be compared
            axes.set_title(f"{one['label']}: AUROC {outside['auroc']['mean']:.3f}", fontsize=9)
            axes.set_xlabel("entropy (nats)")
            axes.legend(frameon=False, fontsize=7)
        row[0].set_ylabel("images (%)")
    return figure
