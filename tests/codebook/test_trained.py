"""Merging of components while they are trained: pooled moments, labels, moments of optimisers, nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from peerbayes import Address
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.peer import merge_trained
from peerbayes.codebook.shared import Shared
from peerbayes.posteriors.base import Posterior

NEAR = {"distance": 1e-2, "spread_gate": 1.0}
GROUPS = {0: 3, 2: 1, 4: 2}  # how many components are at about which mean
BLENDS = [(0, 2), (1, 3), (3, 4), (4, 5)]  # of which the first and the last become one component


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))


def codebook():
    generator = torch.Generator().manual_seed(0)
    place = torch.tensor([[0.0, 0.2]] * 3 + [[2.0, 0.3]] + [[4.0, 0.5]] * 2)
    share = torch.tensor([[3.0], [5.0], [8.0], [10.0]]) / 15
    sign = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0])[:, None]  # a factor may get below 0 in training
    return Codebook(
        component=place + 0.01 * torch.randn(6, 2, generator=generator),
        cholesky=sign * (0.05 + 0.01 * torch.rand(6, 3, generator=generator)),
        label=torch.randint(6, (260,), generator=generator),
        blended=torch.tensor([7, 30, 31, 200]),
        blend_component=torch.tensor(BLENDS),
        blend_weight=torch.cat([share, 1 - share], 1),
        outlier=torch.tensor([2, 100]),
        outlier_mean=torch.tensor([7.0, -7.0]),
        outlier_std=torch.tensor([0.1, 0.2]),
    )


def pooled(book, group):
    """Mean and covariance of all weights that components stand for, one by one."""
    means, covariances, counts = [], [], []
    plain = [i for i in range(260) if i not in book.blended and i not in book.outlier]
    for k in group:
        a, b, c = book.cholesky[k].double()
        factor = torch.stack([torch.stack([a, a * 0]), torch.stack([b, c])])
        means.append(book.component[k].double())
        covariances.append(factor @ factor.T)
        counts.append(
            sum(int(book.label[i]) == k for i in plain) + book.blend_weight[book.blend_component == k].sum().double()
        )
    share = torch.stack(counts) / sum(counts)
    mean = sum(s * m for s, m in zip(share, means))
    return mean, sum(s * (v + torch.outer(m - mean, m - mean)) for s, m, v in zip(share, means, covariances))


@pytest.fixture
def merged():
    posterior = Shared(net(), codebook(), bits=32)
    book = replace(posterior.codebook(), **{n: t.detach().clone() for n, t in vars(posterior.codebook()).items()})
    log = merge_trained(posterior, **NEAR)
    return posterior, book, log


def test_near_components_become_one_with_the_pooled_moments_of_their_weights(merged):
    posterior, book, log = merged
    assert (log["before"], log["after"], log["merged"]) == (6, 3, 3)
    assert int(posterior.used.sum()) == 3
    place = book.component[:, 0].round()
    for value, size in GROUPS.items():
        old = (place == value).nonzero()[:, 0].tolist()
        assert len(old) == size
        (new,) = {int(k) for i, k in enumerate(posterior.label) if posterior._rows[i] < 6 and book.label[i] in old}
        mean, covariance = pooled(book, old)
        a, b, c = posterior.cholesky[new].detach().double()
        torch.testing.assert_close(posterior.component[new].detach().double(), mean, rtol=1e-5, atol=1e-6)
        found = torch.stack([torch.stack([a * a, a * b]), torch.stack([a * b, b * b + c * c])])
        torch.testing.assert_close(found, covariance, rtol=1e-4, atol=1e-8)


def test_a_component_that_nothing_is_near_stays_as_it_is_to_the_last_bit(merged):
    posterior, book, _ = merged
    alone = int((book.component[:, 0].round() == 2).nonzero())
    assert torch.equal(posterior.component[alone], book.component[alone])
    assert torch.equal(posterior.cholesky[alone], book.cholesky[alone])


def test_the_prior_is_anchored_at_the_pooled_moments_of_the_anchors(merged):
    posterior, _, _ = merged
    # Nothing was trained: by the rule of moments components are their own anchors still.
    torch.testing.assert_close(posterior.anchor_component[posterior.used], posterior.component[posterior.used])
    torch.testing.assert_close(posterior.anchor_cholesky[posterior.used], posterior.cholesky[posterior.used])
    every = posterior.kl_per_weight()
    single = torch.isin(torch.arange(260), posterior.outlier)
    assert every[~single].abs().max() < 1e-5


def test_training_moves_components_and_not_what_the_prior_is_anchored_at():
    posterior = Shared(net(), codebook())
    book = replace(posterior.codebook(), **{n: t.detach().clone() for n, t in vars(posterior.codebook()).items()})
    with torch.no_grad():
        posterior.component += torch.tensor([0.5, 0.1])
        posterior.cholesky *= 1.2
    merge_trained(posterior, **NEAR)
    place = book.component[:, 0].round()
    for value in GROUPS:
        new = int((posterior.used & (place == value)).nonzero())
        mean, covariance = pooled(book, (place == value).nonzero()[:, 0].tolist())
        a, b, c = posterior.anchor_cholesky[new].double()
        torch.testing.assert_close(posterior.anchor_component[new].double(), mean, rtol=1e-5, atol=1e-6)
        found = torch.stack([torch.stack([a * a, a * b]), torch.stack([a * b, b * b + c * c])])
        torch.testing.assert_close(found, covariance, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(posterior.component[new].detach().double(), mean + torch.tensor([0.5, 0.1]).double())


@pytest.mark.parametrize("sampling", ["moment", "cluster"])
def test_whole_components_count_once_in_the_kl_and_those_without_weights_never(sampling):
    posterior = Shared(net(), codebook(), sampling=sampling, prior="normal", prior_std=1.0)
    merge_trained(posterior, **NEAR)
    plain = ~torch.isin(torch.arange(260), torch.cat([posterior.blended, posterior.outlier]))
    each = posterior.kl_per_weight()
    if sampling == "moment":
        torch.testing.assert_close(posterior.kl(), each.sum())
        return
    firsts = [int((plain & (posterior.label == k)).nonzero()[0]) for k in posterior.used.nonzero()[:, 0]]
    torch.testing.assert_close(posterior.kl(), each[firsts].sum() + each[posterior.outlier].sum())


def test_nothing_moves_so_a_captured_step_sees_what_has_changed():
    posterior = Shared(net(), codebook())
    held = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in held.items()}
    noise = torch.randn(posterior.noise_size, generator=torch.Generator().manual_seed(1))
    before = posterior.place(noise)[0]
    merge_trained(posterior, **NEAR)
    now = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    assert all(now[name] is tensor for name, tensor in held.items())
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in now.items()} == places
    assert not torch.equal(posterior.place(noise)[0], before)


def test_moments_of_what_has_become_one_are_added():
    posterior = Shared(net(), codebook())
    before = posterior.component[:, 0].detach().round()
    generator = torch.Generator().manual_seed(2)
    moments = [torch.randn(6, columns, generator=generator) for columns in (2, 3)]
    expected = [torch.stack([m[before == v].sum(0) for v in GROUPS]) for m in moments]
    merge_trained(posterior, moments, **NEAR)
    order = [int((posterior.used & (before == v)).nonzero()) for v in GROUPS]
    for found, wanted in zip(moments, expected):
        torch.testing.assert_close(found[order], wanted)
        assert (found[~posterior.used] == 0).all()


def test_a_steep_component_is_not_merged_and_the_log_says_why():
    posterior = Shared(net(), codebook())
    before = {name: tensor.clone() for name, tensor in posterior.state().items()}
    log = merge_trained(posterior, gradient=torch.full((6, 2), 1e6), **NEAR, lr=1e-5)
    assert log["merged"] == 0
    assert log["gradient_alone"] == log["near"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.state().items())


def test_merging_again_merges_nothing_more(merged):
    posterior, _, _ = merged
    log = merge_trained(posterior, **NEAR)
    assert (log["before"], log["after"], log["merged"]) == (3, 3, 0)


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", ["hierarchical", "cluster"])
@pytest.mark.parametrize("bits", [32, 10])
def test_a_file_holds_what_weights_have_and_the_same_distributions(sampling, mixture, bits, tmp_path):
    posterior = Shared(net(), codebook(), sampling=sampling, mixture=mixture, bits=bits)
    merge_trained(posterior, **NEAR)
    mean, std = posterior.mean.detach(), posterior.std.detach()
    posterior.save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", net())
    assert len(again.component) == len(posterior.component) == 3
    assert again.blended.tolist() == posterior.blended.tolist() == [30, 31]  # the others have one component now
    close = {"rtol": 1e-6, "atol": 1e-7} if bits == 32 else {"rtol": 0.05, "atol": 0.01}
    torch.testing.assert_close(again.mean, mean, **close)
    torch.testing.assert_close(again.std, std, **close)
    here = Address(0, "peer", "draw")
    assert torch.equal(again.draw(here).flat, posterior.draw(here).flat)
