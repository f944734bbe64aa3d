"""How jobs are run: device, engine, precision, and how many side by side."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from peerbayes.choices import Engine, Placement, Precision
from peerbayes.engine.engines import STREAMS, TEACHERS, pick
from peerbayes.engine.processes import ALONE, World, pick_device
from peerbayes.errors import InputError, nearest
from peerbayes.runs.loggers import loggers_named
from peerbayes.training.reporters import Reporter, usual_reporter

if TYPE_CHECKING:
    from peerbayes.runs.plan import Node


@dataclass(frozen=True)
class How:
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

    def place(self) -> torch.device:
        """Return the device."""
        return pick_device(self.device) if self.world.size == 1 else self.world.device(self.device)

    @contextlib.contextmanager
    def speaking(self, reporter: Reporter | None) -> Iterator[Reporter]:
        """Yield who speaks for this process: nobody in all but the first, which says the same.

        Loggers are closed at the end of the block, but for those of a reporter that has them already.
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

    def waves(self, nodes: Sequence[Node], device: torch.device) -> list[Sequence[Node]]:
        """Return runs in groups that are trained side by side.

        Args:
            nodes: runs that wait for none of each other.
            device: that they are trained on.
        """
        captured = pick(self.engine, device) == "captured"
        taught = TEACHERS if any(node.teachers for node in nodes) else 0
        streams = max((len(node.recipe.peers) for node in nodes), default=1) + 1 + taught
        most = max(1, STREAMS // streams) if captured else len(nodes) or 1
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
    """Refuse keyword arguments that neither `How` nor the functions know; the first of them was called.

    Args:
        options: names of the keyword arguments.
        functions: the one that was called, and those that take what it passes on.
    """
    arguments = (name for function in functions for name in inspect.signature(function).parameters if name != "how")
    known = {*arguments, *(field.name for field in fields(How))}
    for option in options:
        if option not in known:
            raise InputError(f"{functions[0].__name__} has no option '{option}'{nearest(option, known)}")


class _Mute(Reporter):
    """Of a process that is not the first."""

    def warn(self, text: str) -> None:
        """Say nothing."""
