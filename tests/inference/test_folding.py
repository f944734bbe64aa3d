import gc
import weakref

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from peerbayes import networks
from peerbayes.inference.batch_norm import Folded
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField, Point


def unsettled(network: nn.Module) -> nn.Module:
    """Give every batch-norm statistics and parameters that folding can't get right by chance."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.2, 3)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return network.eval()


def plain(channels: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 5, 3, bias=True), nn.BatchNorm2d(5), nn.ReLU(),
        nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False), nn.Flatten(),
        nn.Linear(4 * 16, 6), nn.BatchNorm1d(6), nn.Linear(6, 3),
    )  # fmt: skip


class Shared(nn.Module):
    """Batch-norm that must stay: its input is used elsewhere, it is called twice, or it has no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.again, self.batch = nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)
        self.second, self.third = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y = self.norm(y) + y
        y = self.again(self.second(y)) + self.again(y)
        return self.batch(self.third(y)).mean((2, 3))


def logits(posterior, images):
    weights = posterior.draw(Address(3))
    posterior.eval()
    with torch.no_grad():
        return Folded(posterior)(images, weights.flat), posterior(images, weights)


@pytest.mark.parametrize("kind", [Point, MeanField])
@pytest.mark.parametrize(
    ("network", "count"),
    [
        (plain(), 2),
        (networks.build("resnet20", networks.Inputs(10, (3, 8, 8), (0.5,) * 3, (0.2,) * 3)), 19),
        (timm.create_model("resnet18", num_classes=4), 20),
        (timm.create_model("mobilenetv3_small_050", num_classes=4), None),
        (Shared(), 0),
    ],
    ids=["plain", "resnet20", "resnet18", "mobilenet", "shared"],
)
def test_folding_changes_nothing_but_the_number_of_layers(network, count, kind):
    posterior = kind(unsettled(network))
    images = torch.rand(3, 3, 8, 8) if count != 20 else torch.rand(3, 3, 40, 40)
    folded, whole = logits(posterior, images)
    assert torch.allclose(folded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
    if count is not None:
        assert len(Folded(posterior).pairs) == count
    norms = sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in posterior.network.modules())
    left = Folded(posterior).network
    if left is not None:
        assert sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in left.modules()) == norms - len(
            Folded(posterior).pairs
        )


def test_new_statistics_are_seen_by_the_next_prediction():
    posterior = MeanField(unsettled(plain()))
    images = torch.rand(3, 3, 8, 8)
    before, _ = logits(posterior, images)
    posterior.network[1].running_mean.add_(1.0)
    with torch.no_grad():
        posterior.rest.mul_(1.5)
    folded, whole = logits(posterior, images)
    assert torch.allclose(folded, whole, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(folded, before, rtol=1e-2, atol=1e-2)


def test_a_bayesian_batch_norm_stays():
    posterior = MeanField(unsettled(plain()), bayesian=lambda _name, _module: True)
    images = torch.rand(3, 3, 8, 8)
    folded, whole = logits(posterior, images)
    assert list(Folded(posterior).pairs) == ["3"]  # the one without parameters
    assert torch.allclose(folded, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("network", [plain(), nn.Sequential(nn.Flatten(), nn.Linear(192, 3))], ids=["folded", "bare"])
def test_a_posterior_that_has_predicted_can_be_freed(network):
    posterior = MeanField(network)
    posterior.predict(torch.rand(2, 3, 8, 8), 2)
    gone = weakref.ref(posterior.network)
    del posterior
    gc.collect()
    assert gone() is None


# ---- ReLU and residuals within the convolution -------------------------------------------------------------------


def fused_logits(posterior, images, number=3):
    """Logits of the fused network in float32, of the whole one, and the names of the fused convolutions."""
    posterior.eval()
    weights = posterior.draw(Address(number))
    folded = Folded(posterior, torch.bfloat16)
    folded.half = torch.float32  # autocast can't, but the fused network can
    before = images.clone()
    with torch.no_grad():
        found, whole = folded._run(images, weights.flat), posterior(images, weights)
    assert torch.equal(images, before)
    return found, whole, folded.fused


def agree(found, whole):
    return torch.allclose(found, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


class Block(nn.Module):
    """Two convolutions with batch-norm, and what a test makes of them."""

    def __init__(self, how, **options):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.norm2 = nn.Conv2d(6, 6, **({"kernel_size": 3, "padding": 1} | options)), nn.BatchNorm2d(6)
        self.short, self.norm3 = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.relu, self.act = nn.ReLU(), nn.ReLU(inplace=True)
        self.gamma = nn.Parameter(torch.rand(6, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(6))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.how = how

    def a(self, x):
        return self.norm1(self.first(x))

    def b(self, x):
        return self.norm2(self.second(x))

    def c(self, x):
        return self.norm3(self.short(x))

    def forward(self, x):
        return self.how(self, x).flatten(2).mean(2)


def residual_after(s, x):
    y = s.b(torch.relu(s.a(x)))
    return s.relu(y + s.c(x))


def into_convolution(s, x):
    y = s.b(s.act(s.a(x)))
    y += s.c(x)
    return s.act(y)


def into_residual_used_again(s, x):
    short = torch.tanh(s.c(x))
    total = short
    total += s.b(s.relu(s.a(x)))
    return s.relu(total) + 3 * short


def in_place_between(s, x):
    z = torch.tanh(s.c(x))
    y = s.b(z)
    z.mul_(-2)
    return torch.relu(y) + z


def relu_without_result(s, x):
    y = torch.tanh(s.a(x)) + s.c(x)
    s.act(y)
    return s.b(y).relu() - y


def used_twice(s, x):
    y = s.second(torch.relu(s.a(x)))
    return torch.relu(s.norm2(y)) + y


def norm_used_twice(s, x):
    y = s.b(torch.relu(s.a(x)))
    return torch.relu(y) + y


def sum_used_twice(s, x):
    y = s.b(torch.relu(s.a(x))) + s.c(x)
    return torch.relu(y) * y


def own_output(s, x):
    y = s.b(torch.relu(s.a(x)))
    return torch.relu(y + y)


def with_parameters(s, x):
    y = s.b(torch.relu(s.a(x) + s.gamma))
    if s.gamma is not None:
        y = y * s.gamma
    return torch.relu(y + s.c(x)) + (s.shift * s.frozen)[:, None, None]


def asks_for_its_parameter(s, x):
    y = s.first(x)
    if s.gamma is not None:
        y = y * s.gamma
    return torch.relu(s.norm1(y)) + torch.relu(s.c(x))


BLOCKS = {
    "module": (lambda s, x: s.relu(s.b(s.relu(s.a(x)))), {}, {"first", "second"}),
    "function": (lambda s, x: F.relu(s.b(F.relu(s.a(x), inplace=True))), {}, {"first", "second"}),
    "method": (lambda s, x: s.b(s.a(x).relu()).relu_(), {}, {"first", "second"}),
    "residual after": (residual_after, {}, {"first", "second"}),
    "residual before": (lambda s, x: (s.c(x) + s.b(s.relu(s.a(x)))).relu(), {}, None),
    "torch.add": (lambda s, x: torch.relu(torch.add(s.c(x).tanh(), s.b(s.relu(s.a(x))))), {}, {"first", "second"}),
    "scaled sum": (lambda s, x: torch.relu(torch.add(s.c(x), s.b(s.relu(s.a(x))), alpha=2)), {}, {"first"}),
    "into convolution": (into_convolution, {}, {"first", "second"}),
    "into residual": (into_residual_used_again, {}, {"first"}),
    "in place between": (in_place_between, {}, set()),
    "without result": (relu_without_result, {}, {"second"}),
    "number": (lambda s, x: torch.relu(s.b(torch.relu(s.a(x))) + 0.3), {}, {"first"}),
    "number of images": (lambda s, x: torch.relu(s.b(torch.relu(s.a(x))) + x.shape[0]), {}, None),
    "by channel": (lambda s, x: torch.relu(s.b(torch.relu(s.a(x))) + s.gamma), {}, None),
    "used twice": (used_twice, {}, {"first"}),
    "norm used twice": (norm_used_twice, {}, {"first"}),
    "sum used twice": (sum_used_twice, {}, {"first"}),
    "own output": (own_output, {}, {"first"}),
    "parameters": (with_parameters, {}, None),
    "asks": (asks_for_its_parameter, {}, {"short"}),
    "grouped": (lambda s, x: s.relu(s.b(s.relu(s.a(x)))), {"groups": 2}, {"first"}),
    "dilated": (lambda s, x: s.relu(s.b(s.relu(s.a(x)))), {"dilation": 2}, {"first"}),
    "same": (lambda s, x: s.relu(s.b(s.relu(s.a(x)))), {"padding": "same"}, {"first"}),
    "reflected": (lambda s, x: s.relu(s.b(s.relu(s.a(x)))), {"padding_mode": "reflect"}, {"first"}),
    "strided": (lambda s, x: s.relu(s.b(s.relu(s.a(x)))), {"stride": (2, 1), "padding": (0, 1)}, {"first", "second"}),
    "no relu": (lambda s, x: torch.sigmoid(s.b(torch.tanh(s.a(x)))), {}, set()),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_fusing_changes_nothing(name):
    how, options, expected = BLOCKS[name]
    posterior = MeanField(unsettled(Block(how, **options)))
    images = torch.rand(3, 3, 7, 9)
    found, whole, fused = fused_logits(posterior, images)
    assert agree(found, whole)
    folded, whole = logits(posterior, images)
    assert agree(folded, whole)
    if expected is not None:
        assert fused == expected


@pytest.mark.parametrize("kind", [Point, MeanField])
@pytest.mark.parametrize(
    ("network", "count"), [("resnet8", 7), ("resnet20", 19), ("timm/resnet18", 17)], ids=lambda value: str(value)
)
def test_known_networks_are_fused_and_stay_the_same(network, count, kind):
    inputs = networks.Inputs(4, (3, 16, 16), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    posterior = kind(unsettled(networks.build(network, inputs)))
    found, whole, fused = fused_logits(posterior, torch.rand(2, 3, 16, 16))
    assert agree(found, whole)
    assert len(fused) == count


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_whole(half):
    posterior = MeanField(unsettled(Block(residual_after)))
    images = torch.rand(3, 3, 8, 8)
    weights = posterior.eval().draw(Address(1))
    with torch.no_grad():
        found, whole = Folded(posterior, half)(images, weights.flat), posterior(images, weights)
    assert torch.allclose(found.float(), whole, atol=0.05 * float(whole.abs().max()))
    bare = MeanField(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))
    weights = bare.eval().draw(Address(1))
    with torch.no_grad():
        found, whole = Folded(bare, half)(images, weights.flat), bare(images, weights)
    assert Folded(bare, half).fused == frozenset()
    assert torch.allclose(found.float(), whole, atol=0.05 * float(whole.abs().max()))


def test_what_changes_after_the_first_use_is_seen():
    posterior = MeanField(unsettled(Block(with_parameters)))
    images = torch.rand(3, 3, 7, 7)
    before, _, _ = fused_logits(posterior, images)
    logits(posterior, images)
    with torch.no_grad():
        for tensor in posterior.state().values():
            if tensor.is_floating_point():
                tensor.mul_(1.3)
    found, whole, _ = fused_logits(posterior, images)
    assert agree(found, whole)
    assert agree(*logits(posterior, images))
    assert not torch.allclose(found, before, rtol=0.05)
    # Another home for every tensor, as after a journey to another device and back.
    posterior.double().float()
    with torch.no_grad():
        for tensor in posterior.state().values():
            if tensor.is_floating_point():
                tensor.mul_(0.8)
    again, whole, _ = fused_logits(posterior, images)
    assert agree(again, whole)
    assert agree(*logits(posterior, images))
    assert not torch.allclose(found, again, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_fused_networks_on_a_gpu_and_back(name):
    how, options, _ = BLOCKS[name]
    posterior = MeanField(unsettled(Block(how, **options)))
    images = torch.rand(3, 3, 7, 9)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        posterior.to(device).eval()
        weights = posterior.draw(Address(1))
        with torch.no_grad():
            whole = posterior(images.to(device), weights)
            found = Folded(posterior, torch.float16)(images.to(device), weights.flat)
            posterior.network.shift.mul_(1.5)
        assert torch.allclose(found.float(), whole, atol=0.02 * float(whole.abs().max()))


class Tokens(nn.Module):
    """A linear layer over (N, 5, 7) whose batch-norm goes over the 5."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(8, 7), nn.BatchNorm1d(5), nn.Linear(35, 3)

    def forward(self, x):
        return self.head(self.norm(self.linear(x[:, 0, :5])).flatten(1))


def test_batch_norm_over_another_axis_is_not_folded():
    posterior = MeanField(unsettled(Tokens()))
    assert agree(*logits(posterior, torch.rand(4, 3, 8, 8)))
    assert Folded(posterior).pairs == {}


class Frozen(nn.Module):
    def __init__(self, *frozen):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "frozen",
    [("norm.weight",), ("norm.weight", "norm.bias"), ("conv.bias",), ("conv.weight", "conv.bias"), ()],
    ids=str,
)
def test_frozen_parameters_are_not_forgotten(frozen, half):
    torch.manual_seed(0)
    network = unsettled(Frozen(*frozen))
    posterior, images = Point(network), torch.rand(5, 3, 6, 6)
    with torch.no_grad():
        found = Folded(posterior.eval(), half)(images, posterior.mean).float()
        expected = network(images)
    assert torch.allclose(found, expected, atol=1e-5 if half is None else 0.05 * float(expected.abs().max()))
    assert bool(Folded(posterior).pairs) == (not frozen)
