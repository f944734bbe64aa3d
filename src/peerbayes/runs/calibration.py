"""Temperatures of trained peers, fitted on a split that they have not learnt, and kept with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from peerbayes import metrics
from peerbayes.data.splits import Split
from peerbayes.errors import InputError
from peerbayes.inference.prediction import mean_of, predict_split
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior


def fit_temperatures(
    peers: Mapping[str, Posterior], split: Split, draws: int, seed: int
) -> tuple[dict[str, float], float]:
    """Return the temperature of every peer, and that of all as one: those of least NLL, of averaged probabilities.

    None makes predictions surer where hardly any is wrong, see `peerbayes.metrics.safe_temperature`.

    They are fitted to the draws that evaluation judges, so on the validation split they are those of its records.

    Args:
        peers: posteriors by name.
        split: what they have not learnt, with labels.
        draws: draws averaged.
        seed: with the peers' names, the address of the draws.
    """
    if split.labels is None:
        raise InputError("the images have no labels to fit temperatures to")
    log_p = []
    for name, posterior in peers.items():
        log_p.append(predict_split(posterior, split, draws, seed=seed, name=name)[0])
        bad = int(log_p[-1].isnan().any(1).sum())
        if bad:
            raise InputError(f"peer '{name}': {bad} of {len(log_p[-1])} predictions are not numbers (NaN)")
    each = {name: metrics.safe_temperature(own, split.labels) for name, own in zip(peers, log_p, strict=True)}
    alone = next(iter(each.values()))
    return each, alone if len(each) == 1 else metrics.safe_temperature(mean_of(torch.stack(log_p)), split.labels)


def keep_temperature(posterior: Posterior, temperature: float, weights: Path) -> None:
    """Give a posterior a temperature, also in its weights file, whose tensors stay as they are to the last bit."""
    posterior.temperature = temperature
    storage.describe(weights, temperature=None if temperature == 1 else temperature)
