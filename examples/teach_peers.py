"""Let two Bayesian networks teach each other, and compare them with two that learn alone.

python examples/teach_peers.py [FOLDER]
"""

import sys
from pathlib import Path

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/teach-peers")
SHORT = ["stages.0.epochs=2", "stages.1.epochs=1", "evaluation.draws=10"]  # leave this out for the whole schedule

runs = []
for recipe in ("mutual/digits-vanilla", "mutual/digits-dml"):  # alone, and by deep mutual learning
    for seed in (0, 1):
        folder = FOLDER / f"{recipe.split('-')[-1]}-seed{seed}"
        # The network that `pretrained` starts from is trained first, once for each seed, next to the runs.
        runs.append(pb.train(recipe, folder, seed=seed, overrides=SHORT))

# Means over seeds with their standard error, and what two seeds could have shown.
print(pb.reports.text_table([pb.evaluate(run) for run in runs]))
