"""Scales while they learn: what weight decay may pull at, rates and optimisers of their own, and who does not move."""

import copy

import pytest
import torch
from torch import nn

from learners import Recorder
from peerbayes import terms
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.shared import Shared
from peerbayes.data import ArraySplit, Dataset
from peerbayes.engine.diagnostics import changes, sampled
from peerbayes.engine.stages import StageState
from peerbayes.math.noise import Address
from peerbayes.posteriors import Laplace, MCDropout, MeanField, Point, Posterior, RankOne, Swag
from peerbayes.recipes import settings
from peerbayes.recipes.recipe import Recipe, load_recipe, packaged
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
    "swag": (lambda: Swag(net()), {"mean", "rest"}),
    "laplace": (lambda: Laplace(net()), {"mean", "rest"}),
    "mc_dropout": (lambda: MCDropout(nn.Sequential(net(), nn.Dropout(0.1), nn.Linear(3, 3))), {"mean", "rest"}),
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


# ---- steps of σ -------------------------------------------------------------------------------------------------


def state_of(posterior, **optimizer):
    stage = settings.Stage(epochs=1, optimizer={"name": "sgd", "lr": 1e-3} | optimizer, terms={"likelihood": {}})
    return StageState(stage, {"a": posterior}, {"a": None}, Address(0))


def stepped(state, posterior, gradients):
    """Take a step for each gradient by σ, handed over as the gradient by ρ that it is."""
    for gradient in gradients:
        slope = posterior.rho.detach().sigmoid()
        for parameter in posterior.parameters():
            parameter.grad = torch.zeros_like(parameter)
        posterior.rho.grad = gradient * slope
        state.update(["a"])


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"name": "sgd"}, torch.optim.SGD),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True}, lambda p, lr: torch.optim.SGD(p, lr, 0.9, nesterov=True)),
        ({"name": "adam"}, torch.optim.Adam),
    ],
)
def test_steps_in_sigma_are_those_of_an_optimiser_of_raw_scales(options, make):
    """The optimisers of torch over a plain tensor σ are the oracle; ρ only holds what they find."""
    posterior = MeanField(net(), gain=0.5)
    sigma = nn.Parameter(posterior.std.detach().clone())
    oracle, state = make([sigma], lr=1e-4), state_of(posterior, scale_lr=1e-4, scale_space="sigma", **options)
    torch.manual_seed(0)
    gradients = torch.randn(20, len(sigma)) * 0.1 if options["name"] == "sgd" else torch.randn(4, len(sigma))
    for gradient in gradients:
        sigma.grad = gradient.clone()
        oracle.step()
    stepped(state, posterior, gradients)
    torch.testing.assert_close(posterior.std.detach(), sigma.detach(), rtol=2e-5, atol=0)


def test_steps_in_sigma_stay_positive_and_what_has_no_gradient_stays():
    posterior = MeanField(net(), gain=0.01)
    before, state = posterior.std.detach().clone(), state_of(posterior, scale_lr=1e3, scale_space="sigma")
    gradient = torch.zeros_like(before)
    gradient[::3], gradient[1::3] = 1e6, -1e6
    rho = posterior.rho.detach().clone()
    stepped(state, posterior, [gradient])
    after = posterior.std.detach()
    torch.testing.assert_close(after[::3], before[::3] / 2)
    torch.testing.assert_close(after[1::3], before[1::3] * 2)
    assert torch.equal(posterior.rho.detach()[2::3], rho[2::3])
    stepped(state, posterior, [gradient] * 200)
    assert posterior.std.gt(0).all().item()
    assert posterior.rho.isfinite().all().item()


def test_scales_of_every_posterior_can_take_steps_in_sigma():
    """What is not kept as ρ, such as Cholesky factors, moves as it did."""
    for make, _ in POSTERIORS.values():
        moves = []
        for space in (None, "sigma"):
            posterior = make()
            state = state_of(posterior, lr=1e-5, scale_space=space)
            before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
            for parameter in posterior.parameters():
                parameter.grad = torch.ones_like(parameter)
            state.update(["a"])
            moves.append({name: p.detach() - before[name] for name, p in posterior.named_parameters()})
        assert posterior.rhos <= posterior.scales
        for name, tensor in before.items():
            if name in posterior.rhos:  # dσ = lr ∂L/∂σ
                rho, slope = tensor.double(), tensor.double().sigmoid()
                moved = torch.nn.functional.softplus(rho + moves[1][name]) - torch.nn.functional.softplus(rho)
                torch.testing.assert_close(moved, -1e-5 / slope, rtol=5e-3, atol=0)
            else:
                assert torch.equal(moves[0][name], moves[1][name]), name


ALONE = {"likelihood": {}, "kl": {"scheme": "elbo"}}
PAPER = {"name": "sgd", "lr": 1e-4, "scale_lr": 1e-3, "momentum": 0.9, "nesterov": True}


def test_the_papers_stage_1_learns_scales():
    """Its rate is of σ: of ρ it moves nothing, which is said."""
    make = {"gain": 0.01, "prior": "anchored", "prior_std": 0.1}
    many = {"likelihood": {}, "kl": {"scheme": "elbo", "weight": 16 / 1600}}  # as with 1600 images
    before, after, still = trained(MeanField(net(), **make), PAPER, many, freeze_rest=True, epochs=2)
    assert before["rho"].sub(after["rho"]).abs().max() < 1e-4
    (warning,) = [text for text in still.warnings if "scales" in text]
    assert "the scales of peer 'a' do not move: epoch 1 changed them by" in warning
    assert "scale_space" in warning
    sigma = PAPER | {"scale_space": "sigma"}
    before, after, recorder = trained(MeanField(net(), **make), sigma, many, freeze_rest=True, epochs=2)
    assert after["rho"].sub(before["rho"]).abs().median() > 0.1
    assert not [text for text in recorder.warnings if "scales" in text]
    assert recorder.lines[0]["peers"]["a"]["change"]["scales"] > 0.1


def test_packaged_recipes_with_a_rate_of_scales_mean_a_rate_of_sigma():
    """Where SGD takes them; Adam's steps of ρ are as long as its rate, however small σ is."""
    every = [(name, stage) for name in packaged() for stage in load_recipe(name).stages]
    stages = {name: stage for name, stage in every if stage.optimizer.scale_lr and stage.optimizer.name == "sgd"}
    assert {"sharing/digits-resnet8-stage1", "sharing/cifar10-resnet20-scratch1", "sharing/stage1"} <= stages.keys()
    assert {stage.optimizer.scale_space for stage in stages.values()} == {"sigma"}


# ---- who does not move ------------------------------------------------------------------------------------------


def test_the_change_of_an_epoch_is_told_by_group():
    posterior = MeanField(net(), rho=-3.0)
    _, _, recorder = trained(posterior, {"name": "adam", "lr": 1e-2}, ALONE, epochs=3)
    for line in recorder.lines:
        assert list(line["peers"]["a"]["change"]) == ["means", "deterministic", "scales"]
    assert not recorder.warnings


def test_the_change_of_an_epoch_is_relative_to_its_beginning():
    posterior = MeanField(net(), rho=-3.0)
    before, after, recorder = trained(posterior, {"name": "adam", "lr": 1e-2}, ALONE)
    change = recorder.lines[0]["peers"]["a"]["change"]
    softplus = torch.nn.functional.softplus
    groups = {"means": ("mean", lambda t: t), "deterministic": ("rest", lambda t: t), "scales": ("rho", softplus)}
    for group, (name, value) in groups.items():
        old, new = value(before[name]), value(after[name])
        assert change[group] == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-5)


@pytest.mark.parametrize("warmup", [0, 1.5])
def test_what_does_not_move_is_said_once_after_the_warm_up(warmup):
    @terms.term(build=lambda _shapes, _options: Spread())
    def unused_helper(step, peer):
        return 0.0 * step.module(peer).weight.sum()

    terms_given = {"likelihood": {}, "unused_helper": {}}
    _, _, recorder = trained(Point(net()), {"name": "sgd", "lr": 1e-12}, terms_given, epochs=4, warmup=warmup)
    still = [text for text in recorder.warnings if "do not move" in text]
    assert [text.split(" of peer")[0] for text in still] == ["the means", "the deterministic parameters", "the helpers"]
    assert all(f"epoch {1 if not warmup else 2} " in text for text in still)


def test_large_parameters_are_sampled():
    """A sample of a long parameter with a step that meets all channels stands for all of it."""
    posterior = MeanField(nn.Sequential(nn.Flatten(), nn.Linear(16, 8192), nn.Linear(8192, 3)), rho=-3.0)
    state = state_of(posterior)
    numbers = sampled(state, {"a": posterior})
    assert all(tensor.numel() <= 2**16 for tensor in numbers.values())
    before = {name: tensor.clone() for name, tensor in numbers.items()}
    with torch.no_grad():
        posterior.mean.mul_(1.01)
    assert changes(before, sampled(state, {"a": posterior}), ["a"])["a"] == pytest.approx(
        {"means": 0.01, "scales": 0.0}, rel=1e-4
    )


@pytest.mark.parametrize("old", [False, True])
def test_a_checkpoint_within_an_epoch_goes_on_as_it_was_also_one_of_before(old):
    """Checkpoints of before know neither what an epoch began with nor who has been told of: they go on without."""
    saved, lines = [], {}

    def learner(lines_to):
        recipe = made_recipe(PAPER | {"scale_space": "sigma"}, ALONE, epochs=2)

        def save(tensors, about):
            saved.append(({name: t.detach().clone() for name, t in tensors.items()}, copy.deepcopy(about)))

        options = {"save": save, "checkpoint_every": 2}
        posterior = MeanField(net(), gain=0.01, prior="anchored", prior_std=0.1)
        return posterior, Learner(recipe, {"a": posterior}, made_data(), 0, log=lines_to.append, **options)

    whole, training = learner(lines.setdefault("whole", []))
    training.run()
    tensors, about = next(both for both in saved if both[1]["position"]["step"] == 2)
    assert any(name.startswith("before/") for name in tensors)
    assert not any(name.startswith("before/") for name in saved[-1][0])  # where an epoch ends nothing has to be known
    if old:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("before/")}
        del about["position"]["still"]
    resumed, training = learner(lines.setdefault("resumed", []))
    training.restore(tensors, about)
    training.run()
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in whole.state().items())
    changes_of_epochs = {who: [line["peers"]["a"].get("change") for line in epochs] for who, epochs in lines.items()}
    expected = [None, changes_of_epochs["whole"][1]] if old else changes_of_epochs["whole"]
    assert changes_of_epochs["resumed"] == expected
