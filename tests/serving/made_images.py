"""What schemathesis sends as images: real ones, of every format and many sizes."""

import io

import numpy as np
import schemathesis
from hypothesis import strategies as st
from PIL import Image

from peerbayes.data.splits import FORMATS


def image(number):
    chance = np.random.default_rng(number)
    pixels = chance.integers(0, 256, (*chance.integers(1, 40, 2), 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), FORMATS[number % len(FORMATS)])
    return file.getvalue()


Image.init()
for name in FORMATS:
    schemathesis.openapi.media_type(Image.MIME[name], st.integers(0, 1 << 16).map(image))
