"""The server: a socket, the application, and a clean end."""

from __future__ import annotations

import ipaddress
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.serving.limits import Limits
from peerbayes.training.interruption import handled


def serve(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    draws: int | None = None,
    limits: Limits | None = None,
    device: str = "auto",
    trust: bool = False,
    ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serve a run until a signal ends it.

    Args:
        path: a run folder, an export, a weights file of a run, or a repository of the Hugging Face hub.
        host: address to listen at.
        port: to listen at; 0 for any that is free.
        draws: of each peer; by default as many as its certificate is of, or its recipe evaluates with.
        limits: what a request may hold.
        device: where to predict.
        trust: allow what the run's recipe names as ``package.module:name``.
        ready: is told the name of what is served and its address, as soon as it is.
    """
    try:
        import fastapi  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(f"serve needs {error.name}: pip install 'peerbayes[serve]'") from None
    from PIL.Image import DecompressionBombWarning

    from peerbayes.serving.app import LOCAL, make_app
    from peerbayes.serving.connections import Server
    from peerbayes.serving.served import Served

    limits = limits or Limits()
    with _bound(host, port) as listening:  # before anything is loaded, which takes longer
        served = Served.open(path, draws=draws, device=device, trust=trust)
        local = _is_local(host)
        if not local:
            warnings.warn(
                f"anybody who reaches {host} can ask this server, and it asks nobody who they are; leave out --host to "
                "be asked from this machine alone",
                PeerbayesWarning,
                stacklevel=2,
            )
        app = make_app(served, limits, tuple(dict.fromkeys((*LOCAL, host))) if local else None)

        def tell() -> None:
            if ready is not None:
                name, number = listening.getsockname()[:2]
                ready(app.title, f"http://{f'[{name}]' if ':' in name else name}:{number}")

        server = Server(app, listening, limits, tell)
        with (
            handled(server.handle_exit),  # which uvicorn hands a signal back to, when it has ended
            warnings.catch_warnings(action="ignore", category=DecompressionBombWarning),  # the answer says it
        ):
            server.answer()


def _bound(host: str, port: int) -> socket.socket:
    where = f"port {port} of {host}"
    if not 0 <= port < 1 << 16:
        raise InputError(f"port is {port}, expected 0 to 65535")
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InputError(f"host '{host}': there is no such address ({error})") from None
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1)  # so that nobody else can; uvicorn listens for more
    except OSError as error:
        listening.close()
        raise InputError(f"{where} can't be listened at ({error.strerror}); take another one by --port, or 0 for any "
                         "that is free") from None  # fmt: skip
    return listening


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
