"""Plans: the graph of runs that a command trains, each with the weights and teachers that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from peerbayes.data import dataset
from peerbayes.data.dataset import Dataset
from peerbayes.engine.perturbation import SEVERAL
from peerbayes.errors import InputError, within
from peerbayes.importing import allow, in_run
from peerbayes.networks.normalisation import Choice
from peerbayes.networks.weights_files import is_weights_file
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.packaged import packaged
from peerbayes.recipes.recipe import Recipe, is_recipe, load_recipe
from peerbayes.recipes.settings import Peer
from peerbayes.runs.run import Run, default_folder, peers_at, read_json, read_recipe

TEACHERS = "teachers"  # what a student's network, and its start, may be called
DATA_KEYS = {"name", "classes", "validation", "size", "stats", "text"}  # what a source must have in common with its run


@dataclass(frozen=True, eq=False)
class Given:
    """Objects from Python that take the places of what a recipe names.

    Attributes:
        peers: posteriors by peer, trained in place.
        networks: modules by peer, for a recipe whose networks are ``custom``.
        starts: by peer, what it starts from: a posterior, or a job that makes it.
        teachers: posteriors that the peers learn from.
        teacher_draws: draws of each Bayesian teacher in a step.
        data: a data set that is loaded already.
        normalize: how networks expect their images; see `peerbayes.networks.normalised`.
        trained: whether ``networks`` are known to be trained.
    """

    peers: Mapping[str, Posterior] = field(default_factory=dict)
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    starts: Mapping[str, Posterior | Job] = field(default_factory=dict)
    teachers: Sequence[Posterior] = ()
    teacher_draws: int = 1
    data: Dataset | None = None
    normalize: Choice = "auto"
    trained: bool = False


@dataclass(frozen=True, eq=False)
class Job:
    """A recipe to train into a folder with a seed."""

    recipe: Recipe
    folder: Path
    seed: int = 0
    given: Given = Given()

    def __post_init__(self) -> None:
        check_seed(self.seed)


def check_seed(seed: Any) -> None:
    """Refuse what is no seed."""
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}, expected a whole number that is 0 or more")


@dataclass(frozen=True, eq=False)
class Node(Job):
    """One run of a plan: a job with full paths, and with what its recipe leaves to its teachers filled in.

    Attributes:
        starts: by peer, what it starts from: a run of the plan, a weights file, or a posterior.
        teachers: what its peers learn from: runs of the plan, run folders or weights files, or posteriors.
        finished: whether its folder holds a finished run; then recipes that it started from are not resolved.
    """

    starts: Mapping[str, Parent] = field(default_factory=dict)
    teachers: Sequence[Parent] = ()
    finished: bool = False

    @property
    def parents(self) -> list[Parent]:
        """What it needs: what its peers start from, then its teachers."""
        return [*self.starts.values(), *self.teachers]

    @property
    def needs(self) -> list[Node]:
        """The runs that have to be trained before it."""
        return [parent for parent in self.parents if isinstance(parent, Node) and not parent.finished]

    def run(self) -> Run:
        """Open its folder."""
        return Run(self.folder, self.given.networks or None)


Parent = Node | Path | Posterior


@dataclass(frozen=True, eq=False)
class Plan:
    """What a command trains.

    Attributes:
        targets: the runs that were asked for, in their order.
        waves: runs that have to be trained, in the order of training: each wave needs only those before it.
    """

    targets: Sequence[Node]
    waves: Sequence[Sequence[Node]]

    def __iter__(self) -> Iterator[Node]:
        return (node for wave in self.waves for node in wave)

    @property
    def sources(self) -> list[Node]:
        """The runs that have to be trained because others need them."""
        return [node for wave in self.waves[:-1] for node in wave]


def resolve(jobs: Sequence[Job]) -> Plan:
    """Return what has to be trained for jobs; refuse what can't be found. Nothing is loaded but recipes."""
    resolver = _Resolver(jobs)
    targets = [resolver.node(job) for job in resolver.jobs]
    heights: dict[Node, int] = {}
    for node in targets:
        _note_heights(node, 0, heights)
    count = max(heights.values(), default=-1) + 1
    waves = [[node for node, height in heights.items() if height == count - 1 - number] for number in range(count)]
    return Plan(targets, waves)


def _note_heights(node: Node, height: int, heights: dict[Node, int]) -> None:
    """Note how many runs at most wait for one another above a run, and above those that it needs."""
    if node.finished or heights.get(node, -1) >= height:
        return
    heights[node] = height
    for parent in node.needs:
        _note_heights(parent, height + 1, heights)


class _Resolver:
    """Makes nodes of jobs: each recipe is read once, each folder is one node."""

    def __init__(self, jobs: Sequence[Job], trains: bool = True) -> None:
        self._trains = trains  # whether runs that are missing will be trained
        self._recipes: dict[str, Recipe] = {}
        self._nodes: dict[Path, Node] = {}
        self._asked = {job.folder.resolve(): job.recipe for job in jobs}
        self.jobs = [self._completed(job) for job in jobs]
        self._wanted: dict[Path, Job] = {}
        for job in self.jobs:
            if self._wanted.setdefault(job.folder.resolve(), job) is not job:
                raise InputError(f"{job.folder}: two runs can't have one folder")

    def node(self, job: Job) -> Node:
        """Return the node of a completed job's folder."""
        key = job.folder.resolve()
        node = self._nodes.get(key)
        wanted = self._wanted.get(key) or (node if node is not None else job)
        if wanted.recipe != job.recipe:
            raise InputError(
                f"{wanted.folder}: other runs start from it with the settings of '{job.recipe.name}', but other "
                "settings are asked for; train it into a folder of its own"
            )
        if node is None:
            node = self._nodes[key] = self._made(wanted)
        return node

    def _made(self, job: Job) -> Node:
        finished = is_trained(job.folder)
        if finished or not self._trains:
            starts = self._chosen_starts(job) if self._trains else {}
            return Node(**vars(job), starts=starts, finished=finished)
        return Node(**vars(job), starts=self.starts(job), teachers=[*job.given.teachers, *self.teachers(job)])

    def _completed(self, job: Job) -> Job:
        for peer in job.recipe.peers if self._trains else ():
            if ":" in peer.network:
                allow(peer.network, "network")  # whoever trains it wants it
        seed = job.seed
        if (job.folder / "recipe.toml").is_file():
            before = Run(job.folder).seed  # with the format of its noise
            seed = before if before == seed else seed
        return Job(self.fitted_to_teachers(with_full_paths(job.recipe)), job.folder, seed, job.given)

    def recipe(self, source: str) -> Recipe:
        """Return a recipe by its name or file."""
        if source not in self._recipes:
            self._recipes[source] = load_recipe(source)
        return self._recipes[source]

    # ---- what peers start from -----------------------------------------------------------------------------------

    def starts(self, job: Job) -> dict[str, Parent]:
        """Return what peers start from, by name, for those that start from something."""
        starts = {peer.name: self._start(peer, job) for peer in job.recipe.peers}
        return {name: start for name, start in starts.items() if start is not None}

    def _chosen_starts(self, job: Job) -> dict[str, Parent]:
        """Return what the peers of a finished run started from, where it is no recipe and is still there."""
        starts: dict[str, Parent] = {}
        for peer in job.recipe.peers:
            given, source = job.given.starts.get(peer.name), peer.start_from or ""
            if isinstance(given, Posterior):
                starts[peer.name] = given
            elif given is not None:
                if is_trained(given.folder):
                    starts[peer.name] = self.node(self._completed(given))
            elif is_weights_file(source) and Path(source).is_file():
                starts[peer.name] = Path(source)
            elif is_trained(Path(source)):
                starts[peer.name] = only_weights(Run(source), peer)
        return starts

    def _start(self, peer: Peer, job: Job) -> Parent | None:
        given = job.given.starts.get(peer.name)
        if given is not None:
            return self.node(self._completed(given)) if isinstance(given, Job) else given
        source = peer.start_from
        if source is None:
            return None
        path = Path(source)
        folder = (path.parent if is_weights_file(source) else path).resolve()
        if folder in self._wanted and folder != job.folder.resolve():
            return self.node(self._wanted[folder])
        if is_weights_file(source):
            if not path.exists():
                raise InputError(f"peer '{peer.name}': start_from: {source}: no such file")
            return path
        if (path / "recipe.toml").is_file():
            return only_weights(Run(path), peer)
        if not is_recipe(source):
            raise InputError(f"peer '{peer.name}': start_from '{source}' is neither a recipe, a run folder nor a file")
        named = self.recipe(source)
        if len(named.peers) != 1:
            raise InputError(
                f"peer '{peer.name}': start_from '{source}' has peers {', '.join(p.name for p in named.peers)}; "
                "train it, and name one of its weights-*.safetensors files"
            )
        self._check_circle(source)
        return self.node(self._fitting(source, named, job, {"network": peer.network}))

    def _fitting(self, source: str, named: Recipe, job: Job, peer_changes: Mapping[str, Any]) -> Job:
        """Return the job of a recipe that another one needs: on the same data, with the same seed."""
        table = named.model_dump(exclude_none=True)
        wanted = job.recipe.data.model_dump(include=DATA_KEYS, exclude_none=True)
        if wanted["name"] != named.data.name:  # the number of classes, say, is that of the other data
            table["data"] = {key: value for key, value in table["data"].items() if key not in DATA_KEYS}
        table["data"] |= wanted
        table["peers"] = [item | peer_changes for item in table["peers"]]
        fitted = Recipe.parse(table, f"recipe {source}")
        folder = default_folder(source, job.seed, job.folder.parent)
        if fitted != named:
            changed = folder.with_name(f"{folder.name}-{fitted.digest}")
            # The same data may be named by another path.
            if with_full_paths(fitted) != with_full_paths(named) or is_trained(changed):
                folder = changed
        return self._completed(Job(fitted, folder, job.seed, Given(data=job.given.data)))

    def _check_circle(self, source: str, above: tuple[str, ...] = ()) -> None:
        """Refuse a recipe that needs itself, to start from or as a teacher."""
        if source in above:
            raise InputError(f"circular start_from or teachers: {' -> '.join((*above[above.index(source) :], source))}")
        if not is_recipe(source):
            return
        recipe = self.recipe(source)
        needed = [peer.start_from for peer in recipe.peers if peer.start_from is not None]
        for needed_source in (*needed, *(recipe.teachers.runs if recipe.teachers is not None else ())):
            self._check_circle(needed_source, (*above, source))

    # ---- teachers ------------------------------------------------------------------------------------------------

    def teachers(self, job: Job) -> list[Parent]:
        """Return where a recipe's teachers are: run folders, weights files, or runs of the plan.

        A teacher that is named by its recipe has the seed of its student, so all students of a seed share its run;
        peers of an ensemble differ by their names, which everything random of them depends on.
        """
        teachers: list[Parent] = []
        for source in job.recipe.teachers.runs if job.recipe.teachers is not None else ():
            path = Path(source).expanduser()
            if (path / "recipe.toml").is_file() or path.suffix == ".safetensors":
                teachers.append(path)
            elif path.resolve() in self._wanted:
                teachers.append(self.node(self._wanted[path.resolve()]))
            elif is_recipe(source):
                self._check_circle(source)
                teachers.append(self.node(self._fitting(source, self.recipe(source), job, {})))
            else:
                raise InputError(f"teacher '{source}' is neither a recipe, a run folder nor a weights file of a run")
        return teachers

    def fitted_to_teachers(self, recipe: Recipe) -> Recipe:
        """Return the recipe with what it leaves to its teachers: ``network = "teachers"``, and ``members = 0``."""
        if recipe.teachers is None:
            return recipe
        recipes: list[Recipe] = []
        taught: dict[tuple[str, str], Peer] = {}
        at_hand: dict[str, list[Peer]] = {}  # by source, whether they are to teach or not
        for source in recipe.teachers.runs:
            path = Path(source).expanduser()
            folder = path.parent if path.suffix == ".safetensors" else path
            recipes.append(self._recipe_of_teacher(source, path, folder))
            where = str(folder.resolve()) if folder.exists() else source
            file = path.name if folder != path else None
            at_hand[source] = [p for p in recipes[-1].peers if file in (None, f"weights-{p.name}.safetensors")]
            for peer in (peer for peer in at_hand[source] if recipe.teachers.has(peer.name)):
                if (where, peer.name) in taught:
                    raise InputError(f"teachers.runs: '{source}' would let peer '{peer.name}' teach twice")
                taught[where, peer.name] = peer
        missing = set(recipe.teachers.peers or ()) - {name for _, name in taught}
        if missing:
            names = ", ".join(dict.fromkeys(peer.name for peers in at_hand.values() for peer in peers))
            raise InputError(f"teachers.peers: no teacher is called '{min(missing)}'; there are {names}")
        for source, peers in at_hand.items():
            if peers and not any(recipe.teachers.has(peer.name) for peer in peers):
                has = ", ".join(peer.name for peer in peers)
                raise InputError(f"teachers.peers: no peer of '{source}' is selected; it has {has}")
        count = sum(recipe.teachers.draws if peer.posterior.varies() else 1 for peer in taught.values())
        if count == 1:
            self._check_comparison(recipe, next(iter(taught.values())))
        table = recipe.model_dump(exclude_none=True)
        table["teachers"]["runs"] = [
            str(path.resolve()) if (path := Path(source).expanduser()).exists() else source
            for source in recipe.teachers.runs
        ]
        for peer in table["peers"]:
            if peer["network"] == TEACHERS:
                peer["network"] = next(iter(taught.values()), recipes[0].peers[0]).network
            if peer.get("start_from") == TEACHERS:
                self._start_from_teacher(peer, recipe.teachers.runs[0], taught)
            if peer["posterior"].get("members") == 0:
                peer["posterior"]["members"] = count
        return Recipe.parse(table, f"recipe {recipe.name}")

    def _start_from_teacher(self, peer: dict[str, Any], source: str, taught: Mapping[tuple[str, str], Peer]) -> None:
        """Let a student start from the first teacher's means, if that has the same network."""
        name, network = next((teacher.name, teacher.network) for teacher in taught.values())
        path = Path(source).expanduser()
        if network != peer["network"]:
            del peer["start_from"]
        elif (path / "recipe.toml").is_file():
            peer["start_from"] = str((path / f"weights-{name}.safetensors").resolve())
        else:
            peer["start_from"] = str(path.resolve()) if path.exists() else source

    def _recipe_of_teacher(self, source: str, path: Path, folder: Path) -> Recipe:
        if not folder.exists() and folder.resolve() in self._asked:
            return self._asked[folder.resolve()]
        if source not in packaged() and not path.exists() and _looks_like_a_path(source):
            raise InputError(f"teachers.runs: there is no run folder or weights file '{source}'")
        with within("teachers.runs"):
            if folder.is_dir() and not (folder / "recipe.toml").is_file():
                peers_at(path)  # knows what is wrong with it
            if folder.is_dir():
                return read_recipe(folder)
            self._check_circle(source)
            return self.fitted_to_teachers(self.recipe(source))

    def _check_comparison(self, recipe: Recipe, teacher: Peer) -> None:
        """Refuse a recipe that compares teachers where there is one; name one that does not."""
        kinds = [(index, stage.perturb.kind) for index, stage in enumerate(recipe.stages) if stage.perturb is not None]
        for index, kind in kinds:
            if kind in SEVERAL:
                fitting = (
                    name
                    for name in packaged()
                    if name.endswith("-single-kd")
                    and (other := self.recipe(name)).data.name == recipe.data.name
                    and other.peers[0].network == teacher.network
                )
                more = "set teachers.draws above 1" if teacher.posterior.varies() else "give it two or more"
                raise InputError(
                    f"stages.{index}.perturb: '{kind}' compares teachers, but there is only one; {more}, or take a "
                    f"recipe for one, such as {next(fitting, 'distillation/kd')}"
                )


def _looks_like_a_path(source: str) -> bool:
    """Return whether whoever wrote this meant a run, by its place on the disk, and not a recipe."""
    path = Path(source).expanduser()
    if path.suffix == ".toml":
        return False
    beside = path.parent != Path() and path.parent.is_dir()
    return source.startswith((".", "~")) or path.is_absolute() or path.suffix == ".safetensors" or beside


def with_full_paths(recipe: Recipe) -> Recipe:
    """Return a recipe whose run finds its data again from another folder."""
    data, changes = recipe.data, dict[str, Any](name=_full(recipe.data.name))
    if data.text is not None and data.text.vectors and Path(data.text.vectors).expanduser().exists():
        vectors = str(Path(data.text.vectors).expanduser().resolve())
        changes["text"] = data.text.model_copy(update={"vectors": vectors})
    outside = {"out_of_distribution": [_full(name) for name in recipe.evaluation.out_of_distribution]}
    evaluation = recipe.evaluation.model_copy(update=outside)
    return recipe.model_copy(update={"data": data.model_copy(update=changes), "evaluation": evaluation})


def _full(name: str) -> str:
    return str(Path(name).resolve()) if name not in dataset.names() and Path(name).exists() else name


# ---- what is on the disk ---------------------------------------------------------------------------------------------


def is_trained(folder: Path) -> bool:
    """Return whether a folder holds a finished run."""
    return (folder / "recipe.toml").is_file() and bool(read_json(folder / "run.json").get("finished"))


def only_weights(run: Run, peer: Peer) -> Path:
    """Return the weights file of a run's only peer, for a peer that starts from it.

    Args:
        run: that the peer starts from.
        peer: of another run, for messages.
    """
    if len(run) != 1:
        raise InputError(
            f"peer '{peer.name}': {run.folder} has peers {', '.join(run)}; name one weights-*.safetensors file"
        )
    return run.weights_file(next(iter(run)))


def parents_of(run: Run) -> Node:
    """Return a run as a node, with what its peers started from and its teachers, for whoever looks at a run."""
    with in_run():
        resolver = _Resolver((), trains=False)
        job = Job(run.recipe, run.folder, run.seed)
        starts, teachers = resolver.starts(job), resolver.teachers(job)
        return Node(**vars(job), starts=starts, teachers=teachers, finished=run.finished)


def source_weights(run: Run, name: str) -> Path | None:
    """Return the weights file that a peer of a run started from; None where there was none, or is none any more.

    Args:
        run: a trained one.
        name: the peer's.
    """
    try:
        start = parents_of(run).starts.get(name)
    except InputError:
        return None
    if isinstance(start, Node):
        made = [start.run().weights_file(peer) for peer in start.run()] if start.finished else []
        start = made[0] if len(made) == 1 else None
    return start if isinstance(start, Path) and start.is_file() else None


def folder_of(parent: Parent) -> Path:
    """Return the folder that a parent is in; a posterior is in none."""
    if isinstance(parent, Node):
        return parent.folder
    assert isinstance(parent, Path)
    return parent.parent if is_weights_file(parent) else parent


def lineage_depth(node: Node) -> int:
    """Return how many trainings lie behind a run: one more than behind what it starts from and whom it learns from.

    Initial weights, order and augmentation depend on it, not only on the seed. Otherwise a peer would begin where a
    network of its name began that another peer starts from, and a student would see the crops of its teachers. A run
    that has begun keeps its depth; what it needs has been trained.
    """
    if (node.folder / "run.json").is_file():
        return _depth_at(node.folder)
    posteriors = [*node.given.peers.values(), *(parent for parent in node.parents if isinstance(parent, Posterior))]
    folders = [folder_of(parent) for parent in node.parents if not isinstance(parent, Posterior)]
    return max([-1, *map(_depth_at, folders), *(posterior.provenance.depth for posterior in posteriors)]) + 1


def _depth_at(folder: Path) -> int:
    with contextlib.suppress(InputError):  # not that of a run: whoever needs more of it will say so
        depth = read_json(folder / "run.json").get("generation", 0)
        return depth if isinstance(depth, int) else 0
    return 0
