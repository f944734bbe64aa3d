"""Many processes that train one cohort: what they tell each other, over gloo on CPUs and NCCL on GPUs.

Every process sees its own share of each batch, with equal shares, and gradients are averaged. A loss that is a mean
over the batch then has the gradient of one process at the global batch; so have statistics of the whole batch
(batch-norm, kernels) where they are synchronised.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from peerbayes.errors import InputError, TrainingError, nearest, reason

# The first process may write and judge for a while before the others hear of it again.
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
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def same(self, number: int) -> bool:
        """Return whether all processes have this number; all have to ask."""
        if self.size == 1:
            return True
        most = torch.tensor([number, -number])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most.sum()) == 0

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
    place = world.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    # Flags travel over gloo in any case: asking for one must not wait for a GPU.
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    try:
        kept, store = _store_of_this_life(world, timeout)
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
        _leave_with_one_voice(world, store, error)
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


def _leave_with_one_voice(world: World, store: Any, error: BaseException) -> None:
    """Raise what this process should leave with instead of the error; return if that is the error itself."""
    with suppress(dist.DistError):
        if not _is_sentence(error):
            # Where another process has given up, a lost connection is what comes of it.
            if not isinstance(error, RuntimeError) or not store.check(["failed"]):
                return
            error = InputError(store.get("failed").decode())
        heard = False
        if not world.is_first:
            with suppress(dist.DistStoreError):
                store.wait(["spoken"], PATIENCE)
                heard = True
        if not heard and store.add("spoken", 1) == 1:
            if world.is_first:  # the store may be in this process, and go with it
                with suppress(dist.DistError):
                    store.wait([f"heard/{rank}" for rank in range(1, world.size)], PATIENCE)
            raise error
        store.set(f"heard/{world.rank}", "")
        time.sleep(PATIENCE.total_seconds())  # torchrun ends all when one leaves, and the first has to speak before
        raise SystemExit(2 if isinstance(error, InputError) else 1)


def _store_of_this_life(world: World, timeout: timedelta) -> tuple[Any, Any]:
    # torchrun keeps one store over all restarts, where a new process would find the addresses of dead ones, and its
    # count of restarts differs between nodes. So every process thinks of a name and asks under it; the first process
    # answers with its own, which is the name of this life. Questions that dead processes have left do no harm.
    store = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))[0]  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    kept = dist.PrefixStore("peerbayes", store)  # type: ignore[attr-defined]
    if kept.check(["refused"]):
        raise SystemExit(2)
    life = own = uuid.uuid4().hex
    if world.is_first:
        _answer(store, own, set(range(1, world.size)), timeout)
    else:
        store.set(f"peerbayes/asks/{world.rank}", own)
        life = store.get(f"peerbayes/answer/{own}").decode()
        store.set(f"peerbayes/{life}/heard/{world.rank}", "")
    return kept, dist.PrefixStore(life, kept)  # type: ignore[attr-defined]


def _answer(store: Any, life: str, deaf: set[int], timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while deaf:
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in sorted(deaf))
            raise ValueError(f"waited {timeout.total_seconds():g} s in vain for {missing}")
        for rank in deaf:
            if store.check([f"peerbayes/asks/{rank}"]):
                asker = store.get(f"peerbayes/asks/{rank}").decode()
                store.set(f"peerbayes/answer/{asker}", life)
        time.sleep(0.01)
        deaf = {rank for rank in deaf if not store.check([f"peerbayes/{life}/heard/{rank}"])}


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


# ---- the whole batch ------------------------------------------------------------------------------------------------


def gather_batch(tensor: Tensor, world: World) -> Tensor:
    """Return the processes' tensors (b, ...), of equal shape, in the order of their ranks: (b · size, ...).

    The gradient that reaches each process's own rows is the sum over processes, Σ_r ∂L_r/∂rows. If every process
    computes the same statistic S of the gathered rows, that is size · ∂S/∂rows; averaging the parameters' gradients
    over processes takes the factor away, (1/size) Σ_r size · ∂S/∂rows_r · ∂rows_r/∂θ = dS/dθ, which is the gradient
    of one process at the global batch.
    """
    if world.size == 1:
        return tensor
    gathered: Tensor = _Gather.apply(tensor, world.size)
    return gathered


class _Gather(torch.autograd.Function):
    """All-gather, with reduce-scatter as its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        ctx.rows = len(tensor)
        gathered = tensor.new_empty((size * len(tensor), *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, tensor.contiguous())
        # See `peerbayes.divergences._KLToFixed`: compiled, what was written to loses its gradient.
        return gathered.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty((ctx.rows, *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous())
        return own, None


# ---- batch-norm -----------------------------------------------------------------------------------------------------


def synchronise_batch_norm(network: nn.Module, world: World) -> None:
    """Let every batch-norm of a network, while it trains, use mean and variance of all the processes' batches.

    Running statistics become those of one process at the global batch; in eval mode nothing changes. Names, state-dict
    keys and the modules themselves stay as they are, subclasses with a forward of their own included: only their class
    changes, to a subclass of the same name. Copies and pickles are plain again and never wait for other processes.
    """
    if world.size == 1:
        return
    made: dict[type[_BatchNorm], type[_BatchNorm]] = {}
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            plain = getattr(module, "unsynchronised", type(module))
            if plain not in made:
                made[plain] = _synchronised(plain, world)
            module.__class__ = made[plain]


def _synchronised(plain: type[_BatchNorm], world: World) -> type[_BatchNorm]:
    class Synchronised(plain):  # type: ignore[misc,valid-type]
        unsynchronised = plain

        def forward(self, *inputs: Any, **options: Any) -> Any:
            if not self.training:
                return super().forward(*inputs, **options)
            with _GlobalBatchNorm(world):
                return super().forward(*inputs, **options)

        def __reduce_ex__(self, _protocol: Any) -> Any:
            # From protocol 2 on, pickle insists on an object's own class.
            make, about, *state = super().__reduce_ex__(1)
            return make, (plain, *about[1:]), *state

    # Whoever goes by the name (printing, tracing for batch-norm folding) must see what it was.
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Synchronised, name, getattr(plain, name))
    return Synchronised


class _GlobalBatchNorm(TorchFunctionMode):
    """Puts `_batch_norm` in the place of `torch.nn.functional.batch_norm`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is F.batch_norm:
            return _batch_norm(self.world, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _batch_norm(
    world: World,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm` over all processes' inputs (B, C, ...), of equal shape.

    With the processes' means m_r and variances v_r, the mean is m = mean_r m_r and the variance
    v = mean_r (v_r + (m_r − m)²).
    """
    if not training:  # a batch-norm that is frozen while the rest trains
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    axes = [axis for axis in range(input.dim()) if axis != 1]
    own_var, own_mean = torch.var_mean(wide, axes, correction=0)
    means, variances = gather_batch(torch.stack([own_mean, own_var])[None], world).unbind(1)
    mean = means.mean(0)
    var = (variances + (means - mean).square()).mean(0)
    if running_mean is not None and running_var is not None:
        count = world.size * input.numel() // input.shape[1]
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    shape = (1, -1, *[1] * (input.dim() - 2))
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    found = (wide - mean.view(shape)) * scale.view(shape)
    if bias is not None:
        found = found + bias.view(shape)
    return found.to(input.dtype)
