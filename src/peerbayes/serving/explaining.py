"""An answer in plain words: how unsure it is, and why it is given or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from peerbayes.inference.prediction import Prediction

ASK = "`peerbayes calibrate RUN --coverage .9 --risk .05` makes promises; then serve the run again"


def answers(prediction: Prediction, passes: int) -> Iterator[dict[str, Any]]:
    """Yield what is said of each input, JSON-ready: `Prediction.records`, and plain words.

    Args:
        prediction: of all inputs of a request.
        passes: how many networks it is the average of.
    """
    raw = prediction.raw.entropy.tolist()
    for index, record in enumerate(prediction.records()):
        answer = {"input": record.pop(prediction.kind), "set": None, "abstain": None} | record
        words = [_entropy(answer), _disagreement(answer, raw[index], passes), _answered(prediction, index, answer)]
        yield answer | {"explanation": [*words, _set(prediction, answer)]}


def _entropy(answer: dict[str, Any]) -> str:
    classes = len(answer["probabilities"])
    return (
        f"Entropy {answer['entropy']:.3f} nats: as unsure as a choice among {math.exp(answer['entropy']):.2f} equally "
        f"probable classes, of {classes}."
    )


def _disagreement(answer: dict[str, Any], raw: float, passes: int) -> str:
    if passes == 1:
        return "Disagreement 0: one network with one set of weights predicts, which nothing could disagree with."
    share = min(1.0, answer["disagreement"] / raw) if raw > 0 else 0.0
    return (
        f"Disagreement {answer['disagreement']:.3f} nats (mutual information): {100 * share:.0f} % of the doubt is "
        f"that {passes} networks differ, as on inputs unlike those they have learnt; the rest they share, as where an "
        "input fits several classes."
    )


def _answered(prediction: Prediction, index: int, answer: dict[str, Any]) -> str:
    promise = None if prediction.certificate is None else prediction.certificate.risk
    if promise is None:
        return f"It never abstains: no risk is promised of its answers. {ASK}."
    number = int(prediction.classes[index])
    threshold = promise.thresholds[number if len(promise.thresholds) > 1 else 0]
    said = (
        f"the probability of '{answer['class']}' is {answer['probability']:.4g}, and from {threshold:.4g} on at most "
        f"{100 * promise.level:g} % of answers are wrong (promised with probability {1 - promise.delta:g}, shown on "
        f"{sum(promise.images):,} inputs)."
    )
    return f"It abstains: {said}" if answer["abstain"] else f"It answers: {said}"


def _set(prediction: Prediction, answer: dict[str, Any]) -> str:
    promise = None if prediction.certificate is None else prediction.certificate.coverage
    if promise is None:
        explained = prediction.certificate is None or prediction.certificate.risk is None  # by what says why it answers
        return "There is no set of classes: no coverage is promised." + ("" if explained else f" {ASK}.")
    count = len(answer["set"])
    what = "no class" if count == 0 else "one class" if count == 1 else f"{count} classes"
    return (
        f"The set has {what}; sets hold the true class with probability {promise.level:g} ({promise.method.upper()}, "
        f"shown on {sum(promise.images):,} inputs)."
    )
