"""What people get wrong first: each is one sentence with its cause and what to do, and nothing is written."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from commands import called, process, refused, save_npz
from peerbayes import networks
from peerbayes.errors import InputError

KNOWN = ("agnews, banking77, cifar10, cifar100, clinc150, clinc150-oos, digits, dtd, fashion-mnist, flowers102, "
         "imagenet, mnist, photographs, svhn, tiny-imagenet, yahoo, yelp")  # fmt: skip
WHAT = "An image folder, texts (.csv, .json), an .npz file, or the name of a data set"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder as a newcomer has it: images, texts, a checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PEERBAYES_DATA", "data")
    for name in ("cat", "dog"):
        (tmp_path / "my-images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((8, 8, 3), 20 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "my-images" / name / f"{number}.png")
    (tmp_path / "texts.csv").write_text("text,label\ngood,yes\nbad,no\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "mine.csv").write_text("text,label\ngood,yes\nbad,no\n")
    (tmp_path / "notes.txt").write_text("not data")
    torch.save({"state_dict": {"a": torch.zeros(2)}}, tmp_path / "model.pth")
    save_npz(tmp_path / "three.npz")
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        # --data
        ("train --data", f"Option '--data' requires an argument. {WHAT}; see --help"),
        ("train", "train: name a recipe (see 'peerbayes recipes list'), or give images or texts: --data FOLDER"),
        ("train my-images", "train my-images: expected a recipe; data are given by --data my-images"),
        ("train texts.csv", "train texts.csv: expected a recipe; data are given by --data texts.csv"),
        ("train --data my-image", "no data set 'my-image': not a known name, and neither my-image nor data/my-image "
                                  "exists; did you mean 'my-images'?"),
        ("train --data texts.cvs", "no data set 'texts.cvs': not a known name, and neither texts.cvs nor "
                                   "data/texts.cvs exists; did you mean 'texts.csv'?"),
        ("train --data cifar-10", "no data set 'cifar-10': not a known name, and neither cifar-10 nor data/cifar-10 "
                                  "exists; did you mean 'cifar10'?"),
        ("train --data zzzzz", "no data set 'zzzzz': not a known name, and neither zzzzz nor data/zzzzz exists; "
                               f"known: {KNOWN}"),
        ("train --data empty", "{place}/empty: expected one sub-folder a class, found none"),
        ("train --data tables", "{place}/tables: expected one sub-folder a class, found none; texts go by train.csv "
                                "and test.csv, or one by one: --data {place}/tables/mine.csv"),
        ("train --data notes.txt", "{place}/notes.txt: expected an .npz file, an image folder, a table of texts or "
                                   "image paths (.csv), texts (.json) or a known name"),
        ("train --data model.pth", "{place}/model.pth: holds weights, expected data; the network that they are of is "
                                   "made the best of by 'peerbayes adopt'"),
        ("distill model.pth --data my-images", "No such option: --data (Possible options: --data-root); distill takes "
                                               "--set data.name=NAME; see --help"),
        # --epochs
        ("train plain --epochs", "Option '--epochs' requires an argument. Total epochs; milestones and warm-up "
                                 "scale in proportion; see --help"),
        ("train plain --epochs 0", "Invalid value for '--epochs': Input should be greater than or equal to 1; see "
                                   "--help"),
        ("train mutual/cifar10-resnet20-ours --epochs 1",
         "epochs is 1, expected at least 2, one a stage of mutual/cifar10-resnet20-ours"),
        ("compress runs/a --epochs 3", "No such option: --epochs; compress takes --set stages.0.epochs=N; see --help"),
        ("sweep plain --over stages.0.epochs=1,2 --epochs 3",
         "No such option: --epochs; sweep takes --set stages.0.epochs=N; see --help"),
        # --set and --over
        ("train plain --set epochs=2",
         "recipe plain: --set epochs=2: there is no key 'epochs'; did you mean 'stages.*.epochs'?"),
        ("sweep plain --over lr=1e-3,1e-2",
         "--over lr: there is no key 'lr'; did you mean 'stages.*.optimizer.lr'?"),
        ("sweep plain --over lr=",
         "--over lr=: expected KEY=VALUES, such as mutual.alpha=0.5,1,2"),
        ("train plain --set posterior.kind=bayesian",
         "recipe plain: --set posterior.kind=bayesian: there is no key 'posterior.kind'; did you mean "
         "'peers.*.posterior.kind'?"),
        ("train plain --set peers.0.posterior.kind=bayesian",
         "recipe plain: peers.0.posterior.kind: there is no kind 'bayesian'; did you mean 'mean_field', a Gaussian a "
         "weight?"),
        ("train plain --set network=efficientnet_b0",
         "recipe plain: --set network=efficientnet_b0: there is no key 'network'; did you mean 'peers.*.network'?"),
        ("train plain --set peers.0.network=efficientnet_b0",
         "there is no network 'efficientnet_b0'; did you mean 'timm/efficientnet_b0'?"),
        ("train plain --network efficientnet_b0",
         "there is no network 'efficientnet_b0'; did you mean 'timm/efficientnet_b0'?"),
        ("adopt model.pth --network efficientnet_b0 --data three.npz --set data.validation=6 --quiet",
         "there is no network 'efficientnet_b0'; did you mean 'timm/efficientnet_b0'?"),
        ("adopt model.pth --data three.npz --set data.validation=6 --quiet",
         "model.pth: which network is it of? Name it: --network timm/NAME, or --network mymodule:build"),
        # classes, device, what to start from
        ("train mutual/cifar10-resnet20-ours --set data.name=three.npz",
         "the recipe is for 10 classes, but three has 3: --set data.classes=3 takes them, or --data instead of "
         "data.name"),
        ("train plain --device gpu",
         "device 'gpu' can't be used: expected cpu, cuda, cuda:1, ... or auto; did you mean 'cuda'?"),
        ("train plain --set start_from=x.pth",
         "recipe plain: --set start_from=x.pth: there is no key 'start_from'; did you mean 'peers.*.start_from'?"),
        ("train from-checkpoint --set peers.0.start_from=x.pth",
         "peer 'net': start_from: x.pth: no such file"),
        ("adopt x.pth --network mlp --data three.npz --set data.validation=6 --quiet", "x.pth: no such file"),
        ("train from-checkpoint --set peers.0.start_from=model.pth --set peers.0.network=mlp",
         "model.pth: has no tensor 'hidden.0.0.weight' (and 5 others); is it of another network?"),
    ],
)  # fmt: skip
def test_a_newcomers_mistake_is_one_sentence(place, capsys, words, sentence):
    assert refused(capsys, *words.split()).replace(f"{place}/", "{place}/") == sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train --data my-image", "did you mean 'my-images'?"),
        ("train plain --network efficientnet_b0", "did you mean 'timm/efficientnet_b0'?"),
        ("train plain --device gpu", "did you mean 'cuda'?"),
    ],
)
def test_so_it_is_in_a_process(place, words, sentence):
    done = process(*words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.rstrip().endswith(sentence)


def test_a_run_that_goes_on_with_other_settings_is_told_which(tmp_path, capsys):
    data = save_npz(tmp_path / "three.npz")
    words = ("train", "plain", "--data", data, "--network", "mlp", "--epochs", 1, "--run", tmp_path / "run")
    called(*words, "--quiet", "--device", "cpu")
    changed = ("--set", "stages.0.optimizer.lr=0.2", "--resume", "--quiet", "--device", "cpu")
    assert refused(capsys, *words, *changed) == (
        f"{tmp_path / 'run'}: holds a run of plain with other settings: stages.0.optimizer.lr=0.1 there, "
        "stages.0.optimizer.lr=0.2 here; give those, or choose another folder"
    )


# ---- networks of one's own ------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "newcomers.py").write_text(
        "from torch import nn\n"
        "def by_name(num_classes=1000, in_channels=3, width=8):\n"
        "    return nn.Sequential(nn.Conv2d(in_channels, width, 1), nn.Flatten(), nn.LazyLinear(num_classes))\n"
        "def fixed():\n"
        "    return nn.Linear(4, 3)\n"
        "def of_inputs(inputs):\n"
        "    return nn.Linear(inputs.shape[0], inputs.classes)\n"
        "def optional(inputs=None, classes=7):\n"
        "    return nn.Linear(inputs.shape[0], inputs.classes + classes)\n"
        "def other(data):\n"
        "    return nn.Linear(data.classes, 1)\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, classes, *, hidden=5):\n"
        "        super().__init__(hidden, classes)\n"
        "def broken(num_classes, in_channels=1):\n"
        "    raise KeyError('nope')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield networks.Inputs(classes=6, shape=(2, 8, 8), mean=(0.5,) * 2, std=(0.2,) * 2)
    sys.modules.pop("newcomers", None)


@pytest.mark.parametrize(
    ("name", "features"),
    [("fixed", 3), ("of_inputs", 6), ("optional", 13), ("other", 1), ("Net", 6)],
)
def test_a_builder_takes_the_data_the_numbers_that_it_names_or_nothing(own, name, features):
    assert networks.build(f"newcomers:{name}", own).out_features == features


def test_channels_are_given_by_name(own):
    built = networks.build("newcomers:by_name", own)
    assert (built[0].in_channels, built[0].out_channels, built[2].out_features) == (2, 8, 6)


def test_a_builder_that_fails_says_how_it_was_called(own):
    with pytest.raises(InputError) as error:
        networks.build("newcomers:broken", own)
    assert str(error.value) == (
        "network 'newcomers:broken' can't be built: called with (num_classes=6, in_channels=2), it says: KeyError: "
        "'nope'; it may take inputs (peerbayes.networks.Inputs), num_classes and in_channels, or nothing"
    )
