"""Scales σ = softplus(ρ) > 0 of weights: what they begin with, by layer, and their gradients and steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.math.noise import Address, normal, uniform

if TYPE_CHECKING:
    from peerbayes.posteriors.flat_network import Layout

MAX_FACTOR = 2.0  # a scale grows or shrinks by at most this factor in a step
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
    after = sigma.clamp(torch.maximum(before / MAX_FACTOR, before.clamp_max(LEAST)), before * MAX_FACTOR)
    return (rho + (inverse_softplus(after) - inverse_softplus(before))).to(rho.dtype)


WIDTH = 0.02  # in parts of a layer's weights, where nothing else is asked for: draws predict as the network does
BIAS = 1e-3  # the scale of biases where weights go by their fans
EMPTY = 0.01  # what is 0 as yet, such as a last layer or a bias, counts as so much of what it could begin with


def initial_rho(layout: Layout, mean: Tensor, address: Address, given: Mapping[str, float | None]) -> Tensor:
    """Return the ρ (size,) that a posterior begins with; see `peerbayes.MeanField`.

    Args:
        layout: names and shapes of the weights.
        mean: their values, (size,).
        address: where random scales live.
        given: at most one of ``rho``, ``gain``, ``uniform`` and ``width``.
    """
    chosen = {name: float(value) for name, value in given.items() if value is not None} or {"width": WIDTH}
    if len(chosen) > 1:
        raise InputError(f"{' and '.join(chosen)} are given, expected one of them: each says what the scales are")
    ((name, value),) = chosen.items()
    if name == "rho":
        if not math.isfinite(value):
            raise InputError(f"rho is {value}, expected a finite number")
        return normal(address, layout.size, mean.device).mul_(0.1).add_(value)
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value}, expected a positive number")
    if name == "uniform":
        scales = {tensor: _drawn(address.sub(tensor), shape, value) for tensor, shape in layout.shapes.items()}
    else:
        means = (
            _relative(layout, mean) if name == "width" else {n: _by_fans(shape) for n, shape in layout.shapes.items()}
        )
        sizes = {n: BIAS if size is None else value * size for n, size in means.items()}
        scales = {n: torch.full(shape, sizes[n], dtype=torch.float64) for n, shape in layout.shapes.items()}
    return inverse_softplus(layout.flatten(scales)).float().to(mean.device)


def _fans(shape: torch.Size) -> int:
    """Return fan-in + fan-out; 0 for a bias."""
    return (shape[0] + shape[1]) * math.prod(shape[2:]) if len(shape) > 1 else 0


def _by_fans(shape: torch.Size) -> float | None:
    """Return √(6 / (fan-in + fan-out)); None for a bias."""
    return math.sqrt(6 / _fans(shape)) if _fans(shape) else None


def _drawn(address: Address, shape: torch.Size, value: float) -> Tensor:
    """Return |u| with u ~ U(−a, a), a = value / √(fan-in + fan-out), or u ~ N(0, BIAS²) for a bias."""
    fans, count = _fans(shape), math.prod(shape)
    draws = value / math.sqrt(fans) * uniform(address, count) if fans else BIAS * normal(address, count).abs()
    return draws.clamp_min(LEAST).view(shape)


def _relative(layout: Layout, mean: Tensor) -> dict[str, float]:
    """Return the root mean square of each tensor, or, where that is more, a hundredth of what it could begin with.

    That is 1 / √fan-in, and of a bias the root mean square of its module's weights.
    """
    values = torch.zeros(layout.size) if mean.is_meta else mean.detach()  # a network without values has no sizes
    tensors = layout.views(values)
    squares = torch.stack([tensor.double().square().mean() for tensor in tensors.values()]).sqrt().tolist()
    sizes = dict(zip(tensors, squares, strict=True))
    usual = {name: 1 / math.sqrt(math.prod(shape[1:])) for name, shape in layout.shapes.items()}
    for name, shape in layout.shapes.items():
        weight = f"{name.rpartition('.')[0]}.weight"
        if len(shape) == 1 and weight in sizes:
            usual[name] = sizes[weight]
    return {name: max(size, EMPTY * usual[name]) for name, size in sizes.items()}
