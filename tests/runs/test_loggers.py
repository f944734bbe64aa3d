"""Runs in the stores of real loggers: what they hold is what run folders say, once, also of runs that were resumed."""

import json
import shutil
import sqlite3
import sys

import pytest
import torch
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import peerbayes as pb
from commands import QUIET, called, change, ended, refused, write_small
from learners import Recorder, stopped_at
from peerbayes.errors import InputError
from peerbayes.runs import loggers, tracking
from peerbayes.runs.run import Run

pytestmark = pytest.mark.filterwarnings("ignore", "default::peerbayes.errors.PeerbayesWarning")  # loggers' own
BOTH = ("--log", "tensorboard,mlflow")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of small data, recipes, and MLflow's store."""
    folder = write_small(tmp_path_factory.mktemp("logged"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/store.db")
        yield folder


def trained(place, *words, recipe="small.toml"):
    return json.loads(called("train", place / recipe, "--data-root", place, *words, "--json", *QUIET))


@pytest.fixture(scope="module")
def resumed(place):
    """A run that was interrupted between checkpoints, after epochs that were logged, and resumed; its record."""
    words = ("--run", place / "resumed", "--checkpoint-every", 6, *change("stages.0.epochs=4"))
    with stopped_at(13):  # steps 9 to 12 come again
        called("train", place / "small.toml", *words, *BOTH, *QUIET)
    at = json.loads((place / "resumed" / "log.json").read_text())
    assert {name: state["step"] for name, state in at.items()} == {"tensorboard": 12, "mlflow": 12}
    (newest,) = sorted((place / "resumed").glob("checkpoint-*"))[-1:]
    newest.unlink()  # as if it had been killed before it was written
    return trained(place, *words, *BOTH, "--resume")


def scalars(folder):
    """Return the points (step, value) that TensorBoard has of a run, by tag."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def points(folder, *names):
    """Return the points (step, value) that MLflow has of a run, by metric, and the run."""
    client, number = MlflowClient(), json.loads((folder / "log.json").read_text())["mlflow"]["run"]
    run = client.get_run(number)
    found = {name: [(m.step, m.value) for m in client.get_metric_history(number, name)] for name in run.data.metrics}
    return found, run


def expected(folder):
    """Return the points of metrics.jsonl by name."""
    found = {}
    for line in Run(folder).metrics:
        for name, value in tracking.metrics_of(line).items():
            found.setdefault(name, []).append((line["step"], value))
    return found


def test_each_epoch_is_there_once_after_a_resume(place, resumed):
    folder = place / "resumed"
    lines = expected(folder)
    assert [step for step, _ in lines["a/loss"]] == [4, 8, 12, 16]
    board, (store, _) = scalars(folder), points(folder)
    assert {name for name in board if not name.startswith("test/")} == set(lines)
    assert {name for name in store if not name.startswith("test/")} == set(lines)
    for name, values in lines.items():
        if name != "seconds":  # which epochs that come again take anew
            assert store[name] == values, name
            assert [step for step, _ in board[name]] == [step for step, _ in values]
            torch.testing.assert_close([v for _, v in board[name]], [v for _, v in values], rtol=1e-6, atol=1e-9)
    assert {"a/gradient_share/mutual", "b/gradient_share/kl", "a/valid_nll", "lr"} <= set(lines)


def test_there_is_one_run_with_the_recipe_the_folder_and_an_end(place, resumed):
    _, run = points(place / "resumed")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("peerbayes")
    of_it = [one for one in client.search_runs([experiment.experiment_id])
             if one.data.params["folder"] == str(place / "resumed")]  # fmt: skip
    assert [one.info.run_id for one in of_it] == [run.info.run_id]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == f"{place.name}/resumed"
    params = run.data.params
    assert (params["recipe"], params["seed"], params["digest"]) == ("small", "0", Run(place / "resumed").recipe.digest)
    assert (params["stages.0.epochs"], params["stages.0.optimizer.lr"]) == ("4", "0.001")
    assert (params["stages.0.terms.mutual.alpha"], params["peers.1.network"]) == ("1.0", "mlp")
    assert params["versions.torch"] == torch.__version__


def test_the_figures_of_the_test_split_are_those_of_the_record(place, resumed):
    board, (store, _) = scalars(place / "resumed"), points(place / "resumed")
    a, _ = resumed["peers"]
    assert store["test/a/accuracy"] == [(16, a["accuracy"])]
    assert store["test/ensemble/nll"] == [(16, resumed["ensemble"]["nll"])]
    assert board["test/ensemble/nll"] == [(16, pytest.approx(resumed["ensemble"]["nll"]))]


def test_a_finished_run_is_logged_late_and_not_twice(place, resumed):
    folder = place / "late"
    trained(place, "--run", folder)
    assert not (folder / "log.json").exists()
    for _ in range(2):
        record = trained(place, "--run", folder, "--resume", "--log", "tensorboard")
    (events,) = (folder / "tensorboard").iterdir()  # the second time nothing was opened
    assert events.stat().st_size > 0
    found = scalars(folder)
    assert [step for step, _ in found["b/loss"]] == [step for step, _ in expected(folder)["b/loss"]] == [4, 8]
    assert len(found["test/a/nll"]) == 1
    pb.evaluate(folder, device="cpu", root=place, draws=7, log="tensorboard")  # other figures
    values = [value for _, value in scalars(folder)["test/a/nll"]]
    assert len(values) == 2  # in either order: of files of one second names decide
    assert [value == pytest.approx(record["peers"][0]["nll"]) for value in values].count(True) == 1


def test_hyperparameters_and_the_recipe_are_in_the_event_file(place, resumed):
    events = EventAccumulator(str(place / "resumed" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    (text,) = events.Tensors("recipe/text_summary")
    assert (place / "resumed" / "recipe.toml").read_text() in text.tensor_proto.string_val[0].decode()
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    given = HParamsPluginData.FromString(content).session_start_info.hparams
    assert given["stages.0.epochs"].number_value == 4
    assert given["folder"].string_value == str(place / "resumed")


def test_runs_side_by_side_are_told_apart(place):
    trained(place, "--run", place / "packed", "--seeds", "0,1", "--pack", 2, "--log", "tensorboard")
    losses = []
    for seed in (0, 1):
        folder = place / "packed" / f"seed{seed}"
        found = scalars(folder)
        assert found["a/loss"] == [(step, pytest.approx(v)) for step, v in expected(folder)["a/loss"]]
        assert len(found["test/a/accuracy"]) == 1
        losses.append(found["a/loss"])
    assert losses[0] != losses[1]


def test_a_logger_that_fails_loses_nothing_but_itself(place, monkeypatch, capsys):
    folder, quiet = place / "failing", place / "quiet"
    trained(place, "--run", quiet)
    metrics, asked = loggers.TensorBoardLogger.metrics, []

    def full(self, values, step):
        asked.append(step)
        if len(asked) > 1:
            raise OSError("the disk of the logger is full")
        metrics(self, values, step)

    monkeypatch.setattr(loggers.TensorBoardLogger, "metrics", full)
    capsys.readouterr()
    trained(place, "--run", folder, "--log", "tensorboard,mlflow")
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("peerbayes")] == [
        f"peerbayes: {folder}: tensorboard has failed, and nothing more is logged to it: the disk of the logger is full"
    ]
    assert asked == [4, 8]
    for file in ("weights-a.safetensors", "weights-b.safetensors"):
        assert (folder / file).read_bytes() == (quiet / file).read_bytes()
    assert [step for step, _ in points(folder)[0]["a/loss"]] == [4, 8]  # the other one has all
    monkeypatch.undo()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/store.db")
    trained(place, "--run", folder, "--log", "tensorboard", "--resume")
    assert [step for step, _ in scalars(folder)["a/loss"]] == [4, 8]  # what was missed came when it was resumed


def test_a_store_that_cannot_be_opened_is_said_and_the_run_goes_on(place, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/small.npz/store.db")
    trained(place, "--run", place / "alone", "--log", "mlflow", recipe="source.toml")
    assert "mlflow has failed, and nothing more is logged to it" in capsys.readouterr().err
    assert Run(place / "alone").finished


def test_another_store_gets_a_resumed_run_whole(place, resumed, tmp_path, monkeypatch):
    folder = place / "moved"
    shutil.copytree(place / "resumed", folder)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the kind that MLflow had before: folders
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    pb.evaluate(folder, device="cpu", root=place, draws=7, log="mlflow")
    found, run = points(folder)
    assert [step for step, _ in found["a/loss"]] == [4, 8, 12, 16]
    assert run.data.params["folder"] == str(folder)
    assert len(found["test/a/nll"]) == 1


@pytest.mark.parametrize("verb", ["train", "distill", "compress", "adopt"])
def test_what_is_not_known_or_not_installed_is_said_before_training(
    verb, place, resumed, tmp_path, monkeypatch, capsys
):
    words = {
        "train": [place / "small.toml"],
        "distill": [place / "source.toml"],
        "compress": [place / "resumed" / "weights-a.safetensors"],
        "adopt": [place / "net.pth", "--data", "digits", "--network", "mlp"],
    }[verb]
    torch.save({}, place / "net.pth")
    words = [verb, *words, "--run", tmp_path / "run"]
    assert refused(capsys, *words, "--log", "tensorbord", *QUIET) == (
        "log: there is no logger 'tensorbord'; did you mean 'tensorboard'?"
    )
    assert refused(capsys, *words, "--log", "x", *QUIET) == (
        "log: there is no logger 'x'; known: mlflow, tensorboard, trackio, wandb"
    )
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    said = "log: wandb is not installed: pip install 'peerbayes[wandb]'"
    assert refused(capsys, *words, "--log", "tensorboard,wandb", *QUIET) == said
    assert not (tmp_path / "run").exists()


def test_python_takes_a_list_and_tells_its_own_reporter_the_same(place, tmp_path):
    class Told(Recorder):
        begun = None

        def begin(self, folder, recipe, about):
            self.begun = (folder, recipe.name, about["seed"])

    told = Told()
    run = pb.train(
        place / "source.toml", tmp_path / "run", log=["tensorboard"], reporter=told, device="cpu", root=place
    )
    assert told.begun == (run.folder, "source", 0)
    assert [line["step"] for line in told.lines] == [step for step, _ in scalars(run.folder)["only/loss"]] == [4]
    with pytest.raises(InputError, match="there is no logger 'mlflo'; did you mean 'mlflow'"):
        pb.train(place / "source.toml", tmp_path / "other", log="mlflo", root=place)
    assert ended("train", "plain", "--log", "mlflo") == 2


# ---- loggers that have no store to read by an interface of theirs ----------------------------------------------------


def records_of(path):
    """Return the records in a file of wandb: a log of LevelDB, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, place, found, part = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def test_wandb_offline_has_history_configuration_and_summary(place, tmp_path, monkeypatch):
    import wandb

    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    record = trained(place, "--run", tmp_path / "run", "--log", "wandb")
    wandb.teardown()  # ends the process that writes, when it has written
    number = json.loads((tmp_path / "run" / "log.json").read_text())["wandb"]["run"]
    (file,) = tmp_path.glob(f"wandb/offline-run-*-{number}/*.wandb")

    def items(update):
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in update}

    found = records_of(file)
    assert {one.run.run_id for one in found if one.HasField("run")} == {number}
    rows = [items(one.history.item) for one in found if one.HasField("history")]
    losses = expected(tmp_path / "run")["a/loss"]
    assert [(row["_step"], row["a/loss"]) for row in rows if "a/loss" in row] == losses
    config = {}
    for one in found:
        config |= items(one.config.update) if one.HasField("config") else {}
        config |= items(one.run.config.update) if one.HasField("run") else {}
    assert (config["recipe"], config["stages.0.epochs"], config["folder"]) == ("small", 2, str(tmp_path / "run"))
    summary = {}
    for one in found:
        summary |= items(one.summary.update) if one.HasField("summary") else {}
    assert summary["test/a/nll"] == record["peers"][0]["nll"]


def test_trackio_has_rows_and_configuration_in_its_own_database(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which it reads when it is imported
    pytest.importorskip("trackio")  # no release of it allows the Pillow of constraints.txt
    words = ("--run", tmp_path / "run", "--checkpoint-every", 6, *change("stages.0.epochs=4"), "--log", "trackio")
    with stopped_at(13):
        called("train", place / "small.toml", *words, *QUIET)
    record = trained(place, *words, "--resume")
    (database,) = tmp_path.rglob("peerbayes.db")
    with sqlite3.connect(database) as connection:
        rows = [(step, json.loads(values)) for step, values in connection.execute("select step, metrics from metrics")]
        (config,) = {text for (text,) in connection.execute("select config from configs")}
    assert [(step, row["a/loss"]) for step, row in rows if "a/loss" in row] == expected(tmp_path / "run")["a/loss"]
    assert [row["test/a/nll"] for _, row in rows if "test/a/nll" in row] == [record["peers"][0]["nll"]]
    assert json.loads(config)["folder"] == str(tmp_path / "run")
