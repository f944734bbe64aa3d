"""How a step is run: op by op, with compiled parts, or captured whole as one CUDA graph.

All three run the same `Cohort.step`. A captured step reads its number from a tensor on the device, so its addresses
advance by themselves from replay to replay.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from peerbayes.choices import Engine, EngineName
from peerbayes.engine.cohort import Cohort
from peerbayes.engine.stages import set_global_seed
from peerbayes.engine.step_parts import Clock, StepFunctions
from peerbayes.engine.verification import verify
from peerbayes.errors import InputError, reason
from peerbayes.math import noise
from peerbayes.math.noise import Address
from peerbayes.networks.running import tried_kernels

WARM_UP = 3
MAX_TEACHER_STREAMS = 4  # how many teachers run beside each other
MAX_STREAMS = 32  # how many different streams torch hands out before it hands them out again


class Eager:
    """One operation after another."""

    name: EngineName = "eager"

    def __init__(self, cohort: Cohort, steps_per_epoch: int) -> None:
        self.cohort, self.steps_per_epoch = cohort, steps_per_epoch

    def begin_stage(self, step: int, stage_step: int) -> None:
        """A stage begins, or goes on at these steps of the run and of the stage.

        Args:
            step: steps since the run began.
            stage_step: steps since the stage began.
        """

    def step(self, step: int, stage_step: int) -> None:
        """Run one step.

        Args:
            step: steps since the run began.
            stage_step: steps since the stage began.
        """
        self.cohort.step(self._clock(step, stage_step))

    def term_norms(self, step: int, stage_step: int) -> Tensor:
        """Return what `Cohort.term_norms` does.

        Args:
            step: steps since the run began.
            stage_step: steps since the stage began.
        """
        return self.cohort.term_norms(self._clock(step, stage_step))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything that a learner asks of the device happens inside such a block."""
        yield

    def _clock(self, step: int, stage_step: int) -> Clock:
        return Clock(step, step % self.steps_per_epoch, stage_step / self.steps_per_epoch)


class Compiled(Eager):
    """The parts of a step are compiled functions."""

    name: EngineName = "compiled"

    def begin_stage(self, step: int, stage_step: int) -> None:
        """Compile, and try a step on copies of the state; what a cohort of the same make has had compiled is taken."""
        self._compile()
        with _kept_state(self.cohort):
            self._rehearse(lambda: self.step(step, stage_step))
            self._verify(self._clock(step, stage_step), step)

    def _rehearse(self, step: Callable[[], None]) -> None:
        """Run a step on one's own, and fail if it fails in any process: those that go on must all go on."""
        failed: BaseException | None = None
        try:
            with _quiet(), self.cohort.apart():
                step()
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            failed = error
        try:
            if self.cohort.world.any(failed is not None):
                raise failed or RuntimeError("it failed in another process")
        finally:
            failed = None  # its traceback holds this frame, and so the engine

    def _compile(self) -> None:
        eager = StepFunctions()
        self.cohort.parts = StepFunctions(
            **{field.name: compiled(getattr(eager, field.name)) for field in fields(eager)}
        )

    def step(self, step: int, stage_step: int) -> None:
        """Run one step."""
        self._reseed(step)
        super().step(step, stage_step)

    def term_norms(self, step: int, stage_step: int) -> Tensor:
        """Return what `Cohort.term_norms` does."""
        self._reseed(step)
        return super().term_norms(step, stage_step)

    def _reseed(self, step: int) -> None:
        """Put torch's generators to the place of a step, for dropout and the like."""
        world = self.cohort.world
        owner = "network" if world.size == 1 else f"network/{world.rank}"  # processes see different images
        set_global_seed(Address(self.cohort.seed, owner, "step", step))

    def _verify(self, clock: Clock, step: int) -> None:
        self._rehearse(lambda: verify(self.cohort, clock, lambda: self._reseed(step)))

    def _clock(self, step: int, stage_step: int) -> Clock:
        # Numbers would be compiled in.
        device = self.cohort.device
        epoch = torch.full((), stage_step / self.steps_per_epoch, device=device)
        return Clock(torch.full((), step, device=device), step % self.steps_per_epoch, epoch)


class Captured(Compiled):
    """The step of the whole cohort as one CUDA graph, each peer on its own stream.

    In float32 it holds the operations of `Eager`, to the last bit; in half precision it is compiled first. Several
    graphs run side by side, each on streams of its own.
    """

    name: EngineName = "captured"

    def __init__(self, cohort: Cohort, steps_per_epoch: int) -> None:
        super().__init__(cohort, steps_per_epoch)
        device = cohort.device
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.stage_number = torch.zeros((), dtype=torch.int64, device=device)
        # One stream for the cohort, one a peer and some for teachers, for good: cuBLAS keeps its scratch space by
        # stream, and two graphs that were captured on one would write into the same.
        self.stream = torch.cuda.Stream(device)
        teachers = min(len(cohort.teachers), MAX_TEACHER_STREAMS) if cohort.teachers is not None else 0
        names = [*cohort.peers, *(f"teacher {number}" for number in range(teachers))]
        self.streams = {name: torch.cuda.Stream(device) for name in names}
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.norms_graph: torch.cuda.CUDAGraph | None = None
        self.alone = False
        self.used = self.stream  # where the last step was

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """On the cohort's own stream; on the common one where torch's global generator is used, which has one state."""
        stream = torch.cuda.current_stream(self.cohort.device) if self.alone else self.stream
        if stream != self.used:
            stream.wait_stream(self.used)
            self.used = stream
        with torch.cuda.stream(stream):
            yield

    def begin_stage(self, step: int, stage_step: int) -> None:
        """Compile, warm up on copies of the state, and capture."""
        cohort, device = self.cohort, self.cohort.device
        if cohort.autocast is not None:
            self._compile()
        cohort.streams = self.streams
        generator = torch.cuda.default_generators[device.index or 0]
        offset, outside = generator.get_offset(), torch.cuda.current_stream(device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream), tried_kernels(cohort.autocast is not None), _kept_state(cohort), _quiet():
            self._set(step, stage_step)
            self._rehearse(self._step)
            if cohort.autocast is not None:
                self._verify(self._device_clock(), step)
            for _ in range(WARM_UP - 1):
                self._step()
            torch.cuda.synchronize(device)
            self.alone = generator.get_offset() != offset
            self.norms_graph = None
            self._set(step, stage_step)
            self.graph, _ = self._capture(self._step)
        outside.wait_stream(self.stream)

    def step(self, step: int, stage_step: int) -> None:  # noqa: ARG002
        """Replay the step."""
        assert self.graph is not None
        if self.alone:
            self._reseed(step)
        self.graph.replay()

    def term_norms(self, step: int, stage_step: int) -> Tensor:
        """Replay the measurement, which is captured when it is first asked for; it is not compiled."""
        if self.norms_graph is None:
            super().term_norms(step, stage_step)
            self.norms_graph, self.norms = self._capture(lambda: self.cohort.term_norms(self._device_clock()))
        if self.alone:
            self._reseed(step)
        self.norms_graph.replay()
        norms: Tensor = self.norms
        return norms

    def _capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.cohort.device)
        with _uncollected(), torch.cuda.graph(graph, stream=self.stream):
            result = function()
        return graph, result

    def _set(self, step: int, stage_step: int) -> None:
        self.number.fill_(step)
        self.stage_number.fill_(stage_step)

    def _device_clock(self) -> Clock:
        return Clock(self.number, self.number % self.steps_per_epoch, self.stage_number / self.steps_per_epoch)

    def _step(self) -> None:
        self.cohort.step(self._device_clock())
        self.number.add_(1)
        self.stage_number.add_(1)


ENGINES: dict[EngineName, type[Eager]] = {"eager": Eager, "compiled": Compiled, "captured": Captured}


def pick(name: Engine, device: torch.device) -> EngineName:
    """Return the engine's name, if the device has what it needs; ``auto`` is captured on a GPU, else eager.

    Args:
        name: what was asked for.
        device: that the run trains on.
    """
    if name == "auto":
        return "captured" if device.type == "cuda" else "eager"
    if name == "captured" and device.type != "cuda":
        raise InputError(f"the captured engine needs a CUDA device, not {device.type}; use eager or compiled")
    return name


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once a process; again for peers of another make, and augmentation for another seed."""
    torch.compiler.assume_constant_result(noise.stream_key)  # hashing can't be traced
    made = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
                return made(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            why = f"torch {torch.__version__} can't compile '{function.__name__}': {reason(cause(error))}"
            raise RuntimeError(why) from error

    return call


def cause(error: BaseException) -> BaseException:
    """Return the error that led to this one, where this one does not say what was wrong."""
    # What fails inside a capture makes its end fail too.
    while isinstance(error.__context__, RuntimeError) and not error.__suppress_context__:
        error = error.__context__
    # A compiler's error begins with a line that names the compiler alone.
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage inside the block: a graph or kernel that is unloaded during a capture makes the capture fail.

    Cohorts that are gone, and what compilers leave behind, are garbage of that kind.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Gradients are summed on the stream where a parameter was first used, which torch finds worth a warning.
        warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
        warnings.filterwarnings("ignore", module=r"torch\._inductor")  # what a compiler tells its authors
        yield


@contextlib.contextmanager
def _kept_state(cohort: Cohort) -> Iterator[None]:
    """Put weights, statistics, helpers, moments and sums back in place after the block."""
    before = {id(t): (t, t.clone()) for t in cohort.tensors()}
    try:
        yield
    finally:
        for optimizer in cohort.state.optimizers.values():
            optimizer.zero_grad()  # of a step that has failed halfway
        with torch.no_grad():
            for tensor in cohort.tensors():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)][1])
                else:
                    tensor.zero_()  # moments that the warm-up has made
