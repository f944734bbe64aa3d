"""The official arrays of corrupted images: CIFAR-10-C and CIFAR-100-C."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from peerbayes.data.datasets.formats import image_tensor, label_tensor, read_npy
from peerbayes.data.splits import ArraySplit
from peerbayes.data.transforms.corrupt import SEVERITIES, check_choice
from peerbayes.errors import InputError


def load_corrupted(folder: Path | str, name: str, severity: int) -> ArraySplit:
    """Return one type and severity of the official arrays (CIFAR-10-C, CIFAR-100-C), mapped from their file.

    Args:
        folder: holds ``NAME.npy``, uint8 (5n, H, W, 3) with the severities one after the other, and ``labels.npy``,
            integers (5n,); n is 10,000 in the official files.
        name: any of ``CORRUPTIONS``.
        severity: 1 to 5.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from peerbayes.data import load_corrupted
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/fog.npy", np.zeros((10, 32, 32, 3), np.uint8))
        ...     np.save(f"{folder}/labels.npy", np.arange(10))
        ...     load_corrupted(folder, "fog", severity=2).labels.tolist()
        [2, 3]
    """
    check_choice(name, severity)
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
