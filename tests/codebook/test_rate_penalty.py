import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peerbayes.codebook import clustering as thrift
from peerbayes.codebook.build import Sharing, share
from peerbayes.codebook.clustering import kmeans, thrifty
from peerbayes.codebook.coder import encode
from peerbayes.codebook.neighbours import nearest
from peerbayes.errors import InputError
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField


def normal_points(n=60_000, scale=1.0, seed=0):
    drawn = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return torch.stack([drawn, torch.full_like(drawn, 1e-3)], 1)


def distortion_and_bits(points, centres, labels, part):
    """By counting, with NumPy."""
    square = ((points - centres[labels]) ** 2).sum(1).numpy()
    bits = np.zeros(len(points))
    for one in np.unique(part):
        here = labels.numpy()[part.numpy() == one]
        share_of = np.bincount(here) / len(here)
        bits[part.numpy() == one] = -np.log2(share_of[here])
    return square.mean(), bits.mean()


@pytest.mark.parametrize("worth", [1e-4, 1e-3, 1e-2])
def test_a_gaussian_takes_a_quarter_of_a_bit_more_than_shannons_bound(worth):
    points = normal_points()
    centres, labels = thrifty(points, torch.zeros(len(points), dtype=torch.int64), worth)
    distortion, bits = distortion_and_bits(points, centres, labels, torch.zeros(len(points), dtype=torch.int64))
    bound = 0.5 * math.log2(1 / distortion)  # R(D) of a standard normal
    assert bound < bits < bound + 0.5 * math.log2(2 * math.pi * math.e / 12) + 0.01
    # What k-means needs for the same exactness.
    count = round(2 ** (bound + 1))
    plain = kmeans(points, count, Address(0, "test", "kmeans"))
    theirs = distortion_and_bits(points, plain, nearest(points, plain)[:, 0], torch.zeros(len(points)).long())
    assert theirs[1] - 0.5 * math.log2(1 / theirs[0]) > bits - bound


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 0.1), st.integers(0, 2)), min_size=1, max_size=60),
    st.floats(1e-4, 1.0),
)
def test_no_step_makes_it_dearer_and_each_centre_is_the_mean_of_its_points(rows, worth):
    points = torch.tensor([row[:2] for row in rows], dtype=torch.float64)
    part = torch.tensor([row[2] for row in rows])
    before = math.inf
    for steps in range(5):
        centres, labels = thrifty(points, part, worth, steps=steps)
        assert labels.unique().tolist() == list(range(len(centres)))
        for number, centre in enumerate(centres):
            torch.testing.assert_close(points[labels == number].mean(0), centre)
        distortion, bits = distortion_and_bits(points, centres, labels, part)
        # Half a point more in every count keeps bits finite, and is all that may make a step a little dearer.
        assert distortion + worth * bits <= before + worth * math.log2(1 + len(centres) / 2)
        before = distortion + worth * bits


def test_a_step_gives_every_point_its_cheapest_centre():
    points = torch.cat([normal_points(400, 1.0, 1), normal_points(400, 0.2, 2)])
    part, worth = torch.arange(2).repeat_interleave(400), 0.02
    before, first = thrifty(points, part, worth, steps=0)
    count = np.zeros((2, len(before))) + 0.5
    np.add.at(count, (part.numpy(), first.numpy()), 1)
    bits = -np.log2(count / count.sum(1, keepdims=True))
    cost = ((points[:, None] - before) ** 2).sum(2).numpy() + worth * bits[part.numpy()]
    after, labels = thrifty(points, part, worth, steps=1)
    kept = np.unique(cost.argmin(1))
    assert (kept[labels.numpy()] == cost.argmin(1)).all()
    assert len(after) == len(kept)
    assert (labels != first).any()


def test_a_thrifty_codebook_takes_fewer_bytes_at_the_same_exactness():
    network = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    for layer, scale in zip(network, (0.05, 0.01), strict=True):
        nn.init.normal_(layer.weight, std=scale, generator=torch.Generator().manual_seed(0))
    posterior, found = MeanField(network, gain=0.01, start_from=network), []
    mean = torch.cat([layer.weight.detach().flatten() for layer in network])
    for options in ({"components": 64}, {"thrift": 1.7e-3}):
        book, account = share(posterior, Sharing(**options, outliers=False, blend=False, merge={"distance": 0}), None)
        assert account["components"] == len(book.component)
        error = (mean - book.component[book.label, 0]).square().mean().item()
        found.append((len(encode(book.label, len(book.component), [60_000, 20_000])), error))
    (plain_size, plain_error), (size, error) = found
    assert size < 0.97 * plain_size
    assert error < plain_error


@pytest.mark.parametrize("worth", [0.0, -1.0, math.nan, math.inf])
def test_a_bit_is_worth_something(worth):
    with pytest.raises(InputError, match=r"worth is .*: expected a positive number"):
        thrifty(normal_points(10), torch.zeros(10, dtype=torch.int64), worth)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_said_to_be_one(value):
    points = normal_points(10)
    points[3, 0] = value
    with pytest.raises(InputError, match="points has entries that are not finite"):
        thrifty(points, torch.zeros(10, dtype=torch.int64), 1e-3)


@pytest.mark.parametrize("count", [1, 100])
def test_weights_that_are_all_the_same_are_one_component(count):
    network = nn.Linear(count, 1)
    nn.init.constant_(network.weight, 0.05)
    posterior = MeanField(network, gain=0.01, start_from=network)
    book, account = share(posterior, Sharing(thrift=0.006, outliers=False), None)
    assert account["components"] == 1
    torch.testing.assert_close(book.component[0, 0], torch.tensor(0.05))


def test_so_much_thrift_leaves_one_component_and_so_little_is_refused():
    posterior = MeanField(network := nn.Linear(400, 200), gain=0.1, start_from=network)
    book, _ = share(posterior, Sharing(thrift=1e6, outliers=False), None)
    assert len(book.component) == 1
    torch.testing.assert_close(book.component[0, 0], network.weight.detach().mean(), rtol=0, atol=1e-7)
    for small in (1e-15, 1e-300):  # with more squares than are allowed, and more than can be told apart
        with pytest.raises(InputError, match=r"thrift is too small: .* more than 65,536 squares"):
            share(posterior, Sharing(thrift=small, outliers=False), None)


@pytest.mark.parametrize("near", [1, 8])
def test_of_many_centres_the_near_ones_are_looked_at_and_it_is_still_the_cheapest_of_all(near, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(3000, 2, generator=generator, dtype=torch.float64)
    part = torch.arange(3).repeat_interleave(1000)
    monkeypatch.setattr(thrift, "MANY", 10**6)
    plain = thrifty(points, part, 1e-3)
    assert len(plain[0]) > 500
    monkeypatch.setattr(thrift, "MANY", 100)
    monkeypatch.setattr(thrift, "NEAREST", near)
    calls, nearby = [], thrift.nearest
    monkeypatch.setattr(thrift, "nearest", lambda *given: calls.append(given) or nearby(*given))
    for expected, found in zip(plain, thrifty(points, part, 1e-3), strict=True):
        assert torch.equal(found, expected)
    assert calls
