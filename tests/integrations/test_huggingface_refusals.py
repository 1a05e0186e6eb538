"""Settings of transformers with which the guarantee would not hold are refused by name, before the training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

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
    return PrivateTrainer(tiny.model("sequence"), **{**given, **options})


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
        ("include_num_input_tokens_seen", "all"),
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
    with pytest.raises(clipwise.ConfigurationError, match="eval_dataset is train_dataset"):
        trainer(tmp_path, train_dataset=rows, eval_dataset={"train": rows})
    with pytest.raises(clipwise.ConfigurationError, match="eval_dataset is train_dataset"):
        trainer(tmp_path, train_dataset=rows).evaluate(rows)


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
