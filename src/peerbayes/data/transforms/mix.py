"""Mix pairs of images of a batch (mixup, CutMix) on their own device, by addressed randomness."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from peerbayes.math import noise
from peerbayes.math.noise import Address

MixKind = Literal["mixup", "cutmix"]
_KNOTS = 4096  # of the quantile function of Beta(α, α)


class Mixer:
    """Mix each image with that of the mirrored place in the batch.

    For each image λ ~ Beta(alpha, alpha). ``mixup`` is λ x + (1 − λ) x', and λ is the share of x. ``cutmix`` puts a box
    of x' into x, with sides √(1 − λ) of the image's and a centre anywhere in it; the share of x is the area outside it.

    Args:
        kind: ``mixup`` or ``cutmix``.
        alpha: near 0, most images are hardly mixed; at 1, λ is uniform.
        device: of the images.

    Example:
        >>> import torch
        >>> from peerbayes import Address
        >>> images = torch.arange(4.0).view(4, 1, 1, 1)
        >>> mixed, shares = Mixer("mixup", 1.0, "cpu")(images, Address(0, "data", "mix"))
        >>> torch.allclose(mixed.flatten(), shares * images.flatten() + (1 - shares) * images.flip(0).flatten())
        True
    """

    def __init__(self, kind: MixKind, alpha: float, device: torch.device | str) -> None:
        from scipy.stats import beta

        self.kind = kind
        levels = torch.linspace(0, 1, _KNOTS + 1, dtype=torch.float64).numpy()
        self._quantiles = torch.from_numpy(beta.ppf(levels, alpha, alpha)).float().to(device)

    def __call__(self, images: Tensor, address: Address, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the mixed images, and each one's own share, (B,).

        Args:
            images: float (B, C, H, W).
            address: where λ and boxes come from.
            first: number of the first image, where these are part of a batch.
        """
        count, _, height, width = images.shape
        device, mirrored = images.device, images.flip(0)
        # Uniform numbers through the quantile function, which is linear between its knots.
        level = noise.uniform(address.sub("share"), count, device, first) * _KNOTS
        below = level.long()
        shares = torch.lerp(self._quantiles[below], self._quantiles[below + 1], level - below)
        if self.kind == "mixup":
            return torch.lerp(mirrored, images, shares[:, None, None, None]), shares

        def inside(side: int, axis: str) -> Tensor:
            centre = noise.uniform(address.sub(axis), count, device, first) * side
            half = 0.5 * side * (1 - shares).sqrt()
            pixels = torch.arange(side, device=device)
            return (pixels >= (centre - half).round()[:, None]) & (pixels < (centre + half).round()[:, None])

        box = inside(height, "rows")[:, :, None] & inside(width, "columns")[:, None, :]
        return torch.where(box[:, None], mirrored, images), 1 - box.float().mean((1, 2))
