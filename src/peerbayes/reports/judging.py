"""The verb `judge`: predictions of any library, from files or memory, measured as `evaluate` measures a run's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from peerbayes.engine.processes import environment
from peerbayes.errors import InputError
from peerbayes.recipes.settings import Evaluation
from peerbayes.reports.prediction_files import Predictions, Source, read_predictions
from peerbayes.reports.record import Record, check_page
from peerbayes.reports.scoring import recalibrated, scored


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
    found = [read_predictions(source, logits) for source in sources]
    records = [_record(given, name, bins, fractions) for given, name in zip(found, _datasets(found), strict=True)]
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


def _datasets(found: Sequence[Predictions]) -> list[str]:
    """Return a name of the data of each, by which they are compared: where none is given, labels tell them apart."""
    names: dict[tuple[str, bytes], str] = {}
    keys = []
    for given in found:
        own = given.dataset or f"{len(given.labels):,} inputs of {given.log_p.shape[1]} classes"
        keys.append((own, b"" if given.dataset else hashlib.sha256(given.labels.numpy().tobytes()).digest()))
        count = sum(name == own for name, _ in names)
        names.setdefault(keys[-1], f"{own} ({count + 1})" if count else own)
    return [names[key] for key in keys]
