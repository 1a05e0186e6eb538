"""Averages of the parameters over the steps, often better than the last ones; and penalties on them, after the
noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.errors import CheckpointError, ConfigurationError, StepError
from clipwise.layers.public_statistics import AllPublicStatistics
from clipwise.validation.arguments import number, one_of, require_module, whole

KINDS = ("exponential", "uniform")


class AveragedParameters:
    """A running average of a model's trainable parameters, for evaluation.

    Call `update` after every private step. The average is post-processing of the releases and costs no privacy with
    any strategy. If all weights are within a ball, so is their average.

    exponential: a <- d a + (1 - d) p, with d = min(decay, (1 + t) / (10 + t)) in step t, so that the random initial
    weights soon have little influence (De et al. 2022). uniform: the mean of all steps since `start`.

    Args:
        model: its parameters with `requires_grad` are averaged.
        decay: the largest d of the exponential average.
        kind: "exponential" or "uniform".
        start: updates before this one only copy.

    Attributes:
        updates: the number of steps in the average.
        is_applied: whether the model currently holds the averages, see `applied`.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, kind: str = "exponential", start: int = 0) -> None:
        self._model, self._kind = model, one_of("kind", kind, KINDS)
        self._decay, self._start = number("decay", decay, least=0, below=1), whole("start", start)
        self.updates = 0
        self.is_applied = False
        self._averages = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def names_in_model(self) -> set[str]:
        """The names of the averaged parameters if the model currently holds all averages, else none."""
        parameters = self._parameters()
        is_there = parameters.keys() == self._averages.keys() and all(
            torch.equal(parameters[name], average.to(parameters[name])) for name, average in self._averages.items()
        )
        return set(self._averages) if is_there else set()

    @torch.no_grad()
    def update(self) -> None:
        """Add the current parameters to the average, after a step."""
        kept = self._kept()
        parameters = self._parameters()
        for name, average in self._averages.items():
            # a + (1 - d) (p - a): exact where p equals a.
            average.lerp_(parameters[name].detach().to(average.device), 1 - kept)
        self.updates += 1

    @torch.no_grad()
    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply averages by factors, after the parameters were rescaled without a change of the network's function.

        Otherwise the average would mix weights of two different scales.
        """
        for name, factor in factors.items():
            self._averages[name].mul_(factor)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """A context in which the model holds the averages, with matching public statistics. Do not train in it."""
        if self.is_applied:
            yield self._model
            return
        parameters = self._parameters()
        own = {name: p.detach().clone() for name, p in parameters.items()}
        self._write(parameters, self._averages)
        self.is_applied = True
        try:
            AllPublicStatistics(self._model).refresh()
            yield self._model
        finally:
            self._write(parameters, own)
            self.is_applied = False
            AllPublicStatistics(self._model).refresh()

    def copy_to(self, model: nn.Module) -> None:
        """Write the averages into a model of the same architecture."""
        require_module(model)
        parameters = dict(model.named_parameters())
        if (name := self._not_in(parameters)) is not None:
            raise ConfigurationError(
                f"copy_to: the model has no parameter {name!r} of shape {tuple(self._averages[name].shape)}: give a "
                "model with the architecture of the trained one."
            )
        self._write(parameters, self._averages)
        AllPublicStatistics(model).refresh()

    def state_dict(self) -> dict[str, Any]:
        """The averages and their settings, in types that `weights_only=True` loads. It may be published."""
        return {
            "kind": self._kind,
            "decay": self._decay,
            "start": self._start,
            "updates": self.updates,
            "averages": {name: a.clone() for name, a in self._averages.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` with the same settings and the same model."""
        try:
            given = (state["kind"], state["decay"], state["start"])
            updates, averages = int(state["updates"]), dict(state["averages"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError("This is no state_dict of AveragedParameters, or a damaged one.") from None
        if given != (self._kind, self._decay, self._start):
            raise CheckpointError(
                f"The averages were made with kind, decay and start {given}; this run has "
                f"{(self._kind, self._decay, self._start)}. Give the same."
            )
        if (name := self._not_in(averages)) is not None:
            raise CheckpointError(f"The averages are of another model: {name!r} is missing or has another shape.")
        if len(averages) != len(self._averages):
            raise CheckpointError("The averages are of another model: it has more trained parameters.")
        for name, average in self._averages.items():
            average.copy_(averages[name])
        self.updates = updates

    def _not_in(self, tensors: Mapping[str, Tensor]) -> str | None:
        """The name of an average without a tensor of the same name and shape."""
        return next((n for n, a in self._averages.items() if n not in tensors or tensors[n].shape != a.shape), None)

    def _kept(self) -> float:
        """d: the weight of the old average."""
        t = self.updates - self._start
        if t <= 0:
            return 0.0
        if self._kind == "uniform":
            return t / (t + 1)
        return min(self._decay, (1 + t) / (10 + t))

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The averaged parameters, including those that were frozen later."""
        return {name: p for name, p in self._model.named_parameters() if name in self._averages}

    @torch.no_grad()
    def _write(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)


Penalty = Callable[[nn.Module], Tensor]


def require_penalty(given: object, model: nn.Module) -> None:
    """Raise for a penalty that fails on this model, before the first release."""
    if given is None:
        return
    if not callable(given):
        raise ConfigurationError(f"penalty must be a function from the model to a number, not {type(given).__name__}.")
    try:
        _gradients(given, model, [p for p in model.parameters() if p.requires_grad])
    except StepError as error:
        raise ConfigurationError(str(error)) from error
    except Exception as error:
        raise ConfigurationError(
            f"penalty(model) failed ({type(error).__name__}: {error}): give a function from the model to a number."
        ) from error


def add_penalty(penalty: Penalty, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Add its gradient to every `.grad`. It is post-processing of the released weights."""
    found = _gradients(penalty, model, list(parameters.values()))
    for p, gradient in zip(parameters.values(), found, strict=True):
        if gradient is not None:
            assert p.grad is not None
            p.grad.add_(gradient)


def _gradients(penalty: Penalty, model: nn.Module, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        value = penalty(model)
    found: tuple[Tensor | None, ...] = ()
    if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad:
        found = torch.autograd.grad(value, parameters, allow_unused=True)
    if all(g is None for g in found):
        raise StepError("penalty must return a single number that depends on the model's trainable weights.")
    finite = [torch.isfinite(t.detach()).all().cpu() for t in (value, *found) if t is not None]
    if not bool(torch.stack(finite).all()):
        raise StepError(
            "penalty or its gradient is not finite at these weights, and the update would destroy them: check how the "
            "penalty is computed."
        )
    return found
