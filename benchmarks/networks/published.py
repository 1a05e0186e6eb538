"""Published models of `transformers` with small random configurations, in which layouts are hard to find."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from benchmarks.networks.moved import Case, D, Inputs, T, V, captioned, images, tokens

_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": D, "intermediate_size": 2 * D}
_TEXT: dict[str, Any] = {**_LAYERS, "vocab_size": V, "max_position_embeddings": 2 * T, "pad_token_id": 1}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _language(model: nn.Module, inputs: Inputs) -> Tensor:
    logits = model(input_ids=inputs[0], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].mT, inputs[0][:, 1:], reduction="none").mean(1)


def _classes(model: nn.Module, inputs: Inputs) -> Tensor:
    return F.cross_entropy(model(inputs[0]).logits, inputs[1], reduction="none")


def _captions(model: nn.Module, inputs: Inputs) -> Tensor:
    ids, pictures = inputs
    logits = model(input_ids=ids, pixel_values=pictures, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def _translations(model: nn.Module, inputs: Inputs) -> Tensor:
    logits = model(input_ids=inputs[0], labels=inputs[0], use_cache=False).logits
    return F.cross_entropy(logits.mT, inputs[0], reduction="none").mean(1)


def _speech(model: nn.Module, inputs: Inputs) -> Tensor:
    features, ids = inputs
    logits = model(input_features=features, labels=ids, use_cache=False).logits
    return F.cross_entropy(logits.mT, ids, reduction="none").mean(1)


def _boxes(model: nn.Module, inputs: Inputs) -> Tensor:
    found = model(pixel_values=inputs[0])
    classes = F.cross_entropy(found.logits.mT, inputs[1][:, None].expand(found.logits.shape[:2]), reduction="none")
    return classes.mean(1) + found.pred_boxes.square().mean((1, 2))


def _matching(model: nn.Module, inputs: Inputs) -> Tensor:
    """Similarities with fixed directions: the usual loss of CLIP compares examples."""
    ids, pictures = inputs
    found = model(input_ids=ids, pixel_values=pictures)
    return -(found.text_embeds * found.image_embeds).sum(1)


def _spoken(rows: int) -> Inputs:
    return torch.randn(rows, 16, 2 * T), torch.randint(8, V, (rows, T))


def _llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**_LAYERS, image_size=32, patch_size=8)
    text = hf.LlamaConfig(**_LLAMA)
    model = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=0, image_seq_length=16)
    )
    model.model.vision_tower.requires_grad_(False)  # its last layer is not used
    return model


def _mixtral(**how: Any) -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_LLAMA, num_local_experts=4, **how))


def _qwen_moe(**how: Any) -> nn.Module:
    return hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**_LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=D,
                          shared_expert_intermediate_size=D, **how)
    )  # fmt: skip


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
    model = hf.DetrForObjectDetection(
        hf.DetrConfig(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
                      d_model=D, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                      decoder_attention_heads=4, encoder_ffn_dim=D, decoder_ffn_dim=D, num_queries=8, num_labels=10,
                      dropout=0.0)
    )  # fmt: skip
    return model


def _swin() -> nn.Module:
    return hf.SwinForImageClassification(
        hf.SwinConfig(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4,
                      num_labels=10, drop_path_rate=0.0)
    )  # fmt: skip


def _longformer() -> nn.Module:
    config = hf.LongformerConfig(**_BERT, attention_window=8, num_labels=10)
    return hf.LongformerForSequenceClassification(config)


def _big_bird() -> nn.Module:
    config = hf.BigBirdConfig(**_BERT, attention_type="original_full", num_labels=10)
    model = hf.BigBirdForSequenceClassification(config)
    model.bert.pooler.requires_grad_(False)  # it is not used
    return model


def _t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=V, d_model=D, d_kv=16, d_ff=2 * D, num_layers=2, num_heads=4, dropout_rate=0.0,
                    decoder_start_token_id=0)
    )  # fmt: skip


def _whisper() -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(vocab_size=V, num_mel_bins=16, d_model=D, encoder_layers=1, decoder_layers=1,
                         encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * D,
                         decoder_ffn_dim=2 * D, max_source_positions=T, max_target_positions=2 * T, dropout=0.0,
                         pad_token_id=1, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2)
    )  # fmt: skip


def _clip() -> nn.Module:
    text = hf.CLIPTextConfig(**{**_TEXT, "eos_token_id": 3}, projection_dim=D)
    vision = hf.CLIPVisionConfig(**_LAYERS, image_size=32, patch_size=8, projection_dim=D)
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=D))
    model.logit_scale.requires_grad_(False)
    return model


def _convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(patch_size=2, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=10)
    )


def _mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=2, state_size=8))


def _bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**_BERT, num_labels=10))


def _roberta() -> nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**_BERT, num_labels=10))


def _deberta() -> nn.Module:
    config = hf.DebertaV2Config(**_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], num_labels=10)
    return hf.DebertaV2ForSequenceClassification(config)


def _gpt2_classes() -> nn.Module:
    return hf.GPT2ForSequenceClassification(
        hf.GPT2Config(vocab_size=V, n_positions=2 * T, n_embd=D, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                      attn_pdrop=0.0, num_labels=10, pad_token_id=1)
    )  # fmt: skip


def published() -> dict[str, Callable[[], Case]]:
    """Builders of all cases, by title."""
    found: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
        "LLaVA": (_llava, captioned, _captions),
        "Mixtral": (_mixtral, tokens, _language),
        "Mixtral, eager experts": (partial(_mixtral, experts_implementation="eager"), tokens, _language),
        "Qwen2-MoE": (_qwen_moe, tokens, _language),
        "Qwen2-MoE, eager experts": (partial(_qwen_moe, experts_implementation="eager"), tokens, _language),
        "DETR": (_detr, images, _boxes),
        "Swin": (_swin, images, _classes),
        "Longformer": (_longformer, tokens, _classes),
        "BigBird": (_big_bird, tokens, _classes),
        "T5": (_t5, tokens, _translations),
        "Whisper": (_whisper, _spoken, _speech),
        "CLIP": (_clip, lambda rows: (tokens(rows)[0], images(rows)[0]), _matching),
        "ConvNeXt": (_convnext, images, _classes),
        "Mamba": (_mamba, tokens, _language),
        "BERT": (_bert, tokens, _classes),
        "RoBERTa": (_roberta, tokens, _classes),
        "DeBERTa-v2": (_deberta, tokens, _classes),
        "GPT-2, sequence classes": (_gpt2_classes, tokens, _classes),
    }

    def make(model: Callable[[], nn.Module], inputs: Any, losses: Any) -> Callable[[], Case]:
        return lambda: Case(model(), inputs, losses)

    return {title: make(*parts) for title, parts in found.items()}
