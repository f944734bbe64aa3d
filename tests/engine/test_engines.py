import contextlib
import dataclasses
import functools
import gc
import itertools
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

from learners import Recorder
from peerbayes.api.fitting import fit
from peerbayes.data import ArraySplit, Dataset, augment, from_arrays, order, to_unit
from peerbayes.data.transforms.mix import Mixer
from peerbayes.engine import engines as engine
from peerbayes.engine import verification as verifying
from peerbayes.engine.engines import pick
from peerbayes.engine.step_parts import Clock, StepFunctions, run_peer, term_value
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField, Point
from peerbayes.recipes.recipe import Recipe, load_recipe
from peerbayes.recipes.recipe_data import load_data
from peerbayes.runs.building import build_peer
from peerbayes.training.learner import Learner
from peerbayes.training.loop import run_together
from peerbayes.training.reporters import Reporter

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


def trained(name, tmp_path, reporter=None, update="simultaneous"):
    recipe = load_recipe("mutual/digits-ours", [*CHANGES, f"update={update}"])
    data = load_data(recipe)
    peers = {
        peer.name: build_peer(peer.model_copy(update={"start_from": None}), data, 0, torch.device("cpu"))
        for peer in recipe.peers
    }
    lines = []
    learner = Learner(recipe, peers, data, 0, engine=name, log=lines.append, reporter=reporter)
    learner.run()
    return peers, lines, learner


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # raised inside torch's tracer
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the tracer of torch 2.11
@pytest.mark.parametrize("update", ["simultaneous", "sequential"])
@pytest.mark.usefixtures("traced")
def test_compiled_and_eager_steps_agree(update, tmp_path):
    eager, eager_lines, _ = trained("eager", tmp_path, update=update)
    compiled, lines, learner = trained("compiled", tmp_path, update=update)
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


def broken_backend(_graph, _inputs):
    raise TypeError("no such kernel\nand more")


def test_the_reason_names_the_part_and_what_its_compiler_says(tmp_path, monkeypatch):
    """The first line of torch's own error says only: backend='broken_backend' raised."""
    told = Recorder()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken_backend))
    engine.compiled.cache_clear()
    try:
        learner = trained("compiled", tmp_path, told)[2]
    finally:
        engine.compiled.cache_clear()
    assert learner.engine.name == "eager"
    why = f"torch {torch.__version__} can't compile 'prepare_images': TypeError: no such kernel"
    assert told.warnings == [f"the compiled engine can't run this cohort, going on eagerly: {why}"]


def test_however_many_networks_a_process_has_each_is_compiled_once(monkeypatch):
    """They all go through one function, which torch gives up compiling after 8 of them, without a word."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    engine.compiled.cache_clear()
    try:
        run, inputs, count = engine.compiled(run_peer), torch.rand(2, 3), []
        for width in range(10):
            network = nn.Linear(3, 2 + width)
            posterior = Point(network)
            for _ in range(2):
                logits, _ = run(posterior, inputs, posterior.mean, None, [], None)
                count.append(len(graphs))
            torch.testing.assert_close(logits, network(inputs))
    finally:
        engine.compiled.cache_clear()
    assert count == [number for number in range(1, 11) for _ in range(2)]


def test_an_engine_that_fails_is_freed_at_once(tmp_path, monkeypatch):
    """It may hold graphs and their memory, and the next collection may come in the middle of another's capture."""
    left = []

    def failing(_function):
        def call(*_arguments):
            raise RuntimeError("no compiler here")

        return call

    begin = engine.Compiled.begin_stage

    def noting(self, *steps):
        left.append(weakref.ref(self))
        begin(self, *steps)

    monkeypatch.setattr(engine, "compiled", failing)
    monkeypatch.setattr(engine.Compiled, "begin_stage", noting)
    gc.disable()
    try:
        with pytest.warns(PeerbayesWarning, match="going on eagerly: no compiler here"):
            learner = trained("compiled", tmp_path)[2]
        assert learner.engine.name == "eager"
        assert [engine() for engine in left] == [None]
    finally:
        gc.enable()


class Loop:
    """Garbage that only a collection frees, as cohorts and what compilers leave behind are."""

    def __init__(self, held=None):
        self.itself, self.held = self, held


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(fails, monkeypatch):
    """A CUDA graph or a kernel that is destroyed then makes the capture fail; streams and graphs are stand-ins here."""
    garbage, seen = [], []

    @contextlib.contextmanager
    def graph(_graph, stream):
        garbage.append(weakref.ref(Loop()))
        yield
        churn = [[] for _ in range(100_000)]  # enough for several collections
        seen.append(len(churn))
        seen.append(garbage[0]() is not None)

    def step():
        if fails:
            raise RuntimeError("a step that reads")
        return [[] for _ in range(100_000)]

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Loop)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    captured = engine.Captured.__new__(engine.Captured)
    captured.cohort, captured.stream = types.SimpleNamespace(device=torch.device("cpu")), None
    with pytest.raises(RuntimeError, match="that reads") if fails else contextlib.nullcontext():
        captured._capture(step)
    assert seen == ([] if fails else [100_000, True])
    assert gc.isenabled()
    gc.collect()
    assert garbage[0]() is None


def test_what_a_compiler_tells_its_authors_is_not_told(tmp_path, monkeypatch):
    told = []

    def talkative(function):
        def call(*arguments):
            if not told:
                told.append(warnings.warn_explicit("mind me", FutureWarning, "x.py", 1, "torch._inductor.lowering"))
            return function(*arguments)

        return call

    monkeypatch.setattr(engine, "compiled", talkative)
    *_, learner = trained("compiled", tmp_path)  # warnings are errors here
    assert learner.engine.name == "compiled"
    assert told


def lost_term(term, options, batch, peer):
    value, notes = term_value(term, options, batch, peer)
    return value.detach() if term.name == "kl" else value, notes


def wrong_network(*arguments):
    logits, features = run_peer(*arguments)
    return logits + 9 * (logits - logits.detach()), features


@pytest.mark.parametrize(
    ("part", "wrong", "told"),
    [
        ("term_value", lost_term, "compiles term 'kl' of peer 'scratch' to one whose gradient is off by"),
        ("run_peer", wrong_network, "compiles the network of peer 'scratch' to one whose gradient has a norm of"),
    ],
)
def test_a_compiler_that_changes_a_gradient_is_left(part, wrong, told, tmp_path, monkeypatch):
    """The values are right in both: nothing else would tell."""
    said = []

    class Listening(Reporter):
        def warn(self, text):
            said.append(text)

    eager, _, _ = trained("eager", tmp_path)
    monkeypatch.setattr(engine, "compiled", lambda function: wrong if function.__name__ == part else function)
    peers, _, learner = trained("compiled", tmp_path, Listening())
    assert learner.engine.name == "eager"
    (line,) = (text for text in said if "compiled engine" in text)
    assert line.startswith("the compiled engine can't run this cohort, going on eagerly: torch ")
    assert told in line
    for name, posterior in eager.items():
        assert torch.equal(posterior.mean, peers[name].mean)


def test_what_is_not_finite_is_not_the_compilers_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(Learner, "run", lambda self: self.feed.prepare(0))
    peers, _, learner = trained("eager", tmp_path)
    with torch.no_grad():
        peers["pretrained"].mean.fill_(torch.nan)
    verifying.verify(learner.cohort, Clock(0, 0, 0.0), lambda: None)


def test_where_a_plain_step_has_no_room_the_compiler_is_trusted(tmp_path, monkeypatch):
    def greedy(*arguments):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no room")
        return run_peer(*arguments)

    monkeypatch.setattr(engine, "compiled", lambda function: function)
    monkeypatch.setattr(verifying, "StepFunctions", lambda: StepFunctions(run_peer=greedy))
    assert trained("compiled", tmp_path)[2].engine.name == "compiled"


def test_right_gradients_leave_random_numbers_and_state_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "compiled", lambda function: function)
    recipe = load_recipe("mutual/digits-dnn", ["data.batch_size=64"])  # a ResNet-8, with batch-norm
    data, (peer,) = load_data(recipe), recipe.peers
    peers = {peer.name: build_peer(peer, data, 0, torch.device("cpu"))}
    learner = Learner(recipe, peers, data, 0, engine="compiled")
    learner.feed.prepare(0)
    before = [tensor.clone() for tensor in (*peers[peer.name].parameters(), *peers[peer.name].buffers())]
    learner.engine.begin_stage(0, 0)
    after = [*peers[peer.name].parameters(), *peers[peer.name].buffers()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    numbers = torch.get_rng_state()
    verifying.verify(learner.cohort, Clock(0, 0, 0.0), lambda: torch.manual_seed(7))
    assert torch.equal(torch.get_rng_state(), numbers)
    learner.feed.close()


def test_the_captured_engine_asks_for_a_gpu():
    with pytest.raises(InputError, match="captured engine needs a CUDA device"):
        pick("captured", torch.device("cpu"))


@pytest.mark.filterwarnings("default")  # torch's compiler warns while it is imported
@pytest.mark.gpu
def test_captured_steps_agree_with_eager_ones_on_a_gpu():
    pytest.importorskip("triton")
    recipe = load_recipe("mutual/digits-vanilla", ["peers.*.network=mlp", "stages.*.epochs=2", "data.validation=0"])
    loaded, found = load_data(recipe), {}
    assert isinstance(loaded.train, ArraySplit)
    data = dataclasses.replace(loaded, train=loaded.train.to("cuda"))
    for name in ("eager", "captured"):
        peers = {
            peer.name: build_peer(peer.model_copy(update={"start_from": None}), data, 0, torch.device("cuda"))
            for peer in recipe.peers
        }
        learner = Learner(recipe, peers, data, 0, engine=name)
        learner.run()
        assert learner.engine.name == name
        found[name] = peers
    for peer, posterior in found["eager"].items():
        assert torch.allclose(posterior.mean, found["captured"][peer].mean, rtol=1e-2, atol=1e-3)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

quiet = pytest.mark.filterwarnings("default")  # torch's compiler warns while it is imported
SHAPE = (3, 12, 12)


class Conv(nn.Module):
    def __init__(self, dropout=0.0, reads=False):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU())
        self.drop, self.head, self.reads = nn.Dropout(dropout), nn.Linear(12, 4), reads

    def forward(self, x):
        x = self.second(self.first(x))
        if self.reads and x.abs().max().item() > 1e6:
            x = x / 2
        return self.head(self.drop(x.mean((2, 3))))


@pytest.fixture
def exact():
    """Kernels that give the same bits every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def small_stage(epochs, **terms):
    given = {"likelihood": {}, "kl": {"scheme": "layer_mean"}, "mutual": {}, "weight_diversity": {}}
    return {"epochs": epochs, "optimizer": {"name": "adam", "lr": 1e-3}, "terms": given | terms}


ON_EITHER = pytest.mark.parametrize(
    ("device", "name"), [("cpu", "eager"), pytest.param("cuda", "captured", marks=pytest.mark.gpu)]
)


def small_learner(
    name,
    seed=0,
    stages=None,
    reporter=None,
    augment=("crop", "flip"),
    update="simultaneous",
    how=None,
    device="cuda",
    **network,
) -> Learner:
    """Return a learner of two Bayesian peers, with 10 steps an epoch."""
    generator = torch.Generator().manual_seed(5)
    pixels = (torch.rand(80, *SHAPE, generator=generator) * 255).to(torch.uint8)
    where = "cpu" if (how or {}).get("placement") == "stream" else device
    split = ArraySplit(pixels.to(where), (torch.arange(80) % 4).to(where))
    data = Dataset("made", split, None, split, 4, None, SHAPE, (0.5,) * 3, (0.3,) * 3)
    peer = {"network": "mlp", "posterior": {"kind": "mean_field"}}
    table = {
        "title": "t",
        "data": {"batch_size": 8, "augment": list(augment)},
        "peers": [{"name": "a"} | peer, {"name": "b"} | peer],
        "stages": list(stages or [small_stage(3)]),
        "gradient_share_every": 0,
        "update": update,
    }
    peers = {}
    for number, owner in enumerate("ab"):
        torch.manual_seed(number)
        peers[owner] = MeanField(Conv(**network), rho=-2.0, seed=seed, name=owner).to(device)
    return Learner(Recipe.parse(table, "test"), peers, data, seed, engine=name, reporter=reporter, **(how or {}))


def advance(learner, count):
    """Train step by step as `run_together` does; yields the number of each step after it."""
    steps = learner.steps()
    for number in range(-1, count):  # the engine begins first
        with learner.engine.running():
            next(steps)
        if learner.device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 0:
            yield number


def everything(learner):
    found = {f"{name}/{key}": t.clone() for name, p in learner.peers.items() for key, t in p.state().items()}
    return found | {key: t.clone() for key, t in learner.state.state().items()}


def different(one, two):
    assert one.keys() == two.keys()
    return [key for key in one if not torch.equal(one[key], two[key])]


TWO_STAGES = (small_stage(3), small_stage(2, feature_diversity={"layers": ["first", "second"]}))
MIXED = (
    small_stage(2, prediction_diversity={}) | {"mix": {"kind": "mixup"}, "draws": 2},
    small_stage(3, likelihood={"label_smoothing": 0.1}) | {"mix": {"kind": "cutmix", "alpha": 0.5}},
)


@pytest.mark.gpu
@quiet
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("stages", [TWO_STAGES, MIXED], ids=["plain", "mixed"])
def test_fifty_captured_steps_are_the_eager_ones_bit_for_bit(stages):
    found = {}
    for name in ("eager", "captured"):
        learner = small_learner(name, stages=stages)
        learner.run()
        assert learner.engine.name == name
        assert learner.position.step == 50
        found[name] = everything(learner)
    assert different(found["eager"], found["captured"]) == []


@ON_EITHER
@quiet
@pytest.mark.usefixtures("exact")
def test_captured_steps_draw_what_their_addresses_say(device, name):
    learner = small_learner(name, augment=("crop", "flip", "reflect_crop"), device=device)
    cohort, seed = learner.cohort, learner.seed
    kept, original = {}, cohort.forward

    def noting(clock):
        # Copies into tensors that the graph keeps: what the last replay has made.
        batch = original(clock)
        for key, tensor in (
            ("images", cohort.images),
            *((peer, output.weights.flat) for peer, output in batch.outputs.items()),
        ):
            if key not in kept:
                kept[key] = torch.empty_like(tensor.detach())
            kept[key].copy_(tensor.detach())
        return batch

    cohort.forward = noting
    seen, expected = [], {}
    for number in advance(learner, 25):
        seen.append({key: tensor.clone() for key, tensor in kept.items()})
        assert learner.engine.name == name
        pixels, _ = learner.data.train.batch(indices(learner, number), torch.device(device))
        where = Address(seed, "data", "augment", number)
        assert torch.equal(seen[-1]["images"], to_unit(augment(pixels, learner.recipe.data.augment, where)))
        for peer, posterior in learner.peers.items():
            if number:
                assert torch.equal(seen[-1][peer], expected[peer])
            # What the next step will draw, from the weights as they are by now.
            with torch.no_grad():
                expected[peer] = posterior.draw(Address(seed, peer, "step", number + 1)).flat
    for key in ("a", "b", "images"):
        assert not any(torch.equal(one[key], two[key]) for one, two in itertools.pairwise(seen))
    assert not torch.equal(seen[0]["a"] - seen[1]["a"], seen[0]["b"] - seen[1]["b"])


def test_draws_of_a_step_are_at_addresses_of_their_own():
    learner = small_learner("eager", stages=[small_stage(1) | {"draws": 3}], device="cpu")
    cohort, posterior = learner.cohort, learner.peers["a"]
    learner.feed.prepare(4)
    logits = cohort.forward(Clock(4, 4, 0.4)).outputs["a"].logits
    for draw, rows in enumerate(logits.chunk(3)):
        where = Address(learner.seed, "a", f"step/{draw}" if draw else "step", 4)
        posterior.train()
        torch.testing.assert_close(posterior(cohort.images, posterior.draw(where)), rows)
    assert not torch.allclose(logits[:8], logits[8:16])


@ON_EITHER
@quiet
@pytest.mark.usefixtures("exact")
def test_mixed_images_are_those_of_their_addresses_in_every_step(device, name):
    learner = small_learner(name, stages=[small_stage(2) | {"mix": {"kind": "mixup"}}], augment=(), device=device)
    cohort, kept, original = learner.cohort, {}, learner.cohort.forward

    def noting(clock):
        batch = original(clock)
        for key, tensor in (("images", cohort.images), ("shares", batch.shares)):
            kept.setdefault(key, torch.empty_like(tensor)).copy_(tensor)
        return batch

    cohort.forward = noting
    for number in advance(learner, 12):
        assert learner.engine.name == name
        pixels, _ = learner.data.train.batch(indices(learner, number), torch.device(device))
        mixed, shares = Mixer("mixup", 1.0, device)(to_unit(pixels), Address(learner.seed, "data", "mix", number))
        assert torch.equal(kept["images"], mixed)
        assert torch.equal(kept["shares"], shares)


def indices(learner, number):
    epoch, place = divmod(number, learner.steps_per_epoch)
    size, address = learner.recipe.data.batch_size, Address(learner.seed, "data", "order", epoch)
    return order(len(learner.data.train), address)[place * size : (place + 1) * size]


@ON_EITHER
@quiet
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_captured_learners_side_by_side_are_each_alone(dropout, device, name):
    alone = []
    for seed in (0, 3):
        learner = small_learner(name, seed, TWO_STAGES, device=device, dropout=dropout)
        learner.run()
        alone.append(everything(learner))
    together = [small_learner(name, seed, TWO_STAGES, device=device, dropout=dropout) for seed in (0, 3)]
    assert run_together(together) == {}
    assert [learner.engine.name for learner in together] == [name] * 2
    assert [different(everything(one), two) for one, two in zip(together, alone, strict=True)] == [[], []]
    assert different(*alone)


@ON_EITHER
@quiet
@pytest.mark.usefixtures("exact")
def test_captured_dropout_is_new_at_every_replay_and_a_function_of_the_seed(device, name):
    def masks(seed):
        learner = small_learner(name, seed, device=device, dropout=0.5)
        kept, seen = [], []
        for posterior in learner.peers.values():
            place = torch.zeros(8, 12, device=device)

            def note(_module, _inputs, output, place=place):
                if len(output) == 8:
                    place.copy_(output.detach() == 0)

            posterior.network.drop.register_forward_hook(note)
            kept.append(place)
        for _ in advance(learner, 15):
            seen.append([place.clone() for place in kept])
        assert learner.engine.name == name
        assert getattr(learner.engine, "alone", True)  # not beside others: torch's generator has one state
        return seen, everything(learner)

    seen, end = masks(0)
    again, end_again = masks(0)
    assert different(end, end_again) == []
    for peer in range(2):
        assert all(torch.equal(one[peer], two[peer]) for one, two in zip(seen, again, strict=True))
        assert not any(torch.equal(one[peer], two[peer]) for one, two in itertools.pairwise(seen))
    assert not any(torch.equal(*pair) for pair in seen)
    assert not torch.equal(seen[0][0], masks(1)[0][0][0])


@pytest.mark.gpu
@quiet
@pytest.mark.usefixtures("exact")
def test_what_can_not_be_captured_goes_on_eagerly_and_ends_the_same():
    said = []

    class Listening(Reporter):
        def warn(self, text):
            said.append(text)

    eager, captured = small_learner("eager", reads=True), small_learner("captured", reads=True, reporter=Listening())
    eager.run()
    captured.run()
    assert captured.engine.name == "eager"
    assert len(said) == 1
    assert said[0].startswith("the captured engine can't run this cohort, going on eagerly: ")
    assert len(said[0]) > 80  # it says why
    assert different(everything(eager), everything(captured)) == []
    # The device is well: another cohort can be captured.
    after = small_learner("captured")
    after.run()
    assert after.engine.name == "captured"


@pytest.mark.gpu
@quiet
def test_a_capture_survives_graphs_that_have_become_garbage():
    old = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")
        old.append(graph)
    del graph
    learner = small_learner("captured")
    forward, churned = learner.cohort.forward, []

    def littering(clock):
        if torch.cuda.is_current_stream_capturing():
            Loop(old.pop())
            churned.append(len([[] for _ in range(100_000)]))
        return forward(clock)

    learner.cohort.forward = littering
    for _ in advance(learner, 2):
        assert learner.engine.name == "captured"
    assert churned == [100_000]


@pytest.mark.gpu
@quiet
def test_networks_of_several_families_are_captured_one_after_another_in_one_process(tmp_path):
    timm = pytest.importorskip("timm")
    pytest.importorskip("triton")
    told = Recorder()
    generator = torch.Generator().manual_seed(5)
    pixels = (torch.rand(64, 3, 224, 224, generator=generator) * 255).to(torch.uint8)
    data = from_arrays((pixels, torch.arange(64) % 4), (pixels[:8], torch.arange(8) % 4))
    changes = ["data.batch_size=16", "stages.*.epochs=1", "data.validation=0", "data.augment=[]"]
    for name in ("resnet50", "vit_small_patch16_224"):
        for kind, owners, recipe in ((Point, "a", "dnn"), (MeanField, "a", "vanilla"), (MeanField, "ab", "vanilla")):
            peers = {owner: kind(timm.create_model(name, num_classes=4), name=owner).cuda() for owner in owners}
            folder = tmp_path / f"{name}-{kind.kind}-{owners}"
            run = fit(peers, data=data, recipe=f"mutual/digits-{recipe}", run=folder, overrides=changes,
                      reporter=told)  # fmt: skip
            assert run.about["engine"] == "captured", (folder.name, told.warnings)
    assert not [text for text in told.warnings if "eagerly" in text]


@quiet
@pytest.mark.gpu
@pytest.mark.parametrize("update", ["simultaneous", "sequential"])
def test_half_precision_is_captured_and_learns_as_eager_steps_do(update):
    found = {}
    for name in ("eager", "captured"):
        lines = []
        how = {"autocast": torch.bfloat16, "log": lines.append}
        learner = small_learner(name, stages=TWO_STAGES, update=update, how=how)
        learner.run()
        assert learner.engine.name == name
        found[name] = [[peer["loss"] for peer in line["peers"].values()] for line in lines]
    torch.testing.assert_close(torch.tensor(found["captured"]), torch.tensor(found["eager"]), rtol=0.02, atol=0.02)


@ON_EITHER
def test_streamed_batches_are_captured_too(device, name):
    found = []
    for placement in ("device", "stream"):
        learner = small_learner(name, stages=TWO_STAGES, device=device, how={"placement": placement})
        learner.run()
        assert learner.engine.name == name
        found.append(everything(learner))
    assert not different(*found)
