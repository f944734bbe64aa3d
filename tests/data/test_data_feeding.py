"""Feeds hand out the batches that the order of the epoch says, bit by bit, wherever the images are."""

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from peerbayes.data import ArraySplit, FolderSplit, feed, load, load_images, order
from peerbayes.data import loader as module
from peerbayes.data.datasets import formats
from peerbayes.data.splits import JoinedSplit, held_out
from peerbayes.errors import InputError
from peerbayes.math.noise import Address

CPU = torch.device("cpu")
SEED = 11
linux = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def array_split(count=23, dtype=torch.uint8, labelled=True):
    images = torch.from_numpy(pixels(count, 3, 5, 4))
    images = images if dtype == torch.uint8 else images.to(dtype) / 255
    return ArraySplit(images, torch.arange(count) * 7 % 5 if labelled else None)


def folder_split(folder, count=11):
    for i, image in enumerate(pixels(count, 6, 6, 3)):
        Image.fromarray(image).save(folder / f"{i}.png")
    return FolderSplit([str(folder / f"{i}.png") for i in range(count)], torch.arange(count) % 3, 6)


def mapped_split(folder, count=23):
    """A split of some of the images of a mapped file, whose channels come last."""
    split = array_split(count + 4)
    stored = split.images.permute(0, 2, 3, 1).numpy()
    np.savez(folder / "mapped.npz", test_images=stored, test_labels=split.labels.numpy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "MAPPED_BYTES", 1)
        found = load_images(folder / "mapped.npz")
    kept = order(count + 4, Address(5))[:count]
    assert found.rows is not None
    return found.select(kept)


def make(kind, folder):
    if kind == "folder":
        return folder_split(folder)
    if kind == "mapped":
        return mapped_split(folder)
    return array_split(dtype=torch.float32 if kind == "float" else torch.uint8, labelled=kind != "unlabelled")


def reference(split, batch_size, step, seed=SEED):
    """The batch of a step, written as the training loop has always fetched it."""
    epoch, place = divmod(step, len(split) // batch_size)
    index = order(len(split), Address(seed, "data", "order", epoch), CPU)
    return split.batch(index[place * batch_size + torch.arange(batch_size)], CPU)


def fetch(source, step, as_tensor=False):
    source.prepare(step)
    place = step % source.steps_per_epoch
    images, labels = source.batch(torch.tensor(place) if as_tensor else place)
    return images.clone(), labels.clone()


def same(found, expected):
    return all(a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(found, expected))


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("peerbayes-feed")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    for thread in feed_threads():
        thread.join(60)
    assert not feed_threads()


CASES = [
    (kind, placement)
    for kind in ("array", "float", "unlabelled", "mapped", "folder")
    for placement in ("device", "stream")
    if (kind, placement) != ("folder", "device")
]


@pytest.mark.parametrize(("kind", "placement"), CASES)
def test_every_batch_is_the_one_of_the_order(tmp_path, kind, placement):
    split = make(kind, tmp_path)
    source = feed(split, 4, SEED, CPU, placement=placement)
    assert source.placement == placement
    assert (source.batch_size, source.steps_per_epoch) == (4, len(split) // 4)
    for step in range(3 * source.steps_per_epoch + 1):
        assert same(fetch(source, step, as_tensor=step % 2 == 1), reference(split, 4, step)), step
    source.close()


@pytest.mark.parametrize(("kind", "placement"), CASES)
def test_steps_may_jump_and_repeat(tmp_path, kind, placement):
    split = make(kind, tmp_path)
    source = feed(split, 3, SEED, CPU, placement=placement)
    for step in (9, 9, 10, 12, 13, 0, 1, 1, 500, 501, 500, 2):
        assert same(fetch(source, step), reference(split, 3, step)), step
    source.close()


@pytest.mark.parametrize("placement", ["device", "stream"])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_parts_make_up_the_whole_batch(placement, count):
    split = array_split()
    sources = [feed(split, 6, SEED, CPU, placement=placement, part=(rank, count)) for rank in range(count)]
    assert {source.batch_size for source in sources} == {6 // count}
    assert {source.steps_per_epoch for source in sources} == {3}
    for step in range(7):
        images, labels = zip(*(fetch(source, step) for source in sources))
        assert same((torch.cat(images), torch.cat(labels)), reference(split, 6, step))
    for source in sources:
        source.close()


@pytest.mark.parametrize("placement", ["device", "stream"])
def test_a_batch_is_at_most_all_images(placement):
    split = array_split(5)
    source = feed(split, 64, SEED, CPU, placement=placement)
    assert (source.batch_size, source.steps_per_epoch) == (5, 1)
    assert same(fetch(source, 2), reference(split, 5, 2))
    source.close()


def test_resident_batches_read_no_value_and_the_same_memory_every_time():
    # A tensor on the meta device has no values: any read would raise.
    source = feed(array_split().to("meta"), 4, SEED, torch.device("meta"))
    source.prepare(0)
    images, labels = source.batch(torch.zeros((), dtype=torch.int64, device="meta"))
    assert (images.shape, labels.shape) == ((4, 3, 5, 4), (4,))

    split = array_split()
    source = feed(split, 4, SEED, CPU)
    source.prepare(0)
    index = source._index
    source.prepare(8)
    assert source._index is index
    assert torch.equal(index, order(23, Address(SEED, "data", "order", 1)))
    assert source._near is split  # nothing to copy


def test_streamed_batches_lie_in_the_same_memory_every_time():
    source = feed(array_split(), 4, SEED, CPU, placement="stream")
    source.prepare(0)
    first = source.batch(0)
    source.prepare(3)
    assert all(a is b for a, b in zip(first, source.batch(3)))
    assert same(first, reference(array_split(), 4, 3))
    source.close()


class Watched:
    """A split that notes which images it is asked for and fails at one of them."""

    def __init__(self, count, bad=None, error=None):
        self.inner = array_split(count)
        self.labels = self.inner.labels
        self.bad, self.error = bad, error
        self.asked = []
        self.changed = threading.Condition()

    def __len__(self):
        return len(self.inner)

    def batch(self, index, device):
        if len(index):
            with self.changed:
                self.asked.append(index.tolist())
                self.changed.notify_all()
        if self.bad in index.tolist():
            raise self.error
        return self.inner.batch(index, device)


def test_batches_are_gathered_ahead_across_the_border_of_an_epoch():
    split = Watched(6)
    source = feed(split, 3, SEED, CPU)
    assert source.placement == "stream"
    source.prepare(0)
    with split.changed:
        assert split.changed.wait_for(lambda: len(split.asked) == 4, 60)
    source.close()
    orders = [order(6, Address(SEED, "data", "order", epoch)).tolist() for epoch in (0, 1)]
    assert split.asked == [part for whole in orders for part in (whole[:3], whole[3:])]


def test_an_error_comes_unchanged_at_its_own_step_and_comes_again():
    first = order(12, Address(SEED, "data", "order", 0))
    error = RuntimeError("broken")
    split = Watched(12, bad=int(first[7]), error=error)
    source = feed(split, 3, SEED, CPU)
    for step in (0, 1):
        assert same(fetch(source, step), reference(split.inner, 3, step))
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            source.prepare(2)
        assert caught.value is error
    for step in (3, 1):
        assert same(fetch(source, step), reference(split.inner, 3, step))
    source.close()


def test_a_damaged_image_is_named(tmp_path):
    split = folder_split(tmp_path)
    epoch = order(11, Address(SEED, "data", "order", 0))
    bad = tmp_path / f"{int(epoch[5])}.png"
    bad.write_bytes(bad.read_bytes()[:40])
    source = feed(split, 3, SEED, CPU)
    assert same(fetch(source, 0), reference(split, 3, 0))
    with pytest.raises(InputError, match=rf"{bad.name}: cannot be decoded as an image"):
        source.prepare(1)
    assert same(fetch(source, 2), reference(split, 3, 2))
    source.close()


def test_closing_ends_the_thread_and_so_does_forgetting():
    source = feed(array_split(), 4, SEED, CPU, placement="stream")
    source.prepare(0)
    assert len(feed_threads()) == 1
    source.close()
    assert not feed_threads()
    source.close()

    forgotten = feed(array_split(), 4, SEED, CPU, placement="stream")
    forgotten.prepare(0)
    (thread,) = feed_threads()
    del forgotten
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on_with_a_thread_of_its_own(tmp_path):
    split = folder_split(tmp_path)
    source = feed(split, 3, SEED, CPU)
    source.prepare(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads, which is the point here
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            good = all(same(fetch(source, step), reference(split, 3, step)) for step in range(5))
            source.close()
            code = 0 if good and not feed_threads() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(fetch(source, 1), reference(split, 3, 1))
    source.close()


def test_where_images_are_kept_by_default(tmp_path):
    expected = {"array": "device", "float": "device", "mapped": "stream", "folder": "stream"}
    for kind, placement in expected.items():
        source = feed(make(kind, tmp_path), 4, SEED, CPU)
        assert source.placement == placement
        source.close()


def test_a_gpu_takes_an_array_of_up_to_half_of_its_free_memory(tmp_path, monkeypatch):
    device = torch.device("cuda", 0)
    split, mapped = array_split(23), mapped_split(tmp_path)
    size = 23 * 3 * 5 * 4
    for free, fits in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10 * free))
        for candidate in (split, mapped):
            assert module._fits(candidate, device, forced=False) == fits
            assert module._fits(candidate, device, forced=True)
    large = ArraySplit(torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(3 << 28, 1, 2, 2))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2560 << 20, 4 << 30))
    assert not module._fits(large, device, forced=False)
    with pytest.raises(InputError, match=r"take 3\.00 GiB, and cuda:0 has 2\.50 GiB free"):
        module._fits(large, device, forced=True)


def test_feeds_of_one_split_share_one_copy_while_they_live(tmp_path):
    split = mapped_split(tmp_path)
    sources = [feed(split, 4, seed, CPU, placement="device") for seed in (1, 2)]
    copy = weakref.ref(sources[0]._near)
    assert sources[1]._near is copy()
    assert copy().rows is None
    for seed, source in zip((1, 2), sources):
        assert same(fetch(source, 3), reference(split, 4, 3, seed))
    # A copy that is there is used, however little memory is left.
    assert feed(split, 4, 3, CPU)._near is copy()
    del sources, source
    gc.collect()
    assert copy() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "part": (0, 4)}, "batch_size is 6: expected a multiple of 4, the number of processes"),
        ({"batch_size": 99, "part": (0, 2)}, r"batch_size is 11 \(all images, instead of 99\): expected a multiple"),
        ({"part": (2, 2)}, r"part is \(2, 2\): expected \(rank, count\)"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0 for 11 images"),
        ({"placement": "devise"}, "unknown placement 'devise'; did you mean 'device'"),
        ({"placement": "device"}, "the files of a FolderSplit are decoded on the host"),
    ],
)
def test_what_cannot_be_fed(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        feed(folder_split(tmp_path), **{"batch_size": 4, "seed": SEED, "device": CPU} | options)


# ---- mapped arrays ---------------------------------------------------------------------------------------------------


def everything(split):
    return split.batch(torch.arange(len(split)), CPU)


def load_mapped(path, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(formats, "MAPPED_BYTES", 1)
        return load(path, **options)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (3, 5, 4)])
@pytest.mark.parametrize("options", [{}, {"validation": 6}, {"size": 3}])
def test_mapped_images_equal_loaded_ones(tmp_path, monkeypatch, dtype, shape, options):
    images = pixels(31, *shape)
    images = images if dtype == np.uint8 else images.astype(dtype) / 255
    path = tmp_path / "a.npz"
    # Classes one after another, so that the held-out images are taken from everywhere.
    np.savez(path, names=np.array(["x", "y"]), train_images=images, train_labels=np.arange(31) // 16)
    loaded, mapped = load(path, **options), load_mapped(path, monkeypatch, **options)
    for part in ("train", "validation", "test"):
        ours, theirs = getattr(mapped, part), getattr(loaded, part)
        if theirs is None:
            assert ours is None
            continue
        assert theirs.rows is None
        assert (ours.rows is None) == ("size" in options)  # resized images are in memory
        assert torch.equal(ours.labels, theirs.labels)
        assert same(everything(ours), everything(theirs))
        assert same(ours.batch(torch.tensor([3, 0, 3]), CPU), theirs.batch(torch.tensor([3, 0, 3]), CPU))
        assert same(everything(ours.to(CPU)), everything(theirs))
        assert ours.to(CPU).rows is None
    assert (mapped.mean, mapped.std) == (loaded.mean, loaded.std)


@pytest.mark.parametrize("why", ["compressed", "float64", "by column", "small"])
def test_what_cannot_be_mapped_is_loaded(tmp_path, monkeypatch, why):
    images = pixels(20, 4, 4)
    content = {"float64": images / 255, "by column": np.asfortranarray(images)}.get(why, images)
    save = np.savez_compressed if why == "compressed" else np.savez
    save(tmp_path / "a.npz", train_images=content, train_labels=np.arange(20) % 2)
    monkeypatch.setattr(formats, "MAPPED_BYTES", 20 * 16 + 1000 if why == "small" else 1)
    found = load(tmp_path / "a.npz")
    assert found.train.rows is None
    expected = torch.from_numpy((content if why == "float64" else images).astype(found.train.images.numpy().dtype))
    kept, _ = held_out(torch.arange(20) % 2, 4, "test")
    assert torch.equal(everything(found.train)[0][:, 0], expected[kept])


def test_mapped_float_images_are_checked(tmp_path, monkeypatch):
    images = np.zeros((2100, 2, 2), np.float32)
    for value, message in ((1.5, "values from 0 to 1.5"), (np.nan, "must be finite")):
        images[2099, 1, 1] = value
        np.savez(tmp_path / "a.npz", train_images=images, train_labels=np.arange(2100) % 2)
        with pytest.raises(InputError, match=message):
            load_mapped(tmp_path / "a.npz", monkeypatch)


def test_damaged_archives_are_told_before_anything_is_mapped(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez(path, train_images=pixels(20, 4, 4), train_labels=np.arange(20) % 2)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        member, labels = archive.read("train_images.npy"), archive.read("train_labels.npy")
    lying = member.replace(b"(20, 4, 4)", b"(90, 4, 4)")
    assert lying != member
    with zipfile.ZipFile(tmp_path / "lying.npz", "w") as archive:
        archive.writestr("train_images.npy", lying)
        archive.writestr("train_labels.npy", labels)
    path.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "header.npz").write_bytes(whole.replace(b"\x93NUMPY", b"\x93NUMBY", 1))
    for name in ("a.npz", "lying.npz", "header.npz"):
        with pytest.raises(InputError, match=rf"{name}: cannot be read as an \.npz file"):
            load_mapped(tmp_path / name, monkeypatch)


MAPPED = """
import gc, sys, numpy as np, torch
from peerbayes.data.datasets import formats
from peerbayes.data import load_images

def own_memory():
    with open("/proc/self/status") as status:  # bytes of memory that belong to no file
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

path, size = sys.argv[1], int(sys.argv[2])
formats.MAPPED_BYTES = size
before = own_memory()
mapped = load_images(path)
half = mapped.select(torch.arange(0, len(mapped), 2))
assert int(half.batch(torch.arange(9), torch.device("cpu"))[0].sum()) == 9 << 12
assert int(half.images.sum()) == size  # every page was looked at
seen = own_memory() - before
loaded = mapped.to(torch.device("cpu"))
assert len(loaded) == len(mapped)
print(seen, own_memory() - before)
"""


@linux
def test_mapped_images_stay_in_their_file(tmp_path):
    size = 96 << 20
    np.savez(tmp_path / "a.npz", test_images=np.ones((size >> 12, 64, 64), np.uint8))
    # In a process of its own: what earlier tests have freed would hide what this one takes.
    words = [sys.executable, "-c", MAPPED, str(tmp_path / "a.npz"), str(size)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen, loaded = map(int, done.stdout.split())
    assert seen < size // 2 < loaded


@linux
def test_a_file_larger_than_memory_can_be_mapped(tmp_path):
    """A file of holes: its header and its directory are real, and the zeros between take no room on the disk."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = 2 * memory // (1 << 20)
    with zipfile.ZipFile(tmp_path / "holes.npz", "w") as archive:
        with archive.open("test_images.npy", "w", force_zip64=True) as file:
            about = {"descr": "|u1", "fortran_order": False, "shape": (count, 1024, 1024)}
            np.lib.format.write_array_header_1_0(file, about)
            start = archive.fp.tell()
        member = archive.getinfo("test_images.npy")
        member.file_size = member.compress_size = member.file_size + (count << 20)
        archive.fp.seek(start + (count << 20))
        archive.start_dir = archive.fp.tell()
    with (tmp_path / "holes.npz").open("r+b") as file:
        file.seek(start + (count - 3 << 20))
        file.write(bytes([7] * 5))
    split = load_images(tmp_path / "holes.npz")
    assert len(split) == count
    images, _ = split.batch(torch.tensor([count - 3, 0]), CPU)
    assert images.flatten(1).sum(1).tolist() == [35, 0]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "placement"), CASES)
def test_gpu_batches_are_the_same(tmp_path, kind, placement):
    split, device = make(kind, tmp_path), torch.device("cuda")
    source = feed(split, 4, SEED, device, placement=placement)
    for step in (*range(2 * source.steps_per_epoch + 1), 50, 50, 3):
        images, labels = fetch(source, step)
        assert images.is_cuda
        assert labels.is_cuda
        assert same((images.cpu(), labels.cpu()), reference(split, 4, step)), step
    source.close()


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["device", "stream"])
def test_gpu_batches_inside_a_captured_graph(placement):
    split, device = array_split(), torch.device("cuda")
    source = feed(split, 4, SEED, device, placement=placement)
    place = torch.zeros((), dtype=torch.int64, device=device)
    source.prepare(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        source.batch(place)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, labels = (tensor.clone() for tensor in source.batch(place))
    for step in range(2 * source.steps_per_epoch + 1):
        source.prepare(step)
        place.fill_(step % source.steps_per_epoch)
        graph.replay()
        assert same((images.cpu(), labels.cpu()), reference(split, 4, step)), step
    source.close()


@pytest.mark.gpu
def test_gpu_the_thread_does_not_break_a_capture():
    captured = threading.Event()

    class Slow(Watched):
        def batch(self, index, device):
            if len(self.asked) > 1:
                captured.wait(60)
            return super().batch(index, device)

    split, device = Slow(12), torch.device("cuda")
    source = feed(split, 3, SEED, device)
    source.prepare(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images = source.batch(0)[0].clone()
        captured.set()
        with split.changed:
            assert split.changed.wait_for(lambda: len(split.asked) == 4, 60)
    for step in range(6):
        source.prepare(step)
        graph.replay()
        assert torch.equal(images.cpu(), reference(split.inner, 3, step)[0])
    source.close()


@pytest.mark.gpu
def test_gpu_a_slot_is_not_overwritten_before_its_copy_is_done():
    device = torch.device("cuda")
    split = ArraySplit(torch.from_numpy(pixels(512, 3, 64, 64)), torch.arange(512))
    source = feed(split, 64, SEED, device, placement="stream")
    found = []
    work = torch.randn(4096, 4096, device=device)
    for step in range(20):
        for _ in range(20):  # keeps the GPU far behind the host
            work = torch.tanh(work @ work)
        found.append(fetch(source, step))
    for step, batch in enumerate(found):
        assert same([tensor.cpu() for tensor in batch], reference(split, 64, step)), step
    source.close()


@pytest.mark.gpu
def test_gpu_feeds_share_one_copy():
    device = torch.device("cuda")
    split = ArraySplit(torch.zeros(1 << 14, 1, 32, 32, dtype=torch.uint8), torch.zeros(1 << 14, dtype=torch.int64))
    before = torch.cuda.memory_allocated()
    sources = [feed(split, 4, seed, device) for seed in range(4)]
    assert {source.placement for source in sources} == {"device"}
    assert torch.cuda.memory_allocated() - before < 2 * (1 << 24)
    del sources
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_joined_split_hands_out_the_items_of_its_parts():
    one, two = array_split(), array_split(9)
    joined = JoinedSplit((one, two))
    images, labels = torch.cat([one.images, two.images]), torch.cat([one.labels, two.labels])
    assert len(joined) == 32
    assert torch.equal(joined.labels, labels)
    for index in (torch.tensor([30, 2, 22, 23, 2, 0]), torch.tensor([31]), torch.arange(32)):
        found = joined.batch(index, CPU)
        assert torch.equal(found[0], images[index])
        assert torch.equal(found[1], labels[index])
