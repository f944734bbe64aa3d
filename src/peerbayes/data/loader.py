"""Training batches in the order of each epoch: gathered on the device, or streamed to it from the host.

The order of epoch ``e`` is ``order(N, Address(seed, owner, "order", e))``, and the batch at place ``p`` of it is
``order[p * B : (p + 1) * B]``. Both placements hand out exactly that, so they differ in speed and memory only.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from peerbayes.choices import Placement
from peerbayes.data.splits import ArraySplit, FolderSplit, Split, order
from peerbayes.data.transforms.augment import augment
from peerbayes.errors import InputError, nearest
from peerbayes.math.noise import Address

_AHEAD = 3  # batches that are gathered ahead of the one in use
_BEHIND = 2  # batches whose copy to the device may still be under way
_CPU = torch.device("cpu")
_CROP = "resized_crop"

# The images on other devices, for as long as somebody feeds from them.
_copies: WeakKeyDictionary[ArraySplit, WeakValueDictionary[torch.device, ArraySplit]] = WeakKeyDictionary()


class Feed(ABC):
    """The batches of a run, for one process; made by :func:`feed`.

    Attributes:
        placement: where the images are kept: on the ``device``, or on the host, from where they ``stream``.
        batch_size: images in a batch of this process.
        owner: whose order it is.
        steps_per_epoch: batches in an epoch; a last batch that is smaller is left out.
        augmented: the augmentations that batches come with, because they are made as files are decoded.

    Example:
        >>> import torch
        >>> from peerbayes.data import ArraySplit
        >>> split = ArraySplit(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1, 0]))
        >>> from peerbayes.data import Feed, feed
        >>> isinstance(feed(split, batch_size=2, seed=0, device=torch.device("cpu")), Feed)
        True
    """

    placement: ClassVar[Literal["device", "stream"]]
    augmented: tuple[str, ...] = ()

    def __init__(
        self, split: Split, batch_size: int, source: Address, device: torch.device, part: tuple[int, int]
    ) -> None:
        rank, count = part
        self.batch_size = batch_size // count
        self.steps_per_epoch = len(split) // batch_size
        self._whole = batch_size
        self._begin = rank * self.batch_size
        self._split = split
        self.owner = source.owner
        self._source = source
        self._device = device

    def _order(self, epoch: int, device: torch.device) -> Tensor:
        return order(len(self._split), self._source.at(epoch), device)

    @abstractmethod
    def prepare(self, step: int) -> None:
        """Do the host's work before step number ``step`` of the run; twice for one step is as good as once.

        Steps may jump, as they do when a run is resumed. What a batch can't be made for is raised here.
        """

    @abstractmethod
    def batch(self, place: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return images (b, C, H, W) as stored and labels int64 (b,) of the step that was prepared, on the device.

        Nothing waits for the host and the same memory is read every time, so it may be captured in a CUDA graph.

        Args:
            place: ``step % steps_per_epoch``; a number, or an int64 scalar tensor on the device.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop what runs in the background; twice is as good as once."""


class Resident(Feed):
    """Gathers the batches on the device, where all the images are."""

    placement = "device"

    def __init__(
        self, split: ArraySplit, batch_size: int, source: Address, device: torch.device, part: tuple[int, int]
    ):
        super().__init__(split, batch_size, source, device, part)
        self._near = _on_device(split, device)
        self._epoch = -1
        self._index = torch.empty(len(split), dtype=torch.int64, device=device)
        self._rows = torch.arange(self._begin, self._begin + self.batch_size, device=device)

    def prepare(self, step: int) -> None:
        """See :meth:`Feed.prepare`: puts the epoch's order in its place."""
        epoch = step // self.steps_per_epoch
        if epoch != self._epoch:
            self._index.copy_(self._order(epoch, self._device))
            self._epoch = epoch

    def batch(self, place: int | Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Feed.batch`."""
        return self._near.batch(self._index[place * self._whole + self._rows], self._device)

    def close(self) -> None:
        """See :meth:`Feed.close`: nothing runs."""


@dataclass(frozen=True, eq=False)
class _Slot:
    """Memory of the host for one batch, and when its last copy to the device was done."""

    images: Tensor
    labels: Tensor
    copied: torch.cuda.Event | None


class Streamed(Feed):
    """Gathers the next batches on the host, in a thread, and copies each to the device when its turn comes.

    :meth:`batch` always returns the same two tensors, which the next :meth:`prepare` writes to. The thread fetches
    from the split; it touches no GPU, because a CUDA call of another thread would break a capture of this one. So it
    is ``prepare`` that waits for the copy from a slot to be done before it lends the slot to the thread again.
    """

    placement = "stream"

    def __init__(
        self,
        split: Split,
        batch_size: int,
        source: Address,
        device: torch.device,
        part: tuple[int, int],
        augment: Sequence[str],
    ):
        super().__init__(split, batch_size, source, device, part)
        self.augmented = _while_decoding(split, augment)
        self._noise = Address(source.seed, source.owner, "augment")
        like, _ = split.batch(torch.zeros(0, dtype=torch.int64), _CPU)
        shape = (self.batch_size, *like.shape[1:])
        labels = 0 if split.labels is None else self.batch_size
        cuda = device.type == "cuda"
        self._images = torch.empty(shape, dtype=like.dtype, device=device)
        self._labels = torch.empty(labels, dtype=torch.int64, device=device)
        self._free = deque(
            _Slot(
                torch.empty(shape, dtype=like.dtype, device=_CPU, pin_memory=cuda),
                torch.empty(labels, dtype=torch.int64, device=_CPU, pin_memory=cuda),
                torch.cuda.Event(blocking=True) if cuda else None,
            )
            for _ in range(_AHEAD + _BEHIND)
        )
        self._pending: deque[tuple[int, _Slot, Future[None]]] = deque()
        self._step: int | None = None  # whose batch is on the device
        self._ordered: tuple[int, Tensor] | None = None  # an epoch and its order; the thread's own
        self._start_thread()

    def _start_thread(self) -> None:
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peerbayes-feed")

    def prepare(self, step: int) -> None:
        """See :meth:`Feed.prepare`: copies the step's batch to the device and has later ones gathered.

        An error in gathering the batch, such as a damaged file, is raised unchanged.
        """
        if step == self._step:
            return
        if self._forked:
            self._give_up()
            self._start_thread()
        if self._pending and self._pending[0][0] != step:
            self._give_up()
        self._gather_from(step)
        _, slot, gathered = self._pending[0]
        gathered.result()
        self._images.copy_(slot.images, non_blocking=True)
        self._labels.copy_(slot.labels, non_blocking=True)
        if slot.copied is not None:
            slot.copied.record(torch.cuda.current_stream(self._device))
        self._step = step
        self._pending.popleft()
        self._free.append(slot)
        self._gather_from(step + 1)

    def batch(self, place: int | Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002 (one signature for all feeds)
        """See :meth:`Feed.batch`; ``place`` is not looked at."""
        return self._images, self._labels

    def close(self) -> None:
        """See :meth:`Feed.close`."""
        self._give_up()
        if not self._forked:
            self._thread.shutdown()

    @property
    def _forked(self) -> bool:
        return self._process != os.getpid()  # threads do not survive a fork; nor can their locks be trusted

    def _gather_from(self, step: int) -> None:
        for number in range(step + len(self._pending), step + _AHEAD):
            slot = self._free.popleft()
            if slot.copied is not None:
                slot.copied.synchronize()
            self._pending.append((number, slot, self._thread.submit(self._gather, number, slot)))

    def _give_up(self) -> None:
        # The thread may still be writing to the first slot, but will be done before it is given another.
        for _, slot, gathered in self._pending:
            if not self._forked:
                gathered.cancel()
            self._free.append(slot)
        self._pending.clear()

    def _gather(self, step: int, slot: _Slot) -> None:
        epoch, batch_index = divmod(step, self.steps_per_epoch)
        if self._ordered is None or self._ordered[0] != epoch:
            self._ordered = epoch, self._order(epoch, _CPU)
        begin = batch_index * self._whole + self._begin
        index = self._ordered[1][begin : begin + self.batch_size]
        images, labels = augmented_batch(self._split, index, _CPU, self.augmented, self._noise.at(step), self._begin)
        slot.images.copy_(images)
        slot.labels.copy_(labels)


def feed(
    split: Split,
    batch_size: int,
    seed: int,
    device: torch.device,
    *,
    placement: Placement = "auto",
    part: tuple[int, int] = (0, 1),
    owner: str = "data",
    augment: Sequence[str] = (),
) -> Feed:
    """Return the training batches of a split.

    Args:
        split: the images. Where they are streamed, they are fetched in a thread.
        batch_size: images in a batch of all processes together; at most all there are.
        seed: the run's seed, for the order.
        device: where the batches are wanted.
        placement: ``device`` keeps the images there, once for all the feeds from a split; ``stream`` sends each batch
            from the host; ``auto`` keeps an array on the device if it is in the memory of it already or takes at most
            half of a GPU's free memory, and streams image files and mapped arrays otherwise.
        part: (rank, count): this process gets rows ``rank * b`` to ``(rank + 1) * b`` of each batch,
            b = batch_size / count.
        owner: whose order it is: feeds of one seed have it in common with those of the same owner.
        augment: names of augmentations. Those that are made as files are decoded are made by the feed, at the address
            (seed, owner, "augment", step), and are its ``augmented``; all others are left to the caller.

    Example:
        >>> import torch
        >>> from peerbayes.data import ArraySplit
        >>> split = ArraySplit(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1, 0]))
        >>> from peerbayes.data import feed
        >>> found = feed(split, batch_size=2, seed=0, device=torch.device("cpu"))
        >>> type(found).__name__, found.steps_per_epoch
        ('Resident', 2)
    """
    rank, count = part
    if not 0 <= rank < count:
        raise InputError(f"part is {part}: expected (rank, count) with a rank from 0 to count - 1")
    size = min(batch_size, len(split))
    if size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size} for {len(split)} images")
    if size % count:
        why = f" (all images, instead of {batch_size})" if size < batch_size else ""
        raise InputError(f"batch_size is {size}{why}: expected a multiple of {count}, the number of processes")
    if placement not in get_args(Placement):
        raise InputError(f"unknown placement '{placement}'{nearest(placement, get_args(Placement))}")
    device = torch.empty(0, device=device).device  # with its number
    source = Address(seed, owner, "order")
    if placement == "device" and not isinstance(split, ArraySplit):
        raise InputError(f"placement 'device' needs an array of images, and the files of a {type(split).__name__} are "
                         "decoded on the host, batch by batch: expected 'stream' or 'auto'")  # fmt: skip
    if isinstance(split, ArraySplit) and placement != "stream" and _fits(split, device, forced=placement == "device"):
        return Resident(split, size, source, device, part)
    return Streamed(split, size, source, device, part, augment)


def augmented_batch(
    split: Split, index: Tensor, device: torch.device, names: Sequence[str], address: Address, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return a batch of a split, augmented as `augment` does; files are cropped as they are decoded, before all else.

    Args:
        split: the images.
        index: int64 (B,).
        device: where the batch is wanted.
        names: of augmentations.
        address: the step's address.
        first: number of the first image, where these are part of a batch.

    Example:
        >>> import torch
        >>> from peerbayes.data import ArraySplit
        >>> split = ArraySplit(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1, 0]))
        >>> from peerbayes import Address
        >>> from peerbayes.data import augmented_batch
        >>> index, address = torch.tensor([0, 1]), Address(0, "data").at(7)
        >>> images, labels = augmented_batch(split, index, torch.device("cpu"), ["flip"], address)
        >>> images.shape, labels.tolist()
        (torch.Size([2, 1, 8, 8]), [0, 1])
    """
    early = _while_decoding(split, names)
    if isinstance(split, FolderSplit) and early:
        images, labels = split.crops(index, device, address.sub(_CROP), first)
    else:
        images, labels = split.batch(index, device)
    return augment(images, [name for name in names if name not in early], address, first), labels


def _while_decoding(split: Split, names: Sequence[str]) -> tuple[str, ...]:
    # What a centre leaves out of a file, no crop of it can show.
    return (_CROP,) if _CROP in names and isinstance(split, FolderSplit) else ()


def _fits(split: ArraySplit, device: torch.device, forced: bool) -> bool:
    """Return whether the images are, or should be copied, on the device; ``forced``: refuse what can't be."""
    mapped = split.rows is not None
    if (split.images.device == device and not mapped) or device in _copies.get(split, ()):
        return True
    if device.type != "cuda":
        return forced or not mapped
    free, _ = torch.cuda.mem_get_info(device)
    needed = len(split) * math.prod(split.shape) * split.images.element_size()
    if forced and needed > free:
        raise InputError(f"placement 'device': the images take {needed / 2**30:.2f} GiB, and {device} has "
                         f"{free / 2**30:.2f} GiB free: expected 'stream' or 'auto'")  # fmt: skip
    return forced or 2 * needed <= free


def _on_device(split: ArraySplit, device: torch.device) -> ArraySplit:
    if split.images.device == device and split.rows is None:
        return split
    copies = _copies.setdefault(split, WeakValueDictionary())
    copy = copies.get(device)
    if copy is None:
        copy = copies[device] = split.to(device)
    return copy
