"""Scales while they learn: what weight decay may pull at, rates and optimisers of their own, and who does not move."""

import pytest
import torch
from torch import nn

from learners import Recorder
from peerbayes import terms
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.shared import Shared
from peerbayes.data import ArraySplit, Dataset
from peerbayes.posteriors import MeanField, Point, Posterior, RankOne
from peerbayes.recipes.recipe import Recipe
from peerbayes.training.learner import Learner

STILL = {"likelihood": {"weight": 0.0}}  # a gradient of 0, so that whatever changes has decayed


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def made_data(count=16):
    torch.manual_seed(5)
    split = ArraySplit((torch.rand(count, 1, 4, 4) * 255).to(torch.uint8), torch.arange(count) % 3)
    return Dataset("made", split, None, split, 3, None, (1, 4, 4), (0.5,), (0.3,))


def made_recipe(optimizer, terms_given, **stage):
    peer = {"name": "a", "network": "mlp", "posterior": {"kind": "point"}}
    stages = [{"epochs": 1, "optimizer": optimizer, "terms": terms_given} | stage]
    table = {"title": "t", "data": {"batch_size": 4}, "peers": [peer], "stages": stages, "gradient_share_every": 0}
    return Recipe.parse(table, "test")


def trained(posterior, optimizer, terms_given=STILL, **stage):
    """Train a posterior for an epoch of four steps; return its parameters before and after."""
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    recorder = Recorder()
    Learner(made_recipe(optimizer, terms_given, **stage), {"a": posterior}, made_data(), 0, reporter=recorder).run()
    return before, {name: p.detach() for name, p in posterior.named_parameters()}, recorder


# ---- weight decay -----------------------------------------------------------------------------------------------


def shared():
    torch.manual_seed(0)
    size, outliers = 16 * 6 + 6 * 3, 9
    book = Codebook(
        component=torch.tensor([[-0.3, 0.02], [0.1, 0.03], [0.4, 0.05]]),
        cholesky=torch.rand(3, 3) * 0.01,
        label=torch.randint(3, (size,)),
        blended=torch.empty(0, dtype=torch.int64),
        blend_component=torch.empty(0, 2, dtype=torch.int64),
        blend_weight=torch.empty(0, 2),
        outlier=torch.arange(outliers),
        outlier_mean=torch.randn(outliers),
        outlier_std=torch.rand(outliers) * 0.1 + 0.01,
    )
    return Shared(net(), book)


class Correlated(MeanField):
    """A posterior of somebody's own, with a covariance that it says nothing of."""

    def __init__(self, network):
        super().__init__(network, rho=-3.0)
        self.covariance = nn.Parameter(torch.randn(self.layout.size, 2))

    def place(self, noise):
        flat, std = super().place(noise)
        return flat + 0 * self.covariance.sum(), std


POSTERIORS = {
    "point": (lambda: Point(net()), {"mean", "rest"}),
    "mean_field": (lambda: MeanField(net(), rho=-3.0), {"mean", "rest"}),
    "anchored": (lambda: MeanField(net(), rho=-3.0, prior="anchored"), {"rest"}),
    "rank_one": (lambda: RankOne(net(), 2, factors="random", gaussian=True), {"mean", "rest", "deviations"}),
    "rank_one, kept": (
        lambda: RankOne(net(), 2, factors="random", gaussian=True, decay_factors=False),
        {"mean", "rest"},
    ),
    "shared": (shared, {"rest"}),
    "of one's own": (lambda: Correlated(net()), {"mean", "rest"}),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("kind", POSTERIORS)
def test_weight_decay_pulls_at_means_and_never_at_a_scale(kind, optimizer):
    make, decays = POSTERIORS[kind]
    before, after, _ = trained(make(), {"name": optimizer, "lr": 0.1, "weight_decay": 0.5})
    assert decays <= before.keys()
    for name, tensor in before.items():
        if name not in decays:
            assert torch.equal(after[name], tensor), name
        elif optimizer != "adam":  # whose steps are of one size
            torch.testing.assert_close(after[name], (1 - 0.1 * 0.5) ** 4 * tensor, rtol=1e-5, atol=0)
        else:
            assert (after[name].norm() < tensor.norm()).item(), name


def test_every_posterior_is_tested_for_decay():
    def kinds(of):
        return {of} | {kind for child in of.__subclasses__() for kind in kinds(child)}

    own = {kind for kind in kinds(Posterior) if kind.__module__.startswith("peerbayes.") and "kind" in kind.__dict__}
    assert own == {type(make()) for make, _ in POSTERIORS.values()} - {Correlated}


class Spread(nn.Module):
    scales = ("rho",)

    def __init__(self):
        super().__init__()
        self.weight, self.rho = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), -5.0))


def test_a_helper_names_its_scales_and_they_do_not_decay():
    @terms.term(build=lambda _shapes, _options: Spread())
    def spread_helper(step, peer):
        module = step.module(peer)
        return 0.0 * (step.logits(peer).sum() + module.weight.sum() + module.rho.sum())

    posterior = Point(net())
    recipe = made_recipe({"name": "sgd", "lr": 0.1, "weight_decay": 0.5}, {"spread_helper": {}})
    learner = Learner(recipe, {"a": posterior}, made_data(), 0)
    learner.run()
    helper = learner.state.modules["spread_helper", "a"]
    torch.testing.assert_close(helper.weight.detach(), torch.full((3,), 0.95**4))
    assert torch.equal(helper.rho.detach(), torch.full((3,), -5.0))
