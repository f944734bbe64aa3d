"""Define VGG-16 with batch-norm (Simonyan & Zisserman 2015, configuration D) for small images, as in paper 2."""

from __future__ import annotations

from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.networks.inputs import Inputs, Normalize, he_normal
from peerbayes.networks.registry import network


class VGG(nn.Module):
    """VGG-16: normalisation, 13 convolutions in five stages with 2×2 max pooling, global averages, a classifier.

    Convolutions have no bias: the batch-norm after each takes it away again.

    Args:
        inputs: classes, shape and channel statistics of the data; 32×32 pixels at least.
        hidden: units of the classifier's hidden layers, each with relu and dropout of one half.
    """

    def __init__(self, inputs: Inputs, hidden: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.normalize = Normalize(inputs)
        height, width = inputs.shape[1:]
        if min(height, width) < 32:
            raise InputError(
                f"VGG-16 halves images five times, so it needs 32×32 pixels at least, not {height}×{width}"
            )
        self.stage1 = _stage(inputs.shape[0], 64, 2)
        self.stage2 = _stage(64, 128, 2)
        self.stage3 = _stage(128, 256, 3)
        self.stage4 = _stage(256, 512, 3)
        self.stage5 = _stage(512, 512, 3)
        sizes = [512, *hidden]
        layers = [(nn.Linear(a, b), nn.ReLU(inplace=True), nn.Dropout(0.5)) for a, b in zip(sizes, hidden)]
        self.hidden = nn.Sequential(*(module for layer in layers for module in layer))
        self.linear = nn.Linear(sizes[-1], inputs.classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.normalize(x))))
        x = self.stage5(self.stage4(x))
        logits: Tensor = self.linear(self.hidden(x.mean((2, 3))))
        return logits


def _stage(channels_in: int, channels: int, convolutions: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for i in range(convolutions):
        modules.append(nn.Conv2d(channels if i else channels_in, channels, 3, 1, 1, bias=False))
        modules += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*modules, nn.MaxPool2d(2))


@network
def vgg16_bn(inputs: Inputs) -> nn.Module:
    """Return VGG-16 with batch-norm and two hidden layers of 4096 units with dropout, as in paper 2 (34 M weights)."""
    return VGG(inputs, (4096, 4096))


@network
def vgg16_bn_linear(inputs: Inputs) -> nn.Module:
    """Return VGG-16 with batch-norm and a linear classifier, without dropout (14.7 M weights)."""
    return VGG(inputs)
