"""Opening somebody's run folder runs none of their code, unless that is asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import peerbayes
from commands import QUIET, called, process, write_small

SOURCE = str(Path(peerbayes.__file__).parents[1])
PLANTED = """
import pathlib
pathlib.Path("MARK").write_text("ran")
import peerbayes
from peerbayes.networks import build

def net(inputs):
    return build("mlp", inputs)

@peerbayes.term
def penalty(step, peer, *, weight: float = 0.1):
    return weight * step.logits(peer).square().mean()
"""
VERBS = {
    "evaluate": ("evaluate", ".", "--device", "cpu"),
    "predict": ("predict", ".", "image.png", "--device", "cpu"),
    "export": ("export", ".", "--to", "hub", "--out", "made"),
    "size": ("size", "."),
    "figure": ("figure", "confidence", ".", "--device", "cpu"),
    "recipes show": ("recipes", "show", "recipe.toml"),
    "distill": ("distill", ".", *QUIET),
    "compress": ("compress", ".", *QUIET),
    "train from": ("train", "from.toml", *QUIET),
    "train --resume": ("train", "own.toml", "--run", ".", "--resume", *QUIET),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Recipes, and finished runs of them."""
    folder = write_small(tmp_path_factory.mktemp("trust"))
    called("train", folder / "source.toml", "--run", folder / "run", *QUIET)
    return folder


@pytest.fixture
def planted(folder, tmp_path):
    """Return a function that makes a run folder whose recipe names a network or a term of a module beside it."""

    def make(what, module="planted"):
        run = shutil.copytree(folder / "run", tmp_path / "run")
        mark = tmp_path / "mark"
        (run / f"{module}.py").write_text(PLANTED.replace("MARK", str(mark)))
        path = run / "recipe.toml"
        own = path.read_text()
        (run / "own.toml").write_text(own)
        start = f'network = "mlp", start_from = "{run}"'
        (run / "from.toml").write_text(own.replace('network = "mlp"', start))
        if what == "network":
            changed = own.replace('network = "mlp"', f'network = "{module}:net"')
        else:
            changed = own.replace(
                "[stages.terms.likelihood]", f'[stages.terms."{module}:penalty"]\n\n[stages.terms.likelihood]'
            )
        assert changed != own
        path.write_text(changed)
        from PIL import Image

        Image.new("L", (8, 8), 90).save(run / "image.png")
        return run, mark

    return make


CASES = [(verb, what) for verb in VERBS for what in ("network", "term")]
CASES.remove(("recipes show", "network"))  # which is never imported to be shown


@pytest.mark.parametrize(("verb", "what"), CASES)
def test_a_verb_in_a_run_folder_does_not_run_what_lies_there(planted, verb, what):
    run, mark = planted(what)
    done = process(*VERBS[verb], cwd=run)
    assert not mark.exists(), "the module of the run folder was executed"
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"planted:{'net' if what == 'network' else 'penalty'}" in done.stderr
    assert "--trust" in done.stderr


@pytest.mark.parametrize("what", ["network", "term"])
@pytest.mark.parametrize("verb", ["evaluate", "predict", "size"])
def test_trust_imports_it(planted, verb, what):
    run, mark = planted(what)
    done = process(*VERBS[verb], "--trust", cwd=run)
    assert done.returncode == 0, done.stderr
    assert mark.exists()


def test_a_library_is_not_taken_from_the_working_folder(planted):
    run, mark = planted("network")
    shutil.copy(run / "own.toml", run / "recipe.toml")
    for name in ("torch", "numpy", "timm", "typer", "pydantic", "rich"):
        shutil.copy(run / "planted.py", run / f"{name}.py")
    done = process(*VERBS["evaluate"], cwd=run)
    assert not mark.exists(), "a library was taken from the run folder"
    assert done.returncode == 0, done.stderr


def test_a_recipe_of_ones_own_is_trained_as_before(planted):
    run, mark = planted("network")
    done = process("train", "recipe.toml", "--run", "mine", *QUIET, cwd=run)
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    mark.unlink()
    # What one trains oneself is gone on with by the same words, and opened by others with --trust alone.
    assert process("train", "recipe.toml", "--run", "mine", "--resume", *QUIET, cwd=run).returncode == 0
    assert mark.exists()
    assert "--trust" in process("evaluate", "mine", cwd=run).stderr


def test_the_installed_command_finds_a_module_in_the_working_folder_last(planted, tmp_path):
    run, mark = planted("network")
    command = tmp_path / "bin" / "peerbayes"  # what an installer writes
    command.parent.mkdir()
    command.write_text("from peerbayes.cli import main\nmain()\n")
    shutil.copy(run / "planted.py", run / "numpy.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}

    def done(*words, **more):
        words = (sys.executable, command, *words)
        return subprocess.run(words, cwd=run, capture_output=True, text=True, env=env | more, timeout=120)

    words = ("train", "recipe.toml", "--run", "mine", *QUIET)
    refused = done(*words, PYTHONSAFEPATH="1")
    assert (refused.returncode, mark.exists()) == (2, False)
    assert "No module named 'planted'; install it, or name its folder in PYTHONPATH" in refused.stderr
    assert "--trust" in done("evaluate", ".").stderr
    assert not mark.exists()
    trained = done(*words)
    assert (trained.returncode, mark.exists()) == (0, True), trained.stderr


CODE = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
import peerbayes as pb
from peerbayes import reports
from peerbayes.papers.catalogue import write_figure
run, mark = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
tries = {
    "load": lambda **how: pb.load(run, **how)["only"],
    "evaluate": lambda **how: pb.evaluate(run, device="cpu", **how),
    "predict": lambda **how: reports.predict_inputs(run, run / "image.png", device="cpu", **how),
    "sizes": lambda **how: list(reports.sizes(run, **how)),
    "figure": lambda **how: write_figure("confidence", [run], mark.parent / "f.png", device="cpu", **how),
}
for name, attempt in tries.items():
    try:
        attempt()
    except pb.InputError as error:
        assert "planted:" in str(error) and "trust=True" in str(error), error
    else:
        raise SystemExit(f"{name} was not refused")
    assert not mark.exists(), name
for name, attempt in tries.items():
    attempt(trust=True)
assert mark.exists()
"""


@pytest.mark.parametrize("what", ["network", "term"])
def test_python_is_as_careful(planted, what):
    run, mark = planted(what)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(run), str(mark)], capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_what_a_run_starts_from_is_not_trusted_either(folder, planted, capsys):
    run, mark = planted("network")
    (run / "evil.toml").write_text(
        (run / "recipe.toml").read_text().replace("[stages.terms.", '[stages.terms."planted:penalty"]\n[stages.terms.')
    )
    text = (run / "own.toml").read_text()
    (run / "recipe.toml").write_text(
        text.replace('network = "mlp"', f'network = "mlp", start_from = "{run}/evil.toml"')
    )
    done = process("figure", "pipeline", ".", "--device", "cpu", cwd=run)
    assert not mark.exists()
    assert done.returncode == 2
    assert "planted:penalty" in done.stderr
