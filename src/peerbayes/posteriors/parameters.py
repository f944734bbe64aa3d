"""Which parameters of a network are whose, and under which names they are found."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, OptionError, nearest

Predicate = Callable[[str, nn.Module], bool]


def conv_and_linear(_name: str, module: nn.Module) -> bool:
    """The choice of points, members and recipes: weights and biases of convolutions, linear and attention layers.

    Args:
        _name: the parameter's.
        module: that owns it.

    Example:
        >>> from torch import nn
        >>> from peerbayes.posteriors import conv_and_linear
        >>> conv_and_linear("0.weight", nn.Conv2d(1, 2, 3)), conv_and_linear("1.weight", nn.BatchNorm2d(2))
        (True, False)
    """
    return isinstance(module, nn.modules.conv._ConvNd | nn.Linear | nn.MultiheadAttention)


def linear_alone(name: str, module: nn.Module) -> bool:
    """`conv_and_linear` where a recipe asks for it by name, and knows what it leaves out.

    Args:
        name: the parameter's.
        module: that owns it.
    """
    return conv_and_linear(name, module)


def weight_layers(name: str, module: nn.Module) -> bool:
    """The default choice of `MeanField`: `conv_and_linear`, recurrent layers, and embeddings.

    Not embeddings with a ``padding_idx``, whose row is 0 and has no gradient, or a ``max_norm``, which changes weights.

    Args:
        name: the parameter's.
        module: that owns it.
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.max_norm is None and (module.padding_idx is None or isinstance(module, nn.EmbeddingBag))
    return conv_and_linear(name, module) or isinstance(module, nn.RNNBase | nn.RNNCellBase)


def by_name(patterns: Sequence[str], network: nn.Module) -> Predicate:
    """Return the choice of parameters by patterns of their names, such as ``embed*``; each must fit one at least.

    Args:
        patterns: shell patterns.
        network: that has the parameters.
    """
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = nearest(pattern, names)
            hint = near if near.startswith("; did") else f"; they have names such as '{names[0]}'" if names else ""
            raise OptionError(f"bayesian: '{pattern}' fits no trainable parameter{hint}")
    return lambda name, _module: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def take_parameters(
    network: nn.Module, bayesian: Predicate
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Take a network's trainable parameters out of it, so that flat tensors are their only home.

    Tied parameters keep one home and get the same view.

    Args:
        network: a copy, which is changed.
        bayesian: chooses parameters by (parameter name, module that owns it).

    Returns:
        The chosen ones, all others, and further names of tied ones, by name.
    """
    chosen: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    homes: dict[int, str] = {}
    for prefix, module in network.named_modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(_refresh_recurrent_weights)
            module.register_forward_hook(_forget_recurrent_weights, always_call=True)
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.requires_grad:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            if isinstance(parameter, nn.UninitializedParameter):
                raise InputError(f"parameter '{name}' is lazy; run the network once before making it Bayesian")
            if parameter.dtype != torch.float32:
                raise InputError(f"parameter '{name}' is {parameter.dtype}, expected torch.float32")
            if id(parameter) in homes:
                aliases[name] = homes[id(parameter)]
            else:
                homes[id(parameter)] = name
                (chosen if bayesian(name, module) else others)[name] = parameter.detach()
            module._parameters[leaf] = None
    return chosen, others, aliases


def _refresh_recurrent_weights(module: nn.Module, _inputs: Any) -> None:
    # Recurrent modules keep a list of their own beside the parameters; functional_call does not know of it.
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # type: ignore[union-attr,assignment]


def _forget_recurrent_weights(module: nn.Module, _inputs: Any, _output: Any) -> None:
    # A draw that stays there after the pass would keep its graph alive, and a copy of the network is refused then.
    module._flat_weights = [None] * len(module._flat_weights_names)  # type: ignore[arg-type,assignment]


def release_recurrent_weights(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            _refresh_recurrent_weights(module, ())
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in list(hooks.items()):
                    if hook in (_refresh_recurrent_weights, _forget_recurrent_weights):
                        del hooks[key]
                        module._forward_hooks_always_called.pop(key, None)


def _newly_infinite(given: Tensor, expected: Tensor) -> bool:
    # Attention masks hold -inf on purpose: what the network itself holds there is no fault.
    bad = ~given.isfinite()
    return bool(bad.any()) and bool((bad.to(expected.device) & expected.isfinite()).any())


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of tensors and their names, whatever device they are on."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        # One number of a longer row is contiguous to torch, but no bytes: it is copied.
        tensor = tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def require_same(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], origin: str) -> None:
    """Refuse tensors that have not the expected names and shapes, or are not finite where those are.

    Args:
        given: what a file or user gave.
        expected: what is needed.
        origin: where the former come from, which begins the error.
    """
    for name, tensor in expected.items():
        if name not in given:
            raise InputError(f"{origin}: has no tensor '{name}'; is it of another network?")
        if given[name].shape != tensor.shape:
            shapes = f"{tuple(given[name].shape)}, expected {tuple(tensor.shape)}"
            raise InputError(f"{origin}: tensor '{name}' has shape {shapes}; is it of another network?")
        if _newly_infinite(given[name], tensor):
            raise InputError(f"{origin}: tensor '{name}' holds values that are not finite")
    extra = [name for name in given if name not in expected]
    if extra:
        raise InputError(f"{origin}: has a tensor '{extra[0]}' that this network has not; is it of another network?")
