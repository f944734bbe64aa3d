"""Train two Bayesian networks that teach each other in plain PyTorch, with a custom training loop.

python examples/own_loop.py [FOLDER] [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import peerbayes as pb
from peerbayes import terms
from peerbayes.terms import Batch, Output

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/own-loop")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 30
LOSS = {"likelihood": {}, "kl": {"scheme": "layer_mean", "weight": 0.1}, "mutual": {"alpha": 0.5}}  # as in a recipe


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


data = pb.data.load("digits")
images, labels = data.train.batch(torch.arange(len(data.train)), "cpu")
images = images / 255
torch.manual_seed(0)
peers = {name: pb.MeanField(network(), rho=-4.0, seed=0, name=name) for name in ("a", "b")}
optimizer = torch.optim.Adam([p for peer in peers.values() for p in peer.parameters()], lr=3e-3)
losses = {name: (terms.find(name), terms.find(name).schema(**options).model_dump()) for name, options in LOSS.items()}

step = 0
for epoch in range(EPOCHS):
    for rows in torch.randperm(len(images)).split(128):
        outputs = {}
        for name, peer in peers.items():
            weights = peer.draw(pb.Address(0, name, "step", step))  # the same address, the same draw
            outputs[name] = Output(peer, weights, peer(images[rows], weights), features={})
        batch = Batch(labels[rows], outputs, {}, train_size=len(images), batch_size=len(rows), epoch=float(epoch))
        # Of each other's outputs peers get copies without gradient, so one sum trains both.
        values = {
            (peer, name): term.value(batch, peer, options) for peer in peers for name, (term, options) in losses.items()
        }
        optimizer.zero_grad()
        sum(values.values()).backward()
        optimizer.step()
        step += 1
    if (epoch + 1) % max(1, EPOCHS // 5) == 0:
        told = {f"{peer} {name}": f"{value.detach():.3f}" for (peer, name), value in values.items()}
        print(f"epoch {epoch + 1}", told)

test, truth = data.test.batch(torch.arange(len(data.test)), "cpu")
FOLDER.mkdir(parents=True, exist_ok=True)
for name, peer in peers.items():
    p = peer.predict(test, draws=20)
    print(f"{name}: accuracy {(p.classes == truth).float().mean():.3f}, disagreement {p.disagreement.mean():.3f} nats")
    peer.save(FOLDER / f"{name}.safetensors")

again = pb.Posterior.load(FOLDER / "a.safetensors", network())
print("the file predicts the same:", torch.equal(again.predict(test).classes, peers["a"].predict(test).classes))
