"""What the peers of a run say of new inputs, batch by batch, in memory that does not grow with the number of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from peerbayes.engine.devices import pick_device
from peerbayes.errors import InputError
from peerbayes.inference.prediction import Prediction, mean_of
from peerbayes.inference.progress import Share, watched, watcher_now
from peerbayes.posteriors.certificate import Certificate, check_level, how_to
from peerbayes.runs.new_inputs import new_inputs

if TYPE_CHECKING:
    from peerbayes.runs.run import Run

BATCH = 1 << 24  # bytes of inputs that are predicted at a time


def predict_batches(
    run: Run,
    given: Any,
    peer: str | None = None,
    *,
    coverage: float | None = None,
    risk: float | None = None,
    draws: int | None = None,
    calibrated: bool = True,
    device: str | torch.device = "auto",
) -> Iterator[Prediction]:
    """Yield predictions of new inputs, on the CPU, in order; arguments as of `Run.predict`.

    Args:
        run: a trained one.
        given: inputs, as of `Run.predict`.
        peer: its name; None for the ensemble of all, or the peer that an adoption ships.
        coverage: of sets that a certificate promises.
        risk: of answers that a certificate promises.
        draws: of each peer; by default as many as the recipe evaluates.
        calibrated: whether logits are divided by the temperature.
        device: where to predict.
    """
    check_level("coverage", coverage)
    check_level("risk", risk)
    where = pick_device(device)
    peer = run.ships if peer is None else peer
    posteriors = {name: run[name].to(where) for name in (run if peer is None else [peer])}
    temperature = 1.0 if not calibrated else run.temperature if peer is None else run[peer].temperature
    certificate = _promised(run, peer, coverage, risk, draws, calibrated)
    if draws is None:
        draws = run.recipe.evaluation.draws if certificate is None else certificate.draws
    inputs = new_inputs(run, given)
    watcher = watcher_now.get()
    watcher.begin(inputs.count * len(posteriors))
    for names, images in inputs.batches(where, BATCH):
        parts = []
        for name, posterior in posteriors.items():
            with watched(Share(watcher, len(names))):
                parts.append(posterior.predict(images, draws, seed=run.seed, name=name, calibrated=False))
            run.refuse_nan(name, parts[-1].log_probabilities)
        together = _as_one(parts).tempered(temperature)
        together = together if certificate is None else together.promising(certificate)
        yield replace(together, inputs=names, kind=inputs.kind)


def _promised(
    run: Run, peer: str | None, coverage: float | None, risk: float | None, draws: int | None, calibrated: bool
) -> Certificate | None:
    """Return the certificate with the promises that are asked for; refuse what it is not of."""
    if coverage is None and risk is None:
        return None
    certificate = run.certificate if peer is None else run[peer].certificate
    names = list(run) if peer is None else [peer]
    origin = str(run.named if names == run.predicting else run.weights_file(names[0]))
    if run.exported:
        how = "an export promises what it was made with: calibrate the run, then export it again"
    else:
        how = how_to(origin, coverage, risk, adopted=run.adopted)
    if certificate is None:
        raise InputError(f"{origin}: nothing is promised of its predictions; {how}")
    if not calibrated:
        raise InputError(f"{origin}: promises are of its calibrated predictions; leave out --raw (calibrated=False)")
    if draws is not None and draws != certificate.draws:
        raise InputError(f"{origin}: promises are of {certificate.draws} draws, not of {draws}; leave out draws")
    return certificate.promising(coverage, risk, origin, how)


def _as_one(parts: list[Prediction]) -> Prediction:
    """Return the average of the predictions of several posteriors, with all of their draws, on the CPU."""
    first, *others = parts
    if not others:
        return replace(first, **{name: tensor.cpu() for name, tensor in first.by_input().items()})
    return Prediction(
        mean_of(torch.stack([part.log_probabilities for part in parts])).cpu(),
        torch.stack([part.expected_entropy for part in parts]).mean(0).cpu(),
        torch.stack([part.draws for part in parts]).sum(0).cpu(),
        first.address,
        class_names=first.class_names,
    )
