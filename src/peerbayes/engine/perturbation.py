"""Perturbations: steps of images to where teachers, or members of a student, differ."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from peerbayes.data.transforms.perturb import gaussian_step, guidance, pair, step_along
from peerbayes.engine.teachers import (
    FunctionalNetwork,
    Lane,
    Pass,
    Teachers,
    Tensors,
    all_logits,
    fixed,
    run_functional,
)
from peerbayes.errors import InputError
from peerbayes.math.divergences import mean_pairwise_kl
from peerbayes.math.noise import Address
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.settings import Perturb

PAIRS = ("tdiv", "tdiv_sdiv")  # perturbations that compare two teachers
SEVERAL = (*PAIRS, "bald")  # and those that need more than one
PICKS = (*PAIRS, "ods", "conf_ods")  # those that pick teachers at random, by their number
PART = 32  # images of one pair, where the effect of a step is looked at: a batch has one alone


@dataclass(frozen=True)
class Passes:
    """How networks that do not learn are run at a step.

    Attributes:
        tensors: of the teachers.
        run: `run_functional`, or what a compiler has made of it.
        autocast: the type that networks compute in.
        lane: see `Teachers.logits`.
        forked: a context at whose end all lanes have been run.
    """

    tensors: Sequence[Tensors]
    run: Pass = run_functional
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
        self.student: tuple[Posterior, FunctionalNetwork] | None = None
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
            self.student = student, FunctionalNetwork.of(student)

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
        assert self.kind != "none"
        assert self.kind != "gaussian"
        address = self._address(number)
        teachers, moved = self.teachers, images.detach().requires_grad_(True)
        scale: float | Tensor = 1.0
        with torch.enable_grad():
            if self.kind == "ods" or self.kind == "conf_ods":
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
            elif self.kind == "tdiv" or self.kind == "tdiv_sdiv":
                pairs = self._pair(pair(address, len(teachers), images.device), passes)
                with passes.forked():
                    compared = [
                        _target_and_logits(two, images, moved, passes.lane, 2 * n) for n, two in enumerate(pairs)
                    ]
                apart = [_cross_entropy(target, logits) for target, logits in compared]
                value = apart[0] - apart[1] if len(apart) > 1 else apart[0]
            else:
                assert_never(self.kind)
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
            student, network = self.student
            kept = fixed(student)

            def member(x: Tensor, which: int) -> Tensor:
                with torch.no_grad():
                    own = Tensors(student.member(chosen[which]).flat.detach(), student.rest.detach(), kept)
                return run(network, x, own, autocast)

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
