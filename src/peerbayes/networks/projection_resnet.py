"""Define ResNets of ImageNet's shape (He et al. 2016, section 4.1) with a 3×3 stem for small images: papers 2, 3 and 4.

With ImageNet's own stem (7×7 at stride 2, then pooling) they are ``timm/resnet18`` and so on.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.networks.inputs import Inputs, Normalize, he_normal
from peerbayes.networks.registry import network


class Projection(nn.Module):
    """Shortcut where size or width change (option B): a 1×1 convolution and batch-norm.

    Args:
        channels_in: channels of the input.
        channels: channels of the result.
        stride: of the convolution.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(x))
        return out


def _shortcut(channels_in: int, channels: int, stride: int) -> nn.Module:
    return nn.Identity() if (channels_in, stride) == (channels, 1) else Projection(channels_in, channels, stride)


class Basic(nn.Module):
    """Basic block: conv-bn-relu-conv-bn, plus the shortcut, then relu.

    Args:
        channels_in: channels of the input.
        width: channels of both convolutions and of the result.
        stride: of the first convolution.
    """

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """Bottleneck block: 1×1, 3×3 and 1×1 convolutions, each with batch-norm, plus the shortcut, then relu.

    Args:
        channels_in: channels of the input.
        width: channels of the first two convolutions; the result has four times as many.
        stride: of the 3×3 convolution.
    """

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(channels_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x), inplace=True)


class ProjectionResNet(nn.Module):
    """ResNet: normalisation, a 3×3 stem without pooling, four stages, global average pooling, a linear head.

    Args:
        inputs: classes, shape and channel statistics of the data.
        block: `Basic` or `Bottleneck`.
        blocks: blocks of the four stages, of width 64, 128, 256 and 512.
    """

    def __init__(
        self, inputs: Inputs, block: type[Basic] | type[Bottleneck], blocks: tuple[int, int, int, int]
    ) -> None:
        super().__init__()
        self.normalize = Normalize(inputs)
        self.conv = nn.Conv2d(inputs.shape[0], 64, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(64)
        e = block.expansion
        self.stage1 = _stage(block, 64, 64, blocks[0], stride=1)
        self.stage2 = _stage(block, 64 * e, 128, blocks[1], stride=2)
        self.stage3 = _stage(block, 128 * e, 256, blocks[2], stride=2)
        self.stage4 = _stage(block, 256 * e, 512, blocks[3], stride=2)
        self.linear = nn.Linear(512 * e, inputs.classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(self.normalize(x))), inplace=True)
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def _stage(
    block: type[Basic] | type[Bottleneck], channels_in: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    later = (block(width * block.expansion, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(block(channels_in, width, stride), *later)


@network
def resnet18(inputs: Inputs) -> nn.Module:
    """Return ResNet-18 with a stem for small images (11.2 M weights)."""
    return ProjectionResNet(inputs, Basic, (2, 2, 2, 2))


@network
def resnet34(inputs: Inputs) -> nn.Module:
    """Return ResNet-34 with a stem for small images (21.3 M weights)."""
    return ProjectionResNet(inputs, Basic, (3, 4, 6, 3))


@network
def resnet50(inputs: Inputs) -> nn.Module:
    """Return ResNet-50 with a stem for small images (23.7 M weights)."""
    return ProjectionResNet(inputs, Bottleneck, (3, 4, 6, 3))


@network
def resnet101(inputs: Inputs) -> nn.Module:
    """Return ResNet-101 with a stem for small images (42.7 M weights)."""
    return ProjectionResNet(inputs, Bottleneck, (3, 4, 23, 3))
