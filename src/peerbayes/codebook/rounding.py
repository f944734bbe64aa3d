"""Store a posterior in fewer bytes by plain rounding.

Every form is a posterior whose numbers lie on the form's grid. Its bytes count the packed codes and the constants of
the grids, without names and header.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peerbayes.codebook.file import fits_half
from peerbayes.codebook.shared import Shared
from peerbayes.posteriors.base import Point, Posterior
from peerbayes.posteriors.mean_field import MeanField
from peerbayes.posteriors.scales import inverse_softplus

Numbers = dict[str, tuple[Tensor, int]]  # by name in a state: the rounded tensor, and its bytes

SCALES = ("rho", "factor_rho")  # parts of a state that are scales before softplus
SCALE_BITS = (8, 4, 2, 1)
NETWORK_BITS = 3  # of the smallest network
CONSTANT = 4  # bytes of a grid's constant, float32
CLIPS = torch.linspace(1, 0.3, 36).tolist()  # candidates for a channel's largest code, of its largest number
REFITS = 10  # of a grid of scales
TINY = 2.0**-24  # the smallest number of float16


@dataclass(frozen=True)
class Form:
    """A posterior rounded to a number of bytes."""

    name: str
    bytes: int
    posterior: Posterior


def forms(posterior: Posterior) -> Iterator[Form]:
    """Yield rounded forms of a posterior, one at a time, then those of its mean weights.

    ``float32`` and ``float16`` are all its numbers in that type. ``int8, 4-bit scales`` has means in 8 bits with a step
    for each channel, scales on a logarithmic grid for each tensor, and float16 for the rest: factors, biases,
    batch-norm. A point has no scales. A shared posterior is expanded to its weights.
    """
    if isinstance(posterior, Shared):
        posterior = as_mean_field(posterior)
    if posterior.stochastic:
        for bits in (32, 16):
            parts = (_means(posterior, bits), _scales(posterior, bits), _others(posterior, bits))
            yield _form(f"float{bits}", posterior, *parts)
        means, others = _means(posterior, 8), _others(posterior, 16)
        if not _scales(posterior, 32):
            yield _form("int8", posterior, means, others)
        for bits in SCALE_BITS if _scales(posterior, 32) else ():
            yield _form(f"int8, {bits}-bit scales", posterior, means, others, _scales(posterior, bits))
        posterior = Point(posterior.materialise()).to(posterior.device)
    yield _form("network, float32", posterior, _means(posterior, 32), _others(posterior, 32))
    yield _form("network, int8", posterior, _means(posterior, 8), _others(posterior, 16))
    yield _form("network, 3 bits", posterior, _means(posterior, NETWORK_BITS), _others(posterior, 16))


def as_mean_field(posterior: Shared) -> MeanField:
    """Return a mean-field posterior with the mean and the scale of every shared weight."""
    names = set(posterior.layout.shapes)
    field = MeanField(posterior.materialise(), bayesian=lambda name, _module: name in names)
    with torch.no_grad():
        field.rho.copy_(inverse_softplus(posterior.std))
    field.seed, field.name, field.temperature = posterior.seed, posterior.name, posterior.temperature
    return field


def _form(name: str, posterior: Posterior, *parts: Numbers) -> Form:
    numbers = {key: number for part in parts for key, number in part.items()}
    anchors = {key: t for key, t in posterior.state().items() if key.startswith("anchor/")}
    rounded = copy.deepcopy(posterior)
    rounded.load_state(anchors | {key: tensor for key, (tensor, _) in numbers.items()})
    return Form(name, sum(size for _, size in numbers.values()), rounded)


def _means(posterior: Posterior, bits: int) -> Numbers:
    numbers = {}
    for key, tensor in _part(posterior, "mean"):
        # For a bias, the step of its channel would take as many bytes as the bias.
        small = bits <= 8 and tensor.dim() > 1
        numbers[key] = rounded_means(tensor, bits) if small else _floats(tensor, max(16, bits))
    return numbers


def _scales(posterior: Posterior, bits: int) -> Numbers:
    numbers = {}
    for key, tensor in _part(posterior, *SCALES):
        if bits == 32:
            numbers[key] = _floats(tensor, 32)
            continue
        std = F.softplus(tensor.double())
        if bits == 16:
            std, size = std.half().clamp_min(TINY), 2 * std.numel()
        else:
            std, size = rounded_scales(std, bits)
        numbers[key] = inverse_softplus(std).float(), size
    return numbers


def _others(posterior: Posterior, bits: int) -> Numbers:
    parts = {key.split("/")[0] for key in posterior.state()} - {"mean", "anchor", *SCALES}
    return {key: _floats(tensor, bits) for key, tensor in _part(posterior, *parts)}


def _part(posterior: Posterior, *parts: str) -> Iterator[tuple[str, Tensor]]:
    return ((key, t.detach()) for key, t in posterior.state().items() if key.split("/")[0] in parts)


def _floats(tensor: Tensor, bits: int) -> tuple[Tensor, int]:
    """Return a tensor in float16, where it is float32 and that holds it, and its bytes."""
    if bits == 16 and tensor.dtype == torch.float32 and fits_half(tensor):
        return tensor.half().float(), 2 * tensor.numel()
    return tensor, tensor.element_size() * tensor.numel()


def rounded_means(tensor: Tensor, bits: int) -> tuple[Tensor, int]:
    """Round to c · step with |c| < 2^(bits-1), with a step for each output channel (axis 0).

    The step is the best of several candidates by squared error: with few bits it should not reach the largest number.

    Args:
        tensor: means.
        bits: of a code.

    Returns:
        The rounded means, and their bytes.
    """
    most = (1 << (bits - 1)) - 1
    rows = tensor.reshape(len(tensor), -1).double()
    largest = rows.abs().amax(1, keepdim=True) / most
    best, error = rows, torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        step = torch.where(largest > 0, largest * clip, 1.0).float().double()
        given = (rows / step).round().clamp(-most, most) * step
        off = (given - rows).square().sum(1, keepdim=True)
        best, error = torch.where(off < error, given, best), torch.minimum(off, error)
    return best.float().view(tensor.shape), _packed(tensor, bits) + CONSTANT * len(tensor)


def rounded_scales(std: Tensor, bits: int) -> tuple[Tensor, int]:
    """Round to 2^(low + c · step), c from 0 to 2^bits − 1.

    Low and step go from the least and the largest to where they have the least squared error of logarithms, by turns
    with the codes. With one bit these are two levels. Scales of 0 count as the least of the others.

    Args:
        std: scales.
        bits: of a code.

    Returns:
        The rounded scales, float64, and their bytes.
    """
    most = (1 << bits) - 1
    least = std[std > 0].min() if bool((std > 0).any()) else std.new_tensor(TINY)
    logs = std.clamp_min(least).double().log2()
    low, step = logs.min(), (logs.max() - logs.min()) / most
    for _ in range(REFITS):
        codes = _codes(logs, low, step, most)
        off = codes - codes.mean()
        if not bool(off.any()):
            low, step = logs.mean(), torch.zeros_like(step)
            break
        step = (off * logs).sum() / off.square().sum()
        low = logs.mean() - step * codes.mean()
    low, step = low.float().double(), step.float().double()
    levels = torch.exp2(low + torch.arange(most + 1, device=std.device) * step)
    return levels[_codes(logs, low, step, most).long()], _packed(std, bits) + 2 * CONSTANT


def _codes(logs: Tensor, low: Tensor, step: Tensor, most: int) -> Tensor:
    return ((logs - low) / torch.where(step > 0, step, 1.0)).round().clamp(0, most)


def _packed(tensor: Tensor, bits: int) -> int:
    """Return the bytes of codes without gaps."""
    return -(-tensor.numel() * bits // 8)
