"""Read splits of arrays, such as those of an ``.npz`` file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peerbayes.data.datasets import formats
from peerbayes.data.datasets.sources import Source
from peerbayes.data.splits import ArraySplit
from peerbayes.errors import InputError


def read_npz(path: Path, want_train: bool, classes: int | None = None) -> Source:
    """Read ``train_``, ``test_``, ``validation_`` (or ``val_``) ``images`` and ``labels``, and ``names``, from a file.

    Without ``want_train`` only the test images are read, or the training images where there are none; labels
    are optional then. Large image arrays stay in the file (see :func:`peerbayes.data.datasets.formats.read_npz`).

    Args:
        path: the file.
        want_train: whether the training split is wanted.
        classes: how many there are, where that is known.
    """
    if want_train:
        prefixes = ("train", "test", "validation", "val")
        keys = [f"{prefix}_{part}" for prefix in prefixes for part in ("images", "labels")]
        arrays = formats.read_npz(path, [*keys, "names"], required="train_images")
        if "validation_images" in arrays and "val_images" in arrays:
            raise InputError(f"{path}: has both 'validation_images' and 'val_images'; expected one validation split")
    else:
        arrays = formats.read_npz(path, ("test_images", "test_labels", "names"))
        if "test_images" not in arrays:
            arrays = formats.read_npz(path, ("train_images", "train_labels", "names"), required="train_images")
    class_names = _class_names(arrays["names"], path) if "names" in arrays else None
    classes = classes or (len(class_names) if class_names else None)

    def split(prefix: str) -> ArraySplit | None:
        if f"{prefix}_images" not in arrays:
            return None
        key = f"{prefix}_labels"
        if key not in arrays and want_train:
            raise InputError(f"{path}: no key '{key}' beside '{prefix}_images'")
        return array_split(arrays[f"{prefix}_images"], arrays.get(key), f"{path}: {prefix}", classes)

    train = split("train")
    if want_train and classes is None:
        assert train is not None
        classes = count_classes(train.labels, f"{path}: train_labels")
    return Source(
        train, split("test"), split("validation") or split("val"), classes=classes or 0, class_names=class_names
    )


def _class_names(array: formats.Array, path: Path) -> tuple[str, ...]:
    if array.ndim != 1 or array.dtype.kind not in "US" or not len(array):
        raise InputError(f"{path}: names must be a list of texts, got shape {array.shape} of {array.dtype}")
    return tuple(item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in array)


def array_split(
    images: formats.Array, labels: formats.Array | None, where: str, classes: int | None = None
) -> ArraySplit:
    """Return checked arrays as a split; ``where`` is put before ``_images`` and ``_labels`` in messages.

    Args:
        images: the inputs.
        labels: one an image, or None.
        where: part of the data, for messages.
        classes: how many there are, where that is known.
    """
    pixels = formats.image_tensor(images, f"{where}_images")
    rows = torch.arange(len(pixels)) if isinstance(images, np.memmap) else None
    if labels is None:
        return ArraySplit(pixels, rows=rows)
    return ArraySplit(pixels, formats.label_tensor(labels, f"{where}_labels", len(pixels), classes), rows)


def count_classes(labels: Tensor | None, where: str, items: str = "image") -> int:
    """Return the number of classes, each of which must have an item to train on.

    Args:
        labels: of the training split.
        where: begins the error.
        items: what is counted, for messages.
    """
    assert labels is not None
    present = labels.unique()
    classes = int(present[-1]) + 1
    if len(present) < classes:
        absent = int((present != torch.arange(len(present))).nonzero()[0])
        raise InputError(f"{where} has no {items} of class {absent}: number the classes from 0 without gaps, or give a "
                         "name to each as 'names'")  # fmt: skip
    return classes
