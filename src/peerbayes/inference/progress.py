"""Progress callbacks for long predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class Watcher:
    """Progress callback, counted in images times draws; this base class does nothing."""

    def begin(self, passes: int) -> None:
        """Handle the start, or restart, of a prediction of ``passes``."""

    def advance(self, passes: float) -> None:
        """Handle ``passes`` more."""


class Share(Watcher):
    """Scale the progress of a part to its share of a longer prediction.

    Args:
        whole: watcher of the longer prediction.
        size: what the part adds to it.
    """

    def __init__(self, whole: Watcher, size: float) -> None:
        self.whole, self.size = whole, size
        self._passes, self._reported = 1, 0.0

    def begin(self, passes: int) -> None:
        """Take back what was reported before a restart."""
        self.whole.advance(-self._reported)
        self._passes, self._reported = passes, 0.0

    def advance(self, passes: float) -> None:
        """Report the part's share."""
        self._reported += passes * self.size / self._passes
        self.whole.advance(passes * self.size / self._passes)


NOBODY = Watcher()
watcher_now: ContextVar[Watcher] = ContextVar("watcher_now", default=NOBODY)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the progress of all predictions within the block to a watcher."""
    before = watcher_now.set(watcher)
    try:
        yield
    finally:
        watcher_now.reset(before)
