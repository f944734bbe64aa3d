"""What a trained run says of new images and texts, as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from peerbayes.inference.prediction import Prediction
from peerbayes.reports.record import Record
from peerbayes.runs.run import peers_at
from peerbayes.showing import aligned


def predict_inputs(
    path: str | Path,
    inputs: str | Path | Sequence[str | Path],
    *,
    coverage: float | None = None,
    risk: float | None = None,
    draws: int | None = None,
    calibrated: bool = True,
    device: str | torch.device = "auto",
    trust: bool = False,
) -> list[Record]:
    """Return the class of each input, its probability, and how unsure the network is; peers of a run predict as one.

    Args:
        path: a run folder, or a weights file of a run.
        inputs: as `Run.predict` takes them.
        coverage: also sets of classes, as its certificate promises; see `Run.predict`.
        risk: also what to abstain from, as its certificate promises.
        draws: of each peer; by default as many as the recipe evaluates with.
        calibrated: temper by the temperature that is kept with the weights.
        device: where to predict.
        trust: allow what the run's recipe names as ``package.module:name``.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> import numpy as np
        >>> from PIL import Image
        >>> Image.fromarray(np.zeros((8, 8), np.uint8)).save(f"{folder.name}/a.png")
        >>> (record,) = pb.reports.predict_inputs(run.folder, f"{folder.name}/a.png", device="cpu")
        >>> 0 < record["probability"] <= 1
        True
        >>> folder.cleanup()
    """
    promised = {"coverage": coverage, "risk": risk}
    how: dict[str, Any] = {**promised, "draws": draws, "calibrated": calibrated, "device": device, "trust": trust}
    return [record for batch in predictions_at(path, inputs, **how) for record in batch.records()]


def predictions_at(path: str | Path, inputs: Any, *, trust: bool = False, **how: Any) -> Iterator[Prediction]:
    """Yield the predictions of a run folder, or of a weights file of a run, batch by batch.

    Args:
        path: a run folder, whose peers predict as one, or a weights file of a run.
        inputs: as `Run.predict` takes them.
        trust: allow what the run's recipe names as ``package.module:name``.
        how: what `Run.predict_batches` takes besides.
    """
    run, names = peers_at(path, trust=trust)
    return run.predict_batches(inputs, None if names == list(run) else names[0], **how)


def prediction_table(records: Sequence[Record]) -> str:
    """Return predictions as lines of text, a line an input."""
    kind = next(iter(records[0]))
    lines = [[kind, "class", "probability", "entropy", "disagreement"]]
    for record in records:
        shown = " ".join(record[kind].split()) if kind == "text" else record[kind]
        lines.append([shown, record["class"], *(f"{record[key]:.3f}" for key in lines[0][2:])])
    return "\n".join(aligned(lines, 2))
