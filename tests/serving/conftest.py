"""Runs that are served."""

import pytest

from commands import write_small
from peerbayes.api.calibrating import calibrate
from peerbayes.api.fitting import train
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.evaluating import evaluate, write_record
from peerbayes.runs.run import Run

TEXTS = """
title = "texts"
[data]
name = "DATA"
batch_size = 8
text = { tokens = "words", ngrams = 2, length = 12, buckets = 50 }
[[peers]]
name = "a"
network = "fasttext"
posterior = { kind = "point" }
[[stages]]
epochs = 15
optimizer = { name = "adam", lr = 0.1 }
terms = { likelihood = {} }
"""


@pytest.fixture(scope="session")
def certified(tmp_path_factory):
    """A network that has learnt digits, promises 1 % of wrong answers, and abstains from some."""
    recipe = load_recipe("mutual/digits-dnn", ["data.validation=600", "stages.*.epochs=8"])
    run = train(recipe, tmp_path_factory.mktemp("served") / "digits", device="cpu")
    calibrate(run, coverage=0.95, risk=0.01, device="cpu")
    write_record(run.folder / "evaluation.json", evaluate(run, device="cpu"))
    return Run(run.folder)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Two Bayesian peers that have learnt noise, of which nothing is promised."""
    folder = write_small(tmp_path_factory.mktemp("pair"))
    return Run(train(load_recipe(folder / "small.toml", ["stages.0.epochs=1"]), folder / "run", device="cpu").folder)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rows = [f"{word} {other},{label}" for label, words in (("sport", "goal team cup"), ("money", "stock bank fund"))
            for word in words.split() for other in words.split()]  # fmt: skip
    (folder / "texts.csv").write_text("text,label\n" + "\n".join(rows * 4) + "\n")
    (folder / "texts.toml").write_text(TEXTS.replace("DATA", str(folder / "texts.csv")))
    return Run(train(load_recipe(folder / "texts.toml"), folder / "run", device="cpu").folder)
