"""Which temperatures of few validation images to keep: expected test NLL of four rules, by simulation.

    python benchmarks/few_mistakes.py

Labels come from softmax(z / t) of random logits z, and the network says softmax(z): it is overconfident where t > 1. In
the last case half of the mistakes are labels that are replaced by random ones, which no temperature foresees.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from peerbayes import metrics
from peerbayes.adopting import cross_tempered
from peerbayes.metrics.calibration import TEMPERATURE_WIDTH

CLASSES, TEST = 10, 20_000
FEWEST = 20  # mistakes, below which the count drops a temperature
RULES = ("never", "by count", "unless worse", "always")
IMAGES = (45, 200, 1000)
ERRORS = {"few mistakes": 0.15, "almost none": 0.01}
CASES = {  # the temperature of softmax(z), and the share of mistakes that are replaced labels
    "overconfident": (2.0, 0.0),
    "calibrated": (1.0, 0.0),
    "underconfident": (0.5, 0.0),
    "very underconfident": (0.25, 0.0),
    "replaced labels": (1.0, 0.5),
}


def drawn(scale: float, true: float, count: int, seed: int, replaced: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities that a network says, and labels, of which it is wrong about a share.

    Args:
        scale: of the logits that labels are drawn with.
        true: the temperature of least NLL.
        count: images.
        seed: of both.
        replaced: share of labels that are random.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    logits[:, 0] += 2  # a class that stands out
    logits *= scale
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    other = torch.randint(0, CLASSES, (count,), generator=generator)
    labels = torch.where(torch.rand(count, generator=generator) < replaced, other, labels)
    return (logits * true).log_softmax(1), labels


def scale_for(error: float) -> float:
    """Return the scale of logits whose labels differ from the most probable class with a probability."""
    low, high = 0.0, 200.0
    for _ in range(40):
        middle = (low + high) / 2
        log_p, _ = drawn(middle, 1.0, TEST, 0)
        low, high = (middle, high) if 1 - float(log_p.exp().amax(1).mean()) > error else (low, middle)
    return high


def measure(images: int, error: float, true: float, share: float, seeds: int) -> dict[str, float]:
    """Return the mean test NLL of each rule, less that of the network as it is, over seeds.

    Args:
        images: of validation.
        error: share of mistakes.
        true: the temperature of least NLL.
        share: of mistakes that are replaced labels.
        seeds: how often validation images are drawn.
    """
    scale, replaced = scale_for(error * (1 - share)), error * share
    test = drawn(scale, true, TEST, 1, replaced)
    raw = metrics.nll(test[0].exp(), test[1])
    nll: dict[str, list[float]] = {rule: [] for rule in RULES}
    for seed in range(seeds):
        log_p, labels = drawn(scale, true, images, 1000 + seed, replaced)
        temperature = metrics.fit_temperature(log_p, labels, width=TEMPERATURE_WIDTH)
        after = float(torch.nn.functional.nll_loss(metrics.temper(test[0], temperature), test[1]))
        before, held = (
            float(torch.nn.functional.nll_loss(values, labels)) for values in (log_p, cross_tempered(log_p, labels))
        )
        mistakes = int((log_p.argmax(1) != labels).sum())
        kept = {"never": False, "by count": mistakes >= FEWEST, "unless worse": held <= before, "always": True}
        for rule, keep in kept.items():
            nll[rule].append((after if keep else raw) - raw)
    return {rule: sum(values) / seeds for rule, values in nll.items()} | {"as it is": raw}


def main() -> None:
    """Print a row a case, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("results/few-mistakes.json"))
    given = parser.parse_args()
    rows = []
    for images in IMAGES:
        for mistakes, error in ERRORS.items():
            for network, (true, share) in CASES.items():
                case = {"images": images, "error": error, "network": network, "true": true, "replaced": share}
                rows.append(case | measure(images, error, true, share, given.seeds))
                figures = " ".join(f"{rows[-1][rule]:8.4f}" for rule in ("as it is", *RULES))
                print(f"{images:5} {mistakes:13} {network:20} {figures}", flush=True)
    given.out.write_text(json.dumps({"seeds": given.seeds, "classes": CLASSES, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
