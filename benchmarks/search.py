"""Search settings of the default recipe, one factor at a time and then together, by NLL on the validation split.

    python benchmarks/search.py cifar100-resnet20                                   # lists the factors
    python benchmarks/search.py cifar100-resnet20 base lr-0.05 alpha-1 --epochs 40 --data-root data --out found.json
    python benchmarks/search.py cifar100-resnet20 base lr-0.2+alpha-1 --epochs 100 --seeds 0,1 --out found.json

`base` changes nothing, and + joins factors. On a GPU all that is named is trained side by side. The test split is never
looked at. The same command again goes on where it was interrupted, and rows are added to the file that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peerbayes import metrics
from peerbayes.api.fitting import job_for
from peerbayes.data.splits import Split
from peerbayes.engine.processes import environment, pick_device
from peerbayes.errors import TrainingError
from peerbayes.inference.prediction import mean_of
from peerbayes.metrics import paired_difference
from peerbayes.runs.executor import DataCache, train_jobs
from peerbayes.runs.run import Run

DRAWS = 16
MUTUAL, OPTIMIZER, POSTERIOR = "stages.0.terms.mutual", "stages.0.optimizer", "peers.*.posterior"
FEATURES = "{{ weight = {weight}, layers = ['stage2', 'stage3'], fusion = '{fusion}', kernel = '{kernel}' }}"


def _features(fusion: str, kernel: str = "cosine", weight: float = 2.0) -> str:
    return "stages.0.terms.feature_diversity=" + FEATURES.format(fusion=fusion, kernel=kernel, weight=weight)


@dataclass(frozen=True)
class Search:
    """A recipe, and factors that change it by name.

    Attributes:
        recipe: that is changed.
        factors: what each sets; ``{quarter}`` stands for a quarter of the epochs.
    """

    recipe: str
    factors: Mapping[str, Sequence[str]]


RATES: dict[str, list[str]] = {
    **{f"lr-{value}": [f"{OPTIMIZER}.lr={value}"] for value in ("0.05", "0.2", "0.4")},
    **{f"decay-{value}": [f"{OPTIMIZER}.weight_decay={value}"] for value in ("2.5e-4", "1e-3")},
}
PEERS: dict[str, list[str]] = {
    "base": [],
    **RATES,
    **{f"scale-lr-{value}": [f"{OPTIMIZER}.scale_lr={value}"] for value in ("0.01", "1.0")},
    "sigma-steps": [f"{OPTIMIZER}.scale_space=sigma", f"{OPTIMIZER}.scale_lr=1e-3"],
    "adam": [f"{OPTIMIZER}={{ name = 'adamw', lr = 2e-3, weight_decay = 0.05 }}"],
    "clip-5": [f"{OPTIMIZER}.clip=5.0"],
    **{f"rho{value}": [f"{POSTERIOR}.rho={value}.0"] for value in ("-7", "-6", "-4", "-3")},
    "points": ["peers.*.posterior={ kind = 'point' }", "stages.0.terms.kl.weight=0.0"],
    **{f"kl-{value}": [f"stages.0.terms.kl.weight={value}"] for value in ("0.0", "1.0", "10.0")},
    **{
        f"elbo-{value}": ["stages.0.terms.kl={ scheme = 'elbo', weight = " + value + " }"]
        for value in ("0.001", "0.01", "0.1")
    },
    "prior-0.1": [f"{POSTERIOR}.prior_std=0.1"],
    **{f"alpha-{value}": [f"{MUTUAL}.alpha={value}"] for value in ("0.0", "0.25", "1.0", "2.0")},
    **{f"temperature-{value}": [f"{MUTUAL}.temperature={value}"] for value in ("2.0", "3.0")},
    **{f"mutual-{value}": [f"{MUTUAL}.weight={value}"] for value in ("0.5", "2.0", "4.0")},
    "teach-later": [f"{MUTUAL}.alpha={{ schedule = 'steps', values = [0.0, 0.5], at = [{{quarter}}] }}"],
    **{f"draws-{value}": [f"stages.0.draws={value}"] for value in ("2", "4")},
    **{f"mixup-{value}": [f"stages.0.mix={{ kind = 'mixup', alpha = {value} }}"] for value in ("0.2", "1.0")},
    **{f"cutmix-{value}": [f"stages.0.mix={{ kind = 'cutmix', alpha = {value} }}"] for value in ("0.2", "1.0")},
    "smooth-0.05": ["stages.0.terms.likelihood.label_smoothing=0.05"],
    "weights": ["stages.0.terms.weight_diversity={ weight = 1.0 }"],
    "weights-linear": ["stages.0.terms.weight_diversity={ weight = 0.1, form = 'linear' }"],
    "weights-relative": ["stages.0.terms.weight_diversity={ weight = 1.0, reduction = 'relative' }"],
    **{f"features-{fusion}": [_features(fusion)] for fusion in ("per_peer", "shared", "fixed", "task", "none")},
    "features-rbf": [_features("none", "rbf")],
    "features-10": [_features("none", weight=10.0)],
    **{
        f"mistakes-{value}": [f"stages.0.terms.prediction_diversity={{ weight = {value} }}"] for value in ("0.3", "1.0")
    },
    "batch-64": ["data.batch_size=64"],
}
SEARCHES = {name: Search(f"yardsticks/{name}-default", PEERS) for name in ("cifar100-resnet20", "digits")}
# What the default is compared with has to have a rate of its own choice.
SEARCHES |= {
    f"{name}-{method}": Search(f"yardsticks/{name}-{method}", {"base": [], **RATES})
    for name in ("cifar100-resnet20", "digits")
    for method in ("plain", "plain-peers")
}
TEXT_RATES = {f"lr-{value}": [f"{OPTIMIZER}.lr={value}"] for value in ("0.003", "0.005", "0.01", "0.03")}
SEARCHES |= {
    f"{name}-{method}": Search(f"yardsticks/{name}-{method}", {"base": [], **TEXT_RATES})
    for name in ("clinc150-fasttext", "banking77-fasttext")
    for method in ("plain", "ensemble2", "plain-peers", "bayesian", "vanilla", "default")
}


def settings(search: Search, trial: str, epochs: int) -> list[str]:
    """Return the lines that a trial sets.

    Args:
        search: with the factors.
        trial: names of factors, with + between them.
        epochs: in all.
    """
    lines = []
    for name in trial.split("+"):
        if name not in search.factors:
            raise SystemExit(f"search.py: there is no factor '{name}'; expected some of {', '.join(search.factors)}")
        lines += [line.replace("{quarter}", str(epochs / 4)) for line in search.factors[name]]
    return lines


def judged(run: Run, split: Split, device: torch.device) -> dict[str, Any]:
    """Return figures on a split: means over peers, and those of the ensemble.

    ``cnll`` is the NLL after the temperatures that training has fitted on the validation split.

    Args:
        run: that is trained.
        split: with labels.
        device: to predict on.
    """
    assert split.labels is not None
    log_p = [run.predict_split(peer, split, DRAWS, device)[0].cpu() for peer in run]

    def figures(predicted: torch.Tensor, temperature: float) -> dict[str, float]:
        p = predicted.exp()
        return {
            "accuracy": metrics.accuracy(p, split.labels),
            "nll": metrics.nll_from_log(predicted, split.labels),
            "ece": metrics.ece(p, split.labels),
            "cnll": metrics.nll_from_log(metrics.temper(predicted, temperature), split.labels),
        }

    each = [figures(predicted, run[peer].temperature) for peer, predicted in zip(run, log_p, strict=True)]
    means = {key: statistics.fmean(peer[key] for peer in each) for key in each[0]}
    return means | {"ensemble": figures(mean_of(torch.stack(log_p)), run.temperature)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as Markdown, best mean NLL first, each compared with `base` over the seeds and epochs of both."""
    lines = ["| | epochs | seeds | ACC | NLL | ECE | NLL − base | ensemble: ACC | NLL |", "|---|" + "---|" * 8]
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["trial"], row["epochs"]), []).append(row)

    def mean(group: Sequence[Mapping[str, Any]], key: str) -> float:
        return statistics.fmean(row[key] for row in group)

    for (trial, epochs), group in sorted(groups.items(), key=lambda item: (item[0][1], mean(item[1], "nll"))):
        base = {row["seed"]: row["nll"] for row in groups.get(("base", epochs), ())}
        mine = {row["seed"]: row["nll"] for row in group}
        change = ""
        if trial != "base" and base.keys() & mine.keys():
            pair = paired_difference(mine, base)
            change = f"{pair.difference:+.3f}" + (f" ± {pair.standard_error:.3f}" if pair.standard_error else "")
        ensemble = [row["ensemble"] for row in group]
        lines.append(
            f"| {trial} | {epochs} | {len(group)} | {100 * mean(group, 'accuracy'):.2f} | {mean(group, 'nll'):.3f} "
            f"| {mean(group, 'ece'):.3f} | {change} | {100 * mean(ensemble, 'accuracy'):.2f} "
            f"| {mean(ensemble, 'nll'):.3f} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Train, evaluate on the validation split, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", choices=SEARCHES)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help="factors, joined by +")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", default="0", help="with commas between them")
    parser.add_argument("--data-root", type=Path, help="where data sets lie")
    parser.add_argument("--runs", type=Path, default=Path("reproduced/search"))
    parser.add_argument("--out", type=Path, help="JSON file that rows are added to")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args(words)
    search = SEARCHES[asked.search]
    if not asked.trials:
        for name, lines in search.factors.items():
            print(f"{name}: {'; '.join(lines) or 'as it is'}")
        return 0
    rows = json.loads(asked.out.read_text())["rows"] if asked.out and asked.out.exists() else []
    there = {(row["trial"], row["epochs"], row["seed"]) for row in rows}
    wanted = [
        (trial, int(seed))
        for trial in asked.trials
        for seed in asked.seeds.split(",")
        if (trial, asked.epochs, int(seed)) not in there
    ]
    data_sets = DataCache(asked.data_root)
    jobs = [
        job_for(
            search.recipe,
            asked.runs / asked.search / f"{trial}-{asked.epochs}-seed{seed}",
            seed,
            epochs=asked.epochs,
            overrides=settings(search, trial, asked.epochs),
            data_sets=data_sets,
        )
        for trial, seed in wanted
    ]
    device = pick_device(asked.device)
    clock, errors = time.monotonic(), dict[int, TrainingError]()
    runs = train_jobs(jobs, resume=True, errors=errors, root=asked.data_root, device=asked.device)
    seconds = time.monotonic() - clock
    split = runs[0].data(asked.data_root).validation if runs else None
    for place, ((trial, seed), run) in enumerate(zip(wanted, runs, strict=True)):
        if place in errors:
            print(f"{trial}, seed {seed}: {errors[place]}", file=sys.stderr)
            continue
        assert split is not None
        row = {"trial": trial, "set": settings(search, trial, asked.epochs), "epochs": asked.epochs, "seed": seed}
        rows.append(
            row | judged(run, split, device) | {"seconds": round(seconds / len(jobs), 1), "side_by_side": len(jobs)}
        )
    if asked.out is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        record = {"search": asked.search, "recipe": search.recipe, "split": "validation", "draws": DRAWS}
        record |= environment(device) | {"commit": commit, "rows": rows}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
