"""Published models, unmodified: from `transformers` and `peft` with tiny random configurations, and from torch.nn.
Each equals a forward and backward pass per example, and none uses the fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from clipwise.clipping import PerExample
from clipwise.gradients import METHODS, FallbackWarning, Memory, per_example_gradients
from tests.gradients.cases import trainable
from tests.soundness.neighbours import attach

B, T, V = 4, 6, 31
Losses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens of each example, without the first."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").mean(1)


def language(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    ids, mask = inputs
    return token_losses(model(input_ids=ids, attention_mask=mask).logits, ids)


def classes(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    ids, mask = inputs
    return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, ids[:, 0] % 2, reduction="none")


def images(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(
        model(pixel_values=inputs[0]).logits, torch.zeros(len(inputs[0]), dtype=torch.long), reduction="none"
    )


def sequences(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    ids, mask = inputs
    return token_losses(model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits, ids)


def text() -> tuple[Tensor, ...]:
    """Ids with repeats, and a mask of examples of different lengths."""
    ids = torch.randint(0, V, (B, T))
    lengths = torch.tensor([T, T - 2, T, 3])
    return ids, (torch.arange(T) < lengths[:, None]).long()


def pictures() -> tuple[Tensor, ...]:
    return (torch.randn(B, 3, 8, 8, dtype=torch.float64),)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=V, n_positions=8, n_embd=8, n_layer=2, n_head=2, **_no_dropout("resid_pdrop"))
    )


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(
        hf.BertConfig(vocab_size=V, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                      intermediate_size=12, max_position_embeddings=8, **_no_dropout("hidden_dropout_prob"))
    )  # fmt: skip


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
                     image_size=8, patch_size=4, num_labels=3, **_no_dropout("hidden_dropout_prob"))
    )  # fmt: skip


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=0.0,
                    decoder_start_token_id=0)
    )  # fmt: skip


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=V, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
                       num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8)
    )  # fmt: skip


def _no_dropout(first: str) -> dict[str, float]:
    names = (first, "embd_pdrop", "attn_pdrop", "attention_probs_dropout_prob")
    return dict.fromkeys(names, 0.0)


def lora() -> nn.Module:
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # starts at 0, where half of the gradients vanish
            nn.init.normal_(p)
    return adapted


class Translation(nn.Module):
    """torch.nn.Transformer, as in its documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, V)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embedding(ids)
        causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=h.dtype)
        padding = torch.zeros_like(mask, dtype=h.dtype).masked_fill(mask == 0, -torch.inf)
        return self.head(self.transformer(h, h, tgt_mask=causal, src_key_padding_mask=padding))


class Tagger(nn.Module):
    """A tag for every word, from a bidirectional LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 5, padding_idx=0)
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.tag = nn.Linear(8, V)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), mask.sum(1), batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=T)
        return self.tag(out)


def own(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return token_losses(model(*inputs), inputs[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], Losses]] = {
    "GPT-2": (gpt2, text, language),
    "BERT": (bert, text, classes),
    "ViT": (vit, pictures, images),
    "T5": (t5, text, sequences),
    "Llama": (llama, text, language),
    "Llama with LoRA": (lora, text, language),
    "torch.nn.Transformer": (Translation, text, own),
    "LSTM tagger": (Tagger, text, own),
}


def loop(model: nn.Module, inputs: tuple[Tensor, ...], losses: Losses) -> dict[str, Tensor]:
    """A separate forward and backward pass for each example."""
    rows = []
    for i in range(B):
        loss = losses(model, tuple(x[i : i + 1] for x in inputs)).sum()
        rows.append(torch.autograd.grad(loss, list(trainable(model).values()), materialize_grads=True))
    return {name: torch.stack(g) for name, g in zip(trainable(model), zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("name", MODELS)
def test_equals_a_pass_per_example(name: str) -> None:
    build, draw, losses = MODELS[name]
    torch.manual_seed(0)
    model, memory = build().double(), Memory()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for _ in range(3):
            inputs = draw()
            found = per_example_gradients(losses(model, inputs), trainable(model), memory)
            squares, ours = found.squared_norms(), found.instantiate(slice(0, B))
            for parameter, expected in loop(model, inputs, losses).items():
                torch.testing.assert_close(ours[parameter], expected, rtol=1e-7, atol=1e-10)
                norms = expected.flatten(1).norm(dim=1)
                torch.testing.assert_close(squares[parameter].sqrt(), norms, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_every_method_gives_the_same_clipped_sum(name: str, method: str) -> None:
    build, draw, losses = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build().double(), draw()
    truth = loop(model, inputs, losses)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in truth.values()]).norm(dim=0)
    bound = float(norms.median())
    total = attach(model, PerExample(bound, method=method)).clipped_sum(losses(model, inputs))
    for parameter, g in truth.items():
        expected = torch.einsum("b,b...->...", (bound / norms).clamp(max=1), g)
        torch.testing.assert_close(total[parameter], expected, rtol=1e-4, atol=1e-7)
