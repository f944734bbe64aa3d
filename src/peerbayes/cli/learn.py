"""Verbs that train: train, distill, compress and sweep."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peerbayes.choices import Engine, Objective, Placement, Precision, Sampler
from peerbayes.cli.options import (
    AsInTrain,
    Changes,
    CheckpointEvery,
    DataRoot,
    Device,
    DryRun,
    Json,
    Log,
    PrecisionAsInTrain,
    Quiet,
    Resume,
    Seed,
    Seeds,
    Trust,
    parse_seeds,
    recipe_names,
    run_folders,
)
from peerbayes.cli.output import evaluate_run, reporter, say, show, show_plan
from peerbayes.errors import InputError, TrainingError
from peerbayes.importing import trust_runs

if TYPE_CHECKING:
    from peerbayes.recipes.recipe import Recipe
    from peerbayes.runs.executor import DataCache
    from peerbayes.runs.plan import Job
    from peerbayes.runs.run import Run


DATA_HELP = "An image folder, texts (.csv, .json), an .npz file, or the name of a data set."


def train(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE...]",
            help="Names or TOML files of recipes.",
            autocompletion=recipe_names,
            show_default="peers for images, text for texts, with --data",
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help=DATA_HELP, show_default="the recipe's")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Network of all peers: timm/NAME, mymodule:build or one of ours.", show_default="the recipe's"
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Total epochs; milestones and warm-up scale in proportion.", show_default="the recipe's"
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder.", show_default="runs/RECIPE-seedN; with --data runs/RECIPE-DATA-seedN"),
    ] = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    changes: Changes = [],  # noqa: B006
    device: Device = "auto",
    data_root: DataRoot = None,
    checkpoint_every: CheckpointEvery = None,
    engine: Annotated[
        Engine, typer.Option(help="How steps are run: op by op, compiled, or as one CUDA graph (on a GPU).")
    ] = "auto",
    precision: Annotated[
        Precision, typer.Option(help="Precision of networks; auto is bfloat16 with the captured engine.")
    ] = "auto",
    placement: Annotated[
        Placement, typer.Option(help="Keep the images on the device, or stream them from memory or disk.")
    ] = "auto",
    pack: Annotated[
        int | None,
        typer.Option(min=1, help="Runs trained side by side.", show_default="32 // (peers + 1) on a GPU, 1 on a CPU"),
    ] = None,
    synchronise: Annotated[
        bool,
        typer.Option("--synchronise", help="With torchrun: statistics of batch-norm and kernels over all processes."),
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
    log: Log = "",
    quiet: Quiet = False,
) -> None:
    """Train recipes, or the default recipe on --data, and evaluate the runs on their test split.

    On a GPU several recipes and seeds are trained side by side. Under torchrun all processes train each run together.
    """
    from peerbayes.api.fitting import job_for
    from peerbayes.recipes.packaged import packaged
    from peerbayes.recipes.recipe import is_recipe
    from peerbayes.runs.executor import DataCache
    from peerbayes.runs.run import default_folder

    trust_runs(trust)
    if not recipes and data is None:
        raise InputError("train: name a recipe (see 'peerbayes recipes list'), or give images or texts: --data FOLDER")
    recipes = recipes or []
    for given in map(Path, recipes):
        images = given.is_dir() and not is_recipe(str(given)) and not (given / "recipe.toml").exists()
        if images or given.suffix in (".csv", ".npz", ".json"):
            raise InputError(f"train {given}: expected a recipe; data are given by --data {given}")
    if len(set(recipes)) < len(recipes):
        raise InputError(f"train {' '.join(recipes)}: a recipe is given twice")
    if seeds is not None and seed:
        raise InputError("--seed and --seeds exclude each other")
    numbers = parse_seeds(seeds) if seeds is not None else [seed]
    many = seeds is not None or len(recipes) > 1
    options: dict[str, Any] = {"data": data, "network": network, "epochs": epochs, "overrides": changes}
    jobs, data_sets = [], DataCache(data_root)
    names: list[str | None] = [*recipes] or [None]
    for name in names:
        for number in numbers:
            folder = run
            if run is None and name is not None and name not in packaged():  # whose folder is named by its path
                folder = default_folder(name, number)
            elif run is not None and many:
                folder = run / (default_folder(name, number).name if name and len(recipes) > 1 else f"seed{number}")
            jobs.append(job_for(name, folder, number, data_sets=data_sets, **options))
    _train_and_show(
        jobs,
        many,
        as_json,
        quiet,
        resume,
        dry_run,
        data_sets,
        device=device,
        root=data_root,
        engine=engine,
        precision=precision,
        placement=placement,
        checkpoint_every=checkpoint_every,
        pack=pack,
        synchronise=synchronise,
        log=log,
    )


def _train_and_show(
    jobs: list[Job],
    many: bool,
    as_json: bool,
    quiet: bool,
    resume: bool,
    dry_run: bool,
    loaded: DataCache | None = None,
    **how: Any,
) -> list[Run]:
    """Train jobs, print their records and return the runs; exit on errors. Each data set is loaded once."""
    from peerbayes.engine.processes import joined, restarted
    from peerbayes.reports.page import write_report
    from peerbayes.runs import executor
    from peerbayes.runs.plan import resolve
    from peerbayes.runs.session import RunOptions

    loaded = loaded or executor.DataCache(how["root"])
    if dry_run:
        show_plan(executor.dry_run(resolve(jobs), RunOptions(**how), resume=resume, loaded=loaded), as_json)
        return []
    failed: dict[int, TrainingError] = {}
    with contextlib.ExitStack() as stack:
        with joined(how["device"]) as world:
            first = world.is_first
            progress = stack.enter_context(RunOptions(world=world, **how).reporting(reporter(quiet or not first)))
            for job in jobs if resume else ():
                if not (job.folder / "recipe.toml").is_file():  # scripts always pass --resume; people may have mistyped
                    progress.headline(f"{job.folder}: no run to resume, starting a new one")
            shared: dict[str, Any] = {"reporter": progress, "world": world, "loaded": loaded, **how}
            runs = executor.train_jobs(jobs, errors=failed, resume=resume or world.any(restarted()), **shared)
        # The other processes are done: evaluating may take longer than they would wait.
        if not first:
            raise typer.Exit(1 if failed else 0)
        finished = [run for index, run in enumerate(runs) if index not in failed]
        records = []
        for done in finished:
            records.append(evaluate_run(done, how["device"], loaded, quiet))
            write_report(done, records[-1])
            progress.result(done.folder, records[-1])
    if records:
        show(records, as_json, many, folders=[done.folder for done in finished])
        for done in finished:
            progress.headline(f"{done.folder}: weights, report.html; {_next(done.folder, done.recipe)}")
    for error in failed.values():
        say(f"peerbayes: {error}", err=True)
    if failed:
        raise typer.Exit(1)
    return finished


def _next(folder: Path, recipe: Recipe) -> str:
    """Return what to do with a run now; a recipe that names somebody's own code has to be trusted."""
    named = [name for peer in recipe.peers for name in (peer.network, peer.posterior.kind)]
    named += [name for stage in recipe.stages for name in stage.terms]
    return f"next: peerbayes predict {folder} FILES" + " --trust" * any(":" in name for name in named)


def adopt(
    checkpoint: Annotated[Path, typer.Argument(help="Trained weights: a .safetensors, .pt or .pth file.")],
    data: Annotated[str, typer.Option(help=DATA_HELP)],
    network: Annotated[
        str | None, typer.Option(help="The network of the weights: timm/NAME, or mymodule:build.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of all runs.", show_default="runs/adopted-NAME")] = None,
    peers: Annotated[int, typer.Option(help="2: also train two networks that teach each other.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each run.")] = 5,
    extra_epochs: Annotated[
        bool, typer.Option("--extra-epochs", help="Also train the plain network for as many more epochs.")
    ] = False,
    distill: Annotated[
        bool, typer.Option("--distill", help="Also distil the Bayesian network into a plain one.")
    ] = False,
    compress: Annotated[
        bool, typer.Option("--compress", help="Also store the Bayesian network in a small codebook.")
    ] = False,
    width: Annotated[
        list[float] | None,
        typer.Option(help="Width of scales to try; may be repeated.", show_default="0.1, 0.2, 0.4"),
    ] = None,
    new_head: Annotated[
        bool, typer.Option("--new-head", help="Start a new head if the file's has another number of classes.")
    ] = False,
    normalize: Annotated[
        str,
        typer.Option(
            help="How the network expects its images: imagenet, data, none, or MEAN,STD (two numbers, or means of all "
            "channels and then deviations)."
        ),
    ] = "auto",
    corrupted: Annotated[
        str, typer.Option(help="Also evaluate corrupted images: mixed, made (75 times as many), a folder, or none.")
    ] = "mixed",
    seed: Seed = 0,
    resume: Resume = False,
    dry_run: DryRun = False,
    changes: Changes = [],  # noqa: B006
    device: Device = "auto",
    data_root: DataRoot = None,
    checkpoint_every: CheckpointEvery = None,
    engine: AsInTrain = "auto",
    precision: PrecisionAsInTrain = "auto",
    as_json: Json = False,
    log: Log = "",
    quiet: Quiet = False,
) -> None:
    """Make a trained network Bayesian: try a temperature, scales and peers, and recommend which to ship.

    The recommendation is made on validation images.
    """
    from peerbayes import adopting
    from peerbayes.networks.normalisation import read_choice
    from peerbayes.runs.session import RunOptions

    how: dict[str, Any] = {"device": device, "root": data_root, "engine": engine, "precision": precision}
    how |= {"checkpoint_every": checkpoint_every, "log": log}
    settings: dict[str, Any] = {
        "name": network,
        "peers": peers,
        "epochs": epochs,
        "extra_epochs": extra_epochs,
        "widths": tuple(width) if width else adopting.WIDTHS,
        "new_head": new_head,
        "normalize": read_choice(normalize),
        "seed": seed,
        "overrides": changes,
    }
    smaller = [form for form, wanted in zip(adopting.SMALLER, (distill, compress), strict=True) if wanted]
    if dry_run:
        folder = run or adopting.default_adopted(checkpoint)
        adoption = adopting.Adoption(checkpoint, data, folder, root=data_root, **settings)
        show_plan(adopting.plan_rows(adoption, RunOptions(**how), resume, smaller), as_json)
        return
    progress = reporter(quiet)
    adopted = adopting.adopt(
        checkpoint,
        data=data,
        run=run,
        corrupted=None if corrupted == "none" else corrupted,
        smaller=smaller,
        resume=resume,
        reporter=progress,
        **settings,
        **how,
    )
    typer.echo(json.dumps(adopted.record, indent=1) if as_json else str(adopted))
    progress.headline(f"{adopted.folder}: all runs, adopted.json; {_next(adopted.folder, adopted.best.recipe)}")


def distill(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="The teachers: trained runs, weights files of runs, or recipes.", autocompletion=run_folders
        ),
    ],
    into: Annotated[
        str | None,
        typer.Option(
            help="Recipe of the student; a name or TOML file.",
            autocompletion=recipe_names,
            show_default="distil for one Bayesian network, distillation/latentbe for several teachers",
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/RECIPE-seedN")] = None,
    seed: Seed = 0,
    resume: Resume = False,
    dry_run: DryRun = False,
    changes: Changes = [],  # noqa: B006
    device: Device = "auto",
    data_root: DataRoot = None,
    checkpoint_every: CheckpointEvery = None,
    engine: AsInTrain = "auto",
    precision: PrecisionAsInTrain = "auto",
    trust: Trust = False,
    as_json: Json = False,
    log: Log = "",
    quiet: Quiet = False,
) -> None:
    """Distil trained runs into one plain network, on the data of the runs."""
    from peerbayes.api.distilling import default_recipe, recipe_into, save_networks
    from peerbayes.runs.plan import Job
    from peerbayes.runs.run import default_folder

    trust_runs(trust)
    into = into or default_recipe(runs)
    recipe = recipe_into(into, runs, changes)
    job = Job(recipe, run or default_folder(into, seed), seed)
    how: dict[str, Any] = {"device": device, "root": data_root, "engine": engine, "precision": precision}
    how |= {"checkpoint_every": checkpoint_every, "log": log}
    for done in _train_and_show([job], False, as_json, quiet, resume, dry_run, **how):
        for path in save_networks(done):
            say(f"one plain network: {path}", err=as_json)


def compress(
    run: Annotated[
        Path,
        typer.Argument(help="A trained run with one peer, or a weights file of a run.", autocompletion=run_folders),
    ],
    into: Annotated[
        str, typer.Option(help="Recipe of the shared weights; a name or TOML file.", autocompletion=recipe_names)
    ] = "sharing/shared",
    first: Annotated[
        str,
        typer.Option(help="Recipe that learns scales if the run has none.", autocompletion=recipe_names),
    ] = "sharing/stage1",
    out: Annotated[Path | None, typer.Option("--run", help="Run folder.", show_default="RUN-shared")] = None,
    seed: Seed = 0,
    resume: Resume = False,
    dry_run: DryRun = False,
    changes: Annotated[
        list[str],
        typer.Option("--set", help="Change the recipe --into: peers.0.posterior.components=2000."),
    ] = [],  # noqa: B006
    device: Device = "auto",
    data_root: DataRoot = None,
    checkpoint_every: CheckpointEvery = None,
    engine: AsInTrain = "auto",
    precision: PrecisionAsInTrain = "auto",
    trust: Trust = False,
    as_json: Json = False,
    log: Log = "",
    quiet: Quiet = False,
) -> None:
    """Compress a trained network into a small codebook of Gaussians, and train the codebook."""
    from peerbayes.api.compressing import compression

    trust_runs(trust)
    job = compression(run, into, first, changes, out, seed)
    how: dict[str, Any] = {"device": device, "root": data_root, "engine": engine, "precision": precision}
    how |= {"checkpoint_every": checkpoint_every, "log": log}
    _train_and_show([job], False, as_json, quiet, resume, dry_run, **how)


def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or TOML file.", autocompletion=recipe_names)],
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
        Sampler | None,
        typer.Option(help="grid: every setting; tpe: the most promising ones.", show_default="grid for lists"),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Settings that tpe tries, over all machines.", show_default="20")
    ] = None,
    objective: Annotated[Objective, typer.Option(help="Figure of the validation split that ranks settings.")] = "nll",
    validation: Annotated[
        float | None,
        typer.Option(min=0, help="Training images (or fraction) to evaluate on.", show_default="the recipe's, or 0.1"),
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
    engine: AsInTrain = "auto",
    precision: PrecisionAsInTrain = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rank settings of a recipe on the validation split; the same command continues an interrupted sweep."""
    from peerbayes.studies import sweeps
    from peerbayes.studies.sweep_report import sweep_table, write_sweep_figure

    swept = sweeps.sweep(
        recipe,
        over,
        seeds=parse_seeds(seeds),
        changes=changes,
        sampler=sampler,
        trials=trials,
        objective=objective,
        validation=validation,
        storage=storage,
        study=study,
        out=out,
        pack=pack,
        device=device,
        root=data_root,
        engine=engine,
        precision=precision,
        reporter=reporter(quiet),
    )
    if as_json:
        say(json.dumps(swept.table, indent=1))
    else:
        say(sweep_table(swept))
    written = [swept.folder / "sweep.json", *write_sweep_figure(swept)]
    if not as_json:
        say("\n" + ", ".join(map(str, written)))
    if all(row["state"] == "failed" for row in swept.table):
        raise typer.Exit(1)
