"""The verb `calibrate`: temperatures of a trained run or posterior, kept with the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast, overload

import torch

from peerbayes.data.dataset import Dataset, load
from peerbayes.data.splits import Split
from peerbayes.engine.devices import pick_device
from peerbayes.errors import InputError
from peerbayes.posteriors.base import Posterior
from peerbayes.runs.folder import lock
from peerbayes.runs.run import Run, peers_at, read_json, run_of, trained_into, write_text
from peerbayes.runs.temperatures import fit_temperatures, keep_temperature

DRAWS = 50  # of a posterior that was not loaded from a run


@overload
def calibrate(
    source: Run | str | Path,
    data: str | Path | Dataset | None = None,
    *,
    draws: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> Run: ...


@overload
def calibrate(
    source: Posterior,
    data: str | Path | Dataset | None = None,
    *,
    draws: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> Posterior: ...


def calibrate(
    source: Run | Posterior | str | Path,
    data: str | Path | Dataset | None = None,
    *,
    draws: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> Run | Posterior:
    """Fit temperatures on the validation split by NLL; predictions are softmax(log p̄ / T) from then on.

    Training does this by itself at its end, where its data have a validation split. Evaluation is of temperature 1.

    Args:
        source: a finished run, its folder, or a weights file of a run: its weights files and run.json keep the
            temperatures, each peer's and that of all as one. Or a posterior, in memory alone until it is saved.
        data: a data set with a validation split, or what `peerbayes.data.load` takes; by default what the run has
            learnt.
        draws: draws averaged; by default as many as the run's recipe evaluates with.
        device: where to predict.
        root: data root.
        trust: allow what the recipe of a run folder names as ``package.module:name``.

    Returns:
        The run, opened if it was a folder, or the posterior.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> found = pb.calibrate(run, device="cpu")
        >>> run["net"].temperature > 0
        True
        >>> folder.cleanup()
    """
    where = pick_device(device)
    if isinstance(source, Posterior):
        known = run_of(source)
        count = draws or (known.recipe.evaluation.draws if known is not None else DRAWS)
        held = _held_out(data, known, root)
        each, _ = fit_temperatures({source.name: source}, held, count, source.seed)
        source.temperature = each[source.name]
        return source
    if not isinstance(given := cast(Any, source), Run | str | Path):
        kind = type(given).__name__
        raise InputError(f"source is a {kind}, expected a run, its folder, a weights file of a run, or a posterior")
    run, names = (source, list(source)) if isinstance(source, Run) else peers_at(source, trust=trust)
    peers = {name: run[name].to(where) for name in names}
    held = _held_out(data, run, root)
    with lock(run.folder):
        each, together = fit_temperatures(peers, held, draws or run.recipe.evaluation.draws, run.seed)
        for name, posterior in peers.items():
            keep_temperature(posterior, each[name], run.weights_file(name))
        if names == list(run):
            keep_together(run, together)
    return run


def keep_together(run: Run, temperature: float) -> None:
    """Write the temperature of all peers as one; posteriors that the run has loaded stay its own.

    Args:
        run: whose peers they are.
        temperature: of the average of their predictions.
    """
    path = run.folder / "run.json"
    run.about["temperature"] = temperature
    write_text(path, json.dumps(read_json(path) | {"temperature": temperature}, indent=1))
    for name in run:
        run[name].provenance = trained_into(run.folder, run.about.get("generation", 0))


def _held_out(data: Any, run: Run | None, root: str | Path | None) -> Split:
    """Return the validation split of the data that were given, or that a run has learnt."""
    if data is None:
        if run is None:
            raise InputError(
                "`data` is required: the posterior was not loaded from a run; name the data, or give a run"
            )
        loaded = run.data(root)
    elif isinstance(data, Dataset):
        loaded = data
    elif isinstance(data, str | Path):
        loaded = load(data, root=root, vocabulary=None if run is None else run.vocabulary)
    else:
        kind = type(data).__name__
        raise InputError(f"data is of type {kind}, expected a name, a path or a Dataset (data.from_arrays makes one)")
    if data is not None and run is not None:
        run.refuse_strange(loaded, sizes=False)
    if loaded.validation is None:
        raise InputError(
            f"{loaded.name}: has no validation split to fit temperatures on; train with data.validation, or give data "
            "with one (peerbayes.data.load(name, validation=0.1)) of which nothing was learnt"
        )
    return loaded.validation
