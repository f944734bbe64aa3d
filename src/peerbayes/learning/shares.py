"""What each term contributes to a peer's gradient, and which terms contribute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from peerbayes.learning.distribution import World

INERT = 1e-4
_SAID = 10**9


def norm_and_value(value: Tensor, parameters: Sequence[nn.Parameter], world: World) -> Tensor:
    """Return ‖∇ value‖ over the parameters, and the value, (2,), of means over processes; the graph is kept."""
    parts: Sequence[Tensor] = ()
    if value.requires_grad:
        parts = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    flat = torch.cat([part.detach().flatten().float() for part in (*parts, value)])
    world.average([flat])
    return torch.stack([flat[:-1].square().sum().sqrt(), flat[-1]])


def shares_of(norms: Mapping[str, float]) -> dict[str, float]:
    """Return each term's norm over the sum of all of them; zeros where all are 0."""
    whole = sum(norms.values()) or 1.0
    return {term: norm / whole for term, norm in norms.items()}


def newly_inert(shares: Mapping[str, float], counts: dict[str, int], peer: str) -> list[str]:
    """Return the terms that are to be called inert now, and keep count in ``counts`` of how often a share was small.

    No gradient at all is said at once, a small share only when it stays small; each is said once.
    """
    found = []
    for term, share in shares.items():
        key = f"{peer}/{term}"
        counts[key] = counts.get(key, 0) + 1 if share < INERT else 0
        if counts[key] == (1 if share == 0 else 2):
            found.append(term)
            counts[key] = _SAID
    return found
