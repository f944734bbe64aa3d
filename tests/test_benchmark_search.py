"""The script that searches settings on the validation split."""

import importlib
import json
from pathlib import Path

import pytest

from peerbayes.recipes.recipe import load_recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("search")


def test_every_factor_changes_the_recipe_as_it_says(script):
    for search in (value for name, value in script.SEARCHES.items() if name.startswith("cifar100")):
        base = load_recipe(search.recipe)
        for factor in search.factors:
            changed = load_recipe(search.recipe, script.settings(search, factor, 40))
            assert (changed == base) == (factor == "base"), (search.recipe, factor)


def test_trials_are_compared_with_the_base_on_the_validation_split(script, tmp_path, capsys):
    out, words = tmp_path / "found.json", ["digits", "base", "cutmix-1.0+kl-0.0", "--epochs", "2", "--device", "cpu"]
    assert script.main([*words, "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["trial"] for row in record["rows"]] == ["base", "cutmix-1.0+kl-0.0"]
    assert record["split"] == "validation"
    assert all(part["cnll"] < part["nll"] + 0.01 for row in record["rows"] for part in (row, row["ensemble"]))
    gap = record["rows"][1]["nll"] - record["rows"][0]["nll"]
    assert f"| {gap:+.3f} |" in capsys.readouterr().out
    before = out.read_text()
    assert script.main([*words, "--runs", str(tmp_path / "other"), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["rows"] == json.loads(before)["rows"]  # none is made again


def test_an_unknown_factor_is_refused(script):
    with pytest.raises(SystemExit, match="there is no factor 'lr-9'"):
        script.settings(script.SEARCHES["digits"], "base+lr-9", 4)
