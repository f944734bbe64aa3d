"""A small network and codebooks for its weights, for tests."""

import torch
from torch import nn

from peerbayes import Address
from peerbayes.codebook.book import Codebook

HERE = Address(0, "peer", "draw")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def book(size=120, components=5, blended=7, outliers=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator)
    shares = torch.randint(16, (blended, 1), generator=generator) / 15
    return Codebook(
        component=torch.rand(components, 2, generator=generator) * torch.tensor([1.0, 0.2]) + torch.tensor([-0.5, 0.1]),
        cholesky=torch.randn(components, 3, generator=generator) * 0.1,
        label=torch.randint(components, (size,), generator=generator),
        blended=order[:blended],
        blend_component=torch.randint(components, (blended, 2), generator=generator),
        blend_weight=torch.cat([shares, 1 - shares], 1),
        outlier=order[blended : blended + outliers],
        outlier_mean=torch.randn(outliers, generator=generator),
        outlier_std=torch.rand(outliers, generator=generator) * 0.1 + 0.01,
    )
