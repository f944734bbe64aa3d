"""The benchmark: its figures follow from what was timed, and a failure, a budget or a cut loses nothing else."""

import json
import math
from pathlib import Path

import pytest
import torch

from commands import called, refused
from peerbayes import cli, networks
from peerbayes.bench import measuring, theirs
from peerbayes.bench.codebooks import VIT, SharedWeights, vit_weights
from peerbayes.bench.ratios import NEEDS_GPU, RATIOS, figures_of
from peerbayes.bench.timing import THEIRS, Bench
from peerbayes.inference import prediction
from peerbayes.reports.figures import bench_figure, png
from peerbayes.training.reporters import Reporter

HEADLINES = {
    "pair_epoch_s", "packed3_epoch_s", "deterministic_pair_epoch_s", "bayesian_over_deterministic", "single_step_ms",
    "bayesian_torch_step_ms", "speedup_single", "speedup_packed", "predict_50x10k_s", "predict_rate",
    "predict_float32_50x10k_s", "eager_pair_epoch_s", "compiled_pair_epoch_s", "peak_memory_gib", "growth",
}  # fmt: skip


def run(path, only=(), budget=None):
    return measuring.run("cpu", path, only, True, budget, Reporter())[0]


def leaves(figures, above=""):
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


@pytest.fixture
def stopwatch(monkeypatch):
    """No cohort is trained: each is said to take a number of its own. Returns the keys in the order of measuring."""
    asked = []

    def fake(self, steps, engine, recipes, count=1):
        asked.extend(recipes)
        return {key: {"median": float(len(key)), "spread": [1.0, 99.0], "setup_s": 0.5} for key in recipes}

    def fake_prediction(self, key, *arguments, **options):
        asked.append(key)
        return {key: {"median": 4.0, "spread": [3.0, 5.0], "setup_s": 0.5}}

    def fake_steps(_bench):
        asked.append("single_step_ms")
        medians = {"single_step_ms": 2.0} | dict(zip(THEIRS, (9.0, 6.0), strict=True))
        return {key: {"median": value, "setup_s": 0.5} for key, value in medians.items()}

    monkeypatch.setattr(Bench, "epochs", fake)
    monkeypatch.setattr(Bench, "predictions", fake_prediction)
    monkeypatch.setattr(theirs, "steps", fake_steps)
    return asked


def test_a_quick_run_measures_everything_that_a_cpu_can(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(prediction.TOGETHER, "cpu", 12345)
    state = torch.random.get_rng_state()
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--quick", "--device", "cpu", "--out", str(tmp_path / "b.json"), "--json", "--quiet"])
    assert not end.value.code
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "b.json").read_text())
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert set(record["figures"]) >= HEADLINES
    assert record["versions"]["torch"] == torch.__version__
    found = dict(leaves(record["figures"]))
    assert {key for key, value in found.items() if value is None} == set(record["notes"])
    gpu = {"packed3_epoch_s", "compiled_pair_epoch_s", "predict_float32_50x10k_s"}
    assert {key for key, why in record["notes"].items() if why == NEEDS_GPU} >= gpu
    unknown = {key for key in record["notes"] if not key.startswith(("peak_memory", "bayesian_torch", "speedup"))}
    assert unknown == gpu | {"packed_network_step_ms"}
    for key, one in record["measurements"].items():
        if "median" in one and isinstance(one["median"], float):
            low, high = one["spread"]
            assert 0 < low <= one["median"] <= high, key
            assert one["repeats"] == record["settings"]["repeats"]
            assert record["setup_s"][key] > 0
    parts = found["bayesian_pair_epoch_s"], found["deterministic_pair_epoch_s"]
    assert found["bayesian_over_deterministic"] == parts[0] / parts[1]
    assert found["predict_rate"] == 500_000 / found["predict_50x10k_s"]
    assert prediction.TOGETHER["cpu"] == 12345
    assert torch.equal(torch.random.get_rng_state(), state)


def test_derived_figures_are_quotients_of_their_parts():
    medians = {"packed3_epoch_s": 3.9, "single_step_ms": 2.0, "predict_50x10k_s": 0.5, "pair_epoch_s": 1.0}
    medians |= dict(zip((*THEIRS, *RATIOS["bayesian_over_deterministic"]), (24.0, 30.0, 1.5, 1.2)))
    medians |= {f"distillation.{name}_step_ms": ms for name, ms in (("kd", 2.0), ("latentbe", 3.0))}
    medians |= {"distillation.latentbe_tdiv_sdiv_step_ms": 5.0}
    medians |= {
        f"sharing.{name}_draw_ms": ms for name, ms in (("mean_field", 4.0), ("moment", 3.0), ("hierarchical", 7.0))
    }
    for name, ms in (("mean_field", 4.0), ("moment", 5.0), ("hierarchical", 6.0), ("cluster", 2.0)):
        medians |= {f"sharing.{name}_step_ms": ms, f"sharing.predict_{name}_s": ms * ms}
    measured = {key: {"median": value} for key, value in medians.items()}
    measured["pair_epoch_s"]["peak_memory_gib"] = 0.75
    found = figures_of([*medians, "eager_pair_epoch_s", "compiled_pair_epoch_s"], measured, batch=128)
    figures = found["figures"]
    assert figures["bayesian_torch_step_ms"] == 24  # the faster of the two
    assert figures["packed_network_step_ms"] == pytest.approx(3900 / 390 / 6)
    assert figures["speedup_single"] == 12
    assert figures["speedup_packed"] == pytest.approx(24 / (10 / 6))
    assert figures["bayesian_over_deterministic"] == pytest.approx(1.25)
    assert figures["predict_rate"] == 1e6
    assert (figures["latentbe_over_kd"], figures["tdiv_sdiv_over_kd"]) == (1.5, 2.5)
    assert (figures["moment_draw_over_mean_field"], figures["hierarchical_draw_over_mean_field"]) == (0.75, 1.75)
    kinds = ("moment", "hierarchical", "cluster")
    assert [figures[f"{kind}_step_over_mean_field"] for kind in kinds] == [1.25, 1.5, 0.5]
    assert [figures[f"{kind}_predict_over_mean_field"] for kind in kinds] == [25 / 16, 2.25, 0.25]
    assert figures["peak_memory_gib"]["captured"] == 0.75
    assert found["notes"]["peak_memory_gib.eager"] == "needs eager_pair_epoch_s"


def test_distillation_is_timed_on_the_network_that_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    built, build = [], networks.build
    monkeypatch.setattr(networks, "build", lambda name, inputs: built.append(name) or build(name, inputs))
    words = ["--quick", "--device", "cpu", "--quiet", "--only", "distillation"]
    called("bench", *words, "--student", "resnet20")
    (path,) = (tmp_path / "results").glob("bench-*-resnet20-quick.json")  # beside the usual one, which it would spoil
    record = json.loads(path.read_text())
    assert record["settings"]["student"] == "resnet20"
    assert set(built) == {"resnet20"}
    assert all(value > 0 for value in record["figures"]["distillation"].values())
    assert "there is no network 'resnet21'" in refused(capsys, "bench", *words, "--student", "resnet21")


def test_headlines_are_measured_first_and_growth_last(tmp_path, stopwatch):
    run(tmp_path / "b.json")
    growing = [key.startswith("growth") for key in stopwatch]
    assert growing == sorted(growing)
    assert stopwatch[0] == "pair_epoch_s"


def test_a_failure_is_one_note_and_the_rest_goes_on(tmp_path, stopwatch, monkeypatch):
    def broken(_bench):
        written = json.loads((tmp_path / "b.json").read_text())  # what came before is safe
        assert written["figures"]["pair_epoch_s"] == len("pair_epoch_s")
        raise torch.OutOfMemoryError("no room\nat all")

    monkeypatch.setattr(theirs, "steps", broken)
    record = run(tmp_path / "b.json")
    assert record["figures"]["single_step_ms"] is None
    assert record["notes"]["single_step_ms"] == "OutOfMemoryError: no room"
    assert record["notes"]["speedup_single"] == "needs bayesian_torch_step_ms and single_step_ms"
    assert record["figures"]["predict_50x10k_s"] == 4
    assert record == json.loads((tmp_path / "b.json").read_text())
    assert png(bench_figure(record)).startswith(b"\x89PNG")


def test_an_interrupted_run_keeps_what_it_has(tmp_path, stopwatch, monkeypatch):
    def interrupted(_bench):
        raise KeyboardInterrupt

    monkeypatch.setattr(theirs, "steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b.json")
    record = json.loads((tmp_path / "b.json").read_text())
    assert set(record["figures"]) >= HEADLINES
    assert record["figures"]["bayesian_over_deterministic"] is not None
    assert record["notes"]["predict_50x10k_s"] == "not measured"


def test_nothing_is_started_after_the_budget(tmp_path, stopwatch):
    record = run(tmp_path / "b.json", budget=1e-9)
    assert stopwatch == []
    assert all(value is None for _, value in leaves(record["figures"]))
    assert record["notes"]["pair_epoch_s"] == "left out: the 1e-09 s were used up"
    assert png(bench_figure(record)).startswith(b"\x89PNG")
    assert bench_figure(record).axes == []


def test_only_what_was_measured_is_drawn(tmp_path, stopwatch):
    record = run(tmp_path / "b.json", only=["growth.draws.2", "pair_epoch_s"])
    engines, draws = bench_figure(record).axes
    assert [label.get_text() for label in engines.get_yticklabels()] == ["eager"]
    assert (draws.get_xlabel(), draws.lines[0].get_xdata()) == ("draws", [2])


def test_a_budget_that_lets_nothing_be_measured_is_refused_and_nothing_is_written(tmp_path, capsys):
    found = refused(capsys, "bench", "--quick", "--budget", 0, "--out", tmp_path / "b.json", "--device", "cpu")
    assert found == "--budget 0: nothing would be measured; expected seconds above 0"
    assert list(tmp_path.iterdir()) == []


def test_only_measures_what_a_figure_needs_and_keeps_the_rest(tmp_path, stopwatch):
    path = tmp_path / "b.json"
    run(path, ["bayesian_over_deterministic"])
    assert set(stopwatch) == {"bayesian_pair_epoch_s", "deterministic_pair_epoch_s"}
    stopwatch.clear()
    record = run(path, ["growth.draws", "speedup_single"])
    assert stopwatch == ["single_step_ms", "growth.draws.1", "growth.draws.2"]
    assert record["figures"]["bayesian_over_deterministic"] is not None
    assert record["figures"]["speedup_single"] == 3

    old = json.loads(path.read_text())
    old["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(old))
    record = run(path, ["growth.draws"])
    assert record["figures"]["speedup_single"] is None  # of another torch


@pytest.mark.parametrize(
    ("only", "shown"),
    [
        (["pair_epoch_s"], {"pair_epoch_s", "peak_memory_gib.captured"}),
        (["growth.draws"], {"growth.draws.1", "growth.draws.2"}),
        (["bayesian_over_deterministic"], {*RATIOS["bayesian_over_deterministic"], "bayesian_over_deterministic"}),
        (["speedup_single"], {"single_step_ms", *THEIRS, "bayesian_torch_step_ms", "speedup_single"}),
        (["predict_rate", "growth.peers"], {"predict_50x10k_s", "predict_rate", "growth.peers.2"}),
    ],
)
def test_only_prints_what_was_asked_for_and_what_follows_from_it(tmp_path, stopwatch, capsys, only, shown):
    words = ["bench", "--quick", "--device", "cpu", "--out", str(tmp_path / "b.json"), "--quiet"]
    run(tmp_path / "b.json", ["eager_pair_epoch_s"])  # which the file keeps
    with pytest.raises(SystemExit) as end:
        cli.main([*words, *(word for name in only for word in ("--only", name))])
    assert not end.value.code
    lines, files = capsys.readouterr().out.strip().rsplit("\n\n", 1)
    assert {line.split()[0] for line in lines.splitlines()} == shown
    assert files.startswith(str(tmp_path / "b.json"))
    assert json.loads((tmp_path / "b.json").read_text())["figures"]["eager_pair_epoch_s"] is not None


def test_the_weights_of_a_vit_are_as_many_as_timm_has():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        real, ours = timm.create_model("vit_base_patch16_224"), vit_weights()
    kinds = torch.nn.Conv2d, torch.nn.Linear
    expected = sorted(tuple(m.weight.shape) for m in real.modules() if isinstance(m, kinds))
    assert sorted(tuple(layer.weight.shape) for layer in ours) == expected
    assert 86_000_000 < sum(math.prod(shape) for shape in expected) < 87_000_000


@pytest.mark.parametrize("only", [["sharing.clustering_s", "sharing.clustering_vit_s"], ["sharing"]])
def test_a_vit_is_clustered_on_a_cpu_only_by_name(tmp_path, monkeypatch, only):
    def fake(_self, key, _field):
        return {key: {"median": float(len(key))}}

    for name in ("draws", "steps", "predictions"):
        monkeypatch.setattr(SharedWeights, name, lambda _self: 1 / 0)
    monkeypatch.setattr(SharedWeights, "_clustering", fake)
    monkeypatch.setattr("peerbayes.bench.codebooks.vit_weights", lambda wide: torch.nn.Linear(wide, 1))
    record = measuring.run("cpu", tmp_path / "b.json", only, False, None, Reporter())[0]
    found = record["figures"]["sharing"]
    assert found["clustering_s"] == len("sharing.clustering_s")
    if VIT in only:
        assert found["clustering_vit_s"] == len(VIT)
    else:
        assert record["notes"][VIT] == f"left out: slow on a CPU; measure it with --only {VIT}"


def test_settings_that_came_later_do_not_make_a_file_worthless(tmp_path, stopwatch):
    path = tmp_path / "b.json"
    run(path, ["bayesian_over_deterministic"])
    for change, kept in (({"components": None}, True), ({"batch": 5}, False)):
        old = json.loads(path.read_text())
        old["settings"] = {k: v for k, v in (old["settings"] | change).items() if v is not None}
        path.write_text(json.dumps(old))
        record = run(path, ["growth.draws"])
        assert (record["figures"]["bayesian_over_deterministic"] is not None) == kept


def test_shared_weights_are_measured_against_one_mean_field_posterior(tmp_path):
    record = run(tmp_path / "b.json", ["moment_draw_over_mean_field", "sharing.clustering_s"])
    drawn = record["measurements"]["sharing.moment_draw_ms"]
    assert drawn["weights"] == record["measurements"]["sharing.clustering_s"]["weights"]
    assert 0.1 < record["measurements"]["sharing.clustering_s"]["peak_resident_gib"] < 24  # torch alone takes as much
    found = record["figures"]["sharing"]
    assert record["figures"]["moment_draw_over_mean_field"] == found["moment_draw_ms"] / found["mean_field_draw_ms"]
    assert found["point_step_ms"] is None  # was not asked for


def test_an_engine_that_gives_up_is_a_failure(tmp_path, monkeypatch):
    def give_up(self):
        self.reporter.warn("going on eagerly")

    monkeypatch.setattr("peerbayes.training.learner.Learner._begin_engine", give_up)
    record = run(tmp_path / "b.json", ["pair_epoch_s"])
    assert record["notes"]["pair_epoch_s"] == "RuntimeError: going on eagerly"


def test_an_unknown_figure_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--quick", "--device", "cpu", "--out", str(tmp_path / "b.json"), "--only", "pair_epoch"])
    assert end.value.code == 2
    assert "there is no figure 'pair_epoch'; did you mean 'pair_epoch_s'" in capsys.readouterr().err
    assert not Path(tmp_path / "b.json").exists()
