"""Corruptions: against scipy and closed forms; addresses."""

import math

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from photographs import photographs

from peerbayes import noise
from peerbayes.data.corruptions import COMMON, CORRUPTIONS, corrupt
from peerbayes.errors import InputError

ADDRESS = noise.Address(7, "data", "corrupt", 3)
GREY = torch.full((40, 3, 32, 32), 0.5)


@pytest.fixture(scope="module")
def images():
    return photographs(24)


def change(images, name, severity):
    return ((corrupt(images, name, severity, ADDRESS).float() - images.float()) / 255).square().mean().item()


# ---- what all corruptions have in common ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CORRUPTIONS))
def test_distortion_grows_with_severity(images, name):
    found = [change(images, name, severity) for severity in range(1, 6)]
    assert found == sorted(found)
    assert len(set(found)) == 5
    assert found[0] > 1e-5
    assert found[-1] < 0.06


@pytest.mark.parametrize("name", sorted(CORRUPTIONS))
def test_same_address_same_images(images, name):
    whole = corrupt(images, name, 3, ADDRESS)
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, corrupt(images, name, 3, ADDRESS.at(torch.tensor(3))))
    # An image's noise does not depend on how many come with it.
    parts = [corrupt(images[:5], name, 3, ADDRESS), corrupt(images[5:], name, 3, ADDRESS, first=5)]
    assert int((torch.cat(parts).int() - whole.int()).abs().max()) <= 1  # the last bit of a convolution may differ
    assert float((torch.cat(parts) != whole).float().mean()) < 1e-3
    still = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"}
    assert torch.equal(whole, corrupt(images, name, 3, ADDRESS.at(4))) == (name in still | {"saturate"})


@pytest.mark.parametrize("name", sorted(CORRUPTIONS))
def test_floats_are_like_bytes_and_sides_may_differ(images, name):
    unit = images[:6, :, :27, :24].float() / 255
    result = corrupt(unit, name, 4, ADDRESS)
    assert result.dtype == torch.float32
    assert 0 <= float(result.min()) <= float(result.max()) <= 1
    assert torch.equal(corrupt(images[:6, :, :27, :24], name, 4, ADDRESS), (result * 255).round().to(torch.uint8))
    assert corrupt(unit.bfloat16(), name, 4, ADDRESS).dtype == torch.bfloat16
    for flat in (0.0, 1.0):
        assert bool(corrupt(torch.full((2, 3, 8, 8), flat), name, 5, ADDRESS).isfinite().all())


@pytest.mark.parametrize("name", sorted(CORRUPTIONS))
def test_no_value_is_read_back_to_the_host(name):
    images = torch.empty(4, 3, 32, 32, device="meta", dtype=torch.uint8)
    number = torch.zeros((), dtype=torch.int64, device="meta")
    assert corrupt(images, name, 5, ADDRESS.at(number)).shape == images.shape


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - {"saturate"}))
def test_grey_images_become_what_the_brightness_of_equal_channels_becomes(images, name):
    grey = images[:, :1].float() * (0.4 / 255)  # nothing is clipped
    for severity in (2, 5):
        ours = corrupt(grey, name, severity, ADDRESS)
        assert ours.shape == grey.shape
        if name.endswith("_noise"):  # each channel has noise of its own
            continue
        red, green, blue = corrupt(grey.expand(-1, 3, -1, -1), name, severity, ADDRESS).unbind(1)
        torch.testing.assert_close(ours[:, 0], 0.299 * red + 0.587 * green + 0.114 * blue, rtol=0, atol=1e-5)
    found = [change(images[:, :1], name, severity) for severity in range(1, 6)]
    assert found == sorted(found)
    assert 1e-5 < found[0] < found[-1] < 0.08
    number = torch.zeros((), dtype=torch.int64, device="meta")
    bytes_ = torch.empty(4, 1, 28, 28, device="meta", dtype=torch.uint8)
    assert corrupt(bytes_, name, 5, ADDRESS.at(number)).shape == bytes_.shape


@pytest.mark.parametrize(
    ("name", "severity", "deviation"), [("gaussian_noise", 3, 0.08), ("speckle_noise", 3, 0.12 * 0.5)]
)
def test_noise_of_grey_images_is_normal(name, severity, deviation):
    off = corrupt(GREY[:, :1], name, severity, ADDRESS) - 0.5
    assert scipy.stats.kstest(off.flatten().numpy() / deviation, "norm").pvalue > 1e-3


def test_there_are_fifteen_common_types_and_four_more():
    assert len(COMMON) == 15
    assert set(CORRUPTIONS) - set(COMMON) == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}


def test_wrong_choices_are_told(images):
    with pytest.raises(InputError, match="unknown corruption 'gausian_noise'; did you mean 'gaussian_noise'"):
        corrupt(images, "gausian_noise", 1, ADDRESS)
    for severity in (0, 6):
        with pytest.raises(InputError, match=f"severity is {severity}: expected 1 to 5"):
            corrupt(images, "fog", severity, ADDRESS)
    with pytest.raises(
        InputError, match=r"images have shape \(24, 2, 32, 32\): expected \(N, 3, H, W\) or \(N, 1, H, W\)"
    ):
        corrupt(images[:, :2], "fog", 1, ADDRESS)
    with pytest.raises(InputError, match="corruption 'saturate' changes colours, which grey images have not"):
        corrupt(images[:, :1], "saturate", 1, ADDRESS)
    with pytest.raises(InputError, match="expected uint8, or float"):
        corrupt(images.long(), "fog", 1, ADDRESS)


# ---- single types against outside oracles --------------------------------------------------------------------------


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.4), (3, 0.7), (5, 1.0)])
def test_gaussian_blur_agrees_with_scipy(images, severity, sigma):
    unit = images.double().numpy() / 255
    expected = scipy.ndimage.gaussian_filter(unit, (0, 0, sigma, sigma), mode="nearest")
    found = corrupt(images.float() / 255, "gaussian_blur", severity, ADDRESS)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


def test_blurs_and_distortions_keep_flat_images():
    colour = torch.tensor([0.2, 0.5, 0.8]).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur", "pixelate", "contrast"):
        torch.testing.assert_close(corrupt(colour, name, 5, ADDRESS), colour, atol=2e-6, rtol=0)
    for name in ("elastic_transform", "jpeg_compression"):
        torch.testing.assert_close(corrupt(colour, name, 1, ADDRESS), colour, atol=0.02, rtol=0)


def test_motion_blur_spreads_a_point_along_its_angle():
    point = torch.zeros(60, 3, 33, 33)
    point[:, :, 16, 16] = 1.0
    blurred = corrupt(point, "motion_blur", 5, ADDRESS)[:, 0]
    angle = (noise.uniform(ADDRESS.sub("motion_blur").sub("angle"), 60) * 2 - 1) * math.pi / 4
    rows = torch.arange(33.0)[:, None] - 16
    mass = blurred.sum((1, 2))
    down, right = (blurred * rows).sum((1, 2)) / mass, (blurred * rows.T).sum((1, 2)) / mass
    torch.testing.assert_close(torch.atan2(-down, -right), angle, atol=0.02, rtol=0)
    torch.testing.assert_close(mass, torch.ones(60), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (5, 0.1)])
def test_gaussian_noise_is_normal(severity, deviation):
    change = corrupt(GREY, "gaussian_noise", severity, ADDRESS) - GREY
    assert scipy.stats.kstest(change.flatten().numpy(), "norm", args=(0, deviation)).pvalue > 1e-3


def test_speckle_noise_is_proportional_to_brightness():
    dim = 0.5 * GREY
    change = corrupt(dim, "speckle_noise", 3, ADDRESS) / dim - 1
    assert scipy.stats.kstest(change.flatten().numpy(), "norm", args=(0, 0.12)).pvalue > 1e-3


@pytest.mark.parametrize(("level", "severity", "photons"), [(0.5, 1, 500), (0.5, 5, 50), (0.1, 5, 50)])
def test_shot_noise_is_poisson(level, severity, photons):
    images = torch.full((40, 3, 32, 32), level)
    counts = (corrupt(images, "shot_noise", severity, ADDRESS) * photons).round().long().flatten().numpy()
    law = scipy.stats.poisson(level * photons)
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 25)))
    observed = np.histogram(counts, [-0.5, *(edges + 0.5), np.inf])[0]
    expected = np.diff([0.0, *law.cdf(edges), 1.0]) * counts.size
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


def test_impulse_noise_has_its_share_of_salt_and_pepper():
    result = corrupt(GREY, "impulse_noise", 5, ADDRESS)
    for value in (0.0, 1.0):
        assert scipy.stats.binomtest(int((result == value).sum()), GREY.numel(), 0.035).pvalue > 1e-3
    assert bool(((result == 0) | (result == 1) | (result == 0.5)).all())


def test_brightness_and_saturation_keep_the_hue(images):
    import colorsys

    pixels = images[:2].float() / 255
    before = pixels.permute(0, 2, 3, 1).reshape(-1, 3).double().numpy()
    for name, expected in (
        ("brightness", lambda h, s, v: colorsys.hsv_to_rgb(h, s, min(v + 0.15, 1))),
        ("saturate", lambda h, s, v: colorsys.hsv_to_rgb(h, min(s * 2 + 0.05, 1) if s > 0 else 0, v)),
    ):
        after = corrupt(pixels, name, 3, ADDRESS).permute(0, 2, 3, 1).reshape(-1, 3).numpy()
        wanted = np.array([expected(*colorsys.rgb_to_hsv(*pixel)) for pixel in before])
        np.testing.assert_allclose(after, wanted, atol=2e-5)


def test_contrast_and_pixelate_by_hand():
    ramp = torch.arange(40.0).div(40).expand(1, 3, 40, 40)
    torch.testing.assert_close(corrupt(ramp, "contrast", 2, ADDRESS), 0.5 * ramp + 0.5 * ramp.mean())
    # 40 pixels in 30 boxes: the first three boxes average pixels 0 to 4 by their overlap.
    boxed = corrupt(ramp, "pixelate", 4, ADDRESS)[0, 0, 7, :4] * 40
    first = [(0 + 1 / 3) / (4 / 3), (2 / 3 * 1 + 2 / 3 * 2) / (4 / 3), (1 / 3 * 2 + 3) / (4 / 3)]
    torch.testing.assert_close(boxed, torch.tensor([first[0], first[1], first[1], first[2]]), atol=1e-4, rtol=0)
