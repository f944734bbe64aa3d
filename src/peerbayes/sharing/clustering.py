"""Clustering in the plane: exact nearest centres, k-means, members' moments and EM, in float64 and bounded memory.

Nothing loops over points or components, and no sum depends on the order in which a device does its additions, so that
a result is a function of its arguments, also on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peerbayes import noise
from peerbayes.errors import InputError
from peerbayes.noise import Address
from peerbayes.sharing.gaussians import Components, log_density, merged

RIDGE = 1e-12  # on the diagonal of a covariance: far below the 1e-10 of a typical cluster
_LARGEST = 1e150  # whose square is still finite
_NARROW, _WIDE = 4, 64  # candidates that are looked at together, at least and at most
_STRIPS = 0.25  # of the square root of the number of centres, if both axes spread alike
# Cut through its mean, a Gaussian has halves with means √(2/π) deviations off, and 2/π of its variance is between them.
_HALF, _SPLIT_GAIN = math.sqrt(2 / math.pi), 2 / math.pi


# ---- nearest centres ----------------------------------------------------------------------------------------------


def nearest(points: Tensor, centres: Tensor, count: int = 1) -> Tensor:
    r"""Return the ``count`` nearest centres of every point, by the exact Euclidean distance in float64.

    The plane is cut into strips along the axis in which the centres spread less, each with as many centres, which are
    sorted along the other axis. From a point's place in its own strip a window widens to both sides until
    ``Δx² > worst kept distance²``, then the strips to both sides are searched in the same way while they are as near.
    Rounds take only the points that are still open. Memory is bounded; the time is that of the centres looked at:
    about ten a point, all K in the worst case.

    Args:
        points: shape ``(N, 2)``, finite.
        centres: shape ``(K, 2)``, finite; one that is not a number (a component without members) is nowhere.
        count: how many, from 1 to K.

    Returns:
        Indices of centres, int64, shape ``(N, count)``, nearest first; of equal distances the lower index first.
    """
    check_points("points", points, least=0)
    present = ~centres.isnan().any(-1)
    if not bool(present.all()):
        return present.nonzero().squeeze(1)[nearest(points, centres[present], count)]
    check_points("centres", centres)
    if not 1 <= count <= len(centres):
        raise InputError(f"count is {count} and there are {len(centres)} centres: expected 1 to {len(centres)}.")
    table = _table(centres.double(), min(max(_NARROW, count), _WIDE))
    # A processor wants its working set in the cache, an accelerator many points at once.
    room = (1 << 19) if points.device.type == "cpu" else (1 << 23)
    parts = points.split(max(1, room // (table.width + count)))
    return torch.cat([_search(part.double().T[table.axes], table, count) for part in parts])


@dataclass(frozen=True)
class _Table:
    """Centres sorted by strip and then along it, with ``width`` places at infinity between the strips."""

    axes: list[int]  # which coordinate of a point goes along the strips, and which one across
    width: int
    rows: Tensor  # (places, 3, width): along, across and index of this place and those to the right
    along: Tensor  # (K,) sorted
    keys: Tensor  # (K,) strip · (K + 1) + rank along, sorted
    low: Tensor  # (S,) across, the lowest centre of each strip
    high: Tensor  # (S,)


def _table(centres: Tensor, width: int) -> _Table:
    size, device = len(centres), centres.device
    spread = centres.std(0, correction=0).tolist()
    axes = [0, 1] if spread[0] >= spread[1] else [1, 0]
    ratio = min(spread) / max(spread) if max(spread) > 0 else 0.0
    strips = max(1, round(_STRIPS * math.sqrt(size * ratio)))
    along, across = centres.T[axes]
    places = torch.arange(size, device=device)
    strip = torch.empty_like(places)
    strip[across.argsort(stable=True)] = places * strips // size
    rank = torch.empty_like(places)
    rank[along.argsort(stable=True)] = places
    keys, order = (strip * (size + 1) + rank).sort()
    strip, across = strip[order], across[order]
    line = torch.full((3, size + (strips + 1) * width), torch.inf, dtype=torch.float64, device=device)
    line[1:] = 0
    line[:, places + (strip + 1) * width] = torch.stack([along[order], across, order.double()])
    counts = torch.bincount(strip, minlength=strips)
    low = torch.segment_reduce(across, "min", lengths=counts)
    high = torch.segment_reduce(across, "max", lengths=counts)
    rows = line.unfold(1, width, 1).transpose(0, 1).contiguous()
    return _Table(axes, width, rows, along.sort().values, keys, low, high)


def _search(points: Tensor, table: _Table, count: int) -> Tensor:
    """Return the indices, shape ``(n, count)``, of points given as (along, across), shape ``(2, n)``."""
    along, across = points.unbind()
    size, strips = len(table.keys), len(table.low)
    rank = torch.searchsorted(table.along, along)
    home = (torch.searchsorted(table.low, across, right=True) - 1).clamp_min_(0)
    # Finite, so that places at infinity are farther than "nothing kept yet".
    kept = torch.full((len(along), count), torch.finfo(torch.float64).max, dtype=torch.float64, device=along.device)
    index = torch.full_like(kept, size)
    for step in range(strips):
        found = 0
        for strip in (home - step, home + step) if step else (home,):
            inside = strip.clamp(0, strips - 1)
            gap = torch.maximum(table.low[inside] - across, across - table.high[inside]).clamp_min_(0)
            near = ((inside == strip) & (gap.square() <= kept[:, -1])).nonzero().squeeze(1)
            if not len(near):
                continue
            found += len(near)
            inside = inside[near]
            place = torch.searchsorted(table.keys, inside * (size + 1) + rank[near]) + (inside + 1) * table.width
            kept[near], index[near] = _scan(along[near], across[near], place, kept[near], index[near], table)
        if not found:
            break
    return index.long()


def _scan(
    along: Tensor, across: Tensor, place: Tensor, kept: Tensor, index: Tensor, table: _Table
) -> tuple[Tensor, Tensor]:
    """Improve what is kept by the centres to the left of ``place`` in its strip, then by those from it on."""
    for first, step, edge in ((place - table.width, -table.width, 0), (place, table.width, -1)):
        active = torch.arange(len(place), device=place.device)
        start, x, y, best, which = first, along, across, kept, index
        while len(active):
            row = table.rows.index_select(0, start)
            square = (row[:, 0] - x[:, None]).square_()
            last = square[:, edge].clone()
            square += (row[:, 1] - y[:, None]).square_()
            found = _least(square, row[:, 2], min(best.shape[1], table.width))
            best, which = _least(torch.cat([best, found[0]], 1), torch.cat([which, found[1]], 1), best.shape[1])
            if len(active) == len(place):
                kept, index = best, which
            else:
                kept[active], index[active] = best, which
            # Also at equality: a centre of a lower index may be as near.
            still = (last <= best[:, -1]).nonzero().squeeze(1)
            active, start = active[still], start[still] + step
            x, y, best, which = x[still], y[still], best[still], which[still]
    return kept, index


def _least(square: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` smallest of each row and their indices, equal ones by index."""
    if count == 1:
        least = square.amin(1, keepdim=True)
        return least, torch.where(square == least, index, torch.inf).amin(1, keepdim=True)
    index, order = index.sort(1)
    square, order = square.gather(1, order).sort(dim=1, stable=True)
    return square[:, :count], index.gather(1, order[:, :count])


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
    r"""Centres that make ``Σ_i min_k ‖x_i − c_k‖²`` small: for (μ, σ) of weights, a W₂-optimal quantisation.

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
        address: where the randomness belongs.
        rounds: steps on mini-batches.
        batch: points of a mini-batch.
        full: steps on all points.

    Returns:
        The centres, float64, shape ``(K, 2)``.
    """
    check_points("points", points)
    if not 1 <= count <= len(points):
        raise InputError(f"count is {count} and there are {len(points)} points: expected 1 to {len(points)} centres.")
    if rounds < 0 or full < 0 or batch < 1:
        raise InputError(f"rounds, full and batch are {rounds}, {full} and {batch}: expected at least 0, 0 and 1.")
    points = points.double()
    centres = _grown(_subset(points, max(batch, 32 * count), address.sub("seeds")), count)
    if len(points) <= batch:
        return _lloyd(points, centres, rounds + full)
    seen = torch.zeros(count, dtype=torch.int64, device=points.device)
    for number in range(rounds):
        part = _subset(points, batch, address.sub(f"batch {number}"))
        labels = nearest(part, centres).squeeze(1)
        order, size = _by_label(labels, count)
        seen = seen + size
        centres = centres + _per(_sums((part - centres[labels])[order], size), seen)
    return _lloyd(points, centres, full)


def _subset(points: Tensor, size: int, address: Address) -> Tensor:
    """Return ``size`` random points, with replacement; all of them, if there are no more."""
    if len(points) <= size:
        return points
    return points[noise.integers(address, len(points), size, points.device)]


def _grown(points: Tensor, count: int) -> Tensor:
    """Return ``count`` centres, split from one: see `kmeans`."""
    centres = points.mean(0, keepdim=True)
    while len(centres) < count:
        centres = _relocated(*_moved(points, centres))
        size, centres, covariance = _moved(points, centres)
        largest, axis = _longest(covariance)
        more = min(max(1, len(centres) // 2), count - len(centres))
        chosen = (size * largest).argsort(descending=True, stable=True)[:more]
        lower, upper = _halves(centres[chosen], largest[chosen], axis[chosen])
        centres = torch.cat([centres.index_put((chosen,), lower), upper])
    return centres


def _lloyd(points: Tensor, centres: Tensor, steps: int) -> Tensor:
    """Return the centres after steps of Lloyd, all but the last with a relocation."""
    for left in reversed(range(steps)):
        size, moved, covariance = _moved(points, centres)
        if left:
            moved = _relocated(size, moved, covariance)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def _moved(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many points are nearest to each centre, and their moments; see `member_moments`."""
    return member_moments(points, nearest(points, centres).squeeze(1), centres)


def member_moments(points: Tensor, labels: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many members each centre has, their mean, and their covariance; a centre without any stays."""
    order, size = _by_label(labels, len(centres))
    x, y = (points - centres[labels])[order].unbind(1)
    moments = _per(_sums(torch.stack([x, y, x * x, x * y, y * y], 1), size), size)
    shift = moments[:, :2]
    return size.double(), centres + shift, _symmetric(moments[:, 2:]) - shift.unsqueeze(2) * shift.unsqueeze(1)


def _relocated(size: Tensor, centres: Tensor, covariance: Tensor) -> Tensor:
    """Return the centres with those that are missed least where they gain most: see `kmeans`."""
    if len(centres) < 2:
        return centres
    largest, axis = _longest(covariance)
    own = torch.arange(len(centres), device=centres.device)
    first, second = nearest(centres, centres, 2).unbind(1)
    other = torch.where(size > 0, torch.where(first == own, second, first), own)
    share = size / (size + size[other]).clamp_min(1)
    cost = size[other] * share * (centres - centres[other]).square().sum(1)
    pair = (other[other] == own) & ((own < other) | (size == 0))
    cost, free = torch.where(pair, cost, torch.inf).sort(stable=True)
    gain, split = (_SPLIT_GAIN * size * largest).sort(descending=True, stable=True)
    better = (cost < gain).nonzero().squeeze(1)
    free, split = free[better], split[better]
    busy = torch.zeros_like(own, dtype=torch.bool)
    busy[free] = busy[other[free]] = True
    free, split = free[~busy[split]], split[~busy[split]]
    lower, upper = _halves(centres[split], largest[split], axis[split])
    joined, weight = other[free], share[free].unsqueeze(1)
    centres = centres.index_put((joined,), centres[joined] + weight * (centres[free] - centres[joined]))
    return centres.index_put((torch.cat([split, free]),), torch.cat([lower, upper]))


def _halves(centres: Tensor, largest: Tensor, axis: Tensor) -> tuple[Tensor, Tensor]:
    offset = _HALF * largest.sqrt().unsqueeze(1) * axis
    return centres - offset, centres + offset


def _longest(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue (at least 0) and its unit vector, shapes ``(K,)`` and ``(K, 2)``."""
    half = 0.5 * (covariance[:, 0, 0] - covariance[:, 1, 1])
    middle = 0.5 * (covariance[:, 0, 0] + covariance[:, 1, 1])
    angle = 0.5 * torch.atan2(covariance[:, 0, 1], half)
    largest = (middle + torch.hypot(half, covariance[:, 0, 1])).clamp_min(0)
    return largest, torch.stack([angle.cos(), angle.sin()], 1)


def _by_label(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the order that brings equal labels together, and how many there are of each, int64 ``(K,)``."""
    return labels.argsort(stable=True), torch.bincount(labels, minlength=count)


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return sums over runs of rows, shape ``(K, columns)``; they are added up in order, never by atomic additions."""
    return torch.stack([torch.segment_reduce(v.contiguous(), "sum", lengths=lengths) for v in values.unbind(1)], 1)


def _per(total: Tensor, size: Tensor) -> Tensor:
    """Return ``total / size`` row by row; 0 for sums over nothing."""
    return total / size.clamp_min(1).unsqueeze(1)


# ---- members' moments and EM --------------------------------------------------------------------------------------


def components_of(points: Tensor, labels: Tensor, count: int, *, correction: int = 0) -> Components:
    r"""Return the Gaussians of the members: ``m_k = mean x_i``, ``Σ_k = Σ (x_i−m_k)(x_i−m_k)ᵀ/(n_k − c) + 10⁻¹² I``.

    The offsets from the mean are taken before they are squared. With c = 0 the moments are those of the members
    exactly, so that merging by ``"moment"`` and the marginal variance ``Σ₁₁ + Σ₂₂ + s²`` are exact too.

    Args:
        points: shape ``(n, 2)``.
        labels: the component of each point, int64, shape ``(n,)``.
        count: the number of components K.
        correction: c; 1 gives the unbiased estimate. Components of no more than c members have covariance 10⁻¹² I.

    Returns:
        K components. One without members has count 0 and a mean that is not a number, so that it is nearest to none.
    """
    check_points("points", points)
    _check_labels(labels, len(points), count)
    order, size = _by_label(labels, count)
    points, labels = points.double()[order], labels[order]
    # From any member: the offsets are then as small as the cluster, and their sum as exact.
    mean = points[(size.cumsum(0) - size).clamp_max(len(points) - 1)]
    mean = mean + _per(_sums(points - mean[labels], size), size)
    x, y = (points - mean[labels]).unbind(1)
    parts = _per(_sums(torch.stack([x * x, x * y, y * y], 1), size), size - correction)
    mean = torch.where(size.unsqueeze(1) > 0, mean, torch.nan)
    return Components(mean, _symmetric(parts) + RIDGE * _eye(points), size.double())


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
    r"""Expectation-maximisation of ``Σ_i log Σ_k π_k N(x_i; m_k, Σ_k)``, on all points or on random mini-batches.

    ``r_ik = softmax_k(log π_k + log N(x_i; m_k, Σ_k))``; then ``π_k``, ``m_k`` and ``Σ_k`` are the share, the mean and
    the covariance (plus a ridge) of the points weighted by ``r_ik``. If all points fit into a batch this is plain EM.
    Otherwise step t = 0, 1, ... averages these moments into the old ones with weight ``(t + 2)^−decay`` (stepwise EM).
    A component of no weight stays as it is.

    Args:
        points: shape ``(n, 2)``.
        components: where to start; mixture weights are the shares of the counts.
        steps: how many.
        batch: points of a step.
        address: where the choice of points belongs.
        ridge: what is added to the diagonal of covariances.
        decay: how fast the weight of a mini-batch falls; between ½ and 1 it converges.

    Returns:
        The components; counts are ``n π_k``.
    """
    check_points("points", points)
    if steps < 0 or batch < 1:
        raise InputError(f"steps and batch are {steps} and {batch}: expected at least 0 and 1.")
    points = points.double()
    size = len(points)
    components = replace(components, count=components.count * (size / components.count.sum()))
    for step in range(steps):
        part = _subset(points, batch, address.sub(f"em {step}"))
        found = _maximised(part, components, ridge)
        found = replace(found, count=found.count * (size / len(part)))
        if size <= batch:
            components = found
        else:
            weight = (step + 2) ** -decay
            old = replace(components, count=components.count * (1 - weight))
            components = merged(old, replace(found, count=found.count * weight))
    return components


def _maximised(points: Tensor, old: Components, ridge: float) -> Components:
    size = torch.zeros_like(old.count)
    total = torch.zeros(len(old), 5, dtype=torch.float64, device=points.device)
    log_weight = (old.count / old.count.sum()).log()
    for part in points.split(max(1, (1 << 22) // len(old))):
        joint = log_weight + log_density(part.unsqueeze(1), old.mean, old.covariance)
        share = joint.where(old.count > 0, -math.inf).softmax(1)
        x, y = (part.unsqueeze(1) - old.mean).unbind(2)
        along, across = share * x, share * y
        size += share.sum(0)
        total += torch.stack([v.sum(0) for v in (along, across, along * x, along * y, across * y)], 1)
    present = size > 0
    moments = total / torch.where(present, size, 1.0).unsqueeze(1)
    shift = moments[:, :2]
    # Moments are about the old mean, a few standard deviations away at most: little cancels here.
    inner = _symmetric(moments[:, 2:]) - shift.unsqueeze(2) * shift.unsqueeze(1)
    covariance = torch.where(present[:, None, None], inner + ridge * _eye(points), old.covariance)
    return Components(old.mean + shift, covariance, size)


def _symmetric(parts: Tensor) -> Tensor:
    return parts[:, [0, 1, 1, 2]].view(-1, 2, 2)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(2, dtype=like.dtype, device=like.device)


def check_points(name: str, points: Tensor, least: int = 1) -> None:
    """Refuse what is not (n, 2), floating-point and finite, with n of at least ``least``."""
    if points.dim() != 2 or points.shape[1] != 2 or len(points) < least or not points.is_floating_point():
        raise InputError(
            f"{name} is a {points.dtype} tensor of shape {tuple(points.shape)}: expected floating-point (n, 2)."
        )
    if len(points) and not bool(points.abs().amax() < _LARGEST):
        raise InputError(f"{name} has entries that are not finite (or beyond 1e150): expected finite numbers.")


def _check_labels(labels: Tensor, size: int, count: int) -> None:
    if tuple(labels.shape) != (size,) or labels.dtype != torch.int64:
        raise InputError(f"labels is a {labels.dtype} tensor of shape {tuple(labels.shape)}: expected int64 ({size},).")
    if size and not (int(labels.min()) >= 0 and int(labels.max()) < count):
        raise InputError(f"labels are from {int(labels.min())} to {int(labels.max())}: expected 0 to {count - 1}.")
