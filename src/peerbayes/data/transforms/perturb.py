"""Move images by small steps in chosen or random directions: pure functions of gradients and addresses.

Images are floating-point, (B, C, H, W) in [0, 1], and come back clipped to [0, 1]. All steps have the size of Gaussian
noise of 1/255 a value: with D = C·H·W values an image, ``√D/255`` in the Euclidean norm. Nothing here reads a value
back to the host, and the noise of image ``i`` depends on the address and on ``first + i`` only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peerbayes.data.transforms.batch_noise import to_normal
from peerbayes.errors import InputError
from peerbayes.math import noise
from peerbayes.math.noise import Address

_UNIT = 1 / 255  # one step of an 8-bit image


def step_along(images: Tensor, gradient: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return ``clip(x_b + s_b (√D/255) g_b/‖g_b‖₂, 0, 1)``; an image whose gradient is zero stays as it is.

    Args:
        images: (B, C, H, W), floating-point in [0, 1].
        gradient: of anything by the images, same shape; its size does not matter.
        scale: ``s``, a number, or one for each image, shape (B,): for ConfODS the teacher's confidence ``max_c p_c``.

    Example:
        >>> import torch
        >>> from peerbayes.data import step_along
        >>> images = torch.full((1, 1, 2, 2), 0.5)
        >>> (step_along(images, torch.ones_like(images)) * 255).flatten()
        tensor([128.5000, 128.5000, 128.5000, 128.5000])
    """
    _check(images)
    if gradient.shape != images.shape:
        raise InputError(f"gradient has shape {tuple(gradient.shape)}: expected that of images, {tuple(images.shape)}.")
    if isinstance(scale, Tensor):
        if scale.shape not in ((), images.shape[:1]):
            raise InputError(f"scale has shape {tuple(scale.shape)}: expected one number, or one for each image.")
        scale = scale.reshape(-1, 1, 1, 1)
    gradient = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    # Divided by its largest value first: gradients of saturated networks are so small that their squares vanish.
    largest = gradient.abs().amax((1, 2, 3), keepdim=True)
    direction = gradient / torch.where(largest > 0, largest, 1.0)
    norm = direction.square().sum((1, 2, 3), keepdim=True).sqrt()
    size = _UNIT * math.sqrt(images[0].numel()) if len(images) else 0.0
    step = direction * (size * scale / torch.where(norm > 0, norm, 1.0))
    return (images + step).clamp(0, 1).to(images.dtype)


def gaussian_step(images: Tensor, address: Address, first: int = 0) -> Tensor:
    """Return ``clip(x + z/255, 0, 1)`` with z standard normal.

    Args:
        images: (B, C, H, W), floating-point in [0, 1].
        address: where z comes from.
        first: number of the first image.

    Example:
        >>> import torch
        >>> from peerbayes import Address
        >>> from peerbayes.data import gaussian_step
        >>> gaussian_step(torch.full((1, 1, 8, 8), 0.5), Address(0, "data", "noise")).shape
        torch.Size([1, 1, 8, 8])
    """
    _check(images)
    size = images.shape[1:].numel()
    normal = to_normal(noise.uniform(address, len(images) * size, images.device, first * size))
    return (images + _UNIT * normal.view(images.shape)).clamp(0, 1).to(images.dtype)


def guidance(
    address: Address, count: int, classes: int, device: torch.device | str | None = None, first: int = 0
) -> Tensor:
    """Return w ~ U(−1, 1)^C for each image, float32 (count, classes).

    The directions of ODS and ConfODS are the gradients of ``Σ_b w_b · softmax(z_b / τ)`` by the images.

    Args:
        address: where w comes from.
        count: images.
        classes: C.
        device: where w is made.
        first: number of the first image.

    Example:
        >>> from peerbayes import Address
        >>> from peerbayes.data import guidance
        >>> guidance(Address(0, "data", "guidance"), count=2, classes=3).shape
        torch.Size([2, 3])
    """
    return noise.uniform(address, count * classes, device, first * classes).view(count, classes) * 2 - 1


def pair(address: Address, members: int, device: torch.device | str | None = None) -> Tensor:
    """Return (i, j), uniform over the ordered pairs of ``range(members)`` with i ≠ j, int64 (2,).

    Args:
        address: where the choice comes from.
        members: how many there are to choose from, at least 2.
        device: where it is made.

    Example:
        >>> from peerbayes import Address
        >>> from peerbayes.data import pair
        >>> sorted(pair(Address(0, "data", "pair"), members=2).tolist())
        [0, 1]
    """
    if members < 2:
        raise InputError(f"members is {members}: a pair needs 2 or more.")
    first = noise.integers(address.sub("first"), members, 1, device)
    second = noise.integers(address.sub("second"), members - 1, 1, device)
    return torch.cat([first, second + (second >= first)])


def _check(images: Tensor) -> None:
    if images.dim() != 4 or not images.is_floating_point():
        raise InputError(
            f"images is a {images.dtype} tensor of shape {tuple(images.shape)}: "
            "expected floating-point images (B, C, H, W) in [0, 1]."
        )
