"""Define the errors and warnings that users see: one sentence that names what is wrong and what was expected."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

# What terminals act upon, but for tabs and ends of lines, and what turns the direction of a line.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class InputError(ValueError):
    """Invalid input: a value, file or key that the user gave.

    The command line prints the sentence and exits with code 2.

    Example:
        >>> from peerbayes import InputError, network
        >>> from peerbayes.networks import build
        >>> try:
        ...     build("resnet2", inputs=None)
        ... except InputError as error:
        ...     print(error)
        there is no network 'resnet2'; did you mean 'resnet32'?
    """


class UnknownPeer(InputError, KeyError):
    """A run has no peer of that name; also a `KeyError`, which mappings raise."""

    __str__ = Exception.__str__  # KeyError would quote the sentence


class OptionError(InputError):
    """An invalid option; the sentence begins with its key, which `within` completes to a full path."""


class TrainingError(RuntimeError):
    """Training cannot continue; the last good checkpoint, if any, is kept. The command line exits with code 1."""


class OutOfMemory(TrainingError):
    """The device is out of memory."""


class Stopped(SystemExit):
    """A signal has ended the process; the exit code is 128 and the signal's number."""


class PeerbayesWarning(UserWarning):
    """Something that looks like a mistake, although the computation continues.

    Example:
        >>> import warnings
        >>> from peerbayes import PeerbayesWarning
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warnings.warn("term 'mutual' is inert", PeerbayesWarning)
        >>> print(caught[0].message)
        term 'mutual' is inert
    """


@contextlib.contextmanager
def within(prefix: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """Prefix the sentence of an `InputError` raised inside the block with where it happened.

    Args:
        prefix: where: a recipe's key, for instance.
        kind: the error that is raised instead.
    """
    try:
        yield
    except InputError as error:
        raise kind(f"{prefix}{'.' if isinstance(error, OptionError) else ': '}{error}") from error


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return a hint at what was meant: ``"; did you mean 'x'?"`` for a close candidate, else the list of candidates.

    Args:
        word: what was given.
        candidates: what would be valid.
    """
    candidates = sorted(candidates)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.65)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(candidates)}" if candidates else ""


def reason(error: BaseException) -> str:
    """Return the first line of an exception's message, after the exception's type unless the line is a sentence."""
    kind, text = type(error).__name__, next(iter(str(error).strip().splitlines()), "")
    if text and isinstance(error, RuntimeError | ValueError | ImportError | OSError):
        return text
    return f"{kind}: {text}" if text else kind


def printable(text: str) -> str:
    """Return a text for a terminal, which obeys no name in it: the escape character becomes ``\\u001b``."""
    return _UNSEEN.sub(lambda character: f"\\u{ord(character[0]):04x}", text)
