"""Figures, drawn by matplotlib without a screen."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from peerbayes.posteriors import storage
from peerbayes.reports.record import Record, alpha_title

MARKERS = "os^DvPX"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def rendered(figure: Figure, kind: str = "png") -> bytes:
    """Return a figure as the bytes of a file; a ``$`` in its texts is that sign, not the beginning of a formula.

    Args:
        figure: its texts are changed.
        kind: of the file: ``png``, ``pdf`` or ``svg``, say.
    """
    FigureCanvasAgg(figure)
    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    # Powers on logarithmic axes are matplotlib's own formulas; all other texts have names of users in them.
    powers = {
        id(label)
        for axis in axes
        if isinstance(axis.get_major_formatter(), LogFormatter)
        for label in axis.get_ticklabels(which="both")
    }
    for text in figure.findobj(Text):
        if id(text) not in powers:
            text.set_parse_math(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # of a name's script: it is drawn as a box
        figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    return rendered(figure)


def new_axes(width: float = 5.2, height: float = 4.0) -> tuple[Figure, Any]:
    """Return a figure of one panel, and its axes.

    Args:
        width: in inches.
        height: in inches.
    """
    figure, ((axes,),) = panels(1, 1, width, height)
    return figure, axes


def panels(rows: int, columns: int, width: float = 4.6, height: float = 3.5) -> tuple[Figure, list[list[Any]]]:
    """Return a figure with a grid of axes, by row.

    Args:
        rows: of axes.
        columns: of axes.
        width: of each, in inches.
        height: of each, in inches.
    """
    figure = Figure(figsize=(width * columns, height * rows), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        _open_frame(panel)
    return figure, [list(row) for row in axes]


def _open_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def entropy_shares(rows: Sequence[Record]) -> dict[str, list[float]]:
    """Return the shares of images ``inside`` and ``outside`` by entropy, means over histograms, with the ``edges``."""
    shares = {key: np.mean([np.array(row[key]) / sum(row[key]) for row in rows], 0) for key in ("inside", "outside")}
    return {"edges": rows[0]["edges"], **{key: values.tolist() for key, values in shares.items()}}


def name_epochs(axes: Any) -> None:
    """Let an axis count epochs: there are no halves of them, however few they are."""
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def scale_by_logarithm(axes: Any) -> None:
    """Make the upright axis logarithmic where there is anything above 0 to be seen on it."""
    if any(np.greater(line.get_ydata(), 0).any() for line in axes.get_lines()):
        axes.set_yscale("log")


def training_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss by term and share of the gradient by term, over the epochs of a run; a line a term, averaged over peers."""
    figure, (row,) = panels(1, 2, 4.8, 3.8)
    names = list(dict.fromkeys(n for line in metrics for p in line["peers"].values() for n in p["terms"]))
    shown = {"terms": "value of the term", "gradient_share": "share of the gradient"}
    for axes, (key, name) in zip(row, shown.items(), strict=True):
        for number, term in enumerate(names):
            points = [
                (epoch, np.mean([p[key][term] for p in line["peers"].values() if term in p.get(key, {})]))
                for epoch, line in enumerate(metrics, start=1)
                if any(term in p.get(key, {}) for p in line["peers"].values())
            ]
            if points:  # shares may not have been measured
                axes.plot(*zip(*points, strict=True), color=COLOURS[number % len(COLOURS)], label=term)
        name_epochs(axes)
        axes.set_ylabel(name)
        if key == "terms":
            axes.set_yscale("symlog", linthresh=1e-3)
        else:
            scale_by_logarithm(axes)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    return figure


def draw_heat_map(axes: Any, means: NDArray[np.float64], best: tuple[int, int], *, digits: int, high: bool) -> Any:
    """Draw a table of means, each with its number, and the best cell outlined; ``high``: whether high is good.

    Args:
        axes: drawn on.
        means: by row and column; NaN where there is none.
        best: row and column of the best cell.
        digits: after the point.
        high: whether a high mean is good.
    """
    corner = best[1] - 0.5, best[0] - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=COLOURS[1], linewidth=2.5, zorder=3))
    # Bright is good, whichever way the figure goes.
    picture = axes.imshow(means, cmap="cividis" if high else "cividis_r", aspect="auto")
    for (y, x), mean in np.ndenumerate(means):
        if np.isfinite(mean):
            red, green, blue, _ = picture.cmap(picture.norm(mean))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            colour = "white" if dark else "black"
            axes.text(x, y, f"{mean:.{digits}f}", ha="center", va="center", fontsize=8, color=colour)
    axes.grid(visible=False)
    return picture


def write_bench_figure(path: Path, record: Mapping[str, Any]) -> Path:
    """Draw a benchmark's record beside its JSON file; return the picture's path.

    Args:
        path: the record's JSON file.
        record: of a benchmark.
    """
    picture = path.with_suffix(".png")
    storage.write_bytes(picture, png(bench_figure(record)))
    return picture


def bench_figure(record: Mapping[str, Any]) -> Figure:
    """Epoch time by engine, ratios, and growth with networks, peers, draws and images; what is missing is left out."""
    figures, growth, settings = record["figures"], record["figures"]["growth"], record["settings"]
    packed = figures["packed3_epoch_s"]
    engines = {
        "eager": figures["eager_pair_epoch_s"],
        "compiled": figures["compiled_pair_epoch_s"],
        settings["engine"]: figures["pair_epoch_s"],
        "3 packed, each": None if packed is None else packed / 3,
        "point pair": figures["deterministic_pair_epoch_s"],
    }
    ratios = {
        "Bayesian / point pair": figures["bayesian_over_deterministic"],
        "bayesian-torch / ours": figures["speedup_single"],
        "bayesian-torch / packed": figures["speedup_packed"],
        "moment draw /\nmean-field": figures.get("moment_draw_over_mean_field"),
        "hierarchical draw /\nmean-field": figures.get("hierarchical_draw_over_mean_field"),
    }
    small = {
        way: {count: both and both[position] for count, both in growth["small_batch"].items()}
        for position, way in enumerate(("one draw after another", "draws at once"))
    }
    bars = {("epoch of a pair (s)", COLOURS[0]): engines, ("ratio of times", COLOURS[2]): ratios}
    lines: dict[tuple[str, str], Mapping[str, Mapping[str, Any]]] = {
        ("layers of the ResNet", "epoch (s)"): {"pair": growth["network"]},
        ("peers", "epoch (s)"): {"cohort": growth["peers"]},
        ("draws", "10,000 images (s)"): {"prediction": growth["draws"]},
        ("images", f"{settings['draws']} draws (ms)"): small,
    }
    panels = [partial(_bars, values=shown, look=look) for look, values in bars.items() if (shown := _present(values))]
    panels += [
        partial(_growth, lines=shown, labels=labels)
        for labels, ways in lines.items()
        if any((shown := {way: _present(values) for way, values in ways.items()}).values())
    ]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns) if panels else 0
    figure = Figure(figsize=(4.2 * columns or 4.2, 3.3 * rows or 1), dpi=120, layout="constrained")
    about = f"{record['hardware']}, torch {record['versions']['torch']}, batch {settings['batch']}"
    figure.suptitle(about, fontsize=9)
    for position, draw in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, position)
        _open_frame(axes)
        draw(axes)
    return figure


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _bars(axes: Any, values: Mapping[str, float], look: tuple[str, str]) -> None:
    label, colour = look
    bars = axes.barh(list(values), list(values.values()), color=colour, height=0.6)
    axes.bar_label(bars, [f"{value:.3g}" for value in values.values()], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def _growth(axes: Any, lines: Mapping[str, Mapping[str, float]], labels: tuple[str, str]) -> None:
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    ticks: set[int] = set()
    for number, (name, values) in enumerate(lines.items()):
        sizes = [int(x.removeprefix("resnet")) for x in values]
        style = {"linestyle": ("-", "--")[number % 2], "marker": "os"[number % 2], "markersize": 4}
        axes.plot(sizes, list(values.values()), color=COLOURS[number], label=name, **style)
        ticks.update(sizes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 20 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=8)


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
        label = _shown(lesson, differing)
        parts.append(f"{lesson['teacher']} teaches {lesson['student']}" + f" ({label})" * bool(label))
    return f"{graph_caption(record)} {'; '.join(parts) or 'Nobody teaches'}."


def graph_figure(record: Record) -> Figure:
    """Draw the peers on a circle and an arrow a lesson, labelled with what differs between lessons.

    Dashed arrows: of these the best peer's count in a step.
    """
    names = [peer["name"] for peer in record["peers"]]
    angles = [math.pi * (1 / 2 - 2 * index / len(names)) for index in range(len(names))]
    # Two peers stand side by side, so that their labels have room.
    angles = [angle + math.pi / 2 for angle in angles] if len(names) == 2 else angles
    points = {name: (math.cos(angle), math.sin(angle)) for name, angle in zip(names, angles, strict=True)}
    height = max(y for _, y in points.values()) - min(y for _, y in points.values()) + 1.0
    figure = Figure(figsize=(5.2, 5.2 * height / 3.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_xlim(-1.6, 1.6)
    middle = (max(y for _, y in points.values()) + min(y for _, y in points.values())) / 2
    axes.set_ylim(middle - height / 2, middle + height / 2)
    size = max(0.45, min(1.0, 5 / len(names)))
    for index, (name, (x, y)) in enumerate(points.items()):
        axes.plot(x, y, "o", markersize=34 * size, color=COLOURS[index % len(COLOURS)], zorder=3)
        outside = (x * 1.22, y * 1.3) if len(names) > 2 else (x, y - 0.36)
        side = "center" if len(names) == 2 or abs(x) < 0.1 else "left" if x > 0 else "right"
        axes.text(*outside, name, ha=side, va="center", fontsize=10, zorder=4)
    differing = _differing(record["lessons"])
    style = "--" if record["graph"] == "best_to_rest" else "-"
    for lesson in record["lessons"]:
        _arrow(axes, points[lesson["teacher"]], points[lesson["student"]], _shown(lesson, differing, "\n"), style, size)
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
