"""Multiply the inputs and outputs of layers by factors, a pair for each member: s ⊙ (W ∗ (r ⊙ x)) + b."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from peerbayes.errors import InputError
from peerbayes.math.noise import Address, integers, uniform
from peerbayes.networks.running import capture, evaluating, kept_buffers
from peerbayes.posteriors.base import Posterior

TRIED = 4  # rows of each member in a trial
NUMBERS = 1000  # compared numbers of a row
NEAR = 0.05  # of rows' spread; rows in another order are off by about the whole of it


@dataclass(frozen=True)
class Layer:
    """A weight with factors r and s.

    Attributes:
        weight: its name.
        modules: names of the modules that use it.
        into: channels in.
        out: channels out.
        groups: groups of a convolution.
        transposed: whether its first axis are the channels in.
    """

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
        """Return s_k r_kᵀ as it lies in the weight, (K, first axis, second axis).

        Args:
            r: (K, into).
            s: (K, out).
        """
        r, s = r.unflatten(1, (self.groups, -1)), s.unflatten(1, (self.groups, -1))
        rows, columns = (r, s) if self.transposed else (s, r)
        return (rows[:, :, :, None] * columns[:, :, None, :]).flatten(1, 2)

    def tensors(self, r: Tensor, s: Tensor) -> dict[str, Tensor]:
        """Return the factors by the names that a call of the network takes them under.

        Args:
            r: (M, B, into).
            s: (M, B, out).
        """
        dots = [f"{prefix}." if prefix else "" for prefix in self.modules]
        return {f"{dot}factor_{letter}": factor for dot in dots for letter, factor in (("r", r), ("s", s))}


def layers_of(posterior: Posterior) -> list[Layer]:
    """Return the weights that get factors: those chosen, and used by convolutions and linear layers only."""
    users: dict[str, list[tuple[str, nn.Module, str]]] = {}
    inside = {id(m.out_proj) for m in posterior.network.modules() if isinstance(m, nn.MultiheadAttention)}
    for prefix, module in posterior.network.named_modules():
        for leaf in module._parameters:
            name = f"{prefix}.{leaf}" if prefix else leaf
            home = posterior.aliases.get(name, name)
            if home in posterior.layout.shapes:
                users.setdefault(home, []).append((prefix, module, leaf))
    layers = []
    for home, uses in users.items():
        shapes = {_channels(m) if leaf == "weight" and id(m) not in inside else None for _, m, leaf in uses}
        if shapes == {None}:
            continue
        (shape, *others) = shapes
        if shape is None or others:
            kinds = ", ".join(f"{type(m).__name__} '{prefix}'" for prefix, m, _ in uses)
            raise InputError(
                f"parameter '{home}' is shared by layers of different kinds ({kinds}), which no pair of factors "
                "serves; leave it out with bayesian=..."
            )
        layers.append(Layer(home, tuple(prefix for prefix, _, _ in uses), *shape))
    return layers


def _channels(module: nn.Module) -> tuple[int, int, int, bool] | None:
    if isinstance(module, _ConvNd):
        return module.in_channels, module.out_channels, module.groups, module.transposed
    return (module.in_features, module.out_features, 1, False) if isinstance(module, nn.Linear) else None


def attach(network: nn.Module, layers: Sequence[Layer]) -> None:
    """Let modules multiply by factors that functional_call hands them; without any they compute as before.

    Args:
        network: whose modules they are.
        layers: the weights with factors.
    """
    for prefix in (prefix for layer in layers for prefix in layer.modules):
        module = network.get_submodule(prefix)
        module.register_parameter("factor_r", None)
        module.register_parameter("factor_s", None)
        module.register_forward_pre_hook(functools.partial(_scale_input, prefix), with_kwargs=True)
        module.register_forward_hook(functools.partial(_scale_output, prefix))


def detach(network: nn.Module, layers: Sequence[Layer]) -> None:
    """Undo `attach`.

    Args:
        network: whose modules they are.
        layers: the weights with factors.
    """
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
    x, *others = given or (named["input"],)  # the name that all these layers use
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
        raise _out_of_order(f"layer '{name}' works on", rows.shape, members)
    split: Tensor = rows.unflatten(0, (members, images, -1))
    return split


def _broadcast(module: nn.Module, factor: Tensor, rows: Tensor) -> Tensor:
    """Return factors (M, B, channels) with axes of length one wherever (M, B, T, ...) has none of theirs."""
    ones, channels = [1] * (rows.dim() - 2), factor.shape[2]
    axes = [*ones, channels] if isinstance(module, nn.Linear) else [channels, *ones]
    return factor.view(*factor.shape[:2], 1, *axes)


# ---- whose rows they are ------------------------------------------------------------------------------------------


@torch.no_grad()
def check_rows(
    network: nn.Module,
    layers: Sequence[Layer],
    captured: Sequence[str],
    members: int,
    inputs: Tensor,
    run: Callable[[Tensor], Tensor],
) -> None:
    """Check that rows of layers, features and logits come member by member when members share a batch.

    The network is run without factors, on a few rows of each member alone and on those of all members together. What a
    layer sees of them together must be what it sees of each alone, one after another. A network that draws random
    numbers in any mode passes, too, if other rows of the last member change what a layer sees of that member only.

    Args:
        network: its buffers, its modes and the state of random generators stay as they are.
        layers: that get factors.
        captured: names of layers whose outputs are used.
        members: M.
        inputs: prepared, (B, ...).
        run: the network with weights of which no two are alike.
    """
    rows = inputs[torch.arange(TRIED, device=inputs.device) % len(inputs)]
    if rows.is_floating_point():  # so that no two are alike
        rows = rows + uniform(Address(0, "trial", "rows"), rows.numel(), rows.device).view(rows.shape).to(rows.dtype)
    else:
        tokens = integers(Address(0, "trial", "rows"), int(rows.max()) + 1, rows.numel(), rows.device)
        rows = tokens.view(rows.shape).to(rows.dtype)
    parts = [rows.roll(member, 0) for member in range(members)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_buffers(network))
        stack.enter_context(torch.autocast(inputs.device.type, enabled=False))
        stack.enter_context(_WithoutDropout())
        for module in network.modules():  # containers may choose their children by their mode
            if not any(module.children()):
                stack.enter_context(evaluating(module))
        _record_rows(network, layers, captured, parts[0], run)  # a network that calls view runs twice the first time
        alone = [_record_rows(network, layers, captured, part, run) for part in parts]
        whole = _record_rows(network, layers, captured, torch.cat(parts), run)
        other = _record_rows(network, layers, captured, torch.cat([*parts[:-1], rows[:1].expand_as(rows)]), run)
    for name, calls_together in whole.items():
        calls = [calls_together, other.get(name, []), *(each.get(name, []) for each in alone)]
        if any(len(call) != len(calls_together) for call in calls) or not all(map(_in_order, *calls)):
            raise _out_of_order(name, calls_together[0].shape, members)


class _WithoutDropout(TorchFunctionMode):
    """Drops nothing, also where a network's own code asks for it."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("training") and func is not F.batch_norm:
            named["training"] = False
        if "dropout_p" in named:
            named["dropout_p"] = 0.0
        return func(*args, **named)


class _Rows(NamedTuple):
    shape: torch.Size
    numbers: Tensor  # some of each row, (rows, numbers)

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:
        rows = torch.atleast_1d(tensor)[..., None].flatten(1)
        return cls(tensor.shape, rows[:, :: rows.shape[1] // NUMBERS + 1].nan_to_num().double())


def _record_rows(
    network: nn.Module, layers: Sequence[Layer], captured: Sequence[str], rows: Tensor, run: Callable[[Tensor], Tensor]
) -> dict[str, list[_Rows]]:
    """Return what comes into the layers, call by call, and what captured ones and the network return."""
    seen: dict[str, list[_Rows]] = {}

    def keep(name: str, _module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.setdefault(f"layer '{name}' works on", []).append(_Rows.of(given[0] if given else named["input"]))

    hooks = [
        network.get_submodule(name).register_forward_pre_hook(functools.partial(keep, name), with_kwargs=True)
        for layer in layers
        for name in layer.modules
    ]
    try:
        with torch.random.fork_rng([rows.device] if rows.is_cuda else []), capture(network, captured) as features:
            logits = run(rows)
    finally:
        for hook in hooks:
            hook.remove()
    outputs = {f"layer '{name}' returns": feature for name, feature in features.items()}
    outputs["the network returns"] = logits
    return seen | {what: [_Rows.of(output)] for what, output in outputs.items() if isinstance(output, Tensor)}


def _in_order(whole: _Rows, other: _Rows, *alone: _Rows) -> bool:
    """Return whether rows of all members are those of each, one after another; see `check_rows`."""
    first = alone[0].shape
    if not first or any(rows.shape != first for rows in alone):
        return False
    if not whole.shape == other.shape == (len(alone) * first[0], *first[1:]):
        return False
    if _near(whole.numbers, torch.cat([rows.numbers for rows in alone])):
        return True
    *same, changed = zip(whole.numbers.split(first[0]), other.numbers.split(first[0]), strict=True)
    return all(_near(*pair) for pair in same) and not _near(*changed)


def _near(given: Tensor, expected: Tensor) -> bool:
    off, spread = (given - expected).norm(), (expected - expected.mean(0)).norm()
    return bool((off <= NEAR * spread) | (off <= 1e-5 * expected.norm()))


def _out_of_order(what: str, shape: torch.Size, members: int) -> InputError:
    return InputError(
        f"{what} shape {tuple(shape)}, whose first axis does not hold the images of {members} members, one member "
        "after another; put the batch first, or leave the layer out with bayesian=..."
    )
