"""Initialise the larger networks (He et al. 2015)."""

from __future__ import annotations

from torch import nn


def he_normal(network: nn.Module) -> None:
    """Draw weights from N(0, 2 / fan), with fan-out for convolutions and fan-in for linear layers; zero the biases."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            convolution = isinstance(module, nn.Conv2d)
            nn.init.kaiming_normal_(module.weight, mode="fan_out" if convolution else "fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
