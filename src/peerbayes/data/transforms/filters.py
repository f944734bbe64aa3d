"""Filters of images (N, C, H, W) on their own device: blurs, and values between pixels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel with (h, w), odd, the border repeated."""
    rows, columns = kernel.shape
    padded = F.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2), mode="replicate")
    return F.conv2d(padded, kernel.expand(x.shape[1], 1, rows, columns), groups=x.shape[1])


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Gaussian filter, cut off at 4σ, the border repeated."""
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return x
    weights = torch.exp(-torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype).square() / (2 * sigma**2))
    weights = weights / weights.sum()
    return convolved(convolved(x, weights[None, :]), weights[:, None])


def sampled(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Bilinear values at pixel coordinates that broadcast to (N, H, W), the border repeated."""
    height, width = x.shape[-2:]
    shape = (len(x), height, width)
    grid = torch.stack([((2 * columns + 1) / width - 1).expand(shape), ((2 * rows + 1) / height - 1).expand(shape)], -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def streaked(x: Tensor, angle: Tensor, sigma: float, reach: int) -> Tensor:
    """Blur along a line of the given angle (N,), to one side: weights exp(−k²/(2σ²)), k = 0 … reach − 1."""
    rows, columns = places(x)
    weights = [math.exp(-((k / sigma) ** 2) / 2) for k in range(reach)]
    sin, cos = angle.sin()[:, None, None], angle.cos()[:, None, None]
    total = torch.zeros_like(x)
    for k, weight in enumerate(weights):
        total += weight * sampled(x, rows + k * sin, columns + k * cos)
    return total / sum(weights)


def enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """Bilinear values at another size."""
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixels' row numbers (H, 1) and column numbers (W,)."""
    rows = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
    return rows, torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
