"""Define wide ResNets (Zagoruyko & Komodakis 2016) in the pre-activation form of paper 3, without dropout."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.networks.inputs import Inputs, Normalize, he_normal
from peerbayes.networks.registry import network


class PreActivationBlock(nn.Module):
    """Pre-activation block: bn-relu-conv-bn-relu-conv, plus the block's raw input.

    Where size or width change, the input passes a 1×1 convolution.

    Args:
        channels_in: channels of the input.
        channels: channels of both convolutions.
        stride: of the first convolution.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        same = (channels_in, stride) == (channels, 1)
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x), inplace=True))
        out = self.conv2(F.relu(self.bn2(out), inplace=True))
        total: Tensor = out + self.shortcut(x)
        return total


class WideResNet(nn.Module):
    """Wide ResNet: normalisation, a 3×3 stem, three stages, batch-norm and relu, global average pooling, a linear head.

    Args:
        inputs: classes, shape and channel statistics of the data.
        depth: 6 n + 4 for n blocks a stage.
        width: the stages have 16, 32 and 64 times this many channels.
    """

    def __init__(self, inputs: Inputs, depth: int, width: int) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.normalize = Normalize(inputs)
        self.conv = nn.Conv2d(inputs.shape[0], 16, 3, 1, 1, bias=False)
        self.stage1 = _stage(16, 16 * width, blocks, stride=1)
        self.stage2 = _stage(16 * width, 32 * width, blocks, stride=2)
        self.stage3 = _stage(32 * width, 64 * width, blocks, stride=2)
        self.bn = nn.BatchNorm2d(64 * width)
        self.linear = nn.Linear(64 * width, inputs.classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.conv(self.normalize(x)))))
        x = F.relu(self.bn(x), inplace=True)
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def _stage(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = PreActivationBlock(channels_in, channels, stride)
    return nn.Sequential(first, *(PreActivationBlock(channels, channels, 1) for _ in range(blocks - 1)))


@network
def wrn28x1(inputs: Inputs) -> nn.Module:
    """Return WRN-28-1 (0.37 M weights)."""
    return WideResNet(inputs, 28, 1)


@network
def wrn28x4(inputs: Inputs) -> nn.Module:
    """Return WRN-28-4 (5.9 M weights)."""
    return WideResNet(inputs, 28, 4)


@network
def wrn28x10(inputs: Inputs) -> nn.Module:
    """Return WRN-28-10 (36.5 M weights)."""
    return WideResNet(inputs, 28, 10)
