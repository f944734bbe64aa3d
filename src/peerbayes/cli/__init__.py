"""The verbs of the command line, thin. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from peerbayes import __version__
from peerbayes.cli.learn import compress, distill, sweep, train
from peerbayes.cli.look import calibrate, evaluate, figure, predict, recipes, size
from peerbayes.cli.try_out import bench, demo
from peerbayes.errors import InputError, PeerbayesWarning, TrainingError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Bayesian networks that learn from one another and know when they do not know.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
GOES_ON = dict.fromkeys(("train", "distill", "compress"), "; --resume goes on from the last checkpoint, if any")
GOES_ON["sweep"] = "; the same command goes on"


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


for _verb in (demo, recipes, train, distill, compress, evaluate, calibrate, predict, size, sweep, figure, bench):
    app.command()(_verb)


@contextlib.contextmanager
def _spoken_warnings() -> Iterator[None]:
    """What a person should know is one sentence here, once, without the line of code that it came from."""
    told: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", PeerbayesWarning)
        before = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, PeerbayesWarning):
                before(message, category, *place, **more)
            elif str(message) not in told:
                told.add(str(message))
                print(f"peerbayes: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; bad input is one sentence and exit code 2, a failed training exit code 1."""
    try:
        with _spoken_warnings():
            code = contextvars.copy_context().run(app, arguments, standalone_mode=False) or 0
        if code == 130:  # typer's word for an interrupt
            raise KeyboardInterrupt
        sys.exit(code)
    except InputError as error:
        print(f"peerbayes: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        words = sys.argv[1:] if arguments is None else arguments
        print(f"peerbayes: interrupted{GOES_ON.get(words[0] if words else '', '')}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"peerbayes: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except TrainingError as error:
        print(f"peerbayes: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # The command line itself is wrong; without any words the help is the answer.
        words = error.format_message()
        print(words if "\n" in words else f"peerbayes: {words.rstrip('.')}; see --help", file=sys.stderr)
        sys.exit(2)
