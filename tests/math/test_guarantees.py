"""Conformal sets and bounds on the risk: MAPIE, closed forms, and how often promises hold over many draws."""

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import RAPSConformityScore
from mapie.risk_control import BinaryClassificationController, precision
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value
from sklearn.base import BaseEstimator, ClassifierMixin

from peerbayes.errors import InputError
from peerbayes.math.guarantees import (
    answered_from,
    answers_for_risk,
    conformal_scores,
    conformal_threshold,
    images_for_coverage,
    risk_p_values,
    risk_sequence,
    risk_threshold,
)

LEVELS = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99])


def predictions(count, classes=5, seed=0, sharpness=1.5):
    """Probabilities of a network that is right as often as it says, and labels drawn of them."""
    chance = np.random.default_rng(seed)
    logits = sharpness * chance.standard_normal((count, classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (p.cumsum(1) > chance.random((count, 1))).argmax(1)
    return torch.from_numpy(p), torch.from_numpy(labels)


class Given(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are its probabilities."""

    def __init__(self, classes=5):
        self.classes = classes
        self.classes_ = np.arange(classes)

    def fit(self, x, y):
        return self

    def predict_proba(self, x):
        return x

    def predict(self, x):
        return x.argmax(1)


class Ones(np.random.RandomState):
    """No chance: all of a true class's probability is taken off its score, as here."""

    def uniform(self, low=0.0, high=1.0, size=None):
        return np.ones(size)


# ---- sets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.99])
@pytest.mark.parametrize("method", ["lac", "aps"])
def test_sets_are_those_of_mapie(method, coverage):
    (p, labels), (new, _) = predictions(300), predictions(400, seed=1)
    theirs = SplitConformalClassifier(
        Given(), confidence_level=coverage, conformity_score=method, random_state=Ones(0)
    ).conformalize(p.numpy(), labels.numpy())
    options = {} if method == "lac" else {"include_last_label": True}
    expected = theirs.predict_set(new.numpy(), conformity_score_params=options)[1][:, :, 0]
    own = conformal_scores(p, method).gather(1, labels[:, None])[:, 0]
    found = conformal_scores(new, method) <= conformal_threshold(own, coverage)
    np.testing.assert_allclose(np.sort(theirs.conformity_scores.ravel()), np.sort(own.numpy()), atol=1e-12)
    assert np.array_equal(found.numpy(), expected)
    assert found.sum() not in (0, found.numel())


def test_raps_scores_are_those_of_mapie():
    p, labels = predictions(300)
    score = RAPSConformityScore(size_raps=0.2)
    total, place = score.get_true_label_cumsum_proba(labels.numpy(), p.numpy(), np.arange(5))
    penalised = score._regularize_conformity_score(np.array([2]), 0.1, total, place)[:, 0, 0]
    expected = penalised - p.gather(1, labels[:, None])[:, 0].numpy()
    found = conformal_scores(p, "raps", penalty=0.1, rank=2).gather(1, labels[:, None])[:, 0]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_raps_without_a_penalty_is_aps_and_no_set_of_them_is_empty():
    p, _ = predictions(200, seed=2)
    aps = conformal_scores(p, "aps")
    assert torch.equal(conformal_scores(p, "raps"), aps)
    surest = p.argmax(1, keepdim=True)
    assert bool((aps.gather(1, surest) == 0).all())
    assert bool((conformal_scores(p, "raps", 0.1, 1).gather(1, surest) == 0).all())


@given(LEVELS, st.integers(1, 300))
def test_the_threshold_is_an_order_statistic_or_refused(coverage, count):
    scores = torch.arange(count, dtype=torch.float64).flip(0)
    place = math.ceil((count + 1) * Fraction(str(coverage)))
    if count < images_for_coverage(coverage):
        assert place > count
        with pytest.raises(InputError, match=f"at least {images_for_coverage(coverage)}"):
            conformal_threshold(scores, coverage)
    else:
        assert conformal_threshold(scores, coverage) == place - 1


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_coverage_over_many_calibrations_is_the_beta_law(method):
    """Of n images without ties, coverage is Beta(k, n + 1 − k): for LAC exactly, for the others at least that."""
    coverage, count, rounds = 0.8, 50, 400
    p, labels = predictions(rounds * count, seed=3)
    new, truth = predictions(20_000, seed=4)
    own = conformal_scores(p, method, 0.02, 2).gather(1, labels[:, None]).view(rounds, count)
    theirs = conformal_scores(new, method, 0.02, 2).gather(1, truth[:, None])[:, 0].sort().values
    thresholds = torch.tensor([conformal_threshold(row, coverage) for row in own], dtype=torch.float64)
    covered = torch.searchsorted(theirs, thresholds, right=True) / len(theirs)
    place = math.ceil((count + 1) * Fraction(str(coverage)))
    law = scipy.stats.beta(place, count + 1 - place)
    if method == "lac":
        assert scipy.stats.kstest(covered.numpy(), law.cdf).pvalue > 1e-3
    assert float(covered.mean()) > law.mean() - 4 * law.std() / math.sqrt(rounds)
    assert law.mean() >= coverage


# ---- risk ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.floats(0.01, 0.5), st.data())
def test_p_values_are_exact_and_below_those_of_hoeffding_and_bentkus(count, risk, data):
    errors = data.draw(st.integers(0, count))
    found = float(risk_p_values(torch.tensor([errors]), torch.tensor([count]), risk)[0])
    exact = math.fsum(math.comb(count, k) * risk**k * (1 - risk) ** (count - k) for k in range(errors + 1))
    assert found == pytest.approx(exact, rel=1e-9, abs=1e-300)
    bound = compute_hoeffding_bentkus_p_value(np.array([errors / count]), count, risk)[0, 0]
    assert found <= bound * (1 + 1e-9)


def test_no_answer_shows_nothing():
    assert risk_p_values(torch.tensor([0]), torch.tensor([0]), 0.1).tolist() == [1.0]


@given(st.floats(0.01, 0.3), st.floats(0.01, 0.3))
def test_fewest_answers_without_a_mistake_have_a_closed_form(risk, delta):
    count = answers_for_risk(risk, delta)
    assert (1 - risk) ** count <= delta * (1 + 1e-9)
    assert (1 - risk) ** (count - 1) > delta * (1 - 1e-9)
    with_mistakes = answers_for_risk(risk, delta, risk / 2)
    assert with_mistakes >= count
    assert scipy.stats.binom.cdf(math.ceil(with_mistakes * risk / 2), with_mistakes, risk) <= delta
    assert answers_for_risk(risk, delta, risk) is None


@given(st.lists(st.tuples(st.integers(0, 10), st.booleans()), max_size=30), st.lists(st.integers(-1, 11), min_size=1))
def test_answers_are_counted(images, thresholds):
    confidence = torch.tensor([float(value) for value, _ in images])
    correct = torch.tensor([right for _, right in images], dtype=torch.bool)
    count, errors = answered_from(confidence, correct, torch.tensor(thresholds, dtype=torch.float32))
    assert count.tolist() == [sum(value >= t for value, _ in images) for t in thresholds]
    assert errors.tolist() == [sum(value >= t and not right for value, right in images) for t in thresholds]


@pytest.mark.filterwarnings("ignore:Fixed sequence testing requires a monotonic risk")  # a sample's need not be
@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_is_the_least_one_that_mapie_finds_by_a_fixed_sequence(seed):
    p, labels = predictions(600, seed=seed, sharpness=3.0)
    confidence, classes = p.max(1)
    sequence = torch.linspace(0.95, 0.4, 23, dtype=torch.float64)
    found = risk_threshold(confidence, classes == labels, sequence, 0.15, 0.1)
    inputs = torch.stack([1 - confidence, confidence], 1).numpy()
    theirs = BinaryClassificationController(
        predict_function=lambda x: x,
        risk=precision,
        target_level=0.85,
        confidence_level=0.9,
        list_predict_params=sequence.numpy(),
        fwer_method="fixed_sequence",
    ).calibrate(inputs, (classes == labels).numpy().astype(int))
    count, errors = answered_from(confidence, classes == labels, sequence)
    mine, more = (risk_p_values(errors + extra, count, 0.15).numpy() for extra in (0, 1))
    p_values = theirs.p_values.ravel()
    exact = np.isclose(p_values, mine)
    # MAPIE rounds count · (errors / count) up, and so counts an error more where that is not whole.
    assert ((p_values >= mine * (1 - 1e-9)) & (p_values <= more * (1 + 1e-9))).all()
    assert exact.any()
    assert found is not None
    assert 0.4 < found.threshold <= min(theirs.valid_predict_params) + 1e-12
    between = (sequence.numpy() >= found.threshold) & (sequence.numpy() < min(theirs.valid_predict_params) - 1e-12)
    assert not (between & exact).any()


def test_a_network_that_is_too_often_wrong_is_not_certified():
    confidence = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    correct = torch.arange(500) % 5 != 0
    sequence = risk_sequence(confidence[:100], correct[:100], 0.1, 0.1, 4)
    assert risk_threshold(confidence[100:], correct[100:], sequence, 0.1, 0.1) is None
    everything = risk_threshold(confidence[100:], correct[100:], torch.tensor([0.9, 0.0]), 0.3, 0.1)
    assert everything == (0.0, 400, 80)


@pytest.mark.parametrize(("sharpness", "risk"), [(3.0, 0.15), (4.0, 0.05), (1.0, 0.4)])
def test_the_risk_is_larger_than_promised_in_at_most_delta_of_all_rounds(sharpness, risk):
    """The risk of a threshold is known here: the mean of 1 − confidence among the images that are answered."""
    delta, rounds = 0.2, 300
    broken = made = 0
    new, _ = predictions(100_000, seed=9, sharpness=sharpness)
    surest = new.amax(1).sort(descending=True).values
    risks = (1 - surest).cumsum(0) / torch.arange(1, len(surest) + 1)
    for seed in range(rounds):
        p, labels = predictions(240, seed=100 + seed, sharpness=sharpness)
        confidence, classes = p.max(1)
        correct = classes == labels
        sequence = risk_sequence(confidence[:60], correct[:60], risk, delta, 3)
        found = risk_threshold(confidence[60:], correct[60:], sequence, risk, delta)
        if found is None:
            continue
        made += 1
        count = int((surest >= found.threshold).sum())
        broken += float(risks[count - 1]) > risk
    assert made > rounds / 5
    assert scipy.stats.binomtest(broken, rounds, delta, alternative="greater").pvalue > 1e-3
    assert broken > 0  # the bound is not idle
