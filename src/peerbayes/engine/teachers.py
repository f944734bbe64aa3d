"""Teachers, trained posteriors that do not learn, and steps of images to where they, or students, differ."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes.data.transforms.perturb import gaussian_step, guidance, pair, step_along
from peerbayes.errors import InputError
from peerbayes.math.divergences import mean_pairwise_kl
from peerbayes.math.noise import Address, permutation
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.settings import Perturb


@dataclass(frozen=True)
class Plain:
    """A network in evaluation mode that gets all of its tensors handed in, and how they lie in flat ones."""

    posterior: Posterior
    network: nn.Module

    @classmethod
    def of(cls, posterior: Posterior) -> Plain:
        """Take a posterior's network; it is copied, so that training mode stays what it is."""
        return cls(posterior, copy.deepcopy(posterior.network).eval())

    def same_as(self, other: Plain) -> bool:
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


def run_plain(plain: Plain, images: Tensor, tensors: Tensors, autocast: torch.dtype | None) -> Tensor:
    """Return logits (B, C), float32, in evaluation mode. Gradients flow to the images alone.

    Args:
        plain: a network in evaluation mode.
        images: in [0, 1], (B, ...).
        tensors: that it gets: a draw, and its buffers.
        autocast: dtype of the forward pass; None for float32.
    """
    posterior = plain.posterior
    named = posterior.layout.views(tensors.flat) | posterior.rest_layout.views(tensors.rest)
    named |= {alias: named[name] for alias, name in posterior.aliases.items()} | dict(tensors.fixed)
    with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
        return posterior.run_network(images, named, plain.network).float()


Pass = Callable[[Plain, Tensor, Tensors, torch.dtype | None], Tensor]
Lane = Callable[[str], AbstractContextManager[Any]]  # of a pass, by name: it may run beside those in other lanes


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
        self._plain = [Plain.of(posterior) for posterior in self.posteriors]
        self.places = [
            (place, number)
            for place, posterior in enumerate(self.posteriors)
            for number in range(draws if posterior.stochastic else 1)
        ]
        self.alike = all(self._plain[0].same_as(plain) for plain in self._plain)

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
            run: runs a network: `run_plain`, or what it was compiled to.
            images: in [0, 1], (B, ...).
            tensors: of each teacher.
            autocast: dtype of forward passes; None for float32.
            lane: by a teacher's name.
        """
        logits = []
        for number, ((place, _), drawn) in enumerate(zip(self.places, tensors, strict=True)):
            with lane(f"teacher {number}"):
                logits.append(run(self._plain[place], images, drawn, autocast))
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
        return run(self._plain[0], images, own, autocast)

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
        logits["teachers"] = torch.stack(teachers.logits(run_plain, images, tensors, autocast))
    if student.members > 1:
        student.eval()
        with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
            logits["members"] = student.forward_members(images)[0].float()
    return logits


PAIRS = ("tdiv", "tdiv_sdiv")  # perturbations that compare two teachers
SEVERAL = (*PAIRS, "bald")  # and those that need more than one
PICKS = (*PAIRS, "ods", "conf_ods")  # those that pick teachers at random, by their number
PART = 32  # images of one pair, where the effect of a step is looked at: a batch has one alone


@dataclass(frozen=True)
class Passes:
    """How networks that do not learn are run at a step.

    Attributes:
        tensors: of the teachers.
        run: `run_plain`, or what a compiler has made of it.
        autocast: the type that networks compute in.
        lane: see `Teachers.logits`.
        forked: a context at whose end all lanes have been run.
    """

    tensors: Sequence[Tensors]
    run: Pass = run_plain
    autocast: torch.dtype | None = None
    lane: Lane = contextlib.nullcontext
    forked: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


class Perturbation:
    """Steps of a batch of images, of the size of noise of 1/255 a pixel, before anybody learns from them.

    Args:
        options: the recipe's.
        teachers: whom they look at; Gaussian noise needs none.
        students: the peers; `tdiv_sdiv` looks at the members of one.
        seed: the run's seed.
    """

    def __init__(
        self, options: Perturb, teachers: Teachers | None, students: Mapping[str, Posterior], seed: int
    ) -> None:
        self.kind, self.temperature, self.seed = options.kind, options.temperature, seed
        self.teachers = teachers
        self.student: tuple[Posterior, Plain] | None = None
        if self.kind == "gaussian":
            return
        if teachers is None:
            raise InputError(f"perturb '{self.kind}' needs teachers, but the recipe has none; add a [teachers] table")
        if self.kind in SEVERAL and len(teachers) < 2:
            more = "set teachers.draws above 1" if teachers.posteriors[0].stochastic else "give it two or more"
            raise InputError(
                f"perturb '{self.kind}' compares teachers, but there is only one; {more}, or take a recipe for one, "
                "such as distillation/kd"
            )
        if self.kind in PICKS and not teachers.alike:
            raise InputError(
                f"perturb '{self.kind}' picks teachers at random, which must have one network in common; set "
                "stages.*.perturb.kind=bald, which looks at all of them, or none"
            )
        if self.kind == "tdiv_sdiv":
            name, student = next(iter(students.items()))
            if len(students) > 1 or student.members != len(teachers):
                raise InputError(
                    f"perturb 'tdiv_sdiv' compares the members of one rank-one student, {len(teachers)} as there are "
                    f"teachers, but peer '{name}' of {len(students)} is a {student.kind} with {student.members}"
                )
            self.student = student, Plain.of(student)

    def __call__(self, images: Tensor, number: int | Tensor, first: int, passes: Passes) -> Tensor:
        """Return the images of step ``number`` moved.

        Args:
            images: (B, C, H, W) in [0, 1].
            number: the step's.
            first: number of the first of the images.
            passes: how networks are run at this step.
        """
        if not images.is_floating_point() or images.dim() != 4:
            raise InputError(f"perturb '{self.kind}' is for images: set stages.*.perturb.kind=none for texts")
        if self.kind == "gaussian":
            return gaussian_step(images, self._address(number), first)
        return step_along(images, *self.slope(images, number, first, passes))

    def slope(self, images: Tensor, number: int | Tensor, first: int, passes: Passes) -> tuple[Tensor, float | Tensor]:
        """Return the gradient that images are moved along, and how far, as a part of a whole step; see `__call__`.

        Args:
            images: (B, ...), in [0, 1].
            number: of the step; the address of random choices.
            first: place of the first image in the whole batch.
            passes: how teachers are run.
        """
        assert self.teachers is not None
        address = self._address(number)
        teachers, moved = self.teachers, images.detach().requires_grad_(True)
        scale: float | Tensor = 1.0
        with torch.enable_grad():
            if self.kind in ("ods", "conf_ods"):
                picked = torch.zeros(1, dtype=torch.int64, device=images.device)
                if len(teachers) > 1:
                    picked = pair(address, len(teachers), images.device)[:1]
                said = teachers.pick(passes.run, moved, passes.tensors, picked, passes.autocast)
                p = (said / self.temperature).softmax(-1)
                value = (guidance(address.sub("guide"), len(images), p.shape[1], images.device, first) * p).sum()
                scale = p.detach().amax(-1) if self.kind == "conf_ods" else 1.0
            elif self.kind == "bald":
                with passes.forked():
                    logits = teachers.logits(passes.run, moved, passes.tensors, passes.autocast, passes.lane)
                value = _bald(torch.stack(logits).log_softmax(-1))
            else:
                pairs = self._pair(pair(address, len(teachers), images.device), passes)
                with passes.forked():
                    compared = [
                        _target_and_logits(two, images, moved, passes.lane, 2 * n) for n, two in enumerate(pairs)
                    ]
                apart = [_cross_entropy(target, logits) for target, logits in compared]
                value = apart[0] - apart[1] if len(apart) > 1 else apart[0]
            (gradient,) = torch.autograd.grad(value, moved)
        return gradient, scale

    def _address(self, number: int | Tensor) -> Address:
        return Address(self.seed, "data", "perturb", number)

    def in_parts(
        self, images: Tensor, number: int, tensors: Sequence[Tensors], autocast: torch.dtype | None = None
    ) -> Tensor:
        """Return the images moved in parts as if by steps ``number`` and on, for a mean over pairs.

        Args:
            images: (N, ...), in [0, 1].
            number: of the first part's step.
            tensors: of the teachers, at their draws.
            autocast: dtype of forward passes; None for float32.
        """
        parts = images.split(PART)
        return torch.cat(
            [self(part, number + place, 0, Passes(tensors, autocast=autocast)) for place, part in enumerate(parts)]
        )

    def effect(self, images: Tensor, number: int, student: Posterior, autocast: torch.dtype | None) -> dict[str, float]:
        """Return how far apart teachers, and a student's members, are for images before their step and after it.

        The mean KL of pairs, ``teachers_before``, ``teachers_after``, ``members_before`` and ``members_after``, in
        evaluation mode; of those that are several.

        Args:
            images: (N, ...), in [0, 1].
            number: of the step.
            student: whose members are compared.
            autocast: dtype of forward passes; None for float32.
        """
        with torch.no_grad():
            tensors = [] if self.teachers is None else self.teachers.tensors(number)
        both = torch.cat([images, self.in_parts(images, number, tensors, autocast)])
        distances = {}
        for who, logits in all_logits(both, self.teachers, tensors, student, autocast).items():
            for when, part in zip(("before", "after"), logits.log_softmax(-1).chunk(2, 1), strict=True):
                distances[f"{who}_{when}"] = mean_pairwise_kl(part).item()
        return distances

    def _pair(self, chosen: Tensor, passes: Passes) -> list[Callable[[Tensor, int], Tensor]]:
        """Return functions of images and 0 or 1: the logits of two teachers and, if asked for, of two members."""
        teachers, found = self.teachers, []
        assert teachers is not None
        run, autocast = passes.run, passes.autocast
        found.append(lambda x, which: teachers.pick(run, x, passes.tensors, chosen[which : which + 1], autocast))
        if self.student is not None:
            student, plain = self.student
            kept = fixed(student)

            def member(x: Tensor, which: int) -> Tensor:
                with torch.no_grad():
                    own = Tensors(student.member(chosen[which]).flat.detach(), student.rest.detach(), kept)
                return run(plain, x, own, autocast)

            found.append(member)
        return found


def _target_and_logits(
    logits: Callable[[Tensor, int], Tensor], images: Tensor, moved: Tensor, lane: Lane, first: int
) -> tuple[Tensor, Tensor]:
    with lane(f"teacher {first}"), torch.no_grad():
        target = logits(images, 0)
    with lane(f"teacher {first + 1}"):
        return target, logits(moved, 1)


def _cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    # By the logits it has the gradient q − p of Σ_b KL(p ‖ q), p a constant: exactly 0 where both are the same.
    return ((logits.softmax(-1) - target.softmax(-1)).detach() * logits).sum()


def _bald(log_p: Tensor) -> Tensor:
    """Return Σ_b H[p̄] − (1/M) Σ_m H[p_m] for log-probabilities (M, B, C); by them, as p log p has no slope at 0."""
    mean = log_p.logsumexp(0) - math.log(len(log_p))
    return (log_p.exp() * log_p).mean(0).sum() - (mean.exp() * mean).sum()
