"""The account of weights files: every byte, every count, and the forms beside them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import peerbayes as pb
from peerbayes import cli
from peerbayes import reports as reporting
from peerbayes.api.fitting import train
from peerbayes.errors import PeerbayesWarning
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import load_recipe
from peerbayes.recipes.recipe_data import load_data
from peerbayes.reports.file_sizes import paper_count, size_table
from peerbayes.runs.run import Run
from peerbayes.training.reporters import waiting

SMALL = ["stages.0.epochs=1", "evaluation.draws=3", "data.batch_size=600", "gradient_share_every=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    point = train(load_recipe("sharing/digits-resnet8-dnn", SMALL), folder / "point", device="cpu")
    start = [*SMALL, f"peers.0.start_from={point.folder}"]
    train(load_recipe("sharing/digits-resnet8-stage1", start), folder / "mean_field", device="cpu")
    start = [*SMALL, f"peers.0.start_from={folder / 'mean_field'}", "peers.0.posterior.components=30"]
    train(load_recipe("sharing/digits-resnet8-shared", start), folder / "shared", device="cpu")
    rank_one = 'peers.0.posterior={kind="rank_one", members=2, gaussian=true}'
    train(load_recipe("sharing/digits-resnet8-dnn", [*SMALL, rank_one]), folder / "rank_one", device="cpu")
    return folder


@pytest.fixture(scope="module")
def accounts(runs):
    """The account of each kind, as machines get it."""
    with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(["size", str(runs), "--json"])
    assert end.value.code == 0
    return {record["kind"]: record for record in json.loads(printed.getvalue())}


def call(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main(["size", *map(str, words)])
    printed = capsys.readouterr()
    return end.value.code, printed.out, printed.err


@pytest.mark.parametrize("kind", ["point", "mean_field", "rank_one", "shared"])
def test_every_byte_of_the_file_is_in_one_part(kind, runs, accounts):
    record = accounts[kind]
    posterior = pb.load(runs / kind)["net"]
    file = runs / kind / "weights-net.safetensors"
    assert record["kind"] == kind
    assert record["file"] == str(file)
    assert record["bytes"] == file.stat().st_size == sum(record["parts"].values())
    assert record["trainable"] == sum(p.numel() for p in posterior.parameters())
    assert record["weights"] == posterior.layout.size
    forms = {form["name"]: form for form in record["forms"]}
    assert next(iter(forms)) == "this file"
    whole = forms["network, float32" if kind == "point" else "float32"]
    for form in forms.values():
        assert form["percent"] == pytest.approx(100 * form["bytes"] / whole["bytes"])
        assert "nll" not in form


def test_a_record_says_what_a_codebook_holds_and_what_was_changed_for_it(runs, accounts):
    record = reporting.evaluate(runs / "shared", device="cpu")
    counts = {key: accounts["shared"][key] for key in ("outliers", "blended", "components")}
    told = json.loads((runs / "shared" / "sharing.json").read_text())["net"]
    counts |= {"components_at_first": 30, "merged": told["merging"].get("merged", 0)}
    assert record["peers"][0]["codebook"] == counts
    changed = {line.partition("=")[0]: line.partition("=")[2] for line in record["changed"]}
    assert changed["peers.0.start_from"] == "mean_field"
    assert changed["peers.0.posterior.components"] == "30"
    assert str(runs) not in json.dumps(record)
    assert "codebook" not in reporting.evaluate(runs / "point", device="cpu")["peers"][0]


def test_predictions_that_take_long_have_a_bar_on_a_terminal(runs):
    """In a terminal of its own; elsewhere, and for short ones, there is none."""
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    import pty

    shown = {}
    for patience in (-1.0, 60.0):
        code = (
            "import functools, peerbayes.cli.look as look\n"
            f"look.waiting = functools.partial(look.waiting, patience={patience})\n"
            "from peerbayes import cli\n"
            f"cli.main(['size', {str(runs / 'shared')!r}, '--evaluate', '--device', 'cpu'])\n"
        )
        upper, lower = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=lower, stdin=lower, text=True, timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "80"},
        )  # fmt: skip
        os.close(lower)
        shown[patience] = b""
        with contextlib.suppress(OSError):  # what Linux says at its end
            while part := os.read(upper, 1 << 16):
                shown[patience] += part
        os.close(upper)
        assert done.returncode == 0, shown[patience].decode()
        assert "predicting" not in done.stdout
        assert "int8" in done.stdout or "8 bits" in done.stdout
    assert b"predicting" in shown[-1.0]
    assert b"100%" in shown[-1.0]
    assert b"predicting" not in shown[60.0]


@pytest.mark.parametrize(
    ("patience", "quiet", "shown"), [(-1.0, False, True), (60.0, False, False), (-1.0, True, False)]
)
def test_predictions_that_take_long_have_lines_elsewhere(runs, capsys, patience, quiet, shown):
    run = Run(runs / "point")
    with waiting(quiet, patience):
        run.predict_split("net", run.data().test, 1, torch.device("cpu"))
    found = capsys.readouterr().err
    assert ("predicting: 100%" in found) is shown
    assert ("predicting" in found) is shown


def test_parts_of_a_shared_file_are_those_of_its_tensors(runs, accounts):
    record = accounts["shared"]
    tensors, _ = storage.read(runs / "shared" / "weights-net.safetensors")
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    parts = record["parts"]
    assert list(parts) == ["index", "components", "outliers", "blends", "scales", "everything else", "header"]
    assert parts["index"] == size["means/index"]
    assert parts["outliers"] == size["means/outlier"]
    assert parts["components"] == size["means/component"]
    assert parts["blends"] == sum(size[f"means/blend_{name}"] for name in ("first", "step", "weight"))
    assert parts["scales"] == size["scales/component"] + size["scales/outlier"]
    data = (runs / "shared" / "weights-net.safetensors").read_bytes()
    assert parts["header"] == 8 + int.from_bytes(data[:8], "little")


def test_counts_are_those_of_the_paper_and_of_training(runs, accounts):
    record = accounts["shared"]
    posterior = pb.load(runs / "shared")["net"]
    outliers, blended, components = len(posterior.outlier), len(posterior.blended), len(posterior.component)
    assert record["paper_count"] == outliers + blended + 2 * components
    assert record["trainable"] == 2 * outliers + 5 * components + posterior.rest.numel()
    assert round(paper_count(23013, 10885, 2217), -3) == 38_000  # a row of the paper's tables


def test_the_same_posterior_is_the_one_that_was_shared_or_its_own_numbers(runs, accounts, capsys, tmp_path):
    record = accounts["shared"]
    source = pb.load(runs / "mean_field")
    assert record["same_posterior"] == str(source.weights_file("net"))
    forms = {form["name"]: form["bytes"] for form in record["forms"]}
    field = source["net"]
    others = sum(t.numel() * t.element_size() for n, t in field.state().items() if n.startswith(("rest/", "network/")))
    assert forms["float32"] == 8 * field.layout.size + others
    shutil.copytree(runs / "shared", tmp_path / "alone")
    recipe = (tmp_path / "alone" / "recipe.toml").read_text()
    (tmp_path / "alone" / "recipe.toml").write_text(recipe.replace(str(runs / "mean_field"), str(tmp_path / "gone")))
    (record,) = json.loads(call(capsys, tmp_path / "alone" / "weights-net.safetensors", "--json")[1])
    assert record["same_posterior"] is None
    shared = pb.load(runs / "shared")["net"]
    rest = sum(t.numel() * t.element_size() for n, t in shared.state().items() if n.startswith(("rest/", "network/")))
    assert {f["name"]: f["bytes"] for f in record["forms"]}["float32"] == 8 * shared.layout.size + rest


def test_forms_are_judged_as_runs_are(runs, capsys):
    (record,) = json.loads(call(capsys, runs / "shared", "--evaluate", "--json", "--device", "cpu")[1])
    forms = {form["name"]: form for form in record["forms"]}
    for name, kind in (("this file", "shared"), ("float32", "mean_field")):
        peer = reporting.evaluate(runs / kind, device="cpu")["peers"][0]
        assert all(forms[name][key] == peer[key] for key in ("accuracy", "nll", "ece"))
    network = pb.load(runs / "mean_field")["net"].materialise().eval()
    images, labels = load_data(load_recipe(runs / "shared" / "recipe.toml")).test.batch(torch.arange(500), "cpu")
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(network(images.float() / 255), labels)
    assert forms["network, float32"]["nll"] == pytest.approx(float(nll), rel=1e-4)
    assert forms["network, 3 bits"]["nll"] != forms["network, float32"]["nll"]


def test_the_table_shows_every_part_and_form(accounts):
    record = accounts["shared"]
    judged = [form | {"accuracy": 0.5, "nll": 1.25, "ece": 0.125} for form in record["forms"]]
    text = size_table(record | {"forms": judged})
    whole = next(form["bytes"] for form in record["forms"] if form["name"] == "float32")
    for part, size in (record["parts"] | {"total": record["bytes"]}).items():
        assert any(line.split() == [*part.split(), f"{size:,}", f"{100 * size / whole:.1f}"] for line in
                   text.splitlines())  # fmt: skip
    assert text.count("% of float32") == 2  # one base for both tables
    for form in record["forms"]:
        words = [*form["name"].split(), f"{form['bytes']:,}", f"{form['percent']:.1f}", "50.00", "1.250", "0.125"]
        assert any(line.split() == words for line in text.splitlines())
    assert f"paper count {record['paper_count']:,} = " in text
    assert f"trainable numbers {record['trainable']:,}" in text
    assert f"beside {record['same_posterior']}:" in text
    plain = size_table(accounts["point"])
    assert "ACC" not in plain
    assert plain.count("% of network, float32") == 2


def spoil(folder, how):
    file = folder / "weights-net.safetensors"
    if how == "unfinished":
        about = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(about | {"finished": False}))
    elif how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        tensors, about = storage.read(file)
        index = tensors["means/index"]
        tensors["means/index"] = torch.cat([index[: len(index) // 16 * 8 - 1], torch.ones(1, dtype=torch.uint8)])
        storage.write(file, tensors, about)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("unfinished", "the run is not finished"),
        ("missing", "weights-net.safetensors: no such file"),
        ("cut", "weights-net.safetensors: not a readable safetensors file"),
        ("index", "weights-net.safetensors: 'means/index': index: damaged"),
    ],
)
def test_what_can_not_be_counted_is_one_sentence(how, sentence, runs, tmp_path, capsys):
    shutil.copytree(runs / "shared", tmp_path / "run")
    spoil(tmp_path / "run", how)
    code, out, err = call(capsys, tmp_path / "run")
    assert code == 2
    assert out == ""
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_what_is_no_run_is_one_sentence(tmp_path, capsys):
    code, _, err = call(capsys, tmp_path)
    assert code == 2
    assert "neither a run folder nor a folder of runs" in err


def test_a_weights_file_of_no_run_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "plain.safetensors")
    assert (code, out) == (2, "")
    assert err == "peerbayes: plain.safetensors: there is no such file\n"
    (tmp_path / "plain.safetensors").write_bytes(b"")
    code, out, err = call(capsys, "plain.safetensors")
    assert (code, out) == (2, "")
    assert err == "peerbayes: plain.safetensors: not a weights file of a run (there is no recipe.toml beside it)\n"


def altered(run, place, **tensors):
    """Copy a run, and put other values into its weights file, as if training had ended there."""
    shutil.copytree(run, place)
    file = place / "weights-net.safetensors"
    found, about = storage.read(file)
    storage.write(file, found | {name: change(found[name]) for name, change in tensors.items()}, about)
    return place


def test_scales_of_zero_count_as_the_least_of_the_others(runs, tmp_path, capsys):
    def collapsed(rho):
        return torch.cat([torch.full_like(rho[:1], -1000.0), rho[1:]])

    place = altered(runs / "mean_field", tmp_path / "zero", **{"rho/conv.weight": collapsed})
    assert pb.load(place)["net"].std.min() == 0
    code, out, _ = call(capsys, place)
    assert code == 0
    assert "int8, 1-bit scales" in out


def test_a_codebook_is_not_shown_beside_a_posterior_that_it_was_not_made_of(runs, tmp_path, capsys):
    for kind in ("mean_field", "shared"):
        shutil.copytree(runs / kind, tmp_path / kind)
    recipe = tmp_path / "shared" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(runs / "mean_field"), str(tmp_path / "mean_field")))
    assert f"beside {tmp_path / 'mean_field'}" in call(capsys, tmp_path / "shared")[1]
    shutil.rmtree(tmp_path / "mean_field")
    altered(runs / "mean_field", tmp_path / "mean_field", **{"mean/conv.weight": lambda mean: mean + 1})
    with pytest.warns(PeerbayesWarning, match="weights-net.safetensors: holds other weights than .*shared was made"):
        (record,) = reporting.sizes(tmp_path / "shared")
    assert record["same_posterior"] is None


def test_of_a_folder_of_runs_those_that_can_not_be_counted_are_left_out(runs, tmp_path):
    shutil.copytree(runs / "point", tmp_path / "good")
    shutil.copytree(runs / "mean_field", tmp_path / "bad")
    (tmp_path / "bad" / "weights-net.safetensors").write_bytes(b"")
    with pytest.warns(PeerbayesWarning, match=r"bad/weights-net\.safetensors: .*; it is left out"):
        (record,) = reporting.sizes(tmp_path)
    assert record["run"] == str(tmp_path / "good")
    shutil.rmtree(tmp_path / "good")
    with pytest.raises(pb.InputError, match="bad/weights-net"):
        list(reporting.sizes(tmp_path))
