"""The real package `datasets`, where it is installed: from an object to predictions that abstain and a program."""

import numpy as np
import pytest
import torch
from PIL import Image

import peerbayes as pb

datasets = pytest.importorskip("datasets")
SHORT = ["peers.*.network=mlp", "stages.0.warmup=0", "evaluation.draws=3", "data.validation=200"]


def as_hugging_face(split):
    images, labels = split.batch(torch.arange(len(split)), torch.device("cpu"))
    rows = {"picture": [Image.fromarray(image[0].numpy()) for image in images.byte()], "label": labels.tolist()}
    names = datasets.ClassLabel(names=[f"digit {number}" for number in range(10)])
    return datasets.Dataset.from_dict(
        {"img": rows["picture"], "label": rows["label"]},
        features=datasets.Features({"img": datasets.Image(), "label": names}),
    )


@pytest.fixture(scope="module")
def digits():
    known = pb.data.load("digits")
    return datasets.DatasetDict({"train": as_hugging_face(known.train), "test": as_hugging_face(known.test)})


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hugging") / "run"
    return pb.train("bayesian", folder, data=digits, epochs=12, overrides=SHORT, device="cpu")


def test_an_object_is_what_its_arrays_are(digits):
    known, found = pb.data.load("digits"), pb.data.load(digits)
    assert found.class_names == tuple(f"digit {number}" for number in range(10))
    for one, other in ((found.train, known.train), (found.test, known.test)):
        images, labels = one.batch(torch.arange(len(one)), torch.device("cpu"))
        wanted = other.batch(torch.arange(len(other)), torch.device("cpu"))
        assert torch.equal(images.float(), wanted[0].float())
        assert torch.equal(labels, wanted[1])


def test_from_an_object_to_a_promise_that_predictions_keep(digits, run):
    assert pb.evaluate(run, data=digits)["peers"][0]["accuracy"] > 0.8
    certified = pb.calibrate(run.folder, digits, coverage=0.9, risk=0.3)
    assert certified.certificate.images == 150
    found = certified.predict(digits["test"]["img"][:20], coverage=0.9, risk=0.3)
    assert found.columns["class"][0].startswith("digit ")
    assert found.sets.shape == (20, 10)
    assert found.abstain.dtype == torch.bool


def test_from_an_object_to_a_program(digits, run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made = pb.export(run, out=tmp_path / "made")
    session = onnxruntime.InferenceSession(made.folder / "model.onnx")
    images = np.stack([np.asarray(image, np.float32)[None] / 255 for image in digits["test"]["img"][:5]])
    probabilities, *_ = session.run(None, {"images": images, "seed": np.array(0), "draws": np.array(3)})
    wanted = run.predict(digits["test"]["img"][:5], draws=3, device="cpu").probabilities
    assert np.abs(probabilities - wanted.numpy()).max() < 1e-4


def test_texts_of_an_object(tmp_path):
    words = {"good": "great lovely fine nice", "bad": "awful poor dull grim"}
    pairs = [(f"{' '.join(np.random.default_rng(n).choice(words[label].split(), 3))}", label)
             for n in range(60) for label in words]  # fmt: skip
    texts = datasets.Dataset.from_dict({"text": [text for text, _ in pairs], "label": [label for _, label in pairs]})
    run = pb.train(data=texts, run=tmp_path / "run", epochs=3, device="cpu")
    assert run.predict(["great nice", "awful dull"]).columns["class"] == ["good", "bad"]
