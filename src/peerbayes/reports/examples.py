"""Test images and texts that predictions are most and least certain of, to be looked at."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from peerbayes.data.dataset import Dataset
from peerbayes.data.splits import ArraySplit
from peerbayes.inference.prediction import entropy_of
from peerbayes.reports.record import Record

SHOWN = 8  # of each kind
SIDE = 96  # of a thumbnail, at most
LETTERS = 280  # of a text
LEAST, MOST, WRONG = "least certain", "most certain", "most certain, and wrong"


def examples(log_p: Tensor, data: Dataset, count: int = SHOWN) -> Record:
    """Return test inputs by the entropy of their predictions: the least and most certain, and the surest mistakes.

    Args:
        log_p: log-probabilities (N, C) of the test split.
        data: whose test split it is.
        count: of each kind, at most.

    Returns:
        ``kind`` (``image`` or ``text``), and under each of the three names a list: ``index`` in the test split, true
        ``label``, predicted ``class``, its ``probability``, ``entropy`` in nats, and ``shown``, the text or the
        address (``data:``) of a thumbnail. Texts whose words are not at hand are left out.
    """
    labels = data.test.labels
    assert labels is not None
    log_p, labels = log_p.cpu(), labels.cpu()
    entropy, predicted = entropy_of(log_p), log_p.argmax(-1)
    rising = entropy.argsort(stable=True)
    chosen = {LEAST: rising.flip(0), MOST: rising, WRONG: rising[(predicted != labels)[rising]]}
    shown = {name: index[:count] for name, index in chosen.items()}
    seen = _seen(data, torch.cat(list(shown.values())).unique())
    names = data.class_names or [str(number) for number in range(data.classes)]
    found: Record = {"kind": "text" if data.vocabulary is not None else "image"}
    for name, index in shown.items():
        found[name] = [
            {
                "index": place,
                "label": names[int(labels[place])],
                "class": names[int(predicted[place])],
                "probability": float(log_p[place].max().exp()),
                "entropy": float(entropy[place]),
                "shown": seen[place],
            }
            for place in index.tolist()
            if place in seen
        ]
    return found


def _seen(data: Dataset, index: Tensor) -> Mapping[int, str]:
    """Return texts, or thumbnails, by their places in the test split."""
    places = index.tolist()
    if data.vocabulary is not None:
        texts = data.test.texts if isinstance(data.test, ArraySplit) else None
        return {} if texts is None else {place: _shortened(texts[place]) for place in places}
    images, _ = data.test.batch(index, torch.device("cpu"))
    return {place: thumbnail(image) for place, image in zip(places, images, strict=True)}


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def thumbnail(image: Tensor) -> str:
    """Return an image (C, H, W), uint8 or in [0, 1], as the address of a small picture.

    Example:
        >>> import torch
        >>> thumbnail(torch.zeros(1, 8, 8, dtype=torch.uint8))[:22]
        'data:image/png;base64,'
    """
    if image.is_floating_point():
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
    channels = image if len(image) in (1, 3) else image.float().mean(0, keepdim=True).to(torch.uint8)
    picture = Image.fromarray(channels[0].numpy() if len(channels) == 1 else channels.permute(1, 2, 0).numpy())
    small = max(picture.size) <= SIDE
    how: dict[str, Any] = {"format": "PNG", "optimize": True} if small else {"format": "JPEG", "quality": 80}
    picture.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, **how)
    return f"data:image/{how['format'].lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
