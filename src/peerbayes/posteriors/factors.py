"""Layers that multiply what comes in and what goes out by factors, a pair for each member: s ⊙ (W ∗ (r ⊙ x)) + b."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from peerbayes.errors import InputError
from peerbayes.posteriors.base import Posterior


@dataclass(frozen=True)
class Layer:
    """A weight with factors r and s: the modules that use it, its channels in and out, and how they lie in it."""

    weight: str
    modules: tuple[str, ...]
    into: int
    out: int
    groups: int
    transposed: bool

    @property
    def names(self) -> tuple[str, str]:
        """Names of r and s: those of the weight with ``r`` and ``s`` for ``weight``."""
        prefix = self.weight.removesuffix("weight")
        return f"{prefix}r", f"{prefix}s"

    def products(self, r: Tensor, s: Tensor) -> Tensor:
        """Return s_k r_kᵀ as it lies in the weight, (K, first axis, second axis), for r (K, into) and s (K, out)."""
        r, s = r.unflatten(1, (self.groups, -1)), s.unflatten(1, (self.groups, -1))
        rows, columns = (r, s) if self.transposed else (s, r)
        return (rows[:, :, :, None] * columns[:, :, None, :]).flatten(1, 2)

    def tensors(self, r: Tensor, s: Tensor) -> dict[str, Tensor]:
        """Return what a call of the network takes for r (M, B, into) and s (M, B, out), by name."""
        dots = [f"{prefix}." if prefix else "" for prefix in self.modules]
        return {f"{dot}factor_{letter}": factor for dot in dots for letter, factor in (("r", r), ("s", s))}


def layers_of(posterior: Posterior) -> list[Layer]:
    """Return the weights that get factors: chosen, and used by convolutions and linear layers alone."""
    users: dict[str, list[tuple[str, nn.Module, str]]] = {}
    inside = {id(m.out_proj) for m in posterior.network.modules() if isinstance(m, nn.MultiheadAttention)}
    for prefix, module in posterior.network.named_modules():
        for leaf in module._parameters:
            name = f"{prefix}.{leaf}" if prefix else leaf
            home = posterior.aliases.get(name, name)
            if home in posterior.layout.shapes:
                users.setdefault(home, []).append((prefix, module, leaf))
    found = []
    for home, uses in users.items():
        shapes = {_channels(m) if leaf == "weight" and id(m) not in inside else None for _, m, leaf in uses}
        if shapes == {None}:
            continue
        (shape, *others) = shapes
        if shape is None or others:
            layers = ", ".join(f"{type(m).__name__} '{prefix}'" for prefix, m, _ in uses)
            raise InputError(
                f"parameter '{home}' is shared by layers of different kinds ({layers}), which no pair of factors "
                "serves; leave it out with bayesian=..."
            )
        found.append(Layer(home, tuple(prefix for prefix, _, _ in uses), *shape))
    return found


def _channels(module: nn.Module) -> tuple[int, int, int, bool] | None:
    if isinstance(module, _ConvNd):
        return module.in_channels, module.out_channels, module.groups, module.transposed
    return (module.in_features, module.out_features, 1, False) if isinstance(module, nn.Linear) else None


def attach(network: nn.Module, layers: Sequence[Layer]) -> None:
    """Let modules multiply by factors that come by functional_call, like the weights; where none come, they do not."""
    for prefix in (prefix for layer in layers for prefix in layer.modules):
        module = network.get_submodule(prefix)
        module.register_parameter("factor_r", None)
        module.register_parameter("factor_s", None)
        module.register_forward_pre_hook(functools.partial(_scale_input, prefix), with_kwargs=True)
        module.register_forward_hook(functools.partial(_scale_output, prefix))


def detach(network: nn.Module, layers: Sequence[Layer]) -> None:
    """Undo `attach`."""
    for module in (network.get_submodule(prefix) for layer in layers for prefix in layer.modules):
        del module.factor_r, module.factor_s
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "func", None) in (_scale_input, _scale_output):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


def _scale_input(name: str, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
    r = module.factor_r
    if r is None:
        return None
    x, *others = given or (named["input"],)  # as all of these layers call it
    scaled = (_by_member(name, x, r) * _broadcast(module, r, x)).to(x.dtype).flatten(0, 2)
    return ((scaled, *others), named) if given else ((), {**named, "input": scaled})


def _scale_output(name: str, module: Any, _arguments: Any, y: Tensor) -> Tensor | None:
    s = module.factor_s
    if s is None:
        return None
    rows, factor = _by_member(name, y, s), _broadcast(module, s, y)
    if module.bias is None:
        return (rows * factor).to(y.dtype).flatten(0, 2)
    # s ⊙ (y − b) + b, with what is the same for all images put together first.
    shift = _broadcast(module, (1 - s[:, :1]) * module.bias, y)
    return torch.addcmul(shift, rows, factor).to(y.dtype).flatten(0, 2)


def _by_member(name: str, rows: Tensor, factor: Tensor) -> Tensor:
    """Return rows (M·B·T, ...) as (M, B, T, ...), for factors (M, B, channels)."""
    members, images, _ = factor.shape
    if len(rows) % (members * images):
        raise InputError(
            f"layer '{name}' works on shape {tuple(rows.shape)}, whose first axis is not that of the {members} times "
            f"{images} images; leave it out with bayesian=..."
        )
    split: Tensor = rows.unflatten(0, (members, images, -1))
    return split


def _broadcast(module: nn.Module, factor: Tensor, rows: Tensor) -> Tensor:
    """Return factors (M, B, channels) with axes of length one wherever (M, B, T, ...) has none of theirs."""
    ones, channels = [1] * (rows.dim() - 2), factor.shape[2]
    axes = [*ones, channels] if isinstance(module, nn.Linear) else [channels, *ones]
    return factor.view(*factor.shape[:2], 1, *axes)
