"""Runs side by side: each ends as it would have alone, whatever happens to the others."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from learners import same
from peerbayes.api.fitting import train
from peerbayes.data import ArraySplit, Dataset
from peerbayes.engine.cohort import Cohort
from peerbayes.engine.processes import World
from peerbayes.errors import InputError, TrainingError
from peerbayes.posteriors import MeanField, Point
from peerbayes.recipes.recipe import Recipe, load_recipe
from peerbayes.runs.executor import train_jobs
from peerbayes.runs.plan import Job, Node
from peerbayes.runs.run import default_folder
from peerbayes.runs.session import RunOptions, train_pack
from peerbayes.training.learner import Learner
from peerbayes.training.loop import run_together
from peerbayes.training.reporters import ConsoleReporter, Reporter

SHAPE = (1, 4, 4)


class Small(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(self.first(x)))


def stage(epochs, lr=0.1, **terms):
    return {"epochs": epochs, "optimizer": {"name": "sgd", "lr": lr}, "terms": {"likelihood": {}} | terms}


def made_recipe(*stages, **changes):
    peer = {"name": "a", "network": "mlp", "posterior": {"kind": "point"}}
    table = {"title": "t", "data": {"batch_size": 4, "augment": ["crop"]}, "peers": [peer], "stages": list(stages)}
    return Recipe.parse({"gradient_share_every": 3} | table | changes, "test")


def made_data():
    generator = torch.Generator().manual_seed(5)
    pixels = (torch.rand(16, *SHAPE, generator=generator) * 255).to(torch.uint8)
    split = ArraySplit(pixels, torch.arange(16) % 3)
    return Dataset("made", split, split, split, 3, None, SHAPE, (0.5,), (0.3,))


def learner(number, dropout=0.0, **options):
    """One of three that differ in everything."""
    recipe, kind, names, seed = [
        (made_recipe(stage(2)), Point, "a", 0),
        (made_recipe(stage(1, mutual={}, kl={}), stage(2, lr=0.05, mutual={})), MeanField, "ab", 7),
        (made_recipe(stage(1), stage(1), stage(1), update="sequential"), Point, "abc", 0),
    ][number]
    peers = {}
    for name in names:
        torch.manual_seed(ord(name))
        peers[name] = kind(Small(dropout))
    return Learner(recipe, peers, made_data(), seed, engine="eager", **options)


def state(made):
    return {f"{name}/{n}": t.clone() for name, p in made.peers.items() for n, t in p.state().items()}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_learners_side_by_side_end_as_they_would_alone(dropout):
    alone, lines_alone = [], []
    for number in range(3):
        lines = []
        made = learner(number, dropout, log=lines.append)
        made.run()
        alone.append(state(made))
        lines_alone.append(lines)
    lines = [[], [], []]
    together = [learner(number, dropout, log=lines[number].append) for number in range(3)]
    before = torch.get_rng_state()
    ended = []
    assert run_together(together, lambda place: ended.append((place, together[place].position.step))) == {}
    assert torch.equal(torch.get_rng_state(), before)
    for number in range(3):
        assert same(state(together[number]), alone[number])
        for line in lines[number] + lines_alone[number]:
            del line["seconds"]
        assert lines[number] == lines_alone[number]
    assert ended == [(0, 8), (1, 12), (2, 12)]  # each once, the shortest first


def test_on_end_is_called_while_the_others_go_on():
    together, seen = [learner(number) for number in range(3)], []
    run_together(together, lambda _place: seen.append([made.position.step for made in together]))
    assert seen[0][0] == 8
    assert all(abs(steps - 8) <= 1 for steps in seen[0])
    assert seen[0][1] < 12
    assert len(seen) == 3


def test_one_that_fails_does_not_stop_the_others(user_term):
    calls = []

    @user_term
    def breaks(step, peer):
        calls.append(step)
        value = step.logits(peer).mean()
        return value * (float("nan") if len(calls) > 6 else 0.1)

    def bad():
        torch.manual_seed(1)
        return Learner(made_recipe(stage(3, breaks={})), {"a": Point(Small())}, made_data(), 0, engine="eager")

    closed = []

    class Closing(Reporter):
        def close(self):
            closed.append(1)

    alone = learner(1)
    alone.run()
    failing, good, ended = bad(), learner(1), []
    failing.reporter = Closing()
    errors = run_together([failing, good], ended.append)
    assert list(errors) == [0]
    assert isinstance(errors[0], TrainingError)
    assert "term 'breaks' of peer 'a' became nan" in str(errors[0])
    assert ended == [1]
    assert closed
    assert same(state(good), state(alone))
    calls.clear()
    with pytest.raises(TrainingError, match="breaks"):
        bad().run()


# ---- run folders ----------------------------------------------------------------------------------------------------

SHORT = ["peers.*.network=mlp", "data.batch_size=256", "data.validation=100", "gradient_share_every=2"]


def test_one_that_runs_out_of_memory_does_not_stop_the_others(monkeypatch):
    alone, together = learner(0), [learner(1), learner(0)]
    alone.run()
    step, done = together[0].cohort.step, []

    def greedy(clock):
        done.append(clock)
        if len(done) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.\nGPU 0 has ...")
        step(clock)

    monkeypatch.setattr(together[0].cohort, "step", greedy)
    errors = run_together(together)
    assert list(errors) == [0]
    assert str(errors[0]).startswith(
        "the memory of cpu is used up at step 2 (CUDA out of memory. Tried to allocate 7.00"
    )
    assert same(state(alone), state(together[1]))


def test_all_processes_give_up_where_predictions_of_the_first_are_nan(monkeypatch):
    asked = []

    class Others(World):  # as the second of two sees it: the first has raised its flag
        def any(self, flag):
            asked.append(flag)
            return True

    made = learner(0)
    monkeypatch.setattr(made.evaluator, "world", Others(1, 2))
    with pytest.raises(TrainingError, match=r"predictions of peer 'a' became nan"):
        made.evaluator.judge("a", 0, 0)
    assert asked == [False]


def test_what_a_run_computes_in_is_noted_and_a_change_is_said(tmp_path):
    said = []

    class Listening(Reporter):
        def warn(self, text):
            said.append(text)

    job = Job(load_recipe("mutual/digits-dnn", ["peers.0.network=mlp", "stages.0.epochs=2"]), tmp_path / "run")
    until = {"device": "cpu", "reporter": Listening()}
    train_jobs([job], **until)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["precision"] == "float32"
    (tmp_path / "run" / "run.json").write_text(json.dumps(about | {"finished": False}))
    train_jobs([job], resume=True, precision="bfloat16", **until)
    assert [text for text in said if "so far" in text] == [
        f"{tmp_path / 'run'}: was trained in float32 so far, and goes on in bfloat16"
    ]


def short(name, epochs, *more):
    return load_recipe(f"mutual/digits-{name}", [*SHORT, f"stages.*.epochs={epochs}", *more])


def sourceless(name, epochs):
    found = short(name, epochs)
    peers = [peer.model_copy(update={"start_from": None}) for peer in found.peers]
    return found.model_copy(update={"peers": peers})


def jobs(folder):
    return [
        Job(sourceless("vanilla", 1), folder / "one", 0),
        Job(sourceless("vanilla", 1), folder / "two", 1),
        Job(sourceless("dml", 2), folder / "three", 0),
    ]


def contents(folder):
    """What must be equal, without times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        name = str(path.relative_to(folder))
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
        elif path.name == "run.json":
            about = json.loads(path.read_text())
            found[name] = {k: v for k, v in about.items() if k not in ("seconds", "packed")}
        elif path.suffix == ".safetensors" and path.name.startswith("weights"):
            found[name] = path.read_bytes()
        elif path.name == "recipe.toml":
            found[name] = path.read_text()
    return found


HOW = {"device": "cpu", "engine": "eager"}


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("separate")
    for job in jobs(folder):
        train(job.recipe, job.folder, seed=job.seed, **HOW)
    return contents(folder)


def test_packed_jobs_leave_the_folders_of_separate_ones(tmp_path, separate):
    runs = train_jobs(jobs(tmp_path), pack=3, **HOW)
    assert [run.folder.name for run in runs] == ["one", "two", "three"]
    assert all(run.finished for run in runs)
    assert contents(tmp_path) == separate
    assert {json.loads(path.read_text())["packed"] for path in tmp_path.glob("*/run.json")} == {3}
    assert not list(tmp_path.rglob(".lock"))
    assert not list(tmp_path.rglob(".*.tmp"))


class Interrupting(Reporter):
    """Press Ctrl-C when so many epochs have ended in all."""

    def __init__(self, after):
        self.left = after

    def epoch(self, line):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [1, 3, 4])
def test_packed_jobs_can_be_interrupted_and_resumed(after, tmp_path, separate):
    with pytest.raises(KeyboardInterrupt):
        train_jobs(jobs(tmp_path), pack=3, reporter=Interrupting(after), checkpoint_every=3, **HOW)
    finished = [json.loads(path.read_text())["finished"] for path in tmp_path.glob("*/run.json")]
    assert len(finished) == 3
    assert not all(finished)
    runs = train_jobs(jobs(tmp_path), pack=3, resume=True, **HOW)
    assert all(run.finished for run in runs)
    assert contents(tmp_path) == separate


class Warnings(Reporter):
    def __init__(self):
        self.said = []

    def beside(self, label):
        return self

    def warn(self, text):
        self.said.append(text)


def test_runs_that_memory_is_too_small_for_go_on_in_smaller_groups(tmp_path, separate, monkeypatch):
    beside, step, waves = 0, Cohort.step, []

    def counted(sessions, world):
        nonlocal beside
        beside = len(sessions)
        waves.append([session.folder.name for session in sessions])
        return train_pack(sessions, world)

    def greedy(self, clock):
        if beside > 1 and self.seed == 0 and int(clock.step) >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, clock)

    monkeypatch.setattr("peerbayes.runs.executor.train_pack", counted)
    monkeypatch.setattr(Cohort, "step", greedy)
    voice = Warnings()
    runs = train_jobs(jobs(tmp_path), pack=3, reporter=voice, checkpoint_every=3, **HOW)
    assert all(run.finished for run in runs)
    assert contents(tmp_path) == separate
    # The second has another seed, and room enough.
    assert waves == [["one", "two", "three"], ["one"], ["three"]]
    assert [text for text in voice.said if "memory" in text] == [
        "the memory of cpu is too small for 3 runs side by side: from now on 1"
    ]


def test_a_run_that_memory_is_too_small_for_by_itself_is_an_error(tmp_path, monkeypatch):
    def greedy(self, clock):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Cohort, "step", greedy)
    errors = {}
    train_jobs(jobs(tmp_path), pack=3, reporter=Warnings(), errors=errors, **HOW)
    assert sorted(errors) == [0, 1, 2]
    assert all("used up at step 0 (CUDA out of memory.)" in str(error) for error in errors.values())


class Headlines(Reporter):
    def __init__(self):
        self.said = []

    def headline(self, text):
        self.said.append(text)


def test_a_source_of_two_jobs_is_trained_once(tmp_path):
    # A source of their own, short enough for a test.
    source = tmp_path / "source.toml"
    source.write_text(short("dnn", 1).to_toml())
    changes = [f"peers.pretrained.start_from={source}"]
    ours = Job(short("ours", 1, *changes, LAYERS), tmp_path / "runs" / "ours")
    again = Job(short("ours", 1, *changes, LAYERS, "stages.0.optimizer.lr=1e-3"), tmp_path / "runs" / "again")
    voice = Headlines()
    runs = train_jobs([ours, again], pack=2, reporter=voice, **HOW)
    assert sum("training it first" in line for line in voice.said) == 1
    folders = sorted(path.parent.name for path in (tmp_path / "runs").glob("*/run.json"))
    assert len(folders) == 3
    assert all(run.finished for run in runs)
    # The same, separately: the source is then found.
    apart = tmp_path / "apart"
    for job in (ours, again):
        train(job.recipe, apart / job.folder.name, seed=0, **HOW)
    assert contents(apart) == contents(tmp_path / "runs")


def test_a_job_that_is_the_source_of_another_is_trained_once(tmp_path):
    source = tmp_path / "source.toml"
    source.write_text(short("dnn", 1).to_toml())
    wanted = short("ours", 1, f"peers.pretrained.start_from={source}", LAYERS)
    base = Job(load_recipe(source), default_folder(str(source), 0, tmp_path / "runs"))
    voice = Headlines()
    runs = train_jobs([Job(wanted, tmp_path / "runs" / "ours"), base], pack=2, reporter=voice, **HOW)
    assert sum("training it first" in line for line in voice.said) == 1
    assert sorted(path.parent for path in (tmp_path / "runs").glob("*/run.json")) == sorted(r.folder for r in runs)
    assert all(run.finished for run in runs)


def test_two_jobs_can_not_have_one_folder(tmp_path):
    first = jobs(tmp_path)[0]
    (tmp_path / "x").mkdir()
    with pytest.raises(InputError, match="two runs can't have one folder"):
        train_jobs([first, Job(first.recipe, tmp_path / "x" / ".." / "one", 1)], pack=2, **HOW)
    assert not (tmp_path / "one").exists()


LAYERS = "stages.1.terms.feature_diversity.layers=['hidden.0', 'hidden.1']"


# ---- bars -----------------------------------------------------------------------------------------------------------


def line(epoch, loss):
    peer = {"terms": {"likelihood": loss}, "loss": loss}
    return {"epoch": epoch, "seconds": 1.0, "peers": {"a": peer}}


def live(console):
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


def test_bars_side_by_side_and_none_left_behind():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, highlight=False)
    root = ConsoleReporter(console)
    left, right = root.beside("left[1]"), root.beside("right")
    left.stage(1, 2, 4, 0)
    right.stage(1, 1, 6, 2)
    assert live(console)
    left.epoch(line(4, 0.111))
    right.epoch(line(3, 0.222))
    progress = root._board._progress
    assert [(t.description.split()[0], t.completed, t.total) for t in progress.tasks] == [
        ("left[1]", 4, 4),
        ("right", 3, 6),
    ]
    left.stage(2, 2, 5, 0)  # a new bar; the old one stays as it is
    assert live(console)
    assert len(root._board._progress.tasks) == 3
    left.close()
    assert live(console)
    right.epoch(line(5, 0.333))
    right.warn("something [odd]")
    right.close()
    right.close()
    assert not live(console)
    text = out.getvalue()
    assert "left[1]  stage 1/2" in text
    assert "stage 2/2" in text
    assert "loss 0.333 = likelihood 0.333" in text
    assert "! right  something [odd]" in text
    # The console is free again for the next runs.
    root.stage(1, 1, 2, 0)
    assert live(console)
    root.close()
    assert not live(console)


def test_bars_are_gone_after_a_failure_and_an_interruption(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)

    class Pressed(ConsoleReporter):
        def beside(self, label):
            found = super().beside(label)
            if label == "three":
                found.epoch = self.press
            return found

        def press(self, _line):
            assert live(console)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_jobs(jobs(tmp_path), pack=3, reporter=Pressed(console), **HOW)
    assert not live(console)


def test_without_a_terminal_lines_carry_their_label():
    out = io.StringIO()
    root = ConsoleReporter(Console(file=out, width=200))
    left, right = root.beside("left"), root.beside("[b]right")
    left.stage(1, 2, 20, 0)
    right.stage(1, 1, 2, 0)
    for epoch in range(1, 5):
        left.epoch(line(epoch, 0.5))
    right.epoch(line(1, 0.25))
    left.close()
    right.close()
    lines = out.getvalue().splitlines()
    assert [text.split("  ")[:2] for text in lines] == [
        ["left", "stage 1/2"],
        ["left", "stage 1/2"],
        ["[b]right", "stage 1/1"],
    ]
    assert all("loss" in text for text in lines)


# ---- how many at once -----------------------------------------------------------------------------------------------


def test_packs_never_share_streams_or_buffers():
    jobs = [Node(load_recipe("mutual/digits-dml"), Path(f"run{n}"), n) for n in range(24)]
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [len(pack) for pack in RunOptions().packs(jobs, gpu)] == [8, 8, 8]  # 32 streams, 3 a pair: at most 10
    assert [len(pack) for pack in RunOptions(pack=24).packs(jobs, gpu)] == [8, 8, 8]
    assert [len(pack) for pack in RunOptions().packs(jobs[:11], gpu)] == [6, 5]
    assert RunOptions().packs([], gpu) == []
    assert [len(pack) for pack in RunOptions(pack=4).packs(jobs[:6], gpu)] == [3, 3]
    assert [len(pack) for pack in RunOptions(pack=3).packs(jobs[:6], cpu)] == [3, 3]
    assert [len(pack) for pack in RunOptions().packs(jobs[:2], cpu)] == [1, 1]
    assert [len(pack) for pack in RunOptions(world=World(0, 2)).packs(jobs[:3], gpu)] == [1, 1, 1]
