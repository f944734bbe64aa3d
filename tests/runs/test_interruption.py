"""Signals that end a run: the step is kept, the folder left clean, and --resume ends with the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from commands import save_npz

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

RECIPE = """
title = "Slow"
data = { name = "DATA", batch_size = 12, augment = ["crop"], validation = 12 }
peers = [
  { name = "a", network = "networks_of_test:slow", posterior = { kind = "mean_field" } },
  { name = "b", network = "networks_of_test:slow", posterior = { kind = "mean_field" } },
]
gradient_share_every = 0
[[stages]]
epochs = 2
optimizer = { name = "adam", lr = 1e-3 }
[stages.terms]
likelihood = {}
kl = {}
mutual = {}
[evaluation]
draws = 2
"""
NETWORKS = """
import os, time
from torch import nn

class Slow(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.linear = nn.Linear(64, inputs.classes)
        self.norm = nn.BatchNorm1d(inputs.classes)

    def forward(self, x):
        if self.training and len(x) > 4:
            with open(os.environ["NOTES"], "a") as file:
                file.write(".")
            time.sleep(float(os.environ["PAUSE"]))
        return self.norm(self.linear(x.flatten(1)))

def slow(inputs):
    return Slow(inputs)
"""
STEPS = 100  # of an epoch, of which only the end is kept by itself


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    data = save_npz(folder / "small.npz", count=12 * STEPS + 12, held=24)
    (folder / "slow.toml").write_text(RECIPE.replace("DATA", str(data)))
    (folder / "networks_of_test.py").write_text(NETWORKS)
    return folder


def environment(place, notes, pause=0.0):
    paths = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "NOTES": str(notes), "PAUSE": str(pause)}


def words(place, run, *more):
    command = ["-m", "peerbayes", "train", str(place / "slow.toml"), "--run", str(run), "--device", "cpu", "--quiet"]
    return [sys.executable, *command, *more]


def begun(process, notes, steps=8):
    """Wait until some steps have been made."""
    deadline = time.monotonic() + 100
    while not notes.exists() or len(notes.read_text()) < 2 * steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(place):
    """A run that nobody interrupted."""
    done = subprocess.run(
        words(place, place / "whole"), env=environment(place, place / "notes"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return place / "whole"


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_keeps_the_step_and_resume_ends_with_the_same_bytes(place, whole, tmp_path, name):
    run, notes, number = tmp_path / "run", tmp_path / "notes", getattr(signal, name)
    process = subprocess.Popen(
        words(place, run),
        env=environment(place, notes, 0.01),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background processes ignore SIGINT, and nohup's SIGHUP.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    begun(process, notes)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert out == ""
    (kept,) = run.glob("checkpoint-*.safetensors")
    step = int(kept.stem.partition("-")[2])
    assert 8 <= step < STEPS
    said = "interrupted" if name == "SIGINT" else f"ended by {name}"
    assert err == f"peerbayes: {said}; --resume goes on from step {step}\n"
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]
    done = subprocess.run(
        words(place, run, "--resume"), env=environment(place, tmp_path / "more"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "more").read_text()) == 2 * (2 * STEPS - step)  # two peers; no step is made again
    for peer in "ab":
        file = f"weights-{peer}.safetensors"
        assert (run / file).read_bytes() == (whole / file).read_bytes()
    for one, other in zip(lines(run), lines(whole), strict=True):
        assert one["step"] == other["step"]
        assert one["peers"]["a"]["loss"] == pytest.approx(other["peers"]["a"]["loss"], rel=1e-5)


SCRIPT = """
import json, os, signal, sys
import peerbayes as pb
from pathlib import Path
signal.signal(getattr(signal, sys.argv[1]), signal.default_int_handler if sys.argv[1] == "SIGINT" else signal.SIG_DFL)
handler = signal.getsignal(signal.SIGTERM)
try:
    pb.train(sys.argv[2], run=sys.argv[3], device="cpu")
except KeyboardInterrupt as error:
    assert signal.getsignal(signal.SIGTERM) is handler
    print(error.__notes__)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_from_python_a_signal_is_what_python_makes_of_it(place, tmp_path, name):
    run, notes = tmp_path / "run", tmp_path / "notes"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name, str(place / "slow.toml"), str(run)],
        env=environment(place, notes, 0.01),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun(process, notes)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    (kept,) = run.glob("checkpoint-*.safetensors")
    step = int(kept.stem.partition("-")[2])
    assert not (run / ".lock").exists()
    if name == "SIGINT":
        assert (process.returncode, out) == (0, f"['resume goes on from step {step}']\n"), err
    else:
        assert (process.returncode, out, err) == (143, "", "")


def test_a_signal_before_the_first_step_leaves_no_lock(place, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        words(place, run),
        env=environment(place, tmp_path / "notes", 30),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not (run / "recipe.toml").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143, err
    assert err == "peerbayes: ended by SIGTERM; --resume goes on from the last checkpoint, if any\n"
    assert out == ""
    assert not (run / ".lock").exists()


def test_two_processes_of_torchrun_keep_the_same_step(place, tmp_path):
    run, notes = tmp_path / "run", tmp_path / "notes"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    command = [*words(place, run)[:1], *torchrun, "-m", "--", *words(place, run)[2:]]
    process = subprocess.Popen(
        command,
        env=environment(place, notes, 0.01),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun(process, notes, steps=20)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    (kept,) = run.glob("checkpoint-*.safetensors")
    step = int(kept.stem.partition("-")[2])
    assert 8 <= step < STEPS
    said = [line for line in err.splitlines() if "peerbayes:" in line]
    assert said == [f"peerbayes: ended by SIGTERM; --resume goes on from step {step}"], err
    assert not (run / ".lock").exists()
