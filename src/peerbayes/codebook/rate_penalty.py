"""Cluster with a rate penalty: a weight's component costs bits in the file, and a rare one costs more."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peerbayes.codebook.moments import member_moments
from peerbayes.codebook.neighbours import check_points, nearest
from peerbayes.errors import InputError

MOST = 1 << 16  # centres
MANY, NEAR = 1024, 8  # beyond MANY centres, only the NEAR nearest are compared, unless one farther off could win
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
    if count > MOST:
        raise InputError(f"thrift is too small: a bit is worth {worth:g}, which makes more than {MOST:,} squares.")
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
    for chunk, part_here in zip(points.split(_CHUNK), part.split(_CHUNK), strict=True):
        near = nearest(chunk, centres, NEAR)
        square = (chunk.unsqueeze(1) - centres[near]).square_().sum(2)
        total, column = (square + cost[part_here.unsqueeze(1), near]).min(1)
        label = near.gather(1, column.unsqueeze(1)).squeeze(1)
        left = (square[:, -1] + least[part_here] < total).nonzero().squeeze(1)
        label[left] = _cheapest_of_all(chunk[left], part_here[left], centres, cost)
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
