"""A script for `accelerate launch` or torchrun: two processes train one model with `PrivateTrainer`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from clipwise.integrations.huggingface import PrivacyArguments, PrivateTrainer
from tests.integrations import huggingface_models as tiny


def train(folder: Path, **options: Any) -> PrivateTrainer:
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, use_cpu=True, per_device_train_batch_size=3, learning_rate=0.05,
        num_train_epochs=1, save_strategy="epoch", eval_strategy="epoch", logging_steps=2, **options,
    )  # fmt: skip
    trainer = PrivateTrainer(
        tiny.model("sequence", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), arguments,
        train_dataset=tiny.records(24, "sequence"), eval_dataset=tiny.records(6, "sequence", seed=1),
        data_collator=tiny.collate,
        privacy=PrivacyArguments(noise_multiplier=1.0, seed=3, ledger=str(folder / "ledger")),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    made = train(Path(sys.argv[1]))
    assert made.args.world_size == 2
    if made.is_world_process_zero():
        found = {"weights": made.model.state_dict(), "steps": made.private.steps, "logged": made.state.log_history}
        torch.save(found, Path(sys.argv[1]) / "found.pt")
