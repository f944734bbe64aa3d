"""Convert the images of a split to another number of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from peerbayes.data.splits import Split
from peerbayes.data.transforms.augment import LUMA

NUMBERS = 1 << 23  # numbers converted at a time


@dataclass(frozen=True, eq=False)
class Recoloured:
    """A split's images in another number of channels: grey ones as three equal channels, colours as their luma."""

    split: Split
    channels: Literal[1, 3]

    @property
    def labels(self) -> Tensor | None:
        """The split's labels."""
        return self.split.labels

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images and labels by index, see `Split`.

        Args:
            index: int64 (B,).
            device: where they are wanted.
        """
        if self.channels == 3:
            images, labels = self.split.batch(index, device)
            return images.expand(-1, 3, -1, -1).contiguous(), labels
        numel = self.split.batch(index[:1], device)[0].numel()
        grey, targets = [], []
        for part in index.split(max(1, NUMBERS // max(1, numel))):  # floats of three channels take much memory
            images, labels = self.split.batch(part, device)
            grey.append(_luma(images))
            targets.append(labels)
        return torch.cat(grey), torch.cat(targets)


def _luma(images: Tensor) -> Tensor:
    grey = (images.float() * images.new_tensor(LUMA, dtype=torch.float32).view(3, 1, 1)).sum(1, keepdim=True)
    return grey.to(images.dtype) if images.is_floating_point() else grey.round().to(torch.uint8)
