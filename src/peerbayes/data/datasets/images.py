"""The known sets of images: where each is looked for, and how its files are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peerbayes.data.datasets import folders, formats
from peerbayes.data.datasets.arrays import read_npz
from peerbayes.data.datasets.folders import read_folder
from peerbayes.data.datasets.sources import Source, Stats, find, source
from peerbayes.data.items import Stored
from peerbayes.data.splits import ArraySplit, FolderSplit, held_out, natural_size
from peerbayes.errors import InputError
from peerbayes.math import noise
from peerbayes.networks.normalisation import IMAGENET_STATS

DIGITS = tuple("0123456789")
CIFAR10_STATS: Stats = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


CIFAR100_STATS: Stats = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761))


@source("digits")
def _digits(root: Path, want_train: bool) -> Source:  # noqa: ARG001 (one signature for all readers)
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(np.round(data.images * 255 / 16).astype(np.uint8))[:, None]
    # They come writer by writer: shuffled, so that the last ones stand for all.
    shuffled = noise.permutation(noise.Address(noise.FIXED, "data", "split/digits"), len(images))
    whole = ArraySplit(images, torch.from_numpy(data.target)).select(shuffled)
    assert whole.labels is not None
    kept, held = held_out(whole.labels, 500, "test")
    return Source(whole.select(kept), whole.select(held), classes=10, class_names=DIGITS)


@source("photographs")
def _photographs(root: Path, want_train: bool) -> Source:  # noqa: ARG001
    """520 grey patches of scikit-learn's two photographs, as large as its digits: something else than a digit."""
    if want_train:
        raise InputError("photographs have no classes to learn: they are there to be told from digits")
    from sklearn.datasets import load_sample_images

    patches = []
    for photograph in load_sample_images().images:
        grey = torch.from_numpy(np.asarray(photograph, np.float32)).mean(-1)[None, None]
        small = torch.nn.functional.avg_pool2d(grey, 4)
        patches.append(torch.nn.functional.unfold(small, 8, stride=8)[0].T.reshape(-1, 1, 8, 8))
    return Source(None, ArraySplit(torch.cat(patches).round().to(torch.uint8)))


def _cifar(folder: Path, files: Sequence[str], key: bytes, classes: int) -> ArraySplit:
    images, labels = [], []
    for file in files:
        content = formats.read_pickle(_present(folder / file))
        data, numbers = content.get(b"data"), content.get(key)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
            raise InputError(f"{folder / file}: expected 'data' as a uint8 array of shape (N, 3072)")
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            raise InputError(f"{folder / file}: expected '{key.decode()}' as a list of integers")
        where = f"{folder / file}: {key.decode()}"
        images.append(torch.from_numpy(data.reshape(-1, 3, 32, 32).copy()))
        labels.append(formats.label_tensor(np.array(numbers), where, len(data), classes))
    return ArraySplit(torch.cat(images), torch.cat(labels))


def _present(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"{path}: file not found; unpack the archive again")
    return path


def _cifar_names(path: Path, key: bytes) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    listed = formats.read_pickle(path).get(key)
    if not isinstance(listed, list) or not all(isinstance(name, bytes) for name in listed):
        raise InputError(f"{path}: expected '{key.decode()}' as a list of names")
    return tuple(name.decode("utf-8", "replace") for name in listed)


@source("cifar10")
def _cifar10(root: Path, want_train: bool) -> Source:
    candidates = ("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "cifar10.npz")
    path = find(root, candidates, "cifar-10-python.tar.gz")
    if path.is_file():
        loaded = read_npz(path, want_train, classes=10)
    else:
        files = [f"data_batch_{number}" for number in range(1, 6)]
        loaded = Source(
            _cifar(path, files, b"labels", 10) if want_train else None,
            _cifar(path, ["test_batch"], b"labels", 10),
            classes=10,
            class_names=_cifar_names(path / "batches.meta", b"label_names"),
        )
    return replace(loaded, stats=CIFAR10_STATS, soft_labels=_human_labels(root, loaded.test))


def _human_labels(root: Path, test: Stored | None) -> Tensor | None:
    """Return CIFAR-10H as probabilities from ``cifar10h.npz``, ``cifar10h-probs.npy`` or ``cifar10h-counts.npy``."""
    loaded: Any = None
    for path in (root / f"cifar10h{ending}" for ending in (".npz", "-probs.npy", "-counts.npy")):
        if path.is_file():
            if path.suffix == ".npz":
                arrays = formats.read_npz(path, ("probs", "counts"))
                loaded = arrays.get("probs", arrays.get("counts"))
            else:
                loaded = formats.read_npy(path)
            break
    else:
        return None
    count = 0 if test is None else len(test)
    if loaded is None or loaded.shape != (count, 10) or loaded.dtype.kind not in "fiu":
        raise InputError(f"{path}: expected 'probs' or 'counts' of shape ({count}, 10) for the test images")
    shares = torch.from_numpy(loaded.astype(np.float64))
    total = shares.sum(dim=1, keepdim=True)
    if not (shares.isfinite().all() and (shares >= 0).all() and (total > 0).all()):
        raise InputError(f"{path}: human labels must be finite, not negative, and not all zero for any image")
    return (shares / total).float()


@source("cifar100")
def _cifar100(root: Path, want_train: bool) -> Source:
    candidates = ("cifar-100-python", "cifar100/cifar-100-python", "cifar100.npz")
    path = find(root, candidates, "cifar-100-python.tar.gz")
    if path.is_file():
        return replace(read_npz(path, want_train, classes=100), stats=CIFAR100_STATS)
    return Source(
        _cifar(path, ["train"], b"fine_labels", 100) if want_train else None,
        _cifar(path, ["test"], b"fine_labels", 100),
        classes=100,
        class_names=_cifar_names(path / "meta", b"fine_label_names"),
        stats=CIFAR100_STATS,
    )


@source("svhn")
def _svhn(root: Path, want_train: bool) -> Source:
    def split(part: str) -> ArraySplit:
        file = f"{part}_32x32.mat"
        path = find(root, (f"svhn/{file}", file), file)
        arrays = formats.read_mat(path, ("X", "y"))
        pixels = arrays["X"]
        if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
            raise InputError(f"{path}: expected 'X' as a uint8 array of shape (32, 32, 3, N), got {pixels.shape}")
        images = formats.image_tensor(pixels.transpose(3, 0, 1, 2), f"{path}: X")
        labels = formats.label_tensor(arrays["y"], f"{path}: y", len(images), 11)
        return ArraySplit(images, labels % 10)  # the files write the digit 0 as 10

    return Source(split("train") if want_train else None, split("test"), classes=10, class_names=DIGITS)


def _idx(root: Path, want_train: bool, candidates: Sequence[str], class_names: tuple[str, ...]) -> Source:
    def part(name: str, dimensions: int) -> tuple[np.ndarray[Any, Any], Path]:
        stems = (f"{name}-idx{dimensions}-ubyte", f"{name}.idx{dimensions}-ubyte")
        files = [f"{folder}/{stem}{end}" for folder in candidates for stem in stems for end in ("", ".gz")]
        path = find(root, files, f"{stems[0]}.gz")
        return formats.read_idx(path, dimensions), path

    def split(name: str) -> ArraySplit:
        pixels, image_path = part(f"{name}-images", 3)
        numbers, label_path = part(f"{name}-labels", 1)
        images = formats.image_tensor(pixels, str(image_path))
        return ArraySplit(images, formats.label_tensor(numbers, str(label_path), len(images), 10))

    return Source(split("train") if want_train else None, split("t10k"), classes=10, class_names=class_names)


@source("mnist")
def _mnist(root: Path, want_train: bool) -> Source:
    return _idx(root, want_train, ("mnist", "MNIST/raw"), DIGITS)


@source("fashion-mnist")
def _fashion_mnist(root: Path, want_train: bool) -> Source:
    clothes = ("T-shirt/top", "trouser", "pullover", "dress", "coat",
               "sandal", "shirt", "sneaker", "bag", "ankle boot")  # fmt: skip
    return _idx(root, want_train, ("fashion-mnist", "FashionMNIST/raw"), clothes)


@source("imagenet")
def _imagenet(root: Path, want_train: bool) -> Source:
    archives = "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar (as train/<class>/ and val/<class>/)"
    return _as_imagenet(read_folder(find(root, ("imagenet", "ILSVRC2012"), archives), want_train))


@source("tiny-imagenet")
def _tiny_imagenet(root: Path, want_train: bool) -> Source:
    candidates = ("tiny-imagenet-200", "tiny-imagenet")
    return _as_imagenet(read_folder(find(root, candidates, "tiny-imagenet-200.zip"), want_train), 64, 1.0)


@source("dtd")
def _dtd(root: Path, want_train: bool) -> Source:
    folder = find(root, ("dtd/dtd", "dtd"), "dtd-r1.0.1.tar.gz")
    classes = folders.class_names(folder / "images")

    def split(part: str) -> FolderSplit:
        return folders.read_listed(folder / "images", _present(folder / "labels" / f"{part}1.txt"), classes)

    loaded = Source(
        split("train") if want_train else None,
        split("test"),
        split("val") if want_train else None,
        classes=len(classes),
        class_names=classes,
    )
    return _as_imagenet(loaded)


@source("flowers102")
def _flowers102(root: Path, want_train: bool) -> Source:
    files = "102flowers.tgz, imagelabels.mat and setid.mat"
    folder = find(root, ("flowers-102", "flowers102"), files)
    label_path, split_path = (_present(folder / file) for file in ("imagelabels.mat", "setid.mat"))
    numbers = formats.read_mat(label_path, ("labels",))["labels"].reshape(-1)
    parts = formats.read_mat(split_path, ("trnid", "valid", "tstid"))
    labels = formats.label_tensor(numbers, f"{label_path}: labels", len(numbers), 103) - 1  # the file counts from 1

    def split(key: str) -> FolderSplit:
        images = formats.label_tensor(parts[key].reshape(-1), f"{split_path}: {key}", parts[key].size)
        if not len(images) or int(images.min()) < 1 or int(images.max()) > len(labels):
            raise InputError(f"{split_path}: {key} must be image numbers from 1 to {len(labels)}")
        paths = [str(_present(folder / "jpg" / f"image_{number:05d}.jpg")) for number in images.tolist()]
        return FolderSplit(paths, labels[images - 1], natural_size(paths))

    loaded = Source(
        split("trnid") if want_train else None,
        split("tstid"),
        split("valid") if want_train else None,
        classes=102,
    )
    return _as_imagenet(loaded)


def _as_imagenet(loaded: Source, size: int = 224, margin: float = 256 / 224) -> Source:
    """Return images of one size, cut out of their centres and normalised as ImageNet's are."""

    def resized(split: Stored | None) -> Stored | None:
        return replace(split, size=size, margin=margin) if isinstance(split, FolderSplit) else split

    return replace(
        loaded,
        train=resized(loaded.train),
        test=resized(loaded.test),
        validation=resized(loaded.validation),
        stats=IMAGENET_STATS,
    )
