"""The verbs of the command line, thin. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from peerbayes import __version__
from peerbayes.cli.learn import adopt, compress, distill, sweep, train
from peerbayes.cli.look import calibrate, evaluate, figure, judge, predict, recipes, size
from peerbayes.cli.output import say
from peerbayes.cli.ship import export, serve
from peerbayes.cli.try_out import bench, demo, doctor
from peerbayes.errors import InputError, PeerbayesWarning, Stopped, TrainingError
from peerbayes.importing import search_last
from peerbayes.training.interruption import handled, stop

__all__ = ["app", "main"]

app = typer.Typer(
    help="Bayesian networks that learn from one another and know when they do not know.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
RESUMED = ("train", "adopt", "distill", "compress")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"peerbayes {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_TRAINING = (demo, recipes, train, adopt, distill, compress)
for _verb in (*_TRAINING, evaluate, judge, calibrate, predict, export, serve, size, sweep, figure, bench, doctor):
    app.command()(_verb)


@contextlib.contextmanager
def _spoken_warnings() -> Iterator[None]:
    """Print each warning of peerbayes once, as one sentence without its line of code."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", PeerbayesWarning)
        before = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, PeerbayesWarning):
                before(message, category, *place, **more)
            elif str(message) not in shown:
                shown.add(str(message))
                say(f"peerbayes: {message}", err=True)

        warnings.showwarning = show
        yield


def _stopped(error: Stopped, words: list[str]) -> str:
    """Return what ended the command, and how to continue."""
    assert isinstance(error.code, int)
    number = error.code - 128
    reason = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    verb = words[0] if words else ""
    if verb == "sweep":
        return f"{reason}; the same command continues"
    notes = getattr(error, "__notes__", ["resume goes on from the last checkpoint, if any"])
    return f"{reason}; --{notes[0]}" if verb in RESUMED else reason


INSTEAD = {"--epochs": "stages.0.epochs=N", "--data": "data.name=NAME", "--network": "peers.0.network=NAME"}


def _help_of(error: Any, words: list[str]) -> str:
    """Return the help of an option without a value, or the --set line that replaces an option the verb lacks."""
    option = getattr(error, "option_name", None)
    verb = getattr(typer.main.get_command(app), "commands", {}).get(words[0]) if option and words else None
    options = {name for parameter in getattr(verb, "params", ()) for name in parameter.opts}
    if option in INSTEAD and "--set" in options and option not in options:
        return f"; {words[0]} takes --set {INSTEAD[option]}"
    helps = [parameter.help for parameter in getattr(verb, "params", ()) if option in parameter.opts]
    return f" {helps[0]}" if helps and helps[0] else ""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; bad input is one sentence and exit code 2, a failed training exit code 1."""
    if arguments is None and not sys.flags.safe_path:
        search_last("")  # the working folder
    try:
        with handled(stop), _spoken_warnings():
            code = contextvars.copy_context().run(app, arguments, "peerbayes", standalone_mode=False) or 0
            if code == 130:  # typer's word for an interrupt
                raise Stopped(code)
            sys.exit(code)
    except InputError as error:
        say(f"peerbayes: {error}", err=True)
        sys.exit(2)
    except Stopped as error:
        if os.environ.get("RANK", "0") == "0":  # one message for all processes of torchrun
            say(f"peerbayes: {_stopped(error, sys.argv[1:] if arguments is None else arguments)}", err=True)
        sys.exit(error.code)
    except OSError as error:
        if error.filename is None:
            raise
        say(f"peerbayes: {error.filename}: {error.strerror}", err=True)
        sys.exit(2)
    except TrainingError as error:
        say(f"peerbayes: {error}", err=True)
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # The command line is wrong; without any arguments the message is the help.
        message = error.format_message().rstrip() + _help_of(error, sys.argv[1:] if arguments is None else arguments)
        say(message if "\n" in message else f"peerbayes: {message.rstrip('.')}; see --help", err=True)
        sys.exit(2)
