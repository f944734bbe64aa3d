"""A Gaussian for every weight, independent of the others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.math.divergences import gaussian_kl
from peerbayes.math.noise import Address, normal
from peerbayes.posteriors.base import Posterior, Source
from peerbayes.posteriors.flat_network import Weights
from peerbayes.posteriors.parameters import Predicate, by_name, conv_and_linear, linear_alone, weight_layers
from peerbayes.posteriors.scales import initial_rho
from peerbayes.schema import PositiveFloat


class MeanField(Posterior):
    """q(w) = Π_i N(w_i; μ_i, σ_i²) with σ = softplus(ρ), over the Bayesian weights of any network.

    A draw is w = μ + σ ⊙ ε with ε ~ N(0, I), or, with ``noise="radial"``, ε = r · g / ‖g‖ for each tensor on its own
    with g ~ N(0, I) and r ~ N(0, 1).

    Args:
        network: any module; its current weights become the means.
        rho: centre of the initial ρ ~ N(rho, 0.1²); −3 is σ ≈ 0.049.
        gain: instead of ``rho``: σ = gain · √(6 / (fan-in + fan-out)) for all weights of a layer, 0.001 for biases.
        uniform: instead: σ = |u| with u ~ U(−a, a) and a = uniform / √(fan-in + fan-out), of biases u ~ N(0, 0.001²):
            Equations 14 and 15 of the paper on weight sharing.
        width: instead, and what is done where none is given, with 0.02: σ = width · the root mean square of the
            tensor that the weight is in, so that draws predict as the network does.
        prior_std: standard deviation s of the prior.
        prior: ``"normal"`` for N(0, s²), ``"anchored"`` for N(μ_0, s²) with μ_0 the means at construction.
        noise: ``"gaussian"`` or ``"radial"``.
        bayesian: chooses parameters by (name, owning module), or patterns of their names, such as ``["embed*"]``;
            convolutions, linear, attention, recurrent and embedding layers by default, but for embeddings with a
            ``padding_idx``, whose row of zeros would become noise, or a ``max_norm``.
        start_from: a trained network to take means, batch-norm parameters and statistics from.
        seed: with ``name``, where its noise lives: the initial ρ, and its draws in predictions.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> from peerbayes import Address, MeanField
        >>> network = torch.nn.Linear(4, 3)
        >>> posterior = MeanField(network, prior_std=0.5)
        >>> bool((posterior.draw(Address(0))["weight"] == network.weight).any())
        False
        >>> torch.equal(posterior.materialise().weight, network.weight)
        True
    """

    anchor: Tensor

    kind: ClassVar[str] = "mean_field"
    in_words: ClassVar[str] = "a Gaussian over every weight"
    stochastic: ClassVar[bool] = True
    shareable: ClassVar[bool] = True

    def __init__(
        self,
        network: nn.Module,
        *,
        rho: float | None = None,
        gain: PositiveFloat | None = None,
        uniform: PositiveFloat | None = None,
        width: PositiveFloat | None = None,
        prior_std: PositiveFloat = 1.0,
        prior: Literal["normal", "anchored"] = "normal",
        noise: Literal["gaussian", "radial"] = "gaussian",
        bayesian: Predicate | Sequence[str] | None = None,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        chosen = bayesian if callable(bayesian) else by_name(bayesian, network) if bayesian else weight_layers
        super().__init__(network, bayesian=chosen, start_from=start_from, seed=seed, name=name)
        if not prior_std > 0:
            raise InputError(f"prior_std is {prior_std}, expected a positive number")
        if prior not in ("normal", "anchored"):
            raise InputError(f"prior is {prior!r}, expected 'normal' or 'anchored'")
        if noise not in ("gaussian", "radial"):
            raise InputError(f"noise is {noise!r}, expected 'gaussian' or 'radial'")
        if not self.layout.size:
            raise InputError(f"no parameter of {type(network).__name__} was chosen to be Bayesian")
        if chosen in (weight_layers, conv_and_linear):
            self._warn_of_few(type(network).__name__)
        self.prior_std = prior_std
        self.prior = prior
        self.noise = noise
        scales = {"rho": rho, "gain": gain, "uniform": uniform, "width": width}
        self.rho = nn.Parameter(initial_rho(self.layout, self.mean, Address(seed, name, "initial rho"), scales))
        anchor = self.mean.detach().clone() if prior == "anchored" else torch.zeros((), device=self.mean.device)
        self.register_buffer("anchor", anchor, persistent=False)

    @classmethod
    def option_fields(cls) -> dict[str, tuple[Any, Any]]:
        """Return type and default of each option in a recipe; see `peerbayes.MeanField`.

        Recipes keep what they have always meant: scales of ``rho`` = -3 where nothing else is given, and Bayesian are
        convolutions, linear and attention layers, which ``linear`` asks for by name, without a warning where they have
        few of the weights. ``layers`` is the choice of Python, with recurrent and embedding layers.
        """
        names = Annotated[list[str], Field(min_length=1)]
        bayesian = (names | Literal["layers", "linear"] | None, None)
        return super().option_fields() | {"rho": (float, -3.0), "bayesian": bayesian}

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse two kinds of initial scales."""
        if len(instead := _instead_of_rho(options)) > 1:
            raise ValueError(f"{' and '.join(instead)} are given, expected one of them")

    @classmethod
    def arguments_of(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the constructor that a recipe's options mean."""
        given, chosen = options["bayesian"], {None: conv_and_linear, "linear": linear_alone, "layers": None}
        bayesian = given if isinstance(given, list) else chosen[given]
        return {**options, "bayesian": bayesian} | ({"rho": None} if _instead_of_rho(options) else {})

    @classmethod
    def needs_start(cls, options: Mapping[str, Any]) -> str:
        """Return why an anchored prior needs a start."""
        return "has an anchored prior but no start_from to anchor it at" if options["prior"] == "anchored" else ""

    def _warn_of_few(self, network: str) -> None:
        others = self.rest_layout.shapes
        if self.layout.size < self.rest_layout.size:
            largest = max(others, key=lambda name: others[name].numel())
            warnings.warn(
                f"{network}: {self.extra_repr()}; all others, '{largest}' above all, are trained as in a plain "
                "network; patterns of their names choose them, such as bayesian=['*'] for all (in recipes "
                "peers.*.posterior.bayesian)",
                PeerbayesWarning,
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        """Say how many weights are Bayesian."""
        return f"{self.layout.size:,} of {self.layout.size + self.rest_layout.size:,} trainable weights are Bayesian"

    @property
    def rhos(self) -> set[str]:
        """ρ."""
        return {"rho"}

    @property
    def gaussians(self) -> dict[str, str]:
        """Means and ρ; nothing with radial noise or an anchored prior."""
        return {"mean": "rho"} if self.noise == "gaussian" and self.prior == "normal" else {}

    @property
    def decayed(self) -> set[str]:
        """What is not Bayesian, and the means unless their prior is anchored."""
        return {"rest"} if self.prior == "anchored" else super().decayed

    @property
    def std(self) -> Tensor:
        """σ = softplus(ρ), shape (size,)."""
        return F.softplus(self.rho)

    def draw(self, address: Address) -> Weights:
        """Return μ + σ ⊙ ε, with ε a function of the address alone."""
        return self.weights(*self.place(normal(address, self.noise_size, self.mean.device)))

    @property
    def noise_size(self) -> int:
        """One number a weight, and, with radial noise, one more a tensor for its radius."""
        return self.layout.size + (len(self.layout.sizes) if self.noise == "radial" else 0)

    def place(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return μ + σ ⊙ ε and σ."""
        std = self.std
        if noise is None:
            return self.mean, std
        if self.noise == "radial":
            noise = self._radial(*noise.split([self.layout.size, len(self.layout.sizes)]))
        return torch.addcmul(self.mean, std, noise), std

    def _radial(self, direction: Tensor, radius: Tensor) -> Tensor:
        pieces = direction.split(self.layout.sizes)
        length = torch.stack([piece.norm() for piece in pieces])
        return torch.cat([piece * factor for piece, factor in zip(pieces, radius / length)])

    def kl_per_weight(self, weights: Weights | None = None) -> Tensor:
        """Return KL by weight, shape (size,).

        Gaussian: log(s/σ) + (σ² + (μ − m)²) / (2 s²) − ½. Radial has no closed form: −log σ − log p(w) at the
        given draw w, which is the KL up to a constant that depends on the size of each tensor alone.
        """
        std = self.std if weights is None or weights.std is None else weights.std
        if self.noise == "gaussian":
            return gaussian_kl(self.mean, std, self.anchor, self.prior_std)
        if weights is None:
            raise InputError("the KL of radial noise is estimated from a draw: pass weights=posterior.draw(address)")
        scaled = (weights.flat - self.anchor) / self.prior_std
        return 0.5 * scaled.square() + (math.log(self.prior_std) + 0.5 * math.log(2 * math.pi)) - std.log()

    def flat_tensors(self) -> dict[str, Tensor]:
        """Return means, ρ and, with an anchored prior, its means."""
        tensors: dict[str, Tensor] = {"mean": self.mean, "rho": self.rho}
        if self.prior == "anchored":
            tensors["anchor"] = self.anchor
        return tensors

    def unpacked(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any], origin: str) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return what `load_state` takes: with the means for anchors where a file has none.

        Args:
            tensors: the file's.
            about: its description.
            origin: its name, which begins the error.
        """
        if self.prior != "anchored" or any(name.startswith("anchor/") for name in tensors):
            return tensors
        means = {name: t for name, t in tensors.items() if name.startswith("mean/")}
        return {**tensors, **{f"anchor/{name.removeprefix('mean/')}": t for name, t in means.items()}}

    def options(self) -> dict[str, Any]:
        """Return the options that `load` needs; the values of ρ are in the file."""
        return {"prior_std": self.prior_std, "prior": self.prior, "noise": self.noise}


def _instead_of_rho(options: Mapping[str, Any]) -> list[str]:
    return [name for name in ("gain", "uniform", "width") if options[name] is not None]
