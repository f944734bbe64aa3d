"""The READMEs of the papers: each says all it should, and its figures are those of the records that it links to."""

import json
import re
import statistics
from pathlib import Path

import pytest

import peerbayes

ROOT = Path(__file__).parent.parent.parent
READMES = sorted((Path(peerbayes.__file__).parent / "papers").glob("*/README.md"))
READMES = [path for path in READMES if path.parent.name != "yardsticks"]  # no paper
KEYS = ("accuracy", "nll", "ece")


def records(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def words(values, seeds=()):
    """Return accuracy in percent, NLL and ECE as tables have them, with standard errors over seeds."""
    found = []
    for place, value in enumerate(values):
        digits, scale = (2, 100) if place == 0 else (3, 1)
        text = f"{value * scale:.{digits}f}"
        if len(seeds) > 1:
            error = statistics.stdev([seed[place] * scale for seed in seeds]) / len(seeds) ** 0.5
            text += f" ± {error:.{digits}f}"
        found.append(re.sub(r"\b0\.(?=\d{3})", ".", text))
    return found


def figures(record, peer=None):
    """Return the three figures of a peer, or of the average of all."""
    peers = [one for one in record["peers"] if peer in (None, one["name"])]
    return [statistics.fmean(one[key] for one in peers) for key in KEYS]


def text_of(paper):
    (path,) = (path for path in READMES if path.parent.name == paper)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_it_says_what_is_claimed_done_measured_and_different(path):
    text = path.read_text(encoding="utf-8")
    places = [text.find(f"**What {word}.**") for word in ("it claims", "we do", "we measured", "differs")]
    assert min(places) > 0
    assert places == sorted(places)
    assert re.search(r"\]\([./]*results/[\w-]+\.json\)", text)


def test_there_are_four():
    assert [path.parent.name for path in READMES] == ["latentbe", "mutual_bayesian", "renyi", "weight_sharing"]


def test_mutual_learning():
    text, seen = text_of("mutual_bayesian"), 0
    for record in records("mutual-cifar100-resnet20"):
        for peer in record["peers"]:
            seen += 1
            assert ", ".join(words([peer[key] for key in KEYS])) in text, (record["method"], peer["name"])
    assert seen == 7


def test_renyi():
    text, by_recipe = text_of("renyi"), {}
    for record in records("renyi-cifar100-resnet20"):
        by_recipe.setdefault(record["recipe"], []).append(figures(record))
    rows = [words([statistics.fmean(column) for column in zip(*seeds)], seeds) for seeds in by_recipe.values()]
    assert len(rows) == 5
    for row in rows:
        assert " | ".join(row) in text, row


def test_one_network_of_an_ensemble():
    text = text_of("latentbe")
    for record in records("distillation-cifar10-wrn28x1"):
        assert ", ".join(words(figures(record))) in text, record["method"]


def test_weight_sharing():
    text, by_recipe = text_of("weight_sharing"), {}
    for record in records("sharing-cifar10-resnet20"):
        by_recipe.setdefault(record["recipe"], []).append(figures(record))
    for recipe in ("sharing/cifar10-resnet20-dnn", "sharing/cifar10-resnet20-shared"):
        seeds = by_recipe[recipe]
        row = " | ".join(words([statistics.fmean(column) for column in zip(*seeds)], seeds))
        assert len(seeds) == 3
        assert row in text, row


def test_a_wrong_figure_is_seen():
    record = records("mutual-cifar100-resnet20")[0]["peers"][0]
    assert ", ".join(words([record["accuracy"] + 1e-3, record["nll"], record["ece"]])) not in text_of("mutual_bayesian")
