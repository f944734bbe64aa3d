"""Random crops of image files are of all that a file holds, and depend on nothing but their address."""

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import functional as vision
from torchvision.transforms.v2 import RandomResizedCrop

from peerbayes.data import ArraySplit, FolderSplit, augment, augmented_batch, feed, order
from peerbayes.data.transforms.augment import box, box_numbers
from peerbayes.math.noise import Address

CPU = torch.device("cpu")
HERE = Address(7, "data", "augment", 3)
WIDTH, HEIGHT = 500, 375


def boxes(address, count, height, width, first=0):
    return [box(row, height, width) for row in box_numbers(address, count, CPU, first).tolist()]


def photograph(width=WIDTH, height=HEIGHT):
    return Image.fromarray(load_sample_images().images[0]).resize((width, height))


def framed():
    """Black, with a white frame around the centre that is cut out at 32 of 37 pixels."""
    pixels = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    pixels[10:-10, 60:-60] = 0
    return Image.fromarray(pixels)


def split_of(folder, image, count=1, size=32, name="image.png"):
    """The same file so many times."""
    image.save(folder / name)
    return FolderSplit([str(folder / name)] * count, torch.arange(count) % 3, size, 256 / 224)


def test_crops_of_a_framed_image_show_the_frame_as_often_as_torchvisions(tmp_path):
    count = 400
    split = split_of(tmp_path, framed(), count)
    assert int(split.batch(torch.arange(1), CPU)[0].max()) == 0  # the centre has none of it
    cut, _ = augmented_batch(split, torch.arange(count), CPU, ["resized_crop", "flip"], HERE)
    ours = int((cut.amax((1, 2, 3)) > 0).sum())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        op, image = RandomResizedCrop(32, antialias=True), vision.pil_to_tensor(framed())
        theirs = sum(int(op(image).max()) > 0 for _ in range(count))
    assert theirs > 0.6 * count
    assert scipy.stats.fisher_exact([[ours, count - ours], [theirs, count - theirs]]).pvalue > 1e-3


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "grey.jpg", "palette.png", "alpha.png"])
def test_a_crop_is_the_box_of_the_original_resized_as_torchvision_does(tmp_path, name):
    kind = {"grey.jpg": "L", "palette.png": "P", "alpha.png": "RGBA"}.get(name, "RGB")
    split = split_of(tmp_path, photograph(250, 180).convert(kind), 12, 48, name)
    found, labels = split.crops(torch.arange(12), CPU, HERE)
    assert (found.dtype, tuple(found.shape), found.is_contiguous()) == (torch.uint8, (12, 3, 48, 48), True)
    assert torch.equal(labels, split.labels)
    original = Image.open(tmp_path / name).convert("RGB")
    for image, (top, left, tall, wide) in zip(found, boxes(HERE, 12, 180, 250)):
        expected = vision.pil_to_tensor(vision.resized_crop(original, top, left, tall, wide, [48, 48]))
        assert int((image.int() - expected.int()).abs().max()) <= 1


def test_every_image_has_a_box_for_its_own_sides(tmp_path):
    # Red says the column and green the row: the four corners of a crop tell its box.
    sides = [(40, 200), (200, 40), (120, 160), (64, 64)]
    for i, (height, width) in enumerate(sides):
        rows, columns = np.mgrid[:height, :width].astype(np.uint8)
        Image.fromarray(np.stack([columns, rows, rows], 2)).save(tmp_path / f"{i}.png")
    split = FolderSplit([str(tmp_path / f"{i}.png") for i in range(4)], None, 8)
    found, _ = split.crops(torch.tensor([2, 0, 3, 1]), CPU, HERE)
    numbers = box_numbers(HERE, 4, CPU).tolist()
    for image, row, which in zip(found.float(), numbers, (2, 0, 3, 1)):
        top, left, tall, wide = box(row, *sides[which])
        columns, rows = image[0].mean(0), image[1].mean(1)
        for line, begin, length in ((columns, left, wide), (rows, top, tall)):
            expected = begin + (torch.arange(8) + 0.5) / 8 * length - 0.5
            torch.testing.assert_close(line[1:-1], expected[1:-1], rtol=0, atol=1.01)


def crop_feed(split, batch_size, seed=11, **options):
    return feed(split, batch_size, seed, CPU, augment=["resized_crop", "flip"], **options)


def fetch(source, step):
    source.prepare(step)
    return [tensor.clone() for tensor in source.batch(step % source.steps_per_epoch)]


def test_a_feed_crops_files_at_the_address_of_the_step_wherever_it_begins(tmp_path):
    split = split_of(tmp_path, photograph(64, 48), 11, 16)
    source = crop_feed(split, 4)
    assert source.augmented == ("resized_crop",)
    seen = []
    for step in (0, 1, 2, 3, 7, 2, 0):  # as where a run is resumed
        index = order(11, Address(11, "data", "order", step // 2))[step % 2 * 4 :][:4]
        expected = split.crops(index, CPU, Address(11, "data", "augment", step).sub("resized_crop"))
        found = fetch(source, step)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        seen.append(found[0])
    assert torch.equal(seen[2], seen[5])
    assert not any(torch.equal(seen[0], other) for other in seen[1:5])
    source.close()
    for other in (crop_feed(split, 4, seed=12), crop_feed(split, 4, owner="data 1")):
        assert not torch.equal(fetch(other, 0)[0], seen[0])
        other.close()


@pytest.mark.parametrize("count", [2, 3])
def test_processes_that_share_a_batch_cut_what_one_would(tmp_path, count):
    split = split_of(tmp_path, photograph(64, 48), 13, 16)
    alone, parts = crop_feed(split, 6), [crop_feed(split, 6, part=(rank, count)) for rank in range(count)]
    for step in range(3):
        images, labels = (torch.cat(tensors) for tensors in zip(*(fetch(part, step) for part in parts)))
        expected = fetch(alone, step)
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])
    for source in (alone, *parts):
        source.close()


def test_arrays_are_cropped_where_they_are(tmp_path):
    images = torch.randint(0, 256, (6, 3, 12, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = ArraySplit(images, torch.arange(6))
    for placement in ("device", "stream"):
        source = crop_feed(split, 6, placement=placement)
        assert source.augmented == ()
        assert torch.equal(fetch(source, 0)[0], images[order(6, Address(11, "data", "order", 0))])
        source.close()
    found, _ = augmented_batch(split, torch.arange(6), CPU, ["resized_crop", "flip"], HERE, 2)
    assert torch.equal(found, augment(images, ["resized_crop", "flip"], HERE, 2))


def test_centres_are_what_they_were(tmp_path):
    split = split_of(tmp_path, photograph(), 1, 224, "a.jpg")
    found, _ = split.batch(torch.arange(1), CPU)
    expected = vision.center_crop(vision.resize(Image.open(tmp_path / "a.jpg"), 256), [224, 224])
    assert torch.equal(found[0], vision.pil_to_tensor(expected))
