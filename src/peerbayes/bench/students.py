"""Time distillation: steps of students, and predictions of their members."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from peerbayes import networks
from peerbayes.bench.timing import PREDICTED, Bench, Cohorts, Measured
from peerbayes.engine.teachers import Teachers
from peerbayes.posteriors.rank_one import RankOne
from peerbayes.recipes.recipe import load_recipe
from peerbayes.recipes.recipe_data import network_inputs
from peerbayes.runs.building import build_peer

STUDENTS = ("kd", "latentbe", "latentbe-tdiv-sdiv")  # recipes of distillation, cheapest first
MEMBERS = ("average", "members", "tiled")  # how a rank-one student predicts: one network, each member, all at once


def steps(bench: Bench) -> Measured:
    """Time steps of one student of four untrained teachers, by recipe, in turn."""
    build = partial(build_peer, data=bench.data, seed=0, device=bench.device)
    cohorts: dict[str, Cohorts] = {}
    teachers: Teachers | None = None
    changes = [f"data.batch_size={bench.plan.batch}", "data.classes=100", f"peers.0.network={bench.plan.student}"]
    changes += ["evaluation.keep=last", "gradient_share_every=0"]
    for name in STUDENTS:
        recipe = load_recipe(f"distillation/cifar10-wrn28x1-{name}-de4", changes)
        if teachers is None:
            like = [recipe.peers[0].model_copy(update={"name": f"teacher{number}"}) for number in range(4)]
            teachers = Teachers([build(peer) for peer in like])
        cohorts[f"distillation.{name.replace('-', '_')}_step_ms"] = Cohorts(
            bench, recipe, bench.plan.engine, teachers=teachers
        )
    return bench.steps(cohorts)


def predictions(bench: Bench) -> Measured:
    """Time predictions of a rank-one student: of its average, of its members in turn, and of all in one pass."""
    images = bench.data.train.batch(torch.arange(bench.plan.predicted), bench.device)[0]
    network, half = networks.build(bench.plan.student, network_inputs(bench.data)), torch.float16

    def tiled(student: RankOne) -> None:
        with torch.no_grad(), torch.autocast(bench.device.type, half, enabled=bench.on_gpu):
            for part in images.split(max(1, 2500 // student.members)):
                student.forward_members(part)

    ways: dict[str, Callable[[], Any]] = {}
    for way in MEMBERS:
        student = RankOne(network, 4, predicts="average" if way == "average" else "members").to(bench.device).eval()
        call = partial(tiled, student) if way == "tiled" else partial(student.predict, images, 4)
        ways[f"distillation.predict_{way}_s"] = call
    return bench.calls(PREDICTED / bench.plan.predicted, ways, images=len(images))
