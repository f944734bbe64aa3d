"""A network used for a while, and left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Have a network in evaluation mode within the block; after it each module is in the mode it was in."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def kept_buffers(network: nn.Module) -> Iterator[None]:
    """Put the network's buffers (batch-norm statistics) back after the block."""
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
