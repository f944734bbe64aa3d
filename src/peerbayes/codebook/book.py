"""Define the codebook: a table of Gaussians, and the one that each weight belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peerbayes.codebook.coder import arrange
from peerbayes.errors import InputError

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
    others = torch.cat([book.outlier, book.blended]).long()
    index = book.label.long().index_fill(0, others, len(book.component)).cpu()
    order = torch.from_numpy(arrange(index, book.component[:, 0].detach().cpu(), sizes)).to(book.label.device)
    number = order.argsort()
    return replace(
        book,
        component=book.component[order],
        cholesky=book.cholesky[order],
        label=number[book.label.long()].index_fill(0, others, 0),
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
