"""Outliers by counting, blends against scipy's densities point by point."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerbayes.codebook import outliers
from peerbayes.codebook.merging import components_of
from peerbayes.codebook.neighbours import nearest
from peerbayes.codebook.outliers import blends
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components, mahalanobis


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- outliers -----------------------------------------------------------------------------------------------------


def test_means_beyond_the_threshold():
    mean = torch.tensor([0.2, -0.2, 0.20001, -0.3, 0.0])
    assert outliers(mean, threshold=float(mean[0])).tolist() == [False, False, True, True, False]
    assert outliers(mean, threshold=1.0).sum() == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(0, 100))
def test_the_top_share_is_exact(count, percent):
    gradient = normal(count, seed=count)
    found = outliers(torch.zeros(count), gradient=gradient, top=percent / 100)
    assert int(found.sum()) == count * percent // 100
    if bool(found.any()) and not bool(found.all()):
        assert float(gradient[found].abs().min()) >= float(gradient[~found].abs().max())


def test_shares_are_taken_as_written():
    """0.29 · 100 is 28.999999999999996 in floating point."""
    assert int(outliers(torch.zeros(100), gradient=torch.arange(100.0), top=0.29).sum()) == 29


def test_equal_gradients_are_taken_by_index():
    gradient = torch.tensor([1.0, -1.0, 2.0, 1.0, -1.0])
    assert outliers(torch.zeros(5), gradient=gradient, top=0.6).tolist() == [True, True, True, False, False]
    assert outliers(torch.zeros(5), gradient=torch.zeros(5), top=0.4).tolist() == [True, True, False, False, False]


def test_either_rule_is_enough():
    mean, gradient = 0.1 * normal(2000), normal(2000, seed=1)
    both = outliers(mean, gradient=gradient, top=0.05)
    expected = outliers(mean) | outliers(torch.zeros(2000), gradient=gradient, top=0.05)
    assert torch.equal(both, expected)
    assert int(outliers(mean).sum()) == int((mean.abs() > 0.2).sum()) > 0


# ---- blends -------------------------------------------------------------------------------------------------------


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def codebook(count=30, seed=0):
    points = torch.tensor([0.05, 1e-3]) + normal(3000, 2, seed=seed) * torch.tensor([2e-4, 1e-4])
    labels = nearest(points, points[:count])[:, 0]
    return points, labels, components_of(points, labels, count)


def test_the_points_are_those_off_their_component():
    points, labels, found = codebook()
    index, _, _ = blends(points, labels, found)
    expected = [
        i
        for i, (x, k) in enumerate(zip(points.numpy(), labels.tolist(), strict=True))
        if (x - found.mean[k].numpy()) @ np.linalg.solve(found.covariance[k].numpy(), x - found.mean[k].numpy()) > 5.991
    ]
    assert index.tolist() == expected
    assert 20 < len(expected) < 1000
    everywhere, _, _ = blends(points, labels, found, level=-1.0)
    assert torch.equal(everywhere, torch.arange(3000))


@pytest.mark.parametrize(("candidates", "keep"), [(5, 2), (5, 1), (3, 3), (8, 4)])
def test_the_best_candidates_are_weighted_by_their_density(candidates, keep):
    points, labels, found = codebook()
    index, component, weight = blends(points, labels, found, candidates=candidates, keep=keep)
    models = [scipy.stats.multivariate_normal(m, c) for m, c in zip(found.mean.numpy(), found.covariance.numpy())]
    distance = (points[index][:, None] - found.mean).square().sum(2)
    for i, x in enumerate(points[index].numpy()):
        near = distance[i].argsort()[:candidates].tolist()
        density = {k: models[k].logpdf(x) for k in near}
        best = sorted(near, key=density.get, reverse=True)[:keep]
        assert component[i].tolist() == best
        part = np.exp(np.array([density[k] for k in best]) - density[best[0]])
        np.testing.assert_allclose(weight[i].numpy(), part / part.sum(), rtol=1e-6, atol=1e-300)


def test_more_columns_hold_the_candidates_within_the_level():
    """Components one on another: a point off its own is within the level of the wider ones."""
    width = float64([1e-6, 2e-5, 3e-5, 4e-5, 1e-6, 1e-6])
    mean = torch.zeros(6, 2).double()
    mean[:, 0] = 1e-7 * torch.arange(6)
    mean[4:, 0] = 1e-3
    found = Components(mean, width.square()[:, None, None] * torch.eye(2).double(), torch.ones(6).double())
    point, label = float64([[1e-5, 0.0]]), torch.tensor([0])
    index, component, weight = blends(point, label, found, columns=5)
    assert index.tolist() == [0]
    assert component.tolist() == [[1, 2, 3, 1, 1]]  # 0 and 4 are candidates, too, but far off
    assert weight[0, 3:].tolist() == [0.0, 0.0]
    density = [scipy.stats.multivariate_normal(mean[k], float(width[k]) ** 2).pdf(point[0]) for k in (1, 2, 3)]
    np.testing.assert_allclose(weight[0, :3].numpy(), density / np.sum(density), rtol=1e-10)
    two = blends(point, label, found)
    assert two[1].tolist() == [[1, 2]]
    np.testing.assert_allclose(two[2][0].numpy(), density[:2] / np.sum(density[:2]), rtol=1e-10)
    # At a low level nothing is within it, and the best two are kept all the same.
    low = blends(point, label, found, level=1e-9, columns=5)
    assert low[1].tolist() == [[1, 2, 1, 1, 1]]
    np.testing.assert_allclose(low[2][0].numpy(), [*two[2][0].tolist(), 0, 0, 0], rtol=1e-12)


def test_fewer_components_than_columns_are_padded():
    found = Components(torch.zeros(1, 2).double(), 1e-10 * torch.eye(2).double()[None], torch.ones(1).double())
    points = float64([[1e-3, 0.0], [1e-6, 0.0], [0.0, -1e-3]])
    index, component, weight = blends(points, torch.zeros(3).long(), found)
    assert index.tolist() == [0, 2]
    assert component.tolist() == [[0, 0], [0, 0]]
    assert weight.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_far_points_have_finite_weights():
    """Their densities are 0 in any floating point; the softmax of logarithms does not mind."""
    mean = float64([[0.0, 0.0], [1e-3, 0.0]])
    found = Components(mean, 1e-12 * torch.eye(2).double().repeat(2, 1, 1), torch.ones(2).double())
    points = float64([[0.5e-3, 1.0], [0.5e-3 + 1e-9, 1.0]])
    _, component, weight = blends(points, torch.zeros(2).long(), found)
    torch.testing.assert_close(weight.sum(1), torch.ones(2).double())
    torch.testing.assert_close(weight[0], float64([0.5, 0.5]), rtol=0, atol=1e-3)
    # log-odds (D₀² − D₁²)/2 = (1e-3 · 2e-9 / 1e-12)/2 = 1
    assert component[1, 0] == 1
    np.testing.assert_allclose(float((weight[1, 0] / weight[1, 1]).log()), 1.0, atol=1e-3)


def test_no_point_is_off():
    points, labels, found = codebook()
    index, component, weight = blends(points, labels, found, level=float("inf"))
    assert (index.shape, component.shape, weight.shape) == ((0,), (0, 2), (0, 2))
    assert float(mahalanobis(points, found.mean[labels], found.covariance[labels]).max()) > 5.991


def test_wrong_arguments_are_told():
    points, labels, found = codebook()
    with pytest.raises(InputError, match="keep is 6: expected 1 to 5"):
        blends(points, labels, found, keep=6)
    with pytest.raises(InputError, match="keep is 2: expected 1 to 1"):
        blends(points, labels, found, columns=1)
    with pytest.raises(InputError, match=r"labels is a torch.int64 tensor of shape \(5,\): expected int64 \(3000,\)"):
        blends(points, labels[:5], found)
    with pytest.raises(InputError, match="singular covariances"):
        blends(points, labels, Components(found.mean, 0 * found.covariance, found.count))
    with pytest.raises(InputError, match=r"top is 1\.5: expected a share from 0 to 1"):
        outliers(torch.zeros(3), gradient=torch.zeros(3), top=1.5)
    with pytest.raises(InputError, match=r"gradient has shape \(2,\): expected \(3,\)"):
        outliers(torch.zeros(3), gradient=torch.zeros(2))
    with pytest.raises(InputError, match=r"mean is a torch.float32 tensor of shape \(3, 1\)"):
        outliers(torch.zeros(3, 1))
