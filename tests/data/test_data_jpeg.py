"""What a JPEG file keeps, against Pillow."""

import io

import numpy as np
import pytest
import torch
from photographs import photographs
from PIL import Image

from peerbayes.data.transforms.jpeg import jpeg
from peerbayes.errors import InputError


@pytest.mark.parametrize("quality", [80, 50, 40, 20])
@pytest.mark.parametrize("side", [32, 48])
@pytest.mark.parametrize("channels", [3, 1])
def test_jpeg_is_close_to_pillow(quality, side, channels):
    images = photographs(10, side)[:, :channels]
    ours = jpeg(images.float() / 255, quality) * 255
    off, lost = [], []
    for image, result in zip(images, ours):
        file = io.BytesIO()
        pixels = image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels if channels == 3 else pixels[..., 0]).save(file, "JPEG", quality=quality)
        decoded = torch.from_numpy(np.array(Image.open(file))).view(side, side, channels).permute(2, 0, 1).float()
        off.append((result - decoded).abs().mean())
        lost.append((image.float() - decoded).abs().mean())
    assert torch.stack(off).mean() < 0.6  # of 255
    assert torch.stack(off).mean() < 0.15 * torch.stack(lost).mean()


def test_a_quality_that_there_is_not_is_told():
    with pytest.raises(InputError, match="quality is 0: expected 1 to 100"):
        jpeg(torch.full((1, 3, 8, 8), 0.5), 0)
