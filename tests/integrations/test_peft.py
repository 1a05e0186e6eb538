"""Adapters of PEFT: exact per-example gradients, private training, and checks that they train."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import clipwise
from clipwise import gradients

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
import peft
from transformers import TrainingArguments

from clipwise.integrations.adapters import ParametersMoved, require_trainable, train_lora_parts
from clipwise.integrations.huggingface import PrivacyArguments, PrivateTrainer
from tests.integrations import huggingface_models as tiny

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
SIZE = 12
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], use_dora=True),
    "lora on tied weights": lambda: peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["wte", "c_fc"], init_lora_weights=False
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]
    ),
}


def adapted(method: str) -> Any:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = tiny.model("causal", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return peft.get_peft_model(model, METHODS[method]())


def trainer(folder: Path, model: Any, **options: Any) -> Any:
    fixed: dict[str, Any] = {"max_steps": 3, "learning_rate": 0.05, "per_device_train_batch_size": 6}
    arguments = TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **{"save_strategy": "no", **fixed, **options}
    )
    return PrivateTrainer(
        model, arguments, train_dataset=tiny.records(SIZE, "causal"), data_collator=tiny.collate,
        privacy=PrivacyArguments(noise_multiplier=1.0),
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_each_record_alone(tmp_path: Path, method: str) -> None:
    made, rows = trainer(tmp_path, adapted(method)), tiny.records(3, "causal")
    parameters = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    found = gradients.per_example_gradients(made._losses(tiny.collate(rows)), parameters, gradients.Memory())
    for i, row in enumerate(rows):
        own = torch.autograd.grad(made._losses(tiny.collate([row])).sum(), list(parameters.values()))
        for (name, grad), expected in zip(found.instantiate(slice(i, i + 1)).items(), own, strict=True):
            torch.testing.assert_close(grad[0], expected, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("method", METHODS)
def test_adapters_train_and_the_rest_stays(tmp_path: Path, method: str) -> None:
    made = trainer(tmp_path, adapted(method))
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", clipwise.PrivacyWarning)
        made.train()
    for name, p in made.model.named_parameters():
        assert bool((p != before[name]).any()) == p.requires_grad, name
    made.private.statement()


def test_a_checkpoint_of_adapters_continues(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, adapted("lora"), **options).train()
    resumed = trainer(tmp_path, adapted("lora"), **options)
    with pytest.warns(clipwise.PrivacyWarning, match="fresh secret"):  # without a ledger file
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.private.steps == resumed.state.global_step == 3


def test_an_adapter_that_would_not_train_is_refused(tmp_path: Path) -> None:
    frozen = adapted("lora")
    for p in frozen.parameters():
        p.requires_grad_(False)
    frozen.base_model.model.transformer.ln_f.weight.requires_grad_(True)
    with pytest.raises(clipwise.ConfigurationError, match=r"c_attn' is frozen"):
        trainer(tmp_path, frozen).train()
    disabled = adapted("lora")
    disabled.disable_adapter_layers()
    with pytest.raises(clipwise.ConfigurationError, match="is disabled"):
        trainer(tmp_path, disabled).train()
    merged = adapted("lora")
    merged.merge_adapter()
    with pytest.raises(clipwise.ConfigurationError, match="is merged"):
        require_trainable(merged)


def test_adalora_is_refused(tmp_path: Path) -> None:
    config = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], total_step=10, tinit=1, tfinal=1)
    with pytest.raises(clipwise.ConfigurationError, match="AdaLoraConfig"):
        trainer(tmp_path, peft.get_peft_model(tiny.model("causal"), config)).train()


def test_parameters_that_did_not_move_are_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, adapted("lora"), learning_rate=0.0)
    with pytest.warns(clipwise.PrivacyWarning, match="lora_A"):
        made.train()
    moved = ParametersMoved(made.model)
    with torch.no_grad():
        next(p for n, p in made.model.named_parameters() if "lora_A" in n).add_(1)
    assert [name.split(".")[-3] for name in moved.unchanged()] == ["lora_B"]


def test_factors_of_lora_take_turns_on_one_ledger(tmp_path: Path) -> None:
    model = adapted("lora")
    for phase in range(3):
        train_lora_parts(model, a=phase % 2 == 1, b=phase % 2 == 0)
        made = trainer(tmp_path, model)
        made.privacy.options["ledger"] = clipwise.FileLedger(tmp_path / "ledger", join=True)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        made.train()
        changed = {name.split(".")[-3] for name, p in model.named_parameters() if bool((p != before[name]).any())}
        assert changed == {"lora_A" if phase % 2 else "lora_B"}
    spent = made.private.spent()
    assert spent.steps == 9 and spent.accountant == "renyi-filter"


def test_a_classifier_trains_its_new_head(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        tiny.model("sequence"), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    )
    arguments = TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, max_steps=2)
    made = PrivateTrainer(
        model, arguments, train_dataset=tiny.records(SIZE, "sequence"), data_collator=tiny.collate,
        privacy=PrivacyArguments(noise_multiplier=1.0),
    )  # fmt: skip
    head = model.base_model.model.classifier.modules_to_save["default"].weight
    before = head.detach().clone()
    made.train()
    assert not torch.equal(head, before)
    head.requires_grad_(False)
    model.base_model.model.classifier.modules_to_save["default"].bias.requires_grad_(False)
    with pytest.raises(clipwise.ConfigurationError, match=r"classifier' is frozen"):
        require_trainable(model)


def test_parts_need_lora() -> None:
    with pytest.raises(clipwise.ConfigurationError, match="no LoRA"):
        train_lora_parts(tiny.model("causal"), a=False, b=True)
