"""Detection scores against scikit-learn, with many ties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from peerbayes.errors import InputError
from peerbayes.metrics.ood import aupr, auroc, fpr_at_tpr

# Few distinct values make ties the rule.
tied = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40)
spread = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=40)
scores = tied | spread


def joined(inside, outside):
    return np.r_[np.zeros(len(inside)), np.ones(len(outside))], np.r_[inside, outside]


@settings(max_examples=120, deadline=None)
@given(inside=scores, outside=scores, tpr=st.sampled_from([0.05, 0.5, 0.55, 0.85, 0.95, 1.0]))
def test_detection_agrees_with_scikit_learn(inside, outside, tpr):
    truth, score = joined(inside, outside)
    tensors = torch.tensor(inside), torch.tensor(outside)
    assert auroc(*tensors) == pytest.approx(sk.roc_auc_score(truth, score), abs=1e-12)
    assert aupr(*tensors) == pytest.approx(sk.average_precision_score(truth, score), abs=1e-12)
    fpr, rates, _ = sk.roc_curve(truth, score, drop_intermediate=False)
    assert fpr_at_tpr(*tensors, tpr) == pytest.approx(fpr[rates >= tpr].min(), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(inside=scores, outside=scores)
def test_complement_symmetries(inside, outside):
    a, b = torch.tensor(inside), torch.tensor(outside)
    assert auroc(a, b) + auroc(b, a) == pytest.approx(1)
    assert auroc(a, b) == auroc(-b, -a)
    assert auroc(a, b) == auroc(a.flip(0) * 2, b.flip(0) * 2)
    assert auroc(a, a) == pytest.approx(0.5)
    assert 0 < aupr(a, b) <= 1


def test_extremes():
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0, 4.0])
    assert (auroc(low, high), aupr(low, high), fpr_at_tpr(low, high)) == (1, 1, 0)
    assert (auroc(high, low), fpr_at_tpr(high, low)) == (0, 1)
    same = torch.zeros(7)
    assert (auroc(same, high[:1] * 0), aupr(same, high * 0), fpr_at_tpr(same, high * 0)) == (0.5, 0.3, 1)


def test_rates_that_floats_cannot_hold_are_met_exactly():
    # 55 of 100 is a true-positive rate of 0.55, although 0.55 * 100 is a little above 55.
    inside, outside = torch.arange(100).float() - 0.5, torch.arange(100).float()
    assert fpr_at_tpr(inside, outside, 0.55) == 54 / 100
    assert fpr_at_tpr(inside, outside, 0.551) == 55 / 100


def test_different_types_and_infinities_compare_by_value():
    inside = torch.tensor([0.1, 0.2, float("-inf")], dtype=torch.float64)
    outside = torch.tensor([0.5, 0.0, float("inf")], dtype=torch.float32)
    assert auroc(inside, outside) == pytest.approx((3 + 1 + 3) / 9)


def test_wrong_input_is_named():
    good = torch.tensor([1.0, 2.0])
    for metric in (auroc, aupr, fpr_at_tpr):
        with pytest.raises(InputError, match=r"^scores_in: got shape"):
            metric(good[:0], good)
        with pytest.raises(InputError, match=r"^scores_out: got shape"):
            metric(good, good[None])
        with pytest.raises(InputError, match=r"^scores_out: holds NaN"):
            metric(good, good * torch.nan)
    for tpr in (0.0, 1.2):
        with pytest.raises(InputError, match=r"^tpr"):
            fpr_at_tpr(good, good, tpr)
