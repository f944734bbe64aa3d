"""Matrix files: rows by closed form, and every packaged recipe as it was when each had a file of its own."""

import hashlib
import json
from pathlib import Path

import pytest

from peerbayes.errors import InputError
from peerbayes.recipes.packaged import expand
from peerbayes.recipes.recipe import load_recipe, packaged

DIGESTS = json.loads((Path(__file__).parent / "digests.json").read_text(encoding="utf-8"))


def test_every_recipe_is_the_same_complete_recipe_as_before():
    now = {
        name: hashlib.blake2b(load_recipe(name).to_toml().encode(), digest_size=6).hexdigest() for name in packaged()
    }
    assert now == DIGESTS  # a recipe that is changed on purpose gets a new digest here, and a line in the changelog


@pytest.mark.parametrize("data", ["clinc150", "banking77"])
def test_the_yardstick_for_texts_is_the_default_recipe(data):
    row, default = load_recipe(f"yardsticks/{data}-fasttext-default"), load_recipe("text")
    assert (row.stages, row.evaluation) == (default.stages, default.evaluation)
    assert row.data.model_copy(update={"name": default.data.name, "classes": None}) == default.data
    assert [peer.posterior for peer in row.peers] == [peer.posterior for peer in default.peers]


def test_rows_are_the_product_of_their_values():
    file = {
        "prefix": "p/",
        "base": {"b": {"title": "", "data": {}}},
        "axes": {"x": {"one": {"word": 1, "set": ["data.size={x.word}"]}, "two": {"word": "{y}"}}},
        "rows": [
            {
                "name": "{x}-{y}",
                "base": "b",
                "over": {"x": ["one", "two"], "y": ["a"]},
                "title": "{x.word}",
                "set": ["k={y}"],
            },
            {"name": "two-a", "set": ["k=again"], "title": "amended"},
        ],
    }
    base = {"title": "", "data": {}}
    assert expand(file, "f") == {
        "p/one-a": {"base": base, "title": "1", "set": ["data.size=1", "k=a"]},
        "p/two-a": {"base": base, "title": "amended", "set": ["k=a", "k=again"]},
    }


def test_rows_may_be_a_union_of_products():
    rows = [{"name": "{x}{y}", "extends": "q", "over": [{"x": ["1"], "y": ["2", "3"]}, {"x": ["4"], "y": ["5"]}]}]
    assert list(expand({"rows": rows}, "f")) == ["12", "13", "45"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"name": "{z}"}, r"f: '\{z\}' names \{z\}, which is no word of the row's values"),
        ({"name": "{x.none}", "over": {"x": ["one"]}}, r"names \{x.none\}"),
    ],
)
def test_unknown_words_are_named(row, sentence):
    with pytest.raises(InputError, match=sentence):
        expand({"axes": {"x": {"one": {}}}, "rows": [row]}, "f")
