"""Pack shared weights into a small file: means first, then scales.

Tensors, in the order of the file, with 32 ``bits``, where all is exact; *small*: with fewer:

grids                   small: the grids of all numbers below, float32 (6 + layers,), see `_grids`
fixed/floats            all float32 tensors that are not shared, end to end; small: those that float16 would spoil
fixed/halves            small: the others, float16
means/component         m of the components, float32 (K,); small: int16
fixed/others            all other tensors that are not shared (counters, say), packed by LZMA
means/outlier           means of the outliers, float32 (O,), in the order of the weights; small: coded
means/index             for every weight its component, K for an outlier, K + 1 for a blended weight; coded
means/blend_first       the first component of every blended weight; coded
means/blend_step        how many components further, by mean, the second is; coded
means/blend_weight      the share of the first, in 15ths; coded
scales/component        s, a, b, c of the components, float32 (K, 4); small: (4, K), 8 bits, coded
scales/outlier          ρ of the outliers, float32 (O,); small: 8 bits of σ, coded
anchor/...              means of an anchored prior; only in checkpoints, never in small files

A reader that has the file up to ``scales`` can predict with the mean weights (`Shared.load_means`). Names and shapes
are the network's; the description holds a digest of them.
"""

from __future__ import annotations

import hashlib
import itertools
import lzma
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from peerbayes.codebook.book import SHARES
from peerbayes.codebook.coder import LZMA, decode, encode
from peerbayes.errors import InputError
from peerbayes.posteriors.scales import inverse_softplus

if TYPE_CHECKING:
    from peerbayes.codebook.shared import Shared


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


EXACT = 32  # bits of numbers that are not rounded
ANCHORED = ("component", "cholesky", "outlier")
COLUMNS = 4  # s, a, b, c
FIRST = ("grids", "fixed/", "means/")  # what makes a network


# ---- writing ---------------------------------------------------------------------------------------------------------


def packed(posterior: Shared, anchors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a posterior's tensors in the order of the file, and their entries in its description.

    Args:
        posterior: shared weights.
        anchors: whether to keep the anchors of the prior, for training to continue.
    """
    small, sizes = posterior.bits < EXACT, posterior.layout.sizes
    component = posterior.component.detach().cpu()
    scales = torch.cat([component[:, 1:], posterior.cholesky.detach().cpu()], 1)
    mean, rho = posterior.outlier_mean.detach().cpu(), posterior.outlier_rho.detach().cpu()
    fixed, about = _pack_fixed(fixed_tensors(posterior), small)
    centres = component[:, 0].contiguous()
    if small:
        parts = _by_layer(posterior.outlier.cpu(), sizes)
        codes, grids = _to_grids(centres, mean, scales, rho, parts, posterior.bits)
        grid, centres = {"grids": grids}, from_multiples(codes[0], float(grids[0]))
        middle, single = codes[0], _coded(codes[1].long() + (1 << (posterior.bits - 1)), 1 << posterior.bits, parts)
        spread = _coded(codes[2].reshape(-1), 256, [len(centres)] * COLUMNS)
        outlier_codes = _coded(codes[3], 256, parts)
    else:
        grid, middle, single, spread, outlier_codes = {}, centres, mean, scales, rho
    other_types = {name: fixed.pop(name) for name in list(fixed) if name == "fixed/others"}
    tensors = grid | fixed | {"means/component": middle} | other_types | {"means/outlier": single}
    tensors |= _pack_index(posterior, centres)
    tensors |= {"scales/component": spread, "scales/outlier": outlier_codes}
    if anchors and not small and posterior.prior == "anchored":
        tensors |= {f"anchor/{name}": getattr(posterior, f"anchor_{name}") for name in ANCHORED}
    return tensors, about | {"network": _digest(posterior)}


def fixed_tensors(posterior: Shared) -> dict[str, Tensor]:
    """Return the tensors that are not shared, by their names in the posterior's state."""
    return {name: t.detach() for name, t in posterior.state().items() if name.startswith(("network/", "rest/"))}


def index_of(posterior: Shared) -> Tensor:
    """Return for every weight its component, K for an outlier, K + 1 for a blended weight, (n,)."""
    index, components = posterior.label.cpu().long(), len(posterior.component)
    index[posterior.outlier.cpu()], index[posterior.blended.cpu()] = components, components + 1
    return index


def _pack_index(posterior: Shared, centres: Tensor) -> dict[str, Tensor]:
    components = len(centres)
    first, second = posterior.blend_component.cpu().long().unbind(1)
    rank = centres.argsort(stable=True).argsort()
    share = (posterior.blend_weight[:, 0].cpu() * SHARES).round().long()
    return {
        "means/index": _coded(index_of(posterior), components + 2, posterior.layout.sizes),
        "means/blend_first": _coded(first, components, [len(first)]),
        "means/blend_step": _coded((rank[second] - rank[first]) % components, components, [len(first)]),
        "means/blend_weight": _coded(share, SHARES + 1, [len(first)]),
    }


def _pack_fixed(fixed: Mapping[str, Tensor], small: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    groups: dict[str, list[Tensor]] = {"fixed/floats": [], "fixed/halves": [], "fixed/others": []}
    full = []
    for number, tensor in enumerate(t.cpu().contiguous() for t in fixed.values()):
        if tensor.dtype != torch.float32:
            groups["fixed/others"].append(tensor.reshape(-1).view(torch.uint8))
        elif small and fits_half(tensor):
            groups["fixed/halves"].append(tensor.reshape(-1).half())
        else:
            groups["fixed/floats"].append(tensor.reshape(-1))
            full += [number] if small else []
    tensors = {name: torch.cat(group) for name, group in groups.items() if group}
    if "fixed/others" in tensors:
        plain = tensors["fixed/others"].numpy().tobytes()
        tensors["fixed/others"] = _padded(lzma.compress(plain, lzma.FORMAT_RAW, filters=LZMA))
    return tensors, {"full": full} if full else {}


def _to_grids(
    centres: Tensor, mean: Tensor, scales: Tensor, rho: Tensor, parts: Sequence[int], bits: int
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the codes of all numbers, and the grids: of centres, of s, a, b, c and σ, of outliers by layer."""
    middle, step = to_multiples(centres, 16)
    columns, tops = zip(*(to_powers(column) for column in scales.unbind(1)), strict=True)
    sigma_codes, top = to_powers(F.softplus(rho.double()))
    singles, steps = zip(*(to_multiples(part, bits) for part in mean.split(list(parts))), strict=True)
    return (middle, torch.cat(singles), torch.stack(columns), sigma_codes), torch.tensor([step, *tops, top, *steps])


def _by_layer(indices: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the number of given weights in each layer."""
    ends = torch.tensor(sizes).cumsum(0)
    return torch.bincount(torch.bucketize(indices, ends, right=True), minlength=len(sizes)).tolist()


def _coded(symbols: Tensor, alphabet: int, parts: Sequence[int]) -> Tensor:
    return _padded(encode(symbols.numpy(), alphabet, parts))


def _padded(data: bytes) -> Tensor:
    # Pad to a multiple of eight for the tensors after it; the last byte holds the number of padding bytes.
    more = 8 - len(data) % 8
    return torch.from_numpy(np.frombuffer(data + bytes(more - 1) + bytes([more]), np.uint8).copy())


def _digest(posterior: Shared) -> str:
    """Return a digest of the names, types and shapes of all tensors, shared or not, in their order."""
    fixed = [(name, str(t.dtype), tuple(t.shape)) for name, t in fixed_tensors(posterior).items()]
    shared = [(name, tuple(shape)) for name, shape in posterior.layout.shapes.items()]
    return hashlib.blake2b(repr((fixed, shared)).encode(), digest_size=8).hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """A reader of a file's tensors, which checks the type and shape of each."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.left = dict(tensors)

    def take(self, name: str, dtype: torch.dtype, *shape: int | None) -> Tensor:
        """Return a tensor of this type and shape; None is any length."""
        if name not in self.left:
            raise InputError(f"a file of shared weights is incomplete: it has no '{name}'")
        tensor = self.left.pop(name)
        fits = tensor.dim() == len(shape) and all(
            n in (None, length) for n, length in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise InputError(
                f"a file of shared weights is damaged: '{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"expected {dtype} of shape ({', '.join('any' if n is None else str(n) for n in shape)})"
            )
        return tensor

    def bytes(self, name: str) -> bytes:
        """Return the input of `_padded`."""
        data = self.take(name, torch.uint8, None).numpy().tobytes()
        more = data[-1] if data else 0
        if len(data) % 8 or not 1 <= more <= 8 or any(data[-more:-1]):
            raise InputError(f"a file of shared weights is damaged: '{name}' does not end as it should")
        return data[:-more]

    def symbols(self, name: str, alphabet: int, parts: Sequence[int]) -> Tensor:
        """Return what `_coded` was given."""
        data = self.bytes(name)
        try:
            return decode(data, alphabet, parts)
        except InputError as error:
            raise InputError(f"'{name}': {error}") from None


def unpacked(
    tensors: Mapping[str, Tensor], about: Mapping[str, Any], posterior: Shared, means_alone: bool = False
) -> dict[str, Tensor]:
    """Return the state for `Shared.load_state` from the output of `packed`.

    Args:
        tensors: of the file.
        about: its description.
        posterior: over the same network, with as many bits, and any codebook.
        means_alone: whether only the first tensors are there; all scales are then 1.
    """
    if about.get("network") != _digest(posterior):
        raise InputError("the shared weights belong to another network (names or shapes of tensors differ)")
    reader, small, sizes = _Reader(tensors), posterior.bits < EXACT, posterior.layout.sizes
    if small:
        grids = _grids(reader.take("grids", torch.float32, COLUMNS + 2 + len(sizes)))
        centres = from_multiples(reader.take("means/component", torch.int16, None), grids[0])
    else:
        grids, centres = [], reader.take("means/component", torch.float32, None)
    fixed = _unpack_fixed(reader, fixed_tensors(posterior), about.get("full", []) if small else None)
    book = _unpack_index(reader, centres, sizes)
    single, components = len(book["outlier"]), len(centres)
    if small:
        parts = _by_layer(book["outlier"], sizes)
        bits = posterior.bits
        codes = (reader.symbols("means/outlier", 1 << bits, parts) - (1 << (bits - 1))).split(parts)
        mean = torch.cat([from_multiples(code, step) for code, step in zip(codes, grids[6:], strict=True)])
    else:
        mean = reader.take("means/outlier", torch.float32, single)
    if means_alone:
        scales, rho = torch.ones(components, COLUMNS), inverse_softplus(torch.ones(single))
    elif small:
        columns = reader.symbols("scales/component", 256, [components] * COLUMNS).view(COLUMNS, -1)
        tops = [int(top) for top in grids[1:6]]
        scales = torch.stack([from_powers(code, top) for code, top in zip(columns, tops[:COLUMNS], strict=True)], 1)
        rho = inverse_softplus(from_powers(reader.symbols("scales/outlier", 256, parts), tops[-1]))
    else:
        scales = reader.take("scales/component", torch.float32, components, COLUMNS)
        rho = reader.take("scales/outlier", torch.float32, single)
    book |= {"component": torch.stack([centres, scales[:, 0]], 1), "cholesky": scales[:, 1:]}
    book |= {"outlier_mean": mean, "outlier_rho": rho.float()}
    anchors = {"component": book["component"], "cholesky": book["cholesky"], "outlier": mean}
    if any(name.startswith("anchor/") for name in reader.left):
        anchors = {name: reader.take(f"anchor/{name}", torch.float32, *anchors[name].shape) for name in anchors}
    if reader.left:
        raise InputError(f"a file of shared weights is damaged: unexpected tensor '{next(iter(reader.left))}'")
    book |= {f"anchor_{name}": tensor for name, tensor in anchors.items()}
    return fixed | {f"codebook/{name}": tensor for name, tensor in book.items()}


def _grids(grids: Tensor) -> list[float]:
    """Return the grids of `_to_grids`, checked: positive steps, and powers within float32."""
    values = grids.tolist()
    steps, tops = [values[0], *values[6:]], values[1:6]
    whole = all(math.isfinite(top) and top == int(top) and abs(top) < 1200 for top in tops)
    if not whole or not all(0 < step < math.inf for step in steps):
        raise InputError("a file of shared weights is damaged: its grids are not those of numbers")
    return values


def _unpack_index(reader: _Reader, centres: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
    components = len(centres)
    if not components:
        raise InputError("a file of shared weights is damaged: it has no components")
    index = reader.symbols("means/index", components + 2, sizes)
    outlier, blended = ((index == components + extra).nonzero()[:, 0] for extra in (0, 1))
    count = [len(blended)]
    order = centres.argsort(stable=True)
    first = reader.symbols("means/blend_first", components, count)
    step = reader.symbols("means/blend_step", components, count)
    second = order[(order.argsort()[first] + step) % components]
    share = reader.symbols("means/blend_weight", SHARES + 1, count).float()
    return {
        "label": torch.where(index < components, index, 0).int(),
        "blended": blended,
        "blend_component": torch.stack([first, second], 1).int(),
        "blend_weight": torch.stack([share / SHARES, (SHARES - share) / SHARES], 1),
        "outlier": outlier,
    }


def _unpack_fixed(reader: _Reader, expected: Mapping[str, Tensor], full: Any) -> dict[str, Tensor]:
    """Return the tensors that are not shared; those numbered in ``full``, or all if it is None, are float32."""
    if full is not None and not (isinstance(full, list) and all(type(n) is int for n in full)):
        raise InputError("a file of shared weights is damaged: 'full' is not a list of numbers")
    groups: dict[str, dict[str, Tensor]] = {"fixed/floats": {}, "fixed/halves": {}, "fixed/others": {}}
    for number, (name, like) in enumerate(expected.items()):
        half = full is not None and number not in full
        group = "others" if like.dtype != torch.float32 else "halves" if half else "floats"
        groups[f"fixed/{group}"][name] = like
    tensors: dict[str, Tensor] = {}
    for name, dtype in (("fixed/floats", torch.float32), ("fixed/halves", torch.float16)):
        if groups[name]:
            lengths = [like.numel() for like in groups[name].values()]
            pieces = reader.take(name, dtype, sum(lengths)).float().split(lengths)
            tensors |= {n: t.view(like.shape) for t, (n, like) in zip(pieces, groups[name].items(), strict=True)}
    if groups["fixed/others"]:
        tensors |= _unpack_others(reader.bytes("fixed/others"), groups["fixed/others"])
    return tensors


def _unpack_others(data: bytes, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    size = sum(like.numel() * like.element_size() for like in expected.values())
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA)
    try:
        plain = decompressor.decompress(data, size + 1)
    except lzma.LZMAError:
        plain = b""
    if len(plain) != size or not decompressor.eof or decompressor.unused_data:
        raise InputError("a file of shared weights is damaged: 'fixed/others' cannot be unpacked")
    tensors, begin = {}, 0
    for name, like in expected.items():
        end = begin + like.numel() * like.element_size()
        flat = torch.frombuffer(bytearray(plain[begin:end] or b"\0"), dtype=torch.uint8)[: end - begin]
        tensors[name] = (flat != 0 if like.dtype == torch.bool else flat.view(like.dtype)).view(like.shape)
        begin = end
    return tensors
