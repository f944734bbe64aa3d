"""Each format is written as the official files are, and read back pixel by pixel."""

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image
from torchvision.transforms import functional as vision

from peerbayes.data import ArraySplit, load, load_images, load_outside
from peerbayes.data.splits import decode_rgb
from peerbayes.errors import InputError, PeerbayesWarning

CPU = torch.device("cpu")


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def everything(split):
    return split.batch(torch.arange(len(split)), CPU)


def write_pickle(path, content):
    """Protocol 2 with bytes keys and numpy's old module names, as the official files have."""
    data = pickle.dumps(content, protocol=2)
    path.write_bytes(data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def write_cifar10(root, per_file=6):
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    flat, labels = [], []
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data = pixels(per_file, 3072, seed=number)
        numbers = [(number + 3 * i) % 10 for i in range(per_file)]
        content = {
            b"batch_label": name.encode(),
            b"labels": numbers,
            b"data": data,
            b"filenames": [b"a.png"] * per_file,
        }
        write_pickle(folder / name, content)
        flat.append(data)
        labels += numbers
    write_pickle(folder / "batches.meta", {b"label_names": [b"name%d" % i for i in range(10)], b"num_vis": 3072})
    return flat, labels


def test_official_cifar10(tmp_path):
    flat, labels = write_cifar10(tmp_path)
    found = load("cifar10", root=tmp_path, validation=7)
    images, numbers = everything(found.train)
    last, _ = everything(found.validation)
    test, test_numbers = everything(found.test)
    expected = np.concatenate(flat).reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(torch.cat([images, last, test]).numpy(), expected)
    assert numbers.tolist() == labels[:23]
    assert found.validation.labels.tolist() == labels[23:30]
    assert test_numbers.tolist() == labels[30:]
    # Red, then green, then blue plane, row by row.
    assert int(images[0, 1, 2, 3]) == flat[0][0, 1024 + 2 * 32 + 3]
    assert found.class_names == tuple(f"name{i}" for i in range(10))
    assert (found.classes, found.shape) == (10, (3, 32, 32))
    assert found.mean == (0.4914, 0.4822, 0.4465)
    assert found.std == (0.2023, 0.1994, 0.2010)
    assert found.soft_labels is None


def test_official_cifar100_takes_the_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, seed in (("train", 1), ("test", 2)):
        write_pickle(
            folder / name,
            {b"data": pixels(4, 3072, seed=seed), b"fine_labels": [99, 0, 50, seed], b"coarse_labels": [1, 2, 3, 4]},
        )
    write_pickle(folder / "meta", {b"fine_label_names": [b"f%d" % i for i in range(100)], b"coarse_label_names": []})
    found = load("cifar100", root=tmp_path)
    images, labels = everything(found.test)
    np.testing.assert_array_equal(images.numpy(), pixels(4, 3072, seed=2).reshape(4, 3, 32, 32))
    assert labels.tolist() == [99, 0, 50, 2]
    assert found.class_names[99] == "f99"
    assert found.std == (0.2673, 0.2564, 0.2761)


def test_out_of_distribution_images_need_the_test_file_only(tmp_path):
    flat, _ = write_cifar10(tmp_path)
    for number in range(1, 6):
        (tmp_path / "cifar-10-batches-py" / f"data_batch_{number}").unlink()
    split = load_images("cifar10", root=tmp_path)
    np.testing.assert_array_equal(everything(split)[0].numpy(), flat[5].reshape(-1, 3, 32, 32))
    with pytest.raises(InputError, match="data_batch_1: file not found"):
        load("cifar10", root=tmp_path)


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path):
    write_cifar10(tmp_path)
    target = tmp_path / "was-here"
    content = {b"data": pixels(2, 3072), b"labels": [0, 1], b"extra": Malicious(target)}
    data = pickle.dumps(content, protocol=2)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"data_batch_3: the pickle asks for '\w+\.system'"):
        load("cifar10", root=tmp_path)
    assert not target.exists()
    pickle.loads(data)  # the file is dangerous to a reader that trusts it
    assert target.exists()


@pytest.mark.parametrize("allowed_neighbour", ["numpy.load", "numpy.core.multiarray.fromfile", "builtins.eval"])
def test_only_listed_classes_are_built(tmp_path, allowed_neighbour):
    write_cifar10(tmp_path)
    module, _, name = allowed_neighbour.rpartition(".")
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(InputError, match=f"asks for '{allowed_neighbour}'"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a dictionary, got list"),
        ({b"labels": [0]}, "expected 'data' as a uint8 array"),
        ({b"data": pixels(2, 3072).astype(np.int64), b"labels": [0, 1]}, "expected 'data' as a uint8 array"),
        ({b"data": pixels(2, 3072)}, "expected 'labels' as a list of integers"),
        ({b"data": pixels(2, 3072), b"labels": [0, [1]]}, "expected 'labels' as a list of integers"),
        ({b"data": pixels(2, 3072), b"labels": [0, 10]}, "labels must be below 10"),
        ({b"data": pixels(2, 3072), b"labels": [0]}, "1 labels for 2 images"),
    ],
)
def test_wrong_cifar_contents(tmp_path, content, message):
    write_cifar10(tmp_path)
    write_pickle(tmp_path / "cifar-10-batches-py" / "test_batch", content)
    with pytest.raises(InputError, match=f"test_batch.*{message}"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_truncated_cifar(tmp_path, keep):
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="data_batch_2: cannot be read as a CIFAR pickle"):
        load("cifar10", root=tmp_path)


def test_human_labels(tmp_path):
    write_cifar10(tmp_path)
    counts = np.zeros((6, 10), np.uint8)
    counts[:, 3], counts[:, 5] = 30, 20
    expected = torch.zeros(6, 10)
    expected[:, 3], expected[:, 5] = 0.6, 0.4
    np.save(tmp_path / "cifar10h-counts.npy", counts)
    torch.testing.assert_close(load("cifar10", root=tmp_path).soft_labels, expected)
    np.savez(tmp_path / "cifar10h.npz", probs=(counts / 50).astype(np.float32)[:, ::-1], counts=counts)
    torch.testing.assert_close(load("cifar10", root=tmp_path).soft_labels, expected.flip(1))
    np.savez(tmp_path / "cifar10h.npz", probs=np.ones((5, 10)))
    with pytest.raises(InputError, match=r"cifar10h.npz: expected .* shape \(6, 10\)"):
        load("cifar10", root=tmp_path)
    np.savez(tmp_path / "cifar10h.npz", probs=np.full((6, 10), np.nan))
    with pytest.raises(InputError, match="must be finite"):
        load("cifar10", root=tmp_path)


def write_svhn(root, part, count, seed, **changes):
    content = {"X": pixels(32, 32, 3, count, seed=seed), "y": (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]}
    scipy.io.savemat(root / f"{part}_32x32.mat", content | changes, do_compression=True)
    return content["X"]


def test_svhn(tmp_path):
    train = write_svhn(tmp_path, "train", 12, 0)
    write_svhn(tmp_path, "test", 5, 1)
    found = load("svhn", root=tmp_path)
    images, labels = everything(found.train)
    np.testing.assert_array_equal(images.numpy(), train.transpose(3, 2, 0, 1))
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    np.testing.assert_allclose(found.mean, (train / 255).mean((0, 1, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.std, (train / 255).std((0, 1, 3)), rtol=1e-9)


def test_broken_mat_files(tmp_path):
    write_svhn(tmp_path, "train", 12, 0)
    path = tmp_path / "test_32x32.mat"
    write_svhn(tmp_path, "test", 5, 1)
    whole = path.read_bytes()
    for broken in (whole[:400], whole[:5000], b"not a mat file at all", b""):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"test_32x32.mat: cannot be read as a \.mat file"):
            load_images("svhn", root=tmp_path)
    header = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    path.write_bytes(header + b"\x00" * 384 + b"\x89HDF\r\n\x1a\n" + b"\x00" * 64)
    with pytest.raises(InputError, match=r"7\.3 \(HDF5\).*-v7"):
        load_images("svhn", root=tmp_path)
    scipy.io.savemat(path, {"X": pixels(32, 32, 3, 2)})
    with pytest.raises(InputError, match="no variable 'y'"):
        load_images("svhn", root=tmp_path)
    write_svhn(tmp_path, "test", 5, 1, X=pixels(5, 32, 32, 3))
    with pytest.raises(InputError, match=r"expected 'X'.*\(32, 32, 3, N\)"):
        load_images("svhn", root=tmp_path)


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, zipped):
    folder.mkdir(parents=True)
    arrays = {
        "train-images-idx3-ubyte": pixels(20, 28, 28),
        "train-labels-idx1-ubyte": (np.arange(20) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": pixels(6, 28, 28, seed=1),
        "t10k-labels-idx1-ubyte": np.arange(6, dtype=np.uint8),
    }
    for name, array in arrays.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


@pytest.mark.parametrize(
    ("name", "place", "zipped"),
    [("mnist", "mnist", True), ("mnist", "MNIST/raw", False), ("fashion-mnist", "fashion-mnist", True)],
)
def test_idx_files(tmp_path, name, place, zipped):
    arrays = write_idx(tmp_path / place, zipped)
    found = load(name, root=tmp_path, validation=0.25)
    images = torch.cat([everything(found.train)[0], everything(found.validation)[0]])
    np.testing.assert_array_equal(images[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
    assert found.validation.labels.tolist() == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(everything(found.test)[0][:, 0].numpy(), arrays["t10k-images-idx3-ubyte"])
    assert found.shape == (1, 28, 28)
    np.testing.assert_allclose(found.mean, (arrays["train-images-idx3-ubyte"][:15] / 255).mean(), rtol=1e-12)
    with pytest.raises(InputError, match="data set not found"):
        load("mnist" if name == "fashion-mnist" else "fashion-mnist", root=tmp_path)


def test_broken_idx_files(tmp_path):
    arrays = write_idx(tmp_path / "mnist", zipped=True)
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    raw = idx(arrays["t10k-images-idx3-ubyte"])
    for content, message in (
        (gzip.compress(raw)[:900], "cannot be read as an idx file"),
        (raw[:-1], "truncated or overlong idx file: 4704 bytes expected"),
        (raw + b"0", "truncated or overlong"),
        (raw[:10], "shorter than its header"),
        (idx(arrays["t10k-labels-idx1-ubyte"]) + b"0000", "magic number 2051, got 2049"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"t10k-images-idx3-ubyte.gz: .*{message}"):
            load_images("mnist", root=tmp_path)
    path.write_bytes(raw)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(5, dtype=np.uint8)))
    with pytest.raises(InputError, match="5 labels for 6 images"):
        load_images("mnist", root=tmp_path)


@pytest.mark.parametrize("layout", ["nhw", "nhwc", "nchw"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_npz_layouts(tmp_path, layout, dtype):
    channels = 1 if layout == "nhw" else 3
    images = pixels(10, channels, 6, 5)
    stored = images if dtype == np.uint8 else (images / 255).astype(dtype)
    stored = {"nhw": stored[:, 0], "nhwc": stored.transpose(0, 2, 3, 1), "nchw": stored}[layout]
    labels = np.arange(10) % 3
    np.savez_compressed(
        tmp_path / "mine.npz", train_images=stored[:8], train_labels=labels[:8], test_images=stored[8:],
        test_labels=labels[8:, None],
    )  # fmt: skip
    found = load(tmp_path / "mine.npz")
    got, numbers = everything(found.train)
    expected = images[:8] if dtype == np.uint8 else (images[:8] / 255).astype(np.float32)
    np.testing.assert_array_equal(got.numpy(), expected)
    assert numbers.tolist() == labels[:8].tolist()
    assert found.test.labels.tolist() == labels[8:].tolist()
    assert (found.name, found.classes, found.shape) == ("mine", 3, (channels, 6, 5))
    np.testing.assert_allclose(found.mean, (images[:8] / 255).mean((0, 2, 3)), atol=1e-7)
    np.testing.assert_allclose(found.std, (images[:8] / 255).std((0, 2, 3)), atol=1e-7)


GOOD = {
    "train_images": pixels(8, 4, 4, 3),
    "train_labels": np.arange(8) % 2,
    "test_images": pixels(4, 4, 4, 3, seed=1),
    "test_labels": np.arange(4) % 2,
}
FLOATS = np.linspace(0, 1, 8 * 48).reshape(8, 4, 4, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": None}, "no key 'train_images' .found: train_labels, test_images"),
        ({"train_labels": None}, "no key 'train_labels' beside"),
        ({"test_labels": None}, "no key 'test_labels' beside"),
        ({"train_images": np.where(FLOATS > 0.9, np.nan, FLOATS)}, "train_images: float images must be finite"),
        ({"train_images": np.where(FLOATS > 0.9, np.inf, FLOATS)}, "train_images: float images must be finite"),
        ({"train_images": FLOATS * 255}, r"in \[0, 1\], got values from 0 to 255"),
        ({"train_images": FLOATS - 0.5}, r"in \[0, 1\], got values from -0.5"),
        ({"train_images": pixels(8, 4, 4, 3).astype(np.int64)}, "must be uint8, or float"),
        ({"train_images": pixels(8, 4)}, r"must have shape .*got \(8, 4\)"),
        ({"train_images": pixels(8, 5, 4, 7)}, r"must have shape .*got \(8, 5, 4, 7\)"),
        ({"train_images": pixels(0, 4, 4, 3)}, "at least one image"),
        ({"train_labels": np.arange(8) / 2}, "train_labels: labels must be integers, got float64"),
        ({"train_labels": np.arange(8) - 1}, "labels must not be negative, got -1"),
        (
            {"train_labels": np.arange(8, dtype=np.uint64) % 2 + 2**63},
            "from 0, got 9223372036854775809",
        ),
        (
            {"test_labels": np.full(4, 2**64 - 1, np.uint64)},
            "test_labels: labels must be below 2, .*551615",
        ),
        ({"train_labels": np.arange(7)}, "7 labels for 8 images"),
        ({"train_labels": np.arange(16).reshape(8, 2)}, r"labels must have shape \(N,\)"),
        ({"train_labels": np.arange(8) % 2 + 1}, "no image of class 0"),
        ({"train_labels": np.arange(8) % 2 * 2}, "no image of class 1"),
        ({"test_labels": np.arange(4)}, "test_labels: labels must be below 2, the number of classes, got 3"),
        ({"names": np.array(["only"])}, "train_labels: labels must be below 1"),
        ({"names": np.array(2)}, "names must be a list of texts"),
        ({"test_images": pixels(4, 5, 5, 3)}, r"test images have shape \(3, 5, 5\)"),
        ({"train_labels": np.array([object()] * 8)}, "cannot be read as an .npz file"),
    ],
)
def test_bad_npz(tmp_path, changes, message):
    content = {key: value for key, value in (GOOD | changes).items() if value is not None}
    np.savez(tmp_path / "bad.npz", **content)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path / "bad.npz")
    assert "bad.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_npz(tmp_path):
    path = tmp_path / "cut.npz"
    np.savez_compressed(path, **GOOD)
    whole = path.read_bytes()
    for content in (whole[:-30], whole[: len(whole) // 2], b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"cut.npz: cannot be read as an \.npz file"):
            load(path)
        with pytest.raises(InputError, match=r"cut.npz: cannot be read as an \.npz file"):
            load_images(path)
    path.write_bytes(whole[:200] + bytes(200) + whole[400:])  # inside train_images
    with pytest.raises(InputError, match=r"cut.npz: cannot be read as an \.npz file"):
        load(path)
    np.testing.assert_array_equal(everything(load_images(path))[0].permute(0, 2, 3, 1).numpy(), GOOD["test_images"])


def write_image(path, seed, size=(10, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = pixels(size[1], size[0], 3, seed=seed)
    Image.fromarray(array).save(path)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_image_folder_with_every_split(tmp_path):
    written = {}
    for part, count in (("train", 3), ("val", 1), ("test", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                file = tmp_path / "pets" / part / name / f"{i}.{('png', 'JPEG', 'webp')[i]}"
                written[str(file)] = write_image(file, len(written))
    (tmp_path / "pets" / "train" / "cat" / "notes.txt").write_text("not an image")
    found = load("pets", root=tmp_path)
    for split, count in ((found.train, 6), (found.validation, 2), (found.test, 4)):
        images, labels = everything(split)
        assert len(split) == count
        assert list(split.files) == sorted(split.files)
        assert labels.tolist() == [0] * (count // 2) + [1] * (count // 2)
        for file, image in zip(split.files, images):
            np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), written[file])
    assert (found.name, found.class_names, found.shape) == ("pets", ("cat", "dog"), (3, 10, 10))
    pixel = np.stack([written[file] for file in found.train.files]) / 255
    np.testing.assert_allclose(found.mean, pixel.mean((0, 1, 2)), rtol=1e-12)
    with pytest.raises(InputError, match="own validation split of 2 images"):
        load("pets", root=tmp_path, validation=1)


def test_tiny_imagenet(tmp_path):
    base = tmp_path / "tiny-imagenet-200"
    for name in ("n02", "n01"):
        for i in range(2):
            write_image(base / "train" / name / "images" / f"{name}_{i}.JPEG", i, (64, 64))
        (base / "train" / name / f"{name}_boxes.txt").write_text("x\t0\t0\t1\t1\n")
    lines = []
    for i, name in enumerate(("n02", "n01", "n02")):
        write_image(base / "val" / "images" / f"val_{i}.JPEG", 10 + i, (64, 64))
        lines.append(f"val_{i}.JPEG\t{name}\t0\t1\t2\t3\n")
    (base / "val" / "val_annotations.txt").write_text("".join(reversed(lines)))
    write_image(base / "test" / "images" / "test_0.JPEG", 20, (64, 64))
    found = load("tiny-imagenet", root=tmp_path)
    assert found.class_names == ("n01", "n02")
    assert found.train.labels.tolist() == [0, 0, 1, 1]
    assert found.test.labels.tolist() == [1, 0, 1]
    assert [os.path.basename(file) for file in found.test.files] == ["val_0.JPEG", "val_1.JPEG", "val_2.JPEG"]
    assert (found.shape, found.validation) == ((3, 64, 64), None)
    assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert len(load_images("tiny-imagenet", root=tmp_path)) == 3
    with (base / "val" / "val_annotations.txt").open("a") as file:
        file.write("val_9.JPEG\tn01\t0\t0\t0\t0\n")
    with pytest.raises(InputError, match=r"line 4: no image 'val_9\.JPEG'"):
        load("tiny-imagenet", root=tmp_path)
    (base / "val" / "val_annotations.txt").write_text("val_1.JPEG\tn07\n")
    with pytest.raises(InputError, match="line 1: class 'n07' is not in the training split"):
        load("tiny-imagenet", root=tmp_path)


def test_imagenet_is_resized_to_256_and_cut_to_224(tmp_path):
    base = tmp_path / "imagenet"
    for part in ("train", "val"):
        for i, size in enumerate(((300, 260), (240, 500))):
            write_image(base / part / "n01" / f"{i}.jpg", i, size)
    write_image(base / "test" / "flat.jpg", 9)
    found = load("imagenet", root=tmp_path)
    assert found.shape == (3, 224, 224)
    assert len(found.test) == 2
    for file, image in zip(found.test.files, everything(found.test)[0]):
        with Image.open(file) as stored:
            expected = vision.center_crop(vision.resize(stored, 256), 224)
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), np.asarray(expected))


def test_array_resizing_agrees_with_pillow(tmp_path):
    images = pixels(3, 40, 30, 3)
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=[0, 1, 0], test_images=images, test_labels=[0, 1, 0])
    found = load(tmp_path / "a.npz", size=16)
    for image, stored in zip(everything(found.train)[0], images):
        expected = vision.center_crop(vision.resize(Image.fromarray(stored), 16), 16)
        difference = image.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected).astype(int)
        assert np.abs(difference).max() <= 1
    assert found.shape == (3, 16, 16)


def test_grey_palette_and_transparent_images_become_rgb(tmp_path):
    grey = pixels(6, 6)
    folder = tmp_path / "mixed"
    folder.mkdir()
    Image.fromarray(grey).save(folder / "a.png")
    rgba = np.dstack([grey, grey, grey, pixels(6, 6, seed=3)])
    Image.fromarray(rgba, "RGBA").save(folder / "b.png")
    palette = Image.fromarray(grey).convert("P")
    palette.save(folder / "c.png", transparency=bytes(range(256)))
    images, labels = everything(load_images(folder))
    assert labels.shape == (0,)
    for image in images:
        np.testing.assert_array_equal(image.numpy(), np.stack([grey] * 3))
    Image.fromarray(grey.astype(np.uint16) * 256).save(folder / "d.png")
    with pytest.raises(InputError, match=r"d\.png: expected an image of 8 bits"):
        everything(load_images(folder))


def test_bad_folders(tmp_path):
    base = tmp_path / "data"
    base.mkdir()
    with pytest.raises(InputError, match="data: expected one sub-folder a class"):
        load(base)
    with pytest.raises(InputError, match="data: expected images"):
        load_images(base)
    write_image(base / "train" / "a" / "0.png", 0)
    (base / "train" / "b").mkdir()
    with pytest.raises(InputError, match="b: class folder without images"):
        load(base)
    write_image(base / "train" / "b" / "0.png", 1)
    write_image(base / "test" / "c" / "0.png", 2)
    with pytest.raises(InputError, match="class 'c' is not in the training split"):
        load(base)
    (base / "test" / "c").rename(base / "test" / "b")
    write_image(base / "test" / "a" / "0.png", 3)
    broken = base / "test" / "b" / "0.png"
    whole = broken.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"text", whole[:60]):
        broken.write_bytes(content)
        with pytest.raises(InputError, match=r"b/0\.png: cannot be decoded as an image"):
            everything(load(base).test)
    (base / "train").rename(base / "val")
    with pytest.raises(InputError, match="expected a folder 'train'"):
        load(base)


def test_array_split_checks_what_it_is_given():
    with pytest.raises(InputError, match=r"must have shape \(N, C, H, W\)"):
        ArraySplit(torch.zeros(3, 4, 4))
    with pytest.raises(InputError, match="uint8 or float"):
        ArraySplit(torch.zeros(3, 1, 4, 4, dtype=torch.int64))
    with pytest.raises(InputError, match="labels must be 3 integers"):
        ArraySplit(torch.zeros(3, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InputError, match="labels must be 3 integers"):
        ArraySplit(torch.zeros(3, 1, 4, 4), torch.zeros(3))


def test_a_class_that_is_not_judged_is_told(tmp_path):
    for place in ("train/a", "train/b", "train/c", "val/b"):
        write_image(tmp_path / place / "0.png", 0)
    with pytest.warns(PeerbayesWarning, match="val: has no folder of class 'a' and 1 more$"):
        found = load(tmp_path)
    assert found.test.labels.tolist() == [1]


def test_every_usual_kind_of_file_is_read(tmp_path):
    expected = []
    for number, kind in enumerate(("png", "bmp", "tif", "tiff", "ppm", "webp", "jpg", "gif")):
        expected.append(write_image(tmp_path / "a" / f"{number}.{kind}", number))
    found = load_images(tmp_path)
    images, _ = found.batch(torch.arange(len(found)), torch.device("cpu"))
    assert torch.equal(images, torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2))


@pytest.mark.parametrize("kind", ["eps", "pdf", "ico", "pcx"])
def test_only_the_documented_formats_are_decoded_whatever_the_name_says(tmp_path, kind):
    picture = Image.fromarray(pixels(10, 10, 3))
    picture.save(tmp_path / "stored", format=kind)
    (tmp_path / "stored").rename(tmp_path / "picture.png")
    with pytest.raises(InputError, match=r"picture\.png: cannot be decoded as an image .expected JPEG, PNG, "):
        load_images(tmp_path)


def test_postscript_in_an_image_is_not_run(tmp_path, monkeypatch):
    # Pillow looks for Ghostscript as "gs" on the PATH.
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tools / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    script = (
        "import sys\nfrom peerbayes.data import load_images\nfrom peerbayes.errors import InputError\n"
        "try:\n    load_images(sys.argv[1])\nexcept InputError as error:\n    print(error)\n"
    )
    (tmp_path / "images").mkdir()
    Image.fromarray(pixels(10, 10, 3)).save(tmp_path / "images" / "picture.eps")
    (tmp_path / "images" / "picture.eps").rename(tmp_path / "images" / "picture.png")
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "images")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert "picture.png: cannot be decoded as an image" in told
    assert not (tmp_path / "ran").exists()


def test_a_class_of_one_image_is_learnt_and_not_tested(tmp_path):
    for number in range(5):
        write_image(tmp_path / f"c{number}" / "0.png", number)
    with pytest.raises(InputError, match="expected a class with two images at least, to hold out a test split"):
        load(tmp_path)
    for number in range(20):
        write_image(tmp_path / "c3" / f"{number}.png", number)
    found = load(tmp_path)
    assert set(found.train.labels.tolist()) == {0, 1, 2, 3, 4}
    assert set(found.test.labels.tolist()) == {3}
    assert len(found.train) + len(found.test) == 24


def test_grey_and_coloured_images_are_outside_of_each_other(tmp_path):
    coloured = write_image(tmp_path / "photo" / "0.png", 0, (8, 8))
    found = load_outside(tmp_path / "photo", load("digits"))
    grey, _ = found.batch(torch.arange(1), torch.device("cpu"))
    expected = np.array(Image.fromarray(coloured).convert("L"))
    assert (grey[0, 0].int() - torch.from_numpy(expected).int()).abs().max() <= 1
    for name in ("a", "b"):
        for number in range(4):
            write_image(tmp_path / "set" / name / f"{number}.png", number, (8, 8))
    back, _ = load_outside("digits", load(tmp_path / "set")).batch(torch.arange(3), torch.device("cpu"))
    assert torch.equal(back, load("digits").test.images[:3].expand(3, 3, 8, 8))


def test_what_was_learnt_is_not_outside(recwarn):
    learnt = load("digits")
    load_outside("photographs", learnt)
    assert not recwarn.list
    with pytest.warns(PeerbayesWarning, match="digits: is the data that was learnt"):
        load_outside("digits", learnt)


def test_what_a_decoder_says_keeps_its_letters_whatever_the_file_is_called():
    with pytest.raises(InputError, match=r"^a: cannot be decoded as an image \(image file is truncated"):
        decode_rgb(io.BytesIO(b"P6 10 10 255 too short"), "a")
