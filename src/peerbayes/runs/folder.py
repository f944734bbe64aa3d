"""A run's folder while it is trained: what may lie there, who holds it, and its lines of metrics."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerbayes.errors import InputError
from peerbayes.networks.normalisation import choice_in_words
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.recipe import Recipe, changes_between
from peerbayes.runs.run import MAX_LISTED, TAUGHT_BY, Run, peer_called, write_text

if TYPE_CHECKING:
    from peerbayes.runs.plan import Job


LOCKED = "another process is training this run"
FILES = [
    "run.json",
    "metrics.jsonl",
    "vocabulary.json",
    "sharing.json",
    "log.json",
    "tensorboard",
    "recipe.toml",
    "checkpoint-",
    "weights-",
    "network-",
    "lock",
]


def refuse_occupied(job: Job, resume: bool) -> None:
    """Refuse a folder that holds anything but a run to go on with.

    Args:
        job: whose folder it is.
        resume: whether to go on with a run that is there.
    """
    folder = job.folder
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder for the run")
    if not (folder / "recipe.toml").is_file():
        strange = [path.name for path in folder.iterdir() if not is_of_a_run(path.name)] if folder.is_dir() else []
        if strange or (folder.is_dir() and any(folder.iterdir()) and not resume):
            raise InputError(f"{folder}: the folder is not empty and holds no run; choose another one")
        return
    before = Run(folder)
    if not resume:
        data, other = job.recipe.data.name, before.recipe.data.name
        if data != other:
            raise InputError(f"{folder}: holds a run on '{other}', not '{data}'; choose another folder (--run FOLDER)")
        how = "add --resume (resume=True in Python) to go on with it, or choose another folder"
        raise InputError(f"{folder}: already holds a run; {how}")
    if before.seed != job.seed:
        raise InputError(f"{folder}: holds a run of seed {before.seed}, not {job.seed}")
    if before.recipe != job.recipe:
        raise InputError(f"{folder}: {_other_settings(before.recipe, job.recipe)}, or choose another folder")
    now = choice_in_words(job.given.normalize)
    then = before.about.get("normalize", now)  # older runs do not say
    if then != now:
        raise InputError(f"{folder}: holds a run with normalize={then}, not {now}; give that, or choose another folder")


def _other_settings(before: Recipe, now: Recipe) -> str:
    if before.name != now.name:
        return f"holds a run of another recipe, {before.name} ('{before.title}'), not {now.name}; name that one"
    there, here = changes_between(now, before), changes_between(before, now)
    more = f" and {len(there) - MAX_LISTED} more" if there[MAX_LISTED:] else ""
    return (
        f"holds a run of {before.name} with other settings: {', '.join(there[:MAX_LISTED])}{more} there, "
        f"{', '.join(here[:MAX_LISTED])}{more} here; give those"
    )


def origins_of(peers: Mapping[str, Posterior], teachers: Sequence[Posterior]) -> dict[str, str]:
    """Return digests of what peers started from, by their names, and of those whom they learn from.

    Args:
        peers: by name; those that come from a run become untrained ones, with it as parent.
        teachers: that do not learn.
    """
    for posterior in peers.values():
        if posterior.provenance.state == "trained":  # once it learns, it is another one
            posterior.provenance = replace(posterior.provenance, parent=posterior.digest(), state="untrained")
    parents = {peer_called(name): posterior.provenance.parent for name, posterior in peers.items()}
    origins = {who: parent for who, parent in parents.items() if parent}
    digests = [teacher.digest() for teacher in teachers]
    return origins | ({TAUGHT_BY: " ".join(digests)} if digests else {})


def refuse_other_origins(folder: Path, origins: Mapping[str, str]) -> None:
    """Refuse to go on with a run that began with other weights, or other teachers, than there are now.

    Args:
        folder: the run's.
        origins: digests as of now, from `origins_of`.
    """
    before = Run(folder).origins if (folder / "recipe.toml").is_file() else {}
    for who, now in origins.items():
        if before.get(who, now) != now:
            if who == TAUGHT_BY:
                raise InputError(f"{folder}: holds a run whose peers learn from other teachers; choose another folder")
            raise InputError(other_weights(folder, who))


def other_weights(folder: Path, who: str) -> str:
    """Return what is said where a peer of a run started from other weights than there are now.

    Args:
        folder: the run's.
        who: the peer, from `peer_called`.
    """
    return f"{folder}: holds a run in which {who} started from other weights; choose another folder"


def is_of_a_run(name: str) -> bool:
    """Return whether training may have written a file of that name."""
    return name.lstrip(".").startswith(tuple(FILES))


class MetricsLog:
    """metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> None:
        """Drop the lines of steps that a resumed run will do again."""
        kept = []
        for line in self.path.read_bytes().splitlines() if self.path.is_file() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a kill cut short, or is damaged
                if json.loads(line)["step"] <= step:
                    kept.append(line.decode())
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # of a full disk, which names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from None


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a folder inside the block; refuse one that another process holds."""
    if os.name != "posix":  # two processes on one run folder are then not noticed
        yield
        return
    import fcntl

    path = folder / ".lock"
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(open(path, "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{folder}: {LOCKED}") from None
            # Whoever had it may have removed the file since it was opened: then nobody else would see this lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
