"""Scale images to floats in [0, 1], in the memory format that networks compute fastest with."""

from __future__ import annotations

import torch
from torch import Tensor


def to_unit(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in [0, 1] (x / 255); floating-point images and token numbers pass through.

    Example:
        >>> import torch
        >>> from peerbayes.data import to_unit
        >>> to_unit(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def prepared(inputs: Tensor) -> Tensor:
    """Return images in [0, 1], channels last, and token numbers unchanged; prepared inputs cost nothing."""
    if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        return inputs  # token numbers
    inputs = to_unit(inputs.float() if inputs.dtype == torch.float64 else inputs)  # the type of NumPy's divisions
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
