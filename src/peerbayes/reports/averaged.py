"""What a posterior predicts as one plain network, in one pass, by the way in which its weights are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from peerbayes.data.dataset import Dataset
from peerbayes.inference.recalibration import recalibrate
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.point import Point

if TYPE_CHECKING:
    from peerbayes.reports.out_of_distribution import Predict

RECALIBRATED = "recalibrated"  # with batch-norm's statistics estimated anew on the training images


def predict_averages(
    posterior: Posterior,
    name: str,
    loaded: Dataset,
    augment: Sequence[str],
    predict: Predict,
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return what each average of a posterior predicts, as it is and recalibrated, by the way it is made.

    Args:
        posterior: where it is; it is not changed.
        name: its name.
        loaded: the data set.
        augment: how the training images were augmented, as they are for new statistics of batch-norm.
        predict: makes log-probabilities.

    Returns:
        Log-probabilities (N, C) of the test split and, where there is one, the validation split.
    """
    predicted = {}
    for merge in posterior.averages:
        network = posterior.average(merge)
        for way in (merge, f"{merge}, {RECALIBRATED}"):
            if way != merge:
                recalibrate(network, loaded.train, augment=augment)
            one = Point(network)
            held = None if loaded.validation is None else predict(one, name, loaded.validation)
            predicted[way] = predict(one, name, loaded.test), held
    return predicted
