"""The inputs that a page shows: which ones, what is said of them, and that pictures are those of the data."""

import base64
import csv
import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import peerbayes as pb
from peerbayes.data import from_arrays, load
from peerbayes.reports.evaluating import LETTERS, SIDE, examples_of, thumbnail
from peerbayes.reports.page import report_page, write_report

NAMES = ["ant", "bee", "<cat>"]
P = torch.tensor([[0.98, 0.01, 0.01], [0.4, 0.35, 0.25], [0.1, 0.8, 0.1], [0.05, 0.05, 0.9], [1 / 3, 1 / 3, 1 / 3]])
LABELS = [0, 0, 2, 2, 1]


def opened(address):
    kind, _, data = address.partition(";base64,")
    image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert kind == f"data:image/{image.format.lower()}"
    return image


@pytest.fixture
def data():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3)).astype(np.uint8)
    labels = np.array([NAMES[label] for label in LABELS])
    return from_arrays((pixels, labels), (pixels, labels), names=NAMES), pixels


def test_inputs_are_chosen_by_entropy_and_by_mistakes(data):
    found = examples_of(P.log(), data[0], 3)
    assert found["kind"] == "image"
    # Entropies 0.11, 1.08, 0.64, 0.39 and log 3; wrong are 2 (said bee) and 4 (of a tie the first class is said).
    assert [one["index"] for one in found["least certain"]] == [4, 1, 2]
    assert [one["index"] for one in found["most certain"]] == [0, 3, 2]
    assert [one["index"] for one in found["most certain, and wrong"]] == [2, 4]
    said = found["most certain, and wrong"][0]
    assert (said["label"], said["class"]) == ("<cat>", "bee")
    assert said["probability"] == pytest.approx(0.8)
    assert said["entropy"] == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.1))
    assert examples_of(P.log(), data[0], 50)["least certain"][4]["index"] == 0  # no more than there are


def test_pictures_are_those_of_the_test_split(data):
    found, pixels = examples_of(P.log(), data[0], 5), data[1]
    for one in found["most certain"]:
        np.testing.assert_array_equal(np.asarray(opened(one["shown"])), pixels[one["index"]])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_large_and_float_images_become_small_pictures(channels):
    image = torch.linspace(0, 1, channels * 300 * 200).view(channels, 300, 200)
    picture = opened(thumbnail(image))
    assert picture.size == (64, SIDE)
    assert picture.mode == ("RGB" if channels == 3 else "L")
    wanted = image if channels != 4 else image.mean(0, keepdim=True)
    levels = np.asarray(picture, dtype=float).reshape(-1, picture.size[0], len(wanted) if channels == 3 else 1)
    assert levels.mean() == pytest.approx(255 * wanted.mean().item(), abs=2)
    np.testing.assert_array_equal(np.asarray(opened(thumbnail(torch.full((1, 4, 4), 1.5)))), 255)


def test_texts_are_shown_as_they_were_written(tmp_path):
    written = [("Is it <b>so</b>?", "ask"), ("It   is\nso.", "say"), ("x" * 1000, "say")]
    for name, rows in (("train", written * 4), ("test", written)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    data = load(tmp_path)
    log_p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]]).log()
    found = examples_of(log_p, data, 3)
    shown = {one["index"]: one["shown"] for one in found["least certain"]}
    assert found["kind"] == "text"
    assert shown == {0: "Is it <b>so</b>?", 1: "It is so.", 2: "x" * (LETTERS - 1) + "…"}
    turned = data.test.select(torch.tensor([2, 0])).to("cpu")
    assert [turned.texts[0][:1], turned.texts[1]] == ["x", "Is it <b>so</b>?"]


def test_files_and_json_have_figures_alone(tmp_path):
    short = ["peers.*.network=mlp", "stages.*.epochs=1", "stages.*.warmup=0"]
    run = pb.train("plain", tmp_path / "run", overrides=short, device="cpu")
    record = pb.evaluate(run, examples=2, device="cpu")
    plain = pb.evaluate(run, device="cpu")
    assert "examples" not in plain
    assert {key: value for key, value in record.items() if key != "examples"} == plain
    write_report(run, record)
    assert json.loads((run.folder / "evaluation.json").read_text()) == json.loads(json.dumps(plain))
    page = (run.folder / "report.html").read_text()
    assert page.count('alt="Test image ') == 6
    assert 'alt="Test image ' not in report_page([plain], "h", {})
    images, labels = (split := run.data().test).batch(torch.arange(len(split)), torch.device("cpu"))
    predicted = run.predict(images, calibrated=False, device="cpu")
    order = predicted.entropy.argsort(descending=True)
    shown = record["examples"]["least certain"]
    assert [one["index"] for one in shown] == order[:2].tolist()
    assert [one["label"] for one in shown] == [str(int(labels[one["index"]])) for one in shown]
    assert [one["class"] for one in shown] == [str(int(predicted.classes[one["index"]])) for one in shown]
