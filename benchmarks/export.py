"""Error, bytes and latency of exported programs, by model and by where draws come from, beside PyTorch's.

    python benchmarks/export.py [NAME ...] [--draws 10] [--rounds 7] [--out results/export.json]
    python benchmarks/export.py --to torch [NAME ...] [--draws 10] [--out results/export.json]   # adds to the file

Networks have their initial weights: no figure depends on what they have learnt. A round times ONNX Runtime and
`Posterior.predict` one after the other, on as many threads as torch has; ratios are within rounds, and their median is
given, which forgives noise that lasts longer than a round. The error is that of the check that every export makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import peerbayes as pb
from peerbayes.codebook import Sharing, share
from peerbayes.engine.processes import environment
from peerbayes.exporting.checking import inputs_like
from peerbayes.networks import Inputs, build

BATCHES = (1, 8)
IMAGENET = Inputs(1000, (3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = Inputs(100, (3, 32, 32), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
WORDS = Inputs(4, (64,), (), (), tokens=30_000)


class Sentences(nn.Module):
    """An encoder of the shape of MiniLM: 6 layers of 384 units with 12 heads, 30,522 pieces, 22.7 M weights.

    Args:
        inputs: classes and length.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30_522, 384), nn.Embedding(512, 384)
        layer = nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, inputs.classes)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != 0
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = self.layers(x, src_key_padding_mask=~present) * present[..., None]
        logits: Tensor = self.head(x.sum(1) / present.sum(1, keepdim=True).clamp_min(1))
        return logits


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "resnet20": (lambda: build("resnet20", CIFAR), CIFAR),
    "timm/resnet18": (lambda: build("timm/resnet18", IMAGENET), IMAGENET),
    "timm/vit_tiny_patch16_224": (lambda: build("timm/vit_tiny_patch16_224", IMAGENET), IMAGENET),
    "timm/tf_efficientnet_lite0": (lambda: build("timm/tf_efficientnet_lite0", IMAGENET), IMAGENET),
    "fasttext100": (lambda: build("fasttext100", WORDS), WORDS),
    "MiniLM's shape": (lambda: Sentences(WORDS), WORDS),
}
ALL = [("mean_field", "baked"), ("shared", "seed"), ("shared", "lookup"), ("shared", "plain")]


def forms(name: str) -> list[tuple[str, str]]:
    """Return posterior and noise of what is exported of a model; shared weights of one."""
    return [("point", "none"), ("mean_field", "seed"), *(ALL if name == "resnet20" else [])]


def posterior_of(kind: str, network: nn.Module) -> pb.Posterior:
    """Return a posterior over a network."""
    if kind == "point":
        return pb.Point(network).eval()
    field = pb.MeanField(network).eval()
    if kind == "mean_field":
        return field
    book, _ = share(field, Sharing(), gradient=None)
    return pb.Shared(network, book).eval()


def measured(name: str, kind: str, noise: str, draws: int, rounds: int) -> dict[str, Any]:
    """Return the record of one export."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    posterior = posterior_of(kind, make())
    options: dict[str, Any] = {"noise": noise, "draws": draws}
    if noise in ("lookup", "plain"):
        options = {"noise": "none", "codebook": noise}
    if kind == "point":
        options = {}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = pb.export(posterior, out=Path(folder, "made"), shape=inputs.shape, **options)
        seconds = time.perf_counter() - begun
        weights = (done.folder / "model.safetensors").stat().st_size
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(done.file), settings, providers=["CPUExecutionProvider"])
    record = {
        "model": name,
        "posterior": kind,
        "noise": options.get("noise", "none"),
        "codebook": done.about["codebook"],
        "passes": done.about["passes"],
        "error": done.error,
        "bytes": done.bytes,
        "weights_file_bytes": weights,
        "export_seconds": round(seconds, 1),
        "latency": {},
    }
    single = noise in ("lookup", "plain")
    plain = pb.Point(posterior.materialise()).eval() if single else posterior
    for batch in BATCHES:
        given = inputs_like(inputs.shape, inputs.tokens, batch)
        feeds = {done.about["input"]: given.numpy()}
        if "seed" in {put.name for put in session.get_inputs()}:
            feeds |= {"seed": torch.tensor(0).numpy(), "draws": torch.tensor(draws).numpy()}
        times: list[tuple[float, float]] = []
        for number in range(rounds + 1):  # the first one warms up
            pair = [_timed(lambda: session.run(None, feeds)), _timed(lambda: plain.predict(given, draws))]  # noqa: B023
            times += [(pair[0], pair[1])] if number else []
        record["latency"][str(batch)] = {
            "onnxruntime_ms": round(1e3 * min(put for put, _ in times), 2),
            "torch_ms": round(1e3 * min(other for _, other in times), 2),
            "ratio": round(statistics.median(put / other for put, other in times), 3),
        }
    return record


def measured_torch(name: str, kind: str, draws: int) -> dict[str, Any]:
    """Return the error and size of one program of `torch.export`."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    posterior = posterior_of(kind, make())
    options = {} if kind == "point" else {"noise": "seed", "draws": draws}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = pb.export(posterior, to="torch", out=Path(folder, "made"), shape=inputs.shape, **options)
        seconds = time.perf_counter() - begun
        about = {
            "model": name,
            "posterior": kind,
            "noise": options.get("noise", "none"),
            "passes": done.about["passes"],
        }
        return about | {"error": done.error, "bytes": done.bytes, "export_seconds": round(seconds, 1)}


def _timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--to", choices=("onnx", "torch"), default="onnx")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore", pb.PeerbayesWarning)  # fastText's embeddings are not Bayesian, which is known
    versions = {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    if given.to == "torch":
        rows = [
            measured_torch(name, kind, given.draws)
            for name in given.names or MODELS
            for kind in ("point", "mean_field")
        ]
        print(json.dumps(rows, indent=1))
        if given.out is not None:
            before = json.loads(given.out.read_text()) if given.out.exists() else {}
            about = {"command": f"python benchmarks/export.py --to torch --draws {given.draws}", "draws": given.draws}
            about |= environment(torch.device("cpu"))
            given.out.write_text(json.dumps(before | {"torch_export": about | {"exports": rows}}, indent=1) + "\n")
        return
    results: dict[str, Any] = {"command": f"python benchmarks/export.py --draws {given.draws} --rounds {given.rounds}"}
    results |= {**environment(torch.device("cpu")), "draws": given.draws, "rounds": given.rounds}
    results["versions"] |= versions
    results["exports"] = []
    for name in given.names or MODELS:
        for kind, noise in forms(name):
            record = measured(name, kind, noise, given.draws, given.rounds)
            results["exports"].append(record)
            print(json.dumps(record), flush=True)
            if given.out is not None:  # whole at any moment
                given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
