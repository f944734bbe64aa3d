"""Do promised coverage and risk hold? Random splits of real predictions into calibration images and others.

    python benchmarks/guarantees.py                         # trains a network on 297 digits (on a CPU, in seconds)
    python benchmarks/guarantees.py runs/a --data-root data # this run as well

Of every run, the inputs of its validation and test splits are predicted once, by all peers as one. Each round takes a
third of them at random to certify, as `peerbayes calibrate` does, and looks at the others. Writes
results/guarantees.json, which ``python docs/figures.py`` draws.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import scipy.stats
import torch

from peerbayes import load
from peerbayes.api.fitting import train
from peerbayes.engine.processes import environment
from peerbayes.errors import InputError
from peerbayes.inference.guarantees import FITTED, Promises
from peerbayes.inference.prediction import mean_of
from peerbayes.metrics import temper
from peerbayes.recipes.recipe import changes_of, load_recipe
from peerbayes.reports.evaluating import write_record
from peerbayes.runs.run import Run
from peerbayes.runs.temperatures import certificate_of

BINS = 60  # of histograms
DIGITS = ["data.validation=1000"]  # 297 of the 1797 are left to learn


def pool(run: Run, root: Path | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities (N, C) of all peers as one and labels, of all images that nothing was learnt of."""
    data, draws = run.data(root), run.recipe.evaluation.draws
    splits = (
        [data.test] if data.validation is None or run.recipe.evaluation.keep == "best" else [data.validation, data.test]
    )
    log_p, labels = [], []
    for split in splits:
        predicted = [run.predict_split(name, split, draws, device) for name in run]
        log_p.append(mean_of(torch.stack([part[0] for part in predicted])))
        labels.append(predicted[0][1])
    return torch.cat(log_p), torch.cat(labels)


def histogram(values: np.ndarray, low: float, high: float) -> dict:
    """Return how many values lie in each of `BINS` bins."""
    counts, edges = np.histogram(values.clip(low, high), BINS, (low, high))
    return {"edges": [float(edges[0]), float(edges[-1])], "counts": counts.tolist()}


def spread(values: np.ndarray) -> dict:
    """Return the mean of values and its standard error."""
    return {"mean": float(values.mean()), "standard_error": float(values.std(ddof=1) / math.sqrt(len(values)))}


def risk_by_class(classes: torch.Tensor, answered: torch.Tensor, wrong: torch.Tensor) -> float:
    """Return the largest share of wrong answers among those of one class."""
    answers = torch.bincount(classes[answered])
    errors = torch.bincount(classes[answered], wrong[answered].double())
    return float((errors / answers.clamp_min(1)).max())


def measured(log_p: torch.Tensor, labels: torch.Tensor, promises: Promises, count: int, rounds: int) -> dict:
    """Certify `count` images of every round, and look at the others."""
    rows, refused = [], 0
    for seed in range(rounds):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
        calibrating, testing = order[:count], order[count:]
        try:
            certificate = certificate_of(log_p[calibrating], labels[calibrating], promises, seed, 1, "pool")
        except InputError:
            refused += 1
            continue
        tempered = log_p if certificate.temperature == 1 else temper(log_p, certificate.temperature)
        row = {}
        if promises.coverage is not None:
            sets = certificate.sets(tempered[testing])
            inside = sets.gather(1, labels[testing, None])[:, 0].double()
            row |= {"coverage": float(inside.mean()), "size": float(sets.sum(1).double().mean())}
            row["empty"] = float((~sets.any(1)).double().mean())
            if promises.by_class:
                each = torch.bincount(labels[testing], inside) / torch.bincount(labels[testing])
                row |= {f"coverage of class {number}": value for number, value in enumerate(each.tolist())}
        else:
            answered, wrong = ~certificate.abstain(tempered), tempered.argmax(1) != labels
            row["answered"] = float(answered[testing].double().mean())
            row["risk of others"] = float(wrong[testing][answered[testing]].double().mean())
            row["risk of all"] = float(wrong[answered].double().mean())
            if promises.by_class:
                row["largest risk of a class"] = risk_by_class(tempered.argmax(1), answered, wrong)
        rows.append(row)
    figures: dict = {"by_class": promises.by_class, "refused": refused}
    if promises.coverage is not None:
        figures |= {"promised coverage": promises.coverage, "method": promises.method}
    else:
        figures |= {"promised risk": promises.risk, "delta": promises.delta}
    values = {key: np.array([row[key] for row in rows]) for key in (rows[0] if rows else ())}
    figures |= {key: spread(value) for key, value in values.items()}
    shown = count - math.ceil(FITTED * count)
    if rows and promises.coverage is not None:
        level, left = promises.coverage, len(labels) - count
        figures["histogram"] = histogram(values["coverage"], level - 0.08, min(1.0, level + 0.08))
        rank = math.ceil((shown + 1) * level)
        law = scipy.stats.betabinom(left, rank, shown + 1 - rank)  # of inputs of which no two score the same
        figures["expected"] = {"mean": float(law.mean() / left), "deviation": float(law.std() / left)}
        figures["deviation"] = float(values["coverage"].std(ddof=1))
        kept = [
            value
            for key, value in figures.items()
            if key.startswith("coverage of class" if promises.by_class else "coverage")
        ]
        # A mean over rounds may lie below by chance: by 4 standard errors hardly ever.
        figures["holds"] = all(mean["mean"] + 4 * mean["standard_error"] >= level for mean in kept)
    elif rows:
        # All inputs stand for the world: a certificate fails if more than the promised share of their answers is wrong,
        # by class if it is so for any of them.
        kind = "largest risk of a class" if promises.by_class else "risk of all"
        broken = int((values[kind] > promises.risk).sum())
        figures["histogram"] = histogram(values[kind], 0, 2 * promises.risk)
        figures["broken"] = broken / rounds
        figures["holds"] = bool(scipy.stats.binomtest(broken, rounds, promises.delta, "greater").pvalue > 1e-4)
    return figures


def line_of(figures: dict) -> str:
    """Return a line for people."""
    sets = "promised coverage" in figures
    what = f"{figures['method']} {figures['promised coverage']}" if sets else f"risk {figures['promised risk']}"
    keys = (
        "coverage",
        "expected",
        "size",
        "empty",
        "answered",
        "risk of others",
        "risk of all",
        "largest risk of a class",
    )
    means = {key: round(figures[key]["mean"], 4) for key in keys if key in figures}
    more = " by class" * figures["by_class"] + f", refused {figures['refused']}"
    broken = f", broken {figures['broken']}" if "broken" in figures else ""
    return f"{what}{more}: {means}{broken} {'holds' if figures.get('holds') else 'does not hold' if means else ''}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="trained runs, beside one on digits")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--coverage", type=float, action="append", help="repeatable; 0.9 and 0.95 by default")
    parser.add_argument("--risk", type=float, action="append", help="repeatable; 0.02 and 0.05 by default")
    parser.add_argument("--risk-by-class", type=float, action="append", help="repeatable; 0.05 and 0.1 by default")
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/guarantees.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    named = [Path(word).name if Path(word).exists() else word for word in argv]
    words = " ".join(["python benchmarks/guarantees.py", *named])
    with tempfile.TemporaryDirectory() as folder:
        digits = train(load_recipe("mutual/digits-dnn", DIGITS), Path(folder) / "run", device=device)
        runs = [digits, *map(load, args.runs)]
        records = []
        for run in runs:
            log_p, labels = pool(run, args.data_root, device)
            accuracy = float((log_p.argmax(1) == labels).double().mean())
            print(f"{run.recipe.name}: {len(labels)} images, accuracy {100 * accuracy:.2f} %", flush=True)
            count, levels = len(labels) // 3, args.coverage or [0.9, 0.95]
            every_promise = [Promises(level, method=method) for level in levels for method in ("lac", "aps", "raps")]
            every_promise += [Promises(levels[0], method=method, by_class=True) for method in ("lac", "aps", "raps")]
            every_promise += [Promises(risk=risk, delta=args.delta) for risk in args.risk or (0.02, 0.05)]
            risks = args.risk_by_class or (0.05, 0.1)
            every_promise += [Promises(risk=risk, delta=args.delta, by_class=True) for risk in risks]
            rows = []
            for promises in every_promise:
                since = time.perf_counter()
                rows.append(measured(log_p, labels, promises, count, args.rounds))
                rows[-1]["seconds"] = round(time.perf_counter() - since, 1)
                print(line_of(rows[-1]), flush=True)
            about = {"recipe": run.recipe.name, "changed": changes_of(run.recipe), "seed": run.seed}
            about |= {"images": len(labels), "classes": log_p.shape[1], "accuracy": accuracy}
            records.append(about | {"calibrate": count, "rounds": args.rounds, "promises": rows})
            write_record(args.out, {"command": words, **environment(device), "runs": records})
    every = [promise for record in records for promise in record["promises"]]
    if not all(promise["holds"] for promise in every if promise["refused"] < args.rounds):
        sys.exit("a promise does not hold")


if __name__ == "__main__":
    main(sys.argv[1:])
