"""Keep peers different: in their weights, in how their features relate a batch's images, and in their mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.errors import InputError, OptionError
from peerbayes.math import divergences
from peerbayes.terms.definition import Shapes, term
from peerbayes.terms.fusion import Fusion, vectors
from peerbayes.terms.schedules import NotNegative
from peerbayes.terms.step import Step

Form = Literal["softplus", "linear"]


def _repel(distance: Tensor, form: Form) -> Tensor:
    # softplus(−D) fades as peers grow different; −D never does, which the paper warns of.
    return F.softplus(-distance) if form == "softplus" else -distance


@term(between_peers=True)
def weight_diversity(
    step: Step,
    peer: str,
    *,
    weight: float = 1.0,
    distance: Literal["w2", "kl", "symmetric_kl"] = "w2",
    reduction: Literal["layer_mean_sum", "mean", "sum", "relative"] = "layer_mean_sum",
    scale: float = 1.0,
    form: Form = "softplus",
) -> Tensor:
    """Return weight · mean over j≠i of softplus(−scale · D(q_i, q_j)), the other peer's (μ_j, σ_j) detached.

    ``distance``: ``w2`` has elements d = (μ_i − μ_j)² + (σ_i − σ_j)²; ``kl`` is KL(q_i ‖ q_j) and ``symmetric_kl`` its
    mean with KL(q_j ‖ q_i), by element. ``reduction`` makes D of the elements: ``layer_mean_sum`` = Σ_l mean_{i∈l} d,
    ``mean``, ``sum``, or ``relative`` = Σ d / (‖μ_i‖² + ‖μ_j‖²). ``form="linear"`` is the plain −D.

    Args:
        step: the step, as the peer sees it.
        peer: the peer's name, i.
        weight: factor of the term.
        distance: by element: ``w2``, ``kl`` or ``symmetric_kl``.
        reduction: of the elements.
        scale: factor of D.
        form: ``softplus``, or ``linear``, which never fades.
    """

    def repulsion(other: str) -> Tensor:
        step.same_shapes(peer, other)
        elements = _weight_distance(step, peer, other, distance)
        if reduction == "layer_mean_sum":
            total = step.layer_mean_sum(peer, elements)
        elif reduction == "mean":
            total = elements.mean()
        elif reduction == "sum":
            total = elements.sum()
        else:
            total = elements.sum() / (step.mean(peer).square().sum() + step.mean(other).square().sum())
        step.note("distance", total)
        return _repel(scale * total, form)

    return weight * step.average(peer, repulsion)


def _weight_distance(step: Step, peer: str, other: str, distance: str) -> Tensor:
    mine, theirs = (step.mean(peer), step.std(peer)), (step.mean(other), step.std(other))
    if distance == "w2":
        return divergences.wasserstein2(*mine, *theirs)
    step.need_scales(f"distance = '{distance}'", peer, other)
    forth = divergences.gaussian_kl(*mine, *theirs)
    if distance == "kl":
        return forth
    return 0.5 * (forth + divergences.gaussian_kl(*theirs, *mine))


def _build_fusion(shapes: Shapes, options: Mapping[str, Any]) -> nn.Module | None:
    if options["fusion"] == "none" or options["distance"] != "kernel_kl":
        return None
    module = Fusion(
        [shapes.features[layer] for layer in options["layers"]],
        scaled=options["attention"] == "scaled",
        classes=shapes.classes if options["fusion"] == "task" else None,
    )
    module.requires_grad_(options["fusion"] != "fixed")
    module.shared = options["fusion"] == "shared"
    return module


@term(build=_build_fusion, between_peers=True)
def feature_diversity(
    step: Step,
    peer: str,
    *,
    layers: list[str],
    weight: float = 1.0,
    fusion: Literal["per_peer", "shared", "fixed", "task", "none"] = "per_peer",
    attention: Literal["scaled", "literal"] = "scaled",  # noqa: ARG001 (read by the builder of the fusion)
    pool: Literal["flat", "mean"] = "flat",
    kernel: Literal["cosine", "rbf"] = "cosine",
    distance: Literal["kernel_kl", "l1", "l2"] = "kernel_kl",
    scale: float = 1.0,
    form: Form = "softplus",
) -> Tensor:
    """Return weight · mean over j≠i of softplus(−scale · D), D = KL(P_j ‖ P_i) between peers' feature distributions.

    P is the conditional distribution p_{i|j} of a kernel over the batch (`divergences.kernel_log_conditional`) on fused
    features: cross-attention with queries from each layer and keys and values from the next, nested for more than two
    layers. The fusion has trainable projections per peer, one ``shared`` by all (its gradient averaged), ``fixed``
    random ones, ones trained only for the ``task`` through a small head while the diversity sees them as constants,
    or ``none`` (features of all layers as they are). ``attention``: ``scaled`` by 1/√e, or the ``literal`` equation.
    ``distance`` ``l1`` and ``l2`` compare raw features (mean over elements), the paper's negative controls.

    Args:
        step: the step, as the peer sees it.
        peer: the peer's name, i.
        layers: names of the layers, from early to late.
        weight: factor of the term.
        fusion: of the layers' features: ``per_peer``, ``shared``, ``fixed``, ``task`` or ``none``.
        attention: whether scores are ``scaled`` by 1/√e, or ``literal``.
        pool: ``flat`` lays tokens end to end, ``mean`` averages them.
        kernel: ``cosine`` or ``rbf``.
        distance: ``kernel_kl``, or ``l1`` or ``l2`` between raw features.
        scale: factor of D.
        form: ``softplus``, or ``linear``, which never fades.
    """

    def repulsion(other: str) -> Tensor:
        if step.members(other) != step.members(peer):
            raise InputError(
                f"compares rows, but peer '{peer}' has {step.members(peer)} members and '{other}' {step.members(other)}"
            )
        if distance == "kernel_kl":
            divergence = divergences.kernel_kl(conditional(other), conditional(peer))
        else:
            divergence = _raw_distance(step, peer, other, layers, distance)
        step.note("distance", divergence)
        return _repel(scale * divergence, form)

    def conditional(name: str) -> Tensor:
        return step.derived(
            name, "conditional", lambda other_step: _conditional(other_step, name, layers, fusion, pool, kernel)
        )

    value = weight * step.average(peer, repulsion)
    if fusion == "task" and distance == "kernel_kl":
        value = value + _task_loss(step, peer, layers)
    return value


def _conditional(step: Step, peer: str, layers: list[str], fusion: str, pool: str, kernel: str) -> Tensor:
    features = [step.features(peer, layer) for layer in layers]
    if fusion == "none":
        fused = torch.cat([vectors(feature, pool) for feature in features], -1)
    else:
        module = step.module(peer)
        parameters = {name: p.detach() if fusion == "task" else p for name, p in module.named_parameters()}
        fused = vectors(torch.func.functional_call(module, parameters, (features,)), pool)
    return divergences.kernel_log_conditional(step.whole_batch(fused.float()), kernel)  # type: ignore[arg-type]


def _task_loss(step: Step, peer: str, layers: list[str]) -> Tensor:
    # Trains the fusion and its head alone: the features come detached.
    module = step.module(peer)
    assert isinstance(module, Fusion)
    loss = step.cross_entropy(module.classify([step.features(peer, layer).detach() for layer in layers]))
    step.note("task", loss)
    return loss


def _raw_distance(step: Step, peer: str, other: str, layers: list[str], distance: str) -> Tensor:
    values = []
    for layer in layers:
        mine, theirs = step.features(peer, layer), step.features(other, layer)
        if mine.shape != theirs.shape:
            raise OptionError(
                f"distance: '{distance}' needs features of equal shape, but '{layer}' is {tuple(mine.shape)} in "
                f"'{peer}' and {tuple(theirs.shape)} in '{other}'"
            )
        gap = mine - theirs
        values.append(gap.abs().mean() if distance == "l1" else gap.square().mean())
    return torch.stack(values).mean()


@term(between_peers=True)
def prediction_diversity(step: Step, peer: str, *, weight: NotNegative = 1.0) -> Tensor:
    """Return weight · mean over j≠i of (1/B) Σ_b Σ_c √(p̃_ibc p̃_jbc), the other peer's p̃_j detached.

    p̃ are the probabilities of the classes that are not the image's label, made to sum to 1. The Bhattacharyya
    coefficient Σ √(p̃_i p̃_j) is 1 where peers would make the same mistakes, and 0 where they would never. What a peer
    thinks of the label itself is left to the likelihood.

    Args:
        step: the step, as the peer sees it.
        peer: the peer's name, i.
        weight: factor of the term.
    """
    logits = step.logits(peer)
    label = step.is_label(logits.shape[-1])

    def mistakes(name: str) -> Tensor:
        # Not −∞: with two classes, both labels of a mixed image leave nothing.
        return step.logits(name).masked_fill(label, -1e9).log_softmax(-1)

    return weight * step.average(peer, lambda other: (0.5 * (mistakes(peer) + mistakes(other))).exp().sum(-1).mean())
