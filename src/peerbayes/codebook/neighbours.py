"""Find exact nearest centres in the plane, in float64 and bounded memory, without a loop over points or centres."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from peerbayes.errors import InputError

_LARGEST = 1e150  # whose square is still finite
_NARROW, _WIDE = 4, 64  # least and most candidates searched together
_STRIPS = 0.25  # of the square root of the number of centres, if both axes spread alike


def nearest(points: Tensor, centres: Tensor, count: int = 1) -> Tensor:
    """Return the ``count`` nearest centres of every point, by the exact Euclidean distance in float64.

    The plane is cut into strips along the axis in which the centres spread less, each with as many centres, sorted
    along the other axis. From a point's position in its strip a window widens to both sides until ``Δx² > worst kept
    distance²``. Then the strips to both sides are searched in the same way while they are near enough. Rounds continue
    with the points that are still open. Memory is bounded; time is proportional to the centres searched: about ten for
    a point, all K in the worst case.

    Args:
        points: shape ``(N, 2)``, finite.
        centres: shape ``(K, 2)``, finite; NaN (a component without members) is never a neighbour.
        count: number of neighbours, from 1 to K.

    Returns:
        Indices of centres, int64, shape ``(N, count)``, nearest first; of equal distances the lower index first.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import nearest
        >>> centres = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
        >>> nearest(torch.tensor([[0.9, 0.1], [4.0, 0.0]]), centres, count=2)
        tensor([[1, 0],
                [2, 1]])
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
class _Strips:
    """Centres sorted by strip and then along it, with ``width`` positions at infinity between the strips."""

    axes: list[int]  # which coordinate of a point goes along the strips, and which one across
    width: int
    rows: Tensor  # (positions, 3, width): along, across and index of this position and those to the right
    along: Tensor  # (K,) sorted
    keys: Tensor  # (K,) strip · (K + 1) + rank along, sorted
    low: Tensor  # (S,) across, the lowest centre of each strip
    high: Tensor  # (S,)


def _table(centres: Tensor, width: int) -> _Strips:
    size, device = len(centres), centres.device
    spread = centres.std(0, correction=0).tolist()
    axes = [0, 1] if spread[0] >= spread[1] else [1, 0]
    ratio = min(spread) / max(spread) if max(spread) > 0 else 0.0
    strips = max(1, round(_STRIPS * math.sqrt(size * ratio)))
    along, across = centres.T[axes]
    ranks = torch.arange(size, device=device)
    strip = torch.empty_like(ranks)
    strip[across.argsort(stable=True)] = ranks * strips // size
    rank = torch.empty_like(ranks)
    rank[along.argsort(stable=True)] = ranks
    keys, order = (strip * (size + 1) + rank).sort()
    strip, across = strip[order], across[order]
    line = torch.full((3, size + (strips + 1) * width), torch.inf, dtype=torch.float64, device=device)
    line[1:] = 0
    line[:, ranks + (strip + 1) * width] = torch.stack([along[order], across, order.double()])
    counts = torch.bincount(strip, minlength=strips)
    low = torch.segment_reduce(across, "min", lengths=counts)
    high = torch.segment_reduce(across, "max", lengths=counts)
    rows = line.unfold(1, width, 1).transpose(0, 1).contiguous()
    return _Strips(axes, width, rows, along.sort().values, keys, low, high)


def _search(points: Tensor, table: _Strips, count: int) -> Tensor:
    """Return the indices, shape ``(n, count)``, of points given as (along, across), shape ``(2, n)``."""
    along, across = points.unbind()
    size, strips = len(table.keys), len(table.low)
    rank = torch.searchsorted(table.along, along)
    home = (torch.searchsorted(table.low, across, right=True) - 1).clamp_min_(0)
    # Finite, so that positions at infinity are farther than "nothing kept yet".
    kept = torch.full((len(along), count), torch.finfo(torch.float64).max, dtype=torch.float64, device=along.device)
    index = torch.full_like(kept, size)
    for step in range(strips):
        searched = 0
        for strip in (home - step, home + step) if step else (home,):
            inside = strip.clamp(0, strips - 1)
            gap = torch.maximum(table.low[inside] - across, across - table.high[inside]).clamp_min_(0)
            near = ((inside == strip) & (gap.square() <= kept[:, -1])).nonzero().squeeze(1)
            if not len(near):
                continue
            searched += len(near)
            inside = inside[near]
            begin = torch.searchsorted(table.keys, inside * (size + 1) + rank[near]) + (inside + 1) * table.width
            kept[near], index[near] = _scan(along[near], across[near], begin, kept[near], index[near], table)
        if not searched:
            break
    return index.long()


def _scan(
    along: Tensor, across: Tensor, begin: Tensor, kept: Tensor, index: Tensor, table: _Strips
) -> tuple[Tensor, Tensor]:
    """Improve what is kept by the centres to the left of ``begin`` in its strip, then by those from it on."""
    for first, step, edge in ((begin - table.width, -table.width, 0), (begin, table.width, -1)):
        active = torch.arange(len(begin), device=begin.device)
        start, x, y, best, best_index = first, along, across, kept, index
        while len(active):
            row = table.rows.index_select(0, start)
            square = (row[:, 0] - x[:, None]).square_()
            last = square[:, edge].clone()
            square += (row[:, 1] - y[:, None]).square_()
            nearer = _least(square, row[:, 2], min(best.shape[1], table.width))
            best, best_index = _least(
                torch.cat([best, nearer[0]], 1), torch.cat([best_index, nearer[1]], 1), best.shape[1]
            )
            if len(active) == len(begin):
                kept, index = best, best_index
            else:
                kept[active], index[active] = best, best_index
            # Also at equality: a centre of a lower index may be as near.
            still = (last <= best[:, -1]).nonzero().squeeze(1)
            active, start = active[still], start[still] + step
            x, y, best, best_index = x[still], y[still], best[still], best_index[still]
    return kept, index


def _least(square: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` smallest of each row and their indices, equal ones by index."""
    if count == 1:
        least = square.amin(1, keepdim=True)
        return least, torch.where(square == least, index, torch.inf).amin(1, keepdim=True)
    index, order = index.sort(1)
    square, order = square.gather(1, order).sort(dim=1, stable=True)
    return square[:, :count], index.gather(1, order[:, :count])


def check_points(name: str, points: Tensor, least: int = 1) -> None:
    """Check that points are (n, 2), floating-point and finite.

    Args:
        name: the argument's name, for the error.
        points: the points.
        least: smallest n.
    """
    if points.dim() != 2 or points.shape[1] != 2 or len(points) < least or not points.is_floating_point():
        raise InputError(
            f"{name} is a {points.dtype} tensor of shape {tuple(points.shape)}: expected floating-point (n, 2)."
        )
    if len(points) and not bool(points.abs().amax() < _LARGEST):
        raise InputError(f"{name} has entries that are not finite (or beyond 1e150): expected finite numbers.")
