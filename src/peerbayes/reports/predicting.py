"""What a trained run says of new images and texts, and how sure it is."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from peerbayes.data.datasets.folders import read_images
from peerbayes.data.splits import ArraySplit, FolderSplit, Split
from peerbayes.data.transforms.channels import Recoloured
from peerbayes.engine.devices import pick_device
from peerbayes.errors import InputError
from peerbayes.inference.prediction import entropy_of, mean_of
from peerbayes.reports.record import Record
from peerbayes.reports.tables import aligned
from peerbayes.runs.run import Run, peers_at


def predict_inputs(
    path: str | Path,
    inputs: str | Path | Sequence[str | Path],
    *,
    draws: int | None = None,
    device: str | torch.device = "auto",
    trust: bool = False,
) -> list[Record]:
    """Return the class of each input, its probability, and how unsure the network is; peers of a run predict as one.

    Args:
        path: a run folder, or a weights file of a run.
        inputs: image files and folders of images; for a run of texts, text files with a text a line, and texts.
        draws: of each peer; by default as many as the recipe judges with.
        device: where to predict.
        trust: allow what the run's recipe names as ``package.module:name``.
    """
    inputs = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not inputs:
        raise InputError("there is nothing to predict: expected image files, folders or texts")
    run, names = peers_at(path, trust=trust)
    where, vocabulary = pick_device(device), run.vocabulary
    draws = run.recipe.evaluation.draws if draws is None else draws
    split: Split
    if vocabulary is None:
        labels = _files(inputs)
        split = _images(run, labels)
    else:
        labels = _texts(inputs)
        split = ArraySplit(vocabulary.encode(labels), None)
    found = [run.predict_split(name, split, draws, where) for name in names]
    log_p = torch.stack([own for own, *_ in found])
    expected = torch.stack([entropy_of(own) - disagreement for own, _, disagreement, _ in found]).mean(0)
    return _records(run, "text" if vocabulary is not None else "file", labels, mean_of(log_p), expected)


def _records(run: Run, kind: str, labels: Sequence[str], log_p: Tensor, expected: Tensor) -> list[Record]:
    """Return a record an input, of log-probabilities (N, C) and the mean entropy of single draws (N,)."""
    known = run.about.get("class_names") or [str(number) for number in range(log_p.shape[1])]
    if len(set(known)) < len(known):
        known = [f"{number} {name}" for number, name in enumerate(known)]
    best, entropy = log_p.argmax(1).tolist(), entropy_of(log_p)
    unsure = (entropy - expected).clamp_min(0)
    return [
        {
            kind: label,
            "class": known[best[place]],
            "probability": float(log_p[place, best[place]].exp()),
            "entropy": float(entropy[place]),
            "disagreement": float(unsure[place]),
            "probabilities": dict(zip(known, log_p[place].exp().tolist(), strict=True)),
        }
        for place, label in enumerate(labels)
    ]


def prediction_table(records: Sequence[Record]) -> str:
    """Return predictions as lines of text, a line an input."""
    kind = next(iter(records[0]))
    lines = [[kind, "class", "probability", "entropy", "disagreement"]]
    for one in records:
        shown = " ".join(one[kind].split()) if kind == "text" else one[kind]
        lines.append([shown, one["class"], *(f"{one[key]:.3f}" for key in lines[0][2:])])
    return "\n".join(aligned(lines, 2))


def _files(inputs: Sequence[str | Path]) -> list[str]:
    found: list[str] = []
    for one in map(Path, inputs):
        if not one.exists():
            raise InputError(f"{one}: there is no such image file or folder")
        found += read_images(one).files if one.is_dir() else [str(one)]
    return found


def _images(run: Run, files: Sequence[str]) -> Split:
    channels, height, width = run.said("inputs")["shape"]
    if height != width or channels not in (1, 3):
        raise InputError(
            f"{run.folder}: takes inputs of shape {(channels, height, width)}; files give square images in grey or "
            "colours: predict arrays from Python"
        )
    split = FolderSplit(files, None, height, run.about.get("margin", 1.0))
    return Recoloured(split, 1) if channels == 1 else split


def _texts(inputs: Sequence[str | Path]) -> list[str]:
    found: list[str] = []
    for one in map(str, inputs):
        if os.path.isfile(one):  # which takes texts of any length
            try:
                lines = Path(one).read_text(encoding="utf-8-sig").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{one}: cannot be read as UTF-8 text, one a line ({error})") from None
            found += [line.strip() for line in lines if line.strip()]
        elif os.path.isdir(one) or (one.endswith((".txt", ".csv")) and not re.search(r"\s", one)):
            raise InputError(f"{one}: there is no such text file, with one a line")
        else:
            found.append(one)
    if not found:
        raise InputError(f"{', '.join(map(str, inputs))}: holds no texts, expected one a line")
    return found
