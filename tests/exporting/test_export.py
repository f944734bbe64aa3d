"""Exported programs predict as peerbayes does, or are not there."""

import json
import math

import numpy as np
import onnx
import pytest
import torch
from exported import SHAPE, TinyBert, code_of, conv_net, differs, mean_field, ran, without
from torch import nn

import peerbayes as pb
from codebooks import book
from codebooks import net as shared_net
from peerbayes.errors import InputError
from peerbayes.exporting import program_files
from peerbayes.exporting.checking import forked_noise, noise_of
from peerbayes.inference.prediction import entropy_of
from peerbayes.math.noise import Seed1
from peerbayes.networks import Inputs, build
from peerbayes.networks.running import evaluating

IMAGES = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(1))


def by_hand(posterior, images, flats):
    """Return probabilities, entropy and disagreement of networks of given weights, by their definitions."""
    with torch.no_grad(), evaluating(posterior):
        p = torch.stack([posterior.run_network(images, posterior.named(flat)).softmax(-1) for flat in flats]).double()
    mean = p.mean(0)

    def entropy(q):
        return -(q * q.log()).sum(-1)

    return mean.float(), entropy(mean).float(), (entropy(mean) - entropy(p).mean(0)).float()


def close(outputs, wanted, tolerance=2e-6):
    return max(float((one - other).abs().max()) for one, other in zip(outputs, wanted, strict=True)) < tolerance


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """A posterior, and its export with a seed as an input."""
    posterior = mean_field(name="mine", seed=3)
    return posterior, pb.export(posterior, out=tmp_path_factory.mktemp("seeded") / "made", shape=SHAPE, draws=7)


def test_a_plain_network_keeps_its_temperature_and_names(tmp_path):
    network = conv_net()
    point = pb.Point(network)
    point.temperature, point.class_names = 1.7, ("a", "b|", "c")
    done = pb.export(point, out=tmp_path / "made", shape=SHAPE)
    for images in (IMAGES, IMAGES[:1], IMAGES.repeat(4, 1, 1, 1)):
        with torch.no_grad():
            p = (network(images) / 1.7).softmax(-1)
        assert close(ran(done.file, images), (p, -(p * p.log()).sum(-1), torch.zeros(len(images))))
    model = onnx.load(done.file)
    about = json.loads({prop.key: prop.value for prop in model.metadata_props}["peerbayes"])
    assert about["temperature"] == 1.7
    assert about["class_names"] == ["a", "b|", "c"]
    assert [(given.name, given.type.tensor_type.shape.dim[0].dim_param) for given in model.graph.input] == [
        ("images", "batch")
    ]
    assert [value.name for value in model.graph.output] == ["probabilities", "entropy", "disagreement"]
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 18}
    assert done.error < 1e-5


def test_seed_0_makes_the_draws_of_peerbayes(seeded):
    posterior, done = seeded
    for draws in (1, 5):
        assert differs(ran(done.file, IMAGES, 0, draws), posterior.predict(IMAGES, draws)) < 2e-6
    assert float(ran(done.file, IMAGES, 0, 1)[2].max()) < 1e-6  # one draw does not disagree with itself


def test_another_seed_makes_other_draws(seeded):
    posterior, done = seeded
    found = {seed: ran(done.file, IMAGES, seed, 4) for seed in (0, 1, 2, -1, 1 << 62)}
    for seed, outputs in found.items():
        flats = [posterior.place(noise)[0].detach() for noise in forked_noise(posterior, seed, 4)]
        assert close(outputs, by_hand(posterior, IMAGES, flats))
        assert all(other == seed or float((outputs[0] - found[other][0]).abs().max()) > 1e-3 for other in found)
    assert torch.equal(forked_noise(posterior, 0, 3), noise_of(posterior, 3))


def test_many_draws_have_the_distribution_of_the_posterior(seeded):
    posterior, done = seeded
    mine, theirs = ran(done.file, IMAGES, 12345, 4000), posterior.predict(IMAGES, 4000)
    assert differs(mine, theirs) < 0.02  # 4,000 draws of each: a standard error of at most .5 · √2 / √4000 = .011
    assert differs(mine, theirs) > 1e-5


def test_what_it_says_of_itself(seeded):
    posterior, done = seeded
    config = json.loads((done.folder / "config.json").read_text())
    assert (config["noise"], config["draws"], config["passes"], config["opset"]) == ("seed", {"mine": 7}, 7, 18)
    assert config["bytes"] == done.file.stat().st_size == done.bytes
    # The weights twice, means and scales, in float32, and a graph; no constant as long as they are.
    assert done.bytes < 2 * 4 * posterior.layout.size + 150_000


def test_runs_of_the_first_format_of_noise_keep_their_draws(tmp_path):
    posterior = mean_field(name="mine", seed=Seed1(3))
    other = mean_field(name="mine", seed=3).predict(IMAGES, 3)
    assert float((other.probabilities - posterior.predict(IMAGES, 3).probabilities).abs().max()) > 1e-3
    done = pb.export(posterior, out=tmp_path / "made", shape=SHAPE)
    assert differs(ran(done.file, IMAGES, 0, 3), posterior.predict(IMAGES, 3)) < 2e-6


def test_noise_as_an_input(tmp_path):
    posterior = mean_field()
    done = pb.export(posterior, noise="input", out=tmp_path / "made", shape=SHAPE)
    noise = torch.randn(3, posterior.noise_size)
    flats = [posterior.place(row)[0].detach() for row in noise]
    assert close(ran(done.file, IMAGES, noise), by_hand(posterior, IMAGES, flats))
    still = ran(done.file, IMAGES, torch.zeros(2, posterior.noise_size))
    assert close(still, by_hand(posterior, IMAGES, [posterior.mean.detach()]))


def test_baked_draws_need_no_more_inputs(tmp_path):
    posterior = mean_field()
    done = pb.export(posterior, noise="baked", draws=4, out=tmp_path / "made", shape=SHAPE)
    assert differs(ran(done.file, IMAGES), posterior.predict(IMAGES, 4)) < 2e-6
    assert done.about["passes"] == 4


def test_members_are_baked_and_an_average_is_one_network(tmp_path):
    members = pb.RankOne(conv_net(), 3, factors="random").eval()
    done = pb.export(members, out=tmp_path / "members", shape=SHAPE)
    assert (done.about["noise"], done.about["passes"]) == ("baked", 3)
    assert differs(ran(done.file, IMAGES), members.predict(IMAGES)) < 2e-6
    with pytest.raises(InputError, match="members, not noise"):
        pb.export(members, noise="seed", out=tmp_path / "no", shape=SHAPE)
    assert not (tmp_path / "no").exists()
    average = pb.RankOne(conv_net(), 3, factors="random", predicts="average").eval()
    done = pb.export(average, out=tmp_path / "average", shape=SHAPE)
    assert done.about["passes"] == 1
    with torch.no_grad():
        assert torch.allclose(ran(done.file, IMAGES)[0], average.average()(IMAGES).softmax(-1), atol=2e-6)


@pytest.mark.parametrize(("sampling", "mixture"), [("hierarchical", False), ("cluster_hier", True)])
def test_a_codebook_is_looked_up(tmp_path, sampling, mixture):
    posterior = pb.Shared(shared_net(), book(), sampling=sampling, mixture=mixture, bits=32).eval()
    posterior.save(tmp_path / "saved.safetensors")  # which leaves out components that no weight has
    done = pb.export(posterior, out=tmp_path / "made", shape=SHAPE)
    assert done.about["codebook"] == "lookup"
    for seed in (0, 5):
        flats = [posterior.place(noise)[0].detach() for noise in forked_noise(posterior, seed, 3)]
        assert close(ran(done.file, IMAGES, seed, 3), by_hand(posterior, IMAGES, flats), 1e-5)
    assert differs(ran(done.file, IMAGES, 0, 3), posterior.predict(IMAGES, 3)) < 1e-5


def test_a_codebook_is_small_or_plain(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(32, 600), nn.ReLU(), nn.Linear(600, 3))
    size = 600 * 35
    posterior = pb.Shared(network, book(size, components=14, blended=50, outliers=100)).eval()
    how = {"noise": "none", "shape": SHAPE}
    small = pb.export(posterior, out=tmp_path / "small", **how)
    plain = pb.export(posterior, out=tmp_path / "plain", codebook="plain", **how)
    assert plain.bytes > 4 * size
    assert small.bytes < size * 4 / 8 + 30_000  # 4 bits of a weight's 14 components, outliers and blends; and a graph
    opened = pb.Posterior.load(small.folder / "model.safetensors", network)  # rounded, as the file is
    wanted = by_hand(opened, IMAGES, [opened.mean.detach()])
    assert close(ran(small.file, IMAGES), wanted)
    assert close(ran(plain.file, IMAGES), wanted)


@pytest.mark.parametrize("noise", ["seed", "none"])
def test_a_small_transformer_that_leaves_padding_out(tmp_path, noise):
    torch.manual_seed(0)
    posterior = pb.MeanField(TinyBert(), width=0.2).eval()
    done = pb.export(posterior, noise=noise, out=tmp_path / "made", shape=(10,))
    tokens = torch.randint(1, 40, (4, 10), generator=torch.Generator().manual_seed(0)).int()
    tokens[:, 6:] = 0
    flats = [posterior.mean.detach()]
    if noise == "seed":
        flats = [posterior.place(row)[0].detach() for row in noise_of(posterior, 3)]
    assert close(ran(done.file, tokens, *([0, 3] if noise == "seed" else [])), by_hand(posterior, tokens, flats))


@pytest.mark.parametrize("name", ["timm/test_vit", "timm/tf_mobilenetv3_small_minimal_100"])
def test_networks_of_timm(tmp_path, name):
    pytest.importorskip("timm")
    inputs = Inputs(5, (3, 32, 32), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    torch.manual_seed(0)
    point = pb.Point(build(name, inputs)).eval()
    done = pb.export(point, out=tmp_path / "made", shape=inputs.shape)
    assert done.error < 1e-4
    images = torch.rand(2, *inputs.shape)
    assert differs(ran(done.file, images), point.predict(images, 1)) < 1e-4
    assert np.allclose(done.about["normalization"]["mean"], inputs.mean)


def test_certain_predictions_have_an_entropy_of_0(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    with torch.no_grad():
        network[1].weight.mul_(1e4)
    done = pb.export(pb.Point(network), out=tmp_path / "made", shape=SHAPE)
    p, entropy, disagreement = ran(done.file, IMAGES)
    assert float(p.max(-1).values.min()) == 1  # so that others are exactly 0, whose logarithm is infinite
    assert entropy.tolist() == disagreement.tolist() == [0] * len(IMAGES)


def test_torch_export_runs_without_peerbayes(tmp_path, seeded):
    posterior, _ = seeded
    done = pb.export(posterior, to="torch", out=tmp_path / "made", shape=SHAPE, draws=6)
    torch.save(IMAGES, done.folder / "images.pt")
    code = (
        code_of(done.folder)
        + "\ntorch.save(program(torch.load('images.pt'), torch.tensor(0), torch.tensor(6)), 'out.pt')"
    )
    without(("peerbayes",), code, done.folder)
    assert differs(torch.load(done.folder / "out.pt"), posterior.predict(IMAGES, 6)) < 2e-6
    said = {program_files.ABOUT: ""}
    found = torch.export.load(done.file, extra_files=said)
    assert json.loads(said[program_files.ABOUT])["noise"] == "seed"
    assert not any("anchor" in name or "inverse" in name for name in found.state_dict | dict(found.constants))
    assert done.error < 1e-5


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_program_that_differs_is_refused_and_not_there(tmp_path, monkeypatch, to):
    run = f"run_{to}"
    real = getattr(program_files, run)
    for wrong in (2e-4, math.nan):
        monkeypatch.setattr(program_files, run, lambda path, feeds: [one + wrong for one in real(path, feeds)])  # noqa: B023
        with pytest.raises(InputError, match=r"differ from peerbayes's own by .*expected at most 1e-04"):
            pb.export(pb.Point(conv_net()), to=to, out=tmp_path / "made", shape=SHAPE)
        assert list(tmp_path.iterdir()) == []


class Viewing(nn.Module):
    """A network that takes what a convolution returns to lie channel by channel."""

    def __init__(self):
        super().__init__()
        self.layer, self.linear = nn.Conv2d(2, 4, 3), nn.Linear(16, 3)

    def forward(self, x):
        return self.linear(self.layer(x).view(len(x), 16))


def test_a_network_that_calls_view(tmp_path):
    torch.manual_seed(0)
    posterior = pb.MeanField(Viewing(), width=0.3).eval()
    done = pb.export(posterior, noise="baked", draws=2, out=tmp_path / "made", shape=SHAPE)
    assert differs(ran(done.file, IMAGES), posterior.predict(IMAGES, 2)) < 2e-6


class Recurrent(nn.Module):
    """A network whose layer keeps its weights in a list of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.linear = nn.GRU(16, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(self.layer(x.flatten(2))[0][:, -1])


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 3)

    def forward(self, x):
        if float(x.sum()) > 1e9:
            return self.linear(x.flatten(1)) * 2
        return self.linear(x.flatten(1))


RECURRENT = (
    r"^the network can't be run in a loop over draws: layer '\w+' \(GRU\) keeps a list of its weights, which the loop "
    r"can't replace; --noise none \(noise='none'\) exports its mean weights, one pass without disagreement$"
)


def test_networks_that_cannot_be_traced_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"can't be traced by torch\.export"):
        pb.export(pb.Point(Untraceable()), out=tmp_path / "made", shape=SHAPE)
    with pytest.raises(InputError, match=RECURRENT):
        pb.export(pb.MeanField(Recurrent()), out=tmp_path / "made", shape=SHAPE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "onnxx"}, "no format 'onnxx'; did you mean 'onnx'"),
        ({"noise": "seeds"}, "no noise 'seeds'; did you mean 'seed'"),
        ({"draws": 0}, "draws is 0, expected a whole number of at least 1"),
        ({"draws": True, "noise": "none"}, "leave out one of them"),
        ({"noise": "none", "draws": 3}, "leave out one of them"),
        ({"codebook": "lookup"}, "no peer's weights share one"),
        ({"codebook": "small"}, "expected lookup or plain"),
        ({"opset": 17}, "opset is 17, expected 18 to"),
        ({"opset": 9999}, "opset is 9999, expected 18 to"),
        ({"shape": None}, "does not know the shape"),
        ({"shape": (2, 4)}, "expected .channels, height, width. of an image"),
        ({"out": None}, "`out` is required"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, said):
    with pytest.raises(InputError, match=said):
        pb.export(mean_field(), **{"out": tmp_path / "made", "shape": SHAPE} | options)
    assert list(tmp_path.iterdir()) == []


def test_more_that_cannot_be(tmp_path):
    shared = pb.Shared(shared_net(), book())
    for options, said in (
        ({"noise": "seed", "codebook": "plain"}, "draws by looking weights up"),
        ({"noise": "baked", "codebook": "lookup"}, "baked draws are plain weights"),
    ):
        with pytest.raises(InputError, match=said):
            pb.export(shared, out=tmp_path / "made", shape=SHAPE, **options)
    with pytest.raises(InputError, match="one set of weights"):
        pb.export(pb.Point(conv_net()), draws=3, out=tmp_path / "made", shape=SHAPE)
    with pytest.raises(InputError, match="source is a Conv2d"):
        pb.export(nn.Conv2d(1, 1, 1), out=tmp_path / "made")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(InputError, match="is there already"):
        pb.export(mean_field(), out=tmp_path / "there", shape=SHAPE)
    assert (tmp_path / "there" / "file").read_text() == "mine"


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"ONNX needs onnxruntime.*pip install 'peerbayes\[export\]'"):
        pb.export(mean_field(), out=tmp_path / "made", shape=SHAPE)
    assert list(tmp_path.iterdir()) == []


def test_entropy_is_what_the_program_computes():
    log_p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log()
    assert torch.allclose(entropy_of(log_p), torch.tensor([1.5 * math.log(2), 0.0]))
