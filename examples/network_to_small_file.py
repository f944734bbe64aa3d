"""Store a Bayesian network in a small codebook of Gaussians, and show where its bytes are.

python examples/network_to_small_file.py [FOLDER]
"""

import sys
from pathlib import Path

import peerbayes as pb
from peerbayes.reports.file_sizes import size_table, sizes

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/small-file")

run = pb.train("sharing/digits-resnet8-dnn", FOLDER / "network")
# A network without scales gets them first (stage 1). Then its weights share a codebook, which is trained further.
small = pb.compress(run, into="sharing/small", run=FOLDER / "small", overrides=["stages.0.epochs=5"])

print(f"{type(small).__name__} posterior, components: {small.counts()['components']}")

print(pb.reports.text_table([pb.evaluate(run), pb.evaluate(FOLDER / "small")]))
for record in sizes(FOLDER / "small"):
    print(size_table(record))
