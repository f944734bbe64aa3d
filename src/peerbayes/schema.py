"""Define validated settings: strict types, and an error that names the nearest key for an unknown one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from peerbayes.errors import InputError, nearest

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeInt = Annotated[int, Field(ge=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]


class Table(BaseModel):
    """Base of tables read from files: types are checked, unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, validate_default=True)

    @classmethod
    def parse(cls, given: Any, origin: str) -> Self:
        """Validate a table; report the first fault as one sentence.

        Args:
            given: the table.
            origin: where it comes from: a file or key, which begins the sentence.

        Raises:
            InputError: the table is invalid.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise InputError(f"{origin}: {_sentence(error, given)}") from None


class Strict(Table):
    """Base of settings tables: unknown keys and numbers that are not finite are errors.

    ``"none"`` stands for None where that is the default.
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
        # TOML has no null: "none" stands for None where that is the default.
        absent = {key for key, value in given.items() if value == "none" and cls.model_fields[key].default is None}
        return {key: None if key in absent else value for key, value in given.items()}

    @classmethod
    def _hint(cls, key: str, given: dict[str, Any]) -> str:
        near = nearest(key, cls.model_fields)
        absent = [name for name, field in cls.model_fields.items() if field.is_required() and name not in given]
        # If a required key is missing, a similar optional key was hardly meant: list all keys.
        return near if not absent or any(f"'{name}'" in near for name in absent) else nearest("", cls.model_fields)


def fields_of(made: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return type and default (``...`` for none) of the arguments that a function or class takes by keyword.

    Args:
        made: whose signature declares them, with bounds in its annotations, such as `PositiveInt`.
    """
    hints = get_type_hints(made, include_extras=True)
    return {
        name: (hints.get(name, type(argument.default)), ... if argument.default is argument.empty else argument.default)
        for name, argument in inspect.signature(made).parameters.items()
        if name != "self" and argument.kind in (argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD)
    }


def fault(sentence: str, key: str) -> PydanticCustomError:
    """Return the error that a validator of a table raises about one of its keys.

    Args:
        sentence: what is wrong.
        key: whose value is at fault.
    """
    details = {"type": "value_error", "loc": (key,), "msg": sentence, "input": None}
    return PydanticCustomError("nested", "{message}", {"message": sentence, "fault": details})


def nested(error: ValidationError, location: str | None, given: Any) -> PydanticCustomError:
    """Return the error that a validator raises when a table inside its own fails another schema.

    Args:
        error: the other schema's error.
        location: key of the inner table; None where it is the validated value itself.
        given: the inner table.
    """
    fault = _first_fault(error, given)
    fault = {**fault, "loc": fault["loc"] if location is None else (location, *fault["loc"])}
    return PydanticCustomError("nested", "{message}", {"message": str(fault["msg"]), "fault": fault})


def _first_fault(error: ValidationError, given: Any) -> dict[str, Any]:
    faults: list[dict[str, Any]] = [{**fault} for fault in error.errors()]
    for index, fault in enumerate(faults):
        if fault["type"] == "nested":
            inner = fault["ctx"]["fault"]
            faults[index] = {**inner, "loc": (*fault["loc"], *inner["loc"])}

    # Unknown keys first: a misspelt key often causes the other faults. Of a union's branches, the one that
    # fitted furthest was meant.
    def rank(fault: Mapping[str, Any]) -> tuple[bool, int, bool]:
        return fault["type"] != "unknown_key", -len(_parts(fault, given)), fault["type"] != "value_error"

    return min(faults, key=rank)


def _sentence(error: ValidationError, given: Any) -> str:
    fault = _first_fault(error, given)
    location = ".".join(_parts(fault, given))
    if fault["type"] == "unknown_key":
        return f"{location} {fault['msg']}" if location else str(fault["msg"])
    if fault["type"] == "missing":
        return f"'{location}' is missing"
    if fault["type"] == "union_tag_invalid":
        kind, given = fault["ctx"]["discriminator"].strip("'"), fault["ctx"]["tag"]
        kinds = fault["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f"{location}.{kind}: there is no {kind} '{given}'{nearest(given, kinds)}"
    message = str(fault["msg"]).removeprefix("Value error, ").removesuffix(" or object to extract fields from")
    text = f"{location}: " * bool(location) + message[0].lower() + message[1:]
    # Our own sentences name the value; a whole table would drown the message.
    explicit = fault["type"] == "value_error" or isinstance(fault["input"], dict)
    return text if explicit else f"{text}, got {fault['input']!r}"


def _parts(fault: Mapping[str, Any], given: Any) -> list[str]:
    # Pydantic's location also names the branches of unions, which are not keys.
    parts, node = [], given
    *before, last = fault["loc"] or (None,)
    for part in (*before, last):
        is_key = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if is_key:
            assert node is not None
            node = node[part]
        if is_key or (fault["type"] == "missing" and part is last):
            parts.append(str(part))
    return parts
