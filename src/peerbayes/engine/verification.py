"""Whether compiled parts of a step have the gradients of the eager ones: compilers have lost some without a word."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peerbayes.engine.perturbation import Passes
from peerbayes.engine.step_parts import Clock, StepFunctions, learnt, term_value
from peerbayes.engine.teachers import run_functional
from peerbayes.posteriors.flat_network import Weights
from peerbayes.terms.definition import Term
from peerbayes.terms.step import Batch, Output

if TYPE_CHECKING:
    from peerbayes.engine.cohort import Cohort

TERMS = 0.1  # how far a term's gradient may be off, relative to its norm: both are made of the same numbers
ROUNDING = 1e-6  # and relative to the largest of a peer's terms: one that nearly vanishes is made of rounding errors
NETWORKS = 2.0  # by what factor the norm of a network's may be: in half precision, with other units dropped
INSTEAD = "on a GPU --precision float32 needs no compiler"


def verify(cohort: Cohort, clock: Clock, reseed: Callable[[], None]) -> None:
    """Fail where the gradient of a compiled term, peer's network or perturbation is not that of the eager one.

    Of teachers that images are not moved by, the logits are compared.

    What is not finite is left to the step itself, which says so.

    Args:
        cohort: with compiled parts; its buffers change as in a step.
        clock: of the step that is tried.
        reseed: puts torch's generators where they are at the step.
    """
    devices = [cohort.device] if cohort.device.type == "cuda" else []
    # An eager step may need more memory than a compiled one, which is then trusted.
    with torch.random.fork_rng(devices), contextlib.suppress(torch.OutOfMemoryError):
        _verify(cohort, clock, reseed)


def _verify(cohort: Cohort, clock: Clock, reseed: Callable[[], None]) -> None:
    made = cohort.parts
    reseed()
    with cohort.eager(), torch.no_grad():
        batch = cohort.forward(clock)
    for peer, posterior in cohort.peers.items():
        parameters = learnt(posterior)
        apart: dict[str, tuple[float, float]] = {}
        for term, options in cohort.state.terms if cohort.recipe.update == "simultaneous" else ():
            eager, found = (
                _of_term(ask, term, options, batch, peer, parameters) for ask in (term_value, made.term_value)
            )
            apart[term.name] = float((found - eager).norm()), float(eager.norm())
        largest = max((norm for _, norm in apart.values()), default=0.0)
        for name, (off, norm) in apart.items():
            if math.isfinite(norm) and not off <= TERMS * norm + ROUNDING * largest:
                raise RuntimeError(
                    f"torch {torch.__version__} compiles term '{name}' of peer '{peer}' to one whose gradient is "
                    f"off by {off:.2g} at a norm of {norm:.2g}; {INSTEAD}"
                )
        norms = []
        for parts in (StepFunctions(), made):
            reseed()
            with cohort.eager():
                cohort.parts = parts
                logits = cohort.output(peer, clock).logits
                norms.append(float(_flat(logits.square().mean(), parameters).norm()))
        _compare(f"the network of peer '{peer}' to one whose gradient has", norms)
    _verify_teachers(cohort, clock, made, reseed)


def _verify_teachers(cohort: Cohort, clock: Clock, made: StepFunctions, reseed: Callable[[], None]) -> None:
    """Compare what teachers say of the images of the last `forward`, and which way they would have them moved."""
    teachers, perturb, images = cohort.teachers, cohort.perturb, cohort.images
    if teachers is None:
        return
    said, ways = [], []
    for run in (run_functional, made.run_functional):
        reseed()
        with torch.no_grad():
            tensors = teachers.tensors(clock.step)
            said.append(float(torch.stack(teachers.logits(run, images, tensors, cohort.autocast)).norm()))
        if perturb is not None and perturb.kind != "gaussian":
            gradient, _ = perturb.slope(images, clock.step, 0, Passes(tensors, run, cohort.autocast))
            ways.append(float(gradient.norm()))
    _compare("the teachers to ones whose logits have", said)
    if perturb is not None and ways:
        _compare(f"what perturb '{perturb.kind}' asks of networks to something whose gradient has", ways)


def _compare(what: str, norms: Sequence[float]) -> None:
    eager, compiled = norms
    if math.isfinite(eager) and not eager / NETWORKS <= compiled <= eager * NETWORKS:
        raise RuntimeError(
            f"torch {torch.__version__} compiles {what} a norm of {compiled:.2g} instead of {eager:.2g}; {INSTEAD}"
        )


def _of_term(
    ask: Callable[..., tuple[Tensor, Any]],
    term: Term,
    options: Mapping[str, Any],
    batch: Batch,
    peer: str,
    own: Sequence[Tensor],
) -> Tensor:
    """Return the gradient of a term by a peer's output and parameters; of an output that nobody has looked at yet."""
    fresh = replace(batch, outputs={name: _leaf(output) for name, output in batch.outputs.items()}, notes={})
    output = fresh.outputs[peer]
    std = [] if output.weights.std is None else [output.weights.std]
    value, _ = ask(term, options, fresh, peer)
    return _flat(value, [output.logits, *output.features.values(), output.weights.flat, *std, *own])


def _leaf(output: Output) -> Output:
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(True)

    weights = output.weights
    leaves = Weights({}, leaf(weights.flat), None if weights.std is None else leaf(weights.std))
    features = {name: leaf(feature) for name, feature in output.features.items()}
    return Output(output.posterior, leaves, leaf(output.logits), features)


def _flat(value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    if not value.requires_grad:
        return value.new_zeros(1)
    gradients = torch.autograd.grad(value, inputs, materialize_grads=True)
    return torch.cat([gradient.flatten().float() for gradient in gradients])
