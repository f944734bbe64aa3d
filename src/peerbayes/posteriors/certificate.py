"""What is promised of a posterior's predictions, on which images that was shown, and the thresholds that keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.math.conformal import conformal_scores
from peerbayes.schema import Strict

Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


class CoveragePromise(Strict):
    """Sets hold the true class with a probability of at least ``level``.

    Attributes:
        level: the coverage.
        method: of the scores; see `peerbayes.math.conformal.conformal_scores`.
        thresholds: highest score of a class in a set; one, or one for each class.
        images: calibration images behind each threshold.
        penalty: of a place beyond ``rank``; of ``raps``.
        rank: places without a penalty; of ``raps``.

    Example:
        >>> from peerbayes.posteriors import CoveragePromise
        >>> CoveragePromise(level=0.9, method="lac", thresholds=[0.75], images=[200]).level
        0.9
    """

    level: Share
    method: Literal["lac", "aps", "raps"]
    thresholds: Annotated[list[float], Field(min_length=1)]
    images: Annotated[list[Count], Field(min_length=1)]
    penalty: Annotated[float, Field(ge=0)] = 0.0
    rank: Count = 0


class RiskPromise(Strict):
    """With a probability of ``1 − delta`` at most ``level`` of the answers are wrong.

    Attributes:
        level: share of wrong answers.
        delta: chance that the promise fails; where there is a threshold for each class, for any of them.
        thresholds: probability of the most probable class from which on it is answered; one, or one for each class.
        images: calibration images behind each threshold.
        answered: how many of them are answered.
        errors: how many of these answers are wrong.

    Example:
        >>> from peerbayes.posteriors import RiskPromise
        >>> RiskPromise(level=0.05, delta=0.1, thresholds=[0.8], images=[100], answered=[90], errors=[1]).delta
        0.1
    """

    level: Share
    delta: Share
    thresholds: Annotated[list[float], Field(min_length=1)]
    images: Annotated[list[Count], Field(min_length=1)]
    answered: Annotated[list[Count], Field(min_length=1)]
    errors: Annotated[list[Count], Field(min_length=1)]


class Certificate(Strict):
    """Promises of predictions, and what they were shown on; kept with the weights.

    Attributes:
        data: the data set that the images came from.
        images: that the promises were shown on.
        fitted: other images, which chose the temperature and the order of tests.
        seed: of the split into both.
        draws: of each peer, that probabilities are averages of.
        temperature: of these averages.
        classes: how many there are.
        coverage: of prediction sets.
        risk: of answers.

    Example:
        >>> import torch
        >>> from peerbayes.posteriors import Certificate, CoveragePromise
        >>> sets = CoveragePromise(level=0.9, method="lac", thresholds=[0.75], images=[200])
        >>> about = {"data": "digits", "images": 200, "fitted": 66, "seed": 0, "draws": 1, "temperature": 1.0}
        >>> certificate = Certificate(**about, classes=3, coverage=sets)
        >>> certificate.sets(torch.tensor([[0.5, 0.3, 0.2]]).log())
        tensor([[ True,  True, False]])
    """

    data: str
    images: Count
    fitted: Count
    seed: int
    draws: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(gt=0)]
    classes: Annotated[int, Field(ge=1)]
    coverage: CoveragePromise | None = None
    risk: RiskPromise | None = None

    @model_validator(mode="after")
    def _one_or_each(self) -> Certificate:
        for name, promise in (("coverage", self.coverage), ("risk", self.risk)):
            for field, values in promise or ():
                if isinstance(values, list) and len(values) not in (1, self.classes):
                    raise ValueError(f"{name}.{field} has {len(values)} values; expected 1 or {self.classes}")
        return self

    def sets(self, log_probabilities: Tensor) -> Tensor:
        """Return which classes each image may have, bool (N, C), of tempered log-probabilities (N, C)."""
        assert self.coverage is not None
        promise = self.coverage
        p = log_probabilities.double().exp()
        scores = conformal_scores(p, promise.method, promise.penalty, promise.rank)
        return scores <= torch.tensor(promise.thresholds, dtype=torch.float64, device=scores.device)

    def abstain(self, log_probabilities: Tensor) -> Tensor:
        """Return which images are not answered, bool (N,), of tempered log-probabilities (N, C)."""
        assert self.risk is not None
        confidence, classes = log_probabilities.double().exp().max(-1)
        thresholds = torch.tensor(self.risk.thresholds, dtype=torch.float64, device=confidence.device)
        return confidence < (thresholds[classes] if len(thresholds) > 1 else thresholds)

    def promising(self, coverage: float | None, risk: float | None, origin: str, how: str = "") -> Certificate:
        """Return the certificate with the promises that are asked for alone; refuse others than it makes.

        Args:
            coverage: of prediction sets; None for no sets.
            risk: of answers; None for an answer to every image.
            origin: where it is kept, which begins the sentence.
            how: others are promised, which ends it; by default the line that calibrates.
        """
        chosen = {}
        for name, level, promise in (("coverage", coverage, self.coverage), ("risk", risk, self.risk)):
            if level is None:
                continue
            if promise is None or promise.level != level:
                promised = "" if promise is None else f", but {promise.level}"
                how = how or how_to(origin, coverage, risk)
                raise InputError(f"{origin}: {name} {level} is not promised{promised}; {how}")
            chosen[name] = promise
        return self.model_copy(update={"coverage": None, "risk": None} | chosen)

    def keeping(self, before: Certificate | None) -> Certificate:
        """Return the certificate with promises of an earlier one that it does not make, if their images are the same.

        The same images, draws and seed give the same temperature, by which others are told.

        Args:
            before: the earlier one, if there was any.
        """
        promises = ("coverage", "risk")
        if before is None or any(
            getattr(self, name) != getattr(before, name) for name in type(self).model_fields if name not in promises
        ):
            return self
        missing = {name: getattr(before, name) for name in promises if getattr(self, name) is None}
        return self.model_copy(update=missing)

    def describe(self, names: Sequence[str] | None = None) -> list[str]:
        """Return the promises as sentences; ``names`` are those of the classes."""
        sentences = []
        if self.coverage is not None:
            each = ", whichever it is" * (len(self.coverage.thresholds) > 1)
            sentences.append(
                f"{self.coverage.method.upper()} sets hold the true class with probability {self.coverage.level}{each} "
                f"({self.images:,} inputs; scores up to {_values(self.coverage.thresholds, names)})"
            )
        if self.risk is not None:
            each = " of every class" * (len(self.risk.thresholds) > 1)
            share, delta = sum(self.risk.answered) / max(1, self.images), self.risk.delta
            sentences.append(
                f"with probability {1 - delta:g}, at most {100 * self.risk.level:g} % of answers{each} are wrong "
                f"({self.images:,} inputs, {100 * share:.1f} % answered, {sum(self.risk.errors)} wrong; "
                f"probabilities from {_values(self.risk.thresholds, names)} on)"
            )
        return sentences


def check_level(name: str, level: object) -> None:
    """Refuse a coverage, a risk or the like that is no number between 0 and 1; None is none.

    Args:
        name: what it is.
        level: its value.
    """
    if level is not None and not (isinstance(level, int | float) and 0 < level < 1):
        raise InputError(f"{name} is {level!r}, expected a number between 0 and 1")


def how_to(origin: str, coverage: float | None, risk: float | None, adopted: bool = False) -> str:
    """Return how promises are made, as the end of a sentence.

    Args:
        origin: the run or posterior.
        coverage: that is promised, if any.
        risk: that is promised, if any.
        adopted: whether the validation images have chosen something, so that others have to promise it.
    """
    options = "".join(f" --{name} {level}" for name, level in (("coverage", coverage), ("risk", risk)) if level)
    others = " --data IMAGES" if adopted else ""
    return f"`peerbayes calibrate {origin}{options}{others}` promises it" + ", by images that chose nothing" * adopted


def _values(values: Sequence[float], names: Sequence[str] | None) -> str:
    if len(values) == 1:
        return f"{values[0]:.4g}"
    named = names or [str(number) for number in range(len(values))]
    return ", ".join(f"{value:.4g} ({name})" for name, value in zip(named, values, strict=True))
