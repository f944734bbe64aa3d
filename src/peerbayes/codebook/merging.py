"""Merge similar components until none qualify, by the moments of their members.

All sums have a fixed order, without atomic additions, so that a result is a function of its arguments, also on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from peerbayes.codebook.neighbours import check_points, nearest
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components, Rule, merged, wasserstein2
from peerbayes.schema import NotNegativeFloat, PositiveFloat, PositiveInt

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


def merge(
    components: Components,
    *,
    gradient: Tensor | None = None,
    spread: Tensor | None = None,
    distance: NotNegativeFloat = 1.5e-7,
    gradient_gate: PositiveFloat = 0.15,
    lr: PositiveFloat = 1e-5,
    spread_gate: PositiveFloat = 1e-3,
    neighbours: PositiveInt = 2,
    rule: Rule = "moment",
) -> tuple[Components, Tensor, dict[str, Any]]:
    """Merge components until no pair qualifies.

    A pair is considered if either is among the ``neighbours`` nearest of the other (by distance of means). It
    qualifies if ``W₂² < distance`` and, for both, ``lr·|gradient| < gradient_gate`` and ``spread < spread_gate``. In a
    round all pairs merge that are each other's best: of least W₂², equal ones by the lower indices. The nearest pair
    of all is one of them, so every round merges while a pair qualifies.

    A merged component has the sum of the counts, the sum of ``|gradient|`` (its mean moves all members), and as its
    spread the pooled variance ``(n₁v₁ + n₂v₂)/n + (n₁n₂/n²)(μ₁ − μ₂)²``, whatever the rule is.

    Args:
        components: K components.
        gradient: gradient of the loss by each mean (its norm, or signed), shape ``(K,)``; ``None`` opens the gate.
        spread: variance of the members' μ, shape ``(K,)``; ``None`` takes ``Σ₁₁``.
        distance: the bound on the squared distance W₂².
        gradient_gate: the bound on ``lr·|gradient|``.
        lr: the learning rate of the means.
        spread_gate: the bound on the spread.
        neighbours: nearest components considered for each one.
        rule: see `merged`.

    Returns:
        The remaining components, in the order of their lowest member; the new index of each old one, int64 ``(K,)``;
        and a log of plain numbers: components ``before`` and ``after``, ``rounds`` (the last one merges nothing),
        ``merged`` pairs; ``near``: pairs that the distance allowed; ``gradient``, ``spread``: those of them that the
        gate blocked; ``gradient_alone``, ``spread_alone``: those that nothing else blocked. These are summed over
        rounds, so a pair that stays blocked counts in each; ``left`` holds the same for the last round.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import components_of, merge
        >>> points = torch.tensor([[0.0, 0.1], [0.0001, 0.1], [0.5, 0.1]])
        >>> components = components_of(points, torch.tensor([0, 1, 2]), count=3)
        >>> left, mapping, log = merge(components, distance=1e-4)
        >>> len(left), mapping.tolist(), log["merged"]
        (2, [0, 0, 1], 1)
    """
    size, device = len(components), components.count.device
    if neighbours < 1:
        raise InputError(f"neighbours is {neighbours}: expected 1 or more.")
    slope = _per_component("gradient", gradient, components, torch.zeros_like(components.count)).abs()
    spread = _per_component("spread", spread, components, components.covariance[:, 0, 0])
    old_to_new = torch.arange(size, device=device)
    log: dict[str, Any] = {"before": size, "after": size, "rounds": 0, "merged": 0}
    log |= dict.fromkeys(("near", "gradient", "gradient_alone", "spread", "spread_alone"), 0)
    while True:
        pairs = _pairs(components.mean, neighbours)
        first, second = (components.select(side) for side in pairs)
        square = wasserstein2(first.mean, first.covariance, second.mean, second.covariance)
        near = square < distance
        pairs, square = pairs[:, near], square[near]
        steep = ~(lr * slope < gradient_gate)[pairs].all(0)
        wide = ~(spread < spread_gate)[pairs].all(0)
        free = ~(steep | wide)
        chosen = _mutual(pairs[:, free], square[free], len(components))
        masks = {"gradient": steep, "gradient_alone": steep & ~wide, "spread": wide, "spread_alone": wide & ~steep}
        seen = {"near": len(square), **{name: int(mask.sum()) for name, mask in masks.items()}}
        log |= {name: log[name] + number for name, number in seen.items()}
        log["rounds"] += 1
        if not chosen.shape[1]:
            return components, old_to_new, log | {"left": seen}
        components, slope, spread, moved = _joined(components, slope, spread, chosen, rule)
        old_to_new = moved[old_to_new]
        log |= {"merged": log["merged"] + chosen.shape[1], "after": len(components)}


def _pairs(mean: Tensor, neighbours: int) -> Tensor:
    """Return the pairs of neighbours, each once and the lower index first, shape ``(2, pairs)``, in ascending order."""
    size = len(mean)
    neighbour = nearest(mean, mean, min(neighbours + 1, size))
    index = torch.arange(size, device=mean.device).unsqueeze(1)
    other = neighbour != index
    # Of many equal means the first ones are listed, perhaps without the component itself.
    other[:, -1] &= ~other.all(1)
    low, high = torch.minimum(neighbour, index)[other], torch.maximum(neighbour, index)[other]
    keys = torch.unique(low * size + high)
    return torch.stack([keys // size, keys % size])


def _mutual(pairs: Tensor, square: Tensor, size: int) -> Tensor:
    """Return the pairs that are the best of both their components, by the square and then by the order given."""
    pairs = pairs[:, square.argsort(stable=True)]
    rank = torch.arange(pairs.shape[1], device=pairs.device)
    best = torch.full((size,), pairs.shape[1], device=pairs.device)
    best.scatter_reduce_(0, pairs.flatten(), rank.repeat(2), "amin")
    return pairs[:, (best[pairs] == rank).all(0)]


def _joined(
    components: Components, slope: Tensor, spread: Tensor, pairs: Tensor, rule: Rule
) -> tuple[Components, Tensor, Tensor, Tensor]:
    """Return the components with pairs merged, their slope and spread, and the new index of each one."""
    low, high = pairs
    first, second = components.select(low), components.select(high)
    joined = merged(first, second, rule)
    share = torch.where(joined.count > 0, second.count / joined.count.clamp_min(1e-300), 0.5)
    between = (first.mean[:, 0] - second.mean[:, 0]).square()
    slope = slope.index_put((low,), slope[low] + slope[high])
    pooled = spread[low] + share * (spread[high] - spread[low]) + share * (1 - share) * between
    spread = spread.index_put((low,), pooled)
    components = replace(
        components,
        mean=components.mean.index_put((low,), joined.mean),
        covariance=components.covariance.index_put((low,), joined.covariance),
        count=components.count.index_put((low,), joined.count),
    )
    left = torch.ones_like(slope, dtype=torch.bool)
    left[high] = False
    target = torch.arange(len(slope), device=slope.device)
    target[high] = low
    return components.select(left), slope[left], spread[left], (left.cumsum(0) - 1)[target]


def _per_component(name: str, values: Tensor | None, components: Components, default: Tensor) -> Tensor:
    if values is None:
        return default
    if tuple(values.shape) != (len(components),) or not values.is_floating_point():
        raise InputError(
            f"{name} is a {values.dtype} tensor of shape {tuple(values.shape)}: "
            f"expected a floating-point number for each of {len(components)} components."
        )
    return values.double()
