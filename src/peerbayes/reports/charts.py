"""Charts of the report page, as SVG: reliability, the accuracy of what is kept, and entropies of other data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from peerbayes.metrics.spread import summarise
from peerbayes.reports.figures import entropy_shares
from peerbayes.reports.record import Record
from peerbayes.reports.tables import ENSEMBLE, OUTSIDE, grouped, retention_by, title

COLOURS = 7  # of the page's style: c0 to c6
DASHES = 4  # d0 to d3
Size = tuple[float, float]
LINES, PANEL = (460.0, 330.0), (300.0, 190.0)
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 12.0, 44.0  # around the axes


@dataclass(frozen=True)
class DataPoint:
    """A point of a line, what is told of it, and the half height of the band around it."""

    x: float
    y: float
    tooltip: str
    error: float = 0.0


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: of what was measured.
        group: number of the method on the page, which gives its colour.
        dash: of the method's lines.
        points: from left to right.
        note: behind the name in the legend.
    """

    name: str
    group: int
    dash: int
    points: Sequence[DataPoint]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption and legend.

    Attributes:
        drawing: SVG.
        caption: below it.
        lines: of the legend.
        group: number of the method that it is of, if it is of one.
        title: above it.
    """

    drawing: Markup
    caption: str = ""
    lines: Sequence[Curve] = ()
    group: int | None = None
    title: str = ""


@dataclass(frozen=True)
class Scale:
    """A scale from data to a side of the drawing, with ticks.

    Attributes:
        label: what is measured.
        low: where it begins.
        high: where it ends.
        ticks: numbers to be written.
        bend: of the scale; small values have more room under the root.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[float] = field(default=())
    bend: Callable[[float], float] = lambda value: value

    def at(self, value: float, start: float, end: float) -> float:
        """Return where a value lies between two ends of the drawing.

        Args:
            value: in the unit of the axis.
            start: where the lowest value lies.
            end: where the highest value lies.
        """
        low, high = self.bend(self.low), self.bend(self.high)
        share = (self.bend(value) - low) / (high - low)
        return start + min(1.0, max(0.0, share)) * (end - start)


def fitted(label: str, values: Sequence[float], most: float = math.inf) -> Scale:
    """Return an axis with round ticks around some values.

    Args:
        label: what is measured.
        values: that have to be on it.
        most: where it ends at the latest.
    """
    ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(min(values), max(values))
    ticks = [float(tick) for tick in ticks if tick <= most]
    return Scale(label, ticks[0], max(ticks[-1], max(values)), ticks)


class Frame:
    """The axes of a drawing, and the places of data in it.

    Args:
        x: the scale from left to right.
        y: the scale upwards.
        size: width and height of the drawing.
    """

    def __init__(self, x: Scale, y: Scale, size: Size) -> None:
        self.horizontal, self.vertical, (self.width, self.height) = x, y, size

    def x(self, value: float) -> float:
        """Return where a value lies from left to right."""
        return self.horizontal.at(value, LEFT, self.width - RIGHT)

    def y(self, value: float) -> float:
        """Return where a value lies from above."""
        return self.vertical.at(value, self.height - BOTTOM, TOP)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """Return the line through some data, as SVG writes it."""
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def axes(self) -> Iterator[Markup]:
        """Yield grid, ticks and labels."""
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        for tick in self.vertical.ticks:
            y = self.y(tick)
            yield Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, y, right)
            yield Markup('<text class="end" x="{}" y="{:.1f}">{}</text>').format(LEFT - 7, y + 4, _tick(tick))
        for tick in self.horizontal.ticks:
            x = self.x(tick)
            yield Markup('<path class="grid" d="M{:.1f} {}V{}"/>').format(x, TOP, bottom)
            yield Markup('<text class="middle" x="{:.1f}" y="{}">{}</text>').format(x, bottom + 18, _tick(tick))
        middle = (LEFT + right) / 2
        across = Markup('<text class="middle label" x="{}" y="{}">{}</text>')
        yield across.format(middle, self.height - 6, self.horizontal.label)
        up = Markup('<text class="middle label" transform="translate(13 {}) rotate(-90)">{}</text>')
        yield up.format((TOP + bottom) / 2, self.vertical.label)

    def drawn(self, words: str, content: Sequence[Markup]) -> Markup:
        """Return the drawing: axes and content, with words for those who do not see it.

        Args:
            words: what the drawing shows.
            content: elements, in the order in which they are drawn.
        """
        begin = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {:g} {:g}">')
        parts = [begin.format(words, self.width, self.height), *self.axes(), *content, Markup("</svg>")]
        return Markup("\n").join(parts)


def _tick(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def drawn_lines(frame: Frame, lines: Sequence[Curve]) -> Iterator[Markup]:
    """Yield curves with their bands and points, which say their values.

    Args:
        frame: that they are drawn in.
        lines: the curves.
    """
    for line in lines:
        yield Markup('<g class="line c{} d{}" data-run="{}">').format(line.group % COLOURS, line.dash, line.group)
        if any(point.error for point in line.points):
            upper = [(point.x, point.y + point.error) for point in line.points]
            lower = [(point.x, point.y - point.error) for point in reversed(line.points)]
            yield Markup('<path class="band" d="{}Z"/>').format(frame.path([*upper, *lower]))
        yield Markup('<path class="curve" d="{}"/>').format(frame.path([(p.x, p.y) for p in line.points]))
        for point in line.points:
            circle = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3"><title>{}: {}</title></circle>')
            yield circle.format(frame.x(point.x), frame.y(point.y), line.name, point.tooltip)
        yield Markup("</g>")


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
        for dash, peer in enumerate(() if together and only_as_one else peers, start=int(together)):
            same = [figures for record in group for figures in record["peers"] if figures["name"] == peer]
            yield number, dash % DASHES, f"{name}, {peer}" if len(peers) > 1 else name, same


def reliability_lines(records: Sequence[Record]) -> list[Curve]:
    """Return accuracy against confidence, all seeds pooled; bins of a handful of images are passed over.

    Args:
        records: their ``reliability`` is drawn.
    """
    lines = []
    for number, dash, name, judged in _judged(records):
        if not all("reliability" in figures for figures in judged):
            continue
        bins = [figures["reliability"] for figures in judged]
        count = np.array([figures["count"] for figures in bins], dtype=float)
        confidence, accuracy = (
            (np.array([[x or 0.0 for x in figures[key]] for figures in bins]) * count).sum(0)
            for key in ("confidence", "accuracy")
        )
        total = count.sum(0)
        words = "confidence {:.3f}, accuracy {:.3f}, {:,.0f} inputs"
        points = [
            DataPoint(x / n, y / n, words.format(x / n, y / n, n))
            for x, y, n in zip(confidence.tolist(), accuracy.tolist(), total.tolist(), strict=True)
            if n >= max(FEWEST, SHARE * total.sum())
        ]
        error = float(np.mean([figures["ece"] for figures in judged]))
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
        pairs = [(retention_by(ranking, figures), figures["accuracy"]) for figures in judged]
        curves = [{**curve, "1.0": accuracy} for curve, accuracy in pairs if curve is not None]
        flat = ranking == "disagreement" and all(figures.get("disagreement") == 0 for figures in judged)
        if not curves or flat:
            continue
        points = []
        for share in curves[0]:
            summary = summarise([100 * curve[share] for curve in curves if share in curve])
            kept, error = 100 * float(share), summary.standard_error or 0.0
            words = f"{kept:g} % kept, {summary.mean:.2f}" + f" ± {error:.2f}" * (len(curves) > 1) + " % right"
            points.append(DataPoint(kept, summary.mean, words, error))
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
    methods = []
    for number, _, name, judged in _judged(records, only_as_one=True):
        measured = [seed[OUTSIDE][other] for seed in judged if "entropy" in seed.get(OUTSIDE, {}).get(other, {})]
        if measured:
            methods.append((number, name, measured))
    shares = [entropy_shares([seed["entropy"] for seed in measured]) for _, _, measured in methods]
    top = max((max(*histogram["inside"], *histogram["outside"]) for histogram in shares), default=0.0)
    charts = []
    for (number, name, measured), histogram in zip(methods, shares, strict=True):
        auroc = summarise([seed["auroc"] for seed in measured])
        error = "" if auroc.standard_error is None else f" ± {auroc.standard_error:.3f}"
        drawing = _histograms(histogram, 100 * top, f"Entropies of {name}", other)
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
    bar = Markup('<rect class="bin" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}</title></rect>')
    for inside, outside, low, high in zip(shares["inside"], shares["outside"], edges, edges[1:]):
        says = f"entropy {low:.2f} to {high:.2f}: {100 * inside:.1f} % of the test split, "
        says += f"{100 * outside:.1f} % of {other}"
        left, height = frame.x(low), PANEL[1] - BOTTOM - TOP
        content.append(bar.format(left, TOP, frame.x(high) - left, height, says))
    return frame.drawn(words, content)
