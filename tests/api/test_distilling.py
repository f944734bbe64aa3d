"""From trained runs to one network: the best epoch, interruptions, engines, the command line, and what is refused."""

import copy
import csv
import functools
import itertools
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import peerbayes as pb
from commands import QUIET, called, change, contents, process, refused
from learners import stopped_at
from peerbayes import cli, networks
from peerbayes.api.distilling import default_recipe, save_networks
from peerbayes.api.fitting import train
from peerbayes.data import ArraySplit, Dataset, to_unit
from peerbayes.engine import engines as engine
from peerbayes.engine.teachers import Teachers, run_functional
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.inference.batch_norm import recalibrate
from peerbayes.posteriors import MeanField, Point, RankOne
from peerbayes.recipes.recipe import Recipe, load_recipe, packaged
from peerbayes.recipes.recipe_data import load_data, network_inputs
from peerbayes.reports.tables import text_table
from peerbayes.runs import executor, session
from peerbayes.runs.building import build_teachers
from peerbayes.runs.plan import Job, resolve
from peerbayes.runs.run import Run
from peerbayes.training.learner import Learner
from peerbayes.training.reporters import Reporter

SMALL = ["data.batch_size=32", "data.validation=1000", "gradient_share_every=0", "stages.0.warmup=0"]
# The learning rate jumps after three epochs, and what was learnt is lost: the best epoch is not the last one.
RISE_AND_FALL = ["stages.0.lr_schedule=milestones", "stages.0.lr_milestones=[3]", "stages.0.lr_factor=20"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("distilling")


@pytest.fixture(scope="module")
def teachers(place):
    """Two ResNet-8s that have learnt digits, each at its best epoch."""
    recipe = load_recipe("distillation/digits-resnet8-de4", [*SMALL, "stages.0.epochs=6"])
    return train(recipe.model_copy(update={"peers": recipe.peers[:2]}), place / "teachers", device="cpu")


def student_recipe(teachers, *changes):
    given = [f"teachers.runs=['{teachers.folder}']", "peers.0.posterior.members=2", "stages.0.epochs=4"]
    return load_recipe("distillation/digits-resnet8-latentbe-tdiv-sdiv-de4", [*SMALL, *RISE_AND_FALL, *given, *changes])


@pytest.fixture(scope="module")
def student(place, teachers):
    """LatentBE with TDiv-SDiv, not interrupted."""
    return train(student_recipe(teachers), place / "student", device="cpu", checkpoint_every=4)


# ---- the best epoch -------------------------------------------------------------------------------------------------


def accuracy(posterior, split):
    """By a plain module."""
    with torch.no_grad():
        found = posterior.materialise().eval()(to_unit(split.images)).argmax(-1)
    return float((found == split.labels).double().mean())


def curve(run, peer):
    return [line["peers"][peer]["valid_accuracy"] for line in run.metrics]


def test_every_peer_is_kept_as_it_was_at_its_own_best_epoch(student, place):
    recipe = load_recipe(
        "distillation/digits-resnet8-de4", [*SMALL, "stages.0.epochs=6", *RISE_AND_FALL[:2], "stages.0.lr_factor=8"]
    )
    teachers = train(recipe.model_copy(update={"peers": recipe.peers[:2]}), place / "falling", device="cpu")
    best = {peer: curve(run, peer).index(max(curve(run, peer))) for run in (teachers, student) for peer in run}
    assert best["student"] < 3
    assert best["teacher1"] != best["teacher2"]
    for run in (teachers, student):
        validation = load_data(run.recipe).validation
        for peer in run:
            assert accuracy(run[peer], validation) == pytest.approx(max(curve(run, peer)), abs=1e-9)
    assert max(curve(student, "student")) > curve(student, "student")[-1] + 0.1


def test_a_distillation_that_is_interrupted_ends_with_the_same_bytes(teachers, student, tmp_path):
    # The best epoch has ended at step 27: the checkpoint of step 32 has to hold it.
    with stopped_at(34):
        train(student_recipe(teachers), tmp_path / "run", device="cpu", checkpoint_every=4)
    assert not Run(tmp_path / "run").finished
    run = train(student_recipe(teachers), tmp_path / "run", device="cpu", checkpoint_every=4, resume=True)
    assert (
        contents(run.folder)["weights-student.safetensors"] == contents(student.folder)["weights-student.safetensors"]
    )
    lines, others = (
        [{key: value for key, value in line.items() if key != "seconds"} for line in one.metrics]
        for one in (run, student)
    )
    assert lines == others


@pytest.fixture
def seen(monkeypatch):
    """What runs have learnt from in their second epochs, as rows, by their folders."""
    found = {}

    class Watched(Learner):
        def step(self):
            super().step()
            if self.position.step // self.steps_per_epoch == 1:
                rows = found.setdefault(self.place, set())
                rows |= {tuple(row) for row in self.cohort.images.flatten(1).tolist()}

    class Session(session.Session):
        def __init__(self, job, *arguments, **options):
            super().__init__(job, *arguments, **options)
            self.learner.place = job.folder.name

    monkeypatch.setattr(session, "Learner", Watched)
    monkeypatch.setattr(executor, "Session", Session)
    return found


def test_nobody_learns_from_the_crops_that_its_teachers_and_theirs_have_learnt_from(tmp_path, seen):
    # Teachers are surer of those than of others, and a student of the same seed would see them in the same epochs.
    short = ["stages.0.epochs=3", *SMALL]
    recipe = load_recipe("distillation/digits-resnet8-de4", short)

    def student_of(run, name):
        taught = load_recipe("distillation/digits-resnet8-kd-de4", [*short, f"teachers.runs=['{run.folder}']"])
        return train(taught, tmp_path / name, seed=run.seed, device="cpu")

    def from_python(run, name):
        network = networks.build("resnet8", network_inputs(load_data(run.recipe)))
        pb.distill([run], into=network, recipe="distillation/kd", run=tmp_path / name, overrides=short)
        return Run(tmp_path / name, {"student": network})

    runs = [train(recipe, tmp_path / "teachers", device="cpu")]
    runs.append(student_of(runs[0], "child"))
    runs.append(student_of(runs[1], "grandchild"))
    runs.append(from_python(runs[2], "by hand"))
    runs.append(from_python(runs[3], "and again"))
    assert [run.about["generation"] for run in runs] == [0, 1, 2, 3, 4]
    train(recipe, tmp_path / "other", seed=1, device="cpu")
    rows = [seen[name] for name in ("teachers", "child", "grandchild", "by hand", "and again")]
    by_chance = len(rows[0] & seen["other"])
    assert by_chance < 0.2 * len(rows[0])
    for one, two in itertools.combinations(rows, 2):
        assert len(one & two) < by_chance + 0.1 * len(rows[0])
    # All students of one teacher see the same, so that they can be compared.
    student_of(runs[0], "sibling")
    assert seen["sibling"] == seen["child"]


def planned(recipe, folder):
    """Return the node of a recipe that would be trained into a folder's run."""
    return resolve([Job(recipe, folder / "run")]).targets[0]


def test_a_teacher_that_has_learnt_the_validation_images_is_told(teachers, tmp_path):
    recipe = student_recipe(teachers, "data.validation=500")
    with pytest.warns(PeerbayesWarning, match="trained with data.validation=1000, here it is 500: it may have learnt"):
        build_teachers(planned(recipe, tmp_path), load_data(recipe), torch.device("cpu"))


class Small(nn.Module):
    def __init__(self, classes=3, size=16, width=6):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.first(x))


def small(seed=0, **options):
    torch.manual_seed(seed)
    return Small(**options)


def made_data(count=48, classes=3, side=4):
    """Easy: the label is in the brightness of a row."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % classes
    pixels = 120 * torch.rand(count, 1, side, side, generator=generator)
    pixels[torch.arange(count), 0, labels] += 130
    split = ArraySplit(pixels.to(torch.uint8), labels)
    return Dataset("made", split, split, split, classes, None, (1, side, side), (0.5,), (0.3,))


def made_recipe(*stages, **changes):
    peer = {"name": "a", "network": "mlp", "posterior": {"kind": "point"}}
    table = {"title": "t", "data": {"batch_size": 12}, "peers": [peer], "stages": list(stages)}
    return Recipe.parse({"gradient_share_every": 0, "evaluation": {"keep": "best"}} | table | changes, "test")


def made_stage(epochs, lr, **terms):
    return {"epochs": epochs, "optimizer": {"name": "sgd", "lr": lr}, "terms": terms or {"likelihood": {}}}


def learning(log=None, keep="best", **options):
    """Three teachers, a rank-one student, perturbed images; a stage that learns and one that forgets more and more."""
    good = made_stage(4, 0.05, distil={"teachers": "one_to_one", "temperature": 2.0})
    good |= {"perturb": {"kind": "tdiv_sdiv"}, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}
    forget = made_stage(3, 1.5, likelihood={"weight": -1.0}) | {"perturb": {"kind": "conf_ods"}}
    forget["optimizer"] |= {"clip": 1.0}
    given = Teachers([known(1), known(2), MeanField(small(3), rho=-3.0, start_from=known(3))])
    peers = {"a": RankOne(small(9), 3, factors="random", spread=0.1, predicts="average")}
    recipe = made_recipe(good, forget, evaluation={"keep": keep})
    return Learner(recipe, peers, made_data(), 0, teachers=given, log=log, engine="eager", **options)


@functools.cache
def known(seed):
    """A posterior that knows the answers."""
    peers = {"a": Point(small(seed))}
    Learner(made_recipe(made_stage(12, 0.3)), peers, made_data(), 0, engine="eager").run()
    return peers["a"]


def test_the_best_epoch_is_one_of_the_last_stage():
    lines = []
    learner = learning(lines.append)
    learner.run()
    found = [line["peers"]["a"]["valid_accuracy"] for line in lines]
    assert max(found[:4]) > max(found[4:]) > found[-1]
    assert accuracy(learner.peers["a"], made_data().validation) == pytest.approx(found[-1])
    learner.evaluator.take_best()
    assert accuracy(learner.peers["a"], made_data().validation) == pytest.approx(max(found[4:]))
    last = learning(keep="last")
    last.run()
    last.evaluator.take_best()
    assert accuracy(last.peers["a"], made_data().validation) == pytest.approx(found[-1])


def test_the_best_epoch_outlives_an_interruption_at_any_step():
    saved = []

    def save(tensors, about):
        saved.append(({name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(about)))

    whole = learning(save=save, checkpoint_every=1)
    whole.run()
    whole.evaluator.take_best()
    expected = whole.peers["a"].state()
    assert len(saved) == 28
    for tensors, about in saved[::4]:
        resumed = learning()
        resumed.restore(tensors, json.loads(json.dumps(about)))
        resumed.run()
        resumed.evaluator.take_best()
        for name, tensor in resumed.peers["a"].state().items():
            assert torch.equal(tensor, expected[name]), (about["position"]["step"], name)


def test_best_needs_something_to_judge_by():
    with pytest.raises(InputError, match=r"keep = 'best' needs a validation split; set data\.validation"):
        Learner(made_recipe(made_stage(1, 0.1)), {"a": Point(small())}, replace(made_data(), validation=None), 0)


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # raised inside torch's tracer
@pytest.mark.parametrize("kind", ["tdiv_sdiv", "conf_ods"])
@pytest.mark.usefixtures("traced")
def test_compiled_and_eager_steps_of_a_distillation_agree(kind):
    stage = made_stage(1, 0.05, distil={"teachers": "one_to_one"}) | {"perturb": {"kind": kind}}
    found = {}
    for name in ("eager", "compiled"):
        given = Teachers([Point(small(1)), MeanField(small(2), rho=-2.0)])
        peers, lines = {"a": RankOne(small(3), 2, factors="random", spread=0.3)}, []
        learner = Learner(made_recipe(stage), peers, made_data(), 0, teachers=given, engine=name, log=lines.append)
        learner.run()
        assert learner.engine.name == name
        found[name] = peers["a"].state(), lines[0]["peers"]["a"]["loss"]
    assert found["compiled"][1] == pytest.approx(found["eager"][1], rel=1e-4)
    for name, tensor in found["eager"][0].items():
        torch.testing.assert_close(found["compiled"][0][name], tensor, rtol=1e-4, atol=1e-5)


def without_slope(plain, images, tensors, autocast):
    return run_functional(plain, images.detach(), tensors, autocast) + 0 * images.sum()


def too_sure(*arguments):
    return 9 * run_functional(*arguments)


@pytest.mark.parametrize(
    ("kind", "wrong", "told"),
    [
        ("tdiv", without_slope, "what perturb 'tdiv' asks of networks to something whose gradient has a norm of 0 "),
        ("tdiv_sdiv", without_slope, "what perturb 'tdiv_sdiv' asks of networks to something whose gradient has"),
        ("bald", without_slope, "what perturb 'bald' asks of networks to something whose gradient has a norm of 0 "),
        ("gaussian", too_sure, "the teachers to ones whose logits have a norm of"),
        ("none", too_sure, "the teachers to ones whose logits have a norm of"),
        ("gaussian", without_slope, None),  # nobody asks for it
        ("tdiv_sdiv", run_functional, None),
    ],
)
def test_a_compiler_that_changes_teachers_is_left(kind, wrong, told, monkeypatch):
    said = []

    class Listening(Reporter):
        def warn(self, text):
            said.append(text)

    stage = made_stage(1, 0.05, distil={"teachers": "one_to_one"}) | {"perturb": {"kind": kind}}
    given = Teachers([known(1), MeanField(small(2), rho=-2.0)])
    peers = {"a": RankOne(small(3), 2, factors="random", spread=0.3)}
    monkeypatch.setattr(
        engine, "compiled", lambda function: wrong if function.__name__ == "run_functional" else function
    )
    recipe = made_recipe(stage)
    learner = Learner(recipe, peers, made_data(), 0, teachers=given, engine="compiled", reporter=Listening())
    learner.run()
    assert learner.engine.name == ("compiled" if told is None else "eager")
    found = [text.partition(" compiles ")[2] for text in said if "compiled engine" in text]
    assert [text[: len(told or "")] for text in found] == ([] if told is None else [told])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "gaussian", "ods", "conf_ods", "tdiv", "tdiv_sdiv", "bald"])
def test_captured_steps_of_a_distillation_agree_with_eager_ones_on_a_gpu(kind):
    stage = made_stage(3, 0.05, distil={"teachers": "one_to_one"}) | ({"perturb": {"kind": kind}} if kind else {})
    whole = made_data()
    data = replace(whole, train=ArraySplit(whole.train.images.cuda(), whole.train.labels.cuda()))
    found = {}
    for name in ("eager", "captured"):
        given = Teachers([Point(small(1)).cuda(), MeanField(small(2), rho=-2.0).cuda(), Point(small(4)).cuda()])
        peers, lines = {"a": RankOne(small(3), 3, factors="random", spread=0.3).cuda()}, []
        learner = Learner(made_recipe(stage), peers, data, 0, teachers=given, engine=name, log=lines.append)
        learner.run()
        assert learner.engine.name == name
        found[name] = peers["a"].state(), lines[-1]["peers"]["a"]["loss"]
    assert found["captured"][1] == pytest.approx(found["eager"][1], rel=1e-5)
    for name, tensor in found["eager"][0].items():
        torch.testing.assert_close(found["captured"][0][name], tensor, rtol=1e-4, atol=1e-6)


# ---- one network ----------------------------------------------------------------------------------------------------


def assert_same_prediction(network, posterior, images):
    with torch.no_grad():
        expected = network.eval()(to_unit(images)).log_softmax(-1)
    found = posterior.predict(images, calibrated=False)  # the file has the network without its temperature
    torch.testing.assert_close(found.log_probabilities, expected, rtol=1e-4, atol=1e-4)


def plain_network(run, name):
    """A network that knows nothing of posteriors, with what the command has written."""
    data = load_data(run.recipe)
    found = networks.build(name, networks.Inputs(data.classes, data.shape, data.mean, data.std))
    found.load_state_dict(load_file(run.folder / "network-student.safetensors"), strict=True)
    return found, data.test


def test_a_teacher_that_is_not_there_is_named(tmp_path, runs, capsys):
    found = refused(capsys, "distill", runs["three"], tmp_path / "nobody", "--run", tmp_path / "x", "--device", "cpu")
    assert found == f"{tmp_path / 'nobody'}: there is no such run folder, weights file of a run, or recipe"
    assert list(tmp_path.iterdir()) == []


def test_a_teacher_that_a_recipe_names_and_that_is_not_there_is_called_what_it_looks_like(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    places = (tmp_path / "a", "./a", "../a", "~/of-nobody/a", "runs/a", "runs/a.safetensors", "a.safetensors")
    sentences = {place: f"there is no run folder or weights file '{place}'" for place in places}
    sentences["runs"] = "runs: not a run folder (it has no recipe.toml)"
    sentences["distillation/kdd"] = "there is no recipe 'distillation/kdd'; did you mean 'distillation/kd'?"
    sentences["nobody"] = "there is no recipe 'nobody'; see 'peerbayes recipes list'"
    sentences["runs/a.toml"] = "runs/a.toml: no such recipe file"
    for given, sentence in sentences.items():
        found = refused(capsys, "train", "distillation/kd", *change(f"teachers.runs=['{given}']"), *QUIET)
        assert found == f"teachers.runs: {sentence}"
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_the_command_distils_runs_into_a_plain_network(runs, tmp_path):
    given = [runs["resnet"], runs["resnet again"]]
    before = [contents(folder) for folder in given]
    words = ("--run", tmp_path / "run", "--set", "stages.0.epochs=2", "--json", "--device", "cpu")
    done = process("distill", *given, *words)
    assert done.returncode == 0, done.stderr
    assert [contents(folder) for folder in given] == before
    record, found = json.loads(done.stdout), Run(tmp_path / "run")
    assert str(tmp_path / "run" / "network-student.safetensors") in done.stderr
    assert found.recipe.data == Run(given[0]).recipe.data
    assert found.recipe.peers[0].network == "resnet8"
    assert found.recipe.peers[0].posterior.members == 2
    network, test = plain_network(found, "resnet8")
    assert_same_prediction(network, found["student"], test.images)
    with torch.no_grad():
        hits = network.eval()(to_unit(test.images)).argmax(-1) == test.labels
    assert record["method"] == "latentbe"
    assert record["peers"][0]["accuracy"] == pytest.approx(float(hits.double().mean()), abs=1e-6)


def test_members_are_judged_as_one_network_by_each_way_to_average_them(student, teachers, capsys):
    before = contents(student.folder)
    found = process("evaluate", student.folder, "--averaged", "--json", "--device", "cpu")
    assert found.returncode == 0, found.stderr
    record = json.loads(found.stdout)
    (peer,) = record["peers"]
    ways = peer["averaged"]
    assert list(ways) == ["exact", "exact, recalibrated", "factor_mean", "factor_mean, recalibrated"]
    assert all(ways["exact"][key] == pytest.approx(peer[key], abs=1e-5) for key in ways["exact"])
    data = load_data(student.recipe)
    for way, figures in ways.items():
        merge, _, again = way.partition(", ")
        network = student["student"].average(merge)
        if again:
            recalibrate(network, data.train, augment=student.recipe.data.augment)
        with torch.no_grad():
            logits = network.eval()(to_unit(data.test.images))
        assert figures["nll"] == pytest.approx(float(F.cross_entropy(logits, data.test.labels)), rel=1e-4)
    assert len({figures["nll"] for figures in ways.values()}) == 4
    text = text_table([record], calibrated=True)
    for way in ways:
        assert f"in one pass ({way}):" in text
    assert contents(student.folder) == before
    told = refused(capsys, "evaluate", teachers.folder, "--averaged", "--device", "cpu")
    assert told == f"--averaged: no peer of {teachers.folder} has weights to average: all are plain networks"


def test_a_recipe_is_a_teacher_that_is_trained_first_wherever_it_stands(runs, tmp_path):
    data = Run(runs["three"]).recipe.data
    (tmp_path / "other.toml").write_text(TEACHER.replace("DATA", data.name).replace("NETWORK", "mlp"))
    given = [runs["three"], tmp_path / "other.toml"]
    for name, teachers in (("last", given), ("first", given[::-1])):
        words = ("--run", tmp_path / name, "--into", "distillation/kd", *QUIET, *change("stages.0.epochs=1"))
        assert "student" in called("distill", *teachers, *words)
        assert Run(tmp_path / name).recipe.data == data
    assert len(list(tmp_path.glob("*other-seed0*/weights-only.safetensors"))) == 1


def test_a_teachers_recipe_may_leave_its_network_and_members_to_teachers_of_its_own(runs, tmp_path):
    given = [str(runs["resnet"]), str(runs["resnet again"])]
    quick = "'stages.0.epochs=1', 'stages.0.warmup=0', 'data.batch_size=24'"
    inner = f"extends = 'distillation/latentbe'\nset = [{quick}, \"teachers.runs={given}\"]\n"
    (tmp_path / "inner.toml").write_text(inner)
    table = Run(runs["three"]).recipe.model_dump(exclude_none=True)["data"]
    quick = ["stages.0.epochs=1", "stages.0.warmup=0", f"teachers.runs=['{tmp_path / 'inner.toml'}']"]
    recipe = load_recipe("distillation/kd", quick)
    data = recipe.data.model_copy(update={**table, "classes": 3})
    run = train(recipe.model_copy(update={"data": data}), tmp_path / "student", device="cpu")
    assert [peer.network for peer in run.recipe.peers] == ["resnet8"]
    (teacher,) = tmp_path.glob("*inner-seed0*")
    assert Run(teacher)["student"].members == 2


def test_a_weights_file_is_one_teacher(teachers, tmp_path):
    path = teachers.folder / "weights-teacher2.safetensors"
    changes = [f"teachers.runs=['{path}']", "stages.0.perturb.kind=ods", "data.validation=1000"]
    node = planned(load_recipe("distillation/latentbe", changes), tmp_path)
    assert node.recipe.peers[0].posterior.members == 1
    found = build_teachers(node, load_data(node.recipe), torch.device("cpu"))
    assert len(found) == 1
    assert torch.equal(found.posteriors[0].mean, teachers["teacher2"].mean)
    assert not torch.equal(teachers["teacher1"].mean, teachers["teacher2"].mean)


def test_peers_may_be_chosen_to_teach(teachers, tmp_path, capsys):
    chosen, into = "teachers.peers=['teacher2']", ["--into", "distillation/kd"]
    less = change("stages.0.epochs=1", *SMALL)
    called("distill", teachers.folder, *into, "--run", tmp_path / "peer", *less, *change(chosen), *QUIET)
    file = teachers.folder / "weights-teacher2.safetensors"
    called("distill", file, *into, "--run", tmp_path / "file", *less, *QUIET)
    learnt = [load_file(tmp_path / run / "network-student.safetensors") for run in ("peer", "file")]
    for name, values in learnt[0].items():
        assert torch.equal(values, learnt[1][name]), name
    found = distill_refused(capsys, tmp_path, teachers.folder, *into, *change("teachers.peers=['me']"))
    assert found == "teachers.peers: no teacher is called 'me'; there are teacher1, teacher2"
    found = distill_refused(capsys, tmp_path, file, *into, *change("teachers.peers=['teacher1']"))
    assert found == "teachers.peers: no teacher is called 'teacher1'; there are teacher2"
    other = teachers.folder / "weights-teacher1.safetensors"
    found = distill_refused(capsys, tmp_path, file, other, *into, *change(chosen))
    assert found == f"teachers.peers: no peer of '{other}' is selected; it has teacher1"
    found = distill_refused(capsys, tmp_path, teachers.folder, *change(chosen))
    assert "'tdiv_sdiv' compares teachers, but there is only one" in found
    with pytest.raises(InputError, match=r"^overrides: 'teachers.peers' has no effect here; give the teachers"):
        pb.distill([teachers], teachers["teacher2"].materialise(), run=tmp_path / "python", overrides=chosen)


LITTLE = ["stages.0.epochs=2", "stages.0.warmup=0", "data.batch_size=12", "stages.0.optimizer.lr=0.02"]


@pytest.mark.parametrize("recipe", ["distillation/latentbe", "distillation/kd"])
def test_distill_returns_a_plain_module_of_the_networks_own_class(tmp_path, recipe):
    given, into = [Point(small(1)), Point(small(2)), MeanField(small(3))], small(9)
    before = copy.deepcopy(into.state_dict())
    kept = [copy.deepcopy(posterior.state_dict()) for posterior in given]
    found = pb.distill(
        given, into, data=made_data(), run=tmp_path / "run", recipe=recipe, overrides=[*LITTLE, "teachers.draws=2"]
    )
    assert type(found) is Small
    assert list(found.state_dict()) == list(before)
    assert [type(module) for module in found.modules()] == [type(module) for module in into.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in found.modules())
    assert all(torch.equal(into.state_dict()[name], tensor) for name, tensor in before.items())
    assert not torch.equal(found.head.weight, into.head.weight)
    for posterior, own in zip(given, kept):
        assert all(torch.equal(posterior.state_dict()[name], tensor) for name, tensor in own.items())
    trained = pb.load(tmp_path / "run", {"student": small()})["student"]
    assert trained.members == (4 if recipe == "distillation/latentbe" else 1)
    images = made_data().test.images
    assert not any(module.training for module in found.modules())  # it predicts as it is handed over
    assert_same_prediction(found, trained, images)
    found(to_unit(images)).sum().backward()  # and it may go on learning
    assert all(p.grad is not None for p in found.parameters())


def test_a_student_learns_what_its_teachers_know(tmp_path):
    data, given = made_data(), {"a": Point(small(1)), "b": Point(small(2))}
    run = pb.fit(given, data=data, recipe=made_recipe(made_stage(12, 0.3)), run=tmp_path / "teachers")
    with torch.no_grad():
        target = sum(p.materialise().eval()(to_unit(data.test.images)).softmax(-1) for p in given.values()) / 2

    def divergence(network):
        with torch.no_grad():
            found = network.eval()(to_unit(data.test.images)).log_softmax(-1)
        return float(F.kl_div(found, target, reduction="batchmean"))

    found = pb.distill(
        [run], small(9), data=data, run=tmp_path / "run", overrides=["stages.0.epochs=15", "data.batch_size=12"]
    )
    assert divergence(found) < 0.2 * divergence(small(9))


def test_a_run_brings_the_data_that_its_student_learns(teachers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = networks.build("mlp", networks.Inputs(10, (1, 8, 8), (0.3,), (0.4,)))
    pb.distill(teachers, net, recipe="distillation/kd", overrides=["stages.0.epochs=1"], seed=3)
    run = Run("runs/distillation-kd-seed3")
    assert run.recipe.data.model_copy(update={"classes": 10}) == teachers.recipe.data
    assert (run.seed, run.finished) == (3, True)


def test_folders_and_files_of_runs_teach_as_runs_do(teachers, tmp_path):
    net = networks.build("mlp", networks.Inputs(10, (1, 8, 8), (0.3,), (0.4,)))
    file = teachers.weights_file("teacher2")
    how = {"recipe": "distillation/kd", "overrides": ["stages.0.epochs=1"], "data": load_data(teachers.recipe)}
    ways = {"run": teachers, "folder": teachers.folder, "text": str(teachers.folder), "file": [file]}
    ways["alone"] = teachers["teacher2"]
    found = {way: pb.distill(given, net, run=tmp_path / way, **how).state_dict() for way, given in ways.items()}
    for name, tensor in found["run"].items():
        assert torch.equal(found["folder"][name], tensor)
        assert torch.equal(found["text"][name], tensor)
        assert torch.equal(found["file"][name], found["alone"][name])
    assert not all(torch.equal(found["file"][name], tensor) for name, tensor in found["run"].items())
    for way, given in (("own", teachers.folder), ("peers", list(teachers.values()))):
        found[way] = pb.distill(given, net, run=tmp_path / way, **(how | {"data": None})).state_dict()
        assert Run(tmp_path / way).recipe.data.batch_size == teachers.recipe.data.batch_size
    for name, tensor in found["own"].items():
        assert torch.equal(found["peers"][name], tensor)


def test_random_factors_of_a_student_follow_the_seed(tmp_path):
    still = ["stages.0.epochs=1", "stages.0.optimizer={name='sgd', lr=1e-30}", "peers.0.posterior.factors=random"]
    found = []
    for seed in (0, 1):
        run = tmp_path / f"run{seed}"
        pb.distill([Point(small(1)), Point(small(2))], small(9), data=made_data(), run=run, seed=seed, overrides=still)
        found.append(pb.load(run, {"student": small()})["student"].deviations)
    assert not torch.equal(*found)


# ---- what is refused, from Python -----------------------------------------------------------------------------------


def distil(tmp_path, *given, recipe="distillation/kd", changes=(), **options):
    options = {"data": made_data(), "run": tmp_path / "run", "recipe": recipe, "normalize": None} | options
    return pb.distill(given, small(), overrides=[*LITTLE, *changes], **options)


def test_of_ones_own_data_nothing_is_held_out_unless_that_is_asked_for(tmp_path):
    """The recipe holds out images of its own data, more than there are here."""
    data = replace(made_data(), validation=None)
    np.savez(tmp_path / "own.npz", train_images=data.train.images.numpy(), train_labels=data.train.labels.numpy())
    for changes, held in (((), 0), (("data.validation=5",), 5)):
        run = tmp_path / f"run{held}"
        distil(tmp_path, known(1), known(2), data=tmp_path / "own.npz", run=run, changes=changes)
        assert Run(run, {"student": small()}).recipe.data.validation == held


def test_the_network_is_written_beside_the_run_as_by_the_command(tmp_path):
    network = distil(tmp_path, known(1), known(2))
    state = load_file(tmp_path / "run" / "network-student.safetensors")
    assert state.keys() == network.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("name", ["mlp", "resnet8", "wrn28x1", "fasttext", "timm/test_resnet", "timm/test_vit"])
def test_the_file_of_a_network_is_loaded_strictly_by_a_network_of_its_name(name, tmp_path):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    text = {"shape": (20,), "mean": (), "std": (), "tokens": 50}
    image = {"shape": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    inputs = networks.Inputs(5, **(text if name == "fasttext" else image))
    student = RankOne(networks.build(name, inputs), 2, factors="random", predicts="average")

    class OneRun(dict):
        folder = tmp_path
        recipe = SimpleNamespace(peer=lambda _: SimpleNamespace(name="student", network=name))

    (path,) = save_networks(OneRun(student=student))
    found = networks.build(name, inputs)
    found.load_state_dict(load_file(path), strict=True)
    images = torch.randint(50, (3, 20)) if name == "fasttext" else torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(images), student.materialise()(images))


def test_the_guide_loads_the_file_of_a_network_of_timm_into_timms_own(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    inputs = networks.Inputs(5, (3, 64, 64), (0.4, 0.5, 0.6), (0.2,) * 3)
    student = pb.Point(networks.build("timm/test_resnet", inputs))

    class OneRun(dict):
        folder = tmp_path / "runs" / "mine"
        recipe = SimpleNamespace(peer=lambda _: SimpleNamespace(name="student", network="timm/test_resnet"))

    OneRun.folder.mkdir(parents=True)
    save_networks(OneRun(student=student))
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "distill.md").read_text()
    (code,) = re.findall(r"```python\n(import timm.*?)```", guide, re.DOTALL)
    code = code.replace('"resnet18", num_classes=10', '"test_resnet", num_classes=5')
    space = {"images": torch.rand(3, 3, 64, 64)}
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        exec(code, space)
        torch.testing.assert_close(space["logits"], student.materialise().eval()(space["images"]))


@pytest.mark.parametrize("classes", [5, 2, 1])
@pytest.mark.parametrize("recipe", ["distillation/kd", "distillation/latentbe"])
def test_teachers_with_other_classes_are_refused_in_python(tmp_path, recipe, classes):
    with pytest.raises(InputError, match=rf"teacher.*{classes}"):
        distil(tmp_path, *(Point(small(seed, classes=classes)) for seed in range(2)), recipe=recipe)
    assert not (tmp_path / "run").exists()


def test_teachers_with_another_input_shape_are_refused_in_python(tmp_path):
    with pytest.raises(InputError, match="teacher"):
        distil(tmp_path, Point(small(size=25)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["tdiv", "tdiv_sdiv", "bald"])
def test_a_single_teacher_is_refused_in_python(tmp_path, kind):
    with pytest.raises(InputError, match=f"perturb '{kind}' compares teachers, but there is only one"):
        distil(tmp_path, Point(small()), recipe="distillation/latentbe", changes=[f"stages.0.perturb.kind={kind}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": None}, "`data` is required: no posterior was loaded from a run; name the data, or give a run"),
        ({"seed": "x"}, "seed is 'x', expected a whole number that is 0 or more"),
        ({"recipes": "x"}, "distill has no option 'recipes'; did you mean 'recipe'"),
        ({"engine": "fast"}, "engine is 'fast', expected auto, eager"),
    ],
)
def test_options_that_distill_can_not_use_are_one_sentence(tmp_path, options, sentence):
    with pytest.raises(InputError, match=sentence):
        distil(tmp_path, Point(small()), **options)
    assert not (tmp_path / "run").exists()


def test_distill_without_teachers_is_refused(tmp_path):
    with pytest.raises(InputError, match="there are no teachers to distil"):
        distil(tmp_path)
    with pytest.raises(InputError, match=r"mutual/digits-dnn: expected one peer and a \[teachers\] table"):
        distil(tmp_path, Point(small()), recipe="mutual/digits-dnn")
    with pytest.raises(InputError, match="keep = 'best' needs a validation split"):
        distil(tmp_path, Point(small()), changes=["evaluation.keep=best"], data=replace(made_data(), validation=None))
    assert not (tmp_path / "run").exists()


# ---- what is refused, on the command line ---------------------------------------------------------------------------


TEACHER = """
title = "Teacher"
data = { name = "DATA", batch_size = 12, validation = 12 }
peers = [{ name = "only", network = "NETWORK", posterior = { kind = "point" } }]
evaluation = { draws = 1 }
[[stages]]
epochs = 1
optimizer = { name = "sgd", lr = 0.1 }
terms = { likelihood = {} }
"""


def tiny_run(folder, classes=3, side=8, network="mlp", seed=0):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 255, (60, side, side), dtype=np.uint8), np.arange(60) % classes
    path = folder / f"data{classes}-{side}.npz"
    np.savez(path, train_images=pixels[:48], train_labels=labels[:48], test_images=pixels[48:], test_labels=labels[48:])
    recipe = folder / "teacher.toml"
    recipe.write_text(TEACHER.replace("DATA", str(path)).replace("NETWORK", network))
    run = folder / f"run-{network}-{classes}-{side}-{seed}"
    return train(load_recipe(recipe), run, device="cpu", seed=seed).folder


@pytest.fixture(scope="module")
def runs(place):
    """Teachers of one peer: on three classes, on five, on larger images, and of another network."""
    return {
        "three": tiny_run(place),
        "five": tiny_run(place, classes=5),
        "large": tiny_run(place, side=10),
        "resnet": tiny_run(place, network="resnet8"),
        "resnet again": tiny_run(place, network="resnet8", seed=1),
    }


def distill_refused(capsys, tmp_path, *words):
    found = refused(capsys, "distill", *words, "--run", tmp_path / "student", *QUIET, *change("stages.0.epochs=1"))
    assert not (tmp_path / "student").exists()
    return found


@pytest.mark.parametrize("into", ["distillation/kd", "distillation/latentbe"])
def test_teachers_that_know_other_classes_or_shapes_are_refused(runs, tmp_path, capsys, into):
    found = distill_refused(capsys, tmp_path, runs["three"], runs["five"], "--into", into)
    assert found == f"teacher {runs['five'].resolve()}: knows 5 classes, but data3-8 has 3"
    found = distill_refused(capsys, tmp_path, runs["three"], runs["large"], "--into", into)
    assert found == f"teacher {runs['large'].resolve()}: takes inputs of shape (1, 10, 10), but data3-8 has (1, 8, 8)"


def test_nobody_teaches_twice(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = runs["three"]
    for again in (one, os.path.relpath(one), one / "weights-only.safetensors"):
        found = distill_refused(capsys, tmp_path, one, again, "--into", "distillation/kd")
        assert found == f"teachers.runs: '{again}' would let peer 'only' teach twice"
    given = change("teachers.runs=['distillation/digits-resnet8-de1', 'distillation/digits-resnet8-de1']")
    found = refused(capsys, "train", "distillation/kd", "--run", tmp_path / "student", *given, *QUIET)
    assert found == "teachers.runs: 'distillation/digits-resnet8-de1' would let peer 'teacher1' teach twice"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:the .* of peer '.*' do not move")  # by a rate of 1e-30
def test_teachers_of_a_recipe_have_the_seed_of_their_students_and_are_trained_once(runs, tmp_path):
    data = Run(runs["three"]).recipe.data
    pair = tmp_path / "pair.toml"
    pair.write_text(TEACHER.replace("DATA", data.name).replace("NETWORK", "mlp").replace("lr = 0.1", "lr = 1e-30"))
    table = load_recipe(pair).model_dump(exclude_none=True)
    table["peers"] = [table["peers"][0] | {"name": name} for name in ("one", "two")]
    pair.write_text(Recipe.parse(table, "pair").to_toml())
    given = [f"teachers.runs=['{pair}']", f"data={{name='{data.name}', validation=12}}", "stages.0.epochs=1"]
    folders = set()
    for name, seed in (("first", 3), ("second", 3), ("third", 4)):
        train(load_recipe("distillation/kd", given), tmp_path / "runs" / name, seed=seed, device="cpu")
        beside = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*pair*/*")}
        folders.add(tuple(sorted(beside.items())))
    assert len(folders) == 2  # the second student found its teachers
    teachers = [Run(path) for path in sorted((tmp_path / "runs").glob("*pair*"))]
    assert [run.seed for run in teachers] == [3, 4]
    weights = [run[name].mean for run in teachers for name in run]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(weights, 2))


def copied(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "teacher"))


def test_teachers_that_were_trained_again_are_told_and_others_refused(runs, tmp_path, capsys):
    def interrupted(source, name):
        """Train a student, and leave it as it was after its first epoch, under other teachers."""
        recipe = load_recipe("distillation/kd", [f"teachers.runs=['{source}']", "stages.0.epochs=2", *own])
        run = train(recipe, tmp_path / name, device="cpu", checkpoint_every=2)
        about = json.loads((run.folder / "run.json").read_text())
        about |= {"finished": False, "origins": {"the teachers": "0123456789abcdef"}}
        (run.folder / "run.json").write_text(json.dumps(about))
        return recipe, run.folder

    data = Run(runs["three"]).recipe.data.name
    own = [f"data.name={data}", "data.classes=3", "data.batch_size=12", "data.validation=0", "peers.0.network=mlp"]
    pair = tmp_path / "pair.toml"
    pair.write_text(TEACHER.replace("DATA", data).replace("NETWORK", "mlp"))
    recipe, folder = interrupted(pair, "by-recipe")
    told = []

    class Heard(Reporter):
        def warn(self, text):
            told.append(text)

    train(recipe, folder, device="cpu", resume=True, reporter=Heard())
    assert any(f"{pair} has been trained again since, and its peers learn from others" in text for text in told), told
    assert json.loads((folder / "run.json").read_text())["origins"] == {"the teachers": "0123456789abcdef"}
    recipe, folder = interrupted(runs["three"], "by-folder")
    with pytest.raises(InputError, match="by-folder: holds a run whose peers learn from other teachers"):
        train(recipe, folder, device="cpu", resume=True)


def test_a_teacher_with_a_damaged_weights_file_is_refused(runs, tmp_path, capsys):
    run = copied(runs["three"], tmp_path)
    path = run / "weights-only.safetensors"
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:-1], b"", whole[:-9] + b"\1" + whole[-8:]):
        path.write_bytes(data)
        found = distill_refused(capsys, tmp_path, run, "--into", "distillation/kd")
        assert str(path) in found
    path.unlink()
    assert f"{path}: no such file" in distill_refused(capsys, tmp_path, run, "--into", "distillation/kd")


def test_an_unfinished_teacher_is_refused(runs, tmp_path, capsys):
    run = copied(runs["three"], tmp_path)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"finished": False}))
    found = distill_refused(capsys, tmp_path, run, "--into", "distillation/kd")
    assert found == f"{run}: the run is not finished; the command that began it goes on with it, with --resume"
    (run / "run.json").unlink()
    assert "run.json: no such file" in distill_refused(capsys, tmp_path, run, "--into", "distillation/kd")


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "no run around it", "another peer", "network"])
def test_what_is_no_run_is_no_teacher(runs, tmp_path, capsys, kind):
    given = tmp_path / "given"
    if kind == "empty":
        given.mkdir()
    elif kind == "file":
        given.write_text("hello")
    elif kind == "no run around it":
        given = given.with_suffix(".safetensors")
        shutil.copy(runs["three"] / "weights-only.safetensors", given)
    elif kind in ("another peer", "network"):
        name = "weights-other" if kind == "another peer" else "network-only"
        given = copied(runs["three"], tmp_path) / f"{name}.safetensors"
        shutil.copy(runs["three"] / "weights-only.safetensors", given)
    first = distill_refused(capsys, tmp_path, given, "--into", "distillation/kd")
    second = distill_refused(capsys, tmp_path, runs["three"], given, "--into", "distillation/kd")
    for found in (first, second):
        assert str(given if kind != "no run around it" else tmp_path) in found


@pytest.mark.parametrize("kind", ["tdiv", "tdiv_sdiv", "bald"])
def test_a_single_teacher_is_refused(runs, tmp_path, capsys, kind):
    found = distill_refused(capsys, tmp_path, runs["three"], *change(f"stages.0.perturb.kind={kind}"))
    assert found == (
        f"stages.0.perturb: '{kind}' compares teachers, but there is only one; give it two or more, or take a recipe "
        "for one, such as distillation/kd"
    )


def test_a_recipe_for_a_single_teacher_is_named_that_has_its_data(tmp_path, capsys):
    quick = ["stages.0.epochs=1", "data.batch_size=600", "gradient_share_every=0"]
    posteriors = ("{kind='point'}", "{kind='mean_field'}")
    for number, posterior in enumerate(posteriors):
        recipe = load_recipe("distillation/digits-resnet8-de1", [*quick, f"peers.0.posterior={posterior}"])
        found = train(recipe, tmp_path / str(number), device="cpu")
        sentence = distill_refused(capsys, tmp_path, found.folder, "--into", "distillation/latentbe")
        fitting = "distillation/digits-resnet8-single-kd"
        assert sentence.endswith(f", or take a recipe for one, such as {fitting}")
        assert ("set teachers.draws above 1" in sentence) == (number == 1)
    words = ("distill", found.folder, "--into", fitting, "--run", tmp_path / "student", *QUIET)
    assert "student" in called(*words, *change("stages.0.epochs=1", "data.batch_size=600"))


def test_teachers_of_different_networks_are_refused_where_one_is_picked(runs, tmp_path, capsys):
    found = distill_refused(capsys, tmp_path, runs["three"], runs["resnet"])
    assert found == (
        "perturb 'tdiv_sdiv' picks teachers at random, which must have one network in common; set "
        "stages.*.perturb.kind=bald, which looks at all of them, or none"
    )
    for kind in ("bald", "none"):
        words = ("--run", tmp_path / kind, *QUIET, *change("stages.0.epochs=1", f"stages.*.perturb.kind={kind}"))
        assert "student" in called("distill", runs["three"], runs["resnet"], *words)
    stages = [Run(tmp_path / kind).recipe.stages[0] for kind in ("bald", "none")]
    assert [stage.perturb.kind if stage.perturb else None for stage in stages] == ["bald", None]


def test_a_wrong_number_of_members_is_refused(runs, tmp_path, capsys):
    words = change("peers.0.posterior.members=3")
    found = distill_refused(capsys, tmp_path, runs["resnet"], runs["resnet again"], *words)
    assert found.startswith("perturb 'tdiv_sdiv' compares the members of one rank-one student, 2 as there are teachers")
    found = distill_refused(
        capsys, tmp_path, runs["resnet"], runs["resnet again"], *words, *change("stages.0.perturb.kind=ods")
    )
    assert found == (
        "stages.0.terms.distil: teaches one to one, but peer 'student' has 3 members and there are 2 teachers"
    )  # fmt: skip


def test_a_teacher_with_a_network_of_its_own_is_refused(runs, tmp_path, capsys):
    path = next(runs["three"].parent.glob("data3-8.npz"))
    recipe = made_recipe(made_stage(1, 0.1), evaluation={"keep": "last"})
    pb.fit({"mine": Point(small(size=64))}, data=path, recipe=recipe, run=tmp_path / "teacher")
    found = distill_refused(capsys, tmp_path, tmp_path / "teacher", "--into", "distillation/kd")
    assert found.startswith(f"{tmp_path / 'teacher'}: peer 'mine' has a network of your own")


@pytest.mark.parametrize("predicts", ["members", "average"])
def test_members_and_network_are_left_to_the_teachers(runs, tmp_path, predicts):
    posterior = f"peers.0.posterior={{kind='rank_one', members=3, predicts='{predicts}'}}"
    found = train(load_recipe(runs["three"] / "recipe.toml", [posterior]), tmp_path / "teacher", device="cpu")
    changes = [f"teachers={{runs=['{found.folder}', '{runs['three']}'], draws=2}}", "data.classes=3"]
    recipe = load_recipe("distillation/latentbe", changes)
    job = planned(recipe, tmp_path)
    assert job.recipe.peers[0].network == "mlp"
    teachers = build_teachers(job, load_data(found.recipe), torch.device("cpu"))
    assert job.recipe.peers[0].posterior.members == len(teachers) == (3 if predicts == "members" else 2)


def test_a_student_has_the_network_of_the_peer_that_teaches_it_not_of_another_in_its_run(tmp_path):
    tiny_run(tmp_path)
    both = "[{ name = 'small', network = 'mlp', posterior = { kind = 'point' } }, "
    both += "{ name = 'large', network = 'resnet8', posterior = { kind = 'point' } }]"
    recipe = load_recipe(tmp_path / "teacher.toml", [f"peers={both}"])
    run = train(recipe, tmp_path / "both", device="cpu").folder
    for name, network in (("small", "mlp"), ("large", "resnet8")):
        given = f"teachers.runs=['{run / f'weights-{name}.safetensors'}']"
        assert planned(load_recipe("distillation/kd", [given]), tmp_path).recipe.peers[0].network == network


def test_best_without_validation_is_refused(runs, tmp_path, capsys):
    words = ("--into", "distillation/kd", *change("evaluation.keep=best", "data.validation=0"))
    found = distill_refused(capsys, tmp_path, runs["three"], *words)
    assert found == "evaluation.keep = 'best' needs a validation split; set data.validation"


def test_a_recipe_without_teachers_is_refused(runs, tmp_path, capsys):
    found = distill_refused(capsys, tmp_path, runs["three"], "--into", "mutual/digits-dnn")
    assert found == "recipe mutual/digits-dnn: has no [teachers] table, so nobody would learn from the runs"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("stages.0.perturb={kind='tdiv'}", "perturb 'tdiv' needs teachers, but the recipe has none"),
        ("stages.0.terms.distil={}", "stages.0.terms.distil: needs teachers, but the recipe has none"),
        ("stages.0.terms.proxy_end2={}", "stages.0.terms.proxy_end2: needs teachers, but the recipe has none"),
    ],
)
def test_learning_from_nobody_is_refused(tmp_path, capsys, setting, sentence):
    found = refused(capsys, "train", "mutual/digits-dnn", "--run", tmp_path / "run", *QUIET, *change(setting))
    assert found == f"{sentence}; add a [teachers] table"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "terms", "peer"),
    [
        ("mutual/digits-dnn", "kl = {}", "scratch"),  # a point has none
        ("mutual/digits-dnn", "mutual = {}, weight_diversity = {}", "scratch"),  # alone
        ("renyi/digits-resnet8-dml", "mutual = { graph = [{ teacher = 'first', student = 'second' }] }", "first"),
    ],
)
def test_a_peer_that_no_term_teaches_anything_is_refused(tmp_path, capsys, recipe, terms, peer):
    words = change(f"stages.0.terms={{ {terms} }}", "stages.0.epochs=1")
    found = refused(capsys, "train", recipe, "--run", tmp_path / "run", *QUIET, *words)
    names = "mutual, weight_diversity" if "weight" in terms else terms.split()[0]
    told = f"peer '{peer}' can't learn from {names} alone: no gradient reaches it; add likelihood, say"
    assert found == f"stages.0.terms: {told}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("stages.0.perturb={kind='fgsm'}", "stages.0.perturb.kind"),
        ("stages.0.perturb={kind='ods', temperature=0}", "stages.0.perturb.temperature"),
        ("stages.0.terms.distil.cap=0", "stages.0.terms.distil.cap"),
        ("stages.0.terms.distil.teachers=all", "stages.0.terms.distil.teachers"),
        ("teachers.draws=0", "teachers.draws"),
        ("teachers.runs=[]", "teachers.runs"),
        ("evaluation.keep=first", "evaluation.keep"),
        ("peers.0.posterior={kind='rank_one', members=-1}", "members"),
    ],
)
def test_settings_of_distillation_are_refused_by_name(tmp_path, capsys, setting, name):
    words = ("--run", tmp_path / "run", *QUIET, *change(setting))
    assert name in refused(capsys, "train", "distillation/digits-resnet8-kd-de4", *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("length", [1, 2])
def test_recipes_that_teach_each_other_are_refused(tmp_path, capsys, monkeypatch, length):
    probes, begin = [], Learner.__init__

    def counted(self, *rest, **options):
        probes.append(self)
        assert len(probes) < 5, "going round and round"
        begin(self, *rest, **options)

    monkeypatch.setattr(Learner, "__init__", counted)
    paths = [tmp_path / f"circle{number}.toml" for number in range(length)]
    for path, other in zip(paths, [*paths[1:], paths[0]]):
        path.write_text(f'extends = "distillation/digits-resnet8-kd-de4"\nset = ["teachers.runs=[\'{other}\']"]\n')
    found = refused(capsys, "train", paths[0], "--run", tmp_path / "run", *QUIET)
    assert "circle" in found
    assert not (tmp_path / "run").exists()


# ---- texts ----------------------------------------------------------------------------------------------------------

TEXTS = """
title = "texts"
data = { name = "DATA", batch_size = 8, text = { tokens = "words", length = 6, buckets = 50 } }
peers = [{ name = "a", network = "fasttext", posterior = { kind = "point" } }]
evaluation = { draws = 1 }
stages = [{ epochs = 1, optimizer = { lr = 0.1 }, terms = { likelihood = {} } }]
"""


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "news").mkdir()
    for split in ("train", "test"):
        with open(tmp_path / "news" / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [[1 + n % 2, ("goal team win", "bank price fund")[n % 2], "end"] for n in range(24)]
            )
    (tmp_path / "texts.toml").write_text(TEXTS.replace("DATA", str(tmp_path / "news")))
    train(load_recipe(tmp_path / "texts.toml"), tmp_path / "teacher", device="cpu")
    return tmp_path / "teacher"


def test_texts_are_distilled_but_not_perturbed(texts, tmp_path, capsys):
    words = ("--into", "distillation/kd")
    for kind in ("gaussian", "ods"):
        found = distill_refused(capsys, tmp_path, texts, *words, *change(f"stages.0.perturb={{kind='{kind}'}}"))
        assert found == f"perturb '{kind}' is for images: set stages.*.perturb.kind=none for texts"
    words += ("--run", str(tmp_path / "student"), *QUIET, *change("stages.0.epochs=9"))
    with pytest.raises(SystemExit) as end:
        cli.main(["distill", str(texts), *words])
    assert not end.value.code
    lines = Run(tmp_path / "student").metrics
    assert lines[-1]["peers"]["student"]["loss"] < lines[0]["peers"]["student"]["loss"]


def test_texts_are_distilled_through_averaged_members(texts, tmp_path):
    shutil.copytree(texts, tmp_path / "again")
    words = ("--run", tmp_path / "student", *QUIET, *change("stages.0.epochs=9", "stages.*.perturb.kind=none"))
    called("distill", texts, tmp_path / "again", *words)
    run = Run(tmp_path / "student")
    assert run["student"].members == 2
    assert run.metrics[-1]["peers"]["student"]["loss"] < run.metrics[0]["peers"]["student"]["loss"]


def test_texts_have_no_figure_of_perturbations(texts, tmp_path, capsys):
    shutil.copytree(texts, tmp_path / "again")
    words = ("--into", "distillation/kd", "--run", tmp_path / "student", *QUIET, *change("stages.0.epochs=1"))
    called("distill", texts, tmp_path / "again", *words)
    found = refused(capsys, "figure", "perturbations", tmp_path / "student", "--out", tmp_path / "x.png")
    assert found == f"{tmp_path / 'student'}: was trained on texts, which cannot be perturbed; expected a run on images"


# ---- the packaged recipes -------------------------------------------------------------------------------------------

RECIPES = [name for name in packaged() if name.startswith("distillation/")]
# METHODS 4.4: epochs, batch size, weight decay, (alpha, temperature), validation images.
PAPER = {
    "cifar10-": (200, 128, 5e-4, (1.0, 4.0), 5000),
    "cifar100-": (200, 128, 5e-4, (1.0, 4.0), 5000),
    "tiny-imagenet-": (80, 128, 5e-4, (0.9, 20.0), 10000),
    "imagenet-": (100, 256, 1e-4, (1.0, 1.0), 50000),  # the paper does not say: as many as it tests on
}


def test_there_are_recipes():
    assert len(RECIPES) > 50


@pytest.mark.parametrize(("start", "most"), [("cifar10-wrn28x1", 8), ("cifar100-wrn28x4", 4)])
def test_there_are_ensembles_of_every_size_in_table_8(start, most):
    for size in range(1, most + 1):
        recipe = load_recipe(f"distillation/{start}-de{size}")
        assert [peer.name for peer in recipe.peers] == [f"teacher{number + 1}" for number in range(size)]
        assert recipe.reproduces.startswith("paper 3, Table 8")


def test_steps_along_bald_have_those_along_tdiv_to_be_compared_with():
    found = [load_recipe(f"distillation/cifar10-wrn28x1-latentbe-{kind}-de4") for kind in ("bald", "tdiv")]
    assert [recipe.stages[0].perturb.kind for recipe in found] == ["bald", "tdiv"]
    alike = [recipe.model_dump(exclude={"name", "title", "method"}) for recipe in found]
    for table in alike:
        del table["stages"][0]["perturb"]
    assert alike[0] == alike[1]


@pytest.mark.parametrize("name", ["cifar10-wrn28x1-rank1", "cifar100-wrn28x10-rank1"])
def test_rank_1_bayesian_networks_have_gaussian_factors_that_only_the_prior_pulls_to_one(name):
    recipe = load_recipe(f"distillation/{name}")
    (peer,), (stage,) = recipe.peers, recipe.stages
    assert (peer.posterior.gaussian, peer.posterior.decay_factors, peer.posterior.members) == (True, False, 4)
    assert stage.terms["kl"]["anneal"] > 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_distillation_fit_their_teachers(name):
    recipe = load_recipe(name)
    if recipe.teachers is None:
        assert not any({"distil", "proxy_end2"} & set(stage.terms) or stage.perturb for stage in recipe.stages)
        return
    known = [load_recipe(source) for source in recipe.teachers.runs]
    count = sum(1 if peer.posterior.kind == "point" else recipe.teachers.draws for one in known for peer in one.peers)
    (peer,) = recipe.peers
    assert peer.network in ("teachers", known[0].peers[0].network)
    for one in known:
        assert one.teachers is None
        assert (one.data.name, one.data.classes) == (recipe.data.name, recipe.data.classes)
    for stage in recipe.stages:
        distil = stage.terms.get("distil", {})
        if distil.get("teachers") == "one_to_one" or (stage.perturb and stage.perturb.kind == "tdiv_sdiv"):
            assert peer.posterior.kind == "rank_one"
            assert peer.posterior.members in (count, 0)
        if stage.perturb and stage.perturb.kind in ("tdiv", "tdiv_sdiv", "bald"):
            assert count > 1
        assert {"distil", "proxy_end2"} & set(stage.terms)
    if (size := name.rpartition("-de")[2]).isdigit():
        assert count == int(size)


@pytest.mark.parametrize("name", [name for name in RECIPES if load_recipe(name).teachers is not None])
def test_teachers_that_are_trained_first_can_keep_their_best_epoch(name):
    # They are trained on the student's split.
    recipe = load_recipe(name)
    for source in recipe.teachers.runs:
        assert load_recipe(source).evaluation.keep == "last" or recipe.data.validation


@pytest.mark.parametrize("name", [name for name in RECIPES if name.split("/")[1].startswith(tuple(PAPER))])
def test_recipes_have_the_papers_settings(name):
    key = next(key for key in PAPER if name.split("/")[1].startswith(key))
    epochs, batch, decay, (alpha, temperature), validation = PAPER[key]
    recipe = load_recipe(name)
    (stage,) = recipe.stages
    if recipe.method in ("rank1", "bayesian_kd"):
        return  # of no paper
    assert (stage.epochs, recipe.data.batch_size) == (epochs, batch)
    wanted = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": decay}
    assert stage.optimizer.model_dump(include=set(wanted)) == wanted
    assert (stage.lr_schedule, stage.warmup) == ("cosine", 5)
    assert (recipe.data.validation, recipe.evaluation.keep) == (validation, "best")
    distil = stage.terms.get("distil")
    if distil is not None:
        assert distil["temperature"] == temperature
        assert distil["weight"] == pytest.approx(alpha)
        assert stage.terms.get("likelihood", {}).get("weight", 0) == pytest.approx(1 - alpha)
        assert distil["cap"] == 0.6
        assert distil["per"] == "batch"
    if stage.perturb and stage.perturb.kind == "conf_ods":
        assert stage.perturb.temperature == temperature
    if recipe.peers[0].posterior.kind == "rank_one":
        latent = "latentbe" in name
        found = recipe.peers[0].posterior
        assert found.scale_gradients
        assert found.decay_factors == latent
        assert found.factors == ("ones" if latent else "random")
        assert found.predicts == ("average" if latent else "members")
        assert latent or found.spread == 0.5


def test_rank_one_teachers_have_a_usual_recipe():
    # An average of members is one plain network; members that predict by themselves vary.
    assert default_recipe(["distillation/latentbe"]) == "distillation/latentbe"
    vary = next(name for name in packaged() if _members_predict(load_recipe(name)))
    assert default_recipe([vary]) == "distil"


def _members_predict(recipe):
    (peer, *others) = recipe.peers
    return not others and peer.posterior.kind == "rank_one" and peer.posterior.predicts == "members"
