"""A posterior's prediction as one module of tensor operations: inputs, and perhaps noise, to what is known of them.

Draws are made one after another in a loop of the program itself, so that its size and memory do not grow with them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from peerbayes.choices import ExportCodebook, ExportNoise
from peerbayes.codebook.shared import Shared
from peerbayes.errors import InputError
from peerbayes.exporting.lookup import PackedRows, packed_rows_of
from peerbayes.inference.prediction import mean_of
from peerbayes.math.noise import Address, keys_of, normal_whole, start_at
from peerbayes.posteriors.base import Posterior

NOISES: tuple[ExportNoise, ...] = get_args(ExportNoise)
OUTPUTS = ("probabilities", "entropy", "disagreement")


class Fixed(nn.Module):
    """One network, one pass.

    Args:
        network: from inputs to logits.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.extra: tuple[str, ...] = ()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, C) and their entropy (B,)."""
        log_p = self.network(inputs).float().log_softmax(-1)
        return log_p, _entropy(log_p)


class Drawn(nn.Module):
    """The average of many draws, by their numbers.

    Args:
        posterior: whose draws they are.
        classes: number of classes.
    """

    def __init__(self, posterior: Posterior, classes: int) -> None:
        super().__init__()
        self.posterior, self.classes = copy.deepcopy(posterior).eval(), classes
        self.extra: tuple[str, ...] = ()

    def average(self, inputs: Tensor, count: Tensor, flat_of: Any) -> tuple[Tensor, Tensor]:
        """Return log p̄ (B, C) and (1/S) Σ_s H[p_s] (B,).

        Args:
            inputs: (B, ...).
            count: S, a scalar.
            flat_of: makes the weights (size,) of a draw of its number, int64 (1,).
        """
        batch = inputs.shape[0]
        total = torch.full((batch, self.classes), -torch.inf)
        begin = (torch.zeros((), dtype=torch.int64), total, torch.zeros(batch))

        def more(number: Tensor, total: Tensor, entropy: Tensor) -> Tensor:  # noqa: ARG001
            return number < count

        def step(number: Tensor, total: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            tensors = self.posterior.named(flat_of(number.reshape(1)))
            log_p = self.posterior.run_network(inputs, tensors).float().log_softmax(-1)
            return number + 1, torch.logaddexp(total, log_p), entropy + _entropy(log_p)

        _, total, entropy = while_loop(more, step, begin)
        return total - count.log(), entropy / count


class Seeded(Drawn):
    """Draws whose noise the program makes itself, of two inputs: a seed, and how many there are.

    Seed 0 makes the draws of `Posterior.predict`, number by number; other seeds make others.

    Args:
        posterior: whose draws they are.
        classes: number of classes.
    """

    def __init__(self, posterior: Posterior, classes: int) -> None:
        super().__init__(posterior, classes)
        self.keys = keys_of(Address(posterior.seed, posterior.name, "draw"))
        self.rows = packed_rows_of(posterior)
        self.extra = ("seed", "draws")

    def forward(self, inputs: Tensor, seed: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p̄ (B, C) and the draws' mean entropy (B,)."""
        given = _given(self.rows)

        def flat_of(number: Tensor) -> Tensor:
            return self.posterior.place(
                normal_whole(start_at(self.keys, number, seed), self.posterior.noise_size), **given
            )[0]

        return self.average(inputs, draws.clamp_min(1), flat_of)


class Noisy(Drawn):
    """Draws made of noise that is an input: standard normal numbers, (draws, `Posterior.noise_size`).

    Args:
        posterior: whose draws they are.
        classes: number of classes.
    """

    def __init__(self, posterior: Posterior, classes: int) -> None:
        super().__init__(posterior, classes)
        self.rows = packed_rows_of(posterior)
        self.extra = ("noise",)

    def forward(self, inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p̄ (B, C) and the draws' mean entropy (B,)."""
        given = _given(self.rows)

        def flat_of(number: Tensor) -> Tensor:
            return self.posterior.place(noise.index_select(0, number).view(-1), **given)[0]

        return self.average(inputs, torch.full((), noise.shape[0], dtype=torch.int64), flat_of)


class Baked(Drawn):
    """Draws that the program holds.

    Args:
        posterior: whose draws they are.
        classes: number of classes.
        draws: how many there are.
    """

    flats: Tensor

    def __init__(self, posterior: Posterior, classes: int, draws: int) -> None:
        super().__init__(posterior, classes)
        address = Address(posterior.seed, posterior.name, "draw")
        with torch.no_grad():
            flats = torch.stack([posterior.draw(address.at(number)).flat for number in range(draws)])
        self.register_buffer("flats", flats)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p̄ (B, C) and the draws' mean entropy (B,)."""
        count = torch.full((), len(self.flats), dtype=torch.int64)
        return self.average(inputs, count, lambda number: self.flats.index_select(0, number).view(-1))


class LookedUp(nn.Module):
    """The mean weights of a codebook, gathered as the program runs.

    Args:
        posterior: of shared weights.
    """

    def __init__(self, posterior: Shared) -> None:
        super().__init__()
        self.posterior, self.rows = copy.deepcopy(posterior).eval(), PackedRows(posterior)
        self.extra: tuple[str, ...] = ()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, C) and their entropy (B,)."""
        flat, _ = self.posterior.place(None, self.rows())
        log_p = self.posterior.run_network(inputs, self.posterior.named(flat)).float().log_softmax(-1)
        return log_p, _entropy(log_p)


def _given(rows: PackedRows | None) -> dict[str, Tensor]:
    return {} if rows is None else {"rows": rows()}


Part = Fixed | LookedUp | Seeded | Noisy | Baked


class Program(nn.Module):
    """Inputs to probabilities (B, C), their entropy (B,) and the disagreement of draws (B,), in nats.

    As `Prediction` has them: probabilities and entropy are tempered, disagreement is not.

    Args:
        parts: one a peer; their probabilities are averaged.
        temperature: T of softmax(log p̄ / T).
    """

    def __init__(self, parts: Sequence[Part], temperature: float = 1.0) -> None:
        super().__init__()
        self.parts, self.temperature = nn.ModuleList(parts), temperature
        self.extra: tuple[str, ...] = tuple(dict.fromkeys(name for part in parts for name in part.extra))

    def forward(
        self, inputs: Tensor, first: Tensor | None = None, second: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `OUTPUTS`; ``first`` and ``second`` are the inputs that ``extra`` names."""
        given = dict(zip(self.extra, (first, second), strict=False))
        outputs = [part(inputs, *(given[name] for name in part.extra)) for part in cast(Iterable[Part], self.parts)]
        log_p, expected = outputs[0]
        if outputs[1:]:
            log_p, expected = (
                mean_of(torch.stack([part_log_p for part_log_p, _ in outputs])),
                torch.stack([h for _, h in outputs]).mean(0),
            )
        disagreement = (_entropy(log_p) - expected).clamp_min(0)
        if self.temperature != 1:
            log_p = (log_p / self.temperature).log_softmax(-1)
        return log_p.exp(), _entropy(log_p), disagreement


def part_of(posterior: Posterior, classes: int, noise: ExportNoise, draws: int, codebook: ExportCodebook) -> Part:
    """Return the part of a program that predicts as a posterior does.

    Args:
        posterior: on the CPU.
        classes: number of classes.
        noise: where its draws come from; see `peerbayes.exporting.export.export`.
        draws: how many there are, where they are baked.
        codebook: whether shared weights are looked up or plain.
    """
    if not posterior.stochastic or noise == "none":
        if posterior.made_of_posterior and codebook == "lookup":
            return LookedUp(cast(Shared, posterior))
        return Fixed(posterior.materialise())
    if noise == "baked":
        if draws == 1:
            return Fixed(posterior.materialise(posterior.draw(Address(posterior.seed, posterior.name, "draw"))))
        return Baked(posterior, classes, draws)
    if posterior.members > 1 or not posterior.noise_size:
        raise InputError(f"peer '{posterior.name}': its draws are members, not noise: export them with noise 'baked'")
    return Seeded(posterior, classes) if noise == "seed" else Noisy(posterior, classes)


def _entropy(log_p: Tensor) -> Tensor:
    """Return the entropy as predictions have it, without `torch.special.entr`, which torch 2.11 can't write as ONNX."""
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)  # 0 log 0 is 0
