"""Generate noise for a batch: that of image ``i`` depends on the address and on ``first + i`` only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from peerbayes.math import noise
from peerbayes.math.noise import Address

_FEW = 16.0  # largest rate at which the distribution function is summed


@dataclass(frozen=True)
class BatchNoise:
    """Noise for a batch of images.

    Args:
        address: where the noise belongs.
        first: number of the first image within the data set.
        count: images.
        device: where the noise is made.
    """

    address: Address
    first: int
    count: int
    device: torch.device

    def uniform(self, stream: str, *shape: int) -> Tensor:
        """Return numbers uniform on (0, 1), (count, *shape).

        Args:
            stream: names the noise below the address.
            shape: of one image's numbers.
        """
        size = math.prod(shape)
        flat = noise.uniform(self.address.sub(stream), self.count * size, self.device, self.first * size)
        return flat.view(self.count, *shape)

    def normal(self, stream: str, *shape: int) -> Tensor:
        """Return standard normal numbers, (count, *shape).

        Args:
            stream: names the noise below the address.
            shape: of one image's numbers.
        """
        return to_normal(self.uniform(stream, *shape))


def to_normal(uniform: Tensor) -> Tensor:
    """Return standard normal numbers from uniform ones by the inverse distribution function.

    `noise.normal` pairs its elements over the whole batch: what an image gets would depend on the others.
    """
    return torch.erfinv(2 * uniform - 1) * math.sqrt(2)


def poisson(rate: Tensor, uniform: Tensor) -> Tensor:
    """Return Poisson numbers from uniform ones by the inverse distribution function; above 16, by its expansion.

    Args:
        rate: expected numbers.
        uniform: numbers on (0, 1), in the shape of ``rate``.
    """
    few = rate.clamp_max(_FEW)
    term = torch.exp(-few)
    below, number = term.clone(), torch.zeros_like(few)
    for k in range(1, 3 * int(_FEW)):
        number += uniform > below
        term *= few / k
        below += term
    # Giles (2016): the expansion of the smooth function that meets the distribution function at its steps.
    many = rate.clamp_min(_FEW)
    z = to_normal(uniform)
    smooth = many + many.sqrt() * z + 1 / 3 + z.square() / 6 - (z / 36 + z**3 / 72) * many.rsqrt()
    return torch.where(rate <= _FEW, number, smooth.floor().clamp_min(0))
