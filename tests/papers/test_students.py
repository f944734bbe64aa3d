"""Figures of distilled runs, against their files and against plain networks."""

import copy
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import nn

from commands import QUIET, called, refused
from peerbayes.data import to_unit
from peerbayes.engine.perturbation import Perturbation
from peerbayes.engine.teachers import Teachers
from peerbayes.errors import InputError
from peerbayes.math.noise import Address, permutation
from peerbayes.papers.catalogue import write_figure
from peerbayes.papers.latentbe import distillation_figures as distilled
from peerbayes.papers.latentbe.distillation_figures import draw_diversity, draw_entropy, draw_line, draw_perturbations
from peerbayes.posteriors import Point, RankOne
from peerbayes.recipes.recipe_data import load_data
from peerbayes.runs.run import Run

RECIPE = """
title = "Small"
method = "METHOD"
data = { name = "DATA", classes = 3, batch_size = 15, validation = 15 }
evaluation = { draws = 1 }
PEERS
[[stages]]
epochs = 2
optimizer = { name = "sgd", lr = 0.05 }
STAGE
"""
TEACHERS = """peers = [
  { name = "one", network = "mlp", posterior = { kind = "point" } },
  { name = "two", network = "mlp", posterior = { kind = "point" } },
]"""
STUDENT = """teachers = { runs = ["RUN"] }
[[peers]]
name = "s"
network = "mlp"
posterior = { kind = "rank_one", members = 2, factors = "random", predicts = "average" }
"""
DISTIL = 'terms = { distil = { teachers = "one_to_one" } }\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An ensemble, and students of it: of images as they are, and of those moved by TDiv-SDiv."""
    folder = tmp_path_factory.mktemp("distilled")
    rng = np.random.default_rng(0)
    labels = np.arange(150) % 3
    images = rng.integers(0, 120, (150, 6, 6))
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 2] += 100
    images = images.astype(np.uint8)
    parts = {"train_images": images[:90], "train_labels": labels[:90], "test_images": images[90:]}
    np.savez(folder / "rows.npz", **parts, test_labels=labels[90:])
    np.savez(folder / "noise.npz", test_images=rng.integers(0, 255, (70, 6, 6)).astype(np.uint8))
    student = STUDENT.replace("RUN", str(folder / "ensemble"))
    recipes = {
        "ensemble": (TEACHERS, "terms = { likelihood = {} }"),
        "plain": (student, DISTIL),
        "moved": (student, DISTIL + 'perturb = { kind = "tdiv_sdiv" }'),
    }
    for name, (peers, stage) in recipes.items():
        text = RECIPE.replace("METHOD", name.replace("plain", "moved")).replace("DATA", str(folder / "rows.npz"))
        (folder / f"{name}.toml").write_text(text.replace("PEERS", peers).replace("STAGE", stage))
        called("train", folder / f"{name}.toml", "--run", folder / name, *QUIET)
    return folder


def probabilities(run, name, path):
    """By a plain network in double precision."""
    images = torch.from_numpy(np.load(path)["test_images"])[:, None]
    with torch.no_grad():
        return run[name].materialise().eval().double()(to_unit(images).double()).softmax(-1).numpy()


@pytest.mark.parametrize("by_peer", [False, True])
def test_entropies_of_runs_stand_side_by_side(place, tmp_path, by_peer):
    other = str(place / "noise.npz")
    words = ["figure", "entropy", place / "ensemble", place / "plain", "--ood", other, "--out", tmp_path / "e.png"]
    found = json.loads(called(*words, *["--by-peer"] * by_peer, "--json", "--device", "cpu"))
    names = ["ensemble one", "ensemble two", "moved"] if by_peer else ["ensemble", "moved"]
    assert [one["label"] for one in found["series"]] == names
    with Image.open(tmp_path / "e.png") as picture:
        assert picture.width > 1.5 * picture.height
    ensemble, student = Run(place / "ensemble"), Run(place / "plain")
    both = [[probabilities(ensemble, name, path) for path in (place / "rows.npz", other)] for name in ensemble]
    p = both if by_peer else [[np.mean(one, 0) for one in zip(*both)]]
    p.append([probabilities(student, "s", path) for path in (place / "rows.npz", other)])
    for one, own in zip(found["series"], p, strict=True):
        outside, score = one["outside"][other], [stats.entropy(part, axis=1) for part in own]
        for key, values in zip(("inside", "outside"), score):
            counts, edges = np.histogram(values, 30, (0, math.log(3)))
            assert outside["edges"] == pytest.approx(edges, abs=1e-6)
            assert outside[key] == pytest.approx(counts / len(values), abs=1e-9)
        truth = np.repeat([0, 1], [60, 70])
        assert outside["auroc"]["mean"] == pytest.approx(roc_auc_score(truth, np.concatenate(score)), abs=1e-3)
    first, *_ = draw_entropy(found).axes
    inside, _, outside, _ = first.patches
    assert inside.get_data().values == pytest.approx(100 * np.array(found["series"][0]["outside"][other]["inside"]))
    assert outside.get_data().values == pytest.approx(100 * np.array(found["series"][0]["outside"][other]["outside"]))
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["in: rows", "out: noise"]


def test_entropies_are_means_over_seeds(place, tmp_path):
    called("train", place / "ensemble.toml", "--run", tmp_path / "seeds", "--seeds", "1,2", *QUIET)
    other = str(place / "noise.npz")
    found = write_figure("entropy", [tmp_path / "seeds"], tmp_path / "x.svg", ood=[other], device="cpu")[1]
    (one,) = found["series"]
    assert one["seeds"] == [1, 2]
    each = [
        write_figure("entropy", [tmp_path / "seeds" / seed], tmp_path / "x.svg", ood=[other], device="cpu")[1]
        for seed in ("seed1", "seed2")
    ]
    parts = [alone["series"][0]["outside"][other] for alone in each]
    for key in ("inside", "outside"):
        assert one["outside"][other][key] == pytest.approx(np.mean([part[key] for part in parts], 0))
    assert one["outside"][other]["auroc"]["mean"] == pytest.approx(np.mean([part["auroc"]["mean"] for part in parts]))


def test_what_entropy_can_not_draw_is_one_sentence(place, tmp_path, capsys):
    where = "--out", tmp_path / "x.png", "--device", "cpu"
    found = refused(capsys, "figure", "entropy", place / "plain", *where)
    assert found == "figure entropy: no recipe names an out-of-distribution data set; give one by --ood"
    found = refused(capsys, "figure", "line", place / "plain", "--ood", "digits", *where)
    assert found == "figure line: ood is for entropy"
    assert "no data set 'nowhere'" in refused(capsys, "figure", "entropy", place / "plain", "--ood", "nowhere", *where)
    assert list(tmp_path.iterdir()) == []


def loss_of(network, path):
    """Mean cross-entropy of the test split, by a plain network."""
    parts = np.load(path)
    with torch.no_grad():
        logits = network.eval().double()(to_unit(torch.from_numpy(parts["test_images"])[:, None]).double())
    return F.cross_entropy(logits, torch.from_numpy(parts["test_labels"])).item()


def test_a_line_leads_from_member_to_member_or_from_peer_to_peer(place, tmp_path):
    found = write_figure("line", [place / "plain", place / "ensemble"], tmp_path / "l.png", device="cpu")[1]
    assert found["points"] == pytest.approx(np.linspace(0, 1, 11))
    student, ensemble = Run(place / "plain"), Run(place / "ensemble")
    members = [student["s"].materialise(number) for number in range(2)]
    for one, (first, second) in zip(found["series"], (members, [ensemble[name].materialise() for name in ensemble])):
        losses = []
        for t in found["points"]:
            mixed = copy.deepcopy(first)
            ends = first.state_dict(), second.state_dict()
            mixed.load_state_dict({name: (1 - t) * ends[0][name] + t * ends[1][name] for name in ends[0]})
            losses.append(loss_of(mixed, place / "rows.npz"))
        for key in ("mean", "low", "high"):
            assert one["loss"][key] == pytest.approx(losses, rel=1e-5)
        height = max(loss - (1 - t) * losses[0] - t * losses[-1] for loss, t in zip(losses, found["points"]))
        assert one["barrier"]["mean"] == one["barrier"]["highest"] == pytest.approx(height, abs=1e-5)
        assert (one["pairs"], one["images"]) == (1, 60)
    (axes,) = draw_line(found).axes
    for line, one in zip(axes.get_lines(), found["series"], strict=True):
        assert list(line.get_xdata()) == found["points"]
        assert list(line.get_ydata()) == one["loss"]["mean"]


def test_a_line_has_the_mean_and_the_range_of_six_pairs_at_most(place, tmp_path, monkeypatch):
    ends = [{"number": number} for number in range(5)]
    monkeypatch.setattr(distilled, "_ends", lambda *_: (None, ends))
    seen, heights = [], [3.0, 0.0, 1.0, 5.0, 2.0, 1.0]

    def between(_posterior, first, second, _data, points):
        height = heights[len(seen)]
        seen.append((first["number"], second["number"]))
        return torch.tensor([4 * t * (1 - t) * height for t in points], dtype=torch.float64)

    monkeypatch.setattr(distilled, "loss_between", between)
    (one,) = write_figure("line", [place / "plain"], tmp_path / "l.png", device="cpu")[1]["series"]
    assert seen == list(itertools.combinations(range(5), 2))[:6]
    assert one["pairs"] == 6
    assert one["barrier"] == pytest.approx({"mean": 2.0, "highest": 5.0})
    assert [one["loss"][key][5] for key in ("low", "mean", "high")] == pytest.approx([0.0, 2.0, 5.0])


def test_a_legend_says_what_the_band_around_a_line_is():
    def series(label, pairs):
        loss = {"mean": [0.1, 0.6, 0.2], "low": [0.1, 0.4, 0.1], "high": [0.1, 0.9, 0.3]}
        return {"label": label, "pairs": pairs, "loss": loss, "barrier": {"mean": 0.5}}

    def legend(*given):
        (axes,) = draw_line({"points": [0.0, 0.5, 1.0], "series": given}).axes
        assert axes.dataLim.bounds == pytest.approx((0, 0.1, 1, 0.8))  # what explains the band takes no room
        both = axes.get_legend_handles_labels()
        assert [text.get_text() for text in axes.get_legend().get_texts()] == both[1]
        return both

    handles, labels = legend(series("a", 6), series("b", 3), series("c", 1))
    assert labels[:3] == ["a: barrier 0.5", "b: barrier 0.5", "c: barrier 0.5"]
    assert labels[3:] == ["lowest to highest of 3 or 6 pairs; the line is their mean"]
    (drawn, *_) = handles[0].axes.collections
    assert drawn.get_facecolor()[0, 3] == handles[3].get_facecolor()[0, 3]  # as dark as the band itself
    assert legend(series("c", 1))[1] == ["c: barrier 0.5"]  # one pair has no band


class Peers(dict):
    """What a run holds, by name."""

    folder = "here"


@pytest.mark.parametrize(
    "peers",
    [
        {"a": Point(nn.Linear(2, 3))},
        {"a": RankOne(nn.Linear(2, 3), 1)},
        {"a": Point(nn.Linear(2, 3)), "b": Point(nn.Linear(3, 3))},
    ],
    ids=["point", "one member", "two networks"],
)
def test_who_has_no_other_network_of_its_form_has_no_line(peers):
    with pytest.raises(InputError, match=r"^here: expected a rank-one student, or several peers of one network$"):
        distilled._ends(Peers(peers), torch.device("cpu"))


def test_diversity_over_epochs_is_that_of_the_metrics_with_the_effect_of_the_step(place, tmp_path):
    found = write_figure("diversity", [place / "plain", place / "moved"], tmp_path / "d.png")[1]
    plain, moved = found["series"]
    assert [one["label"] for one in found["series"]] == ["moved, seed 0 (plain)", "moved, seed 0 (moved)"]
    assert set(plain) == {"label", "folder", "teachers_apart", "members_apart"}
    notes = [line["peers"]["s"]["notes"] for line in Run(place / "moved").metrics]
    for key in ("teachers_before", "teachers_after", "members_before", "members_after"):
        assert moved[key] == [own[f"perturb.{key}"] for own in notes]
    assert moved["teachers_apart"] == [own["distil.teachers_apart"] for own in notes]
    apart, teachers, members = draw_diversity(found).axes
    assert len(apart.get_lines()) == 4
    for axes, who in ((teachers, "teachers"), (members, "members")):
        (line,) = (line for line in axes.get_lines() if line.get_label() == "moved, seed 0 (moved)")
        expected = np.subtract(moved[f"{who}_after"], moved[f"{who}_before"])
        assert line.get_ydata() == pytest.approx(expected)
    assert len(draw_diversity({"series": [plain]}).axes) == 1


def test_an_epoch_without_a_figure_is_left_out_of_the_line(place, tmp_path):
    lines = (place / "moved" / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["peers"]["s"]["notes"] = {}
    for path in (place / "moved").iterdir():
        if path.suffix in (".toml", ".json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    found = write_figure("diversity", [tmp_path], tmp_path / "d.png")[1]
    (one,) = found["series"]
    assert one["members_apart"][0] is one["teachers_after"][0] is None
    assert one["members_apart"][1] is not None
    line = draw_diversity(found).axes[1].get_lines()[0]
    assert list(line.get_xdata()) == [2]


def test_who_was_not_distilled_was_not_apart(place, tmp_path, capsys):
    found = refused(capsys, "figure", "diversity", place / "ensemble", "--out", tmp_path / "x.png")
    assert found.endswith("ensemble: was not distilled from several teachers, so it has no pairwise KL")


def test_kinds_of_steps_are_compared_by_how_far_apart_all_are(place, tmp_path):
    found = write_figure("perturbations", [place / "moved"], tmp_path / "p.png", device="cpu")[1]
    kinds = found["series"][0]["kinds"]
    assert list(kinds) == ["as they are", "gaussian", "ods", "conf_ods", "tdiv", "tdiv_sdiv", "bald"]
    run, ensemble = Run(place / "moved"), Run(place / "ensemble")
    train = load_data(run.recipe).train
    images = to_unit(train.batch(permutation(Address(0, "data", "distilled"), len(train)), torch.device("cpu"))[0])
    nets = {
        "teachers": [ensemble[name].materialise().eval() for name in ensemble],
        "members": [run["s"].materialise(number).eval() for number in range(2)],
    }
    for who, own in nets.items():
        with torch.no_grad():
            both = [torch.distributions.Categorical(logits=net.double()(images.double())) for net in own]
        each = [torch.distributions.kl_divergence(p, q).mean() for p, q in itertools.permutations(both, 2)]
        assert kinds["as they are"][who] == pytest.approx(sum(each).item() / 2, rel=1e-4)
    for kind in ("tdiv", "bald"):
        assert kinds[kind]["teachers"] > kinds["as they are"]["teachers"]


def test_steps_are_taken_at_the_temperature_of_the_run(place, tmp_path, monkeypatch):
    text = (place / "moved.toml").read_text().replace('"one_to_one" }', '"one_to_one", temperature = 7.0 }')
    (tmp_path / "warm.toml").write_text(text.replace('{ kind = "tdiv_sdiv" }', '{ kind = "ods", temperature = 3.0 }'))
    called("train", tmp_path / "warm.toml", "--run", tmp_path / "warm", *QUIET)
    seen = {}

    class Seen(Perturbation):
        def __init__(self, options, *others):
            seen[options.kind] = options.temperature
            super().__init__(options, *others)

    monkeypatch.setattr(distilled, "Perturbation", Seen)
    write_figure("perturbations", [tmp_path / "warm"], tmp_path / "p.png", device="cpu")
    assert (seen["ods"], seen["conf_ods"]) == (3.0, 7.0)
    stage = SimpleNamespace(perturb=None, terms={"proxy_end2": {}})
    undistilled = SimpleNamespace(recipe=SimpleNamespace(stages=[stage]))
    assert distilled._as_in(undistilled, "ods").temperature == 1.0


def test_bars_of_a_kind_of_step_stand_together_though_runs_have_not_all_kinds():
    heights = {"as they are": 1.0, "gaussian": 2.0, "ods": 3.0, "tdiv": 5.0, "tdiv_sdiv": 6.0, "bald": 7.0}
    student = {kind: {"teachers": height, "members": 10 * height} for kind, height in heights.items()}
    point = {kind: {"teachers": height} for kind, height in heights.items() if kind != "tdiv_sdiv"}
    series = [{"label": "point", "kinds": point}, {"label": "student", "kinds": student}]
    teachers, members = draw_perturbations({"series": series}).axes
    colours = []
    for axes, scale in ((teachers, 1), (members, 10)):
        names = [text.get_text().replace("−", "_") for text in axes.get_xticklabels()]
        assert names == list(heights)
        for bars in axes.containers:
            kinds = [names[math.floor(bar.get_x() + bar.get_width() / 2)] for bar in bars]
            assert kinds == [kind for kind in heights if kind != "tdiv_sdiv" or bars.get_label() == "student"]
            assert [bar.get_height() for bar in bars] == [scale * heights[kind] for kind in kinds]
        colours.append({bars.get_label(): bars[0].get_facecolor() for bars in axes.containers})
    assert list(colours[0]) == ["point", "student"]
    assert colours[1] == {"student": colours[0]["student"]}  # one colour a run, in both


def test_a_student_without_a_member_for_each_teacher_is_spared_the_step_that_compares_them(
    place, tmp_path, monkeypatch
):
    made = distilled.build_teachers

    def three(*given):
        two = made(*given).posteriors
        return Teachers([*two, two[0]])

    monkeypatch.setattr(distilled, "build_teachers", three)
    (one,) = write_figure("perturbations", [place / "plain"], tmp_path / "p.png", device="cpu")[1]["series"]
    assert list(one["kinds"]) == ["as they are", "gaussian", "ods", "conf_ods", "tdiv", "bald"]
    assert all(set(apart) == {"teachers", "members"} for apart in one["kinds"].values())


def test_teachers_of_different_networks_are_compared_by_the_steps_that_they_can_take(place, tmp_path):
    peers = TEACHERS.replace('"two", network = "mlp"', '"two", network = "resnet8"')
    student = STUDENT.replace("RUN", str(tmp_path / "mixed"))
    for name, given, stage in (("mixed", peers, "terms = { likelihood = {} }"), ("student", student, DISTIL)):
        text = RECIPE.replace("METHOD", name).replace("DATA", str(place / "rows.npz"))
        (tmp_path / f"{name}.toml").write_text(text.replace("PEERS", given).replace("STAGE", stage))
        called("train", tmp_path / f"{name}.toml", "--run", tmp_path / name, *QUIET)
    found = write_figure("perturbations", [tmp_path / "student"], tmp_path / "p.png", device="cpu")[1]
    kinds = found["series"][0]["kinds"]
    assert list(kinds) == ["as they are", "gaussian", "bald"]
    assert kinds["bald"]["teachers"] > kinds["as they are"]["teachers"]
