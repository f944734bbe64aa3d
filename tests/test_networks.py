"""The papers' networks against arithmetic, and the three doors: our own names, timm's, and the user's."""

import math
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from peerbayes import networks
from peerbayes.errors import InputError
from peerbayes.networks import Inputs, Normalize, build, capture, find_layer
from peerbayes.networks.resnet import BasicBlock

CIFAR = Inputs(10, (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
DIGITS = Inputs(10, (1, 8, 8), (0.3,), (0.4,))


# ---- ResNets ------------------------------------------------------------------------------------------------------


def count_by_arithmetic(blocks, channels, classes):
    """Convolutions 9 · in · out, batch-norms 2 · channels, the linear head; shortcuts are free."""
    widths = [16] * blocks + [32] * blocks + [64] * blocks
    total, before = 9 * channels * 16 + 2 * 16, 16
    for width in widths:
        total += 9 * before * width + 9 * width * width + 2 * 2 * width
        before = width
    return total + 64 * classes + classes


@pytest.mark.parametrize(
    ("name", "blocks", "known"), [("resnet20", 3, 269_722), ("resnet32", 5, 464_154), ("resnet56", 9, 853_018)]
)
def test_parameter_counts_are_the_known_ones(name, blocks, known):
    network = build(name, CIFAR)
    assert sum(p.numel() for p in network.parameters()) == known == count_by_arithmetic(blocks, 3, 10)
    depth = sum(isinstance(m, nn.Conv2d | nn.Linear) for m in network.modules())
    assert depth == int(name.removeprefix("resnet"))


def test_parameter_count_follows_classes_and_channels():
    network = build("resnet20", Inputs(7, (1, 28, 28), (0.5,), (0.5,)))
    assert sum(p.numel() for p in network.parameters()) == count_by_arithmetic(3, 1, 7)


@pytest.mark.parametrize(("name", "width"), [("resnet20", 16), ("resnet56", 16), ("resnet8", 8)])
def test_stage_outputs_halve_in_size_and_double_in_width(name, width):
    network = build(name, CIFAR).eval()
    with torch.no_grad(), capture(network, ["stage1", "stage2", "stage3"]) as found:
        logits = network(torch.rand(2, 3, 32, 32))
    assert [tuple(t.shape[1:]) for t in found.values()] == [(width, 32, 32), (2 * width, 16, 16), (4 * width, 8, 8)]
    assert all(t.min() == 0 for t in found.values())
    torch.testing.assert_close(network.linear(found["stage3"].mean((2, 3))), logits)


def test_convolutions_have_no_bias_and_fan_out_scale():
    torch.manual_seed(0)
    network = build("resnet32", CIFAR)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is None
            wanted = math.sqrt(2 / (9 * module.out_channels))
            n = module.weight.numel()
            assert module.weight.std().item() == pytest.approx(wanted, rel=5 / math.sqrt(2 * n))
            assert abs(module.weight.mean()) < 5 * wanted / math.sqrt(n)
    assert network.linear.bias.abs().sum() == 0


def loose_batch_norm(x, bn):
    scale = bn.weight / (bn.running_var + bn.eps).sqrt()
    return (x - bn.running_mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + bn.bias.view(1, -1, 1, 1)


def scrambled(block):
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return block.eval()


@pytest.mark.parametrize(("channels_in", "channels", "stride"), [(4, 8, 2), (4, 7, 2), (4, 4, 1), (4, 4, 2), (3, 6, 1)])
@torch.no_grad()
def test_a_block_is_its_formula_with_the_parameter_free_shortcut(channels_in, channels, stride):
    torch.manual_seed(0)
    block, x = scrambled(BasicBlock(channels_in, channels, stride)), torch.randn(2, channels_in, 6, 6)
    shortcut = torch.zeros(2, channels, 6 // stride, 6 // stride)
    first = (channels - channels_in) // 2
    for channel in range(channels_in):
        for i in range(6 // stride):
            for j in range(6 // stride):
                shortcut[:, first + channel, i, j] = x[:, channel, stride * i, stride * j]
    out = loose_batch_norm(F.conv2d(x, block.conv1.weight, stride=stride, padding=1), block.bn1).relu()
    out = loose_batch_norm(F.conv2d(out, block.conv2.weight, padding=1), block.bn2)
    kept = x.clone()
    torch.testing.assert_close(block(x), (out + shortcut).relu(), rtol=1e-4, atol=1e-5)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    "inputs", [DIGITS, Inputs(10, (1, 28, 28), (0.13,), (0.31,)), Inputs(3, (3, 9, 7), (0.5,) * 3, (0.2,) * 3)]
)
@pytest.mark.parametrize("name", ["resnet8", "mlp"])
def test_small_images_train(name, inputs):
    torch.manual_seed(0)
    network = build(name, inputs)
    x, labels = torch.rand(12, *inputs.shape), torch.arange(12) % inputs.classes
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad.abs().sum() > 0 for p in network.parameters())


def test_mlp_is_its_formula():
    network = build("mlp", DIGITS)
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        out = ((x.numpy() - np.float32(0.3)) / np.float32(0.4)).reshape(3, 64)
        for linear in [m for m in network.modules() if isinstance(m, nn.Linear)]:
            last = linear is network.linear
            out = out @ linear.weight.numpy().T + linear.bias.numpy()
            out = out if last else np.maximum(out, 0)
        np.testing.assert_allclose(network(x).numpy(), out, rtol=1e-4, atol=1e-5)
    assert [m.out_features for m in network.modules() if isinstance(m, nn.Linear)] == [256, 256, 10]


# ---- normalisation ------------------------------------------------------------------------------------------------


def test_normalisation_is_by_channel():
    x = torch.rand(2, 3, 5, 4)
    expected = (x.numpy() - np.array(CIFAR.mean).reshape(1, 3, 1, 1)) / np.array(CIFAR.std).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(Normalize(CIFAR)(x).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet8", "mlp"])
def test_normalisation_is_the_first_layer_of_every_network(name):
    torch.manual_seed(0)
    shifted = Inputs(10, (3, 8, 8), (0.2, 0.5, 0.7), (0.1, 0.3, 2.0))
    network, plain = build(name, shifted).eval(), build(name, Inputs(10, (3, 8, 8), (0.0,) * 3, (1.0,) * 3)).eval()
    plain.load_state_dict(
        {**network.state_dict(), "normalize.mean": torch.zeros(1, 3, 1, 1), "normalize.std": torch.ones(1, 3, 1, 1)}
    )
    x = torch.rand(2, 3, 8, 8)
    by_hand = (x - torch.tensor(shifted.mean).view(3, 1, 1)) / torch.tensor(shifted.std).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(network(x), plain(by_hand), rtol=1e-4, atol=1e-5)


# ---- features -----------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.ModuleDict({"head": nn.Linear(2, 2), "stem": nn.Linear(2, 2)})
        self.right = nn.ModuleDict({"head": nn.Linear(2, 2)})

    def forward(self, x):
        return self.right["head"](self.left["head"](self.left["stem"](x)))


def test_layers_are_found_by_name_or_unique_ending():
    network = Nested()
    assert find_layer(network, "left.head") is network.left["head"]
    assert find_layer(network, "stem") is network.left["stem"]
    with pytest.raises(InputError, match=r"layer 'head' is ambiguous in Nested: left\.head, right\.head"):
        find_layer(network, "head")
    with pytest.raises(InputError, match=r"Nested has no layer 'right\.haed'; did you mean 'right\.head'\?"):
        find_layer(network, "right.haed")
    for name in ("", "tem", "zzz"):
        with pytest.raises(InputError, match=f"Nested has no layer '{name}'"):
            find_layer(network, name)


def hooks(network):
    return sum(len(m._forward_hooks) for m in network.modules())


def test_features_are_the_layers_outputs_and_hooks_go_away():
    network, x = Nested(), torch.randn(3, 2)
    with capture(network, ["stem", "left.head"]) as found:
        out = network(x)
        assert hooks(network) == 2
    assert torch.equal(found["stem"], network.left["stem"](x))
    assert torch.equal(found["left.head"], network.left["head"](found["stem"]))
    assert torch.equal(out, network.right["head"](found["left.head"]))
    assert found["stem"].requires_grad
    assert hooks(network) == 0


def test_hooks_go_away_after_a_failure():
    network = Nested()
    with pytest.raises(RuntimeError), capture(network, ["stem"]):
        network(torch.randn(3, 9))
    assert hooks(network) == 0
    with pytest.raises(InputError), capture(network, ["stem", "absent"]):
        pass
    assert hooks(network) == 0


# ---- the doors ----------------------------------------------------------------------------------------------------


def test_names_and_the_decorator():
    assert {"resnet8", "resnet20", "resnet32", "resnet56", "mlp"} <= set(networks.names())
    assert networks.names() == sorted(networks.names())

    @networks.network
    def my_own_test_network(inputs):
        return nn.Linear(inputs.classes, 1)

    try:
        assert build("my_own_test_network", DIGITS).in_features == 10
    finally:
        networks.registry._NETWORKS.pop("my_own_test_network")


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(InputError, match=r"there is no network 'restnet20'; did you mean 'resnet20'\?"):
        build("restnet20", CIFAR)
    with pytest.raises(InputError, match=r"there is no network 'zzz'; known: mlp, .*timm/NAME"):
        build("zzz", CIFAR)


def test_timm_networks_come_with_their_normalisation():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    inputs = Inputs(7, (1, 32, 32), (0.3,), (0.5,))
    network = build("timm/resnet10t", inputs).eval()
    plain = timm.create_model("resnet10t", num_classes=7, in_chans=1).eval()
    plain.load_state_dict(network.network.state_dict())
    x = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(network(x), plain((x - 0.3) / 0.5), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"timm has no network 'resnet18x'; did you mean 'resnet18"):
        build("timm/resnet18x", inputs)


def test_without_timm_the_door_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"'timm/resnet18' needs timm: pip install 'peerbayes\[zoo\]'"):
        build("timm/resnet18", CIFAR)


def test_a_users_function_is_a_network(tmp_path, monkeypatch):
    (tmp_path / "door_pkg").mkdir()
    (tmp_path / "door_pkg" / "__init__.py").write_text("")
    (tmp_path / "door_pkg" / "nets.py").write_text(
        textwrap.dedent("""
        from torch import nn
        number = 3
        def mine(inputs): return nn.Linear(3, inputs.classes)
        def wrong(inputs): return inputs.classes
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    network = build("door_pkg.nets:mine", CIFAR)
    assert isinstance(network, nn.Linear)
    assert network.out_features == 10
    for path, message in {
        "door_pkg.nets:other": "'door_pkg.nets:other' can't be imported: .*other",
        "door_pkg.absent:mine": "'door_pkg.absent:mine' can't be imported: .*absent",
        "door_pkg.nets:wrong": "'door_pkg.nets:wrong' returned int, expected a torch.nn.Module",
        "door_pkg.nets:": "can't be imported",
        ":mine": "':mine' can't be imported",
        ".nets:mine": "'.nets:mine' can't be imported",
        "door_pkg.nets:number": "'door_pkg.nets:number' is int, expected a function",
    }.items():
        with pytest.raises(InputError, match=message):
            build(path, CIFAR)
