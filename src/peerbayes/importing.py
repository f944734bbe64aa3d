"""What users write themselves, by ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from peerbayes.errors import InputError, reason


def imported(path: str, what: str) -> Any:
    """Return what ``package.module:name`` names; ``what`` it is meant to be, a network say, begins the error."""
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a module may do anything while it is imported
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = "; install it, or name its folder in PYTHONPATH" if absent else ""
        raise InputError(f"{what} '{path}' can't be imported: {reason(error)}{hint}") from error
