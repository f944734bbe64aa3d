"""Manage a sweep's Optuna study, which many processes and machines may share.

Each setting is a trial. The settings of a grid go into the study's queue; claiming one is atomic, so no two processes
train the same one (Optuna's grid sampler may hand out a setting twice). A process keeps its claims while it lives: it
holds a lock in the sweep's folder, which the system releases when it dies, and sends heartbeats to the database for
processes that cannot see that folder. Settings of dead processes go back into the queue.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerbayes.choices import Sampler
from peerbayes.errors import InputError
from peerbayes.math.noise import Address
from peerbayes.studies.space import Axis, Setting, corners
from peerbayes.studies.study_storage import (
    BEAT,
    GRACE,
    Worker,
    calm,
    close_storage,
    create_study,
    hide_password,
    open_storage,
    reaching,
)

if TYPE_CHECKING:
    import optuna


_MISSES = 10  # claimed proposals in a row before giving up
_ABOUT = "peerbayes"  # the study's attribute that describes the sweep


@dataclass(frozen=True)
class Claim:
    """A setting claimed by this process."""

    number: int
    setting: Setting
    trial: optuna.trial.Trial


class Study:
    """A study as one process sees it.

    Args:
        url: an Optuna storage: any database that SQLAlchemy reaches.
        name: the study's name.
        about: description of the sweep; a study of that name with another description is refused.
        axes: the keys and values.
        sampler: ``grid`` takes every setting once, ``tpe`` proposes settings from earlier results.
        limit: settings that ``tpe`` tries, over all processes together.
        maximise: whether a larger value is better.
        folder: the sweep's folder, for this process's lock.
    """

    def __init__(
        self,
        url: str,
        name: str,
        about: Mapping[str, Any],
        axes: Sequence[Axis],
        sampler: Sampler,
        limit: int,
        maximise: bool,
        folder: Path,
    ) -> None:
        import optuna

        self.name, self.axes, self.limit, self.grid = name, list(axes), limit, sampler == "grid"
        self._optuna = optuna
        with reaching(url, ImportError, RuntimeError):  # no driver; a database of another Optuna
            self._storage = open_storage(url)
        try:
            self._study = create_study(self._storage, name, maximise)
            self._check(about, url)
        except BaseException:
            close_storage(self._storage)
            raise
        self._distributions = {axis.key: _distribution(axis) for axis in axes}
        folder.mkdir(parents=True, exist_ok=True)
        self._worker = Worker(folder)
        self._mine: dict[int, Claim] = {}
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="peerbayes-heart")
        self._heart.start()

    def _check(self, about: Mapping[str, Any], url: str) -> None:
        expected = json.loads(json.dumps(about))
        # In this order: another process writes the description before it takes a trial.
        begun = bool(self._study.get_trials(deepcopy=False))
        recorded = self._study.user_attrs.get(_ABOUT)
        if recorded is None and not begun:
            self._study.set_user_attr(_ABOUT, expected)
            return
        where = f"study '{self.name}' in {hide_password(url)}"
        if recorded is None:
            raise InputError(f"{where} was not made by a sweep of peerbayes; choose another --study")
        for key, value in expected.items():
            if recorded.get(key) != value:
                raise InputError(
                    f"{where} belongs to another sweep: its {key} is {_short(recorded.get(key))}, not {_short(value)}; "
                    "choose another --study, or another --out"
                )

    def claim(self, count: int) -> list[Claim]:
        """Claim up to ``count`` free settings; none if all others are finished or claimed."""
        self._recover()
        claims: list[Claim] = []
        misses = 0
        # All settings of a small space may be running: do not ask the sampler forever.
        while len(claims) < count and misses < _MISSES and self._work_is_left():
            with calm():
                self._study.sampler = self._sampler()
                trial = self._study.ask(self._distributions)
            claim = Claim(trial.number, {axis.key: trial.params[axis.key] for axis in self.axes}, trial)
            self._storage.record_heartbeat(trial._trial_id)
            trial.set_user_attr("worker", self._worker.token)
            if self._superfluous(claim):
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                misses += not self.grid
                continue
            trial.set_user_attr("setting", claim.setting)
            self._mine[claim.number] = claim
            claims.append(claim)
        return claims

    def finish(self, claim: Claim, value: float, attributes: Mapping[str, Any]) -> None:
        """Record the value of a setting.

        Args:
            claim: the setting.
            value: of the objective.
            attributes: further results, JSON-ready.
        """
        self._tell(claim, attributes, value=value)

    def fail(self, claim: Claim, reason: str) -> None:
        """Record why a setting has no value; it is not tried again.

        Args:
            claim: the setting.
            reason: a sentence.
        """
        self._tell(claim, {"reason": reason}, value=None)

    def _tell(self, claim: Claim, attributes: Mapping[str, Any], value: float | None) -> None:
        states = self._optuna.trial.TrialState
        # After a long suspension another process may have taken this setting; its value is the same.
        with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            for key, attribute in attributes.items():
                claim.trial.set_user_attr(key, attribute)
        state = states.FAIL if value is None else states.COMPLETE
        self._study.tell(claim.trial, value, state=state, skip_if_finished=True)
        del self._mine[claim.number]

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return one trial for each setting, without abandoned and duplicate ones."""
        trials = [trial for trial in self._study.get_trials(deepcopy=False) if not self._given_up(trial)]
        # A trial that another process is creating has no setting yet.
        trials = [trial for trial in trials if "setting" in trial.user_attrs]
        by_setting = {self._setting_of(trial): trial for trial in reversed(trials)}
        return sorted(by_setting.values(), key=lambda trial: trial.number)

    def close(self) -> None:
        """Release claimed settings that are not finished, and disconnect."""
        self._stop.set()
        self._heart.join()
        try:
            for claim in list(self._mine.values()):
                self._study.tell(claim.number, state=self._optuna.trial.TrialState.FAIL, skip_if_finished=True)
                self._enqueue(claim.setting)
        finally:
            self._worker.close()
            close_storage(self._storage)

    def _sampler(self) -> optuna.samplers.BaseSampler:
        from optuna import samplers

        # Seeded by the number of trials: a process that joins or resumes does not repeat the first settings.
        seed = Address(len(self._study.get_trials(deepcopy=False)), self.name, "sweep").key % 2**32
        return samplers.RandomSampler(seed) if self.grid else samplers.TPESampler(seed=seed)

    def _work_is_left(self) -> bool:
        trials = self._study.get_trials(deepcopy=False)
        if any(trial.state == self._optuna.trial.TrialState.WAITING for trial in trials):
            return True
        return not self.grid and sum(not self._given_up(trial) for trial in trials) < self.limit

    def _superfluous(self, claim: Claim) -> bool:
        # Two processes may have put a setting into the queue, or have asked for the last one, at the same moment: the
        # trial with the lower number is the one that counts, whoever looks.
        states = self._optuna.trial.TrialState
        trials = self._study.get_trials(deepcopy=False)
        earlier = [trial for trial in trials if trial.number < claim.number and not self._given_up(trial)]
        if self.grid and "setting" not in claim.trial.user_attrs:
            return True
        if not self.grid and len(earlier) >= self.limit:
            return True
        same = [trial for trial in earlier if self._setting_of(trial) == _key(claim.setting)]
        return any(self.grid or trial.state in (states.WAITING, states.RUNNING) for trial in same)

    def _recover(self) -> None:
        # Fail the trials of dead processes and enqueue their settings; of a grid, every setting without a trial.
        states = self._optuna.trial.TrialState
        running = {t.number for t in self._study.get_trials(deepcopy=False, states=(states.RUNNING,))}
        with calm():
            self._optuna.storages.fail_stale_trials(self._study)
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == states.RUNNING and trial.number not in self._mine and self._is_dead(trial):
                self._study.tell(trial.number, state=states.FAIL, skip_if_finished=True)
        if self.grid:
            settings = {self._setting_of(trial) for trial in self.trials()}
            for setting in corners(self.axes):
                if _key(setting) not in settings:
                    self._enqueue(setting)
            return
        for trial in self._study.get_trials(deepcopy=False, states=(states.FAIL,)):
            if trial.number in running and self._given_up(trial) and "setting" in trial.user_attrs:
                self._enqueue(trial.user_attrs["setting"])

    def _is_dead(self, trial: optuna.trial.FrozenTrial) -> bool:
        token = trial.user_attrs.get("worker")
        if token is not None:
            return self._worker.is_dead(token)
        # The process died between taking a trial and signing it: it has no heartbeat.
        begun = trial.datetime_start
        return begun is not None and datetime.datetime.now() - begun > datetime.timedelta(seconds=GRACE)

    def _enqueue(self, setting: Setting) -> None:
        self._study.enqueue_trial(setting, user_attrs={"setting": setting})

    def _given_up(self, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.state == self._optuna.trial.TrialState.FAIL and "reason" not in trial.user_attrs

    def _setting_of(self, trial: optuna.trial.FrozenTrial) -> str:
        # A trial that did not come from a grid's queue is about to be given up.
        return _key(trial.user_attrs.get("setting", {} if self.grid else trial.params))

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            for claim in list(self._mine.values()):
                with contextlib.suppress(Exception):  # a lost heartbeat does no harm
                    self._storage.record_heartbeat(claim.trial._trial_id)
        self._storage.remove_session()


def _distribution(axis: Axis) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if not axis.is_range:
        return distributions.CategoricalDistribution(axis.values)
    low, high = axis.values
    if isinstance(low, int) and isinstance(high, int):
        return distributions.IntDistribution(low, high, log=axis.log)
    return distributions.FloatDistribution(float(low), float(high), log=axis.log)


def _key(setting: Mapping[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
