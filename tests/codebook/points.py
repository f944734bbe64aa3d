"""Points in the plane of (mean, deviation), for tests."""

import torch


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(count, spread, seed=0):
    """(μ, σ) of weights: μ ~ N(0, 0.05²) within ±0.2, σ around 1e-3."""
    mean = 0.05 * normal(2 * count, seed=seed)
    return torch.stack([mean[mean.abs() < 0.2][:count], 1e-3 + spread * normal(count, seed=seed + 1)], 1)
