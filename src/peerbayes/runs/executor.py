"""Execute plans: train what is missing, run by run, or side by side on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from peerbayes import networks
from peerbayes.data.dataset import Dataset, load_outside
from peerbayes.data.splits import digest
from peerbayes.data.vocabulary import Vocabulary
from peerbayes.engine.processes import environment
from peerbayes.errors import InputError, OutOfMemory, TrainingError
from peerbayes.posteriors.base import Point, Posterior
from peerbayes.recipes.recipe import Recipe
from peerbayes.recipes.recipe_data import load_data
from peerbayes.runs.building import build_peers, build_teachers
from peerbayes.runs.folder import origins_of, other_weights, refuse_occupied, refuse_other_origins
from peerbayes.runs.plan import DATA_KEYS, Job, Node, Parent, Plan, lineage_depth, resolve
from peerbayes.runs.run import Run, peer_called, peers_at
from peerbayes.runs.session import RunOptions, Session, in_parts, refuse_unknown, train_pack
from peerbayes.training.learner import Learner
from peerbayes.training.reporters import Reporter


class DataCache:
    """Data sets of recipes, each loaded once, so that packed runs share one copy on the device."""

    def __init__(self, root: str | Path | None) -> None:
        self.root = root
        self._data_sets: dict[str, Dataset] = {}

    def __call__(self, node: Node) -> Dataset:
        """Return a run's data; with the vocabulary of the run in its folder, which goes on, if there is one."""
        if node.given.data is not None:
            return node.given.data
        begun = (node.folder / "recipe.toml").is_file()
        return self.of_recipe(node.recipe, node.run().vocabulary if begun else None)

    def of(self, run: Run) -> Dataset:
        """Return a trained run's data, with its vocabulary."""
        data = run.given_data() or self.of_recipe(run.recipe, run.vocabulary)
        run.refuse_strange(data)
        return data

    def of_recipe(self, recipe: Recipe, vocabulary: Vocabulary | None = None) -> Dataset:
        """Return a recipe's data; texts by a vocabulary, if one is given.

        Args:
            recipe: whose data are wanted.
            vocabulary: of the texts; None for one made of them.
        """
        key = recipe.data.model_dump_json(include=DATA_KEYS)
        if vocabulary is not None and (key not in self._data_sets or self._data_sets[key].vocabulary != vocabulary):
            key += vocabulary.digest
        if key not in self._data_sets:
            self._data_sets[key] = load_data(recipe, self.root, vocabulary)
        return self._data_sets[key]


def train_jobs(
    jobs: Sequence[Job],
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    errors: dict[int, TrainingError] | None = None,
    loaded: DataCache | None = None,
    **how: Any,
) -> list[Run]:
    """Train jobs, on a GPU side by side; what their peers start from comes first, side by side too.

    Args:
        jobs: with a folder each.
        resume: resume interrupted runs.
        reporter: is told what happens; by default progress bars on a terminal and in notebooks, else nobody.
        errors: gets the errors of jobs that could not go on, by place; without it the first one is raised, when the
            others have ended.
        loaded: data sets that are known already.
        how: see `RunOptions`.
    """
    refuse_unknown(how, train_jobs)
    return execute(resolve(jobs), RunOptions(**how), resume=resume, reporter=reporter, errors=errors, loaded=loaded)


def execute(
    plan: Plan,
    options: RunOptions,
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    errors: dict[int, TrainingError] | None = None,
    loaded: DataCache | None = None,
) -> list[Run]:
    """Train what a plan says, and return its targets' runs; arguments as in `train_jobs`.

    Everything is checked before anything is written. What others need goes on where it was interrupted.

    Args:
        plan: from `resolve`.
        options: device, engine, precision, side by side.
        resume: go on with runs that were interrupted.
        reporter: told of progress; by default the console.
        errors: gets the errors of targets that could not go on, by place; without it the first one is raised when the
            others have ended.
        loaded: data sets that are known already.
    """
    with options.reporting(reporter) as reporter:
        device, loaded = _device(plan, options), loaded or DataCache(options.root)
        _check_folders(plan, resume)
        _check_alike(plan, options, device)
        for node in plan.targets:
            if node.finished:
                reporter.headline(f"{node.folder}: already finished")
                _take_over(node, device)
        _check_nodes(plan, loaded, device, options)
        _check_alike_data(plan, loaded, options)
        for node in plan.sources:
            reporter.headline(f"{node.recipe.name}: training it first, into {node.folder}")
        failed: dict[Path, TrainingError] = {}
        for number, nodes in enumerate(plan.waves, start=1):
            last = number == len(plan.waves)
            failed = _train_packed(nodes, loaded, device, resume or not last, reporter, options)
            if failed and not last:
                raise next(iter(failed.values()))
        of_targets = {index: failed[node.folder] for index, node in enumerate(plan.targets) if node.folder in failed}
        if errors is not None:
            errors.update(of_targets)
        elif of_targets:
            raise next(iter(of_targets.values()))
        return [node.run() for node in plan.targets]


def dry_run(
    plan: Plan, options: RunOptions, *, resume: bool = False, loaded: DataCache | None = None
) -> list[dict[str, Any]]:
    """Check a plan as `execute` does, and return what would be trained, a row a run in the order of training.

    Args:
        plan: as `resolve` returns it.
        options: see `RunOptions`.
        resume: whether folders may hold interrupted runs.
        loaded: data sets that are known already.

    Returns:
        rows of the recipe, the folder, the seed, peers with their networks, what they start from and learn from,
        epochs, steps, and files.
    """
    device, loaded = _device(plan, options), loaded or DataCache(options.root)
    _check_folders(plan, resume)
    _check_nodes(plan, loaded, device, options, whole=True)
    rows = []
    for node in plan:
        recipe, data = node.recipe, loaded(node)
        names = ["recipe.toml", "run.json", "metrics.jsonl", *(f"weights-{p.name}.safetensors" for p in recipe.peers)]
        rows.append({
            "recipe": recipe.name,
            "folder": str(node.folder),
            "seed": node.seed,
            "peers": {peer.name: peer.network for peer in recipe.peers},
            "starts": {name: _parent_name(start) for name, start in node.starts.items()},
            "teachers": [_parent_name(teacher) for teacher in node.teachers],
            "data": data.name,
            "epochs": recipe.epochs,
            "steps": recipe.epochs * (len(data.train) // recipe.data.batch_size),
            "files": [str(node.folder / name) for name in names],
        })  # fmt: skip
    return rows


def _parent_name(parent: Parent) -> str:
    if isinstance(parent, Posterior):
        return f"a {parent.kind} posterior"
    return str(parent.folder if isinstance(parent, Node) else parent)


def check_jobs(jobs: Sequence[Job], *, resume: bool | None = None, loaded: DataCache | None = None, **how: Any) -> None:
    """Refuse jobs that could not be trained, without training them.

    Args:
        jobs: as `train_jobs` takes them.
        resume: whether their folders may hold interrupted runs; None for not looking there.
        loaded: data sets that are known already.
        how: see `RunOptions`.
    """
    options = RunOptions(**how)
    data_sets, device = loaded or DataCache(options.root), options.pick_device()
    for node in resolve(jobs).targets:
        if resume is not None:
            refuse_occupied(node, resume)
        if not node.finished:
            _rehearse(node, data_sets(node), device, options)


def _device(plan: Plan, options: RunOptions) -> torch.device:
    """Return where the plan is trained: posteriors that were given stay where they are, unless another is asked for."""
    given = [
        posterior
        for node in plan.targets
        for posterior in (*node.given.peers.values(), *node.starts.values())
        if isinstance(posterior, Posterior)
    ]
    return given[0].device if given and options.device == "auto" else options.pick_device()


def _take_over(node: Node, device: torch.device) -> None:
    """Give posteriors what a finished run of theirs has learnt, as if they had been trained just now."""
    if not node.given.peers:
        return
    refuse_other_origins(node.folder, origins_of(node.given.peers, node.given.teachers))
    run = node.run()
    for name, posterior in node.given.peers.items():
        posterior.to(device)
        posterior.load_state({name_in_file: tensor.to(device) for name_in_file, tensor in run[name].state().items()})
        posterior.seed, posterior.name = node.seed, name
        posterior.input_shape, posterior.class_names = run[name].input_shape, run[name].class_names
        posterior.provenance, posterior.temperature = run[name].provenance, run[name].temperature
        posterior.certificate = run[name].certificate


# ---- checks before anything is written -------------------------------------------------------------------------------


def _check_folders(plan: Plan, resume: bool) -> None:
    """Refuse folders that hold anything else, and finished runs that started from other weights than there are now."""
    for node in plan.targets:
        refuse_occupied(node, resume)
    for node in plan.sources:
        refuse_occupied(node, True)
    # What a recipe makes again is told to whoever goes on with it; files and posteriors are somebody's choice.
    nodes = [*plan.targets, *plan]
    nodes += [parent for node in nodes for parent in node.parents if isinstance(parent, Node)]
    for node in dict.fromkeys(node for node in nodes if node.finished):
        run, given = node.run(), node.given
        if given.data is not None:
            run.refuse_other_data(given.data)
        trained = {name: Point(network) for name, network in given.networks.items() if given.trained}
        for name, start in {**trained, **node.starts}.items():
            recorded = run.origins.get(peer_called(name))
            if recorded is not None and recorded != _parent_digest(run, name, start):
                raise InputError(other_weights(node.folder, peer_called(name)))


def _parent_digest(run: Run, name: str, start: Parent) -> str | None:
    """Return what a run would remember a peer's start by, as it is now."""
    if isinstance(start, Node):
        before = start.run()
        start = before[next(iter(before))] if start.given.networks else before.weights_file(next(iter(before)))
    peer = run.recipe.peer(name)
    if peer.posterior.posterior_class.made_of_posterior:
        if isinstance(start, Path):
            before, (taken, *_) = peers_at(start)
            start = before[taken]
        return start.digest()
    network = run.network(name)
    if isinstance(start, Path):
        inputs = run.network_inputs()
        return Point(
            network, start_from=networks.starting_point(peer.network, inputs, start, network, peer.new_head)
        ).provenance.parent
    return Point(network, start_from=start).provenance.parent


def _check_nodes(plan: Plan, loaded: DataCache, device: torch.device, options: RunOptions, whole: bool = False) -> None:
    """Refuse what is wrong with any run before the first is trained, which may take days.

    A single run is not sent a batch here unless ``whole``: its learner does that before anything is written.
    """
    nodes = list(plan)
    alone = not whole and len(plan.waves) == 1 and len(options.packs(nodes, device)) == 1
    # A codebook is made of gradients, which data that do not fit can't give.
    alone &= not any(peer.posterior.posterior_class.made_of_posterior for node in nodes for peer in node.recipe.peers)
    for node in {node.recipe.digest: node for node in nodes}.values():  # seeds are alike
        if alone:
            check_outside(node.recipe, loaded(node), options.root)
        else:
            _rehearse(node, loaded(node), device, options)


def _check_alike(plan: Plan, options: RunOptions, device: torch.device) -> None:
    """Refuse processes that were not started alike, before they send one another anything else."""
    compared = ("engine", "precision", "checkpoint_every", "synchronise")
    facts = {
        "another recipe, or other settings of it": [node.recipe.digest for node in plan],
        "another seed": [node.seed for node in plan],
        "other versions": environment(device)["versions"],
    } | {f"another value of {name}": getattr(options, name) for name in compared}
    _refuse_differing(options.world.differing({what: str(fact) for what, fact in facts.items()}))


def _check_alike_data(plan: Plan, loaded: DataCache, options: RunOptions) -> None:
    if options.world.size == 1:
        return
    sets = {id(data): data for data in map(loaded, plan)}.values()
    splits = [split for data in sets for split in (data.train, data.validation) if split is not None]
    names = ", ".join(dict.fromkeys(data.name for data in sets))
    _refuse_differing(options.world.differing({f"other data called {names}": " ".join(map(digest, splits))}))


def _refuse_differing(differing: Mapping[str, Sequence[int]]) -> None:
    for what, ranks in differing.items():
        raise InputError(
            f"process {ranks[0]} has {what} than process 0; start all processes with the same recipe, seed, options, "
            "data and versions"
        )


def _rehearse(node: Node, data: Dataset, device: torch.device, options: RunOptions) -> None:
    """Send one small batch through every term of every stage of a run; what is not trained yet has a stand-in."""
    check_outside(node.recipe, data, options.root)
    teachers = build_teachers(node, data, device)
    peers = build_peers(node, data, device, rehearse=True)
    Learner(node.recipe, peers, data, node.seed, engine="eager", world=options.world, teachers=teachers).feed.close()


def check_outside(recipe: Recipe, data: Dataset, root: str | Path | None) -> None:
    """Refuse out-of-distribution sets that are not there, or that do not have the form of the data.

    Args:
        recipe: that names them.
        data: of the recipe.
        root: the data root.
    """
    for name in recipe.evaluation.out_of_distribution:
        try:
            load_outside(name, data, root)
        except InputError as error:
            raise InputError(f"evaluation.out_of_distribution: {error}") from None


# ---- training --------------------------------------------------------------------------------------------------------


def _train_packed(
    nodes: Sequence[Node],
    loaded: DataCache,
    device: torch.device,
    resume: bool,
    reporter: Reporter,
    options: RunOptions,
) -> dict[Path, TrainingError]:
    """Train runs side by side, fewer where memory is too small; return why some could not go on, by folder."""
    errors: dict[Path, TrainingError] = {}
    packs, begun = options.packs(nodes, device), set[Path]()
    while packs:
        pack, *packs = packs
        sessions = []
        for node in pack:
            data = loaded(node)
            own_reporter = reporter if len(pack) == 1 else reporter.beside(node.folder.name)
            teachers = build_teachers(node, data, device)
            depth = lineage_depth(node)
            peers = build_peers(node, data, device, depth)
            goes_on = resume or node.folder in begun
            sessions.append(Session(node, peers, data, goes_on, own_reporter, options, len(pack), teachers, depth))
        errors |= {pack[index].folder: error for index, error in train_pack(sessions, options.world).items()}
        del sessions, teachers, peers
        gc.collect()  # graphs, moments and memory pools of this pack, before the next one takes its own
        again = [node for node in pack if len(pack) > 1 and isinstance(errors.get(node.folder), OutOfMemory)]
        if again:
            size = len(pack) // 2
            reporter.warn(f"the memory of {device} is too small for {len(pack)} runs side by side: from now on {size}")
            begun |= {node.folder for node in again}
            for node in again:
                del errors[node.folder]
            packs = in_parts([*again, *(node for later in packs for node in later)], size)
    return errors
