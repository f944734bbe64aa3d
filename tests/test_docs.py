"""The pages in docs/, and those that are made when the site is built. `make docs` builds it."""

import importlib.util
import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import peerbayes as pb
from peerbayes import cli, terms
from peerbayes.recipes.recipe import Recipe, packaged

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if not {"_build", "generated"} & {*page.parts})
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
OUTSIDE += sorted((ROOT / "src").rglob("README.md"))


def imported(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pages = imported("pages")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def slugs(page):
    """The anchors of a page's headings, as a code host and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in slugs(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_indented_commands_begin_where_their_block_does(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {5,}(?:peerbayes |pip |(?:\w+ = )?pb\.).*$", text, re.MULTILINE) == []


def test_the_recipe_reference_says_what_every_key_of_the_tables_means():
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \| (.*) \| (.*) \|$", pages.recipe_reference(), re.MULTILINE)
    keys = {key: meaning for key, _, _, meaning in rows}
    prefixes = {"data": "data.", "peers": "peers.*.", "stages": "stages.*.", "evaluation": "evaluation."}
    expected = {key for key in Recipe.model_fields if key not in (*prefixes, "teachers")}
    for table, prefix in prefixes.items():
        (model,) = pages.models_in(Recipe.model_fields[table].annotation)
        expected |= {prefix + key for key in model.model_fields}
    assert {key for key in expected if not keys.get(key)} == set()
    assert {f"{name}.{option}" for name in terms.names() for option in terms.find(name).schema.model_fields
            if terms.find(name).function.__module__.startswith("peerbayes.")} <= set(keys)  # fmt: skip


def test_the_recipe_reference_has_a_section_for_each_kind_of_posterior():
    kinds = pages.kinds()
    known = (pb.Point, pb.MeanField, pb.RankOne, pb.Shared, pb.Swag, pb.Laplace, pb.MCDropout)
    assert set(kinds) == {posterior.kind for posterior in known}
    text = pages.recipe_reference()
    for kind, (model, _) in kinds.items():
        section = text.partition(f"#### {kind}\n")[2].partition("\n####")[0]
        assert {key for key in model.model_fields if f"| `{key}` |" not in section} <= {"kind"}


def test_the_list_of_recipes_has_them_all():
    listed = set(re.findall(r"^\| `([^`]+)` \|", pages.recipe_list(), re.MULTILINE))
    assert listed == set(packaged())


def test_the_python_reference_documents_every_public_name():
    text = pages.public_names()
    names = {name for name in pb.__all__ if not inspect.ismodule(getattr(pb, name))}
    assert {name for name in names if f":: peerbayes.{name}\n" not in text} == set()
    for package in pages.PACKAGES:
        text = pages.package_names(package)
        module = getattr(pb, package)
        exported = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        exported = {name for name, thing in exported.items() if thing is not getattr(pb, name, None)}
        exported -= {name for name in exported if inspect.ismodule(getattr(module, name))}
        assert {name for name in exported if f":: peerbayes.{package}.{name}\n" not in text} == set()
    assert ":: peerbayes.data.load\n" in pages.package_names("data")  # another one than `peerbayes.load`


def test_links_are_turned_to_where_a_page_lies():
    source, page = ROOT / "src" / "peerbayes" / "papers" / "renyi" / "README.md", DOCS / "generated" / "paper.md"
    text = "[a](recipes.toml) [b](../../../../docs/results.md#x) [c](https://a.b/c) [d](#e) [f](../latentbe/README.md)"
    assert pages.relinked(text, source, page) == (
        "[a](../../src/peerbayes/papers/renyi/recipes.toml) [b](../results.md#x) [c](https://a.b/c) [d](#e) "
        "[f](paper-distillation.md)"
    )


def test_marks_of_markdown_are_escaped_outside_code():
    assert pages.markdown("|d| ``|d|`` a*b [x] `peerbayes.fit`") == r"\|d\| ``|d|`` a\*b \[x\] `peerbayes.fit`"
    assert pages.cell("``|d|``") == r"``\|d\|``"


def test_recipes_named_in_the_pages_exist():
    text = "\n".join(page.read_text() for page in [*PAGES, *OUTSIDE])
    named = set(re.findall(r"\b(?:mutual|renyi|distillation|sharing|pipeline)/[\w.-]+\w(?![\w*{.-]*[*{])", text))
    named -= {name for name in named if name.endswith((".toml", ".py", ".md"))}
    assert len(named) > 20
    assert {
        name for name in named if name not in packaged() and not any(r.startswith(f"{name}-") for r in packaged())
    } == set()


def test_options_in_the_pages_exist():
    commands = typer.main.get_command(cli.app).commands
    lines = [line for page in [*PAGES, *OUTSIDE] for line in page.read_text().splitlines()]
    checked = 0
    for line in lines:
        for verb, rest in re.findall(r"^(?:    |)(?:.*?[ `])?peerbayes (\w+)( [^`#]*)", line):
            if verb not in commands:
                continue
            known = {
                option for parameter in commands[verb].params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            given = set(re.findall(r"(?<=\s)--[a-z][\w-]*", rest))
            checked += len(given)
            assert given <= known | {"--help"}, line
    assert checked > 20


def test_the_example_of_a_recipe_is_one():
    recipe, *others = blocks(DOCS / "guide" / "recipes.md", "toml")
    assert Recipe.parse(tomllib.loads(recipe), "guide").epochs == 50
    assert others == []


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda page: page.stem)
def test_terms_in_method_pages_are_valid_and_figures_there(page):
    for block in blocks(page, "toml"):
        (stages,) = tomllib.loads(block).values()
        for name, options in stages["terms"].items():
            terms.find(name).schema.model_validate(options)
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
    if page.stem != "index":
        assert f"images/methods/{page.stem}.svg)" in page.read_text()


def test_figures_are_drawn_of_records_and_formulas(tmp_path, monkeypatch):
    figures = imported("figures")
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    figures.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "images" / "methods").iterdir()}


def test_the_blocks_of_the_first_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(DOCS / "start.md", "python"):
        exec(compile(block, "start.md", "exec"), names)
    said = capsys.readouterr().out
    assert "torch.Size([5, 10])" in said
    assert "not distinguishable" in said or "Vanilla" in said
    assert names["p"].disagreement.min() >= 0
    assert (names["p"].classes == names["labels"]).float().mean() >= 0.6  # chance is 0.1
