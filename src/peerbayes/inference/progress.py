"""Who is told how far predictions are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class Watcher:
    """Is told how far predictions are, in images times draws; by itself it does nothing."""

    def begin(self, passes: int) -> None:
        """A prediction of so many begins, or begins anew."""

    def advance(self, passes: float) -> None:
        """So many more are done."""


class Share(Watcher):
    """A part of a longer prediction, whose own watcher counts otherwise.

    Args:
        whole: who watches all of it.
        size: how much of the whole the part is.
    """

    def __init__(self, whole: Watcher, size: float) -> None:
        self.whole, self.size = whole, size
        self._passes, self._told = 1, 0.0

    def begin(self, passes: int) -> None:
        """Take back what was told, if it begins anew."""
        self.whole.advance(-self._told)
        self._passes, self._told = passes, 0.0

    def advance(self, passes: float) -> None:
        """Tell the whole its share."""
        self._told += passes * self.size / self._passes
        self.whole.advance(passes * self.size / self._passes)


NOBODY = Watcher()
watcher_now: ContextVar[Watcher] = ContextVar("watcher_now", default=NOBODY)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher how far all predictions within the block are."""
    before = watcher_now.set(watcher)
    try:
        yield
    finally:
        watcher_now.reset(before)
