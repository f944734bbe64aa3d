"""Runs over texts: what made token numbers of them is part of the run."""

import csv
import json
import random

import pytest
import torch

from commands import called, ended, refused
from peerbayes.api.distilling import distill
from peerbayes.api.fitting import train
from peerbayes.data import Vocabulary
from peerbayes.errors import InputError
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.evaluating import evaluate
from peerbayes.runs.run import Run

pytestmark = pytest.mark.filterwarnings("ignore:FastText. .* trainable weights are Bayesian")
WORDS = {
    1: "goal match team player coach score win league cup season",
    2: "stock market bank price trade profit share fund rate bond",
}

RECIPE = """
title = "texts"
[data]
name = "DATA"
batch_size = 8
text = { tokens = "words", ngrams = 2, length = 12, buckets = 50 }
[[peers]]
name = "a"
network = "fasttext"
posterior = { kind = "point" }
[[peers]]
name = "b"
network = "fasttext"
posterior = { kind = "mean_field" }
[[stages]]
epochs = 15
optimizer = { name = "adam", lr = 0.1 }
[stages.terms]
likelihood = {}
mutual = { alpha = 2.0 }
[evaluation]
draws = 4
"""


SHORT = ["stages.0.epochs=15", "stages.0.warmup=0", "data.batch_size=8", "data.augment=[]"]


def rows(count, seed):
    chance = random.Random(seed)
    for number in range(count):
        label = 1 + number % 2
        yield [label, " ".join(chance.choices(WORDS[label].split(), k=6)), "the end"]


def write(path, found):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(found)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "news").mkdir()
    write(tmp_path / "news" / "train.csv", rows(64, 0))
    write(tmp_path / "news" / "test.csv", rows(20, 1))
    (tmp_path / "mine.toml").write_text(RECIPE.replace("DATA", str(tmp_path / "news")))
    return tmp_path


def test_a_run_over_texts_learns_and_is_judged_by_its_own_vocabulary(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert ended("train", "mine.toml", "--run", "runs/t", "--json", "-q") == 0
    trained = json.loads(capsys.readouterr().out)
    assert [peer["accuracy"] for peer in trained["peers"]] == [1.0, 1.0]
    assert trained["alpha"] == 2.0
    # Another training split would give other token numbers; the run keeps its own.
    changed = list(rows(64, 9))
    write(place / "news" / "train.csv", [[1, "zebra " * 9, ""], *changed[::-1]])
    write(place / "other.csv", [[1, "completely different words here", "x"], [2, "nothing of that is known", "y"]])
    assert ended("evaluate", "runs/t", "--json", "--ood", place / "other.csv") == 0
    judged = json.loads(capsys.readouterr().out)
    for before, after in zip(trained["peers"], judged["peers"], strict=True):
        assert {key: after[key] for key in ("accuracy", "nll", "ece", "brier")} == {
            key: before[key] for key in ("accuracy", "nll", "ece", "brier")
        }
        assert after["out_of_distribution"][str(place / "other.csv")]["auroc"] >= 0.9
    known = Run("runs/t").vocabulary
    assert isinstance(known, Vocabulary)
    rebuilt = train(load_recipe("mine.toml", ["stages.0.epochs=1"]), "runs/u", seed=0).vocabulary
    assert rebuilt.digest != known.digest


def test_a_codebook_of_few_weights_is_told_and_the_others_are_halved(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert ended("train", "mine.toml", "--run", "runs/t", "-q") == 0
    how = ("--set", "peers.0.posterior.components=4", "--set", "peers.0.posterior.outliers=false", "-q")
    assert ended("compress", "runs/t/weights-b.safetensors", *how, "--run", "runs/s", "--set", "stages.0.epochs=1") == 0
    told = capsys.readouterr().err
    assert "peer 'net': 20 of 762 weights share a codebook; the others, mostly 'embedding.weight', have no" in told
    assert json.loads(called("size", "runs/s", "--json"))[0]["parts"]["everything else"] < 2 * 742 + 200
    assert "news holds texts, expected images to corrupt" in refused(
        capsys, "evaluate", "runs/s", "--corrupted", "made"
    )


def test_a_bag_of_pieces_leaves_out_the_tokenizers_padding_and_nothing_else(place, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [*WORDS[1].split(), "<pad>", *WORDS[2].split(), "<unk>"]  # number 0 is a word, as in many tokenizers
    numbers = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(place / "tokenizer.json"))
    monkeypatch.chdir(place)
    text = 'data.text={ tokens = "pieces", tokenizer = "tokenizer.json", length = 12 }'
    train(load_recipe("mine.toml", [text, "stages.0.epochs=2"]), "runs/p")
    run = Run("runs/p")  # whose network is built anew
    words = ["goal goal bond", "goal", "bond " * 12]
    network = run["a"].materialise().eval()
    goal, bond = network.embedding.weight[[0, 20]]
    bags = torch.stack([(2 * goal + bond) / 3, goal, bond])
    expected = torch.nn.functional.linear(bags, network.linear.weight, network.linear.bias)
    torch.testing.assert_close(network(run.vocabulary.encode(words)), expected)


def test_a_damaged_vocabulary_is_named(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    train(load_recipe("mine.toml", ["stages.0.epochs=1"]), "runs/t")
    path = place / "runs" / "t" / "vocabulary.json"
    path.write_text(path.read_text().replace("goal", "gaol", 1))
    assert ended("evaluate", "runs/t") == 2
    assert "vocabulary.json" in capsys.readouterr().err


def test_a_run_that_lost_its_vocabulary_is_not_judged_by_another(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    train(load_recipe("mine.toml", ["stages.0.epochs=1"]), "runs/t")
    (place / "runs" / "t" / "vocabulary.json").unlink()
    assert ended("evaluate", "runs/t") == 2
    assert "vocabulary.json: no such file" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"vocabulary\.json: no such file"):
        evaluate("runs/t")


def test_a_run_that_lost_its_vocabulary_does_not_go_on_with_another(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    train(load_recipe("mine.toml", ["stages.0.epochs=1"]), "runs/t")
    folder = place / "runs" / "t"
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"finished": False}))
    (folder / "vocabulary.json").unlink()
    assert ended("train", "mine.toml", "--set", "stages.0.epochs=1", "--run", "runs/t", "--resume") == 2
    assert "vocabulary.json: no such file" in capsys.readouterr().err


def test_texts_are_distilled_in_the_words_of_their_teachers(place, monkeypatch):
    monkeypatch.chdir(place)
    run = train("mine.toml", "runs/t")
    # Shorter texts would do, but not in the order in which this split would number its words.
    write(
        place / "news" / "train.csv", [row for row in [*rows(64, 0), *rows(64, 0)] if row[0] == 2] + list(rows(64, 0))
    )
    student = distill([run], into=run["a"].materialise(), recipe="distillation/kd", run="runs/d", overrides=SHORT)
    assert Run("runs/d", {"student": student}).vocabulary == run.vocabulary
    encoded = run.vocabulary.encode([" ".join(row[1:]) for row in rows(20, 1)])
    assert student(encoded).argmax(-1).tolist() == [row[0] - 1 for row in rows(20, 1)]


def test_every_parameter_of_a_text_network_may_be_bayesian(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    changes = ["--set", 'peers.b.posterior.bayesian=["*"]', "--set", "stages.0.epochs=2"]
    assert ended("train", "mine.toml", *changes, "--run", "runs/t", "--json", "-q") == 0
    trained = json.loads(capsys.readouterr().out)
    posterior = Run("runs/t")["b"]
    assert set(posterior.layout.shapes) == {"embedding.weight", "linear.weight", "linear.bias"}
    assert posterior.rest.numel() == 0
    assert ended("evaluate", "runs/t", "--json") == 0
    assert json.loads(capsys.readouterr().out)["peers"][1]["nll"] == trained["peers"][1]["nll"]
    changes[1] = 'peers.b.posterior.bayesian=["embeding*"]'
    assert ended("train", "mine.toml", *changes, "--run", "runs/u") == 2
    said = "peer 'b': posterior.bayesian: 'embeding*' fits no trainable parameter; they have names such as"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("use", ["start_from", "teachers"])
def test_weights_of_a_run_with_other_numbers_for_the_same_words_are_refused(place, use, monkeypatch):
    monkeypatch.chdir(place)
    train(load_recipe("mine.toml", ["stages.0.epochs=1"]), "runs/t")
    folder = str(place / "runs" / "t")
    changes = {
        "start_from": ["stages.0.epochs=1", f"peers.a.start_from={folder}/weights-a.safetensors"],
        "teachers": ["stages.0.epochs=1", "stages.0.terms.distil={}", f'teachers={{runs=["{folder}"]}}'],
    }[use]
    train(load_recipe("mine.toml", [*changes, "data.text.length=12"]), "runs/same")
    again = [row for row in rows(64, 0) if row[0] == 2]  # other counts, so another order of as many words
    write(place / "news" / "train.csv", [*rows(64, 0), *again])
    with pytest.raises(InputError, match=r"vocabulary\.json: has other numbers for words"):
        train(load_recipe("mine.toml", changes), "runs/other")
    assert not (place / "runs" / "other").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.augment=['crop']", "'crop'"),
        ("peers.*.network=resnet8", "the data are texts"),
        ("data.text.ngrams=0", "data.text.ngrams"),
        ("data.text.token=words", "has no key 'token'; did you mean 'tokens'"),
    ],
)
def test_what_makes_no_sense_for_texts_is_one_sentence_before_anything_is_written(place, change, words):
    with pytest.raises(InputError) as caught:
        train(load_recipe(place / "mine.toml", [change]), place / "runs" / "x")
    assert words in str(caught.value)
    assert not (place / "runs" / "x").exists()


def test_images_refuse_a_text_network():
    with pytest.raises(InputError, match="fasttext"):
        train(load_recipe("mutual/digits-dnn", ["peers.*.network=fasttext"]), "never")
