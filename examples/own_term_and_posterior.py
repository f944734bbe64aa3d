"""Train with a custom term and a custom posterior: each is defined once and works like those of the library.

python examples/own_term_and_posterior.py [FOLDER]
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import peerbayes as pb
from peerbayes.math.noise import normal

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/own")


@pb.term
def confidence_penalty(step, peer, *, weight: float = 0.1):
    """-weight * H[p], averaged over the batch: a term is a function of a step, and its options are its keywords."""
    log_p = step.logits(peer).log_softmax(-1)
    return weight * (log_p.exp() * log_p).sum(-1).mean()


class Laplace(pb.Posterior):
    """A Laplace distribution for every weight, with the prior Laplace(0, prior_scale)."""

    kind = "my_laplace"  # or "package.module:Laplace", which other processes find by themselves
    stochastic = True

    def __init__(self, network, *, rho: float = -6.0, prior_scale: float = 0.1, **common):
        super().__init__(network, **common)
        self.prior_scale = prior_scale
        self.rho = nn.Parameter(torch.full_like(self.mean, rho))

    @property
    def scale(self):
        return F.softplus(self.rho)

    @property
    def std(self):
        return math.sqrt(2) * self.scale

    @property
    def noise_size(self):
        return self.layout.size  # standard normal numbers that make a draw

    def place(self, noise):
        """Turn normal numbers into Laplace ones: Φ makes them uniform on (0, 1)."""
        if noise is None:
            return self.mean, self.std
        v = torch.special.ndtr(noise).clamp(1e-6, 1 - 1e-6) - 0.5
        return self.mean - self.scale * v.sign() * torch.log1p(-2 * v.abs()), self.std

    def draw(self, address):
        return self.weights(*self.place(normal(address, self.noise_size, self.device)))

    def kl_per_weight(self, weights=None):  # noqa: ARG002 (for kinds whose KL is estimated from a draw)
        size, scale = self.mean.abs(), self.scale
        return (self.prior_scale / scale).log() + (size + scale * (-size / scale).exp()) / self.prior_scale - 1

    def flat_tensors(self):
        return {"mean": self.mean, "rho": self.rho}  # what its file holds

    def options(self):
        return {"prior_scale": self.prior_scale}  # what rebuilds it


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )  # fmt: skip


run = pb.fit(
    {"laplace": Laplace(network()), "gaussian": pb.MeanField(network())},
    data="digits",
    recipe="mutual/digits-dml",
    overrides=["stages.*.epochs=4", "stages.*.terms.confidence_penalty.weight=0.05", "evaluation.draws=20"],
    run=FOLDER,
)
print(pb.reports.text_table([pb.evaluate(run)]))

# The two are peers that have taught each other; the folder opens again with the networks, which came from Python.
again = pb.load(FOLDER, networks={"laplace": network(), "gaussian": network()})
print(again["laplace"].predict(torch.zeros(1, 1, 8, 8), draws=20).entropy)
