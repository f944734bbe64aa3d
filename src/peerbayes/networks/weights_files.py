"""Files of weights that others have trained: read them, out of their wrappers, and start a network from them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peerbayes.errors import InputError, reason
from peerbayes.networks.inputs import Inputs, Normalized
from peerbayes.networks.registry import build, timm_network

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
ENDINGS = (".safetensors", *PICKLED)
# Where files keep the weights, the average over training first: it is what they were evaluated by.
WRAPPERS = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "state_dict", "model_state_dict", "model",
            "network", "net", "weights")  # fmt: skip


def is_weights_file(path: str | Path) -> bool:
    """Return whether a name ends as a file of weights does."""
    return Path(path).suffix in ENDINGS


def read_checkpoint(path: Path) -> dict[str, Tensor] | None:
    """Read the tensors of a file of weights by name; None for one that peerbayes has written itself.

    Of a pickled file (``.pt``, ``.pth``, ``.bin``, ``.ckpt``) only tensors and plain values are read: none of its code
    is run. `WRAPPERS` are taken off, of several the first.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix not in PICKLED:
        try:
            with safe_open(path, framework="pt") as file:
                is_ours = "peerbayes" in (file.metadata() or {})
                return None if is_ours else {name: file.get_tensor(name) for name in list(file.keys())}
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path}: not a readable safetensors file ({error})") from None
    try:
        given = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        why = "it holds more than tensors" if "weights_only" in str(error) else f"not readable ({reason(error)})"
        raise InputError(
            f"{path}: {why}; save the weights alone: torch.save(network.state_dict(), 'weights.pth')"
        ) from None
    return _unwrapped(given, path)


def _unwrapped(given: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(given, Mapping):
        raise InputError(f"{path}: holds a {type(given).__name__}, expected a state dict")
    for wrapper in WRAPPERS:
        if isinstance(inner := given.get(wrapper), Mapping) and inner:
            return _unwrapped(inner, path)
    tensors = {str(name): value for name, value in given.items() if isinstance(value, Tensor) and name != "n_averaged"}
    if not tensors:
        keys = ", ".join(map(str, list(given)[:5])) or "nothing"
        raise InputError(f"{path}: no weights are found in it (it holds {keys}); expected a state dict")
    return tensors


def under_names(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors by a network's names: prefixes that all have in common are taken off until most names agree.

    ``module.`` of nn.DataParallel and ``_orig_mod.`` of torch.compile are such prefixes, and ``model.`` of Lightning.

    Args:
        state: tensors by the names that a file has.
        names: those of the network.
    """
    expected, best = set(names), dict(state)
    stripped = best
    while (heads := {name.partition(".")[0] for name in stripped}) and len(heads) == 1:
        if any("." not in name for name in stripped):
            break
        stripped = {name.partition(".")[2]: tensor for name, tensor in stripped.items()}
        if len(expected & stripped.keys()) > len(expected & best.keys()):
            best = stripped
    return best


def fitted(state: Mapping[str, Tensor], network: nn.Module, path: Path, new_head: bool) -> dict[str, Tensor]:
    """Return a file's tensors for a network; with ``new_head`` those of its head are the network's own.

    Args:
        state: tensors by the names that a file has.
        network: whose weights they are to be.
        path: the file, for messages.
        new_head: take the network's own head where the file's has another number of classes.

    Raises:
        InputError: which tensors differ, and whether it is only the head.
    """
    expected = network.state_dict()
    tensors = under_names(state, expected)
    optional = ("num_batches_tracked", "normalize.mean", "normalize.std")
    missing = [name for name in expected if name not in tensors and not name.endswith(optional)]
    extra = [name for name in tensors if name not in expected]
    if missing:
        raise InputError(f"{path}: has no tensor '{missing[0]}'{_others(missing)}; is it of another network?")
    if extra:
        raise InputError(
            f"{path}: has a tensor '{extra[0]}'{_others(extra)} that this network has not; is it of another network?"
        )
    other = [name for name, tensor in tensors.items() if tensor.shape != expected[name].shape]
    heads = [name for name in other if tensors[name].shape[1:] == expected[name].shape[1:]]
    if other and heads == other and new_head:
        return {**expected, **{name: tensor for name, tensor in tensors.items() if name not in heads}}
    if other:
        name = other[0]
        shapes = f"{tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
        hint = "; --new-head begins a new head there" if heads == other else "; is it of another network?"
        raise InputError(f"{path}: tensor '{name}'{_others(other)} has shape {shapes}{hint}")
    return {**expected, **tensors}


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} others)" if names[1:] else ""


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
