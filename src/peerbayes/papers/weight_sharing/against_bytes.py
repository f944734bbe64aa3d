"""Figure of accuracy, NLL and ECE against bytes on disk, and its numbers for JSON."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from statistics import mode
from typing import Annotated, Any, Literal

from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox
from pydantic import Field

from peerbayes.errors import InputError
from peerbayes.posteriors.kinds import PosteriorOptions
from peerbayes.reports.evaluating import evaluate
from peerbayes.reports.figures import COLOURS, MARKERS, panels
from peerbayes.reports.groups import by_setting, differing, experiment_of, open_runs, over_seeds
from peerbayes.reports.record import Record
from peerbayes.reports.tables import COLUMNS, title
from peerbayes.runs.run import Run, read_json
from peerbayes.schema import Table

MOST_KEYS = 3  # options up to which labels name all that differ, and not only unusual values
NUMBERED = 4  # lines up to which points are labelled with their number of components
MARKER = 4  # diameter in points
SIDES: tuple[tuple[tuple[int, int], Literal["left", "right"]], ...]  # offsets of a label from its point
SIDES = ((3, 4), "left"), ((3, -9), "left"), ((-3, 4), "right"), ((-3, -9), "right")
OF_OUTLIERS = ("threshold", "top", "smallest")  # options without effect where there are no outliers
FAR = 3  # times the largest file of a line, beyond which a reference is only a line: a point would stretch the axis
NARROW = 1.2  # ratio of the largest to the smallest file, below which the axis of bytes is widened
YES_NO = {  # legend of an option that is true, or false
    "thrifty": ("a thrifty codebook", "a plain codebook"),
    "outliers": ("outliers", "no outliers"),
    "blend": ("blending", "no blending"),
    "mixture": ("mixtures", "no mixtures"),
    "merge_every_epoch": ("merged every epoch", "not merged every epoch"),
}
FORMS = {"bits": "{} bits", "em_steps": "EM steps {}", "sampling": "{} sampling", "prior": "{} prior"}  # of other ones
Runs = Mapping[int, Run]  # of one setting, by seed


class _SizedPeer(Table):
    name: str
    accuracy: float
    nll: float
    ece: float


class _SizedRecord(Table):
    """The part of a record that the figure needs."""

    peers: Annotated[list[_SizedPeer], Field(min_length=1)]


def size(folders: Iterable[str | Path], device: str = "auto", root: str | Path | None = None) -> Record:
    """Return figures of the test split against the size of the weights file, over seeds, by network and data set.

    Runs of shared weights that differ only in the number of components, or in ``thrift``, form a line from few
    components to many. All other runs are references. Figures are those of evaluation.json; a run without one is
    evaluated first.

    Args:
        folders: run folders, or folders of them.
        device: where to predict.
        root: the data root.
    """
    runs = open_runs(folders, custom=False)
    records = {run.folder: _record(run, device, root) for run in runs}

    def figure(key: str, run: Run) -> float:
        return mean(peer[key] for peer in records[run.folder]["peers"])

    def point(group: Runs) -> Record:
        keys = ("bytes", *(key for key, _ in COLUMNS.values()))
        return {key: over_seeds(group, functools.partial(figure, key)) for key in keys}

    experiments: dict[tuple[str, str], list[Runs]] = {}
    for group in by_setting(runs):
        experiments.setdefault(experiment_of(_first(group)), []).append(group)
    series = []
    for (network, dataset), groups in experiments.items():
        shared = [group for group in groups if _codebook(group) is not None]
        unshared = [group for group in groups if _codebook(group) is None]
        references = [{"label": title(_first(group).recipe.method), **point(group)} for group in unshared]
        lines = _lines(shared, point)
        series.append({"network": network, "dataset": dataset, "lines": lines, "references": references})
    return {"split": "test", "experiments": series}


def _record(run: Run, device: str, root: str | Path | None) -> Record:
    path = run.folder / "evaluation.json"
    record = read_json(path) if path.is_file() else evaluate(run, device=device, root=root)
    _SizedRecord.parse(record, str(path))
    for peer in record["peers"]:  # older records have no bytes
        peer.setdefault("bytes", run.weights_file(peer["name"]).stat().st_size)
    return record


def _first(group: Runs) -> Run:
    return next(iter(group.values()))


def _codebook(group: Runs) -> PosteriorOptions | None:
    options = _first(group).recipe.peers[0].posterior
    return options if options.posterior_class.made_of_posterior else None


def _lines(groups: Sequence[Runs], point: Any) -> list[Record]:
    """Return a line for settings that differ only in the number of components, or in ``thrift``."""
    options = [_flat_options(group) for group in groups]
    of_outliers = set(OF_OUTLIERS).difference(differing([setting for setting in options if setting["outliers"]]))
    differ = [key for key in differing(options) if key != "components" and key not in of_outliers]
    unusual_only = differ if len(differ) > MOST_KEYS else []
    usual = {key: mode([setting.get(key) for setting in options]) for key in unusual_only}
    lines: dict[str, list[Record]] = {}
    for group, setting in zip(groups, options, strict=True):
        keys = [key for key in differ if key not in usual or setting.get(key) != usual[key]]
        keys = _of_outliers_once(keys, setting["outliers"])
        lines.setdefault(_label(setting, keys), []).append({"components": _components(group, setting), **point(group)})
    return [
        {
            "label": label,
            "points": sorted(points, key=lambda setting: (setting["components"], setting["bytes"]["mean"])),
        }
        for label, points in lines.items()
    ]


def _of_outliers_once(keys: Sequence[str], outliers: bool) -> list[str]:
    """Drop redundant keys: the choice of outliers if there are none, ``outliers`` if the choice is named."""
    outlier_keys = [key for key in keys if key in OF_OUTLIERS]
    left_out = [] if not outlier_keys else ["outliers"] if outliers else outlier_keys
    return [key for key in keys if key not in left_out]


def _label(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return options in words: ``shared_small: a thrifty codebook, no outliers``; without any, the method."""
    label = ", ".join(_words(key, options[key]) for key in keys if key != "method")
    named = [options["method"]] if "method" in keys or not label else []
    return ": ".join([*named, *([label] if label else [])])


def _words(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return YES_NO[key][not value]
    if key == "merge.distance" and not value:
        return "nothing merged"
    return FORMS.get(key, key.replace("_", " ").replace(".", " ") + " {}").format(value)


def _flat_options(group: Runs) -> dict[str, Any]:
    codebook = _codebook(group)
    assert codebook is not None
    table = codebook.model_dump(exclude={"kind"})
    merge, thrift = table.pop("merge"), table.pop("thrift")
    about = {"method": title(_first(group).recipe.method), "thrifty": thrift > 0}
    return about | table | {f"merge.{key}": value for key, value in merge.items()}


def _components(group: Runs, options: Mapping[str, Any]) -> int:
    """Return the number of components in the options; if it follows from the number of weights, the actual one."""
    if options["components"]:
        return int(options["components"])
    run = _first(group)
    account = run.account(name := run.recipe.peers[0].name)
    if account is None:
        raise InputError(f"{run.folder / 'sharing.json'}: {name}: is missing; it says how many components there were")
    return account.components_at_first


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw_size(record: Record) -> Figure:
    """Draw a row for each network and data set, a panel for each figure, lines for codebooks and references."""
    figure, rows = panels(len(record["experiments"]), len(COLUMNS), 4.4, 3.7)
    for row, experiment in zip(rows, record["experiments"], strict=True):
        sizes = [point["bytes"]["mean"] for line in experiment["lines"] for point in line["points"]]
        beyond = FAR * max(sizes, default=math.inf)
        for axes, (name, (key, scale)) in zip(row, COLUMNS.items(), strict=True):
            for number, line in enumerate(experiment["lines"]):
                style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
                _draw_line(axes, line, key, scale, style, len(experiment["lines"]) <= NUMBERED)
            for number, reference in enumerate(experiment["references"]):
                _draw_reference(axes, reference, key, scale, number, beyond)
            axes.set_xscale("log")
            _ticks(axes)
            axes.set_xlabel("bytes on disk")
            axes.set_ylabel(f"test {name}" + (" (%)" if scale == 100 else " (nats per image)" if name == "NLL" else ""))
            axes.set_title(f"{experiment['network']} · {experiment['dataset']}", fontsize=9)
        first = {line["label"] for line in experiment["lines"]}  # matplotlib would list plain lines first
        named = sorted(zip(*row[0].get_legend_handles_labels(), strict=True), key=lambda entry: entry[1] not in first)
        handles, labels = zip(*named, strict=True)
        row[-1].legend(handles, labels, frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle("Mean and standard error over seeds; small numbers: components, before any were merged", fontsize=8)
    figure.draw_without_rendering()  # fixes the layout
    for axes in itertools.chain.from_iterable(rows):
        _keep_apart(axes)
    return figure


def _draw_line(axes: Any, line: Record, key: str, scale: float, style: Record, annotate: bool) -> None:
    points = line["points"]
    x = [point["bytes"]["mean"] for point in points]
    y = [point[key]["mean"] * scale for point in points]
    errors = [(point[key]["standard_error"] or 0) * scale for point in points]
    wide = [point["bytes"]["standard_error"] or 0 for point in points]
    axes.errorbar(x, y, errors, wide, capsize=2, markersize=MARKER, linewidth=1.2, label=line["label"], **style)
    if annotate:
        for point, position in zip(points, zip(x, y, strict=True), strict=True):
            axes.annotate(f"{point['components']:,}", position, SIDES[0][0], textcoords="offset points", fontsize=6,
                          color=style["color"])  # fmt: skip


def _keep_apart(axes: Any) -> None:
    """Move labels that overlap others, or points, to another side; remove those without a free side."""
    numbers = [text for text in axes.texts if isinstance(text, Annotation)]
    half = MARKER / 2 * axes.figure.dpi / 72
    points = [axes.transData.transform(number.xy) for number in numbers]
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in points]
    for number in numbers:
        for offset, side in SIDES:
            number.xyann = offset
            number.set_horizontalalignment(side)
            if not (box := number.get_window_extent()).count_overlaps(taken):
                taken.append(box)
                break
        else:
            number.remove()


def _draw_reference(axes: Any, reference: Record, key: str, scale: float, number: int, beyond: float) -> None:
    x, y = reference["bytes"]["mean"], reference[key]["mean"] * scale
    far, colour = x > beyond, ("black", "#777777", "#aaaaaa")[number % 3]
    label = f"{reference['label']}, {_size_words(x, '.3g')}" if far else None
    axes.axhline(y, color=colour, linestyle=("--", ":", "-.")[number % 3], linewidth=0.9, zorder=1, label=label)
    if not far:
        error = (reference[key]["standard_error"] or 0) * scale
        axes.errorbar(x, y, error, fmt="*", color=colour, markersize=9, capsize=2, label=reference["label"], zorder=2)


def _ticks(axes: Any) -> None:
    low, high = axes.get_xlim()
    if high < NARROW * low:  # almost equal sizes would need labels of many digits
        low, high = math.sqrt(low * high / NARROW), math.sqrt(low * high * NARROW)
        axes.set_xlim(low, high)
    ticks = _round_numbers(low, high)
    axes.set_xticks(ticks, [_size_words(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())


def _round_numbers(low: float, high: float) -> list[float]:
    """Return round numbers in an interval, few enough for their labels not to overlap."""
    span = math.log10(high / low)
    steps = {0.75: (1, 1.5, 2, 3, 5, 7), 1.4: (1, 2, 5), 2.2: (1, 3), math.inf: (1,)}
    digits = next(ticks for most, ticks in steps.items() if span < most)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [digit * 10.0**decade for decade in decades for digit in digits]
    ticks = [number for number in numbers if low <= number <= high]
    if len(ticks) < 2:  # a short interval needs no logarithmic ticks
        ticks = [number for number in MaxNLocator(3).tick_values(low, high) if low <= number <= high]
    return ticks


def _size_words(size: float, digits: str = "g") -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:{digits}} {name}"
    return f"{size:{digits}} B"
