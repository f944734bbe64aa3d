"""Images of an object that hands them out one by one, read when a batch wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from peerbayes.data.datasets import formats
from peerbayes.data.splits import ArraySplit, FolderSplit, in_rgb, resize
from peerbayes.errors import InputError, reason


def pixels(
    image: Any, where: str, grey: bool = False, expected: str = "an image (a PIL image, an array or a tensor)"
) -> Tensor:
    """Return one image as a data set of arrays would hold it: (C, H, W), uint8 or float32 in [0, 1].

    Args:
        image: a PIL image, an array or a tensor: (H, W), (H, W, C) or (C, H, W).
        where: of it, for messages.
        grey: keep the single channel of a grey PIL image, instead of three equal ones.
        expected: what may be given, for messages.
    """
    if isinstance(image, Image.Image):
        array = np.asarray(image.convert("L") if grey and is_grey(image) else in_rgb(image, where))
    else:
        try:
            array = image.numpy(force=True) if isinstance(image, Tensor) else np.asarray(image)
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: can't be made an array ({error})") from None
        if array.ndim not in (2, 3):
            kind = f"an array of shape {array.shape}" if array.ndim else f"a {type(image).__name__}"
            raise InputError(f"{where}: expected {expected}, got {kind}")
    return formats.image_tensor(array[None], where)[0]


def is_grey(image: Any) -> bool:
    """Return whether an image is a grey one of PIL."""
    return isinstance(image, Image.Image) and image.mode in ("1", "L")


@dataclass(frozen=True, eq=False)
class ItemSplit:
    """Images that an object hands out by number, one at a time: it need not be safe to be used by several threads.

    Args:
        image: returns the image of a number, as `pixels` takes it.
        labels: int64 (N,) on the CPU, or None.
        shape: channels, height and width of one image.
        dtype: uint8 or float32.
        numbers: int64 (N,), which images of the object belong to the split, in order.
        size: side that images of any shape are brought to, see `peerbayes.data.splits.resize`; None for none.
    """

    image: Callable[[int], Any]
    labels: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: Tensor
    size: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, index: Tensor) -> ItemSplit:
        """Return the split of the images at ``index``, in that order."""
        index = index.cpu()
        return replace(self, numbers=self.numbers[index], labels=None if self.labels is None else self.labels[index])

    def sized(self, size: int) -> ItemSplit:
        """Return the split that delivers images of another size."""
        return replace(self, size=size, shape=(self.shape[0], size, size))

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """See `peerbayes.data.splits.Split.batch`; an image that cannot be read is named.

        Args:
            index: int64 (B,).
            device: where the batch is wanted.
        """
        images = torch.empty((len(index), *self.shape), dtype=self.dtype)
        with self._lock:
            for row, number in enumerate(self.numbers[index.cpu()].tolist()):
                images[row] = self._read(number)
        labels = torch.zeros(0, dtype=torch.int64) if self.labels is None else self.labels[index.cpu()]
        return images.to(device), labels.to(device)

    def _read(self, number: int) -> Tensor:
        where = f"item {number}"
        try:
            given = self.image(number)
        except InputError:
            raise
        except Exception as error:  # an object of the user's may raise anything
            raise InputError(f"{where} of the data can't be read: {reason(error)}") from error
        image = pixels(given, where, grey=self.shape[0] == 1)
        if self.size is not None and tuple(image.shape[1:]) != (self.size, self.size):
            image = resize(image[None], self.size)[0]
        if tuple(image.shape) != self.shape or image.dtype != self.dtype:
            raise InputError(f"{where} has shape {tuple(image.shape)} and {image.dtype}, but had {self.shape} and "
                             f"{self.dtype} before; does the data set change its items?")  # fmt: skip
        return image


Stored = ArraySplit | FolderSplit | ItemSplit
