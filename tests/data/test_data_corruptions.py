"""Corruptions and perturbations: against Pillow, scipy and closed forms; addresses; the official files."""

import io
import math

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from peerbayes import noise
from peerbayes.data.corruptions import COMMON, CORRUPTIONS, _poisson, corrupt, jpeg, load_corrupted
from peerbayes.data.perturbation import gaussian_step, guidance, pair, step_along
from peerbayes.errors import InputError

ADDRESS = noise.Address(7, "data", "corrupt", 3)
GREY = torch.full((40, 3, 32, 32), 0.5)


def photographs(count, side=32):
    """Parts of two photographs, shrunk."""
    generator, found = torch.Generator().manual_seed(0), []
    for k in range(count):
        whole = torch.from_numpy(load_sample_images().images[k % 2].copy()).permute(2, 0, 1)[None].float()
        top, left = (int(torch.randint(0, size - 128, (1,), generator=generator)) for size in whole.shape[-2:])
        part = whole[..., top : top + 128, left : left + 128]
        found.append(torch.nn.functional.interpolate(part, size=(side, side), mode="area"))
    return torch.cat(found).round().to(torch.uint8)


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
    with pytest.raises(InputError, match="quality is 0: expected 1 to 100"):
        jpeg(GREY, 0)


# ---- single types against outside oracles --------------------------------------------------------------------------


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


@pytest.mark.parametrize("rate", [0.0, 0.3, 5.0, 15.9, 16.1, 40.0, 120.0, 500.0])
def test_poisson_numbers_are_quantiles(rate):
    uniform = (torch.arange(4000) + 0.5) / 4000
    found = _poisson(torch.full_like(uniform, rate), uniform).numpy()
    expected = scipy.stats.poisson.ppf(uniform.double().numpy(), rate)
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 3e-3


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


# ---- the official files --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "fog.npy", values)
    np.save(tmp_path / "labels.npy", np.tile(np.array([3, 1, 0, 2]), 5))
    return tmp_path


def test_official_arrays_are_split_by_severity_and_stay_in_their_file(folder):
    values = torch.from_numpy(np.load(folder / "fog.npy")).permute(0, 3, 1, 2)
    for severity in range(1, 6):
        split = load_corrupted(folder, "fog", severity)
        assert len(split) == 4
        assert split.labels.tolist() == [3, 1, 0, 2]
        images, labels = split.batch(torch.tensor([2, 0]), torch.device("cpu"))
        assert torch.equal(images, values[4 * severity - 4 :][[2, 0]])
        assert labels.tolist() == [0, 3]
    mapped = np.lib.format.open_memmap(folder / "fog.npy", mode="r+")
    mapped[19, 0, 0, 0] ^= 255
    mapped.flush()
    assert int(split.images[19, 0, 0, 0]) == int(values[19, 0, 0, 0]) ^ 255  # read from the file, not from a copy


def test_damaged_and_missing_files_are_told(folder):
    with pytest.raises(InputError, match=r"snow\.npy: there is no such file; expected the official arrays"):
        load_corrupted(folder, "snow", 1)
    with pytest.raises(InputError, match="unknown corruption 'fogg'; did you mean 'fog'"):
        load_corrupted(folder, "fogg", 1)
    whole = (folder / "fog.npy").read_bytes()
    for damaged in (whole[:-7], whole[:20], b"", b"PK\x03\x04" + whole):
        (folder / "fog.npy").write_bytes(damaged)
        with pytest.raises(InputError, match=r"fog\.npy: cannot be read as an \.npy file"):
            load_corrupted(folder, "fog", 1)
    for wrong in (np.zeros((19, 32, 32, 3), np.uint8), np.zeros((20, 32, 32), np.uint8), np.zeros((5, 2, 2, 3))):
        np.save(folder / "fog.npy", wrong)
        with pytest.raises(InputError, match=r"expected uint8 images \(5n, H, W, 3\)"):
            load_corrupted(folder, "fog", 1)
    (folder / "fog.npy").write_bytes(whole)
    np.save(folder / "labels.npy", np.zeros(7, np.int64))
    with pytest.raises(InputError, match=r"labels\.npy: 7 labels for 20 images"):
        load_corrupted(folder, "fog", 1)
    (folder / "labels.npy").unlink()
    with pytest.raises(InputError, match=r"labels\.npy: there is no such file"):
        load_corrupted(folder, "fog", 1)


# ---- perturbation --------------------------------------------------------------------------------------------------

SIZE = math.sqrt(3 * 32 * 32) / 255


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e20])
def test_a_step_has_its_length_and_direction_whatever_the_gradient_s_size(size):
    gradient = random(6, 3, 32, 32) * size
    moved = step_along(GREY[:6], gradient) - GREY[:6]
    torch.testing.assert_close(moved.flatten(1).norm(dim=1), torch.full((6,), SIZE), rtol=1e-5, atol=0)
    cosine = torch.nn.functional.cosine_similarity((gradient / size).flatten(1), moved.flatten(1))
    torch.testing.assert_close(cosine, torch.ones(6), rtol=0, atol=1e-5)


def test_clipping_only_shortens_a_step(images):
    unit = images.float() / 255
    moved = step_along(unit.round(), random(24, 3, 32, 32), 3.0)
    assert 0 <= float(moved.min()) <= float(moved.max()) <= 1
    length = (moved - unit.round()).flatten(1).norm(dim=1)
    assert bool((length < 3 * SIZE).all())
    assert bool((length > 0).all())


def test_zero_gradients_leave_the_image_and_scales_are_per_image():
    gradient = random(4, 3, 32, 32)
    gradient[1] = 0
    moved = step_along(GREY[:4], gradient, torch.tensor([1.0, 0.5, 0.25, 0.0])) - GREY[:4]
    expected = torch.tensor([SIZE, 0.0, SIZE / 4, 0.0])
    torch.testing.assert_close(moved.flatten(1).norm(dim=1), expected, rtol=1e-5, atol=0)
    assert torch.equal(step_along(GREY[:4].bfloat16(), gradient.bfloat16() * 0), GREY[:4].bfloat16())
    assert step_along(GREY[:0], gradient[:0]).shape == (0, 3, 32, 32)


def test_gaussian_steps_are_normal_and_addressed():
    moved = gaussian_step(GREY, ADDRESS)
    assert scipy.stats.kstest((moved - GREY).flatten().numpy() * 255, "norm").pvalue > 1e-3
    assert torch.equal(moved, gaussian_step(GREY, ADDRESS.at(torch.tensor(3))))
    assert torch.equal(moved[7:], gaussian_step(GREY[7:], ADDRESS, first=7))
    assert not torch.equal(moved, gaussian_step(GREY, ADDRESS.at(4)))
    assert float(gaussian_step(torch.ones(1, 3, 8, 8), ADDRESS).max()) == 1


def test_guidance_is_uniform_and_addressed():
    weights = guidance(ADDRESS, 3000, 10)
    assert scipy.stats.kstest(weights.flatten().numpy(), "uniform", args=(-1, 2)).pvalue > 1e-3
    assert torch.equal(weights[100:], guidance(ADDRESS.at(torch.tensor(3)), 2900, 10, first=100))


@pytest.mark.parametrize("members", [2, 4, 5])
def test_pairs_are_uniform_without_replacement(members):
    drawn = torch.stack([pair(ADDRESS.at(number), members) for number in range(3000)])
    table = torch.bincount(drawn[:, 0] * members + drawn[:, 1], minlength=members**2).view(members, members)
    assert int(table.diagonal().sum()) == 0
    assert scipy.stats.chisquare(table[~torch.eye(members, dtype=torch.bool)].numpy()).pvalue > 1e-3
    assert torch.equal(pair(ADDRESS.at(torch.tensor(5)), members), drawn[5])


def test_perturbations_read_nothing_back():
    number = torch.zeros((), dtype=torch.int64, device="meta")
    images = torch.empty(4, 3, 8, 8, device="meta")
    assert pair(ADDRESS.at(number), 4).device.type == "meta"
    assert step_along(images, images, torch.empty(4, device="meta")).shape == images.shape
    assert gaussian_step(images, ADDRESS.at(number)).shape == images.shape


def test_wrong_perturbations_are_told(images):
    with pytest.raises(InputError, match=r"torch\.uint8 tensor of shape \(24, 3, 32, 32\): expected floating-point"):
        gaussian_step(images, ADDRESS)
    with pytest.raises(InputError, match=r"gradient has shape \(2, 3, 32, 32\): expected that of images"):
        step_along(GREY, GREY[:2])
    with pytest.raises(InputError, match=r"scale has shape \(3,\)"):
        step_along(GREY, GREY, torch.ones(3))
    with pytest.raises(InputError, match="members is 1: a pair needs 2 or more"):
        pair(ADDRESS, 1)
