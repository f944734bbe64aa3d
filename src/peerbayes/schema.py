"""Validated settings: strict types, and an unknown key names the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from peerbayes.errors import InputError, nearest


class Table(BaseModel):
    """The base of what is read from files: types are checked, and keys that are not asked for are left alone."""

    model_config = ConfigDict(strict=True, frozen=True, validate_default=True)

    @classmethod
    def parse(cls, given: Any, origin: str) -> Self:
        """Validate a table; the first fault becomes one sentence that begins with ``origin``."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise InputError(f"{origin}: {_sentence(error, given)}") from None


class Strict(Table):
    """The base of every settings table: a key that is not known is a fault, and so is a number that is not finite.

    "none" stands for None where that is the default.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            text = f"input should be a table with keys {', '.join(cls.model_fields)}"
            raise PydanticCustomError("table", "{text}", {"text": text})
        for key in given:
            if key not in cls.model_fields:
                text = f"has no key '{key}'{cls._hint(str(key), given)}"
                raise PydanticCustomError("unknown_key", "{text}", {"text": text})
        # TOML has no word for what is not given, so where that is the default "none" is the word.
        absent = {key for key, value in given.items() if value == "none" and cls.model_fields[key].default is None}
        return {key: None if key in absent else value for key, value in given.items()}

    @classmethod
    def _hint(cls, key: str, given: dict[str, Any]) -> str:
        near = nearest(key, cls.model_fields)
        absent = [name for name, field in cls.model_fields.items() if field.is_required() and name not in given]
        # Where a key that has to be there is not, an optional one that looks alike was hardly meant: all are listed.
        return near if not absent or any(f"'{name}'" in near for name in absent) else nearest("", cls.model_fields)


def nested(error: ValidationError, place: str, given: Any) -> PydanticCustomError:
    """Return the error that a validator raises for a table, at ``place``, that it validates by another schema."""
    fault = _first_fault(error, given)
    fault = {**fault, "loc": (place, *fault["loc"])}
    return PydanticCustomError("nested", "{message}", {"message": str(fault["msg"]), "fault": fault})


def _first_fault(error: ValidationError, given: Any) -> dict[str, Any]:
    faults: list[dict[str, Any]] = [{**fault} for fault in error.errors()]
    for place, fault in enumerate(faults):
        if fault["type"] == "nested":
            inner = fault["ctx"]["fault"]
            faults[place] = {**inner, "loc": (*fault["loc"], *inner["loc"])}

    # Unknown keys first: a misspelt key often causes the other faults. Of the forms that a value may have, the one that
    # fitted furthest was meant.
    def rank(fault: Mapping[str, Any]) -> tuple[bool, int, bool]:
        return fault["type"] != "unknown_key", -len(_parts(fault, given)), fault["type"] != "value_error"

    return min(faults, key=rank)


def _sentence(error: ValidationError, given: Any) -> str:
    fault = _first_fault(error, given)
    place = ".".join(_parts(fault, given))
    if fault["type"] == "unknown_key":
        return f"{place} {fault['msg']}" if place else str(fault["msg"])
    if fault["type"] == "missing":
        return f"'{place}' is missing"
    if fault["type"] == "union_tag_invalid":
        kind, given = fault["ctx"]["discriminator"].strip("'"), fault["ctx"]["tag"]
        known = fault["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f"{place}.{kind}: there is no {kind} '{given}'{nearest(given, known)}"
    message = str(fault["msg"]).removeprefix("Value error, ").removesuffix(" or object to extract fields from")
    text = f"{place}: " * bool(place) + message[0].lower() + message[1:]
    # Sentences of our own name what was given; a whole table would drown the message.
    own = fault["type"] == "value_error" or isinstance(fault["input"], dict)
    return text if own else f"{text}, got {fault['input']!r}"


def _parts(fault: Mapping[str, Any], given: Any) -> list[str]:
    # The names of the forms that a value may have stand in pydantic's location, but are no keys that anybody can set.
    parts, node = [], given
    *before, last = fault["loc"] or (None,)
    for part in (*before, last):
        known = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if known:
            assert node is not None
            node = node[part]
        if known or (fault["type"] == "missing" and part is last):
            parts.append(str(part))
    return parts
