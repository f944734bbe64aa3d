"""Corrupt images in common ways, on their own device and by addressed randomness.

The 19 types, their 5 severities and their parameters are those of CIFAR-10-C (Hendrycks and Dietterich, 2019), written
anew from the definitions. A higher severity is not always the larger change there, nor here: `motion_blur` is as strong
at 4 as at 3, `elastic_transform` moves pixels less from severity to severity, `saturate` takes colours away at 1 and 2
and adds to them from 3. Lengths in pixels are those for 32×32 images and grow with the shorter side.

What differs from the published ones:

- `frost` is procedural: the published one blends photographs, which are not part of this package. Brightness, colours,
  contrast and grain are like those of the photographs, the crystals are not.
- Noise is ours, so what is random has the published law (for 32×32 images) and not the same values; numbers are
  rounded to bytes once, at the end, where the published arrays cut them off.
- `spatter` finds the rims of its drops of water without Canny's second threshold.

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

from peerbayes.data.transforms.augment import LUMA
from peerbayes.data.transforms.batch_noise import BatchNoise, poisson
from peerbayes.data.transforms.filters import blurred, convolved, distances, edges, positions, sampled, streaked, zoomed
from peerbayes.data.transforms.jpeg import jpeg
from peerbayes.errors import InputError, nearest
from peerbayes.math.noise import Address
from peerbayes.networks.inputs import to_unit

SEVERITIES = 5
_SMALLEST = 8  # side of an image


# ---- noise --------------------------------------------------------------------------------------------------------


def _gaussian_noise(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[severity] * source.normal("noise", *x.shape[1:])


def _shot_noise(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    photons = (500.0, 250.0, 100.0, 75.0, 50.0)[severity]
    return poisson(x * photons, source.uniform("noise", *x.shape[1:])) / photons


def _impulse_noise(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity]
    u = source.uniform("noise", *x.shape[1:])
    return torch.where(u < share / 2, 0.0, torch.where(u > 1 - share / 2, 1.0, x))


def _speckle_noise(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    return x + x * (0.06, 0.10, 0.12, 0.16, 0.20)[severity] * source.normal("noise", *x.shape[1:])


# ---- blur ---------------------------------------------------------------------------------------------------------


def _relative_size(x: Tensor) -> float:
    return min(x.shape[-2:]) / 32


def _restore_strength(blurred_noise: Tensor, x: Tensor) -> Tensor:
    """Return noise as strong as in small images: a blur that is so much wider leaves so much less of it."""
    return blurred_noise * max(1.0, _relative_size(x))


def _gaussian_blur(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    return blurred(x, (0.4, 0.6, 0.7, 0.8, 1.0)[severity] * _relative_size(x))


def _defocus_blur(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    # The pixels of a disc, softened by a Gaussian of that width (over neighbours only, in images of 32 pixels).
    radius, soft = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity]
    radius, soft, near = radius * _relative_size(x), soft * _relative_size(x), max(1, round(_relative_size(x)))
    reach = int(radius) + near
    along = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    disc = (along[:, None].square() + along.square() <= radius**2).to(x.dtype)
    around = torch.arange(-near, near + 1, device=x.device, dtype=x.dtype)
    weights = torch.exp(-around.square() / (2 * soft**2))
    kernel = F.conv2d(disc[None, None], (weights[:, None] * weights)[None, None], padding=near)[0, 0]
    return convolved(x, kernel / kernel.sum(), "reflect")


def _glass_blur(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    # Between two slight blurs each pixel, borders apart, shows itself or a neighbour above or on the left.
    sigma, times = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity]
    sigma, reach = sigma * _relative_size(x), max(1, round(_relative_size(x)))
    x = blurred(x, sigma)
    height, width = x.shape[-2:]
    rows, columns = positions(x)
    inner = (rows > reach) & (rows <= height - reach) & (columns > reach) & (columns <= width - reach)
    for turn in range(times):
        shift = (source.uniform(f"shift{turn}", 2, height, width) * (2 * reach)).floor() - reach
        down, right = (shift * inner).unbind(1)
        pixel = (rows + down).clamp(0, height - 1) * width + (columns + right).clamp(0, width - 1)
        x = x.flatten(2).gather(2, pixel.long().flatten(1)[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
    return blurred(x, sigma)


def _motion_blur(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity]
    angle = (source.uniform("angle") * 2 - 1) * (math.pi / 4)
    return streaked(x, angle, sigma * _relative_size(x), 2 * math.ceil(radius * _relative_size(x)) + 1)


def _zoom_blur(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    steps = (7, 12, 16, 21, 26)[severity]
    return (x + sum(zoomed(x, 1 + 0.01 * k) for k in range(steps))) / (steps + 1)


# ---- weather ------------------------------------------------------------------------------------------------------


def _colour(x: Tensor, *values: float) -> Tensor:
    """Return a colour as the images have it: red, green and blue (3, 1, 1), or its brightness (1, 1, 1)."""
    shown = values if x.shape[1] == 3 else (sum(part * value for part, value in zip(LUMA, values, strict=True)),)
    return torch.tensor(shown, device=x.device).view(-1, 1, 1)


def _clouds(x: Tensor, source: BatchNoise, decay: float) -> Tensor:
    """Return fractal noise (N, 1, H, W) in [0, 1] by diamonds and squares: decay² less of it at half the distance."""
    height, width = x.shape[-2:]
    size = 2 ** math.ceil(math.log2(max(height, width)))
    whole = torch.zeros(len(x), 1, size, size, device=x.device)
    step, strength = size, 1.0
    while step > 1:
        half = step // 2
        corners = whole[..., ::step, ::step]
        pairs = corners + corners.roll(-1, 2)
        whole[..., half::step, half::step] = _midpoints(source, f"squares{step}", pairs + pairs.roll(-1, 3), strength)
        middles = whole[..., half::step, half::step]
        upper = middles + middles.roll(1, 2) + corners + corners.roll(-1, 3)
        left = middles + middles.roll(1, 3) + corners + corners.roll(-1, 2)
        whole[..., ::step, half::step] = _midpoints(source, f"upper{step}", upper, strength)
        whole[..., half::step, ::step] = _midpoints(source, f"left{step}", left, strength)
        step, strength = half, strength / decay**2
    low, high = whole.amin((1, 2, 3), keepdim=True), whole.amax((1, 2, 3), keepdim=True)
    return ((whole - low) / (high - low))[..., :height, :width]


def _midpoints(source: BatchNoise, stream: str, four: Tensor, strength: float) -> Tensor:
    """Return the means of four neighbours each, from their sums, with noise."""
    return four / 4 + strength * (2 * source.uniform(stream, *four.shape[1:]) - 1)


def _fog(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    depth, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + depth * _clouds(x, source, decay)) * brightest / (brightest + depth)


# Five photographs of frost, as the published corruption draws them: mean red, green and blue, and contrast.
_FROSTS = (
    (0.31, 0.58, 0.65, 0.32),
    (0.78, 0.79, 0.83, 0.40),
    (0.78, 0.79, 0.83, 0.40),
    (0.56, 0.62, 0.67, 0.57),
    (0.41, 0.45, 0.50, 0.75),
)


def _frost(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    """Blend with procedural frost, where the published corruption blends with parts of photographs."""
    keep, ice = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity]
    which = (source.uniform("kind") * len(_FROSTS)).long().clamp_max(len(_FROSTS) - 1)
    colours = torch.stack([_colour(x, *kind[:3]) for kind in _FROSTS])[which]
    contrasts = torch.tensor([kind[3] for kind in _FROSTS], device=x.device)[which].view(-1, 1, 1, 1)
    return keep * x + ice * (colours + contrasts * (_clouds(x, source, 0.9) - 0.5))


def _snow(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    # Flakes (mean, deviation, size, threshold), their streaks (length, width) and what stays of the colours.
    mean, deviation, size, least, radius, sigma, keep = (
        (0.10, 0.2, 1.00, 0.60, 8, 3.0, 0.95),
        (0.10, 0.2, 1.00, 0.50, 10, 4.0, 0.90),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.90),
        (0.25, 0.3, 2.25, 0.60, 12, 6.0, 0.85),
        (0.30, 0.3, 1.25, 0.65, 14, 12.0, 0.80),
    )[severity]
    flakes = mean + deviation * source.normal("flakes", 1, *x.shape[-2:])
    flakes = zoomed(flakes, max(1.0, size * _relative_size(x)))
    flakes = torch.where(flakes < least, 0.0, flakes.clamp(0, 1))
    angle = -(0.25 + 0.5 * source.uniform("angle")) * math.pi
    flakes = streaked(flakes, angle, sigma * _relative_size(x), 2 * math.ceil(radius * _relative_size(x)) + 1)
    grey = (x * _colour(x, *LUMA)).sum(1, keepdim=True) if x.shape[1] == 3 else x
    pale = keep * x + (1 - keep) * torch.maximum(x, grey * 1.5 + 0.5)
    return pale + flakes + flakes.rot90(2, (2, 3))


_WATER, _MUD = (175 / 255, 238 / 255, 238 / 255), (63 / 255, 42 / 255, 20 / 255)


def _spatter(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    # Drops are where smooth noise exceeds a threshold: pale water up to the third severity, mud from the fourth.
    mean, deviation, sigma, least = (
        (0.62, 0.1, 0.7, 0.70),
        (0.65, 0.1, 0.8, 0.70),
        (0.65, 0.3, 1.0, 0.69),
        (0.65, 0.1, 0.7, 0.69),
        (0.65, 0.1, 0.5, 0.68),
    )[severity]
    liquid = mean + deviation * _restore_strength(
        blurred(source.normal("drops", 1, *x.shape[-2:]), sigma * _relative_size(x)), x
    )
    if severity < 3:
        return x + 0.5 * _sheen(torch.where(liquid < least, 0.0, liquid), _relative_size(x)) * _colour(x, *_WATER)
    cover = blurred((liquid > least).to(x.dtype), 0.6 * _relative_size(x))
    cover = torch.where(cover < 0.8, 0.0, cover)
    return x + cover * (_colour(x, *_MUD) - x)


def _sheen(liquid: Tensor, grow: float) -> Tensor:
    """Return how drops (N, 1, H, W) shine, at most 1: the distance to their rims as a relief, lit from one corner."""
    whole = (liquid * 255).floor()
    most = max(3, round(5 * grow))
    box = torch.full((3, 3), 1 / 9, device=liquid.device)
    depth = convolved(distances(edges(whole, 150.0), most), box).floor().flatten(1).long()
    # Equalised: a depth becomes the share of pixels that are less deep, of those that are deeper than the least deep.
    counts = (depth[..., None] == torch.arange(most + 1, device=liquid.device)).sum(1)
    flattest = counts.gather(1, depth.amin(1, keepdim=True))
    shares = (counts.cumsum(1) - flattest) * (255 / (depth.shape[1] - flattest).clamp_min(1))
    heights = shares.gather(1, depth).view(liquid.shape).round()
    light = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]], device=liquid.device)
    shine = whole * convolved(convolved(heights, light).clamp(0, 255), box).round()
    return shine / shine.amax((1, 2, 3), keepdim=True).clamp_min(1)


# ---- digital ------------------------------------------------------------------------------------------------------


def _brightness(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    """Add to the value of HSV; hue and saturation stay, and black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + (0.05, 0.10, 0.15, 0.20, 0.30)[severity]).clamp_max(1)
    return torch.where(value > 0, x * (raised / torch.where(value > 0, value, 1.0)), raised)


def _saturate(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    """Multiply the saturation of HSV and add to it; hue and value stay. Greys count as red, as usual in HSV."""
    times, more = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))[severity]
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    coloured = chroma > 0
    saturation = chroma / torch.where(coloured, value, 1.0)
    target = (saturation * times + more).clamp_max(1)
    away = (value - x) / torch.where(coloured, chroma, 1.0)  # from 0 for the largest channel to 1 for the least
    red = torch.tensor([0.0, 1.0, 1.0], device=x.device).view(3, 1, 1)
    return value - value * target * torch.where(coloured, away, red)


def _contrast(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity]


def _elastic_transform(x: Tensor, severity: int, source: BatchNoise) -> Tensor:
    # A random affine map, that of three corners of a square to places near them, and a smooth field of displacements.
    strength, sigma, near = ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96))[
        severity
    ]
    height, width = x.shape[-2:]
    side = 2 * (min(height, width) // 3)
    moved = (source.uniform("corners", 3, 2) * 2 - 1) * (near * _relative_size(x))
    here, below, beside = moved.unbind(1)
    (a, c), (b, d) = ((to - here).div(side).unbind(1) for to in (below, beside))  # the map's matrix, less one
    a, d = a + 1, d + 1
    rows, columns = positions(x)
    top, left = height // 2 - side // 2, width // 2 - side // 2
    down = rows - top - here[:, 0, None, None]
    right = columns - left - here[:, 1, None, None]
    a, b, c, d = (part[:, None, None] / (a * d - b * c)[:, None, None] for part in (a, b, c, d))
    x = sampled(x, top + d * down - b * right, left + a * right - c * down, "reflection")
    if strength == 0:
        return x
    field = blurred(source.uniform("field", 2, height, width) * 2 - 1, sigma * _relative_size(x), 3.0, "mirror")
    field = _restore_strength(field, x) * (strength * _relative_size(x))
    return sampled(x, rows + field[:, 0], columns + field[:, 1], "reflection")


def _pixelate(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    share = (0.95, 0.90, 0.85, 0.75, 0.65)[severity]
    rows, columns = (_boxes(size, int(size * share), x.device) for size in x.shape[-2:])
    return rows @ x @ columns.T


def _boxes(size: int, fewer: int, device: torch.device) -> Tensor:
    """Return the matrix (size, size) that makes each pixel of a line the mean of those in its of ``fewer`` parts."""
    twice = torch.arange(size, device=device) * 2 + 1  # twice the centres of the pixels
    mine = (twice * fewer + 2 * size - 1) // (2 * size) - 1  # a middle between two parts is averaged in the first ...
    shown = twice * fewer // (2 * size)  # ... and shows the second
    chosen = (mine == shown[:, None]).float()
    return chosen / chosen.sum(1, keepdim=True)


def _jpeg_compression(x: Tensor, severity: int, _: BatchNoise) -> Tensor:
    return jpeg(x, (80, 65, 58, 50, 40)[severity])


CORRUPTIONS: dict[str, Callable[[Tensor, int, BatchNoise], Tensor]] = {
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
COMMON = tuple(CORRUPTIONS)[:15]  # averages over "all corruptions" use these; the other four are extra


def corrupt(images: Tensor, name: str, severity: int, address: Address, first: int = 0) -> Tensor:
    """Corrupt each image, with the noise ``address.sub(name)``.

    Args:
        images: (N, 3, H, W), or grey ones (N, 1, H, W), of at least 8 pixels a side, uint8 or float in [0, 1]; computed
            in float32, clipped to [0, 1] and returned in the dtype given (uint8 is rounded).
        name: any of ``CORRUPTIONS``; grey images can't be saturated.
        severity: 1 to 5.
        address: where the noise comes from; the same address gives the same images.
        first: number of the first image, where these are part of a data set.

    Example:
        >>> import torch
        >>> from peerbayes import Address
        >>> from peerbayes.data import CORRUPTIONS, corrupt
        >>> images = torch.full((2, 3, 32, 32), 0.5)
        >>> corrupt(images, "brightness", severity=3, address=Address(0, "data", "corrupt"))[0, 0, 0, :2]
        tensor([0.6500, 0.6500])
        >>> len(CORRUPTIONS)
        19
    """
    check_choice(name, severity)
    if images.dim() != 4 or images.shape[1] not in (1, 3) or min(images.shape[-2:]) < _SMALLEST:
        raise InputError(f"images have shape {tuple(images.shape)}: expected (N, 3, H, W) or (N, 1, H, W) of at least "
                         f"{_SMALLEST} pixels a side")  # fmt: skip
    if name == "saturate" and images.shape[1] == 1:
        raise InputError("corruption 'saturate' needs colour images, but these are grey")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"images have type {images.dtype}: expected uint8, or float in [0, 1]")
    source = BatchNoise(address.sub(name), first, len(images), images.device)
    result = CORRUPTIONS[name](to_unit(images).float(), severity - 1, source).clamp(0, 1)
    return (result * 255).round_().to(torch.uint8) if images.dtype == torch.uint8 else result.to(images.dtype)


def check_choice(name: str, severity: int) -> None:
    """Check that a type and a severity exist.

    Args:
        name: the type.
        severity: 1 to 5.
    """
    if name not in CORRUPTIONS:
        raise InputError(f"unknown corruption '{name}'{nearest(name, CORRUPTIONS)}")
    if severity not in range(1, SEVERITIES + 1):
        raise InputError(f"severity is {severity}: expected 1 to {SEVERITIES}")
