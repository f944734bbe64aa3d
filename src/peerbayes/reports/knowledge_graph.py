"""The knowledge graph of a cohort: who teaches whom, drawn and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from peerbayes.reports.figures import COLOURS
from peerbayes.reports.record import Record, alpha_title

SIGNS = {"alpha": "α", "temperature": "T", "weight": "weight"}


def _shown(lesson: Mapping[str, Any], keys: Sequence[str], between: str = ", ") -> str:
    return between.join(f"{SIGNS[key]} = {alpha_title(lesson[key])}" for key in keys)


def _differing(lessons: Sequence[Mapping[str, Any]]) -> list[str]:
    return [key for key in SIGNS if any(lesson[key] != lessons[0][key] for lesson in lessons)]


def graph_caption(record: Record) -> str:
    """Return what the lessons of a record have in common, as a caption."""
    lessons, differing = record["lessons"], _differing(record["lessons"])
    common = _shown(lessons[0], [key for key in SIGNS if key not in differing]) if lessons else ""
    text = "Who teaches whom: arrows go from teacher to student"
    text += f"; {common} for all." if common else "."
    if record["graph"] == "best_to_rest":
        text += " In each step only the arrows of the peer with the lowest cross-entropy on the batch count."
    return text


def graph_words(record: Record) -> str:
    """Return the graph as a sentence, for those who do not see it."""
    if record["graph"] in ("all", "best_to_rest"):
        names = [peer["name"] for peer in record["peers"]]
        return f"{graph_caption(record)} Each of {', '.join(names[:-1])} and {names[-1]} teaches all the others."
    differing = _differing(record["lessons"])
    parts = []
    for lesson in record["lessons"]:
        own = _shown(lesson, differing)
        parts.append(f"{lesson['teacher']} teaches {lesson['student']}" + f" ({own})" * bool(own))
    return f"{graph_caption(record)} {'; '.join(parts) or 'Nobody teaches'}."


def graph_figure(record: Record) -> Figure:
    """Draw the peers on a circle and an arrow a lesson, labelled with what differs between lessons.

    Dashed arrows: of these the best peer's count in a step.
    """
    names = [peer["name"] for peer in record["peers"]]
    angles = [math.pi * (1 / 2 - 2 * place / len(names)) for place in range(len(names))]
    # Two peers stand side by side, so that their labels have room.
    angles = [angle + math.pi / 2 for angle in angles] if len(names) == 2 else angles
    places = {name: (math.cos(angle), math.sin(angle)) for name, angle in zip(names, angles, strict=True)}
    height = max(y for _, y in places.values()) - min(y for _, y in places.values()) + 1.0
    figure = Figure(figsize=(5.2, 5.2 * height / 3.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_xlim(-1.6, 1.6)
    middle = (max(y for _, y in places.values()) + min(y for _, y in places.values())) / 2
    axes.set_ylim(middle - height / 2, middle + height / 2)
    size = max(0.45, min(1.0, 5 / len(names)))
    for place, (name, (x, y)) in enumerate(places.items()):
        axes.plot(x, y, "o", markersize=34 * size, color=COLOURS[place % len(COLOURS)], zorder=3)
        outside = (x * 1.22, y * 1.3) if len(names) > 2 else (x, y - 0.36)
        side = "center" if len(names) == 2 or abs(x) < 0.1 else "left" if x > 0 else "right"
        axes.text(*outside, name, ha=side, va="center", fontsize=10, zorder=4)
    differing = _differing(record["lessons"])
    style = "--" if record["graph"] == "best_to_rest" else "-"
    for lesson in record["lessons"]:
        _arrow(axes, places[lesson["teacher"]], places[lesson["student"]], _shown(lesson, differing, "\n"), style, size)
    return figure


def _arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], label: str, style: str, size: float
) -> None:
    # Bent to one side, so that the arrow back does not lie upon it.
    bend = 0.18
    (x0, y0), (x1, y1) = start, end
    axes.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=14, linestyle=style,
            color="#444444", linewidth=1.3, shrinkA=20 * size, shrinkB=20 * size, zorder=2,
        )
    )  # fmt: skip
    if label:
        # The middle of the arc, nearer to its end: where arcs cross, labels do not.
        x, y = x0 + 0.58 * (x1 - x0), y0 + 0.58 * (y1 - y0)
        x, y = x + bend / 2 * (y1 - y0), y - bend / 2 * (x1 - x0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
        axes.text(x, y, label, ha="center", va="center", fontsize=8, bbox=box, zorder=5)
