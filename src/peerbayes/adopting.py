"""The verb `adopt`: a trained network to the best of what can be made of it, chosen on the validation split."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from peerbayes import metrics, networks
from peerbayes.api.calibrating import calibrate, keep_together
from peerbayes.api.compressing import compress
from peerbayes.data.dataset import Dataset
from peerbayes.data.splits import Split
from peerbayes.errors import InputError
from peerbayes.inference.prediction import mean_of
from peerbayes.metrics.calibration import TEMPERATURE_WIDTH
from peerbayes.networks.normalisation import Choice
from peerbayes.networks.weights_files import ENDINGS, is_weights_file
from peerbayes.recipes.recipe import Recipe, listed, load_recipe
from peerbayes.recipes.recipe_data import load_data, network_inputs, set_data
from peerbayes.recipes.settings import CUSTOM
from peerbayes.reports.evaluating import SHOWN, evaluate, write_record
from peerbayes.reports.page import write_page, write_report
from peerbayes.reports.record import KEPT, MIXED, Record
from peerbayes.reports.tables import ENSEMBLE
from peerbayes.runs.executor import check_jobs, dry_run, execute
from peerbayes.runs.plan import Given, Job, Plan, check_seed, resolve, with_full_paths
from peerbayes.runs.run import ADOPTED, Run, read_recipe, slug
from peerbayes.runs.session import RunOptions, refuse_unknown
from peerbayes.runs.temperatures import keep_temperature, learnt_by
from peerbayes.showing import aligned
from peerbayes.training.reporters import Reporter

RECIPE = "from-checkpoint"
WIDTHS = (0.1, 0.2, 0.4)  # chosen on validation images of CIFAR-100, and texts of CLINC150: benchmarks/adopted.py
NET, PAIR = "net", ("first", "second")
SMALL, STUDENT = "compress", "student"
SMALLER = ("distilled", "compressed")
FOLDS = 5
Network = nn.Module | str | Path


@dataclass(frozen=True)
class Adopted:
    """What became of a network.

    Attributes:
        folder: of all runs.
        runs: by what was done: ``plain``, ``extra``, ``bayesian``, ``peers``; then those that it was compared with.
        record: settings, validation NLL of every candidate, a row a way to predict, and what to ship.
        evaluations: the records of the runs, as of `peerbayes.evaluate`.
    """

    folder: Path
    runs: Mapping[str, Run]
    record: Record
    evaluations: Mapping[str, Record]

    @property
    def best(self) -> Run:
        """The run to ship, which predicts as `peerbayes.load` of the folder: with the peer shipped, or all as one."""
        ship = self.record["ship"]
        run = copy.copy(self.runs[ship["run"]])
        run.named, run.ships = self.folder, None if ship["peer"] == ENSEMBLE else ship["peer"]
        return run

    def __str__(self) -> str:
        table = "\n".join(aligned(adoption_table(self.record), left=1))
        return f"{table}\n\n{self.record['verdict']}"


class Adoption:
    """The runs of one adoption: of the network as it is, of scales of several widths, and of peers of the best width.

    Args: as of `adopt`.
    """

    def __init__(
        self,
        network: Network,
        data: Any,
        folder: Path,
        *,
        name: str | None = None,
        peers: int = 0,
        epochs: int = 5,
        extra_epochs: bool = False,
        widths: Sequence[float] = WIDTHS,
        new_head: bool = False,
        normalize: Choice = "auto",
        seed: int = 0,
        overrides: str | Sequence[str] = (),
        root: str | Path | None = None,
    ) -> None:
        check_seed(seed)
        if isinstance(network, nn.Module) and (name is not None or new_head):
            raise InputError(f"{'new_head' if name is None else 'name'} is for files of weights, but a "
                             f"{type(network).__name__} was given; leave it out")  # fmt: skip
        if peers not in (0, 2):
            raise InputError(f"peers is {peers!r}, expected 2, or 0 for none")
        if not isinstance(epochs, int) or epochs < 1:
            raise InputError(f"epochs is {epochs!r}, expected a whole number above 0")
        if not widths or min(widths) <= 0 or len(set(widths)) < len(widths):
            raise InputError(f"widths are {', '.join(map(str, widths))}: expected different numbers above 0")
        self.folder, self.seed, self.widths, self.with_peers = folder, seed, tuple(widths), bool(peers)
        self.extra, self.new_head, self.normalize, self.epochs = extra_epochs, new_head, normalize, epochs
        self.module = network if isinstance(network, nn.Module) else None
        self.title = str(network) if self.module is None else type(network).__name__
        base = load_recipe(RECIPE, [f"stages.0.epochs={epochs}"])
        table = load_recipe(base, overrides).model_dump(exclude_none=True)
        if table["data"]["validation"] == "auto":  # the network has most likely learnt all training images
            table["data"]["validation"] = "half"
        given = set_data(table, data, root)
        chosen = with_full_paths(Recipe.parse(table, f"recipe {RECIPE}"))
        self.data: Dataset = given or load_data(chosen, root)
        self._table = chosen.model_dump(exclude_none=True)
        if self._table["data"]["validation"] == "half" and not self.data.halved:
            self._table["data"]["validation"] = "auto"
        self.outside: Sequence[str] = self._table["evaluation"]["out_of_distribution"]
        if self.data.validation is None:
            raise InputError(f"{self.data.name}: has no validation split to choose by; hold one out: "
                             "--set data.validation=0.1, or validation= of peerbayes.data.load")  # fmt: skip
        self._source: Path | None
        self._network, self._source = (CUSTOM, None) if isinstance(network, nn.Module) else _named(network, name)
        self._refuse_another()

    def _refuse_another(self) -> None:
        """Refuse a folder that holds an adoption of another network, after what is wrong with the one that is given."""
        if not (self.folder / "plain" / "recipe.toml").is_file():
            return
        before = read_recipe(self.folder / "plain", (NET,)).peers[0]
        if before.name != NET or before.network == self._network:
            return
        if self.module is None:
            networks.build(self._network, network_inputs(self.data))
        held, now = (
            "a module from Python" if name == CUSTOM else f"network '{name}'"
            for name in (before.network, self._network)
        )
        raise InputError(f"{self.folder}: holds an adoption of {held}, not of {now}; choose another folder: --run "
                         "(run= in Python)")  # fmt: skip

    def _job(self, name: str, title: str, peers: Sequence[str], start: str | None, **changes: Any) -> Job:
        """Return the job of a run: peers of one kind, over the network, that start from another run's or the file."""
        posterior = changes.pop("posterior")
        named = {"network": self._network, "posterior": posterior}
        given: dict[str, Any] = {"data": self.data, "normalize": self.normalize, "trained": True}
        if self.module is not None:
            given["networks"] = dict.fromkeys(peers, self.module)
            given["starts"] = dict.fromkeys(peers, self.plain) if start is not None else {}
        elif start is not None:
            named["start_from"] = str((self.folder / start / f"weights-{NET}.safetensors").resolve())
        else:
            named |= {"start_from": str(self._source), "new_head": self.new_head}
        changes |= {"title": title, "method": name, "peers": [{"name": peer, **named} for peer in peers]}
        recipe = Recipe.parse(self._table | changes, f"recipe {RECIPE}")
        return Job(recipe, self.folder / name, self.seed, Given(**given))

    @property
    def plain(self) -> Job:
        """The network as it is; with a new head it has to be trained."""
        stages = self._stages(likelihood={}) if self.new_head else []
        return self._job(
            "plain", "The network as it is", [NET], None, posterior={"kind": "point"}, stages=stages,
            evaluation=self._table["evaluation"] | {"draws": 1},
        )  # fmt: skip

    @property
    def first(self) -> dict[str, Job]:
        """The runs that need nothing but the network, by what is done in them."""
        jobs = {"plain": self.plain}
        if self.extra:
            jobs["extra"] = self._job(
                "extra", "The network after as many more epochs", [NET], "plain", posterior={"kind": "point"},
                stages=self._stages(likelihood={}), evaluation=self._table["evaluation"] | {"draws": 1},
            )  # fmt: skip
        for width in self.widths:
            title = f"Scales of width {width:g} around the network"
            jobs[f"width-{width:g}"] = self._job(
                f"width-{width:g}", title, [NET], "plain", posterior=self._posterior(width)
            )
        return jobs

    def peers(self, width: float) -> Job:
        """Two networks of one width that teach each other."""
        terms = {**self._table["stages"][0]["terms"], "mutual": {"alpha": 0.5, "temperature": 1.0}}
        title = f"Two of width {width:g} that teach each other"
        posterior = self._posterior(width)
        return self._job("peers", title, PAIR, "plain", posterior=posterior, stages=self._stages(**terms))

    def smaller(self, which: str, before: Path) -> Job:
        """Return the job of what is made of the Bayesian network: one plain network, or a small codebook.

        Args:
            which: ``distilled`` or ``compressed``.
            before: folder of the Bayesian network's run.
        """
        from peerbayes.api.distilling import ALONE

        source = ALONE if which == "distilled" else SMALL
        table = load_recipe(source).model_dump(exclude_none=True) | {"data": self._table["data"]}
        if which == "distilled":
            table["teachers"]["runs"] = [str(before.resolve())]
        else:
            start = str((before / f"weights-{NET}.safetensors").resolve())
            table["peers"][0] |= {"network": self._network, "start_from": start}
        recipe = load_recipe(Recipe.parse(table, f"recipe {source}"), self._smaller_changes(which))
        return Job(recipe, self.folder / which, self.seed, Given(data=self.data))

    def make_smaller(self, which: str, before: Run, how: Mapping[str, Any]) -> Run:
        """Train what `smaller` returns.

        Args:
            which: ``distilled`` or ``compressed``.
            before: the run of the Bayesian network.
            how: see `RunOptions`, with ``resume`` and ``reporter``.
        """
        from peerbayes.api.distilling import ALONE, distill, save_networks

        folder = self.folder / which
        if self.module is not None:
            changes = self._smaller_changes(which)
            given: dict[str, Any] = {"run": folder, "seed": self.seed, "overrides": changes, **how}
            if which == "distilled":
                distill(before, into=self.module, data=self.data, recipe=ALONE, **given)
            else:
                compress(before, into=SMALL, **given)
            return Run(folder, {STUDENT if which == "distilled" else NET: self.module})
        options = {key: value for key, value in how.items() if key not in ("resume", "reporter")}
        plan = resolve([self.smaller(which, before.folder)])
        (done,) = execute(plan, RunOptions(**options), resume=how["resume"], reporter=how["reporter"])
        if which == "distilled":
            save_networks(done)
        return done

    def _smaller_changes(self, which: str) -> list[str]:
        changes = [f"stages.0.epochs={self.epochs}", "stages.0.warmup=0"]
        draws = f"evaluation.draws={self._table['evaluation']['draws']}"
        return changes + [draws] * (which == "compressed")

    def _posterior(self, width: float) -> dict[str, Any]:
        (peer,) = self._table["peers"]
        return {**peer["posterior"], "gain": width}

    def _stages(self, **terms: Any) -> list[dict[str, Any]]:
        return [{**stage, "terms": terms} for stage in self._table["stages"]]

    def plan(self, smaller: Sequence[str] = ()) -> Plan:
        """Return the plan of all runs; the width of later ones is the middle one, as long as none is chosen.

        Args:
            smaller: what else is made of the Bayesian network: ``distilled``, ``compressed``.
        """
        jobs, middle = self.first, sorted(self.widths)[len(self.widths) // 2]
        before = jobs[f"width-{middle:g}"].folder
        further = [self.peers(middle)] if self.with_peers else []
        return resolve([*jobs.values(), *further, *(self.smaller(which, before) for which in smaller)])


def _named(network: str | Path, name: str | None) -> tuple[str, Path]:
    path = Path(network).expanduser()
    if (path / "recipe.toml").is_file():
        raise InputError(f"{path}: is a run; adopt the weights of one of its peers: {path}/weights-PEER.safetensors")
    if not is_weights_file(path):
        raise InputError(f"{path}: expected a file of weights that ends in {', '.join(ENDINGS)}")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if name is None:
        raise InputError(f"{path}: which network is it of? Name it: --network timm/NAME, or --network mymodule:build")
    return name, path.resolve()


def adopt(
    network: Network,
    *,
    data: Any,
    run: str | Path | None = None,
    name: str | None = None,
    peers: int = 0,
    epochs: int = 5,
    extra_epochs: bool = False,
    smaller: Sequence[str] = (),
    widths: Sequence[float] = WIDTHS,
    new_head: bool = False,
    normalize: Choice = "auto",
    corrupted: str | Path | None = MIXED,
    compare: Mapping[str, Run] = MappingProxyType({}),
    seed: int = 0,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> Adopted:
    """Make the best of a trained network: a temperature, scales around its weights, peers; say which one to ship.

    Scales of several widths are learnt, each in a run of a few epochs. The width is the one of least NLL, after a
    temperature, on the validation split, which also says what to ship: the cheapest that is not worse than the best by
    more than a standard error of their difference. Test images are used for the table alone.

    Args:
        network: a trained module, which is not changed, or a file of weights (``.safetensors``, ``.pt``, ``.pth``).
        data: a data set, or what `peerbayes.data.load` takes. Its validation images should be none that the network
            has learnt.
        run: folder of all runs; by default ``runs/adopted-NAME``.
        name: of the network whose weights a file holds: ``timm/NAME``, ``mymodule:build``, or one of ours.
        peers: 2 for two networks of the chosen width that teach each other, too.
        epochs: of each run.
        extra_epochs: train the network itself as many more epochs, too, for a fair comparison.
        smaller: what else to make of the Bayesian network: ``"distilled"`` into one plain network, ``"compressed"``
            into a small codebook.
        widths: of scales, as ``gain`` of `MeanField`.
        new_head: begin a new head where the file's has another number of classes, and train it for ``epochs`` first.
        normalize: how the network expects its images, see `peerbayes.networks.normalised`. By default a warning says
            where nothing is known of that.
        corrupted: what else to evaluate images on, see `peerbayes.evaluate`; None for nothing.
        compare: other runs over the same data, such as an ensemble, for the table alone, by what to call them.
        seed: seed of everything random.
        overrides: changes of the recipe ``from-checkpoint``, such as ``"stages.0.optimizer.lr=1e-4"``.
        resume: go on with what was interrupted.
        reporter: is told what happens; by default progress bars on a terminal and in notebooks, else nobody.
        how: see `RunOptions`.
    """
    refuse_unknown(how, adopt)
    smaller = listed(smaller)
    if unknown := [which for which in smaller if which not in SMALLER]:
        raise InputError(f"smaller: '{unknown[0]}': expected {' or '.join(SMALLER)}")
    if taken := {*TITLES} & {*compare}:
        raise InputError(f"compare: '{min(taken)}' is what a run of the adoption is called; choose another name")
    folder = Path(run) if run is not None else default_adopted(network)
    adoption = Adoption(
        network, data, folder, name=name, peers=peers, epochs=epochs, extra_epochs=extra_epochs, widths=widths,
        new_head=new_head, normalize=normalize, seed=seed, overrides=overrides, root=how.get("root"),
    )  # fmt: skip
    options = RunOptions(**how)
    with options.reporting(reporter) as reporter:
        reporter.headline(_validation_note(adoption.data))
        return _adopted(adoption, options, how, reporter, resume, smaller, corrupted, compare)


def _adopted(
    adoption: Adoption,
    options: RunOptions,
    how: Mapping[str, Any],
    reporter: Reporter,
    resume: bool,
    smaller: Sequence[str],
    corrupted: str | Path | None,
    compare: Mapping[str, Run],
) -> Adopted:
    """Train, choose and judge; see `adopt`."""
    device, epochs = options.pick_device(), adoption.epochs

    def trained(jobs: Mapping[str, Job]) -> dict[str, Run]:
        runs = execute(resolve(list(jobs.values())), options, resume=resume, reporter=reporter)
        return dict(zip(jobs, runs, strict=True))

    jobs = adoption.first
    check_jobs(list(jobs.values()), resume=resume, **how)  # before the first of them writes anything
    runs = trained({"plain": jobs.pop("plain")})
    held, test = (_hits(runs["plain"], split, device) for split in (adoption.data.validation, adoption.data.test))
    if learnt := learnt_by(held.double().mean().item(), len(held), test.double().mean().item(), len(test)):
        reporter.warn(learnt)
    runs |= trained(jobs)
    losses = {who: _losses(run, adoption.data, device) for who, run in runs.items()}
    tried = {width: float(losses[f"width-{width:g}"][NET, not learnt].mean()) for width in adoption.widths}
    width = min(tried, key=lambda candidate: tried[candidate])
    chosen = {who: run for who, run in runs.items() if not who.startswith("width-")}
    chosen["bayesian"] = runs[f"width-{width:g}"]
    losses["bayesian"] = losses[f"width-{width:g}"]
    if adoption.with_peers:
        chosen |= trained({"peers": adoption.peers(width)})
        losses["peers"] = _losses(chosen["peers"], adoption.data, device)
    for which in smaller:
        further = {**how, "resume": resume and (adoption.folder / which).exists(), "reporter": reporter}
        chosen[which] = adoption.make_smaller(which, chosen["bayesian"], further)
        losses[which] = _losses(chosen[which], adoption.data, device)
    for who, run in compare.items():
        chosen[who], losses[who] = run, _losses(run, adoption.data, device)
    bad = None if corrupted is None or adoption.data.vocabulary is not None else corrupted
    judged = {}
    for who, run in chosen.items():
        if resume and who not in compare and _uncalibrated(run):  # it was shipped so
            calibrate(run, adoption.data, device=device)
        judged[who] = evaluate(
            run, data=adoption.data, out_of_distribution=adoption.outside, corrupted=bad, examples=SHOWN,
            device=device, root=how.get("root"),
        )  # fmt: skip
        if who not in compare:
            write_report(run, judged[who])
            reporter.result(run.folder, judged[who])
    rows = [row for who in chosen for row in _rows(who, judged[who], losses[who])]
    record: Record = {
        "network": adoption.title,
        "dataset": adoption.data.name,
        "seed": adoption.seed,
        "epochs": epochs,
        "new_head": adoption.new_head,
        "validation_images": len(held),
        "validation_mistakes": int((~held).sum()),
        "validation_learnt": bool(learnt),
        "widths": {f"{candidate:g}": loss for candidate, loss in tried.items()},
        "width": width,
        "corrupted": None if bad is None else str(bad),
        "folders": {who: str(run.folder) if who in compare else run.folder.name for who, run in chosen.items()},
        "rows": [{key: value for key, value in row.items() if key != "losses"} for row in rows],
    }
    # The prior of temperatures makes them safe of few mistakes, too: benchmarks/few_mistakes.py
    candidates = [row for row in rows if row["run"] not in compare and row["temperature"] is not None]
    record["ship"], record["verdict"] = _verdict(rows[:1] if learnt else candidates)
    width_losses = ", ".join(f"{candidate:g}: {loss:.3f}" for candidate, loss in tried.items())
    if learnt:
        record["verdict"] = f"Ship plain, as it is: nothing can be chosen, since {learnt}"
    else:
        shipped = adoption.folder / record["folders"][record["ship"]["run"]]
        record["verdict"] += f". Its run is {shipped}. Widths by validation NLL: {width_losses}."
        if len(tried) > 1 and width == max(tried):
            record["verdict"] += f" {width:g} is the largest that was tried: a wider one may be better still."
        kept = _kept_temperature(chosen[record["ship"]["run"]], record["ship"]["peer"])
        if resume and not math.isclose(kept, record["ship"]["temperature"], rel_tol=1e-3):
            record["ship"]["temperature"] = kept
            record["verdict"] += f" It was calibrated since: it predicts at T = {kept:.2f}, which no figure here is at."
    if record["ship"]["temperature"] is None and chosen[record["ship"]["run"]].certificate is None:
        _without_temperature(chosen[record["ship"]["run"]], record["ship"]["peer"])
    write_record(adoption.folder / ADOPTED, record)
    heading = f"What adopting makes of {Path(record['network']).name}"
    write_page(adoption.folder / "report.html", by_run(judged), heading, [adoption_table(record)], [record["verdict"]])
    return Adopted(adoption.folder, chosen, record, judged)


def default_adopted(network: Network) -> Path:
    """Return where an adoption goes by default: ``runs/adopted-NAME``."""
    name = type(network).__name__ if isinstance(network, nn.Module) else slug(Path(network).stem)
    return Path("runs") / f"adopted-{name}"


def plan_rows(
    adoption: Adoption, options: RunOptions, resume: bool, smaller: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Check an adoption, and return what would be trained; see `peerbayes.runs.executor.dry_run`.

    Args:
        adoption: that is planned.
        options: see `RunOptions`.
        resume: whether folders may hold interrupted runs.
        smaller: what else is made of the Bayesian network: ``distilled``, ``compressed``.
    """
    return dry_run(adoption.plan(smaller), options, resume=resume)


def _validation_note(data: Dataset) -> str:
    items = "images" if data.vocabulary is None else "texts"
    return (
        f"{len(data.validation or ())} validation {items} choose the width, temperatures and what to ship; where the "
        "network has learnt them (they may be held out of what it was trained on), give others as validation split"
    )


def _losses(run: Run, data: Dataset, device: torch.device) -> dict[tuple[str, bool], Tensor]:
    """Return −log p of each validation image, by peer and whether a temperature is applied.

    The ensemble of all peers is under `ENSEMBLE`. A temperature has not seen the fifth it is evaluated on.
    """
    split = data.validation
    assert split is not None
    assert split.labels is not None
    draws, labels = run.recipe.evaluation.draws, split.labels
    log_p = {peer: run.predict_split(peer, split, draws, device)[0] for peer in run}
    if len(run) > 1:
        log_p[ENSEMBLE] = mean_of(torch.stack(list(log_p.values())))
    losses = {}
    for peer, at_one in log_p.items():
        for after, p in ((False, at_one), (True, cross_tempered(at_one, labels))):
            losses[peer, after] = -p.gather(1, labels[:, None])[:, 0].double()
    return losses


def cross_tempered(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return log-probabilities (N, C), each fold of them at the temperature that is fitted to the others.

    Args:
        log_p: log-probabilities (N, C) at temperature 1.
        labels: (N,).
    """
    tempered, fold = log_p.clone(), torch.arange(len(labels)) % FOLDS
    for number in range(min(FOLDS, len(labels)) if len(labels) > 1 else 0):
        held = fold == number
        temperature = metrics.fit_temperature(log_p[~held], labels[~held], width=TEMPERATURE_WIDTH)
        tempered[held] = metrics.temper(log_p[held], temperature)
    return tempered


def _hits(run: Run, split: Split | None, device: torch.device) -> Tensor:
    """Return which inputs of a split the network is right about."""
    assert split is not None
    assert split.labels is not None
    hits: Tensor = run.predict_split(NET, split, 1, device)[0].argmax(1) == split.labels
    return hits


def _uncalibrated(run: Run) -> bool:
    return run.temperature == 1 or any(run[name].temperature == 1 for name in run)


def _kept_temperature(run: Run, peer: str) -> float:
    return run.temperature if peer == ENSEMBLE else run[peer].temperature


def _without_temperature(run: Run, peer: str) -> None:
    """Let what is shipped predict as it was chosen: at temperature 1."""
    if peer != ENSEMBLE:
        keep_temperature(run[peer], 1.0, run.weights_file(peer))
    if peer == ENSEMBLE or len(run) == 1:
        keep_together(run, 1.0)


TITLES = {"plain": "plain", "extra": "plain, trained on", "bayesian": "Bayesian", "peers": "peer",
          "distilled": "distilled", "compressed": "compressed"}  # fmt: skip


def _rows(who: str, record: Record, losses: Mapping[tuple[str, bool], Tensor]) -> list[dict[str, Any]]:
    """Return two rows a peer and ensemble of a run: as it is, and with its temperature, which could be shipped."""
    rows = []
    judged = [*record["peers"], *([record[ENSEMBLE] | {"name": ENSEMBLE}] if ENSEMBLE in record else [])]
    for figures in judged:
        whole = figures["name"] == ENSEMBLE
        title = TITLES.get(who, who) + f" {figures['name']}" * (len(record["peers"]) > 1)
        title = f"ensemble of {TITLES[who]}s" if whole and who in TITLES else who if whole else title
        members = record["peers"] if whole else [figures]
        passes = sum(record["draws"] if peer["disagreement"] > 0 else 1 for peer in members)
        bad = figures.get("corrupted", {})
        outside = figures.get("out_of_distribution", {}).values()
        for after in (False, True):
            image_losses = losses[figures["name"], after]
            nll, ece = ("cnll", "cece") if after else ("nll", "ece")
            retention = figures["selective"]["entropy"]["retention"]  # of entropies before any temperature
            rows.append({
                "who": title + " + temperature" * after,
                "run": who,
                "peer": figures["name"],
                "temperature": figures["temperature"] if after else None,
                "accuracy": figures["accuracy"],
                "nll": figures[nll],
                "ece": figures[ece],
                "kept_accuracy": None if after else retention.get(KEPT),
                "auroc": None if after or not outside else sum(scores["auroc"] for scores in outside) / len(outside),
                "corrupted": {"accuracy": bad["accuracy"], "nll": bad[nll], "ece": bad[ece]} if bad else None,
                "passes": passes,
                "bytes": sum(peer["bytes"] for peer in members),
                "validation_nll": float(image_losses.mean()),
                "losses": image_losses,
            })  # fmt: skip
    return rows


def _verdict(rows: Sequence[Record]) -> tuple[Record, str]:
    """Return what to ship, and a sentence why: the cheapest that validation does not tell from the best."""
    candidates = sorted(rows, key=lambda row: (row["passes"], round(row["bytes"], -3), row["validation_nll"]))
    best = min(candidates, key=lambda row: float(row["validation_nll"]))
    for row in candidates:
        gap, error = _difference(row, best)
        if gap <= error:
            break
    ship = {key: row[key] for key in ("who", "run", "peer", "temperature", "validation_nll", "passes")}
    suffix = "" if row["temperature"] is None else f" (T = {row['temperature']:.2f})"
    said = f"Ship {row['who']}{suffix}: on the validation split its NLL is {row['validation_nll']:.3f}"
    if row is not best:
        rest = f"{best['who']}, {best['validation_nll']:.3f} ({gap:.3f} ± {error:.3f} less)"
        cost = f", for {_passes(row)} instead of {best['passes']}" * (row["passes"] != best["passes"])
        return ship, f"{said}, within a standard error of that of {rest}{cost}"
    if row is candidates[0]:
        return ship, f"{said}, the least of all"
    gain, error = _difference(candidates[0], row)
    return ship, f"{said}, {gain:.3f} ± {error:.3f} less than that of {candidates[0]['who']}, for {_passes(row)}"


def _difference(first: Record, second: Record) -> tuple[float, float]:
    """Return the mean difference of two candidates' losses, and its standard error."""
    difference = first["losses"] - second["losses"]
    return float(difference.mean()), float(difference.std(correction=0) / max(1, len(difference) - 1) ** 0.5)


def _passes(row: Record) -> str:
    return "1 pass" if row["passes"] == 1 else f"{row['passes']} passes"


def by_run(evaluations: Mapping[str, Record]) -> list[Record]:
    """Return the records of an adoption as those of methods, which are called as its runs are."""
    records = []
    for who, record in evaluations.items():  # settings differ where another width was chosen
        shown = {key: value for key, value in record.items() if not key.startswith("settings")}
        records.append({**shown, "method": who, "recipe": who})
    return records


def adoption_table(record: Record) -> list[list[str]]:
    """Return the rows as a table: the test split, the most certain images, others by entropy, corrupted ones, costs."""
    bad = record["corrupted"] is not None
    outside = any(row["auroc"] is not None for row in record["rows"])
    heads = ["ACC", "NLL", "ECE", f"ACC of {100 * float(KEPT):g} %", *["AUROC"] * outside]
    heads += [*["corrupted ACC", "NLL", "ECE"] * bad, "passes", "KB"]
    lines = [["", *heads]]
    for row in record["rows"]:
        width = f"Bayesian, width {record['width']:g}"
        cells = [row["who"].replace("Bayesian", width) if row["run"] == "bayesian" else row["who"], *_figures(row)]
        cells.append("" if row["kept_accuracy"] is None else f"{100 * row['kept_accuracy']:.2f}")
        cells += ["" if row["auroc"] is None else f"{row['auroc']:.3f}"] * outside
        cells += _figures(row["corrupted"]) if bad else []
        lines.append([*cells, str(row["passes"]), f"{row['bytes'] / 1e3:,.0f}"])
    return lines


def _figures(judged: Mapping[str, Any]) -> list[str]:
    return [f"{100 * judged['accuracy']:.2f}", f"{judged['nll']:.3f}", f"{judged['ece']:.3f}"]
