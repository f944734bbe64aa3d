"""Round numbers to coarse grids: whole multiples of a step, and signed powers of a ratio.

Numbers that already lie on a grid get the same codes and the same grid again.
"""

from __future__ import annotations

import itertools
import math
import operator

import torch
from torch import Tensor

TINY, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
PER_OCTAVE = 8  # powers between a number and its double: neighbours differ by 9 %
LEVELS = 127  # powers of each sign, which span 16 octaves
# Single operations, which IEEE 754 rounds alike everywhere: a file is the same posterior on every machine.
ROOT = math.sqrt(math.sqrt(math.sqrt(2.0)))
RATIOS = list(itertools.accumulate([1.0] + [ROOT] * (PER_OCTAVE - 1), operator.mul))


def to_multiples(values: Tensor, bits: int) -> tuple[Tensor, float]:
    """Round to c · step with step = max |value| / (2^(bits-1) − 1).

    The step has 16 binary digits, so that it is recovered from what was rounded.

    Args:
        values: any shape.
        bits: of a code.

    Returns:
        The codes c, int8 or int16, and the step.
    """
    most = (1 << (bits - 1)) - 1
    largest = float(values.abs().max()) if values.numel() else 0.0
    mantissa, exponent = math.frexp(largest / most)
    step = math.ldexp(round(mantissa * 65536), exponent - 16)
    step = step if step >= TINY else 1.0  # too small for float32
    codes = (values.double() / step).round().clamp(-most, most)
    return codes.to(torch.int8 if bits <= 8 else torch.int16), step


def from_multiples(codes: Tensor, step: float) -> Tensor:
    """Return c · step, float32.

    Args:
        codes: c.
        step: the step.
    """
    return (codes.double() * step).clamp(-LARGEST, LARGEST).float()


def to_powers(values: Tensor) -> tuple[Tensor, int]:
    """Round to 0 or ± 2^((top + level − 127) / 8), level 1 to 127.

    A code is the level, plus 128 if negative; 0 is 0. Numbers below 2^-16 of the largest get the lowest level.

    Returns:
        The codes, uint8, and top.
    """
    size = values.double().abs()
    some = size > 0
    power = (torch.where(some, size, 1.0).log2() * PER_OCTAVE).round().long()
    top = int(power[some].max()) if bool(some.any()) else 0
    level = (power - top + LEVELS).clamp_min(1)
    return torch.where(some, level + 128 * (values < 0), 0).to(torch.uint8), top


def from_powers(codes: Tensor, top: int) -> Tensor:
    """Return the numbers that codes stand for, float32.

    Args:
        codes: from `to_powers`, uint8.
        top: from `to_powers`.
    """
    powers = range(top - LEVELS + 1, top + 1)
    sizes = (math.ldexp(RATIOS[power % PER_OCTAVE], power // PER_OCTAVE) for power in powers)
    levels = [0.0, *(min(size, LARGEST) for size in sizes)]
    return torch.tensor(levels + [-level for level in levels])[codes.long()]


def fits_half(tensor: Tensor) -> bool:
    """Return whether float16 holds all numbers to 2^-10 of themselves, or of their mean size; infinities stay."""
    sizes = tensor[tensor.isfinite()].abs()
    near = 2.0**-10 * float(sizes.mean()) if sizes.numel() else 0.0
    return torch.allclose(tensor.half().float(), tensor, rtol=2.0**-10, atol=max(1e-8, near), equal_nan=True)
