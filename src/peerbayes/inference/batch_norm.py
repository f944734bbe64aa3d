"""Batch-norm in predictions: folded into the layer before it, and its statistics estimated for changed weights.

Folding saves one pass over the activations for each.

In evaluation mode batch-norm is y = (x − m) s + b with s = γ / √(v + ε), so a convolution with weight W
and bias c before it can use W s and (c − m) s + b instead. That is exact up to rounding. The scale s is laid out like
the flat weights, so a draw is folded by one multiplication.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from peerbayes.data.loader import augmented_batch
from peerbayes.data.splits import Split, order
from peerbayes.data.transforms.augment import augment as augmented
from peerbayes.errors import InputError
from peerbayes.kernels.launch import FusedConv, can_fuse
from peerbayes.math.noise import FIXED, Address
from peerbayes.networks.inputs import prepared
from peerbayes.networks.running import evaluating

if TYPE_CHECKING:
    from peerbayes.posteriors.base import Posterior


_FOLDED: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module | None, dict[str, str]]] = weakref.WeakKeyDictionary()
_FUSED: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module, frozenset[str]]] = weakref.WeakKeyDictionary()


class Folded:
    """A posterior's network with its foldable batch-norm layers folded, for one prediction.

    Args:
        posterior: owner of the network.
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
        self.kept: dict[str, Tensor] = {}
        if self.pairs:
            self.scale, self.biases = self._constants()
            if half is not None:
                assert self.network is not None
                if posterior.network not in _FUSED:
                    _FUSED[posterior.network] = _fused(posterior, self.network, self.pairs)
                self.network, self.fused = _FUSED[posterior.network]
            if self.fused and self.network is not None:
                # A trace has its own tensors, and only those it uses: pass those that are not drawn as well.
                self.used = {
                    f"{prefix}.{leaf}" if prefix else leaf
                    for prefix, module in self.network.named_modules()
                    for leaf in (*module._parameters, *module._buffers)
                }
                self.kept = dict(posterior.network.named_parameters()) | dict(posterior.network.named_buffers())

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
            tensors |= self.kept | {f"{layer}.weight": cast[f"{layer}.weight"] for layer in self.fused}
        for layer, norm in self.pairs.items():
            bias = tensors.pop(f"{layer}.bias", None)
            shift = self.biases[layer]
            # A layer's bias is scaled with the rest of flat.
            tensors[f"{layer}.bias"] = shift if bias is None else bias + shift
            for leaf in ("weight", "bias"):
                tensors.pop(f"{norm}.{leaf}", None)
        if self.fused:
            tensors = {name: tensor for name, tensor in tensors.items() if name in self.used}
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
    """Return a copy of the network without the foldable batch-norm layers, and their names by the layer before."""
    pairs = _foldable(posterior)
    if not pairs:
        return None, pairs
    bare = copy.deepcopy(posterior.network)
    for module, original in zip(bare.modules(), posterior.network.modules(), strict=True):
        # Share tensors with the original: statistics, frozen parameters and devices may change.
        module._buffers, module._parameters = original._buffers, original._parameters
    for norm in pairs.values():
        bare.set_submodule(norm, nn.Identity())
    return bare.eval(), pairs


class _Proxy(fx.Proxy):
    """Tracer that records ``x += y`` as in-place; torch's records a plain sum."""

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    __iadd__ = functools.partialmethod(_in_place, operator.iadd)
    __isub__ = functools.partialmethod(_in_place, operator.isub)
    __imul__ = functools.partialmethod(_in_place, operator.imul)
    __itruediv__ = functools.partialmethod(_in_place, operator.itruediv)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # otherwise results computed from a buffer would be constants

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _fused(posterior: Posterior, bare: nn.Module, pairs: dict[str, str]) -> tuple[nn.Module, frozenset[str]]:
    """Return the network with ReLU, and sums before it, fused into folded convolutions, and the names of those."""
    whole = posterior.materialise()
    for norm in pairs.values():
        whole.set_submodule(norm, nn.Identity())
    try:
        traced = fx.GraphModule(whole, _Tracer().trace(whole.eval()))
    except Exception:  # see _foldable
        return bare, frozenset()
    modules = dict(traced.named_modules())
    fused, gone = set(), set[fx.Node]()
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and isinstance(modules[node.target], nn.Identity) and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    nodes = list(traced.graph.nodes)
    positions = {node: position for position, node in enumerate(nodes)}
    for node in nodes:
        if node.op != "call_module" or node.target not in pairs or not can_fuse(modules[node.target]):
            continue
        after, residual = _only_user(node), None
        chain = [node, after]
        if after is not None and after.target in _SUMS and len(after.args) == 2 and not after.kwargs:
            residual = after.args[0] if after.args[1] is node else after.args[1]
            into_residual = after.target is operator.iadd and residual is after.args[0]
            plain_sum = isinstance(residual, fx.Node) and residual is not node and not into_residual
            after = _only_user(after) if plain_sum else None
            chain.append(after)
        if after is None or not _is_relu(after, modules):
            continue
        between = nodes[positions[node] : positions[after]]
        if any(_is_in_place(other, modules) for other in between if other not in gone.union(chain)):
            continue  # the convolution moves to its ReLU, and its inputs must not change in between
        conv = modules[node.target]
        assert isinstance(conv, nn.Conv2d)
        traced.set_submodule(node.target, FusedConv(conv))
        with traced.graph.inserting_before(after):
            after.replace_all_uses_with(traced.graph.call_module(node.target, (node.args[0], residual)))
        for done in reversed(chain):
            assert done is not None
            traced.graph.erase_node(done)
            gone.add(done)
        fused.add(str(node.target))
    if not fused:
        return bare, frozenset()
    traced.recompile()
    return traced.eval(), frozenset(fused)


_SUMS = {operator.add, operator.iadd, torch.add}


def _is_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    given = any(argument is True for argument in (*node.args[1:], node.kwargs.get("inplace")))
    operators = getattr(node.target, "__module__", "") == "_operator" and name.startswith(("i", "set"))
    return node.op in ("call_function", "call_method") and (name.endswith("_") or operators or given)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.ReLU)
    return node.target in {F.relu, torch.relu, torch.relu_, "relu", "relu_"}


def _foldable(posterior: Posterior) -> dict[str, str]:
    try:
        # With its parameters in place: a network may check whether it has one.
        graph = fx.symbolic_trace(posterior.materialise()).graph
    except Exception:  # a network that cannot be traced is run unchanged
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
            # Not linear layers: batch-norm may normalise another axis than their features.
            and isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            and len(before.users) == 1
            and calls[node.target] == calls[before.target] == 1
            and _may_fold(posterior, str(before.target), str(node.target))
        ):
            pairs[str(before.target)] = str(node.target)
    return pairs


def _may_fold(posterior: Posterior, layer: str, norm: str) -> bool:
    # The layer's tensors must be drawn and the batch-norm's must not be; neither may be tied to others.
    drawn = posterior.layout.shapes
    others = posterior.rest_layout.shapes
    tied = {*posterior.aliases, *posterior.aliases.values()}
    names = [f"{part}.{leaf}" for part in (layer, norm) for leaf in ("weight", "bias")]
    frozen = {name for name, _ in posterior.network.named_parameters()}  # those in training are in the flat tensors
    if not frozen.isdisjoint(names):
        return False
    return (
        f"{layer}.weight" in drawn
        and f"{layer}.bias" not in others
        and not any(f"{norm}.{leaf}" in drawn for leaf in ("weight", "bias"))
        and not any(name in tied for name in names)
    )


@torch.no_grad()
def recalibrate(
    network: nn.Module, batches: Split | Iterable[Any], batch_size: int = 512, augment: Sequence[str] = ()
) -> nn.Module:
    """Estimate batch-norm's statistics again, in place: the mean over batches of each batch's mean and variance.

    A network trained on crops needs the statistics of crops with their black borders: with those of whole images, wide
    ResNets on CIFAR-10 lost more than 2 points.

    Args:
        network: any plain module, such as `RankOne.average` returns; only these statistics change.
        batches: a split, or batches of images, or of (images, labels); every batch counts the same.
        batch_size: images in a batch of a split, in a fixed random order.
        augment: names of augmentations, those of training: ``recipe.data.augment``.

    Returns:
        The network.
    """
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return network
    device = norms[0].running_mean.device  # type: ignore[union-attr]
    address = Address(FIXED, "data", "recalibrate")
    if isinstance(batches, Iterable):
        given = (batch if isinstance(batch, Tensor) else batch[0] for batch in batches)
        made = (augmented(images.to(device), augment, address.at(n)) for n, images in enumerate(given))
    else:
        # Shuffled: if images are stored class by class, a batch of neighbours varies less than the whole split.
        parts, split = order(len(batches), address).split(batch_size), batches
        made = (augmented_batch(split, part, device, augment, address.at(n))[0] for n, part in enumerate(parts))
    momenta = [norm.momentum for norm in norms]
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    done = False
    with evaluating(network):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average
            norm.train()
        try:
            for images in made:
                network(prepared(images))
                done = True
            if not done:
                raise InputError("there are no batches to recalibrate with")
        except BaseException:
            for buffer, kept in before:
                buffer.copy_(kept)
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    return network
