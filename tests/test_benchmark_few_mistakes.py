"""The script that compares rules for keeping a temperature of few mistakes."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("few_mistakes")


def test_labels_are_wrong_as_often_as_asked_and_best_at_the_true_temperature(script):
    log_p, labels = script.drawn(script.scale_for(0.15), 2.0, 20_000, 5)
    assert float((log_p.argmax(1) != labels).double().mean()) == pytest.approx(0.15, abs=0.01)
    assert script.metrics.fit_temperature(log_p, labels) == pytest.approx(2, abs=0.1)


def test_the_rule_that_adopt_has_is_the_best_of_the_record(script):
    rows = json.loads((ROOT / "results" / "few-mistakes.json").read_text())["rows"]
    mean = {rule: sum(row[rule] for row in rows) / len(rows) for rule in script.RULES}
    assert min(mean, key=mean.get) == "always"
    assert max(row["always"] for row in rows) < 0.01
    row = next(row for row in rows if (row["images"], row["error"], row["true"]) == (45, 0.15, 0.25))
    again = script.measure(45, 0.15, 0.25, 0.0, 5)
    assert again["as it is"] == pytest.approx(row["as it is"])
    assert again["always"] == pytest.approx(row["always"], abs=0.02)
