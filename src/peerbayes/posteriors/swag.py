"""SWAG (Maddox et al. 2019): a Gaussian through the last steps of SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.math.noise import Address, normal
from peerbayes.posteriors.base import Point, Source
from peerbayes.posteriors.flat_network import Weights
from peerbayes.posteriors.parameters import Predicate, conv_and_linear

if TYPE_CHECKING:
    from peerbayes.data.splits import Split


class Swag(Point):
    """Gaussian through the weights that a plain network had at the ends of its last epochs.

    It learns as a `Point`. Of the last K = ``rank`` epochs it keeps the weights w_k, and when training has ended it is
    N(w̄, ½ diag(v) + DᵀD / (2 (K − 1))) with w̄ and v their mean and variance by weight, and rows w_k − w̄ of D. A draw is

        w̄ + √(v / 2) ⊙ ε₁ + Dᵀ ε₂ / √(2 (K − 1)),   ε ~ N(0, I).

    Epochs have to move the weights: end training with a constant, large rate. Batch-norm's scales and shifts are the
    means of theirs, and its statistics are estimated anew on the training inputs, as they were augmented, with
    another draw for every batch: one set for all draws (the paper has one a draw).

    Args:
        network: any module from inputs to logits; it is not changed.
        rank: K, at least 2.
        bayesian: chooses parameters by (parameter name, module that owns it).
        start_from: a trained network to take all tensors from.
        seed: with ``name``, where its draws live in predictions.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> from peerbayes import Address, Swag
        >>> swag = Swag(torch.nn.Linear(4, 3), rank=2)
        >>> for value in (1.0, 3.0):
        ...     _ = torch.nn.init.constant_(swag.mean, value), swag.end_epoch({}, lambda name: None)
        >>> swag.settle_gaussian()
        >>> swag.mean[0].item(), swag.std[0].item()
        (2.0, 1.224...)
    """

    kind: ClassVar[str] = "swag"
    in_words: ClassVar[str] = "a Gaussian through the last weights of SGD"
    stochastic: ClassVar[bool] = True
    averages: ClassVar[tuple[str, ...]] = ("mean",)
    shareable: ClassVar[bool] = True

    collected: Tensor
    kept: Tensor
    settled: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        rank: Annotated[int, Field(ge=2)] = 20,
        bayesian: Predicate = conv_and_linear,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        super().__init__(network, bayesian=bayesian, start_from=start_from, seed=seed, name=name)
        if rank < 2:
            raise InputError(f"rank is {rank}, expected at least 2: of one set of weights there is no spread")
        self.rank = rank
        # A row is a set of weights, Bayesian ones first, in a ring; once settled, what sets it apart from the mean.
        rows = torch.zeros(rank, self.layout.size + self.rest_layout.size, device=self.device)
        self.register_buffer("kept", rows, persistent=False)
        self.register_buffer("collected", torch.zeros((), dtype=torch.int64, device=self.device), persistent=False)
        self.register_buffer("settled", torch.zeros((), dtype=torch.int64, device=self.device), persistent=False)
        self._derive()

    def _derive(self) -> None:
        """Remember on the host what the device knows: whether draws differ, and of how many sets of weights."""
        self.count = min(int(self.collected), self.rank)
        self.stochastic = bool(self.settled)  # type: ignore[misc]

    @torch.no_grad()
    def end_epoch(
        self,
        moments: Mapping[str, Mapping[str, Tensor]],  # noqa: ARG002
        gradient: Callable[[str], Tensor | None],  # noqa: ARG002
    ) -> dict[str, Any]:
        """Keep the weights as they are, in the place of the oldest; what has learnt before begins anew.

        Args:
            moments: not used.
            gradient: not used.
        """
        if self.stochastic:
            self.collected.zero_()
            self.settled.zero_()
        self.kept[int(self.collected) % self.rank] = torch.cat([self.mean, self.rest])
        self.collected.add_(1)
        self._derive()
        return {}

    @torch.no_grad()
    def settle_gaussian(self) -> None:
        """Become the Gaussian of what was kept: means take their places, and draws differ from now on."""
        if self.count < 2:
            raise InputError(f"peer '{self.name}': swag has kept {self.count} sets of weights, one an epoch, and needs "
                             "two or more: train for more epochs")  # fmt: skip
        middle = self.kept[: self.count].mean(0)
        self.kept[: self.count] -= middle
        mean, rest = middle.split([self.layout.size, self.rest_layout.size])
        self.mean.copy_(mean)
        self.rest.copy_(rest)
        self.settled.fill_(1)
        self._derive()

    def conclude(self, split: Split, augment: Sequence[str]) -> None:
        """Settle the Gaussian, and estimate batch-norm's statistics under it; what has not learnt stays as it is.

        Args:
            split: the training split.
            augment: how its images were augmented.
        """
        from peerbayes.inference.batch_norm import recalibrate

        if self.stochastic or not self.count:
            return
        self.settle_gaussian()
        recalibrate(_AtDraws(self), split, augment=augment)

    @property
    def _deviations(self) -> Tensor:
        """D, (count, size)."""
        return self.kept[: self.count, : self.layout.size]

    @property
    def _variance(self) -> Tensor:
        """v, (size,)."""
        length: Tensor = torch.linalg.vector_norm(self._deviations, dim=0)
        return length.square_() / self.count

    @property
    @torch.no_grad()
    def std(self) -> Tensor:
        """√(v / 2 + K v / (2 (K − 1))) for every weight, shape (size,); 0 before training has ended."""
        if not self.stochastic:
            return torch.zeros_like(self.mean)
        return (0.5 * self._variance * (1 + self.count / (self.count - 1))).sqrt()

    def draw(self, address: Address) -> Weights:
        """Return the weights of the Gaussian that live at an address; all the same before training has ended."""
        if not self.stochastic:
            return self.centre()
        noise, low = normal(address, self.layout.size + self.count, self.device).split([self.layout.size, self.count])
        wide = torch.addcmul(self.mean, self._variance.mul_(0.5).sqrt_(), noise)
        return self.weights(torch.addmv(wide, self._deviations.T, low, alpha=1 / math.sqrt(2 * (self.count - 1))))

    def options(self) -> dict[str, Any]:
        """Return the option that `load` needs; what was kept is in the file."""
        return {"rank": self.rank}

    def state(self) -> dict[str, Tensor]:
        """Return every tensor by its place, with ``kept/conv.weight`` (K, elements), and how many there are."""
        names = [f"kept/{name}" for name in (*self.layout.shapes, *self.rest_layout.shapes)]
        rows = self.kept.split([*self.layout.sizes, *self.rest_layout.sizes], 1)
        counts = {"swag/collected": self.collected, "swag/settled": self.settled}
        return super().state() | dict(zip(names, rows, strict=True)) | counts


class _AtDraws(nn.Module):
    """A posterior's network, at another draw every time that it is called."""

    def __init__(self, posterior: Swag) -> None:
        super().__init__()
        self.network, self.number = posterior.network, 0
        self._of = (posterior,)  # in a tuple, lest it is taken for a part of this module

    def forward(self, inputs: Tensor) -> Tensor:
        (posterior,), self.number = self._of, self.number + 1
        address = Address(posterior.seed, posterior.name, "recalibrate", self.number)
        return posterior.run_network(inputs, dict(posterior.draw(address)))
