"""Weights that share a codebook: a few Gaussians over (mean, scale), and outliers on their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.divergences import gaussian_kl
from peerbayes.errors import InputError
from peerbayes.noise import Address, normal, normal_pieces, pieces, start
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior, Predicate, Reduction, Source, Weights, require_same
from peerbayes.posteriors.codebook import Codebook, blank_codebook, check_codebook, in_file_order
from peerbayes.posteriors.grids import inverse_softplus
from peerbayes.posteriors.kernels import draw_shared
from peerbayes.posteriors.shared_file import EXACT, packed, unpacked

Sampling = Literal["hierarchical", "moment", "mean", "cluster", "cluster_hier"]
SAMPLINGS: tuple[Sampling, ...] = ("hierarchical", "moment", "mean", "cluster", "cluster_hier")
BITS = (*range(4, 17), EXACT)  # of an outlier's mean in a file
TINY = 1e-30


def conv_and_linear_weights(name: str, module: nn.Module) -> bool:
    """The default choice of shared parameters: weights, not biases, of convolutions and linear layers."""
    return isinstance(module, nn.modules.conv._ConvNd | nn.Linear) and name.rpartition(".")[2] == "weight"


class Shared(Posterior):
    """Inliers w_i have the distribution of their component k, outliers one of their own, N(μ_i, σ_i²).

    A component is a Gaussian over (mean, scale) with mean (m, s) and covariance L Lᵀ, L = [[a, 0], [b, c]]. By
    ``sampling`` a draw is:

    ``hierarchical``  μ̃ = m + a ε₁, σ̃ = s + b ε₁ + c ε₂, w = μ̃ + σ̃ ε₃, for every weight anew; given ε₃ this is
                      Gaussian, so two numbers make it: w = m + s ε₃ + √((a + b ε₃)² + c² ε₃²) ε
    ``moment``        w = m + √v ε with v = s² + a² + b² + c², which has the same mean and variance
    ``mean``          w = m + s ε
    ``cluster``       w = m + a ε, one for all weights of a component
    ``cluster_hier``  as hierarchical, one for all weights of a component

    A blended weight has the parameters Σ_j α_j (m, s, a, b, c)_j of two components; where components are drawn as a
    whole, it is Σ_j α_j w_j. As a ``mixture`` it belongs to one of the two in each draw, with probability α_j. Means,
    factors and outliers are trained; which weight belongs to what is not.

    Args:
        network: any module.
        codebook: what `peerbayes.sharing` makes; None for a stand-in that a file is read into.
        sampling: how weights are drawn.
        mixture: whether blended weights are mixtures.
        prior: ``"anchored"``: for components and blended weights N(m, v) as they were at first, for outliers
            N(μ_i, prior_std²) as they were at first; ``"normal"``: N(0, prior_std²).
        prior_std: see ``prior``.
        bits: of an outlier's mean in a file. With 32 every number is stored exactly. With 4 to 16 all are rounded:
            components' means to 16 bits, scales to 8, and what is not shared to float16.
        weights: names of the parameters that are shared; by default those that ``bayesian`` chooses.
        bayesian: chooses parameters by (name, owning module).
        start_from: a trained network to take all other tensors from.
        seed: with ``name``, where its draws in predictions live.
        name: a name of its own makes peers of one seed differ.
    """

    kind: ClassVar[str] = "shared"
    stochastic: ClassVar[bool] = True

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
        prior_std: float = 0.1,
        bits: int = EXACT,
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
        if bits not in BITS:
            raise InputError(f"bits is {bits!r}, expected {BITS[0]} to {BITS[-2]}, or {EXACT}")
        if not self.layout.size:
            raise InputError(f"no parameter of {type(network).__name__} was chosen to be shared")
        self.seed, self.name = seed, name
        self.account: dict[str, Any] = {}  # of how the codebook was made, where it was made here
        self.merging: dict[str, Any] | None = None  # how components merge at the end of every epoch, where they do
        self.sampling, self.mixture = sampling, mixture
        self.prior, self.prior_std, self.bits = prior, float(prior_std), bits
        self._usual = weights is None and bayesian is conv_and_linear_weights
        self._take(codebook if codebook is not None else blank_codebook(self.layout.size, self.rest.device))

    def _hold(self, mean: Tensor, rest: Tensor) -> None:
        # The weights are those of the codebook; there are no means beside them.
        del mean
        self.rest = nn.Parameter(rest)

    def _take(self, book: Codebook) -> None:
        """Take a codebook's tensors, also as the prior's anchor; in the order of a file, with shares in 15ths.

        Here, not where a file is written: noise goes by the order, so a file that is read back has the same draws.
        """
        check_codebook(book, self.layout.size)
        book = in_file_order(book, self.layout.sizes)
        device = self.rest.device
        floats = {"component": book.component, "cholesky": book.cholesky, "outlier_mean": book.outlier_mean}
        floats["outlier_rho"] = inverse_softplus(book.outlier_std)
        for name, tensor in floats.items():
            setattr(self, name, nn.Parameter(tensor.detach().to(device, torch.float32).clone()))
        self.register_buffer("label", book.label.to(device, torch.int32))
        for name in ("blended", "outlier"):
            self.register_buffer(name, getattr(book, name).to(device, torch.int64))
        self.register_buffer("blend_component", book.blend_component.to(device, torch.int32))
        self.register_buffer("blend_weight", book.blend_weight.to(device, torch.float32))
        for name, source in ANCHORS.items():
            self.register_buffer(name, getattr(self, source).detach().clone())
        self._index()

    @torch.no_grad()
    def _index(self) -> None:
        """Work out which row of `_table` each weight has, how often each row counts, and its prior."""
        components, blended = len(self.component), len(self.blended)
        rows = self.label.long()
        device = rows.device
        rows = rows.index_copy(0, self.blended, components + torch.arange(blended, device=device))
        first = components + blended
        rows = rows.index_copy(0, self.outlier, first + torch.arange(len(self.outlier), device=device))
        self._work_out("_rows", rows.int())
        count = torch.bincount(rows, minlength=first + len(self.outlier)).to(torch.float32)
        if self.sampling.startswith("cluster"):  # one latent number for all weights of a component
            single = torch.ones_like(count[first:])
            count = torch.cat([self.used.to(count.dtype), torch.zeros_like(count[components:first]), single])
        self._work_out("_count", count)
        # A standard normal number below it is as likely as the first of a blended weight's components.
        self._work_out("_bound", torch.special.ndtri(self.blend_weight[:, 0]))
        own = [*self.anchor_component.unbind(1), *self.anchor_cholesky.unbind(1)]
        mean = torch.cat([own[0], *self._mixed(own[:1]), self.anchor_outlier])
        std = torch.cat([self._variance(own).sqrt(), torch.full_like(self.anchor_outlier, self.prior_std)])
        if self.prior == "normal":
            mean, std = torch.zeros_like(mean), torch.full_like(std, self.prior_std)
        self._work_out("_prior_mean", mean)
        self._work_out("_prior_std", std)

    def _work_out(self, name: str, tensor: Tensor) -> None:
        """Keep what follows from the codebook; where it was, if it fits there: a captured step looks there."""
        own = getattr(self, name, None)
        if own is not None and own.shape == tensor.shape and own.device == tensor.device:
            own.copy_(tensor)
        else:
            self.register_buffer(name, tensor, persistent=False)

    @property
    def used(self) -> Tensor:
        """Which components any weight has, a mask (K,)."""
        found = torch.bincount(self._rows, minlength=len(self.component))[: len(self.component)] > 0
        return found.index_fill(0, self.blend_component.flatten().long(), True)

    @torch.no_grad()
    def join(self, into: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Let components have gone into others, and take new ``parts``; every tensor stays where it is.

        Args:
            into: the component, (K,), that each one's weights have from now on.
            parts: what the components are now, and what the prior is anchored at: tensors by name.
        """
        for name, tensor in parts.items():
            getattr(self, name).copy_(tensor)
        self.label.copy_(into[self.label.long()])
        self.blend_component.copy_(into[self.blend_component.long()])
        self._index()

    def _tidy(self) -> None:
        """Leave out components that no weight has any more, and blend no component with itself."""
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

    # ---- a row for each component, blended weight and outlier -----------------------------------------------------

    def _own(self) -> list[Tensor]:
        """Return m, s, a, b, c of the components, (K,) each."""
        return [*self.component.unbind(1), *self.cholesky.unbind(1)]

    def _table(self, share: Tensor | None = None) -> list[Tensor]:
        """Return m, s, a, b, c of every row, (R,) each, of blended weights with this ``share`` of the first."""
        own = self._own()
        zero = torch.zeros_like(self.outlier_mean)
        single = [self.outlier_mean, F.softplus(self.outlier_rho), zero, zero, zero]
        return [torch.cat(parts) for parts in zip(own, self._mixed(own, share), single, strict=True)]

    def _pairs(self, own: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Return numbers of components (K,) for both components of blended weights, (E,) each."""
        return zip(*(_of_rows(own, index) for index in self.blend_component.unbind(1)), strict=True)

    def _mixed(self, own: Sequence[Tensor], share: Tensor | None = None) -> list[Tensor]:
        """Return what blended weights mix of components' parameters (K,), shape (E,) each."""
        share = self.blend_weight[:, 0] if share is None else share
        return [torch.lerp(other, one, share) for one, other in self._pairs(own)]

    def _variance(self, own: Sequence[Tensor], sampling: Sampling = "moment") -> Tensor:
        """Return the variance of a weight of every component and of every blended weight, (K + E,), by sampling.

        Args:
            own: m, s, a, b, c of the components, (K,) each.
            sampling: ``moment`` is s² + a² + b² + c², with parameters that are blended.
        """
        m, s, a, b, c = own
        scales = {"mean": [s], "cluster": [a]}.get(sampling, [s, a, b, c])
        variance, share = _sum_of_squares(scales), self.blend_weight[:, 0]
        if self.mixture:
            (mean, other_mean), (one, other) = self._pairs([m, variance])
            blended = torch.lerp(other, one, share) + share * (1 - share) * (mean - other_mean).square()
        elif sampling.startswith("cluster"):
            ((one, other),) = self._pairs([variance])
            alone = self.blend_component[:, 0] == self.blend_component[:, 1]  # whose two draws are the same
            blended = torch.where(alone, one, share.square() * one + (1 - share).square() * other)
        else:
            blended = _sum_of_squares(self._mixed(scales))
        return torch.cat([variance, blended])

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        """Mean of every weight, shape (size,)."""
        return _of_rows(self._table()[:1], self._rows)[0]

    @property
    def std(self) -> Tensor:
        """Standard deviation of every weight as it is drawn, shape (size,).

        √(s² + a² + b² + c²); |s| with ``mean`` sampling, |a| with ``cluster``. A blended weight has that of its own
        parameters; √(Σ α² v) where components are drawn as a whole, √(Σ α v + α₁α₂(m₁ − m₂)²) as a mixture.
        """
        std = self._variance(self._own(), self.sampling).sqrt()
        return _of_rows([torch.cat([std, F.softplus(self.outlier_rho)])], self._rows)[0]

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.rest.device

    @property
    def scales(self) -> set[str]:
        """The Cholesky factors, and the outliers' ρ; a component's own scale goes with its mean."""
        return {"cholesky", "outlier_rho"}

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
        begin = start(address, self.device)
        columns = self._needed()
        flat = draw_shared(columns, self._rows, begin, TINY)
        return self.weights(flat if flat is not None else self._filled(columns, self._noise(begin)))

    def place(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the flat weights (size,) that noise (noise_size,) makes, and their standard deviations."""
        if noise is None:
            return self.mean, self.std
        share = None
        if self.mixture:
            noise, choice = noise.split([len(noise) - len(self.blended), len(self.blended)])
            share = (choice < self._bound).to(noise.dtype)
        if self.sampling.startswith("cluster"):
            return _of_rows([self._whole(noise, share)], self._rows)[0], None
        eps = noise.split(self.layout.size)
        if torch.is_grad_enabled():
            return _drawn(_of_rows(self._needed(share), self._rows), eps), None
        ranges = pieces(self.layout.size, self.device)
        noise_by_piece = ((first, last, [one[first:last] for one in eps]) for first, last in ranges)
        return self._filled(self._needed(share), noise_by_piece), None

    def _needed(self, share: Tensor | None = None) -> list[Tensor]:
        """Return what `_drawn` needs of every row, (R,) each: m and the scale, or m, s, a, b, c."""
        mean, *scales = self._table(share)
        if self.sampling == "hierarchical":
            return [mean, *scales]
        return [mean, _sum_of_squares(scales[:1] if self.sampling == "mean" else scales).sqrt()]

    def _noise(self, begin: Tensor) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
        """Yield the numbers of weights ``first`` to ``last`` that `normal` gives, in pieces that are overwritten."""
        size, half = self.layout.size, (self.noise_size + 1) // 2
        for first, last, one, other in normal_pieces(begin, self.noise_size):
            if half == size:  # two numbers a weight
                yield first, last, (one, other)
                continue
            yield first, last, (one,)
            end = min(half + last, size)
            yield half + first, end, (other[: end - half - first],)

    def _filled(self, columns: Sequence[Tensor], noise: Iterable[tuple[int, int, Sequence[Tensor]]]) -> Tensor:
        """Return the flat weights (size,), without a gradient, of what is `_needed` and of noise in pieces."""
        flat, scales = columns[0].new_empty(self.layout.size), columns[0].new_empty(0, 0)
        for first, last, eps in noise:
            if scales.shape[1] < last - first:
                scales = flat.new_empty(len(columns) - 1, last - first)
            places = [flat[first:last], *scales[:, : last - first]]
            for column, place in zip(columns, places, strict=True):
                torch.index_select(column, 0, self._rows[first:last], out=place)
            _drawn(places, eps)
        return flat

    def _whole(self, noise: Tensor, share: Tensor | None) -> Tensor:
        """Return one draw of every row, (R,), where components are drawn as a whole."""
        single = noise[len(noise) - len(self.outlier) :]
        rest = noise[: len(noise) - len(self.outlier)]
        m, s, a, b, c = self._own()
        if self.sampling == "cluster":
            drawn = m + a * rest
        else:
            first, second, third = rest.view(3, -1)
            drawn = m + a * first + (s + b * first + c * second) * third
        outlier = self.outlier_mean + F.softplus(self.outlier_rho) * single
        return torch.cat([drawn, *self._mixed([drawn], share), outlier])

    # ---- KL -------------------------------------------------------------------------------------------------------

    def kl_per_weight(self, weights: Weights | None = None) -> Tensor:  # noqa: ARG002
        """Return KL(N(m, v) ‖ prior) by weight, shape (size,), v = s² + a² + b² + c² whatever the sampling is.

        v is the variance of the weights of a component; blended weights have that of their parameters or mixture.
        """
        return _of_rows([self._kl_by_row()], self._rows)[0]

    def kl(self, reduction: Reduction = "sum", weights: Weights | None = None) -> Tensor:
        """Return Σ_k n_k KL_k + Σ_outliers KL_i; of whole components each counts once, and blended weights do not.

        ``layer_mean`` is Σ_l mean_{i∈l} KL_i, where every weight counts.
        """
        if reduction != "sum":
            return super().kl(reduction, weights)
        return torch.dot(self._kl_by_row(), self._count)

    def _kl_by_row(self) -> Tensor:
        own = self._own()
        mean = torch.cat([own[0], *self._mixed(own[:1]), self.outlier_mean])
        std = torch.cat([self._variance(own).sqrt(), F.softplus(self.outlier_rho)])
        return gaussian_kl(mean, std, self._prior_mean, self._prior_std)

    # ---- files ----------------------------------------------------------------------------------------------------

    def codebook(self) -> Codebook:
        """Return the codebook as it is now."""
        return Codebook(
            self.component,
            self.cholesky,
            self.label,
            self.blended,
            self.blend_component,
            self.blend_weight,
            self.outlier,
            self.outlier_mean,
            F.softplus(self.outlier_rho),
        )

    def options(self) -> dict[str, Any]:
        """Return the options that `load` needs; the codebook is in the file."""
        names = ("sampling", "mixture", "prior", "prior_std", "bits")
        found = {name: getattr(self, name) for name in names}
        return found if self._usual else found | {"weights": list(self.layout.shapes)}

    @classmethod
    def _chosen_in(cls, tensors: Mapping[str, Tensor]) -> dict[str, Any]:  # noqa: ARG003
        return {}  # a choice that is not the usual one is among the options

    def save(self, path: str | Path, anchors: bool = True) -> None:
        """Write the small file, atomically; without ``anchors`` it is smaller still, for predictions alone.

        Components that no weight has are left out. Where numbers are rounded, the posterior itself becomes what is in
        the file, to the last bit.
        """
        self._tidy()
        tensors, more = packed(self, anchors)
        if self.bits < EXACT:
            own = {f"codebook/{name}": getattr(self, name) for name in ANCHORS}
            self.load_state(unpacked(tensors, more, self) | own)
        about = {"kind": self.kind, "options": self.options(), "seed": self.seed, "name": self.name}
        storage.write(Path(path), tensors, about | more, in_order=True)

    def unpacked(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any], origin: str) -> Mapping[str, Tensor]:
        """Return what `load_state` takes, of a file's tensors and description."""
        try:
            return unpacked(tensors, about, self)
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
        names = ("component", "cholesky", "outlier_mean", "outlier_rho", *PLACES, *ANCHORS)
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], origin: str = "state") -> None:
        """Copy what `state` returned into this posterior, whose codebook may have had another size."""
        before = self._book()
        for name, own in before.items():
            given = tensors.get(f"codebook/{name}")
            if given is not None and given.shape != own.shape and given.dim() == own.dim():
                self._put(name, torch.zeros_like(given, device=self.device, dtype=own.dtype))
        try:
            require_same(tensors, self.state(), origin)
            book = {name: tensors[f"codebook/{name}"] for name in before if name not in ANCHORS}
            rho = book.pop("outlier_rho")
            check_codebook(Codebook(**book, outlier_std=F.softplus(rho)), self.layout.size, origin, ascending=True)
        except InputError:
            for name, own in before.items():
                self._put(name, own)
            raise
        super().load_state(tensors, origin)
        self._index()

    def _put(self, name: str, tensor: Tensor) -> None:
        trained = isinstance(getattr(self, name), nn.Parameter) and not isinstance(tensor, nn.Parameter)
        setattr(self, name, nn.Parameter(tensor) if trained else tensor)


def _of_rows(columns: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Return (n,) from each column (R,); one by one is far faster than rows of five."""
    if not (torch.is_grad_enabled() and rows.is_cuda):
        return [column.index_select(0, rows) for column in columns]
    # Whose gradient adds up in a fixed order, on a GPU too.
    return [column.contiguous() for column in F.embedding(rows, torch.stack(list(columns), 1)).unbind(1)]


def _sum_of_squares(columns: Sequence[Tensor]) -> Tensor:
    first, *others = columns
    total = first.square()
    for column in others:
        total = torch.addcmul(total, column, column)
    return total


def _drawn(columns: Sequence[Tensor], eps: Sequence[Tensor]) -> Tensor:
    """Return weights (n,) in the place of the first column: w as it is, mean and scale, or m, s, a, b and c."""
    drawn, *scales = columns
    if scales:
        drawn.addcmul_(scales[0], eps[0])
    if len(scales) > 1:
        _, a, b, c = scales
        a.addcmul_(b, eps[0])
        c.mul_(eps[0])
        variance = a.square().addcmul_(c, c).add_(TINY)  # a root has no gradient at 0
        drawn.addcmul_(variance.sqrt_(), eps[1])
    return drawn


ANCHORS = {"anchor_component": "component", "anchor_cholesky": "cholesky", "anchor_outlier": "outlier_mean"}
PLACES = ("label", "blended", "blend_component", "blend_weight", "outlier")
