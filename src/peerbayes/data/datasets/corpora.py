"""Texts with labels from CSV and JSON files, in the layouts that the known text data sets come in.

CSV without a header: a class number from 1 in the first column, then the text, whose columns are joined by a blank (AG
News, Yahoo! Answers, Yelp). With a header: the class in a column ``label``, ``category``, ``class``, ``class index`` or
``intent``, say, the text in ``text``, or in all other columns but one that numbers the rows. A ``classes.txt`` beside
the files names the classes, one a line. JSON: an object with lists ``train`` (or one ``train...`` alone, such as a
subset's ``train10k``), ``test`` and ``val`` or ``validation`` of ``[text, label]`` or
``{"text": ..., "label": ...}``, and perhaps ``classes``.

A table whose rows name image files, with or without a header, holds those images; their endings may be left out. A
column ``split`` of a single table says which rows are ``train``, ``validation`` and ``test``.

Classes are numbered as they are named, or else by the numbers in the files, or else by their sorted names (by
value where all of them are numbers).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peerbayes.data.datasets.numbering import in_order, whole_number
from peerbayes.data.datasets.sources import SPLIT_NAMES, Corpus, Source, Texts, find, source, split_called
from peerbayes.data.datasets.text_rows import Items, by_split, csv_items, json_items, refuse_encoding
from peerbayes.data.splits import FolderSplit, natural_size
from peerbayes.errors import InputError, PeerbayesWarning

# ---- classes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Classes:
    """How labels are numbered: by name, or by their own numbers less ``first``."""

    count: int
    names: tuple[str, ...] | None
    by_name: bool
    first: int

    @classmethod
    def of(cls, items: Items, names: tuple[str, ...] | None, first: int | None) -> _Classes:
        """Return the numbering of training items; ``first`` is the first class number where the layout says so."""
        labels = set(items.labels)
        numbers = {whole_number(label) for label in labels}
        if None in numbers or (names is not None and not items.numbered and labels <= set(names)):
            names = names or in_order(set(map(str, labels)))
            return cls(len(names), names, by_name=True, first=0)
        present = {number for number in numbers if number is not None}
        if first is None:
            first = 0 if 0 in present else 1
        count = len(names) if names is not None else max(present) - first + 1
        absent = next((number for number in range(first, first + count) if number not in present), None)
        if names is None and absent is not None:
            item = "image" if items.images else "text"
            raise InputError(f"{items.where}: no {item} has class {absent}: number the classes without gaps, or name "
                             "them all (in classes.txt, or under 'classes')")  # fmt: skip
        return cls(count, names, by_name=False, first=first)

    @property
    def _expected(self) -> str:
        if not self.by_name:
            return f"a class number from {self.first} to {self.first + self.count - 1}"
        some = ", ".join((self.names or ())[:3]) + (", ..." if self.count > 3 else "")
        return f"one of the {self.count} classes ({some})"

    def texts(self, items: Items) -> Texts:
        """Return items with their class numbers; a label that is none is refused by its row."""
        indices = {name: index for index, name in enumerate(self.names or ())}
        labels = []
        for index, label in enumerate(items.labels):
            number = indices.get(str(label)) if self.by_name else whole_number(label)
            if number is None or not 0 <= number - self.first < self.count:
                raise InputError(f"{items.locate(index)}: expected {self._expected}, found '{label}'")
            labels.append(number - self.first)
        return Texts(items.texts, torch.tensor(labels, dtype=torch.int64))


def assemble(
    train: Items,
    test: Items | None,
    validation: Items | None,
    names: tuple[str, ...] | None,
    first: int | None,
) -> Corpus | Source:
    """Return items with their classes numbered, as texts or as the images that they name.

    Args:
        train: by whose labels the classes are numbered.
        test: where there is a test split.
        validation: where there is one.
        names: the classes in order, where they are known.
        first: the first class number, where it is known.
    """
    for part, items in (("train", train), ("test", test), ("validation", validation)):
        if items is not None and any(split_called(value) != part for value in items.splits):
            message = f"{items.where}: the column 'split' is not used: all of it is given as '{part}'"
            warnings.warn(message, PeerbayesWarning, stacklevel=2)
    classes = _Classes.of(train, names, first)
    learnt = classes.texts(train)
    held_out = [None if items is None else classes.texts(items) for items in (test, validation)]
    for items in (test, validation):
        if items is not None and items.images != train.images:
            kinds = ("images", "texts") if items.images else ("texts", "images")
            raise InputError(f"{items.where}: holds {kinds[0]}, expected {kinds[1]} as in {train.where}")
    if not train.images:
        return Corpus(learnt, held_out[0], held_out[1], classes.count, classes.names)
    size = natural_size(learnt.texts)
    files = [None if split is None else FolderSplit(split.texts, split.labels, size) for split in (learnt, *held_out)]
    return Source(files[0], files[1], files[2], classes=classes.count, class_names=classes.names)


# ---- files and folders ----------------------------------------------------------------------------------------------


def read_csv(
    train: Path, test: Path | None, validation: Path | None, want_train: bool, names: tuple[str, ...] | None = None
) -> Corpus | Source:
    """Read CSV files in one layout; see the module's text.

    Args:
        train: the training texts.
        test: the test texts, where there are some.
        validation: the data's own validation texts.
        want_train: whether the training split is wanted; without it only the test texts are read, or all there are.
        names: the classes, where no ``classes.txt`` lies beside ``train``.
    """
    if not want_train:
        items = csv_items(test or train, labelled=False)
        parts = by_split(items.where, items.splits) if items.splits and test is None else None
        if parts is not None and "test" in parts:
            items = items.select(parts["test"])
        if items.images:
            return Source(None, FolderSplit(items.texts, None, natural_size(items.texts)))
        return Corpus(None, Texts(items.texts, None))
    listing = train.parent / "classes.txt"
    if listing.is_file():
        names = _listed(listing)
    items = csv_items(train)
    held_out = [None if path is None else csv_items(path) for path in (test, validation)]
    if items.splits and test is None and validation is None:
        parts = by_split(items.where, items.splits) or {"train": range(len(items.texts))}
        held_out = [items.select(parts[part]) if part in parts else None for part in ("test", "validation")]
        items = items.select(parts["train"])
    return assemble(items, held_out[0], held_out[1], names, 1 if items.numbered else None)


def _listed(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except UnicodeDecodeError:
        refuse_encoding(path)


def is_corpus(path: Path) -> bool:
    """Return whether a path is a table of texts or image paths, a JSON file, or a folder of such tables."""
    tables = any((path / f"{name}.csv").is_file() for name in SPLIT_NAMES["train"])
    return tables or (path.suffix in (".csv", ".json") and path.is_file())


def read_corpus(path: Path, want_train: bool, names: tuple[str, ...] | None = None) -> Corpus | Source:
    """Read a folder with ``train.csv`` (and others named as in `SPLIT_NAMES`), a CSV or a JSON file.

    Args:
        path: the folder or file.
        want_train: whether the training split is wanted.
        names: of the classes, where they are known.
    """
    if path.suffix == ".json":
        return _read_json(path, want_train)
    if path.is_file():
        return read_csv(path, None, None, want_train, names)
    there = {file.stem: file for file in path.glob("*.csv") if file.is_file()}
    train, test, validation = (
        there.get(_one_of(path, there, SPLIT_NAMES[part]) or "") for part in ("train", "test", "validation")
    )
    if train is None:
        raise InputError(f"{path / 'train.csv'}: file not found; unpack the archive again")
    return read_csv(train, test, validation, want_train, names)


def _content(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if not data.strip():
        raise InputError(f"{path}: the file is empty, expected a JSON object")
    try:
        content = json.loads(data)
    except UnicodeDecodeError:
        refuse_encoding(path)
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object with a list 'train', found {type(content).__name__}")
    return content


def _one_of(path: Path, there: Container[str], names: Sequence[str]) -> str | None:
    """Return which of the names a split has in a file or folder; two of them are refused."""
    matches = [name for name in names if name in there]
    if len(matches) > 1:
        raise InputError(f"{path}: {' and '.join(map(repr, matches))} could both be one split; leave one of them")
    return matches[0] if matches else None


def _read_json(path: Path, want_train: bool) -> Corpus:
    content = _content(path)
    train = _one_of(path, content, ["train"] if "train" in content else [k for k in content if k.startswith("train")])
    if train is None:
        raise InputError(f"{path}: expected a list 'train', found {', '.join(map(repr, content)) or 'nothing'}")
    validation = _one_of(path, content, SPLIT_NAMES["validation"])
    test = "test" if "test" in content else None

    if not want_train:
        return Corpus(None, Texts(json_items(path, test or train, content[test or train]).texts, None))
    names = content.get("classes")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InputError(f"{path}: expected 'classes' as a list of names")
    held_out = [None if key is None else json_items(path, key, content[key]) for key in (test, validation)]
    items = json_items(path, train, content[train])
    corpus = assemble(items, held_out[0], held_out[1], tuple(names) if names else None, 0)
    assert isinstance(corpus, Corpus)
    return corpus


# ---- the known sets -------------------------------------------------------------------------------------------------


@source("agnews")
def _agnews(root: Path, want_train: bool) -> Corpus | Source:
    path = find(root, ("ag_news_csv", "agnews", "ag_news"), "ag_news_csv.tar.gz")
    return read_corpus(path, want_train, ("World", "Sports", "Business", "Sci/Tech"))


@source("yahoo")
def _yahoo(root: Path, want_train: bool) -> Corpus | Source:
    topics = ("Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet",
              "Sports", "Business & Finance", "Entertainment & Music", "Family & Relationships",
              "Politics & Government")  # fmt: skip
    path = find(root, ("yahoo_answers_csv", "yahoo"), "yahoo_answers_csv.tar.gz")
    return read_corpus(path, want_train, topics)


@source("yelp")
def _yelp(root: Path, want_train: bool) -> Corpus | Source:
    path = find(root, ("yelp_review_full_csv", "yelp"), "yelp_review_full_csv.tar.gz")
    return read_corpus(path, want_train, tuple(f"{stars} star{'s' if stars > 1 else ''}" for stars in range(1, 6)))


@source("banking77")
def _banking77(root: Path, want_train: bool) -> Corpus | Source:
    path = find(root, ("banking77", "banking_data", "banking77_train.csv"), "banking_data (train.csv and test.csv)")
    if path.is_dir():
        return read_corpus(path, want_train)
    return read_csv(path, find(root, ("banking77_test.csv",), "banking77_test.csv"), None, want_train)


_CLINC = ("clinc150.json", "clinc150/data_full.json", "data_full.json")


@source("clinc150")
def _clinc150(root: Path, want_train: bool) -> Corpus:
    return _read_json(find(root, _CLINC, "data_full.json"), want_train)


@source("clinc150-oos")
def _clinc150_oos(root: Path, want_train: bool) -> Corpus:
    path = find(root, _CLINC, "data_full.json")
    if want_train:
        raise InputError("clinc150-oos has no classes to learn: name it as an out-of-distribution set of clinc150")
    return Corpus(None, Texts(json_items(path, "oos_test", _content(path).get("oos_test")).texts, None))
