"""From a trained run to one whose weights share a codebook."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peerbayes.data import Dataset
from peerbayes.errors import InputError
from peerbayes.importing import in_run
from peerbayes.learning.building import blank_shared, shared_of
from peerbayes.learning.distribution import ALONE
from peerbayes.learning.fitting import fit, refuse_infinite
from peerbayes.learning.folder import refuse_occupied
from peerbayes.learning.hardware import pick_device
from peerbayes.learning.how import refuse_unknown
from peerbayes.learning.inputs import load_data
from peerbayes.learning.jobs import Loaded, check_jobs, refuse_changed_sources, train_jobs
from peerbayes.learning.loop import Learner
from peerbayes.learning.progress import Reporter
from peerbayes.learning.recipe import Recipe, change, listed, load_recipe
from peerbayes.learning.run import Run, default_folder, peers_at, run_of
from peerbayes.learning.settings import CUSTOM
from peerbayes.learning.settings import MeanField as MeanFieldOptions
from peerbayes.learning.settings import Shared as SharedOptions
from peerbayes.learning.sources import Job, is_trained, require_seed, source_of
from peerbayes.posteriors import MeanField, Posterior, Shared

RECIPE, FIRST = "sharing/shared", "sharing/stage1"


def compress(
    source: Run | Posterior | str | Path,
    *,
    components: int | None = None,
    data: str | Path | Dataset | None = None,
    run: str | Path | None = None,
    into: str | Path = RECIPE,
    first: str | Path = FIRST,
    seed: int = 0,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Posterior:
    """Let the weights of a trained network share a small codebook of Gaussians, train that, and return it.

    Args:
        source: a run with one peer, its folder, or a weights file of a run; or a trained posterior, such as a peer of a
            run. What has no scales (a point, say) gets them first, in a run beside, ``RUN-stage1``.
        components: of the codebook at first; by default the recipe's, which leaves it to the number of weights.
        data: a data set, or what `peerbayes.data.load` takes; a run knows its own, and so does a peer of a run.
        run: the run folder; by default ``RUN-shared`` of a run, ``runs/RECIPE-seedN`` of a posterior.
        into: recipe of the shared weights; its name or file.
        first: recipe that gives a network scales.
        seed: seed of everything random.
        overrides: changes of the recipe ``into``, such as ``"stages.0.epochs=5"``.
        resume: go on with an interrupted run.
        reporter: is told what happens; by default a progress bar on a terminal, else nobody.
        how: see `How`.
    """
    refuse_unknown(how, compress)
    require_seed(seed)
    _check_given(source)
    changes = [*([] if components is None else [f"peers.0.posterior.components={components}"]), *listed(overrides)]
    own = _of_ones_own(source) if isinstance(source, Run) else source if isinstance(source, Posterior) else None
    if own is not None:
        known = source if isinstance(source, Run) else run_of(own)
        last, scales = load_recipe(into), load_recipe(first)
        if known is not None and data is None:  # on the data that it has learnt, as it has learnt it
            last, scales = (one.model_copy(update={"data": known.recipe.data}) for one in (last, scales))
            data = known.recipe.data.name if known.vocabulary is None else known.data(how.get("root"))
        if isinstance(source, Run):
            run = run or _beside(source.folder)
        if data is None:
            raise InputError("data is missing: the posterior is of no run that knows it; name it, or give a run")
        folder = Path(run or default_folder(str(into), seed))
        told: dict[str, Any] = {"data": data, "seed": seed, "reporter": reporter, **how}
        return _compressed(own, known, folder, load_recipe(last, changes), scales, resume, told)
    if data is not None:
        raise InputError("data is for a posterior: a run is compressed on the data that it has learnt")
    place = source.folder if isinstance(source, Run) else Path(str(source))
    *before, job = compression(place, into, first, changes, None if run is None else Path(run), seed)
    train_jobs(still_to_train(before, job, resume, **how), resume=True, reporter=reporter, **how)
    (done,) = train_jobs([job], resume=resume, reporter=reporter, **how)
    return done[job.recipe.peers[0].name]


def _check_given(source: Any) -> None:
    if not isinstance(source, Run | Posterior | str | Path):
        kind = type(source).__name__
        raise InputError(f"source is a {kind}, expected a run, its folder, a weights file of a run, or a posterior")
    if isinstance(source, Shared):
        raise InputError("the posterior's weights share a codebook already; compress the one that it was made of")


def compression(
    run: Path, into: str | Path, first: str | Path, changes: Sequence[str], folder: Path | None, seed: int
) -> list[Job]:
    """Return what is trained to compress a run: scales, where it has none, and then the codebook.

    Args:
        run: a run folder, or a weights file of a run.
        into: recipe of the shared weights.
        first: recipe of the scales.
        changes: of the recipe ``into``.
        folder: of the shared weights; by default ``RUN-shared``.
        seed: of both.
    """
    weights = weights_of(run)
    folder = folder or _beside(weights.parent)
    _options(load_recipe(into, changes), load_recipe(first))
    if kind_of(weights) == "shared":
        raise InputError(f"{weights}: its weights share a codebook already; compress the run that it was made of")
    if kind_of(weights) == "mean_field":
        return [Job(recipe_from(into, weights, changes), folder, seed)]
    before = Job(recipe_from(first, weights), _before(folder), seed)
    start = before.folder / f"weights-{before.recipe.peers[0].name}.safetensors"
    return [before, Job(recipe_from(into, weights, changes, start), folder, seed)]


def still_to_train(before: list[Job], job: Job, resume: bool, **how: Any) -> list[Job]:
    """Return what of the jobs before one has to be trained; refuse what could not be, or came of other weights."""
    loaded = Loaded(how.get("root"))
    finished = resume and is_trained(job.folder)
    if finished:
        _refuse_other_codebook(job)
    elif before:
        check_jobs([job], resume=resume, loaded=loaded, **how)
    for one in before:
        if is_trained(one.folder):
            refuse_changed_sources(one, loaded)
    return [] if finished else before


def _refuse_other_codebook(job: Job) -> None:
    """Refuse a finished codebook that was made of other weights than those that it would be made of now."""
    (peer,) = job.recipe.peers
    path = Path(str(peer.start_from))
    if not path.is_file():
        return
    run, (name, *_) = peers_at(path)
    if run.finished and not Run(job.folder).began_with(peer.name, run[name]):
        raise InputError(f"{job.folder}: holds a codebook of other weights than {path} has now; choose another folder")


def _beside(folder: Path) -> Path:
    return _with_end(folder, "-shared")


def _before(folder: Path) -> Path:
    return _with_end(folder, "-stage1")


def _with_end(folder: Path, end: str) -> Path:
    folder = folder if folder.name not in ("", "..") else folder.resolve()  # "." has no name
    return folder.with_name(f"{folder.name}{end}")


def _of_ones_own(run: Run) -> Posterior | None:
    """Return the only peer of a run, where its network came from Python and no recipe could build it again."""
    (name, *others) = run
    if others or run.recipe.peers[0].network != CUSTOM:
        return None
    _check_given(run[name])
    return run[name]


def _compressed(
    posterior: Posterior,
    known: Run | None,
    folder: Path,
    recipe: Recipe,
    first: Recipe,
    resume: bool,
    told: dict[str, Any],
) -> Posterior:
    """Compress a posterior, of a run if that is known, that no recipe could build again; both fits are ``told``."""
    peer, seed, data = recipe.peers[0], told["seed"], told["data"]
    options, scaled = _options(recipe, first)
    refuse_infinite(posterior, "the posterior")
    if told.get("device", "auto") != "auto":
        posterior = copy.deepcopy(posterior).to(pick_device(told["device"]))
    network = posterior.materialise()
    blank = blank_shared(network, options, seed, peer.name).to(posterior.device)
    if not resume:
        refuse_occupied(Job(recipe, folder, seed), resume)
    if not isinstance(data, Dataset):
        named = recipe.data.model_copy(update={"name": str(data), "classes": None})
        data = load_data(recipe.model_copy(update={"data": named}), told.get("root"))
    if known is not None:
        known.refuse_strange(data, sizes=False)
    # What does not fit is found here, before anything is trained, or gradients are taken.
    Learner(recipe, {peer.name: blank}, data, seed, engine="eager", world=told.get("world", ALONE)).feed.close()
    if not isinstance(posterior, MeanField):
        options_of_scales = scaled.model_dump(exclude={"kind"})
        posterior = MeanField(network, start_from=posterior, seed=seed, name=peer.name, **options_of_scales)
        done = fit({peer.name: posterior}, recipe=first, run=_before(folder), resume=True, **told)
        posterior = done[peer.name].to(posterior.device)
        assert isinstance(posterior, MeanField)
    shared = shared_of(posterior, network, options, data, seed, peer.name)
    return fit({peer.name: shared}, recipe=recipe, run=folder, resume=resume, **told)[peer.name]


def _options(recipe: Recipe, first: Recipe) -> tuple[SharedOptions, MeanFieldOptions]:
    """Return the posteriors of a recipe of shared weights and of one that gives scales; refuse other recipes."""
    shared, scaled = recipe.peers[0].posterior, first.peers[0].posterior
    if len(recipe.peers) != 1 or not isinstance(shared, SharedOptions):
        raise InputError(f"recipe {recipe.name}: expected one peer, whose weights are shared")
    if len(first.peers) != 1 or not isinstance(scaled, MeanFieldOptions):
        raise InputError(f"recipe {first.name}: expected one peer with a mean_field posterior")
    return shared, scaled


def recipe_from(recipe: str | Path, source: Path, changes: Sequence[str] = (), start: Path | None = None) -> Recipe:
    """Return a recipe of one peer that starts from a trained one, with its network and the data that it has learnt.

    Args:
        recipe: its name or file.
        source: a weights file of a run.
        changes: of the recipe, such as ``stages.0.epochs=5``.
        start: weights file to start from, where it is another one of that network, which may not be there yet.
    """
    base = load_recipe(recipe)
    if len(base.peers) != 1:
        raise InputError(f"recipe {recipe}: expected one peer, which starts from the run")
    run, (name, *_) = peers_at(source)
    if next(peer.network for peer in run.recipe.peers if peer.name == name) == CUSTOM:
        raise InputError(
            f"{run.folder}: peer '{name}' has a network of your own; open the run from Python, and give "
            f"peerbayes.compress its posterior"
        )
    table = base.model_dump(exclude_none=True)
    table["data"] = run.recipe.data.model_dump(exclude_none=True)
    table["peers"][0] |= {
        "network": next(peer.network for peer in run.recipe.peers if peer.name == name),
        "start_from": str((start or source).resolve()),
    }
    for one in changes:
        change(table, one, f"recipe {recipe}")
    return Recipe.parse(table, f"recipe {recipe}")


def weights_of(path: Path) -> Path:
    """Return the weights file of a run's only peer, or the file that was given itself."""
    run, names = peers_at(path)
    if len(names) > 1:
        raise InputError(f"{path}: has peers {', '.join(names)}; name one of its weights-*.safetensors files")
    if not run.finished:
        raise InputError(run.unfinished)
    return run.weights_file(names[0])


def kind_of(weights: Path) -> str:
    """Return the kind of posterior that a weights file of a run holds, by its recipe."""
    run, (name, *_) = peers_at(weights)
    return next(peer.posterior.kind for peer in run.recipe.peers if peer.name == name)


def source_weights(run: Run, name: str) -> Path | None:
    """Return the weights file that a peer of a run started from; None where there was none, or is none any more."""
    peer = next(peer for peer in run.recipe.peers if peer.name == name)
    try:
        with in_run():
            source = source_of(peer, run.recipe, run.seed, run.folder.parent)
    except InputError:
        return None
    if isinstance(source, Job):
        source = weights_of(source.folder) if is_trained(source.folder) else None
    return source if source is not None and source.is_file() else None
