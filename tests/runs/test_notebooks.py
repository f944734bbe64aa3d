"""What runs, data sets and reports show in a notebook, and who tells of progress there."""

import builtins
import html.parser
import json
import re
import shutil

import numpy as np
import pytest
from rich.console import Console

from commands import write_small
from peerbayes.api.fitting import train
from peerbayes.data import from_arrays
from peerbayes.errors import InputError
from peerbayes.recipes.recipe import load_recipe
from peerbayes.reports.evaluating import evaluate
from peerbayes.reports.page import write_report
from peerbayes.runs.run import load
from peerbayes.training import reporters
from peerbayes.training.reporters import ConsoleReporter, Reporter, usual_reporter


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = write_small(tmp_path_factory.mktemp("shown"))
    recipe = load_recipe(folder / "small.toml", ["title=A <b>bold</b> & small one"])
    return train(recipe, folder / "run", device="cpu")


class Cells(html.parser.HTMLParser):
    """Texts of a page, and its tags in order; a tag that ends must be the one that is open."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.open, self.tags = [], [], set()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, _attributes):
        self.tags.add(tag)
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_run_says_what_it_is_and_what_it_is_worth(trained, tmp_path):
    run = load(shutil.copytree(trained.folder, tmp_path / "run"))
    page = Cells(run._repr_html_())
    assert "A <b>bold</b> & small one" in " ".join(page.texts)
    assert "b" in page.tags  # of the title alone
    assert "<b>bold" not in run._repr_html_()
    assert "a (mlp, mean_field), b (mlp, mean_field)" in page.texts
    assert "ECE" not in page.texts
    with pytest.raises(
        InputError, match=r"no such file yet; `peerbayes evaluate .*` writes it, and in Python peerbayes.reports.write_"
    ):
        run.report()
    record = evaluate(run, device="cpu")
    write_report(run, record)
    texts = Cells(run._repr_html_()).texts
    for peer in (*record["peers"], record["ensemble"]):
        assert f"{100 * peer['accuracy']:.2f} %" in texts
        assert f"{peer['nll']:.3f}" in texts
    about = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(about | {"finished": False}))
    assert "not finished" in Cells(load(run.folder)._repr_html_()).texts


def test_the_report_shows_itself_and_its_style_stays_inside(trained, tmp_path):
    run = load(shutil.copytree(trained.folder, tmp_path / "run"))
    write_report(run, evaluate(run, device="cpu"))
    shown = run.report()
    page = shown._repr_html_()
    assert repr(shown) == f"Page('{run.folder / 'report.html'}')"
    inner = Cells(page)
    assert not {"html", "head", "body", "script"} & inner.tags
    assert {"table", "svg", "h1"} <= inner.tags
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    assert style.startswith(".peerbayes-page {")
    depth, outside = 0, ""
    for character in style:
        outside += character if depth == 0 else ""
        depth += {"{": 1, "}": -1}.get(character, 0)
    assert depth == 0
    assert outside.split() == [".peerbayes-page", "{"]  # no rule but its own
    assert not re.search(r"\bbody\b", style)


def test_a_data_set_says_what_it_holds():
    chance = np.random.default_rng(0)
    arrays = (chance.integers(0, 256, (60, 5, 4, 3)).astype(np.uint8), np.arange(60) % 12)
    names = [f"<i>{number}</i>" for number in range(12)]
    data = from_arrays(arrays, arrays, validation=12, names=names, name="mine & yours")
    page = Cells(data._repr_html_())
    assert page.texts[0] == "Dataset mine & yours"
    assert page.texts[1:9] == ["training", "48", "validation", "12", "test", "60", "classes", page.texts[8]]
    assert page.texts[8] == f"12: {', '.join(names[:10])} and 2 more"
    assert "i" not in page.tags
    assert "3 × 5 × 4" in page.texts
    sizes = "'mine & yours': 48 training, 12 validation, 60 test images"
    assert repr(data) == f"Dataset({sizes}; 12 classes, each 3×5×4)"


def test_progress_is_shown_where_somebody_looks(monkeypatch):
    monkeypatch.setattr(reporters.sys.stderr, "isatty", lambda: False)
    assert type(usual_reporter()) is Reporter
    monkeypatch.setattr(reporters.sys.stderr, "isatty", lambda: True)
    assert isinstance(usual_reporter(), ConsoleReporter)


@pytest.mark.parametrize("widgets", [True, False])
def test_in_a_notebook_there_are_bars_or_else_lines(monkeypatch, widgets):
    class ZMQInteractiveShell:
        """What IPython calls the shell of a notebook."""

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(reporters.sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(reporters, "_has_widgets", lambda: widgets)
    assert Console().is_jupyter
    voice = usual_reporter()
    assert isinstance(voice, ConsoleReporter)
    assert voice.console.is_jupyter == widgets
