"""Learning: recipes, cohorts, the loop, checkpoints and runs."""

from peerbayes.learning.loop import Learner, TrainingError
from peerbayes.learning.progress import ConsoleReporter, PeerbayesWarning, Reporter
from peerbayes.learning.recipe import Recipe, load_recipe, packaged
from peerbayes.learning.run import Run, default_folder, environment, fit, load, load_data, train

__all__ = [
    "ConsoleReporter",
    "Learner",
    "PeerbayesWarning",
    "Recipe",
    "Reporter",
    "Run",
    "TrainingError",
    "default_folder",
    "environment",
    "fit",
    "load",
    "load_data",
    "load_recipe",
    "packaged",
    "train",
]
