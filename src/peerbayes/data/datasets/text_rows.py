"""Rows of text files: labels and texts as they stand there, and where."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from peerbayes.errors import InputError

LABELS = ("label", "category", "class", "class index", "intent")


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
    texts: tuple[int, ...]
    width: int
    numbered: bool  # without a header: class numbers from 1

    @classmethod
    def of(cls, path: Path, row: Sequence[str], labelled: bool) -> _Columns:
        """Return what the first row says; unless texts have to be ``labelled``, a column ``text`` will do."""
        if row[0].strip().isdecimal():
            if len(row) < 2:
                raise InputError(f"{path}, row 1: expected a class number and a text, found one column")
            return cls(0, tuple(range(1, len(row))), len(row), numbered=True)
        header = [name.strip().lower() for name in row]
        label = next((header.index(name) for name in LABELS if name in header), None)
        if label is None and (labelled or "text" not in header):
            raise InputError(f"{path}, row 1: expected a class number, or a header with a column "
                             f"{', '.join(map(repr, LABELS[:-1]))} or {LABELS[-1]!r}; "
                             f"found {', '.join(map(repr, row))[:120]}")  # fmt: skip
        others = [place for place in range(len(header)) if place != label]
        texts = [header.index("text")] if "text" in header else others
        if not texts:
            raise InputError(f"{path}, row 1: expected a column 'text' beside {row[0]!r}")
        return cls(label, tuple(texts), len(row), numbered=False)


@dataclass
class Items:
    """The texts of one file, or of one list in it, with their labels as they are written."""

    path: Path
    part: str = ""
    numbered: bool = False  # class numbers from 1
    rows: list[int] = field(default_factory=list)
    labels: list[str | int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, row: int, label: str | int, text: str) -> None:
        self.rows.append(row)
        self.labels.append(label)
        self.texts.append(text)

    def where(self, place: int) -> str:
        return f"{self.path}, row {self.rows[place]}{self.part}"


def csv_items(path: Path, labelled: bool = True) -> Items:
    columns: _Columns | None = None
    items = Items(path)
    for number, row in csv_rows(path):
        if columns is None:
            columns = _Columns.of(path, row, labelled)
            if not columns.numbered:
                continue
        if len(row) != columns.width:
            raise InputError(f"{path}, row {number}: expected {columns.width} columns as in row 1, found {len(row)}")
        text = " ".join(row[place] for place in columns.texts)
        label = "" if columns.label is None else row[columns.label].strip()
        if columns.numbered:
            text = text.replace("\\n", "\n")  # as the official files write a new line
            if not label.isdecimal():
                raise InputError(f"{path}, row {number}: expected a class number as in row 1, found '{label}'")
        items.add(number, label, text)
    if columns is None or not items.rows:
        raise InputError(f"{path}: expected one row a text, found none")
    return replace(items, numbered=columns.numbered)


def json_items(path: Path, key: str, listed: Any) -> Items:
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{path}: expected '{key}' as a list of texts with labels")
    items = Items(path, f" of '{key}'")
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
