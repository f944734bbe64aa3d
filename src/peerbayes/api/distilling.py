"""From trained runs to one network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from peerbayes.api.fitting import check_teacher_overrides, fit
from peerbayes.data.dataset import Dataset, load
from peerbayes.errors import InputError
from peerbayes.networks.normalisation import describe
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior
from peerbayes.recipes.packaged import packaged
from peerbayes.recipes.recipe import Recipe, change, is_recipe, listed, load_recipe
from peerbayes.recipes.recipe_data import load_data
from peerbayes.recipes.settings import Peer
from peerbayes.runs.plan import TEACHERS, check_seed
from peerbayes.runs.run import Run, default_folder, peers_at, run_of
from peerbayes.runs.session import refuse_unknown

ENSEMBLE, ALONE = "distillation/latentbe", "distil"  # recipes for several teachers, and for one Bayesian one
Teacher = Posterior | Run | str | Path


def distill(
    teachers: Teacher | Iterable[Teacher],
    into: nn.Module,
    *,
    data: Any = None,
    run: str | Path | None = None,
    recipe: str | Path | Recipe | None = None,
    overrides: str | Sequence[str] = (),
    **how: Any,
) -> nn.Module:
    """Train a network to predict what an ensemble does, and return it as a plain module, in evaluation mode.

    Args:
        teachers: trained posteriors; runs, or their folders, all of whose peers teach; or weights files of runs. Of
            Bayesian ones every step takes new draws.
        into: the network that learns; it is not changed.
        data: a data set, or what `peerbayes.data.load` takes: what the teachers have seen, or more of its kind. By
            default the data of the first run among the teachers, or that one of them is a peer of.
        run: the run folder; by default ``runs/RECIPE-seedN``.
        recipe: of the student. By default that of several teachers has one rank-one member a teacher, and is their
            average (``distillation/latentbe``); that of a single Bayesian one starts from its means (``distil``).
        overrides: changes of the recipe, such as ``"stages.0.epochs=20"``.
        how: what `fit` takes besides.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> student = pb.distill([run], into=run.network("net"), recipe="distil", run=f"{folder.name}/student",
        ...                      overrides=short[1:], device="cpu")
        >>> student.training
        False
        >>> folder.cleanup()
    """
    refuse_unknown(how, distill, fit)
    check_seed(how.get("seed", 0))
    overrides = listed(overrides)
    check_teacher_overrides(overrides)
    runs, posteriors = _opened(teachers)
    chosen = load_recipe(
        _recipe_for(len(posteriors), any(teacher.stochastic for teacher in posteriors)) if recipe is None else recipe
    )
    if data is None:
        if not runs:
            raise InputError("`data` is required: no posterior was loaded from a run; name the data, or give a run")
        base = chosen.model_copy(update={"data": runs[0].recipe.data})
        chosen, vocabulary = load_recipe(base, overrides), runs[0].vocabulary
        # Teachers of texts know words by the numbers of their own vocabulary.
        data = runs[0].given_data()
        if data is None:
            data = load_data(chosen, how.get("root"), vocabulary) if vocabulary is not None else chosen.data.name
    else:
        if chosen.name in packaged():  # which hold out a part of their own data, not of these
            chosen = chosen.model_copy(update={"data": chosen.data.model_copy(update={"validation": 0})})
        vocabulary = runs[0].vocabulary if runs and not isinstance(data, Dataset) else None
        if vocabulary is not None and not isinstance(data, str | Path):
            data, vocabulary = load(data, root=how.get("root"), vocabulary=vocabulary), None
        if vocabulary is not None:
            named = {"name": str(data), "classes": None, "text": runs[0].recipe.data.text}
            chosen = chosen.model_copy(update={"data": chosen.data.model_copy(update=named)})
        chosen = load_recipe(chosen, overrides)
        if vocabulary is not None:
            data = load_data(chosen, how.get("root"), vocabulary)
    if chosen.teachers is None or len(chosen.peers) != 1:
        raise InputError(f"recipe {chosen.name}: expected one peer and a [teachers] table")
    (peer,) = chosen.peers
    kind, options = peer.posterior.posterior_class, peer.posterior.arguments()
    if kind.made_of_posterior:
        raise InputError(f"recipe {chosen.name}: a student can't be of kind '{kind.kind}'")
    if options.get("members") == 0:  # one for each teacher
        options["members"] = sum(chosen.teachers.draws if teacher.stochastic else 1 for teacher in posteriors)
    start = posteriors[0] if peer.start_from == TEACHERS and _alike(posteriors[0], into) else None
    student = kind(into, start_from=start, seed=how.get("seed", 0), name="student", **options)
    run = run or default_folder(chosen.name, how.get("seed", 0))
    # `fit` moves it, where another device is asked for.
    device = student.device if student.device.type != "cpu" else posteriors[0].device
    trained = fit({"student": student.to(device)}, data=data, recipe=chosen, run=run, teachers=posteriors, **how)
    save_networks(trained)
    return trained["student"].materialise()


def _recipe_for(teachers: int, stochastic: bool) -> str:
    return ALONE if teachers == 1 and stochastic else ENSEMBLE


def _alike(teacher: Posterior, network: nn.Module) -> bool:
    shapes = [{name: tensor.shape for name, tensor in module.state_dict().items()}
              for module in (teacher.materialise(), network)]  # fmt: skip
    return shapes[0] == shapes[1]


def default_recipe(runs: Sequence[str | Path]) -> str:
    """Return the recipe that distils runs, or recipes, if no other is asked for."""
    peers = [peer for run in map(str, runs) for peer in _peers_of(run)]
    return _recipe_for(len(peers), any(peer.posterior.varies() for peer in peers))


def _peers_of(run: str) -> list[Peer]:
    if is_recipe(run) or not Path(run).expanduser().exists():
        return list(load_recipe(run).peers) if is_recipe(run) else []
    opened, names = peers_at(run)
    return [peer for peer in opened.recipe.peers if peer.name in names]


def _opened(given: Any) -> tuple[list[Run], list[Posterior]]:
    """Return the runs among teachers, or of a single one, and all posteriors that teach."""
    if isinstance(given, Teacher) or not isinstance(given, Iterable):
        given = [given]
    runs: list[Run] = []
    posteriors: list[Posterior] = []
    for teacher in given:
        if isinstance(teacher, Posterior):
            posteriors.append(teacher)
            runs += filter(None, [run_of(teacher)])
        elif isinstance(teacher, Run | str | Path):
            run, names = (teacher, teacher.predicting) if isinstance(teacher, Run) else peers_at(teacher)
            runs.append(run)
            posteriors += [run[name] for name in names]
        else:
            kind = type(teacher).__name__
            raise InputError(
                f"a teacher is a {kind}, expected a posterior, a run or its folder; wrap a network in Point(...)"
            )
    if not posteriors:
        raise InputError("there are no teachers to distil")
    return runs, posteriors


def recipe_into(into: str | Path, runs: Sequence[str | Path], changes: Sequence[str] = ()) -> Recipe:
    """Return a recipe with these runs (or recipes) as its teachers, and the data that the first of them has learnt.

    Args:
        into: the student's recipe.
        runs: what teaches: run folders, weights files or recipes.
        changes: of the recipe.
    """
    base = load_recipe(into)
    if base.teachers is None:
        raise InputError(f"recipe {into}: has no [teachers] table, so nobody would learn from the runs")
    for run in map(str, runs):
        if run not in packaged() and not Path(run).expanduser().exists():
            raise InputError(f"{run}: there is no such run folder, weights file of a run, or recipe")
    table = base.model_dump(exclude_none=True)
    first = load_recipe(str(runs[0])) if is_recipe(str(runs[0])) else peers_at(runs[0])[0].recipe
    table["data"] = first.data.model_dump(exclude_none=True)
    table["teachers"].pop("peers", None)  # of the recipe's own teachers
    table["teachers"]["runs"] = [str(Path(run)) for run in runs]
    for line in changes:
        change(table, line, f"recipe {into}")
    return Recipe.parse(table, f"recipe {into}")


def save_networks(run: Run) -> list[Path]:
    """Write each peer that predicts with one network as a plain state dict, beside its posterior; return the files."""
    written = []
    for name in run:
        if run[name].stochastic:  # its mean weights are not what was evaluated
            continue
        path = run.folder / f"network-{name}.safetensors"
        state = {key: tensor.contiguous() for key, tensor in run[name].materialise().state_dict().items()}
        about: dict[str, Any] = {"network": run.recipe.peer(name).network}
        storage.write(path, state, about | describe(run[name].network))
        written.append(path)
    return written
