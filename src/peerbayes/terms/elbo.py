"""Define the evidence lower bound in two terms: expected log-likelihood, and KL to the prior."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from peerbayes.terms.definition import term
from peerbayes.terms.step import Step


@term
def likelihood(
    step: Step, peer: str, *, weight: float = 1.0, label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
) -> Tensor:
    """Return weight · (1/B) Σ_b −log p(y_b | x_b, w), at one draw w, or averaged over the draws of the step.

    Of mixed images it is the sum over both labels, by their shares. ``label_smoothing`` ε makes the target
    (1 − ε) onehot(y) + ε / C.

    Args:
        step: the step, as the peer sees it.
        peer: the peer's name.
        weight: factor of the term.
        label_smoothing: ε; 0 by default.
    """
    return weight * step.cross_entropy(step.logits(peer), label_smoothing or 0.0)


@term
def kl(
    step: Step,
    peer: str,
    *,
    weight: float = 1.0,
    scheme: Literal["elbo", "layer_mean"] = "elbo",
    anneal: float = 0.0,
) -> Tensor:
    """Return the scaled KL divergence from posterior to prior.

    ``elbo``: (weight / N) Σ_i KL_i, the negative ELBO per image at weight 1 (below 1: tempered).
    ``layer_mean``: (weight / B) Σ_l mean_{i∈l} KL_i, a far weaker pull for large layers.

    Args:
        step: the step, as the peer sees it.
        peer: the peer's name.
        weight: factor of the term.
        scheme: ``elbo`` or ``layer_mean``.
        anneal: epochs over which the weight rises linearly from 0.
    """
    if scheme == "elbo":
        value = weight / step.train_size * step.kl(peer, "sum")
    else:
        value = weight / step.batch_size * step.kl(peer, "layer_mean")
    if anneal > 0:
        value = value * torch.as_tensor(step.epoch / anneal, device=value.device).clamp(max=1.0)
    return value
