"""The verb `compress`: a trained run or posterior to one whose weights share a codebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from peerbayes.errors import InputError
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.recipe import Recipe, change, listed, load_recipe
from peerbayes.recipes.recipe_data import set_data
from peerbayes.recipes.settings import CUSTOM
from peerbayes.runs.building import check_finite
from peerbayes.runs.executor import execute
from peerbayes.runs.plan import Given, Job, check_seed, resolve, with_full_paths
from peerbayes.runs.run import Run, default_folder, peers_at, run_of
from peerbayes.runs.session import RunOptions, refuse_unknown
from peerbayes.training.reporters import Reporter

RECIPE, FIRST = "sharing/shared", "sharing/stage1"


def compress(
    source: Run | Posterior | str | Path,
    *,
    components: int | None = None,
    data: Any = None,
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
        resume: resume an interrupted run.
        reporter: is told what happens; by default progress bars on a terminal and in notebooks, else nobody.
        how: see `RunOptions`.
    """
    refuse_unknown(how, compress)
    check_seed(seed)
    _check_given(source)
    changes = [*([] if components is None else [f"peers.0.posterior.components={components}"]), *listed(overrides)]
    folder = None if run is None else Path(run)
    posterior = _custom_peer(source) if isinstance(source, Run) else source if isinstance(source, Posterior) else None
    if posterior is not None:
        source_run = source if isinstance(source, Run) else run_of(posterior)
        if isinstance(source, Run) and folder is None:
            folder = _with_end(source.folder, "-shared")
        folder = folder or default_folder(str(into), seed)
        job = _compression_of_object(posterior, source_run, into, first, changes, folder, seed, data, how.get("root"))
    elif data is not None:
        raise InputError("data is for a posterior: a run is compressed on the data that it has learnt")
    else:
        path = source.named if isinstance(source, Run) else Path(str(source))
        job = compression(path, into, first, changes, folder, seed)
    (done,) = execute(resolve([job]), RunOptions(**how), resume=resume, reporter=reporter)
    return done[job.recipe.peers[0].name]


def _check_given(source: Any) -> None:
    if not isinstance(source, Run | Posterior | str | Path):
        kind = type(source).__name__
        raise InputError(f"source is a {kind}, expected a run, its folder, a weights file of a run, or a posterior")
    if isinstance(source, Posterior) and source.made_of_posterior:
        raise InputError("the posterior's weights share a codebook already; compress the one that it was made of")


def compression(
    run: Path, into: str | Path, first: str | Path, changes: Sequence[str], folder: Path | None, seed: int
) -> Job:
    """Return the job that compresses a run; where that has no scales, it starts from a job that gives them.

    Args:
        run: a run folder, or a weights file of a run.
        into: recipe of the shared weights.
        first: recipe of the scales.
        changes: of the recipe ``into``.
        folder: of the shared weights; by default ``RUN-shared``.
        seed: of both.
    """
    weights = weights_of(run)
    folder = folder or _with_end(weights.parent, "-shared")
    _check_recipes(load_recipe(into, changes), load_recipe(first))
    trained, (name, *_) = peers_at(weights)
    kind = trained.recipe.peer(name).posterior.posterior_class
    if kind.made_of_posterior:
        raise InputError(f"{weights}: its weights share a codebook already; compress the run that it was made of")
    if kind.shareable:
        return Job(recipe_from(into, weights, changes), folder, seed)
    before = Job(recipe_from(first, weights), _with_end(folder, "-stage1"), seed)
    start = before.folder / f"weights-{before.recipe.peers[0].name}.safetensors"
    recipe = recipe_from(into, weights, changes, start)
    return Job(recipe, folder, seed, Given(starts={recipe.peers[0].name: before}))


def _compression_of_object(
    posterior: Posterior,
    run: Run | None,
    into: str | Path,
    first: str | Path,
    changes: Sequence[str],
    folder: Path,
    seed: int,
    data: Any,
    root: str | Path | None,
) -> Job:
    """Return the job that compresses a posterior, of a run if that is known, whose network no recipe could build."""
    last, scales = load_recipe(into), load_recipe(first)
    if run is not None and data is None:  # on the data that it has learnt, as it has learnt it
        last, scales = (recipe.model_copy(update={"data": run.recipe.data}) for recipe in (last, scales))
        data = run.given_data()
        if data is None:
            data = run.recipe.data.name if run.vocabulary is None else run.data(root)
    if data is None:
        raise InputError("`data` is required: the posterior was not loaded from a run; name the data, or give a run")
    last = load_recipe(last, changes)
    _check_recipes(last, scales)
    check_finite(posterior, "the posterior")
    network = posterior.materialise()
    before: Posterior | Job = posterior
    if not posterior.shareable:
        before = _job_of_object(scales, network, posterior, data, _with_end(folder, "-stage1"), seed, root)
    return _job_of_object(last, network, before, data, folder, seed, root)


def _job_of_object(
    recipe: Recipe,
    network: nn.Module,
    start: Posterior | Job,
    data: Any,
    folder: Path,
    seed: int,
    root: str | Path | None,
) -> Job:
    table = recipe.model_dump(exclude_none=True)
    loaded = set_data(table, data, root)
    table["peers"][0]["network"] = CUSTOM
    table["peers"][0].pop("start_from", None)
    name = recipe.peers[0].name
    given = Given(networks={name: network}, starts={name: start}, data=loaded)
    return Job(with_full_paths(Recipe.parse(table, f"recipe {recipe.name}")), folder, seed, given)


def _with_end(folder: Path, end: str) -> Path:
    folder = folder if folder.name not in ("", "..") else folder.resolve()  # "." has no name
    return folder.with_name(f"{folder.name}{end}")


def _custom_peer(run: Run) -> Posterior | None:
    """Return the only peer that predicts, where its network came from Python and no recipe could build it again."""
    (name, *more) = run.predicting
    if more or run.recipe.peer(name).network != CUSTOM:
        return None
    _check_given(run[name])
    return run[name]


def _check_recipes(recipe: Recipe, first: Recipe) -> None:
    """Refuse what is no recipe of shared weights, and what gives no scales."""
    if len(recipe.peers) != 1 or not recipe.peers[0].posterior.posterior_class.made_of_posterior:
        raise InputError(f"recipe {recipe.name}: expected one peer, whose weights are shared")
    if len(first.peers) != 1 or not first.peers[0].posterior.posterior_class.shareable:
        raise InputError(f"recipe {first.name}: expected one peer with a mean_field posterior")


def recipe_from(recipe: str | Path, source: Path, changes: Sequence[str] = (), start: Path | None = None) -> Recipe:
    """Return a recipe of one peer that starts from a trained one, with its network and the data that it has learnt.

    Args:
        recipe: its name or file.
        source: a weights file of a run.
        changes: of the recipe, such as ``stages.0.epochs=5``.
        start: weights file to start from, where it is another one of that network, which may not be there yet.
    """
    run, (name, *_) = peers_at(source)
    if run.recipe.peer(name).network == CUSTOM:
        raise InputError(
            f"{run.folder}: peer '{name}' has a network of your own; open the run from Python, and give "
            f"peerbayes.compress its posterior"
        )
    table = load_recipe(recipe).model_dump(exclude_none=True)
    table["data"] = run.recipe.data.model_dump(exclude_none=True)
    table["peers"][0] |= {
        "network": run.recipe.peer(name).network,
        "start_from": str((start or source).resolve()),
    }
    for line in changes:
        change(table, line, f"recipe {recipe}")
    return Recipe.parse(table, f"recipe {recipe}")


def weights_of(path: Path) -> Path:
    """Return the weights file of a run's only peer, or the file that was given itself."""
    run, names = peers_at(path)
    if len(names) > 1:
        raise InputError(f"{path}: has peers {', '.join(names)}; name one of its weights-*.safetensors files")
    if not run.finished:
        raise InputError(run.unfinished)
    return run.weights_file(names[0])
