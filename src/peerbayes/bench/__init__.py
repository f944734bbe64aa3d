"""Speed and memory on this machine: engines, a point pair, bayesian-torch, prediction, shared weights, and growth.

Images are random. In a record ``measurements`` holds what was timed, and ``figures`` is a function of it alone.
"""

from peerbayes.bench.figures import SOURCES, figures_of, follows
from peerbayes.bench.measuring import measurements, run
from peerbayes.bench.plan import Plan
from peerbayes.bench.timing import Bench

__all__ = ["SOURCES", "Bench", "Plan", "figures_of", "follows", "measurements", "run"]
