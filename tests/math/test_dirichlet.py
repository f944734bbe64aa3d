"""Dirichlet divergences against torch, Monte Carlo, extended precision and hand-computed ensembles."""

import math

import mpmath
import pytest
import torch
from torch.distributions import Dirichlet, kl_divergence

from peerbayes.errors import InputError
from peerbayes.math import dirichlet
from peerbayes.math.dirichlet import dirichlet_kl, proxy_dirichlet


def concentrations(*shape, seed=0, spread=2.0):
    return (spread * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).exp()


def exact(alpha, beta):
    """The corrected formula, and its gradient by α, with 400 digits."""
    with mpmath.workdps(400):
        a, b = ([mpmath.mpf(v) for v in t.tolist()] for t in (alpha, beta))
        a0, b0 = sum(a), sum(b)
        value = mpmath.loggamma(a0) - mpmath.loggamma(b0)
        gradient = []
        for x, y in zip(a, b):
            value += mpmath.loggamma(y) - mpmath.loggamma(x)
            value += (x - y) * (mpmath.digamma(x) - mpmath.digamma(a0))
            gradient.append(float((x - y) * mpmath.psi(1, x) - (a0 - b0) * mpmath.psi(1, a0)))
        return float(value), torch.tensor(gradient, dtype=torch.float64)


def test_agrees_with_torch_and_broadcasts():
    alpha, beta = concentrations(4, 3, 10), concentrations(3, 10, seed=1)
    expected = kl_divergence(Dirichlet(alpha), Dirichlet(beta.expand(4, 3, 10)))
    torch.testing.assert_close(dirichlet_kl(alpha, beta), expected, rtol=1e-11, atol=1e-11)
    assert dirichlet_kl(alpha, beta).shape == (4, 3)


def test_agrees_with_monte_carlo():
    alpha, beta = Dirichlet(torch.tensor([2.0, 5.0, 1.5]).double()), Dirichlet(torch.tensor([1.0, 3.0, 4.0]).double())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = alpha.sample((200_000,))
    ratio = alpha.log_prob(drawn) - beta.log_prob(drawn)
    found = dirichlet_kl(alpha.concentration, beta.concentration)
    assert abs(float(found - ratio.mean())) < 4 * float(ratio.std()) / math.sqrt(200_000)


def test_is_zero_with_zero_gradient_at_equal_concentrations():
    alpha = concentrations(20, 7, spread=8.0).requires_grad_()
    value = dirichlet_kl(alpha, alpha.detach().clone())
    assert torch.equal(value, torch.zeros(20).double())
    assert torch.equal(torch.autograd.grad(value.sum(), alpha)[0], torch.zeros(20, 7).double())


def test_is_never_negative():
    alpha = concentrations(2000, 10, spread=4.0)
    near = alpha * (1 + 1e-3 * torch.randn(2000, 10, generator=torch.Generator().manual_seed(3)).double())
    assert bool((dirichlet_kl(alpha, near) > 0).all())


def test_gradients_of_both_arguments():
    alpha, beta = concentrations(3, 4).requires_grad_(), concentrations(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(dirichlet_kl, (alpha, beta))
    assert torch.autograd.gradcheck(dirichlet_kl, (alpha * 30, beta * 30))
    one = torch.func.vmap(dirichlet_kl)(alpha.detach(), beta.detach())
    assert torch.equal(one, dirichlet_kl(alpha, beta).detach())


@pytest.mark.parametrize(
    ("alpha", "beta"),
    [
        ([1e-8, 1.0, 1e8], [1.0, 1.0, 1.0]),
        ([1e12, 3e12, 2e12], [1e3, 3e3, 2.5e3]),
        ([1e30, 2e30, 1.0], [5.0, 7.0, 1.5]),
        ([1.0, 1.0, 1.0], [4.5e8, 1.0, 20.0]),
        ([15.999, 16.001, 16.0], [16.0, 15.9, 17.0]),
        ([1e9, 1e9 + 1e3, 1e9], [1e9, 1e9, 1e9 + 2e3]),
    ],
)
def test_extreme_concentrations_keep_their_digits(alpha, beta):
    alpha, beta = torch.tensor(alpha, dtype=torch.float64, requires_grad=True), torch.tensor(beta, dtype=torch.float64)
    value, gradient = exact(alpha.detach(), beta)
    found = dirichlet_kl(alpha, beta)
    assert found.item() == pytest.approx(value, rel=1e-9)
    (by_alpha,) = torch.autograd.grad(found, alpha)
    # Times α: what reaches the logits of α = exp(z) + 1.
    torch.testing.assert_close(by_alpha * alpha, gradient * alpha, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("off", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
def test_digits_are_kept_near_equal_concentrations(scale, off):
    alpha = (concentrations(6, spread=1.0) * scale).requires_grad_()
    beta = alpha.detach() * (1 + off * torch.randn(6, generator=torch.Generator().manual_seed(2)).double())
    value, gradient = exact(alpha.detach(), beta)
    found = dirichlet_kl(alpha, beta)
    assert found.item() == pytest.approx(value, rel=1e-7, abs=0)
    torch.testing.assert_close(torch.autograd.grad(found, alpha)[0], gradient, rtol=1e-7, atol=1e-9 * off)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")  # torch's own, at first use
def test_forward_mode_agrees_with_finite_differences():
    alpha, beta = concentrations(3, 4).requires_grad_(), concentrations(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(dirichlet_kl, (alpha, beta), check_forward_ad=True, check_batched_forward_grad=True)
    slope = torch.func.jvp(lambda x: dirichlet_kl(x, beta.detach()), (alpha.detach(),), (torch.ones(3, 4).double(),))[1]
    expected = torch.autograd.grad(dirichlet_kl(alpha, beta.detach()).sum(), alpha)[0].sum(-1)
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize(
    ("rest", "exact", "omitted"),
    [
        ("_lgamma_rest", lambda x: mpmath.loggamma(x) - x * mpmath.log(x) + x, lambda x: 1 / (156 * x**13)),
        ("_digamma_rest", lambda x: mpmath.digamma(x) - mpmath.log(x), lambda x: -1 / (12 * x**14)),
        ("_trigamma_rest", lambda x: mpmath.psi(1, x) - 1 / x, lambda x: 7 / (6 * x**15)),
    ],
)
def test_series_are_off_by_less_than_the_first_term_that_they_omit(monkeypatch, rest, exact, omitted):
    # Where x is small the terms are large enough to tell: the errors of Stirling's series have the sign of that term.
    monkeypatch.setattr(dirichlet, "_LARGE", 1.0)
    for x in (3.0, 5.0, 8.0):
        with mpmath.workdps(40):
            off = float(exact(mpmath.mpf(x)) - getattr(dirichlet, rest)(torch.tensor(x, dtype=torch.float64)).item())
        assert 0 < off / omitted(x) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float64(dtype):
    alpha, beta = concentrations(5, 10, spread=1.0).to(dtype), concentrations(5, 10, seed=1, spread=1.0).to(dtype)
    found = dirichlet_kl(alpha, beta)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, dirichlet_kl(alpha.double(), beta.double()).float(), rtol=0, atol=0)


def test_proxy_of_two_members_by_hand():
    members = torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]], dtype=torch.float64)
    denominator = 0.6 * (math.log(0.6) - (math.log(0.8) + math.log(0.4)) / 2)
    denominator += 0.4 * (math.log(0.4) - (math.log(0.2) + math.log(0.6)) / 2)
    strength = 0.5 / denominator
    expected = torch.tensor([[1 + 0.6 * strength, 1 + 0.4 * strength]], dtype=torch.float64)
    torch.testing.assert_close(proxy_dirichlet(members.log()), expected, rtol=1e-12, atol=0)


def test_proxy_recovers_the_strength_of_a_dirichlet():
    # Stirling's approximation, on which the estimate rests, is good where every concentration is large.
    truth = torch.tensor([300.0, 500.0, 200.0, 400.0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = Dirichlet(truth).sample((20_000, 1))
    torch.testing.assert_close(proxy_dirichlet(drawn.log())[0] - 1, truth, rtol=0.03, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_members_that_agree_give_a_finite_strength(dtype):
    log_p = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=dtype).mul(30).log_softmax(-1)
    beta = proxy_dirichlet(log_p.expand(4, 6, 10))
    torch.testing.assert_close(beta.sum(-1), torch.full((6,), 4.5e8 + 10, dtype=dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        proxy_dirichlet(log_p.expand(4, 6, 10), 1e-2) - 1, 450 * log_p.exp(), rtol=1e-5, atol=1e-4
    )
    alpha = torch.ones(6, 10, dtype=dtype, requires_grad=True)
    (dirichlet_kl(alpha, beta) / beta.sum(-1)).sum().backward()
    assert bool(alpha.grad.isfinite().all())


def test_impossible_classes():
    one, other = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    assert torch.equal(proxy_dirichlet(torch.stack([one, other]).log()), torch.ones(1, 3))
    beta = proxy_dirichlet(torch.stack([one, one]).log())
    torch.testing.assert_close(beta, 1 + 1e8 * one)


def test_wrong_arguments_are_told():
    ones = torch.ones(2, 3)
    with pytest.raises(InputError, match=r"alpha has shape \(2, 3\) and beta has shape \(2, 4\)"):
        dirichlet_kl(ones, torch.ones(2, 4))
    with pytest.raises(InputError, match=r"beta has type torch\.int64"):
        dirichlet_kl(ones, ones.long())
    with pytest.raises(InputError, match=r"\(members, images, classes\)"):
        proxy_dirichlet(ones)
    with pytest.raises(InputError, match="floor is 0"):
        proxy_dirichlet(ones[None], floor=0.0)
