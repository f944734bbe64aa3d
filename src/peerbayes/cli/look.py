"""Verbs that look at recipes, runs and predictions: recipes, evaluate, judge, calibrate, predict, size and figure."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peerbayes.choices import SetMethod
from peerbayes.cli.options import DataRoot, Device, Draws, Json, Trust, recipe_words, run_folders
from peerbayes.cli.output import evaluate_run, placed, say, show, waiting
from peerbayes.errors import InputError
from peerbayes.importing import in_run, trust_runs


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[list | show NAME]", help="list, or show a recipe.", autocompletion=recipe_words),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """List the recipes, or show one, complete with its defaults."""
    from peerbayes.recipes.packaged import packaged
    from peerbayes.recipes.recipe import load_recipe

    trust_runs(trust)
    words = words or ["list"]
    if len(words) > 2 or words == ["show"] or (len(words) == 2 and words[0] != "show"):
        raise InputError(f"recipes {' '.join(words)}: expected 'list' or 'show NAME'")
    if words != ["list"]:
        with in_run():  # a recipe that is shown may be anybody's
            recipe = load_recipe(words[-1])
        say(recipe.model_dump_json(indent=1) if as_json else recipe.to_toml())
        return
    recipes_by_name = {key: load_recipe(key) for key in packaged()}
    if as_json:
        say(json.dumps([{"name": k, "title": r.title, "reproduces": r.reproduces} for k, r in recipes_by_name.items()]))
        return
    width = max(map(len, recipes_by_name))
    for key, recipe in recipes_by_name.items():
        say(f"{key:<{width}}  {recipe.title}" + (f"  ({recipe.reproduces})" if recipe.reproduces else ""))


def evaluate(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of runs over seeds.", autocompletion=run_folders)
    ],
    draws: Draws = None,
    settle: Annotated[
        float | None, typer.Option(help="Stop drawing for an image once its class is settled at this error level.")
    ] = None,
    ood: Annotated[
        list[str] | None, typer.Option(help="A data set the peers should be unsure of; may be repeated.")
    ] = None,
    corrupted: Annotated[
        str | None, typer.Option(help="Also on corrupted images: 'made', 'mixed' (each by one), or CIFAR-C's folder.")
    ] = None,
    averaged: Annotated[
        bool,
        typer.Option(
            "--averaged",
            help="Also in one pass: by the mean weights, or averaged members; and with batch-norm recalibrated.",
        ),
    ] = False,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Also after temperature scaling on the validation split.")
    ] = False,
    retention: Annotated[
        bool, typer.Option("--retention", help="Also the accuracy of the images of lowest entropy and disagreement.")
    ] = False,
    sort_peers: Annotated[
        bool, typer.Option("--sort-peers", help="In the table, peers of each seed by accuracy, the worst first.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also a page of all runs together, such as runs.html.")] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Evaluate trained runs on their test split; a table over seeds with error bars.

    Judged as its recipe says, without options, a run gets a new evaluation.json and report.html. An export stays as it
    is.
    """
    from peerbayes.reports.evaluating import find_runs
    from peerbayes.reports.page import write_page, write_report
    from peerbayes.reports.record import check_page
    from peerbayes.runs.executor import DataCache
    from peerbayes.runs.run import Run

    trust_runs(trust)
    if out is not None:
        check_page(out)
    folders = [folder for given in runs for folder in find_runs(given)]
    for place, folder in enumerate(folders):
        if any(folder.resolve() == other.resolve() for other in folders[:place]):
            raise InputError(f"{folder}: is given twice")
    how: dict[str, Any] = {
        "draws": draws,
        "settle": settle,
        "out_of_distribution": ood or None,
        "corrupted": corrupted,
    }
    loaded, records = DataCache(data_root), []
    opened = [Run(folder) for folder in folders]
    if averaged and not any(peer.posterior.posterior_class.averages for run in opened for peer in run.recipe.peers):
        raise InputError(
            f"--averaged: no peer of {', '.join(map(str, folders))} has weights to average: they are plain networks"
        )
    for run in opened:
        records.append(evaluate_run(run, device, loaded, averaged=averaged, **how))
        if run.exported:
            say(f"peerbayes: {run.folder}: is an export; the record is not written", err=True)
        elif not averaged and all(option is None for option in how.values()):
            try:
                write_report(run, records[-1])
            except OSError as error:  # somebody else's run, say: its figures are shown all the same
                say(f"peerbayes: {run.folder}: {error.strerror}; the record is not written", err=True)
    if out is not None:
        write_page(out, placed(records, folders), "Runs evaluated")
    show(records, as_json, len(records) > 1, folders, calibrated=calibrated, sort_peers=sort_peers, retention=retention)


def judge(
    predictions: Annotated[
        list[Path],
        typer.Argument(help="Files of predictions and labels, .npz or .csv; mine-seed3.npz is seed 3 of 'mine'."),
    ],
    logits: Annotated[bool, typer.Option("--logits", help="The numbers of CSV files are logits.")] = False,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration error.")] = 15,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Also after temperature scaling on the files' validation split.")
    ] = False,
    retention: Annotated[
        bool, typer.Option("--retention", help="Also the accuracy of the inputs of lowest entropy and disagreement.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The page with table and figures.")] = Path("judged.html"),
    as_json: Json = False,
) -> None:
    """Judge predictions of any library as evaluate judges runs: table, paired differences, and a page.

    A .npz file has probabilities, log_probabilities or logits (N, C), or (S, N, C) of S draws, and labels (N,); a .csv
    file a column 'label' and a column of probabilities for each class. Files of one method are seeds of it.
    """
    from peerbayes.reports.judging import judge as judged
    from peerbayes.reports.page import write_page
    from peerbayes.reports.record import check_page

    check_page(out)
    records = judged(*predictions, logits=logits, bins=bins)
    for record in records if calibrated else ():
        if "cnll" not in record["peers"][0]:
            raise InputError(f"{record['folder']}: has no validation_labels, on which a temperature could be chosen")
    write_page(out, records, "Predictions judged")
    show(records, as_json, len(records) > 1, calibrated=calibrated, retention=retention)


def calibrate(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or weights files of runs.", autocompletion=run_folders)
    ],
    coverage: Annotated[
        float | None, typer.Option(help="Promise sets of classes that hold the true one with this probability.")
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Promise that at most this share of the answers is wrong; others are abstained from."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Chance that the risk is larger all the same.")] = 0.1,
    method: Annotated[
        SetMethod, typer.Option(help="Sets: lac has the smallest, aps and raps leave none empty.")
    ] = "lac",
    by_class: Annotated[
        bool, typer.Option("--by-class", help="Promise both for every class, which takes more images.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set with a validation split that nothing was learnt of or chosen by.", show_default="the run's"
        ),
    ] = None,
    draws: Draws = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Fit temperatures on the validation split, and keep them with the weights; training does so at its end.

    Predictions are calibrated by them from then on; evaluation is not. With --coverage or --risk a quarter of the split
    fits the temperature, and the rest shows the promise, whose certificate is kept, too: predict with the same options.
    An earlier promise that is not named is kept if it was made by the same images and draws. Of several runs none is
    changed unless all can be.
    """
    from peerbayes.api.calibrating import calibrate_runs
    from peerbayes.inference.guarantees import Promises
    from peerbayes.runs.run import peers_at
    from peerbayes.showing import aligned

    trust_runs(trust)
    records: list[dict[str, Any]] = []
    told: list[str] = []
    promises = Promises(coverage, risk, delta, method, by_class)
    with waiting():
        calibrated = calibrate_runs(runs, data, promises, draws=draws, device=device, root=data_root)
    for path, run in zip(runs, calibrated, strict=True):
        _, names = peers_at(path)
        records.append({"run": str(path), "peers": {name: run[name].temperature for name in names}})
        if len(names) > 1:
            records[-1]["ensemble"] = run.temperature
        certificate = run[names[0]].certificate if names != list(run) else run.certificate
        if certificate is not None:
            records[-1]["certificate"] = certificate.model_dump(exclude_none=True)
            told += [f"{path}: {line}" for line in certificate.describe(run.about.get("class_names"))]
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        return
    lines = [["run", "peer", "temperature"]]
    for record in records:
        temperatures = record["peers"] | ({"ensemble": record["ensemble"]} if "ensemble" in record else {})
        lines += [[record["run"], name, f"{value:.3f}"] for name, value in temperatures.items()]
    say("\n".join([*aligned(lines, 2), *told]))


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, whose peers predict as one, or a weights file of a run.", autocompletion=run_folders
        ),
    ],
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Image files, folders of them, or a CSV file with a column 'path'; for texts: text files, one a line, "
            "CSV files, or texts."
        ),
    ],
    coverage: Annotated[
        float | None, typer.Option(help="Also sets of classes that hold the true one with this probability.")
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Also what to abstain from, so that at most this share of the answers is wrong."),
    ] = None,
    draws: Draws = None,
    form: Annotated[
        Literal["table", "csv", "jsonl"],
        typer.Option("--format", help="A table; CSV; or JSON lines, with the probabilities of all classes."),
    ] = "table",
    raw: Annotated[bool, typer.Option("--raw", help="Without the temperature that is kept with the weights.")] = False,
    device: Device = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Predict new images or texts: their classes, and how unsure the network is of them.

    Entropy (in nats) is how unsure it is altogether, disagreement the part of it in which draws and peers differ. CSV
    and JSON lines are written as predictions are made, of any number of inputs. --coverage and --risk are promises that
    `peerbayes calibrate` has made.
    """
    from peerbayes.reports.predictions import predictions_at
    from peerbayes.showing import aligned

    trust_runs(trust)
    how: dict[str, Any] = {"coverage": coverage, "risk": risk, "draws": draws, "calibrated": not raw}
    batches = predictions_at(run, inputs, **how, device=device)
    with waiting():
        if as_json:
            say(json.dumps([record for batch in batches for record in batch.records()], indent=1))
        elif form == "jsonl":
            for batch in batches:
                sys.stdout.writelines(json.dumps(record) + "\n" for record in batch.records())
        elif form == "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            for number, batch in enumerate(batches):
                if number == 0:
                    writer.writerow(batch.columns)
                writer.writerows(zip(*batch.columns.values(), strict=True))
        else:
            lines: list[list[str]] = []
            for batch in batches:
                lines += batch.rows()[bool(lines) :]  # the headings once
            say("\n".join(aligned(lines, 2)))


def size(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, folders of runs, or weights files of runs.", autocompletion=run_folders),
    ],
    judged: Annotated[
        bool, typer.Option("--evaluate", help="Also evaluate the file and every other form on the test split.")
    ] = False,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Count what weights files hold and take, beside the same posterior in float32, float16 and few bits."""
    from peerbayes.reports.file_sizes import size_table, sizes

    trust_runs(trust)
    how: dict[str, Any] = {"judged": judged, "device": device, "root": data_root}
    with waiting():
        records = [record for run in runs for record in sizes(run, **how)]
    say(json.dumps(records, indent=1) if as_json else "\n\n".join(map(size_table, records)))


def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="Of alphas: divergence, best-alpha, curves, gap, spread, grid, flatness; of distillation: line, "
            "diversity, perturbations; of shared weights: posterior, bytes; of any runs: confidence, entropy, and "
            "pipeline, of all steps that led to one."
        ),
    ],
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of runs.", autocompletion=run_folders)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A .png, .pdf or .svg file.", show_default="NAME.png")] = None,
    by_peer: Annotated[
        bool, typer.Option("--by-peer", help="Each peer, not their average or all as one; for curves, gap, entropy.")
    ] = False,
    layer: Annotated[
        str | None, typer.Option(help="Weights of one layer alone, such as fc.weight; for posterior.")
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="A data set from elsewhere; may be repeated; for entropy.", show_default="the recipes'"),
    ] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Draw what alpha does, distillation, or sharing of weights, from runs; --json prints the numbers behind it."""
    from peerbayes.papers.catalogue import write_figure
    from peerbayes.papers.pipeline import pipeline_table

    trust_runs(trust)
    options: dict[str, Any] = {
        "by_peer": by_peer,
        "layer": layer,
        "ood": ood or [],
        "device": device,
        "root": data_root,
    }
    with waiting():
        path, numbers = write_figure(name, runs or [], out, **options)
    if name == "pipeline" and not as_json:
        say(pipeline_table(numbers) + "\n")
    say(json.dumps(numbers, indent=1) if as_json else str(path))
