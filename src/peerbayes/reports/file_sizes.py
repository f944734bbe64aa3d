"""The honest account of a weights file: what it counts, where its bytes are, and what others would take."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from peerbayes.codebook.rounding import Form, forms
from peerbayes.data.splits import Split
from peerbayes.engine.processes import pick_device
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.importing import trusting
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior
from peerbayes.reports.evaluating import find_runs
from peerbayes.reports.record import Record
from peerbayes.reports.scoring import basic_figures
from peerbayes.reports.tables import COLUMNS
from peerbayes.runs.plan import source_weights
from peerbayes.runs.run import Run, peers_at
from peerbayes.showing import aligned

OTHER = "everything else"
PARTS = {
    "means/index": "index",
    "means/component": "components",
    "means/outlier": "outliers",
    "means/blend": "blends",
    "scales/": "scales",
    "mean/": "means",
    "rho/": "scales",
    "factor/": "factors",
    "factor_rho/": "scales",
    "anchor/": "anchors",
}


def sizes(
    path: str | Path,
    *,
    judged: bool = False,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> Iterator[Record]:
    """Yield an account of every peer of a finished run, of all runs of a folder, or of the peer of a weights file.

    Args:
        path: a run folder, a folder of runs, or a weights file of a run.
        judged: also evaluate the file and its other forms on the run's test split, with the recipe's number of draws.
        device: where to predict.
        root: data root.
        trust: allow what the recipes of runs name as ``package.module:name``.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> [(account["peer"], account["kind"]) for account in pb.reports.sizes(run.folder)]
        [('net', 'point')]
        >>> folder.cleanup()
    """
    path = Path(path).expanduser()
    where = [path] if path.suffix == ".safetensors" else find_runs(path)
    target = pick_device(device) if judged else torch.device("cpu")
    complaints: list[InputError] = []
    for source in where:
        try:
            with trusting(trust):
                run, names = peers_at(source)
                test = run.data(root).test if judged else None
                accounts = [_account(run, name, test, target) for name in names]
        except InputError as error:
            complaints.append(error)
            continue
        yield from accounts
    if len(complaints) == len(where):
        raise complaints[0]
    for complaint in complaints:
        warnings.warn(f"{complaint}; it is left out", PeerbayesWarning, stacklevel=2)


def _account(run: Run, name: str, test: Split | None, device: torch.device) -> Record:
    posterior, file = run[name], run.weights_file(name)
    record: Record = {
        "run": str(run.folder),
        "peer": name,
        "kind": posterior.kind,
        "file": str(file),
        "weights": posterior.layout.size,
        "trainable": sum(parameter.numel() for parameter in posterior.parameters()),
        "bytes": file.stat().st_size,
        "parts": _parts(file),
        "same_posterior": str(file),
    }
    same = posterior
    if counts := posterior.counts():
        record |= counts | {"paper_count": paper_count(**counts), "same_posterior": None}
        source = _source(run, name, posterior)
        if source is not None:
            same, record["same_posterior"] = source[1], str(source[0])
    rows = []
    # Forms are made where they are evaluated.
    for form in chain([Form("this file", record["bytes"], posterior)], forms(same.to(device))):
        figures = {} if test is None else _figures(run, name, form.posterior, test, device)
        rows.append({"name": form.name, "bytes": form.bytes, **figures})
    whole = rows[1]["bytes"]
    return record | {"forms": [row | {"percent": 100 * row["bytes"] / whole} for row in rows]}


def _parts(file: Path) -> dict[str, int]:
    """Return the bytes of a file by part; together they are all of it."""
    header, tensors = storage.bytes_of(file)
    sizes = dict.fromkeys([*PARTS.values(), OTHER], 0)
    for tensor, size in tensors.items():
        sizes[next((part for start, part in PARTS.items() if tensor.startswith(start)), OTHER)] += size
    return {part: size for part, size in sizes.items() if size or part == OTHER} | {"header": header}


def paper_count(outliers: int, blended: int, components: int) -> int:
    """Return O + E + 2 G: what the fourth paper's tables count, without scales of outliers, covariances and index.

    Args:
        outliers: O.
        blended: E.
        components: G.
    """
    return outliers + blended + 2 * components


def _source(run: Run, name: str, posterior: Posterior) -> tuple[Path, Posterior] | None:
    """Return the mean-field posterior that a codebook was made of, where it is still there."""
    path = source_weights(run, name)
    if path is None:
        return None
    origin = Posterior.load(path, posterior.materialise())
    if not run.began_with(name, origin):
        warnings.warn(f"{path}: holds other weights than {run.folder} was made of", PeerbayesWarning, stacklevel=2)
        return None
    return (path, origin) if origin.shareable else None


def _figures(run: Run, name: str, posterior: Posterior, test: Split, device: torch.device) -> Record:
    """Return accuracy, NLL and ECE on the test split, with the draws of the named peer."""
    options = run.recipe.evaluation
    predicted = run.predict_split(name, test, options.draws, device, posterior=posterior)
    return basic_figures(*predicted[:2], options.ece_bins)


# ---- as text ---------------------------------------------------------------------------------------------------------


def size_table(record: Record) -> str:
    """Return an account as text."""
    shared, same = "paper_count" in record, record["same_posterior"]
    lines = [f"{record['file']}: a {record['kind']} posterior over {record['weights']:,} weights"]
    if shared:
        lines.append(
            f"paper count {record['paper_count']:,} = {record['outliers']:,} outliers + {record['blended']:,} blended "
            f"+ 2 x {record['components']:,} components"
        )
    lines += [f"trainable numbers {record['trainable']:,}", ""]
    parts = record["parts"] | {"total": record["bytes"]}
    base = record["forms"][1]  # of all percentages, so that parts and forms can be compared
    share = f"% of {base['name']}"
    rows = [(name, f"{size:,}", f"{100 * size / base['bytes']:.1f}") for name, size in parts.items()]
    lines += [*aligned([("part", "bytes", share), *rows], left=1), ""]
    if shared:
        lines.append(f"beside {'its own means and scales' if same is None else same}:")
    judged = {title: how for title, how in COLUMNS.items() if how[0] in record["forms"][0]}
    table = [("", "bytes", share, *judged)]
    for form in record["forms"]:
        figures = [f"{form[key] * factor:z.{2 if factor > 1 else 3}f}" for key, factor in judged.values()]
        table.append((form["name"], f"{form['bytes']:,}", f"{form['percent']:.1f}", *figures))
    return "\n".join([*lines, *aligned(table, left=1)])
