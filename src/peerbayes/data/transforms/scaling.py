"""Images as floats in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor


def to_unit(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in [0, 1] (x / 255); floating-point images and token numbers pass through."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images
