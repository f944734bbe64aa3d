"""Files of posteriors and networks: what is read is what was written, and a wrong file is one sentence."""

import json
import math
import os
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from peerbayes import networks
from peerbayes.codebook.build import Sharing, share
from peerbayes.codebook.shared import Shared
from peerbayes.errors import InputError
from peerbayes.math.noise import Address
from peerbayes.networks import Inputs
from peerbayes.posteriors import MeanField, Point, Posterior, RankOne, storage

KINDS = {
    "point": lambda network, **options: Point(network, **options),
    "gaussian": lambda network, **options: MeanField(network, prior_std=0.7, rho=-1.5, **options),
    "radial": lambda network, **options: MeanField(network, noise="radial", **options),
    "anchored": lambda network, **options: MeanField(network, prior="anchored", **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(2, width, (3, 2), bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.linear = nn.Linear(width, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -math.inf, 0.0]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.conv(x))).mean((2, 3))
        return self.again(self.tied(self.linear(x)) + self.frozen) + self.mask.clamp_min(-5)


def net(seed=0, width=4):
    torch.manual_seed(seed)
    network = Net(width)
    nn.init.normal_(network.norm.weight)
    network(torch.randn(16, 2, 5, 5) + 1)
    return network.eval()


def images():
    return torch.rand(5, 2, 5, 5, generator=torch.Generator().manual_seed(1))


def trained(kind):
    """A posterior with nothing left as it was at the start."""
    posterior = KINDS[kind](net()).train()
    optimizer = torch.optim.Adam(posterior.parameters(), 0.05)
    for number in range(3):
        optimizer.zero_grad()
        posterior(images(), posterior.draw(Address(number=number))).square().sum().backward()
        optimizer.step()
    return posterior.eval()


def snapshot(posterior):
    return {name: tensor.detach().clone() for name, tensor in posterior.state().items()}


def same(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


# ---- round trip ---------------------------------------------------------------------------------------------------


@every_kind
def test_a_file_gives_back_every_bit(kind, tmp_path):
    posterior = trained(kind)
    path = tmp_path / "deep" / "posterior.safetensors"
    posterior.save(path)
    found = Posterior.load(path, net(9)).eval()
    assert type(found) is type(posterior)
    assert found.options() == posterior.options()
    assert same(snapshot(found), snapshot(posterior))
    for (name, a), (_, b) in zip(found.named_buffers(), posterior.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    ours, theirs = (p.predict(images(), draws=3, seed=2) for p in (found, posterior))
    assert torch.equal(ours.log_probabilities, theirs.log_probabilities)
    assert torch.equal(ours.expected_entropy, theirs.expected_entropy)
    address = Address(5, "x", "step", 7)
    assert torch.equal(found.kl(weights=found.draw(address)), posterior.kl(weights=posterior.draw(address)))


@every_kind
def test_a_file_names_tensors_as_the_network_does(kind, tmp_path):
    posterior = trained(kind)
    posterior.save(tmp_path / "p.safetensors")
    tensors = load_file(tmp_path / "p.safetensors")
    plain = posterior.materialise().state_dict()
    parts = {
        "mean": posterior.layout.shapes,
        "rest": posterior.rest_layout.shapes,
        "network": posterior.network.state_dict(),
    }
    for part, names in parts.items():
        for name in names:
            assert torch.equal(tensors[f"{part}/{name}"], plain[name])
    held = {"point": {"mean"}, "anchored": {"mean", "rho", "anchor"}}.get(kind, {"mean", "rho"})
    assert {name.split("/")[0] for name in tensors} == held | {"rest", "network"}
    assert tensors["network/norm.num_batches_tracked"].item() == 4


def test_an_anchor_is_kept_apart_from_the_means(tmp_path):
    posterior = trained("anchored")
    posterior.save(tmp_path / "p.safetensors")
    found = MeanField.load(tmp_path / "p.safetensors", net(9))
    start = KINDS["anchored"](net())
    assert torch.equal(found.anchor, start.mean)
    assert not torch.equal(found.anchor, found.mean)


def test_saving_again_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "p.safetensors"
    Point(net(1)).save(path)
    Point(net(2)).save(path)
    assert torch.equal(Point.load(path, net()).mean, Point(net(2)).mean)
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


@pytest.mark.skipif(os.name != "posix", reason="an open file can't be replaced elsewhere")
def test_a_reader_in_the_middle_sees_the_old_file_whole(tmp_path):
    path = tmp_path / "p.safetensors"
    Point(net(1)).save(path)
    before = path.read_bytes()
    with open(path, "rb", buffering=0) as reader:
        start = reader.read(10)
        Point(net(2)).save(path)
        assert start + reader.read() == before
    assert path.read_bytes() != before


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.safetensors"
    Point(net(1)).save(path)
    before = path.read_bytes()

    def full(_descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        Point(net(2)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


def test_a_file_that_cant_be_written_is_named_as_it_was_asked_for(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken") as told:
        storage.write_bytes(tmp_path / "taken", b"data")
    assert told.value.filename == str(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_frozen_layers_under_two_names_can_be_saved(tmp_path):
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    network.append(network[1])
    posterior = Point(network)
    posterior.save(tmp_path / "p.safetensors")
    found = Point.load(tmp_path / "p.safetensors", network)
    assert same(snapshot(found), snapshot(posterior))


def test_kinds_are_checked(tmp_path):
    Point(net()).save(tmp_path / "p.safetensors")
    with pytest.raises(InputError, match=r"p\.safetensors: holds a posterior of kind 'point', expected MeanField"):
        MeanField.load(tmp_path / "p.safetensors", net())


# ---- files that are not what they should be -----------------------------------------------------------------------


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def header_length(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.999])
def test_a_flipped_bit_anywhere_in_the_tensors_is_noticed(place, tmp_path):
    path = tmp_path / "p.safetensors"
    trained("gaussian").save(path)
    start, end = header_length(path), path.stat().st_size
    flip(path, start + int(place * (end - start)))
    with pytest.raises(InputError, match=r"p\.safetensors: corrupt"):
        MeanField.load(path, net())
    with pytest.raises(InputError, match=r"p\.safetensors: corrupt"):
        Point(net(), start_from=path)


def test_changed_options_are_noticed(tmp_path):
    path = tmp_path / "p.safetensors"
    trained("gaussian").save(path)
    data = path.read_bytes()
    assert data.count(b"0.7") == 1
    path.write_bytes(data.replace(b"0.7", b"0.9"))
    with pytest.raises(InputError, match="corrupt"):
        MeanField.load(path, net())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_one_sentence(share, tmp_path):
    path = tmp_path / "p.safetensors"
    Point(net()).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    for read in (lambda: Point.load(path, net()), lambda: Point(net(), start_from=path)):
        with pytest.raises(InputError, match=r"p\.safetensors: not a readable safetensors file") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_file_of_another_program_is_not_a_posterior(tmp_path):
    path = tmp_path / "plain.safetensors"
    save_file(Point(net()).materialise().conv.state_dict(), path)
    with pytest.raises(InputError, match=r"plain\.safetensors: not written by peerbayes"):
        Point.load(path, net())


def test_a_missing_file_is_named(tmp_path):
    for read in (lambda p: Point.load(p, net()), lambda p: Point(net(), start_from=p)):
        with pytest.raises(InputError, match=r"absent\.safetensors: no such file"):
            read(tmp_path / "absent.safetensors")


def test_a_posterior_of_another_network_changes_nothing(tmp_path):
    path = tmp_path / "p.safetensors"
    KINDS["gaussian"](net(width=5)).save(path)
    with pytest.raises(InputError, match=r"p\.safetensors: tensor 'mean/conv\.weight' has shape \(5, 2, 3, 2\)"):
        MeanField.load(path, net())
    posterior = trained("gaussian")
    before = snapshot(posterior)
    for spoil in ("missing", "extra", "shape", "nan"):
        state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        last = list(state)[-1]
        if spoil == "missing":
            del state[last]
        elif spoil == "extra":
            state["mean/other"] = torch.zeros(1)
            last = "mean/other"
        else:
            last = "rho/again.bias"
            state[last] = torch.zeros(5) if spoil == "shape" else torch.full((4,), math.nan)
        with pytest.raises(InputError, match=f"^state: .*'{re.escape(last)}'"):
            posterior.load_state(state)
        assert same(snapshot(posterior), before)


# ---- starting from a trained network ------------------------------------------------------------------------------


def sources(folder):
    """Every way to name one and the same trained network."""
    network = net(7)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    save_file(state, folder / "plain.safetensors")
    del state["again.weight"]
    save_file(state, folder / "once.safetensors")
    other = {name: tensor.clone() for name, tensor in network.state_dict().items() if name != "tied.weight"}
    save_file(other, folder / "alias.safetensors")
    MeanField(network, prior="anchored").save(folder / "posterior.safetensors")
    return {
        "module": network,
        "state dict": network.state_dict(),
        "half precision": {n: t.half() if t.is_floating_point() else t for n, t in network.state_dict().items()},
        "point": Point(network),
        "posterior": MeanField(network, noise="radial"),
        "other choice": MeanField(network, bayesian=lambda name, _module: name.startswith("norm")),
        "plain file": folder / "plain.safetensors",
        "file without the tied name": folder / "once.safetensors",
        "file under the tied name": str(folder / "alias.safetensors"),
        "posterior file": str(folder / "posterior.safetensors"),
    }


def test_start_from_takes_every_tensor(tmp_path):
    expected = net(7).state_dict()
    for what, source in sources(tmp_path).items():
        for posterior in (Point(net(8), start_from=source), MeanField(net(8), start_from=source, prior="anchored")):
            found = posterior.materialise().state_dict()
            assert found.keys() == expected.keys(), what
            for name, tensor in expected.items():
                wanted = tensor.half().to(tensor) if what == "half precision" and tensor.is_floating_point() else tensor
                assert torch.equal(found[name], wanted), (what, name)
        assert torch.equal(posterior.anchor, posterior.mean), what


def test_start_from_copies(tmp_path):
    network = net(7)
    posterior = Point(net(8), start_from=network)
    with torch.no_grad():
        posterior.mean.fill_(1)
        posterior.rest.fill_(1)
        posterior.network.norm.running_mean.fill_(1)
        posterior.network.frozen.fill_(1)
    assert all(torch.equal(t, net(7).state_dict()[n]) for n, t in network.state_dict().items())


def spoilt(what):
    state = {name: tensor.clone() for name, tensor in net(7).state_dict().items()}
    if what == "missing":
        del state["norm.running_var"]
        return state, "norm.running_var"
    if what == "extra":
        state["head.weight"] = torch.zeros(2)
        return state, "head.weight"
    if what == "shape":
        state["linear.weight"] = torch.zeros(4, 5)
        return state, "linear.weight"
    state["conv.weight"][0, 0, 0, 0] = {"nan": math.nan, "infinite": math.inf}[what]
    return state, "conv.weight"


@pytest.mark.parametrize("what", ["missing", "extra", "shape", "nan", "infinite"])
def test_start_from_another_network_names_file_and_tensor(what, tmp_path):
    state, name = spoilt(what)
    path = tmp_path / "other.safetensors"
    save_file(state, path)
    network = net(8)
    before = {n: t.clone() for n, t in network.state_dict().items()}
    for make in (Point, MeanField):
        with pytest.raises(InputError, match=f"other.safetensors: .*'{re.escape(name)}'") as caught:
            make(network, start_from=path)
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError, match=f"start_from: .*'{re.escape(name)}'"):
            make(network, start_from=state)
    assert same({n: t.clone() for n, t in network.state_dict().items()}, before)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_pickled_weights_are_read_without_their_code(suffix, tmp_path):
    path = tmp_path / f"weights{suffix}"
    trained = net(5)
    torch.save({"epoch": 3, "state_dict": trained.state_dict()}, path)
    for start_from in (path, str(path)):
        made = Point(net(), start_from=start_from).materialise().state_dict()
        assert same(made, trained.state_dict())
    torch.save({"weight": Trap(tmp_path / "sprung")}, path)
    with pytest.raises(InputError, match=rf"weights\{suffix}: it holds more than tensors; save the weights alone"):
        Point(net(), start_from=path)
    assert not (tmp_path / "sprung").exists()


class Trap:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({str(self.path)!r}, 'w')",))


def test_a_pickle_under_a_safetensors_name_is_not_unpickled(tmp_path):
    path = tmp_path / "trap.safetensors"
    torch.save({"weight": Trap(tmp_path / "sprung")}, path)
    with pytest.raises(InputError, match=r"trap\.safetensors: not a readable safetensors file"):
        Point(net(), start_from=path)
    assert not (tmp_path / "sprung").exists()


# ---- the format ---------------------------------------------------------------------------------------------------


def test_any_dtype_and_shape_survives_storage(tmp_path):
    tensors = {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "bfloat": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "special": torch.tensor([math.nan, math.inf, -0.0]),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    }
    about = {"step": 3, "nested": {"names": ["α", "b"]}}
    storage.write(tmp_path / "x.safetensors", tensors, about)
    found, said = storage.read(tmp_path / "x.safetensors")
    assert said == about
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["peerbayes"]) == about


@pytest.mark.parametrize("kind", ["point", "mean_field", "rank_one", "shared", "plain"])
def test_what_starts_from_a_file_is_the_mean_network_of_what_was_saved(kind, tmp_path):
    network = networks.build("mlp", Inputs(10, (1, 8, 8), (0.5,), (0.3,)))
    path = tmp_path / "weights.safetensors"
    if kind == "plain":
        source = Point(network)
        storage.write(path, source.materialise().state_dict(), {"network": "mlp"})  # as `peerbayes distill` does
    else:
        field = MeanField(network, rho=-4.0)
        made = {
            "point": lambda: Point(network),
            "mean_field": lambda: field,
            "rank_one": lambda: RankOne(network, 3, factors="random", spread=0.5),
            "shared": lambda: Shared(network, share(field, Sharing(components=40), None)[0], start_from=field),
        }
        source = made[kind]()
        source.save(path)
    images = torch.rand(4, 1, 8, 8)
    fresh = networks.build("mlp", Inputs(10, (1, 8, 8), (0.5,), (0.3,)))
    for started in (Point(fresh, start_from=path), MeanField(fresh, start_from=path)):
        expected = source.materialise().eval()(images)
        torch.testing.assert_close(started.materialise().eval()(images), expected, rtol=1e-6, atol=1e-6)
