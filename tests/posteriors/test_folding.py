import gc
import weakref

import pytest
import timm
import torch
from torch import nn

from peerbayes import networks
from peerbayes.noise import Address
from peerbayes.posteriors import MeanField, Point
from peerbayes.posteriors.folding import Folded


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
        (plain(), 3),
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
