"""A posterior of one's own, in a file beside a project: a Laplace distribution for every weight.

A recipe names it ``laplace_field:LaplaceField``; nothing else knows of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes import Posterior
from peerbayes.math.noise import Address, normal
from peerbayes.posteriors import Predicate, Weights, conv_and_linear
from peerbayes.schema import PositiveFloat

EDGE = 1e-6  # how near to 0 and 1 a uniform number may be, so that no weight is infinite


class LaplaceField(Posterior):
    """q(w) = Π_i Laplace(w_i; μ_i, b_i) with b = softplus(ρ); the prior is Laplace(m_i, s).

    Its tails are heavier than a Gaussian's: few weights are drawn far away, most are drawn near their centres. A draw
    is w = μ − b sign(v) log(1 − 2|v|) with v = Φ(ε) − 1/2 and ε ~ N(0, 1), so the noise is that of all posteriors.

    Args:
        network: any module; its current weights become the centres.
        rho: the initial ρ.
        prior_scale: s.
        prior: ``"normal"`` for m = 0, ``"anchored"`` for the centres at construction.
        bayesian: chooses parameters by (name, owning module).
        start_from: a trained network to take all tensors from.
        seed: with ``name``, where its draws live.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> LaplaceField(torch.nn.Linear(4, 3)).draw(Address(0))["weight"].shape
        torch.Size([3, 4])
    """

    kind: ClassVar[str] = "laplace_field:LaplaceField"
    stochastic: ClassVar[bool] = True
    shareable: ClassVar[bool] = True  # a codebook goes by means and standard deviations, which it has

    anchor: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        rho: float = -5.0,
        prior_scale: PositiveFloat = 0.1,
        prior: Literal["normal", "anchored"] = "normal",
        bayesian: Predicate = conv_and_linear,
        start_from: Any = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        super().__init__(network, bayesian=bayesian, start_from=start_from, seed=seed, name=name)
        self.prior_scale, self.prior = prior_scale, prior
        self.rho = nn.Parameter(torch.full_like(self.mean, rho))
        anchor = self.mean.detach().clone() if prior == "anchored" else torch.zeros_like(self.mean)
        self.register_buffer("anchor", anchor, persistent=False)

    # ---- draws ----------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> Tensor:
        """b, shape (size,)."""
        return F.softplus(self.rho)

    @property
    def std(self) -> Tensor:
        """√2 b, shape (size,)."""
        return math.sqrt(2) * self.scale

    @property
    def noise_size(self) -> int:
        """One number a weight."""
        return self.layout.size

    def place(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weights that noise makes, and their standard deviations."""
        if noise is None:
            return self.mean, self.std
        v = torch.special.ndtr(noise).clamp(EDGE, 1 - EDGE) - 0.5
        return self.mean - self.scale * v.sign() * torch.log1p(-2 * v.abs()), self.std

    def draw(self, address: Address) -> Weights:
        """Return the weights that live at an address."""
        return self.weights(*self.place(normal(address, self.noise_size, self.device)))

    def kl_per_weight(self, weights: Weights | None = None) -> Tensor:
        """Return log(s/b) + (|μ − m| + b exp(−|μ − m| / b)) / s − 1, shape (size,)."""
        off, b, s = (self.mean - self.anchor).abs(), self.scale, self.prior_scale
        return math.log(s) - b.log() + (off + b * torch.exp(-off / b)) / s - 1

    # ---- what training, files and recipes ask for -----------------------------------------------------------------

    @property
    def rhos(self) -> set[str]:
        """ρ, so that its optimiser may take steps of b itself."""
        return {"rho"}

    def flat_tensors(self) -> dict[str, Tensor]:
        """Return what files hold."""
        return {"mean": self.mean, "rho": self.rho} | ({"anchor": self.anchor} if self.prior == "anchored" else {})

    def unpacked(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any], origin: str) -> Mapping[str, Tensor]:
        """Return a file's tensors, anchored at the centres where the file has no anchors."""
        if self.prior != "anchored" or any(name.startswith("anchor/") for name in tensors):
            return tensors
        centres = {name.removeprefix("mean/"): t for name, t in tensors.items() if name.startswith("mean/")}
        return {**tensors, **{f"anchor/{name}": t for name, t in centres.items()}}

    def options(self) -> dict[str, Any]:
        """Return the options that rebuild it; ρ is in the file."""
        return {"prior_scale": self.prior_scale, "prior": self.prior}

    @classmethod
    def needs_start(cls, options: Mapping[str, Any]) -> str:
        """Return why an anchored prior needs a start."""
        return "has an anchored prior but no start_from" if options["prior"] == "anchored" else ""
