"""Data sets given as Python objects: those of torch, torchvision, Hugging Face and pandas, arrays, and lists.

What an object holds is read once: images of one shape that take at most `MAPPED_BYTES` become an array, as if they had
been given as one; more are read again when a batch wants them. No library is imported for an object of its own.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from peerbayes.data.datasets import formats
from peerbayes.data.datasets.arrays import array_split, count_classes
from peerbayes.data.datasets.corpora import assemble
from peerbayes.data.datasets.numbering import in_order, whole_number
from peerbayes.data.datasets.sources import SPLIT_NAMES, Corpus, Source, Texts
from peerbayes.data.datasets.text_rows import LABELS, SPLIT, are_images, by_split, image_path, table_items
from peerbayes.data.items import ItemSplit, Stored, is_grey, pixels
from peerbayes.data.splits import ArraySplit, FolderSplit, natural_size, usual_side
from peerbayes.errors import InputError, PeerbayesWarning, nearest, reason

IMAGES = ("image", "img", "images", "pixel_values", "file", "path")
LOOKED_AT = 8  # items that are read twice, to see whether they change
EXPECTED = (
    "a name, a path, a Dataset, a torch data set or loader, (X, y), a dictionary with 'train' and 'test', a list of "
    "(image, label), a pandas DataFrame or a Hugging Face data set"
)


@dataclass(frozen=True, eq=False)
class _Part:
    """One split of an object, with its labels as they are given."""

    where: str
    inputs: Stored | Sequence[str]
    labels: Any
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def read_object(given: Any, names: Sequence[str] | None = None, size: int | None = None) -> Source | Corpus:
    """Return what an object holds, split as it is.

    Args:
        given: one of `EXPECTED`.
        names: the classes in order, where they are known.
        size: side of images of different sizes; by default the shortest side of the first, at most 224, or the
            usual one where the first image is much smaller.
    """
    parts = splits_of(given)
    if any(map(_is_frame, parts.values())) and not any(map(_picture_columns, parts.values())):
        return _of_frames(parts, names)
    read_parts = {name: _part(part, name, size) for name, part in parts.items()}
    unlabelled = [name for name, part in read_parts.items() if name != "train" and _without_labels(part.labels)]
    notes = [f"the {name} split has no labels and is left out" for name in unlabelled]
    train = read_parts["train"]
    notes += itertools.chain.from_iterable(part.notes for part in read_parts.values())
    names = tuple(map(str, names)) if names is not None else train.class_names or _names_among(train)
    first = _labelled(train, names, len(names) if names else None)
    classes = len(names) if names else count_classes(first.labels, "train_labels", _items(train))
    splits = {
        name: first if part is train else _labelled(part, names, classes)
        for name, part in read_parts.items()
        if name not in unlabelled
    }
    kinds = {isinstance(split, Texts) for split in splits.values()}
    if len(kinds) > 1:
        raise InputError("the splits of the data hold images and texts, expected one of them")
    other = (splits.get("test"), splits.get("validation"))
    kind: Any = Corpus if kinds == {True} else Source
    whole: Source | Corpus = kind(splits["train"], *other, classes=classes, class_names=names, notes=tuple(notes))
    return whole


def splits_of(given: Any) -> dict[str, Any]:
    """Return the splits of an object by ``train``, ``validation`` and ``test``; an object that is one is ``train``."""
    if not isinstance(given, Mapping):
        return _rows_by_split(given) if _is_frame(given) else {"train": given}
    foreign = hasattr(given, "column_names")  # Hugging Face's may hold more than is learnt
    parts: dict[str, Any] = {}
    for key, value in given.items():
        part = next((part for part, names in SPLIT_NAMES.items() if str(key).lower() in names), None)
        if part is None and not foreign:
            accepted = [name for names in SPLIT_NAMES.values() for name in names]
            raise InputError(f"data: '{key}' is no split{nearest(str(key), accepted)}")
        if part is None:
            message = f"data: the split '{key}' is left out, expected 'train', 'validation' and 'test'"
            warnings.warn(message, PeerbayesWarning, stacklevel=2)
        elif part in parts:
            raise InputError(f"data: two splits could both be '{part}'; leave one of them")
        elif value is not None:
            parts[part] = value
    if "train" not in parts:
        raise InputError(f"data: expected a split 'train', found {', '.join(map(repr, given)) or 'nothing'}")
    return parts


def title_of(given: Any) -> str | None:
    """Return what an object calls itself; None where it has no name."""
    inner = splits_of(given)["train"] if isinstance(given, Mapping) else given
    inner = _unwrapped(inner)
    about = getattr(inner, "info", None)
    name = getattr(about, "dataset_name", None) or getattr(about, "builder_name", None)
    if not isinstance(name, str):
        plain = isinstance(inner, list | tuple | np.ndarray | Tensor) or _is_frame(inner) or is_columns(inner)
        name = None if plain else type(inner).__name__
    return name or None


def _unwrapped(given: Any) -> Any:
    while isinstance(given, DataLoader | Subset):
        given = given.dataset
    return given


# ---- kinds of objects ------------------------------------------------------------------------------------------------


def _is_frame(given: Any) -> bool:
    return hasattr(given, "iloc") and hasattr(given, "columns") and hasattr(given, "itertuples")


def is_columns(given: Any) -> bool:
    """Return whether an object is a data set of Hugging Face, by what it has.

    Args:
        given: any object.
    """
    return all(hasattr(given, name) for name in ("features", "column_names", "__getitem__", "__len__"))


def _part(given: Any, where: str, size: int | None) -> _Part:
    if isinstance(given, DataLoader):
        given = given.dataset
    if _is_frame(given):
        return _of_pictures(given, where, size)
    iterable = isinstance(given, IterableDataset) or not (hasattr(given, "__len__") and hasattr(given, "__getitem__"))
    if iterable and (isinstance(given, IterableDataset) or hasattr(given, "__iter__")):
        raise InputError(f"{where}: a {type(given).__name__} can only be read from its beginning, expected a data set "
                         "with a length, whose items are read by number")  # fmt: skip
    if iterable or isinstance(given, str | bytes | Mapping | np.ndarray | Tensor):
        raise InputError(f"{where} is of type {type(given).__name__}, expected {EXPECTED}")
    if isinstance(given, tuple) and len(given) == 2:
        return _of_pair(*given, where, size)
    if not len(given):
        raise InputError(f"{where}: the {type(given).__name__} is empty, expected images or texts with labels")
    if is_columns(given):
        return _of_columns(given, where, size)
    files = _files_of(given)
    if files is not None:
        return _Part(where, *files, class_names=_class_names(given))
    return _of_items(len(given), _reader(given, where), where, size, class_names=_class_names(given))


def _of_pair(inputs: Any, labels: Any, where: str, size: int | None) -> _Part:
    """Return the split of ``(X, y)``."""
    if not hasattr(labels, "__len__") or isinstance(labels, str):
        raise InputError(f"{where}: (X, y) with y of type {type(labels).__name__}, expected one label an item")
    if isinstance(inputs, np.ndarray | Tensor):
        array = inputs.numpy(force=True) if isinstance(inputs, Tensor) else inputs
        if array.dtype.kind not in "USO":
            return _Part(where, array_split(array, None, where), labels)
        inputs = array.tolist()
    if _is_frame(inputs):
        raise InputError(f"{where}: X is a table of {len(inputs.columns)} columns, expected images or texts")
    if not hasattr(inputs, "__len__") or isinstance(inputs, str | Mapping):
        raise InputError(f"{where}: X is of type {type(inputs).__name__}, expected images or texts")
    inputs = list(inputs)
    if not inputs:
        raise InputError(f"{where}: X is empty, expected images or texts with labels")
    if len(inputs) != len(labels):
        raise InputError(f"{where}: {len(labels)} labels for {len(inputs)} items")
    labels = labels if isinstance(labels, np.ndarray | Tensor) else list(labels)
    return _of_items(len(inputs), lambda number: (inputs[number], None), where, size, labels)


def _of_columns(given: Any, where: str, size: int | None) -> _Part:
    """Return the split of a Hugging Face data set: its label column, and its images or texts."""
    names, features = list(given.column_names), given.features
    classed = [name for name in names if hasattr(features[name], "names")]
    label = next((name for name in names if name.lower().replace("_", " ") in LABELS), None)
    if label is None and len(classed) != 1:
        has = ", ".join(map(repr, names))
        raise InputError(f"{where}: no column is the label (columns: {has}); rename the one to learn to 'label'")
    label = label or classed[0]
    class_names = getattr(features[label], "names", None)
    labels = [value.item() if isinstance(value, Tensor | np.generic) else value for value in given[label]]
    more = {"class_names": None if class_names is None else tuple(class_names)}
    inputs = column_inputs(given, where, label)
    return _of_items(len(given), lambda number: (inputs[number], None), where, size, labels, **more)


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a data set, read row by row.

    Args:
        given: the data set.
        name: of the column.
    """

    given: Any
    name: str

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, number: int) -> Any:
        return self.given[number][self.name]


def column_inputs(given: Any, where: str, label: str | None = None) -> Column | list[str]:
    """Return the images of a Hugging Face data set, read when they are asked for, or else its texts.

    Args:
        given: the data set; it may have no labels.
        where: begins messages.
        label: the column of labels; by default those that are called so or hold classes.
    """
    names, features = list(given.column_names), given.features
    first = given[0]
    called = [name for name in names if label is None and name.lower().replace("_", " ") in LABELS]
    candidates = [name for name in names if name not in (label, *called) and not hasattr(features[name], "names")]
    image = next((name for name in candidates if _is_image(first[name])), None)
    if image is not None:
        return Column(given, image)
    texts = ["text"] if "text" in candidates else [name for name in candidates if isinstance(first[name], str)]
    if not texts:
        has = ", ".join(map(repr, names))
        raise InputError(f"{where}: no column holds images or texts (columns: {has})")
    return [" ".join(map(str, row)) for row in zip(*(given[name] for name in texts), strict=True)]


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image) or np.ndim(value) >= 2


class _TableRows:
    """Some rows of a pandas table without one column: of it, what is read here."""

    iloc = None

    def __init__(self, frame: Any, numbers: Sequence[int], without: int) -> None:
        self.columns = [name for index, name in enumerate(frame.columns) if index != without]
        rows = list(frame.itertuples(index=False, name=None))
        self._rows = [(*rows[number][:without], *rows[number][without + 1 :]) for number in numbers]

    def __len__(self) -> int:
        return len(self._rows)

    def itertuples(self, **_: Any) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)


def _rows_by_split(frame: Any) -> dict[str, Any]:
    """Return the splits that a column of a pandas table tells; without one all is ``train``."""
    index = next((index for index, name in enumerate(frame.columns) if str(name).strip().lower() == SPLIT), None)
    if index is None or not len(frame):
        return {"train": frame}
    values = [str(row[index]) for row in frame.itertuples(index=False, name=None)]
    parts = by_split("train (a DataFrame)", values) or {"train": range(len(values))}
    return {part: _TableRows(frame, rows, index) for part, rows in parts.items()}


def _picture_columns(given: Any) -> list[int]:
    """Return the places of the columns of a pandas table that hold PIL images or arrays of images."""
    rows = given.itertuples(index=False, name=None) if _is_frame(given) else ()
    return sorted({index for row in rows for index, cell in enumerate(row) if _is_picture(cell)})


def _is_picture(cell: Any) -> bool:
    return isinstance(cell, Image.Image) or (isinstance(cell, np.ndarray | Tensor) and cell.ndim >= 2)


def _of_pictures(frame: Any, where: str, size: int | None) -> _Part:
    """Return the split of a pandas table of images, as a list of the same images and labels is read."""
    names = [str(name) for name in frame.columns]
    label = next((index for index, name in enumerate(names) if name.lower().replace("_", " ") in LABELS), None)
    pictures = [index for index in _picture_columns(frame) if index != label]
    if label is None or len(pictures) != 1:
        has = ", ".join(map(repr, names))
        raise InputError(f"{where}: expected a column 'label' and one column of images (columns: {has})")
    rows = list(frame.itertuples(index=False, name=None))
    labels = [row[label] for row in rows]
    return _of_items(len(rows), lambda number: (rows[number][pictures[0]], None), where, size, labels)


def _of_frames(parts: Mapping[str, Any], names: Sequence[str] | None) -> Source | Corpus:
    """Return what pandas tables hold, as the same rows in CSV files would be read."""
    items = {}
    for part, frame in parts.items():
        if not _is_frame(frame):
            raise InputError(f"{part} is of type {type(frame).__name__}, expected a DataFrame as other splits are")
        if not len(frame):
            raise InputError(f"{part}: the DataFrame is empty, expected images or texts with labels")
        header = [str(name) for name in frame.columns]
        where = f"{part} (a DataFrame)"
        cells = (
            [_cell(cell, f"{where}, row {number}: column '{name}'") for name, cell in zip(header, row, strict=True)]
            for number, row in enumerate(frame.itertuples(index=False, name=None), start=1)
        )
        items[part] = table_items(where, enumerate(itertools.chain([header], cells)), Path())
    chosen = None if names is None else tuple(map(str, names))
    return assemble(items["train"], items.get("test"), items.get("validation"), chosen, None)


def _cell(value: Any, where: str) -> str:
    """Return a cell of a pandas table as a CSV file has it; refuse what is no text, path or number."""
    if isinstance(value, str):
        return value
    if hasattr(value, "__len__") or isinstance(value, Image.Image):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise InputError(f"{where} holds a {type(value).__name__}{shape}, expected a text, a path or a number, or PIL "
                         "images in the whole column")  # fmt: skip
    missing = value is None or type(value).__name__ == "NAType"  # pandas.NA compares to nothing
    return "" if missing or value != value else str(value)


def _files_of(given: Any) -> tuple[FolderSplit, list[int]] | None:
    """Return the files of a torchvision ``ImageFolder`` without transforms, which need not go through Python."""
    transforms = (getattr(given, name, None) for name in ("transform", "target_transform", "transforms"))
    if not type(given).__module__.startswith("torchvision.datasets.folder") or any(transforms):
        return None
    loader = getattr(given, "loader", None)
    if getattr(loader, "__name__", "") != "default_loader":
        return None
    files = [str(file) for file, _ in given.samples]
    return FolderSplit(files, None, natural_size(files)), [label for _, label in given.samples]


def _class_names(given: Any) -> tuple[str, ...] | None:
    names = getattr(_unwrapped(given), "classes", None)
    listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if listed and names else None


def _reader(given: Any, where: str) -> Callable[[int], tuple[Any, Any]]:
    """Return a function from a number to the input and label of that item."""

    def read(number: int) -> tuple[Any, Any]:
        try:
            item = given[number]
        except Exception as error:  # an object of the user's may raise anything
            raise InputError(f"{where}: item {number} can't be read: {reason(error)}") from error
        if isinstance(item, Mapping):
            label = next((name for name in item if str(name).lower().replace("_", " ") in LABELS), None)
            inputs = next((name for name in item if str(name).lower() in (*IMAGES, "text")), None)
            if label is not None and inputs is not None:
                return item[inputs], item[label]
        elif isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        size = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        splits = "; splits are given by name, {'train': ..., 'test': ...}" * isinstance(given, tuple | list)
        raise InputError(f"{where}: item {number} is a {type(item).__name__}{size}, expected (image, label) or "
                         f"(text, label){splits}")  # fmt: skip

    return read


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _of_items(
    count: int,
    read: Callable[[int], tuple[Any, Any]],
    where: str,
    size: int | None,
    labels: Any = None,
    class_names: tuple[str, ...] | None = None,
) -> _Part:
    """Return the split of items that are read by number; with ``labels`` those of the items are not looked at."""
    first, _ = read(0)
    inputs: Stored | Sequence[str]
    notes: tuple[str, ...] = ()
    if isinstance(first, str | Path):
        inputs, item_labels = _strings(count, read, where)
    else:
        inputs, item_labels, notes = _images(count, read, where, size)
    return _Part(where, inputs, item_labels if labels is None else labels, class_names, notes)


def _strings(
    count: int, read: Callable[[int], tuple[Any, Any]], where: str
) -> tuple[FolderSplit | list[str], list[Any]]:
    pairs = [read(number) for number in range(count)]
    for number, (text, _) in enumerate(pairs):
        if not isinstance(text, str | Path):
            raise InputError(f"{where}: item {number} is a {type(text).__name__}, expected a text as item 0 is")
    texts, labels = [str(text) for text, _ in pairs], [label for _, label in pairs]
    if not isinstance(pairs[0][0], Path) and not are_images(texts, Path()):
        return texts, labels
    files = [image_path(text, Path()) for text in texts]
    for number, (text, file) in enumerate(zip(texts, files, strict=True)):
        if file is None or not os.path.isfile(file):
            raise InputError(f"{where}: item {number}: there is no image '{text}'")
    there = [file for file in files if file is not None]
    return FolderSplit(there, None, natural_size(there)), labels


def _images(
    count: int, read: Callable[[int], tuple[Any, Any]], where: str, size: int | None
) -> tuple[ArraySplit | ItemSplit, list[Any], tuple[str, ...]]:
    """Read every image once; return them, in memory if they are not too many, and their labels."""
    labels, grey, pictures, kept = list[Any](), True, True, list[Tensor]()
    first: Tensor | None = None
    uniform, sizes, largest = True, list[tuple[int, ...]](), 0
    for number in range(count):
        image, label = read(number)
        tensor = pixels(image, f"{where}: item {number}", grey=is_grey(image))
        labels.append(label)
        first = tensor if first is None else first
        grey, pictures = grey and is_grey(image), pictures and isinstance(image, Image.Image)
        uniform = uniform and (tensor.shape, tensor.dtype) == (first.shape, first.dtype)
        if not uniform and not pictures:
            raise InputError(f"{where}: item {number} is an image of shape {tuple(tensor.shape)} and {tensor.dtype}, "
                             f"expected {tuple(first.shape)} and {first.dtype} as item 0 has")  # fmt: skip
        sizes.append(tuple(tensor.shape[1:]))
        largest += tensor.numel() * tensor.element_size()
        if number < LOOKED_AT or (uniform and largest <= formats.MAPPED_BYTES):
            kept.append(tensor)
        elif len(kept) > LOOKED_AT:
            del kept[LOOKED_AT:]  # too many to be kept
    assert first is not None
    _warn_of_change(read, kept[:LOOKED_AT], where)
    notes: tuple[str, ...] = ()
    if uniform and len(kept) == count:
        return ArraySplit(torch.stack(kept)), labels, notes
    channels = first.shape[0] if uniform else (1 if grey else 3)
    shape, side = (channels, *first.shape[1:]), None
    if len(set(sizes)) > 1:
        side = size or usual_side([min(sides) for sides in sizes])
        shape = (channels, side, side)
        notes = (f"{where}: images have different sizes: the shortest side is made {side} pixels, the centre cut out",)
    kept.clear()
    split = ItemSplit(lambda number: read(number)[0], None, shape, first.dtype, torch.arange(count), side)
    if count * torch.Size(shape).numel() * first.element_size() <= formats.MAPPED_BYTES:
        return ArraySplit(split.batch(split.numbers, torch.device("cpu"))[0]), labels, notes
    return split, labels, notes


def _warn_of_change(read: Callable[[int], tuple[Any, Any]], kept: Sequence[Tensor], where: str) -> None:
    """Tell that an object hands out other images every time, as one with random transforms does."""
    for number, before in enumerate(kept):
        image, _ = read(number)
        if not torch.equal(pixels(image, f"{where}: item {number}", grey=is_grey(image)), before):
            message = (f"{where}: item {number} is another image each time it is read; leave random transforms out of "
                       "the data set, and name augmentations in data.augment")  # fmt: skip
            warnings.warn(message, PeerbayesWarning, stacklevel=2)
            return


# ---- labels ----------------------------------------------------------------------------------------------------------


def _without_labels(labels: Any) -> bool:
    """Return whether all labels are -1, as those of published test splits may be."""
    return bool(len(labels)) and all(isinstance(label, int) and label == -1 for label in labels)


def _names_among(part: _Part) -> tuple[str, ...] | None:
    """Return the sorted names among labels, by value where all are numbers; None where no label is a text."""
    labels = list(_plain(part))
    return in_order({_name(label) for label in labels}) if any(isinstance(label, str) for label in labels) else None


def _name(label: str | int) -> str:
    """Return the name of a class: a whole number without decimals, however the label is written."""
    number = whole_number(label)
    return str(label) if number is None else str(number)


def _plain(part: _Part) -> Iterator[Any]:
    """Yield labels as texts or whole numbers."""
    array = part.labels.numpy(force=True) if isinstance(part.labels, Tensor) else part.labels
    for number, label in enumerate(array):
        single = isinstance(label, np.generic | Tensor | np.ndarray) and np.prod(label.shape) == 1
        value = label.item() if single else label
        if isinstance(value, float) and value.is_integer():  # as pandas writes a column that had gaps
            value = int(value)
        if not isinstance(value, int | str):
            shown = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise InputError(f"{part.where}: the label of item {number} is a {type(value).__name__} ({shown}), "
                             "expected a class number or a name")  # fmt: skip
        yield int(value) if isinstance(value, bool) else value


def _items(part: _Part) -> str:
    return "image" if isinstance(part.inputs, Stored) else "text"


def _labelled(part: _Part, names: tuple[str, ...] | None, classes: int | None) -> Any:
    """Return the split with its labels numbered."""
    count = len(part.inputs)
    if len(part.labels) != count:
        raise InputError(f"{part.where}_labels: {len(part.labels)} labels for {count} {_items(part)}s")
    labels = list(_plain(part))
    if any(isinstance(label, str) for label in labels):
        indices = {name: index for index, name in enumerate(names or ())}
        labels = [label if str(label) in indices else _name(label) for label in labels]
        for number, label in enumerate(labels):
            if str(label) not in indices:
                some = ", ".join((names or ())[:3]) + (", ..." if len(indices) > 3 else "")
                raise InputError(f"{part.where}: the label of item {number} is '{label}', expected one of the "
                                 f"{len(indices)} classes ({some})")  # fmt: skip
        labels = [indices[str(label)] for label in labels]
    numbers = formats.label_tensor(np.array(labels), f"{part.where}_labels", count, classes)
    if isinstance(part.inputs, Stored):
        return replace(part.inputs, labels=numbers)
    return Texts(part.inputs, numbers)
