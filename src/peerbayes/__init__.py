"""peerbayes: networks that know when they do not know, trained by learning from one another.

Names are loaded when they are first used, so that ``import peerbayes`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peerbayes import (
        data,
        divergences,
        evaluation,
        learning,
        networks,
        noise,
        posteriors,
        reporting,
        sharing,
        terms,
    )
    from peerbayes.errors import InputError
    from peerbayes.learning import Recipe, Run, compress, distill, fit, load, load_recipe, train
    from peerbayes.networks import network
    from peerbayes.noise import Address
    from peerbayes.posteriors import MeanField, Point, Posterior, Prediction, RankOne, Shared, Weights
    from peerbayes.reporting import evaluate
    from peerbayes.terms import Step, term

__version__ = "0.1.0"

_HOMES = {
    "Address": "noise",
    "InputError": "errors",
    "MeanField": "posteriors",
    "Point": "posteriors",
    "Posterior": "posteriors",
    "Prediction": "posteriors",
    "RankOne": "posteriors",
    "Shared": "posteriors",
    "Recipe": "learning",
    "Run": "learning",
    "Step": "terms",
    "Weights": "posteriors",
    "compress": "learning",
    "distill": "learning",
    "evaluate": "reporting",
    "fit": "learning",
    "load": "learning",
    "load_recipe": "learning",
    "network": "networks",
    "term": "terms",
    "train": "learning",
}
_ROOMS = (
    "data",
    "divergences",
    "evaluation",
    "learning",
    "networks",
    "noise",
    "posteriors",
    "reporting",
    "sharing",
    "terms",
)

__all__ = [
    "Address",
    "InputError",
    "MeanField",
    "Point",
    "Posterior",
    "Prediction",
    "RankOne",
    "Recipe",
    "Run",
    "Shared",
    "Step",
    "Weights",
    "compress",
    "data",
    "distill",
    "divergences",
    "evaluate",
    "evaluation",
    "fit",
    "learning",
    "load",
    "load_recipe",
    "network",
    "networks",
    "noise",
    "posteriors",
    "reporting",
    "sharing",
    "term",
    "terms",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"peerbayes.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"peerbayes.{name}")
    raise AttributeError(f"module 'peerbayes' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
