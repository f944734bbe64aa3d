"""Posteriors on coarse grids, against numpy: values, errors and bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from peerbayes import Address, MeanField, Point
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.rounding import forms, rounded_means, rounded_scales
from peerbayes.codebook.shared import Shared
from peerbayes.posteriors import RankOne


def net():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
    network[1](torch.randn(8, 6, 2, 2))
    return network.eval()


WEIGHTS, BIASES, REST, COUNTERS = 6 * 2 * 9 + 24 * 5, 6 + 5, 4 * 6, 1
CHANNELS, TENSORS = 6 + 5, 4


def by_name(posterior):
    return {form.name: form for form in forms(posterior)}


def heavy(shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_t(4, shape).astype(np.float32) * 0.1


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_means_are_multiples_of_a_step_a_channel_and_no_others_are_nearer(bits):
    values = heavy((7, 3, 12, 12))
    values[3] = 0
    found, size = rounded_means(torch.from_numpy(values), bits)
    assert size == np.ceil(values.size * bits / 8) + 4 * 7
    most = 2 ** (bits - 1) - 1
    for given, now in zip(values.reshape(7, -1).astype(np.float64), found.numpy().reshape(7, -1)):
        levels = np.unique(np.abs(now))
        assert len(levels) <= most + 1
        if not given.any():
            assert not now.any()
            continue
        # Every other step, from a fine search.
        error = np.inf
        for step in np.linspace(0.25, 1, 400) * np.abs(given).max() / most:
            error = min(error, np.square(np.clip(np.rint(given / step), -most, most) * step - given).sum())
        largest = np.abs(given).max() / most
        assert np.square(now - given).sum() <= np.square(np.rint(given / largest) * largest - given).sum() * 1.000001
        assert np.square(now - given).sum() < 1.1 * error
        step = np.abs(now[now != 0]).min() / np.arange(1, most + 1)
        multiples = np.abs(now[:, None] / step - np.rint(now[:, None] / step)).max(0)
        assert multiples.min() < 1e-3


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_scales_lie_on_a_logarithmic_grid(bits):
    std = np.exp(np.random.default_rng(bits).normal(-7, 0.4, 3001))
    found, size = rounded_scales(torch.from_numpy(std), bits)
    assert size == np.ceil(3001 * bits / 8) + 8
    logs = np.log2(np.unique(found.numpy()))
    assert len(logs) <= 2**bits
    steps = np.diff(logs)
    np.testing.assert_allclose(steps / steps.min(), np.rint(steps / steps.min()), atol=1e-3)
    wide = np.log2(std).max() - np.log2(std).min()
    grid = np.log2(std).min() + wide * np.rint((np.log2(std) - np.log2(std).min()) / wide * (2**bits - 1)) / (
        2**bits - 1
    )
    error, plain = (np.square(x - np.log2(std)).mean() for x in (np.log2(found.numpy()), grid))
    assert error <= plain


def test_one_bit_is_the_best_pair_of_levels():
    generator = np.random.default_rng(3)
    logs = np.concatenate([generator.normal(-12, 0.3, 700), generator.normal(-9, 0.5, 300)])
    found, _ = rounded_scales(torch.from_numpy(2**logs), 1)
    ordered = np.sort(logs)
    errors = [np.var(ordered[:n]) * n + np.var(ordered[n:]) * (1000 - n) for n in range(1, 1000)]
    assert np.square(np.log2(found.numpy()) - logs).sum() == pytest.approx(min(errors), rel=1e-3)


def test_equal_scales_stay_what_they_are():
    found, size = rounded_scales(torch.full((10,), 0.01), 1)
    torch.testing.assert_close(found, torch.full((10,), 0.01, dtype=torch.float64), rtol=1e-6, atol=0)
    assert size == 2 + 8


def test_forms_of_a_mean_field_posterior():
    posterior = MeanField(net(), prior="anchored", seed=4, name="a")
    before = {name: tensor.clone() for name, tensor in posterior.state().items()}
    found = by_name(posterior)
    assert list(found) == [
        "float32",
        "float16",
        *(f"int8, {bits}-bit scales" for bits in (8, 4, 2, 1)),
        "network, float32",
        "network, int8",
        "network, 3 bits",
    ]
    every = WEIGHTS + BIASES
    assert found["float32"].bytes == 8 * every + 4 * REST + 8 * COUNTERS
    assert found["float16"].bytes == 4 * every + 2 * REST + 8 * COUNTERS
    common = WEIGHTS + 4 * CHANNELS + 2 * BIASES + 2 * REST + 8 * COUNTERS
    assert found["int8, 8-bit scales"].bytes == common + every + 8 * TENSORS
    sizes = [108, 6, 120, 5]  # of the tensors
    assert found["int8, 1-bit scales"].bytes == common + sum(-(-size // 8) for size in sizes) + 8 * TENSORS
    assert found["network, float32"].bytes == 4 * (every + REST) + 8 * COUNTERS
    few = sum(-(-size * 3 // 8) for size in (108, 120))
    assert found["network, 3 bits"].bytes == few + 4 * CHANNELS + 2 * BIASES + 2 * REST + 8 * COUNTERS

    half = found["float16"].posterior
    assert np.array_equal(half.mean.detach(), posterior.mean.detach().numpy().astype(np.float16).astype(np.float32))
    expected = posterior.std.detach().numpy().astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(half.std.detach(), expected, rtol=1e-5)
    eight = found["int8, 2-bit scales"].posterior
    for name in ("0.weight", "4.weight"):
        mean, _ = rounded_means(before[f"mean/{name}"], 8)
        std, _ = rounded_scales(F.softplus(before[f"rho/{name}"].double()), 2)
        assert torch.equal(eight.state()[f"mean/{name}"], mean)
        torch.testing.assert_close(F.softplus(eight.state()[f"rho/{name}"].double()), std, rtol=1e-5, atol=0)
    assert torch.equal(eight.state()["network/1.running_var"], before["network/1.running_var"].half().float())
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.state().items())
    assert (eight.seed, eight.name) == (4, "a")


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_scales_of_zero_count_as_the_least_of_the_others_or_of_float16(bits):
    some = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25], dtype=torch.float64)
    found, size = rounded_scales(some, bits)
    expected, _ = rounded_scales(some.clamp_min(0.25), bits)
    assert torch.equal(found, expected)
    assert found[0] > 0.2
    none, same = rounded_scales(torch.zeros(5, dtype=torch.float64), bits)
    assert (none == 2.0**-24).all()
    assert size == same


def test_what_float16_would_spoil_keeps_its_type_and_no_scale_becomes_zero():
    network = net()
    plain = by_name(MeanField(network, rho=-25.0))
    network[1].running_var[2] = 1e6
    posterior = MeanField(network, rho=-25.0)
    found = by_name(posterior)
    for name in ("float16", "int8, 8-bit scales", "network, int8"):
        assert torch.equal(found[name].posterior.network[1].running_var, network[1].running_var)
        assert found[name].bytes == plain[name].bytes + 2 * 6
    assert found["float32"].bytes == plain["float32"].bytes
    # e^-25 is 1.4e-11, and the smallest number of float16 is 2^-24.
    np.testing.assert_allclose(found["float16"].posterior.std.detach(), 2.0**-24, rtol=1e-5)


def test_a_point_is_its_own_network():
    found = by_name(Point(net()))
    assert list(found) == ["network, float32", "network, int8", "network, 3 bits"]
    images = torch.rand(3, 2, 4, 4)
    whole = Point(net()).predict(images).log_probabilities
    assert torch.equal(found["network, float32"].posterior.predict(images).log_probabilities, whole)
    near, far = (found[name].posterior.predict(images).log_probabilities for name in list(found)[1:])
    assert 0 < (near - whole).abs().max() < (far - whole).abs().max() < 1


@pytest.mark.parametrize("gaussian", [True, False])
def test_forms_of_a_rank_one_posterior(gaussian):
    posterior = RankOne(net(), members=3, factors="random", gaussian=gaussian)
    found = by_name(posterior)
    factors = 3 * (2 + 6 + 24 + 5)
    assert found["float32"].bytes == 4 * (WEIGHTS + BIASES + factors * (1 + gaussian) + REST) + 8 * COUNTERS
    assert ("int8" in found) == (not gaussian)
    assert ("int8, 4-bit scales" in found) == gaussian
    small = found["int8, 4-bit scales" if gaussian else "int8"].posterior
    images = torch.rand(3, 2, 4, 4)
    near, whole = (p.predict(images).probabilities for p in (small, posterior))
    assert 0 < (near - whole).abs().max() < 0.05


def test_a_shared_posterior_is_taken_weight_by_weight():
    generator = torch.Generator().manual_seed(0)
    none = torch.empty(0, dtype=torch.int64)
    codebook = Codebook(
        component=torch.rand(9, 2, generator=generator) * 0.1,
        cholesky=torch.rand(9, 3, generator=generator) * 0.01,
        label=torch.randint(9, (WEIGHTS,), generator=generator),
        blended=none,
        blend_component=none.view(0, 2),
        blend_weight=torch.empty(0, 2),
        outlier=torch.arange(5),
        outlier_mean=torch.randn(5, generator=generator),
        outlier_std=torch.full((5,), 0.02),
    )
    posterior = Shared(net(), codebook, sampling="moment", seed=3, name="b")
    whole = by_name(posterior)["float32"]
    assert whole.bytes == 8 * WEIGHTS + 4 * (BIASES + REST) + 8 * COUNTERS
    address = Address(0, "b", "draw")
    torch.testing.assert_close(whole.posterior.draw(address).flat, posterior.draw(address).flat)
    assert (whole.posterior.seed, whole.posterior.name) == (3, "b")
