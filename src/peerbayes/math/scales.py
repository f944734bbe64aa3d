"""Scales σ > 0 of weights, and the unconstrained ρ that they are kept as: σ = softplus(ρ)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 2.0  # a scale grows or shrinks by at most this factor in a step
LEAST = 1e-12  # no step makes a scale smaller than that


def inverse_softplus(values: Tensor) -> Tensor:
    """Return ρ with softplus(ρ) = value, float64; −inf for 0."""
    values = values.double()
    return values + torch.log(-torch.expm1(-values))


def sigma_gradient(rho: Tensor, gradient: Tensor) -> Tensor:
    """Return ∂L/∂σ = ∂L/∂ρ / softplus′(ρ) of a gradient by ρ.

    Args:
        rho: ρ, with σ = softplus(ρ).
        gradient: ∂L/∂ρ.
    """
    return gradient / torch.sigmoid(rho)


def moved(rho: Tensor, sigma: Tensor) -> Tensor:
    """Return the ρ of scales that a step has taken to ``sigma``, which may not even be positive.

    A step at most halves or doubles a scale, so that it stays positive, and takes none below 1e-12. Where it changes
    nothing, ρ stays what it was.

    Args:
        rho: before the step.
        sigma: σ after it.
    """
    before = F.softplus(rho)
    after = sigma.clamp(torch.maximum(before / MOST, before.clamp_max(LEAST)), before * MOST)
    return (rho + (inverse_softplus(after) - inverse_softplus(before))).to(rho.dtype)
