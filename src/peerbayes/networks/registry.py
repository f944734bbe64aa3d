"""Build networks by name: the library's own, timm's, or a user's ``package.module:function``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, nearest, reason
from peerbayes.importing import imported


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


Builder = Callable[[Inputs], nn.Module]
_NETWORKS: dict[str, Builder] = {}


def network(builder: Builder) -> Builder:
    """Register a function from `Inputs` to a module as a network, for recipes, under its own name.

    Example:
        >>> import peerbayes
        >>> from torch import nn
        >>> @peerbayes.network
        ... def flat_linear(inputs):
        ...     return nn.Sequential(nn.Flatten(), nn.LazyLinear(inputs.classes))
        >>> "flat_linear" in peerbayes.networks.names()
        True
    """
    _NETWORKS[builder.__name__] = builder
    return builder


def _check_images(inputs: Inputs) -> None:
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
        _check_images(inputs)
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


def timm_network(name: str, inputs: Inputs, **options: Any) -> nn.Module:
    """Build timm's network NAME for these classes, channels and, where it depends on it, image size.

    Nothing is downloaded. One empty image is sent through, so that an unsupported size is reported at once.

    Args:
        name: timm's name of it.
        inputs: classes and shape of the data.
        options: of ``timm.create_model``.
    """
    try:
        import timm
    except ImportError:
        raise InputError(f"network 'timm/{name}' needs timm: pip install 'peerbayes[zoo]'") from None
    _check_images(inputs)
    if not timm.is_model(name):
        raise InputError(f"timm has no network '{name}'{_suggestion(name, timm.list_models())}")
    about = timm.get_pretrained_cfg(name)
    if about is not None and about.fixed_input_size:
        options["img_size"] = inputs.shape[1:]
    try:
        built: nn.Module = timm.create_model(name, num_classes=inputs.classes, in_chans=inputs.shape[0], **options)
        with torch.no_grad():
            logits = built.eval()(torch.zeros(1, *inputs.shape))
    except Exception as error:  # every network raises its own errors
        sides, why = "×".join(map(str, inputs.shape[1:])), " ".join(str(error).split()) or reason(error)
        raise InputError(f"network 'timm/{name}' can't be built for images of {sides} pixels: {why}") from None
    if not isinstance(logits, Tensor) or logits.shape != (1, inputs.classes):
        raise InputError(f"network 'timm/{name}' does not return a row of {inputs.classes} logits for an image")
    return built.train()


def _suggestion(name: str, candidates: list[str]) -> str:
    text = nearest(name, candidates)
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


AUTO = "auto"
SMALL = 64  # images with shorter sides are small


def for_inputs(inputs: Inputs) -> str:
    """Return the name of the network that ``auto`` stands for: by the size of images, and one for texts.

    Example:
        >>> for_inputs(Inputs(10, (3, 32, 32), (0.5,) * 3, (0.2,) * 3))
        'resnet20'
    """
    if inputs.tokens:
        return "fasttext100"
    side = min(inputs.shape[1:])
    return "resnet8" if side < 16 else "resnet20" if side <= SMALL else "timm/resnet18"


def build(name: str, inputs: Inputs) -> nn.Module:
    """Build a network by name.

    Args:
        name: ``auto``, ``resnet20``, ``fasttext``, ``timm/resnet18`` or ``package.module:function``.
        inputs: classes, shape and statistics of the data.

    Raises:
        InputError: there is no such network, or it cannot be built for these data.

    Example:
        >>> import torch
        >>> from peerbayes.networks import Inputs, build
        >>> network = build("resnet8", Inputs(classes=10, shape=(1, 8, 8), mean=(0.3,), std=(0.4,)))
        >>> network(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    name = for_inputs(inputs) if name == AUTO else name
    if name.startswith("timm/"):
        return Normalized(timm_network(name.removeprefix("timm/"), inputs), inputs)
    if ":" in name:
        return _from_user(name, inputs)
    if name not in _NETWORKS:
        raise InputError(f"there is no network '{name}'{_like(name)}")
    return _NETWORKS[name](inputs)


def _like(name: str) -> str:
    """Return a hint at the network that was meant: one of timm's, or the nearest of ours."""
    try:
        import timm
    except ImportError:
        return nearest(name, [*_NETWORKS, "timm/NAME"])
    return f"; did you mean 'timm/{name}'?" if timm.is_model(name) else nearest(name, [*_NETWORKS, "timm/NAME"])


def names() -> list[str]:
    """Return the names of the library's own and of registered networks, sorted.

    Example:
        >>> from peerbayes.networks import names
        >>> "resnet20" in names()
        True
    """
    return sorted([AUTO, *_NETWORKS])
