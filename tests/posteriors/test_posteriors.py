"""One case for every posterior: what it says about the weights is true, and the given network stays as it was."""

import copy
import itertools
import math
import textwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.distributions import Normal, kl_divergence

from members import TwoNamesOneLayer
from peerbayes.codebook.shared import Shared
from peerbayes.errors import InputError
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField, Point, Posterior, RankOne
from peerbayes.posteriors.flat_network import Layout

HERE = Address(seed=3, owner="peer-1", stream="draw", number=0)
KINDS = {
    "point": lambda network, **_options: Point(network),
    "gaussian": lambda network, **options: MeanField(network, **options),
    "radial": lambda network, **options: MeanField(network, noise="radial", **options),
    "anchored": lambda network, **options: MeanField(network, prior="anchored", prior_std=0.3, **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Small(nn.Module):
    """Convolution, batch-norm, linear: 36 + 4 + 51 Bayesian weights, 8 others."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(16, 3)

    def forward(self, x):
        return self.linear(torch.tanh(self.norm(self.conv(x))).flatten(1))


def small(seed=0):
    torch.manual_seed(seed)
    network = Small()
    nn.init.normal_(network.norm.weight)
    nn.init.normal_(network.norm.bias)
    for _ in range(3):
        network(torch.randn(32, 1, 4, 4) * 2 + 1)
    return network.eval()


def images(count=6, seed=1):
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def flats(posterior, count, address=HERE):
    with torch.no_grad():
        return torch.stack([posterior.draw(address.at(number)).flat for number in range(count)]).double()


def variance_and_kurtosis(posterior):
    """Variance of every weight and E[(w − μ)⁴] / variance², from the definition of each kind."""
    variance = posterior.std.detach().double() ** 2
    if getattr(posterior, "noise", "") != "radial":
        return variance, torch.full_like(variance, 3.0)
    # ε = r u with u uniform on the sphere of R^n: E ε_i² = 1/n and E ε_i⁴ = 3 · 3 / (n (n + 2)).
    n = torch.cat([torch.full((size,), float(size)) for size in posterior.layout.sizes]).double()
    return variance / n, 9 * n / (n + 2)


def close_logits(given, expected):
    assert (given - expected).abs().max() <= 1e-6 * expected.abs().max()


# ---- the shared case ----------------------------------------------------------------------------------------------


@every_kind
def test_without_scales_every_draw_is_the_network(kind):
    network = small()
    posterior = KINDS[kind](network, rho=-60.0).eval()
    with torch.no_grad():
        expected = network(images())
        close_logits(posterior(images()), expected)
        close_logits(posterior(images(), posterior.draw(HERE.at(5))), expected)


@every_kind
def test_without_scales_batch_norm_trains_like_the_network(kind):
    network = small().train()
    posterior = KINDS[kind](network, rho=-60.0).train()
    for number in range(3):
        x = images(seed=number)
        close_logits(posterior(x, posterior.draw(HERE.at(number))), network(x))
    torch.testing.assert_close(posterior.network.norm.running_var, network.norm.running_var)
    torch.testing.assert_close(posterior.network.norm.running_mean, network.norm.running_mean)
    assert posterior.network.norm.num_batches_tracked == network.norm.num_batches_tracked == 6


@every_kind
def test_draws_have_the_stated_mean_variance_and_no_correlation(kind):
    posterior = KINDS[kind](small(), rho=-1.0)
    count = 2000
    drawn = flats(posterior, count)
    variance, kurtosis = variance_and_kurtosis(posterior)
    mean = posterior.mean.detach().double()
    if kind == "point":
        assert (drawn == mean).all()
        return
    deviation = drawn - mean
    assert ((deviation.mean(0)) ** 2 <= 25 * variance / count).all()
    assert ((deviation**2).mean(0) / variance - 1 <= 5 * ((kurtosis - 1) / count).sqrt()).all()
    assert ((deviation**2).mean(0) / variance - 1 >= -5 * ((kurtosis - 1) / count).sqrt()).all()
    # Products of two weights have at most three times the variance of independent ones (radial, in one tensor).
    correlation = torch.corrcoef(deviation.T).fill_diagonal_(0)
    assert correlation.abs().max() <= 5.5 * math.sqrt(3 / count)


@every_kind
def test_an_address_repeats_exactly_and_differs_in_every_part(kind):
    posterior = KINDS[kind](small())
    first = posterior.draw(HERE).flat
    others = [Address(4, "peer-1", "draw", 0), Address(3, "peer-2", "draw", 0), Address(3, "peer-1", "step", 0)]
    others += [HERE.at(1), HERE.sub("x")]
    assert torch.equal(first, posterior.draw(Address(3, "peer-1", "draw", 0)).flat)
    assert torch.equal(first, posterior.draw(HERE.at(torch.tensor(0))).flat)
    drawn = [first, *(posterior.draw(other).flat for other in others)]
    for a, b in itertools.combinations(drawn, 2):
        if kind == "point":
            assert torch.equal(a, b)
        else:
            assert ((a != b).float().mean() > 0.99).item()


@every_kind
def test_a_draw_names_every_parameter_as_the_network_does(kind):
    network = small()
    posterior = KINDS[kind](network)
    drawn = posterior.draw(HERE)
    assert {n: t.shape for n, t in drawn.items()} == {n: p.shape for n, p in network.named_parameters()}
    assert set(posterior.layout.shapes) == {"conv.weight", "conv.bias", "linear.weight", "linear.bias"}
    for name, tensor in posterior.layout.views(drawn.flat).items():
        assert tensor.data_ptr() == drawn[name].data_ptr()
        assert torch.equal(tensor, drawn[name])
    assert torch.equal(drawn["norm.weight"], network.norm.weight)


@every_kind
def test_nothing_changes_the_given_network(kind, tmp_path):
    network = small()
    network.norm.train()
    network(images()).sum().backward()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in network.named_parameters()}
    ids = {name: id(p) for name, p in network.named_parameters()}

    posterior = KINDS[kind](network).train()
    posterior(images(), posterior.draw(HERE)).square().sum().backward()
    torch.optim.SGD(posterior.parameters(), 0.1).step()
    posterior.predict(images(), draws=2)
    posterior.save(tmp_path / "p.safetensors")
    type(posterior).load(tmp_path / "p.safetensors", network)
    plain = posterior.materialise()
    plain.train()(images())
    Point(small(1), start_from=network).predict(images())

    assert {n: id(p) for n, p in network.named_parameters()} == ids
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(torch.equal(p.grad, grads[name]) for name, p in network.named_parameters())
    assert [m.training for m in network.modules()] == [False, False, True, False]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    assert not torch.equal(posterior.mean, KINDS[kind](network).mean)


@every_kind
def test_a_plain_network_predicts_twice_the_same_without_a_word(kind):
    posterior = KINDS[kind](small(), rho=-1.0).train()
    plain = posterior.materialise()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    assert torch.equal(plain(images()), plain(images()))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert posterior.training


class Talkative(nn.Module):
    """Says of itself what its parameters are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, 2.5]))
        self.list = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Conv1d(3, 3, 1, bias=False), nn.GRU(3, 2))

    def extra_repr(self):
        return f"scale of {len(self.scale)} from {self.scale[0].item()}"


@pytest.mark.parametrize("make", [*KINDS.values(), lambda network: RankOne(network, 2), lambda net: Shared(net, None)])
def test_a_posterior_is_shown_with_its_network_as_it_is(make):
    network = Talkative()
    posterior = make(network)
    shown = textwrap.indent(repr(network), "  ").lstrip()
    counted = f"  {posterior.extra_repr()}\n" if posterior.extra_repr() else ""
    assert repr(posterior) == f"{type(posterior).__name__}(\n{counted}  (network): {shown}\n)"
    assert "bias=True" in shown
    assert dict(posterior.network.named_parameters()) == {}
    assert posterior.training


@every_kind
def test_materialise_gives_a_plain_network_with_the_same_outputs(kind):
    network = small()
    posterior = KINDS[kind](network, rho=-1.0).eval()
    for weights in (None, posterior.draw(HERE)):
        plain = posterior.materialise(weights)
        assert type(plain) is Small
        assert list(plain.state_dict()) == list(network.state_dict())
        fresh = Small().eval()
        fresh.load_state_dict(plain.state_dict())
        with torch.no_grad():
            close_logits(plain(images()), posterior(images(), weights))
            close_logits(fresh(images()), posterior(images(), weights))
        assert all(p.requires_grad and p.is_leaf and p.is_contiguous() for p in plain.parameters())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    plain.norm.running_mean.fill_(9)
    assert torch.equal(posterior.mean, KINDS[kind](network).mean)
    assert torch.equal(posterior.network.norm.running_mean, network.norm.running_mean)


# ---- divergence from the prior ------------------------------------------------------------------------------------


def moved(kind, **options):
    """A posterior whose means have left those at construction."""
    posterior = KINDS[kind](small(), rho=-1.0, **options)
    with torch.no_grad():
        posterior.mean += 0.5 * torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(8))
    return posterior


def priors(posterior):
    return Normal(posterior.anchor.expand_as(posterior.mean), posterior.prior_std)


@pytest.mark.parametrize("kind", ["gaussian", "anchored"])
def test_kl_is_that_of_torch_distributions(kind):
    posterior = moved(kind)
    expected = kl_divergence(Normal(posterior.mean, posterior.std), priors(posterior))
    torch.testing.assert_close(posterior.kl_per_weight(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(posterior.kl(), expected.sum())
    by_layer = [part.mean() for part in expected.split(posterior.layout.sizes)]
    torch.testing.assert_close(posterior.kl("layer_mean"), torch.stack(by_layer).sum())


@pytest.mark.parametrize("kind", ["gaussian", "anchored"])
@pytest.mark.parametrize("reduction", ["sum", "layer_mean"])
def test_gradients_of_the_kl_are_those_of_torch_distributions(kind, reduction):
    posterior = moved(kind)
    wanted = kl_divergence(Normal(posterior.mean, posterior.std), priors(posterior))
    wanted = wanted.sum() if reduction == "sum" else posterior.layer_mean_sum(wanted)
    parameters = [posterior.mean, posterior.rho]
    expected = torch.autograd.grad(wanted, parameters)
    for weights in (None, posterior.draw(HERE)):
        found = torch.autograd.grad(posterior.kl(reduction, weights), parameters)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "anchored"])
def test_kl_agrees_with_monte_carlo(kind):
    posterior = moved(kind)
    drawn = flats(posterior, 1000)
    with torch.no_grad():
        q = Normal(posterior.mean.double(), posterior.std.double())
        p = Normal(priors(posterior).loc.double(), posterior.prior_std)
        estimates = (q.log_prob(drawn) - p.log_prob(drawn)).sum(1)
    error = estimates.std() / math.sqrt(len(estimates))
    assert abs(estimates.mean() - posterior.kl().item()) <= 4 * error
    assert error < 0.01 * posterior.kl().item()


@pytest.mark.parametrize(("kind", "std"), [("gaussian", 0.7), ("gaussian", 1.0), ("anchored", 0.3)])
def test_kl_is_zero_where_the_posterior_is_the_prior(kind, std):
    options = {} if kind == "anchored" else {"prior_std": std}
    posterior = KINDS[kind](small(), **options)
    with torch.no_grad():
        posterior.rho.fill_(math.log(math.expm1(std)))
        posterior.mean.copy_(posterior.anchor.expand_as(posterior.mean))
    assert posterior.kl_per_weight().abs().max() < 1e-6
    posterior.kl().backward()
    assert posterior.mean.grad.abs().max() == 0
    assert posterior.rho.grad.abs().max() < 1e-6


def test_kl_of_a_point_is_zero():
    posterior = Point(small())
    assert posterior.kl().item() == 0
    assert posterior.kl("layer_mean").item() == 0
    assert posterior.std.abs().sum() == 0


def radial_log_density(w, mean, std):
    """log q(w) of one tensor (S, n): |r| is half-normal, the direction uniform on the sphere."""
    epsilon = (w - mean) / std
    n, length = w.shape[1], epsilon.norm(dim=1)
    area = math.log(2) + 0.5 * n * math.log(math.pi) - math.lgamma(n / 2)
    radius = torch.from_numpy(stats.halfnorm.logpdf(length.numpy()))
    return radius - area - (n - 1) * length.log() - std.log().sum()


def test_radial_kl_is_the_true_one_up_to_a_constant():
    network, count = nn.Linear(4, 3), 20_000
    posterior = MeanField(network, noise="radial", prior_std=0.8)
    generator = torch.Generator().manual_seed(5)
    noise = []
    for size in posterior.layout.sizes:
        g = torch.randn(count, size, generator=generator, dtype=torch.float64)
        noise.append(g / g.norm(dim=1, keepdim=True) * torch.randn(count, 1, generator=generator, dtype=torch.float64))

    def true_kl(mean, std):
        total = torch.zeros(count, dtype=torch.float64)
        for m, s, epsilon in zip(mean.split(posterior.layout.sizes), std.split(posterior.layout.sizes), noise):
            w = m + s * epsilon
            total += radial_log_density(w, m, s) - Normal(0.0, 0.8).log_prob(w).sum(1)
        return total

    def estimated(mean, std):
        w = mean + std * torch.cat(noise, 1)
        return (0.5 * (w / 0.8).square() + math.log(0.8) - std.log()).sum(1)

    shifts, kls, ours = torch.linspace(-1, 1, 5), [], []
    start = (posterior.mean.detach().double(), posterior.rho.detach().double())
    for shift in shifts:
        mean, rho = start[0] + shift, start[1] + 2 * shift
        kls.append(true_kl(mean, F.softplus(rho)).mean())
        ours.append(estimated(mean, F.softplus(rho)).mean())
        with torch.no_grad():
            posterior.mean.copy_(mean)
            posterior.rho.copy_(rho)
        drawn = posterior.draw(HERE)
        w = drawn.flat.detach()
        expected = 0.5 * (w / 0.8).square() + math.log(0.8 * math.sqrt(2 * math.pi)) - posterior.std.log()
        torch.testing.assert_close(posterior.kl_per_weight(drawn), expected)
    gap = torch.stack(kls) - torch.stack(ours)
    assert (gap - gap[0]).abs().max() < 1e-6 * torch.stack(kls).abs().max()


def test_radial_kl_gradients_average_to_those_of_the_true_kl():
    torch.manual_seed(0)
    posterior = MeanField(nn.Linear(4, 3), noise="radial", prior_std=0.8, rho=0.5)
    grads = []
    for number in range(1500):
        kl = posterior.kl(weights=posterior.draw(HERE.at(number)))
        grads.append(torch.cat(torch.autograd.grad(kl, [posterior.mean, posterior.rho])))
    grads = torch.stack(grads).double()
    # KL = const − Σ log σ + Σ (μ² + σ²/n) / (2 s²), since E ε = 0 and E ε_i² = 1/n.
    mean, rho = (p.detach().double().requires_grad_() for p in (posterior.mean, posterior.rho))
    n = torch.cat([torch.full((size,), float(size)) for size in posterior.layout.sizes]).double()
    std = F.softplus(rho)
    (((mean**2 + std**2 / n) / (2 * 0.8**2)) - std.log()).sum().backward()
    error = grads.std(0) / math.sqrt(len(grads))
    assert ((grads.mean(0) - torch.cat([mean.grad, rho.grad])).abs() <= 4.5 * error).all()


def test_radial_kl_asks_for_a_draw():
    with pytest.raises(InputError, match="draw"):
        MeanField(small(), noise="radial").kl()


# ---- draws in closed form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["gaussian", "radial"])
def test_outputs_of_a_linear_layer_have_the_analytic_mean_and_variance(noise):
    torch.manual_seed(2)
    layer, x, count = nn.Linear(5, 3), torch.randn(4, 5), 1500
    posterior = MeanField(layer, noise=noise, rho=-0.5)
    with torch.no_grad():
        out = torch.stack([posterior(x, posterior.draw(HERE.at(number))) for number in range(count)]).double()
        std = posterior.layout.views(posterior.std)
        share = {"gaussian": (1, 1), "radial": (15, 3)}[noise]
        variance = (x**2 @ (std["weight"] ** 2).T / share[0] + std["bias"] ** 2 / share[1]).double()
        assert ((out.mean(0) - layer(x)).abs() <= 4.5 * (variance / count).sqrt()).all()
        fourth = ((out - out.mean(0)) ** 4).mean(0) / variance**2 - 1
        assert ((out.var(0) / variance - 1).abs() <= 4.5 * (fourth / count).sqrt()).all()


def test_radial_draws_have_half_normal_lengths_and_uniform_directions():
    posterior = MeanField(small(), noise="radial", rho=-2.0)
    with torch.no_grad():
        scaled = (flats(posterior, 1500) - posterior.mean) / posterior.std
    pieces = scaled.split(posterior.layout.sizes, 1)
    lengths = [piece.norm(dim=1).numpy() for piece in pieces]
    for piece, length in zip(pieces, lengths):
        assert stats.kstest(length, "halfnorm").pvalue > 1e-3
        n = piece.shape[1]
        first = (piece[:, 0] / piece.norm(dim=1)).square().numpy()
        assert stats.kstest(first, stats.beta(0.5, (n - 1) / 2).cdf).pvalue > 1e-3
    for a, b in itertools.combinations(lengths, 2):
        assert stats.pearsonr(a, b).pvalue > 1e-3


def test_scales_start_around_rho_and_differ_by_seed_and_name():
    network = nn.Linear(100, 100)
    rho = MeanField(network, rho=-4.0).rho.detach()
    assert stats.kstest(((rho + 4) / 0.1).numpy(), "norm").pvalue > 1e-3
    assert torch.equal(rho, MeanField(network, rho=-4.0).rho)
    assert (rho != MeanField(network, rho=-4.0, seed=1).rho).float().mean() > 0.99
    assert (rho != MeanField(network, rho=-4.0, name="other").rho).float().mean() > 0.99


# ---- any network --------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """What users write: nested names, tied weights, a frozen parameter, a buffer, an LSTM, all sorts of convolution."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"stem": nn.Sequential(nn.Conv2d(3, 6, (1, 3), bias=False), nn.BatchNorm2d(6))})
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.conv1d = nn.Conv1d(6, 5, 3, padding=1)
        self.lstm = nn.LSTM(5, 4, batch_first=True, bidirectional=True)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.randn(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.depthwise(torch.tanh(self.body["stem"](x)))
        x = self.conv1d(x.mean(2))
        x, _ = self.lstm(x.transpose(1, 2))
        x = torch.tanh(self.first(x[:, -1] * self.frozen * self.gain + self.shift))
        return self.head(torch.tanh(self.second(x)))


def own(seed=0):
    torch.manual_seed(seed)
    network = Own()
    network(torch.randn(16, 3, 5, 7))
    return network.eval()


def recurrent_too(name, module):
    return isinstance(module, nn.modules.conv._ConvNd | nn.Linear | nn.LSTM)


def check_one_line(network, x):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    posterior = MeanField(network).eval()
    with torch.no_grad():
        expected = network(x)
        scale = expected.abs().max()
        assert (posterior(x) - expected).abs().max() <= 1e-5 * scale
        assert (posterior.materialise()(x) - expected).abs().max() <= 1e-5 * scale
        assert (posterior(x, posterior.draw(HERE)) - expected).abs().max() > 1e-3 * scale
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert posterior.layout.size + posterior.rest_layout.size == sum(p.numel() for p in network.parameters())
    return posterior


def test_timm_resnet_in_one_line():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model("resnet18", num_classes=5).eval()
    posterior = check_one_line(network, torch.rand(2, 3, 32, 32))
    norms = sum(p.numel() for m in network.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    assert posterior.rest_layout.size == norms


def test_timm_vision_transformer_in_one_line():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32).eval()
    posterior = check_one_line(network, torch.rand(2, 3, 32, 32))
    assert {"cls_token", "pos_embed", "norm.weight"} <= set(posterior.rest_layout.shapes)
    assert "blocks.3.attn.qkv.weight" in posterior.layout.shapes


def test_torch_attention_in_one_line():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    network = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).eval()
    posterior = check_one_line(network, torch.randn(2, 3, 8))
    assert "0.self_attn.in_proj_weight" in posterior.layout.shapes


def test_a_users_own_module_in_one_line():
    network = own()
    posterior = MeanField(network, rho=-60.0, bayesian=recurrent_too).eval()
    x = torch.rand(4, 3, 5, 7)
    with torch.no_grad():
        close_logits(posterior(x, posterior.draw(HERE)), network(x))
    assert set(posterior.rest_layout.shapes) == {"body.stem.1.weight", "body.stem.1.bias", "gain"}
    assert "frozen" not in dict(posterior.named_parameters())
    drawn = posterior.draw(HERE)
    assert drawn["second.weight"].data_ptr() == drawn["first.weight"].data_ptr()


def test_parameters_are_chosen_by_patterns_of_their_names():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))
    posterior = MeanField(network, rho=-2.0, bayesian=["0.*", "2.bias"])
    draws = [posterior.draw(HERE.at(number)) for number in range(400)]
    scales = {name: torch.stack([draw[name] for draw in draws]).std(0) for name in draws[0]}
    assert (scales["2.weight"] == 0).all()
    for name in ("0.weight", "2.bias"):
        expected = posterior.layout.views(posterior.std)[name]
        torch.testing.assert_close(scales[name], expected, rtol=0.2, atol=0)
    with pytest.raises(InputError, match=r"bayesian: '2\.bais' fits no trainable parameter; did you mean '2\.bias'\?"):
        MeanField(network, bayesian=["0.*", "2.bais"])


@pytest.mark.parametrize("bayesian", [recurrent_too, lambda name, _module: name.startswith("head")])
def test_gradients_are_those_of_the_network_when_scales_vanish(bayesian):
    network = own().train()
    posterior = MeanField(network, rho=-60.0, bayesian=bayesian).train()
    x, labels = torch.rand(8, 3, 5, 7), torch.arange(8) % 4
    F.cross_entropy(network(x), labels).backward()
    F.cross_entropy(posterior(x, posterior.draw(HERE)), labels).backward()
    ours = posterior.layout.views(posterior.mean.grad) | posterior.rest_layout.views(posterior.rest.grad)
    trainable = {name: p for name, p in network.named_parameters() if p.requires_grad}
    assert set(ours) == set(trainable)
    for name, parameter in trainable.items():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_tied_weights_is_the_sum_over_their_uses():
    network = own()
    posterior = Point(network).eval()
    untied = copy.deepcopy(network)
    untied.second.weight = nn.Parameter(network.first.weight.detach().clone())
    x = torch.rand(4, 3, 5, 7)
    posterior(x).square().sum().backward()
    untied(x).square().sum().backward()
    grad = posterior.layout.views(posterior.mean.grad)["first.weight"]
    torch.testing.assert_close(grad, untied.first.weight.grad + untied.second.weight.grad, rtol=1e-4, atol=1e-6)
    assert untied.second.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("noise", ["gaussian", "radial"])
def test_gradients_of_mean_rho_and_rest_agree_with_finite_differences(noise):
    posterior = MeanField(own(), rho=-2.0, noise=noise, bayesian=recurrent_too).eval()
    x, step = torch.rand(8, 3, 5, 7), 1e-2

    def loss():
        return posterior(x, posterior.draw(HERE)).double().square().mean()

    loss().backward()
    for parameter in (posterior.mean, posterior.rho, posterior.rest):
        direction = parameter.grad.sign()
        values = []
        with torch.no_grad():
            for sign in (1, -2, 1):
                parameter += sign * step * direction / math.sqrt(len(direction))
                values.append(loss())
        slope = (values[0] - values[1]) / (2 * step)
        expected = parameter.grad.abs().sum() / math.sqrt(len(direction))
        assert expected > 1e-4
        assert slope.item() == pytest.approx(expected.item(), rel=1e-2)


def test_materialise_keeps_ties_frozen_parameters_and_recurrent_layers():
    network = own()
    posterior = MeanField(network, rho=-2.0, bayesian=recurrent_too).eval()
    weights = posterior.draw(HERE)
    plain = posterior.materialise(weights)
    x = torch.rand(4, 3, 5, 7)
    with torch.no_grad():
        close_logits(plain(x), posterior(x, weights))
    assert list(plain.state_dict()) == list(network.state_dict())
    assert plain.first.weight is plain.second.weight
    assert not plain.frozen.requires_grad
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    plain(x).sum().backward()
    assert all(p.grad is not None for p in plain.parameters() if p.requires_grad)


@pytest.mark.parametrize("fails", [False, True])
def test_a_posterior_over_recurrent_layers_can_be_copied_after_a_training_pass(fails):
    posterior = MeanField(own(), rho=-2.0, bayesian=recurrent_too).train()
    x = torch.rand(4, 3, 5, 7)
    posterior(x, posterior.draw(HERE)).sum().backward()
    if fails:
        weights = posterior.draw(HERE)
        posterior.network.lstm.input_size = 6  # the layer itself refuses its input
        with pytest.raises(RuntimeError, match="Expected 6"):
            posterior(x, weights)
        posterior.network.lstm.input_size = 5
    twin, plain = copy.deepcopy(posterior).eval(), posterior.materialise(posterior.draw(HERE)).eval()
    with torch.no_grad():
        expected = posterior.eval()(x, posterior.draw(HERE))
        close_logits(twin(x, twin.draw(HERE)), expected)
        close_logits(plain(x), expected)


def test_one_layer_under_two_names_is_one_layer():
    network = TwoNamesOneLayer()
    posterior = MeanField(TwoNamesOneLayer(), start_from=network, rho=-60.0)
    x = torch.randn(3, 4)
    close_logits(posterior(x, posterior.draw(HERE)), network(x))
    assert posterior.layout.size == 20
    plain = posterior.materialise()
    assert plain.a is plain.b
    close_logits(plain(x), network(x))


# ---- flat storage -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=5), min_size=1, max_size=4))
def test_views_of_the_flat_tensor_are_the_originals(shapes):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    layout = Layout({name: tensor.shape for name, tensor in tensors.items()})
    flat = layout.flatten(tensors)
    views = layout.views(flat)
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor)
        assert tensor.dim() != 4 or views[name].is_contiguous(memory_format=torch.channels_last)
        views[name].fill_(7)
    assert (flat == 7).all()
    assert flat.shape == (sum(t.numel() for t in tensors.values()),)
    ones = torch.ones(layout.size)
    torch.testing.assert_close(torch.dot(ones, layout.inverse_sizes()), torch.tensor(float(len(shapes))))


@pytest.mark.parametrize(("out", "into", "kernel", "groups"), [(3, 5, (1, 3), 1), (6, 6, (3, 2), 6), (4, 1, (1, 1), 1)])
def test_convolutions_of_odd_shapes_are_unchanged(out, into, kernel, groups):
    layer = nn.Conv2d(into, out, kernel, groups=groups)
    posterior = Point(layer)
    assert torch.equal(posterior.centre()["weight"], layer.weight)
    x = torch.randn(2, into, 5, 6)
    with torch.no_grad():
        close_logits(posterior(x), layer(x))


def test_all_tensors_follow_the_network_to_its_device():
    for network in (small(), nn.Linear(3, 2)):
        for kind in KINDS.values():
            posterior = kind(network.to("meta"))
            tensors = [*posterior.parameters(), *posterior.buffers(), posterior.draw(HERE).flat]
            assert {tensor.device.type for tensor in tensors} == {"meta"}


# ---- what can't be a posterior ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Point, MeanField])
@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Linear(2, 2).double(), "'weight'.*float64.*float32"),
        (nn.Sequential(nn.LazyLinear(3)), "'0.weight' is lazy"),
        (nn.ReLU(), "ReLU has no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameters"),
        (Point(nn.Linear(2, 2)), "posterior.*start_from"),
        (Point(nn.Linear(2, 2)).network, "Linear has no trainable parameters; if it is a posterior.s network"),
        (3, "expected a network .*, got int"),
    ],
)
def test_a_network_that_cannot_be_used_is_one_clear_error(make, network, message):
    with pytest.raises(InputError, match=message):
        make(network)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_std": 0.0}, "prior_std is 0.0"),
        ({"prior_std": math.nan}, "prior_std is nan"),
        ({"rho": math.nan}, "rho is nan, expected a finite number"),
        ({"prior": "flat"}, "prior is 'flat'"),
        ({"noise": "uniform"}, "noise is 'uniform'"),
    ],
)
def test_wrong_options_are_one_clear_error(options, message):
    with pytest.raises(InputError, match=message):
        MeanField(nn.Linear(2, 2), **options)


def test_a_subclass_without_a_kind_of_its_own_does_not_take_over_files(tmp_path):
    class Mine(MeanField):
        pass

    MeanField(small()).save(tmp_path / "p.safetensors")
    assert type(Posterior.load(tmp_path / "p.safetensors", small())) is MeanField
