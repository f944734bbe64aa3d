"""Connections of the server: how many stay open, and for how long without a request."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from peerbayes.serving.limits import Limits

CONNECTIONS = 1000  # most that are open at once, where the process may have four times as many files
WAITING = 2048  # connections that the system keeps until they are accepted
PARTING = 10  # seconds that requests in hand have to be answered once the server is told to stop


class Connection(H11Protocol):
    """A connection that is closed unless a whole request head, and the rest of its body, arrive in time.

    uvicorn alone waits for them without end. A connection has ``seconds`` for a request, from its first moment or its
    last answer on. Where more than ``most`` are open, the one that has waited longest for its request is closed.

    Args:
        arguments: of uvicorn.
        seconds: without a request in hand.
        most: connections that are open at once.
        named: arguments of uvicorn by name.
    """

    def __init__(self, *arguments: Any, seconds: float, most: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seconds, self.most = seconds, most
        self._end: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is in hand."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def ends(self) -> float:
        """When it is closed, if it is idle then, on the clock of the loop."""
        return 0.0 if self._end is None else self._end.when()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, and close one where they are too many."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.most:
            connections = [other for other in self.connections if isinstance(other, Connection) and other.idle]
            min(connections, key=lambda other: other.ends).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        if self._end is not None:
            self._end.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()  # first, as uvicorn may begin the next one, or close, which waits for all to be read
        super().on_response_complete()

    def drop(self) -> None:
        """Close it at once, whatever is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        if self._end is not None:
            self._end.cancel()
        self._end = self.loop.call_later(self.seconds, self._late)

    def _late(self) -> None:
        if self.idle:  # else the application has its own time for the answer
            self.drop()


class Server(uvicorn.Server):
    """uvicorn, with limits on connections, at a socket that is bound.

    Args:
        app: what answers.
        listening: the socket.
        limits: of the server.
        ready: is called as soon as connections are accepted.
    """

    def __init__(
        self, app: ASGIApp, listening: socket.socket, limits: Limits, ready: Callable[[], None] | None = None
    ) -> None:
        most = most_connections()
        http: Any = functools.partial(Connection, seconds=limits.seconds, most=most)
        # asyncio accepts as many at once as its backlog, before any is looked at, and thrice again until one is closed
        config = uvicorn.Config(
            app, http=http, backlog=max(1, most // 4), log_level="error", access_log=False, server_header=False,
            timeout_graceful_shutdown=PARTING, ws="none", proxy_headers=False, loop="asyncio",
        )  # fmt: skip
        super().__init__(config)
        self.listening, self.ready = listening, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and say so."""
        await super().startup(sockets)
        self.listening.listen(WAITING)  # those that wait take no file
        if self.ready is not None:
            self.ready()

    def answer(self) -> None:
        """Answer until it is told to stop."""
        self.run(sockets=[self.listening])


def most_connections() -> int:
    """Return how many connections may be open at once: a quarter of the files that the process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else max(4, min(CONNECTIONS, files // 4))
