"""Make a codebook from a mean-field posterior: outliers, components, merging, blending."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from peerbayes.codebook.book import SHARES, Codebook
from peerbayes.codebook.clustering import em, kmeans, most_probable, thrifty
from peerbayes.codebook.merging import RIDGE, components_of, merge, summed
from peerbayes.codebook.neighbours import nearest
from peerbayes.codebook.outliers import blends, outliers
from peerbayes.codebook.shared import usually_shared
from peerbayes.data.splits import Split, order
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components
from peerbayes.math.noise import Address
from peerbayes.networks.inputs import to_unit
from peerbayes.networks.running import evaluating
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.flat_network import Layout
from peerbayes.schema import NotNegativeInt, PositiveFloat

# Default number of components: inliers for each, fewest, most, and the least inliers for each. More components hardly
# fit the weights better, but leave many with a few members, which become outliers, and each of those takes more bytes
# than several weights that share.
MEMBERS, FEWEST, MOST, LEAST = 1000, 256, 6000, 50
BATCH = 1 << 16  # points of a step of expectation-maximisation


@dataclass(frozen=True)
class Sharing:
    """Options of how a codebook is made.

    Attributes:
        components: before merging; 0 is one for 1000 inliers, from 256 (if that leaves 50 each) to 6000.
        threshold: weights with larger means are outliers.
        top: share of weights that are outliers by their large gradients.
        smallest: members of components with fewer are outliers.
        outliers: whether to choose any.
        blend: whether weights far from their component mix two.
        em_steps: passes of expectation-maximisation over the components.
        thrift: rate penalty: the cost of a bit of the index, as a squared distance in variances of a typical layer (the
            geometric mean over inliers). It also determines the number of components; 0 is no penalty. See
            `peerbayes.codebook.clustering.thrifty`.
        merge: options of `peerbayes.codebook.merging.merge`.

    Example:
        >>> from peerbayes.codebook import Sharing
        >>> Sharing(components=64, blend=False).threshold
        0.2
    """

    components: NotNegativeInt = 0
    threshold: PositiveFloat = 0.2
    top: Annotated[float, Field(ge=0, lt=1)] = 0.01
    smallest: NotNegativeInt = 20
    outliers: bool = True
    blend: bool = True
    em_steps: NotNegativeInt = 0
    thrift: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    merge: dict[str, Any] = field(default_factory=dict)


def shared_weights(posterior: Posterior) -> tuple[Layout, Tensor, Tensor]:
    """Return the layout of the weights to be shared, and their means and scales, flat (n,) each.

    Example:
        >>> import torch
        >>> from peerbayes import MeanField
        >>> from peerbayes.codebook import shared_weights
        >>> layout, mean, std = shared_weights(MeanField(torch.nn.Linear(8, 4)))
        >>> list(layout.shapes), mean.shape, std.shape
        (['weight'], torch.Size([32]), torch.Size([32]))
    """
    names = usually_shared(posterior.network, posterior.layout.shapes)
    if not names:
        raise InputError("the posterior has no weights of convolutions or linear layers to share")
    layout = Layout({name: posterior.layout.shapes[name] for name in names})
    views = [posterior.layout.views(flat.detach()) for flat in (posterior.mean, posterior.std)]
    mean, std = (layout.flatten({name: view[name] for name in names}) for view in views)
    return layout, mean, std


def share(
    posterior: Posterior, options: Sharing, gradient: Tensor | None, seed: int = 0
) -> tuple[Codebook, dict[str, Any]]:
    """Make a codebook of a mean-field posterior's weights.

    Args:
        posterior: trained, on any device; it is not changed.
        options: see `ShareOptions`.
        gradient: mean |∂ loss / ∂ μ_i| by shared weight (n,), from `gradient_statistic`; None if it is not needed.
        seed: of the clustering.

    Returns:
        The codebook, and an account of how it was made.

    Example:
        >>> import torch
        >>> from peerbayes import MeanField
        >>> from peerbayes.codebook import Sharing, share
        >>> posterior = MeanField(torch.nn.Linear(32, 32))
        >>> options = Sharing(components=8, outliers=False, merge={"distance": 0})
        >>> book, account = share(posterior, options, gradient=None)
        >>> account["weights"], account["components"]
        (1024, 8)
    """
    clock, seconds = time.perf_counter(), dict[str, float]()

    def lap(name: str) -> None:
        nonlocal clock
        if mean.device.type == "cuda":
            torch.cuda.synchronize(mean.device)
        seconds[name], clock = round(time.perf_counter() - clock, 3), time.perf_counter()

    layout, mean, std = shared_weights(posterior)
    if not bool((std > 0).all()):
        raise InputError("scales of the posterior have collapsed to 0, expected positive numbers; train it again")
    none = torch.zeros(layout.size, dtype=torch.bool, device=mean.device)
    alone = (
        outliers(mean, gradient=gradient, threshold=options.threshold, top=options.top) if options.outliers else none
    )
    by_rule = int(alone.sum())
    lap("outliers")

    inside = (~alone).nonzero()[:, 0]
    points = torch.stack([mean[inside], std[inside]], 1).double()  # of inliers: a copy of millions counts
    left = len(inside)
    if not left:
        raise InputError("all weights are outliers by their means or gradients; raise threshold or lower top")
    count = options.components or _components_for(left)
    if count > left:
        raise InputError(f"components is {count}, but there are only {left} weights that are no outliers")
    if options.outliers and options.smallest > left:
        raise InputError(f"smallest is {options.smallest}, but there are only {left} weights that are no outliers")
    if options.thrift:
        sizes = torch.tensor(layout.sizes, device=mean.device)
        part = torch.arange(len(sizes), device=mean.device).repeat_interleave(sizes)[inside]
        centres, labels = thrifty(points, part, options.thrift * _typical_variance(points, part))
        count = len(centres)
    else:
        centres = kmeans(points, count, Address(seed, "sharing", "kmeans"))
        labels = nearest(points, centres)[:, 0]
    components = components_of(points, labels, count)
    lap("clustering")
    if options.em_steps:
        components = em(points, components, options.em_steps, BATCH, Address(seed, "sharing", "em"))
        labels = most_probable(points, components)
        # Count weights from now on, not mixture shares: they differ where components overlap.
        components = replace(components, count=torch.bincount(labels, minlength=count).double())
        lap("em")

    small = components.count < (max(1, options.smallest) if options.outliers else 1)
    few = small[labels]
    alone[inside[few]] = True
    inside, points, labels = inside[~few], points[~few], labels[~few]
    components, labels = _kept(components, ~small, labels)
    if not len(components.mean):
        fewer = "raise thrift" if options.thrift else f"ask for fewer than {count}"
        raise InputError(f"every component has fewer than {options.smallest} weights; {fewer}, or lower smallest")
    log: dict[str, Any] = {}
    if options.merge.get("distance", 1) > 0 and len(components.mean) > 1:
        spread = components.covariance[:, 0, 0]
        # An upper bound of the size of a centre's gradient.
        slope = None if gradient is None else summed(gradient[inside], labels, len(components.mean))
        components, mapping, log = merge(components, gradient=slope, spread=spread, **options.merge)
        labels = mapping[labels]
    lap("merging")

    blended = torch.empty(0, dtype=torch.int64, device=mean.device)
    pair, weight = blended.view(0, 2), torch.empty(0, 2, device=mean.device)
    if options.blend and len(components.mean) > 1:
        blended, pair, weight = blends(points, labels, components)
        whole = (weight[:, 0] * SHARES).round() == SHARES  # of a single component once shares are rounded
        labels[blended[whole]] = pair[whole, 0]
        blended, pair, weight = inside[blended[~whole]], pair[~whole], weight[~whole]
    lap("blending")
    every = torch.zeros(layout.size, dtype=torch.int64, device=mean.device)
    every[inside] = labels
    single = alone.nonzero()[:, 0]
    book = Codebook(
        components.mean.float(),
        cholesky_of(components.covariance).float(),
        every,
        blended,
        pair,
        weight.float(),
        single,
        mean[single],
        std[single],
    )
    account = {
        "weights": layout.size,
        "components": len(components.mean),
        "components_at_first": count,
        "outliers": len(single),
        "outliers_by_rule": by_rule,
        "outliers_of_small_components": len(single) - by_rule,
        "blended": len(blended),
        "merging": log,
        "seconds": seconds,
    }
    return book, account


def _components_for(inliers: int) -> int:
    return max(1, min(MOST, max(inliers // MEMBERS, FEWEST), inliers // LEAST))


def _typical_variance(points: Tensor, part: Tensor) -> float:
    """Return the geometric mean over points of the variance in their part.

    The error that a network tolerates depends on how its weights differ within a layer, since batch-norm removes their
    common size. The variance of all weights is dominated by the largest: a head with weights of 0.3 would leave a few
    components to convolutions with weights of 0.01.
    """
    components = components_of(points, part, int(part.max()) + 1)
    variance = components.covariance.diagonal(dim1=1, dim2=2).sum(1) - 2 * RIDGE
    wide = variance > 0
    if not bool(wide.any()):  # each part is a single point
        return float(points.var(0, correction=0).sum()) or 1.0
    return float((components.count[wide] @ variance[wide].log() / components.count[wide].sum()).exp())


def _kept(components: Components, keep: Tensor, labels: Tensor) -> tuple[Components, Tensor]:
    numbers = keep.long().cumsum(0) - 1
    kept = Components(components.mean[keep], components.covariance[keep], components.count[keep])
    return kept, numbers[labels]


def cholesky_of(covariance: Tensor) -> Tensor:
    """Return a, b, c of the factors [[a, 0], [b, c]], (K, 3), of covariances (K, 2, 2)."""
    a = covariance[:, 0, 0].clamp_min(0).sqrt()
    b = torch.where(a > 0, covariance[:, 0, 1] / torch.where(a > 0, a, 1.0), 0.0)
    c = (covariance[:, 1, 1] - b.square()).clamp_min(0).sqrt()
    return torch.stack([a, b, c], 1)


def gradient_statistic(posterior: Posterior, split: Split, *, seed: int = 0, batch_size: int = 256) -> Tensor:
    """Return the mean over an epoch's batches of |∂ CE / ∂ μ_i|, one draw a batch, for the weights to share, (n,).

    Batch-norm runs with its running statistics; the posterior does not change.

    Args:
        posterior: a posterior with scales.
        split: training inputs and labels.
        seed: of the order of the inputs.
        batch_size: inputs at a time.

    Example:
        >>> import torch
        >>> from peerbayes import MeanField
        >>> from peerbayes.codebook import gradient_statistic
        >>> from peerbayes.data import ArraySplit
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
        >>> split = ArraySplit(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 4)
        >>> gradient_statistic(MeanField(network), split).shape
        torch.Size([64])
    """
    layout, _, _ = shared_weights(posterior)
    total = torch.zeros(posterior.layout.size, device=posterior.device)
    address = Address(seed, posterior.name, "gradient statistic")
    parts = order(len(split), address.sub("order")).split(batch_size)  # in class order the gradients would add up
    with evaluating(posterior):
        for number, index in enumerate(parts):
            images, labels = split.batch(index, posterior.device)
            loss = F.cross_entropy(posterior(to_unit(images), posterior.draw(address.at(number))), labels)
            (gradient,) = torch.autograd.grad(loss, posterior.mean)
            total += gradient.abs()
    views = posterior.layout.views(total / len(parts))
    return layout.flatten({name: views[name] for name in layout.shapes})
