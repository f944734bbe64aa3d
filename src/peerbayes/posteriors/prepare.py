"""Prepare inputs in the type and memory format that networks compute fastest with."""

from __future__ import annotations

import torch
from torch import Tensor

from peerbayes.data.transforms.scaling import to_unit


def prepared(inputs: Tensor) -> Tensor:
    """Return images in [0, 1], channels last, and token numbers unchanged; prepared inputs cost nothing."""
    if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        return inputs  # token numbers
    inputs = to_unit(inputs.float() if inputs.dtype == torch.float64 else inputs)  # the type of NumPy's divisions
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
