"""Figure of confidence by class and on out-of-distribution images, and its numbers for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from peerbayes.data.dataset import load_outside
from peerbayes.data.splits import Split
from peerbayes.engine.processes import pick_device
from peerbayes.metrics.calibration import confidence_by_class, confidence_overall
from peerbayes.reports.figures import COLOURS, panels
from peerbayes.reports.groups import by_setting, experiment_of, open_runs
from peerbayes.reports.record import Record
from peerbayes.reports.scoring import plain
from peerbayes.reports.tables import title
from peerbayes.runs.run import Run

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)  # whiskers, box and median
MAX_BOXES = 20  # classes up to which each has a box; more are a band, sorted by accuracy


def confidence(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """Return confidence max_c p_c and accuracy by true class, on the test split and out of distribution.

    The recipes name the out-of-distribution data. Predictions are those of `peerbayes evaluate`, pooled over seeds.

    Args:
        folders: run folders, or folders of them.
        device: where to predict.
        root: the data root.
    """
    series = []
    for runs in by_setting(open_runs(folders)):
        first = next(iter(runs.values()))
        loaded = first.data(root)
        foreign = {name: load_outside(name, loaded, root) for name in first.recipe.evaluation.out_of_distribution}
        for peer in first:
            log_p, labels = _pooled(runs, peer, loaded.test, device)
            outside = {name: _pooled(runs, peer, split, device)[0] for name, split in foreign.items()}
            by_class = confidence_by_class(log_p.exp(), labels, LEVELS)
            label = title(first.recipe.method) + (f" {peer}" if len(first) > 1 else "")
            series.append(
                {
                    "label": f"{label} · {' · '.join(experiment_of(first))}",
                    "seeds": list(runs),
                    "classes": list(loaded.class_names or map(str, range(loaded.classes))),
                    "count": by_class.count.tolist(),
                    "accuracy": plain(by_class.accuracy),
                    "mean": plain(by_class.mean),
                    "quantiles": [plain(row) for row in by_class.quantiles],
                    "outside": {name: _whole(values) for name, values in outside.items()},
                }
            )
    return {"split": "test", "levels": list(LEVELS), "series": series}


def _pooled(runs: Mapping[int, Run], peer: str, split: Split, device: str) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, C) and labels (N,) of a peer over all seeds."""
    where, predictions = pick_device(device), []
    for run in runs.values():
        draws = run.recipe.evaluation.draws
        predictions.append(run.predict_split(peer, split, draws, where)[:2])
    log_p, labels = (torch.cat(part) for part in zip(*predictions, strict=True))
    return log_p, labels


def _whole(log_p: Tensor) -> Record:
    mean, quantiles = confidence_overall(log_p.exp(), LEVELS)
    return {"count": len(log_p), "mean": mean, "quantiles": quantiles.tolist()}


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw_confidence(record: Record) -> Figure:
    """Draw a row for each setting: boxes of the confidence by true class with mean and accuracy, or a band."""
    most = max(min(MAX_BOXES, len(curve["classes"])) + len(curve["outside"]) for curve in record["series"])
    figure, rows = panels(len(record["series"]), 1, max(5.5, 2.2 + 0.55 * most), 3.9)
    lowest = min(_lowest(curve) for curve in record["series"])
    for (axes,), curve in zip(rows, record["series"], strict=True):
        _draw_boxes(axes, curve) if len(curve["classes"]) <= MAX_BOXES else _draw_band(axes, curve)
        seeds = f" · {len(curve['seeds'])} seeds pooled" if len(curve["seeds"]) > 1 else ""
        axes.set_title(f"{curve['label']} · test split, {sum(curve['count']):,} images{seeds}", fontsize=9)
        axes.set_ylabel("confidence, accuracy (%)")
        axes.set_ylim(lowest, 108)
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _lowest(curve: Record) -> float:
    values = [value for row in curve["quantiles"] for value in row] + curve["accuracy"]
    values += [value for other in curve["outside"].values() for value in other["quantiles"]]
    return float(max(0, 10 * math.floor(10 * min(value for value in values if value is not None) - 0.2)))


def _draw_boxes(axes: Any, curve: Record) -> None:
    present = [position for position, count in enumerate(curve["count"]) if count]
    boxes = [_box(curve["mean"][k], curve["quantiles"][k]) for k in present]
    boxes += [_box(other["mean"], other["quantiles"]) for other in curve["outside"].values()]
    positions = [*range(len(present)), *(len(present) + 0.5 + k for k in range(len(curve["outside"])))]
    drawn = axes.bxp(boxes, positions, widths=0.6, showfliers=False, patch_artist=True, manage_ticks=False)
    for position, patch in enumerate(drawn["boxes"]):
        patch.set(facecolor=COLOURS[0] if position < len(present) else COLOURS[3], alpha=0.55)
    for line in drawn["medians"]:
        line.set(color="black")
    for position, box in zip(positions, boxes, strict=True):
        axes.text(position, 101.5, f"{box['mean']:.1f}", ha="center", va="bottom", fontsize=7)
    accuracy = [100 * curve["accuracy"][k] for k in present]
    axes.plot(positions[: len(present)], accuracy, "D", color=COLOURS[1], markersize=5, label="accuracy", zorder=4)
    _explain(axes, bool(curve["outside"]))
    names = [curve["classes"][k] for k in present] + [_short(name) for name in curve["outside"]]
    upright = max(map(len, names)) <= 6
    axes.set_xticks(positions, names, rotation=0 if upright else 35, ha="center" if upright else "right", fontsize=8)
    axes.set_xlabel("true class" + (", and images from elsewhere" if curve["outside"] else ""))


def _explain(axes: Any, outside: bool) -> None:
    axes.bar([0], [0], color=COLOURS[0], alpha=0.55, label="confidence: quartiles,\n5 % and 95 %")
    if outside:
        axes.bar([0], [0], color=COLOURS[3], alpha=0.55, label="of images from\nelsewhere")
    axes.plot([], [], " ", label="above: mean confidence")


def _draw_band(axes: Any, curve: Record) -> None:
    # Too many classes to name: from the worst to the best.
    present = sorted((k for k, count in enumerate(curve["count"]) if count), key=lambda k: curve["accuracy"][k])
    rank = np.arange(len(present))
    low, quarter, median, third, high = (100 * np.array([curve["quantiles"][k][q] for k in present]) for q in range(5))
    axes.fill_between(rank, low, high, color=COLOURS[0], alpha=0.15, lw=0, label="confidence: 5 % to 95 %")
    axes.fill_between(rank, quarter, third, color=COLOURS[0], alpha=0.35, lw=0, label="confidence: quartiles")
    axes.plot(rank, median, color=COLOURS[0], lw=1, label="confidence: median")
    axes.plot(rank, [100 * curve["mean"][k] for k in present], "--", color="black", lw=1, label="confidence: mean")
    axes.plot(
        rank, [100 * curve["accuracy"][k] for k in present], ".", color=COLOURS[1], markersize=4, label="accuracy"
    )
    for number, (name, other) in enumerate(curve["outside"].items()):
        position = len(present) * (1.04 + 0.06 * number)
        style = {"widths": 0.035 * len(present), "patch_artist": True, "showfliers": False, "manage_ticks": False}
        box = axes.bxp([_box(other["mean"], other["quantiles"])], [position], **style)
        box["boxes"][0].set(facecolor=COLOURS[3], alpha=0.55)
        box["medians"][0].set(color="black")
        axes.text(position, 101.5, _short(name), ha="center", va="bottom", fontsize=7)
        label = None if number else "of images from\nelsewhere"
        axes.bar([0], [0], color=COLOURS[3], alpha=0.55, label=label)
    axes.set_xlabel(f"{len(present)} true classes, by accuracy")


def _box(mean: float, quantiles: list[float]) -> dict[str, Any]:
    low, quarter, median, third, high = (100 * value for value in quantiles)
    return {"mean": 100 * mean, "whislo": low, "q1": quarter, "med": median, "q3": third, "whishi": high}


def _short(name: str) -> str:
    return Path(name).stem
