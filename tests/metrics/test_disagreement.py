"""Diversity against torch.distributions, pair by pair."""

import itertools
import math

import pytest
import torch
from eval_oracles import predictions
from torch.distributions import Categorical, kl_divergence

from peerbayes.errors import InputError
from peerbayes.metrics.scores import disagreement_rate, pairwise_diversity


def peers(count):
    return torch.stack([predictions(seed, images=60)[0] for seed in range(count)])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_diversity_is_the_mean_kl_over_ordered_pairs(count):
    log_p = peers(count)
    pairs = list(itertools.permutations(range(count), 2))
    kl = [kl_divergence(Categorical(logits=log_p[i]), Categorical(logits=log_p[j])).mean() for i, j in pairs]
    assert pairwise_diversity(log_p) == pytest.approx(float(sum(kl)) / len(pairs), rel=1e-10)
    assert pairwise_diversity(log_p.float()) == pytest.approx(pairwise_diversity(log_p), rel=1e-5)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_disagreement_is_the_mean_over_pairs(count):
    log_p = peers(count)
    answers = log_p.argmax(-1)
    pairs = list(itertools.combinations(range(count), 2))
    expected = sum(float((answers[i] != answers[j]).double().mean()) for i, j in pairs) / len(pairs)
    assert 0 < expected < 1
    assert disagreement_rate(log_p) == pytest.approx(expected)


def test_equal_peers_do_not_differ():
    log_p = peers(1).expand(3, -1, -1)
    assert pairwise_diversity(log_p) == pytest.approx(0, abs=1e-14)
    assert disagreement_rate(log_p) == 0


def test_probability_zero_is_infinite_only_where_another_peer_disagrees():
    shared = torch.tensor([[[0.5, 0.5, 0.0]], [[0.25, 0.75, 0.0]]], dtype=torch.float64).log()
    a, b = (Categorical(logits=q[0, :2]) for q in shared)
    expected = float(kl_divergence(a, b) + kl_divergence(b, a)) / 2
    assert pairwise_diversity(shared) == pytest.approx(expected)
    alone = torch.tensor([[[0.5, 0.5, 0.0]], [[0.25, 0.5, 0.25]]]).log()
    assert pairwise_diversity(alone) == math.inf


def test_small_differences_are_not_lost():
    # KL(p ‖ p + δ) ≈ ½ Σ δ² / p: here 2e-12 with δ = 1e-6 and p = ½.
    p = torch.tensor([[[0.5, 0.5]], [[0.5 + 1e-6, 0.5 - 1e-6]]], dtype=torch.float64)
    assert pairwise_diversity(p.log()) == pytest.approx(2e-12, rel=1e-3)


def test_wrong_input_is_named():
    log_p = peers(2)
    for metric in (pairwise_diversity, disagreement_rate):
        for bad in (log_p[0], log_p[:, :0], log_p * torch.nan, log_p * 3):
            with pytest.raises(InputError, match=r"^log_probabilities"):
                metric(bad)
        with pytest.raises(InputError, match=r"^log_probabilities: holds 1 peer"):
            metric(log_p[:1])
