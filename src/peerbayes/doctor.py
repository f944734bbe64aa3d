"""What is installed and found here, and what to do about what is not; it works where torch does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peerbayes import __version__
from peerbayes.errors import InputError, reason
from peerbayes.reports.record import Record
from peerbayes.showing import aligned

MODULES = {"scikit-learn": "sklearn", "pillow": "PIL"}  # how packages are imported that go by another name
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;.*extra == ['\"]([\w-]+)['\"].*)?")
GIB = 2**30


def examine(root: str | Path | None = None) -> Record:
    """Return versions of Python, of all that peerbayes needs and can use, devices, data sets, and what is missing.

    Args:
        root: data root.

    Returns:
        a record; ``works`` is false where something that is required is missing, too old, too new or broken, and
        ``missing`` says what, and the line that installs it.
    """
    packages = list(_packages())
    python = {"version": platform.python_version(), "wanted": _wanted_python(), "executable": sys.executable}
    missing = [
        {
            "what": row["name"],
            "why": row["problem"],
            "line": f"pip install '{row['name']}{row['wanted']}'",
            "required": True,
        }
        for row in packages
        if row["problem"] and row["extra"] is None
    ]
    if not _fits(python["version"], python["wanted"]):
        why = f"is {python['version']}"
        missing.append({"what": "Python", "why": why, "line": f"use Python {python['wanted']}", "required": True})
    works = not missing
    for extra in dict.fromkeys(row["extra"] for row in packages if row["extra"] is not None):
        lacking = [row for row in packages if row["extra"] == extra and row["problem"]]
        if lacking:
            why = ", ".join(f"{row['name']} {row['problem']}" for row in lacking)
            line = f"pip install 'peerbayes[{extra}]'"
            missing.append({"what": f"extra {extra}", "why": why, "line": line, "required": False})
    return {
        "peerbayes": __version__,
        "python": python,
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "devices": _devices(),
        "data": _data(root),
        "missing": missing,
        "works": works,
    }


def text(record: Record) -> str:
    """Return the record as text."""
    rows = record["packages"]
    parts = [f"peerbayes {record['peerbayes']}, Python {record['python']['version']}, {record['platform']}"]
    required = [["required", "here", "wanted", ""]]
    required += [
        [row["name"], row["version"] or "-", row["wanted"], row["problem"] or ""] for row in rows if not row["extra"]
    ]
    parts.append("\n".join(aligned(required, 4)))
    extras = [["extra", ""]]
    for extra in dict.fromkeys(row["extra"] for row in rows if row["extra"]):
        of_extra = [row for row in rows if row["extra"] == extra]
        here = ", ".join(f"{row['name']} {row['version']}" for row in of_extra if not row["problem"])
        lacking = ", ".join(f"{row['name']} {row['problem']}" for row in of_extra if row["problem"])
        install = f"{lacking}: pip install 'peerbayes[{extra}]'" if lacking else ""
        extras.append([extra, "; ".join(filter(None, (here, install)))])
    parts.append("\n".join(aligned(extras, 2)))
    devices = [[device["name"], device["about"]] for device in record["devices"]]
    parts.append("\n".join(aligned([["device", ""], *devices], 2)))
    data = record["data"]
    data_sets = [[name, path or "embedded"] for name, path in data["found"].items()]
    parts.append("\n".join(aligned([["data set", f"looked for in {data['root']}"], *data_sets], 2)))
    if data["absent"]:
        parts[-1] += f"\nnot there: {', '.join(data['absent'])}; --json says what to get"
    broken = [f"{item['what']} {item['why']}: {item['line']}" for item in record["missing"] if item["required"]]
    parts.append("\n".join(broken) or "All that is required is here.")
    return "\n\n".join(parts)


def _packages() -> Iterator[Record]:
    """Yield what the installed peerbayes says that it needs, extras last: version, and what is wrong with it."""
    try:
        lines = importlib.metadata.requires("peerbayes") or []
    except importlib.metadata.PackageNotFoundError:
        yield {"name": "peerbayes", "extra": None, "wanted": "", "version": None, "problem": "is not installed"}
        return
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        assert match is not None, line
        if match[1] == "peerbayes":  # an extra of extras, which are listed themselves
            continue
        name, wanted, extra = match[1], ",".join(sorted(match[2].split(","), reverse=True)), match[3]
        try:
            version: str | None = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        problem = "is not installed" if version is None else None
        if version is not None and not _fits(version, wanted):
            problem = f"is {version}"
        elif version is not None and extra is None:  # extras would take long to import
            try:
                importlib.import_module(MODULES.get(name.lower(), name.replace("-", "_")))
            except Exception as error:  # a broken package may raise anything
                problem = f"can't be imported: {reason(error)}"
        yield {"name": name, "extra": extra, "wanted": wanted, "version": version, "problem": problem}


def _wanted_python() -> str:
    try:
        return str(importlib.metadata.metadata("peerbayes").json.get("requires_python", ""))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fits(version: str, wanted: str) -> bool:
    """Return whether a version is in a range of the two kinds that peerbayes asks for: ``>=`` and ``<``."""

    def numbers(text: str) -> list[int]:
        parts = [int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", text)[0])]
        return parts + [0] * (4 - len(parts))

    bounds = re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    return all((numbers(version) < numbers(end)) == (sign == "<") for sign, end in bounds)


def _devices() -> list[Record]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        import torch
    except Exception:  # said among the packages
        return [{"name": "cpu", "about": f"{cores} cores"}]
    from peerbayes.engine.processes import threads

    rows: list[Record] = [{"name": "cpu", "about": f"{threads(torch.get_num_threads())} on {cores} cores"}]
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        about = f"{torch.cuda.get_device_name(number)}, {total / GIB:.1f} GiB, of which {free / GIB:.1f} are free"
        rows.append({"name": f"cuda:{number}", "about": about, "memory": total})
    if not torch.cuda.is_available():
        build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        driver = "; a driver is here" if shutil.which("nvidia-smi") else ""
        rows.append({"name": "cuda", "about": f"none ({build}{driver})"})
    if torch.backends.mps.is_available():
        rows.append({"name": "mps", "about": "Apple's GPU; --device mps"})
    return rows


def _data(root: str | Path | None) -> dict[str, Any]:
    try:
        from peerbayes.data import data_root, names
        from peerbayes.data.datasets.sources import whereabouts
    except Exception:  # without torch nothing reads data
        return {"root": None if root is None else str(root), "found": {}, "absent": {}}
    folder, present, absent = data_root(root), {}, {}
    for name in names():
        try:
            lies = whereabouts(name, folder)
            present[name] = None if lies is None else str(lies)
        except InputError as error:
            absent[name] = str(error)
    return {"root": str(folder), "exists": folder.is_dir(), "found": present, "absent": absent}
