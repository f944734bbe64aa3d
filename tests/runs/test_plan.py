"""Plans: every verb resolves one graph, which is checked as a whole, trained in order, and read and loaded once."""

import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import peerbayes as pb
from commands import QUIET, called, change, contents, refused, save_npz, write_small
from peerbayes.errors import InputError
from peerbayes.recipes.recipe import load_recipe
from peerbayes.runs import executor
from peerbayes.runs.plan import Job, resolve
from peerbayes.training.learner import Learner


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, with small data, a source and two recipes that start from it, named by relative paths."""
    write_small(tmp_path)
    save_npz(tmp_path / "own.npz")
    monkeypatch.chdir(tmp_path)
    source = Path("source.toml").read_text().replace(str(tmp_path / "small.npz"), "own.npz")
    assert "own.npz" in source
    Path("base.toml").write_text(source)
    for name in ("one", "two"):
        Path(f"{name}.toml").write_text('extends = "base.toml"\nset = ["peers.0.start_from=base.toml"]')
    return tmp_path


def jobs(*names, seed=0):
    return [Job(load_recipe(f"{name}.toml"), Path("runs") / name, seed) for name in names]


def order(plan):
    return [sorted(node.folder.name for node in wave) for wave in plan.waves]


def test_sources_come_before_what_needs_them_and_each_once(place):
    plan = resolve(jobs("one", "two"))
    assert order(plan) == [["base-seed0"], ["one", "two"]]
    assert [node.folder.name for node in plan.targets] == ["one", "two"]
    (base,) = plan.sources
    assert all(node.starts == {"only": base} for node in plan.targets)
    assert resolve([]).waves == []


def test_a_recipe_that_is_asked_for_is_not_trained_again_as_a_source(place):
    # Data that are named by a relative path are the same data where a run names them by a full one.
    called("train", "base.toml", "one.toml", *QUIET)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["base-seed0", "one-seed0"]
    about = json.loads(Path("runs/one-seed0/run.json").read_text())
    assert about["generation"] == 1


def test_a_chain_is_trained_from_its_end(place):
    Path("three.toml").write_text('extends = "base.toml"\nset = ["peers.0.start_from=one.toml"]')
    assert order(resolve(jobs("three"))) == [["base-seed0"], ["one-seed0"], ["three"]]
    called("train", "three.toml", *QUIET)
    assert json.loads(Path("runs/three-seed0/run.json").read_text())["generation"] == 2
    assert order(resolve(jobs("one"))) == [["one"]]  # its source is there now
    (finished,) = resolve([Job(load_recipe("three.toml"), Path("runs/three-seed0"))]).targets
    assert finished.finished
    assert resolve([finished]).waves == []


def test_a_peer_that_starts_from_a_run_of_the_plan_waits_for_it(place):
    Path("after.toml").write_text('extends = "base.toml"\nset = ["peers.0.start_from=runs/one"]')
    assert order(resolve(jobs("one", "after"))) == [["base-seed0"], ["one"], ["after"]]


def test_recipes_that_need_each_other_are_refused(place):
    Path("a.toml").write_text('extends = "base.toml"\nset = ["peers.0.start_from=b.toml"]')
    Path("b.toml").write_text('extends = "base.toml"\nset = ["peers.0.start_from=a.toml"]')
    with pytest.raises(InputError, match=r"^circular start_from or teachers: b\.toml -> .*a\.toml -> b\.toml$"):
        resolve(jobs("a"))


def test_each_recipe_is_read_once_each_data_set_loaded_once_and_a_learner_built_once(place, monkeypatch):
    read, loaded, built = Counter(), Counter(), []
    parse, load, begin = tomllib.loads, executor.load_data, Learner.__init__

    def counted_parse(text):
        found = parse(text)
        read[found.get("title", found.get("extends", text))] += 1
        return found

    def counted_load(recipe, *arguments):
        loaded[recipe.data.name] += 1
        return load(recipe, *arguments)

    def counted_begin(self, *arguments, **options):
        built.append(options.get("engine"))
        begin(self, *arguments, **options)

    monkeypatch.setattr(tomllib, "loads", counted_parse)
    monkeypatch.setattr(executor, "load_data", counted_load)
    monkeypatch.setattr(Learner, "__init__", counted_begin)
    pb.train("base.toml", "runs/base", device="cpu")
    assert max(read.values()) == 2  # the recipe, and the run's own when it is opened
    assert list(loaded.values()) == [1]
    assert len(built) == 1
    loaded.clear()
    pb.train("one.toml", "other/one", device="cpu")
    assert list(loaded.values()) == [1]


# ---- the dry run -----------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(place):
    before = contents(place)
    rows = json.loads(called("train", "one.toml", "--seeds", "0,1", "--dry-run", "--json", *QUIET))
    assert [Path(row["folder"]).name for row in rows] == ["base-seed0", "base-seed1", "one-seed0", "one-seed1"]
    assert [row["starts"] for row in rows[2:]] == [{"only": row["folder"]} for row in rows[:2]]
    assert contents(place) == before
    called("train", "one.toml", *QUIET)
    run = pb.load("runs/one-seed0")
    assert run.metrics[-1]["step"] == rows[2]["steps"]
    assert all(Path(file).is_file() for file in rows[2]["files"])
    told = called("train", "one.toml", "--seeds", "1,2", "--dry-run", *QUIET)
    assert "only starts from runs/base-seed1" in told
    assert told.endswith("nothing was written\n")


def test_a_dry_run_finds_what_is_wrong_with_a_later_run(place, capsys):
    words = ("train", "one.toml", *change("stages.0.terms.feature_diversity={layers=['nope']}"), *QUIET, "--dry-run")
    assert "has no layer 'nope'" in refused(capsys, *words)
    assert not Path("runs").exists()


def test_compress_has_a_plan_of_two_runs(place):
    called("train", "base.toml", *QUIET)
    words = ("compress", "runs/base-seed0", *change("peers.0.posterior.components=8"), "--dry-run", "--json", *QUIET)
    first, second = json.loads(called(*words))
    assert [Path(row["folder"]).name for row in (first, second)] == ["base-seed0-shared-stage1", "base-seed0-shared"]
    assert second["starts"] == {"net": first["folder"]}
    assert sorted(path.name for path in Path("runs").iterdir()) == ["base-seed0"]


def test_posteriors_from_python_are_a_plan_of_one_run(tmp_path):
    images = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = pb.data.from_arrays((images, torch.arange(60) % 3))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    how = {"data": data, "recipe": "mutual/digits-dnn", "overrides": ["stages.0.epochs=1", "data.batch_size=30"]}
    run = pb.fit({"a": pb.Point(net)}, run=tmp_path / "a", **how)
    assert run["a"].provenance.run == (tmp_path / "a").resolve()
    assert run["a"].provenance.depth == 0
    assert run["a"].provenance.state == "trained"
