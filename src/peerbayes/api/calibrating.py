"""The verb `calibrate`: temperatures and certificates of a trained run or posterior, kept with the weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, overload

import torch

from peerbayes.data.dataset import Dataset, load
from peerbayes.data.splits import Split
from peerbayes.engine.devices import pick_device
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.inference.guarantees import Promises
from peerbayes.math.conformal import Method
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.certificate import Certificate
from peerbayes.runs.folder import lock
from peerbayes.runs.run import Run, peers_at, read_json, run_of, trained_into, write_text
from peerbayes.runs.temperatures import (
    certificate_of,
    certify,
    fit_temperatures,
    keep_temperature,
    learnt_by,
    predicted_as_one,
)

RECORD = "evaluation.json"

DRAWS = 50  # of a posterior that was not loaded from a run


@overload
def calibrate(
    source: Run | str | Path,
    data: Any = None,
    *,
    coverage: float | None = None,
    risk: float | None = None,
    delta: float = 0.1,
    method: Method = "lac",
    by_class: bool = False,
    draws: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> Run: ...


@overload
def calibrate(
    source: Posterior,
    data: Any = None,
    *,
    coverage: float | None = None,
    risk: float | None = None,
    delta: float = 0.1,
    method: Method = "lac",
    by_class: bool = False,
    draws: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> Posterior: ...


def calibrate(
    source: Run | Posterior | str | Path,
    data: Any = None,
    *,
    coverage: float | None = None,
    risk: float | None = None,
    delta: float = 0.1,
    method: Method = "lac",
    by_class: bool = False,
    draws: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> Run | Posterior:
    """Fit temperatures on the validation split by NLL; predictions are softmax(log p̄ / T) from then on.

    Training does this by itself at its end, where its data have a validation split. Evaluation is of temperature 1.

    With ``coverage`` or ``risk`` a quarter of the images fits the temperature, and the others show what is promised:
    sets of classes that hold the true one, and abstentions. `Run.predict` takes the same options then. The promise is
    of what ``source`` predicts: of a run with several peers, all of them as one. It holds for images that come from
    where the validation images come from; nothing may have been learnt of these, or chosen by them.

    Args:
        source: a finished run, its folder, or a weights file of a run: its weights files and run.json keep the
            temperatures, each peer's and that of all as one. Or a posterior, in memory alone until it is saved.
        data: a data set with a validation split, or what `peerbayes.data.load` takes; by default what the run has
            learnt.
        coverage: promise sets that hold the true class with this probability.
        risk: promise that at most this share of the answers is wrong.
        delta: chance that the risk is larger all the same.
        method: of the sets: ``lac`` (the smallest), ``aps`` or ``raps`` (never empty).
        by_class: promise coverage for every true class, and risk for every class that is answered, all at once.
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
        >>> run = pb.calibrate(run, device="cpu")
        >>> run["net"].temperature > 0
        True
        >>> folder.cleanup()
    """
    where = pick_device(device)
    promises = Promises(coverage, risk, delta, method, by_class)
    if isinstance(source, Posterior):
        known = run_of(source)
        count = draws or (known.recipe.evaluation.draws if known is not None else DRAWS)
        loaded, held = _held_out(data, known, root, promises)
        if promises.any:
            source.certificate = certify({source.name: source}, held, count, source.seed, promises, loaded.name)
            source.temperature = source.certificate.temperature
            return source
        each, _ = fit_temperatures({source.name: source}, held, count, source.seed)
        source.temperature, source.certificate = each[source.name], None
        return source
    if not isinstance(given := cast(Any, source), Run | str | Path):
        kind = type(given).__name__
        raise InputError(f"source is a {kind}, expected a run, its folder, a weights file of a run, or a posterior")
    run, names = (source, source.predicting) if isinstance(source, Run) else peers_at(source, trust=trust)
    peers = {name: run[name].to(where) for name in names}
    loaded, held = _held_out(data, run, root, promises)
    count = draws or run.recipe.evaluation.draws
    with lock(run.folder):
        if promises.any:
            log_p, labels = predicted_as_one(peers, held, count, run.seed)
            names_of_classes = peers[names[0]].class_names
            certificate = certificate_of(log_p, labels, promises, run.seed, count, loaded.name, names_of_classes)
            if data is None:
                _warn_of_learnt(run, names, float((log_p.argmax(1) == labels).double().mean()), loaded)
            if len(names) == 1:
                keep_temperature(peers[names[0]], certificate.temperature, run.weights_file(names[0]), certificate)
            if names == list(run):
                keep_together(run, certificate.temperature, certificate if len(names) > 1 else None)
            return run
        each, together = fit_temperatures(peers, held, count, run.seed)
        for name, posterior in peers.items():
            keep_temperature(posterior, each[name], run.weights_file(name))
        if names == list(run):
            keep_together(run, together)
    return run


def _warn_of_learnt(run: Run, names: Sequence[str], held: float, loaded: Dataset) -> None:
    """Warn where a run was far better on its validation split than on its test split, when it was evaluated."""
    path = run.folder / RECORD
    if not path.is_file() or loaded.validation is None:
        return
    record = read_json(path)
    judged = [record.get("ensemble")] if len(names) > 1 else record.get("peers", ())
    wanted = None if len(names) > 1 else names[0]
    known = [one for one in judged if isinstance(one, dict) and one.get("name") == wanted and "accuracy" in one]
    for one in known:
        learnt = learnt_by(held, len(loaded.validation), one["accuracy"], len(loaded.test))
        if learnt:
            warnings.warn(f"{run.folder}: the promise is worth little: {learnt}", PeerbayesWarning, stacklevel=3)


def keep_together(run: Run, temperature: float, certificate: Certificate | None = None) -> None:
    """Write temperature and certificate of all peers as one; posteriors that the run has loaded stay its own.

    Args:
        run: whose peers they are.
        temperature: of the average of their predictions.
        certificate: of what that average promises, if anything.
    """
    path = run.folder / "run.json"
    told: dict[str, Any] = {"temperature": temperature}
    told |= {} if certificate is None else {"certificate": certificate.model_dump(exclude_none=True)}
    for about in (run.about, written := read_json(path)):
        about.pop("certificate", None)
        about |= told
    write_text(path, json.dumps(written, indent=1))
    for name in run:
        run[name].provenance = trained_into(run.folder, run.about.get("generation", 0))


def _held_out(data: Any, run: Run | None, root: str | Path | None, promises: Promises) -> tuple[Dataset, Split]:
    """Return the data that were given, or that a run has learnt, and their validation split."""
    if data is None and run is not None and promises.any and run.recipe.evaluation.keep == "best":
        raise InputError(
            f"{run.folder}: its best epoch was chosen on the validation images, so they can promise nothing; give "
            "others, as data=... in Python or --data, or train with evaluation.keep = 'last'"
        )
    if data is None:
        if run is None:
            raise InputError(
                "`data` is required: the posterior was not loaded from a run; name the data, or give a run"
            )
        loaded = run.data(root)
    elif run is not None and not isinstance(data, Dataset | str | Path) and (again := run.as_learnt(data)) is not None:
        loaded = again
    else:
        words, names = (None, None) if run is None else (run.vocabulary, run.about.get("class_names"))
        names = None if isinstance(data, Dataset | str | Path) else names
        loaded = load(data, root=root, vocabulary=words, names=names)
    if data is not None and run is not None:
        run.refuse_strange(loaded, sizes=False)
    if loaded.validation is None:
        raise InputError(
            f"{loaded.name}: has no validation split to fit temperatures on; train with data.validation, or give data "
            "with one (peerbayes.data.load(name, validation=0.1)) of which nothing was learnt"
        )
    return loaded, loaded.validation
