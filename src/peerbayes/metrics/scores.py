"""Compute accuracy and proper scores of predictive probabilities, in natural logarithms, averaged over images.

A float32 probability underflows to 0 where its logarithm is an ordinary −200. The scores that take a
logarithm therefore come twice: ``nll(probabilities, ...)`` and ``nll_from_log(log_probabilities, ...)``.
Prefer the second where the logarithms are at hand. Nothing is clamped: a probability of 0 for the true class
costs infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.metrics._checks import check_labels, check_log_probabilities, check_probabilities


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
