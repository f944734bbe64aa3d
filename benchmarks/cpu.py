"""Speed and memory of a Bayesian ResNet-20 on the CPU, beside bayesian-torch and torch-uncertainty.

Three libraries train the same network (CIFAR shape, 100 classes, a Gaussian for every convolution and linear weight,
prior N(0, 1), rho -3) and make 10-draw predictions with it, each in a process of its own, in many short rounds that
visit them in turn, so that the machine's noise hits all alike. README.md says what is measured and what is not.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes import MeanField, Recipe
from peerbayes.data import ArraySplit, Dataset
from peerbayes.networks import Inputs, build
from peerbayes.training.learner import Learner

OURS, BAYESIAN_TORCH, TORCH_UNCERTAINTY = "peerbayes", "bayesian-torch", "torch-uncertainty"
LIBRARIES = (OURS, BAYESIAN_TORCH, TORCH_UNCERTAINTY)
CIFAR = Inputs(classes=100, shape=(3, 32, 32), mean=(0.507, 0.487, 0.441), std=(0.267, 0.256, 0.276))
RHO = -3.0
LEARNING_RATE = 1e-3
GOALS = {"training": 0.9, "prediction": 0.8, "memory": 1.0}


@dataclass(frozen=True)
class Contender:
    """One library's Bayesian ResNet-20: a training step, and averaged probabilities (B, C) of so many draws."""

    step: Callable[[], None]
    predict: Callable[[Tensor, int], Tensor]


# ---- the contenders --------------------------------------------------------------------------------------------------


def build_peerbayes(images: Tensor, labels: Tensor) -> Contender:
    """The library's own training loop, one step at a time, with its checks and running averages."""
    split = ArraySplit(images, labels)
    data = Dataset("random", split, None, split, CIFAR.classes, None, CIFAR.shape, CIFAR.mean, CIFAR.std)
    recipe = Recipe.model_validate(
        {
            "title": "benchmark",
            "data": {"batch_size": len(images)},
            "peers": [{"name": "peer", "network": "resnet20", "posterior": {"kind": "mean_field"}}],
            "stages": [
                {
                    "epochs": 1,
                    "optimizer": {"name": "adam", "lr": LEARNING_RATE},
                    "terms": {"likelihood": {}, "kl": {"scheme": "layer_mean"}},
                }
            ],
            "gradient_share_every": 0,
        }
    )
    posterior = MeanField(build("resnet20", CIFAR), rho=RHO)
    learner = Learner(recipe, {"peer": posterior}, data, seed=0)

    def step() -> None:
        learner.step()

    def predict(batch: Tensor, draws: int) -> Tensor:
        return posterior.predict(batch, draws).probabilities

    return Contender(step, predict)


def build_bayesian_torch(images: Tensor, labels: Tensor) -> Contender:
    """``dnn_to_bnn`` and the training and testing snippets of its manual (KL: sum over layers of means, over B)."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    network = build("resnet20", CIFAR)
    options = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": RHO,
        "type": "Reparameterization",
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    dnn_to_bnn(network, options)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)

    def step() -> None:
        network.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images), labels) + get_kl_loss(network) / len(images)
        loss.backward()
        optimizer.step()

    def predict(batch: Tensor, draws: int) -> Tensor:
        network.eval()
        with torch.no_grad():
            return torch.stack([network(batch).softmax(-1) for _ in range(draws)]).mean(0)

    return Contender(step, predict)


def build_torch_uncertainty(images: Tensor, labels: Tensor) -> Contender:
    """Its Bayesian layers in the places of the plain ones, its ``ELBOLoss`` (one draw) and ``StochasticModel``."""
    from torch_uncertainty.losses import ELBOLoss
    from torch_uncertainty.methods import StochasticModel

    network = build("resnet20", CIFAR)
    _swap_layers(network)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    elbo = ELBOLoss(network, nn.CrossEntropyLoss(), kl_weight=1 / 50_000, num_samples=1)
    wrapped = StochasticModel(network, num_samples=1)

    def step() -> None:
        wrapped.train()
        optimizer.zero_grad()
        elbo(images, labels).backward()
        optimizer.step()

    def predict(batch: Tensor, draws: int) -> Tensor:
        wrapped.eval()
        wrapped.num_samples = draws
        with torch.no_grad():
            averaged: Tensor = wrapped(batch).unflatten(0, (draws, len(batch))).softmax(-1).mean(0)
        return averaged

    return Contender(step, predict)


def _swap_layers(module: nn.Module) -> None:
    from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear

    prior = {"prior_sigma_1": 1.0, "prior_pi": 1.0, "sigma_init": RHO}
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Conv2d):
            size = (child.in_channels, child.out_channels, child.kernel_size, child.stride, child.padding)
            setattr(module, name, BayesConv2d(*size, bias=child.bias is not None, **prior))
        elif isinstance(child, nn.Linear):
            setattr(module, name, BayesLinear(child.in_features, child.out_features, **prior))
        else:
            _swap_layers(child)


BUILDERS: dict[str, Callable[[Tensor, Tensor], Contender]] = {
    OURS: build_peerbayes,
    BAYESIAN_TORCH: build_bayesian_torch,
    TORCH_UNCERTAINTY: build_torch_uncertainty,
}


def random_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return random float images in [0, 1] and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(size, *CIFAR.shape, generator=generator)
    return images, torch.randint(CIFAR.classes, (size,), generator=generator)


# ---- time ------------------------------------------------------------------------------------------------------------


class Worker:
    """One library in a process of its own, so that none inherits the state of another's heap. It waits to be asked."""

    def __init__(self, name: str, batch: int, arguments: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, __file__, "--worker", f"{name}:{batch}"]
        command += ["--threads", str(arguments.threads), "--draws", str(arguments.draws)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def milliseconds(self, task: str, repeats: int) -> float:
        """Return the mean wall time of a task."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        time.sleep(0.02)  # the threads of the library before still spin for a moment
        print(task, repeats, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.communicate()
        if self.process.returncode:
            raise RuntimeError(f"the worker of {self.name} failed")


def serve(name: str, batch: int, draws: int) -> None:
    """The worker's side: read tasks, answer with milliseconds."""
    images, labels = random_batch(batch)
    contender = BUILDERS[name](images, labels)
    tasks: dict[str, Callable[[], Any]] = {
        "training": contender.step,
        "prediction": partial(contender.predict, images, draws),
    }
    for line in sys.stdin:
        task, repeats = line.split()
        started = time.perf_counter()
        for _ in range(int(repeats)):
            tasks[task]()
        print((time.perf_counter() - started) * 1e3 / int(repeats), flush=True)
    # Last, so that training is timed in a process that has not predicted yet.
    check(name, contender.predict(images, draws), batch)


def check(name: str, probabilities: Tensor, batch: int) -> None:
    """Refuse a contender that does not return averaged probabilities."""
    if probabilities.shape != (batch, CIFAR.classes) or not torch.allclose(probabilities.sum(1), torch.ones(batch)):
        raise RuntimeError(f"{name} did not return probabilities")


def race(workers: dict[str, Worker], task: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Time every library once a round, starting each round with another one. Returns milliseconds by name and round."""
    for worker in workers.values():
        worker.milliseconds(task, 5)  # warm-up
    times: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(workers[name].milliseconds(task, repeats))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians in milliseconds, and our time over each other library's: median and quartiles over rounds."""
    ratios: dict[str, dict[str, Any]] = {}
    for name in times:
        if name != OURS:
            by_round = [ours / theirs for ours, theirs in zip(times[OURS], times[name], strict=True)]
            low, middle, high = statistics.quantiles(by_round, n=4, method="inclusive")
            ratios[name] = {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}
    return {
        "milliseconds": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "ratios": ratios,
        # The larger ratio is the one to the faster library.
        "ratio_to_faster": max(ratio["median"] for ratio in ratios.values()),
    }


def measure_time(batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Race training steps and predictions at one batch size."""
    workers = {name: Worker(name, batch, arguments) for name in LIBRARIES}
    try:
        training = race(workers, "training", arguments.rounds, repeats=max(1, 128 // batch))
        return {
            "training": summary(training),
            "prediction": summary(race(workers, "prediction", arguments.rounds, repeats=1)),
        }
    finally:
        for worker in workers.values():
            worker.close()


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_of(name: str, kind: str, batch: int, threads: int) -> float:
    """Return what three training steps need in a fresh process, in MiB at the peak: ``resident`` or ``tensors``."""
    command = [sys.executable, __file__, "--memory-of", f"{name}:{kind}:{batch}", "--threads", str(threads)]
    # A fixed threshold: otherwise glibc learns to keep freed blocks, by chance more or fewer of them.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(result.stdout.splitlines()[-1])


def memory_in_this_process(request: str) -> float:
    """Build one contender and let it step; what counts starts before it is built. Returns MiB."""
    name, kind, batch = request.split(":")
    images, labels = random_batch(int(batch))
    BUILDERS[name](images, labels).step()  # imports and the kernels that torch generates
    gc.collect()

    def work() -> None:
        contender = BUILDERS[name](images, labels)
        for _ in range(3):
            contender.step()

    return (_resident_peak(work) if kind == "resident" else _tensor_peak(work)) / 2**20


def _resident_peak(work: Callable[[], None]) -> float:
    """Growth of the peak resident size; on Linux the peak is reset before, elsewhere it is the process's own."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        work()
        return _status("VmHWM") - before
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _tensor_peak(work: Callable[[], None]) -> float:
    """The most bytes of tensors alive at once, as torch's CPU allocator reports them to its profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return float(max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"))


def measure_memory(batch: int, processes: int, threads: int) -> dict[str, Any]:
    """Return peaks in MiB, and ours over the smaller of the others. Resident: the median over fresh processes."""
    peaks: dict[str, Any] = {}
    for kind, count in (("resident", processes), ("tensors", 1)):
        runs = {name: [memory_of(name, kind, batch, threads) for _ in range(count)] for name in LIBRARIES}
        by_name = {name: round(statistics.median(values), 2) for name, values in runs.items()}
        smaller = min(by_name[name] for name in LIBRARIES if name != OURS)
        peaks[f"{kind}_mib"] = by_name
        peaks[f"{kind}_ratio_to_smaller"] = round(by_name[OURS] / smaller, 4)
    return peaks


# ---- the report ------------------------------------------------------------------------------------------------------


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader must know to repeat the measurement."""
    return {
        "benchmark": "cpu",
        "network": "resnet20, 3x32x32, 100 classes, Gaussian weights, prior N(0, 1), float32, Adam",
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", *LIBRARIES)},
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "draws": arguments.draws,
        "quick": arguments.quick,
        "date": time.strftime("%Y-%m-%d"),
        "goals": GOALS,
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    head = ["", *LIBRARIES, "ours / faster", "quartiles", "goal"]
    rows = []
    for batch, figures in results["batches"].items():
        for what in ("training", "prediction"):
            part = figures[what]
            closest = max(part["ratios"].values(), key=lambda ratio: ratio["median"])
            times = [f"{part['milliseconds'][name]:.1f} ms" for name in LIBRARIES]
            spread = "{:.3f} to {:.3f}".format(*closest["quartiles"])
            rows.append([f"{what}, batch {batch}", *times, f"{closest['median']:.3f}", spread, f"≤ {GOALS[what]}"])
        for kind in ("resident", "tensors"):
            part = figures["memory"]
            sizes = [f"{part[f'{kind}_mib'][name]:.1f} MiB" for name in LIBRARIES]
            ratio = f"{part[f'{kind}_ratio_to_smaller']:.3f}"
            rows.append([f"peak {kind}, batch {batch}", *sizes, ratio, "", f"≤ {GOALS['memory']}"])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows]]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="rounds a batch size and task (default 30; 5 with --quick)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draws", type=int, default=10, help="draws of a prediction")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--quick", action="store_true", help="few rounds, one memory process a library")
    parser.add_argument("--out", type=Path, default=Path("results/bench-cpu.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (5 if arguments.quick else 30)
    return arguments


def main() -> None:
    """Measure, print a table and write the JSON file."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    if arguments.worker:
        name, batch = arguments.worker.split(":")
        serve(name, int(batch), arguments.draws)
        return
    if arguments.memory_of:
        print(memory_in_this_process(arguments.memory_of))
        return
    results = about(arguments) | {"batches": {}}
    for batch in arguments.batch:
        print(f"batch {batch}: time, then memory ...", file=sys.stderr, flush=True)
        figures = measure_time(batch, arguments)
        figures["memory"] = measure_memory(batch, 1 if arguments.quick else 3, arguments.threads)
        results["batches"][str(batch)] = figures
    print(table(results))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
