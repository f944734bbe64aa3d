"""Where a run stands, what each term contributes to a peer's gradient, and which parameters do not move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peerbayes.engine.stages import SHARED, StageState
from peerbayes.posteriors.base import Posterior

INERT = 1e-4
OFF = ("weight", "alpha")  # options of terms that switch them off when they are 0
_SAID = 10**9


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


@dataclass
class Position:
    """Where a run stands, with what an epoch has gathered so far."""

    stage: int = 0
    stage_step: int = 0
    step: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    inert: dict[str, int] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    still: list[str] = field(default_factory=list)  # peers' groups of parameters that were told of, once a run

    def begin_stage(self, number: int) -> None:
        """Go to the first step of a stage."""
        self.stage, self.stage_step = number, 0
        self.shares, self.inert, self.best = {}, {}, {}

    def add(self, keys: Sequence[str], sums: Sequence[float]) -> None:
        """Add sums of steps' figures, named ``peer|kind|name``, to those of the epoch, in the order of the keys.

        Args:
            keys: names of the figures.
            sums: of their values over some steps.
        """
        # Those of a checkpoint come by the alphabet.
        self.sums = {key: self.sums.get(key, 0.0) + value for key, value in zip(keys, sums, strict=True)}

    def end_epoch(self, steps: int) -> dict[str, dict[str, Any]]:
        """Return what the epoch was to each peer, on average over its steps; the sums begin anew."""
        peers: dict[str, dict[str, Any]] = {}
        for key, value in self.sums.items():
            peer, kind, name = key.split("|", 2)
            peers.setdefault(peer, {"terms": {}, "notes": {}, "train": {}})[kind][name] = value / steps
        for name, line in peers.items():
            line["loss"] = sum(line["terms"].values())
            line["train_accuracy"] = line.pop("train")["accuracy"]
            if name in self.shares:
                line["gradient_share"] = {t: self.shares[name][t] for t in line["terms"] if t in self.shares[name]}
        self.sums = {}
        return peers


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
