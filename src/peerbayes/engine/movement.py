"""How far an epoch moves each group of a peer's parameters, and which groups do not move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from peerbayes.engine.stages import SHARED, StageState
from peerbayes.posteriors.base import Posterior

STILL = 1e-6  # a relative change an epoch that is none: about ten times float32's resolution
STILL_SCALES = 1e-4  # of scales, whose first values are made up: trained weights may stay where they are
STEPS = 32  # of an epoch; where it has fewer, a group may move by less
SAMPLE = 1 << 16  # numbers of a parameter that are looked at
_REMEDIES = {
    "deterministic": "raise the learning rate, or leave them alone by freeze_rest",
    "scales": "raise optimizer.scale_lr, or take steps of σ with optimizer.scale_space = 'sigma'",
    "helpers": "raise the learning rate or their term's weight, or drop the term",
}


def sampled(state: StageState, peers: Mapping[str, Posterior]) -> dict[str, Tensor]:
    """Return some of the numbers of each parameter that learns, σ for ρ, by ``owner|group|name``.

    Args:
        state: of the stage, with the parameters that learn.
        peers: by name; they know which parameters are ρ.
    """
    numbers = {}
    for owner, parameters in state.parameters.items():
        for name, parameter in parameters.items():
            flat = parameter.detach().flatten()
            some = flat[:: flat.numel() // SAMPLE | 1]  # an odd step, which meets all channels
            posterior = peers.get(owner)
            rho = posterior is not None and name in posterior.rhos
            numbers[f"{owner}|{_group(posterior, name)}|{name}"] = F.softplus(some) if rho else some.clone()
    return numbers


def _group(posterior: Posterior | None, name: str) -> str:
    if posterior is None or "." in name:  # of a term
        return "helpers"
    return "scales" if name in posterior.scales else "deterministic" if name == "rest" else "means"


def changes(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], peers: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return ‖after − before‖ / ‖before‖ by peer and group; helpers that all peers share are each one's.

    Args:
        before: what `sampled` returned; nothing where that is not known.
        after: what it returns an epoch later.
        peers: their names.
    """
    squares: dict[tuple[str, str], list[Tensor]] = {}
    for key, end in after.items():  # in the recipe's order: what comes of a checkpoint is by the alphabet
        owner, group, _ = key.split("|", 2)
        if key not in before:
            continue
        start = before[key].double()
        pair = torch.stack([(end.double() - start).square().sum(), start.square().sum()])
        for peer in peers if owner == SHARED else [owner]:
            squares.setdefault((peer, group), []).append(pair)
    if not squares:
        return {}
    sums = torch.stack([torch.stack(pairs).sum(0) for pairs in squares.values()]).tolist()
    moved: dict[str, dict[str, float]] = {}
    for (peer, group), (change, size) in zip(squares, sums, strict=True):
        moved.setdefault(peer, {})[group] = math.sqrt(change / (size or change or 1.0))
    return moved


def is_still(group: str, change: float, steps: int) -> bool:
    """Return whether a group of parameters does not move.

    Args:
        group: its name.
        change: what an epoch has changed it by, in parts of its size.
        steps: of the epoch.
    """
    return change < (STILL_SCALES if group == "scales" else STILL) * min(1.0, steps / STEPS)


def sentence(peer: str, group: str, change: float, epoch: int) -> str:
    """Return what a person is told of a group that does not move.

    Args:
        peer: its name.
        group: of parameters: means, scales, deterministic ones.
        change: relative to their size, over the epoch.
        epoch: of the stage.
    """
    who = "deterministic parameters" if group == "deterministic" else group
    moved = f"epoch {epoch} changed them by {change:.0e} of their size"
    return f"the {who} of peer '{peer}' do not move: {moved}; {_REMEDIES.get(group, 'raise the learning rate')}"
