"""Compute divergences between distributions in log-space, in nats, without clamped probabilities.

Discrete distributions are log-probabilities whose last axis is the classes (``log_softmax`` outputs); the
value has one element for each leading element. Half precision is computed, and returned, in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from peerbayes.errors import InputError, nearest

_KERNEL_FLOOR = 1e-7  # opposite vectors have cosine kernel 0, whose logarithm has no gradient
_SERIES = 0.1  # up to this |d| a series of d − log(1 + d) is more accurate than the difference
_NEAR = 0.5  # below this |log Σ| the log1p form is the accurate one, above it logsumexp is


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of categorical distributions, ``KL(P‖Q) = Σ_m p_m (log p_m − log q_m)``.

    A class with ``p_m = 0`` (also ``log p_m = −inf``) contributes nothing, to the value and to the gradients.

    Args:
        log_p: log-probabilities, shape ``(..., classes)``.
        log_q: log-probabilities, shape ``(..., classes)``; leading axes broadcast.

    Returns:
        The divergence in nats, shape ``(...)``: summed over classes, not reduced otherwise.

    Example:
        >>> import torch
        >>> from peerbayes.math.divergences import kl
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
        >>> kl(p.log(), q.log())
        tensor(0.5108)
    """
    log_p, log_q = _pair(log_p, log_q)
    return _kl(log_p, log_q)


def renyi(log_p: Tensor, log_q: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the Rényi divergence, ``D_α(P‖Q) = log(Σ_m p_m^α q_m^(1−α)) / (α − 1)``; ``KL(P‖Q)`` at α = 1.

    At α = 0 it is ``−log Σ_{p_m>0} q_m``: exactly zero, with zero gradients, where no ``log p_m`` is −inf.
    With ``r_m ∝ p_m^α q_m^(1−α)`` the gradients are those along normalised distributions,

        ∂D/∂log q_m = q_m − r_m          ∂D/∂log p_m = α/(α−1) (r_m − p_m)

    which are also the gradients with respect to the logits of Q and P. Both stay accurate through α = 1,
    where the derivative with free entries has a pole that normalisation cancels.

    Args:
        log_p: log-probabilities, shape ``(..., classes)``.
        log_q: log-probabilities, shape ``(..., classes)``; leading axes broadcast.
        alpha: the order, a finite number ≥ 0; or a 0-dim tensor on the same device, whose value is not
            checked and may change between replays of a captured graph. No gradient flows to it.

    Returns:
        The divergence in nats, shape ``(...)``.

    Example:
        >>> import torch
        >>> from peerbayes.math.divergences import renyi
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
        >>> [round(renyi(p.log(), q.log(), alpha).item(), 4) for alpha in (0.5, 1.0, 2.0)]
        [0.2231, 0.5108, 1.0217]
    """
    log_p, log_q = _pair(log_p, log_q)
    # α and α − 1 are both kept: either loses digits when it is computed from the other in float32.
    if isinstance(alpha, Tensor):
        if alpha.dim() != 0 or not alpha.is_floating_point() or alpha.device != log_p.device:
            raise InputError(
                f"alpha is a {alpha.dtype} tensor of shape {tuple(alpha.shape)} on {alpha.device}: "
                f"expected a 0-dim floating-point tensor on {log_p.device}."
            )
        order, excess = alpha.detach().to(log_p.dtype), (alpha.detach() - 1).to(log_p.dtype)
    else:
        if not (math.isfinite(alpha) and alpha >= 0):
            raise InputError(f"alpha is {alpha}: expected a finite number that is 0 or more.")
        order = torch.full((), alpha, dtype=log_p.dtype, device=log_p.device)
        excess = torch.full((), alpha - 1, dtype=log_p.dtype, device=log_p.device)
    function = _Renyi if torch.compiler.is_compiling() else _RenyiWithTangents
    divergence: Tensor = function.apply(log_p, log_q, order, excess)
    return divergence


def gaussian_kl(mean_q: Tensor, std_q: Tensor, mean_p: Tensor | float, std_p: Tensor | float) -> Tensor:
    """Return ``KL(N(μ_q, σ_q²)‖N(μ_p, σ_p²)) = log(σ_p/σ_q) + (σ_q² + (μ_q − μ_p)²)/(2σ_p²) − ½`` by element.

    Value and gradients keep their digits where both Gaussians are nearly the same, in any precision: with
    ``d = σ_q/σ_p − 1`` and ``z = (μ_q − μ_p)/σ_p`` it is computed as ``½(z² + d²) + (d − log(1 + d))``, without
    differences of numbers near 1.

    Args:
        mean_q: means of the posterior, any shape; all four arguments broadcast.
        std_q: standard deviations of the posterior, > 0.
        mean_p: means of the prior.
        std_p: standard deviations of the prior, > 0.

    Returns:
        Nats per element, in the broadcast shape; the sum is the divergence of the diagonal Gaussians.

    Example:
        >>> import torch
        >>> from peerbayes.math.divergences import gaussian_kl
        >>> gaussian_kl(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.5]), 0.0, 1.0)
        tensor([0.0000, 0.8181])
    """
    _check_broadcast(mean_q=mean_q, std_q=std_q, mean_p=mean_p, std_p=std_p)
    if not isinstance(std_p, Tensor) and not std_p > 0:
        raise InputError(f"std_p is {std_p}: expected a number above 0.")
    given = (mean_q, std_q, mean_p, std_p)
    shape = torch.broadcast_shapes(*(t.shape for t in given if isinstance(t, Tensor)))
    function = _GaussianKL if torch.compiler.is_compiling() else _GaussianKLWithTangents
    divergence: Tensor = function.apply(*(t.expand(shape) if isinstance(t, Tensor) else t for t in given))
    return divergence


class _GaussianKL(torch.autograd.Function):
    """`gaussian_kl` of arguments of one shape, or numbers, with its gradient in closed form.

    In a training step the KL is differentiated first, while every activation is still alive, so what autograd would
    keep and make on the way sets the peak memory of the step.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(mean_q: Tensor, std_q: Tensor, mean_p: Tensor | float, std_p: Tensor | float) -> Tensor:
        excess = (std_q - std_p) / std_p
        far = excess - (std_q / std_p).log_()
        rest = torch.where(excess.abs() < _SERIES, _minus_log1p(excess), far)
        del far
        squares = excess.square_() + ((mean_q - mean_p) / std_p).square_()
        # A new tensor: torch 2.11 compiles a result modified in place without its gradient (pytorch#180642).
        return squares.mul_(0.5) + rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        tensors = [t if isinstance(t, Tensor) else None for t in inputs]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.numbers = [t if not isinstance(t, Tensor) else None for t in inputs]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = _slopes(ctx, ctx.needs_input_grad)
        return tuple(None if slope is None else grad * slope for slope in slopes)


class _GaussianKLWithTangents(_GaussianKL):
    """The same with forward-mode differentiation, which torch's compiler refuses in an autograd.Function."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return along(tangents, _slopes(ctx, [tangent is not None for tangent in tangents]))


def _slopes(ctx: Any, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the derivatives of `gaussian_kl` by those of its four arguments that are wanted."""
    saved = zip(ctx.saved_tensors, ctx.numbers, strict=True)
    mean_q, std_q, mean_p, std_p = (number if tensor is None else tensor for tensor, number in saved)
    by_mean_q = by_std_q = by_mean_p = by_std_p = None
    if wanted[0] or wanted[2]:
        by_mean_q = (mean_q - mean_p) / std_p / std_p
        by_mean_p = -by_mean_q if wanted[2] else None
    if wanted[1] or wanted[3]:
        excess = (std_q - std_p) / std_p
        by_std_q = excess / std_q * (excess + 2) if wanted[1] else None  # σ_q/σ_p² − 1/σ_q
        if wanted[3]:
            by_std_p = -(excess * (excess + 2) + ((mean_q - mean_p) / std_p).square()) / std_p
    return [by_mean_q if wanted[0] else None, by_std_q, by_mean_p, by_std_p]


def _minus_log1p(d: Tensor) -> Tensor:
    """Return ``d − log(1 + d)`` with all its digits where ``|d|`` is at most `_SERIES`.

    With ``s = d/(2 + d)``: ``log(1 + d) = 2 artanh s`` and ``d − 2s = ds``, so it is
    ``s (d − 2 s² (1/3 + s²/5 + s⁴/7 + ...))``, of which float32 needs three terms and float64 six.
    """
    s = d / (d + 2)
    square = s.square()
    first, *others = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3) if d.dtype == torch.float64 else (1 / 7, 1 / 5, 1 / 3)
    series = square * first
    for term in others:
        series.add_(term).mul_(square)
    return series.mul_(-2).add_(d).mul_(s)


def wasserstein2(mean_1: Tensor, std_1: Tensor, mean_2: Tensor | float, std_2: Tensor | float) -> Tensor:
    """Return the squared 2-Wasserstein distance of Gaussians by element, ``W₂² = (μ_1 − μ_2)² + (σ_1 − σ_2)²``.

    Args:
        mean_1: means of the first posterior, any shape; all four arguments broadcast.
        std_1: standard deviations of the first posterior.
        mean_2: means of the second posterior.
        std_2: standard deviations of the second posterior.

    Returns:
        Squared distance per element, in the broadcast shape; the sum is ``W₂²`` of the diagonal Gaussians.

    Example:
        >>> import torch
        >>> from peerbayes.math.divergences import wasserstein2
        >>> wasserstein2(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 5.0]), 0.0, 1.0)
        tensor([ 0., 25.])
    """
    _check_broadcast(mean_1=mean_1, std_1=std_1, mean_2=mean_2, std_2=std_2)
    return (mean_1 - mean_2).square() + (std_1 - std_2).square()


def kernel_log_conditional(
    features: Tensor, kernel: Literal["cosine", "rbf"] = "cosine", bandwidth: float | None = None
) -> Tensor:
    """Return the log of the neighbour distribution ``p_{i|j} = K(f_i, f_j) / Σ_{k≠j} K(f_k, f_j)``, ``i ≠ j``.

    ``"cosine"``: ``K(a, b) = ½(cos(a, b) + 1)``, at least 1e-7; a zero vector has cosine 0 to all others and
    no gradient. ``"rbf"``: ``K(a, b) = exp(−‖a − b‖²/(2h²))``.

    Args:
        features: one vector per data point, shape ``(n, d)`` with ``n ≥ 2``.
        kernel: ``"cosine"`` or ``"rbf"``.
        bandwidth: ``h`` of ``"rbf"``; ``None`` takes the (lower) median distance, without gradient.

    Returns:
        ``log p_{i|j}`` in row ``j`` (the anchor) and column ``i``, shape ``(n, n)``; −inf on the diagonal.

    Example:
        >>> import torch
        >>> from peerbayes.math.divergences import kernel_log_conditional
        >>> features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> kernel_log_conditional(features).exp()
        tensor([[0.0000, 0.3694, 0.6306],
                [0.3694, 0.0000, 0.6306],
                [0.5000, 0.5000, 0.0000]])
    """
    if features.dim() != 2 or features.shape[0] < 2 or not features.is_floating_point():
        raise InputError(
            f"features is a {features.dtype} tensor of shape {tuple(features.shape)}: "
            "expected floating-point features of shape (n, d) with n of 2 or more."
        )
    # The divergences of interest are about 1e-3: a Gram matrix in bfloat16 would drown them.
    with torch.autocast(features.device.type, enabled=False):
        features = _at_least_float32(features)
        if kernel == "cosine":
            log_kernel = _log_cosine_kernel(features)
        elif kernel == "rbf":
            log_kernel = _log_rbf_kernel(features, bandwidth)
        else:
            raise InputError(f"kernel is '{kernel}'{nearest(kernel, ('cosine', 'rbf'))}")
        diagonal = torch.eye(features.shape[0], dtype=torch.bool, device=features.device)
        return log_kernel.masked_fill(diagonal, -math.inf).log_softmax(dim=1)


def kernel_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the divergence of neighbour distributions, ``(1/n) Σ_j Σ_{i≠j} p_{i|j} (log p_{i|j} − log q_{i|j})``.

    Args:
        log_p: ``kernel_log_conditional`` of the first features, shape ``(n, n)``.
        log_q: ``kernel_log_conditional`` of the second features, shape ``(n, n)``.

    Returns:
        A scalar in nats: the sum over neighbours, the mean over anchors.

    Example:
        >>> import torch
        >>> from peerbayes.math.divergences import kernel_kl, kernel_log_conditional
        >>> first = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> second = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
        >>> kernel_kl(kernel_log_conditional(first), kernel_log_conditional(second))
        tensor(0.0321)
    """
    if log_p.dim() != 2 or log_p.shape[0] != log_p.shape[1] or log_p.shape != log_q.shape:
        raise InputError(
            f"log_p has shape {tuple(log_p.shape)} and log_q has shape {tuple(log_q.shape)}: expected (n, n) for both."
        )
    return kl(log_p, log_q).mean()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)


def _tilt(log_p: Tensor, log_q: Tensor, order: Tensor, excess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``tilt``, ``log_joint = log(p^α q^(1−α)) = base + tilt`` and ``log Σ exp(log_joint)``.

    The base is the nearer end of the path from Q (α = 0) to P (α = 1), so ``tilt`` is small where α is near 0
    or 1 and ``log1p(Σ exp(base) expm1(tilt))`` keeps the digits that ``logsumexp`` would cancel.
    """
    near_q = order < 0.5
    base = torch.where(near_q, log_q, log_p)
    slope = torch.where(near_q, order, excess)
    tilt = torch.where(slope == 0, 0.0, slope * (log_p - log_q))
    absent = (log_p == -math.inf) | ((log_q == -math.inf) & (excess < 0))
    tilt = tilt.masked_fill(absent, -math.inf)
    log_joint = base + tilt
    log_sum = log_joint.logsumexp(-1, keepdim=True)
    # exp(base) expm1(tilt), written as a difference where expm1 alone could overflow.
    small = tilt.abs() <= 1
    weight = base.exp()
    change = torch.where(small, weight * torch.where(small, tilt, 0.0).expm1(), log_joint.exp() - weight)
    near = log_sum.abs() <= _NEAR
    accurate = torch.where(near, change.sum(-1, keepdim=True), 0.0).log1p()
    return tilt, log_joint, torch.where(near, accurate, log_sum)


class _Renyi(torch.autograd.Function):
    """Rényi divergence with closed-form gradients: those of the forward's selections would be NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_p: Tensor, log_q: Tensor, order: Tensor, excess: Tensor) -> Tensor:
        log_sum = _tilt(log_p, log_q, order, excess)[2].squeeze(-1)
        is_one = excess == 0
        return torch.where(is_one, _kl(log_p, log_q), log_sum / torch.where(is_one, 1.0, excess))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        by_p, by_q = _renyi_slopes(ctx.saved_tensors, ctx.needs_input_grad)
        grad = grad.unsqueeze(-1)
        return None if by_p is None else grad * by_p, None if by_q is None else grad * by_q, None, None


class _RenyiWithTangents(_Renyi):
    """The same with forward-mode differentiation, which torch's compiler refuses in an autograd.Function."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        slopes = _renyi_slopes(ctx.saved_tensors, [tangent is not None for tangent in tangents])
        return along(tangents[:2], slopes).sum(-1)


def _renyi_slopes(given: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `renyi` by log p and by log q, those that are wanted."""
    log_p, log_q, order, excess = given
    tilt, log_joint, log_sum = _tilt(log_p, log_q, order, excess)
    # softmax is exact for huge logarithms; near 0 the accurate sum makes r equal to q where P equals Q.
    near = log_sum.abs() <= _NEAR
    r = torch.where(near, (log_joint - log_sum).exp(), log_joint.softmax(-1))
    by_p = _gradient_p(log_p, log_q, order, excess, r, tilt - log_sum) if wanted[0] else None
    return by_p, log_q.exp() - r if wanted[1] else None


def along(tangents: Sequence[Any], slopes: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of tangent times slope over the arguments that have a tangent.

    Args:
        tangents: by argument; None for those without.
        slopes: derivatives by argument; None for those that are not wanted.
    """
    terms = (tangent * slope for tangent, slope in zip(tangents, slopes, strict=True) if slope is not None)
    total: Tensor = functools.reduce(torch.add, terms)
    return total


def _gradient_p(log_p: Tensor, log_q: Tensor, order: Tensor, excess: Tensor, r: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ``α/(α−1) (r − p)``, whose limit at α = 1 is ``p (log p − log q − KL)``."""
    p = log_p.exp()
    # From α = ½ on log_ratio is log(r/p), and expm1 keeps the digits that r − p loses near α = 1.
    small = (log_ratio.abs() <= 1) & (order >= 0.5)
    change = torch.where(small, p * torch.where(small, log_ratio, 0.0).expm1(), r - p)
    is_one = excess == 0
    at_one = p * torch.where(p > 0, log_p - log_q - _kl(log_p, log_q).unsqueeze(-1), 0.0)
    return torch.where(is_one, at_one, change * order / torch.where(is_one, 1.0, excess))


def _log_cosine_kernel(features: Tensor) -> Tensor:
    # The direction does not depend on this scale (nor does its gradient); it keeps the squares in range.
    largest = features.detach().abs().amax(1, keepdim=True)
    scaled = features / torch.where(largest > 0, largest, 1.0)
    square = scaled.square().sum(1, keepdim=True)
    direction = torch.where(square > 0, scaled * torch.where(square > 0, square, 1.0).rsqrt(), 0.0)
    return (0.5 * (direction @ direction.T + 1)).clamp_min(_KERNEL_FLOOR).log()


def _log_rbf_kernel(features: Tensor, bandwidth: float | None) -> Tensor:
    if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
        raise InputError(f"bandwidth is {bandwidth}: expected a finite number above 0, or None for the median.")
    # Distances do not depend on the centre; near it the Gram form cancels least.
    centred = features - features.detach().mean(0)
    gram = centred @ centred.T
    square = gram.diagonal()
    distance = (square[:, None] + square[None, :] - 2 * gram).clamp_min(0)
    scale = _median_square(distance.detach()) if bandwidth is None else bandwidth**2
    return distance / (-2 * scale)


def _median_square(distance: Tensor) -> Tensor:
    n = distance.shape[0]
    # Dropping the last entry and folding into rows of n + 1 puts the diagonal into the first column.
    pairs = distance.flatten()[:-1].view(n - 1, n + 1)[:, 1:]
    median, mean = pairs.flatten().median(), pairs.mean()
    # Most points may coincide (median 0), or all (mean 0, where any bandwidth gives equal neighbours).
    fallback = torch.where(mean > 0, mean, 1.0)
    return torch.where(median > 0, median, fallback)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _pair(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Check two sets of log-probabilities and bring them to one shape and one precision."""
    check_pair("log-probabilities", log_p=log_p, log_q=log_q)
    dtype = torch.promote_types(_at_least_float32(log_p).dtype, _at_least_float32(log_q).dtype)
    log_p, log_q = torch.broadcast_tensors(log_p.to(dtype), log_q.to(dtype))
    return log_p, log_q


def check_pair(what: str, **pair: Tensor) -> None:
    """Check that two tensors hold (..., classes) floating-point numbers and broadcast.

    Args:
        what: what they are, for the error.
        pair: the tensors by their names.
    """
    if not all(tensor.is_floating_point() for tensor in pair.values()):
        types = " and ".join(f"{name} has type {tensor.dtype}" for name, tensor in pair.items())
        raise InputError(f"{types}: expected floating-point {what}.")
    if any(tensor.dim() == 0 for tensor in pair.values()) or len({tensor.shape[-1] for tensor in pair.values()}) > 1:
        shapes = " and ".join(f"{name} has shape {tuple(tensor.shape)}" for name, tensor in pair.items())
        raise InputError(f"{shapes}: expected (..., classes) with the same number of classes.")
    _check_broadcast(**pair)


def _check_broadcast(**tensors: Tensor | float) -> None:
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, Tensor)}
    axes = max(len(shape) for shape in shapes.values())
    for axis in range(1, axes + 1):
        sizes = {shape[-axis] for shape in shapes.values() if len(shape) >= axis}
        if len(sizes - {1}) > 1:
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise InputError(f"The shapes do not broadcast: {listed}.")


def mean_pairwise_kl(log_p: Tensor) -> Tensor:
    """Return 1/(M (M − 1)) Σ_{i≠j} (1/B) Σ_b KL(p_i ‖ p_j) for log-probabilities (M, B, C).

    Example:
        >>> import torch
        >>> from peerbayes.math.divergences import kl, mean_pairwise_kl
        >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.8, 0.2]]).log()
        >>> bool(mean_pairwise_kl(torch.stack([p, q])).isclose((kl(p, q) + kl(q, p)).mean() / 2))
        True
    """
    # As `metrics.pairwise_diversity`, but a tensor, so that the host need not wait.
    return (log_p.exp() * (log_p - log_p.mean(0))).sum((0, -1)).mean() / (len(log_p) - 1)
