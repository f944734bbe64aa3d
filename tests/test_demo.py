"""The demo: its data, and that its table says what its records hold."""

import json
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import sem, ttest_rel

from commands import called
from peerbayes import adopting, demo
from peerbayes.data import load


class Here:
    """An executor that runs what it is given at once, in this process."""

    def __init__(self, workers, mp_context, initializer, initargs):
        initializer(*initargs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, work, *given):
        future = Future()
        future.set_result(work(*given))
        return future


def few_of_the_test_split(data):
    return replace(data, test=data.test.select(torch.arange(150)))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A demo of networks that hardly learn: text, records and page."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "ProcessPoolExecutor", Here)
        few = few_of_the_test_split(demo.few_digits())
        patch.setattr(demo, "few_digits", lambda: few)
        patch.setattr(demo, "EPOCHS", 4)
        patch.setattr(demo, "MORE", 1)
        patch.setattr(adopting, "adopt", partial(adopting.adopt, widths=(0.1,)))
        text = called("demo", "--seeds", "0,1", "--out", out, "--quiet")
        again = called("demo", "--seeds", "0,1", "--out", out, "--quiet", "--json")
    return text, json.loads((out / "records.json").read_text()), json.loads(again), (out / "report.html").read_text()


def test_its_digits_are_all_of_them_in_three_parts():
    data, whole = demo.few_digits(), load("digits")
    sizes = [len(split) for split in (data.train, data.validation, data.test)]
    assert sizes == [300, 500, 997]

    def sums(*splits):
        images = [split.batch(torch.arange(len(split)), torch.device("cpu"))[0].flatten(1) for split in splits]
        weights = torch.arange(64, dtype=torch.float64) + 1
        return (torch.cat(images).double() @ weights).sort().values

    assert torch.equal(sums(data.train, data.validation, data.test), sums(whole.train, whole.test))
    assert data.digest() == demo.few_digits().digest()


def test_the_table_shows_means_and_errors_of_the_records(shown):
    text, records, _, _ = shown
    nll = [next(row["nll"] for row in record["rows"] if row["who"] == "plain + temperature") for record in records]
    line = next(line for line in text.splitlines() if line.startswith("plain + temperature"))
    assert f"{np.mean(nll):.3f} ± {sem(nll):.3f}" in line
    pair = [[row for row in record["rows"] if row["who"] == demo.PAIR] for record in records]
    auroc = [rows[0]["auroc"] for rows in pair]  # a temperature does not change it
    line = next(line for line in text.splitlines() if line.startswith(demo.PAIR))
    assert f"{np.mean(auroc):.3f} ± {sem(auroc):.3f}" in line
    assert line.split()[-1] == "2"


def test_differences_are_paired_and_marked_by_a_t_test(shown):
    def figures(way):
        name = demo.WAYS[way]
        return [next(row["nll"] for row in record["rows"] if row["who"] == name) for record in shown[1]]

    head, *lines = demo.differences(shown[1])
    assert [line[0] for line in lines] == list(demo.WAYS)[2:]
    assert head[1:] == ["NLL", "NLL, corrupted"]
    for way, nll, _ in lines:
        if demo.WAYS[way]:
            one, other = figures(way), figures(demo.TEMPERED)
            gap = float(np.mean(np.subtract(one, other)))
            assert nll.startswith("−" if gap < 0 else "+")
            assert nll.endswith("*") == (ttest_rel(one, other).pvalue < 0.05)


def test_what_is_shipped_is_chosen_among_what_adopt_has_made(shown):
    text, records, again, page = shown
    assert again == records  # nothing is trained twice
    for record in records:
        assert record["ship"]["run"] != demo.PAIR
        assert f"seed {record['seed']}: {record['ship']['who']}" in text
    assert "minus plain + temperature, paired" in page
    assert "Out of distribution: photographs" in page


def test_it_says_who_is_ahead(shown):
    row = {"accuracy": 0.9, "ece": 0.0, "kept_accuracy": 0.9, "auroc": 0.9, "passes": 1}

    def record(seed, shipped):
        names = {name for name in demo.WAYS.values() if name} | {"plain, trained on", "Bayesian", demo.PAIR}
        names |= {"ensemble of peers"}
        rows = [{**row, "who": name, "nll": 1.0, "corrupted": {"nll": 2.0, "ece": 0.0}} for name in sorted(names)]
        for one in rows:
            if one["who"] == "Bayesian + temperature":
                one["nll"], one["corrupted"] = 0.9 - 0.01 * seed, {"nll": 1.8 - 0.01 * seed, "ece": 0.0}
        return {"seed": seed, "rows": rows, "ship": {"who": shipped}}

    assert demo.findings([record(seed, "Bayesian + temperature") for seed in range(3)])[-1] == (
        "Ahead of plain + temperature by more than a standard error in both: what adopt ships; "
        "one Bayesian network + temperature."
    )
    said = demo.findings([record(seed, "plain") for seed in range(3)])[-1]
    assert said.endswith("in both: one Bayesian network + temperature. What adopt ships is not.")
