"""Images reach networks from elsewhere as these expect them, once, and where nothing is known of that it is said."""

import copy
import pickle
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import peerbayes as pb
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.networks import Inputs, build, normalised
from peerbayes.networks.normalisation import (
    IMAGENET_STATS,
    looks_trained,
    normalises_itself,
    normalization_of,
    own_statistics,
)
from peerbayes.recipes.recipe import load_recipe
from peerbayes.recipes.recipe_data import network_inputs
from peerbayes.runs.building import build_peer

INPUTS = Inputs(3, (3, 8, 8), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
OWN = (INPUTS.mean, INPUTS.std)
GIVEN = ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
CPU = torch.device("cpu")
STILL = pb.Recipe.parse(
    {
        "title": "Still",
        "method": "dnn",
        "data": {"batch_size": 24},
        "peers": [{"name": "net", "network": "mlp", "posterior": {"kind": "point"}}],
        "stages": [{"epochs": 1, "optimizer": {"lr": 5e-7}, "terms": {"likelihood": {}}}],
        "evaluation": {"draws": 1},
    },
    "recipe",
)


def by_hand(images, stats):
    mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in stats)
    return (images - mean) / std


def pixels(count=48, seed=0):
    """Colour images of three classes: a bright block whose place is the class."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 90, (count, 8, 8, 3))
    for number, image in enumerate(images):
        image[2 * (number % 3) : 2 * (number % 3) + 3] += 150
    return images.astype(np.uint8), np.arange(count) % 3


def data():
    return pb.data.from_arrays(pixels(), pixels(30, 1))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    )


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = plain()

    def forward(self, x):
        return self.inner(x * 2 - 1)


def timm_net(seed=0):
    timm = pytest.importorskip("timm")
    torch.manual_seed(seed)
    return timm.create_model("test_resnet", num_classes=3)


def trained(network, stats, steps=40):
    """Train as others would, outside, on images that are normalised by ``stats``."""
    images, labels = (torch.from_numpy(part) for part in pixels())
    images = by_hand(images.permute(0, 3, 1, 2).float() / 255, stats)
    optimiser = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimiser.step()
    return network.eval()


def fitted(network, run, **options):
    """Run an epoch that moves next to nothing, so that what a network does with its images can be seen."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    options = {"data": data(), "recipe": STILL, "device": "cpu"} | options
    return pb.fit({"net": pb.Point(network)}, run=run, **options)["net"]


@torch.no_grad()
def test_what_is_put_in_front_changes_the_images_and_no_name():
    network = plain().eval()
    found, images = normalised(network, GIVEN, INPUTS), torch.rand(4, 3, 8, 8)
    torch.testing.assert_close(found(images), network(by_hand(images, GIVEN)))
    assert list(found.state_dict()) == list(network.state_dict())
    assert isinstance(found, nn.Sequential)
    assert normalization_of(network) is None
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), torch.fx.symbolic_trace(found)):
        assert torch.equal(again(images), found(images))
    posterior = pb.MeanField(found)
    torch.testing.assert_close(posterior(images), found(images))
    torch.testing.assert_close(posterior.materialise()(images), found(images))
    assert posterior.predict(images, 2).log_probabilities.shape == (4, 3)


@pytest.mark.parametrize("kind", [pb.Point, pb.MeanField, pb.RankOne])
def test_a_file_of_weights_brings_it_to_a_bare_network(tmp_path, kind):
    posterior = kind(plain()) if kind is not pb.RankOne else kind(plain(), 2)
    images = torch.rand(4, 3, 8, 8)
    before = posterior.eval().predict(images, 2).log_probabilities
    posterior.normalise(GIVEN, INPUTS)
    after = posterior.predict(images, 2).log_probabilities  # not what was folded for the prediction before
    assert not torch.allclose(before, after)
    posterior.save(tmp_path / "a.safetensors")
    again = pb.Posterior.load(tmp_path / "a.safetensors", plain())
    assert torch.equal(again.predict(images, 2).log_probabilities, after)
    assert normalization_of(pb.MeanField(plain(), start_from=posterior).network) == GIVEN
    assert normalization_of(pb.Point(plain(), start_from=posterior.materialise()).network) == GIVEN


def test_statistics_that_timm_and_torchvision_note():
    torchvision = pytest.importorskip("torchvision")
    assert own_statistics(timm_net()) == ((0.5,) * 3, (0.5,) * 3) or own_statistics(timm_net()) == IMAGENET_STATS
    assert own_statistics(nn.Sequential(torchvision.models.squeezenet1_1())) == IMAGENET_STATS
    assert own_statistics(plain()) is None
    assert own_statistics(build("resnet8", INPUTS)) is None


def test_what_looks_trained():
    network = plain()
    assert looks_trained(network, dict(network.named_parameters())) is False
    network(torch.rand(2, 3, 8, 8))
    assert looks_trained(network, dict(network.named_parameters())) is True
    bare = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    assert looks_trained(bare, dict(bare.named_parameters())) is None
    layer = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))
    assert looks_trained(layer, dict(layer.named_parameters())) is False
    with torch.no_grad():
        layer[0].weight[0] = 2
    assert looks_trained(layer, dict(layer.named_parameters())) is True


def test_a_network_that_normalises_its_images_is_known():
    transforms = pytest.importorskip("torchvision").transforms
    itself = [ByHand(), nn.Sequential(transforms.Normalize(*GIVEN), plain()), build("resnet8", INPUTS)]
    for network in itself:
        assert normalises_itself(network, (3, 8, 8), network)
        assert normalised(network, "auto", INPUTS) is network
        with pytest.raises(InputError, match=r"the network normalises its images itself: leave normalize out"):
            normalised(network, "imagenet", INPUTS)
    for network in (plain(), nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), timm_net()):
        assert not normalises_itself(network, (3, 8, 8), network)


def test_auto_is_as_in_a_recipe():
    fresh, learnt = timm_net(), trained(timm_net(), own_statistics(timm_net()), 2)
    assert normalization_of(normalised(fresh, "auto", INPUTS)) == OWN  # as timm/NAME has it
    assert normalization_of(normalised(learnt, "auto", INPUTS)) == own_statistics(learnt)
    asked = Inputs(3, (3, 8, 8), *IMAGENET_STATS, asked=True)
    for network in (fresh, learnt, plain()):
        assert normalization_of(normalised(network, "auto", asked)) == IMAGENET_STATS
        assert normalization_of(normalised(network, "data", INPUTS)) == OWN
        assert normalised(network, None, INPUTS) is network
    assert normalised(plain(), "auto", INPUTS).__class__ is nn.Sequential


def test_a_pretrained_timm_network_is_fed_alike_from_python_and_by_a_recipe(tmp_path):
    stats = own_statistics(timm_net())
    network, loaded = trained(timm_net(), stats), data()
    save_file(network.state_dict(), tmp_path / "net.safetensors")
    change = [f'peers.0.start_from="{tmp_path / "net.safetensors"}"', 'peers.0.network="timm/test_resnet"']
    recipe = load_recipe("distillation/kd", [*change, "peers.0.posterior.kind=point"])
    ours = build_peer(recipe.peers[0], loaded, 0, CPU, start=tmp_path / "net.safetensors").eval()
    images, labels = loaded.test.batch(torch.arange(30), CPU)
    theirs = fitted(network, tmp_path / "run")
    with torch.no_grad():
        expected = network(by_hand(images.float() / 255, stats))
    torch.testing.assert_close(ours(images), expected)
    torch.testing.assert_close(theirs(images), expected, rtol=1e-3, atol=1e-3)
    assert float((theirs(images).argmax(1) == labels).double().mean()) > 0.9
    assert normalization_of(theirs.network) == stats
    opened = pb.load(tmp_path / "run", networks={"net": timm_net(1)})["net"]
    assert torch.equal(opened(images), theirs(images))
    timm_net().load_state_dict(theirs.materialise().state_dict(), strict=True)


def test_a_trained_network_of_which_nothing_is_known_is_warned_of_once(tmp_path):
    network = trained(plain(), GIVEN, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior = fitted(network, tmp_path / "run")
        pb.fit({"net": posterior}, data=data(), recipe=STILL, run=tmp_path / "again", device="cpu")
        fitted(posterior.materialise(), tmp_path / "third")
    (one,) = [str(w.message) for w in told if issubclass(w.category, PeerbayesWarning)]
    assert one == (
        "the network of peer 'net' looks trained, and nothing tells which mean and deviation its images were "
        "normalised by: it is given them in [0, 1]; pass normalize=(mean, std), 'imagenet' or 'data', or "
        "normalize=None if [0, 1] is right (of the command adopt: --normalize)"
    )
    assert normalization_of(posterior.network) is None
    fitted(trained(plain(), GIVEN, 3), tmp_path / "none", normalize=None)  # silent, as all below
    assert normalization_of(fitted(trained(plain(), GIVEN, 3), tmp_path / "given", normalize=GIVEN).network) == GIVEN
    fitted(plain(), tmp_path / "fresh")
    bare = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    given = pb.Point(bare, start_from=bare)
    with pytest.warns(PeerbayesWarning, match="the network of peer 'net' is trained"):  # of weights that were given
        pb.fit({"net": given}, data=data(), recipe=STILL, run=tmp_path / "bare", device="cpu")


def test_statistics_of_a_recipe_reach_modules_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "ownnet.py").write_text(
        textwrap.dedent("""
        from torch import nn
        def build(inputs):
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    images, labels = pixels()
    np.savez(tmp_path / "d.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    peer = load_recipe("distillation/kd", ["peers.0.network=ownnet:build", "peers.0.posterior.kind=point"]).peers[0]
    for stats, expected in (("imagenet", IMAGENET_STATS), (None, None)):
        loaded = pb.data.load(tmp_path / "d.npz", stats=stats)
        assert normalization_of(build_peer(peer, loaded, 0, CPU).network) == expected
        assert network_inputs(loaded).asked == (stats is not None)
        zoo = build_peer(peer.model_copy(update={"network": "resnet8"}), loaded, 0, CPU).network
        assert zoo.normalize.mean.flatten().tolist() == pytest.approx((expected or (loaded.mean, loaded.std))[0])
    sys.modules.pop("ownnet", None)


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        ("imagnet", "normalize is 'imagnet', expected 'auto', 'imagenet', 'data', "),
        (((0.5,), (0.5,)), "normalize has 1 means and 1 deviations, but images have 3 channels"),
        (((0.5,) * 3, (0.0,) * 3), "expected finite means, and deviations above 0"),
        (((0.5,) * 3,), r"expected \(mean, std\), a number a channel each"),
        (3, r"normalize is 3, expected \(mean, std\)"),
    ],
)
def test_what_is_no_normalisation_is_one_sentence(normalize, message):
    with pytest.raises(InputError, match=message):
        normalised(plain(), normalize, INPUTS)
    with pytest.raises(InputError, match="normalize is for images, but the data are texts"):
        normalised(plain(), "imagenet", Inputs(2, (9,), (), (), tokens=5))
    assert normalization_of(normalised(plain(), (0.5, 0.25), INPUTS)) == ((0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            nn.Softmax(1),
            "returns probabilities, as of a softmax, and the loss takes another one of them: return logits",
        ),
        (nn.LogSoftmax(1), "returns log-probabilities, as of a log-softmax: they are as good as logits"),
    ],
)
def test_a_softmax_at_the_end_is_noticed(tmp_path, layer, message):
    with pytest.warns(PeerbayesWarning, match=f"the network of peer 'net' {message}") as told:
        fitted(nn.Sequential(plain(), layer), tmp_path / "run")
    assert len(told) == 1


def test_a_distilled_network_normalises_and_has_its_own_names(tmp_path):
    stats = own_statistics(timm_net())
    teacher = pb.Point(trained(timm_net(), stats))
    changes = ["stages.*.epochs=1", "data.batch_size=24"]
    student = pb.distill([teacher], timm_net(2), data=data(), recipe="distillation/kd", overrides=changes,
                         run=tmp_path / "run", device="cpu")  # fmt: skip
    assert normalization_of(teacher.network) == stats
    assert normalization_of(student) == (data().mean, data().std)  # it had not been trained
    (file,) = (tmp_path / "run").glob("network-*.safetensors")
    timm_net(3).load_state_dict(load_file(file), strict=True)
