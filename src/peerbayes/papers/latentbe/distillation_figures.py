"""Figures of distillation, and of entropies out of distribution, with their numbers for JSON."""

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
from peerbayes.engine.perturbation import PICKS, Perturbation
from peerbayes.engine.processes import pick_device
from peerbayes.engine.teachers import Teachers, all_logits
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

POINTS = tuple(tenth / 10 for tenth in range(11))
IMAGES = 1000  # of a split, for the loss between networks and for perturbations
PAIRS = 6  # of networks, at most
BAND = 0.15  # opacity of the range over pairs
WHO = ("teachers", "members")
NOTES = (
    *(f"distil.{who}_apart" for who in WHO),
    *(f"perturb.{who}_{when}" for who in WHO for when in ("before", "after")),
)  # of an epoch
KINDS: tuple[Kind, ...] = ("gaussian", "ods", "conf_ods", "tdiv", "tdiv_sdiv", "bald")


def line(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """Return the test loss along the line between two networks of a run: a student's members, or its peers.

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
    return {"split": "test", "points": list(POINTS), "series": _with_unique_labels(series)}


def _ends(run: Run, device: torch.device) -> tuple[Posterior, list[Mapping[str, Tensor]]]:
    """Return networks of one architecture in a run, as tensors by name, and a posterior over that architecture."""
    peers = {name: run[name].to(device) for name in run}
    first = next(iter(peers.values()))
    if len(peers) == 1 and first.members > 1:
        return first, [first.member(number) for number in range(first.members)]
    if len(peers) < 2 or any(peer.layout.shapes != first.layout.shapes for peer in peers.values()):
        raise InputError(f"{run.folder}: expected a rank-one student, or several peers of one network")
    return first, [dict(peer.centre()) | dict(peer.network.named_buffers()) for peer in peers.values()]


def diversity(folders: Iterable[str | Path]) -> Record:
    """Return the pairwise KL of teachers and of members over the epochs, on training images.

    Also before and after the recipe's perturbation of training images, in evaluation mode. None where an epoch has no
    such figure.
    """
    series: list[Record] = []
    for run in open_runs(folders, finished=False):
        lines, before = run.metrics, len(series)
        for name in run:
            notes = [line["peers"].get(name, {}).get("notes", {}) for line in lines]
            present = [key for key in NOTES if any(key in note for note in notes)]
            if present:
                values = {key.partition(".")[2]: [note.get(key) for note in notes] for key in present}
                label = _label(run) + (f", {name}" if len(run) > 1 else "")
                series.append({"label": label, "folder": str(run.folder), **values})
        if len(series) == before:
            raise InputError(f"{run.folder}: was not distilled from several teachers, so it has no pairwise KL")
    return {"series": _with_unique_labels(series)}


def perturbations(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """Return the pairwise KL of teachers and of members, on training images and after each kind of perturbation.

    Kinds that compare two teachers need teachers of one architecture; those of members need one for each teacher.

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
            raise InputError(f"{run.folder}: was trained on texts, which cannot be perturbed; expected a run on images")
        name = next(iter(run))
        student = run[name].to(where)
        images = to_unit(_some(loaded, "train", where)[0])
        kinds = [kind for kind in KINDS if teachers.alike or kind not in PICKS]
        kinds = [kind for kind in kinds if kind != "tdiv_sdiv" or student.members == len(teachers)]
        distances = {"as they are": _pairwise_kl(images, teachers, student)}
        for kind in kinds:
            perturb = Perturbation(_as_in(run, kind), teachers, {name: student}, run.seed)
            distances[kind] = _pairwise_kl(perturb.in_parts(images, 0, teachers.tensors(0)), teachers, student)
        series.append({"label": _label(run), "folder": str(run.folder), "images": len(images), "kinds": distances})
    return {"split": "training", "series": _with_unique_labels(series)}


def _as_in(run: Run, kind: Kind) -> Perturb:
    """Return a kind of perturbation with the run's options, or at its temperature of distillation."""
    stage = run.recipe.stages[-1]
    if stage.perturb is not None and stage.perturb.kind == kind:
        return stage.perturb
    return Perturb(kind=kind, temperature=stage.terms.get("distil", {}).get("temperature", 1.0))


def _pairwise_kl(images: Tensor, teachers: Teachers, student: Posterior) -> Record:
    logits = all_logits(images, teachers, teachers.tensors(0), student)
    return {who: pairwise_diversity(values.log_softmax(-1)) for who, values in logits.items()}


def _some(loaded: Dataset, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
    chosen = getattr(loaded, split)
    order = permutation(Address(0, "data", "distilled"), len(chosen), "cpu")[:IMAGES]
    images, labels = chosen.batch(order, device)
    return images, labels


def _label(run: Run) -> str:
    return f"{run.recipe.method}, seed {run.seed}"


def _with_unique_labels(series: Sequence[Record]) -> list[Record]:
    """Return the series, with folder names in labels that are not unique."""
    labels = [curve["label"] for curve in series]
    return [
        curve | {"label": f"{curve['label']} ({Path(curve['folder']).name})"}
        if labels.count(curve["label"]) > 1
        else curve
        for curve in series
    ]


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw_line(record: Record) -> Figure:
    """Draw the loss between networks: a line for each run with its barrier, and a band over several pairs."""
    figure, ((axes,),) = panels(1, 1, 5.2, 3.8)
    for curve, colour in zip(record["series"], itertools.cycle(COLOURS)):
        label = f"{curve['label']}: barrier {curve['barrier']['mean']:.3g}"
        axes.plot(record["points"], curve["loss"]["mean"], "o-", color=colour, label=label, markersize=3)
        low, high = curve["loss"]["low"], curve["loss"]["high"]
        axes.fill_between(record["points"], low, high, color=colour, alpha=BAND, linewidth=0)
    if several := sorted({curve["pairs"] for curve in record["series"] if curve["pairs"] > 1}):
        words = f"lowest to highest of {' or '.join(map(str, several))} pairs; the line is their mean"
        axes.fill_between([], [], [], color="black", alpha=BAND, linewidth=0, label=words)
    axes.set_xlabel("from one network to another")
    axes.set_ylabel("test loss (nats per image)")
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_diversity(record: Record) -> Figure:
    """Draw the pairwise KL of teachers (dashed) and members (solid) over the epochs, a colour for each run.

    Runs with perturbed images add two panels: the change of each KL by the perturbation.
    """
    moved = [who for who in WHO if any(f"{who}_after" in curve for curve in record["series"])]
    figure, ((axes, *change_panels),) = panels(1, 1 + len(moved), 5.2, 3.8)
    for curve, colour in zip(record["series"], itertools.cycle(COLOURS)):
        for who, style in zip(WHO, ("--", "-"), strict=True):
            _over_epochs(axes, curve.get(f"{who}_apart"), style, color=colour, label=f"{curve['label']}, {who}")
        for panel, who in zip(change_panels, moved, strict=True):
            both = zip(curve.get(f"{who}_before", ()), curve.get(f"{who}_after", ()), strict=True)
            change = [None if before is None else after - before for before, after in both]
            _over_epochs(panel, change, "-", color=colour, label=curve["label"])
    axes.set_ylabel("KL between two (nats per image)")
    scale_by_logarithm(axes)
    for panel, who in zip(change_panels, moved, strict=True):
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_ylabel(f"change of KL between two {who} (nats)")
    for panel in (axes, *change_panels):
        name_epochs(panel)
        panel.legend(frameon=False, fontsize=7)
    return figure


def _over_epochs(axes: Any, values: Sequence[float | None] | None, style: str, **look: Any) -> None:
    measured = {epoch: value for epoch, value in enumerate(values or (), 1) if value is not None}
    if measured:
        axes.plot(list(measured), list(measured.values()), style, **look)


def draw_perturbations(record: Record) -> Figure:
    """Draw the pairwise KL of teachers and of members, without and with each perturbation, a colour for each run."""
    figure, (row,) = panels(1, 2, 5.2, 3.8)
    coloured = list(zip(record["series"], itertools.cycle(COLOURS)))
    for axes, who in zip(row, WHO, strict=True):
        shown = [(curve, colour) for curve, colour in coloured if who in curve["kinds"]["as they are"]]
        # Not every run has every kind: each kind keeps one position.
        names = [name for name in ("as they are", *KINDS) if any(name in curve["kinds"] for curve, _ in shown)]
        width = 1 / (len(shown) + 1)
        for number, (curve, colour) in enumerate(shown):
            positions = [names.index(kind) + number * width for kind in curve["kinds"]]
            heights = [values[who] for values in curve["kinds"].values()]
            axes.bar(positions, heights, width, color=colour, label=curve["label"])
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
    """Return shares of images by predictive entropy, on the test split and out of distribution; means over seeds.

    Predictions are those of `peerbayes evaluate`.

    Args:
        folders: run folders, or folders of them.
        ood: out-of-distribution data sets; by default those of the recipes.
        by_peer: each peer, not their ensemble.
        device: where to predict.
        root: the data root.
    """
    runs = open_runs(folders)
    names = list(ood) or list(dict.fromkeys(name for r in runs for name in r.recipe.evaluation.out_of_distribution))
    if not names:
        raise InputError("figure entropy: no recipe names an out-of-distribution data set; give one by --ood")
    loaded, records = DataCache(root), []
    for run in runs:
        data = loaded.of(run)
        record = evaluate(run, out_of_distribution=names, data=data, device=device, root=root)
        records.append({**record, "folder": str(run.folder)})
    series = []
    for group in grouped(records).values():
        peers = [peer["name"] for peer in group[0]["peers"]]
        ensemble = len(peers) > 1 and not by_peer
        for index, name in enumerate([ENSEMBLE] if ensemble else peers):
            evaluated = [record["ensemble"] if ensemble else record["peers"][index] for record in group]
            label = title(group[0]["method"]) + (f" {name}" if by_peer and len(peers) > 1 else "")
            seeds = [record["seed"] for record in group]
            outside = {other: _over_seeds([evaluation[OUTSIDE][other] for evaluation in evaluated]) for other in names}
            about = {key: group[0][key] for key in ("dataset", "network")}
            series.append({"label": label, **about, "peer": name, "seeds": seeds, "outside": outside})
    return {"split": "test", "series": series}


def _over_seeds(scores: Sequence[Record]) -> Record:
    auroc = summarise([figures["auroc"] for figures in scores])
    shares = entropy_shares([figures["entropy"] for figures in scores])
    return {**shares, "auroc": {"mean": auroc.mean, "standard_error": auroc.standard_error}}


def draw_entropy(record: Record) -> Figure:
    """Draw histograms in (blue) and out of distribution (red): a column for each run, a row for each data set."""
    names = list(record["series"][0]["outside"])
    figure, rows = panels(len(names), len(record["series"]), 3.2, 2.8)
    for row, name in zip(rows, names, strict=True):
        for axes, curve in zip(row, record["series"], strict=True):
            outside = curve["outside"][name]
            labels = f"in: {curve['dataset']}", f"out: {Path(name).stem}"
            for key, label, colour in zip(("inside", "outside"), labels, COLOURS, strict=False):
                shares = [100 * share for share in outside[key]]
                axes.stairs(shares, outside["edges"], color=colour, fill=True, alpha=0.45, label=label)
                axes.stairs(shares, outside["edges"], color=colour, linewidth=1)
            axes.sharey(row[0])  # heights are to be compared
            axes.set_title(f"{curve['label']}: AUROC {outside['auroc']['mean']:.3f}", fontsize=9)
            axes.set_xlabel("entropy (nats)")
            axes.legend(frameon=False, fontsize=7)
        row[0].set_ylabel("images (%)")
    return figure
