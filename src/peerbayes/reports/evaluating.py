"""One record a run: what was trained, on what, and how good it is. The schema of ``results/`` and of ``--json``."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from peerbayes import metrics
from peerbayes.data.dataset import Dataset, load, load_judged, load_outside
from peerbayes.data.splits import ArraySplit, Split
from peerbayes.engine.processes import environment, pick_device
from peerbayes.errors import InputError
from peerbayes.inference.prediction import entropy_of, mean_of
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.certificate import Certificate
from peerbayes.recipes.recipe import changes_of
from peerbayes.reports.certified import certified
from peerbayes.reports.record import Record, written
from peerbayes.reports.scoring import (
    basic_figures,
    binned,
    check_corrupted,
    judge_corrupted,
    judge_outside,
    predict_averages,
    recalibrated,
    scored,
    selective,
)
from peerbayes.runs.loggers import loggers_named
from peerbayes.runs.run import Run, runs_below
from peerbayes.terms.mutual import lessons
from peerbayes.training.reporters import Reporter


def evaluate(
    run: Run | str | Path,
    *,
    draws: int | None = None,
    settle: float | None = None,
    out_of_distribution: str | Iterable[str] | None = None,
    corrupted: str | Path | None = None,
    averaged: bool = False,
    data: Any = None,
    examples: int = 0,
    device: str | torch.device = "auto",
    root: str | Path | None = None,
    trust: bool = False,
    log: str | Sequence[str] = (),
) -> Record:
    """Evaluate every peer of a finished run on its test split, and return the record.

    Args:
        run: a run or its folder.
        draws: draws averaged; the recipe's by default.
        settle: stop drawing for an image once its class is settled at this error level.
        out_of_distribution: data sets the peers should be unsure of; the recipe's by default.
        corrupted: also evaluate on corrupted test images: ``"made"`` here, ``"mixed"`` (each image by one of
            the 75 corruptions, in turn), or a folder of the official CIFAR-C arrays.
        averaged: also evaluate what predicts in one pass, the mean weights of Bayesian peers, and the members of
            rank-one peers averaged exactly and by factor means, each as it is and with batch-norm's statistics
            estimated anew on the training images.
        data: what to evaluate on: a data set, or what `peerbayes.data.load` takes. Of an object without a test split
            all is evaluated, unless the run was trained on it. By default what the run has learnt.
        examples: how many of the least certain, the most certain, and the surest wrong inputs a page of the record
            is to show.
        device: where to predict.
        root: data root.
        trust: allow what the recipe of a run folder names as ``package.module:name``.
        log: loggers that get the figures, beside what they have got in training, see `RunOptions`.

    Example:
        >>> import tempfile
        >>> import peerbayes as pb
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
        >>> run = pb.train("plain", f"{folder.name}/run", overrides=short, device="cpu")
        >>> record = pb.evaluate(run, device="cpu")
        >>> [peer["name"] for peer in record["peers"]], 0 < record["peers"][0]["accuracy"] <= 1
        (['net'], True)
        >>> folder.cleanup()
    """
    loggers = loggers_named(log) if log else ()
    run = run if isinstance(run, Run) else Run(run, trust=trust)
    options, where = run.recipe.evaluation, pick_device(device)
    draws = options.draws if draws is None else draws
    if isinstance(out_of_distribution, str):
        out_of_distribution = [out_of_distribution]
    if data is not None:
        data = _to_judge(data, run, root)
    outside = list(options.out_of_distribution if out_of_distribution is None else out_of_distribution)
    if data is not None:
        run.refuse_strange(data, sizes=False)
    loaded = run.data(root) if data is None else data
    if corrupted is not None:
        check_corrupted(loaded, str(corrupted))
    foreign = {other: load_outside(other, loaded, root) for other in outside}
    log_outside: dict[str, list[Tensor]] = {other: [] for other in outside}
    peers, log_probabilities, expected, held = [], [], [], []

    def predict(posterior: Posterior, peer: str, split: Split) -> Tensor:
        return run.predict_split(peer, split, draws, where, posterior=posterior, settle=settle)[0]

    def judge(log_p: Tensor, valid: Tensor | None) -> Record:
        return _judge_mean(log_p, valid, loaded, options.ece_bins)

    def promised(certificate: Certificate, names: list[str], log_p: Tensor) -> Record:
        if settle is not None or certificate.draws != draws:  # it is of other predictions
            again = [run.predict_split(name, loaded.test, certificate.draws, where)[0] for name in names]
            log_p = mean_of(torch.stack(again)) if len(again) > 1 else again[0]
        return certified(certificate, log_p, _labels(loaded.test))

    passes: dict[str, list[tuple[Tensor, Tensor | None]]] = {}  # of peers, by the way in which weights are averaged
    for name in run:
        posterior = run[name].to(where)
        figures, log_p, disagreement, valid = _judge(posterior, name, run, loaded, draws, settle)
        if posterior.certificate is not None:
            figures["certificate"] = promised(posterior.certificate, [name], log_p)
        for other, split in foreign.items():
            log_outside[other].append(predict(posterior, name, split))
            figures.setdefault("out_of_distribution", {})[other] = judge_outside(log_p, log_outside[other][-1])
        if averaged and posterior.averages:
            one_pass = predict_averages(posterior, name, loaded, run.recipe.data.augment, predict)
            figures["averaged"] = {way: judge(*pair) for way, pair in one_pass.items()}
            for way, pair in one_pass.items():
                passes.setdefault(way, []).append(pair)
        peers.append(figures)
        log_probabilities.append(log_p)
        expected.append(entropy_of(log_p) - disagreement)  # (1/S) Σ_s H[p_s]
        held.append(valid)
    record: Record = {
        "recipe": run.recipe.name,
        "dataset": loaded.name,
        "network": ", ".join(dict.fromkeys(peer.network for peer in run.recipe.peers)),
        "method": run.recipe.method,
        "seed": run.seed,
        "epochs": run.recipe.epochs,
        "hardware": run.said("hardware"),
        "versions": run.said("versions"),
        **{key: run.about[key] for key in ("engine", "precision", "packed", "processes") if key in run.about},
        "seconds": run.said("seconds"),
        "settings": run.recipe.digest,
        "settings_of_seed": run.recipe.digest_of_seed(run.seed),
        "changed": changes_of(run.recipe),
        "draws": draws,
        "settle": settle,
        "ece_bins": options.ece_bins,
        "evaluated_on": environment(where)["hardware"],
        "peers": peers,
    }
    mutual = [stage.terms["mutual"] for stage in run.recipe.stages if "mutual" in stage.terms]
    if mutual:
        record["alpha"] = mutual[-1]["alpha"]
    if mutual and len(peers) > 1:
        record["lessons"] = [lesson.__dict__ for lesson in lessons(mutual[-1], list(run))]
        record["graph"] = mutual[-1]["graph"] if isinstance(mutual[-1]["graph"], str) else "edges"
    if options.last_epochs:
        record["last_epochs"] = _last_epochs(run, options.last_epochs)
    if len(peers) > 1:
        stacked = torch.stack(log_probabilities)
        record["cohort"] = {
            "pairwise_diversity": metrics.pairwise_diversity(stacked),
            "disagreement_rate": metrics.disagreement_rate(stacked),
            "probability_variance": metrics.probability_variance(stacked),
        }
        mean, validated = mean_of(stacked), [one for one in held if one is not None]
        record["ensemble"] = judge(mean, mean_of(torch.stack(validated)) if validated else None)
        disagreement = (entropy_of(mean) - torch.stack(expected).mean(0)).clamp_min(0)
        labels = _labels(loaded.test)
        record["ensemble"]["selective"] = selective(mean, disagreement, labels, options.retention)
        record["ensemble"]["reliability"] = binned(metrics.reliability(mean.exp(), labels, options.ece_bins))
        if run.certificate is not None:
            record["ensemble"]["certificate"] = promised(run.certificate, list(run), mean)
        for way, pairs in passes.items():
            if len(pairs) == len(peers):
                together = mean_of(torch.stack([test for test, _ in pairs]))
                valids = [valid for _, valid in pairs if valid is not None]
                whole = judge(together, mean_of(torch.stack(valids)) if valids else None)
                record["ensemble"].setdefault("averaged", {})[way] = whole
        for other, found_outside in log_outside.items():
            outer = mean_of(torch.stack(found_outside))
            record["ensemble"].setdefault("out_of_distribution", {})[other] = judge_outside(mean, outer)
    if examples:
        together = mean_of(torch.stack(log_probabilities)) if len(peers) > 1 else log_probabilities[0]
        record["examples"] = examples_of(together, loaded, examples)
    if corrupted is not None:
        posteriors = {name: run[name].to(where) for name in run}
        temperatures = {one.get("name"): one.get("temperature") for one in (*peers, record.get("ensemble", {}))}
        bad = judge_corrupted(predict, posteriors, loaded, str(corrupted), options.ece_bins, temperatures)
        for peer in peers:
            peer["corrupted"] = bad[peer["name"]]
        if None in bad:
            record["ensemble"]["corrupted"] = bad[None]
    if loggers:
        from peerbayes.runs.tracking import Trackers

        with Trackers(loggers, Reporter()) as trackers:
            trackers.result(run.folder, record)
    return record


def _to_judge(data: Any, run: Run, root: str | Path | None) -> Dataset:
    """Return data as the run would split them, if it was trained on them, else as what they are: a test."""
    if isinstance(data, Dataset):
        return data
    options, words = run.recipe.data, run.vocabulary
    size = None if words is not None else options.size
    if isinstance(data, str | Path):
        return load(data, root=root, size=size, stats=options.stats, vocabulary=words)
    if (again := run.as_learnt(data)) is not None:
        return again
    return load_judged(data, size=size, vocabulary=words, names=run.about.get("class_names"))


def _last_epochs(run: Run, count: int) -> Record:
    """Return the mean of the looks at the test split over the last epochs, by peer."""
    metrics, epochs = run.metrics, run.recipe.epochs
    count = min(count, epochs)
    # Every epoch has the same number of steps; whole numbers, because a fraction of them is rounded.
    lines = [line for line in metrics if line["step"] * epochs > metrics[-1]["step"] * (epochs - count)]
    peers = {name: [line["peers"].get(name, {}) for line in lines] for name in run}
    if len(lines) != count or any("test_nll" not in look for looks in peers.values() for look in looks):
        raise InputError(f"{run.folder}: metrics.jsonl has no test figures of the last {count} epochs")
    return {
        "epochs": count,
        "peers": {
            name: {key: sum(look[f"test_{key}"] for look in looks) / len(looks) for key in ("accuracy", "nll")}
            for name, looks in peers.items()
        },
    }


def _judge(
    posterior: Posterior, name: str, run: Run, loaded: Dataset, draws: int, settle: float | None
) -> tuple[Record, Tensor, Tensor, Tensor | None]:
    """Return a peer's figures, log p̄ and disagreement on the test split, and log p̄ on the validation split."""
    options = run.recipe.evaluation
    log_p, labels, disagreement, spent = run.predict_split(name, loaded.test, draws, posterior.device, settle=settle)
    figures: Record = {
        "name": name,
        "bytes": run.weights_file(name).stat().st_size,
        **scored(log_p, labels, disagreement, posterior.stochastic, options.ece_bins, options.retention),
        "draws_spent": float(spent.double().mean()),
    }
    if counts := posterior.counts():
        figures["codebook"] = counts
        if (account := run.account(name)) is not None:
            merged = account.merging.get("merged", 0)
            figures["codebook"] |= {"components_at_first": account.components_at_first, "merged": merged}
    held: Tensor | None = None
    if loaded.validation is not None:
        held = run.predict_split(name, loaded.validation, draws, posterior.device, settle=settle)[0]
        figures |= recalibrated(held, _labels(loaded.validation), log_p, labels, options.ece_bins)
    if loaded.soft_labels is not None:
        figures["human_cross_entropy"] = metrics.soft_cross_entropy_from_log(log_p, loaded.soft_labels)
    return figures, log_p, disagreement, held


def _judge_mean(log_p: Tensor, held: Tensor | None, loaded: Dataset, bins: int) -> Record:
    """Return the figures of log-probabilities (N, C) of the test split, with those of the validation split."""
    labels = _labels(loaded.test)
    figures = basic_figures(log_p, labels, bins)
    if held is not None and loaded.validation is not None:
        figures |= recalibrated(held, _labels(loaded.validation), log_p, labels, bins)
    return figures


def _labels(split: Split) -> Tensor:
    assert split.labels is not None
    return split.labels


def write_record(path: Path, record: Record | list[Record]) -> None:
    """Write a record (or several) as JSON, atomically, without the inputs that pages show.

    Args:
        path: the file.
        record: one, or several.
    """
    figures = list(map(written, record)) if isinstance(record, list) else written(record)
    storage.write_bytes(path, (json.dumps(figures, indent=1) + "\n").encode())


def find_runs(folder: str | Path) -> list[Path]:
    """Return a run folder itself, or the run folders right below it: those of its seeds, if it is a run of several."""
    folder = Path(folder)
    if (folder / "recipe.toml").is_file():
        return [folder]
    below = runs_below(folder)
    if not below:
        raise InputError(
            f"{folder}: neither a run folder nor a folder of runs (no recipe.toml in it or right below it)"
        )
    return below


SHOWN = 8  # of each kind
SIDE = 96  # of a thumbnail, at most
LETTERS = 280  # of a text
LEAST, MOST, WRONG = "least certain", "most certain", "most certain, and wrong"


def examples_of(log_p: Tensor, data: Dataset, count: int = SHOWN) -> Record:
    """Return test inputs by the entropy of their predictions: the least and most certain, and the surest mistakes.

    Args:
        log_p: log-probabilities (N, C) of the test split.
        data: whose test split it is.
        count: of each kind, at most.

    Returns:
        ``kind`` (``image`` or ``text``), and under each of the three names a list: ``index`` in the test split, true
        ``label``, predicted ``class``, its ``probability``, ``entropy`` in nats, and ``shown``, the text or the
        address (``data:``) of a thumbnail. Texts whose words are not at hand are left out.
    """
    labels = data.test.labels
    assert labels is not None
    log_p, labels = log_p.cpu(), labels.cpu()
    entropy, predicted = entropy_of(log_p), log_p.argmax(-1)
    rising = entropy.argsort(stable=True)
    chosen = {LEAST: rising.flip(0), MOST: rising, WRONG: rising[(predicted != labels)[rising]]}
    shown = {name: index[:count] for name, index in chosen.items()}
    seen = _seen(data, torch.cat(list(shown.values())).unique())
    names = data.class_names or [str(number) for number in range(data.classes)]
    examples: Record = {"kind": "text" if data.vocabulary is not None else "image"}
    for name, index in shown.items():
        examples[name] = [
            {
                "index": item,
                "label": names[int(labels[item])],
                "class": names[int(predicted[item])],
                "probability": float(log_p[item].max().exp()),
                "entropy": float(entropy[item]),
                "shown": seen[item],
            }
            for item in index.tolist()
            if item in seen
        ]
    return examples


def _seen(data: Dataset, index: Tensor) -> Mapping[int, str]:
    """Return texts, or thumbnails, by their places in the test split."""
    items = index.tolist()
    if data.vocabulary is not None:
        texts = data.test.texts if isinstance(data.test, ArraySplit) else None
        return {} if texts is None else {item: _shortened(texts[item]) for item in items}
    images, _ = data.test.batch(index, torch.device("cpu"))
    return {item: thumbnail(image) for item, image in zip(items, images, strict=True)}


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def thumbnail(image: Tensor) -> str:
    """Return an image (C, H, W), uint8 or in [0, 1], as the address of a small picture.

    Example:
        >>> import torch
        >>> thumbnail(torch.zeros(1, 8, 8, dtype=torch.uint8))[:22]
        'data:image/png;base64,'
    """
    if image.is_floating_point():
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
    channels = image if len(image) in (1, 3) else image.float().mean(0, keepdim=True).to(torch.uint8)
    picture = Image.fromarray(channels[0].numpy() if len(channels) == 1 else channels.permute(1, 2, 0).numpy())
    small = max(picture.size) <= SIDE
    how: dict[str, Any] = {"format": "PNG", "optimize": True} if small else {"format": "JPEG", "quality": 80}
    picture.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, **how)
    return f"data:image/{how['format'].lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
