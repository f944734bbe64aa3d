"""What a run is made of when it begins: peers with the weights of their sources, and teachers."""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path

import torch

from peerbayes import networks
from peerbayes.data.dataset import Dataset
from peerbayes.engine.stages import seeded
from peerbayes.engine.teachers import Teachers
from peerbayes.errors import InputError, OptionError, PeerbayesWarning, within
from peerbayes.math.noise import Address
from peerbayes.networks.normalisation import Choice, change_own
from peerbayes.posteriors.base import Posterior, Source
from peerbayes.recipes.recipe import Recipe
from peerbayes.recipes.recipe_data import network_inputs, refuse_other_words
from peerbayes.recipes.settings import Peer
from peerbayes.runs.plan import Node, folder_of, is_trained, only_weights
from peerbayes.runs.run import Run, peers_at, run_of


def build_peer(
    peer: Peer,
    data: Dataset,
    seed: int,
    device: torch.device,
    *,
    start: Path | Posterior | None = None,
    network: torch.nn.Module | None = None,
    depth: int = 0,
    normalize: Choice = "auto",
    trained: bool = False,
) -> Posterior:
    """Build one peer's posterior.

    Args:
        peer: its settings.
        data: what it learns.
        seed: its network's initial weights are a function of (seed, peer, depth).
        device: where it is.
        start: weights file, or posterior, that it starts from. A codebook without one is a stand-in.
        network: in the place of the one that the settings name.
        depth: trainings that lie behind it.
        normalize: how the network expects its images; see `peerbayes.networks.normalised`.
        trained: whether ``network`` is known to be trained.
    """
    inputs, kind, who = network_inputs(data), peer.posterior.posterior_class, f"the network of peer '{peer.name}'"
    if isinstance(start, Posterior):
        _normalise(start, normalize, inputs, who)
    elif network is not None:
        network = networks.normalised(network, normalize, inputs, who, started=trained)
    options = peer.posterior.arguments()
    if kind.made_of_posterior:
        network = network if network is not None else networks.build(peer.network, inputs)
        if start is None:
            return kind.stand_in(network, options, seed, peer.name).to(device)
        source_of = f"peer '{peer.name}'" + f": {start}" * isinstance(start, Path)
        posterior = Posterior.load(start, network) if isinstance(start, Path) else start
        with within(source_of):
            return kind.made_from(_on(posterior, device), network, options, data.train, seed, peer.name)
    named = network is None
    source: Source | None = network if trained and start is None else start  # weights that were learnt are remembered
    if network is None:
        with seeded(Address(seed, peer.name, f"initial {depth}" if depth else "initial")):
            network = networks.build(peer.network, inputs)
            if isinstance(start, Path):
                source = networks.starting_point(peer.network, inputs, start, network, peer.new_head)
    try:
        posterior = kind(network, start_from=source, seed=seed, name=peer.name, **options).to(device)
    except OptionError as error:
        raise InputError(f"peer '{peer.name}': posterior.{error}") from None
    # After the weights, which tell what the network expects.
    if named and ":" in peer.network:
        _normalise(posterior, normalize, inputs, who)
    elif named:
        change_own(posterior.network, normalize, inputs)
    return posterior


def _normalise(posterior: Posterior, normalize: Choice, inputs: networks.Inputs, who: str) -> None:
    """Give a posterior from Python its images as its network expects them; what a run has trained is left as it is."""
    if not isinstance(normalize, str) or normalize != "auto" or posterior.provenance.state != "trained":
        posterior.normalise(normalize, inputs, bool(posterior.provenance.parent), who)


def _on(posterior: Posterior, device: torch.device) -> Posterior:
    """Return a posterior on a device; one that is elsewhere is copied."""
    return posterior if posterior.device == device else copy.deepcopy(posterior).to(device)


def build_peers(
    node: Node, data: Dataset, device: torch.device, depth: int = 0, *, rehearse: bool = False
) -> dict[str, Posterior]:
    """Build all peers of a run; what they start from has been trained.

    Args:
        node: the run.
        data: what they learn.
        device: where they are.
        depth: trainings that lie behind it.
        rehearse: build stand-ins: of codebooks, and of peers that start from what is not trained yet.
    """
    if node.given.peers:
        return _placed(node, data, device)
    peers = {}
    for peer in node.recipe.peers:
        stands_in = rehearse and peer.posterior.posterior_class.made_of_posterior
        start = None if stands_in else _start(node, peer, data, rehearse)
        network = node.given.networks.get(peer.name)
        peers[peer.name] = build_peer(
            peer,
            data,
            node.seed,
            device,
            start=start,
            network=network,
            depth=depth,
            normalize=node.given.normalize,
            trained=node.given.trained,
        )
    return peers


def _placed(node: Node, data: Dataset, device: torch.device) -> dict[str, Posterior]:
    """Return the posteriors that were given, where they learn."""
    for name, posterior in node.given.peers.items():
        posterior.to(device)
        _normalise(posterior, node.given.normalize, network_inputs(data), f"the network of peer '{name}'")
        posterior.seed, posterior.name = node.seed, name
        posterior.input_shape, posterior.class_names = data.shape, data.class_names
    return dict(node.given.peers)


def _start(node: Node, peer: Peer, data: Dataset, rehearse: bool) -> Path | Posterior | None:
    """Return what a peer starts from; refuse weights of other data."""
    start = node.starts.get(peer.name)
    if isinstance(start, Node):
        if rehearse and not is_trained(start.folder):
            return None
        run = start.run()
        if start.given.networks:
            return run[next(iter(run))]
        start = only_weights(run, peer)
    if isinstance(start, Path):
        refuse_other_words(start.parent, data)
        _check_source(start.parent, node.recipe, data)
    elif start is not None and (source_run := run_of(start)) is not None:
        source_run.refuse_strange(data, sizes=False)
    return start


def build_teachers(node: Node, data: Dataset, device: torch.device) -> Teachers | None:
    """Load a run's teachers, and check that they fit the data; untrained ones stand in for those to be trained.

    Args:
        node: of the plan, with its teachers.
        data: that the run learns.
        device: that they are run on.
    """
    chosen, teachers = node.recipe.teachers, list[Posterior]()
    for source in node.teachers:
        if isinstance(source, Posterior):
            if source.provenance.state != "trained":  # by a run, which knows what its network expects
                _normalise(source, node.given.normalize, network_inputs(data), "a teacher's network")
            teachers.append(source.to(device))
            continue
        if isinstance(source, Node) and not is_trained(source.folder):
            peers = build_peers(source, data, device, rehearse=True)
            teachers += [peer for name, peer in peers.items() if chosen is None or chosen.has(name)]
            continue
        run, names = peers_at(folder_of(source) if isinstance(source, Node) else source)
        run.refuse_strange(data, f"teacher {run.folder}")
        _warn_of_known(run, node.recipe, data.halved)
        teachers += [run[name].to(device) for name in names if chosen is None or chosen.has(name)]
    # Runs of given teachers, each once.
    given = {teacher.provenance.run: teacher for teacher in node.teachers if isinstance(teacher, Posterior)}
    for teacher_run in filter(None, map(run_of, given.values())):
        teacher_run.refuse_strange(data, f"teacher {teacher_run.folder}", sizes=False)
    draws = node.given.teacher_draws if chosen is None else chosen.draws
    return Teachers(teachers, draws, node.seed) if teachers else None


def _check_source(folder: Path, recipe: Recipe, loaded: Dataset) -> None:
    """Refuse data that has changed since weights of a run have learnt it, and tell what they may know of it."""
    run = None
    with contextlib.suppress(InputError):  # weights may lie anywhere
        run = Run(folder)
    if run is None or run.recipe.data.name != recipe.data.name:
        return
    if all(getattr(run.recipe.data, key) == getattr(recipe.data, key) for key in ("size", "text")):
        run.refuse_strange(loaded)
        run.refuse_other_data(loaded)
    else:
        run.refuse_renamed(loaded)
    _warn_of_known(run, recipe, loaded.halved)


def _warn_of_known(run: Run, recipe: Recipe, halved: bool) -> None:
    """Tell that weights of a run may have learnt what a recipe holds out: other images are its validation split."""
    ours, theirs = recipe.data, run.recipe.data
    if halved:  # of images that no run trains on
        return
    if ours.validation and theirs.name == ours.name and theirs.validation != ours.validation:
        warnings.warn(
            f"{run.folder}: was trained with data.validation={theirs.validation}, here it is {ours.validation}: it may "
            "have learnt validation images, which the best epoch and temperatures are chosen by",
            PeerbayesWarning,
            stacklevel=2,
        )


def check_finite(posterior: Posterior, who: str) -> None:
    """Refuse weights and scales that are not finite; buffers may be so.

    Args:
        posterior: whose tensors are looked at.
        who: begins the error.
    """
    for name, tensor in posterior.state().items():
        if not name.startswith("network/") and not bool(tensor.isfinite().all()):
            raise InputError(f"{who}: tensor '{name}' holds values that are not finite")
