"""The script that measures what `adopt` makes of pretrained networks: its data, and what it sums up."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from peerbayes.math.noise import Address
from peerbayes.metrics import fit_temperature


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("adopted")


def test_parts_and_seeds_share_no_item_and_have_as_many_of_each_class(script):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 20))
    seeds = [script.blocks(labels, (3, 2), seed, classes=3) for seed in range(4)]
    for learn, choose in seeds:
        assert np.bincount(labels[learn], minlength=4).tolist() == [3, 3, 3, 0]
        assert np.bincount(labels[choose], minlength=4).tolist() == [2, 2, 2, 0]
    taken = np.concatenate([part for parts in seeds for part in parts])
    assert len(set(taken.tolist())) == len(taken) == 4 * 15


def test_features_are_scaled_to_the_unit_range_and_back(script):
    parts = {name: (torch.randn(5, 2, 3, 3) * 4, None) for name in ("train", "test")}
    scaled, (least, extent) = script.unit(parts)
    values = torch.cat([x.flatten() for x, _ in scaled.values()])
    assert (values.min(), values.max()) == (0, 1)
    for name, (x, _) in parts.items():
        assert torch.allclose(scaled[name][0] * extent + least, x, atol=1e-5)


def test_a_layer_is_that_of_bert_and_leaves_padding_out(script):
    torch.manual_seed(0)
    width, heads = 24, 4
    theirs = torch.nn.TransformerEncoderLayer(
        width, heads, 48, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    )
    state = theirs.state_dict()
    parts = dict(zip(("query", "key", "value"), state["self_attn.in_proj_weight"].chunk(3), strict=True))
    biases = dict(zip(parts, state["self_attn.in_proj_bias"].chunk(3), strict=True))
    given = {f"attention.self.{name}.weight": weight for name, weight in parts.items()}
    given |= {f"attention.self.{name}.bias": bias for name, bias in biases.items()}
    names = {
        "attention.output.dense": "self_attn.out_proj", "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "linear1", "output.dense": "linear2", "output.LayerNorm": "norm2",
    }  # fmt: skip
    given |= {f"{ours}.{one}": state[f"{name}.{one}"] for ours, name in names.items() for one in ("weight", "bias")}
    layer = script.Layer({f"encoder.layer.0.{name}": tensor for name, tensor in given.items()}, 0, heads).eval()
    x, present = torch.randn(3, 5, width), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()
    expected = theirs(x, src_key_padding_mask=~present)  # in training mode, where it takes no shortcut
    assert torch.allclose(layer(x, present)[present], expected[present], atol=1e-5)


def test_letters_are_mistyped_at_the_rate_as_keyboards_have_it(script):
    near = {pair for letter, others in script.NEIGHBOURS.items() for pair in ((letter, other) for other in others)}
    assert {other for letter, other in near if letter == "s"} == set("awedxz")
    assert len(near) == 2 * (9 + 8 + 6 + 2 * 9 + 2 * 7)  # in rows, then between them
    assert all((other, letter) in near for letter, other in near)
    text, address = "sss tt, " * 5000, Address(0, "data", "mistyped")
    for rate in (0.04, 0.2):
        typed = script.mistyped(text, rate, address)
        assert typed == script.mistyped(text, rate, address)
        assert typed != script.mistyped(text, rate, address.at(1))
        letters = 5 * 5000
        assert len(text) - len(typed) == pytest.approx(letters * rate / 3, rel=0.1)  # left out
        assert sum(typed.count(one) for one in "awedxz") == pytest.approx(3 * 5000 * rate / 3, rel=0.15)
        assert sum(typed.count(one) for one in "rfgy") == pytest.approx(2 * 5000 * rate / 3, rel=0.15)
        assert typed.count(", ") == 5000
    assert script.mistyped("what's up, 42?", 0.0, address) == "what's up, 42?"
    swapped = [script.mistyped("ab 7", 0.2, address.at(number)) for number in range(2000)]
    assert swapped.count("ba 7") == pytest.approx(2000 * 0.2 / 3, rel=0.25)


def test_another_task_stays_in_the_record(script, tmp_path, monkeypatch):
    def row(task, seed):
        part = {"accuracy": 0.5, "nll": 1.0, "ece": 0.1}
        return {"task": task, "seed": seed, "row": "plain + temperature", "passes": 1, "bytes": 8, "test": part,
                "validation": part}  # fmt: skip

    monkeypatch.setattr(script, "measure", lambda name, seed, *_, **__: [row(name, seed)])
    monkeypatch.setattr(script.importlib.metadata, "version", lambda _: "1")
    out = tmp_path / "record.json"
    for words in (["--seeds", "0,1"], ["--seeds", "2", "--only", "texts"]):
        assert script.main([*words, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["task"], row["seed"]) for row in rows] == [("images", 0), ("images", 1), ("texts", 2)]


def test_a_temperature_is_not_fitted_to_what_it_is_judged_on(script):
    torch.manual_seed(0)
    log_p, labels = (4 * torch.randn(50, 3)).log_softmax(1), torch.randint(3, (50,))
    losses = []
    for fold in range(5):
        held = torch.arange(50) % 5 == fold
        temperature = fit_temperature(log_p[~held], labels[~held])
        losses.append(F.cross_entropy(log_p[held] / temperature, labels[held]))
    assert script.held_out_nll(log_p, labels) == pytest.approx(float(sum(losses)) / 5, rel=1e-5)


def test_differences_are_paired_and_compare_with_the_better_plain_row_by_validation(script):
    def row(who, seed, validation, nll):
        return {
            "task": "images", "seed": seed, "row": who, "passes": 1, "bytes": 8, "auroc": 0.5,
            "validation": {"nll": validation}, "test": {"accuracy": 0.5, "nll": nll, "ece": 0.1},
        }  # fmt: skip

    rows = []
    for seed, nll in enumerate((1.0, 2.0, 3.0)):
        rows += [row("plain + temperature", seed, 0.4, nll), row("adopted", seed, 0.1, nll - 0.1 * (seed + 1))]
        rows.append(row("plain, trained on + temperature", seed, 0.5, 0.0))
    found = {line["row"]: line for line in script.summed_up(rows)}
    assert {line["base"] for line in found.values()} == {"plain + temperature"}
    assert found["adopted"]["test nll less base"] == pytest.approx({"mean": -0.2, "error": 0.1 / 3**0.5})
    assert found["adopted"]["seeds"] == [0, 1, 2]
    alone = script.summed_up(rows[:3])
    assert json.dumps(alone, allow_nan=False)  # one seed has no standard error
    assert alone[0]["test nll"] == {"mean": 1.0, "error": None}
    assert "test nll less base" not in found["plain + temperature"]
