"""Sharing: the weights of a Bayesian network as a small codebook of Gaussians in the plane of (mean, deviation)."""

from peerbayes.sharing.build import Sharing, gradient_statistic, share, shared_weights
from peerbayes.sharing.clustering import em, kmeans
from peerbayes.sharing.gaussians import Components, log_density, mahalanobis, merged, wasserstein2
from peerbayes.sharing.merging import merge
from peerbayes.sharing.moments import components_of
from peerbayes.sharing.neighbours import nearest
from peerbayes.sharing.outliers import blends, outliers, steepest
from peerbayes.sharing.peer import blank_shared, shared_of
from peerbayes.sharing.thrift import thrifty
from peerbayes.sharing.trained import merge_trained

__all__ = [
    "Components",
    "Sharing",
    "blank_shared",
    "blends",
    "components_of",
    "em",
    "gradient_statistic",
    "kmeans",
    "log_density",
    "mahalanobis",
    "merge",
    "merge_trained",
    "merged",
    "nearest",
    "outliers",
    "share",
    "shared_of",
    "shared_weights",
    "steepest",
    "thrifty",
    "wasserstein2",
]
