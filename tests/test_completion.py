"""What shells complete: by the script that `--show-completion` prints, in real shells where they are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import peerbayes
from peerbayes.recipes.packaged import packaged

SOURCE = str(Path(peerbayes.__file__).parents[1])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with runs, and a `peerbayes` that shells find."""
    folder = tmp_path_factory.mktemp("completing")
    for run in ("runs/ours/seed0", "runs/ours/seed1", "runs/solo", "runs/.hidden/run"):
        (folder / run).mkdir(parents=True)
        for file in ("recipe.toml", "run.json"):
            (folder / run / file).touch()
    (folder / "runs" / "notes").mkdir()
    (folder / "bin").mkdir()
    command = folder / "bin" / "peerbayes"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{SOURCE}" exec "{sys.executable}" -m peerbayes "$@"\n')
    command.chmod(0o755)
    return folder


def shell(place, *words, **variables):
    env = {**os.environ, "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(place), **variables}
    done = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(place, line):
    """What bash is given for a line; its last word is completed."""
    words = line.split(" ")
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), "_PEERBAYES_COMPLETE": "complete_bash"}
    return shell(place, "peerbayes", **asked).split()


def test_verbs_are_completed(place):
    assert {"train", "adopt", "predict", "doctor"} <= set(completed(place, "peerbayes "))
    assert completed(place, "peerbayes ev") == ["evaluate"]
    assert completed(place, "peerbayes train --eng") == ["--engine"]
    assert completed(place, "peerbayes train --engine c") == ["compiled", "captured"]


def test_names_of_recipes_are_completed(place):
    expected = [name for name in packaged() if name.startswith("mutual/digits")]
    assert len(expected) > 2
    assert completed(place, "peerbayes train mutual/digits") == expected
    assert completed(place, "peerbayes distill runs/solo --into dist")[0] == "distil"
    assert completed(place, "peerbayes recipes sh")[0] == "show"
    assert completed(place, "peerbayes recipes show plai") == ["plain"]


def test_run_folders_are_completed(place):
    every = ["runs/ours", "runs/ours/seed0", "runs/ours/seed1", "runs/solo"]
    assert completed(place, "peerbayes evaluate ") == every
    assert completed(place, "peerbayes evaluate runs/o") == every[:3]
    assert completed(place, "peerbayes predict ./runs/s") == ["./runs/solo"]
    assert completed(place, f"peerbayes export {place}/runs/ours/") == [f"{place}/{run}" for run in every[1:3]]
    assert completed(place, "peerbayes evaluate elsewhere/") == []


def test_completing_loads_nothing_heavy(place):
    code = ("import sys\nfrom peerbayes.cli import main\ntry: main([])\nexcept SystemExit: pass\n"
            "print([name for name in ('torch', 'numpy', 'scipy', 'timm') if name in sys.modules])")  # fmt: skip
    for line in ("peerbayes train mu", "peerbayes evaluate "):
        words = line.split(" ")
        out = shell(place, sys.executable, "-c", code, PYTHONPATH=SOURCE, COMP_WORDS="\n".join(words),
                    COMP_CWORD=str(len(words) - 1), _PEERBAYES_COMPLETE="complete_bash")  # fmt: skip
        assert out.splitlines()[-1] == "[]"
        assert len(out.splitlines()) > 1


BASH = """
source <(peerbayes --show-completion bash)
complete -p peerbayes
COMP_WORDS=(peerbayes train mutual/digits-d) COMP_CWORD=2
_peerbayes_completion peerbayes
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "peerbayes --show-completion fish | source; complete --do-complete 'peerbayes train mutual/digits-d'"
ZSH = """
autoload -Uz compinit; compinit -u
peerbayes --show-completion zsh > _peerbayes; source ./_peerbayes
_arguments() { print -r -- "$@" }
_files() { print files }
words=(peerbayes train mutual/digits-d) CURRENT=3
_peerbayes_completion
"""


@pytest.mark.parametrize(("name", "script"), [("bash", BASH), ("fish", FISH), ("zsh", ZSH)])
def test_the_script_of_a_shell_works_in_it(name, script, place):
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    quiet = {"bash": ["--norc"], "fish": ["--no-config"], "zsh": ["-f"]}[name]
    out = shell(place, name, *quiet, "-c", script, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "mutual/digits-dml" in out
    assert "mutual/digits-dnn" in out
    assert "mutual/digits-ours" not in out
