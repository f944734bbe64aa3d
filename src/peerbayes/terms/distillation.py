"""Learn from teachers: trained networks that do not learn, each with logits z_m for the images of the batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.math.dirichlet import dirichlet_kl, proxy_dirichlet
from peerbayes.math.divergences import mean_pairwise_kl
from peerbayes.math.simplex import MAX_VECTORS, least_norm_weights
from peerbayes.terms.definition import term
from peerbayes.terms.schedules import Temperature
from peerbayes.terms.step import Step


@term
def distil(
    step: Step,
    peer: str,
    *,
    weight: float = 1.0,
    temperature: Temperature = 4.0,
    teachers: Literal["mean", "one_to_one", "adaptive"] = "mean",
    cap: Annotated[float, Field(gt=0, le=1)] = 0.6,
    per: Literal["batch", "image"] = "batch",
) -> Tensor:
    """Return weight · T² · (1/B) Σ_b H[t_b, softmax(z_b / T)], with a target t of the teachers' p_m = softmax(z_m / T).

    ``mean``: t = (1/M) Σ_m p_m, which is the mean of the teachers' cross-entropies. ``one_to_one``: member m of a
    rank-one student learns from teacher m, and the loss is the mean over members. ``adaptive``: t = Σ_m ω_m p_m with
    the weights 0 ≤ ω ≤ ``cap`` for which ‖Σ_m ω_m g_m‖ is least, where g_m is the gradient of teacher m's loss by the
    student's logits: its mean over the batch, or ``per`` image (AE-KD).

    Args:
        step: the step, as the student sees it.
        peer: the student's name.
        weight: factor of the term.
        temperature: T.
        teachers: how the target is made: ``mean``, ``one_to_one`` or ``adaptive``.
        cap: largest weight ω of a teacher, for ``adaptive``.
        per: ``batch`` or ``image``: what has its own ω.
    """
    members = step.members(peer)
    _note_diversity(step, peer, members)
    targets = (step.teachers() / temperature).softmax(-1)
    log_p = (step.logits(peer) / temperature).log_softmax(-1).unflatten(0, (members, -1))
    if teachers == "one_to_one":
        if members != len(targets):
            raise InputError(
                f"teaches one to one, but peer '{peer}' has {members} members and there are {len(targets)} teachers"
            )
        target = targets
    elif teachers == "mean":
        target = targets.mean(0)
    else:
        if len(targets) > MAX_VECTORS:
            raise InputError(f"weighs at most {MAX_VECTORS} teachers adaptively, but there are {len(targets)}")
        weights = adaptive_weights(targets, log_p.detach().exp().mean(0), cap, per)
        target = (weights * targets).sum(0)
        step.note("largest_weight", weights.amax(0).mean())
    loss: Tensor = -(target * log_p).sum(-1).mean()
    return loss * (weight * temperature**2)


def _note_diversity(step: Step, peer: str, members: int) -> None:
    """Log the mean pairwise KL of the teachers, and of a student's members, for the images as given."""
    members_logits = step.logits(peer).detach().unflatten(0, (members, -1))
    for name, logits in (("teachers_apart", step.teachers()), ("members_apart", members_logits)):
        if len(logits) > 1:
            step.note(name, mean_pairwise_kl(logits.log_softmax(-1)))


def adaptive_weights(targets: Tensor, student: Tensor, cap: float, per: Literal["batch", "image"]) -> Tensor:
    """Return AE-KD's weights of the teachers, (M, 1, 1), or (M, B, 1) per image.

    Args:
        targets: the teachers' probabilities, (M, B, C).
        student: the student's probabilities, (B, C).
        cap: the largest weight.
        per: ``batch`` for one set of weights, ``image`` for one an image.
    """
    gaps = student - targets
    gaps = gaps.mean(1, keepdim=True) if per == "batch" else gaps
    vectors = gaps.transpose(0, 1)
    return least_norm_weights(vectors @ vectors.transpose(1, 2), max(cap, 1 / len(targets))).T.unsqueeze(-1)


@term
def proxy_end2(step: Step, peer: str, *, weight: float = 1.0, floor: Annotated[float, Field(gt=0)] = 1e-8) -> Tensor:
    """Return weight · (1/B) Σ_b KL(Dir(exp z_b + 1) ‖ Dir(β_b)) / Σ_c β_bc, β the teachers' Dirichlet (Proxy-EnD²).

    See `peerbayes.math.dirichlet.proxy_dirichlet` for β, with ``floor``.

    Args:
        step: the step, as the student sees it.
        peer: the student's name.
        weight: factor of the term.
        floor: smallest denominator of β.
    """
    beta = proxy_dirichlet(step.teachers().log_softmax(-1), floor).double()
    alpha = step.logits(peer).double().exp() + 1
    divergence = dirichlet_kl(alpha.unflatten(0, (step.members(peer), -1)), beta) / beta.sum(-1)
    return (weight * divergence.mean()).float()
