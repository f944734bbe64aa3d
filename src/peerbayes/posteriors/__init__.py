"""Posteriors: distributions over a network's weights."""

from typing import Any

from peerbayes.lazy import lazy
from peerbayes.posteriors.base import Point, Posterior
from peerbayes.posteriors.certificate import Certificate, CoveragePromise, RiskPromise
from peerbayes.posteriors.flat_network import Provenance, Weights
from peerbayes.posteriors.laplace import Laplace
from peerbayes.posteriors.mc_dropout import MCDropout
from peerbayes.posteriors.mean_field import MeanField
from peerbayes.posteriors.parameters import Predicate, conv_and_linear
from peerbayes.posteriors.rank_one import RankOne
from peerbayes.posteriors.swag import Swag

__all__ = [
    "Certificate",
    "CoveragePromise",
    "Laplace",
    "MCDropout",
    "MeanField",
    "Point",
    "Posterior",
    "Predicate",
    "Provenance",
    "RankOne",
    "RiskPromise",
    "Swag",
    "Weights",
    "conv_and_linear",
]

# Names that moved to other rooms.
_elsewhere, _ = lazy(
    __name__,
    {
        "Codebook": "codebook.book",
        "Prediction": "inference.prediction",
        "Shared": "codebook.shared",
        "predict": "inference.prediction",
        "predict_split": "inference.prediction",
        "recalibrate": "inference.batch_norm",
    },
)


def __getattr__(name: str) -> Any:
    return _elsewhere(name)
