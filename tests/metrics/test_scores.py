"""Accuracy and proper scores against scikit-learn, and where logarithms matter."""

import math

import pytest
import torch
from eval_oracles import predictions
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from peerbayes.errors import InputError
from peerbayes.metrics.calibration import ece
from peerbayes.metrics.scores import accuracy, brier, nll, nll_from_log, soft_cross_entropy, soft_cross_entropy_from_log


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_agree_with_scikit_learn(dtype):
    log_p, labels = predictions(0)
    p = log_p.exp().to(dtype)
    # The float32 rows are handed over in float64 and normalised, as the oracle insists on a sum of 1.
    q = p.double() / p.double().sum(-1, keepdim=True)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert accuracy(p, labels) == sk.accuracy_score(labels, p.argmax(-1))
    oracle = sk.log_loss(labels.numpy(), q.numpy(), labels=list(range(5)))
    assert nll(p, labels) == pytest.approx(oracle, rel=tolerance)
    assert nll_from_log(log_p.to(dtype), labels) == pytest.approx(oracle, rel=tolerance)
    one_vs_all = sum(sk.brier_score_loss((labels == c).numpy(), q[:, c].numpy()) for c in range(5))
    assert brier(p, labels) == pytest.approx(one_vs_all, rel=tolerance)


def test_soft_cross_entropy_of_one_hot_labels_is_the_nll_and_of_itself_the_entropy():
    log_p, labels = predictions(1)
    one_hot = torch.nn.functional.one_hot(labels, 5).double()
    assert soft_cross_entropy(log_p.exp(), one_hot) == pytest.approx(nll_from_log(log_p, labels), rel=1e-12)
    entropy = float(torch.distributions.Categorical(logits=log_p).entropy().mean())
    assert soft_cross_entropy_from_log(log_p, log_p.exp()) == pytest.approx(entropy, rel=1e-12)


def test_soft_cross_entropy_is_linear_in_the_human_answers():
    log_p, _ = predictions(2)
    h = predictions(3)[0].exp()
    by_class = sum(float((h[:, c] * -log_p[:, c]).mean()) for c in range(5))
    assert soft_cross_entropy_from_log(log_p, h) == pytest.approx(by_class, rel=1e-12)


def test_a_class_without_answers_adds_nothing_even_at_probability_zero():
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    h = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert soft_cross_entropy(p, h) == pytest.approx(math.log(2) / 2)
    assert soft_cross_entropy_from_log(p.log(), h) == pytest.approx(math.log(2) / 2)
    assert soft_cross_entropy(p, h.flip(1)) == math.inf


def test_logarithms_survive_where_probabilities_underflow():
    log_p = torch.tensor([[0.0, -200.0], [-300.0, 0.0]])
    labels = torch.tensor([1, 0])
    assert nll_from_log(log_p, labels) == pytest.approx(250.0)
    assert nll(log_p.exp(), labels) == math.inf
    h = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert soft_cross_entropy_from_log(log_p, h) == pytest.approx(125.0)


def test_brier_ranges_from_right_to_wrong():
    p = torch.eye(3)
    assert brier(p, torch.tensor([0, 1, 2])) == 0
    assert brier(p, torch.tensor([1, 2, 0])) == 2


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), draws=st.integers(2, 6))
def test_averaging_probabilities_never_costs_nll(seed, draws):
    log_p = torch.stack([predictions(seed + 7919 * s, images=20)[0] for s in range(draws)])
    labels = predictions(seed, images=20)[1]
    averaged = log_p.logsumexp(0) - math.log(draws)
    assert nll_from_log(averaged, labels) <= sum(nll_from_log(q, labels) for q in log_p) / draws + 1e-12


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), images=st.integers(1, 40))
def test_order_of_images_and_names_of_classes_are_irrelevant(seed, images):
    log_p, labels = predictions(seed, images)
    p = log_p.exp()
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    classes = torch.randperm(5, generator=torch.Generator().manual_seed(seed + 1))
    renamed = p[:, classes], classes.argsort()[labels]
    for metric in (accuracy, nll, brier, ece):
        assert metric(p[order], labels[order]) == pytest.approx(metric(p, labels), abs=1e-12)
        assert metric(*renamed) == pytest.approx(metric(p, labels), abs=1e-12)
    assert 0 <= accuracy(p, labels) <= 1
    assert nll(p, labels) >= 0
    assert 0 <= brier(p, labels) <= 2


P, Y = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([0, 1])


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece])
@pytest.mark.parametrize(
    ("p", "labels", "name"),
    [
        (P[0], Y, "probabilities"),
        (P[:0], Y[:0], "probabilities"),
        (P * torch.nan, Y, "probabilities"),
        (P * 3, Y, "probabilities: row 0 .* sum of 3"),
        (torch.tensor([[0.5, 0.5], [1.5, -0.5]]), Y, "probabilities: row 1"),
        (torch.ones(2, 1, dtype=torch.int64), Y, "probabilities"),
        (P, Y[:1], "labels"),
        (P, Y.float(), "labels"),
        (P, Y + 1, "labels: got 2; expected values from 0 to 1"),
        (P, Y - 1, "labels: got -1"),
    ],
)
def test_wrong_input_is_named(metric, p, labels, name):
    with pytest.raises(InputError, match=f"^{name}"):
        metric(p, labels)


def test_logits_are_not_taken_for_log_probabilities():
    with pytest.raises(InputError, match=r"^log_probabilities: .* log_softmax"):
        nll_from_log(torch.tensor([[2.0, 1.0]]), Y[:1])
    with pytest.raises(InputError, match=r"^log_probabilities"):
        nll_from_log(torch.tensor([[-math.inf, -math.inf]]), Y[:1])
    with pytest.raises(InputError, match=r"^soft_labels: got shape"):
        soft_cross_entropy(P, P[:1])
    with pytest.raises(InputError, match=r"^soft_labels: row 0"):
        soft_cross_entropy(P, P * 2)


def test_bfloat16_probabilities_pass_the_check():
    log_p, labels = predictions(4, classes=100)
    p = log_p.exp()
    assert brier(p.bfloat16(), labels) == pytest.approx(brier(p, labels), abs=0.01)
