"""Store which component each shared weight belongs to in few bits, and look it up again by tensor operations alone."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from peerbayes.codebook.file import index_of
from peerbayes.codebook.shared import Shared
from peerbayes.posteriors.base import Posterior

WORD = 32  # bits of a word that symbols are packed into


class PackedRows(nn.Module):
    """The rows of a codebook's weights in ⌈log₂(K + 2)⌉ bits a weight, next to each other in words of 32 bits.

    A symbol is the weight's component, K for an outlier or K + 1 for a blended weight, which follow one another in the
    order of the weights, so that only their number has to be counted.

    Args:
        posterior: of shared weights.
    """

    words: Tensor

    def __init__(self, posterior: Shared) -> None:
        super().__init__()
        self.components, self.blended = len(posterior.component), len(posterior.blended)
        self.size = posterior.layout.size
        self.bits = (self.components + 1).bit_length()
        self.register_buffer("words", pack(index_of(posterior), self.bits))

    def forward(self) -> Tensor:
        """Return the row of every weight, int64 (size,), as `peerbayes.codebook.book.rows_of` does."""
        symbols = unpack(self.words, self.bits, self.size)
        outlier, blended = symbols == self.components, symbols == self.components + 1
        first = self.components - 1
        rows = torch.where(blended, blended.long().cumsum(0) + first, symbols)
        return torch.where(outlier, outlier.long().cumsum(0) + (first + self.blended), rows)


def packed_rows_of(posterior: Posterior) -> PackedRows | None:
    """Return the rows of a posterior of shared weights, or None."""
    return PackedRows(cast(Shared, posterior)) if posterior.made_of_posterior else None


def pack(symbols: Tensor, bits: int) -> Tensor:
    """Return numbers below 2^bits, (n,), in words of 32 bits, int32; the last word is 0.

    Args:
        symbols: whole numbers.
        bits: of each, at most 32.
    """
    begin = torch.arange(len(symbols)) * bits
    word, shift = begin // WORD, begin % WORD
    shifted = symbols.long() << shift  # of at most 63 bits
    words = torch.zeros(-(-len(symbols) * bits // WORD) + 1, dtype=torch.int64)
    words.index_add_(0, word, shifted & 0xFFFFFFFF).index_add_(0, word + 1, shifted >> WORD)
    return torch.where(words < 1 << (WORD - 1), words, words - (1 << WORD)).int()


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the numbers that `pack` packed, int64 (count,).

    Args:
        words: int32.
        bits: of each number.
        count: how many there are.
    """
    begin = torch.arange(count) * bits
    word, shift = begin >> 5, begin & (WORD - 1)
    low, high = ((words.index_select(0, index).long() & 0xFFFFFFFF) for index in (word, word + 1))
    # By its long name, which ONNX has an operator for. What the sign bit fills in on the left is masked out.
    return torch.bitwise_right_shift(low | (high << WORD), shift) & ((1 << bits) - 1)
