"""Run folders that are damaged: a line that a kill cut short is passed over, anything else is one sentence."""

import json
import shutil
import statistics

import pytest
import torch

from commands import QUIET, called, change, refused, write_small
from peerbayes.api.fitting import train
from peerbayes.engine.processes import environment
from peerbayes.errors import InputError, UnknownPeer
from peerbayes.posteriors import Point
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.evaluating import evaluate
from peerbayes.runs.run import Run, load, runs_below

CHANGES = ("data.validation=0", "evaluation.test_every=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs over alphas, which the figures compare."""
    folder = write_small(tmp_path_factory.mktemp("damaged"))
    for alpha in ("1", "2"):
        recipe = load_recipe(folder / "small.toml", [*CHANGES, f"stages.0.terms.mutual.alpha={alpha}"])
        train(recipe, folder / "runs" / alpha, device="cpu")
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    return shutil.copytree(trained / "runs", tmp_path / "runs")


def figure(capsys, name, runs):
    found = refused(capsys, "figure", name, runs, "--out", runs / "x.png", "--device", "cpu")
    assert not (runs / "x.png").exists()
    return found.removeprefix(f"{runs / '1'}")


# ---- run.json -----------------------------------------------------------------------------------------------------

ABOUT = {
    "[1]": "expected a JSON object, found list",
    "3": "expected a JSON object, found int",
    "null": "expected a JSON object, found NoneType",
    "{}": "'seed' is missing",
    '{"seed": "x"}': "seed: input should be a valid integer, got 'x'",
    '{"seed": 0, "finished": 1}': "finished: input should be a valid boolean, got 1",
    '{"seed": 0, "finished": true, "inputs": 3}': "inputs: input should be a table with keys classes, shape, mean, ",
    '{"seed": 0, "finished": true, "inputs": {"klasses": 3}}': "inputs has no key 'klasses'; did you mean 'classes'?",
    '{"seed": 0, "finished": true, "inputs": {"classes": 3}}': "'inputs.shape' is missing",
    '{"seed": 0, "class_names": ["a"], "inputs": {"classes": 3, "shape": [1], "mean": [], "std": []}}': (
        "class_names: 1 names of 3 classes"
    ),
}


@pytest.mark.parametrize(("text", "sentence"), ABOUT.items(), ids=ABOUT)
def test_a_damaged_run_json_is_one_sentence(trained, runs, capsys, text, sentence):
    path = runs / "1" / "run.json"
    path.write_text(text)
    again = ("train", trained / "small.toml", "--run", runs / "1", "--resume", *change(*CHANGES), *QUIET)
    for words in (("evaluate", runs / "1"), ("figure", "curves", runs), again):
        assert refused(capsys, *words).startswith(f"{path}: {sentence}")
    assert path.read_text() == text


@pytest.mark.parametrize("key", ["inputs", "hardware", "versions", "seconds"])
def test_what_run_json_does_not_say_is_named(runs, capsys, key):
    path = runs / "1" / "run.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))
    assert refused(capsys, "evaluate", runs / "1", "--device", "cpu") == f"{path}: '{key}' is missing"


# ---- metrics.jsonl ------------------------------------------------------------------------------------------------


def test_one_thread_is_no_threads(monkeypatch):
    for count, words in ((1, "CPU, 1 thread"), (2, "CPU, 2 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert environment(torch.device("cpu"))["hardware"].endswith(words)


def test_a_last_line_that_a_kill_cut_short_is_passed_over(runs):
    run = Run(runs / "1")
    path, before = runs / "1" / "metrics.jsonl", run.metrics
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    assert len(before) == 2
    for end in (first + 1, first + 100, len(data) - 2):
        path.write_bytes(data[:end])
        assert run.metrics == before[:1]
    path.write_bytes(data[:-1])  # the line is whole, but for its end
    assert run.metrics == before
    path.write_bytes(data[: first + 100])
    numbers = json.loads(called("figure", "curves", runs, "--out", runs / "x.png", "--json"))
    assert [series["epochs"] for series in numbers["experiments"][0]["series"]] == [[1], [1, 2]]


LINES = {
    b"[1]\n": "expected a JSON object, found list",
    b"{}\n": "'stage' is missing",
    b'{"stage": 1, "step": "x", "peers": {}}\n': "step: input should be a valid integer, got 'x'",
    b'{"stage": 1, "step": 1, "peers": [1]}\n': "peers: input should be a valid dictionary, got [1]",
    b'{"stage": 1, "step": 1, "peers": {"a": {"notes": {}}}}\n': "'peers.a.terms' is missing",
    b'{"stage": 1, "step": 1, "peers": {"a": {"terms": {"kl": "x"}, "notes": {}}}}\n': "peers.a.terms.kl: input should "
    "be a valid number, got 'x'",
    b'{"stage": 1, "step": 1, "peers": {"a": {"terms": {}, "notes": {}, "test_nll": 1}}}\n': "peers.a: expected "
    "test_accuracy and test_nll together",
    b'{"stage": 1,\n': "not valid JSON",
    b"\xff\xfe\n": "not valid JSON",
}


@pytest.mark.parametrize("name", ["curves", "gap", "diversity"])
@pytest.mark.parametrize(("line", "sentence"), LINES.items())
def test_other_damage_of_metrics_is_one_sentence(runs, capsys, name, line, sentence):
    path = runs / "1" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line)
    assert figure(capsys, name, runs).startswith(f"/metrics.jsonl, line 3: {sentence}")
    data = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([line, *data[:-1]]))
    assert figure(capsys, name, runs).startswith(f"/metrics.jsonl, line 1: {sentence}")


@pytest.mark.parametrize(
    ("old", "new"), [(None, None), ('"test_', '"was_'), ('"a": {"terms"', '"z": {"terms"')], ids=str
)
def test_the_last_epochs_have_to_be_there(runs, capsys, old, new):
    recipe, metrics = runs / "1" / "recipe.toml", runs / "1" / "metrics.jsonl"
    recipe.write_text(recipe.read_text().replace("last_epochs = 0", "last_epochs = 1"))
    found = json.loads(called("evaluate", runs / "1", "--json", "--device", "cpu"))["last_epochs"]
    last = [json.loads(line) for line in metrics.read_text().splitlines()][-1]["peers"]
    assert found["peers"]["a"] == {key: last["a"][f"test_{key}"] for key in ("accuracy", "nll")}
    metrics.write_text("" if old is None else metrics.read_text().replace(old, new))
    before = (runs / "1" / "evaluation.json").read_bytes()
    sentence = f"{runs / '1'}: metrics.jsonl has no test figures of the last 1 epochs"
    assert refused(capsys, "evaluate", runs / "1", "--device", "cpu") == sentence
    assert (runs / "1" / "evaluation.json").read_bytes() == before


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("epochs", "last"), [(12, 10), (6, 5), (2, 3)])
def test_the_mean_over_the_last_epochs_is_of_so_many_epochs(tmp_path, every, epochs, last):
    changes = [f"stages.0.epochs={epochs}", f"evaluation.test_every={every}", f"evaluation.last_epochs={last}"]
    run = train(load_recipe(write_small(tmp_path) / "source.toml", changes), tmp_path / "run", device="cpu")
    lines, count = [line["peers"]["only"] for line in run.metrics], min(last, epochs)
    assert ["test_nll" in line for line in lines] == [bool(every)] * (epochs - count) + [True] * count
    found = evaluate(run, device="cpu")["last_epochs"]
    assert found["epochs"] == count
    for key in ("accuracy", "nll"):
        mean = statistics.fmean(line[f"test_{key}"] for line in lines[-count:])
        assert found["peers"]["only"][key] == pytest.approx(mean, rel=1e-12)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[-1:]))
    if count > 1:
        with pytest.raises(InputError, match=f"no test figures of the last {count} epochs"):
            evaluate(run, device="cpu")


def test_a_record_is_not_written_where_its_page_can_not_be_made(runs, capsys):
    metrics = runs / "1" / "metrics.jsonl"
    metrics.write_bytes(b"[1]\n" + metrics.read_bytes())
    assert "metrics.jsonl, line 1: " in refused(capsys, "evaluate", runs / "1", "--device", "cpu")
    assert not (runs / "1" / "evaluation.json").exists()


def test_an_interrupted_run_goes_on_whatever_its_metrics_hold(trained, runs):
    run = runs / "1"
    whole, path = Run(run).metrics, run / "metrics.jsonl"
    newest = max(run.glob("checkpoint-*"))  # a slow machine writes more than one
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"finished": False}))
    path.write_bytes(b"[1]\n" + path.read_bytes() + b'{"step": 3, "pee')
    train(load_recipe(trained / "small.toml", CHANGES), run, device="cpu", resume=True)
    assert newest.is_file()
    assert Run(run).metrics == whole


# ---- evaluation.json ----------------------------------------------------------------------------------------------

RECORDS = {
    "[]": "expected a JSON object, found list",
    "3": "expected a JSON object, found int",
    "{}": "'peers' is missing",
    '{"peers": []}': "peers: list should have at least 1 item after validation, not 0, got []",
    '{"peers": [3]}': "peers.0: input should be a valid dictionary",
    '{"peers": [{"nll": 1}]}': "'peers.0.accuracy' is missing",
    '{"peers": [{"nll": 1, "accuracy": "x"}]}': "peers.0.accuracy: input should be a valid number, got 'x'",
    '{"peers": [{"nll": 1, "accuracy": 1}], "cohort": 3}': "cohort: input should be a valid dictionary, got 3",
}


@pytest.mark.parametrize("name", ["spread", "best-alpha", "grid"])
@pytest.mark.parametrize(("text", "sentence"), RECORDS.items())
def test_a_record_of_another_shape_is_one_sentence(runs, capsys, name, text, sentence):
    (runs / "1" / "evaluation.json").write_text(text)
    assert figure(capsys, name, runs).startswith(f"/evaluation.json: {sentence}")


@pytest.mark.parametrize("words", [["evaluate"], ["figure", "curves"], ["distill"], ["compress"]])
def test_a_record_is_no_run(runs, capsys, words):
    found = refused(capsys, *words, runs / "1" / "evaluation.json")
    assert "run folder" in found


def test_only_a_number_makes_a_folder_that_of_a_seed(runs):
    for name in ("seed0", "seed1", "seed0-shared", "seedling"):
        shutil.copytree(runs / "1", runs / "several" / name)
    assert [path.name for path in runs_below(runs / "several")] == ["seed0", "seed1"]


def test_a_run_is_shown_with_what_it_holds_and_knows_its_peers(runs):
    run = Run(runs / "1")
    assert repr(run) == f"Run('{runs / '1'}': {run.recipe.name}, seed 0, peers {', '.join(run)})"
    with pytest.raises(
        UnknownPeer, match=rf"^{runs / '1'}: there is no peer 'nobody'; known: {', '.join(sorted(run))}$"
    ):
        run["nobody"]
    assert "nobody" not in run
    assert run.get("nobody") is None
    first = next(iter(run))
    network = run[first].materialise()
    with pytest.raises(InputError, match=f"networks has none for peer '{first}', but for other"):
        load(runs / "1", networks={"other": network})[first]
    with pytest.raises(InputError, match=r"networks is of type .*, expected networks by peer"):
        load(runs / "1", networks=network)


def test_a_folder_of_runs_is_refused_where_one_run_is_wanted_and_they_are_named(runs, tmp_path, capsys):
    named = ", ".join(str(runs / name) for name in "12")
    sentence = f"{runs}: not a run folder, but one of runs; name them one by one: {named}"
    new = ("--run", tmp_path / "new", *QUIET)
    assert refused(capsys, "compress", runs, *new) == sentence
    assert refused(capsys, "distill", runs, *new) == sentence
    assert refused(capsys, "distill", runs / "1", runs, *new) == sentence
    assert [record["run"] for record in json.loads(called("size", runs, "--json"))[::2]] == named.split(", ")
    for number in range(3, 8):
        shutil.copytree(runs / "1", runs / str(number))
    assert refused(capsys, "compress", runs, *new).endswith(f"{runs / '5'} and 2 more")
    assert not (tmp_path / "new").exists()


def test_weights_of_another_kind_are_not_those_of_the_recipe(runs, capsys):
    run = load(runs / "1")
    name = next(iter(run))
    path = run.weights_file(name)
    Point(run[name].materialise()).save(path)
    sentence = f"{path}: holds a point posterior; the run's recipe has a mean_field one"
    for words in (("evaluate", runs / "1"), ("size", runs / "1")):
        assert refused(capsys, *words) == sentence
