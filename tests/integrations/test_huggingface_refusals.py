"""Settings of transformers with which the guarantee would not hold are refused by name, before the training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset, Subset

import clipwise

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import DataCollatorWithFlattening, TrainingArguments

from clipwise.integrations.huggingface import PrivacyArguments, PrivateTrainer
from tests.integrations import huggingface_models as tiny

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


def trainer(folder: Path, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {
        "args": TrainingArguments(str(folder), report_to=[], use_cpu=True, **(arguments or {})),
        "train_dataset": tiny.records(8, "sequence"),
        "data_collator": tiny.collate,
        "privacy": PrivacyArguments(noise_multiplier=1.0),
    }
    return PrivateTrainer(**{"model": tiny.model("sequence"), **given, **options})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_grad_norm", 0.5),
        ("train_sampling_strategy", "group_by_length"),
        ("train_sampling_strategy", "sequential"),
        ("dataloader_drop_last", True),
        ("auto_find_batch_size", True),
        ("neftune_noise_alpha", 5.0),
        ("torch_compile", True),
        ("torch_compile_backend", "eager"),
        ("torch_compile_mode", "default"),
        ("include_num_input_tokens_seen", "all"),
        ("skip_memory_metrics", False),
        ("debug", "underflow_overflow"),
        ("optim", "schedule_free_adamw"),
        ("optim", "galore_adamw_layerwise"),
    ],
)
def test_an_argument_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(clipwise.ConfigurationError, match=name):
        trainer(tmp_path, {name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("fp16", True), ("fsdp", "full_shard"), ("deepspeed", {"stage": 2}), ("use_liger_kernel", True)]
)
def test_an_argument_that_needs_other_hardware_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    setattr(arguments, name, value)  # its constructor would look for a GPU or a package
    with pytest.raises(clipwise.ConfigurationError, match=name):
        trainer(tmp_path, args=arguments)


def test_privacy_that_is_not_privacy_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(clipwise.ConfigurationError, match=r"PrivacyArguments, not dict: give privacy="):
        trainer(tmp_path, privacy={"noise_multiplier": 1.0})


def test_reentrant_checkpointing_is_refused(tmp_path: Path) -> None:
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(clipwise.ConfigurationError, match="use_reentrant"):
        trainer(tmp_path, reentrant)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from tiny.records(8, "sequence")


def test_an_iterable_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(clipwise.ConfigurationError, match="IterableDataset"):
        trainer(tmp_path, {"max_steps": 2}, train_dataset=Endless())


def test_evaluation_on_training_records_is_refused(tmp_path: Path) -> None:
    rows = tiny.records(8, "sequence")
    with pytest.raises(clipwise.ConfigurationError, match="on train_dataset"):
        trainer(tmp_path, train_dataset=rows, eval_dataset={"train": rows})
    for evaluate in ("evaluate", "predict"):
        for part in (rows, Subset(rows, range(4))):
            with pytest.raises(clipwise.ConfigurationError, match="on train_dataset"):
                getattr(trainer(tmp_path, train_dataset=rows), evaluate)(part)


@pytest.mark.parametrize(
    ("collator", "message"),
    [
        (DataCollatorWithFlattening(), "packs"),
        (SimpleNamespace(seed=1, __call__=tiny.collate), "seed"),
        (SimpleNamespace(tokenizer=SimpleNamespace(padding_side="left")), "padding_side"),
    ],
    ids=["packing", "seeded masks", "left padding"],
)
def test_a_collator_is_refused(tmp_path: Path, collator: Any, message: str) -> None:
    with pytest.raises(clipwise.ConfigurationError, match=message):
        trainer(tmp_path, data_collator=collator)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 2.0}, r"PrivacyArguments\(max_norm=\)"),
        ({"batch_size": 4}, "gradient_accumulation_steps"),
        ({"steps": 4}, "max_steps"),
        ({"group": range(8)}, "protects records"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_is_set_elsewhere_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(clipwise.ConfigurationError, match=message):
        trainer(tmp_path, privacy=PrivacyArguments(noise_multiplier=1.0, options=options))


def test_two_clipping_norms_are_refused(tmp_path: Path) -> None:
    options = {"clipping": clipwise.PerExample(max_norm=1.0)}
    with pytest.raises(clipwise.ConfigurationError, match="norm of its own"):
        trainer(tmp_path, privacy=PrivacyArguments(noise_multiplier=1.0, max_norm=2.0, options=options))


@pytest.mark.parametrize("name", ["training_step", "get_train_dataloader", "_get_train_sampler"])
def test_a_subclass_that_replaces_the_step_is_refused(tmp_path: Path, name: str) -> None:
    kind = type("Mine", (PrivateTrainer,), {name: lambda self, *args: None})
    with pytest.raises(clipwise.ConfigurationError, match=f"Mine overrides {name}"):
        kind(tiny.model("sequence"), privacy=PrivacyArguments(noise_multiplier=1.0))


def test_arguments_and_trainers_of_trl_are_refused(tmp_path: Path) -> None:
    config = type("SFTConfig", (TrainingArguments,), {"__module__": "trl.trainer.sft_config"})
    with pytest.raises(clipwise.ConfigurationError, match="SFTConfig of TRL"):
        trainer(tmp_path, args=config(str(tmp_path), report_to=[], use_cpu=True))


def test_float16_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(clipwise.ConfigurationError, match="float16"):
        trainer(tmp_path, model=tiny.model("sequence").half())


def test_a_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(clipwise.ConfigurationError, match=r"clipwise\.tune"):
        trainer(tmp_path).hyperparameter_search()


def test_the_default_of_max_grad_norm_is_not_applied(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    assert made.args.max_grad_norm == 1.0
    assert made._clip_grad_norm(made.model) is None


def test_the_arguments_of_the_user_do_not_change(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    before = arguments.to_dict()
    trainer(tmp_path, args=arguments)
    assert arguments.to_dict() == before
