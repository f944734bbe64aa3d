"""The verbs `train` and `fit`: a recipe, or posteriors from Python, to a trained run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from peerbayes.errors import InputError
from peerbayes.networks.normalisation import Choice
from peerbayes.networks.registry import AUTO
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.recipe import Recipe, listed, load_recipe, over_epochs
from peerbayes.recipes.recipe_data import fitted_to, set_data
from peerbayes.recipes.settings import CUSTOM
from peerbayes.runs.building import check_finite
from peerbayes.runs.executor import DataCache, execute, train_jobs
from peerbayes.runs.plan import Given, Job, check_seed, resolve, with_full_paths
from peerbayes.runs.run import Run, default_folder, trained_into
from peerbayes.runs.session import RunOptions, refuse_unknown
from peerbayes.training.reporters import Reporter

PEERS, TEXT = "peers", "text"  # what is trained where nothing else is said


def train(
    recipe: str | Path | Recipe | None = None,
    run: str | Path | None = None,
    *,
    data: Any = None,
    network: str | None = None,
    epochs: int | None = None,
    seed: int = 0,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Run:
    """Train a recipe into a run folder; runs that its peers start from are trained first if they are missing.

    Args:
        recipe: a recipe, its name or its file; by default ``text`` for texts and ``peers`` for all else.
        run: the run folder; by default ``runs/RECIPE-seedN``, or ``runs/RECIPE-DATA-seedN`` of a general recipe over
            data that are given by name or path.
        data: a data set, or what `peerbayes.data.load` takes, in the place of the recipe's.
        network: of all peers, by name, in the place of the recipe's.
        epochs: in all; milestones and warm-up in proportion.
        seed: seed of everything random.
        overrides: changes of the recipe, such as ``"stages.0.epochs=5"``.
        resume: resume an interrupted run.
        reporter: is told what happens; by default progress bars on a terminal and in notebooks, else nobody.
        how: see `RunOptions`.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> run.finished, list(run)
        (True, ['net'])
        >>> folder.cleanup()
    """
    refuse_unknown(how, train)
    if recipe is None and data is None:
        raise InputError("train: name a recipe, or give data")
    data_sets = DataCache(how.get("root"))
    job = job_for(
        recipe, run, seed, data=data, network=network, epochs=epochs, overrides=overrides, data_sets=data_sets
    )
    return train_jobs([job], resume=resume, reporter=reporter, **how)[0]


def fit(
    peers: Mapping[str, Posterior] | nn.Module,
    *,
    data: Any,
    recipe: str | Path | Recipe | None = None,
    run: str | Path | None = None,
    teachers: Sequence[Posterior] = (),
    normalize: Choice = "auto",
    epochs: int | None = None,
    seed: int = 0,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Run:
    """Train your own posteriors by the stages of a recipe, where they are, or on a ``device``.

    Args:
        peers: posteriors by name; they are trained in place and take the place of the recipe's peers. Or a network:
            the recipe's peers are made over it, all with its weights to begin with.
        data: a data set, or what `peerbayes.data.load` takes, such as a path, ``(X, y)`` or a torch data set; it takes
            the place of the recipe's.
        recipe: a recipe, its name or its file; by default ``text`` for texts and ``peers`` for all else.
        run: the run folder; by default ``runs/RECIPE-seedN``, or ``runs/RECIPE-DATA-seedN`` of a general recipe over
            data that are given by name or path.
        teachers: trained posteriors that the peers learn from, in the place of the recipe's.
        normalize: how networks from elsewhere expect their images: ``"imagenet"``, ``"data"``, (mean, std), or None for
            in [0, 1] or by themselves; ``"auto"`` takes what timm and torchvision note, see
            `peerbayes.networks.normalised`.
        epochs: in all; milestones and warm-up in proportion.
        seed: seed of draws, order and augmentation.
        overrides: changes of the recipe, such as ``"stages.0.epochs=5"``.
        resume: resume an interrupted run.
        reporter: is told what happens; by default progress bars on a terminal and in notebooks, else nobody.
        how: see `RunOptions`.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> run = pb.fit({"net": pb.Point(network)}, data="digits", recipe="plain", run=f"{folder.name}/run",
        ...              overrides=short[1:], device="cpu")
        >>> run["net"].predict(run.data().test.images[:2]).probabilities.shape
        torch.Size([2, 10])
        >>> folder.cleanup()
    """
    refuse_unknown(how, fit)
    check_seed(seed)
    overrides = listed(overrides)
    if recipe is None or run is None or epochs is not None or isinstance(peers, nn.Module):
        data_sets = DataCache(how.get("root"))
        job = job_for(recipe, run, seed, data=data, epochs=epochs, overrides=overrides, data_sets=data_sets)
        recipe, run, overrides = job.recipe, job.folder, ()
        data = data if job.given.data is None else job.given.data
        peers = _made_over(peers, job) if isinstance(peers, nn.Module) else peers
    _check_given(peers)
    check_teacher_overrides(overrides)
    teachers = [teachers] if isinstance(teachers, Posterior) else list(teachers)
    for teacher in cast(list[Any], teachers):
        if not isinstance(teacher, Posterior):
            kind = type(teacher).__name__
            raise InputError(f"a teacher is a {kind}, expected a posterior; wrap a network in Point(...)")
    loaded = load_recipe(recipe, overrides)
    table = loaded.model_dump(exclude_none=True)
    table["peers"] = [
        {"name": name, "network": CUSTOM, "posterior": {"kind": posterior.kind, **posterior.options()}}
        for name, posterior in peers.items()
    ]
    given = Given(
        peers=peers,
        networks={name: posterior.materialise() for name, posterior in peers.items()},
        teachers=teachers,
        teacher_draws=table.pop("teachers", {}).get("draws", 1),
        data=set_data(table, data, how.get("root")),
        normalize=normalize,
    )
    origin = f"recipe {recipe if not isinstance(recipe, Recipe) else loaded.title}"
    job = Job(with_full_paths(Recipe.parse(table, origin)), Path(run), seed, given)
    (done,) = execute(resolve([job]), RunOptions(**how), resume=resume, reporter=reporter)
    for posterior in peers.values():
        posterior.provenance = trained_into(done.folder, done.about.get("generation", 0))
    return done


def job_for(
    recipe: str | Path | Recipe | None,
    run: str | Path | None,
    seed: int = 0,
    *,
    data: Any = None,
    network: str | None = None,
    epochs: int | None = None,
    overrides: str | Sequence[str] = (),
    data_sets: DataCache | None = None,
) -> Job:
    """Return the job of a recipe on data of one's own; ``overrides`` have the last word.

    Args:
        recipe: a recipe, its name or its file; by default ``text`` for texts and ``peers`` for all else.
        run: the run folder; by default ``runs/RECIPE-seedN``, or ``runs/RECIPE-DATA-seedN`` of a general recipe over
            data that are given by name or path.
        seed: of everything random.
        data: what `peerbayes.data.load` takes, in the place of the recipe's.
        network: of all peers, in the place of the recipe's.
        epochs: in all, see `over_epochs`.
        overrides: changes of the recipe.
        data_sets: loads the data; jobs that share it share one copy of each data set.
    """
    data_sets = data_sets or DataCache(None)
    base = load_recipe(PEERS if recipe is None else recipe)
    base = base if epochs is None else over_epochs(base, epochs)
    table = load_recipe(base, overrides).model_dump(exclude_none=True)  # which say how objects are split
    given = None if data is None else set_data(table, data, data_sets.root)
    chosen = with_full_paths(load_recipe(Recipe.parse(table, f"recipe {base.name}"), overrides))
    if recipe is None or any(peer.network == AUTO for peer in chosen.peers):
        loaded = data_sets.of_recipe(chosen) if given is None else given
        if recipe is None and loaded.vocabulary is not None:
            options: dict[str, Any] = {"network": network, "epochs": epochs, "overrides": overrides}
            return job_for(TEXT, run, seed, data=data, data_sets=data_sets, **options)
        chosen, given = load_recipe(fitted_to(chosen, loaded), overrides), loaded
    if network is not None:
        chosen = load_recipe(chosen, ["peers.*.network=" + json.dumps(network), *overrides])
    named = chosen.data.name if isinstance(data, str | Path) else None
    folder = Path(run) if run is not None else default_folder(base.name, seed, data=named)
    return Job(chosen, folder, seed, Given(data=given))


def _made_over(network: nn.Module, job: Job) -> dict[str, Posterior]:
    """Return a recipe's peers over a network."""
    made = {}
    for peer in job.recipe.peers:
        kind, options = peer.posterior.posterior_class, peer.posterior.arguments()
        made[peer.name] = kind(network, seed=job.seed, name=peer.name, **options)
    return made


def check_teacher_overrides(overrides: Sequence[str]) -> None:
    """Refuse changes of who teaches, where posteriors are given that do."""
    for line in overrides:
        key = line.partition("=")[0].strip()
        if key.startswith(("teachers.runs", "teachers.peers")):
            raise InputError(f"overrides: '{key}' has no effect here; give the teachers themselves, such as run['a']")


def _check_given(peers: Any) -> None:
    if not isinstance(peers, Mapping):
        raise InputError(f"peers is of type {type(peers).__name__}, expected posteriors by name")
    owners: dict[int, str] = {}
    for name, posterior in peers.items():
        if not isinstance(posterior, Posterior):
            kind = type(posterior).__name__
            raise InputError(f"peer '{name}' is a {kind}, expected a posterior; wrap a network in Point(...)")
        if (other := owners.setdefault(id(posterior), name)) != name:
            raise InputError(f"peers '{other}' and '{name}' are one and the same posterior; give each its own")
        check_finite(posterior, f"peer '{name}'")
