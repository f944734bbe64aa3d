"""Measure selective prediction: accuracy against the share of images that are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.metrics._checks import check_vector, sorted_with_shared_ties


def retention_curve(
    uncertainty: Tensor, correct: Tensor, fractions: Sequence[float] = (0.2, 0.4, 0.6, 0.8)
) -> tuple[float, ...]:
    """Return, for each fraction q, the accuracy of the ``round(q N)`` images of lowest uncertainty.

    At least one image is kept. Where q cuts through a tie, the result is the expected accuracy under random
    tie-breaking, whatever the order of the images.

    Args:
        uncertainty: ``(N,)``; disagreement or entropy, for instance.
        correct: ``(N,)``, true or 1 where the prediction is right.
        fractions: shares to keep, each in (0, 1].

    Example:
        >>> import torch
        >>> from peerbayes.metrics import retention_curve
        >>> uncertainty, correct = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1, 1, 0, 0])
        >>> retention_curve(uncertainty, correct, fractions=[0.5, 1.0])
        (1.0, 0.5)
    """
    right = _right_by_uncertainty(uncertainty, correct)
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise InputError(f"fractions: got {fraction}; expected values above 0 and at most 1")
    kept = [max(1, round(fraction * len(right))) for fraction in fractions]
    return tuple(float(right[:count].mean()) for count in kept)


def aurc(uncertainty: Tensor, correct: Tensor) -> float:
    """Return the area under the risk-coverage curve, ``1/N Σ_k (errors among the k most certain) / k``.

    Lower is better. Ties are treated as in :func:`retention_curve`.

    Args:
        uncertainty: ``(N,)``.
        correct: ``(N,)``, true or 1 where the prediction is right.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import aurc
        >>> aurc(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1, 1, 1, 0]))
        0.0625
    """
    wrong = 1 - _right_by_uncertainty(uncertainty, correct)
    return float((wrong.cumsum(0) / torch.arange(1, len(wrong) + 1)).mean())


def _right_by_uncertainty(uncertainty: Tensor, correct: Tensor) -> Tensor:
    keys, right = check_vector(uncertainty, "uncertainty"), check_vector(correct, "correct")
    if keys.shape != right.shape:
        raise InputError(f"correct: got {len(right)} values; expected {len(keys)}, as many as uncertainty")
    if not bool(((right == 0) | (right == 1)).all()):
        raise InputError("correct: holds a value that is neither 0 nor 1; expected booleans")
    return sorted_with_shared_ties(keys.cpu(), right.cpu())[1]
