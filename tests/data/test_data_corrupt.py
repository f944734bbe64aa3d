"""Corruptions: against scipy and closed forms; addresses."""

import math

import numpy as np
import pytest
import scipy.ndimage
import scipy.special
import scipy.stats
import torch
from photographs import photographs

from peerbayes.data.transforms.corrupt import COMMON, CORRUPTIONS, corrupt
from peerbayes.data.transforms.jpeg import jpeg
from peerbayes.errors import InputError
from peerbayes.math import noise

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


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.4), (2, 0.6), (3, 0.7), (4, 0.8), (5, 1.0)])
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


@pytest.mark.parametrize("severity", range(1, 6))
def test_glass_blur_shows_neighbours_of_all_sides(severity):
    share, times = ((0.3, 1), (0.55, 1), (0.8, 1), (0.75, 2), (1.0, 2))[severity - 1]
    point = torch.zeros(6000, 1, 9, 9)  # so small that nothing is blurred
    point[:, :, 4, 4] = 1.0
    shown = corrupt(point, "glass_blur", severity, ADDRESS)[:, 0].mean(0)
    away = torch.arange(9.0) - 4
    assert shown.sum().item() == pytest.approx(1, abs=0.08)
    # Each time so large a share moves by −1, 0 or 1 down and right, which has mean 0 and variance 2/3.
    down, right = shown.sum(1), shown.sum(0)
    for along in (down, right):
        assert (along * away).sum().item() == pytest.approx(0, abs=0.08)
        assert (along * away.square()).sum().item() == pytest.approx(times * share * 2 / 3, abs=0.1)
    assert (away @ shown @ away).item() == pytest.approx(0, abs=0.1)
    assert shown[away.abs() > times].sum() == 0


@pytest.mark.parametrize(("severity", "radius"), [(1, 0.5), (2, 0.75), (3, 1.0), (4, 1.3), (5, 1.7)])
def test_defocus_blur_makes_a_disc_of_a_point(severity, radius):
    point = torch.zeros(1, 1, 32, 32)
    point[:, :, 16, 16] = 1.0
    disc = corrupt(point, "defocus_blur", severity, ADDRESS)[0, 0].double().numpy()
    rows, columns = np.mgrid[-16:16, -16:16]
    wanted = scipy.special.expit((radius - np.hypot(rows, columns)) / 0.175)
    near = np.maximum(abs(rows), abs(columns)) <= math.ceil(radius + 0.7)
    np.testing.assert_allclose(disc, np.where(near, wanted, 0) / wanted[near].sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("severity", "sigma"), [(1, 1.0), (2, 1.5), (3, 2.0), (4, 2.5), (5, 3.0)])
def test_motion_blur_spreads_a_point_along_its_angle(severity, sigma):
    point = torch.zeros(60, 3, 33, 33)
    point[:, :, 16, 16] = 1.0
    blurred = corrupt(point, "motion_blur", severity, ADDRESS)[:, 0]
    angle = (noise.uniform(ADDRESS.sub("motion_blur").sub("angle"), 60) * 2 - 1) * math.pi / 4
    rows = torch.arange(33.0)[:, None] - 16
    mass = blurred.sum((1, 2))
    down, right = (blurred * rows).sum((1, 2)) / mass, (blurred * rows.T).sum((1, 2)) / mass
    torch.testing.assert_close(torch.atan2(-down, -right), angle, atol=0.02, rtol=0)
    torch.testing.assert_close(mass, torch.ones(60), atol=1e-5, rtol=0)
    k = np.arange(math.ceil(3 * sigma * 33 / 32) + 1)
    away = np.average(k, weights=scipy.stats.norm.pdf(k, scale=sigma * 33 / 32))
    torch.testing.assert_close(torch.hypot(down, right), torch.full((60,), away), atol=2e-3, rtol=0)


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.1)])
def test_gaussian_noise_is_normal(severity, deviation):
    change = corrupt(GREY, "gaussian_noise", severity, ADDRESS) - GREY
    assert scipy.stats.kstest(change.flatten().numpy(), "norm", args=(0, deviation)).pvalue > 1e-3


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.06), (2, 0.1), (3, 0.12), (4, 0.16), (5, 0.2)])
def test_speckle_noise_is_proportional_to_brightness(severity, deviation):
    dim = 0.5 * GREY
    change = corrupt(dim, "speckle_noise", severity, ADDRESS) / dim - 1
    assert scipy.stats.kstest(change.flatten().numpy(), "norm", args=(0, deviation)).pvalue > 1e-3


@pytest.mark.parametrize(
    ("level", "severity", "photons"), [(0.5, 1, 500), (0.5, 2, 250), (0.5, 3, 100), (0.5, 4, 75), (0.1, 5, 50)]
)
def test_shot_noise_is_poisson(level, severity, photons):
    images = torch.full((40, 3, 32, 32), level)
    counts = (corrupt(images, "shot_noise", severity, ADDRESS) * photons).round().long().flatten().numpy()
    law = scipy.stats.poisson(level * photons)
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 25)))
    observed = np.histogram(counts, [-0.5, *(edges + 0.5), np.inf])[0]
    expected = np.diff([0.0, *law.cdf(edges), 1.0]) * counts.size
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize(("severity", "share"), [(1, 0.01), (2, 0.02), (3, 0.03), (4, 0.05), (5, 0.07)])
def test_impulse_noise_has_its_share_of_salt_and_pepper(severity, share):
    result = corrupt(GREY, "impulse_noise", severity, ADDRESS)
    for value in (0.0, 1.0):
        assert scipy.stats.binomtest(int((result == value).sum()), GREY.numel(), share / 2).pvalue > 1e-3
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


@pytest.mark.parametrize("severity", range(1, 6))
def test_each_severity_has_its_parameter(images, severity):
    unit, place = images[:2].float() / 255, severity - 1
    mean = unit.mean((2, 3), keepdim=True)
    less = (0.75, 0.5, 0.4, 0.3, 0.15)[place]
    torch.testing.assert_close(corrupt(unit, "contrast", severity, ADDRESS), mean + less * (unit - mean))
    more = (0.05, 0.1, 0.15, 0.2, 0.3)[place]
    for grey in (0 * GREY[:1], GREY[:1]):
        torch.testing.assert_close(corrupt(grey, "brightness", severity, ADDRESS), grey + more)
    colour = torch.tensor([0.6, 0.5, 0.55]).view(1, 3, 1, 1).expand(1, 3, 8, 8)  # hue 330°, saturation 1/6, value 0.6
    saturation = (1.3 / 6, 1.6 / 6 + 0.02, 2 / 6 + 0.05, 2.5 / 6 + 0.1, 3.5 / 6 + 0.2)[place]
    expected = 0.6 - 0.6 * saturation * torch.tensor([0, 1, 0.5]).view(1, 3, 1, 1).expand_as(colour)
    torch.testing.assert_close(corrupt(colour, "saturate", severity, ADDRESS), expected, atol=2e-5, rtol=0)
    quality = (80, 65, 58, 50, 40)[place]
    torch.testing.assert_close(corrupt(unit, "jpeg_compression", severity, ADDRESS), jpeg(unit, quality).clamp(0, 1))
    columns = corrupt(torch.linspace(0, 1, 32).expand(1, 3, 32, 32), "pixelate", severity, ADDRESS)[0, 0, 0].unique()
    assert len(columns) == int(32 * (0.95, 0.9, 0.85, 0.75, 0.65)[place])


@pytest.mark.parametrize(("severity", "steps"), [(1, 6), (2, 11), (3, 16), (4, 21), (5, 26)])
def test_zoom_blur_of_a_slope_is_the_mean_of_its_slopes(severity, steps):
    away = torch.arange(48.0) - 23.5
    for slope in (away.expand(1, 3, 48, 48) / 64, away[:, None].expand(1, 3, 48, 48) / 64):
        flatter = (1 + sum(1 / (1 + 0.01 * k) for k in range(steps))) / (steps + 1)
        found = corrupt(0.5 + slope, "zoom_blur", severity, ADDRESS)
        torch.testing.assert_close(found, 0.5 + flatter * slope, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("severity", "depth"), [(1, 0.2), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.5)])
def test_fog_is_between_none_at_all_and_its_depth(severity, depth):
    for level in (0.3, 0.8):
        found = corrupt(torch.full((6, 3, 32, 32), level), "fog", severity, ADDRESS)
        # (x + depth c) x / (x + depth), with clouds c from 0 to 1.
        torch.testing.assert_close(found.amin((1, 2, 3)), torch.full((6,), level**2 / (level + depth)))
        torch.testing.assert_close(found.amax((1, 2, 3)), torch.full((6,), level))


@pytest.mark.parametrize(
    ("severity", "local", "affine"),
    [(1, 0.35, 0.02), (2, 0.55, 0.03), (3, 0.75, 0.04), (4, 0.95, 0.05), (5, 1.2, 0.06)],
)
def test_elastic_transform_moves_pixels_by_a_smooth_field_on_top_of_an_affine_map(severity, local, affine):
    here, away = ADDRESS.sub("elastic_transform"), torch.arange(32.0) - 15.5
    field = noise.uniform(here.sub("field"), 4 * 2 * 32 * 32).view(4, 2, 32, 32).double().numpy() * 2 - 1
    field = scipy.ndimage.gaussian_filter(field, (0, 0, 1.6, 1.6), mode="nearest")
    field = torch.from_numpy(field / np.sqrt((field**2).mean((2, 3), keepdims=True)))
    matrix = (noise.uniform(here.sub("affine"), 4 * 2 * 2).view(4, 2, 2) * 2 - 1) * affine
    for axis, slope in enumerate((away[:, None].expand(4, 1, 32, 32), away.expand(4, 1, 32, 32))):
        # A slope shows how far each pixel has moved along it; borders, which are repeated, apart.
        moved = 40 * (corrupt(0.5 + slope / 40, "elastic_transform", severity, ADDRESS) - 0.5) - slope
        down, right = (matrix[:, axis, k, None, None] for k in (0, 1))
        wanted = local * field[:, axis] + down * away[:, None] + right * away
        torch.testing.assert_close(moved[:, 0, 6:-6, 6:-6], wanted[:, 6:-6, 6:-6].float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("severity", range(1, 6))
def test_spatter_is_pale_water_up_to_the_third_severity_and_mud_from_the_fourth(severity):
    off = corrupt(GREY, "spatter", severity, ADDRESS) - GREY
    paint, opaque = ((0.69, 0.93, 0.93), (0.3, 0.4, 0.5)) if severity < 4 else ((0.25, 0.16, 0.08), (0.85, 0.95))
    furthest = opaque[(severity - 1) % 3] * (torch.tensor(paint) - 0.5)
    torch.testing.assert_close(off.abs().amax((0, 2, 3)), furthest.abs(), rtol=0.01, atol=0)
    assert (off.mean((0, 2, 3)) * furthest > 0).all()


@pytest.mark.parametrize(("severity", "keep"), [(1, 0.95), (2, 0.9), (3, 0.9), (4, 0.85), (5, 0.8)])
def test_snow_is_white_on_colours_that_are_paled_by_their_brightness(severity, keep):
    colour = torch.tensor([0.2, 0.5, 0.3]).view(1, 3, 1, 1)
    brightness = 0.299 * 0.2 + 0.587 * 0.5 + 0.114 * 0.3
    pale = keep * colour + (1 - keep) * (1.5 * brightness + 0.5)
    flakes = corrupt(colour.expand(20, 3, 32, 32), "snow", severity, ADDRESS) - pale
    torch.testing.assert_close(flakes.amin((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)  # none at some places
    unclipped = flakes.amax(1) < 0.3
    torch.testing.assert_close(flakes.amin(1)[unclipped], flakes.amax(1)[unclipped], rtol=0, atol=1e-5)
    assert flakes.amax() > 0.4


@pytest.mark.parametrize(
    ("severity", "keep", "ice"), [(1, 1.0, 0.2), (2, 1.0, 0.3), (3, 0.9, 0.4), (4, 0.85, 0.45), (5, 0.75, 0.55)]
)
def test_frost_is_the_same_crystals_at_all_severities_and_most_at_the_edges(severity, keep, ice):
    dark = torch.full((20, 3, 32, 32), 0.2)
    white = torch.tensor([0.85, 0.95, 1.0]).view(1, 3, 1, 1)
    crystals = (corrupt(dark, "frost", severity, ADDRESS) - keep * dark) / (ice * white)
    first = (corrupt(dark, "frost", 1, ADDRESS) - dark) / (0.2 * white)
    torch.testing.assert_close(crystals, first, rtol=0, atol=1e-5)
    assert 0 <= crystals.min() < crystals.max() <= 1.25
    mean = crystals.mean((0, 1))
    for edge in (mean[0], mean[-1], mean[:, 0], mean[:, -1]):
        assert edge.mean() > 1.3 * mean[8:24, 8:24].mean()
