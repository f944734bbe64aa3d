"""Retention curves against sorting by hand, and ties against the average over all orders."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerbayes.errors import InputError
from peerbayes.metrics.scores import aurc, retention_curve


def plain_retention(uncertainty, correct, fraction):
    order = sorted(range(len(uncertainty)), key=lambda i: uncertainty[i])
    kept = order[: max(1, round(fraction * len(order)))]
    return sum(correct[i] for i in kept) / len(kept)


def plain_aurc(uncertainty, correct):
    count = len(correct)
    return sum(1 - plain_retention(uncertainty, correct, k / count) for k in range(1, count + 1)) / count


def test_the_surest_are_kept():
    uncertainty = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.7])
    correct = torch.tensor([False, True, True, False, True])
    assert retention_curve(uncertainty, correct) == pytest.approx((1, 1 / 2, 2 / 3, 3 / 4))
    assert retention_curve(uncertainty, correct, [1.0, 0.01]) == pytest.approx((3 / 5, 1))
    assert aurc(uncertainty, correct) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 4 + 2 / 5) / 5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=30, unique_by=lambda pair: pair[0]))
def test_without_ties_the_curve_is_a_sort_and_a_mean(pairs):
    uncertainty, correct = zip(*pairs)
    tensors = torch.tensor(uncertainty, dtype=torch.float64), torch.tensor(correct)
    fractions = (0.1, 0.2, 0.5, 0.77, 1.0)
    expected = [plain_retention(uncertainty, correct, q) for q in fractions]
    assert retention_curve(*tensors, fractions) == pytest.approx(expected)
    assert aurc(*tensors) == pytest.approx(plain_aurc(uncertainty, correct))


def test_ties_give_the_mean_over_all_orders():
    uncertainty, correct = [1.0, 2.0, 2.0, 2.0, 3.0], [0, 1, 1, 0, 1]
    orders = list(itertools.permutations(range(5)))
    shuffled = [([uncertainty[i] for i in order], [correct[i] for i in order]) for order in orders]
    fractions = (0.2, 0.4, 0.6, 0.8, 1.0)
    for k, fraction in enumerate(fractions):
        mean = sum(plain_retention(u, c, fraction) for u, c in shuffled) / len(orders)
        for u, c in (shuffled[0], shuffled[50], shuffled[-1]):
            assert retention_curve(torch.tensor(u), torch.tensor(c), fractions)[k] == pytest.approx(mean)
    mean = sum(plain_aurc(u, c) for u, c in shuffled) / len(orders)
    for u, c in (shuffled[0], shuffled[50], shuffled[-1]):
        assert aurc(torch.tensor(u), torch.tensor(c)) == pytest.approx(mean)


def test_useful_uncertainty_beats_useless_and_inverted():
    error = torch.linspace(0, 1, 2000, dtype=torch.float64)
    correct = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) > error
    useful, useless, inverted = aurc(error, correct), aurc(torch.zeros(2000), correct), aurc(-error, correct)
    assert useful < useless - 0.1 < inverted - 0.2
    # With errors of probability u at uncertainty u, the accuracy of the lowest q is 1 − q / 2.
    assert retention_curve(error, correct) == pytest.approx((0.9, 0.8, 0.7, 0.6), abs=0.03)
    assert useless == pytest.approx(1 - correct.double().mean())


def test_wrong_input_is_named():
    uncertainty, correct = torch.tensor([1.0, 2.0]), torch.tensor([1, 0])
    for bad, name in (
        ((uncertainty[None], correct), "uncertainty: got shape"),
        ((uncertainty[:0], correct[:0]), "uncertainty: got shape"),
        ((uncertainty * torch.nan, correct), "uncertainty: holds NaN"),
        ((uncertainty, correct[:1]), "correct: got 1 values; expected 2"),
        ((uncertainty, correct * 2), "correct: holds a value"),
    ):
        with pytest.raises(InputError, match=f"^{name}"):
            retention_curve(*bad)
        with pytest.raises(InputError, match=f"^{name}"):
            aurc(*bad)
    for fraction in (0.0, 1.1):
        with pytest.raises(InputError, match=r"^fractions"):
            retention_curve(uncertainty, correct, [fraction])
