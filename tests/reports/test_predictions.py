"""New files to a trained run: classes by name, and how unsure it is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import called, refused
from peerbayes.api.fitting import train
from peerbayes.data import to_unit
from peerbayes.data.splits import ArraySplit
from peerbayes.data.transforms import channels as recolouring
from peerbayes.data.transforms.channels import Recoloured
from peerbayes.errors import InputError
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.predictions import predict_inputs, prediction_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = load_recipe("mutual/digits-vanilla", ["stages.*.epochs=1"])
    alone = [peer.model_copy(update={"start_from": None}) for peer in recipe.peers]
    recipe = recipe.model_copy(update={"peers": alone})
    return train(recipe, tmp_path_factory.mktemp("digits") / "run", device="cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Grey and coloured files, and the grey pixels that they stand for."""
    folder, chance = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    grey = chance.integers(0, 256, (5, 8, 8)).astype(np.uint8)
    for number, pixels in enumerate(grey):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    colour = Image.fromarray(chance.integers(0, 256, (8, 8, 3)).astype(np.uint8))
    colour.save(folder / "5.bmp")
    return folder, np.concatenate([grey, np.asarray(colour.convert("L"))[None]])


def test_peers_predict_as_one_and_say_how_unsure_they_are(run, pictures):
    folder, pixels = pictures
    found = predict_inputs(run.folder, [folder], draws=4, calibrated=False, device="cpu")
    assert [one["file"] for one in found] == [
        str(folder / name) for name in ("0.png", "1.png", "2.png", "3.png", "4.png", "5.bmp")
    ]
    images = torch.from_numpy(pixels)[:, None]
    single = []  # every draw of every peer, by itself
    for name in run:
        whole = run[name].predict(images, 4, seed=run.seed, name=name)
        single += [torch.softmax(run[name].materialise(whole.replay(n))(to_unit(images)), -1) for n in range(4)]
    p = torch.stack(single).detach().double()
    mean = p.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    for place, one in enumerate(found):
        given = torch.tensor(list(one["probabilities"].values()), dtype=torch.float64)
        near = 3e-3 if place == 5 else 1e-5  # Pillow's luma is rounded otherwise
        torch.testing.assert_close(given, mean[place], rtol=0, atol=near)
        assert one["class"] == str(int(mean[place].argmax()))
        assert one["probability"] == pytest.approx(float(mean[place].max()), abs=near)
        assert one["entropy"] == pytest.approx(float(entropy[place]), abs=10 * near)
        expected = entropy[place] + (p[:, place] * p[:, place].log()).sum(-1).mean()
        assert one["disagreement"] == pytest.approx(float(expected), abs=10 * near)


def test_the_command_prints_a_line_a_file_or_json(run, pictures):
    folder, _ = pictures
    file = str(folder / "3.png")
    weights = run.weights_file("scratch")
    (one,) = json.loads(called("predict", weights, file, "--draws", "3", "--json", "--device", "cpu"))
    (alone,) = predict_inputs(weights, [file], draws=3, device="cpu")
    assert one == alone
    lines = called("predict", run.folder, folder, "--draws", "2", "--device", "cpu").splitlines()
    assert len(lines) == 7
    assert lines[0].split() == ["file", "class", "probability", "entropy", "disagreement"]
    assert lines[4].split()[0] == file


@pytest.mark.parametrize(("part", "value"), [("rho/", 1e30), ("running_var", -1.0)])
def test_weights_that_predict_no_numbers_are_refused_by_every_verb(run, pictures, tmp_path, capsys, part, value):
    copy = Path(shutil.copytree(run.folder, tmp_path / "run"))
    for weights in copy.glob("weights-*.safetensors"):
        tensors, about = storage.read(weights)
        changed = {name: torch.full_like(tensor, value) for name, tensor in tensors.items() if part in name}
        assert changed
        storage.write(weights, tensors | changed, about)
    sentences = [
        refused(capsys, "predict", copy, pictures[0], "--device", "cpu"),
        refused(capsys, "predict", copy, pictures[0], "--json", "--device", "cpu"),
        refused(capsys, "evaluate", copy, "--device", "cpu"),
        refused(capsys, "size", copy, "--evaluate", "--device", "cpu"),
        refused(capsys, "figure", "confidence", copy, "--device", "cpu", "--out", tmp_path / "figure.png"),
    ]
    for sentence in sentences:
        assert sentence.startswith(f"{copy / 'weights-scratch.safetensors'}: ")
        assert "not numbers (NaN)" in sentence
    assert not (tmp_path / "figure.png").exists()


def test_names_of_classes_are_those_of_the_data(tmp_path, pictures):
    for number in range(24):
        place = tmp_path / "set" / ("dark", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 9, 3), 40 + 180 * (number % 2), np.uint8)).save(place / f"{number}.png")
    changes = ["stages.*.epochs=6", "data.batch_size=8", "data.classes=2", "data.validation=0", "data.augment=[]"]
    recipe = load_recipe("mutual/digits-dnn", [*changes, f"data.name={tmp_path / 'set'}"])
    run = train(recipe, tmp_path / "run", device="cpu")
    found = predict_inputs(run.folder, [tmp_path / "set" / "light", tmp_path / "set" / "dark"], device="cpu")
    assert [one["class"] for one in found] == ["light"] * 12 + ["dark"] * 12
    assert set(found[0]["probabilities"]) == {"light", "dark"}
    assert "light" in prediction_table(found)


def test_texts_are_given_as_they_are_or_a_line_each(tmp_path):
    rows = [f"{1 + n % 2},{('sun rain wind', 'goal team cup')[n % 2]}" for n in range(40)]
    (tmp_path / "set").mkdir()
    for part in ("train", "test"):
        (tmp_path / "set" / f"{part}.csv").write_text("\n".join(rows))
    (tmp_path / "set" / "classes.txt").write_text("weather\nsport\n")
    changes = [f"data.name={tmp_path / 'set'}", "data.classes=2", "data.batch_size=8", "stages.*.epochs=30"]
    changes += ["data.validation=0", "data.text.buckets=50", "stages.*.optimizer.lr=0.1"]
    run = train(load_recipe("renyi/agnews-fasttext-dml", changes), tmp_path / "run", device="cpu")
    (tmp_path / "new.txt").write_text("rain and wind\n\nthe cup\n")
    found = predict_inputs(run.folder, [tmp_path / "new.txt", "goal"], device="cpu")
    assert [(one["text"], one["class"]) for one in found] == [
        ("rain and wind", "weather"),
        ("the cup", "sport"),
        ("goal", "sport"),
    ]
    long = " ".join(["wind"] * 150)  # no name of a file
    (one,) = predict_inputs(run.folder, long, device="cpu")
    assert one["class"] == "weather"
    assert len(prediction_table([one | {"text": "two\nlines"}]).splitlines()) == 2
    for given, told in (("gone.txt", "gone.txt: there is no such text file"), (str(tmp_path), "no such text file")):
        with pytest.raises(InputError, match=told):
            predict_inputs(run.folder, [given], device="cpu")
    with pytest.raises(InputError, match="there is nothing to predict"):
        predict_inputs(run.folder, [], device="cpu")
    expected = run[next(iter(run))].predict(run.vocabulary.encode(["the cup"]), 1)
    (alone,) = predict_inputs(run.weights_file(next(iter(run))), ["the cup"], device="cpu")
    assert alone["probability"] == pytest.approx(float(expected.probabilities.max()), abs=1e-6)


def test_what_is_no_image_is_named(run, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"not an image")
    (tmp_path / "none").mkdir()
    for given, told in (
        ("gone.png", "gone.png: there is no such image file or folder"),
        (tmp_path / "none", "none: expected images (.jpg, .jpeg, .png"),
        (tmp_path / "broken.png", "broken.png: cannot be decoded as an image"),
    ):
        assert told in refused(capsys, "predict", run.folder, given, "--device", "cpu")


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipe_is_no_image_and_nobody_waits_for_it(run, tmp_path, inside):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    command = [
        sys.executable,
        "-m",
        "peerbayes",
        "predict",
        run.folder,
        tmp_path if inside else pipe,
        "--device",
        "cpu",
    ]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 2
    assert f"{pipe}: is not a regular file, expected an image" in " ".join(ended.stderr.split())


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_colours_become_pillows_grey_and_grey_becomes_colours(kind):
    chance = np.random.default_rng(1)
    pixels = chance.integers(0, 256, (6, 5, 4, 3)).astype(np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    split = ArraySplit(images if kind == torch.uint8 else images / 255, torch.arange(6))
    index = torch.tensor([4, 1])
    grey, labels = Recoloured(split, 1).batch(index, torch.device("cpu"))
    expected = np.stack([np.asarray(Image.fromarray(pixels[n]).convert("L")) for n in (4, 1)])[:, None]
    assert grey.dtype == kind
    assert labels.tolist() == [4, 1]
    whole = grey.float() if kind == torch.uint8 else 255 * grey
    assert (whole - torch.from_numpy(expected).float()).abs().max() <= 1
    back, _ = Recoloured(ArraySplit(grey, None), 3).batch(torch.arange(2), torch.device("cpu"))
    assert torch.equal(back, grey.expand(2, 3, 5, 4))


def test_grey_is_made_in_bounded_memory(monkeypatch):
    largest = []

    class Counted(ArraySplit):
        def batch(self, index, device):
            largest.append(len(index))
            return super().batch(index, device)

    images = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8)
    whole, _ = Recoloured(ArraySplit(images, None), 1).batch(torch.arange(40), torch.device("cpu"))
    monkeypatch.setattr(recolouring, "NUMBERS", 7 * 48)
    parts, _ = Recoloured(Counted(images, None), 1).batch(torch.arange(40), torch.device("cpu"))
    assert torch.equal(parts, whole)
    assert max(largest) == 7
