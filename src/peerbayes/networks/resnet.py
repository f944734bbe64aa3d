"""Define ResNets for small images (He et al. 2016, section 4.2), with the three stages of paper 1 as submodules."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.networks.inputs import Inputs, Normalize
from peerbayes.networks.registry import network


class BasicBlock(nn.Module):
    """Basic block: conv-bn-relu-conv-bn, plus a parameter-free shortcut, then relu.

    The shortcut is option A: it subsamples, and pads channels with zeros.

    Args:
        channels_in: channels of the input.
        channels: channels of both convolutions.
        stride: of the first convolution.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.padding = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.stride != 1 or self.padding:
            before = self.padding // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, before, self.padding - before))
        return F.relu(out + x, inplace=True)


class ResNet(nn.Module):
    """ResNet: normalisation, a 3×3 stem, three stages of basic blocks, global average pooling, a linear head.

    Args:
        inputs: classes, shape and channel statistics of the data.
        blocks: basic blocks a stage: 3, 5 and 9 give ResNet-20, -32 and -56.
        widths: channels of the three stages.
    """

    def __init__(self, inputs: Inputs, blocks: int, widths: tuple[int, int, int] = (16, 32, 64)) -> None:
        super().__init__()
        self.normalize = Normalize(inputs)
        self.conv = nn.Conv2d(inputs.shape[0], widths[0], 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        self.stage1 = self._stage(widths[0], widths[0], blocks, stride=1)
        self.stage2 = self._stage(widths[0], widths[1], blocks, stride=2)
        self.stage3 = self._stage(widths[1], widths[2], blocks, stride=2)
        self.linear = nn.Linear(widths[2], inputs.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    @staticmethod
    def _stage(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(channels_in, channels, stride)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(self.normalize(x))), inplace=True)
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


@network
def resnet8(inputs: Inputs) -> nn.Module:
    """Return a ResNet with one block a stage and 8/16/32 channels (0.02 M weights), for 8×8 and 28×28 images."""
    return ResNet(inputs, blocks=1, widths=(8, 16, 32))


@network
def resnet20(inputs: Inputs) -> nn.Module:
    """Return CIFAR ResNet-20 (0.27 M weights)."""
    return ResNet(inputs, blocks=3)


@network
def resnet32(inputs: Inputs) -> nn.Module:
    """Return CIFAR ResNet-32 (0.46 M weights)."""
    return ResNet(inputs, blocks=5)


@network
def resnet56(inputs: Inputs) -> nn.Module:
    """Return CIFAR ResNet-56 (0.85 M weights)."""
    return ResNet(inputs, blocks=9)
