"""Measure how flat the loss is around trained weights, along directions that do not depend on the weights' scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from peerbayes.data.splits import Split
from peerbayes.errors import InputError
from peerbayes.math.noise import Address, normal
from peerbayes.networks.running import evaluating

if TYPE_CHECKING:
    from peerbayes.posteriors.base import Posterior


def directions(tensors: Mapping[str, Tensor], address: Address) -> dict[str, Tensor]:
    """Return one filter-normalised random direction (Li et al., 2018), in the shapes of ``tensors``.

    For each output filter f of a tensor with two axes or more, ``d_f = ε_f ‖w_f‖ / ‖ε_f‖`` with standard normal ε.
    Vectors (biases, scales and shifts of batch-norm) get 0. The noise of a tensor depends on its name and the address
    alone.

    Args:
        tensors: weights by name; the first axis of a matrix or of a larger tensor is its output filters.
        address: where the noise belongs.

    Returns:
        A direction by name, in the memory format of the weights.

    Example:
        >>> import torch
        >>> from peerbayes import Address
        >>> from peerbayes.metrics import directions
        >>> weights = {"weight": torch.tensor([[3.0, 4.0], [0.0, 0.5]]), "bias": torch.ones(2)}
        >>> direction = directions(weights, Address(0, "flatness"))
        >>> direction["weight"].norm(dim=1), direction["bias"]
        (tensor([5.0000, 0.5000]), tensor([0., 0.]))
    """
    return {name: _direction(tensor.detach(), address.sub(name)) for name, tensor in tensors.items()}


def _direction(tensor: Tensor, address: Address) -> Tensor:
    if tensor.dim() < 2:
        return torch.zeros_like(tensor)
    noise = normal(address, tensor.numel(), tensor.device).view(len(tensor), -1)
    scale = tensor.flatten(1).norm(dim=1) / noise.norm(dim=1)
    # In the memory format of the weights, so that their sum keeps it.
    return torch.empty_like(tensor).copy_((noise * scale[:, None]).view(tensor.shape))


@torch.no_grad()
def loss_along(
    posterior: Posterior,
    data: Split | tuple[Tensor, Tensor],
    distances: Sequence[float],
    count: int,
    address: Address,
    *,
    batch_size: int = 256,
) -> Tensor:
    """Return the mean cross-entropy at ``w + t d`` around the mean weights w, for distances t and random directions d.

    The posterior is not changed. Networks run in evaluation mode, batch-norm with its running statistics. Direction
    number i is that of ``address.at(i)``, so posteriors over one architecture may share their noise.

    Args:
        posterior: any posterior; at t = 0 the loss is that of its mean weights.
        data: a split with labels, or images ``(N, ...)`` and labels ``(N,)``; kept in the posterior's memory.
        distances: values of t; 1 moves every filter by its own length.
        count: directions.
        address: where the directions' noise belongs; its number is not used.
        batch_size: images at a time.

    Returns:
        Nats per image, float64 ``(count, len(distances))``, on the CPU.

    Example:
        >>> import torch
        >>> from peerbayes import Address, Point
        >>> from peerbayes.metrics import loss_along
        >>> posterior = Point(torch.nn.Linear(2, 2))
        >>> data = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> loss_along(posterior, data, [-0.5, 0.0, 0.5], count=4, address=Address(0, "flatness")).shape
        torch.Size([4, 3])
    """
    if count < 1 or not distances:
        raise InputError(f"count, distances: got {count} and {len(distances)} of them; expected at least one of each")
    parts = _batches(posterior, data, batch_size)
    weights = posterior.layout.views(posterior.mean) | posterior.rest_layout.views(posterior.rest)
    with evaluating(posterior):
        losses = torch.empty(count, len(distances), dtype=torch.float64)
        for number in range(count):
            way = directions(weights, address.at(number))
            for column, distance in enumerate(distances):
                moved = {name: weight.add(way[name], alpha=distance) for name, weight in weights.items()}
                moved |= {alias: moved[name] for alias, name in posterior.aliases.items()}
                losses[number, column] = _loss(posterior, moved, parts)
        return losses


def _batches(posterior: Posterior, data: Split | tuple[Tensor, Tensor], batch_size: int) -> list[tuple[Tensor, Tensor]]:
    if isinstance(data, tuple):
        images, labels = (tensor.to(posterior.device) for tensor in data)
        if len(images) == len(labels) > 0:
            return list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
    elif len(data) > 0 and data.labels is not None:
        return [data.batch(index, posterior.device) for index in torch.arange(len(data)).split(batch_size)]
    raise InputError("data: expected at least one image, and a label for each")


def _loss(posterior: Posterior, tensors: dict[str, Tensor], parts: Sequence[tuple[Tensor, Tensor]]) -> float:
    total, images = 0.0, 0
    for inputs, labels in parts:
        logits = posterior.run_network(inputs, tensors).double()
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
        images += len(labels)
    return total / images


def sharpness(losses: Tensor, distances: Sequence[float], at: float) -> float:
    """Return how far the loss rises at distance ``at``: the mean over directions of ``½ (L(at) + L(−at)) − L(0)``.

    Args:
        losses: ``(directions, distances)``, from :func:`loss_along`.
        distances: those that ``losses`` was computed at; 0, ``at`` and ``−at`` must be among them.
        at: a distance above 0.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import sharpness
        >>> sharpness(torch.tensor([[2.0, 1.0, 3.0], [4.0, 1.0, 1.0]]), [-0.5, 0.0, 0.5], at=0.5)
        1.5
    """
    for needed in (0.0, at, -at):
        if needed not in distances:
            raise InputError(f"distances: {needed:g} is not among them; expected 0, {at:g} and {-at:g}")
    mean: dict[float, float] = dict(zip(distances, losses.mean(0).tolist(), strict=True))
    return (mean[at] + mean[-at]) / 2 - mean[0.0]


@torch.no_grad()
def loss_between(
    posterior: Posterior,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    data: Split | tuple[Tensor, Tensor],
    points: Sequence[float],
    *,
    batch_size: int = 256,
) -> Tensor:
    """Return the mean cross-entropy at ``(1 − t) first + t second``, in evaluation mode.

    Args:
        posterior: over the network; it is not changed.
        first: tensors of the network by name: all parameters, and buffers that are not the posterior's own.
        second: tensors of the same names and shapes.
        data: a split with labels, or images ``(N, ...)`` and labels ``(N,)``.
        points: values of t.
        batch_size: images at a time.

    Returns:
        Nats per image, float64 ``(len(points),)``, on the CPU.

    Example:
        >>> import torch
        >>> from peerbayes import Point
        >>> from peerbayes.metrics import loss_between
        >>> posterior = Point(torch.nn.Linear(2, 2, bias=False))
        >>> first, second = {"weight": torch.zeros(2, 2)}, {"weight": 2 * torch.eye(2)}
        >>> data = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> loss_between(posterior, first, second, data, points=[0.0, 0.5, 1.0])
        tensor([0.6931, 0.3133, 0.1269], dtype=torch.float64)
    """
    for name in {*first, *second}:
        if name not in first or name not in second or first[name].shape != second[name].shape:
            raise InputError(f"first, second: tensor '{name}' must be in both, with one shape")
    parts = _batches(posterior, data, batch_size)
    with evaluating(posterior):
        losses = []
        for point in points:
            mixed = {n: torch.lerp(a, second[n], point) if a.is_floating_point() else a for n, a in first.items()}
            losses.append(_loss(posterior, mixed, parts))
        return torch.tensor(losses, dtype=torch.float64)


def barrier(losses: Tensor, points: Sequence[float]) -> float:
    """Return how far the loss rises above the line between its ends: ``max_t L(t) − ((1 − t) L(0) + t L(1))``.

    Args:
        losses: ``(points,)``, from :func:`loss_between`; its first and last points are the ends 0 and 1.
        points: the values of t.

    Example:
        >>> import torch
        >>> from peerbayes.metrics import barrier
        >>> barrier(torch.tensor([1.0, 4.0, 3.0]), points=[0.0, 0.5, 1.0])
        2.0
    """
    if len(points) != len(losses) or points[0] != 0 or points[-1] != 1:
        raise InputError(f"points: expected {len(losses)} from 0 to 1, got {list(points)}")
    t = torch.tensor(points, dtype=losses.dtype)
    return float((losses - torch.lerp(losses[0], losses[-1], t)).max())
