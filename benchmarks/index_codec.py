"""Which coder keeps the index of a shared network small: bits a weight and seconds, beside its entropies.

    python benchmarks/index_codec.py                       # ResNet-20 and ResNet-18, K = 100 to 6000
    python benchmarks/index_codec.py --quick               # ResNet-20 alone
    python benchmarks/index_codec.py --run RUN --run RUN   # of trained runs of shared weights, instead
    python benchmarks/index_codec.py --out FILE            # and as JSON
    python benchmarks/index_codec.py --fuzz 100000         # damage the bytes so often, instead

Without runs the networks are drawn, not trained: weights are Gaussian with He's variance; standard deviations are 0.01
of Xavier's bound, 10 % of scatter; 1.8 % of the weights are outliers (the largest, and as many at random). The codebook
is found by k-means of the means alone (``mean``), or of means and standard deviations (``both``); ``arranged``
renumbers the latter as `peerbayes.codebook.coder.arrange` says. constriction, pcodec, zstandard and brotli are
compared where installed. The general coders get 16-bit numbers, and two rows of bytes (low, high) where that is
smaller; constriction gets the tables that ours makes, so that it differs in the coder alone. Single core.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import importlib
import importlib.metadata
import itertools
import json
import lzma
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from peerbayes.codebook import coder as index_codec
from peerbayes.codebook.coder import Ints, arrange, decode, encode
from peerbayes.codebook.file import index_of
from peerbayes.codebook.shared import Shared
from peerbayes.engine.processes import environment
from peerbayes.errors import InputError
from peerbayes.posteriors.storage import write_bytes
from peerbayes.runs.run import load

OUTLIERS = 0.018
RESNET20 = [(16, 27), *[(16, 144)] * 6, (32, 144), *[(32, 288)] * 5, (64, 288), *[(64, 576)] * 5, (100, 64)]
RESNET18 = [(64, 27), *[(64, 576)] * 4]
for width in (128, 256, 512):
    RESNET18 += [(width, width * 9 // 2), *[(width, width * 9)] * 3, (width, width // 2)]
RESNET18 += [(100, 512)]
NETWORKS = {"resnet20": RESNET20, "resnet18": RESNET18}
COMPONENTS = {"resnet20": (100, 1000, 5400), "resnet18": (100, 2000, 6000)}


@dataclass(frozen=True)
class Index:
    """The components of a network's weights; ``alphabet - 1`` stands for outliers."""

    symbols: Ints
    alphabet: int
    parts: list[int]

    def bits(self) -> tuple[float, float]:
        """Return the entropies a weight, of all layers together and of each by itself."""
        rows = np.split(self.symbols, np.cumsum(self.parts)[:-1])
        return entropy(self.symbols) / len(self.symbols), sum(map(entropy, rows)) / len(self.symbols)


def entropy(symbols: Ints) -> float:
    """Return the bits of all symbols under their own frequencies."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(counts @ np.log2(len(symbols) / counts))


def draw(network: str, components: int, kind: str, seed: int = 0) -> Index:
    """Draw a network and cluster its weights."""
    generator = np.random.default_rng(seed)
    shapes = NETWORKS[network]
    parts = [rows * columns for rows, columns in shapes]
    means = np.concatenate([generator.normal(0, np.sqrt(2 / columns), rows * columns) for rows, columns in shapes])
    bounds = np.repeat([0.01 * np.sqrt(6 / (columns + 9 * rows)) for rows, columns in shapes], parts)
    deviations = bounds * np.exp(generator.normal(0, 0.1, len(means)))
    outlier = np.abs(means) > np.quantile(np.abs(means), 1 - OUTLIERS / 2)
    outlier |= generator.random(len(means)) < OUTLIERS / 2
    points = np.stack([means, deviations * (kind != "mean")], 1)[~outlier]
    some = points[generator.permutation(len(points))[: 100 * components]]
    centres = some[:components].copy()
    for _ in range(8):
        nearest = cKDTree(centres).query(some)[1]
        counts = np.maximum(np.bincount(nearest, minlength=components), 1)
        for axis in (0, 1):
            centres[:, axis] = np.bincount(nearest, some[:, axis], minlength=components) / counts
    centres = centres[np.argsort(centres[:, 0])]
    symbols = np.full(len(means), components)
    symbols[~outlier] = cKDTree(centres).query(points)[1]
    if kind == "arranged":
        numbers = np.append(np.argsort(arrange(symbols, centres[:, 0], parts)), components)
        symbols = numbers[symbols]
    return Index(symbols, components + 1, parts)


# ---- coders: each returns its bytes, and what undoes them ------------------------------------------------------------

Coded = tuple[int, Callable[[], Ints]]


def ours(index: Index) -> Coded:
    """The library's own."""
    data = encode(index.symbols, index.alphabet, index.parts)
    return len(data), lambda: decode(data, index.alphabet, index.parts).numpy()


def general(compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes], index: Index) -> Coded:
    """A coder of bytes, on 16-bit numbers."""
    data = compress(index.symbols.astype("<u2").tobytes())
    return len(data), lambda: np.frombuffer(decompress(data), "<u2").astype(np.int64)


def general_rows(compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes], index: Index) -> Coded:
    """A coder of bytes, on all low bytes and then all high bytes."""
    data = compress(index.symbols.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes())

    def undo() -> Ints:
        rows = np.frombuffer(decompress(data), np.uint8).reshape(2, -1)
        return rows[0] + 256 * rows[1].astype(np.int64)

    return len(data), undo


def pcodec(index: Index) -> Coded:
    """Pcodec: bins and tANS, a chunk a layer."""
    from pcodec import ChunkConfig, standalone

    rows = np.split(index.symbols.astype(np.uint16), np.cumsum(index.parts)[:-1])
    data = [standalone.simple_compress(row, ChunkConfig(compression_level=12)) for row in rows]
    return sum(map(len, data)), lambda: np.concatenate([standalone.simple_decompress(d) for d in data]).astype(np.int64)


def constriction_global(index: Index) -> Coded:
    """constriction's ANS with one table, which costs what ours does."""
    return constriction_tables(Index(index.symbols, index.alphabet, [len(index.symbols)]))


def constriction_tables(index: Index) -> Coded:
    """constriction's ANS with the tables of ours."""
    import constriction

    roots = index_codec._roots(np.bincount(index.symbols, minlength=index.alphabet))
    shared = index_codec._Shared.of(roots)
    ranks = shared.ranks(index.alphabet)[index.symbols].astype(np.int32)
    tables = [index_codec._fit(ranks[where], where, shared) for where in index_codec._slices(index.parts)]
    levels = [table.level for table in tables]
    squeezed = index_codec._squeeze(np.concatenate([levels, roots, *(table.roots for table in tables)]))

    def models() -> Iterator[tuple[Any, NDArray[np.int32], slice]]:
        # constriction gives every symbol a slot: those that a layer lacks are left out.
        for table in tables:
            frequencies = shared.code_of(table).frequencies
            used = np.flatnonzero(frequencies)
            probabilities = frequencies[used] / 2.0**shared.bits
            yield constriction.stream.model.Categorical(probabilities, perfect=False), used, table.where

    coder = constriction.stream.stack.AnsCoder()
    for model, used, where in reversed(list(models())):
        if len(used) > 1:
            coder.encode_reverse(np.searchsorted(used, ranks[where]).astype(np.int32), model)
    words = coder.get_compressed()

    def undo() -> Ints:
        coder, symbols = constriction.stream.stack.AnsCoder(words), np.empty(len(ranks), np.int64)
        for model, used, where in models():
            size = where.stop - where.start
            symbols[where] = shared.symbols[used[coder.decode(model, size)] if len(used) > 1 else used.repeat(size)]
        return symbols

    return len(squeezed) + words.nbytes, undo


def coders() -> dict[str, list[Callable[[Index], Coded]]]:
    """Return the coders that are installed; of several ways to use one, the smallest counts."""

    def both(
        compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]
    ) -> list[Callable[[Index], Coded]]:
        return [partial(general, compress, decompress), partial(general_rows, compress, decompress)]

    by_name: dict[str, list[Callable[[Index], Coded]]] = {"ours": [ours]}
    if installed("constriction"):
        by_name |= {"constriction, our tables": [constriction_tables], "constriction, one table": [constriction_global]}
    if installed("pcodec"):
        by_name["pcodec 12, by layer"] = [pcodec]
    by_name["zlib 9"] = both(partial(zlib.compress, level=9), zlib.decompress)
    by_name["bz2 9"] = both(bz2.compress, bz2.decompress)
    by_name["lzma 6"] = both(lzma.compress, lzma.decompress)
    if zstandard := installed("zstandard"):
        by_name["zstandard 19"] = both(
            zstandard.ZstdCompressor(level=19).compress, zstandard.ZstdDecompressor().decompress
        )
    if brotli := installed("brotli"):
        by_name["brotli 9"] = both(partial(brotli.compress, quality=9), brotli.decompress)
    return by_name


def installed(name: str) -> Any:
    """Return a module, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def trained(folder: Path) -> tuple[dict[str, Any], Index]:
    """Return what a run's first peer has for an index in its file, as one row of symbols."""
    run = load(folder)
    posterior = next(iter(run.values()))
    if not isinstance(posterior, Shared):
        raise InputError(f"{folder}: holds a {posterior.kind} posterior, expected a shared one")
    count = len(posterior.component)
    about = {"network": run.recipe.peers[0].network, "components": count, "index": f"of {folder.name}, trained"}
    return about, Index(index_of(posterior).numpy(), count + 2, list(posterior.layout.sizes))


def compare(about: dict[str, Any], index: Index) -> dict[str, Any]:
    """Print a table, and return it: coder, bits a weight, seconds to encode and to decode."""
    size = len(index.symbols)
    together, apart = index.bits()
    fixed = (index.alphabet - 1).bit_length()
    print(f"\n{about['network']}, {size} weights, K = {about['components']}, {about['index']}: {fixed} bits", end=" ")
    print(f"fixed, entropy {together:.3f}, by layer {apart:.3f}\n{'':26}bits    encode  decode")
    table = about | {"weights": size, "bits_fixed": fixed, "entropy": together, "entropy_by_layer": apart, "coders": {}}
    for name, ways in coders().items():
        rows = []
        for way in ways:
            start = time.perf_counter()
            count, undo = way(index)
            middle = time.perf_counter()
            if not np.array_equal(undo(), index.symbols):
                raise RuntimeError(f"{name} does not give back what it got")
            rows.append((8 * count / size, middle - start, time.perf_counter() - middle))
        bits, there, back = min(rows)
        print(f"{name:24}{bits:8.3f}{there:8.2f} s{back:6.2f} s", flush=True)
        table["coders"][name] = {"bits_a_weight": bits, "encode_s": round(there, 3), "decode_s": round(back, 3)}
    return table


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one or more faults: cut, grown, bits flipped, bytes changed, moved, doubled, zeroed."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at, to = sorted(chance.randrange(len(changed) + 1) for _ in range(2))
        at = min(at, chance.choice((at, 40)))  # half of the time near the beginning
        kind = chance.randrange(7)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            changed[at:at] = chance.randbytes(chance.choice((1, 4, 8, 100)))
        elif kind == 2 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            changed[at : at + 4] = chance.choice((b"\0" * 4, b"\xff" * 4, chance.randbytes(4), b"\xff\xff\xff\x7f"))
        elif kind == 4:
            changed[at:to] = b""
        elif kind == 5:
            changed[at:at] = changed[at : min(to, at + 64)]
        else:
            changed[at : at + 8] = bytes(8)
    return bytes(changed)


def damaged_tables(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some integers of the tables changed, packed again."""
    body = data[len(index_codec.MAGIC) + index_codec.DIGEST :]
    end = 4 + int.from_bytes(body[:4], "little")
    values = index_codec._unsqueeze(memoryview(body)[4:end], 1 << 20)
    for _ in range(chance.choice((1, 1, 2, 10))):
        at = chance.choice((chance.randrange(len(values)), min(chance.randrange(20), len(values) - 1)))
        values[at] = chance.choice(
            (0, 1, int(values[at]) + 1, abs(int(values[at]) - 1), 65535, chance.randrange(65536))
        )
    if chance.random() < 0.2:
        values = values[: chance.randrange(len(values) + 1)]
    squeezed = index_codec._squeeze(values)
    return (
        data[: len(index_codec.MAGIC) + index_codec.DIGEST]
        + len(squeezed).to_bytes(4, "little")
        + squeezed
        + body[end:]
    )


def signed(data: bytes, index: Index) -> bytes:
    """Return the bytes with a digest that is right."""
    head = len(index_codec.MAGIC) + index_codec.DIGEST
    return index_codec.MAGIC + index_codec._digest(data[head:], index.alphabet, index.parts) + data[head:]


def specimens(generator: np.random.Generator) -> list[Index]:
    """Return small indices of several kinds."""
    skewed = np.minimum(generator.geometric(0.3, 700) - 1, 30)
    layers = np.concatenate([generator.integers(0, 40, 400), generator.integers(40, 90, 500), [90] * 20])
    many = np.minimum(generator.geometric(0.01, 20000) - 1, 299)
    return [
        Index(skewed, 31, [300, 0, 400]),
        Index(layers, 91, [400, 500, 20]),
        Index(np.full(1000, 3), 5, [500, 500]),
        Index(generator.permutation(300), 1000, [300]),
        Index(many, 300, [12000, 8000]),
    ]


def fuzz(times: int, seed: int = 0) -> Counter[str]:
    """Damage bytes so often and count what came of it; anything but a sentence or a valid index is raised.

    A third is damaged and has a wrong digest, a third is signed again, a third has changed tables and is signed again.
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    originals = [
        (index, encode(index.symbols, index.alphabet, index.parts)) for index in specimens(np.random.default_rng(seed))
    ]
    longest = 0.0
    for number in range(times):
        index, data = chance.choices(originals, (4, 4, 4, 4, 1))[0]
        kind = ("plain", "signed", "tables")[number % 3]
        changed = damaged_tables(data, chance) if kind == "tables" else damage(data, chance)
        if kind != "plain":
            changed = signed(changed, index)
        start = time.perf_counter()
        try:
            output = decode(changed, index.alphabet, index.parts)
        except InputError as error:
            if "\n" in str(error) or not str(error).startswith("index: "):
                raise
            outcomes[f"{kind}: {error}" if "layer of" not in str(error) else f"{kind}: a layer's table"] += 1
        else:
            if output.shape != index.symbols.shape or not 0 <= int(output.min()) <= int(output.max()) < index.alphabet:
                raise RuntimeError(f"seed {seed}, number {number}: symbols out of range")
            same = np.array_equal(output.numpy(), index.symbols)
            if kind == "plain" and changed != data:
                raise RuntimeError(f"seed {seed}, number {number}: damage went unseen")
            outcomes[f"{kind}: {'the same' if same else 'other'} symbols"] += 1
        longest = max(longest, time.perf_counter() - start)
    outcomes["longest decoding, ms"] = round(1000 * longest)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ResNet-20 alone")
    parser.add_argument("--fuzz", type=int, default=0, help="damage the bytes so often instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, action="append", default=[], help="a run of shared weights; several times")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    if given.fuzz:
        start = time.perf_counter()
        for outcome, count in fuzz(given.fuzz, given.seed).most_common():
            print(f"{count:8}  {outcome}")
        print(f"{given.fuzz} in {time.perf_counter() - start:.0f} s")
        return
    versions = {}
    for name in ("constriction", "pcodec", "zstandard", "brotli"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    record = environment(torch.device("cpu"))
    record |= {"benchmark": "index_codec", "versions": record["versions"] | versions, "tables": []}
    for about, index in map(trained, given.run) if given.run else drawn(given.quick):
        record["tables"].append(compare(about, index))
        if given.out is not None:  # after each: a run that is cut short keeps what it has
            write_bytes(given.out, (json.dumps(record, indent=1) + "\n").encode())


def drawn(quick: bool) -> Iterator[tuple[dict[str, Any], Index]]:
    """Yield indices of networks that are not trained."""
    for network in list(NETWORKS)[: 1 if quick else None]:
        for components, kind in itertools.product(COMPONENTS[network], ("mean", "both", "arranged")):
            about = {"network": network, "components": components, "index": f"codebook of {kind}, drawn"}
            yield about, draw(network, components, kind)


if __name__ == "__main__":
    main()
