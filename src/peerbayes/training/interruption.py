"""Signals that end the process wait until the step that is being made is finished and kept."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from peerbayes.errors import Stopped

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
# A terminal and torchrun both hand on one Ctrl-C; a second one of a person who can't wait comes later.
IMPATIENCE = 1.0


def stop(number: int, _frame: Any = None) -> None:
    """End the process at once, as a handler of a signal.

    Args:
        number: of the signal.
        _frame: not used.
    """
    raise Stopped(128 + number)


@contextlib.contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Handle signals that would end the process, within the block; those that others handle or ignore are theirs.

    Yields:
        the handlers that stand back, by signal; none outside the main thread, which alone hears signals.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
        before = {n: f for n, f in before.items() if f in (signal.SIG_DFL, signal.default_int_handler, stop)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class SignalGuard:
    """Hold back a signal that would end the process until the step that is being made is finished.

    Attributes:
        signal: the number of the signal that was held back; None where none has come.
        defers: whether signals are held back; before the first step they end the process at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.defers = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for signals within the block; they are held back as soon as ``defers`` is true."""
        with handled(self._hear) as self._before:
            yield

    def _hear(self, number: int, _frame: Any) -> None:
        again = self.signal is not None
        if not self.defers or (again and number == signal.SIGINT and time.monotonic() - self._since > IMPATIENCE):
            self._let_go(number)
        if not again:
            self.signal, self._since = number, time.monotonic()

    def _let_go(self, number: int) -> None:
        previous = self._before.get(number)
        (previous if callable(previous) else stop)(number, None)

    def end(self, note: str) -> None:
        """End as the signal would have ended the process; ``note`` goes with the exception."""
        try:
            self._let_go(signal.SIGTERM if self.signal is None else self.signal)
        except BaseException as error:
            if note:
                error.add_note(note)
            raise
