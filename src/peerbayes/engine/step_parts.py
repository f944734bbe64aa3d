"""The functions that a step is made of, each of which is compiled by itself, and the clock that they go by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes.data.transforms.augment import augment
from peerbayes.engine.processes import World
from peerbayes.engine.stages import StageState
from peerbayes.engine.teachers import run_functional
from peerbayes.math import noise
from peerbayes.math.noise import Address
from peerbayes.networks.inputs import to_unit
from peerbayes.posteriors.base import Posterior
from peerbayes.terms.definition import Term
from peerbayes.terms.step import Batch


@dataclass
class Clock:
    """When a step happens: host numbers, or tensors on the device for a captured step.

    Attributes:
        step: steps since the run began; the number of the step's addresses.
        place: batches since the epoch began.
        epoch: epochs since the stage began, with fraction.
    """

    step: int | Tensor
    place: int | Tensor
    epoch: float | Tensor


def prepare_images(
    images: Tensor, names: Sequence[str], seed: int, owner: str, number: int | Tensor, first: int
) -> Tensor:
    """Return augmented images in [0, 1]; the noise is that of step ``number``, for images ``first`` and on.

    Args:
        images: uint8 or in [0, 1], (B, ...).
        names: of augmentations, in their order.
        seed: of the run.
        owner: whose noise it is.
        number: of the step.
        first: place of the first image in the whole batch.
    """
    return to_unit(augment(images, names, Address(seed, owner, "augment", number), first))


def learnt(posterior: Posterior) -> list[nn.Parameter]:
    """Return the parameters that a posterior's terms have gradients for."""
    return [p for p in posterior.parameters() if p.requires_grad and p.numel()]


def place_peer(posterior: Posterior, keys: Tensor, number: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what `run_peer` needs of one draw; see `Posterior.training_weights`.

    Args:
        posterior: that is drawn from.
        keys: of the draw's address, from `noise.key_tensor`.
        number: of the draw's address, from `noise.number_tensor`.
    """
    size = posterior.noise_size
    return posterior.training_weights(noise.normal_from(noise.start_of(keys, number), size) if size else None)


def run_peer(
    posterior: Posterior,
    images: Tensor,
    flat: Tensor,
    extra: Tensor | None,
    layers: Sequence[str],
    autocast: torch.dtype | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return logits and features of a network with these weights.

    Args:
        posterior: whose network is run, in the mode it is in.
        images: in [0, 1], (B, ...).
        flat: the draw's weights, (size,).
        extra: what else `place_peer` returned.
        layers: whose outputs are wanted.
        autocast: dtype of the forward pass; None for float32.
    """
    with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
        logits, features = posterior.training_pass(images, flat, extra, layers)
    return logits.float(), [feature.float() for feature in features]


def term_value(term: Term, options: Mapping[str, Any], batch: Batch, peer: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a term's value for a peer, and what it notes beside it.

    Args:
        term: of the loss.
        options: of the term, from the recipe.
        batch: what terms see of the step.
        peer: whose loss it is.
    """
    notes: dict[tuple[str, str], Tensor] = {}
    value = term.value(replace(batch, notes=notes), peer, options)
    return value, {name: note for (_, name), note in notes.items()}


def total_and_figures(
    values: Sequence[Tensor], notes: Sequence[Tensor], logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of a peer's terms, and in one tensor, float32: the terms, the notes, and the accuracy.

    Args:
        values: of the peer's terms, scalars.
        notes: what the terms note, scalars.
        logits: (M · B, C), of M members.
        labels: (B,).
    """
    hits = logits.detach().argmax(-1) == labels.repeat(len(logits) // len(labels))
    figures = [*(value.detach() for value in values), *notes, hits.float().mean()]
    return torch.stack(list(values)).sum(), torch.stack([figure.float() for figure in figures])


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


def figure_names(state: StageState, batch: Batch, peers: Iterable[str]) -> list[str]:
    """Return ``peer|kind|name`` of everything that an epoch averages, in the order of a step's figures.

    Args:
        state: of the stage, with its terms.
        batch: any one; terms are run to see what they note.
        peers: their names.
    """
    keys = []
    for peer in peers:
        values_and_notes = state.of_terms(term_value, batch, peer)
        keys += [f"{peer}|terms|{term.name}" for term, _ in state.terms]
        keys += [f"{peer}|notes|{note}" for _, notes in values_and_notes for note in notes]
        keys.append(f"{peer}|train|accuracy")
    return keys


@dataclass(frozen=True)
class StepFunctions:
    """The functions that a step is made of, as they are or compiled.

    Each is compiled by itself and once, whoever calls it: peers of one network share its forward pass, and cohorts and
    stages with a term in common share the term.
    """

    prepare_images: Callable[..., Tensor] = prepare_images
    place_peer: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = place_peer
    run_peer: Callable[..., tuple[Tensor, list[Tensor]]] = run_peer
    run_functional: Callable[..., Tensor] = run_functional
    term_value: Callable[..., tuple[Tensor, dict[str, Tensor]]] = term_value
    total_and_figures: Callable[..., tuple[Tensor, Tensor]] = total_and_figures
