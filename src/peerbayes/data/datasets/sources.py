"""What readers of data sets hand over, and the readers of known data sets by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from peerbayes.errors import InputError

if TYPE_CHECKING:
    from peerbayes.data.items import Stored

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
_OF_A_SPLIT = re.compile(r"[ _-](set|split|data|dataset|images|imgs)$")  # what may follow such a name
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
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
        stand_in: name of the validation split that is the test split, since there is no other; None otherwise.
    """

    train: Stored | None
    test: Stored | None
    validation: Stored | None = None
    classes: int = 0
    class_names: tuple[str, ...] | None = None
    stats: Stats | None = None
    soft_labels: Tensor | None = None
    notes: tuple[str, ...] = ()
    stand_in: str | None = None


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts with their labels.

    Args:
        texts: N texts.
        labels: int64 (N,), or None.
    """

    texts: Sequence[str]
    labels: Tensor | None

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, index: Tensor) -> Texts:
        """Return the texts at ``index``, in that order."""
        chosen = [self.texts[i] for i in index.tolist()]
        return Texts(chosen, None if self.labels is None else self.labels[index])


@dataclass(frozen=True, eq=False)
class Corpus:
    """What a reader found: the splits as stored; see `Source`."""

    train: Texts | None
    test: Texts | None
    validation: Texts | None = None
    classes: int = 0
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def split_called(name: str) -> str | None:
    """Return the split that a name stands for, such as ``train_set`` for ``train``; None where it is another name.

    Args:
        name: of a folder, or in a column.

    Example:
        >>> split_called("Val"), split_called("test-images"), split_called("bus")
        ('validation', 'test', None)
    """
    stem = _OF_A_SPLIT.sub("", name.strip().lower())
    return next((part for part, names in SPLIT_NAMES.items() if stem in names), None)


Reader = Callable[[Path, bool], Source | Corpus]  # (root, whether the training split is wanted)
READERS: dict[str, Reader] = {}
R = TypeVar("R", bound=Reader)


def source(name: str) -> Callable[[R], R]:
    """Register a reader under a name."""

    def register(reader: R) -> R:
        READERS[name] = reader
        return reader

    return register


def data_root(root: Path | str | None = None) -> Path:
    """Return the folder of the data: the argument, else ``PEERBAYES_DATA``, else ``~/.cache/peerbayes/data``.

    Example:
        >>> from peerbayes.data import data_root
        >>> data_root("sets").name
        'sets'
    """
    return Path(root or os.environ.get("PEERBAYES_DATA") or "~/.cache/peerbayes/data").expanduser()


class _Found(Exception):
    """A data set is there, and was only to be found."""

    def __init__(self, path: Path) -> None:
        self.path = path


_ONLY_FIND: ContextVar[bool] = ContextVar("only_find", default=False)


def whereabouts(name: str, root: Path) -> Path | None:
    """Return where a known data set lies, without reading it; None for one that comes with a dependency.

    Args:
        name: of the data set.
        root: data root.

    Raises:
        InputError: it is not there; the sentence says where it was looked for, and what to get.
    """
    token = _ONLY_FIND.set(True)
    try:
        READERS[name](root, False)
    except _Found as there:
        return there.path
    finally:
        _ONLY_FIND.reset(token)
    return None


def find(root: Path, candidates: Sequence[str], archive: str) -> Path:
    """Return the first of the places below ``root`` that exists; where none does, say what to get.

    Args:
        root: data root.
        candidates: below it, in the order in which they are tried.
        archive: what to get where there is none.
    """
    for candidate in candidates:
        if (root / candidate).exists():
            if _ONLY_FIND.get():
                raise _Found(root / candidate)
            return root / candidate
    looked = ", ".join(str(root / candidate) for candidate in candidates)
    raise InputError(f"data set not found: looked for {looked}; get {archive} and put it there (archives unpacked), or "
                     "name another data root by --data-root (root in Python) or PEERBAYES_DATA")  # fmt: skip
