"""Compute densities, distances and merges of Gaussians in the plane of (mean, standard deviation) of a weight.

Everything is float64 and elementwise in the leading axes, on any device. A 2×2 covariance is taken as its trace t, its
determinant d and its traceless part ``p = ((Σ₁₁ − Σ₂₂)/2, Σ₁₂)``, with ``t²/4 = d + ‖p‖²``: in these the square root
of a matrix is one division, and the distances of components with variances of 1e-10 do not cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from peerbayes.errors import InputError, nearest

Rule = Literal["moment", "barycenter", "average", "eq6"]


@dataclass(frozen=True)
class Components:
    """The Gaussians of a codebook, float64, all on one device.

    Args:
        mean: where they are, shape ``(K, 2)``: (mean of a weight, standard deviation of a weight).
        covariance: symmetric and positive (semi-)definite, shape ``(K, 2, 2)``.
        count: how many weights each one stands for, shape ``(K,)``; the mixture weight is ``count / count.sum()``.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import Components
        >>> mean, count = torch.tensor([[0.0, 0.1], [0.2, 0.1]]).double(), torch.tensor([3.0, 1.0]).double()
        >>> components = Components(mean, 0.01 * torch.eye(2).double().expand(2, 2, 2), count)
        >>> len(components), components.select(components.count > 2).mean
        (2, tensor([[0.0000, 0.1000]], dtype=torch.float64))
    """

    mean: Tensor
    covariance: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        size = self.count.shape[0] if self.count.dim() == 1 else -1
        wanted = {"mean": (size, 2), "covariance": (size, 2, 2), "count": (size,)}
        for name, shape in wanted.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float64:
                raise InputError(
                    f"{name} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)}: expected mean (K, 2), "
                    "covariance (K, 2, 2) and count (K,), all float64."
                )

    def __len__(self) -> int:
        return len(self.count)

    def select(self, which: Tensor) -> Components:
        """Return the components at an index or mask."""
        return Components(self.mean[which], self.covariance[which], self.count[which])


def wasserstein2(mean_1: Tensor, cov_1: Tensor, mean_2: Tensor, cov_2: Tensor) -> Tensor:
    """Return the squared 2-Wasserstein distance of Gaussians in the plane.

    ``W₂² = ‖m₁ − m₂‖² + t₁ + t₂ − 2√F`` with ``F = tr(Σ₁Σ₂) + 2√(d₁d₂)``. The difference is computed as

        t₁ + t₂ − 2√F = 4 [(√d₁ − √d₂)² + ‖p₁ − p₂‖²] / (t₁ + t₂ + 2√F)

    which is never negative and exactly 0 for equal Gaussians, however small or singular they are.

    Args:
        mean_1: means of the first, shape ``(..., 2)``; all leading axes broadcast.
        cov_1: covariances of the first, shape ``(..., 2, 2)``.
        mean_2: means of the second, shape ``(..., 2)``.
        cov_2: covariances of the second, shape ``(..., 2, 2)``.

    Returns:
        The squared distances, float64, shape ``(...)``.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import wasserstein2
        >>> origin, unit = torch.zeros(2), torch.eye(2)
        >>> wasserstein2(origin, unit, torch.tensor([3.0, 0.0]), 4 * unit)
        tensor(11., dtype=torch.float64)
    """
    _check(mean_1=(mean_1, 1), cov_1=(cov_1, 2), mean_2=(mean_2, 1), cov_2=(cov_2, 2))
    cov_1, cov_2 = cov_1.double(), cov_2.double()
    between = (mean_1.double() - mean_2.double()).square().sum(-1)
    root_1, root_2 = _root_det(cov_1), _root_det(cov_2)
    part = (_traceless(cov_1) - _traceless(cov_2)).square().sum(-1)
    total = _trace(cov_1) + _trace(cov_2) + 2 * _fidelity(cov_1, cov_2)
    shape = 4 * ((root_1 - root_2).square() + part)
    return between + torch.where(total > 0, shape / torch.where(total > 0, total, 1.0), 0.0)


def mahalanobis(points: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
    """Return the squared Mahalanobis distance ``D² = (x − m)ᵀ Σ⁻¹ (x − m)``, by the Cholesky factor of Σ.

    Args:
        points: shape ``(..., 2)``; all leading axes broadcast.
        mean: shape ``(..., 2)``.
        cov: positive definite, shape ``(..., 2, 2)``; the scale does not matter.

    Returns:
        The squared distances, float64, shape ``(...)``.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import mahalanobis
        >>> mahalanobis(torch.tensor([2.0, 1.0]), torch.zeros(2), 4 * torch.eye(2))
        tensor(1.2500, dtype=torch.float64)
    """
    _check(points=(points, 1), mean=(mean, 1), cov=(cov, 2))
    return _whitened(points.double() - mean.double(), _cholesky(cov.double()))


def log_density(points: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
    """Return the log-density of Gaussians, ``log N(x; m, Σ) = −log 2π − ½ log det Σ − ½ D²``.

    Args:
        points: shape ``(..., 2)``; all leading axes broadcast.
        mean: shape ``(..., 2)``.
        cov: positive definite, shape ``(..., 2, 2)``; the scale does not matter.

    Returns:
        The log-densities in nats, float64, shape ``(...)``.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import log_density
        >>> log_density(torch.zeros(2), torch.zeros(2), torch.eye(2))
        tensor(-1.8379, dtype=torch.float64)
    """
    _check(points=(points, 1), mean=(mean, 1), cov=(cov, 2))
    factor = _cholesky(cov.double())
    square = _whitened(points.double() - mean.double(), factor)
    return -0.5 * square - factor[0].log() - factor[2].log() - math.log(2 * math.pi)


def merged(first: Components, second: Components, rule: Rule = "moment") -> Components:
    """Merge Gaussians pair by pair and add their counts. With ``δ = m₁ − m₂`` and ``n = n₁ + n₂``:

    - ``"moment"``: ``m = (n₁m₁ + n₂m₂)/n``, ``Σ = (n₁Σ₁ + n₂Σ₂)/n + (n₁n₂/n²) δδᵀ``, which are the mean and the
      covariance of the two together: merging changes no first or second moment of the mixture.
    - ``"barycenter"``: the W₂ barycentre at equal weights, ``m = ½(m₁ + m₂)``,
      ``Σ = ¼[Σ₁ + Σ₂ + (Σ₁Σ₂)^½ + (Σ₂Σ₁)^½]``.
    - ``"average"``: ``m = ½(m₁ + m₂)``, ``Σ = ½(Σ₁ + Σ₂)``.
    - ``"eq6"``: ``m = ½(m₁ + m₂)``, ``Σ = ½(Σ₁ + Σ₂) + ⅛ δδᵀ + ½(Σ₁^½ Σ₂ Σ₁^½)^½``, as published. It is neither of
      the first two: two equal Gaussians become one with 1.5 Σ, so repeated merges inflate, and it depends on which one
      is the first. For comparison only.

    Args:
        first: K components.
        second: K components, the partners of the first.
        rule: one of the above.

    Returns:
        K components. Two that count nothing are merged as if they counted the same.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import Components, merged
        >>> covariance = torch.zeros(1, 2, 2).double()
        >>> first = Components(torch.tensor([[0.0, 0.0]]).double(), covariance, torch.tensor([3.0]).double())
        >>> second = Components(torch.tensor([[4.0, 0.0]]).double(), covariance, torch.tensor([1.0]).double())
        >>> both = merged(first, second)
        >>> both.mean, both.covariance[0, 0, 0]
        (tensor([[1., 0.]], dtype=torch.float64), tensor(3., dtype=torch.float64))
    """
    if rule not in get_args(Rule):
        raise InputError(f"rule is '{rule}'{nearest(rule, get_args(Rule))}")
    if len(first) != len(second):
        raise InputError(f"first has {len(first)} components and second has {len(second)}: expected pairs.")
    count = first.count + second.count
    delta = second.mean - first.mean
    outer = delta.unsqueeze(-1) * delta.unsqueeze(-2)
    cov_1, cov_2 = first.covariance, second.covariance
    if rule == "moment":
        share = torch.where(count > 0, second.count / torch.where(count > 0, count, 1.0), 0.5)
        mean = first.mean + share[:, None] * delta
        wide = share[:, None, None]
        return Components(mean, cov_1 + wide * (cov_2 - cov_1) + wide * (1 - wide) * outer, count)
    average = 0.5 * (cov_1 + cov_2)
    if rule == "average":
        covariance = average
    elif rule == "barycenter":
        root = _root_product(cov_1, cov_1 @ cov_2, cov_2)
        covariance = 0.5 * average + 0.25 * (root + root.mT)
    else:
        half = _root(cov_1)
        root = _root_product(cov_1, half @ cov_2 @ half, cov_2)
        covariance = average + outer / 8 + 0.25 * (root + root.mT)
    return Components(first.mean + 0.5 * delta, covariance, count)


def _trace(cov: Tensor) -> Tensor:
    return cov[..., 0, 0] + cov[..., 1, 1]


def _root_det(cov: Tensor) -> Tensor:
    """Return ``√det Σ``; 0 where rounding made the determinant of a singular matrix negative."""
    return (cov[..., 0, 0] * cov[..., 1, 1] - cov[..., 0, 1] * cov[..., 1, 0]).clamp_min(0).sqrt()


def _traceless(cov: Tensor) -> Tensor:
    return torch.stack([0.5 * (cov[..., 0, 0] - cov[..., 1, 1]), 0.5 * (cov[..., 0, 1] + cov[..., 1, 0])], -1)


def _fidelity(cov_1: Tensor, cov_2: Tensor) -> Tensor:
    """Return ``√F = tr((Σ₁Σ₂)^½) = √(tr(Σ₁Σ₂) + 2√(d₁d₂))``."""
    product = (cov_1 * cov_2.mT).sum((-2, -1))
    return (product + 2 * _root_det(cov_1) * _root_det(cov_2)).clamp_min(0).sqrt()


def _eye(cov: Tensor) -> Tensor:
    return torch.eye(2, dtype=cov.dtype, device=cov.device)


def _root(cov: Tensor) -> Tensor:
    """Return ``Σ^½ = (Σ + √d I) / √(t + 2√d)``, the theorem of Cayley and Hamilton for the root; 0 for 0."""
    root_det = _root_det(cov)
    trace = (_trace(cov) + 2 * root_det).clamp_min(0).sqrt()
    whole = cov + root_det[..., None, None] * _eye(cov)
    return torch.where((trace > 0)[..., None, None], whole / torch.where(trace > 0, trace, 1.0)[..., None, None], 0.0)


def _root_product(cov_1: Tensor, product: Tensor, cov_2: Tensor) -> Tensor:
    """Return the root of a product that has the eigenvalues of ``Σ₁Σ₂``; 0 where these are 0."""
    trace = _fidelity(cov_1, cov_2)
    whole = product + (_root_det(cov_1) * _root_det(cov_2))[..., None, None] * _eye(cov_1)
    return torch.where((trace > 0)[..., None, None], whole / torch.where(trace > 0, trace, 1.0)[..., None, None], 0.0)


def _cholesky(cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``L₁₁, L₂₁, L₂₂`` of ``Σ = LLᵀ``."""
    first = cov[..., 0, 0].sqrt()
    below = cov[..., 1, 0] / first
    return first, below, (cov[..., 1, 1] - below.square()).clamp_min(0).sqrt()


def _whitened(offset: Tensor, factor: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return ``‖L⁻¹ offset‖²``."""
    first, below, last = factor
    along = offset[..., 0] / first
    return along.square() + ((offset[..., 1] - below * along) / last).square()


def _check(**named: tuple[Tensor, int]) -> None:
    for name, (tensor, axes) in named.items():
        if tensor.dim() < axes or tensor.shape[tensor.dim() - axes :] != (2,) * axes or not tensor.is_floating_point():
            raise InputError(
                f"{name} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)}: "
                f"expected floating-point (..., {', '.join('2' * axes)})."
            )
