"""What a run is made of when it begins: peers with the weights of their sources, and teachers."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch

from peerbayes import networks
from peerbayes.data import Dataset
from peerbayes.errors import InputError, OptionError, PeerbayesWarning, within
from peerbayes.learning.inputs import network_inputs, refuse_other_words
from peerbayes.learning.recipe import Recipe
from peerbayes.learning.run import Run, peers_at
from peerbayes.learning.settings import Peer
from peerbayes.learning.settings import Shared as SharedOptions
from peerbayes.learning.sources import Job, is_trained, only_weights, rehearsed, source_of, teacher_sources
from peerbayes.learning.stages import seeded
from peerbayes.learning.teachers import Teachers
from peerbayes.noise import Address
from peerbayes.posteriors import MeanField, Point, Posterior, RankOne, Shared
from peerbayes.posteriors.shared import usually_shared
from peerbayes.sharing import Sharing, gradient_statistic, share, steepest

# options of a shared posterior that do not make its codebook
DRAWN = {"sampling", "mixture", "prior", "prior_std", "bits"}


def build_peer(
    peer: Peer, recipe: Recipe, loaded: Dataset, seed: int, runs: Path, device: torch.device, behind: int = 0
) -> Posterior:
    """Build one peer's posterior; its network's initial weights are a function of (seed, peer, trainings behind).

    Its source has been trained.
    """
    source = source_of(peer, recipe, seed, runs)
    if isinstance(source, Job):
        source = only_weights(Run(source.folder), peer)
    if source is not None:
        refuse_other_words(source.parent, loaded)
        _look_at_source(source.parent, recipe, loaded)
    inputs = network_inputs(loaded)
    if isinstance(peer.posterior, SharedOptions):
        return _shared(peer, peer.posterior, source, loaded, seed, device)
    start: torch.nn.Module | Path | None = None
    with seeded(Address(seed, peer.name, f"initial {behind}" if behind else "initial")):
        network = networks.build(peer.network, inputs)
        if source is not None:
            start = networks.starting_point(peer.network, inputs, source)
    options = peer.posterior.model_dump(exclude={"kind"})
    if peer.posterior.kind == "point":
        point = Point(network, start_from=start).to(device)
        point.seed, point.name = seed, peer.name
        return point
    kind = MeanField if peer.posterior.kind == "mean_field" else RankOne
    try:
        return kind(network, start_from=start, seed=seed, name=peer.name, **options).to(device)
    except OptionError as error:
        raise InputError(f"peer '{peer.name}': posterior.{error}") from None


def _shared(
    peer: Peer, options: SharedOptions, source: Path | None, loaded: Dataset, seed: int, device: torch.device
) -> Shared:
    """Build a codebook of a trained mean-field posterior; without one a stand-in."""
    network = networks.build(peer.network, network_inputs(loaded))
    if source is None:
        return blank_shared(network, options, seed, peer.name).to(device)
    posterior = Posterior.load(source, network).to(device)
    if not isinstance(posterior, MeanField):
        raise InputError(f"peer '{peer.name}': {source} holds a {posterior.kind} posterior; expected a mean_field one")
    with within(str(source)):
        return shared_of(posterior, network, options, loaded, seed, peer.name)


def blank_shared(network: torch.nn.Module, options: SharedOptions, seed: int, name: str) -> Shared:
    """Return a stand-in for a codebook that is not made yet; refuse more components, or larger ones, than it can have.

    Those with the steepest gradients are outliers, whichever weights they will be; more may be by their means.
    """
    blank = Shared(network, seed=seed, name=name, **options.model_dump(include=DRAWN))
    single = steepest(options.top, blank.layout.size) if options.outliers else 0
    inside = blank.layout.size - single
    words = f"there are only {inside} weights to share" + f", beside {single} outliers by their gradients" * (
        single > 0
    )
    if options.components > inside:
        raise InputError(f"peer '{name}': posterior.components is {options.components}, but {words}")
    if options.outliers and options.smallest > inside:
        raise InputError(f"peer '{name}': posterior.smallest is {options.smallest}, but {words}")
    return blank


def shared_of(
    posterior: MeanField, network: torch.nn.Module, options: SharedOptions, loaded: Dataset, seed: int, name: str
) -> Shared:
    """Make a codebook of a trained posterior over a network, where it is; gradients count on the training split."""
    table = options.model_dump(exclude={"kind", "merge_every_epoch", *DRAWN})
    needed = options.merge.distance > 0 or (options.outliers and options.top > 0)
    gradient = gradient_statistic(posterior, loaded.train, seed=seed) if needed else None
    with within(f"peer '{name}'"):
        book, account = share(posterior, Sharing(**table), gradient, seed)
    how = options.model_dump(include=DRAWN) | {"seed": seed, "name": name}
    # What is not Bayesian there has no scale, and is not shared.
    names = usually_shared(posterior.network, posterior.layout.shapes)
    shared = Shared(network, book, start_from=posterior, weights=names, **how).to(posterior.device)
    _warn_of_little(shared, name)
    shared.account = account
    shared.origin = posterior.digest()
    shared.merging = options.merge.model_dump() if options.merge_every_epoch else None
    return shared


def _warn_of_little(shared: Shared, name: str) -> None:
    """Tell where a file will hardly become smaller, because most of a network is not shared."""
    others = shared.rest_layout.shapes
    total = shared.layout.size + shared.rest_layout.size
    if 2 * shared.layout.size < total:
        largest = max(others, key=lambda one: others[one].numel())
        warnings.warn(
            f"peer '{name}': {shared.layout.size:,} of {total:,} weights share a codebook; all others, "
            f"'{largest}' above all, have no scales to share and stay as they are",
            PeerbayesWarning,
            stacklevel=2,
        )


def build_peers(job: Job, loaded: Dataset, device: torch.device, behind: int = 0) -> dict[str, Posterior]:
    """Build all peers of a job, by its generation."""
    runs = job.folder.parent
    return {
        peer.name: build_peer(peer, job.recipe, loaded, job.seed, runs, device, behind) for peer in job.recipe.peers
    }


def build_teachers(job: Job, loaded: Dataset, device: torch.device) -> Teachers | None:
    """Load a recipe's teachers, and check that they fit the data; untrained ones stand in for those to be trained."""
    chosen, found = job.recipe.teachers, list[Posterior]()
    if chosen is None:
        return None
    for source in teacher_sources(job):
        if isinstance(source, Job) and not is_trained(source.folder):
            peers = build_peers(rehearsed(source), loaded, device)
            found += [peer for name, peer in peers.items() if chosen.has(name)]
            continue
        path = source.folder if isinstance(source, Job) else source
        run, names = peers_at(path)
        run.refuse_strange(loaded, f"teacher {run.folder}")
        _warn_of_known(run, job.recipe)
        found += [run[name].to(device) for name in names if chosen.has(name)]
    return Teachers(found, chosen.draws, job.seed)


def _look_at_source(folder: Path, recipe: Recipe, loaded: Dataset) -> None:
    """Refuse data that has changed since weights of a run have learnt it, and tell what they may know of it."""
    run = None
    with contextlib.suppress(InputError):  # weights may lie anywhere
        run = Run(folder)
    if run is None or run.recipe.data.name != recipe.data.name:
        return
    if all(getattr(run.recipe.data, key) == getattr(recipe.data, key) for key in ("size", "text")):
        run.refuse_strange(loaded)
    else:
        run.refuse_renamed(loaded)
    _warn_of_known(run, recipe)


def _warn_of_known(run: Run, recipe: Recipe) -> None:
    """Tell that weights of a run may have learnt what a recipe holds out: other images are its validation split."""
    own, theirs = recipe.data, run.recipe.data
    if own.validation and theirs.name == own.name and theirs.validation != own.validation:
        warnings.warn(
            f"{run.folder}: was trained with data.validation={theirs.validation}, here it is {own.validation}: it may "
            "have learnt validation images, which the best epoch and temperatures are chosen by",
            PeerbayesWarning,
            stacklevel=2,
        )
