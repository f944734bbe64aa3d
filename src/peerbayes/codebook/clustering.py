"""Cluster points of the plane by k-means and EM, in float64 and bounded memory.

There are no loops over points or components, and no sum depends on a device's order of additions. So a result is a
function of its arguments, also on a GPU. `thrifty` clusters with a penalty on the rate: a weight's
component costs bits in the file, and a rare one costs more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from peerbayes.codebook.merging import (
    RIDGE,
    about_mean,
    averages,
    by_label,
    member_moments,
    offsets,
    summed,
    with_ridge,
)
from peerbayes.codebook.neighbours import check_points, nearest
from peerbayes.errors import InputError
from peerbayes.math import noise
from peerbayes.math.gaussians import Components, log_density, merged
from peerbayes.math.noise import Address

# Cut through its mean, a Gaussian has halves with means √(2/π) deviations off, and 2/π of its variance is between them.
_HALF, _SPLIT_GAIN = math.sqrt(2 / math.pi), 2 / math.pi

# With thousands of components, EM considers only so many for a point: those with the
# longest axes, which reach far, and of the others those with the nearest means. All pairs of 11 million weights and
# 6000 components would be 67 billion.
BROAD, NEAR = 96, 32


# ---- k-means ------------------------------------------------------------------------------------------------------


def kmeans(
    points: Tensor,
    count: int,
    address: Address,
    *,
    rounds: int = 30,
    batch: int = 1 << 18,
    full: int = 4,
) -> Tensor:
    """Return centres that make ``Σ_i min_k ‖x_i − c_k‖²`` small: for (μ, σ) of weights, a W₂-optimal quantisation.

    Seeds are split from one centre, on ``max(batch, 32 K)`` random points: in every round, after two steps of Lloyd,
    the clusters of which a split gains most, by ``(2/π) n_k λ_k`` with the largest eigenvalue of their covariance, are
    split along that axis, half as many as there are. In the plane this starts nearer to the optimum than draws by the
    squared distance (k-means++, k-means||). Then come ``rounds`` steps on random mini-batches, each of which moves a
    centre by the sum of its members' offsets over all members it has had, and ``full`` steps of Lloyd on all points.
    If all points fit into a batch, every step is one of Lloyd, and nothing is random. Offsets are taken from the
    centre before they are added up.

    All steps of Lloyd but the last relocate: two centres that are each other's nearest become one where that costs
    less, ``n_i n_j/(n_i + n_j) ‖c_i − c_j‖²``, than a split elsewhere gains. So does a centre without members, which
    costs nothing; it stays where it is in a mini-batch and in the last step, and if no split gains anything (fewer
    distinct points than centres).

    Args:
        points: shape ``(n, 2)``.
        count: the number of centres K, at most n.
        address: of the randomness.
        rounds: steps on mini-batches.
        batch: points of a mini-batch.
        full: steps on all points.

    Returns:
        The centres, float64, shape ``(K, 2)``.

    Example:
        >>> import torch
        >>> from peerbayes import Address
        >>> from peerbayes.codebook import kmeans
        >>> points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [10.0, 0.0], [10.0, 2.0]])
        >>> kmeans(points, count=2, address=Address(0, "doc"))
        tensor([[ 0.,  1.],
                [10.,  1.]], dtype=torch.float64)
    """
    check_points("points", points)
    if not 1 <= count <= len(points):
        raise InputError(f"count is {count} and there are {len(points)} points: expected 1 to {len(points)} centres.")
    if rounds < 0 or full < 0 or batch < 1:
        raise InputError(f"rounds, full and batch are {rounds}, {full} and {batch}: expected at least 0, 0 and 1.")
    points = points.double()
    centres = _split_centres(_subset(points, max(batch, 32 * count), address.sub("seeds")), count)
    if len(points) <= batch:
        return _lloyd(points, centres, rounds + full)
    seen = torch.zeros(count, dtype=torch.int64, device=points.device)
    for number in range(rounds):
        part = _subset(points, batch, address.sub(f"batch {number}"))
        labels = nearest(part, centres).squeeze(1)
        order, size = by_label(labels, count)
        seen = seen + size
        centres = centres + averages(offsets(part, labels, centres, order), size, seen)
    return _lloyd(points, centres, full)


def _subset(points: Tensor, size: int, address: Address) -> Tensor:
    """Return ``size`` random points, with replacement; all of them, if there are no more."""
    if len(points) <= size:
        return points
    return points[noise.integers(address, len(points), size, points.device)]


def _split_centres(points: Tensor, count: int) -> Tensor:
    """Return ``count`` centres, split from one: see `kmeans`."""
    centres = points.mean(0, keepdim=True)
    while len(centres) < count:
        centres = _relocate(*_lloyd_step(points, centres))
        size, centres, covariance = _lloyd_step(points, centres)
        largest, axis = _principal_axis(covariance)
        more = min(max(1, len(centres) // 2), count - len(centres))
        chosen = (size * largest).argsort(descending=True, stable=True)[:more]
        lower, upper = _halves(centres[chosen], largest[chosen], axis[chosen])
        centres = torch.cat([centres.index_put((chosen,), lower), upper])
    return centres


def _lloyd(points: Tensor, centres: Tensor, steps: int) -> Tensor:
    """Return the centres after steps of Lloyd, all but the last with a relocation."""
    for left in reversed(range(steps)):
        size, moved, covariance = _lloyd_step(points, centres)
        if left:
            moved = _relocate(size, moved, covariance)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def _lloyd_step(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of points nearest to each centre, and their moments; see `member_moments`."""
    return member_moments(points, nearest(points, centres).squeeze(1), centres)


def _relocate(size: Tensor, centres: Tensor, covariance: Tensor) -> Tensor:
    """Move the centres that are missed least to where they gain most: see `kmeans`."""
    if len(centres) < 2:
        return centres
    largest, axis = _principal_axis(covariance)
    index = torch.arange(len(centres), device=centres.device)
    first, second = nearest(centres, centres, 2).unbind(1)
    other = torch.where(size > 0, torch.where(first == index, second, first), index)
    share = size / (size + size[other]).clamp_min(1)
    cost = size[other] * share * (centres - centres[other]).square().sum(1)
    pair = (other[other] == index) & ((index < other) | (size == 0))
    cost, free = torch.where(pair, cost, torch.inf).sort(stable=True)
    gain, split = (_SPLIT_GAIN * size * largest).sort(descending=True, stable=True)
    better = (cost < gain).nonzero().squeeze(1)
    free, split = free[better], split[better]
    busy = torch.zeros_like(index, dtype=torch.bool)
    busy[free] = busy[other[free]] = True
    free, split = free[~busy[split]], split[~busy[split]]
    lower, upper = _halves(centres[split], largest[split], axis[split])
    joined, weight = other[free], share[free].unsqueeze(1)
    centres = centres.index_put((joined,), centres[joined] + weight * (centres[free] - centres[joined]))
    return centres.index_put((torch.cat([split, free]),), torch.cat([lower, upper]))


def _halves(centres: Tensor, largest: Tensor, axis: Tensor) -> tuple[Tensor, Tensor]:
    offset = _HALF * largest.sqrt().unsqueeze(1) * axis
    return centres - offset, centres + offset


def _principal_axis(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue (at least 0) and its unit vector, shapes ``(K,)`` and ``(K, 2)``."""
    half = 0.5 * (covariance[:, 0, 0] - covariance[:, 1, 1])
    middle = 0.5 * (covariance[:, 0, 0] + covariance[:, 1, 1])
    angle = 0.5 * torch.atan2(covariance[:, 0, 1], half)
    largest = (middle + torch.hypot(half, covariance[:, 0, 1])).clamp_min(0)
    return largest, torch.stack([angle.cos(), angle.sin()], 1)


# ---- expectation-maximisation --------------------------------------------------------------------------------------


def em(
    points: Tensor,
    components: Components,
    steps: int,
    batch: int,
    address: Address,
    *,
    ridge: float = RIDGE,
    decay: float = 0.6,
) -> Components:
    """Fit a mixture by expectation-maximisation of ``Σ_i log Σ_k π_k N(x_i; m_k, Σ_k)``, on all points or mini-batches.

    ``r_ik = softmax_k(log π_k + log N(x_i; m_k, Σ_k))``; then ``π_k``, ``m_k`` and ``Σ_k`` are the share, the mean and
    the covariance (plus a ridge) of the points weighted by ``r_ik``. If all points fit into a batch this is plain EM.
    Otherwise step t = 0, 1, ... averages these moments into the old ones with weight ``(t + 2)^−decay`` (stepwise EM).
    A component without weight does not change. With more than ``BROAD + NEAR`` components, a point considers only the
    longest and the nearest ones (`_joint`).

    Args:
        points: shape ``(n, 2)``.
        components: where to start; mixture weights are the shares of the counts.
        steps: number of steps.
        batch: points of a step.
        address: of the random choice of points.
        ridge: added to the diagonal of covariances.
        decay: of the weight of a mini-batch; between ½ and 1 it converges.

    Returns:
        The components; counts are ``n π_k``.

    Example:
        >>> import torch
        >>> from peerbayes import Address
        >>> from peerbayes.codebook import components_of, em
        >>> points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [10.0, 0.0], [10.0, 2.0]])
        >>> start = components_of(points, torch.tensor([0, 0, 1, 1]), count=2)
        >>> em(points, start, steps=2, batch=4, address=Address(0, "doc"), ridge=1.0).mean.round(decimals=4)
        tensor([[ 0.,  1.],
                [10.,  1.]], dtype=torch.float64)
    """
    check_points("points", points)
    if steps < 0 or batch < 1:
        raise InputError(f"steps and batch are {steps} and {batch}: expected at least 0 and 1.")
    points = points.double()
    size = len(points)
    components = replace(components, count=components.count * (size / components.count.sum()))
    for step in range(steps):
        part = _subset(points, batch, address.sub(f"em {step}"))
        update = _maximised(part, components, ridge)
        update = replace(update, count=update.count * (size / len(part)))
        if size <= batch:
            components = update
        else:
            weight = (step + 2) ** -decay
            old = replace(components, count=components.count * (1 - weight))
            components = merged(old, replace(update, count=update.count * weight))
    return components


def most_probable(points: Tensor, components: Components) -> Tensor:
    """Return the most probable component of each point, (n,); see `_joint`.

    Args:
        points: shape ``(n, 2)``.
        components: K components.
    """
    labels = (
        indices.gather(1, joint.argmax(1, keepdim=True)) for _, indices, joint in _joint(points.double(), components)
    )
    return torch.cat(list(labels)).squeeze(1)


def _joint(points: Tensor, components: Components) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield points in parts, with C components for each, (n, C), and ``log π_k + log N(x_i; m_k, Σ_k)`` of these.

    They are the ``BROAD`` components with the longest axes and the ``NEAR`` others with the nearest means, or all if
    there are no more. Components without weight have probability 0.
    """
    present = (components.count > 0).nonzero().squeeze(1)
    longest = _principal_axis(components.covariance[present])[0].argsort(descending=True, stable=True)
    broad, narrow = present, present[:0]
    if len(present) > BROAD + NEAR:
        broad, narrow = present[longest[:BROAD]], present[longest[BROAD:]]
    log_weight = (components.count / components.count.sum()).log()
    room = (1 << 20) if points.device.type == "cpu" else (1 << 23)  # pairs at once
    for part in points.split(room // (BROAD + NEAR)):
        indices = broad.expand(len(part), -1)
        if len(narrow):
            indices = torch.cat([indices, narrow[nearest(part, components.mean[narrow], NEAR)]], 1)
        density = log_density(part.unsqueeze(1), components.mean[indices], components.covariance[indices])
        yield part, indices, log_weight[indices] + density


def _maximised(points: Tensor, old: Components, ridge: float) -> Components:
    total = torch.zeros(len(old), 6, dtype=torch.float64, device=points.device)
    for part, indices, joint in _joint(points, old):
        share = joint.softmax(1)
        x, y = (part.unsqueeze(1) - old.mean[indices]).unbind(2)
        along, across = share * x, share * y
        columns = torch.stack([share, along, across, along * x, along * y, across * y], 2)
        total += summed(columns.flatten(0, 1), indices.flatten(), len(old))
    size, present = total[:, 0], total[:, 0] > 0
    # Moments are about the old mean, a few standard deviations away at most: little cancels here.
    shift, inner = about_mean(total[:, 1:] / torch.where(present, size, 1.0).unsqueeze(1))
    covariance = torch.where(present[:, None, None], with_ridge(inner, ridge), old.covariance)
    return Components(old.mean + shift, covariance, size)


MAX_CENTRES = 1 << 16  # centres
MANY, NEAREST = 1024, 8  # beyond MANY centres, so many of the nearest are compared, unless one farther off could win
_CHUNK = 1 << 18


def thrifty(points: Tensor, part: Tensor, worth: float, *, steps: int = 4) -> tuple[Tensor, Tensor]:
    """Return centres and labels that make ``Σ_i ‖x_i − c_k(i)‖² + worth · bits_i`` small: entropy-constrained k-means.

    ``bits_i = −log₂`` of the share of the part's points that the centre has. k-means makes small cells of dense
    regions; here cells of about equal width, ``√(6 worth / ln 2)``, are best, about a quarter of a bit a point above
    the optimum [1]. So the initial clusters are squares of that width. Then come steps of Lloyd [2]: every point takes
    the centre of the lowest cost, every centre becomes the mean of its points, and one without points is dropped.

    Args:
        points: shape ``(n, 2)``.
        part: of each point, int64, shape ``(n,)``: each part has its frequencies, as in the file.
        worth: the cost of a bit as a squared distance, large enough for at most 65,536 centres.
        steps: of Lloyd.

    Returns:
        Centres, float64, ``(K, 2)``, and the centre of each point, int64, ``(n,)``; every centre has points.

    [1] Gish and Pierce, IEEE Transactions on Information Theory 14 (1968).
    [2] Chou, Lookabaugh and Gray, IEEE Transactions on Acoustics, Speech, and Signal Processing 37 (1989).

    Example:
        >>> import torch
        >>> from peerbayes.codebook import thrifty
        >>> points = torch.tensor([[0.0, 0.0], [0.1, 0.0], [9.0, 0.0], [9.1, 0.0]])
        >>> centres, labels = thrifty(points, torch.zeros(4, dtype=torch.int64), worth=0.1)
        >>> centres, labels
        (tensor([[0.0500, 0.0000],
                [9.0500, 0.0000]], dtype=torch.float64), tensor([0, 0, 1, 1]))
    """
    check_points("points", points)
    if not 0 < worth < math.inf:
        raise InputError(f"worth is {worth}: expected a positive number.")
    points, parts = points.double(), int(part.max()) + 1
    count, labels = _squares(points, math.sqrt(6 * worth / math.log(2)))
    if count > MAX_CENTRES:
        raise InputError(
            f"thrift is too small: a bit is worth {worth:g}, which makes more than {MAX_CENTRES:,} squares."
        )
    _, centres, _ = member_moments(points, labels, points.new_zeros(count, 2))
    for _ in range(steps):
        cheapest = _cheapest(points, part, centres, worth * _bits(labels, part, len(centres), parts))
        if torch.equal(cheapest, labels):
            break
        present = torch.bincount(cheapest, minlength=len(centres)) > 0
        labels = (present.long().cumsum(0) - 1)[cheapest]
        _, centres, _ = member_moments(points, labels, centres[present])
    return centres, labels


def _squares(points: Tensor, width: float) -> tuple[int, Tensor]:
    """Return the number of squares of this width with points, and the square of each point, int64 ``(n,)``."""
    positions = (points / width).round_()
    positions -= positions.amin(0)
    rows, columns = (positions.amax(0) + 1).tolist()
    if not rows * columns < 1 << 53:  # beyond float64's integers
        return 1 << 53, torch.empty(0, dtype=torch.int64)
    # As single numbers: unique rows take several times the time and memory.
    cells, labels = positions[:, 0].mul(columns).add_(positions[:, 1]).unique(return_inverse=True)
    return len(cells), labels


def _cheapest(points: Tensor, part: Tensor, centres: Tensor, cost: Tensor) -> Tensor:
    """Return the centre with the least squared distance + cost by (part, centre) of every point."""
    if len(centres) <= MANY:
        return _cheapest_of_all(points, part, centres, cost)
    labels, least = [], cost.amin(1)
    for here, part_here in zip(points.split(_CHUNK), part.split(_CHUNK), strict=True):
        near = nearest(here, centres, NEAREST)
        square = (here.unsqueeze(1) - centres[near]).square_().sum(2)
        total, column = (square + cost[part_here.unsqueeze(1), near]).min(1)
        label = near.gather(1, column.unsqueeze(1)).squeeze(1)
        left = (square[:, -1] + least[part_here] < total).nonzero().squeeze(1)
        label[left] = _cheapest_of_all(here[left], part_here[left], centres, cost)
        labels.append(label)
    return torch.cat(labels)


def _cheapest_of_all(points: Tensor, part: Tensor, centres: Tensor, cost: Tensor) -> Tensor:
    labels = torch.empty(len(points), dtype=torch.int64, device=points.device)
    # A processor wants its working set in the cache, an accelerator many points at once.
    size = max(1, ((1 << 17) if points.device.type == "cpu" else (1 << 24)) // len(centres))
    for first in range(0, len(points), size):
        chunk = slice(first, first + size)
        square = cost[part[chunk]]
        for axis in range(2):
            square += (points[chunk, axis, None] - centres[:, axis]).square_()
        labels[chunk] = square.argmin(1)
    return labels


def _bits(labels: Tensor, part: Tensor, centres: int, parts: int) -> Tensor:
    """Return −log₂ of the share of each centre in each part, (parts, centres); half a point more for all of them."""
    count = torch.bincount(part * centres + labels, minlength=parts * centres).view(parts, centres).double() + 0.5
    return -(count / count.sum(1, keepdim=True)).log2()
