"""Posteriors: what is known about a network's weights."""

from peerbayes.posteriors.base import Posterior, Weights
from peerbayes.posteriors.codebook import Codebook
from peerbayes.posteriors.mean_field import MeanField
from peerbayes.posteriors.parameters import Predicate, conv_and_linear
from peerbayes.posteriors.point import Point
from peerbayes.posteriors.prediction import Prediction, predict, predict_split
from peerbayes.posteriors.provenance import Provenance
from peerbayes.posteriors.rank_one import RankOne
from peerbayes.posteriors.recalibration import recalibrate
from peerbayes.posteriors.shared import Shared

__all__ = [
    "Codebook",
    "MeanField",
    "Point",
    "Posterior",
    "Predicate",
    "Prediction",
    "Provenance",
    "RankOne",
    "Shared",
    "Weights",
    "conv_and_linear",
    "predict",
    "predict_split",
    "recalibrate",
]
