"""Adopting a network: its file and its module get their images alike, and what is not known of them is said once."""

import re
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import peerbayes as pb
from commands import QUIET, called, refused
from learners import stopped_at
from peerbayes.adopting import SMALLER
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.networks import build
from peerbayes.networks.normalisation import IMAGENET_STATS, choice_in_words, normalization_of, read_choice
from peerbayes.recipes.recipe import load_recipe
from peerbayes.recipes.recipe_data import network_inputs
from peerbayes.runs.building import build_peer

CPU = torch.device("cpu")
GIVEN = ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
MODULE = """
from torch import nn
def tv(inputs):
    import torchvision
    return torchvision.models.shufflenet_v2_x0_5(num_classes=3)
def norm(inputs):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
def bare(inputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))
"""


def by_hand(images, stats):
    mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in stats)
    return (images - mean) / std


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A module that can be imported, and dark images of three classes."""
    folder = tmp_path_factory.mktemp("norms")
    (folder / "ownnets.py").write_text(textwrap.dedent(MODULE))
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 120), ("val", 60), ("test", 60)):
        labels = np.arange(count) % 3
        images = rng.integers(0, 60, (count, 8, 8, 3))
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 40
        arrays |= {f"{split}_images": images.astype(np.uint8), f"{split}_labels": labels}
    np.savez(folder / "dark.npz", **arrays)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("ownnets", None)


def trained(place, name, stats, steps=30):
    """Train as others would, on images normalised by ``stats``; save the weights, and return file and module."""
    import ownnets

    data = pb.data.load(place / "dark.npz")
    torch.manual_seed(0)
    network = getattr(ownnets, name)(network_inputs(data))
    images, labels = data.train.batch(torch.arange(len(data.train)), CPU)
    images = by_hand(images / 255, stats)
    optimiser = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimiser.step()
    torch.save(network.state_dict(), place / f"{name}.pth")
    return place / f"{name}.pth", network.eval()


def of_file(place, file, **options):
    """Return the posterior that a peer is, whose network is a module's and whose weights are a file's."""
    peer = load_recipe("plain", [f"peers.0.network=ownnets:{file.stem}"]).peers[0]
    return build_peer(peer, pb.data.load(place / "dark.npz"), 0, CPU, start=file, **options)


def test_a_file_of_torchvisions_weights_gets_the_statistics_that_its_module_gets(place):
    pytest.importorskip("torchvision")
    file, network = trained(place, "tv", IMAGENET_STATS, 2)
    posterior = of_file(place, file)
    data = pb.data.load(place / "dark.npz")
    assert normalization_of(posterior.network) == IMAGENET_STATS
    assert normalization_of(build_peer(
        load_recipe("plain").peers[0], data, 0, CPU, network=network
    ).network) == IMAGENET_STATS  # fmt: skip
    images = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(posterior.eval()(images), network(by_hand(images, IMAGENET_STATS)))
    fresh = load_recipe("plain", ["peers.0.network=ownnets:tv"]).peers[0]
    assert normalization_of(build_peer(fresh, data, 0, CPU).network) == (data.mean, data.std)


def test_a_file_of_ours_brings_the_statistics_to_what_starts_from_it(place, tmp_path):
    file, _ = trained(place, "bare", GIVEN, 2)
    first = of_file(place, file, normalize=GIVEN)
    first.save(tmp_path / "bare.safetensors")
    again = of_file(place, tmp_path / "bare.safetensors")
    assert normalization_of(first.network) == normalization_of(again.network) == GIVEN
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(first.eval()(images), again.eval()(images))
    of_file(place, file, normalize=None).save(tmp_path / "bare.safetensors")
    assert normalization_of(of_file(place, tmp_path / "bare.safetensors").network) is None  # and nothing is said
    old = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))
    pb.Point(old).save(tmp_path / "bare.safetensors")  # of a run that gave it [0, 1]
    assert normalization_of(of_file(place, tmp_path / "bare.safetensors").network) is None


@pytest.mark.parametrize("name", ["norm", "bare"])
def test_a_file_of_which_nothing_is_known_is_warned_of(place, name):
    file, _ = trained(place, name, GIVEN, 2)
    with pytest.warns(PeerbayesWarning, match="the network of peer 'net' is trained, and nothing tells which mean"):
        assert normalization_of(of_file(place, file).network) is None
    assert normalization_of(of_file(place, file, normalize="imagenet").network) == IMAGENET_STATS


HOW = {"epochs": 1, "widths": [0.1], "corrupted": None, "overrides": "evaluation.draws=2", "device": "cpu"}


def adopted(place, network, run, **options):
    """Adopt as people do, and return what is made and what is said."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        made = pb.adopt(network, data=str(place / "dark.npz"), run=run, **HOW, **options)
    return made, [str(warning.message) for warning in told if issubclass(warning.category, PeerbayesWarning)]


@pytest.mark.parametrize("normalize", ["auto", "none", "0.5,0.25"])
@pytest.mark.parametrize("kind", ["file", "module"])
def test_what_is_adopted_gets_its_images_as_asked_and_what_is_not_known_is_said_once(place, tmp_path, kind, normalize):
    stats = ((0.5,) * 3, (0.25,) * 3)
    file, network = trained(place, "bare", stats)
    what, options = (network, {}) if kind == "module" else (file, {"name": "ownnets:bare"})
    made, told = adopted(place, what, tmp_path / "run", normalize=read_choice(normalize), smaller=SMALLER, **options)
    about = [said for said in told if "normalised" in said]
    assert len(about) == (normalize == "auto")
    assert all("the network of peer 'net' is trained, and nothing tells which mean" in said for said in about)
    assert all(said.endswith("(of the command adopt: --normalize)") for said in about)
    expected = stats if normalize == "0.5,0.25" else None
    for who, run in made.runs.items():
        for peer in run:
            assert normalization_of(run[peer].network) == expected, who
    images, labels = pb.data.load(place / "dark.npz").test.batch(torch.arange(60), CPU)
    with torch.no_grad():
        p = network(by_hand(images / 255, expected) if expected else images / 255).softmax(1)
    (plain,) = [row for row in made.record["rows"] if row["who"] == "plain"]
    assert plain["accuracy"] == pytest.approx(float((p.argmax(1) == labels).double().mean()))
    assert plain["accuracy"] == 1 or expected is None


def test_what_goes_on_with_another_normalisation_is_refused(place, tmp_path, capsys):
    file, network = trained(place, "bare", GIVEN)
    words = ("adopt", file, "--network", "ownnets:bare", "--data", place / "dark.npz", "--epochs", 1, "--width", 0.1)
    words += ("--corrupted", "none", "--set", "evaluation.draws=2", "--run", tmp_path / "file", *QUIET)
    called(*words, "--normalize", "0.5,0.25")
    (made, _) = adopted(place, network, tmp_path / "module", normalize=(0.5, 0.25))
    for choice, name in (("none", "none"), ("auto", "auto"), ("0.5,0.2", "0.5,0.2")):
        sentence = f"plain: holds a run with normalize=0.5,0.25, not {name}; give that, or choose another folder"
        assert sentence in refused(capsys, *words, "--resume", "--normalize", choice)
        with pytest.raises(InputError, match=re.escape(sentence)):
            adopted(place, network, tmp_path / "module", normalize=read_choice(choice), resume=True)
    called(*words, "--resume", "--normalize", "0.50,.25")
    again, _ = adopted(place, network, tmp_path / "module", normalize=[0.5, 0.25], resume=True)
    assert again.record == made.record
    for run in made.runs.values():  # as runs were before it was remembered
        about = run.folder / "run.json"
        about.write_text(about.read_text().replace('"normalize"', '"other"'))
    adopted(place, network, tmp_path / "module", resume=True)


@pytest.mark.parametrize("choice", ["auto", "imagenet", "data", None, (0.5, 0.25), ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])])
def test_a_choice_is_read_as_it_is_written(choice):
    assert read_choice(choice_in_words(choice)) == choice


def test_an_interrupted_fit_goes_on_with_its_normalisation_alone(place, tmp_path):
    _, network = trained(place, "bare", GIVEN)
    options = {"data": str(place / "dark.npz"), "recipe": "plain", "run": tmp_path / "run", "device": "cpu",
               "overrides": ["stages.0.epochs=2", "data.batch_size=30"], "checkpoint_every": 2}  # fmt: skip
    with stopped_at(3):
        pb.fit(network, normalize=GIVEN, **options)
    with pytest.raises(InputError, match=re.escape("normalize=0.1,0.2,0.3,0.5,0.6,0.7, not none; give that")):
        pb.fit(network, normalize=None, resume=True, **options)
    assert normalization_of(pb.fit(network, normalize=GIVEN, resume=True, **options)["net"].network) == GIVEN


def test_a_network_by_name_is_normalised_as_asked_too(place, tmp_path):
    data = pb.data.load(place / "dark.npz")
    for name in ("mlp", "timm/test_resnet"):
        if "/" in name:
            pytest.importorskip("timm")
        (peer,) = load_recipe("plain", [f"peers.0.network={name}"]).peers
        first = build_peer(peer, data, 0, CPU)
        torch.save(first.materialise().state_dict(), tmp_path / "net.pth")
        for choice, mean, std in (("auto", *map(list, (data.mean, data.std))), (GIVEN, *map(list, GIVEN)),
                                  ((0.5, 0.25), [0.5] * 3, [0.25] * 3), (None, [0.0] * 3, [1.0] * 3)):  # fmt: skip
            own = build_peer(peer, data, 0, CPU, start=tmp_path / "net.pth", normalize=choice).network.normalize
            assert own.mean.flatten().tolist() == pytest.approx(mean)
            assert own.std.flatten().tolist() == pytest.approx(std)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("imagnet", "normalize is 'imagnet', expected auto, imagenet, data, none, or MEAN,STD: two numbers, or the "
                    "means of all channels and then their deviations"),
        ("0.5", "normalize is '0.5', expected auto, imagenet, "),
        ("0.5,0", "expected finite means, and deviations above 0"),
        ("nan,1", "expected finite means, and deviations above 0"),
        ("0.5,0.5,0.2,0.2", "normalize has 2 means and 2 deviations, but images have 3 channels"),
    ],
)  # fmt: skip
def test_statistics_that_are_none_are_one_sentence_and_nothing_is_written(place, tmp_path, capsys, words, sentence):
    file, _ = trained(place, "bare", GIVEN, 1)
    run = tmp_path / "run"
    for network in ("ownnets:bare", "mlp"):
        if network == "mlp":
            file = tmp_path / "mlp.pth"
            data = pb.data.load(place / "dark.npz")
            torch.save(build("mlp", network_inputs(data)).state_dict(), file)
        arguments = ("adopt", file, "--network", network, "--data", place / "dark.npz", "--run", run)
        assert sentence in refused(capsys, *arguments, "--normalize", words, *QUIET)
        assert not run.exists()


def test_the_command_takes_the_choice_and_is_silent_then(place, tmp_path, capfd):
    file, _ = trained(place, "bare", GIVEN)
    words = ("adopt", file, "--network", "ownnets:bare", "--data", place / "dark.npz", "--epochs", 1, "--width", 0.1)
    words += ("--corrupted", "none", "--set", "evaluation.draws=2", *QUIET)
    for choice, spoken in (([], 1), (["--normalize", "0.1,0.2,0.3,0.5,0.6,0.7"], 0)):
        run = tmp_path / str(spoken)
        called(*words, "--run", run, *choice)
        assert capfd.readouterr().err.count("nothing tells which mean") == spoken
        assert normalization_of(pb.load(run, trust=True)["net"].network) == (None if spoken else GIVEN)
