"""From a name, a path or an object to a data set with fixed splits.

Where data is looked for: the ``root`` argument, else the environment variable ``PEERBAYES_DATA``, else
``~/.cache/peerbayes/data``. Splits are the same every time:

- The official test split is the test split. Where there is none, a fifth of each class is held out by a fixed
  permutation.
- Texts are split as images are; the vocabulary is made from what is left to train on.
- ``validation`` takes the *last* images of the training split, in order, as the papers do with CIFAR. Where
  the training split is stored class by class (each class in one run, as in image folders), the last images
  would be of one class: then the same share of each class is taken by a fixed permutation. Either way the
  training images keep their order. ``"auto"`` takes the data's own validation split, or else a tenth.
- ``"half"`` is for networks that may have learnt all training images: as ``"auto"``, but where there is a validation
  split and no test split, half of each of its classes is the validation split, the other half the test split.

What is cut is said in the notes of the data set.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import peerbayes.data.datasets.images  # noqa: F401 (registers the sets of images)
from peerbayes.data.datasets.arrays import read_npz
from peerbayes.data.datasets.corpora import is_corpus, read_corpus
from peerbayes.data.datasets.folders import read_folder
from peerbayes.data.datasets.objects import read_object, splits_of, title_of
from peerbayes.data.datasets.sources import READERS, Corpus, Source, Texts, data_root
from peerbayes.data.held_out import Validation, divided
from peerbayes.data.items import Stored
from peerbayes.data.splits import ArraySplit, Split, measure
from peerbayes.data.transforms.channels import Recoloured
from peerbayes.data.vocabulary import TextOptions, Vocabulary, read_vectors
from peerbayes.errors import InputError, PeerbayesWarning, nearest
from peerbayes.math import noise
from peerbayes.networks.inputs import WordVectors
from peerbayes.networks.normalisation import IMAGENET_STATS
from peerbayes.networks.weights_files import is_weights_file
from peerbayes.showing import html_facts

IN_MEMORY = "arrays"  # the name of a data set that was given none
MAX_CLASSES_SHOWN = 10  # classes that are shown
_DIGESTED = 64  # inputs of a split that its digest looks at
_MEASURED = 2000  # files of a folder on which mean and deviation are measured


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with its fixed splits.

    Args:
        name: the registered name, or the stem of the path.
        train: the training split, without the validation images.
        validation: held out of the training split, the data's own, or None.
        test: the test split.
        classes: number of classes.
        class_names: one a class, where they are known.
        shape: channels, height and width of one image in a batch, or the length of a text in token numbers.
        mean: per channel in the [0, 1] scale: published constants for CIFAR and ImageNet, else measured on
            ``train`` (for folders, on at most 2,000 files of it). Empty for texts.
        std: as ``mean``.
        soft_labels: float32 (N, classes), the distribution of human labels of the test images (CIFAR-10H), or
            None.
        vocabulary: how texts became token numbers; None for images.
        vectors: word vectors for networks to start from, where the options of the texts name some.
        stats: whose mean and deviation these are, where others than the data's own were asked for.
        notes: what was cut, or left out, a sentence each.
        unsplit: whether the data had no test split, so that a part of the training split is it.
        halved: whether validation and test split are the halves of one, by ``validation="half"``.
        origin: what `load` makes it of again: its options by name, with full paths; None for an object.

    Example:
        >>> from peerbayes.data import load
        >>> data = load("digits")
        >>> data.name, data.classes, len(data.test)
        ('digits', 10, 500)
    """

    name: str
    train: Split
    validation: Split | None
    test: Split
    classes: int
    class_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    soft_labels: Tensor | None = None
    vocabulary: Vocabulary | None = None
    vectors: WordVectors | None = None
    stats: Literal["imagenet"] | None = None
    notes: tuple[str, ...] = ()
    unsplit: bool = False
    halved: bool = False
    origin: Mapping[str, Any] | None = None

    @property
    def description(self) -> str:
        """Name and sizes of its splits, for people."""
        parts = {"training": self.train, "validation": self.validation, "test": self.test}
        counts = ", ".join(f"{len(split):,} {name}" for name, split in parts.items() if split is not None)
        return f"'{self.name}': {counts} {'texts' if self.vocabulary is not None else 'images'}"

    def digest(self) -> str:
        """Return a digest of sizes, labels, and some inputs of each split; the same whatever the data came from."""
        digest = hashlib.blake2b(digest_size=8)
        for split in (self.train, self.validation, self.test):
            if split is None:
                digest.update(b"none")
                continue
            index = torch.linspace(0, len(split) - 1, min(_DIGESTED, len(split))).long()
            inputs, _ = split.batch(index, torch.device("cpu"))
            labels = torch.zeros(0) if split.labels is None else split.labels
            for tensor in (inputs.contiguous(), labels):
                digest.update(f"{len(split)} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape)) + ("" if self.vocabulary is None else " token numbers")
        return f"Dataset({self.description}; {self.classes:,} classes, each {shape})"

    def _repr_html_(self) -> str:
        named = ", ".join((self.class_names or ())[:MAX_CLASSES_SHOWN])
        more = f" and {self.classes - MAX_CLASSES_SHOWN:,} more" if named and self.classes > MAX_CLASSES_SHOWN else ""
        facts: dict[str, object] = {
            "training": f"{len(self.train):,}",
            "validation": "none" if self.validation is None else f"{len(self.validation):,}",
            "test": f"{len(self.test):,}",
            "classes": f"{self.classes:,}" + (f": {named}{more}" if named else ""),
            "shape": " × ".join(map(str, self.shape)) + ("" if self.vocabulary is None else " token numbers"),
        }
        if self.mean:
            facts |= {
                name: ", ".join(f"{value:.3f}" for value in values)
                for name, values in (("mean", self.mean), ("deviation", self.std))
            }
        return html_facts(f"Dataset {self.name}", facts)


def names() -> tuple[str, ...]:
    """Return the registered names, sorted.

    Example:
        >>> from peerbayes.data import names
        >>> "digits" in names()
        True
    """
    return tuple(sorted(READERS))


def load(
    given: Any,
    *,
    root: Path | str | None = None,
    validation: Validation = 0,
    size: int | None = None,
    stats: Literal["imagenet"] | None = None,
    text: TextOptions | None = None,
    vocabulary: Vocabulary | None = None,
    names: Sequence[str] | None = None,
) -> Dataset:
    """Read a data set; the module's text gives the rules of the splits.

    Args:
        given: a registered name (see :func:`peerbayes.data.names`); a path to an ``.npz`` file, an image folder, a
            ``.csv`` file of texts or of image paths, a ``.json`` file of texts, or a folder with a ``train.csv`` (see
            `peerbayes.data.datasets.corpora`), where a relative path is looked for in the working directory, then under
            the root; or an object: a torch data set or loader, ``(X, y)``, a list of ``(image, label)``, a pandas
            ``DataFrame``, a Hugging Face data set, or a dictionary of these with ``train``, ``test`` and
            ``validation``. A `Dataset` is returned as it is.
        root: the folder of the data (see :func:`peerbayes.data.data_root`).
        validation: images to hold out of the training split: a number, or a fraction below 1; ``"auto"`` for the data's
            own validation split, or else a tenth; ``"half"`` for half of its own, the other half being the test split,
            where it has none, else as ``"auto"``.
        size: side of the images: shortest side resized, centre cut out. By default as stored; 224 for
            ImageNet, and for other folders, and objects whose images have different sizes, the shortest side of the
            first image, at most 224.
        stats: mean and deviation that networks normalise colour images by: ``"imagenet"`` for those of ImageNet, which
            some papers use for all of them. By default the data's own, see `Dataset`.
        text: how texts become token numbers; its file of vectors is looked for as a relative path is.
        vocabulary: a vocabulary to use for texts, such as that of a run, instead of making one; word vectors are not
            read then.
        names: of the classes of an object, in the order of their numbers; by default its own, or labels that are texts,
            sorted.

    Example:
        >>> from peerbayes.data import load
        >>> data = load("digits", validation=100)
        >>> data.classes, data.shape, len(data.train), len(data.validation)
        (10, (1, 8, 8), 1197, 100)
    """
    if isinstance(given, Dataset):
        return given
    named = isinstance(given, str | Path)
    if named and names is not None:
        raise InputError(f"names are for data given as an object, and {given} names its classes itself")
    source = _read(given, root, want_train=True) if named else read_object(given, names, size)
    name = given if named else (title_of(given) or IN_MEMORY)
    if not named and name in READERS:  # a run of it could be taken for one of theirs
        name = IN_MEMORY
    if isinstance(source, Corpus):
        if size is not None:
            raise InputError(f"{name} holds texts: size is for images; the length of a text is an option of text")
        if stats is not None:
            raise InputError(f"stats = '{stats}' is for images, but {name} holds texts")
        if text is None:
            text = TextOptions()
        elif text.vectors and not Path(text.vectors).expanduser().exists():
            text = replace(text, vectors=str(data_root(root) / text.vectors))
        loaded = _text_data(name, source, validation, text, vocabulary)
    elif text is not None or vocabulary is not None:
        raise InputError(f"{name} holds images: leave out the options of text")
    else:
        loaded = _image_data(name, source, validation, size)
        loaded = loaded if stats is None else _normalised_by(stats, loaded)
    if not named:
        return replace(loaded, name=str(name))
    if isinstance(validation, str) and not loaded.halved:
        cut = loaded.validation if source.validation is None else None
        validation = 0 if cut is None else len(cut)
    origin = {"name": _full(given, root), "validation": validation, "size": size, "stats": stats}
    return replace(loaded, origin=origin if text is None else origin | {"text": asdict(text)})


def _normalised_by(stats: Any, loaded: Dataset) -> Dataset:
    if stats != "imagenet":
        raise InputError(f"stats = '{stats}': expected 'imagenet', or None for the data's own")
    mean, std = IMAGENET_STATS
    if loaded.shape[0] != len(mean):
        raise InputError(f"stats = '{stats}' is for images of {len(mean)} channels, but {loaded.name} has "
                         f"{loaded.shape[0]}")  # fmt: skip
    return replace(loaded, mean=mean, std=std, stats=stats)


def from_arrays(
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    validation: tuple[Any, Any] | Validation = 0,
    *,
    names: Sequence[str] | None = None,
    name: str = IN_MEMORY,
) -> Dataset:
    """Make a data set of images in memory, as :func:`load` makes one of an ``.npz`` file.

    Args:
        train: images (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or float in [0, 1], and labels (N,), numbers or
            names: numpy arrays, tensors, or what numpy makes arrays of.
        test: as ``train``; without it a fixed fifth of ``train`` is held out.
        validation: as ``train``, or how many images (or which fraction) to hold out of ``train``.
        names: of the classes; by default they are numbered, from 0 without gaps, or sorted.
        name: of the data set, in tables.

    Example:
        >>> import numpy as np
        >>> from peerbayes.data import from_arrays
        >>> images, labels = np.zeros((20, 8, 8), np.uint8), ["cat", "dog"] * 10
        >>> data = from_arrays((images, labels))
        >>> data.class_names, len(data.train), len(data.test)
        (('cat', 'dog'), 16, 4)
    """
    if name in READERS:
        raise InputError(f"name '{name}' is that of a known data set; choose another one for these")
    held, count = (None, validation) if isinstance(validation, int | float | str) else (validation, 0)
    parts = {"train": train, "test": test, "validation": held}
    for part, given in parts.items():
        if part == "train" or given is not None:
            if not isinstance(given, tuple | list) or len(given) != 2:
                raise InputError(f"{part} is of type {type(given).__name__}, expected a pair (images, labels)")
            parts[part] = tuple(given)
    return replace(load(parts, validation=count, names=names), name=name)


def load_judged(given: Any, *, vocabulary: Vocabulary | None = None, size: int | None = None,
                names: Sequence[str] | None = None) -> Dataset:  # fmt: skip
    """Return data to evaluate by: the test split of an object that has one, else all that it holds.

    Args:
        given: as in :func:`load`.
        vocabulary: of the run, for texts.
        size: side of the images.
        names: the classes that the run knows.
    """
    if isinstance(given, Dataset | str | Path):
        return load(given, vocabulary=vocabulary, size=None if isinstance(given, Dataset) else size)
    parts = splits_of(given)
    whole = parts.get("test", parts["train"])
    return load({"train": whole, "test": whole}, vocabulary=vocabulary, size=size, names=names)


def _image_data(name: str | Path, source: Source, validation: Validation, size: int | None) -> Dataset:
    parts: tuple[Stored, Stored | None, Stored]
    held, test, notes = source.validation, source.test, source.notes
    called = source.stand_in or "validation"
    if source.stand_in is not None and test is not None:
        if validation == "half":
            held, test = test, None
        else:
            notes = (*notes, f"{name}: no test split: the {len(test):,} images of '{called}' are it")
    halved = _is_halved(held, test, validation)
    parts, cut = divided(name, source.train, held, test, validation, called)
    train, held, test = parts
    if size is not None:
        _check_size(size)
        train, test, held = train.sized(size), test.sized(size), None if held is None else held.sized(size)
    for label, split in (("test", test), ("validation", held)):
        if split is not None and split.shape != train.shape:
            raise InputError(f"{name}: {label} images have shape {split.shape}, training images {train.shape}")
    mean, std = source.stats or measure(_measured_part(train))
    return Dataset(
        name=_title(name),
        train=train,
        validation=held,
        test=test,
        classes=source.classes,
        class_names=source.class_names,
        shape=train.shape,
        mean=mean,
        std=std,
        soft_labels=source.soft_labels,
        notes=(*notes, *cut),
        unsplit=source.test is None,
        halved=halved,
    )


def _is_halved(held: object, test: object, validation: Validation) -> bool:
    return validation == "half" and held is not None and test is None


def _text_data(
    name: str | Path,
    corpus: Corpus,
    validation: Validation,
    options: TextOptions,
    vocabulary: Vocabulary | None,
) -> Dataset:
    (train, held, test), cut = divided(name, corpus.train, corpus.validation, corpus.test, validation)
    vectors = None
    if vocabulary is None:
        vocabulary = Vocabulary.build(train.texts, options)
        if options.vectors:
            vectors = read_vectors(options.vectors, vocabulary)
            vocabulary = replace(vocabulary, dimension=vectors.vectors.shape[1])
    return Dataset(
        name=_title(name),
        train=_encoded(train, vocabulary),
        validation=None if held is None else _encoded(held, vocabulary),
        test=replace(_encoded(test, vocabulary), texts=test.texts),
        classes=corpus.classes,
        class_names=corpus.class_names,
        shape=(vocabulary.width,),
        mean=(),
        std=(),
        vocabulary=vocabulary,
        vectors=vectors,
        notes=(*corpus.notes, *cut),
        unsplit=corpus.test is None,
        halved=_is_halved(corpus.validation, corpus.test, validation),
    )


def _encoded(texts: Texts, vocabulary: Vocabulary) -> ArraySplit:
    return ArraySplit(vocabulary.encode(texts.texts), texts.labels)


def load_texts(name: str | Path, vocabulary: Vocabulary, *, root: Path | str | None = None) -> Split:
    """Read texts only, for instance an out-of-distribution set such as ``clinc150-oos``: the test split, or all texts.

    Labels are not looked at, and are absent. ``name`` and ``root`` as in :func:`load`.

    Args:
        name: a known name or a path.
        vocabulary: what encodes them.
        root: data root.
    """
    corpus = _read(name, root, want_train=False)
    if not isinstance(corpus, Corpus):
        raise InputError(f"{name} holds images, expected texts")
    assert corpus.test is not None
    return _encoded(corpus.test, vocabulary)


def load_images(name: str | Path, *, root: Path | str | None = None, size: int | None = None) -> Split:
    """Read images only, for instance an out-of-distribution set: the test split, or every image where there is none.

    Labels may be absent, and are for image folders, which need no class folders here. Only the files of that
    split have to be there. Arguments as in :func:`load`.

    Args:
        name: a known name or a path.
        root: data root.
        size: of the images, where they are files.

    Example:
        >>> from peerbayes.data import load_images
        >>> len(load_images("digits")), load_images("photographs").labels is None
        (500, True)
    """
    source = _read(name, root, want_train=False)
    if isinstance(source, Corpus):
        raise InputError(f"{name} holds texts, expected images")
    split = source.train if source.test is None else source.test
    assert split is not None
    if size is not None:
        _check_size(size)
        split = split.sized(size)
    return split


def load_outside(name: str | Path, like: Dataset, root: Path | str | None = None) -> Split:
    """Read an out-of-distribution set in the form that another data set has: its vocabulary, or size and channels.

    Grey images become colours of equal channels, and colours their luma.

    ``name`` and ``root`` as in :func:`load`.

    Args:
        name: a known name or a path.
        like: the data set whose form it gets.
        root: data root.

    Example:
        >>> from peerbayes.data import load, load_outside
        >>> load_outside("photographs", like=load("digits")).shape
        (1, 8, 8)
    """
    if name == like.name and name in names():
        message = f"{name}: is the data that was learnt, and its test split is in distribution"
        warnings.warn(message, PeerbayesWarning, stacklevel=2)
    if like.vocabulary is not None:
        return load_texts(name, like.vocabulary, root=root)
    split = load_images(name, root=root, size=like.shape[1])
    images, _ = split.batch(torch.arange(1), torch.device("cpu"))
    if {images.shape[1], like.shape[0]} == {1, 3}:
        return Recoloured(split, 1 if like.shape[0] == 1 else 3)
    if images.shape[1] != like.shape[0]:
        channels = f"{images.shape[1]} channel" + "s" * (images.shape[1] != 1)
        raise InputError(f"{name}: images have {channels}, expected {like.shape[0]} as in {like.name}")
    return split


def _title(name: str | Path) -> str:
    return name if isinstance(name, str) and name in names() else Path(name).stem


def _check_size(size: int) -> None:
    if size < 1:
        raise InputError(f"size must be at least 1, got {size}")


def _read(name: str | Path, root: Path | str | None, want_train: bool) -> Source | Corpus:
    if isinstance(name, str) and name in READERS:
        return READERS[name](data_root(root), want_train)
    path = _located(name, root)
    if is_corpus(Path(path)):
        return read_corpus(Path(path), want_train)
    if Path(path).is_dir():
        return read_folder(Path(path), want_train)
    if is_weights_file(path):
        raise InputError(f"{path}: holds weights, expected data; the network that they are of is made the best of by "
                         "'peerbayes adopt'")  # fmt: skip
    if Path(path).suffix != ".npz":
        raise InputError(f"{path}: expected an .npz file, an image folder, a table of texts or image paths (.csv), "
                         "texts (.json) or a known name")  # fmt: skip
    return read_npz(Path(path), want_train)


def _full(name: str | Path, root: Path | str | None) -> str:
    path = _located(name, root)
    return path if isinstance(path, str) else str(path.resolve())


def _located(name: str | Path, root: Path | str | None) -> str | Path:
    """Return a registered name, or the path where data are, as it was given or below the root."""
    if isinstance(name, str) and name in READERS:
        return name
    path, base = Path(name).expanduser(), data_root(root)
    existing = next((candidate for candidate in (path, base / path) if candidate.exists()), None)
    if existing is not None:
        return existing
    beside = [str(path.parent / sibling.name) for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(str(path), [*names(), *beside])
    if name == IN_MEMORY:
        hint = "; data in memory has to be given again"
    elif not hint.startswith("; did"):
        hint = nearest(str(name), names())
    looked = f"{path} does not exist" if path.is_absolute() else f"neither {path} nor {base / path} exists"
    raise InputError(f"no data set '{name}': not a known name, and {looked}{hint}")


def _measured_part(train: Stored) -> Stored:
    if isinstance(train, ArraySplit) or len(train) <= _MEASURED:
        return train
    return train.select(noise.permutation(noise.Address(noise.FIXED, "data", "measure"), len(train))[:_MEASURED])
