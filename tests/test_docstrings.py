"""Public names have examples, which pytest collects, and functions of two or more arguments say what these are."""

import doctest
import importlib
import inspect
import types
from pathlib import Path

import pytest

import peerbayes

ROOT = Path(peerbayes.__file__).parent
# Modules with public names: those of their `__all__`, or those defined there.
MODULES = ["peerbayes", *(f"peerbayes.{room}" for room in ("codebook", "data", "metrics", "networks", "posteriors"))]
MODULES += ["peerbayes.reports", "peerbayes.terms"]
MODULES += [f"peerbayes.math.{name}" for name in ("dirichlet", "divergences", "gaussians", "simplex")]
INTERNAL = {"along", "check_pair"}  # of math, for its own modules
# Names without an example yet; one that has got an example must go.
WITHOUT_EXAMPLE = {"Adopted", "adopt", "compress", "load_texts"}  # which train several networks, or want texts
# All public functions have an `Args:` section where they take two or more arguments, but for those of these modules.
WITHOUT_ARGS = ["training/reporters.py", "runs/loggers.py", "runs/tracking.py"]
ROOMS = sorted({path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")} - {"__init__.py", "__main__.py"})


def public(module_name):
    """Yield the public names of a module and what they stand for, but for modules, constants and aliases."""
    module = importlib.import_module(module_name)
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
    for name in getattr(module, "__all__", [name for name in defined if not name.startswith("_")]):
        value = getattr(module, name)
        if (inspect.isclass(value) or isinstance(value, types.FunctionType)) and name not in INTERNAL:
            yield name, value


def key_of(value):
    """Return a name; `load` and `names` are several functions, so those of data go by their full names."""
    several = value.__module__ == "peerbayes.data.dataset" and value.__name__ in ("load", "names")
    return f"data.{value.__name__}" if several else value.__name__


PUBLIC = {f"{value.__module__}.{value.__qualname__}": value for module in MODULES for _, value in public(module)}


def has_example(value):
    """Return whether a docstring has an example whose output is compared with something."""
    return any(example.want for example in doctest.DocTestParser().get_examples(value.__doc__ or ""))


def test_there_are_names():
    assert len(PUBLIC) > 120
    assert {key_of(value) for value in PUBLIC.values()} >= WITHOUT_EXAMPLE


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_has_an_example(name):
    assert has_example(PUBLIC[name]) == (key_of(PUBLIC[name]) not in WITHOUT_EXAMPLE)


def test_examples_are_compared():
    def with_output():
        """
        >>> 1 + 1
        2
        """

    def without_output():
        """
        >>> import math
        """

    assert has_example(with_output)
    assert not has_example(without_output)
    assert not has_example(lambda: 0)


def test_examples_are_collected(pytestconfig):
    assert pytestconfig.getoption("doctestmodules")
    assert "src" in pytestconfig.getini("testpaths")


def takes_many(function):
    """Return whether a caller gives a function two arguments or more."""
    return len([name for name in inspect.signature(function).parameters if name not in ("self", "cls")]) >= 2


def functions_of(module):
    """Yield the public functions and methods that a module defines, by name."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.FunctionType):
            yield name, [value]
        elif inspect.isclass(value):
            for method, inner in vars(value).items():
                inner = inspect.unwrap(getattr(inner, "__func__", inner))
                if isinstance(inner, types.FunctionType) and not method.startswith("_") and method != "forward":
                    yield f"{name}.{method}", [inner, *(getattr(base, method, None) for base in value.__mro__)]


def is_helped(function):
    """Return whether a command's `--help` says what each of its arguments is."""
    names = [hint for argument, hint in function.__annotations__.items() if argument != "return"]
    hints = [
        eval(hint, dict(function.__globals__)) if "typer" in hint else function.__globals__.get(hint) for hint in names
    ]
    return all(any(getattr(part, "help", "") for part in getattr(hint, "__metadata__", ())) for hint in hints)


def says_what_arguments_are(function):
    return "Args:" in (function.__doc__ or "") or (
        function.__module__.startswith("peerbayes.cli") and is_helped(function)
    )


def without_args(module):
    """Return the functions of several arguments that do not say what these are; a method may leave it to a base."""
    many = ((name, versions) for name, versions in functions_of(module) if takes_many(versions[0]))
    return [name for name, versions in many if not any(map(says_what_arguments_are, filter(None, versions)))]


@pytest.mark.parametrize("room", ROOMS)
def test_functions_of_several_arguments_describe_them(room):
    paths = [ROOT / room, *(ROOT / room).rglob("*.py")]
    names = [path.relative_to(ROOT) for path in paths if path.suffix == ".py" and path.name != "__init__.py"]
    assert names
    for name in names:
        module = importlib.import_module(".".join(("peerbayes", *name.with_suffix("").parts)))
        assert str(name) in WITHOUT_ARGS or without_args(module) == []


def test_a_function_without_args_is_seen():
    module = types.ModuleType("made")
    lines = ['def both(a, b): "Add."', 'def single(a): "Pass."', "class C:", "    def f(self, a, b): pass"]
    exec("\n".join(lines), vars(module))
    assert without_args(module) == ["both", "C.f"]
