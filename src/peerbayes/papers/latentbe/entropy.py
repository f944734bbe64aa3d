"""Figure of entropies in and out of distribution, and its numbers for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from peerbayes.errors import InputError
from peerbayes.metrics.spread import summarise
from peerbayes.reports.evaluating import evaluate
from peerbayes.reports.figures import COLOURS, entropy_shares, panels
from peerbayes.reports.groups import open_runs
from peerbayes.reports.record import Record
from peerbayes.reports.tables import ENSEMBLE, OUTSIDE, grouped, title
from peerbayes.runs.executor import DataCache


def entropy(
    folders: Iterable[str | Path],
    ood: Sequence[str] = (),
    by_peer: bool = False,
    device: str = "auto",
    root: str | Path | None = None,
) -> Record:
    """Return shares of images by predictive entropy, on the test split and out of distribution; means over seeds.

    Predictions are those of `peerbayes evaluate`.

    Args:
        folders: run folders, or folders of them.
        ood: out-of-distribution data sets; by default those of the recipes.
        by_peer: each peer, not their ensemble.
        device: where to predict.
        root: the data root.
    """
    runs = open_runs(folders)
    names = list(ood) or list(dict.fromkeys(name for r in runs for name in r.recipe.evaluation.out_of_distribution))
    if not names:
        raise InputError("figure entropy: no recipe names an out-of-distribution data set; give one by --ood")
    loaded, records = DataCache(root), []
    for run in runs:
        data = loaded.of(run)
        record = evaluate(run, out_of_distribution=names, data=data, device=device, root=root)
        records.append({**record, "folder": str(run.folder)})
    series = []
    for group in grouped(records).values():
        peers = [peer["name"] for peer in group[0]["peers"]]
        ensemble = len(peers) > 1 and not by_peer
        for index, name in enumerate([ENSEMBLE] if ensemble else peers):
            evaluated = [record["ensemble"] if ensemble else record["peers"][index] for record in group]
            label = title(group[0]["method"]) + (f" {name}" if by_peer and len(peers) > 1 else "")
            seeds = [record["seed"] for record in group]
            outside = {other: _over_seeds([evaluation[OUTSIDE][other] for evaluation in evaluated]) for other in names}
            about = {key: group[0][key] for key in ("dataset", "network")}
            series.append({"label": label, **about, "peer": name, "seeds": seeds, "outside": outside})
    return {"split": "test", "series": series}


def _over_seeds(scores: Sequence[Record]) -> Record:
    auroc = summarise([figures["auroc"] for figures in scores])
    shares = entropy_shares([figures["entropy"] for figures in scores])
    return {**shares, "auroc": {"mean": auroc.mean, "standard_error": auroc.standard_error}}


def draw_entropy(record: Record) -> Figure:
    """Draw histograms in (blue) and out of distribution (red): a column for each run, a row for each data set."""
    names = list(record["series"][0]["outside"])
    figure, rows = panels(len(names), len(record["series"]), 3.2, 2.8)
    for row, name in zip(rows, names, strict=True):
        for axes, curve in zip(row, record["series"], strict=True):
            outside = curve["outside"][name]
            labels = f"in: {curve['dataset']}", f"out: {Path(name).stem}"
            for key, label, colour in zip(("inside", "outside"), labels, COLOURS, strict=False):
                shares = [100 * share for share in outside[key]]
                axes.stairs(shares, outside["edges"], color=colour, fill=True, alpha=0.45, label=label)
                axes.stairs(shares, outside["edges"], color=colour, linewidth=1)
            axes.sharey(row[0])  # heights are to be compared
            axes.set_title(f"{curve['label']}: AUROC {outside['auroc']['mean']:.3f}", fontsize=9)
            axes.set_xlabel("entropy (nats)")
            axes.legend(frameon=False, fontsize=7)
        row[0].set_ylabel("images (%)")
    return figure
