"""Time training steps of one Bayesian network, ours and bayesian-torch's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from peerbayes import networks
from peerbayes.bench.timing import THEIRS, Bench, Cohorts, Measured, sentence
from peerbayes.recipes.recipe_data import network_inputs


def steps(bench: Bench) -> Measured:
    """Time steps of one Bayesian ResNet-20 alone, ours and bayesian-torch's, in turn."""
    count, ours = bench.plan.some, Cohorts(bench, bench.recipe("dml", 1, terms="likelihood kl"), bench.plan.engine)
    ways: dict[str, Callable[[int], None]] = {"single_step_ms": ours.step}
    about: Measured = {"single_step_ms": {"setup_s": ours.setup_s, "images": "gathered and augmented"}}
    for key, precision in ((THEIRS[0], None), (THEIRS[1], torch.bfloat16)):
        try:
            step = _their_steps(bench, precision)
            setup = bench.seconds(partial(step, bench.plan.warm_up))
        except Exception as error:  # a failure of theirs must not stop ours
            about[key] = {"failed": sentence(error)}
        else:
            ways[key] = step
            about[key] = {"setup_s": setup, "images": "one batch on the device, not augmented"}
    timed = bench.times(1e3 / count, {key: partial(step, count) for key, step in ways.items()})
    return {key: timed.get(key, {}) | notes | {"steps": count} for key, notes in about.items()}


def _their_steps(bench: Bench, precision: torch.dtype | None) -> Callable[[int], None]:
    """Return the loop of bayesian-torch's manual, for its ``dnn_to_bnn`` of our ResNet-20; cuDNN tries kernels."""
    room = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
    network = networks.build(bench.plan.networks[0], network_inputs(bench.data))
    options = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    room.dnn_to_bnn(network, options | {"type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    network.to(bench.device).train()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    images, labels = bench.data.train.batch(torch.arange(bench.plan.batch), bench.device)
    images = images.float() / 255

    def step(count: int) -> None:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            for _ in range(count):
                optimizer.zero_grad()
                with torch.autocast(bench.device.type, precision, enabled=precision is not None):
                    logits = network(images)
                (F.cross_entropy(logits.float(), labels) + room.get_kl_loss(network) / len(images)).backward()
                optimizer.step()

    return step
