"""Convolve images of few channels on a GPU, for `peerbayes.kernels.launch`; only imported where there is Triton."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def small_conv(
    x, weight, bias, residual, result, total, height, width, tall, wide,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, OUT_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, PAD_Y: tl.constexpr, PAD_X: tl.constexpr,
    TERMS: tl.constexpr, BY_TAP: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program makes all channels of BLOCK pixels: a sum over the kernel's taps of (BLOCK, C) x (C, O) products,
    # or, with few channels, one product over all taps and channels at once.
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = pixel // (tall * wide)
    row = pixel % (tall * wide) // wide * STRIDE_Y - PAD_Y
    column = pixel % wide * STRIDE_X - PAD_X
    inside = pixel < total
    out = tl.arange(0, OUT_PADDED)
    real = out < OUT
    sums = tl.zeros((BLOCK, OUT_PADDED), tl.float32)
    term = tl.arange(0, TERMS)
    base = image.to(tl.int64) * height * width * CHANNELS
    if BY_TAP:
        for tap in tl.static_range(ROWS * COLUMNS):
            y, z = row + tap // COLUMNS, column + tap % COLUMNS
            seen = inside & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            where = base + (y * width + z) * CHANNELS
            used = term < CHANNELS
            values = tl.load(x + where[:, None] + term[None, :], mask=seen[:, None] & used[None, :], other=0.0)
            at = out[None, :] * (ROWS * COLUMNS * CHANNELS) + tap * CHANNELS + term[:, None]
            factors = tl.load(weight + at, mask=real[None, :] & used[:, None], other=0.0)
            sums = tl.dot(values, factors, sums)
    else:
        tap, channel = term // CHANNELS, term % CHANNELS
        y, z = row[:, None] + (tap // COLUMNS)[None, :], column[:, None] + (tap % COLUMNS)[None, :]
        used = term < ROWS * COLUMNS * CHANNELS
        seen = inside[:, None] & used[None, :] & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        where = base[:, None] + (y * width + z) * CHANNELS + channel[None, :]
        values = tl.load(x + where, mask=seen, other=0.0)
        at = out[None, :] * (ROWS * COLUMNS * CHANNELS) + term[:, None]
        factors = tl.load(weight + at, mask=real[None, :] & used[:, None], other=0.0)
        sums = tl.dot(values, factors, sums)
    sums += tl.load(bias + out, mask=real, other=0.0)[None, :].to(tl.float32)
    target = pixel.to(tl.int64)[:, None] * OUT + out[None, :]
    stored = inside[:, None] & real[None, :]
    if RESIDUAL:
        sums += tl.load(residual + target, mask=stored, other=0.0).to(tl.float32)
    tl.store(result + target, tl.where(sums < 0, 0.0, sums).to(result.dtype.element_ty), mask=stored)
