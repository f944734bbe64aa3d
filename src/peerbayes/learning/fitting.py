"""From posteriors of one's own to a trained run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerbayes.data import Dataset
from peerbayes.errors import InputError
from peerbayes.learning.checking import check_outside
from peerbayes.learning.folder import origins_of, refuse_occupied, refuse_other_origins
from peerbayes.learning.how import How, refuse_unknown
from peerbayes.learning.inputs import load_data
from peerbayes.learning.jobs import is_finished, with_full_path, words_of
from peerbayes.learning.progress import Reporter
from peerbayes.learning.recipe import Recipe, listed, load_recipe
from peerbayes.learning.run import Run, home, run_of
from peerbayes.learning.session import Session, train_wave
from peerbayes.learning.settings import CUSTOM
from peerbayes.learning.sources import Job, generation
from peerbayes.learning.teachers import Teachers
from peerbayes.posteriors import Posterior


def fit(
    peers: Mapping[str, Posterior],
    *,
    data: str | Path | Dataset,
    recipe: str | Path | Recipe,
    run: str | Path,
    teachers: Sequence[Posterior] = (),
    seed: int = 0,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Run:
    """Train your own posteriors by the stages of a recipe, where they are, or on a ``device``.

    Args:
        peers: posteriors by name; they are trained in place and take the place of the recipe's peers.
        data: a data set (`peerbayes.data.from_arrays` makes one of arrays), or what `peerbayes.data.load` takes; it
            takes the place of the recipe's.
        recipe: a recipe, its name or its file.
        run: the run folder.
        teachers: trained posteriors that the peers learn from, in the place of the recipe's.
        seed: seed of draws, order and augmentation.
        overrides: changes of the recipe, such as ``"stages.0.epochs=5"``.
        resume: go on with an interrupted run.
        reporter: is told what happens; by default a progress bar on a terminal, else nobody.
        how: see `How`.
    """
    refuse_unknown(how, fit)
    _check_given(peers, data)
    overrides = listed(overrides)
    refuse_naming_teachers(overrides)
    teachers = [teachers] if isinstance(teachers, Posterior) else list(teachers)
    for one in teachers:
        if not isinstance(one, Posterior):
            raise InputError(f"a teacher is a {type(one).__name__}, expected a posterior; wrap a network in Point(...)")
    found, settings = load_recipe(recipe, overrides), How(**how)
    given = [
        {"name": name, "network": CUSTOM, "posterior": {"kind": posterior.kind, **posterior.options()}}
        for name, posterior in peers.items()
    ]
    table = found.model_dump(exclude_none=True)
    table["peers"] = given
    draws = table.pop("teachers", {}).get("draws", 1)
    table["data"].pop("classes", None)
    table["data"]["name"] = data.name if isinstance(data, Dataset) else str(data)
    found = with_full_path(Recipe.parse(table, f"recipe {recipe if not isinstance(recipe, Recipe) else found.title}"))
    job = Job(found, Path(run), seed)
    device = next(iter(peers.values())).device if settings.device == "auto" else settings.place()
    loaded = data if isinstance(data, Dataset) else load_data(found, settings.root, words_of(job.folder))
    for known in filter(None, map(run_of, {one.home: one for one in teachers}.values())):  # each run once
        known.refuse_strange(loaded, f"teacher {known.folder}", sizes=False)
    reporter = settings.voice(reporter)
    refuse_occupied(job, resume)
    if resume:
        refuse_other_origins(job.folder, origins_of(peers, teachers))
    networks_by_peer = {name: posterior.materialise() for name, posterior in peers.items()}
    for name, posterior in peers.items():
        posterior.to(device)
        posterior.seed, posterior.name, posterior.input_shape = seed, name, loaded.shape
    if not is_finished(job, reporter):
        check_outside(found, loaded, settings.root)
        taught = Teachers([t.to(device) for t in teachers], draws, seed) if teachers else None
        number = generation(job, [*peers.values(), *teachers])
        session = Session(job, dict(peers), loaded, resume, reporter, settings, teachers=taught, generation=number)
        for error in train_wave([session], settings.world).values():
            raise error
        done = Run(run, networks_by_peer)
    else:
        done = Run(run, networks_by_peer)
        for name, posterior in peers.items():  # as if they had been trained just now
            posterior.load_state({place: t.to(device) for place, t in done[name].state().items()})
            posterior.generation, posterior.origin = done[name].generation, None
    for posterior in peers.values():
        posterior.home = home(done.folder)
    return done


def refuse_naming_teachers(overrides: Sequence[str]) -> None:
    """Refuse changes of who teaches, where posteriors are given that do."""
    for one in overrides:
        key = one.partition("=")[0].strip()
        if key.startswith(("teachers.runs", "teachers.peers")):
            raise InputError(f"overrides: '{key}' has no effect here; give the teachers themselves, such as run['a']")


def refuse_infinite(posterior: Posterior, who: str) -> None:
    """Refuse weights and scales that are not finite; buffers may be so."""
    for name, tensor in posterior.state().items():
        if not name.startswith("network/") and not bool(tensor.isfinite().all()):
            raise InputError(f"{who}: tensor '{name}' holds values that are not finite")


def _check_given(peers: Any, data: Any) -> None:
    if not isinstance(peers, Mapping):
        raise InputError(f"peers is of type {type(peers).__name__}, expected posteriors by name")
    owners: dict[int, str] = {}
    for name, posterior in peers.items():
        if not isinstance(posterior, Posterior):
            kind = type(posterior).__name__
            raise InputError(f"peer '{name}' is a {kind}, expected a posterior; wrap a network in Point(...)")
        if (other := owners.setdefault(id(posterior), name)) != name:
            raise InputError(f"peers '{other}' and '{name}' are one and the same posterior; give each its own")
        refuse_infinite(posterior, f"peer '{name}'")
    if not isinstance(data, str | Path | Dataset):
        kind = type(data).__name__
        raise InputError(f"data is of type {kind}, expected a name, a path or a Dataset (data.from_arrays makes one)")
