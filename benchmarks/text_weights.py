"""Compare which weights of the default network for texts are Bayesian: linear layers, or embeddings, too.

    python benchmarks/text_weights.py banking/ --epochs 10 --seeds 3 --out results/text-weights.json

`banking/` holds train.csv and test.csv, as `peerbayes train --data banking/` takes them; a tenth of the training split
is for validation, which chooses. The same command again goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import peerbayes as pb
from peerbayes import metrics
from peerbayes.data.splits import Split
from peerbayes.engine.processes import environment
from peerbayes.inference.prediction import mean_of
from peerbayes.runs.run import Run

CHOICES = {"linear": [], "layers": ["peers.*.posterior.bayesian=layers"]}
CPU = torch.device("cpu")


def judged(run: Run, split: Split) -> dict[str, float]:
    """Return the figures of all peers as one on a split, at temperature 1 and at the run's."""
    assert split.labels is not None
    draws = run.recipe.evaluation.draws
    predicted = [run.predict_split(peer, split, draws, CPU) for peer in run]
    log_p = mean_of(torch.stack([part[0] for part in predicted]))
    tempered = metrics.temper(log_p, run.temperature).exp()
    return {
        "accuracy": metrics.accuracy(log_p.exp(), split.labels),
        "nll": metrics.nll(log_p.exp(), split.labels),
        "ece": metrics.ece(log_p.exp(), split.labels),
        "cnll": metrics.nll(tempered, split.labels),
        "cece": metrics.ece(tempered, split.labels),
        "disagreement": float(torch.stack([part[2] for part in predicted]).mean()),  # of a peer's draws
    }


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/text-weights"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for choice, overrides in CHOICES.items():
            folder = args.runs / f"{choice}-seed{seed}"
            how: dict[str, Any] = {"seed": seed, "epochs": args.epochs, "overrides": overrides, "device": "cpu"}
            run = pb.train("text", folder, data=args.data, resume=folder.exists(), **how)
            data, first = run.data(), run[next(iter(run))]
            assert data.validation is not None
            rows.append({
                "bayesian": choice, "seed": seed, "weights": first.layout.size, "of": first.layout.size
                + first.rest_layout.size, "seconds": run.about["seconds"],
                "validation": judged(run, data.validation), "test": judged(run, data.test),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
            about = {"command": "benchmarks/text_weights.py", "data": args.data.name, "epochs": args.epochs}
            args.out.write_text(json.dumps({**about, **environment(CPU), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
