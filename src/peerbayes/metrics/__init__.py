"""Metrics: pure functions of predictions and labels, of the loss around trained weights, and of results over seeds."""

from peerbayes.metrics.calibration import (
    ClassConfidence,
    Reliability,
    adaptive_ece,
    confidence_by_class,
    confidence_overall,
    ece,
    fit_temperature,
    reliability,
    temper,
)
from peerbayes.metrics.flatness import barrier, directions, loss_along, loss_between, sharpness
from peerbayes.metrics.ood import aupr, auroc, fpr_at_tpr
from peerbayes.metrics.scores import (
    accuracy,
    aurc,
    brier,
    disagreement_rate,
    nll,
    nll_from_log,
    pairwise_diversity,
    probability_variance,
    retention_curve,
    soft_cross_entropy,
    soft_cross_entropy_from_log,
)
from peerbayes.metrics.spread import PairedDifference, Summary, paired_difference, summarise

__all__ = [
    "ClassConfidence",
    "PairedDifference",
    "Reliability",
    "Summary",
    "accuracy",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "barrier",
    "brier",
    "confidence_by_class",
    "confidence_overall",
    "directions",
    "disagreement_rate",
    "ece",
    "fit_temperature",
    "fpr_at_tpr",
    "loss_along",
    "loss_between",
    "nll",
    "nll_from_log",
    "paired_difference",
    "pairwise_diversity",
    "probability_variance",
    "reliability",
    "retention_curve",
    "sharpness",
    "soft_cross_entropy",
    "soft_cross_entropy_from_log",
    "summarise",
    "temper",
]
