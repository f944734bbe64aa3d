"""Merging against a loop that merges pair by pair, and what must hold of its result: sums, labels, gates."""

import itertools

import pytest
import torch

from peerbayes.codebook.merging import _joined, _pairs, components_of, merge
from peerbayes.codebook.neighbours import nearest
from peerbayes.errors import InputError
from peerbayes.math.gaussians import Components, merged, wasserstein2


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def components(count, seed=0, scale=2e-4):
    """Components as of weights: so near one another that many of them merge."""
    factor = 1e-5 * normal(count, 2, 2, seed=seed)
    covariance = factor @ factor.mT + 1e-12 * torch.eye(2).double()
    number = torch.randint(20, 400, (count,), generator=torch.Generator().manual_seed(seed)).double()
    mean = float64([0.1, 1e-3]) + count**0.5 * scale * normal(count, 2, seed=seed + 1)
    return Components(mean, covariance, number)


def qualifying(found, slope, spread, neighbours=2, distance=1.5e-7, gradient_gate=0.15, lr=1e-5, spread_gate=1e-3):
    """All pairs that qualify, nearest first: (W₂², low, high)."""
    means, pairs = found.mean, set()
    square = (means[:, None] - means).square().sum(2).fill_diagonal_(torch.inf)
    for i, row in enumerate(square.argsort(dim=1, stable=True)[:, :neighbours].tolist()):
        pairs |= {(min(i, j), max(i, j)) for j in row if j != i}
    result = []
    for i, j in pairs:
        w = float(wasserstein2(means[i], found.covariance[i], means[j], found.covariance[j]))
        gates = all(lr * float(slope[k]) < gradient_gate and float(spread[k]) < spread_gate for k in (i, j))
        if w < distance and gates:
            result.append((w, i, j))
    return sorted(result)


def looped(found, slope, spread, rule, **options):
    """One round after another, each pair by pair: the best first, none with a component that has a better pair."""
    groups = [[k] for k in range(len(found))]
    while pairs := qualifying(found, slope, spread, **options):
        best = {}
        for w, i, j in pairs:
            for k in (i, j):
                best.setdefault(k, (w, i, j))
        chosen = [(i, j) for w, i, j in pairs if best[i] == best[j] == (w, i, j)]
        gone = set()
        mean, cov, count = found.mean.clone(), found.covariance.clone(), found.count.clone()
        slope, spread = slope.clone(), spread.clone()
        for i, j in chosen:
            one = merged(found.select(torch.tensor([i])), found.select(torch.tensor([j])), rule)
            a, b = float(found.count[i]), float(found.count[j])
            delta = float(found.mean[i, 0] - found.mean[j, 0])
            slope[i] = slope[i] + slope[j]
            spread[i] = (a * spread[i] + b * spread[j]) / (a + b) + a * b / (a + b) ** 2 * delta**2
            mean[i], cov[i], count[i] = one.mean[0], one.covariance[0], one.count[0]
            groups[i] = groups[i] + groups[j]
            gone.add(j)
        left = torch.tensor([k for k in range(len(found)) if k not in gone])
        found = Components(mean[left], cov[left], count[left])
        slope, spread = slope[left], spread[left]
        groups = [groups[k] for k in left.tolist()]
    return found, groups


@pytest.mark.parametrize("rule", ["moment", "barycenter", "average", "eq6"])
@pytest.mark.parametrize(("neighbours", "seed"), [(1, 0), (2, 1), (4, 2)])
def test_merging_is_that_of_a_loop_over_pairs(rule, neighbours, seed):
    start = components(60, seed, scale=7e-5)
    slope, spread = 8e3 * normal(60, seed=5).abs(), 5e-4 * normal(60, seed=6).abs()
    found, where, log = merge(start, gradient=-slope, spread=spread, neighbours=neighbours, rule=rule)
    expected, groups = looped(start, slope, spread, rule, neighbours=neighbours)
    assert 10 < len(expected) < 50
    assert log["gradient_alone"] > 0
    assert log["spread_alone"] > 0
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-9, atol=1e-24)
    assert torch.equal(found.count, expected.count)
    assert [sorted(g) for g in groups] == [(where == k).nonzero()[:, 0].tolist() for k in range(len(found))]
    assert (log["before"], log["after"], log["merged"]) == (60, len(found), 60 - len(found))


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 3e-4])
def test_no_pair_that_qualifies_is_left(scale):
    start = components(300, scale=scale)
    found, _, log = merge(start)
    assert len(found) < 300
    assert qualifying(found, torch.zeros(len(found)), found.covariance[:, 0, 0]) == []
    assert log["left"] == {"near": 0, "gradient": 0, "gradient_alone": 0, "spread": 0, "spread_alone": 0}
    again, same, once = merge(found)
    assert torch.equal(again.mean, found.mean)
    assert torch.equal(same, torch.arange(len(found)))
    assert (once["rounds"], once["merged"]) == (1, 0)


def test_merged_components_are_those_of_the_relabelled_members():
    """Labels, counts, means, covariances and spreads are what the members say, however many merges it took."""
    points = torch.tensor([0.05, 1e-3]) + normal(20000, 2) * torch.tensor([3e-3, 3e-4])
    labels = nearest(points, points[:400])[:, 0]
    start = components_of(points, labels, 400)
    found, where, _ = merge(start, distance=1e-7)
    assert 10 < len(found) < 350
    expected = components_of(points, where[labels], len(found))
    assert torch.equal(found.count, expected.count)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-9, atol=1e-20)


def test_new_numbers_keep_the_order_of_the_lowest_members():
    start = components(200)
    found, where, _ = merge(start)
    lowest = torch.tensor([int((where == k).nonzero()[0]) for k in range(len(found))])
    assert torch.equal(lowest, lowest.sort().values)
    torch.testing.assert_close(found.count.sum(), start.count.sum())


def pair_of(offset=1e-4):
    mean = float64([[0.1, 1e-3], [0.1 + offset, 1e-3]])
    covariance = 1e-10 * torch.eye(2).double().repeat(2, 1, 1)
    return Components(mean, covariance, float64([30.0, 10.0]))


def test_the_distance_is_a_strict_bound_on_the_square():
    found = merge(pair_of(1e-4), distance=1.01e-8)[0]
    assert len(found) == 1
    torch.testing.assert_close(found.mean[0, 0], torch.tensor(0.1 + 0.25e-4).double())
    assert len(merge(pair_of(1e-4), distance=0.99e-8)[0]) == 2
    assert len(merge(pair_of(0.0), distance=1e-300)[0]) == 1
    assert len(merge(pair_of(0.0), distance=0.0)[0]) == 2


@pytest.mark.parametrize(("steep", "wide"), list(itertools.product([False, True], repeat=2)))
def test_gates_block_and_are_counted(steep, wide):
    gradient = float64([0.0, -15001.0 if steep else -14999.0])
    spread = float64([1.001e-3 if wide else 0.999e-3, 0.0])
    found, where, log = merge(pair_of(), gradient=gradient, spread=spread)
    assert len(found) == (2 if steep or wide else 1)
    assert where.tolist() == ([0, 1] if steep or wide else [0, 0])
    assert (log["before"], log["after"], log["near"]) == (2, len(found), 1)
    assert (log["gradient"], log["spread"]) == (int(steep), int(wide))
    assert (log["gradient_alone"], log["spread_alone"]) == (int(steep and not wide), int(wide and not steep))
    assert log["merged"] == 2 - len(found)
    assert log["rounds"] == (1 if steep or wide else 2)


def test_gates_are_strict_and_the_spread_is_that_of_the_means_unless_given():
    gate, wide = 2.0**-10, torch.diag(float64([2.0**-10, 1e-10])).repeat(2, 1, 1)
    for covariance, closed in ((wide, True), (wide.flip(1, 2), False)):
        start = Components(pair_of().mean, covariance, float64([30.0, 10.0]))
        _, _, log = merge(start, spread_gate=gate)
        assert (log["spread_alone"], log["merged"]) == (int(closed), int(not closed))
    for slope, closed in ((gate, True), (0.999 * gate, False)):
        _, _, log = merge(pair_of(), gradient=float64([slope, 0.0]), lr=1.0, gradient_gate=gate)
        assert (log["gradient_alone"], log["merged"]) == (int(closed), int(not closed))


def test_what_is_given_in_float32_is_taken_in_float64():
    start = components(60, scale=7e-5)
    slope, spread = 8e3 * normal(60, seed=5).float(), 5e-4 * normal(60, seed=6).abs().float()
    found, where, log = merge(start, gradient=slope, spread=spread)
    expected, same, told = merge(start, gradient=slope.double(), spread=spread.double())
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(where, same)
    assert log == told
    assert log["merged"] > 0


def three():
    """0 and 1 merge first; then the result and 2, if what it has passes the gates."""
    mean = float64([[0.0, 0.0], [1e-5, 0.0], [1e-4, 0.0]])
    return Components(mean, 1e-10 * torch.eye(2).double().repeat(3, 1, 1), float64([30.0, 10.0, 5.0]))


def test_what_a_merged_component_has():
    slope, spread = float64([1000.0, 3000.0, 7.0]), float64([4e-8, 8e-8, 1e-9])
    left, slope, spread, where = _joined(three(), slope, spread, torch.tensor([[0], [1]]), "moment")
    torch.testing.assert_close(slope, float64([4000.0, 7.0]))
    torch.testing.assert_close(spread, float64([5e-8 + 3 / 16 * 1e-10, 1e-9]), rtol=1e-12, atol=0)
    assert where.tolist() == [0, 0, 1]
    assert left.count.tolist() == [40.0, 5.0]
    nothing = Components(three().mean, three().covariance, torch.zeros(3).double())
    given = slope.new_zeros(3), float64([4e-8, 8e-8, 0.0])
    left, _, spread, _ = _joined(nothing, *given, torch.tensor([[0], [1]]), "moment")
    torch.testing.assert_close(left.mean[0], float64([5e-6, 0.0]))
    torch.testing.assert_close(spread[0], float64(6e-8 + 1e-10 / 4), rtol=1e-12, atol=0)


def test_the_pooled_spread_counts_in_the_next_round():
    """Points apart by 1e-5 have a pooled variance of 3/16 · 1e-10, though neither has any."""
    none, pooled = torch.zeros(3).double(), 3 / 16 * 1e-10
    assert merge(three(), spread=none, spread_gate=1.01 * pooled)[1].tolist() == [0, 0, 0]
    _, where, log = merge(three(), spread=none, spread_gate=0.99 * pooled)
    assert where.tolist() == [0, 0, 1]
    assert log["left"] == {"near": 1, "gradient": 0, "gradient_alone": 0, "spread": 1, "spread_alone": 1}


def test_a_blocked_pair_does_not_keep_others_from_merging():
    mean = float64([[0.0, 0.0], [1e-5, 0.0], [5e-5, 0.0]])
    start = Components(mean, 1e-10 * torch.eye(2).double().repeat(3, 1, 1), torch.ones(3).double())
    _, where, log = merge(start, gradient=float64([1e9, 0.0, 0.0]))
    assert where.tolist() == [0, 1, 1]
    assert log["merged"] == 1
    assert log["left"]["gradient_alone"] == 1


def test_many_at_one_place_become_one():
    start = Components(
        torch.full((40, 2), 0.1).double(), 1e-10 * torch.eye(2).double().repeat(40, 1, 1), torch.ones(40).double()
    )
    found, where, log = merge(start)
    assert found.count.tolist() == [40.0]
    assert log["after"] == 1
    assert set(where.tolist()) == {0}
    torch.testing.assert_close(found.covariance, start.covariance[:1])


def test_pairs_are_those_of_the_nearest_others():
    """Also where ties hide a component from its own list."""
    assert _pairs(torch.ones(5, 2).double(), 1).T.tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]]
    line = float64([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [3.5, 0.0]])
    assert _pairs(line, 1).T.tolist() == [[0, 1], [2, 3]]
    assert _pairs(line, 2).T.tolist() == [[0, 1], [0, 2], [1, 2], [1, 3], [2, 3]]
    assert _pairs(line, 9).shape == (2, 6)


def test_one_component_stays():
    found, where, log = merge(components(1))
    assert (len(found), where.tolist(), log["rounds"], log["near"]) == (1, [0], 1, 0)


def test_wrong_arguments_are_told():
    start = components(3)
    with pytest.raises(InputError, match="neighbours is 0: expected 1 or more"):
        merge(start, neighbours=0)
    with pytest.raises(
        InputError, match=r"gradient is a torch.float32 tensor of shape \(2,\): .* each of 3 components"
    ):
        merge(start, gradient=torch.zeros(2))
    with pytest.raises(InputError, match=r"spread is a torch.int64 tensor of shape \(3,\)"):
        merge(start, spread=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="rule is 'moments'; did you mean 'moment'"):
        merge(pair_of(), rule="moments")
