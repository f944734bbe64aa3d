"""Measure how much the predictions of several peers, members or draws differ."""

from __future__ import annotations

import torch
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.metrics._checks import check_log_probabilities


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
