"""Fuse features of successive layers by cross-attention (paper 1, equation 13)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError


def tokens(features: Tensor) -> Tensor:
    """Return features as tokens (B, positions, channels): images (B, C, H, W), tokens as they are, vectors as one."""
    if features.dim() == 4:
        return features.flatten(2).transpose(1, 2)
    if features.dim() == 3:
        return features
    if features.dim() == 2:
        return features[:, None]
    raise InputError(f"features have shape {tuple(features.shape)}, expected 2, 3 or 4 axes")


def vectors(features: Tensor, pool: str) -> Tensor:
    """Return one vector an image, (B, ...).

    Args:
        features: of a layer: (B, C, H, W), (B, positions, channels) or (B, channels).
        pool: ``flat`` lays tokens end to end, ``mean`` averages them.
    """
    sequence = tokens(features)
    return sequence.flatten(1) if pool == "flat" else sequence.mean(1)


class Attention(nn.Module):
    """Cross-attention softmax(Q Kᵀ s) V with Q = X W_Q of one layer, K = Y W_K and V = Y W_V of the next (e channels).

    Args:
        channels_query: channels of X (B, n, c).
        channels_key: channels of Y (B, m, e).
        scaled: s = 1/√e, else 1. The result is (B, n, e).
    """

    def __init__(self, channels_query: int, channels_key: int, scaled: bool) -> None:
        super().__init__()
        self.query = nn.Linear(channels_query, channels_key, bias=False)
        self.key = nn.Linear(channels_key, channels_key, bias=False)
        self.value = nn.Linear(channels_key, channels_key, bias=False)
        self.scale = 1 / math.sqrt(channels_key) if scaled else 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(y).transpose(1, 2) * self.scale
        fused: Tensor = scores.softmax(-1) @ self.value(y)
        return fused


class Fusion(nn.Module):
    """Attention between each layer and the next: u(F_1, F_2), nested as u(u(F_1, F_2), F_3) for more layers.

    Args:
        shapes: shapes of the layers' features, from early to late.
        scaled: scale attention scores by 1/√e.
        classes: add a linear head on the mean token, to train the fusion for the task.

    Example:
        >>> import torch
        >>> from peerbayes.terms import Fusion
        >>> early, late = torch.zeros(5, 16, 8, 8), torch.zeros(5, 32, 4, 4)
        >>> fusion = Fusion([early.shape, late.shape])
        >>> fusion([early, late]).shape
        torch.Size([5, 64, 32])
    """

    def __init__(self, shapes: Sequence[torch.Size], scaled: bool = True, classes: int | None = None) -> None:
        super().__init__()
        if len(shapes) < 2:
            raise InputError(f"feature fusion needs at least 2 layers, got {len(shapes)}")
        channels = [tokens(torch.empty(shape, device="meta")).shape[-1] for shape in shapes]
        self.attention = nn.ModuleList(
            Attention(before, after, scaled) for before, after in itertools.pairwise(channels)
        )
        self.head = None if classes is None else nn.Linear(channels[-1], classes)
        self.shared = False

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Return fused tokens (B, positions of the first layer, channels of the last)."""
        fused = tokens(features[0])
        for attention, later in zip(self.attention, features[1:], strict=True):
            fused = attention(fused, tokens(later))
        return fused

    def classify(self, features: Sequence[Tensor]) -> Tensor:
        """Return the head's logits (B, C) on the mean fused token."""
        assert self.head is not None
        logits: Tensor = self.head(self(features).mean(1))
        return logits
