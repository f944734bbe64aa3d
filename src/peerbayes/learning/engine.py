"""How a step is run: op by op, with compiled networks, or captured whole as one CUDA graph.

All three run the same `Learner.body`. A captured step reads its number from a tensor on the device, so its addresses
advance by themselves from replay to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from peerbayes import noise
from peerbayes.errors import InputError
from peerbayes.learning.stages import set_global_seed
from peerbayes.networks import capture
from peerbayes.noise import Address
from peerbayes.posteriors import Posterior

if TYPE_CHECKING:
    from peerbayes.learning.loop import Learner

Name = Literal["eager", "compiled", "captured"]
Forward = Callable[[Tensor, Address], tuple[Tensor, dict[str, Tensor], Tensor, Tensor | None]]
WARM_UP = 3


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


class Eager:
    """One operation after another."""

    name: Name = "eager"

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def begin_stage(self) -> None:
        """A stage begins, or goes on."""

    def step(self) -> None:
        """Run one step."""
        self.learner.step_now()


class Compiled(Eager):
    """Noise, draw and network of each peer are one compiled function; the rest as in `Eager`."""

    name: Name = "compiled"

    def begin_stage(self) -> None:
        """Compile the peers' forward passes anew: a stage may take other features."""
        learner = self.learner
        learner.forwards = {
            name: compiled_forward(posterior, learner.layers, learner.autocast)
            for name, posterior in learner.peers.items()
        }

    def step(self) -> None:
        """Run one step; a measurement of gradient shares runs beside it, op by op."""
        if self.learner.measures_now:
            self.learner.measure_now()
        self.learner.body(self.learner.clock)


class Captured(Compiled):
    """The compiled step of the whole cohort as one CUDA graph, each peer on its own stream."""

    name: Name = "captured"

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self.step_number = torch.zeros((), dtype=torch.int64, device=learner.device)
        self.stage_step = torch.zeros((), dtype=torch.int64, device=learner.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def begin_stage(self) -> None:
        """Compile, warm up on copies of the state, and capture."""
        super().begin_stage()
        learner = self.learner
        learner.streams = {name: torch.cuda.Stream(learner.device) for name in learner.peers}
        learner.epoch_order()
        self._set_clock()
        with _kept_state(learner):
            side = torch.cuda.Stream(learner.device)
            side.wait_stream(torch.cuda.current_stream(learner.device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._body()
            torch.cuda.current_stream(learner.device).wait_stream(side)
            torch.cuda.synchronize(learner.device)
        self._set_clock()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._body()

    def step(self) -> None:
        """Replay the step; a measurement of gradient shares runs beside it as in `Compiled`."""
        assert self.graph is not None
        learner = self.learner
        learner.epoch_order()
        if learner.measures_now:
            learner.measure_now()
        set_global_seed(Address(learner.seed, "network", "step", learner.position.step))
        self.graph.replay()

    def _set_clock(self) -> None:
        self.step_number.fill_(self.learner.position.step)
        self.stage_step.fill_(self.learner.position.stage_step)

    def _body(self) -> None:
        per_epoch = self.learner.steps_per_epoch
        place, epoch = self.step_number % per_epoch, self.stage_step / per_epoch
        self.learner.body(Clock(self.step_number, place, epoch))
        self.step_number.add_(1)
        self.stage_step.add_(1)


def compiled_forward(posterior: Posterior, layers: list[str], autocast: torch.dtype | None) -> Forward:
    """Return a function from (images, address) to logits, features, flat weights and their scales, compiled as one."""
    count = posterior.noise_size
    # A table instead of arange(...) * constant: inductor gives small ranges 32 bits, which the constant does not fit.
    table = noise.index_table(count, posterior.device)

    def forward(images: Tensor, start: Tensor, table: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None]:
        eps = noise.normal_from(start, table, count) if count else None
        flat, std = posterior.place(eps)
        with (
            torch.autocast(images.device.type, autocast, enabled=autocast is not None),
            capture(posterior.network, layers) as found,
        ):
            logits = posterior.run_network(images, posterior.named(flat))
        return logits.float(), [found[layer].float() for layer in layers], flat, std

    compiled = torch.compile(forward)

    def call(images: Tensor, address: Address) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor | None]:
        logits, features, flat, std = compiled(images, noise.start(address, posterior.device), table)
        return logits, dict(zip(layers, features, strict=True)), flat, std

    return call


@contextmanager
def _kept_state(learner: Learner) -> Iterator[None]:
    """Put weights, statistics, helpers, moments and sums back in place after the block."""
    before = {id(t): (t, t.clone()) for t in learner.state_tensors()}
    yield
    for tensor in learner.state_tensors():
        with torch.no_grad():
            if id(tensor) in before:
                tensor.copy_(before[id(tensor)][1])
            else:
                tensor.zero_()  # moments and sums that the warm-up has made


def pick(name: Name | Literal["auto"], device: torch.device) -> Name:
    """Return the engine's name, if the device has what it needs; ``auto`` is ``eager``."""
    if name == "captured" and device.type != "cuda":
        raise InputError(f"the captured engine needs a CUDA device, not {device.type}; use eager or compiled")
    return "eager" if name == "auto" else name
