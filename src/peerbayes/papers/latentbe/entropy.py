"""How unsure runs are, in and out of distribution, side by side; drawn, with the numbers behind it, ready for JSON."""

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
    """Shares of images by predictive entropy, on the test split and on other data sets; means over seeds.

    Predictions are those of `peerbayes evaluate`. Peers of a run predict as one, unless ``by_peer``. ``ood`` names the
    other data sets; by default they are those of the recipes.

    Args:
        folders: run folders, or folders of them.
        ood: names of data sets out of distribution.
        by_peer: each peer by itself.
        device: where to predict.
        root: the data root.
    """
    runs = open_runs(folders)
    names = list(ood) or list(dict.fromkeys(name for r in runs for name in r.recipe.evaluation.out_of_distribution))
    if not names:
        raise InputError("figure entropy: no recipe names a data set from elsewhere; give one by --ood")
    loaded, records = DataCache(root), []
    for run in runs:
        data = loaded.of(run)
        record = evaluate(run, out_of_distribution=names, data=data, device=device, root=root)
        records.append({**record, "folder": str(run.folder)})
    series = []
    for group in grouped(records).values():
        peers = [peer["name"] for peer in group[0]["peers"]]
        as_one = len(peers) > 1 and not by_peer
        for place, name in enumerate([ENSEMBLE] if as_one else peers):
            judged = [record["ensemble"] if as_one else record["peers"][place] for record in group]
            label = title(group[0]["method"]) + (f" {name}" if by_peer and len(peers) > 1 else "")
            seeds = [record["seed"] for record in group]
            outside = {other: _over_seeds([one[OUTSIDE][other] for one in judged]) for other in names}
            about = {key: group[0][key] for key in ("dataset", "network")}
            series.append({"label": label, **about, "peer": name, "seeds": seeds, "outside": outside})
    return {"split": "test", "series": series}


def _over_seeds(found: Sequence[Record]) -> Record:
    auroc = summarise([figures["auroc"] for figures in found])
    shares = entropy_shares([figures["entropy"] for figures in found])
    return {**shares, "auroc": {"mean": auroc.mean, "standard_error": auroc.standard_error}}


def draw_entropy(found: Record) -> Figure:
    """A column a run, a row a data set from elsewhere: histograms in (blue) and out of distribution (red)."""
    names = list(found["series"][0]["outside"])
    figure, rows = panels(len(names), len(found["series"]), 3.2, 2.8)
    for row, name in zip(rows, names, strict=True):
        for axes, one in zip(row, found["series"], strict=True):
            outside = one["outside"][name]
            labels = f"in: {one['dataset']}", f"out: {Path(name).stem}"
            for key, label, colour in zip(("inside", "outside"), labels, COLOURS, strict=False):
                shares = [100 * share for share in outside[key]]
                axes.stairs(shares, outside["edges"], color=colour, fill=True, alpha=0.45, label=label)
                axes.stairs(shares, outside["edges"], color=colour, linewidth=1)
            axes.sharey(row[0])  # heights are to be compared
            axes.set_title(f"{one['label']}: AUROC {outside['auroc']['mean']:.3f}", fontsize=9)
            axes.set_xlabel("entropy (nats)")
            axes.legend(frameon=False, fontsize=7)
        row[0].set_ylabel("images (%)")
    return figure
