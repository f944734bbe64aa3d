"""Terms by name. A term is a function of a step and a peer that returns one scalar."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, get_type_hints, overload

import torch
from pydantic import create_model
from torch import Tensor, nn

from peerbayes.errors import InputError, nearest
from peerbayes.importing import imported
from peerbayes.schema import Strict
from peerbayes.terms.step import Batch, Step


@dataclass(frozen=True)
class Shapes:
    """What a term's helper can know when it is built: the features' shapes by layer, and the number of classes."""

    features: Mapping[str, torch.Size]
    classes: int


class TermFunction(Protocol):
    """``term(step, peer, **options) -> scalar``."""

    def __call__(self, step: Step, peer: str, **options: Any) -> Tensor: ...


F = TypeVar("F", bound=Callable[..., Tensor])
ModuleBuilder = Callable[[Shapes, Mapping[str, Any]], nn.Module | None]


@dataclass(frozen=True)
class Term:
    """A registered term: its function, a schema of its options, and what `term` was told of it."""

    name: str
    function: TermFunction
    schema: type[Strict]
    build: ModuleBuilder | None = None
    between_peers: bool = False

    def value(self, batch: Batch, peer: str, options: Mapping[str, Any]) -> Tensor:
        """Return the term's scalar for one peer."""
        value = self.function(Step(batch, peer, self.name), peer, **options)
        if not isinstance(value, Tensor) or value.dim():
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"returned {got}, expected a scalar")
        return value


_TERMS: dict[str, Term] = {}
_BY_PLACE: dict[tuple[str, str], Term] = {}  # by module and name there: two modules may have terms of one name


@overload
def term(function: F) -> F: ...
@overload
def term(*, build: ModuleBuilder | None = None, between_peers: bool = False) -> Callable[[F], F]: ...
def term(function: Any = None, *, build: ModuleBuilder | None = None, between_peers: bool = False) -> Any:
    """Make a function available in recipes under its name, and as ``package.module:name`` wherever it can be imported.

    The function takes ``(step, peer, *, options...)`` and returns one scalar; its keyword-only arguments, with their
    annotations and defaults, are the term's options in a recipe.

    Args:
        function: the term.
        build: makes a trainable helper for a peer, reached as ``step.module(peer)``; its parameters join that peer's
            optimiser for the stage. A helper whose attribute ``shared`` is true serves all peers. Its attribute
            ``scales`` names the parameters that are scales, which weight decay leaves alone.
        between_peers: it compares a peer with others, so a peer that is alone has nothing of it, and is told so.
    """
    if function is None:
        return lambda decorated: _register(decorated, build, between_peers)
    return _register(function, build, between_peers)


def _register(function: Any, build: ModuleBuilder | None, between_peers: bool) -> Any:
    name = function.__name__
    packaged = _place(function)[0].startswith("peerbayes.")
    if name in _TERMS and _place(_TERMS[name].function)[0].startswith("peerbayes.") and not packaged:
        raise InputError(f"there is a term '{name}' already, which recipes are made of; choose another name")
    parameters = inspect.signature(function).parameters.values()
    hints = get_type_hints(function, include_extras=True)  # with the bounds that annotations carry
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kind = hints.get(parameter.name, type(parameter.default))
            fields[parameter.name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    schema = create_model(name, __base__=Strict, **fields)
    _TERMS[name] = _BY_PLACE[_place(function)] = Term(name, function, schema, build, between_peers)
    return function


def _place(function: Any) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


def find(name: str) -> Term:
    """Return a term by name, or by ``package.module:name``, which is imported and is the term's name then."""
    if ":" in name:
        registered = _BY_PLACE.get(_place(imported(name, "term")))
        if registered is None:
            raise InputError(f"term '{name}' is not one: put @peerbayes.term above the function")
        return replace(registered, name=name)
    if name not in _TERMS:
        raise InputError(f"there is no term '{name}'{nearest(name, _TERMS)}")
    return _TERMS[name]


def names() -> list[str]:
    """Return the names of all terms."""
    return sorted(_TERMS)
