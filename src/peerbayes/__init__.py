"""peerbayes: networks that know when they do not know, trained by learning from one another.

Names are loaded when they are first used, so that ``import peerbayes`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from peerbayes.moved import install

if TYPE_CHECKING:
    from peerbayes import (
        codebook,
        data,
        inference,
        metrics,
        networks,
        papers,
        posteriors,
        reports,
        runs,
        terms,
        training,
    )
    from peerbayes.adopting import Adopted, adopt
    from peerbayes.api.calibrating import calibrate
    from peerbayes.api.compressing import compress
    from peerbayes.api.distilling import distill
    from peerbayes.api.fitting import fit, train
    from peerbayes.codebook.shared import Shared
    from peerbayes.errors import InputError, PeerbayesWarning
    from peerbayes.exporting.export import Exported, export
    from peerbayes.inference.prediction import Prediction
    from peerbayes.math.noise import Address
    from peerbayes.networks.registry import network
    from peerbayes.posteriors.base import Point, Posterior
    from peerbayes.posteriors.flat_network import Weights
    from peerbayes.posteriors.laplace import Laplace
    from peerbayes.posteriors.mc_dropout import MCDropout
    from peerbayes.posteriors.mean_field import MeanField
    from peerbayes.posteriors.rank_one import RankOne
    from peerbayes.posteriors.swag import Swag
    from peerbayes.recipes.recipe import Recipe, load_recipe
    from peerbayes.reports.evaluating import evaluate
    from peerbayes.reports.judging import judge
    from peerbayes.runs.run import Run, load
    from peerbayes.terms.definition import term
    from peerbayes.terms.step import Step
    from peerbayes.training.reporters import ConsoleReporter, Reporter

__version__ = "0.1.0"

_HOMES = {
    "Adopted": "adopting",
    "Address": "math.noise",
    "ConsoleReporter": "training.reporters",
    "Exported": "exporting.export",
    "InputError": "errors",
    "Laplace": "posteriors.laplace",
    "MCDropout": "posteriors.mc_dropout",
    "MeanField": "posteriors.mean_field",
    "PeerbayesWarning": "errors",
    "Point": "posteriors.base",
    "Posterior": "posteriors.base",
    "Prediction": "inference.prediction",
    "RankOne": "posteriors.rank_one",
    "Recipe": "recipes.recipe",
    "Reporter": "training.reporters",
    "Run": "runs.run",
    "Shared": "codebook.shared",
    "Step": "terms.step",
    "Swag": "posteriors.swag",
    "Weights": "posteriors.flat_network",
    "adopt": "adopting",
    "calibrate": "api.calibrating",
    "compress": "api.compressing",
    "distill": "api.distilling",
    "evaluate": "reports.evaluating",
    "export": "exporting.export",
    "fit": "api.fitting",
    "judge": "reports.judging",
    "load": "runs.run",
    "load_recipe": "recipes.recipe",
    "network": "networks.registry",
    "term": "terms.definition",
    "train": "api.fitting",
}
_ROOMS = (
    "codebook",
    "data",
    "inference",
    "metrics",
    "networks",
    "papers",
    "posteriors",
    "reports",
    "runs",
    "terms",
    "training",
)
_MOVED = install()

__all__ = [
    "Address",
    "Adopted",
    "ConsoleReporter",
    "Exported",
    "InputError",
    "Laplace",
    "MCDropout",
    "MeanField",
    "PeerbayesWarning",
    "Point",
    "Posterior",
    "Prediction",
    "RankOne",
    "Recipe",
    "Reporter",
    "Run",
    "Shared",
    "Step",
    "Swag",
    "Weights",
    "adopt",
    "calibrate",
    "codebook",
    "compress",
    "data",
    "distill",
    "evaluate",
    "export",
    "fit",
    "inference",
    "judge",
    "load",
    "load_recipe",
    "metrics",
    "network",
    "networks",
    "papers",
    "posteriors",
    "reports",
    "runs",
    "term",
    "terms",
    "train",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"peerbayes.{_HOMES[name]}"), name)
    if name in _ROOMS or name in _MOVED:
        return importlib.import_module(f"peerbayes.{name}")
    raise AttributeError(f"module 'peerbayes' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
