"""Recipes: what is right loads and comes back whole; what is wrong is one sentence that names the place."""

import copy
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from peerbayes import networks
from peerbayes.codebook.build import Sharing
from peerbayes.codebook.merging import merge
from peerbayes.data import TextOptions
from peerbayes.errors import InputError
from peerbayes.posteriors import Posterior
from peerbayes.recipes import recipe as recipe_file
from peerbayes.recipes import settings as tables
from peerbayes.recipes.recipe import Recipe, changes_of, load_recipe, packaged
from peerbayes.runs.run import default_folder

OURS = "mutual/cifar100-resnet20-ours"


def plain():
    return load_recipe(OURS).model_dump(exclude_none=True, exclude={"name"})


@pytest.mark.parametrize("name", sorted(packaged()))
def test_packaged_recipe_is_complete_and_comes_back_from_its_own_toml(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.name == name
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert changes_of(recipe) == []
    # Complete: nothing is left to a default that a later version might change.
    table = tomllib.loads(recipe.to_toml())
    assert set(table) | {"teachers"} == set(Recipe.model_fields)  # TOML has no word for "none"
    keys = {"name", "lr", "momentum", "nesterov", "weight_decay", "clip"}
    assert all(s["optimizer"].keys() - {"scale_lr", "scale_space", "ess", "beta2"} == keys for s in table["stages"])
    assert all("weight" in options for stage in table["stages"] for options in stage["terms"].values())
    known = {*networks.names(), *(["teachers"] if "teachers" in table else [])}
    assert all(peer["network"].startswith("timm/") or peer["network"] in known for peer in table["peers"])


def test_changes_are_the_lines_that_make_the_recipe_again():
    lines = [
        "data.augment=[]",
        "data.validation=0.25",
        "stages.0.epochs=7",
        "stages.0.lr_milestones=[3, 5]",
        "stages.0.terms.kl.scheme=elbo",
        "stages.1.freeze_rest=true",
        "evaluation.keep=best",
    ]
    changed = load_recipe(OURS, lines)
    assert sorted(changes_of(changed)) == sorted(lines)
    assert load_recipe(OURS, changes_of(changed)) == changed
    assert changes_of(Recipe.parse(changed.model_dump() | {"name": "own"}, "own")) == []


texts = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.sampled_from(["5", "true", "1e3", "none", "[a]", '"q"', "a # b", "1\nb = 2", " a ", "a/b", "timm/vit", "x=y"]),
).filter(lambda text: not text.startswith("/"))
scales = st.fixed_dictionaries({"kind": st.just("mean_field"), "rho": st.floats(-9, -1)})
given_posteriors = st.one_of(st.just({"kind": "point"}), scales, scales.map(lambda table: {**table, "gain": 0.1}))
given_terms = st.sampled_from(
    [{"likelihood": {}}, {"likelihood": {"weight": 0.5}}, {"likelihood": {}, "kl": {"scheme": "elbo"}}]
)
CHANGES = {
    "title": texts,
    "update": st.sampled_from(["simultaneous", "sequential"]),
    "gradient_share_every": st.one_of(st.just("epoch"), st.integers(0, 9)),
    "data": st.fixed_dictionaries({"name": texts, "classes": st.one_of(st.none(), st.integers(2, 9))}),
    "teachers": st.one_of(st.none(), st.fixed_dictionaries({"runs": st.lists(texts, min_size=1, max_size=2)})),
    "peers": st.lists(
        st.fixed_dictionaries({"name": st.sampled_from("abc"), "network": texts, "posterior": given_posteriors}),
        min_size=1,
        max_size=3,
        unique_by=lambda peer: peer["name"],
    ),
    "stages": st.lists(
        st.fixed_dictionaries(
            {
                "epochs": st.integers(1, 9),
                "lr_factor": st.floats(1e-300, 1e300),
                "perturb": st.sampled_from([None, {"kind": "gaussian"}, {"kind": "ods", "temperature": 2.0}]),
                "terms": given_terms,
            }
        ),
        min_size=1,
        max_size=3,
    ),
    "evaluation": st.fixed_dictionaries(
        {"out_of_distribution": st.lists(texts, max_size=2), "retention": st.just([0.1, 1.0])}
    ),
}


@pytest.mark.parametrize("name", sorted(packaged()))
@given(changes=st.fixed_dictionaries({}, optional=CHANGES))
@settings(max_examples=4, deadline=None)
def test_any_change_of_a_packaged_recipe_is_told_in_lines_that_make_it_again(name, changes):
    before = load_recipe(name)
    assume(before.stages or "stages" in changes or "peers" not in changes)  # whose peers would have learnt nothing
    changed = Recipe.parse(before.model_dump(exclude_none=True) | changes, name)
    lines = changes_of(changed)
    assert load_recipe(name, lines) == changed
    assert load_recipe(before, lines) == changed
    assert (lines == []) == (changed == before)


@given(key=st.sampled_from(["title", "data.name", "peers.0.network", 'stages.0.terms."a.b:c"']), text=texts)
@settings(deadline=None)
def test_a_key_and_its_value_are_told_in_one_line(key, text):
    before, after = load_recipe(OURS).model_dump(), load_recipe(OURS).model_dump()
    recipe_file._put(after, recipe_file.keys(key), text, "here")
    (line,) = recipe_file._lines([], before, after)
    assert line.startswith(f"{key}=")
    recipe_file.change(before, line, "here")
    assert before == after


def test_a_line_for_one_peer_leaves_alone_what_a_line_for_all_gave_the_others():
    recipe = load_recipe("mutual/digits-vanilla", ["peers.0.posterior.rho=-2.0"])
    assert [peer.posterior.rho for peer in recipe.peers] == [-2.0, -5.0]


def test_none_takes_away_what_need_not_be_there():
    name = "distillation/cifar10-wrn28x1-latentbe-tdiv-sdiv-de4"
    assert load_recipe(name).stages[0].perturb is not None
    found = load_recipe(
        name, ["stages.0.perturb=none", "teachers=none", "data.classes=none", "peers.0.start_from=none"]
    )
    assert (found.stages[0].perturb, found.teachers, found.data.classes, found.peers[0].start_from) == (None,) * 4
    apart = load_recipe(OURS, ["stages.1.terms.feature_diversity.fusion=none"])  # where it is a word like others
    assert apart.stages[1].terms["feature_diversity"]["fusion"] == "none"
    with pytest.raises(InputError, match=r"data\.batch_size: input should be a valid integer"):
        load_recipe(OURS, ["data.batch_size=none"])


def test_changes_do_not_tell_where_things_lie():
    name = "distillation/cifar10-wrn28x1-latentbe-tdiv-sdiv-de4"
    runs = ["/home/me/runs/first", "/home/me/runs/second/weights-a.safetensors", "distillation/kd"]
    changed = load_recipe(name, [f"teachers.runs={runs}", "data.name=/home/me/own.npz", "stages.0.perturb.kind=none"])
    assert changes_of(changed) == [
        "data.name=own.npz",
        'teachers.runs=["first", "second/weights-a.safetensors", "distillation/kd"]',
        "stages.0.perturb=none",
    ]


def test_ours_has_the_papers_settings():
    recipe = load_recipe(OURS)
    first, second = recipe.stages
    assert (first.epochs, second.epochs, recipe.epochs) == (200, 100, 300)
    assert (first.lr_milestones, second.lr_milestones) == ([80, 120, 160, 180], [30, 60, 90])
    assert all((s.optimizer.name, s.optimizer.lr, s.lr_factor) == ("adam", 1e-3, 0.1) for s in recipe.stages)
    assert (recipe.data.batch_size, recipe.evaluation.draws, recipe.evaluation.ece_bins) == (128, 50, 20)
    assert (
        first.terms["mutual"]
        == second.terms["mutual"]
        == {"weight": 1.0, "temperature": 3.0, "alpha": 1.0, "graph": "all"}
    )
    assert first.terms["kl"]["scheme"] == second.terms["kl"]["scheme"] == "layer_mean"
    assert first.terms["weight_diversity"]["reduction"] == "layer_mean_sum"
    assert "feature_diversity" not in first.terms
    assert second.terms["feature_diversity"]["weight"] == 2.0
    assert second.terms["feature_diversity"]["fusion"] == "per_peer"
    assert [peer.start_from for peer in recipe.peers] == [None, "mutual/cifar100-resnet20-dnn"]


DIFFERENT = {  # options of recipes that constructors do not have, or have with another default
    "point": set(),
    "mean_field": {"rho"},  # recipes keep the scales that they have always had
    "rank_one": set(),
    "shared": {"merge", "merge_every_epoch"},
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_options_of_posteriors_are_arguments_of_their_constructors(kind):
    made = Posterior.of_kind(kind)
    declared = [*inspect.signature(made).parameters.values(), *inspect.signature(Sharing).parameters.values()]
    python = {one.name: one.default for one in declared}
    fields = {name: one for name, one in made.recipe_options().model_fields.items() if name != "kind"}
    assert {name for name, one in fields.items() if python.get(name, ...) != one.default} == DIFFERENT[kind]


def test_options_of_merging_and_of_texts_are_those_of_python():
    merging = Posterior.of_kind("shared").recipe_options().model_fields["merge"].default
    for table, made in ((type(merging), merge), (tables.Text, TextOptions)):
        python = {one.name: one.default for one in inspect.signature(made).parameters.values()}
        fields = {name: one.default for name, one in table.model_fields.items()}
        assert fields == {name: python[name] for name in fields}
        assert python.keys() - fields.keys() <= {"components", "gradient", "spread"}


def refused(tmp_path, change):
    table = plain()
    change(table)
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_recipe(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


UNKNOWN = {
    "titel": (lambda t: t.update(titel="x"), "has no key 'titel'; did you mean 'title'?"),
    "batchsize": (
        lambda t: t["data"].update(batchsize=3),
        "data has no key 'batchsize'; did you mean 'batch_size'?",
    ),
    "networks": (
        lambda t: t["peers"][1].update(networks="mlp"),
        "peers.1 has no key 'networks'; did you mean 'network'?",
    ),
    "prior_sd": (
        lambda t: t["peers"][0]["posterior"].update(prior_sd=1.0),
        "peers.0.posterior has no key 'prior_sd'; did you mean 'prior_std'?",
    ),
    "epoch": (lambda t: t["stages"][0].update(epoch=3), "stages.0 has no key 'epoch'; did you mean 'epochs'?"),
    "learning_rate": (
        lambda t: t["stages"][1]["optimizer"].update(weight_decays=0.1),
        "stages.1.optimizer has no key 'weight_decays'; did you mean 'weight_decay'?",
    ),
    "temprature": (
        lambda t: t["stages"][0]["terms"]["mutual"].update(temprature=2.0),
        "stages.0.terms.mutual has no key 'temprature'; did you mean 'temperature'?",
    ),
    "from, where layers has to be": (
        lambda t: t["stages"][1]["terms"].update(feature_diversity={"from": ["stage2", "stage3"]}),
        "stages.1.terms.feature_diversity has no key 'from'; known: attention, distance, form, fusion, kernel, layers, "
        "pool, scale, weight",
    ),
    "scale": (
        lambda t: t["peers"][0]["posterior"].update(scale=-3.0),
        "peers.0.posterior has no key 'scale'; known: bayesian, gain, kind, noise, prior, prior_std, rho, "
        "uniform, width",
    ),
    "draw": (lambda t: t["evaluation"].update(draw=3), "evaluation has no key 'draw'; did you mean 'draws'?"),
}


@pytest.mark.parametrize(("change", "sentence"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_key_names_the_place_and_the_nearest(tmp_path, change, sentence):
    assert refused(tmp_path, change) == sentence


def test_renamed_key_blames_the_misspelling_not_the_missing_one(tmp_path):
    def change(table):
        table["stages"][0]["epoch"] = table["stages"][0].pop("epochs")

    assert refused(tmp_path, change) == "stages.0 has no key 'epoch'; did you mean 'epochs'?"


def test_a_misspelt_key_comes_before_other_faults(tmp_path):
    def change(table):
        table["data"]["batch_size"] = "many"
        table["stages"][1]["epoch"] = 3

    assert refused(tmp_path, change) == "stages.1 has no key 'epoch'; did you mean 'epochs'?"


WRONG = {
    "text for a number": (lambda t: t["stages"][0].update(epochs="ten"), "stages.0.epochs: .*integer, got 'ten'"),
    "fraction for a number": (lambda t: t["stages"][0].update(epochs=2.5), "stages.0.epochs: .*integer, got 2.5"),
    "zero epochs": (lambda t: t["stages"][0].update(epochs=0), "stages.0.epochs: .*greater than 0, got 0"),
    "number for text": (lambda t: t.update(title=3), "title: .*string, got 3"),
    "missing title": (lambda t: t.pop("title"), "'title' is missing"),
    "no peers": (lambda t: t.update(peers=[]), r"peers: .*at least 1 item.*, got \[\]"),
    "no stages": (
        lambda t: t.update(stages=[]),
        "stages are empty, and peer '.*' has no start_from: nothing was learnt by it",
    ),
    "no terms": (lambda t: t["stages"][0].update(terms={}), "stages.0.terms: a stage needs at least one term$"),
    "negative alpha": (
        lambda t: t["stages"][0]["terms"]["mutual"].update(alpha=-0.5),
        "stages.0.terms.mutual.alpha: input should be greater than or equal to 0, got -0.5",
    ),
    "a weight that is no number": (
        lambda t: t["stages"][0]["terms"]["mutual"].update(weight=float("nan")),
        "stages.0.terms.mutual.weight: input should be a finite number, got nan",
    ),
    "temperature zero": (
        lambda t: t["stages"][0]["terms"]["mutual"].update(temperature=0.0),
        "stages.0.terms.mutual.temperature: input should be greater than 0, got 0.0",
    ),
    "layers missing": (
        lambda t: t["stages"][1]["terms"]["feature_diversity"].pop("layers"),
        "'stages.1.terms.feature_diversity.layers' is missing$",
    ),
    "term": (
        lambda t: t["stages"][0]["terms"].update(mutul={}),
        r"stages.0.terms: there is no term 'mutul'; did you mean 'mutual'\?$",
    ),
    "augmentation": (
        lambda t: t["data"].update(augment=["crop", "flop"]),
        r"data.augment: there is no augmentation 'flop'; did you mean '.*'\?$",
    ),
    "posterior": (lambda t: t["peers"][0].update(posterior={"kind": "mean_feild"}), "peers.0.posterior.*mean_feild"),
    "reduction": (
        lambda t: t["stages"][0]["terms"]["weight_diversity"].update(reduction="max"),
        "stages.0.terms.weight_diversity.reduction: .*'sum'.*, got 'max'",
    ),
    "twins": (
        lambda t: t["peers"][1].update(name="scratch"),
        r"peers must have different names \(scratch, scratch\)$",
    ),
    "name with a slash": (lambda t: t["peers"][0].update(name="../a"), r"peers.0.name: .*pattern.*, got '\.\./a'"),
    "update": (lambda t: t.update(update="random"), "update: .*'sequential', got 'random'"),
    "a list for a table": (lambda t: t.update(data=[1]), r"data: .*, got \[1\]"),
    "a number for a term": (lambda t: t["stages"][0]["terms"].update(kl=3), "stages.0.terms.kl: .*, got 3"),
}


@pytest.mark.parametrize(("change", "pattern"), WRONG.values(), ids=WRONG)
def test_wrong_value_is_one_sentence_that_names_the_place(tmp_path, change, pattern):
    text = refused(tmp_path, change)
    assert re.match(pattern, text), text
    assert len(text) < 250


def test_unknown_network_is_named_when_it_is_built():
    inputs = networks.Inputs(10, (1, 8, 8), (0.5,), (0.5,))
    with pytest.raises(InputError, match=r"there is no network 'resnet9'; did you mean 'resnet\d+'\?"):
        networks.build("resnet9", inputs)


def test_invalid_toml_names_file_and_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text('title = "x"\n[data\n')
    with pytest.raises(InputError, match=r"broken.toml: not valid TOML \(.*line 2"):
        load_recipe(path)
    path.write_bytes(b'title = "\xff"')
    with pytest.raises(InputError, match=r"broken.toml: not valid TOML"):
        load_recipe(path)


def test_missing_recipes_are_named():
    with pytest.raises(InputError, match=r"^nowhere/mine.toml: no such recipe file$"):
        load_recipe("nowhere/mine.toml")
    with pytest.raises(InputError, match=r"no recipe 'mutual/digits-our'; did you mean 'mutual/digits-ours'\?"):
        load_recipe("mutual/digits-our")
    with pytest.raises(InputError, match=r"there is no recipe 'zzz'; see 'peerbayes recipes list'"):
        load_recipe("zzz")


# ---- overrides --------------------------------------------------------------------------------------------------


def test_overrides_reach_every_place():
    recipe = load_recipe(
        OURS,
        [
            "stages.0.epochs=5",
            "stage.1.epochs=3",
            "stages.*.optimizer.lr=0.5",
            "stages.0.lr_milestones=[2, 4]",
            "peers.scratch.network=mlp",
            "peer.1.network='resnet20'",
            'data.augment=["flip"]',
            "data.name=folder/some data.npz",
            "evaluation.out_of_distribution=['a', 'b']",
            "update=sequential",
            "stages.*.terms.mutual.alpha=2",
        ],
    )
    assert [stage.epochs for stage in recipe.stages] == [5, 3]
    assert [stage.optimizer.lr for stage in recipe.stages] == [0.5, 0.5]
    assert recipe.stages[0].lr_milestones == [2, 4]
    assert recipe.stages[1].lr_milestones == [30, 60, 90]
    assert [peer.network for peer in recipe.peers] == ["mlp", "resnet20"]
    assert recipe.data.augment == ["flip"]
    assert recipe.data.name == "folder/some data.npz"
    assert recipe.evaluation.out_of_distribution == ["a", "b"]
    assert recipe.update == "sequential"
    assert [stage.terms["mutual"]["alpha"] for stage in recipe.stages] == [2.0, 2.0]
    assert load_recipe(OURS).stages[0].epochs == 200


@given(epochs=st.integers(1, 10**6), lr=st.floats(1e-9, 1e3), text=st.text("abcXYZ_-./ ", min_size=1, max_size=12))
def test_any_override_round_trips_through_toml(epochs, lr, text):
    recipe = load_recipe(OURS, [f"stages.1.epochs={epochs}", f"stages.0.optimizer.lr={lr!r}", f"title='{text}'"])
    assert (recipe.stages[1].epochs, recipe.stages[0].optimizer.lr, recipe.title) == (epochs, lr, text)
    assert Recipe.parse(tomllib.loads(recipe.to_toml()), "again") == recipe


BAD = {
    "stages.2.epochs=5": r"--set stages.2.epochs=5: there is no item '2' \(0 to 1, or \*\)$",
    "stages.-1.epochs=5": r"there is no item '-1'",
    "peers.nobody.network=mlp": r"there is no item 'nobody' \(scratch, pretrained, or \*\)$",
    "title.text=5": r"--set title.text=5: 'text' is below a plain value$",
    "stages.0.epochs.x=5": r"'x' is below a plain value$",
    "stages.0.epochs": r"^--set stages.0.epochs: expected KEY=VALUE, such as stages.0.epochs=5$",
    "=5": r"^--set =5: expected KEY=VALUE",
    "stages.0.epoch=3": rf"^recipe {OURS}: stages.0 has no key 'epoch'; did you mean 'epochs'\?$",
    "stages.0.epochs=three": r"stages.0.epochs: .*integer, got 'three'$",
    "stages.0.epochs=5.5": r"stages.0.epochs: .*integer, got 5.5$",
    "stages=3": r"stages: .*list.*, got 3$",
}


@pytest.mark.parametrize(("override", "pattern"), BAD.items(), ids=BAD)
def test_bad_override_is_one_sentence(override, pattern):
    with pytest.raises(InputError, match=pattern) as caught:
        load_recipe(OURS, [override])
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_loaded_already_takes_overrides_too():
    recipe = load_recipe(OURS)
    assert load_recipe(recipe) is recipe
    changed = load_recipe(recipe, ["stages.*.epochs=5"])
    assert [stage.epochs for stage in changed.stages] == [5, 5]
    assert changed == load_recipe(OURS, ["stages.*.epochs=5"])
    with pytest.raises(InputError, match=rf"^recipe {OURS}: stages.0 has no key 'epoch'; did you mean 'epochs'\?$"):
        load_recipe(recipe, ["stages.0.epoch=5"])


@pytest.mark.parametrize("given", [None, 3, {"title": "x"}])
def test_what_is_no_recipe_is_one_sentence(given):
    with pytest.raises(InputError, match=f"recipe is of type {type(given).__name__}, expected a name, a file or"):
        load_recipe(given)


def test_settings_cannot_be_changed_after_loading():
    recipe = load_recipe(OURS)
    before = copy.deepcopy(recipe)
    with pytest.raises(ValueError, match="frozen"):
        recipe.title = "other"
    assert recipe == before


# ---- recipes that extend others ---------------------------------------------------------------------------------


def test_a_recipe_extends_another_by_changes_and_by_keys_of_its_own(tmp_path):
    (tmp_path / "base.toml").write_text(f'extends = "{OURS}"\nset = ["stages.*.epochs=7"]\n')
    path = tmp_path / "mine.toml"
    path.write_text(
        f'extends = "{tmp_path}/base.toml"\ntitle = "mine"\n'
        'set = ["stages.1.epochs=3", "stages.*.terms.kl.weight=0.5"]\n'
        "[evaluation]\ndraws = 9\n"
    )
    found, base = load_recipe(path, ["stages.1.terms.kl.weight=0.25"]), load_recipe(OURS)
    assert [stage.epochs for stage in found.stages] == [7, 3]
    assert [stage.terms["kl"]["weight"] for stage in found.stages] == [0.5, 0.25]
    assert (found.title, found.evaluation.draws, found.name) == ("mine", 9, "mine")
    assert found.peers == base.peers
    assert found.evaluation.ece_bins == 15  # a table of its own takes the whole place
    assert "extends" not in found.to_toml()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extends = "mutual/our"', "there is no recipe 'mutual/our'; did you mean 'mutual/ours'"),
        ("extends = 3", "'extends' must name a recipe"),
        ('extends = "mutual/ours"\nset = "stages.0.epochs=3"', "'set' be a list"),
        ('extends = "mutual/ours"\nset = ["stages.9.epochs=3"]', "--set stages.9.epochs=3: there is no item '9'"),
        ('extends = "PATH"', "extends itself by way of"),
        ('extends = "mutual/ours"\nepoch = 3', "has no key 'epoch'"),
    ],
)
def test_a_recipe_that_extends_badly_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("PATH", str(path)))
    with pytest.raises(InputError) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value) or "mutual/our" in str(caught.value)
    assert words in str(caught.value)


def test_runs_of_recipes_with_a_point_in_their_name_have_folders_of_their_own():
    names = [name for name in packaged() if name.startswith("renyi/")]
    assert len({default_folder(name, 0) for name in names}) == len(names) >= 75
    assert default_folder("some/mine.toml", 3) == Path("runs/some-mine-seed3")
    assert default_folder(str(Path.cwd() / "some" / "mine.toml"), 3) == Path("runs/some-mine-seed3")
    assert {default_folder(name, 3) for name in ("/else/deep/mine.toml", "../mine.toml")} == {Path("runs/mine-seed3")}


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("cifar10", "cifar10"),
        ("/else/v1.2", "v1.2"),
        ("/else/texts.csv", "texts"),
        (str(Path.cwd() / "some" / "images"), "some-images"),
        (str(Path.cwd()), Path.cwd().name),
    ],
)
def test_folders_of_general_recipes_are_named_by_their_data_too(data, name):
    assert default_folder("peers", 3, data=data) == Path(f"runs/peers-{name}-seed3")
    assert default_folder("mutual/ours", 3, data=data) == Path("runs/mutual-ours-seed3")
    assert default_folder("mine.toml", 3, data=data) == Path("runs/mine-seed3")


def test_the_methods_of_every_paper_can_be_tried_on_embedded_data():
    for paper in ("mutual", "renyi", "distillation", "sharing", "pipeline"):
        assert any(load_recipe(name).data.name == "digits" for name in packaged() if name.startswith(f"{paper}/digits"))


@pytest.mark.parametrize(("data", "classes"), [("agnews", 4), ("yahoo", 10), ("yelp", 5)])
def test_character_networks_of_paper_2_have_its_2_million_weights(data, classes):
    recipe = load_recipe(f"renyi/{data}-charcnn-alpha2")
    assert recipe.data.text is not None
    inputs = networks.Inputs(classes, (recipe.data.text.length,), (), (), tokens=71)
    for peer in recipe.peers:
        weights = sum(weight.numel() for weight in networks.build(peer.network, inputs).parameters())
        assert round(weights / 1e6) == 2


def test_runs_that_follow_the_runs_of_their_own_seeds_have_a_digest_in_common():
    def digest(seed, *sources):
        changes = [f"peers.0.start_from={sources[0]}", f"teachers.runs={list(sources)}"]
        return load_recipe("distillation/digits-resnet8-kd-de4", changes).digest_of_seed(seed)

    own = digest(1, "runs/dnn-seed1", "runs/seed1/weights-net.safetensors")
    assert own == digest(12, "runs/dnn-seed12", "runs/seed12/weights-net.safetensors")
    assert own != digest(2, "runs/dnn-seed1", "runs/seed1/weights-net.safetensors")  # another seed's
    assert digest(1, "runs/dnn-seed12") != digest(2, "runs/dnn-seed22")  # neither's
    assert digest(1, "runs/a-seed1") != digest(1, "runs/b-seed1")


def test_an_augmentation_twice_is_refused():
    with pytest.raises(InputError, match=r"data\.augment: each augmentation may be named once, not flip, crop, flip"):
        load_recipe(OURS, 'data.augment=["flip", "crop", "flip"]')
