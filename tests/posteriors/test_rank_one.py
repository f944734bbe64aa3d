"""Members that differ by two factors a layer: all in one pass, one by one, and averaged, are the same networks."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from members import Every, close, every, images
from peerbayes.errors import InputError
from peerbayes.math.noise import Address, normal
from peerbayes.networks import Inputs
from peerbayes.networks.wide_resnet import WideResNet
from peerbayes.posteriors import MeanField, Posterior, RankOne

HERE = Address(seed=3, owner="peer-1", stream="draw", number=0)


def member_losses(posterior, x, labels, noise=None):
    logits, _ = posterior.forward_members(x, noise)
    return torch.stack([F.cross_entropy(part, labels) for part in logits])


# ---- all members in one pass --------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_with_factors_at_one_all_members_are_the_network_exactly(train):
    network = every().to(memory_format=torch.channels_last).train(train)  # the order that flat weights lie in
    posterior = RankOne(network, 3).train(train)
    for number in range(2):
        x = images(seed=number).contiguous(memory_format=torch.channels_last)
        logits, _ = posterior.forward_members(x)
        assert torch.equal(logits.flatten(0, 1), network(torch.cat([x, x, x])))
    for name, buffer in network.named_buffers():
        assert torch.equal(posterior.network.get_buffer(name), buffer)
    assert network.norm.num_batches_tracked == (5 if train else 3)


def test_with_factors_at_one_every_draw_and_the_centre_are_the_shared_weights():
    posterior = RankOne(every(), 3)
    assert torch.equal(posterior.centre().flat, posterior.mean)
    assert torch.equal(posterior.draw(HERE.at(7)).flat, posterior.mean)
    assert (posterior.std == 0).all()


class ByKeyword(nn.Module):
    """Layers that are handed their inputs, and more, by name."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.head = nn.Conv2d(2, 4, 3, 2), nn.ConvTranspose2d(4, 3, 2, 2), nn.Linear(3, 3)

    def forward(self, x):
        x = self.up(torch.tanh(self.down(input=x)), output_size=(5, 5))
        return self.head(input=x.mean((2, 3)))


def test_layers_may_be_called_by_keyword():
    posterior = RankOne(ByKeyword(), 3, factors="random").eval()
    with torch.no_grad():
        logits, _ = posterior.forward_members(images())
        for number, own in enumerate(logits):
            plain = posterior.materialise(number)
            assert not any(m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in plain.modules())
            close(own, plain(images()))


@pytest.mark.parametrize("factors", ["random", "signs"])
def test_all_members_in_one_pass_are_the_members_one_by_one(factors):
    posterior = RankOne(every(), 4, factors=factors).eval()
    x = images()
    with torch.no_grad():
        logits, found = posterior.forward_members(x, layers=["grouped", "up", "second"])
        assert logits.shape == (4, 5, 3)
        for number in range(4):
            plain = posterior.materialise(number)
            close(logits[number], plain(x))
            close(logits[number], posterior(x, posterior.draw(HERE.at(number + 8))))
            _, own = posterior.forward_features(x, posterior.member(number), ["grouped", "up", "second"])
            close(found["grouped"][number], own["grouped"])
            close(found["up"][number], own["up"])
            close(found["second"][number], own["second"])
        spread = (logits - logits.mean(0)).abs().amax((1, 2))
    assert (spread > 0.01).all()


def test_the_bias_is_shared_and_added_after_the_factor():
    layer = nn.Linear(3, 2)
    posterior = RankOne(layer, 2, factors="random")
    pieces = posterior._pieces(1 + posterior.deviations.detach())
    x = torch.randn(4, 3)
    with torch.no_grad():
        logits, _ = posterior.forward_members(x)
        for m in range(2):
            close(logits[m], pieces["s"][m] * ((pieces["r"][m] * x) @ layer.weight.T) + layer.bias)


def test_batch_norm_sees_the_joint_batch():
    posterior = RankOne(nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, momentum=1.0)), 3, factors="random")
    x = images()
    members = torch.cat([posterior.materialise(m)[0](x) for m in range(3)])
    posterior.train().forward_members(x)
    norm = posterior.network[1]
    torch.testing.assert_close(norm.running_mean, members.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, members.transpose(0, 1).flatten(1).var(1))
    assert norm.num_batches_tracked == 1


def test_what_the_loop_takes_has_the_rows_of_member_0_first():
    posterior = RankOne(every(), 3, factors="random").eval()
    logits, found = posterior.forward_members(images(), layers=["line"])
    flat, std, factors = posterior.training_weights(None)
    rows, features = posterior.training_pass(images(), flat, factors, ["line"])
    assert torch.equal(rows, torch.cat(list(logits)))
    assert torch.equal(features[0], torch.cat(list(found["line"])))
    assert flat is posterior.mean
    assert std is None


def test_activations_stay_in_channels_last_order():
    posterior, seen = RankOne(nn.Conv2d(2, 4, 3), 3, factors="random"), []
    posterior.network.register_forward_hook(lambda _m, args, out: seen.extend([args[0], out]))
    posterior.forward_members(images())
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)


def test_half_precision_rounds_products_and_not_factors():
    posterior = RankOne(nn.Linear(1, 1, bias=False), 2)
    with torch.no_grad():
        posterior.mean.fill_(1.0)
        posterior.deviations.fill_(0.003)  # 1.003 is 1 in bfloat16, but 1.75 · 1.003 is not 1.75
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = posterior.forward_members(torch.tensor([[1.75]]))
    assert logits.dtype == torch.bfloat16
    assert (logits.float() == 1.765625).all()  # two steps of 1/128 above; 1.7605 without rounding


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [True, False])
def test_factors_get_the_gradient_of_their_own_member_and_weights_that_of_the_mean(scaled):
    posterior = RankOne(every(), 3, factors="random", scale_gradients=scaled).eval()
    x, labels = images(), torch.tensor([0, 1, 2, 0, 1])
    member_losses(posterior, x, labels).mean().backward()
    shared, rest = torch.zeros_like(posterior.mean), torch.zeros_like(posterior.rest)
    for m in range(3):
        # ℓ_m alone, by way of plain weights.
        loss = F.cross_entropy(posterior(x, posterior.member(m)), labels)
        grads = torch.autograd.grad(loss, [posterior.deviations, posterior.mean, posterior.rest])
        own = grads[0] if scaled else grads[0] / 3
        torch.testing.assert_close(posterior.deviations.grad[m], own[m], rtol=1e-4, atol=1e-7)
        assert own[m].abs().max() > 1e-4
        shared, rest = shared + grads[1] / 3, rest + grads[2] / 3
    torch.testing.assert_close(posterior.mean.grad, shared, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(posterior.rest.grad, rest, rtol=1e-4, atol=1e-7)


def test_gaussian_factors_get_the_gradients_of_their_own_draw():
    posterior = RankOne(every(), 3, factors="random", gaussian=True).eval()
    x, labels = images(), torch.tensor([0, 1, 2, 0, 1])
    member_losses(posterior, x, labels, normal(HERE.at(1), posterior.noise_size)).mean().backward()
    loss = F.cross_entropy(posterior(x, posterior.draw(HERE.at(1))), labels)  # of member 1
    for leaf in (posterior.deviations, posterior.rho):
        (own,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
        torch.testing.assert_close(leaf.grad[1], own[1], rtol=1e-4, atol=1e-7)
        assert own[1].abs().max() > 1e-6


def test_weight_decay_pulls_the_factors_to_one():
    posterior = RankOne(every(), 2, factors="random")
    optimizer = torch.optim.SGD([posterior.deviations], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.5)
    start = 1 + posterior.deviations.detach()
    # The same with the factors themselves and λ (r − 1) inside the gradient.
    r, velocity = start.clone(), torch.zeros_like(start)
    for _ in range(10):
        optimizer.zero_grad()
        (0 * posterior.forward_members(images())[0].sum()).backward()
        optimizer.step()
        decay = 0.5 * (r - 1)
        velocity = 0.9 * velocity + decay
        r = r - 0.1 * (decay + 0.9 * velocity)
    torch.testing.assert_close(1 + posterior.deviations.detach(), r)
    assert (r - 1).norm() < 0.5 * (start - 1).norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the tracer of torch 2.11
def test_compiled_whole_it_gives_the_same_outputs_gradients_and_statistics():
    torch._dynamo.reset()
    plain = RankOne(every(), 3, factors="random", gaussian=True).train()
    other = copy.deepcopy(plain)

    def loss(posterior, x, noise):
        flat, _, factors = posterior.training_weights(noise)
        return posterior.training_pass(x, flat, factors)[0].square().mean() + posterior.kl() / 1000

    noise = normal(HERE, plain.noise_size)
    loss(plain, images(), noise).backward()
    torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)(other, images(), noise).backward()
    for mine, theirs in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad)
    for mine, theirs in zip(plain.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(theirs, mine)


# ---- averages -----------------------------------------------------------------------------------------------------


def test_the_exact_merge_of_a_layer_is_the_mean_of_the_members():
    posterior = RankOne(every(), 4, factors="random")
    members = [posterior.materialise(m).state_dict() for m in range(4)]
    merged = posterior.average("exact").state_dict()
    for name, tensor in merged.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack([m[name] for m in members]).mean(0))
    assert (members[0]["up.weight"] - members[1]["up.weight"]).abs().max() > 0.01


def test_the_factor_mean_merge_is_the_product_of_means():
    layer = nn.Linear(5, 3)
    posterior = RankOne(layer, 4, factors="random")
    pieces = posterior._pieces(1 + posterior.deviations.detach())
    r, s = pieces["r"], pieces["s"]
    mean = posterior.average("factor_mean").weight.detach()
    torch.testing.assert_close(mean, layer.weight.detach() * torch.outer(s.mean(0), r.mean(0)))
    # What sets the two apart is the covariance of the factors.
    covariance = (s - s.mean(0)).T @ (r - r.mean(0)) / 4
    exact = posterior.average().weight.detach()
    torch.testing.assert_close(exact - mean, layer.weight.detach() * covariance)


def test_of_one_member_both_merges_are_the_member():
    posterior = RankOne(every(), 1, factors="random").eval()
    x = images()
    with torch.no_grad():
        for merge in ("exact", "factor_mean"):
            plain = posterior.average(merge)
            assert torch.equal(plain.grouped.weight, posterior.materialise(0).grouped.weight)
            close(plain(x), posterior.forward_members(x)[0][0])


@pytest.mark.parametrize("merge", ["exact", "factor_mean"])
def test_members_that_coincide_are_their_average_and_its_keys_are_the_networks(merge):
    network = every()
    posterior = RankOne(network, 3, factors="random").eval()
    with torch.no_grad():
        posterior.deviations.copy_(posterior.deviations[:1].expand(3, -1))
        plain = posterior.average(merge)
        close(plain(images()), posterior.forward_members(images())[0][2])
        close(posterior(images()), plain(images()))
    assert type(plain) is Every
    assert list(plain.state_dict()) == list(network.state_dict())
    fresh = Every().eval()
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(fresh(images()), plain(images()))
    assert plain.first.weight is plain.second.weight
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    assert not any(name.startswith("factor") for m in plain.modules() for name in m._parameters)
    assert not plain.second.bias.requires_grad


def test_a_wide_resnet_is_merged_and_predicted_with():
    torch.manual_seed(0)
    network = WideResNet(Inputs(4, (3, 8, 8), (0.5,) * 3, (0.2,) * 3), depth=10, width=1).eval()
    posterior = RankOne(network, 2, factors="random", spread=0.1).eval()
    x = torch.rand(3, 3, 8, 8)
    with torch.no_grad():
        logits, _ = posterior.forward_members(x)
        for m in range(2):
            close(logits[m], posterior.materialise(m)(x), 1e-4)
    close(posterior.predict(x).probabilities, logits.softmax(-1).mean(0), 1e-4)
    assert list(posterior.average().state_dict()) == list(network.state_dict())


# ---- Gaussian factors, draws, predictions -------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [True, False])
def test_kl_is_that_of_torch_distributions_in_the_mean_over_members(scaled):
    posterior = RankOne(every(), 3, factors="random", gaussian=True, prior_std=0.3, scale_gradients=scaled)
    mean, rho = (p.detach().clone().requires_grad_() for p in (posterior.deviations, posterior.rho))
    wanted = kl_divergence(Normal(1 + mean, F.softplus(rho)), Normal(1.0, 0.3))
    torch.testing.assert_close(posterior.kl(), wanted.sum() / 3)
    by_layer = sum(part.mean() for part in wanted.split(posterior.factor_layout.sizes, 1))
    torch.testing.assert_close(posterior.kl("layer_mean"), by_layer)
    posterior.kl().backward()
    (wanted.sum() if scaled else wanted.sum() / 3).backward()
    torch.testing.assert_close(posterior.deviations.grad, mean.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(posterior.rho.grad, rho.grad, rtol=1e-4, atol=1e-5)


def test_kl_of_points_is_zero_and_so_is_that_of_the_prior_itself():
    points = RankOne(every(), 3, factors="random")
    assert points.noise_size == 0
    assert points.kl().item() == points.kl("layer_mean").item() == 0
    prior = RankOne(every(), 3, gaussian=True, prior_std=0.2, rho=math.log(math.expm1(0.2)))
    assert prior.kl().item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("gaussian", [True, False])
def test_draws_have_the_stated_mean_and_variance(gaussian):
    torch.manual_seed(0)
    posterior = RankOne(nn.Conv2d(4, 6, 2, groups=2), 2, factors="random", gaussian=gaussian, rho=-1.5)
    count = 4000 if gaussian else 2
    with torch.no_grad():
        drawn = torch.stack([posterior.draw(HERE.at(number)).flat for number in range(count)]).double()
        centre, variance = posterior.centre().flat.double(), posterior.std.double() ** 2
    deviation = drawn - centre
    assert (posterior.std >= 0).all()
    if not gaussian:
        torch.testing.assert_close(deviation.square().mean(0), variance, rtol=1e-5, atol=1e-12)
        assert deviation.mean(0).abs().max() < 1e-6
        return
    assert (deviation.mean(0) ** 2 <= 25 * variance / count).all()
    fourth = (deviation**4).mean(0)
    error = ((fourth - variance**2).clamp_min(0) / count).sqrt()
    assert ((deviation.square().mean(0) - variance).abs() <= 5 * error + 1e-12).all()
    bias = posterior.layout.views(posterior.std)["bias"]
    assert (bias == 0).all()


def test_a_draw_of_gaussian_factors_is_what_one_pass_makes_of_the_same_noise():
    posterior = RankOne(every(), 3, factors="random", gaussian=True, rho=-1.0).eval()
    for number in (0, 4, torch.tensor(8)):
        with torch.no_grad():
            logits, _ = posterior.forward_members(images(), normal(HERE.at(number), posterior.noise_size))
            close(posterior(images(), posterior.draw(HERE.at(number))), logits[int(number) % 3])
    first = posterior.draw(HERE).flat
    assert torch.equal(first, posterior.draw(HERE.at(torch.tensor(0))).flat)
    assert not torch.equal(first, posterior.draw(HERE.at(3)).flat)
    assert not torch.equal(first, posterior.draw(Address(4, "peer-1", "draw", 0)).flat)


def test_the_centre_of_given_noise_is_the_mean_over_its_members():
    posterior = RankOne(every(), 2, gaussian=True)
    noise = normal(HERE, posterior.noise_size)
    one, two = (posterior._averaged(d[None]) for d in posterior._deviations(noise, posterior.deviations, posterior.rho))
    torch.testing.assert_close(posterior.place(noise)[0], (one + two) / 2)
    assert torch.equal(posterior.place(None)[0], posterior.centre().flat)


def test_a_prediction_averages_every_member_once():
    posterior = RankOne(every(), 3, factors="random")
    x = images()
    with torch.no_grad():
        members = torch.stack([posterior.materialise(m).eval()(x) for m in range(3)]).softmax(-1)
    for draws in (None, 3, 50):
        found = posterior.predict(x, draws)
        close(found.probabilities, members.mean(0))
        assert (found.draws == 3).all()
    close(posterior.predict(x, 2).probabilities, members[:2].mean(0))
    assert torch.equal(found.replay(1).flat, posterior.member(1).flat)
    assert (found.disagreement > 0).all()
    assert (RankOne(every(), 3, gaussian=True).predict(x, 7).draws == 7).all()


def test_one_pass_of_the_average_where_that_is_what_it_predicts():
    posterior = RankOne(every(), 3, factors="random", predicts="average").eval()
    found = posterior.predict(images(), 50)
    with torch.no_grad():
        expected = posterior.average()(images()).log_softmax(-1)
    close(found.log_probabilities, expected)
    assert found.draws.eq(1).all()
    assert posterior.predict(images()).draws.eq(1).all()
    assert found.disagreement.abs().max() < 1e-5  # one network never disagrees with itself
    members = RankOne(every(), 3, factors="random").predict(images())
    assert not torch.allclose(found.log_probabilities, members.log_probabilities)


def test_a_member_can_be_picked_by_a_tensor():
    posterior = RankOne(every(), 3, factors="random")
    for number in range(3):
        assert torch.equal(posterior.member(torch.tensor(number)).flat, posterior.member(number).flat)


# ---- where it comes from and goes to ------------------------------------------------------------------------------


def test_initial_factors_are_as_asked_and_differ_by_member_seed_and_name():
    network = nn.Linear(300, 200)
    random = RankOne(network, 4, factors="random", spread=0.5).deviations.detach()
    assert random.mean().abs() < 5 * 0.5 / math.sqrt(random.numel())
    assert abs(random.std().item() / 0.5 - 1) < 5 / math.sqrt(2 * random.numel())
    assert torch.corrcoef(random).fill_diagonal_(0).abs().max() < 5 / math.sqrt(500)
    signs = 1 + RankOne(network, 4, factors="signs").deviations.detach()
    assert (signs.abs() == 1).all()
    assert signs.mean().abs() < 5 / math.sqrt(signs.numel())
    assert torch.equal(random, RankOne(network, 4, factors="random").deviations)
    assert not torch.equal(random, RankOne(network, 4, factors="random", seed=1).deviations)
    assert not torch.equal(random, RankOne(network, 4, factors="random", name="other").deviations)


@pytest.mark.parametrize("gaussian", [True, False])
def test_a_saved_posterior_comes_back_to_the_last_bit(gaussian, tmp_path):
    posterior = RankOne(
        every(), 3, factors="random", gaussian=gaussian, prior_std=0.7, scale_gradients=False, seed=9, name="me"
    )
    posterior.train().forward_members(images())
    if gaussian:
        nn.init.normal_(posterior.rho, -2.0)
    posterior.save(tmp_path / "p.safetensors")
    loaded = Posterior.load(tmp_path / "p.safetensors", every(1))
    assert type(loaded) is RankOne
    state = posterior.state()
    assert {"mean/up.weight", "factor/up.r", "factor/up.s", "rest/gain", "network/norm.running_var"} <= set(state)
    assert state["factor/up.r"].shape == (3, 4)
    assert {n: t.shape for n, t in loaded.state().items()} == {n: t.shape for n, t in state.items()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state().items())
    assert (loaded.prior_std, loaded.scale_gradients, loaded.seed, loaded.name) == (0.7, False, 9, "me")
    assert torch.equal(loaded.draw(HERE.at(2)).flat, posterior.draw(HERE.at(2)).flat)
    with pytest.raises(InputError, match=r"factor/stem\.0\.r"):
        RankOne(every(), 2, gaussian=gaussian).load_state(state)


def test_a_copy_stands_alone():
    posterior = RankOne(every(), 2, factors="random").eval()
    other = copy.deepcopy(posterior)
    with torch.no_grad():
        before, _ = posterior.forward_members(images())
        other.deviations.zero_()
        after, _ = other.forward_members(images())
        assert torch.equal(posterior.forward_members(images())[0], before)
        close(after[0], after[1], 1e-6)


def test_it_starts_from_a_trained_network_and_leaves_the_given_one_alone():
    trained, network = every(1), every(0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    posterior = RankOne(network, 2, start_from=trained).eval()
    with torch.no_grad():
        close(posterior.forward_members(images())[0][1], trained(images()))
    posterior.train().forward_members(images())[0].sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    assert MeanField(network, start_from=posterior).layout.shapes == posterior.layout.shapes


def test_all_tensors_follow_the_network_to_its_device():
    posterior = RankOne(every().to("meta"), 2, factors="signs", gaussian=True)
    tensors = [*posterior.parameters(), *posterior.buffers(), posterior.draw(HERE).flat, posterior.std]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "members is 0"),
        ({"factors": "zeros"}, "factors is 'zeros'"),
        ({"predicts": "mean"}, "predicts is 'mean', expected 'average' or 'members'"),
        ({"spread": -1.0}, "spread is -1.0"),
        ({"prior_std": 0.0}, "prior_std is 0.0"),
    ],
)
def test_wrong_options_are_one_clear_error(options, message):
    with pytest.raises(InputError, match=message):
        RankOne(nn.Linear(2, 2), **options)


def test_wrong_members_and_merges_are_one_clear_error():
    posterior = RankOne(nn.Linear(2, 2), 3)
    with pytest.raises(InputError, match="no member 3: expected 0 to 2"):
        posterior.materialise(3)
    with pytest.raises(InputError, match="merge is 'median'"):
        posterior.average("median")


def test_no_class_is_settled_before_all_members_have_spoken():
    # The first nine of twenty say one class, the others the other: in their order they are no sample of all.
    posterior = RankOne(nn.Linear(2, 2, bias=False), 20)
    with torch.no_grad():
        posterior.mean.copy_(6 * torch.eye(2).flatten())
        for number, own in enumerate(posterior.deviations):
            views = posterior.factor_layout.views(own)
            views["r"].copy_(torch.tensor([0.0, -1.0] if number < 9 else [-1.0, 0.0]))
    for settle in (0.05, 0.4):
        found = posterior.predict(torch.ones(3, 2), settle=settle)
        assert (found.probabilities.argmax(-1) == 1).all()
        assert (found.draws == 20).all()
