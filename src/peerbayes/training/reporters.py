"""What a learner tells the person who waits: nothing, warnings, or a live line a stage."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from peerbayes.errors import PeerbayesWarning, printable
from peerbayes.inference.progress import Watcher, watched
from peerbayes.recipes.recipe import Recipe


class Reporter:
    """Says nothing but warnings; the base of the others.

    Example:
        >>> import peerbayes as pb
        >>> class Losses(pb.Reporter):
        ...     def epoch(self, line):
        ...         print(line["step"])
        >>> Losses().epoch({"step": 3})
        3
    """

    def headline(self, text: str) -> None:
        """A run begins."""

    def note(self, text: str) -> None:
        """Say what holds for every run, once."""
        noted: set[str] = self.__dict__.setdefault("_noted", set())
        if text not in noted:
            noted.add(text)
            self.headline(text)

    def begin(self, folder: Path, recipe: Recipe, about: Mapping[str, Any]) -> None:
        """A run begins in its folder, or goes on; ``about`` is what run.json says of it."""

    def stage(self, number: int, count: int, epochs: int, done: int) -> None:
        """A stage begins, or goes on after ``done`` epochs."""

    def epoch(self, line: Mapping[str, Any]) -> None:
        """An epoch has ended; ``line`` is what went to metrics.jsonl."""

    def result(self, folder: Path, record: Mapping[str, Any]) -> None:
        """A finished run has been evaluated; ``record`` is what went to evaluation.json."""

    def beside(self, label: str) -> Reporter:  # noqa: ARG002
        """Return a reporter for one of several runs that go side by side."""
        return self

    def warn(self, text: str) -> None:
        """Something is odd."""
        warnings.warn(text, PeerbayesWarning, stacklevel=3)

    def close(self) -> None:
        """The run has ended or failed."""


class ConsoleReporter(Reporter):
    """A progress bar with loss by term, validation figures and time left; plain lines without a terminal.

    Runs that go side by side have a bar each, one below the other.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> from peerbayes import ConsoleReporter
        >>> told = io.StringIO()
        >>> ConsoleReporter(Console(file=told)).headline("a run begins")
        >>> told.getvalue().strip()
        'a run begins'
    """

    def __init__(self, console: Console | None = None, label: str = "", board: _Board | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._label = label
        self._board = board or _Board(self.console)
        self._noted = self._board.noted
        self._task: TaskID | None = None
        self._every = 1

    def beside(self, label: str) -> Reporter:
        """Return a reporter with a bar of its own."""
        return ConsoleReporter(self.console, f"{label}  ", self._board)

    def headline(self, text: str) -> None:
        """Print what is being trained."""
        self.console.print(printable(text), markup=False, soft_wrap=True)

    def stage(self, number: int, count: int, epochs: int, done: int) -> None:
        """Start a new bar."""
        self.close()
        title = f"{self._label}stage {number}/{count}"
        self._every = max(1, epochs // 10)
        self._title = f"{title}  epochs {epochs}"
        if self.console.is_terminal or self.console.is_jupyter:
            self._task = self._board.add(title, epochs, done)

    def epoch(self, line: Mapping[str, Any]) -> None:
        """Advance the bar, or print every tenth part of a stage."""
        figures = printable(_figures(line))
        if self._task is not None:
            self._board.update(self._task, line["epoch"], figures)
        elif line["epoch"] % self._every == 0:
            text = f"{self._title}  {line['epoch']:>3}  {figures}  {line['seconds']:.0f} s"
            self.console.print(printable(text), markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line that begins with an exclamation mark."""
        self.console.print(printable(f"! {self._label}{text}"), style="yellow", markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._task is not None:
            self._board.end(self._task)
            self._task = None


def usual_reporter() -> Reporter:
    """Return who tells of progress by default: bars on a terminal and in a notebook, where nobody looks nobody."""
    console = Console(file=sys.stderr, highlight=False)
    if console.is_jupyter:  # lines, where what draws bars there is missing
        return ConsoleReporter(console if _has_widgets() else Console(file=sys.stderr, force_jupyter=False))
    return ConsoleReporter(console) if sys.stderr.isatty() else Reporter()


def _has_widgets() -> bool:
    return importlib.util.find_spec("ipywidgets") is not None


@contextlib.contextmanager
def waiting(quiet: bool = False, patience: float = 1.0) -> Iterator[None]:
    """Show the progress of predictions within the block that take longer than ``patience`` seconds.

    On a terminal and in a notebook that is a bar; elsewhere a line after 20 times as long, and after as long again.

    Args:
        quiet: show nothing.
        patience: seconds before the bar is shown.
    """
    console = Console(file=sys.stderr)
    if quiet:
        yield
        return
    if not (console.is_terminal or (console.is_jupyter and _has_widgets())):
        with watched(_Lines(20 * patience)):
            yield
        return
    progress = Progress(console=console, transient=True)
    task = progress.add_task("predicting")

    class Bar(Watcher):
        def begin(self, passes: int) -> None:
            self.since = time.monotonic()
            progress.reset(task, total=passes)

        def advance(self, passes: float) -> None:
            progress.advance(task, passes)
            if time.monotonic() - self.since > patience:
                progress.start()

    try:
        with watched(Bar()):
            yield
    finally:
        progress.stop()


class _Lines(Watcher):
    """Say now and then in a line how much of a prediction is done.

    Args:
        seconds: between two lines, and before the first.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def begin(self, passes: int) -> None:
        """Start anew."""
        self._passes, self._done, self._since = passes, 0.0, time.monotonic()

    def advance(self, passes: float) -> None:
        """Count, and say so if it is time."""
        self._done += passes
        if time.monotonic() - self._since > self.seconds:
            self._since = time.monotonic()
            print(f"predicting: {min(1.0, self._done / self._passes):.0%}", file=sys.stderr, flush=True)


class _Board:
    """The bars of runs that go side by side; shown while there is one that has not ended."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.noted: set[str] = set()
        self._open: set[TaskID] = set()
        self._progress: Progress | None = None

    def add(self, title: str, epochs: int, done: int) -> TaskID:
        """Start a bar."""
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeElapsedColumn(),
                TimeLeft(),
                console=self.console,
            )
            self._progress.start()
        task = self._progress.add_task(printable(title), total=epochs, completed=done, figures="")
        self._open.add(task)
        return task

    def update(self, task: TaskID, done: int, figures: str) -> None:
        """Advance a bar."""
        if self._progress is not None:
            self._progress.update(task, completed=done, figures=figures)

    def end(self, task: TaskID) -> None:
        """Leave a bar as it stands, and all of them with the last one."""
        self._open.discard(task)
        if self._progress is not None:
            self._progress.stop_task(task)
            if not self._open:
                self._progress.stop()
                self._progress = None


def _figures(line: Mapping[str, Any]) -> str:
    peers = list(line["peers"].values())
    names = {term: None for peer in peers for term in peer["terms"]}

    def mean(values: list[float]) -> str:
        return f"{sum(values) / len(values):.3g}"

    summands = " + ".join(f"{n} {mean([p['terms'][n] for p in peers if n in p['terms']])}" for n in names)
    text = f"loss {mean([p['loss'] for p in peers])} = {summands}"
    if all("valid_accuracy" in peer for peer in peers):
        text += f"   valid {mean([p['valid_accuracy'] for p in peers])}"
    return text
