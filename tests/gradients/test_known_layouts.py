"""Published architectures whose operations can move rows: after the first batches, none is probed again.

They have tiny random configurations: mixtures of experts, state-space models, encoders and decoders, vision and
language, detection, and writes into parts of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from clipwise.gradients import Memory, per_example_gradients
from clipwise.gradients.resolve import Resolved, Resolver
from clipwise.gradients.walk import Graph
from tests.gradients.cases import trainable

B, T, V, D = 4, 8, 40, 16
_COMMON = {"vocab_size": V, "hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": 2}
_DECODER = _COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
_SIDES = ("layers", "attention_heads", "ffn_dim")
_BOTH = {f"{side}_{name}": 2 if name != "ffn_dim" else D for side in ("encoder", "decoder") for name in _SIDES}
_EXPERTS = {"num_experts_per_tok": 2}

Drawn = dict[str, Tensor]
Losses = Callable[[Any, Drawn], Tensor]


def ids() -> Tensor:
    return torch.randint(5, V, (B, T))


def words(found: Any, drawn: Drawn) -> Tensor:
    """By log_softmax and gather, as many training scripts write it."""
    labels = drawn.get("decoder_input_ids", drawn.get("input_ids"))
    assert labels is not None
    logarithms = F.log_softmax(found.logits[:, :-1], -1)
    return -logarithms.gather(2, labels[:, 1:, None]).squeeze(2).mean(1)


def boxes(found: Any, drawn: Drawn) -> Tensor:
    return found.logits.logsumexp(-1).mean(1) + found.pred_boxes.square().mean((1, 2))


def text() -> Drawn:
    return {"input_ids": ids()}


def translated() -> Drawn:
    return {"input_ids": ids(), "decoder_input_ids": ids()}


def sound() -> Drawn:
    return {"input_features": torch.randn(B, 4, 16), "decoder_input_ids": ids()}


def pictures() -> Drawn:
    return {"pixel_values": torch.randn(B, 3, 32, 32), "pixel_mask": torch.ones(B, 32, 32, dtype=torch.long)}


def pictures_and_text() -> Drawn:
    of_image = ids()
    of_image[:, 1:5] = 3
    return {"input_ids": of_image, "pixel_values": torch.randn(B, 3, 8, 8)}


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_DECODER, **_EXPERTS, num_local_experts=3))


def qwen_moe() -> nn.Module:
    own = {"num_experts": 3, "moe_intermediate_size": D, "shared_expert_intermediate_size": D}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_DECODER, **_EXPERTS, **own))


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=1, state_size=4))


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=V, d_model=D, d_kv=8, d_ff=D, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def whisper() -> nn.Module:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"vocab_size": V, "d_model": D, "max_source_positions": 8, "num_mel_bins": 4}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **_BOTH, **tokens))


def detr() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    backbone = hf.ResNetConfig(**sizes, out_features=["stage2"])
    no_download = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    sizes = {"d_model": D, "num_queries": 3, "num_labels": 3}
    model = hf.DetrForObjectDetection(hf.DetrConfig(backbone_config=backbone, **no_download, **sizes, **_BOTH))
    model.model.backbone.requires_grad_(False)
    return model.eval()


def llava() -> nn.Module:
    vision = {"hidden_size": D, "intermediate_size": D, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = hf.CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=D)
    tokens = {"image_token_index": 3, "image_token_id": 3, "vision_feature_layer": -1}
    model = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=seen, text_config=hf.LlamaConfig(**_DECODER), **tokens)
    )
    model.model.vision_tower.requires_grad_(False)
    return model


class WritesParts(nn.Module):
    """Every second position is computed in place, and every third by an in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, input_ids: Tensor) -> Any:
        h = self.table(input_ids)
        parts = h.clone()
        parts[:, ::2] = self.layer(h[:, ::2])
        parts[:, ::3].relu_()
        return hf.modeling_outputs.CausalLMOutput(logits=self.head(parts))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Drawn], Losses]] = {
    "writes into parts": (WritesParts, text, words),
    "Mixtral": (mixtral, text, words),
    "Qwen2-MoE": (qwen_moe, text, words),
    "Mamba": (mamba, text, words),
    "T5": (t5, translated, words),
    "Whisper": (whisper, sound, words),
    "DETR": (detr, pictures, boxes),
    "LLaVA": (llava, pictures_and_text, words),
}


def drop_unused(model: nn.Module, drawn: Drawn, losses: Losses) -> None:
    """Freeze the parameters that the losses do not depend on."""
    losses(model(**drawn), drawn).sum().backward()
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and p.grad is not None)


@pytest.mark.parametrize("name", MODELS)
def test_known_graphs_are_not_probed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, draw, losses = MODELS[name]
    torch.manual_seed(0)
    model, memory = build(), Memory()
    drop_unused(model, draw(), losses)
    probes: list[int] = []
    probe = Resolver.probe

    def counted(self: Resolver, graph: Graph) -> Resolved:
        probes[-1] += 1
        return probe(self, graph)

    monkeypatch.setattr(Resolver, "probe", counted)
    for _ in range(7):
        probes.append(0)
        drawn = draw()
        per_example_gradients(losses(model(**drawn), drawn), trainable(model), memory)
    assert probes[0] > 0
    assert probes[4:] == [0, 0, 0]
