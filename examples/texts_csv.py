"""Train two Bayesian networks that teach each other on a CSV file of texts, and write their predictions as a table.

python examples/texts_csv.py [FOLDER] [EPOCHS]

On the command line: peerbayes train --data texts.csv; peerbayes predict runs/text-texts-seed0 new.csv --format csv
"""

import csv
import inspect
import sys
from pathlib import Path

import numpy as np
import torch

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/texts-csv")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 10

# Texts that are on every machine: the sentences of two libraries' documentation. Which library is it of?
FOLDER.mkdir(parents=True, exist_ok=True)
with (FOLDER / "texts.csv").open("w", newline="", encoding="utf-8") as file:
    table = csv.writer(file)
    table.writerow(["text", "label"])  # a header is a header
    for library in (np, torch):
        for name in sorted(dir(library)):
            lines = (inspect.getdoc(getattr(library, name)) or "").splitlines()
            sentences = [line for line in lines if len(line.split()) > 5 and ">>>" not in line]
            table.writerows([sentence, library.__name__] for sentence in sentences[:2])

run = pb.train(data=FOLDER / "texts.csv", run=FOLDER / "run", epochs=EPOCHS)
print(pb.reports.text_table([pb.evaluate(run)]))

found = run.predict(["Returns a new tensor with the sine of the elements of input.", "Return the shape of an array."])
print(f"\n{found}")
found.to_csv(FOLDER / "predictions.csv")
