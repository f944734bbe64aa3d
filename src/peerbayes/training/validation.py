"""Looks at the peers at the end of an epoch, and the best that they have shown."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from peerbayes import metrics
from peerbayes.data.dataset import Dataset
from peerbayes.engine.diagnostics import Position
from peerbayes.engine.perturbation import Perturbation
from peerbayes.engine.processes import World
from peerbayes.errors import InputError, TrainingError
from peerbayes.inference.prediction import predict_split
from peerbayes.math.noise import Address, permutation
from peerbayes.networks.inputs import to_unit
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.recipe import Recipe

DRAWS = 4  # of a prediction at the end of an epoch
MOVED = 128  # images, at most, whose step is looked at; no more than a batch, for which there is memory
MOVES = 20  # looks at such a step in a run, at most: one costs as much as a hundred captured steps


class EpochEvaluator:
    """Judges peers while they learn, and keeps a copy of each at its best epoch, where the recipe wants that.

    Args:
        recipe: when to look at the test split, and whether the best epoch is kept.
        peers: posteriors by name.
        data: with the splits to look at.
        seed: the run's seed.
        world: the processes, of which the first one looks.
    """

    def __init__(self, recipe: Recipe, peers: Mapping[str, Posterior], data: Dataset, seed: int, world: World) -> None:
        if recipe.evaluation.keep == "best" and data.validation is None:
            raise InputError("evaluation.keep = 'best' needs a validation split; set data.validation")
        self.recipe, self.peers, self.data, self.seed, self.world = recipe, peers, data, seed, world
        self.best: dict[str, dict[str, Tensor]] = {}  # of each peer at its best epoch of this stage

    def judge(self, peer: str, step: int, epoch: int, kept: str = "") -> dict[str, float]:
        """Return accuracy and NLL on the validation split and, where that is asked for, on the test split.

        ``kept`` is what an error says of checkpoints.

        Args:
            peer: its name.
            step: since the run began, for messages.
            epoch: of the run; some evaluate the test split, too.
            kept: what an error says of checkpoints.
        """
        splits = {"valid": self.data.validation, "test": self.data.test if self._tests_at(epoch) else None}
        figures = {}
        for kind, split in splits.items():
            if split is None:
                continue
            first, bad = self.world.is_first, False
            if first:
                draws = max(DRAWS, self.peers[peer].members)
                log_p, labels = predict_split(self.peers[peer], split, draws, seed=self.seed, name=peer)[:2]
                bad = bool(log_p.isnan().any())
            if self.world.any(bad):  # all give up together
                raise TrainingError(
                    f"predictions of peer '{peer}' became nan at step {step} (epoch {epoch}){kept}: lower the learning "
                    "rate"
                )
            if first:
                figures[f"{kind}_accuracy"] = metrics.accuracy(log_p.exp(), labels)
                figures[f"{kind}_nll"] = metrics.nll_from_log(log_p, labels)
        return figures

    def perturbed(
        self, peer: str, perturb: Perturbation, step: int, epoch: int, autocast: torch.dtype | None
    ) -> dict[str, float]:
        """Return what a step of images does to how far apart teachers, and a peer's members, are; by the first process.

        For training images that are not augmented, and always the same ones; see `Perturbation.effect`. In about 20
        epochs of a run, evenly spaced, with the last one.

        Args:
            peer: its name.
            perturb: the step of images.
            step: since the run began; the address of random choices.
            epoch: of the run.
            autocast: dtype of forward passes; None for float32.
        """
        if not self.world.is_first or (epoch % math.ceil(self.recipe.epochs / MOVES) and epoch != self.recipe.epochs):
            return {}
        return perturb.effect(self._images, step, self.peers[peer], autocast)

    @functools.cached_property
    def _images(self) -> Tensor:
        chosen = permutation(Address(self.seed, "data", "perturbed"), len(self.data.train))
        count, device = min(MOVED, self.recipe.data.batch_size), next(iter(self.peers.values())).device
        return to_unit(self.data.train.batch(chosen[:count], device)[0])

    def _tests_at(self, epoch: int) -> bool:
        options = self.recipe.evaluation
        due = options.test_every > 0 and epoch % options.test_every == 0
        return due or epoch > self.recipe.epochs - options.last_epochs

    def keep(self, peer: str, line: Mapping[str, float], position: Position) -> None:
        """Copy a peer that was never better in this stage than ``line`` says.

        Args:
            peer: its name.
            line: the epoch's figures.
            position: of the run; holds the best accuracies of the stage.
        """
        if self.recipe.evaluation.keep != "best" or "valid_accuracy" not in line:
            return
        if line["valid_accuracy"] >= position.best.get(peer, -math.inf):
            position.best[peer] = line["valid_accuracy"]
            self.best[peer] = {name: tensor.detach().clone() for name, tensor in self.peers[peer].state().items()}

    def take_best(self) -> None:
        """Put every peer back to its best epoch, where the recipe wants that. There is no going on from there."""
        for peer, tensors in self.best.items():
            self.peers[peer].load_state(tensors, f"the best epoch of peer '{peer}'")
