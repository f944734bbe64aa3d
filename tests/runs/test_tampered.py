"""Files of a run that somebody has changed, digests and all: one sentence or the same as ever, and soon."""

import copy
import json
import shutil
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commands import refused, write_small
from learners import Recorder, stopped_at
from peerbayes.api.fitting import train
from peerbayes.data.vocabulary import TextOptions, Vocabulary, _digest
from peerbayes.errors import InputError, TrainingError
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import load_recipe
from peerbayes.runs.run import Run

STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.just([[1]]),
    st.just({"a": {"b": []}}),
)


def paths(node, path=()):
    """Yield the paths of all values in nested tables."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


def changed(draw, table):
    """Return a table with one value replaced, or taken away."""
    table = copy.deepcopy(table)
    *above, last = draw(st.sampled_from([path for path in paths(table) if path]))
    node = table
    for key in above:
        node = node[key]
    if draw(st.booleans()) and isinstance(node, dict):
        del node[last]
    else:
        node[last] = draw(STRANGE)
    return table


def one_line(error):
    assert "\n" not in str(error)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("tampered"))


@pytest.fixture(scope="module")
def run(place):
    train(load_recipe(place / "small.toml"), place / "run", device="cpu", reporter=Recorder())
    return place / "run"


@pytest.fixture(scope="module")
def half(place):
    with stopped_at(7):
        train(load_recipe(place / "small.toml"), place / "half", device="cpu", checkpoint_every=3, reporter=Recorder())
    return place / "half"


def unhurried(count):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, derandomize=True, suppress_health_check=checks)


@given(data=st.data())
@unhurried(150)
def test_any_value_of_run_json(run, tmp_path, data):
    bad = shutil.copytree(run, tmp_path / "bad", dirs_exist_ok=True)
    about = changed(data.draw, json.loads((run / "run.json").read_text()))
    (bad / "run.json").write_text(json.dumps(about))
    try:
        opened = Run(bad)
        opened["a"].predict(torch.zeros(1, 1, 8, 8), 2)
        opened.data()
    except InputError as error:
        one_line(error)


@given(data=st.data())
@unhurried(60)
def test_any_value_of_a_weights_description(run, tmp_path, data):
    bad = shutil.copytree(run, tmp_path / "bad", dirs_exist_ok=True)
    tensors, about = storage.read(run / "weights-a.safetensors")
    storage.write(bad / "weights-a.safetensors", tensors, changed(data.draw, about))
    try:
        Run(bad)["a"].predict(torch.zeros(1, 1, 8, 8), 2)
    except InputError as error:
        one_line(error)


@given(data=st.data())
@unhurried(40)
def test_any_value_or_tensor_of_a_checkpoint(place, half, tmp_path, data):
    bad = tmp_path / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(half, bad)
    path = max(bad.glob("checkpoint-*"))
    tensors, about = storage.read(path)
    if data.draw(st.booleans()):
        about = changed(data.draw, about)
    else:
        name = data.draw(st.sampled_from(sorted(tensors)))
        kept = tensors.pop(name)
        if data.draw(st.booleans()):
            tensors[name] = data.draw(st.sampled_from([torch.zeros(3, 5, 1), torch.zeros(0), kept[None]]))
    storage.write(path, tensors, about)
    try:
        train(
            load_recipe(place / "small.toml"), bad, device="cpu", checkpoint_every=3, reporter=Recorder(), resume=True
        )
    except (InputError, TrainingError) as error:
        one_line(error)


@pytest.mark.parametrize("name", ["run.json", "recipe.toml", "vocabulary.json", "metrics.jsonl"])
@pytest.mark.parametrize("what", ["deep", "parts", "quoted", "digits", "bytes"])
def test_files_made_to_tire_a_parser_are_one_sentence_soon(run, tmp_path, capsys, name, what):
    bad = shutil.copytree(run, tmp_path / "bad")
    text = {
        "deep": "x = " + "[" * 100_000 if name.endswith("toml") else '{"seed": ' + "[" * 100_000,
        "parts": "a." * 50_000 + "b = 1",
        "quoted": '"a" . ' * 50_000 + "b = 1",
        "digits": "seed = " + "9" * 100_000 if name.endswith("toml") else '{"seed": ' + "9" * 100_000 + "}",
        "bytes": "\0" * 1000,
    }[what]
    (bad / name).write_text(text + "\n")
    before = time.perf_counter()
    assert name in refused(capsys, "evaluate", bad, "--device", "cpu")
    assert time.perf_counter() - before < 20


@pytest.mark.parametrize(
    "change",
    [
        {"length": 10**12},
        {"length": -1},
        {"ngrams": 10**9},
        {"ngrams": 0},
        {"kind": "runes"},
        {"words": [1, 2]},
        {"words": "ab", "length": True},
        {"buckets": -5},
        {"tokenizer": 3},
    ],
)
def test_a_vocabulary_that_no_texts_have_made_is_one_sentence(tmp_path, change):
    Vocabulary.build(["a b", "b c"], TextOptions(ngrams=2)).save(tmp_path / "vocabulary.json")
    content = json.loads((tmp_path / "vocabulary.json").read_text()) | change
    del content["digest"]
    (tmp_path / "vocabulary.json").write_text(json.dumps({"digest": _digest(content), **content}))
    with pytest.raises(InputError, match="not a vocabulary of this version"):
        Vocabulary.load(tmp_path / "vocabulary.json")
