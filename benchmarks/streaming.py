"""Memory of `peerbayes predict` over many files: peak resident size of a process by number of files.

    python benchmarks/streaming.py                  # 1,000, 10,000 and 100,000 files; writes results/streaming.json
    python benchmarks/streaming.py --files 1000000

Files are 8 × 8 PNGs in folders of 1,000; a network that has learnt digits predicts them on the CPU, as CSV.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from peerbayes.api.fitting import train
from peerbayes.engine.processes import environment
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.evaluating import write_record

A_FOLDER = 1000


def make(folder: Path, begin: int, end: int) -> None:
    """Write noise, one file an image."""
    chance = np.random.default_rng(begin)
    for number in range(begin, end):
        part = folder / f"{number // A_FOLDER:06d}"
        part.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (8, 8), dtype=np.uint8)).save(part / f"{number:08d}.png")


def predicted(run: Path, folder: Path, out: Path) -> dict[str, float]:
    """Return peak resident size and time of a process that predicts a folder; check that it has predicted all of it."""
    since = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "peerbayes",
        "predict",
        str(run),
        str(folder),
        "--format",
        "csv",
        "--device",
        "cpu",
    ]
    with out.open("w") as file:
        process = subprocess.Popen(command, stdout=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, used = os.wait4(process.pid, 0)
    with out.open() as file:
        lines = sum(1 for _ in file) - 1
    if status:
        sys.exit(f"predict ended with {status}")
    unit = 1024 if sys.platform != "darwin" else 1 << 20  # ru_maxrss is in KiB on Linux
    seconds = {"seconds": round(time.perf_counter() - since, 1), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1)}
    return {"files": lines, "peak_mib": round(used.ru_maxrss / unit, 1), **seconds}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, action="append", help="repeatable; 1000, 10000 and 100000 by default")
    parser.add_argument("--out", type=Path, default=Path("results/streaming.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, done = [], 0
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe("mutual/digits-dnn", ["stages.*.epochs=1"])
        run = train(recipe, Path(folder) / "run", device="cpu")
        for count in sorted(args.files or (1000, 10_000, 100_000)):
            make(Path(folder) / "files", done, count)
            done = count
            rows.append(predicted(run.folder, Path(folder) / "files", Path(folder) / "out.csv"))
            print(rows[-1], flush=True)
            assert rows[-1]["files"] == count
    command = " ".join(["python benchmarks/streaming.py", *argv])
    write_record(args.out, {"command": command, **environment(torch.device("cpu")), "predictions": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
