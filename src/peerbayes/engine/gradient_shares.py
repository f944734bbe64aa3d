"""What each term contributes to a peer's gradient, and which terms contribute nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes.engine.position import Position
from peerbayes.engine.processes import World

INERT = 1e-4
OFF = ("weight", "alpha")  # options of terms that switch them off when they are 0
_SAID = 10**9


def norm_and_value(value: Tensor, parameters: Sequence[nn.Parameter], world: World) -> Tensor:
    """Return ‖∇ value‖ over the parameters, and the value, (2,), of means over processes; the graph is kept.

    The norm of a value that no gradient flows from is NaN.

    Args:
        value: a term's, a scalar.
        parameters: that its gradient is taken to.
        world: processes that each see a slice of the batch.
    """
    parts: Sequence[Tensor] = ()
    if value.requires_grad:
        parts = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    flat = torch.cat([part.detach().flatten().float() for part in (*parts, value)])
    world.average([flat])
    norm = flat[:-1].square().sum().sqrt() if parts else flat.new_full((), math.nan)
    return torch.stack([norm, flat[-1]])


def shares_of(norms: Mapping[str, float]) -> dict[str, float]:
    """Return each term's norm over the sum of all of them, NaN as 0; zeros where all are 0."""
    known = {term: 0.0 if math.isnan(norm) else norm for term, norm in norms.items()}
    whole = sum(known.values()) or 1.0
    return {term: norm / whole for term, norm in known.items()}


def _on_purpose(peer: str, measured: Sequence[float], options: Mapping[str, Any]) -> bool:
    """Return whether a term has nothing to say to a peer by what it is.

    It is switched off (for all, in every lesson of the peer, or at an end of a schedule), its value is a constant 0
    (the KL of a point, lessons of a peer whom nobody teaches), or the peer is the best, who teaches the rest.
    """
    (norm, value), graph = measured, options.get("graph")
    edges = [edge for edge in graph if edge["student"] == peer] if isinstance(graph, list) else [{}]
    off = all(any(_reaches_zero({**options, **edge}.get(key)) for key in OFF) for edge in edges)
    return off or (value == 0 and (math.isnan(norm) or graph == "best_to_rest"))


def _reaches_zero(option: Any) -> bool:
    """Return whether an option is 0, or a schedule that is 0 at times."""
    if isinstance(option, Mapping):
        return 0 in (option.get("start"), option.get("end"), *option.get("values", ()))
    return bool(option == 0)


def newly_inert(shares: Mapping[str, float], counts: dict[str, int], peer: str) -> list[str]:
    """Return the terms that are to be called inert now, and keep count in ``counts`` of how often a share was small.

    No gradient at all is said at once, a small share only when it stays small; each is said once.

    Args:
        shares: of the gradient, by term.
        counts: how often in a row a share was small, by peer and term; changed.
        peer: whose terms they are.
    """
    inert = []
    for term, share in shares.items():
        key = f"{peer}/{term}"
        counts[key] = counts.get(key, 0) + 1 if share < INERT else 0
        if counts[key] == (1 if share == 0 else 2):
            inert.append(term)
            counts[key] = _SAID
    return inert


def note_shares(
    peer: str, measured: Mapping[str, Sequence[float]], options: Mapping[str, Mapping[str, Any]], position: Position
) -> list[str]:
    """Note the shares of a peer's terms in the position; return sentences about terms that are found to be inert.

    Args:
        peer: its name.
        measured: ‖∇ term‖ and the term's value, by term.
        options: of the terms; what is inert on purpose, as with a weight of 0, is not spoken of, nor the
            first step of what is annealed, or of a KL that is 0: such a posterior is still its prior.
        position: where the run stands.
    """
    shares = position.shares[peer] = shares_of({term: norm for term, (norm, _) in measured.items()})
    wanted = {term: share for term, share in shares.items() if not _on_purpose(peer, measured[term], options[term])}
    if position.stage_step == 0:
        wanted = {
            term: share
            for term, share in wanted.items()
            if not options[term].get("anneal") and (term, measured[term][1]) != ("kl", 0)
        }
    return [
        f"{term} is inert for peer '{peer}' at step {position.step}: its share of the gradient is "
        f"{shares[term]:.0e} and its value {measured[term][1]:.3g}; change its scale or weight, or drop it"
        for term in newly_inert(wanted, position.inert, peer)
    ]
