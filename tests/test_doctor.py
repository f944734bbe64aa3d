"""What `peerbayes doctor` says of what is here, in processes where something is missing or broken."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import peerbayes
from commands import called
from peerbayes import doctor
from peerbayes.data.datasets.sources import whereabouts
from peerbayes.errors import InputError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def process(folder, *words):
    """Run the verb in a process that finds what is in a folder before all else."""
    paths = os.pathsep.join([str(folder), str(Path(peerbayes.__file__).parents[1])])
    return subprocess.run([sys.executable, "-m", "peerbayes", "doctor", *words], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "PYTHONPATH": paths})  # fmt: skip


@pytest.fixture(scope="module")
def record():
    return json.loads(called("doctor", "--json"))


def test_all_that_the_project_requires_is_listed_with_its_version(record):
    assert record["works"]
    required = {row["name"]: row for row in record["packages"] if row["extra"] is None}
    assert {name: row["version"] for name, row in required.items()} == {
        name: metadata.version(name) for name in required
    }
    named = {doctor._REQUIREMENT.fullmatch(line)[1] for line in PROJECT["dependencies"]}
    assert {"torch", "numpy", "typer"} <= named
    assert named == set(required)
    assert record["python"]["wanted"] == PROJECT["requires-python"]
    assert record["devices"][0]["about"].startswith(f"{torch.get_num_threads()} thread")


def test_every_range_of_the_project_is_of_a_kind_that_is_understood():
    extras = PROJECT["optional-dependencies"].values()
    for line in [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]:
        wanted = doctor._REQUIREMENT.fullmatch(line)[2]
        assert all(part.strip()[:2] == ">=" or part.strip()[0] == "<" for part in wanted.split(",") if part), line


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [("2.15.0+cpu", ">=2.11,<2.16", True), ("2.16.0", ">=2.11,<2.16", False), ("2.9", ">=2.11", False), ("1", "", True),
     ("1.0.12.post1", ">=1.0.12", True), ("3.0.0rc1", ">=3", True), ("2.4.6", ">=2.4.6", True)],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(version, wanted, fits):
    assert doctor._fits(version, wanted) == fits


def test_text_names_versions_devices_and_data():
    text = called("doctor")
    assert f"torch         {metadata.version('torch')}" in text
    assert "All that is required is here." in text
    assert "digits       embedded" in text
    assert "cifar10" in text.partition("not there: ")[2]


def test_data_are_found_without_being_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()  # which could not be read
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "test_32x32.mat").touch()
    data = json.loads(called("doctor", "--json", "--data-root", tmp_path))["data"]
    assert data["root"] == str(tmp_path)
    assert data["found"] == {
        "cifar10": str(tmp_path / "cifar-10-batches-py"), "digits": None, "photographs": None,
        "svhn": str(tmp_path / "svhn" / "test_32x32.mat"),
    }  # fmt: skip
    assert "get cifar-100-python.tar.gz" in data["absent"]["cifar100"]
    assert set(data["found"]) | set(data["absent"]) == set(peerbayes.data.names())
    with pytest.raises(InputError, match="looked for"):
        whereabouts("mnist", tmp_path)
    with pytest.raises(InputError, match="data_batch_1"):  # afterwards readers read again
        peerbayes.data.load("cifar10", root=tmp_path)


def test_a_broken_torch_is_said_with_the_line_that_installs_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so: cannot open shared object file')")
    done = process(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    wanted = next(line for line in PROJECT["dependencies"] if line.startswith("torch"))
    said = f"torch can't be imported: libc10.so: cannot open shared object file: pip install '{wanted}'"
    assert done.stdout.splitlines()[-1] == said


def test_missing_and_old_packages_are_told_apart(tmp_path):
    about = tmp_path / "peerbayes-9.dist-info"
    about.mkdir()
    lines = [
        "numpy>=99,<100",
        "nothing-of-this-name>=1",
        'unheard-of[all]>=2; extra == "zoo"',
        'rich>=1; extra == "log"',
    ]
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: peerbayes\nVersion: 9\nRequires-Python: >=3.99\n"
                                    + "".join(f"Requires-Dist: {line}\n" for line in lines))  # fmt: skip
    done = process(tmp_path, "--json")
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout)
    assert [(one["what"], one["line"], one["required"]) for one in record["missing"]] == [
        ("numpy", "pip install 'numpy>=99,<100'", True),
        ("nothing-of-this-name", "pip install 'nothing-of-this-name>=1'", True),
        ("Python", "use Python >=3.99", True),
        ("extra zoo", "pip install 'peerbayes[zoo]'", False),
    ]
    text = doctor.text(record)
    assert "zoo    unheard-of is not installed: pip install 'peerbayes[zoo]'" in text
    assert f"log    rich {metadata.version('rich')}" in text
