"""Kinds of posteriors by name, and their options in recipes, which are what their constructors take."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import create_model, model_validator
from torch import nn

from peerbayes.errors import InputError, nearest
from peerbayes.importing import imported
from peerbayes.schema import Strict, fields_of

if TYPE_CHECKING:
    from peerbayes.data.splits import Split
    from peerbayes.posteriors.base import Posterior

KINDS = ("point", "mean_field", "rank_one", "swag", "laplace", "mc_dropout")
# where the kinds of posteriors are that are imported when they are first asked for
_MODULES = {kind: f"peerbayes.posteriors.{kind}" for kind in KINDS}
_MODULES |= {"point": "peerbayes.posteriors.base", "shared": "peerbayes.codebook.shared"}
_MEAN_FIELD = ("bayesian", "gaussian", "variational")  # what a mean-field posterior is called elsewhere
GIVEN = ("network", "bayesian", "start_from", "seed", "name")  # what a run gives a posterior


class PosteriorOptions(Strict):
    """Options of a posterior in a recipe.

    Attributes:
        kind: which posterior; says what else the table may hold.
    """

    kind: str

    posterior_class: ClassVar[type[Posterior]]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self.posterior_class.check_options(self.model_dump(exclude={"kind"}))
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that the posterior is built with."""
        return self.posterior_class.arguments_of(self.model_dump(exclude={"kind"}))

    def varies(self) -> bool:
        """Return whether posteriors of these options predict by draws that differ."""
        return self.posterior_class.varies(self.model_dump(exclude={"kind"}))

    def needs_start(self) -> str:
        """Return why a peer of these options has to start from something; "" where it need not."""
        return self.posterior_class.needs_start(self.model_dump(exclude={"kind"}))


class PosteriorKind:
    """A class of posteriors with a name of its own, under which recipes and files know it."""

    kind: ClassVar[str]
    in_words: ClassVar[str] = ""  # what a model card says of it; by default the kind
    stochastic: ClassVar[bool]
    made_of_posterior: ClassVar[bool] = False  # whether it is built of a trained posterior, not of a network
    _kinds: ClassVar[dict[str, type[Posterior]]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "kind" in cls.__dict__:  # a subclass that only changes behaviour must not take over its parent's files
            PosteriorKind._kinds[cls.kind] = cls  # type: ignore[assignment]  # `Posterior` is the only class in between

    @staticmethod
    def of_kind(kind: str) -> type[Posterior]:
        """Return the posteriors' class of a kind, such as ``mean_field``.

        A class of one's own is found under its ``kind`` once its module has been imported; where that is
        ``package.module:Class``, it is imported.
        """
        if kind in _MODULES:
            importlib.import_module(_MODULES[kind])
        elif ":" in kind and kind not in PosteriorKind._kinds:
            imported(kind, "posterior")
        if kind not in PosteriorKind._kinds:
            meant = "; did you mean 'mean_field', a Gaussian a weight?" if kind in _MEAN_FIELD else ""
            known = {*_MODULES, *PosteriorKind._kinds}
            raise InputError(f"there is no kind '{kind}'{meant or nearest(kind, known)}")
        return PosteriorKind._kinds[kind]

    @classmethod
    @functools.cache
    def recipe_options(cls) -> type[PosteriorOptions]:
        """Return the schema of its options in a recipe."""
        fields: dict[str, Any] = {"kind": (Literal[cls.kind], ...), **cls.option_fields()}
        made = create_model(cls.kind, __base__=PosteriorOptions, **fields)
        made.posterior_class = cls  # type: ignore[assignment]  # `Posterior` is the only class in between
        return made

    @classmethod
    def option_fields(cls) -> dict[str, tuple[Any, Any]]:
        """Return type and default of each option in a recipe: what the constructor takes, but for what a run gives."""
        return {name: field for name, field in fields_of(cls.__init__).items() if name not in GIVEN}

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that are each valid but contradict each other, by a `ValueError`."""

    @classmethod
    def arguments_of(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the constructor that a recipe's options mean."""
        return dict(options)

    @classmethod
    def needs_start(cls, options: Mapping[str, Any]) -> str:  # noqa: ARG003
        """Return why a peer of these options has to start from something; "" where it need not."""
        return ""

    @classmethod
    def stand_in(cls, network: nn.Module, options: Mapping[str, Any], seed: int, name: str) -> Posterior:
        """Return what takes its place in checks before what it is made of has been trained.

        For kinds that are made of a posterior, as `made_from` is.

        Args:
            network: any module.
            options: of the recipe.
            seed: with ``name``, where its draws live.
            name: the peer's.
        """
        raise NotImplementedError

    @classmethod
    def made_from(
        cls, posterior: Posterior, network: nn.Module, options: Mapping[str, Any], split: Split, seed: int, name: str
    ) -> Posterior:
        """Make it of a trained posterior.

        Args:
            posterior: trained; it is not changed.
            network: of the same architecture.
            options: of the recipe.
            split: training inputs.
            seed: with ``name``, where its draws live.
            name: the peer's.
        """
        raise NotImplementedError

    @classmethod
    def varies(cls, options: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return whether posteriors of these options predict by draws that differ."""
        return cls.stochastic
