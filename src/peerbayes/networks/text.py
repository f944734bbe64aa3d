"""Define networks for texts, rows of token numbers (B, L) padded with ``inputs.padding``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from peerbayes.errors import InputError
from peerbayes.networks.inputs import Inputs
from peerbayes.networks.registry import network

CHARACTERS = 70  # of the alphabet of Zhang et al. 2015


def _check_texts(inputs: Inputs, name: str) -> None:
    if not inputs.tokens:
        raise InputError(f"network '{name}' is for texts, but the data are images")


class FastText(nn.Module):
    """fastText: mean of the embeddings of all words and n-grams, then linear layers (Joulin et al. 2017).

    Padding is no part of the mean. The embeddings start uniform on ±1/dimension, as fastText's do, but for padding and
    token 1, an unknown word, which start at 0, and for words with a vector in ``inputs.vectors``.

    Args:
        inputs: classes, token numbers, padding and word vectors of the data.
        dimension: of the embeddings; that of the word vectors, where there are some, comes first.
        hidden: units of a linear layer before the last one, without a nonlinearity; None for no such layer.
        frozen: keep the embeddings as they start.
    """

    def __init__(self, inputs: Inputs, dimension: int = 10, hidden: int | None = None, frozen: bool = False) -> None:
        super().__init__()
        dimension = inputs.dimension or dimension
        self.padding = inputs.padding
        self.embedding = nn.Embedding(inputs.tokens, dimension)
        self.hidden = nn.Identity() if hidden is None else nn.Linear(dimension, hidden)
        self.linear = nn.Linear(hidden or dimension, inputs.classes)
        with torch.no_grad():
            nn.init.uniform_(self.embedding.weight, -1 / dimension, 1 / dimension)
            self.embedding.weight[[inputs.padding, 1]] = 0
            if inputs.vectors is not None:
                self.embedding.weight[inputs.vectors.tokens] = inputs.vectors.vectors
        self.embedding.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        present = (x != self.padding).unsqueeze(-1)
        total = (self.embedding(x) * present).sum(1)
        logits: Tensor = self.linear(self.hidden(total / present.sum(1).clamp_min(1)))
        return logits


@network
def fasttext(inputs: Inputs) -> nn.Module:
    """Return fastText with 10 dimensions, as in its paper, or those of the word vectors."""
    _check_texts(inputs, "fasttext")
    return FastText(inputs)


@network
def fasttext100(inputs: Inputs) -> nn.Module:
    """Return fastText with 100 dimensions, the default of its program, or those of the word vectors."""
    _check_texts(inputs, "fasttext100")
    return FastText(inputs, 100)


@network
def fasttext_frozen(inputs: Inputs) -> nn.Module:
    """Return fastText of paper 2: fixed word vectors, a linear layer of 10 units, a linear head (3 k weights)."""
    _check_texts(inputs, "fasttext_frozen")
    if not inputs.dimension:
        raise InputError("network 'fasttext_frozen' needs word vectors: name a file of them as 'vectors' of the texts")
    return FastText(inputs, hidden=10, frozen=True)


class CharCNN(nn.Module):
    """Character network of Zhang et al. 2015: six convolutions over one-hot characters, three linear layers.

    Kernels 7, 7, 3, 3, 3, 3 with 256 features, relu after each, pools of 3 after the first, second and last; dropout
    of 1/2 after the two hidden linear layers. All weights start N(0, 0.05²).

    Args:
        inputs: classes, length and token numbers of the data.
        units: of each hidden linear layer.
    """

    characters: Tensor

    def __init__(self, inputs: Inputs, units: int = 1024) -> None:
        super().__init__()
        if inputs.tokens != CHARACTERS + 1:
            raise InputError("CharCNN needs texts with tokens = 'characters'")
        (length,) = inputs.shape
        positions = (((length - 6) // 3 - 6) // 3 - 8) // 3
        if positions < 1:
            raise InputError(f"CharCNN needs texts of at least 123 characters, got length {length}")
        self.register_buffer("characters", torch.arange(1, CHARACTERS + 1).view(1, -1, 1), persistent=False)
        self.conv1 = self._block(CHARACTERS, 7, pooled=True)
        self.conv2 = self._block(256, 7, pooled=True)
        self.conv3, self.conv4, self.conv5 = (self._block(256, 3, pooled=False) for _ in range(3))
        self.conv6 = self._block(256, 3, pooled=True)
        sizes = (256 * positions, units, units)
        self.hidden = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.5)) for a, b in itertools.pairwise(sizes))
        )
        self.linear = nn.Linear(units, inputs.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.Linear):
                nn.init.normal_(module.weight, std=0.05)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    @staticmethod
    def _block(channels_in: int, kernel: int, pooled: bool) -> nn.Sequential:
        pool = [nn.MaxPool1d(3)] if pooled else []
        return nn.Sequential(nn.Conv1d(channels_in, 256, kernel), nn.ReLU(inplace=True), *pool)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.unsqueeze(1) == self.characters).float()
        x = self.conv3(self.conv2(self.conv1(x)))
        x = self.conv6(self.conv5(self.conv4(x)))
        logits: Tensor = self.linear(self.hidden(x.flatten(1)))
        return logits


@network
def charcnn(inputs: Inputs) -> nn.Module:
    """Return the character network with linear layers of 1,024 units; made for texts of 1,014 characters."""
    _check_texts(inputs, "charcnn")
    return CharCNN(inputs)


@network
def charcnn256(inputs: Inputs) -> nn.Module:
    """Return the character network of paper 2, with linear layers of 256 units (2 M weights for 300 characters)."""
    _check_texts(inputs, "charcnn256")
    return CharCNN(inputs, units=256)


class SequenceClassifier(nn.Module):
    """Wrap a Hugging Face model for sequence classification as a network from token numbers to logits.

    Args:
        model: is called with ``input_ids`` and ``attention_mask``, and returns an object with ``logits``.
        padding: the token number that the attention mask leaves out; by default that of the model's ``config``, or 0.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from peerbayes.networks import SequenceClassifier
        >>> class Model(torch.nn.Module):
        ...     def forward(self, input_ids, attention_mask):
        ...         return SimpleNamespace(logits=(input_ids * attention_mask).sum(1, keepdim=True).float())
        >>> SequenceClassifier(Model(), padding=9)(torch.tensor([[2, 3, 9, 9]]))
        tensor([[5.]])
    """

    def __init__(self, model: nn.Module, padding: int | None = None) -> None:
        super().__init__()
        self.model = model
        configured = getattr(getattr(model, "config", None), "pad_token_id", None)
        self.padding: int = padding if padding is not None else configured or 0

    def forward(self, x: Tensor) -> Tensor:
        ids = x.long()
        logits: Tensor = self.model(input_ids=ids, attention_mask=(ids != self.padding).long()).logits
        return logits
