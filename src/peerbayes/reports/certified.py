"""What has been promised of predictions, and what labelled images say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peerbayes import metrics
from peerbayes.posteriors.certificate import Certificate
from peerbayes.reports.record import Record
from peerbayes.reports.tables import ENSEMBLE, grouped, title


def certified(certificate: Certificate, log_p: Tensor, labels: Tensor) -> Record:
    """Return a certificate, with what is found of its promises on other images: counts, and counts by class.

    Args:
        certificate: what is promised.
        log_p: log-probabilities (N, C) at temperature 1, of as many draws as were certified.
        labels: (N,).
    """
    tempered = log_p if certificate.temperature == 1 else metrics.temper(log_p, certificate.temperature)
    found: Record = {"images": len(labels)}
    predicted = tempered.argmax(-1)
    if (coverage := certificate.coverage) is not None:
        sets = certificate.sets(tempered)
        held = sets.gather(1, labels[:, None])[:, 0]
        found["coverage"] = {"held": int(held.sum()), "size": float(sets.sum(-1).double().mean())}
        if len(coverage.thresholds) > 1:
            counted = {"images": torch.ones_like(held), "held": held}
            found["coverage"]["by_class"] = _by_class(certificate.classes, labels, counted)
    if (risk := certificate.risk) is not None:
        answered = ~certificate.abstain(tempered)
        wrong = answered & (predicted != labels)
        found["risk"] = {"answered": int(answered.sum()), "errors": int(wrong.sum())}
        if len(risk.thresholds) > 1:
            counted = {"answered": answered, "errors": wrong}
            found["risk"]["by_class"] = _by_class(certificate.classes, predicted, counted)
    return {**certificate.model_dump(exclude_none=True), "found": found}


def _by_class(classes: int, of_class: Tensor, counted: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: torch.bincount(of_class[chosen], minlength=classes).tolist() for name, chosen in counted.items()}


@dataclass(frozen=True)
class Promise:
    """A line of a certificate: what was promised, how that was shown, and what was found.

    Attributes:
        record: whose it is.
        peer: of these predictions; ``ensemble`` for all peers as one.
        promised: the promise.
        shown: on how many images of which data.
        threshold: that keeps it.
        found: on test images.
        kept: whether that is within the promise.
    """

    record: Record
    peer: str
    promised: str
    shown: str
    threshold: str
    found: str
    kept: bool

    @property
    def sentence(self) -> str:
        """The promise and what was found, in a line."""
        who = " ".join(filter(None, [title(self.record["method"]), self.peer]))
        return f"{who}, seed {self.record['seed']}: promised: {self.promised} ({self.shown}); found: {self.found}"


def promises(records: Sequence[Record]) -> list[Promise]:
    """Return the promises of records, with what was found on their test images."""
    found = []
    for record in (record for group in grouped(records).values() for record in group):
        for peer in (*record["peers"], {"name": ENSEMBLE, **record.get("ensemble", {})}):
            certificate = peer.get("certificate", {})
            for kind, told in (("coverage", _coverage), ("risk", _risk)):
                if kind in certificate:
                    found.append(Promise(record, peer["name"], *told(certificate, certificate["found"])))
    return found


def _coverage(certificate: Record, found: Record) -> tuple[str, str, str, str, bool]:
    promise, seen = certificate["coverage"], found["coverage"]
    level, method = promise["level"], promise["method"].upper()
    held, images = seen["held"], found["images"]
    told = f"{_percent(held, images)} of {images:,} sets hold it; {seen['size']:.2f} classes a set"
    promised, kept = f"sets hold the true class with probability {level:g} ({method})", held >= level * images
    if "by_class" in seen:
        promised += ", whichever it is"
        counts = zip(seen["by_class"]["held"], seen["by_class"]["images"], strict=True)
        shares = [held / images for held, images in counts if images]
        told += f"; {_percent(min(shares, default=1.0), 1)} of the class that has the fewest"
        kept = all(share >= level for share in shares)
    return promised, _shown(certificate), f"scores up to {_span(promise['thresholds'])}", told, kept


def _risk(certificate: Record, found: Record) -> tuple[str, str, str, str, bool]:
    promise, seen = certificate["risk"], found["risk"]
    level, answered = promise["level"], seen["answered"]
    told = f"{_percent(seen['errors'], answered)} of {answered:,} answers are wrong; "
    told += f"{_percent(answered, found['images'])} of {found['images']:,} images are answered"
    promised = f"with probability {1 - promise['delta']:g}, at most {100 * level:g} % of answers are wrong"
    kept = seen["errors"] <= level * answered
    if "by_class" in seen:
        promised += ", of every class"
        counts = zip(seen["by_class"]["errors"], seen["by_class"]["answered"], strict=True)
        shares = [errors / answered for errors, answered in counts if answered]
        told += f"; {_percent(max(shares, default=0.0), 1)} of the class that has the most"
        kept = all(share <= level for share in shares)
    return promised, _shown(certificate), f"probabilities from {_span(promise['thresholds'])} on", told, kept


def _shown(certificate: Record) -> str:
    return f"shown on {certificate['images']:,} images of {certificate['data']}"


def _span(thresholds: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{end:.4g}" for end in (min(thresholds), max(thresholds)))
    return " to ".join(ends)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"
