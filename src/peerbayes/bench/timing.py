"""Time functions on a device with random data; how much is timed depends on the machine."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from peerbayes.choices import EngineName
from peerbayes.data.dataset import Dataset
from peerbayes.data.splits import ArraySplit
from peerbayes.engine.teachers import Teachers
from peerbayes.errors import InputError
from peerbayes.inference import prediction
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.recipe import Recipe, load_recipe
from peerbayes.runs.building import build_peer
from peerbayes.training.learner import Learner
from peerbayes.training.reporters import Reporter

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


Measured = dict[str, dict[str, Any]]
KIBS = 2**30 if sys.platform == "darwin" else 2**20  # units of ru_maxrss in a GiB


class _Strict(Reporter):
    """Turn warnings into errors, so that an engine's fallback is not timed under its name."""

    def warn(self, text: str) -> None:
        raise RuntimeError(text)


class Cohorts:
    """Cohorts of a recipe, warmed up, that step in turn; ``setup_s`` is the time until their first step.

    Args:
        bench: the machine, the data and the plan.
        recipe: of the cohorts.
        engine: of their steps.
        count: of the cohorts.
        teachers: of all cohorts.
        peer: a posterior for every peer; by default those of the recipe.
    """

    def __init__(
        self,
        bench: Bench,
        recipe: Recipe,
        engine: EngineName,
        count: int = 1,
        teachers: Teachers | None = None,
        peer: Posterior | None = None,
    ) -> None:
        began = time.perf_counter()
        how: dict[str, Any] = {"reporter": _Strict(), "engine": engine, "autocast": bench.autocast}
        how["teachers"] = teachers
        self.learners = []
        for seed in range(count):
            build = partial(build_peer, data=bench.data, seed=seed, device=bench.device)
            peers = {p.name: build(p) if peer is None else peer for p in recipe.peers}
            self.learners.append(Learner(recipe, peers, bench.data, seed, **how))
        self._running = [learner.steps() for learner in self.learners]
        for learner, running in zip(self.learners, self._running, strict=True):
            with learner.engine.running():
                next(running)  # compiles, captures
        bench.wait()
        self.setup_s = time.perf_counter() - began
        self.step(bench.plan.warm_up)

    def step(self, count: int) -> None:
        """Train every cohort for ``count`` steps."""
        for _ in range(count):
            for learner in self.learners:
                with learner.engine.running():
                    learner.step()


class Bench:
    """A device, random data, and functions that time.

    Args:
        device: where to measure.
        plan: the amount to time.
    """

    def __init__(self, device: torch.device, plan: Workload) -> None:
        self.device, self.plan, self.on_gpu = device, plan, device.type == "cuda"
        self.autocast = torch.bfloat16 if plan.precision == "bfloat16" else None
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (plan.images, 3, 32, 32), dtype=torch.uint8, generator=generator)
        split = ArraySplit(images, torch.randint(0, 100, (plan.images,), generator=generator))
        self.data = Dataset("random", split, None, split, 100, None, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], Any]) -> float:
        """Return the wall time of a call, including its work on the device."""
        self.wait()
        began = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - began

    def forget_memory(self) -> None:
        """Free unused memory, and restart the count of the device's peak memory."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def most_memory(self) -> dict[str, float]:
        """Return the GPU's peak memory since `forget_memory`; without a GPU the process's peak memory."""
        if not self.on_gpu:
            if os.name != "posix":
                return {}
            import resource

            return {"peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIBS}
        allocated, reserved = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return {"peak_memory_gib": allocated / 2**30, "peak_reserved_gib": reserved / 2**30}

    def times(self, scale: float, functions: Mapping[str, Callable[[], Any]]) -> Measured:
        """Time functions in turn, in rounds, and return their measurements.

        Args:
            scale: factor of the seconds.
            functions: by key.
        """
        rounds = [[self.seconds(function) * scale for function in functions.values()] for _ in range(self.plan.repeats)]
        return {
            name: {"median": statistics.median(values), "spread": [min(values), max(values)], "repeats": len(values)}
            for name, values in zip(functions, zip(*rounds, strict=True), strict=True)
        }

    def calls(self, scale: float, calls: Mapping[str, Callable[[], Any]], **about: Any) -> Measured:
        """Time calls in turn, each after a warm-up call.

        Args:
            scale: factor of the seconds.
            calls: by key.
            about: further entries of the measurements.
        """
        setup = {key: self.seconds(call) for key, call in calls.items()}
        timed = self.times(scale, calls)
        return {key: figures | {"setup_s": setup[key], **about} for key, figures in timed.items()}

    def steps(self, cohorts: Mapping[str, Cohorts]) -> Measured:
        """Time ``some`` training steps of cohorts by key, in turn, in milliseconds a step."""
        count = self.plan.some
        timed = self.times(1e3 / count, {key: partial(cohort.step, count) for key, cohort in cohorts.items()})
        return {key: figures | {"setup_s": cohorts[key].setup_s, "steps": count} for key, figures in timed.items()}

    def recipe(self, method: str, peers: int = 2, network: str = "", point: bool = False, terms: str = "") -> Recipe:
        """Return the first stage of a CIFAR-100 recipe, or some of its terms, for equal peers from scratch.

        Args:
            method: of the recipe.
            peers: number of peers.
            network: of the peers; by default the plan's first.
            point: whether the peers are points.
            terms: names of the terms to keep; all by default.
        """
        table = load_recipe(f"mutual/cifar100-resnet20-{method}").model_dump(exclude_none=True)
        posterior = {"kind": "point"} if point else table["peers"][0]["posterior"]
        peer = {"network": network or self.plan.networks[0], "posterior": posterior}
        table["peers"] = [peer | {"name": f"peer{n}"} for n in range(peers)]
        table["stages"] = [stage := table["stages"][0]]
        stage["terms"] = {name: stage["terms"][name] for name in terms.split() or stage["terms"]}
        table["data"]["batch_size"] = self.plan.batch
        return Recipe.parse(table | {"gradient_share_every": 0}, "the benchmark")

    def epochs(self, steps: int, engine: EngineName, recipes: Mapping[str, Recipe], count: int = 1) -> Measured:
        """Time epochs of cohorts by key, in turn, with their memory on a GPU.

        Args:
            steps: that are timed, and scaled to an epoch.
            engine: that runs them.
            recipes: by key.
            count: cohorts of each that step side by side.
        """
        self.forget_memory()
        whole = EPOCH // self.plan.batch
        about: dict[str, Any] = {"engine": engine, "precision": self.plan.precision, "steps": steps, "scaled_to": whole}
        cohorts = {key: Cohorts(self, recipe, engine, count) for key, recipe in recipes.items()}
        timed = self.times(whole / steps, {key: partial(cohort.step, steps) for key, cohort in cohorts.items()})
        if self.on_gpu:
            about |= self.most_memory()
        return {key: figures | about | {"setup_s": cohorts[key].setup_s} for key, figures in timed.items()}

    def predictions(self, key: str, count: int, draws: int, scale: float, most: int = -1, **options: Any) -> Measured:
        """Time predictions, after one that warms up.

        Args:
            key: of the measurement.
            count: images.
            draws: networks.
            scale: factor of the seconds.
            most: stands in for `TOGETHER`, if it is not negative.
            options: of `Posterior.predict`.
        """
        images = self.data.train.batch(torch.arange(count), self.device)[0]
        recipe = self.recipe("vanilla", 1)
        posterior = build_peer(recipe.peers[0], self.data, 0, self.device)
        predict = partial(posterior.predict, images, draws, **options)
        kind, before = self.device.type, dict(prediction.TOGETHER)
        prediction.TOGETHER[kind] = most if most >= 0 else before[kind]
        try:
            return self.calls(scale, {key: predict}, images=count, draws=draws, **options)
        finally:
            prediction.TOGETHER.update(before)


def sentence(error: BaseException) -> str:
    """Return the class and the first line of an exception."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
