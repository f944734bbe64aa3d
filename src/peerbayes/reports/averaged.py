"""How a rank-one student does as one network, by the way in which its members are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from peerbayes.data.dataset import Dataset
from peerbayes.inference.recalibration import recalibrate
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.point import Point
from peerbayes.reports.out_of_distribution import Predict

Record = dict[str, Any]
RECALIBRATED = "recalibrated"  # with batch-norm's statistics estimated anew on the training images


def judge_averages(
    student: Posterior,
    name: str,
    loaded: Dataset,
    augment: Sequence[str],
    predict: Predict,
    judge: Callable[[Tensor, Tensor | None], Record],
) -> dict[str, Record]:
    """Return figures of each average of a student's members, as it is and recalibrated, by the way it is made.

    Args:
        student: where it is; it is not changed.
        name: its name.
        loaded: the data set.
        augment: how the training images were augmented, as they are for new statistics of batch-norm.
        predict: makes log-probabilities.
        judge: makes figures of those of the test split and, where there is one, the validation split.
    """
    found = {}
    for merge in student.averages:
        network = student.average(merge)
        for way in (merge, f"{merge}, {RECALIBRATED}"):
            if way != merge:
                recalibrate(network, loaded.train, augment=augment)
            one = Point(network)
            held = None if loaded.validation is None else predict(one, name, loaded.validation)
            found[way] = judge(predict(one, name, loaded.test), held)
    return found
