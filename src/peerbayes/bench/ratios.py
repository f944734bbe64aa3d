"""Compute the figures of a record from its timings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from peerbayes.bench.timing import DRAWS, EPOCH, PACKED, PREDICTED, THEIRS, Measured
from peerbayes.errors import InputError, nearest

NEEDS_GPU = "needs a CUDA device"
MEMORY = {engine: f"{engine}_pair_epoch_s" for engine in ("eager", "compiled")}
MEMORY |= {"captured": "pair_epoch_s", "packed3": "packed3_epoch_s"}
RATIOS = {
    "bayesian_over_deterministic": ("bayesian_pair_epoch_s", "deterministic_pair_epoch_s"),
    "speedup_single": ("bayesian_torch_step_ms", "single_step_ms"),
    "speedup_packed": ("bayesian_torch_step_ms", "packed_network_step_ms"),
    "latentbe_over_kd": ("distillation.latentbe_step_ms", "distillation.kd_step_ms"),
    "tdiv_sdiv_over_kd": ("distillation.latentbe_tdiv_sdiv_step_ms", "distillation.kd_step_ms"),
    "moment_draw_over_mean_field": ("sharing.moment_draw_ms", "sharing.mean_field_draw_ms"),
    "hierarchical_draw_over_mean_field": ("sharing.hierarchical_draw_ms", "sharing.mean_field_draw_ms"),
}
for _kind in ("hierarchical", "moment", "cluster"):  # against Bayes by Backprop
    RATIOS[f"{_kind}_step_over_mean_field"] = (f"sharing.{_kind}_step_ms", "sharing.mean_field_step_ms")
    RATIOS[f"{_kind}_predict_over_mean_field"] = (f"sharing.predict_{_kind}_s", "sharing.predict_mean_field_s")
SOURCES = {  # sources of derived figures
    "bayesian_torch_step_ms": THEIRS,
    "packed_network_step_ms": ("packed3_epoch_s",),
    **RATIOS,
    "predict_rate": ("predict_50x10k_s",),
    **{f"peak_memory_gib.{engine}": (key,) for engine, key in MEMORY.items()},
}


def figures_of(keys: Sequence[str], measured: Measured, batch: int) -> dict[str, Any]:
    """Return the figures, with dotted keys as tables, and notes on why one is None.

    Args:
        keys: of all timings.
        measured: the timings made.
        batch: images of a training step.
    """
    flat: dict[str, Any] = {key: measured.get(key, {}).get("median") for key in keys}
    packed, predict = flat["packed3_epoch_s"], flat["predict_50x10k_s"]
    flat["bayesian_torch_step_ms"] = min((flat[key] for key in THEIRS if flat[key] is not None), default=None)
    flat["packed_network_step_ms"] = packed and packed * 1e3 / (EPOCH // batch) / (2 * PACKED)
    for key, (above, below) in RATIOS.items():
        flat[key] = None if flat[above] is None or flat[below] is None else flat[above] / flat[below]
    flat["predict_rate"] = predict and PREDICTED * DRAWS / predict
    for engine, key in MEMORY.items():
        flat[f"peak_memory_gib.{engine}"] = measured.get(key, {}).get("peak_memory_gib")
    record: dict[str, Any] = {"figures": {}, "notes": {}}
    for key, value in flat.items():
        *tables, last = key.split(".")
        reduce(lambda node, name: node.setdefault(name, {}), tables, record["figures"])[last] = value
        if value is None:
            missing = " and ".join(source for source in SOURCES.get(key, ()) if flat[source] is None)
            why = f"needs {missing}" if missing else NEEDS_GPU if key in SOURCES else "not measured"
            record["notes"][key] = measured.get(key, {}).get("failed", why)
    return record


def follows(figure: str, only: Sequence[str], keys: Sequence[str]) -> bool:
    """Return whether a figure is requested, or follows from the timings of requested ones.

    Args:
        figure: its key.
        only: requested keys.
        keys: of all timings.
    """
    return set(needed(figure, keys)) <= {key for name in only for key in needed(name, keys)}


def needed(name: str, keys: Sequence[str]) -> list[str]:
    """Return the timings that a figure, or all figures below a name, need.

    Args:
        name: a figure's key, or the beginning of several.
        keys: of all timings.
    """
    matching = [key for key in (*keys, *SOURCES) if key == name or key.startswith(f"{name}.")]
    if not matching:
        raise InputError(f"there is no figure '{name}'{nearest(name, [*keys, *SOURCES, 'growth'])}")
    sources = [
        [key] if key in keys else [k for source in SOURCES[key] for k in needed(source, keys)] for key in matching
    ]
    return [key for part in sources for key in part]
