"""Compute accuracy, proper scores and disagreement of predictive probabilities, in natural logarithms.

A float32 probability underflows to 0 where its logarithm is an ordinary −200. The scores that take a
logarithm therefore come twice: ``nll(probabilities, ...)`` and ``nll_from_log(log_probabilities, ...)``.
Prefer the second where the logarithms are at hand. Nothing is clamped: a probability of 0 for the true class
costs infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Return the share of images with ``argmax_c p_c = y``; of equal maxima the first class counts.

    Args:
        probabilities: ``(N, C)``.
        labels: ``(N,)``, integers.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import accuracy
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        0.5
    """
    values = check_probabilities(probabilities)
    labels = check_labels(labels, values)
    return float((values.argmax(-1) == labels).double().mean())


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean over images of ``−log p_y``; infinite where ``p_y = 0``.

    Args:
        probabilities: ``(N, C)``.
        labels: ``(N,)``, integers.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import nll
        >>> round(nll(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])), 4)
        0.5108
    """
    return _nll(check_probabilities(probabilities).log(), labels)


def nll_from_log(log_probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean over images of ``−log p_y``, exact where ``p_y`` itself would underflow.

    Args:
        log_probabilities: ``(N, C)``, normalised; −inf stands for probability 0.
        labels: ``(N,)``, integers.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import nll_from_log
        >>> nll_from_log(torch.tensor([[-200.0, 0.0]]), torch.tensor([0]))
        200.0
    """
    return _nll(check_log_probabilities(log_probabilities), labels)


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean over images of ``Σ_c (p_c − [c = y])²``, between 0 and 2.

    Args:
        probabilities: ``(N, C)``.
        labels: ``(N,)``, integers.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import brier
        >>> brier(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
        0.3125
    """
    values = check_probabilities(probabilities)
    truth = torch.nn.functional.one_hot(check_labels(labels, values), values.shape[1])
    return float((values - truth).square().sum(-1).mean())


def soft_cross_entropy(probabilities: Tensor, soft_labels: Tensor) -> float:
    """Return the mean over images of ``−Σ_c h_c log p_c``, where classes with ``h_c = 0`` add nothing.

    Args:
        probabilities: ``(N, C)``.
        soft_labels: ``(N, C)``, the distribution h of human answers for each image.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import soft_cross_entropy
        >>> round(soft_cross_entropy(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.7, 0.3]])), 4)
        0.6931
    """
    return _soft_cross_entropy(check_probabilities(probabilities).log(), soft_labels)


def soft_cross_entropy_from_log(log_probabilities: Tensor, soft_labels: Tensor) -> float:
    """Return the mean over images of ``−Σ_c h_c log p_c``, exact where ``p_c`` itself would underflow.

    Args:
        log_probabilities: ``(N, C)``, normalised; −inf stands for probability 0.
        soft_labels: ``(N, C)``, the distribution h of human answers for each image.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import soft_cross_entropy_from_log
        >>> soft_cross_entropy_from_log(torch.tensor([[-200.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
        100.0
    """
    return _soft_cross_entropy(check_log_probabilities(log_probabilities), soft_labels)


def _nll(log_p: Tensor, labels: Tensor) -> float:
    labels = check_labels(labels, log_p)
    return -float(log_p.gather(1, labels[:, None]).mean())


def _soft_cross_entropy(log_p: Tensor, soft_labels: Tensor) -> float:
    if soft_labels.shape != log_p.shape:
        raise InputError(
            f"soft_labels: got shape {tuple(soft_labels.shape)}; expected {tuple(log_p.shape)}, as the predictions"
        )
    h = check_probabilities(soft_labels, "soft_labels").to(log_p.device)
    # 0 · log 0 is 0 here, where the product would be NaN.
    return -float(torch.where(h == 0, 0.0, h * log_p).sum(-1).mean())


def pairwise_diversity(log_probabilities: Tensor) -> float:
    """Return the mean over ordered pairs i ≠ j and over images of ``KL(p_i ‖ p_j)``, in nats.

    Computed as ``1 / (M − 1) Σ_i Σ_c p_ic (log p_ic − 1/M Σ_j log p_jc)``, the same without a loop over
    pairs. Infinite where a class has probability 0 for one peer and not for another.

    Args:
        log_probabilities: ``(M, N, C)``, normalised; −inf stands for probability 0.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import pairwise_diversity
        >>> peers = torch.tensor([[[0.8, 0.2]], [[0.5, 0.5]]])
        >>> round(pairwise_diversity(peers.log()), 4)
        0.2079
    """
    log_p = _check_peers(log_probabilities)
    p = log_p.exp()
    lead = log_p - log_p.mean(0)
    # Probability 0 adds nothing, although its log difference may be infinite or undefined.
    total = torch.where(p == 0, 0.0, p * lead).sum((0, 2))
    return float(total.mean()) / (len(log_p) - 1)


def disagreement_rate(log_probabilities: Tensor) -> float:
    """Return the share of images where the argmax of two peers differs, averaged over pairs.

    Args:
        log_probabilities: ``(M, N, C)``, normalised; −inf stands for probability 0.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import disagreement_rate
        >>> peers = torch.tensor([[[0.8, 0.2], [0.6, 0.4]], [[0.7, 0.3], [0.1, 0.9]]])
        >>> disagreement_rate(peers.log())
        0.5
    """
    log_p = _check_peers(log_probabilities)
    peers, _, classes = log_p.shape
    votes = torch.nn.functional.one_hot(log_p.argmax(-1), classes).sum(0)
    agreeing = (votes * (votes - 1)).sum(-1).double() / (peers * (peers - 1))
    return 1 - float(agreeing.mean())


def probability_variance(log_probabilities: Tensor) -> float:
    """Return the mean over images of ``Σ_c Var_i[p_ic]``, the variance over peers i with divisor M − 1.

    0 if all peers agree; 1 for two that are certain of different classes.

    Args:
        log_probabilities: ``(M, N, C)``, normalised; −inf stands for probability 0.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import probability_variance
        >>> peers = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> probability_variance(peers.log())
        1.0
    """
    return float(_check_peers(log_probabilities).exp().var(0).sum(-1).mean())


def _check_peers(log_probabilities: Tensor) -> Tensor:
    log_p = check_log_probabilities(log_probabilities, 3)
    if len(log_p) < 2:
        raise InputError("log_probabilities: holds 1 peer; expected at least 2 in the first dimension")
    return log_p


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
