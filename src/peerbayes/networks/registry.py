"""Networks by name: the library's own, timm's, or a user's ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, nearest


@dataclass(frozen=True)
class Inputs:
    """What a network must know of the data: classes, (channels, height, width), mean and std by channel in [0, 1]."""

    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


Builder = Callable[[Inputs], nn.Module]
_NETWORKS: dict[str, Builder] = {}


def network(builder: Builder) -> Builder:
    """Make a function from `Inputs` to a module available in recipes under its own name."""
    _NETWORKS[builder.__name__] = builder
    return builder


class Normalize(nn.Module):
    """(x − mean) / std by channel, for images in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(inputs.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(inputs.std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Normalized(nn.Module):
    """A network that expects normalised images, behind the normalisation it expects."""

    def __init__(self, inner: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.normalize = Normalize(inputs)
        self.network = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(self.normalize(x))
        return logits


def _from_timm(name: str, inputs: Inputs) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise InputError(f"network 'timm/{name}' needs timm: pip install 'peerbayes[zoo]'") from None
    if not timm.is_model(name):
        raise InputError(f"timm has no network '{name}'{_close(name, timm.list_models())}")
    inner = timm.create_model(name, num_classes=inputs.classes, in_chans=inputs.shape[0])
    return Normalized(inner, inputs)


def _close(name: str, known: list[str]) -> str:
    text = nearest(name, known)
    return text if text.startswith("; did") else ""


def _from_user(path: str, inputs: Inputs) -> nn.Module:
    module_name, _, attribute = path.partition(":")
    try:
        builder = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"network '{path}' can't be imported: {error}") from None
    if not callable(builder):
        raise InputError(f"network '{path}' is {type(builder).__name__}, expected a function")
    built = builder(inputs)
    if not isinstance(built, nn.Module):
        raise InputError(f"network '{path}' returned {type(built).__name__}, expected a torch.nn.Module")
    return built


def build(name: str, inputs: Inputs) -> nn.Module:
    """Build a network: ``resnet20``, ``timm/resnet18`` or ``package.module:function``."""
    if name.startswith("timm/"):
        return _from_timm(name.removeprefix("timm/"), inputs)
    if ":" in name:
        return _from_user(name, inputs)
    if name not in _NETWORKS:
        raise InputError(f"there is no network '{name}'{nearest(name, [*_NETWORKS, 'timm/NAME'])}")
    return _NETWORKS[name](inputs)


def names() -> list[str]:
    """Return the names of the library's own networks."""
    return sorted(_NETWORKS)
