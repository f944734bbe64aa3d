"""The model card of an export: Markdown with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerbayes.data.transforms.augment import LUMA
from peerbayes.errors import InputError
from peerbayes.metrics.calibration import SAME_TEMPERATURE
from peerbayes.metrics.spread import summarise
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.certificate import Certificate
from peerbayes.recipes.recipe import changes_of, without_folders
from peerbayes.reports.record import Record
from peerbayes.reports.tables import CALIBRATED, COLUMNS, ENSEMBLE, rows
from peerbayes.runs.run import Run, read_json, runs_below

RECORD = "evaluation.json"
_READ = '''
def read(path):
    """An image file as the program takes it: its middle, {shortest} pixels to its shortest side, in [0, 1]."""
    image = Image.open(path)
    image = (image.convert("RGBA") if image.mode in ("P", "PA") else image).convert("RGB")
    width, height = (int({shortest} * side / min(image.size)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - {size}) / 2), round((height - {size}) / 2)
    pixels = np.asarray(image.crop((left, top, left + {size}, top + {size})), np.float32)
    return {made}.transpose(2, 0, 1) / 255

'''
_LUMA = f"(pixels * np.float32({list(LUMA)})).sum(2, keepdims=True).round()"
_SCORES = {
    "lac": ["scores = 1 - probabilities"],
    "aps": [
        "order = np.argsort(-probabilities, 1, kind='stable')",
        "before = np.cumsum(np.take_along_axis(probabilities, order, 1), 1)",
        "before = np.hstack([np.zeros((len(before), 1)), before[:, :-1]])",
        *["scores = np.empty_like(before)", "np.put_along_axis(scores, order, before, 1)"],
    ],
}
_PENALTY = 'before += sets["penalty"] * np.maximum(0, np.arange(1, before.shape[1] + 1) - sets["rank"])'
_SCORES["raps"] = [*_SCORES["aps"][:3], _PENALTY, *_SCORES["aps"][3:]]
METRICS = {"accuracy": ("accuracy", "Accuracy"), "nll": ("cnll", "Negative log-likelihood"),
           "ece": ("cece", "Expected calibration error")}  # fmt: skip
SHOWN = 20  # classes that are named
_ENCODE = {
    "words": r'''
def encode(texts):
    """Words, then n-grams of words, as token numbers."""
    numbers = {word: number for number, word in enumerate(vocabulary["words"], start=2)}
    length, longest, buckets = (vocabulary[key] for key in ("length", "ngrams", "buckets"))
    rows = np.zeros((len(texts), sum(length - n for n in range(longest))), np.int32)
    for row, text in zip(rows, texts):
        words = re.findall(r"\w+|[^\w\s]", text.lower())[:length]
        row[: len(words)] = [numbers.get(word, 1) for word in words]
        begin, hashes = length, [fnv(word) for word in words]
        grams = hashes
        for n in range(2, longest + 1):
            grams = [(a * 116049371 + b) % 2**64 for a, b in zip(grams, hashes[n - 1 :])]
            row[begin : begin + len(grams)] = [gram % buckets + 2 + len(numbers) for gram in grams]
            begin += length - n + 1
    return rows


def fnv(word):
    value = 2166136261
    for byte in word.encode():
        value = ((value ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619) & 0xFFFFFFFF
    return value if value < 2**31 else value | 0xFFFFFFFF00000000
''',
    "characters": r'''
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-,;.!?:'\"/\\|_@#$%^&*~`+-=<>()[]{}\n"


def encode(texts):
    """Characters as token numbers."""
    rows = np.zeros((len(texts), vocabulary["length"]), np.int32)
    for row, text in zip(rows, texts):
        numbers = [ALPHABET.find(character) + 1 for character in text.lower()[: len(row)]]
        row[: len(numbers)] = numbers
    return rows
''',
    "pieces": r'''
def encode(texts):
    """Pieces of a tokenizer as token numbers."""
    tokenizer = Tokenizer.from_file("tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(vocabulary["length"])
    rows = np.full((len(texts), vocabulary["length"]), about["preprocessing"]["padding"], np.int32)
    for row, pieces in zip(rows, tokenizer.encode_batch(list(texts))):
        row[: len(pieces.ids)] = pieces.ids
    return rows
''',
}


def model_card(folder: Path, about: Mapping[str, Any], run: Run | None) -> str:
    """Return ``README.md`` of an export.

    Args:
        folder: that holds all other files of it.
        about: the metadata of its program.
        run: that the weights are of, if that is known.
    """
    records = [] if run is None else _records(run)
    measured = _measured(about, run, records)
    parts = [
        _front_matter(about, records, measured),
        f"# {_heading(about, run)}",
        _summary(about, run),
        _use(about, run),
        _results(about, run, records, measured),
        *([] if run is None else [_training(run)]),
        _files(folder, about),
        *([_certificate(about)] if about.get("certificate") else []),
        _limits(about, run, records),
    ]
    return "\n\n".join(parts) + "\n"


# ---- what is known ---------------------------------------------------------------------------------------------------


def _records(run: Run) -> list[Record]:
    """Return the record of a run, if it was evaluated, and those of its other seeds that lie beside it."""
    record_file = run.folder / RECORD
    if not record_file.is_file():
        return []
    record = read_json(record_file)
    beside = runs_below(run.folder.resolve().parent) if re.fullmatch(r"seed\d+", run.folder.resolve().name) else []
    siblings = [read_json(path / RECORD) for path in beside if (path / RECORD).is_file()]
    alike = ("settings_of_seed", "recipe", "dataset", "draws")
    seeds = {other.get("seed"): other for other in siblings if all(other.get(key) == record.get(key) for key in alike)}
    seeds[record.get("seed")] = record
    try:
        rows(list(seeds.values()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"not a record of an evaluation ({type(error).__name__}: {error})"
        raise InputError(
            f"{record_file}, or that of another seed: {message}; `peerbayes evaluate {run.folder}` writes it"
        ) from None
    return sorted(seeds.values(), key=lambda other: int(other["seed"]))


def _judged(record: Record, about: Mapping[str, Any]) -> Record:
    """Return the figures of what was exported: of all peers as one, or of the only one."""
    peers = about["peers"]
    if len(peers) > 1:
        return dict(record.get(ENSEMBLE) or {})
    return next((peer for peer in record["peers"] if peer.get("name") == peers[0]), {})


def _measured(about: Mapping[str, Any], run: Run | None, records: Sequence[Record]) -> bool:
    """Return whether a run's record after a temperature is of the temperatures that it has now."""
    current = next((record for record in records if run is not None and record["seed"] == run.seed), None)
    if current is None or run is None:
        return True
    kept = {name: run[name].temperature for name in about["peers"]}
    kept[_judged(current, about).get("name")] = about["temperature"]  # of all peers as one, or of the only one
    judged = [*current["peers"], _judged(current, about)]
    then = {figures.get("name"): figures["temperature"] for figures in judged if figures.get("temperature") is not None}
    return all(math.isclose(then[name], kept[name], rel_tol=SAME_TEMPERATURE) for name in kept.keys() & then.keys())


def _front_matter(about: Mapping[str, Any], records: Sequence[Record], measured: bool) -> str:
    """Return YAML, each value in the form that JSON has in common with it."""
    tags = ["peerbayes", "bayesian", "uncertainty", *(["onnx"] if about["to"] == "onnx" else [])]
    entries: dict[str, Any] = {"library_name": "peerbayes", "pipeline_tag": about["task"], "tags": tags}
    judged = [_judged(record, about) for record in records]
    after = about["temperature"] != 1  # which the program's probabilities are at
    keys = {key: calibrated if after else key for key, (calibrated, _) in METRICS.items()}
    if after and not measured:
        keys = {"accuracy": "accuracy"}
    if judged and all(key in row for key in keys.values() for row in judged):
        metrics = [
            {"type": key, "name": METRICS[key][1], "value": round(summarise(row[taken] for row in judged).mean, 5)}
            for key, taken in keys.items()
        ]
        data = records[0]["dataset"]
        result = {
            "task": {"type": about["task"]},
            "dataset": {"type": re.sub(r"[^\w.-]+", "-", data), "name": data},
            "metrics": metrics,
        }
        entries["model-index"] = [{"name": records[0]["recipe"], "results": [result]}]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()]
    return "\n".join(["---", *lines, "---"])


# ---- sections --------------------------------------------------------------------------------------------------------


def _heading(about: Mapping[str, Any], run: Run | None) -> str:
    if run is None:
        return "A network with its uncertainty"
    networks = dict.fromkeys(peer.network for peer in run.recipe.peers if peer.name in about["peers"])
    return _text(f"{', '.join(networks)} on {without_folders(run.recipe).data.name}")


def _summary(about: Mapping[str, Any], run: Run | None) -> str:
    few = {name: f"a Gaussian over {count}" for name, count in _few_bayesian(run).items()}
    pairs = zip(about["peers"], about["posteriors"], strict=True)
    what = ", ".join(f"`{name}`: {few.get(name) or Posterior.of_kind(kind).in_words or kind}" for name, kind in pairs)
    title = "" if run is None else f"{_text(run.recipe.title)}.\n\n"
    names = about["class_names"]
    more = "" if names is None or len(names) <= SHOWN else f" and {len(names) - SHOWN} more (`config.json` has all)"
    classes = "" if names is None else f": {', '.join(_text(name) for name in names[:SHOWN])}{more}"
    return (
        f"{title}A classifier that says how unsure it is, made by peerbayes {about['peerbayes']}. {what}.\n\n"
        f"{about['classes']} classes{classes}."
    )


def _few_bayesian(run: Run | None) -> dict[str, str]:
    """Return how many weights of a peer have a Gaussian, for those of which most have none."""
    few = {}
    for name, posterior in ((name, run[name]) for name in run) if run is not None else ():
        all_of_them = posterior.layout.size + posterior.rest_layout.size
        if posterior.shareable and posterior.layout.size < all_of_them / 2:
            few[name] = f"{posterior.layout.size:,} of {all_of_them:,} weights"
    return few


def _use(about: Mapping[str, Any], run: Run | None) -> str:
    parts = ["## Use"]
    if about["to"] == "onnx":
        lines = _onnx_lines(about, run)
        more = {"from PIL import Image": ", Pillow", "from tokenizers import Tokenizer": ", tokenizers"}
        needs = "".join(name for line, name in more.items() if line in lines)
        parts.append(f"With ONNX Runtime{needs} and NumPy alone, in this folder:")
        parts.append(_code(lines))
    if about["to"] == "torch":
        parts.append("With PyTorch alone:")
        parts.append(_code(_torch_lines(about)))
    if about["to"] != "hub":
        inside = about["normalization"] is not None
        normal = ", which the program normalises itself" if inside else ", as they were learnt"
        numbers = "token numbers, int32, which the code above makes of texts"
        takes = numbers if about["input"] == "tokens" else f"images in [0, 1], float32{normal}"
        shape = ", ".join(map(str, ("N", *about["input_shape"])))
        parts.append(
            f"It takes {takes}, of shape ({shape}) for any N. It returns probabilities (N, {about['classes']}) at "
            f"temperature {about['temperature']:.4g}, their entropy in nats (N,), and the disagreement (mutual "
            f"information) of its draws in nats (N,). {_draws(about)}"
        )
    if run is not None:
        custom = any(peer.network == "custom" or ":" in peer.network for peer in run.recipe.peers)
        note = (
            " Its network is code that is not in this folder: pass `networks=`, or `trust=True` to import it." * custom
        )
        parts.append(f"With peerbayes:{note}")
        given = '["a text", "another one"]' if about["input"] == "tokens" else '"photos/"'
        promised = "".join(
            f", {name}={promise['level']}"
            for name in ("coverage", "risk")
            if (promise := (about.get("certificate") or {}).get(name))
        )
        parts.append(_code(["import peerbayes as pb", "", 'run = pb.load(".")  # this folder, or owner/name on the hub',
                            f'run.predict({given}{promised}).to_csv("predictions.csv")']))  # fmt: skip
    return "\n\n".join(parts)


def _draws(about: Mapping[str, Any]) -> str:
    passes, many = f"{about['passes']} pass{'es' * (about['passes'] != 1)}", len(about["peers"]) > 1
    return {
        "seed": f"It makes its draws itself: `draws` says how many of each peer ({max(about['draws'].values())} as "
        "evaluated), and every `seed` gives others; seed 0 gives those that peerbayes predicts with.",
        "input": "Draws are made of the input `noise`: standard normal numbers, a row a draw.",
        "baked": f"It holds its draws: a prediction is {passes} of the network, always the same ones.",
        "none": f"A prediction is {passes}: nothing is drawn"
        + (", the disagreement is that of peers." if many else ", so the disagreement is 0."),
    }[about["noise"]]


def _onnx_lines(about: Mapping[str, Any], run: Run | None) -> list[str]:
    kind = run.vocabulary.kind if run is not None and run.vocabulary is not None else None
    files = _reads_files(about)
    lines = ["import json", *(["import re"] if kind == "words" else []), "", "import numpy as np"]
    lines += ["import onnxruntime", *(["from tokenizers import Tokenizer"] if kind == "pieces" else [])]
    lines += [*(["from PIL import Image"] if files else []), ""]
    lines += ['session = onnxruntime.InferenceSession("model.onnx")']
    lines += ['about = json.loads(session.get_modelmeta().custom_metadata_map["peerbayes"])']
    shape = ", ".join(map(str, (4, *about["input_shape"])))
    if kind is not None:
        lines += ['vocabulary = json.load(open("vocabulary.json", encoding="utf-8"))']
        lines += ["", *_ENCODE[kind].splitlines(), "", 'feeds = {"tokens": encode(["a text", "another one"])}']
    elif about["input"] == "tokens":
        lines += [f'feeds = {{"tokens": np.zeros(({shape}), np.int32)}}  # token numbers']
    elif files:
        channels, size, _ = about["input_shape"]
        made = "pixels" if channels == 3 else _LUMA
        shortest = round(size * about["preprocessing"]["margin"])
        lines += ["", *_READ.format(shortest=shortest, size=size, made=made).splitlines()]
        lines += ["", 'feeds = {"images": np.stack([read("photo.png"), read("another.jpg")])}']
    else:
        lines += [f'feeds = {{"images": np.random.rand({shape}).astype(np.float32)}}  # bytes / 255']
    if about["noise"] == "seed":
        lines += [f'feeds |= {{"seed": np.array(0), "draws": np.array({max(about["draws"].values())})}}']
    if about["noise"] == "input":
        lines += [
            "size = session.get_inputs()[1].shape[1]",
            'feeds["noise"] = np.random.randn(10, size).astype(np.float32)',
        ]
    lines += ["probabilities, entropy, disagreement = session.run(None, feeds)"]
    names = 'about["class_names"][number]' if about["class_names"] else "int(number)"
    lines += [f"print([{names} for number in probabilities.argmax(1)], entropy, disagreement)"]
    return [*lines, *_promised_lines(about)]


def _reads_files(about: Mapping[str, Any]) -> bool:
    """Return whether inputs are square images in grey or colours, as files hold them."""
    shape = about["input_shape"]
    return about["input"] == "images" and len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]


def _promised_lines(about: Mapping[str, Any]) -> list[str]:
    """Return code that keeps the certificate: which inputs are answered, and sets of classes."""
    certificate, lines = about.get("certificate") or {}, []
    if certificate.get("risk"):
        each = len(certificate["risk"]["thresholds"]) > 1
        lines += ["", 'least = np.array(about["certificate"]["risk"]["thresholds"])']
        lines += [f"answered = probabilities.max(1) >= least{'[probabilities.argmax(1)]' * each}"]
        lines += ["print(answered)  # it abstains from the others"]
    if certificate.get("coverage"):
        lines += ["", 'sets = about["certificate"]["coverage"]', *_SCORES[certificate["coverage"]["method"]]]
        lines += ['members = scores <= np.array(sets["thresholds"])']
        names = 'about["class_names"][number]' if about["class_names"] else "int(number)"
        lines += [f"print([[{names} for number in np.flatnonzero(row)] for row in members])"]
    return lines


def _torch_lines(about: Mapping[str, Any]) -> list[str]:
    shape = ", ".join(map(str, (4, *about["input_shape"])))
    made = f"torch.zeros({shape}, dtype=torch.int32)" if about["input"] == "tokens" else f"torch.rand({shape})"
    given = {"seed": f", torch.tensor(0), torch.tensor({max(about['draws'].values())})"}
    lines = ["import torch", "", 'program = torch.export.load("model.pt2").module()']
    if about["noise"] == "input":
        given["input"] = f", torch.randn(10, {about['noise_size']})"
    lines += ["with torch.no_grad():"]
    return [*lines, f"    probabilities, entropy, disagreement = program({made}{given.get(about['noise'], '')})"]


def _results(about: Mapping[str, Any], run: Run | None, records: Sequence[Record], measured: bool) -> str:
    if not records:
        hint = "" if run is None else "; `peerbayes evaluate` of the run writes what this section is made of"
        return f"## Results\n\nIt was not evaluated when it was exported{hint}."
    columns = COLUMNS
    if measured and all({key for key, _ in CALIBRATED.values()} <= set(_judged(record, about)) for record in records):
        columns = {**COLUMNS, **CALIBRATED}
    wanted = {*about["peers"], *([ENSEMBLE] if len(about["peers"]) > 1 else [])}
    only = [{**record, "peers": [p for p in record["peers"] if p.get("name") in wanted]} for record in records]
    shown = [row for row in rows(only, columns) if row.peer in wanted]
    table = _table(["peer", *columns], [[row.peer, *row.cells] for row in shown])
    seeds = ", ".join(str(record["seed"]) for record in records)
    many = (
        f"mean ± standard error over seeds {seeds}" if len(records) > 1 else f"seed {seeds} alone, so without a spread"
    )
    first = records[0]
    draws = f", {first['draws']} draws" if _stochastic(about) else ""
    after = " cNLL and cECE are after the temperature, which was fitted on other inputs." * (columns is not COLUMNS)
    if not measured and about["temperature"] != 1:
        after = " NLL and ECE are at temperature 1; they were not measured at the temperature that ships."
    other = _judged(first, about).get("out_of_distribution") or {}
    unlike = "".join(
        f"\n\nOut of distribution: entropy tells {_text(name)} apart with an AUROC of {figures['auroc']:.3f}."
        for name, figures in other.items()
        if "auroc" in figures
    )
    return (
        f"## Results\n\n{table}\n\nTest split of {_text(first['dataset'])}, {many}{draws}; ECE with "
        f"{first['ece_bins']} bins.{after}{unlike}"
    )


def _training(run: Run) -> str:
    recipe, data = without_folders(run.recipe), without_folders(run.recipe).data
    given = (run.about.get("data") or {}).get("description")
    terms = dict.fromkeys(name for stage in recipe.stages for name in stage.terms)
    facts = {
        "data": given or data.name,
        "held out for validation": data.validation or "nothing",
        "augmentation": ", ".join(data.augment) or "none",
        "batch size": data.batch_size,
        "recipe": f"{recipe.name or recipe.title} (settings {run.recipe.digest})",
        "changed": ", ".join(changes_of(recipe)),
        "reproduces": "" if changes_of(recipe) else recipe.reproduces,
        "epochs": recipe.epochs,
        "terms": ", ".join(terms),
        "seed": run.seed,
        "trained on": run.about.get("hardware", ""),
        "seconds": run.about.get("seconds", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in (run.about.get("versions") or {}).items()),
    }
    cells = [[name, str(value)] for name, value in facts.items() if value != ""]
    return f"## Training\n\n{_table(['', ''], cells)}\n\n`recipe.toml` has all settings."


def _files(folder: Path, about: Mapping[str, Any]) -> str:
    cells = [[f"`{path.name}`", f"{path.stat().st_size:,}"] for path in sorted(folder.iterdir()) if path.is_file()]
    facts = [f"A prediction takes {about['passes']} pass{'es' * (about['passes'] != 1)} of a network."]
    if about["to"] == "onnx":
        facts += [f"ONNX, opset {about['opset']}."]
    if about["to"] != "hub":
        facts += [f"The program's outputs were at most {about['error']:.1e} from peerbayes's own when it was written."]
    if about["codebook"] == "lookup":
        facts += ["Shared weights are looked up in a table as the program runs."]
    return f"## Files\n\n{_table(['file', 'bytes'], cells)}\n\n{' '.join(facts)}"


def _certificate(about: Mapping[str, Any]) -> str:
    """Return what is promised of predictions, and what it was shown on."""
    certificate = Certificate.parse(about["certificate"], "certificate")
    promises = "\n".join(f"- {_text(sentence)}" for sentence in certificate.describe(about["class_names"]))
    draws = f"{certificate.draws} draws of each peer, " * _stochastic(about)
    return (
        f"## Certificate\n\n{promises}\n\nShown on {certificate.images:,} inputs of {_text(certificate.data)}; "
        f"{certificate.fitted:,} others fitted the temperature ({draws}seed {certificate.seed}). It holds for inputs "
        "like those, and for the probabilities at the temperature above; the code above keeps it."
    )


def _limits(about: Mapping[str, Any], run: Run | None, records: Sequence[Record]) -> str:
    limits = [
        "It knows the classes above and no others: an input of none of them gets one of them.",
        "Entropy and disagreement are measured on inputs like those of training. They rank what it is unsure of; "
        "they are no promise" + ("." if about.get("certificate") is None else ", but for what the certificate says."),
    ]
    size = "×".join(map(str, about["input_shape"]))
    if about["input"] != "tokens":
        limits += [f"Images have the shape {size}; what resizes them is no part of the program."]
    if about["temperature"] == 1:
        limits += ["No temperature was fitted: probabilities are as the network gives them."]
    if len(records) == 1:
        limits += ["The figures are of one seed."]
    if about["noise"] in ("baked", "none") and _stochastic(about):
        limits += ["Its draws are always the same, so its predictions do not show what other draws would say."]
    if run is not None and any(peer.start_from for peer in run.recipe.peers):
        limits += ["It started from other weights, whose data and licence bind it, too."]
    limits += ["No licence is stated here: who publishes it has to choose one that its data and weights allow."]
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


# ---- Markdown --------------------------------------------------------------------------------------------------------


def _code(lines: Sequence[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_text(cell) for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """Return a text that may hold anybody's names as one line without marks of tables, links or HTML."""
    return re.sub(r"([\\|<>\[\]*])", r"\\\1", " ".join(str(text).split()))


def _stochastic(about: Mapping[str, Any]) -> bool:
    return any(Posterior.of_kind(kind).stochastic for kind in about["posteriors"])
