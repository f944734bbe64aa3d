"""The verb `export`: a trained run or posterior to a folder that runs without peerbayes."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex, get_args

import torch
from torch import Tensor

import peerbayes
from peerbayes.choices import ExportCodebook, ExportFormat, ExportNoise
from peerbayes.errors import InputError, nearest
from peerbayes.exporting import checking, program_files
from peerbayes.exporting.card import model_card
from peerbayes.exporting.program import NOISES, OUTPUTS, Program, part_of
from peerbayes.exporting.repository import config_of, write_run
from peerbayes.networks.inputs import Normalize
from peerbayes.networks.normalisation import normalization_of
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior
from peerbayes.runs.new_inputs import as_one
from peerbayes.runs.run import CONFIG, WEIGHTS, Run, peers_at, run_of

FILES = {"onnx": "model.onnx", "torch": "model.pt2"}
DRAWS = 50  # of a posterior that no run tells how many


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        folder: a repository of the Hugging Face hub.
        file: the program in it; None of ``to="hub"``.
        about: what its metadata say: inputs, outputs, classes, temperature, noise, opset.
        error: largest difference of its outputs from peerbayes's own predictions, as it was checked.
        bytes: of the program.

    Example:
        >>> from pathlib import Path
        >>> from peerbayes import Exported
        >>> Exported(Path("mine"), Path("mine/model.onnx"), {"temperature": 1.2}, error=3e-7, bytes=1000)
        Exported(folder=PosixPath('mine'), file=PosixPath('mine/model.onnx'), error=3e-07, bytes=1000)
    """

    folder: Path
    file: Path | None
    about: Mapping[str, Any] = field(repr=False)
    error: float | None = None
    bytes: int = 0


@dataclass(frozen=True)
class _Source:
    """What is exported: posteriors on the CPU, by name, and what is known of them."""

    run: Run | None
    posteriors: dict[str, Posterior]
    temperature: float
    shape: tuple[int, ...]
    tokens: int
    certificate: Any


def export(
    source: Run | Posterior | str | Path,
    *,
    to: ExportFormat = "onnx",
    out: str | Path | None = None,
    noise: ExportNoise | None = None,
    draws: int | None = None,
    codebook: ExportCodebook | None = None,
    opset: int = program_files.OPSET,
    shape: tuple[int, ...] | None = None,
    trust: bool = False,
) -> Exported:
    """Write a trained network as a program that runs without peerbayes, in a repository of the Hugging Face hub.

    The program takes what `Run.predict` takes of arrays, images in [0, 1] or token numbers, in batches of any size. It
    returns probabilities by the temperature that is kept with the weights, their entropy, and the draws' disagreement.
    It is run, compared with peerbayes, and refused where they differ by more than 1e-4.

    Args:
        source: a run, whose peers predict as one; its folder; a weights file of a run; or a posterior.
        to: ``onnx`` (ONNX Runtime), ``torch`` (`torch.export`, a ``.pt2`` file) or ``hub``: no program, but weights,
            description and card for `peerbayes.load`.
        out: the folder, which must not be there yet; by default ``RUN-onnx``, beside the run.
        noise: where draws come from: ``seed``, the program makes them of two inputs, a seed and how many (seed 0 makes
            those of `predict`); ``input``, of standard normal numbers (draws, n); ``baked``, it holds them, each as
            large as the network; ``none``, one pass with the mean weights. By default ``seed``, or ``baked`` of
            members.
        draws: how many are baked, and what the card advises; by default as many as the recipe judges with.
        codebook: shared weights as ``lookup`` (a table and few bits a weight; not of baked draws) or ``plain`` (of
            baked draws and of mean weights alone).
        opset: version of ONNX's operators.
        shape: of one input, (channels, height, width) or (length,), where the posterior does not know it.
        trust: allow what the recipe of a run folder names as ``package.module:name``.

    Example:
        >>> import tempfile, torch, peerbayes as pb
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = pb.export(pb.Point(network), to="hub", out=f"{folder}/mine", shape=(1, 2, 2))
        ...     sorted(path.name for path in done.folder.iterdir())
        ['README.md', 'config.json', 'model.safetensors']
    """  # fmt: skip
    if to not in get_args(ExportFormat):
        raise InputError(f"there is no format '{to}'{nearest(str(to), get_args(ExportFormat))}")
    if to == "onnx":
        _check_opset(opset)
    opened = _opened(source, shape, trust)
    options = _options(opened, noise, draws, codebook)
    folder = _folder(opened, to, out)
    with _made(folder) as aside:
        about: dict[str, Any] = _about(opened, to, options)
        error, size = None, 0
        for name, posterior in opened.posteriors.items():  # which rounds shared weights, where that was not done yet
            alone = len(opened.posteriors) == 1
            posterior.save(aside / (WEIGHTS if alone else f"weights-{name}.safetensors"), anchors=False)
        if to != "hub":
            if to == "onnx":
                about["opset"] = opset
            path = aside / FILES[to]
            error = _write(path, opened, options, about)
            size = path.stat().st_size
            about |= {"error": error, "bytes": size, "file": FILES[to]}
        if opened.run is not None:
            write_run(aside, opened.run, list(opened.posteriors))
        storage.write_bytes(aside / CONFIG, config_of(about, opened.run).encode())
        storage.write_bytes(aside / "README.md", model_card(aside, about, opened.run).encode())
    return Exported(folder, folder / FILES[to] if to != "hub" else None, about, error, size)


# ---- what is exported ------------------------------------------------------------------------------------------------


def _opened(source: Any, shape: tuple[int, ...] | None, trust: bool) -> _Source:
    """Return copies of the posteriors on the CPU, which draw as the run's predictions do."""
    if isinstance(source, Posterior):
        run, posteriors = run_of(source), {source.name: source}
        run = run if run is not None and source.name in list(run) else None
    elif isinstance(source, Run | str | Path):
        run, names = (source, source.predicting) if isinstance(source, Run) else peers_at(source, trust=trust)
        posteriors = {name: run[name] for name in names}
    else:
        kind = type(source).__name__
        raise InputError(f"source is a {kind}, expected a run, its folder, a weights file of a run, or a posterior")
    copies = {name: copy.deepcopy(posterior).cpu().eval() for name, posterior in posteriors.items()}
    if run is not None:
        for name, posterior in copies.items():
            posterior.seed, posterior.name = run.seed, name
    if shape is not None and not (len(shape) in (1, 3) and all(type(side) is int and side > 0 for side in shape)):
        raise InputError(f"shape is {shape!r}, expected (channels, height, width) of an image or (length,) of a text")
    first, learnt = next(iter(copies.values())), next(iter(copies.values())).input_shape
    if learnt is None and shape is None:
        raise InputError(f"posterior '{first.name}' does not know the shape of an input: pass shape=(3, 32, 32), say")
    if learnt is not None and shape is not None and tuple(shape) != tuple(learnt):
        raise InputError(f"shape is {tuple(shape)}, but the network has learnt inputs of shape {tuple(learnt)}")
    learnt = tuple(learnt or shape or ())
    for posterior in copies.values():
        posterior.input_shape = learnt
    tokens = checking.tokens_of(first.network) if len(learnt) == 1 else 0
    tokens = tokens if run is None else run.network_inputs().tokens
    if run is not None and len(copies) > 1:
        return _Source(run, copies, run.temperature, learnt, tokens, run.about.get("certificate"))
    return _Source(run, copies, first.temperature, learnt, tokens, first.description().get("certificate"))


@dataclass(frozen=True)
class _Options:
    """How draws get into the program."""

    noise: ExportNoise
    draws: dict[str, int]  # of each peer
    codebook: ExportCodebook


def _options(model: _Source, noise: ExportNoise | None, draws: int | None, codebook: ExportCodebook | None) -> _Options:
    if noise is not None and noise not in NOISES:
        raise InputError(f"there is no noise '{noise}'{nearest(str(noise), NOISES)}")
    if codebook not in (None, "lookup", "plain"):
        raise InputError(f"codebook is '{codebook}', expected lookup or plain")
    if draws is not None and not (isinstance(draws, SupportsIndex) and operator.index(draws) >= 1):
        raise InputError(f"draws is {draws!r}, expected a whole number of at least 1")
    varied = [posterior for posterior in model.posteriors.values() if posterior.stochastic]
    for option, value in (("noise", noise), ("draws", draws)):
        if not varied and value not in (None, "none"):
            raise InputError(f"{option} is {value!r}, but nothing is drawn: the network has one set of weights")
    if noise is None:
        members = any(posterior.members > 1 or not posterior.noise_size for posterior in varied)
        noise = "baked" if members else "seed" if varied else "none"
    if noise == "none" and draws is not None:
        raise InputError(f"draws is {draws}, but noise 'none' is one pass with the mean weights: leave out one of them")
    if noise == "input" and len(model.posteriors) > 1:
        raise InputError(f"noise is 'input', but there are peers {', '.join(model.posteriors)}: export one of their "
                         "weights files, or take noise 'seed'")  # fmt: skip
    if codebook is not None and not any(posterior.made_of_posterior for posterior in model.posteriors.values()):
        raise InputError(f"codebook is '{codebook}', but no peer's weights share one")
    if codebook == "plain" and noise in ("seed", "input"):
        raise InputError(f"codebook is 'plain', but noise '{noise}' draws by looking weights up: take noise 'baked' or "
                         "'none', or codebook 'lookup'")  # fmt: skip
    if codebook == "lookup" and noise == "baked":
        raise InputError(
            "codebook is 'lookup', but baked draws are plain weights: take noise 'seed', or codebook 'plain'"
        )
    if draws is None:  # those that promises are of, where there are any
        evaluated = DRAWS if model.run is None else model.run.recipe.evaluation.draws
        draws = (model.certificate or {}).get("draws") or evaluated
    counts = {}
    for name, posterior in model.posteriors.items():
        most = draws if posterior.noise_size else min(draws, posterior.members)  # of which more say nothing new
        counts[name] = most if posterior.stochastic and noise != "none" else 1
    return _Options(noise, counts, codebook or ("plain" if noise == "baked" else "lookup"))


def _check_opset(opset: Any) -> None:
    newest = program_files.needed()[0].defs.onnx_opset_version()
    if type(opset) is not int or not program_files.OPSET <= opset <= newest:
        raise InputError(f"opset is {opset!r}, expected {program_files.OPSET} to {newest}")


def _about(model: _Source, to: ExportFormat, options: _Options) -> dict[str, Any]:
    """Return what metadata say of a program, JSON-ready."""
    first, run = next(iter(model.posteriors.values())), model.run
    about = run.about if run is not None else {}
    images = {"images": "float32 in [0, 1] (bytes / 255), channels first", "margin": about.get("margin", 1.0)}
    texts = {"tokens": "int32", "below": model.tokens, "padding": (about.get("inputs") or {}).get("padding", 0)}
    return {
        "peerbayes": peerbayes.__version__,
        "to": to,
        "peers": list(model.posteriors),
        "posteriors": [posterior.kind for posterior in model.posteriors.values()],
        "task": "text-classification" if model.tokens else "image-classification",
        "input": "tokens" if model.tokens else "images",
        "input_shape": list(model.shape),
        "preprocessing": texts if model.tokens else images,
        "normalization": None if model.tokens else _normalization(first),
        "outputs": list(OUTPUTS),
        "classes": _classes(model),
        "class_names": None if first.class_names is None else list(first.class_names),
        "temperature": model.temperature,
        "noise": options.noise,
        "draws": options.draws,
        "noise_size": first.noise_size if options.noise == "input" else None,
        "passes": sum(options.draws.values()),
        "codebook": options.codebook if any(p.made_of_posterior for p in model.posteriors.values()) else None,
        "certificate": model.certificate,
    }


def _normalization(posterior: Posterior) -> dict[str, list[float]] | None:
    """Return mean and deviation that a network normalises its images by, where they are known; it does so itself."""
    stats = normalization_of(posterior.network)
    for module in posterior.network.modules():
        if stats is None and isinstance(module, Normalize):
            stats = tuple(module.mean.flatten().tolist()), tuple(module.std.flatten().tolist())
    return None if stats is None else {"mean": list(stats[0]), "std": list(stats[1])}


def _classes(model: _Source) -> int:
    if model.run is not None:
        return model.run.network_inputs().classes
    first = next(iter(model.posteriors.values()))
    return len(first.predict(checking.inputs_like(model.shape, model.tokens, 2), 1).log_probabilities[0])


# ---- the program -----------------------------------------------------------------------------------------------------


def _write(path: Path, model: _Source, options: _Options, about: Mapping[str, Any]) -> float:
    """Write the program; return how far its outputs are from peerbayes's own, or refuse it."""
    # First peerbayes itself, which says what a network can't take, and finds out whether it can take views.
    wanted = {batch: _wanted(model, options, batch) for batch in checking.SIZES}
    classes, name = about["classes"], about["input"]
    parts = [
        part_of(posterior, classes, options.noise, options.draws[peer], options.codebook)
        for peer, posterior in model.posteriors.items()
    ]
    program = Program(parts, model.temperature)
    example = {name: checking.inputs_like(model.shape, model.tokens, 2)}
    first = next(iter(model.posteriors.values()))
    given = {"seed": torch.tensor(0), "draws": torch.tensor(checking.CHECKED)}
    if "noise" in program.extra:
        given["noise"] = checking.noise_of(first, 2)
    example |= {extra: given[extra] for extra in program.extra}
    graph = program_files.traced(program, example)
    onnx = path.suffix == ".onnx"
    if onnx:
        program_files.write_onnx(path, graph, list(example), about, about["opset"])
    else:
        program_files.write_torch(path, graph, about)
    run, error = program_files.run_onnx if onnx else program_files.run_torch, 0.0
    for batch, cases in wanted.items():
        for feeds, prediction in cases:
            shown = {name: checking.inputs_like(model.shape, model.tokens, batch)} | feeds
            error = max(error, checking.error_of(run(path, shown), prediction))
    if not error <= checking.TOLERANCE:
        raise InputError(f"the program's outputs differ from peerbayes's own by {error:.1e}, expected at most "
                         f"{checking.TOLERANCE:.0e}: nothing was written")  # fmt: skip
    return error


def _wanted(model: _Source, options: _Options, batch: int) -> list[tuple[dict[str, Tensor], Any]]:
    """Return inputs beside a batch, and what peerbayes predicts with them."""
    inputs, counts = checking.inputs_like(model.shape, model.tokens, batch), options.draws
    first = next(iter(model.posteriors.values()))
    if options.noise == "seed":
        few = {name: checking.CHECKED if posterior.stochastic else 1 for name, posterior in model.posteriors.items()}
        cases = [({"seed": torch.tensor(0)}, checking.expected(model.posteriors, inputs, few, model.temperature))]
        if len(model.posteriors) == 1:
            noise = checking.forked_noise(first, 1, checking.CHECKED)
            cases.append(({"seed": torch.tensor(1)}, _placed(first, inputs, noise, model.temperature)))
        return [(seed | {"draws": torch.tensor(checking.CHECKED)}, wanted) for seed, wanted in cases]
    if options.noise == "input":
        noise = checking.noise_of(first, checking.CHECKED)
        return [({"noise": noise}, _placed(first, inputs, noise, model.temperature))]
    if options.noise == "none":
        wanted = [
            checking.expected_of(posterior, inputs, iter([posterior.place(None)[0].detach()]), 1.0)
            for posterior in model.posteriors.values()
        ]
        return [({}, as_one(wanted).tempered(model.temperature))]
    return [({}, checking.expected(model.posteriors, inputs, counts, model.temperature))]


def _placed(posterior: Posterior, inputs: Tensor, noise: Tensor, temperature: float) -> Any:
    with torch.no_grad():
        return checking.expected_of(posterior, inputs, (posterior.place(row)[0] for row in noise), temperature)


# ---- the folder ------------------------------------------------------------------------------------------------------


def _folder(model: _Source, to: ExportFormat, out: str | Path | None) -> Path:
    if out is None:
        if model.run is None:
            raise InputError(
                "`out` is required: the posterior was not loaded from a run, beside which the folder would lie"
            )
        path = model.run.named
        path = path if path.name not in ("", "..") else path.resolve()
        out = path.with_name(f"{path.name}-{to}")
    folder = Path(out).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder}: is there already; choose another folder for the export, or remove it")
    return folder


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """Yield a folder aside that becomes ``folder`` at the end, or is gone where anything goes wrong."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = folder.name if folder.name not in ("", "..") else folder.resolve().name
    aside = folder.parent / f".{name}.{os.getpid()}.tmp"
    try:
        aside.mkdir()
        yield aside
        if folder.is_dir():
            folder.rmdir()
        os.replace(aside, folder)
        storage.sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
