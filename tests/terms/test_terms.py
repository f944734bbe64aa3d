"""Every term against a formula written out by hand, and the promise that no term reaches into another peer."""

import itertools
import math

import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import nn

from peerbayes import networks, terms
from peerbayes.data import ArraySplit, Dataset
from peerbayes.engine.stages import SHARED, StageState
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField, Point
from peerbayes.recipes.recipe import Recipe
from peerbayes.terms import Batch, Fusion, Output, Shapes
from peerbayes.training.learner import Learner

LAYERS = ["stage1", "stage2", "stage3"]
ALL = {
    "likelihood": {},
    "kl": {"scheme": "layer_mean"},
    "mutual": {"temperature": 3.0},
    "weight_diversity": {},
    "feature_diversity": {"layers": ["stage2", "stage3"]},
    "prediction_diversity": {},
}


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.stage2 = nn.Conv2d(4, 6, 3, 2, 1)
        self.stage3 = nn.Conv2d(6, 8, 3, 2, 1)
        self.linear = nn.Linear(8, 5)

    def forward(self, x):
        return self.linear(self.stage3(self.stage2(F.relu(self.bn(self.stage1(x))))).mean((2, 3)))


def cohort(count=2, kind=MeanField, epoch=0.0, same=False, modules=None):
    torch.manual_seed(0)
    images, outputs = torch.rand(6, 1, 8, 8), {}
    for number, name in enumerate("abc"[:count]):
        torch.manual_seed(1 if same else 1 + number)
        options = {} if kind is Point else {"name": name, "rho": -1.0, "prior_std": 0.7}
        posterior = kind(Tiny(), **options)
        weights = posterior.draw(Address(0, name, "step", 0))
        outputs[name] = Output(posterior, weights, *posterior.forward_features(images, weights, LAYERS))
    # The recipe's batch size is not the number of images here, so that a formula cannot take one for the other.
    return Batch(torch.arange(6) % 5, outputs, modules or {}, train_size=100, batch_size=16, epoch=epoch)


def helpers(batch, **options):
    """Give the batch the helpers that a stage would build for feature_diversity."""
    stage = StageState(
        Recipe.parse(
            {
                "title": "t",
                "peers": [{"name": "a", "network": "mlp", "posterior": {"kind": "point"}}],
                "stages": [{"epochs": 1, "terms": {"feature_diversity": options}}],
            },
            "test",
        ).stages[0],
        {name: output.posterior for name, output in batch.outputs.items()},
        {n: Shapes({k: f.shape for k, f in o.features.items()}, 5) for n, o in batch.outputs.items()},
        Address(0, "helpers", "initial", 0),
    )
    batch.modules = stage.modules
    return stage


def value(batch, name, peer="a", **options):
    term = terms.find(name)
    return term.value(batch, peer, term.schema.parse(options, name).model_dump(exclude_none=True))


def parameters(batch, peer):
    return [p for p in batch.outputs[peer].posterior.parameters() if p.numel()]


def number(tensor):
    return float(tensor.detach())


# ---- likelihood and KL ------------------------------------------------------------------------------------------


def test_likelihood_is_mean_negative_log_probability():
    batch = cohort()
    p = batch.outputs["a"].logits.double().softmax(-1)
    by_hand = -sum(math.log(number(p[i, y])) for i, y in enumerate(batch.labels.tolist())) / 6
    assert number(value(batch, "likelihood", weight=0.5)) == pytest.approx(0.5 * by_hand, rel=1e-5)


@pytest.mark.parametrize("shares", [None, torch.tensor([0.9, 0.8, 0.5, 0.3, 0.6, 1.0])])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_likelihood_of_mixed_images_is_the_cross_entropy_of_soft_targets(shares, smoothing):
    batch = cohort()
    batch.shares = shares
    target = F.one_hot(batch.labels, 5).double()
    if shares is not None:
        target = shares[:, None] * target + (1 - shares[:, None]) * target.flip(0)
    target = (1 - smoothing) * target + smoothing / 5
    expected = F.cross_entropy(batch.outputs["a"].logits.double(), target)
    assert number(value(batch, "likelihood", label_smoothing=smoothing)) == pytest.approx(number(expected), rel=1e-5)


def test_all_draws_of_a_step_count_in_the_likelihood_and_meet_those_of_the_other_peer():
    batch = cohort()
    drawn = {name: [output.logits, output.logits.flip(1)] for name, output in batch.outputs.items()}
    each = []
    for pick in (0, 1):
        for name, output in batch.outputs.items():
            output.logits = drawn[name][pick]
        each.append([number(value(batch, term)) for term in ("likelihood", "mutual")])
    for name, output in batch.outputs.items():
        output.logits = torch.cat(drawn[name])
    both = [number(value(batch, term)) for term in ("likelihood", "mutual")]
    assert both == pytest.approx([sum(pair) / 2 for pair in zip(*each, strict=True)], rel=1e-5)


def named_kl(posterior):
    state = posterior.state()
    prior = td.Normal(0.0, 0.7)
    return [
        td.kl_divergence(td.Normal(state[f"mean/{name}"], F.softplus(state[f"rho/{name}"])), prior)
        for name in posterior.layout.shapes
    ]


def test_kl_elbo_is_the_sum_over_weights_divided_by_the_training_images():
    batch = cohort()
    by_hand = sum(number(x.double().sum()) for x in named_kl(batch.outputs["a"].posterior)) * 0.3 / 100
    assert number(value(batch, "kl", weight=0.3)) == pytest.approx(by_hand, rel=1e-5)


def test_kl_layer_mean_is_the_sum_of_tensor_means_divided_by_the_batch_size():
    batch = cohort()
    by_hand = sum(number(x.double().mean()) for x in named_kl(batch.outputs["a"].posterior)) * 0.3 / 16
    assert number(value(batch, "kl", weight=0.3, scheme="layer_mean")) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize(("epoch", "factor"), [(0.0, 0.0), (0.5, 0.25), (2.0, 1.0), (7.0, 1.0)])
def test_kl_anneals_linearly_over_epochs(epoch, factor):
    whole = number(value(cohort(epoch=epoch), "kl"))
    assert number(value(cohort(epoch=epoch), "kl", anneal=2.0)) == pytest.approx(factor * whole, abs=1e-9)


# ---- mutual -----------------------------------------------------------------------------------------------------


def with_logits(*logits):
    outputs = {n: Output(None, None, z, {}) for n, z in zip("abc", logits)}
    return Batch(torch.zeros(len(logits[0]), dtype=torch.int64), outputs, {}, 10, 10, 0.0)


def test_mutual_is_temperature_squared_times_kl_from_peer_to_own():
    batch = cohort()
    own, peer = (batch.outputs[n].logits.detach().double() / 3 for n in "ab")
    by_hand = 9 * F.kl_div(own.log_softmax(-1), peer.softmax(-1), reduction="batchmean")
    assert number(value(batch, "mutual", temperature=3.0)) == pytest.approx(number(by_hand), rel=1e-4)


@pytest.mark.parametrize("alpha", [0.5, 1.5, 2.0])
def test_mutual_renyi_of_three_peers_is_the_average_over_the_others(alpha):
    batch = cohort(3)
    p = {n: (batch.outputs[n].logits.detach().double() / 2).softmax(-1) for n in "abc"}
    pairs = [(p[j] ** alpha * p["a"] ** (1 - alpha)).sum(-1).log().mean() / (alpha - 1) for j in "bc"]
    by_hand = 0.7 * 4 * sum(pairs) / 2
    found = value(batch, "mutual", alpha=alpha, temperature=2.0, weight=0.7)
    assert number(found) == pytest.approx(number(by_hand), rel=1e-4)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_mutual_gradient_is_q_minus_r(alpha):
    torch.manual_seed(0)
    own, peer = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    value(with_logits(own, peer), "mutual", alpha=alpha, temperature=2.0).backward()
    q, p = (own.detach() / 2).softmax(-1), (peer / 2).softmax(-1)
    r = p**alpha * q ** (1 - alpha)
    # T² from the term, 1/T from the division of the logits, 1/B from the mean.
    torch.testing.assert_close(own.grad, 2 / 4 * (q - r / r.sum(-1, keepdim=True)))


def test_mutual_alpha_zero_is_zero_with_zero_gradient():
    batch = cohort()
    found = value(batch, "mutual", alpha=0.0, temperature=3.0)
    assert number(found) == 0
    gradients = torch.autograd.grad(found, parameters(batch, "a"), allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)


def test_temperature_squared_keeps_the_gradient_scale_on_small_logits():
    torch.manual_seed(0)
    start, peer, found = 1e-3 * torch.randn(8, 10), 1e-3 * torch.randn(8, 10), {}
    for temperature in (1.0, 20.0):
        own = start.clone().requires_grad_()
        value(with_logits(own, peer), "mutual", temperature=temperature).backward()
        found[temperature] = own.grad
    torch.testing.assert_close(found[1.0], found[20.0], rtol=0.02, atol=1e-7)
    assert found[1.0].norm() > 1e-5


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_students_with_identical_weights_have_zero_mutual_gradient(alpha):
    batch = cohort(kind=Point, same=True)
    found = value(batch, "mutual", alpha=alpha)
    assert number(found) == 0
    gradients = torch.autograd.grad(found, parameters(batch, "a"), allow_unused=True)
    assert all(not g.any() for g in gradients)


# ---- weight diversity -------------------------------------------------------------------------------------------


def named_distance(one, two, distance):
    """The elements of the distance by tensor, from the named tensors and torch.distributions."""
    found = []
    for name in one.layout.shapes:
        q = [
            td.Normal(s[f"mean/{name}"].double(), F.softplus(s[f"rho/{name}"].double()))
            for s in (one.state(), two.state())
        ]
        if distance == "w2":
            found.append((q[0].mean - q[1].mean) ** 2 + (q[0].stddev - q[1].stddev) ** 2)
        elif distance == "kl":
            found.append(td.kl_divergence(*q))
        else:
            found.append((td.kl_divergence(*q) + td.kl_divergence(*reversed(q))) / 2)
    return found


def reduced(elements, reduction, one, two):
    if reduction == "layer_mean_sum":
        return sum(number(e.mean()) for e in elements)
    flat = torch.cat([e.flatten() for e in elements])
    if reduction == "mean":
        return number(flat.mean())
    norms = sum(number(t.double().square().sum()) for p in (one, two) for n, t in p.state().items() if n[:5] == "mean/")
    return number(flat.sum()) / (norms if reduction == "relative" else 1)


@pytest.mark.parametrize("distance", ["w2", "kl", "symmetric_kl"])
@pytest.mark.parametrize("reduction", ["layer_mean_sum", "mean", "sum", "relative"])
def test_weight_diversity_against_named_tensors(distance, reduction):
    batch = cohort()
    one, two = (batch.outputs[n].posterior for n in "ab")
    d = reduced(named_distance(one, two, distance), reduction, one, two)
    scale = 0.3 if reduction == "sum" else 1.7
    found = value(batch, "weight_diversity", distance=distance, reduction=reduction, scale=scale, weight=2.0)
    assert number(found) == pytest.approx(2 * math.log1p(math.exp(-scale * d)), rel=2e-4)
    linear = value(batch, "weight_diversity", distance=distance, reduction=reduction, scale=scale, form="linear")
    assert number(linear) == pytest.approx(-scale * d, rel=2e-4)
    assert number(batch.notes["a", "weight_diversity.distance"]) == pytest.approx(d, rel=2e-4)


def test_weight_diversity_of_three_peers_averages_the_losses():
    batch = cohort(3)
    a, b, c = (batch.outputs[n].posterior for n in "abc")
    losses = [math.log1p(math.exp(-reduced(named_distance(a, o, "w2"), "layer_mean_sum", a, o))) for o in (b, c)]
    assert number(value(batch, "weight_diversity")) == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_weight_diversity_pushes_the_means_apart():
    batch = cohort()
    value(batch, "weight_diversity").backward()
    a, b = (batch.outputs[n].posterior for n in "ab")
    assert torch.equal((-a.mean.grad).sign(), (a.mean - b.mean).detach().sign())


def test_weight_diversity_refuses_other_shapes_by_tensor():
    batch = cohort()
    wider = Tiny()
    wider.linear = nn.Linear(8, 7)
    batch.outputs["b"].posterior = MeanField(wider)
    with pytest.raises(InputError, match=r"'linear.weight' is \(5, 8\) in 'a' and \(7, 8\) in 'b'"):
        value(batch, "weight_diversity")


@pytest.mark.parametrize("point", ["a", "b"])
@pytest.mark.parametrize("distance", ["kl", "symmetric_kl"])
def test_a_divergence_of_weights_is_not_taken_of_a_point(distance, point):
    batch = cohort()
    batch.outputs[point] = cohort(kind=Point).outputs[point]
    assert number(value(batch, "weight_diversity")) > 0
    with pytest.raises(InputError, match=f"distance = '{distance}' needs Bayesian peers, but '{point}' is a point"):
        value(batch, "weight_diversity", distance=distance)


@pytest.fixture(scope="module")
def resnets():
    inputs = networks.Inputs(100, (3, 8, 8), (0.5,) * 3, (0.25,) * 3)
    peers = {}
    for number, name in enumerate("ab"):
        torch.manual_seed(number)
        peers[name] = MeanField(networks.build("resnet20", inputs), name=name)
    return peers


def resnet_batch(resnets):
    outputs = {n: Output(p, p.draw(Address(0, n)), torch.zeros(1, 100), {}) for n, p in resnets.items()}
    return Batch(torch.zeros(1, dtype=torch.int64), outputs, {}, 10, 10, 0.0)


def test_layer_mean_sum_of_fresh_resnet20s_is_in_the_active_range_of_softplus(resnets):
    d = -number(value(resnet_batch(resnets), "weight_diversity", form="linear"))
    assert 0.2 < d < 0.6


def test_sum_reduction_of_fresh_resnet20s_has_exactly_zero_gradient(resnets):
    batch = resnet_batch(resnets)
    found = value(batch, "weight_diversity", reduction="sum")
    assert number(batch.notes["a", "weight_diversity.distance"]) > 1000
    gradients = torch.autograd.grad(found, [resnets["a"].mean, resnets["a"].rho])
    assert number(found) == 0
    assert not any(g.any() for g in gradients)


# ---- diversity of predictions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [None, torch.full((6,), 0.5)])
def test_prediction_diversity_is_the_overlap_of_what_peers_would_mistake_images_for(shares):
    batch = cohort(3)
    batch.shares = shares
    labels, overlap = batch.labels.tolist(), []
    for other, image in itertools.product("bc", range(6)):
        label = {labels[image]} if shares is None else {labels[image], labels[5 - image]}
        rest = [c for c in range(5) if c not in label]
        p, q = (batch.outputs[name].logits[image, rest].double().softmax(-1) for name in ("a", other))
        overlap.append(number((p * q).sqrt().sum()))
    assert number(value(batch, "prediction_diversity", weight=2.0)) == pytest.approx(2 * sum(overlap) / 12, rel=1e-5)


def test_prediction_diversity_leaves_the_label_alone():
    batch = cohort()
    logits = batch.outputs["a"].logits
    gradient = torch.autograd.grad(value(batch, "prediction_diversity"), logits)[0]
    on_labels = gradient.gather(1, batch.labels[:, None])
    assert not on_labels.any()
    assert gradient.any()


def test_prediction_diversity_of_two_classes_is_inert_and_finite():
    batch = with_logits(torch.randn(4, 2), torch.randn(4, 2))
    for shares in (None, torch.full((4,), 0.5)):
        batch.shares, batch.labels = shares, torch.tensor([0, 0, 1, 1])
        assert number(value(batch, "prediction_diversity")) == pytest.approx(1.0)


def small_recipe(given, **changes):
    peer = {"network": "mlp", "posterior": {"kind": "point"}}
    table = {
        "title": "t",
        "data": {"batch_size": 4},
        "peers": [{"name": "a", **peer}],
        "stages": [{"epochs": 1, "terms": given}],
        "gradient_share_every": 1,
    }
    return Recipe.parse(table | changes, "test")


def image_data(count=4, shape=(3, 8, 8), classes=10):
    torch.manual_seed(3)
    split = ArraySplit(torch.rand(count, *shape), torch.arange(count) % classes)
    return Dataset("made", split, None, split, classes, None, shape, (0.5,) * shape[0], (0.25,) * shape[0])


def test_learner_warns_by_name_of_the_saturated_term(resnets):
    recipe = small_recipe({"likelihood": {}, "weight_diversity": {"reduction": "sum"}})
    with pytest.warns(PeerbayesWarning, match="weight_diversity is inert for peer '[ab]' at step 0"):
        Learner(recipe, resnets, image_data(classes=100), 0).run()


# ---- feature diversity ------------------------------------------------------------------------------------------


def attended(x, y, attention, scale):
    """One step of the fusion by torch's own attention, from the projections' weights."""
    q, k, v = x @ attention.query.weight.T, y @ attention.key.weight.T, y @ attention.value.weight.T
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("sides", [(28, 14, 7), (16, 8)])
def test_fusion_is_nested_scaled_dot_product_attention(sides, scaled):
    torch.manual_seed(0)
    channels = (3, 4, 5)[: len(sides)]
    features = [torch.randn(2, c, s, s) for c, s in zip(channels, sides)]
    fusion = Fusion([f.shape for f in features], scaled=scaled)
    fused = features[0].permute(0, 2, 3, 1).reshape(2, -1, 3)
    for attention, later in zip(fusion.attention, features[1:]):
        e = later.shape[1]
        fused = attended(fused, later.permute(0, 2, 3, 1).reshape(2, -1, e), attention, e**-0.5 if scaled else 1.0)
    assert fused.shape == (2, sides[0] ** 2, channels[-1])
    torch.testing.assert_close(fusion(features), fused, rtol=1e-4, atol=1e-5)


def conditional_by_hand(rows, kernel):
    rows = rows.detach().double()
    n = len(rows)
    gaps = {(i, j): number((rows[i] - rows[j]).norm()) for i in range(n) for j in range(n) if i != j}
    middle = sorted(gaps.values())[(len(gaps) - 1) // 2]
    p = torch.zeros(n, n, dtype=torch.float64)
    for i, j in gaps:
        if kernel == "cosine":
            p[j, i] = 0.5 * (1 + number(F.cosine_similarity(rows[i], rows[j], dim=0)))
        else:
            p[j, i] = math.exp(-(gaps[i, j] ** 2) / (2 * middle**2))
    return p / p.sum(1, keepdim=True)


def divergence_by_hand(p, q):
    n = len(p)
    return sum(number(p[j, i] * (p[j, i] / q[j, i]).log()) for j in range(n) for i in range(n) if i != j) / n


@pytest.mark.parametrize("pool", ["flat", "mean"])
@pytest.mark.parametrize("kernel", ["cosine", "rbf"])
@pytest.mark.parametrize("attention", ["scaled", "literal"])
def test_feature_diversity_against_an_independent_implementation(pool, kernel, attention):
    batch = cohort()
    options = {"layers": ["stage2", "stage3"], "pool": pool, "kernel": kernel, "attention": attention}
    helpers(batch, **options)
    p = {}
    for name, output in batch.outputs.items():
        x, y = (output.features[layer].flatten(2).transpose(1, 2) for layer in options["layers"])
        module = batch.modules["feature_diversity", name].attention[0]
        fused = attended(x, y, module, 8**-0.5 if attention == "scaled" else 1.0)
        p[name] = conditional_by_hand(fused.flatten(1) if pool == "flat" else fused.mean(1), kernel)
    by_hand = divergence_by_hand(p["b"], p["a"])
    assert by_hand > 1e-4
    found = value(batch, "feature_diversity", weight=2.0, scale=5.0, **options)
    assert number(batch.notes["a", "feature_diversity.distance"]) == pytest.approx(by_hand, rel=1e-3)
    assert number(found) == pytest.approx(2 * math.log1p(math.exp(-5 * by_hand)), rel=1e-5)
    linear = value(batch, "feature_diversity", form="linear", **options)
    assert number(linear) == pytest.approx(-by_hand, rel=1e-3)


def test_feature_divergence_is_zero_for_equal_features_and_positive_otherwise():
    options = {"layers": ["stage2", "stage3"], "fusion": "shared", "form": "linear"}
    for same in (True, False):
        batch = cohort(kind=Point, same=same)
        helpers(batch, **options)
        found = -number(value(batch, "feature_diversity", **options))
        assert found == pytest.approx(0, abs=1e-7) if same else found > 1e-4


def test_feature_diversity_nests_three_layers_of_a_network():
    batch = cohort()
    helpers(batch, layers=LAYERS)
    p = {}
    for name, output in batch.outputs.items():
        x, y, z = (output.features[layer].flatten(2).transpose(1, 2) for layer in LAYERS)
        first, second = batch.modules["feature_diversity", name].attention
        p[name] = conditional_by_hand(attended(attended(x, y, first, 6**-0.5), z, second, 8**-0.5).flatten(1), "cosine")
    value(batch, "feature_diversity", layers=LAYERS)
    found = number(batch.notes["a", "feature_diversity.distance"])
    assert found == pytest.approx(divergence_by_hand(p["b"], p["a"]), rel=1e-3)


@pytest.mark.parametrize(("distance", "power"), [("l1", 1), ("l2", 2)])
def test_raw_feature_distances_are_means_over_elements_and_layers(distance, power):
    batch = cohort()
    f = [batch.outputs[n].features for n in "ab"]
    by_hand = sum(number(((f[0][k] - f[1][k]).abs() ** power).mean()) for k in ("stage2", "stage3")) / 2
    found = value(batch, "feature_diversity", layers=["stage2", "stage3"], distance=distance, form="linear")
    assert number(found) == pytest.approx(-by_hand, rel=1e-5)


def test_fusion_none_uses_the_features_as_they_are_without_a_helper():
    batch = cohort()
    options = {"layers": ["stage2", "stage3"], "fusion": "none"}
    assert helpers(batch, **options).modules == {}
    rows = {n: torch.cat([o.features[k].flatten(1) for k in options["layers"]], 1) for n, o in batch.outputs.items()}
    by_hand = divergence_by_hand(*(conditional_by_hand(rows[n], "cosine") for n in "ba"))
    found = value(batch, "feature_diversity", form="linear", **options)
    assert number(found) == pytest.approx(-by_hand, rel=1e-3)


def test_per_peer_fusion_joins_each_peers_optimiser_and_differs_between_peers():
    batch = cohort()
    stage = helpers(batch, layers=["stage2", "stage3"])
    modules = [batch.modules["feature_diversity", n] for n in "ab"]
    for name, module in zip("ab", modules):
        held = {id(p) for p in stage.optimizers[name].param_groups[0]["params"]}
        assert {id(p) for p in module.parameters()} <= held
    assert not torch.equal(*(m.attention[0].query.weight for m in modules))


def test_fixed_fusion_has_no_trainable_parameters_and_still_moves_the_backbone():
    batch = cohort()
    options = {"layers": ["stage2", "stage3"], "fusion": "fixed"}
    stage = helpers(batch, **options)
    held = {n: [p for group in o.param_groups for p in group["params"]] for n, o in stage.optimizers.items()}
    plain = {n: sum(p.numel() for p in own) for n, own in held.items()}
    assert plain == {n: sum(p.numel() for p in parameters(batch, n)) for n in "ab"}
    assert not any(p.requires_grad for m in stage.modules.values() for p in m.parameters())
    value(batch, "feature_diversity", **options).backward()
    assert batch.outputs["a"].posterior.mean.grad.any()


def test_shared_fusion_is_one_module_whose_gradient_is_the_average_over_peers():
    batch = cohort()
    options = {"layers": ["stage2", "stage3"], "fusion": "shared"}
    stage = helpers(batch, **options)
    module = batch.modules["feature_diversity", "a"]
    assert module is batch.modules["feature_diversity", "b"]
    assert set(stage.optimizers) == {"a", "b", SHARED}
    values = [value(batch, "feature_diversity", peer, **options) for peer in "ab"]
    own = list(module.parameters())
    each = [torch.autograd.grad(v, own, retain_graph=True) for v in values]
    sum(values).backward()
    stage.average_shared_gradients(2)
    for parameter, one, two in zip(own, *each):
        assert one.any()
        torch.testing.assert_close(parameter.grad, (one + two) / 2, rtol=1e-4, atol=1e-9)


def test_task_fusion_separates_the_two_gradients():
    batch = cohort()
    options = {"layers": ["stage2", "stage3"], "fusion": "task"}
    helpers(batch, **options)
    module, posterior = batch.modules["feature_diversity", "a"], batch.outputs["a"].posterior
    features = [batch.outputs["a"].features[k].detach() for k in options["layers"]]
    task = F.cross_entropy(module.head(module(features).mean(1)), batch.labels)
    expected = torch.autograd.grad(task, list(module.parameters()))
    whole = value(batch, "feature_diversity", **options)
    diversity = value(batch, "feature_diversity", **options | {"fusion": "per_peer"})
    assert number(whole) == pytest.approx(number(diversity) + number(task), rel=1e-5)
    whole.backward()
    for parameter, gradient in zip(module.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)
    backbone = posterior.mean.grad.clone()
    # The backbone's gradient is that of the diversity alone: the weight of the term scales it, the task loss does not.
    batch = cohort()
    helpers(batch, **options)
    value(batch, "feature_diversity", weight=0.0, **options).backward()
    assert not batch.outputs["a"].posterior.mean.grad.any()
    assert backbone.any()


# ---- detached by construction -----------------------------------------------------------------------------------

CASES = [
    *(pytest.param(name, options, id=name) for name, options in ALL.items()),
    *(
        pytest.param("feature_diversity", {"layers": ["stage2", "stage3"], "fusion": f}, id=f"fusion-{f}")
        for f in ("shared", "fixed", "task", "none")
    ),
    *(
        pytest.param("feature_diversity", {"layers": ["stage2"], "distance": d}, id=f"features-{d}")
        for d in ("l1", "l2")
    ),
    *(
        pytest.param("weight_diversity", {"distance": d, "reduction": r}, id=f"weights-{d}-{r}")
        for d, r in itertools.product(("w2", "kl", "symmetric_kl"), ("mean", "relative"))
    ),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_no_term_has_a_gradient_for_another_peer(name, options):
    batch = cohort(3)
    if name == "feature_diversity":
        helpers(batch, **options)
    values = {peer: value(batch, name, peer, **options) for peer in "abc"}
    for owner, other in itertools.permutations("abc", 2):
        theirs = parameters(batch, other)
        module = batch.modules.get(("feature_diversity", other))
        if module is not None and options.get("fusion") != "shared":
            theirs += [p for p in module.parameters() if p.requires_grad]
        found = torch.autograd.grad(values[owner], theirs, retain_graph=True, allow_unused=True)
        assert all(gradient is None for gradient in found)
        own = torch.autograd.grad(values[owner], parameters(batch, owner), retain_graph=True, allow_unused=True)
        assert any(gradient is not None and gradient.any() for gradient in own)


def test_a_users_term_gets_everything_of_others_detached(user_term):
    seen = {}

    @user_term
    def curious(step, peer, *, power: float = 2.0):
        for name in ["a", "b"]:
            seen[peer, name] = [
                step.logits(name),
                step.features(name, "stage2"),
                step.weights(name),
                step.mean(name),
                step.std(name),
                step.kl(name),
                step.kl(name, "layer_mean"),
                step.derived(name, "square", lambda own, name=name: own.logits(name) ** power),
            ]
        return sum(t.sum() for t in seen[peer, "a"] + seen[peer, "b"])

    batch = cohort()
    total = {peer: value(batch, "curious", peer) for peer in "ab"}
    for owner, name in itertools.product("ab", repeat=2):
        assert all(t.requires_grad == (owner == name) for t in seen[owner, name])
    torch.testing.assert_close(seen["a", "b"][-1], batch.outputs["b"].logits.detach() ** 2)
    for owner, other in (("a", "b"), ("b", "a")):
        found = torch.autograd.grad(total[owner], parameters(batch, other), retain_graph=True, allow_unused=True)
        assert all(gradient is None for gradient in found)


def test_the_helper_of_another_peer_is_out_of_reach(user_term):
    @user_term(build=lambda *_: nn.Linear(5, 1))
    def grasping(step, peer):
        return step.module("b")(step.logits(peer)).sum()

    batch = cohort()
    batch.modules = {("grasping", n): nn.Linear(5, 1) for n in "ab"}
    with pytest.raises(InputError, match=r"^peer 'a' asked for the helper of peer 'b'"):
        value(batch, "grasping", "a")
    assert value(batch, "grasping", "b").requires_grad


def test_joint_backward_equals_separate_backward_passes():
    found = []
    for joint in (True, False):
        batch = cohort()
        helpers(batch, layers=["stage2", "stage3"])
        losses = [sum(value(batch, n, peer, **o) for n, o in ALL.items()) for peer in "ab"]
        if joint:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        modules = [p for m in batch.modules.values() for p in m.parameters()]
        found.append([p.grad for p in [*parameters(batch, "a"), *parameters(batch, "b"), *modules]])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_a_peer_alone_has_no_mutual_or_diversity_loss():
    batch = cohort(1)
    helpers(batch, layers=["stage2", "stage3"])
    for name in ("mutual", "weight_diversity", "feature_diversity", "prediction_diversity"):
        assert number(value(batch, name, **ALL[name])) == 0


# ---- a user's own term ------------------------------------------------------------------------------------------


def define_penalty(user_term):
    @user_term
    def confidence_penalty(step, peer, *, weight=0.1):
        """-weight * H[p], averaged over the batch."""
        log_p = step.logits(peer).log_softmax(-1)
        return weight * (log_p.exp() * log_p).sum(-1).mean()


def test_a_users_term_trains_in_a_recipe_and_is_logged(user_term):
    define_penalty(user_term)
    entropy = {}
    for weight in (0.0, 5.0):
        torch.manual_seed(0)
        lines, peer = [], Point(Tiny())
        data = image_data(20, (1, 8, 8), 5)
        terms_given = {"likelihood": {}, "confidence_penalty": {"weight": weight}}
        stages = [{"epochs": 20, "optimizer": {"lr": 0.02}, "terms": terms_given}]
        Learner(small_recipe({"likelihood": {}}, stages=stages), {"a": peer}, data, 0, log=lines.append).run()
        assert len(lines) == 20
        assert set(lines[-1]["peers"]["a"]["terms"]) == {"likelihood", "confidence_penalty"}
        assert set(lines[-1]["peers"]["a"]["gradient_share"]) == {"likelihood", "confidence_penalty"}
        log_p = peer(data.train.images).log_softmax(-1)
        entropy[weight] = number(-(log_p.exp() * log_p).sum(-1).mean())
    assert entropy[5.0] > max(entropy[0.0] + 0.1, 0.9 * math.log(5))


def test_a_users_options_are_validated(user_term):
    define_penalty(user_term)
    with pytest.raises(InputError, match=r"has no key 'wieght'; did you mean 'weight'\?"):
        small_recipe({"confidence_penalty": {"wieght": 1.0}})
    with pytest.raises(InputError, match=r"weight: input should be a valid number, got 'much'"):
        small_recipe({"confidence_penalty": {"weight": "much"}})
    with pytest.raises(InputError, match=r"no term 'confidence_penaltie'; did you mean 'confidence_penalty'\?"):
        small_recipe({"confidence_penaltie": {}})


@pytest.mark.parametrize(
    ("made", "said"), [(lambda z: z, r"shape \(4, 5\)"), (lambda _: 0.0, "float"), (lambda _: None, "NoneType")]
)
def test_a_term_that_returns_no_scalar_is_one_clear_error(user_term, made, said):
    @user_term
    def broken(step, peer):
        return made(step.logits(peer))

    with pytest.raises(InputError, match=rf"^stages\.0\.terms\.broken: returned {said}, expected a scalar"):
        Learner(small_recipe({"broken": {}}), {"a": Point(Tiny())}, image_data(20, (1, 8, 8), 5), 0)


class Wide(Tiny):
    def __init__(self):
        super().__init__()
        self.stage3, self.linear = nn.Conv2d(6, 9, 3, 2, 1), nn.Linear(9, 5)


FAULTS = {
    "shape": ({"weight_diversity": {}}, r"weight_diversity: needs peers of equal shape, but 'stage3\.weight' is \(8,"),
    "layer": (
        {"feature_diversity": {"layers": ["stage1", "stag2"]}},
        r"feature_diversity\.layers: Tiny has no layer 'stag2'; did you mean 'stage2'\?$",
    ),
    "helper": (
        {"feature_diversity": {"layers": ["stage1"]}},
        "feature_diversity: feature fusion needs at least 2 layers, got 1$",
    ),
    "features": (
        {"feature_diversity": {"layers": ["stage3"], "distance": "l2"}},
        r"feature_diversity\.distance: 'l2' needs features of equal shape, but 'stage3' is \(4, 8, 2, 2\) in 'a' and ",
    ),
    "graph": (
        {"mutual": {"graph": [{"teacher": "a", "student": "c"}]}},
        r"mutual\.graph: student 'c' is not a peer; known: a, b$",
    ),
    "teachers": ({"distil": {}}, r"distil: needs teachers, but the recipe has none; add a \[teachers\] table$"),
}


@pytest.mark.parametrize(("given", "sentence"), FAULTS.values(), ids=FAULTS)
def test_whatever_a_term_refuses_is_told_with_its_full_key(given, sentence):
    stages = [{"epochs": 1, "terms": {"likelihood": {}} | more} for more in ({}, given)]
    peers = {"a": Point(Tiny()), "b": Point(Wide())}
    with pytest.raises(InputError, match=rf"^stages\.1\.terms\.{sentence}"):
        Learner(small_recipe({}, stages=stages), peers, image_data(20, (1, 8, 8), 5), 0)


@pytest.mark.parametrize("update", ["simultaneous", "sequential"])
def test_a_term_that_refuses_a_later_step_is_told_with_its_full_key_too(user_term, update):
    @user_term
    def picky(step, peer):
        if step.epoch > 0:
            raise InputError("wants the first step alone")
        return step.logits(peer).sum()

    recipe = small_recipe({"picky": {}}, update=update, gradient_share_every=0)
    learner = Learner(recipe, {"a": Point(Tiny())}, image_data(20, (1, 8, 8), 5), 0, engine="eager")
    with pytest.raises(InputError, match=r"^stages\.0\.terms\.picky: wants the first step alone$"):
        learner.run()
