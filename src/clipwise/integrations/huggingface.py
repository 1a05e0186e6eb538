"""Private training with `transformers.Trainer`: change the class and give the privacy arguments.

    trainer = PrivateTrainer(model, args, train_dataset=rows, privacy=PrivacyArguments(epsilon=3, delta=1e-5))
    trainer.train()

One item of the training loader is one private step. Its pieces have `per_device_train_batch_size` records at most and
are computed in one call of `training_step`, so callbacks, schedulers and checkpoints count private steps.

Shapes: B examples, T positions, K classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils.import_utils import is_datasets_available

from clipwise.clipping import PerExample
from clipwise.engine import checkpoint
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import BudgetExhausted, CheckpointError, ConfigurationError, StepError, warn
from clipwise.integrations.adapters import ParametersMoved, require_trainable
from clipwise.integrations.huggingface_settings import (
    PrivacyArguments,
    require_other_records,
    require_sound_arguments,
    require_sound_class,
    require_sound_privacy,
    require_sound_trainer,
)
from clipwise.integrations.logging import SpentSoFar
from clipwise.integrations.loss_terms import LossTerms
from clipwise.ledger.ledger import Ledger, MemoryLedger
from clipwise.noise.key import NoiseKey
from clipwise.sampling.batch_structure import tensors_in
from clipwise.sampling.generators import seed_global_generators
from clipwise.sampling.schemes import make_scheme
from clipwise.validation.uncompiled import uncompiled

__all__ = ["PrivacyArguments", "PrivateTrainer"]

_STATE = "clipwise.pt"  # the public state of the run, in the folder of a checkpoint
_USED_UP = (
    "The budget is used up before the last step, because the steps after the checkpoint were counted and made again. "
    "Training ends here, with the last released weights."
)
_NOT_LOGGED = ("loss", "train_loss", "total_flos", "grad_norm")


class PrivateTrainer(Trainer):
    """A `transformers.Trainer` whose training is private.

    The expected batch has `per_device_train_batch_size * gradient_accumulation_steps * number of processes` records,
    drawn by clipwise. `per_device_train_batch_size` is the most records that a process computes at a time and changes
    no result. The loss of a record is the mean over its own tokens.

    The training loss is private and is not logged; `epsilon` is. `max_grad_norm` is not applied at its default.

    Args:
        model, args: as in `Trainer`.
        privacy: the privacy arguments.
        arguments, options: further arguments of `Trainer`.

    Raises:
        ConfigurationError: for a setting with which the guarantee would not hold, with the reason.
    """

    model: Any
    optimizer: Any
    train_dataset: Any
    label_smoother: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        privacy: PrivacyArguments,
        **options: Any,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else copy.copy(args)
        require_sound_class(type(self), PrivateTrainer, args)
        require_sound_privacy(privacy)
        require_sound_arguments(args)
        if args.ddp_broadcast_buffers is None:  # a rank without records takes no forward pass
            args.ddp_broadcast_buffers = False
        args.ignore_data_skip = True  # the private loader continues where the run has stopped
        super().__init__(uncompiled(model) if isinstance(model, nn.Module) else model, args, *arguments, **options)
        require_sound_trainer(self)
        self.privacy = privacy
        self._private: Private | None = None
        self._kept: Ledger | None = None  # in memory, shared by all calls of train()
        self._spent: SpentSoFar | None = None
        self._moved: ParametersMoved | None = None
        self._checkpoint: str | None = None
        if self.label_smoother is not None:
            self.label_smoother = _SmoothedLoss(args.label_smoothing_factor)
        self.callback_handler.callbacks.insert(0, _FollowRun(self))

    @property
    def private(self) -> Private:
        """The private run, with `spent()` and `statement()`."""
        if self._private is None:
            raise StepError("The private run begins with trainer.train().")
        return self._private

    # ------------------------------------------------------------------------------------------- the training loop

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. The run is closed at its end. `training_loss` of the result is nan: it is private."""
        self._checkpoint = None
        try:
            output = super().train(*args, **kwargs)
        finally:
            if self._private is not None:
                self._private.close()
        return output._replace(training_loss=float("nan"))

    def get_train_dataloader(self) -> Any:
        """One item for each private step, preceded by `gradient_accumulation_steps - 1` items without data."""
        if self.train_dataset is None:
            raise ConfigurationError("PrivateTrainer needs a train_dataset to train.")
        return _Steps(self, self.args.gradient_accumulation_steps)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The items of one update. The number of tokens in a batch is private and stays out of the losses."""
        return [item for _, item in zip(range(num_batches), epoch_iterator, strict=False)], None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the private gradient of a batch, piece by piece, for an item that has data."""
        for piece in inputs or ():
            self.model.train()
            losses = self._losses(piece, private=True) if self.private.loader.awaited().size else None
            try:
                if self.private.backward(losses):
                    break
            except BudgetExhausted:
                if self._checkpoint is None:
                    raise
                warn(_USED_UP)
                self.control.should_training_stop = True
                break
        return torch.zeros((), device=self.args.device)

    def _losses(self, batch: Any, private: bool = False) -> Tensor:
        """One loss for each row of a batch."""
        inputs = self._prepare_inputs(batch)
        tensors = [t for t in tensors_in(inputs) if t.dim()]
        # Here and not around the call: compute_loss may remove entries, such as the labels.
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        with LossTerms(len(tensors[0])) as terms, torch.enable_grad(), self.compute_loss_context_manager():
            if private:
                with self.private.randomness():
                    loss = self.compute_loss(self.model, inputs)
            else:
                loss = self.compute_loss(self.model, inputs)
        found: Tensor = terms.of(loss)
        return found

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As `Trainer.compute_loss`. Subclasses may override it with a mean over the batch of one loss per record."""
        if self.compute_loss_func is None and "start_positions" in inputs and "attention_mask" in inputs:
            loss, outputs = _answer_loss(model, inputs)
            return (loss, outputs) if return_outputs else loss
        return super().compute_loss(model, inputs, return_outputs)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """The gradient of each record is clipped by the run. The noised mean is not clipped again."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Not computed: it is a norm of noise."""

    def _begin(self) -> None:
        """Make the training private, once the model, the optimizer and the scheduler are prepared."""
        privacy, args = self.privacy, self.args
        options = dict(privacy.options)
        strategy = options.pop("clipping", None) or PerExample(max_norm=privacy.max_norm)
        optimizer = self.optimizer
        if self._kept is None and privacy.ledger is None and args.process_index == 0:
            self._kept = MemoryLedger()
            self._kept.enter("trainer", self)  # keeps it open between two calls of train()
        require_trainable(self.model)
        # For random masks and augmentations in this process: `Trainer` has seeded the generators with a public seed.
        key = NoiseKey.fresh() if privacy.seed is None else NoiseKey.from_seed(privacy.seed)
        seed_global_generators(key.derive("global generators"))
        defaults: dict[str, Any] = {
            "clipping": strategy,
            "sampling": privacy.sampling,
            "batch_size": self._expected_batch(),
            "steps": self.state.max_steps,
            "epsilon": privacy.epsilon,
            "delta": privacy.delta,
            "noise_multiplier": privacy.noise_multiplier,
            "ledger": self._kept if privacy.ledger is None else privacy.ledger,
            "seed": privacy.seed,
            "max_physical_batch_size": None if strategy.clips_whole_blocks else args.per_device_train_batch_size,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "prefetch_factor": args.dataloader_prefetch_factor if args.dataloader_num_workers else None,
            "loss": None if strategy.clips_whole_blocks else self._losses,
        }
        dataset, collate = self._records()
        self._private = make_private(
            self.model,
            optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            dataset,
            **{**defaults, "collate_fn": collate, **options},
        )
        if self._checkpoint is not None:
            self._private.load_state_dict(self._loaded(Path(self._checkpoint) / _STATE))
        self._spent, self._moved = SpentSoFar(self._private), ParametersMoved(self.model)

    def _records(self) -> tuple[Any, Any]:
        """The training records without the columns that the model does not take, and the collator."""
        if is_datasets_available():
            import datasets

            if isinstance(self.train_dataset, datasets.Dataset):
                return self._remove_unused_columns(self.train_dataset, "training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, "training")

    def _expected_batch(self) -> int | None:
        """None if the sampling rate is an option, or 1."""
        if "sample_rate" in self.privacy.options or self.privacy.sampling == "full":
            return None
        return int(min(self.get_total_train_batch_size(self.args), len(self.train_dataset)))

    # ---------------------------------------------------------------------------------- evaluation, logs, checkpoints

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As `Trainer.get_eval_dataloader`; refuses the training records."""
        require_other_records(self, eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As `Trainer.get_test_dataloader`; refuses the training records."""
        require_other_records(self, test_dataset)
        return super().get_test_dataloader(test_dataset)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log public values: no training loss, but `epsilon`."""
        if self.is_in_train:
            for name in _NOT_LOGGED:
                logs.pop(name, None)
            if self._spent is not None:
                logs |= self._spent()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the number depends on the lengths of private records."""
        return 0

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        state = self.private.state_dict()
        if self.args.should_save:
            checkpoint.save(Path(output_dir) / _STATE, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._checkpoint = checkpoint

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing is saved: from the state of a generator its past draws can be computed, such as masks."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing is loaded: the run has its own secret randomness."""

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.private.declare_update("post-processing", "weights of an earlier checkpoint of the run were loaded")

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial would train on the private data, and choosing among them is not accounted."""
        raise ConfigurationError(
            "hyperparameter_search trains on the private data in every trial and reports the best one, which is not "
            "accounted: use clipwise.tune, whose budget covers the trials and the choice."
        )

    @staticmethod
    def _loaded(path: Path) -> dict[str, Any]:
        if not path.exists():
            raise CheckpointError(
                f"{path} does not exist: the checkpoint is not of a private run, or was saved with save_only_model. "
                "Its releases would not be counted."
            )
        return checkpoint.load(path)


class _Steps:
    """The training loader for `Trainer`. It is made before the run, so its length comes from the scheme."""

    def __init__(self, trainer: PrivateTrainer, items_per_step: int) -> None:
        self._trainer, self._items_per_step = trainer, items_per_step
        self.dataset = trainer.train_dataset
        privacy, size = trainer.privacy, trainer._expected_batch()
        scheme = make_scheme(privacy.sampling, len(self.dataset), size, privacy.options.get("sample_rate"))
        self.steps = scheme.steps_per_epoch

    def __len__(self) -> int:
        return self.steps * self._items_per_step

    def __iter__(self) -> Iterator[Any]:
        pieces = iter(self._trainer.private.loader.pieces())
        for first in pieces:
            yield from [None] * (self._items_per_step - 1)
            yield chain([first], pieces)  # `training_step` stops after the last piece of the step


class _FollowRun(TrainerCallback):
    """Begins the run before the other callbacks are called, and checks its result."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `Trainer` counts from the beginning of the iterator, which a resumed epoch begins in the middle.
        state.epoch = state.global_step / len(self._trainer.private.loader)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        moved = self._trainer._moved
        if moved is not None and state.global_step:
            moved.warn_of_unchanged()


class _SmoothedLoss:
    """`transformers`' label smoothing, as a loss whose terms are known."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def __call__(self, outputs: Any, labels: Tensor, shift_labels: bool = False, **unused: Any) -> Tensor:
        logits_BTK = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if shift_labels:
            logits_BTK, labels = logits_BTK[..., :-1, :], labels[..., 1:]
        rows = logits_BTK.reshape(-1, logits_BTK.shape[-1]), labels.reshape(-1)
        return F.cross_entropy(*rows, label_smoothing=self._epsilon)


def _answer_loss(model: nn.Module, inputs: Any) -> tuple[Tensor, Any]:
    """The loss of question answering. Padding gets no probability, so its length does not change the loss."""
    inputs = dict(inputs)
    positions = [inputs.pop("start_positions"), inputs.pop("end_positions")]
    outputs = model(**inputs)
    is_own_BT = inputs["attention_mask"] != 0
    losses = []
    for logits_BT, given in zip((outputs["start_logits"], outputs["end_logits"]), positions, strict=True):
        position_B1 = given.reshape(-1, 1)
        nearest_B1 = position_B1.clamp(0, is_own_BT.shape[1] - 1)
        is_there_B1 = (position_B1 == nearest_B1) & is_own_BT.gather(1, nearest_B1)  # not cut off with the text
        own_BT = logits_BT.masked_fill(~is_own_BT, torch.finfo(logits_BT.dtype).min)
        losses.append(F.cross_entropy(own_BT, nearest_B1.masked_fill(~is_there_B1, -100).squeeze(1)))
    return (losses[0] + losses[1]) / 2, outputs
