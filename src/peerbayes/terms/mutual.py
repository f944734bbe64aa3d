"""Peers teach each other: each one's prediction is the target of the others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from peerbayes import divergences
from peerbayes.terms.registry import term
from peerbayes.terms.step import Step


@term
def mutual(
    step: Step,
    peer: str,
    *,
    weight: float = 1.0,
    temperature: Annotated[float, Field(gt=0)] = 1.0,
    alpha: Annotated[float, Field(ge=0)] = 1.0,
) -> Tensor:
    """weight · T² · mean over j≠i of (1/B) Σ_b D_α( softmax(z_j/T) ‖ softmax(z_i/T) ), the target z_j detached.

    ``alpha`` = 1 is the Kullback-Leibler divergence, 0 is independent training.
    """
    own = (step.logits(peer) / temperature).log_softmax(-1)

    def towards(other: str) -> Tensor:
        target = (step.logits(other) / temperature).log_softmax(-1)
        return divergences.renyi(target, own, alpha).mean()

    return weight * temperature**2 * step.average(peer, towards)
