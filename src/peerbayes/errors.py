"""The errors that users see: a sentence that names the file, key or tensor and what was expected."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """Something the user gave is wrong. The command line prints the sentence and exits with code 2."""


class UnknownPeer(InputError, KeyError):
    """A run has no peer of that name; a `KeyError` too, as mappings raise."""

    __str__ = Exception.__str__  # a KeyError's would put quotes around the sentence


class OptionError(InputError):
    """An option is wrong; the sentence begins with its key, of which `within` makes a full one."""


class TrainingError(RuntimeError):
    """Training cannot go on; the last good checkpoint, if there is one, is kept. The command line exits with code 1."""


class OutOfMemory(TrainingError):
    """The device's memory is used up."""


class PeerbayesWarning(UserWarning):
    """Something that is gone on with, but that a person should know."""


@contextlib.contextmanager
def within(prefix: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """Put the place, a recipe's key say, before what an `InputError` inside the block says; raise one of ``kind``."""
    try:
        yield
    except InputError as error:
        raise kind(f"{prefix}{'.' if isinstance(error, OptionError) else ': '}{error}") from error


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or the list of known words."""
    candidates = sorted(candidates)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.65)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(candidates)}" if candidates else ""


def reason(error: BaseException) -> str:
    """Return the first line of what an exception says, with its kind unless that line is a sentence by itself."""
    kind, text = type(error).__name__, next(iter(str(error).strip().splitlines()), "")
    if text and isinstance(error, RuntimeError | ValueError | ImportError | OSError):
        return text
    return f"{kind}: {text}" if text else kind
