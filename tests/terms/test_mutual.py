"""Who learns from whom, and with which order: the knowledge graph and the schedules of alpha."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from peerbayes import terms
from peerbayes.data import ArraySplit, Dataset
from peerbayes.errors import InputError
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField, Point
from peerbayes.recipes.recipe import Recipe
from peerbayes.terms import Batch, Output
from peerbayes.terms.mutual import lessons
from peerbayes.terms.schedules import Schedule, value_at
from peerbayes.training.learner import Learner


class Linear(nn.Module):
    def __init__(self, hidden=0):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, hidden or 3))
        if hidden:
            self.body.extend([nn.Tanh(), nn.Linear(hidden, 3)])

    def forward(self, x):
        return self.body(x)


def batch(names="abcd", epoch=0.0):
    torch.manual_seed(0)
    images, outputs = torch.rand(6, 1, 4, 4), {}
    for name in names:
        torch.manual_seed(ord(name))
        posterior = Point(Linear(5))
        nn.init.normal_(posterior.mean)
        weights = posterior.draw(Address(0, name))
        outputs[name] = Output(posterior, weights, posterior(images, weights), {})
    return Batch(torch.arange(6) % 3, outputs, {}, 100, 6, epoch)


def value(found, peer, **options):
    term = terms.find("mutual")
    return term.value(found, peer, term.schema.parse(options, "mutual").model_dump(exclude_none=True))


def number(tensor):
    return float(tensor.detach())


def divergence(found, teacher, student, alpha=1.0, temperature=1.0):
    p, q = ((found.outputs[n].logits.detach().double() / temperature).softmax(-1) for n in (teacher, student))
    if alpha == 1:
        return float((p * (p.log() - q.log())).sum(-1).mean()) * temperature**2
    return float((p**alpha * q ** (1 - alpha)).sum(-1).log().mean()) / (alpha - 1) * temperature**2


# ---- the graph --------------------------------------------------------------------------------------------------


def test_in_a_ring_each_learns_from_the_one_before():
    found = batch()
    for student, teacher in zip("abcd", "dabc"):
        by_hand = divergence(found, teacher, student, 2.0, 3.0)
        result = value(found, student, graph="ring", alpha=2.0, temperature=3.0)
        assert number(result) == pytest.approx(by_hand, rel=1e-4)


def test_a_list_of_edges_has_its_own_orders_temperatures_and_weights():
    found = batch("abc")
    graph = [
        {"teacher": "b", "student": "a", "alpha": 2.0},
        {"teacher": "c", "student": "a", "temperature": 2.0, "weight": 0.5},
        {"teacher": "a", "student": "b"},
    ]
    options = {"graph": graph, "alpha": 0.5, "temperature": 4.0, "weight": 3.0}
    a = (3 * divergence(found, "b", "a", 2.0, 4.0) + 0.5 * divergence(found, "c", "a", 0.5, 2.0)) / 2
    assert number(value(found, "a", **options)) == pytest.approx(a, rel=1e-4)
    assert number(value(found, "b", **options)) == pytest.approx(3 * divergence(found, "a", "b", 0.5, 4.0), rel=1e-4)
    alone = value(found, "c", **options)  # nobody teaches c
    assert number(alone) == 0
    assert not alone.requires_grad


def test_the_best_of_the_batch_teaches_the_rest_and_learns_nothing():
    found = batch()
    losses = {n: number(F.cross_entropy(o.logits, found.labels)) for n, o in found.outputs.items()}
    best = min(losses, key=losses.get)
    for name, output in found.outputs.items():
        result = value(found, name, graph="best_to_rest")
        expected = 0.0 if name == best else divergence(found, best, name)
        assert number(result) == pytest.approx(expected, rel=1e-4)
        gradient = torch.autograd.grad(result, output.posterior.mean)[0]
        assert bool(gradient.any()) == (name != best)


@pytest.mark.parametrize("graph", ["all", "ring", "best_to_rest", [{"teacher": "b", "student": "a"}]])
def test_no_graph_lets_a_gradient_reach_a_teacher(graph):
    found = batch("abc")
    result = value(found, "a", graph=graph)
    others = [found.outputs[n].posterior.mean for n in "bc"]
    assert all(g is None for g in torch.autograd.grad(result, others, allow_unused=True))


@pytest.mark.parametrize("count", [2, 3, 16])
def test_all_and_ring_have_the_right_number_of_lessons(count):
    names = [f"p{i}" for i in range(count)]
    common = {"alpha": 1.0, "temperature": 1.0, "weight": 1.0}
    everyone = lessons({"graph": "all", **common}, names)
    assert {(e.teacher, e.student) for e in everyone} == {(a, b) for a in names for b in names if a != b}
    ring = lessons({"graph": "ring", **common}, names)
    assert sorted(e.teacher for e in ring) == sorted(e.student for e in ring) == sorted(names)


def test_a_graph_with_an_unknown_peer_is_refused_by_name_before_anything_is_trained():
    graph = [{"teacher": "pretraned", "student": "scratch"}]
    with pytest.raises(InputError) as caught:
        learner({"likelihood": {}, "mutual": {"graph": graph}}, names=("scratch", "pretrained"))
    assert str(caught.value) == (
        "stages.0.terms.mutual.graph: teacher 'pretraned' is not a peer; did you mean 'pretrained'?"
    )


AB, BA = ({"teacher": teacher, "student": student} for teacher, student in ("ab", "ba"))


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        ([], "the graph is empty, so no peer would learn; set alpha = 0, or leave the term out"),
        ([AB, {"teacher": "b", "student": "b"}], "peer 'b' can't learn from itself"),
        (
            [AB, BA, AB | {"alpha": 2.0}],
            "the edge from teacher 'a' to student 'b' is given twice; to make it count more, give it a weight",
        ),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused_by_its_key(graph, sentence):
    with pytest.raises(InputError) as caught:
        learner({"likelihood": {}, "mutual": {"graph": graph}})
    assert str(caught.value) == f"test: stages.0.terms.mutual.graph: {sentence}"
    learner({"likelihood": {}, "mutual": {"graph": [AB, BA]}})  # there and back are two edges


def test_no_edge_pushes_its_student_away():
    # Against the likelihood a divergence without bound wins: peers are kept apart by the diversity terms, which fade.
    edge = {"likelihood": {}, "mutual": {"graph": [AB, BA | {"weight": -0.5}]}}
    for options, key in ((edge, r"graph\.1\.weight"), ({"mutual": {"weight": -0.5}}, "weight")):
        sentence = rf"^test: stages\.0\.terms\.mutual\.{key}: input should be greater than or equal to 0, got -0\.5$"
        with pytest.raises(InputError, match=sentence):
            learner(options)
    learner({"likelihood": {}, "mutual": {"graph": [AB, BA | {"weight": 0.0}]}})


# ---- schedules --------------------------------------------------------------------------------------------------

COSINE = {"schedule": "cosine", "start": 2.0, "end": 0.5, "epochs": 10.0}
LINEAR = {"schedule": "linear", "start": 0.0, "end": 3.0, "epochs": 6.0}
STEPS = {"schedule": "steps", "values": [2.0, 1.0, 0.25], "at": [3.0, 7.0]}


@pytest.mark.parametrize(
    ("schedule", "epoch", "expected"),
    [
        (COSINE, 0.0, 2.0),
        (COSINE, 5.0, 1.25),
        (COSINE, 2.5, 0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2),
        (COSINE, 10.0, 0.5),
        (COSINE, 40.0, 0.5),
        (LINEAR, 0.0, 0.0),
        (LINEAR, 2.0, 1.0),
        (LINEAR, 9.0, 3.0),
        (STEPS, 0.0, 2.0),
        (STEPS, 2.999, 2.0),
        (STEPS, 3.0, 1.0),
        (STEPS, 7.5, 0.25),
        (0.7, 3.0, 0.7),
    ],
)
def test_schedules_at_an_epoch_as_number_and_as_tensor(schedule, epoch, expected):
    assert value_at(schedule, epoch) == pytest.approx(expected)
    found = value_at(schedule, torch.tensor(epoch))
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert isinstance(found, torch.Tensor) == isinstance(schedule, dict)


@pytest.mark.parametrize("values", [[0.3, 1.0, 0.0], [0.1, 1.1, 0.0], [0.5, 0.3, 1.0]])
def test_steps_are_exactly_their_values(values):
    # Summed up from their differences, 0.3 → 1 → 0 would end below 0, which is refused.
    schedule = {"schedule": "steps", "values": values, "at": [1.0, 2.0]}
    for epoch, expected in enumerate(values):
        assert value_at(schedule, float(epoch)) == expected
        assert torch.equal(value_at(schedule, torch.tensor(float(epoch))), torch.tensor(expected))


@given(
    start=st.floats(0, 100),
    end=st.floats(0, 100),
    epochs=st.floats(0.1, 500),
    epoch=st.floats(0, 1000),
    kind=st.sampled_from(["cosine", "linear"]),
)
def test_a_schedule_stays_between_its_ends(start, end, epochs, epoch, kind):
    found = value_at({"schedule": kind, "start": start, "end": end, "epochs": epochs}, epoch)
    assert min(start, end) - 1e-9 <= found <= max(start, end) + 1e-9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "cosine", "start": 1.0}, "needs 'start', 'end' and 'epochs'"),
        ({"schedule": "steps", "values": [1.0], "at": [1.0]}, "one epoch less"),
        ({"schedule": "steps", "values": [1.0, 2.0, 3.0], "at": [5.0, 2.0]}, "must rise"),
        ({"schedule": "linear", "start": -1.0, "end": 1.0, "epochs": 3.0}, "greater than or equal to 0"),
        ({"schedule": "linear", "start": math.inf, "end": 1.0, "epochs": 3.0}, "finite number"),
        ({"schedule": "cosine", "start": 1.0, "end": 2.0, "epochs": 3.0, "at": [1.0]}, "'cosine' has no 'at'"),
        ({"schedule": "steps", "values": [1.0, 2.0], "at": [1.0], "epochs": 3.0}, "'steps' has no 'epochs'"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        Schedule.model_validate(given)


def test_the_order_that_a_step_uses_is_the_schedules():
    for epoch in (0.0, 5.0):
        found = batch("ab", epoch=torch.tensor(epoch))
        by_hand = divergence(found, "b", "a", value_at(COSINE, epoch))
        assert number(value(found, "a", alpha=COSINE)) == pytest.approx(by_hand, rel=1e-4)


# ---- whole trainings --------------------------------------------------------------------------------------------


def learner(given, names=("a", "b"), kinds=None, epochs=2, **options):
    torch.manual_seed(5)
    split = ArraySplit((torch.rand(32, 1, 4, 4) * 255).to(torch.uint8), torch.arange(32) % 3)
    data = Dataset("made", split, None, split, 3, None, (1, 4, 4), (0.5,), (0.3,))
    stage = {"epochs": epochs, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9} | options, "terms": given}
    recipe = Recipe.parse(
        {
            "title": "t",
            "data": {"batch_size": 8},
            "peers": [{"name": n, "network": "mlp", "posterior": {"kind": "point"}} for n in names],
            "stages": [stage],
            "gradient_share_every": 0,
        },
        "test",
    )
    peers = {}
    for place, name in enumerate(names):
        torch.manual_seed(place)
        kind = (kinds or [Point] * len(names))[place]
        peers[name] = kind(Linear(4 + place), **({} if kind is Point else {"name": name}))
    return Learner(recipe, peers, data, 0)


@pytest.mark.parametrize("kind", [Point, MeanField])
@pytest.mark.parametrize("count", [2, 5])
def test_alpha_zero_is_independent_training_bit_for_bit(kind, count):
    names = "abcde"[:count]
    independent = learner({"likelihood": {}}, names, [kind] * count)
    mutual = learner({"likelihood": {}, "mutual": {"alpha": 0.0, "weight": 5.0}}, names, [kind] * count)
    coupled = learner({"likelihood": {}, "mutual": {"alpha": 0.5}}, names, [kind] * count)
    for found in (independent, mutual, coupled):
        found.run()
    for name in names:
        assert torch.equal(independent.peers[name].mean, mutual.peers[name].mean)
        assert not torch.equal(independent.peers[name].mean, coupled.peers[name].mean)


def test_peers_of_different_networks_and_kinds_learn_together_and_equal_shapes_are_asked_for_by_name():
    found = learner({"likelihood": {}, "mutual": {"alpha": 2.0}}, kinds=[Point, MeanField], epochs=20)
    before = batch_loss(found)
    found.run()
    assert all(after < first for after, first in zip(batch_loss(found), before))
    with pytest.raises(
        InputError, match=r"^stages\.0\.terms\.weight_diversity: needs peers of equal shape, but 'body\.1\.w"
    ):
        learner({"likelihood": {}, "weight_diversity": {}})


def batch_loss(found):
    images, labels = found.data.train.batch(torch.arange(32), torch.device("cpu"))
    return [float(F.cross_entropy(p(images).detach(), labels)) for p in found.peers.values()]


def test_clip_shortens_each_peers_gradient_to_the_limit():
    limit, lr = 1e-3, 0.1
    found = learner({"likelihood": {"weight": 100.0}}, momentum=0.0, clip=limit, lr=lr)
    before = {name: torch.cat([p.mean.detach().clone(), p.rest.detach()]) for name, p in found.peers.items()}
    found.step()
    for name, posterior in found.peers.items():
        moved = torch.cat([posterior.mean.detach(), posterior.rest.detach()]) - before[name]
        assert float(moved.norm()) == pytest.approx(lr * limit, rel=1e-3)
