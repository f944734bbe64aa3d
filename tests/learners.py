"""What tests of learning have in common: a reporter that remembers, and interruptions."""

import contextlib

import pytest
import torch

from peerbayes.training.learner import Learner
from peerbayes.training.reporters import Reporter


class Recorder(Reporter):
    """Remembers what it is told."""

    def __init__(self):
        self.lines, self.warnings, self.headlines = [], [], []

    def epoch(self, line):
        self.lines.append(line)

    def warn(self, text):
        self.warnings.append(text)

    def headline(self, text):
        self.headlines.append(text)


class Stop(Exception):
    """An interruption."""


@contextlib.contextmanager
def stopped_at(number):
    """Interrupt what is trained in the block right before a step; it must get there."""
    step = Learner.step

    def until(self):
        if self.position.step == number:
            raise Stop
        step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", until)
        with pytest.raises(Stop):
            yield


def same(one, two):
    """Return whether two tables hold equal tensors."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
