"""Register terms by name. A term is a function of a step and a peer that returns one scalar."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, overload

import torch
from pydantic import create_model
from torch import Tensor, nn

from peerbayes.errors import InputError, nearest
from peerbayes.importing import imported
from peerbayes.schema import Strict, fields_of
from peerbayes.terms.step import Batch, Step


@dataclass(frozen=True)
class Shapes:
    """What the builder of a term's trainable helper is given.

    Attributes:
        features: shapes of the features by layer.
        classes: number of classes.

    Example:
        >>> import torch
        >>> from peerbayes.terms import Shapes
        >>> Shapes(features={"stage3": torch.Size([128, 64, 8, 8])}, classes=10).classes
        10
    """

    features: Mapping[str, torch.Size]
    classes: int


class TermFunction(Protocol):
    """Signature of a term: ``term(step, peer, **options) -> scalar``."""

    def __call__(self, step: Step, peer: str, **options: Any) -> Tensor: ...


F = TypeVar("F", bound=Callable[..., Tensor])
ModuleBuilder = Callable[[Shapes, Mapping[str, Any]], nn.Module | None]


@dataclass(frozen=True)
class Term:
    """A registered term: its function, the schema of its options, and what `term` was given.

    Attributes:
        name: its name in recipes.
        function: the term.
        schema: its options.
        build: makes its trainable helper.
        between_peers: whether it compares peers.

    Example:
        >>> from peerbayes.terms import find
        >>> list(find("mutual").schema.model_fields)
        ['weight', 'temperature', 'alpha', 'graph']
    """

    name: str
    function: TermFunction
    schema: type[Strict]
    build: ModuleBuilder | None = None
    between_peers: bool = False

    def value(self, batch: Batch, peer: str, options: Mapping[str, Any]) -> Tensor:
        """Return the term's scalar for one peer.

        Args:
            batch: the batch as all peers have seen it.
            peer: the peer's name.
            options: the term's options.
        """
        value = self.function(Step(batch, peer, self.name), peer, **options)
        if not isinstance(value, Tensor) or value.dim():
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"returned {got}, expected a scalar")
        return value


_TERMS: dict[str, Term] = {}
_BY_PLACE: dict[tuple[str, str], Term] = {}  # by (module, name): two modules may have terms of one name


@overload
def term(function: F) -> F: ...
@overload
def term(*, build: ModuleBuilder | None = None, between_peers: bool = False) -> Callable[[F], F]: ...
def term(function: Any = None, *, build: ModuleBuilder | None = None, between_peers: bool = False) -> Any:
    """Register a function as a term, for recipes, under its name and as ``package.module:name``.

    The function takes ``(step, peer, *, options...)`` and returns one scalar; its keyword-only arguments, with their
    annotations and defaults, are the term's options in a recipe.

    Args:
        function: the term.
        build: makes a trainable helper for a peer, reached as ``step.module(peer)``; its parameters join that peer's
            optimiser for the stage. A helper whose attribute ``shared`` is true serves all peers. Its attribute
            ``scales`` names the parameters that are scales, which weight decay leaves alone.
        between_peers: whether it compares a peer with others: a peer that is alone has nothing of it, and is told so.

    Returns:
        The function itself, or a decorator where only options are given.

    Example:
        >>> import peerbayes
        >>> @peerbayes.term
        ... def confidence(step, peer, *, weight: float = 1.0):
        ...     return weight * step.logits(peer).softmax(-1).amax(-1).mean()
        >>> peerbayes.terms.find("confidence").schema().weight
        1.0
    """
    if function is None:
        return lambda decorated: _register(decorated, build, between_peers)
    return _register(function, build, between_peers)


def _register(function: Any, build: ModuleBuilder | None, between_peers: bool) -> Any:
    name = function.__name__
    packaged = _place(function)[0].startswith("peerbayes.")
    if name in _TERMS and _place(_TERMS[name].function)[0].startswith("peerbayes.") and not packaged:
        raise InputError(f"term '{name}' exists already, and recipes use it; choose another name")
    taken = inspect.signature(function).parameters
    fields: dict[str, Any] = {n: f for n, f in fields_of(function).items() if taken[n].kind is taken[n].KEYWORD_ONLY}
    schema = create_model(name, __base__=Strict, **fields)
    _TERMS[name] = _BY_PLACE[_place(function)] = Term(name, function, schema, build, between_peers)
    return function


def _place(function: Any) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


def find(name: str) -> Term:
    """Return a term by name, or by ``package.module:name``, which is imported and becomes its name.

    Example:
        >>> from peerbayes.terms import find
        >>> find("kl").schema().scheme
        'elbo'
    """
    if ":" in name:
        registered = _BY_PLACE.get(_place(imported(name, "term")))
        if registered is None:
            raise InputError(f"'{name}' is not a term: decorate the function with @peerbayes.term")
        return replace(registered, name=name)
    if name not in _TERMS:
        raise InputError(f"there is no term '{name}'{nearest(name, _TERMS)}")
    return _TERMS[name]


def names() -> list[str]:
    """Return the names of all registered terms, sorted.

    Example:
        >>> from peerbayes.terms import names
        >>> "mutual" in names()
        True
    """
    return sorted(_TERMS)
