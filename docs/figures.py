"""Draw the figures of the method pages: `python docs/figures.py` writes docs/images/methods/*.svg.

Each is made of a closed form or of a record in results/, and of nothing else, so the same files come out every time.
The background is transparent and the text grey, for pages of light and dark themes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from numpy.typing import NDArray

from peerbayes.reports.figures import COLOURS

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "images" / "methods"
BLUE, RED, GREEN, *_ = COLOURS
GREY = "#808080"  # legible on white and on black
STYLE = {
    "svg.hashsalt": "peerbayes",
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.titlesize": 10,
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.transparent": True,
}
FIGURES: dict[str, Callable[[], Figure]] = {}


def figure(draw: Callable[[], Figure]) -> Callable[[], Figure]:
    """Register a figure under its function's name."""
    FIGURES[draw.__name__.replace("_", "-")] = draw
    return draw


def panels(count: int, height: float = 3.0) -> tuple[Figure, list[Any]]:
    """Return a figure with so many axes in a row."""
    drawn = Figure(figsize=(3.7 * count, height), layout="constrained")
    axes = drawn.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25, linewidth=0.6)
    return drawn, list(axes)


def record(name: str) -> Any:
    """Return a record of results/."""
    return json.loads((DOCS.parent / "results" / f"{name}.json").read_text())


def sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(−z))."""
    return 1 / (1 + np.exp(-z))


@figure
def bayesian() -> Figure:
    """Draw a network of one weight w ~ N(2, 1.2²): p = σ(w x) of draws, averaged, and of the mean weight."""
    drawn, (left, right) = panels(2)
    x = np.linspace(-4, 4, 161)
    quantiles = np.array([NormalDist(2, 1.2).inv_cdf((k + 0.5) / 400) for k in range(400)])
    p = sigmoid(quantiles[:, None] * x)
    for row in p[22::44]:
        left.plot(x, row, color=BLUE, alpha=0.5, linewidth=0.8)
    left.plot(x, sigmoid(2 * x), color=RED, linestyle="--", label="mean weight")
    left.plot(x, p.mean(0), color=BLUE, linewidth=2, label="average of draws")
    left.set(xlabel="input x", ylabel="probability of class 1", ylim=(-0.03, 1.3))
    left.legend(loc="upper left")

    def entropy(q: NDArray[np.float64]) -> NDArray[np.float64]:
        return -q * np.log(q) - (1 - q) * np.log1p(-q)

    total, expected = entropy(p.mean(0)), entropy(np.clip(p, 1e-12, 1 - 1e-12)).mean(0)
    right.plot(x, total, color=BLUE, linewidth=2, label="entropy")
    right.plot(x, total - expected, color=GREEN, linewidth=2, label="disagreement (BALD)")
    right.plot(
        x, entropy(np.clip(sigmoid(2 * x), 1e-12, 1 - 1e-12)), color=RED, linestyle="--", label="entropy, mean weight"
    )
    right.set(xlabel="input x", ylabel="nats", ylim=(0, 1.1))
    right.legend(loc="upper left")
    return drawn


@figure
def mutual_learning() -> Figure:
    """Draw D_α of two classes over α, and NLL and pairwise KL of measured pairs over α."""
    drawn, (left, middle, right) = panels(3)
    order = np.linspace(0.01, 3, 300)
    order = order[np.abs(order - 1) > 1e-3]
    for p, colour in ((0.6, BLUE), (0.8, RED), (0.95, GREEN)):
        value = np.log(p**order * 0.5 ** (1 - order) + (1 - p) ** order * 0.5 ** (1 - order)) / (order - 1)
        left.plot(order, value, color=colour, label=f"P = ({p:g}, {1 - p:.2g})")
    left.axvline(1, color=GREY, linewidth=0.8, linestyle=":")
    left.set(xlabel="α", ylabel="D$_α$(P‖Q), nats", ylim=(0, 0.95), title="Q = (0.5, 0.5)")
    left.legend()
    runs = record("renyi-cifar100-resnet20")
    alphas = sorted({run["alpha"] for run in runs})
    at = [[run for run in runs if run["alpha"] == alpha] for alpha in alphas]
    peers = [fmean(peer["nll"] for run in same for peer in run["peers"]) for same in at]
    together = [fmean(run["ensemble"]["nll"] for run in same) for same in at]
    apart = [fmean(run["cohort"]["pairwise_diversity"] for run in same) for same in at]
    middle.plot(alphas, peers, "o-", color=BLUE, label="a peer")
    middle.plot(alphas, together, "s--", color=RED, label="both averaged")
    middle.set(xlabel="α", ylabel="NLL, nats", title="two ResNet-20s, CIFAR-100")
    middle.legend()
    right.plot(alphas, apart, "o-", color=GREEN)
    right.set(xlabel="α", ylabel="KL between the peers, nats", ylim=(0, None), title="two ResNet-20s, CIFAR-100")
    return drawn


@figure
def diversity() -> Figure:
    """Draw softplus(−D) and the size of its slope over the distance D."""
    drawn, (left, right) = panels(2)
    distance = np.linspace(0, 12, 200)
    left.plot(distance, np.log1p(np.exp(-distance)), color=BLUE, linewidth=2)
    left.set(xlabel="distance D", ylabel="softplus(−D)", title="the loss")
    right.semilogy(distance, sigmoid(-distance), color=RED, linewidth=2)
    right.set(xlabel="distance D", ylabel="|slope|", title="how hard it pushes")
    return drawn


@figure
def distillation() -> Figure:
    """Draw accuracy and NLL of an ensemble of four WRN28x1s, of one of them, and of its students."""
    drawn, (axes,) = panels(1, height=3.4)
    drawn.set_size_inches(5.4, 3.4)
    ensemble, students = record("distillation-cifar10-wrn28x1-de4"), record("distillation-cifar10-wrn28x1")
    names = {"kd": "KD", "latentbe": "LatentBE", "latentbe_tdiv_sdiv": "LatentBE + TDiv−SDiv"}
    points = [
        (
            "one of the four",
            fmean(p["accuracy"] for p in ensemble["peers"]),
            fmean(p["nll"] for p in ensemble["peers"]),
        ),
        ("all four, four passes", ensemble["ensemble"]["accuracy"], ensemble["ensemble"]["nll"]),
        *((names[run["method"]], run["peers"][0]["accuracy"], run["peers"][0]["nll"]) for run in students),
    ]
    for index, (label, accuracy, nll) in enumerate(points):
        axes.plot(100 * accuracy, nll, "sodd^"[index], color=COLOURS[(0, 2, 1, 1, 1)[index]], markersize=8)
        axes.annotate(label, (100 * accuracy, nll), xytext=(8, 4), textcoords="offset points", fontsize=9)
    axes.set(xlabel="accuracy, %", ylabel="NLL, nats", xlim=(92.7, 95.3), ylim=(0.15, 0.3), title="WRN28x1, CIFAR-10")
    return drawn


@figure
def weight_sharing() -> Figure:
    """Draw weights by mean and scale with three components and outliers, and measured NLL against bytes."""
    drawn, (left, right) = panels(2, height=3.3)
    generator = np.random.default_rng(0)
    centres = [(-0.06, 0.022, 0.018, 0.004), (0.0, 0.014, 0.014, 0.003), (0.065, 0.024, 0.02, 0.005)]
    for (mean, scale, wide, tall), colour in zip(centres, (BLUE, GREEN, RED)):
        weights = generator.normal((mean, scale), (wide, tall), (140, 2))
        left.plot(*weights.T, ".", color=colour, markersize=3, alpha=0.5)
        left.add_patch(Ellipse((mean, scale), 4 * wide, 4 * tall, fill=False, color=colour, linewidth=1.5))
    outliers = generator.uniform((0.17, 0.005), (0.26, 0.04), (7, 2)) * generator.choice([(-1, 1), (1, 1)], 7)
    left.plot(*outliers.T, "x", color=GREY, label="outliers")
    left.set(xlabel="mean of a weight", ylabel="its scale", title="components (a sketch)")
    left.legend(loc="upper left")
    runs = record("sharing-cifar10-resnet20") + record("sharing-cifar10-resnet20-gains")
    groups = {
        "network, float32": [run for run in runs if run["method"] == "dnn"],
        "posterior, float32": [run for run in runs if run["method"] == "stage1" and run["draws"] == 30][3:6],
        "codebook": [run for run in runs if run["method"] == "shared"][3:6],
        "codebook, rate penalty": [run for run in runs if run["method"] == "shared_small_gain0.05"],
    }
    for (label, group), marker, colour in zip(groups.items(), "so^D", (GREY, RED, BLUE, GREEN)):
        size, nll = (fmean(run["peers"][0][key] for run in group) for key in ("bytes", "nll"))
        right.semilogx(size / 1000, nll, marker, color=colour, markersize=8, label=label)
    right.set(
        xlabel="KB of the weights file", ylabel="NLL, nats", title="ResNet-20, CIFAR-10, 3 seeds", ylim=(0.25, 0.37)
    )
    right.set_xticks([150, 250, 500, 1000, 2000], ["150", "250", "500", "1000", "2000"])
    right.minorticks_off()
    right.legend(loc="upper left")
    return drawn


@figure
def calibration() -> Figure:
    """Draw reliability of logits that are twice too large, and measured accuracy of the images kept."""
    drawn, (left, right) = panels(2)
    confidence = np.linspace(0.5, 0.999, 200)
    logit = np.log(confidence / (1 - confidence))
    left.plot([0.5, 1], [0.5, 1], color=GREY, linewidth=0.8, linestyle=":")
    left.plot(confidence, sigmoid(logit / 2), color=RED, label="logits twice too large")
    left.plot(sigmoid(logit / 2), sigmoid(logit / 2), color=GREEN, linestyle="--", label="at temperature 2")
    left.set(xlabel="confidence", ylabel="accuracy", title="two classes")
    left.legend(loc="upper left")
    for run in record("mutual-cifar100-resnet20")[1:3]:
        peer = run["peers"][-1]
        kept = {float(share): value for share, value in peer["retention"].items()} | {1.0: peer["accuracy"]}
        shares = sorted(kept)
        name = {"vanilla": "alone", "dml": "taught by a peer"}[run["method"]]
        right.plot([100 * s for s in shares], [100 * kept[s] for s in shares], "o-", label=name)
    right.set_prop_cycle(None)
    for line, colour in zip(right.get_lines(), (BLUE, RED)):
        line.set_color(colour)
    right.set(xlabel="images kept, % (least disagreement first)", ylabel="accuracy, %", title="ResNet-20, CIFAR-100")
    right.legend()
    return drawn


@figure
def guarantees() -> Figure:
    """Draw coverage and risk over random splits, as `benchmarks/guarantees.py` has measured them."""
    run = record("guarantees")["runs"][0]
    drawn, (left, right) = panels(2)
    sets = {
        promise["method"]: promise
        for promise in run["promises"]
        if "promised coverage" in promise and not promise["by_class"]
    }
    for (method, promise), colour in zip(sets.items(), (BLUE, RED, GREEN)):
        edges = np.linspace(*promise["histogram"]["edges"], len(promise["histogram"]["counts"]) + 1)
        left.stairs(promise["histogram"]["counts"], 100 * edges, color=colour, label=method.upper(), linewidth=1.2)
    level, expected = promise["promised coverage"], promise["expected"]
    middle = (edges[1:] + edges[:-1]) / 2
    law = NormalDist(expected["mean"], expected["deviation"])
    heights = [run["rounds"] * (edges[1] - edges[0]) * law.pdf(x) for x in middle]
    left.plot(100 * middle, heights, ":", color=GREY, label="expected", linewidth=1)
    left.axvline(100 * level, color=GREY, linewidth=0.8)
    left.set(xlabel="coverage of the others, %", ylabel="splits", title=f"promised: {100 * level:g} %")
    left.legend(loc="upper left")
    risks = [promise for promise in run["promises"] if "promised risk" in promise and not promise["by_class"]]
    for promise, colour in zip(risks, (BLUE, RED)):
        counts = np.array(promise["histogram"]["counts"])
        edges = 100 * np.linspace(*promise["histogram"]["edges"], len(counts) + 1)
        label = f"promised: {100 * promise['promised risk']:g} %, broken in {100 * promise['broken']:.1f} %"
        right.stairs(counts, edges, color=colour, label=label, linewidth=1.2)
        right.axvline(100 * promise["promised risk"], color=colour, linewidth=0.8)
    right.set(xlabel="wrong answers, %", ylabel="splits", title=f"at most {100 * risks[0]['delta']:g} % may be broken")
    right.set_ylim(0, 1.35 * right.get_ylim()[1])
    right.legend(loc="upper right")
    return drawn


@figure
def early_stopping() -> Figure:
    """Draw how many draws settle a class whose margin over its rival is the same in every draw."""
    from peerbayes.inference.early_stopping import Referee

    drawn, (axes,) = panels(1)
    drawn.set_size_inches(4.6, 3.0)
    margins = np.linspace(0.03, 1, 195)
    for level, colour in ((0.05, BLUE), (0.01, RED)):
        needed = -math.log(level * 6 / math.pi**2)
        draws = []
        for margin in margins:
            number = 1
            gains = [math.log1p(stake * margin) for stake in Referee.STAKES]
            while math.log(fmean(math.exp(number * gain) for gain in gains)) < needed:
                number += 1
            draws.append(number)
        axes.semilogy(margins, draws, color=colour, label=f"error level {level:g}")
    axes.set(xlabel="margin of the leading class in every draw", ylabel="draws needed")
    axes.legend()
    return drawn


@figure
def yardsticks() -> Figure:
    """Draw SGD at a constant rate on a quadratic with SWAG's Gaussian, and how IVON finds the scale of another."""
    noise = np.random.default_rng(4)
    drawn, (plane, scales) = panels(2)
    hessian = np.array([[1.0, 0.6], [0.6, 0.6]])
    w, path = np.array([2.2, 1.5]), []
    for _ in range(400):
        w = w - 0.05 * (hessian @ w + 1.5 * noise.standard_normal(2))
        path.append(w)
    kept = np.array(path)[-200::10]  # the ends of 20 epochs of ten steps
    off = kept - kept.mean(0)
    covariance = 0.5 * np.diag((off**2).mean(0)) + off.T @ off / (2 * (len(kept) - 1))
    values, vectors = np.linalg.eigh(covariance)
    angle = math.degrees(math.atan2(vectors[1, 1], vectors[0, 1]))
    for times in (1, 2):
        width, height = 2 * times * np.sqrt(values[1]), 2 * times * np.sqrt(values[0])
        plane.add_patch(Ellipse(tuple(kept.mean(0)), width, height, angle=angle, fill=False, color=RED))
    plane.plot(*np.array(path).T, color=GREY, linewidth=0.6, alpha=0.6)
    plane.plot(*kept.T, ".", color=BLUE)
    plane.set(title="SWAG", xlabel="$w_1$", ylabel="$w_2$")
    curvature, ess, decay, rate = 1.0, 100.0, 0.1, 0.01
    exact = 1 / math.sqrt(ess * (curvature + decay))
    for first, colour in ((0.3, BLUE), (0.04, GREEN)):
        h, m, sigma = 1 / (ess * first**2) - decay, 1.0, []
        for _ in range(1200):
            sigma.append(1 / math.sqrt(ess * (h + decay)))
            eps = noise.standard_normal()
            gradient = curvature * (m + sigma[-1] * eps)
            sample = gradient * eps / sigma[-1]
            h += 0.5 * (rate * (h - sample)) ** 2 / (h + decay) - rate * (h - sample)
            m -= 0.05 * (gradient + decay * m) / (h + decay)
        scales.plot(sigma, color=colour)
    scales.axhline(exact, color=RED, linestyle="--")
    scales.set(title="IVON", xlabel="step", ylabel="σ", yscale="log")
    return drawn


@figure
def worth() -> Figure:
    """Draw the NLL of the default recipe and of what people would use instead, at equal cost of a prediction."""
    name = "worth-cifar100-resnet20"
    default, plain, peers = record(f"{name}-one-pass"), record(f"{name}-rate"), record(f"{name}-plain-peers")
    plain = [run for run in plain if run["recipe"].endswith("-plain")]

    def means(parts: Callable[[Any], list[Any]], runs: list[Any]) -> list[float]:
        return [fmean(part["cnll"] for part in parts(run)) for run in runs]

    rows = [
        (
            "one pass",
            {
                "a plain network": means(lambda run: run["peers"], plain),
                "a plain peer": means(lambda run: run["peers"], peers),
                "a Bayesian peer, mean": means(lambda run: [p["averaged"]["mean"] for p in run["peers"]], default),
            },
        ),
        (
            "two passes",
            {
                "two plain networks": means(lambda run: run["peers"], record(f"{name}-two-plain")),
                "two plain peers": means(lambda run: [run["ensemble"]], peers),
                "both Bayesian peers, means": means(lambda run: [run["ensemble"]["averaged"]["mean"]], default),
            },
        ),
    ]
    drawn, both = panels(2, 2.0)
    for axes, (title, forms) in zip(both, rows):
        for index, (values, colour) in enumerate(zip(forms.values(), (GREY, GREEN, BLUE))):
            error = np.std(values, ddof=1) / math.sqrt(len(values))
            axes.errorbar(fmean(values), index, xerr=error, fmt="o", color=colour, capsize=3)
            axes.annotate(f"{fmean(values):.3f}", (fmean(values), index - 0.2), ha="center", color=colour, fontsize=9)
        axes.set(title=title, xlabel="NLL on CIFAR-100, nats", xlim=(0.93, 1.13), ylim=(2.5, -0.7))
        axes.set_yticks(range(len(forms)), list(forms))
        axes.grid(visible=False, axis="y")
    return drawn


def main() -> None:
    """Draw all figures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            draw().savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
