"""Draws of shared weights: their law, whichever way they are made."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn

from codebooks import HERE, book, net
from peerbayes import Address
from peerbayes.codebook.shared import SAMPLINGS, Shared
from peerbayes.math import noise
from peerbayes.math.noise import normal


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@torch.no_grad()
def test_draws_have_the_stated_mean_and_std(sampling, mixture):
    posterior, count = Shared(net(), book(), sampling=sampling, mixture=mixture), 1500
    draws = torch.stack([posterior.draw(HERE.at(number)).flat for number in range(count)]).double()
    std, centred = posterior.std.double(), draws - draws.mean(0)
    assert ((draws.mean(0) - posterior.mean).abs() <= 4.5 * std / count**0.5 + 1e-6).all()
    error = centred.square().std(0) / count**0.5  # of the variance of draws
    assert ((centred.square().mean(0) - std.square()).abs() <= 4.5 * error + 1e-9).all()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@torch.no_grad()
def test_a_blended_weight_of_a_mixture_is_drawn_of_one_component_by_its_shares(sampling):
    codebook = book(blended=40)
    far = torch.arange(5.0)[:, None] * torch.tensor([[100.0, 0.0]])
    posterior = Shared(net(), replace(codebook, component=codebook.component + far), sampling=sampling, mixture=True)
    draws = torch.stack([posterior.draw(HERE.at(number)).flat for number in range(2000)])
    place = posterior.blended
    nearest = (draws[:, place, None] - posterior.component[:, 0]).abs().argmin(-1)
    for column, (chosen, share) in enumerate(zip(posterior.blend_component, posterior.blend_weight[:, 0])):
        assert set(nearest[:, column].tolist()) <= set(chosen.tolist())
        expected = 1.0 if chosen[0] == chosen[1] else share.item()
        found = (nearest[:, column] == chosen[0]).float().mean().item()
        assert abs(found - expected) <= 4.5 * (expected * (1 - expected) / 2000) ** 0.5 + 1e-6
    apart = (posterior.blend_component[:, 0] != posterior.blend_component[:, 1]) & (posterior.blend_weight > 0.2).all(1)
    first = (nearest[:, apart] == posterior.blend_component[apart, 0]).float()
    assert (torch.corrcoef(first.T) - torch.eye(int(apart.sum()))).abs().max() < 0.11  # each by itself


@pytest.mark.parametrize("sampling", ["cluster", "cluster_hier"])
def test_whole_components_are_drawn_once_and_blended_weights_mix_them(sampling):
    codebook = book()
    flat = Shared(net(), codebook, sampling=sampling).draw(HERE).flat
    plain = ~torch.isin(torch.arange(120), torch.cat([codebook.outlier, codebook.blended]))
    values = torch.stack([flat[plain & (codebook.label == k)][0] for k in range(5)])
    assert torch.equal(flat[plain], values[codebook.label[plain]])
    mixed = (codebook.blend_weight * values[codebook.blend_component]).sum(1)
    torch.testing.assert_close(flat[codebook.blended], mixed)


def test_hierarchical_draws_are_independent_within_a_component():
    posterior = Shared(net(), book(blended=0, outliers=0, components=1))
    draws = torch.stack([posterior.draw(HERE.at(number)).flat.detach() for number in range(3000)])
    correlation = torch.corrcoef(draws[:, :20].T)
    assert (correlation - torch.eye(20)).abs().max() < 0.09


def test_hierarchical_draws_have_the_law_of_three_numbers():
    codebook = book(blended=0, outliers=0, components=1)
    (m, s), (a, b, c) = codebook.component[0], codebook.cholesky[0] * 3
    posterior = Shared(net(), replace(codebook, cholesky=codebook.cholesky * 3))
    draws = torch.cat([posterior.draw(HERE.at(number)).flat.detach() for number in range(200)])
    first, second, third = normal(Address(9, "law", "test"), 3 * len(draws)).view(3, -1)
    by_definition = m + a * first + (s + b * first + c * second) * third
    assert stats.ks_2samp(draws, by_definition).pvalue > 0.01
    assert stats.ks_2samp(draws, m + posterior.std[0].item() * first).pvalue < 1e-6  # no Gaussian has it


@pytest.mark.parametrize("network", [net(), nn.Linear(11, 11)], ids=["even", "odd"])
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_are_the_same_with_and_without_a_gradient_and_in_any_pieces(sampling, mixture, network, monkeypatch):
    size = 121 if isinstance(network, nn.Linear) else 120
    posterior = Shared(network, book(size), sampling=sampling, mixture=mixture)
    trained = posterior.draw(HERE).flat
    assert trained.requires_grad
    for piece in (noise.PIECE, 7):
        monkeypatch.setattr(noise, "PIECE", piece)
        with torch.no_grad():
            assert torch.equal(posterior.draw(HERE).flat, trained)
            assert torch.equal(posterior.place(normal(HERE, posterior.noise_size))[0], trained)


def test_a_component_without_spread_has_a_finite_gradient():
    codebook = book()
    posterior = Shared(net(), replace(codebook, cholesky=torch.zeros(5, 3)))
    posterior.draw(HERE).flat.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in posterior.parameters() if parameter.grad is not None)


KERNEL = """
import itertools
import torch
from codebooks import HERE, book, net
from peerbayes.math import noise
from peerbayes.codebook.shared import Shared
from peerbayes.codebook.book import TINY
from peerbayes.codebook.book import drawn_from
from peerbayes.kernels.shared_draw import shared_draw
for sampling, size in itertools.product(("hierarchical", "moment", "mean"), (120, 121)):
    posterior = Shared(net() if size == 120 else torch.nn.Linear(11, 11), book(size), sampling=sampling)
    with torch.no_grad():
        table, drawn = torch.stack(drawn_from(posterior, sampling)), torch.zeros(size + 1)
        about = {"HIERARCHICAL": sampling == "hierarchical", "TINY": TINY, "BLOCK": 32}
        shared_draw[(4,)](table, posterior._rows, noise.start(HERE), drawn, size, table.shape[1], **about)
        torch.testing.assert_close(drawn[:-1], posterior.draw(HERE).flat)
        assert drawn[-1] == 0  # nothing is written beyond the weights
"""


def test_the_kernel_of_gpus_makes_the_same_draws():
    pytest.importorskip("triton")
    paths = [*sys.path, str(Path(__file__).parents[1])]
    where = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=where, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@torch.no_grad()
def test_draws_on_a_gpu_are_those_of_the_cpu(sampling, mixture):
    expected = Shared(net(), book(), sampling=sampling, mixture=mixture).draw(HERE).flat
    found = Shared(net(), book(), sampling=sampling, mixture=mixture).cuda().draw(HERE).flat
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
