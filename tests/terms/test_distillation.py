"""Learning from teachers, against formulas written out in float64; and peers whose numbers of members differ."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributions as td
from scipy.optimize import minimize
from torch import nn

from peerbayes import terms
from peerbayes.errors import InputError
from peerbayes.posteriors import Point, RankOne
from peerbayes.terms import Batch, Output, Step

CLASSES, IMAGES = 5, 6


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.linear(torch.tanh(self.bn(self.conv(x))).mean((2, 3)))


def logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, CLASSES, generator=torch.Generator().manual_seed(seed))


def made_batch(own, teachers=None):
    """Peer 'a' with these logits; the recipe's batch size is not the number of images."""
    outputs = {"a": Output(None, None, own, {})}
    return Batch(
        torch.arange(IMAGES) % CLASSES, outputs, {}, train_size=100, batch_size=16, epoch=0.0, teachers=teachers
    )


def value(batch, name, peer="a", **options):
    term = terms.find(name)
    return term.value(batch, peer, term.schema.parse(options, name).model_dump(exclude_none=True))


def number(tensor):
    return float(tensor.detach())


def softened(z, temperature):
    return (z.detach().double() / temperature).softmax(-1)


def cross_entropy(p, q):
    """(1/B) Σ_b H[p_b, q_b], as loops."""
    return -sum(p[b, c].item() * math.log(q[b, c].item()) for b in range(len(p)) for c in range(p.shape[1])) / len(p)


def rank_one(members=3, seed=0, **options):
    torch.manual_seed(seed)
    network = Tiny()
    network(4 * torch.rand(16, 1, 6, 6))  # statistics of its own
    return RankOne(network, members, factors="random", **options).eval()


def output_of(posterior, images):
    flat, std, extra = posterior.training_weights(None)
    found, _ = posterior.training_pass(images, flat, extra)
    return Output(posterior, posterior.weights(flat, std), found, {})


def images():
    return torch.rand(IMAGES, 1, 6, 6, generator=torch.Generator().manual_seed(3))


# ---- distil ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_mean_is_the_mean_of_the_teachers_cross_entropies_times_temperature_squared(temperature):
    own, teachers = logits(IMAGES), logits(3, IMAGES, seed=1)
    q = softened(own, temperature)
    by_hand = sum(cross_entropy(softened(z, temperature), q) for z in teachers) / 3
    found = value(made_batch(own, teachers), "distil", temperature=temperature, weight=0.7)
    assert number(found) == pytest.approx(0.7 * temperature**2 * by_hand, rel=1e-5)


def test_mean_has_the_gradient_of_temperature_times_q_minus_the_mean_target():
    own, teachers = logits(IMAGES).requires_grad_(), logits(3, IMAGES, seed=1)
    value(made_batch(own, teachers), "distil", temperature=4.0).backward()
    expected = 4 / IMAGES * (softened(own, 4) - softened(teachers, 4).mean(0))
    torch.testing.assert_close(own.grad, expected.float(), rtol=1e-4, atol=1e-7)


def test_a_student_that_is_its_teacher_has_no_gradient():
    own = logits(IMAGES)
    found = own.clone().requires_grad_()
    value(made_batch(found, own[None]), "distil").backward()
    torch.testing.assert_close(found.grad, torch.zeros_like(own), rtol=0, atol=1e-7)


def test_one_to_one_is_the_mean_of_what_members_lose_to_their_own_teachers():
    student, teachers = rank_one(3), logits(3, IMAGES, seed=1)
    batch = made_batch(None, teachers)
    batch.outputs = {"a": output_of(student, images())}
    with torch.no_grad():
        members = [student.materialise(m).eval()(images()) for m in range(3)]
    lost = {
        order: sum(cross_entropy(softened(teachers[t], 4), softened(members[m], 4)) for m, t in enumerate(order)) / 3
        for order in itertools.permutations(range(3))
    }
    found = number(value(batch, "distil", temperature=4.0, teachers="one_to_one")) / 16
    assert found == pytest.approx(lost[0, 1, 2], rel=1e-5)
    # Anybody else's teacher would have made a difference.
    assert all(abs(other - found) > 1e-4 for order, other in lost.items() if order != (0, 1, 2))


def test_one_to_one_gives_the_factors_of_a_member_the_gradient_of_its_own_loss_undivided():
    student, teachers = rank_one(3), logits(3, IMAGES, seed=1)
    batch = made_batch(None, teachers)
    batch.outputs = {"a": output_of(student, images())}
    by_factor, by_weight = torch.autograd.grad(
        value(batch, "distil", temperature=4.0, teachers="one_to_one"), [student.deviations, student.mean]
    )
    alone = rank_one(3, scale_gradients=False)
    own = output_of(alone, images()).logits.unflatten(0, (3, -1))
    losses = [16 * -(softened(t, 4).float() * (z / 4).log_softmax(-1)).sum(-1).mean() for t, z in zip(teachers, own)]
    for m, loss in enumerate(losses):
        expected = torch.autograd.grad(loss, alone.deviations, retain_graph=True)[0]
        torch.testing.assert_close(by_factor[m], expected[m], rtol=1e-4, atol=1e-6)
        assert not expected[[n for n in range(3) if n != m]].any()
    torch.testing.assert_close(by_weight, torch.autograd.grad(sum(losses) / 3, alone.mean)[0], rtol=1e-4, atol=1e-6)


def test_mean_over_a_student_with_members_is_the_mean_of_what_they_lose():
    own, teachers = logits(2 * IMAGES), logits(3, IMAGES, seed=1)
    target = softened(teachers, 2).mean(0)
    by_hand = sum(cross_entropy(target, softened(z, 2)) for z in own.split(IMAGES)) / 2
    found = value(made_batch(own, teachers), "distil", temperature=2.0)
    assert number(found) == pytest.approx(4 * by_hand, rel=1e-5)


@pytest.mark.parametrize("how", ["mean", "adaptive"])
def test_logits_of_ten_thousand_stay_finite(how):
    own, teachers = (5e3 * logits(IMAGES)).requires_grad_(), 5e3 * logits(3, IMAGES, seed=1)
    found = value(made_batch(own, teachers), "distil", temperature=1.0, teachers=how)
    found.backward()
    assert found.isfinite()
    assert own.grad.isfinite().all()


def test_one_to_one_asks_for_as_many_members_as_teachers():
    with pytest.raises(InputError, match=r"peer 'a' has 2 members and there are 3 teachers"):
        value(made_batch(logits(2 * IMAGES), logits(3, IMAGES)), "distil", teachers="one_to_one")


@pytest.mark.parametrize("name", ["distil", "proxy_end2"])
def test_terms_that_learn_from_teachers_ask_for_them(name):
    with pytest.raises(InputError, match=r"^needs teachers, .* add a \[teachers\] table"):
        value(made_batch(logits(IMAGES)), name)


# ---- AE-KD ----------------------------------------------------------------------------------------------------------


def slsqp_weights(vectors, cap):
    """argmin ‖Σ_m ω_m g_m‖² with 0 ≤ ω ≤ cap, Σ ω = 1, by scipy; vectors (M, C)."""
    gram = vectors.numpy() @ vectors.numpy().T
    gram, count = gram / gram.max(), len(gram)
    found = minimize(
        lambda w: w @ gram @ w,
        np.full(count, 1 / count),
        jac=lambda w: 2 * gram @ w,
        bounds=[(0, cap)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda _: np.ones(count)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert found.success
    return torch.from_numpy(found.x)


@pytest.mark.parametrize("per", ["batch", "image"])
@pytest.mark.parametrize("cap", [0.35, 0.6, 1.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_adaptive_weights_are_those_of_a_general_solver(per, cap, seed):
    own, teachers = logits(IMAGES).requires_grad_(), logits(4, IMAGES, seed=seed)
    teachers[0] = 0.8 * own.detach() + 0.2 * teachers[0]  # a teacher who is near gets the weight
    q, p = softened(own, 4), softened(teachers, 4)
    if per == "batch":
        weights = slsqp_weights((q - p).mean(1), cap)[:, None].expand(4, IMAGES)
    else:
        weights = torch.stack([slsqp_weights(q[b] - p[:, b], cap) for b in range(IMAGES)], 1)
    target = (weights[..., None] * p).sum(0)
    batch = made_batch(own, teachers)
    found = value(batch, "distil", temperature=4.0, teachers="adaptive", per=per, cap=cap)
    assert number(found) == pytest.approx(16 * cross_entropy(target, q), rel=1e-4)
    found.backward()
    torch.testing.assert_close(own.grad, (4 / IMAGES * (q - target)).float(), rtol=1e-3, atol=2e-5)
    largest = number(batch.notes["a", "distil.largest_weight"])
    assert largest == pytest.approx(float(weights.amax(0).mean()), abs=2e-3)
    assert largest > 0.3  # equal weights, which any solver may return, would be 0.25


def test_adaptive_weights_differ_by_batch_and_by_image_and_from_the_mean():
    batch = made_batch(logits(IMAGES), logits(4, IMAGES, seed=1))
    found = {
        per: number(value(batch, "distil", temperature=4.0, teachers="adaptive", per=per)) for per in ("batch", "image")
    }
    assert len({round(v, 3) for v in (*found.values(), number(value(batch, "distil", temperature=4.0)))}) == 3


def test_a_cap_that_cannot_hold_means_equal_weights():
    batch = made_batch(logits(IMAGES), logits(4, IMAGES, seed=1))
    adaptive = value(batch, "distil", teachers="adaptive", cap=0.1)
    assert number(adaptive) == pytest.approx(number(value(batch, "distil")), rel=1e-6)
    one = made_batch(logits(IMAGES), logits(1, IMAGES, seed=1))
    assert number(value(one, "distil", teachers="adaptive")) == pytest.approx(number(value(one, "distil")), rel=1e-6)


def test_a_teacher_whom_the_student_equals_gets_six_tenths_unless_another_cap_is_set():
    own = logits(IMAGES)
    batch = made_batch(own, torch.cat([own[None], logits(3, IMAGES, seed=1)]))
    for options, largest in (({}, 0.6), ({"cap": 0.8}, 0.8), ({"cap": 1.0}, 1.0)):
        value(batch, "distil", teachers="adaptive", **options)
        assert number(batch.notes["a", "distil.largest_weight"]) == pytest.approx(largest, abs=1e-6)


def test_more_teachers_than_can_be_weighed_are_counted():
    most = made_batch(logits(IMAGES), logits(16, IMAGES, seed=1))
    assert value(most, "distil", teachers="adaptive").isfinite()
    batch = made_batch(logits(IMAGES), logits(17, IMAGES, seed=1))
    with pytest.raises(InputError, match="weighs at most 16 teachers adaptively, but there are 17"):
        value(batch, "distil", teachers="adaptive")


def test_adaptive_weights_of_a_student_with_members_go_by_its_mean_prediction():
    own, teachers = logits(2 * IMAGES), logits(4, IMAGES, seed=1)
    q, p = [softened(z, 4) for z in own.split(IMAGES)], softened(teachers, 4)
    weights = slsqp_weights(((q[0] + q[1]) / 2 - p).mean(1), 0.6)
    target = (weights[:, None, None] * p).sum(0)
    found = value(made_batch(own, teachers), "distil", temperature=4.0, teachers="adaptive")
    assert number(found) == pytest.approx(
        16 * (cross_entropy(target, q[0]) + cross_entropy(target, q[1])) / 2, rel=1e-4
    )


# ---- Proxy-EnD² -----------------------------------------------------------------------------------------------------


def proxy_by_hand(own, teachers, floor=1e-8):
    """METHODS 4.6, with torch's own Dirichlet."""
    log_p = teachers.double().log_softmax(-1)
    mean = log_p.exp().mean(0)
    spread = (mean * (mean.log() - log_p.mean(0))).sum(-1, keepdim=True)
    beta = mean * (CLASSES - 1) / 2 / spread.clamp(min=floor) + 1
    divergence = td.kl_divergence(td.Dirichlet(own.double().exp() + 1), td.Dirichlet(beta))
    return (divergence / beta.sum(-1)).mean()


def test_proxy_end2_is_the_reverse_divergence_of_torchs_dirichlets_divided_by_all_of_beta():
    own, teachers = logits(IMAGES).requires_grad_(), logits(3, IMAGES, seed=1)
    found, by_hand = value(made_batch(own, teachers), "proxy_end2", weight=0.7), 0.7 * proxy_by_hand(own, teachers)
    assert number(found) == pytest.approx(number(by_hand), rel=1e-5)
    expected = torch.autograd.grad(by_hand, own)[0]
    torch.testing.assert_close(torch.autograd.grad(found, own)[0], expected, rtol=1e-4, atol=1e-7)


def test_proxy_end2_of_a_student_with_members_is_the_mean_over_them():
    own, teachers = logits(2 * IMAGES), logits(3, IMAGES, seed=1)
    by_hand = sum(number(proxy_by_hand(z, teachers)) for z in own.split(IMAGES)) / 2
    assert number(value(made_batch(own, teachers), "proxy_end2")) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 50.0, 5e3])
def test_proxy_end2_is_finite_for_teachers_that_agree_and_for_saturated_ones(scale):
    one = scale * logits(1, IMAGES, seed=1)
    for teachers in (one.expand(3, -1, -1), scale * logits(3, IMAGES, seed=2)):
        own = logits(IMAGES).requires_grad_()
        found = value(made_batch(own, teachers), "proxy_end2")
        found.backward()
        assert found.isfinite()
        assert own.grad.isfinite().all()


# ---- peers with different numbers of members ------------------------------------------------------------------------


@pytest.fixture
def mixed():
    """A rank-one peer of three members, one of two, and a point."""
    torch.manual_seed(7)
    peers = {"three": rank_one(3, 1), "two": rank_one(2, 2), "point": Point(Tiny()).eval()}
    outputs = {name: output_of(posterior, images()) for name, posterior in peers.items()}
    return Batch(torch.arange(IMAGES) % CLASSES, outputs, {}, 100, 16, 0.0)


def networks_of(posterior):
    if isinstance(posterior, Point):
        return [posterior.materialise().eval()]
    return [posterior.materialise(m).eval() for m in range(posterior.members)]


def probabilities(batch):
    """Of every member of every peer, (M, B, C), float64."""
    with torch.no_grad():
        return {
            name: torch.stack([net(images()).double().softmax(-1) for net in networks_of(output.posterior)])
            for name, output in batch.outputs.items()
        }


def kl(p, q):
    return float((p * (p.log() - q.log())).sum(-1).mean())


@pytest.mark.parametrize("peer", ["three", "two", "point"])
def test_likelihood_is_the_mean_over_members_with_labels_for_each(mixed, peer):
    p = probabilities(mixed)[peer]
    by_hand = -sum(math.log(p[m, b, b % CLASSES]) for m in range(len(p)) for b in range(IMAGES)) / len(p) / IMAGES
    assert number(value(mixed, "likelihood", peer)) == pytest.approx(by_hand, rel=1e-5)
    assert torch.equal(Step(mixed, peer, "t").labels, torch.cat([mixed.labels] * len(p)))


@pytest.mark.parametrize("peer", ["three", "two", "point"])
def test_every_member_learns_from_the_average_prediction_of_a_peer_with_other_members(mixed, peer):
    p = probabilities(mixed)
    others = [name for name in p if name != peer]
    by_hand = sum(kl(p[other].mean(0), q) for q in p[peer] for other in others) / len(p[peer]) / len(others)
    found = value(mixed, "mutual", peer)
    assert number(found) == pytest.approx(by_hand, rel=1e-4)
    found.backward()
    for name, output in mixed.outputs.items():
        learns = [bool(t.grad is not None and t.grad.any()) for t in output.posterior.parameters()]
        assert all(learns) if name == peer else not any(learns)


def test_peers_with_equal_members_learn_member_from_member():
    outputs = {name: output_of(rank_one(3, seed), images()) for seed, name in enumerate("ab")}
    batch = Batch(torch.arange(IMAGES) % CLASSES, outputs, {}, 100, 16, 0.0)
    p = probabilities(batch)
    by_hand = sum(kl(one, two) for one, two in zip(p["b"], p["a"])) / 3
    assert number(value(batch, "mutual", "a")) == pytest.approx(by_hand, rel=1e-4)


def test_temperature_softens_the_average_prediction_not_the_members(mixed):
    p = probabilities(mixed)
    soft = (p["three"].mean(0).log() / 3).softmax(-1)
    own = (p["point"][0].log() / 3).softmax(-1)
    batch = Batch(mixed.labels, {n: mixed.outputs[n] for n in ("three", "point")}, {}, 100, 16, 0.0)
    assert number(value(batch, "mutual", "point", temperature=3.0)) == pytest.approx(9 * kl(soft, own), rel=1e-4)


# ---- what it says of itself -----------------------------------------------------------------------------------------


def test_distil_notes_how_far_teachers_and_members_are_apart():
    own, teachers = logits(2 * IMAGES), logits(3, IMAGES, seed=1)
    batch = made_batch(own, teachers)
    value(batch, "distil")
    for note, given in (("teachers_apart", teachers), ("members_apart", own.unflatten(0, (2, -1)))):
        pairs = list(itertools.permutations(softened(given, 1), 2))
        found = number(batch.notes["a", f"distil.{note}"])
        assert found == pytest.approx(sum(kl(p, q) for p, q in pairs) / len(pairs), rel=1e-4)
    alone = made_batch(logits(IMAGES), logits(1, IMAGES))
    value(alone, "distil")
    assert not [name for _, name in alone.notes if "apart" in name]
