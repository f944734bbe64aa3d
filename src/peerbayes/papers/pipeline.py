"""Figure and table of the steps that led to a run: its parents, its teachers, and the run itself."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import save
from torch import Tensor

from peerbayes.engine.processes import pick_device
from peerbayes.errors import InputError, within
from peerbayes.metrics.spread import Summary, summarise
from peerbayes.networks.inputs import to_unit
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.settings import TeacherOptions
from peerbayes.reports.evaluating import evaluate, find_runs
from peerbayes.reports.figures import COLOURS, panels
from peerbayes.reports.record import Record
from peerbayes.reports.tables import ENSEMBLE
from peerbayes.runs.plan import Node, Parent, parents_of
from peerbayes.runs.run import Run, peers_at
from peerbayes.showing import aligned

IMAGES = 256  # for the time of a prediction
REPEATS = 3
# Heading, factor, digits after the point.
COLUMNS = {
    "accuracy": ("ACC", 100.0, 2),
    "nll": ("NLL", 1.0, 3),
    "ece": ("ECE", 1.0, 3),
    "auroc": ("AUROC", 1.0, 3),
    "bytes": ("KB", 1e-3, 1),
    "passes": ("passes", 1.0, 0),
    "microseconds": ("µs/image", 1.0, 1),
}
DRAWN = ("accuracy", "nll", "ece", "auroc", "bytes", "microseconds")


def pipeline(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """Return figures of every step that led to each run; see `COLUMNS`.

    The last recipe names the out-of-distribution data of all steps. The size of a step that predicts with one plain
    network is that network's. The time of a prediction is that of all draws of all peers, the best of several repeats,
    on this machine.

    Args:
        folders: run folders, or folders of them.
        device: where to predict.
        root: the data root.
    """
    chains: list[Record] = []
    for folder in folders:
        for path in find_runs(folder):
            run = Run(path)
            outside = run.recipe.evaluation.out_of_distribution
            steps = [_evaluated(step, names, outside, device, root) for step, names in _steps(run).values()]
            chains.append({"folder": str(path), "seed": run.seed, "outside": outside, "steps": steps})
    names = [[(step["recipe"], [who["name"] for who in step["who"]]) for step in chain["steps"]] for chain in chains]
    if any(other != names[0] for other in names):
        raise InputError("figure pipeline: the runs have different steps; draw them one by one")
    return {"chains": chains}


def _steps(run: Run, named: Iterable[str] = ()) -> dict[Path, tuple[Run, list[str]]]:
    """Return the runs that led to a run, oldest first, each with the peers that it used; then the run."""
    node = parents_of(run)
    wanted: list[tuple[Parent, TeacherOptions | None]] = [(start, None) for start in node.starts.values()]
    wanted += [(source, run.recipe.teachers) for source in node.teachers]
    networks: dict[Path, tuple[Run, list[str]]] = {}
    for source, teachers in wanted:
        assert not isinstance(source, Posterior)  # only plans made in Python have one
        if isinstance(source, Path) and source.is_file() and not (source.parent / "recipe.toml").is_file():
            continue  # weights without a run: the chain starts after them
        with within(f"a step before {run.folder}"):
            before, names = peers_at(source.folder if isinstance(source, Node) else source)
        teaching = [name for name in names if teachers is None or teachers.has(name)]
        for folder, (step, used) in _steps(before, teaching).items():
            earlier = networks.get(folder, (step, []))[1]
            networks[folder] = step, [name for name in step if name in {*earlier, *used}]
    return networks | {run.folder.resolve(): (run, list(named or run))}


def _evaluated(run: Run, names: Sequence[str], outside: Sequence[str], device: str, root: str | Path | None) -> Record:
    loaded = run.data(root)
    record = evaluate(run, out_of_distribution=outside, data=loaded, device=device, root=root)
    images, _ = loaded.test.batch(torch.arange(min(IMAGES, len(loaded.test))), pick_device(device))
    who = []
    for peer in (evaluated for evaluated in record["peers"] if evaluated["name"] in names):
        posterior = run[peer["name"]].to(images.device)
        passes = record["draws"] if posterior.stochastic else 1
        who.append(
            _figures(peer, outside)
            | {"bytes": _size(run, peer["name"], posterior), "passes": passes}
            | {"microseconds": _microseconds(posterior, to_unit(images), passes)}
        )
    if ENSEMBLE in record and len(names) == len(run):
        sums = {key: sum(evaluated[key] for evaluated in who) for key in ("bytes", "passes", "microseconds")}
        who.append(_figures(record[ENSEMBLE] | {"name": ENSEMBLE}, outside) | sums)
    return {
        "recipe": run.recipe.name,
        "title": run.recipe.title,
        "method": run.recipe.method,
        "seconds": record["seconds"],
        "who": who,
    }


def _figures(evaluated: Record, outside: Sequence[str]) -> Record:
    kept = {key: evaluated[key] for key in ("name", "accuracy", "nll", "ece")}
    aurocs = [evaluated["out_of_distribution"][name]["auroc"] for name in outside]
    return kept | {"auroc": sum(aurocs) / len(aurocs) if aurocs else None}


def _size(run: Run, name: str, posterior: Posterior) -> int:
    if posterior.stochastic:
        return run.weights_file(name).stat().st_size
    state = {key: tensor.contiguous() for key, tensor in posterior.materialise().state_dict().items()}
    return len(save(state))


def _microseconds(posterior: Posterior, images: Tensor, draws: int) -> float:
    """Return the time of a prediction, in µs per image."""
    seconds = []
    for _ in range(1 + REPEATS):  # the first one warms up
        begun = time.perf_counter()
        posterior.predict(images, draws).probabilities.sum().item()
        seconds.append(time.perf_counter() - begun)
    return 1e6 * min(seconds[1:]) / len(images)


# ---- shown -----------------------------------------------------------------------------------------------------------


def _rows(record: Record) -> list[tuple[str, str, dict[str, list[float]]]]:
    """Return step, who, and the values of each column over the chains."""
    rows = []
    for index, step in enumerate(record["chains"][0]["steps"]):
        for number, who in enumerate(step["who"]):
            same = [chain["steps"][index]["who"][number] for chain in record["chains"]]
            values = {key: [row[key] * COLUMNS[key][1] for row in same if row[key] is not None] for key in COLUMNS}
            rows.append((step["method"], who["name"], {key: numbers for key, numbers in values.items() if numbers}))
    return rows


def pipeline_table(record: Record) -> str:
    """Return the steps as a table; over several seeds mean ± standard error."""
    rows = _rows(record)
    shown = [key for key in COLUMNS if any(key in values for _, _, values in rows)]
    before = ""
    lines = [["step", "", *(COLUMNS[key][0] for key in shown)]]
    for step, who, values in rows:
        cells = []
        for key in shown:
            digits = COLUMNS[key][2]
            summary = summarise(values[key])
            error = "" if summary.standard_error is None else f" ± {summary.standard_error:,.{digits}f}"
            cells.append(f"{summary.mean:z,.{digits}f}{error}")
        lines.append(["" if step == before else step, who, *cells])
        before = step
    return "\n".join(aligned(lines, left=2))


def draw_pipeline(record: Record) -> Figure:
    """Draw a panel for each column with standard errors over seeds: bars, or dots where an axis does not begin at 0."""
    rows = _rows(record)
    shown = [key for key in DRAWN if any(key in values for _, _, values in rows)]
    figure, grid = panels(1, len(shown), 2.3, 0.7 + 0.32 * len(rows))
    steps = [step for step, _, _ in rows]
    names = [step if steps.count(step) == 1 else f"{step}: {who}" for step, who, _ in rows]
    colours = dict(zip(dict.fromkeys(steps), itertools.cycle(COLOURS)))
    for axes, key in zip(grid[0], shown, strict=True):
        _draw_steps(axes, key, [summarise(values[key]) for _, _, values in rows], [colours[step] for step in steps])
        axes.set_yticks(range(len(rows)), names if key == shown[0] else [""] * len(rows), fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
    if len(record["chains"]) > 1:
        figure.suptitle(f"Mean and standard error over {len(record['chains'])} seeds", fontsize=8)
    return figure


def _draw_steps(axes: Any, key: str, steps: Sequence[Summary], colours: Sequence[str]) -> None:
    """Draw a column as bars, or as dots where the axis does not begin at 0."""
    heading, _, digits = COLUMNS[key]
    ends = [(step.mean - (step.standard_error or 0), step.mean + (step.standard_error or 0)) for step in steps]
    finite = [end for both in ends for end in both if math.isfinite(end)] or [1.0]  # an NLL can be infinite
    low, high = min(finite), max(finite)
    if key in ("bytes", "microseconds"):
        axes.set_xscale("log")
        axes.set_xlim(min(step.mean for step in steps) / 3, 8 * high)
    elif key in ("accuracy", "auroc") and low > high / 2:
        room = high - low or 0.02 * high
        axes.set_xlim(low - 0.15 * room, high + 0.45 * room)
    else:
        axes.set_xlim(0, 1.4 * high or 1.0)
    bars = axes.get_xlim()[0] == 0
    axes.grid(visible=not bars)
    for position, (step, colour) in enumerate(zip(steps, colours, strict=True)):
        end = axes.get_xlim()[0]
        if math.isfinite(step.mean):
            end = ends[position][1]
            if bars:
                axes.barh(position, step.mean, color=colour, height=0.7)
            style = {"fmt": "none", "ecolor": "black"} if bars else {"fmt": "o", "color": colour, "markersize": 6}
            axes.errorbar(step.mean, position, xerr=step.standard_error, capsize=2, linewidth=1, **style)
        offset = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
        axes.annotate(f"{step.mean:,.{digits}f}", (end, position), **offset)
    axes.set_title(heading, fontsize=9)
