import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from torchvision.transforms import functional as vision
from torchvision.transforms.v2 import RandomResizedCrop

from peerbayes.data import AUGMENTATIONS, augment, to_unit
from peerbayes.data.transforms.augment import (
    RATIO,
    SCALE,
    _boxes,
    box,
    box_numbers,
    color_jitter,
    crop,
    flip,
    reflect_crop,
    resized_crop,
    rotate,
)
from peerbayes.errors import InputError
from peerbayes.math import noise

ADDRESS = noise.Address(7, "data", "augment", 3)


def numbered(count, channels, height, width):
    """Images in which every pixel of an image is different and none is zero."""
    values = torch.arange(1, count * channels * height * width + 1)
    return values.view(count, channels, height, width)


def smooth(count, side):
    grid = torch.linspace(0, 3, side)
    wave = torch.sin(grid[:, None] * 1.3 + 0.4) * torch.cos(grid[None, :] * 0.9) * 0.4 + 0.5
    return torch.stack([wave * (0.5 + 0.5 * (i + 1) / count) for i in range(count)])[:, None]


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 5),
    height=st.integers(6, 12),
    width=st.integers(6, 12),
    padding=st.integers(0, 4),
    reflect=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_crop_is_one_window_of_the_padded_image(count, height, width, padding, reflect, seed):
    images = numbered(count, 2, height, width)
    cut = (reflect_crop if reflect else crop)(images, noise.Address(seed), padding)
    mode = "reflect" if reflect else "constant"
    pads = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    padded = np.pad(images.numpy(), pads, mode=mode)
    for image, result in zip(padded, cut.numpy()):
        windows = [
            image[:, top : top + height, left : left + width]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        ]
        assert any(np.array_equal(window, result) for window in windows)


def test_crop_offsets_are_uniform_and_independent_in_both_directions():
    images = numbered(1, 1, 32, 32).expand(20000, 1, 32, 32)
    middle = crop(images, ADDRESS)[:, 0, 16, 16] - 1
    rows, columns = middle // 32 - 12, middle % 32 - 12
    table = torch.bincount(rows * 9 + columns, minlength=81)
    assert table.numel() == 81
    assert scipy.stats.chisquare(table.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(("side", "padding"), [(32, 4), (28, 4), (27, 3), (16, 2), (8, 1), (5, 1)])
def test_default_padding_follows_the_size(side, padding):
    images = numbered(1, 1, side, side).expand(500, 1, side, side)
    blank_rows = (crop(images, ADDRESS) == 0).all(dim=3).sum(dim=2)
    assert int(blank_rows.max()) == padding


def test_flip_mirrors_half_of_the_images_exactly():
    images = numbered(1, 2, 3, 5).expand(20000, 2, 3, 5)
    result = flip(images, ADDRESS)
    same = (result == images).flatten(1).all(dim=1)
    mirrored = (result == torch.from_numpy(images.numpy()[..., ::-1].copy())).flatten(1).all(dim=1)
    assert bool((same ^ mirrored).all())
    assert scipy.stats.binomtest(int(mirrored.sum()), 20000, 0.5).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float32, torch.bfloat16])
def test_pixel_moves_keep_the_dtype_and_the_values(dtype):
    images = (numbered(6, 1, 8, 8) % 7).to(dtype)
    moved = augment(images, ["crop", "flip"], ADDRESS)
    reference = augment(images.double(), ["crop", "flip"], ADDRESS)
    assert moved.dtype == dtype
    assert torch.equal(moved.double(), reference)


def angles(count, degrees):
    return (noise.uniform(ADDRESS, count) * 2 - 1) * degrees


@pytest.mark.parametrize("shape", [(24, 24), (24, 18)])
def test_rotation_agrees_with_torchvision(shape):
    images = smooth(12, 24)[..., : shape[1]]
    result = rotate(images, ADDRESS)
    for image, rotated, angle in zip(images, result, angles(12, 15.0)):
        expected = vision.rotate(image, float(angle), vision.InterpolationMode.BILINEAR)
        inner = (slice(None), slice(5, -5), slice(5, -5))
        torch.testing.assert_close(rotated[inner], expected[inner], atol=1e-4, rtol=0)


def test_rotation_agrees_with_scipy_and_fills_with_zeros():
    image = smooth(1, 24)
    rotated = rotate(image, ADDRESS, degrees=90.0)[0, 0].numpy()
    angle = float(angles(1, 90.0))
    expected = scipy.ndimage.rotate(image[0, 0].numpy(), angle, reshape=False, order=1)
    where = scipy.ndimage.rotate(np.ones((24, 24)), angle, reshape=False, order=0)
    inside = scipy.ndimage.binary_erosion(where > 0.5, iterations=2)
    outside = ~scipy.ndimage.binary_dilation(where > 0.5, iterations=2)
    assert abs(angle) > 10
    assert outside.any()
    np.testing.assert_allclose(rotated[inside], expected[inside], atol=1e-4)
    assert (rotated[outside] == 0).all()


def test_rotation_angles_are_uniform_up_to_fifteen_degrees():
    count = 2000
    pair = torch.zeros(count, 1, 65, 65)
    pair[:, :, 32, 57:60] = 1.0  # a short bar far from the centre shows the angle
    rotated = rotate(pair, ADDRESS)[:, 0]
    y, x = torch.meshgrid(torch.arange(65.0) - 32, torch.arange(65.0) - 32, indexing="ij")
    weight = rotated.sum((1, 2))
    found = torch.atan2((rotated * y).sum((1, 2)) / weight, (rotated * x).sum((1, 2)) / weight)
    degrees = torch.rad2deg(found).numpy()
    assert scipy.stats.kstest(degrees, "uniform", args=(-15, 30)).pvalue > 1e-3


def test_resized_crop_agrees_with_torchvision_box_by_box():
    images = torch.rand(30, 3, 20, 26, generator=torch.Generator().manual_seed(0))
    result = resized_crop(images, ADDRESS)
    boxes = _boxes(ADDRESS, 0, 30, 20, 26, (0.08, 1.0), (3 / 4, 4 / 3), torch.device("cpu"))
    for image, cut, top, left, tall, wide in zip(images, result, *(b.int().tolist() for b in boxes)):
        expected = vision.resized_crop(image, top, left, tall, wide, [20, 26], antialias=False)
        torch.testing.assert_close(cut, expected, atol=2e-5, rtol=0)


def host_boxes(count, height, width):
    rows = box_numbers(ADDRESS, count, torch.device("cpu")).tolist()
    return torch.tensor([box(row, height, width) for row in rows]).float().unbind(1)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(("height", "width"), [(200, 240), (375, 500), (60, 500), (500, 90)])
def test_resized_crop_boxes_have_the_law_of_torchvision(height, width, where):
    count, law = 3000, ((0.08, 1.0), (3 / 4, 4 / 3))
    device = torch.device("cpu")
    ours = host_boxes(count, height, width)
    if where == "device":
        ours = _boxes(ADDRESS, 0, count, height, width, *law, device)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        op, blank = RandomResizedCrop(32), torch.zeros(1, height, width)
        drawn = [op.make_params([blank]) for _ in range(count)]
    theirs = torch.tensor([[params[key] for key in ("top", "left", "height", "width")] for params in drawn]).float()
    for mine, other in zip(ours, theirs.unbind(1)):
        assert scipy.stats.ks_2samp(mine.numpy(), other.numpy()).pvalue > 1e-3
    top, left, tall, wide = ours
    assert bool(((top >= 0) & (left >= 0) & (top + tall <= height) & (left + wide <= width)).all())
    # Ten candidates in vain: one box in the middle, as often as theirs.
    with torch.random.fork_rng():
        in_vain = RandomResizedCrop(32, scale=(2.0, 2.0)).make_params([blank])
    middle = torch.tensor([in_vain[key] for key in ("top", "left", "height", "width")]).float()
    mine, other = (int((found == middle).all(1).sum()) for found in (torch.stack(ours, 1), theirs))
    assert (other > 300) == (max(height, width) == 500 > 4 * min(height, width))
    if other:
        assert scipy.stats.fisher_exact([[mine, count - mine], [other, count - other]]).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(200, 240), (60, 500), (1, 300), (3, 2)])
def test_boxes_on_the_host_are_those_on_the_device(height, width):
    device = torch.stack(_boxes(ADDRESS, 0, 2000, height, width, SCALE, RATIO, torch.device("cpu")), 1)
    same = (device == torch.stack(host_boxes(2000, height, width), 1)).all(1)
    assert float(same.float().mean()) > 0.995  # float32 rounds a few the other way


def test_resized_crop_falls_back_to_the_whole_image_and_takes_a_size():
    images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(resized_crop(images, ADDRESS, ratio=(50.0, 60.0), scale=(0.9, 1.0)), images)
    half = resized_crop(images, ADDRESS, ratio=(50.0, 60.0), scale=(0.9, 1.0), size=8)
    torch.testing.assert_close(half, torch.nn.functional.avg_pool2d(images, 2))


JITTER = ("brightness", "contrast", "saturation", "hue")


def coloured(count, side=6, seed=3):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def only(name, spread):
    return {key: spread if key == name else 0.0 for key in JITTER}


def jitter_factors(name, count, spread):
    """The factor of each image, or the turn of its hue."""
    return (noise.uniform(ADDRESS.sub(name), count) * 2 - 1) * spread + (name != "hue")


@pytest.mark.parametrize(("name", "spread"), list(zip(JITTER, (0.9, 0.9, 1.0, 0.5))))
def test_each_change_of_colour_is_that_of_torchvision(name, spread):
    images = coloured(40)
    images[0], images[1] = 0.0, images[1, :1]  # black, and grey
    change = getattr(vision, f"adjust_{name}")
    found = color_jitter(images, ADDRESS, **only(name, spread))
    for image, result, factor in zip(images, found, jitter_factors(name, 40, spread)):
        # They weigh red by 0.2989, we by 0.299.
        torch.testing.assert_close(result, change(image, float(factor)), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", JITTER[:3])
def test_changes_of_bytes_are_those_of_pillow(name):
    images = (coloured(20) * 255).to(torch.uint8)
    enhance = dict(zip(JITTER, (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)))
    found = color_jitter(images, ADDRESS, **only(name, 0.6))
    assert found.dtype == torch.uint8
    for image, result, factor in zip(images, found, jitter_factors(name, 20, 0.6)):
        expected = enhance[name](Image.fromarray(image.permute(1, 2, 0).numpy())).enhance(float(factor))
        difference = np.asarray(expected).astype(int) - result.permute(1, 2, 0).numpy().astype(int)
        assert np.abs(difference).max() <= 1  # it cuts digits off, we round


def test_changes_of_colour_come_in_every_order():
    count = 150
    images = coloured(count)
    found = color_jitter(images, ADDRESS)
    factors = [jitter_factors(name, count, 0.1 if name == "hue" else 0.4).tolist() for name in JITTER]
    orders = noise.bits(ADDRESS.sub("order"), 4 * count).view(count, 4).argsort(1).tolist()

    def changed(i, order):
        image = images[i]
        for k in order:
            image = getattr(vision, f"adjust_{JITTER[k]}")(image, factors[k][i])
        return image

    expected = torch.stack([changed(i, order) for i, order in enumerate(orders)])
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-4)
    assert len({tuple(order) for order in orders}) == 24
    backwards = torch.stack([changed(i, order[::-1]) for i, order in enumerate(orders)])
    assert int(((backwards - found).abs().amax((1, 2, 3)) > 5e-3).sum()) > 0.9 * count


def test_orders_of_colour_are_equally_likely():
    # What is clipped by the first of two changes is lost to the second.
    count = 4000
    images = torch.tensor([0.9, 0.5]).view(1, 1, 1, 2).expand(count, -1, -1, -1)
    found = color_jitter(images, ADDRESS, 1.0, 1.0, 0.0, 0.0)[:, 0, 0]
    bright, contrast = (jitter_factors(name, count, 1.0)[:, None] for name in JITTER[:2])

    def contrasted(x):
        return (x.mean(1, keepdim=True) + (x - x.mean(1, keepdim=True)) * contrast).clamp(0, 1)

    before = contrasted((images[:, 0, 0] * bright).clamp(0, 1))
    after = (contrasted(images[:, 0, 0]) * bright).clamp(0, 1)
    shows = (before - after).abs().amax(1) > 1e-3
    first, last = ((found - x).abs().amax(1)[shows] < 1e-5 for x in (before, after))
    assert bool((first ^ last).all())
    assert int(shows.sum()) > 1000
    assert scipy.stats.binomtest(int(first.sum()), int(shows.sum()), 0.5).pvalue > 1e-3


def test_factors_of_colour_are_uniform_and_do_not_depend_on_one_another():
    count = 3000
    images = torch.full((count, 3, 1, 1), 0.5)
    bright = (color_jitter(images, ADDRESS, **only("brightness", 0.4)) / images)[:, 0, 0, 0]
    assert scipy.stats.kstest(bright.numpy(), "uniform", args=(0.6, 0.8)).pvalue > 1e-3
    images = torch.tensor([0.6, 0.4, 0.4]).view(1, 3, 1, 1).expand(count, -1, -1, -1)
    vivid = color_jitter(images, ADDRESS, **only("saturation", 0.4))
    vivid = (vivid[:, 0] - vivid[:, 1]).flatten() / 0.2
    assert scipy.stats.kstest(vivid.numpy(), "uniform", args=(0.6, 0.8)).pvalue > 1e-3
    assert scipy.stats.pearsonr(bright.numpy(), vivid.numpy()).pvalue > 1e-3


def test_grey_images_keep_their_hue_and_saturation():
    grey = coloured(30)[:, :1]
    colours = grey.expand(-1, 3, -1, -1)
    torch.testing.assert_close(color_jitter(grey, ADDRESS).expand(-1, 3, -1, -1), color_jitter(colours, ADDRESS))
    assert torch.equal(color_jitter(grey, ADDRESS, 0, 0), grey)
    with pytest.raises(InputError, match="'color_jitter' is for RGB or grey images, got 4 channels"):
        augment(torch.zeros(2, 4, 8, 8), ["color_jitter"], ADDRESS)


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_same_address_same_images_and_another_differs(name):
    images = (torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 255).to(torch.uint8)
    first = augment(images, [name], ADDRESS)
    assert first.dtype == torch.uint8
    assert torch.equal(first, augment(images, [name], ADDRESS.at(torch.tensor(3))))
    assert not torch.equal(first, augment(images, [name], ADDRESS.at(4)))
    assert not torch.equal(first, augment(images, [name], noise.Address(8, "data", "augment", 3)))
    # An image's numbers do not depend on how many come with it.
    assert torch.equal(first[:5], augment(images[:5], [name], ADDRESS))


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_no_value_is_read_back_to_the_host(name):
    # A tensor on the meta device has no values: any read would raise.
    images = torch.empty(4, 3, 32, 32, device="meta", dtype=torch.uint8)
    number = torch.zeros((), dtype=torch.int64, device="meta")
    assert augment(images, [name], ADDRESS.at(number)).shape == images.shape


def test_each_augmentation_has_its_own_noise():
    images = numbered(8, 1, 32, 32)
    expected = flip(crop(images, ADDRESS.sub("crop")), ADDRESS.sub("flip"))
    assert torch.equal(augment(images, ("crop", "flip"), ADDRESS), expected)
    assert torch.equal(augment(images, (), ADDRESS), images)


def test_uint8_results_are_the_rounded_float_results():
    images = (torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(2)) * 255).to(torch.uint8)
    for name in ("rotate", "resized_crop"):
        exact = augment(images.float(), [name], ADDRESS)
        assert torch.equal(augment(images, [name], ADDRESS).float(), exact.round())


def test_to_unit():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    expected = np.arange(256, dtype=np.float32) / np.float32(255)
    np.testing.assert_array_equal(to_unit(images).flatten().numpy(), expected)
    floats = torch.rand(2, 1, 3, 3)
    assert to_unit(floats) is floats


def test_bad_names_and_sizes_are_told():
    images = torch.zeros(1, 1, 8, 8)
    with pytest.raises(InputError, match="unknown augmentation 'flop'; did you mean 'flip'"):
        augment(images, ["crop", "flop"], ADDRESS)
    with pytest.raises(InputError, match="padding 8 needs images larger"):
        reflect_crop(images, ADDRESS, padding=8)
