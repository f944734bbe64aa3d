"""Filter images (N, C, H, W) on their own device: blurs, edges, and values between pixels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def convolved(x: Tensor, kernel: Tensor, border: str = "replicate") -> Tensor:
    """Convolve each channel with a kernel.

    Args:
        x: images (N, C, H, W).
        kernel: (h, w), both odd.
        border: ``"replicate"`` repeats the border, ``"reflect"`` mirrors the image.
    """
    rows, columns = kernel.shape
    padded = F.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2), mode=border)
    return F.conv2d(padded, kernel.expand(x.shape[1], 1, rows, columns), groups=x.shape[1])


def blurred(x: Tensor, sigma: float, truncate: float = 4.0, border: str = "nearest") -> Tensor:
    """Apply a Gaussian filter.

    Args:
        x: images (N, C, H, W).
        sigma: standard deviation in pixels.
        truncate: standard deviations at which the filter is cut off.
        border: what lies beyond: ``"nearest"`` pixel or ``"mirror"``.
    """
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return x
    weights = torch.exp(-torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype).square() / (2 * sigma**2))
    weights = weights / weights.sum()
    for axis, kernel in ((2, weights[:, None]), (3, weights[None, :])):
        size = x.shape[axis]
        near = torch.arange(-radius, size + radius, device=x.device)
        if border == "mirror":  # c b a | a b c | c b a, as often as it takes
            near = near.remainder(2 * size)
            near = torch.minimum(near, 2 * size - 1 - near)
        x = x.index_select(axis, near.clamp(0, size - 1))
        x = F.conv2d(x, kernel.expand(x.shape[1], 1, *kernel.shape), groups=x.shape[1])
    return x


def sampled(x: Tensor, rows: Tensor, columns: Tensor, border: str = "border") -> Tensor:
    """Return bilinear values at pixel coordinates, (N, C, H, W).

    Args:
        x: images (N, C, H, W).
        rows: row coordinates that broadcast to (N, H, W).
        columns: column coordinates that broadcast to (N, H, W).
        border: what lies beyond: ``"border"`` pixel or ``"reflection"``.
    """
    height, width = x.shape[-2:]
    shape = (len(x), height, width)
    grid = torch.stack([((2 * columns + 1) / width - 1).expand(shape), ((2 * rows + 1) / height - 1).expand(shape)], -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=border, align_corners=False)


def streaked(x: Tensor, angle: Tensor, sigma: float, reach: int) -> Tensor:
    """Blur along a line of whole pixels, to one side, with weights exp(−k²/(2σ²)), k = 0 … reach − 1.

    Args:
        x: images (N, C, H, W).
        angle: of the line, (N,), in radians.
        sigma: σ.
        reach: pixels of the line.
    """
    rows, columns = positions(x)
    weights = [math.exp(-((k / sigma) ** 2) / 2) for k in range(reach)]
    sin, cos = angle.sin()[:, None, None], angle.cos()[:, None, None]
    total = torch.zeros_like(x)
    for k, weight in enumerate(weights):
        total += weight * sampled(x, rows + (k * sin - 0.5).ceil(), columns + (k * cos - 0.5).ceil())
    return total / sum(weights)


def zoomed(x: Tensor, factor: float) -> Tensor:
    """Enlarge the middle, cut out in whole pixels, until its corners reach those of the image.

    Args:
        x: images (N, C, H, W).
        factor: 1 or more.
    """

    def at(size: int, position: Tensor) -> Tensor:
        part = math.ceil(size / factor)
        full = math.floor(part * factor + 0.5)  # pixels after enlarging, of which the middle ones are kept
        return (size - part) // 2 + (position + (full - size) // 2) * ((part - 1) / (full - 1))

    rows, columns = positions(x)
    return sampled(x, at(x.shape[-2], rows), at(x.shape[-1], columns))


def edges(x: Tensor, least: float) -> Tensor:
    """Return Canny's edges, a mask (N, 1, H, W): Sobel's gradient (L1) exceeds ``least`` and its neighbours along it.

    Args:
        x: grey images (N, 1, H, W).
        least: threshold of the gradient.
    """
    slope = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], device=x.device)
    right, down = convolved(x, slope), convolved(x, slope.T)
    steep = right.abs() + down.abs()
    height, width = x.shape[-2:]
    around = F.pad(steep, (1, 1, 1, 1))

    def beside(rows: int, columns: int) -> Tensor:
        return around[..., 1 + rows : 1 + rows + height, 1 + columns : 1 + columns + width]

    level = down.abs() < math.tan(math.pi / 8) * right.abs()
    upright = right.abs() < math.tan(math.pi / 8) * down.abs()
    along = (steep > beside(0, -1)) & (steep >= beside(0, 1))
    across = (steep > beside(-1, 0)) & (steep >= beside(1, 0))
    falling = (steep > beside(-1, -1)) & (steep > beside(1, 1))
    rising = (steep > beside(-1, 1)) & (steep > beside(1, -1))
    slanted = torch.where((right < 0) != (down < 0), rising, falling)
    return (steep > least) & torch.where(level, along, torch.where(upright, across, slanted))


def distances(marked: Tensor, most: int) -> Tensor:
    """Return the distance of each pixel to the nearest marked one, in pixels.

    Args:
        marked: a mask (N, C, H, W).
        most: upper bound of the distances.
    """
    squares = torch.where(marked, 0.0, float(most**2))
    for axis in (2, 3):
        size = squares.shape[axis]
        padded = F.pad(squares, (0, 0, most, most) if axis == 2 else (most, most), value=float(most**2))
        for k in range(-most, most + 1):
            squares = torch.minimum(squares, padded.narrow(axis, most + k, size) + k**2)
    return squares.sqrt()


def enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """Resize bilinearly.

    Args:
        x: images (N, C, H, W).
        height: of the result.
        width: of the result.
    """
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixels' row numbers (H, 1) and column numbers (W,)."""
    rows = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
    return rows, torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
