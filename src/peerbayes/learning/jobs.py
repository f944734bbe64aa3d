"""From recipes to trained run folders: one by one, or packed side by side on a GPU."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from peerbayes import data as data_room
from peerbayes.data import Dataset, Placement, Vocabulary
from peerbayes.errors import InputError
from peerbayes.learning import checkpoints
from peerbayes.learning.checking import check, check_outside
from peerbayes.learning.distribution import ALONE, World
from peerbayes.learning.engine import STREAMS, TEACHERS, Name, pick
from peerbayes.learning.loop import Learner, TrainingError, run_together
from peerbayes.learning.progress import Reporter
from peerbayes.learning.recipe import Recipe, load_recipe
from peerbayes.learning.run import (
    Run,
    environment,
    load_data,
    network_inputs,
    pick_device,
    read_json,
    write_text,
)
from peerbayes.learning.settings import CUSTOM
from peerbayes.learning.sources import (
    DATA_KEYS,
    Job,
    build_peers,
    build_teachers,
    fitted_to_teachers,
    untrained_sources,
)
from peerbayes.learning.teachers import Teachers
from peerbayes.posteriors import Posterior, Shared

Engine = Name | Literal["auto"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class How:
    """How jobs are run; nothing here changes what is learnt, but for rounding.

    Attributes:
        device: where to train; ``auto`` takes a GPU where there is one.
        root: data root.
        engine: ``eager``, ``compiled``, ``captured``, or ``auto``: captured on a GPU, else eager.
        precision: what networks compute in; ``auto`` is bfloat16 where the engine is captured, else float32.
        placement: where the training images lie; see `peerbayes.data.feed`.
        checkpoint_every: steps between checkpoints; by default at the end of an epoch, at most every 30 s.
        pack: most jobs trained side by side; by default all that a GPU has streams for, 32 // (peers + 1), and one on a
            CPU or with many processes.
        world: the processes that share each batch.
        synchronise: take batch-norm's and kernels' statistics over all processes.
    """

    device: str | torch.device = "auto"
    root: str | Path | None = None
    engine: Engine = "auto"
    precision: Precision = "auto"
    placement: Placement = "auto"
    checkpoint_every: int | None = None
    pack: int | None = None
    world: World = ALONE
    synchronise: bool = False

    def place(self) -> torch.device:
        """Return the device."""
        return pick_device(self.device) if self.world.size == 1 else self.world.device(self.device)

    def learner_options(self, device: torch.device) -> dict[str, Any]:
        """Return the options of a learner."""
        engine = pick(self.engine, device)
        half = self.precision == "bfloat16" or (self.precision == "auto" and engine == "captured")
        return {
            "engine": engine,
            "autocast": torch.bfloat16 if half else None,
            "placement": self.placement,
            "checkpoint_every": self.checkpoint_every,
            "world": self.world,
            "synchronise": self.synchronise,
        }

    def waves(self, jobs: Sequence[Job], device: torch.device) -> list[Sequence[Job]]:
        """Return the jobs in groups that are trained side by side."""
        captured = pick(self.engine, device) == "captured"
        taught = TEACHERS if any(job.recipe.teachers is not None for job in jobs) else 0
        streams = max((len(job.recipe.peers) for job in jobs), default=1) + 1 + taught
        most = max(1, STREAMS // streams) if captured else len(jobs) or 1
        pack = min(most, self.pack or (most if captured else 1))
        if self.world.size > 1:
            pack = 1  # gradients of several runs would meet in one buffer
        return [jobs[i : i + pack] for i in range(0, len(jobs), pack)]


def fit(
    peers: Mapping[str, Posterior],
    *,
    data: str | Path | Dataset,
    recipe: str | Path | Recipe,
    run: str | Path,
    teachers: Sequence[Posterior] = (),
    seed: int = 0,
    overrides: Sequence[str] = (),
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Run:
    """Train your own posteriors by the stages of a recipe, on the device that they are on.

    Args:
        peers: posteriors by name; they are trained in place and take the place of the recipe's peers.
        data: a data set, or what `peerbayes.data.load` takes; it takes the place of the recipe's.
        recipe: a recipe, its name or its file.
        run: the run folder.
        teachers: trained posteriors that the peers learn from, in the place of the recipe's.
        seed: seed of draws, order and augmentation.
        overrides: changes of the recipe, such as ``"stages.0.epochs=5"``.
        resume: go on with an interrupted run.
        reporter: is told what happens; silent by default.
        how: see `How`.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    given = [
        {"name": name, "network": CUSTOM, "posterior": {"kind": posterior.kind, **posterior.options()}}
        for name, posterior in peers.items()
    ]
    table = found.model_dump(exclude_none=True)
    table["peers"] = given
    draws = table.pop("teachers", {}).get("draws", 1)
    table["data"].pop("classes", None)
    table["data"]["name"] = data.name if isinstance(data, Dataset) else str(data)
    found = _with_full_path(Recipe.parse(table, f"recipe {recipe if not isinstance(recipe, Recipe) else found.title}"))
    settings = How(**how)
    loaded = data if isinstance(data, Dataset) else load_data(found, settings.root)
    networks_by_peer = {name: posterior.materialise() for name, posterior in peers.items()}
    for name, posterior in peers.items():
        posterior.seed, posterior.name = seed, name
    job, device = Job(found, Path(run), seed), next(iter(peers.values())).device
    reporter = (reporter or Reporter()) if settings.world.is_first else _Mute()
    _refuse_occupied(job, resume)
    if not _is_finished(job, reporter):
        check_outside(found, loaded, settings.root)
        taught = Teachers([t.to(device) for t in teachers], draws, seed) if teachers else None
        session = _Session(job, dict(peers), loaded, resume, reporter, settings, teachers=taught)
        for error in _train_wave([session], settings.world).values():
            raise error
    return Run(run, networks_by_peer)


def train(
    recipe: Recipe,
    run: str | Path,
    *,
    seed: int = 0,
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Run:
    """Train a recipe into a run folder; sources that its peers start from are trained first if they are missing.

    Args:
        recipe: a validated recipe.
        run: the run folder.
        seed: seed of everything random.
        resume: go on with an interrupted run.
        reporter: is told what happens; silent by default.
        how: see `How`.
    """
    return train_jobs([Job(recipe, Path(run), seed)], resume=resume, reporter=reporter, **how)[0]


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
        reporter: is told what happens; silent by default.
        errors: gets the errors of jobs that could not go on, by place; without it the first one is raised, when the
            others have ended.
        how: see `How`.
    """
    settings = How(**how)
    reporter = (reporter or Reporter()) if settings.world.is_first else _Mute()
    jobs = [_completed(job) for job in jobs]
    for place, job in enumerate(jobs):
        if any(job.folder.resolve() == other.folder.resolve() for other in jobs[:place]):
            raise InputError(f"{job.folder}: two runs can't have one folder")
        _refuse_occupied(job, resume)
    device, loaded = settings.place(), Loaded(settings.root)
    left = [job for job in jobs if not _is_finished(job, reporter)]
    _check_all(left, loaded, device, settings)
    done = _train_sources(left, reporter, settings)
    left = [job for job in left if job.folder.resolve() not in done]
    found: dict[int, TrainingError] = {}
    for wave in settings.waves(left, device):
        sessions = []
        for job in wave:
            data = loaded(job.recipe, job.folder / "vocabulary.json")
            voice = reporter if len(wave) == 1 else reporter.beside(job.folder.name)
            taught = build_teachers(job, data, device)
            peers = build_peers(job, data, device)
            sessions.append(_Session(job, peers, data, resume, voice, settings, len(wave), taught))
        found |= {jobs.index(wave[place]): error for place, error in _train_wave(sessions, settings.world).items()}
        del sessions, taught, peers
        gc.collect()  # graphs, moments and memory pools of this wave, before the next one takes its own
    if errors is not None:
        errors.update(found)
    for error in found.values() if errors is None else ():
        raise error
    return [Run(job.folder) for job in jobs]


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
            _refuse_occupied(job, resume)
        check(job, known(job.recipe, job.folder / "vocabulary.json"), device, settings.root, settings.world)


def _completed(job: Job) -> Job:
    return replace(job, recipe=fitted_to_teachers(_with_full_path(job.recipe)))


def _check_all(jobs: Sequence[Job], loaded: Loaded, device: torch.device, how: How) -> None:
    """Refuse what is wrong with any job before the first is trained, or a source of it, which may take days."""
    at_once = len(how.waves(jobs, device)) <= 1 and not any(map(untrained_sources, jobs))
    for job in {job.recipe.digest: job for job in jobs}.values():  # seeds are alike
        data = loaded(job.recipe, job.folder / "vocabulary.json")
        if at_once:  # the learners look for themselves before anything is written
            check_outside(job.recipe, data, how.root)
        else:
            check(job, data, device, how.root, how.world)


class Loaded:
    """Data sets of recipes, each loaded once, so that packed runs share one copy on the device."""

    def __init__(self, root: str | Path | None) -> None:
        self.root = root
        self._found: dict[str, Dataset] = {}

    def __call__(self, recipe: Recipe, vocabulary: Path | None = None) -> Dataset:
        """Return a recipe's data; with the vocabulary of a run that goes on, where there is that file."""
        known = Vocabulary.load(vocabulary) if vocabulary is not None and vocabulary.is_file() else None
        key = recipe.data.model_dump_json(include=DATA_KEYS) + (known.digest if known is not None else "")
        if key not in self._found:
            self._found[key] = load_data(recipe, self.root, known)
        return self._found[key]


def _is_finished(job: Job, reporter: Reporter) -> bool:
    path = job.folder / "run.json"
    finished = path.is_file() and bool(read_json(path).get("finished"))
    if finished:
        reporter.headline(f"{job.folder}: already finished")
    return finished


def _with_full_path(recipe: Recipe) -> Recipe:
    # A run must find its data again from another folder.
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
        if wanted is not None and _with_full_path(wanted.recipe) != job.recipe:
            raise InputError(
                f"{job.folder}: other runs start from it with the settings of '{wanted.recipe.name}', but other "
                "settings are asked for; train it into a folder of its own"
            )
    for source in sources.values():
        reporter.headline(f"{source.recipe.name}: training it first, into {source.folder}")
    if sources:
        train_jobs(list(sources.values()), resume=True, reporter=reporter, **how.__dict__)
    return set(sources)


# ---- one run folder -------------------------------------------------------------------------------------------------


class _Mute(Reporter):
    """Of a process that is not the first, which says the same."""

    def warn(self, text: str) -> None:
        """Say nothing."""


class _Session:
    """A run folder in training; with many processes the first one writes."""

    def __init__(
        self,
        job: Job,
        peers: dict[str, Posterior],
        loaded: Dataset,
        resume: bool,
        reporter: Reporter,
        how: How,
        packed: int = 1,
        teachers: Teachers | None = None,
    ) -> None:
        self.job, self.peers, self.loaded, self.packed = job, peers, loaded, packed
        self.world, self.folder = how.world, job.folder
        self.reporter = reporter
        self.device = next(iter(peers.values())).device
        options = how.learner_options(self.device)
        self.precision = "float32" if options["autocast"] is None else "bfloat16"
        self.log = _MetricsLog(self.folder / "metrics.jsonl")
        self.learner = Learner(
            job.recipe,
            peers,
            loaded,
            job.seed,
            reporter=self.reporter,
            save=self._save,
            log=self.log.write if self.world.is_first else None,
            teachers=teachers,
            **options,
        )
        self.found = _stamp(self.folder) if resume else None
        newest = checkpoints.read_newest(self.folder) if resume and self.folder.is_dir() else None
        if newest is not None:
            tensors, about, complaints = newest
            for complaint in complaints:
                self.reporter.warn(f"{complaint}; going on from the checkpoint before it")
            self.learner.restore(tensors, about)
            before = read_json(self.folder / "run.json").get("precision", self.precision)
            if before != self.precision:
                self.reporter.warn(f"{self.folder}: was trained in {before} so far, and goes on in {self.precision}")

    def _save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        if self.world.is_first:
            checkpoints.write(self.folder, about["position"]["step"], tensors, about)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder, and say what it will be."""
        if not self.world.is_first:
            yield
            return
        job, step = self.job, self.learner.position.step
        self.folder.mkdir(parents=True, exist_ok=True)
        with _lock(self.folder):
            if _stamp(self.folder) != self.found:  # it has trained since we looked, perhaps to the end
                raise InputError(f"{self.folder}: {OTHERS}")
            for stale in self.folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                if _is_of_a_run(stale.name):
                    stale.unlink()
            self.about = {
                "seed": job.seed,
                "finished": False,
                "inputs": network_inputs(self.loaded).describe(),
                **environment(self.device),
                "engine": self.learner.engine.name,
                "precision": self.precision,
                "packed": self.packed,
                "processes": self.world.size,
            }
            self._describe()
            if self.loaded.vocabulary is not None:
                write_text(self.folder / "vocabulary.json", self.loaded.vocabulary.to_json())
            accounts = {name: p.account for name, p in self.peers.items() if isinstance(p, Shared) and p.account}
            if accounts:
                write_text(self.folder / "sharing.json", json.dumps(accounts, indent=1))
            # The recipe comes last: a folder that has one has the rest.
            write_text(self.folder / "recipe.toml", job.recipe.to_toml())
            self.log.keep_until(step)
            self.reporter.headline(_headline(job, self.loaded, f"{self.device.type}, {self.learner.engine.name}", step))
            yield

    def finish(self) -> None:
        """Write the trained posteriors."""
        if not self.world.is_first:
            return
        self.learner.take_best()
        for name, posterior in self.peers.items():
            # Nobody goes on from here; checkpoints hold what training needs.
            posterior.save(self.folder / f"weights-{name}.safetensors", anchors=False)
        self.about |= {"finished": True, "seconds": round(self.learner.position.seconds, 3)}
        self.about["engine"] = self.learner.engine.name
        self._describe()

    def _describe(self) -> None:
        write_text(self.folder / "run.json", json.dumps(self.about, indent=1))


def _train_wave(sessions: Sequence[_Session], world: World) -> dict[int, TrainingError]:
    for session in sessions:  # nobody writes before everybody has looked
        if not world.same(session.learner.position.step):
            raise InputError(f"{session.folder}: not all processes find the same checkpoint there; share the folder")
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.opened())
        errors = run_together([session.learner for session in sessions], lambda place: sessions[place].finish())
        world.barrier()  # what was written is there for all
    return errors


def _headline(job: Job, loaded: Dataset, where: str, step: int) -> str:
    recipe = job.recipe
    nets = ", ".join(dict.fromkeys(peer.network for peer in recipe.peers))
    count = len(recipe.peers)
    peers = f"{count} peer{'s' if count > 1 else ''}"
    text = f"{recipe.title} · {loaded.name} · {peers} · {nets} · {where} · seed {job.seed}"
    return f"{text} · going on at step {step}" if step else text


def _refuse_occupied(job: Job, resume: bool) -> None:
    folder = job.folder
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder for the run")
    if not (folder / "recipe.toml").is_file():
        strange = [path.name for path in folder.iterdir() if not _is_of_a_run(path.name)] if folder.is_dir() else []
        if strange or (folder.is_dir() and any(folder.iterdir()) and not resume):
            raise InputError(f"{folder}: the folder is not empty and holds no run; choose another one")
        return
    if not resume:
        raise InputError(f"{folder}: already holds a run; add --resume to go on with it, or choose another folder")
    before = Run(folder)
    if before.seed != job.seed:
        raise InputError(f"{folder}: holds a run of seed {before.seed}, not {job.seed}")
    if before.recipe != job.recipe:
        raise InputError(f"{folder}: holds a run of another recipe ('{before.recipe.title}'), or with other settings")


OTHERS = "another process is training this run"
FILES = [
    "run.json",
    "metrics.jsonl",
    "vocabulary.json",
    "sharing.json",
    "recipe.toml",
    "checkpoint-",
    "weights-",
    "network-",
    "lock",
]


def _is_of_a_run(name: str) -> bool:
    return name.lstrip(".").startswith(tuple(FILES))


class _MetricsLog:
    """metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> None:
        """Drop the lines of steps that a resumed run will do again."""
        kept = []
        for line in self.path.read_bytes().splitlines() if self.path.is_file() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a kill cut short, or is damaged
                if json.loads(line)["step"] <= step:
                    kept.append(line.decode())
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Return what changes whenever a process begins or ends a run."""
    path = folder / "run.json"
    return (path.stat().st_mtime_ns, path.stat().st_ino) if path.is_file() else None


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    if os.name != "posix":  # two processes on one run folder are then not noticed
        yield
        return
    import fcntl

    path = folder / ".lock"
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(open(path, "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{folder}: {OTHERS}") from None
            # Whoever had it may have removed the file since it was opened: then nobody else would see this lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
