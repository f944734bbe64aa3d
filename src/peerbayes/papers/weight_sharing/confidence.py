"""How sure runs are, class by class and of images from elsewhere; drawn, with the numbers behind it, ready for JSON."""

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
NAMED = 20  # classes that are drawn one by one; more are sorted by accuracy, as a band


def confidence(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """Confidence max_c p_c and accuracy by true class, on the test split and on what the recipes name as outside.

    Predictions are those of `peerbayes evaluate`; those of runs that differ in the seed alone are pooled.

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


def draw_confidence(found: Record) -> Figure:
    """A row a setting: boxes of the confidence by true class with its mean above and the accuracy beside, or a band."""
    most = max(min(NAMED, len(one["classes"])) + len(one["outside"]) for one in found["series"])
    figure, rows = panels(len(found["series"]), 1, max(5.5, 2.2 + 0.55 * most), 3.9)
    lowest = min(_lowest(one) for one in found["series"])
    for (axes,), one in zip(rows, found["series"], strict=True):
        _draw_boxes(axes, one) if len(one["classes"]) <= NAMED else _draw_band(axes, one)
        seeds = f" · {len(one['seeds'])} seeds pooled" if len(one["seeds"]) > 1 else ""
        axes.set_title(f"{one['label']} · test split, {sum(one['count']):,} images{seeds}", fontsize=9)
        axes.set_ylabel("confidence, accuracy (%)")
        axes.set_ylim(lowest, 108)
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _lowest(one: Record) -> float:
    values = [value for row in one["quantiles"] for value in row] + one["accuracy"]
    values += [value for other in one["outside"].values() for value in other["quantiles"]]
    return float(max(0, 10 * math.floor(10 * min(value for value in values if value is not None) - 0.2)))


def _draw_boxes(axes: Any, one: Record) -> None:
    known = [place for place, count in enumerate(one["count"]) if count]
    boxes = [_box(one["mean"][k], one["quantiles"][k]) for k in known]
    boxes += [_box(other["mean"], other["quantiles"]) for other in one["outside"].values()]
    places = [*range(len(known)), *(len(known) + 0.5 + k for k in range(len(one["outside"])))]
    drawn = axes.bxp(boxes, places, widths=0.6, showfliers=False, patch_artist=True, manage_ticks=False)
    for place, patch in enumerate(drawn["boxes"]):
        patch.set(facecolor=COLOURS[0] if place < len(known) else COLOURS[3], alpha=0.55)
    for line in drawn["medians"]:
        line.set(color="black")
    for place, box in zip(places, boxes, strict=True):
        axes.text(place, 101.5, f"{box['mean']:.1f}", ha="center", va="bottom", fontsize=7)
    axes.plot(known and places[: len(known)], [100 * one["accuracy"][k] for k in known], "D", color=COLOURS[1],
              markersize=5, label="accuracy", zorder=4)  # fmt: skip
    _explain(axes, bool(one["outside"]))
    names = [one["classes"][k] for k in known] + [_short(name) for name in one["outside"]]
    upright = max(map(len, names)) <= 6
    axes.set_xticks(places, names, rotation=0 if upright else 35, ha="center" if upright else "right", fontsize=8)
    axes.set_xlabel("true class" + (", and images from elsewhere" if one["outside"] else ""))


def _explain(axes: Any, outside: bool) -> None:
    axes.bar([0], [0], color=COLOURS[0], alpha=0.55, label="confidence: quartiles,\n5 % and 95 %")
    if outside:
        axes.bar([0], [0], color=COLOURS[3], alpha=0.55, label="of images from\nelsewhere")
    axes.plot([], [], " ", label="above: mean confidence")


def _draw_band(axes: Any, one: Record) -> None:
    # Too many classes to name: from the worst to the best.
    known = sorted((k for k, count in enumerate(one["count"]) if count), key=lambda k: one["accuracy"][k])
    rank = np.arange(len(known))
    low, quarter, median, third, high = (100 * np.array([one["quantiles"][k][q] for k in known]) for q in range(5))
    axes.fill_between(rank, low, high, color=COLOURS[0], alpha=0.15, lw=0, label="confidence: 5 % to 95 %")
    axes.fill_between(rank, quarter, third, color=COLOURS[0], alpha=0.35, lw=0, label="confidence: quartiles")
    axes.plot(rank, median, color=COLOURS[0], lw=1, label="confidence: median")
    axes.plot(rank, [100 * one["mean"][k] for k in known], "--", color="black", lw=1, label="confidence: mean")
    axes.plot(rank, [100 * one["accuracy"][k] for k in known], ".", color=COLOURS[1], markersize=4, label="accuracy")
    for number, (name, other) in enumerate(one["outside"].items()):
        place = len(known) * (1.04 + 0.06 * number)
        how = {"widths": 0.035 * len(known), "patch_artist": True, "showfliers": False, "manage_ticks": False}
        box = axes.bxp([_box(other["mean"], other["quantiles"])], [place], **how)
        box["boxes"][0].set(facecolor=COLOURS[3], alpha=0.55)
        box["medians"][0].set(color="black")
        axes.text(place, 101.5, _short(name), ha="center", va="bottom", fontsize=7)
        label = None if number else "of images from\nelsewhere"
        axes.bar([0], [0], color=COLOURS[3], alpha=0.55, label=label)
    axes.set_xlabel(f"{len(known)} true classes, by accuracy")


def _box(mean: float, quantiles: list[float]) -> dict[str, Any]:
    low, quarter, median, third, high = (100 * value for value in quantiles)
    return {"mean": 100 * mean, "whislo": low, "q1": quarter, "med": median, "q3": third, "whishi": high}


def _short(name: str) -> str:
    return Path(name).stem
