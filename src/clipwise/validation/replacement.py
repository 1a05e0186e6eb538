"""The replacement test: an example's loss must stay what it is when the other examples of its batch change.

The losses are computed again on other arrangements of the same examples:

    replaced   one example is exchanged for another     batch statistics, shared divisors, mixup, mining
    reversed   the same examples in another order       outputs that depend on the place in the batch
    fewer      every second example, and single ones    sizes, any() over the batch, loops that wait for all, padding

and again on a few examples with randomly drawn weights, with their gradients: a gate or a head that starts at zero
hides a coupling from the losses, and a detached factor hides it from the losses for good.

An arrangement may change rounding, since kernels add in another order: see rounding.py.

It is a lint and no proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipwise.engine.memory_shortage import is_out_of_memory
from clipwise.errors import CoupledExamplesError
from clipwise.gradients.precision import without_tf32
from clipwise.layers.clipped import unclipped
from clipwise.sampling.batch_structure import evaluating
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.random_state import fixed_random_state, random_state_now, with_other_tensors
from clipwise.validation.rounding import FLOAT32, CoarsestType, differing, largest, limits, perturbed
from clipwise.validation.step_inputs import require_losses

Arrange = Callable[[Sequence[int]], Any]  # from places of examples to a batch of these examples, in order
Run = Callable[[Any], Tensor]  # from a batch to one loss an example
Blank = Callable[[Any, int], Any]  # the batch with an empty example in one place

_REPLACED, _ALONE = 3, 16
_FEW = 4  # examples for the part with gradients

_ADVICE = (
    "Compute each loss from its own example, or use Batch(max_norm=...), which bounds whole mini-sets and needs far "
    "more noise."
)
_REFUSALS: Mapping[str, str] = {
    "replaced": "only another example was replaced. Usual causes: a loss divided by something of the whole batch (such "
    "as its number of valid tokens), batch statistics, mixup, a choice of hard examples",
    "reversed": "only the order of the batch was changed. Usual cause: what depends on the place in the batch",
    "fewer": "other examples were taken out of the batch. Usual causes: a loss divided by the number of examples "
    "(private.step divides by a constant of its own), a branch on any example of the batch, a loop that stops when the "
    "whole batch has converged",
}


@dataclass(frozen=True)
class Arrangement:
    """Some examples of a batch, in some order."""

    kind: str  # how it differs from the batch
    places: tuple[int, ...]  # the examples, by their places in the batch
    compared: tuple[int, ...]  # the positions here whose examples are compared
    blank: int | None = None  # the position of an example that is emptied

    @property
    def examples(self) -> tuple[int, ...]:
        """The places in the batch of those that are compared."""
        return tuple(self.places[position] for position in self.compared)


def _whole(kind: str, places: Sequence[int]) -> Arrangement:
    return Arrangement(kind, tuple(places), tuple(range(len(places))))


def _replacements(size: int, with_blank: bool) -> list[Arrangement]:
    found, everyone = [], tuple(range(size))
    for place in _spread(size, _REPLACED):
        others = everyone[:place] + everyone[place + 1 :]
        replaced = (*everyone[:place], (place + 1) % size, *everyone[place + 1 :])
        found.append(Arrangement("replaced", replaced, others))
        if with_blank:
            found.append(Arrangement("replaced", everyone, others, blank=place))
    return found


def _rearrangements(size: int) -> list[Arrangement]:
    half = [_whole("fewer", range(0, size, 2))] if size > 2 else []
    alone = [_whole("fewer", [place]) for place in _spread(size, _ALONE)]
    return [_whole("reversed", range(size)[::-1]), *half, *alone]


def _spread(size: int, most: int) -> list[int]:
    """At most so many places, from the first to the last."""
    if size <= most:
        return list(range(size))
    return sorted({round(i * (size - 1) / (most - 1)) for i in range(most)})


@dataclass(frozen=True)
class _Observed:
    """The losses that are compared, gradients by the weights if there are any, and the random numbers used up."""

    tensors: list[Tensor]
    random_state: object


@dataclass(frozen=True)
class Trial:
    """What is run on each arrangement of a batch, and what is compared."""

    model: nn.Module  # whose modes and tensors are used. It stays as it is
    run: Run
    arrange: Arrange
    size: int  # the number of examples
    blank: Blank | None = None  # empties an example; None where nothing is an empty example
    # Parameters in place of the model's own. Then gradients by them are compared too.
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what could not be compared

    def require_uncoupled(self) -> None:
        """Refuse losses that depend on other examples.

        Random layers draw other numbers for another order or size. A model that has them is tested in `.eval()`
        there, and as it is where an example is replaced.
        """
        replacements = _replacements(self.size, self.blank is not None)
        as_it_is = _Mode(self)
        if self.weights and not as_it_is.is_finite:
            return  # such weights show nothing about this model
        if as_it_is.is_repeatable:
            as_it_is.examine(replacements)
            if not as_it_is.is_random:
                as_it_is.examine(_rearrangements(self.size))
                return
        with evaluating(self.model):
            in_eval = _Mode(self)
            if in_eval.is_random or not in_eval.is_repeatable:
                self._note(
                    "The losses are random even in .eval(): other sizes of the batch were not compared."
                )
                return
            in_eval.examine(_rearrangements(self.size) + ([] if as_it_is.is_repeatable else replacements))

    def with_random_weights(self, probe_inputs: bool) -> None:
        """The same on a few of the examples with weights drawn at random, which let every gradient through.

        With `probe_inputs` the probe of input gradients looks as well.
        """
        weights = _random_weights(self.model)
        if not weights:
            return
        few = _spread(self.size, _FEW)

        def arrange(at: Sequence[int]) -> Any:
            return self.arrange([few[place] for place in at])

        trial = replace(self, arrange=arrange, size=len(few), weights=weights)
        try:
            trial.require_uncoupled()
            if probe_inputs:
                trial._probe_inputs()
        except CoupledExamplesError:
            raise
        except Exception:  # weights that the model cannot have, or too little memory for them
            self._note("The model does not run with weights drawn at random: gradients were not compared.")

    def _probe_inputs(self) -> None:
        def probed() -> None:
            probe = IndependenceProbe()
            losses = self.run(probe.mark(self.arrange(range(self.size))))
            if losses.requires_grad and losses.shape == (self.size,) and bool(losses.isfinite().all()):
                probe.examine(losses)

        with fixed_random_state(0), torch.enable_grad():
            with_other_tensors(self.model, self.weights, probed)

    def observe(
        self, arrangement: Arrangement, seed: int = 0, weights: Mapping[str, Tensor] | None = None
    ) -> _Observed:
        """Run an arrangement, by default with the trial's own weights."""
        used = self.weights if weights is None else weights
        with fixed_random_state(seed), without_tf32(), torch.set_grad_enabled(bool(self.weights)):
            batch = self.arrange(arrangement.places)
            if arrangement.blank is not None and self.blank is not None:
                batch = self.blank(batch, arrangement.blank)
            found = with_other_tensors(self.model, used, lambda: self._measured(batch, arrangement, used))
            return _Observed(found, random_state_now())

    def _measured(self, batch: Any, arrangement: Arrangement, weights: Mapping[str, Tensor]) -> list[Tensor]:
        losses = self._one_each(self.run(batch), arrangement)[list(arrangement.compared)]
        found = [losses.detach().double()]
        if self.weights and losses.requires_grad:
            leaves = list({id(t): t for t in weights.values()}.values())
            # No two losses have the same factor.
            factors = [1.0 + (0.6180339887 * (example + 1)) % 1.0 for example in arrangement.examples]
            total = (losses * torch.tensor(factors).to(losses)).sum()
            with unclipped():
                found += torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return found

    def _one_each(self, losses: object, arrangement: Arrangement) -> Tensor:
        """The losses as a vector; refused if there is not one for each example."""
        count = len(arrangement.places)
        if isinstance(losses, Tensor) and (losses.shape == (count,) or losses.numel() == count == 1):
            return losses.reshape(-1)
        if arrangement.kind == "everyone":
            require_losses(losses, count)
        raise CoupledExamplesError(self.refusal("loss", "fewer"))

    def refusal(self, what: str, kind: str) -> str:
        """In words, without anything of the data."""
        drawn = " (with weights drawn at random: training may lead there)" if self.weights else ""
        return f"The {what} of an example moved{drawn} when {_REFUSALS[kind]}. {_ADVICE}"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _Mode:
    """A trial in the modes that the model's layers have now."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._everyone = _whole("everyone", range(trial.size))
        observed = trial.observe(self._everyone)
        self._losses, self._random_state = observed.tensors[0], observed.random_state
        self._sizes = [largest(t) for t in observed.tensors]

    @property
    def is_finite(self) -> bool:
        return bool(self._losses.isfinite().all())

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether one seed gives the same losses twice."""
        return self._is_same(self._trial.observe(self._everyone))

    @cached_property
    def is_random(self) -> bool:
        """Whether another seed gives other losses."""
        return not self._is_same(self._trial.observe(self._everyone, seed=1))

    def _is_same(self, observed: _Observed) -> bool:
        """Whether the same batch gave the same losses, by the same kernels."""
        return differing([self._losses], observed.tensors[:1], limits(self._sizes[:1], FLOAT32)) is None

    def examine(self, arrangements: Sequence[Arrangement]) -> None:
        """Refuse losses and gradients that move."""
        for arrangement in arrangements:
            what = self._moved(arrangement)
            if what is not None:
                raise CoupledExamplesError(self._trial.refusal(what, arrangement.kind))

    def _moved(self, arrangement: Arrangement) -> str | None:
        """What is not as it is in the batch, "loss" or "gradient", beyond rounding."""
        try:
            found = self._trial.observe(arrangement)
        except CoupledExamplesError:
            raise
        except Exception as error:
            # An empty example, or one alone, need not be possible. What the error says may hold data.
            if is_out_of_memory(error):
                raise
            self._trial._note("The loss fails on some parts of the batch: they were not compared.")
            return None
        if found.random_state != self._random_state and self.is_random:
            return None  # the others got other random numbers, which is no coupling
        expected = [self._losses[list(arrangement.examples)]]
        if len(self._sizes) > 1:  # gradients are too large to be kept
            same = replace(self._everyone, compared=arrangement.examples)
            expected = self._trial.observe(same).tensors
        if differing(expected, found.tensors, limits(self._sizes, FLOAT32)) is None:
            return None  # as nearly always
        number = differing(expected, found.tensors, self._limits)
        return None if number is None else "gradient" if number else "loss"

    @cached_property
    def _limits(self) -> list[float]:
        """How far rounding may move each tensor, from the type that runs and from how far the model magnifies it."""
        with CoarsestType() as coarsest:
            expected = self._trial.observe(self._everyone).tensors
        weights = self._trial.weights or dict(self._trial.model.named_parameters(remove_duplicate=False))
        spreads = [0.0] * len(expected)
        for seed in range(3):
            other = perturbed(weights, coarsest.eps, seed)
            moved = self._trial.observe(self._everyone, weights=other).tensors
            spreads = [max(s, largest(a - b)) for s, a, b in zip(spreads, expected, moved, strict=True)]
        return limits(self._sizes, coarsest.eps, spreads)


def _random_weights(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters drawn anew: gates and heads that start at zero come to life."""
    if any(is_lazy(p) for p in model.parameters()):
        return {}
    drawn: dict[int, Tensor] = {}
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    with fixed_random_state(0), torch.no_grad():
        for _, p in named:
            if id(p) not in drawn:
                drawn[id(p)] = _drawn(p).requires_grad_()
    return {name: drawn[id(p)] for name, p in named}


def _drawn(p: Tensor) -> Tensor:
    if p.dim() < 2:  # biases, scales, gates: away from where they are, and from zero
        return p + (torch.rand_like(p) / 2 + 0.25) * torch.randn_like(p).sign()
    return torch.randn_like(p) / math.sqrt(max(1, p.numel() // max(1, p.shape[0])))  # 1 / sqrt(fan-in)
