"""From recipes to trained run folders: one by one, or packed side by side on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peerbayes import data as data_room
from peerbayes.data import Dataset, Vocabulary
from peerbayes.errors import InputError, OutOfMemory, TrainingError
from peerbayes.importing import allow
from peerbayes.learning.building import build_peers, build_teachers
from peerbayes.learning.checking import check, check_outside
from peerbayes.learning.folder import origins_of, refuse_occupied, refuse_other_origins
from peerbayes.learning.how import How, in_parts, refuse_unknown
from peerbayes.learning.inputs import load_data
from peerbayes.learning.progress import Reporter
from peerbayes.learning.recipe import Recipe, load_recipe
from peerbayes.learning.run import Run, read_json
from peerbayes.learning.session import Session, train_wave
from peerbayes.learning.sources import DATA_KEYS, Job, fitted_to_teachers, generation, untrained_sources


def train(
    recipe: str | Path | Recipe,
    run: str | Path,
    *,
    seed: int = 0,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Run:
    """Train a recipe into a run folder; sources that its peers start from are trained first if they are missing.

    Args:
        recipe: a recipe, its name or its file.
        run: the run folder.
        seed: seed of everything random.
        overrides: changes of the recipe, such as ``"stages.0.epochs=5"``.
        resume: go on with an interrupted run.
        reporter: is told what happens; by default a progress bar on a terminal, else nobody.
        how: see `How`.
    """
    refuse_unknown(how, train)
    job = Job(load_recipe(recipe, overrides), Path(run), seed)
    return train_jobs([job], resume=resume, reporter=reporter, **how)[0]


def train_jobs(
    jobs: Sequence[Job],
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    errors: dict[int, TrainingError] | None = None,
    **how: Any,
) -> list[Run]:
    """Train jobs, on a GPU side by side; what their peers start from comes first, side by side too.

    Args:
        jobs: with a folder each.
        resume: go on with interrupted runs.
        reporter: is told what happens; by default a progress bar on a terminal, else nobody.
        errors: gets the errors of jobs that could not go on, by place; without it the first one is raised, when the
            others have ended.
        how: see `How`.
    """
    refuse_unknown(how, train_jobs)
    settings = How(**how)
    reporter = settings.voice(reporter)
    jobs = [_completed(job) for job in jobs]
    for place, job in enumerate(jobs):
        if any(job.folder.resolve() == other.folder.resolve() for other in jobs[:place]):
            raise InputError(f"{job.folder}: two runs can't have one folder")
        refuse_occupied(job, resume)
    device, loaded = settings.place(), Loaded(settings.root)
    left = [job for job in jobs if not is_finished(job, reporter)]
    _check_all(left, loaded, device, settings)
    done = _train_sources(left, reporter, settings)
    left = [job for job in left if job.folder.resolve() not in done]
    failed = _train_in_waves(left, loaded, device, resume, reporter, settings)
    found = {place: failed[job.folder] for place, job in enumerate(jobs) if job.folder in failed}
    if errors is not None:
        errors.update(found)
    for error in found.values() if errors is None else ():
        raise error
    return [Run(job.folder) for job in jobs]


def _train_in_waves(
    jobs: Sequence[Job], loaded: Loaded, device: torch.device, resume: bool, reporter: Reporter, how: How
) -> dict[Path, TrainingError]:
    """Train jobs side by side, fewer where memory is too small; return why some could not go on, by folder."""
    found: dict[Path, TrainingError] = {}
    waves, begun = how.waves(jobs, device), set[Path]()
    while waves:
        wave, *waves = waves
        sessions = []
        for job in wave:
            data = loaded(job.recipe, job.folder)
            voice = reporter if len(wave) == 1 else reporter.beside(job.folder.name)
            taught = build_teachers(job, data, device)
            number = generation(job)
            peers = build_peers(job, data, device, number)
            goes_on = resume or job.folder in begun
            sessions.append(Session(job, peers, data, goes_on, voice, how, len(wave), taught, number))
        found |= {wave[place].folder: error for place, error in train_wave(sessions, how.world).items()}
        del sessions, taught, peers
        gc.collect()  # graphs, moments and memory pools of this wave, before the next one takes its own
        again = [job for job in wave if len(wave) > 1 and isinstance(found.get(job.folder), OutOfMemory)]
        if again:
            size = len(wave) // 2
            reporter.warn(f"the memory of {device} is too small for {len(wave)} runs side by side: from now on {size}")
            begun |= {job.folder for job in again}
            for job in again:
                del found[job.folder]
            waves = in_parts([*again, *(job for later in waves for job in later)], size)
    return found


def check_jobs(jobs: Sequence[Job], *, resume: bool | None = None, loaded: Loaded | None = None, **how: Any) -> None:
    """Refuse jobs that could not be trained, without training them.

    Args:
        jobs: as `train_jobs` takes them.
        resume: whether their folders may hold interrupted runs; None for not looking there.
        loaded: data sets that are known already.
        how: see `How`.
    """
    settings = How(**how)
    known, device = loaded or Loaded(settings.root), settings.place()
    for job in map(_completed, jobs):
        if resume is not None:
            refuse_occupied(job, resume)
        check(job, known(job.recipe, job.folder), device, settings.root, settings.world)


def refuse_changed_sources(job: Job, loaded: Loaded) -> None:
    """Refuse a run whose peers started from other weights than those that lie there now."""
    job = _completed(job)
    peers = build_peers(job, loaded(job.recipe, job.folder), torch.device("cpu"), generation(job))
    refuse_other_origins(job.folder, origins_of(peers, []))


def _completed(job: Job) -> Job:
    """Return a job with full paths and what it leaves to its teachers; whoever trains it allows its networks."""
    for peer in job.recipe.peers:
        if ":" in peer.network:
            allow(peer.network, "network")
    return replace(job, recipe=fitted_to_teachers(with_full_path(job.recipe)))


def _check_all(jobs: Sequence[Job], loaded: Loaded, device: torch.device, how: How) -> None:
    """Refuse what is wrong with any job before the first is trained, or a source of it, which may take days."""
    at_once = len(how.waves(jobs, device)) <= 1 and not any(map(untrained_sources, jobs))
    for job in {job.recipe.digest: job for job in jobs}.values():  # seeds are alike
        data = loaded(job.recipe, job.folder)
        if at_once:  # the learners look for themselves before anything is written
            check_outside(job.recipe, data, how.root)
        else:
            check(job, data, device, how.root, how.world)


class Loaded:
    """Data sets of recipes, each loaded once, so that packed runs share one copy on the device."""

    def __init__(self, root: str | Path | None) -> None:
        self.root = root
        self._found: dict[str, Dataset] = {}

    def __call__(self, recipe: Recipe, folder: Path | None = None) -> Dataset:
        """Return a recipe's data; with the vocabulary of a run in a folder, which goes on, if there is one."""
        return self._with(recipe, words_of(folder) if folder is not None else None)

    def of(self, run: Run) -> Dataset:
        """Return a run's data, with its vocabulary."""
        found = self._with(run.recipe, run.vocabulary)
        run.refuse_strange(found)
        return found

    def _with(self, recipe: Recipe, known: Vocabulary | None) -> Dataset:
        key = recipe.data.model_dump_json(include=DATA_KEYS) + (known.digest if known is not None else "")
        if key not in self._found:
            self._found[key] = load_data(recipe, self.root, known)
        return self._found[key]


def words_of(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of the run in a folder, if there is one."""
    return Run(folder).vocabulary if (folder / "recipe.toml").is_file() else None


def is_finished(job: Job, reporter: Reporter) -> bool:
    """Return whether a job has been trained already, and tell."""
    path = job.folder / "run.json"
    finished = path.is_file() and bool(read_json(path).get("finished"))
    if finished:
        reporter.headline(f"{job.folder}: already finished")
    return finished


def with_full_path(recipe: Recipe) -> Recipe:
    """Return a recipe whose run finds its data again from another folder."""
    data, changes = recipe.data, dict[str, Any](name=_full(recipe.data.name))
    if data.text is not None and data.text.vectors and Path(data.text.vectors).expanduser().exists():
        vectors = str(Path(data.text.vectors).expanduser().resolve())
        changes["text"] = data.text.model_copy(update={"vectors": vectors})
    outside = {"out_of_distribution": [_full(name) for name in recipe.evaluation.out_of_distribution]}
    evaluation = recipe.evaluation.model_copy(update=outside)
    return recipe.model_copy(update={"data": data.model_copy(update=changes), "evaluation": evaluation})


def _full(name: str) -> str:
    return str(Path(name).resolve()) if name not in data_room.names() and Path(name).exists() else name


# ---- what has to be trained first -----------------------------------------------------------------------------------


def _train_sources(jobs: Sequence[Job], reporter: Reporter, how: How) -> set[Path]:
    """Train what the jobs' peers start from, and their teachers, where they are missing; return the folders."""
    sources: dict[Path, Job] = {}
    for job in jobs:
        sources |= {source.folder.resolve(): source for source in untrained_sources(job)}
    for job in jobs:
        wanted = sources.get(job.folder.resolve())
        if wanted is not None and with_full_path(wanted.recipe) != job.recipe:
            raise InputError(
                f"{job.folder}: other runs start from it with the settings of '{wanted.recipe.name}', but other "
                "settings are asked for; train it into a folder of its own"
            )
    for source in sources.values():
        reporter.headline(f"{source.recipe.name}: training it first, into {source.folder}")
    if sources:
        train_jobs(list(sources.values()), resume=True, reporter=reporter, **how.__dict__)
    return set(sources)
