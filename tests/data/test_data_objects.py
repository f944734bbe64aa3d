"""Objects as data: each kind bit for bit what the same arrays give, labels in order, and one sentence for the rest."""

import csv
import threading
import types
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from peerbayes.data import feed, from_arrays, load, load_images, load_texts
from peerbayes.data.dataset import load_judged
from peerbayes.data.datasets import formats
from peerbayes.data.items import ItemSplit
from peerbayes.errors import InputError, PeerbayesWarning

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (30, 6, 8, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (30, 6, 8), dtype=np.uint8)
LABELS = np.arange(30) % 3
WORDS = np.array(["cat", "ant", "bee"])[LABELS]
SORTED = np.array([2, 0, 1])[LABELS]  # ant, bee, cat


class Mapped(Dataset):
    """A torch data set that counts its reads."""

    def __init__(self, images, labels, classes=None):
        self.images, self.labels, self.reads = images, labels, 0
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        self.reads += 1
        return self.images[number], self.labels[number]


def pictures(arrays):
    return [Image.fromarray(array) for array in arrays]


def floats(images):
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255  # what torchvision's ToTensor makes


def same(found, expected):
    for part in ("train", "validation", "test"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            for one, two in zip(everything(ours), everything(theirs), strict=True):
                assert one.dtype == two.dtype
                assert torch.equal(one, two)
    assert (found.classes, found.shape, found.class_names) == (expected.classes, expected.shape, expected.class_names)
    assert (found.mean, found.std) == (expected.mean, expected.std)


def everything(split):
    return split.batch(torch.arange(len(split)), CPU)


# ---- stand-ins for packages that need not be there ------------------------------------------------------------------


class Columns:
    """What of a Hugging Face data set is used; the real one is tested where it is installed."""

    def __init__(self, table, features):
        self.table, self.features, self.column_names = table, features, list(table)
        self.info = types.SimpleNamespace(dataset_name=None, builder_name=None)

    def __len__(self):
        return len(self.table[self.column_names[0]])

    def __getitem__(self, key):
        return self.table[key] if isinstance(key, str) else {name: self.table[name][key] for name in self.table}


class Splits(dict):
    """A Hugging Face ``DatasetDict``."""

    column_names = ()


def hugging(table, names=None):
    features = {name: types.SimpleNamespace() for name in table}
    if names is not None:
        features["label"].names = names
    return Columns(table, features)


def real_hugging(table, names=None):
    datasets = pytest.importorskip("datasets")
    kinds = {int: datasets.Value("int64"), str: datasets.Value("string")}
    features = {name: kinds.get(type(rows[0]), datasets.Image()) for name, rows in table.items()}
    if names is not None:
        features["label"] = datasets.ClassLabel(names=names)
    return datasets.Dataset.from_dict(table, features=datasets.Features(features))


class Frame:
    """What of a pandas ``DataFrame`` is used; the real one is tested where it is installed."""

    iloc = None

    def __init__(self, table):
        self.table, self.columns = table, list(table)

    def __len__(self):
        return len(self.table[self.columns[0]])

    def itertuples(self, **_):
        return zip(*self.table.values(), strict=True)


def real_frame(table):
    return pytest.importorskip("pandas").DataFrame(table)


# ---- every kind, bit for bit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        (COLOUR, LABELS),
        (torch.from_numpy(COLOUR), torch.from_numpy(LABELS)),
        (list(COLOUR), LABELS.tolist()),
        (pictures(COLOUR), LABELS),
        list(zip(pictures(COLOUR), LABELS.tolist(), strict=True)),
        Mapped(pictures(COLOUR), LABELS),
        Mapped(torch.from_numpy(COLOUR).permute(0, 3, 1, 2), torch.from_numpy(LABELS)),
        DataLoader(Mapped(COLOUR, LABELS), batch_size=7, shuffle=True),
        [{"image": image, "label": label} for image, label in zip(pictures(COLOUR), LABELS, strict=True)],
        hugging({"image": pictures(COLOUR), "label": LABELS.tolist()}),
        {"train": (COLOUR, LABELS)},
    ],
    ids=lambda given: type(given).__name__,
)
def test_an_object_is_what_its_arrays_are(given):
    same(load(given, validation=4), from_arrays((COLOUR, LABELS), validation=4))


def test_float_images_keep_their_bits():
    images = floats(COLOUR)
    expected = from_arrays((images, LABELS))
    same(load(TensorDataset(images, torch.from_numpy(LABELS))), expected)
    same(load(Mapped(images.double(), LABELS)), expected)


def test_grey_pictures_have_one_channel_and_mixed_ones_three():
    same(load((pictures(GREY), LABELS)), from_arrays((GREY, LABELS)))
    mixed = [*pictures(GREY[:15]), *pictures(COLOUR[15:])]
    expected = np.concatenate([np.repeat(GREY[:15, ..., None], 3, 3), COLOUR[15:]])
    same(load((mixed, LABELS)), from_arrays((expected, LABELS)))


def test_given_splits_stay_and_missing_ones_are_cut_and_said():
    parts = {"training": (COLOUR[:20], LABELS[:20]), "testing": (COLOUR[20:], LABELS[20:])}
    found = load(parts, validation="auto")
    same(found, from_arrays((COLOUR[:20], LABELS[:20]), (COLOUR[20:], LABELS[20:]), 2))
    assert found.notes == ("arrays: no validation split: 2 of 20 training images are held out, the same every time",)
    own = {"train": (COLOUR[:20], LABELS[:20]), "dev": (COLOUR[20:], LABELS[20:])}
    found = load(own, validation="auto")
    assert (len(found.train), len(found.validation), len(found.test)) == (16, 10, 4)
    assert found.notes == ("arrays: no test split: 4 of 20 images are held out, the same every time",)
    assert load((COLOUR, LABELS)).digest() == load(Mapped(pictures(COLOUR), LABELS)).digest()
    assert load((COLOUR, LABELS)).digest() != load((COLOUR, (LABELS + 1) % 3)).digest()


@pytest.mark.parametrize("labels", [WORDS, WORDS.tolist(), WORDS.astype(object)])
def test_labels_that_are_names_are_numbered_in_their_order(labels):
    expected = from_arrays((COLOUR, SORTED), names=("ant", "bee", "cat"))
    for given in ((COLOUR, labels), Mapped(COLOUR, labels), {"train": (COLOUR, labels)}):
        same(load(given), expected)
    same(from_arrays((COLOUR, labels)), expected)
    same(load((COLOUR, labels), names=["ant", "bee", "cat"]), expected)
    with pytest.raises(InputError, match=r"test: the label of item 1 is 'dog', expected one of the 3 classes \(ant, "):
        load({"train": (COLOUR, labels), "test": (COLOUR[:2], ["cat", "dog"])})


def test_class_names_of_an_object_are_taken():
    assert load(Mapped(COLOUR, LABELS, classes=["x", "y", "z"])).class_names == ("x", "y", "z")
    subset = Subset(Mapped(COLOUR, LABELS, classes=["x", "y", "z"]), range(0, 30, 2))
    same(load(subset), from_arrays((COLOUR[::2], LABELS[::2]), names="xyz"))
    assert load(Mapped(COLOUR, LABELS)).name == "Mapped"


# ---- texts, tables, files -------------------------------------------------------------------------------------------

TEXTS = [f"text {number} about {word}s" for number, word in enumerate(WORDS)]


@pytest.mark.parametrize("make", [hugging, real_hugging])
def test_columns_of_hugging_face(make):
    whole = make({"sentence": TEXTS, "label": LABELS.tolist(), "idx": list(range(30))}, ["x", "y", "z"])
    found, expected = load(whole), load((TEXTS, LABELS), names=["x", "y", "z"])
    same(found, expected)
    assert found.vocabulary == expected.vocabulary
    parts = Splits(train=whole, test=make({"text": TEXTS[:9], "label": [-1] * 9}, ["x", "y", "z"]), unsupervised=whole)
    with pytest.warns(PeerbayesWarning, match="the split 'unsupervised' is left out"):
        found = load(parts)
    same(found, expected)
    assert found.notes[0] == "the test split has no labels and is left out"
    with pytest.raises(InputError, match=r"no column is the label \(columns: 'a', 'b'\); rename the one to learn"):
        load(make({"a": TEXTS, "b": TEXTS}))


def test_pictures_of_hugging_face():
    whole = real_hugging({"image": pictures(COLOUR), "label": LABELS.tolist()})
    same(load(whole), from_arrays((COLOUR, LABELS)))
    same(load(whole.with_format("numpy")), from_arrays((COLOUR, LABELS)))


@pytest.fixture
def files(tmp_path):
    for number, picture in enumerate(pictures(COLOUR[:, :6, :6])):
        picture.save(tmp_path / f"{number:02}.png")
    return [f"{number:02}.png" for number in range(30)]


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.mark.parametrize("header", [["path", "label"], ["label", "file_name"], ["", "image", "target"], None])
@pytest.mark.parametrize("labels", [WORDS, LABELS])
def test_a_table_of_image_paths_holds_those_images(tmp_path, files, header, labels):
    columns = {"path": files, "label": list(labels)}
    order = {None: ["path", "label"], 3: ["", "path", "label"]}.get(header and len(header), ["path", "label"])
    if header and header[0] == "label":
        order = ["label", "path"]
    rows = [[columns.get(name, [number] * 30)[number] for name in order] for number in range(30)]
    table = write(tmp_path / "table.csv", [header, *rows] if header else rows)
    numbers = {"names": ("ant", "bee", "cat")} if labels is WORDS else {}
    same(load(table), from_arrays((COLOUR[:, :6, :6], SORTED if labels is WORDS else LABELS), **numbers))


@pytest.mark.parametrize("make", [Frame, real_frame])
def test_a_data_frame_is_read_as_its_file(tmp_path, files, make):
    write(tmp_path / "t.csv", [["text", "label"], *zip(TEXTS, WORDS, strict=True)])
    same(load(make({"text": TEXTS, "label": list(WORDS)})), load(tmp_path / "t.csv"))
    paths = [str(tmp_path / name) for name in files]
    write(tmp_path / "p.csv", [["path", "label"], *zip(paths, LABELS, strict=True)])
    same(load(make({"label": LABELS.tolist(), "path": paths})), load(tmp_path / "p.csv"))
    same(load({"train": make({"label": LABELS.tolist(), "path": paths})}), load(tmp_path / "p.csv"))
    with pytest.raises(InputError, match=r"train \(a DataFrame\), row 1: has no label"):
        load(make({"text": TEXTS, "label": [None, *WORDS[1:]]}))


@pytest.mark.parametrize("make", [Frame, real_frame])
@pytest.mark.parametrize("kind", [pictures, list, lambda images: list(torch.from_numpy(images))])
def test_a_data_frame_of_images_is_a_list_of_them(make, kind):
    for labels in (LABELS, WORDS):
        frame = make({"image": kind(COLOUR), "label": labels.tolist()})
        expected = load(list(zip(kind(COLOUR), labels.tolist(), strict=True)))
        same(load(frame), expected)
        same(load({"train": frame}), expected)
    with pytest.raises(
        InputError, match=r"train: expected a column 'label' and one column of images \(columns: 'a', 'b"
    ):
        load(make({"a": kind(COLOUR), "b": kind(COLOUR), "label": LABELS.tolist()}))


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        (np.zeros(5), r"a ndarray of shape \(5,\)"),
        ([1, 2], "a list"),
        ({"bytes": b"a"}, "a dict"),
        (b"abc", "a bytes"),
    ],
)
def test_a_cell_of_a_data_frame_that_is_no_text_is_refused(cell, found):
    told = rf"train \(a DataFrame\), row 2: column 'text' holds {found}, expected a text, a path or a number, or PIL"
    with pytest.raises(InputError, match=told):
        load(Frame({"text": ["a", cell, "c"], "label": [0, 1, 0]}))


MANY = np.arange(36) % 12


@pytest.mark.parametrize(
    "labels",
    [MANY.astype(float), MANY.astype(float).tolist(), torch.from_numpy(MANY).double(), [np.float32(n) for n in MANY]],
    ids=["array", "floats", "tensor", "scalars"],
)
def test_whole_floats_are_class_numbers(labels):
    images = np.resize(COLOUR, (36, 6, 8, 3))
    same(load((images, labels)), from_arrays((images, MANY)))
    same(load(Frame({"image": list(images), "label": list(labels)})), from_arrays((images, MANY)))


def test_numbers_as_texts_are_in_the_order_of_their_values(tmp_path):
    images = np.resize(COLOUR, (36, 6, 8, 3))
    named = from_arrays((images, MANY), names=[str(number) for number in range(12)])
    for labels in (MANY.astype(str), MANY.astype(float).astype(str)):  # "10" and "10.0"
        same(load((images, labels)), named)
    assert load((images, (MANY / 2).astype(str))).class_names == tuple(
        str(n / 2) if n % 2 else str(n // 2) for n in range(12)
    )
    texts = [f"text {number}" for number in range(36)]
    rows = write(tmp_path / "whole.csv", [["text", "label"], *zip(texts, MANY, strict=True)])
    floats = write(tmp_path / "floats.csv", [["text", "label"], *zip(texts, MANY.astype(float), strict=True)])
    halves = write(tmp_path / "halves.csv", [["text", "label"], *zip(texts, MANY / 2, strict=True)])
    same(load(floats), load(rows))
    same(load(Frame({"text": texts, "label": MANY.astype(float).tolist()})), load(rows))
    assert load(halves).class_names == tuple(str(number / 2) for number in range(12))
    assert load((texts, ["b", "10", "9"] * 12)).class_names == ("10", "9", "b")


def test_paths_are_never_read_as_texts(tmp_path, files):
    paths = [tmp_path / name for name in files]
    expected = from_arrays((COLOUR[:, :6, :6], LABELS))
    same(load((paths, LABELS)), expected)
    same(load((list(map(str, paths)), LABELS)), expected)
    same(load(Mapped(paths, LABELS)), expected)
    gone = write(tmp_path / "gone.csv", [["path", "label"], *((f"a/{name}", 0) for name in files)])
    with pytest.raises(InputError, match=r"gone\.csv, row 2: there is no image 'a/00\.png', here or in"):
        load(gone)
    (tmp_path / files[3]).unlink()
    with pytest.raises(InputError, match=r"train: item 3: there is no image"):
        load((paths, LABELS))
    for name in files:
        if (tmp_path / name).exists():
            (tmp_path / name).rename(tmp_path / name.removesuffix(".png"))
    bare = write(
        tmp_path / "bare.csv", [["path", "label"], *((n.removesuffix(".png"), 0) for n in files if n[0] != "0")]
    )
    assert len(load_images(bare)) == 20


def test_names_of_images_without_their_endings(tmp_path, files):
    ids = [name.removesuffix(".png") + "a" for name in files]
    for name, short in zip(files, ids, strict=True):
        (tmp_path / name).rename(tmp_path / f"{short}.png")
    expected = from_arrays((COLOUR[:, :6, :6], LABELS))
    for name in ("image_id", "name"):
        same(load(write(tmp_path / "ids.csv", [[name, "label"], *zip(ids, LABELS, strict=True)])), expected)
    (tmp_path / "image_id.png").write_bytes(b"")  # a header that is also the name of a file
    same(load(tmp_path / "ids.csv"), expected)
    apart = write(tmp_path / "apart" / "ids.csv", [["image_id", "label"], *zip(ids, LABELS, strict=True)])
    with pytest.raises(InputError, match=r"row 2: there is no image '00a' \(or '00a\.jpg', say\), here or in .*apart;"):
        load(apart)


def test_a_text_that_is_also_the_name_of_a_file_is_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = write(tmp_path / "t.csv", [["text", "label"], *zip(TEXTS, WORDS, strict=True)])
    expected = load(table)
    for name in (TEXTS[1], "text"):
        (tmp_path / name).write_text("something else")
    same(load(table), expected)
    same(load((TEXTS, WORDS)), expected)


@pytest.mark.parametrize("kind", ["texts", "images", "pictures"])
def test_a_column_says_the_splits(tmp_path, files, kind):
    values = np.array(["train"] * 20 + ["Val"] * 4 + ["test_set"] * 6)
    order = np.random.default_rng(1).permutation(30)
    inputs = {"texts": TEXTS, "images": [str(tmp_path / name) for name in files], "pictures": pictures(COLOUR)}[kind]
    rows = [(inputs[n], WORDS[n], values[n]) for n in sorted(order[:30], key=lambda n: (values[n] != "train", n))]
    frame = Frame({"input": [r[0] for r in rows], "label": [r[1] for r in rows], "split": [r[2] for r in rows]})
    parts = {"train": slice(0, 20), "val": slice(20, 24), "test": slice(24, 30)}
    expected = load({name: (inputs[part], WORDS[part]) for name, part in parts.items()})
    assert [len(split) for split in (expected.train, expected.validation, expected.test)] == [20, 4, 6]
    same(load(frame), expected)
    assert len(load_judged(frame, names=expected.class_names, vocabulary=expected.vocabulary).test) == 6
    if kind != "pictures":
        table = write(tmp_path / "s.csv", [["input", "label", "split"], *(rows[n] for n in range(30))])
        same(load(table), expected)
        read = load_images(table) if kind == "images" else load_texts(table, expected.vocabulary)
        assert torch.equal(everything(read)[0], everything(expected.test)[0])


@pytest.mark.parametrize(
    ("values", "told"),
    [(["a", "b"], "'a' is no split"), (["test", "val"], "no row of it is 'train', found test, validation")],
)
def test_a_column_that_says_no_splits_is_told(tmp_path, values, told):
    table = write(tmp_path / "s.csv", [["text", "label", "split"], *zip(TEXTS, WORDS, values * 15, strict=True)])
    for given in (table, Frame({"text": TEXTS, "label": list(WORDS), "split": values * 15})):
        with pytest.warns(PeerbayesWarning, match=f"the column 'split' is not used: {told}; expected 'train', "):
            found = load(given)
        assert len(found.train) + len(found.test) == 30
    frame = Frame({"text": TEXTS, "label": list(WORDS), "split": ["train", "test"] * 15})
    with pytest.warns(PeerbayesWarning, match="the column 'split' is not used: all of it is given as 'train'"):
        assert len(load({"train": frame}).train) == 24


def test_a_header_is_a_header_and_data_are_data(tmp_path):
    rows = list(zip(TEXTS, WORDS, strict=True))
    expected = load(write(tmp_path / "a.csv", [["text", "label"], *rows]))
    assert sum(len(split) for split in (expected.train, expected.test)) == 30
    for header, order in ((["Label", "Text"], slice(None, None, -1)), (["review", "Sentiment"], slice(None))):
        same(load(write(tmp_path / "b.csv", [header, *(row[order] for row in rows)])), expected)
    numbered = [["", "review", "label"], *([number, *row] for number, row in enumerate(rows))]
    same(load(write(tmp_path / "c.csv", numbered)), expected)
    with pytest.raises(InputError, match="row 1: expected a class number, or a header with a column 'label'"):
        load(write(tmp_path / "d.csv", rows))  # no header: the first row is not taken for one
    first = [["1", "text"], *(["2", "label"] for _ in range(3)), *(["1", "label"] for _ in range(3))]
    found = load(write(tmp_path / "e.csv", first))
    assert len(found.train) + len(found.test) == 7


# ---- folders --------------------------------------------------------------------------------------------------------


def fill(folder, *classes, count=5):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (5, 5), (number, 0, 0)).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("train", ["train", "training", "Train"])
@pytest.mark.parametrize("validation", ["val", "valid", "validation", "dev"])
@pytest.mark.parametrize("test", ["test", "testing"])
def test_splits_by_any_of_their_names(tmp_path, train, validation, test):
    for part, count in ((train, 5), (validation, 3), (test, 2)):
        fill(tmp_path / part, "a", "b", count=count)
    found = load(tmp_path)
    assert (len(found.train), len(found.validation), len(found.test)) == (10, 6, 4)
    assert (found.class_names, found.notes) == (("a", "b"), ())


def test_two_folders_for_one_split_are_refused_and_classes_may_have_their_names(tmp_path):
    for part in ("train", "val", "valid"):
        fill(tmp_path / "two" / part, "a", "b")
    with pytest.raises(InputError, match="'val' and 'valid' could both be the validation split; leave one of them"):
        load(tmp_path / "two")
    fill(tmp_path / "flat", "train", "bus")
    assert load(tmp_path / "flat").class_names == ("bus", "train")
    fill(tmp_path / "one" / "training", "a", "b")
    fill(tmp_path / "one" / "valid", "a", "b", count=2)
    assert load(tmp_path / "one").notes == (f"{tmp_path / 'one'}: no test split: the 4 images of 'valid' are it",)


@pytest.mark.parametrize("suffix", ["_set", "-set", "_data", "_images", " split", "-dataset"])
def test_splits_with_a_suffix_are_no_classes(tmp_path, suffix):
    for part, count in (("Train", 5), ("val", 3), ("test", 2)):
        fill(tmp_path / f"{part}{suffix}", "a", "b", count=count)
    found = load(tmp_path)
    assert (len(found.train), len(found.validation), len(found.test)) == (10, 6, 4)
    assert found.class_names == ("a", "b")


def test_a_suffix_names_a_split_only_where_nothing_else_does(tmp_path):
    for part in ("train", "train_set", "test"):
        fill(tmp_path / "exact" / part, "a", "b", count=len(part))
    assert len(load(tmp_path / "exact").train) == 10
    fill(tmp_path / "flat" / "train", "a", "b")
    fill(tmp_path / "flat", "test_images")  # without classes
    assert load(tmp_path / "flat").class_names == ("a", "b")
    for part in ("train_set", "train_data"):
        fill(tmp_path / "two" / part, "a", "b")
    with pytest.raises(InputError, match="'train_data' and 'train_set' could both be the train split; leave one"):
        load(tmp_path / "two")


def test_a_folder_above_classes_or_splits_is_refused_with_the_one_meant(tmp_path):
    for part in ("train", "val"):
        fill(tmp_path / "root" / "images" / part, "a", "b")
    meant = tmp_path / "root" / "images"
    told = f"root: expected one sub-folder a class, found 'images' alone; if 'train', 'val' in it .*, give {meant}$"
    with pytest.raises(InputError, match=told):
        load(tmp_path / "root")
    assert load(meant).class_names == ("a", "b")
    fill(tmp_path / "deep" / "x" / "y", *"abcd")
    with pytest.raises(InputError, match=f"if 'a', 'b', 'c', ... in it are .* give {tmp_path / 'deep' / 'x' / 'y'}$"):
        load(tmp_path / "deep")
    fill(tmp_path / "below" / "train" / "images", "a", "b")
    with pytest.raises(InputError, match=f"give {tmp_path / 'below' / 'train' / 'images'}$"):
        load(tmp_path / "below")
    assert len(load_images(tmp_path / "root")) == 20  # without labels all are read, as before


def test_splits_below_classes_are_warned_of(tmp_path):
    for name in ("bus", "car"):
        fill(tmp_path / "splits" / name, "train", "test")
        fill(tmp_path / "years" / name, "2023", "2024")
    with pytest.warns(PeerbayesWarning, match="every class folder holds 'test' and 'train', whose images are mixed; "):
        assert load(tmp_path / "splits").class_names == ("bus", "car")
    assert load(tmp_path / "years").class_names == ("bus", "car")  # silently


def test_torchvisions_sets(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    fill(tmp_path, "a", "b", count=10)
    same(load(torchvision.datasets.ImageFolder(tmp_path)), load(tmp_path))
    turned = torchvision.datasets.ImageFolder(tmp_path, transform=torchvision.transforms.ToTensor())
    found = load(turned)
    assert everything(found.train)[0].dtype == torch.float32
    assert torch.equal(everything(found.train)[0], everything(load(tmp_path).train)[0].float() / 255)
    fake = torchvision.datasets.FakeData(12, (3, 5, 5), 2)
    images, labels = zip(*((np.asarray(image), int(label)) for image, label in fake), strict=True)
    if len(set(labels)) == 2:
        same(load(fake), from_arrays((np.stack(images), np.array(labels))))


# ---- large ones -----------------------------------------------------------------------------------------------------


def test_what_is_too_large_is_read_when_a_batch_wants_it(monkeypatch):
    expected = from_arrays((COLOUR, LABELS), validation=4)
    monkeypatch.setattr(formats, "MAPPED_BYTES", 20 * COLOUR[0].nbytes)
    data = Mapped(pictures(COLOUR), LABELS)
    found = load(data, validation=4)
    assert isinstance(found.train, ItemSplit)
    same(found, expected)
    data.reads = 0
    batches = feed(found.train, 8, 0, CPU)
    reference = feed(expected.train, 8, 0, CPU)
    for step in range(2 * batches.steps_per_epoch):
        for source in (batches, reference):
            source.prepare(step)
        place = step % batches.steps_per_epoch
        for one, two in zip(batches.batch(place), reference.batch(place), strict=True):
            assert torch.equal(one, two)
    batches.close()
    assert data.reads <= 8 * (2 * batches.steps_per_epoch + 4)
    assert torch.equal(everything(found.train.sized(4))[0], everything(expected.train.sized(4))[0])
    assert everything(found.train.select(torch.tensor([], dtype=torch.int64)))[0].shape == (0, 3, 6, 8)


def test_items_are_read_one_at_a_time(monkeypatch):
    monkeypatch.setattr(formats, "MAPPED_BYTES", 0)
    inside, most = [], []

    class Careful(Mapped):
        def __getitem__(self, number):
            inside.append(number)
            most.append(len(inside))
            found = super().__getitem__(number)
            inside.remove(number)
            return found

    split = load(Careful(COLOUR, LABELS)).train
    readers = [threading.Thread(target=everything, args=(split,)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert max(most) == 1


def test_pictures_of_different_sizes_are_made_squares_and_it_is_said():
    sizes = [Image.fromarray(image).resize((8 + number % 3, 7)) for number, image in enumerate(COLOUR)]
    found = load((sizes, LABELS))
    assert found.shape == (3, 7, 7)
    assert found.notes[0].startswith("train: images have different sizes: the shortest side is made 7 pixels")
    assert load((sizes, LABELS), size=5).shape == (3, 5, 5)
    first = load({"train": (sizes, LABELS), "test": (sizes[:1], [0])}, size=5).test
    alone = from_arrays((np.asarray(sizes[0])[None].repeat(2, 0), [0, 1]), (np.asarray(sizes[0])[None], [0])).test
    assert torch.equal(everything(first)[0], everything(alone.sized(5))[0])


def test_an_odd_first_image_does_not_set_the_size_of_all(tmp_path):
    given = [Image.new("RGB", (1, 1)), *(Image.new("RGB", (40 + n, 50)) for n in range(9))]
    assert load((given, [0, 1] * 5)).shape == (3, 44, 44)
    for number, image in enumerate(given):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        image.save(tmp_path / "ab"[number % 2] / f"{number}.png")
    assert load(tmp_path).shape == (3, 44, 44)
    assert load((given[::-1], [0, 1] * 5)).shape == (3, 48, 48)  # the first, as it is not odd


def test_random_transforms_are_warned_of_once():
    class Changing(Mapped):
        def __getitem__(self, number):
            return torch.rand(3, 4, 4), number % 2

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(Changing(COLOUR, LABELS))
    assert [str(one.message) for one in told] == [
        "train: item 0 is another image each time it is read; leave random transforms out of the data set, and name "
        "augmentations in data.augment"
    ]


# ---- what is no data ------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, r"train is of type int, expected a name, a path, .* or a Hugging Face data set"),
        (None, r"train is of type NoneType, expected a name, a path, "),
        (COLOUR, r"train is of type ndarray, expected a name, a path, .*\(X, y\)"),
        ([], r"train: the list is empty, expected images or texts with labels"),
        (([], []), r"train: X is empty, expected images or texts with labels"),
        (Mapped([], []), r"train: the Mapped is empty"),
        (Endless(), r"train: a Endless can only be read from its beginning, expected a data set with a length"),
        ((COLOUR, LABELS[:4]), r"train_labels: 4 labels for 30 images"),
        ((TEXTS, LABELS[:4]), r"train: 4 labels for 30 items"),
        ((COLOUR, 3), r"train: \(X, y\) with y of type int, expected one label an item"),
        ((COLOUR, LABELS / 2), r"train: the label of item 1 is a float \(0.5\), expected a class number or a name"),
        ((COLOUR, np.eye(30)), r"train: the label of item 0 is a ndarray \(of shape \(30,\)\), expected"),
        ((COLOUR, LABELS - 1), r"train_labels: labels must not be negative, got -1"),
        (
            ([COLOUR[0], COLOUR[1][:4]], [0, 1]),
            r"item 1 is an image of shape \(3, 4, 8\) .* expected \(3, 6, 8\)",
        ),
        ([COLOUR[0], COLOUR[1]], r"train: item 0 is a ndarray, expected \(image, label\) or \(text, label\)"),
        (
            (COLOUR, LABELS, COLOUR, LABELS),
            r"item 0 is a ndarray, expected .*; splits are given by name, \{'train': \.\.\., 'test': \.\.\.\}",
        ),
        ([(1, 2, 3)], r"train: item 0 is a tuple of 3, expected \(image, label\)"),
        ([(1.5, 0)], r"train: item 0: expected an image \(a PIL image, an array or a tensor\), got a float"),
        (
            Mapped(floats(COLOUR) * 3 - 1, LABELS),
            r"must be in \[0, 1\].*leave normalisation to the network",
        ),
        (["a text", "b"], r"train: item 0 is a str, expected"),
        ((["a", 3], [0, 1]), r"train: item 1 is a int, expected a text as item 0 is"),
        ({"tset": (COLOUR, LABELS)}, r"data: 'tset' is no split; did you mean 'test'\?"),
        ({"test": (COLOUR, LABELS)}, r"data: expected a split 'train', found 'test'"),
        ({"train": (COLOUR, LABELS), "test": (TEXTS, LABELS)}, r"the splits of the data hold images and texts"),
        ({"val": 1, "dev": 2}, r"data: two splits could both be 'validation'"),
        ((Frame({"a": [1]}), [0]), r"train: X is a table of 1 columns, expected images or texts"),
        (UserDict(a=1), r"data: 'a' is no split"),
    ],
)
def test_what_is_no_data_is_one_sentence(given, message):
    with pytest.raises(InputError, match=message) as caught:
        load(given)
    assert "\n" not in str(caught.value)


def test_an_item_that_fails_is_named():
    class Broken(Mapped):
        def __getitem__(self, number):
            if number == 3:
                raise KeyError("no such file")
            return super().__getitem__(number)

    with pytest.raises(InputError, match="train: item 3 can't be read: KeyError: 'no such file'"):
        load(Broken(COLOUR, LABELS))


def test_what_is_judged_is_the_test_split_or_all():
    found = load_judged({"train": (COLOUR, LABELS), "test": (COLOUR[:6], LABELS[:6])}, names="xyz")
    assert torch.equal(everything(found.test)[0], torch.from_numpy(COLOUR[:6]).permute(0, 3, 1, 2))
    found = load_judged((COLOUR[:4], ["bee"] * 4), names=["ant", "bee", "cat"])
    assert (len(found.test), found.classes, found.test.labels.tolist()) == (4, 3, [1] * 4)
