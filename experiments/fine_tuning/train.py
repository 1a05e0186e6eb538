"""Training of one cell: a data set, a method, a budget or none, and a seed.

The settings were chosen before the first run, by the size of the noise. None was tuned on a text.

Shapes: B texts, T positions, d features, K classes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise

from .encoder import encoder, padded, pooled

DELTA, MAX_NORM = 1e-5, 1.0
BATCH = 1000  # the expected one: a tenth of a training set
METHODS = ("head", "lora", "full")


@dataclass(frozen=True)
class Settings:
    """Of a method."""

    epochs: int
    rate: float


SETTINGS = {"head": Settings(20, 1.0), "lora": Settings(10, 2e-3), "full": Settings(10, 5e-4)}
Found = dict[str, Any]  # accuracy and privacy cost


# ------------------------------------------------------------------------------------------------------------ head only


def train_head(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], epsilon: float | None, seed: int, device: torch.device
) -> Found:
    """A linear classifier on the features of the frozen encoder.

    The seed gives public initial weights and the order of non-private batches. Noise and sampling of a private run come
    from the operating system.
    """
    torch.manual_seed(seed)
    (x_Nd, y_N), settings = (t.to(device) for t in train), SETTINGS["head"]
    model = nn.Linear(x_Nd.shape[1], int(y_N.max()) + 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), settings.rate, momentum=0.9)
    cost: Found = {}
    if epsilon is None:
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(x_Nd)).to(device).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x_Nd[rows]), y_N[rows]).backward()
                optimizer.step()
    else:
        private = clipwise.make_private(
            model, optimizer, TensorDataset(x_Nd, y_N), clipping=clipwise.PerExample(max_norm=MAX_NORM),
            batch_size=BATCH, epochs=settings.epochs, epsilon=epsilon, delta=DELTA, loss=_head_loss(model),
        )  # fmt: skip
        with private:
            for _ in range(settings.epochs):
                for x_Bd, y_B in private.loader:
                    private.step(_head_loss(model)(x_Bd, y_B) if len(y_B) else None)
            cost = _cost(private)
    with torch.no_grad():
        found_N = model(test[0].to(device)).argmax(1).cpu()
    return cost | {"accuracy": float((found_N == test[1]).double().mean())}


def _head_loss(model: nn.Module) -> Any:
    return lambda x_Bd, y_B: F.cross_entropy(model(x_Bd), y_B, reduction="none")


# --------------------------------------------------------------------------------------------------- LoRA, all weights


class TextClassifier(nn.Module):
    """The encoder, the mean over tokens and a linear head, with the outputs of a model of transformers."""

    def __init__(self, classes: int, method: str, folder: Path | None) -> None:
        super().__init__()
        self.encoder = encoder(folder)
        if method == "lora":
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["query", "value"])
            self.encoder = get_peft_model(self.encoder, config)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)
        unused = [p for name, p in self.encoder.named_parameters() if ".pooler." in f".{name}"]
        for p in unused:
            p.requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """(B, T) ids to logits (B, K), and the mean loss if there are labels."""
        states_BTd = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits_BK = self.head(pooled(states_BTd, attention_mask))
        return {"logits": logits_BK} if labels is None else {
            "loss": F.cross_entropy(logits_BK, labels), "logits": logits_BK,
        }  # fmt: skip


def collate(rows: Sequence[tuple[list[int], int]]) -> dict[str, Tensor]:
    """A batch of (token ids, label)."""
    return padded([ids for ids, _ in rows]) | {"labels": torch.tensor([label for _, label in rows])}


def train_encoder(
    method: str,
    train: Sequence[tuple[list[int], int]],
    test: Sequence[tuple[list[int], int]],
    epsilon: float | None,
    seed: int,
    device: torch.device,
    piece: int,
    folder: Path | None = None,
) -> Found:
    """Fine-tune the encoder with `PrivateTrainer`, or with `Trainer` if `epsilon` is None."""
    from transformers import Trainer, TrainingArguments

    from clipwise.integrations.huggingface import PrivacyArguments, PrivateTrainer

    torch.manual_seed(seed)
    settings, classes = SETTINGS[method], 1 + max(label for _, label in train)
    model = TextClassifier(classes, method, folder)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place, per_device_train_batch_size=piece, gradient_accumulation_steps=max(1, BATCH // piece),
            per_device_eval_batch_size=500, learning_rate=settings.rate, num_train_epochs=settings.epochs, seed=seed,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=device.type == "cpu",
        )  # fmt: skip
        given: dict[str, Any] = {"args": arguments, "train_dataset": train, "data_collator": collate}
        cost: Found = {}
        if epsilon is None:
            trainer = Trainer(model, **given)
            trainer.train()
        else:
            privacy = PrivacyArguments(epsilon=epsilon, delta=DELTA, max_norm=MAX_NORM)
            trainer = PrivateTrainer(model, privacy=privacy, **given)
            trainer.train()
            cost = _cost(trainer.private)
        logits_NK = torch.as_tensor(trainer.predict(test).predictions)
    labels_N = torch.tensor([label for _, label in test])
    return cost | {"accuracy": float((logits_NK.argmax(1) == labels_N).double().mean())}


def _cost(private: clipwise.Private) -> Found:
    spent = private.spent()
    return {
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "steps": spent.steps,
        "noise_multiplier": private.noise_multiplier,
    }
