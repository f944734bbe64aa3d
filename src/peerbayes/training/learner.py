"""How a cohort of any size learns: stage by stage, step by step. `peerbayes.training.loop` takes the steps.

Everything random is a function of (seed, owner, step), so the state of a run is its weights, the optimisers' moments
and the step number. A resumed run continues exactly.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from peerbayes.choices import Engine, Placement
from peerbayes.data.dataset import Dataset
from peerbayes.data.loader import feed
from peerbayes.engine.cohort import Cohort
from peerbayes.engine.diagnostics import Position, changes, is_still, note_shares, sampled, sentence
from peerbayes.engine.engines import ENGINES, Eager, cause, pick
from peerbayes.engine.optimizers import learning_rate
from peerbayes.engine.processes import ALONE, World
from peerbayes.engine.stages import StageState, of_term
from peerbayes.engine.synchronised import synchronise_batch_norm
from peerbayes.engine.teachers import Teachers
from peerbayes.errors import InputError, TrainingError, reason
from peerbayes.math.noise import Address
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.recipe import Recipe
from peerbayes.training.loop import run_together
from peerbayes.training.probe import Probe
from peerbayes.training.reporters import Reporter
from peerbayes.training.validation import EpochEvaluator

CHECK_EVERY = 500  # steps between two checks for values that are not finite, where a check makes the GPU wait
CHECKPOINT_SECONDS = 30


class Learner:
    """Trains a cohort by a recipe.

    Args:
        recipe: stages, terms, batch size; its ``peers`` are not looked at.
        peers: posteriors by name, on one device; they are changed in place.
        data: the data set.
        seed: the run's seed.
        reporter: is told what happens.
        save: called with (tensors, description) at checkpoints; None for no checkpoints.
        log: called with each epoch's line.
        checkpoint_every: steps between checkpoints; by default at the end of an epoch, at most every 30 s.
        engine: ``eager``, ``compiled``, ``captured``, or ``auto``: captured on a GPU, else eager.
        autocast: the type that networks compute in; None for float32. Terms and weights stay in float32.
        placement: where the training images lie; see `peerbayes.data.feed`.
        world: the processes that share each batch.
        synchronise: batch-norm and kernels take their statistics over all processes, not over each one's part.
        teachers: who do not learn, on the peers' device.
        lineage_depth: trainings that lie behind this one, which has an order and an augmentation of its own.
    """

    def __init__(
        self,
        recipe: Recipe,
        peers: Mapping[str, Posterior],
        data: Dataset,
        seed: int,
        *,
        reporter: Reporter | None = None,
        save: Callable[[dict[str, Tensor], dict[str, Any]], None] | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
        checkpoint_every: int | None = None,
        engine: Engine = "auto",
        autocast: torch.dtype | None = None,
        placement: Placement = "auto",
        world: World = ALONE,
        synchronise: bool = False,
        teachers: Teachers | None = None,
        lineage_depth: int = 0,
    ) -> None:
        if data.classes < 2:
            raise InputError(f"{data.name}: {_one_class(data)}, expected two or more")
        self.recipe = recipe
        self.peers = dict(peers)
        self.data = data
        self.seed = seed
        self.world = world
        self.evaluator = EpochEvaluator(recipe, self.peers, data, seed, world)
        self.reporter = reporter or Reporter()
        self.device = next(iter(self.peers.values())).device
        self.position = Position()
        self._save = save
        self._log = log
        self._checkpoint_every = checkpoint_every
        self._saved_at = time.monotonic()
        self._last_checkpoint_step: int | None = None
        self._before: dict[str, Tensor] = {}  # what was `sampled` when the epoch began
        self.feed = feed(
            data.train,
            recipe.data.batch_size,
            seed,
            self.device,
            placement=placement,
            part=(world.rank, world.size),
            # Another data order than the parent run's, which has already fitted the crops of this seed.
            owner=f"data {lineage_depth}" if lineage_depth else "data",
            augment=recipe.data.augment,
        )
        self.steps_per_epoch = self.feed.steps_per_epoch
        self.cohort = Cohort(
            recipe,
            self.peers,
            self.feed,
            seed,
            len(data.train),
            autocast,
            world,
            synchronise,
            check=self._check if self.device.type == "cpu" else None,
            teachers=teachers,
        )
        self.engine: Eager = ENGINES[pick(engine, self.device)](self.cohort, self.steps_per_epoch)
        self._probe = Probe(self.cohort, data)
        self._keys: list[list[str]] = [[] for _ in recipe.stages]  # names of figures by stage
        for number in range(len(recipe.stages)):
            self._begin_stage(number)
            self._keys[number] = self._probe.figures()
        if synchronise:
            for posterior in self.peers.values():
                synchronise_batch_norm(posterior.network, world)
        if recipe.stages:
            self._begin_stage(0)
        else:
            self._probe.networks()

    # ---- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end of the last stage, from the position; torch's generators are left as they were."""
        errors = run_together([self])
        if errors:
            raise errors[0]

    def steps(self) -> Iterator[None]:
        """Train step by step, each within ``engine.running()``."""
        if not self.position.step:
            for text in filter(None, map(self._probe.swamped, self.peers)):
                self.reporter.warn(text)
        try:
            for number in range(self.position.stage, len(self.recipe.stages)):
                if number != self.position.stage:
                    self.position.begin_stage(number)
                    self.evaluator.best = {}
                    self._begin_stage(number)
                yield from self._stage_steps(number)
        finally:
            self.reporter.close()
            self.feed.close()

    def _stage_steps(self, number: int) -> Iterator[None]:
        stage = self.recipe.stages[number]
        position, total = self.position, stage.epochs * self.steps_per_epoch
        self.reporter.stage(
            number + 1, len(self.recipe.stages), stage.epochs, position.stage_step // self.steps_per_epoch
        )
        for term, _ in self.state.terms if len(self.peers) == 1 else ():
            if term.between_peers:
                alone = next(iter(self.peers))
                self.reporter.warn(f"{term.name} is between peers, but '{alone}' is alone: it does nothing")
        started = time.monotonic() - position.seconds
        if position.stage_step < total:
            self._begin_engine()
            yield  # it may have given way to another one, which runs on another stream
        if position.stage_step % self.steps_per_epoch == 0:
            self._before = sampled(self.state, self.peers)
        while position.stage_step < total:
            self.step()
            position.seconds = time.monotonic() - started
            ended = position.stage_step % self.steps_per_epoch == 0
            if ended:
                self._end_epoch()
            if self._checkpoint_due(ended, position.stage_step == total):
                self.checkpoint()
            yield

    def step(self) -> None:
        """Train for one batch."""
        position = self.position
        self.state.set_learning_rate(
            learning_rate(self.recipe.stages[position.stage], position.stage_step, self.steps_per_epoch)
        )
        self.feed.prepare(position.step)
        if self.measures_now:
            self._measure()
        self.engine.step(position.step, position.stage_step)
        position.step += 1
        position.stage_step += 1
        if self.device.type != "cpu" and position.step % CHECK_EVERY == 0:
            self._check(self.cohort.keys, self.cohort.sums)

    def _begin_stage(self, number: int) -> None:
        stage = self.recipe.stages[number]
        address, where = Address(self.seed, "helpers", "initial", number), f"stages.{number}"
        for term, options in stage.terms.items():
            with of_term(where, term):
                self._probe.find_layers(options.get("layers", []))
        shapes = {name: self._probe.shapes(name, stage.layers) for name in self.peers}
        state = StageState(stage, self.peers, shapes, address, where, len(self.data.train))
        self.cohort.begin_stage(state, stage.layers, self._keys[number])

    def _begin_engine(self) -> None:
        step, stage_step = self.position.step, self.position.stage_step
        self.feed.prepare(step)
        why = ""  # the error itself would hold the engine, with its graphs and their memory, by its traceback
        try:
            self.engine.begin_stage(step, stage_step)
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            why = reason(cause(error))
        if not self.world.any(bool(why)):
            return
        # What fails in one process is left by all: their steps have to be the same.
        why = why or "it failed in another process"
        self.reporter.warn(f"the {self.engine.name} engine can't run this cohort, going on eagerly: {why}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.cohort.go_eager()
        self.engine = Eager(self.cohort, self.steps_per_epoch)

    @property
    def state(self) -> StageState:
        """Helpers and optimisers of the stage."""
        return self.cohort.state

    # ---- what the terms say of themselves -----------------------------------------------------------------------

    @property
    def measures_now(self) -> bool:
        """Whether the terms' shares of the gradient are due at this step."""
        wanted = self.recipe.gradient_share_every
        every = max(100, self.steps_per_epoch) if wanted == "epoch" else wanted
        return every > 0 and self.position.step % every == 0

    def _measure(self) -> None:
        position = self.position
        options = self.recipe.stages[position.stage].terms
        norms = self.engine.term_norms(position.step, position.stage_step).tolist()
        for peer, measured in zip(self.peers, norms, strict=True):
            for warning in note_shares(peer, dict(zip(options, measured, strict=True)), options, position):
                self.reporter.warn(warning)

    def _check(self, keys: Sequence[str], figures: Tensor) -> None:
        # A term that was not finite once makes its sum so ever since: on a GPU a look at every step would stall it.
        if bool(figures.isfinite().all()):
            return
        for key, value in zip(keys, figures.tolist(), strict=True):
            peer, kind, term = key.split("|", 2)
            if kind == "terms" and not math.isfinite(value):
                where = f"step {self.position.step} (epoch {self.position.step // self.steps_per_epoch + 1})"
                raise TrainingError(
                    f"term '{term}' of peer '{peer}' became {value} at {where}{self._kept_hint}: "
                    "lower the learning rate or the term's weight"
                )

    # ---- the end of an epoch ------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        self._pull_sums()
        position, epoch = self.position, self.position.step // self.steps_per_epoch
        peers = position.end_epoch(self.steps_per_epoch)
        moved = self._note_movement()
        for name, figures in peers.items():
            if name in moved:
                figures["change"] = moved[name]
            figures |= self.peers[name].end_epoch(
                self.state.moments(name), functools.partial(self.state.mean_gradient, name)
            )
            figures |= self.evaluator.judge(name, position.step, epoch, self._kept_hint)
            self.evaluator.keep(name, figures, position)
            if (perturb := self.cohort.perturb) is not None:
                effect = self.evaluator.perturbed(name, perturb, position.step, epoch, self.cohort.autocast)
                figures["notes"] |= {f"perturb.{key}": value for key, value in effect.items()}
        self._before = sampled(self.state, self.peers)
        line = {
            "stage": position.stage + 1,
            "epoch": position.stage_step // self.steps_per_epoch,
            "step": position.step,
            "seconds": round(position.seconds, 3),
            "lr": self.state.lr,
            "peers": peers,
        }
        if self._log is not None:
            self._log(line)
        self.reporter.epoch(line)

    def _note_movement(self) -> dict[str, dict[str, float]]:
        """Return how far the epoch has moved each peer's groups of parameters; tell of those that it has not moved.

        That is evaluated where the learning rate is at its full height: in the first epoch after a warm-up.
        """
        position = self.position
        moved = changes(self._before, sampled(self.state, self.peers), self.peers)
        epoch = position.stage_step // self.steps_per_epoch
        if epoch == math.floor(self.recipe.stages[position.stage].warmup) + 1:
            for peer, groups in moved.items():
                for group, change in groups.items():
                    if is_still(group, change, self.steps_per_epoch) and f"{peer}/{group}" not in position.still:
                        position.still.append(f"{peer}/{group}")
                        self.reporter.warn(sentence(peer, group, change, epoch))
        return moved

    def _pull_sums(self) -> None:
        """Average buffers over the processes, and move the epoch's sums from the device into the position."""
        for posterior in self.peers.values():
            self.world.mean_buffers(posterior.network)
        sums = self.cohort.sums.cpu()
        self._check(self.cohort.keys, sums)
        self.position.add(self.cohort.keys, sums.tolist())
        self.cohort.sums.zero_()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _checkpoint_due(self, epoch_ended: bool, stage_ended: bool) -> bool:
        if self._save is None:
            return False
        if self._checkpoint_every is not None:
            return stage_ended or self.position.step % self._checkpoint_every == 0
        return stage_ended or (epoch_ended and self.world.any(time.monotonic() - self._saved_at > CHECKPOINT_SECONDS))

    def checkpoint(self) -> None:
        """Hand everything that a resumed run needs to ``save``."""
        self._pull_sums()
        tensors = {f"peer/{name}/{n}": t for name, p in self.peers.items() for n, t in p.state().items()}
        tensors |= self.state.state()
        if self.position.stage_step % self.steps_per_epoch:
            tensors |= {f"before/{name}": tensor for name, tensor in self._before.items()}
        tensors |= {
            f"best/{peer}/{name}": t for peer, state in self.evaluator.best.items() for name, t in state.items()
        }
        for name, tensor in tensors.items():
            # Networks may hold infinities on purpose (attention masks); what is learnt may not.
            bad = tensor.isnan() if "/network/" in name else ~tensor.isfinite()
            if bool(bad.any()):
                raise TrainingError(f"'{name}' is not finite at step {self.position.step}{self._kept_hint}")
        if self._save is not None:
            self._save(tensors, {"position": self.position.__dict__.copy(), "seed": self.seed})
            self._last_checkpoint_step = self.position.step
        self._saved_at = time.monotonic()

    def save_if_needed(self) -> bool:
        """Write a checkpoint of this step, unless there is one; return whether the run can be resumed from here."""
        if self._last_checkpoint_step != self.position.step and self._save is not None:
            with contextlib.suppress(TrainingError):  # it goes on from the last good one
                self.checkpoint()
        return self._last_checkpoint_step == self.position.step

    @property
    def _kept_hint(self) -> str:
        return "; the last good checkpoint is kept" if self._last_checkpoint_step is not None else ""

    def restore(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Go to where a checkpoint was written.

        Args:
            tensors: of the checkpoint, by name.
            about: its description.
        """
        if about.get("seed") != self.seed:
            raise InputError(f"checkpoint: its seed is {about.get('seed')}, not {self.seed}")
        for name, posterior in self.peers.items():
            prefix = f"peer/{name}/"
            state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            posterior.load_state(state, f"checkpoint, peer '{name}'")
        try:
            # As JSON: strictly, a dict of Python is no dataclass.
            self.position = TypeAdapter(Position).validate_json(json.dumps(about["position"]), strict=True)
        except (KeyError, ValidationError) as error:
            raise InputError(f"checkpoint: has no valid 'position' ({reason(error)})") from None
        if not self._reaches(self.position):
            raise InputError(f"checkpoint: step {self.position.step} lies outside this recipe's schedule")
        self._last_checkpoint_step = self.position.step
        self._begin_stage(self.position.stage)
        self.state.load_state(tensors)
        before = {n.removeprefix("before/"): t for n, t in tensors.items() if n.startswith("before/")}
        self._before = {name: tensor.to(self.device, copy=True) for name, tensor in before.items()}
        for name, tensor in tensors.items():
            if name.startswith("best/"):
                _, peer, place = name.split("/", 2)
                self.evaluator.best.setdefault(peer, {})[place] = tensor.to(self.device, copy=True)

    def _reaches(self, position: Position) -> bool:
        stages = self.recipe.stages
        if not 0 <= position.stage < len(stages):
            return False
        before = sum(stage.epochs for stage in stages[: position.stage]) * self.steps_per_epoch
        steps = stages[position.stage].epochs * self.steps_per_epoch
        return 0 <= position.stage_step <= steps and position.step == before + position.stage_step


def _one_class(data: Dataset) -> str:
    names = data.class_names or ()
    return f"has one class, '{names[0]}'" if len(names) == 1 else f"has {data.classes} class"
