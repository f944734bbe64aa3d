"""Define a plain multi-layer perceptron."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn

from peerbayes.networks.inputs import Inputs, Normalize
from peerbayes.networks.registry import network


class MLP(nn.Module):
    """Normalisation, flattening, hidden layers with relu, a linear head.

    Args:
        inputs: classes, shape and channel statistics of the data.
        hidden: units of each hidden layer.
        dropout: rate of dropout after each hidden layer; 0 for none.
    """

    def __init__(self, inputs: Inputs, hidden: tuple[int, ...] = (256, 256), dropout: float = 0.0) -> None:
        super().__init__()
        self.normalize = Normalize(inputs)
        sizes = [math.prod(inputs.shape), *hidden]
        after = [nn.Dropout(dropout)] if dropout else []
        pairs = itertools.pairwise(sizes)
        self.hidden = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU(), *after) for a, b in pairs))
        self.linear = nn.Linear(sizes[-1], inputs.classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.hidden(self.normalize(x).flatten(1)))
        return logits


@network
def mlp(inputs: Inputs) -> nn.Module:
    """Return a perceptron with two hidden layers of 256 units."""
    return MLP(inputs)


@network
def mlp_dropout(inputs: Inputs) -> nn.Module:
    """Return a perceptron with two hidden layers of 256 units, each with dropout of a fifth."""
    return MLP(inputs, dropout=0.2)
