"""Make a custom recurrent network Bayesian, and let two of them teach each other.

python examples/own_lstm.py [FOLDER] [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import peerbayes as pb

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/own-lstm")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 20


class Rows(nn.Module):
    """Read an image row by row, and classify it by the last hidden state."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        states, _ = self.lstm(x.squeeze(1))
        return self.head(states[:, -1])


net = Rows()
print(pb.MeanField(net))  # how many weights are Bayesian: those of the LSTM are

run = pb.fit(
    net, data="digits", run=FOLDER / "run", epochs=EPOCHS, overrides="stages.0.optimizer={ name = 'adam', lr = 0.01 }"
)
print(pb.reports.text_table([pb.evaluate(run)]))

digits = pb.data.load("digits")
images, labels = digits.test.batch(torch.arange(4), torch.device("cpu"))
noise = torch.rand(4, 1, 8, 8)
print(f"\ndigits {labels.tolist()}:\n{run.predict(images)}")
print(f"\nnoise:\n{run.predict(noise)}")
