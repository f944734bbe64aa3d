"""The numbers behind the figures of runs over alphas, from run folders with known figures; the verb and its files."""

import base64
import io
import json
import math
import shutil
import statistics
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from commands import called
from peerbayes import cli
from peerbayes import reports as reporting
from peerbayes.data import load as load_data
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.math.noise import Address, permutation
from peerbayes.metrics.flatness import loss_along, sharpness
from peerbayes.papers.catalogue import write_figure
from peerbayes.papers.renyi import alphas, curves
from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import Recipe, load_recipe
from peerbayes.reports import figures as graph
from peerbayes.reports.page import report_page
from peerbayes.reports.record import alpha_title
from peerbayes.runs.run import Run
from peerbayes.terms.mutual import lessons


def write_run(folder, alpha=1.0, seed=0, epochs=(), record=None, finished=True, weight=1.0, **changes):
    """Write a run of two peers, a and b, by hand; ``epochs`` are their lines' figures, alpha None leaves mutual out."""
    names = changes.pop("peers", ["a", "b"])
    terms = {"likelihood": {}} | ({} if alpha is None else {"mutual": {"alpha": alpha, "weight": weight}})
    table = {
        "title": "By hand",
        "data": {"name": "digits"},
        "peers": [{"name": n, "network": changes.get("network", "mlp"), "posterior": {"kind": "point"}} for n in names],
        "stages": changes.get("stages", [{"epochs": max(1, len(epochs)), "terms": terms}]),
    }
    table["data"] |= changes.get("data", {})
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(Recipe.parse(table, "table").to_toml())
    (folder / "run.json").write_text(json.dumps({"seed": seed, "finished": finished}))
    blank = {"terms": {}, "notes": {}}
    lines = [{"stage": 1, "step": k, "peers": {n: blank | p for n, p in line.items()}} for k, line in enumerate(epochs)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if record is not None:
        (folder / "evaluation.json").write_text(json.dumps(record))
    return folder


def look(loss, accuracy, train=None, split="test"):
    """Return an epoch's figures of both peers, which lie 0.02 apart."""
    found = {}
    for name, off in (("a", -0.01), ("b", 0.01)):
        found[name] = {f"{split}_nll": loss + off, f"{split}_accuracy": accuracy + off}
        if train is not None:
            found[name]["terms"] = {"likelihood": train + off}
    return found


def judged(accuracy, nll=0.5, **cohort):
    peers = [{"name": name, "accuracy": accuracy + off, "nll": nll} for name, off in (("a", -0.01), ("b", 0.01))]
    return {"peers": peers} | ({"cohort": cohort} if cohort else {})


def mean_and_error(*values):
    return pytest.approx(statistics.mean(values)), pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))


def summary(found):
    return found["mean"], found["standard_error"]


# ---- the divergence ---------------------------------------------------------------------------------------------


def test_divergence_is_that_of_the_definition():
    found = alphas.divergence()
    for place in (0, 100, 313, 498):
        x = found["points"][place]
        moving, fixed = (x, 1 - x), (0.4, 0.6)
        for key, p, q in (("over_p", moving, fixed), ("over_q", fixed, moving)):
            assert found[key]["0"][place] == 0
            kl = sum(a * math.log(a / b) for a, b in zip(p, q))
            assert found[key]["1"][place] == pytest.approx(kl, rel=1e-9)
            for order in (0.1, 0.5, 2, 10, 100):
                total = sum(a**order * b ** (1 - order) for a, b in zip(p, q))
                assert found[key][f"{order:g}"][place] == pytest.approx(math.log(total) / (order - 1), rel=1e-9)
    # The paper's Remark 2: it never falls as alpha rises.
    for key in ("over_p", "over_q"):
        for lower, higher in zip(list(found[key].values()), list(found[key].values())[1:]):
            assert all(a <= b + 1e-15 for a, b in zip(lower, higher))
    assert (found["points"][0], found["points"][-1]) == (pytest.approx(0.001), pytest.approx(0.999))


# ---- the best alpha ---------------------------------------------------------------------------------------------


def test_best_alpha_is_chosen_on_the_validation_split(tmp_path):
    for alpha, accuracies in ((None, (0.90, 0.92)), (1.0, (0.93, 0.95)), (2.0, (0.97, 0.89))):
        for seed, accuracy in enumerate(accuracies):
            # The test split of the records would choose alpha 0, the epoch before the last one alpha 2.
            epochs = [look(9, 0.99 if alpha == 2 else 0.1, split="valid"), look(0.2, accuracy, split="valid")]
            write_run(tmp_path / f"{alpha}-{seed}", alpha, seed, epochs, judged(0.99 - 0.1 * (alpha or 0)))
    found = alphas.best_alpha([tmp_path])
    (experiment,) = found["experiments"]
    assert (found["split"], experiment["network"], experiment["dataset"]) == ("validation", "mlp", "digits")
    assert experiment["best"] == 1.0
    assert [row["alpha"] for row in experiment["alphas"]] == [0.0, 1.0, 2.0]
    assert [summary(row["accuracy"]) for row in experiment["alphas"]] == [
        mean_and_error(0.90, 0.92), mean_and_error(0.93, 0.95), mean_and_error(0.97, 0.89),
    ]  # fmt: skip
    assert experiment["alphas"][0]["accuracy"]["seeds"] == {0: pytest.approx(0.90), 1: pytest.approx(0.92)}


def test_without_validation_figures_in_all_runs_the_figure_says_test(tmp_path):
    write_run(tmp_path / "x", 1.0, 0, [look(0.2, 0.9, split="valid")], judged(0.8))
    write_run(tmp_path / "y", 2.0, 0, [look(0.2, 0.9)], judged(0.7))
    found = alphas.best_alpha([tmp_path])
    assert (found["split"], found["experiments"][0]["best"]) == ("test", 1.0)
    assert summary(found["experiments"][0]["alphas"][1]["accuracy"]) == (pytest.approx(0.7), None)
    drawn = curves.best_alpha(found)
    assert "test split" in drawn.get_suptitle()
    drawn.draw_without_rendering()
    place = drawn._suptitle.get_window_extent()  # as wide as the picture of one panel lets it be
    assert 0 <= place.x0 < place.x1 <= drawn.bbox.width
    assert drawn.axes[0].get_ylabel() == "test accuracy (%)"


def test_networks_and_data_sets_are_kept_apart(tmp_path):
    for network, data, best in (("mlp", "digits", 1.0), ("mlp", "cifar10", 2.0), ("resnet8", "digits", 0.5)):
        for alpha in (0.5, 1.0, 2.0):
            record = judged(0.9 if alpha == best else 0.8)
            changes = {"network": network, "data": {"name": data}}
            write_run(tmp_path / f"{network}-{data}-{alpha}", alpha, 0, record=record, **changes)
    found = alphas.best_alpha([tmp_path])["experiments"]
    best = {(experiment["network"], experiment["dataset"]): experiment["best"] for experiment in found}
    assert best == {("mlp", "digits"): 1.0, ("mlp", "cifar10"): 2.0, ("resnet8", "digits"): 0.5}


def test_schedules_come_after_numbers_and_have_names(tmp_path):
    linear = {"schedule": "linear", "start": 2.0, "end": 0.0, "epochs": 30.0}
    steps = {"schedule": "steps", "values": [0.0, 1.0, 2.5], "at": [5.0, 10.0]}
    for place, alpha in enumerate((linear, 10.0, steps, 2.0)):
        write_run(tmp_path / str(place), alpha, 0, record=judged(0.9))
    (experiment,) = alphas.best_alpha([tmp_path])["experiments"]
    titles = [alpha_title(row["alpha"]) for row in experiment["alphas"]]
    assert titles == ["2", "10", "0→1→2.5 at epoch 5, 10", "linear 2→0 in 30 epochs"]
    assert experiment["best"] == 2.0  # of equal ones the first


# ---- over the epochs --------------------------------------------------------------------------------------------


@pytest.fixture
def epochs(tmp_path):
    """Alpha 1 with two seeds, looked at after epochs 2 and 4, and one that was also looked at after 3; alpha 2."""
    blank = {name: {"terms": {"likelihood": 9.0}} for name in "ab"}
    write_run(tmp_path / "1-0", 1.0, 0, [blank, look(0.5, 0.8, 0.3), blank, look(0.4, 0.90, 0.1)])
    write_run(tmp_path / "1-1", 1.0, 1, [blank, look(0.7, 0.6, 0.4), look(5, 0, 9), look(0.5, 0.94, 0.2)])
    write_run(tmp_path / "2-0", 2.0, 0, [blank, look(0.6, 0.7, 0.6), blank, look(0.3, 0.95, 0.3)])
    return tmp_path


def test_curves_are_means_over_seeds_and_peers(epochs):
    found = alphas.curves([epochs])
    first, second = found["experiments"][0]["series"]
    assert (first["alpha"], first["peer"], first["epochs"], first["seeds"]) == (1.0, "average", [2, 4], 2)
    assert first["test_nll"] == {
        "mean": pytest.approx([0.6, 0.45]), "low": pytest.approx([0.5, 0.4]), "high": pytest.approx([0.7, 0.5]),
    }  # fmt: skip
    assert first["test_accuracy"]["mean"] == pytest.approx([0.7, 0.92])
    assert (second["alpha"], second["seeds"]) == (2.0, 1)
    assert second["test_accuracy"]["low"] == second["test_accuracy"]["high"] == pytest.approx([0.7, 0.95])
    # The lines drawn are these numbers, accuracy in percent.
    loss, accuracy = curves.curves(found | {"figure": "curves"}).axes
    assert [list(line.get_ydata()) for line in loss.lines] == [first["test_nll"]["mean"], second["test_nll"]["mean"]]
    assert list(accuracy.lines[0].get_ydata()) == pytest.approx([70, 92])
    assert list(accuracy.lines[0].get_xdata()) == [2, 4]


def test_peers_may_be_kept_apart(epochs):
    (experiment,) = alphas.curves([epochs], by_peer=True)["experiments"]
    found = {(series["alpha"], series["peer"]): series for series in experiment["series"]}
    assert list(found) == [(1.0, "a"), (1.0, "b"), (2.0, "a"), (2.0, "b")]
    assert found[1.0, "a"]["test_nll"]["mean"] == pytest.approx([0.59, 0.44])
    assert found[1.0, "b"]["test_nll"]["high"] == pytest.approx([0.71, 0.51])


def test_gap_is_test_less_training_loss(epochs):
    first, second = alphas.gap([epochs])["experiments"][0]["series"]
    assert first["train_nll"]["mean"] == pytest.approx([0.35, 0.15])
    assert first["gap"] == {
        "mean": pytest.approx([0.25, 0.3]), "low": pytest.approx([0.2, 0.3]), "high": pytest.approx([0.3, 0.3]),
    }  # fmt: skip
    assert second["gap"]["mean"] == pytest.approx([0, 0], abs=1e-12)


def test_training_loss_is_without_the_weight_of_the_likelihood(tmp_path):
    stages = [{"epochs": 1, "terms": {"likelihood": {"weight": 4.0}, "mutual": {}}}]
    write_run(tmp_path / "x", epochs=[look(0.5, 0.8, 0.8)], stages=stages)
    (series,) = alphas.gap([tmp_path])["experiments"][0]["series"]
    assert series["train_nll"]["mean"] == pytest.approx([0.2])
    assert series["gap"]["mean"] == pytest.approx([0.3])


# ---- spread and grid --------------------------------------------------------------------------------------------


def test_spread_against_alpha(tmp_path):
    measures = {(0.0, 0): (0.5, 0.2, 0.1), (0.0, 1): (0.7, 0.4, 0.3), (2.0, 0): (0.1, 0.02, 0.05)}
    for (alpha, seed), (diversity, rate, variance) in measures.items():
        cohort = {"pairwise_diversity": diversity, "disagreement_rate": rate, "probability_variance": variance}
        write_run(tmp_path / f"{alpha}-{seed}", alpha, seed, record=judged(0.9, **cohort))
    found = alphas.spread([tmp_path])
    independent, strong = found["experiments"][0]["alphas"]
    assert found["figures"] == ["pairwise_diversity", "disagreement_rate", "probability_variance"]
    assert summary(independent["pairwise_diversity"]) == mean_and_error(0.5, 0.7)
    assert summary(independent["disagreement_rate"]) == mean_and_error(0.2, 0.4)
    assert summary(independent["probability_variance"]) == mean_and_error(0.1, 0.3)
    assert summary(strong["probability_variance"]) == (0.05, None)
    # A record from before that measure existed leaves it out for all.
    write_run(tmp_path / "old", 1.0, 0, record=judged(0.9, pairwise_diversity=0.1, disagreement_rate=0.1))
    assert alphas.spread([tmp_path])["figures"] == ["pairwise_diversity", "disagreement_rate"]


def test_grid_has_a_row_a_weight_and_a_column_an_alpha(tmp_path):
    for alpha, weight, seed, loss in ((1.0, 0.5, 0, 0.3), (1.0, 0.5, 1, 0.5), (2.0, 0.5, 0, 0.6), (1.0, 3.0, 0, 0.2)):
        run = tmp_path / f"{alpha}-{weight}-{seed}"
        write_run(run, alpha, seed, [look(loss, 1 - loss, split="valid")], weight=weight)
    found = alphas.grid([tmp_path])
    (experiment,) = found["experiments"]
    assert (found["split"], experiment["alphas"], experiment["weights"]) == ("validation", [1.0, 2.0], [0.5, 3.0])
    (first, second), (third, missing) = experiment["nll"]
    assert summary(first) == mean_and_error(0.3, 0.5)
    assert (second["mean"], third["mean"], missing) == (pytest.approx(0.6), pytest.approx(0.2), None)
    assert experiment["accuracy"][1][0]["mean"] == pytest.approx(0.8)
    texts = [[text.get_text() for text in axes.texts] for axes in curves.grid(found).axes[:2]]
    assert texts == [["0.400", "0.600", "0.200"], ["60.00", "40.00", "80.00"]]


# ---- what can't be drawn ----------------------------------------------------------------------------------------


def two(make):
    return lambda path: (write_run(path / "x", 1.0, 0, [look(0.5, 0.9, 0.2)], judged(0.9)), make(path / "y"))


BAD_RUNS = [
    ("curves", lambda p: p.joinpath("x").mkdir(), "neither a run folder nor a folder of runs"),
    ("curves", lambda p: write_run(p / "x", finished=False), "x: the run is not finished"),
    ("curves", lambda p: write_run(p / "x", epochs=[look(1, 1, split="valid")]),
     "x: metrics.jsonl has no test figures; train with --set evaluation.test_every=1"),
    ("gap", lambda p: write_run(p / "x", epochs=[look(1, 1, 1)], stages=[{"epochs": 1, "terms": {"mutual": {}}}]),
     "x: stage 1 has no likelihood term"),
    ("best-alpha", lambda p: write_run(p / "x"), "x: has no evaluation.json; 'peerbayes evaluate"),
    ("best-alpha", lambda p: (write_run(p / "x"), (p / "x/evaluation.json").write_text("{")), "not valid JSON"),
    ("spread", lambda p: write_run(p / "x", record=judged(0.9), peers=["a"]), "x: has one peer"),
    ("grid", lambda p: write_run(p / "x", alpha=None), "x: has no mutual term"),
    ("curves", two(lambda y: write_run(y, 1.0, 0, [look(1, 1)])), "both are alpha 1, seed 0 of mlp on digits"),
    ("curves", two(lambda y: write_run(y, 2.0, 0, [look(1, 1)] * 2)), r"differ in stages.0.epochs \((1 and 2|2 and 1)"),
    ("curves", two(lambda y: write_run(y, 2.0, weight=3.0)), "differ in stages.0.terms.mutual.weight"),
    ("curves", two(lambda y: write_run(y, None, data={"batch_size": 7})), "differ in data.batch_size"),
    ("curves", two(lambda y: write_run(y, 2.0, 0, peers=["a"])), "differ in peers.1"),
    ("curves", two(lambda y: (write_run(y.parent / "first", None), write_run(y, 2.0, weight=3.0))), "mutual.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "words"), BAD_RUNS)
def test_bad_runs_are_a_sentence(tmp_path, name, make, words):
    make(tmp_path)
    with pytest.raises(InputError, match=words) as caught:
        write_figure(name, [tmp_path], tmp_path / "out.png")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.png").exists()


def test_in_a_folder_what_can_not_be_looked_at_is_left_out_and_said(tmp_path, capsys):
    runs = [write_run(tmp_path / f"a{alpha}", alpha, 0, [look(0.5, 0.8 + alpha / 100)]) for alpha in (1, 2)]
    write_run(tmp_path / "half", 3.0, finished=False)
    with pytest.warns(PeerbayesWarning, match=r"half: the run is not finished; .*; it is left out$"):
        _, found = write_figure("curves", [tmp_path], tmp_path / "out.png")
    assert found == write_figure("curves", runs, tmp_path / "other.png")[1]
    with pytest.raises(InputError, match="half: the run is not finished"):
        write_figure("curves", [*runs, tmp_path / "half"], tmp_path / "none.png")
    called("figure", "curves", tmp_path, "--out", tmp_path / "again.png")
    said = capsys.readouterr().err
    assert said.startswith(f"peerbayes: {tmp_path / 'half'}: the run is not finished; ")
    assert "Warning" not in said


def test_what_runs_of_a_folder_started_from_is_none_of_its_alphas(tmp_path):
    """`train` puts it there; named by itself, it counts."""
    source = write_run(tmp_path / "source", None, 0, [look(1, 0.5)] * 3, peers=["a"])
    runs = [write_run(tmp_path / f"a{alpha}", alpha, 0, [look(0.5, 0.8)] * 2) for alpha in (1, 2)]
    storage.write(source / "weights-a.safetensors", {}, {})
    for run in runs:
        recipe = run / "recipe.toml"
        recipe.write_text(load_recipe(recipe, [f"peers.0.start_from='{source}'"]).to_toml())
    _, found = write_figure("curves", [tmp_path], tmp_path / "out.png")
    assert found == write_figure("curves", runs, tmp_path / "other.png")[1]
    with pytest.raises(InputError, match=r"differ in stages\.0\.epochs"):
        write_figure("curves", [source, *runs], tmp_path / "none.png")


def verb(capsys, *arguments):
    with pytest.raises(SystemExit) as done:
        cli.main(["figure", *map(str, arguments)])
    out, err = capsys.readouterr()
    return done.value.code or 0, out, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["curve", "runs"], "there is no figure 'curve'; did you mean 'curves'?"),
        (
            ["xyz"],
            "there is no figure 'xyz'; known: best-alpha, bytes, confidence, curves, divergence, diversity, entropy, "
            "flatness, gap, grid, line, perturbations, pipeline, posterior, spread",
        ),
        (["divergence", "--out", "a.jpg"], "a.jpg: expected a file that ends in .png, .pdf or .svg"),
        (["divergence", "--out", "png"], "png: expected a file that ends in .png, .pdf or .svg"),
        (["divergence", "runs"], "figure divergence: takes no runs"),
        (["curves"], "figure curves: give run folders, or folders of runs"),
        (["grid", "runs", "--by-peer"], "figure grid: by_peer is for curves, gap and entropy"),
        (["gap", "nowhere"], "nowhere: neither a run folder nor a folder of runs"),
    ],
)
def test_bad_commands_are_a_sentence_and_leave_nothing(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = verb(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"peerbayes: {words}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---- files, from runs that were trained -------------------------------------------------------------------------

TINY = """
title = "Tiny"
[data]
name = "digits"
batch_size = 256
validation = 200
[[peers]]
name = "a"
network = "mlp"
posterior = { kind = "point" }
[[peers]]
name = "b"
network = "mlp"
posterior = { kind = "mean_field" }
[[stages]]
epochs = 1
[stages.terms.likelihood]
[stages.terms.mutual]
graph = "ring"
[evaluation]
draws = 2
test_every = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(TINY)
    for alpha in ("0.5", "2.0"):
        words = ["train", str(folder / "tiny.toml"), "--run", str(folder / "runs" / alpha), "-q", "--device", "cpu"]
        with pytest.raises(SystemExit) as done:
            cli.main([*words, "--set", f"stages.0.terms.mutual.alpha={alpha}"])
        assert not done.value.code
    return folder / "runs"


@pytest.mark.parametrize("name", ["divergence", "best-alpha", "curves", "gap", "spread", "grid"])
def test_the_verb_writes_a_file_and_prints_its_numbers(trained, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    runs = [] if name == "divergence" else [trained]
    assert verb(capsys, name, *runs) == (0, f"{name}.png\n", "")
    with Image.open(tmp_path / f"{name}.png") as picture:
        assert picture.format == "PNG"
        assert picture.convert("L").getextrema() == (0, 255)
    code, out, _ = verb(capsys, name, *runs, "--json", "--out", "deep/x.svg")
    numbers = json.loads(out)
    assert (code, numbers["figure"]) == (0, name)
    assert ElementTree.parse(tmp_path / "deep/x.svg").getroot().tag.endswith("svg")
    if runs:
        (experiment,) = numbers["experiments"]
        assert (experiment["network"], experiment["dataset"]) == ("mlp", "digits")


def test_numbers_of_trained_runs_are_those_of_their_files(trained, tmp_path):
    run = Run(trained / "0.5")
    (line,) = run.metrics
    path, found = write_figure("gap", [trained / "0.5", trained / "0.5"], tmp_path / "gap.PDF", by_peer=True)
    assert path.read_bytes().startswith(b"%PDF")
    series = {one["peer"]: one for one in found["experiments"][0]["series"]}
    for name in "ab":
        assert series[name]["train_nll"]["mean"] == [line["peers"][name]["terms"]["likelihood"]]
        assert series[name]["test_nll"]["mean"] == [line["peers"][name]["test_nll"]]
    chosen = write_figure("best-alpha", [trained], tmp_path / "best.png")[1]
    assert chosen["split"] == "validation"
    assert chosen["experiments"][0]["alphas"][0]["accuracy"]["mean"] == pytest.approx(
        statistics.mean(line["peers"][name]["valid_accuracy"] for name in "ab")
    )


def test_flatness_is_measured_around_the_means_on_training_images(trained, tmp_path):
    path, found = write_figure("flatness", [trained], tmp_path / "flat.png", device="cpu")
    assert path.is_file()
    first, _ = found["experiments"][0]["series"]
    data = load_data("digits", validation=200)
    index = permutation(Address(0, "data", "flatness"), len(data.train))[:512]
    images = data.train.images[index], data.train.labels[index]
    address = Address(0, "flatness", "direction")
    losses = [loss_along(Run(trained / "0.5")[name], images, found["distances"], 10, address) for name in "ab"]
    means = [loss.mean(0).tolist() for loss in losses]
    assert first["loss"]["mean"] == pytest.approx([(a + b) / 2 for a, b in zip(*means)])
    assert first["loss"]["high"] == pytest.approx([max(a, b) for a, b in zip(*means)])
    rises = [sharpness(loss, found["distances"], 0.5) for loss in losses]
    assert first["sharpness"]["mean"] == pytest.approx(sum(rises) / 2)
    assert min(rises) > 0


# ---- the knowledge graph ----------------------------------------------------------------------------------------


def taught(names, **options):
    options = {"alpha": 1.0, "temperature": 1.0, "weight": 1.0, "graph": "all"} | options
    kind = options["graph"] if isinstance(options["graph"], str) else "edges"
    found = [lesson.__dict__ for lesson in lessons(options, names)]
    return {"peers": [{"name": name} for name in names], "graph": kind, "lessons": found}


def test_the_graph_in_words():
    every = taught(["a", "b", "c"], alpha=1.5)
    assert graph.graph_caption(every).endswith("teacher to student; α = 1.5, T = 1, weight = 1 for all.")
    assert graph.graph_words(every).endswith("Each of a, b and c teaches all the others.")
    best = taught(["a", "b"], graph="best_to_rest")
    assert "only the arrows of the peer with the lowest cross-entropy" in graph.graph_caption(best)
    edges = [{"teacher": "a", "student": "b", "alpha": 2.0}, {"teacher": "b", "student": "c", "temperature": 4.0}]
    own = taught(["a", "b", "c"], graph=edges)
    assert graph.graph_caption(own).endswith("teacher to student; weight = 1 for all.")
    assert graph.graph_words(own).endswith("a teaches b (α = 2, T = 1); b teaches c (α = 1, T = 4).")
    assert graph.graph_words(taught(["a", "b"], graph=[])).endswith("Nobody teaches.")


def test_arrows_go_from_teacher_to_student_and_carry_what_differs():
    own = taught(
        ["a", "b", "c"], graph=[{"teacher": "c", "student": "a", "alpha": 0.5}, {"teacher": "a", "student": "b"}]
    )
    (axes,) = graph.graph_figure(own).axes
    nodes = {(round(line.get_xdata()[0], 6), round(line.get_ydata()[0], 6)) for line in axes.lines}
    assert len(nodes) == 3
    assert all(math.hypot(*node) == pytest.approx(1, abs=1e-5) for node in nodes)
    names = dict(zip("abc", ((line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines)))
    assert [arrow._posA_posB for arrow in axes.patches] == [[names["c"], names["a"]], [names["a"], names["b"]]]
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c", "α = 0.5", "α = 1"]


def test_a_schedule_stays_on_one_line_of_an_arrows_label():
    steps = {"schedule": "steps", "values": [2.0, 1.0, 0.0], "at": [1.0, 2.0]}
    edges = [{"teacher": "a", "student": "b", "alpha": steps, "weight": 0.5}, {"teacher": "b", "student": "a"}]
    (axes,) = graph.graph_figure(taught(["a", "b"], graph=edges)).axes
    assert axes.texts[2].get_text() == "α = 2→1→0 at epoch 1, 2\nweight = 0.5"


def test_the_page_of_a_run_shows_its_graph(trained):
    page = (trained / "0.5" / "report.html").read_text()
    record = json.loads((trained / "0.5" / "evaluation.json").read_text())
    assert [(lesson["teacher"], lesson["student"]) for lesson in record["lessons"]] == [("b", "a"), ("a", "b")]
    assert all(lesson["alpha"] == 0.5 for lesson in record["lessons"])
    words = graph.graph_words(record)
    assert words.endswith("b teaches a; a teaches b.")
    after = page.partition(f'alt="{words}" src="data:image/png;base64,')[2]
    with Image.open(io.BytesIO(base64.b64decode(after.split('"')[0]))) as picture:
        assert picture.format == "PNG"
    # Methods that share a graph share the picture; without one there is none.
    other = record | {"method": "other"}
    assert report_page([record, other], "h", {}).count("teaches a") == 1
    assert "custom, other. Who teaches whom" in report_page([record, other], "h", {})
    alone = {key: value for key, value in record.items() if key != "lessons"}
    assert "Who teaches" not in report_page([alone], "h", {})


def test_a_run_without_a_mutual_term_has_no_graph(trained, tmp_path):
    shutil.copytree(trained / "0.5", tmp_path / "run")
    text = (tmp_path / "run" / "recipe.toml").read_text()
    start, end = text.index("[stages.terms.mutual]"), text.index("[evaluation]")
    (tmp_path / "run" / "recipe.toml").write_text(text[:start] + text[end:])
    assert "mutual" not in load_recipe(tmp_path / "run" / "recipe.toml").stages[0].terms
    record = reporting.evaluate(tmp_path / "run", device="cpu")
    assert "lessons" not in record
    assert 0 < record["cohort"]["probability_variance"] < 1
