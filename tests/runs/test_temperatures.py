"""Temperatures: fitted on the validation split, kept with the weights, and applied where people predict."""

import json
import math
import shutil

import pytest
import torch
from scipy.optimize import minimize_scalar

import peerbayes as pb
from commands import called, contents, refused, write_small
from learners import same
from peerbayes.api.calibrating import calibrate
from peerbayes.api.fitting import fit, train
from peerbayes.codebook.shared import Shared
from peerbayes.data import from_arrays, to_unit
from peerbayes.errors import InputError
from peerbayes.metrics import nll_from_log
from peerbayes.posteriors import MeanField, Point, RankOne, storage
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.evaluating import evaluate
from peerbayes.runs import session
from peerbayes.runs.run import Run, run_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = write_small(tmp_path_factory.mktemp("calibrated"))
    return train(load_recipe(folder / "small.toml", ["stages.0.epochs=3"]), folder / "run", device="cpu")


@pytest.fixture
def run(trained, tmp_path):
    return Run(shutil.copytree(trained.folder, tmp_path / "run"))


def averaged(run, name, split, draws):
    """log (1/S) Σ_s softmax(z_s) in float64, of networks of their own."""
    images, labels = split.batch(torch.arange(len(split)), torch.device("cpu"))
    posterior = run[name]
    address = posterior.predict(images[:1], 1, seed=run.seed, name=name).address
    networks = [posterior.materialise(posterior.draw(address.at(number))) for number in range(draws)]
    with torch.no_grad():
        logits = torch.stack([network(to_unit(images)).double() for network in networks])
    return logits.log_softmax(-1).logsumexp(0) - math.log(draws), labels


def best_temperature(log_p, labels):
    """The minimiser of the NLL of softmax(log p / T) and a prior N(0, 0.5²) of log T, by Brent's method on log T."""

    def loss(log_t):
        nll = torch.nn.functional.cross_entropy(log_p / math.exp(log_t), labels, reduction="sum")
        return float(nll) + log_t**2 / (2 * 0.5**2)

    return math.exp(minimize_scalar(loss, bounds=(math.log(0.01), math.log(100)), method="bounded").x)


def without_temperatures(run):
    """Make a run folder what it was before there were temperatures."""
    for name in run:
        storage.describe(run.weights_file(name), temperature=None)
    path = run.folder / "run.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in about.items() if key != "temperature"}, indent=1))
    return Run(run.folder)


def test_a_run_ends_with_the_temperatures_that_a_minimiser_finds(trained):
    data, draws = trained.data(), trained.recipe.evaluation.draws
    each = [averaged(trained, name, data.validation, draws) for name in trained]
    for name, (log_p, labels) in zip(trained, each, strict=True):
        assert trained[name].temperature == pytest.approx(best_temperature(log_p, labels), rel=2e-3)
        assert trained[name].temperature != 1
    together = torch.stack([log_p for log_p, _ in each]).logsumexp(0) - math.log(2)
    assert trained.temperature == pytest.approx(best_temperature(together, each[0][1]), rel=2e-3)


def test_they_are_those_of_the_record_which_is_of_temperature_1(trained, run):
    record = evaluate(run, device="cpu")
    assert [peer["temperature"] for peer in record["peers"]] == [run[name].temperature for name in run]
    assert record["ensemble"]["temperature"] == run.temperature
    data = run.data()
    for name, peer in zip(run, record["peers"], strict=True):
        log_p, labels = averaged(run, name, data.test, 3)
        assert peer["nll"] == pytest.approx(nll_from_log(log_p, labels), abs=1e-6)
        run[name].temperature = 7.0
    again = evaluate(run, device="cpu")
    figures = ("nll", "ece", "aurc", "disagreement", "temperature", "cnll", "cece")
    for before, after in zip(record["peers"], again["peers"], strict=True):
        assert [before[figure] for figure in figures] == [after[figure] for figure in figures]


def test_predictions_are_tempered_and_disagreement_is_not(trained):
    data, posterior = trained.data(), trained["a"]
    images, _ = data.test.batch(torch.arange(len(data.test)), torch.device("cpu"))
    calibrated = posterior.predict(images, 3)
    raw = posterior.predict(images, 3, calibrated=False)
    log_p, _ = averaged(trained, "a", data.test, 3)
    torch.testing.assert_close(raw.probabilities.double(), log_p.exp(), rtol=0, atol=1e-6)
    expected = log_p.exp() ** (1 / posterior.temperature)
    expected /= expected.sum(1, keepdim=True)
    torch.testing.assert_close(calibrated.probabilities.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(calibrated.entropy.double(), -(expected * expected.log()).sum(1), rtol=0, atol=1e-5)
    assert calibrated.temperature == posterior.temperature
    assert torch.equal(calibrated.disagreement, raw.disagreement)
    assert torch.equal(calibrated.classes, raw.classes)
    assert not torch.equal(calibrated.entropy, raw.entropy)
    assert torch.equal(calibrated.raw.log_probabilities, raw.log_probabilities)
    twice = calibrated.tempered(3.0).tempered(posterior.temperature)
    assert torch.equal(twice.log_probabilities, calibrated.log_probabilities)
    assert same(calibrated.replay(2), raw.replay(2))
    with pytest.raises(InputError, match="temperature is -1, expected a positive number"):
        raw.tempered(-1)


def test_temperature_1_changes_no_bit():
    torch.manual_seed(0)
    posterior, images = MeanField(torch.nn.Linear(4, 3)), torch.rand(20, 4)
    assert posterior.temperature == 1.0
    raw = posterior.predict(images, 5, calibrated=False)
    assert torch.equal(posterior.predict(images, 5).log_probabilities, raw.log_probabilities)


def test_weights_and_digests_are_those_without_temperatures(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "fit_temperatures", lambda peers, *_: (dict.fromkeys(peers, 1.0), 1.0))
    plain = train(trained.recipe, tmp_path / "plain", device="cpu")
    for name in plain:
        tensors, about = storage.read(plain.weights_file(name))
        calibrated, more = storage.read(trained.weights_file(name))
        assert same(tensors, calibrated)
        assert more == about | {"temperature": trained[name].temperature}
        assert plain[name].digest() == trained[name].digest()
        assert plain[name].temperature == 1.0


def test_a_run_from_before_opens_with_temperature_1_and_calibrate_makes_it_what_is_trained_now(trained, run):
    old = without_temperatures(run)
    assert [old[name].temperature for name in old] == [1.0, 1.0]
    assert old.temperature == 1.0
    held = old["a"]
    assert calibrate(old, device="cpu") is old
    assert held.temperature == trained["a"].temperature
    assert run_of(held) is not None
    assert contents(run.folder) == contents(trained.folder)
    again = Run(run.folder)
    assert (again["b"].temperature, again.temperature) == (trained["b"].temperature, trained.temperature)


def test_one_weights_file_is_calibrated_alone_with_other_draws(trained, run):
    old = without_temperatures(run)
    calibrate(old.weights_file("b"), draws=7, device="cpu")
    again, data = Run(run.folder), run.data()
    assert again["a"].temperature == again.temperature == 1.0
    log_p, labels = averaged(again, "b", data.validation, 7)
    assert again["b"].temperature == pytest.approx(best_temperature(log_p, labels), rel=2e-3)


def test_without_a_validation_split_there_is_none(tmp_path, capsys):
    folder = write_small(tmp_path)
    run = train(load_recipe(folder / "small.toml", ["data.validation=0"]), tmp_path / "run", device="cpu")
    assert [run[name].temperature for name in run] == [1.0, 1.0]
    assert "temperature" not in run.about
    assert "temperature" not in storage.read(run.weights_file("a"))[1]
    before = contents(run.folder)
    sentence = refused(capsys, "calibrate", run.folder, "--device", "cpu")
    assert "has no validation split to fit temperatures on" in sentence
    assert contents(run.folder) == before


def test_the_command_says_what_it_fitted(trained, run, capsys):
    without_temperatures(run)
    told = json.loads(called("calibrate", run.folder, "--device", "cpu", "--json"))
    expected = {name: trained[name].temperature for name in trained}
    assert told == [{"run": str(run.folder), "peers": expected, "ensemble": trained.temperature}]
    lines = called("calibrate", run.folder, "--device", "cpu").splitlines()
    assert [line.split() for line in lines[1:]] == [
        [str(run.folder), who, f"{value:.3f}"] for who, value in (*expected.items(), ("ensemble", trained.temperature))
    ]
    path = run.folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": False}))
    assert "the run is not finished" in refused(capsys, "calibrate", run.folder)


@pytest.mark.parametrize("value", ["0", "-1.0", "true", '"x"', "NaN"])
def test_a_damaged_temperature_is_one_sentence(run, value, capsys):
    storage.describe(run.weights_file("a"), temperature=json.loads(value))
    assert "its temperature is" in refused(capsys, "evaluate", run.folder, "--device", "cpu")


def test_a_damaged_temperature_of_the_ensemble_is_one_sentence(run, capsys):
    path = run.folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": -2.0}))
    assert "run.json: temperature: " in refused(capsys, "evaluate", run.folder, "--device", "cpu")


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def posteriors():
    return {
        "point": Point(network()),
        "mean_field": MeanField(network()),
        "rank_one": RankOne(network(), 2),
        "shared": Shared(network(), bits=10),
        "exact": Shared(network(), bits=32),
    }


@pytest.mark.parametrize("kind", posteriors())
def test_files_of_all_kinds_keep_the_temperature_and_nothing_else_changes(kind, tmp_path):
    posterior, path = posteriors()[kind], tmp_path / "p.safetensors"
    posterior.save(path)
    plain = path.read_bytes()
    assert b"temperature" not in plain[:4096]
    before = storage.read(path)[0]
    posterior.temperature = 1.0 + 1 / 3
    posterior.save(path)
    loaded = type(posterior).load(path, network())
    assert loaded.temperature == 1.0 + 1 / 3
    assert same(storage.read(path)[0], before)
    whole = path.read_bytes()
    storage.describe(path, temperature=None)
    assert path.read_bytes() == plain
    storage.describe(path, temperature=1.0 + 1 / 3)
    assert path.read_bytes() == whole
    if kind == "shared":
        Shared.load_means(path, network())


def test_what_learns_on_forgets_its_temperature(trained, tmp_path):
    peers = {name: Run(trained.folder)[name] for name in trained}
    assert all(posterior.temperature != 1 for posterior in peers.values())
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, *trained["a"].input_shape), dtype=torch.uint8, generator=generator)
    arrays = (images, torch.arange(60) % 3)
    recipe = load_recipe(trained.recipe, ["data.validation=0"])
    again = fit(peers, data=from_arrays(arrays, arrays), recipe=recipe, run=tmp_path / "again", device="cpu")
    assert [again[name].temperature for name in again] == [peers[name].temperature for name in peers] == [1.0, 1.0]


def test_a_posterior_of_ones_own_is_calibrated_in_memory(trained):
    generator = torch.Generator().manual_seed(3)
    images = torch.rand((200, 1, 4, 4), generator=generator)
    labels = (images.flatten(1) @ torch.randn((16, 3), generator=generator)).argmax(1)
    data = from_arrays((images, labels), (images, labels), validation=0.5)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    posterior = Point(network)
    assert pb.calibrate(posterior, data, device="cpu") is posterior
    held, truth = data.validation.batch(torch.arange(len(data.validation)), torch.device("cpu"))
    expected = best_temperature(network(held).detach().double(), truth)
    assert posterior.temperature == pytest.approx(expected, rel=2e-3)
    with pytest.raises(InputError, match="`data` is required"):
        pb.calibrate(posterior)
    with pytest.raises(InputError, match="source is a int, expected a run"):
        pb.calibrate(3)
    own = trained["a"]
    before = own.temperature
    own.temperature = 1.0
    assert pb.calibrate(own, device="cpu").temperature == before


def test_weights_that_predict_nothing_end_the_run_without_temperatures_and_say_so(trained, tmp_path, monkeypatch):
    def broken(*_):
        raise InputError("peer 'a': 12 of 12 predictions are not numbers (NaN)")

    monkeypatch.setattr(session, "fit_temperatures", broken)
    with pytest.warns(pb.PeerbayesWarning, match="no temperatures are fitted: peer 'a': 12 of 12"):
        run = train(trained.recipe, tmp_path / "run", device="cpu")
    assert run.finished
    assert run["a"].temperature == run.temperature == 1.0
