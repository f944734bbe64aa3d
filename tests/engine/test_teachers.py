"""Teachers and the steps that images make towards where they differ, against plain modules in evaluation mode."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learners import same
from peerbayes.data import ArraySplit, Dataset, guidance, order, pair, to_unit
from peerbayes.engine.perturbation import Passes, Perturbation
from peerbayes.engine.teachers import Teachers, all_logits, run_functional
from peerbayes.errors import InputError
from peerbayes.math.noise import Address, permutation
from peerbayes.posteriors import MeanField, Point, RankOne
from peerbayes.recipes.recipe import Recipe
from peerbayes.recipes.settings import Perturb
from peerbayes.training.learner import Learner
from peerbayes.training.validation import EpochEvaluator

SHAPE, CLASSES = (1, 6, 6), 3
SIZE = math.sqrt(math.prod(SHAPE)) / 255
KINDS = ("gaussian", "ods", "conf_ods", "tdiv", "tdiv_sdiv", "bald")


class Conv(nn.Module):
    """Batch-norm and dropout, which evaluation mode alone makes a function of the image."""

    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 6, 3, 2, 1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.second(F.relu(self.bn(self.first(x))))).mean((2, 3))))


def network(seed=0, width=4):
    """A network with statistics of its own, and logits that differ from image to image."""
    torch.manual_seed(seed)
    found = Conv(width)
    nn.init.normal_(found.bn.weight, 1.0, 0.3)
    nn.init.normal_(found.head.weight, 0.0, 3.0)
    for _ in range(5):
        found(torch.rand(16, *SHAPE))
    return found


def points(count=3, **options):
    return [Point(network(seed, **options)) for seed in range(count)]


def members(count=3, seed=9, **options):
    return RankOne(network(seed), count, factors="random", spread=0.4, **options)


def images(count=5, seed=1, low=0.3, high=0.7):
    return low + (high - low) * torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def made_data(count=16):
    torch.manual_seed(5)
    split = ArraySplit((torch.rand(count, *SHAPE) * 255).to(torch.uint8), torch.arange(count) % CLASSES)
    return Dataset("made", split, None, split, CLASSES, None, SHAPE, (0.5,), (0.3,))


def made_recipe(perturb=None, temperature=1.0, terms=None, epochs=1, lr=0.1, **optimizer):
    stage = {
        "epochs": epochs,
        "optimizer": {"name": "sgd", "lr": lr} | optimizer,
        "terms": terms or {"likelihood": {}},
    }
    if perturb is not None:
        stage["perturb"] = {"kind": perturb, "temperature": temperature}
    peer = {"name": "student", "network": "mlp", "posterior": {"kind": "point"}}
    table = {"title": "t", "data": {"batch_size": 4}, "peers": [peer], "stages": [stage], "gradient_share_every": 0}
    return Recipe.parse(table, "test")


def learner(perturb=None, teachers=None, student=None, seed=0, draws=1, **options):
    found = Teachers(teachers, draws, seed) if teachers else None
    student = student if student is not None else members()
    return Learner(
        made_recipe(perturb, **options), {"student": student}, made_data(), seed, teachers=found, engine="eager"
    )


def moved(perturb, x, number=0, **options):
    options.setdefault("teachers", points())
    return learner(perturb, **options).cohort.perturb_and_teach(x, number)[0]


def plain(posterior, number=None):
    """A network of its own, in evaluation mode and double precision."""
    found = posterior.materialise() if number is None else posterior.materialise(number)
    return found.eval().double().requires_grad_(False)


def state(posterior):
    return {name: tensor.detach().clone() for name, tensor in posterior.state().items()}


# ---- teachers -------------------------------------------------------------------------------------------------------


def test_a_point_teaches_what_its_network_says_in_evaluation_mode():
    given, x = points(3), images()
    for posterior in given:
        posterior.train()
    found = learner(teachers=given).cohort.perturb_and_teach(x, 4)[1]
    assert found.shape == (3, 5, CLASSES)
    assert not found.requires_grad
    for own, posterior in zip(found, given):
        torch.testing.assert_close(own, plain(posterior)(x.double()).float(), rtol=1e-4, atol=1e-5)


def test_teachers_see_the_perturbed_images():
    given, x = points(3), images()
    seen, found = learner("tdiv", given).cohort.perturb_and_teach(x, 4)
    torch.testing.assert_close(found[1], plain(given[1])(seen.double()).float(), rtol=1e-4, atol=1e-5)
    assert (plain(given[1])(x.double()).float() - found[1]).abs().max() > 1e-3


def test_bayesian_teachers_draw_anew_in_every_step_and_the_same_in_the_same_step():
    given = [MeanField(network(0), rho=-2.0), MeanField(network(0), rho=-2.0), Point(network(0))]
    cohort, x = learner(teachers=given, draws=2).cohort, images()
    found = {number: cohort.perturb_and_teach(x, number)[1] for number in (0, 1, 2, 7)}
    assert found[0].shape == (5, 5, CLASSES)
    again = learner(teachers=given, draws=2).cohort
    draws = []
    for number, logits in found.items():
        assert torch.equal(again.perturb_and_teach(x, number)[1], logits)
        assert torch.equal(again.perturb_and_teach(x, torch.tensor(number))[1], logits)
        assert torch.equal(logits[4], found[0][4])
        draws += logits[:4]
    # No two draws are alike, neither of one posterior, nor of two that are equal, nor at any two steps.
    assert min((one - two).abs().max() for one, two in itertools.combinations(draws, 2)) > 1e-3
    assert not torch.equal(learner(teachers=given, draws=2, seed=1).cohort.perturb_and_teach(x, 0)[1][:4], found[0][:4])


def test_draws_of_a_bayesian_teacher_have_its_mean_and_variance():
    torch.manual_seed(0)
    posterior = MeanField(nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES, bias=False)), rho=-1.0)
    student = Point(nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)))
    cohort, x = learner(teachers=[posterior], student=student, draws=4).cohort, images(1)
    found = torch.cat([cohort.perturb_and_teach(x, number)[1][:, 0] for number in range(250)])
    mean = x.flatten() @ posterior.mean.detach().view(CLASSES, 36).T
    std = math.log1p(math.exp(-1.0)) * float(x.norm())
    assert (found.mean(0) - mean).abs().max() < 4 * std / math.sqrt(1000)
    assert found.std(0).sub(std).abs().max() < 4 * std / math.sqrt(2000)


def test_a_rank_one_teacher_gives_its_members_in_turn_or_their_average():
    x, posterior = images(), members()
    cohort = learner(teachers=[posterior]).cohort
    found = torch.stack([cohort.perturb_and_teach(x, number)[1][0] for number in range(3)])
    expected = torch.stack([plain(posterior, number)(x.double()).float() for number in range(3)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    averaged = members(predicts="average")
    found = learner(teachers=[averaged], draws=3).cohort.perturb_and_teach(x, 0)[1]
    torch.testing.assert_close(found, plain(averaged)(x.double()).float()[None], rtol=1e-4, atol=1e-5)


def test_every_two_members_of_a_rank_one_teacher_meet():
    member = RankOne(network(), 4, factors="random")
    teachers = Teachers([member], draws=2, seed=5)
    all_of_them = [member.member(number).flat for number in range(4)]
    met = {}
    for step in range(300):
        drawn, again = ([own.flat for own in teachers.tensors(at)] for at in (step, torch.tensor(step)))
        assert all(torch.equal(one, other) for one, other in zip(drawn, again, strict=True))
        two = tuple(next(n for n, flat in enumerate(all_of_them) if torch.equal(flat, one)) for one in drawn)
        met[two] = met.get(two, 0) + 1
    assert len(met) == 12  # all ordered pairs, none of a member with itself
    assert max(met.values()) < 3 * min(met.values())


def test_teachers_are_copies_that_do_not_learn():
    given = [*points(2), MeanField(network(2))]
    before = [state(posterior) for posterior in given]
    flags = [[module.training for module in posterior.modules()] for posterior in given]
    run = learner("tdiv_sdiv", given, terms={"distil": {"teachers": "one_to_one"}}, epochs=2)
    copies = [state(posterior) for posterior in run.cohort.teachers.posteriors]
    start = state(run.peers["student"])
    run.run()
    assert not same(state(run.peers["student"]), start)
    for posterior, kept, flag in zip(given, before, flags):
        assert same(state(posterior), kept)
        assert [module.training for module in posterior.modules()] == flag
        assert all(p.requires_grad and p.grad is None for p in posterior.parameters())
    for posterior, kept in zip(run.cohort.teachers.posteriors, copies):
        assert same(state(posterior), kept)
        assert not any(p.requires_grad or p.grad is not None for p in posterior.parameters())


@pytest.mark.parametrize("kind", ["point", "mean_field"])
def test_the_teacher_with_a_number_is_that_one_of_all(kind):
    found = [Point(network(s)) if kind == "point" else MeanField(network(s), rho=-2.0) for s in range(3)]
    teachers, x = Teachers(found, draws=2, seed=3), images()
    tensors = teachers.tensors(5)
    everybody = teachers.logits(run_functional, x, tensors, None)
    assert len(everybody) == len(teachers) == (3 if kind == "point" else 6)
    for number, own in enumerate(everybody):
        assert torch.equal(teachers.pick(run_functional, x, tensors, torch.tensor([number]), None), own)


def activated(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), kind(), nn.Linear(5, CLASSES))


def frozen(seed):
    found = activated(nn.ReLU)
    nn.init.normal_(found[1].weight, generator=torch.Generator().manual_seed(seed))
    found[1].requires_grad_(False)
    return found


@pytest.mark.parametrize("case", ["other activations", "frozen layers"])
def test_networks_that_differ_in_more_than_what_learns_are_not_taken_for_one(case):
    pairs = {"other activations": [activated(nn.ReLU), activated(nn.Tanh)], "frozen layers": [frozen(0), frozen(1)]}
    teachers, x = Teachers([Point(own) for own in pairs[case]]), images()
    tensors = teachers.tensors(0)
    if teachers.alike:  # or else who picks one of them is refused
        for number, own in enumerate(teachers.logits(run_functional, x, tensors, None)):
            torch.testing.assert_close(teachers.pick(run_functional, x, tensors, torch.tensor([number]), None), own)


@pytest.mark.parametrize("first", ["point", "weights alone", "everything"])
def test_teachers_of_one_network_may_keep_its_parameters_in_different_places(first):
    given = {
        "point": Point(network(1)),
        "weights alone": MeanField(network(2), bayesian=lambda name, _: name.endswith("weight") and "bn" not in name),
        "everything": MeanField(network(3), bayesian=lambda *_: True),
    }
    teachers, x = Teachers([given.pop(first), *given.values()]), images()
    assert teachers.alike
    tensors = teachers.tensors(0)
    for number, own in enumerate(teachers.logits(run_functional, x, tensors, None)):
        assert torch.equal(teachers.pick(run_functional, x, tensors, torch.tensor([number]), None), own)


def test_no_teachers_at_all_are_refused():
    with pytest.raises(InputError, match="there are no teachers"):
        Teachers([])


# ---- perturbation: how far ------------------------------------------------------------------------------------------


def test_a_kind_that_no_step_is_for_is_an_error():
    teachers = Teachers(points())
    perturb = Perturbation(Perturb(kind="tdiv"), teachers, {}, 0)
    perturb.kind = "another"
    with pytest.raises(AssertionError, match="another"):
        perturb(images(), 0, 0, Passes(teachers.tensors(0)))


@pytest.mark.parametrize("kind", ["ods", "tdiv", "tdiv_sdiv", "bald"])
def test_a_step_is_as_long_as_noise_of_one_grey_level_a_pixel(kind):
    x = images()
    steps = (moved(kind, x) - x).flatten(1).norm(dim=1)
    torch.testing.assert_close(steps, torch.full((5,), SIZE), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_images_stay_between_black_and_white(kind):
    x = images(low=-1.0, high=2.0).clamp(0, 1)
    found = moved(kind, x)
    assert found.min() == 0
    assert found.max() == 1
    assert ((found != x) & ((x == 0) | (x == 1))).any()  # some of those at the border came inside
    if kind != "gaussian":
        steps = (found - x).flatten(1).norm(dim=1)
        assert (steps < SIZE).all()
        assert (steps > 0.05 * SIZE).all()


def moved_by_equals(kind):
    return moved(kind, images(), teachers=[Point(network(0)) for _ in range(3)], student=RankOne(network(9), 3))


@pytest.mark.parametrize("kind", KINDS)
def test_teachers_that_are_one_network_make_no_nan(kind):
    assert moved_by_equals(kind).isfinite().all()


@pytest.mark.parametrize("kind", ["tdiv", "tdiv_sdiv"])
def test_teachers_that_are_one_network_leave_the_images_alone(kind):
    assert torch.equal(moved_by_equals(kind), images())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gaussian"])
def test_saturated_teachers_give_steps_and_no_nan(kind):
    given = points()
    with torch.no_grad():
        for posterior in given:
            posterior.mean.mul_(30)
    steps = (moved(kind, images(), teachers=given) - images()).flatten(1).norm(dim=1)
    assert (steps < SIZE * 1.0001).all()
    assert steps.any()


# ---- perturbation: where to -----------------------------------------------------------------------------------------


def gradient(value, x):
    x = x.double().requires_grad_()
    return torch.autograd.grad(value(x), x)[0].flatten(1)


def apart(x, one, two):
    """∇_x Σ_b KL(sg p ‖ q)."""

    def value(inputs):
        p, log_q = one(inputs).softmax(-1).detach(), two(inputs).log_softmax(-1)
        return (p * (p.log() - log_q)).sum()

    return gradient(value, x)


def unit(direction):
    return direction / direction.norm(dim=1, keepdim=True)


def close(found, x, direction, scale=1.0):
    """Whether the images have made a step in this direction."""
    step = (found - x).double().flatten(1) / SIZE
    return bool((step - scale * unit(direction)).abs().max() < 2e-3)


def test_tdiv_goes_to_where_a_random_teacher_differs_from_another():
    given, x = points(), images()
    nets = [plain(posterior) for posterior in given]
    pairs = list(itertools.permutations(range(3), 2))
    directions = {(i, j): apart(x, nets[i], nets[j]) for i, j in pairs}
    cohort, seen = learner("tdiv", given).cohort, []
    for number in range(24):
        found = cohort.perturb_and_teach(x, number)[0]
        seen += [ij for ij in pairs if close(found, x, directions[ij])]
        assert len(seen) == number + 1  # one pair in a batch, and of different teachers
    assert set(seen) == set(pairs)


def test_tdiv_sdiv_takes_the_same_pair_of_teachers_and_students():
    given, student, x = points(), members(), images()
    teachers, students = [plain(own) for own in given], [plain(student, m) for m in range(3)]
    pairs = list(itertools.permutations(range(3), 2))
    of_teachers = {(i, j): apart(x, teachers[i], teachers[j]) for i, j in pairs}
    of_students = {(i, j): apart(x, students[i], students[j]) for i, j in pairs}
    cohort, other, seen = learner("tdiv_sdiv", given, student).cohort, learner("tdiv", given).cohort, set()
    for number in range(8):
        found = cohort.perturb_and_teach(x, number)[0]
        (match,) = [
            (one, two)
            for one, two in itertools.product(pairs, pairs)
            if close(found, x, of_teachers[one] - of_students[two])
        ]
        assert match[0] == match[1]
        seen.add(match)
        (alone,) = [one for one in pairs if close(other.perturb_and_teach(x, number)[0], x, of_teachers[one])]
        assert alone == match[0]  # and tdiv picks the same
    assert len(seen) > 2


def test_tdiv_sdiv_is_tdiv_while_all_members_coincide():
    x, student = images(), RankOne(network(9), 3)
    for number in range(3):
        one, two = (moved(kind, x, number, student=student) for kind in ("tdiv", "tdiv_sdiv"))
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
        other = moved("tdiv_sdiv", x, number)
        assert (other - one).abs().max() > 1e-3


def test_tdiv_sdiv_follows_the_student():
    x, student, given = images(), members(), points()
    cohort, nets = learner("tdiv_sdiv", given, student).cohort, [plain(posterior) for posterior in given]
    i, j = pair(Address(0, "data", "perturb", 0), 3).tolist()

    def direction():
        return apart(x, nets[i], nets[j]) - apart(x, plain(student, i), plain(student, j))

    before = direction()
    assert close(cohort.perturb_and_teach(x, 0)[0], x, before)
    with torch.no_grad():
        student.deviations.mul_(1.5)
        student.network.bn.running_mean.add_(0.1)
    assert close(cohort.perturb_and_teach(x, 0)[0], x, direction())
    assert not close(cohort.perturb_and_teach(x, 0)[0], x, before)


def test_bald_goes_to_where_all_teachers_disagree():
    given, x = points(), images()
    nets = [plain(posterior) for posterior in given]

    def disagreement(inputs):
        p = torch.stack([net(inputs).softmax(-1) for net in nets])
        mean = p.mean(0)
        return -(mean * mean.log()).sum() + (p * p.log()).sum() / 3

    assert close(moved("bald", x, teachers=given), x, gradient(disagreement, x))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_ods_goes_along_a_random_mix_of_one_teachers_probabilities(temperature):
    given, x = points(), images()
    nets, seen = [plain(posterior) for posterior in given], set()
    cohorts = {kind: learner(kind, given, temperature=temperature).cohort for kind in ("ods", "conf_ods")}
    for number in range(8):
        mix = guidance(Address(0, "data", "perturb", number).sub("guide"), 5, CLASSES).double()
        softened = [lambda inputs, net=net: (net(inputs) / temperature).softmax(-1) for net in nets]
        directions = [gradient(lambda inputs, p=p, mix=mix: (mix * p(inputs)).sum(), x) for p in softened]
        confidence = [p(x.double()).amax(-1, keepdim=True) for p in softened]
        one, two = (cohort.perturb_and_teach(x, number)[0] for cohort in cohorts.values())
        (teacher,) = [m for m in range(3) if close(one, x, directions[m])]
        assert close(two, x, directions[teacher], confidence[teacher])
        assert not close(two, x, directions[teacher])
        seen.add(teacher)
    assert seen == {0, 1, 2}


def test_ods_with_one_teacher_takes_that_one():
    given, x = points(1), images()
    mix = guidance(Address(0, "data", "perturb", 2).sub("guide"), 5, CLASSES).double()
    net = plain(given[0])
    direction = gradient(lambda inputs: (mix * net(inputs).softmax(-1)).sum(), x)
    assert close(moved("ods", x, 2, teachers=given), x, direction)


def test_gaussian_steps_are_standard_normal_in_grey_levels_and_need_no_teachers():
    x = images(400, low=0.4, high=0.6)
    levels = (moved("gaussian", x, teachers=None) - x) * 255
    assert levels.mean().abs() < 4 / math.sqrt(levels.numel())
    assert abs(levels.std() - 1) < 4 / math.sqrt(2 * levels.numel())
    assert (levels.abs() < 1).float().mean() == pytest.approx(0.6827, abs=0.02)


# ---- perturbation: what it depends on -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_step_moves_the_images_the_same_and_others_do_not(kind):
    x, given = images(), points()
    cohort = learner(kind, given).cohort
    found = [cohort.perturb_and_teach(x, number)[0] for number in range(8)]
    assert torch.equal(moved(kind, x, 3, teachers=given), found[3])
    assert torch.equal(moved(kind, x, torch.tensor(3), teachers=given), found[3])
    if kind == "bald":  # has nothing random
        assert all(torch.equal(one, found[0]) for one in found)
    else:
        assert not all(torch.equal(one, found[0]) for one in found[1:])
        seeds = [moved(kind, x, teachers=given, seed=seed) for seed in range(1, 7)]
        assert not all(torch.equal(one, found[0]) for one in seeds)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_batch_moves_as_it_does_in_the_whole(kind):
    x, cohort = images(6), learner(kind, points()).cohort
    whole = cohort.perturb_and_teach(x, 2)[0]
    for part in (slice(0, 2), slice(2, 6)):
        found = cohort.perturb_and_teach(x[part], 2, part.start)[0]
        torch.testing.assert_close(found, whole[part], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_changed_by_a_perturbation(kind):
    given, student = points(), members()
    cohort = learner(kind, given, student).cohort
    student.train()
    everybody = [student, *given, *cohort.teachers.posteriors]
    before = [state(posterior) for posterior in everybody]
    flags = [module.training for posterior in everybody for module in posterior.modules()]
    rng, x = torch.get_rng_state(), images()
    found, _ = cohort.perturb_and_teach(x, 1)
    assert not found.requires_grad
    assert torch.equal(x, images())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(same(state(posterior), kept) for posterior, kept in zip(everybody, before))
    assert [module.training for posterior in everybody for module in posterior.modules()] == flags
    assert all(p.grad is None for posterior in everybody for p in posterior.parameters())


# ---- what is refused ------------------------------------------------------------------------------------------------


def pairs_apart(nets, x):
    """The mean KL over ordered pairs and images, by torch.distributions."""
    found = [torch.distributions.Categorical(logits=net(x.double())) for net in nets]
    each = [torch.distributions.kl_divergence(p, q).mean() for p, q in itertools.permutations(found, 2)]
    return sum(each).item() / len(each)


@pytest.mark.parametrize("kind", KINDS)
def test_the_effect_of_a_step_is_how_far_apart_all_are_before_and_after_it(kind):
    given, student, x = points(), members(), images()
    cohort = learner(kind, given, student).cohort
    nets = {"teachers": [plain(own) for own in given], "members": [plain(student, m) for m in range(3)]}
    student.train()
    before = state(student)
    for number in (0, 3):
        found = cohort.perturb.effect(x, number, student, None)
        after = cohort.perturb_and_teach(x, number)[0]
        expected = {f"{who}_before": pairs_apart(own, x) for who, own in nets.items()}
        expected |= {f"{who}_after": pairs_apart(own, after) for who, own in nets.items()}
        assert found == pytest.approx(expected, rel=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(student).items())


def test_the_effect_is_a_mean_over_pairs_which_parts_of_the_images_have_each():
    given, student, x = points(), members(), images(80)
    cohort = learner("tdiv_sdiv", given, student).cohort
    after = torch.cat([cohort.perturb_and_teach(part, 3 + place)[0] for place, part in enumerate(x.split(32))])
    found = cohort.perturb.effect(x, 3, student, None)
    assert found["teachers_after"] == pytest.approx(pairs_apart([plain(own) for own in given], after), rel=1e-4)
    assert len({tuple(pair(Address(0, "data", "perturb", number), 3).tolist()) for number in (3, 4, 5)}) > 1


def test_the_effect_of_a_step_is_measured_on_those_who_are_several():
    x = images()
    alone = learner("ods", points(1), Point(network(9))).cohort.perturb
    assert alone.effect(x, 0, Point(network(9)), None) == {}
    nobody = learner("gaussian", None, members()).cohort.perturb
    assert set(nobody.effect(x, 0, members(2), None)) == {"members_before", "members_after"}
    several = learner("tdiv", points(2), Point(network(9))).cohort.perturb
    assert set(several.effect(x, 0, Point(network(9)), None)) == {"teachers_before", "teachers_after"}


def test_everybody_is_looked_at_in_the_type_that_networks_compute_in():
    given, student, x = Teachers(points()), members(), images()
    exact, found = (all_logits(x, given, given.tensors(0), student, how) for how in (None, torch.bfloat16))
    for who, logits in found.items():
        assert logits.dtype == torch.float32
        assert torch.equal(logits, logits.bfloat16().float())
        assert not torch.equal(exact[who], exact[who].bfloat16().float())
        torch.testing.assert_close(logits, exact[who], rtol=0.05, atol=0.05)


def test_what_a_step_does_is_noted_at_the_end_of_every_epoch_and_changes_nothing(monkeypatch):
    def trained():
        lines, student = [], members()
        found = learner("tdiv_sdiv", points(), student, epochs=3)
        found._log = lines.append
        found.run()
        return [line["peers"]["student"] for line in lines], state(student), found

    lines, after, one = trained()
    assert [set(line["notes"]) for line in lines] == [
        {f"perturb.{who}_{when}" for who in ("teachers", "members") for when in ("before", "after")}
    ] * 3
    assert len({line["notes"]["perturb.teachers_before"] for line in lines}) == 1  # the same images, and teachers
    assert len({line["notes"]["perturb.members_before"] for line in lines}) == 3
    x = to_unit(made_data().train.images[permutation(Address(0, "data", "perturbed"), 16)[:4]])
    assert lines[0]["notes"]["perturb.teachers_before"] == pytest.approx(
        pairs_apart([plain(own) for own in points()], x), rel=1e-4
    )
    last = one.cohort.perturb.effect(x, one.position.step, one.peers["student"], None)
    assert lines[-1]["notes"] == pytest.approx({f"perturb.{key}": value for key, value in last.items()})
    monkeypatch.setattr(EpochEvaluator, "perturbed", lambda *_: {})
    bare, same_as, _ = trained()
    assert [line | {"notes": {}} for line in lines] == bare
    assert all(torch.equal(tensor, same_as[name]) for name, tensor in after.items())


def test_the_effect_is_looked_at_in_some_twenty_epochs_and_the_last():
    lines = []
    found = learner("tdiv", points(), members(), epochs=47)
    found._log = lines.append
    found.run()
    seen = [line["epoch"] for line in lines if line["peers"]["student"]["notes"]]
    assert seen == [*range(3, 47, 3), 47]


def test_images_that_take_no_step_have_no_effect_to_be_noted():
    lines = []
    found = learner(None, points(), members())
    found._log = lines.append
    found.run()
    assert lines[0]["peers"]["student"]["notes"] == {}


@pytest.mark.parametrize("kind", ["tdiv", "tdiv_sdiv", "bald"])
def test_one_teacher_cannot_be_compared(kind):
    with pytest.raises(InputError, match=f"perturb '{kind}' compares teachers, but there is only one"):
        learner(kind, points(1), RankOne(network(), 1))
    with pytest.raises(InputError, match=r"there is only one; set teachers\.draws above 1, or take"):
        learner(kind, [MeanField(network())], RankOne(network(), 1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gaussian"])
def test_steps_that_look_at_teachers_ask_for_them(kind):
    with pytest.raises(InputError, match=rf"perturb '{kind}' needs teachers, .* add a \[teachers\] table"):
        learner(kind)


@pytest.mark.parametrize("kind", ["ods", "conf_ods", "tdiv", "tdiv_sdiv"])
def test_random_teachers_need_one_network_in_common_but_bald_does_not(kind):
    given = [*points(2), Point(network(5, width=7))]
    with pytest.raises(InputError, match=f"perturb '{kind}' picks teachers at random, which must have one network"):
        learner(kind, given)
    x = images()
    assert not torch.equal(moved("bald", x, teachers=given), x)


@pytest.mark.parametrize("student", [Point(network()), RankOne(network(), 2)], ids=["point", "two members"])
def test_tdiv_sdiv_asks_for_a_member_a_teacher(student):
    with pytest.raises(InputError, match=r"members of one rank-one student, 3 as .* but peer 'student' of 1 is a "):
        learner("tdiv_sdiv", points(3), student)


# ---- a whole step ---------------------------------------------------------------------------------------------------


class ByHand:
    """LatentBE with TDiv-SDiv as METHODS 4.2 writes it out: layers by einsum-free products, SGD by assignment."""

    def __init__(self, student, teachers, data, lr, momentum, decay):
        self.teachers, self.data, self.lr, self.momentum, self.decay = teachers, data, lr, momentum, decay
        tensors = state(student)
        self.shared = {n.split("/")[1]: t for n, t in tensors.items() if n.startswith(("mean/", "rest/"))}
        self.factors = {n.split("/")[1]: 1 + t for n, t in tensors.items() if n.startswith("factor/")}
        self.statistics = [tensors["network/bn.running_mean"], tensors["network/bn.running_var"]]
        self.moments, self.members = {}, student.members

    def layer(self, name, x, member, operation, *shape):
        r, s = (self.factors[f"{name}.{f}"][member].view(*shape) for f in "rs")
        y = s * operation(r * x, self.shared[f"{name}.weight"])
        bias = self.shared.get(f"{name}.bias")
        return y if bias is None else y + bias.view(*shape)

    def logits(self, x, numbers, training):
        """(members, B, C); batch-norm sees all of them at once."""
        rows = [self.layer("first", x, m, lambda a, w: F.conv2d(a, w, padding=1), 1, -1, 1, 1) for m in numbers]
        rows = F.batch_norm(
            torch.cat(rows), *self.statistics, self.shared["bn.weight"], self.shared["bn.bias"], training=training
        )
        found = []
        for m, part in zip(numbers, rows.relu().split(len(x))):
            part = self.layer("second", part, m, lambda a, w: F.conv2d(a, w, stride=2, padding=1), 1, -1, 1, 1)
            found.append(self.layer("head", torch.tanh(part).mean((2, 3)), m, F.linear, 1, -1))
        return torch.stack(found)

    def perturbed(self, x, i, j):
        inputs = x.clone().requires_grad_()

        def kl(one, two):
            p = one.softmax(-1).detach()
            return (p * (p.log() - two.log_softmax(-1))).sum()

        students = [self.logits(inputs, [m], training=False)[0] for m in (i, j)]
        value = kl(self.teachers[i](inputs), self.teachers[j](inputs)) - kl(*students)
        g = torch.autograd.grad(value, inputs)[0]
        norms = g.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        return (x + math.sqrt(x[0].numel()) / 255 * g / (norms + 1e-12)).clamp(0, 1)

    def step(self, number):
        index = order(16, Address(0, "data", "order", number // 4))[4 * (number % 4) :][:4]
        x = self.perturbed(
            to_unit(self.data.train.images[index]), *pair(Address(0, "data", "perturb", number), 3).tolist()
        )
        leaves = self.shared | self.factors
        for leaf in leaves.values():
            leaf.requires_grad_()
        own = (self.logits(x, range(self.members), training=True) / 4).log_softmax(-1)
        targets = [(net(x) / 4).softmax(-1).detach() for net in self.teachers]
        losses = [-16 * (t * z).sum(-1).mean() for t, z in zip(targets, own)]
        by_shared = torch.autograd.grad(sum(losses) / self.members, list(self.shared.values()), retain_graph=True)
        by_factor = torch.autograd.grad(sum(losses), list(self.factors.values()))
        for (name, leaf), g in zip(leaves.items(), (*by_shared, *by_factor)):
            leaf.requires_grad_(False)
            g = g + self.decay * (leaf - 1 if name in self.factors else leaf)
            moment = self.moments[name] = self.momentum * self.moments.get(name, 0) + g
            leaf -= self.lr * (g + self.momentum * moment)
        return [float(loss.detach()) for loss in losses]


class Still(Conv):
    """Without dropout, which no computation by hand can follow."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()


def test_six_steps_of_latentbe_with_tdiv_sdiv_equal_a_computation_by_hand():
    def still(seed):
        found = Still()
        found.load_state_dict(network(seed).state_dict())
        return found

    teachers = [Point(still(seed)) for seed in range(3)]
    student = RankOne(still(9), 3, factors="random", spread=0.3)
    how = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
    run = Learner(
        made_recipe(
            "tdiv_sdiv", terms={"distil": {"temperature": 4.0, "teachers": "one_to_one"}}, epochs=2, **how
        ).model_copy(),
        {"student": student},
        made_data(),
        0,
        teachers=Teachers(teachers),
        engine="eager",
    )
    nets = [posterior.materialise().eval().requires_grad_(False) for posterior in teachers]
    hand = ByHand(student, nets, made_data(), 0.02, 0.9, 0.05)
    losses = []
    for number in range(6):
        run.step()
        losses += hand.step(number)
        assert sum(losses) / 3 == pytest.approx(float(run.cohort.sums[0]), rel=1e-4)
    found = state(student)
    for name, expected in hand.shared.items():
        own = found.get(f"mean/{name}", found.get(f"rest/{name}"))
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for name, expected in hand.factors.items():
        torch.testing.assert_close(1 + found[f"factor/{name}"], expected, rtol=1e-3, atol=1e-4)
    for name, expected in zip(("running_mean", "running_var"), hand.statistics):
        torch.testing.assert_close(found[f"network/bn.{name}"], expected, rtol=1e-3, atol=1e-4)


# ---- weight decay ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the scales of peer")  # nothing but decay could move them
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("decays", [True, False])
def test_decay_pulls_factors_to_one_where_it_is_let_and_leaves_their_scales_alone(decays, optimizer):
    student = members(decay_factors=decays, gaussian=True)
    before = state(student)
    terms = {"distil": {"weight": 0.0}}
    learner(None, points(), student, terms=terms, name=optimizer, weight_decay=0.5).run()
    shrunk = (1 - 0.1 * 0.5) ** 4
    for name, tensor in state(student).items():
        if name.startswith("network/"):
            continue
        kept = name.startswith("factor_rho") or (name.startswith("factor") and not decays)
        factor = 1.0 if kept else shrunk
        torch.testing.assert_close(tensor, factor * before[name], rtol=1e-5, atol=0)
    assert before["factor/first.s"].abs().max() > 0.1
