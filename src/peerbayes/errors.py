"""The errors that users see: a sentence that names the file, key or tensor and what was expected."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

# What terminals act upon, but for tabs and ends of lines, and what turns the direction of a line.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


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


class Stopped(SystemExit):
    """A signal has ended the process; the exit code is 128 and the signal's number."""


class PeerbayesWarning(UserWarning):
    """Something that is gone on with, but that a person should know."""


@contextlib.contextmanager
def within(place: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """Put the place, a recipe's key say, before what an `InputError` inside the block says; raise one of ``kind``."""
    try:
        yield
    except InputError as error:
        raise kind(f"{place}{'.' if isinstance(error, OptionError) else ': '}{error}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or the list of known words."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""


def reason(error: BaseException) -> str:
    """Return the first line of what an exception says, with its kind unless that line is a sentence by itself."""
    kind, text = type(error).__name__, next(iter(str(error).strip().splitlines()), "")
    if text and isinstance(error, RuntimeError | ValueError | ImportError | OSError):
        return text
    return f"{kind}: {text}" if text else kind


def printable(text: str) -> str:
    """Return a text for a terminal, which obeys no name in it: the escape character becomes ``\\u001b``."""
    return _UNSEEN.sub(lambda character: f"\\u{ord(character[0]):04x}", text)
