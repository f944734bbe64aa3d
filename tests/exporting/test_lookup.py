"""Rows of a codebook in few bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codebooks import book, net
from peerbayes import Shared
from peerbayes.codebook.book import rows_of
from peerbayes.exporting.lookup import PackedRows, pack, unpack


@given(st.integers(1, 24), st.integers(0, 200), st.integers(0, 1000))
def test_what_was_packed_comes_back(bits, count, seed):
    symbols = torch.randint(1 << bits, (count,), generator=torch.Generator().manual_seed(seed))
    words = pack(symbols, bits)
    assert words.dtype == torch.int32
    assert len(words) == -(-count * bits // 32) + 1
    assert torch.equal(unpack(words, bits, count), symbols)


def test_the_largest_symbols_come_back():
    for bits in range(1, 31):
        symbols = torch.full((67,), (1 << bits) - 1)
        assert torch.equal(unpack(pack(symbols, bits), bits, 67), symbols), bits


@pytest.mark.parametrize(("blended", "outliers"), [(7, 9), (0, 9), (7, 0), (0, 0)])
def test_rows_are_those_of_the_codebook(blended, outliers):
    posterior = Shared(net(), book(blended=blended, outliers=outliers))
    packed = PackedRows(posterior)
    assert packed.bits == 3  # 5 components, outliers and blended weights
    assert torch.equal(packed(), rows_of(posterior))
