"""Run folders in training: what is read and written, on which device, by which engine, how many side by side."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from peerbayes.choices import Engine, Placement, Precision
from peerbayes.data.dataset import Dataset
from peerbayes.engine.engines import MAX_STREAMS, MAX_TEACHER_STREAMS, pick
from peerbayes.engine.processes import ALONE, World, environment, pick_device, threads
from peerbayes.engine.teachers import Teachers
from peerbayes.errors import InputError, TrainingError, nearest
from peerbayes.math.noise import format_of
from peerbayes.networks.normalisation import choice_in_words
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.flat_network import Provenance
from peerbayes.recipes.recipe import Recipe, is_recipe
from peerbayes.recipes.recipe_data import network_inputs
from peerbayes.runs.checkpoints import newest_checkpoint, write_checkpoint
from peerbayes.runs.folder import (
    LOCKED,
    MetricsLog,
    is_of_a_run,
    lock,
    origins_of,
    refuse_other_origins,
)
from peerbayes.runs.loggers import loggers_named
from peerbayes.runs.run import TAUGHT_BY, Run, peer_called, remember, stamp, write_text
from peerbayes.runs.temperatures import fit_temperatures, keep_temperature
from peerbayes.training.learner import Learner
from peerbayes.training.loop import run_together
from peerbayes.training.reporters import Reporter, usual_reporter

if TYPE_CHECKING:
    from peerbayes.runs.plan import Job, Node


@dataclass(frozen=True)
class RunOptions:
    """How jobs are run; nothing here changes what is learnt, but for rounding.

    Attributes:
        device: where to train; ``auto`` takes a GPU where there is one.
        root: data root.
        engine: ``eager``, ``compiled``, ``captured``, or ``auto``: captured on a GPU, else eager.
        precision: what networks compute in; ``auto`` is bfloat16 where the engine is captured, else float32.
        placement: where the training images lie; see `peerbayes.data.feed`.
        checkpoint_every: steps between checkpoints; by default at the end of an epoch, at most every 30 s.
        pack: most jobs trained side by side; by default all that a GPU has streams for, 32 // (peers + 1), and one on a
            CPU or with many processes. Where memory is too small for them, half as many.
        world: the processes that share each batch.
        synchronise: take batch-norm's and kernels' statistics over all processes.
        log: loggers that get metrics by epoch, too: any of ``tensorboard``, ``mlflow``, ``wandb`` and ``trackio``.
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
    log: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, choice in {"engine": Engine, "precision": Precision, "placement": Placement}.items():
            if getattr(self, name) not in (choices := get_args(choice)):
                raise InputError(f"{name} is {getattr(self, name)!r}, expected {', '.join(choices)}")
        for name in ("checkpoint_every", "pack"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < 1):
                raise InputError(f"{name} is {number!r}, expected a whole number above 0")
        if self.log:
            loggers_named(self.log)

    def pick_device(self) -> torch.device:
        """Return the device to train on."""
        return pick_device(self.device) if self.world.size == 1 else self.world.device(self.device)

    @contextlib.contextmanager
    def reporting(self, reporter: Reporter | None) -> Iterator[Reporter]:
        """Yield this process's reporter, a silent one on ranks above 0, which also tells the loggers.

        Loggers are closed at the end of the block, unless the given reporter has them already.
        """
        if not self.world.is_first:
            yield _Mute()
            return
        from peerbayes.runs.tracking import Trackers

        names, reporter = loggers_named(self.log) if self.log else (), reporter or usual_reporter()
        if not names or isinstance(reporter, Trackers):
            yield reporter
            return
        with Trackers(names, reporter) as trackers:
            yield trackers

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

    def packs(self, nodes: Sequence[Node], device: torch.device) -> list[Sequence[Node]]:
        """Return runs in groups that are trained side by side.

        Args:
            nodes: runs that wait for none of each other.
            device: that they are trained on.
        """
        captured = pick(self.engine, device) == "captured"
        taught = MAX_TEACHER_STREAMS if any(node.teachers for node in nodes) else 0
        streams = max((len(node.recipe.peers) for node in nodes), default=1) + 1 + taught
        most = max(1, MAX_STREAMS // streams) if captured else len(nodes) or 1
        pack = min(most, self.pack or (most if captured else 1))
        if self.world.size > 1:
            pack = 1  # gradients of several runs would meet in one buffer
        return in_parts(nodes, pack)


def in_parts(nodes: Sequence[Node], most: int) -> list[Sequence[Node]]:
    """Return runs in equal groups of at most so many: a few runs left over would use a GPU badly.

    Args:
        nodes: runs, in order.
        most: runs in a group.
    """
    size = max(1, math.ceil(len(nodes) / max(1, math.ceil(len(nodes) / most))))
    return [nodes[i : i + size] for i in range(0, len(nodes), size)]


def refuse_unknown(options: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Refuse keyword arguments that neither `RunOptions` nor the functions know; the first of them was called.

    Args:
        options: names of the keyword arguments.
        functions: the one that was called, and those that take what it passes on.
    """
    arguments = (name for function in functions for name in inspect.signature(function).parameters if name != "how")
    accepted = {*arguments, *(field.name for field in fields(RunOptions))}
    for option in options:
        if option not in accepted:
            raise InputError(f"{functions[0].__name__} has no option '{option}'{nearest(option, accepted)}")


class _Mute(Reporter):
    """Of a process that is not the first."""

    def warn(self, text: str) -> None:
        """Say nothing."""


class Session:
    """A run folder in training; with many processes the first one writes."""

    def __init__(
        self,
        job: Job,
        peers: dict[str, Posterior],
        loaded: Dataset,
        resume: bool,
        reporter: Reporter,
        options: RunOptions,
        packed: int = 1,
        teachers: Teachers | None = None,
        lineage_depth: int = 0,
    ) -> None:
        self.job, self.peers, self.loaded, self.packed = job, peers, loaded, packed
        self.world, self.folder = options.world, job.folder
        self.lineage_depth = lineage_depth
        self.origins = origins_of(peers, [] if teachers is None else teachers.posteriors)
        self.reporter = reporter
        self.device = next(iter(peers.values())).device
        learner_options = options.learner_options(self.device)
        self.precision = "float32" if learner_options["autocast"] is None else "bfloat16"
        self.log = MetricsLog(self.folder / "metrics.jsonl")
        self.learner = Learner(
            job.recipe,
            peers,
            loaded,
            job.seed,
            reporter=self.reporter,
            save=self._save,
            log=self.log.write if self.world.is_first else None,
            teachers=teachers,
            lineage_depth=lineage_depth,
            **learner_options,
        )
        self.found = stamp(self.folder) if resume else None
        self.threads = [torch.get_num_threads()]
        before = Run(self.folder) if resume and (self.folder / "recipe.toml").is_file() else None
        newest = None if before is None else newest_checkpoint(self.folder)
        if before is not None:
            begun = [name for name, posterior in peers.items() if posterior.provenance.state == "training"]
            if newest is None and begun:
                raise InputError(
                    f"cannot resume: the run was interrupted before its first checkpoint, and peer '{begun[0]}' has "
                    "been trained since; rebuild it with its initial weights"
                )
        if before is not None and newest is not None:
            tensors, about, complaints = newest
            for complaint in complaints:
                self.reporter.warn(f"{complaint}; going on from the checkpoint before it")
            before.refuse_strange(loaded)
            before.refuse_other_data(loaded)
            self._compare_origins(before.origins)
            self.learner.restore(tensors, about)
            so_far = before.about.get("precision", self.precision)
            if so_far != self.precision:
                self.reporter.warn(f"{self.folder}: was trained in {so_far} so far, and goes on in {self.precision}")
            self._compare_threads(before.about.get("threads", self.threads))

    def _compare_threads(self, before: Sequence[int]) -> None:
        """Tell of another number of threads, which rounds otherwise on a CPU; run.json lists all of them in order."""
        if self.device.type == "cpu" and before[-1] != self.threads[-1]:
            self.reporter.warn(
                f"{self.folder}: was trained with {threads(before[-1])} so far, and goes on with {self.threads[-1]}, "
                f"which rounds otherwise; OMP_NUM_THREADS={before[-1]} goes on exactly"
            )
            self.threads = [*before, *self.threads]
        else:
            self.threads = list(before)

    def _compare_origins(self, before: Mapping[str, str]) -> None:
        """Refuse other origins than those it began with; tell of those that a recipe has made again, and go on."""
        made_again = _made_by_recipes(self.job.recipe)
        refuse_other_origins(
            self.folder, {who: digest for who, digest in self.origins.items() if who not in made_again}
        )
        for who, recipe in made_again.items():
            if before.get(who, self.origins.get(who)) != self.origins.get(who):
                later = "its peers learn from others from now on"
                then = later if who == TAUGHT_BY else f"{who} began with what it was then"
                self.reporter.warn(f"{self.folder}: {recipe} has been trained again since, and {then}")
        self.origins |= before

    def _save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        if self.world.is_first:
            write_checkpoint(self.folder, about["position"]["step"], tensors, about)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder, and say what it will be."""
        if not self.world.is_first:
            yield
            return
        job, step = self.job, self.learner.position.step
        for posterior in self.peers.values():
            depth = posterior.provenance.depth
            posterior.provenance = Provenance(posterior.provenance.parent, depth, state="training")
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder):
            if stamp(self.folder) != self.found:  # it has trained since we looked, perhaps to the end
                raise InputError(f"{self.folder}: {LOCKED}")
            for stale in self.folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                if is_of_a_run(stale.name):
                    stale.unlink()
            self.about = {
                "seed": job.seed,
                "noise": format_of(job.seed),
                "generation": self.lineage_depth,
                "origins": self.origins,
                "finished": False,
                "inputs": network_inputs(self.loaded).describe(),
                "normalize": choice_in_words(job.given.normalize),
                **_described(self.loaded),
                **remember(self.folder, self.loaded),
                **environment(self.device),
                "engine": self.learner.engine.name,
                "precision": self.precision,
                "threads": self.threads,
                "packed": self.packed,
                "processes": self.world.size,
            }
            self._describe()
            if self.loaded.vocabulary is not None:
                write_text(self.folder / "vocabulary.json", self.loaded.vocabulary.to_json())
            accounts = {name: posterior.account for name, posterior in self.peers.items() if posterior.account}
            if accounts and step == 0:
                write_text(self.folder / "sharing.json", json.dumps(accounts, indent=1))
            # The recipe comes last: a folder that has one has the rest.
            write_text(self.folder / "recipe.toml", job.recipe.to_toml())
            self.log.keep_until(step)
            self.reporter.begin(self.folder, job.recipe, self.about)
            self.reporter.headline(_headline(job, self.loaded, f"{self.device.type}, {self.learner.engine.name}", step))
            for note in self.loaded.notes:
                self.reporter.note(note)
            yield

    def finish(self) -> None:
        """Write the trained posteriors."""
        if not self.world.is_first:
            return
        self.learner.evaluator.take_best()
        for name, posterior in self.peers.items():
            posterior.conclude(self.loaded.train, self.job.recipe.data.augment)
            posterior.provenance = Provenance(depth=self.lineage_depth, state="trained")
            posterior.temperature, posterior.certificate = 1.0, None  # those it began with are of other weights
            # Without anchors, which training alone needs: a run resumes from checkpoints.
            posterior.save(self.folder / f"weights-{name}.safetensors", anchors=False)
        self.about |= {"finished": True, "seconds": round(self.learner.position.seconds, 3)}
        self.about["engine"] = self.learner.engine.name
        self._calibrate()
        self._describe()

    def _calibrate(self) -> None:
        """Fit temperatures to what the files hold now, which may be rounded, if a validation split is there."""
        held = self.loaded.validation
        if held is None:
            return
        try:
            each, together = fit_temperatures(self.peers, held, self.job.recipe.evaluation.draws, self.job.seed)
        except InputError as error:
            self.reporter.warn(f"{self.folder}: no temperatures are fitted: {error}")
            return
        for name, posterior in self.peers.items():
            keep_temperature(posterior, each[name], self.folder / f"weights-{name}.safetensors")
        self.about["temperature"] = together

    def _describe(self) -> None:
        write_text(self.folder / "run.json", json.dumps(self.about, indent=1))


def train_pack(sessions: Sequence[Session], world: World) -> dict[int, TrainingError]:
    """Train sessions side by side; return the errors of those that could not go on, by place.

    Args:
        sessions: built, of one engine and device.
        world: all processes.
    """
    for session in sessions:  # nobody writes before everybody has looked
        if not world.same(session.learner.position.step):
            raise InputError(f"{session.folder}: not all processes find the same checkpoint there; share the folder")
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.opened())
        errors = run_together([session.learner for session in sessions], lambda index: sessions[index].finish())
        world.barrier()  # what was written is there for all
    return errors


def _made_by_recipes(recipe: Recipe) -> dict[str, str]:
    """Return whose parents are runs that recipes make, again where they are gone, as `origins_of` calls them."""
    recipes = {peer_called(p.name): p.start_from for p in recipe.peers if p.start_from and is_recipe(p.start_from)}
    taught = [run for run in (recipe.teachers.runs if recipe.teachers is not None else ()) if is_recipe(run)]
    return recipes | ({TAUGHT_BY: taught[0]} if taught else {})


def _described(loaded: Dataset) -> dict[str, Any]:
    """Return what predictions of new files must know, beside the inputs' shape."""
    description: dict[str, Any] = {} if loaded.class_names is None else {"class_names": list(loaded.class_names)}
    margin = getattr(loaded.train, "margin", 1.0)
    return description if margin == 1.0 else description | {"margin": margin}


def _headline(job: Job, loaded: Dataset, where: str, step: int) -> str:
    recipe = job.recipe
    nets = ", ".join(dict.fromkeys(peer.network for peer in recipe.peers))
    count = len(recipe.peers)
    peers = f"{count} peer{'s' if count > 1 else ''}"
    text = f"{recipe.title} · {loaded.name} · {peers} · {nets} · {where} · seed {job.seed}"
    return f"{text} · going on at step {step}" if step else text
