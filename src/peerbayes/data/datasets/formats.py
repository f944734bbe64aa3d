"""Readers of the file formats, each from a path to checked arrays; nothing that a file says is run."""

from __future__ import annotations

import codecs
import gzip
import math
import pickle
import struct
import warnings
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerbayes.errors import InputError

Array = NDArray[Any]

MAPPED_BYTES = 256 << 20  # an uncompressed array of at least so many bytes stays in its file

_CHANNELS = (1, 3, 4)
_CHUNK = 2048  # images whose range is looked at at a time


def image_tensor(array: Array, where: str) -> Tensor:
    """Return images as (N, C, H, W), uint8 or float32 in [0, 1], contiguous; a mapped array stays mapped as it lies.

    Args:
        array: (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels (the last axis is looked at
            first), uint8 or float in [0, 1].
        where: file and key, for messages.
    """
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise InputError(f"{where}: images must be uint8, or float in [0, 1], got {array.dtype}")
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in _CHANNELS:
        array = array.transpose(0, 3, 1, 2)
    elif array.ndim != 4 or array.shape[1] not in _CHANNELS:
        raise InputError(f"{where}: images must have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 "
                         f"channels, got {array.shape}")  # fmt: skip
    if array.size == 0:
        raise InputError(f"{where}: expected at least one image, got shape {array.shape}")
    if array.dtype != np.uint8:
        parts = [array[start : start + _CHUNK] for start in range(0, len(array), _CHUNK)]
        ranges = np.array([(part.min(), part.max()) for part in parts], np.float64)  # each page is read once
        low, high = float(ranges[:, 0].min()), float(ranges[:, 1].max())  # NaN wins in both
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InputError(f"{where}: float images must be finite, got NaN or infinity")
        if low < 0 or high > 1:
            raise InputError(f"{where}: float images must be in [0, 1], got values from {low:g} to {high:g} "
                             "(divide by 255, or store uint8; leave normalisation to the network)")  # fmt: skip
    if isinstance(array, np.memmap):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(array)
    return torch.from_numpy(np.array(array, np.uint8 if array.dtype == np.uint8 else np.float32, order="C"))


def label_tensor(array: Array, where: str, count: int, classes: int | None = None) -> Tensor:
    """Return labels as int64 (N,), checked against the number of images and of classes.

    Args:
        array: integers, (N,) or (N, 1).
        where: file and key, for messages.
        count: number of images.
        classes: number of classes, where it is known.
    """
    if array.dtype.kind not in "iu":
        raise InputError(f"{where}: labels must be integers, got {array.dtype}")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InputError(f"{where}: labels must have shape (N,), got {array.shape}")
    if len(array) != count:
        raise InputError(f"{where}: {len(array)} labels for {count} images")
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low < 0:
        raise InputError(f"{where}: labels must not be negative, got {low}")
    if classes is not None and high >= classes:
        raise InputError(f"{where}: labels must be below {classes}, the number of classes, got {high}")
    if high > np.iinfo(np.int64).max:  # of uint64, and negative as int64
        raise InputError(f"{where}: labels must number the classes from 0, got {high}")
    return torch.from_numpy(array.astype(np.int64))


def read_npz(path: Path, keys: Collection[str], required: str | None = None) -> dict[str, Array]:
    """Return those of ``keys`` that the file holds; ``required`` must be one. Pickled objects are refused.

    An array of at least ``MAPPED_BYTES`` that is stored uncompressed (as ``np.savez`` does), in rows, as uint8 or
    float32, is mapped: an ``np.memmap`` that can't be written to, read from the file when it is looked at, so that
    it may be larger than memory. The archive's checksum of such an array is not checked, and the file must stay as
    it is while the array is in use. Every other array is loaded.

    Args:
        path: the file.
        keys: of the arrays that are wanted.
        required: a key that must be there.
    """
    try:
        # Opened here, because numpy leaves a file that is no archive open.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            names = list(file.files)
            arrays: dict[str, Array] = {}
            for key in keys:
                if key in names:
                    mapped = _map_member(raw, file.zip, key)
                    arrays[key] = file[key] if mapped is None else mapped
    except Exception as error:  # zipfile, zlib and numpy each have their own
        raise InputError(f"{path}: cannot be read as an .npz file (damaged, cut short, or not one)") from error
    if required is not None and required not in arrays:
        raise InputError(f"{path}: no key '{required}' (found: {', '.join(names) or 'nothing'})")
    return arrays


def _map_member(raw: BinaryIO, archive: zipfile.ZipFile, key: str) -> Array | None:
    """Return an array mapped where it lies in the archive, or None where it has to be loaded."""
    name = f"{key}.npy"
    if name not in archive.namelist():
        return None
    member = archive.getinfo(name)
    if member.compress_type != zipfile.ZIP_STORED or member.file_size < MAPPED_BYTES:
        return None
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in readers:
            return None
        shape, by_column, dtype = readers[version](file)
        header = file.tell()
    if by_column or dtype not in (np.uint8, np.float32) or min(shape, default=0) < 1:
        return None
    if header + math.prod(shape) * dtype.itemsize != member.file_size:
        return None
    # The lengths of the name and of the extra field stand here; the archive's directory may have others.
    raw.seek(member.header_offset + 26)
    start = member.header_offset + 30 + sum(struct.unpack("<HH", raw.read(4)))
    # Read-only: Linux refuses a writable private map that is larger than memory.
    return np.memmap(raw, dtype, "r", start + header, shape)


def read_npy(path: Path) -> Array:
    """Return the array of an .npy file. Pickled objects are refused."""
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:
        raise InputError(f"{path}: cannot be read as an .npy file ({error or type(error).__name__})") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers, text and numpy arrays, and refuses every other class."""

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file, encoding="bytes")
        self._path = path
        reconstruct = np.empty(0).__reduce__()[0]
        self._allowed = {
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): codecs.encode,
        }

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            raise InputError(f"{self._path}: the pickle asks for '{module_name}.{global_name}', which is not allowed: "
                             "expected numpy arrays, lists and text only") from None  # fmt: skip


def read_pickle(path: Path) -> Mapping[bytes, Any]:
    """Return the dictionary in a CIFAR pickle, keys as bytes; only an allow-list of classes is ever built."""
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(path, file).load()
    except InputError:
        raise
    except Exception as error:  # a broken pickle can raise nearly anything
        raise InputError(f"{path}: cannot be read as a CIFAR pickle ({error or type(error).__name__})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a dictionary, got {type(content).__name__}")
    return content


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the uint8 array of an idx file, plain or gzipped, which must have that many dimensions.

    Args:
        path: the file.
        dimensions: how many there must be.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except Exception as error:  # gzip, zlib and the end of the file each have their own
        raise InputError(f"{path}: cannot be read as an idx file ({error})") from error
    magic, start = 0x0800 + dimensions, 4 + 4 * dimensions
    if len(data) < start:
        raise InputError(f"{path}: truncated idx file: {len(data)} bytes, shorter than its header")
    actual, *shape = struct.unpack(f">{1 + dimensions}I", data[:start])
    if actual != magic:
        raise InputError(f"{path}: expected an idx file with magic number {magic}, got {actual}")
    if len(data) - start != math.prod(shape):
        raise InputError(f"{path}: truncated or overlong idx file: {math.prod(shape)} bytes expected for shape "
                         f"{tuple(shape)}, got {len(data) - start}")  # fmt: skip
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_mat(path: Path, keys: Collection[str]) -> dict[str, Array]:
    """Return the named arrays of a MATLAB file, version 5 to 7.2.

    Args:
        path: the file.
        keys: of the arrays.
    """
    from scipy.io import loadmat

    try:
        arrays: dict[str, Array] = loadmat(path, variable_names=list(keys))
    except NotImplementedError as error:
        raise InputError(f"{path}: MATLAB 7.3 (HDF5) files are not read; save it again in MATLAB or Octave with "
                         "the option -v7") from error  # fmt: skip
    except Exception as error:  # a corrupt file can raise nearly anything
        raise InputError(f"{path}: cannot be read as a .mat file ({error or type(error).__name__})") from error
    for key in keys:
        if key not in arrays:
            raise InputError(f"{path}: no variable '{key}'")
    return arrays
