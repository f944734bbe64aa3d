"""Train two Bayesian networks that teach each other on a folder of images, and write their report page.

python examples/image_folder.py [FOLDER] [EPOCHS]

On the command line: peerbayes train --data my-images/
"""

import sys
from pathlib import Path

import torch
from PIL import Image

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/image-folder")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 30

# A folder of images, one sub-folder a class: my-images/train/three/17.png
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
digits = pb.data.load("digits")
for split, part in (("train", digits.train), ("test", digits.test)):
    images, labels = part.batch(torch.arange(len(part)), torch.device("cpu"))
    for number, (image, label) in enumerate(zip(images.byte(), labels, strict=True)):
        path = FOLDER / "my-images" / split / NAMES[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)

data = FOLDER / "my-images"
run = pb.train(data=data, run=FOLDER / "run", epochs=EPOCHS)  # network, size and batches follow the images
record = pb.evaluate(run, examples=8)  # with the images that it is least and most certain of, for the page
pb.reports.write_report(run, record)

print(pb.reports.text_table([record]))
print(f"\n{run.predict(sorted((data / 'test' / 'three').iterdir())[:5])}")
print(f"\n{run.folder / 'report.html'}")
