"""Merge components between epochs of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from peerbayes.codebook.build import cholesky_of
from peerbayes.codebook.merging import merge
from peerbayes.codebook.moments import summed
from peerbayes.codebook.shared import Shared
from peerbayes.math.gaussians import Components


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
