"""Files of weights that others have trained: every wrapper gives the tensors back, and nothing is run."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from peerbayes.errors import InputError
from peerbayes.networks.weights_files import fitted, read_checkpoint, under_names


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def prefixed(state, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


WRAPPERS = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"epoch": 3, "optimizer": {"lr": 0.1}, "state_dict": s},
    "model": lambda s: {"model": s, "args": None},
    "model_state_dict": lambda s: {"model_state_dict": s, "loss": 1.0},
    "two wrappers": lambda s: {"model": {"state_dict": s}},
    "data parallel": lambda s: {"state_dict": prefixed(s, "module.")},
    "compiled": lambda s: prefixed(s, "_orig_mod."),
    "both": lambda s: prefixed(s, "_orig_mod.module."),
    "lightning": lambda s: {"state_dict": prefixed(s, "model."), "hyper_parameters": {}},
    "average": lambda s: {"state_dict": {name: 0 * tensor for name, tensor in s.items()}, "state_dict_ema": s},
    "averaged model": lambda s: {**prefixed(s, "module."), "n_averaged": torch.tensor(4)},
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("ending", [".pt", ".pth"])
def test_weights_come_out_of_their_wrappers(net, tmp_path, wrap, ending):
    state = net.state_dict()
    torch.save(wrap(state), tmp_path / f"x{ending}")
    found = fitted(read_checkpoint(tmp_path / f"x{ending}"), net, tmp_path, new_head=False)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_safetensors_have_prefixes_too(net, tmp_path):
    save_file(prefixed(net.state_dict(), "module."), tmp_path / "x.safetensors")
    found = fitted(read_checkpoint(tmp_path / "x.safetensors"), net, tmp_path, new_head=False)
    assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())


def test_a_prefix_that_is_the_networks_own_stays():
    state = {"body.a": torch.zeros(1), "body.b": torch.ones(1)}
    assert under_names(state, {"body.a", "body.b"}).keys() == state.keys()


class Nasty:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('was run')",)


def test_nothing_of_a_pickle_is_run(net, tmp_path):
    for given in (Nasty(), net, {"state_dict": net.state_dict(), "config": Nasty()}):
        torch.save(given, tmp_path / "x.pth")
        with pytest.raises(InputError, match=r"x\.pth: it holds more than tensors; save the weights alone: torch.save"):
            read_checkpoint(tmp_path / "x.pth")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1], "holds a list, expected a state dict"),
        ({}, "no weights are found in it"),
        ({"epoch": 3}, "it holds epoch"),
    ],
)
def test_a_file_without_weights_says_what_it_holds(tmp_path, given, words):
    torch.save(given, tmp_path / "x.pth")
    with pytest.raises(InputError, match=words):
        read_checkpoint(tmp_path / "x.pth")


def test_damaged_files_are_refused(tmp_path):
    for name in ("x.pth", "x.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(InputError, match=name):
            read_checkpoint(tmp_path / name)


def test_tensors_that_differ_are_named(net, tmp_path):
    state = net.state_dict()
    less = {name: tensor for name, tensor in state.items() if not name.startswith("2.")}
    with pytest.raises(InputError, match=r"has no tensor '2.weight' \(and 1 others\); is it of another network"):
        fitted(less, net, tmp_path, new_head=False)
    with pytest.raises(InputError, match="has a tensor 'more' that this network has not"):
        fitted({**state, "more": torch.zeros(1)}, net, tmp_path, new_head=False)
    wide = {**state, "0.weight": torch.zeros(3, 5)}
    with pytest.raises(InputError, match=r"tensor '0.weight' has shape \(3, 5\), expected \(3, 4\); is it of another"):
        fitted(wide, net, tmp_path, new_head=True)


def test_a_head_of_another_size_is_replaced_on_request_alone(net, tmp_path):
    state = net.state_dict() | {"2.weight": torch.zeros(9, 3), "2.bias": torch.zeros(9)}
    with pytest.raises(InputError, match=r"has shape \(9, 3\), expected \(2, 3\); --new-head begins a new head there"):
        fitted(state, net, tmp_path, new_head=False)
    found = fitted(state, net, tmp_path, new_head=True)
    assert torch.equal(found["2.weight"], net[2].weight)
    assert torch.equal(found["0.weight"], net[0].weight)
