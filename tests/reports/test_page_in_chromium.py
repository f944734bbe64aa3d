"""The report page in a real Chromium: what a person does with it, on phones, at night, and on paper."""

import json
import re

import pytest
from page_records import NASTY, records

from chromium import Chromium
from peerbayes.reports.page import report_page

WIDTHS = (390, 768, 1200)
SUMMARY = [["", *(f"figure {n}" for n in range(14))], *([f"way {n}", *["95.86 ± 0.47"] * 14] for n in range(3))]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    given = records(["plain", "bayesian", NASTY, "pair"])
    path.write_text(report_page(given, NASTY, {}, summaries=[SUMMARY], findings=[NASTY]))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Chromium(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def page(browser, file):
    browser.size(1200)
    browser.media()
    browser.complaints.clear()
    browser.open(file.as_uri())
    return browser


def count(page, selector):
    shown = "one => one.checkVisibility() && getComputedStyle(one).display !== 'none'"  # of SVG the first sees less
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].filter({shown}).length")


def column(page, table, place):
    rows = f"[...document.querySelectorAll('table')[{table}].tBodies[0].rows]"
    return page.run(f"{rows}.map(row => row.cells[{place}].textContent)")


def click(page, selector):
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def test_it_asks_nobody_and_says_no_error(page, file):
    assert page.requests[0] == file.as_uri()
    assert all(url.startswith("data:") for url in page.requests[1:])
    assert page.complaints == []
    assert page.run("document.title") == NASTY  # it has hurt nobody
    assert page.run("document.querySelectorAll('script').length") == 1


def test_errors_would_be_seen(page, tmp_path):
    (tmp_path / "bad.html").write_text("<script>nothing.there()</script><script>console.error('so')</script>")
    page.open((tmp_path / "bad.html").as_uri())
    assert len(page.complaints) == 2


def test_a_column_is_sorted_by_its_head(page):
    accuracy = 'document.querySelectorAll("table")[1].tHead.rows[0].cells[2]'
    before = column(page, 1, 2)
    assert page.run(f"{accuracy}.textContent") == "ACC"
    orders = []
    for _ in range(3):
        page.run(f"{accuracy}.querySelector('button').click()")
        orders.append((page.run(f"{accuracy}.ariaSort"), column(page, 1, 2)))
    means = [float(cell.split()[0]) for cell in before]
    assert [way for way, _ in orders] == ["ascending", "descending", "none"]
    assert [float(cell.split()[0]) for cell in orders[0][1]] == sorted(means)
    assert [float(cell.split()[0]) for cell in orders[1][1]] == sorted(means, reverse=True)
    assert orders[2][1] == before
    assert sorted(means) != means != sorted(means, reverse=True)


def test_what_was_not_measured_comes_last_whichever_way_others_are_sorted(page, tmp_path):
    summary = [["", "a"], ["one", "1.5 ± 0.1"], ["two", ""], ["three", "−2"], ["four", "10"]]
    (tmp_path / "gap.html").write_text(report_page(records(["plain"], [0]), "h", {}, summaries=[summary]))
    page.open((tmp_path / "gap.html").as_uri())
    for expected in (["three", "one", "four", "two"], ["four", "one", "three", "two"], ["one", "two", "three", "four"]):
        page.run("document.querySelector('table').tHead.rows[0].cells[1].querySelector('button').click()")
        assert column(page, 0, 0) == expected


def test_a_column_is_sorted_by_the_keyboard_and_names_by_letters(page):
    names = column(page, 1, 0)
    page.run("document.querySelectorAll('table')[1].querySelector('button').focus()")
    assert page.run("document.activeElement.textContent") == "method"
    page.press("Enter", 13)
    rising = column(page, 1, 0)
    assert rising == sorted(names, key=str.lower)
    page.press(" ", 32)
    assert column(page, 1, 0)[0] == "plain"
    assert page.run("document.activeElement.closest('th').ariaSort") == "descending"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.run(outline) == "solid"  # where the keyboard is, is seen


def test_what_is_not_chosen_is_hidden_in_tables_charts_and_legends(page):
    kinds = ("tr", "g.line", ".legend li", "figure", "details")
    parts = {kind: count(page, f'{kind}[data-run="1"]') for kind in kinds}
    others = {kind: count(page, f'{kind}[data-run="3"]') for kind in kinds}
    assert min(parts.values()) > 0
    click(page, '.runs input[value="1"]')
    assert {kind: count(page, f'{kind}[data-run="1"]') for kind in kinds} == dict.fromkeys(kinds, 0)
    assert {kind: count(page, f'{kind}[data-run="3"]') for kind in kinds} == others
    page.run("[...document.querySelectorAll('.runs button')].find(one => one.textContent == 'none').click()")
    assert count(page, "[data-run]") == 0
    page.run("[...document.querySelectorAll('.runs button')].find(one => one.textContent == 'all').click()")
    assert {kind: count(page, f'{kind}[data-run="1"]') for kind in kinds} == parts


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(page, width):
    page.size(width, mobile=width < 500)
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    scrolled = """(() => {
        const box = document.querySelector('.scroll'), first = box.querySelector('tbody th');
        const before = first.getBoundingClientRect().x;
        box.scrollLeft = 1e6;
        return [box.scrollLeft > 0, first.getBoundingClientRect().x - before, box.tabIndex];
    })()"""
    assert page.run(scrolled) == [True, 0, 0]  # a wide table scrolls in its box, by the keyboard too; names stay


def test_at_night_it_is_dark_and_always_legible(page):
    names = {"text": ("ink", "soft", "link", "wrong"), "line": [f"c{n}" for n in range(7)]}
    script = """Object.fromEntries(NAMES.map(name => {
        const box = document.body.appendChild(document.createElement('i'));
        box.style.color = `var(--${name})`;
        const colour = getComputedStyle(box).color;
        box.remove();
        return [name, colour];
    }))""".replace("NAMES", json.dumps(["paper", *names["text"], *names["line"]]))

    def light(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    papers = []
    for scheme in ("light", "dark"):
        page.media(scheme=scheme)
        found = {name: light(colour) for name, colour in page.run(script).items()}
        papers.append(found["paper"])
        assert light(page.run("getComputedStyle(document.body).backgroundColor")) == found["paper"]
        for kind, least in (("text", 4.5), ("line", 3.0)):  # WCAG 2.2, AA
            for name in names[kind]:
                bright, dim = sorted((found[name], found["paper"]), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= least, (scheme, name)
    assert papers[0] > 0.9
    assert papers[1] < 0.05


def test_on_paper_everything_is_shown_light_and_without_controls(page):
    rows = count(page, "tbody tr")
    pictures = page.run("document.querySelectorAll('.images img').length")
    assert count(page, ".images img") < pictures  # of other methods they are folded
    click(page, '.runs input[value="1"]')
    assert count(page, "tbody tr") < rows
    page.media("print", "dark")
    page.size(760)
    assert count(page, "tbody tr") == rows
    assert count(page, ".runs, nav, .copy, .tip") == 0
    assert count(page, ".images img") == pictures
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"


def test_points_say_their_values_to_mouse_and_keys(page):
    place = """(() => {
        const one = document.querySelector('g.line[data-run="2"] circle');
        one.scrollIntoView({block: 'center'});
        const box = one.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    })()"""
    x, y = page.run(place)
    page.move(x, y)
    assert count(page, ".tip") == 1
    said = page.run("document.querySelector('.tip').textContent")
    assert re.search(r": confidence 0\.\d{3}, accuracy 0\.\d{3}, [\d,]+ inputs$", said)
    assert page.run("document.querySelectorAll('.chart.chosen g.near').length") == 1
    page.move(2, 2)
    assert count(page, ".tip") == 0
    page.run("document.querySelector('.panels svg').focus()")
    page.press("ArrowRight", 39)
    page.press("ArrowRight", 39)
    said = page.run("document.querySelector('.tip').textContent")
    assert re.fullmatch(r"entropy 0\.08 to 0\.15: \d+\.\d % of the test split, \d\.\d % of photographs", said)
    page.press("Escape", 27)
    assert count(page, ".tip") == 0


def test_a_table_is_copied_as_markdown_as_it_is_shown(page):
    page.run("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
    click(page, '.runs input[value="3"]')
    button = "document.querySelectorAll('.table')[1].querySelector('.copy')"
    page.run(f"{button}.click()")
    head, rule, *lines = page.run("window.copied").splitlines()
    assert head == "| method | peer | ACC | NLL | ECE | cNLL | cECE | seeds |"
    assert rule == "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    figures = ["90.20 ± 0.12", "0.098 ± 0.001", "0.030 ± 0.000", "0.098 ± 0.001", "0.020 ± 0.000"]
    assert lines[0] == f"| plain | net | {' | '.join(figures)} | 3 |"
    assert len(lines) == 3  # not of the method that is hidden
    assert page.run(f"{button}.textContent") == "Copied"


def test_without_scripts_everything_can_be_read(page, file):
    rows = count(page, "tbody tr")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(file.as_uri())
        assert count(page, "tbody tr") == rows
        assert count(page, ".runs, button, .tip") == 0
        assert page.run("document.querySelectorAll('circle > title').length") > 50
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
