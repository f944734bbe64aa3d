"""Describe the data for a network, normalise images in front of it, and give it initial weights."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError


class WordVectors(NamedTuple):
    """Vectors that an embedding starts from.

    Attributes:
        tokens: token numbers, int64 (K,).
        vectors: their vectors, float32 (K, dimension).

    Example:
        >>> import torch
        >>> from peerbayes.networks import WordVectors
        >>> WordVectors(torch.tensor([2, 5]), torch.zeros(2, 300)).vectors.shape
        torch.Size([2, 300])
    """

    tokens: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class Inputs:
    """Description of the data for a network.

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

    Example:
        >>> from peerbayes.networks import Inputs
        >>> inputs = Inputs(classes=10, shape=(3, 32, 32), mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
        >>> inputs.describe()["shape"]
        (3, 32, 32)
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
        """Return all but the vectors and who asked for what: JSON-ready values that rebuild the network."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.compare}


def check_images(inputs: Inputs) -> None:
    """Refuse texts, and images whose channels have no mean and deviation each."""
    if inputs.tokens:
        raise InputError("the network is for images, but the data are texts")
    if not len(inputs.mean) == len(inputs.std) == inputs.shape[0]:
        statistics = f"{len(inputs.mean)} means and {len(inputs.std)} standard deviations"
        raise InputError(f"images have {inputs.shape[0]} channels, but there are {statistics} by channel")


class Normalize(nn.Module):
    """Normalise images in [0, 1] by channel: (x − mean) / std.

    Args:
        inputs: of images, with mean and standard deviation by channel.

    Example:
        >>> import torch
        >>> from peerbayes.networks import Inputs, Normalize
        >>> normalize = Normalize(Inputs(classes=10, shape=(1, 2, 2), mean=(0.5,), std=(0.25,)))
        >>> normalize(torch.ones(1, 1, 2, 2)).flatten()
        tensor([2., 2., 2., 2.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        check_images(inputs)
        self.register_buffer("mean", torch.tensor(inputs.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(inputs.std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Normalized(nn.Module):
    """A network that expects normalised images, preceded by the normalisation.

    Args:
        inner: the network.
        inputs: of images, with mean and standard deviation by channel.

    Example:
        >>> import torch
        >>> from peerbayes.networks import Inputs, Normalized
        >>> inputs = Inputs(classes=4, shape=(1, 2, 2), mean=(0.5,), std=(0.25,))
        >>> Normalized(torch.nn.Flatten(), inputs)(torch.zeros(1, 1, 2, 2))
        tensor([[-2., -2., -2., -2.]])
    """

    def __init__(self, inner: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.normalize = Normalize(inputs)
        self.network = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(self.normalize(x))
        return logits


def he_normal(network: nn.Module) -> None:
    """Draw weights from N(0, 2 / fan) (He et al. 2015), and zero the biases.

    Convolutions have fan-out, linear layers fan-in.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            convolution = isinstance(module, nn.Conv2d)
            nn.init.kaiming_normal_(module.weight, mode="fan_out" if convolution else "fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def to_unit(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in [0, 1] (x / 255); floating-point images and token numbers pass through.

    Example:
        >>> import torch
        >>> from peerbayes.data import to_unit
        >>> to_unit(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def prepared(inputs: Tensor) -> Tensor:
    """Return images in [0, 1], channels last, and token numbers unchanged; prepared inputs cost nothing."""
    if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        return inputs  # token numbers
    inputs = to_unit(inputs.float() if inputs.dtype == torch.float64 else inputs)  # the type of NumPy's divisions
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
