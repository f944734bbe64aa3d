"""Moments of members against numpy and wider arithmetic."""

import numpy as np
import pytest
import torch
from points import normal, weights

from peerbayes.codebook.merging import RIDGE, components_of
from peerbayes.codebook.neighbours import nearest
from peerbayes.errors import InputError


def test_moments_agree_with_numpy():
    points, labels = normal(500, 2) @ normal(2, 2, seed=1), torch.arange(500) % 7
    labels[labels == 3] = 2
    found, unbiased = components_of(points, labels, 7), components_of(points, labels, 7, correction=1)
    for k in (0, 1, 2, 4, 5, 6):
        members = points[labels == k].numpy()
        np.testing.assert_allclose(found.mean[k].numpy(), members.mean(0), rtol=1e-12)
        np.testing.assert_allclose(
            found.covariance[k].numpy(), np.cov(members.T, ddof=0) + RIDGE * np.eye(2), rtol=1e-12
        )
        np.testing.assert_allclose(unbiased.covariance[k].numpy(), np.cov(members.T) + RIDGE * np.eye(2), rtol=1e-12)
        assert float(found.count[k]) == len(members)
    assert float(found.count[3]) == 0
    assert bool(found.mean[3].isnan().all())
    assert 3 not in nearest(points, found.mean)


def test_variances_of_1e_10_hold_their_digits():
    """Against 64-bit mantissas: float32, or float64 as E[x²] − E[x]², would fail."""
    points = torch.tensor([0.19, 1.1e-3]) + normal(6000, 2) @ torch.tensor([[1e-5, 4e-6], [0.0, 5e-6]]).double()
    labels = torch.arange(6000) % 3
    found = components_of(points, labels, 3)
    for k in range(3):
        members = points[labels == k].numpy().astype(np.longdouble)
        mean = members.mean(0)
        expected = (members - mean).T @ (members - mean) / len(members) + RIDGE * np.eye(2, dtype=np.longdouble)
        np.testing.assert_allclose(found.mean[k].numpy(), mean.astype(float), rtol=3e-16)
        np.testing.assert_allclose(found.covariance[k].numpy(), expected.astype(float), rtol=1e-12)
        assert 1e-11 < float(found.covariance[k, 1, 1]) < 1e-10


def test_a_single_member_has_the_ridge_alone():
    found = components_of(torch.tensor([[0.1, 0.2], [0.1, 0.2], [5.0, 5.0]]), torch.tensor([0, 0, 1]), 2, correction=1)
    assert torch.equal(found.covariance, RIDGE * torch.eye(2).double().expand(2, 2, 2))


def test_the_order_of_points_does_not_matter():
    points, labels = weights(2000, 1e-4), torch.arange(2000) % 11
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    one, other = components_of(points, labels, 11), components_of(points[order], labels[order], 11)
    torch.testing.assert_close(one.covariance, other.covariance, rtol=1e-12, atol=0)


def test_wrong_arguments_are_told():
    points = normal(10, 2)
    with pytest.raises(InputError, match="labels are from 0 to 9: expected 0 to 8"):
        components_of(points, torch.arange(10), 9)
    with pytest.raises(InputError, match=r"labels is a torch.int64 tensor of shape \(9,\): expected int64 \(10,\)"):
        components_of(points, torch.arange(9), 9)
    with pytest.raises(InputError, match="labels are from -1 to 8"):
        components_of(points, torch.arange(10) - 1, 9)
    with pytest.raises(InputError, match="points has entries that are not finite"):
        components_of(points * torch.nan, torch.arange(10), 10)
