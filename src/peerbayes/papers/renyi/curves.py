"""Draw the figures over alphas, from the numbers of `peerbayes.papers.renyi.alphas`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from peerbayes.papers.renyi.alphas import AVERAGE
from peerbayes.reports.figures import COLOURS, MARKERS, draw_heat_map, name_epochs, panels
from peerbayes.reports.record import Record, alpha_title

STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
LABELS = {
    "test_nll": ("test loss (nats)", 1),
    "test_accuracy": ("test accuracy (%)", 100),
    "train_nll": ("training loss", 1),
    "gap": ("test − training loss (nats)", 1),
    "pairwise_diversity": ("KL between two peers (nats)", 1),
    "disagreement_rate": ("two peers disagree (% of test items)", 100),
    "probability_variance": ("variance of probabilities over peers", 1),
    "nll": ("NLL (nats)", 1),
    "accuracy": ("accuracy (%)", 100),
}


def _wrapped(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    # Up to three panels a row; unused ones in the last row are hidden.
    columns = min(3, count)
    figure, rows = panels(math.ceil(count / columns), columns, width, height)
    all_axes = [axes for row in rows for axes in row]
    for axes in all_axes[count:]:
        axes.set_visible(False)
    return figure, all_axes[:count]


def _heading(about: Record) -> str:
    return f"{about['network']} · {about['dataset']}"


def _label(alpha: Any) -> str:
    return f"α = {alpha_title(alpha)}" + (" (independent)" if alpha == 0 else "")


def _colours(count: int) -> list[dict[str, Any]]:
    # A colour and a marker each, so that lines differ in both.
    many = matplotlib.colormaps["cividis"]
    return [
        {"color": COLOURS[k] if count <= len(COLOURS) else many(k / (count - 1)), "marker": MARKERS[k % len(MARKERS)]}
        for k in range(count)
    ]


def _line(
    axes: Any, x: Sequence[float], band: Record, scale: float, colour: Record, style: str, label: str | None = None
) -> None:
    mean, low, high = (np.array(band[key]) * scale for key in ("mean", "low", "high"))
    step = max(1, len(x) // 8)
    axes.plot(x, mean, style, label=label, markersize=4, linewidth=1.5, markevery=step, **colour)
    if not np.array_equal(low, high):
        axes.fill_between(x, low, high, color=colour["color"], alpha=0.15, linewidth=0)


def divergence(record: Record) -> Figure:
    """Draw two panels, over p with Q fixed and over q with P fixed: a line for each alpha, Kullback-Leibler dashed."""
    figure, ((left, right),) = panels(1, 2)
    fixed = "({:g}, {:g})".format(*record["fixed"])
    for axes, key, letter, title in (
        (left, "over_p", "p", f"Q = {fixed}, P = (p, 1 − p)"),
        (right, "over_q", "q", f"P = {fixed}, Q = (q, 1 − q)"),
    ):
        for number, (order, values) in enumerate(record[key].items()):
            label = f"α = {order}" + " (Kullback-Leibler)" * (order == "1")
            style = "--" if order == "1" else "-"
            axes.plot(record["points"], values, style, label=label, color=COLOURS[number], linewidth=1.6)
        axes.set_title(title)
        axes.set_xlabel(letter)
        axes.set_ylabel("Rényi divergence of P from Q (nats)")
        axes.set_ylim(bottom=-0.02 * max(record[key]["100"]))  # α = 0 lies on the axis
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure


def best_alpha(record: Record) -> Figure:
    """Draw a panel for each network and data set: accuracy against alpha, the best mean marked."""
    figure, all_axes = _wrapped(len(record["experiments"]), 4.0, 3.3)
    for axes, experiment in zip(all_axes, record["experiments"], strict=True):
        _against_alpha(axes, experiment["alphas"], "accuracy", COLOURS[0], experiment["best"])
        axes.set_title(f"{_heading(experiment)}: best α = {alpha_title(experiment['best'])}")
        axes.set_ylabel(f"{record['split']} accuracy (%)")
    note = "Mean and standard error over seeds; grey: each seed\ndiamond: the best mean"
    if record["split"] == "test":
        note += " of the test split:\nnot all runs have validation figures"
    figure.suptitle(note, fontsize=8)
    return figure


def _against_alpha(axes: Any, rows: Sequence[Record], key: str, colour: str, best: Any = None) -> None:
    # A grey point for each seed and the mean with its standard error; the best mean differs in colour and shape.
    scale = LABELS[key][1]
    for position, row in enumerate(rows):
        seeds = [value * scale for value in row[key]["seeds"].values()]
        marked = best is not None and row["alpha"] == best
        error = row[key]["standard_error"]
        axes.plot([position] * len(seeds), seeds, "o", color="#999999", markersize=3, alpha=0.7)
        axes.errorbar(
            position, row[key]["mean"] * scale, yerr=None if error is None else error * scale, capsize=3, zorder=3,
            fmt="D" if marked else "o", color=COLOURS[1] if marked else colour, markersize=7 if marked else 5,
        )  # fmt: skip
    axes.set_xticks(range(len(rows)), [alpha_title(row["alpha"]) for row in rows])
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_xlabel("α (0: independent)" if rows[0]["alpha"] == 0 else "α")


def spread(record: Record) -> Figure:
    """Draw a row for each network and data set, a panel for each measure: mean and standard error against alpha."""
    figure, rows = panels(len(record["experiments"]), len(record["figures"]), 3.6, 3.2)
    for row, experiment in zip(rows, record["experiments"], strict=True):
        for axes, key in zip(row, record["figures"], strict=True):
            _against_alpha(axes, experiment["alphas"], key, COLOURS[0])
            axes.set_ylabel(LABELS[key][0])
            axes.set_ylim(bottom=0)
            axes.set_title(_heading(experiment))
    figure.suptitle("Predictions on the test split; mean and standard error over seeds, grey: each seed", fontsize=8)
    return figure


def grid(record: Record) -> Figure:
    """Draw heat maps of NLL and accuracy over the weight ψ and alpha, the best outlined; a row for each experiment."""
    figure, rows = panels(len(record["experiments"]), 2, 4.8, 3.6)
    for row, experiment in zip(rows, record["experiments"], strict=True):
        for axes, key in zip(row, ("nll", "accuracy"), strict=True):
            label, scale = LABELS[key]
            means = np.array([[np.nan if c is None else c["mean"] * scale for c in line] for line in experiment[key]])
            best = np.nanargmin(means) if key == "nll" else np.nanargmax(means)
            cell = divmod(int(best), means.shape[1])
            picture = draw_heat_map(axes, means, cell, digits=2 if scale == 100 else 3, high=key == "accuracy")
            axes.set_xticks(range(means.shape[1]), [alpha_title(alpha) for alpha in experiment["alphas"]])
            axes.set_yticks(range(means.shape[0]), [f"{weight:g}" for weight in experiment["weights"]])
            axes.set_xlabel("α")
            axes.set_ylabel("ψ, the weight of the mutual term")
            axes.set_title(_heading(experiment))
            figure.colorbar(picture, label=f"{record['split']} {label}")
    return figure


def curves(record: Record) -> Figure:
    """Draw test loss and test accuracy over the epochs, a line for each alpha and a row for each experiment."""
    return _epochs(record, (("test_nll",), ("test_accuracy",)))


def gap(record: Record) -> Figure:
    """Draw training (dashed) and test loss over the epochs, and their difference, by alpha."""
    return _epochs(record, (("test_nll", "train_nll"), ("gap",)))


def _epochs(record: Record, columns: Sequence[Sequence[str]]) -> Figure:
    titles = list(dict.fromkeys(_label(s["alpha"]) for e in record["experiments"] for s in e["series"]))
    peers = list(dict.fromkeys(s["peer"] for e in record["experiments"] for s in e["series"]))
    colours = dict(zip(titles, _colours(len(titles)), strict=True))
    styles = dict(zip(((peer, key) for peer in peers for key in columns[0]), itertools.cycle(STYLES), strict=False))
    figure, rows = panels(len(record["experiments"]), len(columns))
    for row, experiment in zip(rows, record["experiments"], strict=True):
        for axes, keys in zip(row, columns, strict=True):
            for series in experiment["series"]:
                for key in keys:
                    style = styles[series["peer"], key if len(keys) > 1 else columns[0][0]]
                    colour = colours[_label(series["alpha"])]
                    _line(axes, series["epochs"], series[key], LABELS[key][1], colour, style)
            name_epochs(axes)
            axes.set_ylabel("loss (nats)" if len(keys) > 1 else LABELS[keys[0]][0])
            axes.set_title(_heading(experiment))
    # Colours and markers are alphas, styles are peers and losses.
    handles = [Line2D([], [], label=title, markersize=4, **colours[title]) for title in titles]
    if len(styles) > 1:
        for (peer, key), style in styles.items():
            names = [peer] * (peer != AVERAGE) + [LABELS[key][0].partition(" (")[0]] * (len(columns[0]) > 1)
            handles.append(Line2D([], [], color="black", linestyle=style, label=", ".join(names)))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=8)
    if any(series["seeds"] > 1 for e in record["experiments"] for series in e["series"]):
        figure.suptitle(f"Mean over seeds; band: {record['band']}", fontsize=8)
    return figure


def flatness(record: Record) -> Figure:
    """Draw training loss against the distance from the trained weights, a line for each alpha."""
    figure, all_axes = _wrapped(len(record["experiments"]), 4.6, 3.7)
    for axes, experiment in zip(all_axes, record["experiments"], strict=True):
        colours = _colours(len(experiment["series"]))
        for series, colour in zip(experiment["series"], colours, strict=True):
            label = f"{_label(series['alpha'])}: rise {series['sharpness']['mean']:.3g}"
            _line(axes, record["distances"], series["loss"], 1, colour, "-", label)
        axes.set_xlabel("distance along the direction (1: the length of each filter)")
        axes.set_ylabel("training loss (nats)")
        axes.set_title(_heading(experiment))
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    figure.suptitle(
        f"Mean over {record['directions']} directions; band: {record['band']}\n"
        f"rise: mean at ±{record['distances'][-1]:g} over that at 0",
        fontsize=8,
    )
    return figure
