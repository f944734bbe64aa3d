r"""Code the component of every weight in about its entropy: tables of frequencies and rANS.

The weights' numbers are coded part by part (a part is a layer) by range asymmetric numeral systems [1], in many lanes
that NumPy steps together. All parts share one table of frequencies. A part may reshape it: the symbols, in their order,
are cut into bins of equal mass, and the part stores the frequency of each bin; with one bin for each symbol that is a
separate table. The encoder chooses the smallest form for each part, so neighbouring numbers should belong to components
that occur in the same layers: `arrange` finds such an order.

A table stores rounded square roots of counts: that costs a quarter of a bit a symbol and halves the table. Encoder and
decoder agree because all is made of integers and of single float64 operations, which IEEE 754 rounds alike everywhere.

Bytes, little-endian: ``pbi\x01``; a digest (8) of what follows, the alphabet and the parts; the length of the tables
(4); the tables (see `_squeeze`: a level for each part that is not empty, the shared table, the parts' own); the lanes'
states (8 each); words (4 each).

[1] Duda, arXiv:1311.2540 (2013); lanes as in Giesen, arXiv:1402.3392 (2014).
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerbayes.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

MAGIC = b"pbi\x01"
DIGEST = 8
LARGEST_ALPHABET = 1 << 24
LARGEST_SIZE = 65535 * 65536  # square roots of counts fit into 16 bits
STEPS = 16384  # symbols a lane; a lane costs about 48 bits
LEAST_OWN = 64  # symbols a part that may have a table of its own
LOW = np.uint64(1 << 32)  # between steps the states lie in [LOW, 2^64)
WORD = np.uint64(32)
LZMA = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16, "lc": 0, "lp": 0, "pb": 0}]


def encode(symbols: NDArray[np.integer] | Tensor, alphabet: int, parts: Sequence[int]) -> bytes:
    """Code integers in ``0 .. alphabet - 1``, (n,), part by part.

    Args:
        symbols: the integers, (n,).
        alphabet: how many symbols there are.
        parts: integers of each part, n in all; each part has its distribution.

    Raises:
        InputError: the symbols are no such integers, or the parts do not add up to their number.
    """
    size = _check(alphabet, parts)
    array = symbols.detach().cpu().numpy() if isinstance(symbols, Tensor) else np.asarray(symbols)
    if array.shape != (size,) or array.dtype.kind not in "iu":
        raise InputError(f"index: expected a row of {size} integers, got {array.dtype} of shape {array.shape}")
    if size and not 0 <= int(array.min()) <= int(array.max()) < alphabet:
        raise InputError(f"index: expected symbols in 0..{alphabet - 1}, got {array.min()}..{array.max()}")
    array = array.astype(np.int64, copy=False)
    roots = _roots(np.bincount(array, minlength=alphabet))
    shared = _Shared.of(roots)
    ranks = shared.ranks(alphabet)[array]
    tables = [_fit(ranks[where], where, shared) for where in _slices(parts)]
    levels = np.array([table.level for table in tables], np.int64)
    squeezed = _squeeze(np.concatenate([levels, roots, *(table.roots for table in tables)]))
    states, words = _push(ranks, tables, shared)
    coded = states.astype("<u8").tobytes() + words.astype("<u4").tobytes()
    body = len(squeezed).to_bytes(4, "little") + squeezed + coded
    return MAGIC + _digest(body, alphabet, parts) + body


def decode(data: bytes, alphabet: int, parts: Sequence[int]) -> Tensor:
    """Return the symbols (n,), int64, that `encode` was given.

    Memory stays within a small multiple of n + alphabet + the length of the data, whatever the data are.

    Args:
        data: what `encode` returned.
        alphabet: as it was encoded with.
        parts: as it was encoded with.

    Raises:
        InputError: the data are damaged, or belong to another alphabet or other parts.
    """
    size = _check(alphabet, parts)
    head = len(MAGIC) + DIGEST
    body = memoryview(data)[head:]
    if len(body) < 4 or data[: len(MAGIC)] != MAGIC:
        raise InputError("index: not written by peerbayes, or truncated (its first bytes are wrong)")
    if data[len(MAGIC) : head] != _digest(body, alphabet, parts):
        raise InputError("index: damaged, or made for other components or layers (its digest does not match)")
    # An attacker can change the digest, too: trust nothing below.
    start = 4 + int.from_bytes(body[:4], "little")
    first = start + 8 * _lanes(size)
    if first > len(body) or (len(body) - first) % 4:
        raise InputError("index: damaged (its tables and states do not fit into its length)")
    where = _slices(parts)
    shared, tables = _read_tables(_unsqueeze(body[4:start], len(where) + alphabet + 2 * size), alphabet, where)
    states = np.frombuffer(body[start:first], "<u8").astype(np.uint64)
    words = np.frombuffer(body[first:], "<u4").astype(np.uint64)
    return torch.from_numpy(_pop(states, words, size, tables, shared))


def arrange(symbols: NDArray[np.integer] | Tensor, means: NDArray[np.floating] | Tensor, parts: Sequence[int]) -> Ints:
    """Return the components' numbers (K,) in an order that codes well, to renumber them by.

    By the layer their weights are in on average, rounded, then by mean. Symbols of K and above are left out.

    Args:
        symbols: the component of each weight, (n,).
        means: of the components, (K,).
        parts: weights of each layer.
    """
    array, values = np.asarray(symbols), np.asarray(means)
    count, total = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
    for number, where in enumerate(_slices(parts)):
        part = array[where]
        counts = np.bincount(part[part < len(values)], minlength=len(values))
        count, total = count + counts, total + counts * number
    layers = total / np.maximum(count, 1)
    return np.lexsort((values, np.rint(layers)))


def _check(alphabet: int, parts: Sequence[int]) -> int:
    """Return the number of symbols."""
    size = sum(parts)
    if not 1 <= alphabet <= LARGEST_ALPHABET:
        raise InputError(f"index: expected 1 to {LARGEST_ALPHABET} kinds of symbols, got {alphabet}")
    if min(parts, default=0) < 0 or size > LARGEST_SIZE:
        raise InputError(f"index: expected parts of 0 or more symbols, up to {LARGEST_SIZE} in all, got {size}")
    return size


def _digest(body: bytes | memoryview, alphabet: int, parts: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(f"{alphabet} {[int(part) for part in parts]} ".encode(), digest_size=DIGEST)
    digest.update(body)
    return digest.digest()


def _slices(parts: Sequence[int]) -> list[slice]:
    """Return the slices of the parts that are not empty."""
    ends = np.cumsum(np.array(parts, np.int64)).tolist()
    return [slice(end - part, end) for end, part in zip(ends, parts, strict=True) if part]


# ---- tables of frequencies -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frequencies:
    """A part's table: where the part lies, the level of its bins, and their roots (none at level 0: as all parts)."""

    where: slice
    level: int
    roots: Ints


@dataclass(frozen=True)
class _Code:
    """Frequencies (m,) as the coder wants them: symbol s owns ``width[s]`` slots from ``start[s]``."""

    frequencies: Ints

    @cached_property
    def width(self) -> Words:
        return self.frequencies.astype(np.uint64)

    @cached_property
    def start(self) -> Words:
        return np.cumsum(self.width) - self.width

    @cached_property
    def owner(self) -> Ints:
        """The symbol of every slot."""
        return np.repeat(np.arange(len(self.frequencies)), self.frequencies)


@dataclass(frozen=True)
class _Shared:
    """The table of all parts together: the symbols that occur (m,), ascending, and their mass, integers as floats.

    Every part's frequencies sum to ``1 << bits``.
    """

    symbols: Ints
    mass: Floats

    @classmethod
    def of(cls, roots: Ints) -> _Shared:
        symbols = np.flatnonzero(roots)
        return cls(symbols, np.square(roots[symbols]).astype(np.float64))

    @cached_property
    def bits(self) -> int:
        length = len(self.symbols).bit_length()
        return max(16, min(18, length + 5), length + 1)  # more than two slots a symbol

    @cached_property
    def code(self) -> _Code:
        """The code of a part that has no table."""
        return _Code(_frequencies(self.mass, self.bits))

    def ranks(self, alphabet: int) -> Ints:
        """Return each symbol's index among those that occur, (alphabet,)."""
        ranks = np.zeros(alphabet, np.int64)
        ranks[self.symbols] = np.arange(len(self.symbols))
        return ranks

    def finest(self, size: int) -> int:
        """Return the highest level open to a part of this size, which bounds the bins of all parts by 2 n."""
        if size < LEAST_OWN or 16 * size < len(self.symbols):
            return 0
        return min((len(self.symbols) - 1).bit_length(), size.bit_length())

    def starts(self, level: int) -> Ints:
        """Return the first symbol of every bin: ``1 << level`` bins or fewer, of about equal mass."""
        if 1 << level >= len(self.symbols):
            return np.arange(len(self.symbols))
        middle = np.cumsum(self.mass) - np.floor(self.mass / 2)
        bins = np.floor(middle * (1 << level) / (self.mass.sum() + 1))
        return np.flatnonzero(np.diff(bins, prepend=-1))

    def code_of(self, table: _Frequencies) -> _Code:
        """Return a part's code."""
        if table.level == 0:
            return self.code
        starts = self.starts(table.level)
        lengths = np.diff(starts, append=len(self.symbols))
        counts = np.repeat(np.square(table.roots) * 4096.0, lengths)  # 4096: for the symbols of a bin to differ
        weights = np.ceil(counts * self.mass / np.repeat(np.add.reduceat(self.mass, starts), lengths))
        return _Code(_frequencies(weights, self.bits))


def _frequencies(weights: Floats, bits: int) -> Ints:
    """Return integers that sum to ``1 << bits``, in proportion to integer weights, 0 for weight 0 only."""
    used = np.flatnonzero(weights)
    unit = 62 - 2 * bits
    shares = np.floor(weights[used] / weights.sum() * 2.0 ** (bits + unit)).astype(np.int64)
    excess = np.maximum(shares - (1 << unit), 0)  # shares beyond the 1 that every symbol has
    room = (1 << bits) - len(used)
    whole, rest = np.divmod(excess * room, excess.sum())
    whole[np.argsort(-rest, kind="stable")[: room - whole.sum()]] += 1
    frequencies = np.zeros(len(weights), np.int64)
    frequencies[used] = whole + 1
    return frequencies


def _roots(counts: Ints) -> Ints:
    """Return square roots, rounded: 0 for 0 only."""
    return np.rint(np.sqrt(counts)).astype(np.int64)


def _adds_up(roots: Ints, size: int) -> bool:
    """Return whether ``size`` symbols can have counts of these roots: r comes from r² - r + 1 to r² + r."""
    squares, ones = int(np.square(roots).sum()), np.count_nonzero(roots)
    return bool(squares - int(roots.sum()) + ones <= size <= squares + int(roots.sum()))


def _fit(ranks: Ints, region: slice, shared: _Shared) -> _Frequencies:
    """Return the table that codes a part in the fewest bytes, its own included."""
    counts = np.bincount(ranks, minlength=len(shared.symbols))
    used = np.flatnonzero(counts)

    def size(table: _Frequencies) -> float:
        bits = shared.bits - np.log2(shared.code_of(table).frequencies[used])
        return float(counts[used] @ bits) / 8 + len(_squeeze(table.roots))

    tables = [_Frequencies(region, 0, np.zeros(0, np.int64))]
    for level in range(1, shared.finest(len(ranks)) + 1):
        tables.append(_Frequencies(region, level, _roots(np.add.reduceat(counts, shared.starts(level)))))
    return min(tables, key=size) if len(tables) > 1 else tables[0]


def _read_tables(values: Ints, alphabet: int, regions: list[slice]) -> tuple[_Shared, list[_Frequencies]]:
    """Return the tables that `encode` put into these integers."""
    end = len(regions) + alphabet
    levels, roots = values[: len(regions)].tolist(), values[len(regions) : end]
    if len(values) < end or not _adds_up(roots, regions[-1].stop if regions else 0):
        raise InputError("index: damaged (its shared table does not add up to the number of weights)")
    shared, tables = _Shared.of(roots), []
    for part, level in zip(regions, levels, strict=True):
        size = part.stop - part.start
        if level > shared.finest(size):
            raise InputError(f"index: damaged (a layer of {size} weights with a table of level {level})")
        start, end = end, end + (len(shared.starts(level)) if level else 0)
        part_roots = values[start:end]
        if level and not (end <= len(values) and _adds_up(part_roots, size)):
            raise InputError(f"index: damaged (the table of a layer of {size} weights does not add up to them)")
        tables.append(_Frequencies(part, level, part_roots))
    if end != len(values):
        raise InputError("index: damaged (its tables have a wrong length)")
    return shared, tables


def _squeeze(values: Ints) -> bytes:
    """Pack integers of 16 bits, low bytes first and high bytes after them, by LZMA (for its adaptive literals)."""
    return lzma.compress(values.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes(), lzma.FORMAT_RAW, filters=LZMA)


def _unsqueeze(data: memoryview, most: int) -> Ints:
    """Unpack at most so many integers."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA)
    try:
        plain = decompressor.decompress(data, 2 * most + 1)
    except lzma.LZMAError:
        raise InputError("index: damaged (its tables cannot be unpacked)") from None
    if not decompressor.eof or decompressor.unused_data or len(plain) % 2:
        raise InputError("index: damaged (its tables have a wrong length)")
    return np.frombuffer(plain, np.uint8).reshape(2, -1).T.copy().view("<u2").reshape(-1).astype(np.int64)


# ---- the coder -------------------------------------------------------------------------------------------------------


def _lanes(size: int) -> int:
    return -(-size // STEPS)


def _push(ranks: Ints, tables: list[_Frequencies], shared: _Shared) -> tuple[Words, Words]:
    """Code all parts, the last symbol first; return the lanes' states and the words, in the order they are read."""
    lanes, bits = _lanes(len(ranks)), np.uint64(shared.bits)
    states, words = np.full(lanes, LOW), [np.zeros(0, np.uint64)]
    for table in reversed(tables):
        code, part = shared.code_of(table), ranks[table.where]
        width, start = code.width[part], code.start[part]
        for row in reversed(range(0, len(part), lanes)):
            wide = width[row : row + lanes]
            state = states[: len(wide)]
            full = np.flatnonzero(state >> (np.uint64(64) - bits) >= wide)
            words.append(state[full] & (LOW - np.uint64(1)))
            state[full] >>= WORD
            whole, rest = np.divmod(state, wide)
            state[:] = (whole << bits) + rest + start[row : row + lanes]
    return states, np.concatenate(words[::-1])


def _pop(states: Words, words: Words, size: int, tables: list[_Frequencies], shared: _Shared) -> Ints:
    """Undo `_push` and return the symbols: all states must end where it began, and all words be used."""
    lanes, bits, mask = len(states), np.uint64(shared.bits), np.uint64((1 << shared.bits) - 1)
    symbols, used = np.empty(size, np.int64), 0
    for table in tables:
        code, ranks = shared.code_of(table), symbols[table.where]
        for row in range(0, len(ranks), lanes):
            state = states[: len(ranks) - row]
            slot = state & mask
            rank = code.owner[slot.view(np.int64)]
            ranks[row : row + lanes] = rank
            state[:] = code.width[rank] * (state >> bits) + (slot - code.start[rank])
            short = np.flatnonzero(state < LOW)
            if used + len(short) > len(words):
                raise InputError("index: damaged (it ends before the last weight)")
            state[short] = (state[short] << WORD) | words[used : used + len(short)]
            used += len(short)
        ranks[:] = shared.symbols[ranks]
    if used != len(words) or (states != LOW).any():
        raise InputError("index: damaged (its last weight is not where its data end)")
    return symbols
