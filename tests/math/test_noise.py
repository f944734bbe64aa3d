"""The noise is what it claims to be: normal, uniform, independent between addresses, and never another meaning."""

import hashlib
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from peerbayes.data import AUGMENTATIONS, augment
from peerbayes.engine.step_parts import prepare_images
from peerbayes.errors import InputError
from peerbayes.math import noise
from peerbayes.math.noise import (
    Address,
    Seed1,
    bits,
    integers,
    normal,
    normal_from,
    permutation,
    start,
    stream_key,
    uniform,
)

COUNT = 100_000
HERE = Address(seed=7, owner="peer-1", stream="step", number=123)
OLD = Address(Seed1(7), "peer-1", "step", 123)  # of format 1
NEIGHBOURS = {
    "format": OLD,
    "number": HERE.at(124),
    "seed": Address(8, "peer-1", "step", 123),
    "owner": Address(7, "peer-2", "step", 123),
    "stream": Address(7, "peer-1", "draw", 123),
    "sub": HERE.sub("mask"),
}


GOLDEN_1 = {
    "bits": [-2459508342071916134, -8327330564677956956, 6947633008239318513, 8766369074627473244],
    "mask": [1085552507222062989],
    "permutation": [4, 1, 5, 0, 7, 6, 2, 3],
    "integers": [866, 548, 376, 475, 533],
    "normal": [-0.33229437, -0.28923115, -0.41925520, -1.05698133],
    "uniform": [0.86666983, 0.54857451, 0.37663192],
}
GOLDEN_2 = {
    "bits": [-2459508342071916134, -3089345615234989701, 2592454283052426887, 6999258965263774006],
    "mask": [1085552507222062989],
    "permutation": [4, 7, 1, 5, 0, 2, 3, 6],
    "integers": [866, 832, 140, 379, 604],
    "normal": [-0.33229437, 0.55653185, -0.4192552, -0.23843923],
    "uniform": [0.86666983, 0.83252627, 0.1405372],
}


def splitmix(address: Address, index: int) -> int:
    """The documented formula in Python integers, as a signed 64-bit number."""
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def mixed_key(stream: str) -> int:
        text = f"{int(address.seed)}\0{address.owner}\0{stream}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return mix((key + address.number * gamma) & mask)

    stride = gamma if isinstance(address.seed, Seed1) else mixed_key(f"{address.stream}\0stride") | 1
    z = mix((mixed_key(address.stream) + index * stride) & mask)
    return z - (1 << 64) if z >> 63 else z


@pytest.mark.parametrize(("seed", "golden"), [(Seed1(7), GOLDEN_1), (7, GOLDEN_2)])
def test_golden_values_pin_the_meaning_of_an_address(seed, golden):
    address = replace(HERE, seed=seed)
    assert bits(address, 4).tolist() == golden["bits"]
    assert bits(address.sub("mask"), 1).tolist() == golden["mask"]
    assert permutation(address, 8).tolist() == golden["permutation"]
    assert integers(address, 1000, 5).tolist() == golden["integers"]
    torch.testing.assert_close(normal(address, 4), torch.tensor(golden["normal"]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(uniform(address, 3), torch.tensor(golden["uniform"]))


def further(address: Address, steps: int) -> Address:
    """Return the address of the same stream that starts ``steps`` of GAMMA after another one."""
    size, gamma = 1 << 64, 0x9E3779B97F4A7C15
    z = (int(start(address)[0]) + steps * gamma) % size
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):  # mix64, undone
        whole = z
        for _ in range(3):
            z = whole ^ (z >> shift)
        z = z * pow(factor, -1, size) % size
    number = (z - address.key) * pow(gamma, -1, size) % size
    return address.at(number - size if number >> 63 else number)


@pytest.mark.parametrize(("address", "meet"), [(OLD, True), (HERE, False)])
def test_addresses_that_start_in_one_cycle_do_not_go_through_it_together(address, meet):
    later = further(address, 5)
    assert later.number != address.number
    assert int(start(later)[0]) == (int(start(address)[0]) + 5 * noise.GAMMA + 2**63) % 2**64 - 2**63
    here, there = bits(address, COUNT), bits(later, COUNT)
    assert torch.equal(here[5:], there[:-5]) == meet
    if not meet:
        assert not torch.isin(here, there).any()
        x, y = (((z >> 41) & ((1 << 23) - 1)).double().numpy() for z in (here, there))
        for shift in (0, 4, 5, 6):
            assert abs(np.corrcoef(x[shift:], y[: COUNT - shift])[0, 1]) < 5 / math.sqrt(COUNT - shift)


def test_strides_are_odd_and_differ():
    starts = torch.stack([start(HERE.at(number)) for number in range(5_000)])
    assert bool((starts[:, 1] & 1 == 1).all())
    assert len(starts[:, 0].unique()) == len(starts[:, 1].unique()) == 5_000
    ones = torch.stack([(starts[:, 1] >> position & 1).sum() for position in range(1, 64)]).double()
    assert (ones - 2_500).abs().max() < 5 * math.sqrt(5_000 / 4)


@pytest.mark.parametrize("address", [HERE, HERE.at(0), HERE.at(-5), HERE.at(2**62), OLD, *NEIGHBOURS.values()])
def test_bits_follow_the_documented_formula(address):
    assert bits(address, 20).tolist() == [splitmix(address, index) for index in range(20)]


def test_uniform_takes_the_middle_of_the_top_23_bits():
    expected = [((splitmix(HERE, index) % 2**64 >> 41) + 0.5) * 2.0**-23 for index in range(20)]
    assert uniform(HERE, 20).tolist() == expected


@pytest.mark.parametrize("number", [0, 1, 123, 2**40, -1])
def test_integer_and_tensor_numbers_agree_exactly(number):
    for tensor in (torch.tensor(number), torch.tensor([number])):
        assert torch.equal(bits(HERE.at(number), 100), bits(HERE.at(tensor), 100))
        assert torch.equal(normal(HERE.at(number), 101), normal(HERE.at(tensor), 101))
        assert tensor.item() == number  # the caller's counter is left alone


@given(some.integers(0, (1 << 63) - 1))
@pytest.mark.parametrize("address", [HERE, OLD], ids=["format 2", "format 1"])
def test_keys_and_number_as_tensors_start_where_the_address_does(address, number):
    address, device = address.at(number), torch.device("cpu")
    found = noise.start_of(noise.key_tensor(address, device), noise.number_tensor(address, device))
    assert torch.equal(found, start(address))


def test_a_tensor_number_decides_the_device():
    number = torch.zeros((), dtype=torch.int64, device="meta")
    assert bits(HERE.at(number), 3).device.type == "meta"
    assert bits(HERE.at(torch.tensor(123)), 3, device="meta").device.type == "meta"


def test_moments_of_the_normal():
    # Standard errors of mean, variance, skewness and kurtosis of n normal numbers; five of them are allowed.
    x = normal(HERE, 10 * COUNT).double().numpy()
    n = len(x)
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(stats.skew(x)) < 5 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(x)) < 5 * math.sqrt(24 / n)


def test_normal_matches_scipy_including_tails():
    x = normal(HERE, 10 * COUNT).double().numpy()
    assert stats.kstest(x, "norm").pvalue > 1e-3
    for bound in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(bound) * len(x)
        assert abs((np.abs(x) > bound).sum() - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_normal_of_any_count(count):
    x = normal(HERE, count)
    assert x.shape == (count,)
    assert len(set(x.tolist())) == count


def test_the_two_numbers_of_one_pattern_are_independent():
    # Box-Muller pairs share their radius: their squares would betray a wrong angle or radius.
    x = normal(HERE, 2 * COUNT).double().numpy()
    first, second = x[:COUNT], x[COUNT:]
    for a, b in ((first, second), (first**2, second**2), (first, second**2), (np.abs(first), np.abs(second))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(COUNT)


def test_uniform_matches_scipy_and_excludes_the_ends():
    x = uniform(HERE, 10 * COUNT)
    assert x.dtype == torch.float32
    assert stats.kstest(x.double().numpy(), "uniform").pvalue > 1e-3
    assert x.min() > 0
    assert x.max() < 1
    assert abs(x.double().mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(x))
    assert abs(x.double().var() - 1 / 12) < 5 * math.sqrt(1 / 180 / len(x))


@pytest.mark.parametrize("what", NEIGHBOURS)
@pytest.mark.parametrize("make", [normal, uniform])
def test_neighbouring_addresses_are_uncorrelated(make, what):
    here, there = (make(a, COUNT).double().numpy() for a in (HERE, NEIGHBOURS[what]))
    for shift in (0, 1, 17):
        a, b = here[shift:], there[: COUNT - shift]
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))
        assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 5 / math.sqrt(len(a))


def test_one_element_over_consecutive_numbers_is_uniform_and_uncorrelated():
    # What one weight sees during training: element 5 at steps 0, 1, 2, ...
    x = np.array([uniform(HERE.at(step), 6)[5].item() for step in range(5_000)])
    assert stats.kstest(x, "uniform").pvalue > 1e-3
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(x[lag:], x[:-lag])[0, 1]) < 5 / math.sqrt(len(x))


def test_every_bit_is_fair():
    z = bits(HERE, COUNT)
    ones = torch.stack([(z >> position & 1).sum() for position in range(64)]).double()
    assert (ones - COUNT / 2).abs().max() < 5 * math.sqrt(COUNT / 4)


def test_no_collisions_over_many_addresses():
    # 64-bit patterns: 2 million of them collide with probability 1e-7 if they are random.
    addresses = [
        Address(seed, owner, stream, number)
        for seed in range(5)
        for owner in ("peer-0", "peer-1", "data", "")
        for stream in ("step", "draw", "order", "step/mask", "")
        for number in range(-5, 15)
    ]
    everything = torch.cat([bits(address, 1_000) for address in addresses])
    assert everything.unique().numel() == everything.numel() == 2_000_000


@pytest.mark.parametrize("count", [1, 2, 10, 1_000])
def test_permutation_is_a_permutation(count):
    assert permutation(HERE, count).sort().values.tolist() == list(range(count))


def test_permutation_is_uniform_over_positions_and_orders():
    orders = torch.stack([permutation(HERE.at(epoch), 6) for epoch in range(6_000)])
    for position in range(6):
        assert stats.chisquare(orders[:, position].bincount(minlength=6).numpy()).pvalue > 1e-3
    codes = orders[:, :3] @ torch.tensor([36, 6, 1])
    counts = codes.unique(return_counts=True)[1].numpy()
    assert len(counts) == 6 * 5 * 4
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("high", [1, 2, 10, 1_000])
def test_integers_are_in_range_and_uniform(high):
    counts = integers(HERE, high, COUNT).bincount(minlength=high)
    assert len(counts) == high
    if high > 1:
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_integers_up_to_the_largest_range():
    x = integers(HERE, 2**31, COUNT)
    assert x.min() >= 0
    assert x.max() < 2**31
    assert stats.kstest(x.double().numpy() / 2**31, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("high", [0, -3, 2**31 + 1])
def test_integers_reject_an_impossible_range(high):
    with pytest.raises(InputError, match=f"high is {high}: expected 1 to"):
        integers(HERE, high, 4)


# ---- parts of a whole -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=some.integers(0, 2**31),
    number=some.integers(-5, 2**40),
    first=some.integers(0, 40),
    count=some.integers(0, 40),
    high=some.integers(1, 2**31),
)
def test_a_part_from_first_on_is_that_part_of_the_whole(seed, number, first, count, high):
    address, end = Address(seed, "data", "augment", number), first + count
    assert torch.equal(bits(address, count, first=first), bits(address, end)[first:])
    assert torch.equal(uniform(address, count, first=first), uniform(address, end)[first:])
    assert torch.equal(integers(address, high, count, first=first), integers(address, high, end)[first:])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", [*AUGMENTATIONS, "all"])
def test_augmented_parts_of_a_batch_are_parts_of_the_augmented_batch(name, dtype):
    torch.manual_seed(0)
    whole = torch.randint(0, 256, (11, 3, 8, 9), dtype=torch.uint8).to(dtype)
    names = list(AUGMENTATIONS) if name == "all" else [name]
    together = augment(whole, names, HERE)
    assert not torch.equal(together, whole)
    for first, end in ((0, 4), (4, 11), (10, 11)):
        part = augment(whole[first:end], names, HERE, first)
        torch.testing.assert_close(part, together[first:end], rtol=0, atol=1e-4 if dtype == torch.float32 else 0)
    assert not torch.equal(augment(whole[4:], names, HERE), together[4:])


# ---- compiled -------------------------------------------------------------------------------------------------------


def compiled(function, real=True):
    """By inductor where there is a compiler of C++, and otherwise traced only."""
    torch.compiler.assume_constant_result(stream_key)  # as the engine does: hashing can't be traced
    backend = "inductor" if real and shutil.which("g++") else "aot_eager"
    return torch.compile(function, dynamic=False, backend=backend)


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch):
    """No preparations that only pay in the long run; nothing is left behind."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = pytest.importorskip("torch._inductor.config")
    with config.patch({"cpp_cache_precompile_headers": False, "cpp.simdlen": 1, "compile_threads": 1}):
        yield


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own parts
@pytest.mark.usefixtures("quick_compiler")
def test_compiled_noise_is_the_same():
    def both(number):
        address = Address(7, "peer-1", "step", number)
        return bits(address, 301, first=5), normal_from(start(address), 301)

    made = compiled(both)
    for number in (0, 1, 2, 1000, 2**33 + 1):
        patterns, numbers = made(torch.tensor(number))
        assert torch.equal(patterns, bits(HERE.at(number), 301, first=5))
        assert torch.equal(normal_from(start(HERE.at(number)), 301), normal(HERE.at(number), 301))
        # The integers are the same to the last bit; that of a logarithm or a cosine is the compiler's.
        torch.testing.assert_close(numbers, normal(HERE.at(number), 301), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("names", [["crop", "flip"], ["reflect_crop"], ["rotate"], ["color_jitter"]], ids="+".join)
def test_compiled_augmentation_is_the_same(names):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 9, 8), dtype=torch.uint8)
    made = compiled(prepare_images, real=False)
    for seed, number in ((3, 0), (3, 1), (3, 12345), (4, 1)):
        found = made(images, names, seed, "data", torch.tensor(number), 2)
        eager = prepare_images(images, names, seed, "data", number, 2)
        # Angles may round differently, and a pixel with them.
        torch.testing.assert_close(found, eager, rtol=0, atol=1.01 / 255 if names == ["rotate"] else 0.0)
        assert torch.equal(eager, prepare_images(images, names, seed, "data", torch.tensor(number), 2))


@pytest.mark.parametrize("count", [1, 2, 399, 400, 401])
def test_normal_numbers_do_not_depend_on_the_pieces_they_are_made_in(count, monkeypatch):
    address = Address(3, "peer", "draw", 9)
    whole = normal(address, count)
    monkeypatch.setattr(noise, "PIECE", 37)
    assert torch.equal(normal(address, count), whole)
    again, half = torch.full((count + 1,), torch.nan), (count + 1) // 2
    for first, last, one, other in noise.normal_pieces(noise.start(address), count):
        again[first:last] = one
        again[half + first : half + last] = other[: count + 1 - half - first]
    assert torch.equal(again[:count], whole)


@pytest.mark.parametrize("count", [1, 2, 7, 1000, 300_001])
def test_noise_of_programs_is_that_of_draws(count):
    begin = start(HERE)
    assert torch.equal(noise.normal_whole(begin, count), normal_from(begin, count))


@pytest.mark.parametrize("seed", [7, noise.Seed1(7)])
def test_a_fork_is_other_noise_and_fork_0_is_the_address(seed):
    here, number = Address(seed, "peer-1", "step", 123), torch.tensor([123])
    begins = {fork: noise.start_at(noise.keys_of(here), number, torch.tensor(fork)) for fork in (0, 1, -1, 1 << 62)}
    assert torch.equal(begins[0], start(here))
    assert all(int(begin[1]) % 2 for begin in begins.values())
    found = torch.stack([normal_from(begin, COUNT) for begin in begins.values()])
    assert (torch.corrcoef(found) - torch.eye(4)).abs().max() < 5 / COUNT**0.5
