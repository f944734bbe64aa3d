"""Learning: recipes, cohorts, the loop, checkpoints and runs."""

from peerbayes.errors import PeerbayesWarning, TrainingError
from peerbayes.learning.compressing import compress, compression, source_weights, still_to_train
from peerbayes.learning.distilling import distill, recipe_into, save_networks
from peerbayes.learning.distribution import joined, restarted
from peerbayes.learning.fitting import fit
from peerbayes.learning.hardware import environment
from peerbayes.learning.how import How
from peerbayes.learning.inputs import load_data
from peerbayes.learning.jobs import Loaded, check_jobs, train, train_jobs
from peerbayes.learning.loop import Learner
from peerbayes.learning.progress import ConsoleReporter, Reporter
from peerbayes.learning.recipe import Recipe, load_recipe, packaged
from peerbayes.learning.run import Run, default_folder, load
from peerbayes.learning.sources import Job
from peerbayes.learning.sweeps import Sweep, sweep

__all__ = [
    "ConsoleReporter",
    "How",
    "Job",
    "Learner",
    "Loaded",
    "PeerbayesWarning",
    "Recipe",
    "Reporter",
    "Run",
    "Sweep",
    "TrainingError",
    "check_jobs",
    "compress",
    "compression",
    "default_folder",
    "distill",
    "environment",
    "fit",
    "joined",
    "load",
    "load_data",
    "load_recipe",
    "packaged",
    "recipe_into",
    "restarted",
    "save_networks",
    "source_weights",
    "still_to_train",
    "sweep",
    "train",
    "train_jobs",
]
