"""Define the amount of timing by machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerbayes.choices import EngineName


THEIRS = ("bayesian_torch_float32_step_ms", "bayesian_torch_bfloat16_step_ms")  # figures of bayesian-torch
EPOCH, PREDICTED, DRAWS, PACKED = 50_000, 10_000, 50, 3  # images; images and draws predicted; pairs side by side


@dataclass(frozen=True)
class Workload:
    """Amount that is timed; an epoch is scaled from ``steps`` of a pair, ``some`` (growth) or ``few`` (slow)."""

    engine: EngineName = "captured"
    precision: str = "bfloat16"
    images: int = EPOCH
    batch: int = 128
    warm_up: int = 20
    steps: int = 390
    some: int = 100
    few: int = 30
    repeats: int = 3
    predicted: int = PREDICTED
    draws: int = DRAWS
    growing: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    small: tuple[int, ...] = (1, 8, 32, 128, 512)
    networks: tuple[str, ...] = ("resnet20", "resnet32", "resnet56")  # the first one wherever nothing grows
    peers: tuple[int, ...] = (2, 4, 8)
    student: str = "wrn28x1"  # of four teachers like it
    shared: tuple[str, int] = ("resnet18", 6000)  # network and components, at first: clustering and draws
    trained: tuple[str, int] = ("resnet18", 6000)  # and those of steps and predictions
    vit_width: int = 768  # of a ViT-B/16, whose 86 million weights are clustered


CPU = Workload("eager", "float32", 4096, 32, 1, 3, 3, 3, 3, 256, 10, (1, 2, 4, 8, 16), (1, 8, 32))
CPU = replace(CPU, trained=("resnet20", 500))
QUICK = Workload("eager", "float32", 64, 4, 1, 1, 1, 1, 2, 4, 2, (1, 2), (1, 2), ("resnet8",), (2,), "resnet8")
QUICK = replace(QUICK, shared=("resnet8", 20), trained=("resnet8", 20), vit_width=8)
