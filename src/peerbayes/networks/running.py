"""Run a network and leave it as it was: modes and buffers restored, features captured by names of submodules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, nearest


def find_layer(network: nn.Module, name: str) -> nn.Module:
    """Return the submodule called ``name``; a unique ending suffices (``layer2`` for ``network.layer2``).

    Args:
        network: the network.
        name: the submodule's name, or how it ends.

    Raises:
        InputError: no submodule, or more than one, has that name.

    Example:
        >>> from torch import nn
        >>> from peerbayes.networks import find_layer
        >>> network = nn.Sequential()
        >>> network.add_module("body", nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
        >>> find_layer(network, "body.1")
        ReLU()
    """
    modules: dict[str, nn.Module] = dict(network.named_modules())
    if name and name in modules:
        return modules[name]
    endings = [full for full in modules if full.endswith(f".{name}")]
    if len(endings) == 1:
        return modules[endings[0]]
    kind = type(network).__name__
    if endings:
        raise InputError(f"layer '{name}' is ambiguous in {kind}: {', '.join(endings)}")
    top = {full for full in modules if full and full.count(".") < 2}
    raise InputError(f"{kind} has no layer '{name}'{nearest(name, top)}")


@contextlib.contextmanager
def capture(network: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of the named layers during forward passes inside the block.

    Args:
        network: the network.
        layers: names of submodules, see `find_layer`.

    Returns:
        A context manager whose value has the latest output by layer.

    Example:
        >>> import torch
        >>> from peerbayes.networks import capture
        >>> network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> with capture(network, ["1"]) as features:
        ...     logits = network(torch.zeros(2, 4))
        >>> features["1"].shape
        torch.Size([2, 8])
    """
    features: dict[str, Tensor] = {}

    def keep(layer: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            features[layer] = output

        return hook

    modules = {layer: find_layer(network, layer) for layer in layers}  # look up all before hooking any
    handles = [module.register_forward_hook(keep(layer)) for layer, module in modules.items()]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


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


@contextlib.contextmanager
def tried_kernels(wanted: bool = True) -> Iterator[None]:
    """Let cuDNN time its kernels and take the fastest inside the block, unless it is set to be deterministic."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or (wanted and not torch.backends.cudnn.deterministic)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
