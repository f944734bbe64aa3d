"""Check inputs of metrics, convert them to float64, and average over ties."""

from __future__ import annotations

import torch
from torch import Tensor

from peerbayes.errors import InputError

# Wide enough for probabilities that were computed in bfloat16, narrow enough to notice logits.
_SUM_TOLERANCE = 1e-2


def check_probabilities(probabilities: Tensor, name: str = "probabilities") -> Tensor:
    """Return ``(N, C)`` probabilities in float64.

    Args:
        probabilities: ``(N, C)``, rows that sum to 1.
        name: the argument's name, for the error.

    Raises:
        InputError: a row has NaN, a negative value or another sum.
    """
    _check_shape(probabilities, 2, name)
    values = probabilities.detach().double()
    total = values.sum(-1)
    wrong = ~((total - 1).abs() <= _SUM_TOLERANCE) | (values < 0).any(-1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(
            f"{name}: row {row} holds NaN, a negative value or a sum of {float(total[row]):.4g}; "
            "expected probabilities that sum to 1"
        )
    return values


def check_log_probabilities(log_probabilities: Tensor, dimensions: int = 2, *, normalised: bool = True) -> Tensor:
    """Return ``(..., N, C)`` log-probabilities in float64; −inf stands for probability 0.

    Args:
        log_probabilities: ``(N, C)`` or ``(M, N, C)``.
        dimensions: 2 or 3.
        normalised: whether rows must sum to 1; False lets logits pass.

    Raises:
        InputError: a row has NaN, +inf or nothing but −inf, or is not normalised.
    """
    _check_shape(log_probabilities, dimensions, "log_probabilities")
    values = log_probabilities.detach().double()
    total = values.logsumexp(-1)
    if not bool(total.isfinite().all()):
        raise InputError("log_probabilities: expected numbers without NaN or +inf and one above −inf in each row")
    worst = float(total.abs().max())
    if normalised and worst > _SUM_TOLERANCE:
        raise InputError(
            f"log_probabilities: a row has log Σ exp = {worst:.4g} in magnitude; "
            "expected 0 (take log_softmax of logits)"
        )
    return values


def check_labels(labels: Tensor, scores: Tensor) -> Tensor:
    """Return ``(N,)`` labels as int64, on the device of the scores.

    Args:
        labels: ``(N,)``, integers.
        scores: ``(N, C)``, which the labels belong to.

    Raises:
        InputError: they are not N integers from 0 to C − 1.
    """
    count, classes = scores.shape
    if labels.shape != (count,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"labels: got {labels.dtype} of shape {tuple(labels.shape)}; expected integers of shape ({count},)"
        )
    labels = labels.to(scores.device, torch.int64)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InputError(f"labels: got {low if low < 0 else high}; expected values from 0 to {classes - 1}")
    return labels


def check_vector(values: Tensor, name: str) -> Tensor:
    """Return ``(N,)`` numbers in float64.

    Args:
        values: ``(N,)``.
        name: the argument's name, for the error.

    Raises:
        InputError: it is no vector, is empty, or has NaN.
    """
    if values.ndim != 1 or values.numel() == 0:
        raise InputError(f"{name}: got shape {tuple(values.shape)}; expected a vector with at least one number")
    values = values.detach().double()
    if bool(values.isnan().any()):
        raise InputError(f"{name}: holds NaN; expected numbers")
    return values


def check_bins(bins: int) -> int:
    """Return the number of bins, which must be positive."""
    if bins < 1:
        raise InputError(f"bins: got {bins}; expected 1 or more")
    return bins


def sorted_with_shared_ties(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort ``values`` by ascending ``keys``; equal keys share the mean of their values.

    Sums over a prefix are then their expectation under random tie-breaking, whatever the order of the input.

    Args:
        keys: ``(N,)``.
        values: ``(N,)``.

    Returns:
        The sorted keys and their values, ``(N,)`` each.
    """
    keys, order = keys.sort(stable=True)
    starts = torch.ones_like(keys, dtype=torch.bool)
    starts[1:] = keys[1:] != keys[:-1]
    group = starts.cumsum(0) - 1
    mean = torch.bincount(group, weights=values[order]) / torch.bincount(group)
    return keys, mean[group]


def _check_shape(values: Tensor, dimensions: int, name: str) -> None:
    letters = "(N, C)" if dimensions == 2 else "(M, N, C)"
    if values.ndim != dimensions or values.numel() == 0 or not values.is_floating_point():
        raise InputError(
            f"{name}: got {values.dtype} of shape {tuple(values.shape)}; expected floats of shape {letters}, not empty"
        )
