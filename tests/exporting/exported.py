"""Small networks to export, and processes that run what was exported."""

import re
import subprocess
import sys

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn

import peerbayes as pb

SHAPE = (2, 4, 4)
BLOCKED = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Refused())
"""


def conv_net():
    """Return a network of a convolution, batch-norm that has seen images, and a linear layer."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    network(torch.rand(32, *SHAPE))
    return network.eval()


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(size, size) for _ in range(4))

    def forward(self, x, mask):
        split = (x.shape[0], x.shape[1], 4, -1)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in self.parts[:3])
        return self.parts[3](F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class TinyBert(nn.Module):
    """A sentence encoder of MiniLM's form: attention that leaves padding out, and the mean over tokens."""

    def __init__(self, tokens=40, length=10, size=16, classes=3):
        super().__init__()
        self.words, self.places = nn.Embedding(tokens, size), nn.Embedding(length, size)
        self.attention = nn.ModuleList(Attention(size) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(4))
        self.middle = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)) for _ in range(2)
        )
        self.head = nn.Linear(size, classes)

    def forward(self, tokens):
        present = tokens != 0
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for number, (attention, middle) in enumerate(zip(self.attention, self.middle)):
            x = self.norms[2 * number](x + attention(x, present[:, None, None, :]))
            x = self.norms[2 * number + 1](x + middle(x))
        weight = present[..., None].float()
        return self.head((x * weight).sum(1) / weight.sum(1).clamp_min(1))


def ran(path, *inputs):
    """Run an ONNX file; return its outputs as tensors."""
    session = onnxruntime.InferenceSession(str(path))
    feeds = {given.name: np.asarray(value) for given, value in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


def differs(outputs, prediction):
    """Return by how much outputs differ from a prediction."""
    wanted = (prediction.probabilities, prediction.entropy, prediction.disagreement)
    assert [tuple(one.shape) for one in outputs] == [tuple(one.shape) for one in wanted]
    return max(float((one.detach() - other).abs().max()) for one, other in zip(outputs, wanted, strict=True))


def code_of(folder, number=0):
    """Return one of the pieces of Python of an export's card."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[number]


def without(modules, code, folder):
    """Run code in a folder, in a fresh process that can't import some modules; return what it printed."""
    script = f"BLOCKED = {modules!r}\n{BLOCKED}\n{code}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def mean_field(**options):
    return pb.MeanField(conv_net(), width=0.3, **options).eval()
