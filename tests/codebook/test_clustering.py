"""K-means and EM against scikit-learn."""

import math
import warnings

import numpy as np
import pytest
import torch
from points import normal, weights
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from sklearn.mixture import GaussianMixture

from peerbayes.codebook.clustering import _principal_axis, _relocate, em, kmeans, most_probable
from peerbayes.codebook.merging import components_of
from peerbayes.codebook.neighbours import nearest
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components
from peerbayes.math.noise import Address, integers


def inertia(points, centres):
    return float((points - centres[nearest(points, centres)[:, 0]]).square().sum())


# ---- k-means ------------------------------------------------------------------------------------------------------


def plane(kind):
    if kind == "blobs":
        return torch.from_numpy(make_blobs(8000, centers=60, cluster_std=0.4, random_state=0)[0])
    return weights(10000, {"narrow": 1e-4, "wide": 5e-2}[kind])


@pytest.mark.parametrize(("kind", "count"), [("narrow", 120), ("wide", 120), ("wide", 12), ("blobs", 60)])
def test_inertia_is_that_of_scikit_learn(kind, count):
    points = plane(kind)
    fits = [KMeans(count, n_init=1, random_state=seed).fit(points.numpy()) for seed in range(3)]
    expected = np.mean([inertia(points, torch.from_numpy(fit.cluster_centers_)) for fit in fits])
    assert inertia(points, kmeans(points, count, Address())) < 1.02 * expected
    assert inertia(points, kmeans(points, count, Address(), batch=4000)) < 1.06 * expected


def test_the_centres_are_the_means_of_their_members():
    points = plane("blobs")[:1000]
    centres = kmeans(points, 10, Address(), rounds=300)
    found = components_of(points, nearest(points, centres)[:, 0], 10)
    torch.testing.assert_close(found.mean, centres, rtol=0, atol=1e-12)


def test_scale_and_place_do_not_matter():
    points = weights(4000, 1e-2)
    centres = kmeans(points, 40, Address())
    moved = kmeans(points * 1e-6 + 0.25, 40, Address())
    assert abs(inertia(points * 1e-6 + 0.25, moved) / (1e-12 * inertia(points, centres)) - 1) < 0.01


def test_an_address_is_all_the_randomness():
    points = weights(5000, 1e-2)
    first = kmeans(points, 50, Address(3), batch=1000, full=1)
    torch.manual_seed(1)
    assert torch.equal(first, kmeans(points, 50, Address(3), batch=1000, full=1))
    assert not torch.equal(first, kmeans(points, 50, Address(4), batch=1000, full=1))
    assert not torch.equal(first, kmeans(points, 50, Address(3).sub("other"), batch=1000, full=1))


def test_mini_batches_are_running_means():
    """With one centre every step adds a batch to the mean of all points drawn."""
    points = normal(5000, 2)
    centre = kmeans(points, 1, Address(), rounds=40, batch=1000, full=0)
    assert float((centre - points.mean(0)).norm()) < 4 * (2 / 40000) ** 0.5
    assert float((kmeans(points, 1, Address(), rounds=0, batch=1000, full=0) - points.mean(0)).norm()) > 1e-3
    torch.testing.assert_close(kmeans(points, 1, Address(), rounds=0, batch=1000, full=1)[0], points.mean(0))


def test_where_all_points_fit_into_a_batch_all_steps_are_those_of_lloyd():
    points = weights(2000, 1e-2)
    few, many = ([kmeans(points, 30, Address(), rounds=k, full=n - k) for k in range(n + 1)] for n in (2, 4))
    for same in (few, many):
        assert all(torch.equal(same[0], other) for other in same)
    assert inertia(points, many[0]) < inertia(points, few[0])


def test_the_seed_of_which_a_split_gains_most_is_split_into_the_means_of_halves():
    wide = normal(900, 2) @ torch.tensor([[2.0, 1.0], [0.0, 0.5]]).double()
    found = kmeans(torch.cat([wide, 100 + 1e-3 * normal(100, 2, seed=1)]), 3, Address(), rounds=0, full=0)
    near = found[found[:, 0] < 50]
    value, vector = np.linalg.eigh(np.cov(wide.numpy().T, ddof=0))
    offset = (2 / math.pi * value[1]) ** 0.5 * vector[:, 1] * np.sign(vector[0, 1])
    expected = wide.mean(0).numpy() + np.stack([-offset, offset])
    np.testing.assert_allclose(near[near[:, 0].argsort()].numpy(), expected, rtol=1e-9)


def test_the_longest_axis_is_that_of_lapack_and_no_variance_is_below_0():
    root = normal(50, 2, 2)
    covariance = root @ root.mT
    largest, axis = _principal_axis(covariance)
    values, vectors = torch.linalg.eigh(covariance)
    torch.testing.assert_close(largest, values[:, 1])
    torch.testing.assert_close((axis * vectors[:, :, 1]).sum(1).abs(), torch.ones(50).double())
    # What rounding leaves of a cluster at one place.
    assert _principal_axis(torch.tensor([[[-1e-20, 0.0], [0.0, -2e-20]]]).double())[0].tolist() == [0.0]


@pytest.mark.parametrize("points", [normal(300, 2), weights(300, 1e-4), normal(300, 1).expand(300, 2) ** 5])
def test_as_many_centres_as_points(points):
    found = kmeans(points, 300, Address())
    assert torch.equal(found[found[:, 0].argsort()], points[points[:, 0].argsort()])


def test_fewer_places_than_centres():
    places = normal(7, 2)
    points = places[torch.arange(200) % 7]
    centres = kmeans(points, 20, Address())
    assert inertia(points, centres) < 1e-28
    assert bool(centres.isfinite().all())
    assert torch.equal(kmeans(points[:1].expand(9, 2), 3, Address()), points[:1].expand(3, 2))


def test_centres_without_members_move_to_far_points():
    cluster = 0.01 * normal(500, 2)
    points = torch.cat([cluster, torch.tensor([[50.0, 0.0], [0.0, 70.0]])])
    labels = nearest(points, kmeans(points, 3, Address()))[:, 0]
    assert len({int(labels[0]), int(labels[500]), int(labels[501])}) == 3
    assert len(labels[:500].unique()) == 1


@pytest.mark.parametrize("seed", range(4))
def test_relocation_finds_separated_clusters(seed):
    """Of well separated clusters every one gets its centre, where steps of Lloyd alone would stay with two in one."""
    points, labels = make_blobs(2000, centers=40, cluster_std=0.003, random_state=seed)
    expected = sum(((points[labels == k] - points[labels == k].mean(0)) ** 2).sum() for k in range(40))
    points = torch.from_numpy(points)
    assert inertia(points, kmeans(points, 40, Address())) < 1.0001 * expected
    assert inertia(points, kmeans(points, 40, Address(), batch=1000, full=6)) < 1.0001 * expected


def test_relocation_moves_what_is_missed_least_to_where_it_gains_most():
    centres = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 0.0], [9.0, 9.0], [20.0, 0.0]]).double()
    size = torch.tensor([30.0, 10.0, 50.0, 0.0, 60.0]).double()
    covariance = torch.zeros(5, 2, 2).double()
    covariance[4, 1, 1], covariance[2] = 4.0, 0.1 * torch.ones(2, 2)
    found = _relocate(size, centres, covariance)
    half = (2 / math.pi) ** 0.5
    across = half * 0.2**0.5 / 2**0.5  # the largest eigenvalue is 0.2, along the diagonal
    # The one without members costs nothing and takes the best split; 0 and 1 are joined in their mean, at 0.075 < 6.4.
    expected = [[5 + across, across], [0.025, 0.0], [5 - across, -across], [20.0, 2 * half], [20.0, -2 * half]]
    torch.testing.assert_close(found, torch.tensor(expected).double())
    still = torch.eye(2).double().expand(5, 2, 2) * 1e-6
    assert torch.equal(_relocate(size + 1, centres, still), centres)
    # Joining 0 and 1 costs 30 · 10/40 · 0.1² = 0.075: a little less than a split gains, or a little more.
    for factor, same in ((1.01, False), (0.99, True)):
        alone = torch.zeros(5, 2, 2).double()
        alone[4, 0, 0] = factor * 0.075 * math.pi / 120
        assert torch.equal(_relocate(size.clamp_min(1), centres, alone), centres) == same
    # What would gain most is itself one of the two that cost least: they are left alone.
    still = 1e-6 * torch.eye(2).double().repeat(5, 1, 1)
    still[1, 0, 0] = 1.0
    assert torch.equal(_relocate(size + 1, centres, still), centres)


# ---- EM -----------------------------------------------------------------------------------------------------------


def mixture_of(points, start, steps, ridge):
    model = GaussianMixture(
        len(start),
        max_iter=steps,
        tol=0.0,
        reg_covar=ridge,
        weights_init=(start.count / start.count.sum()).numpy(),
        means_init=start.mean.numpy(),
        precisions_init=torch.linalg.inv(start.covariance).numpy(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(points.numpy())


def start_of(points, count):
    return components_of(points, nearest(points, kmeans(points, count, Address(), rounds=3))[:, 0], count)


@pytest.mark.parametrize("steps", [1, 2, 15])
@pytest.mark.parametrize(("kind", "ridge"), [("wide", 1e-6), ("blobs", 1e-3), ("blobs", 1e-12)])
def test_em_on_all_points_is_that_of_scikit_learn(kind, ridge, steps):
    points = plane(kind)[:3000]
    start = start_of(points, 8)
    found = em(points, start, steps, len(points), Address(), ridge=ridge)
    expected = mixture_of(points, start, steps, ridge)
    np.testing.assert_allclose(found.mean.numpy(), expected.means_, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(found.covariance.numpy(), expected.covariances_, rtol=1e-6, atol=1e-11)
    np.testing.assert_allclose(found.count.numpy() / 3000, expected.weights_, rtol=1e-7)


@pytest.mark.parametrize("kind", ["wide", "blobs"])
def test_the_most_probable_component_is_that_of_scikit_learn(kind):
    points = plane(kind)[:3000]
    start = start_of(points, 8)
    found = most_probable(points, em(points, start, 15, len(points), Address(), ridge=1e-6))
    assert np.array_equal(found.numpy(), mixture_of(points, start, 15, 1e-6).predict(points.numpy()))
    assert not torch.equal(found, nearest(points, em(points, start, 15, len(points), Address()).mean)[:, 0])


def test_nothing_is_of_a_component_without_weight():
    mean = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    components = Components(mean, torch.eye(2).double().repeat(2, 1, 1), torch.tensor([0.0, 3.0]).double())
    assert torch.equal(most_probable(mean, components), torch.ones(2, dtype=torch.int64))


def test_em_at_variances_of_1e_10_is_em_at_variances_of_1():
    """EM does not depend on the unit; scikit-learn sees the points in a unit in which nothing is small."""
    small = torch.tensor([0.15, 1e-3]) + 1e-5 * plane("blobs")[:2000]
    points = (small - small.mean(0)) / 1e-5
    start, scaled = start_of(small, 6), start_of(points, 6)
    scaled = components_of(points, nearest(points, (start.mean - small.mean(0)) / 1e-5)[:, 0], 6)
    start = Components(1e-5 * scaled.mean + small.mean(0), 1e-10 * scaled.covariance, scaled.count)
    found = em(small, start, 10, len(small), Address(), ridge=1e-13)
    expected = mixture_of(points, scaled, 10, 1e-3)
    np.testing.assert_allclose((found.mean - small.mean(0)).numpy() / 1e-5, expected.means_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.covariance.numpy() * 1e10, expected.covariances_, rtol=1e-5, atol=1e-6)


def test_em_on_mini_batches_finds_the_mixture():
    points = torch.cat([normal(6000, 2), 6 + 0.5 * normal(2000, 2, seed=1)])
    start = Components(
        torch.tensor([[1.0, 1.0], [4.0, 5.0]]).double(), torch.eye(2).double().repeat(2, 1, 1), torch.ones(2).double()
    )
    found = em(points, start, 60, 500, Address())
    full = em(points, start, 40, 8000, Address())
    torch.testing.assert_close(found.mean, full.mean, rtol=0, atol=0.08)
    torch.testing.assert_close(found.covariance, full.covariance, rtol=0, atol=0.12)
    torch.testing.assert_close(found.count / 8000, torch.tensor([0.75, 0.25]).double(), rtol=0, atol=0.03)
    assert abs(float(found.count.sum()) - 8000) < 1e-6
    again = em(points, start, 60, 500, Address())
    assert torch.equal(found.mean, again.mean)
    assert not torch.equal(found.mean, em(points, start, 60, 500, Address(1)).mean)


def test_a_step_on_a_mini_batch_averages_moments():
    points = plane("blobs")
    start = start_of(points, 5)
    steps = [start]
    for step, weight in enumerate((2**-0.6, 3**-0.6)):
        part = points[integers(Address(7).sub(f"em {step}"), 8000, 900)]
        part = em(part, steps[-1], 1, 900, Address())
        parts = [(steps[-1], (1 - weight) / 8000), (part, weight / 900)]
        count = sum(w * c.count for c, w in parts)
        mean = sum((w * c.count)[:, None] * c.mean for c, w in parts) / count[:, None]
        second = sum((w * c.count)[:, None, None] * (c.covariance + outer(c.mean)) for c, w in parts)
        steps.append(Components(mean, second / count[:, None, None] - outer(mean), 8000 * count))
    found = em(points, start, 2, 900, Address(7))
    for name in ("mean", "covariance", "count"):
        torch.testing.assert_close(getattr(found, name), getattr(steps[-1], name), rtol=1e-9, atol=1e-11)


def outer(mean):
    return mean[:, :, None] * mean[:, None, :]


def test_em_in_parts_and_with_absent_components():
    points = normal(9000, 2)
    start = components_of(points, nearest(points, normal(2000, 2, seed=3))[:, 0], 2000)
    found = em(points, start, 1, 9000, Address(), ridge=1e-3)
    absent = start.count == 0
    assert bool(absent.any())
    assert float(found.count[absent].abs().sum()) == 0
    assert bool(found.mean[~absent].isfinite().all())
    np.testing.assert_allclose(float(found.count.sum()), 9000, rtol=1e-12)
    # The mean over the mixture is the mean of the points, after every step.
    mean = (found.count[~absent, None] * found.mean[~absent]).sum(0) / 9000
    torch.testing.assert_close(mean, points.mean(0), rtol=0, atol=1e-12)


def dense_step(points, old, ridge):
    """Return responsibilities (n, K) of all pairs, by scikit-learn's formulas, and the components after a step."""
    model = GaussianMixture(len(old))
    model.weights_, model.means_ = (old.count / old.count.sum()).numpy(), old.mean.numpy()
    model.precisions_cholesky_ = np.linalg.cholesky(np.linalg.inv(old.covariance.numpy()))
    share = model.predict_proba(points.numpy())
    size = share.sum(0)
    mean = share.T @ points.numpy() / size[:, None]
    offset = points.numpy()[:, None] - mean
    inner = np.einsum("nk,nki,nkj->kij", share, offset, offset) / size[:, None, None]
    return share, Components(*map(torch.from_numpy, (mean, inner + ridge * np.eye(2), size)))


@pytest.mark.parametrize("kind", ["narrow", "wide", "blobs"])
def test_of_many_components_those_that_are_looked_at_have_the_density(kind):
    points = plane(kind)[:6000]
    old = start_of(points, 300)
    for _ in range(4):  # components grow and overlap from step to step
        share, expected = dense_step(points, old, 1e-12)
        assert np.mean(most_probable(points, old).numpy() == share.argmax(1)) == 1
        found = em(points, old, 1, len(points), Address(), ridge=1e-12)
        torch.testing.assert_close(found.count, expected.count, rtol=2e-3, atol=1e-3)
        away = (found.mean - expected.mean).square().sum(1).sqrt()
        assert float((away / _principal_axis(expected.covariance)[0].sqrt()).max()) < 2e-3
        old = expected


def test_a_broad_component_is_seen_from_afar():
    """Its mean is farther than those of hundreds of narrow ones, none of which is as probable."""
    places = torch.linspace(0, 1, 400).double()
    mean = torch.cat([torch.stack([places, torch.zeros(400).double()], 1), torch.tensor([[0.5, 3.0]]).double()])
    covariance = 1e-6 * torch.eye(2).double().repeat(401, 1, 1)
    covariance[-1, 1, 1] = 4.0
    components = Components(mean, covariance, torch.ones(401).double())
    points = torch.tensor([[0.5, 0.5], [0.5, 5.0], [0.25, 0.0]]).double()
    assert most_probable(points, components)[:2].tolist() == [400, 400]
    assert int(most_probable(points, components)[2]) == int(nearest(points, mean)[2, 0])
    assert float(em(points, components, 1, 3, Address()).count[-1]) == pytest.approx(2)


# ---- arguments ----------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_told():
    points = normal(10, 2)
    with pytest.raises(InputError, match="count is 11 and there are 10 points"):
        kmeans(points, 11, Address())
    with pytest.raises(InputError, match="rounds, full and batch are -1, 4 and 5"):
        kmeans(points, 2, Address(), rounds=-1, batch=5)
    with pytest.raises(InputError, match="steps and batch are 1 and 0"):
        em(points, components_of(points, torch.zeros(10).long(), 1), 1, 0, Address())
