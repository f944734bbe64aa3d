"""Old names of what has moved: they still work, and warn where it is now."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

# Old name to new name, both below peerbayes; * stands for all names of a module.
MOVED = {
    "divergences.*": "math.divergences.*",
    "noise.*": "math.noise.*",
    "codebook.moments.*": "codebook.merging.*",
    "codebook.trained.*": "codebook.peer.*",
    "inference.recalibration.*": "inference.batch_norm.*",
    "metrics.disagreement.*": "metrics.scores.*",
    "metrics.selective.*": "metrics.scores.*",
    "networks.features.*": "networks.running.*",
    "networks.pretrained.*": "networks.weights_files.*",
    "posteriors.point.*": "posteriors.base.*",
    "posteriors.provenance.*": "posteriors.flat_network.*",
    "learning.PeerbayesWarning": "errors.PeerbayesWarning",
    "learning.TrainingError": "errors.TrainingError",
    "learning.compress": "api.compressing.compress",
    "learning.compression": "api.compressing.compression",
    "learning.distill": "api.distilling.distill",
    "learning.recipe_into": "api.distilling.recipe_into",
    "learning.save_networks": "api.distilling.save_networks",
    "learning.environment": "engine.processes.environment",
    "learning.joined": "engine.processes.joined",
    "learning.restarted": "engine.processes.restarted",
    "learning.check_jobs": "runs.executor.check_jobs",
    "learning.dry_run": "runs.executor.dry_run",
    "learning.execute": "runs.executor.execute",
    "learning.train_jobs": "runs.executor.train_jobs",
    "learning.How": "runs.session.RunOptions",
    "learning.load_data": "recipes.recipe_data.load_data",
    "learning.Learner": "training.learner.Learner",
    "learning.Job": "runs.plan.Job",
    "learning.Node": "runs.plan.Node",
    "learning.Plan": "runs.plan.Plan",
    "learning.parents_of": "runs.plan.parents_of",
    "learning.resolve": "runs.plan.resolve",
    "learning.source_weights": "runs.plan.source_weights",
    "learning.ConsoleReporter": "training.reporters.ConsoleReporter",
    "learning.Reporter": "training.reporters.Reporter",
    "learning.Recipe": "recipes.recipe.Recipe",
    "learning.load_recipe": "recipes.recipe.load_recipe",
    "learning.packaged": "recipes.packaged.packaged",
    "learning.Run": "runs.run.Run",
    "learning.default_folder": "runs.run.default_folder",
    "learning.load": "runs.run.load",
    "learning.Sweep": "studies.sweeps.Sweep",
    "learning.sweep": "studies.sweeps.sweep",
    "learning.fit": "api.fitting.fit",
    "learning.train": "api.fitting.train",
    "reporting.write_figure": "papers.catalogue.write_figure",
    "reporting.pipeline_table": "papers.pipeline.pipeline_table",
    "reporting.predict_inputs": "reports.predictions.predict_inputs",
    "reporting.prediction_table": "reports.predictions.prediction_table",
    "reporting.Record": "reports.record.Record",
    "reporting.evaluate": "reports.evaluating.evaluate",
    "reporting.find_runs": "reports.evaluating.find_runs",
    "reporting.write_record": "reports.evaluating.write_record",
    "reporting.report_page": "reports.page.report_page",
    "reporting.write_report": "reports.page.write_report",
    "reporting.size_table": "reports.file_sizes.size_table",
    "reporting.sizes": "reports.file_sizes.sizes",
    "reporting.sweep_table": "studies.sweep_report.sweep_table",
    "reporting.write_sweep_figure": "studies.sweep_report.write_sweep_figure",
    "reporting.differences": "reports.tables.differences",
    "reporting.rows": "reports.tables.rows",
    "reporting.text_table": "reports.tables.text_table",
    "evaluation.ClassConfidence": "metrics.calibration.ClassConfidence",
    "evaluation.Reliability": "metrics.calibration.Reliability",
    "evaluation.adaptive_ece": "metrics.calibration.adaptive_ece",
    "evaluation.confidence_by_class": "metrics.calibration.confidence_by_class",
    "evaluation.confidence_overall": "metrics.calibration.confidence_overall",
    "evaluation.ece": "metrics.calibration.ece",
    "evaluation.fit_temperature": "metrics.calibration.fit_temperature",
    "evaluation.reliability": "metrics.calibration.reliability",
    "evaluation.temper": "metrics.calibration.temper",
    "evaluation.barrier": "metrics.flatness.barrier",
    "evaluation.directions": "metrics.flatness.directions",
    "evaluation.loss_along": "metrics.flatness.loss_along",
    "evaluation.loss_between": "metrics.flatness.loss_between",
    "evaluation.sharpness": "metrics.flatness.sharpness",
    "evaluation.accuracy": "metrics.scores.accuracy",
    "evaluation.aurc": "metrics.scores.aurc",
    "evaluation.brier": "metrics.scores.brier",
    "evaluation.disagreement_rate": "metrics.scores.disagreement_rate",
    "evaluation.nll": "metrics.scores.nll",
    "evaluation.nll_from_log": "metrics.scores.nll_from_log",
    "evaluation.pairwise_diversity": "metrics.scores.pairwise_diversity",
    "evaluation.probability_variance": "metrics.scores.probability_variance",
    "evaluation.retention_curve": "metrics.scores.retention_curve",
    "evaluation.soft_cross_entropy": "metrics.scores.soft_cross_entropy",
    "evaluation.soft_cross_entropy_from_log": "metrics.scores.soft_cross_entropy_from_log",
    "evaluation.aupr": "metrics.ood.aupr",
    "evaluation.auroc": "metrics.ood.auroc",
    "evaluation.fpr_at_tpr": "metrics.ood.fpr_at_tpr",
    "evaluation.PairedDifference": "metrics.spread.PairedDifference",
    "evaluation.Summary": "metrics.spread.Summary",
    "evaluation.paired_difference": "metrics.spread.paired_difference",
    "evaluation.summarise": "metrics.spread.summarise",
    "sharing.Sharing": "codebook.build.Sharing",
    "sharing.gradient_statistic": "codebook.build.gradient_statistic",
    "sharing.share": "codebook.build.share",
    "sharing.shared_weights": "codebook.build.shared_weights",
    "sharing.em": "codebook.clustering.em",
    "sharing.kmeans": "codebook.clustering.kmeans",
    "sharing.thrifty": "codebook.clustering.thrifty",
    "sharing.Components": "math.gaussians.Components",
    "sharing.log_density": "math.gaussians.log_density",
    "sharing.mahalanobis": "math.gaussians.mahalanobis",
    "sharing.merged": "math.gaussians.merged",
    "sharing.wasserstein2": "math.gaussians.wasserstein2",
    "sharing.components_of": "codebook.merging.components_of",
    "sharing.merge": "codebook.merging.merge",
    "sharing.nearest": "codebook.neighbours.nearest",
    "sharing.blends": "codebook.outliers.blends",
    "sharing.outliers": "codebook.outliers.outliers",
    "sharing.steepest": "codebook.outliers.steepest",
    "sharing.blank_shared": "codebook.peer.blank_shared",
    "sharing.shared_of": "codebook.peer.shared_of",
    "sharing.merge_trained": "codebook.peer.merge_trained",
}


class _Moved(ModuleType):
    def __init__(self, name: str, names: dict[str, str]) -> None:
        super().__init__(f"peerbayes.{name}", "Moved; its names warn where they are now.")
        self.__path__: list[str] = []
        self.__file__ = __file__  # for whoever looks at all modules
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name not in self._names and "*" not in self._names):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        new = self._names.get(name) or self._names["*"].replace("*", name)
        home, _, new_name = new.rpartition(".")
        value = getattr(importlib.import_module(f"peerbayes.{home}"), new_name)
        public = getattr(sys.modules["peerbayes"], "_HOMES", {})
        now = f"peerbayes.{new_name if new_name in public else new}"
        warnings.warn(f"{self.__name__}.{name} is now {now}", DeprecationWarning, stacklevel=2)
        return value

    def __dir__(self) -> list[str]:
        return sorted(self._names)


def install() -> list[str]:
    """Let the old names be imported; return the old modules."""
    modules: dict[str, dict[str, str]] = {}
    for old, new in MOVED.items():
        module, _, name = old.rpartition(".")
        modules.setdefault(module, {})[name] = new
    for module, names in modules.items():
        sys.modules.setdefault(f"peerbayes.{module}", _Moved(module, names))
    return list(modules)
