"""Which layers get factors, and how they find them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from members import TwoNamesOneLayer, close, every, images
from peerbayes.errors import InputError
from peerbayes.posteriors import RankOne


def test_every_convolution_and_linear_layer_gets_factors_by_its_channels():
    shapes = {name: shape[0] for name, shape in RankOne(every(), 2).factor_layout.shapes.items()}
    channels = {"stem.0": (2, 6), "depthwise": (6, 6), "grouped": (6, 4), "up": (4, 6), "line": (6, 5)}
    channels |= {"first": (5, 5), "head": (5, 3)}  # second is first's: what shares a weight shares its factors
    assert shapes == {f"{name}.{part}": c for name, pair in channels.items() for part, c in zip("rs", pair)}


def test_layers_that_are_not_chosen_have_no_factors():
    posterior = RankOne(every(), 2, factors="random", bayesian=lambda name, _module: name.startswith("head")).eval()
    assert set(posterior.factor_layout.shapes) == {"head.r", "head.s"}
    with torch.no_grad():
        logits, _ = posterior.forward_members(images())
        close(logits[1], posterior.materialise(1)(images()))


def test_hooks_of_the_networks_own_stay_where_factors_go():
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval()
    network[0].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    network[1].register_forward_hook(lambda _module, _args, out: 2 * out)
    posterior, x = RankOne(network, 2), torch.randn(5, 3)
    with torch.no_grad():
        close(posterior.forward_members(x)[0][1], network(x))
        for plain in (posterior.materialise(1), posterior.average()):
            close(plain(x), network(x))


def test_one_layer_under_two_names_has_one_pair_of_factors():
    posterior = RankOne(TwoNamesOneLayer(), 3, factors="random")
    x = torch.randn(2, 4)
    logits, _ = posterior.forward_members(x)
    assert set(posterior.factor_layout.shapes) == {"a.r", "a.s"}
    plain = posterior.materialise(2)
    close(logits[2], plain(x))
    assert plain.a is plain.b


@pytest.mark.parametrize("train", [False, True])
def test_torchs_attention_keeps_shared_weights(train):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    network = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))
    posterior = RankOne(network, 2, factors="random").train(train)
    assert {name.rpartition(".")[0] for name in posterior.factor_layout.shapes} == {"0.linear1", "0.linear2", "2"}
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        logits, _ = posterior.forward_members(x)
        close(logits[1], posterior.materialise(1).train(train)(x))


class SharedTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x).mean(1))


class Mirror(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3)
        self.up = nn.ConvTranspose2d(8, 3, 3)
        self.up.weight = self.down.weight


def everything(_name, _module):
    return True


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (SharedTable(), "'table.weight' is shared.*Embedding 'table', Linear 'head'"),
        (Mirror(), "'down.weight' is shared.*Conv2d 'down', ConvTranspose2d 'up'"),
        (nn.Embedding(3, 4), "no convolution or linear layer of Embedding"),
    ],
)
def test_a_weight_that_no_pair_of_factors_serves_is_refused_by_name(network, message):
    with pytest.raises(InputError, match=message):
        RankOne(network, bayesian=everything)


def test_a_layer_whose_first_axis_is_not_the_batch_is_refused_by_name():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.Linear(4, 4)

        def forward(self, x):
            return self.odd(x.transpose(0, 1)).mean(0)

    with pytest.raises(InputError, match="layer 'odd' works on shape"):
        RankOne(Turned(), 2).forward_members(torch.randn(5, 3, 4))


# ---- whose rows they are: a network may do with its axes what it likes --------------------------------------------


class Sequences(nn.Module):
    """Texts or vectors, whose axes a step turns in one way or another before the layer ``odd``, and back after it."""

    def __init__(self, way, length, tokens):
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(11, 4) if tokens else nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)
        self.place = nn.Parameter(torch.zeros(length, 4))  # as many networks begin
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(self.embed(x))  # (B, T, 4)
        images, length, _ = x.shape
        odd = self.odd
        if self.way == "plain":
            x = odd(x)
        elif self.way == "flat":
            x = odd(x.flatten(0, 1)).unflatten(0, (images, length))
        elif self.way == "windows":
            x = odd(x.unflatten(1, (-1, 1)).flatten(0, 1)).unflatten(0, (images, length)).squeeze(2)
        elif self.way == "expanded":
            x = x + odd(self.place.expand(images, -1, -1))
        elif self.way == "mean":
            x = odd(x.mean(1))[:, None]
        elif self.way == "turned":
            x = odd(x.transpose(0, 1)).transpose(0, 1)
        elif self.way == "turned flat":
            x = odd(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (length, images)).transpose(0, 1)
        elif self.way == "twice":
            one, other = odd(torch.cat([x, x.tanh()])).split(images)
            x = one + other
        elif self.way == "reversed":
            x = odd(x.flip(0))
        elif self.way == "one by one":
            x = torch.stack([odd(row) for row in x])
        elif self.way == "places":
            x = x + odd(self.place)
        elif self.way == "places repeated":
            x = x + odd(self.place.repeat_interleave(images, 0)).unflatten(0, (length, images)).transpose(0, 1)
        elif self.way == "chosen":
            chosen = x[..., 0] > x[..., 0].mean(1, keepdim=True)
            y = torch.zeros_like(x)
            y[chosen] = odd(x[chosen])
            x = x + y
        return self.head(x.mean(1))


RIGHT = ("plain", "flat", "windows", "expanded", "mean")
WRONG = (
    *("turned", "turned flat", "twice", "reversed", "one by one", "places"),
    *("places repeated", "transformer", "features"),
)


def sequence_network(way, length, tokens):
    torch.manual_seed(0)
    if way not in ("transformer", "features"):
        return Sequences(way, length, tokens)
    return Layered(batch_first=False, tokens=tokens)


class Layered(nn.Module):
    def __init__(self, batch_first, tokens):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(11, 4) if tokens else nn.Linear(4, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.embed(x)
        x = self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))


def rows_of_texts(images, length, tokens):
    generator = torch.Generator().manual_seed(images * 100 + length)
    if tokens:
        return torch.randint(0, 11, (images, length), generator=generator)
    return torch.rand(images, length, 4, generator=generator)


@given(
    way=st.sampled_from(RIGHT + WRONG),
    members=st.integers(2, 5),
    images=st.integers(1, 6),
    multiple=st.integers(1, 3),
    more=st.integers(0, 1),
    tokens=st.booleans(),
    train=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_members_in_one_pass_are_the_members_or_are_refused(way, members, images, multiple, more, tokens, train):
    length = members * images * multiple + more
    network = sequence_network(way, length, tokens)
    posterior = RankOne(network, members, factors="random").train(train)
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    x, layers = rows_of_texts(images, length, tokens), []
    if way == "features":  # its layers are left out, but the axes of its output are as they are
        posterior = RankOne(network, members, factors="random", bayesian=lambda name, _: name.startswith("head"))
        posterior.train(train)
        before, layers = {}, ["layer"]
    state = torch.get_rng_state()
    with torch.no_grad():
        if way in WRONG:
            with pytest.raises(InputError, match=r"'(odd|layer.*)' .*, whose first axis does not hold the images of"):
                posterior.forward_members(x, layers=layers)
        else:
            logits, _ = posterior.forward_members(x)
            for number in range(members):
                close(logits[number], posterior.materialise(number)(x), 1e-4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, posterior.state_dict()[name]) for name, tensor in before.items())
    assert posterior.training is posterior.network.training is posterior.network.head.training is train


def test_rows_that_are_as_many_as_the_numbers_in_them_say_are_refused():
    network = sequence_network("chosen", 8, tokens=False)
    with pytest.raises(InputError, match="layer 'odd' works on"):
        RankOne(network, 2).forward_members(rows_of_texts(4, 8, tokens=False))


def test_a_transformer_that_has_the_batch_first_is_taken():
    torch.manual_seed(0)
    posterior = RankOne(Layered(batch_first=True, tokens=True), 2, factors="random").eval()
    x = rows_of_texts(4, 8, tokens=True)
    with torch.no_grad():
        logits, features = posterior.forward_members(x, layers=["layer"])
        for number in range(2):
            close(logits[number], posterior.materialise(number)(x))
    assert features["layer"].shape == (2, 4, 8, 4)
    posterior.train().forward_members(x)  # with dropout


class Restless(nn.Module):
    """What makes one row depend on others, or on chance, in any mode, and yet leaves each where it is."""

    def __init__(self, drop, mix):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False) if mix else nn.BatchNorm2d(4)
        self.drop, self.head, self.aside = drop, nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = F.dropout(x, 0.5) if self.drop else F.dropout(x, 0.5, self.training)
        logits = self.head(x.mean((2, 3)))
        return logits + self.aside(x.mean((2, 3)).flip(0)) if self.training and self.drop is None else logits


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("drop", "mix"), [(True, False), (False, True), (False, False)])
def test_chance_and_a_joint_batch_leave_rows_where_they_are(drop, mix, train):
    posterior = RankOne(Restless(drop, mix), 3, factors="random").train(train)
    before = {name: buffer.clone() for name, buffer in posterior.network.named_buffers()}
    posterior._check_rows(images(), [])
    assert all(torch.equal(buffer, posterior.network.get_buffer(name)) for name, buffer in before.items())
    assert posterior.forward_members(images())[0].shape == (3, 5, 3)


def test_a_layer_that_is_called_in_training_alone_is_tried_there():
    posterior = RankOne(Restless(None, False), 2, factors="random")
    posterior.eval().forward_members(images())
    with pytest.raises(InputError, match="layer 'aside' works on"):
        posterior.train().forward_members(images())


def test_a_shape_is_tried_once_by_each_posterior():
    posterior, calls = RankOne(every(), 2), []
    posterior.network.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        posterior.forward_members(images())
        copy.deepcopy(posterior).forward_members(images(7))
    assert len(calls) == 1 + 2 + 2 + 6  # one run to settle, both members, all of them twice
    one = RankOne(every(), 1)
    one.network.register_forward_hook(lambda *_: calls.append(1))
    one.forward_members(images())
    assert len(calls) == 12
