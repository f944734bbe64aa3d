"""Charts of the report page: reliability, the accuracy of what is kept, and entropies of other data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from peerbayes.metrics.spread import summarise
from peerbayes.reports.figures import entropy_shares
from peerbayes.reports.record import Record
from peerbayes.reports.svg import (
    BOTTOM,
    DASHES,
    LINES,
    PANEL,
    TOP,
    Chart,
    Curve,
    DataPoint,
    Frame,
    Scale,
    drawn_lines,
    fitted,
)
from peerbayes.reports.tables import ENSEMBLE, OUTSIDE, grouped, retention_by, title

FEWEST, SHARE = 10, 0.005  # images of a bin that says anything: so many, and so large a share of all


def _judged(
    records: Sequence[Record], only_as_one: bool = False
) -> Iterator[tuple[int, int, str, list[Mapping[str, Any]]]]:
    """Yield number of the method, dash, name, and figures over seeds: of all peers as one, where they are, and each."""
    for number, group in enumerate(grouped(records).values()):
        peers = [peer["name"] for peer in group[0]["peers"]]
        name, together = title(group[0]["method"]), all("ensemble" in record for record in group)
        if together:
            yield number, 0, f"{name}, {ENSEMBLE}", [record["ensemble"] for record in group]
        for place, peer in enumerate(() if together and only_as_one else peers, start=int(together)):
            same = [one for record in group for one in record["peers"] if one["name"] == peer]
            yield number, place % DASHES, f"{name}, {peer}" if len(peers) > 1 else name, same


def reliability_lines(records: Sequence[Record]) -> list[Curve]:
    """Return accuracy against confidence, all seeds pooled; bins of a handful of images are passed over.

    Args:
        records: their ``reliability`` is drawn.
    """
    lines = []
    for number, dash, name, judged in _judged(records):
        if not all("reliability" in one for one in judged):
            continue
        bins = [one["reliability"] for one in judged]
        count = np.array([one["count"] for one in bins], dtype=float)
        confidence, accuracy = (
            (np.array([[x or 0.0 for x in one[key]] for one in bins]) * count).sum(0)
            for key in ("confidence", "accuracy")
        )
        total = count.sum(0)
        told = "confidence {:.3f}, accuracy {:.3f}, {:,.0f} inputs"
        points = [
            DataPoint(x / n, y / n, told.format(x / n, y / n, n))
            for x, y, n in zip(confidence.tolist(), accuracy.tolist(), total.tolist(), strict=True)
            if n >= max(FEWEST, SHARE * total.sum())
        ]
        error = float(np.mean([one["ece"] for one in judged]))
        lines.append(Curve(name, number, dash, points, f"ECE {error:.3f}"))
    return lines


def reliability_chart(records: Sequence[Record]) -> list[Chart]:
    """Return the reliability diagram, in which the diagonal is perfect calibration; nothing without figures."""
    lines = reliability_lines(records)
    if not lines:
        return []
    ticks = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    frame = Frame(Scale("confidence", 0, 1, ticks), Scale("accuracy", 0, 1, ticks), LINES)
    diagonal = Markup('<path class="diagonal" d="{}"/>').format(frame.path([(0, 0), (1, 1)]))
    caption = "Accuracy against confidence, over all seeds. On the diagonal predictions are right as often as they say."
    return [Chart(frame.drawn("Reliability diagram", [diagonal, *drawn_lines(frame, lines)]), caption, lines)]


def retention_lines(records: Sequence[Record], ranking: str) -> list[Curve]:
    """Return the accuracy (%) of the inputs kept against the share (%) kept, means and errors over seeds.

    Args:
        records: their ``retention`` is drawn.
        ranking: ``entropy`` or ``disagreement``; what does not disagree is not ranked by that.
    """
    lines = []
    for number, dash, name, judged in _judged(records):
        found = [(retention_by(ranking, one), one["accuracy"]) for one in judged]
        curves = [{**curve, "1.0": accuracy} for curve, accuracy in found if curve is not None]
        flat = ranking == "disagreement" and all(one.get("disagreement") == 0 for one in judged)
        if not curves or flat:
            continue
        points = []
        for share in curves[0]:
            summary = summarise([100 * curve[share] for curve in curves if share in curve])
            kept, error = 100 * float(share), summary.standard_error or 0.0
            told = f"{kept:g} % kept, {summary.mean:.2f}" + f" ± {error:.2f}" * (len(curves) > 1) + " % right"
            points.append(DataPoint(kept, summary.mean, told, error))
        lines.append(Curve(name, number, dash, sorted(points, key=lambda point: point.x)))
    return lines


def retention_chart(records: Sequence[Record], ranking: str) -> list[Chart]:
    """Return the accuracy of the inputs kept against their share; nothing where nobody ranks them.

    Args:
        records: their ``retention`` is drawn.
        ranking: ``entropy`` or ``disagreement``.
    """
    lines = retention_lines(records, ranking)
    if not lines:
        return []
    ends = [point.y + side * point.error for line in lines for point in line.points for side in (-1, 1)]
    y = fitted("accuracy of those kept (%)", ends, 100.0)
    least = min(20 * math.floor(line.points[0].x / 20) for line in lines)
    frame = Frame(Scale("inputs kept (%)", least, 100, range(least, 101, 20)), y, LINES)
    caption = f"Accuracy of the inputs kept, those of lowest {ranking} first"
    caption += "; bands are one standard error." if any(p.error for line in lines for p in line.points) else "."
    return [Chart(frame.drawn(f"Accuracy by share kept, by {ranking}", [*drawn_lines(frame, lines)]), caption, lines)]


def entropy_charts(records: Sequence[Record], other: str) -> list[Chart]:
    """Return a panel a method: shares of inputs by entropy, of the test split and of another data set.

    Peers are shown as one where they are evaluated as one, else each.

    Args:
        records: evaluated against the other data set, or not.
        other: its name.
    """
    found = []
    for number, _, name, judged in _judged(records, only_as_one=True):
        measured = [one[OUTSIDE][other] for one in judged if "entropy" in one.get(OUTSIDE, {}).get(other, {})]
        if measured:
            found.append((number, name, measured))
    shares = [entropy_shares([one["entropy"] for one in measured]) for _, _, measured in found]
    top = max((max(*one["inside"], *one["outside"]) for one in shares), default=0.0)
    charts = []
    for (number, name, measured), one in zip(found, shares, strict=True):
        auroc = summarise([seed["auroc"] for seed in measured])
        error = "" if auroc.standard_error is None else f" ± {auroc.standard_error:.3f}"
        drawing = _histograms(one, 100 * top, f"Entropies of {name}", other)
        heading = f"{name}: AUROC {auroc.mean:.3f}{error}"
        charts.append(Chart(drawing, group=number, title=heading))
    return charts


def _histograms(shares: Mapping[str, Sequence[float]], top: float, words: str, other: str) -> Markup:
    edges = shares["edges"]
    ticks = [tick for tick in (1.0, 5.0, 20.0, 50.0, 100.0) if tick <= top] or [top]
    y = Scale("inputs (%)", 0, top, (0, *ticks), math.sqrt)
    frame = Frame(fitted("entropy (nats)", [0.0, edges[-1]], edges[-1]), y, PANEL)
    content = []
    for key in ("outside", "inside"):
        stairs = [(edge, 100 * share) for share, *ends in zip(shares[key], edges, edges[1:]) for edge in ends]
        path = frame.path([(edges[0], 0.0), *stairs, (edges[-1], 0.0)])
        content.append(Markup('<path class="{}" d="{}"/>').format(key, path))
    told = Markup('<rect class="bin" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}</title></rect>')
    for inside, outside, low, high in zip(shares["inside"], shares["outside"], edges, edges[1:]):
        says = f"entropy {low:.2f} to {high:.2f}: {100 * inside:.1f} % of the test split, "
        says += f"{100 * outside:.1f} % of {other}"
        left, height = frame.x(low), PANEL[1] - BOTTOM - TOP
        content.append(told.format(left, TOP, frame.x(high) - left, height, says))
    return frame.drawn(words, content)
