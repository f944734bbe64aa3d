"""What has been promised of predictions, and what labelled inputs say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import scipy.stats
import torch
from torch import Tensor

from peerbayes import metrics
from peerbayes.posteriors.certificate import Certificate
from peerbayes.reports.record import Record
from peerbayes.reports.tables import ENSEMBLE, grouped, title

LEVEL = 0.05  # chance of a count that a true promise is not blamed for


def certified(certificate: Certificate, log_p: Tensor, labels: Tensor) -> Record:
    """Return a certificate, with what is found of its promises on other inputs: counts, and counts by class.

    Args:
        certificate: what is promised.
        log_p: log-probabilities (N, C) at temperature 1, of as many draws as were certified.
        labels: (N,).
    """
    tempered = log_p if certificate.temperature == 1 else metrics.temper(log_p, certificate.temperature)
    result: Record = {"images": len(labels)}
    predicted = tempered.argmax(-1)
    if (coverage := certificate.coverage) is not None:
        sets = certificate.sets(tempered)
        held = sets.gather(1, labels[:, None])[:, 0]
        result["coverage"] = {"held": int(held.sum()), "size": float(sets.sum(-1).double().mean())}
        if len(coverage.thresholds) > 1:
            counted = {"images": torch.ones_like(held), "held": held}
            result["coverage"]["by_class"] = _by_class(certificate.classes, labels, counted)
    if (risk := certificate.risk) is not None:
        answered = ~certificate.abstain(tempered)
        wrong = answered & (predicted != labels)
        result["risk"] = {"answered": int(answered.sum()), "errors": int(wrong.sum())}
        if len(risk.thresholds) > 1:
            counted = {"answered": answered, "errors": wrong}
            result["risk"]["by_class"] = _by_class(certificate.classes, predicted, counted)
    return {**certificate.model_dump(exclude_none=True), "found": result}


def _by_class(classes: int, of_class: Tensor, counted: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: torch.bincount(of_class[chosen], minlength=classes).tolist() for name, chosen in counted.items()}


@dataclass(frozen=True)
class Promise:
    """A line of a certificate: what was promised, how that was shown, and what was found.

    Attributes:
        record: whose it is.
        peer: of these predictions; ``ensemble`` for all peers as one.
        promised: the promise.
        shown: on how many inputs of which data.
        threshold: that keeps it.
        found: on the test split.
        kept: ``yes``; ``within chance``, if a true promise looks no better in one of 20 test splits; or ``no``.
    """

    record: Record
    peer: str
    promised: str
    shown: str
    threshold: str
    found: str
    kept: str

    @property
    def sentence(self) -> str:
        """The promise and what was found, in a line."""
        who = " ".join(filter(None, [title(self.record["method"]), self.peer]))
        text = f"promised: {self.promised} ({self.shown}); found: {self.found}; kept: {self.kept}"
        return f"{who}, seed {self.record['seed']}: {text}"


def promises(records: Sequence[Record]) -> list[Promise]:
    """Return the promises of records, with what was found on their test splits."""
    promised = []
    for record in (record for group in grouped(records).values() for record in group):
        for peer in (*record["peers"], {"name": ENSEMBLE, **record.get("ensemble", {})}):
            certificate = peer.get("certificate", {})
            for kind, describe in (("coverage", _coverage), ("risk", _risk)):
                if kind in certificate:
                    promised.append(Promise(record, peer["name"], *describe(certificate, certificate["found"])))
    return promised


def _coverage(certificate: Record, measured: Record) -> tuple[str, str, str, str, str]:
    promise, seen = certificate["coverage"], measured["coverage"]
    level, held, count = promise["level"], seen["held"], measured["images"]
    promised = f"sets hold the true class with probability {level:g} ({promise['method'].upper()})"
    text = f"{_percent(held, count)} of {count:,} sets hold it; {seen['size']:.2f} classes a set"
    counts = [(held, count)]
    if "by_class" in seen:
        promised += ", whichever it is"
        counts = list(zip(seen["by_class"]["held"], seen["by_class"]["images"], strict=True))
        worst = min((held / count for held, count in counts if count), default=1.0)
        text += f"; {_percent(worst, 1)} of the class that has the fewest"
    chances = []
    for (held, count), shown in zip(counts, promise["images"], strict=True):
        # Of a true promise, the coverage of thresholds that so many images choose is Beta; sets that hold are counted.
        beyond = math.floor((shown + 1) * (1 - level) + 1e-9)
        chance = scipy.stats.betabinom.cdf(held, count, shown + 1 - beyond, beyond) if beyond else 1.0
        chances.append(1.0 if held >= level * count else float(chance))
    kept = all(held >= level * count for held, count in counts)
    return promised, _shown(certificate), f"scores up to {_span(promise['thresholds'])}", text, _verdict(kept, chances)


def _risk(certificate: Record, measured: Record) -> tuple[str, str, str, str, str]:
    promise, seen = certificate["risk"], measured["risk"]
    level, errors, answered = promise["level"], seen["errors"], seen["answered"]
    promised = f"with probability {1 - promise['delta']:g}, at most {100 * level:g} % of answers are wrong"
    text = f"{_percent(errors, answered)} of {answered:,} answers are wrong; "
    text += f"{_percent(answered, measured['images'])} of {measured['images']:,} inputs are answered"
    counts = [(errors, answered)]
    if "by_class" in seen:
        promised += ", of every class"
        counts = list(zip(seen["by_class"]["errors"], seen["by_class"]["answered"], strict=True))
        worst = max((errors / answered for errors, answered in counts if answered), default=0.0)
        text += f"; {_percent(worst, 1)} of the class that has the most"
    chances = [float(scipy.stats.binom.sf(errors - 1, answered, level)) for errors, answered in counts]
    kept = all(errors <= level * answered for errors, answered in counts)
    threshold = f"probabilities from {_span(promise['thresholds'])} on"
    return promised, _shown(certificate), threshold, text, _verdict(kept, chances)


def _verdict(kept: bool, chances: Sequence[float]) -> str:
    """Return whether a promise is kept, from the chance of each count, or a worse one, if it is true."""
    return "yes" if kept else "within chance" if min(chances) * len(chances) >= LEVEL else "no"


def _shown(certificate: Record) -> str:
    return f"shown on {certificate['images']:,} inputs of {certificate['data']}"


def _span(thresholds: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{end:.4g}" for end in (min(thresholds), max(thresholds)))
    return " to ".join(ends)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"
