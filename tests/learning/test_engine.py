import dataclasses
import functools

import pytest
import torch

from peerbayes.errors import InputError
from peerbayes.learning import Learner, Reporter, engine, load_data, load_recipe
from peerbayes.learning.engine import pick
from peerbayes.learning.jobs import build_peer

CHANGES = [
    "peers.*.network=mlp",
    "stages.0.epochs=1",
    "stages.1.epochs=1",
    "data.batch_size=256",
    "data.validation=0",
    "stages.1.terms.feature_diversity.layers=['hidden.0', 'hidden.1']",
    "gradient_share_every=3",
    "peers.pretrained.start_from=none",
]


def trained(name, tmp_path, reporter=None):
    recipe = load_recipe("mutual/digits-ours", CHANGES)
    data = load_data(recipe)
    peers = {
        peer.name: build_peer(
            peer.model_copy(update={"start_from": None}), recipe, data, 0, tmp_path, torch.device("cpu")
        )
        for peer in recipe.peers
    }
    lines = []
    learner = Learner(recipe, peers, data, 0, engine=name, log=lines.append, reporter=reporter)
    learner.run()
    return peers, lines, learner


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # raised inside torch's tracer
def test_compiled_and_eager_steps_agree(tmp_path, monkeypatch):
    # The tracing and the splitting into forward and backward are what can go wrong; code generation is torch's.
    monkeypatch.setattr(engine, "compiled", functools.partial(torch.compile, backend="aot_eager", dynamic=False))
    eager, eager_lines, _ = trained("eager", tmp_path)
    compiled, lines, learner = trained("compiled", tmp_path)
    assert learner.engine.name == "compiled"
    for name, posterior in eager.items():
        for key, tensor in posterior.state().items():
            other = compiled[name].state()[key]
            assert torch.allclose(tensor, other, rtol=1e-4, atol=1e-5), (name, key)
    for line, other in zip(eager_lines, lines, strict=True):
        for name, peer in line["peers"].items():
            assert other["peers"][name]["terms"] == pytest.approx(peer["terms"], rel=1e-4)
            assert other["peers"][name]["gradient_share"] == pytest.approx(peer["gradient_share"], rel=1e-3, abs=1e-6)


def test_an_engine_that_fails_is_left_for_the_eager_one_with_a_reason(tmp_path, monkeypatch):
    said = []

    class Listening(Reporter):
        def warn(self, text):
            said.append(text)

    def refuse(_function):
        raise RuntimeError("no compiler here\nand more")

    eager, _, _ = trained("eager", tmp_path)
    monkeypatch.setattr(engine, "compiled", refuse)
    peers, _, learner = trained("compiled", tmp_path, Listening())
    assert learner.engine.name == "eager"
    assert said == ["the compiled engine can't run this cohort, going on eagerly: no compiler here"]
    for name, posterior in eager.items():
        assert torch.equal(posterior.mean, peers[name].mean)


def test_the_captured_engine_asks_for_a_gpu():
    with pytest.raises(InputError, match="captured engine needs a CUDA device"):
        pick("captured", torch.device("cpu"))


@pytest.mark.filterwarnings("default")  # torch's compiler warns while it is imported
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_agree_with_eager_ones_on_a_gpu():
    pytest.importorskip("triton")
    recipe = load_recipe("mutual/digits-vanilla", ["peers.*.network=mlp", "stages.*.epochs=2", "data.validation=0"])
    loaded, found = load_data(recipe), {}
    data = dataclasses.replace(loaded, train=loaded.train.to("cuda"))
    for name in ("eager", "captured"):
        peers = {
            peer.name: build_peer(
                peer.model_copy(update={"start_from": None}), recipe, data, 0, None, torch.device("cuda")
            )
            for peer in recipe.peers
        }
        learner = Learner(recipe, peers, data, 0, engine=name)
        learner.run()
        assert learner.engine.name == name
        found[name] = peers
    for peer, posterior in found["eager"].items():
        assert torch.allclose(posterior.mean, found["captured"][peer].mean, rtol=1e-2, atol=1e-3)
