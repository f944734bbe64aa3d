"""The run that is served: what it takes, what it says, and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import peerbayes
from peerbayes.engine.processes import pick_device
from peerbayes.errors import InputError
from peerbayes.inference.prediction import Prediction, joint_layers
from peerbayes.metrics.calibration import SAME_TEMPERATURE
from peerbayes.posteriors.certificate import Certificate
from peerbayes.recipes.recipe import without_folders
from peerbayes.runs.hub import is_hub_name
from peerbayes.runs.new_inputs import new_inputs
from peerbayes.runs.run import Run, load, peers_at, read_json
from peerbayes.serving.limits import Limits

SHOWN = {"accuracy": "accuracy", "nll": "nll", "ece": "ece", "calibrated nll": "cnll", "calibrated ece": "cece"}


@dataclass(frozen=True)
class Served:
    """A run that answers requests, by `Run.predict_batches`.

    Args:
        run: the run.
        names: of the peers that predict, as one where they are all of it.
        draws: of each peer; None for as many as its certificate is of, or its recipe evaluates with.
        device: where it predicts.
    """

    run: Run
    names: Sequence[str]
    draws: int | None
    device: torch.device

    @classmethod
    def open(
        cls, path: str | Path, *, draws: int | None = None, device: str | torch.device = "auto", trust: bool = False
    ) -> Served:
        """Open a run, and predict with it once, so that nothing is listened for that it could not answer.

        Args:
            path: a run folder, an export, a weights file of a run, or a repository of the Hugging Face hub.
            draws: of each peer.
            device: where to predict.
            trust: allow what the run's recipe names as ``package.module:name``.
        """
        if is_hub_name(path) and not Path(path).exists():
            run, names = (run := load(path, trust=trust)), list(run)
        else:
            run, names = peers_at(path, trust=trust)
        served = cls(run, names, draws, pick_device(device))
        served.predict(torch.stack([served.text("") if served.texts else served.image(Image.new("RGB", (8, 8)))]))
        return served

    @property
    def peer(self) -> str | None:
        """The peer that predicts; None for all of them as one."""
        return None if list(self.names) == list(self.run) else self.names[0]

    @property
    def texts(self) -> bool:
        """Whether it takes texts; images otherwise."""
        return self.run.vocabulary is not None

    @property
    def certificate(self) -> Certificate | None:
        """What is promised of its predictions."""
        return self.run.certificate if self.peer is None else self.run[self.peer].certificate

    @property
    def joint(self) -> bool:
        """Whether a network looks at a batch as a whole, so that each input has to be predicted alone."""
        return any(joint_layers(self.run[name]) for name in self.names)

    def image(self, image: Image.Image) -> Tensor:
        """Return an image as the networks take it (C, H, W): its centre, in the size that was learnt."""
        return new_inputs(self.run, [image]).read(["0"], 0, torch.device("cpu"))[0]

    def text(self, text: str) -> Tensor:
        """Return a text as token numbers (L,); it is never taken for the name of a file."""
        vocabulary = self.run.vocabulary
        assert vocabulary is not None
        return vocabulary.encode([text])[0]

    def predict(self, inputs: Tensor) -> Prediction:
        """Return what `Run.predict` says of inputs (N, ...), with all that is promised of it."""
        certificate, promised = self.certificate, {}
        for name in ("coverage", "risk") if certificate is not None else ():
            promise = getattr(certificate, name)
            promised[name] = None if promise is None else promise.level
        how: dict[str, Any] = {**promised, "draws": self.draws, "device": self.device}
        return Prediction.joined(list(self.run.predict_batches(inputs, self.peer, **how)))

    @property
    def draws_each(self) -> int:
        """How many draws of each peer an answer is the average of."""
        certificate = self.certificate
        usual = self.run.recipe.evaluation.draws if certificate is None else certificate.draws
        return usual if self.draws is None else self.draws

    @property
    def passes(self) -> int:
        """How many networks an answer is the average of."""
        return sum(self.draws_each if self.run[name].stochastic else 1 for name in self.names)

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        return self.run.temperature if self.peer is None else self.run[self.peer].temperature

    def about(self, limits: Limits) -> dict[str, Any]:
        """Return what is served, without the places of files, JSON-ready.

        Args:
            limits: of the server.
        """
        recipe, certificate, inputs = without_folders(self.run.recipe), self.certificate, self.run.network_inputs()
        peers = [peer for peer in recipe.peers if peer.name in self.names]
        return {
            "name": self.run.folder.resolve().name,
            "takes": "texts" if self.texts else "images",
            "shape": list(inputs.shape),
            "classes": list(self.run.about.get("class_names") or map(str, range(inputs.classes))),
            "networks": {peer.name: peer.network for peer in peers},
            "posteriors": {peer.name: peer.posterior.kind for peer in peers},
            "recipe": {"name": recipe.name, "title": recipe.title},
            "data": recipe.data.name,
            "seed": self.run.seed,
            "draws": self.draws_each,
            "passes": self.passes,
            "temperature": self.temperature,
            "figures": self._figures(),
            "certificate": None if certificate is None else certificate.model_dump(exclude_none=True),
            "promises": [] if certificate is None else certificate.describe(self.run.about.get("class_names")),
            "limits": limits.model_dump(),
            "version": peerbayes.__version__,
        }

    def _figures(self) -> dict[str, float] | None:
        """Return what it was measured to be worth, if it was; after a temperature only if that is still the one."""
        path = self.run.folder / "evaluation.json"
        if not path.is_file():
            return None
        record = read_json(path)
        try:
            parts = record["peers"] if len(self.names) == 1 else [record["ensemble"]]
            (part,) = [part for part in parts if len(self.names) > 1 or part["name"] == self.names[0]]
            same = math.isclose(part.get("temperature") or 1.0, self.temperature, rel_tol=SAME_TEMPERATURE)
            keys = {name: key for name, key in SHOWN.items() if same or not name.startswith("calibrated")}
            return {name: float(part[key]) for name, key in keys.items() if part.get(key) is not None}
        except (KeyError, TypeError, ValueError) as error:
            message = f"not a record of an evaluation ({type(error).__name__}: {error})"
            raise InputError(f"{path}: {message}; `peerbayes evaluate {self.run.folder}` writes it") from None
