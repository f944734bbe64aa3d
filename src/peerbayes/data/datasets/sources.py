"""The known data sets and the layouts of their files: where each is looked for, and how it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from peerbayes.data.datasets import folders, formats
from peerbayes.data.items import ItemSplit
from peerbayes.data.splits import ArraySplit, FolderSplit
from peerbayes.errors import InputError

if TYPE_CHECKING:
    from peerbayes.data.datasets.corpora import Corpus

Stored = ArraySplit | FolderSplit | ItemSplit
Stats = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class Source:
    """What a reader found: the splits as stored.

    Args:
        train: absent where only images were asked for.
        test: absent where the data has none.
        validation: the data's own.
        classes: number of classes; 0 where only images were asked for.
        class_names: one a class, where they are known.
        stats: published mean and deviation, or None to measure them.
        soft_labels: float32 (N, classes) of the test images, or None.
        notes: what a person should know of how it was read, a sentence each.
    """

    train: Stored | None
    test: Stored | None
    validation: Stored | None = None
    classes: int = 0
    class_names: tuple[str, ...] | None = None
    stats: Stats | None = None
    soft_labels: Tensor | None = None
    notes: tuple[str, ...] = ()


Reader = Callable[[Path, bool], "Source | Corpus"]  # (root, whether the training split is wanted)
READERS: dict[str, Reader] = {}
R = TypeVar("R", bound=Reader)


def source(name: str) -> Callable[[R], R]:
    """Register a reader under a name."""

    def register(reader: R) -> R:
        READERS[name] = reader
        return reader

    return register


def data_root(root: Path | str | None = None) -> Path:
    """Return the folder of the data: the argument, else ``PEERBAYES_DATA``, else ``~/.cache/peerbayes/data``."""
    return Path(root or os.environ.get("PEERBAYES_DATA") or "~/.cache/peerbayes/data").expanduser()


def find(root: Path, places: Sequence[str], archive: str) -> Path:
    """Return the first of the places below ``root`` that exists; where none does, say what to get."""
    for place in places:
        if (root / place).exists():
            return root / place
    looked = ", ".join(str(root / place) for place in places)
    raise InputError(f"data set not found: looked for {looked}; get {archive} and put it there (archives unpacked), or "
                     "name another data root by --data-root (root in Python) or PEERBAYES_DATA")  # fmt: skip


def read_npz(path: Path, want_train: bool, classes: int | None = None) -> Source:
    """Read ``train_``, ``test_``, ``validation_`` (or ``val_``) ``images`` and ``labels``, and ``names``, from a file.

    Without ``want_train`` only the test images are read, or the training images where there are none; labels
    are optional then. Large image arrays stay in the file (see :func:`peerbayes.data.datasets.formats.read_npz`).
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
    """Return checked arrays as a split; ``where`` is put before ``_images`` and ``_labels`` in messages."""
    found = formats.image_tensor(images, f"{where}_images")
    rows = torch.arange(len(found)) if isinstance(images, np.memmap) else None
    if labels is None:
        return ArraySplit(found, rows=rows)
    return ArraySplit(found, formats.label_tensor(labels, f"{where}_labels", len(found), classes), rows)


def count_classes(labels: Tensor | None, where: str, items: str = "image") -> int:
    """Return the number of classes, each of which must have an item to train on."""
    assert labels is not None
    present = labels.unique()
    classes = int(present[-1]) + 1
    if len(present) < classes:
        absent = int((present != torch.arange(len(present))).nonzero()[0])
        raise InputError(f"{where} has no {items} of class {absent}: number the classes from 0 without gaps, or give a "
                         "name to each as 'names'")  # fmt: skip
    return classes


def read_folder(path: Path, want_train: bool) -> Source:
    """Read ``train/<class>/``, and ``val`` and ``test`` beside it, or ``<class>/`` alone, in sorted order.

    The test split is ``test`` where it has class folders, else ``val``; where both have them, ``val`` is the
    validation split. In Tiny ImageNet's layout (``val/val_annotations.txt``) it is ``val``. Splits may have any of the
    names in `SPLIT_NAMES`.
    """
    parts = folders.split_folders(path)
    train, val, test = (parts.get(part) for part in ("train", "validation", "test"))
    tiny = val is not None and (val / "val_annotations.txt").is_file()
    if val is not None and test is not None and (tiny or not folders.has_folders(test)):
        test = None  # published without labels
    if not want_train:
        return Source(None, folders.read_images(test or val or path))
    if train is None:
        if val is not None or test is not None:
            raise InputError(f"{path}: expected a folder 'train' beside 'val' or 'test'")
        classes = folders.class_names(path)
        return Source(folders.read_classes(path, classes), None, classes=len(classes), class_names=classes)
    classes = folders.class_names(train)
    split = folders.read_classes(train, classes)
    read = folders.read_annotated if tiny else folders.read_classes
    others = [read(place, classes, split.size) for place in (test, val) if place is not None]
    told = f"{path}: no test split: the {len(others[0]):,} images of '{val.name}' are it" if val and not test else ""
    return Source(
        split,
        others[0] if others else None,
        others[1] if len(others) > 1 else None,
        classes=len(classes),
        class_names=classes,
        notes=(told,) if told else (),
    )
