"""Every script in `examples/` runs, in a process of its own, on small settings."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
SAYS = {  # what the end of a journey shows, by script
    "adopt_checkpoint": ["plain + temperature", "distilled", "compressed", "Ship ", "disagreement"],
    "image_folder": ["ensemble", "disagreement", "report.html"],
    "texts_csv": ["ensemble", "torch", "disagreement"],
    "own_lstm": ["11,626 of 11,626 trainable weights are Bayesian", "noise:"],
    "hugging_face": ["ensemble", "digit "],
    "own_loop": ["a likelihood", "b mutual", "the file predicts the same: True"],
    "hf_trainer": ["train_loss", "accuracy", "disagreement"],
}
WRITES = {
    "image_folder": ["run/report.html"],
    "texts_csv": ["predictions.csv"],
    "own_loop": ["a.safetensors", "b.safetensors"],
    "hf_trainer": ["bert.safetensors"],
    "adopt_checkpoint": ["adopted/adopted.json", "adopted/distilled/network-student.safetensors"],
}

# What of `datasets` the example uses, where that is not installed.
STAND_IN = """
import types

class ClassLabel(types.SimpleNamespace): pass
class Image: pass
class Features(dict): pass
class DatasetDict(dict): pass

class Dataset:
    def __init__(self, table, features):
        self.table, self.features, self.column_names = table, features, list(table)
    @classmethod
    def from_dict(cls, table, features):
        return cls(table, features)
    def __len__(self):
        return len(self.table[self.column_names[0]])
    def __getitem__(self, key):
        return self.table[key] if isinstance(key, str) else {name: rows[key] for name, rows in self.table.items()}
    def __iter__(self):
        return (self[number] for number in range(len(self)))
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_to_its_end(script, tmp_path):
    if script.stem == "hf_trainer" and not (find_spec("transformers") and find_spec("accelerate")):
        pytest.skip("needs transformers and accelerate: pip install 'peerbayes[hf]'")
    paths = [str(ROOT / "src")]
    if script.stem == "hugging_face" and find_spec("datasets") is None:
        (tmp_path / "stand_in").mkdir()
        (tmp_path / "stand_in" / "datasets.py").write_text(STAND_IN)
        paths.append(str(tmp_path / "stand_in"))
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", script, tmp_path / "out", "1"],  # a folder, and epochs
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for words in SAYS.get(script.stem, ()):
        assert words in done.stdout
    for name in WRITES.get(script.stem, ()):
        assert (tmp_path / "out" / name).stat().st_size > 0
    left = {path.name for path in tmp_path.iterdir()} - {"out", "stand_in"}
    assert not left, "a script writes into the folder that it is given"


def test_scripts_say_how_they_are_run():
    assert len(SCRIPTS) >= 9
    for script in SCRIPTS:
        head = script.read_text().split('"""')[1]
        assert f"python examples/{script.name} [FOLDER]" in head
    assert {*SAYS, *WRITES} <= {script.stem for script in SCRIPTS}
