"""Certify predictions on labelled images: thresholds that keep a coverage or a risk, or why there are none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peerbayes.data.splits import order
from peerbayes.errors import InputError, nearest
from peerbayes.math.conformal import (
    Method,
    answered_from,
    answers_for_risk,
    conformal_scores,
    conformal_threshold,
    images_for_coverage,
    risk_p_values,
    risk_sequence,
    risk_threshold,
)
from peerbayes.math.noise import Address
from peerbayes.posteriors.certificate import CoveragePromise, RiskPromise, check_level

FITTED = 0.25  # share of the images that choose the temperature and the order of tests, and promise nothing
PENALTY = 0.01  # of a place, of RAPS


@dataclass(frozen=True)
class Promises:
    """Promises to make.

    Attributes:
        coverage: probability that a set holds the true class; None for no sets.
        risk: most wrong answers among those that are given; None for an answer to every image.
        delta: probability that the risk is larger than promised.
        method: of the sets: ``lac``, ``aps`` or ``raps``.
        by_class: whether coverage holds for every true class, and risk for every predicted class.
    """

    coverage: float | None = None
    risk: float | None = None
    delta: float = 0.1
    method: Method = "lac"
    by_class: bool = False

    def __post_init__(self) -> None:
        for name in ("coverage", "risk", "delta"):
            check_level(name, getattr(self, name))
        if self.method not in ("lac", "aps", "raps"):
            raise InputError(
                f"there is no method '{self.method}' of sets{nearest(self.method, ('lac', 'aps', 'raps'))}"
            )
        if self.by_class and not self.any:
            raise InputError("by_class says how coverage or risk is promised; give one of them, too")
        if self.method != "lac" and self.coverage is None:
            raise InputError("method says how coverage is promised; give a coverage, too")
        if self.delta != 0.1 and self.risk is None:
            raise InputError("delta says how risk is promised; give a risk, too")

    @property
    def any(self) -> bool:
        """Whether there is anything to promise."""
        return self.coverage is not None or self.risk is not None


def parts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the images that choose, and of those that certify, in a random order.

    Args:
        count: number of images.
        seed: of the order.
    """
    shuffled = order(count, Address(seed, "data", "certify"))
    first = math.ceil(FITTED * count)
    return shuffled[:first], shuffled[first:]


@dataclass(frozen=True)
class Labelled:
    """Predictions with their labels.

    Attributes:
        log_probabilities: tempered, (N, C).
        labels: (N,).
    """

    log_probabilities: Tensor
    labels: Tensor

    @property
    def surest(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probability and number of the most probable class, and whether it is right."""
        confidence, classes = self.log_probabilities.double().exp().max(-1)
        return confidence, classes, classes == self.labels


def coverage_promise(
    choosing: Labelled, showing: Labelled, promises: Promises, names: Sequence[str]
) -> CoveragePromise:
    """Return thresholds of sets; raise if there are too few images for the coverage.

    Args:
        choosing: images that choose the rank of RAPS, which includes the true class often enough.
        showing: images that choose the thresholds.
        promises: the promises to make.
        names: of the classes.
    """
    assert promises.coverage is not None
    level, method = promises.coverage, promises.method
    how: dict[str, Any] = {}
    if method == "raps":
        places = (choosing.log_probabilities > _of_true(choosing.log_probabilities, choosing)[:, None]).sum(-1) + 1
        how = {"penalty": PENALTY, "rank": int(places.double().quantile(level, interpolation="higher"))}
    scores = conformal_scores(showing.log_probabilities.double().exp(), method, **how)
    true_scores = _of_true(scores, showing)
    thresholds, counts = [], []
    for number in range(len(names)) if promises.by_class else (None,):
        of_class = true_scores if number is None else true_scores[showing.labels == number]
        if len(of_class) < (fewest := images_for_coverage(level)):
            of = "" if number is None else f" of class '{names[number]}'"
            raise InputError(_too_few(f"coverage {level:g}", len(of_class), fewest, of))
        thresholds.append(conformal_threshold(of_class, level))
        counts.append(len(of_class))
    return CoveragePromise(level=level, method=method, thresholds=thresholds, images=counts, **how)


def risk_promise(choosing: Labelled, showing: Labelled, promises: Promises, names: Sequence[str]) -> RiskPromise:
    """Return the least probability of an answer; raise if the images do not show the risk.

    By class, each has its share ``delta / C``, so that all of them hold together.

    Args:
        choosing: images that choose the order of tests.
        showing: images for the tests.
        promises: the promises to make.
        names: of the classes.
    """
    assert promises.risk is not None
    risk, groups = promises.risk, range(len(names)) if promises.by_class else (None,)
    delta, times = promises.delta / len(groups), len(showing.labels) / len(choosing.labels)
    found, counts = [], []
    for number in groups:
        sequence = risk_sequence(*_answers(choosing, number), risk, delta, times)
        confidence, correct = _answers(showing, number)
        best = risk_threshold(confidence, correct, sequence, risk, delta)
        if best is None:
            of = "" if number is None else f" predicted as class '{names[number]}'"
            raise InputError(_no_risk(confidence, correct, sequence, promises, delta, of))
        found.append(best)
        counts.append(len(confidence))
    thresholds, answered, errors = (list(values) for values in zip(*found, strict=True))
    about: dict[str, Any] = {"thresholds": thresholds, "images": counts, "answered": answered, "errors": errors}
    return RiskPromise(level=risk, delta=promises.delta, **about)


def _of_true(values: Tensor, images: Labelled) -> Tensor:
    return values.gather(1, images.labels[:, None])[:, 0]


def _answers(images: Labelled, number: int | None) -> tuple[Tensor, Tensor]:
    """Return confidence and correctness of the images predicted as a class, or of all images."""
    confidence, classes, correct = images.surest
    chosen = slice(None) if number is None else classes == number
    return confidence[chosen], correct[chosen]


def _too_few(promise: str, count: int, fewest: int, of: str) -> str:
    return (
        f"{promise} can't be promised: it needs at least {fewest} calibration inputs{of}, and there are {count}; "
        f"hold out {math.ceil(fewest / (1 - FITTED))} validation inputs{of}, a quarter of which fit the temperature"
    )


def _no_risk(confidence: Tensor, correct: Tensor, sequence: Tensor, promises: Promises, delta: float, of: str) -> str:
    """Return why a risk can't be promised, and how many images it needs."""
    assert promises.risk is not None
    promise = f"risk {promises.risk:g} (delta {promises.delta:g})"
    fewest = answers_for_risk(promises.risk, delta)
    assert fewest is not None
    if len(confidence) < fewest:
        return _too_few(promise, len(confidence), fewest, of)
    counts, wrong = answered_from(confidence, correct, sequence)
    p = risk_p_values(wrong, counts, promises.risk)
    closest = int(p.argmin()) if float(p.min()) > delta else 0
    count, errors = int(counts[closest]), int(wrong[closest])
    reason = (
        f"{promise} can't be promised: of the {count:,} most certain of {len(confidence):,} inputs{of} {errors} are "
        "wrong"
    )
    needed = answers_for_risk(promises.risk, delta, errors / max(1, count))
    if needed is None or not count:
        alone = ", or coverage alone" * (promises.coverage is not None)
        return f"{reason}, and no number of such inputs would show it; promise a higher risk{alone}"
    enough = math.ceil(needed * len(confidence) / count / (1 - FITTED))
    return f"{reason}; about {enough:,} validation inputs{of} would show it, or promise a higher risk"
