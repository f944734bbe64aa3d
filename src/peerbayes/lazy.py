"""Import a package's public names when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use.

    Args:
        package: its name.
        homes: by public name, the module below ``peerbayes`` that defines it; a module's own name for the module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = importlib.import_module(f"peerbayes.{homes[name]}")
        return module if homes[name].endswith(f".{name}") or homes[name] == name else getattr(module, name)

    return get, lambda: sorted(homes)
