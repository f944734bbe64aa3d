"""Calibration errors against netcal and the definition, edges included, and temperature scaling."""

import math

import numpy as np
import pytest
import torch
from eval_oracles import ece_by_loop, labels_from, predictions, with_confidence
from hypothesis import given, settings
from hypothesis import strategies as st
from netcal.metrics import ECE
from scipy import optimize

from peerbayes.errors import InputError
from peerbayes.metrics.calibration import (
    _equal_width_bin,
    adaptive_ece,
    confidence_by_class,
    confidence_overall,
    ece,
    fit_temperature,
    reliability,
    temper,
)
from peerbayes.metrics.scores import nll_from_log


@pytest.mark.parametrize("bins", [1, 7, 15, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ece_agrees_with_netcal(bins, dtype):
    log_p, labels = predictions(0, 2000)
    p = temper(log_p, 0.5).exp().to(dtype)
    assert ece(p, labels, bins) == pytest.approx(ECE(bins).measure(p.numpy(), labels.numpy()), abs=1e-6)


def test_a_toy_value_by_hand():
    # Bin (.5, .75]: 2 images, accuracy .5, confidence .65. Bin (.75, 1]: 2 images, accuracy 1, confidence .85.
    confidence, correct = torch.tensor([0.6, 0.7, 0.8, 0.9]), torch.tensor([1, 0, 1, 1])
    p, labels = with_confidence(confidence, correct)
    assert ece(p, labels, 4) == pytest.approx(0.5 * 0.15 + 0.5 * 0.15)
    table = reliability(p, labels, 4)
    assert table.count.tolist() == [0, 0, 2, 2]
    assert table.accuracy[2:].tolist() == [0.5, 1.0]
    assert table.confidence[2:].tolist() == pytest.approx([0.65, 0.85])
    assert table.accuracy[:2].isnan().all()
    assert table.confidence[:2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_edge_closes_the_bin_below_it(dtype):
    for bins in (2, 3, 5, 10, 15, 20, 49):
        edges = torch.tensor([k / bins for k in range(1, bins + 1)], dtype=dtype)
        above = torch.nextafter(edges, torch.full_like(edges, 2))
        below = torch.nextafter(edges, torch.zeros_like(edges))
        for confidence, shift in ((edges, 0), (below, 0), (above[:-1], 1)):
            p, labels = with_confidence(confidence, torch.ones(len(confidence)))
            count = reliability(p, labels, bins).count
            assert count.nonzero().flatten().tolist() == [k + shift for k in range(len(confidence))]


def test_zero_and_one_are_inside():
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for bins in (1, 2, 15):
        assert _equal_width_bin(ends, bins, torch.float32).tolist() == [0, bins - 1]
    assert reliability(torch.ones(3, 1), torch.zeros(3, dtype=torch.int64), 15).count.tolist() == [0] * 14 + [3]
    tiny = torch.full((2, 4000), 1 / 4000)
    assert reliability(tiny, torch.tensor([0, 1]), 15).count.tolist() == [2] + [0] * 14
    sure_and_wrong = torch.tensor([[1.0, 0.0]])
    assert ece(sure_and_wrong, torch.tensor([1])) == 1
    assert ece(sure_and_wrong, torch.tensor([0])) == 0


def test_rounding_above_one_stays_in_the_last_bin():
    p = torch.tensor([[1.0000001, 0.0]])
    assert reliability(p, torch.tensor([0]), 10).count.tolist() == [0] * 9 + [1]


def test_calibrated_predictions_have_vanishing_error_and_others_do_not():
    # The remaining error is sampling noise, of order sqrt(bins / N).
    small, large = predictions(1, 1000), predictions(1, 100_000)
    assert ece(large[0].exp(), large[1]) < 0.006 < ece(small[0].exp(), small[1]) < 0.06
    assert adaptive_ece(large[0].exp(), large[1]) < 0.006
    sharpened = temper(large[0], 0.3).exp()
    assert ece(sharpened, large[1]) > 0.1
    assert adaptive_ece(sharpened, large[1]) > 0.1


def test_adaptive_error_agrees_with_the_definition():
    log_p, labels = predictions(2, 600)
    p = temper(log_p, 0.5).exp()
    confidence, correct = p.max(-1).values.numpy(), (p.argmax(-1) == labels).double().numpy()
    groups = np.array_split(np.argsort(confidence), 15)
    assert adaptive_ece(p, labels, 15) == pytest.approx(ece_by_loop(confidence, correct, groups), rel=1e-12)


def test_adaptive_bins_differ_by_at_most_one_image():
    # Each image alone in its bin when there are as many bins as images: the error is mean |correct − confidence|.
    p, labels = with_confidence(torch.tensor([0.5, 0.6, 0.9], dtype=torch.float64), torch.tensor([1, 0, 1]))
    for bins in (3, 4, 50):
        assert adaptive_ece(p, labels, bins) == pytest.approx((0.5 + 0.6 + 0.1) / 3)
    # Two bins of 2 and 1 images.
    assert adaptive_ece(p, labels, 2) == pytest.approx((2 * abs(0.5 - 0.55) + abs(1 - 0.9)) / 3)


def test_ties_in_adaptive_bins_do_not_depend_on_order():
    # Four equal confidences over two bins: each bin expects half of the two correct answers.
    p, labels = with_confidence(torch.full((4,), 0.75, dtype=torch.float64), torch.tensor([1, 1, 0, 0]))
    for order in (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 1, 3]), torch.tensor([3, 2, 1, 0])):
        assert adaptive_ece(p[order], labels[order], 2) == pytest.approx(0.25)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), images=st.integers(1, 50), bins=st.integers(1, 60))
def test_calibration_errors_are_ordered_ranged_and_permutable(seed, images, bins):
    log_p, labels = predictions(seed, images)
    # Coarse rounding makes ties.
    p = (log_p.exp() * 8).round()
    p = p / p.sum(-1, keepdim=True) if bool((p.sum(-1) > 0).all()) else log_p.exp()
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    overall = ece(p, labels, 1)
    for metric in (ece, adaptive_ece):
        value = metric(p, labels, bins)
        assert overall - 1e-12 <= value <= 1  # splitting a bin cannot lower the error
        assert metric(p[order], labels[order], bins) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("planted", [0.2, 0.7, 1.0, 3.0, 20.0])
def test_temperature_search_recovers_a_planted_temperature(planted):
    log_p, labels = predictions(3, 20_000)
    found = fit_temperature(log_p * planted, labels)
    assert found == pytest.approx(planted, rel=0.03)
    # Rescaling the input rescales the optimum exactly.
    assert found == pytest.approx(planted * fit_temperature(log_p, labels), rel=1e-7)


def test_temperature_minimises_the_nll():
    log_p, labels = predictions(4, 500)
    loss = lambda s: nll_from_log(temper(log_p * 4, math.exp(s)), labels)
    oracle = optimize.minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    found = fit_temperature((log_p * 4).float(), labels)
    assert found == pytest.approx(math.exp(oracle.x), rel=1e-5)
    assert loss(math.log(found)) <= loss(0.0)


def test_temperature_search_stays_inside_its_bounds():
    logits = torch.tensor([[5.0, 0.0], [0.0, 7.0]])
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    assert fit_temperature(logits, right) == 0.01
    assert fit_temperature(logits * 1e4, right) == 0.01
    assert fit_temperature(logits, right, bounds=(0.5, 2.0)) == 0.5
    assert fit_temperature(logits, wrong) == 100
    assert fit_temperature(logits * 1e4, wrong) == 100
    assert fit_temperature(torch.zeros(2, 3), right) == 1


@pytest.mark.parametrize("count", [20, 200, 20_000])
def test_a_prior_keeps_the_temperature_of_few_rows_near_one(count):
    log_p, labels = predictions(6, count)
    for logits, truth in ((log_p * 4, labels), (log_p * 4, log_p.argmax(-1))):  # in the second all are right
        alone = fit_temperature(logits, truth)
        found = fit_temperature(logits, truth, width=0.5)
        loss = lambda s: count * nll_from_log(temper(logits, math.exp(s)), truth) + s**2 / (2 * 0.5**2)  # noqa: B023
        oracle = optimize.minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
        assert found == pytest.approx(math.exp(oracle.x), rel=1e-4)
        assert abs(math.log(found)) < abs(math.log(alone))
        if count == 20_000 and truth is labels:
            assert found == pytest.approx(alone, rel=2e-3)
    assert alone == 0.01
    assert found > 0.05


def test_temperature_search_accepts_probability_zero_except_for_a_label():
    log_p, labels = predictions(5, 300)
    padded = torch.cat([log_p * 2, torch.full((300, 1), -math.inf)], dim=1)
    assert fit_temperature(padded, labels) == pytest.approx(fit_temperature(log_p * 2, labels), rel=1e-9)
    with pytest.raises(InputError, match=r"^log_probabilities: a label has −inf"):
        fit_temperature(padded, torch.full((300,), 5))


def test_tempering_divides_log_odds_and_keeps_the_rest():
    log_p, _ = predictions(6)
    tempered = temper(log_p.float(), 2.5)
    assert tempered.dtype == torch.float32
    torch.testing.assert_close(tempered.logsumexp(-1), torch.zeros(400), atol=1e-6, rtol=0)
    odds = lambda q: (q[:, 1:] - q[:, :1]).double()
    torch.testing.assert_close(odds(tempered), odds(log_p) / 2.5, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(temper(log_p + 3, 1.0), log_p)


def test_tempering_a_calibrated_network_back_restores_calibration():
    log_p, _ = predictions(7, 40_000)
    labels = labels_from(log_p, 8)
    sharp = temper(log_p, 0.4)
    half = 20_000
    restored = temper(sharp, fit_temperature(sharp[:half], labels[:half]))
    assert ece(restored[half:].exp(), labels[half:]) < 0.015 < 0.1 < ece(sharp[half:].exp(), labels[half:])


def test_wrong_settings_are_named():
    p, labels = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    with pytest.raises(InputError, match=r"^bins: got 0"):
        ece(p, labels, 0)
    with pytest.raises(InputError, match=r"^bins: got -1"):
        adaptive_ece(p, labels, -1)
    with pytest.raises(InputError, match=r"^temperature: got 0"):
        temper(p, 0)
    with pytest.raises(InputError, match=r"^temperature: got nan"):
        temper(p, math.nan)
    with pytest.raises(InputError, match=r"^bounds"):
        fit_temperature(p, labels, bounds=(2.0, 1.0))
    with pytest.raises(InputError, match=r"^log_probabilities"):
        fit_temperature(p * torch.nan, labels)


def test_confidence_by_class_agrees_with_numpy():
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(4), 60)
    labels = rng.integers(0, 3, 60)  # no image of the last class
    levels = (0.05, 0.5, 0.9)
    found = confidence_by_class(torch.from_numpy(p), torch.from_numpy(labels), levels)
    for label in range(3):
        mine = p[labels == label]
        assert found.count[label] == len(mine)
        assert found.accuracy[label].item() == pytest.approx((mine.argmax(1) == label).mean())
        assert found.mean[label].item() == pytest.approx(mine.max(1).mean())
        assert found.quantiles[label].tolist() == pytest.approx(np.quantile(mine.max(1), levels))
    assert found.count[3] == 0
    assert torch.cat([found.accuracy[3:], found.mean[3:], found.quantiles[3]]).isnan().all()
    mean, quantiles = confidence_overall(torch.from_numpy(p), levels)
    assert mean == pytest.approx(p.max(1).mean())
    assert quantiles.tolist() == pytest.approx(np.quantile(p.max(1), levels))
