"""Make a network Bayesian: train it, put a Gaussian around its weights, and predict with uncertainty.

python examples/make_bayesian.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/make-bayesian")


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


data = pb.data.load("digits", validation=200)  # or a folder of images, or pb.data.from_arrays(...)

# A deterministic network is a point posterior.
plain = pb.fit({"net": pb.Point(network())}, data=data, recipe="mutual/digits-dnn", run=FOLDER / "plain")

# The same network with a Gaussian around every trained weight.
bayesian = pb.MeanField(network(), start_from=plain["net"])
run = pb.fit({"net": bayesian}, data=data, recipe="mutual/digits-vanilla", run=FOLDER / "bayesian")

print(pb.reports.text_table([pb.evaluate(plain, data=data), pb.evaluate(run, data=data)]))

images, labels = data.test.batch(torch.arange(5), "cpu")
prediction = run["net"].predict(images, draws=50)
unknown = run["net"].predict(torch.rand_like(images.float()), draws=50)  # noise is no digit
print("predicted classes:", prediction.classes.tolist(), "labels:", labels.tolist())
print("entropy (nats) of digits:", [round(h, 2) for h in prediction.entropy.tolist()])
print("entropy (nats) of noise: ", [round(h, 2) for h in unknown.entropy.tolist()])
