"""Apply the loss of JPEG compression to images, on their own device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from peerbayes.data.transforms.filters import enlarged, positions
from peerbayes.errors import InputError

# Quantisation of brightness and colour at quality 50, from the JPEG standard (ITU T.81, tables K.1 and K.2).
_BRIGHTNESS_STEPS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_COLOUR_STEPS = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)


def jpeg(images: Tensor, quality: int) -> Tensor:
    """Return what a baseline JPEG file would keep: 8 bits, colours at half the resolution, quantised 8×8 cosines.

    Args:
        images: (N, 3, H, W), or grey ones (N, 1, H, W), float32 in [0, 1].
        quality: 1 to 100, as libjpeg scales the standard's tables.
    """
    if not 1 <= quality <= 100:
        raise InputError(f"quality is {quality}: expected 1 to 100.")
    height, width = images.shape[-2:]
    whole = (images * 255).round()
    if images.shape[1] == 1:
        return _quantised(whole, _BRIGHTNESS_STEPS, quality) / 255
    red, green, blue = whole.unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    colours = torch.stack([(blue - luma) / 1.772, (red - luma) / 1.402], 1).add(128).round().clamp(0, 255)
    halved = F.avg_pool2d(_padded(colours, 2), 2)
    # libjpeg rounds halves down in one column and up in the next; and the other way round when it enlarges.
    colours = (halved + (0.25 + 0.25 * (positions(halved)[1] % 2))).floor()
    kept = _quantised(luma.round().unsqueeze(1), _BRIGHTNESS_STEPS, quality).squeeze(1)
    colours = _quantised(colours, _COLOUR_STEPS, quality)
    full = enlarged(colours, 2 * colours.shape[-2], 2 * colours.shape[-1])[..., :height, :width]
    to_blue, to_red = (full + (0.5 - (positions(full)[1] % 2) / 16)).floor().sub(128).unbind(1)
    red, blue = kept + 1.402 * to_red, kept + 1.772 * to_blue
    green = (kept - 0.299 * red - 0.114 * blue) / 0.587
    return torch.stack([red, green, blue], 1).round().clamp(0, 255) / 255


def _padded(x: Tensor, side: int) -> Tensor:
    """Repeat the border until height and width are multiples of ``side``."""
    return F.pad(x, (0, -x.shape[-1] % side, 0, -x.shape[-2] % side), mode="replicate")


def _quantised(x: Tensor, steps: Sequence[Sequence[int]], quality: int) -> Tensor:
    """Return (N, C, H, W) in [0, 255] after the loss of a JPEG file at that quality, in whole numbers."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    scaled = [[min(max((step * percent + 50) // 100, 1), 255) for step in row] for row in steps]
    table = torch.tensor(scaled, dtype=x.dtype, device=x.device)
    k = torch.arange(8, device=x.device, dtype=x.dtype)
    cosines = 0.5 * torch.cos((2 * k + 1) * k[:, None] * (math.pi / 16))
    cosines[0] = math.sqrt(1 / 8)
    height, width = x.shape[-2:]
    padded = _padded(x, 8)
    blocks = padded.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4) - 128
    waves = cosines @ blocks @ cosines.T / table
    # Halves are common, and go away from zero; the small term keeps rounding errors from deciding about them.
    waves = (waves.abs() + (0.5 + 1e-4)).floor() * waves.sign() * table
    back: Tensor = (cosines.T @ waves @ cosines + 128).round().clamp(0, 255)
    return back.transpose(3, 4).reshape(padded.shape)[..., :height, :width]
