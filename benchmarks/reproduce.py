"""Make tables of docs/results.md again: train what they need, judge it, and write the records.

    python benchmarks/reproduce.py                                          # lists the tables
    python benchmarks/reproduce.py sharing-cifar10-resnet20 --data-root data
    python benchmarks/reproduce.py TABLE TABLE TABLE --at-once 3            # processes side by side on one GPU

Runs go to reproduced/runs, records to reproduced/results, or below --work. The same command again goes on where it was
interrupted; what has a record there is not made again. Files that need data which are not at hand are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from peerbayes.runs.run import default_folder


@dataclass(frozen=True)
class Table:
    """Commands whose JSON makes the files of a table, after the tables that it needs."""

    files: Mapping[str, Sequence[str]]
    variants: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)  # recipes: what they extend and set
    needs: Sequence[str] = ()
    optional: Sequence[str] = ()  # files that are left out where their data are not at hand


THRIFTS = ("0.001", "0.002", "0.006", "0.02")
COUNTS = ("16", "64", "256", "1024")  # of components
BOUNDS = ("threshold=0.05", "threshold=0.1", "threshold=0.2", "outliers=false")  # means beyond which are outliers


def runs(names: Iterable[str], seeds: str = "0") -> list[str]:
    """Return the folders that recipes are trained into, with all seeds of one after the other."""
    return [default_folder(name, int(seed)).as_posix() for name in names for seed in seeds.split(",")]


def mutual() -> dict[str, Table]:
    name = "mutual-cifar100-resnet20"
    rows = [f"mutual/cifar100-resnet20-{method}" for method in ("dnn", "vanilla", "dml", "ours")]
    orders = [f"renyi/cifar100-resnet20-bayesian-{order}" for order in ("alpha0.5", "dml", "alpha2")]
    first, pairs = f"{name}-dnn", "renyi-cifar100-resnet20-bayesian"
    small, peer = "sharing-cifar100-resnet20-bayesian", f"{runs(rows)[3]}/weights-pretrained.safetensors"
    data = ["data.name=cifar100", "data.classes=100", f"peers.0.start_from='{peer}'", "evaluation.ece_bins=20"]
    variants = {
        f"cifar100-resnet20-thrift{thrift}": (
            "sharing/cifar10-resnet20-small",
            [*data, "evaluation.draws=50", f"peers.0.posterior.thrift={thrift}"],
        )
        for thrift in THRIFTS
    }
    books = [f"recipes/{one}.toml" for one in variants]
    return {
        first: Table({first: ["train", rows[0]]}),
        name: Table(
            {name: ["train", *rows], f"{name}-outside": ["evaluate", *runs(rows), "--ood", "cifar10"]}, needs=[first]
        ),
        pairs: Table({pairs: ["train", *orders]}, needs=[first]),
        small: Table(
            {
                small: ["train", *books],
                f"{small}-size": ["size", runs(books)[0], "--evaluate"],
                f"{small}-outside": ["evaluate", *runs(books), "--ood", "cifar10"],
            },
            variants,
            needs=[name],
        ),
    }


def distillation() -> dict[str, Table]:
    name = "distillation-cifar10-wrn28x1"
    base = name.replace("-", "/", 1)
    students = [f"{base}-{student}-de4" for student in ("kd", "latentbe", "latentbe-tdiv-sdiv")]
    short = ("kd", "latentbe", "latentbe-tdiv-sdiv", "latentbe-conf-ods", "be", "ae-kd", "proxy-end2", "latentbe-bald")
    variants = {f"{student}-60": (f"{base}-{student}-de4", ["stages.0.epochs=60"]) for student in short}
    teachers, judged, members = f"{name}-de4", runs([f"{base}-de4", *students]), runs(students[1:])
    figures = {f"{name}-{kind}": ["figure", kind, *members] for kind in ("line", "diversity", "perturbations")}
    return {
        teachers: Table({teachers: ["train", f"{base}-de4"]}),
        name: Table(
            {
                name: ["train", *students],
                f"{name}-corrupted": ["evaluate", *judged, "--corrupted", "made"],
                f"{name}-averaged": ["evaluate", *members, "--averaged"],
                f"{name}-entropy": ["figure", "entropy", *judged, "--ood", "cifar100"],
                **figures,
            },
            needs=[teachers],
        ),
        f"{name}-60": Table(
            {f"{name}-60": ["train", *(f"recipes/{one}.toml" for one in variants)]}, variants, needs=[teachers]
        ),
    }


def sharing(data: str, network: str, more: Sequence[str] = (), seeds: str = "0") -> dict[str, Table]:
    name = f"sharing-{data}-{network}"
    base = name.replace("-", "/", 1)
    recipes = [f"{base}-{method}" for method in ("dnn", "stage1", "shared", "shared-cluster", *more)]
    variants: dict[str, tuple[str, list[str]]] = {
        f"{data}-{network}-thrift{thrift}": (f"{base}-small", [f"peers.0.posterior.thrift={thrift}"])
        for thrift in THRIFTS
    }
    small = [f"recipes/{one}.toml" for one in variants]
    # The paper's scales are so small that they hardly say anything; these do.
    for gain in ("0.05", "0.1"):
        wide = f"{data}-{network}-gain{gain}"
        variants[f"{wide}-stage1"] = f"{base}-stage1", [f"peers.0.posterior.gain={gain}"]
        start = f"peers.0.start_from='recipes/{wide}-stage1.toml'"
        variants[f"{wide}-shared"] = f"{base}-shared", [start]
        variants[f"{wide}-small"] = f"{base}-small", [start, f"method='shared_small_gain{gain}'"]  # a line of its own
    gains = [f"recipes/{one}.toml" for one in variants if "gain" in one]
    wide_small = runs(one for one in gains if one.endswith("-small.toml"))
    # With so few components it shows what outliers and blending do for them.
    ablated = ("shared", *more) if more else ()
    for kind in ablated:
        variants[f"{data}-{network}-coarse-{kind}"] = f"{base}-{kind}", ["peers.0.posterior.components=32"]
    coarse = [f"recipes/{data}-{network}-coarse-{kind}.toml" for kind in ablated]
    judged, other = runs(recipes[:4]), "cifar100" if data == "cifar10" else "cifar10"
    stage1, codebook = judged[1:3]
    first = {f"{name}-dnn": Table({f"{name}-dnn": ["train", recipes[0], "--seeds", seeds]})} if more else {}
    return {
        **first,
        name: Table(
            {
                name: ["train", *recipes, "--seeds", seeds],
                f"{name}-gains": ["train", *gains, "--seeds", seeds],
                **({f"{name}-coarse": ["train", *coarse, "--seeds", seeds]} if coarse else {}),
                f"{name}-small": ["train", *small],
                f"{name}-size": ["size", codebook, *wide_small, "--evaluate"],
                f"{name}-bytes": ["figure", "bytes", stage1, codebook, *runs(small), *wide_small],
                f"{name}-outside": ["evaluate", *judged, *wide_small, "--ood", other],
            },
            variants,
            needs=list(first),
        ),
    }


def curve(data: str, network: str, gain: str) -> dict[str, Table]:
    """How bytes and figures go with the number of components and of outliers, for scales that say something."""
    name, prefix = f"sharing-{data}-{network}", f"{data}-{network}-curve"
    base = name.replace("-", "/", 1)
    start = f"peers.0.start_from='recipes/{prefix}-stage1.toml'"
    variants = {f"{prefix}-stage1": (f"{base}-stage1", [f"peers.0.posterior.gain={gain}"])}
    for bound, count in itertools.product(BOUNDS, COUNTS):
        sets = [f"peers.0.posterior.components={count}", f"peers.0.posterior.{bound}"]
        variants[f"{prefix}-k{count}-{bound.replace('=', '-')}"] = f"{base}-shared", [start, *sets]
    books = [f"recipes/{one}.toml" for one in variants]
    drawn = runs([f"{base}-dnn", *books])
    files = {f"{name}-curve": ["train", *books], f"{name}-curve-bytes": ["figure", "bytes", *drawn]}
    return {f"{name}-curve": Table(files, variants, needs=[f"{name}-dnn"])}


def pipeline() -> dict[str, Table]:
    name = "pipeline-cifar10-resnet20"
    base = name.replace("-", "/", 1)
    peer = f"runs/{name}-peers-seed0/weights-pretrained.safetensors"
    both = ["teachers.peers=['scratch', 'pretrained']", "teachers.draws=2"]
    kd = "cifar10-resnet20-bayesian-kd"
    variants = {
        # The student of one network, without members, and the chain from there.
        kd: (
            "distillation/cifar100-resnet20-bayesian-kd",
            ["data.name=cifar10", "data.classes=10", f"teachers.runs=['{peer}']", "stages.0.epochs=100"],
        ),
        "cifar10-resnet20-kd-scaled": (f"{base}-scaled", [f"peers.0.start_from='recipes/{kd}.toml'"]),
        "cifar10-resnet20-kd-shipped": (
            f"{base}-shipped",
            ["peers.0.start_from='recipes/cifar10-resnet20-kd-scaled.toml'"],
        ),
        # What a student loses by the weaker of the two teachers, and by images where they differ.
        "cifar10-resnet20-of-both": (f"{base}-distilled", both),
        "cifar10-resnet20-of-both-perturbed": (f"{base}-distilled", [*both, "stages.0.perturb.kind=tdiv_sdiv"]),
    }
    student, _, shipped, *students = [f"recipes/{one}.toml" for one in variants]
    return {
        name: Table(
            {
                f"{name}-shipped": ["train", f"{base}-shipped"],
                name: ["figure", "pipeline", *runs([f"{base}-shipped"])],
            }
        ),
        f"{name}-kd": Table(
            {
                f"{name}-kd": ["train", student],
                f"{name}-kd-outside": ["evaluate", *runs([student]), "--ood", "cifar100"],
                f"{name}-kd-shipped": ["train", shipped],
                f"{name}-kd-pipeline": ["figure", "pipeline", *runs([shipped])],
            },
            variants,
            needs=[name],
        ),
        f"{name}-students": Table(
            {
                f"{name}-students": ["train", *students],
                f"{name}-students-outside": ["evaluate", *runs(students), "--ood", "cifar100"],
            },
            variants,
            needs=[name],
        ),
    }


YARDSTICKS = ("plain", "ensemble2", "plain-peers", "swag", "laplace", "ivon", "vanilla", "dml", "ours", "default")
FOR_TEXTS = ("plain", "ensemble2", "plain-peers", "bayesian", "vanilla", "default")


def worth(
    name: str,
    on: str,
    seeds: str,
    outside: Sequence[str],
    more: Sequence[str] = (),
    there: Sequence[str] = (),
    methods: Sequence[str] = YARDSTICKS,
    variants: Mapping[str, tuple[str, Sequence[str]]] | None = None,
) -> dict[str, Table]:
    """What the default recipe is worth beside what people would use instead; `worth.py` draws the table.

    A file a method, so that runs can go on across interruptions, then one of all of them, and one a data set from
    elsewhere that may be missing.

    Args:
        name: of the table.
        on: data and network, of the recipes' names.
        seeds: of all methods, which makes them pairs.
        outside: data sets from elsewhere that may be missing.
        more: recipes beside those of ``methods``.
        there: data sets from elsewhere that are always there.
        methods: that are compared, of the recipes' names.
        variants: of the default recipe, what they extend and set.
    """
    changed = [f"recipes/{variant}.toml" for variant in variants or ()]
    recipes = [*(f"yardsticks/{on}-{method}" for method in methods), *changed, *more]
    every = ["evaluate", *runs(recipes, seeds)]
    trained = {
        f"{name}-{Path(recipe).name.removesuffix('.toml')}": ["train", recipe, "--seeds", seeds] for recipe in recipes
    }
    foreign = {f"{name}-outside-{other}": [*every, "--ood", other] for other in outside}
    judged = [*every, *(word for other in there for word in ("--ood", other))]
    defaults = [recipes[methods.index("default")], *changed]
    one_pass = {f"{name}-one-pass": ["evaluate", *runs(defaults, seeds), "--averaged"]}
    return {name: Table({**trained, name: judged, **one_pass, **foreign}, variants or {}, optional=list(foreign))}


ABLATION = ("shared-no-blend", "shared-no-outliers", "shared-neither")
TABLES = {
    **mutual(),
    **distillation(),
    **sharing("cifar10", "resnet20", ABLATION, seeds="0,1,2"),
    **curve("cifar10", "resnet20", "0.05"),
    **sharing("cifar10", "resnet18"),
    **sharing("cifar100", "resnet18"),
    **pipeline(),
    **worth("worth-cifar100-resnet20", "cifar100-resnet20", "0,1,2,3,4", ["cifar10", "svhn"]),
    **worth(
        "yardsticks-digits",
        "digits",
        "0,1,2",
        [],
        ["yardsticks/digits-mlp-plain", "yardsticks/digits-mlp-mc-dropout"],
        ["photographs"],
    ),
    # Seed 3 has chosen the learning rates.
    **worth("worth-clinc150-fasttext", "clinc150-fasttext", "0,1,2,4,5", [], there=["clinc150-oos"], methods=FOR_TEXTS),
    **worth(
        "worth-banking77-fasttext",
        "banking77-fasttext",
        "0,1,2,4,5",
        [],
        methods=FOR_TEXTS,
        variants={
            "banking77-fasttext-default-rate": (
                "yardsticks/banking77-fasttext-default",
                ["stages.0.optimizer.lr=0.005"],
            )
        },
    ),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables, in the order in which they are begun")
    parser.add_argument("--data-root", type=Path, help="where data sets lie")
    parser.add_argument("--work", type=Path, default=Path("reproduced"), help="folder of runs/ and results/")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="tables side by side; 1 by default")
    given = parser.parse_args(words)
    if not given.tables:
        for name, table in TABLES.items():
            print(name)
            for file, command in table.files.items():
                print(f"  {file}.json: peerbayes {shlex.join(command)}")
        return 0
    for name in given.tables:
        if name not in TABLES:
            parser.error(f"there is no table '{name}'; expected some of {', '.join(TABLES)}")
    for folder in ("runs", "results", "recipes"):
        (given.work / folder).mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if given.data_root is not None:
        environment["PEERBAYES_DATA"] = str(given.data_root.resolve())
    begun: dict[str, Future[bool]] = {}
    with ThreadPoolExecutor(max(1, given.at_once)) as pool:
        # A table comes after what it needs, so that one that waits never keeps those out.
        for name in dict.fromkeys(one for asked in given.tables for one in (*needed(asked), asked)):
            before = [begun[need] for need in TABLES[name].needs]
            begun[name] = pool.submit(make, TABLES[name], given.work, environment, before)
    return 0 if all(done.result() for done in begun.values()) else 1


def needed(name: str) -> list[str]:
    """Return the tables that one needs, those that come first before others."""
    return [one for need in TABLES[name].needs for one in (*needed(need), need)]


def write_variants(table: Table, work: Path) -> None:
    """Write a table's own recipes; as each has the name of what it extends, a record says what was changed."""
    for name, (base, sets) in table.variants.items():
        text = f'extends = "{base}"\nname = "{base}"\nset = {json.dumps(sets)}\n'
        (work / "recipes" / f"{name}.toml").write_text(text)


def make(table: Table, work: Path, environment: Mapping[str, str], before: Sequence[Future[bool]]) -> bool:
    """Make the files of a table that are missing; return whether all are there."""
    if not all(one.result() for one in before):
        return False
    write_variants(table, work)
    for name, command in table.files.items():
        file = work / "results" / f"{name}.json"
        if file.exists():
            print(f"{name}: there already", flush=True)
            continue
        words = [*command, "--json"]
        if command[0] == "train":
            words.append("--resume")
        if command[0] == "figure":
            words += ["--out", f"results/{name}.png"]
        clock, log = time.monotonic(), work / "runs" / f"{name}.log"
        print(f"{name}: peerbayes {shlex.join(words)}", flush=True)
        with log.open("a") as told:
            done = subprocess.run(
                [sys.executable, "-m", "peerbayes", *words],
                cwd=work,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=told,
            )
        if done.returncode == 2 and name in table.optional:
            print(f"{name}: left out; {log} says why", flush=True)
            continue
        if done.returncode:
            print(f"{name}: failed with exit code {done.returncode}; {log} says why", flush=True)
            return False
        file.with_suffix(".part").write_bytes(done.stdout)
        file.with_suffix(".part").replace(file)
        print(f"{name}: done in {time.monotonic() - clock:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
