"""Data of one's own and nothing else said: the default recipes, their networks, and their epochs."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import peerbayes as pb
from commands import QUIET, called, change, refused, save_npz
from learners import Recorder
from peerbayes import networks
from peerbayes.data import dataset, from_arrays
from peerbayes.data.dataset import load as load_data_set
from peerbayes.errors import InputError
from peerbayes.recipes import recipe_data
from peerbayes.recipes.recipe import Recipe, load_recipe, over_epochs, packaged
from peerbayes.recipes.recipe_data import fitted_to
from peerbayes.runs import executor
from peerbayes.runs.executor import train_jobs
from peerbayes.runs.run import Run

WISHES = ["bayesian", "compress", "distil", "ensemble", "from-checkpoint", "peers", "plain", "text"]


def write_texts(path):
    words = {"good": "great lovely fine nice", "bad": "awful poor dull grim"}
    rows = [f"{label},{' '.join(np.random.default_rng(n).choice(words[label].split(), 3))}"
            for n in range(60) for label in words]  # fmt: skip
    path.write_text("label,text\n" + "\n".join(rows))


def images(count, side, channels):
    pixels = np.random.default_rng(0).integers(0, 255, (count, side, side, channels), dtype=np.uint8)
    return from_arrays((pixels.squeeze(), np.arange(count) % 2), (pixels[:4].squeeze(), np.arange(4) % 2))


# ---- recipes by wish ------------------------------------------------------------------------------------------------


def test_recipes_by_wish_are_listed_first_and_name_no_classes_and_no_layers():
    assert list(packaged())[: len(WISHES)] == WISHES
    assert [line.split()[0] for line in called("recipes", "list").splitlines()[: len(WISHES)]] == WISHES
    for name in WISHES:
        recipe = load_recipe(name)
        assert recipe.data.classes is None
        assert not any(stage.layers for stage in recipe.stages)
        assert {peer.network for peer in recipe.peers} <= {"auto", "teachers"}


def test_peers_have_the_settings_that_were_measured():
    recipe = load_recipe("peers")
    (stage,) = recipe.stages
    assert [peer.posterior.rho for peer in recipe.peers] == [-5.0, -5.0]
    assert stage.optimizer.model_dump(exclude_none=True) == {
        "name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "clip": 5.0,
    }  # fmt: skip
    assert (stage.lr_schedule, stage.terms["kl"]["scheme"], stage.terms["kl"]["weight"]) == (
        "cosine",
        "layer_mean",
        0.1,
    )
    assert (stage.terms["mutual"]["alpha"], stage.terms["mutual"]["temperature"]) == (0.5, 1.0)
    assert recipe.data.validation == "auto"


@pytest.mark.parametrize("recipe", ["plain", "ensemble"])
def test_plain_networks_do_not_diverge_in_batches_of_four(recipe, tmp_path):
    hard = ["data.batch_size=4", "stages.0.epochs=1", "stages.0.warmup=0", "stages.0.optimizer.lr=0.5"]
    run = pb.train(recipe, tmp_path, overrides=["peers.*.network=mlp", *hard], device="cpu")
    assert all(peer["terms"]["likelihood"] < 20 for peer in run.metrics[0]["peers"].values())


@pytest.mark.parametrize(
    ("side", "channels", "network", "augment"),
    [(8, 1, "resnet8", ["crop"]), (32, 3, "resnet20", ["crop", "flip"]), (96, 3, "timm/resnet18", ["crop", "flip"])],
)
def test_networks_and_crops_follow_the_images(side, channels, network, augment):
    recipe = fitted_to(load_recipe("peers"), images(200, side, channels))
    assert [peer.network for peer in recipe.peers] == [network] * 2
    assert recipe.data.augment == augment
    own = load_recipe("peers", ["peers.*.network=mlp"])
    assert fitted_to(own, images(200, side, channels)) == own


@pytest.mark.parametrize(("count", "size"), [(40, 16), (5000, 128), (960, 30)])
def test_small_splits_have_small_batches(count, size):
    assert fitted_to(load_recipe("plain"), images(count, 8, 1)).data.batch_size == size


def test_auto_builds_the_network_that_it_stands_for():
    inputs = networks.Inputs(3, (1, 8, 8), (0.5,), (0.2,))
    found = {name: t.shape for name, t in networks.build("auto", inputs).state_dict().items()}
    assert found == {name: t.shape for name, t in networks.build("resnet8", inputs).state_dict().items()}
    assert networks.for_inputs(networks.Inputs(2, (9,), (), (), tokens=50)) == "fasttext100"


def test_a_recipe_without_stages_needs_something_to_evaluate():
    table = load_recipe("plain").model_dump(exclude_none=True) | {"stages": []}
    with pytest.raises(InputError, match="stages are empty, and peer 'net' has no start_from"):
        Recipe.parse(table, "mine")
    table["peers"][0]["start_from"] = "net.pth"
    assert Recipe.parse(table, "mine").epochs == 0


# ---- epochs ---------------------------------------------------------------------------------------------------------


def test_epochs_scale_stages_milestones_warmup_and_schedules():
    lines = ["stages.0.warmup=4.0", "stages.0.terms.kl.anneal=10.0",
             "stages.1.terms.mutual.alpha={ schedule = 'cosine', start = 2.0, end = 0.5, epochs = 20.0 }"]  # fmt: skip
    recipe = load_recipe("mutual/ours", lines)
    half = over_epochs(recipe, 30)
    assert [stage.epochs for stage in recipe.stages] == [40, 20]
    assert [stage.epochs for stage in half.stages] == [20, 10]
    assert [stage.lr_milestones for stage in half.stages] == [[10, 15, 18], [3, 6, 9]]
    assert half.stages[0].warmup == 2.0
    assert half.stages[0].terms["kl"]["anneal"] == 5.0
    assert half.stages[1].terms["mutual"]["alpha"]["epochs"] == 10.0
    assert over_epochs(recipe, 60) == recipe
    for epochs in range(2, 80):
        assert over_epochs(recipe, epochs).epochs == epochs
        assert over_epochs(recipe, epochs).digest == over_epochs(recipe, epochs).digest
    with pytest.raises(InputError, match="epochs is 1, expected at least 2, one a stage of mutual/ours"):
        over_epochs(recipe, 1)


# ---- on the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of small coloured images: red ones and blue ones."""
    place = tmp_path_factory.mktemp("own") / "images"
    noise = np.random.default_rng(0)
    for name, channel in (("red", 0), ("blue", 2)):
        (place / name).mkdir(parents=True)
        for number in range(30):
            pixels = noise.integers(0, 100, (8, 8, 3), dtype=np.uint8)
            pixels[..., channel] += 120
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    return place


def test_an_image_folder_is_all_that_training_needs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = json.loads(
        called("train", "--data", folder, "--epochs", 2, "--json", *QUIET, *change("evaluation.draws=3"))
    )
    run = Run(tmp_path / "runs" / "peers-images-seed0")
    assert (record["recipe"], run.recipe.epochs) == ("peers", 2)
    assert {peer.network for peer in run.recipe.peers} == {"resnet8"}
    assert "validation" not in record
    assert record["ensemble"]["temperature"] > 0  # there are validation images
    assert run.recipe.data.name == str(folder)
    called("train", "--data", folder, "--epochs", 2, "--resume", *QUIET, *change("evaluation.draws=3"))


def test_seeds_and_recipes_share_one_copy_of_the_data(folder, tmp_path, monkeypatch):
    loads, executed = [], []

    def counted(given, **options):
        loads.append(load_data_set(given, **options))
        return loads[-1]

    def kept(jobs, **options):
        executed.extend(jobs)
        return train_jobs(jobs, **options)

    monkeypatch.setattr(recipe_data, "load", counted)
    monkeypatch.setattr(executor, "train_jobs", kept)
    called("train", "bayesian", "plain", "--data", folder, "--epochs", 1, "--seeds", "0,1,2", "--run", tmp_path,
           *QUIET, *change("evaluation.draws=2"))  # fmt: skip
    assert [(job.recipe.name, job.seed) for job in executed] == [
        (n, s) for n in ("bayesian", "plain") for s in range(3)
    ]
    assert {id(job.given.data) for job in executed} == {id(loads[0])}
    assert len(loads) == 1


def test_runs_of_a_general_recipe_are_named_by_their_data_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    quick = ("--epochs", 1, "--network", "mlp", *QUIET, *change("evaluation.draws=2"))
    for name in ("three.npz", "my/four.npz"):
        save_npz(tmp_path / name)
        called("train", "bayesian", "--data", name, *quick)
    called("train", "bayesian", "--data", "digits", "--seeds", "0,1", *quick)
    called("train", "bayesian", *quick)
    called("train", "mutual/digits-dnn", "--data", "three.npz", *quick, *change("data.validation=6"))
    found = {path.name: Run(path).recipe.data.name for path in (tmp_path / "runs").iterdir()}
    assert found == {
        "bayesian-three-seed0": str(tmp_path / "three.npz"),
        "bayesian-my-four-seed0": str(tmp_path / "my" / "four.npz"),
        "bayesian-digits-seed0": "digits",
        "bayesian-digits-seed1": "digits",
        "bayesian-seed0": "digits",
        "mutual-digits-dnn-seed0": str(tmp_path / "three.npz"),
    }


def test_a_run_in_a_folder_without_the_name_of_its_data_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_npz(tmp_path / "three.npz")
    words = ("train", "plain", "--data", "three.npz", "--epochs", 1, "--network", "mlp", *QUIET)
    called(*words, "--run", "runs/plain-seed0")
    called(*words, "--resume")
    assert "runs/plain-seed0: already holds a run" in refused(capsys, *words)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["plain-seed0"]
    shutil.copy("three.npz", "other.npz")
    called("train", "plain", "--data", "other.npz", *words[4:])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["plain-other-seed0", "plain-seed0"]


@pytest.fixture
def reads(monkeypatch):
    """What is read in this test: names and paths of data sets."""
    found, read = [], dataset._read

    def counted(name, *options, **others):
        found.append(str(name))
        return read(name, *options, **others)

    monkeypatch.setattr(dataset, "_read", counted)
    return found


def test_training_and_evaluation_read_images_once(tmp_path, reads):
    quick = ("--epochs", 1, *change("peers.*.network=mlp", "evaluation.draws=2"))
    called("train", "mutual/digits-dnn", "--seeds", "0,1", "--run", tmp_path, *quick, *QUIET)
    assert reads == ["digits"]


def test_training_and_evaluation_read_texts_once(tmp_path, reads):
    write_texts(tmp_path / "texts.csv")
    words = ("--data", tmp_path / "texts.csv", "--epochs", 1, "--run", tmp_path / "run", *change("evaluation.draws=2"))
    called("train", "bayesian", "--seeds", "0,1", *words, *QUIET)
    assert reads == [str(tmp_path / "texts.csv")]


def test_adopting_reads_the_data_once(tmp_path, reads):
    save_npz(tmp_path / "three.npz")
    called("train", "plain", "--data", tmp_path / "three.npz", "--network", "mlp", "--epochs", 1,
           "--run", tmp_path / "run", *QUIET)  # fmt: skip
    reads.clear()
    called("adopt", tmp_path / "run" / "weights-net.safetensors", "--network", "mlp", "--data", tmp_path / "three.npz",
           "--width", 0.1, "--peers", 2, "--epochs", 1, "--corrupted", "none", "--run", tmp_path / "adopted",
           *QUIET, *change("evaluation.draws=2"))  # fmt: skip
    assert reads == [str(tmp_path / "three.npz")]


def test_texts_have_a_recipe_of_their_own(tmp_path):
    write_texts(tmp_path / "texts.csv")
    record = json.loads(called("train", "--data", tmp_path / "texts.csv", "--epochs", 3, "--run", tmp_path / "run",
                               "--json", *QUIET))  # fmt: skip
    assert (record["recipe"], record["network"]) == ("text", "fasttext100")
    assert record["ensemble"]["accuracy"] > 0.8


def test_a_recipe_takes_other_data_network_and_epochs(tmp_path):
    data = save_npz(tmp_path / "three.npz")
    words = ("--data", data, "--network", "mlp", "--epochs", 1, "--run", tmp_path / "run", *change("data.validation=6"))
    record = json.loads(called("train", "mutual/digits-dnn", *words, "--json", *QUIET))
    assert (record["dataset"], record["network"], record["epochs"]) == ("three", "mlp", 1)


def test_runs_that_a_recipe_starts_from_take_the_other_data_and_their_classes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("mutual/cifar10-resnet20-dnn").data.classes == 10  # the folder has two
    told = called("train", "mutual/cifar10-resnet20-ours", "--data", folder, "--dry-run")
    assert "mutual/cifar10-resnet20-dnn on images" in told
    assert "mutual/cifar10-resnet20-ours on images" in told


def test_what_is_missing_is_said(tmp_path, capsys):
    assert refused(capsys, "train") == (
        "train: name a recipe (see 'peerbayes recipes list'), or give images or texts: --data FOLDER"
    )
    assert refused(capsys, "train", "--data").startswith("Option '--data' requires an argument. An image folder, texts")
    assert refused(capsys, "train", "--data", tmp_path / "none").startswith(f"no data set '{tmp_path / 'none'}'")
    assert "epochs" in refused(capsys, "train", "peers", "--epochs", 0)


# ---- from Python ----------------------------------------------------------------------------------------------------


def test_a_network_and_data_are_all_that_fit_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = from_arrays(*(
        (np.random.default_rng(n).integers(0, 255, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3) for n in (0, 1)
    ), validation=12)  # fmt: skip
    net = networks.build("mlp", networks.Inputs(3, data.shape, data.mean, data.std))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run = pb.fit(net, data=data, overrides=["stages.0.epochs=1"], reporter=Recorder(), device="cpu")
    assert run.folder.name == "peers-seed0"
    assert [posterior.kind for posterior in run.values()] == ["mean_field"] * 2
    assert not torch.equal(run["first"].mean, run["second"].mean)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


# ---- one Bayesian network -------------------------------------------------------------------------------------------


def test_one_bayesian_run_is_distilled_from_its_means(tmp_path):
    data = save_npz(tmp_path / "three.npz")
    words = ("--data", data, "--network", "mlp", "--run", tmp_path / "run", *change("data.validation=6"))
    called("train", "bayesian", *words, "--epochs", 1, *QUIET)
    (row,) = json.loads(called("distill", tmp_path / "run", "--run", tmp_path / "one", "--dry-run", "--json", *QUIET))
    assert (row["recipe"], row["starts"]) == ("distil", {"student": str(tmp_path / "run" / "weights-net.safetensors")})
    slow = change("stages.0.epochs=1", "stages.0.optimizer.lr=1e-9", "stages.0.optimizer.weight_decay=0.0")
    called("distill", tmp_path / "run", "--run", tmp_path / "one", *QUIET, *slow)
    teacher = Run(tmp_path / "run")["net"]
    assert torch.allclose(Run(tmp_path / "one")["student"].mean, teacher.mean, atol=1e-6)
    for into, near in (
        (teacher.materialise(), True),
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)), False),
    ):
        given = {name: tensor.clone() * 0 for name, tensor in into.state_dict().items()}
        into.load_state_dict(given)
        found = pb.distill(
            Run(tmp_path / "run"), into, run=tmp_path / f"python-{near}", overrides=slow[1::2], device="cpu"
        )
        mean = dict(found.named_parameters())
        assert near == any(tensor.abs().max() > 1e-3 for tensor in mean.values())


def test_a_network_of_ones_own_gets_the_scales_of_the_recipe(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8), dtype=np.uint8)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    run = pb.fit(network, data=from_arrays((images, np.arange(60) % 3)), recipe="bayesian", run=tmp_path / "run",
                 overrides=["stages.*.epochs=1", "peers.*.posterior.width=0.05", "stages.*.optimizer.lr=1e-4"],
                 reporter=Recorder(), device="cpu")  # fmt: skip
    posterior, weight = run["net"], network[1].weight
    scale = posterior.layout.views(posterior.std)["1.weight"]
    torch.testing.assert_close(scale.mean(), 0.05 * weight.square().mean().sqrt(), rtol=0.05, atol=0)
