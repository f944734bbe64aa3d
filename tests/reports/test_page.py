"""The report page as HTML: what it shows, what it leaves out, and that names are only names."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from page_records import NASTY, certificate, records, shown

from peerbayes.reports import tables
from peerbayes.reports.certified import promises
from peerbayes.reports.page import report_page


class Tree(HTMLParser):
    """Headings, cells by row, and attributes by tag."""

    def __init__(self, text):
        super().__init__()
        self.levels, self.headings, self.rows, self.tags, self.texts = [], [], [], [], []
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
            self.headings.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.append(data)
        if any(re.fullmatch("h[1-6]", tag) for tag in self._open):
            self.headings[-1] += data
        if any(tag in ("td", "th") for tag in self._open):
            self.rows[-1][-1] += data

    def of(self, tag, **wanted):
        named = {name.replace("_", "-"): value for name, value in wanted.items()}
        return [attrs for one, attrs in self.tags if one == tag and named.items() <= attrs.items()]


@pytest.fixture(scope="module")
def tree():
    return Tree(report_page(records(), "All of it", {}, summaries=[[["", "ACC"], ["plain", "90"]]], findings=["So."]))


def test_it_has_a_section_for_all_that_was_measured(tree):
    assert [heading for heading, level in zip(tree.headings, tree.levels) if level == 2] == [
        "Summary", "Runs as they are, without a temperature", "Differences, paired over seeds", "Calibration",
        "Answering only what is certain", "Out of distribution: photographs", "Corrupted images", "Promises",
        "Most and least certain images", "How it was made",
    ]  # fmt: skip
    assert [attrs["href"] for attrs in tree.of("a")] == [f"#{attrs['id']}" for attrs in tree.of("h2")]
    assert tree.levels[0] == 1
    assert tree.levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(tree.levels, tree.levels[1:]))  # none is skipped


def test_page_and_text_have_the_same_tables():
    given = records()
    for record in given:
        record["last_epochs"] = {"epochs": 2, "peers": {peer["name"]: peer for peer in record["peers"]}}
        for peer in record["peers"]:
            peer["averaged"] = {"mean": {"accuracy": 0.5, "nll": 1.0, "ece": 0.1}}
    found = list(tables.further_tables(given))
    assert {table.kind for table in found} == {*tables.HEADINGS}
    page, text = Tree(report_page(given, "", {})), tables.text_table(given, retention=True)
    cells = {cell for row in page.rows for cell in row}
    for table in found:
        assert tables.HEADINGS[table.kind].format(table.of) in text
        assert {cell for row in tables.rows(table.records, table.columns) for cell in row.cells} <= cells


def test_what_does_not_apply_is_left_out():
    (one,) = records(["plain"], [0])
    own = dict(records(["plain", "b"], [0])[0]["peers"][0], disagreement=0.0)
    one["peers"] = [own]
    for key in ("out_of_distribution", "corrupted", "cnll", "cece"):
        del own[key]
    del one["examples"], one["ensemble"]
    tree = Tree(report_page([one], "h", {}))
    assert [heading for heading, level in zip(tree.headings, tree.levels) if level == 2] == [
        "Results", "Calibration", "Answering only what is certain", "How it was made",
    ]  # fmt: skip
    assert tree.rows[0] == ["method", "ACC", "NLL", "ECE", "seeds"]  # of one peer no column
    assert [attrs["aria-label"] for attrs in tree.of("svg", role="img")] == [
        "Reliability diagram", "Accuracy by share kept, by entropy",
    ]  # fmt: skip
    assert not tree.of("fieldset")  # nothing to choose
    assert not tree.of("img")


def test_names_are_text_and_never_tags():
    given = records(["plain", NASTY], [0, 1], kind="text")
    for record in given:
        record["dataset"] = record["hardware"] = record["network"] = NASTY
        record["examples"] = shown("text", NASTY)
        record["peers"][0]["out_of_distribution"][NASTY] = record["peers"][0]["out_of_distribution"]["photographs"]
        for peer in record["peers"]:
            peer["name"] += NASTY
            peer["certificate"] = certificate() | {"data": NASTY}
    page = report_page(given, NASTY, {}, summaries=[[[NASTY, NASTY], [NASTY, NASTY]]], findings=[NASTY])
    plain, named = Tree(report_page(records(["a", "b"], [0, 1], kind="text"), "h", {})), Tree(page)
    assert {tag for tag, _ in named.tags} - {tag for tag, _ in plain.tags} <= {"nav"}
    assert len(named.of("script")) == 1
    assert not [name for _, attrs in named.tags for name in attrs if name.startswith("on")]
    assert sum(NASTY in text for text in named.texts) > 40
    assert any(NASTY in attrs.get("aria-label", "") for _, attrs in named.tags)


def test_its_policy_allows_its_own_script_alone_and_no_network(tree):
    page = report_page(records(), "h", {})
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"(?:src|href|action)=\"(?!data:|#)|url\(|@import|fetch\(", page)


def test_what_was_promised_stands_beside_what_was_found(tree):
    head = ["method", "seed", "peer", "promised", "shown on", "threshold", "found on the test split", "kept"]
    place = tree.rows.index(head)
    assert tree.rows[place + 1] == [
        "pair", "0", "ensemble", "sets hold the true class with probability 0.9 (LAC)", "shown on 300 inputs of digits",
        "scores up to 0.75", "91.0 % of 100 sets hold it; 1.25 classes a set", "yes",
    ]  # fmt: skip
    assert tree.rows[place + 2] == [
        "pair", "0", "ensemble", "with probability 0.9, at most 5 % of answers are wrong",
        "shown on 300 inputs of digits", "probabilities from 0.6 on",
        "2.5 % of 80 answers are wrong; 80.0 % of 100 inputs are answered", "yes",
    ]  # fmt: skip
    assert len(tree.rows[place:]) - 1 >= 6  # of every seed


@pytest.mark.parametrize(
    ("errors", "held", "kept"),
    [(4, 90, ["yes", "yes"]), (5, 89, ["within chance"] * 2), (7, 84, ["within chance"] * 2), (9, 82, ["no"] * 2)],
)
def test_a_promise_is_kept_up_to_its_level_or_as_far_as_chance_goes(errors, held, kept):
    (record,) = records(["one"], [0])
    record["ensemble"]["certificate"] = certificate(errors, held)
    found = promises([record])
    assert [one.kept for one in found] == kept
    assert found[0].sentence.startswith("one ensemble, seed 0: promised: sets hold the true class with probability 0.9")
    assert found[1].sentence.endswith(f"; kept: {kept[1]}")


def test_true_promises_are_blamed_in_one_of_twenty_test_splits():
    # Thresholds chosen by 99 scores, 100 test scores; and answers that are wrong at the promised rate.
    chance, times = np.random.default_rng(0), 4000
    (record,) = records(["one"], [0])
    blamed = np.zeros(2)
    for _ in range(times):
        threshold = np.sort(chance.random(99))[89]  # the ⌈100 · 0.9⌉-th
        given = certificate(int(chance.binomial(80, 0.05)), int((chance.random(100) <= threshold).sum()))
        given["coverage"]["images"] = [99]
        record["ensemble"]["certificate"] = given
        blamed += [one.kept == "no" for one in promises([record])]
    assert (blamed / times <= 0.05 + 3 * (0.05 * 0.95 / times) ** 0.5).all()
    assert (blamed / times > 0.02).all()  # counts are coarse: the next one may be above 5 %


def test_promises_of_classes_are_kept_by_every_class():
    (record,) = records(["one"], [0])
    given = record["ensemble"]["certificate"]
    given["coverage"]["thresholds"] = given["risk"]["thresholds"] = [0.1 * n for n in range(1, 11)]
    given["coverage"]["images"] = given["risk"]["images"] = [30] * 10
    given["found"]["coverage"]["by_class"] = {"images": [10] * 9 + [0], "held": [9] * 9 + [0]}
    given["found"]["risk"]["by_class"] = {"answered": [8] * 9 + [0], "errors": [0] * 8 + [4, 0]}
    coverage, risk = promises([record])
    assert (coverage.kept, risk.kept) == ("yes", "no")  # four of eight, by chance in 0.04 % of the classes
    given["found"]["risk"]["by_class"]["errors"][8] = 2  # in 5.7 %
    assert promises([record])[1].kept == "within chance"
    assert coverage.promised.endswith(", whichever it is")
    assert coverage.found.endswith("; 90.0 % of the class that has the fewest")
    assert risk.found.endswith("; 50.0 % of the class that has the most")
    assert risk.threshold == "probabilities from 0.1 to 1 on"


def test_examples_are_shown_with_what_was_said_of_them(tree):
    pictures = tree.of("img")
    assert len(pictures) == 3 * 3 * 2  # methods, lists, images: of the first seed alone
    assert pictures[0]["alt"] == "Test image 0, class cat"
    assert len(tree.of("details")) == 3
    assert [attrs for attrs in tree.of("details") if "open" in attrs] == tree.of("details")[:1]
    assert [h for h, level in zip(tree.headings, tree.levels) if level == 4][:3] == [
        "Least certain", "Most certain", "Most certain, and wrong",
    ]  # fmt: skip
    assert tree.texts.count("dog ✗") == 3 * 3
    texts = Tree(report_page(records(kind="text"), "h", {}))
    assert "Most and least certain texts" in texts.headings
    assert len(texts.of("q")) == 3 * 3 * 2
    assert not texts.of("img")


def test_every_row_and_curve_of_a_method_has_its_number(tree):
    for tag in ("tr", "g", "li", "figure", "details"):
        assert {attrs["data-run"] for attrs in tree.of(tag) if "data-run" in attrs} == {"0", "1", "2"}, tag
    assert [attrs["value"] for attrs in tree.of("input", type="checkbox")] == ["0", "1", "2"]
    kept = report_page([r for r in records() if r["method"] != "plain"], "h", {})
    assert {attrs["data-run"] for attrs in Tree(kept).of("tr") if "data-run" in attrs} == {"0", "1"}


def test_a_difference_that_nobody_measured_is_an_empty_cell():
    given = records(["plain", "other"], [0, 1])
    for record in given[:2]:
        del record["peers"][0]["nll"]
    tree = Tree(report_page(given, "h", {}))
    row = next(row for row in tree.rows if row[0].startswith("other − plain"))
    assert len(row) == 5
    assert row[3] == ""
    assert row[2].startswith("+")


def test_a_method_without_a_measurement_keeps_the_numbers_of_others():
    given = records()
    for record in given[:3]:
        del record["peers"][0]["corrupted"]
    page = report_page(given, "h", {})
    section = page.split("Corrupted images</h2>")[1].split("</section>")[0]
    assert set(re.findall('data-run="(.)"', section)) == {"1", "2"}
    panels = page.split("Out of distribution: photographs</h2>")[1].split("</section>")[0]
    assert set(re.findall('figure class="chart" data-run="(.)"', panels)) == {"0", "1", "2"}
