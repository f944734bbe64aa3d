"""Measure out-of-distribution (OOD) detection by a score; OOD is the positive class.

A higher score means more out of distribution. No threshold separates equal scores, and they count accordingly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.metrics.scores import check_vector


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Return the area under the ROC curve, ``P(s_out > s_in) + ½ P(s_out = s_in)`` over all pairs.

    Args:
        scores_in: ``(N,)``, of images in distribution.
        scores_out: ``(K,)``, of images out of distribution.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import auroc
        >>> auroc(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
        0.8333333333333334
    """
    inside, outside = _sorted(scores_in, scores_out)
    below = torch.searchsorted(inside, outside, right=False)
    not_above = torch.searchsorted(inside, outside, right=True)
    return int((below + not_above).sum()) / (2 * len(inside) * len(outside))


def aupr(scores_in: Tensor, scores_out: Tensor) -> float:
    """Return the average precision ``Σ_t (recall_t − recall_{t−1}) precision_t`` over distinct thresholds t.

    This equals the mean, over the OOD images, of the precision of "score at least as high as this one". There is no
    interpolation, which would overestimate it.

    Args:
        scores_in: ``(N,)``, of images in distribution.
        scores_out: ``(K,)``, of images out of distribution.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import aupr
        >>> round(aupr(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9])), 4)
        0.8333
    """
    inside, outside = _sorted(scores_in, scores_out)
    false = len(inside) - torch.searchsorted(inside, outside)
    true = len(outside) - torch.searchsorted(outside, outside)
    return float((true.double() / (true + false)).mean())


def fpr_at_tpr(scores_in: Tensor, scores_out: Tensor, tpr: float = 0.85) -> float:
    """Return the lowest false-positive rate of a threshold whose true-positive rate is at least ``tpr``.

    Args:
        scores_in: ``(N,)``, of images in distribution.
        scores_out: ``(K,)``, of images out of distribution.
        tpr: the share of OOD images to detect, in (0, 1].

    Example:
        >>> import torch
        >>> from peerbayes.metrics import fpr_at_tpr
        >>> fpr_at_tpr(torch.tensor([0.1, 0.2, 0.4, 0.6]), torch.tensor([0.5, 0.9]), tpr=1.0)
        0.25
    """
    if not 0 < tpr <= 1:
        raise InputError(f"tpr: got {tpr}; expected a value above 0 and at most 1")
    inside, outside = _sorted(scores_in, scores_out)
    # Rates are compared, not ⌈tpr · K⌉ computed: 0.55 · 100 is a little above 55 in floats.
    rates = torch.arange(1, len(outside) + 1, dtype=torch.float64) / len(outside)
    needed = int((rates < tpr).sum()) + 1
    threshold = outside[len(outside) - needed]
    return float((inside >= threshold).double().mean())


def _sorted(scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    inside, outside = check_vector(scores_in, "scores_in"), check_vector(scores_out, "scores_out")
    return inside.sort().values, outside.to(inside.device).sort().values
