"""Optimisers of a stage: which rate each parameter gets, by the path of CPUs and by that of GPUs."""

import pytest
import torch
from torch import nn

from peerbayes.engine import stages
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField
from peerbayes.recipes import settings

LR, SCALE_LR = 0.5, 0.02
PATHS = [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)]


def moved(optimizer, device, rates):
    """Return how far means, scales and the others move at each of the rates, where every gradient is 1."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    posterior = MeanField(network, rho=-2.0, name="a").to(device)
    stage = settings.Stage(epochs=1, optimizer=optimizer, terms={"likelihood": {}})
    state = stages.StageState(stage, {"a": posterior}, {"a": None}, Address(0))
    steps = []
    for rate in rates:
        before = {name: parameter.detach().clone() for name, parameter in state.parameters["a"].items()}
        for parameter in posterior.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.set_learning_rate(rate)
        state.update(["a"])
        steps.append({name: before[name] - value.detach() for name, value in state.parameters["a"].items()})
    return steps


@pytest.mark.parametrize(("device", "on_device"), PATHS)
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("scale_lr", [None, SCALE_LR])
def test_scales_keep_the_ratio_of_their_rate_at_every_step(name, scale_lr, device, on_device, monkeypatch):
    """Plain SGD moves by rate · gradient, Adam's steps with a constant gradient are the rate itself."""
    monkeypatch.setattr(stages, "rates_on_device", lambda _device: on_device)  # rates in tensors work on a CPU, too
    optimizer = {"name": name, "lr": LR, "scale_lr": scale_lr, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    rates = [LR, 0.1, 0.04, 0.04]
    for rate, distances in zip(rates, moved(optimizer, device, rates), strict=True):
        assert set(distances) == {"mean", "rho", "rest"}
        for parameter, distance in distances.items():
            expected = rate * (SCALE_LR / LR if scale_lr and parameter == "rho" else 1.0)
            torch.testing.assert_close(distance, torch.full_like(distance, expected), rtol=1e-4, atol=1e-6)
