"""Exports of runs: model repositories that peerbayes opens again, and programs that run without peerbayes and torch."""

import csv
import json
import shutil
import sys
import types

import numpy as np
import pytest
import torch
from exported import BLOCKED, code_of, conv_net, differs, ran, without
from PIL import Image

import peerbayes as pb
from commands import QUIET, called, contents, refused, save_npz, write_small
from peerbayes.api.calibrating import keep_together
from peerbayes.data.splits import FolderSplit
from peerbayes.data.transforms.channels import Recoloured
from peerbayes.errors import InputError
from peerbayes.exporting.card import _onnx_lines, _promised_lines, model_card
from peerbayes.exporting.checking import inputs_like
from peerbayes.posteriors import Certificate, Posterior
from peerbayes.posteriors.kinds import KINDS
from peerbayes.recipes.recipe import load_recipe, without_folders
from peerbayes.runs.hub import is_hub_name
from peerbayes.runs.run import Run
from peerbayes.runs.temperatures import keep_temperature

hub = pytest.importorskip("huggingface_hub")
TEXTS = """
title = "texts"
data = { name = "DATA", batch_size = 8, text = TEXT }
peers = [{ name = "only", network = "fasttext", posterior = { kind = "point" } }]
evaluation = { draws = 1 }
[[stages]]
epochs = 2
optimizer = { lr = 0.1 }
terms = { likelihood = {} }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two seeds of a run of two peers, evaluated, and a run of one."""
    folder, chance = write_small(tmp_path_factory.mktemp("repository")), np.random.default_rng(0)
    classes = (np.arange(90) % 3)[:, None, None]  # by their brightness, which noise hides
    images = (60 + 20 * classes + chance.normal(0, 60, (90, 8, 8))).clip(0, 255).astype(np.uint8)
    save_npz(folder / "small.npz", images=images)
    called("train", folder / "small.toml", "--seeds", "0,1", "--run", folder / "runs", *QUIET)
    called("train", folder / "source.toml", "--run", folder / "plain", *QUIET)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """The export of all peers as one."""
    called("export", folder / "runs" / "seed0", "--out", folder / "both")
    return folder / "both"


@pytest.fixture(scope="module")
def plain(folder):
    """The export of a plain network."""
    called("export", folder / "plain", "--out", folder / "exported")
    return folder / "exported"


def test_peers_predict_as_one(folder, both):
    run, images = Run(folder / "runs" / "seed0"), inputs_like((1, 8, 8), 0, 6)
    assert run.temperature not in (1, 100)
    wanted = run.predict(images, draws=3, device="cpu")
    assert differs(ran(both / "model.onnx", images, 0, 3), wanted) < 2e-6
    opened = pb.load(both)
    assert torch.equal(opened.predict(images, draws=3, device="cpu").probabilities, wanted.probabilities)
    assert list(opened) == ["a", "b"]


def test_one_peer_of_several_has_its_own_temperature(folder):
    run, images = Run(folder / "runs" / "seed0"), inputs_like((1, 8, 8), 0, 6)
    out = json.loads(called("export", run.weights_file("b"), "--to", "hub", "--out", folder / "one", "--json"))
    assert out["temperature"] == run["b"].temperature != run.temperature
    opened = pb.load(folder / "one")
    assert list(opened) == ["b"]
    wanted = run.predict(images, "b", draws=3, device="cpu")
    found = opened.predict(images, draws=3, device="cpu")
    assert torch.equal(found.probabilities, wanted.probabilities)
    assert found.temperature == run["b"].temperature
    assert called("predict", folder / "one" / "model.safetensors", str(_picture(folder)), "--device", "cpu")


def _picture(folder):
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "picture.png")
    return folder / "picture.png"


def test_the_card_runs_in_a_process_without_peerbayes_and_torch(plain, both):
    for made in (plain, both):
        images = [made / "photo.png", made / "another.jpg"]  # which the card names
        for number, path in enumerate(images):
            colours = np.random.default_rng(number).integers(0, 256, (8 + 5 * number, 11, 3), dtype=np.uint8)
            Image.fromarray(colours).save(path)
        code = code_of(made)
        check = "\nassert not {'torch', 'peerbayes'} & set(sys.modules)"
        saved = "\nnp.savez('out.npz', probabilities=probabilities, entropy=entropy, disagreement=disagreement)"
        without(("torch", "peerbayes"), f"import sys\n{code}{saved}{check}", made)
        found = np.load(made / "out.npz")
        for path in images:
            shutil.copy(path, made.parent / path.name)
            path.unlink()
        run = pb.load(made)
        wanted = run.predict([made.parent / path.name for path in images], device="cpu")
        outputs = [torch.from_numpy(found[name]) for name in ("probabilities", "entropy", "disagreement")]
        assert differs(outputs, wanted) < 2e-6


@pytest.mark.parametrize(("channels", "size", "margin"), [(3, 8, 1.0), (3, 10, 256 / 224), (1, 8, 1.0), (1, 9, 1.3)])
def test_the_card_reads_files_as_peerbayes_does(tmp_path, channels, size, margin):
    about = {"input": "images", "input_shape": [channels, size, size], "preprocessing": {"margin": margin}}
    about |= {"noise": "none", "class_names": None}
    code = "\n".join(_onnx_lines(about, None))
    code = code[code.index("def read") : code.index("feeds = ")]
    space = {"np": np, "Image": Image}
    exec(code, space)
    modes = {"colour": (17, 9, 3), "tall": (9, 30, 3), "small": (5, 5, 3), "grey": (12, 11), "square": (size, size, 3)}
    files = []
    for number, (name, shape) in enumerate(modes.items()):
        picture = Image.fromarray(np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8))
        for end, made in (("", picture), ("-palette", picture.convert("RGB").quantize(7))):
            files.append(str(tmp_path / f"{name}{end}.png"))
            made.save(files[-1])
    split = FolderSplit(files, None, size, margin)
    split = Recoloured(split, 1) if channels == 1 else split
    wanted = split.batch(torch.arange(len(files)), torch.device("cpu"))[0].float() / 255
    found = np.stack([space["read"](file) for file in files])
    assert found.dtype == np.float32
    assert np.abs(found - wanted.numpy()).max() < 1e-6


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("by_class", [False, True])
def test_the_card_keeps_the_certificate(method, by_class, capsys):
    p = np.random.default_rng(0).dirichlet([0.4] * 4, 200)
    many = 4 if by_class else 1
    sets = {"level": 0.9, "method": method, "thresholds": [0.6, 0.7, 0.5, 0.8][:many], "images": [50] * many}
    sets |= {"penalty": 0.05, "rank": 2} if method == "raps" else {}
    risk = {"level": 0.1, "delta": 0.1, "thresholds": [0.55, 0.6, 0.7, 0.5][:many]}
    risk |= {"images": [50] * many, "answered": [40] * many, "errors": [1] * many}
    told = {"data": "d", "images": 50, "fitted": 10, "seed": 0, "draws": 1, "temperature": 1.0, "classes": 4}
    certificate = Certificate(**told, coverage=sets, risk=risk)
    about = {"certificate": certificate.model_dump(exclude_none=True), "class_names": ["a", "b", "c", "d"]}
    space = {"np": np, "probabilities": p, "about": about}
    exec("\n".join(_promised_lines(about)), space)
    log_p = torch.from_numpy(p).log()
    assert np.array_equal(~space["answered"], certificate.abstain(log_p).numpy())
    assert np.array_equal(space["members"], certificate.sets(log_p).numpy())
    assert 0 < space["answered"].sum() < 200
    first = ", ".join(f"'{name}'" for name, has in zip("abcd", space["members"][0], strict=True) if has)
    assert f"[[{first}]" in capsys.readouterr().out


def test_what_is_blocked_is_blocked(tmp_path):
    with pytest.raises(AssertionError, match="torch is blocked"):
        without(("torch",), "import torch", tmp_path)
    assert "blocked" in BLOCKED


@pytest.mark.parametrize(
    "text",
    [
        '{ tokens = "words", ngrams = 3, length = 9, buckets = 40 }',
        '{ tokens = "characters", length = 30 }',
        '{ tokens = "pieces", length = 7, tokenizer = "FILE" }',
    ],
)
def test_texts_become_tokens_as_in_training_without_peerbayes(tmp_path, text):
    with open(tmp_path / "texts.csv", "w", newline="") as file:
        words = ("a goal, for the TEAM!", "the Ünïcode bank; market: up")
        csv.writer(file).writerows([[1 + n % 2, f"{words[n % 2]} {n}"] for n in range(40)])
    if "FILE" in text:
        tokenizers = pytest.importorskip("tokenizers")
        pieces = {
            piece: number
            for number, piece in enumerate(["the", "[PAD]", "[UNK]", "a", "for", "up", "go", "##al", "mark", "##et"])
        }
        made = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "pieces.json"))
        text = text.replace("FILE", str(tmp_path / "pieces.json"))
    (tmp_path / "texts.toml").write_text(TEXTS.replace("DATA", str(tmp_path / "texts.csv")).replace("TEXT", text))
    called("train", tmp_path / "texts.toml", "--run", tmp_path / "run", *QUIET)
    called("export", tmp_path / "run", "--out", tmp_path / "made")
    texts = ["", "A team's goal - for the bank", "unknown wörds " * 9, "market"]
    code = code_of(tmp_path / "made").replace('["a text", "another one"]', repr(texts))
    saved = "\nnp.savez('out.npz', tokens=feeds['tokens'], probabilities=probabilities)"
    (tmp_path / "pieces.json").unlink(missing_ok=True)
    without(("torch", "peerbayes"), code + saved, tmp_path / "made")
    found, run = np.load(tmp_path / "made" / "out.npz"), pb.load(tmp_path / "made")
    assert np.array_equal(found["tokens"], run.vocabulary.encode(texts).numpy())
    wanted = run.predict(texts, device="cpu").probabilities.numpy()
    assert np.abs(found["probabilities"] - wanted).max() < 2e-6
    assert json.loads((tmp_path / "made" / "config.json").read_text())["task"] == "text-classification"


# ---- the hub's layout ------------------------------------------------------------------------------------------------


def test_the_hubs_own_validators_take_it(plain, both):
    for made in (plain, both):
        card = hub.ModelCard.load(made / "README.md")
        assert card.data.library_name == "peerbayes"
        assert card.data.pipeline_tag == "image-classification"
        assert {"peerbayes", "onnx"} <= set(card.data.tags)
        results = {one.metric_type: one for one in card.data.eval_results}
        assert set(results) == {"accuracy", "nll", "ece"}
        assert results["nll"].dataset_name == "small"
        again = hub.ModelCardData(**card.data.to_dict())  # which checks types
        assert again.to_dict()["model-index"] == card.data.to_dict()["model-index"]
        assert hub.repocard.metadata_load(made / "README.md")["model-index"]
        config = json.loads((made / "config.json").read_text())
        assert config["id2label"] == {"0": "0", "1": "1", "2": "2"}
        assert config["architectures"] == ["mlp"]
    assert (plain / "model.safetensors").is_file()
    hub.utils.validate_repo_id("somebody/their-model")


def test_the_cards_figures_are_those_of_the_records(folder, both):
    records = [json.loads((folder / "runs" / f"seed{seed}" / "evaluation.json").read_text()) for seed in (0, 1)]
    nll = [record["ensemble"]["cnll"] for record in records]
    results = {one.metric_type: one.metric_value for one in hub.ModelCard.load(both / "README.md").data.eval_results}
    assert results["nll"] == round(np.mean(nll), 5)
    text = (both / "README.md").read_text()
    accuracy = 100 * np.array([record["ensemble"]["accuracy"] for record in records])
    error = accuracy.std(ddof=1) / np.sqrt(2)
    assert f"| ensemble | {accuracy.mean():.2f} ± {error:.2f} |" in text
    assert "standard error over seeds 0, 1" in text
    assert "one seed" not in text
    for said in (
        "## Limits",
        "## Training",
        f"| `model.onnx` | {(both / 'model.onnx').stat().st_size:,} |",
        "opset 18",
    ):
        assert said in text
    assert "Certificate" not in text


@pytest.mark.parametrize("ships", ["together", "alone"])
def test_a_card_has_no_figures_of_a_temperature_that_does_not_ship(folder, tmp_path, ships):
    shutil.copytree(folder / ("runs/seed0" if ships == "together" else "plain"), tmp_path / "run")
    before = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    rng = np.random.default_rng(1)
    splits = {part: (rng.integers(0, 256, (30, 8, 8), np.uint8), np.arange(30) % 3) for part in ("train", "validation")}
    run = pb.calibrate(tmp_path / "run", pb.data.from_arrays(**splits), device="cpu")
    then = before["ensemble"] if ships == "together" else before["peers"][0]
    assert abs(run.temperature / then["temperature"] - 1) > 0.01
    made = pb.export(run, to="hub", out=tmp_path / "made").folder
    card = hub.ModelCard.load(made / "README.md")
    found = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert found == {"accuracy": round(then["accuracy"], 5)}
    assert "cNLL" not in card.text
    assert "NLL and ECE are at temperature 1; they were not measured at the temperature that ships." in card.text
    assert f"{then['nll']:.3f}" in card.text

    for name in run:  # as `adopt` ships what it can choose nothing for
        keep_temperature(run[name], 1.0, run.weights_file(name))
    keep_together(run, 1.0)
    card = hub.ModelCard.load(pb.export(run, to="hub", out=tmp_path / "one").folder / "README.md")
    found = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert found == {key: round(then[key], 5) for key in ("accuracy", "nll", "ece")}
    assert "cNLL" not in card.text
    assert "not measured" not in card.text


def test_a_certificate_and_names_have_their_place_in_the_card(folder, plain):
    about = json.loads((plain / "config.json").read_text())
    sets = {"level": 0.9, "method": "lac", "thresholds": [0.6], "images": [150]}
    told = {"data": "a|b", "images": 150, "fitted": 50, "seed": 0, "draws": 1, "temperature": 1.0, "classes": 3}
    about |= {"certificate": {**told, "coverage": sets}, "class_names": ["a|b", "<script>", "c\n# d"]}
    text = model_card(plain, about, Run(folder / "plain"))
    assert (
        "## Certificate\n\n- LAC sets hold the true class with probability 0.9 (150 inputs; scores up to 0.6)" in text
    )
    assert "Shown on 150 inputs of a\\|b; 50 others fitted the temperature (seed 0)." in text
    assert 'run.predict("photos/", coverage=0.9).to_csv' in text
    assert "a\\|b, \\<script\\>, c # d" in text


def test_the_export_of_an_adoption_lies_beside_it(folder, tmp_path):
    shutil.copytree(folder / "plain", tmp_path / "adopted" / "width-0.1")
    record = {"ship": {"run": "bayesian", "peer": "net"}, "folders": {"bayesian": "width-0.1"}}
    (tmp_path / "adopted" / "adopted.json").write_text(json.dumps(record))
    assert pb.export(tmp_path / "adopted", to="hub").folder == tmp_path / "adopted-hub"
    assert pb.export(tmp_path / "adopted" / "width-0.1", to="hub").folder == tmp_path / "adopted" / "width-0.1-hub"


def test_a_card_of_few_bayesian_weights_says_how_many(tmp_path):
    with (tmp_path / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[1 + n % 2, f"{('good', 'bad')[n % 2]} word {n}"] for n in range(40)])
    recipe = TEXTS.replace("DATA", str(tmp_path / "texts.csv")).replace("TEXT", '{ tokens = "words" }')
    (tmp_path / "texts.toml").write_text(recipe.replace('kind = "point"', 'kind = "mean_field"'))
    called("train", tmp_path / "texts.toml", "--run", tmp_path / "run", *QUIET)
    called("export", tmp_path / "run", "--to", "hub", "--out", tmp_path / "made")
    posterior = pb.load(tmp_path / "run")["only"]
    count = f"{posterior.layout.size:,} of {posterior.layout.size + posterior.rest_layout.size:,} weights"
    text = (tmp_path / "made" / "README.md").read_text()
    assert f"`only`: a Gaussian over {count}" in text
    assert 'run.predict(["a text", "another one"])' in text
    assert "Images have" not in text


@pytest.mark.parametrize("kind", [*KINDS, "shared"])
def test_a_card_says_in_words_what_weights_are(kind, tmp_path, plain):
    about = json.loads((plain / "config.json").read_text()) | {"posteriors": [kind]}
    assert f": {Posterior.of_kind(kind).in_words}." in model_card(tmp_path, about, None)
    assert len(Posterior.of_kind(kind).in_words) > len(kind)


def test_no_place_of_this_machine_is_told(folder, plain, both):
    for made in (plain, both):
        for name, content in contents(made).items():
            if name.endswith((".json", ".toml", ".md", ".onnx")):
                assert str(folder).encode() not in content, name
    recipe = load_recipe(folder / "small.toml")
    assert without_folders(recipe).data.name == "small.npz"
    assert without_folders(load_recipe("mutual/digits-ours")) == load_recipe("mutual/digits-ours")


def test_a_repository_of_the_hub_opens_in_two_lines(plain, tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, *, revision=None, allow_patterns):
        hub.utils.validate_repo_id(name)
        asked.append((name, revision))
        kept = [path for pattern in allow_patterns for path in plain.glob(pattern)]
        for path in kept:
            shutil.copy(path, tmp_path / path.name)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    run = pb.load("somebody/their-model", revision="v1")
    assert asked == [("somebody/their-model", "v1")]
    assert not (tmp_path / "model.onnx").exists()
    images = inputs_like((1, 8, 8), 0, 3)
    wanted = pb.load(plain).predict(images, device="cpu").probabilities
    assert torch.equal(run.predict(images, device="cpu").probabilities, wanted)


def test_the_real_hub_client_takes_its_cache_offline(plain, tmp_path, monkeypatch):
    # The layout that huggingface_hub itself keeps; offline it looks nowhere else.
    commit, repository = "a" * 40, tmp_path / "models--somebody--their-model"
    shutil.copytree(plain, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    real = hub.snapshot_download
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **how: real(name, cache_dir=tmp_path, **how))
    assert pb.load("somebody/their-model").folder == repository / "snapshots" / commit
    with pytest.raises(InputError, match="there is no such folder, and it can't be had from the Hugging Face hub"):
        pb.load("somebody/another")


def test_only_names_of_repositories_are_looked_for_elsewhere(folder, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("asked the hub")

    monkeypatch.setattr(hub, "snapshot_download", never)
    monkeypatch.chdir(folder)
    for given in ("runs/seed9", "missing", "a/b/c", "../a/b", "/a/b", "~/a", folder / "nobody/here", "a b/c"):
        assert not is_hub_name(given)
        with pytest.raises(InputError, match="not a run folder"):
            pb.load(given)
    with pytest.raises(InputError, match="revision is 'v1'"):
        pb.load(folder / "plain", revision="v1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"pip install 'peerbayes\[export\]'"):
        pb.load("somebody/their-model")


def test_code_of_a_repository_is_not_run(plain, tmp_path, monkeypatch):
    made = shutil.copytree(plain, tmp_path / "made")
    recipe = (made / "recipe.toml").read_text()
    (made / "recipe.toml").write_text(recipe.replace('"mlp"', '"planted_module:net"'))
    mark = tmp_path / "mark"
    planted = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\nfrom peerbayes.networks import build\n"
    (made / "planted_module.py").write_text(f"{planted}def net(inputs): return build('mlp', inputs)\n")
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))
    with pytest.raises(InputError, match=r"would import the module 'planted_module'.*trust=True"):
        pb.load(made)
    with pytest.raises(InputError, match="would import the module 'planted_module'"):
        pb.export(made, out=tmp_path / "again")
    assert not mark.exists()
    images = inputs_like((1, 8, 8), 0, 3)
    found = pb.load(made, trust=True).predict(images, device="cpu")
    assert mark.exists()
    assert torch.equal(found.probabilities, pb.load(plain).predict(images, device="cpu").probabilities)


def test_damaged_weights_are_refused(plain, tmp_path):
    made = shutil.copytree(plain, tmp_path / "made")
    content = bytearray((made / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (made / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors: corrupt"):
        pb.load(made)["only"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_bad_input_is_one_sentence_and_nothing_is_left(folder, capsys):
    before = sorted(path.name for path in folder.iterdir())
    run = folder / "plain"
    assert "is there already" in refused(capsys, "export", run, "--out", folder / "plain")
    assert "not a run folder" in refused(capsys, "export", folder / "nobody")
    assert "draws" in refused(capsys, "export", run, "--draws", "3", "--out", folder / "x")
    assert "opset is 5" in refused(capsys, "export", run, "--opset", "5", "--out", folder / "x")
    assert "there are peers a, b" in refused(
        capsys, "export", folder / "runs" / "seed0", "--noise", "input", "--out", folder / "x"
    )
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_damaged_record_is_said(folder, tmp_path, capsys):
    run = shutil.copytree(folder / "plain", tmp_path / "run")
    (run / "evaluation.json").write_text('{"peers": 3}')
    assert "not a record of an evaluation" in refused(capsys, "export", run, "--to", "hub", "--out", tmp_path / "x")
    (run / "evaluation.json").unlink()
    called("export", run, "--to", "hub", "--out", tmp_path / "x")
    assert "It was not evaluated" in (tmp_path / "x" / "README.md").read_text()


def test_a_posterior_without_a_run_says_how_it_is_opened(tmp_path):
    done = pb.export(pb.Point(conv_net()), to="hub", out=tmp_path / "made", shape=(2, 4, 4))
    with pytest.raises(InputError, match=r"peerbayes\.Posterior\.load"):
        pb.load(done.folder)
    assert isinstance(pb.Posterior.load(done.folder / "model.safetensors", conv_net()), pb.Point)
    assert hub.ModelCard.load(done.folder / "README.md").data.eval_results is None
    assert isinstance(done.about, types.MappingProxyType | dict)
