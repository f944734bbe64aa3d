"""Codebooks of whole posteriors, put together again step by step from scipy's densities and numpy's moments."""

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

import peerbayes as pb
from peerbayes import Address, MeanField
from peerbayes.codebook.build import Sharing, _components_for, cholesky_of, gradient_statistic, share
from peerbayes.codebook.clustering import em, kmeans, thrifty
from peerbayes.codebook.merging import merge
from peerbayes.data import order, to_unit
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components
from peerbayes.posteriors.scales import inverse_softplus

APART = {"components": 12, "threshold": 0.15, "top": 0.02, "smallest": 20, "merge": {"distance": 0}}


@pytest.fixture
def posterior():
    """Two layers with biases; seven weights have a scale that no other is near."""
    generator = torch.Generator().manual_seed(0)
    found = MeanField(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 10), nn.Linear(10, 1, bias=False)))
    with torch.no_grad():
        found.mean.copy_(0.08 * torch.randn(found.layout.size, generator=generator))
        std = 0.01 * torch.randn(found.layout.size, generator=generator).mul(0.2).exp()
        std[500:507] = 0.5
        found.mean[500:507] = 0.1
        found.rho.copy_(inverse_softplus(std))
    return found


def parts_of(posterior):
    """(μ, σ) of the weights, float64, and the layer of each."""
    names = [name for name in posterior.layout.shapes if name.endswith("weight")]
    views = [posterior.layout.views(flat.detach()) for flat in (posterior.mean, posterior.std)]
    points = torch.stack([torch.cat([view[name].flatten() for name in names]) for view in views], 1).double()
    return points, torch.cat([torch.full((views[0][name].numel(),), k) for k, name in enumerate(names)])


def gradients(posterior):
    return torch.randn(len(parts_of(posterior)[0]), generator=torch.Generator().manual_seed(1))


def densities(points, components):
    pairs = zip(components.mean.numpy(), components.covariance.numpy(), strict=True)
    return np.stack([scipy.stats.multivariate_normal(m, c).logpdf(points.numpy()) for m, c in pairs], 1)


def by_steps(posterior, gradient, em_steps):
    """Outliers, components and the component of each weight (-1 for outliers), by the definition of each step."""
    points, _ = parts_of(posterior)
    alone = points[:, 0].abs() > 0.15
    alone[gradient.abs().argsort(descending=True)[: len(points) * 2 // 100]] = True
    by_rule = int(alone.sum())
    inside = (~alone).nonzero()[:, 0]
    here = points[inside]
    labels = torch.cdist(here, kmeans(here, 12, Address(0, "sharing", "kmeans"))).argmin(1)
    rows = [here[labels == k].numpy() for k in range(12)]
    found = Components(
        torch.from_numpy(np.stack([row.mean(0) for row in rows])),
        torch.from_numpy(np.stack([np.cov(row.T, ddof=0) + 1e-12 * np.eye(2) for row in rows])),
        torch.tensor([len(row) for row in rows]).double(),
    )
    if em_steps:
        found = em(here, found, em_steps, len(here), Address(0, "sharing", "em"))
        labels = torch.from_numpy((densities(here, found) + found.count.log().numpy()).argmax(1))
    large = [k for k in range(12) if int((labels == k).sum()) >= 20]
    whole = torch.full((len(points),), -1)
    for new, k in enumerate(large):
        whole[inside[labels == k]] = new
    return points, whole, found.select(torch.tensor(large)), by_rule


@pytest.mark.parametrize("em_steps", [0, 3])
def test_a_codebook_is_what_its_steps_say(posterior, em_steps):
    gradient = gradients(posterior)
    points, label, found, by_rule = by_steps(posterior, gradient, em_steps)
    book, account = share(posterior, Sharing(em_steps=em_steps, **APART), gradient)
    single = (label < 0).nonzero()[:, 0]
    assert torch.equal(book.outlier, single)
    assert set(range(500, 507)) <= set(single.tolist())
    assert torch.equal(torch.stack([book.outlier_mean, book.outlier_std], 1).double(), points[single])
    assert len(found) < 12
    torch.testing.assert_close(book.component.double(), found.mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(book.cholesky.double(), torch.linalg.cholesky(found.covariance)[:, [0, 1, 1], [0, 0, 1]],
                               rtol=1e-5, atol=1e-9)  # fmt: skip
    inverse = torch.linalg.inv(found.covariance)[label]
    offset = points - found.mean[label]
    off = ((offset[:, None] @ inverse @ offset[:, :, None]).flatten() > 5.991) & (label >= 0)
    near = torch.cdist(points[off], found.mean).argsort(1)[:, :5].numpy()
    density = np.take_along_axis(densities(points[off], found), near, 1)
    order = np.argsort(-density, 1)[:, :2]
    pair = torch.from_numpy(np.take_along_axis(near, order, 1))
    share_of = torch.from_numpy(np.take_along_axis(density, order, 1)).softmax(1)
    both = share_of[:, 0] < 29 / 30  # what is nearer to 15/15 of the first is no blend
    assert 5 < int(both.sum()) < int(off.sum()) < 300
    assert torch.equal(book.blended, off.nonzero()[both, 0])
    assert torch.equal(book.blend_component, pair[both])
    torch.testing.assert_close(book.blend_weight.double(), share_of[both], rtol=1e-4, atol=1e-6)
    label = label.index_put((off.nonzero()[~both, 0],), pair[~both, 0])
    assert torch.equal(book.label[label >= 0], label[label >= 0])
    counts = {"weights": len(points), "components": len(found), "components_at_first": 12, "outliers": len(single),
              "outliers_by_rule": by_rule, "outliers_of_small_components": len(single) - by_rule,
              "blended": len(book.blended), "merging": {}}  # fmt: skip
    assert {key: account[key] for key in counts} == counts


def test_merging_sees_what_all_members_of_a_component_have_of_gradients(posterior):
    gradient = gradients(posterior).abs()
    _, label, found, _ = by_steps(posterior, gradient, 0)
    slope = torch.stack([gradient[label == k].double().sum() for k in range(len(found))])
    how = {"distance": 1e-3, "lr": 1.0, "gradient_gate": float(slope.median()) + 1e-3, "spread_gate": 1e-3}
    left, where, log = merge(found, gradient=slope, **how)
    assert 0 < log["merged"] < len(found) - 1
    assert log["gradient_alone"] > 0
    assert log["spread"] == 0
    book, account = share(posterior, Sharing(**APART | {"merge": how}, blend=False), gradient)
    assert account["merging"] == log
    assert account["components"] == len(left)
    torch.testing.assert_close(book.component.double(), left.mean, rtol=1e-6, atol=1e-9)
    assert torch.equal(book.label[label >= 0], where[label[label >= 0]])


def test_thrift_counts_bits_by_layer_and_in_units_of_a_layers_variance(posterior):
    points, part = parts_of(posterior)
    inside = points[:, 0].abs() <= 0.2
    layers = [points[inside & (part == number)].numpy() for number in range(3)]
    unit = scipy.stats.gmean([np.var(layer, axis=0).sum() for layer in layers], weights=[len(x) for x in layers])
    centres, labels = thrifty(points[inside], part[inside], 0.01 * unit)
    assert len(centres) > 5
    options = Sharing(thrift=0.01, smallest=0, blend=False, merge={"distance": 0})
    book, account = share(posterior, options, None)
    assert account["components_at_first"] == len(centres)
    assert torch.equal(book.label[inside], labels)
    plain = thrifty(points[inside], torch.zeros_like(part[inside]), 0.01 * unit)[1]
    assert not torch.equal(plain, labels)


def test_a_layer_of_large_weights_does_not_make_others_coarse():
    """Nor does one whose weights are all the same make them fine."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(60, 50, bias=False), nn.Linear(50, 2, bias=False))
    options, off, found = Sharing(thrift=0.01, outliers=False, blend=False), {}, {}
    for head in ("usual", "large", "constant"):
        with torch.no_grad():
            network[1].weight.mul_(100) if head == "large" else None
            network[1].weight.fill_(0.01) if head == "constant" else None
        posterior = MeanField(network, gain=0.01, start_from=network)
        book, _ = share(posterior, options, None)
        first = posterior.layout.views(posterior.mean.detach())["0.weight"].flatten()
        off[head] = float((book.component[book.label[:3000], 0] - first).square().mean() / first.var())
        found[head] = len(book.label[:3000].unique())
    # By the variance of all weights a large head would leave one component: all of the variance would be lost.
    assert off["large"] < 1.5 * off["usual"] < 0.02
    assert found["large"] > 0.75 * found["usual"] > 9
    assert off["constant"] == pytest.approx(off["usual"], rel=0.2)


def test_a_component_as_large_as_the_smallest_stays(posterior):
    gradient = torch.zeros(len(parts_of(posterior)[0]))
    for smallest, stays in ((7, True), (8, False)):
        options = Sharing(**APART | {"top": 0.0, "smallest": smallest}, blend=False)
        book, _ = share(posterior, options, gradient)
        assert (500 in book.outlier.tolist()) == (not stays)


def test_what_has_no_weights_of_layers_has_none_to_share():
    with pytest.raises(InputError, match="no weights of convolutions or linear layers to share"):
        share(MeanField(nn.LayerNorm(5), bayesian=lambda *_: True), Sharing(), None)


def test_one_scale_that_has_collapsed_is_enough_to_refuse(posterior):
    with torch.no_grad():
        posterior.rho[17] = -200
    with pytest.raises(InputError, match="scales of the posterior have collapsed to 0"):
        share(posterior, Sharing(**APART), None)


def test_one_component_is_neither_merged_nor_blended(posterior):
    book, account = share(posterior, Sharing(components=1, outliers=False), None)
    points, _ = parts_of(posterior)
    assert (account["merging"], account["blended"], len(book.component)) == ({}, 0, 1)
    torch.testing.assert_close(book.component[0].double(), points.mean(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("inliers", "components"),
    [(1, 1), (99, 1), (100, 2), (12_799, 255), (12_800, 256), (256_999, 256), (257_000, 257), (10**7, 6000)],
)
def test_how_many_components_so_many_weights_get(inliers, components):
    assert _components_for(inliers) == components


def test_factors_are_those_of_lapack_and_of_what_has_no_width():
    root = torch.randn(20, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    covariance = root @ root.mT
    expected = torch.linalg.cholesky(covariance)
    torch.testing.assert_close(cholesky_of(covariance), expected[:, [0, 1, 1], [0, 0, 1]])
    flat = torch.tensor([[[0.0, 0.0], [0.0, 9.0]], [[4.0, 6.0], [6.0, 9.0]], [[4.0, 0.0], [0.0, -1e-30]]])
    assert cholesky_of(flat).tolist() == [[0.0, 0.0, 3.0], [2.0, 3.0, 0.0], [2.0, 0.0, 0.0]]


def test_the_gradient_statistic_is_the_mean_over_batches_of_sizes():
    generator = torch.Generator().manual_seed(0)
    split = pb.data.from_arrays((torch.rand(50, 5, 5, generator=generator), torch.arange(50) % 3)).train
    network = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    posterior = MeanField(network, rho=-3.0, name="a").train()
    before = {name: tensor.clone() for name, tensor in posterior.state().items()}
    size = len(split) // 3 + 1
    found = gradient_statistic(posterior, split, seed=4, batch_size=size)
    assert posterior.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.state().items())
    posterior.eval()
    sizes = []
    mixed = order(len(split), Address(4, "a", "gradient statistic/order"))  # classes may be stored one by one
    for number, index in enumerate(mixed.split(size)):
        images, labels = split.batch(index, torch.device("cpu"))
        drawn = posterior.draw(Address(4, "a", "gradient statistic", number))
        loss = F.cross_entropy(posterior(to_unit(images), drawn), labels)
        views = posterior.layout.views(torch.autograd.grad(loss, posterior.mean)[0])
        sizes.append(torch.cat([views[name].abs().flatten() for name in ("1.weight", "3.weight")]))
    assert len(sizes) == 3
    torch.testing.assert_close(found, torch.stack(sizes).mean(0))
