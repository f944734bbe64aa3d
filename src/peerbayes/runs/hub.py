"""Repositories of the Hugging Face hub, of which a run is opened: its data files are fetched, never code."""

from __future__ import annotations

import re
from pathlib import Path

from peerbayes.errors import InputError, reason

WANTED = ("*.json", "*.toml", "*.safetensors", "README.md")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(given: str | Path) -> bool:
    """Return whether a text names a repository, ``owner/name``, and not a place below a folder that is here."""
    return isinstance(given, str) and bool(_NAME.fullmatch(given)) and not Path(given.partition("/")[0]).exists()


def fetched(name: str, revision: str | None = None) -> Path:
    """Return the folder of huggingface_hub's cache that holds a repository; what is not there yet is downloaded.

    Args:
        name: ``owner/name``.
        revision: a branch, tag or commit; the main branch by default.

    Raises:
        InputError: there is no such repository, or it can't be reached.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(f"{name}: there is no such folder, and to look for it on the Hugging Face hub needs "
                         "huggingface_hub: pip install 'peerbayes[export]'") from None  # fmt: skip
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(WANTED)))
    except Exception as error:  # of names, of the network, of the hub, of the disk
        raise InputError(f"{name}: there is no such folder, and it can't be had from the Hugging Face hub: "
                         f"{reason(error)}") from error  # fmt: skip
