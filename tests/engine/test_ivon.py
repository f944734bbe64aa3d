"""IVON: by hand, against the exact posterior, in recipes, captured and resumed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learners import Recorder, same, stopped_at
from peerbayes.api.fitting import train
from peerbayes.data import ArraySplit, Dataset
from peerbayes.engine.ivon import Ivon
from peerbayes.errors import InputError
from peerbayes.posteriors import MeanField, Point
from peerbayes.recipes import settings
from peerbayes.recipes.recipe import Recipe
from peerbayes.training.learner import Learner

OPTIONS = {"name": "ivon", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def pair(mean, rho, dtype=torch.float64):
    return nn.Parameter(torch.tensor(mean, dtype=dtype)), nn.Parameter(torch.tensor(rho, dtype=dtype))


def groups(mean, rho, *others):
    """Return groups as stages make them: scales do not decay."""
    return [{"params": [mean, *others]}, {"params": [rho], "weight_decay": 0.0}]


def test_two_steps_by_hand():
    mean, rho = pair([0.5, -1.0], [-2.0, -3.0])
    other = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    ess, decay, beta1, beta2, lr = 40.0, 0.02, 0.8, 0.9, 0.3
    optimizer = Ivon(
        groups(mean, rho, other), {mean: rho}, lr=lr, ess=ess, weight_decay=decay, momentum=beta1, beta2=beta2
    )
    m, sigma, w = [0.5, -1.0], [math.log1p(math.exp(-2.0)), math.log1p(math.exp(-3.0))], 2.0
    h, g, g_w = [1 / (ess * s * s) - decay for s in sigma], [0.0, 0.0], 0.0
    for step, noise in enumerate(([0.3, -1.2], [-0.7, 2.0]), start=1):
        loss = (
            1.5 * (mean + F.softplus(rho) * torch.tensor(noise, dtype=torch.float64) - 2.0) ** 2
        ).sum() + other.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for i, eps in enumerate(noise):
            gradient = 3.0 * (m[i] + sigma[i] * eps - 2.0)
            found = gradient * eps / sigma[i]
            g[i] = beta1 * g[i] + (1 - beta1) * gradient
            correction = 0.5 * (1 - beta2) ** 2 * (h[i] - found) ** 2 / (h[i] + decay)
            h[i] = beta2 * h[i] + (1 - beta2) * found + correction
            m[i] -= lr * (g[i] / (1 - beta1**step) + decay * m[i]) / (h[i] + decay)
            sigma[i] = 1 / math.sqrt(ess * (h[i] + decay))
        g_w = beta1 * g_w + (1 - beta1) * 1.0
        w -= lr * (g_w / (1 - beta1**step) + decay * w)
    assert mean.tolist() == pytest.approx(m, rel=1e-12)
    assert F.softplus(rho).tolist() == pytest.approx(sigma, rel=1e-12)
    assert other.item() == pytest.approx(w, rel=1e-12)
    assert optimizer.state[mean]["hessian"].tolist() == pytest.approx(h, rel=1e-12)


def test_of_a_quadratic_it_finds_the_exact_posterior():
    """The loss ½ a (w − c)², N times, and the prior N(0, 1 / (N δ)) make N(a c / (a + δ), 1 / (N (a + δ)))."""
    generator = torch.Generator().manual_seed(0)
    curvature = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64).repeat(200)
    target = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64).repeat(200)
    mean, rho = pair([0.0] * 600, [-3.0] * 600)
    ess, decay = 50.0, 0.1
    optimizer = Ivon(groups(mean, rho), {mean: rho}, lr=0.05, ess=ess, weight_decay=decay, beta2=0.995)
    for step in range(4000):
        if step == 2000:
            optimizer.param_groups[0]["lr"], optimizer.beta2 = 0.005, 0.9995
        noise = torch.randn(600, generator=generator, dtype=torch.float64)
        (curvature / 2 * (mean + F.softplus(rho) * noise - target) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found, scale = mean.detach().view(200, 3).mean(0), F.softplus(rho).detach().view(200, 3).mean(0)
    torch.testing.assert_close(found, (curvature * target / (curvature + decay))[:3], atol=5e-3, rtol=0)
    torch.testing.assert_close(scale, (ess * (curvature + decay)).rsqrt()[:3], atol=0, rtol=0.02)


def test_the_hessian_never_makes_a_scale_that_is_none():
    """½ (a² + (a − u)²) / a with a = h + δ and u = (1 − β₂)(h − ĥ) is half of a at least."""
    mean, rho = pair([0.0] * 4, [-4.0, -2.0, 0.0, 2.0])
    optimizer = Ivon(groups(mean, rho), {mean: rho}, lr=1e-3, ess=10.0, weight_decay=0.1, beta2=0.5)
    before = optimizer.state[mean]["hessian"].clone() + 0.1
    mean.grad, rho.grad = torch.zeros_like(mean), torch.tensor([-1e4, -50.0, -1.0, -3.0], dtype=torch.float64)
    optimizer.step()
    after = optimizer.state[mean]["hessian"] + 0.1
    assert (after >= before / 2).all()
    assert rho.isfinite().all()


# ---- in stages --------------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def made_data(count=40, device="cpu"):
    generator = torch.Generator().manual_seed(5)
    pixels = (torch.rand(count, 1, 4, 4, generator=generator) * 255).to(torch.uint8)
    split = ArraySplit(pixels.to(device), (torch.arange(count) % 3).to(device))
    return Dataset("made", split, None, split, 3, None, (1, 4, 4), (0.5,), (0.3,))


def made_recipe(epochs=2, terms=None, **optimizer):
    stage = {"epochs": epochs, "optimizer": OPTIONS | optimizer, "terms": terms or {"likelihood": {}}}
    peer = {"name": "a", "network": "mlp", "posterior": {"kind": "mean_field"}}
    table = {"title": "t", "data": {"batch_size": 4}, "peers": [peer], "stages": [stage], "gradient_share_every": 0}
    return Recipe.parse(table, "test")


def learner_of(posterior, device="cpu", engine="eager", **options):
    recipe = made_recipe(**options)
    return Learner(recipe, {"a": posterior.to(device)}, made_data(device=device), 0, engine=engine, reporter=Recorder())


@pytest.mark.parametrize("bayesian", [None, ["*"]])
def test_its_state_is_the_posterior(bayesian):
    posterior = MeanField(net(), bayesian=bayesian, rho=-3.0)
    before = {name: parameter.detach().clone() for name, parameter in posterior.named_parameters()}
    learner = learner_of(posterior, beta2=0.99)
    learner.run()
    hessian = learner.state.moments("a")["mean"]["hessian"]
    torch.testing.assert_close(posterior.std.detach(), (40 * (hessian + 1e-3)).rsqrt(), atol=0, rtol=1e-5)
    for name, parameter in posterior.named_parameters():
        assert parameter.numel() == 0 or not torch.equal(parameter, before[name])
    assert bool(learner.state.moments("a").get("rest")) == (bayesian is None)


def test_the_loop_takes_the_steps_of_the_paper():
    """Every step of the loop, again from its own gradients: those of the draw, not of ρ."""
    posterior, found = MeanField(net(), rho=-3.0), []
    learner = learner_of(posterior, epochs=1, beta2=0.9, ess=20.0)
    cohort, forward = learner.cohort, learner.cohort.forward

    def noting(clock):
        batch = forward(clock)
        flat = batch.outputs["a"].weights.flat
        flat.retain_grad()
        found.append((flat, posterior.mean.detach().clone(), posterior.std.detach().clone()))
        return batch

    cohort.forward = noting
    learner.run()
    mean, sigma = found[0][1].double(), found[0][2].double()
    hessian, momentum = 1 / (20 * sigma.square()) - 1e-3, torch.zeros_like(mean)
    for step, (flat, _, _) in enumerate(found, start=1):
        gradient, noise = flat.grad.double(), (flat.detach() - mean) / sigma
        estimate = gradient * noise / sigma
        momentum = 0.9 * momentum + 0.1 * gradient
        hessian = 0.9 * hessian + 0.1 * estimate + 0.5 * 0.01 * (hessian - estimate).square() / (hessian + 1e-3)
        mean = mean - 0.05 * (momentum / (1 - 0.9**step) + 1e-3 * mean) / (hessian + 1e-3)
        sigma = (20 * (hessian + 1e-3)).rsqrt()
    assert len(found) == 10
    torch.testing.assert_close(posterior.mean.detach().double(), mean, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(posterior.std.detach().double(), sigma, atol=0, rtol=1e-3)


@pytest.mark.parametrize(("device", "engine"), [("cpu", "eager"), pytest.param("cuda", "eager", marks=pytest.mark.gpu)])
def test_a_resumed_stage_takes_the_same_steps(device, engine):
    whole = learner_of(MeanField(net(), rho=-3.0), device, engine)
    whole.run()
    kept = []
    cut = learner_of(MeanField(net(), rho=-3.0), device, engine)
    cut._save = lambda tensors, about: kept.append(({n: t.clone() for n, t in tensors.items()}, about))
    cut._checkpoint_every = 7
    with stopped_at(13):
        cut.run()
    on = learner_of(MeanField(net(), rho=-1.0), device, engine)  # whose scales are others until it is restored
    on.restore(*kept[-1])
    assert on.position.step == 7
    on.run()
    assert same(whole.peers["a"].state(), on.peers["a"].state())
    assert same(whole.state.state(), on.state.state())


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler warns while it is imported
@pytest.mark.parametrize("bayesian", [None, ["*"]])
def test_captured_steps_are_the_eager_ones(bayesian):
    """The warm-up of a capture leaves no trace in the Hessian, and rates come from the device."""
    found = {}
    for engine in ("eager", "captured"):
        learner = learner_of(MeanField(net(), rho=-3.0, bayesian=bayesian), "cuda", engine, epochs=3, beta2=0.99)
        learner.run()
        assert learner.engine.name == engine
        found[engine] = {**learner.peers["a"].state(), **learner.state.state()}
    for name, tensor in found["eager"].items():
        torch.testing.assert_close(found["captured"][name], tensor, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_capture_begins_with_the_hessian_of_the_scales():
    learner = learner_of(MeanField(net(), rho=-3.0), "cuda", "captured")
    before = learner.state.moments("a")["mean"]["hessian"].clone()
    steps = learner.steps()
    with learner.engine.running():
        next(steps)  # the engine begins: it warms up, and captures
    torch.cuda.synchronize()
    after = learner.state.moments("a")["mean"]
    assert torch.equal(after["hessian"], before)
    assert after["step"].item() == 0
    steps.close()


def test_what_ivon_can_not_learn_is_refused():
    with pytest.raises(InputError, match=r"stages\.0\.optimizer: ivon learns Gaussians of a mean_field .*'a' is none"):
        learner_of(Point(net()))
    for options in ({"noise": "radial"}, {"prior": "anchored"}):
        with pytest.raises(InputError, match="ivon learns Gaussians of a mean_field"):
            learner_of(MeanField(net(), **options))
    with pytest.raises(InputError, match="ivon learns scales from draws alone: remove term 'kl'"):
        made_recipe(terms={"likelihood": {}, "kl": {}})
    with pytest.raises(InputError, match="ivon needs a weight_decay above 0"):
        made_recipe(weight_decay=0.0)
    with pytest.raises(InputError, match="clip is not for ivon"):
        made_recipe(clip=1.0)
    with pytest.raises(InputError, match="ess is of ivon, but the optimiser is adam"):
        made_recipe(name="adam", ess=10.0)
    assert settings.Optimizer(name="ivon", weight_decay=1e-4).beta2 is None


def test_a_run_of_a_recipe_goes_on_exactly(tmp_path):
    overrides = [
        "peers.0.network=mlp",
        "stages.0.optimizer={ name = 'ivon', lr = 0.05, momentum = 0.9, weight_decay = 1e-4, beta2 = 0.999 }",
        "stages.0.terms={ likelihood = {} }",
        "stages.0.epochs=3",
        "stages.0.warmup=0",
        "data.batch_size=500",
    ]
    whole = train("bayesian", tmp_path / "whole", overrides=overrides)
    with stopped_at(5):
        train("bayesian", tmp_path / "cut", overrides=overrides, checkpoint_every=2)
    cut = train("bayesian", tmp_path / "cut", overrides=overrides, resume=True)
    (name,) = whole
    assert cut[name].digest() == whole[name].digest()
