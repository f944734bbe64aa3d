"""How fast image files become random crops: ours, with Pillow alone, with its draft mode, and with torchvision.

    python benchmarks/decoding.py [--threads 2] [--rounds 20] [--out FILE]

Files are JPEGs of 500 × 375 (quality 90, colours halved) of parts of two photographs. Every round does all files by
each way, in turn; ratios to `centre` (what a crop was cut from before) are taken within a round. Only `centre` and
`crops` make a batch of what they have decoded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn import functional as F

from peerbayes.data import FolderSplit, splits
from peerbayes.data.transforms.augment import box, box_numbers
from peerbayes.engine.processes import environment
from peerbayes.math.noise import Address

SIZE, CPU = 224, torch.device("cpu")
Way = Callable[[int], Any]


def write_files(folder: Path, count: int) -> list[str]:
    photographs, chance, files = [Image.fromarray(image) for image in load_sample_images().images], random.Random(0), []
    for k in range(count):
        height = chance.randint(300, 420)
        width = height * 4 // 3
        left, top = chance.randint(0, 640 - width), chance.randint(0, 427 - height)
        files.append(str(folder / f"{k}.jpg"))
        part = photographs[k % 2].crop((left, top, left + width, top + height))
        part.resize((500, 375), Image.Resampling.BICUBIC).save(files[-1], quality=90, subsampling=2)
    return files


def by_pillow(file: str, numbers: Sequence[float]) -> Any:
    with Image.open(file) as image:
        top, left, tall, wide = box(numbers, image.height, image.width)
        cut = image.crop((left, top, left + wide, top + tall))
    return np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def by_draft(file: str, numbers: Sequence[float]) -> Any:
    # Decoded at a half, a quarter or an eighth, where the box has the pixels that are wanted then, too.
    with Image.open(file) as image:
        top, left, tall, wide = box(numbers, *(before := (image.height, image.width)))
        image.draft("RGB", (math.ceil(before[1] * SIZE / wide), math.ceil(before[0] * SIZE / tall)))
        share = image.height / before[0]
        cut = (left * share, top * share, (left + wide) * share, (top + tall) * share)
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=cut))


def by_torchvision(file: str, numbers: Sequence[float]) -> Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    image = decode_jpeg(torch.from_numpy(np.fromfile(file, np.uint8)), ImageReadMode.RGB)
    top, left, tall, wide = box(numbers, *image.shape[1:])
    cut = image[None, :, top : top + tall, left : left + wide]
    return F.interpolate(cut, (SIZE, SIZE), mode="bilinear", antialias=True)


def ways(files: list[str], pool: ThreadPoolExecutor) -> tuple[dict[str, Way], str | None]:
    split, index, here = (
        FolderSplit(files, None, SIZE, 256 / 224),
        torch.arange(len(files)),
        Address(0, "data", "augment"),
    )

    def mapped(function: Callable[[str, Sequence[float]], Any]) -> Way:
        def run(number: int) -> None:
            for _ in pool.map(function, files, box_numbers(here.at(number), len(files), CPU).tolist()):
                pass

        return run

    named: dict[str, Way] = {
        "centre": lambda _: split.batch(index, CPU),
        "crops": lambda number: split.crops(index, CPU, here.at(number)),
        "pillow": mapped(by_pillow),
        "pillow_draft": mapped(by_draft),
        "torchvision": mapped(by_torchvision),
    }
    try:
        by_torchvision(files[0], box_numbers(here, 1, CPU)[0].tolist())
    except Exception as error:  # not installed, or built for another torch
        del named["torchvision"]
        return named, str(error)
    return named, None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--files", type=int, default=128)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(given.threads)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(splits, "_pool", return_value=pool):
        files = write_files(Path(folder), given.files)
        size = sum(Path(file).stat().st_size for file in files) / len(files)
        named, failed = ways(files, pool)
        rates: dict[str, list[float]] = {name: [] for name in named}
        work: dict[str, list[float]] = {name: [] for name in named}
        for number in range(-1, given.rounds):  # the first one warms up
            for name, way in named.items():
                started, used = time.perf_counter(), time.process_time()
                way(number + 1)
                if number >= 0:
                    rates[name].append(len(files) / (time.perf_counter() - started))
                    work[name].append((time.process_time() - used) / len(files) * 1000)
    rows = {}
    for name, values in rates.items():
        low, middle, high = (
            np.quantile(np.array(values) / np.array(rates["centre"]), (0.25, 0.5, 0.75)).round(3).tolist()
        )
        rows[name] = {"images_per_s": round(float(np.median(values)), 1)}
        rows[name] |= {"cpu_ms": round(float(np.median(work[name])), 3)}
        rows[name] |= {"over_centre": {"median": middle, "quartiles": [low, high]}}
        print(
            f"{name:13s} {rows[name]['images_per_s']:8.1f} images/s   {middle:.2f} ({low:.2f} to {high:.2f}) of centre"
        )
    if given.out:
        about = environment(CPU)
        about["versions"] |= {"pillow": PIL.__version__}
        # Where other work keeps the cores busy, ratios and the time of a core still say something.
        settings = {
            "load": round(os.getloadavg()[0], 1),
            "threads": given.threads,
            "rounds": given.rounds,
            "files": given.files,
            "bytes": round(size),
        }
        about |= {"settings": settings | {"sides": [500, 375], "size": SIZE}, "rows": rows}
        given.out.write_text(
            json.dumps(about | ({"notes": {"torchvision": failed}} if failed else {}), indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
