"""Fitting modules of one's own and training recipes from Python: what is given is used, or refused in a sentence."""

import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import peerbayes as pb
from commands import save_npz, write_small
from learners import Recorder
from peerbayes.errors import InputError
from peerbayes.recipes.recipe import load_recipe
from peerbayes.recipes.recipe_data import load_data
from peerbayes.runs.building import build_peers
from peerbayes.runs.executor import train_jobs
from peerbayes.runs.plan import Job, lineage_depth, resolve
from peerbayes.runs.session import RunOptions
from peerbayes.training.reporters import ConsoleReporter, Reporter

# Of two plain SGD steps, as most runs here are.
pytestmark = pytest.mark.filterwarnings("ignore:the scales of peer 'a' do not move")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("jobs"))


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


@pytest.fixture
def given(place, tmp_path):
    """What `fit` wants, all of it right."""
    return {
        "peers": {"a": pb.MeanField(net())},
        "data": place / "small.npz",
        "recipe": place / "source.toml",
        "run": tmp_path / "run",
        "overrides": ["data.validation=0"],
    }


def test_overrides_reach_a_recipe_that_is_loaded_already(given, place):
    given["recipe"] = pb.load_recipe(place / "source.toml")
    run = pb.fit(**given | {"overrides": ["stages.0.epochs=2", "data.batch_size=30", "data.validation=0"]})
    assert [line["step"] for line in run.metrics] == [2, 4]  # 60 images


def test_one_override_may_stand_by_itself(given):
    run = pb.fit(**given | {"overrides": "data.validation=10"})
    assert run.recipe.data.validation == 10


def test_data_of_one_class_are_refused(given, place, tmp_path):
    """All of them would be right at once: of a folder one level too high, say."""
    arrays = dict(np.load(place / "small.npz"))
    one = {name: np.zeros_like(array) if "labels" in name else array for name, array in arrays.items()}
    np.savez(tmp_path / "one.npz", **one)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "x.png")
    for split in ("train", "test"):
        (tmp_path / "photos" / split / "cats").mkdir(parents=True)
        shutil.copy(tmp_path / "x.png", tmp_path / "photos" / split / "cats")
    with pytest.raises(InputError, match=r"^one: has 1 class, expected two or more$"):
        pb.fit(**given | {"data": tmp_path / "one.npz"})
    with pytest.raises(InputError, match=r"^photos: has one class, 'cats', expected two or more$"):
        pb.fit(**given | {"data": tmp_path / "photos"})
    assert not given["run"].exists()


def test_a_peer_alone_is_told_that_it_has_nobody_to_learn_from(given, place):
    recipe = pb.load_recipe(place / "source.toml", ["stages.0.terms={likelihood={}, mutual={}, weight_diversity={}}"])
    seen = Recorder()
    pb.fit(**given | {"recipe": recipe, "reporter": seen})
    told = [f"{name} is between peers, but 'a' is alone: it does nothing" for name in ("mutual", "weight_diversity")]
    assert [line for line in seen.warnings if "between" in line] == told
    seen = Recorder()
    two = {"peers": {name: pb.MeanField(net()) for name in "ab"}, "run": given["run"].parent / "two"}
    pb.fit(**given | two | {"recipe": recipe, "reporter": seen})
    assert not [line for line in seen.warnings if "between" in line]


def test_train_takes_a_name_or_a_file_with_overrides(place, tmp_path):
    whole = pb.train(pb.load_recipe(place / "source.toml", ["stages.0.epochs=2"]), tmp_path / "a", device="cpu")
    again = pb.train(str(place / "source.toml"), tmp_path / "b", overrides=["stages.0.epochs=2"], device="cpu")
    assert whole.recipe == again.recipe
    assert whole.weights_file("only").read_bytes() == again.weights_file("only").read_bytes()
    with pytest.raises(InputError, match=r"there is no recipe 'mutual/digits-our'; did you mean 'mutual/digits-ours'"):
        pb.train("mutual/digits-our", tmp_path / "c")


ONE = pb.MeanField(net())
BAD = {
    "one posterior twice": ({"peers": {"a": ONE, "b": ONE}}, "peers 'a' and 'b' are one and the same posterior"),
    "a plain network": ({"peers": {"a": net()}}, r"peer 'a' is a Sequential, expected a posterior; .* in Point\(...\)"),
    "a list of peers": ({"peers": [ONE]}, "peers is of type list, expected posteriors by name"),
    "no peers": ({"peers": {}}, "peers: list should have at least 1 item"),
    "a negative seed": ({"seed": -1}, "seed is -1, expected a whole number that is 0 or more"),
    "a seed in words": ({"seed": "x"}, "seed is 'x', expected a whole number"),
    "a table": ({"recipe": {"title": "x"}}, "recipe is of type dict, expected a name, a file or a Recipe"),
    "arrays": ({"data": (np.zeros(3), np.zeros(3))}, r"train_images: images must have shape .*, got \(3,\)"),
    "an option of nothing": ({"enginee": "eager"}, "fit has no option 'enginee'; did you mean 'engine'"),
    "an option of fit": ({"override": []}, "fit has no option 'override'; did you mean 'overrides'"),
    "engine": ({"engine": "fast"}, "engine is 'fast', expected auto, eager, compiled, captured"),
    "precision": ({"precision": "f64"}, "precision is 'f64', expected auto, float32, bfloat16"),
    "placement": ({"placement": "disk"}, "placement is 'disk', expected auto, device, stream"),
    "checkpoints": ({"checkpoint_every": 0}, "checkpoint_every is 0, expected a whole number above 0"),
}


@pytest.mark.parametrize(("change", "sentence"), BAD.values(), ids=BAD)
def test_what_fit_can_not_use_is_one_sentence_and_nothing_is_written(given, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        pb.fit(**given | change)
    assert list(tmp_path.iterdir()) == []


def test_train_refuses_unknown_options_by_its_own_name(place, tmp_path):
    with pytest.raises(InputError, match=r"^train has no option 'sede'; did you mean 'seed'"):
        pb.train(place / "source.toml", tmp_path / "run", sede=3)
    with pytest.raises(InputError, match="pack is 0, expected a whole number above 0"):
        RunOptions(pack=0)


def test_python_shows_progress_on_a_terminal_and_is_silent_elsewhere(monkeypatch):
    given = Reporter()
    for terminal, kind in ((True, ConsoleReporter), (False, Reporter)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with RunOptions().reporting(None) as usual, RunOptions().reporting(given) as own:
            assert type(usual) is kind
            assert own is given


def test_arrays_in_memory_are_learnt_as_the_same_arrays_in_a_file_are(given, place, tmp_path):
    arrays = np.load(place / "small.npz")
    pairs = {part: (arrays[f"{part}_images"], torch.from_numpy(arrays[f"{part}_labels"])) for part in ("train", "test")}
    data = pb.data.from_arrays(**pairs, validation=12, name="mine")
    runs = []
    for name, source in (("file", pb.data.load(place / "small.npz", validation=12)), ("memory", data)):
        torch.manual_seed(0)
        peers = {"a": pb.MeanField(net(), name="a")}
        runs.append(pb.fit(**given | {"peers": peers, "data": source, "run": tmp_path / name, "overrides": []}))
    assert runs[0].weights_file("a").read_bytes() == runs[1].weights_file("a").read_bytes()
    record = pb.evaluate(runs[1], data=data, device="cpu")
    from_file = pb.evaluate(runs[1], data=place / "small.npz", device="cpu")
    assert from_file["peers"][0]["accuracy"] == record["peers"][0]["accuracy"]
    outside = pb.evaluate(runs[1], data=data, out_of_distribution=str(place / "small.npz"), device="cpu")
    assert list(outside["peers"][0]["out_of_distribution"]) == [str(place / "small.npz")]
    p = runs[1]["a"].predict(torch.from_numpy(arrays["test_images"])[:, None], record["draws"], name="a")
    with pytest.raises(InputError, match=r"images have shape \(5, 8, 8\), expected \(N, 1, 8, 8\)"):
        runs[1]["a"].predict(torch.rand(5, 8, 8))
    with pytest.raises(InputError, match=r"can't take images of shape \(1, 9, 9\), it was trained on .* \(1, 8, 8\)"):
        peers["a"].predict(torch.rand(5, 1, 9, 9))
    assert record["dataset"] == "mine"
    assert record["peers"][0]["accuracy"] == float((p.classes == pairs["test"][1]).double().mean())


def test_networks_of_one_pack_normalise_as_their_own_recipes_say(place, tmp_path):
    colours = np.random.default_rng(0).integers(0, 255, (90, 8, 8, 3), dtype=np.uint8)
    data = save_npz(tmp_path / "colours.npz", images=colours)
    changes = {"own": [], "other": ["data.stats=imagenet"]}
    recipes = {
        name: pb.load_recipe(place / "source.toml", [f'data.name="{data}"', *given]) for name, given in changes.items()
    }
    assert "stats" not in recipes["own"].to_toml()  # digests of older runs stay what they are
    jobs = [Job(recipe, tmp_path / name, 0) for name, recipe in recipes.items()]
    train_jobs(jobs, device="cpu")
    kept = colours[:48].transpose(0, 3, 1, 2).reshape(48, 3, -1) / 255
    expected = {"own": kept.mean((0, 2)), "other": [0.485, 0.456, 0.406]}
    for name, mean in expected.items():
        network = pb.load(tmp_path / name)["only"].network  # built anew from what the run keeps
        assert network.normalize.mean.flatten().tolist() == pytest.approx(list(mean), abs=1e-6)
    network, image = pb.load(tmp_path / "other")["only"].network, torch.full((1, 3, 8, 8), 0.7)
    expected = (0.7 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(network.normalize(image)[0, :, 0, 0], expected)


def test_a_peer_does_not_begin_where_the_network_began_that_another_one_starts_from(tmp_path):
    # Both are called "scratch" in the recipes, and would be twins.
    def built(recipe):
        (node,) = resolve([Job(recipe, tmp_path / "run")]).targets
        return build_peers(node, load_data(recipe), torch.device("cpu"), lineage_depth(node))

    dnn = load_recipe("mutual/digits-dnn", "stages.0.epochs=1")
    begun = built(dnn)["scratch"].mean
    pb.train(dnn, tmp_path / "dnn", device="cpu")
    changes = [f"peers.pretrained.start_from={tmp_path / 'dnn'}"]
    vanilla, dml = (built(load_recipe(f"mutual/digits-{name}", changes)) for name in ("vanilla", "dml"))

    def alike(one, two):
        return abs(float(torch.nn.functional.cosine_similarity(one.detach(), two.detach(), dim=0)))

    assert alike(begun, vanilla["pretrained"].mean) > 0.5
    assert alike(begun, vanilla["scratch"].mean) < 0.05
    assert torch.equal(vanilla["scratch"].mean, dml["scratch"].mean)  # methods can be compared


def test_a_fit_of_what_was_trained_is_the_next_generation(given):
    run = pb.fit(**given)
    again = pb.fit(**given | {"run": given["run"].parent / "again"})  # trained in place
    taken = pb.fit(**given | {"peers": {"a": run["a"]}, "run": given["run"].parent / "taken"})
    own = pb.MeanField(net(), start_from=again["a"])
    third = pb.fit(**given | {"peers": {"a": own}, "run": given["run"].parent / "third"})
    assert [one.about["generation"] for one in (run, again, taken, third)] == [0, 1, 1, 2]


def test_weights_to_start_from_may_lie_beside_a_recipe(tmp_path):
    dnn = pb.train(load_recipe("mutual/digits-dnn", "stages.0.epochs=1"), tmp_path / "dnn", device="cpu")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.toml").write_text("title = 'of mine'")
    start = shutil.copy(dnn.weights_file("scratch"), tmp_path / "mine" / "start.safetensors")
    recipe = load_recipe("mutual/digits-vanilla", f"peers.pretrained.start_from={start}")
    (node,) = resolve([Job(recipe, tmp_path / "run")]).targets
    peers = build_peers(node, load_data(recipe), torch.device("cpu"), lineage_depth(node))
    assert lineage_depth(node) == 1
    assert torch.equal(peers["pretrained"].mean, dnn["scratch"].mean)
