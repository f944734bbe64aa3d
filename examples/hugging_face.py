"""Train two Bayesian networks that teach each other on a Hugging Face data set.

pip install datasets
python examples/hugging_face.py [FOLDER] [EPOCHS]
"""

import sys
from pathlib import Path

import datasets
import torch
from PIL import Image

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/hugging-face")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 30


def as_hugging_face(split):
    """Return images as `datasets.load_dataset` returns them; here embedded ones, so that nothing is downloaded."""
    images, labels = split.batch(torch.arange(len(split)), torch.device("cpu"))
    rows = {"image": [Image.fromarray(image[0].numpy()) for image in images.byte()], "label": labels.tolist()}
    names = datasets.ClassLabel(names=[f"digit {number}" for number in range(10)])
    return datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image(), "label": names}))


digits = pb.data.load("digits")
mine = datasets.DatasetDict({"train": as_hugging_face(digits.train), "test": as_hugging_face(digits.test)})

run = pb.train(data=mine, run=FOLDER / "run", epochs=EPOCHS)
print(pb.reports.text_table([pb.evaluate(run, data=mine)]))
print(f"\n{run.predict(mine['test']['image'][:5])}")
