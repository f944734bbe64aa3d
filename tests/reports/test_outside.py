"""Figures on corrupted test images: made here, and read from the official arrays."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from peerbayes import metrics as evaluation
from peerbayes.data import ArraySplit, Dataset, corrupt
from peerbayes.data.transforms.corrupt import COMMON
from peerbayes.errors import InputError
from peerbayes.inference.prediction import predict_split
from peerbayes.math.noise import FIXED, Address
from peerbayes.posteriors import Point
from peerbayes.reports import scoring as outside
from peerbayes.reports.scoring import check_corrupted, judge_corrupted

COUNT, SHAPE = 12, (3, 8, 8)


def split(seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (COUNT, *SHAPE), dtype=torch.uint8, generator=generator)
    return ArraySplit(images, torch.arange(COUNT) % 4)


@pytest.fixture(scope="module")
def data():
    return Dataset("small", split(0), None, split(1), 4, None, SHAPE, (0.5,) * 3, (0.3,) * 3)


@pytest.fixture(scope="module")
def peers():
    torch.manual_seed(0)
    return {name: Point(nn.Sequential(nn.Flatten(), nn.Linear(192, 4))) for name in "ab"}


def predict(posterior, name, part):
    return predict_split(posterior, part, 1, seed=0, name=name)[0]


def write(folder, images, labels):
    for name in COMMON:
        np.save(folder / f"{name}.npy", images.permute(0, 2, 3, 1).numpy())
    np.save(folder / "labels.npy", labels.numpy())


def test_corruptions_are_made_of_the_test_images_and_averaged_over_types_and_severities(data, peers):
    found = judge_corrupted(predict, peers, data, "made", 15)
    assert list(found) == ["a", "b", None]
    types = found["a"]["by_type"]
    assert list(types) == list(COMMON)
    address = Address(FIXED, "data", "corrupt")
    for name, severity in (("fog", 1), ("pixelate", 5)):
        moved = ArraySplit(corrupt(data.test.images, name, severity, address), data.test.labels)
        log_p = predict(peers["a"], "a", moved)
        assert types[name]["nll"][severity - 1] == evaluation.nll_from_log(log_p, data.test.labels)
    every = [value for figures in types.values() for value in figures["nll"]]
    assert len(every) == 75
    assert found["a"]["nll"] == pytest.approx(sum(every) / 75)
    assert found[None]["nll"] <= (found["a"]["nll"] + found["b"]["nll"]) / 2  # Jensen
    assert judge_corrupted(predict, peers, data, "made", 15) == found


@pytest.mark.parametrize("count", [1, 5, 76])
def test_any_number_of_images_is_corrupted_by_one_each(data, count):
    rows = torch.arange(count) % COUNT
    few = replace(data, test=ArraySplit(split(1).images[rows], rows % 4))
    ((name, made),) = outside._corrupted(few, "mixed", torch.device("cpu"))
    images = made.batch(torch.arange(count), torch.device("cpu"))[0]
    assert (name, len(images)) == ("mixed", count)
    first = outside._made(few.test.images[::75].clone(), few, COMMON[0], 1)
    assert torch.equal(images[::75], first)


def test_one_peer_alone_has_no_figures_as_one(data, peers):
    assert list(judge_corrupted(predict, {"b": peers["b"]}, data, "made", 15)) == ["b"]


def test_many_images_are_corrupted_as_if_at_once(data):
    images = torch.randint(0, 256, (2503, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    whole = corrupt(images, "impulse_noise", 5, Address(FIXED, "data", "corrupt"))
    assert torch.equal(outside._made(images, data, "impulse_noise", 5), whole)
    assert not torch.equal(whole[2500:], images[2500:])


def test_images_that_can_not_be_corrupted_are_one_sentence(data, peers):
    small = replace(data, test=ArraySplit(data.test.images[..., :7], data.test.labels))
    sentence = (
        r"^corrupted images can't be made of small: images have shape \(12, 3, 8, 7\): expected \(N, 3, H, W\) or"
    )
    with pytest.raises(InputError, match=sentence):
        judge_corrupted(predict, peers, small, "made", 15)
    with pytest.raises(InputError, match=r"^corrupted images can't be made of small: images have shape \(1, 3, 8, 7\)"):
        check_corrupted(small, "made")
    check_corrupted(data, "made")


def test_official_arrays_hold_the_severities_one_after_the_other(data, peers, tmp_path):
    parts = [data.test.images // (1 + severity) for severity in range(5)]
    write(tmp_path, torch.cat(parts), data.test.labels.repeat(5))
    found = judge_corrupted(predict, peers, data, str(tmp_path), 15)["a"]
    expected = [
        evaluation.nll_from_log(predict(peers["a"], "a", ArraySplit(part, data.test.labels)), data.test.labels)
        for part in parts
    ]
    assert found["by_type"]["snow"]["nll"] == pytest.approx(expected)
    assert found["source"] == str(tmp_path)


def test_arrays_of_another_data_set_are_refused_by_their_folder(data, peers, tmp_path):
    sentence = r" classes up to 30, but small has images of shape \(3, 8, 8\) and 4 classes$"
    write(tmp_path, data.test.images.repeat(5, 1, 1, 1), data.test.labels.repeat(5) * 10)
    with pytest.raises(InputError, match=f"^{tmp_path}: its images have shape .*{sentence}"):
        judge_corrupted(predict, peers, data, str(tmp_path), 15)
    write(tmp_path, data.test.images.repeat(5, 1, 2, 2), data.test.labels.repeat(5))
    sentence = rf"^{tmp_path}: its images have shape \(3, 16, 16\)"
    with pytest.raises(InputError, match=sentence):
        judge_corrupted(predict, peers, data, str(tmp_path), 15)
    with pytest.raises(InputError, match=sentence):
        check_corrupted(data, str(tmp_path))
