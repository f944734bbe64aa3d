"""A run: the folder that a recipe leaves behind, and the truth about it.

recipe.toml              the complete recipe, defaults filled in
run.json                 seed, device, versions, whether it is finished
vocabulary.json          for texts: what made token numbers of them
metrics.jsonl            a line an epoch
checkpoint-*.safetensors the newest two
weights-PEER.safetensors the trained posteriors
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast
from weakref import WeakValueDictionary

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peerbayes import networks
from peerbayes.data.dataset import Dataset
from peerbayes.data.dataset import load as load_data_set
from peerbayes.data.splits import Split
from peerbayes.data.vocabulary import Vocabulary
from peerbayes.errors import InputError, UnknownPeer, nearest, reason, within
from peerbayes.importing import allow, in_run, trusting
from peerbayes.inference.prediction import Prediction, predict_split
from peerbayes.inference.progress import NOBODY, watcher_now
from peerbayes.math.noise import seed_of
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.certificate import Certificate
from peerbayes.posteriors.flat_network import Provenance
from peerbayes.recipes.packaged import packaged
from peerbayes.recipes.recipe import Recipe, load_recipe
from peerbayes.recipes.recipe_data import load_data, refuse_other_words
from peerbayes.recipes.settings import CUSTOM
from peerbayes.runs.hub import fetched, is_hub_name
from peerbayes.runs.new_inputs import predict_batches
from peerbayes.schema import Strict, Table
from peerbayes.showing import Page, html_facts, html_table
from peerbayes.training.reporters import waiting

MAX_LISTED = 5  # runs that a sentence lists
ADOPTED = "adopted.json"  # what an adoption says of its runs
CONFIG = "config.json"  # of an export
WEIGHTS = "model.safetensors"  # of the only peer of an export
TAUGHT_BY = "the teachers"  # what a run remembers them by

# Data that were given from Python, by run folder, for as long as somebody holds them.
_given_data: WeakValueDictionary[Path, Dataset] = WeakValueDictionary()


def peer_called(name: str) -> str:
    """Return what a run remembers a peer by."""
    return f"peer '{name}'"


class _Inputs(Strict):
    """What a network must know of the data; see `peerbayes.networks.Inputs`."""

    # Bounds that no data come near, so that numbers of anybody's file do not ask for a machine's memory.
    classes: Annotated[int, Field(ge=1, le=1 << 20)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 20)]], Field(min_length=1, max_length=3)]
    mean: list[float]
    std: list[float]
    tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    dimension: Annotated[int, Field(ge=0, le=1 << 14)] = 0
    padding: Annotated[int, Field(ge=0, le=1 << 24)] = 0


class _Given(Table):
    """What is remembered of data that were given from Python."""

    description: str
    digest: str


class _About(Table):
    """What is looked for in run.json; hardware, versions and seconds come from finished runs alone."""

    seed: int
    noise: int | None = None
    generation: int = 0
    finished: bool = False
    inputs: _Inputs | None = None
    class_names: list[str] | None = None
    data: _Given | None = None
    margin: float = 1.0
    hardware: str = ""
    versions: dict[str, str] = {}
    seconds: float = 0.0
    threads: Annotated[list[int], Field(min_length=1)] = [1]
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    certificate: Certificate | None = None

    @model_validator(mode="after")
    def _every_class_has_a_name(self) -> _About:
        if self.inputs is not None and self.class_names is not None and len(self.class_names) != self.inputs.classes:
            raise ValueError(f"class_names: {len(self.class_names)} names of {self.inputs.classes} classes")
        return self


class _PeerLine(Table):
    """What an epoch was to a peer."""

    terms: dict[str, float]
    notes: dict[str, float]
    gradient_share: dict[str, float] = {}
    valid_accuracy: float | None = None
    valid_nll: float | None = None
    test_accuracy: float | None = None
    test_nll: float | None = None

    @model_validator(mode="after")
    def _whole_looks(self) -> _PeerLine:
        for split in ("valid", "test"):
            accuracy, nll = getattr(self, f"{split}_accuracy"), getattr(self, f"{split}_nll")
            if (accuracy is None) != (nll is None):
                raise ValueError(f"expected {split}_accuracy and {split}_nll together")
        return self


class _Line(Table):
    """A line of metrics.jsonl."""

    stage: int
    step: int
    peers: dict[str, _PeerLine]


class Account(Table):
    """How a codebook was made, of what sharing.json says."""

    components_at_first: int
    merging: dict[str, Any] = {}


class Run(Mapping[str, Posterior]):
    """A run folder; its peers by name.

    Args:
        folder: the run folder, or that of an adoption, which stands for what it ships.
        networks_by_peer: networks that no recipe could build.
        trust: allow what its recipe names as ``package.module:name``, in this process.

    Attributes:
        folder: the run folder.
        named: the folder that was given.
        ships: the peer that an adoption ships, which predicts alone; None where all peers predict as one.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> run["net"].kind, run.seed, len(run.metrics)
        ('point', 0, 1)
        >>> folder.cleanup()
    """

    def __init__(
        self, folder: str | Path, networks_by_peer: Mapping[str, nn.Module] | None = None, *, trust: bool = False
    ) -> None:
        self.named = Path(folder)
        self.folder, self.ships = shipped(folder)
        if not (self.folder / "recipe.toml").is_file():
            raise InputError(f"{self.folder}: not a run folder{_why(self.folder)}")
        self.recipe = read_recipe(self.folder, networks_by_peer or (), trust=trust)
        self.about: dict[str, Any] = read_json(self.folder / "run.json")
        _About.parse(self.about, str(self.folder / "run.json"))
        if not isinstance(given := cast(Any, networks_by_peer), Mapping | None):
            kind = type(given).__name__
            raise InputError(f"networks is of type {kind}, expected networks by peer: {{'{next(iter(self))}': ...}}")
        self._networks = networks_by_peer
        self._data = _given_data.get(self.folder.resolve())  # held, so that others of this folder have it
        self._loaded: dict[str, Posterior] = {}

    @property
    def seed(self) -> int:
        """The run's seed; that of a run from before there were formats of noise says so."""
        try:
            return seed_of(self.about["seed"], self.about.get("noise"))
        except InputError as error:
            raise InputError(f"{self.folder / 'run.json'}: {error}") from None

    def said(self, key: str) -> Any:
        """Return what run.json says under a key of finished runs."""
        if self.about.get(key) is None:
            raise InputError(f"{self.folder / 'run.json'}: '{key}' is missing")
        return self.about[key]

    @property
    def finished(self) -> bool:
        """Whether training reached its end."""
        return bool(self.about.get("finished", False))

    @property
    def exported(self) -> bool:
        """Whether the folder is an export, whose program and card say what they said when it was made."""
        path = self.folder / CONFIG
        return path.is_file() and read_json(path).get("library_name") == "peerbayes"

    @property
    def adopted(self) -> bool:
        """Whether it is one of an adoption's, whose validation images have chosen something."""
        return (self.folder.resolve().parent / ADOPTED).is_file()

    @property
    def predicting(self) -> list[str]:
        """The peers that predict by default: all of them as one, or the one that an adoption ships."""
        return list(self) if self.ships is None else [self.ships]

    @property
    def temperature(self) -> float:
        """The temperature of all its peers as one, which is that of its only peer; 1 where none was fitted."""
        (name, *others) = self
        return float(self.about.get("temperature", 1.0)) if others else self[name].temperature

    @property
    def certificate(self) -> Certificate | None:
        """What is promised of all its peers as one, which is that of its only peer; None where nothing is."""
        (name, *others) = self
        about = self.about.get("certificate")
        if not others:
            return self[name].certificate
        return None if about is None else Certificate.parse(about, f"{self.folder / 'run.json'}: certificate")

    @property
    def origins(self) -> dict[str, str]:
        """Digests of what its peers started from and learn from, by `peer_called` and `TAUGHT_BY`, where known."""
        return self.about.get("origins") or {}

    def began_with(self, peer: str, source: Posterior) -> bool:
        """Return whether a peer may have started from a posterior: whether it did, where that is known.

        Args:
            peer: its name.
            source: that it would start from now.
        """
        return self.origins.get(peer_called(peer)) in (None, source.digest())

    @property
    def unfinished(self) -> str:
        """What is said of a run that is not finished."""
        return f"{self.folder}: the run is not finished; the command that began it goes on with it, with --resume"

    def data(self, root: str | Path | None = None) -> Dataset:
        """Load the data that the run has learnt; refuse what has other inputs or classes now."""
        loaded = self.given_data() or load_data(self.recipe, root, self.vocabulary)
        self.refuse_strange(loaded)
        return loaded

    def given_data(self) -> Dataset | None:
        """Return the data that were given from Python, which whoever trained in this process has; None for others."""
        said = self.about.get("data")
        if said is None:
            return None
        if self._data is None or self._data.digest() != said["digest"]:
            raise InputError(f"{self.folder}: was trained on data given from Python ({said['description']}): give them "
                             "again, as data=... in Python")  # fmt: skip
        return self._data

    def as_learnt(self, given: Any) -> Dataset | None:
        """Return data given as an object as the run has split them, if they are what it has learnt; else None."""
        said, options, words = self.about.get("data"), self.recipe.data, self.vocabulary
        if said is None:
            return None
        size, names = options.size if words is None else None, self.about.get("class_names")
        with contextlib.suppress(InputError):  # a part of them alone could not be split so
            again = load_data_set(given, validation=options.validation, size=size, vocabulary=words, names=names)
            return again if again.digest() == said["digest"] else None
        return None

    def refuse_other_data(self, loaded: Dataset) -> None:
        """Refuse data that are not those which were given from Python when the run began."""
        said = self.about.get("data")
        if said is not None and said["digest"] != loaded.digest():
            raise InputError(f"{self.folder}: was trained on other data ({said['description']}) than {loaded.name}")

    def refuse_strange(self, loaded: Dataset, who: str = "", sizes: bool = True) -> None:
        """Refuse data whose classes, or the shape of whose inputs, are not those that the peers have learnt.

        Without ``sizes`` images may be larger or smaller.

        Args:
            loaded: the data.
            who: begins the message; by default the folder.
            sizes: whether images must have the size that was learnt.
        """
        who, about = who or str(self.folder), self.about.get("inputs") or {}
        if "classes" in about and about["classes"] != loaded.classes:
            raise InputError(f"{who}: knows {about['classes']} classes, but {loaded.name} has {loaded.classes}")
        self.refuse_renamed(loaded, who)
        refuse_other_words(self.folder, loaded)
        shape = tuple(about.get("shape", loaded.shape))
        if shape != tuple(loaded.shape) and (sizes or (len(shape), shape[0]) != (len(loaded.shape), loaded.shape[0])):
            raise InputError(f"{who}: takes inputs of shape {shape}, but {loaded.name} has {tuple(loaded.shape)}")

    def refuse_renamed(self, loaded: Dataset, who: str = "") -> None:
        """Refuse data that numbers other classes than the peers have learnt; their names are not always known.

        Classes without names go by their numbers where those of the other side are named by numbers.

        Args:
            loaded: the data.
            who: begins the message; by default the folder.
        """
        theirs, ours = tuple(self.about.get("class_names") or ()), tuple(loaded.class_names or ())
        numbers = tuple(map(str, range(loaded.classes)))
        if sorted(theirs or ours) == sorted(numbers):
            theirs, ours = theirs or numbers, ours or numbers
        for number, (learnt, now) in enumerate(zip(theirs, ours, strict=False)):
            if learnt != now:
                raise InputError(
                    f"{who or self.folder}: has learnt class {number} as '{learnt}', but in {loaded.name} it is '{now}'"
                )

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; one at the end that a kill has cut short is left out."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        entries = []
        for number, line in enumerate(lines, start=1):
            try:
                entries.append(_parse_json(line, f"{path}, line {number}"))
            except InputError:
                if number == len(lines) and not line.endswith(b"\n"):
                    break
                raise
            _Line.parse(entries[-1], f"{path}, line {number}")
        return entries

    @functools.cached_property
    def vocabulary(self) -> Vocabulary | None:
        """What the run's texts were encoded with; None for images."""
        path = self.folder / "vocabulary.json"
        if not path.is_file() and (self.about.get("inputs") or {}).get("tokens"):
            # One of another training split would give other numbers to the same words, and no error.
            raise InputError(f"{path}: no such file; the run's texts can't be encoded as they were without it")
        return Vocabulary.load(path) if path.is_file() else None

    def weights_file(self, peer: str) -> Path:
        """Where a trained peer lies."""
        path, exported = self.folder / f"weights-{peer}.safetensors", self.folder / WEIGHTS
        return exported if len(self) == 1 and exported.is_file() and not path.exists() else path

    def account(self, peer: str) -> Account | None:
        """Return how a peer's codebook was made; None where it was not made here."""
        path = self.folder / "sharing.json"
        accounts = read_json(path) if path.is_file() else {}
        return Account.parse(accounts[peer], f"{path}: {peer}") if peer in accounts else None

    def __getitem__(self, peer: str) -> Posterior:
        if peer not in self._loaded:
            if peer not in list(self):
                raise UnknownPeer(f"{self.folder}: there is no peer '{peer}'{nearest(str(peer), list(self))}")
            if not self.finished:
                raise InputError(self.unfinished)
            posterior = Posterior.load(path := self.weights_file(peer), self.network(peer))
            expected = self.recipe.peer(peer).posterior.kind
            if posterior.kind != expected:
                raise InputError(f"{path}: holds a {posterior.kind} posterior; the run's recipe has a {expected} one")
            self._loaded[peer] = posterior
            if self.about.get("inputs") is not None:
                posterior.input_shape = tuple(self.about["inputs"]["shape"])
            posterior.class_names = tuple(self.about["class_names"]) if self.about.get("class_names") else None
            posterior.provenance = trained_into(self.folder, self.about.get("generation", 0))
        return self._loaded[peer]

    def predict_split(
        self,
        peer: str,
        split: Split,
        draws: int,
        device: torch.device,
        *,
        posterior: Posterior | None = None,
        settle: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Predict a split with the draws of a peer; refuse predictions that are not numbers.

        Args:
            peer: its name.
            split: what to predict.
            draws: draws averaged.
            device: where to predict.
            posterior: another form of the peer, which predicts in its stead.
            settle: stop drawing for an image once its class is settled at this error level.

        Returns:
            see `peerbayes.inference.prediction.predict_split`.
        """
        posterior = (self[peer] if posterior is None else posterior).to(device)
        predicted = predict_split(posterior, split, draws, seed=self.seed, name=peer, settle=settle)
        self.refuse_nan(peer, predicted[0])
        return predicted

    def refuse_nan(self, peer: str, log_p: Tensor) -> None:
        """Refuse log-probabilities (N, C) of a peer that are not numbers.

        Args:
            peer: its name.
            log_p: log-probabilities, (N, C).
        """
        bad = int(log_p.isnan().any(1).sum())
        if bad:
            raise InputError(
                f"{self.weights_file(peer)}: {bad} of {len(log_p)} predictions are not numbers (NaN); a weight, "
                "a scale or a statistic of batch-norm is out of range"
            )

    def predict(
        self,
        inputs: Any,
        peer: str | None = None,
        *,
        coverage: float | None = None,
        risk: float | None = None,
        draws: int | None = None,
        calibrated: bool = True,
        device: str | torch.device = "auto",
    ) -> Prediction:
        """Predict new inputs: their classes by name, how probable, and how unsure the network is.

        Args:
            inputs: of images: files, folders, a CSV file with a column ``path``, arrays, tensors or PIL images, alone
                or in a list; of texts: texts, text files with one a line, or CSV files; or a split, or a data set of
                Hugging Face. Files, and images of another size than was learnt, are resized and their centre cut out,
                as in evaluation.
            peer: its name; by default the average of all peers' probabilities, or the peer that an adoption ships.
            coverage: also sets of classes that hold the true one with this probability, as its certificate promises.
            risk: also whether it abstains, so that at most this share of the answers is wrong, as its certificate
                promises; `peerbayes.calibrate` makes certificates.
            draws: of each peer; by default as many as the recipe evaluates with, or the certificate is of.
            calibrated: temper by the temperature that is kept with the weights, see `peerbayes.calibrate`.
            device: where to predict.
        """
        batches = self.predict_batches(
            inputs, peer, coverage=coverage, risk=risk, draws=draws, calibrated=calibrated, device=device
        )
        with waiting(quiet=watcher_now.get() is not NOBODY):
            return Prediction.joined(list(batches))

    predict_batches = predict_batches

    def network_inputs(self) -> networks.Inputs:
        """Return what its networks know of the data."""
        said: dict[str, Any] = self.said("inputs")
        shape, mean, std = (tuple(said[key]) for key in ("shape", "mean", "std"))
        return networks.Inputs(**said | {"shape": shape, "mean": mean, "std": std})

    def network(self, peer: str) -> nn.Module:
        """Build a peer's network, with initial weights."""
        if self._networks is not None:
            if peer not in self._networks:
                given = ", ".join(map(str, self._networks)) or "nobody"
                raise InputError(f"{self.folder}: networks has none for peer '{peer}', but for {given}")
            return self._networks[peer]
        name = self.recipe.peer(peer).network
        if name == CUSTOM:
            raise InputError(
                f"{self.folder}: peer '{peer}' has a network of your own; open the run from Python with "
                f"peerbayes.load(folder, networks={{'{peer}': ...}})"
            )
        with in_run():
            inputs = self.network_inputs()
            try:
                return networks.build(name, inputs)
            except (RuntimeError, IndexError) as error:
                where = f"{self.folder / 'run.json'}: inputs"
                raise InputError(f"{where}: network '{name}' can't be built for them ({reason(error)})") from error

    def __repr__(self) -> str:
        state = "" if self.finished else ", not finished"
        ships = "" if len(self.predicting) == len(self) else f", ships {self.ships}"
        return f"Run('{self.folder}': {self.recipe.name}, seed {self.seed}, peers {', '.join(self)}{ships}{state})"

    def _repr_html_(self) -> str:
        recipe = self.recipe
        page = html_facts(
            f"Run {self.folder}",
            {
                "recipe": f"{recipe.name}: {recipe.title}",
                "data": recipe.data.name,
                "peers": ", ".join(f"{peer.name} ({peer.network}, {peer.posterior.kind})" for peer in recipe.peers),
                "seed": self.seed,
                "state": f"finished, {self.about.get('seconds', 0):.0f} s" if self.finished else "not finished",
            },
        )
        judged = self.folder / "evaluation.json"
        return page + (_judged(read_json(judged)) if judged.is_file() else "")

    def report(self) -> Page:
        """Return the run's report page, which shows itself in a notebook; `peerbayes evaluate` writes it."""
        path = self.folder / "report.html"
        if not path.is_file():
            raise InputError(f"{path}: no such file yet; `peerbayes evaluate {self.folder}` writes it, and in Python "
                             "peerbayes.reports.write_report(run, peerbayes.evaluate(run))")  # fmt: skip
        return Page(path, path.read_text("utf-8"))

    def __iter__(self) -> Iterator[str]:
        return (peer.name for peer in self.recipe.peers)

    def __len__(self) -> int:
        return len(self.recipe.peers)


def read_recipe(folder: Path, given: Container[str] = (), *, trust: bool = False) -> Recipe:
    """Read the recipe of a run folder; refuse one that would import something, unless it is trusted.

    Args:
        folder: the run folder.
        given: names of peers whose networks are not imported.
        trust: allow what the recipe names as ``package.module:name``.
    """
    path = folder / "recipe.toml"
    with trusting(trust), in_run():
        recipe = load_recipe(path)
        for peer in recipe.peers:
            if ":" in peer.network and peer.name not in given:
                with within(f"{path}: peer '{peer.name}'"):
                    allow(peer.network, "network")
    return recipe


def peers_at(path: str | Path, *, trust: bool = False) -> tuple[Run, list[str]]:
    """Return the run that a run folder, or a weights file of a run, stands for, and which of its peers.

    Args:
        path: of a run folder, a weights file in one, or an export.
        trust: import what the run's files name.
    """
    path = Path(path).expanduser()
    if path.suffix == ".safetensors" and not path.exists():
        raise InputError(f"{path}: there is no such file")
    if path.suffix == ".safetensors" and not (path.parent / "recipe.toml").is_file():
        raise InputError(f"{path}: not a weights file of a run (there is no recipe.toml beside it)")
    run = Run(path.parent if path.suffix == ".safetensors" else path, trust=trust)
    names = run.predicting if path == run.named else [name for name in run if path == run.weights_file(name)]
    if not names:
        raise InputError(f"{path}: no weights file of the run in {run.folder}, which has peers {', '.join(run)}")
    return run, names


def shipped(folder: str | Path) -> tuple[Path, str | None]:
    """Return the run that the folder of an adoption ships, and which of its peers; any other path as it is, and None.

    All peers as one are None, too.
    """
    folder = Path(folder)
    if (folder / "recipe.toml").is_file() or not (folder / ADOPTED).is_file():
        return folder, None
    record = read_json(folder / ADOPTED)
    try:
        run, peer = record["ship"]["run"], record["ship"]["peer"]
        path = folder / record["folders"][run]
    except (KeyError, TypeError):
        raise InputError(f"{folder / ADOPTED}: does not say which run to ship") from None
    return path, peer if (path / f"weights-{peer}.safetensors").is_file() else None


def _judged(record: Mapping[str, Any]) -> str:
    """Return accuracy, NLL and ECE of a record as HTML, a row a peer."""
    rows = [["peer", "accuracy", "NLL", "ECE"]]
    for peer in [*record.get("peers", ()), *filter(None, [record.get("ensemble")])]:
        figures = [f"{100 * peer['accuracy']:.2f} %", f"{peer['nll']:.3f}", f"{peer['ece']:.3f}"]
        rows.append([peer.get("name", "ensemble"), *figures])
    return html_table(rows, 1)


def remember(folder: Path, data: Dataset) -> dict[str, Any]:
    """Remember data that a run learns, and return what run.json says of data that came from Python.

    Args:
        folder: the run's.
        data: that it learns.
    """
    if data.origin is not None:
        return {}
    _given_data[folder.resolve()] = data
    return {"data": {"description": data.description, "digest": data.digest()}}


def stamp(folder: Path) -> tuple[int, int] | None:
    """Return what changes whenever a process begins or ends a run."""
    path = folder / "run.json"
    return (path.stat().st_mtime_ns, path.stat().st_ino) if path.is_file() else None


def trained_into(folder: Path, depth: int) -> Provenance:
    """Return where the weights of a run's posteriors came from.

    Args:
        folder: the run's.
        depth: of its lineage.
    """
    return Provenance(depth=depth, run=folder.resolve(), mark=stamp(folder), state="trained")


def run_of(posterior: Posterior) -> Run | None:
    """Return the run that a posterior was loaded from, if it is still there and has not been made anew."""
    folder = posterior.provenance.run
    if folder is None or posterior.provenance.mark != stamp(folder):
        return None
    try:
        return Run(folder)
    except InputError:
        return None


def runs_below(folder: Path) -> list[Path]:
    """Return the run folders right below one: those of its seeds, if it is a run of several; ``-2`` before ``-10``."""
    # What the seeds of a run started from lies beside them, and was not asked for.
    folders = [path.parent for path in folder.glob("*/recipe.toml")]
    seeds = [path for path in folders if re.fullmatch(r"seed\d+", path.name)]
    return sorted(seeds or folders, key=lambda run: (_by_number(run.name), run.name))


def _why(folder: Path) -> str:
    """Return why a folder is no run's, as the end of a sentence; runs in it are named."""
    if (folder / WEIGHTS).is_file():
        return f": was exported from a posterior without a run; peerbayes.Posterior.load('{folder / WEIGHTS}', network)"
    below = [str(run) for run in runs_below(folder)]
    if not below:
        return " (it has no recipe.toml)"
    more = f" and {len(below) - MAX_LISTED} more" if below[MAX_LISTED:] else ""
    return f", but one of runs; name them one by one: {', '.join(below[:MAX_LISTED])}{more}"


def _by_number(name: str) -> list[str | float]:
    parts = re.split(r"(\d+(?:\.\d+)?)", name)  # words and numbers in turn
    return [float(part) if place % 2 else part for place, part in enumerate(parts)]


def load(
    folder: str | Path,
    networks: Mapping[str, nn.Module] | None = None,
    *,
    trust: bool = False,
    revision: str | None = None,
) -> Run:
    """Open a run, or what `peerbayes.export` made of one.

    Args:
        folder: the run folder; that of an adoption, which predicts with what it ships; or the name of a repository of
            the Hugging Face hub, ``owner/name``, which is fetched.
        networks: by peer; needed where they did not come from a recipe.
        trust: allow what its recipe names as ``package.module:name``, which runs that module's code, in this process.
        revision: of the repository: a branch, tag or commit.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> pb.load(run.folder).recipe.name
        'plain'
        >>> folder.cleanup()
    """
    if is_hub_name(folder) and not Path(folder).exists():
        folder = fetched(str(folder), revision)
    elif revision is not None:
        raise InputError(f"revision is '{revision}', but {folder} is no name of a repository, such as owner/name")
    return Run(folder, networks, trust=trust)


def default_folder(recipe_name: str, seed: int, runs: Path = Path("runs"), data: str | None = None) -> Path:
    """Return where a recipe's run goes by default: ``runs/mutual-digits-ours-seed0``, ``runs/peers-my-images-seed0``.

    Args:
        recipe_name: a name or TOML file.
        seed: of the run.
        runs: the folder that runs lie in.
        data: name or full path of the data that take the place of the recipe's; a general recipe's run is named by
            them, too, unless its folder without that name holds a run on them.
    """
    folder = runs / f"{slug(recipe_name)}-seed{seed}"
    if data is None or "/" in recipe_name or recipe_name not in packaged():
        return folder
    with contextlib.suppress(InputError):  # whatever else is there, the run goes elsewhere
        if (folder / "recipe.toml").is_file() and read_recipe(folder).data.name == data:
            return folder
    name = slug(re.sub(r"\.(csv|json|npz)$", "", data)) or Path(data).name
    return runs / f"{slug(recipe_name)}-{name}-seed{seed}"


def slug(recipe: str | Path) -> str:
    """Return a folder's name for a recipe's name or file: its path from here, or its last part if it lies apart."""
    path = Path(str(recipe).removesuffix(".toml"))
    path = Path(os.path.relpath(path)) if path.is_absolute() else path
    return "-".join(path.parts if ".." not in path.parts else path.parts[-1:])


def write_text(path: Path, text: str) -> None:
    """Replace a text file, atomically.

    Args:
        path: the file; its folder is made.
        text: the new content.
    """
    storage.write_bytes(path, text.encode("utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the run folder is not complete") from None


def _parse_json(data: bytes, origin: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin}: not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise InputError(f"{origin}: expected a JSON object, found {type(parsed).__name__}")
    return parsed
