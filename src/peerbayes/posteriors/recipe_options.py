"""Options of posteriors in recipes: what the constructors of their classes take."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import create_model, model_validator

from peerbayes.schema import Strict, fields_of

if TYPE_CHECKING:
    from peerbayes.posteriors.base import Posterior

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


@functools.cache
def options_of(posterior: type[Posterior]) -> type[PosteriorOptions]:
    """Return the schema of a posterior's options in a recipe, derived from its constructor."""
    fields: dict[str, Any] = {"kind": (Literal[posterior.kind], ...), **posterior.option_fields()}
    made = create_model(posterior.kind, __base__=PosteriorOptions, **fields)
    made.posterior_class = posterior
    return made


def constructor_fields(posterior: type[Posterior]) -> dict[str, tuple[Any, Any]]:
    """Return type and default of what a posterior's constructor takes, but for what a run gives it."""
    return {name: field for name, field in fields_of(posterior.__init__).items() if name not in GIVEN}
