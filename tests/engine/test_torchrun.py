"""`torchrun -m peerbayes train`: real processes must learn what one does, survive a kill and speak with one voice."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from commands import save_npz
from peerbayes.engine.stages import set_global_seed
from peerbayes.math.noise import Address
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import load_recipe
from peerbayes.runs.executor import train_jobs
from peerbayes.runs.plan import Job
from peerbayes.runs.run import Run, default_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs gloo, SIGKILL and /proc")

EVERY = 3  # steps between checkpoints
PEERS = """
peers = [
  { name = "a", network = "NETWORK", posterior = { kind = "mean_field" } },
  { name = "b", network = "NETWORK", posterior = { kind = "mean_field" } },
]
"""
HEAD = """
title = "A recipe"
method = "ours"
data = { name = "DATA", batch_size = 12, augment = ["crop", "flip"], validation = 12 }
gradient_share_every = 4
update = "UPDATE"
"""
STAGE = """
[[stages]]
epochs = 2
optimizer = { name = "sgd", lr = 0.02, momentum = 0.9 }
lr_milestones = [1]
[stages.terms]
likelihood = {}
kl = { scheme = "layer_mean" }
mutual = { temperature = 3.0 }
weight_diversity = {}
"""
FEATURES = 'feature_diversity = { weight = 2.0, layers = ["stage2", "stage3"], fusion = "FUSION" }\n'
EVALUATION = "[evaluation]\ndraws = 2\n"

MLP = (HEAD + PEERS + STAGE + EVALUATION).replace("NETWORK", "mlp")
RESNET = (HEAD + PEERS + STAGE + FEATURES + EVALUATION).replace("NETWORK", "resnet8")
SINGLE = """
title = "One network"
data = { name = "DATA", batch_size = 12 }
gradient_share_every = 0
peers = [{ name = "a", network = "NETWORK", posterior = { kind = "point" } }]
[[stages]]
epochs = 1
optimizer = { name = "sgd", lr = 0.02 }
[stages.terms]
likelihood = {}
"""

RECIPES = {
    "together": MLP.replace("UPDATE", "simultaneous"),
    "in_turn": MLP.replace("UPDATE", "sequential"),
    # Long enough to be killed on the way.
    "per_peer": RESNET.replace("UPDATE", "simultaneous").replace("FUSION", "per_peer").replace("= 2\nopt", "= 4\nopt"),
    "shared": RESNET.replace("UPDATE", "sequential").replace("FUSION", "shared"),
    "source": SINGLE.replace("NETWORK", "mlp"),
    "fine_tuned": SINGLE.replace("NETWORK", "mlp").replace('name = "a"', 'name = "a", start_from = "SOURCE"'),
    "odd": SINGLE.replace("NETWORK", "mlp")
    .replace('name = "a"', 'name = "a", start_from = "SOURCE"')
    .replace("batch_size = 12", "batch_size = 9"),
    "dropping": SINGLE.replace("NETWORK", "networks_of_test:dropping"),
    "breaking": SINGLE.replace("NETWORK", "networks_of_test:breaking"),
    "refusing": SINGLE.replace("NETWORK", "networks_of_test:refusing"),
}

NETWORKS = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from peerbayes.errors import InputError

RANK = os.environ.get("RANK", "alone")
LOOK = 4  # images of the look before the first step

class Dropping(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.linear = nn.Linear(64, inputs.classes)

    def forward(self, x):
        if self.training:
            mask = F.dropout(torch.ones(len(x), 64))
            with open(os.path.join(os.environ["NOTES"], f"masks-{RANK}"), "a") as file:
                len(x) > LOOK and file.write("".join(str(int(bit > 0)) for bit in mask.flatten().tolist()) + "\\n")
            return self.linear(x.flatten(1) * mask)
        return self.linear(x.flatten(1))

class Breaking(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.linear, self.calls = nn.Linear(64, inputs.classes), 0

    def forward(self, x):
        self.calls += self.training and len(x) > LOOK
        return self.linear(x.flatten(1)) * (torch.nan if RANK == "1" and self.calls > 2 else 1)

def dropping(inputs):
    return Dropping(inputs)

def breaking(inputs):
    return Breaking(inputs)

def refusing(inputs):
    if RANK == "1":
        raise InputError("this process has no such network")
    return Dropping(inputs)
"""

# One warm process that forks two a case, with the environment that torchrun gives them; all cases go at once. Nobody
# ends a process for the other's sake here, so each must leave by itself.
DRIVER = """
import json, os, socket, sys, traceback
import torch
torch.set_num_threads(1)
import peerbayes.api.fitting, peerbayes.reports.page, peerbayes.studies.sweeps
from peerbayes import cli

def start(name, arguments, rank, port):
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}-{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    if name == "data" and rank == 1:
        from peerbayes.runs import executor
        load_data = executor.load_data
        def changed(*given):
            data = load_data(*given)
            data.train.images[40, 0, 3, 3] += 1
            return data
        executor.load_data = changed
    if name == "versions":
        peerbayes.__version__ = f"0.{rank}"
    code = 70
    try:
        cli.main([argument.replace("{rank}", str(rank)) for argument in arguments])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

started = {}
for name, arguments in json.loads(sys.argv[1]).items():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started[name] = [start(name, arguments, rank, port) for rank in (0, 1)]
codes = {n: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] for n, pids in started.items()}
print(json.dumps(codes))
"""


# ---- real processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    save_npz(folder / "small.npz", held=24)
    for name, text in RECIPES.items():
        text = text.replace("DATA", str(folder / "small.npz")).replace("SOURCE", "source.toml")
        (folder / f"{name}.toml").write_text(text)
    (folder / "networks_of_test.py").write_text(NETWORKS)
    return folder


def command(names, *more, restarts=0):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    # After "--": torchrun would take our --run for a short form of its own --run-path or --run_path.
    torchrun += ["--max-restarts", str(restarts), "-m", "--", "peerbayes", "train"]
    return [sys.executable, *torchrun, *options(names), *more]


def options(names):
    return [*(f"{name}.toml" for name in names), "--device", "cpu", "--checkpoint-every", str(EVERY), "--json"]


def environment(place):
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "NOTES": str(place)}


def launch(place, names, *more, restarts=0):
    return subprocess.run(
        command(names, *more, restarts=restarts),
        env=environment(place),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )


def sentence(stdout, stderr):
    """Return the one sentence of processes that failed; none showed where in the code it failed."""
    assert stdout == ""
    assert "src/peerbayes" not in stderr, stderr
    found = [line for line in stderr.splitlines() if "peerbayes:" in line]
    # A process that is too busy to hear in time that another one has spoken says the same.
    assert 1 <= len(found) <= 2, stderr
    assert len(set(found)) == 1, stderr
    return found[0]


@pytest.fixture(scope="module")
def alone(place):
    """The folder of what one process makes of the recipes."""
    runs = place / "alone"
    names = ["together", "in_turn", "per_peer", "shared", "fine_tuned"]
    with contextlib.chdir(place):
        jobs = [Job(load_recipe(f"{name}.toml"), default_folder(f"{name}.toml", 0, runs)) for name in names]
        train_jobs(jobs, device="cpu", checkpoint_every=EVERY)
    return runs


@pytest.fixture(scope="module")
def apart(place):
    """The folder of what two processes make of them, and what they printed."""
    done = launch(place, ["together", "in_turn", "per_peer", "fine_tuned"], "--run", str(place / "apart"))
    assert done.returncode == 0, done.stderr
    return place / "apart", done.stdout


@pytest.fixture(scope="module")
def driven(place):
    """What came of pairs of processes: exit codes, standard output and standard error by case."""
    cases = {
        "synchronised": (["per_peer", "shared"], "--synchronise"),
        "odd": (["odd"],),
        "refusing": (["refusing"],),
        "broken": (["breaking", "dropping"],),
        "epochs": (["source"], "--set", "stages.0.epochs=1{rank}"),
        "seeds": (["source"], "--seed", "{rank}"),
        "options": (["source"], "--precision", "float32", "--checkpoint-every", "{rank}1"),
        "versions": (["source"],),
        "data": (["source"],),
    }
    orders = {
        name: ["train", *options(names), "--quiet", *more, "--run", str(place / name / "run")]
        for name, (names, *more) in cases.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(orders)],
        env=environment(place) | {"CUDA_VISIBLE_DEVICES": ""},  # threads of GPUs would not survive the fork
        cwd=place,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    said = {
        name: ["".join((place / f"{name}-{rank}.{kind}").read_text() for rank in (0, 1)) for kind in ("out", "err")]
        for name in cases
    }
    return {name: (found, *said[name]) for name, found in json.loads(done.stdout).items()}


def weights(run):
    found = {}
    for path in sorted(run.glob("weights-*.safetensors")):
        found |= {f"{path.stem}/{name}": tensor for name, tensor in storage.read(path)[0].items()}
    assert found
    return found


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def close(found, expected):
    """Compare numbers in nested tables."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def distance(found, expected):
    """The largest difference between two runs' weights and statistics."""
    one, other = weights(found), weights(expected)
    assert list(one) == list(other)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def same_run(found, expected):
    one, other = weights(found), weights(expected)
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    close(lines(found), lines(expected))
    assert json.loads((found / "run.json").read_text())["processes"] == 2


# ---- two processes are one ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["together-seed0", "in_turn-seed0", "source-seed0", "fine_tuned-seed0"])
def test_two_processes_learn_what_one_does(alone, apart, name):
    same_run(apart[0] / name, alone / name)


def test_the_lines_hold_what_the_comparison_is_about(alone):
    for name, epochs in {"together": 2, "per_peer": 4}.items():
        found = lines(alone / f"{name}-seed0")
        assert len(found) == epochs
        for line in found:
            for peer in line["peers"].values():
                assert {"loss", "train_accuracy", "gradient_share", "valid_nll", "valid_accuracy"} <= set(peer)
                assert all(share > 0 for share in peer["gradient_share"].values())
    terms = lines(alone / "per_peer-seed0")[-1]["peers"]["a"]["terms"]
    assert list(terms) == ["likelihood", "kl", "mutual", "weight_diversity", "feature_diversity"]


@pytest.mark.parametrize("name", ["per_peer-seed0", "shared-seed0"])
def test_synchronised_batch_norm_and_kernels_are_those_of_one_process(place, alone, driven, name):
    codes, stdout, stderr = driven["synchronised"]
    assert codes == [0, 0], stderr
    assert len(json.loads(stdout)) == 2
    same_run(place / "synchronised" / "run" / name, alone / name)


def test_the_comparison_notices_statistics_a_process(alone, apart):
    assert distance(apart[0] / "per_peer-seed0", alone / "per_peer-seed0") > 1e-2
    with pytest.raises(AssertionError):
        close(lines(apart[0] / "per_peer-seed0"), lines(alone / "per_peer-seed0"))


def test_the_first_process_alone_prints(apart):
    runs, stdout = apart
    records = json.loads(stdout)
    assert len(records) == 4
    assert sorted(path.name for path in runs.iterdir()) == sorted(
        f"{name}-seed0" for name in ("together", "in_turn", "per_peer", "fine_tuned", "source")
    )
    for run in runs.iterdir():
        assert Run(run).finished
        assert not [path.name for path in run.glob("*.lock*")], run


# ---- a killed process -----------------------------------------------------------------------------------------------


def worker(launcher, rank):
    """Return the process number of a launcher's worker; 0 where it has none."""
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) if folder.name.isdecimal() else 0
            if parent == launcher and f"RANK={rank}" in (folder / "environ").read_text().split("\0"):
                return int(folder.name)
        except OSError:  # it has ended meanwhile
            continue
    return 0


def test_a_killed_process_is_started_again_and_nothing_changes(place, apart, tmp_path):
    run = tmp_path / "run"
    with open(tmp_path / "stderr", "w") as errors:
        process = subprocess.Popen(
            command(["per_peer"], "--run", str(run), restarts=3),
            env=environment(place),
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        while process.poll() is None and not (run / f"checkpoint-{2 * EVERY:09d}.safetensors").exists():
            time.sleep(0.002)
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        os.kill(worker(process.pid, 1), signal.SIGKILL)
        assert not json.loads((run / "run.json").read_text())["finished"]
        stdout, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    stderr = (tmp_path / "stderr").read_text()
    assert process.returncode == 0, stderr
    whole = apart[0] / "per_peer-seed0"
    assert stderr.count("going on at step") == 1, stderr
    for name in "ab":
        file = f"weights-{name}.safetensors"
        assert (run / file).read_bytes() == (whole / file).read_bytes(), file
    assert lines(run) == lines(whole)
    assert json.loads(stdout)["peers"] == json.loads(apart[1])[2]["peers"]


# ---- one voice ------------------------------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_shared_out_is_one_sentence_before_a_source_is_trained(place, driven):
    codes, *said = driven["odd"]
    assert codes == [2, 2]
    assert sentence(*said).endswith("batch_size is 9: expected a multiple of 2, the number of processes")
    assert not (place / "odd").exists()


ALIKE = "; start all processes with the same recipe, seed, options, data and versions"


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("epochs", "another recipe, or other settings of it"),
        ("seeds", "another seed"),
        ("options", "another value of checkpoint_every"),
        ("versions", "other versions"),
        ("data", "other data called small"),
    ],
)
def test_processes_that_were_not_started_alike_are_one_sentence_and_nothing_is_written(place, driven, case, what):
    codes, *said = driven[case]
    assert codes == [2, 2]
    assert sentence(*said) == f"peerbayes: process 1 has {what} than process 0{ALIKE}"
    assert not (place / case).exists()


def test_what_the_second_process_alone_finds_wrong_is_one_sentence_and_nothing_is_written(place, driven):
    codes, *said = driven["refusing"]
    assert codes == [2, 2]
    assert sentence(*said) == "peerbayes: this process has no such network"
    assert not (place / "refusing").exists()


def test_an_occupied_folder_is_refused_and_a_restart_does_not_resume_it(place, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "diary.txt").write_text("mine")
    done = launch(place, ["source"], "--run", str(run), restarts=1)
    assert done.returncode != 0
    assert sentence(done.stdout, done.stderr).endswith("the folder is not empty and holds no run; choose another one")
    assert [path.name for path in run.iterdir()] == ["diary.txt"]


def test_a_term_that_breaks_in_one_process_ends_its_run_in_both(place, driven):
    codes, *said = driven["broken"]
    assert codes == [1, 1]
    assert "term 'likelihood' of peer 'a' became nan at step 2 (epoch 1)" in sentence("", said[1])
    assert [record["recipe"] for record in json.loads(said[0])] == ["dropping"]  # the other run's results
    assert not Run(place / "broken" / "run" / "breaking-seed0", trust=True).finished
    # The run after it was trained all the same.
    assert Run(place / "broken" / "run" / "dropping-seed0", trust=True).finished


@pytest.mark.usefixtures("driven")
def test_processes_drop_different_units(place):
    assert Run(place / "broken" / "run" / "dropping-seed0", trust=True).finished
    first, second = ((place / f"masks-{rank}").read_text().splitlines() for rank in (0, 1))
    assert len(first) == len(second) == 5
    assert len({*first, *second}) == 10
    assert all(len(mask) == 6 * 64 for mask in first)


def test_dropout_of_one_process_is_addressed_by_peer_and_step(place, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("NOTES", str(tmp_path))
    train_jobs([Job(load_recipe(place / "dropping.toml"), tmp_path / "run")], device="cpu")
    found = (tmp_path / "masks-alone").read_text().splitlines()
    assert len(found) == 5
    with torch.random.fork_rng([]):
        for step, mask in enumerate(found):
            set_global_seed(Address(0, "a", "step", step).sub("network"))
            assert [int(bit) for bit in mask] == F.dropout(torch.ones(12 * 64)).bool().int().tolist()
