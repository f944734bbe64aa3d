"""Start from pretrained weights: a file in timm's own names, for ``timm/NAME`` with any number of classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.networks.inputs import Inputs, Normalized
from peerbayes.networks.registry import build, timm_network
from peerbayes.networks.weights_files import fitted, read_checkpoint, under_names


def starting_point(
    name: str, inputs: Inputs, path: Path, network: nn.Module | None = None, new_head: bool | None = None
) -> nn.Module | Path | dict[str, Tensor]:
    """Return what a posterior over ``network``, called ``name``, starts from, given a file of weights.

    For a file that peerbayes has written it is the path itself, and for others their tensors; a head of another number
    of classes is that of ``network`` with ``new_head``. For ``timm/NAME`` and a file in timm's own names it is a
    network with the file's weights. Its head stays as initialised if the file's has another number of classes, unless
    ``new_head`` is false; its normalisation is the one that timm notes for the weights (for images of three channels),
    which `Posterior` takes over with the other tensors; position embeddings are resampled where timm knows how.

    Args:
        name: the network's name.
        inputs: classes, shape and channel statistics of the data.
        path: the file of weights.
        network: the network that the posterior is over.
        new_head: whether a head of another size is replaced; False refuses one, also of timm's files.

    Raises:
        InputError: the file is of another network.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from peerbayes.networks import Inputs, build, starting_point
        >>> inputs = Inputs(10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)
        >>> network = build("resnet8", inputs)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"state_dict": network.state_dict()}, path := Path(folder, "model.pt"))
        ...     tensors = starting_point("resnet8", inputs, path, network)
        >>> tensors.keys() == network.state_dict().keys()
        True
    """
    given = read_checkpoint(path)
    if given is None:
        return path
    network = build(name, inputs) if network is None else network
    if not name.startswith("timm/") or any(tensor.endswith("normalize.mean") for tensor in given):
        return fitted(given, network, path, bool(new_head))
    import timm

    name = name.removeprefix("timm/")
    about = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if about is None:
        return fitted(given, network, path, bool(new_head))
    given = under_names(given, {tensor.removeprefix("network.") for tensor in network.state_dict()})
    heads: tuple[str, ...] = (about.classifier,) if isinstance(about.classifier, str) else about.classifier or ()
    head_sizes = [given[f"{head}.weight"].shape[0] for head in heads if f"{head}.weight" in given]
    classes = head_sizes[0] - (about.label_offset or 0) if head_sizes else inputs.classes
    if new_head is False and classes != inputs.classes:
        raise InputError(
            f"{path}: tensor '{heads[0]}.weight' is a head of {classes} classes, but the data have {inputs.classes}; "
            "--new-head begins a new head there"
        )
    options: dict[str, Any] = {"state_dict": dict(given)}
    if head_sizes:
        options["num_classes"] = classes
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
