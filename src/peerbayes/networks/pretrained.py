"""Start from pretrained weights: a file in timm's own names, for ``timm/NAME`` with any number of classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.networks.registry import Inputs, Normalized, timm_network


def starting_point(name: str, inputs: Inputs, path: Path) -> nn.Module | Path:
    """Return what a posterior over a network starts from, given a file of weights.

    For ``timm/NAME`` and a safetensors file in timm's own names that is a network with the file's weights. Its head
    stays as initialised if the file's has another number of classes; its normalisation is the one that timm notes for
    the weights (for images of three channels), which `Posterior` takes over with the other tensors; position
    embeddings are resampled where timm knows how. For anything else it is the path itself.

    Args:
        name: the network's name.
        inputs: classes, shape and channel statistics of the data.
        path: the file of weights.

    Raises:
        InputError: the file is of another network.

    Example:
        >>> from pathlib import Path
        >>> from peerbayes.networks import Inputs, starting_point
        >>> inputs = Inputs(10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)
        >>> starting_point("resnet8", inputs, Path("weights.safetensors")).name
        'weights.safetensors'
    """
    given = _tensors(path) if name.startswith("timm/") else None
    if given is None or any(tensor.endswith("normalize.mean") for tensor in given):  # ours, or not readable
        return path
    import timm

    name = name.removeprefix("timm/")
    about = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if about is None:
        return path
    heads = (about.classifier,) if isinstance(about.classifier, str) else about.classifier or ()
    head_sizes = [given[f"{head}.weight"].shape[0] for head in heads if f"{head}.weight" in given]
    options: dict[str, Any] = {"state_dict": dict(given)}
    if head_sizes:
        options["num_classes"] = head_sizes[0] - (about.label_offset or 0)
    try:
        inner = timm_network(name, inputs, pretrained=True, pretrained_cfg_overlay=options)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    tensors = {tensor for tensor in inner.state_dict() if not tensor.endswith("num_batches_tracked")}
    fresh = {f"{head}.{leaf}" for head in heads for leaf in ("weight", "bias")}
    for tensor in sorted(tensors - set(given) - fresh):
        raise InputError(f"{path}: has no tensor '{tensor}'; does it belong to another network than timm/{name}?")
    for tensor in sorted(set(given) - set(inner.state_dict()) - fresh):
        raise InputError(
            f"{path}: has a tensor '{tensor}' that timm/{name} has not; does it belong to another network?"
        )
    if inputs.shape[0] == 3:
        inputs = replace(inputs, mean=tuple(about.mean), std=tuple(about.std))
    return Normalized(inner, inputs)


def _tensors(path: Path) -> dict[str, Tensor] | None:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError, ValueError):
        return None  # whoever reads it reports what is wrong
