"""Open the database of a sweep's study, shared by processes that may die."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from peerbayes.errors import InputError, reason

if TYPE_CHECKING:
    import optuna
    import sqlalchemy


BEAT, GRACE = 20, 120  # seconds between two beats, and without one until a process on another machine counts as dead


def check_optuna() -> None:
    """Check that Optuna is installed, and silence its logging."""
    try:
        import optuna
    except ImportError:
        raise InputError("sweeps need optuna: pip install 'peerbayes[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def hide_password(url: str) -> str:
    """Return a database's address without its password."""
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)


@contextlib.contextmanager
def reaching(url: str, *others: type[Exception]) -> Iterator[None]:
    """Turn a database's errors into one sentence.

    Args:
        url: the database's address.
        others: further errors to turn.
    """
    import optuna
    import sqlalchemy.exc

    database = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
    caught: tuple[type[Exception], ...] = (*database, *others)
    try:
        yield
    except caught as error:
        cause = error.__cause__ or error
        why = reason(cause).rstrip(".")
        if isinstance(cause, ModuleNotFoundError):
            why = f"its driver, the Python package '{cause.name}', is not installed"
        raise InputError(f"the study's database {hide_password(url)} can't be used: {why}") from None


class Worker:
    """A process among those that use the sweep's folder: it holds a lock on a file while it lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = f"{platform.node()}-{secrets.token_hex(4)}"
        self._dead: set[str] = set()  # their files are gone, but they may have had several trials
        self._file: IO[str] | None = None
        if os.name == "posix":
            self._file = open(self._path(self.token), "w")  # noqa: SIM115 - it is locked until the end
            _lock(self._file)

    def _path(self, token: str) -> Path:
        return self.folder / f".worker-{token}"

    def is_dead(self, token: str) -> bool:
        """Return whether a worker of this machine and folder has ended; for others only their heartbeat shows it."""
        path = self._path(token)
        if token in self._dead:
            return True
        if os.name != "posix" or token.rpartition("-")[0] != platform.node() or not path.is_file():
            return False
        with open(path) as file:
            dead = _lock(file)
        if dead:
            self._dead.add(token)
            path.unlink(missing_ok=True)
        return dead

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._path(self.token).unlink(missing_ok=True)
            self._file.close()


def _lock(file: IO[str]) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def calm() -> Iterator[None]:
    # Optuna calls heartbeats experimental and expects its own loop; we send them ourselves.
    """Silence Optuna's warnings about heartbeats inside the block."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage is supposed to be used with Study.optimize")
        yield


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Open a study's database; try again while another process creates its tables."""
    import optuna

    waiting = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    for attempt in range(5):
        try:
            with calm():
                storage = optuna.storages.RDBStorage(url, waiting, heartbeat_interval=BEAT, grace_period=GRACE)
            break
        except Exception as error:
            # Another process is creating the tables.
            if attempt == 4 or not re.search("already exists|UNIQUE|duplicate", str(error)):
                raise
            time.sleep(0.2 * (attempt + 1))
    if storage.engine.dialect.name == "sqlite":
        _lock_before_reading(storage.engine)
    return storage


def _lock_before_reading(engine: sqlalchemy.Engine) -> None:
    # Optuna looks whether a trial waits, then takes it. Servers lock the row in between; SQLite's driver begins its
    # transactions at the first write, so two processes may both have looked: here they begin, and lock, at once.
    from sqlalchemy import event

    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # of connections that are open already


def create_study(storage: optuna.storages.RDBStorage, name: str, maximise: bool) -> optuna.Study:
    """Create a study, or load it if it exists.

    Args:
        storage: its database.
        name: the study's.
        maximise: whether larger values are better.
    """
    import optuna

    with contextlib.suppress(optuna.exceptions.DuplicatedStudyError):
        return optuna.create_study(study_name=name, storage=storage, direction="maximize" if maximise else "minimize")
    return optuna.load_study(study_name=name, storage=storage)


def close_storage(storage: optuna.storages.RDBStorage) -> None:
    """Close all connections to a study's database."""
    storage.remove_session()
    storage.engine.dispose()
