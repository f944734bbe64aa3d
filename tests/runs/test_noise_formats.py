"""Runs made before noise had a format 2 open, evaluate and resume as they were; new runs say their format."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import peerbayes as pb
from peerbayes.math.noise import FORMAT, Address, format_of, normal
from peerbayes.posteriors import storage

# One run of 34 steps twice, made by a version without formats: to its end, and stopped after 20 steps.
OLD = Path(__file__).parent / "format1"


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_an_old_run_is_judged_as_it_was(old):
    (peer,) = pb.evaluate(old / "finished", device="cpu")["peers"]
    assert peer["accuracy"] == pytest.approx(0.672, abs=3e-3)
    assert peer["nll"] == pytest.approx(1.2555580813884735, abs=2e-4)
    posterior = pb.load(old / "finished")["one"]
    test = pb.data.load("digits").test
    predicted = [posterior.predict(test.images, 3, seed=seed, calibrated=False) for seed in (None, 3)]
    losses = [pb.metrics.nll_from_log(one.log_probabilities, test.labels) for one in predicted]
    assert losses[0] == pytest.approx(peer["nll"], rel=1e-6)
    assert abs(losses[1] - losses[0]) > 2e-3  # draws of the other format


def test_an_interrupted_old_run_ends_as_it_would_have(old, tmp_path):
    recipe = pb.load_recipe(old / "interrupted" / "recipe.toml")
    done = pb.train(recipe, old / "interrupted", seed=3, resume=True, device="cpu")
    whole = pb.load(old / "finished")
    for line, expected in zip(done.metrics, whole.metrics, strict=True):
        assert line["peers"]["one"]["loss"] == pytest.approx(expected["peers"]["one"]["loss"], rel=1e-4)
    fresh = pb.train(recipe, tmp_path / "new", seed=3, device="cpu")
    as_before, other = (float((run["one"].mean - whole["one"].mean).detach().abs().max()) for run in (done, fresh))
    assert as_before < 1e-3 < 1e-2 < other
    assert [format_of(run.seed) for run in (done, fresh)] == [1, 2]
    assert [json.loads((run.folder / "run.json").read_text())["noise"] for run in (done, fresh)] == [1, 2]


def test_a_file_keeps_the_format_of_its_noise(old, tmp_path):
    run = pb.load(old / "finished")
    assert "noise" not in storage.read(run.weights_file("one"))[1]
    run["one"].save(tmp_path / "again.safetensors")
    again = pb.MeanField.load(tmp_path / "again.safetensors", run.network("one"))
    address = Address(run["one"].seed, "one", "draw", 1)
    for posterior, same in ((again, True), (pb.MeanField(run.network("one"), seed=3), False)):
        found = normal(Address(posterior.seed, "one", "draw", 1), 9)
        assert torch.equal(found, normal(address, 9)) == same


def test_noise_of_a_later_format_is_refused(old):
    path = old / "finished" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"noise": FORMAT + 1}))
    sentence = r"run.json: noise is 3, expected its format, 1 or 2; update peerbayes for others"
    with pytest.raises(pb.InputError, match=sentence):
        pb.evaluate(old / "finished", device="cpu")
    file = old / "finished" / "weights-one.safetensors"
    tensors, about = storage.read(file)
    storage.write(file, tensors, about | {"noise": "none"})
    with pytest.raises(pb.InputError, match=r"weights-one.safetensors: noise is 'none', expected its format, 1 or 2"):
        pb.MeanField.load(file, pb.load(OLD / "finished").network("one"))
