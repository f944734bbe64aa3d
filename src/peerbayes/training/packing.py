"""Several cohorts side by side, a step each in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from peerbayes.errors import OutOfMemory, TrainingError, reason

if TYPE_CHECKING:
    from peerbayes.training.learner import Learner


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
                    errors[place] = OutOfMemory(
                        f"the memory of {learner.device} is used up at step {learner.position.step} ({reason(error)}); "
                        "the last checkpoint is kept: take smaller batches, or stream the images (--placement stream)"
                    )
                del running[place]
    return errors
