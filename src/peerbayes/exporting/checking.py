"""What peerbayes itself predicts, to compare files with that others will run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from peerbayes.inference.prediction import Prediction, entropy_of, mean_of
from peerbayes.math.noise import Address, integers, keys_of, normal, normal_from, start_at, uniform
from peerbayes.networks.running import evaluating
from peerbayes.posteriors.base import Posterior
from peerbayes.runs.new_inputs import as_one

TOLERANCE = 1e-4  # of probabilities, entropy and disagreement
CHECKED = 3  # draws that a file is compared with, where it can make any number
SIZES = (3, 1)  # batches


def inputs_like(shape: Sequence[int], tokens: int, batch: int) -> Tensor:
    """Return a batch of made-up inputs: images uniform in [0, 1], or token numbers.

    Args:
        shape: of one input.
        tokens: all token numbers are below it; 0 for images.
        batch: how many.
    """
    address, count = Address(0, "export", "inputs", batch), batch * torch.Size(shape).numel()
    if tokens:
        return integers(address, tokens, count).int().view(batch, *shape)
    return uniform(address, count).view(batch, *shape)


def tokens_of(network: nn.Module) -> int:
    """Return a number that every token of a network's embeddings may be below, where it is not known."""
    sizes = [module.num_embeddings for module in network.modules() if isinstance(module, nn.Embedding)]
    return min([*sizes, 100])


def expected(
    posteriors: Mapping[str, Posterior], inputs: Tensor, draws: Mapping[str, int], temperature: float
) -> Prediction:
    """Return what all posteriors predict as one, as `Run.predict` does.

    Args:
        posteriors: by name.
        inputs: of the networks.
        draws: of each posterior.
        temperature: of all as one.
    """
    parts = [posterior.predict(inputs, draws[name], calibrated=False) for name, posterior in posteriors.items()]
    return as_one(parts).tempered(temperature)


def expected_of(posterior: Posterior, inputs: Tensor, flats: Iterator[Tensor], temperature: float) -> Prediction:
    """Return what networks of given weights predict, one after another.

    Args:
        posterior: whose network it is.
        inputs: of the network.
        flats: weights (size,) of each network.
        temperature: of their average.
    """
    with torch.no_grad(), evaluating(posterior):
        log_p = torch.stack([posterior.run_network(inputs, posterior.named(flat)).log_softmax(-1) for flat in flats])
    address, count = Address(posterior.seed, posterior.name, "draw"), torch.full((len(inputs),), len(log_p))
    return Prediction(mean_of(log_p), entropy_of(log_p).mean(0), count, address).tempered(temperature)


def noise_of(posterior: Posterior, draws: int) -> Tensor:
    """Return the noise of the first draws of a posterior, (draws, noise_size).

    Args:
        posterior: whose draws they are.
        draws: how many.
    """
    address = Address(posterior.seed, posterior.name, "draw")
    return torch.stack([normal(address.at(number), posterior.noise_size) for number in range(draws)])


def forked_noise(posterior: Posterior, seed: int, draws: int) -> Tensor:
    """Return the noise that an exported file makes of a seed, (draws, noise_size); of seed 0 that of `noise_of`.

    Args:
        posterior: whose draws they are.
        seed: the file's input.
        draws: how many.
    """
    keys, fork = keys_of(Address(posterior.seed, posterior.name, "draw")), torch.tensor(seed)
    return torch.stack(
        [normal_from(start_at(keys, torch.tensor([n]), fork), posterior.noise_size) for n in range(draws)]
    )


def error_of(outputs: Sequence[Tensor], wanted: Prediction) -> float:
    """Return the largest difference of outputs from a prediction; infinity where one is not a number.

    Args:
        outputs: probabilities, entropy and disagreement.
        wanted: what they should be.
    """
    pairs = zip(outputs, (wanted.probabilities, wanted.entropy, wanted.disagreement), strict=True)
    errors = [float((value - other).abs().max()) if value.shape == other.shape else torch.inf for value, other in pairs]
    return max(torch.inf if error != error else error for error in errors)
