"""What each step on the way to a run costs and keeps: what it started from, its teachers, and the run itself."""

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

IMAGES = 256  # that the time of a prediction is measured on
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

    Steps are evaluated on the data sets out of distribution that the last recipe names. What predicts with one plain
    network is as large as that network, whatever lies in the run beside it. A prediction's time is that of all draws of
    all peers, the best of some repeats, on this machine.

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
            steps = [_judged(step, names, outside, device, root) for step, names in _steps(run).values()]
            chains.append({"folder": str(path), "seed": run.seed, "outside": outside, "steps": steps})
    names = [[(step["recipe"], [who["name"] for who in step["who"]]) for step in chain["steps"]] for chain in chains]
    if any(other != names[0] for other in names):
        raise InputError("figure pipeline: the runs came about by different steps; draw them one by one")
    return {"chains": chains}


def _steps(run: Run, named: Iterable[str] = ()) -> dict[Path, tuple[Run, list[str]]]:
    """Return the runs that a run needed, each with the peers that it needed, as they were made; then itself."""
    node = parents_of(run)
    wanted: list[tuple[Parent, TeacherOptions | None]] = [(start, None) for start in node.starts.values()]
    wanted += [(source, run.recipe.teachers) for source in node.teachers]
    networks: dict[Path, tuple[Run, list[str]]] = {}
    for source, teachers in wanted:
        assert not isinstance(source, Posterior)  # which only plans made from Python have
        if isinstance(source, Path) and source.is_file() and not (source.parent / "recipe.toml").is_file():
            continue  # weights of elsewhere: the chain begins with what was made of them
        with within(f"a step before {run.folder}"):
            before, names = peers_at(source.folder if isinstance(source, Node) else source)
        taken = [name for name in names if teachers is None or teachers.has(name)]
        for place, (step, some) in _steps(before, taken).items():
            known = networks.get(place, (step, []))[1]
            networks[place] = step, [name for name in step if name in {*known, *some}]
    return networks | {run.folder.resolve(): (run, list(named or run))}


def _judged(run: Run, names: Sequence[str], outside: Sequence[str], device: str, root: str | Path | None) -> Record:
    loaded = run.data(root)
    record = evaluate(run, out_of_distribution=outside, data=loaded, device=device, root=root)
    images, _ = loaded.test.batch(torch.arange(min(IMAGES, len(loaded.test))), pick_device(device))
    who = []
    for peer in (one for one in record["peers"] if one["name"] in names):
        posterior = run[peer["name"]].to(images.device)
        passes = record["draws"] if posterior.stochastic else 1
        who.append(
            _figures(peer, outside)
            | {"bytes": _size(run, peer["name"], posterior), "passes": passes}
            | {"microseconds": _microseconds(posterior, to_unit(images), passes)}
        )
    if ENSEMBLE in record and len(names) == len(run):
        sums = {key: sum(one[key] for one in who) for key in ("bytes", "passes", "microseconds")}
        who.append(_figures(record[ENSEMBLE] | {"name": ENSEMBLE}, outside) | sums)
    return {
        "recipe": run.recipe.name,
        "title": run.recipe.title,
        "method": run.recipe.method,
        "seconds": record["seconds"],
        "who": who,
    }


def _figures(found: Record, outside: Sequence[str]) -> Record:
    kept = {key: found[key] for key in ("name", "accuracy", "nll", "ece")}
    told = [found["out_of_distribution"][name]["auroc"] for name in outside]
    return kept | {"auroc": sum(told) / len(told) if told else None}


def _size(run: Run, name: str, posterior: Posterior) -> int:
    if posterior.stochastic:
        return run.weights_file(name).stat().st_size
    state = {key: tensor.contiguous() for key, tensor in posterior.materialise().state_dict().items()}
    return len(save(state))


def _microseconds(posterior: Posterior, images: Tensor, draws: int) -> float:
    """Return the time of a prediction, in µs an image."""
    taken = []
    for _ in range(1 + REPEATS):  # the first one warms up
        begun = time.perf_counter()
        posterior.predict(images, draws).probabilities.sum().item()
        taken.append(time.perf_counter() - begun)
    return 1e6 * min(taken[1:]) / len(images)


# ---- shown -----------------------------------------------------------------------------------------------------------


def _rows(found: Record) -> list[tuple[str, str, dict[str, list[float]]]]:
    """Return step, who, and the values of each column over the chains."""
    rows = []
    for place, step in enumerate(found["chains"][0]["steps"]):
        for number, who in enumerate(step["who"]):
            same = [chain["steps"][place]["who"][number] for chain in found["chains"]]
            values = {key: [one[key] * COLUMNS[key][1] for one in same if one[key] is not None] for key in COLUMNS}
            rows.append((step["method"], who["name"], {key: some for key, some in values.items() if some}))
    return rows


def pipeline_table(found: Record) -> str:
    """Return the steps as a table; over several seeds mean ± standard error."""
    rows = _rows(found)
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


def draw_pipeline(found: Record) -> Figure:
    """A panel a column, with standard errors over seeds: a bar a step, or a dot where an axis does not begin at 0."""
    rows = _rows(found)
    shown = [key for key in DRAWN if any(key in values for _, _, values in rows)]
    figure, grid = panels(1, len(shown), 2.3, 0.7 + 0.32 * len(rows))
    steps = [step for step, _, _ in rows]
    names = [step if steps.count(step) == 1 else f"{step}: {who}" for step, who, _ in rows]
    colours = dict(zip(dict.fromkeys(steps), itertools.cycle(COLOURS)))
    for axes, key in zip(grid[0], shown, strict=True):
        _draw_steps(axes, key, [summarise(values[key]) for _, _, values in rows], [colours[step] for step in steps])
        axes.set_yticks(range(len(rows)), names if key == shown[0] else [""] * len(rows), fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
    if len(found["chains"]) > 1:
        figure.suptitle(f"Mean and standard error over {len(found['chains'])} seeds", fontsize=8)
    return figure


def _draw_steps(axes: Any, key: str, steps: Sequence[Summary], colours: Sequence[str]) -> None:
    """Draw a column. The length of a bar says something only if it begins at 0: elsewhere there are dots."""
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
    for place, (step, colour) in enumerate(zip(steps, colours, strict=True)):
        end = axes.get_xlim()[0]
        if math.isfinite(step.mean):
            end = ends[place][1]
            if bars:
                axes.barh(place, step.mean, color=colour, height=0.7)
            look = {"fmt": "none", "ecolor": "black"} if bars else {"fmt": "o", "color": colour, "markersize": 6}
            axes.errorbar(step.mean, place, xerr=step.standard_error, capsize=2, linewidth=1, **look)
        where = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
        axes.annotate(f"{step.mean:,.{digits}f}", (end, place), **where)
    axes.set_title(heading, fontsize=9)
