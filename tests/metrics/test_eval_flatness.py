"""Directions have the filters' norms; losses along them are those of networks that can be solved by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import peerbayes as pb
from peerbayes import metrics as evaluation
from peerbayes.data import ArraySplit
from peerbayes.errors import InputError
from peerbayes.math.noise import Address
from peerbayes.metrics.flatness import barrier, directions, loss_along, loss_between, sharpness

HERE = Address(0, "test", "direction")


class Classifier(nn.Module):
    """Convolution, batch-norm, dropout and a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(5 * 36, 4)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.conv(x)).relu().flatten(1)))


@pytest.fixture
def images():
    made = torch.Generator().manual_seed(0)
    return torch.rand(50, 3, 8, 8, generator=made), torch.randint(0, 4, (50,), generator=made)


@pytest.fixture
def posterior():
    torch.manual_seed(1)
    network = Classifier()
    network.norm.running_mean.normal_()
    network.norm.running_var.uniform_(0.5, 2)
    return pb.Point(network)


# ---- directions -------------------------------------------------------------------------------------------------


def test_filters_keep_their_norms_and_vectors_stay():
    made = torch.Generator().manual_seed(0)
    shapes = {"conv": (5, 3, 3, 3), "linear": (4, 7), "token": (6, 2, 3), "bias": (4,), "scale": ()}
    weights = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    weights["linear"][2] = 0  # a dead filter goes nowhere
    found = directions(weights, HERE)
    for name, weight in weights.items():
        assert found[name].shape == weight.shape
        if weight.dim() < 2:
            assert not found[name].any()
            continue
        torch.testing.assert_close(found[name].flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
        assert not torch.equal(found[name], weight)


def test_directions_are_uniform_on_the_sphere():
    # A filter of n weights with norm r: each coordinate has mean 0 and variance r² / n.
    found = directions({"w": torch.full((20_000, 4), 3.0)}, HERE)["w"]
    assert found.mean(0).abs().max() < 5 * 3 / math.sqrt(20_000)
    torch.testing.assert_close(found.square().mean(0), torch.full((4,), 9.0), rtol=0.05, atol=0)
    assert (found.T @ found / 20_000 - torch.diag(found.square().mean(0))).abs().max() < 0.3


def test_noise_belongs_to_the_address_and_the_name():
    weights = {"a": torch.ones(3, 4), "b": torch.ones(3, 4)}
    found = directions(weights, HERE)
    assert torch.equal(directions({"b": weights["b"]}, HERE)["b"], found["b"])
    assert not torch.equal(found["a"], found["b"])
    assert not torch.equal(directions(weights, HERE.at(1))["a"], found["a"])


# ---- the loss along them ----------------------------------------------------------------------------------------


def test_at_distance_0_the_loss_is_the_plain_one_exactly(posterior, images):
    posterior.eval()
    with torch.no_grad():
        plain = F.cross_entropy(posterior(images[0]).double(), images[1], reduction="sum") / 50
    found = loss_along(posterior, images, [0.0], 3, HERE)
    assert found.tolist() == [[float(plain)]] * 3


@pytest.mark.parametrize("kind", [pb.Point, pb.MeanField])
def test_losses_are_those_of_a_plain_network_with_moved_weights(images, kind):
    torch.manual_seed(2)
    network = Classifier().eval()
    found = loss_along(kind(network), images, [-0.5, 0.25], 2, HERE, batch_size=16)
    plain = dict(network.named_parameters())
    for number in range(2):
        way = directions(plain, HERE.at(number))
        for place, distance in enumerate((-0.5, 0.25)):
            moved = Classifier().eval()
            state = {name: value + distance * way[name] for name, value in plain.items()}
            moved.load_state_dict(network.state_dict() | state)
            loss = F.cross_entropy(moved(images[0]), images[1]).detach()
            assert float(found[number, place]) == pytest.approx(float(loss), rel=1e-5)


def test_a_linear_softmax_has_its_closed_form():
    # One image x = (1, 0) and two classes: the lead of class 0 is w_00 − w_10, of which each part moves by t d.
    network = nn.Linear(2, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[2.0, 1.0], [-1.0, 0.5]]))
        network.bias.zero_()
    way = directions({"weight": network.weight}, HERE.at(0))["weight"]
    distances = [-1.0, 0.0, 0.5, 2.0]
    data = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    found = loss_along(pb.Point(network), data, distances, 1, HERE)
    for place, distance in enumerate(distances):
        lead = 3 + distance * float(way[0, 0] - way[1, 0])
        assert float(found[0, place]) == pytest.approx(math.log1p(math.exp(-lead)), rel=1e-5)


def test_where_both_classes_are_equal_forth_and_back_are_the_same(images):
    # Equal filters give equal logits; ±t d moves the lead of class 0 by ±t (d_0 − d_1) x; every image has both labels.
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 2, bias=False))
    posterior = pb.Point(network)
    both = (torch.cat([images[0]] * 2), torch.cat([torch.zeros(50), torch.ones(50)]).long())
    with torch.no_grad():
        posterior.mean.copy_(posterior.mean.view(2, -1)[:1].expand(2, -1).reshape(-1))
    found = loss_along(posterior, both, [-0.7, 0.0, 0.7], 4, HERE)
    torch.testing.assert_close(found[:, 0], found[:, 2], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[:, 1], torch.full((4,), math.log(2), dtype=torch.float64))
    assert (found[:, 0] > math.log(2)).all()


def test_tied_weights_move_together():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    network = Tied()
    data = torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    found = loss_along(pb.Point(network), data, [0.3], 1, HERE)
    moved = network.a.weight.detach() + 0.3 * directions({"a.weight": network.a.weight}, HERE.at(0))["a.weight"]
    assert float(found) == pytest.approx(float(F.cross_entropy(data[0] @ moved.T @ moved.T, data[1])), rel=1e-5)


def test_the_posterior_is_not_changed(posterior, images):
    posterior.train()
    posterior.network.norm.eval()
    before = {name: tensor.clone() for name, tensor in posterior.state().items()}
    modes = [module.training for module in posterior.modules()]
    loss_along(posterior, images, [-1.0, 1.0], 2, HERE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.state().items())
    assert [module.training for module in posterior.modules()] == modes
    assert posterior.mean.grad is None


def test_an_address_says_it_all_and_batches_do_not_matter(posterior, images):
    found = loss_along(posterior, images, [-0.2, 0.4], 3, HERE)
    torch.manual_seed(99)
    assert torch.equal(loss_along(posterior, images, [-0.2, 0.4], 3, HERE), found)
    assert torch.equal(loss_along(posterior, images, [0.4], 1, HERE)[0], found[0, 1:])
    assert not torch.equal(loss_along(posterior, images, [-0.2, 0.4], 3, HERE.sub("other")), found)
    split = ArraySplit(images[0], images[1])
    torch.testing.assert_close(loss_along(posterior, split, [-0.2, 0.4], 3, HERE, batch_size=7), found)


# ---- sharpness and bad input ------------------------------------------------------------------------------------


def test_sharpness_is_the_mean_rise():
    # Along one direction L = 1 + 2 t² + t, along the other 1 + 4 t²: the odd part cancels.
    distances = [-0.5, 0.0, 0.5]
    losses = torch.tensor([[1 + 2 * t * t + t for t in distances], [1 + 4 * t * t for t in distances]])
    assert sharpness(losses, distances, 0.5) == pytest.approx(3 * 0.25)
    with pytest.raises(InputError, match="1 is not among them; expected 0, 1 and -1"):
        sharpness(losses, distances, 1.0)


@pytest.mark.parametrize(
    ("data", "distances", "count", "words"),
    [
        ((torch.rand(2, 3, 8, 8), torch.zeros(2).long()), [], 1, "at least one of each"),
        ((torch.rand(2, 3, 8, 8), torch.zeros(2).long()), [0.0], 0, "at least one of each"),
        ((torch.rand(0, 3, 8, 8), torch.zeros(0).long()), [0.0], 1, "at least one image"),
        ((torch.rand(2, 3, 8, 8), torch.zeros(1).long()), [0.0], 1, "a label for each"),
        ((torch.rand(300, 3, 8, 8), torch.zeros(256).long()), [0.0], 1, "a label for each"),
        ((torch.rand(256, 3, 8, 8), torch.zeros(300).long()), [0.0], 1, "a label for each"),
        (ArraySplit(torch.rand(2, 3, 8, 8)), [0.0], 1, "a label for each"),
    ],
)
def test_bad_input_is_a_sentence(posterior, data, distances, count, words):
    with pytest.raises(InputError, match=words):
        loss_along(posterior, data, distances, count, HERE)


# ---- the loss between networks ----------------------------------------------------------------------------------


def test_losses_between_are_those_of_plain_networks_with_mixed_tensors(posterior, images):
    ends = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        ends.append(Classifier().train())
        for _ in range(seed):
            ends[-1](torch.rand(9, 3, 8, 8))  # statistics of their own
    first, second = (end.eval().state_dict() for end in ends)
    found = loss_between(posterior.train(), first, second, images, [0.0, 0.3, 1.0], batch_size=16)
    assert (found.dtype, found.shape) == (torch.float64, (3,))
    for loss, point in zip(found.tolist(), (0.0, 0.3, 1.0)):
        mixed = Classifier().eval()
        mixed.load_state_dict({name: (1 - point) * first[name] + point * second[name] for name in first})
        with torch.no_grad():
            assert loss == pytest.approx(float(F.cross_entropy(mixed(images[0]), images[1])), rel=1e-5)
    assert posterior.training
    assert posterior.network.norm.num_batches_tracked == 0


def test_networks_of_other_tensors_have_no_line_between_them(posterior, images):
    first = dict(Classifier().state_dict())
    for second in (
        {name: tensor for name, tensor in first.items() if name != "norm.bias"},
        first | {"norm.bias": torch.zeros(6)},
    ):
        for ends in ((first, second), (second, first)):
            with pytest.raises(InputError, match=r"tensor 'norm\.bias' must be in both, with one shape"):
                loss_between(posterior, *ends, images, [0.0, 1.0])


def test_a_barrier_is_the_highest_rise_above_the_straight_line():
    # L(t) = 1 + 2 t + 8 t² (1 − t) is highest above its chord at t = 2/3, though it is highest itself at about 0.84.
    points = [place / 30 for place in range(31)]
    losses = torch.tensor([1 + 2 * t + 8 * t * t * (1 - t) for t in points], dtype=torch.float64)
    assert barrier(losses, points) == pytest.approx(8 * 4 / 27)
    below = torch.tensor([1 + 2 * t - t * (1 - t) for t in points], dtype=torch.float64)
    assert barrier(below, points) == pytest.approx(0, abs=1e-12)
    for wrong in (points[1:], points[:-1], [0.1, *points[1:]], [*points[:-1], 0.9]):
        with pytest.raises(InputError, match="points: expected 31 from 0 to 1"):
            barrier(losses, wrong)


# ---- spread over peers ------------------------------------------------------------------------------------------


def test_variance_over_peers_by_hand():
    # Image 0: classes sure and opposite, variance ½ + ½; image 1: all agree.
    p = torch.tensor([[[1.0, 0.0], [0.3, 0.7]], [[0.0, 1.0], [0.3, 0.7]]])
    assert evaluation.probability_variance(p.log()) == pytest.approx(0.5)
    # Three peers with 0.2, 0.4 and 0.9: mean 0.5, variance (0.09 + 0.01 + 0.16) / 2, the same for the other class.
    q = torch.tensor([[[0.2, 0.8]], [[0.4, 0.6]], [[0.9, 0.1]]])
    assert evaluation.probability_variance(q.log()) == pytest.approx(0.26)
    with pytest.raises(InputError, match="holds 1 peer"):
        evaluation.probability_variance(q[:1].log())
