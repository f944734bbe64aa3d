"""Define GoogLeNet (Szegedy et al. 2015) with batch-norm and a stem for small images, as in paper 2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peerbayes.networks.inputs import Inputs, Normalize, he_normal
from peerbayes.networks.registry import network


def _conv(channels_in: int, channels: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


class Inception(nn.Module):
    """Four parallel branches: 1×1; 1×1 and 3×3; 1×1 and two 3×3 (for the 5×5); 3×3 max pooling and 1×1.

    Args:
        channels_in: channels of the input.
        one: channels of the first branch.
        three: channels of the second branch after each of its convolutions.
        five: channels of the third branch after its first convolution, and after the others.
        pooled: channels of the fourth branch.
    """

    def __init__(
        self, channels_in: int, pointwise: int, three: tuple[int, int], five: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.one = _conv(channels_in, pointwise, 1)
        self.three = nn.Sequential(_conv(channels_in, three[0], 1), _conv(three[0], three[1], 3))
        self.five = nn.Sequential(
            _conv(channels_in, five[0], 1), _conv(five[0], five[1], 3), _conv(five[1], five[1], 3)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(channels_in, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class GoogLeNet(nn.Module):
    """GoogLeNet: normalisation, three 3×3 convolutions, three stages that begin with pooling, dropout, a linear head.

    Nine inception blocks of the paper's widths; no auxiliary classifiers. Convolutions have no bias: the batch-norm
    after each takes it away again.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.normalize = Normalize(inputs)
        self.stem = nn.Sequential(_conv(inputs.shape[0], 64, 3), _conv(64, 64, 3), _conv(64, 192, 3))
        self.stage1 = nn.Sequential(
            nn.MaxPool2d(3, 2, 1),
            Inception(192, 64, (96, 128), (16, 32), 32),
            Inception(256, 128, (128, 192), (32, 96), 64),
        )
        self.stage2 = nn.Sequential(
            nn.MaxPool2d(3, 2, 1),
            Inception(480, 192, (96, 208), (16, 48), 64),
            Inception(512, 160, (112, 224), (24, 64), 64),
            Inception(512, 128, (128, 256), (24, 64), 64),
            Inception(512, 112, (144, 288), (32, 64), 64),
            Inception(528, 256, (160, 320), (32, 128), 128),
        )
        self.stage3 = nn.Sequential(
            nn.MaxPool2d(3, 2, 1),
            Inception(832, 256, (160, 320), (32, 128), 128),
            Inception(832, 384, (192, 384), (48, 128), 128),
        )
        self.dropout = nn.Dropout(0.4)
        self.linear = nn.Linear(1024, inputs.classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(self.normalize(x)))))
        logits: Tensor = self.linear(self.dropout(x.mean((2, 3))))
        return logits


@network
def googlenet(inputs: Inputs) -> nn.Module:
    """Return GoogLeNet with a stem for small images (6.4 M weights)."""
    return GoogLeNet(inputs)
