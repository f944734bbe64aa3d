"""One split of a data set: images by index, from memory or from files, and the order of an epoch."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from peerbayes.data.transforms.augment import box, box_numbers
from peerbayes.errors import InputError
from peerbayes.math import noise
from peerbayes.math.noise import Address

# By content, whatever a file is called. Pillow knows many more, and one of them (EPS) runs a program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_CHUNK = 2048  # images that are converted at a time
_SIZED = 8  # files, about, whose sizes say whether that of the first is usual
_NUMBERS = 1 << 23  # numbers that are measured at a time


class Split(Protocol):
    """Images that are fetched by index; or texts, as rows of token numbers, wherever images are spoken of.

    ``labels`` is int64 (N,) on the CPU, or None where the images have none.

    Example:
        >>> from peerbayes.data import Split, load
        >>> def count(split: Split) -> int:
        ...     return len(split)
        >>> count(load("digits").test)
        500
    """

    @property
    def labels(self) -> Tensor | None: ...

    def __len__(self) -> int: ...

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W), uint8 or float32 in [0, 1], and labels int64 (B,), on ``device``.

        Texts are token numbers int32 or int64 (B, L).
        ``index`` is int64 (B,), on any device. An empty index gives (0, C, H, W) and (0,). A split without
        labels gives labels of shape (0,) whatever B is.

        Args:
            index: int64 (B,).
            device: where the batch is wanted.
        """
        ...


def order(count: int, address: Address, device: torch.device | str | None = None) -> Tensor:
    """Return an epoch's permutation of ``range(count)``, int64 (count,), the same on every device.

    Args:
        count: items.
        address: of the epoch.
        device: where it is made.

    Example:
        >>> from peerbayes import Address
        >>> from peerbayes.data import order
        >>> sorted(order(5, Address(0)).tolist())
        [0, 1, 2, 3, 4]
    """
    return noise.permutation(address, count, device)


def batches(
    count: int,
    batch_size: int,
    address: Address | None = None,
    drop_last: bool = False,
    device: torch.device | str | None = None,
) -> tuple[Tensor, ...]:
    """Return the index tensors of an epoch: in the order of ``address``, or unshuffled without one.

    Args:
        count: number of images.
        batch_size: images in a batch; the last batch may be smaller.
        address: the epoch's address.
        drop_last: leave out a last batch that is smaller.
        device: where the indices live.

    Example:
        >>> from peerbayes.data import batches
        >>> [index.tolist() for index in batches(5, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if drop_last and count < batch_size:
        raise InputError(f"batch_size {batch_size} leaves no full batch of {count} images with drop_last")
    index = torch.arange(count, device=device) if address is None else order(count, address, device)
    if drop_last:
        index = index[: count - count % batch_size]
    return torch.split(index, batch_size)


def held_out(labels: Tensor, count: int, stream: str) -> tuple[Tensor, Tensor]:
    """Return (kept, held): ascending indices of all images, ``count`` of them held, the same every time.

    Each class gives the same share of its images, give or take one, chosen by a permutation at a fixed
    address.

    Args:
        labels: int64 (N,).
        count: images to hold out, at most N.
        stream: what they are for; different streams choose independently.
    """
    permuted = noise.permutation(Address(noise.FIXED, "data", f"split/{stream}"), len(labels))
    by_class = permuted[torch.argsort(labels[permuted], stable=True)]
    evenly = ((2 * torch.arange(count) + 1) * len(labels)) // (2 * count)
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_class[evenly]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images in memory, or in a mapped file; or texts in memory.

    Args:
        images: (M, C, H, W), uint8, or float in [0, 1]; or token numbers (M, L), int32 or int64. Batches are indexed
            on the device where it lives.
        labels: integers (N,), or None.
        rows: None for images in memory (N = M). For images that are mapped from a file, and may be larger than
            memory: int64 (N,), which of them belong to the split, in order.
        texts: N texts that the token numbers were made of, to be shown; None where nobody shows them.

    Example:
        >>> import torch
        >>> from peerbayes.data import ArraySplit
        >>> split = ArraySplit(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1, 0]))
        >>> len(split), split.shape
        (5, (1, 8, 8))
        >>> images, labels = split.batch(torch.tensor([3, 4]), "cpu")
        >>> images.shape, labels.tolist()
        (torch.Size([2, 1, 8, 8]), [1, 0])
    """

    images: Tensor
    labels: Tensor | None = None
    rows: Tensor | None = None
    texts: Sequence[str] | None = field(default=None, repr=False)
    _near: Tensor = field(init=False, repr=False)  # the labels where the images are

    def __post_init__(self) -> None:
        tokens = self.images.dtype in (torch.int32, torch.int64)
        if self.images.ndim != 4 and not (tokens and self.images.ndim == 2):
            raise InputError("images must have shape (N, C, H, W), and token numbers of texts (N, L), "
                             f"got {tuple(self.images.shape)}")  # fmt: skip
        if self.images.ndim == 4 and self.images.dtype != torch.uint8 and not self.images.is_floating_point():
            raise InputError(f"images must be uint8 or float, got {self.images.dtype}")
        labels = self.labels
        if labels is not None:
            if labels.is_floating_point() or labels.shape != (len(self),):
                raise InputError(f"labels must be {len(self)} integers for {len(self)} images, "
                                 f"got shape {tuple(labels.shape)} of {labels.dtype}")  # fmt: skip
            labels = labels.to("cpu", torch.int64)
        object.__setattr__(self, "labels", labels)
        near = torch.zeros(0, dtype=torch.int64) if labels is None else labels
        object.__setattr__(self, "_near", near.to(self.images.device))

    def __len__(self) -> int:
        return len(self.images if self.rows is None else self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image, or the length of one text."""
        return tuple(self.images.shape[1:])

    def to(self, device: torch.device | str) -> ArraySplit:
        """Return the split with its images in the memory of ``device``, where batches are then indexed."""
        if self.rows is None:
            return ArraySplit(self.images.to(device), self.labels, texts=self.texts)
        images = torch.empty((len(self), *self.shape), dtype=self.images.dtype, device=device)
        for start in range(0, len(self), _CHUNK):
            images[start : start + _CHUNK] = self.images[self.rows[start : start + _CHUNK]].to(device)
        return ArraySplit(images, self.labels)

    def select(self, index: Tensor) -> ArraySplit:
        """Return the split of the images at ``index``, in that order; images of a mapped file stay there."""
        labels = None if self.labels is None else self.labels[index.cpu()]
        if self.rows is not None:
            return ArraySplit(self.images, labels, self.rows[index.cpu()])
        texts = None if self.texts is None else [self.texts[number] for number in index.tolist()]
        return ArraySplit(self.images[index.to(self.images.device)], labels, texts=texts)

    def sized(self, size: int) -> ArraySplit:
        """Return the split with its images resized to ``size`` by ``size`` (see :func:`resize`), in memory."""
        if self.shape[1:] == (size, size):
            return self
        return ArraySplit(resize(self.images, size, self.rows), self.labels)

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """See :meth:`Split.batch`; nothing waits for the device when index and images are there already.

        Args:
            index: int64 (B,).
            device: where the batch is wanted.
        """
        index = index.to(self.images.device)
        labels = self._near if self.labels is None else self._near[index]
        # Channels may come last in a mapped file; a batch looks the same wherever it is from.
        images = self.images[index] if self.rows is None else self.images[self.rows[index]].contiguous()
        return images.to(device), labels.to(device)


@dataclass(frozen=True, eq=False)
class JoinedSplit:
    """Several splits of one data set, one after the other.

    Args:
        parts: with labels.
    """

    parts: tuple[Split, ...]

    @property
    def labels(self) -> Tensor:
        """The labels of all parts, (N,)."""
        return torch.cat([part.labels for part in self.parts if part.labels is not None])

    def __len__(self) -> int:
        """Number of items of all parts."""
        return sum(map(len, self.parts))

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """See :meth:`Split.batch`.

        Args:
            index: int64 (B,).
            device: where the batch is wanted.
        """
        rows, items, labels, before = [], [], [], 0
        for part in self.parts:
            in_part = ((index >= before) & (index < before + len(part))).nonzero().flatten()
            if len(in_part):
                part_items, part_labels = part.batch(index[in_part] - before, device)
                rows.append(in_part)
                items.append(part_items)
                labels.append(part_labels)
            before += len(part)
        back = torch.cat(rows).argsort().to(device)
        return torch.cat(items)[back], torch.cat(labels)[back]


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """Image files, decoded on demand by a few threads into RGB: centres by `batch`, random boxes by `crops`.

    For a centre, the shortest side is resized to ``round(size * margin)`` (antialiased, bilinear) and the middle is cut
    out. Pixels are taken as stored: an EXIF rotation is not applied.

    Args:
        files: paths of the images.
        labels: int64 (N,) on the CPU, or None.
        size: side of the images delivered.
        margin: how much larger the shortest side is made before the centre is cut out.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from peerbayes.data import FolderSplit
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Image.new("RGB", (20, 10), "white").save(Path(folder) / "a.png")
        ...     images, _ = FolderSplit([f"{folder}/a.png"], None, size=8).batch(torch.tensor([0]), "cpu")
        >>> images.shape, images.min().item()
        (torch.Size([1, 3, 8, 8]), 255)
    """

    files: Sequence[str]
    labels: Tensor | None
    size: int
    margin: float = 1.0

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image."""
        return 3, self.size, self.size

    def select(self, index: Tensor) -> FolderSplit:
        """Return the split of the files at ``index``, in that order."""
        files = [self.files[i] for i in index.tolist()]
        return replace(self, files=files, labels=None if self.labels is None else self.labels[index.cpu()])

    def sized(self, size: int) -> FolderSplit:
        """Return the split that delivers images of another size."""
        return replace(self, size=size)

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """See :meth:`Split.batch`; a file that cannot be decoded is named.

        Args:
            index: int64 (B,).
            device: where the batch is wanted.
        """
        shortest = round(self.size * self.margin)
        return self._decoded(index, device, lambda _, file: centre(open_rgb(file), shortest, self.size))

    def crops(self, index: Tensor, device: torch.device, address: Address, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return a batch as `batch` does, but of random boxes of all that the files hold, each resized (antialiased).

        Boxes have the law of `resized_crop`, for each image's own sides.

        Args:
            index: int64 (B,).
            device: where the batch is wanted.
            address: where the boxes come from.
            first: number of the first image, where these are part of a batch.
        """
        numbers = box_numbers(address, len(index), torch.device("cpu"), first).tolist()
        return self._decoded(index, device, lambda row, file: _crop(file, numbers[row], self.size))

    def _decoded(
        self, index: Tensor, device: torch.device, decode: Callable[[int, str], NDArray[np.uint8]]
    ) -> tuple[Tensor, Tensor]:
        images = np.empty((len(index), *self.shape), np.uint8)

        def put(row: int, number: int) -> None:
            images[row] = decode(row, self.files[number]).transpose(2, 0, 1)

        for _ in _pool().map(put, range(len(index)), index.tolist()):
            pass
        labels = torch.zeros(0, dtype=torch.int64) if self.labels is None else self.labels[index.cpu()]
        return torch.from_numpy(images).to(device), labels.to(device)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="peerbayes-decode")


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork, and a child that used the parent's pool would wait for ever.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def open_rgb(file: str) -> Image.Image:
    """Decode one 8-bit image file of `FORMATS` into RGB; transparency is dropped."""
    if os.path.exists(file) and not os.path.isfile(file):  # a pipe would be waited for
        raise InputError(f"{file}: is not a regular file, expected an image")
    return decode_rgb(file, file)


def decode_rgb(source: str | BinaryIO, where: str) -> Image.Image:
    """Decode an 8-bit image of `FORMATS` into RGB; transparency is dropped.

    Args:
        source: a file, or one that is open.
        where: its name, which begins the error.
    """
    try:
        with Image.open(source, formats=FORMATS) as image:
            image.load()
    except UnidentifiedImageError as error:
        raise InputError(f"{where}: cannot be decoded as an image (expected {', '.join(FORMATS)})") from error
    except Exception as error:  # decoders raise many types on broken files
        reason = re.sub(rf"['\"]{re.escape(where)}['\"]", "", str(error)).strip(" '\"") or type(error).__name__
        raise InputError(f"{where}: cannot be decoded as an image ({reason})") from error
    return in_rgb(image, where)


def natural_size(files: Sequence[str]) -> int:
    """Return the size at which files are read unless one is given: `usual_side` of the first and a few others."""
    step = max(1, len(files) // _SIZED)
    sampled = files[step::step]
    return usual_side([min(open_rgb(files[0]).size), *(side for side in map(_shortest, sampled) if side)])


def _shortest(file: str) -> int:
    """Return the shortest side that the header of a file tells; 0 where it can't be read."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return min(image.size)
    except Exception:  # said where the file is decoded
        return 0


def usual_side(sides: Sequence[int]) -> int:
    """Return the first of some sides, or their median where the first is less than a quarter of it, at most 224.

    Args:
        sides: the shortest one of each image.

    Example:
        >>> usual_side([32, 40, 48]), usual_side([1, 40, 48])
        (32, 40)
    """
    first, median = (min(224, side) for side in (sides[0], sorted(sides)[len(sides) // 2]))
    return first if 4 * first >= median else median


def in_rgb(image: Image.Image, where: str) -> Image.Image:
    """Return an image of 8 bits a channel in RGB; transparency is dropped.

    Args:
        image: of any mode.
        where: its name, which begins the error.
    """
    if image.mode.startswith(("I", "F")):
        raise InputError(f"{where}: expected an image of 8 bits a channel, got mode {image.mode}")
    if image.mode == "RGB":
        return image
    # A palette whose transparency is given in bytes has to go through RGBA.
    return (image.convert("RGBA") if image.mode in ("P", "PA") else image).convert("RGB")


def centre(image: Image.Image, shortest: int, size: int) -> NDArray[np.uint8]:
    """Return the middle (size, size, C) of an image whose shortest side is brought to ``shortest``.

    Args:
        image: in RGB.
        shortest: length of its shortest side after resizing.
        size: side of what is cut out.
    """
    height, width = _scaled(image.height, image.width, shortest)
    top, left = round((height - size) / 2), round((width - size) / 2)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _crop(file: str, numbers: Sequence[float], size: int) -> NDArray[np.uint8]:
    image = open_rgb(file)
    top, left, tall, wide = box(numbers, image.height, image.width)
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + wide, top + tall)))).permute(2, 0, 1)
    # Bytes by torch: what Pillow makes but for a rounding, in a third of the time.
    resized = F.interpolate(pixels.unsqueeze(0), (size, size), mode="bilinear", antialias=True)
    return resized.squeeze(0).permute(1, 2, 0).numpy()


def _scaled(height: int, width: int, shortest: int) -> tuple[int, int]:
    side = min(height, width)
    return (shortest, int(shortest * width / side)) if height == side else (int(shortest * height / side), shortest)


def resize(images: Tensor, size: int, rows: Tensor | None = None) -> Tensor:
    """Resize the shortest side to ``size`` (antialiased, bilinear) and cut out the centre.

    Args:
        images: (N, C, H, W), uint8 (rounded) or float; the dtype is kept.
        size: side of the result, (N, C, size, size).
        rows: int64 (N,), which of the images; by default all of them.
    """
    height, width = _scaled(images.shape[2], images.shape[3], size)
    top, left = round((height - size) / 2), round((width - size) / 2)
    count = len(images if rows is None else rows)
    result = images.new_empty((count, images.shape[1], size, size))
    for start in range(0, count, _CHUNK):
        part = images[start : start + _CHUNK] if rows is None else images[rows[start : start + _CHUNK]]
        part = F.interpolate(part.float(), (height, width), mode="bilinear", antialias=True, align_corners=False)
        part = part[:, :, top : top + size, left : left + size]
        result[start : start + _CHUNK] = part if images.is_floating_point() else part.round().clamp(0, 255)
    return result


def measure(split: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation (over all pixels, divisor N) per channel in the [0, 1] scale.

    A constant channel gets the deviation 1/255, so that dividing by it is harmless.
    """
    total: Any = 0.0
    squares: Any = 0.0
    pixels = 0
    cpu = torch.device("cpu")
    numbers = split.batch(torch.zeros(1, dtype=torch.int64), cpu)[0].numel()
    for index in batches(len(split), max(1, _NUMBERS // numbers)):
        images, _ = split.batch(index, cpu)
        values = images.double() if images.is_floating_point() else images.double() / 255
        total = total + values.sum((0, 2, 3))
        squares = squares + values.square().sum((0, 2, 3))
        pixels += values.shape[0] * values.shape[2] * values.shape[3]
    mean = (total / pixels).tolist()
    power = (squares / pixels).tolist()
    std = [math.sqrt(max(p - m * m, 0.0)) for p, m in zip(power, mean)]
    return tuple(mean), tuple(max(s, 1 / 255) for s in std)


def digest(split: Split) -> str:
    """Return a hash of a split: of its length, its labels, and up to 4,096 of its images or texts, evenly spaced.

    Of image files the last two parts of their paths and their sizes are looked at.
    """
    labels = split.labels
    digest = hashlib.blake2b(f"{len(split)} {None if labels is None else labels.tolist()}".encode(), digest_size=16)
    index = torch.arange(0, len(split), max(1, math.ceil(len(split) / 4096)))
    if isinstance(split, FolderSplit):
        for path in (Path(split.files[number]) for number in index.tolist()):
            digest.update(f"{path.parts[-2:]} {path.stat().st_size}".encode())
    else:
        for part in index.split(256):
            rows = split.batch(part, torch.device("cpu"))[0].contiguous()
            digest.update(f"{rows.dtype} {tuple(rows.shape)}".encode())
            digest.update(rows.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
