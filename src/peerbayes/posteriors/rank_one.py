"""Posterior of members that share weights and differ by two factors a layer: BatchEnsemble, or a rank-1 BNN."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.math.divergences import gaussian_kl
from peerbayes.math.noise import Address, normal, uniform
from peerbayes.networks.inputs import prepared
from peerbayes.networks.running import capture
from peerbayes.posteriors.base import Posterior, Reduction, Source
from peerbayes.posteriors.factors import attach, check_rows, detach, layers_of
from peerbayes.posteriors.flat_network import Layout, Weights
from peerbayes.posteriors.parameters import Predicate, conv_and_linear
from peerbayes.schema import NotNegativeFloat, NotNegativeInt, PositiveFloat

if TYPE_CHECKING:
    from peerbayes.inference.prediction import Prediction

Merge = Literal["exact", "factor_mean"]


class RankOne(Posterior):
    """Posterior of members m = 1..M with weights W ∘ s_m r_mᵀ in convolutions and linear layers; the rest is shared.

    A layer computes y = s_m ⊙ (W ∗ (r_m ⊙ x)) + b. ``mean`` holds W and b; ``deviations`` (M, total) holds r − 1 and
    s − 1 of all layers, so that weight decay pulls the factors to one; ``factor_layout`` says where (``conv.r``,
    ``conv.s``). With ``gaussian`` every factor is N(1 + deviation, softplus(ρ)²), with ρ (M, total).

    `forward_members` runs all members in one pass over a batch that is repeated for each, the factors applied to the
    activations, so that batch-norm sees the joint batch. All other verbs see plain weights of one member, or their
    mean (`centre`).

    The network has to call these layers (not take their weights), and they have to be linear in their weights, with
    the batch on the first axis; leave out others with ``bayesian``. The position of the batch is checked on a few
    rows before the first pass over inputs of a new shape. `nn.MultiheadAttention`, which takes its weights itself, has
    no factors. Modules that share a weight share its factors.

    Args:
        network: any module; its current weights become W.
        members: M.
        factors: how they start: all ones, N(1, spread²), or random signs.
        spread: of ``"random"``.
        gaussian: a distribution for every factor instead of a point.
        rho: initial ρ; −3 is a standard deviation of 0.049.
        prior_std: s of the factors' prior N(1, s²).
        scale_gradients: multiply the gradients that reach the factors through `forward_members` and `kl`, which are
            means over members, by M: each member learns as fast as it would alone.
        decay_factors: let weight decay pull the factors to one.
        predicts: with ``"members"`` predictions average those of the members, M passes; with ``"average"`` they are
            those of the one network of the mean weights (`centre`), one pass.
        bayesian: chooses parameters by (name, owning module); layers whose weight is chosen get factors.
        start_from: a trained network to take W, biases, batch-norm parameters and statistics from.
        seed: with ``name``, the address of its noise: the initial factors, and its draws in predictions.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> from peerbayes import RankOne
        >>> student = RankOne(torch.nn.Linear(4, 3), members=5, factors="random").eval()
        >>> student.forward_members(torch.zeros(2, 4))[0].shape
        torch.Size([5, 2, 3])
        >>> student.average()(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    kind: ClassVar[str] = "rank_one"
    in_words: ClassVar[str] = "members that share their weights"
    stochastic: ClassVar[bool] = True  # unless it predicts by the average of its members
    averages: ClassVar[tuple[str, ...]] = get_args(Merge)

    _inverse_factor_sizes: Tensor

    def __init__(
        self,
        network: nn.Module,
        members: int = 4,
        *,
        factors: Literal["ones", "random", "signs"] = "ones",
        spread: NotNegativeFloat = 0.5,
        gaussian: bool = False,
        rho: float = -3.0,
        prior_std: PositiveFloat = 0.1,
        scale_gradients: bool = True,
        decay_factors: bool = True,
        predicts: Literal["average", "members"] = "members",
        bayesian: Predicate = conv_and_linear,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        super().__init__(network, bayesian=bayesian, start_from=start_from)
        if members < 1:
            raise InputError(f"members is {members}, expected at least 1")
        if factors not in ("ones", "random", "signs"):
            raise InputError(f"factors is {factors!r}, expected 'ones', 'random' or 'signs'")
        if predicts not in ("average", "members"):
            raise InputError(f"predicts is {predicts!r}, expected 'average' or 'members'")
        if not spread >= 0:
            raise InputError(f"spread is {spread}, expected 0 or more")
        if not prior_std > 0:
            raise InputError(f"prior_std is {prior_std}, expected a positive number")
        self.seed, self.name = seed, name
        self._members, self.gaussian, self.prior_std = members, gaussian, prior_std
        self.predicts, self.decay_factors = predicts, decay_factors
        self.stochastic = predicts == "members"  # type: ignore[misc]
        self.scale_gradients = scale_gradients
        self.layers = layers_of(self)
        if not self.layers:
            raise InputError(f"no convolution or linear layer of {type(network).__name__} is chosen to have factors")
        sizes = ((n, c) for layer in self.layers for n, c in zip(layer.names, (layer.into, layer.out), strict=True))
        self.factor_layout = Layout({n: torch.Size([c]) for n, c in sizes})
        self.deviations = nn.Parameter(self._initial(factors, spread))
        self.rho = nn.Parameter(torch.full_like(self.deviations, rho)) if gaussian else None
        inverse = self.factor_layout.inverse_sizes().to(self.mean.device)
        self.register_buffer("_inverse_factor_sizes", inverse, persistent=False)
        attach(self.network, self.layers)
        self._tried: set[Hashable] = set()  # what `_check_rows` has accepted

    @classmethod
    def option_fields(cls) -> dict[str, tuple[Any, Any]]:
        """Return type and default of each option in a recipe; see `peerbayes.RankOne`.

        Args:
            members: M; 0 is one for each teacher.
        """
        fields = super().option_fields()
        return fields | {"members": (NotNegativeInt, fields["members"][1])}

    def _initial(self, factors: str, spread: float) -> Tensor:
        total, device = self.members * self.factor_layout.size, self.mean.device
        address = Address(self.seed, self.name, "initial factors")
        if factors == "random":
            flat = normal(address, total, device).mul_(spread)
        elif factors == "signs":
            flat = uniform(address, total, device).lt(0.5).float().mul_(-2)
        else:
            flat = torch.zeros(total, device=device)
        return flat.view(self.members, -1)

    # ---- all members in one pass ----------------------------------------------------------------------------------

    def training_weights(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the shared weights (size,), None, and all factors (M, total)."""
        return self.mean, None, 1 + self._deviations(noise, *self._scaled_leaves())

    def training_pass(
        self, inputs: Tensor, flat: Tensor, extra: Tensor | None, layers: Sequence[str] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits (M·B, C) and features (M·B, ...) of the named layers.

        Rows 0 to B − 1 are member 0's, and so on; a mean over the rows is (1/M) Σ_m ℓ_m.

        Args:
            inputs: (B, ...).
            flat: the shared weights (size,).
            extra: all factors (M, total), from `training_weights`.
            layers: whose outputs are wanted.
        """
        assert extra is not None
        if self.members > 1 and not torch.compiler.is_compiling():  # a network is checked before it is compiled
            self._check_rows(inputs, layers)
        rows = torch.cat([prepared(inputs)] * self.members)
        pieces, tensors = self._pieces(extra), self.named(flat)
        for layer in self.layers:
            r, s = (pieces[name][:, None].expand(-1, len(inputs), -1) for name in layer.names)
            tensors |= layer.tensors(r, s)
        with capture(self.network, layers) as features:
            logits = self.run_network(rows, tensors)
        return logits, [features[layer] for layer in layers]

    def _check_rows(self, inputs: Tensor, captured: Sequence[str]) -> None:
        """Refuse a network that moves the rows of members, once for a shape of inputs; see `check_rows`."""
        what = (self.network.training, inputs.shape[1:], *captured)
        if what in self._tried or (inputs.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        # Perturbed weights: weights that are 0, or equal, would hide where rows go.
        tensors = {
            name: (tensor + 0.01 * normal(Address(0, name, "trial"), tensor.numel(), tensor.device).view(tensor.shape))
            for name, tensor in self.named(self.mean.detach()).items()
        }
        run = functools.partial(self.run_network, tensors=tensors)
        check_rows(self.network, self.layers, captured, self.members, prepared(inputs), run)
        self._tried.add(what)

    def _scaled_leaves(self) -> tuple[Tensor, Tensor | None]:
        """Return deviations and ρ, (M, total), whose gradients are multiplied by M where that is asked for."""
        if not self.scale_gradients:
            return self.deviations, self.rho
        rho = None if self.rho is None else _with_gradient_times(self.rho, self.members)
        return _with_gradient_times(self.deviations, self.members), rho

    def _deviations(self, noise: Tensor | None, centre: Tensor, rho: Tensor | None) -> Tensor:
        """Return the deviations from one that noise (noise_size,) makes, (M, total)."""
        if rho is None or noise is None:
            return centre
        return torch.addcmul(centre, F.softplus(rho), noise.view_as(centre))

    def _pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """Return r and s of all layers by name, (..., channels), as views of flat (..., total)."""
        return dict(zip(self.factor_layout.shapes, flat.split(self.factor_layout.sizes, -1), strict=True))

    # ---- plain weights --------------------------------------------------------------------------------------------

    def draw(self, address: Address) -> Weights:
        """Return the weights of member ``address.number`` mod M, its Gaussian factors drawn at the address.

        The mean weights where ``predicts`` is ``"average"``.
        """
        if self.predicts == "average":
            return self.centre()
        noise = normal(address, self.noise_size, self.mean.device) if self.gaussian else None
        return self._pick(self._deviations(noise, self.deviations, self.rho), address.number)

    def member(self, number: int | Tensor) -> Weights:
        """Return the weights of one member, W ∘ s_m r_mᵀ, with Gaussian factors at their means."""
        if not isinstance(number, Tensor) and not 0 <= number < self.members:
            raise InputError(f"there is no member {number}: expected 0 to {self.members - 1}")
        return self._pick(self.deviations, number)

    def _pick(self, deviations: Tensor, number: int | Tensor) -> Weights:
        if isinstance(number, Tensor):  # indexing by a tensor would make the host wait
            chosen = deviations.index_select(0, (number.to(deviations.device) % self.members).reshape(1))
        else:
            chosen = deviations[number % self.members].unsqueeze(0)
        return self.weights(self._averaged(chosen))

    @property
    def members(self) -> int:
        """Number of members M."""
        return self._members

    @property
    def rhos(self) -> set[str]:
        """ρ, of Gaussian factors."""
        return {"rho"} if self.gaussian else set()

    @property
    def decayed(self) -> set[str]:
        """W, what has no factors, and the factors where that is wanted."""
        return super().decayed | ({"deviations"} if self.decay_factors else set())

    @property
    def noise_size(self) -> int:
        """Numbers of noise in a draw: one a Gaussian factor, for all members at once."""
        return self.deviations.numel() if self.gaussian else 0

    def place(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return W ∘ (1/M) Σ_m s_m r_mᵀ with the factors that noise makes, and None."""
        return self._averaged(self._deviations(noise, self.deviations, self.rho)), None

    def centre(self) -> Weights:
        """Return the mean weights, W ∘ (1/M) Σ_m s_m r_mᵀ."""
        return self.weights(self._averaged(self.deviations))

    def average(self, merge: Merge = "exact") -> nn.Module:
        """Return one plain network, in evaluation mode: W ∘ (1/M) Σ_m s_m r_mᵀ, or W ∘ s̄ r̄ᵀ (``"factor_mean"``).

        Batch-norm keeps the statistics of training; see `recalibrate`.
        """
        if merge not in ("exact", "factor_mean"):
            raise InputError(f"merge is {merge!r}, expected 'exact' or 'factor_mean'")
        deviations = self.deviations if merge == "exact" else self.deviations.mean(0, keepdim=True)
        return self.materialise(self.weights(self._averaged(deviations)))

    def materialise(self, weights: Weights | int | None = None) -> nn.Module:
        """Return a plain copy of the network with one member (by number) or one draw; the mean weights by default."""
        plain = super().materialise(self.member(weights) if isinstance(weights, int) else weights)
        detach(plain, self.layers)
        return plain

    def predict(self, images: Tensor, draws: int | None = None, **options: Any) -> Prediction:
        """Average the probabilities of ``draws`` networks, by default of every member once.

        More draws than members say nothing new where the factors are points, and are not made; the average is one.

        Args:
            images: inputs, (N, ...).
            draws: networks; by default one a member.
            options: see `Posterior.predict`.
        """
        if draws is None or (draws > self.members and not self.gaussian):
            draws = self.members
        return super().predict(images, draws, **options)

    def _averaged(self, deviations: Tensor) -> Tensor:
        """Return W ∘ (1/K) Σ_k s_k r_kᵀ, flat (size,), for deviations (K, total)."""
        tensors = self.layout.views(self.mean)
        for name, product in self._mean_products(1 + deviations).items():
            tensors[name] = tensors[name] * product
        return self.layout.flatten(tensors)

    def _mean_products(self, factors: Tensor) -> dict[str, Tensor]:
        """Return (1/K) Σ_k s_k r_kᵀ by weight, to be broadcast with it, for factors (K, total)."""
        pieces, products = self._pieces(factors), {}
        for layer in self.layers:
            r, s = (pieces[name] for name in layer.names)
            product = layer.products(r, s).mean(0)
            products[layer.weight] = product.view(*product.shape, *[1] * (len(self.layout.shapes[layer.weight]) - 2))
        return products

    # ---- what is known --------------------------------------------------------------------------------------------

    def kl(self, reduction: Reduction = "sum", weights: Weights | None = None) -> Tensor:
        """Return (1/M) Σ_m KL(q_m ‖ prior) over the factors, no less than the KL of the members' mixture, in nats.

        ``layer_mean`` is Σ_l mean_{i∈l} over the vectors r and s of all layers. 0 for points. A scalar.

        Args:
            reduction: ``sum`` or ``layer_mean``.
            weights: not used.
        """
        per_factor = self.kl_per_weight(weights)
        return per_factor.sum() if reduction == "sum" else torch.dot(per_factor, self._inverse_factor_sizes)

    def kl_per_weight(self, weights: Weights | None = None) -> Tensor:  # noqa: ARG002
        """Return the KL by factor, a mean over members, shape (total,): the weights are points, the factors are not."""
        deviations, rho = self._scaled_leaves()
        if rho is None:
            return torch.zeros_like(self._inverse_factor_sizes)
        return gaussian_kl(deviations, F.softplus(rho), 0.0, self.prior_std).mean(0)

    @property
    @torch.no_grad()
    def std(self) -> Tensor:
        """Standard deviation of every weight over the members and their draws, shape (size,); without gradients.

        |W| √(E a² − (E a)²) with a = s r: E a = (1/M) Σ_m s̄ r̄, E a² = (1/M) Σ_m (s̄² + σ_s²)(r̄² + σ_r²).
        """
        factors = 1 + self.deviations.double()
        squares = factors.square()
        if self.rho is not None:
            squares = squares + F.softplus(self.rho.double()).square()
        first, second = self._mean_products(factors), self._mean_products(squares)
        means, zeros = self.layout.views(self.mean), self.layout.views(torch.zeros_like(self.mean))
        spread = {name: (second[name] - first[name].square()).clamp_min(0).sqrt().float() for name in first}
        return self.layout.flatten(zeros | {name: means[name].abs() * spread[name] for name in spread})

    @classmethod
    def varies(cls, options: Mapping[str, Any]) -> bool:
        """Return whether its members predict, rather than their average."""
        return bool(options.get("predicts") != "average")

    def options(self) -> dict[str, Any]:
        """Return the options that `load` needs; the values of the factors are in the file."""
        return {
            "members": self.members,
            "gaussian": self.gaussian,
            "prior_std": self.prior_std,
            "scale_gradients": self.scale_gradients,
            "decay_factors": self.decay_factors,
            "predicts": self.predicts,
        }

    def state(self) -> dict[str, Tensor]:
        """Return every tensor by its place, with ``factor/conv.r`` (M, channels) for deviations, and ``factor_rho``."""
        parts = {"factor": self.deviations} | ({} if self.rho is None else {"factor_rho": self.rho})
        tensors = super().state()
        for part, flat in parts.items():
            tensors |= {f"{part}/{name}": piece for name, piece in self._pieces(flat).items()}
        return tensors


def _with_gradient_times(tensor: Tensor, factor: float) -> Tensor:
    # Exactly the same values, by tensor operations that can be compiled and captured.
    fixed = tensor.detach()
    return fixed + factor * (tensor - fixed)
