"""The script that measures whether promised coverage and risk hold."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from peerbayes.inference.guarantees import Promises

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("guarantees")


@pytest.fixture
def pool():
    """Predictions of two classes: the second is wrong in 30 % of its answers, the first never, both as sure."""
    classes = torch.arange(2000) % 2
    wrong = (classes == 1) & (torch.arange(2000) % 20 < 6)
    log_p = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64).log()[classes]
    return log_p, torch.where(wrong, 0, classes)


def test_the_risk_of_a_class_is_that_of_its_answers(script):
    classes = torch.tensor([0, 0, 0, 0, 2, 2, 2])
    answered = torch.tensor([True, True, True, True, True, True, False])
    wrong = torch.tensor([True, False, False, False, True, False, True])
    assert script.risk_by_class(classes, answered, wrong) == 0.5


def test_a_promise_for_all_is_no_promise_by_class(script, pool, monkeypatch):
    certify = script.certificate_of

    def for_all(log_p, labels, promises, *others):
        return certify(log_p, labels, Promises(risk=promises.risk), *others)

    assert script.measured(*pool, Promises(risk=0.2), 600, 20)["holds"]
    assert script.measured(*pool, Promises(risk=0.2, by_class=True), 600, 20)["refused"] == 20
    monkeypatch.setattr(script, "certificate_of", for_all)
    found = script.measured(*pool, Promises(risk=0.2, by_class=True), 600, 20)
    assert found["broken"] > 0.8
    assert not found["holds"]


def test_every_promise_of_the_record_holds_and_every_kind_was_kept(script):
    runs = json.loads((ROOT / "results" / "guarantees.json").read_text())["runs"]
    made = [promise for run in runs for promise in run["promises"] if promise["refused"] < run["rounds"]]
    assert all(promise["holds"] for promise in made)
    kinds = {(promise.get("method", "risk"), promise["by_class"]) for promise in made}
    assert kinds == {(method, by_class) for method in ("lac", "aps", "raps", "risk") for by_class in (False, True)}
