"""Compute moments of clusters' members in the plane.

All sums have a fixed order, without atomic additions, so that a result is a function of its arguments, also on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from peerbayes.codebook.neighbours import check_points
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components

RIDGE = 1e-12  # on the diagonal of a covariance: far below the 1e-10 of a typical cluster


def components_of(points: Tensor, labels: Tensor, count: int, *, correction: int = 0) -> Components:
    """Return the Gaussians of the members: ``m_k = mean x_i``, ``Σ_k = Σ (x_i−m_k)(x_i−m_k)ᵀ/(n_k − c) + 10⁻¹² I``.

    The offsets from the mean are taken before they are squared. With c = 0 the moments are those of the members
    exactly, so that merging by ``"moment"`` and the marginal variance ``Σ₁₁ + Σ₂₂ + s²`` are exact too.

    Args:
        points: shape ``(n, 2)``.
        labels: the component of each point, int64, shape ``(n,)``.
        count: the number of components K.
        correction: c; 1 gives the unbiased estimate. Components of no more than c members have covariance 10⁻¹² I.

    Returns:
        K components. One without members has count 0 and a mean that is not a number, so that it is nearest to none.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import components_of
        >>> points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [10.0, 1.0]])
        >>> components = components_of(points, torch.tensor([0, 0, 1]), count=2)
        >>> components.mean, components.count
        (tensor([[ 0.,  1.],
                [10.,  1.]], dtype=torch.float64), tensor([2., 1.], dtype=torch.float64))
    """
    check_points("points", points)
    _check_labels(labels, len(points), count)
    order, size = by_label(labels, count)
    # Start at any member: offsets are then as small as the cluster, and their sum as exact.
    mean = points[order[(size.cumsum(0) - size).clamp_max(len(points) - 1)]].double()
    mean = mean + averages(offsets(points, labels, mean, order), size)
    x, y = offsets(points, labels, mean, order)
    parts = averages(_products(x, y), size, size - correction)
    mean = torch.where(size.unsqueeze(1) > 0, mean, torch.nan)
    return Components(mean, with_ridge(_symmetric(parts), RIDGE), size.double())


def member_moments(points: Tensor, labels: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number, mean and covariance of each centre's members; a centre without members keeps its position.

    Args:
        points: shape ``(n, 2)``.
        labels: the centre of each point, int64 ``(n,)``.
        centres: shape ``(K, 2)``.
    """
    order, size = by_label(labels, len(centres))
    x, y = offsets(points, labels, centres, order)
    shift, covariance = about_mean(averages(itertools.chain((x, y), _products(x, y)), size))
    return size.double(), centres + shift, covariance


def offsets(points: Tensor, labels: Tensor, centres: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Return offsets x and y of points from their centres, (n,) each, one after the other to save memory.

    Args:
        points: shape ``(n, 2)``.
        labels: the centre of each point, int64 ``(n,)``.
        centres: shape ``(K, 2)``.
        order: of the points in the result, int64 ``(n,)``.
    """
    pairs = zip(points.unbind(1), centres.unbind(1), strict=True)
    return tuple((column - centre[labels])[order] for column, centre in pairs)


def _products(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Yield x², xy and y², each made when it is wanted."""
    return (left * right for left, right in ((x, x), (x, y), (y, y)))


def about_mean(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean ``(K, 2)`` and the covariance ``(K, 2, 2)`` of averages of x, y, x², xy and y², ``(K, 5)``."""
    mean = moments[:, :2]
    return mean, _symmetric(moments[:, 2:]) - mean.unsqueeze(2) * mean.unsqueeze(1)


def with_ridge(covariance: Tensor, ridge: float) -> Tensor:
    """Return ``Σ + ridge · I``, ``(K, 2, 2)``.

    Args:
        covariance: Σ, ``(K, 2, 2)``.
        ridge: added to the diagonal.
    """
    return covariance + ridge * torch.eye(2, dtype=covariance.dtype, device=covariance.device)


def summed(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return Σ_i values_i over the members of each component, float64 (count, ...).

    Args:
        values: shape (n, ...).
        labels: the component of each, int64 (n,).
        count: the number of components.
    """
    order, size = by_label(labels, count)
    return torch.segment_reduce(values[order].double(), "sum", lengths=size)


def averages(columns: Iterable[Tensor], size: Tensor, over: Tensor | None = None) -> Tensor:
    """Return sums over runs of numbers, divided by ``over``, ``(K, columns)``; 0 over nothing.

    Args:
        columns: the numbers, (n,) each.
        size: lengths of the runs, ``(K,)``.
        over: divisors, ``(K,)``; ``size`` by default.
    """
    total = torch.stack([torch.segment_reduce(v.contiguous(), "sum", lengths=size) for v in columns], 1)
    return total / (size if over is None else over).clamp_min(1).unsqueeze(1)


def by_label(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the order that brings equal labels together, and the number of each, int64 ``(K,)``.

    Args:
        labels: int64 ``(n,)``.
        count: K.
    """
    return labels.argsort(stable=True), torch.bincount(labels, minlength=count)


def _symmetric(parts: Tensor) -> Tensor:
    return parts[:, [0, 1, 1, 2]].view(-1, 2, 2)


def _check_labels(labels: Tensor, size: int, count: int) -> None:
    if tuple(labels.shape) != (size,) or labels.dtype != torch.int64:
        raise InputError(f"labels is a {labels.dtype} tensor of shape {tuple(labels.shape)}: expected int64 ({size},).")
    if size and not (int(labels.min()) >= 0 and int(labels.max()) < count):
        raise InputError(f"labels are from {int(labels.min())} to {int(labels.max())}: expected 0 to {count - 1}.")
