"""The mean and deviation that a network expects its images to be normalised by, and putting them in front of it.

Images come in [0, 1]. Own networks and ``timm/NAME`` bring a `Normalize` along; a module from elsewhere may do it in
its forward pass, expect it of whoever feeds it (as timm's and torchvision's do), or want none.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from peerbayes.choices import Statistics
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.networks.inputs import Inputs, Normalize
from peerbayes.networks.running import evaluating

Stats = tuple[tuple[float, ...], tuple[float, ...]]
Choice = Literal["auto"] | Statistics | tuple[float | Sequence[float], float | Sequence[float]] | None

IMAGENET_STATS: Stats = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_STATS = "input_statistics"  # the name of what was put in front; its buffers are called by the next two
_MEAN, _STD = "input_mean", "input_std"
_KINDS: dict[type[nn.Module], type[nn.Module]] = {}  # by the class that a network had before
_SETTLED = "takes_images_in_unit_range"  # set on a network of which it is known that nothing belongs there


def normalised(
    network: nn.Module, normalize: Choice, inputs: Inputs, who: str = "the network", *, started: bool = False
) -> nn.Module:
    """Return a copy of a network with the normalisation that it expects in front, or itself where it expects none.

    Its parameters and buffers keep their names. ``"auto"`` takes what `data.stats` asks for, else the network's own
    statistics where they are known: those of timm and torchvision, or the data's where such a network is not trained
    yet, as ``timm/NAME`` in a recipe does. Of others nothing is known; one that looks trained is warned of.

    Args:
        network: from images to logits.
        normalize: ``"auto"``, ``"imagenet"``, ``"data"``, (mean, std) of images in [0, 1], a number for all channels or
            one for each, or None for a network that does it itself, or wants images in [0, 1].
        inputs: shape and statistics of the data.
        who: the network, for messages.
        started: its weights are known to be trained ones.

    Example:
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
        >>> inputs = Inputs(2, (3, 1, 1), (0.5,) * 3, (0.2,) * 3)
        >>> given = normalised(network, ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)), inputs)
        >>> bool(torch.equal(given(torch.full((1, 3, 1, 1), 0.75)), network(torch.ones(1, 3, 1, 1))))
        True
    """
    made = copy.deepcopy(network)
    settle(made, normalize, inputs, run=made, tensors=dict(made.named_parameters()), started=started, who=who)
    if normalization_of(made) != normalization_of(network):
        return made
    carry_over(made, network)
    return network


def settle(
    network: nn.Module,
    normalize: Choice,
    inputs: Inputs,
    *,
    run: Callable[[Tensor], Any],
    tensors: Mapping[str, Tensor],
    started: bool = False,
    who: str = "the network",
) -> None:
    """Do what `normalised` does, in place.

    Args:
        network: from images to logits; its parameters may lie elsewhere.
        normalize: see `normalised`.
        inputs: of the data.
        run: runs the network.
        tensors: its parameters by name.
        started: its weights are known to be trained ones.
        who: the network, for messages.
    """
    stats = _chosen(normalize, inputs)
    if normalize is None:
        setattr(network, _SETTLED, True)
    if inputs.tokens or (stats is None and getattr(network, _SETTLED, False)):
        return
    if stats is not None and normalization_of(network) == stats:
        return
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    if normalises_itself(network, inputs.shape, run, device):
        if stats is not None:
            raise InputError(f"{who} normalises its images itself: leave normalize out, or take its own away")
        return
    if stats is None and inputs.asked:
        stats = inputs.mean, inputs.std
    if stats is None:
        noted, trained = own_statistics(network), looks_trained(network, tensors)
        trained = started or trained
        if noted is not None:
            fits = len(noted[0]) == inputs.shape[0] and trained is not False
            stats = noted if fits else (inputs.mean, inputs.std)
        elif trained:
            note = (f"{who} {'is' if started else 'looks'} trained, and nothing tells which mean and deviation its "
                    "images were normalised by: it is given them in [0, 1]; pass normalize=(mean, std), 'imagenet' or "
                    "'data', or normalize=None if [0, 1] is right (of the command adopt: --normalize)")  # fmt: skip
            warnings.warn(note, PeerbayesWarning, stacklevel=2)
    if stats is None:
        setattr(network, _SETTLED, True)
    else:
        put_in_front(network, stats, device)


def read_choice(words: str) -> Choice:
    """Return the choice that ``auto``, ``imagenet``, ``data``, ``none`` or ``MEAN,STD`` names.

    Args:
        words: ``MEAN,STD`` are two numbers for all channels, or a mean for each channel and then a deviation for each.

    Example:
        >>> read_choice("none"), read_choice("0.5,0.25")
        (None, (0.5, 0.25))
    """
    if words in ("auto", *get_args(Statistics)):
        return cast(Choice, words)
    if words == "none":
        return None
    try:
        numbers = [float(number) for number in words.split(",")]
    except ValueError:
        numbers = []
    if not numbers or len(numbers) % 2:
        raise InputError(
            f"normalize is '{words}', expected auto, {', '.join(get_args(Statistics))}, none, or MEAN,STD: two "
            "numbers, or the means of all channels and then their deviations"
        )
    half = len(numbers) // 2
    return (numbers[0], numbers[1]) if half == 1 else (numbers[:half], numbers[half:])


def choice_in_words(normalize: Choice) -> str:
    """Return what `read_choice` reads as a choice.

    Args:
        normalize: see `normalised`.

    Example:
        >>> choice_in_words(None), choice_in_words((0.5, 0.25))
        ('none', '0.5,0.25')
    """
    if normalize is None or isinstance(normalize, str):
        return normalize or "none"
    parts = (part if isinstance(part, Sequence) else [part] for part in normalize)
    return ",".join(str(float(number)) for part in parts for number in part)


@torch.no_grad()
def change_own(network: nn.Module, normalize: Choice, inputs: Inputs) -> None:
    """Let a network that brings a `Normalize` along normalise as it is asked to, in place; ``"auto"`` changes nothing.

    Args:
        network: ours, or ``timm/NAME``.
        normalize: see `normalised`.
        inputs: of the data.
    """
    stats: Stats | None = ((0.0,), (1.0,)) if normalize is None else _chosen(normalize, inputs)
    for module in network.modules() if stats is not None else ():
        if isinstance(module, Normalize):
            for tensor, values in zip((module.mean, module.std), cast(Stats, stats), strict=True):
                tensor.copy_(torch.tensor(values).view(1, -1, 1, 1))


def _chosen(normalize: Any, inputs: Inputs) -> Stats | None:
    """Return the statistics that were asked for; None where they are left to the network."""
    if normalize is None or (isinstance(normalize, str) and normalize == "auto"):
        return None
    if inputs.tokens:
        raise InputError("normalize is for images, but the data are texts")
    channels = inputs.shape[0]
    if isinstance(normalize, str):
        if normalize not in get_args(Statistics):
            raise InputError(f"normalize is '{normalize}', expected 'auto', 'imagenet', 'data', (mean, std) or None")
        stats = IMAGENET_STATS if normalize == "imagenet" else (inputs.mean, inputs.std)
    else:
        try:
            each = [part if hasattr(part, "__len__") else [part] * channels for part in normalize]
            mean, std = (tuple(map(float, part)) for part in each)
        except (TypeError, ValueError):
            raise InputError(f"normalize is {normalize!r}, expected (mean, std), a number a channel each") from None
        if not all(map(math.isfinite, (*mean, *std))) or min(std, default=0) <= 0:
            raise InputError(f"normalize is {normalize!r}, expected finite means, and deviations above 0")
        stats = mean, std
    if not len(stats[0]) == len(stats[1]) == channels:
        raise InputError(f"normalize has {len(stats[0])} means and {len(stats[1])} deviations, but images have "
                         f"{channels} channel{'s' * (channels > 1)}")  # fmt: skip
    return stats


# ---- what is known of a network --------------------------------------------------------------------------------------


def own_statistics(network: nn.Module) -> Stats | None:
    """Return mean and deviation that timm notes for a network, or ImageNet's for one of torchvision; else None."""
    for module in network.modules():
        about = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
        if about is not None:
            about = about if isinstance(about, Mapping) else vars(about)
            mean, std = about.get("mean"), about.get("std")
            if isinstance(mean, tuple | list) and isinstance(std, tuple | list):
                return tuple(map(float, mean)), tuple(map(float, std))
        if any(base.__module__.startswith("torchvision.models.") for base in type(module).__mro__):
            return IMAGENET_STATS
    return None


def looks_trained(network: nn.Module, tensors: Mapping[str, Tensor]) -> bool | None:
    """Return whether layers that normalise have left their initial state; None where there are none.

    Statistics of batch-norm begin as 0 and 1, scales and shifts of any such layer as one number each.

    Args:
        network: any module.
        tensors: its parameters by name.
    """
    seen = False
    for name, module in network.named_modules():
        mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
        if isinstance(mean, Tensor) and isinstance(var, Tensor):
            moved = bool(mean.any()) or bool((var != 1).any())
        elif "norm" in type(module).__name__.lower():
            parts = [tensors[key] for leaf in ("weight", "bias") if (key := f"{name}.{leaf}") in tensors]
            if not parts:
                continue
            moved = any(part.numel() > 1 and bool(part.min() != part.max()) for part in parts)
        else:
            continue
        if moved:
            return True
        seen = True
    return False if seen else None


@torch.no_grad()
def normalises_itself(
    network: nn.Module, shape: tuple[int, ...], run: Callable[[Tensor], Any], device: torch.device | None = None
) -> bool:
    """Return whether what arrives at a network's first layer with weights has left the [0, 1] of the images.

    Args:
        network: from images to logits.
        shape: of an image.
        run: runs the network.
        device: where it is.
    """
    if normalization_of(network) is not None or any(isinstance(module, Normalize) for module in network.modules()):
        return True
    seen: list[Tensor] = []

    def look(_module: nn.Module, given: tuple[Any, ...]) -> None:
        if not seen and given and isinstance(given[0], Tensor) and given[0].is_floating_point():
            seen.append(given[0].detach())

    layers = [module for module in network.modules() if module._parameters and not any(module.children())]
    hooks = [module.register_forward_pre_hook(look) for module in layers]
    images = torch.linspace(0, 1, 2 * math.prod(shape), device=device).view(2, *shape)
    try:
        with evaluating(network), torch.random.fork_rng(devices=[]):
            run(images)
    except Exception:  # what a network can't take is said where it is trained
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return bool(seen) and bool(seen[0].numel()) and not bool((seen[0] > -1e-3).all() & (seen[0] < 1 + 1e-3).all())


# ---- in front of a network -------------------------------------------------------------------------------------------


def normalization_of(network: nn.Module) -> Stats | None:
    """Return mean and deviation that were put in front of a network; None where nothing was."""
    stats: Stats | None = getattr(network, _STATS, None)
    return stats


def describe(network: nn.Module) -> dict[str, Stats | None]:
    """Return what `restore` makes a network of that has its images normalised as this one; nothing where it is open."""
    stats = normalization_of(network)
    return {"normalize": stats} if stats is not None or getattr(network, _SETTLED, False) else {}


def restore(network: nn.Module, about: Mapping[str, Any]) -> None:
    """Put in front of a network what `describe` said, in place.

    Args:
        network: from images to logits.
        about: what `describe` returned.
    """
    if about.get("normalize") is not None:
        put_in_front(network, about["normalize"])
    elif "normalize" in about:
        setattr(network, _SETTLED, True)


def carry_over(source: nn.Module, network: nn.Module) -> None:
    """Put in front of a network what is in front of one that its weights come from, in place.

    Args:
        source: the network that the weights come from.
        network: the network that has them now; where it normalises its images already, it stays as it is.
    """
    if normalization_of(network) is None:
        restore(network, describe(source))


def put_in_front(network: nn.Module, stats: Stats, device: torch.device | None = None) -> None:
    """Let a network normalise its images first, in place; the names of its tensors stay what they are.

    Args:
        network: from normalised images to logits.
        stats: mean and deviation by channel, of images in [0, 1].
        device: where to keep them.
    """
    mean, std = (tuple(map(float, part)) for part in stats)
    if normalization_of(network) is None:
        network.__class__ = _normalising(type(network))
    setattr(network, _STATS, (mean, std))
    # Buffers, not a module: containers run all that they contain. In no state dict: names and sizes stay as they are.
    for name, values in ((_MEAN, mean), (_STD, std)):
        network.register_buffer(name, torch.tensor(values, device=device).view(1, -1, 1, 1), persistent=False)


def _normalising(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of networks that are those of a class but for their images, one for each class."""
    if kind in _KINDS:
        return _KINDS[kind]

    def forward(self: nn.Module, x: Tensor) -> Any:
        return kind.forward(self, (x - getattr(self, _MEAN)) / getattr(self, _STD))

    def reduced(self: nn.Module, _protocol: int) -> tuple[Any, ...]:
        return _blank, (kind,), self.__dict__.copy()

    about = {"forward": forward, "__reduce_ex__": reduced, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return _KINDS.setdefault(kind, type(kind.__name__, (kind,), about))


def _blank(kind: type[nn.Module]) -> nn.Module:
    made = _normalising(kind)
    return made.__new__(made)
