"""What predictions are worth, of labels: the figures of a record, whoever made them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from peerbayes import metrics
from peerbayes.inference.prediction import entropy_of
from peerbayes.metrics.calibration import TEMPERATURE_WIDTH, Reliability
from peerbayes.reports.record import Record


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
