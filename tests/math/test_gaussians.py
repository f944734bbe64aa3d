"""Distances, densities and merges of Gaussians against POT, scipy, 50-digit arithmetic and pooled samples."""

import math

import mpmath
import numpy as np
import ot
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerbayes.codebook.merging import components_of
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components, log_density, mahalanobis, merged, wasserstein2

SCALES = [1.0, 1e-4, 1e-10, 1e-20]
RULES = ["moment", "barycenter", "average", "eq6"]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def gaussians(count, scale=1.0, seed=0, offset=1.0):
    """Random Gaussians whose covariances are of the order of the scale, and their means of its root."""
    factor = torch.randn(count, 2, 2, dtype=torch.float64, generator=generator(seed))
    mean = offset * math.sqrt(scale) * torch.randn(count, 2, dtype=torch.float64, generator=generator(seed + 1))
    number = torch.randint(1, 50, (count,), generator=generator(seed + 2)).double()
    return Components(mean, scale * (factor @ factor.mT + 0.05 * torch.eye(2).double()), number)


def distance(a, b):
    return wasserstein2(a.mean, a.covariance, b.mean, b.covariance)


def exact_distance(m1, c1, m2, c2):
    """The definition in 50 digits: ‖Δm‖² + tr Σ₁ + tr Σ₂ − 2 Σ √λ(Σ₁Σ₂)."""
    with mpmath.workdps(50):
        one, two = mpmath.matrix(c1.tolist()), mpmath.matrix(c2.tolist())
        product = one * two
        trace, det = product[0, 0] + product[1, 1], mpmath.det(one) * mpmath.det(two)
        root = mpmath.sqrt(max(trace**2 - 4 * det, 0))
        eigenvalues = [(trace + root) / 2, max((trace - root) / 2, mpmath.mpf(0))]
        between = sum((mpmath.mpf(float(a)) - mpmath.mpf(float(b))) ** 2 for a, b in zip(m1, m2, strict=True))
        traces = one[0, 0] + one[1, 1] + two[0, 0] + two[1, 1]
        return float(between + traces - 2 * sum(mpmath.sqrt(value) for value in eigenvalues))


# ---- distance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_distance_agrees_with_pot(scale):
    a, b = gaussians(60, scale), gaussians(60, scale, seed=5)
    expected = ot.gaussian.bures_wasserstein_distance(
        *(t.numpy() for t in (a.mean, b.mean, a.covariance, b.covariance)), paired=True
    )
    np.testing.assert_allclose(distance(a, b).sqrt().numpy(), expected, rtol=1e-6)


def test_distance_agrees_with_scipy_roots():
    a, b = gaussians(40, 1e-4), gaussians(40, 1e-4, seed=5)
    for i in range(40):
        half = scipy.linalg.sqrtm(a.covariance[i].numpy())
        cross = scipy.linalg.sqrtm(half @ b.covariance[i].numpy() @ half)
        expected = np.trace(a.covariance[i].numpy() + b.covariance[i].numpy() - 2 * np.real(cross))
        expected += float((a.mean[i] - b.mean[i]).square().sum())
        np.testing.assert_allclose(float(distance(a, b)[i]), expected, rtol=1e-11)


@pytest.mark.parametrize("near", [1.0, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("scale", SCALES)
def test_distance_keeps_its_digits_between_gaussians_that_hardly_differ(scale, near):
    a, change = gaussians(15, scale, offset=0), gaussians(15, scale * near, seed=5, offset=0)
    b = Components(a.mean, a.covariance + change.covariance, a.count)
    exact = [exact_distance(a.mean[i], a.covariance[i], b.mean[i], b.covariance[i]) for i in range(15)]
    # The inputs are rounded, so that their difference has about 1e-16 / near of relative error at best.
    np.testing.assert_allclose(distance(a, b).numpy(), exact, rtol=1e-13 + 1e-14 / near)


@pytest.mark.parametrize("scale", [*SCALES, 1e-10, 1e-12, 0.0])
def test_equal_gaussians_have_distance_zero(scale):
    a = gaussians(200, scale)
    assert torch.equal(distance(a, a), torch.zeros(200).double())
    line = torch.randn(200, 2, dtype=torch.float64, generator=generator(3))
    singular = scale * line.unsqueeze(2) * line.unsqueeze(1)
    assert torch.equal(wasserstein2(a.mean, singular, a.mean, singular), torch.zeros(200).double())


def test_distance_of_singular_gaussians():
    zero, flat, tall = torch.zeros(2, 2), torch.diag(torch.tensor([4.0, 0.0])), torch.diag(torch.tensor([0.0, 9.0]))
    mean = torch.tensor([1.0, 2.0])
    assert float(wasserstein2(mean, flat, mean, tall)) == 13.0
    assert float(wasserstein2(mean, zero, mean, tall)) == 9.0
    assert float(wasserstein2(mean, zero, mean + 1, zero)) == 2.0


def test_distance_of_diagonal_gaussians_is_that_of_the_deviations():
    std = torch.rand(2, 50, 2, dtype=torch.float64, generator=generator(0))
    mean = torch.randn(2, 50, 2, dtype=torch.float64, generator=generator(1))
    found = wasserstein2(mean[0], torch.diag_embed(std[0] ** 2), mean[1], torch.diag_embed(std[1] ** 2))
    torch.testing.assert_close(found, ((mean[0] - mean[1]) ** 2 + (std[0] - std[1]) ** 2).sum(1))


def test_distance_broadcasts_and_is_float64():
    a, b = gaussians(4), gaussians(3, seed=5)
    table = wasserstein2(a.mean[:, None], a.covariance[:, None], b.mean, b.covariance)
    for i in range(4):
        torch.testing.assert_close(
            table[i],
            torch.stack([wasserstein2(a.mean[i], a.covariance[i], b.mean[j], b.covariance[j]) for j in range(3)]),
        )
    assert wasserstein2(*(t.float() for t in (a.mean, a.covariance, a.mean, a.covariance))).dtype == torch.float64


entries = st.floats(-1, 1).map(lambda x: round(x, 6))
factors = st.tuples(*[entries] * 5)


def gaussian_of(five, scale):
    root = torch.tensor([[five[0], 0.0], [five[1], five[2]]], dtype=torch.float64)
    return scale**0.5 * torch.tensor(five[3:], dtype=torch.float64), scale * (root @ root.T)


@settings(max_examples=150, deadline=None)
@given(factors, factors, factors, st.sampled_from(SCALES))
def test_the_distance_is_a_metric(one, two, three, scale):
    a, b, c = (gaussian_of(five, scale) for five in (one, two, three))
    ab, bc, ac = (float(wasserstein2(*x, *y)) for x, y in ((a, b), (b, c), (a, c)))
    assert min(ab, bc, ac) >= 0
    assert ab == float(wasserstein2(*b, *a))
    assert float(wasserstein2(*a, *a)) == 0
    # Roots of singular matrices hold half of the digits.
    assert math.sqrt(ac) <= math.sqrt(ab) + math.sqrt(bc) + 1e-7 * math.sqrt(scale)


# ---- densities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_densities_agree_with_the_definition_in_50_digits(scale):
    a = gaussians(30, scale)
    points = a.mean + math.sqrt(scale) * 3 * torch.randn(30, 2, dtype=torch.float64, generator=generator(7))
    square, density = mahalanobis(points, a.mean, a.covariance), log_density(points, a.mean, a.covariance)
    with mpmath.workdps(50):
        for i in range(30):
            cov = mpmath.matrix(a.covariance[i].tolist())
            x = mpmath.matrix([mpmath.mpf(float(p)) - mpmath.mpf(float(m)) for p, m in zip(points[i], a.mean[i])])
            exact = (x.T * cov**-1 * x)[0]
            log = -mpmath.log(2 * mpmath.pi) - mpmath.log(mpmath.det(cov)) / 2 - exact / 2
            np.testing.assert_allclose(float(square[i]), float(exact), rtol=1e-12)
            np.testing.assert_allclose(float(density[i]), float(log), rtol=1e-12)


def test_densities_agree_with_scipy_and_broadcast():
    a = gaussians(5)
    points = torch.randn(40, 2, dtype=torch.float64, generator=generator(1))
    found = log_density(points[:, None], a.mean, a.covariance)
    for k in range(5):
        expected = scipy.stats.multivariate_normal(a.mean[k].numpy(), a.covariance[k].numpy()).logpdf(points.numpy())
        np.testing.assert_allclose(found[:, k].numpy(), expected, rtol=1e-10)


def test_densities_of_float32_are_computed_in_float64():
    a = gaussians(30)
    given = [t.float() for t in (a.mean + 3 * a.mean.flip(0), a.mean, a.covariance)]
    for function in (mahalanobis, log_density):
        assert torch.equal(function(*given), function(*(t.double() for t in given)))


def test_mahalanobis_of_draws_is_chi_square():
    cov = torch.tensor([[4e-10, 1.9e-10], [1.9e-10, 1e-10]]).double()
    noise = torch.randn(40000, 2, dtype=torch.float64, generator=generator(0))
    points = torch.tensor([0.05, 1e-3]) + noise @ torch.linalg.cholesky(cov).T
    square = mahalanobis(points, torch.tensor([0.05, 1e-3]), cov)
    assert abs(float((square > 5.991).double().mean()) - 0.05) < 0.004


# ---- merging ------------------------------------------------------------------------------------------------------


def test_moment_merging_is_the_pooled_sample():
    points = torch.randn(300, 2, dtype=torch.float64, generator=generator(0)) * torch.tensor([2e-5, 1e-5]) + 0.1
    points[200:] += 1e-5
    labels = (torch.arange(300) >= 200).long()
    two, one = components_of(points, labels, 2), components_of(points, torch.zeros_like(labels), 1)
    joined = merged(two.select(torch.tensor([0])), two.select(torch.tensor([1])))
    torch.testing.assert_close(joined.mean, one.mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(joined.covariance, one.covariance, rtol=1e-9, atol=1e-20)
    assert float(joined.count) == 300


def test_moment_merging_keeps_first_and_second_moments_and_associates():
    a, b, c = (gaussians(20, 1e-10, seed=s) for s in (0, 5, 9))

    def second(*parts):
        return sum(p.count[:, None, None] * (p.covariance + p.mean[:, :, None] * p.mean[:, None, :]) for p in parts)

    one = merged(merged(a, b), c)
    other = merged(a, merged(c, b))
    for name in ("mean", "covariance", "count"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-10, atol=1e-24)
    torch.testing.assert_close(second(one), second(a, b, c), rtol=1e-12, atol=1e-24)
    first = sum(p.count[:, None] * p.mean for p in (a, b, c))
    torch.testing.assert_close(one.count[:, None] * one.mean, first, rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize("scale", [1.0, 1e-10, 1e-20])
def test_barycenter_agrees_with_pot(scale):
    a, b = gaussians(12), gaussians(12, seed=5)
    scaled = [Components(x.mean, x.covariance * scale, x.count) for x in (a, b)]
    found = merged(*scaled, "barycenter")
    torch.testing.assert_close(found.mean, 0.5 * (a.mean + b.mean))
    for i in range(12):
        covariances = np.stack([a.covariance[i].numpy(), b.covariance[i].numpy()])
        expected = ot.gaussian.bures_barycenter_fixpoint(covariances, weights=np.full(2, 0.5), num_iter=500, eps=1e-14)
        np.testing.assert_allclose(found.covariance[i].numpy() / scale, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("scale", [1.0, 1e-10, 1e-20])
def test_the_barycenter_is_halfway(scale):
    a, b = gaussians(50, scale), gaussians(50, scale, seed=5)
    middle, whole = merged(a, b, "barycenter"), distance(a, b)
    for side in (a, b):
        torch.testing.assert_close(distance(side, middle), whole / 4, rtol=1e-9, atol=0)


def test_eq6_agrees_with_scipy_roots_and_inflates_equal_gaussians():
    a, b = gaussians(20, 1e-4), gaussians(20, 1e-4, seed=5)
    found = merged(a, b, "eq6")
    for i in range(20):
        one, two = a.covariance[i].numpy(), b.covariance[i].numpy()
        half, delta = scipy.linalg.sqrtm(one), (a.mean[i] - b.mean[i]).numpy()
        expected = 0.5 * (one + two) + np.outer(delta, delta) / 8 + 0.5 * scipy.linalg.sqrtm(half @ two @ half)
        np.testing.assert_allclose(found.covariance[i].numpy(), np.real(expected), rtol=1e-9)
    torch.testing.assert_close(merged(a, a, "eq6").covariance, 1.5 * a.covariance, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", ["moment", "barycenter", "average"])
def test_equal_gaussians_stay_as_they_are(rule, scale):
    a = gaussians(50, scale)
    found = merged(a, a, rule)
    torch.testing.assert_close(found.mean, a.mean, rtol=0, atol=0)
    torch.testing.assert_close(found.covariance, a.covariance, rtol=1e-12, atol=1e-13 * scale)
    assert torch.equal(found.count, 2 * a.count)


@pytest.mark.parametrize("rule", RULES)
def test_merging_is_symmetric_and_stays_definite(rule):
    a, b = gaussians(50, 1e-10), gaussians(50, 1e-10, seed=5)
    one, other = merged(a, b, rule), merged(b, a, rule)
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-12, atol=1e-20)
    if rule != "eq6":  # whose last part depends on the order
        torch.testing.assert_close(one.covariance, other.covariance, rtol=1e-9, atol=1e-22)
    assert torch.equal(one.covariance, one.covariance.mT)
    assert bool((torch.linalg.eigvalsh(one.covariance) > 0).all())
    assert torch.equal(one.count, a.count + b.count)


def test_merging_what_is_singular_or_counts_nothing():
    mean, count = torch.tensor([[0.0, 0.0]]).double(), torch.zeros(1).double()
    flat = Components(mean, torch.diag(torch.tensor([4.0, 0.0])).double()[None], count)
    tall = Components(mean + 2, torch.diag(torch.tensor([0.0, 9.0])).double()[None], count)
    for rule in RULES:
        assert merged(flat, tall, rule).mean.tolist() == [[1.0, 1.0]]
    assert merged(flat, tall, "barycenter").covariance.tolist() == [[[1.0, 0.0], [0.0, 2.25]]]
    assert merged(flat, tall).covariance.tolist() == [[[3.0, 1.0], [1.0, 5.5]]]


def test_wrong_arguments_are_told():
    a = gaussians(3)
    with pytest.raises(InputError, match="rule is 'barycentre'; did you mean 'barycenter'"):
        merged(a, a, "barycentre")
    with pytest.raises(InputError, match="first has 3 components and second has 2"):
        merged(a, a.select(torch.tensor([0, 1])))
    with pytest.raises(InputError, match=r"covariance is a torch.float64 tensor of shape \(2, 2, 2\)"):
        Components(a.mean, a.covariance[:2], a.count)
    with pytest.raises(InputError, match=r"count is a torch\.float32"):
        Components(a.mean, a.covariance, a.count.float())
    with pytest.raises(InputError, match=r"cov_2 is a torch.float64 tensor of shape \(3, 2\): .*\(..., 2, 2\)"):
        wasserstein2(a.mean, a.covariance, a.mean, a.mean)
    good = {"mean_1": a.mean, "cov_1": a.covariance, "mean_2": a.mean, "cov_2": a.covariance}
    for name, tensor in good.items():
        with pytest.raises(InputError, match=rf"{name} is a torch\.int64"):
            wasserstein2(**good | {name: tensor.long()})
    good = {"points": a.mean, "mean": a.mean, "cov": a.covariance}
    for function in (mahalanobis, log_density):
        for name, tensor in good.items():
            with pytest.raises(InputError, match=rf"{name} is a torch\.int64"):
                function(**good | {name: tensor.long()})
