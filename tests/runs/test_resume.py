"""Killed runs: whatever the moment, a resumed run ends with the same bytes as one that was never interrupted."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import save_npz
from learners import Recorder, Stop, stopped_at
from peerbayes.api.fitting import train
from peerbayes.errors import InputError
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import Recipe, load_recipe
from peerbayes.runs import session
from peerbayes.runs.checkpoints import newest_checkpoint
from peerbayes.runs.folder import MetricsLog, lock
from peerbayes.training.learner import Learner

posix = pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")

RECIPE = """
title = "All terms, two stages"
method = "ours"
data = { name = "DATA", batch_size = 12, augment = ["crop"], validation = 12 }
peers = [
  { name = "a", network = "resnet8", posterior = { kind = "mean_field" } },
  { name = "b", network = "resnet8", posterior = { kind = "mean_field" } },
]
gradient_share_every = 4
[[stages]]
epochs = 1
optimizer = { name = "adam", lr = 1e-3 }
warmup = 0.5
[stages.terms]
likelihood = {}
kl = { scheme = "layer_mean", anneal = 1.0 }
mutual = { temperature = 3.0 }
weight_diversity = {}
[[stages]]
epochs = 2
optimizer = { name = "adam", lr = 1e-3 }
lr_milestones = [1]
[stages.terms]
likelihood = {}
kl = { scheme = "layer_mean" }
mutual = { temperature = 3.0 }
weight_diversity = {}
feature_diversity = { weight = 2.0, layers = ["stage2", "stage3"] }
[evaluation]
draws = 2
"""
STEPS = 12  # 48 images in batches of 12, three epochs

# One warm process that forks a child a command. A child dies by SIGKILL at its n-th event: a training step, a flush or
# a rename of a file that is being written (half of it is then lost), or half-way through a line of metrics.jsonl.
DRIVER = """
import json, os, pathlib, random, signal, stat, sys
import torch
torch.set_num_threads(1)
import peerbayes.api.fitting, peerbayes.reports.page, peerbayes.studies.sweeps
from peerbayes import cli
from peerbayes.engine import stages
from peerbayes.runs import folder as folder_room
from peerbayes.training import learner as loop

def dies_at(number):
    left = [number]
    def event(fd=None, file=None, text=""):
        left[0] -= 1
        if left[0] == 0:
            if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode):
                os.ftruncate(fd, os.fstat(fd).st_size // 2)
            if file is not None:
                with open(file, "a") as out:
                    out.write(text)
            os.kill(os.getpid(), signal.SIGKILL)
    fsync, replace, step, write = os.fsync, os.replace, loop.Learner.step, folder_room.MetricsLog.write
    os.fsync = lambda fd: (event(fd), fsync(fd))[1]
    os.replace = lambda *a: (event(), replace(*a))[1]
    loop.Learner.step = lambda self: (event(), step(self))[1]
    log = folder_room.MetricsLog
    log.write = lambda self, line: (event(None, self.path, json.dumps(line)[:25]), write(self, line))[1]

def broken(how):
    load_state, restore = stages.StageState.load_state, loop.Learner.restore
    if how == "moments":
        stages.StageState.load_state = lambda self, tensors: load_state(
            self, {k: v for k, v in tensors.items() if not k.startswith("optimizer/")})
    if how == "step":
        def shifted(self, *a):
            restore(self, *a)
            self.position.step += 1
        loop.Learner.restore = shifted
    if how == "helpers":
        stages.StageState.load_state = lambda self, tensors: (load_state(self, tensors), [
            p.data.mul_(1.001) for m in self.modules.values() for p in m.parameters()])[0]

def start(arguments, number=None, how=None):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if number is not None:
                dies_at(number)
            broken(how)
            cli.main(arguments)
        except SystemExit as end:
            code = end.code or 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    return os.WIFSIGNALED(status), status

def run_job(job, arguments):
    chance = random.Random(job["seed"])
    base, kills, finished = pathlib.Path(job["base"]), 0, []
    while kills < job["kills"] or not finished:
        folder = base / f"run{len(finished)}"
        while True:
            words = [*arguments, "--run", str(folder)] + (["--resume"] if folder.exists() else [])
            number = None
            if kills < job["kills"]:
                number = job.get("at") or chance.randint(1, job["most"])
            killed, status = start(words, number, job.get("how"))
            if not killed:
                assert status == 0, (status, str(folder))
                break
            kills += 1
        finished.append(str(folder))
    return {"kills": kills, "finished": finished}

jobs, arguments, warm = json.loads(sys.argv[1])
try:  # what is imported and prepared here need not be in every child
    cli.main([*arguments, "--run", warm])
except SystemExit as end:
    assert not end.code
print(json.dumps({name: run_job(job, arguments) for name, job in jobs.items()}), flush=True)
"""


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    save_npz(folder / "small.npz", held=24)
    (folder / "all.toml").write_text(RECIPE.replace("DATA", str(folder / "small.npz")))
    return folder


def arguments(place):
    return ["train", str(place / "all.toml"), "--checkpoint-every", "3", "--device", "cpu", "--quiet"]


def command(place, run, *more):
    return [sys.executable, "-m", "peerbayes", *arguments(place), "--run", str(run), *more]


@pytest.fixture(scope="module")
def whole(place):
    """A run that nobody interrupted, by the real command."""
    done = subprocess.run(command(place, place / "whole"), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place / "whole"


@pytest.fixture(scope="module")
def driven(place):
    """The runs that were killed and resumed, by name of the job."""
    # Event 30 of an untouched run is in the second stage, with checkpoints before it.
    jobs = {how: {"kills": 1, "at": 30, "how": how} for how in ("honest", "moments", "step", "helpers")}
    jobs["random"] = {"kills": 20, "most": 30}
    seed = random.randrange(10**6)
    jobs = {name: {"seed": seed, "base": str(place / name), **job} for name, job in jobs.items()}
    # Without GPUs: their threads would not survive the fork.
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps([jobs, arguments(place), str(place / "warm")])],
        env=environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (seed, done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def lines(run):
    found = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def weights(run):
    return {name: (Path(run) / f"weights-{name}.safetensors").read_bytes() for name in "ab"}


def record(run):
    found = json.loads((Path(run) / "evaluation.json").read_text())
    return {key: value for key, value in found.items() if key != "seconds"}


@posix
def test_twenty_kills_at_random_moments_change_nothing(whole, driven):
    found = driven["random"]
    assert found["kills"] == 20
    assert len(lines(whole)) == 3
    for run in found["finished"]:
        assert weights(run) == weights(whole), run
        assert lines(run) == lines(whole), run
        assert record(run) == record(whole), run
        assert json.loads((Path(run) / "run.json").read_text())["finished"]
        leftovers = [p.name for p in Path(run).glob(".*") if not p.name.startswith((".eval", ".report", ".lock"))]
        assert leftovers == [], run


@posix
def test_two_kills_of_the_real_command_change_nothing(place, whole, tmp_path):
    run = tmp_path / "run"
    for step in (3, 9):
        process = subprocess.Popen(
            command(place, run, *(["--resume"] if run.exists() else [])), env=environment(), stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not (run / f"checkpoint-{step:09d}.safetensors").exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not json.loads((run / "run.json").read_text())["finished"]
    done = subprocess.run(command(place, run, "--resume"), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert weights(run) == weights(whole)
    assert lines(run) == lines(whole)


@posix
@pytest.mark.parametrize("how", ["moments", "step", "helpers"])
def test_a_resume_that_forgets_something_is_seen(whole, driven, how):
    # The control: the comparisons here do notice lost moments, a shifted step and changed helpers.
    assert driven[how]["kills"] == driven["honest"]["kills"] == 1
    assert weights(driven[how]["finished"][0]) != weights(whole)
    assert weights(driven["honest"]["finished"][0]) == weights(whole)


# ---- damaged and foreign checkpoints ----------------------------------------------------------------------------


def interrupted(place, run, at=11):
    with stopped_at(at):
        train(load_recipe(place / "all.toml"), run, device="cpu", checkpoint_every=3, reporter=Recorder())


def test_a_resumed_run_goes_on_with_the_same_crops_of_files(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 26, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        (tmp_path / "data" / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "data" / f"class{i % 2}" / f"{i}.png")
    given = {"name": str(tmp_path / "data"), "size": 12, "batch_size": 4, "augment": ["resized_crop", "color_jitter"]}
    peer = {"name": "a", "network": "mlp", "posterior": {"kind": "point"}}
    stage = {"epochs": 3, "optimizer": {"name": "sgd", "lr": 0.05}, "terms": {"likelihood": {}}}
    recipe = Recipe.parse({"title": "t", "data": given, "peers": [peer], "stages": [stage]}, "test")
    options = {"device": "cpu", "checkpoint_every": 3}
    train(recipe, tmp_path / "whole", **options, reporter=Recorder())
    with stopped_at(8):
        train(recipe, tmp_path / "half", **options, reporter=Recorder())
    train(recipe, tmp_path / "half", **options, reporter=Recorder(), resume=True)
    whole, half = ((tmp_path / name / "weights-a.safetensors").read_bytes() for name in ("whole", "half"))
    assert whole == half


@pytest.fixture(scope="module")
def half(place):
    """A run that stopped at step 11, with the checkpoints of steps 6 and 9."""
    interrupted(place, place / "half")
    names = sorted(p.name for p in (place / "half").glob("checkpoint-*"))
    assert names == ["checkpoint-000000006.safetensors", "checkpoint-000000009.safetensors"]
    return place / "half"


@pytest.fixture
def copied(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "run"))


def resume(place, run, recorder=None, **options):
    recipe = options.pop("recipe", None) or load_recipe(place / "all.toml")
    return train(recipe, run, device="cpu", checkpoint_every=3, resume=True, reporter=recorder or Recorder(), **options)


def test_resume_in_process_reaches_the_bytes_of_the_command(place, whole, copied):
    recorder = Recorder()
    resume(place, copied, recorder)
    assert recorder.warnings == []
    assert recorder.headlines[0].endswith("going on at step 9")
    assert weights(copied) == weights(whole)
    assert lines(copied) == lines(whole)


def test_another_number_of_threads_is_told_once_and_kept(place, copied):
    recorder = Recorder()
    torch.set_num_threads(2)
    try:
        resume(place, copied, recorder)
    finally:
        torch.set_num_threads(1)
    assert recorder.warnings == [
        f"{copied}: was trained with 1 thread so far, and goes on with 2, which rounds otherwise; OMP_NUM_THREADS=1 "
        "goes on exactly"
    ]
    assert json.loads((copied / "run.json").read_text())["threads"] == [1, 2]


@posix
def test_a_disk_that_fills_up_names_the_file_that_was_written():
    with pytest.raises(OSError, match="No space left on device") as caught:
        MetricsLog(Path("/dev/full")).write({"step": 1})
    assert caught.value.filename == "/dev/full"  # the command makes a sentence of that


@pytest.mark.parametrize("step", [6, 9])
def test_terms_and_peers_keep_the_order_of_the_recipe(place, whole, copied, step):
    for path in copied.glob("checkpoint-*"):
        if int(path.stem.split("-")[1]) > step:
            path.unlink()
    resume(place, copied)
    assert json.dumps(lines(copied)) == json.dumps(lines(whole))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "header"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(place, whole, copied, damage):
    newest = copied / "checkpoint-000000009.safetensors"
    data = bytearray(newest.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "emptied":
        data = bytearray()
    else:
        data[len(data) // 2 if damage == "flipped" else 40] ^= 0x10
    newest.write_bytes(data)
    recorder = Recorder()
    resume(place, copied, recorder)
    assert len(recorder.warnings) == 1
    assert str(newest) in recorder.warnings[0]
    assert recorder.warnings[0].endswith("going on from the checkpoint before it")
    assert recorder.headlines[0].endswith("going on at step 6")
    assert weights(copied) == weights(whole)
    assert lines(copied) == lines(whole)


@pytest.mark.parametrize("position", range(0, 400_000, 50_021))
def test_any_flipped_byte_is_noticed(copied, position):
    path = copied / "checkpoint-000000009.safetensors"
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="checkpoint-000000009"):
        storage.read(path)


def test_all_checkpoints_corrupt_is_refused_and_nothing_is_lost(place, copied):
    for path in copied.glob("checkpoint-*"):
        path.write_bytes(path.read_bytes()[:-7])
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    with pytest.raises(InputError, match=r"no checkpoint can be read: .*-000000009.*; .*-000000006"):
        resume(place, copied)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


def test_a_checkpoint_of_another_network_is_refused_by_tensor(place, copied):
    text = (copied / "recipe.toml").read_text().replace("resnet8", "resnet20")
    (copied / "recipe.toml").write_text(text)
    with pytest.raises(InputError, match=r"checkpoint, peer 'a': (has no )?tensor 'mean/\S*conv\S*\.weight'"):
        resume(place, copied, recipe=load_recipe(copied / "recipe.toml"))


def test_a_checkpoint_with_other_peers_is_refused(place, copied, tmp_path):
    tensors, about = storage.read(copied / "checkpoint-000000009.safetensors")
    storage.write(
        copied / "checkpoint-000000009.safetensors",
        {name.replace("peer/b/", "peer/c/"): tensor for name, tensor in tensors.items()},
        about,
    )
    with pytest.raises(InputError, match="checkpoint, peer 'b': has no tensor"):
        resume(place, copied)


def test_another_seed_or_recipe_is_refused(place, copied):
    with pytest.raises(InputError, match="holds a run of seed 0, not 1"):
        resume(place, copied, seed=1)
    other = load_recipe(place / "all.toml", ["stages.0.terms.mutual.temperature=2"])
    with pytest.raises(InputError, match=r"with other settings: stages\.0\.terms\.mutual\.temperature=3\.0 there"):
        resume(place, copied, recipe=other)


def test_a_learner_refuses_a_checkpoint_of_another_seed(place, copied):
    tensors, about, _ = newest_checkpoint(copied)
    learner = object.__new__(Learner)
    learner.seed = 5
    with pytest.raises(InputError, match="checkpoint: its seed is 0, not 5"):
        learner.restore(tensors, about)


def test_a_learner_refuses_a_checkpoint_without_its_place_in_the_schedule(place, copied):
    tensors, about, _ = newest_checkpoint(copied)
    learner = object.__new__(Learner)
    learner.seed, learner.peers = about["seed"], {}
    learner.recipe, learner.steps_per_epoch = load_recipe(place / "all.toml"), 4
    with pytest.raises(InputError, match=r"^checkpoint: has no valid 'position' \("):
        learner.restore(tensors, {"seed": about["seed"]})
    with pytest.raises(InputError, match=r"^checkpoint: step 1000 lies outside this recipe's schedule$"):
        learner.restore(tensors, about | {"position": about["position"] | {"step": 1000}})


def test_occupied_folder_needs_resume(place, copied):
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    with pytest.raises(InputError, match="already holds a run; add --resume"):
        train(load_recipe(place / "all.toml"), copied, device="cpu")
    other = load_recipe(place / "all.toml", ["data.name=cifar10"])
    with pytest.raises(InputError, match=r"holds a run on '.*', not 'cifar10'; choose another folder \(--run FOLDER\)"):
        train(other, copied, device="cpu")  # which could not be resumed
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


@posix
def test_a_second_process_on_the_same_run_is_refused(place, copied):
    code = (
        "import fcntl, sys, time\n"
        f"file = open({str(copied / '.lock')!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        before = (copied / "metrics.jsonl").read_bytes()
        with pytest.raises(InputError, match="another process is training this run"):
            resume(place, copied)
        assert (copied / "metrics.jsonl").read_bytes() == before
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    # The lock dies with its holder.
    assert resume(place, copied).finished


@posix
def test_a_run_locks_its_folder_while_it_trains(place, tmp_path, monkeypatch):
    refusals = []
    step = Learner.step

    def meanwhile(self):
        if self.position.step == 3 and not refusals:
            refusals.append(None)
            with pytest.raises(InputError, match="another process is training this run"):
                resume(place, tmp_path / "run")
            raise Stop
        step(self)

    monkeypatch.setattr(Learner, "step", meanwhile)
    with pytest.raises(Stop):
        train(load_recipe(place / "all.toml"), tmp_path / "run", device="cpu", checkpoint_every=3, reporter=Recorder())
    assert refusals


@posix
def test_a_lock_is_not_held_on_a_file_that_its_last_holder_removed(tmp_path, monkeypatch):
    import fcntl

    flock, waiting = fcntl.flock, [tmp_path / ".lock"]

    def after_the_other_has_ended(file, how):
        if waiting:
            waiting.pop().unlink()  # between our opening the file and our locking it
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_other_has_ended)
    with lock(tmp_path):
        assert not waiting
        with pytest.raises(InputError, match="another process is training this run"), lock(tmp_path):
            pass
    with lock(tmp_path):  # and is free again
        pass
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_run_that_somebody_else_finished_since_it_was_looked_at_is_not_trained_again(place, tmp_path, monkeypatch):
    recipe, run = load_recipe(place / "all.toml"), tmp_path / "run"
    after = {}

    def begin(learners, on_end=None):
        raise AssertionError("trained twice")

    @contextlib.contextmanager
    def late(folder):
        monkeypatch.undo()
        train(recipe, folder, device="cpu", reporter=Recorder())
        after.update({path.name: path.read_bytes() for path in folder.iterdir()})
        monkeypatch.setattr(session, "run_together", begin)
        with lock(folder):
            yield

    monkeypatch.setattr(session, "lock", late)
    with pytest.raises(InputError, match="another process is training this run"):
        train(recipe, run, device="cpu", reporter=Recorder())
    assert {path.name: path.read_bytes() for path in run.iterdir()} == after


def test_a_finished_run_says_so_and_is_left_alone(place, whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
    recorder = Recorder()
    assert resume(place, run, recorder).finished
    assert recorder.headlines == [f"{run}: already finished"]
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()} == before


def test_a_run_killed_before_its_recipe_was_written_can_be_resumed(place, whole, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(whole / "run.json", run / "run.json")
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"finished": False}))
    resume(place, run)
    assert weights(run) == weights(whole)


def test_resume_without_a_run_starts_one(place, whole, tmp_path):
    resume(place, tmp_path / "new")
    assert weights(tmp_path / "new") == weights(whole)


def test_how_often_checkpoints_are_written_does_not_change_the_weights(place, whole, tmp_path):
    recipe = load_recipe(place / "all.toml")
    assert isinstance(recipe, Recipe)
    train(recipe, tmp_path / "run", device="cpu", reporter=Recorder())
    assert weights(tmp_path / "run") == weights(whole)
    names = [p.name for p in (tmp_path / "run").glob("checkpoint-*")]
    assert f"checkpoint-{STEPS:09d}.safetensors" in names


def test_nothing_in_a_run_folder_is_pickled(whole):
    for path in whole.iterdir():
        data = path.read_bytes()
        if path.suffix != ".safetensors":
            assert not data.startswith((b"\x80", b"PK")), path
        else:
            assert data[8:9] == b"{"  # after the header's length
            tensors, _ = storage.read(path)
            assert all(isinstance(t, torch.Tensor) and t.isfinite().all() for t in tensors.values())
