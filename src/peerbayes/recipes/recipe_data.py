"""The data of a recipe, and what a network must know of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from peerbayes import networks
from peerbayes.data.dataset import Dataset, load
from peerbayes.data.vocabulary import TextOptions, Vocabulary
from peerbayes.errors import InputError
from peerbayes.recipes.recipe import Recipe

FEWEST, STEPS = 16, 32  # images in a batch, and batches in an epoch, at least, of a recipe that is fitted to its data


def load_data(recipe: Recipe, root: str | Path | None = None, vocabulary: Vocabulary | None = None) -> Dataset:
    """Load a recipe's data, and check that it has the classes that the recipe is for.

    Args:
        recipe: whose data.
        root: data root.
        vocabulary: a run's, for texts; by default one is built from the training split.
    """
    options = recipe.data
    try:
        loaded = load(
            options.name,
            root=root,
            validation=options.validation,
            size=options.size,
            stats=options.stats,
            text=None if options.text is None else TextOptions(**options.text.model_dump()),
            vocabulary=vocabulary,
        )
    except InputError as error:
        raise InputError(f"data.{error}" if str(error).startswith(("validation ", "stats ")) else str(error)) from error
    if options.classes is not None and loaded.classes != options.classes:
        raise InputError(
            f"the recipe is for {options.classes} classes, but {loaded.name} has {loaded.classes}: "
            f"--set data.classes={loaded.classes} takes them, or --data instead of data.name"
        )
    return loaded


def fitted_to(recipe: Recipe, loaded: Dataset) -> Recipe:
    """Return a recipe with what it leaves to its data: networks called ``auto``, and then crops, flips and batches.

    Images are cropped, and coloured ones flipped; small splits have smaller batches, so that an epoch has some steps.

    Args:
        recipe: the recipe.
        loaded: its data.
    """
    if all(peer.network != networks.AUTO for peer in recipe.peers):
        return recipe
    table = recipe.model_dump(exclude_none=True)
    for peer in table["peers"]:
        if peer["network"] == networks.AUTO:
            peer["network"] = networks.for_inputs(network_inputs(loaded))
    if loaded.vocabulary is None and not recipe.data.augment:
        table["data"]["augment"] = ["crop", "flip"] if loaded.shape[0] == 3 else ["crop"]
    table["data"]["batch_size"] = min(recipe.data.batch_size, max(FEWEST, len(loaded.train) // STEPS))
    return Recipe.parse(table, f"recipe {recipe.name}")


def network_inputs(loaded: Dataset) -> networks.Inputs:
    """Return what a network must know of a data set."""
    asked = loaded.stats is not None
    inputs = networks.Inputs(loaded.classes, loaded.shape, loaded.mean, loaded.std, vectors=loaded.vectors, asked=asked)
    vocabulary = loaded.vocabulary
    if vocabulary is None:
        return inputs
    return replace(inputs, tokens=vocabulary.size, dimension=vocabulary.dimension, padding=vocabulary.padding)


def refuse_other_words(folder: Path, loaded: Dataset) -> None:
    """Refuse weights of a run over texts to which other numbers stand for the words; their shapes may well agree.

    Args:
        folder: the run.
        loaded: data that it is to read.
    """
    path = folder / "vocabulary.json"
    if loaded.vocabulary is None or not path.is_file():
        return
    if replace(Vocabulary.load(path), length=0) != replace(loaded.vocabulary, length=0):
        raise InputError(f"{path}: has other numbers for words than those made of the training split of {loaded.name} "
                         "here; expected the texts and data.text that the run was trained with")  # fmt: skip


def set_data(table: dict[str, Any], data: Any, root: str | Path | None = None) -> Dataset | None:
    """Let a recipe's table name other data, of any number of classes; return them where they come from Python.

    Args:
        table: of a recipe, which is changed.
        data: a data set, or what `peerbayes.data.load` takes; objects are split as the table says.
        root: data root.
    """
    options = table["data"]
    options.pop("classes", None)
    if isinstance(data, str | Path):
        options["name"] = str(data)
        return None
    if isinstance(data, Dataset):
        loaded = data
        for key in ("size", "stats", "text"):
            options.pop(key, None)
        options["validation"] = 0
        options |= {key: value for key, value in (loaded.origin or {}).items() if value is not None}
    else:
        text = None if options.get("text") is None else TextOptions(**options["text"])
        chosen = {key: options.get(key) for key in ("size", "stats")}
        loaded = load(data, root=root, validation=options.get("validation", 0), text=text, **chosen)
    options["name"] = loaded.origin["name"] if loaded.origin is not None else loaded.name
    return loaded
