"""Starting costs nothing, and each room imports only from rooms above it."""

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import commands
import peerbayes

ROOT = Path(peerbayes.__file__).parent
ROOMS = [
    "errors",
    "choices",
    "lazy",
    "moved",
    "importing",
    "schema",
    "showing",
    "math",
    "networks",
    "data",
    "kernels",
    "posteriors",
    "codebook",
    "inference",
    "metrics",
    "terms",
    "recipes",
    "engine",
    "training",
    "runs",
    "api",
    "reports",
    "exporting",
    "serving",
    "papers",
    "studies",
    "adopting",
    "demo",
    "doctor",
    "bench",
    "cli",
    "__main__",
]
# `Posterior.predict` is a door to the room that predicts: an object's verb, imported when it is called; and so is that
# by which `Swag` estimates batch-norm's statistics anew.
DOORS = {(f"posteriors/{kind}.py", "inference") for kind in ("base", "rank_one", "swag")}
HEAVY = ["torch", "numpy", "scipy", "sklearn", "matplotlib", "pydantic", "timm"]
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def heavy_after(code):
    done = run(f"import sys\n{code}\nprint('loaded', [m for m in {HEAVY} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_heavy():
    assert heavy_after("import peerbayes; peerbayes.__version__; dir(peerbayes)").strip() == "loaded []"


def test_help_loads_nothing_heavy():
    code = "import peerbayes.cli\ntry: peerbayes.cli.main(['--help'])\nexcept SystemExit as done: assert not done.code"
    out = heavy_after(code)
    assert all(verb in out for verb in ("train", "evaluate", "recipes", "demo"))
    assert out.strip().endswith("loaded []")


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_predicting_and_evaluating_draw_nothing(verb, tmp_path):
    commands.called("train", commands.write_small(tmp_path) / "small.toml", "--run", tmp_path / "run",
                    "--data-root", tmp_path, "--set", "stages.0.epochs=1", *commands.QUIET)  # fmt: skip
    in_python = {"predict": "run.predict(torch.zeros(2, 1, 8, 8))", "evaluate": "pb.evaluate(run, device='cpu')"}
    code = f"""
import torch
import peerbayes as pb
run = pb.load({str(tmp_path / "run")!r})
{in_python[verb]}
import sys
print([module for module in ("matplotlib", "jinja2") if module in sys.modules])
"""
    done = run(code)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_old_names_of_rooms_work_and_say_where_they_are_now():
    code = """
import warnings
warnings.simplefilter("error")
import peerbayes
from peerbayes.posteriors import Shared, predict
for line in ("from peerbayes.learning import fit", "from peerbayes.noise import bits", "peerbayes.evaluation.nll",
             "from peerbayes.sharing import kmeans", "import peerbayes.reporting; peerbayes.reporting.text_table",
             "from peerbayes.networks.features import capture"):
    try:
        exec(line)
    except DeprecationWarning as warning:
        print(warning)
warnings.simplefilter("ignore")
from peerbayes.learning import fit, Reporter
assert fit is peerbayes.fit and Reporter is peerbayes.Reporter
try:
    from peerbayes.learning import nothing
except ImportError:
    print("no")
"""
    assert run(code).stdout.splitlines() == [
        "peerbayes.learning.fit is now peerbayes.fit",
        "peerbayes.noise.bits is now peerbayes.math.noise.bits",
        "peerbayes.evaluation.nll is now peerbayes.metrics.scores.nll",
        "peerbayes.sharing.kmeans is now peerbayes.codebook.clustering.kmeans",
        "peerbayes.reporting.text_table is now peerbayes.reports.tables.text_table",
        "peerbayes.networks.features.capture is now peerbayes.networks.running.capture",
        "no",
    ]


def test_every_old_name_is_somewhere():
    code = """
import importlib, warnings
warnings.simplefilter("ignore")
import peerbayes
from peerbayes.moved import MOVED
for old, new in MOVED.items():
    (room, _, name), (home, _, new_name) = old.rpartition("."), new.rpartition(".")
    home = importlib.import_module(f"peerbayes.{home}")
    public = [key for key, value in vars(home).items() if getattr(value, "__module__", "") == home.__name__]
    assert name != "*" or public, old
    for now, before in ((new_name, name),) if name != "*" else zip(public, public):
        scope = {}
        exec(f"from peerbayes.{room} import {before} as found", scope)
        assert scope["found"] is getattr(home, now), old
        made = getattr(scope["found"], "__module__", home.__name__)  # where it is defined, not imported
        assert made == home.__name__ or not made.startswith("peerbayes"), old
print(len(MOVED))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 70


def test_the_probe_notices_torch():
    assert "'torch'" in heavy_after("import peerbayes; peerbayes.MeanField")


def test_the_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "peerbayes", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"peerbayes {peerbayes.__version__}"
    assert done.returncode == 0


def test_every_public_name_exists():
    for name in peerbayes.__all__:
        assert getattr(peerbayes, name) is not None
        assert name in dir(peerbayes)
    assert set(peerbayes._HOMES) | set(peerbayes._ROOMS) == set(peerbayes.__all__)
    for name, home in peerbayes._HOMES.items():
        assert getattr(peerbayes, name) is getattr(importlib.import_module(f"peerbayes.{home}"), name)
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = peerbayes.nothing


@pytest.mark.parametrize(
    "room", [r for r in ROOMS if r not in ("demo", "doctor", "__main__", "cli", "schema", "errors")]
)
def test_public_lists_of_rooms_are_true(room):
    module = importlib.import_module(f"peerbayes.{room}")
    assert all(hasattr(module, name) for name in getattr(module, "__all__", []))


# ---- how deep the house is ------------------------------------------------------------------------------------------

DEEPEST = 14  # modules that one import may go through, one below another


def imported_modules(path):
    """Return the modules of the package that a module imports when it is imported itself."""
    modules = {".".join(("peerbayes", *file.relative_to(ROOT).with_suffix("").parts)): file for file in FILES}
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            known = name if name in modules else name.rpartition(".")[0]
            if known in modules and modules[known] != path:
                yield modules[known]


@functools.cache
def chain(path):
    """Return the longest way of imports down from a module."""
    return (path, *max(map(chain, imported_modules(path)), key=len, default=()))


def test_no_chain_of_imports_is_long():
    longest = max(map(chain, FILES), key=len)
    assert 10 < len(longest) <= DEEPEST, " > ".join(str(path.relative_to(ROOT)) for path in longest)


# ---- names --------------------------------------------------------------------------------------------------------


def owners_of(files):
    """Return the files that a module's or class's name is of."""
    owners = {}
    for path, text in files.items():
        if path.stem != "__init__":
            owners.setdefault(path.stem, []).append(path)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(path)
    return owners


def test_no_two_modules_or_classes_have_one_name():
    owners = owners_of({path: path.read_text() for path in FILES})
    assert len(owners) > len(FILES)
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_a_name_of_two_is_seen():
    files = {Path("a/one.py"): "class Same: pass", Path("b/one.py"): "def f():\n    class Same: pass"}
    assert {name for name, paths in owners_of(files).items() if len(paths) > 1} == {"one", "Same"}


KINDS = {"Point", "MeanField", "RankOne", "Shared"}
MAY_ASK = ("posteriors", "codebook", "bench")  # the last measures each kind on its own
KIND_NAMES = {"point", "mean_field", "rank_one", "shared"}


def asked_for_kind(text):
    """Return the lines that ask which kind of posterior something is: by its class, or by the name of the kind."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            named = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.args[1])}
            lines += [node.lineno] * bool(named & KINDS)
        elif isinstance(node, ast.Compare):
            parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            named = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            words = named | {getattr(part, "id", getattr(part, "attr", "")) for part in parts}
            lines += [node.lineno] * bool(
                ("kind" in words and named & KIND_NAMES) or ("type" in words and words & KINDS)
            )
        elif isinstance(node, ast.match_case):
            lines += [node.pattern.lineno] * any(f"'{kind}'" in ast.dump(node.pattern) for kind in KINDS | KIND_NAMES)
    return lines


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(ROOT).parts[0] not in MAY_ASK],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_nobody_asks_for_the_kind_of_a_posterior(path):
    assert asked_for_kind(path.read_text()) == []


def test_asking_for_a_kind_is_seen():
    asking = ["isinstance(a, Point | nn.Module)", "isinstance(a, posteriors.Shared)", "b.kind == 'rank_one'",
              "kind in ('point', 'mean_field')", "type(a) is MeanField"]  # fmt: skip
    assert all(asked_for_kind(f"x = {text}") for text in asking)
    assert asked_for_kind("match a:\n    case RankOne():\n        pass")
    assert not asked_for_kind("x = isinstance(a, Posterior); y = kind == 'gaussian'; z = Point(net)")


# ---- the order of the rooms ---------------------------------------------------------------------------------------


def room_of(path):
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def imported_rooms(tree):
    """Rooms that any import statement names, wherever it stands (also in functions and under TYPE_CHECKING)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            if node.module == "peerbayes":
                yield from (alias.name for alias in node.names if not alias.name.startswith("__"))
            elif node.module and node.module.startswith("peerbayes."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("peerbayes."):
                    yield alias.name.split(".")[1]


def upward(path, text):
    room = room_of(path)
    doors = {door for file, door in DOORS if path == ROOT / file}
    found = imported_rooms(ast.parse(text))
    return [r for r in found if r != room and r not in doors and ROOMS.index(r) > ROOMS.index(room)]


def test_every_file_has_a_room():
    assert {room_of(path) for path in FILES} <= set(ROOMS)
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_from_rooms_above_it(path):
    assert upward(path, path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "from peerbayes import training",
        "import peerbayes.training.learner",
        "def f():\n    from peerbayes.terms import term",
        "if TYPE_CHECKING:\n    from peerbayes.cli import app",
    ],
)
def test_the_order_is_enforced(text):
    assert upward(ROOT / "posteriors" / "base.py", text) != []
    assert upward(ROOT / "__main__.py", text) == []


def plain_package_use(tree):
    """Attributes taken from the bare package (``peerbayes.fit``), which could hide a way upwards."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "peerbayes":
            yield node.attr


def test_no_room_goes_through_the_package_itself():
    used = {attribute for path in FILES for attribute in plain_package_use(ast.parse(path.read_text()))}
    assert used <= {"__version__"}


def test_the_guide_names_every_network_data_set_and_term():
    # In a process of its own: other tests add networks and terms.
    code = "import peerbayes as pb; print(*pb.networks.names(), *pb.data.names(), *pb.terms.names())"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    guide = "".join(page.read_text() for page in (Path(__file__).parent.parent / "docs" / "guide").glob("*.md"))
    assert [name for name in names if f"`{name}`" not in guide] == []
