"""Hold a network's trainable parameters in flat tensors, and hand it named views of them; remember their origin."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.networks.inputs import Inputs, prepared
from peerbayes.networks.normalisation import Choice, carry_over, normalization_of, settle
from peerbayes.networks.running import capture
from peerbayes.posteriors.parameters import (
    Predicate,
    digest_of,
    release_recurrent_weights,
    require_same,
    take_parameters,
)


@dataclass(frozen=True)
class Provenance:
    """Origin of weights, as far as it is known.

    Attributes:
        parent: hash of the weights that it started from; empty where it started from nothing.
        depth: lineage depth, the number of trainings behind it; -1 for initial weights, 0 for an unknown run.
        run: the run directory it was loaded from, or was trained into.
        mark: of that directory's state, which changes when the run is made anew.
        state: whether a run is changing it (``training``), or has done so (``trained``): then its own hash is the
            parent of whatever starts from it.

    Example:
        >>> from peerbayes.posteriors import Provenance
        >>> Provenance().state, Provenance(parent="1f3a", depth=0).depth
        ('untrained', 0)
    """

    parent: str = ""
    depth: int = -1
    run: Path | None = None
    mark: Any = None
    state: Literal["untrained", "training", "trained"] = "untrained"


class Layout:
    """Positions of named tensors in a flat tensor.

    Convolution weights (four axes) lie in channels-last order, so that their views have the memory format which
    the convolution kernels of CPUs and GPUs like best, at no cost. Names and shapes are those of the network.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the named tensors as views of ``flat`` (size,); gradients flow back in one concatenation."""
        pieces = flat.split(self.sizes)
        return {name: _shaped(piece, shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a new flat tensor (size,) that holds the named tensors."""
        if not self.shapes:
            return torch.empty(0)
        rows = (tensors[name] for name in self.shapes)
        return torch.cat([(t.permute(0, 2, 3, 1) if t.dim() == 4 else t).reshape(-1) for t in rows])

    def inverse_sizes(self) -> Tensor:
        """Return (size,) with 1/n_l at every element of tensor l: a dot with it is Σ_l mean over l."""
        pieces = [torch.full((size,), 1 / size, dtype=torch.float32) for size in self.sizes]
        return torch.cat([torch.empty(0, dtype=torch.float32), *pieces])


def _shaped(piece: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) == 4:
        out, into, height, width = shape
        return piece.view(out, height, width, into).permute(0, 3, 1, 2)
    return piece.view(shape)


class Weights(dict[str, Tensor]):
    """One draw: every parameter of the network by name, the flat tensor that the Bayesian ones are views of, and the
    standard deviations it was drawn with, so that terms need not work them out again.

    Example:
        >>> import torch
        >>> from peerbayes import Address, MeanField
        >>> weights = MeanField(torch.nn.Linear(4, 3)).draw(Address(0))
        >>> weights["weight"].shape, weights.flat.shape
        (torch.Size([3, 4]), torch.Size([15]))
    """

    def __init__(self, tensors: Mapping[str, Tensor], flat: Tensor, std: Tensor | None = None) -> None:
        super().__init__(tensors)
        self.flat = flat
        self.std = std


class FlatNetwork(nn.Module):
    """A copy of a network whose trainable parameters lie in two flat tensors.

    ``mean`` holds those chosen by ``bayesian``, ``rest`` the others (batch-norm scales and shifts, say). Buffers and
    frozen parameters stay in the copy. A forward pass hands the network named views of the flat tensors through
    `torch.func.functional_call`.

    Args:
        network: any module from inputs to logits; it is not changed.
        bayesian: chooses parameters by (parameter name, module that owns it).
        start_from: what all tensors are taken from: a module, a posterior, or a state dict.
        origin: what ``start_from`` is, for messages.
    """

    _inverse_sizes: Tensor

    def __init__(
        self,
        network: nn.Module,
        bayesian: Predicate,
        start_from: nn.Module | Mapping[str, Tensor] | None = None,
        origin: str = "start_from",
    ) -> None:
        super().__init__()
        if isinstance(network, FlatNetwork):
            raise InputError("expected a network, got a posterior; pass it as start_from instead")
        if not isinstance(network, nn.Module):
            raise InputError(f"expected a network (a torch.nn.Module), got {type(network).__name__}")
        source = None if start_from is None else _state_of(start_from)
        self.plain_memory = False  # whether convolutions must not have channels last
        self.provenance = Provenance()
        self.network = copy.deepcopy(network)
        if isinstance(start_from, nn.Module):
            carry_over(start_from.network if isinstance(start_from, FlatNetwork) else start_from, self.network)
        homes = first_names(self.network)
        chosen, others, self.aliases = take_parameters(self.network, bayesian)
        if not chosen and not others:
            raise InputError(
                f"{type(network).__name__} has no trainable parameters; if it is a posterior's network, the posterior "
                "holds them: pass a network of its own, and the posterior as start_from"
            )
        self.layout = Layout({name: tensor.shape for name, tensor in chosen.items()})
        self.rest_layout = Layout({name: tensor.shape for name, tensor in others.items()})
        if source is not None:
            chosen, others = self._adopt(under_first_names(source, homes), origin, chosen, others)
            depth = start_from.provenance.depth if isinstance(start_from, FlatNetwork) else 0
            self.provenance = Provenance(digest_of(chosen | others | self.network.state_dict()), depth)
        device = next(iter((chosen | others).values())).device
        self._hold(self.layout.flatten(chosen).to(device), self.rest_layout.flatten(others).to(device))
        self.register_buffer("_inverse_sizes", self.layout.inverse_sizes().to(device), persistent=False)

    def _adopt(
        self, source: Mapping[str, Tensor], origin: str, chosen: dict[str, Tensor], others: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        kept = self.network.state_dict()
        require_same(source, chosen | others | kept, origin)
        self.network.load_state_dict(source, strict=False)
        return {n: source[n].to(t) for n, t in chosen.items()}, {n: source[n].to(t) for n, t in others.items()}

    def _hold(self, mean: Tensor, rest: Tensor) -> None:
        """Keep the flat weights (size,), and all other parameters (rest size,)."""
        self.mean = nn.Parameter(mean)
        self.rest = nn.Parameter(rest)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.mean.device

    def flat_tensors(self) -> dict[str, Tensor]:
        """Return the flat tensors in the shape of ``layout`` that a file must hold, by name."""
        return {"mean": self.mean}

    def centre(self) -> Weights:
        """Return the mean weights."""
        return self.weights(self.mean)

    def weights(self, flat: Tensor, std: Tensor | None = None) -> Weights:
        """Return all parameters by name, with the Bayesian ones taken from ``flat`` (size,).

        Args:
            flat: the Bayesian weights.
            std: their standard deviations, if a term may need them.
        """
        return Weights(self.named(flat), flat, std)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return all parameters by name, as a plain dict of views."""
        tensors = self.layout.views(flat) | self.rest_layout.views(self.rest)
        tensors |= {alias: tensors[name] for alias, name in self.aliases.items()}
        return tensors

    def layer_mean_sum(self, values: Tensor) -> Tensor:
        """Return Σ_l mean_{i∈l} values_i over the Bayesian tensors l, for values of shape (size,)."""
        return torch.dot(values, self._inverse_sizes)

    def forward(self, inputs: Tensor, weights: Weights | None = None) -> Tensor:
        """Return logits (B, C) of one draw (the mean weights by default); images in [0, 1] or uint8."""
        return self.run_network(inputs, weights if weights is not None else self.centre())

    def run_network(self, inputs: Tensor, tensors: dict[str, Tensor], network: nn.Module | None = None) -> Tensor:
        """Return the network's output with the named tensors in the places of its parameters.

        Args:
            inputs: (B, ...).
            tensors: parameters by name.
            network: in the place of its own.
        """
        network = self.network if network is None else network
        inputs = prepared(inputs)
        if self.plain_memory:
            inputs = inputs.contiguous()
            tensors = {name: t.contiguous() if t.dim() == 4 else t for name, t in tensors.items()}
        if self.plain_memory or torch.compiler.is_compiling():  # before it compiles, a network has been tried
            return _called(network, tensors, inputs)
        try:
            return _called(network, tensors, inputs)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
        self.plain_memory = True  # a network that calls view on what it takes to lie channel by channel
        return self.run_network(inputs, tensors, network)

    def forward_features(
        self, inputs: Tensor, weights: Weights, layers: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and the outputs of the named layers.

        Args:
            inputs: (B, ...).
            weights: a draw.
            layers: whose outputs are wanted.
        """
        with capture(self.network, layers) as outputs:
            logits = self(inputs, weights)
        return logits, outputs

    def materialise(self, weights: Weights | None = None) -> nn.Module:
        """Return a plain copy of the network that holds one draw (the mean weights by default), in evaluation mode."""
        plain = copy.deepcopy(self.network)
        made: dict[str, nn.Parameter] = {}
        for name, tensor in (weights if weights is not None else self.centre()).items():
            canonical = self.aliases.get(name, name)
            if canonical not in made:
                made[canonical] = nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))
            owner, _, leaf = name.rpartition(".")
            plain.get_submodule(owner)._parameters[leaf] = made[canonical]
        release_recurrent_weights(plain)
        # In training mode its first prediction would use, and change, batch-norm's statistics.
        return plain.eval()

    def normalise(self, normalize: Choice, inputs: Inputs, started: bool = False, who: str = "the network") -> None:
        """Put the normalisation that the network expects in front of it; see `peerbayes.networks.normalised`.

        Args:
            normalize: what that is.
            inputs: shape and statistics of the data.
            started: the weights are known to be trained ones.
            who: the network, for messages.
        """
        network = copy.copy(self.network)  # another object: what predictions keep by it is made anew
        network._buffers = dict(network._buffers)
        network._non_persistent_buffers_set = set(network._non_persistent_buffers_set)
        tensors = self.named(self.mean.detach())
        settle(
            network,
            normalize,
            inputs,
            run=lambda images: self.run_network(images, tensors),
            tensors=tensors,
            started=started,
            who=who,
        )
        if normalization_of(network) != normalization_of(self.network):
            self.network = network
        carry_over(network, self.network)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor by its place and the network's own name: ``mean/a.weight``, ``rest/bn.bias``."""
        tensors = {
            f"{part}/{name}": view
            for part, flat in self.flat_tensors().items()
            for name, view in self.layout.views(flat).items()
        }
        tensors |= {f"rest/{name}": view for name, view in self.rest_layout.views(self.rest).items()}
        return tensors | {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}

    def digest(self) -> str:
        """Return a digest of all tensors that it predicts with; the temperature, which makes no draw, is none."""
        # Anchors are of training alone, and files may be without them.
        return digest_of({name: tensor for name, tensor in self.state().items() if not name.startswith("anchor/")})

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], origin: str = "state") -> None:
        """Copy what `state` returned into this posterior; nothing is changed unless everything fits.

        Args:
            tensors: by place and name.
            origin: where they come from, which begins the error.
        """
        held = self.state()
        require_same(tensors, held, origin)
        for name, tensor in held.items():
            tensor.copy_(tensors[name])
        self._derive()

    def _derive(self) -> None:
        """Derive what is kept beside the tensors, after these have been loaded."""

    def __repr__(self) -> str:
        # With the parameters in their places, without which layers would say that they have no bias, or nothing at all.
        shown = copy.copy(self)
        shown._modules = self._modules | {"network": self.materialise()}
        return nn.Module.__repr__(shown)


def _called(network: nn.Module, tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
    logits: Tensor = torch.func.functional_call(network, tensors, (inputs,), tie_weights=False)
    return logits


def _state_of(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(source, FlatNetwork):
        source = source.materialise()
    return dict(source.state_dict() if isinstance(source, nn.Module) else source)


def first_names(network: nn.Module) -> dict[str, str]:
    # Every name of a trainable parameter, also by way of a layer that has two names, and the first of them.
    first: dict[int, str] = {}
    every = network.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in every if parameter.requires_grad}


def under_first_names(state: Mapping[str, Tensor], first: Mapping[str, str]) -> dict[str, Tensor]:
    """Return a state by the first names of its tensors; files may hold a tied one under any of its names, or all.

    Args:
        state: tensors by name.
        first: the first name of every name, from `first_names`.
    """
    named = ((name, first.get(name, name), tensor) for name, tensor in state.items())
    return {home: tensor for name, home, tensor in named if name == home or home not in state}
