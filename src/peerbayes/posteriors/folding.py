"""Batch-norm folded into the layer before it, for prediction: one pass over the activations less for each.

In evaluation mode batch-norm is y = (x − m) s + b with s = γ / √(v + ε), so a convolution or linear layer with weight W
and bias c before it can use W s and (c − m) s + b instead. That is exact up to rounding. The scale s is laid out like
the flat weights, so a draw is folded by one multiplication.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from peerbayes.posteriors.base import Posterior

_FOLDED: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module | None, dict[str, str]]] = weakref.WeakKeyDictionary()


class Folded:
    """A posterior's network without the batch-norm layers that can be folded away; for one prediction."""

    def __init__(self, posterior: Posterior) -> None:
        self.posterior = posterior
        if posterior.network not in _FOLDED:
            _FOLDED[posterior.network] = _without_batch_norm(posterior)
        self.network, self.pairs = _FOLDED[posterior.network]
        self.scale: Tensor | None = None
        self.biases: dict[str, Tensor] = {}
        if self.pairs:
            self.scale, self.biases = self._constants()

    def __call__(self, images: Tensor, flat: Tensor) -> Tensor:
        """Return logits (B, C) of one draw, given as flat weights (size,)."""
        posterior = self.posterior
        if self.scale is None:
            return posterior.run_network(images, posterior.named(flat))
        tensors = posterior.named(flat * self.scale)
        for layer, norm in self.pairs.items():
            own = tensors.pop(f"{layer}.bias", None)
            shift = self.biases[layer]
            tensors[f"{layer}.bias"] = shift if own is None else own + shift  # its own is scaled with the rest of flat
            for leaf in ("weight", "bias"):
                tensors.pop(f"{norm}.{leaf}", None)
        return posterior.run_network(images, tensors, self.network)

    @torch.no_grad()
    def _constants(self) -> tuple[Tensor, dict[str, Tensor]]:
        posterior = self.posterior
        scale = torch.ones_like(posterior.mean)
        views = posterior.layout.views(scale)
        affine = posterior.rest_layout.views(posterior.rest)
        biases = {}
        for layer, norm in self.pairs.items():
            module = posterior.network.get_submodule(norm)
            mean, var = module.running_mean, module.running_var
            assert isinstance(mean, Tensor)
            assert isinstance(var, Tensor)
            factor = torch.rsqrt(var + module.eps)  # type: ignore[operator]
            if f"{norm}.weight" in affine:
                factor = factor * affine[f"{norm}.weight"]
            shift = -mean * factor
            biases[layer] = shift + affine[f"{norm}.bias"] if f"{norm}.bias" in affine else shift
            weight = views[f"{layer}.weight"]
            weight.mul_(factor.view(-1, *[1] * (weight.dim() - 1)))
            if f"{layer}.bias" in views:
                views[f"{layer}.bias"].mul_(factor)
        return scale, biases


def _without_batch_norm(posterior: Posterior) -> tuple[nn.Module | None, dict[str, str]]:
    """Return a copy of the network with the foldable batch-norm layers taken out, and their names by layer before."""
    pairs = _foldable(posterior)
    if not pairs:
        return None, pairs
    bare = copy.deepcopy(posterior.network)
    for module, original in zip(bare.modules(), posterior.network.modules(), strict=True):
        module._buffers = original._buffers  # one home: statistics and devices may change
    for norm in pairs.values():
        bare.set_submodule(norm, nn.Identity())
    return bare.eval(), pairs


def _foldable(posterior: Posterior) -> dict[str, str]:
    try:
        graph = fx.symbolic_trace(posterior.network).graph
    except Exception:  # a network that can't be traced, for whatever reason, is run as it is
        return {}
    modules = dict(posterior.network.named_modules())
    calls: dict[object, int] = {}
    for node in graph.nodes:
        calls[node.target] = calls.get(node.target, 0) + (node.op == "call_module")
    pairs: dict[str, str] = {}
    for node in graph.nodes:
        before = node.args[0] if node.args else None
        if node.op != "call_module" or not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        norm, layer = modules[node.target], modules[str(before.target)]
        if (
            isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
            and norm.running_mean is not None
            and isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
            and len(before.users) == 1
            and calls[node.target] == calls[before.target] == 1
            and _is_ours(posterior, str(before.target), str(node.target))
        ):
            pairs[str(before.target)] = str(node.target)
    return pairs


def _is_ours(posterior: Posterior, layer: str, norm: str) -> bool:
    # The layer's tensors must be drawn and the batch-norm's must not be; neither may be tied to others.
    drawn = posterior.layout.shapes
    others = posterior.rest_layout.shapes
    tied = {*posterior.aliases, *posterior.aliases.values()}
    names = [f"{part}.{leaf}" for part in (layer, norm) for leaf in ("weight", "bias")]
    return (
        f"{layer}.weight" in drawn
        and f"{layer}.bias" not in others
        and not any(f"{norm}.{leaf}" in drawn for leaf in ("weight", "bias"))
        and not any(name in tied for name in names)
    )
