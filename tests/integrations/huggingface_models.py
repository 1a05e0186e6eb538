"""Tiny models of transformers with random weights, and records of different lengths for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

Record = dict[str, Any]
VOCABULARY, CLASSES = 40, 3
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


def records(count: int, head: str, seed: int = 0) -> list[Record]:
    """Records of 17 to 31 tokens with the labels of a head."""
    random = torch.Generator().manual_seed(seed)
    return [_record(head, random) for _ in range(count)]


def _record(head: str, random: torch.Generator) -> Record:
    def draw(most: int, *shape: int, least: int = 0) -> Tensor:
        return torch.randint(least, most, shape, generator=random)

    if head == "image":
        return {"pixel_values": torch.randn(3, 8, 8, generator=random), "labels": int(draw(CLASSES, 1))}
    length = int(draw(32, 1, least=17))
    ids = draw(VOCABULARY, length, least=3)
    record: Record = {"input_ids": ids, "attention_mask": torch.ones(length, dtype=torch.long)}
    if head == "question":
        start, end = draw(length, 2).sort().values.tolist()
        return record | {"start_positions": start, "end_positions": end}
    some = torch.rand(length, generator=random) < 0.5
    labels: Any = {
        "sequence": lambda: int(draw(CLASSES, 1)),
        "regression": lambda: float(torch.randn((), generator=random)),
        "multi-label": lambda: torch.rand(CLASSES, generator=random).round(),
        "token": lambda: draw(CLASSES, length).where(some, torch.tensor(-100)),
        "masked": lambda: ids.where(some, torch.tensor(-100)),
        "causal": lambda: ids.where(torch.arange(length) >= 6, torch.tensor(-100)),
        "llama": lambda: ids.clone(),
        "seq2seq": lambda: draw(VOCABULARY, int(draw(20, 1, least=5)), least=3),
    }[head]()
    return record | {"labels": labels}


def collate(rows: Sequence[Record]) -> dict[str, Tensor]:
    """Pad to the longest record of the batch."""
    found = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], Tensor) and values[0].dtype == torch.long and values[0].dim():
            padding = -100 if name == "labels" else 0
            stacked = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
        else:
            stacked = torch.stack([torch.as_tensor(value) for value in values])
        found[name] = stacked
    return found


def model(head: str, **options: Any) -> Any:
    """A model with a head, with the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _MODELS[head](options)


def _bert(kind: Any, **fixed: Any) -> Callable[[Mapping[str, Any]], Any]:
    return lambda options: kind(BertConfig(**{**_BERT, **fixed, **options}))


_MODELS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "sequence": _bert(BertForSequenceClassification, num_labels=CLASSES),
    "regression": _bert(BertForSequenceClassification, num_labels=1),
    "multi-label": _bert(
        BertForSequenceClassification, num_labels=CLASSES, problem_type="multi_label_classification"
    ),
    "token": _bert(BertForTokenClassification, num_labels=CLASSES),
    "masked": _bert(BertForMaskedLM),
    "question": _bert(BertForQuestionAnswering),
    "causal": lambda options: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1,
                   eos_token_id=2, **options)
    ),
    "llama": lambda options: LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, **options)
    ),
    "seq2seq": lambda options: T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
                 decoder_start_token_id=0, pad_token_id=0, **options)
    ),
    "image": lambda options: ViTForImageClassification(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8,
                  patch_size=4, num_labels=CLASSES, **options)
    ),
}  # fmt: skip
HEADS = list(_MODELS)
