"""Mixed pairs of images: shares against scipy's Beta, images against their definitions."""

import pytest
import scipy.stats
import torch

from peerbayes.data.transforms.mix import Mixer
from peerbayes.math.noise import Address

WHERE = Address(3, "data", "mix", 7)


def places(count, side=16):
    """Images whose every pixel says in which image, row and column it is."""
    return torch.arange(count * side * side, dtype=torch.float32).view(count, 1, side, side)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_follow_beta(alpha):
    shares = Mixer("mixup", alpha, "cpu")(torch.zeros(20_000, 1, 1, 1), WHERE)[1].double()
    assert 0 <= float(shares.min()) <= float(shares.max()) <= 1
    # Near 1 float32 has few numbers, where a small alpha has much of its mass: so each half by itself, from 0.
    for half in (shares[shares < 0.5], 1 - shares[(shares > 0.5) & (shares < 1)]):
        low, high = (scipy.stats.beta.cdf(end, alpha, alpha) for end in (1e-6, 0.5))
        values = half[half > 1e-6].numpy()
        uniform = (scipy.stats.beta.cdf(values, alpha, alpha) - low) / (high - low)
        assert scipy.stats.kstest(uniform, "uniform").pvalue > 1e-3
        assert scipy.stats.binomtest(len(values), 20_000, high - low).pvalue > 1e-3


def test_mixup_is_the_average_of_both_images_by_their_shares():
    images = torch.rand(6, 3, 4, 4)
    mixed, shares = Mixer("mixup", 1.0, "cpu")(images, WHERE)
    for number in range(6):
        expected = shares[number] * images[number] + (1 - shares[number]) * images[5 - number]
        torch.testing.assert_close(mixed[number], expected)


def test_cutmix_puts_one_box_of_the_other_image_and_counts_its_pixels():
    images = places(400)
    mixed, shares = Mixer("cutmix", 1.0, "cpu")(images, WHERE)
    assert len(shares.unique()) > 50
    for number in range(400):
        mine, theirs = mixed[number] == images[number], mixed[number] == images[399 - number]
        assert (mine ^ theirs).all()  # every pixel is where it was, in one of the two
        assert float(shares[number]) == pytest.approx(float(mine.float().mean()), abs=1e-6)
        rows, columns = theirs[0].any(1).nonzero(), theirs[0].any(0).nonzero()
        if len(rows):
            box = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
            assert int(theirs.sum()) == int(box)


def test_boxes_lie_anywhere():
    mixed, _ = Mixer("cutmix", 1.0, "cpu")(places(2000), WHERE)
    often = (mixed == places(2000).flip(0)).float().mean((0, 1))
    torch.testing.assert_close(often, often.flip(0), atol=0.06, rtol=0)
    torch.testing.assert_close(often, often.T, atol=0.06, rtol=0)
    assert float(often.min()) > 0.1


def test_another_address_mixes_otherwise_and_the_same_one_alike():
    images, mixer = places(8), Mixer("cutmix", 1.0, "cpu")
    first, again, other = (mixer(images, WHERE.at(number))[0] for number in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
