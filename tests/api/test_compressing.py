"""From a trained network to shared weights, on the command line and as recipes."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import peerbayes as pb
from commands import refused
from learners import same
from peerbayes import cli
from peerbayes.api.compressing import compression
from peerbayes.api.fitting import train
from peerbayes.codebook import outliers
from peerbayes.codebook.build import Sharing, gradient_statistic, share, shared_weights
from peerbayes.codebook.peer import blank_shared
from peerbayes.codebook.shared import Shared
from peerbayes.posteriors import MeanField, storage
from peerbayes.recipes.recipe import load_recipe, packaged
from peerbayes.recipes.recipe_data import load_data
from peerbayes.runs.building import build_peer
from peerbayes.training.learner import Learner

QUIET = ("--quiet", "--device", "cpu")


def run_command(words):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0


@pytest.fixture(scope="module")
def field(tmp_path_factory):
    folder = tmp_path_factory.mktemp("field")
    changes = ["peers.0.start_from=DNN", "stages.0.epochs=1"]
    dnn = train(load_recipe("sharing/digits-resnet8-dnn", ["stages.0.epochs=4"]), folder / "dnn", device="cpu")
    changes[0] = f"peers.0.start_from={dnn.folder}"
    return train(load_recipe("sharing/digits-resnet8-stage1", changes), folder / "stage1", device="cpu")


def test_every_weight_has_one_class_and_keeps_its_distribution_nearly(field):
    posterior = field["net"]
    layout, mean, std = shared_weights(posterior)
    book, account = share(posterior, Sharing(top=0.0), None)
    classes = torch.zeros(layout.size, dtype=torch.int64)
    classes[book.blended] += 1
    classes[book.outlier] += 1
    assert classes.max() == 1
    assert account["outliers"] + account["blended"] + int((classes == 0).sum()) == layout.size == account["weights"]
    assert torch.equal(book.outlier_mean, mean[book.outlier])
    assert (mean[book.outlier].abs() > 0.2).float().mean() > 0.5
    shared = Shared(field.network("net"), book)
    inlier = torch.ones(layout.size, dtype=torch.bool)
    inlier[book.outlier] = False
    gap = (shared.mean - mean)[inlier].square() + (shared.std - std)[inlier].square()
    assert gap.mean().sqrt() < 0.02 * mean[inlier].std()  # the quantisation of (mean, scale), in W₂


@pytest.mark.parametrize("em_steps", [0, 20])
def test_without_outliers_and_blends_there_are_none(field, em_steps):
    options = Sharing(outliers=False, blend=False, components=100, em_steps=em_steps)
    book, account = share(field["net"], options, None)
    assert len(book.outlier) == len(book.blended) == account["outliers"] == account["blended"] == 0


@pytest.mark.parametrize("em_steps", [0, 20])
def test_no_component_has_fewer_weights_than_the_smallest(field, em_steps):
    posterior = copy.deepcopy(field["net"])
    with torch.no_grad():
        posterior.mean[:7] = 5.0  # a component by themselves, whatever the others are
    options = Sharing(blend=False, threshold=10.0, top=0.0, em_steps=em_steps, merge={"distance": 0.0})
    book, account = share(posterior, options, None)
    inlier = torch.ones(account["weights"], dtype=torch.bool).index_fill(0, book.outlier, False)
    count = book.label[inlier].bincount(minlength=len(book.component))
    assert int(count.min()) >= options.smallest
    assert account["outliers_of_small_components"] == len(book.outlier) >= 7
    assert torch.equal(book.outlier[:7], torch.arange(7))


def test_the_same_seed_gives_the_same_codebook(field):
    first, second = (share(field["net"], Sharing(top=0.0), None)[0] for _ in range(2))
    assert torch.equal(first.component, second.component)
    assert torch.equal(first.label, second.label)


def test_the_gradient_statistic_is_the_mean_size_of_the_gradient(field):
    posterior, split = field["net"], load_data(field.recipe).train
    posterior.eval()
    found = gradient_statistic(posterior, split, batch_size=len(split))
    images, labels = split.batch(torch.arange(len(split)), torch.device("cpu"))
    weights = posterior.draw(pb.Address(0, posterior.name, "gradient statistic", 0))
    loss = torch.nn.functional.cross_entropy(posterior(images, weights), labels)
    (gradient,) = torch.autograd.grad(loss, posterior.mean)
    views = posterior.layout.views(gradient.abs())
    layout, _, _ = shared_weights(posterior)
    expected = layout.flatten({name: views[name] for name in layout.shapes})
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6 * float(expected.max()))  # in another order


def test_compress_from_the_command_line_makes_a_smaller_file_that_predicts_the_same(field, tmp_path, capsys):
    words = ["compress", str(field.folder), "--run", str(tmp_path / "shared"), "--set", "stages.0.epochs=1", *QUIET]
    run_command(words)
    assert "shared" in capsys.readouterr().out
    run = pb.load(tmp_path / "shared")
    assert isinstance(run["net"], Shared)
    small, large = run.weights_file("net").stat().st_size, field.weights_file("net").stat().st_size
    assert small < 0.2 * large
    account = json.loads((tmp_path / "shared" / "sharing.json").read_text())["net"]
    assert account["components"] == len(run["net"].component)
    assert "components, weights that blend two of them, and outliers" in (tmp_path / "shared/report.html").read_text()
    data = load_data(field.recipe).test
    images, labels = data.batch(torch.arange(len(data)), torch.device("cpu"))
    before, after = ((p.predict(images, 20).classes == labels).float().mean() for p in (field["net"], run["net"]))
    assert after > before - 0.02
    again = pb.compress(field, run=tmp_path / "python", overrides=["stages.0.epochs=1"], device="cpu")
    assert same(again.state(), run["net"].state())
    found = refused(capsys, "compress", tmp_path / "shared", "--run", tmp_path / "twice", *QUIET)
    assert found.endswith("weights-net.safetensors: its weights share a codebook already; compress the run that it was "
                          "made of")  # fmt: skip


@pytest.mark.parametrize("kind", ["run", "posterior", "scaled posterior"])
def test_a_network_of_ones_own_is_compressed_from_python(tmp_path, kind):
    images = torch.rand(90, 6, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(90) % 3
    images[torch.arange(90), 2 * labels] += 1
    data = pb.data.from_arrays((images / 2, labels))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
    scaled = kind == "scaled posterior"
    peer = pb.MeanField(net, rho=-6.0) if scaled else pb.Point(net)
    quick = ["stages.0.epochs=30", "stages.0.optimizer={name='adam', lr=0.01}", "data.batch_size=24"]
    run = pb.fit({"a": peer}, data=data, recipe="sharing/digits-resnet8-dnn", run=tmp_path / "own", overrides=quick)
    few = ["stages.0.epochs=1", "peers.0.posterior.smallest=2", "data.batch_size=24"]
    how = {"components": 20, "data": data, "overrides": few}
    if kind != "run":
        how["run"] = tmp_path / "own-shared"
    small = pb.compress(run if kind == "run" else run["a"], **how)
    assert isinstance(small, Shared)
    assert len(small.component) <= 20
    assert (tmp_path / "own-shared-stage1").exists() == (not scaled)
    again = pb.load(tmp_path / "own-shared", networks={"net": net})["net"]
    assert same(again.state(), small.state())
    before, after = (p.predict(data.test.images, 20).classes for p in (peer, small))
    assert (before == data.test.labels).float().mean() > 0.9
    assert (before == after).float().mean() > 0.9


def test_a_posterior_over_some_layers_shares_the_weights_of_these(field, tmp_path):
    some = ["peers.0.posterior.bayesian=['stage3*']", f"peers.0.start_from={field.folder.parent / 'dnn'}"]
    recipe = load_recipe("sharing/digits-resnet8-stage1", [*some, "stages.0.epochs=1"])
    before = train(recipe, tmp_path / "some", device="cpu")["net"]
    small = pb.compress(tmp_path / "some", overrides=["stages.0.epochs=1"], device="cpu")
    assert list(small.layout.shapes) == [name for name in before.layout.shapes if ".conv" in name]
    again = pb.load(tmp_path / "some-shared")["net"]
    assert list(again.layout.shapes) == list(small.layout.shapes)
    assert same(again.state(), small.state())
    data = load_data(field.recipe).test
    first, second = (p.predict(data.images, 20).classes for p in (before, again))
    assert (first == second).float().mean() > 0.95


def test_what_can_not_be_compressed_is_one_sentence(field, tmp_path):
    own = pb.Point(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    with pytest.raises(pb.InputError, match="`data` is required: the posterior was not loaded from a run"):
        pb.compress(own, run=tmp_path / "x")
    with pytest.raises(pb.InputError, match="nothing-of-the-kind"):
        pb.compress(own, data="nothing-of-the-kind", run=tmp_path / "x")
    with pytest.raises(pb.InputError, match="components is 700, but there are only 634 weights to share, besides 6"):
        pb.compress(own, data="digits", run=tmp_path / "x", components=700)
    with pytest.raises(pb.InputError, match="recipe mutual/digits-dnn: expected one peer, whose weights are shared"):
        pb.compress(field.folder, run=tmp_path / "x", into="mutual/digits-dnn")
    with pytest.raises(pb.InputError, match="recipe sharing/shared: expected one peer with a mean_field posterior"):
        pb.compress(field.folder, run=tmp_path / "x", first="sharing/shared")
    with pytest.raises(pb.InputError, match="data is for a posterior"):
        pb.compress(field, data="digits", run=tmp_path / "x")
    with pytest.raises(pb.InputError, match="compress has no option 'component'; did you mean 'components'"):
        pb.compress(field, component=3)
    with pytest.raises(pb.InputError, match=r"peers\.0\.posterior\.components: .*, got -1"):
        pb.compress(field, components=-1)
    with pytest.raises(pb.InputError, match="source is a Flatten, expected a run, its folder, a weights file of a run"):
        pb.compress(torch.nn.Flatten(), data="digits", run=tmp_path / "x")
    shared = Shared(own.materialise())
    with pytest.raises(pb.InputError, match="weights share a codebook already; compress the one that it was made of"):
        pb.compress(shared, data="digits", run=tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [pb.Point, MeanField])
def test_what_does_not_fit_a_posterior_is_refused_before_anything_is_trained(tmp_path, kind):
    own = kind(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    generator = torch.Generator().manual_seed(0)
    wide, many = torch.rand(60, 9, 9, generator=generator), torch.rand(60, 8, 8, generator=generator)
    fitting = {"data": "digits", "overrides": ["stages.0.terms.kl.scheme=elbo"]}
    for changes, sentence in (
        ({"data": pb.data.from_arrays((wide, torch.arange(60) % 10))}, r"can't take arrays's inputs, of shape \(1, 9"),
        ({"data": pb.data.from_arrays((many, torch.arange(60) % 20))}, "arrays has 20 classes"),
        ({"overrides": ["stages.0.terms.feature_diversity={layers=['x']}"]}, "has no layer 'x'"),
    ):
        with pytest.raises(pb.InputError, match=sentence):
            pb.compress(own, run=tmp_path / "x", **fitting | changes)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_compressed_on_its_own_data_with_its_own_network(field, tmp_path):
    plain = load_recipe("sharing/shared")
    assert field.recipe.data != plain.data
    dnn = pb.load(field.folder.parent / "dnn")
    changes = ["peers.0.posterior.components=9"]
    job = compression(field.folder, "sharing/shared", "sharing/stage1", changes, None, 3)
    assert (job.recipe.data, job.recipe.peers[0].network) == (field.recipe.data, field.recipe.peers[0].network)
    assert job.recipe.peers[0].start_from == str(field.weights_file("net").resolve())
    assert (job.recipe.peers[0].posterior.components, job.seed) == (9, 3)
    assert job.folder == field.folder.with_name("stage1-shared")
    job = compression(dnn.folder, "sharing/shared", "sharing/stage1", changes, tmp_path / "x", 3)
    before = job.given.starts["net"]
    assert before.recipe.data == job.recipe.data == dnn.recipe.data
    assert before.folder == tmp_path / "x-stage1"
    assert before.recipe.peers[0].start_from == str(dnn.weights_file("net").resolve())
    assert job.recipe.peers[0].start_from == str((before.folder / "weights-net.safetensors").resolve())
    assert (before.seed, job.seed) == (3, 3)


def test_an_occupied_folder_is_refused_before_a_network_gets_its_scales(field, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("mine")
    with pytest.raises(pb.InputError, match="the folder is not empty and holds no run"):
        pb.compress(field.folder.parent / "dnn", run=tmp_path / "x", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_compress_of_a_point_trains_scales_first(field, tmp_path, capsys):
    dnn = field.folder.parent / "dnn"
    first = tmp_path / "first.toml"
    first.write_text('extends = "sharing/stage1"\nset = ["stages.0.epochs=1"]\n')
    words = ["--first", str(first), "--set", "stages.0.epochs=1", *QUIET]
    run_command(["compress", str(dnn), "--run", str(tmp_path / "shared"), *words])
    capsys.readouterr()
    assert isinstance(pb.load(tmp_path / "shared-stage1")["net"], MeanField)
    assert isinstance(pb.load(tmp_path / "shared")["net"], Shared)


@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")
def test_two_processes_compress_one_run_together(field, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "peerbayes"]
    (tmp_path / "first.toml").write_text('extends = "sharing/stage1"\nset = ["stages.0.epochs=1"]\n')
    words = ["compress", str(field.folder.parent / "dnn"), "--first", str(tmp_path / "first.toml"), *QUIET, "--json"]
    words += ["--run", str(tmp_path / "small"), "--set", "stages.0.epochs=1", "--set", "evaluation.draws=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *torchrun, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "shared"
    for name in ("small-stage1", "small"):
        about = json.loads((tmp_path / name / "run.json").read_text())
        assert (about["processes"], about["finished"]) == (2, True)


MERGED = ["merge_every_epoch=true", "merge.distance=1e-5", "merge.lr=1e-9", "components=300", "top=0.0"]
MERGING = [*(f"peers.0.posterior.{one}" for one in MERGED), "stages.0.optimizer.lr=3e-3"]


@pytest.mark.parametrize("more", [[], [*MERGING, "evaluation.keep=best"]])
def test_a_shared_run_resumes_to_the_same_weights(field, tmp_path, more):
    changes = [f"peers.0.start_from={field.folder}", "stages.0.epochs=2", *more]
    recipe = load_recipe("sharing/digits-resnet8-shared", changes)
    whole = train(recipe, tmp_path / "whole", device="cpu")

    class Stop(Exception):
        pass

    class Reporter(pb.Reporter):
        def epoch(self, line):
            if line["epoch"] == 2:
                raise Stop

    with pytest.raises(Stop):
        train(recipe, tmp_path / "cut", device="cpu", reporter=Reporter(), checkpoint_every=5)
    again = train(recipe, tmp_path / "cut", device="cpu", resume=True)
    assert whole.weights_file("net").read_bytes() == again.weights_file("net").read_bytes()


def test_components_that_come_near_each_other_are_merged_after_every_epoch(field, tmp_path):
    changes = [f"peers.0.start_from={field.folder}", "stages.0.epochs=3", *MERGING]
    run = train(load_recipe("sharing/digits-resnet8-shared", changes), tmp_path / "run", device="cpu")
    lines = [json.loads(line)["peers"]["net"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    logs = [line["merging"] for line in lines]
    at_first = json.loads((run.folder / "sharing.json").read_text())["net"]["components"]
    assert [log["before"] for log in logs] == [at_first, *(log["after"] for log in logs[:-1])]
    assert logs[0]["merged"] > 0
    assert len(run["net"].component) == logs[-1]["after"] < at_first
    assert lines[-1]["valid_accuracy"] > 0.8  # of what was merged


def test_what_is_left_in_memory_is_what_the_file_holds_without_anchors(field, tmp_path):
    book, _ = share(field["net"], Sharing(top=0.0), None)
    shared = Shared(field.network("net"), book, start_from=field["net"], bits=8)
    before = shared.outlier_mean.detach().clone()
    changes = ["stages.0.epochs=1", "stages.0.optimizer.lr=1e-7", "stages.0.optimizer.scale_lr=1e-5"]
    run = pb.fit({"net": shared}, data="digits", recipe="sharing/shared", run=tmp_path / "run", overrides=changes)
    found = run["net"].state()
    assert all(torch.equal(t, found[name]) for name, t in shared.state().items() if "anchor" not in name)
    assert not torch.equal(shared.outlier_mean, before)  # rounded
    for done in (run, field):
        assert not any(name.startswith("anchor/") for name in storage.read(done.weights_file("net"))[0])
    assert torch.equal(field["net"].anchor, field["net"].mean)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("peers.0.posterior.bits=20", "peers.0.posterior.bits"),
        ("peers.0.posterior.components=1000000", "components is 1000000, but there are only"),
        ("peers.0.posterior.merge.rule=mean", "peers.0.posterior.merge.rule"),
        ("peers.0.posterior.sampling=some", "peers.0.posterior.sampling"),
        ("peers.0.posterior={kind='shared', mixture=true, blend=false}", "mixture is how blended weights are drawn"),
        ("peers.0.posterior={kind='shared', merge_every_epoch=true, merge={distance=0}}", "merges by merge.distance"),
        ("peers.0.posterior.thrift=inf", "peers.0.posterior.thrift"),
        ("peers.0.posterior.thrift=1e-30", "thrift is too small"),
        ("peers.0.posterior.smallest=1000", "ask for fewer than 256, or lower smallest"),
        ("peers.0.posterior.smallest=1000000", "smallest is 1000000, but there are only"),
        ("peers.0.posterior.top=0.9999", "smallest is 20, but there are only 2 weights to share"),
        ("peers.0.posterior.threshold=1e-12", "all weights are outliers by their means or gradients; raise threshold"),
    ],
)
def test_bad_settings_are_one_sentence_and_nothing_is_written(field, tmp_path, capsys, change, sentence):
    with pytest.raises(SystemExit) as error:
        cli.main(["compress", str(field.folder), "--run", str(tmp_path / "x"), "--set", change, *QUIET])
    assert error.value.code == 2
    found = capsys.readouterr().err
    assert sentence in found
    assert len(found.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("key", ["components", "smallest"])
def test_what_no_codebook_can_have_is_refused_before_a_network_gets_its_scales(field, tmp_path, capsys, key):
    words = ["compress", field.folder.parent / "dnn", "--run", tmp_path / "x", *QUIET]
    size = shared_weights(field["net"])[0].size
    inside = size - int(outliers(torch.zeros(size), gradient=torch.rand(size)).sum())
    assert inside < size
    found = refused(capsys, *words, "--set", f"peers.0.posterior.{key}={inside + 1}")
    outside = f"there are only {inside} weights to share, besides {size - inside} outliers by their gradients"
    assert found == f"peer 'net': posterior.{key} is {inside + 1}, but {outside}"
    assert list(tmp_path.iterdir()) == []


def test_all_weights_may_have_a_component_each_but_no_more(field):
    options, network = load_recipe("sharing/shared").peers[0].posterior.model_dump(), field.network("net")
    size = shared_weights(field["net"])[0].size
    for changes, most in (({"top": 0.0}, size), ({"outliers": False}, size), ({"top": 0.25}, size - size // 4)):
        blank_shared(network, options | {"components": most, **changes}, 0, "net")
        with pytest.raises(pb.InputError, match=f"components is {most + 1}, but there are only {most} weights"):
            blank_shared(network, options | {"components": most + 1, **changes}, 0, "net")


def test_compress_writes_checkpoints_as_often_as_it_is_told(field, tmp_path, capsys, monkeypatch):
    steps, checkpoint = [], Learner.checkpoint

    def noted(self):
        steps.append(self.position.step)
        checkpoint(self)

    monkeypatch.setattr(Learner, "checkpoint", noted)
    words = ["compress", str(field.folder), "--run", str(tmp_path / "x"), "--set", "stages.0.epochs=1", *QUIET]
    run_command([*words, "--checkpoint-every", "7"])
    capsys.readouterr()
    recipe = pb.load(tmp_path / "x").recipe
    last = len(load_data(recipe).train) // recipe.data.batch_size
    assert steps == [*range(7, last, 7), last]


def test_gates_of_merging_see_gradients_where_there_are_no_outliers_too(field, tmp_path):
    changes = [f"peers.0.start_from={field.folder}", "stages.0.epochs=1", "peers.0.posterior.outliers=false"]
    gates = ["peers.0.posterior.merge.gradient_gate=1e-30", "peers.0.posterior.merge.distance=1e-4"]
    recipe = load_recipe("sharing/digits-resnet8-shared", [*changes, *gates])
    run = train(recipe, tmp_path / "x", device="cpu")
    log = json.loads((run.folder / "sharing.json").read_text())["net"]["merging"]
    assert log["merged"] == 0
    assert log["gradient_alone"] == log["near"] > 0


def test_a_row_of_the_paper_is_that_of_one_recipe():
    claims = [load_recipe(name).reproduces for name in packaged() if name.startswith("sharing/")]
    rows = [claim for claim in claims if claim.startswith("paper 4")]
    assert len(rows) == len(set(rows)) > 20


def test_images_are_augmented_as_in_the_paper():
    found = {name: load_recipe(name).data for name in packaged() if name.startswith("sharing/")}
    kinds = {(data.name, *data.augment) for data in found.values() if data.name in ("cifar10", "cifar100", "imagenet")}
    assert kinds == {
        ("cifar10", "crop", "flip"),
        ("cifar100", "reflect_crop", "flip"),
        ("imagenet", "resized_crop", "flip", "color_jitter"),  # Table 11
    }


def test_a_vit_gets_its_scales_from_a_file_in_timms_names(tmp_path):
    timm, files = pytest.importorskip("timm"), pytest.importorskip("safetensors.torch")
    torch.manual_seed(1)
    state = timm.create_model("test_vit", img_size=32).state_dict()
    files.save_file(state, tmp_path / "vit.safetensors")
    changes = [f"peers.0.start_from={tmp_path / 'vit.safetensors'}", "peers.0.network=timm/test_vit", "data.size=32"]
    recipe = load_recipe("sharing/imagenet-vit-stage1", changes)
    images = torch.rand(8, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    data = replace(pb.data.from_arrays((images, torch.arange(8) % 2)), classes=1000)
    peer = build_peer(recipe.peers[0], data, 0, torch.device("cpu"), start=tmp_path / "vit.safetensors")
    assert isinstance(peer, MeanField)
    found = peer.materialise().network.state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert torch.equal(peer.anchor, peer.mean)
    assert shared_weights(peer)[0].size == sum(
        t.numel() for n, t in state.items() if n.endswith("weight") and t.dim() > 1
    )


def test_a_point_can_not_be_shared_directly(field, tmp_path):
    recipe = load_recipe("sharing/digits-resnet8-shared", [f"peers.0.start_from={field.folder.parent / 'dnn'}"])
    with pytest.raises(pb.InputError, match="whose weights have scales, got a point one"):
        train(recipe, tmp_path / "x", device="cpu")


def test_collapsed_scales_are_refused_by_file_and_peer(field, tmp_path):
    posterior = pb.load(field.folder)["net"]
    with torch.no_grad():
        posterior.rho.fill_(-200)
    with pytest.raises(pb.InputError, match="collapsed to 0"):
        share(posterior, Sharing(), None)
    posterior.save(tmp_path / "flat.safetensors")
    recipe = load_recipe("sharing/shared", [f"peers.0.start_from={tmp_path / 'flat.safetensors'}"])
    with pytest.raises(pb.InputError, match=r"peer 'net': .*flat\.safetensors: scales of the posterior have collapsed"):
        train(recipe, tmp_path / "x", device="cpu")
    assert not (tmp_path / "x").exists()


def test_codebooks_of_networks_of_several_seeds_are_one_row(tmp_path, capsys):
    for seed in (0, 1):
        dnn = tmp_path / f"dnn-seed{seed}"
        train(load_recipe("sharing/digits-resnet8-dnn", ["stages.0.epochs=1"]), dnn, seed=seed, device="cpu")
        short = ("--set", "stages.0.epochs=1", "--seed", str(seed), *QUIET)
        run_command(["compress", str(dnn), "--run", str(tmp_path / "shared" / f"seed{seed}"), *short])
    capsys.readouterr()
    run_command(["evaluate", str(tmp_path / "shared"), "--draws", "2", "--device", "cpu"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if " net " in line]
    assert "±" in row


def test_a_network_of_ones_own_is_two_trainings_behind_its_codebook(tmp_path):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
    short = {"data": "digits", "overrides": ["stages.0.epochs=1"]}
    run = pb.fit({"net": pb.Point(network)}, recipe="sharing/digits-resnet8-dnn", run=tmp_path / "own", **short)
    pb.compress(run["net"], components=20, run=tmp_path / "small", **short)
    folders = [tmp_path / name / "run.json" for name in ("own", "small-stage1", "small")]
    assert [json.loads(path.read_text())["generation"] for path in folders] == [0, 1, 2]


# ---- what lies there already ----------------------------------------------------------------------------------------

FIRST = 'extends = "sharing/stage1"\nset = ["stages.0.epochs=1"]\n'


@pytest.fixture
def compressed(tmp_path, monkeypatch):
    """A network that was trained, and its codebook, by the command, with scales in a run between."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.toml").write_text(FIRST)
    network(0)
    run_command([*COMPRESS, *QUIET])
    return tmp_path


COMPRESS = ["compress", "runs/net", "--first", "first.toml", "--set", "stages.0.epochs=1"]


def network(seed):
    shutil.rmtree("runs/net", ignore_errors=True)
    train(load_recipe("sharing/digits-resnet8-dnn", ["stages.0.epochs=1"]), "runs/net", seed=seed, device="cpu")


def test_scales_of_another_network_are_not_taken_for_those_of_this_one(compressed, capsys):
    shutil.rmtree("runs/net-shared")
    run_command([*COMPRESS, *QUIET])  # the scales are there, and are its own
    shutil.rmtree("runs/net-shared")
    network(1)
    capsys.readouterr()
    told = "runs/net-shared-stage1: holds a run in which peer 'net' started from other weights; choose another folder"
    assert refused(capsys, *COMPRESS, *QUIET) == told
    with pytest.raises(pb.InputError, match=told):
        pb.compress("runs/net", first="first.toml", overrides="stages.0.epochs=1", device="cpu")
    assert not os.path.exists("runs/net-shared")


def test_a_codebook_does_not_go_on_with_another_networks(compressed, capsys):
    about = json.loads((compressed / "runs/net-shared/run.json").read_text())
    (compressed / "runs/net-shared/run.json").write_text(json.dumps(about | {"finished": False}))
    account = (compressed / "runs/net-shared/sharing.json").read_text()
    network(1)
    shutil.rmtree("runs/net-shared-stage1")
    found = refused(capsys, *COMPRESS, *QUIET, "--resume")
    assert found.startswith("runs/net-shared: holds a run in which peer 'net' started from other weights")
    assert json.loads((compressed / "runs/net-shared/run.json").read_text())["origins"] == about["origins"]
    assert (compressed / "runs/net-shared/sharing.json").read_text() == account


def test_a_finished_codebook_of_another_network_is_not_handed_back(compressed, capsys):
    network(1)
    capsys.readouterr()
    told = "runs/net-shared-stage1: holds a run in which peer 'net' started from other weights; choose another folder"
    assert refused(capsys, *COMPRESS, *QUIET, "--resume") == told
    shutil.rmtree("runs/net-shared-stage1")
    scaled = load_recipe("sharing/stage1", ["stages.0.epochs=1", "peers.0.start_from=runs/net", "data.name=digits"])
    train(scaled, "runs/net-shared-stage1", device="cpu")
    found = refused(capsys, "compress", "runs/net-shared-stage1", "--run", "runs/net-shared", *COMPRESS[-2:], *QUIET,
                    "--resume")  # fmt: skip
    assert "runs/net-shared: holds a " in found


def test_a_finished_codebook_wants_no_scales_again(compressed):
    shutil.rmtree("runs/net-shared-stage1")
    run_command([*COMPRESS, *QUIET, "--resume"])
    pb.compress("runs/net", first="first.toml", overrides="stages.0.epochs=1", device="cpu", resume=True)
    assert sorted(os.listdir("runs")) == ["net", "net-shared"]


def test_a_run_is_compressed_from_within_its_folder(compressed, monkeypatch):
    before = (compressed / "runs/net-shared/weights-net.safetensors").read_bytes()
    shutil.rmtree("runs/net-shared")
    (compressed / "runs/net/inside").mkdir()
    for place, source in (("net", "."), ("net", "weights-net.safetensors"), ("net/inside", "..")):
        monkeypatch.chdir(compressed / "runs" / place)
        run_command(["compress", source, "--first", str(compressed / "first.toml"), *COMPRESS[-2:], *QUIET])
        assert sorted(os.listdir(compressed / "runs")) == ["net", "net-shared", "net-shared-stage1"]
        assert (compressed / "runs/net-shared/weights-net.safetensors").read_bytes() == before
        shutil.rmtree(compressed / "runs/net-shared")


@pytest.mark.parametrize(("tensor", "bad"), [("mean", torch.nan), ("rho", torch.nan), ("rho", torch.inf)])
def test_a_posterior_that_is_not_finite_is_refused_before_anything_is_written(field, tmp_path, tensor, bad):
    posterior = copy.deepcopy(field["net"])
    with torch.no_grad():
        getattr(posterior, tensor)[3] = bad
    with pytest.raises(pb.InputError, match=f"the posterior: tensor '{tensor}/conv.weight' holds values that are not"):
        pb.compress(posterior, data="digits", run=tmp_path / "x")
    with pytest.raises(pb.InputError, match=f"peer 'a': tensor '{tensor}/conv.weight' holds values that are not"):
        pb.fit({"a": posterior}, data="digits", recipe="mutual/digits-vanilla", run=tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_device_that_is_asked_for_is_the_one_that_is_taken(field, tmp_path):
    for how in ({"device": "bogus"}, {"device": "cuda:99"}):
        with pytest.raises(pb.InputError, match="can't be used"):
            pb.compress(copy.deepcopy(field["net"]), data="digits", run=tmp_path / "x", **how)
    assert os.listdir(tmp_path) == []
