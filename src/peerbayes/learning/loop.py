"""The one training loop: a cohort of any size, stage by stage, step by step; several cohorts side by side.

Everything random is a function of (seed, owner, step), so the state of a run is its weights, the optimisers' moments
and the step number. A resumed run continues exactly.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from peerbayes import evaluation, noise, terms
from peerbayes.data import Dataset, Placement, augment, feed, to_unit
from peerbayes.errors import InputError, TrainingError, reason
from peerbayes.learning.cohort import Cohort, figure_names, kept_buffers, place_peer
from peerbayes.learning.distribution import ALONE, World, synchronise_batch_norm
from peerbayes.learning.engine import ENGINES, Eager, Name, pick
from peerbayes.learning.progress import Reporter
from peerbayes.learning.recipe import Recipe
from peerbayes.learning.settings import Stage
from peerbayes.learning.shares import newly_inert, shares_of
from peerbayes.learning.stages import StageState, learning_rate
from peerbayes.learning.teachers import Teachers, run_plain
from peerbayes.noise import Address
from peerbayes.posteriors import Posterior, Weights, predict_split

DRAWS_A_LOOK = 4  # draws of a prediction at the end of an epoch
OFF = ("weight", "alpha")  # options of terms that switch them off when they are 0
LOOK_EVERY = 500  # steps between two looks for values that are not finite, where a look makes the GPU wait
CHECKPOINT_SECONDS = 30


@dataclass
class Position:
    """Where a run stands, with what an epoch has gathered so far."""

    stage: int = 0
    stage_step: int = 0
    step: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    inert: dict[str, int] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


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
        engine: Name | Literal["auto"] = "auto",
        autocast: torch.dtype | None = None,
        placement: Placement = "auto",
        world: World = ALONE,
        synchronise: bool = False,
        teachers: Teachers | None = None,
    ) -> None:
        if recipe.evaluation.keep == "best" and data.validation is None:
            raise InputError("evaluation.keep = 'best' needs a validation split; set data.validation")
        self.recipe = recipe
        self.peers = dict(peers)
        self.data = data
        self.seed = seed
        self.world = world
        self.reporter = reporter or Reporter()
        self.device = next(iter(self.peers.values())).device
        self.position = Position()
        self._save = save
        self._log = log
        self._checkpoint_every = checkpoint_every
        self._saved_at = time.monotonic()
        self._layers = [self._stage_layers(stage) for stage in recipe.stages]
        self.feed = feed(
            data.train, recipe.data.batch_size, seed, self.device, placement=placement, part=(world.rank, world.size)
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
            **{"look": self._check} if self.device.type == "cpu" else {},
            teachers=teachers,
        )
        self.best: dict[str, dict[str, Tensor]] = {}  # of each peer at its best epoch of this stage
        self.engine: Eager = ENGINES[pick(engine, self.device)](self.cohort, self.steps_per_epoch)
        self._keys = self._probe()
        if synchronise:
            for posterior in self.peers.values():
                synchronise_batch_norm(posterior.network, world)
        self._begin_stage(0)

    # ---- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end of the last stage, from the position; torch's generators are left as they were."""
        for error in run_together([self]).values():
            raise error

    def steps(self) -> Iterator[None]:
        """Train step by step, each within ``engine.running()``."""
        try:
            for number in range(self.position.stage, len(self.recipe.stages)):
                if number != self.position.stage:
                    self.position.stage, self.position.stage_step = number, 0
                    self.position.shares, self.position.inert, self.position.best = {}, {}, {}
                    self.best = {}
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
        started = time.monotonic() - position.seconds
        if position.stage_step < total:
            self._begin_engine()
            yield  # it may have given way to another one, which runs on another stream
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
        if self.device.type != "cpu" and position.step % LOOK_EVERY == 0:
            self._check(self.cohort.keys, self.cohort.sums)

    def _begin_stage(self, number: int) -> None:
        self.cohort.begin_stage(self._new_state(number), self._layers[number], self._keys[number])

    def _new_state(self, number: int) -> StageState:
        address = Address(self.seed, "helpers", "initial", number)
        shapes = {name: self._shapes(name, self._layers[number]) for name in self.peers}
        return StageState(self.recipe.stages[number], self.peers, shapes, address)

    def _begin_engine(self) -> None:
        step, stage_step = self.position.step, self.position.stage_step
        self.feed.prepare(step)
        failed: BaseException | None = None
        try:
            self.engine.begin_stage(step, stage_step)
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            failed = error
        if not self.world.any(failed is not None):
            return
        # What fails in one process is left by all: their steps have to be the same.
        why = "another process could not" if failed is None else reason(_first(failed))
        self.reporter.warn(f"the {self.engine.name} engine can't run this cohort, going on eagerly: {why}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.cohort.go_plain()
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
        options = self.recipe.stages[self.position.stage].terms
        found = self.engine.term_norms(self.position.step, self.position.stage_step).tolist()
        for peer, by_term in zip(self.peers, found, strict=True):
            norms = {term: norm for term, (norm, _) in zip(options, by_term, strict=True)}
            values = {term: value for term, (_, value) in zip(options, by_term, strict=True)}
            shares = self.position.shares[peer] = shares_of(norms)
            # A weight or an order of 0 is inert on purpose.
            wanted = {term: share for term, share in shares.items() if 0 not in map(options[term].get, OFF)}
            for term in newly_inert(wanted, self.position.inert, peer):
                self.reporter.warn(
                    f"{term} is inert for peer '{peer}' at step {self.position.step}: its share of the gradient is "
                    f"{shares[term]:.0e} and its value {values[term]:.3g}; change its scale or weight, or drop it"
                )

    def _check(self, keys: Sequence[str], figures: Tensor) -> None:
        # A term that was not finite once makes its sum so ever since: on a GPU a look at every step would stall it.
        if bool(figures.isfinite().all()):
            return
        for key, value in zip(keys, figures.tolist(), strict=True):
            peer, kind, term = key.split("|", 2)
            if kind == "terms" and not math.isfinite(value):
                where = f"step {self.position.step} (epoch {self.position.step // self.steps_per_epoch + 1})"
                raise TrainingError(
                    f"term '{term}' of peer '{peer}' became {value} at {where}; the last good checkpoint is kept: "
                    "lower the learning rate or the term's weight"
                )

    # ---- the end of an epoch ------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        self._pull_sums()
        position = self.position
        peers: dict[str, dict[str, Any]] = {}
        for key, value in position.sums.items():
            peer, kind, name = key.split("|", 2)
            peers.setdefault(peer, {"terms": {}, "notes": {}, "train": {}})[kind][name] = value / self.steps_per_epoch
        for name, line in peers.items():
            line["loss"] = sum(line["terms"].values())
            line["train_accuracy"] = line.pop("train")["accuracy"]
            if name in position.shares:
                line["gradient_share"] = position.shares[name]
            line |= self._judge(name)
            self._keep(name, line)
        position.sums = {}
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

    def _judge(self, peer: str) -> dict[str, float]:
        """Return accuracy and NLL on the validation split and, where that is asked for, on the test split."""
        splits = {"valid": self.data.validation, "test": self.data.test if self._tests_now else None}
        found = {}
        for kind, split in splits.items():
            if split is None:
                continue
            first, bad = self.world.is_first, False
            if first:
                draws = max(DRAWS_A_LOOK, self.peers[peer].members)
                log_p, labels = predict_split(self.peers[peer], split, draws, seed=self.seed, name=peer)[:2]
                bad = bool(log_p.isnan().any())
            if self.world.any(bad):  # all give up together
                where = f"step {self.position.step} (epoch {self.position.step // self.steps_per_epoch})"
                raise TrainingError(
                    f"predictions of peer '{peer}' became nan at {where}; the last good checkpoint is kept: lower the "
                    "learning rate"
                )
            if first:
                found[f"{kind}_accuracy"] = evaluation.accuracy(log_p.exp(), labels)
                found[f"{kind}_nll"] = evaluation.nll_from_log(log_p, labels)
        return found

    def _keep(self, peer: str, line: Mapping[str, float]) -> None:
        if self.recipe.evaluation.keep != "best" or "valid_accuracy" not in line:
            return
        if line["valid_accuracy"] >= self.position.best.get(peer, -math.inf):
            self.position.best[peer] = line["valid_accuracy"]
            self.best[peer] = {name: tensor.detach().clone() for name, tensor in self.peers[peer].state().items()}

    def take_best(self) -> None:
        """Put every peer back to its best epoch, where the recipe wants that. There is no going on from there."""
        for peer, tensors in self.best.items():
            self.peers[peer].load_state(tensors, f"the best epoch of peer '{peer}'")

    @property
    def _tests_now(self) -> bool:
        options = self.recipe.evaluation
        epoch = self.position.step // self.steps_per_epoch
        due = options.test_every > 0 and epoch % options.test_every == 0
        return due or epoch > self.recipe.epochs - options.last_epochs

    def _pull_sums(self) -> None:
        # The sums, of means over the processes, stay on the device until somebody has to see them.
        for posterior in self.peers.values():
            self.world.mean_buffers(posterior.network)
        sums = self.cohort.sums.cpu()
        self._check(self.cohort.keys, sums)
        for key, value in zip(self.cohort.keys, sums.tolist(), strict=True):
            self.position.sums[key] = self.position.sums.get(key, 0.0) + value
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
        tensors |= {f"best/{peer}/{name}": t for peer, own in self.best.items() for name, t in own.items()}
        for name, tensor in tensors.items():
            # Networks may hold infinities on purpose (attention masks); what is learnt may not.
            bad = tensor.isnan() if "/network/" in name else ~tensor.isfinite()
            if bool(bad.any()):
                raise TrainingError(
                    f"'{name}' is not finite at step {self.position.step}; the last good checkpoint is kept"
                )
        if self._save is not None:
            self._save(tensors, {"position": self.position.__dict__.copy(), "seed": self.seed})
        self._saved_at = time.monotonic()

    def restore(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Go to where a checkpoint was written."""
        if about.get("seed") != self.seed:
            raise InputError(f"the checkpoint is of seed {about.get('seed')}, not {self.seed}")
        for name, posterior in self.peers.items():
            prefix = f"peer/{name}/"
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            posterior.load_state(own, f"checkpoint, peer '{name}'")
        self.position = Position(**about["position"])
        self._begin_stage(self.position.stage)
        self.state.load_state(tensors)
        for name, tensor in tensors.items():
            if name.startswith("best/"):
                _, peer, place = name.split("/", 2)
                self.best.setdefault(peer, {})[place] = tensor.to(self.device, copy=True)

    # ---- looking before the first step --------------------------------------------------------------------------

    @staticmethod
    def _stage_layers(stage: Stage) -> list[str]:
        found = [layer for options in stage.terms.values() for layer in options.get("layers", [])]
        return list(dict.fromkeys(found))

    def _probe(self) -> list[list[str]]:
        # One batch through every term before anything is trained or written: shapes, classes, layers, options.
        # Returns the names of the figures by stage.
        keys = []
        batch, labels = self.data.train.batch(torch.arange(min(4, len(self.data.train))), self.device)
        self._example = batch
        augment(batch, self.recipe.data.augment, Address())  # texts can't be
        for number in range(len(self.recipe.stages)):
            state = self._new_state(number)
            self.cohort.begin_stage(state, self._layers[number], [])
            outputs = {}
            for name, posterior in self.peers.items():
                logits, features, weights = self._try_network(name, batch, self._layers[number])
                outputs[name] = terms.Output(posterior, weights, logits, features)
            found = terms.Batch(
                labels,
                outputs,
                state.modules,
                len(self.data.train),
                self.cohort.batch_size,
                0.0,
                teachers=self._try_teachers(to_unit(batch)),
            )
            with torch.no_grad():
                keys.append(figure_names(state.terms, found, self.peers))
        return keys

    def _try_teachers(self, images: Tensor) -> Tensor | None:
        teachers = self.cohort.teachers
        if teachers is not None:
            try:
                with torch.no_grad():
                    logits = teachers.logits(run_plain, images, teachers.tensors(0), None)
            except Exception as error:  # a user's network may raise anything
                shape, why = tuple(images.shape[1:]), reason(error)
                raise InputError(f"a teacher can't take {self.data.name}'s inputs, of shape {shape}: {why}") from error
            for number, found in enumerate(logits, start=1):
                if found.shape != (len(images), self.data.classes):
                    raise InputError(
                        f"teacher {number} of {len(logits)} knows {found.shape[-1]} classes, but {self.data.name} has "
                        f"{self.data.classes}"
                    )
        return self.cohort.consult(images, 0)[1]

    @torch.no_grad()
    def _try_network(self, peer: str, images: Tensor, layers: list[str]) -> tuple[Tensor, dict[str, Tensor], Weights]:
        posterior, devices = self.peers[peer], [self.device] if self.device.type == "cuda" else []
        begin = noise.start(Address(self.seed, peer, "step", 0), self.device)
        with kept_buffers(posterior), torch.random.fork_rng(devices):
            for training in (True, False):  # some networks return something else while they train
                posterior.train(training)
                try:
                    with torch.set_grad_enabled(training):
                        flat, std, extra = place_peer(posterior, begin)
                        logits, features = posterior.training_pass(images, flat, extra, layers)
                except InputError:
                    raise
                except Exception as error:  # a user's network may raise anything
                    raise InputError(
                        f"the network of peer '{peer}' can't take {self.data.name}'s images, of shape "
                        f"{tuple(images.shape[1:])}: {reason(error)}"
                    ) from error
                self._check_logits(peer, logits, len(images), training)
        return logits, dict(zip(layers, features, strict=True)), Weights({}, flat, std)

    def _check_logits(self, peer: str, logits: Any, count: int, training: bool) -> None:
        who, when = f"the network of peer '{peer}'", " while it trains" * training
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"{who} returns a {kind}{when}, expected a tensor of logits")
        if logits.dim() != 2 or logits.shape[1] != self.data.classes:
            raise InputError(
                f"{who} returns shape {tuple(logits.shape)}{when}, expected {(count, self.data.classes)}: "
                f"{self.data.name} has {self.data.classes} classes"
            )
        if training and not logits.requires_grad:
            raise InputError(f"{who} returns logits without a gradient, so nothing could be learnt; is it detached?")

    def _shapes(self, peer: str, layers: list[str]) -> terms.Shapes:
        if not layers:
            return terms.Shapes({}, self.data.classes)
        _, features, _ = self._try_network(peer, self._example, layers)
        return terms.Shapes({layer: feature.shape for layer, feature in features.items()}, self.data.classes)


def _first(error: BaseException) -> BaseException:
    """Return the error that led to this one: what fails inside a capture makes its end fail too, which says nothing."""
    while isinstance(error.__context__, RuntimeError) and not error.__suppress_context__:
        error = error.__context__
    return error


def run_together(
    learners: Sequence[Learner], on_end: Callable[[int], None] = lambda _: None
) -> dict[int, TrainingError]:
    """Train several cohorts side by side, a step each in turn; on a GPU captured steps overlap.

    Args:
        learners: on one device, or each on its own.
        on_end: called with the place of a learner as soon as it has reached its end.

    Returns:
        Errors by place of the learners that could not go on; the others have reached their end.
    """
    devices = list({learner.device for learner in learners if learner.device.type == "cuda"})
    errors: dict[int, TrainingError] = {}
    with torch.random.fork_rng(devices), contextlib.ExitStack() as stack:
        running = {place: learner.steps() for place, learner in enumerate(learners)}
        for learner, steps in zip(learners, running.values(), strict=True):
            stack.callback(learner.feed.close)  # also of one that never began
            stack.callback(steps.close)  # type: ignore[attr-defined]
        while running:
            for place in list(running):
                learner = learners[place]
                try:
                    with learner.engine.running():
                        if next(running[place], "end") is None:
                            continue
                    if learner.device.type == "cuda":
                        torch.cuda.synchronize(learner.device)
                    on_end(place)
                except TrainingError as error:
                    errors[place] = error
                except torch.OutOfMemoryError as error:
                    errors[place] = TrainingError(
                        f"the memory of {learner.device} is used up at step {learner.position.step} ({reason(error)}); "
                        "the last checkpoint is kept: train fewer runs side by side (--pack), or smaller batches"
                    )
                del running[place]
    return errors
