"""Data that were given from Python: all verbs take them, and runs remember them."""

import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import peerbayes as pb
from commands import process
from peerbayes.errors import InputError
from peerbayes.runs.run import Run

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 255, (48, 6, 6), dtype=np.uint8)
LABELS = np.arange(48) % 3
HOW = {"recipe": "distillation/kd", "overrides": ["stages.*.epochs=1", "data.batch_size=12"], "device": "cpu"}
RECIPE = pb.Recipe.parse(
    {
        "title": "Given",
        "method": "dnn",
        "data": {"batch_size": 12, "validation": 6},
        "peers": [{"name": "net", "network": "mlp", "posterior": {"kind": "mean_field"}}],
        "stages": [{"epochs": 1, "optimizer": {"lr": 1e-3}, "terms": {"likelihood": {}, "kl": {}}}],
        "evaluation": {"draws": 2},
    },
    "recipe",
)


class Mapped(Dataset):
    classes = ("ant", "bee", "cat")

    def __init__(self, images=IMAGES, labels=LABELS):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number], int(self.labels[number])


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def fitted(run, data, **more):
    return pb.fit({"net": pb.MeanField(net())}, data=data, recipe=RECIPE, run=run, device="cpu", **more)


def test_a_run_remembers_data_of_its_process_and_asks_for_them_later(tmp_path):
    data = Mapped()
    run = fitted(tmp_path / "run", data)
    assert len(run.data().validation) == 6
    assert run.about["class_names"] == ["ant", "bee", "cat"]
    said = run.about["data"]
    assert said["description"] == "'Mapped': 33 training, 6 validation, 9 test images"
    before = pb.evaluate(run, device="cpu")
    again = pb.evaluate(pb.load(tmp_path / "run", networks={"net": net()}), device="cpu")  # while somebody has it
    assert again["peers"] == before["peers"]
    del run, again
    gc.collect()
    later = pb.load(tmp_path / "run", networks={"net": net()})
    told = (
        r"was trained on data given from Python \('Mapped': 33 training, 6 validation, 9 test images\): give them again"
    )
    with pytest.raises(InputError, match=told):
        pb.evaluate(later, device="cpu")
    assert pb.evaluate(later, data=data, device="cpu")["peers"] == before["peers"]  # split as it was
    whole = pb.evaluate(later, data=(IMAGES[:30], LABELS[:30]), device="cpu")["peers"][0]
    assert sum(whole["reliability"]["count"]) == 30  # other data are judged as they are
    named = pb.evaluate(later, data=(IMAGES[:4], ["bee"] * 4), device="cpu")["peers"][0]
    assert sum(named["reliability"]["count"]) == 4


def test_a_run_goes_on_with_its_own_data_only(tmp_path):
    fitted(tmp_path / "run", Mapped())
    fitted(tmp_path / "run", Mapped(), resume=True)
    with pytest.raises(InputError, match=r"was trained on other data \('Mapped': 33 training.*\) than Mapped"):
        fitted(tmp_path / "run", Mapped(IMAGES, (LABELS + 1) % 3), resume=True)


def test_a_data_set_that_was_loaded_is_loaded_again(tmp_path, monkeypatch):
    np.savez(tmp_path / "d.npz", train_images=IMAGES, train_labels=LABELS)
    monkeypatch.chdir(tmp_path)
    run = fitted(tmp_path / "run", pb.data.load("d.npz", validation=0.25))
    assert "data" not in run.about
    monkeypatch.chdir("/")
    again = Run(tmp_path / "run", {"net": net()}).data()
    assert (len(again.train), len(again.validation), len(again.test)) == (29, 10, 9)


def test_all_verbs_take_objects_and_runs_bring_theirs(tmp_path):
    data = {"train": Mapped(), "test": Mapped(IMAGES[:9], LABELS[:9])}
    recipe = RECIPE.model_copy(update={"data": RECIPE.data.model_copy(update={"validation": 0})})
    run = pb.train(recipe, tmp_path / "trained", data=data, device="cpu")
    assert len(run.data().test) == 9
    told = "was trained on data given from Python ('Mapped': 48 training, 9 test images): give them again"
    run_elsewhere = process("evaluate", tmp_path / "trained")
    assert (run_elsewhere.returncode, told in run_elsewhere.stderr) == (2, True), run_elsewhere.stderr
    options = {"run": tmp_path / "student", **HOW}
    assert pb.distill([run], net(1), **options)(torch.rand(2, 1, 6, 6)).shape == (2, 3)
    assert pb.distill([run["net"]], net(1), data=data, **(options | {"run": tmp_path / "other"})) is not None
    small = pb.compress(
        run["net"], data=data, components=4, run=tmp_path / "small", device="cpu",
        overrides=["stages.*.epochs=1", "data.batch_size=12", "peers.0.posterior.top=0"],
    )  # fmt: skip
    assert small.counts()["components"] <= 4


def test_what_was_cut_is_said(tmp_path):
    class Noted(pb.Reporter):
        lines = []

        def headline(self, text):
            self.lines.append(text)

    fitted(tmp_path / "run", Mapped(), reporter=Noted())
    assert Noted.lines[1:] == ["Mapped: no test split: 9 of 48 images are held out, the same every time"]
