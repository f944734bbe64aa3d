"""The coded index: every bit comes back, in as few bytes as the entropy allows, and damage is one sentence."""

import itertools
import lzma
import math
import random
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerbayes.codebook import coder as index_codec
from peerbayes.codebook.coder import arrange, decode, encode
from peerbayes.errors import InputError

HEAD = len(index_codec.MAGIC) + index_codec.DIGEST
GOLDEN = (
    "706269016c1b07b641c7ce3e1a000000e0001d0012000000e10c0909fc985fc3f7177ae09a8d9700000083176158090100002376"
    "d724d50e831d64f267b79aff216bcf2312ad61d62987555555555515555500005555"
)


def entropy(symbols):
    """Bits of all symbols under their own frequencies."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(counts @ np.log2(len(symbols) / counts))


def gaussian(generator, size, scale, alphabet):
    """Symbols like the components of a layer: a Gaussian cut into equal cells, outliers the last symbol."""
    cells = np.floor((generator.normal(0, scale, size) + 1) / 2 * (alphabet - 1)).astype(np.int64)
    return np.where((cells < 0) | (cells >= alphabet - 1), alphabet - 1, cells)


def signed(data, alphabet, parts):
    """The bytes with the digest that belongs to them."""
    return index_codec.MAGIC + index_codec._digest(data[HEAD:], alphabet, parts) + data[HEAD:]


def tables_of(data):
    """The integers of the tables, and where they end."""
    end = HEAD + 4 + int.from_bytes(data[HEAD : HEAD + 4], "little")
    return index_codec._unsqueeze(memoryview(data)[HEAD + 4 : end], 1 << 20), end


def with_tables(data, alphabet, parts, change):
    """The bytes with other tables: ``change`` gets the integers and returns new ones."""
    values, end = tables_of(data)
    squeezed = index_codec._squeeze(change(values))
    return signed(data[:HEAD] + len(squeezed).to_bytes(4, "little") + squeezed + data[end:], alphabet, parts)


# ---- round trip ------------------------------------------------------------------------------------------------------


@st.composite
def indices(draw):
    alphabet = draw(st.one_of(st.integers(1, 4), st.integers(1, 70), st.integers(1, 100_000)))
    parts = draw(st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(60, 400)), max_size=6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = sum(parts)
    kind = draw(st.sampled_from(["uniform", "one", "skewed", "apart", "distinct"]))
    if kind == "one":
        symbols = np.full(size, generator.integers(alphabet))
    elif kind == "skewed":
        symbols = np.minimum(generator.geometric(0.5, size) - 1, alphabet - 1)
    elif kind == "apart":
        symbols = np.repeat(np.arange(len(parts)), parts) % alphabet
    elif kind == "distinct" and size <= alphabet:
        symbols = generator.permutation(alphabet)[:size]
    else:
        symbols = generator.integers(0, alphabet, size)
    return symbols, alphabet, parts


@settings(max_examples=300, deadline=None)
@given(indices())
def test_every_symbol_comes_back(given_index):
    symbols, alphabet, parts = given_index
    found = decode(encode(symbols, alphabet, parts), alphabet, parts)
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.from_numpy(symbols.astype(np.int64)))


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 16384])
def test_any_number_of_lanes_gives_back_the_symbols(steps, monkeypatch):
    monkeypatch.setattr(index_codec, "STEPS", steps)
    generator = np.random.default_rng(0)
    parts = [1, 700, 0, 5, 301]
    symbols = np.minimum(generator.geometric(0.1, sum(parts)) - 1, 50)
    assert torch.equal(decode(encode(symbols, 51, parts), 51, parts), torch.from_numpy(symbols))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tensors_and_arrays_of_any_integer_are_the_same(dtype):
    symbols = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6], dtype=dtype)
    expected = encode(symbols.numpy().astype(np.uint64), 10, [3, 5])
    assert encode(symbols, 10, [3, 5]) == encode(symbols.numpy(), 10, [3, 5]) == expected
    assert decode(expected, 10, [3, 5]).tolist() == symbols.tolist()


def test_more_than_2_to_16_symbols_come_back():
    symbols = np.random.default_rng(0).permutation(150_000)[:140_000]
    data = encode(symbols, 150_000, [140_000])
    assert torch.equal(decode(data, 150_000, [140_000]), torch.from_numpy(symbols))
    assert len(data) < 1.01 * entropy(symbols) / 8 + 150_000 / 8 + 1000  # which of them occur: less than a bit each


def test_todays_bytes_are_read_for_ever():
    data = bytes.fromhex(GOLDEN)
    symbols = [(i * i) % 7 if i < 100 else 7 - i % 2 for i in range(200)]
    assert decode(data, 9, [100, 0, 100]).tolist() == symbols


def test_a_textbook_decoder_reads_the_bytes(monkeypatch):
    """One symbol after another with Python's integers, from the description of the format."""
    monkeypatch.setattr(index_codec, "STEPS", 100)
    generator = np.random.default_rng(3)
    parts, alphabet = [400, 250, 30], 12
    rows = [gaussian(generator, size, scale, alphabet) for size, scale in zip(parts, (0.2, 0.5, 0.3), strict=True)]
    data = encode(np.concatenate(rows), alphabet, parts)[HEAD:]
    start = 4 + int.from_bytes(data[:4], "little")
    values = index_codec._unsqueeze(memoryview(data)[4:start], 10_000)
    shared, tables = index_codec._read_tables(values, alphabet, index_codec._slices(parts))
    states = [int.from_bytes(data[start + 8 * i : start + 8 * i + 8], "little") for i in range(7)]
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(start + 56, len(data), 4)]
    found = []
    for table, part in zip(tables, parts, strict=True):
        frequencies = shared.code_of(table).frequencies.tolist()
        for number in range(part):
            lane = number % 7
            whole, slot = divmod(states[lane], 2**16)
            rank = 0
            while slot >= frequencies[rank]:
                slot -= frequencies[rank]
                rank += 1
            found.append(int(shared.symbols[rank]))
            states[lane] = frequencies[rank] * whole + slot
            if states[lane] < 2**32:
                states[lane] = states[lane] * 2**32 + words.pop(0)
    assert found == np.concatenate(rows).tolist()
    assert not words
    assert states == [2**32] * 7


# ---- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alphabet", "scale"), [(100, 0.3), (1000, 0.3), (1000, 0.05), (4000, 0.4)])
def test_a_layer_needs_little_more_than_its_entropy(alphabet, scale):
    symbols = gaussian(np.random.default_rng(1), 300_000, scale, alphabet)
    data = encode(symbols, alphabet, [300_000])
    used = len(np.unique(symbols))
    # a lane of 16384 symbols costs 8 bytes, a symbol of the table less than a byte
    assert entropy(symbols) / 8 < len(data) < 1.0005 * entropy(symbols) / 8 + 8 * 19 + used + 60


def test_layers_that_differ_are_coded_by_their_own_entropies():
    generator = np.random.default_rng(2)
    scales = (0.05, 0.1, 0.2, 0.4)
    rows = [gaussian(generator, 50_000, scale, 2000) for scale in scales]
    symbols = np.concatenate(rows)
    size = 8 * len(encode(symbols, 2000, [50_000] * 4))
    apart, together = sum(map(entropy, rows)), entropy(symbols)
    true = sum(50_000 * math.log2(scale * 1000 * math.sqrt(2 * math.pi * math.e)) for scale in scales)
    assert apart < true * 1.001 < together
    assert size < true + 0.1 * (together - true)  # nine tenths of what there is to gain, tables included
    assert size < 8 * len(encode(symbols, 2000, [200_000])) - 0.9 * (together - true)


def test_layers_with_symbols_of_their_own_pay_for_those_alone():
    generator = np.random.default_rng(4)
    rows = [generator.integers(100 * layer, 100 * layer + 100, 20_000) for layer in range(5)]
    size = len(encode(np.concatenate(rows), 500, [20_000] * 5))
    assert size < 100_000 * math.log2(100) / 8 * 1.005 + 300


def test_small_layers_share_a_table():
    symbols = gaussian(np.random.default_rng(5), 40_000, 0.3, 500)
    one, many = encode(symbols, 500, [40_000]), encode(symbols, 500, [100] * 400)
    assert len(many) < len(one) + 400 / 8
    assert torch.equal(decode(many, 500, [100] * 400), torch.from_numpy(symbols))


def test_one_symbol_costs_nothing_a_weight():
    assert len(encode(np.full(1_000_000, 4), 10, [1_000_000])) < 8 * 62 + 60


def test_an_arrangement_puts_components_of_a_layer_side_by_side():
    generator = np.random.default_rng(6)
    means = generator.normal(size=400)
    layer_of = generator.integers(0, 4, 400)  # which layer uses which component
    parts = [5000] * 4
    rows = [generator.choice(np.flatnonzero(layer_of == layer), 5000) for layer in range(4)]
    symbols = np.concatenate(rows)
    symbols[::50] = 400
    order = arrange(torch.from_numpy(symbols), torch.from_numpy(means), parts)
    assert sorted(order.tolist()) == list(range(400))
    assert order.tolist() == sorted(range(400), key=lambda component: (layer_of[component], means[component]))
    numbers = np.append(np.argsort(order), 400)
    assert len(encode(numbers[symbols], 401, parts)) < len(encode(symbols, 401, parts)) - 160  # 4 x 400 x H(1/4) bits


def test_an_arrangement_goes_by_the_layer_on_average_however_few_weights_there_are():
    symbols = np.array([2, 4, 0, 0, 9, 3, 4, 3, 3])
    means = np.array([0.5, -1.0, -2.0, 0.1, 0.0])
    # By layer: 2 in the first, 1 in none, 4 in 0 and 2, 0 in 1 alone, 3 in 2 alone; 9 is no component.
    assert arrange(symbols, means, [2, 0, 3, 4]).tolist() == [2, 1, 4, 0, 3]
    alone = np.array([3, 1, 0, 2])
    assert arrange(alone, np.zeros(4), [1, 1, 1, 1]).tolist() == [3, 1, 0, 2]


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("symbols", "bits"),
    [(1, 16), (2047, 16), (2048, 17), (4096, 18), (131_071, 18), (131_072, 19), (1 << 20, 22)],
)
def test_how_many_slots_there_are_is_a_part_of_the_format(symbols, bits):
    shared = index_codec._Shared(np.arange(symbols), np.ones(symbols))
    assert shared.bits == bits
    assert 1 << bits > 2 * symbols


@pytest.mark.parametrize("symbols", [2, 3, 4, 5, 1023, 1024, 1025])
def test_the_finest_table_has_a_bin_for_every_symbol(symbols):
    shared = index_codec._Shared(np.arange(symbols), np.ones(symbols))
    level = shared.finest(10**6)
    assert len(shared.starts(level)) == symbols
    assert 1 << (level - 1) < symbols


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 10**9)), min_size=1, max_size=60), st.integers(16, 26))
def test_frequencies_are_proportional_and_fill_the_slots(weights, bits):
    weights = np.array([*weights, 1], np.float64)
    found = index_codec._frequencies(weights, bits)
    assert found.sum() == 1 << bits
    assert ((found > 0) == (weights > 0)).all()
    shares = weights / weights.sum() * (1 << bits)
    if (shares[weights > 0] >= 1).all():
        assert np.abs(found - shares).max() < 1.01
    else:  # what the rarest got beyond their share, the others gave in proportion
        given_up = np.maximum(1 - shares[weights > 0], 0).sum()
        room = (1 << bits) - given_up
        assert (found >= shares * (1 - 2 * given_up / room) - 1.01).all()
        assert (found <= np.maximum(shares, 1) + 1.01).all()


def test_frequencies_lose_nothing_measurable():
    weights = np.random.default_rng(0).integers(1, 10_000, 6000).astype(np.float64)
    found = index_codec._frequencies(weights, 18) / (1 << 18)
    share = weights / weights.sum()
    assert 0 <= share @ np.log2(share / found) < 2e-4


def test_roots_add_up_exactly_when_some_counts_have_them():
    for roots in itertools.product(range(4), repeat=3):
        counts = [[c for c in range(20) if round(math.sqrt(c)) == root] for root in roots]
        sizes = {sum(chosen) for chosen in itertools.product(*counts)}
        for size in range(45):
            assert index_codec._adds_up(np.array(roots), size) == (size in sizes), (roots, size)


def test_bins_have_about_equal_mass_and_lose_no_symbol():
    mass = np.random.default_rng(0).integers(1, 200, 1000).astype(np.float64)
    shared = index_codec._Shared(np.arange(1000), mass)
    for level in range(1, 10):
        starts = shared.starts(level)
        assert starts[0] == 0
        assert len(starts) <= 1 << level
        bins = np.add.reduceat(mass, starts)
        assert bins.sum() == mass.sum()
        assert np.abs(bins - mass.sum() / (1 << level)).max() <= 400 or len(starts) < 1 << level
        ends = list(itertools.accumulate(map(int, mass)))
        middles = [end - int(m) // 2 for end, m in zip(ends, mass, strict=True)]  # a symbol is where its middle is
        numbers = [middle * (1 << level) // (ends[-1] + 1) for middle in middles]
        assert starts.tolist() == [i for i in range(1000) if i == 0 or numbers[i] != numbers[i - 1]]
    assert shared.starts(10).tolist() == list(range(1000))


def test_a_reshaped_table_keeps_every_symbol_of_the_bins_that_occur():
    mass = np.array([1, 10**8, 1, 1, 10**8, 2, 3], np.float64)  # two bins, both with rare symbols
    shared = index_codec._Shared(np.arange(7), mass)
    assert shared.starts(1).tolist() == [0, 4]
    for roots in ([1, 0], [0, 30], [1, 20], [1, 1]):
        found = shared.code_of(index_codec._Frequencies(slice(0, 900), 1, np.array(roots))).frequencies
        assert ((found > 0) == np.repeat(np.array(roots) > 0, [4, 3])).all()
        share = np.add.reduceat(found, [0, 4]) / 2**16
        np.testing.assert_allclose(share, np.square(roots) / np.square(roots).sum(), atol=7 / 2**16)


def test_tables_of_layers_are_bounded_by_their_size():
    for symbols, size in itertools.product((1, 2, 60, 1025, 100_000), (1, 63, 64, 65, 4096, 10**6)):
        shared = index_codec._Shared(np.arange(symbols), np.ones(symbols))
        level = shared.finest(size)
        assert len(shared.starts(level)) <= 2 * size
        assert level == 0 or symbols <= 16 * size
    assert index_codec._Shared(np.arange(1000), np.ones(1000)).finest(1000) == 10


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("symbols", "alphabet", "parts", "sentence"),
    [
        (np.array([0, 1, 5]), 5, [3], "expected symbols in 0..4, got 0..5"),
        (np.array([0, -1]), 5, [2], "expected symbols in 0..4, got -1..0"),
        (np.array([2**63], np.uint64), 5, [1], "expected symbols in 0..4"),
        (np.array([0.0, 1.0]), 5, [2], "expected a row of 2 integers, got float64"),
        (torch.zeros(2, 2, dtype=torch.long), 5, [4], "expected a row of 4 integers"),
        (np.array([0, 1]), 5, [1], "expected a row of 1 integers"),
        (np.array([0]), 0, [1], "kinds of symbols, got 0"),
        (np.array([0]), 1 << 25, [1], "kinds of symbols"),
        (np.array([0]), 5, [2, -1], "expected parts of 0 or more symbols"),
    ],
)
def test_what_cannot_be_coded_is_refused(symbols, alphabet, parts, sentence):
    with pytest.raises(InputError, match=sentence):
        encode(symbols, alphabet, parts)


SYMBOLS = np.concatenate([np.arange(600) % 40, 40 + np.arange(300) % 17, np.full(20, 57)])
PARTS = [600, 300, 20]
ALPHABET = 60


def refused(data, alphabet=ALPHABET, parts=PARTS):
    """The sentence of the one error."""
    with pytest.raises(InputError) as caught:
        decode(data, alphabet, parts)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def test_damage_and_strangers_are_told_apart():
    data = encode(SYMBOLS, ALPHABET, PARTS)
    assert "digest" in refused(data[:-1])
    assert "digest" in refused(data + b"\0")
    assert "digest" in refused(data, alphabet=61)
    assert "digest" in refused(data, parts=[300, 600, 20])
    assert "digest" in refused(data, parts=[600, 300, 0, 20])
    assert "digest" in refused(data, parts=[10**9])
    assert "first bytes" in refused(b"")
    assert "first bytes" in refused(data[:13])
    assert "first bytes" in refused(b"PK\x03\x04" + data[4:])
    assert "parts" in refused(data, parts=[-1])
    assert "parts" in refused(data, parts=[1 << 60])


def test_every_flipped_bit_is_seen():
    data = encode(SYMBOLS, ALPHABET, PARTS)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        refused(bytes(changed))


def test_every_cut_is_seen_even_with_a_digest_that_is_right():
    data = encode(SYMBOLS, ALPHABET, PARTS)
    for end in range(len(data)):
        refused(data[:end])
        refused(signed(data[:end], ALPHABET, PARTS))
    for more in range(1, 9):
        refused(signed(data + bytes(more), ALPHABET, PARTS))


def test_tables_that_do_not_add_up_are_refused():
    data = encode(SYMBOLS, ALPHABET, PARTS)
    levels = tables_of(data)[0][:3]
    assert levels[0] > 0  # so that all below is reached
    assert levels[1] > 0
    assert levels[2] == 0

    def sentence(at, value):
        def change(values):
            values[at] = value
            return values

        return refused(with_tables(data, ALPHABET, PARTS, change))

    assert "shared table" in sentence(3, 65535)
    assert "shared table" in sentence(slice(3, 3 + ALPHABET), 0)
    assert "shared table" in sentence(slice(3, 3 + ALPHABET), 1)
    assert "level 17" in sentence(0, 17)
    assert "level 65535" in sentence(2, 65535)
    assert "level 1" in sentence(2, 1)
    assert "table of a layer of 600" in sentence(3 + ALPHABET, 65535)
    assert "table of a layer of 600" in sentence(slice(3 + ALPHABET, None), 0)
    assert "shared table" in refused(with_tables(data, ALPHABET, PARTS, lambda values: values[:40]))
    assert "shared table" in refused(with_tables(data, ALPHABET, PARTS, lambda values: values[:0]))
    assert "table of a layer of 300" in refused(with_tables(data, ALPHABET, PARTS, lambda values: values[:-1]))
    assert "wrong length" in refused(with_tables(data, ALPHABET, PARTS, lambda values: np.append(values, 0)))
    bomb = with_tables(data, ALPHABET, PARTS, lambda values: np.repeat(values, 10**5))
    assert "wrong length" in refused(bomb)


def test_packed_tables_are_whole_and_alone():
    data = encode(SYMBOLS, ALPHABET, PARTS)
    end = tables_of(data)[1]

    def sentence(squeezed):
        changed = data[:HEAD] + len(squeezed).to_bytes(4, "little") + squeezed + data[end:]
        return refused(signed(changed, ALPHABET, PARTS))

    squeezed = data[HEAD + 4 : end]
    plain = lzma.decompress(squeezed, lzma.FORMAT_RAW, filters=index_codec.LZMA)
    assert "wrong length" in sentence(squeezed[:-1])
    assert "wrong length" in sentence(squeezed + b"\0")
    assert "wrong length" in sentence(lzma.compress(plain[:-1], lzma.FORMAT_RAW, filters=index_codec.LZMA))
    assert "wrong length" in sentence(b"")
    assert "unpacked" in sentence(b"\x7f" + squeezed[1:])


def mutated(data, chance):
    """The bytes with one fault or some: cut, grown, flipped, overwritten, moved together, doubled."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.choice((chance.randrange(len(changed) + 1), chance.randrange(40)))
        kind = chance.randrange(6)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            changed[at:at] = chance.randbytes(chance.choice((1, 4, 8, 100)))
        elif kind == 2:
            changed[at : at + 1] = bytes(b ^ 1 << chance.randrange(8) for b in changed[at : at + 1])
        elif kind == 3:
            changed[at : at + 4] = chance.choice((bytes(4), b"\xff" * 4, b"\xff\xff\xff\x7f", chance.randbytes(4)))
        elif kind == 4:
            del changed[at : at + chance.choice((1, 4, 8, 30))]
        else:
            changed[at:at] = changed[at : at + chance.choice((1, 4, 8, 30))]
    return bytes(changed)


def mutated_tables(values, chance):
    """Tables with some integers changed, and some cut short or grown."""
    for _ in range(chance.choice((1, 1, 2, 10))):
        at = chance.choice((chance.randrange(len(values)), min(chance.randrange(6), len(values) - 1)))
        values[at] = chance.choice((0, 1, values[at] + 1, abs(values[at] - 1), 65535, chance.randrange(65536)))
    values = values[: chance.choice((len(values), len(values), chance.randrange(len(values) + 1)))]
    return np.append(values, chance.choice(([], [], [0], [1, 2, 3]))).astype(np.int64)


@pytest.mark.parametrize("kind", ["plain", "signed", "tables"])
@pytest.mark.parametrize(
    ("symbols", "alphabet", "parts"),
    [
        (SYMBOLS, ALPHABET, PARTS),
        (np.minimum(np.random.default_rng(0).geometric(0.3, 300) - 1, 30), 31, [100, 0, 200]),
        (np.random.default_rng(1).permutation(200)[:150], 1000, [150]),
        (np.full(300, 3), 5, [150, 150]),
    ],
    ids=["layers", "skewed", "distinct", "one"],
)
def test_damaged_bytes_are_one_sentence_or_a_valid_index(symbols, alphabet, parts, kind):
    """400 faults each; benchmarks/index_codec.py --fuzz makes as many as one likes."""
    chance = random.Random(f"{kind} {alphabet}")
    data = encode(symbols, alphabet, parts)
    sentences = set()
    for _ in range(400):
        if kind == "tables":
            changed = with_tables(data, alphabet, parts, lambda values: mutated_tables(values, chance))
        else:
            changed = mutated(data, chance)
            changed = signed(changed, alphabet, parts) if kind == "signed" else changed
        if changed == data:
            continue
        try:
            found = decode(changed, alphabet, parts)
        except InputError as error:
            sentences.add(str(error))
        else:
            assert kind != "plain"
            assert found.shape == symbols.shape
            assert 0 <= found.min() <= found.max() < alphabet
    assert sentences
    assert all(sentence.startswith("index: ") and "\n" not in sentence for sentence in sentences)


def test_absurd_data_are_refused_at_once_and_in_little_memory():
    zeros = index_codec._squeeze(np.zeros(10**7, np.int64))
    body = len(zeros).to_bytes(4, "little") + zeros
    head = bytes(HEAD)
    absurd = [
        (body, 10, [100]),  # a packed table of 20 MB
        (b"\xff\xff\xff\xff" + bytes(1000), 10, [100]),
        (b"\xff\xff\xff\x7f" + bytes(1000), 10, [1 << 30]),
        (bytes(1000), 1 << 24, [1 << 31]),  # sizes that only the caller believes
        (body, 1 << 20, [0]),
    ]
    tracemalloc.start()
    start = time.perf_counter()
    for rest, alphabet, parts in absurd:
        refused(signed(head + rest, alphabet, parts), alphabet, parts)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 2
    assert peak < 50 * 2**20


def test_memory_is_a_small_multiple_of_the_sizes(monkeypatch):
    monkeypatch.setattr(index_codec, "STEPS", 500)  # fewer steps, which tracemalloc slows down
    for symbols, alphabet, parts in [
        (np.random.default_rng(0).integers(0, 3000, 400_000), 3000, [100_000] * 4),
        (np.random.default_rng(0).permutation(300_000), 300_000, [300_000]),
        (np.zeros(400_000, np.int64), 1, [400_000]),
    ]:
        data = encode(symbols, alphabet, parts)
        tracemalloc.start()
        decode(data, alphabet, parts)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * (len(symbols) + alphabet + len(data))
