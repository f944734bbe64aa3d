"""Data and slow, obvious versions of the metrics that the evaluation tests compare with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from peerbayes.math.noise import Address, normal, uniform


def predictions(seed: int, images: int = 400, classes: int = 5, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, C) in float64, and labels drawn from them, so that they are calibrated."""
    logits = normal(Address(seed, "test", "logits"), images * classes).double().view(images, classes) * scale
    log_p = logits.log_softmax(-1)
    return log_p, labels_from(log_p, seed)


def labels_from(log_p: Tensor, seed: int) -> Tensor:
    u = uniform(Address(seed, "test", "labels"), len(log_p)).double()
    return (log_p.exp().cumsum(-1) < u[:, None]).sum(-1).clamp(max=log_p.shape[1] - 1)


def with_confidence(confidence: Tensor, correct: Tensor, classes: int = 200) -> tuple[Tensor, Tensor]:
    """Probabilities whose maximum, at class 0, is exactly ``confidence``; the label is 0 where ``correct``."""
    rest = ((1 - confidence) / (classes - 1))[:, None].expand(-1, classes - 1)
    return torch.cat([confidence[:, None], rest], dim=1), (~correct.bool()).long()


def ece_by_loop(confidence: np.ndarray, correct: np.ndarray, groups: list[np.ndarray]) -> float:
    gaps = (len(g) / len(confidence) * abs(correct[g].mean() - confidence[g].mean()) for g in groups if len(g))
    return math.fsum(gaps)
