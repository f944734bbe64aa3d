"""Networks by name: the library's own, timm's, or a user's ``package.module:function``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, nearest, reason
from peerbayes.importing import imported


class WordVectors(NamedTuple):
    """Vectors that an embedding starts from: token numbers int64 (K,), and their vectors float32 (K, dimension)."""

    tokens: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class Inputs:
    """What a network must know of the data.

    Args:
        classes: number of classes.
        shape: (channels, height, width) of an image, or (length,) of a text.
        mean: by channel, of images in [0, 1]; empty for texts.
        std: as ``mean``.
        tokens: for texts: all token numbers are below it. 0 for images.
        dimension: for texts: of the word vectors to start from. 0 without them.
        padding: for texts: the token number that fills rows up.
        vectors: for texts: what the embedding starts from; not part of a network's description.
        asked: ``mean`` and ``std`` were asked for, instead of the data's own; not part of a network's description.
    """

    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens: int = 0
    dimension: int = 0
    padding: int = 0
    vectors: WordVectors | None = field(default=None, repr=False, compare=False)
    asked: bool = field(default=False, repr=False, compare=False)

    def describe(self) -> dict[str, Any]:
        """Return what rebuilds the network, as JSON-ready values: all but the vectors, and who asked for what."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.compare}


Builder = Callable[[Inputs], nn.Module]
_NETWORKS: dict[str, Builder] = {}


def network(builder: Builder) -> Builder:
    """Make a function from `Inputs` to a module available in recipes under its own name."""
    _NETWORKS[builder.__name__] = builder
    return builder


def _require_images(inputs: Inputs) -> None:
    if inputs.tokens:
        raise InputError("the network is for images, but the data are texts")
    if not len(inputs.mean) == len(inputs.std) == inputs.shape[0]:
        statistics = f"{len(inputs.mean)} means and {len(inputs.std)} standard deviations"
        raise InputError(f"images have {inputs.shape[0]} channels, but there are {statistics} by channel")


class Normalize(nn.Module):
    """(x − mean) / std by channel, for images in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        _require_images(inputs)
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


def timm_network(name: str, inputs: Inputs, **options: Any) -> nn.Module:
    """Build timm's network NAME for these classes, channels and, where it depends on it, image size.

    Nothing is downloaded. One empty image is sent through, so that a size it can't take is known at once.
    """
    try:
        import timm
    except ImportError:
        raise InputError(f"network 'timm/{name}' needs timm: pip install 'peerbayes[zoo]'") from None
    _require_images(inputs)
    if not timm.is_model(name):
        raise InputError(f"timm has no network '{name}'{_close(name, timm.list_models())}")
    about = timm.get_pretrained_cfg(name)
    if about is not None and about.fixed_input_size:
        options["img_size"] = inputs.shape[1:]
    try:
        built: nn.Module = timm.create_model(name, num_classes=inputs.classes, in_chans=inputs.shape[0], **options)
        with torch.no_grad():
            logits = built.eval()(torch.zeros(1, *inputs.shape))
    except Exception as error:  # each network has checks of its own
        sides, why = "×".join(map(str, inputs.shape[1:])), " ".join(str(error).split()) or reason(error)
        raise InputError(f"network 'timm/{name}' can't be built for images of {sides} pixels: {why}") from None
    if not isinstance(logits, Tensor) or logits.shape != (1, inputs.classes):
        raise InputError(f"network 'timm/{name}' does not return a row of {inputs.classes} logits for an image")
    return built.train()


def _close(name: str, known: list[str]) -> str:
    text = nearest(name, known)
    return text if text.startswith("; did") else ""


def _from_user(path: str, inputs: Inputs) -> nn.Module:
    builder = imported(path, "network")
    if not callable(builder):
        raise InputError(f"network '{path}' is {type(builder).__name__}, expected a function")
    try:
        built = builder(inputs)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"network '{path}' can't be built: {reason(error)}") from error
    if not isinstance(built, nn.Module):
        raise InputError(f"network '{path}' returned {type(built).__name__}, expected a torch.nn.Module")
    return built


def build(name: str, inputs: Inputs) -> nn.Module:
    """Build a network: ``resnet20``, ``fasttext``, ``timm/resnet18`` or ``package.module:function``."""
    if name.startswith("timm/"):
        return Normalized(timm_network(name.removeprefix("timm/"), inputs), inputs)
    if ":" in name:
        return _from_user(name, inputs)
    if name not in _NETWORKS:
        raise InputError(f"there is no network '{name}'{nearest(name, [*_NETWORKS, 'timm/NAME'])}")
    return _NETWORKS[name](inputs)


def names() -> list[str]:
    """Return the names of the library's own networks."""
    return sorted(_NETWORKS)
