"""Launch GPU kernels for predictions: fused convolutions in half precision, and draws of shared weights.

Convolution + bias (+ residual) + ReLU is one pass over the activations, a draw one pass over the weights. cuDNN does
the first well for many channels. For few its tiles are mostly empty: a ResNet's 16-channel layers run in half of
cuDNN's time with the kernel below (H200, float16, 10,000 images of 32×32: 0.44 ms instead of 0.95 ms).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedConv(nn.Module):
    """A convolution and what follows it: relu(conv(x) + bias + residual).

    Its parameters have the names of the convolution's.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.stride, self.padding = conv.stride, conv.padding

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weight, bias = self.weight, self.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        x, bias = x.to(weight.dtype), bias.to(weight.dtype)
        if x.dim() != 4 or not (residual is None or self._fits(x, weight, residual)):
            # The residual has another shape: a number, say, or a shift by channel.
            return (F.conv2d(x, weight, bias, self.stride, self.padding) + (0 if residual is None else residual)).relu()
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
        if residual is not None:
            residual = residual.to(weight.dtype).contiguous(memory_format=torch.channels_last)
        return conv_relu(x, weight, bias, self.stride, self.padding, residual)

    def _fits(self, x: Tensor, weight: Tensor, residual: Any) -> bool:
        shape = (len(x), len(weight), *_sides(x, weight, self.stride, self.padding))
        return isinstance(residual, Tensor) and residual.shape == shape


def can_fuse(module: nn.Module) -> bool:
    """Return whether `FusedConv` can replace a module."""
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, residual: Tensor | None = None
) -> Tensor:
    """Return relu(conv(x) + bias + residual), (N, O, H', W').

    Args:
        x: (N, C, H, W), channels last.
        weight: (O, C, kh, kw), channels last; of the type of ``x``, as all others.
        bias: (O,).
        stride: rows and columns.
        padding: rows and columns of zeros.
        residual: of the result's shape, channels last.
    """
    if not x.is_cuda:
        out = F.conv2d(x, weight, bias, stride, padding)
        return (out if residual is None else out + residual).relu_()
    if weight.shape[1] <= 16 and weight.shape[0] <= 64 and _kernel("small_conv") is not None:
        return _launch(x, weight, bias, stride, padding, residual)
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, stride, padding, (1, 1), 1)


def draw_shared(columns: Sequence[Tensor], rows: Tensor, begin: Tensor, tiny: float) -> Tensor | None:
    """Return a draw of shared weights (n,), its noise included; None where they are not on a GPU with Triton.

    Args:
        columns: what `peerbayes.codebook.book` draws of: m and the scale, or m, s, a, b and c; (R,) each.
        rows: of every weight, int32 (n,).
        begin: where the noise starts, and its stride, from `peerbayes.math.noise.start`.
        tiny: what is added to a variance.
    """
    kernel = _kernel("shared_draw") if rows.is_cuda and columns[0].dtype == torch.float32 else None
    if kernel is None:
        return None
    table, result = torch.stack(list(columns)), torch.empty(len(rows), device=rows.device)
    about = {"HIERARCHICAL": len(table) > 2, "TINY": tiny, "BLOCK": 1024}
    with torch.cuda.device_of(rows):
        kernel[(-(-len(rows) // 1024),)](table, rows, begin, result, len(rows), table.shape[1], **about)
    return result


def _launch(x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, residual: Tensor | None) -> Tensor:
    count, channels, height, width = x.shape
    out, _, rows, columns = weight.shape
    tall, wide = _sides(x, weight, stride, padding)
    result = torch.empty((count, out, tall, wide), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    total, terms = count * tall * wide, rows * columns * channels
    block, by_tap = 256 if out <= 16 else 128, terms > 64
    with torch.cuda.device_of(x):  # Triton launches on the current device, wherever its arguments live
        _kernel("small_conv")[(-(-total // block),)](
            x, weight, bias, result if residual is None else residual, result, total, height, width, tall, wide,
            CHANNELS=channels, OUT=out, OUT_PADDED=_power(out), ROWS=rows, COLUMNS=columns,
            STRIDE_Y=stride[0], STRIDE_X=stride[1], PAD_Y=padding[0], PAD_X=padding[1],
            TERMS=16 if by_tap else _power(terms), BY_TAP=by_tap, RESIDUAL=residual is not None, BLOCK=block,
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return result


def _sides(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> tuple[int, int]:
    tall = (x.shape[2] + 2 * padding[0] - weight.shape[2]) // stride[0] + 1
    wide = (x.shape[3] + 2 * padding[1] - weight.shape[3]) // stride[1] + 1
    return tall, wide


def _power(number: int) -> int:
    return int(max(16, 1 << (number - 1).bit_length()))


@functools.cache
def _kernel(name: str) -> Any:
    """Return a kernel from the file of its name, or None where there is no Triton to compile it."""
    if importlib.util.find_spec("triton") is None:
        return None
    return getattr(importlib.import_module(f"peerbayes.kernels.{name}"), name)
