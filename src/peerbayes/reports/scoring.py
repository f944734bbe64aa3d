"""What predictions are worth, of labels: the figures of a record, also on other data sets and corrupted images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from peerbayes import metrics
from peerbayes.data.dataset import Dataset
from peerbayes.data.datasets.cifar_c import load_corrupted
from peerbayes.data.splits import ArraySplit, Split
from peerbayes.data.transforms.corrupt import COMMON, SEVERITIES, corrupt
from peerbayes.errors import InputError
from peerbayes.inference.batch_norm import recalibrate
from peerbayes.inference.prediction import entropy_of, mean_of
from peerbayes.math.noise import FIXED, Address
from peerbayes.metrics.calibration import TEMPERATURE_WIDTH, Reliability
from peerbayes.posteriors.base import Point, Posterior
from peerbayes.reports.record import MIXED, Record


def scored(
    log_p: Tensor,
    labels: Tensor,
    disagreement: Tensor,
    stochastic: bool,
    bins: int,
    fractions: Sequence[float],
) -> Record:
    """Return the figures of predictions that a record has for a peer.

    Args:
        log_p: log-probabilities (N, C).
        labels: (N,).
        disagreement: (N,), 0 where there are no draws to disagree.
        stochastic: whether there are; images are ranked by disagreement then, else by entropy.
        bins: of calibration errors.
        fractions: shares of images to keep.
    """
    p = log_p.exp()
    diagram = metrics.reliability(p, labels, bins)
    kept = selective(log_p, disagreement, labels, fractions)
    return {
        "accuracy": metrics.accuracy(p, labels),
        "nll": metrics.nll_from_log(log_p, labels),
        "ece": diagram.error,
        "adaptive_ece": metrics.adaptive_ece(p, labels, bins),
        "brier": metrics.brier(p, labels),
        # By disagreement, which a point posterior has not: by its entropy.
        **kept["disagreement" if stochastic else "entropy"],
        "selective": kept,
        "disagreement": float(disagreement.mean()),
        "reliability": binned(diagram),
    }


def binned(diagram: Reliability) -> Record:
    """Return the bins of a reliability diagram for JSON: counts, accuracies and confidences, None in empty ones."""
    return {
        "count": diagram.count.tolist(),
        "accuracy": plain(diagram.accuracy),
        "confidence": plain(diagram.confidence),
    }


def selective(log_p: Tensor, disagreement: Tensor, labels: Tensor, fractions: Sequence[float]) -> Record:
    """Return the area under the risk-coverage curve and the accuracy of the images kept, by entropy and disagreement.

    All images of a point posterior have a disagreement of 0. Ranked by that, any share has the accuracy of all images.

    Args:
        log_p: log p̄ (N, C).
        disagreement: H[p̄] − (1/S) Σ_s H[p_s] (N,).
        labels: (N,).
        fractions: shares to keep.
    """
    correct = log_p.argmax(-1) == labels
    rankings = {"entropy": entropy_of(log_p), "disagreement": disagreement}
    return {
        ranking: {
            "aurc": metrics.aurc(unsure, correct),
            "retention": dict(
                zip(map(str, fractions), metrics.retention_curve(unsure, correct, fractions), strict=True)
            ),
        }
        for ranking, unsure in rankings.items()
    }


def recalibrated(held: Tensor, held_labels: Tensor, log_p: Tensor, labels: Tensor, bins: int) -> Record:
    """Return the figures after temperature scaling, with the temperature that is best on the validation split.

    Args:
        held: log-probabilities of the validation split, (M, C).
        held_labels: of the validation split, (M,).
        log_p: log-probabilities (N, C).
        labels: (N,).
        bins: of the ECE.
    """
    temperature = metrics.fit_temperature(held, held_labels, width=TEMPERATURE_WIDTH)
    tempered = metrics.temper(log_p, temperature)
    return {
        "temperature": temperature,
        "cnll": metrics.nll_from_log(tempered, labels),
        "cece": metrics.ece(tempered.exp(), labels, bins),
    }


def plain(values: Tensor) -> list[float | None]:
    """Return numbers for JSON, with None for NaN."""
    return [None if value != value else value for value in values.tolist()]


def basic_figures(log_p: Tensor, labels: Tensor, bins: int) -> Record:
    """Return accuracy, NLL and ECE of log-probabilities (N, C).

    Args:
        log_p: log-probabilities, (N, C).
        labels: (N,).
        bins: of the ECE.
    """
    return {
        "accuracy": metrics.accuracy(log_p.exp(), labels),
        "nll": metrics.nll_from_log(log_p, labels),
        "ece": metrics.ece(log_p.exp(), labels, bins),
    }


Predict = Callable[[Posterior, str, Split], Tensor]  # log-probabilities (N, C) of a peer, by name, for a split
MADE = "made"  # corruptions made here, not read from a folder
BINS = 30  # of entropy histograms


def judge_outside(log_p: Tensor, outside: Tensor) -> Record:
    """Return how well entropy tells another data set from the test split, with histograms of the entropies.

    Args:
        log_p: log-probabilities (N, C) of the test split.
        outside: log-probabilities (K, C) of the other data set.
    """
    inner, outer = (entropy_of(x) for x in (log_p, outside))
    most = math.log(log_p.shape[1])
    edges = torch.linspace(0, most, BINS + 1)
    counts = [torch.histc(x.float().clamp(0, most), BINS, 0, most).int().tolist() for x in (inner, outer)]
    return {
        "auroc": metrics.auroc(inner, outer),
        "aupr": metrics.aupr(inner, outer),
        "fpr85": metrics.fpr_at_tpr(inner, outer, tpr=0.85),
        "entropy": {"edges": edges.tolist(), "inside": counts[0], "outside": counts[1]},
    }


def judge_corrupted(
    predict: Predict,
    peers: Mapping[str, Posterior],
    loaded: Dataset,
    source: str,
    bins: int,
    temperatures: Mapping[str | None, float | None] = MappingProxyType({}),
) -> dict[str | None, Record]:
    """Return accuracy, NLL and ECE on corrupted test images, by peer; those of all peers as one under None.

    Args:
        predict: makes log-probabilities.
        peers: posteriors by name, on one device.
        loaded: the data set.
        source: ``"made"``, ``"mixed"`` (each image by one of them), or a folder of the official arrays (CIFAR-10-C,
            CIFAR-100-C).
        bins: of the ECE.
        temperatures: by peer, and of all as one under None, where they are known.
    """
    by_peer: dict[str | None, dict[str, list[Record]]] = {}
    device = next(iter(peers.values())).device
    for name, split in _corrupted(loaded, source, device):
        assert split.labels is not None
        log_p: dict[str | None, Tensor] = {peer: predict(peers[peer], peer, split) for peer in peers}
        if len(peers) > 1:
            log_p[None] = mean_of(torch.stack(list(log_p.values())))
        for peer, values in log_p.items():
            by_peer.setdefault(peer, {}).setdefault(name, []).append(basic_figures(values, split.labels, bins))
            if (temperature := temperatures.get(peer)) is not None:
                tempered = basic_figures(metrics.temper(values, temperature), split.labels, bins)
                by_peer[peer][name][-1] |= {"cnll": tempered["nll"], "cece": tempered["ece"]}
    return {peer: _averaged(by_type, source) for peer, by_type in by_peer.items()}


def check_corrupted(loaded: Dataset, source: str) -> None:
    """Refuse corrupted images that can't be had, before anything is evaluated.

    Args:
        loaded: the data.
        source: ``made``, ``mixed``, or a folder of the official arrays.
    """
    if loaded.vocabulary is not None:
        raise InputError(f"{loaded.name} holds texts, expected images to corrupt")
    if source in (MADE, MIXED):
        for name in COMMON:
            _made(loaded.test.batch(torch.arange(1), torch.device("cpu"))[0], loaded, name, 1)
        return
    for name in COMMON:
        _fitting(load_corrupted(source, name, 1), loaded, source)


def _corrupted(loaded: Dataset, source: str, device: torch.device) -> Iterator[tuple[str, Split]]:
    if source == MIXED:
        images, labels = loaded.test.batch(torch.arange(len(loaded.test)), device)
        every = [(name, severity) for name in COMMON for severity in range(1, SEVERITIES + 1)]
        for index, (name, severity) in enumerate(every[: len(images)]):
            rows = torch.arange(index, len(images), len(every), device=device)
            images[rows] = _made(images[rows], loaded, name, severity)
        yield MIXED, ArraySplit(images, labels.cpu())
        return
    for name in COMMON:
        for severity in range(1, SEVERITIES + 1):
            if source != MADE:
                yield name, _fitting(load_corrupted(source, name, severity), loaded, source)
                continue
            images, labels = loaded.test.batch(torch.arange(len(loaded.test)), device)
            yield name, ArraySplit(_made(images, loaded, name, severity), labels.cpu())


def _made(images: Tensor, loaded: Dataset, name: str, severity: int) -> Tensor:
    make = functools.partial(corrupt, name=name, severity=severity, address=Address(FIXED, "data", "corrupt"))
    try:
        return torch.cat([make(part, first=2500 * index) for index, part in enumerate(images.split(2500))])
    except InputError as error:
        raise InputError(f"corrupted images can't be made of {loaded.name}: {error}") from None


def _fitting(split: ArraySplit, loaded: Dataset, source: str) -> ArraySplit:
    assert split.labels is not None
    most = int(split.labels.max())
    if most >= loaded.classes or split.shape != loaded.shape:
        raise InputError(
            f"{source}: its images have shape {split.shape} and classes up to {most}, but {loaded.name} has images of "
            f"shape {loaded.shape} and {loaded.classes} classes"
        )
    return split


def _averaged(by_type: Mapping[str, list[Record]], source: str) -> Record:
    every = [figures for severities in by_type.values() for figures in severities]
    means = {key: sum(row[key] for row in every) / len(every) for key in every[0]}
    types = {name: {key: [row[key] for row in severities] for key in means} for name, severities in by_type.items()}
    return {**means, "source": source, "by_type": types}


RECALIBRATED = "recalibrated"  # with batch-norm's statistics estimated anew on the training images


def predict_averages(
    posterior: Posterior,
    name: str,
    loaded: Dataset,
    augment: Sequence[str],
    predict: Predict,
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return what each average of a posterior predicts, as it is and recalibrated, by the way it is made.

    Args:
        posterior: where it is; it is not changed.
        name: its name.
        loaded: the data set.
        augment: how the training images were augmented, as they are for new statistics of batch-norm.
        predict: makes log-probabilities.

    Returns:
        Log-probabilities (N, C) of the test split and, where there is one, the validation split.
    """
    predicted = {}
    for merge in posterior.averages:
        network = posterior.average(merge)
        for way in (merge, f"{merge}, {RECALIBRATED}"):
            if way != merge:
                recalibrate(network, loaded.train, augment=augment)
            point = Point(network)
            held = None if loaded.validation is None else predict(point, name, loaded.validation)
            predicted[way] = predict(point, name, loaded.test), held
    return predicted
