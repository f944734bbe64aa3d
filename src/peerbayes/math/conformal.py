"""Finite-sample guarantees: split conformal sets, and the risk of the images that are answered.

Both hold for images that come from where the calibration images came from, whatever the network is worth.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import scipy.stats
import torch
from torch import Tensor

from peerbayes.choices import SetMethod
from peerbayes.errors import InputError

Method = SetMethod


# ---- conformal sets --------------------------------------------------------------------------------------------------


def conformal_scores(probabilities: Tensor, method: Method = "lac", penalty: float = 0.0, rank: int = 0) -> Tensor:
    """Return how badly each class conforms, float64 (N, C): a set holds the classes whose score is low enough.

    ``lac``: ``1 − p_c``. ``aps``: ``Σ p_k`` over the classes k before c, in order of falling probability, so the most
    probable class scores 0 and is in every set. ``raps``: the same and ``penalty · max(0, place_c − rank)``, with
    places from 1.

    Args:
        probabilities: (N, C).
        method: ``lac``, ``aps`` or ``raps``.
        penalty: of a place beyond ``rank``; for ``raps``.
        rank: places without a penalty; for ``raps``.

    Example:
        >>> import torch
        >>> from peerbayes.math.conformal import conformal_scores
        >>> p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
        >>> conformal_scores(p).tolist(), conformal_scores(p, "aps").tolist()
        ([[0.5, 0.75, 0.75]], [[0.0, 0.5, 0.75]])
    """
    p = probabilities.double()
    if method == "lac":
        return 1 - p
    ordered, classes = p.sort(dim=-1, descending=True, stable=True)
    before = torch.cat([torch.zeros_like(ordered[:, :1]), ordered.cumsum(-1)[:, :-1]], 1)
    if method == "raps":
        before = before + penalty * (torch.arange(1, p.shape[1] + 1, device=p.device) - rank).clamp_min(0)
    return torch.empty_like(before).scatter_(1, classes, before)


def images_for_coverage(coverage: float) -> int:
    """Return the fewest calibration images with which a coverage can be promised: ``coverage / (1 − coverage)``.

    Example:
        >>> from peerbayes.math.conformal import images_for_coverage
        >>> images_for_coverage(0.9), images_for_coverage(0.99)
        (9, 99)
    """
    level = Fraction(str(coverage))
    return math.ceil(level / (1 - level))


def conformal_threshold(scores: Tensor, coverage: float) -> float:
    """Return the ``⌈(n + 1) coverage⌉``-th smallest score of the true classes of n images.

    Another image's true class then scores at most that with a probability of at least ``coverage``, and of less than
    ``coverage + 1 / (n + 1)`` where no two scores are equal.

    Args:
        scores: of the true classes, (n,).
        coverage: between 0 and 1.

    Example:
        >>> import torch
        >>> from peerbayes.math.conformal import conformal_threshold
        >>> conformal_threshold(torch.arange(1.0, 20.0), 0.9)  # 19 images: the 18th
        18.0
    """
    rank = math.ceil((len(scores) + 1) * Fraction(str(coverage)))
    if rank > len(scores):
        raise InputError(
            f"coverage {coverage} can't be promised with {len(scores)} calibration images; expected at least "
            f"{images_for_coverage(coverage)}"
        )
    return float(scores.double().sort().values[rank - 1])


# ---- risk ------------------------------------------------------------------------------------------------------------


def risk_p_values(errors: Tensor, answered: Tensor, risk: float) -> Tensor:
    """Return ``P(Binomial(answered, risk) ≤ errors)``, float64: exact p-values of "more than ``risk`` are wrong".

    Args:
        errors: wrong answers among those given.
        answered: how many were given; a p-value of none is 1.
        risk: share of wrong answers, between 0 and 1.

    Example:
        >>> import torch
        >>> from peerbayes.math.conformal import risk_p_values
        >>> risk_p_values(torch.tensor([0, 1]), torch.tensor([2, 2]), 0.5)
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    return torch.from_numpy(scipy.stats.binom.cdf(errors.cpu().numpy(), answered.cpu().numpy(), risk)).double()


def answers_for_risk(risk: float, delta: float, wrong: float = 0.0) -> int | None:
    """Return how many answers show that at most ``risk`` are wrong, with probability ``1 − delta``.

    Without mistakes that is ``⌈log delta / log(1 − risk)⌉``. None if no number does, as ``wrong`` is no less than
    ``risk``.

    Args:
        risk: share of wrong answers that is promised.
        delta: chance that the promise fails.
        wrong: share of wrong answers that is expected.

    Example:
        >>> from peerbayes.math.conformal import answers_for_risk
        >>> [answers_for_risk(0.05, 0.1, wrong) for wrong in (0, 0.03, 0.05)]
        [45, 282, None]
    """
    if wrong >= risk:
        return None

    def shown(count: int) -> bool:
        return bool(scipy.stats.binom.cdf(math.ceil(wrong * count), count, risk) <= delta)

    low, high = 0, math.ceil(math.log(delta) / math.log1p(-risk))
    while not shown(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high


class Answered(NamedTuple):
    """Answers given from a confidence on.

    Attributes:
        threshold: the confidence.
        answers: how many are given.
        errors: those that are wrong.

    Example:
        >>> from peerbayes.math.conformal import Answered
        >>> Answered(0.9, answers=45, errors=0).answers
        45
    """

    threshold: float
    answers: int
    errors: int


def answered_from(confidence: Tensor, correct: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many images are answered from each threshold on, and how many of these answers are wrong.

    Args:
        confidence: (n,).
        correct: (n,), whether each image's class is right.
        thresholds: (T,).

    Example:
        >>> import torch
        >>> from peerbayes.math.conformal import answered_from
        >>> answered_from(torch.tensor([0.5, 0.7, 0.9]), torch.tensor([False, True, True]), torch.tensor([0.7, 0.0]))
        (tensor([2, 3]), tensor([0, 1]))
    """
    ordered, order = confidence.sort(descending=True)
    wrong = torch.cat([torch.zeros(1, dtype=torch.int64), (~correct.bool())[order].long().cumsum(0)])
    count = torch.searchsorted(-ordered, -thresholds.to(ordered), right=True)
    return count, wrong[count]


def risk_sequence(confidence: Tensor, correct: Tensor, risk: float, delta: float, times: float) -> Tensor:
    """Return thresholds in the order in which they are tested, from images that are not those of the test.

    The first is the most careful one that is nearly as likely as any to pass its test; those that follow answer more
    and more, up to all. How likely that is follows from the errors here, and from what the confidences expect, which
    counts as much as ``1 / risk`` images. A bad guess costs the promise, never its truth.

    Args:
        confidence: (n,).
        correct: (n,).
        risk: share of wrong answers, between 0 and 1.
        delta: level of a test.
        times: how many times as many images the test has.

    Example:
        >>> import torch
        >>> from peerbayes.math.conformal import risk_sequence
        >>> confidence = torch.linspace(0, 1, 101)
        >>> sequence = risk_sequence(confidence, confidence > 0.25, risk=0.1, delta=0.1, times=3)
        >>> float(sequence[0]) > 0.25, float(sequence[-1])
        (True, 0.0)
    """
    thresholds = torch.cat([confidence.double().unique().flip(0), torch.zeros(1, dtype=torch.float64)])
    count, errors = (found.double() for found in answered_from(confidence.double(), correct, thresholds))
    doubt = (1 - confidence.double()).sort().values.cumsum(0)
    expected = torch.cat([torch.zeros(1, dtype=torch.float64), doubt])[count.long()] / count.clamp_min(1)
    # A gamma law of the share of errors, and so few answers as the test's images give but once in 40 times.
    shape, rate = errors + expected / risk + 0.2, count + 1 / risk
    answers = (times * count).round()
    fewest = answers - 2 * (answers * (1 - count / max(1, len(confidence))) * (1 + times)).sqrt()
    allowed = scipy.stats.binom.ppf(delta, fewest.clamp_min(0).floor().numpy(), risk) - 1
    passed = scipy.stats.nbinom.cdf(allowed, shape.numpy(), (rate / (rate + answers)).numpy())
    return thresholds[int((passed >= 0.99 * passed.max()).argmax()) :]


def risk_threshold(confidence: Tensor, correct: Tensor, sequence: Tensor, risk: float, delta: float) -> Answered | None:
    """Return the last threshold of a sequence up to which every test shows that at most ``risk`` are wrong.

    Learn then Test with fixed-sequence testing: thresholds are tested in an order that these images have not chosen,
    each at the whole ``delta``, until a test fails. So the threshold that is returned has more wrong answers than
    ``risk`` with a probability of at most ``delta``. None if already the first test fails.

    Args:
        confidence: (n,).
        correct: (n,).
        sequence: thresholds, (T,), such as `risk_sequence` chooses on other images.
        risk: share of wrong answers, between 0 and 1.
        delta: chance that the promise fails.

    Example:
        >>> import torch
        >>> from peerbayes.math.conformal import risk_threshold
        >>> confidence = torch.cat([torch.full((60,), 0.9), torch.full((20,), 0.4)])
        >>> correct = confidence > 0.5
        >>> risk_threshold(confidence, correct, torch.tensor([0.9, 0.4]), risk=0.05, delta=0.1).answers
        60
    """
    count, errors = answered_from(confidence.double(), correct, sequence)
    failed = (risk_p_values(errors, count, risk) > delta).nonzero()
    last = (int(failed[0]) if len(failed) else len(sequence)) - 1
    return None if last < 0 else Answered(float(sequence[last]), int(count[last]), int(errors[last]))
