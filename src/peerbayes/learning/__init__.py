"""Learning: recipes, cohorts, the loop, checkpoints and runs."""

from peerbayes.errors import PeerbayesWarning, TrainingError
from peerbayes.learning.compressing import compress, compression
from peerbayes.learning.distilling import distill, recipe_into, save_networks
from peerbayes.learning.distribution import joined, restarted
from peerbayes.learning.executor import Loaded, check_jobs, dry_run, execute, train_jobs
from peerbayes.learning.hardware import environment
from peerbayes.learning.how import How
from peerbayes.learning.inputs import load_data
from peerbayes.learning.loop import Learner
from peerbayes.learning.plan import Job, Node, Plan, parents_of, resolve, source_weights
from peerbayes.learning.progress import ConsoleReporter, Reporter
from peerbayes.learning.recipe import Recipe, load_recipe, packaged
from peerbayes.learning.run import Run, default_folder, load
from peerbayes.learning.sweeps import Sweep, sweep
from peerbayes.learning.training import fit, train

__all__ = [
    "ConsoleReporter",
    "How",
    "Job",
    "Learner",
    "Loaded",
    "Node",
    "PeerbayesWarning",
    "Plan",
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
    "dry_run",
    "environment",
    "execute",
    "fit",
    "joined",
    "load",
    "load_data",
    "load_recipe",
    "packaged",
    "parents_of",
    "recipe_into",
    "resolve",
    "restarted",
    "save_networks",
    "source_weights",
    "sweep",
    "train",
    "train_jobs",
]
