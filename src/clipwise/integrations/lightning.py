"""Private training with Lightning: `Trainer(strategy=PrivateStrategy(epsilon=3, delta=1e-5))`.

`trainer.fit` and the LightningModule stay as they are. The strategy takes the place of three things: the batches of the
training loader, `loss.backward()`, and the closure that Lightning passes to `optimizer.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import CheckpointError, ConfigurationError, StepError, warn
from clipwise.integrations.data_loader import arguments_of, holds_records_of, steps_per_epoch, with_options
from clipwise.integrations.loss_terms import LossTerms
from clipwise.ledger.ledger import MemoryLedger

_KEY = "clipwise"  # of the run's state in a checkpoint


class PrivateStrategy(SingleDeviceStrategy):
    """A Lightning strategy that makes `trainer.fit` private, on one device.

    Several calls of `fit` share one ledger in memory, unless `ledger` is an option: epsilon counts all of them, and a
    budget is that of all of them. Checkpoints hold the state of the run, and `trainer.fit(..., ckpt_path=...)`
    continues its count. Epsilon is logged as `epsilon` at the end of each training epoch.

    Args:
        device: the device to train on.
        batch_first: see `LossTerms`.
        max_physical_batch_size: compute a batch in pieces of at most this size. `training_step` is called for each.
        options: arguments of `clipwise.make_private`, except the model, the optimizer and those of the data loader. By
            default `epochs` or `steps` come from the trainer.
    """

    strategy_name = "clipwise"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        batch_first: bool = True,
        max_physical_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device=device)
        self._options, self._batch_first = options, batch_first
        self._max_physical_batch_size = max_physical_batch_size
        self._private: Private | None = None
        self._trainer: Trainer | None = None
        self._losses: Tensor | None = None  # of the last training_step; None for an empty batch or piece
        self._awaits_backward = False
        self._has_warned = False
        self._loaded: dict[str, Any] | None = None
        self._kept: MemoryLedger | None = None  # shared by all calls of fit
        self._arguments: dict[str, Any] | None = None  # of the run that the next training begins
        self._trained: object = None  # the data set of the training
        self._evaluated: list[object] = []  # those of evaluations

    @property
    def private(self) -> Private:
        """The private run, with `spent()` and `statement()`."""
        if self._private is None:
            raise StepError("The private run begins with trainer.fit.")
        return self._private

    # ------------------------------------------------------------ the hooks of Lightning, in the order of their calls

    def setup(self, trainer: Trainer) -> None:
        self._trainer, self._arguments = trainer, None
        super().setup(trainer)  # makes the optimizers; a scheduler may ask for the length of the training loader
        if trainer.state.fn == "fit":
            _require_private(trainer, self.lightning_module)
            if not any(isinstance(callback, _FollowRun) for callback in trainer.callbacks):  # type: ignore[attr-defined]
                trainer.callbacks.insert(0, _FollowRun())  # type: ignore[attr-defined]

    def process_dataloader(self, dataloader: object) -> object:
        trainer, records = self._trainer, getattr(dataloader, "dataset", None)
        if trainer is None or not trainer.training:
            self._evaluated += [] if trainer is None or trainer.predicting else [records]
            self._require_other_records()
            return dataloader
        if self._arguments is not None:
            raise ConfigurationError(
                "The training has several data loaders. A private run draws from one data set: join them in one, such "
                "as torch.utils.data.ConcatDataset."
            )
        self._trained = records
        self._require_other_records()
        self._arguments = with_options(arguments_of(dataloader) | self._length(trainer), self._options)
        return _Steps(self, records, steps_per_epoch(self._arguments))

    def begin(self) -> None:
        """Make the private run, once the optimizer is made and its state is loaded."""
        if self._private is not None:
            self._private.close()
        assert self._arguments is not None and self.model is not None
        arguments = dict(self._arguments)
        if self._kept is None:
            self._kept = MemoryLedger()
            self._kept.enter("strategy", self)  # keeps it open between two calls of fit
        arguments.setdefault("ledger", self._kept)
        self._private = make_private(
            self.model,
            self.optimizers[0],
            arguments.pop("dataset"),
            max_physical_batch_size=self._max_physical_batch_size,
            **arguments,
        )
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._private.load_state_dict(loaded)

    def _require_other_records(self) -> None:
        """Raise if an evaluation is on the training records. Its loader may be made before that of the training."""
        if any(holds_records_of(self._trained, records) for records in self._evaluated):
            raise ConfigurationError(
                "An evaluation has the data set of the training. Metrics on training records are exact values of "
                "private data, which the guarantee does not cover: evaluate on other records."
            )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, _Pieces) else super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(batch, _Pieces):
            return self._followed_step(batch, *args, **kwargs)
        for piece in batch:
            output = self._followed_step(super().batch_to_device(piece), *args, **kwargs)
            if self.private.loader.awaited().last:  # Lightning clears .grad now, then calls backward
                break
            self._backward()
        return output

    def _followed_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        size = self.private.loader.awaited().size
        terms = LossTerms(size, batch_first=self._batch_first)
        with terms, self.private.randomness():  # `seed_everything` has seeded the global generators with a public seed
            output = super().training_step(batch, *args, **kwargs)
        if output is None:
            raise StepError(
                "training_step returned None, which skips the batch. A private run may not skip a batch because of its "
                "data: return the loss of every batch."
            )
        self._check_logged()
        # Here, since Lightning divides the loss by accumulate_grad_batches afterwards.
        self._losses, self._awaits_backward = terms.of(_loss_of(output)) if size else None, True
        return output

    def _check_logged(self) -> None:
        """Warn once of values that `training_step` logs with `self.log`; raise if one controls the training."""
        assert self._trainer is not None
        logged = (self._trainer._results or {}).values()
        names = sorted({value.meta.name for value in logged if value.meta.fx == "training_step"})
        if not names or self._has_warned:
            return
        self._has_warned = True
        own = {form for name in names for form in (name, f"{name}_step", f"{name}_epoch")}
        for user, monitor in _monitors(self._trainer):
            if monitor in own:
                raise ConfigurationError(
                    f"{user} monitors {monitor!r}, which training_step logs. It is computed from private records, and "
                    "what follows from it is not covered by the guarantee: monitor a value of validation_step on "
                    "public rows."
                )
        warn(
            f"training_step logs {', '.join(names)}. Values of training batches are private, and the guarantee "
            "does not cover them: log values of public rows in validation_step, and choose no checkpoint by them."
        )

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.pre_backward(closure_loss)
        self._backward()
        self.post_backward(closure_loss)
        return closure_loss.detach()

    def _backward(self) -> None:
        if not self._awaits_backward:
            raise StepError("backward() was called without a training_step on a new batch.")
        losses, self._losses, self._awaits_backward = self._losses, None, False
        self.private.backward(losses)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, then the optimizer without one: a closure could compute gradients that are not released."""
        assert self.lightning_module is not None
        result = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def teardown(self) -> None:
        if self._private is not None:
            self._private.close()
        super().teardown()

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._private is not None:
            checkpoint[_KEY] = self._private.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == "fit":
            self._loaded = checkpoint.get(_KEY)
            if self._loaded is None:
                raise CheckpointError(
                    f"ckpt_path={str(checkpoint_path)!r} is not a checkpoint of a private run, so the records that its "
                    "weights were trained on would not be counted. For public weights, load them into the "
                    "LightningModule and leave ckpt_path out."
                )
        return checkpoint

    def _length(self, trainer: Trainer) -> dict[str, Any]:
        """The planned length of the training, unless it is an option."""
        if "epochs" in self._options or "steps" in self._options:
            return {}
        if trainer.max_steps > 0:
            return {"steps": trainer.max_steps}
        return {"epochs": trainer.max_epochs} if trainer.max_epochs and trainer.max_epochs > 0 else {}


class _Pieces:
    """The pieces of one step. An object that Lightning passes through unchanged."""

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[Any]:
        return self._pieces


class _Steps:
    """The training loader that Lightning sees. It is made before the run, so its length comes from the scheme.

    An item is a batch, or the `_Pieces` of a step that can come in several.
    """

    def __init__(self, strategy: PrivateStrategy, dataset: Any, length: int) -> None:
        self._strategy, self.dataset, self._length = strategy, dataset, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for item in self._strategy.private.loader:
            yield _Pieces(item) if isinstance(item, Iterator) else item


class _FollowRun(Callback):
    """Begins the run before the other callbacks are called, and logs epsilon."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, PrivateStrategy):
            trainer.strategy.begin()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, PrivateStrategy):
            pl_module.log("epsilon", trainer.strategy.private.spent().epsilon)


def _monitors(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """The callbacks and schedulers that follow a logged value, and its name."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(monitor := getattr(callback, "monitor", None), str):
            yield type(callback).__name__, monitor
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and isinstance(config.monitor, str):
            yield type(config.scheduler).__name__, config.monitor


def _loss_of(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, dict) else output
    assert isinstance(loss, Tensor)
    return loss


_SEARCHES = "trains on the private records before the training: leave it out, or use clipwise.tune"
_AVERAGES = "replaces the weights after the training: give PrivateStrategy(ema=0.999), which averages released weights"
_CALLBACKS = {  # by the names of their classes
    "GradientAccumulationScheduler": "would add up several releases: give the DataLoader a larger batch_size, and "
    "PrivateStrategy(max_physical_batch_size=...) to fit it into memory",
    "LearningRateFinder": _SEARCHES,
    "BatchSizeFinder": _SEARCHES,
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
}


def _require_private(trainer: Trainer, module: LightningModule | None) -> None:
    """Raise for settings of Lightning that a private run cannot have."""
    assert module is not None
    refused = {
        "gradient_clip_val": (
            trainer.gradient_clip_val,
            "clips the noised mean, not each example: give PrivateStrategy(clipping=PerExample(max_norm=...))",
        ),
        "accumulate_grad_batches": (
            trainer.accumulate_grad_batches != 1,
            "would add up several releases: give the DataLoader a larger batch_size, and "
            "PrivateStrategy(max_physical_batch_size=...) to fit it into memory",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,  # type: ignore[attr-defined]
            "would begin a new private run: leave it out",
        ),
        "overfit_batches": (trainer.overfit_batches, "trains on fixed batches that are not sampled: leave it out"),  # type: ignore[attr-defined]
        "precision": (
            str(trainer.precision).startswith("16"),
            "scales the losses, which changes what is clipped: use 'bf16-mixed' or '32-true'",
        ),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise ConfigurationError(f"Trainer({name}=...) {reason}.")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                raise ConfigurationError(f"The callback {type(callback).__name__} {_CALLBACKS[kind.__name__]}.")
    if getattr(module, "_compiler_ctx", None) is not None:  # set by torch.compile(module)
        raise ConfigurationError(
            "trainer.fit got a compiled LightningModule, whose backward pass is one unit without per-example "
            "gradients: give it the module itself, without torch.compile."
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            "The LightningModule has automatic_optimization=False. PrivateStrategy needs automatic optimization; with "
            "manual optimization, call clipwise.make_private and private.step(losses) yourself."
        )
    if len(trainer.optimizers) != 1:
        raise ConfigurationError("configure_optimizers must return exactly one optimizer for a private run.")
