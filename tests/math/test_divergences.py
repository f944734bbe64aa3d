"""Divergences against outside oracles, gradient identities and the extremes where naive formulas break."""

import math

import mpmath
import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from scipy.special import rel_entr
from torch.distributions import Categorical, Normal, kl_divergence

from peerbayes.errors import InputError
from peerbayes.math.dirichlet import dirichlet_kl
from peerbayes.math.divergences import gaussian_kl, kernel_kl, kernel_log_conditional, kl, renyi, wasserstein2

ALPHAS = [0.0, 1e-3, 0.3, 0.5, 0.9, 0.95, 1 - 1e-4, 1.0, 1 + 1e-4, 1.05, 1.1, 1.5, 2.0, 10.0, 100.0]
INF = math.inf


def logits(*shape, seed=0, scale=2.0, dtype=torch.float64):
    return scale * torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def pair(*shape, seed=0, scale=2.0, dtype=torch.float64):
    return tuple(logits(*shape, seed=seed + k, scale=scale, dtype=dtype).log_softmax(-1) for k in (1, 2))


def renyi_oracle(log_p, log_q, alpha):
    """The definition in extended precision, from the logarithms as they are given."""
    p, q = (x.double().numpy().astype(np.longdouble) for x in (log_p, log_q))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    if alpha == 1:
        return (np.exp(p) * (p - q)).sum(-1).astype(float)
    alpha = np.longdouble(alpha)
    joint = alpha * p + (1 - alpha) * q
    peak = joint.max(-1)
    return ((peak + np.log(np.exp(joint - peak[..., None]).sum(-1))) / (alpha - 1)).astype(float)


def extreme(dtype):
    """Logits of ±1e4: agreeing, opposed, one flat, ties and mild ones."""
    z_p = torch.tensor([[1e4, -1e4, 0, 5], [1e4, -1e4, 0, 5], [0, 0, 0, 0], [1e4, 1e4, -1e4, -1e4], [1, 2, 3, 4]])
    z_q = torch.tensor([[1e4, -1e4, 0, 5], [-1e4, 1e4, 0, 5], [1e4, -1e4, 0, 9], [-1e4, 1e4, 1e4, 0], [4, 3, 2, -1]])
    return z_p.to(dtype).requires_grad_(), z_q.to(dtype).requires_grad_()


def gradients(value, *inputs):
    return torch.autograd.grad(value.sum(), inputs)


# Kullback-Leibler


def test_kl_matches_torch_distributions_and_scipy():
    log_p, log_q = pair(3, 5, 10)
    value = kl(log_p, log_q)
    torch.testing.assert_close(value, kl_divergence(Categorical(logits=log_p), Categorical(logits=log_q)))
    np.testing.assert_allclose(value, rel_entr(log_p.exp().numpy(), log_q.exp().numpy()).sum(-1), rtol=1e-12)


def test_kl_of_equal_distributions_is_zero_with_zero_gradient():
    z_p, z_q = (logits(4, 10).requires_grad_() for _ in range(2))
    value = kl(z_p.log_softmax(-1), z_q.log_softmax(-1))
    assert torch.equal(value, torch.zeros(4, dtype=torch.float64))
    for gradient in gradients(value, z_p, z_q):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-15, rtol=0)


def test_kl_gradients_are_those_of_the_formula_and_of_the_logits():
    log_p, log_q = (x.requires_grad_() for x in pair(3, 6))
    assert torch.autograd.gradcheck(kl, (log_p, log_q))
    z_q = logits(3, 6).requires_grad_()
    (gradient,) = gradients(kl(log_p.detach(), z_q.log_softmax(-1)), z_q)
    torch.testing.assert_close(gradient, z_q.softmax(-1) - log_p.exp())


def test_kl_ignores_classes_without_probability():
    log_p = torch.tensor([0.25, 0.75, 0.0, 0.0]).log().requires_grad_()
    log_q = torch.tensor([0.5, 0.25, 0.25, 0.0]).log().requires_grad_()
    value = kl(log_p, log_q)
    assert value.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(3))
    grad_p, grad_q = gradients(value, log_p, log_q)
    torch.testing.assert_close(grad_q, torch.tensor([-0.25, -0.75, 0, 0]))
    torch.testing.assert_close(grad_p, torch.tensor([0.25 * (math.log(0.5) + 1), 0.75 * (math.log(3) + 1), 0, 0]))
    assert kl(log_q, log_p) == INF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_kl_at_extreme_logits(dtype):
    z_p, z_q = extreme(dtype)
    value = kl(z_p.log_softmax(-1), z_q.log_softmax(-1))
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value[0] == 0
    torch.testing.assert_close(value[1].double().item(), 2e4, rtol=5e-3, atol=0)
    assert value.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(value, z_p, z_q))


def test_leading_axes_broadcast():
    log_p, log_q = pair(4, 5)
    for divergence in (kl, lambda p, q: renyi(p, q, 1.5)):
        every = divergence(log_p[:, None], log_q)
        assert every.shape == (4, 4)
        torch.testing.assert_close(every[1, 3], divergence(log_p[1], log_q[3]))


# Rényi


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_renyi_matches_extended_precision(alpha, dtype, tolerance):
    log_p, log_q = pair(100, 100, dtype=dtype)
    value = renyi(log_p, log_q, alpha)
    np.testing.assert_allclose(value, renyi_oracle(log_p, log_q, alpha), rtol=tolerance, atol=1e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_half_precision_is_computed_in_float32(alpha):
    log_p, log_q = (x.bfloat16() for x in pair(20, 10))
    assert torch.equal(renyi(log_p, log_q, alpha), renyi(log_p.float(), log_q.float(), alpha))
    assert torch.equal(kl(log_p, log_q), kl(log_p.float(), log_q.float()))


@pytest.mark.parametrize("alpha", [1e-5, 1e-2, 0.7, 1 - 1e-6, 1 + 1e-3, 3.0, 30.0])
def test_renyi_of_close_distributions_keeps_its_digits(alpha):
    # D/α is about 1e-4 here, as for peers that agree late in training. What remains is the rounding of the inputs:
    # float32 logarithms are normalised to about 1e-7.
    z = logits(50, 10, dtype=torch.float32)
    log_p = z.log_softmax(-1)
    log_q = (z + 0.01 * logits(50, 10, seed=9, dtype=torch.float32)).log_softmax(-1)
    value = renyi(log_p, log_q, alpha).double()
    np.testing.assert_allclose(value / alpha, renyi_oracle(log_p, log_q, alpha) / alpha, rtol=0, atol=4e-7)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_renyi_gradient_identities(alpha):
    z_p, z_q = logits(5, 8, seed=1).requires_grad_(), logits(5, 8, seed=2).requires_grad_()
    log_p, log_q = z_p.log_softmax(-1), z_q.log_softmax(-1)
    grad_p, grad_q = gradients(renyi(log_p, log_q, alpha), z_p, z_q)
    p, q = log_p.exp(), log_q.exp()
    r = (alpha * log_p + (1 - alpha) * log_q).softmax(-1)
    torch.testing.assert_close(grad_q, q - r, rtol=1e-10, atol=1e-10)
    if alpha == 1:
        expected = p * (log_p - log_q - kl(log_p, log_q)[:, None])
    else:
        expected = alpha / (alpha - 1) * (r - p)
    torch.testing.assert_close(grad_p, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_renyi_gradcheck_through_log_softmax(alpha, scale):
    z = [logits(3, 5, seed=k, scale=scale).requires_grad_() for k in (1, 2)]
    divergence = lambda p, q: renyi(p.log_softmax(-1), q.log_softmax(-1), alpha)
    assert torch.autograd.gradcheck(divergence, z, fast_mode=True)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_renyi_gradcheck_of_mixtures(alpha):
    # Normalised in another way than by log_softmax: the average of several draws' probabilities.
    def mixtures(z_p, z_q):
        log_p, log_q = ((z.log_softmax(-1).logsumexp(0) - math.log(3)) for z in (z_p, z_q))
        return renyi(log_p, log_q, alpha)

    z = [logits(3, 2, 4, seed=k).requires_grad_() for k in (1, 2)]
    assert torch.autograd.gradcheck(mixtures, z, fast_mode=True)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.95, 1.0, 1.1, 2.0])
def test_renyi_second_derivatives_through_log_softmax(alpha):
    z = [logits(2, 4, seed=k).requires_grad_() for k in (1, 2)]
    assert torch.autograd.gradgradcheck(lambda p, q: renyi(p.log_softmax(-1), q.log_softmax(-1), alpha), z)


@pytest.mark.parametrize("alpha", [1 - 1e-3, 1 - 1e-5, 1.0, 1 + 1e-5, 1 + 1e-3])
def test_renyi_gradients_near_one_in_float32(alpha):
    # α/(α−1)(r−p) as written would lose all its digits in float32.
    def both(dtype):
        z_p, z_q = (logits(20, 10, seed=k, dtype=torch.float32).to(dtype).requires_grad_() for k in (1, 2))
        return gradients(renyi(z_p.log_softmax(-1), z_q.log_softmax(-1), alpha), z_p, z_q)

    for single, double in zip(both(torch.float32), both(torch.float64)):
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("alpha", [1 - 1e-4, 1 + 1e-4])
def test_renyi_series_near_one(alpha):
    log_p, log_q = pair(200, 100, dtype=torch.float32)
    p, ratio = log_p.double().exp(), (log_p - log_q).double()
    mean = (p * ratio).sum(-1)
    variance = (p * (ratio - mean[:, None]).square()).sum(-1)
    series = mean + (alpha - 1) / 2 * variance
    assert variance.min() > 1
    torch.testing.assert_close(renyi(log_p, log_q, alpha).double(), series, atol=1e-5, rtol=1e-6)


def test_renyi_at_zero_is_exactly_nothing():
    z_p, z_q = logits(6, 9, seed=1, dtype=torch.float32), logits(6, 9, seed=2, dtype=torch.float32)
    for alpha in (0, 0.0, torch.tensor(0.0)):
        p, q = z_p.clone().requires_grad_(), z_q.clone().requires_grad_()
        value = renyi(p.log_softmax(-1), q.log_softmax(-1), alpha)
        assert value.requires_grad
        for nothing in (value, *gradients(value, p, q)):
            assert torch.count_nonzero(nothing) == 0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_renyi_of_equal_distributions_is_exactly_zero(alpha):
    z = logits(6, 9, dtype=torch.float32)
    log_p, log_q = (z.log_softmax(-1).requires_grad_() for _ in range(2))
    value = renyi(log_p, log_q, alpha)
    for nothing in (value, *gradients(value, log_p, log_q)):
        assert torch.count_nonzero(nothing) == 0


def test_renyi_at_one_half_is_twice_bhattacharyya():
    log_p, log_q = pair(20, 10)
    bhattacharyya = -(0.5 * (log_p + log_q)).exp().sum(-1).log()
    torch.testing.assert_close(renyi(log_p, log_q, 0.5), 2 * bhattacharyya)


def test_renyi_tends_to_the_largest_log_ratio():
    log_p, log_q = pair(20, 10)
    largest = (log_p - log_q).max(-1).values
    torch.testing.assert_close(renyi(log_p, log_q, 1e6), largest, atol=1e-4, rtol=0)
    assert (renyi(log_p, log_q, 1e6) <= largest).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=2, max_size=8),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_renyi_is_nonnegative_monotone_and_skew_symmetric(classes, one, other):
    z = torch.tensor(classes, dtype=torch.float64)
    log_p, log_q = z[:, 0].log_softmax(0), z[:, 1].log_softmax(0)
    low, high = sorted((one, other))
    at_low, at_high = renyi(log_p, log_q, low).item(), renyi(log_p, log_q, high).item()
    assert at_low >= -1e-12
    assert at_low <= at_high + 1e-11 * (1 + at_high)
    if low < 1:
        swapped = low * renyi(log_q, log_p, 1 - low).item()
        assert (1 - low) * at_low == pytest.approx(swapped, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_renyi_at_extreme_logits(alpha, dtype):
    z_p, z_q = extreme(dtype)
    log_p, log_q = z_p.log_softmax(-1), z_q.log_softmax(-1)
    value = renyi(log_p, log_q, alpha)
    grad_p, grad_q = gradients(value, z_p, z_q)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad_p.isfinite().all()
    assert grad_q.isfinite().all()
    assert grad_q.abs().max() <= 1
    assert value[0] == 0
    if dtype != torch.bfloat16:
        expected = renyi_oracle(log_p.detach(), log_q.detach(), alpha)
        np.testing.assert_allclose(value.detach(), expected, rtol=2e-6, atol=1e-14)
        r = (alpha * log_p.double() + (1 - alpha) * log_q.double()).softmax(-1)
        torch.testing.assert_close(grad_q.double(), log_q.double().exp() - r, rtol=0, atol=1e-3)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_renyi_tensor_alpha_agrees_with_float(alpha):
    def all_three(order):
        z_p, z_q = (logits(7, 10, seed=k, dtype=torch.float32).requires_grad_() for k in (1, 2))
        value = renyi(z_p.log_softmax(-1), z_q.log_softmax(-1), order)
        return value, *gradients(value, z_p, z_q)

    for number, single, double in zip(
        all_three(alpha), all_three(torch.tensor(alpha)), all_three(torch.tensor(alpha, dtype=torch.float64))
    ):
        assert torch.equal(number, double)
        torch.testing.assert_close(number, single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.3, 0.5, 0.95, 1.0, 1.05, 2.0])
def test_renyi_with_impossible_classes(alpha):
    # The last class is impossible for P, and the last two of the second pair for both.
    p = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.4, 0.6, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.3, 0.0, 0.0]], dtype=torch.float64)
    log_p, log_q = p.log().requires_grad_(), q.log().requires_grad_()
    value = renyi(log_p, log_q, alpha)
    if alpha == 1:
        expected = torch.from_numpy(rel_entr(p.numpy(), q.numpy()).sum(-1))
    else:
        expected = ((p > 0) * p**alpha * torch.where(p > 0, q, 1.0) ** (1 - alpha)).sum(-1).log() / (alpha - 1)
    torch.testing.assert_close(value, expected)
    for gradient in gradients(value, log_p, log_q):
        assert gradient.isfinite().all()
        assert (gradient[1, 2:] == 0).all()
    swapped = renyi(log_q, log_p, alpha)[0].item()
    assert math.isinf(swapped) if alpha >= 1 else math.isfinite(swapped)


def test_renyi_gradient_is_exact_where_the_sum_is_huge():
    # log Σ is about 1e6, where float32 steps by 1/16: exp(log_joint − log Σ) would be wrong by percents.
    z_q = torch.tensor([0.0, 0.0, 1e4], requires_grad=True)
    log_p = torch.tensor([1e4, 1e4, 0.0]).log_softmax(-1)
    (gradient,) = gradients(renyi(log_p, z_q.log_softmax(-1), 100.0), z_q)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -0.5, 1.0]))


def test_renyi_at_one_pulls_an_impossible_class_up():
    # The value is infinite, and the gradient with respect to Q is still q − p.
    log_p = torch.tensor([0.25, 0.25, 0.5]).log()
    log_q = torch.tensor([0.5, 0.5, 0.0]).log().requires_grad_()
    value = renyi(log_p, log_q, 1.0)
    assert value == INF
    torch.testing.assert_close(gradients(value, log_q)[0], torch.tensor([0.25, 0.25, -0.5]))


@pytest.mark.parametrize("alpha", [0.3, 1.0, 1.05])
def test_renyi_under_function_transforms(alpha):
    log_p, log_q = pair(6, 5)
    one = lambda z, target: renyi(target, z.log_softmax(-1), alpha)
    value = torch.func.vmap(one)(log_q, log_p)
    gradient = torch.func.vmap(torch.func.grad(one))(log_q, log_p)
    torch.testing.assert_close(value, renyi(log_p, log_q, alpha))
    r = (alpha * log_p + (1 - alpha) * log_q).softmax(-1)
    torch.testing.assert_close(gradient, log_q.exp() - r)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the tracer of torch 2.11
def test_renyi_is_one_graph_for_every_tensor_alpha():
    # aot_eager traces forward and backward as the compiler does, without the time to build kernels.
    torch.compiler.reset()
    compiled = torch.compile(
        lambda p, q, a: renyi(p.log_softmax(-1), q.log_softmax(-1), a), fullgraph=True, backend="aot_eager"
    )
    z = [logits(4, 5, seed=k).requires_grad_() for k in (1, 2)]
    compiled(*z, torch.tensor(1.5))
    with torch.compiler.set_stance("fail_on_recompile"):
        for alpha in (0.0, 0.3, 1.0, 1.05, 2.0):
            order = torch.tensor(alpha)
            value = compiled(*z, order)
            expected = renyi(*(x.log_softmax(-1) for x in z), order)
            torch.testing.assert_close(value, expected)
            for got, want in zip(gradients(value, *z), gradients(expected, *z)):
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("alpha", [-0.1, math.nan, INF, -INF])
def test_renyi_rejects_orders_that_do_not_exist(alpha):
    with pytest.raises(InputError, match=f"alpha is {alpha}: expected a finite number that is 0 or more"):
        renyi(*pair(2, 3), alpha)


@pytest.mark.parametrize("alpha", [torch.tensor([0.5]), torch.tensor(1)])
def test_renyi_rejects_other_tensors(alpha):
    with pytest.raises(InputError, match="expected a 0-dim floating-point tensor on cpu"):
        renyi(*pair(2, 3), alpha)


@pytest.mark.parametrize("divergence", [kl, lambda p, q: renyi(p, q, 0.5)])
def test_categorical_shapes_and_types_are_checked(divergence):
    with pytest.raises(InputError, match=r"log_p has shape \(2, 3\) and log_q has shape \(2, 1\)"):
        divergence(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(InputError, match=r"do not broadcast: log_p \(2, 3\), log_q \(4, 3\)"):
        divergence(torch.zeros(2, 3), torch.zeros(4, 3))
    with pytest.raises(InputError, match="expected floating-point"):
        divergence(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64))


# Gaussians


def gaussians(*shape, seed=0):
    mean_1, mean_2, rho_1, rho_2 = logits(4, *shape, seed=seed).unbind()
    return mean_1, torch.nn.functional.softplus(rho_1), mean_2, torch.nn.functional.softplus(rho_2)


def test_gaussian_kl_matches_torch_distributions():
    mean_q, std_q, mean_p, std_p = gaussians(6, 7)
    expected = kl_divergence(Normal(mean_q, std_q), Normal(mean_p, std_p))
    torch.testing.assert_close(gaussian_kl(mean_q, std_q, mean_p, std_p), expected)
    expected = kl_divergence(Normal(mean_q, std_q), Normal(0.5, 0.1))
    torch.testing.assert_close(gaussian_kl(mean_q, std_q, 0.5, 0.1), expected)
    torch.testing.assert_close(
        gaussian_kl(mean_q, std_q[0], mean_p[:, :1], std_p[0, 0])[2, 3],
        gaussian_kl(mean_q[2, 3], std_q[0, 3], mean_p[2, 0], std_p[0, 0]),
    )


def test_gaussian_kl_of_the_prior_is_exactly_zero():
    mean, std = (x.float() for x in gaussians(1_000)[:2])
    assert torch.count_nonzero(gaussian_kl(mean, std, mean, std)) == 0


def test_gaussian_kl_gradient():
    inputs = [x.requires_grad_() for x in gaussians(5)]
    assert torch.autograd.gradcheck(gaussian_kl, inputs)
    mean, std = inputs[:2]
    grad_mean, grad_std = gradients(gaussian_kl(mean, std, 0.0, 2.0), mean, std)
    torch.testing.assert_close(grad_mean, mean / 4)
    torch.testing.assert_close(grad_std, std / 4 - 1 / std)


def exact_gaussian_kl(mean_q, std_q, mean_p, std_p):
    """The definition and its derivatives by all four arguments, with 60 digits."""
    with mpmath.workdps(60):
        m, s, n, t = (mpmath.mpf(x.item()) for x in (mean_q, std_q, mean_p, std_p))
        value = mpmath.log(t / s) + (s**2 + (m - n) ** 2) / (2 * t**2) - mpmath.mpf(1) / 2
        by_mean, by_std = (m - n) / t**2, s / t**2 - 1 / s
        return [float(x) for x in (value, by_mean, by_std, -by_mean, 1 / t - (s**2 + (m - n) ** 2) / t**3)]


@pytest.mark.parametrize("prior", ["tensor", "number"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_kl_keeps_its_digits_near_the_prior_and_far_from_it(dtype, prior):
    # The numbers are taken as they are in this precision: what is compared is the formula, not the rounding of 1.0001.
    off = [0.0, 1e-7, -1e-6, 1e-4, -1e-4, 3e-3, -0.03, 0.0999, 0.1001, -0.0999, -0.1001, 0.5, -0.6, 9.0, 1e4, 1e8]
    tiny = [1e-3, 1e-10, 1e-18]
    for std_p in (0.1, 1.0, 2.5):
        ratios = torch.tensor([1 + x for x in off] + tiny, dtype=torch.float64)
        std_q = (std_p * ratios).to(dtype).requires_grad_()
        for shift in (0.0, 1e-5, 0.7):
            mean_q = torch.full_like(std_q, 0.25 + shift).requires_grad_()
            fixed = [torch.full_like(std_q, x).requires_grad_() for x in (0.25, std_p)]
            inputs = [mean_q, std_q, *fixed]
            given = inputs if prior == "tensor" else [mean_q, std_q, 0.25, fixed[1][0].item()]
            value = gaussian_kl(*given)
            slopes = gradients(value, *(x for x in given if isinstance(x, torch.Tensor)))
            exact = [exact_gaussian_kl(*(x[i] for x in inputs)) for i in range(len(std_q))]
            for result, expected in zip((value, *slopes), torch.tensor(exact, dtype=torch.float64).T):
                torch.testing.assert_close(result.double(), expected, rtol=60 * torch.finfo(dtype).eps, atol=0)


def test_gaussian_kl_of_a_million_weights_near_their_anchors():
    noise = torch.randn(2, 10**6, generator=torch.Generator().manual_seed(0))
    mean, std = 1e-4 * noise[0], 1 + 1e-4 * noise[1]
    expected = kl_divergence(Normal(mean.double(), std.double()), Normal(torch.zeros(()).double(), 1.0)).sum().item()
    assert gaussian_kl(mean, std, 0.0, 1.0).double().sum().item() == pytest.approx(expected, rel=1e-5)


def test_gaussian_kl_of_tiny_scales_is_finite():
    std = torch.tensor([1e-20, 1e-6, 1.0], requires_grad=True)
    value = gaussian_kl(torch.zeros(3), std, 0.0, 1.0)
    torch.testing.assert_close(value, torch.tensor([20 * math.log(10) - 0.5, 6 * math.log(10) - 0.5, 0.0]))
    assert gradients(value, std)[0].isfinite().all()


def test_wasserstein_matches_bures_and_optimal_transport():
    for seed in range(3):
        mean_1, std_1, mean_2, std_2 = gaussians(6, seed=seed)
        value = wasserstein2(mean_1, std_1, mean_2, std_2).sum().item()
        m_1, m_2 = mean_1.numpy(), mean_2.numpy()
        cov_1, cov_2 = np.diag(std_1.numpy() ** 2), np.diag(std_2.numpy() ** 2)
        root = sqrtm(cov_1)
        bures = np.trace(cov_1 + cov_2 - 2 * sqrtm(root @ cov_2 @ root))
        assert value == pytest.approx(((m_1 - m_2) ** 2).sum() + bures)
        assert value == pytest.approx(float(ot.gaussian.bures_wasserstein_distance(m_1, m_2, cov_1, cov_2)) ** 2)


def test_wasserstein_of_one_weight_matches_transported_quantiles():
    # In one dimension W₂² = ∫ (F₁⁻¹(u) − F₂⁻¹(u))² du.
    mean_1, std_1, mean_2, std_2 = (x.double() for x in torch.tensor([0.3, 0.5, -1.0, 1.2]))
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    transported = (Normal(mean_1, std_1).icdf(u) - Normal(mean_2, std_2).icdf(u)).square().mean()
    torch.testing.assert_close(wasserstein2(mean_1, std_1, mean_2, std_2), transported, rtol=1e-4, atol=0)


def test_wasserstein_is_zero_and_flat_for_equal_gaussians():
    mean, std = (x.requires_grad_() for x in gaussians(50)[:2])
    value = wasserstein2(mean, std, mean.detach(), std.detach())
    for nothing in (value, *gradients(value, mean, std)):
        assert torch.count_nonzero(nothing) == 0
    assert torch.autograd.gradcheck(wasserstein2, [x.requires_grad_() for x in gaussians(5)])


def test_gaussian_inputs_are_checked():
    with pytest.raises(InputError, match=r"do not broadcast: mean_q \(3,\), std_q \(2,\)"):
        gaussian_kl(torch.zeros(3), torch.ones(2), 0.0, 1.0)
    with pytest.raises(InputError, match=r"std_p is 0\.0: expected a number above 0"):
        gaussian_kl(torch.zeros(3), torch.ones(3), 0.0, 0.0)
    with pytest.raises(InputError, match=r"mean_2 \(4,\)"):
        wasserstein2(torch.zeros(3), torch.ones(3), torch.zeros(4), 1.0)


# Neighbour distributions


def naive_conditional(features, kernel, bandwidth=None):
    n = len(features)
    distances = [np.linalg.norm(features[i] - features[j]) for i in range(n) for j in range(i)]
    if bandwidth is None:
        bandwidth = sorted(distances)[(len(distances) - 1) // 2]
    result = np.full((n, n), -INF)
    for j in range(n):
        weights = {}
        for i in range(n):
            a, b = features[i], features[j]
            if kernel == "cosine":
                weights[i] = max(0.5 * (a @ b / np.linalg.norm(a) / np.linalg.norm(b) + 1), 1e-7)
            else:
                weights[i] = np.exp(-(np.linalg.norm(a - b) ** 2) / (2 * bandwidth**2))
        total = sum(weight for i, weight in weights.items() if i != j)
        for i in range(n):
            if i != j:
                result[j, i] = np.log(weights[i] / total)
    return result


@pytest.mark.parametrize(("kernel", "bandwidth"), [("cosine", None), ("rbf", None), ("rbf", 1.7)])
@pytest.mark.parametrize("n", [2, 5, 12])
def test_kernel_matches_naive_loops(kernel, bandwidth, n):
    features = logits(n, 3) + 1
    result = kernel_log_conditional(features, kernel, bandwidth)
    np.testing.assert_allclose(result, naive_conditional(features.numpy(), kernel, bandwidth), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.exp().sum(1), torch.ones(n, dtype=torch.float64))
    assert (result.diagonal() == -INF).all()


def test_kernel_kl_matches_naive_loops():
    first, second = logits(6, 4, seed=1), logits(6, 4, seed=2)
    log_p, log_q = (naive_conditional(x.numpy(), "cosine") for x in (first, second))
    expected = sum(np.exp(log_p[j, i]) * (log_p[j, i] - log_q[j, i]) for j in range(6) for i in range(6) if i != j) / 6
    value = kernel_kl(kernel_log_conditional(first), kernel_log_conditional(second))
    assert value.shape == ()
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("kernel", ["cosine", "rbf"])
def test_kernel_kl_of_equal_features_is_zero_and_flat(kernel):
    features = logits(8, 5)
    own = features.clone().requires_grad_()
    value = kernel_kl(kernel_log_conditional(features, kernel), kernel_log_conditional(own, kernel))
    assert value.item() == 0
    torch.testing.assert_close(gradients(value, own)[0], torch.zeros(8, 5, dtype=torch.float64), atol=1e-12, rtol=0)


def test_cosine_kernel_ignores_the_length_of_each_vector():
    features = logits(8, 5, dtype=torch.float32)
    lengths = torch.tensor([1e-30, 1e-10, 0.1, 1, 2, 1e3, 1e10, 1e30])[:, None]
    torch.testing.assert_close(kernel_log_conditional(features * lengths), kernel_log_conditional(features))


def test_rbf_kernel_with_the_median_ignores_shift_and_scale():
    features = logits(9, 5)
    expected = kernel_log_conditional(features, "rbf")
    torch.testing.assert_close(kernel_log_conditional(1e3 * features + 1e4, "rbf"), expected)
    assert not torch.allclose(kernel_log_conditional(2 * features, "rbf", 1.0), expected)


@pytest.mark.parametrize(("kernel", "bandwidth"), [("cosine", None), ("rbf", 1.3)])
def test_kernel_gradient(kernel, bandwidth):
    target = kernel_log_conditional(logits(5, 3, seed=1))

    def both(own):
        log_q = kernel_log_conditional(own, kernel, bandwidth)
        return kernel_kl(target, log_q), kernel_kl(log_q, target)

    assert torch.autograd.gradcheck(both, logits(5, 3, seed=2).requires_grad_())


def test_rbf_kernel_far_from_the_origin_keeps_its_digits():
    features = (logits(9, 5, dtype=torch.float32) * 64).round() / 64  # so that the shift itself is exact
    far = kernel_log_conditional(features + 4096, "rbf", 1.0)
    torch.testing.assert_close(far, kernel_log_conditional(features, "rbf", 1.0), rtol=1e-3, atol=1e-3)


def test_the_median_is_detached():
    features = logits(6, 3).requires_grad_()
    target = kernel_log_conditional(logits(6, 3, seed=1))
    distances = torch.nn.functional.pdist(features.detach())
    fixed = distances.sort().values[(len(distances) - 1) // 2].item()
    with_median, with_fixed = (
        gradients(kernel_kl(target, kernel_log_conditional(features, "rbf", h)), features)[0] for h in (None, fixed)
    )
    torch.testing.assert_close(with_median, with_fixed)


@pytest.mark.parametrize("kernel", ["cosine", "rbf"])
@pytest.mark.parametrize("case", ["zero", "all zero", "identical", "all identical", "opposite", "far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_gradients_are_finite_for_degenerate_features(kernel, case, dtype):
    features = logits(6, 4, dtype=torch.float32)
    if case == "zero":
        features[2] = 0
    elif case == "all zero":
        features[:] = 0
    elif case == "identical":
        features[:5] = features[0].clone()
    elif case == "all identical":
        features[:] = features[0].clone()
    elif case == "opposite":
        features[1::2] = -features[::2]
    else:
        features[0] *= 1e4
    own = features.to(dtype).requires_grad_()
    log_q = kernel_log_conditional(own, kernel)
    assert log_q.dtype == torch.float32
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(6))
    if case.startswith("all"):
        torch.testing.assert_close(log_q.exp(), (1 - torch.eye(6)) / 5)
    target = kernel_log_conditional(logits(6, 4, seed=3, dtype=torch.float32))
    for value in (kernel_kl(target, log_q), kernel_kl(log_q, target)):
        (gradient,) = torch.autograd.grad(value, own, retain_graph=True)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e4


def test_kernel_keeps_float32_under_autocast():
    features = logits(16, 32, dtype=torch.float32)
    expected = kernel_log_conditional(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kernel_log_conditional(features), expected)


@pytest.mark.parametrize("features", [torch.zeros(1, 4), torch.zeros(4), torch.zeros(4, 3, dtype=torch.int64)])
def test_kernel_features_are_checked(features):
    with pytest.raises(InputError, match=r"features is a .* expected floating-point features of shape \(n, d\)"):
        kernel_log_conditional(features)


def test_kernel_options_are_checked():
    with pytest.raises(InputError, match="kernel is 'cosin'; did you mean 'cosine'"):
        kernel_log_conditional(torch.ones(3, 2), "cosin")
    for bandwidth in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match=f"bandwidth is {bandwidth}: expected a finite number above 0"):
            kernel_log_conditional(torch.ones(3, 2), "rbf", bandwidth)
    with pytest.raises(InputError, match=r"log_p has shape \(3, 3\) and log_q has shape \(4, 4\)"):
        kernel_kl(torch.zeros(3, 3), torch.zeros(4, 4))


# ---- forward mode ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")  # torch's own, at first use
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 1 + 1e-9, 2.0])
def test_forward_mode_through_renyi(alpha):
    z_p, z_q = (logits(3, 4, seed=seed).requires_grad_() for seed in (1, 2))

    def divergence(p, q):
        return renyi(p.log_softmax(-1), q.log_softmax(-1), alpha)

    assert torch.autograd.gradcheck(
        divergence, (z_p, z_q), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")  # torch's own, at first use
def test_forward_mode_through_gaussian_kl():
    inputs = [x.requires_grad_() for x in gaussians(5)]
    assert torch.autograd.gradcheck(
        gaussian_kl, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(gaussian_kl, inputs)
    mean, std = (x.detach() for x in inputs[:2])
    # d²KL/dσ² = 1/s² + 1/σ²: forward over reverse.
    hessian = torch.func.hessian(lambda x: gaussian_kl(mean, x, 0.5, 2.0).sum())(std)
    torch.testing.assert_close(hessian, torch.diag(0.25 + std**-2))


# ---- compiled -------------------------------------------------------------------------------------------------------

COMPILED = {
    "kl": lambda a, b: kl(a.log_softmax(-1), b.log_softmax(-1)),
    "renyi": lambda a, b: renyi(a.log_softmax(-1), b.log_softmax(-1), 1.5),
    "gaussian_kl to numbers": lambda a, b: gaussian_kl(a, b.exp(), 0.0, 0.1),
    "gaussian_kl to tensors": lambda a, b: gaussian_kl(a, b.exp(), torch.ones_like(a), torch.full_like(a, 0.1)),
    "wasserstein2": lambda a, b: wasserstein2(a, b.exp(), 0.0, 1.0),
    "kernel_kl": lambda a, b: kernel_kl(kernel_log_conditional(a), kernel_log_conditional(b)),
    "dirichlet_kl": lambda a, b: dirichlet_kl(a.exp(), b.exp()),
}


@pytest.mark.filterwarnings("default")  # torch's tracer warns of its own
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiler_keeps_the_gradient(name):
    """As one does not that meets an in-place operation on what a function of our own returns."""
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True, dynamic=False)
    found = []
    for function in (COMPILED[name], compiled):
        inputs = [logits(6, 5, seed=seed).requires_grad_(True) for seed in (0, 1)]
        function(*inputs).sum().backward()
        found.append([tensor.grad for tensor in inputs])
    for plain, other in zip(*found, strict=True):
        assert plain.abs().max() > 1e-3
        torch.testing.assert_close(other, plain)
