"""Adopting a trained network: what is read, what is trained, what the table says, and what is chosen by."""

import copy
import dataclasses
import html
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import peerbayes as pb
from commands import QUIET, called, change, process, refused
from learners import Recorder, stopped_at
from peerbayes import importing, metrics, networks
from peerbayes.adopting import ENSEMBLE, WIDTHS, Adopted, Adoption, _difference, _losses, _validation_note, _verdict
from peerbayes.data import load
from peerbayes.errors import InputError
from peerbayes.recipes.recipe_data import network_inputs
from peerbayes.runs.run import Run, peers_at
from peerbayes.runs.temperatures import keep_temperature, learnt_by
from peerbayes.training.learner import Learner

FAST = ("--epochs", 1, "--width", 0.05, "--width", 0.2, "--set", "evaluation.draws=3")


NOISE = np.random.default_rng(0).integers(0, 256, (100, 8, 8), np.uint8), np.arange(100) % 10


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A multilayer perceptron of digits, its weights as people save them."""
    folder = tmp_path_factory.mktemp("adopt")
    data = load("digits", validation="auto")
    torch.manual_seed(0)
    net = networks.build("mlp", network_inputs(data))
    images, labels = data.train.batch(torch.arange(len(data.train)), torch.device("cpu"))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(12):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images / 255), labels).backward()
        optimizer.step()
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, folder / "net.pth")
    return folder, net.eval(), data


@pytest.fixture(scope="module")
def adopted(place):
    words = ("adopt", place[0] / "net.pth", "--network", "mlp", "--data", "digits", "--run", place[0] / "run")
    return json.loads(
        called(
            *words,
            "--peers",
            2,
            "--extra-epochs",
            "--distill",
            "--compress",
            "--json",
            "--log",
            "tensorboard",
            *FAST,
            *QUIET,
        )
    )


def test_every_run_of_an_adoption_is_logged(place, adopted):
    row = {(row["run"], row["peer"]): row for row in adopted["rows"] if row["temperature"] is None}
    for who, folder in adopted["folders"].items():
        events = EventAccumulator(str(place[0] / "run" / folder / "tensorboard"))
        events.Reload()
        run = Run(place[0] / "run" / folder)
        for peer in run:
            (accuracy,) = events.Scalars(f"test/{peer}/accuracy")
            assert accuracy.value == pytest.approx(row[who, peer]["accuracy"])
            lines = [line["step"] for line in run.metrics]
            assert not lines or [event.step for event in events.Scalars(f"{peer}/loss")] == lines
    assert {who for who, _ in row} == set(adopted["folders"])


def test_the_plain_network_is_judged_as_it_is(place, adopted):
    _, net, data = place
    images, labels = data.test.batch(torch.arange(len(data.test)), torch.device("cpu"))
    with torch.no_grad():
        p = net(images / 255).softmax(1)
    row = next(row for row in adopted["rows"] if row["who"] == "plain")
    assert row["accuracy"] == pytest.approx(metrics.accuracy(p, labels))
    assert row["nll"] == pytest.approx(metrics.nll(p, labels), rel=1e-5)
    run = Run(place[0] / "run" / "plain")
    assert (run.recipe.stages, run.metrics, run.finished) == ([], [], True)
    state = run["net"].materialise().state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())


def test_the_table_has_every_way_to_predict_with_what_it_costs(adopted):
    ways = ["plain", "plain, trained on", "Bayesian", "peer first", "peer second", "ensemble of peers"]
    ways += ["distilled", "compressed"]
    assert [row["who"] for row in adopted["rows"]] == [f"{way}{end}" for way in ways for end in ("", " + temperature")]
    assert [row["passes"] for row in adopted["rows"][::2]] == [1, 1, 3, 3, 3, 6, 1, 3]
    for raw, tempered in zip(adopted["rows"][::2], adopted["rows"][1::2], strict=True):
        assert raw["accuracy"] == tempered["accuracy"]
        assert tempered["temperature"] > 0
        assert raw["corrupted"]["accuracy"] <= raw["accuracy"]


def test_a_page_shows_the_table_and_every_run(place, adopted):
    page = (place[0] / "run" / "report.html").read_text()
    for row in adopted["rows"]:
        who = row["who"].replace("Bayesian", f"Bayesian, width {adopted['width']:g}")
        assert f">{who}</th><td>{100 * row['accuracy']:.2f}</td>" in page.replace("\n", "")
    assert "corrupted ACC" in page
    assert "Each by one of 15 types and 5 severities." in page
    assert "mean over 15 types" not in page
    for who in ("plain", "extra", "bayesian", "peers", "distilled", "compressed"):
        assert f"</i>{who}</label>" in page
    assert html.escape(adopted["verdict"]).replace("&#x27;", "&#39;") in page
    assert 'alt="Test image ' in page


def test_what_is_made_smaller_is_made_of_the_chosen_width(place, adopted):
    folder = place[0] / "run"
    sizes = {row["who"]: row["bytes"] for row in adopted["rows"]}
    assert sizes["compressed"] < sizes["distilled"] < sizes["Bayesian"]
    chosen = folder / adopted["folders"]["bayesian"]
    assert Run(folder / "distilled").recipe.teachers.runs == [str(chosen)]
    assert Run(folder / "compressed").recipe.peers[0].start_from == str((chosen / "weights-net.safetensors").resolve())
    assert (folder / "compressed" / "weights-net.safetensors").stat().st_size == sizes["compressed"]


def test_the_folder_stands_for_what_is_shipped(place, adopted, tmp_path, capsys):
    folder, ship = place[0] / "run", adopted["ship"]
    assert pb.load(folder).folder == folder / adopted["folders"][ship["run"]]
    images, _ = place[2].test.batch(torch.arange(3), torch.device("cpu"))
    assert torch.equal(
        pb.load(folder).predict(images).probabilities, Run(pb.load(folder).folder).predict(images).probabilities
    )
    record = json.loads((folder / "adopted.json").read_text())
    for who, peer, names in (("peers", "second", ["second"]), ("peers", "ensemble", ["first", "second"])):
        other = tmp_path / peer
        other.mkdir()
        (other / "adopted.json").write_text(json.dumps(
            {"ship": {"run": who, "peer": peer}, "folders": {who: str((folder / record["folders"][who]).resolve())}}
        ))  # fmt: skip
        assert peers_at(other)[1] == names
    (tmp_path / "adopted.json").write_text("{}")
    assert refused(capsys, "predict", tmp_path, "x.png") == (
        f"{tmp_path / 'adopted.json'}: does not say which run to ship"
    )


@pytest.fixture(scope="module")
def one_of_two(place, adopted):
    """The same adoption, which ships the second of the peers without a temperature, and a digit to predict."""
    folder = place[0] / "one-of-two"
    shutil.copytree(place[0] / "run", folder)
    record = adopted | {"ship": {"run": "peers", "peer": "second", "temperature": None}}
    (folder / "adopted.json").write_text(json.dumps(record))
    keep_temperature(Run(folder / "peers")["second"], 1.0, folder / "peers" / "weights-second.safetensors")
    images, _ = place[2].test.batch(torch.arange(1), torch.device("cpu"))
    Image.fromarray(images[0, 0].numpy()).save(place[0] / "digit.png")
    return folder, place[0] / "digit.png", record


def test_python_predicts_with_what_is_shipped_as_the_command_does(one_of_two):
    folder, digit, record = one_of_two
    (told,) = json.loads(called("predict", folder, digit, "--json"))
    peers = Run(folder / "peers")
    assert peers.temperature != 1
    best = Adopted(folder, {"peers": peers}, record, {}).best
    for run in (pb.load(folder), best):
        assert list(run.predict(digit).records()) == [told]
        assert list(run.predict(digit, "first").records()) != [told]
        assert "ships second" in repr(run)
        assert pb.export(run, to="hub", out=folder / f"hub-{id(run)}").about["passes"] == 3  # draws of one peer
    assert list(peers.predict(digit).records()) != [told]


def test_promises_of_an_adoption_are_asked_for_by_its_folder(place, one_of_two, capsys):
    folder, digit, _ = one_of_two
    images, labels = place[2].test.batch(torch.arange(200), torch.device("cpu"))
    arrays = {f"{split}_{what}": tensor.numpy() for split in ("train", "val", "test")
              for what, tensor in (("images", images), ("labels", labels))}  # fmt: skip
    np.savez(folder / "others.npz", **arrays)
    for run in (pb.load(folder), Adopted(folder, {"peers": Run(folder / "peers")}, one_of_two[2], {}).best):
        with pytest.raises(InputError) as caught:
            run.predict(digit, coverage=0.9)
        line = f"`peerbayes calibrate {folder} --coverage 0.9 --data IMAGES` promises it, by images that chose nothing"
        assert str(caught.value) == f"{folder}: nothing is promised of its predictions; {line}"
    words = ("predict", folder, digit, "--coverage", 0.9)
    assert refused(capsys, *words) == str(caught.value)
    assert "`adopt` has chosen" in refused(capsys, "calibrate", folder, "--coverage", 0.9)
    pb.calibrate(folder, dataclasses.replace(place[2], validation=place[2].test), coverage=0.9, device="cpu")
    assert "coverage 0.8 is not promised, but 0.9; `peerbayes calibrate" in (
        other := refused(capsys, "predict", folder, digit, "--coverage", 0.8)
    )
    assert other.endswith("--data IMAGES` promises it, by images that chose nothing")
    (told,) = json.loads(called(*words, "--json"))
    assert list(pb.load(folder).predict(digit, coverage=0.9).records()) == [told]


def test_help_and_guide_name_the_widths_that_are_tried(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert ", ".join(map(str, WIDTHS)) in called("adopt", "--help")
    guide = (Path(__file__).parents[1] / "docs" / "guide" / "adopt.md").read_text()
    assert f"Tried: {', '.join(f'{width:g}'.lstrip('0') for width in WIDTHS)};" in guide


def test_widths_and_what_to_ship_are_chosen_on_validation_images_alone(place, adopted):
    folder, _, data = place
    cpu = torch.device("cpu")
    by_width = {
        width: float(_losses(Run(folder / "run" / f"width-{width}"), data, cpu)["net", True].mean())
        for width in adopted["widths"]
    }
    assert adopted["widths"] == pytest.approx(by_width)
    assert adopted["width"] == float(min(by_width, key=by_width.get))
    gains = [peer.posterior.gain for peer in Run(folder / "run" / "peers").recipe.peers]
    assert gains == [adopted["width"]] * 2
    assert ("the largest that was tried" in adopted["verdict"]) == (adopted["width"] == 0.2)
    rows = {row["who"]: row for row in adopted["rows"]}
    assert adopted["ship"]["temperature"] is not None
    least = min(row["validation_nll"] for row in adopted["rows"] if row["temperature"] is not None)
    assert rows[adopted["ship"]["who"]]["validation_nll"] <= least + 1
    assert adopted["ship"]["who"] in adopted["verdict"]
    assert f"Its run is {folder / 'run' / adopted['folders'][adopted['ship']['run']]}. " in adopted["verdict"]
    assert json.loads((folder / "run" / "adopted.json").read_text()) == adopted


def test_a_cheaper_candidate_is_shipped_unless_validation_tells_it_from_the_best():
    def row(who, passes, losses):
        losses = torch.tensor(losses, dtype=torch.float64)
        return {"who": who, "run": who, "peer": "net", "temperature": 1.0, "passes": passes, "bytes": 1000 * passes,
                "losses": losses, "validation_nll": float(losses.mean())}  # fmt: skip

    noisy = [row("plain", 1, [0.5, 0.1, 0.9, 0.5]), row("peers", 20, [0.1, 0.5, 0.5, 0.8])]
    assert _difference(*noisy)[0] < _difference(*noisy)[1]
    ship, said = _verdict(noisy)
    assert ship["who"] == "plain"
    assert "within a standard error of that of peers" in said
    clear = [row("plain", 1, [0.5, 0.5, 0.6, 0.5]), row("peers", 20, [0.1, 0.1, 0.2, 0.1])]
    ship, said = _verdict(clear)
    assert ship["who"] == "peers"
    assert "0.400 ± 0.000 less than that of plain, for 20 passes" in said
    best = [row("plain", 1, [0.1, 0.1]), row("peers", 20, [0.2, 0.3])]
    assert "the least of all" in _verdict(best)[1]
    difference = torch.tensor([0.4, -0.4, 0.4, -0.3], dtype=torch.float64)
    expected = float(difference.std() / 2), float(difference.mean())
    assert _difference(*noisy)[::-1] == pytest.approx(expected)


def test_a_temperature_of_few_mistakes_is_kept(place, tmp_path):
    """A network that is nearly always right, and far from sure of it."""
    timid = copy.deepcopy(place[1])
    with torch.no_grad():
        timid.linear.weight *= 0.2
        timid.linear.bias *= 0.2
    few = load("digits", validation=45)
    found = pb.adopt(timid, data=few, run=tmp_path / "run", epochs=1, widths=[0.05], corrupted=None, device="cpu",
                     overrides=["evaluation.draws=2", "stages.0.optimizer.lr=1e-6"])  # fmt: skip
    assert 0 < found.record["validation_mistakes"] < 20
    rows = {row["who"]: row for row in found.record["rows"]}
    ship = found.record["ship"]
    assert ship["temperature"] < 0.6
    assert rows[ship["who"]]["nll"] < rows["plain"]["nll"] / 2
    assert pb.load(tmp_path / "run", networks={"net": timid}).temperature == pytest.approx(ship["temperature"])
    assert f"(T = {ship['temperature']:.2f})" in found.record["verdict"]


def test_a_temperature_is_judged_on_images_that_it_was_not_fitted_to(place, adopted):
    folder, _, data = place
    run = Run(folder / "run" / "plain")
    log_p = run.predict_split("net", data.validation, 1, torch.device("cpu"))[0]
    labels = data.validation.labels
    expected = torch.empty(len(labels), dtype=torch.float64)
    for number in range(5):
        held = torch.arange(len(labels)) % 5 == number
        temperature = metrics.fit_temperature(log_p[~held], labels[~held], width=0.5)
        logits = log_p[held] / temperature
        expected[held] = torch.nn.functional.cross_entropy(logits, labels[held], reduction="none").double()
    found = _losses(run, data, torch.device("cpu"))["net", True]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_real_process_ends_with_the_table_and_one_sentence(place, tmp_path):
    done = process("adopt", place[0] / "net.pth", "--network", "mlp", "--data", "digits", "--run", tmp_path / "run",
                   "--corrupted", "none", *FAST, *QUIET)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["ACC", "NLL", "ECE", "ACC", "of", "80", "%", "passes", "KB"]
    assert lines[1].startswith("plain  ")
    assert lines[-1].startswith("Ship ")


def test_what_was_interrupted_goes_on(place, tmp_path, capsys):
    words = ("adopt", place[0] / "net.pth", "--network", "mlp", "--data", "digits", "--corrupted", "none")
    words = (*words, "--run", tmp_path / "run", *FAST, "--checkpoint-every", 3, *QUIET)
    with stopped_at(5):
        called(*words)
    assert "already holds a run" in refused(capsys, *words)
    steps, step = [], Learner.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", lambda self: (steps.append(self.position.step), step(self)))
        called(*words, "--resume")
    assert steps[0] == 3
    assert (tmp_path / "run" / "adopted.json").is_file()
    steps.clear()
    called(*words, "--resume")
    assert steps == []
    first = json.loads((tmp_path / "run" / "adopted.json").read_text())
    assert "calibrated since" not in first["verdict"]
    others = pb.data.from_arrays(train=NOISE, test=NOISE, validation=NOISE)
    kept = pb.calibrate(tmp_path / "run", others, device="cpu").temperature
    assert kept > 2 * first["ship"]["temperature"]
    again = json.loads(called(*words, "--resume", "--json"))
    assert again["ship"]["temperature"] == kept
    assert again["verdict"].endswith(
        f" It was calibrated since: it predicts at T = {kept:.2f}, which no figure here is at."
    )
    assert again["rows"] == first["rows"]


def test_a_module_goes_on_with_its_own_weights_and_data_alone(tmp_path):
    def data(seed):
        noise = torch.Generator().manual_seed(seed)
        images, labels = torch.rand(100, 1, 4, 4, generator=noise), torch.randint(0, 3, (100,), generator=noise)
        return pb.data.from_arrays((images[:60], labels[:60]), (images[60:], labels[60:]), 20)

    def net(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))

    how = {"run": tmp_path / "run", "epochs": 1, "widths": [0.1], "overrides": "evaluation.draws=2", "corrupted": None}
    made = pb.adopt(net(0), data=data(0), normalize=None, device="cpu", **how)
    how |= {"normalize": None, "device": "cpu", "resume": True}
    with pytest.raises(InputError, match="plain: holds a run in which peer 'net' started from other weights; choose"):
        pb.adopt(net(1), data=data(0), **how)
    with pytest.raises(InputError, match=r"plain: was trained on other data \('arrays': 40 training, 20 validation"):
        pb.adopt(net(0), data=data(1), **how)
    for option in ({"name": "mlp"}, {"new_head": True}):
        with pytest.raises(InputError, match=f"{next(iter(option))} is for files of weights, but a Sequential was"):
            pb.adopt(net(0), data=data(0), **how, **option)
    assert pb.adopt(net(0), data=data(0), **how).record == made.record


def test_a_dry_run_says_all_and_writes_nothing(place, tmp_path):
    words = ("adopt", place[0] / "net.pth", "--network", "mlp", "--data", "digits", "--run", tmp_path / "run")
    words += ("--peers", 2, "--distill", "--compress", "--dry-run", "--json")
    rows = json.loads(called(*words, *FAST, *QUIET))
    run, rows = tmp_path / "run", {Path(row["folder"]).name: row for row in rows}
    assert rows.keys() == {"plain", "width-0.05", "width-0.2", "peers", "distilled", "compressed"}
    assert {Path(row["folder"]).parent for row in rows.values()} == {run}
    assert [rows[name]["epochs"] for name in ("plain", "width-0.05", "peers", "distilled", "compressed")] == [
        0, 1, 1, 1, 1
    ]  # fmt: skip
    assert rows["distilled"]["teachers"] == [str(run / "width-0.2")]  # as long as no width is chosen
    assert rows["distilled"]["peers"] == {"student": "mlp"}
    assert rows["compressed"]["starts"] == {"net": str(run / "width-0.2")}
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_trained_sees_the_same_images(place, adopted, tmp_path):
    folder = place[0] / "run"
    names = {*adopted["folders"].values()}
    assert {tuple(Run(folder / name).recipe.data.augment) for name in names} == {()}
    changed = Adoption(place[0] / "net.pth", "digits", tmp_path / "run", name="mlp", overrides="data.augment=['crop']")
    nodes = [node for wave in changed.plan(["distilled", "compressed"]).waves for node in wave]
    assert len(nodes) == 1 + len(WIDTHS) + 2
    assert {tuple(node.recipe.data.augment) for node in nodes} == {("crop",)}


# ---- a network that has learnt the validation images ----------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A network that knows noise by heart, validation images too, and cannot know the test split's."""
    folder = tmp_path_factory.mktemp("learnt")
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (400, 8, 8), dtype=torch.uint8, generator=noise)
    labels = torch.randint(0, 10, (400,), generator=noise)
    arrays = {"train_images": images[:200], "train_labels": labels[:200]}
    arrays |= {"test_images": images[200:], "test_labels": labels[200:]}
    np.savez(folder / "noise.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    torch.manual_seed(0)
    net = networks.build("mlp", network_inputs(load(folder / "noise.npz", validation=20)))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images[:200, None] / 255), labels[:200]).backward()
        optimizer.step()
    save_file(net.state_dict(), folder / "net.safetensors")
    told = Recorder()
    how = {"name": "mlp", "data": str(folder / "noise.npz"), "run": folder / "run", "epochs": 1, "widths": [0.1, 0.2]}
    how |= {"corrupted": None, "overrides": "evaluation.draws=2", "device": "cpu"}
    return folder, how, told, pb.adopt(folder / "net.safetensors", reporter=told, **how)


def test_a_network_that_has_learnt_the_validation_images_is_told_and_nothing_chosen(learnt):
    _, _, told, found = learnt
    assert found.record["validation_learnt"]
    (warning,) = [text for text in told.warnings if "learnt" in text]
    assert warning.startswith("the network is right about 100.0 % of the 20 validation inputs, but ")
    (headline,) = [text for text in told.headlines if "choose the width" in text]
    assert headline.startswith(
        "20 validation images choose the width, temperatures and what to ship; where the network"
    )
    assert headline.endswith("(they may be held out of what it was trained on), give others as validation split")
    assert found.record["verdict"] == f"Ship plain, as it is: nothing can be chosen, since {warning}"
    assert (found.record["ship"]["who"], found.record["ship"]["temperature"]) == ("plain", None)


def test_a_folder_without_a_test_split_chooses_by_images_of_val_that_nothing_has_learnt(learnt, tmp_path):
    """The network knows all of train/ by heart, and nothing of val/; a part of train/ must not choose."""
    source = load(learnt[0] / "noise.npz")
    for part, split in (("train", source.train), ("val", source.test)):
        images, labels = split.batch(torch.arange(len(split)), torch.device("cpu"))
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = tmp_path / "images" / part / str(int(label))
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).convert("RGB").save(folder / f"{number:03}.png")
    inputs = network_inputs(load(tmp_path / "images"))
    torch.manual_seed(0)
    grey, colour = networks.build("mlp", network_inputs(source)), networks.build("mlp", inputs)
    grey.load_state_dict(load_file(learnt[0] / "net.safetensors"))
    state = colour.state_dict() | {name: tensor for name, tensor in grey.state_dict().items() if tensor.dim() == 1}
    for name, tensor in grey.state_dict().items():
        if tensor.dim() == 2:
            state[name] = tensor.repeat(1, 3) / 3 if state[name].shape != tensor.shape else tensor
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "net.safetensors")
    told = Recorder()
    how = learnt[1] | {"data": str(tmp_path / "images"), "run": tmp_path / "run", "normalize": None}
    found = pb.adopt(tmp_path / "net.safetensors", reporter=told, **how)
    assert any(
        line.endswith("no test split: half of the 200 images of 'val' choose, the other half is the test split")
        for line in told.headlines
    )
    assert (found.record["validation_images"], found.record["validation_learnt"]) == (100, False)
    assert found.record["validation_mistakes"] > 70
    assert found.record["rows"][0]["temperature"] is None
    assert found.record["ship"]["temperature"] > 1.5  # it is far too sure of images that it does not know
    run = pb.load(tmp_path / "run")
    assert run.recipe.data.validation == "half"
    assert (len(run.data().validation), len(run.data().test)) == (100, 100)


def test_texts_are_not_called_images():
    texts = load((["a good one", "a bad one"] * 20, ["yes", "no"] * 20), validation=8)
    assert _validation_note(texts).startswith("8 validation texts choose the width")


def test_what_is_shipped_without_a_temperature_predicts_without_one(learnt):
    folder, how, _, found = learnt
    images = torch.rand(3, 1, 8, 8)
    run = pb.load(folder / "run")
    assert run.folder.name == "plain"
    assert torch.equal(run.predict(images).probabilities, run.predict(images, calibrated=False).probabilities)
    assert Run(folder / "run" / "width-0.1")["net"].temperature != 1
    again = pb.adopt(folder / "net.safetensors", resume=True, reporter=Recorder(), **how)
    assert again.record == found.record
    assert pb.load(folder / "run")["net"].temperature == 1


def test_what_holds_for_every_run_is_said_once(learnt):
    lines = learnt[2].headlines
    assert sum("20 of 200 training images are held out" in line for line in lines) == 1
    assert not any("training it first" in line for line in lines)


def by_chance(right, held, right_test, test):
    """P(at least ``right`` of ``held`` are right | as many are right in all), of equal rates: hypergeometric."""
    known = right + right_test
    ways = sum(math.comb(known, k) * math.comb(held + test - known, held - k) for k in range(right, held + 1))
    return ways / math.comb(held + test, held)


@pytest.mark.parametrize(
    ("right", "held", "right_test", "test"), [(113, 120, 216, 400), (40, 40, 8, 40), (32, 32, 275, 400)]
)
def test_splits_that_are_no_more_alike_are_told_apart(right, held, right_test, test):
    assert "most likely it has learnt the former" in learnt_by(right / held, held, right_test / test, test)
    assert by_chance(right, held, right_test, test) < 1e-4
    assert learnt_by(right_test / test, test, right / held, held) == ""


@pytest.mark.parametrize(("right", "held", "test"), [(32, 32, 400), (19, 20, 200), (290, 300, 100), (5, 5, 1000)])
def test_splits_are_told_apart_from_a_chance_of_one_in_ten_thousand_on(right, held, test):
    learnt = [bool(learnt_by(right / held, held, other / test, test)) for other in range(test + 1)]
    assert learnt == [by_chance(right, held, other, test) < 1e-4 for other in range(test + 1)]
    assert 0 < sum(learnt) < test  # mistakes of the test split on both sides of the border


def test_splits_of_one_kind_are_hardly_ever_told_apart():
    rng = np.random.default_rng(0)
    held, test = rng.binomial(100, 0.9, 2000) / 100, rng.binomial(300, 0.9, 2000) / 300
    assert not any(learnt_by(one, 100, other, 300) for one, other in zip(held, test, strict=True))


def test_a_module_is_adopted_as_its_file_is(place, adopted, tmp_path):
    _, net, data = place
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = pb.adopt(net, data=data, run=tmp_path / "run", epochs=1, widths=[0.05], overrides="evaluation.draws=3",
                     corrupted=None, device="cpu")  # fmt: skip
    plain = next(row for row in adopted["rows"] if row["who"] == "plain")
    assert found.record["rows"][0]["nll"] == pytest.approx(plain["nll"])
    assert str(found).endswith(found.record["verdict"])
    assert list(found.best) == ["net"]
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


@pytest.fixture(scope="module")
def of_ones_own(tmp_path_factory):
    """An adoption of a network of one's own, in a working folder, as the command makes it, and what it printed."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "adopted_nets.py").write_text(
        "from torch import nn\n"
        "def tiny(inputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, inputs.classes))\n"
        "def large(inputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, inputs.classes))\n"
    )
    save_file({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)}, folder / "net.safetensors")
    words = ("adopt", "net.safetensors", "--data", "digits", "--normalize", "none", "--corrupted", "none",
             "--epochs", 1, "--width", 0.1, "--set", "evaluation.draws=2", "--device", "cpu")  # fmt: skip
    done = process(*words, "--network", "adopted_nets:tiny", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, words, done


@pytest.mark.parametrize(
    ("network", "sentence"),
    {
        "adopted_nets:tinyy": "network 'adopted_nets:tinyy' can't be imported: AttributeError: module 'adopted_nets' "
        "has no attribute 'tinyy'; did you mean 'adopted_nets:tiny'?",
        "adopted_nets:large": "runs/adopted-net: holds an adoption of network 'adopted_nets:tiny', not of network "
        "'adopted_nets:large'; choose another folder: --run (run= in Python)",
        "mlpp": "there is no network 'mlpp'; did you mean 'mlp'?",
        "adopted_nets:tiny": "runs/adopted-net/plain: already holds a run; add --resume (resume=True in Python) to go "
        "on with it, or choose another folder",
    }.items(),
)
def test_another_network_in_the_same_folder_is_told_so(of_ones_own, monkeypatch, capsys, network, sentence):
    folder, words, _ = of_ones_own
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(importing, "_ALLOWED", set())
    assert refused(capsys, *words, "--quiet", "--network", network) == sentence


def test_a_module_does_not_go_into_the_folder_of_a_named_network(of_ones_own):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    told = "adopted-net: holds an adoption of network 'adopted_nets:tiny', not of a module from Python; choose"
    with pytest.raises(InputError, match=told):
        pb.adopt(net, data="digits", run=of_ones_own[0] / "runs" / "adopted-net")


def test_the_next_command_that_is_named_works_for_a_network_of_ones_own(of_ones_own):
    folder, _, done = of_ones_own
    Image.new("L", (8, 8), 90).save(folder / "photo.png")
    (line,) = [line for line in done.stderr.splitlines() if "next: peerbayes " in line]
    words = line.partition("next: peerbayes ")[2].replace("FILES", "photo.png").split()
    predicted = process(*words, "--device", "cpu", cwd=folder)
    assert (predicted.returncode, "photo.png" in predicted.stdout) == (0, True), predicted.stderr


def test_a_new_head_is_trained_where_one_is_asked_for(place, tmp_path, capsys):
    state = {name: tensor.clone() for name, tensor in place[1].state_dict().items()}
    for name in ("linear.weight", "linear.bias"):
        state[name] = state[name][:7].clone()
    save_file(state, tmp_path / "seven.safetensors")
    words = ("adopt", tmp_path / "seven.safetensors", "--network", "mlp", "--data", "digits", "--run", tmp_path / "run")
    found = refused(capsys, *words, *FAST, *QUIET)
    assert found.startswith(f"{tmp_path / 'seven.safetensors'}: tensor 'linear.bias' (and 1 others) has shape (7,), ")
    assert found.endswith("--new-head begins a new head there")
    assert not (tmp_path / "run").exists()
    record = json.loads(called(*words, "--new-head", "--corrupted", "none", "--json", *FAST, *QUIET))
    assert Run(tmp_path / "run" / "plain").recipe.epochs == 1
    assert record["new_head"]


WRONG = {
    "no network": ([], "net.pth: which network is it of? Name it: --network timm/NAME, or --network mymodule:build"),
    "other network": (["--network", "resnet8"], "is it of another network?"),
    "peers": (["--network", "mlp", "--peers", 3], "peers is 3, expected 2, or 0 for none"),
    "no validation": (
        ["--network", "mlp", *change("data.validation=0")],
        "digits: has no validation split to choose by",
    ),
    "width": (["--network", "mlp", "--width", 0], "widths are 0.0: expected different numbers above 0"),
}


@pytest.mark.parametrize(("words", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(place, tmp_path, capsys, words, sentence):
    run = tmp_path / "run"
    found = refused(capsys, "adopt", place[0] / "net.pth", "--data", "digits", "--run", run, *words, *QUIET)
    assert sentence in found
    assert not run.exists()


def test_what_is_no_file_of_weights_is_refused(place, adopted):
    with pytest.raises(InputError, match="expected a file of weights that ends in"):
        Adoption(place[0], "digits", place[0] / "x", name="mlp")
    with pytest.raises(InputError, match="no such file"):
        Adoption(place[0] / "none.pth", "digits", place[0] / "x", name="mlp")
    run = place[0] / "run" / "plain"
    with pytest.raises(InputError, match=f"{run}: is a run; adopt the weights of one of its peers: {run}/weights-"):
        Adoption(run, "digits", place[0] / "x", name="mlp")
    assert ENSEMBLE == "ensemble"
