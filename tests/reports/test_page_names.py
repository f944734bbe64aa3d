"""Where a page may be written: nothing that is not a page is replaced by one, and that is said before any work."""

import csv

import pytest

import peerbayes as pb
from commands import refused
from peerbayes.errors import InputError


@pytest.fixture
def predictions(tmp_path):
    path = tmp_path / "mine-seed0.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["label", "cat", "dog"], ["cat", 0.9, 0.1], ["dog", 0.2, 0.8]])
    return path


@pytest.mark.parametrize("out", [".", "mine-seed0.csv", "recipe.toml", "page"])
def test_judge_refuses_to_write_its_page_over_other_files(predictions, out, capsys, monkeypatch):
    monkeypatch.chdir(predictions.parent)
    before = predictions.read_bytes()
    told = refused(capsys, "judge", predictions.name, "--out", out)
    assert told == f"--out: '{out}' is no name of a page; expected a file that ends in .html"
    with pytest.raises(InputError, match=r"page: .* ends in \.html"):
        pb.judge(predictions, page=out)
    assert predictions.read_bytes() == before
    assert [path.name for path in predictions.parent.iterdir()] == [predictions.name]


def test_evaluate_refuses_it_before_it_looks_for_runs(tmp_path, capsys):
    told = refused(capsys, "evaluate", tmp_path / "nothing", "--out", tmp_path / "recipe.toml")
    assert told.endswith("recipe.toml' is no name of a page; expected a file that ends in .html")


def test_a_file_is_not_compared_with_itself(predictions):
    with pytest.raises(InputError, match=r"mine-seed0\.csv: is given twice"):
        pb.judge(predictions, str(predictions.parent / "." / predictions.name))


def test_columns_that_are_no_classes_are_named(predictions):
    predictions.write_text("id,label,l0,l1\n7,0,2.0,-1.0\n8,1,0.5,3.0\n")
    with pytest.raises(InputError, match=r"column 'id' is no class's; expected 'label' and a column a class"):
        pb.judge(predictions, logits=True)
    predictions.write_text("label,cat,cat,dog\ncat,0.5,0.4,0.1\n")
    with pytest.raises(InputError, match="has several columns 'cat'; expected each heading once"):
        pb.judge(predictions)
