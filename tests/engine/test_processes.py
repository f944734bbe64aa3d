"""Processes that train together: two real ones over gloo must compute what one does at the global batch."""

import copy
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
import warnings
from datetime import timedelta

import pytest
import torch
from torch import nn

from peerbayes.engine.processes import ALONE, World, joined, restarted
from peerbayes.engine.synchronised import gather_batch, synchronise_batch_norm
from peerbayes.errors import InputError
from peerbayes.math import divergences
from peerbayes.posteriors import MeanField

posix = pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
SIZE = 2
SPAWN = multiprocessing.get_context("spawn")


# ---- two processes that do what they are told -----------------------------------------------------------------------


def join_by_hand(rank, port):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    return joined("cpu")


def serve(rank, port, connection):
    with join_by_hand(rank, port) as world:
        while (order := pickle.loads(connection.recv_bytes())) is not None:
            try:
                answer = True, order(world)
            except Exception:
                answer = False, traceback.format_exc()
            connection.send_bytes(pickle.dumps(answer))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def both():
    """Call a function of this file with the world in two processes at once, and return what each returned."""
    port, ends, workers = free_port(), [], []
    for rank in range(SIZE):
        mine, theirs = SPAWN.Pipe()
        workers.append(SPAWN.Process(target=serve, args=(rank, port, theirs), daemon=True))
        workers[-1].start()
        ends.append(mine)

    def call(function):
        for end in ends:
            end.send_bytes(pickle.dumps(function))
        assert all(end.poll(120) for end in ends), "no answer"
        answers = [pickle.loads(end.recv_bytes()) for end in ends]
        for done, found in answers:
            assert done, found
        return [found for _, found in answers]

    yield call
    for end in ends:
        end.send_bytes(pickle.dumps(None))
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0]


def share(batch, world):
    rows = len(batch) // world.size
    return batch[world.rank * rows : (world.rank + 1) * rows]


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ---- averages and flags ---------------------------------------------------------------------------------------------


def averages(world):
    single = torch.full((3,), float(world.rank))
    several = [torch.arange(6.0).view(2, 3).T * (world.rank + 1), torch.tensor(4.0 * world.rank), torch.empty(0)]
    flats = []
    for _ in range(3):
        tensors = [tensor.clone() for tensor in several]
        world.average(tensors)
        flats.append([flat.data_ptr() for flat, _ in world._flats.values()])
    world.average([single])
    world.average([])
    return single, tensors, flats


def test_average_is_the_mean_in_place_in_one_buffer(both):
    for single, tensors, flats in both(averages):
        assert single.tolist() == [0.5] * 3
        assert torch.equal(tensors[0], torch.arange(6.0).view(2, 3).T * 1.5)
        assert tensors[1].item() == 2.0
        assert flats[0] == flats[1] == flats[2]
        assert len(flats[0]) == 1


def count_collectives(world):
    calls = []
    plain = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *args, **options: (calls.append(args[0].numel()), plain(*args, **options))
    try:
        world.average([torch.ones(5), torch.ones(2, 2), torch.ones(())])
    finally:
        torch.distributed.all_reduce = plain
    return calls


def test_average_is_one_message(both):
    assert both(count_collectives) == [[10], [10]]


def flags(world):
    found = [world.any(world.rank == 1), world.any(world.rank == 0), world.any(False), world.any(True)]
    started = time.monotonic()
    if world.is_first:
        time.sleep(0.5)
    world.barrier()
    return found, time.monotonic() - started


def test_any_and_barrier(both):
    for found, waited in both(flags):
        assert found == [True, True, False, True]
        assert waited > 0.4


def buffers(world):
    module = nn.Module()
    constant = torch.tensor([0.1, -torch.inf, 3e-39, torch.inf])
    module.register_buffer("constant", constant.clone())
    module.register_buffer("moving", torch.tensor([1.0, 3.0]) * (2 * world.rank + 1))
    module.register_buffer("wide", torch.full((2, 2), 1e-9 * world.rank, dtype=torch.float64))
    module.register_buffer("short", torch.tensor([2.0, 4.0], dtype=torch.bfloat16) * world.rank)
    module.register_buffer("count", torch.tensor(7 + world.rank))
    world.mean_buffers(module)
    return module.state_dict(), constant


def test_mean_buffers(both):
    for rank, (found, constant) in enumerate(both(buffers)):
        assert torch.equal(found["constant"], constant)
        assert found["moving"].tolist() == [2.0, 6.0]
        close(found["wide"], torch.full((2, 2), 0.5e-9, dtype=torch.float64), 1e-20)
        assert found["short"].tolist() == [1.0, 2.0]
        assert found["count"].item() == 7 + rank


def test_alone_nothing_is_sent():
    tensor = torch.ones(3)
    ALONE.average([tensor])
    ALONE.barrier()
    network = nn.Sequential(nn.BatchNorm1d(3))
    ALONE.mean_buffers(network)
    synchronise_batch_norm(network, ALONE)
    assert type(network[0]) is nn.BatchNorm1d
    assert gather_batch(tensor, ALONE) is tensor
    assert ALONE.any(True) is True
    assert ALONE.any(False) is False
    assert ALONE.is_first


# ---- batch-norm -----------------------------------------------------------------------------------------------------


class Shouting(nn.BatchNorm2d):
    """A subclass with a forward of its own, as timm has them."""

    def forward(self, inputs):
        return torch.relu(super().forward(inputs)) + 1


class Frozen(nn.BatchNorm2d):
    """Keeps to its running statistics while the rest trains."""

    def forward(self, inputs):
        mean, var = self.running_mean, self.running_var
        return nn.functional.batch_norm(inputs, mean, var, self.weight, self.bias, training=False, eps=self.eps)


def normalised(kind="plain"):
    torch.manual_seed(0)
    norms = {
        "plain": lambda: nn.BatchNorm2d(4),
        "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
        "without scale": lambda: nn.BatchNorm2d(4, affine=False, eps=0.1, momentum=0.3),
        "without bias": lambda: nn.BatchNorm2d(4, bias=False),
        "untracked": lambda: nn.BatchNorm2d(4, track_running_stats=False),
        "own forward": lambda: Shouting(4),
        "frozen": lambda: Frozen(4),
    }
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), norms[kind](), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten(2), nn.BatchNorm1d(3),
        nn.Unflatten(2, (2, 1, 2)), nn.BatchNorm3d(3), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 2),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return network.double()


KINDS = ["plain", "cumulative", "without scale", "untracked", "own forward", "frozen"]
if "bias" in inspect.signature(nn.BatchNorm2d).parameters:  # not in torch 2.11
    KINDS.append("without bias")


def data():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 5, 5, dtype=torch.float64, generator=generator)
    images[:4] += 5  # the processes' batches differ in mean and spread
    images[4:] *= 3
    return images, torch.arange(8) % 2


def learn(network, world, images, labels):
    for start in (0, 1, 2):
        network.zero_grad()
        inputs = share(images.roll(start, 0), world).requires_grad_()
        loss = nn.functional.cross_entropy(network(inputs), share(labels.roll(start, 0), world))
        loss.backward()
        world.average([p.grad for p in network.parameters()])
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
    network.eval()
    return {
        "gradients": {name: p.grad for name, p in network.named_parameters()},
        "inputs": inputs.grad / world.size,
        "state": network.state_dict(),
        "judged": network(images).detach(),
    }


def learn_all(world):
    found = {}
    for kind in KINDS:
        network = normalised(kind)
        synchronise_batch_norm(network, world)
        found[kind] = learn(network, world, *data())
    return found


def test_synchronised_batch_norm_is_that_of_the_global_batch(both):
    found = both(learn_all)
    for kind in KINDS:
        expected = learn(normalised(kind), ALONE, *data())
        for part in ("gradients", "state", "judged"):
            close(found[0][kind][part], expected[part])
            close(found[1][kind][part], expected[part])
        close(torch.cat([answers[kind]["inputs"] for answers in found]), expected["inputs"])
        for name, tensor in found[0][kind]["state"].items():
            assert torch.equal(tensor, found[1][kind]["state"][name]), (kind, name)


def learn_without(world):
    return learn(normalised(), world, *data())


def test_the_comparison_notices_statistics_a_process(both):
    expected = learn(normalised(), ALONE, *data())
    for found in both(learn_without):
        assert (found["judged"] - expected["judged"]).abs().max() > 1e-2


def half(world):
    network = nn.BatchNorm2d(3)
    synchronise_batch_norm(network, world)
    images = share(data()[0], world).float().contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        found = network(images.bfloat16())
    return found.detach(), network.running_var, found.is_contiguous(memory_format=torch.channels_last)


def test_half_precision_keeps_float32_statistics(both):
    images = data()[0].float().bfloat16()
    network = nn.BatchNorm2d(3)
    expected = network(images).detach()
    answers = both(half)
    found = torch.cat([answer[0] for answer in answers])
    assert found.dtype == torch.bfloat16
    close(found.float(), expected.float(), 2e-2)
    close(answers[0][1], network.running_var, 1e-5)
    assert all(answer[2] for answer in answers)


def copies(world):
    network = normalised()
    synchronise_batch_norm(network, world)
    depth = len(type(network[1]).__mro__)
    synchronise_batch_norm(network, world)
    again = len(type(network[1]).__mro__) == depth
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    made = [copy.deepcopy(network), pickle.loads(pickle.dumps(network)), torch.load(file, weights_only=False)]
    posterior = MeanField(normalised().float())
    synchronise_batch_norm(posterior.network, world)
    logits = posterior.train()(share(data()[0], world).float())
    made.append(posterior.materialise())
    plain = [type(copied[1]) is nn.BatchNorm2d and type(copied[5]) is nn.BatchNorm1d for copied in made]
    if world.is_first:  # the other process would be waited for in vain
        for copied in made:
            copied.train()(data()[0].to(copied[0].weight.dtype))
        twin = MeanField(normalised().float())
        twin.load_state(posterior.state())
        images = data()[0].float().sigmoid()
        assert torch.equal(posterior.predict(images, 2).probabilities, twin.predict(images, 2).probabilities)
    return again, plain, repr(network) == repr(normalised()), list(network.state_dict()), logits.detach()


def test_copies_are_plain_and_functional_calls_are_synchronised(both):
    answers = both(copies)
    for again, plain, same, keys, _ in answers:
        assert again
        assert plain == [True] * 4
        assert same
        assert keys == list(normalised().state_dict())
    posterior = MeanField(normalised().float())
    expected = posterior.train()(data()[0].float()).detach()
    close(torch.cat([answer[-1] for answer in answers]), expected, 1e-4)


# ---- gathered features ----------------------------------------------------------------------------------------------


def statistic(world, kernel="cosine"):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Flatten(), nn.Linear(75, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    after = nn.Linear(4, 4).double()  # a helper that sees the gathered features
    target = divergences.kernel_log_conditional(torch.randn(8, 5, dtype=torch.float64))
    features = gather_batch(network(share(data()[0], world)), world)
    value = divergences.kernel_kl(target, divergences.kernel_log_conditional(after(features), kernel))
    value.backward()
    gradients = [p.grad for p in (*network.parameters(), *after.parameters())]
    world.average(gradients)
    return features.detach(), value.detach(), gradients


def statistics(world):
    return [statistic(world, kernel) for kernel in ("cosine", "rbf")]


def test_the_averaged_gradient_of_a_gathered_statistic_is_that_of_one_process(both):
    expected = statistics(ALONE)
    assert all(float(gradient.norm()) > 1e-4 for gradient in expected[0][2][:3])
    for found in both(statistics):
        close(found, expected)


def factor(world):
    own = (torch.arange(3.0) + 10 * world.rank).view(3, 1, 1).expand(3, 2, 2).requires_grad_()
    rows = gather_batch(own, world)
    weights = torch.arange(6.0).view(6, 1, 1) + 100 * world.rank
    (gradient,) = torch.autograd.grad((weights * rows).sum(), own)
    return rows.detach()[:, 0, 0], gradient[:, 0, 0]


def test_each_process_gets_the_sum_of_what_all_computed_for_its_rows(both):
    (rows, first), (_, second) = both(factor)
    assert rows.tolist() == [0, 1, 2, 10, 11, 12]
    assert first.tolist() == [100, 102, 104]
    assert second.tolist() == [106, 108, 110]


# ---- coming and going -----------------------------------------------------------------------------------------------


def lose_a_peer(rank, port, connection):
    with join_by_hand(rank, port) as world:
        world.average([torch.ones(1000)])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            while True:
                world.average([torch.ones(1000)])
        except RuntimeError:
            connection.send(time.monotonic() - started)
            raise SystemExit(3) from None


@posix
def test_the_survivor_of_a_killed_process_gets_an_error_and_leaves():
    port = free_port()
    mine, theirs = SPAWN.Pipe()
    workers = [SPAWN.Process(target=lose_a_peer, args=(rank, port, theirs), daemon=True) for rank in range(SIZE)]
    for worker in workers:
        worker.start()
    assert mine.poll(90), "the survivor hangs"
    assert mine.recv() < 10
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [3, -signal.SIGKILL]


def set_environment(monkeypatch, **values):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_torchrun_a_process_is_alone(monkeypatch):
    set_environment(monkeypatch, LOCAL_RANK="3")
    with joined("cpu") as world:
        assert world is ALONE
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with joined("cpu") as world:
        assert (world.rank, world.size) == (0, 1)
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"RANK": "0"}, "no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "no RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no LOCAL_RANK"),
        ({"RANK": "first", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 'first'"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is '-1'"),
        ({"RANK": "0", "WORLD_SIZE": "", "LOCAL_RANK": "0"}, "WORLD_SIZE is ''"),
        ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE 0"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_RANK 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "can't join the others at None:None"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "1:x"),
    ],
)
def test_a_damaged_environment_is_one_sentence(monkeypatch, values, sentence):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    set_environment(monkeypatch, **values)
    with pytest.raises(InputError, match=sentence) as caught, joined("cpu"):
        pass
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_a_process_that_nobody_joins_says_so(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    with pytest.raises(InputError, match="process 0 can't join") as caught, joined("cpu", timedelta(seconds=1)):
        pass
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_restarted(monkeypatch):
    set_environment(monkeypatch)
    assert not restarted()
    set_environment(monkeypatch, TORCHELASTIC_RESTART_COUNT="0")
    assert not restarted()
    set_environment(monkeypatch, TORCHELASTIC_RESTART_COUNT="2")
    assert restarted()
    set_environment(monkeypatch, TORCHELASTIC_RESTART_COUNT="often")
    with pytest.raises(InputError, match="TORCHELASTIC_RESTART_COUNT is 'often'"):
        restarted()


def test_devices_are_shared_out(monkeypatch):
    assert World(1, 2, 1).device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert World(1, 2, 1).device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert World(5, 8, 1).device() == torch.device("cuda", 1)
    with pytest.raises(InputError, match="GPUs for 2 processes only"):
        World(2, 8, 2).device("cuda")
    with pytest.raises(InputError, match="'cuda:0' can't be shared out to processes; did you mean 'cuda'"):
        World(1, 2, 1).device("cuda:0")
