"""Make codebooks of peers, from a trained posterior and a recipe's options, and merge components between epochs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from pydantic import create_model
from torch import Tensor, nn

from peerbayes.codebook.build import Sharing, cholesky_of, gradient_statistic, share
from peerbayes.codebook.merging import merge, summed
from peerbayes.codebook.outliers import steepest
from peerbayes.codebook.shared import Shared, usually_shared
from peerbayes.data.splits import Split
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.math.gaussians import Components
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.flat_network import Provenance
from peerbayes.schema import Strict, fields_of

DRAWN = ("sampling", "mixture", "prior", "prior_std", "bits")  # options of `Shared`, not of how the codebook is made


@functools.cache
def _merge_options() -> type[Strict]:
    fields: dict[str, Any] = fields_of(merge)
    kept = {name: field for name, field in fields.items() if name not in ("components", "gradient", "spread")}
    made = create_model("Merge", __base__=Strict, **kept)
    made.__doc__ = "Which components become one; see `peerbayes.codebook.merging.merge`. Of distance 0 none do."
    return made


def making_fields() -> dict[str, tuple[Any, Any]]:
    """Return type and default of a recipe's options of how a codebook is made."""
    table = _merge_options()
    return fields_of(Sharing) | {"merge": (table, table()), "merge_every_epoch": (bool, False)}


def blank_shared(network: nn.Module, options: Mapping[str, Any], seed: int, name: str) -> Shared:
    """Return a placeholder for a codebook; check that it can have so many, and so large, components.

    The weights with the largest gradients will be outliers; there may be more by their means.

    Args:
        network: to share the weights of.
        options: of the recipe's posterior.
        seed: with ``name``, the address of its draws.
        name: the peer's.

    Example:
        >>> import torch
        >>> from peerbayes.codebook import blank_shared
        >>> options = {"sampling": "moment", "mixture": False, "prior": "anchored", "prior_std": 0.1, "bits": 10}
        >>> options |= {"components": 8, "outliers": True, "top": 0.01, "smallest": 20}
        >>> blank_shared(torch.nn.Linear(32, 32), options, seed=0, name="student").counts()
        {'outliers': 0, 'blended': 0, 'components': 1}
    """
    blank = Shared(network, seed=seed, name=name, **_drawn(options))
    single = steepest(options["top"], blank.layout.size) if options["outliers"] else 0
    inside = blank.layout.size - single
    reason = f"there are only {inside} weights to share" + f", besides {single} outliers by their gradients" * (
        single > 0
    )
    if options["components"] > inside:
        raise InputError(f"peer '{name}': posterior.components is {options['components']}, but {reason}")
    if options["outliers"] and options["smallest"] > inside:
        raise InputError(f"peer '{name}': posterior.smallest is {options['smallest']}, but {reason}")
    return blank


def shared_of(
    posterior: Posterior, network: nn.Module, options: Mapping[str, Any], split: Split, seed: int, name: str
) -> Shared:
    """Make shared weights from a trained posterior, on its device.

    Args:
        posterior: trained, with a scale for every weight; it is not changed.
        network: of the same architecture.
        options: of the recipe's posterior.
        split: training inputs, for gradients.
        seed: of the clustering; with ``name``, the address of its draws.
        name: the peer's.

    Example:
        >>> import dataclasses
        >>> import torch
        >>> from peerbayes import MeanField
        >>> from peerbayes.codebook import Sharing, shared_of
        >>> from peerbayes.data import ArraySplit
        >>> options = dataclasses.asdict(Sharing(components=4, outliers=False, merge={"distance": 0}))
        >>> options |= {"sampling": "moment", "mixture": False, "prior": "anchored", "prior_std": 0.1, "bits": 10}
        >>> options["merge_every_epoch"] = False
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> split = ArraySplit(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> shared_of(MeanField(network), network, options, split, seed=0, name="small").counts()["components"]
        4
    """
    if not posterior.shareable:
        raise InputError(f"expected a mean_field posterior, whose weights have scales, got a {posterior.kind} one")
    merging = options["merge"]
    needed = merging["distance"] > 0 or (options["outliers"] and options["top"] > 0)
    gradient = gradient_statistic(posterior, split, seed=seed) if needed else None
    table = {field.name: options[field.name] for field in fields(Sharing)}
    book, account = share(posterior, Sharing(**table), gradient, seed)
    # Deterministic parameters have no scale, and are not shared.
    names = usually_shared(posterior.network, posterior.layout.shapes)
    shared = Shared(network, book, start_from=posterior, weights=names, seed=seed, name=name, **_drawn(options))
    shared = shared.to(posterior.device)
    _warn_if_barely_shared(shared, name)
    shared.account = account
    shared.provenance = Provenance(posterior.digest(), posterior.provenance.depth)
    shared.merging = functools.partial(merge_trained, **merging) if options["merge_every_epoch"] else None
    return shared


def _drawn(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in DRAWN}


def _warn_if_barely_shared(shared: Shared, name: str) -> None:
    """Warn if most of the network is not shared, so that a file hardly becomes smaller."""
    unshared = shared.rest_layout.shapes
    total = shared.layout.size + shared.rest_layout.size
    if 2 * shared.layout.size < total:
        largest = max(unshared, key=lambda tensor: unshared[tensor].numel())
        warnings.warn(
            f"peer '{name}': {shared.layout.size:,} of {total:,} weights share a codebook; the others, "
            f"mostly '{largest}', have no scales and are not shared",
            PeerbayesWarning,
            stacklevel=2,
        )


@torch.no_grad()
def merge_trained(
    posterior: Shared, moments: Iterable[Tensor] = (), gradient: Tensor | None = None, **options: Any
) -> dict[str, Any]:
    """Merge components of shared weights that training has moved together, in place.

    No tensor changes its shape or storage, so optimisers, checkpoints and a captured step continue. A merged component
    stays, without weights, until the posterior is saved. The points of the clustering are not stored, so weights keep
    their component, or the two that they blend. A component counts its weights, blended ones by their shares.

    The prior of a merged component is anchored at the Gaussian with the moments of its members' anchors.

    Args:
        posterior: in training.
        moments: the optimiser's state of the components, (K, ...) each. The gradient of a merged component is the sum
            of its members', and so is its state.
        gradient: mean gradient of the loss by (mean, scale) of the components, (K, 2); None opens its gate.
        options: of `merge`.

    Returns:
        The log of `merge`.

    Example:
        >>> import torch
        >>> from peerbayes import MeanField, Shared
        >>> from peerbayes.codebook import Sharing, merge_trained, share
        >>> network = torch.nn.Linear(32, 32)
        >>> options = Sharing(components=8, outliers=False, merge={"distance": 0})
        >>> posterior = Shared(network, share(MeanField(network), options, gradient=None)[0])
        >>> log = merge_trained(posterior, distance=1.0, spread_gate=1.0)
        >>> log["before"], log["after"]
        (8, 1)
    """
    size, used = len(posterior.component), posterior.used
    single = torch.cat([posterior.blended, posterior.outlier])
    share = torch.ones(len(posterior.label), dtype=torch.float64, device=used.device).index_fill(0, single, 0)
    whose = torch.cat([posterior.label, posterior.blend_component.flatten()]).long()
    count = summed(torch.cat([share, posterior.blend_weight.flatten()]), whose, size)
    now = _components(posterior.component, posterior.cholesky, count).select(used)
    slope = None if gradient is None else gradient.norm(dim=1)[used]
    left, mapping, log = merge(now, gradient=slope, **options)
    if not log["merged"]:
        return log
    # Each component moves to the first of its group, where the merged one will be.
    indices = used.nonzero()[:, 0]
    first = torch.full((len(left),), size, device=used.device).scatter_reduce_(0, mapping, indices, "amin")
    into = torch.arange(size, device=used.device).index_copy(0, indices, first[mapping])
    new = torch.bincount(mapping) > 1
    target, merged = first[new], left.select(new)
    anchor = _pooled(_components(posterior.anchor_component, posterior.anchor_cholesky, count), into).select(target)
    parts = {
        "component": merged.mean,
        "cholesky": cholesky_of(merged.covariance),
        "anchor_component": anchor.mean,
        "anchor_cholesky": cholesky_of(anchor.covariance),
    }
    old = {name: getattr(posterior, name) for name in parts}
    posterior.join(into, {name: old[name].index_copy(0, target, part.to(old[name])) for name, part in parts.items()})
    for moment in moments:
        moment.copy_(summed(moment, into, size))
    return log


def _components(mean: Tensor, cholesky: Tensor, count: Tensor) -> Components:
    a, b, c = cholesky.double().unbind(1)
    rows = [torch.stack([a.square(), a * b], 1), torch.stack([a * b, b.square() + c.square()], 1)]
    return Components(mean.double(), torch.stack(rows, 1), count)


def _pooled(components: Components, into: Tensor) -> Components:
    """Return the moments of the components that merge into each one as one Gaussian, (K,); empty where none do."""
    size, count = len(components), components.count.clamp_min(1e-9)
    whole = summed(count, into, size)
    share = count / whole[into]
    mean = summed(share[:, None] * components.mean, into, size)
    offset = components.mean - mean[into]
    spread = components.covariance + offset[:, :, None] * offset[:, None, :]
    return Components(mean, summed(share[:, None, None] * spread, into, size), whole)
