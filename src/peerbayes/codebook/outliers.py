"""Choose outliers, and the weights that blend several components."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from peerbayes.codebook.neighbours import nearest
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components, log_density, mahalanobis

_CHUNK = 1 << 20


def outliers(mean: Tensor, *, gradient: Tensor | None = None, threshold: float = 0.2, top: float = 0.01) -> Tensor:
    """Return the outliers: ``|μ_i| > threshold``, or ``|gradient_i|`` among the largest ``⌊top·n⌋``.

    Args:
        mean: means of all weights, shape ``(n,)``.
        gradient: how much the loss depends on each, shape ``(n,)``, any sign; ``None`` uses the means alone.
        threshold: the bound on the means.
        top: a share from 0 to 1, as a decimal: 0.29 of 100 are 29.

    Returns:
        A mask, shape ``(n,)``. Of equal gradients at the bound those of lower index are outliers.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import outliers
        >>> outliers(torch.tensor([0.1, -0.5, 0.0, 0.2]), threshold=0.3)
        tensor([False,  True, False, False])
    """
    if mean.dim() != 1 or not mean.is_floating_point():
        raise InputError(f"mean is a {mean.dtype} tensor of shape {tuple(mean.shape)}: expected floating-point (n,).")
    if not 0 <= top <= 1:
        raise InputError(f"top is {top}: expected a share from 0 to 1.")
    mask = mean.abs() > threshold
    if gradient is not None:
        if gradient.shape != mean.shape:
            raise InputError(f"gradient has shape {tuple(gradient.shape)}: expected {tuple(mean.shape)}, as mean has.")
        mask[gradient.abs().argsort(descending=True, stable=True)[: steepest(top, len(mean))]] = True
    return mask


def steepest(top: float, count: int) -> int:
    """Return the number of outliers by gradient: ``⌊top·count⌋``, of the share as a decimal.

    Args:
        top: the share.
        count: weights.

    Example:
        >>> from peerbayes.codebook import steepest
        >>> steepest(0.29, 100)
        29
    """
    return math.floor(Fraction(str(top)) * count)


def blends(
    points: Tensor,
    labels: Tensor,
    components: Components,
    *,
    level: float = 5.991,
    candidates: int = 5,
    keep: int = 2,
    columns: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return points off their own component, ``D²(x_i; m_k, Σ_k) > level``, as blends of the components around them.

    Of the ``candidates`` components with the nearest means those with ``D² ≤ level`` are kept, and in any case the best
    ``keep`` by density; of these the best ``columns`` by density are returned, with weights ``α_k ∝ N(x_i; m_k, Σ_k)``
    that add up to 1: the softmax of log-densities. With as many columns as ``keep`` (the default) these are just the
    best ``keep`` by density.

    Args:
        points: (μ, σ) of weights, shape ``(n, 2)``.
        labels: the component of each, int64, shape ``(n,)``.
        components: K components, positive definite.
        level: the bound on D²; 5.991 is the 95 % quantile of χ² with 2 degrees of freedom.
        candidates: components considered; K, if there are fewer.
        keep: how many to keep at least.
        columns: how many to return; ``None`` is ``keep``.

    Returns:
        Which points, int64 ``(E,)``, ascending; their components, int64 ``(E, columns)``, by falling density; and the
        weights, float64 ``(E, columns)``. Where fewer are kept than there are columns, the weight is 0 and the
        component is again the first.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import Components, blends
        >>> mean, count = torch.tensor([[0.0, 0.0], [10.0, 0.0]]).double(), torch.ones(2).double()
        >>> components = Components(mean, torch.eye(2).double().expand(2, 2, 2), count)
        >>> index, component, weight = blends(torch.tensor([[0.5, 0.0], [5.0, 0.0]]), torch.tensor([0, 0]), components)
        >>> index, weight
        (tensor([1]), tensor([[0.5000, 0.5000]], dtype=torch.float64))
    """
    columns = keep if columns is None else columns
    if not 1 <= keep <= min(candidates, columns):
        raise InputError(
            f"keep is {keep}: expected 1 to {min(candidates, columns)}, as many as candidates and columns."
        )
    if tuple(labels.shape) != (len(points),) or labels.dtype != torch.int64:
        raise InputError(
            f"labels is a {labels.dtype} tensor of shape {tuple(labels.shape)}: expected int64 ({len(points)},)."
        )
    mean, covariance = components.mean, components.covariance
    if not bool((covariance.det() > 0).all()):
        raise InputError("components have singular covariances: expected positive definite ones.")
    off = [
        mahalanobis(part, mean[label], covariance[label]) > level
        for part, label in zip(points.split(_CHUNK), labels.split(_CHUNK), strict=True)
    ]
    index = torch.cat(off).nonzero().squeeze(1)
    chosen = points[index]
    component = nearest(chosen, mean, min(candidates, len(components)))
    at = (chosen.unsqueeze(1), mean[component], covariance[component])
    density, order = log_density(*at).sort(dim=1, descending=True, stable=True)
    component, square = component.gather(1, order), mahalanobis(*at).gather(1, order)
    rank = torch.arange(component.shape[1], device=points.device)
    kept = ((rank < keep) | (square <= level)) & (rank < columns)
    weight = density.masked_fill(~kept, -math.inf).softmax(1)
    component = torch.where(kept, component, component[:, :1])
    short = columns - component.shape[1]
    if short > 0:
        component = torch.cat([component, component[:, :1].expand(-1, short)], 1)
        weight = torch.cat([weight, weight.new_zeros(len(weight), short)], 1)
    return index, component[:, :columns], weight[:, :columns]
