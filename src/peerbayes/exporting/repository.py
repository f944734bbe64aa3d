"""The layout of an export: a run folder without its history, which is a model repository of the Hugging Face hub, too.

README.md          the model card
config.json        what the model is, for the hub and for programs without peerbayes
model.onnx         or model.pt2: the program, if one was asked for
model.safetensors  the posterior (of several peers: weights-PEER.safetensors)
recipe.toml        as of the run, but for where its files lay
run.json           as of the run
vocabulary.json    of texts; tokenizer.json, too, where they are cut by one
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerbayes.posteriors import storage
from peerbayes.recipes.recipe import without_folders
from peerbayes.runs.run import Run


def config_of(about: Mapping[str, Any], run: Run | None) -> str:
    """Return ``config.json``: what a program's metadata say, and what the hub looks for.

    Args:
        about: the metadata.
        run: that the weights are of, if that is known.
    """
    networks = [] if run is None else [peer.network for peer in run.recipe.peers if peer.name in about["peers"]]
    names = about["class_names"] or [str(number) for number in range(about["classes"])]
    config = {
        "library_name": "peerbayes",
        "model_type": "peerbayes",
        "architectures": list(dict.fromkeys(networks)),
        "num_labels": about["classes"],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    return json.dumps(config | dict(about), indent=1) + "\n"


def write_run(folder: Path, run: Run, peers: Sequence[str]) -> None:
    """Write what `peerbayes.load` opens a run by, beside its weights.

    Args:
        folder: where to.
        run: the run.
        peers: of which peers; a run of one has the temperature and the certificate of that one.
    """
    chosen = [peer for peer in run.recipe.peers if peer.name in peers]
    recipe = without_folders(run.recipe.model_copy(update={"peers": chosen}))
    whole = len(peers) == len(run)
    about = {key: value for key, value in run.about.items() if whole or key not in ("temperature", "certificate")}
    storage.write_bytes(folder / "run.json", json.dumps(about, indent=1).encode())
    vocabulary = run.vocabulary
    if vocabulary is not None:
        storage.write_bytes(folder / "vocabulary.json", vocabulary.to_json().encode())
        if vocabulary.kind == "pieces":
            storage.write_bytes(folder / "tokenizer.json", vocabulary.tokenizer.encode())
    storage.write_bytes(folder / "recipe.toml", recipe.to_toml().encode())
