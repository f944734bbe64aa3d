"""Figures of shared weights against numpy: posteriors in the plane, bytes on disk, confidence by class."""

import functools
import io
import itertools
import json
import shutil
import statistics

import numpy as np
import pytest
import torch
from matplotlib.collections import QuadMesh
from PIL import Image

from peerbayes import cli, networks
from peerbayes import reports as reporting
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.shared import Shared
from peerbayes.data import load as load_data
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.papers import catalogue
from peerbayes.papers.weight_sharing import against_bytes, confidence
from peerbayes.posteriors import MeanField, Point
from peerbayes.recipes.recipe import load_recipe
from peerbayes.recipes.recipe_data import network_inputs
from peerbayes.reports import groups, weights
from peerbayes.reports.evaluating import write_record
from peerbayes.reports.figures import png
from peerbayes.reports.page import report_page
from peerbayes.runs.run import Run

WEIGHTS = 64 * 256 + 256 * 256 + 256 * 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A point, a mean-field posterior, and codebooks of 4 and 12 components over two seeds; one has no record."""
    folder = tmp_path_factory.mktemp("runs")
    np.savez(folder / "noise.npz", test_images=np.random.default_rng(0).integers(0, 255, (40, 8, 8)).astype(np.uint8))
    inputs = network_inputs(load_data("digits", validation=200))
    for seed in (0, 1):
        torch.manual_seed(seed)
        network = networks.build("mlp", inputs)
        write(folder / f"dnn-seed{seed}", Point(network), "dnn", seed, inputs)
        write(folder / f"stage1-seed{seed}", MeanField(network, rho=-6), "stage1", seed, inputs)
        for count in (12, 4):
            shared = Shared(network, book(count, seed), seed=seed, name="net")
            changes = [f"evaluation.out_of_distribution=['{folder / 'noise.npz'}']"]
            changes.append(f"peers.0.posterior.components={count}")
            write(folder / f"k{count}-seed{seed}", shared, "shared", seed, inputs, changes)
    (folder / "k4-seed1" / "evaluation.json").rename(folder / "kept.json")
    return folder


def book(components, seed):
    """Blended weights at the beginning, outliers at the end."""
    generator = torch.Generator().manual_seed(seed)
    numbers = functools.partial(torch.rand, generator=generator)
    share = numbers(700, 1)
    return Codebook(
        component=numbers(components, 2) * torch.tensor([0.4, 0.02]) + torch.tensor([-0.2, 0.001]),
        cholesky=numbers(components, 3) * 0.01,
        label=torch.randint(components, (WEIGHTS,), generator=generator),
        blended=torch.arange(16000, 16700),
        blend_component=torch.randint(components, (700, 2), generator=generator),
        blend_weight=torch.cat([share, 1 - share], 1),
        outlier=torch.arange(WEIGHTS - 900, WEIGHTS),
        outlier_mean=numbers(900) * 2 - 1,
        outlier_std=numbers(900) * 0.1 + 0.01,
    )


def write(folder, posterior, recipe, seed, inputs, changes=()):
    """Write a finished run by hand, with its record."""
    folder.mkdir()
    made = load_recipe(f"sharing/digits-resnet8-{recipe}", ["peers.0.network=mlp", "evaluation.draws=3", *changes])
    (folder / "recipe.toml").write_text(made.to_toml())
    about = {"seed": seed, "finished": True, "inputs": inputs.describe(), "seconds": 1.0}
    (folder / "run.json").write_text(json.dumps(about | {"hardware": "a CPU", "versions": {}}))
    posterior.save(folder / "weights-net.safetensors")
    found = reporting.evaluate(folder, device="cpu")
    if recipe == "dnn":
        del found["peers"][0]["bytes"]  # as records were before they held it
    write_record(folder / "evaluation.json", found)


def drawn(figure):
    with Image.open(io.BytesIO(png(figure))) as picture:
        return len(picture.convert("RGB").resize((300, 200)).getcolors(60_000))


def texts(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


# ---- posteriors -------------------------------------------------------------------------------------------------


def test_a_mean_field_posterior_is_a_histogram_of_its_weights(runs):
    field = Run(runs / "stage1-seed0")["net"]
    (found,) = weights.posterior([runs / "stage1-seed0"])["series"]
    mean, scale = (values.detach().double().numpy() for values in (field.mean, field.std))
    edges = np.array(found["mean_edges"]), np.array(found["scale_edges"])
    assert (edges[0][0], edges[0][-1]) == (mean.min(), mean.max())
    expected = np.histogram2d(mean, scale, edges)[0]
    assert np.array_equal(found["count"], expected)
    assert expected.sum() == found["weights"] == field.layout.size
    assert found["tails"] == pytest.approx(np.quantile(mean, [0.01, 0.99], method="inverted_cdf"))


@pytest.mark.parametrize("wide", [False, True])
def test_scales_are_counted_in_equal_bins_or_by_their_logarithm_if_they_are_wide(wide, monkeypatch):
    monkeypatch.setattr(weights, "PART", 300)
    field = MeanField(torch.nn.Linear(40, 30, bias=False))
    with torch.no_grad():
        field.rho.copy_(torch.linspace(-8, -2 if wide else -6, 1200)[torch.randperm(1200)])
    found = weights._of_weights(field, slice(100, 1100))
    mean, scale = (values.detach().double().numpy()[100:1100] for values in (field.mean, field.std))
    assert wide == (scale.max() > 20 * scale.min())
    space = np.geomspace if wide else np.linspace
    np.testing.assert_allclose(found["scale_edges"], space(scale.min(), scale.max(), 76), rtol=1e-6)
    np.testing.assert_allclose(found["mean_edges"], np.linspace(mean.min(), mean.max(), 151), rtol=1e-6, atol=1e-9)
    assert np.sum(found["count"]) == 1000
    expected = np.histogram(scale, found["scale_edges"])[0]
    assert np.abs(np.cumsum(np.sum(found["count"], 0)) - np.cumsum(expected)).max() <= 1  # the ends lie on edges


@pytest.mark.parametrize("value", [0.0, -0.5, 3.0])
def test_a_histogram_of_one_number_has_it_in_its_middle(value):
    edges = weights._edges(torch.full((5,), value), 10, False).numpy()
    margin = max(1e-6, abs(value) / 10)
    np.testing.assert_allclose(edges, np.linspace(value - margin, value + margin, 11), atol=1e-15)


def almost_one_scale():
    """A layer whose scales differ by rounding alone, with other means."""
    field = MeanField(torch.nn.Linear(40, 8, bias=False))
    with torch.no_grad():
        field.rho.copy_(torch.linspace(-5.57601, -5.57599, 320))
    assert 0 < np.ptp(field.std.detach().numpy()) < 2e-7
    one = {"label": "x", "kind": "mean_field", "weights": 320, **weights._of_weights(field, slice(0, 320))}
    return one, field.mean.detach().numpy(), field.std.mean().item()


def test_scales_that_are_almost_one_are_in_one_bin_on_an_axis_that_says_their_size():
    one, _, scale = almost_one_scale()
    edges, count = np.array(one["scale_edges"]), np.sum(one["count"], 0)
    (full,) = np.nonzero(count)[0]
    assert count[full] == 320
    assert edges[full] < scale < edges[full + 1]
    assert (edges[0], edges[-1]) == pytest.approx((0.9 * scale, 1.1 * scale), rel=1e-3)
    figure = weights.draw_posterior({"layer": None, "series": [one]})
    figure.draw_without_rendering()
    plane, scales, *_ = figure.axes
    assert [axis.get_offset_text().get_text() for axis in (plane.yaxis, scales.xaxis)] == ["", ""]
    boxes = [label.get_window_extent() for label in scales.get_xticklabels()]
    assert len(boxes) > 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("others", [[0.001, 0.003], [0.0001, 0.09]], ids=["linear", "logarithmic"])
def test_weights_of_almost_one_scale_are_seen_beside_a_posterior_of_many(others):
    one, mean, scale = almost_one_scale()
    nothing = {"mean": [], "scale": []}
    shared = {
        "label": "y", "kind": "shared", "weights": 2, "components": nothing | {"cholesky": [], "members": []},
        "blended": nothing | {"count": 0}, "outliers": {"mean": [0.3, 0.5], "scale": others, "count": 2},
        "mean_edges": [0.3, 0.4, 0.5], "means": {"single": [0, 0], "blended": [0, 0], "outliers": [1, 1]},
    }  # fmt: skip
    figure = weights.draw_posterior({"layer": None, "series": [one, shared]})
    figure.draw_without_rendering()
    plane = figure.axes[0]
    (mesh,) = (drawn for drawn in plane.collections if isinstance(drawn, QuadMesh))
    counts, corners = mesh.get_array().filled(0), mesh.get_coordinates()
    (row,) = np.nonzero(counts.sum(1))[0]
    assert corners[row, 0, 1] < scale < corners[row + 1, 0, 1]
    assert np.array_equal(counts[row], np.histogram(mean.astype(float), corners[0, :, 0])[0])
    low, high = (plane.transData.transform((0, corners[place, 0, 1]))[1] for place in (row, row + 1))
    assert high - low > 3  # pixels


@pytest.mark.parametrize("layer", [None, "hidden.1.0.weight"])
def test_a_shared_posterior_is_its_components_blends_and_outliers(runs, layer, monkeypatch):
    monkeypatch.setattr(weights, "MARKS", 25)
    posterior = Run(runs / "k12-seed0")["net"]
    (found,) = weights.posterior([runs / "k12-seed0"], layer)["series"]
    first, last = (64 * 256, 64 * 256 + 256 * 256) if layer else (0, WEIGHTS)
    book = posterior.codebook()
    kind = np.zeros(WEIGHTS, int)
    kind[book.blended], kind[book.outlier] = 1, 2
    place = np.arange(WEIGHTS)[first:last]
    counts = np.bincount(kind[place], minlength=3)
    assert counts.sum() == found["weights"]
    assert counts[1:].tolist() == [found["blended"]["count"], found["outliers"]["count"]]
    parts = found["components"]
    members = np.bincount(book.label.numpy()[place][kind[place] == 0], minlength=12)
    assert parts["members"] == members.tolist()
    assert parts["mean"] == book.component[:, 0].tolist()
    assert parts["cholesky"] == book.cholesky.tolist()
    mean = posterior.mean.detach().numpy()
    for name, number in (("blended", 1), ("outliers", 2)):
        assert len(found[name]["mean"]) == min(25, counts[number])  # no more than so many are drawn
        assert np.isin(np.float32(found[name]["mean"]).round(5), mean[place][kind[place] == number].round(5)).all()
    assert parts["scale"] == book.component[:, 1].tolist()
    blends = (book.blend_weight[:, :, None] * book.component[book.blend_component.long()]).sum(1).detach()
    marks = torch.tensor([found["blended"]["mean"], found["blended"]["scale"]]).T
    assert (marks[:, None] - blends).abs().amax(2).amin(1).max() < 1e-6
    outliers = set(
        zip(book.outlier_mean.tolist(), book.outlier_std.tolist(), strict=True)
    )  # rounded means may be equal
    assert set(zip(found["outliers"]["mean"], found["outliers"]["scale"], strict=True)) <= outliers
    for name, number in (("single", 0), ("blended", 1), ("outliers", 2)):
        expected = np.histogram(mean[place][kind[place] == number].astype(float), found["mean_edges"])[0]
        assert np.abs(np.cumsum(found["means"][name]) - np.cumsum(expected)).max() <= 1  # one may lie on an edge


def test_a_layer_shows_the_components_that_it_has_and_no_others():
    label = torch.zeros(60, dtype=torch.int64)
    label[3], label[50:] = 1, 2
    codebook = Codebook(
        component=torch.tensor([[0.125 * k, 0.25] for k in range(6)]),
        cholesky=torch.zeros(6, 3),
        label=label,
        blended=torch.tensor([7, 45]),
        blend_component=torch.tensor([[0, 3], [2, 4]]),
        blend_weight=torch.tensor([[0.2, 0.8], [0.4, 0.6]]),
        outlier=torch.tensor([8]),
        outlier_mean=torch.tensor([1.0]),
        outlier_std=torch.tensor([0.1]),
    )
    layers = torch.nn.Linear(10, 4, bias=False), torch.nn.Linear(4, 5, bias=False)
    posterior = Shared(torch.nn.Sequential(*layers), codebook)
    for place, expected in ((slice(0, 40), {0: 37, 1: 1, 3: 0}), (slice(40, 60), {0: 9, 2: 10, 4: 0})):
        found = weights._of_components(posterior, place)
        parts = found["components"]
        assert dict(zip(parts["mean"], parts["members"], strict=True)) == {0.125 * k: n for k, n in expected.items()}
        assert [sum(found["means"][name]) for name in ("single", "blended", "outliers")] == [
            sum(expected.values()), 1, int(place.start == 0)
        ]  # fmt: skip


def test_the_picture_has_a_row_a_posterior_and_says_how_many_there_are(runs):
    found = weights.posterior([runs / "stage1-seed0", runs / "k12-seed0"])
    figure = weights.draw_posterior(found)
    planes = [figure.axes[0], figure.axes[3]]
    assert [axes.get_title() for axes in planes] == ["stage1, seed 0 · mlp · digits", "shared, seed 0 · mlp · digits"]
    assert planes[0].get_xlim() == planes[1].get_xlim()
    assert planes[0].get_ylim() == planes[1].get_ylim()
    shared = found["series"][1]
    words = " ".join(texts(planes[1]))
    counts = len(shared["components"]["mean"]), sum(shared["components"]["members"])
    for count in (*counts, shared["blended"]["count"], shared["outliers"]["count"]):
        assert f"{count:,}" in words
    assert drawn(figure) > 50


def test_a_layer_of_outliers_alone_is_drawn():
    nothing = {"mean": [], "scale": []}
    one = {
        "label": "x", "kind": "shared", "weights": 2, "components": nothing | {"cholesky": [], "members": []},
        "blended": nothing | {"count": 0}, "outliers": {"mean": [0.3, 0.5], "scale": [0.1, 0.1], "count": 2},
        "mean_edges": [0.3, 0.4, 0.5], "means": {"single": [0, 0], "blended": [0, 0], "outliers": [1, 1]},
    }  # fmt: skip
    figure = weights.draw_posterior({"layer": "fc.weight", "series": [one]})
    assert texts(figure.axes[0])[0] == "components: 0, with 0 weights of their own (by area)"
    assert drawn(figure) > 20


# ---- bytes ------------------------------------------------------------------------------------------------------


def test_in_a_folder_runs_with_networks_of_ones_own_are_left_out_of_bytes(runs, tmp_path):
    shutil.copytree(runs / "k12-seed0", tmp_path / "shared")
    shutil.copytree(runs / "stage1-seed0", tmp_path / "own")
    recipe = tmp_path / "own" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('network = "mlp"', 'network = "custom"'))
    assert len(groups.open_runs([tmp_path], custom=False)) == 2  # it has been judged
    (tmp_path / "own" / "evaluation.json").unlink()
    with pytest.warns(PeerbayesWarning, match=r"own: peer 'net' has a network of your own; it is left out$"):
        found = groups.open_runs([tmp_path], custom=False)
    assert [run.folder.name for run in found] == ["shared"]
    assert len(groups.open_runs([tmp_path])) == 2
    with pytest.raises(InputError, match=r"own: peer 'net' has a network of your own$"):
        catalogue.write_figure("bytes", [tmp_path / "shared", tmp_path / "own"], tmp_path / "bytes.png")


def test_figures_against_bytes_are_those_of_files_and_records(runs):
    found = against_bytes.size([runs], device="cpu")
    (experiment,) = found["experiments"]
    assert [one["label"] for one in experiment["references"]] == ["DNN", "stage1"]
    (line,) = experiment["lines"]
    assert [point["components"] for point in line["points"]] == [4, 12]
    paths = {path.name: path / "evaluation.json" for path in groups.find_runs(runs)} | {"k4-seed1": runs / "kept.json"}
    records = {name: json.loads(path.read_text())["peers"][0] for name, path in paths.items()}
    for name, point in zip(("dnn", "stage1", "k4", "k12"), [*experiment["references"], *line["points"]]):
        size = [(runs / f"{name}-seed{seed}" / "weights-net.safetensors").stat().st_size for seed in (0, 1)]
        assert point["bytes"]["seeds"] == dict(enumerate(map(float, size)))
        for key in ("accuracy", "nll", "ece"):
            values = [records[f"{name}-seed{seed}"][key] for seed in (0, 1)]
            assert point[key]["mean"] == pytest.approx(statistics.mean(values))
            assert point[key]["standard_error"] == pytest.approx(statistics.stdev(values) / 2**0.5)
    assert records["k4-seed0"]["bytes"] < records["k12-seed0"]["bytes"] < records["stage1-seed0"]["bytes"]
    figure = against_bytes.draw_size(found)
    said = [f"{one['label']}, {one['bytes']['mean'] / 1e3:.3g} kB" for one in experiment["references"]]
    assert texts(figure.axes[2]) == ["shared", *said]  # so much larger that their points would take all the room
    assert figure.axes[0].get_xlim()[1] < 2 * line["points"][-1]["bytes"]["mean"]
    assert [one.get_ydata()[0] for one in figure.axes[0].lines if one.get_label().startswith("DNN")] == [
        pytest.approx(100 * experiment["references"][0]["accuracy"]["mean"])
    ]
    for reference in experiment["references"]:
        reference["bytes"]["mean"] = 2.9 * line["points"][-1]["bytes"]["mean"]
    near = against_bytes.draw_size(found)
    assert texts(near.axes[2]) == ["shared", "DNN", "stage1"]
    assert near.axes[0].get_xlim()[1] > 2.9 * line["points"][-1]["bytes"]["mean"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["4", "12"]
    assert drawn(figure) > 50


def written_codebooks(folder, *given):
    """Write runs as far as the figure looks at them, in folders 0, 1, ...; the bytes grow by 100."""
    usual = load_recipe("sharing/digits-resnet8-shared")
    for place, (options, seed) in enumerate(given):
        recipe = usual.model_dump(exclude_none=True)
        posterior = {"kind": "shared"} | options
        peer = {"name": "net", "network": "mlp", "start_from": f"{place}.safetensors", "posterior": posterior}
        run = folder / str(place)
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(usual.parse(recipe | {"peers": [peer]}, "x").to_toml())
        (run / "run.json").write_text(json.dumps({"seed": seed, "finished": True}))
        (run / "weights-net.safetensors").write_bytes(bytes(100 * place + 7))
        (run / "sharing.json").write_text(json.dumps({"net": {"components_at_first": 50 - place}}))
        judged = {"name": "net", "accuracy": 0.9, "nll": 0.1, "ece": 0.01}
        (run / "evaluation.json").write_text(json.dumps({"peers": [judged]}))


def lines_of(folder):
    (experiment,) = against_bytes.size([folder])["experiments"]
    return {line["label"]: [point["bytes"]["mean"] for point in line["points"]] for line in experiment["lines"]}


def test_settings_are_told_apart_by_what_differs(tmp_path):
    nine, five = ({"components": count, "threshold": 0.2} for count in (9, 5))
    written_codebooks(tmp_path, (nine, 0), (nine, 1), (five, 0), (nine | {"threshold": 0.4}, 0), (nine, 0))
    same = groups.by_setting(groups.open_runs([tmp_path]))
    assert [[run.folder.name for run in group.values()] for group in same] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert lines_of(tmp_path) == {"threshold 0.2": [207, 57, 407], "threshold 0.4": [307]}


def test_which_weights_are_outliers_is_said_only_where_there_are_any(tmp_path):
    few, none = {"components": 9}, {"components": 9, "outliers": False}
    written_codebooks(tmp_path, (few, 0), (few | {"threshold": 0.4}, 0), (none, 0), (none | {"components": 5}, 0))
    assert lines_of(tmp_path) == {"threshold 0.2": [7], "threshold 0.4": [107], "no outliers": [307, 207]}
    written_codebooks(other := tmp_path / "other", (few, 0), (none | {"threshold": 0.4}, 0))
    assert lines_of(other) == {"outliers": [7], "no outliers": [107]}


def test_settings_that_differ_in_much_are_told_apart_by_what_is_unusual(tmp_path):
    others = ({"bits": 8}, {"sampling": "moment", "bits": 8}, {"blend": False}, {"top": 0.0, "em_steps": 3})
    written_codebooks(tmp_path, *((options, 0) for options in ({}, {"components": 9}, *others)))
    unusual = {"8 bits": [207], "moment sampling, 8 bits": [307], "no blending": [407], "top 0.0, EM steps 3": [507]}
    assert lines_of(tmp_path) == {"shared": [107, 7], **unusual}


@pytest.mark.parametrize("given", ["{}", '{"net": {}}', '{"net": 3}', '{"net": {"components_at_first": "many"}}'])
def test_a_damaged_account_of_a_codebook_is_one_sentence(tmp_path, given):
    written_codebooks(tmp_path, ({}, 0))
    (tmp_path / "0" / "sharing.json").write_text(given)
    with pytest.raises(InputError, match=r"sharing\.json: net: .*(missing|valid)"):
        lines_of(tmp_path)


def test_codebooks_of_any_thrift_are_one_line_and_plain_ones_another(tmp_path):
    written_codebooks(
        tmp_path, ({"thrift": 0.1}, 0), ({"thrift": 0.2}, 0), ({"components": 9}, 0), ({"thrift": 0.3}, 0)
    )
    assert lines_of(tmp_path) == {"a thrifty codebook": [307, 107, 7], "a plain codebook": [207]}


def test_a_legend_says_a_method_and_its_options_in_words_that_tell_lines_apart(tmp_path):
    small = {"thrift": 0.006, "outliers": False, "blend": False}
    written_codebooks(tmp_path, ({}, 0), ({"components": 9}, 0), (small, 0))
    path = tmp_path / "2" / "recipe.toml"
    path.write_text(path.read_text().replace('method = "shared"', 'method = "shared_small"'))
    assert lines_of(tmp_path) == {
        "shared": [107, 7],
        "shared_small: a thrifty codebook, no outliers, no blending": [207],
    }
    path.write_text(path.read_text().replace("blend = false", "blend = true"))
    told = {"shared: a plain codebook, outliers": [107, 7], "shared_small: a thrifty codebook, no outliers": [207]}
    assert lines_of(tmp_path) == told  # of few options all are said, of all lines
    alone = tmp_path / "0" / "recipe.toml"
    path.write_text(alone.read_text().replace('method = "shared"', 'method = "mine"'))
    assert lines_of(tmp_path) == {"shared": [107, 7], "mine": [207]}


def test_every_option_of_a_codebook_has_words_of_its_own():
    options = Shared.recipe_options()(kind="shared").model_dump(exclude={"kind", "thrift"})
    merging = {f"merge.{key}": value for key, value in options.pop("merge").items()}
    table = options | {"thrifty": True} | merging
    others = {key: not value if isinstance(value, bool) else 7 for key, value in table.items()}
    words = [against_bytes._words(key, value) for one in (table, others) for key, value in one.items()]
    assert len(set(words)) == len(words) == 2 * len(table)
    assert not [said for said in words if "_" in said or "." in said.split(" ")[0] or "True" in said]
    assert against_bytes._words("merge.distance", 0.0) == "nothing merged"


@pytest.mark.parametrize("factor", [1, 1.001, 1.3, 1.9, 2.4, 5, 20, 60, 400, 40_000])
def test_sizes_on_the_axis_are_true_and_stand_apart(factor):
    points = [
        {"components": 9, **{key: {"mean": value, "standard_error": None} for key in ("accuracy", "nll", "ece")},
         "bytes": {"mean": 12_900 * value, "standard_error": None}}
        for value in (1, factor)
    ]  # fmt: skip
    one = {"network": "mlp", "dataset": "digits", "lines": [{"label": "x", "points": points}], "references": []}
    figure = against_bytes.draw_size({"experiments": [one]})
    figure.draw_without_rendering()
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    assert low < 12_900 <= 12_900 * factor < high
    labels = dict(zip(axes.get_xticks(), axes.get_xticklabels(), strict=True))
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    for place, label in labels.items():
        number, unit = label.get_text().split()
        assert low <= place <= high
        assert float(number) * units[unit] == pytest.approx(place)
    boxes = [label.get_window_extent() for label in labels.values()]
    assert all(left.x1 + 3 < right.x0 for left, right in itertools.pairwise(boxes)), list(labels)


@pytest.mark.parametrize(("apart", "left"), [(1.5, 12), (1.06, 12), (1.002, None), (1.0, 4)])
def test_numbers_at_points_lie_on_nothing_and_stay_where_there_is_room(apart, left):
    """Side by side all twelve stay; of twelve at one place, whose marks cover each other, its four sides are left."""
    points = [
        {"components": 1024, **{key: {"mean": 0.5, "standard_error": None} for key in ("accuracy", "nll", "ece")},
         "bytes": {"mean": 1e5 * apart**number, "standard_error": None}}
        for number in range(12)
    ]  # fmt: skip
    lines = [{"label": label, "points": points[first::2]} for first, label in enumerate("xy")]
    one = {"network": "mlp", "dataset": "digits", "lines": lines, "references": []}
    figure = against_bytes.draw_size({"experiments": [one]})
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [number.get_window_extent() for number in axes.texts]
        assert len(boxes) == left if left else 4 <= len(boxes) < 12
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
        places = axes.transData.transform([(point["bytes"]["mean"], 50 if axes is figure.axes[0] else 0.5)
                                           for point in points])  # fmt: skip
        assert not [box for box in boxes for place in places if box.contains(*place)]


def test_any_axis_of_sizes_has_two_labels_or_more_with_a_sixth_of_it_each():
    for low, factor in itertools.product(np.geomspace(1e3, 1e4, 20), np.geomspace(against_bytes.NARROW, 1e6, 60)):
        places = against_bytes._round_numbers(low, low * factor)
        assert len(places) > 1, (low, factor)
        assert np.diff(np.log(places)).min() > 0.166 * np.log(factor), (low, factor)


# ---- confidence -------------------------------------------------------------------------------------------------


def test_confidence_by_class_is_that_of_the_predictions_over_seeds(runs):
    folders = [runs / "k12-seed0", runs / "k12-seed1"]
    found = confidence.confidence(folders, device="cpu")
    (series,) = found["series"]
    assert (series["seeds"], series["label"]) == ([0, 1], "shared · mlp · digits")
    assert found["levels"] == [0.05, 0.25, 0.5, 0.75, 0.95]
    data = load_data("digits", validation=200).test
    images, labels = data.batch(torch.arange(len(data)), torch.device("cpu"))
    peers = {run.seed: run["net"] for run in map(Run, folders)}
    p = np.concatenate([peer.predict(images, 3, seed=s, name="net").probabilities for s, peer in peers.items()])
    truth = np.tile(labels, 2)
    for label in range(10):
        sure = p[truth == label].max(1).astype(float)
        assert series["count"][label] == len(sure)
        assert series["mean"][label] == pytest.approx(sure.mean())
        assert series["accuracy"][label] == pytest.approx((p[truth == label].argmax(1) == label).mean())
        assert series["quantiles"][label] == pytest.approx(np.quantile(sure, found["levels"]))
    (outside,) = series["outside"].values()
    noise = torch.from_numpy(np.load(runs / "noise.npz")["test_images"])[:, None]
    sure = np.concatenate(
        [peer.predict(noise, 3, seed=s, name="net").probabilities.amax(1) for s, peer in peers.items()]
    )
    assert (outside["count"], outside["mean"]) == (80, pytest.approx(sure.mean()))
    assert outside["quantiles"] == pytest.approx(np.quantile(sure.astype(float), found["levels"]))
    figure = confidence.draw_confidence(found)
    assert [text.get_text() for text in figure.axes[0].texts][:10] == [f"{100 * mean:.1f}" for mean in series["mean"]]
    assert 0 <= figure.axes[0].get_ylim()[0] <= 100 * min(*series["accuracy"], *map(min, series["quantiles"]))
    assert drawn(figure) > 20


def test_many_classes_are_a_band_from_the_worst_to_the_best():
    rng = np.random.default_rng(0)
    accuracy = rng.random(100).round(2).tolist()
    quantiles = np.sort(rng.random((100, 5)), 1).tolist()
    one = {"label": "x", "seeds": [0], "classes": list(map(str, range(100))), "count": [3] * 99 + [0],
           "accuracy": [*accuracy[:99], None], "mean": [*accuracy[:99], None],
           "quantiles": [*quantiles[:99], [None] * 5],
           "outside": {"a/svhn.npz": {"count": 9, "mean": 0.4, "quantiles": [0.1, 0.2, 0.3, 0.4, 0.5]}}}  # fmt: skip
    figure = confidence.draw_confidence({"series": [one]})
    (axes,) = figure.axes
    dots = next(line for line in axes.get_lines() if line.get_label() == "accuracy")
    assert dots.get_ydata().tolist() == pytest.approx(sorted(100 * value for value in accuracy[:99]))
    assert [text.get_text() for text in axes.texts] == ["svhn"]


# ---- the verb ---------------------------------------------------------------------------------------------------


def verb(capsys, *arguments):
    with pytest.raises(SystemExit) as done:
        cli.main(["figure", *map(str, arguments)])
    out, err = capsys.readouterr()
    return done.value.code or 0, out, err


@pytest.mark.parametrize("name", ["posterior", "bytes", "confidence"])
def test_the_verb_writes_a_picture_and_prints_its_numbers(runs, tmp_path, capsys, name):
    code, out, _ = verb(capsys, name, runs / "k12-seed0", "--out", tmp_path / "x.png", "--json", "--device", "cpu")
    assert (code, json.loads(out)["figure"]) == (0, name)
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["posterior", "dnn-seed0"],
            "dnn-seed0: its weights have no scales; expected a mean-field posterior or shared",
        ),
        (["posterior", "k4-seed0", "--layer", "fc"], "k4-seed0: there is no layer 'fc'; known: "),
        (["bytes", "k4-seed0", "--layer", "fc"], "figure bytes: layer is for posterior"),
    ],
)
def test_what_can_not_be_drawn_is_one_sentence(runs, tmp_path, capsys, words, sentence):
    name, folder, *more = words
    code, out, err = verb(capsys, name, runs / folder, *more, "--out", tmp_path / "x.png")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"peers": 3}, "evaluation.json: peers: input should be a valid list"),
        ({"peers": [{"name": "net", "accuracy": 1.0, "nll": 0.1}]}, "evaluation.json: 'peers.0.ece' is missing"),
    ],
)
def test_a_damaged_record_is_one_sentence(runs, tmp_path, capsys, record, sentence):
    shutil.copytree(runs / "k4-seed0", tmp_path / "run")
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(record))
    code, out, err = verb(capsys, "bytes", tmp_path / "run", "--out", tmp_path / "x.png")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert not (tmp_path / "x.png").exists()


def test_only_runs_with_shared_weights_have_their_picture_on_the_page(runs):
    assert weights.shared_picture(Run(runs / "stage1-seed0")) == {}
    shared = Run(runs / "k4-seed0")
    assert isinstance(shared["net"], Shared)
    (picture,) = weights.shared_picture(shared).items()
    record = json.loads((shared.folder / "evaluation.json").read_text())
    pages = [report_page([record], "h", {}, more) for more in ({}, dict([picture]))]
    assert [page.count("<img") for page in pages] == [0, 1]
    assert picture[0] in pages[1]


def test_all_figures_are_known_by_name():
    assert {"posterior", "bytes", "confidence"} <= set(catalogue.NAMES)
    with pytest.raises(InputError, match="did you mean 'posterior'"):
        catalogue.write_figure("posteriors", ["x"])
