"""Figures, drawn by matplotlib without a screen."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from peerbayes.reporting.records import Record
from peerbayes.reporting.tables import grouped, title

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _series(records: Sequence[Record]) -> list[tuple[str, list[Mapping[str, Any]], str, str]]:
    # One series a method and peer: label, that peer's records over seeds, colour by method, style by peer.
    found = []
    for number, group in enumerate(grouped(records).values()):
        for place, peer in enumerate(group[0]["peers"]):
            name = title(group[0]["method"]) + (f" {peer['name']}" if len(group[0]["peers"]) > 1 else "")
            same = [p for r in group for p in r["peers"] if p["name"] == peer["name"]]
            found.append((name, same, COLOURS[number % len(COLOURS)], ("-", "--", ":", "-.")[place % 4]))
    return found


def _axes(width: float = 5.2, height: float = 4.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def retention_figure(records: Sequence[Record]) -> Figure:
    """Accuracy of the images kept, against the share kept by lowest disagreement; a band of one standard error."""
    figure, axes = _axes()
    for name, peers, colour, style in _series(records):
        kept = [float(fraction) for fraction in peers[0]["retention"]] + [1.0]
        values = np.array([[*peer["retention"].values(), peer["accuracy"]] for peer in peers]) * 100
        axes.plot(np.array(kept) * 100, values.mean(0), style, color=colour, label=name, marker="o", markersize=3)
        if len(values) > 1:
            error = values.std(0, ddof=1) / math.sqrt(len(values))
            axes.fill_between(
                np.array(kept) * 100, values.mean(0) - error, values.mean(0) + error, color=colour, alpha=0.12, lw=0
            )
    axes.set_xlabel("images kept, by lowest disagreement (%)")
    axes.set_ylabel("accuracy of those kept (%)")
    axes.legend(frameon=False, fontsize=8)
    return figure


def reliability_figure(records: Sequence[Record]) -> Figure:
    """Accuracy against confidence, all seeds pooled; the diagonal is perfect calibration."""
    figure, axes = _axes()
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5)
    for name, peers, colour, style in _series(records):
        bins = [peer["reliability"] for peer in peers]
        count = np.array([b["count"] for b in bins], dtype=float)
        sums = [
            (np.array([[x if x is not None else 0.0 for x in b[key]] for b in bins]) * count).sum(0)
            for key in ("confidence", "accuracy")
        ]
        total = count.sum(0)
        # A bin of a handful of images says nothing: the line passes over it.
        full = total >= max(10, 0.005 * total.sum())
        axes.plot(
            sums[0][full] / total[full], sums[1][full] / total[full], style, color=colour, marker="o", markersize=3,
            label=f"{name} (ECE {np.mean([p['ece'] for p in peers]):.3f})",
        )  # fmt: skip
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    axes.legend(frameon=False, fontsize=8)
    return figure


def training_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss by term and share of the gradient by term, over the epochs of a run; a line a term, averaged over peers."""
    figure = Figure(figsize=(9.6, 3.6), dpi=120, layout="constrained")
    for place, (key, name) in enumerate((("terms", "value of the term"), ("gradient_share", "share of the gradient"))):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        names = list(dict.fromkeys(n for line in metrics for p in line["peers"].values() for n in p.get(key, {})))
        for number, term in enumerate(names):
            points = [
                (place + 1, np.mean([p[key][term] for p in line["peers"].values() if term in p.get(key, {})]))
                for place, line in enumerate(metrics)
                if any(term in p.get(key, {}) for p in line["peers"].values())
            ]
            axes.plot(*zip(*points, strict=True), color=COLOURS[number % len(COLOURS)], label=term)
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.set_yscale("symlog" if key == "terms" else "log", **({"linthresh": 1e-3} if key == "terms" else {}))
        axes.legend(frameon=False, fontsize=8)
    return figure
