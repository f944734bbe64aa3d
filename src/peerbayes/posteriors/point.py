"""Point posterior: one set of weights, no uncertainty. A deterministic network is a cohort of one of these."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from peerbayes.math.noise import Address
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.flat_network import Weights


class Point(Posterior):
    """Point posterior: every draw is the same network, and the KL is 0 by convention.

    Args:
        network: any module from inputs to logits; it is not changed.
        bayesian: chooses parameters by (parameter name, module that owns it).
        start_from: a trained network to take all tensors from.
        seed: not used; posteriors have it in common.
        name: a name of its own tells peers apart.

    Example:
        >>> import torch
        >>> from peerbayes import Address, Point
        >>> point = Point(torch.nn.Linear(4, 3))
        >>> torch.equal(point.draw(Address(0))["weight"], point.draw(Address(1))["weight"])
        True
        >>> point.kl().item()
        0.0
    """

    kind: ClassVar[str] = "point"
    in_words: ClassVar[str] = "one set of weights"
    stochastic: ClassVar[bool] = False
    has_scales: ClassVar[bool] = False
    averages: ClassVar[tuple[str, ...]] = ()

    def draw(self, address: Address) -> Weights:  # noqa: ARG002
        """Return the weights; every address gives the same."""
        return self.centre()

    @property
    def noise_size(self) -> int:
        """Numbers of noise in a draw: 0."""
        return 0

    def place(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002
        """Return the weights."""
        return self.mean, None

    def kl_per_weight(self, weights: Weights | None = None) -> Tensor:  # noqa: ARG002
        """Return zeros, shape (size,)."""
        return torch.zeros_like(self.mean)

    @property
    def std(self) -> Tensor:
        """Zeros, shape (size,)."""
        return torch.zeros_like(self.mean)

    def options(self) -> dict[str, Any]:
        """Return nothing: a point has no options."""
        return {}
