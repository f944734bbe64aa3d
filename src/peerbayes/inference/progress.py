"""Who is told how far predictions are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class Watcher:
    """Is told how far predictions are, in images times draws; by itself it does nothing."""

    def begin(self, passes: int) -> None:
        """A prediction of so many begins, or begins anew."""

    def advance(self, passes: int) -> None:
        """So many more are done."""


_NOBODY = Watcher()
watcher_now: ContextVar[Watcher] = ContextVar("watcher_now", default=_NOBODY)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher how far all predictions within the block are."""
    before = watcher_now.set(watcher)
    try:
        yield
    finally:
        watcher_now.reset(before)
