"""Requests a second, and how long they take, of `peerbayes serve` on loopback, by the number of connections.

    python benchmarks/serve.py                   # writes results/serve.json
    python benchmarks/serve.py --rounds 1 --out /tmp/serve.json

Each connection sends a PNG, waits for the answer and sends the next. The server and the client are processes of one
machine and share its cores. Servers that predict images together (--batch 64, the default) and each alone (--batch 1)
are asked in turn, in rounds, so that a busy machine is busy for both; `load` says how busy it was.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import peerbayes as pb
from peerbayes.engine.processes import environment
from peerbayes.reports.evaluating import write_record

CONNECTIONS = (1, 8, 32)
BATCHES = (64, 1)  # images of a pass, at most
DRAWS = 10
PACKAGES = ("fastapi", "starlette", "uvicorn", "python-multipart")


def runs(folder: Path) -> dict[str, Path]:
    """Train two networks for a step: how fast they answer has nothing to do with what they know."""
    chance, folders = np.random.default_rng(0), {}
    short = ["stages.*.epochs=1", "stages.*.warmup=0", "data.augment=[]", f"evaluation.draws={DRAWS}"]
    for name, network, shape, posterior in (
        ("ResNet-8 on 8x8, one pass", "resnet8", (1, 8, 8), "point"),
        (f"Bayesian ResNet-20 on 3x32x32, {DRAWS} draws", "resnet20", (3, 32, 32), "mean_field"),
    ):
        images, labels = chance.integers(0, 256, (128, *shape), dtype=np.uint8), np.arange(128) % 10
        np.savez(folder / "data.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
        recipe = "plain" if posterior == "point" else "bayesian"
        changes = [*short, f"data.name={folder / 'data.npz'}", f"peers.*.network={network}"]
        folders[name] = pb.train(recipe, folder / network, overrides=changes, device="cpu").folder
    return folders


def request(side: int) -> bytes:
    """Return a request with one image of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    body = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n' + file.getvalue()
    body += b"\r\n--x--\r\n"
    head = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def connection(port: int, sent: bytes, ends: float, taken: list[float]) -> None:
    """Ask again and again until it is time to stop; note how many seconds each answer took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (since := time.perf_counter()) < ends:
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
        taken.append(time.perf_counter() - since)
        if not head.startswith(b"HTTP/1.1 200"):
            sys.exit(f"the server answered {head!r} {body!r}")
    writer.close()


async def send(port: int, sent: bytes, connections: int, seconds: float) -> tuple[list[float], float]:
    """Return how long the answers of so many connections took, and how long all of it did."""
    taken: list[float] = []
    since = time.perf_counter()
    await asyncio.gather(*(connection(port, sent, since + seconds, taken) for _ in range(connections)))
    return taken, time.perf_counter() - since


class Server:
    """A server in a process of its own."""

    def __init__(self, run: Path, batch: int) -> None:
        words = [sys.executable, "-m", "peerbayes", "serve", str(run), "--port", "0", "--device", "cpu"]
        words += ["--batch", str(batch)]
        self.batch, environment = batch, {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.port = int(re.findall(r":(\d+) ", self.process.stdout.readline())[0])


def measured(name: str, run: Path, rounds: int, seconds: float) -> list[dict[str, object]]:
    """Measure servers of one network that predict images together, and alone, in turn."""
    sent, rows = request(pb.load(run).network_inputs().shape[1]), []
    servers = [Server(run, batch) for batch in BATCHES]
    try:
        for connections in CONNECTIONS:
            taken: dict[int, list[float]] = {batch: [] for batch in BATCHES}
            rates: dict[int, list[float]] = {batch: [] for batch in BATCHES}
            for number in range(rounds + 1):
                for server in servers:
                    times, spent = asyncio.run(send(server.port, sent, connections, seconds if number else 1))
                    if number:  # the first round is to get warm
                        taken[server.batch] += times
                        rates[server.batch].append(len(times) / spent)
            for batch in BATCHES:
                p50, p99 = (round(1000 * float(np.quantile(taken[batch], share)), 2) for share in (0.5, 0.99))
                row = {"network": name, "batch": batch, "connections": connections, "requests": len(taken[batch])}
                row |= {"requests_a_second": [round(rate, 1) for rate in rates[batch]], "p50_ms": p50, "p99_ms": p99}
                rows.append(row | {"load": round(os.getloadavg()[0], 1)})
                print(json.dumps(rows[-1]), flush=True)
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.process.communicate(timeout=60)
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each round and row")
    parser.add_argument("--out", type=Path, default=Path("results/serve.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trained = runs(Path(folder)).items()
        rows = [row for name, run in trained for row in measured(name, run, args.rounds, args.seconds)]
    about = environment(torch.device("cpu"))
    about["versions"] |= {name: metadata.version(name) for name in PACKAGES}
    about["hardware"] += f", {os.cpu_count()} cores for server and client"
    write_record(args.out, {"command": " ".join(["python benchmarks/serve.py", *argv]), **about, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
