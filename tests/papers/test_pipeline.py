"""The steps that led to a run: their order, what they are worth, and what they cost."""

import itertools
import json
import shutil
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from sklearn.metrics import roc_auc_score

from peerbayes import cli
from peerbayes import reports as reporting
from peerbayes.api.fitting import train
from peerbayes.data import load, load_images
from peerbayes.errors import InputError
from peerbayes.inference.prediction import predict_split
from peerbayes.papers import pipeline as module
from peerbayes.papers.pipeline import pipeline, pipeline_table
from peerbayes.recipes.recipe import load_recipe, packaged
from peerbayes.recipes.recipe_data import load_data
from peerbayes.runs.run import Run

DATA = 'name = "digits"\nclasses = 10\nbatch_size = 64\nvalidation = 200'
PEER = '[[peers]]\nname = "{}"\nnetwork = "mlp"\nposterior = {}\n{}\n'
STAGE = (
    '[[stages]]\nepochs = 2\noptimizer = {{ name = "sgd", lr = {}, scale_lr = 0.01, scale_space = "sigma" }}\n'
    "[stages.terms]\n{}\n"
)
OUTSIDE = "[evaluation]\ndraws = 3\nout_of_distribution = ['photographs']\n"


def recipe(name, *parts):
    return f'title = "{name}"\nmethod = "{name}"\n' + "\n".join([*parts, OUTSIDE])


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A network, two Bayesian peers (one starts from it), a student of both, scales for it, and a codebook."""
    place = tmp_path_factory.mktemp("chain")

    def write(name, *parts):
        (place / f"{name}.toml").write_text(recipe(name, *parts))
        return str(place / f"{name}.toml")

    data, field = f"[data]\n{DATA}", '{ kind = "mean_field", rho = -4.0 }'
    dnn = write("dnn", data, PEER.format("net", '{ kind = "point" }', ""), STAGE.format(0.1, "likelihood = {}"))
    peers = PEER.format("one", field, ""), PEER.format("two", field, f"start_from = '{dnn}'")
    taught = write("peers", data, *peers, STAGE.format(0.1, "likelihood = {}\nmutual = {}"))
    student = PEER.format("net", '{ kind = "rank_one", members = 2, predicts = "average" }', "")
    distilled = write("distilled", data, f"[teachers]\nruns = ['{taught}']", student, STAGE.format(0.1, "distil = {}"))
    scaled = PEER.format("net", '{ kind = "mean_field", gain = 0.1 }', f"start_from = '{distilled}'")
    scaled = write("scaled", data, scaled, STAGE.format(1e-3, "likelihood = {}"))
    shared = PEER.format("net", '{ kind = "shared", components = 20 }', f"start_from = '{scaled}'")
    shipped = write("shipped", data, shared, STAGE.format(1e-4, "likelihood = {}"))
    return train(load_recipe(shipped), place / "runs" / "shipped", device="cpu")


@pytest.fixture(scope="module")
def found(chain):
    return pipeline([chain.folder], device="cpu")


def run_of(chain, name):
    return Run(next(path for path in chain.folder.parent.iterdir() if Run(path).recipe.method == name))


def test_steps_come_in_the_order_in_which_they_were_made(found):
    (one,) = found["chains"]
    assert [step["method"] for step in one["steps"]] == ["dnn", "peers", "distilled", "scaled", "shipped"]
    assert [[who["name"] for who in step["who"]] for step in one["steps"]] == [
        ["net"],
        ["one", "two", "ensemble"],
        ["net"],
        ["net"],
        ["net"],
    ]


def test_a_chain_may_begin_with_weights_from_elsewhere(chain, tmp_path):
    state = run_of(chain, "dnn")["net"].materialise().state_dict()
    save_file(state, tmp_path / "theirs.safetensors")
    changes = [f"peers.0.start_from={tmp_path / 'theirs.safetensors'}", "evaluation.out_of_distribution=[]"]
    scaled = load_recipe(run_of(chain, "scaled").recipe, changes)
    run = train(scaled, tmp_path / "scaled", device="cpu")
    (steps,) = [one["steps"] for one in pipeline([run.folder], device="cpu")["chains"]]
    assert [step["method"] for step in steps] == ["scaled"]


def test_peers_that_taught_nobody_are_not_shown(chain, tmp_path):
    peers = run_of(chain, "peers")
    recipe = [f"teachers.runs=['{peers.folder}']", "teachers.peers=['two']", "stages.0.epochs=1"]
    taught = train(load_recipe("distillation/kd", recipe), tmp_path / "student", device="cpu")
    (one,) = pipeline([taught.folder], device="cpu")["chains"]
    assert [[who["name"] for who in step["who"]] for step in one["steps"]] == [["net"], ["two"], ["student"]]


def test_a_step_that_is_gone_is_named(chain, tmp_path):
    shutil.copytree(run_of(chain, "peers").folder, tmp_path / "peers")
    file = tmp_path / "peers" / "weights-two.safetensors"
    recipe = [f"teachers.runs=['{file}']", "stages.0.epochs=1"]
    taught = train(load_recipe("distillation/kd", recipe), tmp_path / "student", device="cpu")
    file.unlink()
    with pytest.raises(InputError, match=f"a step before {taught.folder}: {file}: there is no such file"):
        pipeline([taught.folder], device="cpu")


def test_a_step_is_worth_what_evaluate_says(chain, found):
    for step in found["chains"][0]["steps"]:
        record = reporting.evaluate(run_of(chain, step["method"]), device="cpu")
        for who, peer in zip(step["who"], [*record["peers"], record.get("ensemble")], strict=False):
            assert {key: who[key] for key in ("accuracy", "nll", "ece")} == {
                key: peer[key] for key in ("accuracy", "nll", "ece")
            }
            assert who["auroc"] == peer["out_of_distribution"]["photographs"]["auroc"]


def test_an_ensemble_is_told_apart_by_the_entropy_of_the_mean(chain, found):
    run = run_of(chain, "peers")
    loaded, other = load_data(run.recipe), load_images("photographs")

    def entropy(split):
        log_p = [predict_split(run[name], split, 3, seed=run.seed, name=name)[0] for name in run]
        p = torch.stack(log_p).exp().mean(0).double().numpy()
        return -(p * np.log(p)).sum(-1)

    inside, outside = entropy(loaded.test), entropy(other)
    expected = roc_auc_score([0] * len(inside) + [1] * len(outside), np.concatenate([inside, outside]))
    assert found["chains"][0]["steps"][1]["who"][2]["auroc"] == pytest.approx(expected, abs=1e-4)


def test_costs_are_those_of_files_and_passes(chain, found, tmp_path):
    steps = {step["method"]: step["who"] for step in found["chains"][0]["steps"]}
    one, two, ensemble = steps["peers"]
    assert one["bytes"] == run_of(chain, "peers").weights_file("one").stat().st_size
    for key in ("bytes", "passes", "microseconds"):
        assert ensemble[key] == one[key] + two[key] > 0
    assert (steps["dnn"][0]["passes"], one["passes"], steps["shipped"][0]["passes"]) == (1, 3, 3)
    # The averaged student is one plain network, whatever its run holds of members.
    student = run_of(chain, "distilled")
    save_file(student["net"].materialise().state_dict(), tmp_path / "plain.safetensors")
    assert steps["distilled"][0]["bytes"] == (tmp_path / "plain.safetensors").stat().st_size == steps["dnn"][0]["bytes"]
    assert steps["shipped"][0]["bytes"] < steps["scaled"][0]["bytes"] / 2


def test_the_command_prints_a_table_and_draws(chain, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["figure", "pipeline", str(chain.folder), "--out", str(tmp_path / "p.svg"), "--device", "cpu"])
    assert stopped.value.code == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["step", "ACC", "NLL", "ECE", "AUROC", "KB", "passes", "µs/image"]
    accuracy = reporting.evaluate(chain, device="cpu")["peers"][0]["accuracy"]
    row = next(line.split() for line in lines if line.startswith("shipped"))
    assert row[2] == f"{100 * accuracy:.2f}"
    assert "<svg" in (tmp_path / "p.svg").read_text()


def figures(name, **more):
    return dict.fromkeys(module.COLUMNS, None) | {"name": name, **more}


def test_several_seeds_are_a_mean_and_its_standard_error():
    steps = [
        [{"method": "dnn", "who": [figures("net", accuracy=a, bytes=2000)]},
         {"method": "peers", "who": [figures("one", accuracy=a / 2, bytes=b), figures("two", accuracy=a, bytes=b)]}]
        for a, b in ((0.5, 1000), (0.6, 2000), (0.7, 6000))
    ]  # fmt: skip
    heading, *rows = pipeline_table({"chains": [{"steps": some} for some in steps]}).splitlines()
    assert heading.split() == ["step", "ACC", "KB"]
    assert [row.split() for row in rows] == [
        ["dnn", "net", "60.00", "±", "5.77", "2.0", "±", "0.0"],
        ["peers", "one", "30.00", "±", "2.89", "3.0", "±", "1.5"],
        ["two", "60.00", "±", "5.77", "3.0", "±", "1.5"],
    ]
    alone = pipeline_table({"chains": [{"steps": steps[0]}]}).splitlines()
    assert alone[1].split() == ["dnn", "net", "50.00", "2.0"]


def drawn_panels(*chains):
    """Draw chains of two steps, given by their figures; return the panels by heading."""
    given = [{"steps": [{"method": f"step {n}", "who": [figures("net", **one)]} for n, one in enumerate(chain)]}
             for chain in chains]  # fmt: skip
    figure = module.draw_pipeline({"chains": given})
    figure.draw_without_rendering()
    return {axes.get_title(): axes for axes in figure.axes}


def test_an_axis_has_bars_where_it_begins_at_zero_and_dots_where_it_does_not():
    small = {"accuracy": 0.9, "nll": 0.2, "ece": 0.01, "auroc": 0.2, "bytes": 1000, "microseconds": 5.0}
    large = {"accuracy": 0.95, "nll": 0.3, "ece": 0.04, "auroc": 0.9, "bytes": 90_000, "microseconds": 70.0}
    panels = drawn_panels([small, large])
    begins = {name: axes.get_xlim()[0] == 0 for name, axes in panels.items()}
    assert begins == {"ACC": False, "NLL": True, "ECE": True, "AUROC": True, "KB": False, "µs/image": False}
    for (name, axes), key in zip(panels.items(), module.DRAWN, strict=True):
        expected = [one[key] * module.COLUMNS[key][1] for one in (small, large)]
        lengths = [bar.get_width() for bar in axes.patches]
        dots = [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "o"]
        assert (lengths, dots) == ((pytest.approx(expected), []) if begins[name] else ([], pytest.approx(expected)))
        low, high = axes.get_xlim()
        assert all(low <= value <= high for value in expected)
        right = axes.get_window_extent().x1
        assert [text.get_window_extent().x1 < right + 10 for text in axes.texts] == [True, True], name


def test_bars_and_dots_have_standard_errors_over_seeds():
    chains = [[{"accuracy": a, "nll": 1 - a, "bytes": 1000 * a}, {"accuracy": 0.9, "nll": 0.1, "bytes": 9}]
              for a in (0.8, 0.84, 0.94)]  # fmt: skip
    error = np.std([80, 84, 94], ddof=1) / 3**0.5
    panels = drawn_panels(*chains)
    for name, mean, half in (("ACC", 86, error), ("NLL", 0.14, error / 100), ("KB", 0.86, error / 100)):
        ends = [bars.get_segments()[0][:, 0] for bars in panels[name].collections]
        assert ends[0] == pytest.approx([mean - half, mean + half])
        assert ends[1][0] == pytest.approx(ends[1][1])
    assert next(iter(panels.values())).figure.get_suptitle() == "Mean and standard error over 3 seeds"
    alone = drawn_panels(chains[0])
    assert not any(axes.collections for axes in alone.values())
    assert next(iter(alone.values())).figure.get_suptitle() == ""


def test_a_step_with_an_infinite_loss_has_its_number_alone():
    axes = drawn_panels([{"nll": float("inf")}, {"nll": 0.5}])["NLL"]
    assert [bar.get_width() for bar in axes.patches] == [0.5]
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [("inf", 0), ("0.500", 0.5)]


def test_what_is_from_elsewhere_is_told_apart_on_average():
    outside = {name: {"auroc": value} for name, value in (("a", 0.9), ("b", 0.5), ("c", 0.1))}
    found = {"name": "net", "accuracy": 0.5, "nll": 1.0, "ece": 0.1, "out_of_distribution": outside}
    assert module._figures(found, ["a", "b"])["auroc"] == pytest.approx(0.7)
    assert module._figures(found, [])["auroc"] is None


def test_the_time_of_a_prediction_is_the_best_of_those_after_the_first(monkeypatch):
    ticks = itertools.accumulate([0, 1.0, 0, 4.0, 0, 2.0, 0, 3.0])  # seconds of each prediction
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    posterior = types.SimpleNamespace(
        predict=lambda images, draws: types.SimpleNamespace(probabilities=torch.full((len(images), draws), 0.5))
    )
    assert module._microseconds(posterior, torch.zeros(5, 1), 3) == pytest.approx(1e6 * 2 / 5)


def test_runs_that_came_about_otherwise_are_refused(chain):
    with pytest.raises(InputError, match="the runs have different steps"):
        pipeline([chain.folder, run_of(chain, "scaled").folder], device="cpu")


def test_photographs_are_patches_of_scikit_learns_two():
    split = load_images("photographs")
    grey = np.asarray(load_sample_images().images[0], np.float64).mean(-1)
    blocks = grey[: 4 * 106, : 4 * 160].reshape(106, 4, 160, 4).mean((1, 3))
    assert np.abs(split.images[0, 0].numpy() - blocks[:8, :8]).max() <= 0.5
    assert np.abs(split.images[21, 0].numpy() - blocks[8:16, 8:16]).max() <= 0.5
    with pytest.raises(InputError, match="no classes to learn"):
        load("photographs")


def test_the_packaged_pipelines_lead_back_to_peers_that_teach_each_other():
    for name in packaged():
        if name.startswith("pipeline/") and name.endswith("-shipped"):
            kinds, at = [], load_recipe(name)
            while True:
                kinds.append(at.peers[0].posterior.kind)
                if at.teachers is None and at.peers[0].start_from is None:
                    break
                at = load_recipe(at.teachers.runs[0] if at.teachers else at.peers[0].start_from)
            assert kinds == ["shared", "mean_field", "rank_one", "mean_field"], json.dumps([name, kinds])
            assert len(at.peers) > 1
            assert {"mutual", "weight_diversity", "feature_diversity"} <= at.stages[-1].terms.keys()
