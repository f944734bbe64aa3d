"""Pages of the site that are made from the code and from files outside docs/, when it is built.

The recipe reference comes from the schema of recipes, the Python reference from the public names; papers' READMEs,
CONTRIBUTING and CHANGELOG are taken as they are, with their links turned to where they lie here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

import peerbayes
from peerbayes import networks, terms
from peerbayes.codebook import Sharing
from peerbayes.data import AUGMENTATIONS, CORRUPTIONS
from peerbayes.data import names as data_names
from peerbayes.posteriors import Posterior
from peerbayes.posteriors.kinds import KINDS
from peerbayes.recipes import recipe as recipes

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
GENERATED = DOCS / "generated"
NOT_GIVEN = {None: "none", ...: "*required*"}

# Files outside docs/ that are pages of the site, too.
TAKEN = {
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "benchmarks/README.md": "benchmarks",
    "src/peerbayes/papers/mutual_bayesian/README.md": "paper-mutual",
    "src/peerbayes/papers/renyi/README.md": "paper-renyi",
    "src/peerbayes/papers/latentbe/README.md": "paper-distillation",
    "src/peerbayes/papers/weight_sharing/README.md": "paper-sharing",
    "src/peerbayes/papers/yardsticks/README.md": "paper-yardsticks",
}
# Packaged recipes by the beginning of their names: what they are for, and the page about it.
GROUPS = {
    "mutual": ("Bayesian networks and peers that teach each other", "methods/bayesian.md"),
    "renyi": ("Rényi mutual learning", "methods/mutual-learning.md"),
    "distillation": ("An ensemble in one network", "methods/distillation.md"),
    "sharing": ("A network in a small codebook", "methods/weight-sharing.md"),
    "pipeline": ("From peers to one small file", "guide/steps.md"),
    "yardsticks": ("What people would use instead", "methods/yardsticks.md"),
}
PACKAGES = ("posteriors", "terms", "data", "networks", "metrics", "inference", "codebook", "reports", "runs", "papers")
# What these packages offer that is in modules of theirs.
MODULES = {
    "inference": {"inference.prediction": ("predict", "predict_split"), "inference.batch_norm": ("recalibrate",)},
    "terms": {"terms.elbo": None, "terms.mutual": None, "terms.diversity": None, "terms.distillation": None},
    "runs": {"runs.plan": ("Job", "Plan", "resolve"), "runs.executor": ("execute",)},
    "papers": {"papers.catalogue": ("write_figure",)},
    "reports": {"reports.file_sizes": ("size_table",)},
}


def write(folder: Path) -> None:
    """Write all generated pages; one that says what it said before keeps its date, so that Sphinx reads it once."""
    written = {"recipe": recipe_reference(), "recipes": recipe_list(), "python": public_names()}
    written |= {f"python-{name}": package_names(name) for name in PACKAGES}
    for source, name in TAKEN.items():
        written[name] = relinked((ROOT / source).read_text(encoding="utf-8"), ROOT / source, folder / f"{name}.md")
    folder.mkdir(exist_ok=True)
    for name, text in written.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.stem not in written:
            path.unlink()


# ---- links ----------------------------------------------------------------------------------------------------------


def relinked(text: str, source: Path, page: Path) -> str:
    """Return Markdown whose relative links lead, from a page of the site, to what they lead to from where it lies.

    Args:
        text: the Markdown.
        source: the file that it is of.
        page: the page of the site that it becomes; for pages in docs/ the file itself.
    """

    def turned(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if not target or "://" in target:
            return match[0]
        path = (source.parent / target).resolve()
        inside = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if inside in TAKEN:
            path = GENERATED / f"{TAKEN[inside]}.md"
        return f"]({os.path.relpath(path, page.parent)}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", turned, text)


def relink(name: str, source: list[str]) -> None:
    """Turn the links of a page in docs/ to files outside that are pages of the site, too (Sphinx's source-read)."""
    path = DOCS / f"{name}.md"
    if path.exists() and not path.is_relative_to(GENERATED):
        source[0] = relinked(source[0], path, path)


# ---- what docstrings say --------------------------------------------------------------------------------------------


def meanings(described: Any) -> dict[str, str]:
    """Return what a docstring says of each name under ``Args:`` and ``Attributes:``."""
    lines = (inspect.getdoc(described) or "").splitlines()
    said: dict[str, str] = {}
    name, inside = "", False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() in ("Args:", "Attributes:"):
            inside = True
        elif line.strip() and not indent:
            inside = False
        elif inside and indent == 4 and (begun := re.match(r"\s+\*{0,2}(\w+)(?: \([^)]*\))?: (.*)", line)):
            name = begun[1]
            said[name] = begun[2]
        elif inside and line.strip() and name:
            said[name] += " " + line.strip()
    return said


def prose(described: Any) -> str:
    """Return a docstring without its sections, as Markdown."""
    kept: list[str] = []
    for line in (inspect.getdoc(described) or "").splitlines():
        if line in ("Args:", "Attributes:", "Returns:", "Raises:", "Example:", "Examples:"):
            break
        kept.append(line)
    return markdown("\n".join(kept).strip())


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown: marks that mean something there are escaped outside code."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    marks = re.compile(r"(?<!\\)([*<\[\]|])")
    return "".join(marks.sub(r"\\\1", part) if index % 2 == 0 else part for index, part in enumerate(parts))


def cell(text: str) -> str:
    """Return a text as Markdown for a cell of a table, where every bar has to be escaped, in code too."""
    return re.sub(r"(?<!\\)\|", r"\\|", markdown(text))


def referred(model: type[BaseModel]) -> list[Any]:
    """Return the object that a schema's docstring sends the reader to by "see `peerbayes...`", if it does."""
    if not (named := re.search(r"[Ss]ee `peerbayes\.([\w.]+)`", inspect.getdoc(model) or "")):
        return []
    *path, name = f"peerbayes.{named[1]}".split(".")
    return [getattr(importlib.import_module(".".join(path)), name)]


# ---- the recipe reference -------------------------------------------------------------------------------------------


def kinds() -> dict[str, tuple[type[BaseModel], list[Any]]]:
    """Return the kinds of posteriors by name: the schema of each, and what describes its options."""
    schemas = {}
    for name in (*KINDS, "shared"):
        posterior = Posterior.of_kind(name)
        schemas[name] = (posterior.recipe_options(), [posterior.option_fields, posterior, Sharing])
    return schemas


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the schemas in an annotation, each once."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def type_name(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return a type in words that a writer of TOML knows, with its bounds."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(parts[0], [*parts[1:], *metadata])
    if origin is Literal:
        return ", ".join(f"`{value!r}`".replace("'", '"') for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in parts if part is not type(None)))
    if origin is list:
        return f"list of {type_name(parts[0])}"
    if origin is dict or annotation is dict:
        return "table"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "table"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation))) + bounds(metadata)


def bounds(metadata: Iterable[Any]) -> str:
    """Return the bounds that annotations carry, such as "> 0"."""
    flat = [bound for item in metadata for bound in (getattr(item, "metadata", None) or [item])]
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    words = [f"{sign} {getattr(bound, key):g}" for bound in flat for key, sign in signs.items() if hasattr(bound, key)]
    return f" {', '.join(words)}" if words else ""


def default_of(field: Any) -> str:
    """Return a field's default as TOML would have it."""
    if field.is_required():
        return NOT_GIVEN[...]
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value!r}`".replace("'", '"')


def table(model: type[BaseModel], prefix: str = "", *, also: Iterable[Any] = (), skip: Iterable[str] = ()) -> str:
    """Return a Markdown table of a schema's keys: type, default and what docstrings say of them.

    Args:
        model: the schema.
        prefix: what stands before each key.
        also: other objects whose docstrings describe the keys, the first of them best.
        skip: keys to leave out.
    """
    said: Mapping[str, str] = {}
    for described in reversed(model.__mro__):
        if described.__module__.startswith("peerbayes"):
            said = {**said, **meanings(described)}
    for described in also:
        said = {**meanings(described), **said}
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in skip:
            kind = type_name(field.annotation, field.metadata)
            rows.append(f"| `{prefix}{name}` | {kind} | {default_of(field)} | {cell(said.get(name, ''))} |")
    return "\n".join(rows) if len(rows) > 2 else "No options."


def recipe_reference() -> str:
    """Return the page of all tables and keys of a recipe, with terms, posteriors, augmentations and the like."""
    sections: list[str] = [
        "# Recipe reference",
        "Every table and key of a recipe, from its schema. `peerbayes recipes show NAME` prints a recipe complete with "
        "these defaults; [the guide](../guide/recipes.md) explains how recipes are used. Keys of lists are addressed "
        "by number or name on the command line: `--set stages.0.epochs=5`, `--set peers.scratch.network=mlp`, "
        "`--set stages.*.terms.kl.weight=0.1`.",
    ]
    under = {"data": "Data", "peers": "Peers", "teachers": "Teachers", "stages": "Stages", "evaluation": "Evaluation"}
    sections += ["## Top level", table(recipes.Recipe, skip=under)]
    for key, title in under.items():
        (model,) = models_in(recipes.Recipe.model_fields[key].annotation)
        prefix = f"{key}.*." if get_origin(recipes.Recipe.model_fields[key].annotation) is not dict else ""
        prefix = prefix if key in ("peers", "stages") else f"{key}."
        sections += [f"## {title}", table(model, prefix)]
        for name, field in model.model_fields.items():
            inner = list(models_in(field.annotation))
            if name != "posterior" and len(inner) == 1:
                sections += [
                    f"### {prefix}{name}",
                    prose(inner[0]),
                    table(inner[0], f"{prefix}{name}.", also=referred(inner[0])),
                ]
        if key == "peers":
            sections.append(posterior_sections())
        if key == "stages":
            sections.append(term_sections())
    sections.append(name_lists())
    return "\n\n".join(sections) + "\n"


def posterior_sections() -> str:
    """Return the sections of the kinds of posteriors."""
    parts = ["### Posteriors", '`posterior = { kind = "...", ... }`; the keys depend on the kind.']
    for kind, (model, also) in kinds().items():
        parts += [f"#### {kind}", prose(also[0]), table(model, also=also, skip=["kind"])]
        for name, field in model.model_fields.items():
            for inner in models_in(field.annotation):
                parts += [f"`{name}`: {prose(inner)}", table(inner, f"{name}.", also=referred(inner))]
    return "\n\n".join(parts)


def term_sections() -> str:
    """Return the sections of the registered terms."""
    parts = ["### Terms", "`stages.*.terms` holds a table a term; the loss of a peer is their sum."]
    for name in terms.names():
        term = terms.find(name)
        if term.function.__module__.startswith("peerbayes."):
            parts += [f"#### {name}", prose(term.function), table(term.schema, f"{name}.", also=[term.function])]
    return "\n\n".join(parts)


def name_lists() -> str:
    """Return the sections of names: networks, data sets, augmentations, corruptions."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    described = "\n".join(f"| `{name}` | {cell(summary(f))} |" for name, f in AUGMENTATIONS.items())
    return "\n\n".join(
        [
            "## Names",
            "### Networks\n\n" + listed(networks.names()) + ", `timm/NAME`, `package.module:function`.",
            "### Data sets\n\n" + listed(data_names()) + ", or a path.",
            "### Augmentations\n\n| name | what it does |\n|---|---|\n" + described,
            "### Corruptions\n\nOf `evaluate --corrupted made` and `peerbayes.data.corrupt`: "
            + listed(CORRUPTIONS)
            + ".",
        ]
    )


def summary(described: Any) -> str:
    """Return the first line of a docstring."""
    function = described.func if isinstance(described, partial) else described
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def recipe_list() -> str:
    """Return the page of all packaged recipes: those for data of one's own, then by group."""
    packaged = recipes.packaged()
    general = {name for name, path in packaged.items() if path.is_relative_to(Path(recipes.__file__).parent)}
    parts = [
        "# Packaged recipes",
        f"There are {len(packaged)}. `peerbayes recipes show NAME` prints one, `peerbayes train NAME` trains it, and a "
        "recipe of your own may extend it.",
        "## For data of your own",
        "Where no other is named, `distill` takes `distillation/latentbe`, and `compress` takes `sharing/stage1` and "
        "then `sharing/shared`.",
        recipe_table(sorted(general), paper=False),
    ]
    for group, (title, page) in GROUPS.items():
        names = sorted(name for name in packaged if name.startswith(f"{group}/") and name not in general)
        parts += [f"## {title}", f"[How it works](../{page}).", recipe_table(names)]
    return "\n\n".join(parts) + "\n"


def recipe_table(names: Iterable[str], *, paper: bool = True) -> str:
    """Return a table of recipes by name: their titles, and what they reproduce."""
    rows = ["| recipe | what | reproduces |", "|---|---|---|"] if paper else ["| recipe | what |", "|---|---|"]
    for name in names:
        loaded = recipes.load_recipe(name)
        cells = [f"`{name}`", cell(loaded.title), *([cell(loaded.reproduces)] if paper else [])]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


# ---- the Python reference -------------------------------------------------------------------------------------------

PUBLIC = {
    "Verbs": ("fit", "train", "distill", "compress", "evaluate", "load"),
    "Posteriors": ("Point", "MeanField", "RankOne", "Shared", "Posterior", "Weights", "Address"),
    "Runs and predictions": ("Run", "Prediction", "Recipe", "load_recipe"),
    "Terms and networks of your own": ("term", "Step", "network"),
    "Progress and errors": ("Reporter", "ConsoleReporter", "InputError", "PeerbayesWarning"),
}


def public_names() -> str:
    """Return the page of the names of `peerbayes` itself."""
    grouped = {name for names in PUBLIC.values() for name in names}
    more = tuple(
        name for name in peerbayes.__all__ if name not in grouped and not inspect.ismodule(getattr(peerbayes, name))
    )
    parts = ["# Python reference", "`import peerbayes as pb`. Names are loaded when they are first used."]
    for title, names in (PUBLIC | ({"More": more} if more else {})).items():
        parts += [f"## {title}", *(documented(f"peerbayes.{name}", getattr(peerbayes, name)) for name in names)]
    listed = "\n".join(f"- [peerbayes.{name}](python-{name}.md): {first_line(name)}" for name in PACKAGES)
    tree = "\n".join(f"python-{name}" for name in PACKAGES)
    return "\n\n".join([*parts, "## Packages", listed, f"```{{toctree}}\n:hidden:\n\n{tree}\n```"]) + "\n"


def first_line(package: str) -> str:
    """Return the first line of a package's docstring, none if it has none."""
    return markdown(summary(importlib.import_module(f"peerbayes.{package}")))


def package_names(name: str) -> str:
    """Return the page of a public package: what it exports that is not a name of `peerbayes` too."""
    package = importlib.import_module(f"peerbayes.{name}")
    exported = {
        f"peerbayes.{name}.{key}": getattr(package, key)
        for key in getattr(package, "__all__", ())
        if getattr(package, key) is not getattr(peerbayes, key, None) and not inspect.ismodule(getattr(package, key))
    }
    for module_name, names in MODULES.get(name, {}).items():
        module = importlib.import_module(f"peerbayes.{module_name}")
        for key in names or [term for term in terms.names() if hasattr(module, term)]:
            exported.setdefault(f"peerbayes.{module_name}.{key}", getattr(module, key))
    parts = [f"# peerbayes.{name}", inspect.getdoc(package) or "", *(documented(*item) for item in exported.items())]
    return "\n\n".join(parts) + "\n"


def documented(name: str, thing: Any) -> str:
    """Return the directive that documents an object."""
    if get_origin(thing) or not callable(thing):  # a type, or a mapping of names: its docstring would be dict's
        text = f"``{thing}``" if get_origin(thing) else ", ".join(f"``{key}``" for key in thing)
        return f"```{{eval-rst}}\n.. py:data:: {name}\n\n   {text}\n```"
    return f"```{{eval-rst}}\n.. {'autoclass' if inspect.isclass(thing) else 'autofunction'}:: {name}\n```"
