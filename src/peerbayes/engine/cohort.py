"""A cohort and what one step does to it, on the device: forward, terms, backward, update, sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from peerbayes.data.loader import Feed
from peerbayes.data.transforms.mix import Mixer
from peerbayes.engine.perturbation import Passes, Perturbation
from peerbayes.engine.processes import World
from peerbayes.engine.stages import SHARED, StageState, set_global_seed
from peerbayes.engine.step_parts import Clock, StepFunctions, learnt, norm_and_value, term_value
from peerbayes.engine.synchronised import gather_batch
from peerbayes.engine.teachers import Teachers
from peerbayes.math import noise
from peerbayes.math.noise import Address
from peerbayes.networks.running import kept_buffers
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.flat_network import Weights
from peerbayes.recipes.recipe import Recipe
from peerbayes.terms.step import Batch, Output


class Cohort:
    """Peers, a feed and a stage; `step` is the whole of a training step, and nothing in it waits for the host.

    An engine may exchange ``parts`` for compiled ones, and give each peer a stream of its own.

    Args:
        recipe: update rule, augmentation and batch size.
        peers: posteriors by name, on one device.
        feed: hands out the batches.
        seed: the run's seed.
        train_size: images in the training split.
        autocast: the type that networks compute in; None for float32. Terms and weights stay in float32.
        world: the processes that share a batch.
        synchronise: terms that compare the images of a batch see those of all processes.
        teachers: who do not learn.
        check: called with names of figures, and their values (means over the processes), before they lead to an update.
    """

    def __init__(
        self,
        recipe: Recipe,
        peers: Mapping[str, Posterior],
        feed: Feed,
        seed: int,
        train_size: int,
        autocast: torch.dtype | None,
        world: World,
        synchronise: bool = False,
        check: Callable[[Sequence[str], Tensor], None] | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        self.recipe, self.peers, self.feed, self.seed = recipe, peers, feed, seed
        self.train_size, self.autocast, self.world, self.check = train_size, autocast, world, check
        self.batch_size = feed.batch_size * world.size
        self.gather = (lambda tensor: gather_batch(tensor, world)) if synchronise and world.size > 1 else None
        self.device = next(iter(peers.values())).device
        self.teachers = teachers
        self.perturb: Perturbation | None = None
        self.mixer: Mixer | None = None
        self.draws = 1
        self._apart = False
        self.streams: dict[str, torch.cuda.Stream] = {}
        self._keys: dict[tuple[str, str], Tensor] = {}  # of addresses; a captured step can't copy them to the device
        self._used: dict[str, None] = {}  # names of streams, since a block of `_forked` began; in order
        self.go_eager()

    def begin_stage(self, state: StageState, layers: list[str], keys: list[str]) -> None:
        """Take a stage's helpers, optimisers, layers, and the names of its figures.

        Args:
            state: optimisers, schedule and terms of the stage.
            layers: names of the layers whose outputs its terms ask for.
            keys: names of the figures that are summed up over an epoch.
        """
        self.state, self.layers, self.keys = state, layers, keys
        mix, self.draws = state.settings.mix, state.settings.draws or 1
        self.mixer = None if mix is None else Mixer(mix.kind, mix.alpha, self.device)  # type: ignore[arg-type]
        options = state.settings.perturb
        self.perturb = None if options is None else Perturbation(options, self.teachers, self.peers, self.seed)
        self.sums = torch.zeros(len(keys), dtype=torch.float64, device=self.device)

    def go_eager(self) -> None:
        """Run operation by operation from now on."""
        self.parts = StepFunctions()
        self.streams = {}

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Run operation by operation inside the block."""
        before = self.parts, self.streams
        self.go_eager()
        try:
            yield
        finally:
            self.parts, self.streams = before

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Average nothing over the processes inside the block; what is synchronised still is."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step changes."""
        tensors = [t for peer in self.peers.values() for t in (*peer.parameters(), *peer.buffers())]
        tensors += [t for module in self.state.modules.values() for t in (*module.parameters(), *module.buffers())]
        tensors += [
            value
            for optimizer in self.state.optimizers.values()
            for slots in optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        ]
        return [*tensors, self.sums]

    # ---- one step -----------------------------------------------------------------------------------------------

    def step(self, clock: Clock) -> None:
        """Train for one batch, and add its figures to the sums."""
        batch = self.forward(clock)
        figures = self._simultaneously(batch) if self.recipe.update == "simultaneous" else self._in_turn(batch, clock)
        self.sums.add_(figures)

    def _simultaneously(self, batch: Batch) -> Tensor:
        with self._forked():
            totals, found = zip(*[self._loss_and_figures(batch, name) for name in self.peers], strict=True)
        figures = torch.cat(found)
        torch.autograd.backward(totals)
        first, *others = self.peers
        self._average(first, figures)
        for name in others:
            self._average(name)
        if self.check is not None:
            self.check(self.keys, figures)
        self._finish_shared()
        with self._forked():
            for name in self.peers:
                with self._own_stream(name):
                    self.state.update([name])
        self.state.update([SHARED])
        return figures

    def _in_turn(self, batch: Batch, clock: Clock) -> Tensor:
        outputs = batch.outputs = dict(batch.outputs)
        parts = []
        for name in self.peers:
            with self._forked():
                total, figures = self._loss_and_figures(batch, name)
            total.backward()
            self._average(name, figures)
            if self.check is not None:
                self.check([key for key in self.keys if key.startswith(f"{name}|")], figures)
            self.state.update([name])
            parts.append(figures)
            if len(parts) < len(self.peers):  # for those that come after it
                with torch.no_grad(), kept_buffers(self.peers[name].network), self._forked():
                    outputs[name] = self.output(name, clock)
        self._finish_shared()
        self.state.update([SHARED])
        return torch.cat(parts)

    def _loss_and_figures(self, batch: Batch, name: str) -> tuple[Tensor, Tensor]:
        """Return a peer's loss and figures."""
        before = _count_derived(batch)
        # A compiled term is one node of the graph for all peers, which the first peer in turn would use up.
        value_of = self.parts.term_value if self.recipe.update == "simultaneous" else term_value
        with self._own_stream(name):
            found = self.state.of_terms(value_of, batch, name)
            notes = [note for _, own in found for note in own.values()]
            values, logits = [value for value, _ in found], batch.outputs[name].logits
            result = self.parts.total_and_figures(values, notes, logits, batch.labels)
        if name in self.streams and _count_derived(batch) > before:  # which the others are going to use
            torch.cuda.current_stream(self.device).wait_stream(self.streams[name])
        return result

    def _finish_shared(self) -> None:
        self.state.average_shared_gradients(len(self.peers))
        self._average(SHARED)

    def _average(self, owner: str, *figures: Tensor) -> None:
        # Figures travel with a gradient: what is not finite in one process is so in all, and all give up together.
        if self.world.size > 1 and not self._apart:
            self.world.average([*self.state.gradients(owner), *figures])

    def forward(self, clock: Clock) -> Batch:
        """Return what all peers make of a batch."""
        images, labels = self.feed.batch(clock.place)
        first = self.world.rank * self.feed.batch_size
        augment = [name for name in self.recipe.data.augment if name not in self.feed.augmented]
        prepared = self.parts.prepare_images(images, augment, self.seed, self.feed.owner, clock.step, first)
        shares = None
        if self.mixer is not None:
            prepared, shares = self.mixer(prepared, Address(self.seed, self.feed.owner, "mix", clock.step), first)
        self.images, teachers = self.perturb_and_teach(prepared, clock.step, first)
        with self._forked():
            outputs = {name: self.output(name, clock) for name in self.peers}
        return Batch(
            labels=labels,
            outputs=outputs,
            modules=self.state.modules,
            train_size=self.train_size,
            batch_size=self.batch_size,
            epoch=clock.epoch,
            gather=self.gather,
            teachers=teachers,
            shares=shares,
        )

    def perturb_and_teach(self, images: Tensor, number: int | Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return the images, perturbed where that is asked for, and the teachers' logits for them, (M, B, C).

        Args:
            images: augmented, (B, ...).
            number: of the step; the address of perturbations and teachers' draws.
            first: place of the first image in the whole batch.
        """
        with torch.no_grad():
            tensors = [] if self.teachers is None else self.teachers.tensors(number)
        if self.perturb is not None:
            passes = Passes(tensors, self.parts.run_functional, self.autocast, self._own_stream, self._forked)
            images = self.perturb(images, number, first, passes)
        if self.teachers is None:
            return images, None
        with torch.no_grad():
            with self._forked():
                logits = self.teachers.logits(
                    self.parts.run_functional, images, tensors, self.autocast, self._own_stream
                )
            return images, torch.stack(logits)

    def output(self, name: str, clock: Clock) -> Output:
        """Return what a peer makes of the batch that `forward` has taken last.

        Args:
            name: the peer's.
            clock: when the step happens; its number is the draw's address.
        """
        posterior = self.peers[name]
        posterior.train()
        drawn: list[tuple[Weights, Tensor, list[Tensor]]] = []
        for number in range(self.draws if posterior.stochastic else 1):
            address = Address(self.seed, name, f"step/{number}" if number else "step", clock.step)
            if not isinstance(clock.step, Tensor):
                # Dropout and the like; processes see different images, so they drop different units.
                set_global_seed(address.sub("network" if self.world.size == 1 else f"network/{self.world.rank}"))
            with self._own_stream(name):
                where = self._keys_of(address), noise.number_tensor(address, self.device)
                flat, std, extra = self.parts.place_peer(posterior, *where)
                logits, features = self.parts.run_peer(posterior, self.images, flat, extra, self.layers, self.autocast)
            drawn.append((Weights({}, flat, std), logits, features))
        weights, logits, features = drawn[0]
        if len(drawn) > 1:  # rows of the first draw come first, as those of members do
            with self._own_stream(name):
                logits = torch.cat([more for _, more, _ in drawn])
                features = [torch.cat(rows) for rows in zip(*(more for _, _, more in drawn), strict=True)]
        return Output(posterior, weights, logits, dict(zip(self.layers, features, strict=True)))

    def _keys_of(self, address: Address) -> Tensor:
        stream = address.owner, address.stream
        if stream not in self._keys:
            self._keys[stream] = noise.key_tensor(address, self.device)
        return self._keys[stream]

    @contextlib.contextmanager
    def _forked(self) -> Iterator[None]:
        """What streams of peers and teachers do inside the block is done after it."""
        self._used.clear()
        yield
        # Not the others: a capture does not know them yet, and may not wait for what is not a part of it.
        for name in self._used:
            torch.cuda.current_stream(self.device).wait_stream(self.streams[name])

    @contextlib.contextmanager
    def _own_stream(self, name: str) -> Iterator[None]:
        if name not in self.streams:
            yield
            return
        self.streams[name].wait_stream(torch.cuda.current_stream(self.device))
        self._used[name] = None
        with torch.cuda.stream(self.streams[name]):
            yield

    # ---- what the terms contribute ------------------------------------------------------------------------------

    def term_norms(self, clock: Clock) -> Tensor:
        """Return ‖∇ term‖ and the term's value, (peers, terms, 2), at this step; nothing else changes.

        With many processes: the norm of the gradient's mean over them, which is what an update is made of.
        """
        with self.eager(), contextlib.ExitStack() as stack:
            for posterior in self.peers.values():
                stack.enter_context(kept_buffers(posterior.network))
            batch = self.forward(clock)
            norms = []
            for name, posterior in self.peers.items():
                values = [value for value, _ in self.state.of_terms(term_value, batch, name)]
                norms.append(torch.stack([norm_and_value(value, learnt(posterior), self.world) for value in values]))
            return torch.stack(norms)


def _count_derived(batch: Batch) -> int:
    return sum(len(output.derived) for output in batch.outputs.values())
