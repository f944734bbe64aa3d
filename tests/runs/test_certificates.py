"""Certificates: made by `calibrate`, kept with the weights, and kept by predictions."""

import csv
import io
import json
import math
import shutil
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image

import peerbayes as pb
from commands import called, contents, refused, save_npz, write_small
from peerbayes.api.fitting import train
from peerbayes.data.splits import order
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.inference.guarantees import FITTED, Promises, parts
from peerbayes.math.noise import Address
from peerbayes.metrics import fit_temperature, temper
from peerbayes.posteriors import Certificate, CoveragePromise, storage
from peerbayes.recipes.recipe import load_recipe
from peerbayes.runs.run import Run, load

CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    recipe = load_recipe("mutual/digits-dnn", ["data.validation=600", "stages.*.epochs=12"])
    return train(recipe, tmp_path_factory.mktemp("certified") / "run", device="cpu")


@pytest.fixture
def run(trained, tmp_path):
    return Run(shutil.copytree(trained.folder, tmp_path / "run"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two peers that have learnt nothing worth knowing."""
    folder = write_small(tmp_path_factory.mktemp("pair"))
    return train(load_recipe(folder / "small.toml", ["data.validation=24"]), folder / "run", device="cpu")


def on_validation(run):
    """log p̄ of the only peer, labels, and the numbers of those that fit and those that show."""
    (name,) = run
    held = run.data().validation
    log_p = run.predict_split(name, held, run.recipe.evaluation.draws, torch.device("cpu"))[0]
    shuffled = order(len(held), Address(run.seed, "data", "certify"))
    first = math.ceil(len(held) / 4)
    return log_p, held.labels, shuffled[:first], shuffled[first:]


def on_test(run):
    images, labels = (split := run.data().test).batch(torch.arange(len(split)), torch.device("cpu"))
    return images, labels


def test_thresholds_are_those_of_the_images_that_fitted_nothing(run):
    pb.calibrate(run, coverage=0.9, risk=0.05, delta=0.2, device="cpu")
    (name,) = run
    found = Run(run.folder).certificate
    assert found == run.certificate == run[name].certificate
    log_p, labels, fitting, showing = on_validation(run)
    assert (found.images, found.fitted) == (len(showing), len(fitting)) == (450, 150)
    assert (found.data, found.seed, found.classes) == ("digits", run.seed, 10)
    temperature = fit_temperature(log_p[fitting], labels[fitting], width=0.5)
    assert found.temperature == run[name].temperature == pytest.approx(temperature, rel=1e-6)
    p = temper(log_p, found.temperature)[showing].double().exp()
    scores = np.sort(1 - p.gather(1, labels[showing][:, None])[:, 0].numpy())
    place = math.ceil(451 * Fraction("0.9"))
    assert found.coverage.thresholds == pytest.approx([scores[place - 1]], abs=1e-9)
    assert found.coverage.images == [450]
    confidence, classes = p.max(1)
    answered = confidence >= found.risk.thresholds[0]
    errors = int((classes != labels[showing])[answered].sum())
    assert (found.risk.answered, found.risk.errors) == ([int(answered.sum())], [errors])
    assert scipy.stats.binom.cdf(errors, int(answered.sum()), 0.05) <= 0.2
    assert (found.risk.level, found.risk.delta) == (0.05, 0.2)


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_predictions_have_the_sets_and_abstentions_of_the_certificate(run, method):
    run = pb.calibrate(run.folder, coverage=0.99, risk=0.02, method=method, device="cpu")
    images, labels = on_test(run)
    found = run.predict(images, coverage=0.99, risk=0.02, device="cpu")
    promise = run.certificate
    p = found.probabilities.double().numpy()
    confidence = p.max(1)
    abstained = confidence < promise.risk.thresholds[0]
    assert found.abstain.tolist() == abstained.tolist()
    assert 0 < abstained.sum() < len(p)
    threshold = promise.coverage.thresholds[0]
    for row, inside in zip(p[:300], found.sets[:300].tolist(), strict=True):
        if method == "lac":
            expected = {c for c in range(10) if 1 - row[c] <= threshold}
        else:
            expected, mass = set(), 0.0
            for place, c in enumerate(np.argsort(-row, kind="stable"), start=1):
                beyond = max(0, place - promise.coverage.rank) * promise.coverage.penalty
                if mass + beyond <= threshold:
                    expected.add(int(c))
                mass += row[c]
        assert {c for c in range(10) if inside[c]} == expected
    # Held-out images agree with the promise, but for chance (99.9 % of calibrations and tests).
    covered = found.sets.gather(1, labels[:, None]).double().mean()
    assert covered > 0.99 - 3.1 * math.sqrt(0.99 * 0.01 * (1 / len(p) + 1 / promise.images))
    plain = run.predict(images, device="cpu")
    assert torch.equal(plain.log_probabilities, found.log_probabilities)
    assert list(plain.columns) == ["image", "class", "probability", "entropy", "disagreement"]
    with pytest.raises(InputError, match="has no sets; predict with coverage"):
        _ = plain.sets
    with pytest.raises(InputError, match="abstains from nothing; predict with risk"):
        _ = run.predict(images, coverage=0.99, device="cpu").abstain
    assert torch.equal(found[5:9].sets, found.sets[5:9])
    assert found.raw.certificate is None


def test_by_class_there_is_a_threshold_for_each(run):
    found = pb.calibrate(run, coverage=0.8, by_class=True, method="aps", device="cpu").certificate.coverage
    log_p, labels, _, showing = on_validation(run)
    p = temper(log_p, run.temperature)[showing].double().exp()
    own = p.gather(1, labels[showing][:, None])
    above = torch.where(p > own, p, 0.0).sum(1)
    for number in range(10):
        scores = above[labels[showing] == number].sort().values
        assert found.images[number] == len(scores)
        place = math.ceil((len(scores) + 1) * Fraction("0.8"))
        assert found.thresholds[number] == pytest.approx(float(scores[place - 1]), abs=1e-9)
    risk = pb.calibrate(run, risk=0.3, by_class=True, delta=0.2, device="cpu").certificate.risk
    assert len(risk.thresholds) == 10
    assert sum(risk.images) == len(showing)
    for answered, errors in zip(risk.answered, risk.errors, strict=True):
        assert scipy.stats.binom.cdf(errors, answered, 0.3) <= 0.2 / 10
    images, _ = on_test(run)
    found = run.predict(images, risk=0.3, device="cpu")
    own = torch.tensor(risk.thresholds)[found.classes]
    assert torch.equal(found.abstain, found.probabilities.amax(1).double() < own)


def test_the_certificate_is_kept_and_goes_with_its_temperature(run, tmp_path):
    before = storage.read(run.weights_file("scratch"))
    pb.calibrate(run, risk=0.1, device="cpu")
    tensors, about = storage.read(run.weights_file("scratch"))
    assert all(torch.equal(tensors[name], before[0][name]) for name in before[0])
    assert about["certificate"]["risk"]["level"] == 0.1
    assert "coverage" not in about["certificate"]
    run["scratch"].save(tmp_path / "copy.safetensors")
    copied = type(run["scratch"]).load(tmp_path / "copy.safetensors", run.network("scratch"))
    assert copied.certificate == run.certificate
    assert copied.digest() == Run(run.folder)["scratch"].digest()
    with pytest.warns(PeerbayesWarning, match=r"dropped: risk 0\.1 \(calibrating without promises ends them\)"):
        pb.calibrate(run, device="cpu")
    again = Run(run.folder)
    assert again.certificate is None
    assert storage.read(run.weights_file("scratch"))[1] == before[1]


def test_a_run_of_peers_is_certified_as_one_and_a_weights_file_by_itself(pair, tmp_path):
    run = Run(shutil.copytree(pair.folder, tmp_path / "run"))
    each = [run[name].temperature for name in run]
    pb.calibrate(run.folder, coverage=0.8, draws=2, device="cpu")
    again = Run(run.folder)
    assert again.certificate.coverage.level == 0.8
    assert again.temperature == again.certificate.temperature
    assert [again[name].certificate for name in again] == [None, None]
    assert [again[name].temperature for name in again] == each
    images, _ = on_test(run)
    found = again.predict(images, coverage=0.8, device="cpu")
    assert set(found.draws.tolist()) == {4}  # those of the certificate, not of the recipe
    with pytest.raises(InputError, match="nothing is promised of its predictions"):
        again.predict(images, "a", coverage=0.8, device="cpu")
    pb.calibrate(run.weights_file("a"), coverage=0.8, device="cpu")
    both = Run(run.folder)
    assert both.certificate == again.certificate
    assert both["a"].certificate.draws == 3
    assert both.predict(images, "a", coverage=0.8, device="cpu").sets.shape == (30, 3)
    with pytest.warns(PeerbayesWarning, match=r"dropped: coverage 0\.8") as told:
        pb.calibrate(run.folder, device="cpu")
    assert sorted(str(one.message).split(": ")[0] for one in told) == [str(run.folder), str(run.weights_file("a"))]
    assert Run(run.folder).certificate is None
    assert "certificate" not in json.loads((run.folder / "run.json").read_text())


def test_a_posterior_is_certified_in_memory(trained):
    own = Run(trained.folder)["scratch"]
    pb.calibrate(own, coverage=0.9, device="cpu")
    images, _ = on_test(trained)
    found = own.predict(images).promising(own.certificate)
    assert found.sets.shape == (len(images), 10)
    with pytest.raises(InputError, match=r"the certificate is of predictions of temperature .*, but this one has 1\.0"):
        own.predict(images, calibrated=False).promising(own.certificate)
    assert Run(trained.folder).certificate is None


def test_the_command_makes_promises_and_keeps_them(run, tmp_path):
    words = ("calibrate", run.folder, "--coverage", "0.95", "--risk", "0.02", "--delta", "0.1", *CPU)
    (record,) = json.loads(called(*words, "--json"))
    promised = Run(run.folder).certificate
    assert Certificate.parse(record["certificate"], "printed") == promised
    table = called(*words)
    assert "LAC sets hold the true class with probability 0.95 (450 inputs" in table
    assert "with probability 0.9, at most 2 % of answers are wrong (450 inputs" in table
    images, _ = on_test(run)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, image in enumerate(images[:40]):
        Image.fromarray(image[0].numpy()).save(pictures / f"{number:02}.png")
    found = load(run.folder).predict(images[:40], coverage=0.95, risk=0.02, device="cpu")
    asked = ("predict", run.folder, pictures, "--coverage", "0.95", "--risk", "0.02", *CPU)
    rows = list(csv.DictReader(io.StringIO(called(*asked, "--format", "csv"))))
    names = [[str(c) for c in row.nonzero()[:, 0].tolist()] for row in found.sets]
    assert [row["abstain"] for row in rows] == [str(value) for value in found.abstain.tolist()]
    assert [sorted(filter(None, row["set"].split(" | "))) for row in rows] == names
    listed = json.loads(called(*asked, "--json"))
    assert [row["abstain"] for row in listed] == found.abstain.tolist()
    assert [sorted(row["set"]) for row in listed] == names
    for row in listed:
        assert row["set"] == sorted(row["set"], key=lambda name: -row["probabilities"][name])
    lines = called(*asked).splitlines()
    assert lines[0].split()[-2:] == ["set", "abstain"]
    assert sum(line.endswith("yes") for line in lines) == int(found.abstain.sum())


def test_long_sets_are_cut_where_people_read_them():
    names = [f"class{number}" for number in range(9)]
    promise = CoveragePromise(level=0.9, method="lac", thresholds=[1.0], images=[9])
    about = {"data": "d", "images": 9, "fitted": 3, "seed": 0, "draws": 1, "temperature": 1.0}
    log_p = torch.full((1, 9), 1 / 9).log()
    found = pb.Prediction(log_p, torch.zeros(1), torch.ones(1), Address(0, "a", "draw"), class_names=names)
    found = found.promising(Certificate(**about, classes=9, coverage=promise))
    assert "class0 | class1 | class2 | class3 … 5 more" in repr(found)
    assert found.columns["set"] == [" | ".join(names)]
    with pytest.raises(InputError, match="classes 3, but this one has 9"):
        found.promising(Certificate(**about, classes=3, coverage=promise))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--coverage", "0.999"], "it needs at least 999 calibration inputs, and there are 450; hold out 1332"),
        (["--risk", "0.001"], "it needs at least 2302 calibration inputs, and there are 450; hold out 3070"),
        (["--coverage", "0.99", "--by-class"], "it needs at least 99 calibration inputs of class '0', and there are"),
        (["--risk", "0.05", "--by-class"], "calibration inputs predicted as class '0', and there are"),
        (["--coverage", "1"], "coverage is 1.0, expected a number between 0 and 1"),
        (["--risk", "-0.1"], "risk is -0.1, expected a number between 0 and 1"),
        (["--risk", "0.1", "--delta", "2"], "delta is 2.0, expected a number between 0 and 1"),
        (["--by-class"], "by_class says how coverage or risk is promised; give one of them"),
        (["--method", "aps"], "method says how coverage is promised; give a coverage, too"),
        (["--risk", "0.1", "--method", "aps"], "method says how coverage is promised; give a coverage, too"),
        (["--delta", "0.05"], "delta says how risk is promised; give a risk, too"),
        (["--coverage", "0.9", "--delta", "0.05"], "delta says how risk is promised; give a risk, too"),
    ],
)
def test_what_cannot_be_promised_is_one_sentence_and_nothing_is_written(run, capsys, words, told):
    before = contents(run.folder)
    assert told in refused(capsys, "calibrate", run.folder, *words, *CPU)
    assert contents(run.folder) == before


def test_the_number_of_images_that_is_asked_for_is_enough():
    for fewest in range(1, 400):
        asked = math.ceil(fewest / (1 - FITTED))
        assert len(parts(asked, 0)[1]) >= fewest
        assert len(parts(asked - 1, 0)[1]) < fewest


def test_a_network_that_knows_nothing_can_promise_no_risk(pair, capsys):
    assert "it needs at least 45 calibration inputs" in refused(
        capsys, "calibrate", pair.folder, "--risk", "0.05", *CPU
    )
    told = refused(capsys, "calibrate", pair.folder, "--risk", "0.3", *CPU)
    assert "risk 0.3 (delta 0.1) can't be promised: of the" in told
    assert told.endswith("promise a higher risk")
    told = refused(capsys, "calibrate", pair.folder, "--risk", "0.3", "--coverage", "0.5", *CPU)
    assert told.endswith("promise a higher risk, or coverage alone")


def test_a_promise_by_images_that_were_learnt_is_told(run):
    record = {"peers": [{"name": "scratch", "accuracy": 0.5}]}
    (run.folder / "evaluation.json").write_text(json.dumps(record))
    with pytest.warns(PeerbayesWarning, match=r"the promise is worth little: the network is right about .*of the 600 "):
        pb.calibrate(run, coverage=0.5, device="cpu")
    held = run.data().validation
    right = float(
        (run.predict_split("scratch", held, 1, torch.device("cpu"))[0].argmax(1) == held.labels).double().mean()
    )
    record["peers"][0]["accuracy"] = right
    (run.folder / "evaluation.json").write_text(json.dumps(record))
    pb.calibrate(run, coverage=0.5, device="cpu")  # warnings are errors


def test_data_given_as_an_object_certify_as_they_were_learnt(trained, tmp_path):
    everything = trained.data()
    parts = (everything.train, everything.test)
    train, test = (tuple(x.numpy() for x in split.batch(torch.arange(len(split)), "cpu")) for split in parts)
    given = {"train": train, "test": test}
    short = ["peers.*.network=mlp", "stages.0.epochs=1", "stages.0.warmup=0", "data.validation=100"]
    mine = pb.train("plain", tmp_path / "run", data=given, overrides=short, device="cpu")
    wanted = pb.calibrate(mine, coverage=0.5, device="cpu").certificate
    found = pb.calibrate(Run(mine.folder), {**given}, coverage=0.5, device="cpu").certificate
    assert found == wanted
    assert found.images == 75
    own = {**given, "validation": tuple(part[:80] for part in test)}
    assert pb.calibrate(mine, own, coverage=0.5, device="cpu").certificate.images == 60
    with pytest.raises(InputError, match="has no validation split to fit temperatures on"):
        pb.calibrate(mine, {"train": test}, coverage=0.5, device="cpu")


def test_other_images_without_splits_all_certify(trained, tmp_path):
    test = trained.data().test
    images, labels = (part[:200].numpy() for part in test.batch(torch.arange(len(test)), torch.device("cpu")))
    short = ["peers.*.network=mlp", "stages.0.epochs=1", "stages.0.warmup=0", "data.validation=0"]
    mine = pb.train("plain", tmp_path / "run", data="digits", overrides=short, device="cpu")
    found = pb.calibrate(mine, (images, labels), coverage=0.5, device="cpu").certificate
    assert (found.fitted, found.images) == (50, 150)
    np.savez(tmp_path / "unsplit.npz", train_images=images, train_labels=labels)
    called("calibrate", mine.folder, "--data", tmp_path / "unsplit.npz", "--coverage", "0.5", *CPU)
    assert Run(mine.folder).certificate.images == 150
    with pytest.raises(InputError, match="has no validation split to fit temperatures on"):
        pb.calibrate(
            pb.Point(mine["net"].materialise()), (images, labels), device="cpu"
        )  # who knows what it has learned?
    own = {"train_images": images[:50], "train_labels": labels[:50]}
    np.savez(tmp_path / "others.npz", **own, test_images=images[50:], test_labels=labels[50:])
    called("calibrate", mine.folder, "--data", tmp_path / "others.npz", "--coverage", "0.5", *CPU)
    assert Run(mine.folder).certificate.images == 112  # of the test split alone
    with pytest.raises(InputError, match="has no validation split to fit temperatures on"):
        pb.calibrate(mine, "digits", device="cpu")  # what it has learnt


def test_predictions_that_are_not_promised_are_one_sentence(run, capsys):
    images, _ = on_test(run)
    pb.calibrate(run, risk=0.1, device="cpu")
    with pytest.raises(
        InputError, match=r"risk 0\.05 is not promised, but 0\.1; `peerbayes calibrate .* --risk 0\.05`"
    ):
        run.predict(images, risk=0.05)
    with pytest.raises(InputError, match=r"coverage 0\.9 is not promised; `peerbayes calibrate"):
        run.predict(images, coverage=0.9)
    with pytest.raises(InputError, match="promises are of its calibrated predictions"):
        run.predict(images, risk=0.1, calibrated=False)
    with pytest.raises(InputError, match="promises are of 1 draws, not of 7"):
        run.predict(images, risk=0.1, draws=7)
    run["scratch"].temperature = 3.0
    with pytest.raises(InputError, match=r"of predictions of temperature .*, but this one has 3\.0"):
        run.predict(images, risk=0.1)


def test_images_that_chose_the_best_epoch_promise_nothing(pair, tmp_path, capsys):
    folder = shutil.copytree(pair.folder, tmp_path / "run")
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace('keep = "last"', 'keep = "best"'))
    told = refused(capsys, "calibrate", folder, "--coverage", "0.5", *CPU)
    assert "best epoch was chosen on the validation images, so they can promise nothing" in told
    data = Run(folder).recipe.data.name
    for same in (data, shutil.copy(data, tmp_path / "copy.npz")):  # with all images that it has learnt
        called("calibrate", folder, "--coverage", "0.5", "--data", same, *CPU, code=2)
        called("calibrate", pair.folder, "--data", same, *CPU, code=2)
    again = pb.data.load(data, validation=24)  # the same images
    with pytest.raises(InputError, match="best epoch was chosen on the validation images"):
        pb.calibrate(folder, again, coverage=0.5, device="cpu")
    others = pb.data.load(save_npz(tmp_path / "others.npz", count=90), validation=24)
    assert pb.calibrate(folder, others, coverage=0.5, device="cpu").certificate is not None


def test_images_that_an_adoption_chose_by_promise_nothing(pair, tmp_path, capsys):
    folder = shutil.copytree(pair.folder, tmp_path / "adopted" / "peers")
    ship = {"ship": {"run": "peers", "peer": "ensemble"}, "folders": {"peers": "peers"}}
    (tmp_path / "adopted" / "adopted.json").write_text(json.dumps(ship))
    before = contents(folder)
    for path in (folder, folder.parent, folder / "weights-a.safetensors"):
        told = refused(capsys, "calibrate", path, "--coverage", "0.5", *CPU)
        assert "`adopt` has chosen widths and what to ship by the validation images" in told
        assert "give other labelled data, as data=... in Python or --data" in told
    with pytest.raises(InputError, match="`adopt` has chosen"):
        pb.calibrate(folder, pair.data(), coverage=0.5, device="cpu")  # the same images
    with pytest.raises(InputError, match="`adopt` has chosen"):
        pb.calibrate(Run(folder)["a"], coverage=0.5, device="cpu")
    assert contents(folder) == before
    called("calibrate", folder, *CPU)  # a temperature promises nothing
    others = pb.data.load(save_npz(tmp_path / "others.npz", count=90), validation=24)
    assert pb.calibrate(folder.parent, others, coverage=0.5, device="cpu").certificate.images == 18


def test_a_promise_that_is_not_named_is_kept_if_it_was_made_by_the_same_images_and_draws(run):
    both = pb.calibrate(Run(run.folder), coverage=0.9, risk=0.05, device="cpu").certificate
    pb.calibrate(run.folder, coverage=0.9, risk=0.2, device="cpu")
    pb.calibrate(run.folder, risk=0.05, device="cpu")  # warnings are errors
    assert Run(run.folder).certificate == both
    pb.calibrate(run.folder, coverage=0.8, method="aps", device="cpu")
    found = Run(run.folder).certificate
    assert (found.risk, found.coverage.level, found.coverage.method) == (both.risk, 0.8, "aps")
    digits = run.data()
    others = pb.data.load("digits", validation=500)
    assert len(others.validation) != len(digits.validation)
    with pytest.warns(PeerbayesWarning, match=r"dropped: coverage 0\.8 \(it was made by other images or draws\)"):
        assert pb.calibrate(run.folder, others, risk=0.2, device="cpu").certificate.coverage is None
    own = Run(run.folder)["scratch"]
    pb.calibrate(own, coverage=0.9, device="cpu", data=others)
    assert own.certificate.risk.level == 0.2
    with pytest.warns(PeerbayesWarning, match=r"posterior 'scratch': dropped: risk 0\.2"):
        pb.calibrate(own, coverage=0.9, device="cpu", data=digits)


def test_no_run_is_changed_unless_all_can_be(run, pair, tmp_path, capsys):
    before = contents(run.folder)
    assert "not a run folder" in refused(capsys, "calibrate", run.folder, tmp_path / "nothere", "--risk", "0.3", *CPU)
    told = refused(capsys, "calibrate", run.folder, pair.folder, "--risk", "0.3", *CPU)
    assert "risk 0.3 (delta 0.1) can't be promised" in told
    assert contents(run.folder) == before
    other = shutil.copytree(pair.folder, tmp_path / "pair")
    words = (run.folder, other, other / "weights-a.safetensors", "--coverage", "0.5")
    records = json.loads(called("calibrate", *words, "--json", *CPU))
    assert [record["certificate"]["images"] for record in records] == [450, 18, 18]
    assert Run(other).certificate.coverage.level == Run(other)["a"].certificate.coverage.level == 0.5


def test_an_export_stays_as_it_is(run, tmp_path, capsys):
    called("export", run.folder, "--to", "hub", "--out", tmp_path / "out")
    before = contents(tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out" / "model.safetensors"):
        for words in ((), ("--coverage", "0.8")):
            told = refused(capsys, "calibrate", run.folder, path, *words, *CPU)
            assert told.endswith("calibrate the run, then export it again")
    called("evaluate", tmp_path / "out", *CPU)
    images, _ = on_test(run)
    with pytest.raises(InputError, match="promises what it was made with: calibrate the run, then export it again"):
        Run(tmp_path / "out").predict(images, risk=0.07)
    assert "is an export; the record is not written" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("words", [("--coverage", "nan"), ("--coverage", "90"), ("--risk", "0")])
def test_a_level_that_is_none_is_refused_before_anything_is_predicted(run, capsys, words):
    told = refused(capsys, "predict", run.folder, "x.png", *words, *CPU)
    assert told == f"{words[0].strip('-')} is {float(words[1])!r}, expected a number between 0 and 1"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperature": -1.0}, "certificate: temperature"),
        ({"more": 1}, "has no key 'more'"),
        ({"risk": {"level": 0.1}}, "certificate: 'risk.delta' is missing"),
        ({"classes": 3}, "certificate: "),
    ],
)
def test_a_damaged_certificate_is_one_sentence(run, capsys, change, told):
    pb.calibrate(run, coverage=0.5, by_class=True, device="cpu")
    path = run.weights_file("scratch")
    about = storage.read(path)[1]["certificate"]
    storage.describe(path, certificate=about | change)
    assert told in refused(capsys, "evaluate", run.folder, *CPU)


def test_what_learns_on_promises_nothing(run, tmp_path):
    pb.calibrate(run, coverage=0.9, device="cpu")
    peer = Run(run.folder)["scratch"]
    assert peer.certificate is not None
    recipe = load_recipe(run.recipe, ["data.validation=0", "stages.*.epochs=1"])
    again = pb.fit({"scratch": peer}, data="digits", recipe=recipe, run=tmp_path / "again", device="cpu")
    assert again["scratch"].certificate is None
    assert peer.certificate is None


def test_promises_are_checked():
    with pytest.raises(InputError, match="there is no method 'lax' of sets; did you mean 'lac'"):
        Promises(coverage=0.9, method="lax")
    assert not Promises().any


# ---- what the test split says of promises -------------------------------------------------------------------------


@pytest.mark.parametrize("by_class", [False, True])
def test_evaluation_counts_on_the_test_split_what_predictions_do_there(run, by_class):
    delta = 0.9 if by_class else 0.1
    pb.calibrate(run, coverage=0.8, risk=0.2, delta=delta, by_class=by_class, device="cpu")
    (peer,) = pb.evaluate(run, device="cpu")["peers"]
    images, labels = on_test(run)
    predicted = run.predict(images, coverage=0.8, risk=0.2, device="cpu")
    held, answered = predicted.sets.gather(1, labels[:, None])[:, 0], ~predicted.abstain
    wrong = answered & (predicted.classes != labels)
    found = peer["certificate"].pop("found")
    assert Certificate.parse(peer["certificate"], "record") == run.certificate
    assert found["images"] == len(labels) == 500
    assert (found["coverage"]["held"], found["risk"]["answered"]) == (int(held.sum()), int(answered.sum()))
    assert found["coverage"]["size"] == pytest.approx(predicted.sets.sum(1).double().mean().item())
    assert found["risk"]["errors"] == int(wrong.sum())
    assert ("by_class" in found["coverage"]) == ("by_class" in found["risk"]) == by_class
    for number in range(10) if by_class else ():
        true, said = labels == number, predicted.classes == number
        assert found["coverage"]["by_class"]["images"][number] == int(true.sum())
        assert found["coverage"]["by_class"]["held"][number] == int((held & true).sum())
        assert found["risk"]["by_class"]["answered"][number] == int((answered & said).sum())
        assert found["risk"]["by_class"]["errors"][number] == int((wrong & said).sum())


def test_promises_of_all_peers_are_judged_with_their_own_draws(pair):
    run = Run(pair.folder)
    pb.calibrate(run, coverage=0.8, device="cpu")
    images, labels = on_test(run)
    sets = run.predict(images, coverage=0.8, device="cpu").sets
    for how in ({}, {"draws": 1}, {"settle": 0.3}):
        record = pb.evaluate(run, device="cpu", **how)
        found = record["ensemble"]["certificate"]["found"]
        assert found["coverage"]["held"] == int(sets.gather(1, labels[:, None]).sum())
        assert not any("certificate" in peer for peer in record["peers"])


def test_table_and_page_say_what_was_promised_and_found(run):
    pb.calibrate(run, coverage=0.8, device="cpu")
    shown = called("evaluate", run.folder, "--out", run.folder / "all.html", *CPU)
    found = json.loads((run.folder / "evaluation.json").read_text())["peers"][0]["certificate"]["found"]
    told = f"{found['coverage']['held'] / 5:.1f} % of 500 sets hold it"
    line = shown.splitlines()[-1]
    assert line.startswith("DNN")
    assert "seed 0: promised: sets hold the true class with probability 0.8 (LAC) (shown on 450 inputs of" in line
    assert told in line
    for name in ("report.html", "all.html"):
        assert told in (run.folder / name).read_text()
