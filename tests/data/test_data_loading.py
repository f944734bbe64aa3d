"""Names, places, splits and the order of an epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from peerbayes.data import ArraySplit, batches, data_root, from_arrays, load, load_images, names, order
from peerbayes.data.splits import held_out, measure
from peerbayes.errors import InputError
from peerbayes.math import noise

CPU = torch.device("cpu")


def rows(*splits):
    """All images of some splits, one row an image, in order."""
    return torch.cat([s.batch(torch.arange(len(s)), CPU)[0].flatten(1) for s in splits])


def sorted_rows(array):
    return array[np.lexsort(array.T)]


def write_npz(path, labels, **more):
    images = np.zeros((len(labels), 2, 2), np.uint8)
    images[:, 0, 0], images[:, 0, 1] = np.arange(len(labels)) % 256, np.arange(len(labels)) // 256
    np.savez(path, train_images=images, train_labels=np.asarray(labels), **more)


def identities(split):
    values = rows(split).long()
    return (values[:, 0] + 256 * values[:, 1]).tolist()


def test_a_file_has_one_validation_split(tmp_path):
    own = {f"{name}_images": np.zeros((2, 4, 4), np.uint8) for name in ("validation", "val")}
    write_npz(tmp_path / "both.npz", [0, 1, 0, 1], validation_labels=[0, 1], val_labels=[0, 1], **own)
    with pytest.raises(InputError, match=r"both\.npz: has both 'validation_images' and 'val_images'; expected one"):
        load(tmp_path / "both.npz")


def test_digits_are_all_there_once_with_their_labels():
    found = load("digits", validation=200)
    reference = load_digits()
    assert (len(found.train), len(found.validation), len(found.test)) == (1097, 200, 500)
    splits = (found.train, found.validation, found.test)
    ours = torch.cat([rows(*splits).double(), torch.cat([s.labels for s in splits])[:, None].double()], 1).numpy()
    pixels = np.round(reference.images.reshape(-1, 64) * 255 / 16)
    theirs = np.column_stack([pixels, reference.target])
    np.testing.assert_array_equal(sorted_rows(ours), sorted_rows(theirs))
    share = np.bincount(found.test.labels) / np.bincount(reference.target)
    assert np.abs(share - 500 / 1797).max() < 1 / 174
    assert len(found.validation.labels.unique()) == 10
    np.testing.assert_allclose(found.mean, rows(found.train).double().mean() / 255, rtol=1e-9)
    np.testing.assert_allclose(found.std, rows(found.train).double().std(correction=0) / 255, rtol=1e-9)


def test_splits_are_the_same_every_time():
    first, second = load("digits", validation=0.1), load("digits", validation=0.1)
    for part in ("train", "validation", "test"):
        assert torch.equal(rows(getattr(first, part)), rows(getattr(second, part)))
    # The test images do not depend on the validation split, and these are fixed for all time.
    assert torch.equal(rows(load("digits").test), rows(first.test))
    assert first.test.labels[:8].tolist() == FIXED_DIGITS
    assert torch.equal(rows(load("digits").train)[:-130], rows(first.train))


FIXED_DIGITS = [9, 5, 2, 1, 1, 6, 9, 3]


@settings(max_examples=60, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=120), share=st.floats(0, 1), other=st.booleans())
def test_held_out_parts_cover_everything_and_share_the_classes(labels, share, other):
    labels = torch.tensor(labels)
    count = max(1, round(share * len(labels)))
    kept, held = held_out(labels, count, "other" if other else "test")
    assert len(held) == count
    assert sorted(kept.tolist() + held.tolist()) == list(range(len(labels)))
    for number in labels.unique():
        expected = float((labels == number).sum()) * count / len(labels)
        assert abs(float((labels[held] == number).sum()) - expected) < 1


def test_held_out_images_are_chosen_at_random_and_by_stream():
    labels = torch.arange(1000) % 2
    _, held = held_out(labels, 200, "test")
    _, others = held_out(labels, 200, "validation")
    # The runs between held-out images of a fifth have the spread of a random choice, not of every fifth image.
    gaps = held.diff().double()
    assert 3 < float(gaps.std()) < 6
    assert 20 < len(set(held.tolist()) & set(others.tolist())) < 65


def test_the_last_images_validate_unless_classes_are_stored_one_after_another(tmp_path):
    mixed = [0, 1, 2] * 10
    write_npz(tmp_path / "mixed.npz", mixed, test_images=np.zeros((2, 2, 2), np.uint8), test_labels=[0, 1])
    found = load(tmp_path / "mixed.npz", validation=6)
    assert identities(found.train) == list(range(24))
    assert identities(found.validation) == list(range(24, 30))
    assert len(load(tmp_path / "mixed.npz", validation=0.1).validation) == 3

    for grouped in ([2] * 10 + [0] * 10 + [1] * 10, sorted(mixed)):
        write_npz(tmp_path / "grouped.npz", grouped, test_images=np.zeros((2, 2, 2), np.uint8), test_labels=[0, 1])
        found = load(tmp_path / "grouped.npz", validation=6)
        assert found.validation.labels.bincount().tolist() == [2, 2, 2]
        assert sorted(identities(found.train) + identities(found.validation)) == list(range(30))
        assert identities(found.train) == sorted(identities(found.train))


def test_a_fifth_is_held_out_where_there_is_no_test_split(tmp_path):
    write_npz(tmp_path / "a.npz", [0] * 20 + [1] * 30)
    found = load(tmp_path / "a.npz")
    assert found.test.labels.bincount().tolist() == [4, 6]
    assert sorted(identities(found.train) + identities(found.test)) == list(range(50))
    assert identities(load(tmp_path / "a.npz", validation=10).test) == identities(found.test)
    assert identities(load_images(tmp_path / "a.npz")) == list(range(50))

    for name in ("x", "y"):
        (tmp_path / "flat" / name).mkdir(parents=True)
        for i in range(10):
            value = i + 10 * (name == "y")
            Image.new("RGB", (4, 4), (value, 0, 0)).save(tmp_path / "flat" / name / f"{i}.png")
    found = load(tmp_path / "flat", validation=4)
    assert found.test.labels.tolist() == [0, 0, 1, 1]
    assert found.validation.labels.tolist() == [0, 0, 1, 1]
    assert sorted(rows(found.train, found.validation, found.test)[:, 0].tolist()) == list(range(20))


def folder_of_numbers(folder, **parts):
    """Image folders of classes x and y; every image has a value of its own."""
    value = 0
    for part, count in parts.items():
        for number in range(2 * count):
            (folder / part / "xy"[number % 2]).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (value, 0, 0)).save(folder / part / "xy"[number % 2] / f"{number:03}.png")
            value += 1
    return folder


def test_a_validation_split_is_halved_where_there_is_no_test_split(tmp_path):
    folder = folder_of_numbers(tmp_path / "two", train=10, valid=20)
    found, whole = load(folder, validation="half"), load(folder, validation="auto")
    assert found.notes == (
        f"{folder}: no test split: half of the 40 images of 'valid' choose, the other half is the test split",
    )
    assert (found.validation.labels.bincount().tolist(), found.test.labels.bincount().tolist()) == ([10, 10], [10, 10])
    values = [rows(split)[:, 0].tolist() for split in (found.train, found.validation, found.test)]
    assert sorted(values[1] + values[2]) == sorted(rows(whole.test)[:, 0].tolist())
    assert sorted(values[0]) == sorted(rows(whole.train, whole.validation)[:, 0].tolist())
    assert (found.halved, found.origin["validation"]) == (True, "half")

    images, labels = np.arange(10, 30, dtype=np.uint8)[:, None, None].repeat(2, 1), [0, 1] * 10
    own = np.arange(6, dtype=np.uint8)[:, None, None].repeat(2, 1), [0, 1] * 3
    found = load({"train": (images, labels), "validation": own}, validation="half")
    assert found.notes[0].endswith("half of the 6 images of 'validation' choose, the other half is the test split")
    assert sorted(rows(found.validation, found.test)[:, 0].tolist()) == list(range(6))
    assert sorted(rows(found.train)[:, 0].tolist()) == list(range(10, 30))


def test_half_is_as_auto_where_there_is_a_test_split_or_no_validation_split(tmp_path):
    for parts in ({"train": 10, "val": 4, "test": 4}, {"train": 10, "test": 4}, {"train": 10}):
        folder = folder_of_numbers(tmp_path / "-".join(parts), **parts)
        half, auto = load(folder, validation="half"), load(folder, validation="auto")
        assert (half.digest(), half.notes, half.origin) == (auto.digest(), auto.notes, auto.origin)
        assert not half.halved
    write_npz(tmp_path / "one.npz", [0, 1] * 10, val_images=np.zeros((1, 2, 2), np.uint8), val_labels=[0])
    with pytest.raises(
        InputError, match=r"one\.npz: expected at least two images in 'validation' to halve them, got 1"
    ):
        load(tmp_path / "one.npz", validation="half")


def test_own_validation_split_under_either_name(tmp_path):
    extra = np.full((3, 2, 2), 9, np.uint8)
    for prefix in ("validation", "val"):
        more = {f"{prefix}_images": extra, f"{prefix}_labels": [0, 1, 0], "names": np.array(["no", "yes"])}
        write_npz(tmp_path / "a.npz", [0, 1] * 5, **more)
        found = load(tmp_path / "a.npz")
        assert found.validation.labels.tolist() == [0, 1, 0]
        assert bool((rows(found.validation) == 9).all())
        assert found.class_names == ("no", "yes")


def test_arrays_in_memory_are_split_and_measured_as_those_of_a_file(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (50, 5, 5, 3), dtype=np.uint8), np.arange(50) % 4
    np.savez(tmp_path / "own.npz", train_images=images, train_labels=labels)
    stored, made = load(tmp_path / "own.npz", validation=0.2), from_arrays((images, labels), validation=0.2)
    assert (made.name, made.classes, made.shape) == ("arrays", stored.classes, stored.shape)
    assert (made.mean, made.std) == (stored.mean, stored.std)
    for one, two in zip((stored.train, stored.validation, stored.test), (made.train, made.validation, made.test)):
        assert torch.equal(one.images, two.images)
        assert torch.equal(one.labels, two.labels)
    grey = torch.rand(6, 5, 5)
    pairs = from_arrays((grey, [0, 1, 2] * 2), (grey[:2], [1, 1]), (grey[2:3], [2]), names="abc", name="grey")
    assert (pairs.name, pairs.class_names, pairs.shape) == ("grey", ("a", "b", "c"), (1, 5, 5))
    assert torch.equal(pairs.test.images[:, 0], grey[:2])
    assert pairs.validation.labels.tolist() == [2]


ZEROS = np.zeros((4, 5, 5), np.uint8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": ZEROS}, r"train is of type ndarray, expected a pair \(images, labels\)"),
        ({"train": (ZEROS, [0, 1])}, "train_labels: 2 labels for 4 images"),
        ({"train": (ZEROS, [0, 1, 3, 3])}, "train_labels has no image of class 2: number the classes from 0"),
        ({"train": (ZEROS, [0, 1, 2, 1]), "names": "ab"}, "train_labels: labels must be below 2"),
        ({"train": (ZEROS + 0.5 + 1, [0, 1, 0, 1])}, r"train_images: float images must be in \[0, 1\]"),
        ({"train": (ZEROS, [0, 1, 0, 1]), "test": (ZEROS, [0, 1, 2, 1])}, "test_labels: labels must be below 2"),
        ({"train": (ZEROS, [0, 1, 0, 1]), "test": (ZEROS[:, :4], [0] * 4)}, "arrays: test images have shape"),
        ({"train": (ZEROS, [[0], [1, 2]])}, r"train: the label of item 0 is a list \(\[0\]\), expected a class"),
    ],
)
def test_arrays_that_are_no_data_are_one_sentence(given, message):
    with pytest.raises(InputError, match=message):
        from_arrays(**given)


def test_images_without_labels(tmp_path):
    np.savez(tmp_path / "ood.npz", test_images=np.arange(48, dtype=np.uint8).reshape(3, 4, 4))
    split = load_images(tmp_path / "ood.npz")
    assert split.labels is None
    images, labels = split.batch(torch.tensor([2, 0]), CPU)
    assert images[:, 0, 0, 0].tolist() == [32, 0]
    assert labels.shape == (0,)
    assert labels.dtype == torch.int64
    with pytest.raises(InputError, match="no key 'train_images'"):
        load(tmp_path / "ood.npz")


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (1300, "must leave training images: got 1300, digits has 1297"),
        (-1, "got -1"),
        (1.0, "fraction"),
        (-0.1, "fraction"),
    ],
)
def test_bad_validation(validation, message):
    with pytest.raises(InputError, match=message):
        load("digits", validation=validation)


def test_data_root(tmp_path, monkeypatch):
    monkeypatch.delenv("PEERBAYES_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "peerbayes" / "data"
    monkeypatch.setenv("PEERBAYES_DATA", str(tmp_path / "env"))
    assert data_root() == tmp_path / "env"
    assert data_root(tmp_path / "arg") == tmp_path / "arg"
    (tmp_path / "env").mkdir()
    write_npz(tmp_path / "env" / "cifar100.npz", list(range(100)) * 2)
    assert identities(load_images("cifar100")) == list(range(200))
    assert load("cifar100").mean == (0.5071, 0.4865, 0.4409)


@pytest.mark.parametrize(
    ("name", "places", "archive"),
    [
        ("cifar10", ["cifar-10-batches-py", "cifar10.npz"], "cifar-10-python.tar.gz"),
        ("cifar100", ["cifar-100-python", "cifar100.npz"], "cifar-100-python.tar.gz"),
        ("svhn", ["svhn/train_32x32.mat", "train_32x32.mat"], "get train_32x32.mat"),
        ("mnist", ["mnist/train-images-idx3-ubyte.gz"], "get train-images-idx3-ubyte.gz"),
        ("fashion-mnist", ["fashion-mnist/train-images-idx3-ubyte"], "get train-images-idx3-ubyte.gz"),
        ("imagenet", ["imagenet", "ILSVRC2012"], "ILSVRC2012_img_train.tar"),
        ("tiny-imagenet", ["tiny-imagenet-200"], "tiny-imagenet-200.zip"),
    ],
)
def test_a_missing_set_says_where_it_looked_and_what_to_get(tmp_path, name, places, archive):
    with pytest.raises(InputError) as caught:
        load(name, root=tmp_path)
    message = str(caught.value)
    assert all(str(tmp_path / place) in message for place in places)
    assert archive in message
    assert "PEERBAYES_DATA" in message
    assert name in names()


def test_unknown_names(tmp_path):
    with pytest.raises(InputError, match=r"no data set 'cifar-10'.*did you mean 'cifar10'"):
        load("cifar-10", root=tmp_path)
    with pytest.raises(InputError, match=r"no data set 'arrays'.*; data in memory has to be given again$"):
        load(from_arrays((torch.zeros(10, 4, 4), torch.arange(10) % 2)).name, root=tmp_path)
    with pytest.raises(InputError, match=rf"not a known name, and {tmp_path}/b does not exist;"):
        load(tmp_path / "b", root=tmp_path)
    (tmp_path / "a.txt").write_text("1,2")
    with pytest.raises(InputError, match=r"a\.txt: expected an \.npz file"):
        load(tmp_path / "a.txt")
    with pytest.raises(InputError, match="size must be at least 1"):
        load("digits", size=0)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 60), batch_size=st.integers(1, 20), seed=st.integers(0, 99))
def test_batches_visit_every_image_once(count, batch_size, seed):
    address = noise.Address(seed, "data", "order", 1)
    whole = torch.cat(batches(count, batch_size, address))
    assert torch.equal(whole, order(count, address))
    assert sorted(whole.tolist()) == list(range(count))
    assert torch.cat(batches(count, batch_size)).tolist() == list(range(count))
    if count >= batch_size:
        full = batches(count, batch_size, address, drop_last=True)
        assert [len(b) for b in full] == [batch_size] * (count // batch_size)
        assert torch.equal(torch.cat(full), whole[: len(full) * batch_size])
    else:
        with pytest.raises(InputError, match="leaves no full batch"):
            batches(count, batch_size, address, drop_last=True)


def test_epochs_differ_and_can_be_replayed():
    address = noise.Address(3, "data", "order")
    assert torch.equal(order(100, address.at(2)), order(100, address.at(2)))
    assert not torch.equal(order(100, address.at(2)), order(100, address.at(3)))
    with pytest.raises(InputError, match="batch_size must be at least 1"):
        batches(10, 0)


def test_array_split_moves_with_its_labels():
    split = ArraySplit(torch.arange(12, dtype=torch.uint8).view(3, 1, 2, 2), torch.tensor([5, 6, 7], dtype=torch.uint8))
    moved = split.to("meta")
    images, labels = moved.batch(torch.zeros(2, dtype=torch.int64, device="meta"), torch.device("meta"))
    assert (images.device.type, labels.device.type) == ("meta", "meta")
    assert moved.labels.tolist() == [5, 6, 7]
    images, labels = split.select(torch.tensor([2, 1])).batch(torch.tensor([0]), CPU)
    assert images.flatten().tolist() == [8, 9, 10, 11]
    assert labels.tolist() == [7]
    assert labels.dtype == torch.int64
    images, labels = split.batch(torch.zeros(0, dtype=torch.int64), CPU)
    assert (images.shape, labels.shape) == ((0, 1, 2, 2), (0,))


def test_measured_statistics_over_several_chunks():
    images = torch.rand(2500, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    images[:, 1] = 0.25
    mean, std = measure(ArraySplit(images))
    np.testing.assert_allclose(mean, images.double().mean((0, 2, 3)), rtol=1e-10)
    np.testing.assert_allclose(std[0], images[:, 0].double().std(correction=0), rtol=1e-8)
    assert std[1] == 1 / 255


def test_imagenets_statistics_on_other_colour_images(tmp_path):
    colours = np.random.default_rng(0).integers(0, 255, (60, 4, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "colours.npz", train_images=colours, train_labels=np.arange(60) % 3)
    own, other = load(tmp_path / "colours.npz"), load(tmp_path / "colours.npz", stats="imagenet")
    assert (other.mean, other.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert own.mean == pytest.approx(rows(own.train).double().mean(0).view(3, 16).mean(1) / 255, abs=1e-6)
    assert torch.equal(rows(own.train), rows(other.train))
    for name, stats, message in (
        ("digits", "imagenet", "stats = 'imagenet' is for images of 3 channels, but digits has 1"),
        (tmp_path / "colours.npz", "imagnet", "stats = 'imagnet': expected 'imagenet', or None for the data's own"),
    ):
        with pytest.raises(InputError) as caught:
            load(name, stats=stats)
        assert str(caught.value) == message


@pytest.mark.skipif(not (data_root() / "cifar100.npz").is_file(), reason="needs cifar100.npz under PEERBAYES_DATA")
def test_published_statistics_of_cifar100_are_those_of_its_images():
    found = load("cifar100")
    mean, std = measure(found.train)
    np.testing.assert_allclose(mean, found.mean, atol=1e-3)
    np.testing.assert_allclose(std, found.std, atol=1e-3)
