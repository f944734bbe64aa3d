"""Statistics of the whole batch, where each process has a share of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from peerbayes.engine.processes import World


def gather_batch(tensor: Tensor, world: World) -> Tensor:
    """Return the processes' tensors (b, ...), of equal shape, in the order of their ranks: (b · size, ...).

    The gradient that reaches each process's own rows is the sum over processes, Σ_r ∂L_r/∂rows. If every process
    computes the same statistic S of the gathered rows, that is size · ∂S/∂rows; averaging the parameters' gradients
    over processes takes the factor away, (1/size) Σ_r size · ∂S/∂rows_r · ∂rows_r/∂θ = dS/dθ, which is the gradient
    of one process at the global batch.

    Args:
        tensor: of this process, (b, ...).
        world: all processes.
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
        # See `peerbayes.math.divergences._GaussianKL`: compiled, what was written to loses its gradient.
        return gathered.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.new_empty((ctx.rows, *grad.shape[1:]))
        dist.reduce_scatter_tensor(rows, grad.contiguous())
        return rows, None


def synchronise_batch_norm(network: nn.Module, world: World) -> None:
    """Let every batch-norm of a network, while it trains, use mean and variance of all the processes' batches.

    Running statistics become those of one process at the global batch; in eval mode nothing changes. Names, state-dict
    keys and the modules themselves stay as they are, subclasses with a forward of their own included: only their class
    changes, to a subclass of the same name. Copies and pickles are plain again and never wait for other processes.

    Args:
        network: changed in place.
        world: all processes.
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
    normalised = (wide - mean.view(shape)) * scale.view(shape)
    if bias is not None:
        normalised = normalised + bias.view(shape)
    return normalised.to(input.dtype)
