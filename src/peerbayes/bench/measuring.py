"""Run the benchmark in order, and write its record."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peerbayes import networks
from peerbayes.bench import students, theirs
from peerbayes.bench.codebooks import FIELD, LEARNING, VIT, SharedWeights
from peerbayes.bench.ratios import NEEDS_GPU, RATIOS, figures_of, needed
from peerbayes.bench.timing import CPU, DRAWS, PACKED, PREDICTED, QUICK, THEIRS, Bench, Measured, Workload, sentence
from peerbayes.choices import EngineName
from peerbayes.codebook.shared import SAMPLINGS
from peerbayes.engine.processes import environment, pick_device
from peerbayes.errors import InputError
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe_data import network_inputs
from peerbayes.runs.run import read_json
from peerbayes.training.reporters import Reporter

Measurement = tuple[tuple[str, ...], bool, Callable[[], Measured]]  # keys, whether a GPU is needed, and the function


def measurements(bench: Bench) -> list[Measurement]:
    """Return the timings to make, the headlines first."""
    plan, planned = bench.plan, list[Measurement]()

    def epochs(
        key: str, method: str, steps: int, engine: EngineName = plan.engine, count: int = 1, **options: Any
    ) -> None:
        gpu = engine == "compiled" or count > 1
        planned.append(
            ((key,), gpu, lambda: bench.epochs(steps, engine, {key: bench.recipe(method, **options)}, count))
        )

    def predictions(key: str, *arguments: Any, **options: Any) -> None:
        planned.append(((key,), "precision" in options, partial(bench.predictions, key, *arguments, **options)))

    def point_and_bayesian() -> Measured:
        point = bench.recipe("dml", point=True, terms="likelihood mutual")
        pairs = zip(RATIOS["bayesian_over_deterministic"], (bench.recipe("dml"), point), strict=True)
        return bench.epochs(plan.steps, plan.engine, dict(pairs))

    def loop_and_vmap(count: int) -> Measured:
        key = f"growth.small_batch.{count}"
        ways = [bench.predictions(key, count, plan.draws, 1e3, most=most)[key] for most in (0, 1 << 62)]
        return {key: {name: [way[name] for way in ways] for name in ways[0]}}

    epochs("pair_epoch_s", "ours", plan.steps)
    epochs("packed3_epoch_s", "ours", plan.steps, count=PACKED)
    planned.append((RATIOS["bayesian_over_deterministic"], False, point_and_bayesian))
    planned.append((("single_step_ms", *THEIRS), False, partial(theirs.steps, bench)))
    images = PREDICTED / plan.predicted
    whole = plan.predicted, plan.draws, images * DRAWS / plan.draws
    predictions("predict_50x10k_s", *whole)
    predictions("predict_float32_50x10k_s", *whole, precision="float32")
    epochs("eager_pair_epoch_s", "ours", plan.few, "eager")
    epochs("compiled_pair_epoch_s", "ours", plan.few, "compiled")
    weights = SharedWeights(bench, *plan.shared)
    trained = weights if plan.trained == plan.shared else SharedWeights(bench, *plan.trained)
    by_kind: dict[str, tuple[Callable[[], Measured], Sequence[str]]] = {
        "distillation.{}_step_ms": (partial(students.steps, bench), [s.replace("-", "_") for s in students.STUDENTS]),
        "distillation.predict_{}_s": (partial(students.predictions, bench), students.MEMBERS),
        "sharing.clustering_s": (weights.clustering, [""]),
        VIT: (weights.clustering_vit, [""]),
        "sharing.{}_draw_ms": (weights.draws, [FIELD, *SAMPLINGS]),
        "sharing.{}_step_ms": (trained.steps, list(LEARNING)),
        "sharing.predict_{}_s": (trained.predictions, ["point", FIELD, *SAMPLINGS]),
    }
    for name, (measure, kinds) in by_kind.items():
        planned.append((tuple(name.format(kind) for kind in kinds), False, measure))
    for network in plan.networks:
        epochs(f"growth.network.{network}", "ours", plan.some, network=network)
    for peers in plan.peers:
        epochs(f"growth.peers.{peers}", "dml", plan.some, peers=peers)
    for draws in plan.growing:
        predictions(f"growth.draws.{draws}", plan.predicted, draws, images)
    for count in plan.small:
        planned.append(((f"growth.small_batch.{count}",), False, partial(loop_and_vmap, count)))
    return planned


def run(
    device: str,
    out: Path | None,
    only: Sequence[str],
    quick: bool,
    budget: float | None,
    reporter: Reporter,
    student: str | None = None,
) -> tuple[dict[str, Any], Path]:
    """Measure, and write the record after every measurement.

    Args:
        device: where to measure; ``auto`` prefers a GPU.
        out: the record; by default ``results/bench-MACHINE.json``.
        only: figures to measure; others in the file are kept if hardware, versions and settings are the same.
        quick: smoke test: a few steps of every measurement.
        budget: seconds after which no measurement starts.
        reporter: of each figure.
        student: another network for the students and teachers of distillation.

    Returns:
        The record, and its path.
    """
    if budget is not None and not budget > 0:
        raise InputError(f"--budget {budget:g}: nothing would be measured; expected seconds above 0")
    began, target = time.perf_counter(), pick_device(device)
    default = Workload() if target.type == "cuda" else CPU
    plan = replace(QUICK, engine=default.engine, precision=default.precision) if quick else default
    bench = Bench(target, plan if student is None else replace(plan, student=student))
    if student is not None:
        with torch.random.fork_rng([]):
            networks.build(student, network_inputs(bench.data))  # fail now if it cannot be built
    todo = measurements(bench)
    keys = [key for names, _, _ in todo for key in names]
    requested = {key for name in only for key in needed(name, keys)} if only else set(keys)
    about = environment(target) | {"settings": json.loads(json.dumps(asdict(bench.plan)))}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        about["versions"]["bayesian-torch"] = importlib.metadata.version("bayesian-torch")
    name = (about["hardware"] if bench.on_gpu else platform.machine()) + (f"-{student}" if student else "")
    name = re.sub("[^a-z0-9]+", "-", name.lower()).removeprefix("nvidia-")
    path = out or Path("results") / f"bench-{name}{'-quick' if quick else ''}.json"
    before = read_json(path) if only and path.is_file() else {}
    measured: Measured = before["measurements"] if _same(before, about) else {}

    def write() -> dict[str, Any]:
        setup = {key: figures["setup_s"] for key, figures in measured.items() if "setup_s" in figures}
        record = about | {"seconds": round(time.perf_counter() - began, 1)}
        record |= figures_of(keys, measured, bench.plan.batch) | {"setup_s": setup, "measurements": measured}
        storage.write_bytes(path, (json.dumps(record, indent=1) + "\n").encode())
        return record

    record: dict[str, Any] = {}
    for names, needs_gpu, measure in todo:
        if not requested.intersection(names):
            continue
        late = budget is not None and time.perf_counter() - began >= budget
        try:
            if late or (needs_gpu and not bench.on_gpu):
                raise InputError(f"left out: the {budget:g} s were used up" if late else NEEDS_GPU)
            if VIT in names and VIT not in only and bench.plan.vit_width == Workload.vit_width and not bench.on_gpu:
                raise InputError(f"left out: slow on a CPU; measure it with --only {VIT}")
            with torch.random.fork_rng([target] if bench.on_gpu else []):
                result = measure()
        except Exception as error:  # other measurements continue
            result = {key: {"failed": sentence(error)} for key in names}
        measured |= result
        record = write()
        for key in names:
            reporter.headline(
                f"{record['seconds']:7.1f} s  {key} {result[key].get('median', result[key].get('failed'))}"
            )
    return record, path


def _same(before: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Return whether a record was made under the same conditions; settings that it lacks are ignored."""
    settings_before = before.get("settings", {})
    settings = {key: value for key, value in about["settings"].items() if key in settings_before}
    return all(before.get(key) == value for key, value in {**about, "settings": settings}.items())
