"""Weights of least norm against enumeration of all active sets, scipy, and the duality gap on hard problems."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch

from peerbayes.errors import InputError
from peerbayes.math.simplex import least_norm_weights


def vectors(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gap(gram, weights, cap):
    """``ωᵀGω − min_v vᵀGω``, which bounds how far the objective is above its minimum, relative to the squares."""
    slope = (gram @ weights.unsqueeze(-1)).squeeze(-1)
    left, lowest = torch.ones_like(slope[..., 0]), torch.zeros_like(slope[..., 0])
    for value in slope.sort(-1).values.unbind(-1):
        share = left.clamp_max(cap)
        lowest, left = lowest + share * value, left - share
    return ((weights * slope).sum(-1) - lowest) / gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-300)


def enumerated(gram, cap):
    """The best of the equality-constrained solutions on all free sets and bounds."""
    count, best, found = len(gram), np.inf, None
    for states in itertools.product((0, 1, 2), repeat=count):  # at zero, at the cap, free
        free = [k for k in range(count) if states[k] == 2]
        weights = np.array([cap if state == 1 else 0.0 for state in states])
        if free:
            n = len(free)
            system = np.block([[gram[np.ix_(free, free)], np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
            side = np.append(-(gram @ weights)[free], 1 - weights.sum())
            weights[free] = np.linalg.lstsq(system, side, rcond=None)[0][:n]
        feasible = abs(weights.sum() - 1) < 1e-9 and weights.min() > -1e-9 and weights.max() < cap + 1e-9
        if feasible and weights @ gram @ weights < best:
            best, found = weights @ gram @ weights, weights
    return found


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("cap", [1.0, 0.6, 0.3])
def test_equals_the_best_of_all_active_sets(count, cap):
    cap = max(cap, 1.1 / count)
    for offset in (0.0, 2.0):
        x = vectors(8, count, 12, seed=count) + offset * vectors(8, 1, 12, seed=9)
        gram = x @ x.mT
        expected = np.stack([enumerated(g, cap) for g in gram.numpy()])
        np.testing.assert_allclose(least_norm_weights(gram, cap).numpy(), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("count", [3, 8, 16])
def test_agrees_with_scipy(count):
    x = vectors(count, 40) + vectors(1, 40, seed=1)
    gram = (x @ x.T).numpy()
    for cap in (1.0, 0.6, 1.7 / count):
        done = scipy.optimize.minimize(
            lambda w: w @ gram @ w,
            np.full(count, 1 / count),
            jac=lambda w: 2 * gram @ w,
            method="SLSQP",
            bounds=[(0, cap)] * count,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            options={"ftol": 1e-15, "maxiter": 500},
        )
        found = least_norm_weights(torch.from_numpy(gram), cap).numpy()
        np.testing.assert_allclose(found, done.x, rtol=0, atol=1e-6)
        assert found @ gram @ found <= done.fun + 1e-8


def problems(kind, count):
    x = vectors(40, count, 20, seed=count)
    if kind == "close":
        x = 1e-4 * x + vectors(40, 1, 20, seed=1)
    elif kind == "closer":  # their differences have squares of the size of the damping
        x = 1e-5 * x + vectors(40, 1, 20, seed=1)
    elif kind == "correlated":
        x = x + 3 * vectors(40, 1, 20, seed=1)
    elif kind == "positive":
        x = x.abs()
    elif kind == "few dimensions":
        x = x[..., : max(1, count // 3)]
    elif kind == "doubled":
        x = x[:, torch.arange(count) // 2]
    elif kind == "scales":
        x = x * 10 ** (3 * vectors(40, count, 1, seed=1))
    elif kind == "zero":
        x[:, 0] = 0
    elif kind == "rare":  # one-hot teachers that disagree
        x = torch.eye(20, dtype=torch.float64)[(x[..., 0] * 7).long().remainder(20)] - 0.05
    return x @ x.mT


@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize(
    "kind", ["close", "closer", "correlated", "positive", "few dimensions", "doubled", "scales", "zero", "rare"]
)
def test_hard_problems_are_solved_exactly(kind, count):
    gram = problems(kind, count)
    for cap in (1.0, 0.6, 1.5 / count):
        weights = least_norm_weights(gram, cap)
        assert float((weights.sum(-1) - 1).abs().max()) < 1e-13
        assert float(weights.min()) >= 0
        assert float(weights.max()) <= max(cap, 1 / count)
        assert float(gap(gram, weights, cap).max()) < 1e-10


def test_equal_teachers_and_zero_gradients_share_equally():
    x = vectors(1, 6).expand(7, 6)
    torch.testing.assert_close(
        least_norm_weights(x @ x.T, 0.6), torch.full((7,), 1 / 7, dtype=torch.float64), rtol=0, atol=1e-8
    )
    assert torch.equal(least_norm_weights(torch.zeros(5, 5).double()), torch.full((5,), 0.2, dtype=torch.float64))
    one = torch.diag(torch.tensor([0.0, 1.0, 1.0, 1.0]).double())
    expected = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    torch.testing.assert_close(least_norm_weights(one, 0.7), expected, rtol=0, atol=1e-12)


def test_independent_vectors_have_weights_by_inverse_square():
    square = torch.tensor([1.0, 2.0, 4.0, 5.0]).double()
    expected = (1 / square) / (1 / square).sum()
    torch.testing.assert_close(least_norm_weights(torch.diag(square)), expected, rtol=1e-9, atol=0)


def test_the_order_and_the_scale_do_not_matter():
    gram, order = problems("correlated", 6), torch.tensor([3, 0, 5, 1, 4, 2])
    weights = least_norm_weights(gram, 0.4)
    shuffled = least_norm_weights(gram[:, order][:, :, order] * 1e-18, 0.4)
    torch.testing.assert_close(shuffled, weights[:, order], rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_vectors_of_any_length_are_weighed_exactly(scale):
    for kind in ("correlated", "positive", "few dimensions", "zero"):
        gram = problems(kind, 16) * scale
        assert float(gap(gram, least_norm_weights(gram, 0.6), 0.6).max()) < 1e-10


@pytest.mark.parametrize("count", [1, 3, 7, 16])
def test_the_smallest_cap_forces_equal_weights(count):
    x = vectors(9, count, 4)
    torch.testing.assert_close(
        least_norm_weights(x @ x.mT, 1 / count), torch.full((9, count), 1 / count, dtype=torch.float64)
    )


def test_a_batch_is_its_parts_and_half_precision_is_float32():
    gram = problems("correlated", 4).view(2, 20, 4, 4)
    weights = least_norm_weights(gram, 0.6)
    assert weights.shape == (2, 20, 4)
    torch.testing.assert_close(weights[1, 7], least_norm_weights(gram[1, 7], 0.6), rtol=0, atol=1e-12)
    assert least_norm_weights(gram.bfloat16(), 0.6).dtype == torch.float32
    assert not least_norm_weights(gram.requires_grad_(), 0.6).requires_grad


def test_no_value_is_read_back_to_the_host():
    assert least_norm_weights(torch.empty(2, 5, 5, device="meta"), 0.6).shape == (2, 5)


def test_wrong_arguments_are_told():
    gram = torch.eye(4)
    with pytest.raises(InputError, match=r"cap is 0.2: 4 weights of at most that cannot add up to 1; expected 1/4"):
        least_norm_weights(gram, 0.2)
    with pytest.raises(InputError, match="cap is nan"):
        least_norm_weights(gram, float("nan"))
    with pytest.raises(InputError, match="gram is of 17 vectors: expected 1 to 16"):
        least_norm_weights(torch.eye(17))
    with pytest.raises(InputError, match=r"shape \(3, 4\): expected floating-point \(..., M, M\)"):
        least_norm_weights(torch.ones(3, 4))
