"""Validated settings: strict types, and an unknown key names the nearest known one."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from peerbayes.errors import InputError, nearest


class Strict(BaseModel):
    """The base of every settings table."""

    model_config = ConfigDict(strict=True, frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                text = f"has no key '{key}'{nearest(str(key), cls.model_fields)}"
                raise PydanticCustomError("unknown_key", "{text}", {"text": text})
        return given

    @classmethod
    def parse(cls, given: Any, origin: str) -> Self:
        """Validate a table; the first fault becomes one sentence that begins with ``origin``."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise InputError(f"{origin}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    # Unknown keys first: a misspelt key often causes the other faults.
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "unknown_key")
    fault = faults[0]
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "unknown_key":
        return f"{place} {fault['msg']}" if place else str(fault["msg"])
    if fault["type"] == "missing":
        return f"'{place}' is missing"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{place}: {message[0].lower()}{message[1:]}, got {fault['input']!r}"
