"""Looking before the first step: one small batch through every network, teacher and term."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from peerbayes.data.dataset import Dataset
from peerbayes.data.transforms.augment import augment
from peerbayes.engine.cohort import Cohort
from peerbayes.engine.stages import of_term
from peerbayes.engine.step_parts import figure_names, place_peer, term_value
from peerbayes.engine.teachers import run_functional
from peerbayes.errors import InputError, OptionError, PeerbayesWarning, reason, within
from peerbayes.math import noise
from peerbayes.math.noise import Address
from peerbayes.networks.inputs import to_unit
from peerbayes.networks.running import find_layer, kept_buffers
from peerbayes.posteriors.flat_network import Weights
from peerbayes.terms.definition import Shapes
from peerbayes.terms.step import Batch, Output


class Probe:
    """A few images of the training split, and what a cohort makes of them; the cohort stays as it is.

    What can't be trained is refused in a sentence: shapes, classes, layers, options.

    Args:
        cohort: whose networks, teachers and terms are tried.
        data: its data.
    """

    def __init__(self, cohort: Cohort, data: Dataset) -> None:
        self.cohort, self.data = cohort, data
        self._told: set[str] = set()  # peers whose outputs have been spoken of
        self.images, self.labels = data.train.batch(torch.arange(min(4, len(data.train))), cohort.device)
        augment(self.images, cohort.recipe.data.augment, Address())  # texts can't be

    def networks(self) -> None:
        """Try the networks alone."""
        for name in self.cohort.peers:
            self._try_network(name, [])

    def figures(self) -> list[str]:
        """Try the terms of the cohort's stage; return the names of its figures."""
        cohort, outputs = self.cohort, {}
        if cohort.mixer is not None and self.images.dim() != 4:
            raise InputError(f"mix '{cohort.mixer.kind}' is for images: set stages.*.mix.kind=none for texts")
        for name, posterior in cohort.peers.items():
            logits, features, weights = self._try_network(name, cohort.layers)
            outputs[name] = Output(posterior, weights, logits, features)
        batch = Batch(
            self.labels,
            outputs,
            cohort.state.modules,
            cohort.train_size,
            cohort.batch_size,
            0.0,
            teachers=self._try_teachers(to_unit(self.images)),
        )
        for name in cohort.peers:
            self._refuse_idle(name, batch)
        with torch.no_grad():
            return figure_names(cohort.state, batch, cohort.peers)

    def _refuse_idle(self, peer: str, batch: Batch) -> None:
        """Refuse terms of which none has a gradient for a peer."""
        state = self.cohort.state
        for term, options in state.terms:
            with of_term(state.place, term.name):
                if term_value(term, options, batch, peer)[0].requires_grad:
                    return
        known = ", ".join(term.name for term, _ in state.terms)
        why = f"peer '{peer}' can't learn from {known} alone: no gradient reaches it; add likelihood, say"
        raise InputError(f"{state.place}.terms: {why}")

    def find_layers(self, layers: list[str]) -> None:
        """Refuse layers, an option of that name, that any network has not."""
        with within("layers", OptionError):
            for posterior in self.cohort.peers.values():
                for layer in layers:
                    find_layer(posterior.network, layer)

    def shapes(self, peer: str, layers: list[str]) -> Shapes:
        """Return the shapes of a peer's features at some layers, and the number of classes.

        Args:
            peer: its name.
            layers: their names.
        """
        if not layers:
            return Shapes({}, self.data.classes)
        _, features, _ = self._try_network(peer, layers)
        return Shapes({layer: feature.shape for layer, feature in features.items()}, self.data.classes)

    @torch.no_grad()
    def swamped(self, peer: str) -> str | None:
        """Return a sentence where a draw of a peer makes nothing of what its mean network has learnt.

        The mean network has learnt something where it is right more than half of the way from chance to always, and a
        draw makes nothing of it where it agrees with it less than that.
        """
        posterior, split = self.cohort.peers[peer], self.data.train
        if not posterior.stochastic:
            return None
        posterior.eval()
        images, labels = split.batch(torch.linspace(0, len(split) - 1, min(32, len(split))).long(), self.cohort.device)
        half = 0.5 + 0.5 / self.data.classes
        classes = posterior(images).argmax(1)
        right = float((classes == labels).float().mean())
        if right <= half:
            return None
        drawn = posterior(images, posterior.draw(Address(self.cohort.seed, peer, "probe"))).argmax(1)
        agrees = float((drawn == classes).float().mean())
        if agrees > half:
            return None
        return (
            f"the scales of peer '{peer}' swamp its weights: the mean network is right on {right:.0%} of {len(labels)} "
            f"training images, but a draw agrees with it on {agrees:.0%}; begin with smaller scales, "
            "such as posterior.width = 0.02 (--width 0.02 of `adopt`)"
        )

    def _try_teachers(self, images: Tensor) -> Tensor | None:
        teachers = self.cohort.teachers
        if teachers is not None:
            try:
                with torch.no_grad():
                    logits = teachers.logits(run_functional, images, teachers.tensors(0), None)
            except Exception as error:  # a user's network may raise anything
                shape, why = tuple(images.shape[1:]), reason(error)
                raise InputError(f"a teacher can't take {self.data.name}'s inputs, of shape {shape}: {why}") from error
            for number, taught in enumerate(logits, start=1):
                if taught.shape != (len(images), self.data.classes):
                    raise InputError(
                        f"teacher {number} of {len(logits)} knows {taught.shape[-1]} classes, but {self.data.name} has "
                        f"{self.data.classes}"
                    )
        return self.cohort.perturb_and_teach(images, 0)[1]

    @torch.no_grad()
    def _try_network(self, peer: str, layers: list[str]) -> tuple[Tensor, dict[str, Tensor], Weights]:
        posterior, device = self.cohort.peers[peer], self.cohort.device
        address = Address(self.cohort.seed, peer, "step", 0)
        where = noise.key_tensor(address, device), noise.number_tensor(address, device)
        with kept_buffers(posterior.network), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for training in (True, False):  # some networks return something else while they train
                posterior.train(training)
                try:
                    with torch.set_grad_enabled(training):
                        flat, std, extra = place_peer(posterior, *where)
                        logits, features = posterior.training_pass(self.images, flat, extra, layers)
                except InputError:
                    raise
                except Exception as error:  # a user's network may raise anything
                    raise InputError(
                        f"the network of peer '{peer}' can't take {self.data.name}'s inputs, of shape "
                        f"{tuple(self.images.shape[1:])}: {reason(error)}"
                    ) from error
                self._check_logits(peer, logits, training)
                if training:  # with gradients
                    tried = logits, dict(zip(layers, features, strict=True)), Weights({}, flat, std)
        return tried

    def _check_logits(self, peer: str, logits: Any, training: bool) -> None:
        who, when = f"the network of peer '{peer}'", " while it trains" * training
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"{who} returns a {kind}{when}, expected a tensor of logits")
        if logits.dim() != 2 or logits.shape[1] != self.data.classes:
            count = len(logits) if logits.dim() == 2 else len(self.images)  # which may be there once a member
            raise InputError(
                f"{who} returns shape {tuple(logits.shape)}{when}, expected {(count, self.data.classes)}: "
                f"{self.data.name} has {self.data.classes} classes"
            )
        self._warn_of_probabilities(peer, logits.detach().double())
        if training and not logits.requires_grad:
            raise InputError(f"{who} returns logits without a gradient, so nothing could be learnt; is it detached?")

    def _warn_of_probabilities(self, peer: str, logits: Tensor) -> None:
        """Tell once of a network that ends in a softmax, whose outputs sum to one, or in a log-softmax."""
        if peer in self._told:
            return
        ones = torch.ones(len(logits), dtype=logits.dtype, device=logits.device)
        if bool((logits >= 0).all()) and torch.allclose(logits.sum(1), ones, atol=1e-4):
            what = "probabilities, as of a softmax, and the loss takes another one of them: return logits instead"
        elif torch.allclose(logits.exp().sum(1), ones, atol=1e-4):
            what = "log-probabilities, as of a log-softmax: they are as good as logits, and the layer can be left out"
        else:
            return
        self._told.add(peer)
        warnings.warn(f"the network of peer '{peer}' returns {what}", PeerbayesWarning, stacklevel=2)
