"""Draw shared weights in one pass on a GPU; only imported where there is Triton."""
# mypy: ignore-errors

import triton
import triton.language as tl

from peerbayes.math import noise

MULTIPLY_1 = tl.constexpr(noise.MULTIPLY_1 % (1 << 64))
MULTIPLY_2 = tl.constexpr(noise.MULTIPLY_2 % (1 << 64))
TURN = tl.constexpr(noise.TURN)


@triton.jit
def shared_draw(
    columns, rows, begin, result, size, height, HIERARCHICAL: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr
):
    # The numbers of `peerbayes.math.noise.normal`, the formula of `peerbayes.codebook.book.drawn`, weight by weight.
    weight = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = weight < size
    half = size if HIERARCHICAL else (size + 1) // 2
    pattern = tl.where(weight < half, weight, weight - half)
    stride = tl.load(begin + 1).to(tl.uint64, bitcast=True)
    z = tl.load(begin).to(tl.uint64, bitcast=True) + pattern.to(tl.uint64) * stride
    z = (z ^ (z >> 30)) * MULTIPLY_1
    z = (z ^ (z >> 27)) * MULTIPLY_2
    z = z ^ (z >> 31)
    radius = tl.sqrt_rn(tl.log(((z >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10) * -2.0)
    angle = (z & 0xFFFFFFFF).to(tl.float32) * TURN
    row = tl.load(rows + weight, mask=inside, other=0)
    mean = tl.load(columns + row)
    scale = tl.load(columns + height + row)
    if HIERARCHICAL:
        eps = radius * tl.cos(angle)
        a = tl.load(columns + 2 * height + row)
        b = tl.load(columns + 3 * height + row)
        c = tl.load(columns + 4 * height + row) * eps
        a += b * eps
        drawn = mean + scale * eps + tl.sqrt_rn(a * a + c * c + TINY) * (radius * tl.sin(angle))
    else:
        drawn = mean + scale * (radius * tl.where(weight < half, tl.cos(angle), tl.sin(angle)))
    tl.store(result + weight, drawn, mask=inside)
