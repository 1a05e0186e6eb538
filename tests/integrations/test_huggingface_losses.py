"""Losses of the heads of transformers: one per record, independent of the padding of the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import TrainingArguments

from clipwise import gradients
from clipwise.integrations.huggingface import PrivacyArguments, PrivateTrainer
from tests.integrations import huggingface_models as tiny

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
SIZE = 4


class Weighted(PrivateTrainer):
    """A subclass as users write it, with class weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **unused: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def trainer(folder: Path, head: str, kind: Any = PrivateTrainer, model: Any = None, **options: Any) -> Any:
    arguments = TrainingArguments(str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **options)
    model = tiny.model(head).eval() if model is None else model  # without dropout
    return kind(
        model, arguments, data_collator=tiny.collate, train_dataset=tiny.records(SIZE, head),
        privacy=PrivacyArguments(noise_multiplier=1.0),
    )  # fmt: skip


def alone(made: Any, row: tiny.Record) -> float:
    """The loss of a record in a batch of its own, as transformers computes it."""
    return float(made.model(**tiny.collate([row])).loss.detach())


@pytest.mark.parametrize("head", tiny.HEADS)
def test_losses_are_those_of_each_record_alone(tmp_path: Path, head: str) -> None:
    made, rows = trainer(tmp_path, head), tiny.records(SIZE, head)
    losses = made._losses(tiny.collate(rows))
    assert losses.shape == (SIZE,) and losses.requires_grad
    torch.testing.assert_close(losses, torch.tensor([alone(made, row) for row in rows]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", tiny.HEADS)
def test_a_longer_record_changes_the_gradients_of_others_by_rounding(tmp_path: Path, head: str) -> None:
    made, rows = trainer(tmp_path, head), tiny.records(SIZE, head)
    rows.sort(key=lambda row: len(row.get("input_ids", ())))
    beside = _gradients(made, rows)
    for name, own in _gradients(made, rows[:-1]).items():
        torch.testing.assert_close(beside[name][:-1], own, rtol=1e-3, atol=1e-5)


def _gradients(made: Any, rows: list[tiny.Record]) -> dict[str, Tensor]:
    """Of every record, from one batch."""
    losses = made._losses(tiny.collate(rows))
    parameters = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    return gradients.per_example_gradients(losses, parameters, gradients.Memory()).instantiate(slice(0, len(rows)))


@pytest.mark.parametrize("head", ["sequence", "causal", "seq2seq"])
def test_label_smoothing_is_per_record(tmp_path: Path, head: str) -> None:
    made, rows = trainer(tmp_path, head, label_smoothing_factor=0.2), tiny.records(SIZE, head)
    for row in rows if head == "seq2seq" else ():
        row["decoder_input_ids"] = made.model.prepare_decoder_input_ids_from_labels(row["labels"][None])[0]
    losses = made._losses(tiny.collate(rows)).detach()
    for row, loss in zip(rows, losses, strict=True):
        batch = tiny.collate([row])
        labels = batch.pop("labels")
        logits = made.model(**batch).logits.detach()
        if head == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        expected = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), label_smoothing=0.2)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_class_weights_of_a_subclass(tmp_path: Path) -> None:
    made, rows = trainer(tmp_path, "sequence", Weighted), tiny.records(SIZE, "sequence")
    batch = tiny.collate(rows)
    labels = batch["labels"]
    expected = F.cross_entropy(made.model(**batch).logits, labels, reduction="none") * (labels + 1)
    torch.testing.assert_close(made._losses(batch), expected, rtol=1e-4, atol=1e-5)


def test_evaluation_has_the_loss_of_transformers(tmp_path: Path) -> None:
    made, rows = trainer(tmp_path, "causal"), tiny.records(SIZE, "causal", seed=1)
    with torch.no_grad():
        batch = tiny.collate(rows)
        expected = float(made.model(**batch).loss)
    assert made.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_the_recipe_for_preferences_has_one_loss_per_pair(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "huggingface.md").read_text()
    (code,) = re.findall(r'```python title="preferences.py"\n(.*?)```', page, re.DOTALL)
    recipe: dict[str, Any] = {}
    exec(code, recipe)
    random = torch.Generator().manual_seed(0)
    pairs = [
        {
            "chosen": torch.randint(3, 40, (20 + i,), generator=random),
            "rejected": torch.randint(3, 40, (31 - 2 * i,), generator=random),
            "prompt_length": 5 + i,
            "reference": 0.5 * i,
        }
        for i in range(6)
    ]
    arguments = TrainingArguments(
        str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False, max_steps=2,
        save_strategy="no", per_device_train_batch_size=3,
    )  # fmt: skip
    made = recipe["PrivateDPOTrainer"](
        tiny.model("causal").eval(), arguments, data_collator=recipe["collate_pairs"], train_dataset=pairs,
        privacy=PrivacyArguments(noise_multiplier=1.0),
    )  # fmt: skip
    losses = made._losses(recipe["collate_pairs"](pairs)).detach()
    for pair, loss in zip(pairs, losses, strict=True):
        sums = [_answer(made.model, pair[name], pair["prompt_length"]) for name in ("chosen", "rejected")]
        expected = -F.logsigmoid(0.1 * (sums[0] - sums[1] - pair["reference"]))
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    made.train()
    assert made.private.steps == 2


@torch.no_grad()
def _answer(model: Any, ids: Tensor, prompt_length: int) -> Tensor:
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return -F.cross_entropy(logits[prompt_length - 1 :], ids[prompt_length:], reduction="sum")
