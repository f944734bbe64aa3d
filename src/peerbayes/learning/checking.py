"""Looking before anything is written: everything that can be wrong with a job is found in seconds, not after hours."""

from __future__ import annotations

from pathlib import Path

import torch

from peerbayes.data import Dataset, load_outside
from peerbayes.errors import InputError
from peerbayes.learning.building import build_peers, build_teachers
from peerbayes.learning.distribution import World
from peerbayes.learning.loop import Learner
from peerbayes.learning.recipe import Recipe
from peerbayes.learning.sources import Job, rehearsed


def check_outside(recipe: Recipe, data: Dataset, root: str | Path | None) -> None:
    """Refuse out-of-distribution sets that are not there, or that do not have the form of the data."""
    for name in recipe.evaluation.out_of_distribution:
        try:
            load_outside(name, data, root)
        except InputError as error:
            raise InputError(f"evaluation.out_of_distribution: {error}") from None


def check(job: Job, data: Dataset, device: torch.device, root: str | Path | None, world: World) -> None:
    """Send one small batch through every term of every stage of a job; what is not trained yet has a stand-in.

    Args:
        job: with its teachers' settings filled in.
        data: its data.
        device: where it will be trained.
        root: data root, for out-of-distribution sets.
        world: the processes that will share each batch.
    """
    check_outside(job.recipe, data, root)
    taught = build_teachers(job, data, device)
    trial = rehearsed(job)
    peers = build_peers(trial, data, device)
    Learner(trial.recipe, peers, data, job.seed, engine="eager", world=world, teachers=taught).feed.close()
