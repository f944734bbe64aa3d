"""Recipes: data + peers + stages + evaluation, in one TOML file."""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, model_validator

from peerbayes.errors import InputError, nearest
from peerbayes.networks.weights_files import is_weights_file
from peerbayes.recipes.packaged import packaged, parsed, rows
from peerbayes.recipes.settings import CUSTOM, Data, Evaluation, Peer, Stage, TeacherOptions
from peerbayes.schema import Strict


class Recipe(Strict):
    """A whole experiment.

    Attributes:
        name: the recipe's own name; filled in when it is loaded.
        title: what it trains, in a sentence.
        reproduces: which row of which table of a paper, if it does.
        stages: in their order; without any the peers are evaluated as they start.
        method: the short name that tables use: ``dnn``, ``vanilla``, ``dml``, ``ours``, ...
        update: ``simultaneous`` updates all peers from one set of outputs; with ``sequential`` each peer sees those
            before it after their update.
        gradient_share_every: steps between two measurements of each term's share of the gradient; 0 for never,
            ``epoch`` for an epoch or 100 steps, whichever is longer.

    Example:
        >>> import peerbayes as pb
        >>> isinstance(pb.load_recipe("plain"), pb.Recipe)
        True
    """

    name: str = ""
    title: str
    reproduces: str = ""
    method: str = "custom"
    data: Data = Data()
    teachers: TeacherOptions | None = None
    peers: Annotated[list[Peer], Field(min_length=1)]
    stages: list[Stage]
    update: Literal["simultaneous", "sequential"] = "simultaneous"
    gradient_share_every: Annotated[int, Field(ge=0)] | Literal["epoch"] = "epoch"
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _distinct_peers(self) -> Recipe:
        names = [peer.name for peer in self.peers]
        if len(set(names)) < len(names):
            raise ValueError(f"peers must have different names ({', '.join(names)})")
        return self

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> Recipe:
        for peer in self.peers if not self.stages else ():
            if peer.start_from is None and peer.network != CUSTOM:
                raise ValueError(
                    f"stages are empty, and peer '{peer.name}' has no start_from: nothing was learnt by it"
                )
        return self

    def peer(self, name: str) -> Peer:
        """Return the settings of the peer of that name."""
        return next(peer for peer in self.peers if peer.name == name)

    @property
    def epochs(self) -> int:
        """Epochs of all stages."""
        return sum(stage.epochs for stage in self.stages)

    @property
    def digest(self) -> str:
        """A short hash of the whole recipe: runs that have it in common differ in the seed alone."""
        return _hash(self.model_dump(exclude_none=True))

    def digest_of_seed(self, seed: int) -> str:
        """Return a short hash that runs have in common that start from, or learn from, runs of their own seeds."""
        table = self.model_dump(exclude_none=True)
        for peer in table["peers"]:
            if "start_from" in peer:
                peer["start_from"] = _without_seed(peer["start_from"], seed)
        if "teachers" in table:
            table["teachers"]["runs"] = [_without_seed(run, seed) for run in table["teachers"]["runs"]]
        return _hash(table)

    def to_toml(self) -> str:
        """Return the complete recipe as TOML, defaults filled in."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def over_epochs(recipe: Recipe, epochs: int) -> Recipe:
    """Return a recipe that takes so many epochs in all: stages, milestones, warm-up and schedules in proportion.

    Args:
        recipe: whose stages are scaled.
        epochs: of all stages.
    """
    if not isinstance(epochs, int) or epochs < len(recipe.stages):
        raise InputError(f"epochs is {epochs!r}, expected at least {len(recipe.stages)}, one a stage of {recipe.name}")
    table, ratio = recipe.model_dump(exclude_none=True), epochs / max(1, recipe.epochs)
    begun = scaled = 0
    for index, stage in enumerate(table["stages"]):
        begun += stage["epochs"]
        left = len(table["stages"]) - index - 1  # each of them keeps one
        stage["epochs"] = min(max(1, round(begun * ratio) - scaled), epochs - scaled - left)
        scaled += stage["epochs"]
        stage["warmup"] *= ratio
        stage["lr_milestones"] = sorted({max(1, round(milestone * ratio)) for milestone in stage["lr_milestones"]})
        for options in stage["terms"].values():
            _scale_schedules(options, ratio)
    return Recipe.parse(table, f"recipe {recipe.name}")


def _scale_schedules(options: dict[str, Any], ratio: float) -> None:
    for key, value in options.items():
        if key in ("anneal", "epochs"):
            options[key] = value * ratio
        elif key == "at":
            options[key] = [epoch * ratio for epoch in value]
        elif isinstance(value, dict):
            _scale_schedules(value, ratio)


def _hash(table: Mapping[str, Any]) -> str:
    return hashlib.blake2b(tomli_w.dumps(table).encode(), digest_size=4).hexdigest()


def _without_seed(source: str, seed: int) -> str:
    """Return ``runs/dnn-seed`` of ``runs/dnn-seed3``, where that is the seed."""
    return re.sub(rf"seed{seed}(?!\d)", "seed", source)


def changes_of(recipe: Recipe) -> list[str]:
    """Return how a recipe differs from the packaged one of its name: the lines that `--set` makes it of that one with.

    Of what lies at an absolute path only the name is told, not where it lies.
    """
    if recipe.name not in packaged():
        return []
    return changes_between(load_recipe(recipe.name), recipe)


def changes_between(before: Recipe, after: Recipe) -> list[str]:
    """Return the lines that `--set` makes one recipe of another with.

    Args:
        before: the one recipe.
        after: the other.
    """
    return list(_lines([], before.model_dump(), after.model_dump()))


def _lines(path: list[str], before: Any, after: Any) -> Iterator[str]:
    """Yield what changes one value into another: lines for parts of it where these can, or one for the whole."""
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() <= after.keys():
        for key, value in after.items():
            yield from _lines([*path, key], before.get(key, ...), value)  # which equals nothing
        return
    tables = isinstance(before, list) and isinstance(after, list) and len(before) == len(after)
    if tables and all(isinstance(item, dict) for item in (*before, *after)):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from _lines([*path, str(index)], *pair)
        return
    key = io.StringIO()
    csv.writer(key, delimiter=".", lineterminator="").writerow(path)
    bare = _without_folder(after) if isinstance(after, str) else ""
    yield f"{key.getvalue()}={bare if bare and read_value(bare) == bare else _toml(after)}"


def without_folders(recipe: Recipe) -> Recipe:
    """Return a recipe that names files and folders, but not where they lie on this machine."""
    table = recipe.model_dump(exclude_none=True)
    data, evaluation = table["data"], table["evaluation"]
    table["name"], data["name"] = _without_folder(table["name"]), _without_folder(data["name"])
    for key in ("vectors", "tokenizer") if "text" in data else ():
        data["text"][key] = _without_folder(data["text"][key])
    for peer in table["peers"]:
        if "start_from" in peer:
            peer["start_from"] = _without_folder(peer["start_from"])
    if "teachers" in table:
        table["teachers"]["runs"] = [_without_folder(run) for run in table["teachers"]["runs"]]
    evaluation["out_of_distribution"] = [_without_folder(name) for name in evaluation["out_of_distribution"]]
    return Recipe.parse(table, f"recipe {recipe.name}")


def _toml(value: Any) -> str:
    """Return a value as TOML in one line; ``none`` for what is not given, which TOML has no word for."""
    if isinstance(value, dict):
        given = {_toml_key(key): _toml(item) for key, item in value.items() if item is not None}
        return f"{{{', '.join(f'{key} = {item}' for key, item in given.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if value is None:
        return "none"
    return tomli_w.dumps({"value": _without_folder(value) if isinstance(value, str) else value})[len("value = ") : -1]


def _toml_key(key: str) -> str:
    return tomli_w.dumps({key: 0})[: -len(" = 0\n")]


def _without_folder(value: str) -> str:
    path = Path(value)
    kept = 2 if is_weights_file(path) else 1  # all weights files have names alike
    return "/".join(path.parts[-kept:]) if path.is_absolute() else value


def is_recipe(source: str) -> bool:
    """Whether what weights come from, or a teacher, is a recipe, to be trained if need be, not a run or its file."""
    path = Path(source).expanduser()
    return source in packaged() or (path.is_file() and not is_weights_file(path))


def load_recipe(recipe: str | Path | Recipe, overrides: str | Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or file (or take one), apply overrides such as ``stages.0.epochs=5``, and validate it.

    Args:
        recipe: a name, a TOML file, or a recipe.
        overrides: changes, in order.

    Example:
        >>> import peerbayes as pb
        >>> recipe = pb.load_recipe("mutual/digits-ours", ["stages.*.epochs=3"])
        >>> recipe.epochs, [peer.name for peer in recipe.peers]
        (6, ['scratch', 'pretrained'])
    """
    if isinstance(recipe, Recipe):
        if not overrides:
            return recipe
        origin, name, table = f"recipe {recipe.name or recipe.title}", recipe.name, recipe.model_dump(exclude_none=True)
    else:
        path, origin, name = _find(recipe)
        table = _read(path, origin, name)
    for override in listed(overrides):
        change(table, override, origin)
    table.setdefault("name", name)
    return Recipe.parse(table, origin)


def listed(overrides: str | Sequence[str]) -> Sequence[str]:
    """Return overrides as a list; a text is one of them, not one a letter."""
    return [overrides] if isinstance(overrides, str) else list(overrides)


def _read(path: Path, origin: str, name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a recipe's table; one that ``extends`` another has its keys, but for those it ``set``s or gives itself."""
    table = dict(rows()[name][1]) if name in rows() else parsed(path, origin)
    if "extends" not in table and "base" not in table:
        return table
    changes = table.pop("set", [])
    if "base" in table:
        base: dict[str, Any] = copy.deepcopy(table.pop("base"))
    else:
        if not isinstance(table["extends"], str) or not isinstance(changes, list):
            raise InputError(
                f"{origin}: 'extends' must name a recipe, and 'set' be a list such as ['stages.0.epochs=5']"
            )
        wanted = table.pop("extends")
        beside = path.parent / wanted  # a file is looked for beside the recipe first
        try:
            below, below_origin, below_name = _find(beside if beside.is_file() else wanted)
        except InputError as error:
            raise InputError(f"{origin}: extends '{wanted}', but {error}") from None
        chain = (*above, f"{path.resolve()} {name}")
        if f"{below.resolve()} {below_name}" in chain:
            raise InputError(f"{origin}: extends itself by way of {below_origin}")
        base = _read(below, below_origin, below_name, chain)
    for line in changes:
        change(base, str(line), origin)
    return base | table


def _find(recipe: Any) -> tuple[Path, str, str]:
    if not isinstance(recipe, str | Path):
        kind = type(recipe).__name__
        raise InputError(f"recipe is of type {kind}, expected a name, a file or a Recipe (Recipe.parse makes one)")
    by_name = packaged()
    if str(recipe) in by_name:
        return by_name[str(recipe)], f"recipe {recipe}", str(recipe)
    path = Path(recipe)
    if path.is_file():
        return path, str(path), path.stem
    if path.suffix == ".toml":
        raise InputError(f"{path}: no such recipe file")
    near = nearest(str(recipe), by_name)
    hint = near if near.startswith("; did") else "; see 'peerbayes recipes list'"
    raise InputError(f"there is no recipe '{recipe}'{hint}")


def change(table: dict[str, Any], override: str, origin: str) -> None:
    """Change a recipe's table in place, by a line such as ``stages.0.epochs=5``.

    Args:
        table: of the recipe.
        override: ``KEY=VALUE``.
        origin: the recipe's name, which begins the error.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise InputError(f"--set {override}: expected KEY=VALUE, such as stages.0.epochs=5")
    parts = keys(path)
    parts[0] = {"stage": "stages", "peer": "peers"}.get(parts[0], parts[0])
    if parts[0] not in Recipe.model_fields and (meant := _meant(parts, table)):
        raise InputError(f"{origin}: --set {override}: there is no key '{path}'{meant}")
    _put(table, parts, read_value(text), f"{origin}: --set {override}")


def _meant(parts: Sequence[str], table: Mapping[str, Any]) -> str:
    try:
        return keys_meant(parts, Recipe.parse(table, ""))
    except InputError:  # it is not whole before it has been changed
        return ""


def keys_meant(parts: Sequence[str], recipe: Recipe) -> str:
    """Return ``"; did you mean 'stages.*.epochs'?"`` for the last parts of a key; "" where no key ends in them.

    Args:
        parts: of the key.
        recipe: whose keys may be meant.
    """
    ends = [path for path in dict.fromkeys(_paths((), recipe.model_dump())) if path[-len(parts) :] == tuple(parts)]
    meant = [f"'{'.'.join(path)}'" for path in ends[:3]]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _paths(above: tuple[str, ...], node: Any) -> Iterator[tuple[str, ...]]:
    """Yield the keys of all tables and values, with ``*`` for the place in a list of tables."""
    pairs = node.items() if isinstance(node, dict) else (("*", item) for item in node if isinstance(item, dict))
    for key, value in pairs:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _paths((*above, key), value)


def read_value(text: str) -> Any:
    """Return the value that a text is in TOML; a bare word is a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def keys(path: str) -> list[str]:
    """Return the keys of a path such as ``stages.0.epochs``; one with a point in it stands in double quotes."""
    return next(csv.reader([path], delimiter="."))


def _put(node: Any, parts: list[str], value: Any, origin: str) -> None:
    head, rest = parts[0], parts[1:]
    if isinstance(node, list):
        indices = range(len(node)) if head == "*" else [_index(node, head, origin)]
        for index in indices:
            if rest:
                _put(node[index], rest, value, origin)
            else:
                node[index] = copy.deepcopy(value)
    elif isinstance(node, dict):
        if rest:
            _put(node.setdefault(head, {}), rest, value, origin)
        else:
            node[head] = copy.deepcopy(value)  # of many items, a later line may change one's alone
    else:
        raise InputError(f"{origin}: '{head}' is below a plain value")


def _index(node: list[Any], head: str, origin: str) -> int:
    if head.isdigit() and int(head) < len(node):
        return int(head)
    by_name = [i for i, item in enumerate(node) if isinstance(item, dict) and item.get("name") == head]
    if by_name:
        return by_name[0]
    names = ", ".join(str(item["name"]) for item in node if isinstance(item, dict) and "name" in item)
    raise InputError(f"{origin}: there is no item '{head}' ({names or f'0 to {len(node) - 1}'}, or *)")
