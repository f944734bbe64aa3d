"""Batch-norm folded into the layer before it, for prediction: one pass over the activations less for each.

In evaluation mode batch-norm is y = (x − m) s + b with s = γ / √(v + ε), so a convolution or linear layer with weight W
and bias c before it can use W s and (c − m) s + b instead. That is exact up to rounding. The scale s is laid out like
the flat weights, so a draw is folded by one multiplication.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from peerbayes.posteriors.kernels import FusedConv, can_fuse

if TYPE_CHECKING:
    from peerbayes.posteriors.base import Posterior

_FOLDED: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module | None, dict[str, str]]] = weakref.WeakKeyDictionary()
_FUSED: weakref.WeakKeyDictionary[nn.Module, tuple[torch.device, nn.Module, frozenset[str]]] = (
    weakref.WeakKeyDictionary()
)


class Folded:
    """A posterior's network without the batch-norm layers that can be folded away; for one prediction.

    Args:
        posterior: whose network it is.
        half: compute in this type, with ReLU and residuals fused into convolutions; None for float32.
    """

    def __init__(self, posterior: Posterior, half: torch.dtype | None = None) -> None:
        self.posterior, self.half = posterior, half
        if posterior.network not in _FOLDED:
            _FOLDED[posterior.network] = _without_batch_norm(posterior)
        self.network, self.pairs = _FOLDED[posterior.network]
        self.scale: Tensor | None = None
        self.biases: dict[str, Tensor] = {}
        self.fused: frozenset[str] = frozenset()
        if self.pairs:
            self.scale, self.biases = self._constants()
            if half is not None:
                assert self.network is not None
                # A trace holds the buffers that it has met, so it is good for one device.
                if posterior.network not in _FUSED or _FUSED[posterior.network][0] != posterior.device:
                    _FUSED[posterior.network] = posterior.device, *_fused(self.network, self.pairs)
                _, self.network, self.fused = _FUSED[posterior.network]

    def __call__(self, images: Tensor, flat: Tensor) -> Tensor:
        """Return logits (B, C) of one draw, given as flat weights (size,)."""
        with torch.autocast(images.device.type, self.half) if self.half is not None else contextlib.nullcontext():
            return self._run(images, flat)

    def _run(self, images: Tensor, flat: Tensor) -> Tensor:
        posterior = self.posterior
        if self.scale is None:
            return posterior.run_network(images, posterior.named(flat))
        flat = flat * self.scale
        tensors = posterior.named(flat)
        if self.fused:
            cast = posterior.layout.views(flat.to(self.half))
            tensors |= {f"{layer}.weight": cast[f"{layer}.weight"] for layer in self.fused}
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


def _fused(bare: nn.Module, pairs: dict[str, str]) -> tuple[nn.Module, frozenset[str]]:
    """Return the network with ReLU, and sums before it, taken into folded convolutions, and the names of those."""
    traced = fx.symbolic_trace(bare)
    modules = dict(traced.named_modules())
    found = set()
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or node.target not in pairs or not can_fuse(modules[node.target]):
            continue
        last = _only_user(node)  # the batch-norm, which is an identity by now
        after, residual = _only_user(last), None
        if after is not None and after.target in _SUMS and len(after.args) == 2 and not after.kwargs:
            residual = after.args[0] if after.args[1] is last else after.args[1]
            after = _only_user(after) if isinstance(residual, fx.Node) and residual is not last else None
        if after is None or not _is_relu(after, modules):
            continue
        conv = modules[node.target]
        assert isinstance(conv, nn.Conv2d)
        traced.set_submodule(node.target, FusedConv(conv))
        with traced.graph.inserting_before(after):
            after.replace_all_uses_with(traced.graph.call_module(node.target, (node.args[0], residual)))
        found.add(str(node.target))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced.eval(), frozenset(found)


_SUMS = {operator.add, operator.iadd, torch.add}


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.ReLU)
    return node.target in {F.relu, torch.relu, torch.relu_, "relu", "relu_"}


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
