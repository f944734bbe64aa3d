"""The one training loop: a cohort of any size, stage by stage, step by step.

Everything random is a function of (seed, owner, step), so the state of a run is its weights, the optimisers' moments
and the step number. A resumed run continues exactly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from peerbayes import evaluation, terms
from peerbayes.data import Dataset, augment, order, to_unit
from peerbayes.errors import InputError
from peerbayes.learning import recipe as settings
from peerbayes.learning.engine import Captured, Clock, Compiled, Eager, Forward, Name, pick
from peerbayes.learning.progress import Reporter
from peerbayes.learning.shares import gradient_shares, newly_inert
from peerbayes.learning.stages import SHARED, StageState, learning_rate, set_global_seed
from peerbayes.noise import Address
from peerbayes.posteriors import Posterior, Weights, predict_split

ENGINES: dict[Name, type[Eager]] = {"eager": Eager, "compiled": Compiled, "captured": Captured}
VALIDATION_DRAWS = 4


class TrainingError(RuntimeError):
    """Training cannot go on; the last good checkpoint is kept."""


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
        checkpoint_every: steps between checkpoints; by default at the end of an epoch, at most every 10 s.
        engine: ``eager``, ``compiled``, ``captured``, or ``auto``: eager.
        autocast: the type that networks compute in; None for float32. Terms and weights stay in float32.
    """

    def __init__(
        self,
        recipe: settings.Recipe,
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
    ) -> None:
        self.recipe = recipe
        self.peers = dict(peers)
        self.data = data
        self.seed = seed
        self.reporter = reporter or Reporter()
        self.device = next(iter(self.peers.values())).device
        self.batch_size = min(recipe.data.batch_size, len(data.train))
        self.steps_per_epoch = len(data.train) // self.batch_size
        self.position = Position()
        self._save = save
        self._log = log
        self._checkpoint_every = checkpoint_every
        self._saved_at = time.monotonic()
        self._sums: dict[str, Tensor] = {}
        self._batch_range = torch.arange(self.batch_size, device=self.device)
        self._order = torch.empty(len(data.train), dtype=torch.int64, device=self.device)
        self._ordered_epoch = -1
        self._layers = [self._stage_layers(stage) for stage in recipe.stages]
        self.autocast = autocast
        self.forwards: dict[str, Forward] = {}
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.engine: Eager = ENGINES[pick(engine, self.device)](self)
        self._probe()
        self._state = self._begin_stage(0)

    # ---- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end of the last stage, from the position; torch's generators are left as they were."""
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                self._run_stages()
        finally:
            self.reporter.close()

    def _run_stages(self) -> None:
        for number in range(self.position.stage, len(self.recipe.stages)):
            if number != self.position.stage:
                self.position.stage, self.position.stage_step = number, 0
                self.position.shares, self.position.inert = {}, {}
                self._state = self._begin_stage(number)
            self._run_stage(number)

    def _run_stage(self, number: int) -> None:
        stage = self.recipe.stages[number]
        position, total = self.position, stage.epochs * self.steps_per_epoch
        self.reporter.stage(
            number + 1, len(self.recipe.stages), stage.epochs, position.stage_step // self.steps_per_epoch
        )
        started = time.monotonic() - position.seconds
        if position.stage_step < total:
            self._begin_engine()
        while position.stage_step < total:
            self._state.set_learning_rate(learning_rate(stage, position.stage_step, self.steps_per_epoch))
            self.engine.step()
            position.step += 1
            position.stage_step += 1
            position.seconds = time.monotonic() - started
            if self.device.type != "cpu" and position.step % 50 == 0:
                self.check_sums()
            ended = position.stage_step % self.steps_per_epoch == 0
            if ended:
                self._end_epoch()
            if self._checkpoint_due(ended, position.stage_step == total):
                self.checkpoint()

    def _begin_stage(self, number: int) -> StageState:
        address = Address(self.seed, "helpers", "initial", number)
        shapes = {name: self._shapes(name, self._layers[number]) for name in self.peers}
        return StageState(self.recipe.stages[number], self.peers, shapes, address)

    def _begin_engine(self) -> None:
        try:
            self.engine.begin_stage()
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if self.engine.name == "eager":
                raise
            why = str(error).strip().splitlines()[0]
            self.reporter.warn(f"the {self.engine.name} engine can't run this cohort, going on eagerly: {why}")
            self.forwards, self.streams, self.engine = {}, {}, Eager(self)

    @property
    def layers(self) -> list[str]:
        """The layers whose features this stage's terms want."""
        return self._layers[self.position.stage]

    def state_tensors(self) -> list[Tensor]:
        """Return every tensor that a step changes."""
        tensors = [t for peer in self.peers.values() for t in (*peer.parameters(), *peer.buffers())]
        tensors += [t for module in self._state.modules.values() for t in (*module.parameters(), *module.buffers())]
        tensors += [
            value
            for optimizer in self._state.optimizers.values()
            for slots in optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        ]
        return [*tensors, *self._sums.values()]

    # ---- one step -----------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """Now, in host numbers."""
        step, stage_step = self.position.step, self.position.stage_step
        return Clock(step, step % self.steps_per_epoch, stage_step / self.steps_per_epoch)

    @property
    def measures_now(self) -> bool:
        """Whether the terms' shares of the gradient are due at this step."""
        every = self.recipe.gradient_share_every
        return every > 0 and self.position.step % every == 0

    def step_now(self) -> None:
        """Run one step, op by op."""
        self.body(self.clock, measure=self.measures_now)

    def measure_now(self) -> None:
        """Measure the terms' shares of the gradient at this step, op by op, and change nothing else."""
        fast = self.forwards, self.streams
        self.forwards, self.streams = {}, {}  # a compiled backward pass can't be asked term by term
        try:
            with contextlib.ExitStack() as stack:
                for posterior in self.peers.values():
                    stack.enter_context(_kept_buffers(posterior))
                batch = self._forward(self.clock)
                self._measure_shares({name: self._values(batch, name) for name in self.peers})
        finally:
            self.forwards, self.streams = fast

    def body(self, clock: Clock, measure: bool = False) -> None:
        """The whole of a step on the device: forward, terms, backward, update, sums. Nothing waits for the host."""
        batch = self._forward(clock)
        if self.recipe.update == "simultaneous":
            values = {name: self._values(batch, name) for name in self.peers}
            if measure:
                self._measure_shares(values)
            total = sum(
                (v for by_term in values.values() for v in by_term.values()), torch.zeros((), device=self.device)
            )
            total.backward()
            self._state.average_shared_gradients(len(self.peers))
            self._check(values, clock)
            self._state.update([*self.peers, SHARED])
        else:
            values = self._sequential_update(batch, clock, measure)
        self._gather(batch, values)

    def _sequential_update(self, batch: terms.Batch, clock: Clock, measure: bool) -> dict[str, dict[str, Tensor]]:
        values: dict[str, dict[str, Tensor]] = {}
        outputs = dict(batch.outputs)
        batch.outputs = outputs
        for name in self.peers:
            values[name] = self._values(batch, name)
            if measure:
                self._measure_shares({name: values[name]})
            sum(values[name].values(), torch.zeros((), device=self.device)).backward()
            self._check({name: values[name]}, clock)
            self._state.update([name])
            with torch.no_grad(), _kept_buffers(self.peers[name]):
                outputs[name] = self._output(name, self._images, clock)
        self._state.average_shared_gradients(len(self.peers))
        self._state.update([SHARED])
        return values

    def _forward(self, clock: Clock | None = None) -> terms.Batch:
        clock = clock or self.clock
        images, labels = self.data.train.batch(self._batch_index(clock), self.device)
        address = Address(self.seed, "data", "augment", clock.step)
        self._images = to_unit(augment(images, self.recipe.data.augment, address))
        outputs = {name: self._output(name, self._images, clock) for name in self.peers}
        for stream in self.streams.values():
            torch.cuda.current_stream(self.device).wait_stream(stream)
        return terms.Batch(
            labels=labels,
            outputs=outputs,
            modules=self._state.modules,
            train_size=len(self.data.train),
            batch_size=self.batch_size,
            epoch=clock.epoch,
        )

    def _output(self, name: str, images: Tensor, clock: Clock) -> terms.Output:
        posterior = self.peers[name]
        posterior.train()
        address = Address(self.seed, name, "step", clock.step)
        if not isinstance(clock.step, Tensor):
            set_global_seed(address.sub("network"))  # dropout and the like
        with self._own_stream(name):
            if name in self.forwards:
                logits, features, flat, std = self.forwards[name](images, address)
                return terms.Output(posterior, Weights({}, flat, std), logits, features)
            weights = posterior.draw(address)
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                logits, features = posterior.forward_features(images, weights, self.layers)
            features = {layer: feature.float() for layer, feature in features.items()}
            return terms.Output(posterior, weights, logits.float(), features)

    @contextlib.contextmanager
    def _own_stream(self, name: str) -> Iterator[None]:
        if name not in self.streams:
            yield
            return
        self.streams[name].wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.streams[name]):
            yield

    def _values(self, batch: terms.Batch, peer: str) -> dict[str, Tensor]:
        return {term.name: term.value(batch, peer, options) for term, options in self._state.terms}

    def _batch_index(self, clock: Clock) -> Tensor:
        return self.epoch_order()[clock.place * self.batch_size + self._batch_range]

    def epoch_order(self) -> Tensor:
        """Return this epoch's permutation of the training images, always in the same tensor."""
        epoch = self.position.step // self.steps_per_epoch
        if epoch != self._ordered_epoch:
            address = Address(self.seed, "data", "order", epoch)
            self._order.copy_(order(len(self.data.train), address, self._order.device))
            self._ordered_epoch = epoch
        return self._order

    # ---- what the terms say of themselves -----------------------------------------------------------------------

    def _measure_shares(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        options = self.recipe.stages[self.position.stage].terms
        for peer, by_term in values.items():
            parameters = (p for p in self.peers[peer].parameters() if p.requires_grad and p.numel())
            found = self.position.shares[peer] = gradient_shares(by_term, parameters)
            wanted = {term: share for term, share in found.items() if options[term].get("weight") != 0}
            for term in newly_inert(wanted, self.position.inert, peer):
                self.reporter.warn(
                    f"{term} is inert for peer '{peer}' at step {self.position.step}: its share of the gradient is "
                    f"{found[term]:.0e} and its value {float(by_term[term].detach()):.3g}; change its scale or weight, "
                    "or drop it"
                )

    def _check(self, values: Mapping[str, Mapping[str, Tensor]], clock: Clock) -> None:
        # On a GPU a look every step would stall it, and a captured step can't look: `check_sums` does.
        if self.device.type != "cpu" or isinstance(clock.step, Tensor):
            return
        for peer, by_term in values.items():
            for term, value in by_term.items():
                if not bool(value.isfinite()):
                    self._fail(term, peer, float(value.detach()))

    def check_sums(self) -> None:
        """Stop if a term was not finite since the epoch began: its sum has not been finite ever since."""
        for key, value in self._sums.items():
            peer, kind, term = key.split("|", 2)
            if kind == "terms" and not bool(value.isfinite()):
                self._fail(term, peer, float(value))

    def _fail(self, term: str, peer: str, value: float) -> None:
        where = f"step {self.position.step} (epoch {self.position.step // self.steps_per_epoch + 1})"
        raise TrainingError(
            f"term '{term}' of peer '{peer}' became {value} at {where}; the last good checkpoint is kept: "
            "lower the learning rate or the term's weight"
        )

    def _gather(self, batch: terms.Batch, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        found = {f"{peer}|terms|{term}": v.detach() for peer, by in values.items() for term, v in by.items()}
        found |= {f"{peer}|notes|{name}": value for (peer, name), value in batch.notes.items()}
        for peer, output in batch.outputs.items():
            hits = (output.logits.detach().argmax(-1) == batch.labels).float().mean()
            found[f"{peer}|train|accuracy"] = hits
        for key, value in found.items():
            if key not in self._sums:
                self._sums[key] = torch.zeros((), dtype=torch.float64, device=self.device)
            self._sums[key].add_(value)

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
            line |= self._validate(name)
        position.sums = {}
        line = {
            "stage": position.stage + 1,
            "epoch": position.stage_step // self.steps_per_epoch,
            "step": position.step,
            "seconds": round(position.seconds, 3),
            "lr": learning_rate(self._state.settings, position.stage_step - 1, self.steps_per_epoch),
            "peers": peers,
        }
        if self._log is not None:
            self._log(line)
        self.reporter.epoch(line)

    def _validate(self, peer: str) -> dict[str, float]:
        split = self.data.validation
        if split is None:
            return {}
        log_p, labels = predict_split(self.peers[peer], split, VALIDATION_DRAWS, seed=self.seed, name=peer)[:2]
        return {
            "valid_accuracy": evaluation.accuracy(log_p.exp(), labels),
            "valid_nll": evaluation.nll_from_log(log_p, labels),
        }

    def _pull_sums(self) -> None:
        # The sums stay on the device until somebody has to see them.
        self.check_sums()
        for key, value in self._sums.items():
            self.position.sums[key] = self.position.sums.get(key, 0.0) + float(value)
            value.zero_()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _checkpoint_due(self, epoch_ended: bool, stage_ended: bool) -> bool:
        if self._save is None:
            return False
        if self._checkpoint_every is not None:
            return stage_ended or self.position.step % self._checkpoint_every == 0
        return stage_ended or (epoch_ended and time.monotonic() - self._saved_at > 10)

    def checkpoint(self) -> None:
        """Hand everything that a resumed run needs to ``save``."""
        self._pull_sums()
        tensors = {f"peer/{name}/{n}": t for name, p in self.peers.items() for n, t in p.state().items()}
        tensors |= self._state.state()
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
        self._state = self._begin_stage(self.position.stage)
        self._state.load_state(tensors)
        self._sums = {}

    # ---- looking before the first step --------------------------------------------------------------------------

    @staticmethod
    def _stage_layers(stage: settings.Stage) -> list[str]:
        found = [layer for options in stage.terms.values() for layer in options.get("layers", [])]
        return list(dict.fromkeys(found))

    def _probe(self) -> None:
        # One batch through every term before anything is trained or written: shapes, classes, layers, options.
        batch, labels = self.data.train.batch(torch.arange(min(4, len(self.data.train))), self.device)
        self._example = batch
        for number in range(len(self.recipe.stages)):
            state = self._begin_stage(number)
            outputs = {}
            for name, posterior in self.peers.items():
                weights = posterior.draw(Address(self.seed, name, "step", 0))
                logits, features = self._try_network(name, batch, weights, self._layers[number])
                if logits.dim() != 2 or logits.shape[1] != self.data.classes:
                    raise InputError(
                        f"the network of peer '{name}' returns shape {tuple(logits.shape)}, expected "
                        f"{(len(batch), self.data.classes)}: {self.data.name} has {self.data.classes} classes"
                    )
                outputs[name] = terms.Output(posterior, weights, logits, features)
            found = terms.Batch(labels, outputs, state.modules, len(self.data.train), self.batch_size, 0.0)
            for term, options in state.terms:
                for name in self.peers:
                    with torch.no_grad():
                        term.value(found, name, options)

    @torch.no_grad()
    def _try_network(
        self, peer: str, images: Tensor, weights: Weights, layers: list[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        posterior = self.peers[peer]
        posterior.eval()
        with _kept_buffers(posterior):
            try:
                return posterior.forward_features(images, weights, layers)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                if isinstance(error, InputError):
                    raise
                why = str(error).strip().splitlines()[0]
                raise InputError(
                    f"the network of peer '{peer}' can't take {self.data.name}'s images, of shape "
                    f"{tuple(images.shape[1:])}: {why}"
                ) from error

    def _shapes(self, peer: str, layers: list[str]) -> terms.Shapes:
        if not layers:
            return terms.Shapes({}, self.data.classes)
        _, features = self._try_network(peer, self._example, self.peers[peer].centre(), layers)
        return terms.Shapes({layer: feature.shape for layer, feature in features.items()}, self.data.classes)


@contextlib.contextmanager
def _kept_buffers(posterior: Posterior) -> Iterator[None]:
    """Put the network's buffers (batch-norm statistics) back after the block."""
    kept = [(buffer, buffer.clone()) for buffer in posterior.network.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
