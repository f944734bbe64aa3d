"""Distil an ensemble into one plain network.

python examples/ensemble_to_one.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/ensemble-to-one")


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )  # fmt: skip


data = pb.data.load("digits", validation=200)
torch.manual_seed(0)
members = {f"member{number}": pb.Point(network()) for number in range(3)}
ensemble = pb.fit(members, data=data, recipe="mutual/digits-dnn", run=FOLDER / "ensemble")

# One rank-one member a teacher, averaged into one network at the end.
student = pb.distill(
    [ensemble],
    into=network(),
    data=data,
    run=FOLDER / "student",
    overrides=["stages.0.epochs=15", "stages.0.optimizer.lr=0.01"],
)

print(pb.reports.text_table([pb.evaluate(ensemble, data=data)]))
images, labels = data.test.batch(torch.arange(len(data.test)), "cpu")
with torch.no_grad():
    classes = student(images.float() / 255).argmax(1)
print(f"one network, accuracy: {(classes == labels).float().mean():.4f}")
torch.save(student.state_dict(), FOLDER / "student.pt")  # a plain nn.Module, without peerbayes
