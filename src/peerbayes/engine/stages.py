"""A stage in progress: its optimisers, terms and their trainable helpers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.engine.optimizers import make_optimizer, rates_on_device
from peerbayes.errors import InputError, within
from peerbayes.math.noise import Address
from peerbayes.posteriors.base import Posterior
from peerbayes.posteriors.parameters import require_same
from peerbayes.posteriors.scales import moved, sigma_gradient
from peerbayes.terms.definition import Shapes, Term
from peerbayes.terms.definition import find as find_term
from peerbayes.terms.step import Batch

if TYPE_CHECKING:
    from peerbayes.recipes import settings

SHARED = "*"  # owner of helpers that serve all peers
T = TypeVar("T")


def of_term(stage: str, term: str) -> AbstractContextManager[None]:
    """Put a term's full key before what is found to be wrong with it inside the block.

    Terms do not say who they are: this is where their faults get a name, whoever asks them.

    Args:
        stage: the stage's key in its recipe.
        term: the term's name.
    """
    return within(f"{stage}.terms.{term}")


class StageState:
    """What a stage adds to the peers: helpers of its terms, and an optimiser an owner.

    Args:
        stage: the settings.
        peers: posteriors by name.
        shapes: shapes of the captured features and number of classes, by peer.
        address: where the helpers' initial values live.
        place: the stage's key in its recipe, for messages.
        train_size: images in the training split.
    """

    def __init__(
        self,
        stage: settings.Stage,
        peers: Mapping[str, Posterior],
        shapes: Mapping[str, Shapes],
        address: Address,
        place: str = "stages.0",
        train_size: int = 1,
    ) -> None:
        self.settings, self.place, self.train_size = stage, place, train_size
        self.terms = [(find_term(name), options) for name, options in stage.terms.items()]
        self.modules: dict[tuple[str, str], nn.Module] = {}
        self.parameters: dict[str, dict[str, nn.Parameter]] = {
            name: {
                n: p
                for n, p in posterior.named_parameters()
                if p.requires_grad and p.numel() and not (stage.freeze_rest and n == "rest")
            }
            for name, posterior in peers.items()
        }
        # What an owner's optimiser leaves undecayed, and which of it are scales.
        self._undecayed = {name: posterior.undecayed | posterior.scales for name, posterior in peers.items()}
        self._scales = {name: posterior.scales for name, posterior in peers.items()}
        for term, options in self.terms:
            self._build(term, options, peers, shapes, address)
        device = next(iter(peers.values())).device
        self.lr = stage.optimizer.lr
        self._ratio = (stage.optimizer.scale_lr or self.lr) / self.lr
        # All optimisers hold these: of everything, and of scales.
        self._rates = [torch.tensor(self.lr * factor, device=device) for factor in (1.0, self._ratio)]
        self._on_gpu = rates_on_device(device)
        self._gaussians = {name: self._known_gaussians(name, posterior) for name, posterior in peers.items()}
        in_sigma = stage.optimizer.scale_space == "sigma"
        self._in_sigma = {name: posterior.rhos if in_sigma else set() for name, posterior in peers.items()}
        self.optimizers = {
            owner: self._optimizer(owner, parameters) for owner, parameters in self.parameters.items() if parameters
        }

    def _optimizer(self, owner: str, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Build an owner's optimiser: parameters in groups by whether they decay, and whether they are scales."""
        undecayed, scales = self._undecayed[owner], self._scales[owner]
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            groups.setdefault((name in undecayed, name in scales), []).append(parameter)
        found: list[dict[str, Any]] = []
        for (alone, scale), members in groups.items():
            rate = self._rates[scale] if self._on_gpu else self.lr * (self._ratio if scale else 1.0)
            found.append({"params": members, "lr": rate, "scale": scale} | ({"weight_decay": 0.0} if alone else {}))
        rhos = {parameters[mean]: parameters[rho] for mean, rho in self._gaussians.get(owner, {}).items()}
        return make_optimizer(self.settings.optimizer, found, found[0]["lr"], rhos, self.train_size)

    def _known_gaussians(self, peer: str, posterior: Posterior) -> Mapping[str, str]:
        """Return what `ivon` moves of a peer; refuse peers of which it would move nothing, or wrongly."""
        if self.settings.optimizer.name == "ivon" and not posterior.gaussians:
            raise InputError(
                f"{self.place}.optimizer: ivon learns Gaussians of a mean_field posterior with noise = 'gaussian' and "
                f"prior = 'normal', and peer '{peer}' is none ({posterior.kind}); take sgd or adam"
            )
        return posterior.gaussians

    def _build(
        self,
        term: Term,
        options: Mapping[str, Any],
        peers: Mapping[str, Posterior],
        shapes: Mapping[str, Shapes],
        address: Address,
    ) -> None:
        if term.build is None:
            return
        shared: nn.Module | None = None
        module: nn.Module | None = None
        for name, posterior in peers.items():
            if shared is None:
                with seeded(address.sub(f"{term.name}/{name}")), of_term(self.place, term.name):
                    module = term.build(shapes[name], options)
                if module is None:
                    continue
                module.to(posterior.device)
                shared = module if getattr(module, "shared", False) else None
                owner = SHARED if shared is not None else name
                own = {f"{term.name}.{n}": p for n, p in module.named_parameters() if p.requires_grad}
                self.parameters.setdefault(owner, {}).update(own)
                scales = {f"{term.name}.{n}" for n in getattr(module, "scales", ())}
                for names in (self._undecayed, self._scales):
                    names[owner] = names.get(owner, set()) | scales
            assert module is not None
            self.modules[term.name, name] = module

    def of_terms(self, ask: Callable[..., T], batch: Batch, peer: str) -> list[T]:
        """Return ``ask(term, options, batch, peer)`` for every term, in the recipe's order.

        Args:
            ask: called for each term.
            batch: what terms see of the step.
            peer: the name of the peer whose terms they are.
        """
        answers = []
        for term, options in self.terms:
            with of_term(self.place, term.name):
                answers.append(ask(term, options, batch, peer))
        return answers

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of every optimiser."""
        if value == self.lr:
            return
        self.lr = value
        for rate, factor in zip(self._rates, (1.0, self._ratio), strict=True):
            rate.fill_(value * factor)
        if self._on_gpu:
            return
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = value * (self._ratio if group["scale"] else 1.0)

    def update(self, owners: Iterable[str]) -> None:
        """Let the owners' optimisers step, and clear their gradients."""
        for owner in owners:
            if owner in self.optimizers:
                if self.settings.optimizer.clip:
                    nn.utils.clip_grad_norm_(self.parameters[owner].values(), self.settings.optimizer.clip)
                with self._scales_as_sigma(owner):
                    self.optimizers[owner].step()
                self.optimizers[owner].zero_grad()

    @contextlib.contextmanager
    def _scales_as_sigma(self, owner: str) -> Iterator[None]:
        """Let parameters ρ hold σ, and their gradients be those by σ, inside the block, where the recipe wants that."""
        names, before = self._in_sigma.get(owner, set()), []
        with torch.no_grad():
            for name, parameter in self.parameters[owner].items():
                if name in names and parameter.grad is not None:
                    before.append((parameter, parameter.detach().clone()))
                    parameter.grad = sigma_gradient(parameter, parameter.grad)
                    parameter.copy_(F.softplus(parameter))
        yield
        with torch.no_grad():
            for parameter, rho in before:
                parameter.copy_(moved(rho, parameter))

    def gradients(self, owner: str) -> list[Tensor]:
        """Return the gradients of an owner's parameters."""
        gradients = (parameter.grad for parameter in self.parameters.get(owner, {}).values())
        return [grad for grad in gradients if grad is not None]

    def average_shared_gradients(self, count: int) -> None:
        """Divide the gradients of shared helpers, which every peer has added to, by the number of peers."""
        for parameter in self.parameters.get(SHARED, {}).values():
            if parameter.grad is not None:
                parameter.grad.div_(count)

    def state(self) -> dict[str, Tensor]:
        """Return helpers and optimiser moments by name."""
        tensors = {
            f"module/{term}/{peer}/{name}": tensor
            for (term, peer), module in self.modules.items()
            for name, tensor in module.state_dict().items()
        }
        for owner in self.optimizers:
            for name, slots in self.moments(owner).items():
                tensors |= {f"optimizer/{owner}/{name}/{slot}": value for slot, value in slots.items()}
        return tensors

    def moments(self, owner: str) -> dict[str, dict[str, Tensor]]:
        """Return what an owner's optimiser remembers of its parameters, by name and slot."""
        state = self.optimizers[owner].state if owner in self.optimizers else {}
        return {
            name: {slot: value for slot, value in state.get(parameter, {}).items() if isinstance(value, Tensor)}
            for name, parameter in self.parameters.get(owner, {}).items()
        }

    def mean_gradient(self, owner: str, name: str) -> Tensor | None:
        """Return a running mean of a parameter's gradient; None where the optimiser remembers none.

        Args:
            owner: of the parameter: a peer, or ``*`` for what serves all peers.
            name: of the parameter.
        """
        slots = self.moments(owner).get(name, {})
        if "momentum_buffer" in slots:  # a sum with falling weights
            return slots["momentum_buffer"] * (1 - self.settings.optimizer.momentum)
        return slots.get("exp_avg")

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `state` returned."""
        for (term, peer), module in self.modules.items():
            prefix = f"module/{term}/{peer}/"
            given = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            require_same(given, module.state_dict(), f"checkpoint, {prefix.removesuffix('/')}")
            module.load_state_dict(given)
        for owner, optimizer in self.optimizers.items():
            every = {n.rpartition("/")[2] for n in tensors if n.startswith(f"optimizer/{owner}/")}
            for name, parameter in self.parameters[owner].items():
                prefix = f"optimizer/{owner}/{name}/"
                slots = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
                for slot in sorted(every - slots.keys()) if slots else ():
                    raise InputError(f"checkpoint: has no tensor '{prefix}{slot}'")
                for slot, tensor in slots.items():
                    if tensor.shape not in (parameter.shape, torch.Size()):
                        shape, expected = tuple(tensor.shape), tuple(parameter.shape)
                        raise InputError(f"checkpoint, tensor '{prefix}{slot}': has shape {shape}, expected {expected}")
                optimizer.state[parameter] = {slot: t.to(parameter.device, copy=True) for slot, t in slots.items()}
                if not slots:
                    del optimizer.state[parameter]


class seeded:
    """Give torch's global generators a state that is a function of an address, and put the old state back."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def __enter__(self) -> None:
        self._fork = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
        self._fork.__enter__()
        set_global_seed(self.address)

    def __exit__(self, *details: Any) -> None:
        self._fork.__exit__(*details)


def set_global_seed(address: Address) -> None:
    """Seed torch's global generators from an address: dropout and initialisers of any network follow it."""
    number = int(address.number)
    # Without an accelerator `torch.manual_seed` writes down who called it, for one that it may find later.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed((address.key + number * 0x9E3779B97F4A7C15) & ((1 << 63) - 1))
