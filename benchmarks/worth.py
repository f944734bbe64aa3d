"""Compare the default recipe with what people would use instead: a table made from records.

    python benchmarks/worth.py results/yardsticks-digits.json
    python benchmarks/worth.py reproduced/results/worth-cifar100-resnet20*.json
    python benchmarks/worth.py results/worth-banking77-fasttext.json --against "default (lr=0.005)"

Prints Markdown: one line for the peers of a method and one for their ensemble, each with and without a temperature.
Figures are mean ± standard error over seeds. What `--set` changed makes a line of its own. The last column is the
difference in NLL to the default recipe (or to `--against`), over the seeds that both have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peerbayes.metrics import paired_difference, summarise

Record = dict[str, Any]
Values = Mapping[int, float]  # by seed
KEPT = "0.8"  # share of the images whose accuracy is shown, by least disagreement and by least entropy
AGAINST = "default"  # which the others are compared with, by default
FORMS: dict[str, tuple[str, Callable[[Record], Sequence[Record]]]] = {
    "each": ("each peer", lambda record: record["peers"]),
    "ensemble": ("ensemble", lambda record: [record["ensemble"]] if "ensemble" in record else []),
    "each mean": ("each peer in one pass", lambda record: _means(record["peers"])),
    "means": ("both in a pass each", lambda record: _means([record["ensemble"]] if "ensemble" in record else [])),
}
BASE = {"each mean": "each", "means": "ensemble"}  # what they are compared with, of the default


def _means(evaluated: Sequence[Record]) -> list[Record]:
    """Return the figures of mean weights, where they were evaluated."""
    return [peer["averaged"]["mean"] for peer in evaluated if "averaged" in peer]


def read(paths: Sequence[Path]) -> list[Record]:
    """Return the records of files; figures of one run in several files are joined."""
    joined: dict[tuple[str, int], Record] = {}
    for path in paths:
        content = json.loads(path.read_text())
        for record in content if isinstance(content, list) else [content]:
            before = joined.setdefault((method_of(record), record["seed"]), record)
            for form in ("each", "ensemble"):
                parts = FORMS[form][1]
                for one, other in zip(parts(before), parts(record), strict=True):
                    for key in ("out_of_distribution", "averaged"):
                        if key in other:
                            one[key] = one.get(key, {}) | other[key]
    return list(joined.values())


def method_of(record: Record) -> str:
    """Return the recipe of a record, and what `--set` changed in it, each key by its last word."""
    lines = [line.partition("=") for line in record.get("changed", ())]
    changes = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in lines)
    return record["recipe"] + (f" ({changes})" if changes else "")


def values(records: Sequence[Record], form: str, figure: Callable[[Record], float | None]) -> dict[int, float]:
    """Return a figure by seed, a mean over peers; nothing where a record has none."""
    by_seed = {}
    for record in records:
        numbers = [figure(evaluated) for evaluated in FORMS[form][1](record)]
        if numbers and all(number is not None for number in numbers):
            by_seed[record["seed"]] = statistics.fmean(number for number in numbers if number is not None)
    return by_seed


def kept(ranking: str) -> Callable[[Record], float | None]:
    """Return the accuracy of the images kept by a ranking; None where there is no disagreement."""

    def figure(one: Record) -> float | None:
        if "selective" not in one:
            return None
        curve = one["selective"][ranking]["retention"]
        silent = ranking == "disagreement" and one.get("disagreement") == 0
        return None if silent else curve.get(KEPT)

    return figure


def auroc(other: str) -> Callable[[Record], float | None]:
    """Return the AUROC of entropy against an out-of-distribution data set."""

    def figure(one: Record) -> float | None:
        scores = one.get("out_of_distribution", {}).get(other)
        return None if scores is None else scores["auroc"]

    return figure


def cell(by_seed: Values, percent: bool = False) -> str:
    """Return mean ± standard error as text, of shares in percent."""
    if not by_seed:
        return ""
    summary, decimals = summarise(number * (100 if percent else 1) for number in by_seed.values()), 2 if percent else 3
    numbers = [summary.mean] + ([] if summary.standard_error is None else [summary.standard_error])
    return " ± ".join(_number(number, decimals) for number in numbers)


def _number(value: float, decimals: int) -> str:
    text = f"{abs(value):.{decimals}f}"
    return ("−" if value < 0 else "") + (text[1:] if text.startswith("0.") else text)


def difference(by_seed: Values, against: Values) -> str:
    """Return a paired difference as text; say so where it is not distinguishable."""
    if not by_seed.keys() & against.keys() or by_seed == against:
        return ""
    pair = paired_difference(by_seed, against)
    text = ("" if pair.difference < 0 else "+") + _number(pair.difference, 3)
    if pair.standard_error is None:
        return text
    text += f" ± {_number(pair.standard_error, 3)}"
    return text if pair.distinguishable else f"{text}, not distinguishable"


def table(records: Sequence[Record], against: str = AGAINST) -> str:
    """Return the table as Markdown.

    Args:
        records: of all methods.
        against: end of the line that the others are compared with.
    """
    methods = list(dict.fromkeys(method_of(record) for record in records))
    by_recipe = {name: [record for record in records if method_of(record) == name] for name in methods}
    every = [one for record in records for _, parts in FORMS.values() for one in parts(record)]
    others = list(dict.fromkeys(other for one in every for other in one.get("out_of_distribution", ())))
    # Figures, and whether they are shown in percent.
    more_figures: dict[str, tuple[Callable[[Record], float | None], bool]] = {
        f"kept by BALD {KEPT}": (kept("disagreement"), True),
        f"kept by entropy {KEPT}": (kept("entropy"), True),
        **{f"AUROC {other}": (auroc(other), False) for other in others},
    }
    headings = ["", "ACC", "NLL", "ECE", *more_figures, f"NLL − {against}"]
    # By network, form and figure: what another network has is no yardstick.
    base = {
        (own[0]["network"], form, key): values(own, form, lambda one, key=key: one.get(key))  # type: ignore[misc]
        for name, own in by_recipe.items()
        if name.endswith(f"-{against}")
        for form in FORMS
        for key in ("nll", "cnll")
    }
    rows = []
    for name, own in by_recipe.items():
        pairs = len(own[0]["peers"]) > 1
        for form, (words, _) in FORMS.items():
            if form in ("ensemble", "means") and not pairs:
                continue
            for nll, ece, more in (("nll", "ece", ""), ("cnll", "cece", ", temperature")):
                figures = [values(own, form, lambda one, key=key: one.get(key)) for key in ("accuracy", nll, ece)]  # type: ignore[misc]
                if not figures[1]:
                    continue
                words = words if pairs else "in one pass" if form in BASE else ""
                title = name.rpartition("/")[2] + (f", {words}" if words else "") + more
                cells = [cell(figures[0], True), cell(figures[1]), cell(figures[2])]
                cells += ["" if more else cell(values(own, form, ask), part) for ask, part in more_figures.values()]
                # A single network is compared with a peer, an ensemble with the ensemble.
                default = base.get((own[0]["network"], BASE.get(form, form), nll), {})
                rows.append([title, *cells, difference(figures[1], default)])
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--against", default=AGAINST, metavar="METHOD", help="what the others are compared with")
    asked = parser.parse_args(words)
    print(table(read(asked.records), asked.against))
    return 0


if __name__ == "__main__":
    sys.exit(main())
