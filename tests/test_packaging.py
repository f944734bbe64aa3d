"""What is built of the tree: a wheel that works away from it, and an sdist with all that is in the repository."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from peerbayes.recipes.packaged import packaged

ROOT = Path(__file__).parents[1]


def tracked(*places):
    """Return the files that git knows, below some places; where this is no checkout there is nothing to compare."""
    done = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs a git checkout")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, made of a copy of the tracked files by the build backend alone."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_every_module_and_what_modules_read(built):
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
    package = {name.removeprefix("src/") for name in tracked("src")}
    assert len(package) > 240
    assert {name for name in package if not name.endswith(".md")} - names == set()
    assert {name for name in names if not name.startswith("peerbayes-")} <= package
    assert "peerbayes/recipes/plain.toml" in names


def test_the_sdist_holds_what_the_repository_does(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = tracked() - names
    assert {name for name in missing if not name.startswith(".")} == set()


def test_the_wheel_works_away_from_the_tree(built, tmp_path):
    place = tmp_path / "site"
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(place)
    env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    words = ["train", "plain", "--data", "digits", "--network", "mlp", "--epochs", "1", "--run", "run", "-q", "--json"]

    def said(*command):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("-c", "import peerbayes; print(peerbayes.__file__)").strip() == str(place / "peerbayes" / "__init__.py")
    assert json.loads(said("-m", "peerbayes", *words))["peers"][0]["name"] == "net"
    assert "</html>" in (tmp_path / "run" / "report.html").read_text()  # of a template, which is no module
    code = "from peerbayes.recipes.packaged import packaged; print(len(packaged()))"
    assert int(said("-c", code)) == len(packaged())
