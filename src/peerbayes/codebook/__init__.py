"""Codebooks: the weights of a Bayesian network as few Gaussians in the plane of (mean, standard deviation)."""

from peerbayes.codebook.build import Sharing, gradient_statistic, share, shared_weights
from peerbayes.codebook.clustering import em, kmeans, thrifty
from peerbayes.codebook.merging import components_of, merge
from peerbayes.codebook.neighbours import nearest
from peerbayes.codebook.outliers import blends, outliers, steepest
from peerbayes.codebook.peer import blank_shared, merge_trained, shared_of
from peerbayes.math.gaussians import Components, log_density, mahalanobis, merged, wasserstein2

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
