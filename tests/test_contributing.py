"""What CONTRIBUTING says of adding things, done as it says."""

import re
import shlex
from pathlib import Path

import pytest

import peerbayes as pb
from commands import called
from peerbayes.data.datasets import sources

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (How to add [^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
QUIET = {"train": ("--quiet", "--device", "cpu"), "evaluate": ("--device", "cpu")}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sources.READERS)
    yield tmp_path
    for name in set(sources.READERS) - known:  # what a section has added
        del sources.READERS[name]


def follow(section, desk):
    """Write the files of a section, run its other Python and its commands, in order."""
    for language, code in re.findall(r"^```(python|console)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        if file := re.match(r"# (\w+\.py)\n", code):
            (desk / file[1]).write_text(code, encoding="utf-8")
        elif language == "python":
            exec(code, {})
        else:
            for line in code.splitlines():
                words = shlex.split(re.sub(r"(\S*{.*?}\S*)", r'"\1"', line.removeprefix("$ ")))
                assert words[0] == "peerbayes"
                called(*words[1:], *QUIET[words[1]])


def test_there_is_a_section_for_each():
    assert [title.rpartition(" ")[2] for title in SECTIONS] == ["term", "posterior", "network", "set"]


@pytest.mark.filterwarnings("ignore:the scales of peer")  # an epoch is short
@pytest.mark.parametrize("title", SECTIONS)
def test_what_it_says_works(title, desk):
    follow(SECTIONS[title], desk)
    (run,) = (desk / "runs").iterdir()
    opened = pb.load(run)
    record = pb.evaluate(opened, device="cpu")
    assert 0 <= record["peers"][0]["accuracy"] <= 1
    options = opened.recipe.model_dump()
    named = {"How to add a term": "my_term:confidence_penalty", "How to add a posterior": "my_posterior:Uniform",
             "How to add a network": "my_network:tiny", "How to add a data set": "stripes"}  # fmt: skip
    assert named[title] in str(options)
