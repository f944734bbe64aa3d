"""Numbers on coarse grids: how far they move, and that they stay where they are the second time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from peerbayes.codebook.file import fits_half, from_multiples, from_powers, to_multiples, to_powers
from peerbayes.posteriors.scales import inverse_softplus

FLOATS = st.lists(st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20), max_size=40)


@pytest.mark.parametrize("bits", [4, 8, 10, 16])
def test_multiples_are_those_of_numpy(bits):
    values = np.random.default_rng(bits).normal(0, 0.3, 5000).astype(np.float32)
    codes, step = to_multiples(torch.from_numpy(values), bits)
    most = 2 ** (bits - 1) - 1
    assert step == pytest.approx(np.abs(values).max() / most, rel=2**-16)
    expected = np.clip(np.rint(values.astype(np.float64) / step), -most, most)
    assert np.array_equal(codes.numpy(), expected)
    assert np.abs(from_multiples(codes, step).numpy() - values).max() <= step * 0.5001
    assert codes.dtype == (torch.int8 if bits <= 8 else torch.int16)


def test_powers_are_those_of_numpy():
    generator = np.random.default_rng(0)
    values = (generator.normal(size=5000) * np.exp(generator.normal(size=5000))).astype(np.float32)
    values[::100] = 0
    codes, top = to_powers(torch.from_numpy(values))
    found = from_powers(codes, top).numpy()
    size = np.abs(values.astype(np.float64))
    assert top == np.rint(8 * np.log2(size.max()))
    power = np.maximum(np.rint(8 * np.log2(np.where(size > 0, size, 1))), top - 126)
    np.testing.assert_allclose(found, np.sign(values) * 2 ** (power / 8), rtol=1e-6)
    far = size > 2.0 ** ((top - 126) / 8)
    assert np.abs(np.log2(np.abs(found[far]) / size[far])).max() <= 1 / 16 + 1e-6


@settings(max_examples=150, deadline=None)
@given(FLOATS, st.integers(4, 16))
def test_what_lies_on_a_grid_stays_there(numbers, bits):
    values = torch.tensor(numbers, dtype=torch.float32)
    codes, step = to_multiples(values, bits)
    again, same = to_multiples(from_multiples(codes, step), bits)
    assert torch.equal(again, codes)
    assert same == step
    codes, top = to_powers(values)
    again, still = to_powers(from_powers(codes, top))
    assert torch.equal(again, codes)
    assert still == top


def test_the_ends_of_float32_stay_finite():
    ends = torch.tensor([3.4028234e38, -3.4028234e38, 1e-45, 0.0])
    for values in (ends, ends[2:]):
        for bits in (4, 8, 16):
            codes, step = to_multiples(values, bits)
            assert from_multiples(codes, step).isfinite().all()
            assert torch.tensor(step).item() == step > 0  # float32 holds it
        found = from_powers(*to_powers(values))
        assert found.isfinite().all()
        assert torch.equal(found.sign(), values.sign())


@pytest.mark.parametrize(
    ("number", "fits"), [(1.0, True), (65504.0, True), (7e4, False), (1e-6, True), (1e-9, True), (-torch.inf, True)]
)
def test_what_float16_would_spoil_does_not_fit(number, fits):
    assert fits_half(torch.tensor([0.5, 0.0, number * (1 + 2**-12)])) == fits


def test_one_number_near_zero_does_not_keep_a_million_from_float16():
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 5e-3
    assert values.abs().min() < 1e-7  # of which float16 keeps no digit
    assert fits_half(values)
    assert not fits_half(values * 1e-4)  # where all are so
    assert not fits_half(torch.cat([values, torch.tensor([7e4])]))
    assert fits_half(torch.full((3,), -torch.inf))


def test_softplus_is_undone():
    values = torch.tensor([1e-6, 1e-3, 0.1, 1.0, 30.0], dtype=torch.float64)
    torch.testing.assert_close(F.softplus(inverse_softplus(values)), values)
    short = values.float()
    assert torch.equal(inverse_softplus(short), inverse_softplus(short.double()))
    assert inverse_softplus(torch.zeros(1)).item() == -torch.inf
