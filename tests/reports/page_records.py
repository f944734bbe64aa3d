"""Made records that have all that a page can show."""

import base64
import io

import numpy as np
from PIL import Image

EDGES = np.linspace(0, 2.3, 31).tolist()
NASTY = "<script>document.title='hurt'</script><img src=x onerror=\"document.title='hurt'\">"


def picture(value):
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def shown(kind, label="cat"):
    def one(place, answer):
        content = picture(20 * place) if kind == "image" else f"{NASTY} text {place}"
        return {"index": place, "label": label, "class": answer, "probability": 0.5, "entropy": 1.2, "shown": content}

    lists = {"least certain": (label, "dog"), "most certain": (label, label), "most certain, and wrong": ("dog", "dog")}
    return {"kind": kind, **{name: [one(n, answer) for n, answer in enumerate(two)] for name, two in lists.items()}}


def certificate(errors=2, held=91):
    about = {"data": "digits", "images": 300, "fitted": 100, "seed": 0, "draws": 5, "temperature": 1.1, "classes": 10}
    coverage = {"level": 0.9, "method": "lac", "thresholds": [0.75], "images": [300]}
    risk = {"level": 0.05, "delta": 0.1, "thresholds": [0.6], "images": [300], "answered": [250], "errors": [4]}
    found = {"images": 100, "coverage": {"held": held, "size": 1.25}, "risk": {"answered": 80, "errors": errors}}
    return {**about, "coverage": coverage, "risk": risk, "found": found}


def judged(chance, accuracy, **more):
    counts = np.array([0] * 5 + [20, 30, 40, 50, 60])
    confidence = [None] * 5 + [0.55, 0.65, 0.75, 0.85, 0.95]
    reliability = {"count": counts.tolist(), "confidence": confidence}
    reliability["accuracy"] = [None if c is None else min(1.0, c * (0.9 + 0.2 * chance.random())) for c in confidence]
    kept = {share: min(1.0, accuracy + 0.1 * (1 - float(share))) for share in ("0.2", "0.4", "0.6", "0.8")}
    histograms = {name: chance.multinomial(500, shares).tolist() for name, shares in (
        ("inside", np.linspace(2, 0, 30) / 30), ("outside", np.full(30, 1 / 30)))}  # fmt: skip
    away = {"auroc": 0.9, "aupr": 0.8, "fpr85": 0.2, "entropy": {"edges": EDGES, **histograms}}
    return {
        "accuracy": accuracy, "nll": 1 - accuracy, "ece": 0.03, "cnll": 1 - accuracy, "cece": 0.02,
        "reliability": reliability, "disagreement": 0.1, "out_of_distribution": {"photographs": away},
        "corrupted": {"accuracy": accuracy - 0.1, "nll": 0.5, "ece": 0.1},
        "selective": {ranking: {"aurc": 0.1, "retention": kept} for ranking in ("entropy", "disagreement")}, **more,
    }  # fmt: skip


def records(methods=("plain", "bayesian", "pair"), seeds=(0, 1, 2), kind="image"):
    """Methods, the last of them with two peers and their ensemble."""
    chance, found = np.random.default_rng(0), []
    for place, method in enumerate(methods):
        for seed in seeds:
            own = {"name": "net", **judged(chance, 0.9 + 0.01 * (2 * place % 3) + 0.002 * seed)}
            record = {
                "recipe": method, "dataset": "digits", "network": "resnet8", "method": method, "seed": seed,
                "epochs": 3, "hardware": "a CPU", "versions": {"torch": "1"}, "seconds": 1.0, "draws": 5,
                "ece_bins": 10, "peers": [own], "examples": shown(kind),
            }  # fmt: skip
            if place == len(methods) - 1:
                record["peers"] = [{**own, "name": name} for name in ("first", "second")]
                record["ensemble"] = judged(chance, 0.95) | {"certificate": certificate()}
            found.append(record)
    return found
