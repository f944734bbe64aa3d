"""Nearest centres against all distances and a tree."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from points import normal, weights
from scipy.spatial import cKDTree

from peerbayes.codebook.neighbours import nearest
from peerbayes.errors import InputError


def all_distances(points, centres):
    return (points[:, None] - centres).square_().sum(2)


def brute(points, centres, count):
    """The nearest by a stable sort of all distances: of equal ones the lower index."""
    return all_distances(points, centres).argsort(dim=1, stable=True)[:, :count]


@pytest.mark.parametrize("spread", [1e-9, 1e-4, 1e-3, 5e-2, 3.0])
@pytest.mark.parametrize("axes", [[0, 1], [1, 0]])
def test_nearest_agrees_with_a_tree(spread, axes):
    points = weights(20000, spread)[:, axes]
    centres = weights(700, spread, seed=7)[:, axes]
    expected = cKDTree(centres.numpy()).query(points.numpy(), 5)[1]
    assert np.array_equal(nearest(points, centres)[:, 0].numpy(), expected[:, 0])
    assert np.array_equal(nearest(points, centres, 5).numpy(), expected)


CASES = {
    "one centre": (normal(50, 2), normal(1, 2, seed=1)),
    "two centres": (normal(50, 2), normal(2, 2, seed=1)),
    "all centres at one place": (normal(50, 2), torch.ones(30, 2).double()),
    "centres twice": (normal(200, 2), normal(40, 2, seed=1).repeat(2, 1)),
    "points on centres": (normal(60, 2), normal(60, 2)),
    "all points at one place": (torch.zeros(50, 2).double(), normal(40, 2, seed=1)),
    "along x": (normal(200, 2), normal(60, 2, seed=1) * torch.tensor([1.0, 0.0])),
    "along y": (normal(200, 2), normal(60, 2, seed=1) * torch.tensor([0.0, 1.0])),
    "diagonal": (normal(200, 2), normal(60, 1, seed=1).expand(60, 2)),
    "a cross": (normal(300, 2), torch.cat([normal(40, 2, seed=1) * torch.tensor(a) for a in ([1.0, 0.0], [0.0, 1.0])])),
    "far outside": (1e3 * normal(100, 2), normal(300, 2, seed=1)),
    "very far outside": (1e12 * normal(100, 2), normal(300, 2, seed=1)),
    "a grid full of ties": (
        torch.cartesian_prod(torch.arange(30.0), torch.arange(30.0)).double() / 2,
        torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0)).double()[
            torch.randperm(144, generator=torch.Generator().manual_seed(0))
        ],
    ),
    "scales": (normal(300, 2) ** 9, normal(300, 2, seed=1) ** 9),
}


@pytest.mark.parametrize("case", CASES)
def test_nearest_is_exact_with_ties_to_the_lower_index(case):
    points, centres = CASES[case]
    for count in sorted({1, 2, 7, len(centres)}):
        if count <= len(centres):
            assert torch.equal(nearest(points, centres, count), brute(points, centres, count)), count


coordinate = st.one_of(st.integers(-3, 3).map(float), st.floats(-1, 1), st.floats(-1e6, 1e6))
places = st.lists(st.tuples(coordinate, coordinate), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(places, places, st.integers(1, 40))
def test_nearest_is_exact_for_any_places(points, centres, count):
    points, centres = torch.tensor(points).double(), torch.tensor(centres).double()
    count = min(count, len(centres))
    assert torch.equal(nearest(points, centres, count), brute(points, centres, count))


def test_the_count_may_be_more_than_is_looked_at_together():
    points, centres = normal(40, 2), normal(300, 2, seed=1)
    assert torch.equal(nearest(points, centres, 300), brute(points, centres, 300))


def test_parts_do_not_matter():
    points, centres = weights(130_000, 5e-2), weights(50, 5e-2, seed=5)
    found = nearest(points, centres)
    assert torch.equal(found[110_000:], nearest(points[110_000:], centres))
    assert torch.equal(found, brute(points, centres, 1))


def test_clusters_finer_than_float32_are_told_apart():
    """Centres 1e-9 apart at 0.2 are one number in float32."""
    centres = 0.2 + 1e-9 * torch.cartesian_prod(torch.arange(20.0), torch.arange(20.0)).double()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nearest(centres[order] + 3e-10, centres)[:, 0], order)


def test_no_points_and_absent_centres():
    centres = normal(10, 2)
    assert nearest(torch.empty(0, 2), centres, 3).shape == (0, 3)
    absent = centres.clone()
    absent[[2, 5]] = torch.nan
    left = torch.tensor([0, 1, 3, 4, 6, 7, 8, 9])
    points = normal(100, 2, seed=3)
    assert torch.equal(nearest(points, absent, 4), left[brute(points, centres[left], 4)])


def test_wrong_arguments_are_told():
    points = normal(10, 2)
    with pytest.raises(InputError, match="count is 11 and there are 10 centres: expected 1 to 10"):
        nearest(points, points, 11)
    with pytest.raises(InputError, match=r"points is a torch.float64 tensor of shape \(20,\)"):
        nearest(points.flatten(), points)
    for value in (torch.nan, torch.inf, -torch.inf, 1e151):
        for name, pair in (("points", (points.clone(), points)), ("centres", (points, points.clone()))):
            pair[name == "centres"][3, 1] = value
            if name == "points" or value == value:  # a centre that is not a number is nowhere
                with pytest.raises(InputError, match=f"{name} has entries that are not finite"):
                    nearest(*pair)
    with pytest.raises(InputError, match="centres has entries that are not finite"):
        nearest(points, points * torch.inf)
