"""Rows of tables and text files: labels, and texts or paths of images, as they stand there, and where."""

from __future__ import annotations

import csv
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from peerbayes.data.datasets.sources import EXTENSIONS, SPLIT_NAMES, split_called
from peerbayes.errors import InputError, PeerbayesWarning

LABELS = ("label", "category", "class", "class index", "labels", "class name", "target", "sentiment", "intent")
_NUMBERING = ("", "index", "idx", "id", "unnamed: 0")  # columns that number the rows
SPLIT = "split"  # the column that says which split a row is of
_NAMING = ("image", "image id", "image name", "image file", "image path", "img", "img path", "file name", "filename",
           "file path", "filepath", "path")  # columns that can only name images  # fmt: skip
_LOOKED_AT = 100  # rows by which a column is one of paths, or is not

Row = tuple[int, list[str]]


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file that are not blank, with their numbers from 1."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.reader(file, strict=True), start=1):
                if row:
                    yield number, row
    except UnicodeDecodeError:
        refuse_encoding(path)
    except csv.Error as error:
        raise InputError(f"{path}, row {number + 1}: cannot be read as CSV ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not number:
        raise InputError(f"{path}: the file is empty, expected one row a text")


def refuse_encoding(path: Path) -> NoReturn:
    # The decoder reads ahead in blocks: the line is looked for again.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                wrong = line[error.start]
                raise InputError(f"{path}, line {number}: expected UTF-8, found the byte 0x{wrong:02x}") from None
    raise InputError(f"{path}: expected UTF-8")


@dataclass(frozen=True)
class _Columns:
    label: int | None
    inputs: tuple[int, ...]
    width: int
    numbered: bool = False  # without a header: class numbers come first
    headed: bool = True
    split: int | None = None
    naming: tuple[int, ...] = ()  # of the inputs, those that are called as paths of images are

    @classmethod
    def of(cls, where: str, row: Sequence[str], labelled: bool, base: Path) -> _Columns:
        """Return what the first row says; unless inputs have to be ``labelled``, a column of them will do."""
        if row[0].strip().isdecimal():
            if len(row) < 2:
                raise InputError(f"{where}, row 1: expected a class number and a text, found one column")
            return cls(0, tuple(range(1, len(row))), len(row), numbered=True, headed=False)
        header = [name.strip().lower().replace("_", " ") for name in row]
        named = not {"text", *LABELS, *_NAMING}.isdisjoint(header)  # such a name may happen to be that of a file
        paths = [index for index, cell in enumerate(row) if (is_image_name(cell) if named else image_path(cell, base))]
        if len(paths) == 1 and len(row) == 1 + labelled:  # no header is the path of an image
            return cls(1 - paths[0] if labelled else None, (paths[0],), len(row), headed=False)
        label = next((header.index(name) for name in LABELS if name in header), None)
        if label is None and (labelled or "text" not in header):
            raise InputError(f"{where}, row 1: expected a class number, or a header with a column "
                             f"{', '.join(map(repr, LABELS[:-1]))} or {LABELS[-1]!r}; "
                             f"found {', '.join(map(repr, row))[:120]}")  # fmt: skip
        candidates = [
            index for index, name in enumerate(header) if index != label and name not in _NUMBERING and name != SPLIT
        ]
        if not candidates:
            raise InputError(f"{where}, row 1: expected a column 'text' beside {row[0]!r}, or one of image paths")
        inputs = (header.index("text"),) if "text" in header else tuple(candidates)
        naming = tuple(index for index in inputs if header[index] in _NAMING)
        split = header.index(SPLIT) if SPLIT in header else None
        return cls(label, inputs, len(row), split=split, naming=naming)

    def of_paths(self, where: str, rows: Sequence[Row], base: Path) -> int | None:
        """Return the column that holds paths of images; None where the rows hold texts."""
        for index in self.inputs:
            if are_images([row[index] for _, row in rows], base):
                return index
        for index in self.naming:
            number, row = rows[0]
            raise InputError(f"{where}, row {number}: there is no image '{row[index]}' (or '{row[index].strip()}.jpg', "
                             f"say), here or in {base}; a column of texts is called 'text'")  # fmt: skip
        return None


def is_image_name(cell: str) -> bool:
    """Return whether a cell ends as the names of images do."""
    return cell.strip().lower().endswith(EXTENSIONS)


def are_images(cells: Sequence[str], base: Path) -> bool:
    """Return whether cells are paths of images rather than texts, one of which may happen to be the name of a file.

    Paths all end as those of images, or one that does is a file, or most of the first ones are files.

    Args:
        cells: of one column.
        base: folder that paths begin at.
    """
    named = [cell for cell in cells if is_image_name(cell)]
    if len(named) == len(cells) or any(os.path.isfile(image_path(cell, base) or "") for cell in named):
        return bool(cells)
    ahead = cells[:_LOOKED_AT]
    return 2 * sum(os.path.isfile(image_path(cell, base) or "") for cell in ahead) > len(ahead)


def image_path(cell: str, base: Path) -> str | None:
    """Return the path that a cell of a table is, as it is or from ``base``; None where it is no image's.

    The ending may be left out.

    Args:
        cell: of the table.
        base: folder that paths begin at.
    """
    cell = cell.strip()
    if not cell or len(cell) > 1000 or "\n" in cell or "\0" in cell:
        return None
    candidates = [os.path.join(base, cell), os.path.expanduser(cell)]
    there = next((path for path in candidates if os.path.isfile(path)), None)
    if there is None and not is_image_name(cell) and " " not in cell:
        ended = (path + ending for path in candidates for ending in EXTENSIONS)
        there = next((path for path in ended if os.path.isfile(path)), None)
    return there or (candidates[0] if is_image_name(cell) else None)


@dataclass
class Items:
    """The texts of one file or table, or of one list in it, with their labels as they are written.

    Args:
        where: the file or table, for messages.
        part: which list of it, for messages.
        numbered: labels are class numbers.
        images: the texts are paths of images.
    """

    where: str
    part: str = ""
    numbered: bool = False
    images: bool = False
    rows: list[int] = field(default_factory=list)
    labels: list[str | int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)

    def add(self, row: int, label: str | int, text: str) -> None:
        """Add a text.

        Args:
            row: of the file, for messages.
            label: its class.
            text: or the path of an image.
        """
        self.rows.append(row)
        self.labels.append(label)
        self.texts.append(text)

    def select(self, indices: Sequence[int]) -> Items:
        """Return the items at some places."""
        chosen = ([column[index] for index in indices] for column in (self.rows, self.labels, self.texts))
        return Items(self.where, self.part, self.numbered, self.images, *chosen)  # type: ignore[arg-type]

    def locate(self, index: int) -> str:
        return f"{self.where}, row {self.rows[index]}{self.part}"


def csv_items(path: Path, labelled: bool = True) -> Items:
    """Return the items of a CSV file; paths of images in it begin at its folder.

    Args:
        path: the file.
        labelled: whether it must have labels.
    """
    return table_items(str(path), csv_rows(path), path.parent, labelled)


def table_items(where: str, rows: Iterable[Row], base: Path, labelled: bool = True) -> Items:
    """Return the items of a table.

    Args:
        where: the file or table, for messages.
        rows: with their numbers; the first one may be a header.
        base: where paths of images begin.
        labelled: refuse a table without a column of labels.
    """
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{where}: expected one row a text, found none")
    columns = _Columns.of(where, first[1], labelled, base)
    rows = _checked(where, rows if columns.headed else itertools.chain([first], rows), columns)
    ahead = list(itertools.islice(rows, _LOOKED_AT))
    if not ahead:
        raise InputError(f"{where}: expected one row a text, found none")
    column = columns.of_paths(where, ahead, base)
    items = Items(where, numbered=columns.numbered, images=column is not None)
    for number, row in itertools.chain(ahead, rows):
        label = "" if columns.label is None else row[columns.label].strip()
        if column is None:
            text = " ".join(row[index] for index in columns.inputs)
        else:
            text = image_path(row[column], base) or ""
            if not os.path.isfile(text):
                raise InputError(f"{where}, row {number}: there is no image '{row[column]}', here or in {base}")
        if columns.numbered:
            text = text.replace("\\n", "\n")  # as the official files write a new line
            if not label.isdecimal():
                raise InputError(f"{where}, row {number}: expected a class number as in row 1, found '{label}'")
        items.add(number, label, text)
        if columns.split is not None:
            items.splits.append(row[columns.split])
    return items


def by_split(where: str, values: Sequence[str]) -> Mapping[str, Sequence[int]] | None:
    """Return the places of the rows of each split, as a column says it; None, with a warning, where it says others.

    Args:
        where: the file or table, for messages.
        values: of the column.
    """
    parts: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        parts.setdefault(split_called(value) or f"'{value}'", []).append(index)
    other = next((part for part in parts if part not in SPLIT_NAMES), None)
    if other is None and "train" in parts:
        return parts
    fault = (
        f"no row of it is 'train', found {', '.join(sorted(parts))[:120]}" if other is None else f"{other} is no split"
    )
    message = f"{where}: the column '{SPLIT}' is not used: {fault}; expected 'train', 'validation' and 'test'"
    warnings.warn(message, PeerbayesWarning, stacklevel=2)
    return None


def _checked(where: str, rows: Iterable[Row], columns: _Columns) -> Iterator[Row]:
    for number, row in rows:
        if len(row) != columns.width:
            raise InputError(f"{where}, row {number}: expected {columns.width} columns as in row 1, found {len(row)}")
        if columns.label is not None and not row[columns.label].strip():
            raise InputError(f"{where}, row {number}: has no label")
        yield number, row


def json_items(path: Path, key: str, listed: Any) -> Items:
    """Return the items of a list in a JSON file.

    Args:
        path: the file.
        key: of the list.
        listed: pairs of a text and its label, or tables that hold them.
    """
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{path}: expected '{key}' as a list of texts with labels")
    items = Items(str(path), f" of '{key}'")
    for number, entry in enumerate(listed, start=1):
        pair = (entry.get("text"), entry.get("label")) if isinstance(entry, dict) else entry
        where = f"{path}, row {number}{items.part}"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"{where}: expected [text, label] or an object with 'text' and 'label'")
        text, label = pair
        if not isinstance(text, str) or isinstance(label, bool) or not isinstance(label, str | int):
            raise InputError(f"{where}: expected a text, and a label that is a name or a number")
        items.add(number, label, text)
    return items
