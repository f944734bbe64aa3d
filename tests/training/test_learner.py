"""The loop: schedules, update orders, what terms say of themselves, failure, and what a seed fixes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from learners import Recorder, same
from peerbayes import networks, terms
from peerbayes.api.fitting import train
from peerbayes.data import ArraySplit, Dataset, FolderSplit, augment, order, to_unit
from peerbayes.engine.diagnostics import Position, note_shares
from peerbayes.engine.optimizers import learning_rate
from peerbayes.engine.step_parts import Clock
from peerbayes.errors import InputError, TrainingError
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField, Point
from peerbayes.recipes.recipe import Recipe
from peerbayes.recipes.settings import Stage
from peerbayes.runs import checkpoints
from peerbayes.runs.building import build_peer
from peerbayes.training.learner import Learner

SHAPE = (1, 4, 4)
INPUTS = networks.Inputs(3, SHAPE, (0.5,), (0.3,))


class Small(nn.Module):
    """Two hidden layers with batch-norm, and dropout if asked for."""

    def __init__(self, dropout=0.0, width=6):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x)).mean((2, 3)))


def made_data(count=16, validation=None):
    torch.manual_seed(5)
    split = ArraySplit((torch.rand(count, *SHAPE) * 255).to(torch.uint8), torch.arange(count) % 3)
    return Dataset("made", split, validation and split, split, 3, None, SHAPE, (0.5,), (0.3,))


def made_recipe(*stages, **changes):
    peer = {"name": "a", "network": "mlp", "posterior": {"kind": "point"}}
    table = {"title": "t", "data": {"batch_size": 4, "augment": ["crop"]}, "peers": [peer], "stages": list(stages)}
    return Recipe.parse({"gradient_share_every": 0} | table | changes, "test")


def stage(epochs=1, terms_given=None, **changes):
    given = {"likelihood": {}} if terms_given is None else terms_given
    return {"epochs": epochs, "optimizer": {"name": "sgd", "lr": 0.1}, "terms": given} | changes


def peers(names="ab", kind=Point, network=Small, **options):
    found = {}
    for name in names:
        torch.manual_seed(ord(name))
        extra = {} if kind is Point else {"name": name, "rho": -1.0}
        found[name] = kind(network(**options), **extra)
    return found


def state(posterior):
    return {name: tensor.detach().clone() for name, tensor in posterior.state().items()}


# ---- learning rates ---------------------------------------------------------------------------------------------


def rates(settings, steps_per_epoch, epochs):
    found = Stage.parse(settings, "stage")
    return [learning_rate(found, step, steps_per_epoch) for step in range(epochs * steps_per_epoch)]


def test_milestones_divide_after_their_epoch():
    found = rates(stage(6, lr_milestones=[2, 5], lr_factor=0.1), 3, 6)
    assert found == pytest.approx([0.1] * 6 + [0.01] * 9 + [0.001] * 3)


def test_papers_schedule_divides_at_80_120_160_180():
    found = Stage.parse(stage(200, lr_milestones=[80, 120, 160, 180]) | {"optimizer": {"lr": 1e-3}}, "stage")
    at = {epoch: learning_rate(found, epoch * 391, 391) for epoch in (0, 79, 80, 119, 120, 160, 180, 199)}
    expected = {0: 1e-3, 79: 1e-3, 80: 1e-4, 119: 1e-4, 120: 1e-5, 160: 1e-6, 180: 1e-7, 199: 1e-7}
    assert at == pytest.approx(expected)


def test_cosine_goes_by_step_to_zero():
    found = rates(stage(4, lr_schedule="cosine"), 5, 4)
    assert found == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 20)) for k in range(20)])
    assert found[-1] < 0.001


def test_warmup_is_linear_then_cosine_over_the_rest():
    found = rates(stage(4, lr_schedule="cosine", warmup=2.0), 4, 4)
    assert found[1:8] == pytest.approx([0.1 * k / 8 for k in range(1, 8)])
    assert 0 < found[0] <= 0.001
    assert found[8:] == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])


def test_optimiser_really_uses_the_schedule_and_starts_anew_in_stage_two(monkeypatch):
    used = []
    update = torch.optim.SGD.step

    def spy(self, *rest):
        used.append(self.param_groups[0]["lr"])
        return update(self, *rest)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    recorder = Recorder()
    recipe = made_recipe(
        stage(3, lr_milestones=[1, 2]), stage(2, lr_milestones=[1]), stage(2, lr_schedule="cosine", warmup=0.5)
    )
    Learner(recipe, peers("a"), made_data(), 0, reporter=recorder).run()
    expected = [0.1] * 4 + [0.01] * 4 + [0.001] * 4 + [0.1] * 4 + [0.01] * 4
    expected += [0.001, 0.05] + [0.05 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]
    assert used == pytest.approx(expected)
    assert [line["lr"] for line in recorder.lines] == pytest.approx(expected[3::4])
    assert [(line["stage"], line["epoch"], line["step"]) for line in recorder.lines] == [
        (1, 1, 4), (1, 2, 8), (1, 3, 12), (2, 1, 16), (2, 2, 20), (3, 1, 24), (3, 2, 28),
    ]  # fmt: skip


FEATURES = {"likelihood": {}, "feature_diversity": {"layers": ["first", "second"]}}


def test_moments_are_fresh_and_the_fusion_joins_in_stage_two_only():
    seen = []

    class Spy(Recorder):
        def epoch(self, line):
            now = learner.state
            seen.append(
                {
                    "moments": {int(s["step"]) for o in now.optimizers.values() for s in o.state.values()},
                    "held": {n: sum(p.numel() for p in o.param_groups[0]["params"]) for n, o in now.optimizers.items()},
                    "fusion": {k: [p.detach().clone() for p in m.parameters()] for k, m in now.modules.items()},
                }
            )

    adam = {"optimizer": {"name": "adam", "lr": 0.01}}
    cohort = peers(network=Conv)
    own = sum(p.numel() for p in cohort["a"].parameters())
    learner = Learner(made_recipe(stage(2) | adam, stage(2, FEATURES) | adam), cohort, made_data(), 0, reporter=Spy())
    learner.run()
    assert [s["moments"] for s in seen] == [{4}, {8}, {4}, {8}]
    fusion = 4 * 6 + 6 * 6 + 6 * 6
    assert [s["held"] for s in seen] == [{"a": own, "b": own}] * 2 + [{"a": own + fusion, "b": own + fusion}] * 2
    assert seen[1]["fusion"] == {}
    for key, before in seen[2]["fusion"].items():
        assert all(not torch.equal(one, two) for one, two in zip(before, seen[3]["fusion"][key])), key


# ---- simultaneous and sequential --------------------------------------------------------------------------------

MUTUAL = {"likelihood": {}, "mutual": {"temperature": 2.0}, "weight_diversity": {"weight": 3.0}}


def by_hand(cohort, data, sequential, steps=2, lr=0.1):
    """Two steps of the pair written out with plain modules, autograd and in-place subtraction."""
    nets = {name: posterior.materialise().train() for name, posterior in cohort.items()}
    bayesian = ("first.1.weight", "first.1.bias", "second.0.weight", "second.0.bias", "head.weight", "head.bias")

    def logits(name, keep):
        before = {n: b.clone() for n, b in nets[name].named_buffers()}
        found = nets[name](images)
        if not keep:
            for n, b in nets[name].named_buffers():
                b.copy_(before[n])
        return found

    for step in range(steps):
        index = order(16, Address(0, "data", "order", 0))[4 * step : 4 * step + 4]
        images, labels = data.train.images[index], data.train.labels[index]
        images = to_unit(augment(images, ["crop"], Address(0, "data", "augment", step)))
        z = {name: logits(name, keep=True) for name in nets}
        weights = {n: {k: p.detach().clone() for k, p in net.named_parameters()} for n, net in nets.items()}
        gradients = {}
        for own, other in (("a", "b"), ("b", "a")):
            target = (z[other].detach() / 2).softmax(-1)
            loss = F.cross_entropy(z[own], labels)
            loss = loss + 4 * F.kl_div((z[own] / 2).log_softmax(-1), target, reduction="batchmean")
            d = sum((dict(nets[own].named_parameters())[k] - weights[other][k]).square().mean() for k in bayesian)
            loss = loss + 3 * F.softplus(-d)
            gradients[own] = torch.autograd.grad(loss, list(nets[own].parameters()))
            if sequential:
                subtract(nets[own], gradients[own], lr)
                with torch.no_grad():
                    z[own] = logits(own, keep=False)
                weights[own] = {k: p.detach().clone() for k, p in nets[own].named_parameters()}
        if not sequential:
            for name, net in nets.items():
                subtract(net, gradients[name], lr)
    return {name: net.state_dict() for name, net in nets.items()}


def subtract(net, gradients, lr):
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients):
            parameter -= lr * gradient


@pytest.mark.parametrize("update", ["simultaneous", "sequential"])
def test_two_steps_equal_a_computation_by_hand(update):
    cohort, data = peers(), made_data()
    expected = by_hand(cohort, data, update == "sequential")
    other = by_hand(cohort, data, update != "sequential")
    recipe = made_recipe(stage(1, MUTUAL), update=update, gradient_share_every=1)
    learner = Learner(recipe, cohort, data, 0)
    for _ in range(2):
        learner.step()
    for name, posterior in cohort.items():
        found = posterior.materialise().state_dict()
        assert found.keys() == expected[name].keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name][key], rtol=1e-4, atol=1e-6)
        assert int(found["first.2.num_batches_tracked"]) == 2
    # The two orders are told apart by far more than that tolerance.
    gap = max(float((expected["b"][k] - other["b"][k]).abs().max()) for k in expected["b"])
    assert gap > 1e-3


def test_shared_fusion_steps_once_with_the_average_gradient_in_both_orders():
    found = {}
    given = {"likelihood": {}, "feature_diversity": {"layers": ["first", "second"], "fusion": "shared", "weight": 1e3}}
    for update in ("simultaneous", "sequential"):
        learner = Learner(made_recipe(stage(1, given), update=update), peers(network=Conv), made_data(), 0)
        module = learner.state.modules["feature_diversity", "a"]
        before = [p.detach().clone() for p in module.parameters()]
        learner.feed.prepare(0)
        batch = learner.cohort.forward(Clock(0, 0, 0.0))
        values = [terms.find("feature_diversity").value(batch, n, learner.state.terms[1][1]) for n in "ab"]
        each = [torch.autograd.grad(v, list(module.parameters())) for v in values]
        learner = Learner(made_recipe(stage(1, given), update=update), peers(network=Conv), made_data(), 0)
        learner.step()
        after = list(learner.state.modules["feature_diversity", "a"].parameters())
        found[update] = [a.detach() - b for a, b in zip(after, before)]
        if update == "simultaneous":
            for moved, one, two in zip(found[update], *each):
                torch.testing.assert_close(moved, -0.1 * (one + two) / 2, rtol=1e-3, atol=1e-8)
    for one, two in zip(*found.values()):
        assert one.any()
        assert F.cosine_similarity(one.flatten(), two.flatten(), dim=0) > 0.5


# ---- what a seed fixes ------------------------------------------------------------------------------------------


def trained(names, given, seed=0, kind=MeanField, epochs=3, data=None, **options):
    cohort = peers(names, kind, **options)
    recipe = made_recipe(stage(epochs, given, optimizer={"name": "adam", "lr": 0.01}))
    data = data or made_data()
    torch.seed()  # nothing may depend on torch's own generator
    Learner(recipe, cohort, data, seed, reporter=Recorder()).run()
    return {name: state(posterior) for name, posterior in cohort.items()}


@pytest.mark.parametrize("kind", [Point, MeanField])
def test_alpha_zero_equals_independent_training_bit_for_bit(kind):
    kl = {"kl": {"scheme": "layer_mean"}} if kind is MeanField else {}
    together = trained("ab", {"likelihood": {}, "mutual": {"alpha": 0.0, "temperature": 3.0}, **kl}, kind=kind)
    for name in "ab":
        assert same(together[name], trained(name, {"likelihood": {}, **kl}, kind=kind)[name])
    taught = trained("ab", {"likelihood": {}, "mutual": {"alpha": 1.0, "temperature": 3.0}, **kl}, kind=kind)
    assert not same(together["a"], taught["a"])


@pytest.mark.parametrize("kind", [Point, MeanField])
def test_dropout_follows_the_seed(kind):
    first = trained("a", None, seed=0, kind=kind, dropout=0.5)
    assert same(first["a"], trained("a", None, seed=0, kind=kind, dropout=0.5)["a"])
    assert not same(first["a"], trained("a", None, seed=1, kind=kind, dropout=0.5)["a"])


def test_dropout_differs_between_steps_and_peers():
    masks = {}

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Small(dropout=0.5)

        def forward(self, x):
            masks.setdefault(id(self), []).append(F.dropout(torch.ones(40), 0.5, self.training))
            return self.inner(x)

    cohort = {name: Point(Spy()) for name in "ab"}
    learner = Learner(made_recipe(stage(1), gradient_share_every=0), cohort, made_data(), 0)
    masks.clear()  # of its look before the first step
    learner.run()
    found = [torch.stack(m) for m in masks.values()]
    everything = torch.cat([m[m.eq(0).any(1)] for m in found])
    assert len(everything) == 8
    assert len(everything.unique(dim=0)) == 8


def test_images_and_order_are_the_same_for_all_peers_and_methods():
    """Peers draw their own noise; the images of a step are a function of the seed alone."""
    seen = {}

    class Spy(nn.Module):
        def __init__(self, key):
            super().__init__()
            self.key, self.inner = key, Small()

        def forward(self, x):
            if self.training:
                seen.setdefault(self.key, []).append(x.detach().clone())
            return self.inner(x)

    methods = {"dnn": ("a", Point, None), "dml": ("ab", MeanField, MUTUAL), "sequel": ("ab", Point, MUTUAL)}
    for method, (names, kind, given) in methods.items():
        cohort = {name: kind(Spy((method, name))) for name in names}
        learner = Learner(made_recipe(stage(2, given)), cohort, made_data(), 7, reporter=Recorder())
        for name in names:
            del seen[method, name]  # its look before the first step
        learner.run()
    reference = torch.stack(seen["dnn", "a"])
    assert len(reference) == 8
    assert all(torch.equal(reference, torch.stack(images)) for images in seen.values())
    # All sixteen images are seen once an epoch, in another order and otherwise cropped in the next.
    assert not torch.equal(reference[:4], reference[4:])
    learner = Learner(made_recipe(stage(2)), {"a": Point(Spy(("other", "a")))}, made_data(), 8)
    del seen["other", "a"]
    learner.run()
    assert not torch.equal(reference, torch.stack(seen["other", "a"]))


def test_an_epoch_shows_every_image_once():
    shown = []

    class Spy(Small):
        def forward(self, x):
            if self.training:
                shown.append(x.flatten(1))
            return super().forward(x)

    data = made_data()
    recipe = made_recipe(stage(2), data={"batch_size": 4})
    learner = Learner(recipe, {"a": Point(Spy())}, data, 0)
    shown.clear()  # of its look before the first step
    learner.run()
    everything = to_unit(data.train.images).flatten(1)
    for epoch in (shown[:4], shown[4:]):
        assert torch.equal(torch.cat(epoch).unique(dim=0), everything.unique(dim=0))


def test_initial_weights_are_a_function_of_seed_and_peer():
    data = made_data()
    recipe = Recipe.parse(
        {
            "title": "t",
            "peers": [
                {"name": n, "network": "mlp", "posterior": {"kind": k}}
                for n, k in (("a", "point"), ("b", "mean_field"))
            ],
            "stages": [stage()],
        },
        "test",
    )

    def built(place, seed):
        return state(build_peer(recipe.peers[place], data, seed, torch.device("cpu")))

    assert same(built(0, 0), built(0, 0))
    assert same(built(1, 0), built(1, 0))
    assert not same(built(0, 0), built(0, 1))
    assert not torch.equal(built(0, 0)["mean/linear.weight"], built(1, 0)["mean/linear.weight"])


def test_training_crops_image_files_from_all_that_they_hold(tmp_path):
    pixels = np.full((60, 80, 3), 255, np.uint8)
    pixels[4:-4, 4:-4] = 0  # a frame, which no centre shows
    Image.fromarray(pixels).save(tmp_path / "framed.png")
    split = FolderSplit([str(tmp_path / "framed.png")] * 64, torch.arange(64) % 3, 16, 1.25)
    data = Dataset("made", split, None, split, 3, None, split.shape, (0.5,) * 3, (0.3,) * 3)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    recipe = made_recipe(stage(), data={"batch_size": 32, "augment": ["resized_crop", "flip"]})
    learner = Learner(recipe, {"a": Point(network)}, data, 4, reporter=Recorder())
    for step in (0, 1):
        learner.feed.prepare(step)
        learner.cohort.forward(Clock(step, step, 0.0))
        assert 0.5 < float((learner.cohort.images.amax((1, 2, 3)) > 0).float().mean()) < 0.95
        index = order(64, Address(4, "data", "order", 0))[32 * step :][:32]
        cut, _ = split.crops(index, torch.device("cpu"), Address(4, "data", "augment", step).sub("resized_crop"))
        assert torch.equal(learner.cohort.images, to_unit(augment(cut, ["flip"], Address(4, "data", "augment", step))))
    learner.feed.close()


# ---- terms speak for themselves ---------------------------------------------------------------------------------


def test_gradient_shares_are_norms_over_their_sum():
    given = MUTUAL | {"kl": {}}
    cohort = peers(kind=MeanField)
    learner = Learner(made_recipe(stage(1, given), gradient_share_every=1), cohort, made_data(), 0, reporter=Recorder())
    learner.feed.prepare(0)
    batch = learner.cohort.forward(Clock(0, 0, 0.0))
    expected = {}
    for name, posterior in cohort.items():
        norms = {}
        for term, options in learner.state.terms:
            found = torch.autograd.grad(
                term.value(batch, name, options),
                [posterior.mean, posterior.rho, posterior.rest],
                allow_unused=True,
                retain_graph=True,
            )
            norms[term.name] = math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
        expected[name] = {term: norm / sum(norms.values()) for term, norm in norms.items()}
    learner = Learner(
        made_recipe(stage(1, given), gradient_share_every=1), peers(kind=MeanField), made_data(), 0, reporter=Recorder()
    )
    learner.step()
    for name in cohort:
        assert learner.position.shares[name] == pytest.approx(expected[name], rel=1e-4)
        assert sum(learner.position.shares[name].values()) == pytest.approx(1)


def test_measuring_shares_does_not_change_the_training():
    found = []
    for every in (0, 1):
        cohort = peers(kind=MeanField)
        recorder = Recorder()
        recipe = made_recipe(stage(2, MUTUAL), gradient_share_every=every)
        Learner(recipe, cohort, made_data(), 0, reporter=recorder).run()
        found.append(state(cohort["a"]))
        assert ("gradient_share" in recorder.lines[0]["peers"]["a"]) == bool(every)
    assert same(*found)


def test_logged_loss_is_the_mean_over_the_epoch_and_the_sum_of_terms(user_term):
    values = []

    @user_term
    def counted(step, peer):
        found = step.logits(peer).square().mean()
        if found.requires_grad:
            values.append(float(found.detach()))
        return found

    recorder = Recorder()
    recipe = made_recipe(stage(2, {"likelihood": {}, "counted": {}}))
    Learner(recipe, peers("a"), made_data(validation=True), 0, reporter=recorder).run()
    for line, chunk in zip(recorder.lines, (values[:4], values[4:]), strict=True):
        peer = line["peers"]["a"]
        assert peer["terms"]["counted"] == pytest.approx(sum(chunk) / 4)
        assert peer["loss"] == pytest.approx(sum(peer["terms"].values()))
        assert 0 <= peer["valid_accuracy"] <= 1
        assert peer["valid_nll"] > 0


def test_validation_is_the_accuracy_and_nll_of_the_split():
    recorder, cohort, data = Recorder(), peers("a"), made_data(validation=True)
    Learner(made_recipe(stage(1)), cohort, data, 0, reporter=recorder).run()
    log_p = cohort["a"].eval()(data.validation.images).log_softmax(-1)
    line = recorder.lines[-1]["peers"]["a"]
    assert line["valid_accuracy"] == pytest.approx(float((log_p.argmax(-1) == data.validation.labels).double().mean()))
    assert line["valid_nll"] == pytest.approx(float(F.nll_loss(log_p, data.validation.labels).detach()), rel=1e-5)


def test_a_term_that_is_annealed_is_not_called_inert_at_its_first_step():
    position, measured = Position(), {"kl": (0.0, 0.0), "likelihood": (1.0, 1.0)}
    options = {"kl": {"weight": 1.0, "anneal": 5.0}, "likelihood": {"weight": 1.0}}
    assert note_shares("a", measured, options, position) == []
    position.stage_step = 100
    (found,) = note_shares("a", measured, options, position)
    assert found.startswith("kl is inert for peer 'a'")


def test_a_kl_that_begins_at_the_prior_is_called_inert_only_if_it_stays_there():
    options = {"kl": {"weight": 1.0}, "likelihood": {"weight": 1.0}}
    position, at_prior = Position(), {"kl": (0.0, 0.0), "likelihood": (1.0, 1.0)}
    assert note_shares("a", at_prior, options, position) == []
    position.stage_step = 100
    assert note_shares("a", at_prior | {"kl": (0.5, 0.1)}, options, position) == []
    assert len(note_shares("a", at_prior, options, position)) == 1
    (found,) = note_shares("a", {"kl": (0.0, 3.0), "likelihood": (1.0, 1.0)}, options, Position())
    assert found.startswith("kl is inert for peer 'a' at step 0")
    saturated = {"weight_diversity": (0.0, 0.0), "likelihood": (1.0, 1.0)}
    (found,) = note_shares("a", saturated, {"weight_diversity": {}, "likelihood": {}}, Position())
    assert found.startswith("weight_diversity is inert for peer 'a' at step 0")


def test_an_inert_term_is_named_once_a_peer_and_a_weight_of_zero_is_not():
    recorder = Recorder()
    given = {"likelihood": {}, "mutual": {"alpha": 0.0}, "kl": {"weight": 0.0}, "weight_diversity": {"scale": 1e9}}
    Learner(made_recipe(stage(3, given), gradient_share_every=2), peers(), made_data(), 0, reporter=recorder).run()
    assert len(recorder.warnings) == 2
    for name, text in zip("ab", recorder.warnings):
        assert text.startswith(
            f"weight_diversity is inert for peer '{name}' at step 0: its share of the gradient is 0e+00"
        )


@pytest.mark.parametrize(
    "mutual",
    [
        {"alpha": {"schedule": "linear", "start": 0.0, "end": 2.0, "epochs": 3.0}},
        {"alpha": {"schedule": "cosine", "start": 2.0, "end": 0.0, "epochs": 1.0}},
        {"alpha": {"schedule": "steps", "values": [1.0, 0.0], "at": [1.0]}},
        {"graph": [{"teacher": "a", "student": "b", "alpha": 0.0}, {"teacher": "b", "student": "a"}]},
    ],
    ids=str,
)
def test_an_alpha_that_is_zero_at_times_is_not_called_inert(mutual):
    recorder = Recorder()
    given = {"likelihood": {}, "mutual": mutual}
    Learner(made_recipe(stage(3, given), gradient_share_every=1), peers(), made_data(), 0, reporter=recorder).run()
    assert recorder.warnings == []


@pytest.mark.parametrize("graph", ["best_to_rest", [{"teacher": "a", "student": "b"}]], ids=str)
def test_what_has_nothing_to_say_to_a_peer_is_not_called_inert(graph):
    # A point has no KL, and the one who teaches learns nothing.
    recorder = Recorder()
    cohort = peers("a") | peers("b", MeanField)
    given = {"likelihood": {}, "kl": {"scheme": "layer_mean"}, "mutual": {"graph": graph}}
    Learner(made_recipe(stage(2, given), gradient_share_every=1), cohort, made_data(), 0, reporter=recorder).run()
    assert recorder.warnings == []
    assert recorder.lines[-1]["peers"]["a"]["gradient_share"]["kl"] == 0


def test_a_term_that_lost_its_gradient_is_called_inert(monkeypatch):
    def detached_penalty(step, peer):
        return step.logits(peer).detach().square().mean()

    monkeypatch.setattr(terms.definition, "_TERMS", {**terms.definition._TERMS})
    terms.term(detached_penalty)
    recorder = Recorder()
    given = {"likelihood": {}, "detached_penalty": {}}
    Learner(made_recipe(stage(2, given), gradient_share_every=1), peers(), made_data(), 0, reporter=recorder).run()
    assert [text.split(":")[0] for text in recorder.warnings] == [
        f"detached_penalty is inert for peer '{name}' at step 0" for name in "ab"
    ]


def test_a_small_share_is_named_only_when_it_stays_small():
    recorder = Recorder()
    given = {"likelihood": {}, "mutual": {"weight": 1e-7}}
    Learner(made_recipe(stage(3, given), gradient_share_every=1), peers(), made_data(), 0, reporter=recorder).run()
    assert [text.split(":")[0] for text in recorder.warnings] == [
        f"mutual is inert for peer '{name}' at step 1" for name in "ab"
    ]


# ---- failure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["simultaneous", "sequential"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_term_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, user_term, bad, update):
    calls = []

    @user_term
    def moody(step, peer):
        found = step.logits(peer).square().mean()
        if found.requires_grad and peer == "b":
            calls.append(peer)
        return found * bad if len(calls) == 7 else found

    def save(tensors, about):
        checkpoints.write_checkpoint(tmp_path, learner.position.step, tensors, about)

    cohort = peers(kind=MeanField)
    recipe = made_recipe(stage(3, {"likelihood": {}, "moody": {}}), update=update)
    learner = Learner(recipe, cohort, made_data(), 0, save=save, checkpoint_every=3)
    sentence = r"term 'moody' of peer 'b' became (nan|inf) at step 6 \(epoch 2\); the last good checkpoint is kept: "
    with pytest.raises(TrainingError, match=sentence):
        learner.run()
    tensors, about, complaints = checkpoints.newest_checkpoint(tmp_path)
    assert about["position"]["step"] == 6
    assert complaints == []
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert all(p.isfinite().all() for p in cohort["b"].parameters())


def test_weights_that_are_not_finite_never_reach_a_checkpoint(tmp_path):
    saved = []
    learner = Learner(made_recipe(stage()), peers("a"), made_data(), 0, save=lambda *found: saved.append(found))
    with torch.no_grad():
        learner.peers["a"].mean[3] = math.nan
    with pytest.raises(TrainingError, match=r"'peer/a/mean/.*' is not finite at step 0$"):
        learner.checkpoint()
    assert saved == []


@pytest.mark.parametrize("resumed", [False, True])
def test_a_checkpoint_is_said_to_be_kept_where_there_is_one(resumed):
    saved = []
    recipe = made_recipe(stage())
    learner = Learner(recipe, peers("a"), made_data(), 0, save=lambda *found: saved.append(found))
    learner.checkpoint()
    if resumed:
        learner = Learner(recipe, peers("a"), made_data(), 0)
        learner.restore(*saved[0])
    with torch.no_grad():
        learner.peers["a"].mean[3] = math.nan
    with pytest.raises(TrainingError, match=r"is not finite at step 0; the last good checkpoint is kept$"):
        learner.checkpoint()
    with pytest.raises(
        TrainingError, match=r"became nan at step 0 \(epoch 1\); the last good checkpoint is kept: lower"
    ):
        learner.run()


def test_a_network_with_other_classes_is_refused_before_training():
    wide = Small()
    wide.head = nn.Linear(6, 5)
    with pytest.raises(InputError, match=r"peer 'a' returns shape \(4, 5\).*, expected \(4, 3\): made has 3 classes"):
        Learner(made_recipe(stage()), {"a": Point(wide)}, made_data(), 0)


def test_a_layer_that_is_not_there_is_named_before_training():
    given = {"likelihood": {}, "feature_diversity": {"layers": ["first", "secnd"]}}
    key = r"^stages\.1\.terms\.feature_diversity"
    with pytest.raises(InputError, match=key + r"\.layers: Small has no layer 'secnd'; did you mean 'second'\?"):
        Learner(made_recipe(stage(), stage(1, given)), peers(), made_data(), 0)
    given["feature_diversity"]["layers"] = ["first"]
    with pytest.raises(InputError, match=key + ": feature fusion needs at least 2 layers, got 1"):
        Learner(made_recipe(stage(), stage(1, given)), peers(), made_data(), 0)


def test_looking_ahead_leaves_weights_and_statistics_alone():
    cohort = peers()
    before = {name: state(p) for name, p in cohort.items()}
    Learner(made_recipe(stage(1, MUTUAL), stage(1, FEATURES)), cohort, made_data(), 0)
    assert all(same(before[name], state(p)) for name, p in cohort.items())


def test_learning_works(tmp_path):
    # Two Bayesian perceptrons on digits: far better than chance, and the peers come to agree with each other.
    table = {
        "title": "t",
        "data": {"name": "digits", "batch_size": 64, "validation": 200},
        "peers": [{"name": n, "network": "mlp", "posterior": {"kind": "mean_field"}} for n in "ab"],
        "stages": [
            {
                "epochs": 5,
                "optimizer": {"lr": 2e-3},
                "terms": {"likelihood": {}, "kl": {"scheme": "layer_mean"}, "mutual": {"temperature": 3.0}},
            }
        ],
    }
    run = train(Recipe.parse(table, "test"), tmp_path / "run", device="cpu")
    assert all(peer["valid_accuracy"] > 0.9 for peer in run.metrics[-1]["peers"].values())
    assert run.metrics[-1]["peers"]["a"]["terms"]["mutual"] < 0.5 * run.metrics[0]["peers"]["a"]["terms"]["mutual"]


def test_an_infinity_that_the_network_holds_on_purpose_is_no_failure():
    class Masked(Small):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    saved = []
    learner = Learner(
        made_recipe(stage()), {"a": Point(Masked())}, made_data(), 0, save=lambda *found: saved.append(found)
    )
    learner.run()
    assert saved
    learner.peers["a"].network.mask[0] = torch.nan
    with pytest.raises(TrainingError, match="'peer/a/network/mask' is not finite"):
        learner.checkpoint()
