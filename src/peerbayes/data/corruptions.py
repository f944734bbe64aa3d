"""Common corruptions of images, made on their own device and addressed, and a reader of the official CIFAR-C arrays.

The 19 types and 5 severities follow Hendrycks and Dietterich (2019), written anew from the description. Noise, textures
and resampling are ours, frost is a procedural texture instead of photographs, and where the published parameters do
not distort more at each severity ours differ: results are like those on the official arrays in kind, and not
comparable with them digit by digit. Lengths in pixels are those for images 32 pixels wide and grow with the image:
those of 8 pixels are left as they are by `defocus_blur` and `gaussian_blur`.

Every function maps float32 images (N, 3, H, W), or grey ones (N, 1, H, W), in [0, 1], a severity and an address to
images. Grey ones become what the brightness of three equal channels becomes; they have no colours to saturate. The
noise of image ``i`` depends on the address and on ``first + i`` only and is the same for all severities. Nothing is
read back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from peerbayes import noise
from peerbayes.data.augmentation import to_unit
from peerbayes.data.formats import image_tensor, label_tensor, read_npy
from peerbayes.data.splits import ArraySplit
from peerbayes.errors import InputError, nearest
from peerbayes.noise import Address

SEVERITIES = 5
_SMALLEST = 8  # side of an image
_FEW = 16.0  # expected photons up to which their number is counted out


@dataclass(frozen=True)
class _Source:
    """Where the noise of a batch comes from."""

    address: Address
    first: int
    count: int
    device: torch.device

    def uniform(self, stream: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        flat = noise.uniform(self.address.sub(stream), self.count * size, self.device, self.first * size)
        return flat.view(self.count, *shape)

    def normal(self, stream: str, *shape: int) -> Tensor:
        return _to_normal(self.uniform(stream, *shape))


def _to_normal(uniform: Tensor) -> Tensor:
    return torch.erfinv(2 * uniform - 1) * math.sqrt(2)


# ---- noise --------------------------------------------------------------------------------------------------------


def _gaussian_noise(x: Tensor, severity: int, source: _Source) -> Tensor:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[severity] * source.normal("noise", *x.shape[1:])


def _shot_noise(x: Tensor, severity: int, source: _Source) -> Tensor:
    photons = (500.0, 250.0, 100.0, 75.0, 50.0)[severity]
    return _poisson(x * photons, source.uniform("noise", *x.shape[1:])) / photons


def _poisson(rate: Tensor, uniform: Tensor) -> Tensor:
    """Return Poisson numbers from uniform ones by the inverse distribution function; above 16, by its expansion."""
    few = rate.clamp_max(_FEW)
    term = torch.exp(-few)
    below, number = term.clone(), torch.zeros_like(few)
    for k in range(1, 3 * int(_FEW)):
        number += uniform > below
        term *= few / k
        below += term
    # Giles (2016): the expansion of the smooth function that meets the distribution function at its steps.
    many = rate.clamp_min(_FEW)
    z = _to_normal(uniform)
    smooth = many + many.sqrt() * z + 1 / 3 + z.square() / 6 - (z / 36 + z**3 / 72) * many.rsqrt()
    return torch.where(rate <= _FEW, number, smooth.floor().clamp_min(0))


def _impulse_noise(x: Tensor, severity: int, source: _Source) -> Tensor:
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity]
    u = source.uniform("noise", *x.shape[1:])
    return torch.where(u < share / 2, 0.0, torch.where(u > 1 - share / 2, 1.0, x))


def _speckle_noise(x: Tensor, severity: int, source: _Source) -> Tensor:
    return x + x * (0.06, 0.10, 0.12, 0.16, 0.20)[severity] * source.normal("noise", *x.shape[1:])


# ---- blur ---------------------------------------------------------------------------------------------------------


def _grow(x: Tensor) -> float:
    return x.shape[-1] / 32


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel with (h, w), odd, the border repeated."""
    rows, columns = kernel.shape
    padded = F.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2), mode="replicate")
    return F.conv2d(padded, kernel.expand(x.shape[1], 1, rows, columns), groups=x.shape[1])


def _blurred(x: Tensor, sigma: float) -> Tensor:
    """Gaussian filter, cut off at 4σ, the border repeated."""
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return x
    weights = torch.exp(-torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype).square() / (2 * sigma**2))
    weights = weights / weights.sum()
    return _convolved(_convolved(x, weights[None, :]), weights[:, None])


def _gaussian_blur(x: Tensor, severity: int, _: _Source) -> Tensor:
    return _blurred(x, (0.4, 0.6, 0.7, 0.8, 1.0)[severity] * _grow(x))


def _defocus_blur(x: Tensor, severity: int, _: _Source) -> Tensor:
    # A disc whose edge is as soft as a blur of that width would make it.
    radius, soft = ((0.5, 0.35), (0.75, 0.35), (1.0, 0.35), (1.3, 0.35), (1.7, 0.35))[severity]
    radius, soft = radius * _grow(x), soft * _grow(x)
    reach = math.ceil(radius + 2 * soft)
    along = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    distance = (along[:, None].square() + along.square()).sqrt()
    disc = torch.sigmoid((radius - distance) / (0.5 * soft))
    return _convolved(x, disc / disc.sum())


def _glass_blur(x: Tensor, severity: int, source: _Source) -> Tensor:
    # So large a share of the pixels shows a neighbour instead, so many times over, between two slight blurs.
    share, times = ((0.3, 1), (0.55, 1), (0.8, 1), (0.75, 2), (1.0, 2))[severity]
    sigma, reach = 0.25 * _grow(x), max(1, round(_grow(x)))
    x = _blurred(x, sigma)
    height, width = x.shape[-2:]
    rows, columns = _places(x)
    for turn in range(times):
        shift = (source.uniform(f"shift{turn}", 2, height, width) * (2 * reach + 1)).floor() - reach
        down, right = (shift * (source.uniform(f"moved{turn}", 1, height, width) < share)).unbind(1)
        place = (rows + down).clamp(0, height - 1) * width + (columns + right).clamp(0, width - 1)
        x = x.flatten(2).gather(2, place.long().flatten(1)[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
    return _blurred(x, sigma)


def _sampled(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Bilinear values at pixel coordinates that broadcast to (N, H, W), the border repeated."""
    height, width = x.shape[-2:]
    shape = (len(x), height, width)
    grid = torch.stack([((2 * columns + 1) / width - 1).expand(shape), ((2 * rows + 1) / height - 1).expand(shape)], -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixels' row numbers (H, 1) and column numbers (W,)."""
    rows = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
    return rows, torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)


def _streaked(x: Tensor, angle: Tensor, sigma: float, reach: int) -> Tensor:
    """Blur along a line of the given angle (N,), to one side: weights exp(−k²/(2σ²)), k = 0 … reach − 1."""
    rows, columns = _places(x)
    weights = [math.exp(-((k / sigma) ** 2) / 2) for k in range(reach)]
    sin, cos = angle.sin()[:, None, None], angle.cos()[:, None, None]
    total = torch.zeros_like(x)
    for k, weight in enumerate(weights):
        total += weight * _sampled(x, rows + k * sin, columns + k * cos)
    return total / sum(weights)


def _motion_blur(x: Tensor, severity: int, source: _Source) -> Tensor:
    sigma = (1.0, 1.5, 2.0, 2.5, 3.0)[severity] * _grow(x)
    angle = (source.uniform("angle") * 2 - 1) * (math.pi / 4)
    return _streaked(x, angle, sigma, math.ceil(3 * sigma) + 1)


def _zoom_blur(x: Tensor, severity: int, _: _Source) -> Tensor:
    rows, columns = _places(x)
    middle_row, middle_column = (x.shape[-2] - 1) / 2, (x.shape[-1] - 1) / 2
    steps = (6, 11, 16, 21, 26)[severity]
    total = x.clone()
    for k in range(steps):
        zoom = 1 + 0.01 * k
        near = (rows - middle_row) / zoom + middle_row, (columns - middle_column) / zoom + middle_column
        total += _sampled(x, *near)
    return total / (steps + 1)


# ---- weather ------------------------------------------------------------------------------------------------------


def _enlarged(x: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


_LUMA = (0.299, 0.587, 0.114)  # what red, green and blue are to the brightness


def _colour(x: Tensor, *values: float) -> Tensor:
    """Return a colour as the images have it: red, green and blue (3, 1, 1), or its brightness (1, 1, 1)."""
    shown = values if x.shape[1] == 3 else (sum(part * value for part, value in zip(_LUMA, values, strict=True)),)
    return torch.tensor(shown, device=x.device).view(-1, 1, 1)


def _clouds(source: _Source, stream: str, height: int, width: int, decay: float) -> Tensor:
    """Fractal noise (N, 1, H, W) in [0, 1]: octaves of smooth noise, each 1/decay as strong as the one before."""
    total = torch.zeros(source.count, 1, height, width, device=source.device)
    cells, strength = 2, 1.0
    while cells <= max(height, width):
        octave = source.uniform(f"{stream}{cells}", 1, cells + 1, cells + 1)
        total += strength * _enlarged(octave, height, width)
        cells, strength = 2 * cells, strength / decay
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    return (total - low) / (high - low)


def _fog(x: Tensor, severity: int, source: _Source) -> Tensor:
    depth, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity]
    brightest = x.amax((1, 2, 3), keepdim=True)
    height, width = x.shape[-2:]
    return (x + depth * _clouds(source, "clouds", height, width, decay)) * brightest / (brightest + depth)


def _frost(x: Tensor, severity: int, source: _Source) -> Tensor:
    # Crystals lie along the ridges of two clouds, and grow from the edges of the image.
    keep, ice = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.45), (0.75, 0.55))[severity]
    height, width = x.shape[-2:]
    ridges = [1 - (2 * _clouds(source, stream, height, width, 1.6) - 1).abs() for stream in ("coarse", "fine")]
    rows, columns = _places(x)
    edge = torch.maximum((2 * rows / (height - 1) - 1).abs(), (2 * columns / (width - 1) - 1).abs())
    crystals = (ridges[0] * ridges[1]).square() * (0.6 + 0.4 * edge) + 0.25 * edge
    return keep * x + ice * crystals * _colour(x, 0.85, 0.95, 1.0)


def _snow(x: Tensor, severity: int, source: _Source) -> Tensor:
    # Flakes (mean, deviation, size, threshold), their streaks (length, width) and what stays of the colours.
    mean, deviation, size, least, reach, sigma, keep = (
        (0.10, 0.2, 1.00, 0.60, 8, 3.0, 0.95),
        (0.10, 0.2, 1.00, 0.50, 10, 4.0, 0.90),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.90),
        (0.25, 0.3, 2.25, 0.60, 12, 6.0, 0.85),
        (0.30, 0.3, 1.25, 0.65, 14, 12.0, 0.80),
    )[severity]
    height, width = x.shape[-2:]
    cells = math.ceil(height / (size * _grow(x))), math.ceil(width / (size * _grow(x)))
    flakes = _enlarged(mean + deviation * source.normal("flakes", 1, *cells), height, width)
    flakes = torch.where(flakes < least, 0.0, flakes.clamp(0, 1))
    angle = -(0.25 + 0.5 * source.uniform("angle")) * math.pi
    flakes = _streaked(flakes, angle, sigma * _grow(x), math.ceil(reach * _grow(x)))
    grey = (x * _colour(x, *_LUMA)).sum(1, keepdim=True) if x.shape[1] == 3 else x
    pale = keep * x + (1 - keep) * torch.maximum(x, grey * 1.5 + 0.5)
    return pale + flakes + flakes.rot90(2, (2, 3))


def _spatter(x: Tensor, severity: int, source: _Source) -> Tensor:
    # Drops are where smooth noise is high: pale water up to the third severity, mud from the fourth.
    least, opaque, mud = ((1.3, 0.3, 0), (1.1, 0.4, 0), (0.9, 0.5, 0), (0.9, 0.85, 1), (0.5, 0.95, 1))[severity]
    height, width = x.shape[-2:]
    liquid = _blurred(source.normal("drops", 1, height, width), 1.2 * _grow(x))
    liquid = liquid / liquid.std((2, 3), keepdim=True)
    cover = opaque * torch.sigmoid((liquid - least) * 8)
    paint = _colour(x, 0.25, 0.16, 0.08) if mud else _colour(x, 0.69, 0.93, 0.93)
    return x + cover * (paint - x)


# ---- digital ------------------------------------------------------------------------------------------------------


def _brightness(x: Tensor, severity: int, _: _Source) -> Tensor:
    """Add to the value of HSV; hue and saturation stay, and black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + (0.05, 0.10, 0.15, 0.20, 0.30)[severity]).clamp_max(1)
    return torch.where(value > 0, x * (raised / torch.where(value > 0, value, 1.0)), raised)


def _saturate(x: Tensor, severity: int, _: _Source) -> Tensor:
    """Multiply the saturation of HSV and add to it; hue and value stay, and greys stay grey."""
    times, more = ((1.3, 0.0), (1.6, 0.02), (2.0, 0.05), (2.5, 0.10), (3.5, 0.20))[severity]
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    coloured = chroma > 0
    saturation = chroma / torch.where(coloured, value, 1.0)
    target = (saturation * times + more).clamp_max(1)
    return value - (value - x) * torch.where(coloured, target / torch.where(coloured, saturation, 1.0), 1.0)


def _contrast(x: Tensor, severity: int, _: _Source) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity]


def _elastic_transform(x: Tensor, severity: int, source: _Source) -> Tensor:
    # A smooth field of displacements of that many pixels (root mean square), on top of a random affine map.
    local, affine = ((0.35, 0.02), (0.55, 0.03), (0.75, 0.04), (0.95, 0.05), (1.2, 0.06))[severity]
    height, width = x.shape[-2:]
    field = _blurred(source.uniform("field", 2, height, width) * 2 - 1, 1.6 * _grow(x))
    field = field * (local * _grow(x) / field.square().mean((2, 3), keepdim=True).sqrt())
    matrix = (source.uniform("affine", 2, 2) * 2 - 1) * affine
    rows, columns = _places(x)
    down, right = rows - (height - 1) / 2, columns - (width - 1) / 2
    moves = [matrix[:, i, 0, None, None] * down + matrix[:, i, 1, None, None] * right + field[:, i] for i in (0, 1)]
    return _sampled(x, rows + moves[0], columns + moves[1])


def _pixelate(x: Tensor, severity: int, _: _Source) -> Tensor:
    share = (0.95, 0.90, 0.85, 0.75, 0.65)[severity]
    height, width = x.shape[-2:]
    rows, columns = (_boxes(size, int(size * share), x.device) for size in (height, width))
    return F.interpolate(rows @ x @ columns.T, size=(height, width), mode="nearest-exact")


def _boxes(size: int, fewer: int, device: torch.device) -> Tensor:
    """Return the matrix (fewer, size) whose rows average equal parts of a line of ``size`` pixels."""
    pixels, parts = torch.arange(size, device=device), torch.arange(fewer, device=device)[:, None] * (size / fewer)
    overlap = torch.minimum(parts + size / fewer, pixels + 1) - torch.maximum(parts, pixels)
    return overlap.clamp_min(0) * (fewer / size)


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


def _jpeg_compression(x: Tensor, severity: int, _: _Source) -> Tensor:
    return jpeg(x, (80, 65, 58, 50, 40)[severity])


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
    colours = (halved + (0.25 + 0.25 * (_places(halved)[1] % 2))).floor()
    kept = _quantised(luma.round().unsqueeze(1), _BRIGHTNESS_STEPS, quality).squeeze(1)
    colours = _quantised(colours, _COLOUR_STEPS, quality)
    full = _enlarged(colours, 2 * colours.shape[-2], 2 * colours.shape[-1])[..., :height, :width]
    to_blue, to_red = (full + (0.5 - (_places(full)[1] % 2) / 16)).floor().sub(128).unbind(1)
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


CORRUPTIONS: dict[str, Callable[[Tensor, int, _Source], Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "frost": _frost,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic_transform": _elastic_transform,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg_compression,
    "speckle_noise": _speckle_noise,
    "gaussian_blur": _gaussian_blur,
    "spatter": _spatter,
    "saturate": _saturate,
}
COMMON = tuple(CORRUPTIONS)[:15]  # what averages over "all corruptions" are taken over; the other four are extra


def corrupt(images: Tensor, name: str, severity: int, address: Address, first: int = 0) -> Tensor:
    """Corrupt each image, with the noise ``address.sub(name)``.

    Args:
        images: (N, 3, H, W), or grey ones (N, 1, H, W), of at least 8 pixels a side, uint8 or float in [0, 1]; computed
            in float32, clipped to [0, 1] and returned in the dtype given (uint8 is rounded).
        name: any of ``CORRUPTIONS``; grey images can't be saturated.
        severity: 1 to 5.
        address: where the noise comes from; the same address gives the same images.
        first: number of the first image, where these are part of a data set.
    """
    _check_choice(name, severity)
    if images.dim() != 4 or images.shape[1] not in (1, 3) or min(images.shape[-2:]) < _SMALLEST:
        raise InputError(f"images have shape {tuple(images.shape)}: expected (N, 3, H, W) or (N, 1, H, W) of at least "
                         f"{_SMALLEST} pixels a side")  # fmt: skip
    if name == "saturate" and images.shape[1] == 1:
        raise InputError("corruption 'saturate' changes colours, which grey images have not")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"images have type {images.dtype}: expected uint8, or float in [0, 1]")
    source = _Source(address.sub(name), first, len(images), images.device)
    result = CORRUPTIONS[name](to_unit(images).float(), severity - 1, source).clamp(0, 1)
    return (result * 255).round_().to(torch.uint8) if images.dtype == torch.uint8 else result.to(images.dtype)


def load_corrupted(folder: Path | str, name: str, severity: int) -> ArraySplit:
    """Return one type and severity of the official arrays (CIFAR-10-C, CIFAR-100-C), mapped from their file.

    Args:
        folder: holds ``NAME.npy``, uint8 (5n, H, W, 3) with the severities one after the other, and ``labels.npy``,
            integers (5n,); n is 10,000 in the official files.
        name: any of ``CORRUPTIONS``.
        severity: 1 to 5.
    """
    _check_choice(name, severity)
    path, labels_path = Path(folder) / f"{name}.npy", Path(folder) / "labels.npy"
    for wanted in (path, labels_path):
        if not wanted.is_file():
            raise InputError(f"{wanted}: there is no such file; expected the official arrays, NAME.npy and labels.npy, "
                             "or 'made' for images that are corrupted here")  # fmt: skip
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # pickled objects are refused
    except Exception as error:  # a damaged header can raise nearly anything
        raise InputError(f"{path}: cannot be read as an .npy file (damaged, cut short, or not one)") from error
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or len(array) % SEVERITIES or not len(array):
        raise InputError(f"{path}: expected uint8 images (5n, H, W, 3), five severities one after the other, "
                         f"got {array.dtype} {array.shape}")  # fmt: skip
    images = image_tensor(array, str(path))
    labels = label_tensor(read_npy(labels_path), str(labels_path), len(images))
    count = len(images) // SEVERITIES
    rows = torch.arange((severity - 1) * count, severity * count)
    return ArraySplit(images, labels[rows], rows)


def _check_choice(name: str, severity: int) -> None:
    if name not in CORRUPTIONS:
        raise InputError(f"unknown corruption '{name}'{nearest(name, CORRUPTIONS)}")
    if severity not in range(1, SEVERITIES + 1):
        raise InputError(f"severity is {severity}: expected 1 to {SEVERITIES}")
