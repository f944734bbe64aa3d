"""The script that makes the tables of docs/results.md again."""

import importlib
import json
from pathlib import Path

import pytest

from peerbayes.recipes.recipe import load_recipe


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("reproduce")


def test_every_table_is_of_recipes_that_are_there(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    trained = set()
    for table in script.TABLES.values():
        assert all(need in script.TABLES for need in table.needs)
        script.write_variants(table, tmp_path)
        for name, (base, sets) in table.variants.items():
            assert load_recipe(f"recipes/{name}.toml") == load_recipe(base, sets)
        for words in table.files.values():
            named = [word for word in words[1:] if "/" in word and not word.startswith("runs/")]
            seeds = words[words.index("--seeds") + 1] if "--seeds" in words else "0"
            trained |= set(script.runs(named, seeds))
            assert all(load_recipe(name).title for name in named)
    sources = {"distillation-cifar10-wrn28x1-de4", "pipeline-cifar10-resnet20-peers"}
    looked_at = {word for table in script.TABLES.values() for words in table.files.values() for word in words}
    for folder in (word for word in looked_at if word.startswith("runs/") and not word.endswith(".safetensors")):
        assert folder in trained or any(one in folder for one in sources)


def test_a_table_is_made_once_and_what_fails_is_said(script, tmp_path, monkeypatch, capsys):
    variants = {"short": ("mutual/digits-dnn", ["stages.0.epochs=1"])}
    short = ["train", "recipes/short.toml", "--device", "cpu"]
    tables = {
        "first": script.Table({"first": short, "again": ["evaluate", "runs/recipes-short-seed0"]}, variants),
        "second": script.Table({"bad": ["evaluate", "runs/nothing"], "never": short}, needs=["first"]),
        "third": script.Table({"third": short}, needs=["second"]),
    }
    monkeypatch.setattr(script, "TABLES", tables)
    assert script.main(["third", "second", "--work", str(tmp_path), "--at-once", "2"]) == 1
    said = capsys.readouterr().out
    assert "bad: failed with exit code 2" in said
    assert "never" not in said
    assert "runs/nothing: neither a run folder" in (tmp_path / "runs" / "bad.log").read_text()
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["again.json", "first.json"]
    record = json.loads((tmp_path / "results" / "first.json").read_text())
    assert record["recipe"] == "mutual/digits-dnn"
    assert record["changed"] == ["stages.0.epochs=1"]
    assert str(tmp_path) not in json.dumps(record)
    assert script.main(["first", "--work", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "first: there already\nagain: there already\n"
    with pytest.raises(SystemExit, match="2"):
        script.main(["nothing", "--work", str(tmp_path)])
    assert "there is no table 'nothing'; expected some of first, second, third" in capsys.readouterr().err
