"""Compute Dirichlet divergences, and the Dirichlet that stands for an ensemble, in float64.

Concentrations are finite, above 0, and have the classes as their last axis. Results come back in the dtype of the
arguments (half precision as float32).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.math.divergences import along, check_pair

_LARGE = 16.0  # from here on Stirling's series is exact in float64; below, torch's functions lose no digits


def dirichlet_kl(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of Dirichlet distributions. With ``α_0 = Σ_k α_k``, ``β_0 = Σ_k β_k``:

        KL(Dir(α)‖Dir(β)) = log Γ(α_0) − Σ_k log Γ(α_k) − log Γ(β_0) + Σ_k log Γ(β_k)
                            + Σ_k (α_k − β_k) (ψ(α_k) − ψ(α_0))

    It is computed as ``β_0 KL(β/β_0‖α/α_0) + Σ_k B(β_k, α_k) − B(β_0, α_0)``, where ``B`` is the Bregman divergence
    of ``r(x) = log Γ(x) − x log x + x``. The terms of the order ``α_0 log α_0``, whose rounding would swamp the result
    for large concentrations, have then cancelled. Gradients (in closed form, once) flow to both arguments:

        ∂KL/∂α_k = (α_k − β_k) ψ'(α_k) − (α_0 − β_0) ψ'(α_0)
        ∂KL/∂β_k = ψ(β_k) − ψ(β_0) − ψ(α_k) + ψ(α_0)

    Args:
        alpha: concentrations, shape ``(..., classes)``.
        beta: concentrations, shape ``(..., classes)``; leading axes broadcast.

    Returns:
        The divergence in nats, shape ``(...)``: not reduced otherwise.

    Example:
        >>> import torch
        >>> from peerbayes.math.dirichlet import dirichlet_kl
        >>> dirichlet_kl(torch.tensor([2.0, 1.0, 1.0]), torch.ones(3))
        tensor(0.2653)
    """
    check_pair("concentrations", alpha=alpha, beta=beta)
    dtype = torch.promote_types(torch.promote_types(alpha.dtype, beta.dtype), torch.float32)
    alpha, beta = torch.broadcast_tensors(alpha.double(), beta.double())
    function = _DirichletKL if torch.compiler.is_compiling() else _DirichletKLWithTangents
    divergence: Tensor = function.apply(alpha, beta)
    return divergence.to(dtype)


def proxy_dirichlet(log_p_members: Tensor, floor: float = 1e-8) -> Tensor:
    """Return the concentrations of the Dirichlet that stands for an ensemble (Proxy-EnD²), ``β = 1 + β_0 p̄``, where

        p̄ = (1/M) Σ_m p_m        β_0 = (C − 1)/2 / max(floor, Σ_j p̄_j (log p̄_j − (1/M) Σ_m log p_{m,j}))

    Members that agree have a large ``β_0``, at most ``(C − 1)/(2 floor)``. Where one of them gives probability 0
    (``log p = −inf``) to a class that another deems possible, ``β_0`` is 0 and β is all ones.

    Args:
        log_p_members: log-probabilities of M members for B images, shape ``(M, B, classes)``.
        floor: smallest value of the denominator, above 0.

    Returns:
        β, shape ``(B, classes)``.

    Example:
        >>> import torch
        >>> from peerbayes.math.dirichlet import proxy_dirichlet
        >>> members = torch.tensor([[[0.7, 0.2, 0.1]], [[0.5, 0.3, 0.2]]])
        >>> proxy_dirichlet(members.log())
        tensor([[27.8004, 12.1668,  7.7001]])
    """
    if log_p_members.dim() != 3 or not log_p_members.is_floating_point() or log_p_members.numel() == 0:
        raise InputError(
            f"log_p_members is a {log_p_members.dtype} tensor of shape {tuple(log_p_members.shape)}: "
            "expected floating-point log-probabilities of shape (members, images, classes)."
        )
    if not floor > 0:
        raise InputError(f"floor is {floor}: expected a number above 0.")
    members, _, classes = log_p_members.shape
    log_p = log_p_members.double()
    log_mean = log_p.logsumexp(0) - math.log(members)
    mean = log_mean.exp()
    spread = (mean * torch.where(mean > 0, log_mean - log_p.mean(0), 0.0)).sum(-1, keepdim=True)
    beta = 1 + mean * (0.5 * (classes - 1) / spread.clamp_min(floor))
    return beta.to(torch.promote_types(log_p_members.dtype, torch.float32))


class _DirichletKL(torch.autograd.Function):
    """`dirichlet_kl` in float64; autograd through it would bring back the cancellation that it avoids."""

    generate_vmap_rule = True

    @staticmethod
    def forward(alpha: Tensor, beta: Tensor) -> Tensor:
        alpha_0, beta_0 = alpha.sum(-1, keepdim=True), beta.sum(-1, keepdim=True)
        # d − log1p(d) with d = q/p − 1 sums to KL(p‖q), because Σ p d = 0, and has no negative terms.
        ratio = (alpha / alpha_0) / (beta / beta_0)
        excess = ratio - 1
        logarithm = torch.where(excess.abs() < 0.5, excess.log1p(), ratio.log())
        shape = (beta * (excess - logarithm)).sum(-1)
        return shape + _bregman(beta, alpha).sum(-1) - _bregman(beta_0, alpha_0).squeeze(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = _slopes(ctx.saved_tensors, ctx.needs_input_grad)
        return tuple(None if slope is None else grad.unsqueeze(-1) * slope for slope in slopes)


class _DirichletKLWithTangents(_DirichletKL):
    """The same with forward-mode differentiation, which torch's compiler refuses in an autograd.Function."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return along(tangents, _slopes(ctx.saved_tensors, [tangent is not None for tangent in tangents])).sum(-1)


def _slopes(given: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `dirichlet_kl` by α and by β, those that are wanted."""
    alpha, beta = given
    alpha_0, beta_0 = alpha.sum(-1, keepdim=True), beta.sum(-1, keepdim=True)
    by_alpha = by_beta = None
    if wanted[0]:
        change = (alpha - beta) * _trigamma_rest(alpha) - (alpha_0 - beta_0) * _trigamma_rest(alpha_0)
        by_alpha = beta_0 / alpha_0 - beta / alpha + change
    if wanted[1]:
        change = _digamma_rest(beta) - _digamma_rest(beta_0) - _digamma_rest(alpha) + _digamma_rest(alpha_0)
        by_beta = ((beta / beta_0) / (alpha / alpha_0)).log() + change
    return by_alpha, by_beta


def _bregman(x: Tensor, y: Tensor) -> Tensor:
    """Return ``r(x) − r(y) − r'(y) (x − y)``; near y that is ``½ r''(y + (x − y)/3) (x − y)²``, up to (x/y − 1)²/6."""
    step = x - y
    close = 0.5 * _trigamma_rest(y + step / 3) * step.square()
    return torch.where(step.abs() < 1e-4 * y, close, _lgamma_rest(x) - _lgamma_rest(y) - _digamma_rest(y) * step)


def _lgamma_rest(x: Tensor) -> Tensor:
    """Return ``log Γ(x) − x log x + x``."""
    y = x.clamp_min(_LARGE).reciprocal()
    series = _even(y, 1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360) * y
    small = x.clamp_max(_LARGE)
    return torch.where(x < _LARGE, small.lgamma() - small * (small.log() - 1), series + 0.5 * (2 * math.pi * y).log())


def _digamma_rest(x: Tensor) -> Tensor:
    """Return ``ψ(x) − log x``, the derivative of `_lgamma_rest`."""
    y = x.clamp_min(_LARGE).reciprocal()
    series = -y * (0.5 + y * _even(y, 1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760))
    small = x.clamp_max(_LARGE)
    return torch.where(x < _LARGE, small.digamma() - small.log(), series)


def _trigamma_rest(x: Tensor) -> Tensor:
    """Return ``ψ'(x) − 1/x``, the derivative of `_digamma_rest`."""
    y = x.clamp_min(_LARGE).reciprocal()
    series = y.square() * (0.5 + y * _even(y, 1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730))
    small = x.clamp_max(_LARGE)
    return torch.where(x < _LARGE, torch.special.polygamma(1, small) - small.reciprocal(), series)


def _even(y: Tensor, *coefficients: float) -> Tensor:
    """Return ``Σ_k c_k y^(2k)``."""
    square, total = y.square(), torch.zeros_like(y)
    for coefficient in reversed(coefficients):
        total = total * square + coefficient
    return total
