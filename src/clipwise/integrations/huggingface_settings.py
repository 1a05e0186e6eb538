"""The privacy arguments of `PrivateTrainer`, and the settings of `transformers` that it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from clipwise.errors import ConfigurationError
from clipwise.integrations.data_loader import holds_records_of, require_separate_records

_DEFAULT_GRAD_NORM = 1.0  # of TrainingArguments: a value that a user did not choose
_FIELDS = ("epsilon", "delta", "noise_multiplier", "max_norm", "sampling", "seed")
_BY_TRAINER = {  # arguments of `make_private` that follow from those of the trainer
    "batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "steps": "max_steps or num_train_epochs",
    "epochs": "num_train_epochs",
    "max_physical_batch_size": "per_device_train_batch_size",
    "num_workers": "dataloader_num_workers",
}
# Methods of `PrivateTrainer` that draw the batches and compute the private gradient.
_OWN_METHODS = ("training_step", "get_train_dataloader", "get_batch_samples", "_get_train_sampler")
_STEPS_BY_ITSELF = ("lomo", "layerwise", "schedule_free")  # in names of optimizers


@dataclass
class PrivacyArguments:
    """The privacy of a `PrivateTrainer`. `transformers.HfArgumentParser` reads it from the command line too.

    Args:
        epsilon, delta: the budget. The noise is calibrated for all steps of the training.
        noise_multiplier: instead of `epsilon`.
        max_norm: the gradient of each record is clipped to this norm. It takes the place of `max_grad_norm`.
        ledger: the path of the ledger file; by default the ledger is in memory and in the checkpoints.
        sampling: how batches are drawn; see `make_private`.
        seed: for tests; a run with a seed claims no guarantee. `TrainingArguments.seed` has no effect on it.
        options: further arguments of `make_private`, such as `clipping` (instead of `max_norm`), `ema` or `noise`.
    """

    epsilon: float | None = field(default=None, metadata={"help": "privacy budget, with delta"})
    delta: float | None = field(default=None, metadata={"help": "delta of the budget, well below 1/N"})
    noise_multiplier: float | None = field(default=None, metadata={"help": "instead of epsilon"})
    max_norm: float = field(default=1.0, metadata={"help": "norm that the gradient of each record is clipped to"})
    ledger: str | None = field(default=None, metadata={"help": "path of the ledger file"})
    sampling: str = field(default="poisson", metadata={"help": "how batches are drawn"})
    seed: int | None = field(default=None, metadata={"help": "for tests: a run with a seed claims no guarantee"})
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": "further arguments of make_private"})


def require_sound_privacy(privacy: PrivacyArguments) -> None:
    """Raise for other objects, and for options that are set in another place."""
    if not isinstance(privacy, PrivacyArguments):
        raise ConfigurationError(
            f"privacy must be PrivacyArguments, not {type(privacy).__name__}: give "
            "privacy=PrivacyArguments(epsilon=..., delta=...)."
        )
    for name in privacy.options:
        if name in _FIELDS:
            raise ConfigurationError(
                f"PrivacyArguments(options={{{name!r}: ...}}): {name} is no option. Give PrivacyArguments({name}=)."
            )
        if name in _BY_TRAINER:
            raise ConfigurationError(
                f"PrivacyArguments(options={{{name!r}: ...}}) is set by TrainingArguments: give {_BY_TRAINER[name]}."
            )
    if "clipping" in privacy.options and privacy.max_norm != PrivacyArguments.max_norm:
        raise ConfigurationError(
            "PrivacyArguments has max_norm and options={'clipping': ...}. A strategy has a norm of its own: give one "
            "of them."
        )
    if "group" in privacy.options:
        raise ConfigurationError(
            "PrivateTrainer protects records. For user-level privacy call clipwise.make_private(..., group=...) with "
            "Batch(max_norm=...) in a loop of your own."
        )


def require_sound_class(kind: type, own: type, args: TrainingArguments) -> None:
    """Raise for a subclass of `PrivateTrainer` that changes the step, and for the classes of TRL."""
    for name in _OWN_METHODS:
        if getattr(kind, name) is not getattr(own, name):
            raise ConfigurationError(
                f"{kind.__name__} overrides {name}, in which PrivateTrainer draws the batches and computes the private "
                "gradient: leave it out. Override compute_loss for a loss of your own."
            )
    for used in (*kind.__mro__, *type(args).__mro__):
        if used.__module__.split(".")[0] == "trl":
            raise ConfigurationError(
                f"{used.__name__} of TRL cannot be combined with PrivateTrainer: packing, max_length and its other "
                "settings would have no effect, and its trainers log values of training batches. Give "
                "transformers.TrainingArguments and prepared records, see docs/integrations/huggingface.md."
            )


def require_sound_arguments(args: TrainingArguments) -> None:
    """Raise for training arguments that a private run cannot have."""
    refused = {
        "max_grad_norm": (
            args.max_grad_norm not in (None, 0, _DEFAULT_GRAD_NORM),
            "clips the noised mean, not the gradient of each record: leave it out and give PrivacyArguments(max_norm=)",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy != "random",
            "such as group_by_length, chooses records by their length or position, so batches would not be drawn as "
            "they are accounted: leave it out",
        ),
        "dataloader_drop_last": (
            args.dataloader_drop_last,
            "drops records for their position. Sampled batches have no incomplete last one: leave it out",
        ),
        "fp16": (args.fp16, "scales the losses, which changes what is clipped: use bf16=True"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "would begin a new run after an error on private data, with another batch size: set "
            "per_device_train_batch_size, which is the size of a piece and changes no result",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha is not None,
            "scales its noise by the padded length of the batch, so one record would change the others: leave it out",
        ),
        "torch_compile": (
            args.torch_compile,
            "(also set by torch_compile_backend and torch_compile_mode) hides the layers from the computation of "
            "per-example gradients: leave it out",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "fuses layers with a mean loss, so the losses of single records are not available: leave it out",
        ),
        "include_num_input_tokens_seen": (
            str(args.include_num_input_tokens_seen) != "no",
            "logs the number of tokens of private batches: leave it out",
        ),
        "skip_memory_metrics": (
            not args.skip_memory_metrics,
            "logs the memory of private batches, which depends on their records: leave it out",
        ),
        "debug": ("underflow_overflow" in str(args.debug), "prints activations of private records: leave it out"),
        "fsdp": (
            bool(args.fsdp),
            "is not supported by PrivateTrainer: use accelerate launch without it (data parallel), or "
            "clipwise.make_private with torch.distributed.fsdp.fully_shard in a loop of your own",
        ),
        "deepspeed": (bool(args.deepspeed), "is not supported: use accelerate launch without it (data parallel)"),
        "optim": (
            any(part in str(getattr(args.optim, "value", args.optim)) for part in _STEPS_BY_ITSELF),
            "changes the weights outside of optimizer.step(), so updates would not be those of releases: use "
            "'adamw_torch' or another optimizer without that",
        ),
        "gradient_checkpointing_kwargs": (
            args.gradient_checkpointing and _is_reentrant(args.gradient_checkpointing_kwargs),
            "with use_reentrant=True hides the layers from the computation of per-example gradients: use "
            "{'use_reentrant': False}",
        ),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise ConfigurationError(f"TrainingArguments({name}=...) {reason}.")


def _is_reentrant(options: Any) -> bool:
    return isinstance(options, Mapping) and bool(options.get("use_reentrant"))


def require_sound_trainer(trainer: Trainer) -> None:
    """Raise for a data set, a collator or a way of launching that a private run cannot have."""
    if isinstance(trainer.train_dataset, IterableDataset) or type(trainer.train_dataset).__name__ == "IterableDataset":
        raise ConfigurationError(
            "train_dataset is an IterableDataset, which has no length and cannot be sampled: use a map-style data set."
        )
    require_other_records(trainer, trainer.eval_dataset)
    _require_sound_collator(trainer.data_collator, trainer.processing_class)
    for name, p in () if trainer.model is None else trainer.model.named_parameters():
        if p.requires_grad and p.dtype is torch.float16:
            raise ConfigurationError(
                f"The model has trainable parameters in float16, such as {name!r}, in which small updates and noise "
                "are lost: load it with dtype=torch.float32, and give bf16=True for speed."
            )
    accelerator = trainer.accelerator
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigurationError(
            "accelerate was configured with FSDP or DeepSpeed, which PrivateTrainer does not support: configure data "
            "parallelism ('accelerate launch --multi_gpu'). For a sharded model use clipwise.make_private with "
            "torch.distributed.fsdp.fully_shard in a loop of your own."
        )
    if accelerator.scaler is not None:
        raise ConfigurationError("accelerate was configured with fp16, which scales the losses: use bf16.")
    if trainer.args.n_gpu > 1:
        raise ConfigurationError(
            "One process sees several GPUs, and Trainer would use DataParallel: start one process for each with "
            "'accelerate launch' or torchrun, or set CUDA_VISIBLE_DEVICES to one."
        )


def require_other_records(trainer: Trainer, dataset: Any) -> None:
    """Raise if an evaluation would be on the training records, whose exact metrics are private."""
    members: Iterable[Any] = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    if any(holds_records_of(trainer.train_dataset, member) for member in members):
        raise ConfigurationError(
            "The evaluation is on train_dataset. Metrics on training records are exact values of private data, which "
            "the guarantee does not cover: evaluate on other records."
        )


def _require_sound_collator(collator: Any, processing: Any) -> None:
    require_separate_records(collator)
    name = type(collator).__name__
    if getattr(collator, "seed", None) is not None:
        raise ConfigurationError(
            f"{name}(seed=...) draws masks that anyone with the seed can repeat. The mask of a record depends on the "
            "records before it in the batch: leave seed out, and masks come from secret randomness."
        )
    for owner in (getattr(collator, "tokenizer", None), processing):
        if getattr(owner, "padding_side", "right") == "left":
            raise ConfigurationError(
                "The tokenizer has padding_side='left', so the positions of a record would depend on the longest "
                "record in its batch: set tokenizer.padding_side = 'right' for the training."
            )
