"""The shared posterior: classes of weights, moments, KL, gradients, files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributions import Normal, kl_divergence

from codebooks import HERE, book, net
from peerbayes import InputError, MeanField
from peerbayes.codebook.book import Codebook
from peerbayes.codebook.shared import SAMPLINGS, Shared
from peerbayes.math.noise import normal
from peerbayes.posteriors import storage
from peerbayes.posteriors.base import Posterior


def moments(codebook, sampling="moment", mixture=False):
    """Mean and variance of every weight, weight by weight."""
    mean, variance = torch.empty(len(codebook.label)), torch.empty(len(codebook.label))
    five = torch.cat([codebook.component, codebook.cholesky], 1)
    used = {"mean": [1], "cluster": [2]}.get(sampling, [1, 2, 3, 4])
    for i in range(len(mean)):
        if i in codebook.outlier:
            place = codebook.outlier.tolist().index(i)
            mean[i], variance[i] = codebook.outlier_mean[place], codebook.outlier_std[place] ** 2
            continue
        shares, rows = torch.ones(1), five[codebook.label[i]][None]
        if i in codebook.blended:
            place = codebook.blended.tolist().index(i)
            chosen, shares = codebook.blend_component[place].long(), codebook.blend_weight[place]
            if chosen[0] == chosen[1]:
                chosen, shares = chosen[:1], torch.ones(1)
            rows = five[chosen]
        squares = rows[:, used].square().sum(1)
        mean[i] = shares @ rows[:, 0]
        if mixture:
            variance[i] = shares @ (squares + rows[:, 0].square()) - mean[i] ** 2
        elif sampling.startswith("cluster"):
            variance[i] = shares.square() @ squares
        else:
            variance[i] = (shares @ rows[:, used]).square().sum()
    return mean, variance


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_mean_and_std_are_those_of_component_blend_or_outlier(sampling, mixture):
    codebook = book()
    posterior = Shared(net(), codebook, sampling=sampling, mixture=mixture)
    mean, variance = moments(codebook, sampling, mixture)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.std, variance.sqrt(), rtol=1e-5, atol=1e-5)


def test_only_weights_of_convolutions_and_linear_layers_are_shared():
    posterior = Shared(net(), book())
    assert list(posterior.layout.shapes) == ["0.weight", "4.weight"]
    assert {"0.bias", "1.weight", "1.bias", "4.bias"} == set(posterior.rest_layout.shapes)


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", ["hierarchical", "cluster"])
@pytest.mark.parametrize("prior", ["anchored", "normal"])
def test_kl_is_the_sum_over_weights_or_over_components(sampling, prior, mixture):
    codebook = book()
    posterior = Shared(net(), codebook, sampling=sampling, mixture=mixture, prior=prior, prior_std=0.3)
    with torch.no_grad():
        posterior.component += 0.05
        posterior.cholesky *= 1.5
        posterior.outlier_mean -= 0.1
    before, now = (moments(one, mixture=mixture) for one in (codebook, posterior.codebook()))
    outlier = torch.isin(torch.arange(120), codebook.outlier)
    prior_mean, prior_std = (torch.zeros(120), torch.full((120,), 0.3)) if prior == "normal" else (
        before[0], torch.where(outlier, 0.3, before[1].sqrt()))  # fmt: skip
    every = kl_divergence(Normal(now[0], now[1].sqrt()), Normal(prior_mean, prior_std))
    torch.testing.assert_close(posterior.kl_per_weight(), every)
    if sampling == "hierarchical":
        torch.testing.assert_close(posterior.kl(), every.sum())
        return
    plain = ~torch.isin(torch.arange(120), torch.cat([codebook.outlier, codebook.blended]))
    firsts = [int((plain & (codebook.label == k)).nonzero()[0]) for k in range(5)]
    torch.testing.assert_close(posterior.kl(), every[firsts].sum() + every[outlier].sum())


@pytest.mark.parametrize("mixture", [False, True])
def test_anchored_kl_of_components_is_zero_at_first(mixture):
    posterior = Shared(net(), book(outliers=0), mixture=mixture)
    assert posterior.kl().abs() < 1e-4


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_gradients_reach_every_trainable_number_and_are_those_of_differences(sampling, mixture):
    posterior = Shared(net(), book(), sampling=sampling, mixture=mixture).double()
    noise = normal(HERE, posterior.noise_size).double()
    factor = torch.randn(120, generator=torch.Generator().manual_seed(3)).double()

    def value():
        return (posterior.place(noise)[0] * factor).sin().sum() + posterior.kl() / 50

    value().backward()
    for name in ("component", "cholesky", "outlier_mean", "outlier_rho"):
        parameter = getattr(posterior, name)
        found = torch.zeros_like(parameter)
        for place in range(parameter.numel()):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[place] += sign * 1e-6
                    ends.append(value())
                    parameter.view(-1)[place] -= sign * 1e-6
            found.view(-1)[place] = (ends[0] - ends[1]) / 2e-6
        torch.testing.assert_close(parameter.grad, found, rtol=1e-5, atol=1e-6)
        assert (parameter.grad != 0).all()


def test_with_a_component_for_each_weight_it_is_the_mean_field_posterior():
    field = MeanField(net(), bayesian=lambda name, _: name in ("0.weight", "4.weight"))
    codebook = Codebook(
        component=torch.stack([field.mean, field.std], 1).detach(),
        cholesky=torch.zeros(120, 3),
        label=torch.arange(120),
        blended=torch.empty(0, dtype=torch.int64),
        blend_component=torch.empty(0, 2, dtype=torch.int64),
        blend_weight=torch.empty(0, 2),
        outlier=torch.empty(0, dtype=torch.int64),
        outlier_mean=torch.empty(0),
        outlier_std=torch.empty(0),
    )
    for sampling in ("mean", "moment"):
        shared = Shared(net(), codebook, sampling=sampling, start_from=field)
        images = torch.rand(4, 2, 4, 4)
        torch.testing.assert_close(shared.draw(HERE).flat, field.draw(HERE).flat)
        given, expected = (p.predict(images, 20).log_probabilities for p in (shared, field))
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_the_order_of_a_codebook_makes_no_difference():
    codebook = book()
    generator = torch.Generator().manual_seed(1)
    order, blends, singles = (torch.randperm(n, generator=generator) for n in (5, 7, 9))
    shuffled = Codebook(
        codebook.component[order],
        codebook.cholesky[order],
        order.argsort()[codebook.label],
        codebook.blended[blends],
        order.argsort()[codebook.blend_component][blends],
        codebook.blend_weight[blends],
        codebook.outlier[singles],
        codebook.outlier_mean[singles],
        codebook.outlier_std[singles],
    )
    first, second = (Shared(net(), given).state() for given in (codebook, shuffled))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for sampling in SAMPLINGS:
        draws = [Shared(net(), given, sampling=sampling).draw(HERE).flat for given in (codebook, shuffled)]
        assert torch.equal(*draws)


def test_shares_are_the_nearest_15ths():
    share = torch.rand(40, generator=torch.Generator().manual_seed(2))
    codebook = replace(book(blended=40), blend_weight=torch.stack([share, 1 - share], 1))
    posterior = Shared(net(), codebook)
    nearest = torch.tensor([min(range(16), key=lambda k: abs(k / 15 - x)) for x in share.tolist()])
    nearest = nearest[codebook.blended.argsort()]
    torch.testing.assert_close(posterior.blend_weight, torch.stack([nearest / 15, (15 - nearest) / 15], 1))


def test_a_component_of_one_weight_is_used_and_one_of_none_is_not(tmp_path):
    codebook = book(components=7)
    label = codebook.label.where(codebook.label < 2, 0)
    plain = [i for i in range(120) if i not in codebook.outlier and i not in codebook.blended]
    label[plain[5]] = 3  # alone
    label[codebook.outlier], label[codebook.blended] = 4, 5  # whose labels mean nothing
    pair = torch.tensor([[1, 6]] + [[0, 1]] * 6)
    posterior = Shared(net(), replace(codebook, label=label, blend_component=pair), bits=32)
    mean, std = posterior.mean.detach(), posterior.std.detach()
    used = [int((posterior.component[:, 0] == codebook.component[k, 0]).nonzero()) for k in (0, 1, 3, 6)]
    assert posterior.used.nonzero()[:, 0].tolist() == sorted(used)
    posterior.save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", net())
    assert len(again.component) == len(posterior.component) == 4
    assert torch.equal(again.mean, mean)
    assert torch.equal(again.std, std)


def test_components_are_numbered_by_layer_then_mean():
    codebook = replace(book(blended=0, outliers=0), label=torch.tensor([3, 1] * 36 + [0, 2, 4] * 16))
    posterior = Shared(net(), codebook)
    means = codebook.component[:, 0]
    order = sorted((3, 1), key=lambda k: means[k]) + sorted((0, 2, 4), key=lambda k: means[k])
    assert torch.equal(posterior.component, codebook.component[order])
    assert torch.equal(posterior.cholesky, codebook.cholesky[order])


@pytest.mark.parametrize("bits", [32, 10, 8])
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_file_gives_the_same_posterior_to_the_last_bit(sampling, mixture, bits, tmp_path):
    posterior = Shared(odd(), odd_book(), sampling=sampling, mixture=mixture, bits=bits, seed=3, name="b")
    posterior.save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", odd(seed=5))
    assert isinstance(again, Shared)
    assert (again.options(), again.seed, again.name) == (posterior.options(), 3, "b")
    first, second = posterior.state(), again.state()
    assert first.keys() == second.keys()
    for name in first:
        if bits == 32 or "anchor" not in name:
            assert first[name].dtype == second[name].dtype
            assert torch.equal(first[name], second[name]), name
    assert torch.equal(again.draw(HERE).flat, posterior.draw(HERE).flat)
    assert bits < 32 or torch.equal(again.kl(), posterior.kl())
    again.save(tmp_path / "q.safetensors")
    assert (tmp_path / "q.safetensors").read_bytes() == (tmp_path / "p.safetensors").read_bytes()


@pytest.mark.parametrize("bits", [32, 8])
def test_a_single_component_has_a_file(bits, tmp_path):
    posterior = Shared(net(), book(components=1), bits=bits)
    posterior.save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", net())
    assert torch.equal(again.draw(HERE).flat, posterior.draw(HERE).flat)


def odd(seed=0):
    """A network with all kinds of tensors that are not shared."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    network[1](torch.randn(8, 4, 2, 2))
    network.register_buffer("mask", torch.tensor([[True, False, True]]))
    network.register_buffer("hidden", torch.tensor([0.0, -torch.inf]))
    network.register_buffer("precise", torch.rand(3, dtype=torch.float64))
    network.register_buffer("large", torch.tensor([1e6 + seed, 2.0]))
    network.register_buffer("empty", torch.zeros(0, 2, dtype=torch.int64))
    network.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
    return network


def odd_book():
    codebook = book()
    return replace(codebook, cholesky=codebook.cholesky * torch.tensor([0.0, 1.0, 1.0]))


@pytest.mark.parametrize("bits", [4, 8, 10, 16])
def test_rounded_numbers_are_as_near_as_their_bits_allow(bits, tmp_path):
    exact, posterior = Shared(odd(), odd_book(), bits=32), Shared(odd(), odd_book(), bits=bits)
    posterior.save(tmp_path / "p.safetensors")
    layers = (posterior.outlier >= 72).long()  # the convolution has 72 weights
    moved = (posterior.outlier_mean - exact.outlier_mean).abs()
    for layer in (0, 1):
        step = exact.outlier_mean[layers == layer].abs().max() / (2 ** (bits - 1) - 1)
        assert moved[layers == layer].max() <= step * 0.501
    assert (posterior.component[:, 0] - exact.component[:, 0]).abs().max() < 1 / 65534
    codebooks = posterior.codebook(), exact.codebook()
    for now, before in (
        [given.component[:, 1] for given in codebooks],
        [given.cholesky[:, 1:] for given in codebooks],
        [given.outlier_std for given in codebooks],
    ):
        assert (now / before).log2().abs().max() < 1 / 16 + 1e-4
    assert (posterior.cholesky[:, 0] == 0).all()
    assert torch.equal(posterior.rest, exact.rest.half().float())
    for name, buffer in exact.network.state_dict().items():
        halved = buffer.dtype == torch.float32 and name != "large"  # which float16 can't hold
        assert torch.equal(posterior.network.state_dict()[name], buffer.half().float() if halved else buffer), name
    assert torch.equal(posterior.anchor_outlier, exact.anchor_outlier)


def test_fewer_bits_are_fewer_bytes(tmp_path):
    sizes = []
    for bits in (32, 16, 8):
        codebook = book(size=2000, outliers=600, components=40)
        Shared(nn.Linear(40, 50), codebook, bits=bits).save(tmp_path / "p.safetensors", anchors=False)
        sizes.append((tmp_path / "p.safetensors").stat().st_size)
    assert sizes[0] - sizes[1] > 600 * 5  # of 8 bytes an outlier at most 2 + 1 are left
    assert sizes[1] - sizes[2] > 600 * 0.6


@pytest.mark.parametrize("bits", [32, 8])
def test_the_file_begins_with_what_makes_the_mean_network(bits, tmp_path):
    posterior = Shared(net(), book(), bits=bits)
    posterior.save(tmp_path / "p.safetensors")
    data = (tmp_path / "p.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    ends = {name: about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"}
    first = max(end for name, end in ends.items() if name.startswith(("means/", "fixed/", "grids")))
    assert all(end > first for name, end in ends.items() if name.startswith(("scales/", "anchor/")))
    with safe_open(tmp_path / "p.safetensors", framework="pt") as file:  # any reader of safetensors can open it
        assert set(file.keys()) == set(ends)
    # Cut short there, it is that network, to the last bit; a byte earlier it is not there yet.
    head, part = len(data) - max(ends.values()), tmp_path / "part.safetensors"
    expected = posterior.materialise()
    for arrived in (data, data[: head + first]):
        part.write_bytes(arrived)
        found = Shared.load_means(part, net())
        assert not found.training
        for name, tensor in expected.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
    with pytest.raises(InputError, match="not a readable safetensors file"):
        Shared.load(part, net())
    for arrived in (head + first - 1, head, head - 1, 7, 0):
        part.write_bytes(data[:arrived])
        with pytest.raises(InputError, match=r"part\.safetensors: (incomplete|the header is incomplete)"):
            Shared.load_means(part, net())
    with pytest.raises(InputError, match="shared weights belong to another network"):
        Shared.load_means(tmp_path / "p.safetensors", nn.Linear(12, 10))


@pytest.mark.parametrize("bits", [32, 8])
def test_any_damage_to_what_comes_first_is_one_sentence(bits, tmp_path):
    Shared(net(), book(), bits=bits).save(tmp_path / "p.safetensors")
    data, part = (tmp_path / "p.safetensors").read_bytes(), tmp_path / "part.safetensors"
    whole = Shared.load_means(tmp_path / "p.safetensors", net()).state_dict()
    sentences = []
    for place in range(len(data)):
        part.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        try:
            found = Shared.load_means(part, net()).state_dict()
        except InputError as error:
            sentences.append(str(error))
        else:  # where scales lie, or what the header says of them
            assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert all(one.startswith(f"{part}: ") and "\n" not in one for one in sentences)
    assert 0.5 * len(data) < len(sentences) < len(data)


def test_files_without_means_of_their_own_say_so(tmp_path):
    MeanField(net()).save(tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="has no first tensors"):
        Shared.load_means(tmp_path / "m.safetensors", net())
    with pytest.raises(InputError, match="no such file"):
        Shared.load_means(tmp_path / "none.safetensors", net())


@pytest.mark.parametrize("bits", [32, 8])
def test_what_nobody_could_read_is_not_written(bits, tmp_path):
    for name, value in (("outlier_rho", -200.0), ("component", 0.0)):
        posterior = Shared(net(), book(), bits=bits)
        with torch.no_grad():
            posterior.cholesky[2] = 0
            getattr(posterior, name)[2] = value
        with pytest.raises(InputError, match=r"p\.safetensors: scales of .* have collapsed to 0"):
            posterior.save(tmp_path / "p.safetensors")
        assert not list(tmp_path.iterdir())


def test_without_anchors_the_file_is_smaller_and_predicts_the_same(tmp_path):
    posterior = Shared(net(), book(), bits=32)
    with torch.no_grad():
        posterior.component += 0.01
    posterior.save(tmp_path / "whole.safetensors")
    posterior.save(tmp_path / "small.safetensors", anchors=False)
    whole, small = (Posterior.load(tmp_path / f"{name}.safetensors", net()) for name in ("whole", "small"))
    assert torch.equal(small.draw(HERE).flat, posterior.draw(HERE).flat)
    assert torch.equal(whole.kl(), posterior.kl())
    assert (tmp_path / "small.safetensors").stat().st_size < (tmp_path / "whole.safetensors").stat().st_size


def test_a_file_of_another_network_is_refused(tmp_path):
    Shared(net(), book()).save(tmp_path / "p.safetensors")
    other = net()
    other.append(nn.Softmax(1)).register_buffer("more", torch.zeros(1))
    with pytest.raises(InputError, match=r"p\.safetensors: the shared weights belong to another network"):
        Posterior.load(tmp_path / "p.safetensors", other)


def test_a_choice_of_ones_own_is_in_the_file(tmp_path):
    posterior = Shared(net(), book(size=72), bayesian=lambda name, _: name == "0.weight")
    posterior.save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", net())
    assert list(again.layout.shapes) == ["0.weight"]
    assert torch.equal(again.draw(HERE).flat, posterior.draw(HERE).flat)


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"options": 3}, "lacks options"),
        ({"options": {"sampling": "mean", "colour": 1}}, "its options are not those of a shared posterior"),
        ({"options": {"weights": [["0.weight"]]}}, "its options are not those of a shared posterior"),
        ({"options": {"prior_std": "wide"}}, "its options are not those of a shared posterior"),
        ({"options": {"mixture": "yes"}}, "mixture is 'yes', expected true or false"),
        ({"options": {"bits": 3}}, "bits is 3, expected 4 to 16, or 32"),
        ({"options": {"bits": 8.0}}, "bits is 8.0, expected 4 to 16, or 32"),
        ({"kind": ["shared"]}, "posterior of kind"),
        ({"seed": "0"}, "lacks options, a seed or a name"),
        ({"network": "00"}, "to another network"),
        ({"full": "all"}, "'full' is not a list of numbers"),
        ({"full": ["0"]}, "'full' is not a list of numbers"),
        ({"full": [0, 1]}, "'fixed/"),
    ],
)
def test_a_description_that_does_not_fit_is_one_sentence(bits, change, sentence, tmp_path):
    path = tmp_path / "p.safetensors"
    Shared(net(), book(), bits=bits).save(path)
    tensors, about = storage.read(path)
    if "full" in change and bits == 32:
        change = {"network": "another"}
        sentence = "to another network"
    storage.write(path, tensors, about | change)
    with pytest.raises(InputError, match=sentence) as error:
        Posterior.load(path, net())
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("means/component", lambda t: t[:-1], "'means/index': index: damaged, or made for other components"),
        ("means/component", lambda t: t[:0], "no components"),
        ("means/index", lambda t: t[:-8], "does not end as it should"),
        ("means/index", lambda t: t[: len(t) // 2 // 8 * 8], "means/index"),
        ("means/blend_first", lambda t: t.view(2, -1), "is torch.uint8 of shape"),
        ("scales/outlier", None, "incomplete: it has no 'scales/outlier'"),
        ("extra", lambda _: torch.zeros(3), "unexpected tensor 'extra'"),
        ("scales/component", lambda t: t.long(), "'scales/component' is torch.int64"),
        ("fixed/others", lambda t: t.flip(0), "'fixed/others'"),
    ],
)
def test_a_damaged_file_that_is_signed_again_is_one_sentence(bits, name, change, sentence, tmp_path):
    path = tmp_path / "p.safetensors"
    Shared(net(), book(), bits=bits).save(path)
    tensors, about = storage.read(path)
    given = tensors.pop(name, torch.zeros(0))
    storage.write(path, tensors if change is None else tensors | {name: change(given)}, about)
    with pytest.raises(InputError, match=sentence):
        Posterior.load(path, net())


def test_what_fills_a_tensor_up_is_checked(tmp_path):
    path = tmp_path / "p.safetensors"
    Shared(odd(), odd_book(), bits=8).save(path)
    tensors, about = storage.read(path)
    filled = [name for name, t in tensors.items() if t.dtype == torch.uint8 and t[-1] > 1]
    assert filled
    for name in filled:
        more = int(tensors[name][-1])
        spoilt, longer = tensors[name].clone(), torch.zeros(8, dtype=torch.uint8)
        spoilt[-2], longer[-1] = 1, 8 + more
        for given in (spoilt, torch.cat([tensors[name][:-1], torch.zeros(1, dtype=torch.uint8), longer])):
            storage.write(path, tensors | {name: given}, about)
            with pytest.raises(InputError, match=f"'{name}' does not end as it should"):
                Posterior.load(path, odd())


@pytest.mark.parametrize("first", [0, 72])
@pytest.mark.parametrize("bits", [32, 8])
def test_a_layer_may_have_no_outliers(bits, first, tmp_path):
    place = first + 5 * torch.arange(9)
    codebook = replace(book(blended=0), outlier=place)
    posterior = Shared(net(), codebook, bits=bits)
    posterior.save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", net())
    assert again.outlier.tolist() == place.tolist()
    assert torch.equal(again.draw(HERE).flat, posterior.draw(HERE).flat)
    torch.testing.assert_close(again.mean[place], codebook.outlier_mean, rtol=0, atol=0.02)


@pytest.mark.parametrize("grid", [0.0, -1.0, torch.nan, torch.inf, 0.5])
@pytest.mark.parametrize("place", range(8))
def test_grids_that_are_none_are_refused(place, grid, tmp_path):
    path = tmp_path / "p.safetensors"
    Shared(net(), book(), bits=8).save(path)
    tensors, about = storage.read(path)
    tensors["grids"][place] = grid
    storage.write(path, tensors, about)
    if (1 <= place < 6 and grid in (0.0, -1.0)) or (place in (0, 6, 7) and grid == 0.5):
        Posterior.load(path, net())  # another grid, but a grid
        return
    with pytest.raises(InputError, match="grids"):
        Posterior.load(path, net())


def test_a_state_that_does_not_fit_changes_nothing():
    posterior, other = Shared(net(), book()), Shared(net(), book(components=8, blended=3, outliers=20, seed=5))
    before = {name: tensor.detach().clone() for name, tensor in posterior.state().items()}
    good = {name: tensor.detach().clone() for name, tensor in other.state().items()}
    for name, bad in (
        ("codebook/label", torch.full((120,), 8, dtype=torch.int32)),
        ("codebook/outlier", good["codebook/outlier"].flip(0)),
        ("codebook/outlier_rho", torch.full((20,), -200.0)),
        ("rest/1.bias", torch.zeros(5)),
    ):
        with pytest.raises(InputError):
            posterior.load_state(good | {name: bad})
        assert all(torch.equal(tensor, before[key]) for key, tensor in posterior.state().items())
        assert torch.equal(posterior.draw(HERE).flat, Shared(net(), book()).draw(HERE).flat)


@pytest.mark.parametrize("cut", [100, 1000, -40, -1])
def test_a_file_cut_short_is_one_sentence(cut, tmp_path):
    Shared(net(), book()).save(tmp_path / "p.safetensors")
    (tmp_path / "p.safetensors").write_bytes((tmp_path / "p.safetensors").read_bytes()[:cut])
    with pytest.raises(InputError, match=r"p\.safetensors"):
        Posterior.load(tmp_path / "p.safetensors", net())


def test_a_checkpoint_of_another_codebook_takes_its_place():
    posterior, other = Shared(net(), book()), Shared(net(), book(components=8, blended=3, outliers=20, seed=5))
    posterior.load_state({name: tensor.detach().clone() for name, tensor in other.state().items()})
    assert torch.equal(posterior.draw(HERE).flat, other.draw(HERE).flat)


@pytest.mark.parametrize("bits", [32, 10])
def test_another_posterior_may_start_from_its_file(bits, tmp_path):
    posterior = Shared(odd(), odd_book(), bits=bits)
    posterior.save(tmp_path / "p.safetensors")
    expected = Posterior.load(tmp_path / "p.safetensors", odd()).materialise().state_dict()
    found = MeanField(odd(seed=5), start_from=tmp_path / "p.safetensors").materialise().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_predict_and_materialise_work_as_for_every_posterior():
    posterior = Shared(net(), book())
    images = torch.rand(6, 2, 4, 4)
    plain = posterior.materialise().eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(images), posterior.eval()(images))
    assert set(plain.state_dict()) == set(net().state_dict())
    found = posterior.predict(images, 300)
    assert torch.allclose(found.probabilities.sum(1), torch.ones(6), atol=1e-5)
    assert found.disagreement.max() > 1e-3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"label": torch.zeros(119, dtype=torch.int64)}, "labels for 119 weights, but the network shares 120"),
        ({"label": torch.full((120,), 5)}, "'label' names a component that is not among the 5"),
        ({"blend_component": torch.full((7, 2), -1)}, "'blend_component' names a component"),
        ({"outlier": torch.full((9,), 3)}, "twice"),
        ({"outlier": torch.arange(120, 129)}, "names a weight that is not among the 120"),
        ({"outlier_std": torch.zeros(9)}, "collapsed to 0"),
        ({"outlier_mean": torch.zeros(8)}, "not equally many"),
        ({"outlier_std": torch.ones(8)}, "not equally many"),
        ({"outlier_std": torch.eye(9)[0]}, "scales of outliers have collapsed to 0"),
        ({"component": torch.zeros(5, 2), "cholesky": torch.eye(5)[:, :3]}, "scales of components have collapsed to 0"),
        ({"outlier": torch.arange(-1, 8)}, "names a weight that is not among the 120"),
        ({"blended": book().outlier[:7]}, "a weight is blended or an outlier twice"),
        ({"label": torch.eye(120)[7].long().neg()}, "'label' names a component that is not among the 5"),
        ({"component": torch.zeros(0, 2), "cholesky": torch.zeros(0, 3)}, "of at least one component"),
        ({"component": torch.ones(5, 3)}, r"expected centres \(K, 2\)"),
        ({"cholesky": torch.ones(4, 3)}, r"Cholesky factors \(K, 3\)"),
        ({"blend_component": torch.zeros(6, 2).long()}, "two shares for each of 7 blended weights"),
        ({"blend_weight": torch.full((7, 3), 1 / 3)}, "two shares for each of 7 blended weights"),
    ],
)
def test_a_codebook_that_does_not_fit_is_refused(change, sentence):
    with pytest.raises(InputError, match=sentence):
        Shared(net(), replace(book(), **change))


def test_unknown_options_are_refused():
    with pytest.raises(InputError, match="sampling is 'x', expected hierarchical"):
        Shared(net(), book(), sampling="x")
    for bits in (3, 17, 20, 33, 8.0):
        with pytest.raises(InputError, match=f"bits is {bits}, expected 4 to 16, or 32"):
            Shared(net(), book(), bits=bits)
    with pytest.raises(InputError, match="prior is 'flat', expected 'anchored' or 'normal'"):
        Shared(net(), book(), prior="flat")
    for width in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(InputError, match=r"prior_std is .*, expected a positive number"):
            Shared(net(), book(), prior_std=width)
    with pytest.raises(InputError, match="no parameter of Sequential is chosen to be shared"):
        Shared(net(), weights=[])
