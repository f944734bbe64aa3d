"""Pictures of posteriors in the plane of means and scales, and the numbers behind them, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from peerbayes.codebook.shared import Shared
from peerbayes.errors import InputError, nearest
from peerbayes.math.noise import Address, permutation
from peerbayes.posteriors.base import Posterior
from peerbayes.reports.figures import COLOURS, panels
from peerbayes.reports.groups import experiment_of, open_runs
from peerbayes.reports.record import Record
from peerbayes.runs.run import Run

Floats = NDArray[np.float64]
BINS, LEVELS = 150, 75  # of means, and of scales
PART = 1 << 20  # weights that are counted at a time
MARKS = 1000  # blended weights, and outliers, that are drawn one by one, at most
NEAR = 15  # components of the close-up
TAIL = 0.01  # of the means beyond the lines on either side
WIDE = 20  # times the smallest scale, from which on scales are drawn by their logarithm
NARROW = 1e-3  # of the largest number, below which numbers count as one: bins of less would show how floats are rounded
CLASSES = {  # by name: colour, marker, and what a legend says
    "single": (COLOURS[0], "o", "of one component"),
    "blended": (COLOURS[3], "^", "blended of two"),
    "outliers": (COLOURS[1], "x", "outliers"),
}


def posterior(folders: Iterable[str | Path], layer: str | None = None) -> Record:
    """What the weights of runs are like: counts over means and scales, or components, blended weights and outliers.

    Args:
        folders: run folders, or folders of them.
        layer: its name; by default all weights are taken.
    """
    return {"layer": layer, "series": [plot for run in open_runs(folders) for plot in pictured(run, layer)]}


def pictured(run: Run, layer: str | None = None) -> list[Record]:
    """Return the numbers of every peer of a run that has a scale for its weights.

    Args:
        run: a trained one.
        layer: its name; by default all weights are taken.
    """
    pictures = []
    for name in run:
        peer = run[name]
        if peer.shareable or "components" in peer.counts():
            span = _span(peer, layer, run)
            numbers = (
                _of_components(cast(Any, peer), span) if "components" in peer.counts() else _of_weights(peer, span)
            )
            title = f"{run.recipe.method}, seed {run.seed}" + (f", {name}" if len(run) > 1 else "")
            about = {"label": f"{title} · {' · '.join(experiment_of(run))}", "folder": str(run.folder), "peer": name}
            pictures.append({**about, "kind": peer.kind, "weights": span.stop - span.start, **numbers})
    if not pictures:
        raise InputError(f"{run.folder}: its weights have no scales; expected a mean-field posterior or shared weights")
    return pictures


def shared_picture(run: Run) -> dict[str, Figure]:
    """Return the picture of a run whose weights are shared, by its caption; nothing of other runs."""
    if not any("components" in run[name].counts() for name in run):
        return {}
    caption = "The weights by mean and scale: components, weights that blend two of them, and outliers."
    return {caption: draw_posterior({"layer": None, "series": pictured(run)})}


def _span(peer: Posterior, layer: str | None, run: Run) -> slice:
    """Return where a layer lies among the flat weights; all of them without one."""
    if layer is None:
        return slice(0, peer.layout.size)
    names = list(peer.layout.shapes)
    if layer not in names:
        raise InputError(f"{run.folder}: there is no layer '{layer}'{nearest(layer, names)}")
    number = names.index(layer)
    first = sum(peer.layout.sizes[:number])
    return slice(first, first + peer.layout.sizes[number])


@torch.no_grad()
def _of_weights(peer: Posterior, span: slice) -> Record:
    """Return a histogram over the plane, (means, scales), and where the tails of the means begin."""
    mean, scale = peer.mean[span].cpu(), peer.std[span].cpu()
    wide = bool(scale.min() > 0 and scale.max() > WIDE * scale.min())
    edges = [_edges(mean, BINS, False), _edges(scale, LEVELS, wide)]
    count = torch.zeros(BINS * LEVELS, dtype=torch.int64)
    for parts in zip(mean.split(PART), scale.split(PART), strict=True):
        x, y = (torch.bucketize(v.double(), edge[1:-1], right=True) for v, edge in zip(parts, edges, strict=True))
        count += torch.bincount(x * LEVELS + y, minlength=BINS * LEVELS)
    tails = [mean.kthvalue(max(1, math.ceil(share * len(mean)))).values.item() for share in (TAIL, 1 - TAIL)]
    return {
        "mean_edges": edges[0].tolist(),
        "scale_edges": edges[1].tolist(),
        "count": count.view(BINS, LEVELS).tolist(),
        "tails": tails,
    }


@torch.no_grad()
def _of_components(peer: Shared, span: slice) -> Record:
    """Return the components with their members, some blended weights and outliers, and histograms of the means."""
    book, inside = peer.codebook(), torch.zeros(peer.layout.size, dtype=torch.bool)
    inside[span] = True
    blended, outlier = (inside[index.cpu()] for index in (book.blended, book.outlier))
    share, pair = book.blend_weight.cpu()[blended], book.blend_component.cpu().long()[blended]
    component = book.component.cpu()
    mixed = (share[..., None] * component[pair]).sum(1)
    single = torch.stack([book.outlier_mean, book.outlier_std], 1).cpu()[outlier]
    inside[book.blended.cpu()] = inside[book.outlier.cpu()] = False
    members = torch.bincount(book.label.cpu().long()[inside], minlength=len(component))
    seen = members > 0
    seen[pair] = True
    edges = _edges(torch.cat([component[seen, 0], mixed[:, 0], single[:, 0]]), BINS, False)
    counted = {"single": (component[:, 0], members), "blended": (mixed[:, 0], None), "outliers": (single[:, 0], None)}
    means = {name: np.histogram(x.numpy(), edges.numpy(), weights=w)[0] for name, (x, w) in counted.items()}
    return {
        "components": {
            "mean": component[seen, 0].tolist(),
            "scale": component[seen, 1].abs().tolist(),
            "cholesky": book.cholesky.cpu()[seen].tolist(),
            "members": members[seen].tolist(),
        },
        "blended": _some(mixed),
        "outliers": _some(single),
        "mean_edges": edges.tolist(),
        "means": {name: count.astype(int).tolist() for name, count in means.items()},
    }


def _some(points: Tensor) -> Record:
    chosen = points[permutation(Address(0, "figure", "marks"), len(points), "cpu")[:MARKS]]
    return {"count": len(points), "mean": chosen[:, 0].tolist(), "scale": chosen[:, 1].abs().tolist()}


def _edges(values: Tensor, bins: int, by_logarithm: bool) -> Tensor:
    low, high = _apart(*(end.double().item() for end in values.aminmax()))
    if by_logarithm:
        return torch.logspace(math.log10(low), math.log10(high), bins + 1, dtype=torch.float64)
    return torch.linspace(low, high, bins + 1, dtype=torch.float64)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis for numbers between two, which it has in its middle where they are almost one."""
    largest = max(abs(low), abs(high))
    if high - low > NARROW * largest:
        return low, high
    margin = largest / 10 or 1e-6
    return low - margin, high + margin


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw_posterior(record: Record) -> Figure:
    """A row a posterior: the plane of means and scales, a close-up (or the scales), and the means by class.

    Planes and means have the same limits in all rows, so that one can see what sharing did to a posterior.
    """
    figure, rows = panels(len(record["series"]), 3, 4.8, 4.0)
    limits = _limits(record["series"])
    for (plane, middle, means), plot in zip(rows, record["series"], strict=True):
        plane.set_title(plot["label"] + (f"\n{record['layer']}" if record["layer"] else ""), fontsize=9)
        if limits[1][0] > 0 and limits[1][1] > WIDE * limits[1][0]:
            plane.set_yscale("log")
        plane.set(xlabel="mean μ of a weight", ylabel="scale σ of a weight", xlim=limits[0], ylim=limits[1])
        if "components" in plot:
            _draw_components(plane, plot)
            _draw_close_up(middle, plot)
        else:
            _draw_weights(figure, plane, plot)
            _draw_scales(middle, plot)
        _draw_means(means, plot)
        means.set_xlim(limits[0])
    return figure


def _limits(series: Sequence[Record]) -> list[tuple[float, float]]:
    means, scales = [], []
    for plot in series:
        parts = [plot["components"], plot["blended"], plot["outliers"]] if "components" in plot else []
        means += [plot["mean_edges"][0], plot["mean_edges"][-1]]
        scales += [*(s for part in parts for s in part["scale"]), *plot.get("scale_edges", [])]
    low, high = min(scales), max(scales)
    around = (low / 1.3, high * 1.3) if low > 0 and high > WIDE * low else _around(low, high)
    return [_around(min(means), max(means)), around]


def _around(low: float, high: float) -> tuple[float, float]:
    low, high = _apart(low, high)
    margin = 0.04 * (high - low)
    return low - margin, high + margin


def _draw_weights(figure: Figure, axes: Any, plot: Record) -> None:
    edges, count = _levels(axes, np.array(plot["scale_edges"]), np.array(plot["count"], dtype=float).T)
    count[count == 0] = np.nan
    drawn = axes.pcolormesh(plot["mean_edges"], edges, count, cmap="cividis", norm=LogNorm(1, max(2, np.nanmax(count))))
    figure.colorbar(drawn, ax=axes, label=f"weights in a cell, of {plot['weights']:,}")
    for number, tail in enumerate(plot["tails"]):
        axes.axvline(
            tail,
            color=COLOURS[1],
            ls="--",
            lw=1,
            label=f"{TAIL:.0%} and {1 - TAIL:.0%} of the means" if number else None,
        )
    _legend(axes)


def _levels(axes: Any, edges: Floats, count: Floats) -> tuple[Floats, Floats]:
    """Return levels that can be seen, and their counts (scales, means).

    Those of a posterior with a small part of the axis, which it shares with others, would be thinner than a pixel: they
    are counted in levels of the axis instead.
    """
    space, along = (np.geomspace, np.log) if axes.get_yscale() == "log" else (np.linspace, np.asarray)
    low, high = axes.get_ylim()
    if 2 * np.ptp(along(edges[[0, -1]])) > np.ptp(along([low, high])):
        return edges, count
    wide = space(low, high, LEVELS + 1)
    summed = np.zeros((LEVELS, count.shape[1]))
    np.add.at(summed, np.searchsorted(wide, (edges[:-1] + edges[1:]) / 2) - 1, count)
    return wide, summed


def _draw_components(axes: Any, plot: Record) -> None:
    parts, members = plot["components"], np.array(plot["components"]["members"], dtype=int)
    area = 2 + 250 / math.sqrt(max(1, len(members))) * members / members.max(initial=1)
    label = f"components: {len(members):,}, with {members.sum():,} weights of their own (by area)"
    axes.scatter(parts["mean"], parts["scale"], area, color=COLOURS[0], alpha=0.7, lw=0, label=label, zorder=4)
    for name in ("outliers", "blended"):
        colour, marker, words = CLASSES[name]
        shown = plot[name]
        some = f" ({len(shown['mean']):,} drawn)" if len(shown["mean"]) < shown["count"] else ""
        style = {"marker": marker, "fillstyle": "none", "markersize": 3.5, "markeredgewidth": 0.7, "color": colour}
        label = f"{words}: {shown['count']:,} weights{some}"
        axes.plot(shown["mean"], shown["scale"], ls="", label=label, zorder=2, **style)
    _legend(axes)


def _draw_close_up(axes: Any, plot: Record) -> None:
    """Draw components around the largest one: the centre, and the ellipses of one and two standard deviations."""
    parts = plot["components"]
    if not parts["mean"]:  # a layer of outliers alone
        axes.set_axis_off()
        return
    points = np.stack([parts["mean"], parts["scale"]], 1)
    unit = points.std(0)
    apart = (((points - points[np.argmax(parts["members"])]) / np.where(unit > 0, unit, 1)) ** 2).sum(1)
    near = np.argsort(apart)[:NEAR]
    around = np.linspace(0, 2 * np.pi, 60)
    circle = np.stack([np.cos(around), np.sin(around)])
    for number, index in enumerate(near):
        a, b, c = parts["cholesky"][index]
        ellipse = np.array([[a, 0.0], [b, c]]) @ circle
        colour = COLOURS[number % (len(COLOURS) - 1)]
        for size, style in ((1, "-"), (2, ":")):
            axes.plot(*(points[index][:, None] + size * ellipse), style, color=colour, lw=1.1)
        axes.plot(*points[index], ".", color=colour, markersize=5)
    limits = axes.axis()
    blended = plot["blended"]
    mark = {"ls": "", "color": "black", "markersize": 3.5, "fillstyle": "none", "markeredgewidth": 0.7, "alpha": 0.6}
    axes.plot(blended["mean"], blended["scale"], marker=CLASSES["blended"][1], label="blended weights", **mark)
    axes.axis(limits)
    axes.set_title(f"{len(near)} components next to the largest", fontsize=9)
    axes.set(xlabel="mean μ", ylabel="scale σ")
    axes.locator_params(nbins=5)
    axes.plot([], [], "-", color="black", lw=1.1, label="1 standard deviation")
    axes.plot([], [], ":", color="black", lw=1.1, label="2 standard deviations")
    _legend(axes)


def _draw_scales(axes: Any, plot: Record) -> None:
    count: NDArray[np.int64] = np.array(plot["count"]).sum(0)
    edges = plot["scale_edges"]
    axes.stairs(count, edges, color=COLOURS[0], fill=True, alpha=0.6)
    axes.set_yscale("log")
    if edges[0] > 0 and edges[-1] > WIDE * edges[0]:
        axes.set_xscale("log")
    else:
        axes.locator_params(axis="x", nbins=4)  # scales have many zeros in front, so their labels are long
    axes.set_title("scales", fontsize=9)
    axes.set(xlabel="scale σ", ylabel="weights in a bin")


def _draw_means(axes: Any, plot: Record) -> None:
    shared = "components" in plot
    counts = plot["means"] if shared else {"single": np.array(plot["count"]).sum(1).tolist()}
    for name, count in counts.items():
        colour, _, words = CLASSES[name]
        label = f"{words}: {sum(count):,}" if shared else None
        style = {"single": "-", "blended": "--", "outliers": ":"}[name]
        if sum(count):
            axes.stairs(count, plot["mean_edges"], color=colour, label=label, linestyle=style, linewidth=1.4)
    axes.set_yscale("log")
    axes.set_title("means", fontsize=9)
    axes.set(xlabel="mean μ", ylabel="weights in a bin")
    if shared:
        _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=1.6)
