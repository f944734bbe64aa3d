"""Lay named tensors end to end in one flat tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class Layout:
    """Positions of named tensors in a flat tensor.

    Convolution weights (four axes) lie in channels-last order, so that their views have the memory format which
    the convolution kernels of CPUs and GPUs like best, at no cost. Names and shapes are those of the network.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the named tensors as views of ``flat`` (size,); gradients flow back in one concatenation."""
        pieces = flat.split(self.sizes)
        return {name: _shaped(piece, shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a new flat tensor (size,) that holds the named tensors."""
        if not self.shapes:
            return torch.empty(0)
        return torch.cat([_flat(tensors[name]) for name in self.shapes])

    def inverse_sizes(self) -> Tensor:
        """Return (size,) with 1/n_l at every element of tensor l: a dot with it is Σ_l mean over l."""
        pieces = [torch.full((size,), 1 / size, dtype=torch.float32) for size in self.sizes]
        return torch.cat([torch.empty(0, dtype=torch.float32), *pieces])


def _shaped(piece: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) == 4:
        out, into, height, width = shape
        return piece.view(out, height, width, into).permute(0, 3, 1, 2)
    return piece.view(shape)


def _flat(tensor: Tensor) -> Tensor:
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)
