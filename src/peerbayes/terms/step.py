"""What a term sees of one training step: its own peer with gradients, the others without.

A term never touches another peer's tensors directly: every accessor detaches unless it is asked about the
term's own peer. Forgetting to detach, the classic bug of mutual learning, cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.posteriors.base import Posterior, Reduction, Weights


@dataclass
class Output:
    """What one peer made of the batch: its draw, logits (members · B, C) and features by layer."""

    posterior: Posterior
    weights: Weights
    logits: Tensor
    features: Mapping[str, Tensor]
    derived: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Batch:
    """One batch as all peers have seen it.

    Attributes:
        labels: (B,), int64.
        outputs: by peer name.
        modules: trainable helpers of terms, by (term, peer).
        train_size: images in the training split.
        batch_size: the recipe's batch size.
        epoch: epochs since the stage began, with fraction.
        gather: makes rows of the whole batch of those of this process; None where they are the whole.
        teachers: logits of the teachers, (M, B, C); None where there are none.
        notes: figures that terms want to be logged, by (peer, name); filled by the terms.
    """

    labels: Tensor
    outputs: Mapping[str, Output]
    modules: Mapping[tuple[str, str], nn.Module]
    train_size: int
    batch_size: int
    epoch: float | Tensor
    gather: Callable[[Tensor], Tensor] | None = None
    teachers: Tensor | None = None
    notes: dict[tuple[str, str], Tensor] = field(default_factory=dict)


class Step:
    """One term's view of a batch on behalf of one peer, its owner."""

    def __init__(self, batch: Batch, owner: str, term: str) -> None:
        self._batch = batch
        self._owner = owner
        self._term = term

    @property
    def labels(self) -> Tensor:
        """Labels, (B,); of a peer with M members those of all its rows, (M·B,)."""
        return self._batch.labels.repeat(self.members(self._owner))

    @property
    def train_size(self) -> int:
        """Images in the training split."""
        return self._batch.train_size

    @property
    def batch_size(self) -> int:
        """The recipe's batch size."""
        return self._batch.batch_size

    @property
    def epoch(self) -> float | Tensor:
        """Epochs since the stage began, with fraction; a tensor inside a captured step."""
        return self._batch.epoch

    @property
    def peers(self) -> list[str]:
        """Names of all peers, in their order."""
        return list(self._batch.outputs)

    def others(self, peer: str) -> list[str]:
        """Return the names of the other peers; whatever is asked about them comes detached."""
        return [name for name in self._batch.outputs if name != peer]

    def members(self, peer: str) -> int:
        """Return how many members a peer has, each with rows of its own; 1 for all but rank-one posteriors."""
        return len(self._batch.outputs[peer].logits) // len(self._batch.labels)

    def logits(self, peer: str) -> Tensor:
        """Return logits (B, C); (M·B, C) of a peer with M members, those of the first member first.

        Another peer's come in as many rows as the own ones: of log-probabilities that are averaged over its members if
        it has not as many.
        """
        logits, mine = self._batch.outputs[peer].logits, self.members(self._owner)
        if (theirs := self.members(peer)) != mine:
            if theirs > 1:
                logits = logits.log_softmax(-1).unflatten(0, (theirs, -1)).logsumexp(0) - math.log(theirs)
            logits = logits.repeat(mine, 1)
        return self._guard(peer, logits)

    def teachers(self) -> Tensor:
        """Return the logits of all teachers, (M, B, C), which do not learn."""
        if self._batch.teachers is None:
            raise InputError("needs teachers, but the recipe has none; add a [teachers] table")
        return self._batch.teachers

    def features(self, peer: str, layer: str) -> Tensor:
        """Return the output of a layer."""
        return self._guard(peer, self._batch.outputs[peer].features[layer])

    def weights(self, peer: str) -> Tensor:
        """Return the drawn Bayesian weights, flat (size,)."""
        return self._guard(peer, self._batch.outputs[peer].weights.flat)

    def mean(self, peer: str) -> Tensor:
        """Return the means of the Bayesian weights, flat (size,)."""
        return self._guard(peer, self._batch.outputs[peer].posterior.mean)

    def std(self, peer: str) -> Tensor:
        """Return the standard deviations of the Bayesian weights, flat (size,)."""
        output = self._batch.outputs[peer]
        return self._guard(peer, output.posterior.std if output.weights.std is None else output.weights.std)

    def kl(self, peer: str, reduction: Reduction = "sum") -> Tensor:
        """Return KL(posterior ‖ prior), reduced as `Posterior.kl` says. A scalar."""
        output = self._batch.outputs[peer]
        return self._guard(peer, output.posterior.kl(reduction, output.weights))

    def layer_mean_sum(self, peer: str, values: Tensor) -> Tensor:
        """Return Σ_l mean_{i∈l} values_i over the Bayesian tensors of a peer, for values of shape (size,)."""
        return self._batch.outputs[peer].posterior.layer_mean_sum(values)

    def same_shapes(self, peer: str, other: str) -> None:
        """Refuse two peers whose Bayesian tensors differ in name or shape."""
        mine = self._batch.outputs[peer].posterior.layout.shapes
        theirs = self._batch.outputs[other].posterior.layout.shapes
        if mine == theirs:
            return
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                shapes = [tuple(s) if s is not None else "no such tensor" for s in (mine.get(name), theirs.get(name))]
                raise InputError(
                    f"needs peers of equal shape, but '{name}' is {shapes[0]} in '{peer}' and {shapes[1]} in '{other}'"
                )

    def need_scales(self, why: str, *peers: str) -> None:
        """Refuse peers whose weights have no scales: points. ``why`` says what needs them."""
        for peer in peers:
            if not self._batch.outputs[peer].posterior.has_scales:
                raise InputError(f"{why} needs Bayesian peers, but '{peer}' is a point")

    def module(self, peer: str) -> nn.Module:
        """Return this term's trainable helper for its own peer; what others made with theirs comes by `derived`."""
        if peer != self._owner:  # a module cannot be handed out detached
            raise InputError(
                f"peer '{self._owner}' asked for the helper of peer '{peer}'; use step.derived for what that "
                "peer makes with it"
            )
        return self._batch.modules[self._term, peer]

    def derived(self, peer: str, key: str, make: Callable[[Step], Tensor]) -> Tensor:
        """Return ``make(step of that peer)``, computed once a batch; detached for all but that peer's terms."""
        cache = self._batch.outputs[peer].derived
        name = f"{self._term}/{key}"
        if name not in cache:
            cache[name] = make(Step(self._batch, peer, self._term))
        return self._guard(peer, cache[name])

    def whole_batch(self, rows: Tensor) -> Tensor:
        """Return the rows (B, ...) of all processes that share a batch, where that is asked for; else as they are.

        For terms that compare images with each other.
        """
        return rows if self._batch.gather is None else self._batch.gather(rows)

    def note(self, name: str, value: Tensor) -> None:
        """Log a figure beside the term's value."""
        self._batch.notes[self._owner, f"{self._term}.{name}"] = value.detach()

    def average(self, peer: str, pairwise: Callable[[str], Tensor]) -> Tensor:
        """Return the mean of ``pairwise(other)`` over the other peers; 0 for a peer alone."""
        values = [pairwise(other) for other in self.others(peer)]
        return torch.stack(values).mean() if values else self.labels.new_zeros((), dtype=torch.float32)

    def _guard(self, peer: str, tensor: Tensor) -> Tensor:
        return tensor if peer == self._owner else tensor.detach()
