"""Compute the convex combination of least norm exactly, in tensor operations that can be captured."""

from __future__ import annotations

import torch
from torch import Tensor

from peerbayes.errors import InputError

MAX_VECTORS = 16  # vectors
_DAMPING = 1e-10  # of a step, relative to the squares; a direction without curvature then means a step of nearly zero
_NOISE = 1e-13  # of a multiplier, relative to the products that it is a sum of


def least_norm_weights(gram: Tensor, cap: float = 1.0) -> Tensor:
    """Return ``argmin_ω ‖Σ_m ω_m g_m‖² = ωᵀGω`` with ``Σ_m ω_m = 1`` and ``0 ≤ ω_m ≤ cap``, where ``G_mn = g_m·g_n``.

    A primal active-set method in float64, of ``2M + 4`` rounds, that starts at equal weights. Each round takes the
    Newton step of the free weights along ``Σ d = 0``, up to the first bound, which then holds; or else frees the weight
    whose multiplier has the wrong sign by most. A damping of 10⁻¹⁰ stands in every step, not in the problem, so it does
    not move the solution; it makes steps along which the norm is constant vanish, so that equal vectors keep equal
    weights. Nothing is read back to the host.

    Args:
        gram: inner products, symmetric and positive semi-definite, shape ``(..., M, M)`` with ``M ≤ 16``.
        cap: the largest weight, at least 1/M.

    Returns:
        The weights ω, shape ``(..., M)``, without gradient, in the dtype of ``gram`` (half precision as float32).

    Example:
        >>> import torch
        >>> from peerbayes.math.simplex import least_norm_weights
        >>> gradients = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> least_norm_weights(gradients @ gradients.T)
        tensor([0.2000, 0.8000])
    """
    if gram.dim() < 2 or gram.shape[-1] != gram.shape[-2] or not gram.is_floating_point():
        raise InputError(
            f"gram is a {gram.dtype} tensor of shape {tuple(gram.shape)}: expected floating-point (..., M, M)."
        )
    count = gram.shape[-1]
    if not 1 <= count <= MAX_VECTORS:
        raise InputError(f"gram is of {count} vectors: expected 1 to {MAX_VECTORS}.")
    if not cap * count >= 1 - 1e-9:
        raise InputError(
            f"cap is {cap}: {count} weights of at most that cannot add up to 1; expected 1/{count} or more."
        )
    with torch.no_grad():
        weights = _active_set(gram.double(), max(cap, 1 / count))
    return weights.to(torch.promote_types(gram.dtype, torch.float32))


def _active_set(gram: Tensor, cap: float) -> Tensor:
    count = gram.shape[-1]
    square = gram.diagonal(dim1=-2, dim2=-1)
    length = square.clamp_min(0).sqrt()
    largest = square.amax(-1, keepdim=True)
    # Zero vectors need some curvature too, far below any other's.
    tiny = torch.where(largest > 0, 1e-30 * largest, 1.0)
    weights = torch.full_like(square, 1 / count)
    slope = gram.mean(-1)
    free = torch.ones_like(square, dtype=torch.bool)
    indices = torch.arange(count, device=gram.device)
    # Of many thousand random problems, also singular ones, none needed more than 1.5 M + 2 rounds.
    for _ in range(2 * count + 4):
        # The shortest free vector, from which the others are measured: its products lose the fewest digits.
        pivot = (indices == torch.where(free, square, torch.inf).argmin(-1, keepdim=True)) & free
        step = _newton(gram, slope, free, pivot, tiny)
        room = torch.where(step < 0, weights, cap - weights)
        nearest, index = torch.where(step != 0, room / step.abs(), torch.inf).min(-1, keepdim=True)
        blocked = (indices == index) & (nearest < 1)
        moved = (weights + nearest.clamp_max(1) * step).clamp(0, cap)
        weights = torch.where(blocked, (step > 0).to(gram.dtype) * cap, moved)
        slope = (gram @ weights.unsqueeze(-1)).squeeze(-1)
        by = _wrong(slope, length, weights, free, pivot, cap)
        worst, index = by.max(-1, keepdim=True)
        free = (free & ~blocked) | ((indices == index) & (worst > 0) & (nearest >= 1))
    return weights


def _at(pivot: Tensor, values: Tensor) -> Tensor:
    return torch.where(pivot, values, 0.0).sum(-1, keepdim=True)


def _newton(gram: Tensor, slope: Tensor, free: Tensor, pivot: Tensor, tiny: Tensor) -> Tensor:
    """Return the step ``d`` of the free weights with ``Σ d = 0``, that of the pivot being what the others leave.

    The others solve ``H d = slope_pivot − slope``, where ``H`` is the damped Gram matrix of ``g_m − g_pivot``.
    """
    count = gram.shape[-1]
    identity = torch.eye(count, dtype=gram.dtype, device=gram.device)
    row = (pivot.to(gram.dtype).unsqueeze(-2) @ gram).squeeze(-2)
    least = _at(pivot, row)
    hessian = gram - row.unsqueeze(-1) - row.unsqueeze(-2) + least.unsqueeze(-1)
    size = hessian.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    damping = _DAMPING * (size + least) + tiny
    others = free & ~pivot
    system = torch.where(others.unsqueeze(-1) & others.unsqueeze(-2), hessian + torch.diag_embed(damping), identity)
    side = torch.where(others, _at(pivot, slope) - slope, 0.0)
    table = torch.cat([system, side.unsqueeze(-1)], -1)
    # Gauss-Jordan: a positive definite matrix needs no pivoting, and few vectors no library.
    diagonal = identity > 0
    for k in range(count):
        row = table[..., k, None, :] / table[..., k, None, k, None]
        table = torch.where(diagonal[:, k, None], row, torch.addcmul(table, table[..., :, k, None], row, value=-1))
    step = torch.where(others, table[..., -1], 0.0)
    return torch.where(pivot, -step.sum(-1, keepdim=True), step)


def _wrong(slope: Tensor, length: Tensor, weights: Tensor, free: Tensor, pivot: Tensor, cap: float) -> Tensor:
    """Return by how much, beyond rounding, the multiplier of a weight at a bound has the wrong sign; −inf if free."""
    at_cap = ~free & (weights > 0.5 * cap)
    at_zero = ~free & ~at_cap
    # Where no weight is free, any level between the two groups would do.
    highest = torch.where(at_cap, slope, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(at_zero, slope, torch.inf).amin(-1, keepdim=True)
    level = torch.where(free.any(-1, keepdim=True), _at(pivot, slope), 0.5 * (highest + lowest))
    rounding = _NOISE * (weights * length).sum(-1, keepdim=True) * (length + _at(pivot, length))
    return torch.where(at_zero, level - slope, torch.where(at_cap, slope - level, -torch.inf)) - rounding
