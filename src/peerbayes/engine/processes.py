"""Where a run is trained: the device, and processes that train one cohort over gloo on CPUs and NCCL on GPUs.

Every process sees its own share of each batch, with equal shares, and gradients are averaged. A loss that is a mean
over the batch then has the gradient of one process at the global batch; so have statistics of the whole batch
(batch-norm, kernels) where they are synchronised.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import peerbayes
from peerbayes.errors import InputError, TrainingError, nearest, reason


def pick_device(device: str | torch.device) -> torch.device:
    """Return a torch device; ``auto`` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        hint = "; did you mean 'cuda'?" if str(device).startswith("gpu") else ""
        raise InputError(f"device '{device}' can't be used: expected cpu, cuda, cuda:1, ... or auto{hint}") from None
    try:
        torch.ones(2, device=chosen).sum().item()  # some devices have no memory, or can't compute
    except Exception as error:  # backends that are not installed raise many kinds
        raise InputError(f"device '{device}' can't be used: {reason(error)}") from None
    return chosen


def environment(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions, for records."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()} CPU, {threads(torch.get_num_threads())}"
    versions = {"peerbayes": peerbayes.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"hardware": hardware, "versions": versions}


def threads(count: int) -> str:
    """Return a number of threads in words."""
    return f"{count} thread{'s' * (count > 1)}"


# The first process may write and evaluate for a while before the others hear of it again.
TIMEOUT = timedelta(minutes=30)
# How long a process that can't go on waits for the first one to say why, and then for torchrun to end it.
PATIENCE = timedelta(seconds=10)


@dataclass(frozen=True, eq=False)
class World:
    """The processes that train together, as one of them sees them.

    Attributes:
        rank: this process's number, from 0.
        size: how many processes there are; 1 needs no process group, and nothing is ever sent.
        local_rank: this process's number on its own node.
    """

    rank: int
    size: int
    local_rank: int = 0
    _flats: dict[Any, tuple[Tensor, list[Tensor]]] = field(default_factory=dict, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and talks."""
        return self.rank == 0

    def device(self, kind: str | torch.device = "auto") -> torch.device:
        """Return this process's device: ``cpu``, ``cuda`` (one GPU a process of a node), or ``auto``."""
        kind = str(kind)
        if kind not in ("auto", "cpu", "cuda"):
            raise InputError(
                f"device '{kind}' can't be shared out to processes{nearest(kind, ('auto', 'cpu', 'cuda'))}"
            )
        if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise InputError(f"LOCAL_RANK is {self.local_rank}, but this node has GPUs for {count} processes only")
        return torch.device("cuda", self.local_rank)

    def barrier(self) -> None:
        """Wait until every process has come here; work that a GPU still has to do is not waited for."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Return whether any process raised its flag; all processes have to ask."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def same(self, number: int) -> bool:
        """Return whether all processes have this number; all have to ask."""
        if self.size == 1:
            return True
        most = torch.tensor([number, -number])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most.sum()) == 0

    def differing(self, facts: Mapping[str, str]) -> dict[str, list[int]]:
        """Return which processes have other facts than the first one, by fact; all have to ask for the same ones."""
        if self.size == 1:
            return {}
        digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in facts.values()]
        sent = torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests])
        heard = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(heard, sent)
        other = torch.stack(heard) != heard[0]
        ranks = {what: column.nonzero().flatten().tolist() for what, column in zip(facts, other.T, strict=True)}
        return {what: others for what, others in ranks.items() if others}

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors, of one type and device, to their means over the processes, by one all-reduce.

        They travel in a flat buffer that is kept for the next call with the same shapes, so that a step which is
        captured as a CUDA graph finds it in its place.
        """
        if self.size == 1 or not tensors:
            return
        flat, views = self._flat(tensors)
        torch._foreach_copy_(views, list(tensors))
        dist.all_reduce(flat)
        flat.div_(self.size)
        torch._foreach_copy_(list(tensors), views)

    @torch.no_grad()
    def mean_buffers(self, module: nn.Module) -> None:
        """Set a module's floating-point buffers to their means over the processes.

        The mean is x_0 + (1/size) Σ_r (x_r − x_0), so that constants, infinities too, stay as they are to the last bit.
        """
        if self.size == 1:
            return
        floating = sorted((b for b in module.buffers() if b.is_floating_point()), key=_kind)
        for _, same in groupby(floating, key=_kind):
            buffers = list(same)
            own = torch.cat([buffer.flatten() for buffer in buffers])
            first = own.clone()
            dist.broadcast(first, 0)
            change = torch.where(own == first, 0, own - first)
            dist.all_reduce(change)
            means = (first + change / self.size).split([buffer.numel() for buffer in buffers])
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def _flat(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        key = tensors[0].dtype, tensors[0].device, tuple(tensor.shape for tensor in tensors)
        if key not in self._flats:
            sizes = [tensor.numel() for tensor in tensors]
            flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
            views = [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]
            self._flats[key] = flat, views
        return self._flats[key]


ALONE = World(0, 1)


# ---- coming and going -----------------------------------------------------------------------------------------------


@contextmanager
def joined(device: str | torch.device = "auto", timeout: timedelta = TIMEOUT) -> Iterator[World]:
    """Join the processes that torchrun has started, for the block; yields `ALONE` where it has started none.

    A sentence for the user (`InputError`, `TrainingError`) that ends the block in any process is raised in one of them,
    the first if it can; the others leave by `SystemExit`. What was wrong before training began is not tried again.

    Args:
        device: ``cpu`` (gloo), ``cuda`` (NCCL), or ``auto``: a GPU where there is one.
        timeout: how long a process waits for another. One that was killed is noticed at once over gloo, unless its
            whole node is gone.
    """
    world = _from_environment(os.environ)
    if world.size == 1:
        yield world
        return
    target = world.device(device)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    # Flags travel over gloo in any case: asking for one must not wait for a GPU.
    backend = "cpu:gloo,cuda:nccl" if target.type == "cuda" else "gloo"
    try:
        kept, store = _fresh_store(world, timeout)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise InputError(f"process {world.rank} can't join the others at {where}: {reason(error)}") from error
    try:
        yield world
    except BaseException as error:
        if _is_sentence(error):
            with suppress(RuntimeError):
                store.set("failed", str(error))
                if isinstance(error, InputError) and not world._flats:
                    kept.set("refused", "")
        # Others may be gone: a group that is destroyed in good order could wait for them.
        dist.distributed_c10d._abort_process_group()
        _leave_once_reported(world, store, error)
        raise
    dist.destroy_process_group()


def restarted() -> bool:
    """Return whether torchrun has started this process again after a failure.

    Nodes count for themselves, so the answer may differ between processes: ask ``world.any(restarted())``.
    """
    name = "TORCHELASTIC_RESTART_COUNT"
    return name in os.environ and _number(os.environ, name) > 0


def _is_sentence(error: BaseException) -> bool:
    return isinstance(error, InputError | TrainingError)


def _leave_once_reported(world: World, store: Any, error: BaseException) -> None:
    """Let one process raise the error, and end the others by `SystemExit` once they know that it has.

    Returns where the error is no sentence for the user, and every process raises its own.
    """
    with suppress(dist.DistError):
        if not _is_sentence(error):
            # Where another process has given up, a lost connection is what comes of it.
            if not isinstance(error, RuntimeError) or not store.check(["failed"]):
                return
            error = InputError(store.get("failed").decode())
        reported = False  # whether the first process has raised its error
        if not world.is_first:
            with suppress(dist.DistStoreError):
                store.wait(["spoken"], PATIENCE)
                reported = True
        if not reported and store.add("spoken", 1) == 1:
            if world.is_first:  # the store may be in this process, and go with it
                with suppress(dist.DistError):
                    store.wait([f"heard/{rank}" for rank in range(1, world.size)], PATIENCE)
            raise error
        store.set(f"heard/{world.rank}", "")
        time.sleep(PATIENCE.total_seconds())  # torchrun ends all when one leaves, and the first has to speak before
        raise SystemExit(2 if isinstance(error, InputError) else 1)


def _fresh_store(world: World, timeout: timedelta) -> tuple[Any, Any]:
    """Return torchrun's store, and a part of it that no process of an earlier start has written to."""
    # torchrun keeps one store over all restarts, where a new process would find the addresses of dead ones, and its
    # count of restarts differs between nodes. So every process asks under a random name, and the first process answers
    # with its own, which becomes the prefix of this start. Questions that dead processes have left do no harm.
    store = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))[0]  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    kept = dist.PrefixStore("peerbayes", store)  # type: ignore[attr-defined]
    if kept.check(["refused"]):
        raise SystemExit(2)
    prefix = own = uuid.uuid4().hex
    if world.is_first:
        _answer(store, own, set(range(1, world.size)), timeout)
    else:
        store.set(f"peerbayes/asks/{world.rank}", own)
        prefix = store.get(f"peerbayes/answer/{own}").decode()
        store.set(f"peerbayes/{prefix}/heard/{world.rank}", "")
    return kept, dist.PrefixStore(prefix, kept)  # type: ignore[attr-defined]


def _answer(store: Any, prefix: str, waiting: set[int], timeout: timedelta) -> None:
    """Send the prefix to all ranks that wait for it, until they have it."""
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in sorted(waiting))
            raise ValueError(f"waited {timeout.total_seconds():g} s in vain for {missing}")
        for rank in waiting:
            if store.check([f"peerbayes/asks/{rank}"]):
                asker = store.get(f"peerbayes/asks/{rank}").decode()
                store.set(f"peerbayes/answer/{asker}", prefix)
        time.sleep(0.01)
        waiting = {rank for rank in waiting if not store.check([f"peerbayes/{prefix}/heard/{rank}"])}


def _from_environment(environment: Mapping[str, str]) -> World:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return ALONE
    rank, size, local = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not local <= rank < size:
        raise InputError(
            f"RANK is {rank}, LOCAL_RANK {local} and WORLD_SIZE {size}: expected LOCAL_RANK ≤ RANK < WORLD_SIZE, "
            "as torchrun sets them"
        )
    return World(rank, size, local)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise InputError(f"the environment has no {name}, but other variables of torchrun; start with torchrun")
    if not (text.isascii() and text.isdecimal()):
        raise InputError(f"{name} is '{text}' in the environment: expected a whole number, as torchrun sets it")
    return int(text)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"
