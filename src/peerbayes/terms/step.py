"""Present one training step to a term: its own peer with gradients, all others detached.

A term never touches another peer's tensors directly: every accessor detaches unless it is asked about the
term's own peer. Forgetting to detach, the classic bug of mutual learning, cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.errors import InputError

if TYPE_CHECKING:
    from peerbayes.posteriors.base import Posterior, Reduction
    from peerbayes.posteriors.flat_network import Weights


@dataclass
class Output:
    """One peer's outputs for the batch.

    Attributes:
        posterior: the peer.
        weights: its draw.
        logits: (members · B, C).
        features: by layer.
        derived: what terms share, by name.

    Example:
        >>> import torch
        >>> from peerbayes import Point
        >>> from peerbayes.terms import Output
        >>> peer, images = Point(torch.nn.Linear(4, 3)), torch.zeros(2, 4)
        >>> weights = peer.centre()
        >>> Output(peer, weights, logits=peer(images, weights), features={}).logits.shape
        torch.Size([2, 3])
    """

    posterior: Posterior
    weights: Weights
    logits: Tensor
    features: Mapping[str, Tensor]
    derived: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Batch:
    """One batch as all peers have seen it.

    Attributes:
        labels: (B,), int64; of mixed images those of the first of both.
        outputs: by peer name.
        modules: trainable helpers of terms, by (term, peer).
        train_size: images in the training split.
        batch_size: the recipe's batch size.
        epoch: epochs since the stage began, with fraction.
        gather: makes rows of the whole batch of those of this process; None where they are the whole.
        teachers: logits of the teachers, (M, B, C); None where there are none.
        notes: figures that terms want to be logged, by (peer, name); filled by the terms.
        shares: where images are mixed, the share of ``labels`` in each, (B,). The other label of an image is that of
            the mirrored place in the batch.

    Example:
        >>> import torch
        >>> from peerbayes.terms import Batch
        >>> batch = Batch(torch.tensor([0, 2]), outputs={}, modules={}, train_size=100, batch_size=2, epoch=0.5)
        >>> batch.teachers is None
        True
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
    shares: Tensor | None = None


class Step:
    """One term's view of a batch, on behalf of one peer.

    Whatever belongs to another peer comes detached.

    Args:
        batch: the batch as all peers have seen it.
        owner: the peer's name.
        term: the term's name.

    Example:
        >>> import torch
        >>> from peerbayes import Point, Step
        >>> from peerbayes.terms import Batch, Output
        >>> outputs, images = {}, torch.zeros(2, 4)
        >>> for name in ("a", "b"):
        ...     peer = Point(torch.nn.Linear(4, 3))
        ...     outputs[name] = Output(peer, peer.centre(), peer(images, peer.centre()), features={})
        >>> step = Step(Batch(torch.tensor([0, 2]), outputs, {}, 100, 2, 0.0), owner="a", term="mutual")
        >>> step.others("a"), step.logits("a").requires_grad, step.logits("b").requires_grad
        (['b'], True, False)
    """

    def __init__(self, batch: Batch, owner: str, term: str) -> None:
        self._batch = batch
        self._owner = owner
        self._term = term

    @property
    def labels(self) -> Tensor:
        """Labels, (B,); of a peer with M members those of all its rows, (M·B,). Of mixed images the first one."""
        return self._batch.labels.repeat(self.members(self._owner))

    def cross_entropy(self, logits: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean cross-entropy of logits (M·B, C) to the labels; of mixed images to both, by their shares.

        Args:
            logits: rows as those of the step's own peer.
            smoothing: share of the target that is spread evenly over all classes.
        """
        shares, labels = self._batch.shares, self.labels
        if shares is None:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)
        members = self.members(self._owner)
        first, other = (
            F.cross_entropy(logits, target.repeat(members), reduction="none", label_smoothing=smoothing)
            for target in (self._batch.labels, self._batch.labels.flip(0))
        )
        return torch.lerp(other, first, shares.repeat(members)).mean()

    def is_label(self, classes: int) -> Tensor:
        """Return which classes are labels of each row, (M·B, C): one, or both of a mixed image.

        Args:
            classes: C.
        """
        mask = F.one_hot(self._batch.labels, classes).bool()
        if self._batch.shares is not None:
            mask = mask | mask.flip(0)
        return mask.repeat(self.members(self._owner), 1)

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
        """Return the names of the other peers; all that is theirs comes detached."""
        return [name for name in self._batch.outputs if name != peer]

    def members(self, peer: str) -> int:
        """Return the number of a peer's members, each with its own rows: those of a rank-one posterior, times draws."""
        return len(self._batch.outputs[peer].logits) // len(self._batch.labels)

    def logits(self, peer: str) -> Tensor:
        """Return logits (B, C); (M·B, C) for a peer with M members, those of the first member first.

        Another peer's logits have as many rows as those of the step's own peer: if the numbers of members differ, they
        are log-probabilities averaged over its members.
        """
        logits, mine = self._batch.outputs[peer].logits, self.members(self._owner)
        if (theirs := self.members(peer)) != mine:
            if theirs > 1:
                logits = logits.log_softmax(-1).unflatten(0, (theirs, -1)).logsumexp(0) - math.log(theirs)
            logits = logits.repeat(mine, 1)
        return self._guard(peer, logits)

    def teachers(self) -> Tensor:
        """Return the logits of all teachers, (M, B, C), without gradient."""
        if self._batch.teachers is None:
            raise InputError("needs teachers, but the recipe has none; add a [teachers] table")
        return self._batch.teachers

    def features(self, peer: str, layer: str) -> Tensor:
        """Return the output of a layer, (M·B, ...).

        Args:
            peer: the peer's name.
            layer: the layer's name.
        """
        return self._guard(peer, self._batch.outputs[peer].features[layer])

    def weights(self, peer: str) -> Tensor:
        """Return the drawn Bayesian weights, flat (size,); of several draws the first."""
        return self._guard(peer, self._batch.outputs[peer].weights.flat)

    def mean(self, peer: str) -> Tensor:
        """Return the means of the Bayesian weights, flat (size,)."""
        return self._guard(peer, self._batch.outputs[peer].posterior.mean)

    def std(self, peer: str) -> Tensor:
        """Return the standard deviations of the Bayesian weights, flat (size,)."""
        output = self._batch.outputs[peer]
        return self._guard(peer, output.posterior.std if output.weights.std is None else output.weights.std)

    def kl(self, peer: str, reduction: Reduction = "sum") -> Tensor:
        """Return KL(posterior ‖ prior) in nats, a scalar.

        Args:
            peer: the peer's name.
            reduction: see `Posterior.kl`.
        """
        output = self._batch.outputs[peer]
        return self._guard(peer, output.posterior.kl(reduction, output.weights))

    def layer_mean_sum(self, peer: str, values: Tensor) -> Tensor:
        """Return Σ_l mean_{i∈l} values_i over the Bayesian tensors l of a peer, a scalar.

        Args:
            peer: the peer's name.
            values: by weight, flat (size,).
        """
        return self._batch.outputs[peer].posterior.layer_mean_sum(values)

    def same_shapes(self, peer: str, other: str) -> None:
        """Check that the Bayesian tensors of two peers have the same names and shapes.

        Args:
            peer: the peer's name.
            other: the other's name.
        """
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
        """Check that the weights of peers have scales, which points have not.

        Args:
            why: what needs them; begins the error.
            peers: their names.
        """
        for peer in peers:
            if not self._batch.outputs[peer].posterior.has_scales:
                raise InputError(f"{why} needs Bayesian peers, but '{peer}' is a point")

    def module(self, peer: str) -> nn.Module:
        """Return this term's trainable helper for its own peer; for another peer's results see `derived`."""
        if peer != self._owner:  # a module cannot be detached
            raise InputError(
                f"peer '{self._owner}' asked for the helper of peer '{peer}'; use step.derived for what that "
                "peer makes with it"
            )
        return self._batch.modules[self._term, peer]

    def derived(self, peer: str, key: str, make: Callable[[Step], Tensor]) -> Tensor:
        """Return ``make(step of that peer)``, computed once a batch; detached for all but that peer's terms.

        Args:
            peer: the peer's name.
            key: names the result among those of this term.
            make: computes it of a step that belongs to ``peer``.
        """
        cache = self._batch.outputs[peer].derived
        name = f"{self._term}/{key}"
        if name not in cache:
            cache[name] = make(Step(self._batch, peer, self._term))
        return self._guard(peer, cache[name])

    def whole_batch(self, rows: Tensor) -> Tensor:
        """Gather the rows (B, ...) of all processes that share a batch, if the run asks for it; else return them.

        For terms that compare images with each other.
        """
        return rows if self._batch.gather is None else self._batch.gather(rows)

    def note(self, name: str, value: Tensor) -> None:
        """Log a figure next to the term's value.

        Args:
            name: of the figure; the term's name is put before it.
            value: a scalar.
        """
        self._batch.notes[self._owner, f"{self._term}.{name}"] = value.detach()

    def average(self, peer: str, pairwise: Callable[[str], Tensor]) -> Tensor:
        """Return the mean of ``pairwise(other)`` over the other peers; 0 for a single peer.

        Args:
            peer: the peer's name.
            pairwise: of another peer's name makes a scalar.
        """
        values = [pairwise(other) for other in self.others(peer)]
        return torch.stack(values).mean() if values else self.labels.new_zeros((), dtype=torch.float32)

    def _guard(self, peer: str, tensor: Tensor) -> Tensor:
        return tensor if peer == self._owner else tensor.detach()
