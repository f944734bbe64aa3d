"""Draw shared weights, each from its row and its noise, in one pass.

Without a gradient this is done in pieces that fit a CPU's cache together with their noise, or by one kernel of a GPU,
which also makes the noise. The weights are the same up to the rounding of that kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from peerbayes.codebook.rows import of_rows
from peerbayes.kernels.launch import draw_shared
from peerbayes.math.noise import normal_pieces, pieces

TINY = 1e-30  # added to a variance

Pieces = Iterable[tuple[int, int, Sequence[Tensor]]]  # (first, last, noise) of weights first .. last − 1


def drawn_at(begin: Tensor, columns: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return weights (n,), without a gradient, drawn with the noise that starts at ``begin``.

    Args:
        begin: where the noise starts, and its stride, from `peerbayes.math.noise.start`.
        columns: mean and scale by row, for one number a weight, or m, s, a, b and c, for two; (R,) each.
        rows: of every weight, (n,).
    """
    flat = draw_shared(columns, rows, begin, TINY)
    return flat if flat is not None else _filled(columns, rows, _noise(begin, len(rows), 1 if len(columns) == 2 else 2))


def drawn_with(noise: Sequence[Tensor], columns: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return weights (n,) drawn with this noise, with a gradient where gradients are on.

    Args:
        noise: one or two numbers a weight, (n,) each.
        columns: mean and scale by row, or m, s, a, b and c; (R,) each.
        rows: of every weight, (n,).
    """
    if torch.is_grad_enabled():
        return drawn(of_rows(columns, rows), noise)
    ranges = pieces(len(rows), rows.device)
    return _filled(columns, rows, ((first, last, [eps[first:last] for eps in noise]) for first, last in ranges))


def drawn(columns: Sequence[Tensor], eps: Sequence[Tensor]) -> Tensor:
    """Return weights (n,), in place of the first column: m + s ε, or m + s ε₁ + √((a + b ε₁)² + c² ε₁²) ε₂.

    Args:
        columns: m and s, or m, s, a, b and c, (n,) each; they are overwritten.
        eps: ε, or ε₁ and ε₂, (n,) each.
    """
    weights, *scales = columns
    weights.addcmul_(scales[0], eps[0])
    if len(scales) > 1:
        _, a, b, c = scales
        a.addcmul_(b, eps[0])
        c.mul_(eps[0])
        variance = a.square().addcmul_(c, c).add_(TINY)  # a root has no gradient at 0
        weights.addcmul_(variance.sqrt_(), eps[1])
    return weights


def _filled(columns: Sequence[Tensor], rows: Tensor, noise: Pieces) -> Tensor:
    flat, scales = columns[0].new_empty(len(rows)), columns[0].new_empty(0, 0)
    for first, last, eps in noise:
        if scales.shape[1] < last - first:
            scales = flat.new_empty(len(columns) - 1, last - first)
        buffers = [flat[first:last], *scales[:, : last - first]]
        for column, buffer in zip(columns, buffers, strict=True):
            torch.index_select(column, 0, rows[first:last], out=buffer)
        drawn(buffers, eps)
    return flat


def _noise(begin: Tensor, size: int, each: int) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
    """Yield what `peerbayes.math.noise.normal` gives to ``size`` weights, in pieces that are overwritten."""
    half = (each * size + 1) // 2
    for first, last, cosines, sines in normal_pieces(begin, each * size):
        if half == size:  # two numbers a weight
            yield first, last, (cosines, sines)
            continue
        yield first, last, (cosines,)
        end = min(half + last, size)
        yield half + first, end, (sines[: end - half - first],)
