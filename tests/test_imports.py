"""Starting costs nothing, and each room imports only from rooms above it."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import peerbayes

ROOT = Path(peerbayes.__file__).parent
ROOMS = [
    "errors",
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
    "papers",
    "studies",
    "adopting",
    "demo",
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


def test_predictions_and_records_draw_nothing():
    code = (
        "import peerbayes, peerbayes.reports.predicting, peerbayes.reports.records; peerbayes.evaluate; peerbayes.load"
    )
    done = run(f"import sys\n{code}\nprint([m for m in ('matplotlib', 'jinja2') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_old_names_of_rooms_work_and_say_where_they_are_now():
    code = """
import warnings
warnings.simplefilter("error")
import peerbayes
from peerbayes.posteriors import Shared, predict
for line in ("from peerbayes.learning import fit", "from peerbayes.noise import bits", "peerbayes.evaluation.nll",
             "from peerbayes.sharing import kmeans", "import peerbayes.reporting; peerbayes.reporting.text_table"):
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
        "no",
    ]


def test_every_old_name_is_somewhere():
    code = """
import warnings
warnings.simplefilter("ignore")
import peerbayes
from peerbayes.moved import _ROOMS
for room, homes in _ROOMS.items():
    for names in homes.values():
        for name in names.split():
            getattr(getattr(peerbayes, room), name)
print("all")
"""
    assert run(code).stdout == "all\n"


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


@pytest.mark.parametrize("room", [r for r in ROOMS if r not in ("demo", "__main__", "cli", "schema", "errors")])
def test_public_lists_of_rooms_are_true(room):
    module = importlib.import_module(f"peerbayes.{room}")
    assert all(hasattr(module, name) for name in getattr(module, "__all__", []))


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
