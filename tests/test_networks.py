"""The papers' networks against arithmetic, and the three doors: our own names, timm's, and the user's."""

import math
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from peerbayes import networks
from peerbayes.errors import InputError
from peerbayes.inference.batch_norm import Folded
from peerbayes.math.noise import Address
from peerbayes.networks import Inputs, Normalize, build, capture, find_layer, starting_point
from peerbayes.networks.googlenet import Inception
from peerbayes.networks.projection_resnet import Basic, Bottleneck, ProjectionResNet
from peerbayes.networks.resnet import BasicBlock
from peerbayes.networks.vgg import VGG
from peerbayes.networks.wide_resnet import PreActivationBlock, WideResNet
from peerbayes.posteriors import MeanField

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


# ---- the larger networks of papers 2, 3 and 4 -----------------------------------------------------------------------

CIFAR100 = Inputs(100, (3, 32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761))


def count(network):
    return sum(p.numel() for p in network.parameters())


# Published: kuangliu/pytorch-cifar (ResNet-18 on CIFAR-10: 11.17 M); weiaicunzai/pytorch-cifar100, where paper 2's come
# from (ResNet-18 11.2 M, -34 21.3 M, -50 23.7 M, -101 42.7 M, VGG16-BN 34.0 M); Zagoruyko & Komodakis 2016 (WRN-28-10
# 36.5 M; the narrower ones follow from the formula in the next test). Paper 2's GoogLeNet has three convolutions in its
# stem, which makes it 0.14 M larger than the 6.2 M of pytorch-cifar100's, which has one.
@pytest.mark.parametrize(
    ("name", "classes", "known", "published"),
    [
        ("resnet18", 10, 11_173_962, 11.17),
        ("resnet18", 100, 11_220_132, 11.2),
        ("resnet34", 100, 21_328_292, 21.3),
        ("resnet50", 100, 23_705_252, 23.7),
        ("resnet101", 100, 42_697_380, 42.7),
        ("vgg16_bn", 100, 34_011_172, 34.0),
        ("vgg16_bn_linear", 10, 14_724_042, 14.7),
        ("googlenet", 100, 6_394_852, 6.4),
        ("wrn28x1", 10, 369_498, 0.37),
        ("wrn28x4", 100, 5_872_180, 5.9),
        ("wrn28x10", 10, 36_479_194, 36.5),
    ],
)
def test_parameter_counts_of_the_larger_networks_are_the_published_ones(name, classes, known, published):
    with torch.device("meta"):
        network = build(name, Inputs(classes, CIFAR.shape, CIFAR.mean, CIFAR.std))
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, classes)
    digits = len(str(published).partition(".")[2])
    assert count(network) == known
    assert round(known / 1e6, digits) == published


@pytest.mark.parametrize(("name", "width"), [("wrn28x1", 1), ("wrn28x4", 4), ("wrn28x10", 10)])
def test_wide_resnets_have_the_weights_that_their_formula_says(name, width):
    total, before = 27 * 16, 16
    for channels in (16 * width, 32 * width, 64 * width):
        total += before * channels * (before != channels)
        for _ in range(4):
            total += 2 * before + 9 * before * channels + 2 * channels + 9 * channels * channels
            before = channels
    with torch.device("meta"):
        network = build(name, CIFAR)
    assert count(network) == total + 2 * before + 10 * before + 10
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert sum(getattr(m, "kernel_size", None) != (1, 1) for m in layers) == 26  # 28 counts two of the projections


def settled(network, x):
    """Give batch-norm the statistics of a batch and parameters that are not its initial ones."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(x)
    return network.eval()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@torch.no_grad()
def test_projection_resnets_are_torchvisions_with_another_stem(name):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    x = torch.rand(4, 3, 32, 32)
    network = settled(build(name, CIFAR100), x)
    other = models.get_model(name, num_classes=100)
    other.conv1, other.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    renamed = {}
    for key, tensor in network.state_dict().items():
        key = key.replace("shortcut.conv", "downsample.0").replace("shortcut.bn", "downsample.1")
        key = key.replace("stage", "layer").replace("linear.", "fc.")
        key = f"{key.split('.')[0]}1.{key.partition('.')[2]}" if key.startswith(("conv.", "bn.")) else key
        if not key.startswith("normalize"):
            renamed[key] = tensor
    other.load_state_dict(renamed)
    torch.testing.assert_close(network(x), other.eval()(network.normalize(x)), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_vggs_stages_are_torchvisions_features():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    x = torch.rand(4, 3, 32, 32)
    network = settled(build("vgg16_bn_linear", CIFAR100), x)
    with torch.device("meta"):  # its classifier is not wanted
        features = models.vgg16_bn().features
    features = features.to_empty(device="cpu").eval()
    kinds = (nn.Conv2d, nn.BatchNorm2d)
    theirs = [m for m in features if isinstance(m, kinds)]
    for mine, other in zip([m for m in network.modules() if isinstance(m, kinds)], theirs, strict=True):
        state = dict(mine.state_dict())
        if isinstance(mine, nn.Conv2d):
            state["bias"] = torch.zeros(mine.out_channels)
        other.load_state_dict(state)
    with capture(network, ["stage5"]) as found:
        logits = network(x)
    expected = features(network.normalize(x))
    torch.testing.assert_close(found["stage5"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, network.linear(expected.flatten(1)), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_vggs_classifier_is_paper_2s():
    torch.manual_seed(0)
    with torch.device("meta"):
        network = build("vgg16_bn", CIFAR100)
    assert [m.out_features for m in network.modules() if isinstance(m, nn.Linear)] == [4096, 4096, 100]
    assert [m.p for m in network.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]


@torch.no_grad()
def test_inceptions_branches_are_torchvisions():
    # torchvision's third branch has one 3×3 convolution where ours has two, so it is followed up to there.
    module = pytest.importorskip("torchvision.models.googlenet")
    torch.manual_seed(0)
    x = torch.randn(2, 192, 9, 9)
    mine = settled(Inception(192, 64, (96, 128), (16, 32), 32), x)
    other = module.Inception(192, 64, 96, 128, 16, 32, 32).eval()
    branches = {
        other.branch1: mine.one,
        other.branch2: mine.three,
        other.branch3: mine.five[:2],
        other.branch4: mine.pooled,
    }
    for theirs, ours in branches.items():
        tensors = ours.state_dict().values()
        theirs.load_state_dict(dict(zip(theirs.state_dict(), tensors, strict=True)))
    for block in other.modules():
        if isinstance(block, nn.BatchNorm2d):
            block.eps = 1e-5  # torchvision has TensorFlow's 1e-3
    one, three, five, pooled = mine(x).split([64, 128, 32, 32], 1)
    theirs = other(x).split([64, 128, 32, 32], 1)
    for a, b in zip(
        (one, three, mine.five[2](theirs[2]), pooled), (theirs[0], theirs[1], five, theirs[3]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels_in", "channels", "stride"), [(4, 8, 2), (4, 4, 1), (4, 4, 2), (3, 6, 1)])
@torch.no_grad()
def test_a_pre_activation_block_adds_its_raw_input(channels_in, channels, stride):
    torch.manual_seed(0)
    block, x = scrambled(PreActivationBlock(channels_in, channels, stride)), torch.randn(2, channels_in, 6, 6)
    kept = x.clone()
    out = F.conv2d(loose_batch_norm(x, block.bn1).relu(), block.conv1.weight, stride=stride, padding=1)
    out = F.conv2d(loose_batch_norm(out, block.bn2).relu(), block.conv2.weight, padding=1)
    projected = (channels_in, stride) != (channels, 1)
    shortcut = F.conv2d(x, block.shortcut.weight, stride=stride) if projected else x
    torch.testing.assert_close(block(x), out + shortcut, rtol=1e-4, atol=1e-5)
    assert torch.equal(x, kept)


STAGES = {
    "resnet18": [(64, 32), (128, 16), (256, 8), (512, 4)],
    "resnet34": [(64, 32), (128, 16), (256, 8), (512, 4)],
    "resnet50": [(256, 32), (512, 16), (1024, 8), (2048, 4)],
    "resnet101": [(256, 32), (512, 16), (1024, 8), (2048, 4)],
    "vgg16_bn": [(64, 16), (128, 8), (256, 4), (512, 2), (512, 1)],
    "vgg16_bn_linear": [(64, 16), (128, 8), (256, 4), (512, 2), (512, 1)],
    "googlenet": [(480, 16), (832, 8), (1024, 4)],
    "wrn28x1": [(16, 32), (32, 16), (64, 8)],
    "wrn28x4": [(64, 32), (128, 16), (256, 8)],
    "wrn28x10": [(160, 32), (320, 16), (640, 8)],
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_of_the_larger_networks_are_features_by_name(name):
    with torch.device("meta"):
        network = build(name, CIFAR100)
        with capture(network, [f"stage{i + 1}" for i in range(len(STAGES[name]))]) as found:
            network(torch.zeros(2, 3, 32, 32))
    assert [tuple(t.shape[1:3]) for t in found.values()] == STAGES[name]


# Every kind of block at its full width, in fewer of them where that changes nothing, and what can be folded.
FAMILIES = {
    "basic": (lambda: ProjectionResNet(CIFAR100, Basic, (1, 2, 1, 1)), 1 + 2 * 5 + 3),
    "bottleneck": (lambda: ProjectionResNet(CIFAR100, Bottleneck, (1, 2, 1, 1)), 1 + 3 * 5 + 4),
    "vgg": (lambda: VGG(CIFAR100, (64, 64)), 13),
    "googlenet": (lambda: build("googlenet", CIFAR100), 3 + 9 * 7),
    "wrn28x1": (lambda: build("wrn28x1", CIFAR100), 12),
    "wrn10x4": (lambda: WideResNet(CIFAR100, 10, 4), 3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_larger_networks_learn_and_become_posteriors(family):
    torch.manual_seed(0)
    builder, foldable = FAMILIES[family]
    x = torch.rand(4, 3, 32, 32)
    network = builder()
    F.cross_entropy(network(x), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())
    posterior = MeanField(settled(network, x)).eval()
    last = torch.channels_last  # what a posterior runs in: other kernels round otherwise
    with torch.no_grad():
        plain = network.to(memory_format=last)(x.contiguous(memory_format=last))
        posterior.rho.fill_(-30.0)
        still = posterior(x, posterior.draw(Address(1)))
        torch.testing.assert_close(still, plain, rtol=1e-5, atol=1e-5)
        posterior.rho.fill_(-5.0)
        weights = posterior.draw(Address(1))
        whole, folded = posterior(x, weights), Folded(posterior)
        assert not torch.allclose(whole, plain, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(folded(x, weights.flat), whole, rtol=1e-4, atol=1e-4 * whole.abs().max().item())
        assert len(folded.pairs) == foldable
        with warnings.catch_warnings():  # autocast has no float32; the fused network is exact all the same
            warnings.simplefilter("ignore")
            fused = Folded(posterior, torch.float32)
            assert fused.fused
            torch.testing.assert_close(fused(x, weights.flat), whole, rtol=1e-4, atol=1e-4 * whole.abs().max().item())


def test_he_initial_values_of_the_larger_networks():
    torch.manual_seed(0)
    for name in ("googlenet", "wrn28x4", "resnet18"):
        network = build(name, CIFAR100)
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                assert module.bias is None
                fan_out = module.out_channels * math.prod(module.kernel_size)
                n = module.weight.numel()
                assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=5 / math.sqrt(2 * n))
        n = network.linear.weight.numel()
        wanted = math.sqrt(2 / network.linear.in_features)
        assert network.linear.weight.std().item() == pytest.approx(wanted, rel=5 / math.sqrt(2 * n))
        assert network.linear.bias.abs().sum() == 0


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="needs 32×32 pixels at least, not 28×28"):
        build("vgg16_bn", Inputs(10, (1, 28, 28), (0.5,), (0.5,)))
    for name in ("timm/test_vit", "vgg16_bn", "resnet18", "googlenet", "wrn28x1", "mlp"):
        with pytest.raises(InputError, match="the network is for images, but the data are texts"):
            build(name, Inputs(10, (40,), (), (), tokens=100))
        with pytest.raises(InputError, match="images have 1 channels, but there are 3 means and 3 standard deviations"):
            build(name, Inputs(10, (1, 32, 32), (0.5,) * 3, (0.5,) * 3))


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
    with pytest.raises(InputError, match=r"there is no network 'zzz'; known: .*mlp, .*timm/NAME"):
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


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("inception_v4", 299),
        ("vit_base_patch16_224", 224),
        ("vit_tiny_patch16_224", 32),
        ("darknet53", 64),
        ("volo_d1_224", 64),
        ("volo_d3_224", 64),
    ],
)
def test_timms_networks_of_paper_2_have_the_datas_classes_and_size(name, size):
    timm = pytest.importorskip("timm")
    inputs = Inputs(47, (3, size, size), (0.5,) * 3, (0.2,) * 3)
    with torch.device("meta"):
        network = build(f"timm/{name}", inputs)
        assert network.training
        logits = network(torch.zeros(2, 3, size, size))  # VOLO, too, returns plain logits while it trains
    assert logits.shape == (2, 47)
    heads = timm.get_pretrained_cfg(name).classifier
    for head in (heads,) if isinstance(heads, str) else heads:
        assert network.network.get_submodule(head).out_features == 47


def test_timm_networks_that_can_not_take_the_images_say_so():
    pytest.importorskip("timm")
    inputs = Inputs(47, (3, 32, 32), (0.5,) * 3, (0.2,) * 3)
    refusal = "'timm/inception_v4' can't be built for images of 32×32 pixels: .*(Kernel size|too small)"
    with torch.device("meta"), pytest.raises(InputError, match=refusal):
        build("timm/inception_v4", inputs)


@pytest.fixture
def vit_file(tmp_path):
    """A file such as timm publishes: a small vision transformer for images of 64×64 pixels of 1000 classes."""
    timm, files = pytest.importorskip("timm"), pytest.importorskip("safetensors.torch")
    torch.manual_seed(1)
    state = timm.create_model("test_vit", img_size=64).state_dict()
    files.save_file(state, tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors", state


def test_a_timm_file_starts_a_network_of_other_classes(vit_file):
    path, state = vit_file
    inputs = Inputs(7, (3, 32, 32), (0.3,) * 3, (0.1,) * 3)
    torch.manual_seed(2)
    source = starting_point("timm/test_vit", inputs, path)
    posterior = MeanField(build("timm/test_vit", inputs), start_from=source)
    got = posterior.materialise().network.state_dict()
    different = [name for name in got if got[name].shape != state[name].shape]
    assert sorted(different) == ["head.bias", "head.weight", "pos_embed"]
    assert all(torch.equal(got[name], state[name]) for name in got if name not in different)
    assert posterior.network.normalize.mean.flatten().tolist() == pytest.approx([0.5] * 3)  # what the weights expect
    logits = posterior(torch.rand(2, 3, 32, 32))
    assert logits.shape == (2, 7)
    torch.manual_seed(3)
    other = starting_point("timm/test_vit", inputs, path)
    assert not torch.equal(other.network.head.weight, source.network.head.weight)  # each peer has a head of its own


def test_a_timm_file_of_the_same_classes_keeps_its_head(vit_file):
    path, state = vit_file
    source = starting_point("timm/test_vit", Inputs(1000, (1, 64, 64), (0.3,), (0.1,)), path)
    got = source.network.state_dict()
    assert torch.equal(got["head.weight"], state["head.weight"])
    assert torch.equal(got["pos_embed"], state["pos_embed"])
    torch.testing.assert_close(got["patch_embed.proj.weight"], state["patch_embed.proj.weight"].sum(1, keepdim=True))
    assert source.normalize.mean.item() == pytest.approx(0.3)


def test_files_that_are_not_for_this_network(vit_file, tmp_path):
    from safetensors.torch import save_file

    path, state = vit_file
    inputs = Inputs(7, (3, 64, 64), (0.3,) * 3, (0.1,) * 3)
    with pytest.raises(
        InputError, match=r"vit\.safetensors: has no tensor '.*'; does it belong to another network than timm/resnet10t"
    ):
        starting_point("timm/resnet10t", inputs, path)
    save_file({**state, "extra": torch.zeros(1)}, tmp_path / "more.safetensors")
    with pytest.raises(InputError, match=r"more\.safetensors: has a tensor 'extra' that timm/test_vit has not"):
        starting_point("timm/test_vit", inputs, tmp_path / "more.safetensors")
    save_file({**state, "norm.weight": torch.zeros(3)}, tmp_path / "shape.safetensors")
    with pytest.raises(InputError, match=r"shape\.safetensors: .*size mismatch for norm\.weight"):
        starting_point("timm/test_vit", inputs, tmp_path / "shape.safetensors")


def test_files_of_ones_own_are_left_to_the_posterior_and_others_told(vit_file, tmp_path):
    path, _ = vit_file
    inputs = Inputs(7, (3, 64, 64), (0.3,) * 3, (0.1,) * 3)
    own, broken = tmp_path / "own.safetensors", tmp_path / "broken.safetensors"
    MeanField(build("timm/test_vit", inputs)).save(own)
    broken.write_bytes(b"none")
    assert starting_point("timm/test_vit", inputs, own) == own
    with pytest.raises(InputError, match=r"broken\.safetensors: not a readable safetensors file"):
        starting_point("timm/test_vit", inputs, broken)
    with pytest.raises(InputError, match=r"absent\.safetensors: no such file"):
        starting_point("timm/test_vit", inputs, tmp_path / "absent.safetensors")
    with pytest.raises(InputError, match=f"{path.name}: .*'"):
        starting_point("resnet8", inputs, path)


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
        "door_pkg.nets:other": "'door_pkg.nets:other' can't be imported: .*other'$",
        "door_pkg.nets:minee": "can't be imported: .*'minee'; did you mean 'door_pkg.nets:mine'\\?$",
        "door_pkg.absent:mine": "'door_pkg.absent:mine' can't be imported: .*absent'$",
        "no_pkg.nets:mine": "No module named 'no_pkg'; install it, or name its folder in PYTHONPATH$",
        "door_pkg.nets:wrong": "'door_pkg.nets:wrong' returned int, expected a torch.nn.Module",
        "door_pkg.nets:": "can't be imported",
        ":mine": "':mine' can't be imported",
        ".nets:mine": "'.nets:mine' can't be imported",
        "door_pkg.nets:number": "'door_pkg.nets:number' is int, expected a function",
    }.items():
        with pytest.raises(InputError, match=message):
            build(path, CIFAR)
