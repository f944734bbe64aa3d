"""A cohort and what one step does to it, on the device: forward, terms, backward, update, sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peerbayes import noise, terms
from peerbayes.data import Feed, augment, to_unit
from peerbayes.learning import recipe as settings
from peerbayes.learning.distribution import World, gather_batch
from peerbayes.learning.shares import norm_and_value
from peerbayes.learning.stages import SHARED, StageState, set_global_seed
from peerbayes.networks import capture
from peerbayes.noise import Address
from peerbayes.posteriors import Posterior, Weights

Figures = dict[str, Tensor]
Terms = Sequence[tuple[terms.Term, Mapping[str, Any]]]


@dataclass
class Clock:
    """When a step happens: host numbers, or tensors on the device for a captured step.

    Attributes:
        step: steps since the run began; the number of the step's addresses.
        place: batches since the epoch began.
        epoch: epochs since the stage began, with fraction.
    """

    step: int | Tensor
    place: int | Tensor
    epoch: float | Tensor


def prepare_images(images: Tensor, names: Sequence[str], seed: int, number: int | Tensor, first: int) -> Tensor:
    """Return augmented images in [0, 1]; the noise is that of step ``number``, for images ``first`` and on."""
    return to_unit(augment(images, names, Address(seed, "data", "augment", number), first))


def run_peer(
    posterior: Posterior, images: Tensor, begin: Tensor, layers: Sequence[str], autocast: torch.dtype | None
) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None]:
    """Return logits, features, flat weights and their scales of one draw, whose noise starts at ``begin``.

    Peers of one make share what a compiler makes of this.
    """
    eps = noise.normal_from(begin, posterior.noise_size) if posterior.noise_size else None
    flat, std = posterior.place(eps)
    with (
        torch.autocast(images.device.type, autocast, enabled=autocast is not None),
        capture(posterior.network, layers) as found,
    ):
        logits = posterior.run_network(images, posterior.named(flat))
    return logits.float(), [found[layer].float() for layer in layers], flat, std


def term_figures(chosen: Terms, batch: terms.Batch, peers: Iterable[str]) -> tuple[Tensor, Figures]:
    """Return the sum of the peers' losses, and by ``peer|kind|name`` what an epoch averages of them."""
    total = batch.labels.new_zeros((), dtype=torch.float32)
    found: Figures = {}
    for peer in peers:
        for term, options in chosen:
            value = term.value(batch, peer, options)
            total = total + value
            found[f"{peer}|terms|{term.name}"] = value.detach()
        for (owner, name), value in batch.notes.items():
            if owner == peer:
                found[f"{peer}|notes|{name}"] = value
        hits = batch.outputs[peer].logits.detach().argmax(-1) == batch.labels
        found[f"{peer}|train|accuracy"] = hits.float().mean()
    return total, found


def stacked_figures(chosen: Terms, batch: terms.Batch, peers: Iterable[str]) -> tuple[Tensor, Tensor]:
    """Return the sum of the peers' losses and the figures in one tensor, float32."""
    total, found = term_figures(chosen, batch, peers)
    return total, torch.stack([value.float() for value in found.values()])


class Cohort:
    """Peers, a feed and a stage; `step` is the whole of a training step, and nothing in it waits for the host.

    An engine may exchange ``prepare_images``, ``run_peer`` and ``figures`` for compiled ones, and give each peer a
    stream of its own.

    Args:
        recipe: update rule, augmentation and batch size.
        peers: posteriors by name, on one device.
        feed: hands out the batches.
        seed: the run's seed.
        train_size: images in the training split.
        autocast: the type that networks compute in; None for float32. Terms and weights stay in float32.
        world: the processes that share a batch.
        synchronise: terms that compare the images of a batch see those of all processes.
        look: called with the names of figures and the figures, means over the processes, before they lead to an update.
    """

    def __init__(
        self,
        recipe: settings.Recipe,
        peers: Mapping[str, Posterior],
        feed: Feed,
        seed: int,
        train_size: int,
        autocast: torch.dtype | None,
        world: World,
        synchronise: bool = False,
        look: Callable[[Sequence[str], Tensor], None] = lambda _keys, _figures: None,
    ) -> None:
        self.recipe, self.peers, self.feed, self.seed = recipe, peers, feed, seed
        self.train_size, self.autocast, self.world, self.look = train_size, autocast, world, look
        self.batch_size = feed.batch_size * world.size
        self.gather = (lambda tensor: gather_batch(tensor, world)) if synchronise and world.size > 1 else None
        self.device = next(iter(peers.values())).device
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.go_plain()

    def begin_stage(self, state: StageState, layers: list[str], keys: list[str]) -> None:
        """Take a stage's helpers, optimisers, layers, and the names of its figures."""
        self.state, self.layers, self.keys = state, layers, keys
        self.sums = torch.zeros(len(keys), dtype=torch.float64, device=self.device)

    def go_plain(self) -> None:
        """Run operation by operation from now on."""
        self.prepare_images: Callable[..., Tensor] = prepare_images
        self.run_peer: Callable[..., Any] = run_peer
        self.figures: Callable[..., tuple[Tensor, Tensor]] = stacked_figures
        self.streams = {}

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Run operation by operation inside the block."""
        before = self.prepare_images, self.run_peer, self.figures, self.streams
        self.go_plain()
        try:
            yield
        finally:
            self.prepare_images, self.run_peer, self.figures, self.streams = before

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step changes."""
        found = [t for peer in self.peers.values() for t in (*peer.parameters(), *peer.buffers())]
        found += [t for module in self.state.modules.values() for t in (*module.parameters(), *module.buffers())]
        found += [
            value
            for optimizer in self.state.optimizers.values()
            for slots in optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        ]
        return [*found, self.sums]

    # ---- one step -----------------------------------------------------------------------------------------------

    def step(self, clock: Clock) -> None:
        """Train for one batch, and add its figures to the sums."""
        batch = self.forward(clock)
        figures = self._together(batch) if self.recipe.update == "simultaneous" else self._in_turn(batch, clock)
        self.sums.add_(figures)

    def _together(self, batch: terms.Batch) -> Tensor:
        total, figures = self.figures(self.state.terms, batch, list(self.peers))
        total.backward()
        first, *others = self.peers
        self._average(first, figures)
        for name in others:
            self._average(name)
        self.look(self.keys, figures)
        self._finish_shared()
        with self._forked():
            for name in self.peers:
                with self._own_stream(name):
                    self.state.update([name])
        self.state.update([SHARED])
        return figures

    def _in_turn(self, batch: terms.Batch, clock: Clock) -> Tensor:
        outputs = batch.outputs = dict(batch.outputs)
        parts = []
        for name in self.peers:
            total, figures = self.figures(self.state.terms, batch, [name])
            total.backward()
            self._average(name, figures)
            self.look([key for key in self.keys if key.startswith(f"{name}|")], figures)
            self.state.update([name])
            parts.append(figures)
            if len(parts) < len(self.peers):  # for those that come after it
                with torch.no_grad(), kept_buffers(self.peers[name]), self._forked():
                    outputs[name] = self._output(name, self._images, clock)
        self._finish_shared()
        self.state.update([SHARED])
        return torch.cat(parts)

    def _finish_shared(self) -> None:
        self.state.average_shared_gradients(len(self.peers))
        self._average(SHARED)

    def _average(self, owner: str, *figures: Tensor) -> None:
        # Figures travel with a gradient: what is not finite in one process is so in all, and all give up together.
        if self.world.size > 1:
            self.world.average([*self.state.gradients(owner), *figures])

    def forward(self, clock: Clock) -> terms.Batch:
        """Return what all peers make of a batch."""
        images, labels = self.feed.batch(clock.place)
        first = self.world.rank * self.feed.batch_size
        self._images = self.prepare_images(images, self.recipe.data.augment, self.seed, clock.step, first)
        with self._forked():
            outputs = {name: self._output(name, self._images, clock) for name in self.peers}
        return terms.Batch(
            labels=labels,
            outputs=outputs,
            modules=self.state.modules,
            train_size=self.train_size,
            batch_size=self.batch_size,
            epoch=clock.epoch,
            gather=self.gather,
        )

    def _output(self, name: str, images: Tensor, clock: Clock) -> terms.Output:
        posterior = self.peers[name]
        posterior.train()
        address = Address(self.seed, name, "step", clock.step)
        if not isinstance(clock.step, Tensor):
            # Dropout and the like; processes see different images, so they drop different units.
            set_global_seed(address.sub("network" if self.world.size == 1 else f"network/{self.world.rank}"))
        with self._own_stream(name):
            begin = noise.start(address, self.device)
            logits, features, flat, std = self.run_peer(posterior, images, begin, self.layers, self.autocast)
        found = dict(zip(self.layers, features, strict=True))
        return terms.Output(posterior, Weights({}, flat, std), logits, found)

    @contextlib.contextmanager
    def _forked(self) -> Iterator[None]:
        """What the peers' streams do inside the block is done after it."""
        yield
        for stream in self.streams.values():
            torch.cuda.current_stream(self.device).wait_stream(stream)

    @contextlib.contextmanager
    def _own_stream(self, name: str) -> Iterator[None]:
        if name not in self.streams:
            yield
            return
        self.streams[name].wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.streams[name]):
            yield

    # ---- what the terms contribute ------------------------------------------------------------------------------

    def term_norms(self, clock: Clock) -> Tensor:
        """Return ‖∇ term‖ and the term's value, (peers, terms, 2), at this step; nothing else changes.

        With many processes: the norm of the gradient's mean over them, which is what an update is made of.
        """
        with self.plain(), contextlib.ExitStack() as stack:
            for posterior in self.peers.values():
                stack.enter_context(kept_buffers(posterior))
            batch = self.forward(clock)
            found = []
            for name, posterior in self.peers.items():
                values = [term.value(batch, name, options) for term, options in self.state.terms]
                parameters = [p for p in posterior.parameters() if p.requires_grad and p.numel()]
                found.append(torch.stack([norm_and_value(value, parameters, self.world) for value in values]))
            return torch.stack(found)


@contextlib.contextmanager
def kept_buffers(posterior: Posterior) -> Iterator[None]:
    """Put the network's buffers (batch-norm statistics) back after the block."""
    kept = [(buffer, buffer.clone()) for buffer in posterior.network.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
