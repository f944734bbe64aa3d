"""The reporter that hands a run's events to loggers, each run to its own, and goes on where a run is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peerbayes.errors import InputError, reason
from peerbayes.recipes.recipe import Recipe
from peerbayes.runs.loggers import LOGGERS, Logger
from peerbayes.runs.run import Run, read_json, write_text
from peerbayes.training.reporters import Reporter

STATE = "log.json"
CURVES = ("retention", "selective", "reliability")  # of records: no single figures


class Trackers(Reporter):
    """Passes all events on to another reporter, and what is measured to loggers.

    A logger that fails is named in a warning and left alone from then on; the run goes on. What it has missed it gets
    from metrics.jsonl when the run is resumed.

    Args:
        names: of loggers.
        inner: the other reporter.
    """

    def __init__(self, names: Sequence[str], inner: Reporter) -> None:
        self.names, self.inner = names, inner
        self._logged: dict[Path, _Logged] = {}  # also of reporters for runs beside this one
        self._failed: set[str] = set()
        self._folder = Path()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        for folder in list(self._logged):
            self._end(self._logged.pop(folder))

    # ---- events ---------------------------------------------------------------------------------------------------

    def begin(self, folder: Path, recipe: Recipe, about: Mapping[str, Any]) -> None:
        """Open the loggers of a run, or go on with them."""
        self.inner.begin(folder, recipe, about)
        self._folder = folder
        self._logged[folder] = self._begun(folder, recipe, about)

    def epoch(self, line: Mapping[str, Any]) -> None:
        """Log a line."""
        self.inner.epoch(line)
        self._log(self._logged[self._folder], [line])

    def result(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Log the figures of a finished run, once, and close its loggers."""
        self.inner.result(folder, record)
        figures, logged = figures_of(record), self._logged.pop(folder, None)
        which = hashlib.blake2b(json.dumps(figures).encode(), digest_size=6).hexdigest()
        if logged is None:
            states = _states(folder)
            if all(states.get(name, {}).get("figures") == which for name in self.names):
                return
            run = Run(folder)
            logged = self._begun(folder, run.recipe, run.about)
        for name, logger in list(logged.loggers.items()):
            state = logged.states[name]
            if state.get("figures") != which:
                with self._trying(logged, name):
                    logger.figures(figures, max(0, state["step"]))  # a recipe may have no stages
                    state["figures"] = which
        self._end(logged)

    def beside(self, label: str) -> Reporter:
        """Return a reporter of another run, with the same loggers."""
        other = Trackers(self.names, self.inner.beside(label))
        other._logged, other._failed = self._logged, self._failed
        return other

    def headline(self, text: str) -> None:
        """Pass it on."""
        self.inner.headline(text)

    def stage(self, number: int, count: int, epochs: int, done: int) -> None:
        """Pass it on."""
        self.inner.stage(number, count, epochs, done)

    def warn(self, text: str) -> None:
        """Pass it on."""
        self.inner.warn(text)

    def close(self) -> None:
        """Pass it on; the run's figures may still come."""
        self.inner.close()

    # ---- loggers --------------------------------------------------------------------------------------------------

    def _begun(self, folder: Path, recipe: Recipe, about: Mapping[str, Any]) -> _Logged:
        logged = _Logged(folder, _states(folder))
        for name in self.names:
            state = logged.states.setdefault(name, {})
            if name in self._failed:
                continue
            with self._trying(logged, name):
                logged.loggers[name] = logger = LOGGERS[name](folder, state)
                begins = logger.again if "step" in state else logger.parameters
                begins(parameters_of(folder, recipe, about), recipe.to_toml())
                state.setdefault("step", -1)
        self._log(logged, Run(folder).metrics)
        return logged

    def _log(self, logged: _Logged, lines: Sequence[Mapping[str, Any]]) -> None:
        """Hand each logger the lines that it does not have: a resumed run comes by steps that it has come by before."""
        for name, logger in list(logged.loggers.items()):
            state = logged.states[name]
            with self._trying(logged, name):
                for line in lines:
                    if line["step"] > state["step"]:
                        logger.metrics(metrics_of(line), line["step"])
                        state["step"] = line["step"]
        logged.keep()

    def _end(self, logged: _Logged) -> None:
        logged.keep()
        finished = bool(read_json(logged.folder / "run.json").get("finished"))
        for name, logger in list(logged.loggers.items()):
            with self._trying(logged, name):
                logger.close(finished)

    @contextlib.contextmanager
    def _trying(self, logged: _Logged, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a server, a disk, or a library: none is worth a run
            logged.loggers.pop(name, None)
            if name not in self._failed:
                self._failed.add(name)
                self.inner.warn(
                    f"{logged.folder}: {name} has failed, and nothing more is logged to it: {reason(error)}"
                )


@dataclass
class _Logged:
    """A run's loggers.

    Attributes:
        folder: the run folder.
        states: by logger, its run there, the last step that was logged, and which figures of the end; in log.json.
        loggers: those that work.
    """

    folder: Path
    states: dict[str, dict[str, Any]]
    loggers: dict[str, Logger] = field(default_factory=dict)

    def keep(self) -> None:
        """Write the states, where they go on."""
        with contextlib.suppress(OSError):  # of a full disk, of which metrics.jsonl tells
            write_text(self.folder / STATE, json.dumps(self.states, indent=1))


def _states(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / STATE
    try:
        states = read_json(path) if path.is_file() else {}
    except InputError:  # damaged: as if nothing had been logged
        return {}
    return {name: state for name, state in states.items() if isinstance(state, dict)}


# ---- what is logged --------------------------------------------------------------------------------------------------


def parameters_of(folder: Path, recipe: Recipe, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run is: its recipe, key by key, seed, folder, versions and hardware.

    Args:
        folder: the run folder.
        recipe: its recipe.
        about: what run.json says of it.
    """
    first = {"recipe": recipe.name, "digest": recipe.digest, "folder": str(folder.resolve())}
    described = {key: about[key] for key in ("seed", "hardware", "engine", "precision", "versions") if key in about}
    return first | dict(_flat(described, ".")) | dict(_flat(recipe.model_dump(exclude_none=True), "."))


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of metrics.jsonl by name: ``lr``, ``PEER/loss``, ``PEER/gradient_share/TERM``..."""
    general = {key: value for key, value in line.items() if key not in ("step", "peers")}
    return _numbers(general | dict(line["peers"]))


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a record on the test split by name: ``test/PEER/accuracy``..."""
    judged = {peer["name"]: peer for peer in record["peers"]}
    judged |= {"ensemble": record["ensemble"]} if "ensemble" in record else {}
    return _numbers({
        "test": {who: {key: value for key, value in peer.items() if key not in CURVES} for who, peer in judged.items()}
    })  # fmt: skip


def _numbers(table: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in _flat(table, "/")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _flat(node: Mapping[str, Any], joint: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by path; tables in a list go by their number, other lists are texts."""
    for key, value in node.items():
        path = f"{above}{key}"
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _flat(value, joint, path + joint)
        else:
            yield path, str(value) if isinstance(value, list) else value
