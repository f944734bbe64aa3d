"""The verb `calibrate`: temperatures and certificates of a trained run or posterior, kept with the weights."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, overload

import torch

from peerbayes.data.dataset import Dataset, load
from peerbayes.data.splits import JoinedSplit, Split
from peerbayes.engine.processes import pick_device
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.inference.guarantees import Promises
from peerbayes.math.conformal import Method
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.certificate import Certificate
from peerbayes.recipes.recipe_data import load_data
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
    where the validation images come from; nothing may have been learnt of these, or chosen by them, as `adopt` does.
    An earlier promise that is not asked for is kept if it was made by the same images and draws.

    Args:
        source: a finished run, its folder, or a weights file of a run: its weights files and run.json keep the
            temperatures, each peer's and that of all as one. Or a posterior, in memory alone until it is saved.
        data: a data set, or what `peerbayes.data.load` takes, such as a folder of labelled images, of which nothing was
            learned. Its validation split is used; for a run without one its test split, else everything. By default
            what the run has learned, which must have a validation split.
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
    how: dict[str, Any] = {"draws": draws, "device": device, "root": root}
    promises = Promises(coverage, risk, delta, method, by_class)
    if isinstance(source, Posterior):
        return _calibrate_posterior(source, data, promises, **how)
    if not isinstance(given := cast(Any, source), Run | str | Path):
        kind = type(given).__name__
        raise InputError(f"source is a {kind}, expected a run, its folder, a weights file of a run, or a posterior")
    (run,) = calibrate_runs([source], data, promises, trust=trust, **how)
    return run


def _calibrate_posterior(
    posterior: Posterior,
    data: Any,
    promises: Promises,
    draws: int | None,
    device: str | torch.device,
    root: str | Path | None,
) -> Posterior:
    """Calibrate a posterior in memory; see `calibrate`."""
    pick_device(device)
    run = run_of(posterior)
    count = draws or (run.recipe.evaluation.draws if run is not None else DRAWS)
    loaded, held = _held_out(data, run, root, promises)
    before, certificate = posterior.certificate, None
    if promises.any:
        certificate = certify({posterior.name: posterior}, held, count, posterior.seed, promises, loaded.name)
        certificate = certificate.keeping(before)
        temperature = certificate.temperature
    else:
        temperature = fit_temperatures({posterior.name: posterior}, held, count, posterior.seed)[1]
    posterior.temperature, posterior.certificate = temperature, certificate
    _warn_of_dropped(f"posterior '{posterior.name}'", before, certificate, promises, stacklevel=4)
    return posterior


def calibrate_runs(
    sources: Sequence[Run | str | Path],
    data: Any,
    promises: Promises,
    *,
    draws: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
) -> list[Run]:
    """Calibrate several runs; nothing is written before all of them can be.

    Args:
        sources: as of `calibrate`, but for posteriors.
        data: as of `calibrate`.
        promises: what is to be promised; nothing fits temperatures alone.
        draws: draws averaged; by default as many as each run's recipe evaluates with.
        device: where to predict.
        root: data root.
        trust: allow what the recipe of a run folder names as ``package.module:name``.
    """
    where = pick_device(device)
    opened = [(one, one.predicting) if isinstance(one, Run) else peers_at(one, trust=trust) for one in sources]
    for run, names in opened:
        if run.exported:
            raise InputError(
                f"{run.folder}: is an export, whose program and card would keep the old temperature and promises; "
                "calibrate the run, then export it again"
            )
        for name in names:
            run[name]
    with contextlib.ExitStack() as stack:
        for folder in {run.folder.resolve(): run.folder for run, _ in opened}.values():
            stack.enter_context(lock(folder))
        fits = []
        for run, names in opened:
            fits.append(_fit(run, names, data, promises, draws, where, root))
        for fit in fits:
            fit.write()
    for fit in fits:
        for origin, before in fit.before.items():
            _warn_of_dropped(origin, before, fit.certificate, promises, stacklevel=4)
    return [run for run, _ in opened]


@dataclass(frozen=True)
class _Fit:
    """What was fitted of a run, and is not written yet.

    Attributes:
        run: the run.
        peers: those that were calibrated.
        each: temperatures by peer; none where all peers as one promise something.
        together: temperature of all of them as one.
        certificate: what is promised of these.
        before: certificates that were there, by where.
    """

    run: Run
    peers: Mapping[str, Posterior]
    each: Mapping[str, float]
    together: float
    certificate: Certificate | None
    before: Mapping[str, Certificate | None]

    def write(self) -> None:
        """Keep it with the weights, and in run.json."""
        for name, temperature in self.each.items():
            keep_temperature(self.peers[name], temperature, self.run.weights_file(name), self.certificate)
        if list(self.peers) == list(self.run):
            keep_together(self.run, self.together, self.certificate if len(self.peers) > 1 else None)


def _fit(
    run: Run,
    names: Sequence[str],
    data: Any,
    promises: Promises,
    draws: int | None,
    device: torch.device,
    root: str | Path | None,
) -> _Fit:
    peers = {name: run[name].to(device) for name in names}
    loaded, held = _held_out(data, run, root, promises)
    count = draws or run.recipe.evaluation.draws
    whole = run.certificate if list(names) == list(run) else run[names[0]].certificate
    if not promises.any:
        each, together = fit_temperatures(peers, held, count, run.seed)
        before = {str(run.weights_file(name)): run[name].certificate for name in names}
        return _Fit(run, peers, each, together, None, before | ({str(run.folder): whole} if len(names) > 1 else {}))
    log_p, labels = predicted_as_one(peers, held, count, run.seed)
    class_names = peers[names[0]].class_names
    certificate = certificate_of(log_p, labels, promises, run.seed, count, loaded.name, class_names).keeping(whole)
    if data is None:
        _warn_of_learnt(run, names, float((log_p.argmax(1) == labels).double().mean()), loaded)
    temperature = certificate.temperature
    each = {names[0]: temperature} if len(names) == 1 else {}
    return _Fit(run, peers, each, temperature, certificate, {str(run.folder): whole})


def _warn_of_dropped(
    origin: str, before: Certificate | None, after: Certificate | None, promises: Promises, stacklevel: int
) -> None:
    """Warn of promises that were there, were not asked for, and could not be kept."""
    for name in ("coverage", "risk"):
        promise = getattr(before, name, None)
        if promise is not None and getattr(promises, name) is None and getattr(after, name, None) is None:
            why = "it was made by other images or draws" if promises.any else "calibrating without promises ends them"
            sentence = f"{origin}: dropped: {name} {promise.level:g} ({why}); name it again to promise it"
            warnings.warn(sentence, PeerbayesWarning, stacklevel=stacklevel)


def _warn_of_learnt(run: Run, names: Sequence[str], held: float, loaded: Dataset) -> None:
    """Warn where a run was far better on its validation split than on its test split, when it was evaluated."""
    path = run.folder / RECORD
    if not path.is_file() or loaded.validation is None:
        return
    record = read_json(path)
    judged = [record.get("ensemble")] if len(names) > 1 else record.get("peers", ())
    wanted = None if len(names) > 1 else names[0]
    peers = [peer for peer in judged if isinstance(peer, dict) and peer.get("name") == wanted and "accuracy" in peer]
    for peer in peers:
        learnt = learnt_by(held, len(loaded.validation), peer["accuracy"], len(loaded.test))
        if learnt:
            warnings.warn(f"{run.folder}: the promise is worth little: {learnt}", PeerbayesWarning, stacklevel=5)


def keep_together(run: Run, temperature: float, certificate: Certificate | None = None) -> None:
    """Write temperature and certificate of all peers as one; posteriors that the run has loaded stay its own.

    Args:
        run: whose peers they are.
        temperature: of the average of their predictions.
        certificate: of what that average promises, if anything.
    """
    path = run.folder / "run.json"
    entry: dict[str, Any] = {"temperature": temperature}
    entry |= {} if certificate is None else {"certificate": certificate.model_dump(exclude_none=True)}
    for about in (run.about, written := read_json(path)):
        about.pop("certificate", None)
        about |= entry
    write_text(path, json.dumps(written, indent=1))
    for name in run:
        run[name].provenance = trained_into(run.folder, run.about.get("generation", 0))


def _held_out(data: Any, run: Run | None, root: str | Path | None, promises: Promises) -> tuple[Dataset, Split]:
    """Return the data that were given, or that a run has learnt, and the inputs to calibrate by.

    Those are the validation split. Of data that a run has not learned it may also be the test split, or everything.
    """
    chosen = _chosen_by(run) if run is not None and promises.any else None
    if chosen is not None and data is None:
        raise InputError(chosen)
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
        if chosen is not None and _are_its_own(loaded, run, root):
            raise InputError(chosen)
    if loaded.validation is not None:
        return loaded, loaded.validation
    # What a posterior of no run has learned is not known.
    if data is None or isinstance(data, Mapping) or run is None or _are_its_own(loaded, run, root):
        raise InputError(
            f"{loaded.name}: has no validation split to fit temperatures on; train with data.validation, or give other "
            "data, of which nothing was learnt: --data, or data=... in Python"
        )
    return loaded, JoinedSplit((loaded.train, loaded.test)) if loaded.unsplit else loaded.test


def _chosen_by(run: Run) -> str | None:
    """Return a sentence where something about a run was chosen by its validation split, which promises nothing then."""
    what = None
    if run.recipe.evaluation.keep == "best":
        what, instead = "its best epoch was chosen on", ", or train with evaluation.keep = 'last'"
    elif run.adopted:
        what, instead = "`adopt` has chosen widths and what to ship by", ""
    if what is None:
        return None
    return (
        f"{run.folder}: {what} the validation images, so they can promise nothing; give other labelled "
        f"data, as data=... in Python or --data{instead}"
    )


def _are_its_own(loaded: Dataset, run: Run, root: str | Path | None) -> bool:
    """Return whether data are those that a run has learnt; False where these are gone."""
    said = run.about.get("data")
    if said is not None:
        return bool(said["digest"] == loaded.digest())
    recipes = [run.recipe]
    if loaded.validation is None:  # the same images, none of which are held out now
        data = run.recipe.data.model_copy(update={"validation": 0})
        recipes.append(run.recipe.model_copy(update={"data": data}))
    try:
        return any(load_data(recipe, root, run.vocabulary).digest() == loaded.digest() for recipe in recipes)
    except InputError:
        return False
