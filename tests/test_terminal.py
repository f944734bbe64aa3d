"""Names from files never reach the terminal as commands to it."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from commands import QUIET, called, ended, refused, write_small
from peerbayes.errors import printable
from peerbayes.runs.run import Run

ESCAPE = "\x1b]0;owned\x07\x9b2J\u202e"


def clean(text):
    return not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of somebody who gave names that terminals obey."""
    place = write_small(tmp_path_factory.mktemp("terminal"))
    called("train", place / "source.toml", "--run", place / "run", *QUIET, "--json")
    recipe = (place / "run" / "recipe.toml").read_text()
    named = json.dumps(ESCAPE)[1:-1]
    recipe = recipe.replace('title = "Source"', f'title = "{named}"').replace('"dnn"', f'"{named}"')
    (place / "run" / "recipe.toml").write_text(recipe)
    about = json.loads((place / "run" / "run.json").read_text())
    (place / "run" / "run.json").write_text(json.dumps(about | {"class_names": [f"{n}{ESCAPE}" for n in range(3)]}))
    assert ESCAPE in Run(place / "run").recipe.title
    return place / "run"


def test_tables_recipes_and_errors_show_names_without_obeying_them(run, tmp_path, capsys):
    picture = tmp_path / f"{ESCAPE.replace('/', '')}.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(picture)
    words = ("predict", run, picture, "--device", "cpu")
    table = called(*words)
    assert clean(table)
    assert "\\u001b]0;owned\\u0007\\u009b2J\\u202e" in table
    assert json.loads(called(*words, "--json"))[0]["class"].endswith(ESCAPE)
    for shown in (("recipes", "show", run / "recipe.toml"), ("size", run), ("evaluate", run, "--device", "cpu")):
        ended(*shown)
        printed = capsys.readouterr()
        assert clean(printed.out), shown
        assert clean(printed.err), shown
    assert json.loads(called("recipes", "show", run / "recipe.toml", "--json"))["title"] == ESCAPE
    assert clean(refused(capsys, "predict", run, tmp_path / f"{ESCAPE}none.png"))


def test_progress_shows_names_without_obeying_them(run, tmp_path, capsys):
    shutil.copy(run / "recipe.toml", tmp_path / "again.toml")
    ended("train", tmp_path / "again.toml", "--run", tmp_path / "run", "--device", "cpu", "--set", "stages.0.epochs=1")
    printed = capsys.readouterr()
    assert "\\u001b]0;owned" in printed.err
    assert clean(printed.err)
    assert clean(printed.out)


def test_texts_of_all_scripts_stay_as_they_are():
    assert printable("é 中 α\tµ\n🙂") == "é 中 α\tµ\n🙂"
