"""Report a sweep: its settings as a table, and a figure of the objective against the swept keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from peerbayes.metrics.spread import paired_difference
from peerbayes.posteriors import storage
from peerbayes.reports.figures import COLOURS, draw_heat_map, new_axes, png
from peerbayes.reports.record import Record
from peerbayes.reports.tables import COLUMNS, cell
from peerbayes.showing import aligned
from peerbayes.studies.space import Axis, setting_title, shown
from peerbayes.studies.sweeps import OBJECTIVES, Sweep

RANKED = {name: column for name, column in COLUMNS.items() if column[0] in OBJECTIVES}
LISTED = 30  # best settings that a figure names


def sweep_table(sweep: Sweep) -> str:
    """Return a sweep's settings as plain text: the best first, then those running elsewhere, then those that failed."""
    keys = [axis.key for axis in sweep.axes]
    lines = [("", *keys, *(f"{name}{' *' * (key == sweep.objective)}" for name, (key, _) in RANKED.items()))]
    for row in sweep.table:
        cells = [""] * len(RANKED)
        if row["state"] == "complete":
            seeds = row["seeds"].values()
            cells = [cell([seed[key] * scale for seed in seeds], scale) for key, scale in RANKED.values()]
        rank = str(row["rank"] or row["state"])
        lines.append((rank, *(shown(value, digits=4) for value in row["setting"].values()), *cells))
    count = len(sweep.seeds)
    spread = f"mean ± standard error over {count} seeds" if count > 1 else "1 seed"
    text = [f"{sweep.recipe.title}: validation split, {spread}, ranked by *", "", *aligned(lines, left=1)]
    notes = [f"{setting_title(r['setting'])} failed: {r['reason']}" for r in sweep.table if r["state"] == "failed"]
    if any(row["state"] == "running" for row in sweep.table):
        notes.append("running: in another process; the same command shows them when they are done")
    done = [row for row in sweep.table if row["state"] == "complete"]
    if len(done) > 1:
        notes.insert(0, _lead(sweep, *done[:2]))
    if done:
        changes = " ".join(f"--set '{change}'" for change in done[0]["changes"])
        notes.append(f"the best setting for train: {changes}")
    return "\n".join([*text, "", *notes]).rstrip()


def _lead(sweep: Sweep, best: Record, second: Record) -> str:
    name, scale = next((name, scale) for name, (key, scale) in RANKED.items() if key == sweep.objective)
    a, b = ({int(s): v[sweep.objective] * scale for s, v in row["seeds"].items()} for row in (best, second))
    seeds = f"{len(a)} seed{'s' if len(a) > 1 else ''}"
    return f"first − second, validation {name}, paired over {seeds}: {paired_difference(a, b).describe()}"


def write_sweep_figure(sweep: Sweep) -> list[Path]:
    """Draw a sweep into its folder; return the file's path, or nothing if no setting is finished."""
    if sweep.best is None:
        return []
    path = sweep.folder / "sweep.png"
    storage.write_bytes(path, png(sweep_figure(sweep)))
    return [path]


def sweep_figure(sweep: Sweep) -> Figure:
    """Draw the objective on the validation split against the swept keys.

    One key: mean and standard error against its values, with a point a seed. Two keys that form a grid: a heat map of
    means. Otherwise the best settings by rank.
    """
    rows = [row for row in sweep.table if row["state"] == "complete"]
    if len(sweep.axes) == 1:
        return _curve(sweep, rows)
    if len(sweep.axes) == 2 and not any(axis.is_range for axis in sweep.axes):
        return _heat_map(sweep, rows)
    return _ranking(sweep, rows[:LISTED])


def _objective(sweep: Sweep) -> tuple[str, float]:
    name, scale = next((name, scale) for name, (key, scale) in RANKED.items() if key == sweep.objective)
    return f"validation {name}" + " (%)" * (scale == 100), scale


def _error_bars(axes: Any, sweep: Sweep, rows: Sequence[Record], positions: Sequence[float], upright: bool) -> None:
    # A grey point for each seed and the mean in colour; the best setting differs in colour and shape.
    _, scale = _objective(sweep)
    for position, row in zip(positions, rows, strict=True):
        values = [seed[sweep.objective] * scale for seed in row["seeds"].values()]
        mean, error = row[sweep.objective]["mean"] * scale, row[sweep.objective]["standard_error"]
        best = row["rank"] == 1
        style = {"color": COLOURS[1] if best else COLOURS[0], "capsize": 3, "markersize": 7 if best else 5, "zorder": 3}
        bar = {"yerr" if upright else "xerr": None if error is None else error * scale}
        along = [position] * len(values)
        axes.plot(*((along, values) if upright else (values, along)), "o", color="#999999", markersize=3, alpha=0.7)
        point = (position, mean) if upright else (mean, position)
        label = f"best: {setting_title(row['setting'], digits=3)}" if best else None
        axes.errorbar(*point, **bar, fmt="D" if best else "o", label=label, **style)


def _curve(sweep: Sweep, rows: Sequence[Record]) -> Figure:
    figure, axes = new_axes()
    axis = sweep.axes[0]
    given = [row["setting"][axis.key] for row in rows]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in given)
    positions = [float(value) for value in given] if numeric else [float(axis.values.index(value)) for value in given]
    _error_bars(axes, sweep, rows, positions, upright=True)
    if not axis.is_range:
        means = sorted((p, row["value"] * _objective(sweep)[1]) for p, row in zip(positions, rows, strict=True))
        axes.plot(*zip(*means, strict=True), color=COLOURS[0], linewidth=1, alpha=0.6 if numeric else 0)
    if numeric and _wants_log(axis, positions):
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(range(len(axis.values)), [shown(value) for value in axis.values])
    axes.set_xlabel(axis.key)
    axes.set_ylabel(_objective(sweep)[0])
    axes.legend(frameon=False, fontsize=8)
    return figure


def _wants_log(axis: Axis, positions: Sequence[float]) -> bool:
    return axis.log or (not axis.is_range and min(positions) > 0 and max(positions) >= 50 * min(positions))


def _heat_map(sweep: Sweep, rows: Sequence[Record]) -> Figure:
    figure, axes = new_axes()
    down, across = sweep.axes
    label, scale = _objective(sweep)
    means = np.full((len(down.values), len(across.values)), np.nan)
    best = (0, 0)
    for row in rows:
        index = down.values.index(row["setting"][down.key]), across.values.index(row["setting"][across.key])
        means[index] = row["value"] * scale
        best = index if row["rank"] == 1 else best
    picture = draw_heat_map(axes, means, best, digits=2 if scale == 100 else 3, high=sweep.objective == "accuracy")
    axes.set_xticks(range(len(across.values)), [shown(value) for value in across.values])
    axes.set_yticks(range(len(down.values)), [shown(value) for value in down.values])
    axes.set_xlabel(across.key)
    axes.set_ylabel(down.key)
    figure.colorbar(picture, label=label)
    return figure


def _ranking(sweep: Sweep, rows: Sequence[Record]) -> Figure:
    figure, axes = new_axes(7.2, 1.2 + 0.26 * len(rows))
    positions = [float(rank) for rank in range(len(rows))]
    _error_bars(axes, sweep, rows, positions, upright=False)
    axes.set_yticks(positions, [setting_title(row["setting"], digits=3) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(_objective(sweep)[0])
    return figure
