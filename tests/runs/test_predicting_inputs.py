"""`Run.predict`: inputs of every form agree bit for bit, with names, temperatures, and tables for people."""

import csv
import io
import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

import peerbayes as pb
from commands import called, process, refused
from peerbayes.api.fitting import train
from peerbayes.data.datasets import folders
from peerbayes.data.splits import FolderSplit
from peerbayes.errors import InputError, UnknownPeer
from peerbayes.inference.prediction import Prediction
from peerbayes.inference.progress import Watcher, watched
from peerbayes.math.noise import Address
from peerbayes.recipes.recipe import load_recipe
from peerbayes.runs import new_inputs
from peerbayes.runs.run import load

PAIR = """
title = "Small"
method = "vanilla"
data = { name = "DATA", batch_size = 8, validation = 8 }
peers = [
  { name = "a", network = "mlp", posterior = { kind = "mean_field" } },
  { name = "b", network = "mlp", posterior = { kind = "mean_field" } },
]
evaluation = { draws = 3 }
[[stages]]
epochs = 2
optimizer = { lr = 1e-3 }
terms = { likelihood = {} }
"""


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """A run over a folder of coloured images in two classes."""
    folder, chance = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for number in range(40):
        place = folder / "set" / ("cat & <b>dog", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 120, (11, 8, 3)) + 120 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    (folder / "pair.toml").write_text(PAIR.replace("DATA", str(folder / "set")))
    return train(load_recipe(folder / "pair.toml"), folder / "run", device="cpu")


@pytest.fixture(scope="module")
def greys(tmp_path_factory):
    recipe = load_recipe("mutual/digits-vanilla", ["stages.*.epochs=1"])
    alone = [peer.model_copy(update={"start_from": None}) for peer in recipe.peers[:1]]
    recipe = recipe.model_copy(update={"peers": alone})
    return train(recipe, tmp_path_factory.mktemp("digits") / "run", device="cpu")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rows = [f"{1 + n % 2},{('sun rain wind', 'goal team cup')[n % 2]}" for n in range(40)]
    (folder / "set").mkdir()
    for part in ("train", "test"):
        (folder / "set" / f"{part}.csv").write_text("\n".join(rows))
    (folder / "set" / "classes.txt").write_text("weather\nsport\n")
    changes = [f"data.name={folder / 'set'}", "data.classes=2", "data.batch_size=8", "stages.*.epochs=3"]
    changes += ["data.validation=8", "data.text.buckets=50", "stages.*.optimizer.lr=0.1"]
    return train(load_recipe("renyi/agnews-fasttext-dml", changes), folder / "run", device="cpu")


def equal(one, two):
    return torch.equal(one.log_probabilities, two.log_probabilities) and torch.equal(
        one.expected_entropy, two.expected_entropy
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, chance = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for number, sides in enumerate([(8, 8), (11, 8), (20, 31), (9, 9)]):
        Image.fromarray(chance.integers(0, 256, (*sides, 3)).astype(np.uint8)).save(folder / f"{number}.png")
    Image.fromarray(chance.integers(0, 256, (13, 17)).astype(np.uint8)).save(folder / "4.png")
    Image.fromarray(chance.integers(0, 256, (13, 17, 4)).astype(np.uint8)).save(folder / "5.png")
    return folder


@pytest.mark.parametrize("kind", ["colours", "greys"])
def test_files_folders_pil_images_arrays_and_tables_agree_bit_for_bit(kind, request, pictures):
    run = request.getfixturevalue(kind)
    files = [str(pictures / f"{number}.png") for number in range(6)]
    (pictures / "listed.csv").write_text("path,more\n" + "".join(f"{os.path.basename(file)},x\n" for file in files))
    (pictures / "bare.csv").write_text("".join(f"{os.path.basename(file)}\n" for file in files))
    images = [Image.open(file) for file in files]
    whole = run.predict(files, draws=3, device="cpu")
    assert whole.inputs == files
    assert whole.kind == "file"
    for other in (
        pictures,
        [pictures / "0.png", *files[1:]],
        pictures / "listed.csv",
        pictures / "bare.csv",
        images,
        [np.asarray(image) for image in images],
        [torch.from_numpy(np.array(image)) for image in images],
        [*images[:2], *map(np.asarray, images[2:])],
        FolderSplit(files, None, 8) if kind == "colours" else files,
    ):
        assert equal(run.predict(other, draws=3, device="cpu"), whole)
    for number, image in enumerate(images):  # alone
        for one in (files[number], image, np.asarray(image)):
            torch.testing.assert_close(
                run.predict(one, draws=3, device="cpu").log_probabilities, whole.log_probabilities[number : number + 1]
            )


def test_arrays_as_they_were_learnt_are_taken_as_they_are(colours, greys):
    chance = np.random.default_rng(2)
    for run, channels in ((colours, 3), (greys, 1)):
        batch = torch.from_numpy(chance.integers(0, 256, (5, channels, 8, 8)).astype(np.uint8))
        peer = next(iter(run))
        expected = run[peer].predict(batch, 4, seed=run.seed, name=peer)
        last = batch.permute(0, 2, 3, 1)
        forms = [batch, batch.numpy(), batch / 255, last.numpy(), list(last)]
        forms += [batch[:, 0]] if channels == 1 else []
        for form in forms:
            found = run.predict(form, peer, draws=4, device="cpu")
            near = 1e-6 if form is forms[2] else 0
            torch.testing.assert_close(found.log_probabilities, expected.log_probabilities, rtol=0, atol=near)
            assert found.inputs == ["0", "1", "2", "3", "4"]
        alone = run.predict(batch[0], peer, draws=4, device="cpu")
        torch.testing.assert_close(alone.log_probabilities, expected.log_probabilities[:1])


def test_texts_files_tables_and_token_numbers_agree_bit_for_bit(texts, tmp_path):
    lines = ["rain and wind", "the cup", "team, goal"]
    (tmp_path / "new.txt").write_text("\n".join(lines))
    (tmp_path / "new.csv").write_text('text,id\nrain and wind,1\nthe cup,2\n"team, goal",3\n')
    whole = texts.predict(lines, device="cpu")
    assert whole.inputs == lines
    assert set(whole.labels) <= {"weather", "sport"}
    for other in (
        tmp_path / "new.txt",
        str(tmp_path / "new.csv"),
        tuple(lines),
        np.array(lines),
        texts.vocabulary.encode(lines),
    ):
        assert equal(texts.predict(other, device="cpu"), whole)
    torch.testing.assert_close(
        texts.predict("the cup", device="cpu").log_probabilities, whole.log_probabilities[1:2], rtol=0, atol=1e-6
    )


def test_all_peers_are_averaged_and_then_tempered(colours, pictures):
    parts = [colours.predict(pictures, name, draws=3, calibrated=False, device="cpu") for name in colours]
    p = torch.stack([part.probabilities.double() for part in parts]).mean(0)
    raw = colours.predict(pictures, draws=3, calibrated=False, device="cpu")
    torch.testing.assert_close(raw.probabilities.double(), p, rtol=0, atol=1e-6)
    assert colours.temperature != 1
    powers = p ** (1 / colours.temperature)
    expected = powers / powers.sum(1, keepdim=True)
    found = colours.predict(pictures, draws=3, device="cpu")
    assert found.temperature == colours.temperature
    torch.testing.assert_close(found.probabilities.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.entropy.double(), -(expected * expected.log()).sum(1), rtol=0, atol=1e-5)
    entropy = -(p * p.log()).sum(1)
    spread = entropy - torch.stack([part.expected_entropy.double() for part in parts]).mean(0)
    torch.testing.assert_close(found.disagreement.double(), spread, rtol=0, atol=1e-5)
    assert found.draws.tolist() == [6] * len(found)
    alone = colours.predict(pictures, "b", draws=3, device="cpu")
    assert alone.temperature == colours["b"].temperature
    with pytest.raises(UnknownPeer, match="there is no peer 'c'"):
        colours.predict(pictures, "c")
    with pytest.raises(InputError, match="cannot replay a prediction without a posterior, or of several peers"):
        found.replay(0)
    assert alone.replay(2).keys() == colours["b"].draw(alone.address.at(2)).keys()


def test_it_is_the_same_batch_by_batch_and_tells_how_far_it_is(colours, pictures, monkeypatch):
    whole = colours.predict(pictures, device="cpu")
    monkeypatch.setattr(new_inputs, "BATCH", 2 * 3 * 8 * 8)
    told = []

    class Count(Watcher):
        def begin(self, passes):
            told.append(passes)

        def advance(self, passes):
            told[0] -= passes

    with watched(Count()):
        parts = list(colours.predict_batches(pictures, device="cpu"))
    assert [len(part) for part in parts] == [2, 2, 2]
    assert len(told) == 1  # a single bar
    assert told[0] == pytest.approx(0, abs=1e-9)
    again = Prediction.joined(parts)
    assert list(again.inputs) == list(whole.inputs)
    torch.testing.assert_close(again.log_probabilities, whole.log_probabilities)
    torch.testing.assert_close(again.disagreement, whole.disagreement)


class Columns:
    """What of a Hugging Face data set is used; the real one is tested where it is installed."""

    def __init__(self, table, classes=()):
        self.table, self.column_names = table, list(table)
        self.features = {name: types.SimpleNamespace(**({"names": []} if name in classes else {})) for name in table}

    def __len__(self):
        return len(self.table[self.column_names[0]])

    def __getitem__(self, key):
        return self.table[key] if isinstance(key, str) else {name: rows[key] for name, rows in self.table.items()}


def real_columns(table, classes=()):
    datasets = pytest.importorskip("datasets")
    kinds = {int: datasets.Value("int64"), str: datasets.Value("string")}
    features = {name: kinds.get(type(rows[0]), datasets.Image()) for name, rows in table.items()}
    features |= {name: datasets.ClassLabel(num_classes=9) for name in classes}
    return datasets.Dataset.from_dict(table, features=datasets.Features(features))


@pytest.mark.parametrize("make", [Columns, real_columns])
def test_a_data_set_of_hugging_face_is_the_list_of_its_images_or_texts(make, colours, texts):
    chance = np.random.default_rng(4)
    pictures = [Image.fromarray(chance.integers(0, 256, (12, 9, 3), np.uint8)) for _ in range(3)]
    wanted = colours.predict(pictures, device="cpu").log_probabilities
    for more, classes in (({}, ()), ({"label": [0, 1, 0]}, ()), ({"kind": [0, 1, 0], "note": ["a"] * 3}, ("kind",))):
        given = make({**more, "image": pictures}, classes)
        torch.testing.assert_close(colours.predict(given, device="cpu").log_probabilities, wanted, rtol=0, atol=0)
    said = ["a bad film", "a good one"]
    wanted = texts.predict(said, device="cpu")
    found = texts.predict(make({"label": ["x", "y"], "text": said}), device="cpu")
    assert list(found.inputs) == said
    torch.testing.assert_close(found.log_probabilities, wanted.log_probabilities, rtol=0, atol=0)
    with pytest.raises(InputError, match=r"no column holds images or texts \(columns: 'label', 'width'\)"):
        colours.predict(make({"label": [0], "width": [3]}), device="cpu")
    with pytest.raises(InputError, match="got a dict; give one of its splits or columns"):
        colours.predict({"test": make({"image": pictures})}, device="cpu")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "there is nothing to predict"),
        ({"a": 1}, "expected inputs or a list of them, got a dict"),
        ([3], "image 0: expected a file, a PIL image, an array or a tensor, got a int"),
        (np.full((2, 5, 5, 3), 2.0), r"float images must be in \[0, 1\]"),
        (["gone.png"], "gone.png: there is no such image file or folder"),
        ([Image.new("I", (4, 4))], "image 0: expected an image of 8 bits a channel, got mode I"),
        ([np.zeros((4, 4, 3)), np.zeros((4, 4, 3), np.uint8)], "image 1 is of torch.uint8, others are of"),
    ],
)
def test_what_is_no_input_is_one_sentence(colours, given, told):
    with pytest.raises(InputError, match=told):
        colours.predict(given, device="cpu")


def test_whole_data_sets_and_tables_without_files_are_refused(colours, texts, tmp_path):
    with pytest.raises(InputError, match=r"predict one of its splits, such as data\.test"):
        colours.predict(colours.data())
    (tmp_path / "no.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"no\.csv, row 1: expected a column 'path'"):
        colours.predict(tmp_path / "no.csv")
    (tmp_path / "gone.csv").write_text("path\ngone.png\n")
    with pytest.raises(InputError, match=r"gone\.csv, row 2: there is no image file"):
        colours.predict(tmp_path / "gone.csv")
    with pytest.raises(InputError, match="expected texts, or files of them, got a int"):
        texts.predict([1, 2])


# ---- tables ----------------------------------------------------------------------------------------------------------


def made(count, names=("cat", "<i>dog</i>"), **more):
    log_p = torch.randn((count, 2), generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    return Prediction(
        log_p, torch.zeros(count), torch.full((count,), 5), Address(0, "a", "draw"), class_names=names, **more
    )


def test_tables_say_what_the_tensors_say_and_escape_what_they_show(tmp_path):
    names = [f'<script>"{number}"</script>' for number in range(30)]
    found = made(30, inputs=names, kind="file")
    assert found.labels == [("cat", "<i>dog</i>")[number] for number in found.classes.tolist()]
    text, html = repr(found), found._repr_html_()
    assert "Prediction of 30 files: 5 draws" in text
    assert text.splitlines()[-1] == "and 20 more"
    assert len(text.splitlines()) == 13
    assert "<script>" not in html
    assert "<i>" not in html
    assert "&lt;script&gt;&quot;0&quot;" in html
    found.to_csv(tmp_path / "found.csv", probabilities=True)
    with open(tmp_path / "found.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == names
    assert [row["class"] for row in rows] == found.labels
    for heading, values in (
        ("probability", found.probabilities.amax(1)),
        ("entropy", found.entropy),
        ("disagreement", found.disagreement),
        ("p(cat)", found.probabilities[:, 0]),
    ):
        assert [float(row[heading]) for row in rows] == values.tolist()
    assert [record["probabilities"]["cat"] for record in found.records()] == found.probabilities[:, 0].tolist()
    assert len(found[5:9]) == 4
    assert found[5:9].inputs == names[5:9]
    assert equal(Prediction.joined([found[:7], found[7:]]), found)
    assert made(3, None).labels == [str(number) for number in made(3).classes.tolist()]
    assert {name[0] for name in made(9, ("same", "same")).labels} == {"0", "1"}
    assert "…" in repr(made(1, inputs=["x" * 200], kind="text"))
    assert "temperature 2.5" in repr(made(3).tempered(2.5))


def test_pandas_has_the_same_table(monkeypatch):
    found = made(4)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(InputError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
            found.to_pandas()
    pandas = pytest.importorskip("pandas")
    frame = found.to_pandas(probabilities=True)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["class"]) == found.labels
    assert list(frame["p(cat)"]) == found.probabilities[:, 0].tolist()
    assert list(found.to_pandas()) == ["input", "class", "probability", "entropy", "disagreement"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_images_are_found_in_the_order_of_their_paths_however_few_names_are_held(tmp_path, monkeypatch):
    names = ["a/1.png", "a/2.PNG", "a-b/3.png", "a.png", "a/b/4.jpg", "a/.hidden.png", "b.txt", "B/5.png", "a/b.png"]
    names += [f"many/{number}.png" for number in range(25)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    expected = sorted(str(tmp_path / name) for name in names if not name.endswith((".txt", ".hidden.png")))
    for held in (1, 2, 7, 100):
        monkeypatch.setattr(folders, "AT_ONCE", held)
        assert list(folders.walk_images(tmp_path)) == expected
    assert folders.count_images(tmp_path) == len(expected)


def test_a_process_prints_csv_and_json_lines_of_what_run_predict_says(colours, pictures):
    expected = load(colours.folder).predict(pictures, device="cpu")
    ended = process("predict", colours.folder, pictures, "--format", "csv", "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.DictReader(io.StringIO(ended.stdout)))
    assert [row["file"] for row in rows] == list(expected.inputs)
    assert [row["class"] for row in rows] == expected.labels
    assert [float(row["entropy"]) for row in rows] == pytest.approx(expected.entropy.tolist(), abs=1e-6)
    ended = process("predict", colours.folder, pictures, "--format", "jsonl", "--raw", "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    raw = load(colours.folder).predict(pictures, calibrated=False, device="cpu")
    records = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [record["probability"] for record in records] == pytest.approx(raw.probabilities.amax(1).tolist(), abs=1e-6)
    assert list(records[0]) == ["file", "class", "probability", "entropy", "disagreement", "probabilities"]


def test_the_forms_of_the_command_agree(colours, pictures, monkeypatch, capsys):
    monkeypatch.setattr(new_inputs, "BATCH", 2 * 3 * 8 * 8)
    words = ("predict", colours.folder, pictures, "--device", "cpu")
    listed = json.loads(called(*words, "--json"))
    assert [json.loads(line) for line in called(*words, "--format", "jsonl").splitlines()] == listed
    rows = list(csv.DictReader(io.StringIO(called(*words, "--format", "csv"))))
    assert [row["class"] for row in rows] == [record["class"] for record in listed]
    table = called(*words).splitlines()
    assert len(table) == 1 + len(listed) == 7
    assert "gone.png" in refused(capsys, "predict", colours.folder, "gone.png", "--format", "csv")


def test_whoever_reads_the_first_lines_alone_sees_no_traceback(colours, pictures):
    command = f"{sys.executable} -m peerbayes predict {colours.folder} {' '.join([str(pictures)] * 200)}"
    ended = subprocess.run(
        ["bash", "-c", f"{command} --draws 1 --format jsonl --device cpu | head -n 1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.count("\n") == 1
    assert ended.stderr == ""


def test_a_posterior_of_a_run_names_its_classes(colours):
    images = torch.zeros((2, 3, 8, 8), dtype=torch.uint8)
    assert set(colours["a"].predict(images, 2).labels) <= {"cat & <b>dog", "light"}
    assert pb.Point(torch.nn.Linear(4, 3)).predict(torch.zeros((1, 4))).labels in (["0"], ["1"], ["2"])
