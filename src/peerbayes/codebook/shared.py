"""Posterior whose weights share a codebook: few Gaussians over (mean, scale), and individual outliers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import AfterValidator
from torch import Tensor, nn

from peerbayes.codebook.book import (
    Codebook,
    Sampling,
    blank_codebook,
    check_codebook,
    drawn_at,
    drawn_from,
    drawn_whole,
    drawn_with,
    in_file_order,
    moments,
    of_rows,
    rows_of,
)
from peerbayes.codebook.file import EXACT, FIRST, packed, unpacked
from peerbayes.errors import InputError
from peerbayes.math.divergences import gaussian_kl
from peerbayes.math.noise import Address, normal, start
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior, Reduction, Source
from peerbayes.posteriors.flat_network import Weights
from peerbayes.posteriors.parameters import Predicate, require_same
from peerbayes.posteriors.scales import inverse_softplus
from peerbayes.schema import PositiveFloat

if TYPE_CHECKING:
    from peerbayes.data.splits import Split

SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)
BITS = (*range(4, 17), EXACT)  # of an outlier's mean in a file
DEFAULT_BITS = 10
TRAINED = ("component", "cholesky", "outlier_mean", "outlier_rho")
PLACES = {
    "label": torch.int32,
    "blended": torch.int64,
    "blend_component": torch.int32,
    "blend_weight": torch.float32,
    "outlier": torch.int64,
}
ANCHORS = {"anchor_component": "component", "anchor_cholesky": "cholesky", "anchor_outlier": "outlier_mean"}


def conv_and_linear_weights(name: str, module: nn.Module) -> bool:
    """Return whether a parameter is a weight, not a bias, of a convolution or linear layer: the default choice.

    Args:
        name: the parameter's.
        module: that owns it.
    """
    return isinstance(module, nn.modules.conv._ConvNd | nn.Linear) and name.rpartition(".")[2] == "weight"


def check_bits(bits: Any) -> int:
    """Return the bits of an outlier's mean, if they are so many as a file can have."""
    if not isinstance(bits, int) or bits not in BITS:
        raise InputError(f"bits is {bits!r}, expected {BITS[0]} to {BITS[-2]}, or {EXACT}")
    return bits


Bits = Annotated[int, AfterValidator(check_bits)]


def usually_shared(network: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of some parameters' names that `conv_and_linear_weights` chooses.

    Args:
        network: that has them.
        names: of parameters.
    """
    modules = dict(network.named_modules())
    return [name for name in names if conv_and_linear_weights(name, modules[name.rpartition(".")[0]])]


class Shared(Posterior):
    """Posterior of weights that share a codebook: inliers follow their component, outliers their own N(μ_i, σ_i²).

    A component is a Gaussian over (mean, scale) with mean (m, s) and covariance L Lᵀ, L = [[a, 0], [b, c]]. By
    ``sampling`` a draw is:

    - ``hierarchical``: μ̃ = m + a ε₁, σ̃ = s + b ε₁ + c ε₂, w = μ̃ + σ̃ ε₃, for every weight anew; given ε₃ this is
      Gaussian, so two numbers make it: w = m + s ε₃ + √((a + b ε₃)² + c² ε₃²) ε
    - ``moment``: w = m + √v ε with v = s² + a² + b² + c², which has the same mean and variance
    - ``mean``: w = m + s ε
    - ``cluster``: w = m + a ε, one for all weights of a component
    - ``cluster_hier``: as hierarchical, one for all weights of a component

    A blended weight has the parameters Σ_j α_j (m, s, a, b, c)_j of two components; where components are drawn as a
    whole, it is Σ_j α_j w_j. As a ``mixture`` it belongs to one of the two in each draw, with probability α_j. Means,
    factors and outliers are trained; which weight belongs to what is not.

    Args:
        network: any module.
        codebook: from `peerbayes.codebook`; None for a placeholder that a file is read into.
        sampling: how weights are drawn.
        mixture: whether blended weights are mixtures.
        prior: ``"anchored"``: for components and blended weights N(m, v) as they were at first, for outliers
            N(μ_i, prior_std²) as they were at first; ``"normal"``: N(0, prior_std²).
        prior_std: see ``prior``.
        bits: of an outlier's mean in a file. With 4 to 16 all numbers are rounded: components' means to 16 bits, scales
            to 8, and what is not shared to float16. With 32 every number is stored exactly.
        weights: names of the parameters that are shared; by default those that ``bayesian`` chooses.
        bayesian: chooses parameters by (name, owning module).
        start_from: a trained network to take all other tensors from.
        seed: with ``name``, the address of its draws in predictions.
        name: a name of its own makes peers of one seed differ.

    Example:
        >>> import torch
        >>> from peerbayes import Address, MeanField, Shared
        >>> from peerbayes.codebook import Sharing, share
        >>> network = torch.nn.Linear(32, 32)
        >>> options = Sharing(components=8, outliers=False, merge={"distance": 0})
        >>> book, _ = share(MeanField(network), options, gradient=None)
        >>> posterior = Shared(network, book)
        >>> posterior.counts()["components"], posterior.draw(Address(0))["weight"].shape
        (8, torch.Size([32, 32]))
    """

    kind: ClassVar[str] = "shared"
    in_words: ClassVar[str] = "a codebook of Gaussians over the weights"
    stochastic: ClassVar[bool] = True
    made_of_posterior: ClassVar[bool] = True

    component: nn.Parameter
    cholesky: nn.Parameter
    outlier_mean: nn.Parameter
    outlier_rho: nn.Parameter
    label: Tensor
    blended: Tensor
    blend_component: Tensor
    blend_weight: Tensor
    outlier: Tensor
    anchor_component: Tensor
    anchor_cholesky: Tensor
    anchor_outlier: Tensor
    _prior_mean: Tensor
    _prior_std: Tensor
    _rows: Tensor
    _count: Tensor
    _bound: Tensor

    def __init__(
        self,
        network: nn.Module,
        codebook: Codebook | None = None,
        *,
        sampling: Sampling = "hierarchical",
        mixture: bool = False,
        prior: Literal["anchored", "normal"] = "anchored",
        prior_std: PositiveFloat = 0.1,
        bits: Bits = DEFAULT_BITS,
        weights: Sequence[str] | None = None,
        bayesian: Predicate = conv_and_linear_weights,
        start_from: Source | None = None,
        seed: int = 0,
        name: str = "peer",
    ) -> None:
        chosen = None if weights is None else set(weights)
        super().__init__(
            network,
            bayesian=bayesian if chosen is None else lambda parameter, _module: parameter in chosen,
            start_from=start_from,
        )
        if sampling not in SAMPLINGS:
            raise InputError(f"sampling is {sampling!r}, expected {', '.join(SAMPLINGS)}")
        if not isinstance(mixture, bool):
            raise InputError(f"mixture is {mixture!r}, expected true or false")
        if prior not in ("anchored", "normal"):
            raise InputError(f"prior is {prior!r}, expected 'anchored' or 'normal'")
        if not 0 < prior_std < torch.finfo(torch.float32).max:
            raise InputError(f"prior_std is {prior_std}, expected a positive number")
        check_bits(bits)
        if not self.layout.size:
            raise InputError(f"no parameter of {type(network).__name__} is chosen to be shared")
        self.seed, self.name = seed, name
        # Merges components after every epoch, if set: called with (self, moments, gradient), returns a log.
        self.merging: Callable[[Shared, list[Tensor], Tensor | None], dict[str, Any]] | None = None
        self.sampling, self.mixture = sampling, mixture
        self.prior, self.prior_std, self.bits = prior, float(prior_std), bits
        every = (*self.layout.shapes, *self.rest_layout.shapes)
        self._usual = set(usually_shared(self.network, every)) == set(self.layout.shapes)
        self._take(codebook if codebook is not None else blank_codebook(self.layout.size, self.rest.device))

    @classmethod
    def option_fields(cls) -> dict[str, tuple[Any, Any]]:
        """Return type and default of each option in a recipe: how the codebook is made, and how weights are drawn.

        See `peerbayes.codebook.build.share` and `peerbayes.Shared`.

        Args:
            merge: which components become one.
            merge_every_epoch: whether components that have come near each other are merged at the end of every epoch,
                too.
        """
        from peerbayes.codebook.peer import making_fields

        drawn = super().option_fields()
        return making_fields() | {name: drawn[name] for name in drawn if name not in ("codebook", "weights")}

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that contradict each other."""
        if options["mixture"] and not options["blend"]:
            raise ValueError("mixture is how blended weights are drawn, but blend is false; leave out one of them")
        if options["merge_every_epoch"] and not options["merge"]["distance"]:
            raise ValueError("merge_every_epoch merges by merge.distance, which is 0; leave out one of them")
        if options["thrift"] and (options["components"] or options["em_steps"]):
            raise ValueError(
                "thrift makes the number of components and has no em_steps; leave out components or thrift"
            )

    @classmethod
    def needs_start(cls, options: Mapping[str, Any]) -> str:  # noqa: ARG003
        """Return why it needs a start."""
        return "shares weights but has no start_from: a mean-field posterior"

    @classmethod
    def stand_in(cls, network: nn.Module, options: Mapping[str, Any], seed: int, name: str) -> Posterior:
        """Return a codebook's stand-in; see `peerbayes.codebook.blank_shared`.

        Args:
            network: any module.
            options: of the recipe.
            seed: with ``name``, where its draws live.
            name: the peer's.
        """
        from peerbayes.codebook.peer import blank_shared

        return blank_shared(network, options, seed, name)

    @classmethod
    def made_from(
        cls, posterior: Posterior, network: nn.Module, options: Mapping[str, Any], split: Split, seed: int, name: str
    ) -> Posterior:
        """Make it of a trained posterior with scales; see `peerbayes.codebook.shared_of`.

        Args:
            posterior: trained, with a scale for every weight.
            network: of the same architecture.
            options: of the recipe.
            split: training inputs, on which gradients count.
            seed: of the clustering; with ``name``, where its draws live.
            name: the peer's.
        """
        from peerbayes.codebook.peer import shared_of

        return shared_of(posterior, network, options, split, seed, name)

    def _hold(self, mean: Tensor, rest: Tensor) -> None:
        # The codebook holds the weights; there are no means besides.
        del mean
        self.rest = nn.Parameter(rest)

    def _take(self, book: Codebook) -> None:
        """Take a codebook's tensors, also as the prior's anchor; in the order of a file, with shares in 15ths.

        Here, not where a file is written: noise goes by the order, so a file that is read back has the same draws.
        """
        check_codebook(book, self.layout.size)
        book = in_file_order(book, self.layout.sizes)
        device = self.rest.device
        for name in TRAINED:
            tensor = inverse_softplus(book.outlier_std) if name == "outlier_rho" else getattr(book, name)
            setattr(self, name, nn.Parameter(tensor.detach().to(device, torch.float32).clone()))
        for name, dtype in PLACES.items():
            self.register_buffer(name, getattr(book, name).to(device, dtype))
        for name, source in ANCHORS.items():
            self.register_buffer(name, getattr(self, source).detach().clone())
        self._derive()

    @torch.no_grad()
    def _derive(self) -> None:
        """Derive each weight's row, how often each row counts, and its prior."""
        rows, components = rows_of(self), len(self.component)
        first = components + len(self.blended)  # row of an outlier
        self._set_derived("_rows", rows.int())
        count = torch.bincount(rows, minlength=first + len(self.outlier)).to(torch.float32)
        if self.sampling.startswith("cluster"):  # one latent number for all weights of a component
            single = torch.ones_like(count[first:])
            count = torch.cat([self.used.to(count.dtype), torch.zeros_like(count[components:first]), single])
        self._set_derived("_count", count)
        # A standard normal number below it is as likely as the first of a blended weight's components.
        self._set_derived("_bound", torch.special.ndtri(self.blend_weight[:, 0]))
        anchors = {source: getattr(self, name) for name, source in ANCHORS.items()}
        wide = torch.full_like(self.anchor_outlier, self.prior_std)
        mean, std = moments(replace(self.codebook(), outlier_std=wide, **anchors), "moment", self.mixture)
        if self.prior == "normal":
            mean, std = torch.zeros_like(mean), torch.full_like(std, self.prior_std)
        self._set_derived("_prior_mean", mean)
        self._set_derived("_prior_std", std)

    def _set_derived(self, name: str, tensor: Tensor) -> None:
        """Store a tensor derived from the codebook, in place if it fits: a captured step reads that memory."""
        buffer = getattr(self, name, None)
        if buffer is not None and buffer.shape == tensor.shape and buffer.device == tensor.device:
            buffer.copy_(tensor)
        else:
            self.register_buffer(name, tensor, persistent=False)

    @property
    def used(self) -> Tensor:
        """Which components have any weight, a mask (K,)."""
        labelled = torch.bincount(self._rows, minlength=len(self.component))[: len(self.component)] > 0
        return labelled.index_fill(0, self.blend_component.flatten().long(), True)

    @torch.no_grad()
    def join(self, into: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Merge components into others, with new ``parts``; every tensor stays where it is.

        Args:
            into: the component, (K,), that each one's weights have from now on.
            parts: what the components are now, and what the prior is anchored at: tensors by name.
        """
        for name, tensor in parts.items():
            getattr(self, name).copy_(tensor)
        self.label.copy_(into[self.label.long()])
        self.blend_component.copy_(into[self.blend_component.long()])
        self._derive()

    def _tidy(self) -> None:
        """Drop components that no weight uses any more, and blends of a component with itself."""
        pair, used = self.blend_component.long(), self.used
        mixed = pair[:, 0] != pair[:, 1]
        if bool(used.all()) and bool(mixed.all()):
            return
        others = torch.cat([self.outlier, self.blended[mixed]])
        label = self.label.long().index_copy(0, self.blended[~mixed], pair[~mixed, 0])
        number = used.cumsum(0) - 1
        names = ("component", "cholesky", "anchor_component", "anchor_cholesky")
        book = {name: getattr(self, name)[used] for name in names}
        book |= {name: getattr(self, name)[mixed] for name in ("blended", "blend_weight")}
        book |= {"label": number[label].index_fill(0, others, 0).int(), "blend_component": number[pair[mixed]].int()}
        self.load_state(self.state() | {f"codebook/{name}": tensor.detach() for name, tensor in book.items()})

    # ---- moments ----------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        """Mean of every weight, shape (size,)."""
        return of_rows(moments(self, self.sampling, self.mixture)[:1], self._rows)[0]

    @property
    def std(self) -> Tensor:
        """Standard deviation of every weight as it is drawn, shape (size,).

        √(s² + a² + b² + c²); |s| with ``mean`` sampling, |a| with ``cluster``. A blended weight has that of its own
        parameters; √(Σ α² v) where components are drawn as a whole, √(Σ α v + α₁α₂(m₁ − m₂)²) as a mixture.
        """
        return of_rows(moments(self, self.sampling, self.mixture)[1:], self._rows)[0]

    @property
    def outlier_std(self) -> Tensor:
        """Standard deviation of every outlier, shape (O,)."""
        return F.softplus(self.outlier_rho)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.rest.device

    @property
    def rhos(self) -> set[str]:
        """The outliers' ρ."""
        return {"outlier_rho"}

    @property
    def scales(self) -> set[str]:
        """The Cholesky factors, and the outliers' ρ; a component's own scale goes with its mean."""
        return {"cholesky", "outlier_rho"}

    @property
    def decayed(self) -> set[str]:
        """What is not shared: a component's mean and scale are one row, and its weights have been trained."""
        return {"rest"}

    # ---- draws ----------------------------------------------------------------------------------------------------

    @property
    def noise_size(self) -> int:
        """Two numbers a weight (hierarchical) or one; of whole components three or one each, and one an outlier.

        Of a mixture another one for each blended weight, which comes last.
        """
        choices = len(self.blended) if self.mixture else 0
        if self.sampling.startswith("cluster"):
            return len(self.component) * (3 if self.sampling == "cluster_hier" else 1) + len(self.outlier) + choices
        return self.layout.size * (2 if self.sampling == "hierarchical" else 1) + choices

    def draw(self, address: Address) -> Weights:
        """Return the set of weights that lives at an address."""
        if torch.is_grad_enabled() or self.mixture or self.sampling.startswith("cluster"):
            return self.weights(*self.place(normal(address, self.noise_size, self.device)))
        return self.weights(drawn_at(start(address, self.device), drawn_from(self, self.sampling), self._rows))

    def place(self, noise: Tensor | None, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the flat weights (size,) that noise (noise_size,) makes, and their standard deviations.

        Args:
            noise: standard normal numbers; None gives the centre.
            rows: of every weight, where they do not come from the posterior itself.
        """
        rows = self._rows if rows is None else rows
        if noise is None:
            mean, std = of_rows(moments(self, self.sampling, self.mixture), rows)
            return mean, std
        share = None
        if self.mixture:
            noise, choice = noise.split([len(noise) - len(self.blended), len(self.blended)])
            share = (choice < self._bound).to(noise.dtype)
        if self.sampling.startswith("cluster"):
            return of_rows([drawn_whole(self, self.sampling, noise, share)], rows)[0], None
        return drawn_with(noise.split(self.layout.size), drawn_from(self, self.sampling, share), rows), None

    # ---- KL -------------------------------------------------------------------------------------------------------

    def kl_per_weight(self, weights: Weights | None = None) -> Tensor:  # noqa: ARG002
        """Return KL(N(m, v) ‖ prior) by weight, shape (size,), v = s² + a² + b² + c² whatever the sampling is.

        v is the variance of the weights of a component; blended weights have that of their parameters or mixture.
        """
        return of_rows([self._kl_by_row()], self._rows)[0]

    def kl(self, reduction: Reduction = "sum", weights: Weights | None = None) -> Tensor:
        """Return Σ_k n_k KL_k + Σ_outliers KL_i in nats, a scalar.

        If components are drawn as a whole, each counts once, and blended weights do not. ``layer_mean`` is
        Σ_l mean_{i∈l} KL_i, where every weight counts.

        Args:
            reduction: ``sum`` or ``layer_mean``.
            weights: not used.
        """
        if reduction != "sum":
            return super().kl(reduction, weights)
        return torch.dot(self._kl_by_row(), self._count)

    def _kl_by_row(self) -> Tensor:
        return gaussian_kl(*moments(self, "moment", self.mixture), self._prior_mean, self._prior_std)

    # ---- files ----------------------------------------------------------------------------------------------------

    def codebook(self) -> Codebook:
        """Return the codebook as it is now."""
        return Codebook(**{field.name: getattr(self, field.name) for field in fields(Codebook)})

    def end_epoch(
        self, moments: Mapping[str, Mapping[str, Tensor]], gradient: Callable[[str], Tensor | None]
    ) -> dict[str, Any]:
        """Merge components that have come near each other, if asked to.

        Args:
            moments: what the optimiser remembers, by parameter and by name.
            gradient: mean gradient of a parameter, by its name.

        Returns:
            A log of the merging; empty without it.
        """
        if self.merging is None:
            return {}
        slots = [slot for name in ("component", "cholesky") for slot in moments.get(name, {}).values() if slot.dim()]
        return {"merging": self.merging(self, slots, gradient("component"))}

    def counts(self) -> dict[str, int]:
        """Return the numbers of outliers, blended weights and components."""
        return {
            "outliers": len(self.outlier),
            "blended": len(self.blended),
            "components": len(self.component),
        }

    def options(self) -> dict[str, Any]:
        """Return the options that `load` needs; the codebook is in the file."""
        names = ("sampling", "mixture", "prior", "prior_std", "bits")
        options = {name: getattr(self, name) for name in names}
        return options if self._usual else options | {"weights": list(self.layout.shapes)}

    @classmethod
    def _chosen_in(cls, tensors: Mapping[str, Tensor]) -> dict[str, Any]:  # noqa: ARG003
        return {}  # a choice other than the usual one is among the options

    def save(self, path: str | Path, anchors: bool = True) -> None:
        """Write the small file, atomically.

        Components that no weight has are left out. Where numbers are rounded, the posterior itself becomes what is in
        the file, to the last bit.

        Args:
            path: of the file.
            anchors: whether to keep what the prior is anchored at; a file without is smaller and only predicts.
        """
        # A file of a codebook that fails this could not be read.
        check_codebook(self.codebook(), self.layout.size, str(path), ascending=True)
        self._tidy()
        tensors, more = packed(self, anchors)
        if self.bits < EXACT:
            anchors_now = {f"codebook/{name}": getattr(self, name) for name in ANCHORS}
            self.load_state(unpacked(tensors, more, self) | anchors_now)
        storage.write(
            Path(path), tensors, self.description() | more, first=sum(name.startswith(FIRST) for name in tensors)
        )

    @classmethod
    def load_means(cls, path: str | Path, network: nn.Module) -> nn.Module:
        """Return the network of the mean weights, in evaluation mode, of a file whose scales may not have arrived yet.

        Args:
            path: what `save` wrote, or its beginning, as far as its means: all but a hundredth, say.
            network: of the same architecture.
        """
        return cls._of(path, network, *storage.read_first(Path(path)), means_alone=True).materialise()

    def unpacked(
        self, tensors: Mapping[str, Tensor], about: Mapping[str, Any], origin: str, **how: bool
    ) -> Mapping[str, Tensor]:
        """Return what `load_state` takes, from a file's tensors and description.

        Args:
            tensors: of the file.
            about: its description.
            origin: its path, for errors.
            how: ``means_alone``, see `peerbayes.codebook.file.unpacked`.
        """
        try:
            return unpacked(tensors, about, self, **how)
        except InputError as error:
            raise InputError(f"{origin}: {error}") from None

    def flat_tensors(self) -> dict[str, Tensor]:
        """Return nothing: no tensor is laid out like the weights, but for the labels."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return every tensor by its place: ``codebook/component``, ``rest/bn.bias``, ``network/...``."""
        parts = {f"codebook/{name}": tensor for name, tensor in self._book().items()}
        return parts | super().state()

    def _book(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in (*TRAINED, *PLACES, *ANCHORS)}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], origin: str = "state") -> None:
        """Copy what `state` returned into this posterior, whose codebook may have had another size.

        Args:
            tensors: by name.
            origin: where they come from, for errors.
        """
        before = self._book()
        for name, tensor in before.items():
            given = tensors.get(f"codebook/{name}")
            if given is not None and given.shape != tensor.shape and given.dim() == tensor.dim():
                self._put(name, torch.zeros_like(given, device=self.device, dtype=tensor.dtype))
        try:
            require_same(tensors, self.state(), origin)
            book = {name: tensors[f"codebook/{name}"] for name in before if name not in ANCHORS}
            rho = book.pop("outlier_rho")
            check_codebook(Codebook(**book, outlier_std=F.softplus(rho)), self.layout.size, origin, ascending=True)
        except InputError:
            for name, tensor in before.items():
                self._put(name, tensor)
            raise
        super().load_state(tensors, origin)

    def _put(self, name: str, tensor: Tensor) -> None:
        trained = isinstance(getattr(self, name), nn.Parameter) and not isinstance(tensor, nn.Parameter)
        setattr(self, name, nn.Parameter(tensor) if trained else tensor)
