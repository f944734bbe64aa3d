"""Sweep: train settings of a recipe over seeds and rank them on the validation split; the test split is not used.

study.db              the Optuna study, unless another storage was named
sweep.json            what was swept, on what, and the ranked table
SETTING-seedN/        a run folder each
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from peerbayes import metrics
from peerbayes.choices import Engine, Objective, Precision, Sampler
from peerbayes.engine.processes import environment, pick_device
from peerbayes.errors import InputError, TrainingError
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import Recipe, load_recipe
from peerbayes.reports.scoring import basic_figures
from peerbayes.runs.executor import DataCache, check_jobs, train_jobs
from peerbayes.runs.folder import LOCKED
from peerbayes.runs.plan import Job
from peerbayes.runs.run import Run, slug
from peerbayes.studies.space import Axis, Setting, corners, folder_name, overrides, parse_axes, setting_title
from peerbayes.studies.study import Claim, Study
from peerbayes.studies.study_storage import check_optuna, hide_password, reaching
from peerbayes.training.reporters import Reporter

Row = dict[str, Any]

OBJECTIVES: tuple[Objective, ...] = ("accuracy", "nll", "ece")
TRIALS = 20
HELD_OUT = 0.1  # of the training images, if neither the recipe nor the data have a validation split


@dataclass(frozen=True)
class Sweep:
    """Result of a sweep.

    Args:
        recipe: the recipe before any setting.
        axes: the keys that were varied.
        seeds: of the runs of every setting.
        objective: the validation figure that ranks.
        table: a row for each setting: the best first, then those running in other processes, then failed ones.
        folder: of the sweep.
    """

    recipe: Recipe
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...]
    objective: Objective
    table: list[Row]
    folder: Path

    @property
    def best(self) -> Row | None:
        """The best setting; None if none is finished."""
        return self.table[0] if self.table and self.table[0]["state"] == "complete" else None


def sweep(
    recipe: str | Path,
    over: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    changes: Sequence[str] = (),
    sampler: Sampler | None = None,
    trials: int | None = None,
    objective: Objective = "nll",
    validation: float | None = None,
    storage: str | None = None,
    study: str | None = None,
    out: str | Path | None = None,
    pack: int | None = None,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    engine: Engine = "auto",
    precision: Precision = "auto",
    reporter: Reporter | None = None,
) -> Sweep:
    """Train settings of a recipe and rank them on the validation split; call it again to resume.

    Args:
        recipe: a recipe's name or file.
        over: keys to vary: ``"mutual.alpha=0.5,1,2"``, ``"stages.*.optimizer.lr=1e-4:1e-1:log"``.
        seeds: a setting's value is the mean over these.
        changes: changes of the recipe for all settings, such as ``"stages.0.epochs=5"``.
        sampler: ``grid`` or ``tpe``; by default a grid if only lists are given.
        trials: settings that ``tpe`` tries, 20 by default.
        objective: ``nll``, ``accuracy`` or ``ece``, averaged over peers.
        validation: images (or fraction) of the training split to rank by; by default the recipe's or the data's, or a
            tenth.
        storage: an Optuna storage URL, which many machines may share; by default SQLite in the folder.
        study: the study's name; by default the recipe's.
        out: the sweep's folder; ``sweeps/RECIPE`` by default.
        pack: settings trained side by side; by default 4 of a grid on a GPU, else 1.
        device: where to train; ``auto`` prefers a GPU.
        root: data root.
        engine: as in `train`.
        precision: as in `train`.
        reporter: of progress; silent by default.
    """
    check_optuna()
    reporter, where = reporter or Reporter(), pick_device(device)
    if not seeds:
        raise InputError("a sweep needs at least one seed")
    if objective not in OBJECTIVES:
        raise InputError(f"objective '{objective}': expected {', '.join(OBJECTIVES)}")
    axes = parse_axes(over, load_recipe(recipe, changes))
    sampler = _sampler(sampler, trials, axes)
    loaded = DataCache(root)
    changes = _with_validation(recipe, changes, validation, loaded, reporter)
    base = load_recipe(recipe, changes)
    folder, name = Path(out) if out is not None else Path("sweeps") / slug(recipe), study or base.name
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder for the sweep")
    how: dict[str, Any] = {"device": where, "root": root, "engine": engine, "precision": precision}
    if pack is not None:  # on a CPU too, where runs take turns
        how["pack"] = pack * len(seeds)
    recipes = [(setting, load_recipe(recipe, [*changes, *overrides(axes, setting)])) for setting in corners(axes)]
    for setting, changed in recipes:  # every setting is checked before one is trained
        _check(setting, Job(changed, _run_folder(folder, setting, seeds[0]), seeds[0]), loaded, how)
    if storage is None:
        folder.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{folder / 'study.db'}"
    about = {
        "recipe": base.digest,
        "over": {axis.key: axis.describe() for axis in axes},
        "sampler": sampler,
        "seeds": list(seeds),
        "objective": objective,
    }
    pack = pack or (4 if where.type == "cuda" and sampler == "grid" else 1)
    with reaching(storage):
        shared = Study(storage, name, about, axes, sampler, trials or TRIALS, objective == "accuracy", folder)
        trainer = _Trainer(shared, recipe, changes, axes, tuple(seeds), objective, folder, reporter, how, loaded)
        try:
            while claims := shared.claim(pack):
                trainer.run(claims)
            table = trainer.table()
        finally:
            shared.close()
    result = Sweep(base, tuple(axes), tuple(seeds), objective, table, folder)
    _write(result, {**about, "recipe": str(recipe), "study": name, "storage": hide_password(storage)}, where)
    return result


def _with_validation(
    recipe: str | Path, changes: Sequence[str], given: float | None, loaded: DataCache, reporter: Reporter
) -> list[str]:
    if given is not None:
        if given > 1 and given % 1:
            raise InputError(f"--validation {given}: expected a fraction below 1, or a whole number of training images")
        changes = [*changes, f"data.validation={int(given) if given >= 1 else given}"]
    if loaded.of_recipe(load_recipe(recipe, changes)).validation is not None:
        return list(changes)
    reporter.headline(f"no validation split: the sweep keeps {HELD_OUT:.0%} of the training images for it")
    return [*changes, f"data.validation={HELD_OUT}"]


def _check(setting: Setting, job: Job, loaded: DataCache, how: Mapping[str, Any]) -> None:
    """Check that a setting can be trained and ranked."""
    try:
        if loaded.of_recipe(job.recipe).validation is None:
            raise InputError("there is no validation split to rank it by; set data.validation above 0")
        check_jobs([job], loaded=loaded, **how)
    except InputError as error:
        raise InputError(f"setting {setting_title(setting)}: {error}") from None


def _run_folder(folder: Path, setting: Setting, seed: int) -> Path:
    return folder / f"{folder_name(setting)}-seed{seed}"


def _sampler(given: Sampler | None, trials: int | None, axes: Sequence[Axis]) -> Sampler:
    ranges = [axis.key for axis in axes if axis.is_range]
    if given == "grid" and ranges:
        raise InputError(f"a grid needs lists, but {ranges[0]} is a range: use --sampler tpe, or list its values")
    sampler: Sampler = given or ("tpe" if ranges else "grid")
    if sampler == "grid" and trials is not None:
        raise InputError("a grid takes every setting: --trials is for --sampler tpe")
    return sampler


@dataclass
class _Trainer:
    """Train and evaluate the settings that this process has claimed."""

    study: Study
    recipe: str | Path
    changes: Sequence[str]
    axes: Sequence[Axis]
    seeds: tuple[int, ...]
    objective: Objective
    folder: Path
    reporter: Reporter
    how: Mapping[str, Any]
    loaded: DataCache

    def run(self, claims: Sequence[Claim]) -> None:
        """Train and evaluate settings side by side; one that diverges fails alone."""
        self.reporter.headline(f"setting {'; '.join(setting_title(claim.setting) for claim in claims)}")
        jobs = [(claim, job) for claim in claims for job in self._jobs(claim.setting)]
        errors: dict[int, TrainingError] = {}
        try:
            runs = self._train([job for _, job in jobs], errors)
        except TrainingError as error:  # of the run that a peer starts from
            if len(claims) == 1:
                self._fail(claims[0], str(error))
            else:
                for claim in claims:
                    self.run([claim])
            return
        for claim in claims:
            indices = [index for index, (owner, _) in enumerate(jobs) if owner is claim]
            reasons = [str(errors[index]) for index in indices if index in errors]
            if reasons:
                self._fail(claim, reasons[0])
            else:
                self._judge(claim, [runs[index] for index in indices])

    def _jobs(self, setting: Setting) -> list[Job]:
        # The test split stays unused, whatever the recipe says.
        quiet = ["evaluation.test_every=0", "evaluation.last_epochs=0"]
        recipe = load_recipe(self.recipe, [*self.changes, *overrides(self.axes, setting), *quiet])
        return [Job(recipe, _run_folder(self.folder, setting, seed), seed) for seed in self.seeds]

    def _train(self, jobs: Sequence[Job], errors: dict[int, TrainingError]) -> list[Run]:
        while True:
            try:
                how: dict[str, Any] = {"reporter": self.reporter, "loaded": self.loaded, **self.how}
                return train_jobs(jobs, resume=True, errors=errors, **how)
            except InputError as error:
                # Processes that share a folder share the parents of their runs: one trains them, the others wait.
                if not str(error).endswith(LOCKED):
                    raise
                time.sleep(1)

    def _judge(self, claim: Claim, runs: Sequence[Run]) -> None:
        by_seed = {str(run.seed): self._figures(run) for run in runs}
        values = [figures[self.objective] for figures in by_seed.values()]
        if not all(map(math.isfinite, values)):
            self._fail(claim, f"{self.objective} of the validation split became {statistics.fmean(values)}")
            return
        attributes = {
            "seeds": by_seed,
            "spread": statistics.stdev(values) if len(values) > 1 else None,
            "seconds": sum(run.said("seconds") for run in runs),
            "hardware": runs[0].said("hardware"),
            "versions": runs[0].said("versions"),
        }
        self.study.finish(claim, statistics.fmean(values), attributes)

    def _fail(self, claim: Claim, reason: str) -> None:
        self.reporter.warn(f"setting {setting_title(claim.setting)} failed: {reason}")
        self.study.fail(claim, reason)

    def _figures(self, run: Run) -> dict[str, float]:
        held = self.loaded.of(run).validation
        assert held is not None
        options = run.recipe.evaluation
        peers = []
        for name in run:
            log_p, labels, _, _ = run.predict_split(name, held, options.draws, self.how["device"])
            peers.append(basic_figures(log_p, labels, options.ece_bins))
        return {figure: statistics.fmean(peer[figure] for peer in peers) for figure in OBJECTIVES}

    def table(self) -> list[Row]:
        """Return a row for each setting of the study, whichever process trained it."""
        rows = [self._row(trial.user_attrs, trial.value) for trial in self.study.trials()]
        sign = -1 if self.objective == "accuracy" else 1
        order = ("complete", "running", "failed")
        rows.sort(key=lambda row: (order.index(row["state"]), sign * row.get("value", 0)))
        for rank, row in enumerate((row for row in rows if row["state"] == "complete"), start=1):
            row["rank"] = rank
        return rows

    def _row(self, attributes: Mapping[str, Any], value: float | None) -> Row:
        setting = {axis.key: attributes["setting"][axis.key] for axis in self.axes}
        row: Row = {"rank": None, "setting": setting, "state": "running", "reason": None}
        if value is not None:
            figures = {
                figure: dataclasses.asdict(metrics.summarise(seed[figure] for seed in attributes["seeds"].values()))
                for figure in OBJECTIVES
            }
            row |= {"state": "complete", "objective": self.objective, "value": value, "spread": attributes["spread"]}
            row |= figures | {key: attributes[key] for key in ("seeds", "seconds", "hardware", "versions")}
        elif "reason" in attributes:
            row |= {"state": "failed", "reason": attributes["reason"]}
        row["changes"] = overrides(self.axes, setting)
        row["runs"] = [str(_run_folder(self.folder, setting, seed)) for seed in self.seeds]
        return row


def _write(result: Sweep, about: Mapping[str, Any], device: torch.device) -> None:
    machine = environment(device)
    record = {
        "title": result.recipe.title,
        "split": "validation",
        **about,
        "validation": result.recipe.data.validation,
        "draws": result.recipe.evaluation.draws,
        "ece_bins": result.recipe.evaluation.ece_bins,
        "hardware": machine["hardware"],
        "versions": {**machine["versions"], "optuna": metadata.version("optuna")},
        "seconds": sum(row.get("seconds", 0) for row in result.table),
        "table": result.table,
    }
    storage.write_bytes(result.folder / "sweep.json", (json.dumps(record, indent=1) + "\n").encode())
