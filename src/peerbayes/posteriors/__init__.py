"""Posteriors: what is known about a network's weights."""

from peerbayes.posteriors.base import Posterior, Predicate, Weights, conv_and_linear
from peerbayes.posteriors.mean_field import MeanField
from peerbayes.posteriors.point import Point
from peerbayes.posteriors.prediction import Prediction, predict, predict_split

__all__ = [
    "MeanField",
    "Point",
    "Posterior",
    "Predicate",
    "Prediction",
    "Weights",
    "conv_and_linear",
    "predict",
    "predict_split",
]
