"""Augment whole batches on their own device, by addressed randomness that can be replayed.

Every function maps images (B, C, H, W) and an address to images of the same dtype. The numbers of image ``i``
depend on the address and on ``first + i`` only, not on the size of the batch, so that ``first`` makes part of a
batch what it would be within the whole. Nothing here reads a value back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from peerbayes.errors import InputError, nearest
from peerbayes.math import noise
from peerbayes.math.noise import Address

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in the brightness, by ITU-R 601
SCALE = (0.08, 1.0)  # areas of a random resized crop, as a share of the image
RATIO = (3 / 4, 4 / 3)  # its width / height
_TRIES = 10  # its candidates, before it falls back to the centre


def _padding(images: Tensor) -> int:
    side = min(images.shape[-2:])
    return 4 if side >= 28 else max(1, side // 8)


def _shifted(images: Tensor, address: Address, padding: int, first: int, reflect: bool) -> Tensor:
    count, channels, height, width = images.shape
    device = images.device

    def pixels(size: int, axis: str) -> Tensor:
        offset = noise.integers(address.sub(axis), 2 * padding + 1, count, device, first)
        return torch.arange(size, device=device) + offset[:, None] - padding

    rows, columns = pixels(height, "rows"), pixels(width, "columns")
    if reflect:
        rows = (height - 1) - ((height - 1) - rows.abs()).abs()
        columns = (width - 1) - ((width - 1) - columns.abs()).abs()
    # Reading through indices needs no padded copy, and reflection padding is not defined for uint8.
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    flat = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    index = flat.reshape(count, 1, -1).expand(-1, channels, -1)
    moved = images.flatten(2).gather(2, index).view(images.shape)
    return moved if reflect else moved.masked_fill(~inside[:, None], 0)


def crop(images: Tensor, address: Address, padding: int | None = None, first: int = 0) -> Tensor:
    """Pad with zeros and cut a window of the original size at a uniform position; pixels move exactly.

    Args:
        images: (B, C, H, W), any dtype.
        address: where the offsets come from.
        padding: pixels on each side; by default 4 for images of at least 28 pixels, else size // 8 and at
            least 1.
        first: number of the first image.
    """
    return _shifted(images, address, _padding(images) if padding is None else padding, first, reflect=False)


def reflect_crop(images: Tensor, address: Address, padding: int | None = None, first: int = 0) -> Tensor:
    """Crop as :func:`crop` does, padding with the mirrored image (the border pixel is not repeated).

    Args:
        images: (B, C, H, W), any dtype.
        address: where the offsets come from.
        padding: pixels on each side; by default as in :func:`crop`.
        first: number of the first image.
    """
    padding = _padding(images) if padding is None else padding
    if padding >= min(images.shape[-2:]):
        raise InputError(f"augmentation 'reflect_crop': padding {padding} needs images larger than that, "
                         f"got {tuple(images.shape[-2:])}")  # fmt: skip
    return _shifted(images, address, padding, first, reflect=True)


def flip(images: Tensor, address: Address, first: int = 0) -> Tensor:
    """Mirror each image left to right with probability 1/2; pixels move exactly.

    Args:
        images: (B, C, H, W), any dtype.
        address: where the coin flips come from.
        first: number of the first image.
    """
    mirrored = noise.bits(address, images.shape[0], images.device, first) < 0
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def _resampled(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    # Bilinear values at pixel coordinates (B, H', W'), zero outside; uint8 results are rounded.
    height, width = images.shape[-2:]
    grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1)
    result = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return result.to(images.dtype) if images.is_floating_point() else result.round_().to(images.dtype)


def rotate(images: Tensor, address: Address, degrees: float = 15.0, first: int = 0) -> Tensor:
    """Rotate each image about its centre by an angle uniform on ±degrees; bilinear, zeros outside.

    Args:
        images: (B, C, H, W); computed in float32 and returned in the dtype given (uint8 is rounded).
        address: where the angles come from.
        degrees: the largest angle.
        first: number of the first image.
    """
    count, _, height, width = images.shape
    device = images.device
    angle = (noise.uniform(address, count, device, first) * 2 - 1) * math.radians(degrees)
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    x = torch.arange(width, device=device, dtype=torch.float32) - (width - 1) / 2
    y = (torch.arange(height, device=device, dtype=torch.float32) - (height - 1) / 2)[:, None]
    return _resampled(images, cos * x - sin * y + (width - 1) / 2, sin * x + cos * y + (height - 1) / 2)


def box_numbers(address: Address, count: int, device: torch.device, first: int = 0) -> Tensor:
    """Return the uniform numbers that random boxes are made of, (count, 22); each row depends on its number alone.

    Args:
        address: where the numbers come from.
        count: rows.
        device: where they are made.
        first: number of the first row.
    """

    def drawn(stream: str, times: int) -> Tensor:
        return noise.uniform(address.sub(stream), count * times, device, first * times).view(count, times)

    return torch.cat([drawn("scale", _TRIES), drawn("ratio", _TRIES), drawn("rows", 1), drawn("columns", 1)], 1)


def box(numbers: Sequence[float], height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of an image's random box, in pixels.

    Its share of the area is uniform on ``SCALE`` and log(w / h) uniform on log(``RATIO``), given that the box fits: the
    first of ten candidates that fits is taken. Where none does it is the largest box at the centre whose shape is in
    ``RATIO``.

    Args:
        numbers: a row of `box_numbers`.
        height: of the image.
        width: of the image.
    """
    for area, shape in zip(numbers[:_TRIES], numbers[_TRIES:]):
        area = (SCALE[0] + (SCALE[1] - SCALE[0]) * area) * (height * width)
        aspect = RATIO[0] * (RATIO[1] / RATIO[0]) ** shape
        tall, wide = max(1, round(math.sqrt(area / aspect))), max(1, round(math.sqrt(area * aspect)))
        if tall <= height and wide <= width:
            return int(numbers[-2] * (height - tall + 1)), int(numbers[-1] * (width - wide + 1)), tall, wide
    tall, wide = _largest_box(height, width, RATIO)
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _largest_box(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    # A thin image may have no box of that shape in whole pixels: then take all of it.
    return min(height, round(width / ratio[0]) or height), min(width, round(height * ratio[1]) or width)


def _boxes(
    address: Address,
    first: int,
    count: int,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return top, left, height, width (B,) of the random boxes of images of one size, as float32; see `box`."""
    area, shape, down, right = box_numbers(address, count, device, first).split([_TRIES, _TRIES, 1, 1], dim=1)
    area = (scale[0] + (scale[1] - scale[0]) * area) * (height * width)
    aspect = torch.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * shape)
    tall, wide = torch.sqrt(area / aspect).round_().clamp_min_(1), torch.sqrt(area * aspect).round_().clamp_min_(1)
    fits = (tall <= height) & (wide <= width)
    earliest = fits.int().argmax(dim=1, keepdim=True)
    some = fits.any(dim=1)
    tallest, widest = _largest_box(height, width, ratio)
    tall = torch.where(some, tall.gather(1, earliest).squeeze(1), tallest)
    wide = torch.where(some, wide.gather(1, earliest).squeeze(1), widest)
    top = torch.where(some, (down.squeeze(1) * (height - tall + 1)).floor_(), (height - tallest) // 2)
    left = torch.where(some, (right.squeeze(1) * (width - wide + 1)).floor_(), (width - widest) // 2)
    return torch.minimum(top, height - tall), torch.minimum(left, width - wide), tall, wide


def resized_crop(
    images: Tensor,
    address: Address,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    size: int | None = None,
    first: int = 0,
) -> Tensor:
    """Cut a box of random area, shape and position, and resize it bilinearly.

    Image files are cut as they are decoded, from all that they hold: see `FolderSplit.crops`.

    Args:
        images: (B, C, H, W); computed in float32 and returned in the dtype given (uint8 is rounded).
        address: where the boxes come from.
        scale: smallest and largest area of the box, as a share of the image.
        ratio: smallest and largest width / height of the box.
        size: side of the result; by default that of the images. There is no low-pass filter, so choose it no
            smaller than half the images' side.
        first: number of the first image.
    """
    count, _, height, width = images.shape
    device = images.device
    boxes = _boxes(address, first, count, height, width, scale, ratio, device)
    top, left, tall, wide = (box[:, None, None] for box in boxes)
    rows, columns = (height, width) if size is None else (size, size)
    y = (torch.arange(rows, device=device)[:, None] + 0.5) / rows * tall - 0.5
    x = (torch.arange(columns, device=device) + 0.5) / columns * wide - 0.5
    # Clamped to the box, so that no pixel from outside it is mixed in at the edges.
    y = torch.minimum(y.clamp_min(0), tall - 1) + top
    x = torch.minimum(x.clamp_min(0), wide - 1) + left
    return _resampled(images, x.expand(-1, rows, -1), y.expand(-1, -1, columns))


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    # Channel by channel: no constant has to be copied to the device, which a captured step could not do.
    return LUMA[0] * images[:, :1] + LUMA[1] * images[:, 1:2] + LUMA[2] * images[:, 2:]


def _shift_hue(images: Tensor, turn: Tensor) -> Tensor:
    # The hue of HSV moved by ``turn`` (B,), a share of the circle; saturation and value stay.
    red, green, blue = images.split(1, dim=1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    step = torch.where(chroma > 0, chroma, 1)
    last = torch.where(value == green, (blue - red) / step + 2, (red - green) / step + 4)
    hue = torch.where(value == red, (green - blue) / step, last) + 6 * turn[:, None, None, None]
    sixths = torch.cat([hue + 5, hue + 3, hue + 1], dim=1).remainder(6)
    return value - chroma * torch.minimum(sixths, 4 - sixths).clamp(0, 1)


def color_jitter(
    images: Tensor,
    address: Address,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.1,
    first: int = 0,
) -> Tensor:
    """Change brightness, contrast, saturation and hue by random factors, in a random order for each image.

    The first three blend an image with black, with the mean of its grey and with its grey, as f x + (1 - f) base, f
    uniform on 1 ± the argument; the hue moves by up to ± ``hue`` of its circle. Every result is clipped.

    Args:
        images: RGB (B, 3, H, W), or grey (B, 1, H, W), whose saturation and hue stay; uint8, or float in [0, 1].
            Computed in float32 and returned in the dtype given (uint8 is rounded).
        address: where factors and orders come from.
        brightness: at most 1.
        contrast: at most 1.
        saturation: at most 1.
        hue: at most 0.5.
        first: number of the first image.
    """
    count, channels = images.shape[:2]
    if channels not in (1, 3):
        raise InputError(f"augmentation 'color_jitter' is for RGB or grey images, got {channels} channels")
    device, limit = images.device, 1 if images.is_floating_point() else 255
    spreads = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
    factors = [
        (noise.uniform(address.sub(name), count, device, first) * 2 - 1) * spread for name, spread in spreads.items()
    ]
    # Random order: each change is ranked by its 64 random bits.
    queue = noise.bits(address.sub("order"), 4 * count, device, 4 * first).view(count, 4, 1)
    turn = (queue > queue.transpose(1, 2)).sum(2)  # (B, 4)
    hue_turn = turn[:, 3]

    def blend(x: Tensor, now: int, before: bool) -> Tensor:
        early = hue_turn > now if before else hue_turn < now
        mine = [((turn[:, k] == now) & early)[:, None, None, None] for k in range(3)]
        more = sum(chosen * factor[:, None, None, None] for chosen, factor in zip(mine, factors))
        grey = _grey(x)
        base = mine[1] * grey.mean((2, 3), keepdim=True) + mine[2] * grey
        return (x + (x - base) * more).clamp(0, limit)

    # Of the three blends of an image some come before its hue; the others do nothing here.
    result = images.float()
    for now in (0, 1, 2):
        result = blend(result, now, before=True)
    if channels == 3:
        result = _shift_hue(result, factors[3])
    for now in (1, 2, 3):
        result = blend(result, now, before=False)
    return result.to(images.dtype) if images.is_floating_point() else result.round_().to(images.dtype)


AUGMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "crop": crop,
    "reflect_crop": reflect_crop,
    "flip": flip,
    "rotate": rotate,
    "resized_crop": resized_crop,
    "color_jitter": color_jitter,
}


def augment(images: Tensor, names: Sequence[str], address: Address, first: int = 0) -> Tensor:
    """Apply the named augmentations in order, each with its own noise ``address.sub(name)``.

    Args:
        images: (B, C, H, W), uint8 or float; the dtype is kept.
        names: any of ``AUGMENTATIONS``.
        address: the step's address; the same address gives the same images.
        first: number of the first image, where these are part of a batch.

    Example:
        >>> import torch
        >>> from peerbayes import Address
        >>> from peerbayes.data import AUGMENTATIONS, augment
        >>> images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
        >>> augment(images, ["crop", "flip"], Address(0, "data", "augment")).shape
        torch.Size([4, 3, 32, 32])
        >>> list(AUGMENTATIONS)
        ['crop', 'reflect_crop', 'flip', 'rotate', 'resized_crop', 'color_jitter']
    """
    for name in names:
        if name not in AUGMENTATIONS:
            raise InputError(f"unknown augmentation '{name}'{nearest(name, AUGMENTATIONS)}")
        if images.dim() != 4:
            raise InputError(f"augmentation '{name}' is for images: leave augment empty for texts")
        images = AUGMENTATIONS[name](images, address.sub(name), first=first)
    return images
