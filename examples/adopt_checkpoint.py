"""Adopt a trained network: make it Bayesian, predict, distil, compress.

python examples/adopt_checkpoint.py [FOLDER] [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/adopt-checkpoint")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 10


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )  # fmt: skip


# A checkpoint as it is found: of plain PyTorch, with the prefix of nn.DataParallel.
data = pb.data.load("digits", validation=400)
images, labels = data.train.batch(torch.arange(len(data.train)), torch.device("cpu"))
torch.manual_seed(0)
trained = nn.DataParallel(network())
optimizer = torch.optim.Adam(trained.parameters(), 1e-2)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(trained.module(images.float() / 255), labels).backward()
    optimizer.step()
FOLDER.mkdir(parents=True, exist_ok=True)
torch.save({"epoch": 60, "state_dict": trained.state_dict()}, FOLDER / "model.pth")

# On the command line: peerbayes adopt model.pth --network mymodule:build --data my-images/ --distill --compress
net = network()
net.load_state_dict({k.removeprefix("module."): v for k, v in torch.load(FOLDER / "model.pth")["state_dict"].items()})
adopted = pb.adopt(
    net, data=data, run=FOLDER / "adopted", epochs=EPOCHS, extra_epochs=True, normalize=None,
    smaller=["distilled", "compressed"],
)  # fmt: skip
print(adopted)

inputs, truth = data.test.batch(torch.arange(6), torch.device("cpu"))
for run in adopted.best, adopted.runs["compressed"]:  # the first is what the last sentence says
    print(f"\n{run.folder.name}, labels {truth.tolist()}:\n{run.predict(inputs)}")

print(f"\none plain network: {FOLDER / 'adopted' / 'distilled' / 'network-student.safetensors'}")
