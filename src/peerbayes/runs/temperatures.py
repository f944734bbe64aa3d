"""Temperatures and certificates of trained peers, of a split that they have not learnt, kept with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scipy  # its submodules are imported on first use
import torch
from torch import Tensor

from peerbayes import metrics
from peerbayes.data.splits import Split
from peerbayes.errors import InputError
from peerbayes.inference.guarantees import Labelled, Promises, coverage_promise, parts, risk_promise
from peerbayes.inference.prediction import mean_of, predict_split
from peerbayes.metrics.calibration import TEMPERATURE_WIDTH
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.certificate import Certificate


def fit_temperatures(
    peers: Mapping[str, Posterior], split: Split, draws: int, seed: int
) -> tuple[dict[str, float], float]:
    """Return the temperature of every peer, and that of all as one: those of least NLL, of averaged probabilities.

    They are fitted to the draws that evaluation takes, so on the validation split they are those of its records.

    Args:
        peers: posteriors by name.
        split: what they have not learnt, with labels.
        draws: draws averaged.
        seed: with the peers' names, the address of the draws.
    """
    log_p, labels = _predicted(peers, split, draws, seed)
    each = {
        name: metrics.fit_temperature(predictions, labels, width=TEMPERATURE_WIDTH)
        for name, predictions in log_p.items()
    }
    alone = next(iter(each.values()))
    return each, alone if len(each) == 1 else metrics.fit_temperature(_as_one(log_p), labels, width=TEMPERATURE_WIDTH)


def certify(
    peers: Mapping[str, Posterior], split: Split, draws: int, seed: int, promises: Promises, data: str
) -> Certificate:
    """Return the certificate of all peers as one; refuse promises that so many images do not show.

    A quarter of the images fits the temperature and chooses the order in which thresholds are tested; only the others,
    which nothing has seen, choose the thresholds.

    Args:
        peers: posteriors by name.
        split: what they have not learnt, with labels.
        draws: draws averaged, of each peer.
        seed: with the peers' names, the address of the draws; also of the split into two parts.
        promises: what is to be promised.
        data: name of the images' data set.
    """
    log_p, labels = predicted_as_one(peers, split, draws, seed)
    return certificate_of(log_p, labels, promises, seed, draws, data, next(iter(peers.values())).class_names)


def predicted_as_one(peers: Mapping[str, Posterior], split: Split, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return log p̄ (N, C) of all peers as one at temperature 1, and the labels (N,).

    Args:
        peers: posteriors by name.
        split: with labels.
        draws: draws averaged, of each peer.
        seed: with the peers' names, the address of the draws.
    """
    log_p, labels = _predicted(peers, split, draws, seed)
    return _as_one(log_p), labels


def certificate_of(
    log_p: Tensor,
    labels: Tensor,
    promises: Promises,
    seed: int,
    draws: int,
    data: str,
    class_names: Any = None,
) -> Certificate:
    """Return the certificate of predictions at temperature 1, (N, C); see `certify`.

    Args:
        log_p: log-probabilities (N, C).
        labels: (N,).
        promises: what is to be promised.
        seed: of the split into two parts.
        draws: that the probabilities are averages of.
        data: name of the images' data set.
        class_names: of the C classes, for messages.
    """
    classes = log_p.shape[1]
    names = class_names or [str(number) for number in range(classes)]
    fitted, shown = parts(len(labels), seed)
    if not len(fitted) or not len(shown):
        raise InputError(f"{data}: has {len(labels)} validation inputs, too few to promise anything with")
    temperature = metrics.fit_temperature(log_p[fitted], labels[fitted], width=TEMPERATURE_WIDTH)
    tempered = log_p if temperature == 1 else metrics.temper(log_p, temperature)
    choosing, showing = (Labelled(tempered[part], labels[part]) for part in (fitted, shown))
    made = choosing, showing, promises, names
    return Certificate(
        data=data,
        images=len(shown),
        fitted=len(fitted),
        seed=seed,
        draws=draws,
        temperature=temperature,
        classes=classes,
        coverage=None if promises.coverage is None else coverage_promise(*made),
        risk=None if promises.risk is None else risk_promise(*made),
    )


def _predicted(peers: Mapping[str, Posterior], split: Split, draws: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return log p̄ (N, C) of every peer at temperature 1, and the labels."""
    if split.labels is None:
        raise InputError("the images have no labels to fit temperatures to")
    log_p = {}
    for name, posterior in peers.items():
        log_p[name] = predict_split(posterior, split, draws, seed=seed, name=name)[0]
        bad = int(log_p[name].isnan().any(1).sum())
        if bad:
            raise InputError(f"peer '{name}': {bad} of {len(log_p[name])} predictions are not numbers (NaN)")
    return log_p, split.labels


def _as_one(log_p: Mapping[str, Tensor]) -> Tensor:
    (first, *others) = log_p.values()
    return mean_of(torch.stack([first, *others])) if others else first


LEARNT = 1e-4  # probability below which two splits of one kind are not that different by chance


def learnt_by(held: float, held_count: int, test: float, test_count: int) -> str:
    """Return that a network has most likely learnt its validation inputs, as the end of a sentence; else ''.

    Two splits of one kind, neither of which was learnt, have mistakes at the same rate: Fisher's exact test, one-sided.

    Args:
        held: accuracy of the validation split.
        held_count: its inputs.
        test: accuracy of the test split.
        test_count: its inputs.
    """
    if not held_count or not test_count:
        return ""
    right, right_test = round(held * held_count), round(test * test_count)
    table = [[right, held_count - right], [right_test, test_count - right_test]]
    if scipy.stats.fisher_exact(table, alternative="greater").pvalue >= LEARNT:
        return ""
    return (
        f"the network is right about {100 * held:.1f} % of the {held_count:,} validation inputs, but {100 * test:.1f} "
        f"% of the {test_count:,} test inputs: most likely it has learnt the former. Give a validation split that it "
        "has not learnt, such as a folder val/ beside train/ (validation= of peerbayes.data.load)"
    )


def keep_temperature(
    posterior: Posterior, temperature: float, weights: Path, certificate: Certificate | None = None
) -> None:
    """Give a posterior a temperature, also in its weights file, whose tensors stay as they are to the last bit.

    A certificate is of one temperature: the one it had before is gone.

    Args:
        posterior: changed.
        temperature: that its logits are divided by.
        weights: its file, changed.
        certificate: what is promised of predictions at that temperature.
    """
    posterior.temperature, posterior.certificate = temperature, certificate
    promised = None if certificate is None else certificate.model_dump(exclude_none=True)
    storage.describe(weights, temperature=None if temperature == 1 else temperature, certificate=promised)
