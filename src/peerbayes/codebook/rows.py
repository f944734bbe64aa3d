"""Look up the distributions of weights by row: components first, then blended weights, then outliers.

A row has the five numbers m, s, a, b, c of a distribution; those of an outlier are μ, σ, 0, 0, 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from peerbayes.codebook.book import Codebook
    from peerbayes.codebook.shared import Shared

    Book: TypeAlias = "Codebook | Shared"  # their tensors have the same names

Sampling = Literal["hierarchical", "moment", "mean", "cluster", "cluster_hier"]


def rows_of(book: Book) -> Tensor:
    """Return the row of every weight, int64 (n,)."""
    rows, first = book.label.long(), len(book.component)
    for indices in (book.blended, book.outlier):
        rows = rows.index_copy(0, indices, first + torch.arange(len(indices), device=rows.device))
        first += len(indices)
    return rows


def of_rows(columns: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Return (n,) from each column (R,); one by one is far faster than rows of five.

    Args:
        columns: (R,) each.
        rows: of every weight, (n,).
    """
    if not (torch.is_grad_enabled() and rows.is_cuda):
        return [column.index_select(0, rows) for column in columns]
    # An embedding's gradient adds up in a fixed order, on a GPU too, unless a compiler replaces it.
    return [column.contiguous() for column in F.embedding(rows, torch.stack(list(columns), 1)).unbind(1)]


def drawn_from(book: Book, sampling: Sampling, share: Tensor | None = None) -> list[Tensor]:
    """Return the distributions of weights by row, (R,) each: m, s, a, b, c, or m and the scale, by sampling.

    Args:
        book: the codebook.
        sampling: ``hierarchical``, ``moment`` or ``mean``.
        share: of the first component of each blended weight, (E,); by default the codebook's.
    """
    columns, zero = _own(book), torch.zeros_like(book.outlier_mean)
    single = [book.outlier_mean, book.outlier_std, zero, zero, zero]
    mean, *scales = (torch.cat(parts) for parts in zip(columns, _mixed(book, columns, share), single, strict=True))
    if sampling == "hierarchical":
        return [mean, *scales]
    return [mean, _sum_of_squares(scales[:1] if sampling == "mean" else scales).sqrt()]


def drawn_whole(book: Book, sampling: Sampling, noise: Tensor, share: Tensor | None = None) -> Tensor:
    """Return one draw of every row, (R,), where components are drawn as a whole.

    Args:
        book: the codebook.
        sampling: ``cluster`` or ``cluster_hier``.
        noise: see `Shared.noise_size`.
        share: of the first component of each blended weight, (E,); by default the codebook's.
    """
    rest, single = noise.split([len(noise) - len(book.outlier), len(book.outlier)])
    m, s, a, b, c = _own(book)
    if sampling == "cluster":
        drawn = m + a * rest
    else:
        first, second, third = rest.view(3, -1)
        drawn = m + a * first + (s + b * first + c * second) * third
    outlier = book.outlier_mean + book.outlier_std * single
    return torch.cat([drawn, *_mixed(book, [drawn], share), outlier])


def moments(book: Book, sampling: Sampling, mixture: bool) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a weight by row, (R,) each, by the formulas of `Shared.std`.

    Args:
        book: the codebook.
        sampling: see `Shared`.
        mixture: whether blended weights are mixtures.
    """
    m, s, a, b, c = _own(book)
    means = torch.cat([m, *_mixed(book, [m]), book.outlier_mean])
    scales = {"mean": [s], "cluster": [a]}.get(sampling, [s, a, b, c])
    variance, share = _sum_of_squares(scales), book.blend_weight[:, 0]
    if mixture:
        (mean, second_mean), (first, second) = _pairs(book, [m, variance])
        blended = torch.lerp(second, first, share) + share * (1 - share) * (mean - second_mean).square()
    elif sampling.startswith("cluster"):
        ((first, second),) = _pairs(book, [variance])
        alone = book.blend_component[:, 0] == book.blend_component[:, 1]  # its two draws are the same
        blended = torch.where(alone, first, share.square() * first + (1 - share).square() * second)
    else:
        blended = _sum_of_squares(_mixed(book, scales))
    return means, torch.cat([torch.cat([variance, blended]).sqrt(), book.outlier_std])


def _own(book: Book) -> list[Tensor]:
    """Return m, s, a, b, c of the components, (K,) each."""
    return [*book.component.unbind(1), *book.cholesky.unbind(1)]


def _mixed(book: Book, columns: Sequence[Tensor], share: Tensor | None = None) -> list[Tensor]:
    """Return the blends of components' numbers (K,) for blended weights, (E,) each."""
    share = book.blend_weight[:, 0] if share is None else share
    return [torch.lerp(second, first, share) for first, second in _pairs(book, columns)]


def _pairs(book: Book, columns: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return numbers of components (K,) for both components of blended weights, (E,) each."""
    return zip(*(of_rows(columns, index) for index in book.blend_component.unbind(1)), strict=True)


def _sum_of_squares(columns: Sequence[Tensor]) -> Tensor:
    first, *others = columns
    total = first.square()
    for column in others:
        total = torch.addcmul(total, column, column)
    return total
