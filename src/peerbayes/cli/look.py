"""Verbs that read recipes, runs and predictions: recipes, evaluate, judge, calibrate, predict, size and figure."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
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
        typer.Argument(
            metavar="[list [TEXT] | show NAME]",
            help="List the general recipes, or those with a text in their names, or show one.",
            autocompletion=recipe_words,
        ),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """List the recipes, or show one with all its defaults.

    The general ones come first, for your data; those of the papers are listed by a part of their names.
    """
    from peerbayes.recipes.packaged import packaged
    from peerbayes.recipes.recipe import load_recipe

    trust_runs(trust)
    words = words or ["list"]
    if len(words) > 2 or words == ["show"] or (len(words) == 2 and words[0] not in ("list", "show")):
        raise InputError(f"recipes {' '.join(words)}: expected 'list', 'list TEXT' or 'show NAME'")
    if words[0] != "list":
        with in_run():  # a shown recipe may come from anybody
            recipe = load_recipe(words[-1])
        say(recipe.model_dump_json(indent=1) if as_json else recipe.to_toml())
        return
    text = words[1] if len(words) == 2 else None
    names = [name for name in packaged() if (text in name if text is not None else as_json or "/" not in name)]
    if not names:
        raise InputError(f"no recipe has '{text}' in its name; see 'peerbayes recipes list'")
    listed = {name: load_recipe(name) for name in names}
    if as_json:
        say(json.dumps([{"name": k, "title": r.title, "reproduces": r.reproduces} for k, r in listed.items()]))
        return
    width = max(map(len, listed))
    for name, recipe in listed.items():
        say(f"{name:<{width}}  {recipe.title}" + (f"  ({recipe.reproduces})" if recipe.reproduces else ""))
    if text is None:
        families = Counter(name.split("/")[0] for name in packaged() if "/" in name)
        say("\nOf the papers, and what they are compared with; `peerbayes recipes list mutual` lists a family:")
        for family, count in families.items():
            say(f"{family + '/':<{width}}  {count} recipes")


def evaluate(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of runs over seeds.", autocompletion=run_folders)
    ],
    draws: Draws = None,
    settle: Annotated[
        float | None, typer.Option(help="Stop drawing for an image once its class is certain at this error level.")
    ] = None,
    ood: Annotated[list[str] | None, typer.Option(help="An out-of-distribution data set; may be repeated.")] = None,
    corrupted: Annotated[
        str | None,
        typer.Option(help="Also on corrupted images: 'made', 'mixed' (one corruption each), or a folder of CIFAR-C."),
    ] = None,
    averaged: Annotated[
        bool,
        typer.Option(
            "--averaged",
            help="Also in one pass: mean weights or averaged members, also with recalibrated batch-norm.",
        ),
    ] = False,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Also after temperature scaling on the validation split.")
    ] = False,
    retention: Annotated[
        bool, typer.Option("--retention", help="Also the accuracy of the images of lowest entropy and disagreement.")
    ] = False,
    sort_peers: Annotated[
        bool, typer.Option("--sort-peers", help="Sort the peers of each seed by accuracy in the table, worst first.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write one page of all runs, such as runs.html.")] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Evaluate trained runs on their test split, in a table over seeds with error bars.

    Without options that change its recipe's evaluation, a run gets a new evaluation.json and report.html. An export is
    not changed.
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
    for index, folder in enumerate(folders):
        if any(folder.resolve() == other.resolve() for other in folders[:index]):
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
            f"--averaged: no peer of {', '.join(map(str, folders))} has weights to average: all are plain networks"
        )
    for run in opened:
        records.append(evaluate_run(run, device, loaded, averaged=averaged, **how))
        if run.exported:
            say(f"peerbayes: {run.folder}: is an export; the record is not written", err=True)
        elif not averaged and all(option is None for option in how.values()):
            try:
                write_report(run, records[-1])
            except OSError as error:  # a read-only run, say: its figures are still shown
                say(f"peerbayes: {run.folder}: {error.strerror}; the record is not written", err=True)
    if out is not None:
        write_page(out, placed(records, folders), "Runs evaluated")
    show(records, as_json, len(records) > 1, folders, calibrated=calibrated, sort_peers=sort_peers, retention=retention)


def judge(
    predictions: Annotated[
        list[Path],
        typer.Argument(help="Files of predictions and labels, .npz or .csv; mine-seed3.npz is seed 3 of 'mine'."),
    ],
    logits: Annotated[bool, typer.Option("--logits", help="CSV files hold logits, not probabilities.")] = False,
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
    """Evaluate predictions of any library as runs are evaluated: a table, paired differences, and a page.

    An .npz file has probabilities, log_probabilities or logits (N, C), or (S, N, C) for S draws, and labels (N,). A
    .csv file has a column 'label' and a column of probabilities for each class. Files of one method are its seeds.
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
        float | None, typer.Option(help="Promise sets that hold the true class with this probability.")
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Promise that at most this share of the answers is wrong, by abstaining from others."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Probability that the risk is larger than promised.")] = 0.1,
    method: Annotated[
        SetMethod, typer.Option(help="Sets: lac has the smallest, aps and raps have no empty ones.")
    ] = "lac",
    by_class: Annotated[
        bool, typer.Option("--by-class", help="Promise both for every class, which needs more images.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="Labelled data that were not used to train or choose anything.", show_default="the run's"),
    ] = None,
    draws: Draws = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Fit temperatures on the validation split and store them with the weights, as training does at its end.

    Later predictions use them; evaluation does not. With --coverage or --risk a quarter of the split fits the
    temperature, and the rest certifies the promise: predict with the same options. An earlier promise is kept if it
    was made by the same images and draws. Several runs are changed only if all can be.
    """
    from peerbayes.api.calibrating import calibrate_runs
    from peerbayes.inference.guarantees import Promises
    from peerbayes.runs.run import peers_at
    from peerbayes.showing import aligned

    trust_runs(trust)
    records: list[dict[str, Any]] = []
    sentences: list[str] = []
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
            sentences += [f"{path}: {line}" for line in certificate.describe(run.about.get("class_names"))]
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        return
    lines = [["run", "peer", "temperature"]]
    for record in records:
        temperatures = record["peers"] | ({"ensemble": record["ensemble"]} if "ensemble" in record else {})
        lines += [[record["run"], name, f"{value:.3f}"] for name, value in temperatures.items()]
    say("\n".join([*aligned(lines, 2), *sentences]))


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, whose peers predict as an ensemble, or a weights file of a run.",
            autocompletion=run_folders,
        ),
    ],
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Image files, folders, or a CSV file with a column 'path'; for texts: text files with one a line, CSV "
            "files, or the texts."
        ),
    ],
    coverage: Annotated[
        float | None, typer.Option(help="Also sets that hold the true class with this probability.")
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Also abstain, so that at most this share of the answers is wrong."),
    ] = None,
    draws: Draws = None,
    form: Annotated[
        Literal["table", "csv", "jsonl"],
        typer.Option("--format", help="A table; CSV; or JSON lines, with the probabilities of all classes."),
    ] = "table",
    raw: Annotated[bool, typer.Option("--raw", help="Without the fitted temperature.")] = False,
    device: Device = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Predict classes of new images or texts, with their uncertainty.

    Entropy (in nats) is the total uncertainty, disagreement the part of it in which draws and peers differ. CSV and
    JSON lines are written as predictions are made, for any number of inputs. --coverage and --risk need a certificate
    of `peerbayes calibrate`.
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
        bool, typer.Option("--evaluate", help="Also evaluate the file and every rounded form on the test split.")
    ] = False,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Count numbers and bytes of weights files, compared with the same posterior in float32, float16 and few bits."""
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
            help="For alphas: divergence, best-alpha, curves, gap, spread, grid, flatness; for distillation: line, "
            "diversity, perturbations; for shared weights: posterior, bytes; for any runs: confidence, entropy, and "
            "pipeline (all steps that led to a run)."
        ),
    ],
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of runs.", autocompletion=run_folders)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A .png, .pdf or .svg file.", show_default="NAME.png")] = None,
    by_peer: Annotated[
        bool, typer.Option("--by-peer", help="Each peer, not their average or ensemble; for curves, gap, entropy.")
    ] = False,
    layer: Annotated[
        str | None, typer.Option(help="Weights of one layer only, such as fc.weight; for posterior.")
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(
            help="An out-of-distribution data set; may be repeated; for entropy.", show_default="the recipes'"
        ),
    ] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Draw a figure of runs: mutual learning by alpha, distillation, or weight sharing; --json prints its numbers."""
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
