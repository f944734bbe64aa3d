"""From a trained run to one whose weights share a codebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peerbayes.errors import InputError
from peerbayes.learning.recipe import Recipe, change, load_recipe
from peerbayes.learning.run import Run


def recipe_from(recipe: str | Path, source: Path, changes: Sequence[str] = ()) -> Recipe:
    """Return a recipe of one peer that starts from a trained one, with its network and the data that it has learnt.

    Args:
        recipe: its name or file.
        source: a weights file of a run.
        changes: of the recipe, such as ``stages.0.epochs=5``.
    """
    base = load_recipe(recipe)
    if len(base.peers) != 1:
        raise InputError(f"recipe {recipe}: expected one peer, which starts from the run")
    run, name = Run(source.parent), peer_of(source)
    table = base.model_dump(exclude_none=True)
    table["data"] = run.recipe.data.model_dump(exclude_none=True)
    table["peers"][0] |= {
        "network": next(peer.network for peer in run.recipe.peers if peer.name == name),
        "start_from": str(source.resolve()),
    }
    for one in changes:
        change(table, one, f"recipe {recipe}")
    return Recipe.parse(table, f"recipe {recipe}")


def weights_of(path: Path) -> Path:
    """Return the weights file of a run's only peer, or the file that was given itself."""
    if path.suffix == ".safetensors":
        run, name = Run(path.parent), peer_of(path)
        if name not in run:
            raise InputError(f"{path}: no weights file of the run in {run.folder}, which has peers {', '.join(run)}")
    else:
        run = Run(path)
        if len(run) != 1:
            raise InputError(f"{path}: has peers {', '.join(run)}; name one of its weights-*.safetensors files")
        name = next(iter(run))
    if not run.finished:
        raise InputError(f"{run.folder}: the run is not finished; 'peerbayes train --resume' goes on with it")
    return run.weights_file(name)


def kind_of(weights: Path) -> str:
    """Return the kind of posterior that a weights file of a run holds, by its recipe."""
    return next(p.posterior.kind for p in Run(weights.parent).recipe.peers if p.name == peer_of(weights))


def peer_of(weights: Path) -> str:
    """Return whose weights a file of a run holds."""
    return weights.name.removeprefix("weights-").removesuffix(".safetensors")
