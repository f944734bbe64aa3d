"""Scale images to floats in [0, 1]."""

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
