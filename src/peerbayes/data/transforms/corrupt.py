"""Common corruptions of images, made on their own device and addressed.

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
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from peerbayes.data.transforms.batch_noise import Source, poisson
from peerbayes.data.transforms.channels import LUMA
from peerbayes.data.transforms.filters import blurred, convolved, enlarged, places, sampled, streaked
from peerbayes.data.transforms.jpeg import jpeg
from peerbayes.data.transforms.scaling import to_unit
from peerbayes.errors import InputError, nearest
from peerbayes.math.noise import Address

SEVERITIES = 5
_SMALLEST = 8  # side of an image


# ---- noise --------------------------------------------------------------------------------------------------------


def _gaussian_noise(x: Tensor, severity: int, source: Source) -> Tensor:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[severity] * source.normal("noise", *x.shape[1:])


def _shot_noise(x: Tensor, severity: int, source: Source) -> Tensor:
    photons = (500.0, 250.0, 100.0, 75.0, 50.0)[severity]
    return poisson(x * photons, source.uniform("noise", *x.shape[1:])) / photons


def _impulse_noise(x: Tensor, severity: int, source: Source) -> Tensor:
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity]
    u = source.uniform("noise", *x.shape[1:])
    return torch.where(u < share / 2, 0.0, torch.where(u > 1 - share / 2, 1.0, x))


def _speckle_noise(x: Tensor, severity: int, source: Source) -> Tensor:
    return x + x * (0.06, 0.10, 0.12, 0.16, 0.20)[severity] * source.normal("noise", *x.shape[1:])


# ---- blur ---------------------------------------------------------------------------------------------------------


def _grow(x: Tensor) -> float:
    return x.shape[-1] / 32


def _gaussian_blur(x: Tensor, severity: int, _: Source) -> Tensor:
    return blurred(x, (0.4, 0.6, 0.7, 0.8, 1.0)[severity] * _grow(x))


def _defocus_blur(x: Tensor, severity: int, _: Source) -> Tensor:
    # A disc whose edge is as soft as a blur of that width would make it.
    radius, soft = ((0.5, 0.35), (0.75, 0.35), (1.0, 0.35), (1.3, 0.35), (1.7, 0.35))[severity]
    radius, soft = radius * _grow(x), soft * _grow(x)
    reach = math.ceil(radius + 2 * soft)
    along = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    distance = (along[:, None].square() + along.square()).sqrt()
    disc = torch.sigmoid((radius - distance) / (0.5 * soft))
    return convolved(x, disc / disc.sum())


def _glass_blur(x: Tensor, severity: int, source: Source) -> Tensor:
    # So large a share of the pixels shows a neighbour instead, so many times over, between two slight blurs.
    share, times = ((0.3, 1), (0.55, 1), (0.8, 1), (0.75, 2), (1.0, 2))[severity]
    sigma, reach = 0.25 * _grow(x), max(1, round(_grow(x)))
    x = blurred(x, sigma)
    height, width = x.shape[-2:]
    rows, columns = places(x)
    for turn in range(times):
        shift = (source.uniform(f"shift{turn}", 2, height, width) * (2 * reach + 1)).floor() - reach
        down, right = (shift * (source.uniform(f"moved{turn}", 1, height, width) < share)).unbind(1)
        place = (rows + down).clamp(0, height - 1) * width + (columns + right).clamp(0, width - 1)
        x = x.flatten(2).gather(2, place.long().flatten(1)[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
    return blurred(x, sigma)


def _motion_blur(x: Tensor, severity: int, source: Source) -> Tensor:
    sigma = (1.0, 1.5, 2.0, 2.5, 3.0)[severity] * _grow(x)
    angle = (source.uniform("angle") * 2 - 1) * (math.pi / 4)
    return streaked(x, angle, sigma, math.ceil(3 * sigma) + 1)


def _zoom_blur(x: Tensor, severity: int, _: Source) -> Tensor:
    rows, columns = places(x)
    middle_row, middle_column = (x.shape[-2] - 1) / 2, (x.shape[-1] - 1) / 2
    steps = (6, 11, 16, 21, 26)[severity]
    total = x.clone()
    for k in range(steps):
        zoom = 1 + 0.01 * k
        near = (rows - middle_row) / zoom + middle_row, (columns - middle_column) / zoom + middle_column
        total += sampled(x, *near)
    return total / (steps + 1)


# ---- weather ------------------------------------------------------------------------------------------------------


def _colour(x: Tensor, *values: float) -> Tensor:
    """Return a colour as the images have it: red, green and blue (3, 1, 1), or its brightness (1, 1, 1)."""
    shown = values if x.shape[1] == 3 else (sum(part * value for part, value in zip(LUMA, values, strict=True)),)
    return torch.tensor(shown, device=x.device).view(-1, 1, 1)


def _clouds(source: Source, stream: str, height: int, width: int, decay: float) -> Tensor:
    """Fractal noise (N, 1, H, W) in [0, 1]: octaves of smooth noise, each 1/decay as strong as the one before."""
    total = torch.zeros(source.count, 1, height, width, device=source.device)
    cells, strength = 2, 1.0
    while cells <= max(height, width):
        octave = source.uniform(f"{stream}{cells}", 1, cells + 1, cells + 1)
        total += strength * enlarged(octave, height, width)
        cells, strength = 2 * cells, strength / decay
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    return (total - low) / (high - low)


def _fog(x: Tensor, severity: int, source: Source) -> Tensor:
    depth, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity]
    brightest = x.amax((1, 2, 3), keepdim=True)
    height, width = x.shape[-2:]
    return (x + depth * _clouds(source, "clouds", height, width, decay)) * brightest / (brightest + depth)


def _frost(x: Tensor, severity: int, source: Source) -> Tensor:
    # Crystals lie along the ridges of two clouds, and grow from the edges of the image.
    keep, ice = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.45), (0.75, 0.55))[severity]
    height, width = x.shape[-2:]
    ridges = [1 - (2 * _clouds(source, stream, height, width, 1.6) - 1).abs() for stream in ("coarse", "fine")]
    rows, columns = places(x)
    edge = torch.maximum((2 * rows / (height - 1) - 1).abs(), (2 * columns / (width - 1) - 1).abs())
    crystals = (ridges[0] * ridges[1]).square() * (0.6 + 0.4 * edge) + 0.25 * edge
    return keep * x + ice * crystals * _colour(x, 0.85, 0.95, 1.0)


def _snow(x: Tensor, severity: int, source: Source) -> Tensor:
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
    flakes = enlarged(mean + deviation * source.normal("flakes", 1, *cells), height, width)
    flakes = torch.where(flakes < least, 0.0, flakes.clamp(0, 1))
    angle = -(0.25 + 0.5 * source.uniform("angle")) * math.pi
    flakes = streaked(flakes, angle, sigma * _grow(x), math.ceil(reach * _grow(x)))
    grey = (x * _colour(x, *LUMA)).sum(1, keepdim=True) if x.shape[1] == 3 else x
    pale = keep * x + (1 - keep) * torch.maximum(x, grey * 1.5 + 0.5)
    return pale + flakes + flakes.rot90(2, (2, 3))


def _spatter(x: Tensor, severity: int, source: Source) -> Tensor:
    # Drops are where smooth noise is high: pale water up to the third severity, mud from the fourth.
    least, opaque, mud = ((1.3, 0.3, 0), (1.1, 0.4, 0), (0.9, 0.5, 0), (0.9, 0.85, 1), (0.5, 0.95, 1))[severity]
    height, width = x.shape[-2:]
    liquid = blurred(source.normal("drops", 1, height, width), 1.2 * _grow(x))
    liquid = liquid / liquid.std((2, 3), keepdim=True)
    cover = opaque * torch.sigmoid((liquid - least) * 8)
    paint = _colour(x, 0.25, 0.16, 0.08) if mud else _colour(x, 0.69, 0.93, 0.93)
    return x + cover * (paint - x)


# ---- digital ------------------------------------------------------------------------------------------------------


def _brightness(x: Tensor, severity: int, _: Source) -> Tensor:
    """Add to the value of HSV; hue and saturation stay, and black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + (0.05, 0.10, 0.15, 0.20, 0.30)[severity]).clamp_max(1)
    return torch.where(value > 0, x * (raised / torch.where(value > 0, value, 1.0)), raised)


def _saturate(x: Tensor, severity: int, _: Source) -> Tensor:
    """Multiply the saturation of HSV and add to it; hue and value stay, and greys stay grey."""
    times, more = ((1.3, 0.0), (1.6, 0.02), (2.0, 0.05), (2.5, 0.10), (3.5, 0.20))[severity]
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    coloured = chroma > 0
    saturation = chroma / torch.where(coloured, value, 1.0)
    target = (saturation * times + more).clamp_max(1)
    return value - (value - x) * torch.where(coloured, target / torch.where(coloured, saturation, 1.0), 1.0)


def _contrast(x: Tensor, severity: int, _: Source) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity]


def _elastic_transform(x: Tensor, severity: int, source: Source) -> Tensor:
    # A smooth field of displacements of that many pixels (root mean square), on top of a random affine map.
    local, affine = ((0.35, 0.02), (0.55, 0.03), (0.75, 0.04), (0.95, 0.05), (1.2, 0.06))[severity]
    height, width = x.shape[-2:]
    field = blurred(source.uniform("field", 2, height, width) * 2 - 1, 1.6 * _grow(x))
    field = field * (local * _grow(x) / field.square().mean((2, 3), keepdim=True).sqrt())
    matrix = (source.uniform("affine", 2, 2) * 2 - 1) * affine
    rows, columns = places(x)
    down, right = rows - (height - 1) / 2, columns - (width - 1) / 2
    moves = [matrix[:, i, 0, None, None] * down + matrix[:, i, 1, None, None] * right + field[:, i] for i in (0, 1)]
    return sampled(x, rows + moves[0], columns + moves[1])


def _pixelate(x: Tensor, severity: int, _: Source) -> Tensor:
    share = (0.95, 0.90, 0.85, 0.75, 0.65)[severity]
    height, width = x.shape[-2:]
    rows, columns = (_boxes(size, int(size * share), x.device) for size in (height, width))
    return F.interpolate(rows @ x @ columns.T, size=(height, width), mode="nearest-exact")


def _boxes(size: int, fewer: int, device: torch.device) -> Tensor:
    """Return the matrix (fewer, size) whose rows average equal parts of a line of ``size`` pixels."""
    pixels, parts = torch.arange(size, device=device), torch.arange(fewer, device=device)[:, None] * (size / fewer)
    overlap = torch.minimum(parts + size / fewer, pixels + 1) - torch.maximum(parts, pixels)
    return overlap.clamp_min(0) * (fewer / size)


def _jpeg_compression(x: Tensor, severity: int, _: Source) -> Tensor:
    return jpeg(x, (80, 65, 58, 50, 40)[severity])


CORRUPTIONS: dict[str, Callable[[Tensor, int, Source], Tensor]] = {
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
    check_choice(name, severity)
    if images.dim() != 4 or images.shape[1] not in (1, 3) or min(images.shape[-2:]) < _SMALLEST:
        raise InputError(f"images have shape {tuple(images.shape)}: expected (N, 3, H, W) or (N, 1, H, W) of at least "
                         f"{_SMALLEST} pixels a side")  # fmt: skip
    if name == "saturate" and images.shape[1] == 1:
        raise InputError("corruption 'saturate' changes colours, which grey images have not")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"images have type {images.dtype}: expected uint8, or float in [0, 1]")
    source = Source(address.sub(name), first, len(images), images.device)
    result = CORRUPTIONS[name](to_unit(images).float(), severity - 1, source).clamp(0, 1)
    return (result * 255).round_().to(torch.uint8) if images.dtype == torch.uint8 else result.to(images.dtype)


def check_choice(name: str, severity: int) -> None:
    """Refuse a type or a severity that there is not."""
    if name not in CORRUPTIONS:
        raise InputError(f"unknown corruption '{name}'{nearest(name, CORRUPTIONS)}")
    if severity not in range(1, SEVERITIES + 1):
        raise InputError(f"severity is {severity}: expected 1 to {SEVERITIES}")
