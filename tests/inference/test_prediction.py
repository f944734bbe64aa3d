"""Predictions against averages by hand, and settled classes against exactly known ones."""

import gc
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from scipy import special, stats
from torch import nn

from peerbayes import networks
from peerbayes.data import ArraySplit
from peerbayes.errors import InputError, PeerbayesWarning
from peerbayes.inference import prediction
from peerbayes.inference import progress as watching
from peerbayes.inference.early_stopping import Referee
from peerbayes.math.noise import Address
from peerbayes.posteriors import MeanField, Point


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(16, 3)

    def forward(self, x):
        return self.linear(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


def posterior(rho=-0.5, **options):
    torch.manual_seed(0)
    return MeanField(Net(), rho=rho, **options)


def images(count=7):
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def table(means, rho):
    """A posterior whose image i (a one-hot row) has independent Gaussian logits with means[i] in every draw."""
    network = nn.Linear(len(means), means.shape[1], bias=False)
    found = MeanField(network)
    with torch.no_grad():
        found.layout.views(found.mean)["weight"].copy_(means.T)
        found.rho.fill_(rho)
    return found, torch.eye(len(means))


class Pick(nn.Module):
    """Logits by image number: the table without a product with one-hot rows."""

    def __init__(self, means):
        super().__init__()
        self.means = nn.Parameter(means)

    def forward(self, number):
        return self.means[number]


def numbered(means, rho):
    found = MeanField(Pick(means), bayesian=lambda _name, _module: True)
    with torch.no_grad():
        found.rho.fill_(rho)
    return found, torch.arange(len(means))


def draws_by_hand(found, x, count, seed=0, name="peer"):
    """Log-probabilities (S, N, C) in double precision from the addresses that the documentation states."""
    found.eval()
    with torch.no_grad():
        logits = [found(x, found.draw(Address(seed, name, "draw", number))) for number in range(count)]
    return torch.stack(logits).double().log_softmax(-1)


# ---- the average --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["gaussian", "radial"])
def test_probabilities_are_averaged_over_the_stated_addresses(noise):
    found = posterior(rho=2.0, noise=noise)
    by_hand = draws_by_hand(found, images(), 6, seed=5, name="left")
    p = found.predict(images(), draws=6, seed=5, name="left")
    torch.testing.assert_close(p.probabilities.double(), by_hand.exp().mean(0), rtol=1e-5, atol=1e-7)
    of_logits = by_hand.mean(0).softmax(-1)
    assert (p.probabilities - of_logits).abs().max() > 0.01
    assert torch.equal(p.classes, by_hand.exp().mean(0).argmax(-1))
    assert p.draws.tolist() == [6] * 7


def test_other_seeds_and_names_are_other_draws():
    found = posterior()
    p = [found.predict(images(), 3, **o).probabilities for o in ({}, {"seed": 1}, {"name": "other"})]
    assert torch.equal(p[0], found.predict(images(), 3).probabilities)
    assert not torch.allclose(p[0], p[1])
    assert not torch.allclose(p[0], p[2])


def test_the_average_is_exact_at_extreme_logits():
    means = torch.tensor([[3e4, 0.0, -3e4], [0.0, 1e4, 1e4], [-200.0, 0.0, 100.0]])
    found, x = table(means, rho=50.0)
    by_hand = special.logsumexp(draws_by_hand(found, x, 8).numpy(), axis=0) - math.log(8)
    p = found.predict(x, draws=8)
    assert p.log_probabilities.isfinite().all()
    assert p.log_probabilities.min() < -1e4
    torch.testing.assert_close(p.log_probabilities.double(), torch.from_numpy(by_hand), rtol=1e-5, atol=1e-5)
    assert (p.entropy >= 0).all()
    assert p.disagreement.isfinite().all()


def test_entropies_agree_with_scipy():
    found = posterior(rho=1.0)
    by_hand = draws_by_hand(found, images(), 9).exp().numpy()
    p = found.predict(images(), draws=9)
    total = stats.entropy(by_hand.mean(0), axis=-1)
    expected = stats.entropy(by_hand, axis=-1).mean(0)
    assert p.entropy.numpy() == pytest.approx(total, rel=1e-4)
    assert p.expected_entropy.numpy() == pytest.approx(expected, rel=1e-4)
    assert p.disagreement.numpy() == pytest.approx(total - expected, abs=1e-5)
    assert p.disagreement.min() > 0.01


def test_identical_draws_do_not_disagree():
    for found in (Point(Net()), posterior(rho=-60.0)):
        p = found.predict(images(), draws=20)
        assert (p.disagreement >= 0).all()
        assert p.disagreement.max() < 1e-5
        assert p.entropy.min() > 0.1


def test_a_point_needs_one_draw():
    found = Point(Net())
    p = found.predict(images(), draws=20)
    assert p.draws.tolist() == [1] * 7
    torch.testing.assert_close(p.log_probabilities, found.eval()(images()).log_softmax(-1).detach())


def test_the_average_is_no_worse_than_the_draws_on_average():
    found = posterior(rho=1.0)
    by_hand = draws_by_hand(found, images(), 9)
    p = found.predict(images(), draws=9)
    for label in range(3):
        assert (-p.log_probabilities[:, label] < -by_hand[:, :, label].mean(0)).all()


# ---- what the result does not depend on ---------------------------------------------------------------------------


def test_batch_size_order_and_company_do_not_matter():
    found, x = posterior(), images(11)
    whole = found.predict(x, draws=4)
    for batch_size in (1, 2, 5, 11, 100):
        part = found.predict(x, draws=4, batch_size=batch_size)
        torch.testing.assert_close(part.log_probabilities, whole.log_probabilities, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(part.expected_entropy, whole.expected_entropy, rtol=1e-5, atol=1e-6)
    order = torch.tensor([7, 3, 10, 0])
    part = found.predict(x[order], draws=4)
    torch.testing.assert_close(part.log_probabilities, whole.log_probabilities[order], rtol=1e-5, atol=1e-6)


def test_bytes_and_fractions_agree():
    found = posterior()
    raw = torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8)
    a, b = found.predict(raw, draws=3), found.predict(raw.float() / 255, draws=3)
    torch.testing.assert_close(a.log_probabilities, b.log_probabilities, rtol=0, atol=1e-6)
    assert a.disagreement.min() > 0


@pytest.mark.parametrize("state", ["train", "eval", "mixed"])
def test_modes_statistics_and_gradients_are_untouched(state):
    found = posterior().train(state == "train")
    if state == "mixed":
        found.train()
        found.network.norm.eval()
    modes = [module.training for module in found.modules()]
    buffers = {name: tensor.clone() for name, tensor in found.named_buffers()}
    reference = posterior().eval().predict(images(), draws=3)
    p = found.predict(images(), draws=3)
    assert torch.equal(p.log_probabilities, reference.log_probabilities)
    assert [module.training for module in found.modules()] == modes
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in found.named_buffers())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in found.parameters())


def test_a_network_given_in_evaluation_mode_stays_in_it():
    torch.manual_seed(0)
    found = MeanField(Net().eval())
    found.predict(images(), draws=2)
    assert not any(module.training for module in found.network.modules())


def test_modes_are_restored_after_a_failure():
    found = posterior().train()
    with pytest.raises(RuntimeError):
        found.predict(torch.rand(2, 3, 4, 4), draws=1)
    assert all(module.training for module in found.modules())


def test_predictions_can_be_used_in_later_gradients():
    p = posterior().predict(images(), draws=2)
    temperature = torch.ones((), requires_grad=True)
    (p.log_probabilities / temperature).log_softmax(-1)[:, 0].sum().backward()
    assert temperature.grad.isfinite()


def live_bytes():
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))


def test_memory_does_not_grow_with_the_number_of_draws(monkeypatch):
    found, x = posterior(), images(200)
    monkeypatch.setitem(prediction.TOGETHER, "cpu", 0)  # one draw after another
    original, seen = found.draw, {}

    def watched(address):
        if address.number in (3, 63):
            seen[address.number] = live_bytes()
        return original(address)

    monkeypatch.setattr(found, "draw", watched)
    base = live_bytes()
    found.predict(x, draws=64)
    assert base < seen[3]
    assert seen[63] <= seen[3]


# ---- replay -------------------------------------------------------------------------------------------------------


def test_replay_gives_the_weights_of_a_draw_again():
    found = posterior()
    p = found.predict(images(), draws=4, seed=9, name="left")
    assert p.address == Address(9, "left", "draw")
    by_hand = []
    for number in range(4):
        weights = p.replay(number)
        again = found.draw(Address(9, "left", "draw", number))
        assert all(torch.equal(weights[name], again[name]) for name in again)
        with torch.no_grad():
            by_hand.append(found.eval()(images(), weights).softmax(-1))
    torch.testing.assert_close(torch.stack(by_hand).mean(0), p.probabilities)
    assert not torch.equal(by_hand[0], by_hand[1])


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (3, {"draws": 0}, "draws is 0"),
        (3, {"draws": 2.5}, "draws is 2.5, expected a whole number of at least 1"),
        (3, {"draws": "a"}, "draws is 'a', expected a whole number"),
        (3, {"batch_size": 1.5}, "batch_size is 1.5, expected a whole number"),
        (0, {}, "no images"),
        (3, {"settle": 0.0}, "settle is 0.0"),
        (3, {"settle": 1.0}, "settle is 1.0"),
        (3, {"settle": math.nan}, "settle is nan"),
        (3, {"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_impossible_requests_are_one_clear_error(count, options, message):
    with pytest.raises(InputError, match=message):
        posterior().predict(images(count), **options)


@pytest.mark.parametrize("draw", ["a", 1.5, 4, -1])
def test_draws_that_were_not_made_can_not_be_replayed(draw):
    with pytest.raises(InputError, match=f"there is no draw {draw}: .* draws 0 to 3"):
        posterior().predict(images(), draws=4).replay(draw)


# ---- images that are none -------------------------------------------------------------------------------------------


def test_images_with_holes_are_refused():
    found = images()
    found[1, 0, 2] = math.nan
    with pytest.raises(InputError, match=r"images hold values that are not a number \(NaN\), expected uint8"):
        posterior().predict(found, draws=1)


@pytest.mark.parametrize("known", [False, True])
def test_images_of_another_shape_than_the_network_has_learnt_are_one_sentence(known):
    found, colour = posterior(), torch.rand(2, 3, 4, 4)
    if not known:
        with pytest.raises(RuntimeError):
            found.predict(colour, draws=1)
        return
    found.input_shape = (1, 4, 4)
    words = r"^the network can't take images of shape \(3, 4, 4\), it was trained on shape \(1, 4, 4\): .+$"
    with pytest.raises(InputError, match=words):
        found.predict(colour, draws=1)
    with pytest.raises(InputError, match=r"images have shape \(1, 4, 4\), expected \(N, 1, 4, 4\)"):
        found.predict(images(1)[0], draws=1)
    assert found.predict(images(2), 1).classes.shape == (2,)


def test_a_network_may_take_images_that_it_has_not_learnt():
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = Point(network)
    found.input_shape = (1, 4, 4)
    large = torch.rand(2, 1, 9, 9)
    torch.testing.assert_close(found.predict(large).probabilities, network(large).softmax(-1).detach())


@pytest.mark.parametrize(("scale", "shift"), [(255, 0), (4, -2)])
def test_images_that_were_scaled_or_normalised_are_warned_of(scale, shift):
    with pytest.warns(PeerbayesWarning, match=r"images have values from .* to .*, expected uint8 or \[0, 1\]") as told:
        posterior().predict(images() * scale + shift, draws=2)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_batch_norm_without_statistics_is_told_once_with_the_layer_and_the_remedy():
    network = Net()
    assert not any(map(told_of_batch, (MeanField(network), Point(nn.Sequential(nn.InstanceNorm2d(1), Net())))))
    network.norm = nn.BatchNorm2d(4, track_running_stats=False)
    for mixed in (MeanField(network, rho=-6.0), Point(network)):
        (text,) = told_of_batch(mixed)
        assert text.startswith("layer 'norm' is batch-norm without running statistics")
        assert "track_running_stats=True" in text
        assert "depends on batch_size" in text
        # And so it is.
        alone, among = (mixed.predict(images(count), 2).probabilities[:2] for count in (2, 64))
        assert (alone - among).abs().max() > 0.01
    network = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), network)
    assert told_of_batch(Point(network))[0].startswith("layer '0' (and 1 more) is batch-norm without")


def told_of_batch(posterior):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (7, 8):
            posterior.predict(images(count), 2)
    assert {Path(one.filename).name for one in caught} <= {Path(__file__).name}
    return [str(one.message) for one in caught]


def test_double_images_are_images_and_whole_numbers_are_not():
    found = posterior()
    whole = (images() * 255).round()
    expected = found.predict(whole.to(torch.uint8), draws=3).log_probabilities
    torch.testing.assert_close(found.predict(whole.double() / 255, draws=3).log_probabilities, expected)
    for kind in (torch.int64, torch.int16):
        with pytest.raises(InputError, match=rf"images are of type {kind}, expected uint8, or floats in \[0, 1\]"):
            found.predict(whole.to(kind))


def test_texts_are_token_numbers():
    found = Point(nn.Sequential(nn.EmbeddingBag(9, 3)))
    found.input_shape = (4,)
    assert found.predict(torch.randint(9, (2, 4))).classes.shape == (2,)
    with pytest.raises(InputError, match=r"texts are of type torch.float32, expected token numbers \(run.vocabulary"):
        found.predict(torch.rand(2, 4))
    with pytest.raises(
        InputError, match=r"images are of type list, expected a tensor \(run.vocabulary.encode makes one"
    ):
        found.predict(["a text"])


def test_arrays_are_no_tensors():
    with pytest.raises(InputError, match="images are of type ndarray, expected a tensor"):
        posterior().predict(images().numpy())


PEAK = """
import resource, sys
import torch
from torch import nn
from peerbayes.posteriors import MeanField

torch.set_num_threads(1)
found = MeanField(nn.Sequential(nn.Linear(64, 800), nn.Linear(800, 10)))
for draws in (64, 64, 1500):
    found.predict(torch.zeros(1, 64), draws)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the peak of memory in KiB")
def test_memory_does_not_grow_with_the_draws_of_one_image():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=200, check=True)
    _, few, many = map(int, done.stdout.split())
    assert many - few < 20_000  # a draw of this network is 240 KB, all of them 360 MB


# ---- draws at once --------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A batch-norm that can't be folded: it comes first."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv, self.head = nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3), nn.Linear(16, 3)
        self.norm.running_mean.fill_(0.3)
        self.norm.running_var.fill_(2.0)

    def forward(self, x):
        return self.head(torch.relu(self.conv(self.norm(x))).flatten(1))


class Choosing(nn.Module):
    """Can't be vectorised: what it does depends on what it has computed."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(16, 3), how

    def forward(self, x):
        y = self.linear(x.flatten(1))
        return self.how(y)


def by_sign(y):
    return 2 * y if y.sum() > 0 else -y


def watched(monkeypatch):
    """How many draws each call of vmap got, in order."""
    sizes, vmap = [], torch.vmap

    def spy(function):
        def call(flats):
            sizes.append(len(flats))
            return vmap(function)(flats)

        return call

    monkeypatch.setattr(prediction.torch, "vmap", spy)
    return sizes


def both_ways(found, x, draws, monkeypatch, **options):
    together = found.predict(x, draws, **options)
    with monkeypatch.context() as patch:
        patch.setitem(prediction.TOGETHER, "cpu", 0)
        return together, found.predict(x, draws, **options)


def close(one, two, **tolerance):
    torch.testing.assert_close(one.log_probabilities, two.log_probabilities, **tolerance)
    torch.testing.assert_close(one.expected_entropy, two.expected_entropy, **tolerance)
    assert torch.equal(one.draws, two.draws)
    assert one.address == two.address


INPUTS = networks.Inputs(3, (1, 8, 8), (0.4,), (0.3,))


@pytest.mark.parametrize("noise", ["gaussian", "radial"])
@pytest.mark.parametrize("name", ["mlp", "resnet8", "own"])
def test_draws_at_once_are_the_draws_one_after_another(name, noise, monkeypatch):
    torch.manual_seed(0)
    network = Normed() if name == "own" else networks.build(name, INPUTS)
    found = MeanField(network, rho=-1.0, noise=noise)
    x = images(5) if name == "own" else torch.rand(5, 1, 8, 8)
    sizes = watched(monkeypatch)
    together, apart = both_ways(found, x, 6, monkeypatch, seed=4, name="left")
    assert sizes == [6]
    close(together, apart, rtol=1e-4, atol=1e-5)
    by_hand = draws_by_hand(found, x, 6, seed=4, name="left").exp().mean(0)
    torch.testing.assert_close(together.probabilities.double(), by_hand, rtol=1e-3, atol=1e-5)
    assert torch.equal(together.replay(5).flat, found.draw(Address(4, "left", "draw", 5)).flat)


@pytest.mark.parametrize(
    "how",
    [
        by_sign,
        lambda y: y * y.max().item(),
        lambda y: y * float(y.detach().numpy().max()),
        lambda y: y + torch.histc(y, 3),  # vmap would go on, slowly and with a warning
    ],
    ids=["if", "item", "numpy", "fallback"],
)
def test_a_network_that_can_not_be_vectorised_is_run_draw_by_draw(how, monkeypatch):
    torch.manual_seed(0)
    found = MeanField(Choosing(how), rho=0.0)
    sizes = watched(monkeypatch)
    together, apart = both_ways(found, images(), 5, monkeypatch)
    assert sizes == [5]  # it was tried
    close(together, apart, rtol=0, atol=0)


def test_a_point_is_one_pass_and_never_vectorised(monkeypatch):
    sizes = watched(monkeypatch)
    found = Point(Net())
    assert found.predict(images(), 9).draws.tolist() == [1] * 7
    assert posterior().predict(images(), 1).draws.tolist() == [1] * 7
    assert sizes == []


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_draws_at_once_keep_within_the_memory_they_are_given(most, monkeypatch):
    found, x = posterior(), images()
    bytes_a_draw = 4 * (2 * found.mean.numel() + 64 * x.numel())
    monkeypatch.setattr(prediction, "MEMORY", most * bytes_a_draw + bytes_a_draw // 2)
    sizes = watched(monkeypatch)
    together, apart = both_ways(found, x, 7, monkeypatch)
    assert sizes == {1: [], 2: [2, 2, 2, 1], 3: [3, 3, 1], 100: [7]}[most]
    close(together, apart, rtol=1e-5, atol=1e-6)


class Count(watching.Watcher):
    def __init__(self):
        self.told = []

    def begin(self, passes):
        self.told.append([0, passes])

    def advance(self, passes):
        self.told[-1][0] += passes


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("settle", [None, 0.3])
def test_a_watcher_is_told_of_every_pass_of_every_image(at_once, settle, monkeypatch):
    monkeypatch.setitem(prediction.TOGETHER, "cpu", 10**6 if at_once else 0)
    count, found = Count(), posterior()
    with watching.watched(count):
        made = found.predict(images(), 6, batch_size=3, settle=settle)
        Point(Net()).predict(images(), 6)
    found.predict(images(), 6)  # nobody watches any more
    assert count.told == [[int(made.draws.sum()), 6 * 7], [7, 7]]


class Greedy(nn.Module):
    """Has memory for so many images."""

    def __init__(self, most):
        super().__init__()
        self.net, self.most, self.seen = Net(), most, []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("no memory")
        return self.net(x)


@pytest.mark.parametrize("settle", [None, 0.2])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_batch_that_does_not_fit_is_halved(at_once, settle, monkeypatch):
    torch.manual_seed(0)
    greedy = MeanField(Greedy(3), rho=-0.5)
    monkeypatch.setattr(prediction, "Folded", lambda found, _half=None: lambda x, flat: found(x, found.weights(flat)))
    if not at_once:
        monkeypatch.setitem(prediction.TOGETHER, "cpu", 0)
    found = greedy.predict(images(13), 4, settle=settle)
    seen = greedy.network.seen
    assert max(seen[-4:]) == 3
    assert sorted(set(seen), reverse=True)[:3] == [13, 6, 3]
    greedy.network.most = 99
    close(found, greedy.predict(images(13), 4, settle=settle), rtol=1e-5, atol=1e-6)
    greedy.network.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        greedy.predict(images(13), 4)


class Hungry(nn.Module):
    """Has memory for one draw at a time, and from a certain call on only."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 3), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1 and torch._C._functorch.is_batchedtensor(self.linear.weight):
            raise torch.OutOfMemoryError("no memory")
        return self.linear(x.flatten(1))


@pytest.mark.parametrize("count", [1, 5])
def test_draws_at_once_that_do_not_fit_are_made_one_by_one(count, monkeypatch):
    torch.manual_seed(0)
    found = MeanField(Hungry(), rho=0.0)
    x = images(count)
    monkeypatch.setattr(prediction, "MEMORY", 3 * 4 * (2 * found.mean.numel() + 64 * x.numel()))
    sizes = watched(monkeypatch)
    together, apart = both_ways(found, x, 7, monkeypatch)
    assert sizes == [3, 3]  # the second time there was no memory left: four more, one by one
    close(together, apart, rtol=1e-5, atol=1e-6)


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["half", "float64", "", "FLOAT32"])
def test_an_unknown_precision_is_refused(given):
    with pytest.raises(InputError, match=f"precision is '{given}', expected auto, float32, bfloat16, float16"):
        posterior().predict(images(), precision=given)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_precision_is_near_and_no_mode_is_left_behind(half, at_once, monkeypatch):
    if not at_once:
        monkeypatch.setitem(prediction.TOGETHER, "cpu", 0)
    found = posterior()
    p, whole = (found.predict(images(), 4, precision=name) for name in (half, "float32"))
    assert torch.allclose(p.probabilities, whole.probabilities, atol=0.02)
    assert not torch.equal(p.probabilities, whole.probabilities)
    assert p.log_probabilities.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(found.predict(images(), 4).probabilities, whole.probabilities)  # auto on a CPU


class Large(nn.Module):
    """Has values between that only float32 and bfloat16 can hold."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x * 1e6))).flatten(1) * 1e-6)


@pytest.mark.parametrize("settle", [None, 0.2])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_auto_goes_back_to_float32_where_half_precision_overflows(device, settle, monkeypatch):
    torch.manual_seed(0)
    found, x = MeanField(Large(), rho=-2.0).to(device), images().to(device)
    if device == "cpu":  # what a GPU does by itself
        monkeypatch.setitem(prediction.TOGETHER, "cpu", 0)
        monkeypatch.setitem(prediction.PRECISIONS, "float32", torch.float16)
    half = found.predict(x, 4, precision="float16", settle=settle)
    assert half.log_probabilities.isnan().any()
    p = found.predict(x, 4, settle=settle)
    assert p.log_probabilities.isfinite().all()
    monkeypatch.setitem(prediction.PRECISIONS, "float32", None)
    whole = found.predict(x, 4, precision="float32", settle=settle)
    assert torch.equal(p.log_probabilities, whole.log_probabilities)


# ---- whole splits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settle", [None, 0.2])
def test_a_split_in_chunks_is_the_split_at_once(settle, monkeypatch):
    torch.manual_seed(0)
    split = ArraySplit((torch.rand(23, 1, 4, 4) * 255).to(torch.uint8), torch.arange(23) % 3)
    found = posterior(rho=0.0)
    calls, original = [], found.predict

    def spy(x, *rest, **options):
        calls.append(len(x))
        return original(x, *rest, **options)

    monkeypatch.setattr(found, "predict", spy)
    whole = prediction.predict_split(found, split, 6, seed=3, name="left", settle=settle)
    each = split.batch(torch.tensor([0]), torch.device("cpu"))[0].nbytes
    monkeypatch.setattr(prediction, "IMAGES", 7 * each + 1)
    parts = prediction.predict_split(found, split, 6, seed=3, name="left", settle=settle)
    monkeypatch.setattr(prediction, "IMAGES", 1)
    singles = prediction.predict_split(found, split, 6, seed=3, name="left", settle=settle)
    assert calls == [23, 7, 7, 7, 2] + [1] * 23
    for other in (parts, singles):
        for one, two in zip(whole, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    p = original(split.batch(torch.arange(23), torch.device("cpu"))[0], 6, seed=3, name="left", settle=settle)
    torch.testing.assert_close(whole[0], p.log_probabilities)
    assert torch.equal(whole[1], torch.arange(23) % 3)


# ---- settling -----------------------------------------------------------------------------------------------------


def test_settled_classes_are_wrong_no_more_often_than_stated():
    # With equal scales, the class with the largest mean logit has the largest average probability, exactly.
    count, level, most = 3000, 0.1, 400
    means = 0.8 * torch.randn(count, 4, generator=torch.Generator().manual_seed(4))
    found, x = numbered(means, rho=2.0)
    p = found.predict(x, draws=most, settle=level)
    wrong = p.classes != means.argmax(1)
    stopped = p.draws < most
    assert p.draws.max() <= most
    assert p.draws.min() >= 2
    assert 0.3 < stopped.float().mean() < 1
    error = math.sqrt(level * (1 - level) / count)
    assert (wrong & stopped).float().mean() <= level + 3 * error
    few = found.predict(x, draws=5)
    assert (few.classes != means.argmax(1)).float().mean() > 2 * level
    # Large margins settle sooner than small ones.
    top = means.sort(1, descending=True).values
    assert stats.spearmanr((top[:, 0] - top[:, 1]).numpy(), p.draws.numpy()).statistic < -0.5


def test_a_settled_prediction_is_the_average_of_its_own_draws():
    means = torch.randn(30, 3, generator=torch.Generator().manual_seed(6))
    found, x = table(means, rho=1.0)
    p = found.predict(x, draws=60, settle=0.2, batch_size=7)
    assert len(p.draws.unique()) > 3
    by_hand = draws_by_hand(found, x, 60).exp()
    for image, spent in enumerate(p.draws.tolist()):
        expected = by_hand[:spent, image].mean(0)
        torch.testing.assert_close(p.probabilities[image].double(), expected, rtol=1e-4, atol=1e-6)
        entropy = stats.entropy(by_hand[:spent, image].numpy(), axis=-1).mean()
        assert p.expected_entropy[image].item() == pytest.approx(entropy, rel=1e-3)


def test_confident_images_stop_as_soon_as_the_bets_allow():
    found, x = table(torch.tensor([[200.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), rho=-3.0)
    p = found.predict(x, draws=40, settle=0.05)
    # The first draw names the leader; then every stake wins its whole: mean (1 + λ)^n ≥ (π²/6) / level.
    wins = next(n for n in range(99) if sum((1 + s) ** n for s in (0.1, 0.3, 0.6, 0.9)) / 4 >= math.pi**2 / 6 / 0.05)
    assert p.draws[0].item() == 1 + wins
    assert p.draws[1].item() == 40


def simulate(referee_level, draws, count, make, seed=0):
    """Run the referee on images with the draws that ``make`` gives; return who settled, and on which class."""
    generator = torch.Generator().manual_seed(seed)
    here, total, referee = torch.arange(count), None, None
    settled = torch.full((count,), -1)
    for _ in range(draws):
        p = make(count, generator)
        log_p = p.log()
        total = log_p if total is None else torch.logaddexp(total, log_p)
        referee = referee or Referee(log_p, referee_level)
        done = referee.settled(here, p, total) & (settled < 0)
        settled = torch.where(done, total.argmax(1), settled)
    return settled


def tied_pair(count, generator):
    """Classes 0 and 1 are equally probable on average, class 2 never is; every draw is nearly sure."""
    first = (torch.rand(count, 1, generator=generator) < 0.5).float()
    p = torch.cat([first, 1 - first, torch.zeros(count, 1)], 1)
    return 0.98 * p + 0.02 / 3


@pytest.mark.parametrize("level", [0.05, 0.3])
def test_tied_classes_are_settled_no_more_often_than_stated(level):
    count = 5000
    settled = simulate(level, 300, count, tied_pair)
    rate = (settled >= 0).float().mean().item()
    assert rate <= level + 3 * math.sqrt(level * (1 - level) / count)
    assert rate > level / 50


def test_a_class_behind_by_a_little_is_rarely_settled():
    count, level = 5000, 0.2

    def make(count, generator):
        noise = torch.randn(count, 3, generator=generator) * 3
        return (noise + torch.tensor([0.0, 0.1, 0.1])).softmax(1)

    settled = simulate(level, 200, count, make)
    assert (settled == 0).float().mean() <= level + 3 * math.sqrt(level * (1 - level) / count)


def test_capital_against_a_tied_rival_is_a_fair_game():
    count, rounds = 40_000, 12
    generator = torch.Generator().manual_seed(1)
    start = torch.tensor([[0.0, -9.0, -9.0]]).expand(count, 3)
    referee, here = Referee(start, 1e-6), torch.arange(count)
    lead = torch.tensor([[1e6, 1.0, 1.0]]).expand(count, 3)
    referee.settled(here, start.exp(), lead)
    for _ in range(rounds):
        referee.settled(here, tied_pair(count, generator), lead)
    capital = referee.capital.exp()
    fair, won = capital[:, 1, :2].double(), capital[:, 2, :].double()
    assert ((fair.mean(0) - 1).abs() <= 4 * fair.std(0) / math.sqrt(count)).all()
    # Against the class that is never probable, the game is favourable: E capital = (1 + λ · 0.98 / 2)^rounds.
    expected = (1 + referee.stakes.double() * 0.49) ** rounds
    assert ((won.mean(0) / expected - 1).abs() < 0.15).all()


def test_a_new_leader_starts_again_with_a_stricter_level():
    level, sure = 0.05, torch.eye(3)
    first, second = sure[:1], sure[1:2]
    referee, here = Referee(first, level), torch.tensor([0])

    def wins_needed(start):
        enough = math.pi**2 / 6 * start**2 / level
        return next(n for n in range(99) if sum((1 + s) ** n for s in Referee.STAKES) / 4 >= enough)

    referee.settled(here, first, first)
    for _ in range(wins_needed(1) - 1):
        assert not referee.settled(here, first, first)
    # The last win comes with an average that prefers another class: not settled, and all winnings are void.
    assert not referee.settled(here, first, second)
    for _ in range(wins_needed(2) - 1):
        assert not referee.settled(here, second, second)
    # Back to the first class: what it won at its first start is void as well.
    assert not referee.settled(here, second, first)
    for _ in range(wins_needed(3) - 1):
        assert not referee.settled(here, first, first)
    assert referee.settled(here, first, first)
    assert wins_needed(1) < wins_needed(2) < wins_needed(3)
