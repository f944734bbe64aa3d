"""Predictions of any library: judged as `evaluate` judges a run, to the last digit, and refused in one sentence."""

import csv
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import peerbayes as pb
from commands import called, refused
from peerbayes.api.fitting import train
from peerbayes.errors import InputError
from peerbayes.metrics import temper
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports import tables
from peerbayes.reports.evaluating import evaluate

CPU = torch.device("cpu")
SETTINGS = ["data.validation=100", "stages.*.epochs=2", "evaluation.draws=5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a plain network and of a Bayesian pair; with predictions of their test and validation splits."""
    folder = tmp_path_factory.mktemp("judged")
    pair = load_recipe("mutual/digits-vanilla", SETTINGS)
    pair = pair.model_copy(update={"peers": [peer.model_copy(update={"start_from": None}) for peer in pair.peers]})
    found = []
    for recipe in (load_recipe("mutual/digits-dnn", SETTINGS), pair):
        for seed in (0, 1):
            run = train(recipe, folder / f"{recipe.method}-{seed}", seed=seed, device="cpu")
            found.append(run)
            for name in run:
                save(run, name, folder / f"{recipe.method}-{name}-seed{seed}.npz")
    return found


def predicted(run, name, split):
    return run.predict_split(name, split, run.recipe.evaluation.draws, CPU)


def save(run, name, path):
    """Save predictions as somebody who knows numpy alone would."""
    data = run.data()
    log_p, labels, disagreement, _ = predicted(run, name, data.test)
    held, held_labels, _, _ = predicted(run, name, data.validation)
    arrays = {"log_probabilities": log_p, "labels": labels, "validation_log_probabilities": held}
    arrays |= {"validation_labels": held_labels, "dataset": "digits", "method": run.recipe.method}
    if run[name].stochastic:
        arrays["disagreement"] = disagreement
    np.savez(path, **{key: np.asarray(value) for key, value in arrays.items()})


def file_of(run, name):
    return run.folder.parent / f"{run.recipe.method}-{name}-seed{run.seed}.npz"


def test_records_are_those_of_evaluate_to_the_last_digit(runs):
    for run in runs:
        expected = evaluate(run, device="cpu")
        for peer in expected["peers"]:
            (record,) = pb.judge(file_of(run, peer["name"]), bins=20)
            (found,) = record["peers"]
            same = {key: value for key, value in peer.items() if key not in ("name", "bytes", "draws_spent")}
            assert {key: found[key] for key in same} == same
            assert set(found) == {*same, "name"}
            assert (record["method"], record["seed"], record["dataset"]) == (run.recipe.method, run.seed, "digits")
            assert record["ece_bins"] == expected["ece_bins"]


def test_the_command_prints_the_table_of_evaluate_with_paired_differences(runs, tmp_path):
    plain = [run for run in runs if len(run) == 1]
    bayesian = [run for run in runs if len(run) == 2]
    files = [file_of(run, next(iter(run))) for run in (*plain, *bayesian)]
    words = ("--calibrated", "--retention", "--bins", "20")
    found = called("judge", *files, *words, "--out", tmp_path / "page.html").splitlines()
    records = [evaluate(run, device="cpu") for run in (*plain, *bayesian)]
    for record in records:  # the first peer alone, as it is judged here
        record["peers"] = [{**record["peers"][0], "name": ""}]
        record.pop("ensemble", None)
    expected = tables.text_table(records, calibrated=True, retention=True).splitlines()
    assert found == expected
    assert any("paired over 2 seeds" in line for line in found)
    page = (tmp_path / "page.html").read_text()
    for row in tables.rows(records):
        for cell in row.cells:
            assert f"<td>{cell}</td>" in page
    assert 'aria-label="Reliability diagram"' in page
    assert page.count('<svg role="img"') == 3  # with two rankings of images kept
    assert "<img" not in page
    assert "http" not in page.replace("http-equiv", "")
    printed = json.loads(called("judge", *files, "--json", "--bins", "20", "--out", tmp_path / "again.html"))
    assert [record["seed"] for record in printed] == [0, 1, 0, 1]
    assert (tmp_path / "again.html").read_text() == page


def test_figures_are_those_of_evaluate(runs):
    from peerbayes.reports.charts import reliability_chart, retention_chart

    runs = [run for run in runs if len(run) == 1]
    records = [evaluate(run, device="cpu") for run in runs]
    judged = pb.judge(*(file_of(run, "scratch") for run in runs), bins=20)
    assert reliability_chart(judged) == reliability_chart(records)
    assert retention_chart(judged, "entropy") == retention_chart(records, "entropy") != []


def test_a_table_of_run_predict_with_labels_is_judged(runs, tmp_path):
    run = next(run for run in runs if len(run) == 1)
    test = run.data().test
    images, labels = test.batch(torch.arange(len(test)), CPU)
    run.predict(images, calibrated=False, device="cpu").to_csv(tmp_path / "mine.csv", probabilities=True)
    rows = list(csv.reader((tmp_path / "mine.csv").read_text().splitlines()))
    lines = [["label", *rows[0]], *([str(y), *row] for y, row in zip(labels.tolist(), rows[1:], strict=True))]
    (tmp_path / "mine.csv").write_text("\n".join(",".join(line) for line in lines))
    record, (found,) = evaluate(run, device="cpu"), pb.judge(tmp_path / "mine.csv", bins=20)
    assert found["method"] == "mine"
    for key in ("accuracy", "nll", "ece", "adaptive_ece", "brier"):
        assert found["peers"][0][key] == pytest.approx(record["peers"][0][key], abs=1e-6)
    for ranking in ("entropy", "disagreement"):
        curves = [one["peers"][0]["selective"][ranking]["retention"] for one in (found, record)]
        assert curves[0] == pytest.approx(curves[1], abs=1e-9)


# ---- forms -----------------------------------------------------------------------------------------------------------


def made(count=60, classes=4, seed=0):
    chance = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((count, classes), generator=chance, dtype=torch.float64)
    return logits, torch.randint(0, classes, (count,), generator=chance)


def figures(record):
    return record["peers"][0]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_logits_log_probabilities_and_probabilities_agree(kind, tmp_path):
    logits, labels = made()
    logits = logits.to(kind)
    exact = logits.double().log_softmax(-1)
    expected = -float(exact.gather(1, labels[:, None]).mean())
    near = {torch.float64: 1e-12, torch.float32: 1e-6}.get(kind, 2e-2)
    for name, values in (
        ("logits", logits),
        ("log_probabilities", exact.to(kind)),
        ("probabilities", exact.exp().to(kind)),
    ):
        (record,) = pb.judge({name: values, "labels": labels})
        assert figures(record)["nll"] == pytest.approx(expected, abs=near)
        assert figures(record)["disagreement"] == 0
        if kind != torch.bfloat16:
            np.savez(tmp_path / f"{name}.npz", **{name: values.numpy(), "labels": labels.numpy().astype(np.uint8)})
            assert figures(pb.judge(tmp_path / f"{name}.npz")[0]) == figures(record)


def test_draws_are_averaged_as_probabilities_and_disagree():
    logits, labels = torch.stack([made(seed=seed)[0] for seed in range(3)]), made()[1]
    p = logits.softmax(-1)
    mean = p.mean(0)
    spread = -(mean * mean.log()).sum(-1) + (p * p.log()).sum(-1).mean(0)
    (found,) = pb.judge({"logits": logits, "labels": labels})
    assert found["draws"] == 3
    assert figures(found)["disagreement"] == pytest.approx(float(spread.mean()), abs=1e-12)
    (alone,) = pb.judge({"probabilities": mean, "labels": labels, "disagreement": spread})
    for key in ("accuracy", "nll", "ece", "brier", "aurc"):
        assert figures(found)[key] == pytest.approx(figures(alone)[key], abs=1e-9)
    assert figures(found)["aurc"] == figures(found)["selective"]["disagreement"]["aurc"]


def test_a_temperature_is_chosen_on_a_validation_split():
    logits, labels = made(400)
    truth = torch.distributions.Categorical(logits=logits / 3).sample()
    arrays = {"logits": logits[:200], "labels": truth[:200]}
    arrays |= {"validation_logits": logits[200:], "validation_labels": truth[200:]}
    (found,) = pb.judge(arrays)
    temperature = figures(found)["temperature"]
    assert temperature == pytest.approx(pb.metrics.fit_temperature(logits[200:], truth[200:], width=0.5), rel=1e-9)
    tempered = temper(logits[:200], temperature)
    assert figures(found)["cnll"] == pytest.approx(pb.metrics.nll_from_log(tempered, truth[:200]), rel=1e-12)
    assert "temperature" not in figures(pb.judge({"logits": logits, "labels": labels})[0])


@given(
    st.lists(st.sampled_from(["cat", "dog", "a, b", "p(x)"]), min_size=2, max_size=4, unique=True),
    st.integers(1, 20),
    st.booleans(),
)
def test_tables_are_read_by_the_names_of_their_classes(tmp_path_factory, names, count, headed):
    logits, labels = made(count, len(names), seed=count)
    p = logits.softmax(-1)
    path = tmp_path_factory.mktemp("table") / "mine.csv"
    plain = not headed and "p(x)" not in names
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", *(f"p({name})" for name in names), "label"] if not plain else [*names, "Label"])
        for row, label in zip(p.tolist(), labels.tolist(), strict=True):
            rows.writerow([*(["x.png"] if not plain else []), *row, names[label] if count % 2 else label])
    assert figures(pb.judge(path)[0]) == figures(pb.judge({"probabilities": p, "labels": labels})[0])


def test_tables_of_logits_say_so(tmp_path):
    logits, labels = made(9, 3)
    for name, heading, options in (("a", "logit({})", {}), ("b", "{}", {"logits": True})):
        lines = [",".join([*(heading.format(k) for k in range(3)), "label"])]
        lines += [",".join(map(str, [*row, y])) for row, y in zip(logits.tolist(), labels.tolist(), strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
        (found,) = pb.judge(tmp_path / f"{name}.csv", **options)
        assert figures(found) == figures(pb.judge({"logits": logits, "labels": labels})[0])


def test_names_of_files_say_method_and_seed(tmp_path):
    logits, labels = made(20)
    for name in ("mine-seed0", "mine_seed12", "seed3", "other", "seedling"):
        np.savez(tmp_path / f"{name}.npz", logits=logits, labels=labels)
    np.savez(tmp_path / "x-seed1.npz", logits=logits, labels=labels, method="theirs", seed=7)
    found = {path.stem: pb.judge(path)[0] for path in tmp_path.glob("*.npz")}
    assert {stem: (record["method"], record["seed"]) for stem, record in found.items()} == {
        "mine-seed0": ("mine", 0),
        "mine_seed12": ("mine", 12),
        "seed3": (tmp_path.name, 3),
        "other": ("other", 0),
        "seedling": ("seedling", 0),
        "x-seed1": ("theirs", 7),
    }


def test_seeds_are_paired_on_the_same_labels_alone(tmp_path):
    (logits, labels), others = made(50), made(50, seed=9)[1]
    sources = [{"method": m, "seed": s, "logits": logits + s, "labels": labels} for m in "ab" for s in range(3)]
    text = tables.text_table(pb.judge(*sources))
    assert "b − a, paired over 3 seeds" in text
    assert "data" not in text.splitlines()[0]
    apart = pb.judge(sources[0], {"method": "b", "logits": logits, "labels": others})
    assert [record["dataset"] for record in apart] == ["50 inputs of 4 classes", "50 inputs of 4 classes (2)"]
    assert "b − a" not in tables.text_table(apart)
    named = [{**one, "dataset": "mine"} for one in (sources[0], {"method": "b", "logits": logits, "labels": others})]
    assert [record["dataset"] for record in pb.judge(*named)] == ["mine", "mine"]


def test_no_network_is_needed_and_nothing_is_drawn_without_a_page():
    import subprocess
    import sys

    code = "import sys, peerbayes as pb, numpy as np\n"
    code += "pb.judge({'probabilities': np.full((4, 2), .5), 'labels': np.zeros(4, int)})\n"
    code += "print([m for m in ('matplotlib', 'jinja2', 'timm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


# ---- refusals --------------------------------------------------------------------------------------------------------

P = np.full((4, 2), 0.5)
Y = np.array([0, 1, 0, 1])


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"probabilities": P}, "has no labels, expected the true class of each input"),
        ({"probabilities": P, "y_true": Y}, r"has no labels, expected the true class of each input \(it has y_true\)"),
        ({"labels": Y}, "has no probabilities, expected one of probabilities, log_probabilities, logits"),
        ({"probs": P, "labels": Y}, "has no probabilities, expected one of .*it has: probs"),
        ({"probabilities": P, "logits": P, "labels": Y}, "has probabilities and logits, expected one of"),
        ({"probabilities": changed(P, (2, 0), 0.6), "labels": Y}, r"probabilities, row 2 adds to 1\.1, expected 1 "),
        ({"probabilities": changed(P, (3, 1), np.nan), "labels": Y}, "probabilities, row 3 holds NaN"),
        ({"probabilities": np.array([[1.5, -0.5]] * 4), "labels": Y}, "row 0 holds a negative number"),
        ({"log_probabilities": P, "labels": Y}, r"log_probabilities, row 0 adds to 3\.297 after exp, expected 1"),
        ({"logits": changed(P, (1, 0), np.inf), "labels": Y}, "logits, row 1 has no number above −inf, or one of"),
        ({"logits": np.stack([P, changed(P, (1, 0), np.nan)]), "labels": Y}, "logits, row 1 holds NaN"),
        ({"probabilities": np.stack([P, P * 2]), "labels": Y}, "probabilities, draw 1, row 0 adds to 2, expected 1"),
        ({"probabilities": P, "labels": changed(Y, 2, 2)}, "labels, row 2 is 2, expected classes from 0 to 1"),
        ({"probabilities": P, "labels": changed(Y, 1, -1)}, "labels, row 1 is -1, expected classes from 0 to 1"),
        ({"probabilities": P, "labels": changed(Y.astype(np.uint64), 1, 2**64 - 1)}, "labels, row 1 is 184467440737"),
        ({"probabilities": P, "labels": Y[:3]}, "3 labels, but predictions of 4 inputs"),
        (
            {"probabilities": P, "labels": Y.astype(float)},
            r"labels are float64 of shape \(4,\), expected whole numbers",
        ),
        (
            {"probabilities": P, "labels": np.eye(2, dtype=int)[Y]},
            r"labels are int64 of shape \(4, 2\), expected whole",
        ),
        ({"probabilities": P[:, 0], "labels": Y}, r"probabilities have shape \(4,\), expected \(N, C\)"),
        ({"probabilities": P[:, :1], "labels": Y}, r"probabilities have shape \(4, 1\), expected \(N, C\)"),
        ({"probabilities": P[:0], "labels": Y[:0]}, r"probabilities have shape \(0, 2\), expected \(N, C\)"),
        ({"probabilities": P.astype(str), "labels": Y}, "probabilities are of type <U32, expected numbers"),
        (
            {"probabilities": P, "labels": Y, "disagreement": Y[:2]},
            r"disagreement has shape \(2,\), expected 4 numbers",
        ),
        ({"probabilities": P, "labels": Y, "disagreement": -Y}, "expected 4 numbers from 0 on"),
        ({"probabilities": P, "labels": Y, "seed": -1}, "seed is '-1', expected a whole number from 0 on"),
        ({"probabilities": P, "labels": Y, "validation_labels": Y}, "has no validation_probabilities, expected one of"),
        ({"probabilities": P, "labels": Y, "validation_probabilities": P}, "has no validation_labels"),
        (
            {"probabilities": P, "labels": Y, "validation_logits": np.ones((4, 3)), "validation_labels": Y},
            "3 classes on the validation split, but 2 else",
        ),
    ],
)
def test_what_is_wrong_with_arrays_is_one_sentence(arrays, told, tmp_path, capsys):
    with pytest.raises(InputError, match=told):
        pb.judge(arrays)
    np.savez(tmp_path / "mine.npz", **arrays)
    sentence = refused(capsys, "judge", tmp_path / "mine.npz", "--out", tmp_path / "page.html")
    assert sentence.startswith(f"{tmp_path / 'mine.npz'}: ")
    assert re.search(told, sentence)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("labels", [("1.0", "0.0"), ("1.000000000000000000e+00", "0e0")])
def test_labels_may_be_whole_numbers_as_numpy_and_pandas_write_them(labels, tmp_path):
    rows = [".25,.75,{}", ".5,.5,{}"]
    found = []
    for number, cells in enumerate((("1", "0"), labels)):
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join(["a,b,label", *(row.format(label) for row, label in zip(rows, cells, strict=True))]))
        found.append(pb.judge(path)[0]["peers"][0]["nll"])
    assert found[0] == found[1] == pytest.approx(-(math.log(0.75) + math.log(0.5)) / 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no column 'label' of true classes; its columns are none"),
        ("a,b\n.5,.5\n", "has no column 'label' of true classes; its columns are a, b"),
        ("a,b,label\n", "expected one row an input, found none"),
        ("a,label\n1,0\n", "expected a column of probabilities for each class beside 'label'"),
        ("a,b,label\n.5,x,0\n", "row 2, column 'b': 'x' is not a number"),
        ("a,b,label\n.5,,0\n", "row 2, column 'b': '' is not a number"),
        ("a,b,label\n.5,.5,0\n.5,.5\n", "row 3: has 2 cells, expected 3 as in the first row"),
        ("a,b,label\n.5,.5,1.5\n", "row 2: label '1.5' is neither the heading of a class nor a whole number"),
        ("a,b,label\n.5,.5,bird\n", "row 2: label 'bird' is neither the heading of a class nor a whole number"),
        ("a,b,label\n.5,.5,7\n", "labels, row 0 is 7, expected classes from 0 to 1"),
        ("a,b,label\n2,3,1\n", "probabilities, row 0 adds to 5, expected 1 (are these logits?)"),
        ("a,b,label\n.5,nan,1\n", "probabilities, row 0 holds NaN"),
        ('a,b,label\n".5,.5,1\n', "cannot be read as CSV"),
    ],
)
def test_what_is_wrong_with_tables_is_one_sentence(text, told, tmp_path, capsys):
    (tmp_path / "mine.csv").write_text(text)
    assert told in refused(capsys, "judge", tmp_path / "mine.csv", "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_what_is_no_file_of_predictions_is_one_sentence(tmp_path, capsys):
    np.savez(tmp_path / "pickled.npz", probabilities=P, labels=np.array([{}] * 4, dtype=object))
    assert "'labels' is pickled Python objects, which are not read" in refused(
        capsys, "judge", tmp_path / "pickled.npz"
    )
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, P)
    assert "holds a single array, expected several" in refused(capsys, "judge", tmp_path / "one.npz")
    (tmp_path / "text.npz").write_text("hello")
    assert "not a readable .npz file" in refused(capsys, "judge", tmp_path / "text.npz")
    np.savez(tmp_path / "whole.npz", probabilities=P, labels=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    assert "not a readable .npz file" in refused(capsys, "judge", tmp_path / "cut.npz")
    (tmp_path / "bytes.csv").write_bytes(b"a,b,label\n\xff,1,0\n")
    assert "cannot be read as CSV" in refused(capsys, "judge", tmp_path / "bytes.csv")
    (tmp_path / "p.txt").write_text("x")
    assert "expected a .npz or .csv file of predictions" in refused(capsys, "judge", tmp_path / "p.txt")
    assert "there is no such file" in refused(capsys, "judge", tmp_path / "gone.npz")
    sentence = refused(capsys, "judge", tmp_path / "whole.npz", "--calibrated")
    assert "whole.npz: has no validation_labels, on which a temperature could be chosen" in sentence
    for sources, told in (((), "there is nothing to judge"), ((3,), r"or mappings of arrays, got a int")):
        with pytest.raises(InputError, match=told):
            pb.judge(*sources)
    with pytest.raises(InputError, match="predictions: labels can't be made an array"):
        pb.judge({"probabilities": P, "labels": [[1], [1, 2]]})


def test_an_infinite_nll_is_shown():
    (found,) = pb.judge({"probabilities": np.array([[1.0, 0.0]] * 2), "labels": np.array([0, 1])})
    assert math.isinf(figures(found)["nll"])
    assert "inf" in tables.text_table([found])
