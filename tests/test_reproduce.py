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


def test_files_of_data_that_are_not_at_hand_are_left_out(script, tmp_path, monkeypatch, capsys):
    files = {"bad": ["evaluate", "runs/nothing"], "good": ["figure", "divergence"]}
    monkeypatch.setattr(script, "TABLES", {"table": script.Table(files, optional=["bad"])})
    assert script.main(["table", "--work", str(tmp_path)]) == 0
    assert f"bad: left out; {tmp_path / 'runs' / 'bad.log'} says why" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "results").glob("*.json")] == ["good.json"]


def one_record(method, seed, nll, peers=1, **more):
    kept = {"disagreement": {"retention": {"0.8": 0.9}}, "entropy": {"retention": {"0.8": 0.75}}}
    figures = {"accuracy": 0.5, "nll": nll, "ece": 0.1, "cnll": nll - 0.5, "cece": 0.05, "selective": kept}
    peer = {"name": "a", "disagreement": 0.0} | figures
    record = {"recipe": f"yardsticks/made-{method}", "network": "n", "seed": seed, "peers": [peer]}
    if peers > 1:
        record["peers"] = [{"name": "a", "disagreement": 0.2} | figures | {"nll": nll + off} for off in (-0.1, 0.1)]
        record["ensemble"] = figures | {"nll": nll - 0.25} | more
    return record


def test_runs_with_other_settings_are_lines_of_their_own(script, tmp_path, capsys):
    drawn = importlib.import_module("worth")
    records = [
        *(one_record("plain", seed, 1.0) for seed in range(2)),
        *(one_record("plain", seed, 3.0) | {"changed": ["stages.0.optimizer.lr=0.2"]} for seed in range(2)),
    ]
    (tmp_path / "a.json").write_text(json.dumps(records))
    assert drawn.main([str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "| made-plain | 50.00 ± .00 | 1.000 ± .000 |" in out
    assert "| made-plain (lr=0.2) | 50.00 ± .00 | 3.000 ± .000 |" in out
    drawn.main([str(tmp_path / "a.json"), "--against", "plain (lr=0.2)"])
    heading, _, plain, *_ = capsys.readouterr().out.splitlines()
    assert heading.endswith("| NLL − plain (lr=0.2) |")
    assert plain.startswith("| made-plain |")
    assert "| −2.000 ± .000" in plain


def test_what_the_default_is_worth_is_a_table_of_paired_differences(script, tmp_path, capsys):
    drawn = importlib.import_module("worth")
    outside = {"out_of_distribution": {"elsewhere": {"auroc": 0.875}}}
    one = [one_record("plain", seed, 1.0 + 0.25 * seed) for seed in range(3)]
    two = [one_record("default", seed, 2.0 + 0.25 * seed, peers=2) for seed in range(3)]
    more = [
        one_record("default", seed, 9.0, peers=2, **outside) for seed in range(3)
    ]  # of which the AUROC alone is new
    (tmp_path / "a.json").write_text(json.dumps([*one, *two]))
    (tmp_path / "b.json").write_text(json.dumps(more))
    assert drawn.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines()}
    rows = {name: [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert rows[""] == [
        "ACC",
        "NLL",
        "ECE",
        "kept by BALD 0.8",
        "kept by entropy 0.8",
        "AUROC elsewhere",
        "NLL − default",
    ]
    plain, tempered = rows["made-plain"], rows["made-plain, temperature"]
    assert (plain[1], plain[3], plain[4], plain[5]) == ("1.250 ± .144", "", "75.00 ± .00", "")
    assert tempered[1] == ".750 ± .144"
    assert plain[6].startswith("−1.000 ± .000")  # of peers, whose mean is 2 and more
    ensemble = rows["made-default, ensemble"]
    assert (ensemble[1], ensemble[3], ensemble[5], ensemble[6]) == ("2.000 ± .144", "90.00 ± .00", ".875 ± .000", "")
    (tmp_path / "d.json").write_text(json.dumps([one[0] | {"recipe": "yardsticks/made-other", "network": "another"}]))
    drawn.main([str(tmp_path / "a.json"), str(tmp_path / "d.json")])
    assert capsys.readouterr().out.splitlines()[-1].endswith("|  |")  # of another network: nothing to compare with
    noisy = [one_record("swag", seed, 2.25 + off) for seed, off in enumerate((-0.5, 0.1, 0.7))]
    (tmp_path / "c.json").write_text(json.dumps(noisy))
    drawn.main([str(tmp_path / "a.json"), str(tmp_path / "c.json")])
    assert "+.100 ± .202, not distinguishable" in capsys.readouterr().out


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
