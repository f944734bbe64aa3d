"""Write and read files that are whole or absent: safetensors with a digest, written atomically, never pickled."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from peerbayes.errors import InputError

# Of files whose tensors have a given order.
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.int16: "I16", torch.uint8: "U8"}


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old one or the new one, also after a power cut.

    Args:
        path: the file; its folder is made.
        data: the new content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # name the file that was asked for
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in ``folder`` durable (POSIX)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], first: int | None = None) -> None:
    """Write tensors and a JSON description to one safetensors file, atomically, with a digest of both.

    With ``first`` the tensors lie in the file in the order given, which must keep each at a multiple of its item size,
    and the first ones have a digest of their own: `read_first` reads them before the others have arrived.

    Args:
        path: the file.
        tensors: by name.
        about: the description, JSON-ready.
        first: number of tensors that come first.
    """
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        # Tensors with two names (tied buffers, say) are written twice: safetensors refuses shared memory. One number of
        # a longer row passes for contiguous, but has no bytes to look at.
        alone = tensor.data_ptr() not in seen and tensor.stride()[-1:] in ((), (1,))
        plain[name] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.data_ptr())
    text = json.dumps(about, sort_keys=True)
    metadata = {"digest": _digest(plain, text), "peerbayes": text}
    if first is None:
        write_bytes(path, _ordered(save(plain, metadata)))
    else:
        early = dict(itertools.islice(plain.items(), first))
        write_bytes(path, _laid_out(plain, metadata | {"first": f"{first} {_digest(early, text)}"}))


def describe(path: Path, **changes: Any) -> None:
    """Change entries of the description of a file that `write` wrote, atomically.

    Args:
        path: the file.
        changes: entries and their values; None takes one away.
    """
    tensors, metadata = _read_any(path)
    about = _check_about(path, tensors, metadata, metadata.get("digest"))
    about = {key: value for key, value in about.items() if key not in changes}
    about |= {key: value for key, value in changes.items() if value is not None}
    ordered = {name: tensors[name] for name in bytes_of(path)[1]}
    first = int(metadata["first"].split()[0]) if "first" in metadata else None
    write(path, ordered, about, first)


def _laid_out(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, offset = [], 0
    for name, tensor in tensors.items():
        assert offset % tensor.element_size() == 0, name
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        shape, ends = list(tensor.shape), [offset, offset + len(data)]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": ends}
        parts.append(data)
        offset = ends[1]
    return b"".join([_head(header), *parts])


def _head(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _ordered(data: bytes) -> bytes:
    # safetensors writes metadata in random order; equal contents must be equal bytes.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return b"".join([_head(header), memoryview(data)[end:]])


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write` wrote, and check it.

    Raises:
        InputError: the file is missing, truncated, changed, or not one of ours.
    """
    tensors, metadata = _read_any(path)
    return tensors, _check_about(path, tensors, metadata, metadata.get("digest"))


def read_first(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors that `write` put ``first``, of a file that may not have arrived any further.

    Raises:
        InputError: it has not arrived so far, is changed, or has no such tensors.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise InputError(f"{path}: the header is incomplete, or this is not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = {key: str(value) for key, value in header.pop("__metadata__").items()}
        count, digest = metadata["first"].split(" ")
        tensors = _early(data[8 + length :], dict(itertools.islice(header.items(), int(count))))
    except EOFError:
        raise InputError(f"{path}: incomplete: it ends before the tensors that come first do") from None
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError):
        raise InputError(f"{path}: has no first tensors that can be read by themselves") from None
    return tensors, _check_about(path, tensors, metadata, digest)


def _early(data: bytes, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a header says come first, one after the other."""
    tensors, offset, dtypes = {}, 0, {name: dtype for dtype, name in DTYPES.items()}
    for name, about in header.items():
        (begin, end), dtype = about["data_offsets"], dtypes[about["dtype"]]
        if begin != offset or end < begin:
            raise ValueError(name)
        if end > len(data):
            raise EOFError
        part = bytearray(data[begin:end])
        # frombuffer refuses empty buffers.
        plain = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        tensors[name], offset = plain.view(about["shape"]), end
    return tensors


def _check_about(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], digest: str | None) -> Any:
    """Return the description of tensors that are what a digest says."""
    if "peerbayes" not in metadata:
        raise InputError(f"{path}: not written by peerbayes (its header has no 'peerbayes' entry)")
    if digest != _digest(tensors, metadata["peerbayes"]):
        raise InputError(f"{path}: corrupt (its contents do not match the digest in its header)")
    try:
        about = json.loads(metadata["peerbayes"])
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise InputError(f"{path}: corrupt (the 'peerbayes' entry of its header is not a JSON object)")
    return about


def bytes_of(path: Path) -> tuple[int, dict[str, int]]:
    """Return the bytes of a file's header, and of each tensor in order, for a file that `read` can read."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    del header["__metadata__"]
    ends = {name: about["data_offsets"] for name, about in header.items()}
    return 8 + length, {name: end - start for name, (start, end) in sorted(ends.items(), key=lambda item: item[1])}


def read_state(path: Path) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Read a network's tensors by name, from a plain state dict or a posterior's means, after its description, if any.

    Of kinds that make their means of other tensors, these have to be made first: see `Posterior.load`.
    """
    tensors, metadata = _read_any(path)
    if "peerbayes" not in metadata:
        return None, tensors
    tensors, about = read(path)
    return about, tensors if about.get("kind") is None else plain_names(tensors)


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a posterior's mean network as a plain state dict: ``mean/a.weight`` becomes ``a.weight``."""
    parts = ((name.partition("/"), tensor) for name, tensor in state.items())
    return {name: tensor for (part, _, name), tensor in parts if name and part in {"mean", "rest", "network"}}


def _read_any(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error})") from None
