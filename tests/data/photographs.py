"""Small photographs, for tests."""

import torch
from sklearn.datasets import load_sample_images


def photographs(count, side=32):
    """Parts of two photographs, shrunk."""
    generator, found = torch.Generator().manual_seed(0), []
    for k in range(count):
        whole = torch.from_numpy(load_sample_images().images[k % 2].copy()).permute(2, 0, 1)[None].float()
        top, left = (int(torch.randint(0, size - 128, (1,), generator=generator)) for size in whole.shape[-2:])
        part = whole[..., top : top + 128, left : left + 128]
        found.append(torch.nn.functional.interpolate(part, size=(side, side), mode="area"))
    return torch.cat(found).round().to(torch.uint8)
