"""Poisson numbers against scipy."""

import numpy as np
import pytest
import scipy.stats
import torch

from peerbayes.data.transforms.batch_noise import poisson


@pytest.mark.parametrize("rate", [0.0, 0.3, 5.0, 15.9, 16.1, 40.0, 120.0, 500.0])
def test_poisson_numbers_are_quantiles(rate):
    uniform = (torch.arange(4000) + 0.5) / 4000
    found = poisson(torch.full_like(uniform, rate), uniform).numpy()
    expected = scipy.stats.poisson.ppf(uniform.double().numpy(), rate)
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 3e-3
