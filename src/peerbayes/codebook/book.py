"""Define the codebook: a table of Gaussians, the one that each weight belongs to, and draws of the weights.

A row has the five numbers m, s, a, b, c that weights are drawn with; those of an outlier are μ, σ, 0, 0, 0. Rows of
components come first, then those of blended weights, then outliers. Each weight is drawn from its row and noise of its
own, all in one pass. Without a gradient this is done in pieces that stay in a CPU's cache together with the noise that
they meet, or by one kernel of a GPU, which makes the noise, too: the same weights, but for the rounding of that kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from peerbayes.codebook.coder import arrange
from peerbayes.errors import InputError
from peerbayes.kernels.launch import draw_shared
from peerbayes.math.noise import normal_pieces, pieces

if TYPE_CHECKING:
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
    columns, zero = _columns(book), torch.zeros_like(book.outlier_mean)
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
    m, s, a, b, c = _columns(book)
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
    m, s, a, b, c = _columns(book)
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


def _columns(book: Book) -> list[Tensor]:
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


BLENDED = 2  # components that a blended weight mixes

SHARES = 15  # steps of a blended weight's share


@dataclass(frozen=True)
class Codebook:
    """Distributions of n weights. Every weight is in exactly one of three classes.

    Attributes:
        component: (K, 2), mean m and scale s of the components.
        cholesky: (K, 3), a, b, c of the factors [[a, 0], [b, c]] of their covariances.
        label: (n,), the component of each weight; arbitrary for the other two classes.
        blended: (E,), indices of weights that mix two components.
        blend_component: (E, 2), their components.
        blend_weight: (E, 2), their shares, which add up to 1, in 15ths.
        outlier: (O,), indices of weights with individual distributions.
        outlier_mean: (O,).
        outlier_std: (O,).
    """

    component: Tensor
    cholesky: Tensor
    label: Tensor
    blended: Tensor
    blend_component: Tensor
    blend_weight: Tensor
    outlier: Tensor
    outlier_mean: Tensor
    outlier_std: Tensor


def blank_codebook(size: int, device: torch.device) -> Codebook:
    """Return a codebook of one component.

    Args:
        size: weights.
        device: of its tensors.
    """
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Codebook(
        component=torch.ones(1, 2, device=device),
        cholesky=torch.zeros(1, 3, device=device),
        label=torch.zeros(size, dtype=torch.int64, device=device),
        blended=none,
        blend_component=none.view(0, BLENDED),
        blend_weight=torch.empty(0, BLENDED, device=device),
        outlier=none,
        outlier_mean=torch.empty(0, device=device),
        outlier_std=torch.empty(0, device=device),
    )


def check_codebook(book: Codebook, size: int, origin: str = "codebook", ascending: bool = False) -> None:
    """Check that a codebook describes each of ``size`` weights once.

    Args:
        book: the codebook.
        size: weights.
        origin: its source, for errors.
        ascending: whether blended weights and outliers must be in the order of the weights.
    """
    components = len(book.component)
    if components < 1 or book.component.shape != (components, 2) or book.cholesky.shape != (components, 3):
        raise InputError(f"{origin}: expected centres (K, 2) and Cholesky factors (K, 3) of at least one component")
    if book.label.shape != (size,):
        raise InputError(f"{origin}: has labels for {book.label.numel()} weights, but the network shares {size}")
    for name, tensor in (("label", book.label), ("blend_component", book.blend_component)):
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < components:
            raise InputError(f"{origin}: '{name}' names a component that is not among the {components}")
    shapes = (len(book.blended), BLENDED)
    if book.blend_component.shape != shapes or book.blend_weight.shape != shapes:
        raise InputError(f"{origin}: expected two components and two shares for each of {shapes[0]} blended weights")
    if not len(book.outlier) == len(book.outlier_mean) == len(book.outlier_std):
        raise InputError(f"{origin}: outliers, their means and their scales are not equally many")
    if not bool((book.outlier_std > 0).all()):
        raise InputError(f"{origin}: scales of outliers have collapsed to 0, expected positive numbers")
    if not bool((torch.cat([book.component[:, 1:], book.cholesky], 1) != 0).any(1).all()):
        raise InputError(f"{origin}: scales of components have collapsed to 0, expected a positive variance of each")
    indices = torch.cat([book.blended.long(), book.outlier.long()])
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise InputError(f"{origin}: names a weight that is not among the {size}")
    if len(indices.unique()) < len(indices):
        raise InputError(f"{origin}: a weight is blended or an outlier twice")
    if ascending and not all(bool((indices.diff() > 0).all()) for indices in (book.blended, book.outlier)):
        raise InputError(f"{origin}: blended weights or outliers are not in the order of the weights")


def in_file_order(book: Codebook, sizes: Sequence[int]) -> Codebook:
    """Return the codebook in the form of a file: weights in order, shares in 15ths.

    Args:
        book: the codebook.
        sizes: weights of each tensor, in their order.
    """
    return _sorted(_arranged(book, sizes))


def _arranged(book: Codebook, sizes: Sequence[int]) -> Codebook:
    """Renumber the components so that their index codes well, for tensors of these sizes."""
    unlabelled = torch.cat([book.outlier, book.blended]).long()
    index = book.label.long().index_fill(0, unlabelled, len(book.component)).cpu()
    order = torch.from_numpy(arrange(index, book.component[:, 0].detach().cpu(), sizes)).to(book.label.device)
    number = order.argsort()
    return replace(
        book,
        component=book.component[order],
        cholesky=book.cholesky[order],
        label=number[book.label.long()].index_fill(0, unlabelled, 0),
        blend_component=number[book.blend_component.long()],
    )


def _sorted(book: Codebook) -> Codebook:
    outlier_order, blended_order = book.outlier.argsort(), book.blended.argsort()
    share = (book.blend_weight[blended_order, 0].float() * SHARES).round()
    return replace(
        book,
        blended=book.blended[blended_order],
        blend_component=book.blend_component[blended_order],
        blend_weight=torch.stack([share / SHARES, (SHARES - share) / SHARES], 1),
        outlier=book.outlier[outlier_order],
        outlier_mean=book.outlier_mean[outlier_order],
        outlier_std=book.outlier_std[outlier_order],
    )


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
