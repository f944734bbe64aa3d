"""Scales that a mean-field posterior begins with, which weights have any, and what is said where they are too wide."""

import math
import warnings

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from learners import Recorder
from peerbayes.data import ArraySplit, Dataset
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField
from peerbayes.posteriors.parameters import conv_and_linear, weight_layers
from peerbayes.recipes.recipe import Recipe
from peerbayes.training.learner import Learner


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10)
    )


def scales_of(posterior):
    return posterior.layout.views(posterior.std.detach())


@pytest.mark.parametrize("options", [{}, {"width": 0.02}, {"width": 0.3}])
def test_scales_of_a_width_are_in_parts_of_their_tensor(options):
    network, width = convolutional(), options.get("width", 0.02)
    for name, scale in scales_of(MeanField(network, **options)).items():
        expected = width * network.get_parameter(name).detach().square().mean().sqrt()
        torch.testing.assert_close(scale, expected.expand_as(scale), rtol=1e-5, atol=0)


def test_what_is_0_as_yet_has_a_little_scale():
    network = convolutional()
    nn.init.zeros_(network[-1].weight)
    nn.init.zeros_(network[3].bias)
    scales, weight = scales_of(MeanField(network)), network[3].weight.detach()
    for name, usual in {"5.weight": 1 / math.sqrt(128), "3.bias": float(weight.square().mean().sqrt())}.items():
        torch.testing.assert_close(scales[name], torch.full_like(scales[name], 0.02 * 0.01 * usual))


def test_scales_by_gain_go_by_the_fans():
    scales = scales_of(MeanField(convolutional(), gain=0.05))
    for name, fans in {"0.weight": 9 + 72, "3.weight": 72 + 72, "5.weight": 138}.items():
        torch.testing.assert_close(scales[name], torch.full_like(scales[name], 0.05 * math.sqrt(6 / fans)))
    torch.testing.assert_close(scales["5.bias"], torch.full((10,), 1e-3))


def test_uniform_scales_are_those_of_the_papers_equations():
    """Equation 14: |u|, u ~ U(−g / √(n_in + n_out), ...) is uniform from 0; Equation 15: |N(0, 0.001²)|."""
    posterior = MeanField(nn.Sequential(nn.Linear(60, 40), nn.Linear(40, 4000)), uniform=0.01)
    scales = scales_of(posterior)
    for name, fans in {"0.weight": 100, "1.weight": 4040}.items():
        bound = 0.01 / math.sqrt(fans)
        assert scipy.stats.kstest(scales[name].flatten() / bound, "uniform").pvalue > 1e-3
    assert scipy.stats.kstest(scales["1.bias"] / 1e-3, "halfnorm").pvalue > 1e-3
    same, other = (MeanField(posterior.materialise(), uniform=0.01, seed=seed).rho for seed in (0, 1))
    assert torch.equal(same, posterior.rho)
    assert not torch.equal(other, posterior.rho)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rho": -3.0, "gain": 0.1}, "rho and gain are given, expected one of them"),
        ({"width": 0.1, "uniform": 0.1}, "uniform and width are given"),
        ({"width": 0.0}, "width is 0.0, expected a positive number"),
        ({"uniform": math.nan}, "uniform is nan, expected a positive number"),
        ({"rho": math.inf}, "rho is inf, expected a finite number"),
    ],
)
def test_scales_are_said_once_and_positive(options, sentence):
    with pytest.raises(InputError, match=sentence):
        MeanField(convolutional(), **options)


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return (images * 255).to(torch.uint8), torch.tensor(data.target)


@pytest.fixture(scope="module")
def trained(digits):
    """A network of weights of very different sizes, whose function that does not change, trained on digits."""
    images, labels = digits[0].float() / 255, digits[1]
    network = convolutional()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for step in range(150):
        chosen = torch.arange(step * 64, step * 64 + 64) % 1200
        F.cross_entropy(network(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # ReLU is homogeneous: what one layer has less the next has more
        network[1].weight.mul_(0.01)
        network[1].bias.mul_(0.01)
        network[3].weight.mul_(100)
        network[3].bias.mul_(0.01)
        network[3].weight.mul_(0.01)
        network[5].weight.mul_(100)
    return network.eval()


def test_draws_around_a_trained_network_predict_as_it_does(digits, trained):
    images, labels = digits[0][1200:], digits[1][1200:]
    expected = trained(images.float() / 255)
    assert (expected.argmax(1) == labels).float().mean() > 0.9
    for options, agrees in (({}, True), ({"rho": -3.0}, False)):
        posterior = MeanField(trained, **options).eval()
        for number in range(5):
            logits = posterior(images, posterior.draw(Address(0, "test", "draws", number)))
            assert (float((logits.argmax(1) == expected.argmax(1)).float().mean()) > 0.98) == agrees
    nll = F.nll_loss(MeanField(trained).eval().predict(images, 20).probabilities.log(), labels)
    assert nll < 1.05 * F.cross_entropy(expected, labels) + 0.01


def learner(network, digits, **options):
    images, labels = digits
    split = ArraySplit(images[:256], labels[:256])
    peer = {"name": "a", "network": "mlp", "posterior": {"kind": "point"}}
    stages = [{"epochs": 1, "optimizer": {"lr": 1e-4}, "terms": {"likelihood": {}}}]
    recipe = Recipe.parse({"title": "t", "data": {"batch_size": 64}, "peers": [peer], "stages": stages}, "test")
    data, recorder = Dataset("digits", split, None, split, 10, None, (1, 8, 8), (0.0,), (1.0,)), Recorder()
    return Learner(recipe, {"a": MeanField(network, **options)}, data, 0, reporter=recorder), recorder


def test_scales_that_swamp_what_a_network_has_learnt_are_told_of(digits, trained):
    for network, options, told in (
        (trained, {"rho": 0.0}, True),
        (trained, {}, False),
        (convolutional(), {"rho": 0.0}, False),  # there is nothing to swamp
    ):
        training, recorder = learner(network, digits, **options)
        training.run()
        about = [text for text in recorder.warnings if "swamp" in text]
        assert bool(about) == told
        assert not told or about[0].startswith("the scales of peer 'a' swamp its weights: the mean network is right on")
        assert not told or about[0].endswith("such as posterior.width = 0.02 (--width 0.02 of `adopt`)")


# ---- what is Bayesian -------------------------------------------------------------------------------------------


class Texts(nn.Module):
    def __init__(self, padding=None):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(50, 12, padding_idx=padding)
        self.bag = nn.EmbeddingBag(50, 6, padding_idx=0)
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.lstm = nn.LSTM(12, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(20, 9, batch_first=True)
        self.cell = nn.GRUCell(9, 8)
        self.head = nn.Linear(14, 3)

    def forward(self, x):
        x = x.long()
        embedded = self.embed(x)
        attended = self.norm(embedded + self.attend(embedded, embedded, embedded, need_weights=False)[0])
        states = self.gru(self.lstm(attended)[0])[0]
        last = self.cell(states[:, 1], self.cell(states[:, 0]))
        return self.head(torch.cat([last, self.bag(x)], 1))


def test_recurrent_embedding_and_attention_layers_are_bayesian_and_norms_are_not():
    posterior = MeanField(Texts())
    assert set(posterior.rest_layout.shapes) == {"norm.weight", "norm.bias"}
    size, total = posterior.layout.size, sum(p.numel() for p in Texts().parameters())
    assert posterior.extra_repr() == f"{size:,} of {total:,} trainable weights are Bayesian"
    assert posterior.extra_repr() in repr(posterior)


def test_draws_of_them_are_their_materialised_members():
    tokens = torch.randint(50, (5, 7), generator=torch.Generator().manual_seed(0))
    posterior = MeanField(Texts(), width=0.3).eval()
    drawn = []
    for number in range(3):
        weights = posterior.draw(Address(0, "test", "draws", number))
        member = posterior.materialise(weights)
        drawn.append(posterior(tokens, weights))
        torch.testing.assert_close(drawn[-1], member(tokens), rtol=1e-4, atol=1e-5)
        by_hand = Texts().eval()
        by_hand.load_state_dict({name: tensor.detach() for name, tensor in weights.items()})
        torch.testing.assert_close(drawn[-1], by_hand(tokens), rtol=1e-4, atol=1e-5)
    assert (drawn[0] - drawn[1]).abs().max() > 0.01
    prediction = posterior.predict(tokens, 4).probabilities
    assert prediction.shape == (5, 3)


def test_gradients_reach_means_and_scales_of_all_of_them():
    posterior = MeanField(Texts(), width=0.1)
    tokens = torch.arange(50).view(5, 10)
    posterior(tokens, posterior.draw(Address())).square().sum().backward()
    for flat in (posterior.mean.grad, posterior.rho.grad):
        for name, gradient in posterior.layout.views(flat).items():
            assert gradient.abs().max() > 0, name


def test_an_embeddings_row_of_zeros_stays_so():
    posterior = MeanField(Texts(padding=0))
    assert "embed.weight" in posterior.rest_layout.shapes
    assert "bag.weight" in posterior.layout.shapes  # which leaves that row out by itself
    assert not posterior.draw(Address())["embed.weight"][0].any()


def test_few_bayesian_weights_are_told_of():
    class Mostly(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Parameter(torch.ones(100)), nn.Linear(2, 2)

    with pytest.warns(PeerbayesWarning, match="Mostly: 6 of 106 trainable weights are Bayesian; all others, 'table'"):
        MeanField(Mostly())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MeanField(Mostly(), bayesian=["head*"])
        MeanField(convolutional())


@pytest.mark.filterwarnings("ignore:Texts. 669 of 7,366 trainable weights are Bayesian")
def test_recipes_keep_their_choice_and_their_scales():
    plain = MeanField.recipe_options()(kind="mean_field").arguments()
    assert plain["bayesian"] is conv_and_linear
    assert plain["rho"] == -3.0
    wide = MeanField.recipe_options()(kind="mean_field", width=0.1, bayesian="layers").arguments()
    assert (wide["rho"], wide["width"], wide["bayesian"]) == (None, 0.1, None)
    assert MeanField(Texts(), **plain).layout.shapes.keys() < MeanField(Texts(), **wide).layout.shapes.keys()
    with pytest.raises(ValueError, match="gain and width are given"):
        MeanField.recipe_options()(kind="mean_field", gain=0.1, width=0.1)


def test_who_asks_for_linear_layers_by_name_is_not_warned_of_few():
    asked = MeanField.recipe_options()(kind="mean_field", bayesian="linear").arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = MeanField(Texts(), **asked)
    with pytest.warns(PeerbayesWarning, match=r"669 of 7,366 .* \(in recipes peers\.\*\.posterior\.bayesian\)"):
        default = MeanField(Texts(), bayesian=conv_and_linear)
    assert found.layout.shapes == default.layout.shapes


@pytest.mark.filterwarnings("ignore:Texts. 669 of 7,366 trainable weights are Bayesian")
def test_files_of_the_choice_before_are_read(tmp_path):
    old = MeanField(Texts(), bayesian=conv_and_linear, rho=-3.0)
    old.save(tmp_path / "old.safetensors")
    read = MeanField.load(tmp_path / "old.safetensors", Texts())
    assert read.layout.shapes == old.layout.shapes != MeanField(Texts()).layout.shapes
    assert torch.equal(read.rho, old.rho)
    assert all(weight_layers(name, module) for name, module in [("weight", nn.LSTM(2, 2)), ("w", nn.RNNCell(1, 1))])
