"""What all posteriors have in common: draws around a flat network, what training asks of them, and their files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError, reason, within
from peerbayes.importing import in_run
from peerbayes.math.noise import Address, format_of, seed_of
from peerbayes.networks.normalisation import describe, normalization_of, restore
from peerbayes.networks.running import capture
from peerbayes.networks.weights_files import PICKLED, fitted, read_checkpoint
from peerbayes.posteriors import storage
from peerbayes.posteriors.certificate import Certificate
from peerbayes.posteriors.flat_network import FlatNetwork, Provenance, Weights
from peerbayes.posteriors.kinds import PosteriorKind
from peerbayes.posteriors.parameters import Predicate, conv_and_linear

if TYPE_CHECKING:
    from peerbayes.data.splits import Split
    from peerbayes.inference.prediction import Prediction


Source = str | Path | nn.Module | Mapping[str, Tensor]
Reduction = Literal["sum", "layer_mean"]


class Posterior(PosteriorKind, FlatNetwork):
    """What is known about a network's weights.

    The network is copied; its trainable parameters become the flat tensors ``mean`` and ``rest``, see `FlatNetwork`.
    Those chosen by ``bayesian`` have a distribution, the others do not.

    Args:
        network: any module from inputs to logits; it is not changed.
        bayesian: chooses parameters by (parameter name, module that owns it).
        start_from: a trained network to take all tensors from: a module, a posterior, a state dict, or a
            safetensors file.
        seed: with ``name``, where its draws live in predictions.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> from peerbayes import MeanField, Posterior
        >>> posterior = MeanField(torch.nn.Linear(4, 3))
        >>> isinstance(posterior, Posterior), posterior.layout.size, list(posterior.layout.shapes)
        (True, 15, ['weight', 'bias'])
    """

    has_scales: ClassVar[bool] = True  # whether its weights are uncertain at all
    shareable: ClassVar[bool] = False  # whether `std` is learnt for every weight, so that a codebook can be made of it
    averages: ClassVar[tuple[str, ...]] = ("mean",)  # ways in which `average` makes one plain network of it
    told_of_batch: bool = False  # that its predictions depend on the batch

    def __init__(
        self,
        network: nn.Module,
        *,
        bayesian: Predicate = conv_and_linear,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        origin, about = "start_from", None
        if isinstance(start_from, str | Path):
            origin = str(start_from)
            about, start_from = _state_in(Path(start_from), network)
        super().__init__(network, bayesian, start_from, origin)
        if about is not None and normalization_of(self.network) is None:
            restore(self.network, {"normalize": None} | about)  # where a file of ours names none, there was none
        self.seed, self.name = seed, name
        self.input_shape: tuple[int, ...] | None = None  # of one image or text, where it is known
        self.class_names: tuple[str, ...] | None = None
        self.temperature = 1.0  # that predictions are divided by, in logarithms; see `peerbayes.calibrate`
        self.certificate: Certificate | None = None  # what is promised of predictions at that temperature
        self.account: dict[str, Any] = {}  # of how it was made, where that is more than its options

    # ---- what each kind defines --------------------------------------------------------------------------------------

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

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that rebuild this posterior, as JSON-ready values."""
        raise NotImplementedError

    # ---- how it learns -----------------------------------------------------------------------------------------------

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
        """Return logits (members · B, C) and the outputs of the named layers, those of the first member first.

        Args:
            inputs: (B, ...).
            flat: the Bayesian weights (size,).
            extra: what else `training_weights` returns.
            layers: whose outputs are wanted.
        """
        with capture(self.network, layers) as outputs:
            logits = self.run_network(inputs, self.named(flat))
        return logits, [outputs[layer] for layer in layers]

    @property
    def rhos(self) -> set[str]:
        """Names of the scales that are kept as ρ: the scale is softplus(ρ)."""
        return set()

    @property
    def scales(self) -> set[str]:
        """Names of the parameters that are scales, which may learn at a rate of their own."""
        return self.rhos

    @property
    def gaussians(self) -> dict[str, str]:
        """Names of independent Gaussian means, and of the ρ of each: those that natural gradients move together."""
        return {}

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

    def conclude(self, split: Split, augment: Sequence[str]) -> None:
        """Do what is due when training has ended, in place: what has to see the training inputs once more.

        Args:
            split: the training inputs.
            augment: names of the augmentations that it has learnt with.
        """

    # ---- what it can be asked ----------------------------------------------------------------------------------------

    def forward_members(
        self, inputs: Tensor, noise: Tensor | None = None, layers: Sequence[str] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits (members, B, C) and the outputs (members, B, ...) of the named layers, of inputs (B, ...).

        Args:
            inputs: (B, ...).
            noise: (noise_size,); None for the mean weights.
            layers: whose outputs are wanted.
        """
        flat, _, extra = self.training_weights(noise)
        logits, outputs = self.training_pass(inputs, flat, extra, layers)
        shape = (self.members, -1)
        whole = {layer: output.unflatten(0, shape) for layer, output in zip(layers, outputs, strict=True)}
        return logits.unflatten(0, shape), whole

    def member(self, number: int | Tensor) -> Weights:  # noqa: ARG002
        """Return the mean weights of one of its members; a posterior of one has no other."""
        return self.centre()

    def average(self, merge: Any) -> nn.Module:  # noqa: ARG002
        """Return one plain network that predicts in one pass, in one of the ways of `averages`: of the mean weights."""
        return self.materialise()

    def counts(self) -> dict[str, int]:
        """Return how many weights are stored in which way, for records; nothing where each has its own numbers."""
        return {}

    def kl(self, reduction: Reduction = "sum", weights: Weights | None = None) -> Tensor:
        """Return KL(q ‖ prior): ``sum`` = Σ_i KL_i, or ``layer_mean`` = Σ_l mean_{i∈l} KL_i. A scalar, in nats.

        Args:
            reduction: ``sum`` or ``layer_mean``.
            weights: the draw that estimates it, where it has no closed form.
        """
        per_weight = self.kl_per_weight(weights)
        return per_weight.sum() if reduction == "sum" else self.layer_mean_sum(per_weight)

    def predict(self, images: Tensor, draws: int = 50, **options: Any) -> Prediction:
        """Average the probabilities of ``draws`` networks; see `peerbayes.inference.prediction.predict`.

        They are tempered by ``temperature``, but for ``calibrated=False``.

        Args:
            images: (N, ...), in [0, 1] or uint8; texts as token numbers.
            draws: how many networks.
            options: what `predict` takes besides.
        """
        from peerbayes.inference.prediction import predict

        return predict(self, images, draws, **options)

    # ---- its file ----------------------------------------------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """Return what a file says beside the tensors, as JSON-ready values, without a temperature of 1."""
        about = {"kind": self.kind, "options": self.options(), "seed": self.seed, "name": self.name}
        about["noise"] = format_of(self.seed)
        about |= {} if self.temperature == 1 else {"temperature": float(self.temperature)}
        about |= {} if self.certificate is None else {"certificate": self.certificate.model_dump(exclude_none=True)}
        return about | describe(self.network)

    def save(self, path: str | Path, anchors: bool = True) -> None:
        """Write the posterior to one safetensors file, atomically; without ``anchors`` for predictions alone.

        Anchors are what an anchored prior is centred at; a posterior that is read without them is anchored anew.

        Args:
            path: the file.
            anchors: whether it can be trained on as it was.
        """
        state = self.state()
        storage.write(
            Path(path),
            state if anchors else {name: t for name, t in state.items() if not name.startswith("anchor/")},
            self.description(),
        )

    @classmethod
    def load(cls, path: str | Path, network: nn.Module) -> Self:
        """Read a posterior that `save` wrote, over the same architecture; the file says what is Bayesian.

        Args:
            path: the file.
            network: any module of that architecture; it is not changed.
        """
        return cls._of(path, network, *storage.read(Path(path)))

    @classmethod
    def _of(
        cls, path: str | Path, network: nn.Module, tensors: Mapping[str, Tensor], about: Mapping[str, Any], **how: bool
    ) -> Self:
        """Return the posterior of a file's tensors and description."""
        kind, options, seed, name = (about.get(key) for key in ("kind", "options", "seed", "name"))
        with within(f"{path}: holds a posterior of kind {kind!r}, expected {cls.__name__}"), in_run():
            made = Posterior.of_kind(str(kind))
        if not issubclass(made, cls):
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
        certificate = about.get("certificate")
        promised = None if certificate is None else Certificate.parse(certificate, f"{path}: certificate")
        try:
            posterior = made(network, **made._chosen_in(tensors), **options)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
            raise InputError(f"{path}: its options are not those of a {kind} posterior ({reason(error)})") from None
        restore(posterior.network, about)
        posterior.load_state(posterior.unpacked(tensors, about, str(path), **how), str(path))
        posterior.seed, posterior.name, posterior.provenance = seed, name, Provenance(depth=0, state="trained")
        posterior.temperature, posterior.certificate = temperature, promised
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
        """Return what `load_state` takes, of a file's tensors and description.

        Args:
            tensors: the file's.
            about: its description.
            origin: its name, which begins the error.
        """
        return tensors


def _state_in(path: Path, network: nn.Module) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return what a file says beside its tensors, None for a plain state dict, and its mean weights."""
    if path.suffix in PICKLED:
        state = read_checkpoint(path)
        assert state is not None  # those of peerbayes are not pickled
        return None, fitted(state, network, path, new_head=False)
    about, tensors = storage.read_state(path)
    if about is None or about.get("kind") in (None, "point", "mean_field"):
        return about, tensors
    # Other kinds make their mean weights of several tensors.
    return about, dict(Posterior.load(path, network).materialise().state_dict())


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
