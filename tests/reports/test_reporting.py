"""Tables, the page and the figures from records with known means; one's own modules from fit to report."""

import base64
import copy
import io
import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from sklearn import metrics as metrics_of
from torch import nn

import peerbayes as pb
from peerbayes import reports as reporting
from peerbayes.errors import InputError
from peerbayes.papers.latentbe.distillation_figures import draw_diversity
from peerbayes.reports import charts, figures, tables
from peerbayes.reports.evaluating import find_runs
from peerbayes.reports.page import report_page


def record(method, seed, accuracies, nll=0.2, ece=0.05, **changes):
    peers = [
        {
            "name": name,
            "accuracy": accuracy,
            "nll": nll,
            "ece": ece,
            "retention": {"0.2": 0.99, "0.6": 0.95},
            "reliability": {
                "count": [10, 30, 60],
                "accuracy": [0.2, 0.5, None],
                "confidence": [0.3, 0.6, None],
            },
        }
        for name, accuracy in zip(("scratch", "pretrained"), accuracies)
    ]
    found = {
        "recipe": f"mutual/{method}",
        "dataset": "digits",
        "network": "resnet8",
        "method": method,
        "seed": seed,
        "epochs": 30,
        "hardware": "a CPU",
        "versions": {"peerbayes": "0", "torch": "1"},
        "seconds": 2.0 + seed,
        "draws": 50,
        "ece_bins": 15,
        "peers": peers,
    }
    return found | changes


@pytest.fixture
def records():
    return [
        record("dml", 0, (0.90, 0.92), nll=0.30),
        record("dml", 1, (0.91, 0.92), nll=0.31),
        record("dml", 2, (0.92, 0.92), nll=0.32),
        record("ours", 0, (0.93, 0.93), nll=0.20),
        record("ours", 1, (0.91, 0.95), nll=0.212),
        record("ours", 2, (0.92, 0.91), nll=0.221),
    ]


# ---- tables -----------------------------------------------------------------------------------------------------


def test_runs_of_renyi_divergences_are_told_apart_by_their_order():
    schedule = {"schedule": "linear", "start": 2.0, "end": 0.5, "epochs": 30.0}
    given = [
        record("renyi", seed, (0.9, 0.9), alpha=alpha, settings=str(alpha))
        for alpha in (0.0, 1.5, schedule)
        for seed in (0, 1)
    ]
    methods = list(dict.fromkeys(row.method for row in tables.rows(given)))
    assert methods == ["Independent", "Rényi 1.5", "Rényi linear 2→0.5 in 30 epochs"]
    assert "Rényi 1.5 − Independent" in tables.text_table(given)
    short = record("renyi", 0, (0.9, 0.9), alpha=schedule | {"epochs": 1.0})
    assert tables.rows([short])[0].method == "Rényi linear 2→0.5 in 1 epoch"
    mixed = [record("ours", 0, (0.9, 0.9), alpha=1.0)]  # other methods have names of their own
    assert tables.rows(mixed)[0].method == "Ours"


@pytest.mark.parametrize(
    ("orders", "method"), [((2.0, 2.0), "Rényi 2"), ((2.0, 0.5), "Rényi by edge"), ((0.0, 0.0), "Independent")]
)
def test_edges_with_orders_of_their_own_are_not_called_by_that_of_the_term(orders, method):
    lessons = [{"teacher": "a", "student": "b", "alpha": order} for order in orders]
    assert tables.rows([record("renyi", 0, (0.9, 0.9), alpha=1.0, lessons=lessons)])[0].method == method


def test_a_peer_alone_learns_from_nobody():
    alone = record("renyi", 0, (0.9, 0.9), alpha=2.0)
    alone["peers"] = alone["peers"][:1]
    assert tables.rows([alone])[0].method == "Independent"


def test_rows_have_means_and_standard_errors_over_seeds(records):
    found = {(row.method, row.peer): row for row in tables.rows(records)}
    assert list(found) == [(m, p) for m in ("DML", "Ours") for p in ("scratch", "pretrained", "average")]
    # 90, 91, 92: mean 91, standard error 1/√3; a constant has none; the average peer has 91, 91.5, 92.
    assert found["DML", "scratch"].cells[:2] == ("91.00 ± 0.58", "0.310 ± 0.006")
    assert found["DML", "pretrained"].cells[0] == "92.00 ± 0.00"
    assert found["DML", "average"].cells[0] == "91.50 ± 0.29"
    assert all(row.seeds == 3 for row in found.values())


def test_one_seed_has_no_spread():
    (row,) = tables.rows([record("dnn", 0, (0.9,))])
    assert (row.method, row.peer, row.cells) == ("DNN", "scratch", ("90.00", "0.200", "0.050"))
    both = [record("dnn", 0, (0.9,)), record("ours", 0, (0.95,))]
    assert tables.differences(both) == ["Ours − DNN, 1 seed: ACC +5.0; NLL +.00; ECE +.00"]


def test_that_one_seed_has_no_spread_is_said_once(records):
    given = [record(method, 0, (0.9, 0.8), nll=nll) for nll, method in enumerate(("dnn", "vanilla", "dml", "ours"))]
    for item in given:
        for peer in item["peers"]:
            peer["out_of_distribution"] = {"svhn": {"auroc": 0.9, "aupr": 0.8, "fpr85": 0.3}}
    text = reporting.text_table(given)
    assert text.splitlines()[-1] == "one seed has no spread: no difference of 1 seed is distinguishable"
    assert text.count("distinguishable") == text.count("spread") == 1
    compared = [line for line in text.splitlines() if "−" in line]
    assert len(compared) == 6  # three of either table
    assert compared[:2] == [
        "Vanilla − DNN, average of peers, 1 seed: ACC +.00; NLL +1.0; ECE +.00",
        "DML − Vanilla, average of peers, 1 seed: ACC +.00; NLL +1.0; ECE +.00",
    ]
    assert "one seed" not in reporting.text_table(records)
    assert "one seed" not in reporting.text_table(given[:1])  # nothing is compared
    mixed = reporting.text_table([*records, record("vanilla", 2, (0.95, 0.95))])
    assert "could have shown" in mixed
    assert mixed.splitlines()[-1].startswith("one seed has no spread")
    assert [page.count("1 seed is distinguishable") for page in
            (report_page(some, "h", {}) for some in (given, records))] == [1, 0]  # fmt: skip


def test_differences_are_paired_and_say_what_could_have_been_shown(records):
    (line,) = tables.differences(records)
    assert line.startswith("Ours − DML, average of peers, paired over 3 seeds: ACC ")
    accuracy, nll, ece = line.split(": ", 1)[1].split("; ")
    # The average peers differ by 2, 1.5 and −0.5 points: mean 1, standard deviation √1.75.
    text = "ACC +1.00 ± .76 (not distinguishable: 3 seeds could have shown "
    assert accuracy.startswith(text)
    could = float(accuracy.removeprefix(text).rstrip(")"))
    # With that true effect and that spread, four in five experiments of three seeds are significant.
    drawn = np.random.default_rng(0).normal(could, math.sqrt(1.75), (40_000, 3))
    power = (stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05).mean()
    assert power == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / 40_000) + 0.002)
    # −.100, −.098 and −.099: mean −.099 with a tiny spread is a difference.
    assert nll == "NLL −.09900 ± .00058"
    assert ece == "ECE +.00 ± .00 (not distinguishable: 3 seeds differ by the same amount)"


def test_only_shared_seeds_of_the_same_data_are_compared(records):
    (line,) = tables.differences([*records[:3], record("ours", 2, (0.95, 0.95)), record("ours", 9, (0.1, 0.1))])
    assert ", 1 seed: ACC +3.0; " in line
    assert tables.differences([*records[:3], record("ours", 9, (0.9, 0.9))]) == []
    assert tables.differences([*records[:3], record("ours", 0, (0.9, 0.9), dataset="other")]) == []


def test_a_table_names_the_data_where_there_are_several(records):
    other = [record("ours", 0, (0.7, 0.8), dataset="rows"), record("dnn", 0, (0.6,), dataset="rows")]
    for peer in other[0]["peers"]:
        peer["out_of_distribution"] = {"noise": {"auroc": 0.9, "aupr": 0.8, "fpr85": 0.3}}
    main, compared, outside, *_ = (
        part.splitlines() for part in reporting.text_table(records[3:] + other).split("\n\n")
    )
    assert main[0].split() == ["data", "ACC", "NLL", "ECE"]
    assert [line.split()[:3] for line in (main[1], main[4], main[7])] == [
        ["Ours", "digits", "scratch"],
        ["Ours", "rows", "scratch"],  # of the same name, but another line's
        ["DNN", "rows", "scratch"],
    ]
    assert [line.split()[0] for line in main[2:4]] == ["pretrained", "average"]
    place = main[0].index("data")
    assert [line[place : place + 6].strip() for line in main[1:]] == ["digits", "", "", "rows", "", "", "rows"]
    assert [line.split(",")[0] for line in compared] == ["DNN − Ours"]  # those of one data set alone
    assert outside[1].split() == ["data", "AUROC", "AUPR", "FPR85"]
    assert outside[2].split()[:3] == ["Ours", "rows", "scratch"]
    assert "data" not in reporting.text_table(other)


def test_order_of_the_seeds_does_not_matter(records):
    assert tables.differences(records[2::-1] + records[:2:-1]) == tables.differences(records)


def test_text_table_is_aligned_and_complete(records):
    text = reporting.text_table(records)
    head, *body = text.splitlines()
    assert head.split() == ["ACC", "NLL", "ECE"]
    assert [line.split()[0] for line in body[:6]] == ["DML", "pretrained", "average", "Ours", "pretrained", "average"]
    end = head.index("ACC") + 3
    assert all(line[end - 1].isdigit() and line[end : end + 2] == "  " for line in body[:6])
    assert body[6] == ""
    assert body[7].startswith("Ours − DML")
    assert "91.00 ± 0.58" in body[0]


def test_images_from_elsewhere_have_a_table_of_their_own(records):
    for place, item in enumerate(records):
        for peer in item["peers"]:
            peer["out_of_distribution"] = {"svhn": {"auroc": 0.9 + place / 100, "aupr": 0.8, "fpr85": 0.3}}
    records[5]["peers"][0]["out_of_distribution"]["far"] = {"auroc": 0.5, "aupr": 0.5, "fpr85": 0.5}
    records[5]["peers"][1]["out_of_distribution"]["far"] = {"auroc": 0.7, "aupr": 0.5, "fpr85": 0.5}
    parts = reporting.text_table(records).split("\n\n")
    assert parts[2].splitlines()[0] == "svhn told from the test split by entropy:"
    assert parts[2].splitlines()[1].split() == ["AUROC", "AUPR", "FPR85"]
    # 0.90, 0.91, 0.92 and 0.93, 0.94, 0.95: standard error 0.01/√3.
    first, second = ([f"{auroc} ± 0.006", "0.800 ± 0.000", "0.300 ± 0.000"] for auroc in ("0.910", "0.940"))
    cells = [[cell.strip() for cell in line.split("  ")[-3:]] for line in parts[2].splitlines()[2:]]
    assert cells == [first] * 3 + [second] * 3
    assert "AUROC +.030 " in parts[3]
    assert parts[4].splitlines()[0].startswith("far told")
    assert parts[4].splitlines()[-1].split() == ["average", "0.600", "0.500", "0.500"]
    page = Page()
    page.feed(report_page(records, "h", {}))
    assert page.seen.count("table") == 5  # with differences, and images kept
    assert page.cells.count("0.910 ± 0.006") == 3
    assert "Out of distribution: svhn" in page.text


def test_means_over_the_last_epochs_have_a_table_of_their_own(records):
    for place, item in enumerate(records[3:]):
        looks = {"scratch": {"accuracy": 0.7 + place / 100, "nll": 1.0}, "pretrained": {"accuracy": 0.8, "nll": 2.0}}
        item["last_epochs"] = {"epochs": 10, "peers": looks}
        item["ensemble"] = {"accuracy": 0.9, "nll": 0.5, "ece": 0.1}
    parts = reporting.text_table(records).split("\n\n")
    heading, columns, *rows = parts[2].splitlines()
    assert heading == "the mean over the last 10 epochs, on the test split:"
    assert columns.split() == ["ACC", "NLL"]
    # 0.70, 0.71, 0.72: standard error 0.01/√3.
    assert [row.split("  ")[-2].strip() for row in rows] == ["71.00 ± 0.58", "80.00 ± 0.00", "75.50 ± 0.29"]
    assert [row.split("  ")[-1].strip() for row in rows] == ["1.000 ± 0.000", "2.000 ± 0.000", "1.500 ± 0.000"]
    page = Page()
    page.feed(report_page(records, "h", {}))
    assert page.seen.count("table") == 4  # with differences, and images kept
    assert "75.50 ± 0.29" in page.cells
    assert "The mean over the last 10 epochs, on the test split." in page.text


def test_sorted_peers_are_ranked_seed_by_seed_before_the_mean(records):
    given = records[3:]  # 93 and 93, 91 and 95, 92 and 91 %
    for place, item in enumerate(given):
        item["peers"][0]["nll"] = 1.0 + place  # goes with the accuracy
        first, second = ({"accuracy": accuracy, "nll": 0.5} for accuracy in (0.8 - place / 10, 0.7))
        item["last_epochs"] = {"epochs": 10, "peers": {"scratch": first, "pretrained": second}}
    before = copy.deepcopy(given)
    main, last = (part.splitlines() for part in reporting.text_table(given, sort_peers=True).split("\n\n"))
    assert [line.removeprefix("Ours").split()[0] for line in main[1:]] == ["worst", "best", "average"]
    # 93, 91, 91 and 93, 95, 92: standard errors √(4/9) and √(7/9).
    assert [line.split("  ")[-3].strip() for line in main[1:3]] == ["91.67 ± 0.67", "93.33 ± 0.88"]
    # Of a tie the first one counts as the worse: 1, 2, 0.221 and 0.2, 0.212, 3.
    assert [line.split("  ")[-2].strip().split(" ")[0] for line in main[1:3]] == ["1.074", "1.137"]
    # 80, 70, 60 and 70 by themselves: 70, 70, 60 and 80, 70, 70.
    assert [line.split("  ")[-2].strip() for line in last[2:4]] == ["66.67 ± 3.33", "73.33 ± 3.33"]
    # The average stays what it is, and so do the records.
    assert main[3].split() == reporting.text_table(given).splitlines()[3].split()
    assert given == before


def test_sorted_peers_of_a_larger_cohort_and_a_single_one():
    many = record("ours", 0, (0.9, 0.8))
    many["peers"] += [
        {**many["peers"][0], "name": name, "accuracy": value} for name, value in (("c", 0.7), ("d", 0.85))
    ]
    ranked = tables.sorted_peers([many, record("dnn", 0, (0.9,))])
    names = [(peer["name"], peer["accuracy"]) for peer in ranked[0]["peers"]]
    assert names == [("worst", 0.7), ("2 of 4", 0.8), ("3 of 4", 0.85), ("best", 0.9)]
    assert [peer["name"] for peer in ranked[1]["peers"]] == ["scratch"]


def test_a_second_run_of_the_same_recipe_and_seed_is_not_lost(records):
    other = record("dml", 1, (0.5, 0.5))
    found = {(row.method, row.peer): row for row in tables.rows([*records[:3], other])}
    assert found["DML", "scratch"].cells[0] == "91.00 ± 0.58"
    assert found["DML", "scratch"].seeds == 3
    assert found["DML (2)", "scratch"].cells[0] == "50.00"


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a", "runs/b"], ["DNN (a)", "DNN (b)"]),
        (["x/run", "y/run"], ["DNN (x/run)", "DNN (y/run)"]),
        (["x/seed1", "y/seed1"], ["DNN (x)", "DNN (y)"]),
        (["x/seed1", "x/seed2"], ["DNN (x/seed1)", "DNN (x/seed2)"]),
    ],
)
def test_runs_of_one_method_are_told_apart_by_their_folders(folders, names):
    given = [record("dnn", 1, (0.9,), settings=place, folder=place) for place in folders]
    assert [row.method for row in tables.rows(given)] == names
    assert tables.differences(given)[0].startswith(f"{names[1]} − {names[0]}, ")
    other = record("dnn", 1, (0.9,), recipe="another", folder="elsewhere/c")  # of another recipe, as short a name
    assert [row.method for row in tables.rows([given[0], other])][1] == "DNN (c)"
    assert [row.method for row in tables.rows([given[0], record("ours", 1, (0.9,), folder="z")])] == ["DNN", "Ours"]
    seeds = [record("dnn", seed, (0.9,), folder=f"runs/a-seed{seed}") for seed in (1, 2, 3)]
    assert tables.rows([*seeds, given[0] | {"settings": "b"}])[0].method == "DNN (a-seed1 … a-seed3)"


# ---- the page and its figures -----------------------------------------------------------------------------------


class Page(HTMLParser):
    VOID = {"meta", "img", "br", "link", "input"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.pictures, self.text, self.cells = [], [], [], [], []
        self.links, self.ids, self.labels = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not (name in ("src", "href") and not value.startswith(("data:", "#"))), value
            if tag == "a" and name == "href":
                self.links.append(value[1:])
            if name == "id":
                self.ids.append(value)
            if name == "aria-label":
                self.labels.append(value)
            if tag == "img" and name == "src":
                self.pictures.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def metrics():
    return [
        {
            "peers": {
                "a": {"terms": {"kl": 0.5 / e, "likelihood": 2.0 / e}, "gradient_share": {"kl": 0.1, "likelihood": 0.9}}
            }
        }
        for e in range(1, 6)
    ]


def test_the_page_is_whole_html_with_its_pictures_inside(records):
    page = Page()
    text = report_page(records, "A heading", {"How it went": metrics()})
    page.feed(text)
    page.close()
    assert page.open == []
    assert text.startswith("<!doctype html>")
    assert {"html", "head", "body", "table", "img"} <= set(page.seen)
    assert "91.00 ± 0.58" in page.cells
    assert page.cells[:6] == ["method", "peer", "ACC", "NLL", "ECE", "seeds"]
    assert any("Ours − DML" in part for part in page.text)
    assert any("seeds 0, 1, 2, 30 epochs, 3.0 s a seed, 50 draws" in part for part in page.text)
    assert page.labels.count("Reliability diagram") == page.labels.count("Accuracy by share kept, by disagreement") == 1
    assert page.links == page.ids  # of the sections
    (picture,) = page.pictures
    assert_real_picture(base64.b64decode(picture.removeprefix("data:image/png;base64,"), validate=True))


def assert_real_picture(data):
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 50
    blank = (pixels == 255).all(1).mean()
    assert 0.3 < blank < 0.99


def test_users_text_is_escaped(records):
    nasty = '<script>alert("x")</script> & co'
    changed = copy.deepcopy(records)
    for item in changed:
        item["dataset"] = item["hardware"] = nasty
        item["peers"][0]["name"] = "<b>scratch"
    text = report_page(changed, nasty, {nasty: metrics()})
    assert text.count("<script") == text.count("</script") == 1  # the page's own
    assert "<b>" not in text
    page = Page()
    page.feed(text)
    assert any(nasty in part for part in page.text)
    assert "<b>scratch" in page.cells


DOLLARS = "$\\frac{$ of 5$ and 6$"


def test_dollars_in_names_are_drawn_as_they_are(records):
    for item in records:
        item["method"] += DOLLARS
        item["peers"][0]["name"] = DOLLARS
    lines = metrics()
    for line in lines:
        for peer in line["peers"].values():
            peer["terms"][DOLLARS] = 1.0
    text = report_page(records, DOLLARS, {DOLLARS: lines})
    assert text.count("data:image/png") == 1
    assert f"dml{DOLLARS}, {DOLLARS}: confidence" in text


def test_a_dollar_is_that_sign_and_powers_of_axes_stay_formulas():
    def drawn(name, ticks):
        figure, axes = figures.new_axes()
        axes.plot([1, 2], [1e-3, 1e3], label=name)
        axes.set(yscale="log", title=name)
        axes.set_xticks([1, 2], [ticks, "b"])
        axes.legend()
        return figure

    escaped = drawn("a \\$x\\$", "\\$y^2\\$")  # matplotlib's own word for the signs
    expected = io.BytesIO()
    escaped.savefig(expected, format="png")
    assert figures.png(drawn("a $x$", "$y^2$")) == expected.getvalue()


def test_one_seed_is_said_on_the_page(records):
    assert "(one seed: no spread)" in report_page(records[:1], "h", {})
    assert "(one seed: no spread)" not in report_page(records, "h", {})


def test_one_draw_is_one_draw(records):
    one, five = (report_page([{**record, "draws": n} for record in records], "h", {}) for n in (1, 5))
    assert " 1 draw at test" in one
    assert " 5 draws at test" in five


def test_retention_is_drawn_and_tabled_by_both_rankings(records):
    for number, item in enumerate(records):
        for judged in (*item["peers"], item.setdefault("ensemble", {"accuracy": 0.94, "nll": 0.2, "ece": 0.1})):
            judged["selective"] = {
                ranking: {"aurc": 0.1, "retention": {"0.2": low + number / 100, "0.75": 0.9}}
                for ranking, low in (("entropy", 0.91), ("disagreement", 0.81))
            }
    text = reporting.text_table(records, retention=True)
    page = report_page(records, "h", {})
    for ranking, low in (("entropy", 91), ("disagreement", 81)):
        curves = {curve.name: curve for curve in charts.retention_lines(records, ranking)}
        assert list(curves) == [f"{m}, {p}" for m in ("DML", "Ours") for p in ("ensemble", "scratch", "pretrained")]
        points = curves["DML, scratch"].points
        assert [point.x for point in points] == pytest.approx([20, 75, 100])
        assert [point.y for point in points] == pytest.approx([low + 1, 90, 91])
        assert points[0].error == pytest.approx(1 / 3**0.5)
        assert points[0].tooltip == f"20 % kept, {low + 1}.00 ± 0.58 % right"
        assert f"<title>DML, scratch: {points[0].tooltip}</title>" in page
        section = text.split(f"accuracy (%) of the images of lowest {ranking}, by the share kept:\n")[1].splitlines()
        assert section[0].split() == ["20", "%", "75", "%"]
        assert section[1].split() == ["DML", "scratch", f"{low + 1}.00", "±", "0.58", "90.00", "±", "0.00"]
        assert section[4].split() == ["ensemble", f"{low + 1}.00", "±", "0.58", "90.00", "±", "0.00"]
        assert f"<td>{low + 4}.00 ± 0.58</td>" in page
    assert "20 %" not in reporting.text_table(records)


def test_a_record_of_one_ranking_is_drawn_by_that_one(records):
    del records[2:]
    records[0]["peers"] = [{**records[0]["peers"][0], "disagreement": 0.0}]  # a point
    records[0]["method"] = "dnn"
    names = {ranking: [curve.name for curve in charts.retention_lines(records, ranking)] for ranking in tables.RANKINGS}
    assert names == {"entropy": ["DNN"], "disagreement": ["DML, scratch", "DML, pretrained"]}
    for kept, dropped in ((("DNN", "entropy"), ("DML", "entropy")), (("DML", "disagreement"), ("DNN", "disagreement"))):
        section = reporting.text_table(records, retention=True).split(f"of lowest {kept[1]}, ")[1].split("\n\n")[0]
        assert kept[0] in section
        assert dropped[0] not in section


def test_figures_draw_the_numbers(records):
    curves = {curve.name: curve.points for curve in charts.retention_lines(records, "disagreement")}
    assert set(curves) == {f"{m}, {p}" for m in ("DML", "Ours") for p in ("scratch", "pretrained")}
    assert [point.x for point in curves["DML, scratch"]] == pytest.approx([20, 60, 100])
    assert [point.y for point in curves["DML, scratch"]] == pytest.approx([99, 95, 91])
    curve = charts.reliability_lines(records)[0]
    assert (curve.name, curve.note, curve.group, curve.dash) == ("DML, scratch", "ECE 0.050", 0, 0)
    assert [point.x for point in curve.points[:2]] == pytest.approx([0.3, 0.6])
    assert [point.y for point in curve.points[:2]] == pytest.approx([0.2, 0.5])
    assert curve.points[0].tooltip == "confidence 0.300, accuracy 0.200, 30 inputs"  # of three seeds
    terms, shares = figures.training_figure(metrics()).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in terms.get_lines()}
    assert drawn["kl"] == pytest.approx([0.5 / e for e in range(1, 6)])
    assert {line.get_label() for line in shares.get_lines()} == {"kl", "likelihood"}
    assert_real_picture(figures.png(figures.training_figure(metrics())))


@pytest.mark.parametrize("epochs", range(1, 6))
def test_few_epochs_are_counted_by_whole_numbers(epochs):
    one = {"label": "run", "teachers_apart": [0.1] * epochs, "members_before": [0.1] * epochs}
    diversity = {"series": [one | {"members_after": [0.2] * epochs}]}
    for drawn in (figures.training_figure(metrics()[:epochs]), draw_diversity(diversity)):
        drawn.draw_without_rendering()
        for axes in drawn.axes:
            low, high = axes.get_xlim()
            shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
            assert shown == [*range(1, epochs + 1)], axes.get_ylabel()


@pytest.mark.parametrize(
    ("values", "scale"), [([0.0, 0.0], "linear"), ([0.0, 0.5], "log"), ([0.2, 0.5], "log"), ([math.nan] * 2, "linear")]
)
def test_shares_and_distances_of_zero_are_drawn_without_a_word(values, scale):
    lines = [{"peers": {"a": {"terms": {"kl": value}, "gradient_share": {"kl": value}}}} for value in values]
    diversity = draw_diversity({"series": [{"label": "run", "members_apart": values}]})
    for drawn, axes in ((training := figures.training_figure(lines), training.axes[1]), (diversity, diversity.axes[0])):
        figures.png(drawn)  # a warning would be an error
        assert axes.get_yscale() == scale
        np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), values)


# ---- one's own modules: fit, load, evaluate ---------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.fixture(scope="module")
def npz(tmp_path_factory):
    """Three classes told apart by which rows are bright."""
    rng = np.random.default_rng(0)
    labels = np.arange(150) % 3
    images = rng.integers(0, 120, (150, 6, 6))
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 2] += 100
    path = tmp_path_factory.mktemp("own") / "rows.npz"
    images = images.astype(np.uint8)
    np.savez(path, train_images=images[:90], train_labels=labels[:90], test_images=images[90:], test_labels=labels[90:])
    return path


RECIPE = """
title = "Own"
method = "dml"
data = { name = "digits", classes = 10, batch_size = 15 }
peers = [{ name = "x", network = "mlp", posterior = { kind = "point" } }]
evaluation = { draws = 8, ece_bins = 5, retention = [0.5] }
[[stages]]
epochs = 8
optimizer = { lr = 0.01 }
terms = { likelihood = {}, kl = { scheme = "layer_mean" }, mutual = {} }
"""


@pytest.fixture(scope="module")
def fitted(npz, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    (folder / "own.toml").write_text(RECIPE)
    torch.manual_seed(0)
    peers = {"one": pb.MeanField(Own(), name="one"), "two": pb.MeanField(Own(), name="two", prior_std=0.5)}
    before = {name: posterior.mean.detach().clone() for name, posterior in peers.items()}
    run = pb.fit(peers, data=npz, recipe=folder / "own.toml", run=folder / "run", overrides=["stages.0.epochs=6"])
    assert all(not torch.equal(before[name], peers[name].mean) for name in peers)
    return peers, run


def test_fit_trains_in_place_and_leaves_a_run_that_load_gives_back(fitted):
    peers, run = fitted
    assert list(run) == ["one", "two"]
    assert run.finished
    assert len(run.metrics) == 6
    again = pb.load(run.folder, networks={"one": Own(), "two": Own()})
    images = torch.randint(0, 255, (5, 1, 6, 6), dtype=torch.uint8)
    for name, posterior in peers.items():
        assert again[name].prior_std == posterior.prior_std
        for source in (run, again):
            for key, tensor in posterior.state().items():
                assert torch.equal(source[name].state()[key], tensor)
            found = [p.predict(images, 4).log_probabilities for p in (posterior, source[name])]
            assert torch.equal(*found)


def test_load_without_networks_says_what_is_missing(fitted):
    run = pb.load(fitted[1].folder)
    with pytest.raises(
        InputError,
        match=r"peer 'one' has a network of your own; open .*networks=\{'one': \.\.\.\}",
    ):
        run["one"]
    with pytest.raises(KeyError):
        run["nobody"]


def test_load_with_another_network_names_the_tensor(fitted):
    wide = Own()
    wide.head = nn.Linear(4 * 36, 4)
    with pytest.raises(InputError, match=r"'mean/head.weight' has shape \(3, 144\), expected \(4, 144\)"):
        pb.load(fitted[1].folder, networks={"one": wide, "two": wide})["one"]


def test_evaluation_of_a_fit_equals_metrics_worked_out_by_hand(fitted, npz):
    peers, run = fitted
    found = pb.evaluate(run, device="cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["dataset"] == "rows"
    assert found["method"] == "dml"
    assert found["epochs"] == 6
    assert found["draws"] == 8
    data = np.load(npz)
    images = torch.from_numpy(data["test_images"])[:, None]
    labels = torch.from_numpy(data["test_labels"])
    drawn = []
    for peer in found["peers"]:
        posterior = peers[peer["name"]].eval()
        address = pb.Address(0, peer["name"], "draw")
        p = torch.stack([posterior(images, posterior.draw(address.at(s))).softmax(-1) for s in range(8)]).detach()
        mean = p.double().mean(0)
        nll = -mean[torch.arange(60), labels].log().mean()
        assert peer["nll"] == pytest.approx(float(nll), rel=1e-4)
        assert peer["accuracy"] == pytest.approx(float((mean.argmax(1) == labels).double().mean()))
        assert peer["accuracy"] > 0.8
        bald = torch.special.entr(mean).sum(1) - torch.special.entr(p.double()).sum(2).mean(0)
        assert peer["disagreement"] == pytest.approx(float(bald.mean()), rel=1e-2)
        right = (mean.argmax(1) == labels).numpy()
        assert_ranked(peer, torch.special.entr(mean).sum(1), bald, right)
        assert peer["retention"] == peer["selective"]["disagreement"]["retention"]
        assert peer["aurc"] == peer["selective"]["disagreement"]["aurc"]
        drawn.append(p.double())
    both = torch.cat(drawn)  # all draws of all peers are draws of one ensemble
    mean = both.mean(0)
    bald = torch.special.entr(mean).sum(1) - torch.special.entr(both).sum(2).mean(0)
    assert_ranked(found["ensemble"], torch.special.entr(mean).sum(1), bald, (mean.argmax(1) == labels).numpy())
    assert found["cohort"]["pairwise_diversity"] > 0


def assert_ranked(judged, entropy, disagreement, right):
    assert set(judged["selective"]) == {"entropy", "disagreement"}
    for ranking, uncertainty in (("entropy", entropy), ("disagreement", disagreement)):
        surest_first = right[np.argsort(uncertainty.numpy())].astype(float)
        found = judged["selective"][ranking]
        half = surest_first[: len(right) // 2].mean()
        assert found["retention"] == {"0.5": pytest.approx(half, abs=0.04)}  # one image of 30: float32 orders near ties
        risk = 1 - surest_first.cumsum() / np.arange(1, len(right) + 1)
        assert found["aurc"] == pytest.approx(risk.mean(), abs=2e-2)


def test_a_point_disagrees_nowhere_so_its_accuracy_is_the_same_at_every_share(npz, tmp_path):
    (tmp_path / "own.toml").write_text(RECIPE.replace("retention = [0.5]", "retention = [0.1, 0.5]"))
    torch.manual_seed(1)
    peers = {"only": pb.Point(Own())}
    changes = ["stages.0.epochs=1", "stages.0.optimizer.lr=1e-3", "stages.0.terms={likelihood={}}"]
    recipe = pb.load_recipe(tmp_path / "own.toml", changes)
    run = pb.fit(peers, data=npz, recipe=recipe, run=tmp_path / "run")
    (peer,) = pb.evaluate(run, device="cpu")["peers"]
    assert peer["disagreement"] == 0
    assert 0.2 < peer["accuracy"] < 1  # some are wrong, so that an order by chance would show
    expected = {"0.1": pytest.approx(peer["accuracy"]), "0.5": pytest.approx(peer["accuracy"])}
    assert peer["selective"]["disagreement"]["retention"] == expected
    data = np.load(npz)
    p = peers["only"].predict(torch.from_numpy(data["test_images"])[:, None]).probabilities.numpy()
    right = (p.argmax(1) == data["test_labels"])[stats.entropy(p, axis=1).argsort()]
    expected = {"0.1": pytest.approx(right[:6].mean()), "0.5": pytest.approx(right[:30].mean())}
    assert peer["selective"]["entropy"]["retention"] == expected
    assert right[:30].mean() != pytest.approx(right.mean())
    assert peer["retention"] == peer["selective"]["entropy"]["retention"]


def test_figures_out_of_distribution_are_those_of_scikit_learn(fitted, npz, tmp_path):
    peers, run = fitted
    other = tmp_path / "other.npz"
    np.savez(other, test_images=np.random.default_rng(5).integers(0, 255, (70, 6, 6)).astype(np.uint8))
    found = pb.evaluate(run, out_of_distribution=[str(other)], device="cpu")
    both = [torch.from_numpy(np.load(path)["test_images"])[:, None] for path in (npz, other)]
    p = {name: [peers[name].predict(images, 8, name=name).probabilities.double() for images in both] for name in peers}
    p["ensemble"] = [torch.stack(one).mean(0) for one in zip(*p.values(), strict=True)]
    truth = np.repeat([0, 1], [60, 70])
    lines = reporting.text_table([found]).split("told from the test split by entropy:\n")[1].splitlines()
    for judged in (*found["peers"], found["ensemble"] | {"name": "ensemble"}):
        score = np.concatenate([stats.entropy(one, axis=1) for one in p[judged["name"]]])
        rates = metrics_of.roc_curve(truth, score, drop_intermediate=False)
        figures = judged["out_of_distribution"][str(other)]
        expected = {
            "auroc": metrics_of.roc_auc_score(truth, score),
            "aupr": metrics_of.average_precision_score(truth, score),
            "fpr85": rates[0][rates[1] >= 0.85].min(),
        }
        assert {key: figures[key] for key in expected} == pytest.approx(expected, abs=1e-3)  # float32 orders near ties
        (line,) = (line for line in lines if judged["name"] in line.split())
        assert line.split()[-3:] == [f"{figures[key]:.3f}" for key in expected]


def test_fit_refuses_an_occupied_folder(fitted, npz):
    _, run = fitted
    with pytest.raises(InputError, match="already holds a run"):
        pb.fit({"one": pb.Point(Own())}, data=npz, recipe=run.recipe, run=run.folder)


def test_fit_on_data_in_memory_with_a_choice_of_bayesian_tensors_can_be_loaded_and_judged(npz, tmp_path):
    loaded = pb.data.load(npz)
    only_last = pb.MeanField(Own(), bayesian=lambda name, _module: name == "head.weight")
    recipe = pb.load_recipe("mutual/digits-vanilla", ["stages.*.epochs=1", "data.validation=0", "data.batch_size=15"])
    before = torch.random.get_rng_state()
    run = pb.fit({"one": only_last}, data=loaded, recipe=recipe, run=tmp_path / "run")
    assert torch.equal(torch.random.get_rng_state(), before)
    again = pb.load(run.folder, networks={"one": Own()})["one"]
    assert list(again.layout.shapes) == ["head.weight"]
    assert all(torch.equal(again.state()[name], tensor) for name, tensor in only_last.state().items())
    record = pb.evaluate(run, data=loaded, draws=3)
    log_p = only_last.predict(loaded.test.images, 3, name="one").log_probabilities
    assert record["peers"][0]["nll"] == pytest.approx(pb.metrics.nll_from_log(log_p, loaded.test.labels))


def test_a_new_column_is_one_line_and_empty_where_records_lack_it(records, monkeypatch):
    """Its figure is there for peers of one method; ensembles, differences and other methods do without."""
    monkeypatch.setitem(tables.COLUMNS, "AUGRC", ("augrc", 1.0))
    whole = json.loads(json.dumps(records))
    method = whole[0]["method"]
    for one in (one for one in whole if one["method"] == method):
        for peer in one["peers"]:
            peer["augrc"] = 0.125
    rows = tables.rows(whole)
    assert {row.cells[-1][:5] for row in rows if row.method == tables.title(method) and row.peer != "ensemble"} == {
        "0.125"
    }
    assert {row.cells[-1] for row in rows if row.method != tables.title(method) or row.peer == "ensemble"} == {""}
    assert "AUGRC" in tables.text_table(whole).splitlines()[0]
    assert not any("AUGRC" in line for line in tables.differences(whole))


@pytest.mark.parametrize("sort_peers", [False, True])
def test_members_as_one_network_have_rows_beside_peers_that_have_none(sort_peers):
    given = []
    for seed, accuracies in enumerate([(0.90, 0.92), (0.94, 0.92)]):  # the first is now the worst, now the best
        one = record("be", seed, accuracies)
        one["peers"][0]["averaged"] = {"exact": {"accuracy": 0.5 + 0.1 * seed, "nll": 1.5, "ece": 0.125}}
        given.append(one)
    given.append(record("dnn", 0, (0.9,)))
    lines = tables.text_table(given, sort_peers=sort_peers).splitlines()
    start = lines.index("in one pass (exact):")
    assert [line.split() for line in lines[start + 2 : -2]] == [
        ["be", "scratch", "55.00", "±", "5.00", "1.500", "±", "0.000", "0.125", "±", "0.000"]
    ]
    assert lines[-2:] == ["", tables.ONE_SEED]  # of the first table


def test_runs_with_other_settings_are_never_averaged_as_if_they_were_seeds():
    one, two, other = (record("dnn", seed, (0.9,), settings=s) for seed, s in ((0, "a"), (1, "a"), (2, "b")))
    assert [len(group) for group in tables.grouped([one, two, other]).values()] == [2, 1]


def test_runs_from_one_source_and_runs_from_sources_of_their_own_seeds_are_seeds():
    def row(seed, source, own):
        return record("dnn", seed, (0.9,), settings=source, settings_of_seed=own)

    one_source = [row(0, "from 0", "from own"), row(1, "from 0", "from 0"), row(2, "from 0", "from 0")]
    own_sources = [row(seed, f"from {seed}", "from own") for seed in range(3)]
    for rows in (one_source, own_sources):
        assert [len(group) for group in tables.grouped(rows).values()] == [3]
    mixed = [row(0, "from 1", "from 1"), row(1, "from 2", "from 2")]
    assert [len(group) for group in tables.grouped(mixed).values()] == [1, 1]


def test_runs_of_a_folder_come_by_their_numbers(tmp_path):
    alphas = ["dnn", "r-alpha0-seed0", "r-alpha0.25-seed0", "r-alpha0.5-seed2", "r-alpha0.5-seed10", "r-alpha2-seed0"]
    names = [*alphas, "r-alpha2-seed0-more", "r-alpha10-seed0"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").touch()
    assert [path.name for path in find_runs(tmp_path)] == names
    for name in ("seed10", "seed9"):  # a run of several seeds; what they started from lies beside them
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").touch()
    assert [path.name for path in find_runs(tmp_path)] == ["seed9", "seed10"]
