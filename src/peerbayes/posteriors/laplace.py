"""Laplace's approximation of a network's last layer, with a Kronecker-factored curvature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.math.noise import Address, normal
from peerbayes.networks.inputs import prepared
from peerbayes.networks.running import evaluating, find_layer
from peerbayes.posteriors.base import Point, Source
from peerbayes.posteriors.flat_network import Weights
from peerbayes.posteriors.parameters import Predicate, conv_and_linear
from peerbayes.schema import PositiveFloat

if TYPE_CHECKING:
    from peerbayes.data.splits import Split

BATCH = 512  # images of a pass over the training split
WIDEST, STEPS = 1e12, 200  # of the search for a prior's precision: it and its inverse, and how many halvings


class Laplace(Point):
    """Gaussian around a trained network's last layer, of the curvature of its loss; all else is a point.

    It learns as a `Point`. When training has ended one pass over the training inputs x_n gives the features a_n that
    enter the last layer, its probabilities p_n and, for N inputs,

        A = (1/N) Σ_n a_n a_nᵀ,   B = Σ_n (diag(p_n) − p_n p_nᵀ).

    The weights are N(W, (B ⊗ A + τ I)⁻¹), the biases N(b, (B + τ I)⁻¹): the generalised Gauss-Newton matrix, factored
    (KFAC), beside the prior N(0, 1/τ). τ is the one of the largest marginal likelihood unless it is given.

    Args:
        network: any module whose logits are what its last `nn.Linear` returns; it is not changed.
        prior_precision: τ; None for the one of the largest marginal likelihood.
        layer: name of the last layer; by default the last `nn.Linear`.
        bayesian: chooses the parameters that lie with the weights, by (parameter name, module that owns it); the last
            layer has to be among them.
        start_from: a trained network to take all tensors from.
        seed: with ``name``, where its draws live in predictions.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> from peerbayes import Laplace
        >>> from peerbayes.data import ArraySplit
        >>> laplace = Laplace(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)), prior_precision=2.0)
        >>> laplace.conclude(ArraySplit(torch.zeros(8, 1, 2, 2), torch.arange(8) % 3), [])
        >>> round(laplace.std[0].item(), 4)  # images of zeros say nothing about weights: the prior
        0.7071
    """

    kind: ClassVar[str] = "laplace"
    in_words: ClassVar[str] = "a Gaussian around the last layer, of the curvature of its loss"
    stochastic: ClassVar[bool] = True
    averages: ClassVar[tuple[str, ...]] = ("mean",)

    scale: Tensor
    bias_scale: Tensor
    rotation_out: Tensor
    rotation_in: Tensor
    precision: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        prior_precision: PositiveFloat | None = None,
        layer: str | None = None,
        bayesian: Predicate = conv_and_linear,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        super().__init__(network, bayesian=bayesian, start_from=start_from, seed=seed, name=name)
        if prior_precision is not None and not 0 < prior_precision < math.inf:
            raise InputError(f"prior_precision is {prior_precision}, expected a positive number")
        self.prior_precision = prior_precision
        self.layer = _last_layer(self.network) if layer is None else layer
        head = find_layer(self.network, self.layer)
        if not isinstance(head, nn.Linear) or f"{self.layer}.weight" not in self.layout.shapes:
            raise InputError(
                f"laplace needs a last layer that is an nn.Linear and trainable, and '{self.layer}' is none"
            )
        self.has_bias = f"{self.layer}.bias" in self.layout.shapes
        out, into = self.layout.shapes[f"{self.layer}.weight"]
        shapes = {"scale": (out, into), "bias_scale": (out,), "rotation_out": (out, out), "rotation_in": (into, into)}
        for part, shape in (*shapes.items(), ("precision", ())):
            self.register_buffer(part, torch.zeros(shape, device=self.device), persistent=False)
        self._parts = [*shapes, "precision"]
        self._tried = False
        self._derive()

    def _derive(self) -> None:
        """Remember on the host what the device knows: whether draws differ."""
        self.stochastic = bool(self.precision > 0)  # type: ignore[misc]

    # ---- how it comes about ---------------------------------------------------------------------------------------

    def training_pass(
        self, inputs: Tensor, flat: Tensor, extra: Tensor | None, layers: Sequence[str] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits and features; refuse, once, a network whose logits are not what the last layer returns.

        Args:
            inputs: a batch.
            flat: the Bayesian weights.
            extra: as of `Posterior.training_weights`.
            layers: whose outputs are the features.
        """
        if self._tried or torch.compiler.is_compiling():
            return super().training_pass(inputs, flat, extra, layers)
        logits, features = super().training_pass(inputs, flat, extra, [*layers, self.layer])
        self._check(logits, features.pop())
        self._tried = True
        return logits, features

    def _check(self, logits: Tensor, returned: Tensor) -> None:
        if logits.shape != returned.shape or not torch.equal(logits, returned):
            raise InputError(
                f"laplace is of the last layer, and the network's logits are not what '{self.layer}' returns; name "
                "another layer by posterior.layer, or let the network end in an nn.Linear"
            )

    @torch.no_grad()
    def conclude(self, split: Split, augment: Sequence[str]) -> None:  # noqa: ARG002
        """Find the curvature on the training inputs, as they are, and the precision of the prior.

        Args:
            split: the training split.
            augment: not used.
        """
        total_in, total_out = self._factors(split)
        values_in, rotation_in = torch.linalg.eigh(total_in / len(split))
        values_out, rotation_out = torch.linalg.eigh(total_out)
        values_in, values_out = values_in.clamp_min(0), values_out.clamp_min(0)
        curvature = torch.outer(values_out, values_in)
        bias_curvature = values_out if self.has_bias else values_out[:0]
        precision = self.prior_precision
        if precision is None:
            weights = [self._head(leaf).double().flatten() for leaf in ("weight", *["bias"] * self.has_bias)]
            precision = best_precision(torch.cat([curvature.flatten(), bias_curvature]), torch.cat(weights))
        self.scale.copy_((curvature + precision).rsqrt())
        self.bias_scale.copy_((values_out + precision).rsqrt())
        self.rotation_in.copy_(rotation_in)
        self.rotation_out.copy_(rotation_out)
        self.precision.fill_(precision)
        self._derive()

    def _factors(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return Σ a aᵀ and Σ (diag(p) − p pᵀ) over a split, float64."""
        out, into = self.scale.shape
        total_in, total_out = (self.scale.new_zeros(size, size, dtype=torch.float64) for size in (into, out))
        head, entered = find_layer(self.network, self.layer), []
        hook = head.register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0]))
        tensors = self.named(self.mean)
        try:
            with evaluating(self.network):
                for index in torch.arange(len(split)).split(BATCH):
                    logits = self.run_network(prepared(split.batch(index, self.device)[0]), tensors)
                    features, p = entered.pop().double(), logits.double().softmax(1)
                    total_in += features.T @ features
                    total_out += p.sum(0).diag() - p.T @ p
        finally:
            hook.remove()
        return total_in, total_out

    def _head(self, leaf: str) -> Tensor:
        return self.layout.views(self.mean)[f"{self.layer}.{leaf}"]

    # ---- what it is -----------------------------------------------------------------------------------------------

    def draw(self, address: Address) -> Weights:
        """Return the weights at an address, of which only the last layer's differ."""
        if not self.stochastic:
            return self.centre()
        noise = normal(address, self.scale.numel() + len(self.bias_scale), self.device)
        weight, bias = noise.split([self.scale.numel(), len(self.bias_scale)])
        shift = torch.zeros_like(self.mean)
        views = self.layout.views(shift)
        views[f"{self.layer}.weight"] += (
            self.rotation_out @ (self.scale * weight.view_as(self.scale)) @ self.rotation_in.T
        )
        if self.has_bias:
            views[f"{self.layer}.bias"] += self.rotation_out @ (self.bias_scale * bias)
        return self.weights(self.mean + shift)

    @property
    @torch.no_grad()
    def std(self) -> Tensor:
        """Standard deviation of every weight, shape (size,): 0 but for the last layer's."""
        flat = torch.zeros_like(self.mean)
        if self.stochastic:
            views, out, into = self.layout.views(flat), self.rotation_out.square(), self.rotation_in.square()
            views[f"{self.layer}.weight"].copy_((out @ self.scale.square() @ into.T).sqrt())
            if self.has_bias:
                views[f"{self.layer}.bias"].copy_((out @ self.bias_scale.square()).sqrt())
        return flat

    def options(self) -> dict[str, Any]:
        """Return the options that `load` needs; the precision that was found is in the file."""
        return {"prior_precision": self.prior_precision, "layer": self.layer}

    def state(self) -> dict[str, Tensor]:
        """Return every tensor by its place, with those of the curvature by ``laplace/scale`` and the like."""
        return super().state() | {f"laplace/{part}": getattr(self, part) for part in self._parts}


def _last_layer(network: nn.Module) -> str:
    names: list[str] = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise InputError(f"laplace needs a last layer that is an nn.Linear, and {type(network).__name__} has none")
    return names[-1]


def best_precision(curvature: Tensor, weights: Tensor) -> float:
    """Return the τ of the largest marginal likelihood of a Laplace approximation with the prior N(0, 1/τ).

    It is −½ (Σ_i log(1 + λ_i / τ) + τ ‖w‖²) and what does not depend on τ, and has one maximum:
    where τ ‖w‖² = Σ_i λ_i / (λ_i + τ), of which the left rises and the right falls.

    Args:
        curvature: eigenvalues λ ≥ 0 of the Hessian of the summed loss, by weight.
        weights: w, of as many.

    Example:
        >>> import torch
        >>> from peerbayes.posteriors.laplace import best_precision
        >>> round(best_precision(torch.full((2,), 3.0), torch.tensor([0.5, 0.5])), 6)  # 0.5 τ = 2 · 3 / (3 + τ)
        2.274917
    """
    size, low, high = weights.double().square().sum(), -math.log(WIDEST), math.log(WIDEST)
    values = curvature.double()
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        tau = math.exp(middle)
        if bool(tau * size < (values / (values + tau)).sum()):
            low = middle
        else:
            high = middle
    return math.exp(0.5 * (low + high))
