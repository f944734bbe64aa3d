"""What all posteriors have in common: flat weights, a network that receives them, and the verbs."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, reason
from peerbayes.math.noise import Address, format_of, seed_of
from peerbayes.networks.features import capture
from peerbayes.networks.normalisation import Choice, carry_over, describe, normalization_of, restore, settle
from peerbayes.networks.registry import Inputs
from peerbayes.posteriors import storage
from peerbayes.posteriors.layout import Layout
from peerbayes.posteriors.parameters import (
    Predicate,
    conv_and_linear,
    digest_of,
    first_names,
    release_recurrent_weights,
    require_same,
    take_parameters,
    under_first_names,
)
from peerbayes.posteriors.prepare import prepared
from peerbayes.posteriors.provenance import Provenance

if TYPE_CHECKING:
    from peerbayes.inference.prediction import Prediction

Source = str | Path | nn.Module | Mapping[str, Tensor]
Reduction = Literal["sum", "layer_mean"]
# where the kinds of posteriors are that are imported when they are first asked for
_MODULES = {kind: f"peerbayes.posteriors.{kind}" for kind in ("point", "mean_field", "rank_one")} | {
    "shared": "peerbayes.codebook.shared"
}


class Weights(dict[str, Tensor]):
    """One draw: every parameter of the network by name, the flat tensor that the Bayesian ones are views of, and the
    standard deviations it was drawn with, so that terms need not work them out again.
    """

    def __init__(self, tensors: Mapping[str, Tensor], flat: Tensor, std: Tensor | None = None) -> None:
        super().__init__(tensors)
        self.flat = flat
        self.std = std


class Posterior(nn.Module):
    """What is known about a network's weights.

    The network is copied and its trainable parameters are moved into two flat tensors: ``mean`` for those chosen by
    ``bayesian``, ``rest`` for the others (batch-norm scales and shifts, say). Buffers and frozen parameters stay in
    the copy. A forward pass hands the network named views of the flat tensors through `torch.func.functional_call`.

    Args:
        network: any module from inputs to logits; it is not changed.
        bayesian: chooses parameters by (parameter name, module that owns it).
        start_from: a trained network to take all tensors from: a module, a posterior, a state dict, or a
            safetensors file.
        seed: with ``name``, where its draws live in predictions.
        name: a name of its own makes peers of one seed differ.
    """

    _inverse_sizes: Tensor

    kind: ClassVar[str]
    stochastic: ClassVar[bool]
    has_scales: ClassVar[bool] = True  # whether its weights are uncertain at all
    made_of_posterior: ClassVar[bool] = False  # whether it is built of a trained posterior, not of a network
    shareable: ClassVar[bool] = False  # whether `std` is learnt for every weight, so that a codebook can be made of it
    told_of_batch: bool = False  # that its predictions depend on the batch
    _kinds: ClassVar[dict[str, type[Posterior]]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "kind" in cls.__dict__:  # a subclass that only changes behaviour must not take over its parent's files
            Posterior._kinds[cls.kind] = cls

    def __init__(
        self,
        network: nn.Module,
        *,
        bayesian: Predicate = conv_and_linear,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        super().__init__()
        self.seed, self.name = seed, name
        self.input_shape: tuple[int, ...] | None = None  # of one image or text, where it is known
        self.class_names: tuple[str, ...] | None = None
        self.temperature = 1.0  # that predictions are divided by, in logarithms; see `peerbayes.calibrate`
        if isinstance(network, Posterior):
            raise InputError("expected a network, got a posterior; pass it as start_from instead")
        if not isinstance(network, nn.Module):
            raise InputError(f"expected a network (a torch.nn.Module), got {type(network).__name__}")
        source = None if start_from is None else _state_of(start_from, network)
        self.plain_memory = False  # whether convolutions must not have channels last
        self.provenance = Provenance()
        self.account: dict[str, Any] = {}  # of how it was made, where that is more than its options
        self.network = copy.deepcopy(network)
        if isinstance(start_from, nn.Module):
            carry_over(start_from.network if isinstance(start_from, Posterior) else start_from, self.network)
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
            origin = str(start_from) if isinstance(start_from, str | Path) else "start_from"
            source = under_first_names(source, homes)
            chosen, others = self._adopt(source, origin, chosen, others)
            depth = start_from.provenance.depth if isinstance(start_from, Posterior) else 0
            self.provenance = Provenance(digest_of(chosen | others | self.network.state_dict()), depth)
        device = next(iter((chosen | others).values())).device
        self._hold(self.layout.flatten(chosen).to(device), self.rest_layout.flatten(others).to(device))
        self.register_buffer("_inverse_sizes", self.layout.inverse_sizes().to(device), persistent=False)

    def _hold(self, mean: Tensor, rest: Tensor) -> None:
        """Keep the flat weights (size,), and all other parameters (rest size,)."""
        self.mean = nn.Parameter(mean)
        self.rest = nn.Parameter(rest)

    # ---- verbs that each posterior defines ------------------------------------------------------------------------

    def draw(self, address: Address) -> Weights:
        """Return the set of weights that lives at ``address``; the same address gives the same weights."""
        raise NotImplementedError

    def kl_per_weight(self, weights: Weights | None = None) -> Tensor:
        """Return KL(q ‖ prior) in nats by weight, shape (size,), estimated from the draw ``weights`` if need be."""
        raise NotImplementedError

    @property
    def noise_size(self) -> int:
        """How many standard normal numbers make a draw."""
        raise NotImplementedError

    def place(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the flat weights (size,) that noise (noise_size,) makes, and their scales; None gives the centre."""
        raise NotImplementedError

    @property
    def std(self) -> Tensor:
        """Scale of every Bayesian weight, shape (size,): its standard deviation under Gaussian noise."""
        raise NotImplementedError

    @property
    def members(self) -> int:
        """How many networks learn at once, each with rows of its own in `training_pass`."""
        return 1

    def training_weights(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what `training_pass` takes of a draw: flat weights (size,), their scales, and what else there is."""
        return *self.place(noise), None

    def training_pass(
        self,
        inputs: Tensor,
        flat: Tensor,
        extra: Tensor | None,  # noqa: ARG002
        layers: Sequence[str] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits (members · B, C) and the outputs of the named layers, those of the first member first."""
        with capture(self.network, layers) as found:
            logits = self.run_network(inputs, self.named(flat))
        return logits, [found[layer] for layer in layers]

    @property
    def rhos(self) -> set[str]:
        """Names of the scales that are kept as ρ: the scale is softplus(ρ)."""
        return set()

    @property
    def scales(self) -> set[str]:
        """Names of the parameters that are scales, which may learn at a rate of their own."""
        return self.rhos

    @property
    def decayed(self) -> set[str]:
        """Names of the parameters that weight decay pulls to 0; it leaves alone what is not named, and all `scales`.

        On means with a prior N(0, s²) a decay of λ is one more such prior: with N images theirs is N(0, 1/(1/s² + λN)).
        Means with an anchored prior do not decay: it would pull them away from the anchor.
        """
        return {"mean", "rest"}

    @property
    def undecayed(self) -> set[str]:
        """Names of the parameters that weight decay leaves alone: all that `decayed` does not name, and all scales."""
        return {name for name, _ in self.named_parameters()} - self.decayed | self.scales

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that rebuild this posterior, as JSON-ready values."""
        raise NotImplementedError

    @classmethod
    def of_kind(cls, kind: str) -> type[Posterior]:
        """Return the posteriors' class of a kind, such as ``mean_field``."""
        if kind in _MODULES:
            importlib.import_module(_MODULES[kind])
        return Posterior._kinds[kind]

    @classmethod
    def varies(cls, options: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return whether posteriors of these options predict by draws that differ."""
        return cls.stochastic

    def forward_members(
        self, inputs: Tensor, noise: Tensor | None = None, layers: Sequence[str] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits (members, B, C) and the outputs (members, B, ...) of the named layers, of inputs (B, ...)."""
        flat, _, extra = self.training_weights(noise)
        logits, outputs = self.training_pass(inputs, flat, extra, layers)
        shape = (self.members, -1)
        whole = {layer: output.unflatten(0, shape) for layer, output in zip(layers, outputs, strict=True)}
        return logits.unflatten(0, shape), whole

    def member(self, number: int | Tensor) -> Weights:  # noqa: ARG002
        """Return the mean weights of one of its members; a posterior of one has no other."""
        return self.centre()

    def end_epoch(
        self,
        moments: Mapping[str, Mapping[str, Tensor]],  # noqa: ARG002
        gradient: Callable[[str], Tensor | None],  # noqa: ARG002
    ) -> dict[str, Any]:
        """Do what is due between epochs, in place, and return what is logged of it.

        Args:
            moments: what the optimiser remembers of each parameter, by name and slot.
            gradient: a running mean of a parameter's gradient by its name, None where there is none.
        """
        return {}

    def counts(self) -> dict[str, int]:
        """Return how many weights are stored in which way, for records; nothing where each has its own numbers."""
        return {}

    def flat_tensors(self) -> dict[str, Tensor]:
        """Return the flat tensors in the shape of ``layout`` that a file must hold, by name."""
        return {"mean": self.mean}

    # ---- what follows from them -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.mean.device

    def kl(self, reduction: Reduction = "sum", weights: Weights | None = None) -> Tensor:
        """Return KL(q ‖ prior): ``sum`` = Σ_i KL_i, or ``layer_mean`` = Σ_l mean_{i∈l} KL_i. A scalar, in nats."""
        per_weight = self.kl_per_weight(weights)
        return per_weight.sum() if reduction == "sum" else self.layer_mean_sum(per_weight)

    def layer_mean_sum(self, values: Tensor) -> Tensor:
        """Return Σ_l mean_{i∈l} values_i over the Bayesian tensors l, for values of shape (size,)."""
        return torch.dot(values, self._inverse_sizes)

    def centre(self) -> Weights:
        """Return the mean weights."""
        return self.weights(self.mean)

    def weights(self, flat: Tensor, std: Tensor | None = None) -> Weights:
        """Return all parameters by name, with the Bayesian ones taken from ``flat`` (size,)."""
        return Weights(self.named(flat), flat, std)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return all parameters by name, as a plain dict of views."""
        tensors = self.layout.views(flat) | self.rest_layout.views(self.rest)
        tensors |= {alias: tensors[name] for alias, name in self.aliases.items()}
        return tensors

    def forward(self, inputs: Tensor, weights: Weights | None = None) -> Tensor:
        """Return logits (B, C) of one draw (the mean weights by default); images in [0, 1] or uint8."""
        return self.run_network(inputs, weights if weights is not None else self.centre())

    def run_network(self, inputs: Tensor, tensors: dict[str, Tensor], network: nn.Module | None = None) -> Tensor:
        """Return the network's output with the named tensors in the places of its parameters."""
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
        """Return logits and the outputs of the named layers."""
        with capture(self.network, layers) as found:
            logits = self(inputs, weights)
        return logits, found

    def predict(self, images: Tensor, draws: int = 50, **options: Any) -> Prediction:
        """Average the probabilities of ``draws`` networks; see `peerbayes.inference.prediction.predict`.

        They are tempered by ``temperature``, but for ``calibrated=False``.
        """
        from peerbayes.inference.prediction import predict

        return predict(self, images, draws, **options)

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

    def description(self) -> dict[str, Any]:
        """Return what a file says beside the tensors, as JSON-ready values; a temperature of 1 is left out."""
        about = {"kind": self.kind, "options": self.options(), "seed": self.seed, "name": self.name}
        about["noise"] = format_of(self.seed)
        about |= {} if self.temperature == 1 else {"temperature": float(self.temperature)}
        return about | describe(self.network)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor by its place and the network's own name: ``mean/a.weight``, ``rest/bn.bias``."""
        tensors = {
            f"{part}/{name}": view
            for part, flat in self.flat_tensors().items()
            for name, view in self.layout.views(flat).items()
        }
        tensors |= {f"rest/{name}": view for name, view in self.rest_layout.views(self.rest).items()}
        return tensors | {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}

    def __repr__(self) -> str:
        # With the parameters in their places, without which layers would say that they have no bias, or nothing at all.
        shown = copy.copy(self)
        shown._modules = self._modules | {"network": self.materialise()}
        return nn.Module.__repr__(shown)

    def digest(self) -> str:
        """Return a digest of all tensors that it predicts with; the temperature, which makes no draw, is none."""
        # Anchors are of training alone, and files may be without them.
        return digest_of({name: tensor for name, tensor in self.state().items() if not name.startswith("anchor/")})

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], origin: str = "state") -> None:
        """Copy what `state` returned into this posterior; nothing is changed unless everything fits."""
        own = self.state()
        require_same(tensors, own, origin)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def save(self, path: str | Path, anchors: bool = True) -> None:
        """Write the posterior to one safetensors file, atomically; without ``anchors`` for predictions alone.

        Anchors are what an anchored prior is centred at; a posterior that is read without them is anchored anew.
        """
        state = self.state()
        storage.write(
            Path(path),
            state if anchors else {name: t for name, t in state.items() if not name.startswith("anchor/")},
            self.description(),
        )

    @classmethod
    def load(cls, path: str | Path, network: nn.Module) -> Self:
        """Read a posterior that `save` wrote, over the same architecture; the file says what is Bayesian."""
        return cls._of(path, network, *storage.read(Path(path)))

    @classmethod
    def _of(
        cls, path: str | Path, network: nn.Module, tensors: Mapping[str, Tensor], about: Mapping[str, Any], **how: bool
    ) -> Self:
        """Return the posterior of a file's tensors and description."""
        kind, options, seed, name = (about.get(key) for key in ("kind", "options", "seed", "name"))
        try:
            found = Posterior.of_kind(str(kind))
        except KeyError:
            raise InputError(f"{path}: holds a posterior of kind {kind!r}, expected {cls.__name__}") from None
        if not issubclass(found, cls):
            raise InputError(f"{path}: holds a posterior of kind {kind!r}, expected {cls.__name__}")
        if not isinstance(options, dict) or type(seed) is not int or not isinstance(name, str):
            raise InputError(f"{path}: its description lacks options, a seed or a name")
        try:
            seed = seed_of(seed, about.get("noise"))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        temperature = about.get("temperature", 1.0)
        if not isinstance(temperature, float) or not 0 < temperature < math.inf:
            raise InputError(f"{path}: its temperature is {temperature!r}, expected a positive number")
        try:
            posterior = found(network, **found._chosen_in(tensors), **options)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
            raise InputError(f"{path}: its options are not those of a {kind} posterior ({reason(error)})") from None
        restore(posterior.network, about)
        posterior.load_state(posterior.unpacked(tensors, about, str(path), **how), str(path))
        posterior.seed, posterior.name, posterior.provenance = seed, name, Provenance(depth=0, state="trained")
        posterior.temperature = temperature
        return posterior.eval()  # see `materialise`

    @classmethod
    def _chosen_in(cls, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the options that choose the parameters which a file holds as Bayesian."""
        chosen = {name.removeprefix("mean/") for name in tensors if name.startswith("mean/")}
        return {"bayesian": lambda name, _module: name in chosen}

    def unpacked(
        self,
        tensors: Mapping[str, Tensor],
        about: Mapping[str, Any],  # noqa: ARG002
        origin: str,  # noqa: ARG002
    ) -> Mapping[str, Tensor]:
        """Return what `load_state` takes, of a file's tensors and description."""
        return tensors

    def _adopt(
        self, source: Mapping[str, Tensor], origin: str, chosen: dict[str, Tensor], others: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        kept = self.network.state_dict()
        require_same(source, chosen | others | kept, origin)
        self.network.load_state_dict(source, strict=False)
        return {n: source[n].to(t) for n, t in chosen.items()}, {n: source[n].to(t) for n, t in others.items()}


def _called(network: nn.Module, tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
    logits: Tensor = torch.func.functional_call(network, tensors, (inputs,), tie_weights=False)
    return logits


def _state_of(source: Source, network: nn.Module) -> dict[str, Tensor]:
    if isinstance(source, str | Path):
        kind, tensors = storage.read_state(Path(source))
        if kind in (None, "point", "mean_field"):
            return tensors
        source = Posterior.load(source, network)  # whose mean weights are made of several tensors
    if isinstance(source, Posterior):
        return dict(source.materialise().state_dict())
    if isinstance(source, nn.Module):
        return dict(source.state_dict())
    return dict(source)
