"""A run: the folder that a recipe leaves behind, and the truth about it.

recipe.toml              the complete recipe, defaults filled in
run.json                 seed, device, versions, whether it is finished
metrics.jsonl            a line an epoch
checkpoint-*.safetensors the newest two
weights-PEER.safetensors the trained posteriors
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import peerbayes
from peerbayes import data as data_room
from peerbayes import networks
from peerbayes.data import Dataset
from peerbayes.errors import InputError
from peerbayes.learning import checkpoints
from peerbayes.learning.engine import Name, pick
from peerbayes.learning.loop import Learner
from peerbayes.learning.progress import Reporter
from peerbayes.learning.recipe import Peer, Recipe, load_recipe, packaged
from peerbayes.learning.stages import seeded
from peerbayes.noise import Address
from peerbayes.posteriors import MeanField, Point, Posterior, storage


class Run(Mapping[str, Posterior]):
    """A run folder; its peers by name."""

    def __init__(self, folder: str | Path, networks_by_peer: Mapping[str, nn.Module] | None = None) -> None:
        self.folder = Path(folder)
        if not (self.folder / "recipe.toml").is_file():
            raise InputError(f"{self.folder}: not a run folder (it has no recipe.toml)")
        self.recipe = load_recipe(self.folder / "recipe.toml")
        self.about: dict[str, Any] = _read_json(self.folder / "run.json")
        self._networks = networks_by_peer
        self._loaded: dict[str, Posterior] = {}

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.about["seed"])

    @property
    def finished(self) -> bool:
        """Whether training reached its end."""
        return bool(self.about.get("finished", False))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def weights_file(self, peer: str) -> Path:
        """Where a trained peer lies."""
        return self.folder / f"weights-{peer}.safetensors"

    def __getitem__(self, peer: str) -> Posterior:
        if peer not in self._loaded:
            if peer not in list(self):
                raise KeyError(peer)
            if not self.finished:
                raise InputError(f"{self.folder}: the run is not finished; 'peerbayes train --resume' goes on with it")
            self._loaded[peer] = Posterior.load(self.weights_file(peer), self._network(peer))
        return self._loaded[peer]

    def _network(self, peer: str) -> nn.Module:
        if self._networks is not None:
            return self._networks[peer]
        name = next(p.network for p in self.recipe.peers if p.name == peer)
        if name == CUSTOM:
            raise InputError(
                f"{self.folder}: peer '{peer}' has a network of your own; open the run from Python with "
                f"peerbayes.load(folder, networks={{'{peer}': ...}})"
            )
        return networks.build(name, networks.Inputs(**_tuples(self.about["inputs"])))

    def __iter__(self) -> Iterator[str]:
        return (peer.name for peer in self.recipe.peers)

    def __len__(self) -> int:
        return len(self.recipe.peers)


Precision = Literal["auto", "float32", "bfloat16"]
CUSTOM = "custom"  # the network of a peer that came from Python, not from a recipe


def load(folder: str | Path, networks: Mapping[str, nn.Module] | None = None) -> Run:
    """Open a run; ``networks`` by peer are needed where they did not come from a recipe."""
    return Run(folder, networks)


def fit(
    peers: Mapping[str, Posterior],
    *,
    data: str | Path | Dataset,
    recipe: str | Path | Recipe,
    run: str | Path,
    seed: int = 0,
    overrides: Sequence[str] = (),
    resume: bool = False,
    root: str | Path | None = None,
    reporter: Reporter | None = None,
) -> Run:
    """Train your own posteriors by the stages of a recipe.

    Args:
        peers: posteriors by name; they are trained in place and take the place of the recipe's peers.
        data: a data set, or what `peerbayes.data.load` takes; it takes the place of the recipe's.
        recipe: a recipe, its name or its file.
        run: the run folder.
        seed: seed of draws, order and augmentation.
        overrides: changes of the recipe, such as ``"stages.0.epochs=5"``.
        resume: go on with an interrupted run.
        root: data root.
        reporter: is told what happens; silent by default.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    given = [
        {"name": name, "network": CUSTOM, "posterior": {"kind": posterior.kind, **posterior.options()}}
        for name, posterior in peers.items()
    ]
    table = found.model_dump(exclude_none=True)
    table["peers"] = given
    table["data"].pop("classes", None)
    table["data"]["name"] = data.name if isinstance(data, Dataset) else str(data)
    found = _with_full_path(Recipe.parse(table, f"recipe {recipe if not isinstance(recipe, Recipe) else found.title}"))
    loaded = data if isinstance(data, Dataset) else load_data(found, root)
    networks_by_peer = {name: posterior.materialise() for name, posterior in peers.items()}
    for name, posterior in peers.items():
        posterior.seed, posterior.name = seed, name
    _train(found, dict(peers), loaded, Path(run), seed, resume, reporter)
    return Run(run, networks_by_peer)


def train(
    recipe: Recipe,
    run: str | Path,
    *,
    seed: int = 0,
    resume: bool = False,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    reporter: Reporter | None = None,
    checkpoint_every: int | None = None,
    engine: Name | Literal["auto"] = "auto",
    precision: Precision = "auto",
) -> Run:
    """Train a recipe into a run folder; sources that its peers start from are trained first if they are missing.

    Args:
        recipe: a validated recipe.
        run: the run folder.
        seed: seed of everything random.
        resume: go on with an interrupted run.
        device: where to train; ``auto`` takes a GPU where there is one.
        root: data root.
        reporter: is told what happens; silent by default.
        checkpoint_every: steps between checkpoints; by default at the end of an epoch, at most every 10 s.
        engine: ``eager``, ``compiled``, ``captured``, or ``auto``: eager.
        precision: what networks compute in; ``auto`` is bfloat16 where the engine is captured, else float32.
    """
    folder, recipe = Path(run), _with_full_path(recipe)
    _refuse_occupied(folder, recipe, seed, resume)
    loaded = load_data(recipe, root)
    where = pick_device(device)
    if any(peer.start_from for peer in recipe.peers):
        # Everything is checked before a source is trained, which may take days.
        trial = [peer.model_copy(update={"start_from": None}) for peer in recipe.peers]
        Learner(
            recipe, {p.name: build_peer(p, recipe, loaded, seed, folder.parent, where) for p in trial}, loaded, seed
        )
    peers = {
        peer.name: build_peer(peer, recipe, loaded, seed, folder.parent, where, root, reporter, engine, precision)
        for peer in recipe.peers
    }
    options = _engine_options(engine, precision, where)
    _train(recipe, peers, loaded, folder, seed, resume, reporter, checkpoint_every, **options)
    return Run(folder)


def _engine_options(engine: Name | Literal["auto"], precision: Precision, device: torch.device) -> dict[str, Any]:
    picked = pick(engine, device)
    half = precision == "bfloat16" or (precision == "auto" and picked == "captured")
    return {"engine": picked, "autocast": torch.bfloat16 if half else None}


def _with_full_path(recipe: Recipe) -> Recipe:
    # A run must find its data again from another folder.
    path = Path(recipe.data.name)
    if recipe.data.name in data_room.names() or not path.exists():
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"name": str(path.resolve())})})


def load_data(recipe: Recipe, root: str | Path | None = None) -> Dataset:
    """Load a recipe's data, and check that it has the classes that the recipe is for."""
    options = recipe.data
    loaded = data_room.load(options.name, root=root, validation=options.validation, size=options.size)
    if options.classes is not None and loaded.classes != options.classes:
        raise InputError(f"the recipe is for {options.classes} classes, but {loaded.name} has {loaded.classes}")
    return loaded


def pick_device(device: str | torch.device) -> torch.device:
    """Return a torch device; ``auto`` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{device}' can't be used: {str(error).splitlines()[0]}") from None
    return found


def build_peer(
    peer: Peer,
    recipe: Recipe,
    loaded: Dataset,
    seed: int,
    runs: Path,
    device: torch.device,
    root: str | Path | None = None,
    reporter: Reporter | None = None,
    engine: Name | Literal["auto"] = "auto",
    precision: Precision = "auto",
) -> Posterior:
    """Build one peer's posterior; its initial weights are a function of (seed, peer)."""
    source = None
    if peer.start_from is not None:
        source = _source(peer, recipe, seed, runs, device, root, reporter, engine, precision)
    inputs = network_inputs(loaded)
    with seeded(Address(seed, peer.name, "initial")):
        network = networks.build(peer.network, inputs)
    options = peer.posterior.model_dump(exclude={"kind"})
    if peer.posterior.kind == "point":
        point = Point(network, start_from=source).to(device)
        point.seed, point.name = seed, peer.name
        return point
    return MeanField(network, start_from=source, seed=seed, name=peer.name, **options).to(device)


def network_inputs(loaded: Dataset) -> networks.Inputs:
    """Return what a network must know of a data set."""
    return networks.Inputs(loaded.classes, loaded.shape, loaded.mean, loaded.std)


def default_folder(recipe_name: str, seed: int, runs: Path = Path("runs")) -> Path:
    """Return where a recipe's run goes by default: ``runs/mutual-digits-ours-seed0``."""
    return runs / f"{Path(recipe_name).with_suffix('').as_posix().strip('/').replace('/', '-')}-seed{seed}"


def _source(
    peer: Peer,
    recipe: Recipe,
    seed: int,
    runs: Path,
    device: torch.device,
    root: str | Path | None,
    reporter: Reporter | None,
    engine: Name | Literal["auto"],
    precision: Precision,
) -> Path:
    source = peer.start_from
    assert source is not None
    if source.endswith(".safetensors"):
        return Path(source)
    if (Path(source) / "recipe.toml").is_file():
        return _only_weights(Run(source), peer)
    if source not in packaged() and not Path(source).is_file():
        raise InputError(f"peer '{peer.name}': start_from '{source}' is neither a recipe, a run folder nor a file")
    # The source must fit this run: same data, same network.
    named = load_recipe(source)
    table = named.model_dump(exclude_none=True)
    table["data"] |= recipe.data.model_dump(include={"name", "classes", "validation", "size"}, exclude_none=True)
    for item in table["peers"]:
        item["network"] = peer.network
    fitted = Recipe.parse(table, f"recipe {source}")
    folder = default_folder(source, seed, runs)
    if fitted != named:
        folder = folder.with_name(f"{folder.name}-{fitted.digest}")
    if not (folder / "recipe.toml").is_file() or not Run(folder).finished:
        if reporter is not None:
            reporter.headline(f"{source}: training it first, into {folder}")
        train(
            fitted, folder, seed=seed, resume=folder.exists(), device=device, root=root, reporter=reporter,
            engine=engine, precision=precision,
        )  # fmt: skip
    return _only_weights(Run(folder), peer)


def _only_weights(run: Run, peer: Peer) -> Path:
    if len(run) != 1:
        raise InputError(
            f"peer '{peer.name}': {run.folder} has peers {', '.join(run)}; name one weights-*.safetensors file"
        )
    return run.weights_file(next(iter(run)))


def _train(
    recipe: Recipe,
    peers: dict[str, Posterior],
    loaded: Dataset,
    folder: Path,
    seed: int,
    resume: bool,
    reporter: Reporter | None,
    checkpoint_every: int | None = None,
    **options: Any,
) -> None:
    reporter = reporter or Reporter()
    _refuse_occupied(folder, recipe, seed, resume)
    if (folder / "run.json").is_file() and _read_json(folder / "run.json").get("finished"):
        reporter.headline(f"{folder}: already finished")
        return
    device = next(iter(peers.values())).device
    if isinstance(loaded.train, data_room.ArraySplit):
        loaded = dataclasses.replace(loaded, train=loaded.train.to(device))
    log = _MetricsLog(folder / "metrics.jsonl")

    def save(tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        checkpoints.write(folder, about["position"]["step"], tensors, about)

    learner = Learner(
        recipe, peers, loaded, seed, reporter=reporter, save=save, log=log.write, checkpoint_every=checkpoint_every,
        **options,
    )  # fmt: skip
    newest = checkpoints.read_newest(folder) if resume and folder.is_dir() else None
    if newest is not None:
        tensors, about, complaints = newest
        for complaint in complaints:
            reporter.warn(f"{complaint}; going on from the checkpoint before it")
        learner.restore(tensors, about)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        for stale in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
            stale.unlink()
        about = {"seed": seed, "finished": False, "inputs": network_inputs(loaded).__dict__, **environment(device)}
        _write_text(folder / "run.json", json.dumps(about, indent=1))
        # The recipe comes last: a folder that has one has the rest.
        _write_text(folder / "recipe.toml", recipe.to_toml())
        log.keep_until(learner.position.step)
        reporter.headline(
            _headline(recipe, loaded, f"{device.type}, {learner.engine.name}", seed, learner.position.step)
        )
        learner.run()
        for name, posterior in peers.items():
            posterior.save(folder / f"weights-{name}.safetensors")
        about |= {"finished": True, "seconds": round(learner.position.seconds, 3)}
        _write_text(folder / "run.json", json.dumps(about, indent=1))


def _headline(recipe: Recipe, loaded: Dataset, where: str, seed: int, step: int) -> str:
    nets = ", ".join(dict.fromkeys(peer.network for peer in recipe.peers))
    count = len(recipe.peers)
    peers = f"{count} peer{'s' if count > 1 else ''}"
    text = f"{recipe.title} · {loaded.name} · {peers} · {nets} · {where} · seed {seed}"
    return f"{text} · going on at step {step}" if step else text


def environment(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions, for records."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    versions = {"peerbayes": peerbayes.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"hardware": hardware, "versions": versions}


def _refuse_occupied(folder: Path, recipe: Recipe, seed: int, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder for the run")
    if not (folder / "recipe.toml").is_file():
        if folder.is_dir() and any(folder.iterdir()) and not resume:
            raise InputError(f"{folder}: the folder is not empty and holds no run; choose another one")
        return
    if not resume:
        raise InputError(f"{folder}: already holds a run; add --resume to go on with it, or choose another folder")
    before, about = load_recipe(folder / "recipe.toml"), _read_json(folder / "run.json")
    if about.get("seed") != seed:
        raise InputError(f"{folder}: holds a run of seed {about.get('seed')}, not {seed}")
    if before != recipe:
        raise InputError(f"{folder}: holds a run of another recipe ('{before.title}'), or with other settings")


class _MetricsLog:
    """metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> None:
        """Drop the lines of steps that a resumed run will do again."""
        kept = []
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a line that a kill cut short
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
        _write_text(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    if os.name != "posix":  # two processes on one run folder are then not noticed
        yield
        return
    import fcntl

    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another process is training this run") from None
        yield
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)


def _write_text(path: Path, text: str) -> None:
    storage.write_bytes(path, text.encode("utf-8"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the run folder is not complete") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    return found


def _tuples(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in inputs.items()}
