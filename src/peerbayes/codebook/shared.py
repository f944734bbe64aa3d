"""A posterior whose weights share a codebook: a few Gaussians over (mean, scale), and individual outliers."""

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
    """Check the bits of an outlier's mean, and return them."""
    if not isinstance(bits, int) or bits not in BITS:
        raise InputError(f"bits is {bits!r}, expected {BITS[0]} to {BITS[-2]}, or {EXACT}")
    return bits


Bits = Annotated[int, AfterValidator(check_bits)]


def usually_shared(network: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of parameters that `conv_and_linear_weights` chooses.

    Args:
        network: with these parameters.
        names: candidates.
    """
    modules = dict(network.named_modules())
    return [name for name in names if conv_and_linear_weights(name, modules[name.rpartition(".")[0]])]


class Shared(Posterior):
    """Posterior of weights that share a codebook: inliers follow their component, outliers N(μ_i, σ_i²).

    A component is a Gaussian over (mean, scale) with mean (m, s) and covariance L Lᵀ, L = [[a, 0], [b, c]]. By
    ``sampling`` a draw is:

    - ``hierarchical``: μ̃ = m + a ε₁, σ̃ = s + b ε₁ + c ε₂, w = μ̃ + σ̃ ε₃, for every weight anew; given ε₃ this is
      Gaussian, so two numbers make it: w = m + s ε₃ + √((a + b ε₃)² + c² ε₃²) ε
    - ``moment``: w = m + √v ε with v = s² + a² + b² + c², which has the same mean and variance
    - ``mean``: w = m + s ε
    - ``cluster``: w = m + a ε, one for all weights of a component
    - ``cluster_hier``: as hierarchical, one for all weights of a component

    A blended weight has the parameters Σ_j α_j (m, s, a, b, c)_j of two components, or is Σ_j α_j w_j if components are
    drawn as a whole. As a ``mixture`` it belongs to one of the two in each draw, with probability α_j. Means, factors
    and outliers are trained; the assignment of weights is not.

    Args:
        network: any module.
        codebook: from `peerbayes.codebook`; None for a placeholder that a file is read into.
        sampling: one of the list above.
        mixture: whether blended weights are mixtures.
        prior: ``"anchored"``: with the initial values, N(m, v) for components and blended weights and
            N(μ_i, prior_std²) for outliers; ``"normal"``: N(0, prior_std²).
        prior_std: see ``prior``.
        bits: of an outlier's mean in a file. With 4 to 16 all numbers are rounded: components' means to 16 bits, scales
            to 8, and what is not shared to float16. With 32 every number is stored exactly.
        weights: names of the shared parameters; by default those that ``bayesian`` chooses.
        bayesian: chooses parameters by (name, owning module).
        start_from: a trained network with all other tensors.
        seed: with ``name``, the address of its draws in predictions.
        name: of the peer; peers of one seed differ by it.

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
        """Return type and default of each option in a recipe: of the codebook, and of draws.

        See `peerbayes.codebook.build.share` and `peerbayes.Shared`.

        Args:
            merge: options of merging.
            merge_every_epoch: whether to merge after every epoch of training, too.
        """
        from peerbayes.codebook.peer import making_fields

        drawn = super().option_fields()
        return making_fields() | {name: drawn[name] for name in drawn if name not in ("codebook", "weights")}

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check that options do not contradict each other."""
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
        """Return a placeholder of a codebook; see `peerbayes.codebook.blank_shared`.

        Args:
            network: any module.
            options: of the recipe.
            seed: with ``name``, the address of its draws.
            name: the peer's.
        """
        from peerbayes.codebook.peer import blank_shared

        return blank_shared(network, options, seed, name)

    @classmethod
    def made_from(
        cls, posterior: Posterior, network: nn.Module, options: Mapping[str, Any], split: Split, seed: int, name: str
    ) -> Posterior:
        """Make shared weights from a trained posterior with scales; see `peerbayes.codebook.shared_of`.

        Args:
            posterior: trained, with a scale for every weight.
            network: of the same architecture.
            options: of the recipe.
            split: training inputs, for gradients.
            seed: of the clustering; with ``name``, the address of its draws.
            name: the peer's.
        """
        from peerbayes.codebook.peer import shared_of

        return shared_of(posterior, network, options, split, seed, name)

    def _hold(self, mean: Tensor, rest: Tensor) -> None:
        # The codebook holds the weights; there are no other means.
        del mean
        self.rest = nn.Parameter(rest)

    def _take(self, book: Codebook) -> None:
        """Set a codebook's tensors, also as the prior's anchor, in the order of a file and with shares in 15ths.

        Noise follows the order, so ordering here, not in `save`, gives a loaded file the same draws.
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
        """Components with any weight, a mask (K,)."""
        labelled = torch.bincount(self._rows, minlength=len(self.component))[: len(self.component)] > 0
        return labelled.index_fill(0, self.blend_component.flatten().long(), True)

    @torch.no_grad()
    def join(self, into: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Merge components into others, in place.

        Args:
            into: the new component of each one's weights, (K,).
            parts: the new components, and anchors of their prior: tensors by name.
        """
        for name, tensor in parts.items():
            getattr(self, name).copy_(tensor)
        self.label.copy_(into[self.label.long()])
        self.blend_component.copy_(into[self.blend_component.long()])
        self._derive()

    def _tidy(self) -> None:
        """Drop components without weights, and blends of a component with itself."""
        pair, used = self.blend_component.long(), self.used
        mixed = pair[:, 0] != pair[:, 1]
        if bool(used.all()) and bool(mixed.all()):
            return
        alone = torch.cat([self.outlier, self.blended[mixed]])
        label = self.label.long().index_copy(0, self.blended[~mixed], pair[~mixed, 0])
        number = used.cumsum(0) - 1
        names = ("component", "cholesky", "anchor_component", "anchor_cholesky")
        book = {name: getattr(self, name)[used] for name in names}
        book |= {name: getattr(self, name)[mixed] for name in ("blended", "blend_weight")}
        book |= {"label": number[label].index_fill(0, alone, 0).int(), "blend_component": number[pair[mixed]].int()}
        self.load_state(self.state() | {f"codebook/{name}": tensor.detach() for name, tensor in book.items()})

    # ---- moments ----------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        """Mean of every weight, shape (size,)."""
        return of_rows(moments(self, self.sampling, self.mixture)[:1], self._rows)[0]

    @property
    def std(self) -> Tensor:
        """Standard deviation of every drawn weight, shape (size,).

        √(s² + a² + b² + c²); |s| with ``mean`` sampling, |a| with ``cluster``. A blended weight has that of its blended
        parameters; √(Σ α² v) if components are drawn as a whole, √(Σ α v + α₁α₂(m₁ − m₂)²) as a mixture.
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
        """The Cholesky factors, and the outliers' ρ; a component's scale s belongs to its means."""
        return {"cholesky", "outlier_rho"}

    @property
    def decayed(self) -> set[str]:
        """Parameters with weight decay: those not shared, since components were trained already."""
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
        """Return the weights of an address."""
        if torch.is_grad_enabled() or self.mixture or self.sampling.startswith("cluster"):
            return self.weights(*self.place(normal(address, self.noise_size, self.device)))
        return self.weights(drawn_at(start(address, self.device), drawn_from(self, self.sampling), self._rows))

    def place(self, noise: Tensor | None, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the flat weights (size,) that noise (noise_size,) makes, and their standard deviations.

        Args:
            noise: standard normal numbers; None gives the means.
            rows: of every weight; by default the posterior's.
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
        """Return KL(N(m, v) ‖ prior) by weight, shape (size,), with v = s² + a² + b² + c² for every sampling.

        v is the variance of a component's weights; blended weights have that of their parameters or mixture.
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
        """Return the present codebook."""
        return Codebook(**{field.name: getattr(self, field.name) for field in fields(Codebook)})

    def end_epoch(
        self, moments: Mapping[str, Mapping[str, Tensor]], gradient: Callable[[str], Tensor | None]
    ) -> dict[str, Any]:
        """Merge components that training has moved together, if ``merge_every_epoch`` is set.

        Args:
            moments: the optimiser's state, by parameter and by name.
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
        """Return the options for `load`; the codebook is in the file."""
        names = ("sampling", "mixture", "prior", "prior_std", "bits")
        options = {name: getattr(self, name) for name in names}
        return options if self._usual else options | {"weights": list(self.layout.shapes)}

    @classmethod
    def _chosen_in(cls, tensors: Mapping[str, Tensor]) -> dict[str, Any]:  # noqa: ARG003
        return {}  # a choice other than the usual one is among the options

    def save(self, path: str | Path, anchors: bool = True) -> None:
        """Write the small file, atomically.

        Components without weights are dropped. If numbers are rounded, the posterior is changed to what is in the file,
        to the last bit.

        Args:
            path: of the file.
            anchors: whether to keep the anchors of the prior; a file without them is smaller and only predicts.
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
        """Return the network of mean weights, in evaluation mode, even of a file whose scales have not arrived yet.

        Args:
            path: a file of `save`, or its beginning up to the scales: all but a hundredth, say.
            network: of the same architecture.
        """
        return cls._of(path, network, *storage.read_first(Path(path)), means_alone=True).materialise()

    def unpacked(
        self, tensors: Mapping[str, Tensor], about: Mapping[str, Any], origin: str, **how: bool
    ) -> Mapping[str, Tensor]:
        """Return the state for `load_state` from a file's tensors and description.

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
        """Return every tensor by its path: ``codebook/component``, ``rest/bn.bias``, ``network/...``."""
        parts = {f"codebook/{name}": tensor for name, tensor in self._book().items()}
        return parts | super().state()

    def _book(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in (*TRAINED, *PLACES, *ANCHORS)}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], origin: str = "state") -> None:
        """Copy tensors of `state` into this posterior, whose codebook may have another size.

        Args:
            tensors: by name.
            origin: their source, for errors.
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
