"""What charts are drawn with: SVG of scales, curves and points, in the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

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
    told: str
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
            yield circle.format(frame.x(point.x), frame.y(point.y), line.name, point.told)
        yield Markup("</g>")
