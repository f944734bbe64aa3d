"""Several cohorts side by side, a step each in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from peerbayes.errors import OutOfMemory, TrainingError, reason
from peerbayes.training.interruption import SignalGuard

if TYPE_CHECKING:
    from peerbayes.training.learner import Learner

ASK_EVERY = 8  # steps after which processes ask one another whether a signal has come


def run_together(
    learners: Sequence[Learner], on_end: Callable[[int], None] = lambda _: None
) -> dict[int, TrainingError]:
    """Train several cohorts side by side, a step each in turn; on a GPU captured steps overlap.

    A signal that ends the process is held back until a step is made; then every cohort writes a checkpoint.

    Args:
        learners: on one device, or each on its own.
        on_end: called with the place of a learner as soon as it has reached its end.

    Returns:
        Errors by place of the learners that could not go on; the others have reached their end.
    """
    devices = list({learner.device for learner in learners if learner.device.type == "cuda"})
    errors: dict[int, TrainingError] = {}
    guard = SignalGuard()
    with torch.random.fork_rng(devices), guard.listening(), contextlib.ExitStack() as stack:
        running = {index: learner.steps() for index, learner in enumerate(learners)}
        for learner, steps in zip(learners, running.values(), strict=True):
            stack.callback(learner.feed.close)  # also of one that never began
            stack.callback(steps.close)  # type: ignore[attr-defined]
        while running:
            if _ends(guard, [learners[index] for index in running]):
                guard.end(_save_all([learners[index] for index in running]))
            for index in list(running):
                learner = learners[index]
                try:
                    with learner.engine.running():
                        if next(running[index], "end") is None:
                            guard.defers |= learner.position.step > 0
                            continue
                    if learner.device.type == "cuda":
                        torch.cuda.synchronize(learner.device)
                    on_end(index)
                except TrainingError as error:
                    errors[index] = error
                except torch.OutOfMemoryError as error:
                    errors[index] = OutOfMemory(
                        f"the memory of {learner.device} is used up at step {learner.position.step} ({reason(error)}); "
                        "the last checkpoint is kept: take smaller batches, or stream the images (--placement stream)"
                    )
                del running[index]
        if guard.signal is not None:  # it came in the last step
            guard.end("")
    return errors


def _ends(guard: SignalGuard, learners: Sequence[Learner]) -> bool:
    """Whether training ends here; all processes come to the same answer after the same step."""
    if learners[0].world.size == 1:
        return guard.signal is not None
    return learners[0].position.step % ASK_EVERY == 0 and learners[0].world.any(guard.signal is not None)


def _save_all(learners: Sequence[Learner]) -> str:
    """Write a checkpoint of each; return how to go on, nothing where not all can."""
    kept = []
    for learner in learners:
        with learner.engine.running():
            kept.append(learner.save_if_needed())
    return f"resume goes on from step {learners[0].position.step}" if all(kept) else ""
