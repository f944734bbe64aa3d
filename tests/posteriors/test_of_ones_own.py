"""A posterior of one's own, in `laplace_field.py`, works in all verbs; nothing else knows of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Laplace, kl_divergence

import peerbayes as pb
from commands import QUIET, called, refused, write_small
from laplace_field import LaplaceField
from learners import same, stopped_at
from peerbayes.math.noise import Address, normal
from peerbayes.recipes.recipe import load_recipe

TESTS = Path(__file__).parent.parent
KIND = "laplace_field:LaplaceField"
OWN = [f"peers.*.posterior={{kind='{KIND}', rho=-4.0}}", "evaluation.draws=3"]
SET = [word for line in OWN for word in ("--set", line)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def trained(place):
    called("train", place / "small.toml", "--run", place / "run", "--data-root", place, *SET, *QUIET)
    return place / "run"


def elsewhere(code, *paths):
    """Run Python in a process that has not imported the posterior."""
    known = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=known, timeout=120)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_its_draws_and_kl_are_those_of_the_distribution():
    posterior = LaplaceField(nn.Linear(100, 50), rho=-1.0, prior_scale=0.3)
    exact = kl_divergence(Laplace(posterior.mean, posterior.scale), Laplace(0.0, 0.3))
    torch.testing.assert_close(posterior.kl_per_weight(), exact)
    draws = torch.stack([posterior.draw(Address(0).at(number)).flat for number in range(200)])
    assert abs(((draws - posterior.mean) / posterior.std).std().item() - 1) < 0.01
    noise = normal(Address(1), posterior.noise_size)
    share = Laplace(posterior.mean, posterior.scale).cdf(posterior.place(noise)[0])
    torch.testing.assert_close(share, torch.special.ndtr(noise), atol=1e-4, rtol=1e-4)


def test_a_recipe_checks_its_options_by_its_constructor(place, capsys):
    words = ("train", place / "small.toml", "--run", place / "no", "--data-root", place, *QUIET, "--set")
    for change, sentence in {
        "prior_scale=-1": "prior_scale: input should be greater than 0",
        "priors='normal'": "has no key 'priors'; did you mean 'prior'?",
        "prior='anchored'": "has an anchored prior but no start_from",
    }.items():
        assert sentence in refused(capsys, *words, f"peers.*.posterior={{kind='{KIND}', {change}}}")
    assert "'laplace_field:Other' can't be imported" in refused(
        capsys, *words, "peers.*.posterior.kind='laplace_field:Other'"
    )
    assert not (place / "no").exists()


def test_its_run_is_judged_and_told_of(trained):
    record = json.loads(called("evaluate", trained, "--json", "--device", "cpu"))
    assert [peer["name"] for peer in record["peers"]] == ["a", "b"]
    assert all(0 <= peer["accuracy"] <= 1 for peer in record["peers"])
    assert record["peers"][0]["nll"] != record["peers"][1]["nll"]
    assert json.loads(called("size", trained / "weights-a.safetensors", "--json", "--device", "cpu"))


def test_its_run_is_read_in_another_process_where_it_is_trusted(trained):
    code = f"import peerbayes as pb, torch; run = pb.load({str(trained)!r}, trust=TRUST)"
    code += "; print(run['a'].predict(torch.zeros(2, 1, 8, 8), draws=3).probabilities.tolist())"
    with torch.no_grad():
        mine = pb.load(trained)["a"].predict(torch.zeros(2, 1, 8, 8), draws=3).probabilities.tolist()
    assert json.loads(elsewhere(code.replace("TRUST", "True"), TESTS)) == mine
    assert "if you trust this run folder" in elsewhere(code.replace("TRUST", "False"), TESTS)
    weights = f"import peerbayes as pb, torch; pb.Posterior.load({str(trained / 'weights-a.safetensors')!r}, None)"
    assert "would import the module 'laplace_field'" in elsewhere(weights, TESTS)  # a file's word is not a recipe's


def test_its_checkpoints_resume_exactly(place, trained):
    recipe = load_recipe(place / "small.toml", OWN)
    with stopped_at(5):
        pb.train(recipe, place / "halted", device="cpu", checkpoint_every=2, root=place)
    resumed = pb.train(recipe, place / "halted", device="cpu", checkpoint_every=2, root=place, resume=True)
    whole = pb.load(trained)
    assert all(same(resumed[name].state(), whole[name].state()) for name in whole)


def test_it_is_fitted_to_a_network_of_ones_own(place):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    recipe = load_recipe(place / "small.toml")
    run = pb.fit({"own": LaplaceField(network), "usual": pb.MeanField(network)},
                 data=recipe.data.name, recipe=recipe, run=place / "fitted", device="cpu", root=place)  # fmt: skip
    assert run.recipe.peer("own").posterior.prior_scale == 0.1
    assert isinstance(pb.load(place / "fitted", {"own": network, "usual": network})["own"], LaplaceField)


def test_it_teaches_and_learns_from_teachers(place, trained):
    short = ["stages.0.epochs=1", "data.batch_size=12"]
    into = pb.load(trained).network("a")
    plain = pb.distill([pb.load(trained)["a"]], into=into, run=place / "taught", overrides=short, device="cpu")
    assert plain(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    pb.distill([trained], into=into, recipe="distil", run=place / "learns", device="cpu",
               overrides=[*short, f"peers.0.posterior={{kind='{KIND}'}}"])  # fmt: skip
    student = pb.load(place / "learns", {"student": into})["student"]
    assert isinstance(student, LaplaceField)
    # By recipe as from Python.
    called("distill", trained, "--into", "distil", "--run", place / "by-recipe", *QUIET, "--set", short[0],
           "--set", f"peers.0.posterior={{kind='{KIND}'}}")  # fmt: skip
    assert isinstance(pb.load(place / "by-recipe")["student"], LaplaceField)


def test_its_weights_share_a_codebook(place, trained):
    few = ["peers.0.posterior.components=8", "peers.0.posterior.outliers=false", "stages.0.epochs=1"]
    words = [word for line in few for word in ("--set", line)]
    called("compress", trained / "weights-a.safetensors", "--run", place / "shared", *words, *QUIET)
    assert pb.load(place / "shared")["net"].counts()["components"] == 8


def test_a_sweep_varies_its_options(place):
    called("sweep", place / "small.toml", "--over", "peers.*.posterior.prior_scale=0.05,0.5", "--out", place / "sweep",
           "--seeds", "0", "--data-root", place, *SET, *QUIET)  # fmt: skip
    recipes = [pb.load(path.parent).recipe for path in (place / "sweep").rglob("recipe.toml")]
    found = {recipe.peers[0].posterior.prior_scale for recipe in recipes}
    assert found == {0.05, 0.5}
