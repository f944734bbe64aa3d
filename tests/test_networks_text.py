"""Networks for texts against arithmetic, as point and as mean-field posteriors."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from peerbayes import MeanField, Point
from peerbayes.data import TextOptions, load
from peerbayes.errors import InputError
from peerbayes.math.noise import Address
from peerbayes.networks import Inputs, WordVectors, build
from peerbayes.networks.text import CharCNN, FastText, SequenceClassifier

WORDS = Inputs(3, (6,), (), (), tokens=9)
CHARACTERS = Inputs(4, (130,), (), (), tokens=71)
IMAGES = Inputs(10, (1, 8, 8), (0.3,), (0.4,))


def random_tokens(inputs, count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, inputs.tokens, (count, *inputs.shape), generator=generator, dtype=torch.int32)


# ---- fastText -----------------------------------------------------------------------------------------------------


def test_fasttext_by_hand():
    network = build("fasttext", Inputs(2, (4,), (), (), tokens=4, dimension=2))
    with torch.no_grad():
        network.embedding.weight.copy_(torch.tensor([[9.0, 9], [1, 0], [2, 4], [0, 8]]))
        network.linear.weight.copy_(torch.tensor([[1.0, 10], [0, 1]]))
        network.linear.bias.copy_(torch.tensor([0.5, 0]))
    tokens = torch.tensor([[2, 3, 0, 0], [1, 2, 0, 3], [0, 0, 0, 0]], dtype=torch.int32)
    # Means (1, 6), (1, 4) and nothing.
    assert torch.equal(network(tokens), torch.tensor([[61.5, 6], [41.5, 4], [0.5, 0]]))


def test_fasttext_leaves_out_the_padding_of_the_data():
    torch.manual_seed(0)
    network = build("fasttext", Inputs(2, (4,), (), (), tokens=5, dimension=2, padding=3))
    assert not network.embedding.weight[3].any()
    assert network.embedding.weight[0].any()
    with torch.no_grad():
        network.embedding.weight.copy_(torch.tensor([[6.0, 0], [1, 0], [2, 4], [9, 9], [0, 8]]))
        network.linear.weight.copy_(torch.eye(2))
        network.linear.bias.zero_()
    tokens = torch.tensor([[0, 2, 4, 3], [0, 3, 3, 3], [3, 3, 3, 3]], dtype=torch.int32)
    # ((6, 0) + (2, 4) + (0, 8)) / 3, (6, 0) and nothing.
    torch.testing.assert_close(network(tokens), torch.tensor([[8 / 3, 4], [6, 0], [0, 0]]))


@pytest.mark.parametrize("posterior", [Point, MeanField])
def test_padding_changes_nothing(posterior):
    made = posterior(build("fasttext", WORDS), bayesian=lambda _, module: isinstance(module, nn.Embedding | nn.Linear))
    tokens = random_tokens(WORDS)
    weights = made.draw(Address(0, "peer", "draw", 3))
    plain = made(tokens, weights)
    torch.testing.assert_close(made(F.pad(tokens, (0, 7)), weights), plain)
    torch.testing.assert_close(made(F.pad(tokens, (4, 0)), weights), plain)


def test_an_unknown_word_starts_without_a_say():
    torch.manual_seed(0)
    network = build("fasttext", WORDS)
    assert bool((network.embedding.weight[:2] == 0).all())
    rest = network.embedding.weight[2:].detach()
    assert float(rest.abs().max()) <= 1 / 10
    assert float(rest.std()) == pytest.approx(0.1 / math.sqrt(3), rel=0.3)
    network(random_tokens(WORDS)).sum().backward()
    assert bool((network.embedding.weight.grad[0] == 0).all())


def test_word_vectors_are_what_the_embedding_starts_from():
    vectors = WordVectors(torch.tensor([2, 5]), torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    inputs = Inputs(3, (6,), (), (), tokens=9, dimension=3, vectors=vectors)
    for name in ("fasttext", "fasttext100", "fasttext_frozen"):
        weight = build(name, inputs).embedding.weight
        assert weight.shape == (9, 3)
        assert torch.equal(weight[[2, 5]], vectors.vectors)
        assert float(weight[[3, 4, 6]].detach().abs().max()) <= 1 / 3
    # What a run keeps has no vectors, and rebuilds the same network for its weights.
    kept = json.loads(json.dumps(inputs.describe()))
    assert kept == {"classes": 3, "shape": [6], "mean": [], "std": [], "tokens": 9, "dimension": 3, "padding": 0}
    again = Inputs(**{key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()})
    assert again == inputs
    first, second = build("fasttext_frozen", inputs), build("fasttext_frozen", again)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(random_tokens(inputs)), second(random_tokens(inputs)))


def test_frozen_fasttext_is_that_of_the_paper(tmp_path):
    inputs = Inputs(4, (6,), (), (), tokens=9, dimension=300)
    network = build("fasttext_frozen", inputs)
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == 300 * 10 + 10 + 10 * 4 + 4 == 3054
    posterior = MeanField(network)
    assert posterior.mean.numel() == 3054
    # Frozen vectors are in the file all the same: they are not read from GloVe again.
    posterior.save(tmp_path / "weights.safetensors")
    again = MeanField.load(tmp_path / "weights.safetensors", build("fasttext_frozen", inputs))
    tokens = random_tokens(inputs)
    assert torch.equal(again.predict(tokens, 3).probabilities, posterior.predict(tokens, 3).probabilities)


# ---- CharCNN ------------------------------------------------------------------------------------------------------


def test_charcnn_has_the_layers_of_the_paper():
    network = build("charcnn", Inputs(4, (1014,), (), (), tokens=71))
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters() if name.endswith("weight")}
    kernels = [shapes[f"conv{i}.0.weight"] for i in range(1, 7)]
    assert kernels == [(256, 70, 7), (256, 256, 7), *[(256, 256, 3)] * 4]
    assert shapes["hidden.0.0.weight"] == (1024, 256 * 34)  # 34 places for 1,014 characters, as in the paper
    assert shapes["hidden.1.0.weight"] == (1024, 1024)
    assert sum(isinstance(m, nn.Dropout) and m.p == 0.5 for m in network.modules()) == 2
    assert float(network.conv2[0].weight.detach().std()) == pytest.approx(0.05, rel=0.01)
    small = build("charcnn256", Inputs(4, (300,), (), (), tokens=71))
    assert 1.8e6 < sum(p.numel() for p in small.parameters()) < 2e6  # "∼2M" in paper 2


def test_charcnn_against_its_formula():
    torch.manual_seed(0)
    network = CharCNN(CHARACTERS, units=16).eval()
    tokens = random_tokens(CHARACTERS)
    x = F.one_hot(tokens.long(), 71)[:, :, 1:].float().transpose(1, 2)  # padding is all zeros
    for number, pooled in enumerate([True, True, False, False, False, True], start=1):
        layer = getattr(network, f"conv{number}")[0]
        x = F.conv1d(x, layer.weight, layer.bias).relu()
        x = F.max_pool1d(x, 3) if pooled else x
    x = x.flatten(1)
    for block in network.hidden:
        x = F.linear(x, block[0].weight, block[0].bias).relu()
    torch.testing.assert_close(network(tokens), network.linear(x))


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        (
            "charcnn",
            Inputs(4, (122,), (), (), tokens=71),
            "CharCNN needs texts of at least 123 characters, got length 122",
        ),
        ("charcnn", WORDS, "CharCNN needs texts with tokens = 'characters'"),
        ("charcnn", IMAGES, "'charcnn' is for texts, but the data are images"),
        ("fasttext", IMAGES, "'fasttext' is for texts, but the data are images"),
        ("fasttext_frozen", WORDS, "'fasttext_frozen' needs word vectors"),
        ("resnet8", WORDS, "the network is for images, but the data are texts"),
    ],
)
def test_data_that_a_network_is_not_for(name, inputs, message):
    with pytest.raises(InputError, match=message):
        build(name, inputs)


def test_the_shortest_text_that_charcnn_takes():
    shortest = Inputs(4, (123,), (), (), tokens=71)
    assert CharCNN(shortest, units=8).hidden[0][0].in_features == 256
    assert CharCNN(shortest, units=8)(random_tokens(shortest)).isfinite().all()


# ---- Hugging Face models ------------------------------------------------------------------------------------------


class Stub(nn.Module):
    """The interface of a sequence classifier: the mean of what the mask lets through."""

    def __init__(self, tokens, classes):
        super().__init__()
        self.embeddings = nn.Embedding(tokens, 6)
        self.classifier = nn.Linear(6, classes)

    def forward(self, input_ids=None, attention_mask=None):
        assert input_ids.dtype == attention_mask.dtype == torch.int64
        mask = attention_mask[..., None]
        mean = (self.embeddings(input_ids) * mask).sum(1) / mask.sum(1).clamp_min(1)
        return SimpleNamespace(logits=self.classifier(mean))


def tiny_bert(tokens, classes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=tokens,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("make", [Stub, tiny_bert])
def test_a_sequence_classifier_sees_no_padding(make):
    network = SequenceClassifier(make(9, 3)).eval()
    tokens = random_tokens(WORDS).clamp_min(1)
    plain = network(tokens)
    assert plain.shape == (5, 3)
    torch.testing.assert_close(network(F.pad(tokens, (0, 5))), plain, rtol=1e-4, atol=1e-5)
    other = SequenceClassifier(network.model, padding=7).eval()
    torch.testing.assert_close(other(F.pad(tokens, (0, 5), value=7)), other(F.pad(tokens, (0, 9), value=7)))


def test_padding_is_that_of_the_models_config_where_it_has_one():
    model = Stub(9, 3)
    assert SequenceClassifier(model).padding == 0
    model.config = SimpleNamespace(pad_token_id=None)
    assert SequenceClassifier(model).padding == 0
    model.config = SimpleNamespace(pad_token_id=7)
    assert SequenceClassifier(model).padding == 7
    assert SequenceClassifier(model, padding=0).padding == 0


# ---- as posteriors ------------------------------------------------------------------------------------------------


def gaussian_kl(posterior):
    mean, std = posterior.mean.double(), posterior.std.double()
    return (0.5 * (std**2 + mean**2 - 1) - std.log()).sum()


CASES = {
    "fasttext": (lambda: FastText(WORDS), WORDS),
    "charcnn": (lambda: CharCNN(CHARACTERS, units=8), CHARACTERS),
    "sequence": (lambda: SequenceClassifier(Stub(9, 3)), WORDS),
    "bert": (lambda: SequenceClassifier(tiny_bert(9, 3)), WORDS),
}


@pytest.mark.parametrize("case", CASES)
def test_every_network_becomes_bayesian(case):
    torch.manual_seed(1)
    make, inputs = CASES[case]
    network = make()
    posterior = MeanField(network, seed=3).eval()
    layers = [m for m in network.modules() if isinstance(m, nn.Conv1d | nn.Linear | nn.EmbeddingBag | nn.Embedding)]
    # The row of a padding is not learnt, and must stay what it is.
    layers = [m for m in layers if not isinstance(m, nn.Embedding) or m.padding_idx is None]
    assert posterior.mean.numel() == sum(p.numel() for m in layers for p in m.parameters())
    torch.testing.assert_close(posterior.kl().double(), gaussian_kl(posterior), rtol=1e-4, atol=0)
    tokens = random_tokens(inputs).clamp_min(1)
    # A draw is the plain network with the drawn weights, and a prediction the mean over draws.
    addresses = [Address(posterior.seed, posterior.name, "draw", number) for number in range(4)]
    plain = [posterior.materialise(posterior.draw(address)).eval()(tokens) for address in addresses]
    drawn = [posterior(tokens, posterior.draw(address)) for address in addresses]
    torch.testing.assert_close(torch.stack(drawn), torch.stack(plain), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(drawn[0], drawn[1])
    expected = torch.stack(drawn).softmax(-1).mean(0)
    torch.testing.assert_close(posterior.predict(tokens, 4).probabilities, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(posterior.predict(tokens, 4, batch_size=2).probabilities, expected, rtol=1e-3, atol=1e-5)


def test_embeddings_are_bayesian_where_they_are_chosen():
    network = FastText(WORDS)
    posterior = MeanField(network, bayesian=lambda name, _: name == "embedding.weight")
    assert posterior.mean.numel() == 90
    assert posterior.rest.numel() == 33
    torch.testing.assert_close(posterior.kl().double(), gaussian_kl(posterior), rtol=1e-4, atol=0)


def loss_over_steps(posterior, split, count, steps, lr):
    optimizer = torch.optim.Adam(posterior.parameters(), lr=lr)
    index = torch.arange(0, len(split), len(split) // count)[:count]
    tokens, labels = split.batch(index, torch.device("cpu"))

    def loss():
        return F.cross_entropy(posterior(tokens, posterior.centre()), labels)

    before = float(loss().detach())
    for step in range(steps):
        optimizer.zero_grad()
        weights = posterior.draw(Address(0, "peer", "step", step))
        F.cross_entropy(posterior(tokens, weights), labels).backward()
        optimizer.step()
    return before, float(loss().detach())


@pytest.mark.parametrize(
    ("name", "options", "count", "steps", "lr"),
    [
        ("fasttext100", TextOptions(ngrams=2, length=16, buckets=2000), 256, 20, 0.1),
        ("charcnn256", TextOptions(tokens="characters", length=123), 48, 3, 1e-3),
    ],
)
def test_real_texts_are_learnt(name, options, count, steps, lr, clinc_root):
    torch.manual_seed(0)
    found = load("clinc150", root=clinc_root, text=options)
    inputs = Inputs(found.classes, found.shape, found.mean, found.std, found.vocabulary.size)
    before, after = loss_over_steps(MeanField(build(name, inputs), rho=-5.0).eval(), found.train, count, steps, lr)
    assert before == pytest.approx(math.log(150), rel=0.05)
    assert after < before - (1.0 if name == "fasttext100" else 0.01)
