"""Time shared weights against a mean-field posterior: making a codebook, draws, steps and predictions."""

from __future__ import annotations

import copy
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from peerbayes import networks
from peerbayes.bench.timing import PREDICTED, Bench, Cohorts, Measured
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.build import Sharing, share, shared_weights
from peerbayes.codebook.shared import SAMPLINGS, Shared
from peerbayes.math.noise import Address, normal
from peerbayes.posteriors.base import Point, Posterior
from peerbayes.posteriors.mean_field import MeanField
from peerbayes.recipes.recipe import load_recipe
from peerbayes.recipes.recipe_data import network_inputs

VIT = "sharing.clustering_vit_s"
FIELD = "mean_field"  # Bayes by Backprop, the reference for shared weights
LEARNING = {"point": "dnn", FIELD: "stage1", **dict.fromkeys(("hierarchical", "moment", "cluster"), "shared")}


def vit_weights(wide: int = 768) -> nn.Module:
    """Return the convolution and linear layers of a ViT-B/16 for ImageNet, as they start, one after another."""
    sides = [(wide, 3 * wide), (wide, wide), (wide, 4 * wide), (4 * wide, wide)] * 12
    layers = nn.Sequential(nn.Conv2d(3, wide, 16, 16), *(nn.Linear(*side) for side in sides), nn.Linear(wide, 1000))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
    return layers


class SharedWeights:
    """Timings of a mean-field posterior and its codebook.

    Args:
        bench: the machine, the data and the plan.
        network: to share the weights of.
        components: before merging.
    """

    def __init__(self, bench: Bench, network: str, components: int) -> None:
        self.bench, self.plan, self.device, self.data = bench, bench.plan, bench.device, bench.data
        self.network, self.components = network, components

    @cached_property
    def field(self) -> MeanField:
        """The untrained mean-field posterior."""
        network = networks.build(self.network, network_inputs(self.data))
        return MeanField(network, rho=-6.0, prior="anchored", prior_std=0.1).to(self.device)

    @cached_property
    def codebook(self) -> tuple[Codebook, dict[str, Any]]:
        """Its codebook and the account of how it was made, with noise as gradients."""
        return self._share(self.field)

    def _share(self, field: MeanField) -> tuple[Codebook, dict[str, Any]]:
        gradient = normal(Address(0, "bench", "gradient"), shared_weights(field)[0].size, self.device)
        return share(field, Sharing(components=self.components), gradient)

    def posterior(self, kind: str) -> Posterior:
        """Return a point, the mean-field posterior, or shared weights with some sampling."""
        if kind == "point":
            return Point(self.field.materialise()).to(self.device)
        if kind == FIELD:
            return copy.deepcopy(self.field)
        shared = Shared(self.field.materialise(), self.codebook[0], sampling=kind)  # type: ignore[arg-type]
        return shared.to(self.device)

    def clustering(self) -> Measured:
        """Time making a codebook of a mean-field posterior: outliers, components, merging, blending."""
        return self._clustering("sharing.clustering_s", self.field)

    def clustering_vit(self) -> Measured:
        """Time making a codebook of a ViT-B/16."""
        return self._clustering(VIT, MeanField(vit_weights(self.plan.vit_width), rho=-6.0).to(self.device))

    def _clustering(self, key: str, field: MeanField) -> Measured:
        account: dict[str, Any] = {}
        self.bench.forget_memory()
        timed = self.bench.calls(1.0, {key: lambda: account.update(self._share(field)[1])})
        return {key: timed[key] | account | self.bench.most_memory()}

    def draws(self) -> Measured:
        """Time draws of a mean-field posterior and of shared weights by sampling, in turn."""
        kinds = {f"sharing.{kind}_draw_ms": self.posterior(kind) for kind in (FIELD, *SAMPLINGS)}
        count = max(10, self.plan.some)
        images = self.data.train.batch(torch.arange(1), self.device)[0]
        setup = {key: self.bench.seconds(partial(posterior.predict, images, 2)) for key, posterior in kinds.items()}

        @torch.no_grad()
        def draw(posterior: Posterior) -> None:
            for number in range(count):
                posterior.draw(Address(0, "bench", "draw", number))

        timed = self.bench.times(1e3 / count, {key: partial(draw, posterior) for key, posterior in kinds.items()})
        size = kinds["sharing.moment_draw_ms"].layout.size
        return {
            key: figures | {"setup_s": setup[key], "weights": size, "draws": count} for key, figures in timed.items()
        }

    def steps(self) -> Measured:
        """Time training steps of a point, a mean-field posterior and shared weights, one network alone, in turn."""
        cohorts, changes = {}, [f"data.batch_size={self.plan.batch}", "data.classes=100", "gradient_share_every=0"]
        for kind, recipe in LEARNING.items():
            changed = load_recipe(f"sharing/cifar10-resnet18-{recipe}", changes)
            cohorts[f"sharing.{kind}_step_ms"] = Cohorts(
                self.bench, changed, self.plan.engine, peer=self.posterior(kind)
            )
        return self.bench.steps(cohorts)

    def predictions(self) -> Measured:
        """Time predictions of a point, a mean-field posterior and shared weights by sampling, in turn."""
        images = self.data.train.batch(torch.arange(self.plan.predicted), self.device)[0]
        calls = {
            f"sharing.predict_{kind}_s": partial(self.posterior(kind).predict, images, self.plan.draws)
            for kind in ("point", FIELD, *SAMPLINGS)
        }
        about = {"images": len(images), "draws": self.plan.draws}
        return self.bench.calls(PREDICTED / self.plan.predicted, calls, **about)
