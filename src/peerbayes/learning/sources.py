"""What a run needs before it begins: peers with their sources, and teachers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerbayes.errors import InputError, within
from peerbayes.learning.perturbing import SEVERAL
from peerbayes.learning.recipe import Recipe, is_recipe, load_recipe, packaged
from peerbayes.learning.run import TAUGHT_BY, Run, default_folder, peer_called, peers_at, read_json, read_recipe
from peerbayes.learning.settings import Peer
from peerbayes.learning.settings import Shared as SharedOptions
from peerbayes.posteriors import Posterior

DATA_KEYS = {"name", "classes", "validation", "size", "stats", "text"}  # what a source must have in common with its run


@dataclass(frozen=True)
class Job:
    """A recipe to be trained into a folder with a seed."""

    recipe: Recipe
    folder: Path
    seed: int = 0

    def __post_init__(self) -> None:
        require_seed(self.seed)


def require_seed(seed: Any) -> None:
    """Refuse what is no seed."""
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}, expected a whole number that is 0 or more")


def generation(job: Job, given: Iterable[Posterior] = ()) -> int:
    """Return how many trainings lie behind a run: one more than behind what it starts from and whom it learns from.

    Initial weights, order and augmentation depend on it, not only on the seed. Otherwise a peer would begin where a
    network of its name began that another peer starts from, and a student would see the crops of its teachers.

    Args:
        job: what it starts from has been trained; where it has begun itself, it stays what it was.
        given: peers and teachers that the recipe does not name.
    """
    if (job.folder / "run.json").is_file():
        return _generation_at(job.folder)
    started = (source_of(peer, job.recipe, job.seed, job.folder.parent) for peer in job.recipe.peers)
    behind = [_generation_at(_folder_of(one)) for one in (*started, *teacher_sources(job)) if one is not None]
    return max([-1, *behind, *(posterior.generation for posterior in given)]) + 1


def _folder_of(source: Path | Job) -> Path:
    if isinstance(source, Job):
        return source.folder
    return source.parent if source.suffix == ".safetensors" else source


def _generation_at(folder: Path) -> int:
    with contextlib.suppress(InputError):  # not that of a run: whoever needs more of it will say so
        found = read_json(folder / "run.json").get("generation", 0)
        return found if isinstance(found, int) else 0
    return 0


def source_of(peer: Peer, recipe: Recipe, seed: int, runs: Path) -> Path | Job | None:
    """Return what a peer starts from: a file of weights, or the run that makes it."""
    source = peer.start_from
    if source is None:
        return None
    if source.endswith(".safetensors"):
        return Path(source)
    if (Path(source) / "recipe.toml").is_file():
        return only_weights(Run(source), peer)
    if not is_recipe(source):
        raise InputError(f"peer '{peer.name}': start_from '{source}' is neither a recipe, a run folder nor a file")
    named = load_recipe(source)
    if len(named.peers) != 1:
        raise InputError(
            f"peer '{peer.name}': start_from '{source}' has peers {', '.join(p.name for p in named.peers)}; "
            "train it, and name one of its weights-*.safetensors files"
        )
    _refuse_circle(source)
    return _fitting(source, named, recipe, seed, runs, {"network": peer.network})


def _fitting(source: str, named: Recipe, recipe: Recipe, seed: int, runs: Path, peer_changes: Mapping[str, Any]) -> Job:
    """Return the run of a recipe that another one needs: on the same data."""
    table = named.model_dump(exclude_none=True)
    table["data"] |= recipe.data.model_dump(include=DATA_KEYS, exclude_none=True)
    table["peers"] = [item | peer_changes for item in table["peers"]]
    fitted = Recipe.parse(table, f"recipe {source}")
    folder = default_folder(source, seed, runs)
    if fitted != named:
        folder = folder.with_name(f"{folder.name}-{fitted.digest}")
    return Job(fitted_to_teachers(fitted), folder, seed)


def teacher_sources(job: Job) -> list[Path | Job]:
    """Return where a recipe's teachers lie: run folders, weights files, or runs that have to be made.

    A teacher that is named by its recipe has the seed of its student, so all students of a seed share its run; peers of
    an ensemble differ by their names, which everything random of them depends on.
    """
    if job.recipe.teachers is None:
        return []
    found: list[Path | Job] = []
    for source in job.recipe.teachers.runs:
        path = Path(source).expanduser()
        if (path / "recipe.toml").is_file() or path.suffix == ".safetensors":
            found.append(path)
        elif is_recipe(source):
            _refuse_circle(source)
            found.append(_fitting(source, load_recipe(source), job.recipe, job.seed, job.folder.parent, {}))
        else:
            raise InputError(f"teacher '{source}' is neither a recipe, a run folder nor a weights file of a run")
    return found


def fitted_to_teachers(recipe: Recipe) -> Recipe:
    """Return the recipe with what it leaves to its teachers: ``network = "teachers"``, and ``members = 0``."""
    if recipe.teachers is None:
        return recipe
    known: list[Recipe] = []
    taught: dict[tuple[str, str], Peer] = {}
    at_hand: dict[str, list[Peer]] = {}  # by source, whether they are to teach or not
    for source in recipe.teachers.runs:
        path = Path(source).expanduser()
        folder = path.parent if path.suffix == ".safetensors" else path
        if source not in packaged() and not path.exists() and _looks_like_a_path(source):
            raise InputError(f"teachers.runs: there is no run folder or weights file '{source}'")
        with within("teachers.runs"):
            if folder.is_dir() and not (folder / "recipe.toml").is_file():
                peers_at(path)  # knows what is wrong with it
            known.append(read_recipe(folder) if folder.is_dir() else _recipe_of(source))
        where = str(folder.resolve()) if folder.exists() else source
        file = path.name if folder != path else None
        at_hand[source] = [p for p in known[-1].peers if file in (None, f"weights-{p.name}.safetensors")]
        for peer in (peer for peer in at_hand[source] if recipe.teachers.has(peer.name)):
            if (where, peer.name) in taught:
                raise InputError(f"teachers.runs: '{source}' would let peer '{peer.name}' teach twice")
            taught[where, peer.name] = peer
    missing = set(recipe.teachers.peers or ()) - {name for _, name in taught}
    if missing:
        names = ", ".join(dict.fromkeys(peer.name for peers in at_hand.values() for peer in peers))
        raise InputError(f"teachers.peers: no teacher is called '{min(missing)}'; there are {names}")
    for source, peers in at_hand.items():
        if peers and not any(recipe.teachers.has(peer.name) for peer in peers):
            has = ", ".join(peer.name for peer in peers)
            raise InputError(f"teachers.peers: names nobody of '{source}', which has {has}")
    count = sum(recipe.teachers.draws if _has_draws(peer) else 1 for peer in taught.values())
    if count == 1:
        _refuse_comparing(recipe, next(iter(taught.values())))
    table = recipe.model_dump(exclude_none=True)
    table["teachers"]["runs"] = [
        str(path.resolve()) if (path := Path(source).expanduser()).exists() else source
        for source in recipe.teachers.runs
    ]
    for peer in table["peers"]:
        if peer["network"] == "teachers":
            peer["network"] = next(iter(taught.values()), known[0].peers[0]).network
        if peer["posterior"].get("members") == 0:
            peer["posterior"]["members"] = count
    return Recipe.parse(table, f"recipe {recipe.name}")


def _recipe_of(source: str) -> Recipe:
    """Return the recipe of a teacher that may have to be trained, with what it leaves to teachers of its own."""
    _refuse_circle(source)
    return fitted_to_teachers(load_recipe(source))


def _refuse_comparing(recipe: Recipe, teacher: Peer) -> None:
    """Refuse a recipe that compares teachers, where there is one; name one that does not, if possible of its data."""
    kinds = [(place, stage.perturb.kind) for place, stage in enumerate(recipe.stages) if stage.perturb is not None]
    for place, kind in kinds:
        if kind in SEVERAL:
            fitting = [name for name in packaged() if name.endswith("-single-kd") and _is_of(name, recipe, teacher)]
            more = "set teachers.draws above 1" if _has_draws(teacher) else "give it two or more"
            raise InputError(
                f"stages.{place}.perturb: '{kind}' compares teachers, but there is only one; {more}, or take a recipe "
                f"for one, such as {next(iter(fitting), 'distillation/kd')}"
            )


def _is_of(name: str, recipe: Recipe, teacher: Peer) -> bool:
    found = load_recipe(name)
    return found.data.name == recipe.data.name and found.peers[0].network == teacher.network


def _looks_like_a_path(source: str) -> bool:
    """Return whether whoever wrote this meant a run, by its place on the disk, and not a recipe."""
    path = Path(source).expanduser()
    if path.suffix == ".toml":
        return False
    beside = path.parent != Path() and path.parent.is_dir()
    return source.startswith((".", "~")) or path.is_absolute() or path.suffix == ".safetensors" or beside


def _has_draws(peer: Peer) -> bool:
    return peer.posterior.kind != "point" and getattr(peer.posterior, "predicts", "members") == "members"


def made_by_recipes(recipe: Recipe) -> dict[str, str]:
    """Return whose origins are runs that recipes make, again where they are gone, as `origins_of` calls them."""
    found = {peer_called(p.name): p.start_from for p in recipe.peers if p.start_from and is_recipe(p.start_from)}
    taught = [run for run in (recipe.teachers.runs if recipe.teachers is not None else ()) if is_recipe(run)]
    return found | ({TAUGHT_BY: taught[0]} if taught else {})


def untrained_sources(job: Job) -> list[Job]:
    """Return the runs that a job needs and that are not there yet: what its peers start from, and its teachers."""
    named = [source_of(peer, job.recipe, job.seed, job.folder.parent) for peer in job.recipe.peers]
    needed = [source for source in (*named, *teacher_sources(job)) if isinstance(source, Job)]
    return [source for source in needed if not is_trained(source.folder)]


def rehearsed(job: Job) -> Job:
    """Return a job to look at, not to train: its peers do not start from what is not there yet, nor make codebooks."""

    def is_there(peer: Peer) -> bool:
        source = source_of(peer, job.recipe, job.seed, job.folder.parent)
        there = is_trained(source.folder) if isinstance(source, Job) else True
        return there and not isinstance(peer.posterior, SharedOptions)

    peers = [peer if is_there(peer) else peer.model_copy(update={"start_from": None}) for peer in job.recipe.peers]
    return replace(job, recipe=job.recipe.model_copy(update={"peers": peers}))


def _refuse_circle(source: str, above: tuple[str, ...] = ()) -> None:
    """Refuse a recipe that needs itself, to start from or as a teacher."""
    if source in above:
        raise InputError(f"recipe '{source}' leads back to itself, by way of {' and '.join(above)}: a circle")
    if not is_recipe(source):
        return
    recipe = load_recipe(source)
    needed = [peer.start_from for peer in recipe.peers if peer.start_from is not None]
    for one in (*needed, *(recipe.teachers.runs if recipe.teachers is not None else ())):
        _refuse_circle(one, (*above, source))


def only_weights(run: Run, peer: Peer) -> Path:
    if len(run) != 1:
        raise InputError(
            f"peer '{peer.name}': {run.folder} has peers {', '.join(run)}; name one weights-*.safetensors file"
        )
    return run.weights_file(next(iter(run)))


def is_trained(folder: Path) -> bool:
    return (folder / "recipe.toml").is_file() and Run(folder).finished
