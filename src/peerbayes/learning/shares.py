"""What each term contributes to a peer's gradient, and which terms contribute nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

INERT = 1e-4
_SAID = 10**9


def gradient_shares(values: Mapping[str, Tensor], parameters: Iterable[nn.Parameter]) -> dict[str, float]:
    """Return ‖∇ term‖ / Σ ‖∇ term'‖ over the given parameters, by term; the graphs are kept."""
    parameters = list(parameters)
    norms: dict[str, float] = {}
    for term, value in values.items():
        found: Iterable[Tensor | None] = ()
        if value.requires_grad:
            found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        norms[term] = sum(float(g.square().sum()) for g in found if g is not None) ** 0.5
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
