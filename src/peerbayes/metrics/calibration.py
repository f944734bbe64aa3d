"""Measure calibration: reliability diagrams, calibration errors and temperature scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import scipy  # its submodules are imported on first use
import torch
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.metrics.scores import (
    check_labels,
    check_log_probabilities,
    check_probabilities,
    sorted_with_shared_ties,
)

SAME_TEMPERATURE = 1e-3  # relative difference of temperatures that are the same, but for rounding
TEMPERATURE_WIDTH = 0.5  # of the prior on log τ in runs; negligible for a thousand rows


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram: accuracy and confidence by bin of confidence, on the CPU.

    Args:
        count: images in the bin, ``(L,)``, int64.
        accuracy: share of them that are right, ``(L,)``, float64; NaN where the bin is empty.
        confidence: mean of their ``max_c p_c``, ``(L,)``, float64; NaN where the bin is empty.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import reliability
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
        >>> diagram = reliability(probabilities, torch.tensor([0, 1, 1]), bins=2)
        >>> diagram.count, round(diagram.error, 4)
        (tensor([0, 3]), 0.0667)
    """

    count: Tensor
    accuracy: Tensor
    confidence: Tensor

    @property
    def error(self) -> float:
        """The calibration error ``Σ_l |B_l| / N · |accuracy_l − confidence_l|``."""
        gap = (self.accuracy - self.confidence).abs()
        return float((self.count * gap).nansum() / self.count.sum())


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Sort images by confidence ``max_c p_c`` into L bins of equal width, ``((l − 1) / L, l / L]``.

    Confidence 0 belongs to the first bin and 1 to the last. The edges are ``l / L`` rounded to the type of
    the probabilities, so that 0.2 closes the first of five bins in float32 as well, although the float32
    number nearest to 0.2 is a little larger.

    Args:
        probabilities: ``(N, C)``.
        labels: ``(N,)``, integers.
        bins: the number L of bins.

    Returns:
        Count, accuracy and mean confidence of each bin.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import reliability
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
        >>> reliability(probabilities, torch.tensor([0, 1, 1]), bins=4).accuracy
        tensor([   nan,    nan, 0.5000, 1.0000], dtype=torch.float64)
    """
    confidence, correct = _confidence(probabilities, labels)
    index = _equal_width_bin(confidence, check_bins(bins), probabilities.dtype)
    return _per_bin(confidence, correct, index, bins)


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error ``Σ_l |B_l| / N · |accuracy_l − confidence_l|`` as a fraction.

    The bins have equal width; see :func:`reliability`.

    Args:
        probabilities: ``(N, C)``.
        labels: ``(N,)``, integers.
        bins: the number L of bins.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import ece
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
        >>> round(ece(probabilities, torch.tensor([0, 1, 1])), 4)
        0.3333
    """
    return reliability(probabilities, labels, bins).error


def adaptive_ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the calibration error over L bins of equal mass: the image of rank r is in bin ``⌊r L / N⌋``.

    Ranks start at 0 and go by ascending confidence. Images of equal confidence share their mean correctness,
    so that the order of the images is irrelevant even where an edge cuts through a tie.

    Args:
        probabilities: ``(N, C)``.
        labels: ``(N,)``, integers.
        bins: the number L of bins.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import adaptive_ece
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]])
        >>> round(adaptive_ece(probabilities, torch.tensor([0, 1, 1, 0]), bins=2), 4)
        0.15
    """
    confidence, correct = sorted_with_shared_ties(*_confidence(probabilities, labels))
    count = len(confidence)
    index = torch.arange(count) * check_bins(bins) // count
    return _per_bin(confidence, correct, index, bins).error


@dataclass(frozen=True, eq=False)
class ClassConfidence:
    """Confidence of predictions by true class, on the CPU; NaN for a class without images.

    Args:
        count: images, ``(C,)``, int64.
        accuracy: share of them that are right, ``(C,)``, float64.
        mean: of their ``max_c p_c``, ``(C,)``, float64.
        quantiles: of their ``max_c p_c``, one column a level, ``(C, Q)``, float64.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import confidence_by_class
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
        >>> confidence_by_class(probabilities, torch.tensor([0, 1, 1]), levels=[0.5]).mean
        tensor([0.9000, 0.6500], dtype=torch.float64)
    """

    count: Tensor
    accuracy: Tensor
    mean: Tensor
    quantiles: Tensor


def confidence_by_class(probabilities: Tensor, labels: Tensor, levels: Sequence[float]) -> ClassConfidence:
    """Return accuracy, and mean and quantiles of the confidence ``max_c p_c``, by true class.

    Args:
        probabilities: ``(N, C)``.
        labels: ``(N,)``, integers.
        levels: of the quantiles, between 0 and 1, interpolated between images.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import confidence_by_class
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
        >>> confidence_by_class(probabilities, torch.tensor([0, 1, 1]), levels=[0.5]).accuracy
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    confidence, correct = _confidence(probabilities, labels)
    classes, labels = probabilities.shape[1], labels.cpu().long()
    by_class = _per_bin(confidence, correct, labels, classes)
    quantiles = torch.full((classes, len(levels)), math.nan, dtype=torch.float64)
    for number in labels.unique().tolist():
        quantiles[number] = _quantiles(confidence[labels == number], levels)
    return ClassConfidence(by_class.count, by_class.accuracy, by_class.confidence, quantiles)


def confidence_overall(probabilities: Tensor, levels: Sequence[float]) -> tuple[float, Tensor]:
    """Return mean and quantiles ``(Q,)`` of the confidence ``max_c p_c`` over all images.

    Args:
        probabilities: ``(N, C)``.
        levels: of the quantiles, between 0 and 1; between two images they are interpolated.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import confidence_overall
        >>> mean, quantiles = confidence_overall(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), levels=[0.0, 1.0])
        >>> mean, quantiles
        (0.625, tensor([0.5000, 0.7500], dtype=torch.float64))
    """
    confidence = check_probabilities(probabilities).amax(-1).cpu()
    return float(confidence.mean()), _quantiles(confidence, levels)


def _quantiles(values: Tensor, levels: Sequence[float]) -> Tensor:
    return torch.quantile(values, torch.tensor(levels, dtype=values.dtype))


def fit_temperature(
    log_probabilities: Tensor,
    labels: Tensor,
    *,
    bounds: tuple[float, float] = (0.01, 100.0),
    width: float = math.inf,
) -> float:
    """Return the temperature τ that minimises the mean NLL of ``softmax(log p / τ)``.

    The NLL is convex in ``1 / τ``, so a bracketed search on ``log τ`` for the root of its slope is safe.
    Where the NLL falls all the way to an end of the bounds, that end is returned: the lower one where every
    label is the maximum of its row. Where no τ changes the NLL (uniform rows), the result is 1.

    Args:
        log_probabilities: ``(N, C)``, of a validation set: the log of the averaged probabilities of several
            draws, or the logits of a single network.
        labels: ``(N,)``, integers.
        bounds: the lowest and highest τ.
        width: of a normal prior on log τ around 0. For a few hundred rows, nearly all of them right, the lowest τ
            minimises the NLL, and the next wrong row would cost more than these have gained.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import fit_temperature
        >>> log_p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]).log()
        >>> round(fit_temperature(log_p, torch.tensor([0, 0, 0, 1])), 2)  # 90 % sure, 75 % right
        2.0
    """
    lowest, highest = bounds
    if not 0 < lowest < highest < math.inf:
        raise InputError(f"bounds: got {bounds}; expected 0 < lowest < highest")
    log_p = check_log_probabilities(log_probabilities, normalised=False)
    labels = check_labels(labels, log_p)
    lead = log_p - log_p.gather(1, labels[:, None])
    if bool(lead.isnan().any()) or bool(lead.isposinf().any()):
        raise InputError("log_probabilities: a label has −inf; expected a finite value, or no temperature helps")
    finite_lead = lead.masked_fill(lead.isneginf(), 0.0)

    def slope(log_temperature: float) -> float:
        # d NLL / d(1/τ) = mean_n E_τ[log p_c − log p_y], which falls as τ rises.
        weight = (lead * math.exp(-log_temperature)).softmax(-1)
        pull = log_temperature * math.exp(log_temperature) / (len(labels) * width**2)
        return float((weight * finite_lead).sum(-1).mean()) - pull

    cold, hot = slope(math.log(lowest)), slope(math.log(highest))
    if cold == hot == 0:
        return 1.0
    if cold <= 0:
        return lowest
    if hot >= 0:
        return highest
    return math.exp(scipy.optimize.brentq(slope, math.log(lowest), math.log(highest), xtol=1e-10))


def temper(log_probabilities: Tensor, temperature: float) -> Tensor:
    """Return ``log softmax(log p / τ)`` over the last dimension, in the shape and type of the input.

    Args:
        log_probabilities: ``(..., C)``; logits give the same result.
        temperature: τ > 0.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import temper
        >>> temper(torch.tensor([[0.9, 0.1]]).log(), temperature=2.0).exp()
        tensor([[0.7500, 0.2500]])
    """
    if not 0 < temperature < math.inf:
        raise InputError(f"temperature: got {temperature}; expected a positive number")
    return (log_probabilities / temperature).log_softmax(-1)


def _confidence(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    values = check_probabilities(probabilities)
    labels = check_labels(labels, values)
    confidence, predicted = values.max(-1)
    # Two numbers an image: binning them on the CPU is cheap and gives the same sums for every device.
    return confidence.cpu(), (predicted == labels).double().cpu()


def check_bins(bins: int) -> int:
    """Return the number of bins, which must be positive."""
    if bins < 1:
        raise InputError(f"bins: got {bins}; expected 1 or more")
    return bins


def _equal_width_bin(confidence: Tensor, bins: int, dtype: torch.dtype) -> Tensor:
    # Inner edges only: the outer bins take everything beyond them, including 0 and 1.
    edges = torch.tensor([l / bins for l in range(1, bins)], dtype=torch.float64)
    return torch.bucketize(confidence, edges.to(dtype).double())


def _per_bin(confidence: Tensor, correct: Tensor, index: Tensor, bins: int) -> Reliability:
    count = torch.bincount(index, minlength=bins)
    return Reliability(
        count=count,
        accuracy=torch.bincount(index, weights=correct, minlength=bins) / count,
        confidence=torch.bincount(index, weights=confidence, minlength=bins) / count,
    )
