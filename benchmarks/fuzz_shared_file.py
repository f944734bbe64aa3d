"""Damage files of shared weights and load each: the same model, or one clear sentence, in little time and memory.

    python benchmarks/fuzz_shared_file.py --times 120000 --out results/fuzz-shared-file.json
    python benchmarks/fuzz_shared_file.py --times 500 --seed 3

Half of the damage leaves the digests as they are: then only the same model may come of it (a header may be spelt in
other ways), or a sentence. The other half is signed again, also inside the coded index, so that it gets past the
digests: then another model may come of it too, which has to be whole: drawn, run, written and read again. Anything else
(another exception, a warning, a sentence of several lines, a load that is killed, is slow, or takes too much memory) is
a fault, printed with its number; ``--first NUMBER --times 1`` repeats it.

Loads run in worker processes whose address space and time are limited.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import multiprocessing
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from index_codec import damage, damaged_tables
from peerbayes import Address, InputError
from peerbayes.codebook import coder as index_codec
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.file import COLUMNS, SHARES, _by_layer, _padded
from peerbayes.codebook.shared import Shared
from peerbayes.engine.processes import environment
from peerbayes.posteriors import Posterior, storage

MEMORY = 256 << 20  # bytes of address space that loads may add to what a worker begins with
SECONDS = 5  # of the processor that one load may take: a busy machine is no fault
CHUNK = 10_000  # damaged files a worker process
HEAD = len(index_codec.MAGIC) + index_codec.DIGEST
SAME, SENTENCE, OTHER = "the same model", "one sentence", "another valid model"


# ---- what is damaged -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Specimen:
    """A file of shared weights, what is in it, and for its coded tensors alphabet and parts."""

    data: bytes
    tensors: dict[str, Tensor]
    about: dict[str, Any]
    coded: dict[str, tuple[int, list[int]]]
    posterior: Posterior


@functools.cache  # posteriors are made over copies
def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    layers.register_buffer("mask", torch.tensor([True, False, True]))
    layers.register_buffer("hidden", torch.tensor([0.0, -torch.inf]))
    return layers


def codebook(components: int, blended: int, outliers: int, seed: int, size: int = 304) -> Codebook:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator)
    share = torch.rand(blended, 1, generator=generator)
    return Codebook(
        component=torch.rand(components, 2, generator=generator) * 0.2 + 0.01,
        cholesky=torch.randn(components, 3, generator=generator) * 0.01,
        label=torch.randint(components, (size,), generator=generator),
        blended=order[:blended],
        blend_component=torch.randint(components, (blended, 2), generator=generator),
        blend_weight=torch.cat([share, 1 - share], 1),
        outlier=order[blended : blended + outliers],
        outlier_mean=torch.randn(outliers, generator=generator),
        outlier_std=torch.rand(outliers, generator=generator) * 0.1 + 0.01,
    )


def specimens(folder: Path) -> list[Specimen]:
    """Return files of several kinds: exact and rounded, with and without anchors, blends, outliers."""
    made = []
    for number, (book, options, anchors) in enumerate(
        [
            (codebook(9, 20, 30, 0), {}, True),
            (codebook(40, 0, 50, 1), {"sampling": "cluster", "prior": "normal"}, False),
            (codebook(9, 20, 30, 2), {"bits": 10}, False),
            (codebook(60, 25, 0, 3), {"bits": 8, "sampling": "moment"}, False),
            (codebook(1, 0, 0, 4), {"bits": 16, "sampling": "mean"}, False),
            (codebook(5, 10, 40, 5, size=144), {"bits": 8, "weights": ["0.weight"]}, False),
        ]
    ):
        posterior = Shared(network(), book, seed=number, name=f"peer{number}", **options)
        path = folder / f"specimen{number}.safetensors"
        posterior.save(path, anchors=anchors)
        tensors, about = storage.read(path)
        components, blends, sizes = len(posterior.component), [len(posterior.blended)], posterior.layout.sizes
        coded = {
            "means/index": (components + 2, sizes),
            "means/blend_first": (components, blends),
            "means/blend_step": (components, blends),
            "means/blend_weight": (SHARES + 1, blends),
        }
        if posterior.bits < 32:
            parts = _by_layer(posterior.outlier, sizes)
            coded["means/outlier"], coded["scales/outlier"] = (1 << posterior.bits, parts), (256, parts)
            coded["scales/component"] = 256, [components] * COLUMNS
        made.append(Specimen(path.read_bytes(), tensors, about, coded, Posterior.load(path, network())))
    return made


# ---- damage that is not signed ---------------------------------------------------------------------------------------


def bits(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    data = bytearray(given.data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def cut(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    return given.data[: chance.choice((chance.randrange(len(given.data)), len(given.data) - chance.randrange(1, 20)))]


def swap(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    length, data = chance.choice((1, 4, 8, 64, 200)), given.data
    begin, middle = sorted(chance.randrange(len(data) - length) for _ in range(2))
    middle = max(middle, begin + length)
    first, second = data[begin : begin + length], data[middle : middle + length]
    return data[:begin] + second + data[begin + length : middle] + first + data[middle + length :]


def graft(given: Specimen, chance: random.Random, every: list[Specimen]) -> bytes:
    """The header of one file, the rest of another."""
    other = chance.choice(every)
    ends = [8 + int.from_bytes(specimen.data[:8], "little") for specimen in (given, other)]
    return given.data[: ends[0]] + other.data[ends[1] :]


def faults(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    return damage(given.data, chance)


def header(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    """Change some values of the header, or its text."""
    end = 8 + int.from_bytes(given.data[:8], "little")
    table = json.loads(given.data[8:end])
    for _ in range(chance.choice((1, 1, 2))):
        edit(table, chance)
    text = json.dumps(table, separators=(",", ":")).encode()
    if chance.random() < 0.2:
        text = damage(text, chance)
    length = len(text) if chance.random() < 0.95 else chance.choice((0, 1 << 62, len(text) + 8, len(text) // 2))
    return length.to_bytes(8, "little") + text + given.data[end:]


VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 7, 255, 1 << 31, 1 << 63, 10**30, 0.5, -0.1, 1e-300, 1e400)
VALUES += ("", "x", "shared", "F32", "U8", "BOOL", "means/index", "\u20ac" * 9)
VALUES += ([], [0], [1, 2, 3], [[]], ["0.weight"], {}, {"a": 1})


def edit(table: Any, chance: random.Random) -> None:
    """Change, drop, double or add one value somewhere in a JSON table."""
    node = table
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and chance.random() < 0.7:
            node = node[key]
            continue
        break
    kind = chance.randrange(5)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[chance.choice((f"{key}x", "full", "weights", "grids", "extra"))] = node.pop(key)
    elif kind == 2 and type(node[key]) is int:
        node[key] += chance.choice((-1, 1, -8, 8, 4))
    elif kind == 3:
        node[key] = node[chance.choice(keys)]
    else:
        node[key] = chance.choice(VALUES)


# ---- damage that is signed again -------------------------------------------------------------------------------------


def put(tensors: dict[str, Tensor], about: Any, chance: random.Random) -> bytes:
    """Return a file of tensors and a description (or its text) with a digest that is right."""
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    text = about if isinstance(about, str) else json.dumps(about, sort_keys=chance.random() < 0.5)
    return save(plain, {"digest": storage._digest(plain, text), "peerbayes": text})


def signed_bytes(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    """Damage the bytes of a tensor; those within the codes are not signed again."""
    name = chance.choice(list(given.tensors))
    tensor = given.tensors[name]
    data = damage(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), chance)
    data = data[: len(data) // tensor.element_size() * tensor.element_size()]
    changed = torch.frombuffer(bytearray(data), dtype=tensor.dtype) if data else tensor.reshape(-1)[:0]
    if changed.numel() == tensor.numel():
        changed = changed.view(tensor.shape)
    return put(given.tensors | {name: changed}, given.about, chance)


def signed_codes(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    """Damage what is coded, or the tables of frequencies, and sign that too."""
    name = chance.choice([*given.coded, "fixed/others"])
    whole = given.tensors[name].numpy().tobytes()
    data = whole[: -whole[-1]]
    if name == "fixed/others":
        plain = lzma.decompress(data, lzma.FORMAT_RAW, filters=index_codec.LZMA)
        data = lzma.compress(damage(plain, chance), lzma.FORMAT_RAW, filters=index_codec.LZMA)
    else:
        body = (damaged_tables if chance.random() < 0.5 else damage)(data, chance)[HEAD:]
        data = index_codec.MAGIC + index_codec._digest(body, *given.coded[name]) + body
    return put(given.tensors | {name: _padded(data)}, given.about, chance)


def signed_numbers(given: Specimen, chance: random.Random, _all: list[Specimen]) -> bytes:
    """Change some numbers of a tensor."""
    numbers = [name for name, tensor in given.tensors.items() if tensor.dtype != torch.uint8 and tensor.numel()]
    name = chance.choice(numbers)
    tensor = given.tensors[name].clone()
    flat = tensor.view(-1)
    for _ in range(chance.choice((1, 1, 3, len(flat)))):
        wild = struct.unpack("<f", chance.randbytes(4))[0]
        value = chance.choice((0.0, -1.0, 1.0, 3.0, torch.nan, torch.inf, -torch.inf, 3e38, 1e-45, 1e30, wild))
        if not tensor.is_floating_point():
            value = chance.randrange(-(1 << 15), 1 << 15)
        flat[chance.randrange(len(flat))] = value
    return put(given.tensors | {name: tensor}, given.about, chance)


def signed_shapes(given: Specimen, chance: random.Random, every: list[Specimen]) -> bytes:
    """Drop, add, rename, cast, reshape, stretch or exchange a tensor."""
    tensors = dict(given.tensors)
    name = chance.choice(list(tensors))
    tensor, kind = tensors[name], chance.randrange(8)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[chance.choice(("extra", "mean/0.weight", "anchor/outlier", "anchor/component", "grids"))] = tensor
    elif kind == 2:
        tensors[chance.choice((f"{name}/", name.upper(), "means/index", "anchor/x"))] = tensors.pop(name)
    elif kind == 3:
        types = (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.bfloat16)
        tensors[name] = tensor.to(chance.choice(types))
    elif kind == 4:
        shapes = ((-1, 1), (1, -1), (1, 1, -1), (-1,), (2, -1))
        shape = chance.choice(shapes)
        tensors[name] = tensor.reshape(shape) if tensor.numel() and tensor.numel() % 2 == 0 else tensor[None]
    elif kind == 5:
        tensors[name] = tensor[: chance.randrange(len(tensor) + 1)]
    elif kind == 6:
        tensors[name] = torch.cat([tensor] * chance.choice((2, 3, 50)))
    else:
        other = chance.choice(every).tensors
        tensors[name] = other.get(name, tensor) if chance.random() < 0.7 else chance.choice(list(other.values()))
    return put(tensors, given.about, chance)


def signed_description(given: Specimen, chance: random.Random, every: list[Specimen]) -> bytes:
    """Change the description, exchange it, or damage its text."""
    about: Any = json.loads(json.dumps(given.about))
    for _ in range(chance.choice((1, 1, 2, 3))):
        edit(about, chance)
    if chance.random() < 0.1:
        about = chance.choice(every).about
    if chance.random() < 0.1:
        text = damage(json.dumps(about).encode(), chance).decode(errors="replace")
        about = chance.choice((text, "[" * 100_000, "null", "3", "", '{"kind": "shared"}', "9" * 5000))
    return put(given.tensors, about, chance)


def signed_header(given: Specimen, chance: random.Random, every: list[Specimen]) -> bytes:
    """Change the header, and put the digest into it that a reader would find right."""
    data = header(given, chance, every)
    with tempfile.NamedTemporaryFile(dir=scratch()) as file:
        file.write(data)
        file.flush()
        try:
            with safe_open(file.name, framework="pt") as opened:
                names = list(opened.keys())
                tensors, about = {n: opened.get_tensor(n) for n in names}, dict(opened.metadata() or {})
            right = storage._digest(tensors, about["peerbayes"])
        except Exception:  # a reader will not get so far either
            return data
    end = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:end])
    table["__metadata__"]["digest"] = right
    text = json.dumps(table, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


Damage = Callable[[Specimen, random.Random, list[Specimen]], bytes]
KINDS: dict[str, Damage] = {
    "bits flipped": bits,
    "signed: bytes of a tensor": signed_bytes,
    "cut short": cut,
    "signed: codes and tables": signed_codes,
    "ranges swapped": swap,
    "signed: numbers": signed_numbers,
    "header of another file": graft,
    "signed: shapes and types": signed_shapes,
    "bytes inserted, dropped, changed": faults,
    "signed: description": signed_description,
    "header edited": header,
    "signed: header": signed_header,
}


# ---- loading ---------------------------------------------------------------------------------------------------------


def scratch() -> str:
    """Return a folder in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def equal(mine: Posterior, other: Posterior) -> bool:
    """Tell whether two posteriors are the same to the last bit."""
    first, second = mine.state(), other.state()
    return (
        first.keys() == second.keys()
        and (mine.options(), mine.seed, mine.name) == (other.options(), other.seed, other.name)
        and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    )


def whole(posterior: Posterior, path: Path) -> None:
    """Use a model that was made by damage: draw, run, write, read."""
    weights = posterior.draw(Address(0, "fuzz", "draw"))
    if weights.flat.shape != (posterior.layout.size,):
        raise RuntimeError(f"a draw has shape {tuple(weights.flat.shape)}")
    posterior.eval().predict(torch.zeros(2, 2, 4, 4), 2)
    posterior.save(path)
    first, second = (p.draw(Address(0)).flat.view(torch.int32) for p in (posterior, Posterior.load(path, network())))
    if not torch.equal(first, second):  # bit by bit: what is huge may overflow in a draw
        raise RuntimeError("it does not come back as it was written")


def unclear(text: str, path: Path) -> str:
    """Return what is wrong with a sentence about a file, if anything is."""
    if "\n" in text or not text.startswith(f"{path}: ") or len(text) > 1000:
        return f"not one sentence that names the file: {text[:200]}"
    return ""


def means_fault(given: Specimen, path: Path) -> str:
    """Return what is wrong with the means of a damaged file, which are refused, or those of the file as it was."""
    try:
        means = Shared.load_means(path, network()).state_dict()
    except InputError as error:
        return unclear(str(error), path)
    expected = given.posterior.materialise().state_dict()
    same = all(torch.equal(tensor, means[name]) for name, tensor in expected.items())
    return "" if same else "damage to the means went unseen"


def outcome(data: bytes, given: Specimen, signed: bool, path: Path) -> tuple[str, str]:
    """Load a damaged file; return what came of it, and the sentence or the fault."""
    path.write_bytes(data)
    try:
        if fault := means_fault(given, path):
            return "fault", fault
        loaded = Posterior.load(path, network())
        if equal(loaded, given.posterior):
            return SAME, ""
        if not signed:
            return "fault", "damage went unseen"
        whole(loaded, path.with_name("again.safetensors"))
        return OTHER, ""
    except InputError as error:
        if fault := unclear(text := str(error), path):
            return "fault", fault
        return SENTENCE, re.sub(r"\d+", "N", text.removeprefix(f"{path}: "))[:60]
    except BaseException as error:
        return "fault", f"{type(error).__name__}: {error} at {traceback.format_exc().splitlines()[-3].strip()}"


def too_slow(*_: Any) -> None:
    raise TimeoutError(f"a load took more than {SECONDS} s")


def address_space() -> int:
    """Return the bytes of this process's address space."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def work(seed: int, first: int, last: int, at: Any, pipe: Any) -> None:
    """Load the damaged files of these numbers, within limits, and send what came of it."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, too_slow)
    counts, sentences, faults, slowest = Counter[tuple[str, str]](), Counter[str](), [], 0.0
    with tempfile.TemporaryDirectory(dir=scratch()) as name:
        folder = Path(name)
        every = specimens(folder)
        if address_space():
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + MEMORY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (60 + last - first, resource.RLIM_INFINITY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, last):
            at.value = number
            chance = random.Random(f"{seed} {number}")
            kind = list(KINDS)[number % len(KINDS)]
            given = chance.choice(every)
            data = KINDS[kind](given, chance, every)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            start = time.process_time()
            result, detail = outcome(data, given, kind.startswith("signed"), folder / "damaged.safetensors")
            slowest = max(slowest, time.process_time() - start)
            signal.setitimer(signal.ITIMER_PROF, 0)
            counts[kind, result] += 1
            if result == "fault":
                faults.append(f"number {number}, {kind}: {detail}")
            elif detail:
                sentences[detail] += 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    pipe.send((counts, sentences, faults, slowest, grown * (1 if sys.platform == "darwin" else 1024)))


def fuzz(seed: int, first: int, times: int) -> dict[str, Any]:
    """Damage and load so many files; a worker that dies is a fault, and the next one goes on behind it."""
    context = multiprocessing.get_context("spawn")
    counts, sentences, faults = Counter[tuple[str, str]](), Counter[str](), list[str]()
    slowest, grown, index, end = 0.0, 0, first, first + times
    start = time.perf_counter()
    while index < end:
        last, at = min(end, index + CHUNK), context.Value("q", index)
        receive, send = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(seed, index, last, at, send))
        worker.start()
        send.close()
        try:
            some, words, bad, slow, more = receive.recv()
        except EOFError:
            # What came before it in this chunk is counted again, by a worker that ends before it.
            worker.join()
            kind = list(KINDS)[at.value % len(KINDS)]
            faults.append(f"number {at.value}, {kind}: the worker died with exit code {worker.exitcode}")
            counts[kind, "fault"] += 1
            if at.value > index:
                again = fuzz(seed, index, at.value - index)
                counts += again["counts"]
                faults += again["faults"]
            index = at.value + 1
            continue
        worker.join()
        counts, sentences, index = counts + some, sentences + words, last
        faults, slowest, grown = faults + bad, max(slowest, slow), max(grown, more)
        print(f"{index - first} of {times}, {time.perf_counter() - start:.0f} s, faults {len(faults)}", file=sys.stderr)
    return {
        "counts": counts,
        "sentences": sentences,
        "faults": faults,
        "slowest": slowest,
        "grown": grown,
        "seconds": round(time.perf_counter() - start, 1),
    }


def record(results: dict[str, Any], seed: int, first: int, times: int) -> dict[str, Any]:
    """Return what was found, for a file."""
    by_outcome, by_kind = Counter[str](), dict[str, dict[str, int]]()
    for (kind, result), count in sorted(results["counts"].items()):
        by_outcome[result] += count
        by_kind.setdefault(kind, {})[result] = count
    return {
        "benchmark": "fuzz_shared_file",
        "seed": seed,
        "first": first,
        "files": times,
        **environment(torch.device("cpu")),
        "limits": {"memory_bytes": MEMORY, "seconds": SECONDS},
        "outcomes": dict(by_outcome),
        "by_kind": by_kind,
        "sentences": dict(results["sentences"].most_common(40)),
        "faults": results["faults"],
        "seconds": results["seconds"],
        "slowest_load_ms": round(1000 * results["slowest"], 1),
        "most_memory_added_bytes": results["grown"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="how many files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file, to repeat one")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    summary = record(fuzz(given.seed, given.first, given.times), given.seed, given.first, given.times)
    if given.out is not None:
        storage.write_bytes(given.out, (json.dumps(summary, indent=1) + "\n").encode())
    for kind, results in summary["by_kind"].items():
        print(f"{kind:34} " + ", ".join(f"{count} {result}" for result, count in results.items()))
    print(summary["outcomes"], *summary["faults"], sep="\n")
    sys.exit(1 if summary["faults"] else 0)


if __name__ == "__main__":
    main()
