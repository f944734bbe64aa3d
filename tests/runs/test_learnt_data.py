"""A run knows what it has learnt: data that has changed since is refused, and so are other sources."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import peerbayes as pb
from commands import refused
from peerbayes.api.fitting import train
from peerbayes.errors import PeerbayesWarning
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.evaluating import evaluate
from peerbayes.runs.folder import MetricsLog
from peerbayes.runs.run import Run, run_of
from peerbayes.runs.session import Session

NAMES = ("ant", "bee", "cat")
SHORT = ["stages.*.epochs=2", "data.batch_size=16", "data.classes=3", "data.augment=[]", "data.validation=0"]


def picture(number, side=8):
    """A bright row whose place is the class."""
    pixels = np.random.default_rng(number).integers(0, 60, (side, side, 3))
    rows = side // 8 * 2
    pixels[number % 3 * rows : number % 3 * rows + rows] += 180
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 48), ("val", 12)):
        for number in range(count):
            place = tmp_path / "set" / part / NAMES[number % 3]
            place.mkdir(parents=True, exist_ok=True)
            picture(number if part == "train" else 1000 + 2 + number).save(place / f"{number:03}.png")
    return tmp_path / "set"


def learnt(data, run, *changes):
    return train(load_recipe("mutual/digits-dnn", [*SHORT, f"data.name={data}", *changes]), run, device="cpu")


def rename(folder):
    for part in ("train", "val"):
        os.rename(folder / part / "ant", folder / part / "dog")  # ant, bee, cat become bee, cat, dog


def test_a_run_says_which_classes_it_has_learnt(folder, tmp_path):
    assert learnt(folder, tmp_path / "run").about["class_names"] == list(NAMES)


def test_classes_that_were_renumbered_are_refused_by_everyone(folder, tmp_path, capsys):
    run = learnt(folder, tmp_path / "run")
    before = evaluate(run, device="cpu")["peers"][0]["accuracy"]
    rename(folder)
    told = f"{run.folder}: has learnt class 0 as 'ant', but in set it is 'bee'"
    for words in (["evaluate"], ["compress"], ["size", "--evaluate"], ["figure", "confidence"]):
        assert told in refused(capsys, *words, run.folder)
    assert f"teacher {told}" in refused(
        capsys, "distill", run.folder, "--into", "distillation/kd", "--run", tmp_path / "s"
    )
    assert not (tmp_path / "s").exists()
    rename_back(folder)
    assert evaluate(run, device="cpu")["peers"][0]["accuracy"] == before


def rename_back(folder):
    for part in ("train", "val"):
        os.rename(folder / part / "dog", folder / part / "ant")


def test_classes_named_by_numbers_are_those_of_a_table_where_both_have_one_order(tmp_path):
    def both(classes):
        """Return a folder and a table of the same images; their classes are named 0, 1, ..."""
        rows = ["path,label,split"]
        for number in range(4 * classes):
            part, name = ("train", "val")[number >= 3 * classes], str(number % classes)
            file = tmp_path / str(classes) / part / name / f"{number:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture(number).save(file)
            rows.append(f"{file},{name},{'train' if part == 'train' else 'test'}")
        table = tmp_path / f"{classes}.csv"
        table.write_text("\n".join(rows))
        return tmp_path / str(classes), table

    folder, table = both(11)
    of_folder = learnt(folder, tmp_path / "a", "data.classes=11")
    of_table = learnt(table, tmp_path / "b", "data.classes=11")
    assert of_folder.about["class_names"][:4] == ["0", "1", "10", "2"]  # as texts, as torchvision's ImageFolder does
    with pytest.raises(pb.InputError, match="has learnt class 2 as '10', but in 11 it is '2'"):
        evaluate(of_folder, data=table, device="cpu")
    with pytest.raises(pb.InputError, match="has learnt class 2 as '2', but in 11 it is '10'"):
        evaluate(of_table, data=folder, device="cpu")
    folder, table = both(10)
    run = learnt(folder, tmp_path / "c", "data.classes=10")
    one, other = (evaluate(run, device="cpu", **given)["peers"][0] for given in ({}, {"data": table}))
    assert one["accuracy"] == other["accuracy"]


def test_images_of_another_size_are_refused_but_may_be_asked_for(folder, tmp_path, capsys):
    run = learnt(folder, tmp_path / "run")
    picture(3, 16).save(folder / "train" / "ant" / "000.png")
    for file in (folder / "train" / "ant").iterdir():
        picture(3, 16).save(file)
    told = f"{run.folder}: takes inputs of shape (3, 8, 8), but set has (3, 16, 16)"
    for verb in ("evaluate", "compress"):
        assert told in refused(capsys, verb, run.folder)
    other = learnt(folder, tmp_path / "larger", "data.size=16", f"peers.0.start_from={run.folder}")
    assert other.about["inputs"]["shape"] == [3, 16, 16]


def test_a_run_goes_on_with_the_data_that_it_has_begun_with_only(folder, tmp_path, monkeypatch):
    recipe = load_recipe("mutual/digits-dnn", [*SHORT, f"data.name={folder}"])
    monkeypatch.setattr(Session, "finish", lambda _: None)
    train(recipe, tmp_path / "run", device="cpu", checkpoint_every=2)
    monkeypatch.undo()
    rename(folder)
    with pytest.raises(pb.InputError, match="has learnt class 0 as 'ant', but in set it is 'bee'"):
        train(recipe, tmp_path / "run", device="cpu", resume=True)
    rename_back(folder)
    assert train(recipe, tmp_path / "run", device="cpu", resume=True).finished


def test_runs_that_never_said_their_classes_are_judged_as_before(folder, tmp_path):
    run = learnt(folder, tmp_path / "run")
    about = {key: value for key, value in run.about.items() if key not in ("class_names", "origins")}
    (run.folder / "run.json").write_text(json.dumps(about))
    rename(folder)
    assert "accuracy" in evaluate(Run(run.folder), device="cpu")["peers"][0]


def test_another_name_of_the_data_may_have_other_classes_to_start_from(folder, tmp_path):
    run = learnt(folder, tmp_path / "run")
    rename(folder)
    os.rename(folder, tmp_path / "other")
    assert learnt(tmp_path / "other", tmp_path / "next", f"peers.0.start_from={run.folder}").finished


# ---- sources that came from Python ----------------------------------------------------------------------------------


CODEBOOK = [*SHORT[:2], "peers.0.posterior.outliers=false"]
HOW = {"recipe": "distillation/kd", "overrides": SHORT[:2], "resume": True}


def small(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))


def arrays():
    images = torch.stack([torch.from_numpy(np.array(picture(n))).permute(2, 0, 1) for n in range(48)])
    return pb.data.from_arrays(train=(images, torch.arange(48) % 3), test=(images[:9], torch.arange(9) % 3))


def test_a_distillation_goes_on_with_its_own_teachers_only(tmp_path):
    one, other = pb.Point(small(1)), pb.Point(small(2))
    how = {"data": arrays(), "recipe": "distillation/kd", "overrides": SHORT[:2], "run": tmp_path / "run"}
    first = pb.distill([one], small(0), **how)
    with pytest.raises(pb.InputError, match="holds a run whose peers learn from other teachers; choose another folder"):
        pb.distill([other], small(0), resume=True, **how)
    with pytest.raises(pb.InputError, match="other teachers"):
        pb.distill([one, other], small(0), resume=True, **how)
    again = pb.distill([pb.Point(small(1))], small(5), resume=True, **how)  # the same ones, made again
    assert torch.equal(again[1].weight, first[1].weight)


def test_a_codebook_is_that_of_the_posterior_that_was_given(tmp_path):
    one, other = (pb.MeanField(small(seed)) for seed in (1, 2))
    how = {"data": arrays(), "components": 8, "overrides": [*SHORT[:2], "peers.0.posterior.top=0"]}
    found = pb.compress(one, run=tmp_path / "run", **how)
    with pytest.raises(pb.InputError, match="holds a run in which peer 'net' started from other weights"):
        pb.compress(other, run=tmp_path / "run", resume=True, **how)
    again = pb.compress(pb.MeanField(small(1)), run=tmp_path / "run", resume=True, **how)
    assert torch.equal(again.mean, found.mean)


def test_a_peer_goes_on_from_where_it_started_only(tmp_path):
    how = {"data": arrays(), "recipe": "mutual/digits-dnn", "overrides": SHORT[:2], "run": tmp_path / "run"}
    how["normalize"] = None
    pb.fit({"a": pb.Point(small(0), start_from=small(1))}, **how)
    with pytest.raises(pb.InputError, match="in which peer 'a' started from other weights; choose another folder"):
        pb.fit({"a": pb.Point(small(0), start_from=small(2))}, resume=True, **how)
    pb.fit({"a": pb.Point(small(7), start_from=small(1))}, resume=True, **how)
    pb.fit({"a": pb.Point(small(7))}, resume=True, **how)  # random weights are never the same


def test_a_run_that_is_finished_gives_its_peers_what_they_have_learnt(tmp_path):
    how = {"data": arrays(), "recipe": "mutual/digits-dnn", "overrides": SHORT[:2], "resume": True}
    before = None
    for _ in range(2):  # a script that is run twice
        first = pb.MeanField(small(3), prior="anchored")
        pb.fit({"p": first}, run=tmp_path / "a", **how)
        second = pb.Point(small(4), start_from=first)
        pb.fit({"q": second}, run=tmp_path / "b", **how)
        assert first.provenance.depth == 0
        assert second.provenance.depth == 1
        pb.compress(first, data=arrays(), components=8, run=tmp_path / "c", resume=True, overrides=CODEBOOK)
        pb.distill([first], small(0), data=arrays(), run=tmp_path / "d", **HOW)
        found = [posterior.state() for posterior in (first, second)]
        for one, other in zip(found, before or found, strict=True):
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items() if "anchor" not in name)
        before = found
    run = pb.load(tmp_path / "a", networks={"p": small(0)})
    pb.distill(run, small(0), data=arrays(), run=tmp_path / "d", **HOW)
    pb.compress(run["p"], data=arrays(), components=8, run=tmp_path / "c", resume=True, overrides=CODEBOOK)


def test_what_was_interrupted_goes_on_with_the_posterior_that_has_learnt_a_part(tmp_path, monkeypatch):
    how = {"data": arrays(), "recipe": "mutual/digits-dnn", "overrides": SHORT[:2], "run": tmp_path / "run"}
    how["normalize"] = None
    given = pb.Point(small(0), start_from=small(1))

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pb.fit({"a": given}, checkpoint_every=2, **how)
    monkeypatch.undo()
    assert pb.fit({"a": given}, resume=True, **how).finished


def test_runs_that_go_on_are_of_the_same_runs(tmp_path):
    how = {"data": arrays(), "recipe": "mutual/digits-dnn", "overrides": SHORT[:2]}
    runs = [pb.fit({"a": pb.Point(small(n))}, run=tmp_path / str(n), **how) for n in range(2)]
    pb.fit({"a": runs[0]["a"]}, run=tmp_path / "next", **how)
    again = [pb.load(run.folder, networks={"a": small(0)}) for run in runs]
    pb.fit({"a": again[0]["a"]}, run=tmp_path / "next", resume=True, **how)
    with pytest.raises(pb.InputError, match="peer 'a' started from other weights"):
        pb.fit({"a": again[1]["a"]}, run=tmp_path / "next", resume=True, **how)
    pb.fit({"a": pb.Point(small(0))}, run=tmp_path / "next", resume=True, **how)
    with pytest.raises(pb.InputError, match="peer 'a' started from other weights"):
        pb.fit({"a": again[1]["a"]}, run=tmp_path / "next", resume=True, **how)


@pytest.mark.parametrize("strange", [{"epoch": 3}, {"row": torch.arange(20.0).view(4, 5)[:, 0][:1]}])
def test_strange_sources_are_told_as_ever(strange):
    with pytest.raises(pb.InputError, match=f"has a tensor '{next(iter(strange))}' that this network has not"):
        pb.Point(small(0), start_from={**small(0).state_dict(), **strange})
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 1))
    row = torch.arange(20.0).view(4, 5)[:, 0][:1]
    found = pb.Point(net, start_from={**net.state_dict(), "1.bias": row})
    again = pb.Point(net, start_from={**net.state_dict(), "1.bias": row.clone()})
    assert found.provenance.parent == again.provenance.parent != ""


def test_renamed_classes_are_refused_from_python_too(folder, tmp_path):
    run = learnt(folder, tmp_path / "run")
    changes = [*SHORT[:2], "data.validation=0"]
    peer = {"m": pb.MeanField(small(0))}
    own = pb.fit(peer, data=folder, recipe="mutual/digits-dnn", overrides=changes, run=tmp_path / "own")
    rename(folder)
    told = "has learnt class 0 as 'ant', but in set it is 'bee'"
    for teacher in (run, str(run.folder), run[next(iter(run))], own, own["m"], peer["m"]):
        place = own.folder if teacher in (own, own["m"], peer["m"]) else run.folder
        with pytest.raises(pb.InputError, match=f"teacher {place}: {told}"):
            pb.distill(teacher, small(0), recipe="distillation/kd", run=tmp_path / "s")
    for source in (own, own["m"], peer["m"]):
        with pytest.raises(pb.InputError, match=f"{own.folder}: {told}"):
            pb.compress(source, components=8, overrides=CODEBOOK, run=tmp_path / "s")
    with pytest.raises(pb.InputError, match=f"teacher {own.folder}: {told}"):
        pb.fit(
            {"s": pb.Point(small(0))},
            data=folder,
            recipe="distillation/kd",
            teachers=[peer["m"]],
            overrides=[*changes, "stages.0.warmup=0"],
            run=tmp_path / "s",
        )
    assert not (tmp_path / "s").exists()
    with pytest.raises(pb.InputError, match=r"takes inputs of shape \(3, 8, 8\), but .* has \(1, 8, 8\)"):
        pb.evaluate(own, data=replace(arrays(), shape=(1, 8, 8)))


def test_posteriors_go_by_their_run_only_as_long_as_it_is_theirs(tmp_path):
    how = {"recipe": "mutual/digits-dnn", "overrides": (one for one in SHORT[:2])}
    peer = pb.MeanField(small(0))
    run = pb.fit({"m": peer}, data=arrays(), run=tmp_path / "run", **how)
    assert len(run.metrics) == 2  # changes may come from anywhere, once
    assert run_of(peer).folder == run_of(run["m"]).folder == run.folder
    (run.folder / "run.json").touch()
    assert run_of(peer) is run_of(run["m"]) is None
    (run.folder / "run.json").unlink()
    assert run_of(peer) is None
    with pytest.raises(pb.InputError, match="`data` is required: the posterior was not loaded from a run"):
        pb.compress(peer, components=8, overrides=CODEBOOK, run=tmp_path / "s")


def test_nobody_teaches_is_a_sentence():
    with pytest.raises(pb.InputError, match="a teacher is a NoneType, expected a posterior, a run or its folder"):
        pb.distill(None, small(0))


def test_what_left_no_checkpoint_is_not_gone_on_with_from_the_middle(tmp_path, monkeypatch):
    how = {"data": arrays(), "recipe": "mutual/digits-dnn", "overrides": SHORT[:2], "run": tmp_path / "run"}
    whole = pb.fit({"a": pb.Point(small(0))}, **how | {"run": tmp_path / "whole"})
    given, ended = pb.Point(small(0)), MetricsLog.write

    def stop(log, line):
        raise KeyboardInterrupt

    monkeypatch.setattr(MetricsLog, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        pb.fit({"a": given}, **how)
    monkeypatch.setattr(MetricsLog, "write", ended)
    with pytest.raises(pb.InputError, match="cannot resume: the run was interrupted before its first checkpoint"):
        pb.fit({"a": given}, resume=True, **how)
    again = pb.fit({"a": pb.Point(small(0))}, resume=True, **how)
    assert torch.equal(again["a"].mean, whole["a"].mean)
    assert pb.fit({"a": given}, **how | {"run": tmp_path / "next"}).finished  # which is another run


def test_loaded_posteriors_are_not_changed_by_looking(tmp_path):
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 3))
    how = {"data": arrays(), "recipe": "mutual/digits-dnn", "overrides": SHORT[:2], "run": tmp_path / "run"}
    found = pb.fit({"a": pb.Point(net)}, **how)["a"]
    before = found.digest()
    with torch.no_grad():
        found(torch.zeros(8, 3, 8, 8))
    assert found.digest() == before


class Views(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 3)
        self.pool = torch.nn.MaxPool2d(2)
        self.linear = torch.nn.Linear(54, 3)

    def forward(self, x):
        return self.linear(self.pool(torch.relu(self.conv(x))).view(len(x), -1))


@pytest.mark.parametrize("kind", [pb.Point, pb.MeanField, lambda net: pb.RankOne(net, 2)])
def test_networks_may_call_view_on_what_convolutions_give(tmp_path, kind):
    torch.manual_seed(0)
    net = Views()
    posterior, images = kind(net), torch.rand(900, 3, 8, 8)
    for count, draws in ((900, 3), (4, 1), (4, 3)):
        found = kind(net).predict(images[:count], draws)
        single = [found.replay(n) if found.draws.max() > n else None for n in range(int(found.draws.max()))]
        plain = torch.stack([posterior.materialise(one)(images[:count]).softmax(-1) for one in single]).mean(0)
        torch.testing.assert_close(found.probabilities, plain, rtol=0, atol=1e-5)
    run = pb.fit({"a": posterior}, data=arrays(), recipe="mutual/digits-dnn", overrides=SHORT[:2], run=tmp_path / "run")
    assert run.finished
    torch.testing.assert_close(posterior.eval()(images[:5]), posterior.materialise()(images[:5]))


def test_what_is_no_teacher_is_told(tmp_path):
    how = {"data": arrays(), "recipe": "distillation/kd", "overrides": SHORT[:2], "run": tmp_path / "run"}
    for given in ([small(1)], ["folder"]):
        with pytest.raises(pb.InputError, match=r"a teacher is a .*, expected a posterior; wrap a network in Point"):
            pb.fit({"a": pb.Point(small(0))}, teachers=given, **how)
    assert pb.fit({"a": pb.Point(small(0))}, teachers=pb.Point(small(1)), **how).finished


def test_names_of_others_are_not_taken():
    images, labels = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    with pytest.raises(pb.InputError, match="name 'digits' is that of a known data set; choose another one for these"):
        pb.data.from_arrays(train=(images, labels), name="digits")

    def likelihood(step, peer, *, weight=1.0):
        return step.logits(peer).mean() * weight

    with pytest.raises(pb.InputError, match="term 'likelihood' exists already, and recipes use it"):
        pb.term(likelihood)


def test_a_run_of_ones_own_network_is_compressed_on_the_data_as_it_has_learnt_it(folder, tmp_path):
    changes = [*SHORT[:2], "data.size=4", "data.validation=0.25"]
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    run = pb.fit(
        {"m": pb.MeanField(net)}, data=folder, recipe="mutual/digits-dnn", overrides=changes, run=tmp_path / "r"
    )
    pb.compress(run, components=8, overrides=["stages.0.epochs=1", "peers.0.posterior.outliers=false"])
    found = load_recipe(tmp_path / "r-shared" / "recipe.toml").data
    assert (found.size, found.validation, found.batch_size) == (4, 0.25, 16)


def test_texts_are_judged_and_distilled_by_the_words_that_were_learnt(tmp_path):
    place = tmp_path / "txt"
    place.mkdir()
    words = {1: "goal match team coach score", 2: "stock bank price trade fund"}
    chance = np.random.default_rng(0)
    for part, count in (("train", 60), ("test", 20)):
        rows = (f"{1 + n % 2},{' '.join(chance.choice(words[1 + n % 2].split(), 4))}" for n in range(count))
        (place / f"{part}.csv").write_text("\n".join(rows))
    data = pb.data.load(place, validation=20)

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.EmbeddingBag(400, 8), torch.nn.Linear(8, 2))

    changes = ["stages.*.epochs=20", "data.batch_size=8", "data.validation=20", "data.augment=[]"]
    changes.append('stages.*.optimizer={name="adam",lr=0.05}')
    run = pb.fit(
        {"m": pb.MeanField(net())}, data=place, recipe="mutual/digits-dnn", overrides=changes, run=tmp_path / "r"
    )
    assert pb.evaluate(run)["peers"][0]["accuracy"] > 0.9
    (place / "train.csv").write_text("1,zebra zebra\n2,yak yak\n" + (place / "train.csv").read_text())
    other = pb.data.load(place)
    assert other.vocabulary != data.vocabulary
    with pytest.raises(pb.InputError, match="has other numbers for words than those made of the training split"):
        pb.evaluate(run, data=other)
    short = ["stages.*.epochs=20", "data.batch_size=8", "data.augment=[]", 'stages.*.optimizer={name="adam",lr=0.05}']
    student = pb.distill([run], net(), data=place, recipe="distillation/kd", overrides=short, run=tmp_path / "s")
    test = run.data().test
    assert (student(test.images).argmax(-1) == test.labels).float().mean() > 0.9
    with pytest.warns(PeerbayesWarning, match="16 of 3,218 weights share a codebook"):
        small_one = pb.compress(run, components=4, overrides=["stages.0.epochs=1", "peers.0.posterior.outliers=false"])
    assert (small_one.predict(test.images, 5).classes == test.labels).float().mean() > 0.9
