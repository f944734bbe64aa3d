"""Addressable randomness: every random number is a pure function of where it is used.

A counter-based generator written in tensor operations. Element ``i`` of the noise at an address is

    mix64(start + i * stride)
    start = mix64(key + number * GAMMA)
    stride = mix64(key' + number * GAMMA) | 1

where ``key`` and ``key'`` are hashes of (seed, owner, stream) and ``mix64`` is the SplitMix64 finaliser. There is no
hidden state: nothing has to be saved to resume a run, two runs can share noise, and a draw can be replayed from its
address alone. The integers are identical on every device; only the last bits of log, sin and cos depend on it.
``number`` may be a tensor on the device, so that a captured step advances it without touching the host.

In format 1, of runs made before there was a format 2, the stride is GAMMA everywhere: all addresses walk through one
cycle of 2^64 numbers, and two long ones may meet. A run says its format, and a seed of format 1 is a `Seed1`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peerbayes.errors import InputError

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed integer
MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
TURN = 2 * math.pi * 2.0**-32  # from 32 bits to an angle
PIECE = 1 << 17  # numbers that a core works on at a time, where there are millions
FORMAT = 2  # of new runs


class Seed1(int):
    """A seed whose noise is of format 1: of a run made before there was a format 2, or of a split of a data set.

    Example:
        >>> bool((bits(Address(Seed1(3)), 2) == bits(Address(3), 2)).all())
        False
    """


def seed_of(seed: int, noise_format: int | None) -> int:
    """Return a seed whose noise is of a format.

    Args:
        seed: the number.
        noise_format: what `format_of` said of it; None of what was made before there were formats, which is 1.

    Raises:
        InputError: there is no such format.
    """
    if noise_format not in (None, 1, FORMAT):
        raise InputError(f"noise is {noise_format!r}, expected its format, 1 or {FORMAT}; update peerbayes for others")
    return int(seed) if noise_format == FORMAT else Seed1(seed)


def format_of(seed: int) -> int:
    """Return the format of the noise that a seed gives."""
    return 1 if isinstance(seed, Seed1) else FORMAT


FIXED = Seed1(0)  # of what belongs to a data set, such as its splits, whatever else may change


@dataclass(frozen=True)
class Address:
    """Where a piece of randomness belongs.

    Args:
        seed: the run's seed.
        owner: whose noise it is: a peer's name, or ``"data"``.
        stream: what it is for: ``"step"`` (training), ``"draw"`` (prediction), ``"order"``, ``"augment"``...
        number: the step or draw number; a Python integer or an int64 scalar tensor.

    Example:
        >>> from peerbayes import Address
        >>> from peerbayes.math.noise import normal
        >>> address = Address(seed=0, owner="peer")
        >>> bool((normal(address.at(1), 3) == normal(address.at(1), 3)).all())
        True
        >>> bool((normal(address.at(1), 3) == normal(address.at(2), 3)).any())
        False
    """

    seed: int = 0
    owner: str = "peer"
    stream: str = "draw"
    number: int | Tensor = 0

    @property
    def key(self) -> int:
        """Signed 64-bit hash of (seed, owner, stream)."""
        return stream_key(self.seed, self.owner, self.stream)

    def at(self, number: int | Tensor) -> Address:
        """Return the same address at another number."""
        return Address(self.seed, self.owner, self.stream, number)

    def sub(self, stream: str) -> Address:
        """Return an independent address below this one, at the same number."""
        return Address(self.seed, self.owner, f"{self.stream}/{stream}", self.number)


def stream_key(seed: int, owner: str, stream: str) -> int:
    """Return the signed 64-bit hash of (seed, owner, stream).

    Args:
        seed: of an address.
        owner: likewise.
        stream: likewise.
    """
    text = f"{int(seed)}\0{owner}\0{stream}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _mix(z: Tensor) -> Tensor:
    # In place; int64 ">>" keeps the sign, hence the masks that make it a logical shift.
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(MULTIPLY_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(MULTIPLY_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def start(address: Address, device: torch.device | str | None = None) -> Tensor:
    """Return where the noise of an address starts, and its stride, int64 (2,); the stride is odd.

    Args:
        address: whose noise it is.
        device: where to put it; by default where a tensor ``number`` lives, or else torch's default device.
    """
    return start_at(keys_of(address), number_tensor(address, device))


def number_tensor(address: Address, device: torch.device | str | None = None) -> Tensor:
    """Return the number of an address as a tensor, int64 (1,).

    Args:
        address: whose number it is.
        device: where to put it; by default as in `start`.
    """
    if isinstance(address.number, Tensor):
        return address.number.to(device=device, dtype=torch.int64).reshape(1)
    return torch.full((1,), address.number, dtype=torch.int64, device=device)


def keys_of(address: Address) -> tuple[int, int | None]:
    """Return the keys that an address's start and stride are made of; no second one in format 1."""
    if format_of(address.seed) == 1:
        return address.key, None
    return address.key, stream_key(address.seed, address.owner, f"{address.stream}\0stride")


def key_tensor(address: Address, device: torch.device) -> Tensor:
    """Return an address's keys as a tensor for `start_of`, int64 (2,), or (1,) in format 1.

    Args:
        address: whose keys they are; its number does not count.
        device: where to put them.
    """
    return torch.tensor([key for key in keys_of(address) if key is not None], device=device)


def start_of(keys: Tensor, number: Tensor) -> Tensor:
    """Return what `start` does, of `key_tensor` and `number_tensor`: one kernel where it is compiled.

    Args:
        keys: int64 (2,), or (1,) in format 1.
        number: int64 (1,).
    """
    begin = _mix(number * GAMMA + keys)
    if len(keys) == 1:
        return torch.cat([begin, torch.full_like(begin, GAMMA)])
    return begin.bitwise_or_(torch.arange(2, device=begin.device))


def start_at(keys: tuple[int, int | None], number: Tensor, fork: Tensor | None = None) -> Tensor:
    """Return what `start` does, of the keys of an address and its number: for programs, which have no addresses.

    Args:
        keys: from `keys_of`.
        number: int64 (1,).
        fork: int64, one number: noise of its own for each but 0, which is the noise of the address.
    """
    key, other = keys
    begin = number * GAMMA + key
    if fork is not None:
        begin = begin + _mix(fork.reshape(1) * GAMMA)
    if other is None:
        return torch.cat([_mix(begin), torch.full_like(begin, GAMMA)])
    second = torch.arange(2, device=begin.device)
    return _mix(second * _signed(other - key) + begin).bitwise_or_(second)


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def bits(address: Address, count: int, device: torch.device | str | None = None, first: int = 0) -> Tensor:
    """Return ``count`` uniform 64-bit patterns as int64, shape ``(count,)``: elements ``first`` and on.

    Without a device they are made where a tensor ``number`` lives, or else on torch's default device.

    Args:
        address: where the noise lives.
        count: how many.
        device: where they are made.
        first: number of the first element.
    """
    return _bits_from(start(address, device), count, first)


def _bits_from(begin: Tensor, count: int, first: int = 0) -> Tensor:
    # The stride is a tensor: of a constant inductor would give a small range 32 bits, and so its products.
    index = torch.arange(first, first + count, dtype=torch.int64, device=begin.device)
    return _mix(index.mul_(begin[1]).add_(begin[0]))


def uniform(address: Address, count: int, device: torch.device | str | None = None, first: int = 0) -> Tensor:
    """Return ``count`` float32 numbers, uniform on (0, 1), shape ``(count,)``.

    Args:
        address: where the noise lives.
        count: how many.
        device: where they are made.
        first: number of the first element.
    """
    # 23 bits plus a half: exact in float32 and never 0 or 1.
    return ((bits(address, count, device, first) >> 41) & ((1 << 23) - 1)).float().add_(0.5).mul_(2.0**-23)


def uniform_from(number: Tensor, count: int) -> Tensor:
    """Return ``count`` float32 numbers, uniform on (0, 1), made of one int64, also within `torch.vmap`.

    Args:
        number: the int64, shape (1,).
        count: how many.
    """
    index = torch.arange(count, dtype=torch.int64, device=number.device)
    stride = _mix(number * GAMMA + MULTIPLY_1) | 1
    return (((_mix(index * stride + number) >> 41) & ((1 << 23) - 1)).float() + 0.5) * 2.0**-23


def normal(address: Address, count: int, device: torch.device | str | None = None) -> Tensor:
    """Return ``count`` float32 standard normal numbers by Box-Muller, shape ``(count,)``.

    One 64-bit pattern gives two numbers: element ``i`` and element ``i + ceil(count / 2)``.

    Args:
        address: where the noise lives.
        count: how many.
        device: where they are made.
    """
    return normal_from(start(address, device), count)


def normal_from(begin: Tensor, count: int) -> Tensor:
    """Return what `normal` does, from `start`: for compiled functions, which can't take an address.

    Args:
        begin: what `start` returns, int64 (2,).
        count: how many.
    """
    half = (count + 1) // 2
    result = torch.empty(2 * half, dtype=torch.float32, device=begin.device)
    for first, last in pieces(half, begin.device):
        _box_muller(_bits_from(begin, last - first, first), result[first:last], result[half + first : half + last])
    return result[:count]


def normal_whole(begin: Tensor, count: int) -> Tensor:
    """Return what `normal_from` does, without writing into parts of tensors: for exported programs, which copy then.

    Args:
        begin: from `start`.
        count: how many.
    """
    z = _bits_from(begin, (count + 1) // 2)
    radius = ((z >> 32) & 0xFFFFFFFF).float().add(0.5).mul(2.0**-32).log().mul(-2).sqrt()
    angle = (z & 0xFFFFFFFF).float() * TURN
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def normal_pieces(begin: Tensor, count: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield what `normal_from` returns in `pieces`, never all of it at once: first, last, and numbers twice.

    They are elements ``first`` to ``last``, and as many from element ``first + ceil(count / 2)`` on, of which the very
    last is one too many where the count is odd. They are overwritten when the next ones are made.

    Args:
        begin: what `start` returns, int64 (2,).
        count: how many in all.
    """
    found = torch.empty(0)
    for first, last in pieces((count + 1) // 2, begin.device):
        if last - first > found.numel() // 2:
            found = torch.empty(2, last - first, dtype=torch.float32, device=begin.device)
        radius, angle = found[:, : last - first]
        _box_muller(_bits_from(begin, last - first, first), radius, angle)
        yield first, last, radius, angle


def pieces(count: int, device: torch.device) -> list[tuple[int, int]]:
    """Return ``range(count)`` in pieces (first, last) that a CPU can work on in its cache; elsewhere it is one piece.

    Temporaries of millions of numbers cost more than the arithmetic: so 11 million normal numbers take half the time.

    Args:
        count: how many in all.
        device: where they are worked on.
    """
    step = PIECE * torch.get_num_threads() if device.type == "cpu" and not torch.compiler.is_compiling() else count
    return [(first, min(first + step, count)) for first in range(0, count, max(1, step))]


def _box_muller(z: Tensor, radius: Tensor, angle: Tensor) -> None:
    # Into radius and angle, of z's length, and in place: temporaries cost more than the arithmetic.
    radius.copy_((z >> 32).bitwise_and_(0xFFFFFFFF)).add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle.copy_(z.bitwise_and_(0xFFFFFFFF)).mul_(TURN)
    cosine = angle.cos()
    angle.sin_().mul_(radius)
    radius.mul_(cosine)


def permutation(address: Address, count: int, device: torch.device | str | None = None) -> Tensor:
    """Return a uniform permutation of ``range(count)`` as int64, the same on every device.

    Args:
        address: where the noise lives.
        count: how many.
        device: where they are made.
    """
    return torch.argsort(bits(address, count, device), stable=True)


def integers(
    address: Address, high: int, count: int, device: torch.device | str | None = None, first: int = 0
) -> Tensor:
    """Return ``count`` integers in ``[0, high)``, shape ``(count,)`` (bias below ``high / 2**32``).

    Args:
        address: where the noise lives.
        high: one above the largest.
        count: how many.
        device: where they are made.
        first: number of the first element.
    """
    if not 1 <= high <= 1 << 31:
        raise InputError(f"high is {high}: expected 1 to 2**31.")
    return (((bits(address, count, device, first) >> 32) & 0xFFFFFFFF) * high) >> 32
