"""Which layers get factors, and how they find them."""

import pytest
import torch
from members import TwoNamesOneLayer, close, every, images
from torch import nn

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
