"""The device of a run, and what records say of the machine."""

from __future__ import annotations

import platform
from typing import Any

import torch

import peerbayes
from peerbayes.errors import InputError, reason


def pick_device(device: str | torch.device) -> torch.device:
    """Return a torch device; ``auto`` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        hint = "; did you mean 'cuda'?" if str(device).startswith("gpu") else ""
        raise InputError(f"device '{device}' can't be used: expected cpu, cuda, cuda:1, ... or auto{hint}") from None
    try:
        torch.ones(2, device=chosen).sum().item()  # some devices have no memory, or can't compute
    except Exception as error:  # backends that are not installed raise many kinds
        raise InputError(f"device '{device}' can't be used: {reason(error)}") from None
    return chosen


def environment(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions, for records."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()} CPU, {threads(torch.get_num_threads())}"
    versions = {"peerbayes": peerbayes.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"hardware": hardware, "versions": versions}


def threads(count: int) -> str:
    """Return a number of threads in words."""
    return f"{count} thread{'s' * (count > 1)}"
