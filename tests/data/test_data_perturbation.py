"""Steps of images: lengths, directions, addresses."""

import math

import pytest
import scipy.stats
import torch
from photographs import photographs

from peerbayes.data.transforms.perturb import gaussian_step, guidance, pair, step_along
from peerbayes.errors import InputError
from peerbayes.math import noise

ADDRESS = noise.Address(7, "data", "corrupt", 3)
GREY = torch.full((40, 3, 32, 32), 0.5)
SIZE = math.sqrt(3 * 32 * 32) / 255


@pytest.fixture(scope="module")
def images():
    return photographs(24)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision_have_the_length_of_large_images(dtype):
    images, gradient = torch.full((1, 3, 320, 320), 0.5), torch.ones(1, 3, 320, 320, dtype=dtype)  # Σ g² above 65504
    torch.testing.assert_close(
        step_along(images, gradient) - images, torch.full_like(images, 1 / 255), rtol=1e-4, atol=0
    )


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
