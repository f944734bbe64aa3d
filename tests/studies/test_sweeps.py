"""Sweeps: true values on the validation split alone, killed and shared studies, and one sentence for what is wrong."""

import contextlib
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import optuna
import pytest
from PIL import Image

import commands
import peerbayes
from commands import QUIET
from peerbayes import data
from peerbayes import metrics as evaluation
from peerbayes import reports as reporting
from peerbayes.errors import PeerbayesWarning
from peerbayes.recipes import recipe_data
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports import figures
from peerbayes.studies.space import Axis, corners, folder_name, overrides, parse_axes
from peerbayes.studies.study import Study
from peerbayes.studies.sweep_report import sweep_figure, sweep_table, write_sweep_figure
from peerbayes.studies.sweeps import Sweep, sweep

posix = pytest.mark.skipif(os.name != "posix", reason="needs locks and signals")

RECIPE = """
title = "Small"
method = "dml"
data = { name = "digits", batch_size = 256, validation = 150 }
peers = [
  { name = "a", network = "mlp", posterior = { kind = "mean_field" } },
  { name = "b", network = "mlp", posterior = { kind = "point" } },
]
gradient_share_every = 0
evaluation = { draws = 2 }
[[stages]]
epochs = 1
optimizer = { lr = 3e-3 }
terms = { likelihood = {}, kl = { scheme = "layer_mean" } }
[[stages]]
epochs = 1
optimizer = { lr = 3e-3 }
terms = { likelihood = {}, kl = { scheme = "layer_mean" }, mutual = {} }
"""
POINT = """
title = "Point"
method = "dnn"
data = { name = "digits", batch_size = 512 }
peers = [{ name = "only", network = "mlp", posterior = { kind = "point" } }]
gradient_share_every = 0
[[stages]]
epochs = 1
optimizer = { name = "sgd", lr = 0.05 }
terms = { likelihood = {} }
"""
LR = "stages.0.optimizer.lr"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "small.toml").write_text(RECIPE)
    (folder / "point.toml").write_text(POINT)
    return folder


def called(*arguments, code=0):
    return commands.called("sweep", *arguments, *QUIET, code=code)


def refused(capsys, *arguments):
    return commands.refused(capsys, "sweep", *arguments)


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("*-seed*/*")}


def trials_of(folder, name="small", state=optuna.trial.TrialState.COMPLETE):
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
    try:
        return optuna.load_study(study_name=name, storage=storage).get_trials(states=(state,))
    finally:
        storage.remove_session()
        storage.engine.dispose()


# ---- what a grid finds ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(place):
    """A sweep by the command, its JSON, and the result object of the same sweep asked for again."""
    words = ("--over", "mutual.alpha=0,1.5", "--seeds", "0,1", "--out", place / "grid")
    table = json.loads(called(place / "small.toml", *words, "--json"))
    before = times(place / "grid")
    again = sweep(place / "small.toml", ["mutual.alpha=0,1.5"], seeds=[0, 1], out=place / "grid", device="cpu")
    assert times(place / "grid") == before  # nothing is trained twice
    return place / "grid", table, again


def test_values_are_those_of_the_runs_on_the_validation_split(swept):
    _, table, _ = swept
    held = data.load("digits", validation=150).validation
    assert len(held) == 150
    for row in table:
        assert len(row["runs"]) == 2
        values = []
        for seed, path in enumerate(row["runs"]):
            run = peerbayes.load(path)
            assert run.seed == seed
            assert run.recipe.stages[1].terms["mutual"]["alpha"] == row["setting"]["mutual.alpha"]
            assert "mutual" not in run.recipe.stages[0].terms
            raw = {"seed": seed, "calibrated": False}
            predictions = [run[peer].predict(held.images, 2, name=peer, **raw) for peer in ("a", "b")]
            nlls = [evaluation.nll_from_log(p.log_probabilities, held.labels) for p in predictions]
            accuracies = [evaluation.accuracy(p.log_probabilities.exp(), held.labels) for p in predictions]
            assert row["seeds"][str(seed)]["nll"] == pytest.approx(sum(nlls) / 2, rel=1e-6)
            assert row["seeds"][str(seed)]["accuracy"] == pytest.approx(sum(accuracies) / 2)
            values.append(sum(nlls) / 2)
        assert row["value"] == pytest.approx(sum(values) / 2, rel=1e-6)
        assert row["spread"] == pytest.approx(statistics.stdev(values), rel=1e-4)
        assert row["nll"]["standard_error"] == pytest.approx(statistics.stdev(values) / 2**0.5, rel=1e-4)


def test_the_best_comes_first(swept, place):
    _, table, again = swept
    assert [row["rank"] for row in table] == [1, 2]
    assert table[0]["value"] <= table[1]["value"]
    assert {row["setting"]["mutual.alpha"] for row in table} == {0, 1.5}
    assert isinstance(again, Sweep)
    assert again.table == table
    assert again.best == table[0]
    assert load_recipe(place / "small.toml", table[0]["changes"]) == peerbayes.load(table[0]["runs"][0]).recipe


def test_the_folder_tells_the_whole_story(swept):
    folder, table, _ = swept
    found = json.loads((folder / "sweep.json").read_text())
    assert found["table"] == table
    assert found["split"] == "validation"
    assert found["over"] == {"mutual.alpha": "0,1.5"}
    assert (found["seeds"], found["objective"], found["sampler"]) == ([0, 1], "nll", "grid")
    assert found["versions"].keys() == {"peerbayes", "torch", "python", "optuna"}
    assert found["seconds"] == pytest.approx(sum(row["seconds"] for row in table))
    with Image.open(folder / "sweep.png") as picture:
        assert picture.width > 400
    assert not list(folder.glob(".worker-*"))


def test_the_printed_table_is_ranked_and_says_validation(swept, place):
    folder, table, _ = swept
    text = called(place / "small.toml", "--over", "mutual.alpha=0,1.5", "--seeds", "0,1", "--out", folder)
    lines = text.splitlines()
    assert lines[0] == "Small: validation split, mean ± standard error over 2 seeds, ranked by *"
    assert lines[2].split() == ["mutual.alpha", "ACC", "NLL", "*", "ECE"]
    for line, row in zip(lines[3:5], table):
        assert line.split()[:2] == [str(row["rank"]), f"{row['setting']['mutual.alpha']:g}"]
        assert f"{row['value']:.3f} ± {row['nll']['standard_error']:.3f}" in line
    assert "first − second, validation NLL, paired over 2 seeds: " in text
    assert f"--set 'stages.1.terms.mutual.alpha={table[0]['setting']['mutual.alpha']}'" in text


class Untouchable:
    def __getattr__(self, name):
        raise AssertionError(f"the test split was asked for {name}")

    def __len__(self):
        raise AssertionError("the test split was counted")


@pytest.mark.parametrize("changes", [[], ["evaluation.test_every=1"], ["evaluation.last_epochs=1"]])
def test_nothing_is_asked_of_the_test_split(place, tmp_path, monkeypatch, changes):
    real = recipe_data.load

    def guarded(*arguments, **options):
        found = real(*arguments, **options)
        object.__setattr__(found, "test", Untouchable())
        return found

    monkeypatch.setattr(recipe_data, "load", guarded)
    options = {"seeds": [0], "out": tmp_path, "device": "cpu", "objective": "accuracy", "changes": changes}
    found = sweep(place / "point.toml", [f"{LR}=0.1,0.2"], **options)
    assert found.table[0]["value"] >= found.table[1]["value"]
    write_sweep_figure(found)
    sweep_table(found)
    with pytest.raises(AssertionError, match="the test split was"):
        reporting.evaluate(found.best["runs"][0], device="cpu")


def test_a_tenth_is_kept_where_there_is_no_validation_split(place, tmp_path, capsys):
    found = sweep(place / "point.toml", [f"{LR}=0.1"], seeds=[0], out=tmp_path / "a", device="cpu")
    assert found.recipe.data.validation == 0.1
    found = sweep(place / "point.toml", [f"{LR}=0.1"], seeds=[0], out=tmp_path / "b", device="cpu", validation=77)
    assert peerbayes.load(found.best["runs"][0]).recipe.data.validation == 77


def test_a_setting_that_diverges_fails_alone_and_once(place, tmp_path):
    words = [f"{LR}=0.1,1e30"]
    options = {"seeds": [0], "out": tmp_path, "device": "cpu", "pack": 2}
    with pytest.warns(PeerbayesWarning, match=r"setting stages.0.optimizer.lr=1e\+30 failed: term 'likelihood'"):
        found = sweep(place / "point.toml", words, **options)
    again = sweep(place / "point.toml", words, **options)  # without a warning: it is not tried again
    assert again.table == found.table
    assert [row["state"] for row in found.table] == ["complete", "failed"]
    assert "became" in found.table[1]["reason"]
    text = sweep_table(found)
    assert f"{LR}=1e+30 failed: term 'likelihood'" in text
    assert any(line.startswith("failed") for line in text.splitlines())


def test_where_everything_fails_the_code_is_1(place, tmp_path, capsys):
    called(place / "point.toml", "--over", f"{LR}=1e30", "--seeds", 0, "--out", tmp_path, code=1)
    assert capsys.readouterr().err.startswith(f"peerbayes: setting {LR}=1e+30 failed: term 'likelihood'")
    assert not (tmp_path / "sweep.png").exists()
    assert (tmp_path / "sweep.json").exists()


def test_tpe_stays_in_its_ranges_and_goes_on_with_more_trials(place, tmp_path):
    words = [f"{LR}=1e-3:1e-1:log", "data.batch_size=200:600", "stages.0.optimizer.nesterov=false"]
    options = {"seeds": [0], "out": tmp_path, "device": "cpu"}
    first = sweep(place / "point.toml", words, trials=3, **options)
    second = sweep(place / "point.toml", words, trials=5, **options)
    settings = [json.dumps(row["setting"]) for row in second.table]
    assert len(set(settings)) == len(second.table) == 5
    assert {json.dumps(row["setting"]) for row in first.table} < set(settings)
    for row in second.table:
        assert 1e-3 <= row["setting"][LR] <= 1e-1
        size = row["setting"]["data.batch_size"]
        assert isinstance(size, int)
        assert 200 <= size <= 600
        assert row["setting"]["stages.0.optimizer.nesterov"] is False
        assert peerbayes.load(row["runs"][0]).recipe.data.batch_size == size


# ---- keys and values ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(place):
    return load_recipe(place / "small.toml")


@pytest.mark.parametrize(
    ("item", "axis"),
    [
        ("mutual.alpha=0.5,1", Axis("mutual.alpha", ("stages.1.terms.mutual.alpha",), (0.5, 1.0))),
        ("kl.anneal=1", Axis("kl.anneal", ("stages.0.terms.kl.anneal", "stages.1.terms.kl.anneal"), (1,))),
        ("data.batch_size=8,16", Axis("data.batch_size", ("data.batch_size",), (8, 16))),
        ("stage.*.lr_factor=0:5", Axis("stage.*.lr_factor", ("stage.*.lr_factor",), (0, 5), is_range=True)),
        ("peers.*.posterior.rho=-5:-1.5",
         Axis("peers.*.posterior.rho", ("peers.*.posterior.rho",), (-5.0, -1.5), True)),
        (f"{LR}=1e-4:1e-1:log", Axis(LR, (LR,), (1e-4, 1e-1), True, True)),
        ("update=simultaneous,sequential", Axis("update", ("update",), ("simultaneous", "sequential"))),
        ("stages.0.optimizer.nesterov=true,false", Axis("stages.0.optimizer.nesterov", ("stages.0.optimizer.nesterov",),
                                                        (True, False))),
        ("peers.0.network=my.nets:small,mlp", Axis("peers.0.network", ("peers.0.network",), ("my.nets:small", "mlp"))),
    ],
)  # fmt: skip
def test_keys_and_values_are_read(small, item, axis):
    assert parse_axes([item], small) == [axis]
    assert [type(value) for value in parse_axes([item], small)[0].values] == [type(value) for value in axis.values]


def test_overrides_set_what_was_asked_for(small, place):
    axes = parse_axes(["kl.scheme=layer_mean,elbo", f"{LR}=1e-05,0.5", "update=sequential"], small)
    settings = corners(axes)
    assert len(settings) == 4
    for setting in settings:
        recipe = load_recipe(place / "small.toml", overrides(axes, setting))
        assert {stage.terms["kl"]["scheme"] for stage in recipe.stages} == {setting["kl.scheme"]}
        assert recipe.stages[0].optimizer.lr == setting[LR]
        assert recipe.update == "sequential"


def test_folders_are_readable_and_distinct():
    assert folder_name({"mutual.alpha": 0.5, "kl.weight": 1.0}) == "mutual.alpha=0.5,kl.weight=1"
    names = [folder_name({"peers.*.network": name}) for name in ("a/b", "a:b", "x" * 300, "x" * 301)]
    assert len(set(names)) == 4
    assert all("/" not in name and len(name) < 200 for name in names)


BAD = {
    "term": (["mutul.alpha=1"], "the recipe has no term 'mutul'; did you mean 'mutual'?"),
    "option": (["mutual.alpa=1"], "term 'mutual' has no option 'alpa'; did you mean 'alpha'?"),
    "bare option": (["alpha=1"], "there is no key 'alpha'; did you mean 'stages.*.terms.mutual.alpha'?"),
    "bare near": (["mutual_alpha=1"], "did you mean 'mutual.alpha'?"),
    "key": (["stages.0.optimizer.lrr=1"], "stages.0.optimizer has no key 'lrr'; did you mean 'lr'?"),
    "negative": (["mutual.alpha=1,-1"], "stages.1.terms.mutual.alpha: input should be greater than or equal to 0"),
    "negative end": (["mutual.alpha=-1:1"], "stages.1.terms.mutual.alpha: input should be greater than or equal to 0"),
    "no values": (["mutual.alpha"], "expected KEY=VALUES"),
    "empty value": (["mutual.alpha=1,,2"], "a value is empty"),
    "value twice": (["mutual.alpha=1,1.0"], "a value is given twice"),
    "key twice": (["mutual.alpha=1", "stages.1.terms.mutual.alpha=2"], "'stages.1.terms.mutual.alpha' is varied twice"),
    "range upside down": (["mutual.alpha=2:1"], "expected LOW:HIGH or LOW:HIGH:log, LOW below HIGH"),
    "range of words": (["mutual.alpha=1:x"], "expected LOW:HIGH"),
    "range kind": (["mutual.alpha=1:2:lin"], "expected LOW:HIGH"),
    "log at 0": (["mutual.alpha=0:1:log"], "a logarithmic range must be above 0"),
    "word": (["mutual.alpha=1,lots"], "stages.1.terms.mutual.alpha: input should be a valid number"),
    "no validation": (["data.validation=200,0"], "setting data.validation=0: there is no validation split to "
                      "rank it by; set data.validation above 0"),
    "no validation at an end": (["data.validation=0:99"], "setting data.validation=0: there is no validation split"),
    "no images left at an end": (["data.validation=9:9999"], "setting data.validation=9999: data.validation must leave "
                                 "training images: got 9999, digits has 1297"),
    "network": (["peers.0.network=mlp,nope"], "setting peers.0.network=nope: there is no network 'nope'"),
    "a later one": (["peers.0.network=mlp,resnet8", "stages.0.terms.weight_diversity.weight=1"],
                    "setting peers.0.network=resnet8, stages.0.terms.weight_diversity.weight=1: "
                    "stages.0.terms.weight_diversity: needs peers of equal shape"),
}  # fmt: skip


@pytest.mark.parametrize(("over", "sentence"), BAD.values(), ids=BAD)
def test_bad_keys_and_values_are_one_sentence_and_nothing_is_written(place, tmp_path, capsys, over, sentence):
    words = [word for item in over for word in ("--over", item)]
    assert sentence in refused(capsys, place / "small.toml", *words, "--out", tmp_path / "out", "--device", "cpu")
    assert list(tmp_path.iterdir()) == []


def test_other_bad_input_is_one_sentence(place, tmp_path, capsys):
    def words(*more):
        return (place / "small.toml", "--over", "mutual.alpha=0:1", "--out", tmp_path / "out", "--device", "cpu", *more)

    assert "mutual.alpha is a range" in refused(capsys, *words("--sampler", "grid"))
    assert "seeds '': expected whole numbers" in refused(capsys, *words("--seeds", ""))
    assert "validation must leave training images" in refused(capsys, *words("--validation", "100000"))
    assert "--validation 1.5: expected a fraction below 1" in refused(capsys, *words("--validation", "1.5"))
    grid = ("--over", "mutual.alpha=1", "--trials", 3)
    assert "--trials is for --sampler tpe" in refused(capsys, place / "small.toml", *grid, "--out", tmp_path / "out")
    assert refused(capsys, place / "small.toml").endswith("see --help")
    assert "did you mean 'mutual/digits-ours'?" in refused(capsys, "mutual/digits-our", "--over", "mutual.alpha=1")
    (tmp_path / "file").write_text("")
    found = refused(capsys, place / "small.toml", "--over", "mutual.alpha=1", "--out", tmp_path / "file")
    assert found.endswith("is a file, expected a folder for the sweep")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- the study ------------------------------------------------------------------------------------------------------


def test_a_study_of_another_sweep_is_refused(swept, place, capsys):
    folder, _, _ = swept
    before = {path: path.read_bytes() for path in folder.glob("*.json")}

    def words(over="mutual.alpha=0,1.5", seeds="0,1"):
        return (place / "small.toml", "--over", over, "--seeds", seeds, "--out", folder, "--device", "cpu")

    found = refused(capsys, *words(over="mutual.alpha=0,2"))
    assert found.startswith("study 'small' in sqlite:///")
    assert "belongs to another sweep: its over is" in found
    assert "its seeds is [0, 1], not [0]" in refused(capsys, *words(seeds="0"))
    assert "its objective is" in refused(capsys, *words(), "--objective", "ece")
    assert "its recipe is" in refused(capsys, *words(), "--set", "stages.0.epochs=2")
    assert {path: path.read_bytes() for path in folder.glob("*.json")} == before


def test_another_study_in_the_same_folder_takes_the_runs_that_are_there(swept, place):
    folder, table, _ = swept
    before = times(folder)
    found = sweep(
        place / "small.toml", ["mutual.alpha=1.5"], seeds=[1], out=folder, study="more", device="cpu", objective="ece"
    )
    assert times(folder) == before
    same = next(row for row in table if row["setting"] == {"mutual.alpha": 1.5})
    assert found.best["seeds"] == {"1": same["seeds"]["1"]}
    assert found.best["value"] == same["seeds"]["1"]["ece"]


def test_a_study_that_is_not_ours_is_refused(place, tmp_path, capsys):
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    optuna.create_study(study_name="small", storage=storage).add_trial(optuna.trial.create_trial(value=1.0))
    storage.remove_session()
    storage.engine.dispose()
    words = ("--over", "mutual.alpha=1", "--out", tmp_path, "--device", "cpu")
    assert "was not made by a sweep of peerbayes" in refused(capsys, place / "small.toml", *words)


def test_a_database_that_cannot_be_used_is_one_sentence(place, tmp_path, capsys):
    (tmp_path / "text.db").write_text("this is no database, but a text of some length " * 30)
    urls = {
        "nonsense": "Could not parse SQLAlchemy URL",
        "nothing://server/name": "nothing",
        f"sqlite:///{tmp_path / 'nowhere' / 'study.db'}": "unable to open database file",
        f"sqlite:///{tmp_path / 'text.db'}": "file is not a database",
        "mysql+cymysql://me:secret@127.0.0.1:9/name": "its driver, the Python package 'cymysql', is not installed",
    }
    for url, reason in urls.items():
        words = ("--over", "mutual.alpha=1", "--out", tmp_path / "out", "--storage", url, "--device", "cpu")
        found = refused(capsys, place / "small.toml", *words)
        assert found.startswith("the study's database ")
        assert reason in found
        assert "secret" not in found
        assert not (tmp_path / "out").exists()


def test_without_optuna_there_is_one_sentence(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    found = refused(capsys, place / "small.toml", "--over", "mutual.alpha=1")
    assert found == "sweeps need optuna: pip install 'peerbayes[sweep]'"


AXES = [Axis("mutual.alpha", ("x",), (0.0, 1.0, 2.0))]


@contextlib.contextmanager
def opened(tmp_path, folder="a", axes=AXES, sampler="grid", limit=20):
    study = Study(
        f"sqlite:///{tmp_path / 'study.db'}", "s", {"seeds": [0]}, axes, sampler, limit, False, tmp_path / folder
    )
    try:
        yield study
    finally:
        study.close()


def alphas(claims):
    return [claim.setting["mutual.alpha"] for claim in claims]


def test_a_study_that_another_process_begins_at_the_same_moment_is_shared(tmp_path, monkeypatch):
    begun = contextlib.ExitStack()

    def after_the_first_look(look):
        def looked(*arguments, **options):
            found = look(*arguments, **options)
            monkeypatch.undo()
            assert alphas(begun.enter_context(opened(tmp_path)).claim(1)) == [0]
            return found

        return looked

    attributes = optuna.Study.user_attrs.fget
    monkeypatch.setattr(optuna.Study, "get_trials", after_the_first_look(optuna.Study.get_trials))
    monkeypatch.setattr(optuna.Study, "user_attrs", property(after_the_first_look(attributes)))
    with begun, opened(tmp_path, "b") as second:
        assert alphas(second.claim(5)) == [1, 2]


@posix
def test_what_the_living_hold_is_not_taken_and_what_the_dead_held_is(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert alphas(first.claim(1)) == [0]
        assert alphas(second.claim(5)) == [1, 2]
        assert second.claim(5) == []
        first._worker._file.close()  # as the system does for a process that has died
        assert alphas(second.claim(5)) == [0]
        # The dead one rises and tells what it found: the setting is in other hands now, and stays there.
        first.finish(first._mine[0], 3.0, {"spread": None})
        assert [trial.value for trial in second.trials()] == [None] * 3
        for claim in list(second._mine.values()):
            second.finish(claim, 1.0, {"spread": None})
        assert [trial.value for trial in first.trials()] == [1.0] * 3
        assert first.claim(5) == []


@posix
def test_all_that_one_dead_process_held_is_taken(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert alphas(first.claim(3)) == [0, 1, 2]
        first._worker._file.close()
        assert alphas(second.claim(9)) == [0, 1, 2]
        first._mine.clear()


@posix
def test_of_another_machine_only_the_beat_tells(tmp_path):
    with opened(tmp_path, "here") as here, opened(tmp_path, "there") as there:
        assert alphas(there.claim(1)) == [0]
        there._worker._file.close()
        assert alphas(here.claim(5)) == [1, 2]
        assert here.claim(5) == []
        with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database:
            database.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour') WHERE trial_id = 1")
            database.commit()
        assert alphas(here.claim(5)) == [0]
        there._mine.clear()


def test_two_that_look_at_the_same_moment_do_not_take_the_same(tmp_path, monkeypatch):
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.claim(0)  # the grid is in the queue now
        check = optuna.storages.RDBStorage.check_trial_is_updatable
        slow = lambda *arguments: (time.sleep(0.2), check(*arguments))  # between looking and taking
        monkeypatch.setattr(optuna.storages.RDBStorage, "check_trial_is_updatable", slow)
        with ThreadPoolExecutor(2) as pool:
            taken = list(pool.map(lambda study: study._study._pop_waiting_trial_id(), (first, second)))
        assert sorted(taken) == [1, 2]


def test_what_was_taken_and_not_done_is_given_back(tmp_path):
    with opened(tmp_path) as study:
        assert alphas(study.claim(2)) == [0, 1]
        study.fail(study._mine[0], "diverged")
    with opened(tmp_path) as study:
        assert sorted(alphas(study.claim(9))) == [1, 2]


def test_tpe_shares_its_trials_and_takes_up_what_was_given_back(tmp_path):
    options = {"axes": [Axis("mutual.alpha", ("x",), (0.0, 1.0), is_range=True)], "sampler": "tpe", "limit": 4}
    with opened(tmp_path, **options) as first, opened(tmp_path, **options) as second:
        taken = alphas([*first.claim(3), *second.claim(3)])
        assert len(set(taken)) == 4
        assert first.claim(1) == second.claim(1) == []
        for claim in list(second._mine.values()):
            second.finish(claim, 1.0, {})
    with opened(tmp_path, **options) as third:
        assert alphas(third.claim(9)) == taken[:3]


def test_a_small_space_is_not_proposed_for_ever(tmp_path):
    axes = [Axis("mutual.alpha", ("x",), (1, 2), is_range=True)]
    with opened(tmp_path, axes=axes, sampler="tpe") as study:
        assert sorted(alphas(study.claim(5))) == [1, 2]


def test_a_setting_that_stands_in_the_queue_twice_is_taken_once(tmp_path):
    with opened(tmp_path) as study:
        assert study.claim(0) == []  # the grid is in the queue now
        for setting in corners(AXES):
            study._enqueue(setting)
        assert alphas(study.claim(9)) == [0, 1, 2]
        assert len(study.trials()) == 3


# ---- real processes -------------------------------------------------------------------------------------------------

# One warm process that forks a child a job, all at once: {"words": of the command, "code": instead, "out"}.
DRIVER = """
import json, os, signal, sys, traceback
import torch
torch.set_num_threads(1)
import peerbayes.api.fitting, peerbayes.reports.page, peerbayes.studies.sweeps
print(json.dumps("optuna" in sys.modules), flush=True)
from peerbayes import cli

def child(job):
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        file = os.open(job["out"], os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        if "code" in job:
            exec(job["code"], {"words": job["words"]})
            code = 0
        else:
            cli.main(["sweep", *job["words"]])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

for line in sys.stdin:
    found = []
    for job in json.loads(line):
        pid = os.fork()
        if pid == 0:
            child(job)
        found.append(pid)
    print(json.dumps(found), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in found]), flush=True)
"""


class Driver:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.optuna_was_imported = self.answer()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def start(self, folder, *jobs, code=None):
        self.outputs = [folder / f"output{number}.txt" for number in range(len(jobs))]
        more = {} if code is None else {"code": code}
        given = [{"words": [*map(str, job)], "out": str(out), **more} for job, out in zip(jobs, self.outputs)]
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        return self.answer(), [path.read_text() for path in self.outputs]


@pytest.fixture(scope="module")
def driver():
    found = Driver()
    yield found
    found.process.stdin.close()
    found.process.wait(60)
    found.process.stdout.close()


@posix
def test_optuna_is_not_imported_before_a_sweep(driver):
    assert driver.optuna_was_imported is False


TAKER = """
from pathlib import Path
from peerbayes.studies.space import Axis
from peerbayes.studies.study import Study
from peerbayes.studies.study_storage import check_optuna
check_optuna()
folder = Path(words[0])
(folder / f"ready-{words[1]}").touch()
while len(list(folder.glob("ready-*"))) < 3:
    pass
axes = [Axis("x", ("x",), tuple(range(9)))]
study = Study(f"sqlite:///{folder / 'study.db'}", "s", {}, axes, "grid", 20, False, folder)
while claims := study.claim(1):
    print(claims[0].setting["x"])
    study.finish(claims[0], 1.0, {})
study.close()
"""


@posix
def test_processes_that_begin_together_take_every_setting_once(driver, tmp_path):
    driver.start(tmp_path, *((tmp_path, me) for me in range(3)), code=TAKER)
    codes, outputs = driver.end()
    assert codes == [0, 0, 0], outputs
    assert sorted(int(word) for text in outputs for word in text.split()) == list(range(9))


@posix
def test_two_real_sweeps_share_a_study_and_a_source(driver, place, tmp_path):
    source = ("--set", f"peers.b.start_from={place / 'point.toml'}")
    words = (place / "small.toml", "--over", "mutual.alpha=0,1,2,3", "--seeds", 0, "--out", tmp_path / "out", *source)
    driver.start(tmp_path, *[(*words, "--device", "cpu", "--quiet")] * 2)
    codes, outputs = driver.end()
    assert codes == [0, 0], outputs
    table = json.loads(called(*words, "--json"))
    assert sorted(row["setting"]["mutual.alpha"] for row in table) == [0, 1, 2, 3]
    assert [row["state"] for row in table] == ["complete"] * 4
    assert len(trials_of(tmp_path / "out")) == 4
    for row in table:  # an epoch a line: nothing was trained twice
        assert len(Path(row["runs"][0], "metrics.jsonl").read_text().splitlines()) == 2


KILLED = """
import os, signal
from peerbayes import Reporter
from peerbayes.studies.sweeps import sweep
class Killer(Reporter):
    left = 7
    def epoch(self, line):
        Killer.left -= 1
        if not Killer.left:
            os.kill(os.getpid(), signal.SIGKILL)
sweep(words[0], ["mutual.alpha=0,1.5"], seeds=[0, 1], out=words[1], device="cpu", reporter=Killer())
"""


@posix
def test_a_killed_sweep_goes_on_and_ends_the_same(driver, swept, place, tmp_path):
    _, table, _ = swept
    out = tmp_path / "out"
    driver.start(tmp_path, (place / "small.toml", out), code=KILLED)  # in the last epoch but one of eight
    codes, outputs = driver.end()
    assert codes == [-signal.SIGKILL], outputs
    finished = {path: when for path, when in times(out).items() if peerbayes.load(path.parent).finished}
    assert len({path.parent for path in finished}) == 3
    assert len(trials_of(out)) == 1
    found = sweep(place / "small.toml", ["mutual.alpha=0,1.5"], seeds=[0, 1], out=out, device="cpu")
    assert [(row["setting"], row["seeds"]) for row in found.table] == [(row["setting"], row["seeds"]) for row in table]
    assert {path: times(out)[path] for path in finished} == finished
    assert len(trials_of(out)) == 2
    assert not list(out.glob(".worker-*"))


@posix
def test_an_interrupted_command_says_how_to_go_on(driver, place, tmp_path):
    words = ("--over", f"{LR}=0.1,0.2", "--seeds", 0, "--out", tmp_path / "out", "--set", "stages.0.epochs=100000")
    (pid,) = driver.start(tmp_path, (place / "point.toml", *words, "--device", "cpu", "--quiet"))
    until = time.monotonic() + 60
    while not list(tmp_path.glob("out/*-seed0/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    assert driver.end() == ([130], ["peerbayes: interrupted; the same command continues\n"])
    assert len(trials_of(tmp_path / "out", "point", optuna.trial.TrialState.WAITING)) == 2


# ---- figures --------------------------------------------------------------------------------------------------------


def made(axes, values, objective="nll"):
    """A sweep with known values: one list a setting, in the order of the grid, a number a seed."""
    rows = []
    for setting, seeds in zip(corners(axes), values):
        figures_of = {key: dict.fromkeys(("mean",), statistics.fmean(seeds)) for key in ("nll", "accuracy", "ece")}
        error = statistics.stdev(seeds) / len(seeds) ** 0.5
        rows.append(
            {"setting": setting, "state": "complete", "value": statistics.fmean(seeds), "changes": []}
            | {key: {**mean, "standard_error": error} for key, mean in figures_of.items()}
            | {"seeds": {str(n): dict.fromkeys(("nll", "accuracy", "ece"), v) for n, v in enumerate(seeds)}}
        )
    rows.sort(key=lambda row: row["value"] if objective == "nll" else -row["value"])
    rows = [{**row, "rank": rank} for rank, row in enumerate(rows, 1)]
    return Sweep(load_recipe("mutual/digits-ours"), tuple(axes), (0, 1), objective, rows, Path("nowhere"))


def test_one_key_is_drawn_against_its_values():
    axes = sweep_figure(made([Axis("k", ("k",), (1.0, 10.0, 100.0))], [(3, 5), (1, 2), (4, 4)])).axes[0]
    points = {(x, y) for line in axes.lines for x, y in zip(*line.get_data()) if line.get_color() == "#999999"}
    assert points == {(1, 3), (1, 5), (10, 1), (10, 2), (100, 4)}
    (means,) = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert [list(part) for part in means.get_data()] == [[1, 10, 100], [4, 1.5, 4]]
    (low, high), *_ = [
        tuple(y for _, y in bar.lines[2][0].get_segments()[0]) for bar in axes.containers if bar.get_label() != "_no"
    ]
    assert (low, high) == (pytest.approx(1.0), pytest.approx(2.0))  # 1.5 ± 0.5, the best comes first
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("k", "validation NLL", "log")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["best: k=10"]


def test_words_are_drawn_by_name():
    sweep_of = made([Axis("k", ("k",), ("b", "a"))], [(0.3, 0.5), (0.1, 0.2)], "accuracy")
    axes = sweep_figure(sweep_of).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["b", "a"]
    assert axes.get_ylabel() == "validation ACC (%)"
    assert figures.png(sweep_figure(sweep_of)).startswith(b"\x89PNG")


def test_two_keys_make_a_heat_map():
    axes = [Axis("down", ("d",), (1, 2)), Axis("across", ("a",), (1, 2, 3))]
    figure = sweep_figure(made(axes, [(n, n + 2) for n in range(6)]))
    drawn = figure.axes[0]
    np.testing.assert_array_equal(drawn.images[0].get_array(), [[1, 2, 3], [4, 5, 6]])
    assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("across", "down")
    assert [text.get_text() for text in drawn.texts] == [f"{n}.000" for n in range(1, 7)]
    assert figure.axes[1].get_ylabel() == "validation NLL"


def test_more_keys_are_ranked():
    axes = [Axis(key, (key,), (1, 2)) for key in ("x", "y", "z")]
    drawn = sweep_figure(made(axes, [(8 - n, 8 - n) for n in range(8)])).axes[0]
    assert [text.get_text() for text in drawn.get_yticklabels()][:2] == ["x=2, y=2, z=2", "x=2, y=2, z=1"]
    assert drawn.yaxis_inverted()
