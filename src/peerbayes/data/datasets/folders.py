"""Folders of images: one folder a class, with or without train/val/test, and Tiny ImageNet's layout."""

from __future__ import annotations

import heapq
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from peerbayes.data.datasets.sources import EXTENSIONS, SPLIT_NAMES, Source, split_called
from peerbayes.data.splits import FolderSplit, natural_size
from peerbayes.errors import InputError, PeerbayesWarning

AT_ONCE = 1 << 16  # names of a folder that are held


def _folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def has_folders(folder: Path) -> bool:
    """Return whether there are sub-folders (hidden ones do not count)."""
    return bool(_folders(folder))


def split_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of splits by `SPLIT_NAMES`; without one that holds class folders they are classes themselves.

    Unlabelled images may lie in a split beside those that hold class folders. A name such as ``train_set`` is that of a
    split where the folder holds class folders, and no other one is called ``train``.
    """
    parts: dict[str, Path] = {}
    children = _folders(folder) if folder.is_dir() else []
    exact = {part for part, names in SPLIT_NAMES.items() if any(child.name.lower() in names for child in children)}
    for child in children:
        part = split_called(child.name)
        if part is None or (child.name.lower() not in SPLIT_NAMES[part] and (part in exact or not has_folders(child))):
            continue
        if part in parts:
            raise InputError(f"{folder}: '{parts[part].name}' and '{child.name}' could both be the {part} "
                             "split; leave one of them")  # fmt: skip
        parts[part] = child
    labelled = any(has_folders(child) or (child / "val_annotations.txt").is_file() for child in parts.values())
    return parts if labelled else {}


def walk_images(folder: str | Path) -> Iterator[str]:
    """Yield every image below ``folder``, sorted by path; hidden files and other extensions are passed over.

    Memory does not grow with their number: a folder of more than `AT_ONCE` is listed again for those that follow.
    """
    last = ""
    while True:
        try:
            with os.scandir(folder) as entries:
                names = heapq.nsmallest(AT_ONCE, (name for name in map(_sortable, entries) if name > last))
        except OSError:  # one that can't be opened
            return
        for name in names:
            path = os.path.join(folder, name.removesuffix("/"))
            if name.endswith("/"):
                yield from walk_images(path)
            else:
                yield path
        if len(names) < AT_ONCE:
            return
        last = names[-1]


def _sortable(entry: os.DirEntry[str]) -> str:
    """Return what sorts an entry of a folder as whole paths are, with a slash behind folders; nothing of others."""
    if entry.is_dir():
        return "" if entry.is_symlink() else f"{entry.name}/"
    return entry.name if entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith(".") else ""


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders, sorted; a class is numbered by its place."""
    children = _folders(folder)
    names = tuple(child.name for child in children)
    if len(names) == 1:
        _refuse_one_level_up(folder, children[0])
    elif names:
        _warn_of_splits_below(folder, children)
    if not names:
        tables = sorted(path.name for path in folder.glob("*.csv"))
        texts = f"; texts go by train.csv and test.csv, or one by one: --data {folder / tables[0]}" if tables else ""
        raise InputError(f"{folder}: expected one sub-folder a class, found none{texts}")
    return names


def _refuse_one_level_up(folder: Path, only: Path) -> None:
    """Refuse a folder whose only sub-folder holds those of classes or splits."""
    inner = only
    while len(below := _folders(inner)) == 1:
        inner = below[0]
    if below:
        some = ", ".join(f"'{child.name}'" for child in below[:3]) + (", ..." if len(below) > 3 else "")
        raise InputError(f"{folder}: expected one sub-folder a class, found '{only.name}' alone; if {some} in it are "
                         f"the classes or splits, give {inner}")  # fmt: skip


def _warn_of_splits_below(folder: Path, classes: Sequence[Path]) -> None:
    """Tell that every class folder holds folders that are called as splits are: their images are mixed."""

    def splits(class_folder: Path) -> set[str]:
        return {child.name for child in _folders(class_folder) if split_called(child.name)}

    shared = splits(classes[0])
    if len(shared) > 1 and all(splits(class_folder) == shared for class_folder in classes[1:]):
        first, second = sorted(shared)[:2]
        message = (f"{folder}: every class folder holds '{first}' and '{second}', whose images are mixed; expected "
                   f"'{first}' and '{second}' at the top, with the class folders in each")  # fmt: skip
        warnings.warn(message, PeerbayesWarning, stacklevel=2)


def read_classes(folder: Path, classes: Sequence[str], size: int | None = None) -> FolderSplit:
    """Return the images of ``folder/<class>/``, class by class; every sub-folder must be one of ``classes``.

    Args:
        folder: holds one folder a class.
        classes: the names, in the order of their numbers.
        size: side of the images; by default :func:`natural_size` of the first.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    files: list[str] = []
    labels: list[int] = []
    present = class_names(folder)
    for name in present:
        if name not in numbers:
            raise InputError(f"{folder / name}: class '{name}' is not in the training split")
        of_class = list(walk_images(folder / name))
        if not of_class:
            raise InputError(f"{folder / name}: class folder without images ({', '.join(EXTENSIONS)})")
        files += of_class
        labels += [numbers[name]] * len(of_class)
    absent = sorted(set(classes).difference(present))
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        warnings.warn(f"{folder}: has no folder of class '{absent[0]}'{more}", PeerbayesWarning, stacklevel=2)
    return FolderSplit(files, torch.tensor(labels, dtype=torch.int64), size or natural_size(files))


def read_annotated(folder: Path, classes: Sequence[str], size: int) -> FolderSplit:
    """Return Tiny ImageNet's validation images: ``images/`` labelled by the lines of ``val_annotations.txt``.

    Args:
        folder: of the split.
        classes: names of the class folders.
        size: side of the images.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    listing = folder / "val_annotations.txt"
    present = set(os.listdir(folder / "images")) if (folder / "images").is_dir() else set()
    labelled: list[tuple[str, int]] = []
    for number, line in enumerate(listing.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0].strip()
        if label not in numbers:
            raise InputError(f"{listing}, line {number}: class '{label}' is not in the training split")
        if name not in present:
            raise InputError(f"{listing}, line {number}: no image '{name}' in {folder / 'images'}")
        labelled.append((str(folder / "images" / name), numbers[label]))
    if not labelled:
        raise InputError(f"{listing}: expected one line an image, found none")
    labelled.sort()
    labels = torch.tensor([label for _, label in labelled], dtype=torch.int64)
    return FolderSplit([file for file, _ in labelled], labels, size)


def read_listed(folder: Path, listing: Path, classes: Sequence[str]) -> FolderSplit:
    """Return the images that the lines ``class/file`` of a listing name, in its order, as DTD gives its splits.

    Args:
        folder: of the images.
        listing: the file of lines.
        classes: names of the class folders.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    files: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(listing.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        name = line.strip().partition("/")[0]
        if name not in numbers:
            raise InputError(f"{listing}, line {number}: '{name}' is not one of the class folders in {folder}")
        if not (folder / line.strip()).is_file():
            raise InputError(f"{listing}, line {number}: no image '{line.strip()}' in {folder}")
        files.append(str(folder / line.strip()))
        labels.append(numbers[name])
    if not files:
        raise InputError(f"{listing}: expected one line an image, found none")
    return FolderSplit(files, torch.tensor(labels, dtype=torch.int64), natural_size(files))


def count_images(folder: Path) -> int:
    """Return how many images there are below ``folder``; refuse a folder without any."""
    count = sum(1 for _ in walk_images(folder))
    if not count:
        raise InputError(f"{folder}: expected images ({', '.join(EXTENSIONS)}), found none")
    return count


def read_images(folder: Path) -> FolderSplit:
    """Return all images below ``folder`` without labels."""
    count_images(folder)
    files = list(walk_images(folder))
    return FolderSplit(files, None, natural_size(files))


def read_folder(path: Path, want_train: bool) -> Source:
    """Read ``train/<class>/``, and ``val`` and ``test`` beside it, or ``<class>/`` alone, in sorted order.

    The test split is ``test`` where it has class folders, else ``val``; where both have them, ``val`` is the
    validation split. In Tiny ImageNet's layout (``val/val_annotations.txt``) it is ``val``. Splits may have any of the
    names in `SPLIT_NAMES`.

    Args:
        path: the folder.
        want_train: whether the training split is wanted.
    """
    parts = split_folders(path)
    train, val, test = (parts.get(part) for part in ("train", "validation", "test"))
    tiny = val is not None and (val / "val_annotations.txt").is_file()
    if val is not None and test is not None and (tiny or not has_folders(test)):
        test = None  # published without labels
    if not want_train:
        return Source(None, read_images(test or val or path))
    if train is None:
        if val is not None or test is not None:
            raise InputError(f"{path}: expected a folder 'train' beside 'val' or 'test'")
        classes = class_names(path)
        return Source(read_classes(path, classes), None, classes=len(classes), class_names=classes)
    classes = class_names(train)
    split = read_classes(train, classes)
    read = read_annotated if tiny else read_classes
    held_out = [read(folder, classes, split.size) for folder in (test, val) if folder is not None]
    return Source(
        split,
        held_out[0] if held_out else None,
        held_out[1] if len(held_out) > 1 else None,
        classes=len(classes),
        class_names=classes,
        stand_in=val.name if val is not None and test is None else None,
    )
