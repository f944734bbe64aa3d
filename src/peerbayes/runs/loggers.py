"""Where people watch runs, a class a logger: TensorBoard, MLflow, Weights & Biases, Trackio."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from peerbayes.choices import LoggerName
from peerbayes.errors import InputError, nearest, reason

PROJECT = "peerbayes"
Values = Mapping[str, float]


class Logger(ABC):
    """One run in one logger.

    Args:
        folder: the run folder.
        state: what the logger has to know to go on with the run, kept in the folder; emptied where it can't go on.
    """

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self.folder, self.state = folder, state

    @abstractmethod
    def parameters(self, values: Mapping[str, Any], text: str) -> None:
        """Log what the run is.

        Args:
            values: by key.
            text: the recipe, as TOML.
        """

    def again(self, values: Mapping[str, Any], text: str) -> None:  # noqa: B027 (most keep what they have)
        """Log it for a run that goes on."""

    @abstractmethod
    def metrics(self, values: Values, step: int) -> None:
        """Log figures of an epoch.

        Args:
            values: by name.
            step: steps that were made so far.
        """

    def figures(self, values: Values, step: int) -> None:
        """Log what the finished run is worth."""
        self.metrics(values, step)

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Write what is left; nothing more comes from this process."""


class TensorBoardLogger(Logger):
    """Event files in the run folder: ``tensorboard --logdir runs``."""

    package: ClassVar[str] = "torch.utils.tensorboard"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        from torch.utils.tensorboard import SummaryWriter

        events = folder / "tensorboard"
        if not events.is_dir():
            state.clear()
        self.writer: Any = SummaryWriter(str(events))

    def parameters(self, values: Mapping[str, Any], text: str) -> None:
        """Write the recipe as text, and hyperparameters for the tab of that name."""
        from torch.utils.tensorboard.summary import hparams

        self.writer.add_text("recipe", f"```toml\n{text}\n```", 0)
        for summary in hparams(dict(values), {}):  # in this file; the writer's own way makes a folder below it
            self.writer.file_writer.add_summary(summary)

    def metrics(self, values: Values, step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, finished: bool) -> None:  # noqa: ARG002 (TensorBoard has no word for it)
        """Close the file."""
        self.writer.close()


class MLflowLogger(Logger):
    """A run of ``MLFLOW_EXPERIMENT_NAME`` or ``peerbayes``, at ``MLFLOW_TRACKING_URI`` or MLflow's own place."""

    package: ClassVar[str] = "mlflow"
    MAX_PARAMETERS: ClassVar[int] = 100  # parameters a call

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.client = MlflowClient()
        if "run" in state:
            try:
                self.client.update_run(state["run"], status="RUNNING")
                return
            except MlflowException:  # another store than the one that it began in
                state.clear()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if existing is None else existing.experiment_id
        state["run"] = self.client.create_run(experiment, run_name=_title(folder)).info.run_id

    def parameters(self, values: Mapping[str, Any], text: str) -> None:  # noqa: ARG002 (its parts are the parameters)
        """Log parameters, a hundred at a time."""
        from mlflow.entities import Param

        given = [Param(_plain(name), str(value)) for name, value in values.items()]
        for start in range(0, len(given), self.MAX_PARAMETERS):
            self.client.log_batch(self.state["run"], params=given[start : start + self.MAX_PARAMETERS])

    def metrics(self, values: Values, step: int) -> None:
        """Log metrics."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        given = [Metric(_plain(name), value, now, step) for name, value in values.items()]
        self.client.log_batch(self.state["run"], metrics=given)

    def close(self, finished: bool) -> None:
        """Say how it ended."""
        self.client.set_terminated(self.state["run"], status="FINISHED" if finished else "KILLED")


class WandbLogger(Logger):
    """A run of the project ``WANDB_PROJECT`` or ``peerbayes``, by wandb's own settings (``WANDB_MODE=offline``)."""

    package: ClassVar[str] = "wandb"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        import wandb

        state.setdefault("run", uuid.uuid4().hex[:8])
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.run: Any = wandb.init(
            project=project, id=state["run"], name=_title(folder), resume="allow", reinit="create_new"
        )

    def parameters(self, values: Mapping[str, Any], text: str) -> None:
        """Fill the run's configuration."""
        self.run.config.update({**values, "recipe.toml": text}, allow_val_change=True)

    def metrics(self, values: Values, step: int) -> None:
        """Log a row of the run's history."""
        self.run.log(dict(values), step=step)

    def figures(self, values: Values, step: int) -> None:  # noqa: ARG002 (a summary has none)
        """Fill the run's summary."""
        self.run.summary.update(dict(values))

    def close(self, finished: bool) -> None:
        """End the run."""
        self.run.finish(exit_code=0 if finished else 1)


class TrackioLogger(Logger):
    """A run of the project ``TRACKIO_PROJECT`` or ``peerbayes``, in Trackio's own folder (``TRACKIO_DIR``)."""

    package: ClassVar[str] = "trackio"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        import trackio

        state.setdefault("run", f"{_title(folder)}-{uuid.uuid4().hex[:6]}")  # runs go on by their names
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        with contextlib.redirect_stdout(sys.stderr):  # which it greets on; the verbs' JSON goes there
            self.run: Any = trackio.init(project=project, name=state["run"], resume="allow", embed=False)

    def parameters(self, values: Mapping[str, Any], text: str) -> None:
        """Fill the run's configuration."""
        self.run.config.update({**values, "recipe.toml": text})

    again = parameters  # Trackio writes what it was given last

    def metrics(self, values: Values, step: int) -> None:
        """Log a row."""
        self.run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:  # noqa: ARG002 (Trackio has no word for it)
        """Write what is left."""
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


LOGGERS: dict[str, Any] = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MLflowLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}
assert set(LOGGERS) == {*get_args(LoggerName)}


def loggers_named(log: str | Sequence[str]) -> tuple[str, ...]:
    """Return the loggers of ``"tensorboard,mlflow"``, or of a list; refuse what is not known or not installed."""
    given = log.split(",") if isinstance(log, str) else log
    names = tuple(dict.fromkeys(name.strip() for name in given if name.strip()))
    for name in names:
        if name not in LOGGERS:
            hint = nearest(name, LOGGERS)
            raise InputError(f"log: there is no logger '{name}'{hint}")
        try:
            importlib.import_module(LOGGERS[name].package)
        except ImportError as error:
            absent = isinstance(error, ModuleNotFoundError)
            what = "is not installed" if absent else f"can't be imported ({reason(error)})"
            raise InputError(f"log: {name} {what}: pip install 'peerbayes[{name}]'") from None
    return names


def _title(folder: Path) -> str:
    """Return a run's name among others: the last parts of its path, as the seeds of a run are called alike."""
    return "/".join(folder.resolve().parts[-2:])


def _plain(name: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", name)
