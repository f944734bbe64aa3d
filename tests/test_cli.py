"""The command line: what it prints, what it writes, and one sentence with exit code 2 for whatever is wrong."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import peerbayes
from commands import QUIET, called, change, contents, ended, process, refused, save_npz, write_small
from peerbayes import cli, networks
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import Recipe, load_recipe, packaged
from peerbayes.runs.run import Run
from peerbayes.studies.space import parse_axes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def trained(place):
    """One run, and the JSON that training it printed."""
    text = called("train", place / "small.toml", "--run", place / "run", "--json", *QUIET)
    return place / "run", json.loads(text)


@pytest.fixture(scope="module")
def source(place):
    called("train", place / "source.toml", "--run", place / "source", *QUIET)
    return place / "source"


# ---- what is right ----------------------------------------------------------------------------------------------

SCHEMA = {
    "recipe", "dataset", "network", "method", "seed", "epochs", "hardware", "versions", "seconds", "peers",
}  # fmt: skip


def test_train_prints_one_json_record(trained):
    run, record = trained
    assert set(record) >= SCHEMA
    assert record["recipe"] == "small"
    assert record["dataset"] == "small"
    assert record["network"] == "mlp"
    assert record["method"] == "dml"
    assert (record["seed"], record["epochs"]) == (0, 2)
    assert record["versions"]["peerbayes"] == peerbayes.__version__
    assert record["versions"]["torch"] == torch.__version__
    assert record["seconds"] > 0
    assert [peer["name"] for peer in record["peers"]] == ["a", "b"]
    for peer in record["peers"]:
        assert 0 <= peer["accuracy"] <= 1
        assert peer["nll"] > 0
        assert 0 <= peer["ece"] <= 1
    assert {path.name for path in run.iterdir() if "checkpoint" not in path.name} == {
        "recipe.toml", "run.json", "metrics.jsonl", "weights-a.safetensors", "weights-b.safetensors",
        "evaluation.json", "report.html",
    }  # fmt: skip


def test_evaluate_gives_the_numbers_that_train_recorded(trained):
    run, record = trained
    assert json.loads((run / "evaluation.json").read_text()) == record
    assert json.loads(called("evaluate", run, "--json", "--device", "cpu")) == record
    more = json.loads(called("evaluate", run, "--json", "--device", "cpu", "--draws", 20))
    assert more["draws"] == 20
    assert more["peers"][0]["nll"] != record["peers"][0]["nll"]


def test_evaluate_writes_the_record_that_train_would_have_and_no_other(trained, tmp_path, capsys):
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    before = {name: (run / name).read_bytes() for name in ("evaluation.json", "report.html")}
    for name in before:
        (run / name).unlink()
    other = ["--draws", "2"], ["--settle", "0.1"], ["--ood", str(trained[0].parent / "small.npz")]
    for words in other:
        called("evaluate", run, *words, "--device", "cpu")
        assert not (run / "evaluation.json").exists()
        assert not (run / "report.html").exists()
    found = refused(capsys, "figure", "spread", run, "--out", tmp_path / "x.png")
    assert found == f"{run}: has no evaluation.json; 'peerbayes evaluate {run}' makes it"
    called("evaluate", run, "--device", "cpu", "--calibrated")
    assert {name: (run / name).read_bytes() for name in before} == before
    called("figure", "spread", run, "--out", tmp_path / "x.png")
    (run / "evaluation.json").write_text("{}")  # judged anew
    called("evaluate", run, "--device", "cpu")
    assert (run / "evaluation.json").read_bytes() == before["evaluation.json"]


def test_evaluate_shows_the_figures_of_a_run_that_can_not_be_written_to(trained, capsys, monkeypatch):
    def refuse(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    run, record = trained
    monkeypatch.setattr(storage, "write_bytes", refuse)
    assert json.loads(called("evaluate", run, "--json", "--device", "cpu")) == record
    said = capsys.readouterr().err
    assert said == f"peerbayes: {run}: Permission denied; the record is not written\n"


def test_evaluate_prints_the_table_of_the_record(trained):
    run, record = trained
    text = called("evaluate", run, "--device", "cpu")
    for peer in record["peers"]:
        line = next(line for line in text.splitlines() if f" {peer['name']} " in line)
        assert line.split()[-3:] == [f"{100 * peer['accuracy']:.2f}", f"{peer['nll']:.3f}", f"{peer['ece']:.3f}"]


def test_evaluate_sorts_peers_in_the_table_alone(trained):
    run, record = trained
    before = contents(run)
    text = called("evaluate", run, "--sort-peers", "--device", "cpu")
    ranked = sorted(record["peers"], key=lambda peer: peer["accuracy"])
    for name, peer in zip(("worst", "best"), ranked, strict=True):
        line = next(line for line in text.splitlines() if f" {name} " in line)
        assert line.split()[-3:] == [f"{100 * peer['accuracy']:.2f}", f"{peer['nll']:.3f}", f"{peer['ece']:.3f}"]
    assert json.loads(called("evaluate", run, "--sort-peers", "--json", "--device", "cpu")) == record
    assert contents(run) == before


def test_evaluate_against_another_data_set(trained, place):
    save_npz(place / "outside.npz", images=np.random.default_rng(9).integers(0, 255, (90, 8, 8), dtype=np.uint8))
    text = called("evaluate", trained[0], "--ood", place / "outside.npz", "--json", "--device", "cpu")
    for peer in json.loads(text)["peers"]:
        (figures,) = peer["out_of_distribution"].values()
        # Noise like the test images themselves: nothing tells them apart.
        assert figures["auroc"] == pytest.approx(0.5, abs=0.35)
    assert "AUROC" in called("evaluate", trained[0], "--ood", place / "outside.npz", "--device", "cpu")


def test_the_run_folder_repeats_the_recipe(trained, place):
    assert load_recipe(trained[0] / "recipe.toml") == load_recipe(place / "small.toml")


def test_recipes_are_listed_and_shown(tmp_path):
    general, families = called("recipes").split("\n\n")
    assert [line.split()[0] for line in general.splitlines()] == [name for name in packaged() if "/" not in name]
    for line in families.splitlines()[1:]:  # each count is that of the list it leads to
        family, count = line.split()[:2]
        listed = called("recipes", "list", family)
        assert [line.split()[0] for line in listed.splitlines()] == [n for n in packaged() if family in n]
        assert int(count) == len(listed.splitlines())
    assert sum("/" in name for name in packaged()) == sum(int(x.split()[1]) for x in families.splitlines()[1:])
    assert {item["name"] for item in json.loads(called("recipes", "--json"))} == set(packaged())
    path = tmp_path / "shown.toml"
    path.write_text(called("recipes", "mutual/digits-ours"))
    assert load_recipe(path) == load_recipe("mutual/digits-ours")
    shown = json.loads(called("recipes", "mutual/digits-ours", "--json"))
    assert Recipe.parse(shown, "shown") == load_recipe("mutual/digits-ours")


def test_version_is_printed():
    assert called("--version") == f"peerbayes {peerbayes.__version__}\n"


def test_seeds_make_a_run_each_and_a_table_with_spread(place, tmp_path):
    for method in ("small", "other"):
        text = called("train", place / f"{method}.toml", "--seeds", "0,1", "--run", tmp_path / method, *QUIET)
        assert text.count("±") == 12
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == ["seed0", "seed1"]
    records = json.loads(called("evaluate", tmp_path / "small", "--json", "--device", "cpu"))
    assert [record["seed"] for record in records] == [0, 1]
    a = [record["peers"][0]["nll"] for record in records]
    assert a[0] != a[1]
    text = called("evaluate", tmp_path / "small", tmp_path / "other", "--device", "cpu")
    assert f"{sum(a) / 2:.3f} ± {abs(a[0] - a[1]) / 2:.3f}" in text
    # Two recipes that differ in nothing but the name of the method are paired: no difference at all.
    assert "Ours − DML, average of peers, paired over 2 seeds" in text
    assert "2 seeds differ by the same amount" in text


def test_default_folder_is_named_after_recipe_and_seed(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(place / "source.toml", "mine.toml")
    called("train", "mine.toml", "--seed", 4, *QUIET)
    assert json.loads(Path("runs/mine-seed4/run.json").read_text())["seed"] == 4


STILL = "stages.*.optimizer={name='sgd', lr=1e-30}"  # nothing moves: what a peer starts from is what it ends with


def assert_started_from(run, weights):
    found, _ = storage.read(run / "weights-b.safetensors")
    own, _ = storage.read(run / "weights-a.safetensors")
    assert weights
    for name, tensor in weights.items():
        torch.testing.assert_close(found[f"mean/{name}"], tensor, rtol=0, atol=1e-20)
    assert not torch.equal(own["mean/linear.weight"], weights["linear.weight"])


def plain(path):
    _, state = storage.read_state(path)
    return {name: tensor for name, tensor in state.items() if not name.startswith("normalize")}


def test_start_from_a_recipe_trains_it_once_and_reuses_it(place, tmp_path):
    start = ("--set", f"peers.b.start_from={place / 'source.toml'}", "--set", STILL)
    called("train", place / "small.toml", "--run", tmp_path / "first", *start, *QUIET)
    (folder,) = [path for path in tmp_path.iterdir() if path.name != "first"]
    weights = folder / "weights-only.safetensors"
    assert_started_from(tmp_path / "first", plain(weights))
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    called("train", place / "small.toml", "--run", tmp_path / "second", *start, *QUIET)
    assert_started_from(tmp_path / "second", plain(weights))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["first", "second", folder.name])


def test_an_interrupted_source_is_finished_first(place, tmp_path):
    start = ("--set", f"peers.b.start_from={place / 'source.toml'}", "--set", STILL)
    called("train", place / "small.toml", "--run", tmp_path / "first", *start, *QUIET)
    (folder,) = [path for path in tmp_path.iterdir() if path.name != "first"]
    before = plain(folder / "weights-only.safetensors")
    # As a kill right at the beginning leaves it.
    for path in folder.iterdir():
        if path.name == "run.json":
            path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": False}))
        else:
            path.unlink()
    called("train", place / "small.toml", "--run", tmp_path / "second", *start, *QUIET)
    after = plain(folder / "weights-only.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", ["run", "weights", "plain"])
def test_start_from_a_run_a_weights_file_and_a_plain_file(place, source, tmp_path, kind):
    weights = source / "weights-only.safetensors"
    given = {"run": source, "weights": weights, "plain": tmp_path / "plain.safetensors"}[kind]
    if kind == "plain":
        save_file(storage.read_state(weights)[1], given)
    start = ("--set", f"peers.b.start_from={given}", "--set", STILL)
    called("train", place / "small.toml", "--run", tmp_path / "run", *start, *QUIET)
    assert_started_from(tmp_path / "run", plain(weights))


def test_the_source_of_seeds_is_not_taken_for_one_of_them(place, tmp_path):
    start = ("--set", f"peers.b.start_from={place / 'source.toml'}")
    called("train", place / "small.toml", "--run", tmp_path / "many", "--seeds", "0,1", *start, *QUIET)
    records = json.loads(called("evaluate", tmp_path / "many", "--json", "--device", "cpu"))
    assert [(record["method"], record["seed"]) for record in records] == [("dml", 0), ("dml", 1)]


# ---- what is wrong ----------------------------------------------------------------------------------------------


BAD_SETTINGS = {
    "unknown key": (change("stages.0.epoch=3"), "stages.0 has no key 'epoch'; did you mean 'epochs'?"),
    "wrong type": (change("stages.0.epochs=many"), "stages.0.epochs: input should be a valid integer"),
    "negative alpha": (change("stages.0.terms.mutual.alpha=-1"), "stages.0.terms.mutual.alpha: "),
    "unknown term": (change("stages.0.terms.mutul={}"), "there is no term 'mutul'; did you mean 'mutual'?"),
    "term that is not importable": (
        change("stages.0.terms.nowhere:penalty={}"),
        "stages.0.terms: term 'nowhere:penalty' can't be imported: No module named 'nowhere'; install it, or name its "
        "folder in PYTHONPATH",
    ),
    "function that is no term": (
        change('stages.0.terms."os.path:join"={}'),
        "'os.path:join' is not a term: decorate the function with @peerbayes.term",
    ),
    "unknown network": (change("peers.0.network=mpl"), "there is no network 'mpl'; did you mean 'mlp'?"),
    "unknown timm network": (change("peers.0.network=timm/nothing-at-all"), "nothing-at-all"),
    "network that is not importable": (change("peers.0.network=no.where:net"), "can't be imported"),
    "other classes": (change("data.classes=10"), "the recipe is for 10 classes, but small has 3"),
    "too much validation": (change("data.validation=60"), "data.validation must leave training images: got 60, "),
    "pairs without names": (
        change('stages.0.terms.mutual.graph=[["a", "b"]]'),
        "stages.0.terms.mutual.graph.0: input should be a table with keys teacher, student, alpha, temperature, weight"
        ", got ['a', 'b']",
    ),
    "posterior by name": (
        change("peers.0.posterior=point"),
        "peers.0.posterior: input should be a table such as {kind = 'mean_field'}, got 'point'",
    ),
    "statistics of colours": (
        change("data.stats=imagenet"),
        "data.stats = 'imagenet' is for images of 3 channels, but small has 1",
    ),
    "unknown statistics": (change("data.stats=imagnet"), "data.stats: input should be 'imagenet', got 'imagnet'"),
    "missing data": (change("data.name=cifar10"), "name another data root by --data-root "),
    "unknown data": (change("data.name=nothing"), "no data set 'nothing'"),
    "layer": (
        change("stages.0.terms.feature_diversity={layers=['hidden', 'lnear']}"),
        "stages.0.terms.feature_diversity.layers: MLP has no layer 'lnear'; did you mean 'linear'?",
    ),
    "missing start": (change("peers.0.start_from=nowhere"), "start_from 'nowhere' is neither a recipe, a run folder"),
    "missing start file": (change("peers.0.start_from=no.safetensors"), "no.safetensors: no such file"),
    "pickled start": (change("peers.0.start_from=no.pt"), "no.pt: no such file"),
    "unknown device": (["--device", "abacus"], "device 'abacus' can't be used: "),
    "absent device": (["--device", "cuda:99"], "device 'cuda:99' can't be used: "),
    "device by another name": (
        ["--device", "gpu"],
        "can't be used: expected cpu, cuda, cuda:1, ... or auto; did you mean 'cuda'?",
    ),
    "end of a key": (
        change("epochs=2"),
        "recipe small: --set epochs=2: there is no key 'epochs'; did you mean 'stages.*.epochs'?",
    ),
    "end of several keys": (change("prior_std=2"), "did you mean 'peers.*.posterior.prior_std'?"),
    "key of a peer": (change("network=mlp"), "there is no key 'network'; did you mean 'peers.*.network'?"),
    "network of timm": (
        change("peers.0.network=efficientnet_b0"),
        "there is no network 'efficientnet_b0'; did you mean 'timm/efficientnet_b0'?",
    ),
    "posterior in words": (
        change("peers.0.posterior.kind=bayesian"),
        "peers.0.posterior.kind: there is no kind 'bayesian'; did you mean 'mean_field', a Gaussian a weight?",
    ),
    "unknown posterior": (
        change("peers.0.posterior.kind=meanfield"),
        "peers.0.posterior.kind: there is no kind 'meanfield'; did you mean 'mean_field'?",
    ),
    "bad seeds": (["--seeds", "0,one"], "seeds '0,one': expected whole numbers"),
    "empty seeds": (["--seeds", ""], "seeds '': expected whole numbers"),
    "seeds twice": (["--seeds", "1,1"], "seeds '1,1': a seed is given twice"),
}


@pytest.mark.parametrize(("words", "sentence"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_one_sentence_and_nothing_is_written(place, tmp_path, capsys, words, sentence):
    device = () if "--device" in words else ("--device", "cpu")
    found = refused(
        capsys, "train", place / "small.toml", "--run", tmp_path / "run", "--data-root", tmp_path, "-q", *device, *words
    )
    assert sentence in found
    assert list(tmp_path.iterdir()) == []


def test_peers_of_different_shape_are_refused_by_tensor(place, tmp_path, capsys):
    words = change("peers.0.network=resnet8")
    found = refused(capsys, "train", place / "small.toml", "--run", tmp_path / "run", *QUIET, *words)
    assert re.fullmatch(
        r"stages.0.terms.weight_diversity: needs peers of equal shape, but 'conv.weight' is \(\d+, 1, 3, 3\) in 'a' "
        r"and no such tensor in 'b'",
        found,
    )
    assert not (tmp_path / "run").exists()


def bad_data(kind, folder):
    if kind == "hundred classes":
        return save_npz(folder / "hundred.npz", count=400, classes=100, images=np.full((500, 8, 8), 7, np.uint8))
    if kind == "truncated npz":
        path = save_npz(folder / "cut.npz")
        path.write_bytes(path.read_bytes()[:2000])
        return path
    if kind == "NaN":
        images = np.random.default_rng(0).random((90, 8, 8)).astype(np.float32)
        images[11, 3, 3] = np.nan
        return save_npz(folder / "nan.npz", images=images)
    if kind == "not an npz":
        (folder / "text.npz").write_text("hello")
        return folder / "text.npz"
    (folder / "empty").mkdir()
    return folder / "empty"


BAD_DATA = {
    "hundred classes": "the recipe is for 3 classes, but hundred has 100",
    "truncated npz": "cut.npz: ",
    "NaN": "nan.npz: ",
    "not an npz": "text.npz: ",
    "empty folder": "empty: ",
}


@pytest.mark.parametrize(("kind", "sentence"), BAD_DATA.items(), ids=BAD_DATA)
def test_bad_data_is_one_sentence_and_nothing_is_written(place, tmp_path, capsys, kind, sentence):
    (tmp_path / "data").mkdir()
    path = bad_data(kind, tmp_path / "data")
    run = tmp_path / "run"
    found = refused(capsys, "train", place / "small.toml", "--run", run, *QUIET, *change(f"data.name={path}"))
    assert sentence in found
    assert not run.exists()


def test_recipe_for_ten_classes_refuses_a_hundred(tmp_path, capsys):
    path = bad_data("hundred classes", tmp_path)
    run = tmp_path / "run"
    found = refused(capsys, "train", "mutual/digits-dnn", "--run", run, *QUIET, *change(f"data.name={path}"))
    assert found == (
        "the recipe is for 10 classes, but hundred has 100: --set data.classes=100 takes them, or --data instead of "
        "data.name"
    )
    assert not run.exists()


def test_unknown_recipes_are_refused(tmp_path, capsys):
    assert "did you mean 'mutual/digits-ours'?" in refused(capsys, "train", "mutual/digits-our", "--run", tmp_path)
    assert "no such recipe file" in refused(capsys, "train", tmp_path / "x.toml", "--run", tmp_path / "run")
    (tmp_path / "bad.toml").write_text("title = ")
    assert "not valid TOML" in refused(capsys, "train", tmp_path / "bad.toml", "--run", tmp_path / "run")
    assert "did you mean" in refused(capsys, "recipes", "mutual/digits-dln")
    assert not (tmp_path / "run").exists()


def test_occupied_places_are_refused_and_left_alone(place, trained, tmp_path, capsys):
    run, _ = trained
    before = contents(run)
    assert "already holds a run" in refused(capsys, "train", place / "small.toml", "--run", run, *QUIET)
    assert contents(run) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("!")
    found = refused(capsys, "train", place / "small.toml", "--run", tmp_path / "mine", *QUIET)
    assert found.endswith("the folder is not empty and holds no run; choose another one")
    assert contents(tmp_path / "mine") == {"thesis.txt": b"!"}
    (tmp_path / "file").write_text("?")
    found = refused(capsys, "train", place / "small.toml", "--run", tmp_path / "file", *QUIET)
    assert found.endswith("is a file, expected a folder for the run")


def test_other_seed_or_recipe_on_resume_is_refused(place, trained, capsys):
    run, _ = trained
    words = ("--run", run, "--resume", *QUIET)
    assert "holds a run of seed 0, not 3" in refused(capsys, "train", place / "small.toml", "--seed", 3, *words)
    found = refused(capsys, "train", place / "small.toml", *words, *change("stages.0.epochs=9"))
    there, here = "stages.0.epochs=2 there", "stages.0.epochs=9 here"
    assert found == (
        f"{run}: holds a run of small with other settings: {there}, {here}; give those, or choose another folder"
    )
    found = refused(capsys, "train", place / "other.toml", *words)
    assert found == (
        f"{run}: holds a run of another recipe, small ('Small'), not other; name that one, or choose another folder"
    )


@pytest.fixture
def unfinished(trained, tmp_path):
    """As a kill after the last checkpoint leaves a run."""
    run = Path(shutil.copytree(trained[0], tmp_path / "unfinished"))
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"finished": False}))
    for path in [*run.glob("weights-*"), run / "evaluation.json", run / "report.html"]:
        path.unlink()
    return run


def test_corrupt_checkpoint_is_refused(place, unfinished, capsys):
    for path in unfinished.glob("checkpoint-*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = contents(unfinished)
    found = refused(capsys, "train", place / "small.toml", "--run", unfinished, "--resume", *QUIET)
    assert found.startswith("no checkpoint can be read: ")
    assert contents(unfinished) == before


def test_checkpoint_of_another_network_is_refused_by_tensor(place, unfinished, source, capsys):
    (newest,) = unfinished.glob("checkpoint-*")
    tensors, about = storage.read(newest)
    name = next(n for n in tensors if n.startswith("peer/a/mean/") and n.endswith("linear.weight"))
    storage.write(newest, tensors | {name: torch.zeros(3, 7)}, about)
    found = refused(capsys, "train", place / "small.toml", "--run", unfinished, "--resume", *QUIET)
    assert "peer 'a': tensor 'mean/linear.weight' has shape (3, 7), expected (3, 256)" in found


def test_start_from_another_network_is_refused_by_tensor(place, tmp_path, capsys):
    inputs = networks.Inputs(3, (1, 8, 8), (0.5,), (0.5,))
    save_file(networks.build("resnet8", inputs).state_dict(), tmp_path / "resnet.safetensors")
    words = change(f"peers.0.start_from={tmp_path / 'resnet.safetensors'}")
    found = refused(capsys, "train", place / "small.toml", "--run", tmp_path / "run", *QUIET, *words)
    assert "has no tensor 'hidden.0.0.weight'" in found
    assert not (tmp_path / "run").exists()


def test_start_from_a_run_of_two_peers_asks_for_one(place, trained, tmp_path, capsys):
    words = change(f"peers.0.start_from={trained[0]}")
    found = refused(capsys, "train", place / "small.toml", "--run", tmp_path / "run", *QUIET, *words)
    assert "has peers a, b; name one weights-*.safetensors file" in found


def test_grey_images_are_corrupted_too(trained):
    found = json.loads(called("evaluate", trained[0], "--corrupted", "made", "--json", "--device", "cpu"))
    for peer in found["peers"]:
        every = [value for figures in peer["corrupted"]["by_type"].values() for value in figures["nll"]]
        assert len(every) == 75
        assert peer["corrupted"]["nll"] == pytest.approx(sum(every) / 75)
        assert len(set(every)) > 60  # in 8 pixels a slight blur is none, and some severities are as many boxes


def test_corrupted_images_that_are_not_there_are_told_before_anything_is_judged(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("peerbayes.runs.run.Run.predict_split", lambda *_, **__: 1 / 0)
    found = refused(capsys, "evaluate", trained[0], "--corrupted", tmp_path, "--device", "cpu")
    assert found.startswith(f"{tmp_path}/gaussian_noise.npy: there is no such file; ")


def test_evaluate_refuses_what_is_no_finished_run(tmp_path, unfinished, trained, capsys):
    (tmp_path / "empty").mkdir()
    found = refused(capsys, "evaluate", tmp_path / "empty")
    assert "neither a run folder nor a folder of runs" in found
    assert "neither a run folder" in refused(capsys, "evaluate", tmp_path / "nowhere")
    found = refused(capsys, "evaluate", unfinished, "--device", "cpu")
    assert "the run is not finished; the command that began it goes on with it, with --resume" in found
    (unfinished / "run.json").write_text("{")
    assert "run.json: not valid JSON" in refused(capsys, "evaluate", unfinished)


def test_evaluate_tells_runs_apart_and_takes_none_twice(source, place, tmp_path, capsys):
    for name in ("one", "two"):
        shutil.copytree(source, tmp_path / name)
    table = called("evaluate", tmp_path, "--device", "cpu")
    assert [line.split("  ")[0] for line in table.splitlines()[1:3]] == ["DNN (one)", "DNN (two)"]
    again = tmp_path / "one" / ".." / "one"
    assert refused(capsys, "evaluate", tmp_path, again, "--device", "cpu") == f"{again}: is given twice"


def test_evaluate_refuses_damaged_weights(trained, tmp_path, capsys):
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    path = run / "weights-b.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert "weights-b.safetensors: corrupt" in refused(capsys, "evaluate", run, "--device", "cpu")
    path.unlink()
    assert "weights-b.safetensors: no such file" in refused(capsys, "evaluate", run, "--device", "cpu")


def test_resume_of_a_finished_run_prints_its_record_again(place, trained):
    run, record = trained
    text = called("train", place / "small.toml", "--run", run, "--resume", "--json", *QUIET)
    assert json.loads(text) == record


def test_resume_removes_what_a_killed_report_has_left(place, trained, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    for name in (".report.html.77.tmp", ".evaluation.json.77.tmp"):
        (run / name).write_text("half")
    called("train", place / "small.toml", "--run", run, "--resume", *QUIET)
    assert not list(run.glob(".*"))


def test_resume_without_a_run_says_that_it_starts_a_new_one(place, tmp_path, capsys):
    words = ("train", place / "small.toml", "--seeds", "0,1", "--run", tmp_path, "--device", "cpu")
    said = [f"{tmp_path / name}: no run to resume, starting a new one" for name in ("seed0", "seed1")]
    called(*words, *change("stages.0.epochs=1"), "--resume")
    assert [line for line in capsys.readouterr().err.splitlines() if "no run to resume" in line] == said
    called(*words, *change("stages.0.epochs=1"), "--resume")
    assert "no run to resume" not in capsys.readouterr().err


def test_a_failed_training_is_one_sentence_and_exit_code_1(place, tmp_path, capsys):
    words = change("stages.0.optimizer={name='sgd', lr=1e30}", "stages.0.terms={likelihood={}}")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(place / "small.toml"), "--run", str(tmp_path / "run"), *QUIET, *words])
    printed = capsys.readouterr()
    assert end.value.code == 1
    assert printed.err.startswith("peerbayes: term 'likelihood' of peer 'a' became ")
    assert "checkpoint" not in printed.err  # there is none
    assert not list((tmp_path / "run").glob("checkpoint*"))
    assert printed.err.count("\n") == 1


# ---- real processes ---------------------------------------------------------------------------------------------


def test_a_real_process_prints_pure_json_and_its_progress_elsewhere(place, trained, tmp_path):
    done = process("train", place / "small.toml", "--run", tmp_path / "run", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["peers"] == trained[1]["peers"]
    assert "Small · small · 2 peers · mlp · cpu, eager · seed 0" in done.stderr
    assert "loss" in done.stderr
    assert re.search(r"^(.*): weights, report\.html; next: peerbayes predict \1 FILES$", done.stderr, re.MULTILINE)
    for name in ("weights-a.safetensors", "weights-b.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (trained[0] / name).read_bytes()


def test_a_real_process_fails_in_one_line(tmp_path):
    done = process("train", "mutual/digits-ours", "--set", "stages.0.epoch=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "peerbayes: recipe mutual/digits-ours: stages.0 has no key 'epoch'; did you mean 'epochs'?\n"
    )
    assert list(tmp_path.iterdir()) == []


# ---- what a newcomer trips over ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["train", "x", "--bogus"], ["evaluate"], ["train", "x", "--seed", "y"], ["train", "x", "--seed", "-1"]]
)
def test_a_wrong_command_line_is_one_sentence(capsys, words):
    assert refused(capsys, *words).endswith("see --help")


def test_an_option_without_its_value_says_what_it_is_for(capsys):
    found = refused(capsys, "train", "x", "--seeds")
    assert found == "Option '--seeds' requires an argument. Several seeds, such as 0,1,2; one run each; see --help"


def test_the_end_of_a_key_is_enough_to_be_told_the_whole(capsys, place):
    found = refused(capsys, "sweep", place / "small.toml", "--over", "lr=0.1,0.2", *QUIET)
    assert found == "--over lr: there is no key 'lr'; did you mean 'stages.*.optimizer.lr'?"


@pytest.mark.parametrize("words", [["show"], ["frob", "mutual/ours"], ["list", "a", "b"], ["show", "a", "b"]])
def test_recipes_takes_list_or_show(capsys, words):
    assert refused(capsys, "recipes", *words).endswith("expected 'list', 'list TEXT' or 'show NAME'")


def test_a_text_that_no_recipe_has_is_refused(capsys):
    assert refused(capsys, "recipes", "list", "zzz") == "no recipe has 'zzz' in its name; see 'peerbayes recipes list'"


def test_recipes_show_prints_a_recipe():
    assert called("recipes", "show", "mutual/digits-dml") == load_recipe("mutual/digits-dml").to_toml() + "\n"
    assert called("recipes", "list") == called("recipes")


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (("peers.0.network=resnet8",), "stages.0.terms.weight_diversity: needs peers of equal shape"),
        (("stages.0.terms.feature_diversity={layers=['hidden', 'nope']}",), "has no layer 'nope'"),
    ],
)
def test_bad_input_is_found_before_a_source_is_trained(capsys, place, tmp_path, pairs, words):
    source = f"peers.1.start_from={place / 'source.toml'}"
    arguments = change(source, *pairs)
    assert words in refused(capsys, "train", place / "small.toml", "--run", tmp_path / "runs" / "x", *arguments, *QUIET)
    assert list(tmp_path.iterdir()) == []


def test_an_anchored_prior_needs_something_to_be_anchored_at(capsys, place, tmp_path):
    bad = change("peers.0.posterior.prior=anchored")
    found = refused(capsys, "train", place / "small.toml", "--run", tmp_path / "x", *bad, *QUIET)
    assert "peer 'a' has an anchored prior but no start_from" in found


def test_settled_draws_are_reported_recorded_and_used_for_all_figures(trained, place):
    arguments = (
        "evaluate",
        place / "run",
        "--draws",
        60,
        "--settle",
        0.2,
        "--ood",
        place / "small.npz",
        "--device",
        "cpu",
    )
    record = json.loads(called(*arguments, "--json"))
    assert record["settle"] == 0.2
    assert all(2 <= peer["draws_spent"] <= 60 for peer in record["peers"])
    # The same images are inside and outside: told apart by chance alone, if both sides are drawn alike.
    assert all(peer["out_of_distribution"][str(place / "small.npz")]["auroc"] == 0.5 for peer in record["peers"])
    text = called(*arguments)
    for peer in record["peers"]:
        assert f"{peer['name']}: {peer['draws_spent']:.1f} of at most 60 draws an image, settled at level 0.2" in text


def test_a_run_replays_what_was_evaluated_and_finds_its_data_from_anywhere(trained, place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    called("train", "small.toml", "--run", tmp_path / "run", "--seed", 5, "--set", "data.name=small.npz", *QUIET)
    monkeypatch.chdir(tmp_path)
    run = peerbayes.load("run")
    record = json.loads(called("evaluate", "run", "--json", "--device", "cpu"))
    test = peerbayes.data.load(run.recipe.data.name).test
    for peer in record["peers"]:
        found = run[peer["name"]].predict(test.images, 3, calibrated=False)
        assert (found.address.seed, found.address.owner) == (5, peer["name"])
        assert peerbayes.metrics.scores.nll_from_log(found.log_probabilities, test.labels) == peer["nll"]
        with pytest.raises(peerbayes.InputError, match="there is no draw 3"):
            found.replay(3)


def test_a_network_that_cannot_take_the_images_is_one_sentence(place, tmp_path):
    with pytest.raises(
        peerbayes.InputError, match=r"network of peer 'x' can't take small's inputs, of shape \(1, 8, 8\)"
    ):
        peerbayes.fit(
            {"x": peerbayes.Point(torch.nn.Linear(3, 3))},
            data=place / "small.npz",
            recipe=place / "source.toml",
            run=tmp_path / "run",
            overrides=["data.validation=0"],
        )
    assert list(tmp_path.iterdir()) == []


# ---- a term of one's own ------------------------------------------------------------------------------------------

TERM = """
import peerbayes as pb

@pb.term
def penalty(step, peer, *, weight: float = 0.1):
    log_p = step.logits(peer).log_softmax(-1)
    return weight * FACTOR * (log_p.exp() * log_p).sum(-1).mean()
"""


def test_a_term_of_ones_own_is_named_by_its_module(place, tmp_path, capsys, monkeypatch, user_term):
    package = tmp_path / "ours"
    package.mkdir()
    for name, factor in (("plain", "1"), ("mirrored", "-1")):  # one name in two modules
        (package / f"{name}.py").write_text(TERM.replace("FACTOR", factor))
    monkeypatch.syspath_prepend(tmp_path)
    given = change('stages.0.terms={likelihood={}, "ours.plain:penalty"={}, "ours.mirrored:penalty"={weight=0.3}}')
    given += change('stages.*.terms."ours.plain:penalty".weight=0.3')
    called("train", place / "source.toml", "--run", tmp_path / "run", *given, *QUIET)
    for line in Run(tmp_path / "run").metrics:
        terms = line["peers"]["only"]["terms"]
        assert terms["ours.plain:penalty"] == pytest.approx(-terms["ours.mirrored:penalty"])
        assert terms["ours.plain:penalty"] < -0.1
    (axis,) = parse_axes(['"ours.plain:penalty".weight=0.1,0.2'], Run(tmp_path / "run").recipe)
    (changed,) = load_recipe(tmp_path / "run/recipe.toml", axis.overrides(0.2)).stages
    assert changed.terms["ours.plain:penalty"] == {"weight": 0.2}
    called("evaluate", tmp_path / "run", "--device", "cpu")
    # On a machine that has not the module.
    for name in [name for name in sys.modules if name.partition(".")[0] == "ours"]:
        monkeypatch.delitem(sys.modules, name)
    package.rename(tmp_path / "gone")
    found = refused(capsys, "evaluate", tmp_path / "run", "--device", "cpu")
    assert found.endswith(
        "term 'ours.plain:penalty' can't be imported: No module named 'ours'; install it, or name its folder in "
        "PYTHONPATH"
    )


# ---- several runs at once ---------------------------------------------------------------------------------------


def test_a_run_that_fails_does_not_take_the_others_results_with_it(capsys, place, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text('extends = "mutual/digits-dnn"\nset = ["stages.*.optimizer={name=\'sgd\', lr=1e30}"]\n')
    changes = ["--set", "stages.*.epochs=1", "--set", "peers.*.network=mlp"]
    code = ended(
        "train", "mutual/digits-dnn", bad, *changes, "--run", tmp_path / "runs", "--json", "-q", "--device", "cpu"
    )
    said = capsys.readouterr()
    assert code == 1
    assert [record["recipe"] for record in json.loads(said.out)] == ["mutual/digits-dnn"]
    assert said.err.startswith("peerbayes: ")
    assert "not finite" in said.err or "became" in said.err
    assert (tmp_path / "runs" / "mutual-digits-dnn-seed0" / "evaluation.json").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mutual/digits-dnn", "mutual/digits-dnn"], "a recipe is given twice"),
        (["mutual/digits-dnn", "--seed", "3", "--seeds", "0,1"], "--seed and --seeds exclude each other"),
        (["mutual/digits-dnn", "--seeds", "-1"], "expected seeds that are 0 or more"),
        (["mutual/digits-dnn", "--run", "/dev/null/x"], "/dev/null"),
        (
            ["mutual/digits-dnn", "--set", "stages.0.optimizer.momentum=0.0"],
            "nesterov needs sgd with a momentum above 0",
        ),
    ],
)
def test_what_several_runs_can_not_mean_is_one_sentence(capsys, words, sentence):
    code = ended("train", *words, "--device", "cpu", "-q")
    said = capsys.readouterr()
    assert code == 2
    assert sentence in said.err
    assert said.err.startswith("peerbayes: ")
    assert said.err.count("\n") == 1


def test_resuming_into_a_folder_of_something_else_touches_nothing(capsys, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / ".notes.tmp").write_text("mine too")
    assert ended("train", "mutual/digits-dnn", "--run", tmp_path, "--resume", "--device", "cpu", "-q") == 2
    assert "holds no run" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.tmp", "thesis.txt"]


def test_a_circle_of_sources_is_refused(capsys, tmp_path):
    for one, two in ("ab", "ba"):
        text = f'extends = "mutual/digits-dnn"\nset = ["peers.0.start_from={tmp_path}/{two}.toml"]\n'
        (tmp_path / f"{one}.toml").write_text(text)
    assert ended("train", tmp_path / "a.toml", "--run", tmp_path / "r", "--device", "cpu", "-q") == 2
    assert "circular start_from or teachers" in capsys.readouterr().err


def test_a_warning_is_told_once(tmp_path, capsys):
    for place in ("train/a", "train/b", "val/a"):
        (tmp_path / "data" / place).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "data" / place / f"{number}.png")
    words = change(f"data.name={tmp_path / 'data'}", "data.classes=2", "data.validation=0", "stages.0.epochs=1")
    called("train", "mutual/digits-dnn", "--run", tmp_path / "run", *words, *QUIET)
    assert capsys.readouterr().err.count("has no folder of class 'b'") == 1
