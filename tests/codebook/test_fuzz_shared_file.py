"""A few hundred damaged files of shared weights, by the same means as benchmarks/fuzz_shared_file.py."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from pathlib import Path

import pytest

from peerbayes.posteriors import storage

pytest.importorskip("resource")


@pytest.fixture
def room(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("fuzz_shared_file")


def outcomes(room, folder, numbers, kinds):
    every, found, faults = room.specimens(folder), Counter(), []
    for number in numbers:
        chance = random.Random(f"1 {number}")
        kind = kinds[number % len(kinds)]
        given = chance.choice(every)
        data = room.KINDS[kind](given, chance, every)
        result, detail = room.outcome(data, given, kind.startswith("signed"), folder / "damaged.safetensors")
        found[kind, result] += 1
        faults += [f"{number} {kind}: {detail}"] if result == "fault" else []
    return found, faults


def test_damage_is_one_sentence_or_changes_nothing_or_makes_another_whole_model(room, tmp_path):
    found, faults = outcomes(room, tmp_path, range(300), list(room.KINDS))
    assert faults == []
    for kind in room.KINDS:
        assert found[kind, room.SENTENCE] > 5
        assert kind.startswith("signed") or found[kind, room.OTHER] == 0
    assert sum(found[kind, room.OTHER] for kind in room.KINDS) > 5


def test_the_fuzzer_sees_damage_that_goes_through(room, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_digest", lambda *_: "always")
    _, faults = outcomes(room, tmp_path, range(60), ["bits flipped"])
    assert any("went unseen" in fault for fault in faults)
