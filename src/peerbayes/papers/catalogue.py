"""The figures of `peerbayes figure`, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from peerbayes.errors import InputError, nearest
from peerbayes.importing import trusting
from peerbayes.papers import pipeline
from peerbayes.papers.latentbe import distillation_figures
from peerbayes.papers.renyi import alphas, curves
from peerbayes.papers.weight_sharing import against_bytes, confidence
from peerbayes.posteriors import storage
from peerbayes.reports import weights
from peerbayes.reports.figures import rendered
from peerbayes.reports.record import Record

ENDINGS = (".png", ".pdf", ".svg")
MEASURED = ("flatness", "line", "perturbations", "confidence", "entropy", "bytes", "pipeline")
BY_PEER = ("curves", "gap", "entropy")  # figures that can show each peer
Compute = Callable[..., Record]
NAMES: dict[str, tuple[Compute, Callable[[Record], Figure]]] = {
    "divergence": (alphas.divergence, curves.divergence),
    "best-alpha": (alphas.best_alpha, curves.best_alpha),
    "curves": (alphas.curves, curves.curves),
    "gap": (alphas.gap, curves.gap),
    "spread": (alphas.spread, curves.spread),
    "grid": (alphas.grid, curves.grid),
    "flatness": (alphas.flatness, curves.flatness),
    "line": (distillation_figures.line, distillation_figures.draw_line),
    "diversity": (distillation_figures.diversity, distillation_figures.draw_diversity),
    "perturbations": (distillation_figures.perturbations, distillation_figures.draw_perturbations),
    "posterior": (weights.posterior, weights.draw_posterior),
    "bytes": (against_bytes.size, against_bytes.draw_size),
    "confidence": (confidence.confidence, confidence.draw_confidence),
    "entropy": (distillation_figures.entropy, distillation_figures.draw_entropy),
    "pipeline": (pipeline.pipeline, pipeline.draw_pipeline),
}


def write_figure(
    name: str,
    runs: Sequence[str | Path] = (),
    out: str | Path | None = None,
    *,
    by_peer: bool = False,
    layer: str | None = None,
    ood: Sequence[str] = (),
    device: str = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> tuple[Path, Record]:
    """Draw a figure of runs into a file, and return its path and its numbers.

    Args:
        name: one of `NAMES`.
        runs: run folders, or folders of runs.
        out: a file that ends in ``.png``, ``.pdf`` or ``.svg``; by default the name with ``.png``.
        by_peer: each peer, not the average over peers or their ensemble; for `BY_PEER`.
        layer: one layer's weights only, such as ``"layer1.0.conv1.weight"``; for ``posterior``.
        ood: out-of-distribution data sets, by default those of the recipes; for ``entropy``.
        device: where networks run; for `MEASURED`.
        root: data root.
        trust: allow what the recipes of runs name as ``package.module:name``.
    """
    if name not in NAMES:
        raise InputError(f"there is no figure '{name}'{nearest(name, NAMES)}")
    path = Path(out if out is not None else f"{name}.png")
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: expected a file that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if bool(runs) != (name != "divergence"):
        raise InputError("figure divergence: takes no runs" if runs else f"figure {name}: give run folders, or folders "
                         "of runs")  # fmt: skip
    if by_peer and name not in BY_PEER:
        raise InputError(f"figure {name}: by_peer is for {', '.join(BY_PEER[:-1])} and {BY_PEER[-1]}")
    if layer is not None and name != "posterior":
        raise InputError(f"figure {name}: layer is for posterior")
    if ood and name != "entropy":
        raise InputError(f"figure {name}: ood is for entropy")
    compute, draw = NAMES[name]
    options: dict[str, Any] = {"device": device, "root": root} if name in MEASURED else {}
    options |= {"by_peer": by_peer} if name in BY_PEER else {}
    options |= {"layer": layer} if name == "posterior" else {"ood": ood} if name == "entropy" else {}
    with trusting(trust):
        record = {"figure": name, **(compute(runs, **options) if runs else compute())}
    with matplotlib.rc_context({"svg.hashsalt": "peerbayes", "font.size": 9}):
        picture = rendered(draw(record), path.suffix[1:].lower())
    storage.write_bytes(path, picture)
    return path, record
