"""Teachers: trained posteriors that do not learn."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.math.noise import Address, permutation
from peerbayes.posteriors.base import Posterior


@dataclass(frozen=True)
class FunctionalNetwork:
    """A network in evaluation mode that gets all of its tensors handed in, and how they lie in flat ones."""

    posterior: Posterior
    network: nn.Module

    @classmethod
    def of(cls, posterior: Posterior) -> FunctionalNetwork:
        """Take a posterior's network; it is copied, so that training mode stays what it is."""
        return cls(posterior, copy.deepcopy(posterior.network).eval())

    def same_as(self, other: FunctionalNetwork) -> bool:
        """Whether the other's tensors fit this network, whichever of them it keeps in which flat tensor."""
        mine, theirs = (
            (
                p.posterior.layout.shapes | p.posterior.rest_layout.shapes,
                {name: tensor.shape for name, tensor in fixed(p.posterior).items()},
                str(p.network),  # activations and the like, which have no tensors
            )
            for p in (self, other)
        )
        return mine == theirs


@dataclass(frozen=True)
class Tensors:
    """All tensors of a network: flat weights (size,), the rest (rest size,), and what is fixed, by name."""

    flat: Tensor
    rest: Tensor
    fixed: Mapping[str, Tensor]


def run_functional(
    network: FunctionalNetwork, images: Tensor, tensors: Tensors, autocast: torch.dtype | None
) -> Tensor:
    """Return logits (B, C), float32, in evaluation mode. Gradients flow to the images alone.

    Args:
        network: a network in evaluation mode.
        images: in [0, 1], (B, ...).
        tensors: that it gets: a draw, and its buffers.
        autocast: dtype of the forward pass; None for float32.
    """
    posterior = network.posterior
    named = posterior.layout.views(tensors.flat) | posterior.rest_layout.views(tensors.rest)
    named |= {alias: named[name] for alias, name in posterior.aliases.items()} | dict(tensors.fixed)
    with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
        return posterior.run_network(images, named, network.network).float()


Pass = Callable[[FunctionalNetwork, Tensor, Tensors, torch.dtype | None], Tensor]
Lane = Callable[[str], AbstractContextManager[Any]]  # a CUDA stream context, by name


class Teachers:
    """An ensemble: points, and Bayesian posteriors of which each step takes new draws.

    Args:
        posteriors: trained, on one device; they are not changed.
        draws: of each Bayesian one, in every step.
        seed: with the step's number, where their draws live.
    """

    def __init__(self, posteriors: Sequence[Posterior], draws: int = 1, seed: int = 0) -> None:
        if not posteriors:
            raise InputError("there are no teachers")
        self.draws, self.seed = draws, seed
        self.posteriors = [copy.deepcopy(posterior).requires_grad_(False).eval() for posterior in posteriors]
        self._networks = [FunctionalNetwork.of(posterior) for posterior in self.posteriors]
        self.places = [
            (place, number)
            for place, posterior in enumerate(self.posteriors)
            for number in range(draws if posterior.stochastic else 1)
        ]
        self.alike = all(self._networks[0].same_as(network) for network in self._networks)

    def __len__(self) -> int:
        return len(self.places)

    def tensors(self, step: int | Tensor) -> list[Tensors]:
        """Return each teacher's weights at a step; those of points are the same at all."""
        tensors = []
        for place, number in self.places:
            posterior = self.posteriors[place]
            address = Address(self.seed, f"teacher{place}", "draw", step * self.draws + number)
            if 1 < self.draws < posterior.members:
                address = self._of_some_member(address, posterior, step, number)
            tensors.append(Tensors(posterior.draw(address).flat, posterior.rest, fixed(posterior)))
        return tensors

    def _of_some_member(self, address: Address, posterior: Posterior, step: int | Tensor, number: int) -> Address:
        """Return where a draw of a member at random lies, others than those of the step's other draws."""
        # In turn, the first and the second of four would meet, and the third and the fourth, but never others.
        mixed = permutation(Address(self.seed, address.owner, "members", step), posterior.members, posterior.device)
        return address.at(address.number * posterior.members + mixed[number])

    def logits(
        self,
        run: Pass,
        images: Tensor,
        tensors: Sequence[Tensors],
        autocast: torch.dtype | None,
        lane: Lane = contextlib.nullcontext,
    ) -> list[Tensor]:
        """Return the logits (B, C) of each teacher, made in its own ``lane``: a context that may run beside others.

        Args:
            run: runs a network: `run_functional`, or what it was compiled to.
            images: in [0, 1], (B, ...).
            tensors: of each teacher.
            autocast: dtype of forward passes; None for float32.
            lane: by a teacher's name.
        """
        logits = []
        for number, ((place, _), drawn) in enumerate(zip(self.places, tensors, strict=True)):
            with lane(f"teacher {number}"):
                logits.append(run(self._networks[place], images, drawn, autocast))
        return logits

    def pick(
        self, run: Pass, images: Tensor, tensors: Sequence[Tensors], number: Tensor, autocast: torch.dtype | None
    ) -> Tensor:
        """Return the logits (B, C) of the teacher with this number, int64 (1,); they must have one network.

        Args:
            run: runs a network.
            images: in [0, 1], (B, ...).
            tensors: of each teacher.
            number: which teacher.
            autocast: dtype of the forward pass; None for float32.
        """
        tensors = [self._as_first(place, own) for (place, _), own in zip(self.places, tensors, strict=True)]
        flat, rest = (torch.stack(list(found)) for found in zip(*((t.flat, t.rest) for t in tensors), strict=True))
        chosen = {
            name: torch.stack([own.fixed[name] for own in tensors]).index_select(0, number)[0]
            for name in tensors[0].fixed
        }
        own = Tensors(flat.index_select(0, number)[0], rest.index_select(0, number)[0], chosen)
        return run(self._networks[0], images, own, autocast)

    def _as_first(self, place: int, own: Tensors) -> Tensors:
        """Return a posterior's tensors as they lie in the first one; a codebook, say, has its biases elsewhere."""
        first, posterior = ((p.layout, p.rest_layout) for p in (self.posteriors[0], self.posteriors[place]))
        if all(list(a.shapes.items()) == list(b.shapes.items()) for a, b in zip(first, posterior, strict=True)):
            return own
        named = posterior[0].views(own.flat) | posterior[1].views(own.rest)
        flat, rest = (layout.flatten(named).to(own.flat.device) for layout in first)
        return Tensors(flat, rest, own.fixed)


def fixed(posterior: Posterior) -> dict[str, Tensor]:
    """Return buffers and frozen parameters, which the network itself holds."""
    network = posterior.network
    return {name: tensor.detach() for name, tensor in (*network.named_buffers(), *network.named_parameters())}


@torch.no_grad()
def all_logits(
    images: Tensor,
    teachers: Teachers | None,
    tensors: Sequence[Tensors],
    student: Posterior,
    autocast: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return logits (M, B, C) of ``teachers`` and of a student's ``members``, of those that are several.

    Both are in evaluation mode.

    Args:
        images: in [0, 1], (B, ...).
        teachers: None where there are none.
        tensors: of each teacher.
        student: left in evaluation mode if it has several members.
        autocast: dtype of forward passes; None for float32.
    """
    logits = {}
    if teachers is not None and len(teachers) > 1:
        logits["teachers"] = torch.stack(teachers.logits(run_functional, images, tensors, autocast))
    if student.members > 1:
        student.eval()
        with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
            logits["members"] = student.forward_members(images)[0].float()
    return logits
