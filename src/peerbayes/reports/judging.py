"""The verb `judge`: predictions of any library, from files or memory, measured as `evaluate` measures a run's."""

from __future__ import annotations

import csv
import hashlib
import math
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerbayes.engine.processes import environment
from peerbayes.errors import InputError, nearest
from peerbayes.inference.prediction import entropy_of, mean_of
from peerbayes.recipes.settings import Evaluation
from peerbayes.reports.record import Record, check_page
from peerbayes.reports.scoring import recalibrated, scored

FORMS = ("probabilities", "log_probabilities", "logits")
KEYS = (*FORMS, "labels", "disagreement", *(f"validation_{name}" for name in (*FORMS, "labels")))
KEYS += ("method", "seed", "dataset")
LABEL = ("label", "labels")  # headings of the true class
# Headings that are no class's, so that a table with one of them has other columns than labels and classes.
OTHERS = (
    "",
    "disagreement",
    "entropy",
    "file",
    "filename",
    "id",
    "image",
    "index",
    "name",
    "path",
    "prediction",
    "text",
)
TOLERANCE = 1e-2  # of the sum of a row: wide enough for half precision and three digits
MEMORY = "predictions"  # what those that were given as arrays are called
Source = str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class Predictions:
    """Predictions of labelled inputs, as `judge` takes them.

    Attributes:
        origin: the file, for messages.
        method: of which these are one seed.
        seed: of training.
        dataset: name of the data that were predicted, where it is given.
        log_p: log-probabilities (N, C), averaged over draws where there are any.
        labels: (N,).
        disagreement: (N,), or None where there is a single prediction of each input.
        draws: how many each is an average of, where that is known.
        held: log-probabilities and labels of a validation split.
    """

    origin: str
    method: str
    seed: int
    dataset: str | None
    log_p: Tensor
    labels: Tensor
    disagreement: Tensor | None
    draws: int
    held: tuple[Tensor, Tensor] | None


def read_predictions(source: Source, logits: bool) -> Predictions:
    """Return the predictions of a file or a mapping of arrays, checked.

    Args:
        source: a ``.npz`` or ``.csv`` file, or a mapping of arrays.
        logits: the numbers of a CSV file are logits.
    """
    if isinstance(source, Mapping):
        return _taken(MEMORY, {str(key): value for key, value in source.items()})
    if not isinstance(given := cast(Any, source), str | Path):
        kind = type(given).__name__
        raise InputError(f"expected .npz or .csv files of predictions, or mappings of arrays, got a {kind}")
    path = Path(source).expanduser()
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    if path.suffix.lower() not in (".npz", ".csv"):
        raise InputError(f"{path}: expected a .npz or .csv file of predictions")
    return _taken(str(path), _npz(path) if path.suffix.lower() == ".npz" else _csv(path, logits))


def _npz(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                hint = "np.savez(file, probabilities=..., labels=...)"
                raise InputError(f"{path}: holds a single array, expected several: {hint}")
            return {key: _array(path, file, key) if key in KEYS else None for key in file.files}
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError) as error:
        raise InputError(f"{path}: not a readable .npz file ({error})") from None


def _array(path: Path, file: Mapping[str, Any], key: str) -> Any:
    try:
        return file[key]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise InputError(
                f"{path}: '{key}' is pickled Python objects, which are not read; save a plain array"
            ) from None
        raise


def _csv(path: Path, logits: bool) -> dict[str, Any]:
    """Return what a CSV file holds, by the keys of an .npz file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = [cell.strip() for cell in next(rows, [])]
            table = [row for row in rows if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV ({error})") from None
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise InputError(f"{path}: has several columns '{twice[0]}'; expected each heading once")
    label = next((index for index, name in enumerate(header) if name.lower() in LABEL), None)
    if label is None:
        raise InputError(
            f"{path}: has no column 'label' of true classes; its columns are {', '.join(header) or 'none'}"
        )
    form, columns = _columns(path, header, label, logits)
    if not table:
        raise InputError(f"{path}: expected one row an input, found none")
    spread = header.index("disagreement") if form == "probabilities" and "disagreement" in header else None
    values = np.empty((len(table), len(columns) + (spread is not None)))
    for number, row in enumerate(table):
        if len(row) != len(header):
            raise InputError(
                f"{path}, row {number + 2}: has {len(row)} cells, expected {len(header)} as in the first row"
            )
        for index, column in enumerate([*columns.values(), *([] if spread is None else [spread])]):
            try:
                values[number, index] = float(row[column])
            except ValueError:
                where = f"{path}, row {number + 2}, column '{header[column]}'"
                raise InputError(f"{where}: '{row[column]}' is not a number") from None
    names = {name: number for number, name in enumerate(columns)}
    given = [row[label].strip() for row in table]
    named = all(name in names for name in given)
    labels = [names[name] if named else _whole(path, number, name) for number, name in enumerate(given, start=2)]
    arrays = {form: values[:, : len(columns)], "labels": np.array(labels, dtype=np.int64)}
    return arrays | ({} if spread is None else {"disagreement": values[:, -1]})


def _columns(path: Path, header: Sequence[str], label: int, logits: bool) -> tuple[str, dict[str, int]]:
    """Return what the numbers are, and the columns of classes by their names."""
    for form, letter in (("probabilities", "p"), ("logits", "logit")):
        headed = {
            match[1]: index for index, name in enumerate(header) if (match := re.fullmatch(rf"{letter}\((.*)\)", name))
        }
        if headed:
            return form, headed
    columns = {name: index for index, name in enumerate(header) if index != label}
    if strange := [name for name in columns if name.lower() in OTHERS or name.lower().startswith("unnamed:")]:
        raise InputError(
            f"{path}: column '{strange[0]}' is no class's; expected '{header[label]}' and a column a class, or columns "
            "of classes called p(NAME) or logit(NAME), beside which others are left out"
        )
    if len(columns) < 2:
        raise InputError(f"{path}: expected a column of probabilities for each class beside '{header[label]}'")
    return "logits" if logits else "probabilities", columns


def _whole(path: Path, number: int, cell: str) -> int:
    """Return a label that is a whole number, also as numpy and pandas write them: ``2.0``, ``2.000e+00``."""
    if re.fullmatch(r"-?\d{1,18}", cell):
        return int(cell)
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (value.is_integer() and abs(value) < 1e15):
        raise InputError(f"{path}, row {number}: label '{cell}' is neither the heading of a class nor a whole number")
    return int(value)


def _taken(origin: str, given: Mapping[str, Any]) -> Predictions:
    """Return what was read, checked."""
    log_p, spread, draws = _predicted(origin, given, "")
    labels = _labels(origin, given, "", log_p)
    if "disagreement" in given:
        spread = _numbers(origin, given["disagreement"], "disagreement")
        if spread.shape != labels.shape or not bool((spread >= 0).all()):
            raise InputError(
                f"{origin}: disagreement has shape {tuple(spread.shape)}, expected {len(labels)} numbers from 0 on"
            )
    held = None
    if any(key.startswith("validation_") for key in given):
        before = _predicted(origin, given, "validation_")[0]
        if before.shape[1] != log_p.shape[1]:
            raise InputError(f"{origin}: {before.shape[1]} classes on the validation split, but {log_p.shape[1]} else")
        held = before, _labels(origin, given, "validation_", before)
    method, seed = _named(origin, given)
    dataset = _word(given["dataset"]) if "dataset" in given else None
    return Predictions(origin, method, seed, dataset, log_p, labels, spread, draws, held)


def _named(origin: str, given: Mapping[str, Any]) -> tuple[str, int]:
    """Return method and seed: those that are given, or else those of the file's name."""
    path = Path(origin)
    match = re.fullmatch(r"(.*?)[-_. ]?seed[-_]?(\d{1,9})", path.stem)
    method, seed = (match[1] or path.resolve().parent.name, int(match[2])) if match else (path.stem, 0)
    if "seed" in given:
        word = _word(given["seed"])
        if not re.fullmatch(r"\d{1,18}", word):
            raise InputError(f"{origin}: seed is '{word}', expected a whole number from 0 on")
        seed = int(word)
    return _word(given["method"]) if "method" in given else method, seed


def _word(value: Any) -> str:
    return str(value.item() if isinstance(value, np.ndarray | Tensor) and value.size == 1 else value)


def _predicted(origin: str, given: Mapping[str, Any], prefix: str) -> tuple[Tensor, Tensor | None, int]:
    """Return log-probabilities, the disagreement of draws, and how many of them there are."""
    present = [name for name in FORMS if prefix + name in given]
    if len(present) != 1:
        fault = f"has {' and '.join(prefix + name for name in present)}" if present else f"has no {prefix}probabilities"
        hint = (
            ""
            if present
            else nearest(prefix + "probabilities", [key for key in given if key not in KEYS] or ["nothing"])
        )
        expected = f"expected one of {', '.join(prefix + name for name in FORMS)}"
        raise InputError(f"{origin}: {fault}, {expected}{hint.replace('known', 'it has')}")
    (form,) = present
    values = _numbers(origin, given[prefix + form], name := prefix + form)
    if values.ndim not in (2, 3) or not values.numel() or values.shape[-1] < 2:
        raise InputError(f"{origin}: {name} have shape {tuple(values.shape)}, expected (N, C), or (S, N, C) of S draws")
    if form == "probabilities":
        total = values.double().sum(-1)
        _check(origin, name, (values < 0).any(-1), "holds a negative number, expected probabilities")
        wrong = (total - 1).abs() > TOLERANCE
        _check(origin, name, wrong, "adds to {:.4g}, expected 1 (are these logits?)", total)
        log_p = values.log()
    else:
        log_p = values.log_softmax(-1) if form == "logits" else values
        total = values.double().logsumexp(-1)
        _check(origin, name, ~total.isfinite(), "has no number above −inf, or one of +inf")
        wrong = total.abs() > TOLERANCE if form == "log_probabilities" else torch.zeros_like(total, dtype=torch.bool)
        _check(origin, name, wrong, "adds to {:.4g} after exp, expected 1 (are these logits?)", total.exp())
    if values.ndim == 2:
        return log_p, None, 1
    mean = mean_of(log_p)
    return mean, (entropy_of(mean) - entropy_of(log_p).mean(0)).clamp_min(0), len(log_p)


def _check(origin: str, name: str, wrong: Tensor, message: str, values: Tensor | None = None) -> None:
    """Refuse predictions by the first row that is wrong."""
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        shown = message if values is None else message.format(float(values[position]))
        draw = f"draw {position[0]}, " if len(position) > 1 else ""
        raise InputError(f"{origin}: {name}, {draw}row {position[-1]} {shown}")


def _numbers(origin: str, given: Any, name: str) -> Tensor:
    """Return an array as floats of at least single precision; refuse what is not a number."""
    array = _plain(origin, given, name)
    if array.dtype.kind not in "fiu":
        raise InputError(f"{origin}: {name} are of type {array.dtype}, expected numbers")
    single = array.dtype == np.float32 or array.dtype.itemsize < 4
    values = torch.from_numpy(np.ascontiguousarray(array, np.float32 if single else np.float64))
    if bool(values.isnan().any()):
        row = values.isnan().nonzero()[0].tolist()
        raise InputError(f"{origin}: {name}, row {row[-2] if len(row) > 1 else row[0]} holds NaN")
    return values


def _labels(origin: str, given: Mapping[str, Any], prefix: str, log_p: Tensor) -> Tensor:
    name = f"{prefix}labels"
    if name not in given:
        unknown = [key for key in given if key not in KEYS]
        hint = f" (it has {', '.join(unknown)})" if unknown else ""
        raise InputError(f"{origin}: has no {name}, expected the true class of each input{hint}")
    array = _plain(origin, given[name], name)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InputError(
            f"{origin}: {name} are {array.dtype} of shape {array.shape}, expected whole numbers of shape (N,)"
        )
    if len(array) != len(log_p):
        raise InputError(f"{origin}: {len(array)} {name}, but predictions of {len(log_p)} inputs")
    classes = log_p.shape[1]
    for row in np.flatnonzero((array < 0) | (array >= classes))[:1]:
        raise InputError(f"{origin}: {name}, row {row} is {array[row]}, expected classes from 0 to {classes - 1}")
    return torch.from_numpy(array.astype(np.int64))


def _plain(origin: str, given: Any, name: str) -> NDArray[Any]:
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = given.float() if given.dtype == torch.bfloat16 else given  # which numpy does not know
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{origin}: {name} can't be made an array ({error})") from None


def judge(
    *sources: Source,
    logits: bool = False,
    bins: int = 15,
    retention: Sequence[float] | None = None,
    page: str | Path | None = None,
) -> list[Record]:
    """Measure predictions of any library as `evaluate` does, and return a record for each source.

    A source has ``probabilities``, ``log_probabilities`` or ``logits`` of shape (N, C), or (S, N, C) of S draws or
    members, whose probabilities are averaged, and ``labels`` (N,). It may have ``disagreement`` (N,),
    ``validation_labels`` and ``validation_probabilities`` (or the like) for a temperature, and ``method``, ``seed`` and
    ``dataset``. A CSV file has a column ``label``, and a column of probabilities for each class.

    Args:
        sources: ``.npz`` and ``.csv`` files, or mappings of arrays. Without ``method`` and ``seed``, files have
            their names: ``mine-seed3.npz`` is seed 3 of ``mine``. Files of one method are seeds of it.
        logits: the numbers of CSV files are logits.
        bins: of the calibration errors.
        retention: shares of the inputs to keep, by lowest entropy and disagreement; .2, .4, .6 and .8 by default.
        page: an HTML file to write the table and figures to.

    Example:
        >>> import peerbayes as pb, torch
        >>> p, labels = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]), torch.tensor([0, 1, 1])
        >>> (record,) = pb.judge({"method": "mine", "probabilities": p, "labels": labels})
        >>> print(pb.reports.text_table([record]))
                ACC    NLL    ECE
        mine  66.67  0.415  0.300
    """
    if not sources:
        raise InputError("there is nothing to judge: expected .npz or .csv files of predictions, or arrays")
    if page is not None:
        check_page(page, "page")
    files = [Path(source).expanduser().resolve() for source in sources if isinstance(source, str | Path)]
    for number, file in enumerate(files):
        if file in files[:number]:
            raise InputError(f"{file.name}: is given twice")
    fractions = Evaluation().retention if retention is None else list(retention)
    parsed = [read_predictions(source, logits) for source in sources]
    records = [_record(given, name, bins, fractions) for given, name in zip(parsed, _datasets(parsed), strict=True)]
    if page is not None:
        from peerbayes.reports.page import write_page

        write_page(Path(page), records, "Predictions judged")
    return records


def _record(given: Predictions, dataset: str, bins: int, fractions: Sequence[float]) -> Record:
    disagreement = torch.zeros(len(given.labels)) if given.disagreement is None else given.disagreement
    stochastic = given.disagreement is not None
    peer = scored(given.log_p, given.labels, disagreement, stochastic, bins, fractions)
    if given.held is not None:
        peer |= recalibrated(*given.held, given.log_p, given.labels, bins)
    return {
        "recipe": "judged",
        "dataset": dataset,
        "network": "",
        "method": given.method,
        "seed": given.seed,
        "folder": given.origin,
        "inputs": len(given.labels),
        "draws": given.draws,
        "settle": None,
        "ece_bins": bins,
        "versions": environment(torch.device("cpu"))["versions"],
        "peers": [{"name": "", **peer}],
    }


def _datasets(predictions: Sequence[Predictions]) -> list[str]:
    """Return a name of the data of each, by which they are compared: where none is given, labels tell them apart."""
    names: dict[tuple[str, bytes], str] = {}
    keys = []
    for given in predictions:
        dataset = given.dataset or f"{len(given.labels):,} inputs of {given.log_p.shape[1]} classes"
        keys.append((dataset, b"" if given.dataset else hashlib.sha256(given.labels.numpy().tobytes()).digest()))
        count = sum(name == dataset for name, _ in names)
        names.setdefault(keys[-1], f"{dataset} ({count + 1})" if count else dataset)
    return [names[key] for key in keys]
