"""Import ``package.module:name`` from users' recipes, and from run folders only if they are trusted."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from peerbayes.errors import InputError, reason

_IN_RUN: ContextVar[bool] = ContextVar("in_run", default=False)
_TRUSTED: ContextVar[bool] = ContextVar("trusted", default=False)
_ALLOWED: set[str] = set()  # what the user's recipes and trusted run folders have named in this process
_LAST: list[str] = []  # folders that only allowed imports search, after all others; "" is the working folder


@contextlib.contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Allow imports that run folders name inside the block if ``trust``; an outer block's trust stays in force."""
    token = _TRUSTED.set(trust or _TRUSTED.get())
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def trust_runs(trust: bool) -> None:
    """Allow imports that run folders name for the rest of this context if ``trust`` is true."""
    _TRUSTED.set(trust or _TRUSTED.get())


@contextlib.contextmanager
def in_run() -> Iterator[None]:
    """Treat names inside the block as those of a run folder, whose imports have to be allowed."""
    token = _IN_RUN.set(True)
    try:
        yield
    finally:
        _IN_RUN.reset(token)


def search_last(folder: str) -> None:
    """Search a folder for modules after all others, for allowed imports only."""
    _LAST.append(folder)


def allow(path: str, what: str) -> None:
    """Allow ``package.module:name`` in this process, unless an untrusted run folder names it.

    Args:
        path: ``package.module:name``.
        what: what it should be, a network say; begins the error.

    Raises:
        InputError: it comes from a run folder that is not trusted.
    """
    if _IN_RUN.get() and not _TRUSTED.get() and path not in _ALLOWED:
        module_name, _, _ = path.partition(":")
        raise InputError(
            f"{what} '{path}' would import the module '{module_name}' and run its code; if you trust this run folder, "
            "add --trust (in Python: peerbayes.load(folder, trust=True))"
        )
    _ALLOWED.add(path)


def imported(path: str, what: str) -> Any:
    """Return the object that ``package.module:name`` names.

    Args:
        path: ``package.module:name``.
        what: what it should be, a network say; begins the error.

    Raises:
        InputError: it may not be imported, or the import fails.
    """
    allow(path, what)
    sys.path += [folder for folder in _LAST if folder not in sys.path]
    module_name, _, attribute = path.partition(":")
    hint = ""
    try:
        module = importlib.import_module(module_name)
        near = difflib.get_close_matches(
            attribute, [name for name, value in vars(module).items() if callable(value)], 1
        )
        hint = f"; did you mean '{module_name}:{near[0]}'?" if near else ""
        return getattr(module, attribute)
    except Exception as error:  # a module may do anything while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            hint = "; install it, or name its folder in PYTHONPATH"
        raise InputError(f"{what} '{path}' can't be imported: {reason(error)}{hint}") from error
