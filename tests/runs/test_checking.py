"""Everything is checked before anything is written: one sentence, exit code 2, and no folder is there."""

import json
import sys

import pytest
import torch

import peerbayes
from commands import QUIET, called, change, contents, refused, save_npz, write_small
from peerbayes import reports as reporting
from peerbayes.recipes.recipe import load_recipe
from peerbayes.runs.run import Run
from peerbayes.training.learner import Learner

NOTHING = 'evaluation.out_of_distribution=["nothing"]'
SENTENCE = "evaluation.out_of_distribution: no data set 'nothing': not a known name, and neither nothing nor "


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = write_small(tmp_path_factory.mktemp("checking"))
    called("train", folder / "source.toml", "--run", folder / "run", *QUIET)
    # A copy with a fault that only a look through the network finds.
    (folder / "bad.toml").write_text(
        'extends = "small.toml"\nset = ["stages.0.terms.feature_diversity={layers=[\'nope\']}"]\n'
    )
    (folder / "outside.toml").write_text(f"extends = 'source.toml'\nset = ['{NOTHING}']\n")
    (folder / "first.toml").write_text('extends = "sharing/stage1"\nset = ["stages.0.epochs=1"]\n')
    return folder


# ---- out-of-distribution sets -------------------------------------------------------------------------------------

VERBS = {
    "train": "train small.toml --run OUT/x",
    "a later recipe": "train source.toml outside.toml --run OUT",
    "a source of it is trained first": "train small.toml --run OUT/x --set peers.0.start_from=source.toml",
    "the source has it": "train small.toml --run OUT/x --set peers.0.start_from=outside.toml",
    "a teacher is trained first": "train distillation/kd --run OUT/x --set teachers.runs=['source.toml'] "
    "--set data={name='small.npz'} --set peers.0.network=mlp",
    "sweep": "sweep small.toml --over mutual.alpha=0,1 --out OUT/x",
    "distill": "distill run --into distillation/kd --run OUT/x",
    "compress": "compress run --first first.toml --run OUT/x",
}


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_an_unknown_outside_set_is_refused_before_anything_is_written(place, tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(place)
    given = words.replace("OUT", str(tmp_path)).split()
    bad = [] if "outside.toml" in words else change(NOTHING)
    before = sorted(place.iterdir())
    assert SENTENCE in refused(capsys, *given, *bad, *QUIET)
    assert list(tmp_path.iterdir()) == []
    assert sorted(place.iterdir()) == before


def test_fit_refuses_it_too(place, tmp_path):
    peer = peerbayes.Point(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)))
    how = {"data": place / "small.npz", "recipe": place / "outside.toml", "run": tmp_path / "run"}
    with pytest.raises(peerbayes.InputError, match=SENTENCE):
        peerbayes.fit({"x": peer}, **how)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["nothing", "photographs.npz"])
def test_evaluate_refuses_outside_sets_before_it_predicts(place, tmp_path, capsys, monkeypatch, given):
    monkeypatch.setattr(peerbayes.runs.run.Run, "predict_split", None)
    monkeypatch.chdir(tmp_path)
    save_npz(tmp_path / "photographs.npz", images=torch.zeros(90, 8, 8, 4, dtype=torch.uint8).numpy())
    found = refused(capsys, "evaluate", place / "run", "--ood", place / "small.npz", "--ood", given, "--device", "cpu")
    assert found.startswith(f"no data set '{given}'" if given == "nothing" else f"{given}: images have 4 channels")


def test_a_run_finds_its_outside_sets_from_another_folder(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    given = change('evaluation.out_of_distribution=["small.npz"]')
    called("train", "source.toml", "--run", tmp_path / "run", *given, *QUIET)
    monkeypatch.chdir(tmp_path)
    (peer,) = reporting.evaluate("run", device="cpu")["peers"]
    # The test images themselves: nothing tells them apart.
    assert peer["out_of_distribution"][str(place / "small.npz")]["auroc"] == 0.5


# ---- everything else ----------------------------------------------------------------------------------------------


def test_the_last_of_many_recipes_is_looked_at_before_the_first_is_trained(place, tmp_path, capsys):
    words = ("train", place / "source.toml", place / "bad.toml", "--seeds", "0,1", "--run", tmp_path / "many")
    assert "has no layer 'nope'" in refused(capsys, *words, *QUIET)
    assert list(tmp_path.iterdir()) == []


def test_what_a_later_recipe_starts_from_is_looked_at_too(place, tmp_path, capsys):
    start = f"peers.0.start_from={place / 'run'}"
    (tmp_path / "wide.toml").write_text(f'extends = "{place}/small.toml"\nset = ["{start}", "peers.*.network=resnet8"]')
    words = ("train", place / "source.toml", tmp_path / "wide.toml", "--run", tmp_path / "many", *QUIET)
    assert "weights-only.safetensors: has no tensor 'conv.weight'" in refused(capsys, *words)
    assert not (tmp_path / "many").exists()


def test_compress_looks_at_its_place_before_it_gives_a_network_scales(place, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    words = ("compress", place / "run", "--first", place / "first.toml", "--run", taken, *QUIET)
    assert "the folder is not empty and holds no run" in refused(capsys, *words)
    assert contents(taken) == {"thesis.txt": b"mine"}
    assert list(tmp_path.iterdir()) == [taken]


def test_teachers_may_start_from_what_is_not_trained_yet(place, tmp_path):
    (tmp_path / "pair.toml").write_text(
        f'extends = "{place}/small.toml"\nset = ["peers.1.start_from={place}/source.toml", "stages.0.epochs=1"]\n'
    )
    given = change(
        f"teachers.runs=['{tmp_path}/pair.toml']", f"data={{name='{place}/small.npz', validation=12, batch_size=12}}"
    )
    words = ("train", "distillation/kd", "--run", tmp_path / "runs" / "student", *change("stages.0.epochs=1"))
    record = json.loads(called(*words, *given, "--json", *QUIET))
    assert record["method"] == Run(tmp_path / "runs" / "student").recipe.method
    methods = sorted(Run(path).recipe.method for path in (tmp_path / "runs").iterdir())
    assert methods == ["dml", "dnn", "kd"]


# ---- networks of one's own ----------------------------------------------------------------------------------------

MINE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, inputs, does):
        super().__init__()
        self.inner, self.does = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, inputs.classes)), does

    def forward(self, x):
        return self.does(self, self.inner(x))

class Odd(Exception):
    pass

def fail(error):
    raise error

def only(training, does):
    return lambda net, x: does(x) if net.training == training else x

DOES = {
    "key": lambda net, x: {}["logits"],
    "bare": lambda net, x: fail(AssertionError),
    "odd": lambda net, x: fail(Odd("two\\nlines")),
    "stop": lambda net, x: next(iter(())),
    "training": only(True, lambda x: [][3]),
    "judging": only(False, lambda x: [][3]),
    "auxiliary": only(True, lambda x: (x, x)),
    "numbers": lambda net, x: x.argmax(-1, keepdim=True).expand(-1, 3),
    "detached": lambda net, x: x.detach(),
}
globals().update({name: lambda inputs, does=does: Net(inputs, does) for name, does in DOES.items()})

def unbuilt(inputs):
    return {}["width"]

def greedy(inputs, more):
    pass
"""
TAKES = "the network of peer 'only' can't take small's inputs, of shape (1, 8, 8): "
MAY_TAKE = "; it may take inputs (peerbayes.networks.Inputs), num_classes and in_channels, or nothing"
NETWORKS = {
    "mine:key": TAKES + "KeyError: 'logits'",
    "mine:bare": TAKES + "AssertionError",
    "mine:odd": TAKES + "Odd: two",
    "mine:stop": TAKES + "StopIteration",
    "mine:training": TAKES + "IndexError: list index out of range",
    "mine:judging": TAKES + "IndexError: list index out of range",
    "mine:auxiliary": "the network of peer 'only' returns a tuple while it trains, expected a tensor of logits",
    "mine:numbers": "the network of peer 'only' returns a torch.int64 while it trains, expected a tensor of logits",
    "mine:detached": "the network of peer 'only' returns logits without a gradient, so nothing could be learnt; "
    "is it detached?",
    "mine:unbuilt": "network 'mine:unbuilt' can't be built: called with (inputs), it says: KeyError: 'width'"
    + MAY_TAKE,
    "mine:greedy": "network 'mine:greedy' can't be built: called with (inputs), it says: TypeError: greedy() missing 1 "
    "required positional argument: 'more'" + MAY_TAKE,
    "torn:x": "network 'torn:x' can't be imported: SyntaxError: '(' was never closed (torn.py, line 1)",
    "zero:x": "network 'zero:x' can't be imported: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize(("network", "sentence"), NETWORKS.items(), ids=NETWORKS)
def test_whatever_a_network_of_ones_own_does_is_one_sentence(place, tmp_path, capsys, monkeypatch, network, sentence):
    for name, text in (("mine", MINE), ("torn", "f("), ("zero", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("train", place / "source.toml", "--run", tmp_path / "run", *change(f"peers.0.network={network}"))
    assert refused(capsys, *words, *QUIET) == sentence
    assert not (tmp_path / "run").exists()


def test_looking_leaves_weights_statistics_and_random_numbers_alone(place):
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout()
    )
    peer, data = peerbayes.Point(network), peerbayes.data.load(place / "small.npz")
    before, numbers = {k: v.clone() for k, v in peer.state().items()}, torch.get_rng_state()
    Learner(load_recipe(place / "source.toml"), {"x": peer}, data, 0).feed.close()
    assert all(torch.equal(peer.state()[key], value) for key, value in before.items())
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("device", ["meta", "hpu", "privateuseone", "vulkan", "cpu:-1", ""])
def test_devices_that_can_not_train_are_one_sentence(place, tmp_path, capsys, device):
    found = refused(capsys, "train", place / "source.toml", "--run", tmp_path / "run", "-q", "--device", device)
    assert found.startswith(f"device '{device}' can't be used: ")
    assert list(tmp_path.iterdir()) == []
