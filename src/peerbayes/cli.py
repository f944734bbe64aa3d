"""The verbs of the command line, thin. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peerbayes import __version__
from peerbayes.errors import InputError, TrainingError

if TYPE_CHECKING:
    from peerbayes.learning import Job, Loaded, Reporter, Run
    from peerbayes.reporting import Record

app = typer.Typer(
    help="Bayesian networks that learn from one another and know when they do not know.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Changes = Annotated[list[str], typer.Option("--set", help="Change the recipe: stages.0.epochs=5; * stands for all.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Where data sets lie.", envvar="PEERBAYES_DATA", show_default="~/.cache/peerbayes/data"),
]
Seeds = Annotated[str | None, typer.Option(help="Several seeds, such as 0,1,2; a run each.")]


GOES_ON = dict.fromkeys(("train", "distill", "compress"), "; --resume goes on from the last checkpoint")
GOES_ON["sweep"] = "; the same command goes on"


class Engine(enum.Enum):
    """Engines by name."""

    auto = "auto"
    eager = "eager"
    compiled = "compiled"
    captured = "captured"


class Precision(enum.Enum):
    """Types by name."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


AsInTrain = Annotated[Engine, typer.Option(help="How steps are run; see train.")]
PrecisionAsInTrain = Annotated[Precision, typer.Option(help="What networks compute in; see train.")]


class Placement(enum.Enum):
    """Placements by name."""

    auto = "auto"
    device = "device"
    stream = "stream"


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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, figures and the report.")] = Path("demo"),
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2.")] = "0,1,2",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train DNN, Vanilla, DML and Ours on embedded data; print the paper's table, draw the figures."""
    from peerbayes import demo as room

    records = room.run(out, _parse_seeds(seeds), _reporter(quiet))
    _show(records, as_json, many=True)
    if not as_json:
        typer.echo(f"\n{out / 'report.html'}, {out / 'retention.png'}, {out / 'reliability.png'}")


@app.command()
def recipes(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[list | show NAME]", help="list, or show a recipe.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, or show one, complete with its defaults."""
    from peerbayes.learning import load_recipe, packaged

    words = words or ["list"]
    if len(words) > 2 or words == ["show"] or (len(words) == 2 and words[0] != "show"):
        raise InputError(f"recipes {' '.join(words)}: expected 'list' or 'show NAME'")
    if words != ["list"]:
        recipe = load_recipe(words[-1])
        typer.echo(recipe.model_dump_json(indent=1) if as_json else recipe.to_toml())
        return
    found = {key: load_recipe(key) for key in packaged()}
    if as_json:
        typer.echo(json.dumps([{"name": k, "title": r.title, "reproduces": r.reproduces} for k, r in found.items()]))
        return
    width = max(map(len, found))
    for key, recipe in found.items():
        typer.echo(f"{key:<{width}}  {recipe.title}" + (f"  ({recipe.reproduces})" if recipe.reproduces else ""))


@app.command()
def train(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Names or TOML files of recipes.")],
    run: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/RECIPE-seedN")] = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    resume: Resume = False,
    changes: Changes = [],  # noqa: B006
    device: Device = "auto",
    data_root: DataRoot = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints.", show_default="an epoch, at most every 30 s")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="How steps are run: op by op, compiled, or as one CUDA graph (on a GPU).")
    ] = Engine.auto,
    precision: Annotated[
        Precision, typer.Option(help="What networks compute in; auto is bfloat16 where the engine is captured.")
    ] = Precision.auto,
    placement: Annotated[
        Placement, typer.Option(help="Keep the images on the device, or stream them from memory or disk.")
    ] = Placement.auto,
    pack: Annotated[
        int | None,
        typer.Option(min=1, help="Most runs side by side.", show_default="all on a GPU, 1 on a CPU"),
    ] = None,
    synchronise: Annotated[
        bool, typer.Option("--synchronise", help="With torchrun: batch-norm and kernels over all processes.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train recipes into run folders, then judge them on the test split.

    On a GPU several recipes and seeds are trained side by side. Under torchrun all processes train each run together.
    """
    from peerbayes import learning

    if len(set(recipes)) < len(recipes):
        raise InputError(f"train {' '.join(recipes)}: a recipe stands there twice")
    if seeds is not None and seed:
        raise InputError("--seed and --seeds exclude each other")
    found = {recipe: learning.load_recipe(recipe, changes) for recipe in recipes}
    numbers = _parse_seeds(seeds) if seeds is not None else [seed]
    many = seeds is not None or len(found) > 1
    jobs = []
    for name, recipe in found.items():
        for number in numbers:
            folder = learning.default_folder(name, number)
            if run is not None:
                folder = run / (folder.name if len(found) > 1 else f"seed{number}") if many else run
            jobs.append(learning.Job(recipe, folder, number))
    _train_and_show(
        jobs,
        many,
        as_json,
        quiet,
        resume,
        device=device,
        root=data_root,
        engine=engine.value,
        precision=precision.value,
        placement=placement.value,
        checkpoint_every=checkpoint_every,
        pack=pack,
        synchronise=synchronise,
    )


def _train_and_show(
    jobs: list[Job], many: bool, as_json: bool, quiet: bool, resume: bool, before: Sequence[Job] = (), **how: Any
) -> list[Run]:
    """Train jobs, after those ``before``; print what they are worth, return the runs; ends the process on errors."""
    from peerbayes import learning, reporting

    failed: dict[int, TrainingError] = {}
    with learning.joined(how["device"]) as world:
        shared: dict[str, Any] = {"reporter": _reporter(quiet or not world.is_first), "world": world, **how}
        learning.train_jobs(before, resume=True, **shared)
        runs = learning.train_jobs(jobs, errors=failed, resume=resume or world.any(learning.restarted()), **shared)
        first = world.is_first
    # The other processes are done: judging may take longer than they would wait.
    if not first:
        raise typer.Exit(1 if failed else 0)
    finished = [run for place, run in enumerate(runs) if place not in failed]
    loaded, records = learning.Loaded(how["root"]), []
    for done in finished:
        records.append(_judge(done, how["device"], loaded))
        reporting.write_report(done, records[-1])
    if records:
        _show(records, as_json, many=many)
    for error in failed.values():
        print(f"peerbayes: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)
    return finished


@app.command()
def distill(
    runs: Annotated[list[Path], typer.Argument(help="Trained runs, or weights files of runs: the teachers.")],
    into: Annotated[str, typer.Option(help="Recipe of the student; a name or TOML file.")] = "distillation/latentbe",
    run: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/RECIPE-seedN")] = None,
    seed: Seed = 0,
    resume: Resume = False,
    changes: Changes = [],  # noqa: B006
    device: Device = "auto",
    data_root: DataRoot = None,
    engine: AsInTrain = Engine.auto,
    precision: PrecisionAsInTrain = Precision.auto,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Distil trained runs into one plain network, on the data that they have learnt."""
    from peerbayes import learning

    recipe = learning.recipe_into(into, runs, changes)
    job = learning.Job(recipe, run or learning.default_folder(into, seed), seed)
    how: dict[str, Any] = {"device": device, "root": data_root, "engine": engine.value, "precision": precision.value}
    for done in _train_and_show([job], False, as_json, quiet, resume, **how):
        for path in learning.save_networks(done):
            typer.echo(f"one plain network: {path}", err=as_json)


@app.command()
def compress(
    run: Annotated[Path, typer.Argument(help="A trained run with one peer, or a weights file of a run.")],
    into: Annotated[str, typer.Option(help="Recipe of the shared weights; a name or TOML file.")] = "sharing/shared",
    first: Annotated[
        str, typer.Option(help="Recipe that gives a network scales, where the run has none.")
    ] = "sharing/stage1",
    out: Annotated[Path | None, typer.Option("--run", help="Run folder.", show_default="RUN-shared")] = None,
    seed: Seed = 0,
    resume: Resume = False,
    changes: Annotated[
        list[str], typer.Option("--set", help="Change the recipe: peers.0.posterior.components=2000.")
    ] = [],  # noqa: B006
    device: Device = "auto",
    data_root: DataRoot = None,
    engine: AsInTrain = Engine.auto,
    precision: PrecisionAsInTrain = Precision.auto,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let the weights of a trained network share a small codebook of Gaussians, and train that."""
    from peerbayes import learning

    weights = learning.weights_of(run)
    folder = out or weights.parent.with_name(f"{weights.parent.name}-shared")
    how: dict[str, Any] = {"device": device, "root": data_root, "engine": engine.value, "precision": precision.value}
    if learning.kind_of(weights) == "mean_field":
        job = learning.Job(learning.recipe_from(into, weights, changes), folder, seed)
        _train_and_show([job], False, as_json, quiet, resume, **how)
        return
    scaled = folder.with_name(f"{folder.name}-stage1")
    before = learning.Job(learning.recipe_from(first, weights), scaled, seed)
    start = scaled / f"weights-{before.recipe.peers[0].name}.safetensors"
    job = learning.Job(learning.recipe_from(into, weights, changes, start), folder, seed)
    learning.check_jobs([job], resume=resume, **how)
    _train_and_show([job], False, as_json, quiet, resume, [before], **how)


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs over seeds.")],
    draws: Annotated[int | None, typer.Option(min=1, help="Draws averaged.", show_default="the recipe's")] = None,
    settle: Annotated[
        float | None, typer.Option(help="Stop drawing for an image once its class is settled at this error level.")
    ] = None,
    ood: Annotated[
        list[str] | None, typer.Option(help="A data set the peers should be unsure of; may be repeated.")
    ] = None,
    corrupted: Annotated[
        str | None, typer.Option(help="Also on corrupted images: 'made' here, or a folder of CIFAR-C arrays.")
    ] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Also after temperature scaling on the validation split.")
    ] = False,
    device: Device = "auto",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Judge trained runs on their test split; a table over seeds with error bars.

    Judged as its recipe says, without options, a run gets a new evaluation.json and report.html.
    """
    from peerbayes import learning, reporting

    folders = [folder for given in runs for folder in reporting.find_runs(given)]
    how = {"draws": draws, "settle": settle, "out_of_distribution": ood or None, "corrupted": corrupted}
    loaded, records = learning.Loaded(data_root), []
    for run in map(learning.Run, folders):
        records.append(_judge(run, device, loaded, **how))
        if all(option is None for option in how.values()):
            try:
                reporting.write_report(run, records[-1])
            except OSError as error:  # somebody else's run, say: its figures are shown all the same
                print(f"peerbayes: {run.folder}: {error.strerror}; the record is not written", file=sys.stderr)
    _show(records, as_json, len(records) > 1, calibrated)


@app.command()
def size(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders of runs, or weights files of runs.")],
    judged: Annotated[
        bool, typer.Option("--evaluate", help="Also judge the file and every other form on the test split.")
    ] = False,
    device: Device = "auto",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Count what weights files hold and take, beside the same posterior in float32, float16 and few bits."""
    from peerbayes import reporting

    found = [record for run in runs for record in reporting.sizes(run, judged=judged, device=device, root=data_root)]
    typer.echo(json.dumps(found, indent=1) if as_json else "\n\n".join(map(reporting.size_table, found)))


class Sampler(enum.Enum):
    """Samplers by name."""

    grid = "grid"
    tpe = "tpe"


class Objective(enum.Enum):
    """Figures of the validation split by name."""

    nll = "nll"
    accuracy = "accuracy"
    ece = "ece"


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or TOML file.")],
    over: Annotated[
        list[str],
        typer.Option(
            help="What to vary: mutual.alpha=0.5,1,2 or stages.*.optimizer.lr=1e-4:1e-1:log; may be repeated."
        ),
    ],
    seeds: Annotated[str, typer.Option(help="Seeds of every setting, such as 0,1,2.")] = "0,1,2",
    changes: Annotated[
        list[str], typer.Option("--set", help="Change the recipe for all settings: stages.0.epochs=5.")
    ] = [],  # noqa: B006
    sampler: Annotated[
        Sampler | None, typer.Option(help="Every setting, or those that look best.", show_default="grid for lists")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Settings that tpe tries, over all machines.", show_default="20")
    ] = None,
    objective: Annotated[Objective, typer.Option(help="What ranks, on the validation split.")] = Objective.nll,
    validation: Annotated[
        float | None,
        typer.Option(min=0, help="Training images (or fraction) to judge on.", show_default="the recipe's, or 0.1"),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Optuna storage URL that machines share.", show_default="sqlite:///OUT/study.db"),
    ] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study.", show_default="the recipe's")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep.", show_default="sweeps/RECIPE")] = None,
    pack: Annotated[
        int | None, typer.Option(min=1, help="Settings trained side by side.", show_default="4 of a grid on a GPU")
    ] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    engine: AsInTrain = Engine.auto,
    precision: PrecisionAsInTrain = Precision.auto,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rank settings of a recipe by the validation split; the same command again goes on where it was interrupted."""
    from peerbayes import learning, reporting

    found = learning.sweep(
        recipe,
        over,
        seeds=_parse_seeds(seeds),
        changes=changes,
        sampler=None if sampler is None else sampler.value,
        trials=trials,
        objective=objective.value,
        validation=validation,
        storage=storage,
        study=study,
        out=out,
        pack=pack,
        device=device,
        root=data_root,
        engine=engine.value,
        precision=precision.value,
        reporter=_reporter(quiet),
    )
    if as_json:
        typer.echo(json.dumps(found.table, indent=1))
    else:
        typer.echo(reporting.sweep_table(found))
    written = [found.folder / "sweep.json", *reporting.write_sweep_figure(found)]
    if not as_json:
        typer.echo("\n" + ", ".join(map(str, written)))
    if all(row["state"] == "failed" for row in found.table):
        raise typer.Exit(1)


@app.command()
def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="Of alphas: divergence, best-alpha, curves, gap, spread, grid, flatness; of distillation: line, "
            "diversity, perturbations; of shared weights: posterior, bytes; of any runs: confidence, and pipeline, of "
            "all steps that led to one."
        ),
    ],
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, or folders of runs.")] = None,
    out: Annotated[Path | None, typer.Option(help="A .png, .pdf or .svg file.", show_default="NAME.png")] = None,
    by_peer: Annotated[
        bool, typer.Option("--by-peer", help="A line a peer, not their average; for curves and gap.")
    ] = False,
    layer: Annotated[
        str | None, typer.Option(help="Weights of one layer alone, such as fc.weight; for posterior.")
    ] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Draw what alpha does, distillation, or sharing of weights, from runs; --json prints the numbers behind it."""
    from peerbayes import reporting

    options: dict[str, Any] = {"by_peer": by_peer, "layer": layer, "device": device, "root": data_root}
    path, numbers = reporting.write_figure(name, runs or [], out, **options)
    if name == "pipeline" and not as_json:
        typer.echo(reporting.pipeline_table(numbers) + "\n")
    typer.echo(json.dumps(numbers, indent=1) if as_json else str(path))


@app.command()
def bench(
    out: Annotated[Path | None, typer.Option(help="JSON file.", show_default="results/bench-DEVICE.json")] = None,
    only: Annotated[list[str], typer.Option(help="A figure, or growth; may be repeated. Others are kept.")] = [],  # noqa: B006
    quick: Annotated[
        bool, typer.Option("--quick", help="Hardly anything of everything, to see that it works.")
    ] = False,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds after which no measurement is started.")] = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure engines, prediction, memory and growth on random images of CIFAR's shape, beside bayesian-torch."""
    from peerbayes import bench as room

    record, path = room.run(device, out, only, quick, budget, _reporter(quiet))
    from peerbayes.reporting.figures import write_bench_figure  # what was measured is safe by now

    picture = write_bench_figure(path, record)
    if as_json:
        typer.echo(json.dumps(record, indent=1))
        return
    typer.echo("\n".join(_bench_lines(record["figures"], record)))
    typer.echo(f"\n{path}, {picture}")


BENCH_UNITS = {
    "_ms": "ms",
    "small_batch": "ms",
    "memory": "GiB",
    "rate": "image-draws/s",
    "speedup": "×",
    "_over_": "×",
}


def _bench_lines(figures: dict[str, Any], record: Record, above: str = "") -> Iterator[str]:
    for name, value in figures.items():
        key = above + name
        if isinstance(value, dict):
            yield from _bench_lines(value, record, f"{key}.")
            continue
        values = value if isinstance(value, list) else [] if value is None else [value]
        numbers = " and ".join(f"{v:,.0f}" if v >= 1e4 else f"{v:.4g}" for v in values)
        unit = next((unit for part, unit in BENCH_UNITS.items() if part in key), "s")
        spread = record["measurements"].get(key, {}).get("spread") if len(values) == 1 else None
        rest = record["notes"].get(key, "") if spread is None else f"{spread[0]:.4g} to {spread[1]:.4g}"
        yield f"{key:<34} {f'{numbers} {unit}' if values else '-':<24} {rest}".rstrip()


def _judge(run: Run, device: str, loaded: Loaded, **how: Any) -> Record:
    from peerbayes import reporting

    data = loaded(run.recipe, run.folder / "vocabulary.json")
    return reporting.evaluate(run, data=data, device=device, root=loaded.root, **how)


def _show(records: list[Record], as_json: bool, many: bool, calibrated: bool = False) -> None:
    from peerbayes import reporting

    if as_json:
        typer.echo(json.dumps(records if many else records[0], indent=1))
        return
    typer.echo(reporting.text_table(records, calibrated))
    for record in records:
        for peer in record["peers"]:
            if record["settle"] is not None:
                spent = f"{peer['draws_spent']:.1f} of at most {record['draws']} draws an image"
                typer.echo(f"seed {record['seed']} {peer['name']}: {spent}, settled at level {record['settle']}")


def _parse_seeds(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"seeds '{text}': expected whole numbers with commas between, such as 0,1,2") from None
    if len(set(found)) < len(found):
        raise InputError(f"seeds '{text}': a seed stands there twice")
    if min(found) < 0:
        raise InputError(f"seeds '{text}': expected seeds that are 0 or more")
    return found


def _reporter(quiet: bool) -> Reporter:
    from peerbayes.learning import ConsoleReporter, Reporter

    return Reporter() if quiet else ConsoleReporter()


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; bad input is one sentence and exit code 2, a failed training exit code 1."""
    try:
        code = app(arguments, standalone_mode=False) or 0
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
