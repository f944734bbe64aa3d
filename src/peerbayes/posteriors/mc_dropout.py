"""MC dropout (Gal & Ghahramani 2016): a network's own dropout, left on while it predicts."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.math.noise import Address, uniform, uniform_from
from peerbayes.networks.running import evaluating
from peerbayes.posteriors.base import Point, Source
from peerbayes.posteriors.flat_network import Provenance, Weights
from peerbayes.posteriors.parameters import Predicate, conv_and_linear, digest_of

CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # which drop whole channels
KEY = "key"  # what a layer of dropout calls the number that its mask is made of


class MCDropout(Point):
    """Networks of which dropout leaves out units: a draw is one mask for every layer of dropout.

    It learns as a `Point`, with dropout as ever. A draw gives each of its `nn.Dropout` layers a number at the address,
    of which the mask is a function: all inputs of a pass meet the same thinned network, which can be drawn again. The
    numbers lie with the weights (``dropout.key``); 0 is the network without dropout, the mean.

    Args:
        network: any module with `nn.Dropout` layers of a rate above 0; it is not changed.
        bayesian: chooses the parameters that lie with the weights, by (parameter name, module that owns it).
        start_from: a trained network to take all tensors from.
        seed: with ``name``, where its draws live in predictions.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> from peerbayes import Address, MCDropout
        >>> posterior = MCDropout(torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1, bias=False))).eval()
        >>> _ = torch.nn.init.ones_(posterior.layout.views(posterior.mean.data)["1.weight"])
        >>> posterior(torch.ones(1, 4)).item()
        4.0
        >>> drawn = posterior(torch.ones(2, 4), posterior.draw(Address(3)))  # units that stay count twice
        >>> drawn[0].item() in (0, 2, 4, 6, 8), torch.equal(drawn[0], drawn[1])
        (True, True)
    """

    kind: ClassVar[str] = "mc_dropout"
    in_words: ClassVar[str] = "one set of weights, of which dropout leaves out others in each draw"
    stochastic: ClassVar[bool] = True
    averages: ClassVar[tuple[str, ...]] = ("mean",)

    def __init__(
        self,
        network: nn.Module,
        *,
        bayesian: Predicate = conv_and_linear,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        masked = _masked(network) if isinstance(network, nn.Module) else network

        def chosen(parameter: str, module: nn.Module) -> bool:
            return isinstance(module, _Masked) or bayesian(parameter, module)

        super().__init__(masked, bayesian=chosen, start_from=start_from, seed=seed, name=name)
        self.keys = [f"{name}.{KEY}" for name, module in self.network.named_modules() if isinstance(module, _Masked)]
        self._tried = False
        if self.provenance.parent:  # by the weights of its source, which has no keys
            tensors = self.layout.views(self.mean) | self.rest_layout.views(self.rest) | self.network.state_dict()
            parent = digest_of({name: tensor for name, tensor in tensors.items() if name not in self.keys})
            self.provenance = Provenance(parent, self.provenance.depth)

    def _adopt(
        self, source: Mapping[str, Tensor], origin: str, chosen: dict[str, Tensor], others: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        keys = {name: torch.zeros_like(t) for name, t in chosen.items() if name.rpartition(".")[2] == KEY}
        return super()._adopt({**keys, **source}, origin, chosen, others)

    def training_pass(
        self, inputs: Tensor, flat: Tensor, extra: Tensor | None, layers: Sequence[str] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits and features; refuse, once, a network that passes by its dropout in evaluation mode.

        Args:
            inputs: a batch.
            flat: the Bayesian weights and the masks' numbers.
            extra: as of `Posterior.training_weights`.
            layers: whose outputs are the features.
        """
        if not self._tried and not torch.compiler.is_compiling():
            self._check(inputs, flat)
            self._tried = True
        return super().training_pass(inputs, flat, extra, layers)

    @torch.no_grad()
    def _check(self, inputs: Tensor, flat: Tensor) -> None:
        layers = {name: layer for name, layer in self.network.named_modules() if isinstance(layer, _Masked)}
        for layer in layers.values():  # not by hooks: fused layers go the long way where there are any
            layer.met = False
        with evaluating(self.network):
            self.run_network(inputs, self.named(flat.detach()))
        for name, layer in layers.items():
            if not layer.met:
                raise InputError(
                    f"mc_dropout: the network does not call its dropout '{name}' when it predicts, as fused layers do "
                    "(nn.TransformerEncoderLayer, say), so its draws would not differ"
                )

    def draw(self, address: Address) -> Weights:
        """Return the weights with the masks that live at an address."""
        shift = torch.zeros_like(self.mean)
        views = self.layout.views(shift)
        for key, number in zip(self.keys, uniform(address, len(self.keys), self.device), strict=True):
            views[key].copy_(number)
        return self.weights(self.mean + shift)

    def materialise(self, weights: Weights | None = None) -> nn.Module:
        """Return a plain copy of the network; of the mean weights with its own layers of dropout, else with masks."""
        plain = super().materialise(weights)
        if weights is None:
            for name, module in list(plain.named_modules()):
                if isinstance(module, _Masked):
                    plain.set_submodule(name, module.layer)
        return plain


class _Masked(nn.Module):
    """Dropout that, in evaluation mode, leaves out what its key says; a key of 0 leaves out nothing."""

    def __init__(self, layer: nn.Module, device: torch.device | None) -> None:
        super().__init__()
        self.layer, self.p, self.whole = layer, float(layer.p), isinstance(layer, CHANNELS)  # type: ignore[arg-type]
        self.key = nn.Parameter(torch.zeros((), device=device))
        self.met = False  # whether it has been called

    def forward(self, inputs: Tensor) -> Tensor:
        self.met = True
        if self.training:
            outputs: Tensor = self.layer(inputs)
            return outputs
        shape = inputs.shape[1:2] + (1,) * (inputs.dim() - 2) if self.whole else inputs.shape[1:]
        begin = (self.key.detach().float() * 2.0**24).to(torch.int64).reshape(1)
        stays = (uniform_from(begin, math.prod(shape)) >= self.p).float() / (1 - self.p)
        return inputs * torch.where(begin == 0, 1.0, stays).view(1, *shape).to(inputs.dtype)


def _masked(network: nn.Module) -> nn.Module:
    """Return a copy of a network whose layers of dropout take a key."""
    masked, count = copy.deepcopy(network), 0
    device = next((parameter.device for parameter in network.parameters()), None)
    for name, module in list(masked.named_modules()):
        if isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise InputError(f"mc_dropout knows nn.Dropout, 1d, 2d and 3d, and '{name}' is a {type(module).__name__}")
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d) and name and 0 < module.p < 1:
            masked.set_submodule(name, _Masked(module, device))
            count += 1
    if not count:
        raise InputError(
            f"mc_dropout needs a network with nn.Dropout layers of a rate above 0, and {type(network).__name__} has "
            "none; take another posterior, or a network with dropout"
        )
    return masked
