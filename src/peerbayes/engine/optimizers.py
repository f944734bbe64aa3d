"""Optimisers of a stage, and its learning rate.

An optimiser is one of `torch.optim.Optimizer` whose steps can be captured in a CUDA graph, and resumed:

- ``step()`` takes no closure. Rates may be tensors on the device that change in place between steps; they are neither
  read on the host nor replaced.
- All state of a parameter is in tensors of the parameter's shape, or scalar ones, counters too. `StageState.moments`
  writes those to checkpoints and nothing else; `StageState.load_state` refuses other shapes.
- State that does not begin with zeros is made in the constructor: an engine tries a step before the first, puts what
  was there back, and zeroes the rest.
- `StageState.mean_gradient` knows running means of gradients by their slots, ``momentum_buffer`` and ``exp_avg``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import Tensor, nn

from peerbayes.engine.ivon import BETA2, Ivon

if TYPE_CHECKING:
    from peerbayes.recipes import settings


def learning_rate(stage: settings.Stage, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step of a stage; a function of the step alone, so nothing has to be resumed.

    Args:
        stage: with optimiser, schedule and warm-up.
        step: since the stage began.
        steps_per_epoch: batches in an epoch.
    """
    base, epoch = stage.optimizer.lr, step / steps_per_epoch
    if stage.warmup and epoch < stage.warmup:
        return base * max(0.01, epoch / stage.warmup)
    if stage.lr_schedule == "cosine":
        done = (epoch - stage.warmup) / max(stage.epochs - stage.warmup, 1e-9)
        return base * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    passed = sum(milestone <= step // steps_per_epoch for milestone in stage.lr_milestones)
    return base * stage.lr_factor**passed


def rates_on_device(device: torch.device) -> bool:
    """Return whether optimisers read their rates from tensors on the device, where a captured step sees them change."""
    return device.type == "cuda"


def make_optimizer(
    options: settings.Optimizer,
    groups: list[dict[str, Any]],
    lr: float | Tensor,
    rhos: Mapping[nn.Parameter, nn.Parameter],
    train_size: int,
) -> torch.optim.Optimizer:
    """Build an optimiser; on a GPU rates are tensors there, so that a captured step sees them change.

    Args:
        options: which one.
        groups: parameters with their rates.
        lr: rate of the first group.
        rhos: ρ of the parameters that are means of Gaussians, for ``ivon``.
        train_size: images in the training split, for ``ivon``.
    """
    if options.name == "ivon":
        return Ivon(
            groups,
            rhos,
            lr=lr,
            ess=options.ess or train_size,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            beta2=options.beta2 or BETA2,
        )
    on_gpu = isinstance(lr, Tensor)
    if options.name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            weight_decay=options.weight_decay,
            fused=on_gpu,
        )
    kind: type[torch.optim.Adam]
    if options.name == "adam":
        kind = torch.optim.Adam
    elif options.name == "adamw":
        kind = torch.optim.AdamW
    else:
        assert_never(options.name)  # type checkers refuse a name that nothing builds
    return kind(groups, lr=lr, weight_decay=options.weight_decay, capturable=on_gpu, fused=on_gpu)
