"""Batch-norm's statistics, estimated anew: those of the batches, and nothing else changes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import RandomResizedCrop

from members import images
from peerbayes.data import ArraySplit, FolderSplit
from peerbayes.errors import InputError
from peerbayes.inference.batch_norm import recalibrate


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.drop = nn.Dropout(0.5)
        self.after = nn.BatchNorm2d(2)

    def forward(self, x):
        return self.after(self.drop(self.norm(x)))


def test_recalibration_averages_the_statistics_of_the_batches_and_changes_nothing_else():
    network = Normed().train()
    network.norm.eval()
    network(images(seed=5))
    weights = [p.clone() for p in network.parameters()]
    x = images(24)
    parts = x.split(10)
    expected_mean = torch.stack([part.mean((0, 2, 3)) for part in parts]).mean(0)
    expected_var = torch.stack([part.transpose(0, 1).flatten(1).var(1) for part in parts]).mean(0)
    found = []
    for batches in (parts, [(part, None) for part in parts]):
        assert recalibrate(network, batches) is network
        torch.testing.assert_close(network.norm.running_mean, expected_mean)
        torch.testing.assert_close(network.norm.running_var, expected_var)
        found.append(network.after.running_var.clone())
    torch.testing.assert_close(found[0], torch.ones(2), rtol=0.02, atol=0)  # of normalised channels: nothing is dropped
    assert torch.equal(found[0], found[1])
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), weights, strict=True))
    assert (network.training, network.norm.training, network.after.training) == (True, False, True)
    assert network.norm.momentum == 0.1


def test_recalibration_of_one_layer_by_one_batch_takes_its_moments():
    norm, x = nn.BatchNorm2d(2), images()
    recalibrate(norm, [x])
    torch.testing.assert_close(norm.running_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, x.transpose(0, 1).flatten(1).var(1))


def test_recalibration_mixes_a_split_that_is_stored_class_by_class():
    network, labels = Normed(), torch.arange(4).repeat_interleave(50)
    x = 0.1 * images(200) + labels.view(-1, 1, 1, 1)
    recalibrate(network, ArraySplit(x / 4, labels), batch_size=50)
    whole = (x / 4).transpose(0, 1).flatten(1).var(1)
    torch.testing.assert_close(network.norm.running_var, whole, rtol=0.1, atol=0)
    torch.testing.assert_close(network.norm.running_mean, (x / 4).mean((0, 2, 3)))


def test_recalibration_takes_the_statistics_of_crops():
    x = 0.5 + 0.5 * images(400, seed=3).abs().clamp(max=1)  # bright: black borders show
    network, split = Normed(), ArraySplit(x, torch.zeros(400, dtype=torch.int64))
    recalibrate(network, split, batch_size=100, augment=["crop", "flip"])
    torch.manual_seed(0)
    size, moved = x.shape[-1], []
    for image in F.pad(x, (1, 1, 1, 1)):  # by one pixel, as they are small
        top, left = torch.randint(3, (2,)).tolist()
        moved.append(image[:, top : top + size, left : left + size])
    crops = torch.stack(moved).transpose(0, 1).flatten(1)
    torch.testing.assert_close(network.norm.running_mean, crops.mean(1), rtol=0.05, atol=0)
    torch.testing.assert_close(network.norm.running_var, crops.var(1), rtol=0.05, atol=0)
    assert (network.norm.running_mean < 0.9 * x.mean()).all()


def test_recalibration_crops_files_as_training_does(tmp_path):
    pixels = np.full((60, 80, 3), 255, np.uint8)
    pixels[4:-4, 4:-4] = 0  # a frame, which no centre shows
    Image.fromarray(pixels).save(tmp_path / "framed.png")
    split, means = FolderSplit([str(tmp_path / "framed.png")] * 200, torch.zeros(200, dtype=torch.int64), 16, 1.25), []
    for names in ([], ["resized_crop"]):
        norm = nn.BatchNorm2d(3)
        recalibrate(norm, split, batch_size=100, augment=names)
        means.append(float(norm.running_mean.mean()))
    assert means[0] == 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        op, image = RandomResizedCrop(16, antialias=True), torch.from_numpy(pixels).permute(2, 0, 1)
        expected = torch.stack([op(image) for _ in range(600)]).float().div(255).mean()
    assert means[1] == pytest.approx(float(expected), rel=0.15)


def test_recalibration_that_fails_leaves_the_statistics_as_they_were():
    network = Normed()
    network(images())
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    with pytest.raises(InputError, match="no batches"):
        recalibrate(network, [])
    with pytest.raises(RuntimeError):
        recalibrate(network, [images(), torch.rand(2, 3, 4, 4)])
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())
    assert network.norm.momentum == 0.1
    bare = nn.Linear(2, 2)
    assert recalibrate(bare, []) is bare
