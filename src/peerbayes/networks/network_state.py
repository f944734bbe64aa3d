"""Define context managers that restore a network's train and eval modes and its buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode inside the block, and each module back into its own mode after it."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def kept_buffers(network: nn.Module) -> Iterator[None]:
    """Restore the network's buffers (batch-norm statistics) after the block."""
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
