"""Networks with every kind of layer that gets factors, and with one layer under two names, for tests."""

import torch
from torch import nn


class Every(nn.Module):
    """Every kind of layer that gets factors, and tied, frozen and plain ones."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.grouped = nn.Conv2d(6, 4, (1, 3), groups=2, stride=2)
        self.up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.line = nn.Conv1d(6, 5, 3, padding=1)
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = torch.tanh(self.depthwise(torch.tanh(self.stem(x))))
        x = torch.tanh(self.norm(self.up(torch.tanh(self.grouped(x)))))
        x = self.line(x.mean(2)).transpose(1, 2)  # (rows, length, 5): a linear layer over three axes
        x = torch.tanh(self.first(x))
        flat = torch.tanh(self.second(x.flatten(0, 1) * self.gain))  # and over rows that are not images
        return self.head(flat.view(x.shape).mean(1))


def every(seed=0):
    torch.manual_seed(seed)
    network = Every()
    for norm in (network.stem[1], network.norm):
        nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(norm.bias)
    for _ in range(3):
        network(torch.rand(16, 2, 6, 6))
    return network.eval()


def images(count=5, seed=1):
    return torch.rand(count, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def close(given, expected, tolerance=1e-5):
    assert (given - expected).abs().max() <= tolerance * expected.abs().max()


class TwoNamesOneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))
