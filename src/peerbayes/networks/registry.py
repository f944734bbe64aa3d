"""Build networks by name: the library's own, timm's, or a user's ``package.module:function``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, nearest, reason
from peerbayes.importing import imported
from peerbayes.networks.inputs import Inputs, Normalized, check_images

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
    check_images(inputs)
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
    sizes = {**dict.fromkeys(("classes", "num_classes"), inputs.classes),
             **dict.fromkeys(("channels", "in_channels", "in_chans"), inputs.shape[0])}  # fmt: skip
    wanted = _wanted(builder, sizes)
    try:
        built = builder(inputs) if wanted is None else builder(**{name: sizes[name] for name in wanted})
    except InputError:
        raise
    except Exception as error:
        given = "inputs" if wanted is None else ", ".join(f"{name}={sizes[name]}" for name in wanted)
        raise InputError(
            f"network '{path}' can't be built: called with ({given}), it says: {reason(error)}; it may "
            "take inputs (peerbayes.networks.Inputs), num_classes and in_channels, or nothing"
        ) from error
    if not isinstance(built, nn.Module):
        raise InputError(f"network '{path}' returned {type(built).__name__}, expected a torch.nn.Module")
    return built


def _wanted(builder: Callable[..., Any], sizes: Mapping[str, int]) -> list[str] | None:
    """Return what of the data a builder takes by name; None for one that takes `Inputs`, as its first argument."""
    try:
        parameters = list(inspect.signature(builder).parameters.values())
    except (TypeError, ValueError):  # of a built-in
        return None
    named = [arg.name for arg in parameters if arg.kind in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY)]
    needed = [arg.name for arg in parameters if arg.name in named and arg.default is arg.empty]
    if "inputs" in named or any(arg.kind not in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY) for arg in parameters):
        return None
    return [name for name in named if name in sizes] if set(needed) <= set(sizes) else None


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
