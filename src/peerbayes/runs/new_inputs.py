"""New inputs of a trained run: files, folders, texts, arrays and PIL images, and what its peers say of them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from peerbayes.data.dataset import Dataset
from peerbayes.data.datasets.folders import count_images, walk_images
from peerbayes.data.datasets.objects import Column, column_inputs, is_columns
from peerbayes.data.datasets.text_rows import csv_items, csv_rows
from peerbayes.data.items import pixels
from peerbayes.data.splits import ArraySplit, FolderSplit, Split, centre, in_rgb, resize
from peerbayes.data.transforms.channels import Recoloured
from peerbayes.data.vocabulary import Vocabulary
from peerbayes.engine.processes import pick_device
from peerbayes.errors import InputError
from peerbayes.inference.prediction import Prediction, mean_of
from peerbayes.inference.progress import Share, watched, watcher_now
from peerbayes.posteriors.certificate import Certificate, check_level, how_to

if TYPE_CHECKING:
    from peerbayes.runs.run import Run


PATHS = ("path", "file", "filename", "file name", "image")  # headings of columns of image files
AT_ONCE = 1 << 13  # inputs that are predicted together, however small they are
EXPECTED = "there is nothing to predict: expected image files, folders or texts"


@dataclass(frozen=True)
class NewInputs:
    """New inputs of a run, in memory that their number is not in.

    Args:
        kind: what each is: ``file``, ``image`` or ``text``.
        count: how many there are.
        names: begins to yield one each.
        read: returns the inputs of some names that follow one another, the first of which has a number, on a device.
    """

    kind: str
    count: int
    names: Callable[[], Iterable[str]]
    read: Callable[[Sequence[str], int, torch.device], Tensor]

    @classmethod
    def of(cls, kind: str, split: Split) -> NewInputs:
        """Return a split as inputs that are numbered.

        Args:
            kind: what each is: ``file``, ``image`` or ``text``.
            split: whose inputs they are.
        """

        def read(names: Sequence[str], first: int, device: torch.device) -> Tensor:
            return split.batch(torch.arange(first, first + len(names)), device)[0]

        return cls(kind, len(split), lambda: map(str, range(len(split))), read)

    def batches(self, device: torch.device, most: int) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield names and inputs, so many at once that they take at most so many bytes, or one input's.

        Args:
            device: where they are wanted.
            most: bytes of a batch.
        """
        names, first = iter(self.names()), 0
        ahead = list(itertools.islice(names, 1))
        nbytes = self.read(ahead, 0, torch.device("cpu")).nbytes
        size, names = max(1, min(AT_ONCE, most // nbytes)), itertools.chain(ahead, names)
        while part := list(itertools.islice(names, size)):
            yield part, self.read(part, first, device)
            first += len(part)


def new_inputs(run: Run, given: Any) -> NewInputs:
    """Return what was given in the form that a run has learnt.

    Args:
        run: the run.
        given: for images: files, folders, CSV files with a column of them, arrays, tensors or PIL images, alone or in
            a list; for texts: texts, text files with one a line, CSV files, or token numbers; or a split, or a data set
            of Hugging Face.
    """
    if isinstance(given, Dataset):
        raise InputError("expected inputs, got a whole data set: predict one of its splits, such as data.test")
    if isinstance(given, Mapping):
        raise InputError(
            f"expected inputs or a list of them, got a {type(given).__name__}; give one of its splits or columns"
        )
    if hasattr(given, "batch") and hasattr(given, "labels"):
        return NewInputs.of("image" if run.vocabulary is None else "text", cast(Split, given))
    if is_columns(given):
        given = column_inputs(given, "the data set") if len(given) else []
    vocabulary = run.vocabulary
    return _images(run, given) if vocabulary is None else _texts(vocabulary, given)


def _listed(given: Any) -> Sequence[Any]:
    if isinstance(given, Column):  # whose images are read when they are predicted
        return cast(Sequence[Any], given)
    alone = isinstance(given, str | Path | Image.Image) or not isinstance(given, Iterable)
    items = [given] if alone else list(given)
    if not items:
        raise InputError(EXPECTED)
    return items


# ---- images ----------------------------------------------------------------------------------------------------------


def _images(run: Run, given: Any) -> NewInputs:
    channels, height, width = shape = tuple(run.said("inputs")["shape"])
    if isinstance(given, Tensor | np.ndarray):
        array = cast(Any, given)
        if tuple(array.shape) == shape:
            array = array[None]
        if tuple(array.shape[1:]) == shape:  # as they were learnt
            images = torch.as_tensor(array)
            return NewInputs.of("image", ArraySplit(images.float() if images.is_floating_point() else images))
        items: Sequence[Any] = [array] if _is_one_image(array, channels, (height, width)) else list(array)
    else:
        items = _listed(given)
    if height != width or channels not in (1, 3):
        raise InputError(
            f"{run.folder}: takes inputs of shape {shape}; files and pictures are square images in grey or colours: "
            f"predict arrays of shape (N, {channels}, {height}, {width})"
        )
    margin = run.about.get("margin", 1.0)

    def in_colours(split: Split) -> Split:
        return Recoloured(split, 1) if channels == 1 else split

    if not all(isinstance(item, str | Path) for item in items):
        return NewInputs.of("image", in_colours(ImageSplit(items, height, margin)))

    def read(files: Sequence[str], _: int, device: torch.device) -> Tensor:
        return in_colours(FolderSplit(files, None, height, margin)).batch(torch.arange(len(files)), device)[0]

    paths = [Path(item) for item in items]
    count = sum(map(_count_files, paths))  # before any is predicted: what is not there is told at once
    return NewInputs("file", count, lambda: itertools.chain.from_iterable(map(_files, paths)), read)


def _is_one_image(array: Any, channels: int, sides: tuple[int, int]) -> bool:
    """Return whether an array of another shape than was learnt is one image, not a batch of them."""
    if array.ndim != 3:
        return array.ndim in (0, 2)
    if channels == 1 and tuple(array.shape[1:]) == sides:
        return False  # a batch (N, H, W)
    return array.shape[2] in (1, 3, 4) or array.shape[0] in (1, 3, 4)


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images of any size in colours: the centre of PIL images and bytes as of files, see `FolderSplit`.

    Arrays of ``size`` by ``size`` are taken as they are.

    Args:
        images: PIL images, or arrays or tensors (H, W), (H, W, C) or (C, H, W), uint8 or in [0, 1].
        size: side of the images delivered.
        margin: as of `FolderSplit`.
    """

    images: Sequence[Any]
    size: int
    margin: float = 1.0

    @property
    def labels(self) -> None:
        """There are none."""
        return

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """See `peerbayes.data.splits.Split.batch`.

        Args:
            index: numbers of the images, (B,).
            device: that the batch is put on.
        """
        images = [self._image(number) for number in index.tolist()]
        for number, image in zip(index.tolist(), images, strict=True):
            if image.dtype != images[0].dtype:
                raise InputError(f"image {number} is of {image.dtype}, others are of {images[0].dtype}")
        return torch.stack(images).to(device), torch.zeros(0, dtype=torch.int64, device=device)

    def _image(self, number: int) -> Tensor:
        image, shortest = self.images[number], round(self.size * self.margin)
        if not isinstance(image, Image.Image):
            array = _in_colours(image, f"image {number}")
            if tuple(array.shape[1:]) == (self.size, self.size):
                return array
            if array.is_floating_point():
                start = round((shortest - self.size) / 2)
                return resize(array[None], shortest)[0, :, start : start + self.size, start : start + self.size]
            image = Image.fromarray(array.permute(1, 2, 0).numpy())
        cut = centre(in_rgb(image, f"image {number}"), shortest, self.size)
        return torch.from_numpy(cut.transpose(2, 0, 1).copy())


def _in_colours(image: Any, where: str) -> Tensor:
    """Return an array as an image (3, H, W); transparency is dropped."""
    array = pixels(image, where, expected="a file, a PIL image, an array or a tensor")
    return array.expand(3, -1, -1).contiguous() if len(array) == 1 else array[:3]


def _count_files(path: Path) -> int:
    """Return how many image files a path stands for; refuse one that is not there, or stands for none."""
    if not path.exists():
        raise InputError(f"{path}: there is no such image file or folder")
    if path.is_dir():
        return count_images(path)
    count = sum(1 for _ in _files(path))
    if not count:
        raise InputError(f"{path}: expected one row an image, found none")
    return count


def _files(path: Path) -> Iterator[str]:
    if path.is_dir():
        return walk_images(path)
    return _in_table(path) if path.suffix.lower() == ".csv" else iter([str(path)])


def _in_table(path: Path) -> Iterator[str]:
    """Yield the image files that a column of a CSV file names, from its folder."""
    rows = csv_rows(path)
    first = next(rows)
    header = [cell.strip().lower().replace("_", " ") for cell in first[1]]
    column = next((header.index(name) for name in PATHS if name in header), None)
    if column is None:
        there = [index for index, cell in enumerate(first[1]) if (path.parent / cell.strip()).is_file()]
        if not there:
            raise InputError(f"{path}, row 1: expected a column {', '.join(map(repr, PATHS))}, or the name of a file")
        column, rows = there[0], itertools.chain([first], rows)
    for number, row in rows:
        file = path.parent / row[column].strip() if column < len(row) else path.parent
        if not file.is_file():
            raise InputError(f"{path}, row {number}: there is no image file '{file}'")
        yield str(file)


# ---- texts -----------------------------------------------------------------------------------------------------------


def _texts(vocabulary: Vocabulary, given: Any) -> NewInputs:
    if isinstance(given, Tensor) or (isinstance(given, np.ndarray) and given.dtype.kind in "iuf"):
        tokens = torch.as_tensor(given)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        return NewInputs.of("text", ArraySplit(tokens))
    items = _listed(given)
    for item in items:
        if not isinstance(item, str | Path):
            raise InputError(f"expected texts, or files of them, got a {type(item).__name__}")

    def names() -> Iterator[str]:
        return (text for item in map(str, items) for text in _lines(item))

    count = sum(1 for _ in names())
    if not count:
        raise InputError(f"{', '.join(map(str, items))}: holds no texts, expected one a line")
    return NewInputs("text", count, names, lambda texts, _, device: vocabulary.encode(texts).to(device))


def _lines(given: str) -> Iterator[str]:
    if os.path.isfile(given):  # which takes texts of any length
        if given.lower().endswith(".csv"):
            yield from csv_items(Path(given), labelled=False).texts
            return
        try:
            with open(given, encoding="utf-8-sig", newline="\n") as file:
                yield from filter(None, map(str.strip, file))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{given}: cannot be read as UTF-8 text, one a line ({error})") from None
        return
    if os.path.isdir(given) or (given.endswith((".txt", ".csv")) and not re.search(r"\s", given)):
        raise InputError(f"{given}: there is no such text file, with one a line")
    yield given


BATCH = 1 << 24  # bytes of inputs that are predicted at a time


def predict_batches(
    run: Run,
    inputs: Any,
    peer: str | None = None,
    *,
    coverage: float | None = None,
    risk: float | None = None,
    draws: int | None = None,
    calibrated: bool = True,
    device: str | torch.device = "auto",
) -> Iterator[Prediction]:
    """Yield what `Run.predict` returns, of one batch of inputs after another, in memory that their number is not in.

    Args:
        run: a trained one.
        inputs: as of `Run.predict`.
        peer: its name; None for the ensemble of all, or the peer that an adoption ships.
        coverage: of sets that a certificate promises.
        risk: of answers that a certificate promises.
        draws: of each peer; by default as many as the recipe evaluates.
        calibrated: whether logits are divided by the temperature.
        device: where to predict.
    """
    check_level("coverage", coverage)
    check_level("risk", risk)
    where = pick_device(device)
    peer = run.ships if peer is None else peer
    posteriors = {name: run[name].to(where) for name in (run if peer is None else [peer])}
    temperature = 1.0 if not calibrated else run.temperature if peer is None else run[peer].temperature
    certificate = _promised(run, peer, coverage, risk, draws, calibrated)
    if draws is None:
        draws = run.recipe.evaluation.draws if certificate is None else certificate.draws
    new = new_inputs(run, inputs)
    watcher = watcher_now.get()
    watcher.begin(new.count * len(posteriors))
    for names, images in new.batches(where, BATCH):
        parts = []
        for name, posterior in posteriors.items():
            with watched(Share(watcher, len(names))):
                parts.append(posterior.predict(images, draws, seed=run.seed, name=name, calibrated=False))
            run.refuse_nan(name, parts[-1].log_probabilities)
        together = as_one(parts).tempered(temperature)
        together = together if certificate is None else together.promising(certificate)
        yield replace(together, inputs=names, kind=new.kind)


def _promised(
    run: Run, peer: str | None, coverage: float | None, risk: float | None, draws: int | None, calibrated: bool
) -> Certificate | None:
    """Return the certificate with the promises that are asked for; refuse what it is not of."""
    if coverage is None and risk is None:
        return None
    certificate = run.certificate if peer is None else run[peer].certificate
    names = list(run) if peer is None else [peer]
    origin = str(run.named if names == run.predicting else run.weights_file(names[0]))
    if run.exported:
        how = "an export promises what it was made with: calibrate the run, then export it again"
    else:
        how = how_to(origin, coverage, risk, adopted=run.adopted)
    if certificate is None:
        raise InputError(f"{origin}: nothing is promised of its predictions; {how}")
    if not calibrated:
        raise InputError(f"{origin}: promises are of its calibrated predictions; leave out --raw (calibrated=False)")
    if draws is not None and draws != certificate.draws:
        raise InputError(f"{origin}: promises are of {certificate.draws} draws, not of {draws}; leave out draws")
    return certificate.promising(coverage, risk, origin, how)


def as_one(parts: Sequence[Prediction]) -> Prediction:
    """Return the average of the predictions of several posteriors, with all of their draws, on the CPU."""
    first = parts[0]
    if len(parts) == 1:
        return replace(first, **{name: tensor.cpu() for name, tensor in first.by_input().items()})
    return Prediction(
        mean_of(torch.stack([part.log_probabilities for part in parts])).cpu(),
        torch.stack([part.expected_entropy for part in parts]).mean(0).cpu(),
        torch.stack([part.draws for part in parts]).sum(0).cpu(),
        first.address,
        class_names=first.class_names,
    )
