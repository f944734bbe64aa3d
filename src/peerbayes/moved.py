"""Rooms that have moved: their old names still work, and say where they are now."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

# by old room: modules below peerbayes, and the names that are there now
_ROOMS = {
    "learning": {
        "errors": "PeerbayesWarning TrainingError",
        "api.compressing": "compress compression",
        "api.distilling": "distill recipe_into save_networks",
        "engine.processes": "environment joined restarted",
        "runs.executor": "check_jobs dry_run execute train_jobs",
        "runs.session": "How",
        "recipes.recipe_data": "load_data",
        "training.learner": "Learner",
        "runs.plan": "Job Node Plan parents_of resolve source_weights",
        "training.reporters": "ConsoleReporter Reporter",
        "recipes.recipe": "Recipe load_recipe",
        "recipes.packaged": "packaged",
        "runs.run": "Run default_folder load",
        "studies.sweeps": "Sweep sweep",
        "api.fitting": "fit train",
    },
    "reporting": {
        "papers.catalogue": "write_figure",
        "papers.pipeline": "pipeline_table",
        "reports.predictions": "predict_inputs prediction_table",
        "reports.record": "Record",
        "reports.evaluating": "evaluate find_runs write_record",
        "reports.page": "report_page write_report",
        "reports.file_sizes": "size_table sizes",
        "studies.sweep_report": "sweep_table write_sweep_figure",
        "reports.tables": "differences rows text_table",
    },
    "evaluation": {
        "metrics.calibration": "ClassConfidence Reliability adaptive_ece confidence_by_class "
        "confidence_overall ece fit_temperature reliability temper",
        "metrics.flatness": "barrier directions loss_along loss_between sharpness",
        "metrics.scores": "accuracy aurc brier disagreement_rate nll nll_from_log pairwise_diversity "
        "probability_variance retention_curve soft_cross_entropy soft_cross_entropy_from_log",
        "metrics.ood": "aupr auroc fpr_at_tpr",
        "metrics.spread": "PairedDifference Summary paired_difference summarise",
    },
    "sharing": {
        "codebook.build": "Sharing gradient_statistic share shared_weights",
        "codebook.clustering": "em kmeans thrifty",
        "math.gaussians": "Components log_density mahalanobis merged wasserstein2",
        "codebook.merging": "components_of merge",
        "codebook.neighbours": "nearest",
        "codebook.outliers": "blends outliers steepest",
        "codebook.peer": "blank_shared shared_of",
        "codebook.trained": "merge_trained",
    },
}
# by old module: the one that has its names now
_MODULES = {
    "divergences": "math.divergences",
    "noise": "math.noise",
    "codebook.moments": "codebook.merging",
    "codebook.trained": "codebook.peer",
    "inference.recalibration": "inference.batch_norm",
    "metrics.disagreement": "metrics.scores",
    "metrics.selective": "metrics.scores",
    "networks.features": "networks.running",
    "networks.pretrained": "networks.weights_files",
    "posteriors.point": "posteriors.base",
    "posteriors.provenance": "posteriors.flat_network",
}


class _Moved(ModuleType):
    def __init__(self, name: str, homes: dict[str, str]) -> None:
        super().__init__(f"peerbayes.{name}", "Moved; its names warn where they are now.")
        self.__path__: list[str] = []
        self.__file__ = __file__  # for whoever looks at all modules
        self._homes = homes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name not in self._homes and "*" not in self._homes):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        home = self._homes.get(name) or self._homes["*"]
        value = getattr(importlib.import_module(home), name)
        public = getattr(sys.modules["peerbayes"], "_HOMES", {})
        now = f"peerbayes.{name}" if name in public else f"{home}.{name}"
        warnings.warn(f"{self.__name__}.{name} is now {now}", DeprecationWarning, stacklevel=2)
        return value

    def __dir__(self) -> list[str]:
        return sorted(self._homes)


def install() -> list[str]:
    """Let the old names be imported; return the old rooms."""
    rooms = {
        room: {name: f"peerbayes.{module}" for module, names in homes.items() for name in names.split()}
        for room, homes in _ROOMS.items()
    } | {old: {"*": f"peerbayes.{new}"} for old, new in _MODULES.items()}
    for name, homes in rooms.items():
        sys.modules.setdefault(f"peerbayes.{name}", _Moved(name, homes))
    return list(rooms)
