"""Train a Bayesian BERT, small and with random weights, in the Trainer of Hugging Face.

python examples/hf_trainer.py [FOLDER] [EPOCHS]        needs transformers and accelerate; downloads nothing
"""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import peerbayes as pb
from peerbayes.networks import SequenceClassifier

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/hf-trainer")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
PADDING = 0
CONFIG = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                    max_position_embeddings=16, num_labels=2, pad_token_id=PADDING)  # fmt: skip


class Bayesian(nn.Module):
    """What a Trainer wants of a model: the loss, and logits. Each training step is one draw of the weights."""

    def __init__(self, network):
        super().__init__()
        self.posterior, self.step = pb.MeanField(network, rho=-4.0, seed=0), 0

    def forward(self, input_ids, labels=None):
        if self.training:
            weights, self.step = self.posterior.draw(pb.Address(0, "bert", "step", self.step)), self.step + 1
        else:
            weights = self.posterior.centre()
        logits = self.posterior(input_ids, weights)
        if labels is None:
            return {"logits": logits}
        kl = self.posterior.kl("layer_mean", weights)
        return {"loss": nn.functional.cross_entropy(logits, labels) + 0.1 / len(labels) * kl, "logits": logits}


def sentences(count, seed):
    """Rows of up to 12 words; the class says whether one of the words 30 to 39 is among them."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 30, (count, 12), generator=generator)
    labels = torch.arange(count) % 2
    words[:, 3] = torch.where(labels == 1, torch.randint(30, 40, (count,), generator=generator), words[:, 3])
    words[torch.arange(12) >= torch.randint(5, 13, (count, 1), generator=generator)] = PADDING
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels)]


torch.manual_seed(0)
train, test = sentences(512, 0), sentences(128, 1)
model = Bayesian(SequenceClassifier(BertForSequenceClassification(CONFIG), PADDING))
arguments = TrainingArguments(
    output_dir=str(FOLDER), num_train_epochs=EPOCHS, per_device_train_batch_size=32, learning_rate=3e-3, use_cpu=True,
    report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=64, seed=0,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=test)
trainer.train()

texts, labels = (torch.stack([row[key] for row in test]) for key in ("input_ids", "labels"))
p = model.posterior.predict(texts, draws=20)
print(f"accuracy {(p.classes == labels).float().mean():.3f}, disagreement {p.disagreement.mean():.3f} nats")
FOLDER.mkdir(parents=True, exist_ok=True)
model.posterior.save(FOLDER / "bert.safetensors")
