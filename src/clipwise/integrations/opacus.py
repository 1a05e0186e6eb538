"""The API of Opacus on the engine of clipwise: a script changes its imports and nothing else.

    from clipwise.integrations.opacus import BatchMemoryManager, PrivacyEngine

The model, the optimizer and the criterion are returned unchanged. The loader yields the batches that the run draws.
In the body of its loop `loss.backward()` writes the private gradient of the batch, see `MeanLossLoader`. Opacus itself
is not needed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from clipwise import accounting
from clipwise.clipping import PerExample, Quantile
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import ClipwiseError, ConfigurationError, StepError, UnsupportedModelError
from clipwise.integrations.data_loader import arguments_of
from clipwise.integrations.mean_loss import MeanLossLoader
from clipwise.layers import replace_batchnorm
from clipwise.ledger.ledger import Ledger, MemoryLedger
from clipwise.validation.step_inputs import require_no_batch_statistics

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "BatchMemoryManager",
    "DPMultiheadAttention",
    "DifferentiallyPrivateDistributedDataParallel",
    "ModuleValidator",
    "PrivacyEngine",
    "get_noise_multiplier",
]

# Layers that Opacus replaces because hooks have no access to their internals. Here torch's own layers work.
DPLSTM, DPGRU, DPRNN, DPMultiheadAttention = nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention

_ACCOUNTANTS = {"prv": None, "pld": "pld", "rdp": "rdp"}
_MODES = ("hooks", "functorch", "ew", "ghost", "no_op")
_ADAPTIVE = {
    "target_unclipped_quantile": "target",
    "clipbound_learning_rate": "learning_rate",
    "min_clipbound": "minimum",
    "max_clipbound": "maximum",
}


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """The model as it is. On several ranks `make_private` copies the weights of rank 0 and sums clipped gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class PrivacyEngine:
    """Makes training private with the calls of `opacus.PrivacyEngine`.

    All runs of one engine share one ledger, so `get_epsilon` counts all of their releases.

    Args:
        accountant: "prv" or "pld" for the tight accountant, "rdp" for the looser bound.
        secure_mode: `noise="secure"` of `clipwise.make_private`.
        ledger: the path of a ledger file; by default the ledger is in memory.
        seed: for tests, see `clipwise.make_private`.
    """

    def __init__(
        self,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        seed: int | None = None,
    ) -> None:
        if accountant not in _ACCOUNTANTS:
            raise ConfigurationError(
                f"accountant={accountant!r} is not possible: give 'prv' or 'rdp'. The central limit theorem of 'gdp' "
                "is an approximation that can report less than the privacy spent."
            )
        self.secure_mode = secure_mode
        self._accountant = _ACCOUNTANTS[accountant]
        self._own_ledger = MemoryLedger()
        self._ledger = self._own_ledger if ledger is None else ledger
        self._seed = seed
        self._private: Private | None = None
        self._budget: tuple[float, float] | None = None  # epsilon and delta

    @property
    def private(self) -> Private:
        """The private run, with `spent()`, `statement()` and checkpoints."""
        if self._private is None:
            raise StepError("This engine has made nothing private yet: call make_private first.")
        return self._private

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        criterion: Callable[..., Any] | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return module, optimizer and loader of a private run with this noise.

        With `grad_sample_mode="ghost"` the criterion is returned as well, before the loader, as in Opacus.

        Args:
            module, optimizer: returned unchanged.
            data_loader: gives the data set, the collate function, the workers and the sampling rate 1/len(data_loader).
            noise_multiplier: the noise's standard deviation over the sensitivity.
            max_grad_norm: the clipping norm; one per parameter for `clipping="per_layer"`.
            criterion: a mean loss; returned unchanged.
            options: the further options of Opacus: batch_first, loss_reduction, poisson_sampling, clipping,
                grad_sample_mode, and those of adaptive clipping.
        """
        target = {"noise_multiplier": noise_multiplier}
        return self._made(module, optimizer, data_loader, max_grad_norm, criterion, target, options)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: Any,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        criterion: Callable[..., Any] | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """`make_private` with noise for this budget and number of epochs. A step beyond it raises `BudgetExhausted`."""
        target = {"epsilon": target_epsilon, "delta": target_delta, "epochs": epochs}
        return self._made(module, optimizer, data_loader, max_grad_norm, criterion, target, options)

    @property
    def accountant(self) -> PrivacyEngine:
        """For `engine.accountant.get_epsilon(delta)`; the engine itself. The count is the ledger's."""
        return self

    def get_epsilon(self, delta: float) -> float:
        """Epsilon of all releases so far. Raises if something else changed the weights.

        Where the looser accountant "rdp" passes the budget, the tight one is used: the steps were planned with it.
        """
        found = self.private.spent(delta=delta, accountant=self._accountant).epsilon
        if self._budget is None or self._budget[1] != delta or found <= self._budget[0]:
            return found
        return min(found, self.private.spent(delta=delta).epsilon)

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save the module, the optimizer and the position of the run. The file holds no secret."""
        saved = {"module_state_dict": module.state_dict(), "private": self.private.state_dict()}
        torch.save({**(checkpoint_dict or {}), **saved}, path)

    def load_checkpoint(
        self, *, path: Any, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` saved into the module and the run of this engine."""
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        module.load_state_dict(saved["module_state_dict"])
        self.private.load_state_dict(saved["private"])
        return saved

    def validate(self, *, module: nn.Module, optimizer: object = None, data_loader: Any = None) -> None:
        """Raise if the module or the loader cannot be used."""
        require_no_batch_statistics(module)
        if data_loader is not None:
            arguments_of(data_loader)

    def is_compatible(self, *, module: nn.Module, optimizer: object = None, data_loader: Any = None) -> bool:
        """Whether `validate` accepts the module and the loader."""
        try:
            self.validate(module=module, data_loader=data_loader)
        except ClipwiseError:
            return False
        return True

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """A copy of the module with group norm in place of batch norm."""
        return ModuleValidator.fix(module)

    def _made(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: Any,
        max_grad_norm: float | list[float],
        criterion: Callable[..., Any] | None,
        target: dict[str, Any],
        options: dict[str, Any],
    ) -> tuple[Any, ...]:
        options = dict(options)
        is_poisson = options.pop("poisson_sampling", True)
        batch_first = options.pop("batch_first", True)
        mode = options.pop("grad_sample_mode", "hooks")
        _require_supported(options.pop("loss_reduction", "mean"), mode, options.pop("noise_generator", None))
        for name in ("wrap_model", "rand_on_empty"):  # nothing is wrapped; an empty batch releases noise
            options.pop(name, None)
        _require_mean(criterion)
        arguments = arguments_of(data_loader)
        dataset, batch_size = arguments.pop("dataset"), arguments.pop("batch_size")
        if is_poisson:
            arguments["sample_rate"] = 1 / len(data_loader)
        else:
            arguments |= {"batch_size": batch_size, "sampling": "shuffled"}
        expected = len(dataset) / len(data_loader)
        private = make_private(
            module,
            optimizer,
            dataset,
            clipping=_strategy(options.pop("clipping", "flat"), max_grad_norm, module, expected, options),
            noise="secure" if self.secure_mode else "standard",
            ledger=self._ledger if self._ledger is not self._own_ledger or _is_first_rank() else None,
            seed=self._seed,
            **target,
            **arguments,
        )
        self._private = private
        self._budget = (target["epsilon"], target["delta"]) if "epsilon" in target else None
        for name in ("signal_skip_step", "virtual_step"):  # of the optimizers of Opacus
            setattr(optimizer, name, _refuse_skip)
        vars(optimizer)["noise_multiplier"] = private.noise_multiplier  # scripts print it
        loader = MeanLossLoader(private, batch_first=batch_first)
        if mode == "ghost":
            return module, optimizer, criterion if criterion is not None else nn.CrossEntropyLoss(), loader
        return module, optimizer, loader


class BatchMemoryManager:
    """Yields batches in pieces of at most `max_physical_batch_size`, with the calls of Opacus.

    The loop calls `loss.backward()`, `optimizer.step()` and `optimizer.zero_grad()` for every piece. The optimizer
    changes the weights after the last piece of a batch.

    Args:
        data_loader: the loader that the engine returned.
        max_physical_batch_size: the most records per piece. It changes no result.
        optimizer: the optimizer of the run; it is not changed.
    """

    def __init__(
        self, *, data_loader: Any, max_physical_batch_size: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        if not isinstance(data_loader, MeanLossLoader):
            raise ConfigurationError(
                f"BatchMemoryManager needs the loader that PrivacyEngine.make_private returned, not "
                f"{type(data_loader).__name__}."
            )
        if optimizer is not None and optimizer is not data_loader.private.optimizer:
            raise ConfigurationError(
                "BatchMemoryManager got another optimizer than the private run of its data_loader: give the one that "
                "make_private returned with this loader."
            )
        self._loader = MeanLossLoader(
            data_loader.private,
            max_physical_batch_size=max_physical_batch_size,
            batch_first=data_loader.batch_first,
            device=data_loader.device,
        )

    def __enter__(self) -> MeanLossLoader:
        return self._loader

    def __exit__(self, *error: object) -> None:
        self._loader.end()


class ModuleValidator:
    """Finds and replaces layers that mix the examples of a batch."""

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[Exception]:
        """The problems of a module, at most one; with `strict` it is raised."""
        try:
            require_no_batch_statistics(module)
        except UnsupportedModelError as error:
            if strict:
                raise
            return [error]
        return []

    @staticmethod
    def is_valid(module: nn.Module) -> bool:
        """Whether a module has no such layer."""
        return not ModuleValidator.validate(module)

    @staticmethod
    def fix(module: nn.Module) -> nn.Module:
        """A copy with group norm in place of batch norm. Build the optimizer from its parameters."""
        fixed, _ = replace_batchnorm(copy.deepcopy(module), kind="group")
        return fixed


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "prv",
    epsilon_tolerance: float = 0.01,
) -> float:
    """The noise multiplier for a budget under Poisson sampling, by the tight accountant."""
    if (epochs is None) == (steps is None):
        raise ConfigurationError("get_noise_multiplier needs either epochs or steps.")
    count = steps if steps is not None else ceil(cast(float, epochs) / sample_rate - 1e-9)
    return accounting.noise_multiplier(epsilon=target_epsilon, delta=target_delta, sample_rate=sample_rate, steps=count)


def _is_first_rank() -> bool:
    """Rank 0 has the ledger of a run in several processes."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _refuse_skip(*args: object, **kwargs: object) -> None:
    raise ConfigurationError(
        "Steps cannot be skipped by hand (signal_skip_step, virtual_step): each batch of the loader is one draw and "
        "one release. For a large batch in small pieces, give the DataLoader the large batch_size and put the loop "
        "into 'with BatchMemoryManager(data_loader=..., max_physical_batch_size=..., optimizer=...) as pieces'."
    )


def _require_supported(loss_reduction: str, mode: str, noise_generator: object) -> None:
    if loss_reduction != "mean":
        raise ConfigurationError(
            f"loss_reduction={loss_reduction!r} is not supported: use a criterion with reduction='mean'. The private "
            "gradient is the clipped sum over the expected batch size in any case."
        )
    if mode not in _MODES:
        raise ConfigurationError(f"grad_sample_mode={mode!r} is not known: leave it out, clipwise chooses the method.")
    if noise_generator is not None:
        raise ConfigurationError(
            "noise_generator= would make the noise predictable. Leave it out: noise comes from the operating system. "
            "For a reproducible test, use PrivacyEngine(seed=...)."
        )


def _require_mean(criterion: Any) -> None:
    reduction = getattr(criterion, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise ConfigurationError(
            f"criterion has reduction={reduction!r}. Its terms are found in a mean: use reduction='mean', or call "
            "clipwise.make_private and private.step(losses) with reduction='none'."
        )


def _strategy(
    clipping: str, max_grad_norm: float | Sequence[float], module: nn.Module, expected: float, options: dict[str, Any]
) -> PerExample:
    """The strategy of Opacus' arguments `clipping` and `max_grad_norm`, and of the options that remain."""
    max_norm: Any = max_grad_norm
    parts = "all"
    if clipping == "adaptive":
        given = {_ADAPTIVE[name]: options.pop(name) for name in list(options) if name in _ADAPTIVE}
        if "unclipped_num_std" in options:
            given["count_noise"] = options.pop("unclipped_num_std") / expected
        max_norm = Quantile(initial=max_norm, **given)
    elif clipping == "per_layer":
        parts = "tensor"
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        if isinstance(max_grad_norm, Sequence):
            if len(max_grad_norm) != len(names):
                raise ConfigurationError(
                    "max_grad_norm must have one number for each trainable parameter with clipping='per_layer'."
                )
            max_norm = dict(zip(names, max_grad_norm, strict=True))
    elif clipping != "flat":
        raise ConfigurationError(f"clipping={clipping!r} is not known: give 'flat', 'per_layer' or 'adaptive'.")
    if isinstance(max_norm, Sequence):
        raise ConfigurationError("max_grad_norm is a list, which needs clipping='per_layer': give one number.")
    if options:
        raise ConfigurationError(f"{next(iter(options))!r} is no option of this PrivacyEngine: leave it out.")
    return PerExample(max_norm=max_norm, parts=parts)
