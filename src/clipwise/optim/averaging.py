"""Averages of the parameters along the way: often better than the last ones, and free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.layers.all_public_statistics import AllPublicStatistics
from clipwise.validation.arguments import one_of, require_module

KINDS = ("exponential", "uniform")


class AveragedParameters:
    """A running average of a model's trainable parameters, for evaluation.

    Call `update` after every private step. The parameters follow from what the steps released, and so does their
    average: it is post-processing and costs no privacy, whatever the strategy. Weights that stay within
    a ball stay there on average.

    exponential: a <- d a + (1 - d) p, with d = min(decay, (1 + t) / (10 + t)) in step t, so that the first, random,
    weights are soon forgotten (De et al. 2022). uniform: the mean of all steps since `start`.

    Args:
        model: its parameters with `requires_grad` are averaged, and nothing else of it.
        decay: the largest d of the exponential average.
        kind: "exponential" or "uniform".
        start: updates before this one only copy.

    Attributes:
        updates: how many steps were taken in.
        is_applied: whether the model has the averages for its parameters now, see `applied`.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.999, kind: str = "exponential", start: int = 0
    ) -> None:
        if not (isinstance(decay, (int, float)) and 0 <= decay < 1):
            raise ConfigurationError(f"decay must lie in [0, 1), not {decay!r}.")
        one_of("kind", kind, KINDS)
        if not isinstance(start, int) or start < 0:
            raise ConfigurationError(f"start must be a whole number that is not negative, not {start!r}.")
        self._model, self._decay, self._kind, self._start = model, float(decay), kind, start
        self.updates = 0
        self.is_applied = False
        self._averages = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def names_in_model(self) -> set[str]:
        """The names of what is averaged, if the model has the averages for all of it now; else none."""
        parameters = self._parameters()
        is_there = parameters.keys() == self._averages.keys() and all(
            torch.equal(parameters[name], average.to(parameters[name]))
            for name, average in self._averages.items()
        )
        return set(self._averages) if is_there else set()

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now, after a step."""
        kept = self._kept()
        parameters = self._parameters()
        for name, average in self._averages.items():
            # a + (1 - d) (p - a): where p does not move, neither does a.
            average.lerp_(parameters[name].detach().to(average.device), 1 - kept)
        self.updates += 1

    @torch.no_grad()
    def scale(self, factors: Mapping[str, float]) -> None:
        """Go along with parameters that were multiplied by factors such that the network still computes the same.

        Else the average of weights from before and from after would be that of two different networks.
        """
        for name, factor in factors.items():
            self._averages[name].mul_(factor)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """In this block the model has the averages for its parameters, and public statistics that go with them.

        Do not train in it: a private run that keeps these averages refuses to.
        """
        if self.is_applied:
            yield self._model
            return
        parameters = self._parameters()
        with torch.no_grad():
            own = {name: p.detach().clone() for name, p in parameters.items()}
            self._write(parameters, self._averages)
        self.is_applied = True
        try:
            AllPublicStatistics(self._model).refresh()
            yield self._model
        finally:
            with torch.no_grad():
                self._write(parameters, own)
            self.is_applied = False
            AllPublicStatistics(self._model).refresh()

    def copy_to(self, model: nn.Module) -> None:
        """Write the averages into a model of the same kind, for good."""
        require_module(model)
        parameters = dict(model.named_parameters())
        if (name := self._not_in(parameters)) is not None:
            average = self._averages[name]
            raise ConfigurationError(
                f"copy_to: the model has no parameter {name!r} of shape {tuple(average.shape)}: give one that is "
                "built like the model that was trained."
            )
        with torch.no_grad():
            self._write(parameters, self._averages)
        AllPublicStatistics(model).refresh()

    def state_dict(self) -> dict[str, Any]:
        """The averages and how they came about, in types that `weights_only=True` loads. It may be published."""
        return {
            "kind": self._kind,
            "decay": self._decay,
            "start": self._start,
            "updates": self.updates,
            "averages": {name: a.clone() for name, a in self._averages.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of the same settings and the same model."""
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
            raise CheckpointError(
                f"The averages are of another model: {name!r} is missing or has another shape."
            )
        if len(averages) != len(self._averages):
            raise CheckpointError(
                "The averages are of another model: they hold more parameters than are trained here."
            )
        for name, average in self._averages.items():
            average.copy_(averages[name])
        self.updates = updates

    def _not_in(self, tensors: Mapping[str, Tensor]) -> str | None:
        """The name of an average that has no tensor of its shape among these."""
        return next(
            (n for n, a in self._averages.items() if n not in tensors or tensors[n].shape != a.shape), None
        )

    def _kept(self) -> float:
        """d: how much of the average stays."""
        t = self.updates - self._start
        if t <= 0:
            return 0.0
        if self._kind == "uniform":
            return t / (t + 1)
        return min(self._decay, (1 + t) / (10 + t))

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Those that are averaged, also if they were frozen since."""
        return {name: p for name, p in self._model.named_parameters() if name in self._averages}

    @staticmethod
    def _write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)
