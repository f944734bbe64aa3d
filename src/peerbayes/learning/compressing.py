"""From a trained run to one whose weights share a codebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peerbayes.errors import InputError
from peerbayes.learning.recipe import Recipe, change, load_recipe
from peerbayes.learning.run import Run, peers_at
from peerbayes.learning.sources import Job, is_trained, source_of


def recipe_from(recipe: str | Path, source: Path, changes: Sequence[str] = (), start: Path | None = None) -> Recipe:
    """Return a recipe of one peer that starts from a trained one, with its network and the data that it has learnt.

    Args:
        recipe: its name or file.
        source: a weights file of a run.
        changes: of the recipe, such as ``stages.0.epochs=5``.
        start: weights file to start from, where it is another one of that network, which may not be there yet.
    """
    base = load_recipe(recipe)
    if len(base.peers) != 1:
        raise InputError(f"recipe {recipe}: expected one peer, which starts from the run")
    run, (name, *_) = peers_at(source)
    table = base.model_dump(exclude_none=True)
    table["data"] = run.recipe.data.model_dump(exclude_none=True)
    table["peers"][0] |= {
        "network": next(peer.network for peer in run.recipe.peers if peer.name == name),
        "start_from": str((start or source).resolve()),
    }
    for one in changes:
        change(table, one, f"recipe {recipe}")
    return Recipe.parse(table, f"recipe {recipe}")


def weights_of(path: Path) -> Path:
    """Return the weights file of a run's only peer, or the file that was given itself."""
    run, names = peers_at(path)
    if len(names) > 1:
        raise InputError(f"{path}: has peers {', '.join(names)}; name one of its weights-*.safetensors files")
    if not run.finished:
        raise InputError(f"{run.folder}: the run is not finished; 'peerbayes train --resume' goes on with it")
    return run.weights_file(names[0])


def kind_of(weights: Path) -> str:
    """Return the kind of posterior that a weights file of a run holds, by its recipe."""
    run, (name, *_) = peers_at(weights)
    return next(peer.posterior.kind for peer in run.recipe.peers if peer.name == name)


def source_weights(run: Run, name: str) -> Path | None:
    """Return the weights file that a peer of a run started from; None where there was none, or is none any more."""
    peer = next(peer for peer in run.recipe.peers if peer.name == name)
    try:
        source = source_of(peer, run.recipe, run.seed, run.folder.parent)
    except InputError:
        return None
    if isinstance(source, Job):
        source = weights_of(source.folder) if is_trained(source.folder) else None
    return source if source is not None and source.is_file() else None
