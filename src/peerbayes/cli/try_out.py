"""Verbs that try the library: demo, doctor and bench."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peerbayes.cli.options import DataRoot, Device, Json, Quiet, parse_seeds
from peerbayes.cli.output import reporter, say

if TYPE_CHECKING:
    from peerbayes.reports.record import Record

BENCH_UNITS = {
    "_ms": "ms",
    "small_batch": "ms",
    "memory": "GiB",
    "rate": "image-draws/s",
    "speedup": "×",
    "_over_": "×",
}


def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, records and the report.")] = Path("demo"),
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2.")] = "0,1,2,3",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Adopt plain networks on embedded data, and compare with a temperature and an ensemble in a table and a page."""
    from peerbayes import demo as room

    records = room.run(out, parse_seeds(seeds), reporter(quiet))
    if as_json:
        say(json.dumps(records, indent=1))
    else:
        say(f"{room.text(records)}\n\n{out / 'report.html'}")


def doctor(data_root: DataRoot = None, as_json: Json = False) -> None:
    """List versions, devices and data sets, with the line that installs what is missing.

    The exit code is 1 if a requirement is missing or broken.
    """
    from peerbayes import doctor as room

    record = room.examine(data_root)
    say(json.dumps(record, indent=1) if as_json else room.text(record))
    if not record["works"]:
        raise typer.Exit(1)


def bench(
    out: Annotated[Path | None, typer.Option(help="JSON file.", show_default="results/bench-DEVICE.json")] = None,
    only: Annotated[
        list[str], typer.Option(help="A figure, or growth, sharing...; may be repeated. The file keeps the others.")
    ] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test: a few steps of every measurement.")] = False,
    student: Annotated[
        str | None,
        typer.Option(help="Network of distillation's students.", show_default="wrn28x1, or resnet8"),
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds after which no measurement starts.")] = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure engines, prediction, memory and growth on random CIFAR-shaped images, compared with bayesian-torch."""
    from peerbayes.bench import measuring, ratios

    record, path = measuring.run(device, out, only, quick, budget, reporter(quiet), student)
    from peerbayes.reports.figures import write_bench_figure

    picture = write_bench_figure(path, record)
    if as_json:
        say(json.dumps(record, indent=1))
        return
    figures = dict(_leaves(record["figures"]))
    timed = [key for key in figures if key not in ratios.SOURCES]
    shown = {key: value for key, value in figures.items() if not only or ratios.follows(key, only, timed)}
    say("\n".join(_bench_lines(shown, record)))
    say(f"\n{path}, {picture}")


def _leaves(figures: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield above + name, value


def _bench_lines(figures: dict[str, Any], record: Record) -> Iterator[str]:
    for key, value in figures.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        numbers = " and ".join(f"{v:,.0f}" if v >= 1e4 else f"{v:.4g}" for v in values)
        unit = next((unit for part, unit in BENCH_UNITS.items() if part in key), "s")
        spread = record["measurements"].get(key, {}).get("spread") if len(values) == 1 else None
        rest = record["notes"].get(key, "") if spread is None else f"{spread[0]:.4g} to {spread[1]:.4g}"
        yield f"{key:<34} {f'{numbers} {unit}' if values else '-':<24} {rest}".rstrip()
