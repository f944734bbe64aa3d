"""Corruptions: against scipy and closed forms; addresses."""

import math

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from photographs import photographs
from PIL import Image

from peerbayes.data.transforms.corrupt import COMMON, CORRUPTIONS, corrupt
from peerbayes.data.transforms.filters import distances, edges
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


# Mean absolute change of a byte of `photographs(24)` by the published functions (make_cifar_c.py of
# github.com/hendrycks/robustness, run as benchmarks/corruptions.py runs it; those with noise 4 to 60 times over).
PUBLISHED = {
    "gaussian_noise": (7.73, 11.38, 14.90, 16.63, 18.35),
    "shot_noise": (5.44, 7.65, 11.73, 13.45, 16.17),
    "impulse_noise": (1.27, 2.56, 3.87, 6.39, 8.88),
    "defocus_blur": (0.95, 2.49, 3.78, 5.09, 6.93),
    "glass_blur": (7.51, 7.61, 7.45, 11.71, 11.15),
    "motion_blur": (4.65, 6.54, 8.37, 8.15, 9.52),
    "zoom_blur": (5.86, 6.99, 8.19, 9.33, 10.35),
    "snow": (11.03, 23.20, 24.66, 34.63, 47.71),
    "frost": (29.74, 42.42, 48.31, 45.25, 45.42),
    "fog": (13.36, 26.24, 33.61, 39.67, 46.51),
    "brightness": (9.26, 17.11, 23.75, 29.86, 40.37),
    "contrast": (9.23, 18.47, 22.15, 25.85, 31.39),
    "elastic_transform": (14.22, 13.11, 11.99, 10.96, 9.28),
    "pixelate": (1.29, 2.20, 2.89, 4.47, 5.87),
    "jpeg_compression": (5.16, 6.19, 6.56, 6.95, 7.44),
    "speckle_noise": (5.32, 8.60, 10.18, 13.21, 16.15),
    "gaussian_blur": (0.92, 3.71, 4.70, 5.49, 6.78),
    "spatter": (0.99, 2.60, 6.54, 3.10, 5.17),
    "saturate": (19.94, 25.66, 9.25, 18.61, 24.96),
}
STILL = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"}
STILL |= {"saturate"}


@pytest.mark.parametrize("name", sorted(CORRUPTIONS))
def test_mean_change_is_that_of_the_published_corruption(images, name):
    many = images if name in STILL else images.repeat(10, 1, 1, 1)
    for severity, published in enumerate(PUBLISHED[name], 1):
        found = (corrupt(many, name, severity, ADDRESS).float() - many.float()).abs().mean().item()
        assert found == pytest.approx(published, rel=0.01 if name in STILL else 0.08)


@pytest.mark.parametrize("name", sorted(CORRUPTIONS))
def test_same_address_same_images(images, name):
    whole = corrupt(images, name, 3, ADDRESS)
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, corrupt(images, name, 3, ADDRESS.at(torch.tensor(3))))
    # An image's noise does not depend on how many come with it.
    parts = [corrupt(images[:5], name, 3, ADDRESS), corrupt(images[5:], name, 3, ADDRESS, first=5)]
    assert int((torch.cat(parts).int() - whole.int()).abs().max()) <= 1  # the last bit of a convolution may differ
    assert float((torch.cat(parts) != whole).float().mean()) < 1e-3
    assert torch.equal(whole, corrupt(images, name, 3, ADDRESS.at(4))) == (name in STILL)


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
    assert all(1e-5 < change(images[:, :1], name, severity) < 0.08 for severity in range(1, 6))
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
    with pytest.raises(InputError, match="corruption 'saturate' needs colour images, but these are grey"):
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


@pytest.mark.parametrize(("severity", "times"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_glass_blur_shows_a_pixel_or_its_neighbours_above_and_on_the_left(severity, times):
    point = torch.zeros(6000, 1, 9, 9)  # so small that nothing is blurred
    point[:, :, 4, 4] = 1.0
    shown = corrupt(point, "glass_blur", severity, ADDRESS)[:, 0].mean(0)
    law = torch.tensor([[0.5, 0.5], [0.25, 0.5]][times - 1] + [0.25] * (times - 1))  # of 0, 1 or 2 pixels, each way
    expected = torch.zeros(9, 9)
    expected[4 : 5 + times, 4 : 5 + times] = law[:, None] * law
    torch.testing.assert_close(shown, expected, rtol=0, atol=0.03)
    images = torch.rand(2, 3, 9, 9)
    after = corrupt(images, "glass_blur", severity, ADDRESS)
    assert torch.equal(after[..., :2, :], images[..., :2, :])
    assert torch.equal(after[..., :2], images[..., :2])


@pytest.mark.parametrize(
    ("severity", "radius", "soft"), [(1, 0.3, 0.4), (2, 0.4, 0.5), (3, 0.5, 0.6), (4, 1.0, 0.2), (5, 1.5, 0.1)]
)
def test_defocus_blur_makes_a_soft_disc_of_a_point(severity, radius, soft):
    point = torch.zeros(1, 1, 32, 32)
    point[:, :, 16, 16] = 1.0
    found = corrupt(point, "defocus_blur", severity, ADDRESS)[0, 0].double().numpy()
    rows, columns = np.mgrid[-16:16, -16:16]
    disc = (np.hypot(rows, columns) <= radius).astype(float)
    wanted = scipy.ndimage.gaussian_filter(disc / disc.sum(), soft, radius=1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("severity", "radius", "sigma"), [(1, 6, 1.0), (2, 6, 1.5), (3, 6, 2.0), (4, 8, 2.0), (5, 9, 2.5)]
)
def test_motion_blur_spreads_a_point_along_its_angle(severity, radius, sigma):
    point = torch.zeros(60, 3, 32, 32)
    point[:, :, 16, 20] = 1.0
    found = corrupt(point, "motion_blur", severity, ADDRESS)[:, 1].numpy()
    angle = (noise.uniform(ADDRESS.sub("motion_blur").sub("angle"), 60).numpy() * 2 - 1) * math.pi / 4
    weights = scipy.stats.norm.pdf(np.arange(2 * radius + 1), scale=sigma)
    wanted = np.zeros_like(found)
    for k, weight in enumerate(weights / weights.sum()):  # pixels in a row, each the nearest to the line
        np.add.at(
            wanted,
            (np.arange(60), 16 - np.rint(k * np.sin(angle)).astype(int), 20 - np.rint(k * np.cos(angle)).astype(int)),
            weight,
        )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


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
        ("saturate", lambda h, s, v: colorsys.hsv_to_rgb(h, min(s * 1.5, 1), v)),
    ):
        after = corrupt(pixels, name, 3, ADDRESS).permute(0, 2, 3, 1).reshape(-1, 3).numpy()
        wanted = np.array([expected(*colorsys.rgb_to_hsv(*pixel)) for pixel in before])
        np.testing.assert_allclose(after, wanted, atol=2e-5)


def test_saturation_falls_at_severities_1_and_2_and_rises_from_3(images):
    def saturation(x):
        value = x.amax(1)
        return ((value - x.amin(1)) / value.clamp_min(1e-9)).mean().item()

    unit = images.float() / 255
    found = [saturation(corrupt(unit, "saturate", severity, ADDRESS)) for severity in range(1, 6)]
    before = saturation(unit)
    assert found[0] == pytest.approx(0.3 * before, rel=1e-4)
    assert found[1] == pytest.approx(0.1 * before, rel=1e-4)
    assert before < found[2] < found[3] < found[4]
    # Greys have no hue; HSV's convention is red, hue 0.
    tinted = torch.tensor([0.5, 0.45, 0.45]).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    torch.testing.assert_close(corrupt(GREY[:1], "saturate", 4, ADDRESS), tinted)


def test_contrast_by_hand():
    ramp = torch.arange(40.0).div(40).expand(1, 3, 40, 40)
    torch.testing.assert_close(corrupt(ramp, "contrast", 2, ADDRESS), 0.5 * ramp + 0.5 * ramp.mean())


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 28), (40, 27)])
@pytest.mark.parametrize(("severity", "share"), [(1, 0.95), (2, 0.9), (3, 0.85), (4, 0.75), (5, 0.65)])
def test_pixelate_agrees_with_pillow(severity, share, height, width):
    images = photographs(4, 40)[..., :height, :width].contiguous()
    found = corrupt(images, "pixelate", severity, ADDRESS).permute(0, 2, 3, 1).numpy().astype(int)
    for image, ours in zip(images.permute(0, 2, 3, 1).numpy(), found, strict=True):
        few = Image.fromarray(image).resize((int(width * share), int(height * share)), Image.Resampling.BOX)
        many = np.asarray(few.resize((width, height), Image.Resampling.BOX)).astype(int)
        assert abs(many - ours).max() <= 1  # halves are rounded up there, after each axis


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
    saturation = (0.3 / 6, 0.1 / 6, 1.5 / 6, 2 / 6 + 0.1, 2.5 / 6 + 0.2)[place]
    expected = 0.6 - 0.6 * saturation * torch.tensor([0, 1, 0.5]).view(1, 3, 1, 1).expand_as(colour)
    torch.testing.assert_close(corrupt(colour, "saturate", severity, ADDRESS), expected, atol=2e-5, rtol=0)
    quality = (80, 65, 58, 50, 40)[place]
    torch.testing.assert_close(corrupt(unit, "jpeg_compression", severity, ADDRESS), jpeg(unit, quality).clamp(0, 1))
    columns = corrupt(torch.linspace(0, 1, 32).expand(1, 3, 32, 32), "pixelate", severity, ADDRESS)[0, 0, 0].unique()
    assert len(columns) == int(32 * (0.95, 0.9, 0.85, 0.75, 0.65)[place])


@pytest.mark.parametrize(("severity", "steps"), [(1, 7), (2, 12), (3, 16), (4, 21), (5, 26)])
def test_zoom_blur_is_the_mean_of_zoomed_images(images, severity, steps):
    unit = images[:3].double().numpy() / 255
    total = unit.copy()
    for factor in 1 + 0.010000001 * np.arange(steps):  # halves up
        cut = (32 - math.ceil(32 / factor)) // 2, math.ceil(32 / factor)
        part = unit[..., cut[0] : sum(cut), cut[0] : sum(cut)]
        large = scipy.ndimage.zoom(part, (1, 1, factor, factor), order=1)
        over = (large.shape[-1] - 32) // 2
        total += large[..., over : over + 32, over : over + 32]
    found = corrupt(images[:3].float() / 255, "zoom_blur", severity, ADDRESS)
    np.testing.assert_allclose(found, total / (steps + 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("severity", "depth"), [(1, 0.2), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.5)])
def test_fog_is_between_none_at_all_and_its_depth(severity, depth):
    for level in (0.3, 0.8):
        found = corrupt(torch.full((6, 3, 32, 32), level), "fog", severity, ADDRESS)
        # (x + depth c) x / (x + depth), with clouds c from 0 to 1.
        torch.testing.assert_close(found.amin((1, 2, 3)), torch.full((6,), level**2 / (level + depth)))
        torch.testing.assert_close(found.amax((1, 2, 3)), torch.full((6,), level))


@pytest.mark.parametrize(
    ("severity", "strength", "sigma", "near"),
    [(1, 0, 0, 2.56), (2, 1.6, 6.4, 2.24), (3, 2.56, 1.92, 1.92), (4, 3.2, 1.28, 1.6), (5, 3.2, 0.96, 0.96)],
)
def test_elastic_transform_moves_pixels_by_an_affine_map_and_then_by_a_smooth_field(severity, strength, sigma, near):
    here, count = ADDRESS.sub("elastic_transform"), 20
    moved = near * (noise.uniform(here.sub("corners"), count * 6).view(count, 3, 2).double().numpy() * 2 - 1)
    field = noise.uniform(here.sub("field"), count * 2 * 32 * 32).view(count, 2, 32, 32).double().numpy() * 2 - 1
    field = strength * scipy.ndimage.gaussian_filter(field, (0, 0, sigma, sigma), mode="reflect", truncate=3)
    pixels = np.mgrid[:32, :32].astype(float)
    corners, slopes = np.array([[6.0, 6.0], [26.0, 6.0], [6.0, 26.0]]), (torch.arange(32.0) - 15.5) / 80 + 0.5
    images = torch.stack([slopes[:, None].expand(32, 32), slopes.expand(32, 32), torch.zeros(32, 32)])
    found = corrupt(images.expand(count, 3, 32, 32), "elastic_transform", severity, ADDRESS)[:, :2].numpy()
    for i in range(count):
        # The places that `corners + moved` shows are the corners themselves.
        back = np.linalg.solve(np.c_[corners + moved[i], np.ones(3)], corners)
        seen = pixels + field[i]
        origin = np.stack([*seen, np.ones((32, 32))], -1) @ back
        inside = ((origin > 3) & (origin < 28)).all(-1) & ((seen > 1) & (seen < 30)).all(0)
        assert inside.mean() > 0.3
        shown = (found[i] - 0.5) * 80 + 15.5
        np.testing.assert_allclose(shown[:, inside], origin[inside].T, rtol=0, atol=2e-3)


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_spatter_up_to_the_third_severity_adds_pale_water_in_drops(severity):
    drops = (corrupt(0.8 * GREY, "spatter", severity, ADDRESS) - 0.8 * GREY) / torch.tensor(
        [175 / 255, 238 / 255, 238 / 255]
    ).view(3, 1, 1)
    torch.testing.assert_close(drops[:, 0], drops[:, 1], rtol=0, atol=1e-6)
    torch.testing.assert_close(drops.amax((1, 2, 3)), torch.full((40,), 0.5))
    assert drops.amin() > -1e-6
    mean, deviation, sigma, least = ((0.62, 0.1, 0.7, 0.7), (0.65, 0.1, 0.8, 0.7), (0.65, 0.3, 1.0, 0.69))[severity - 1]
    point = np.pad(np.ones((1, 1)), 8)
    blurred = deviation * np.sqrt((scipy.ndimage.gaussian_filter(point, sigma) ** 2).sum())
    assert 0.4 < (drops[:, 0] > 1e-4).float().mean() / scipy.stats.norm.sf((least - mean) / blurred) < 1.15


@pytest.mark.parametrize(("name", "severity"), [("spatter", 2), ("spatter", 5), ("elastic_transform", 5)])
def test_drops_and_displacements_grow_with_the_image(name, severity):
    def found(side):
        waves = (torch.arange(side) * (4 * math.pi / side)).sin() / 4 + 0.5
        images = waves.expand(60, 3, side, side)
        return (corrupt(images, name, severity, ADDRESS) - images).abs().mean().item()

    assert found(96) == pytest.approx(found(32), rel=0.45)  # few pixels make a coarser Gaussian, with longer tails


@pytest.mark.parametrize("severity", [4, 5])
def test_spatter_from_the_fourth_severity_covers_with_mud(severity):
    mud = torch.tensor([63 / 255, 42 / 255, 20 / 255]).view(3, 1, 1)
    cover = (corrupt(GREY, "spatter", severity, ADDRESS) - GREY) / (mud - GREY)
    torch.testing.assert_close(cover, cover[:, :1].expand_as(cover), rtol=0, atol=1e-6)
    assert cover.amax() == pytest.approx(1, abs=1e-3)
    assert ((cover.abs() < 1e-6) | (cover > 0.8 - 1e-5)).all()


def test_distances_and_edges():
    marked = torch.rand(3, 1, 40, 30, generator=torch.Generator().manual_seed(0)) < 0.02
    wanted = np.stack([scipy.ndimage.distance_transform_edt(~one) for one in marked[:, 0].numpy()])
    np.testing.assert_allclose(distances(marked, 6)[:, 0], wanted.clip(max=6), rtol=1e-6)
    block = torch.zeros(1, 1, 12, 12)
    block[..., 4:9, 3:8] = 200.0
    rim = torch.zeros(12, 12, dtype=torch.bool)
    # Gradients on both sides of a rim are the same: the first of two pixels is taken. Corners are 3/4 of a rim.
    rim[3, 4:7] = rim[8, 4:7] = rim[5:8, 2] = rim[5:8, 7] = True
    found = edges(block, 150.0)[0, 0]
    assert torch.equal(found & rim, rim)
    assert int((found & ~rim).sum()) <= 8
    assert int(edges(block, 801.0).sum()) == 4  # the block's corners, with 1200
    assert not edges(block, 1200.0).any()


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
    ("severity", "keep", "ice"), [(1, 1.0, 0.2), (2, 1.0, 0.3), (3, 0.9, 0.4), (4, 0.85, 0.4), (5, 0.75, 0.45)]
)
def test_frost_is_the_same_at_all_severities_and_as_bright_and_grainy_as_the_published_photographs(severity, keep, ice):
    dark = torch.full((600, 3, 32, 32), 0.2)
    frost = (corrupt(dark, "frost", severity, ADDRESS) - keep * dark) / ice
    first = (corrupt(dark, "frost", 1, ADDRESS) - dark) / 0.2
    torch.testing.assert_close(frost, first, rtol=0, atol=1e-5)
    # Measured on 2,000 parts of the five photographs that the published functions draw, a fifth of their size.
    torch.testing.assert_close(frost.mean((0, 2, 3)), torch.tensor([0.565, 0.648, 0.694]), rtol=0, atol=0.02)
    grey = (frost * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
    assert grey.mean((1, 2)).std().item() == pytest.approx(0.151, abs=0.015)
    assert grey.var((1, 2)).mean().sqrt().item() == pytest.approx(0.092, abs=0.01)
    away = grey - grey.mean((1, 2), keepdim=True)
    for shift, correlation in ((1, 0.341), (2, 0.245), (4, 0.168), (8, 0.110)):  # ours reaches less far
        found = (away[..., shift:] * away[..., :-shift]).mean() / away.square().mean()
        assert found.item() == pytest.approx(correlation, abs=0.12)
