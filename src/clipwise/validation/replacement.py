"""The replacement test: the loss of an example must not change when the other examples of its batch change.

The losses are computed again on other arrangements of the same examples:

    replaced   one example is exchanged for another     batch statistics, shared divisors, mixup, mining
    reversed   the same examples in another order       outputs that depend on the index in the batch
    fewer      every second example, and single ones    sizes, any() over the batch, loops until all converge, padding

A few examples are also compared with random weights, including their gradients: a gate or a head that starts at zero
hides coupling from the losses, and so does a detached factor. Arrangements may change rounding.

This is a lint, not a proof.

Kernels sum in another order for another size or order of a batch. A difference counts if it exceeds

    a few unit roundoffs of the coarsest dtype in use, times the largest number,
    plus a multiple of the effect of a random change of all weights by that roundoff.

The second term measures how much a model amplifies rounding: losses may be small compared with their logits.
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
from torch.utils._python_dispatch import TorchDispatchMode

from clipwise.engine.memory_shortage import is_out_of_memory
from clipwise.errors import CoupledExamplesError
from clipwise.gradients.precision import without_tf32
from clipwise.layers.clipped import unclipped
from clipwise.sampling.batch_structure import evaluating, tensors_in
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.random_state import fixed_random_state, random_state_now, with_other_tensors
from clipwise.validation.step_inputs import require_losses

FLOAT32 = torch.finfo(torch.float32).eps

_ROUNDINGS, _SPREADS = 64.0, 16.0
_ROUNDINGS_HALF = 8.0  # for dtypes with 8 or 11 bits, which are summed in float32


class CoarsestType(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest unit roundoff among the results in a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __enter__(self) -> CoarsestType:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tensors_in(result):
            if t.is_floating_point():
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)
        return result


def perturbed(weights: Mapping[str, Tensor], roundoff: float, seed: int) -> dict[str, Tensor]:
    """Return the weights, each changed by about one roundoff. Tied weights stay tied."""
    moved: dict[int, Tensor] = {}
    with fixed_random_state(seed), torch.no_grad():
        for t in weights.values():
            if id(t) not in moved:
                changed = t * (1 + roundoff * torch.randn_like(t)) if t.is_floating_point() else t.detach()
                moved[id(t)] = changed.requires_grad_(t.requires_grad)
    return {name: moved[id(t)] for name, t in weights.items()}


def largest(t: Tensor) -> float:
    """Return the largest absolute value of the finite entries."""
    return float(t.abs().nan_to_num(0.0, 0.0).max()) if t.numel() else 0.0


def limits(sizes: Sequence[float], roundoff: float, spreads: Sequence[float] | None = None) -> list[float]:
    """Return how far rounding may move the losses (first) and each gradient.

    `sizes` are the tensors' largest entries, `spreads` their changes when all weights change by the roundoff.
    """
    roundings = roundoff * (_ROUNDINGS if roundoff < 1e-5 else _ROUNDINGS_HALF)
    least = max(sizes[1:], default=0.0) / 8  # a gradient that cancels has rounding errors of larger ones
    scales = [sizes[0], *(max(size, least) for size in sizes[1:])]
    spreads = [0.0] * len(sizes) if spreads is None else spreads
    return [roundings * scale + _SPREADS * s + 1e-30 for scale, s in zip(scales, spreads, strict=True)]


def differing(expected: Sequence[Tensor], found: Sequence[Tensor], most: Sequence[float]) -> int | None:
    """Return the index of the first tensor beyond its limit, or None. Gradients that are not finite are skipped."""
    for number, (a, b, limit) in enumerate(zip(expected, found, most, strict=True)):
        if number and not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            continue
        if not bool(torch.isclose(a, b, rtol=0.0, atol=limit, equal_nan=True).all()):
            return number
    return None


Arrange = Callable[[Sequence[int]], Any]  # from indices to a batch of these examples, in order
LossFunction = Callable[[Any], Tensor]  # from a batch to one loss per example
Blank = Callable[[Any, int], Any]  # returns the batch with the example at one index emptied

_REPLACED, _ALONE = 3, 16
_FEW = 4  # examples for the test with gradients

_ADVICE = (
    "Compute each loss from its own example, or use Batch(max_norm=...), which bounds whole microbatches and needs far "
    "more noise."
)
_REFUSALS: Mapping[str, str] = {
    "replaced": "only another example was replaced. Usual causes: a loss divided by a quantity of the whole batch (for "
    "instance its number of valid tokens), batch statistics, mixup, selection of hard examples",
    "reversed": "only the order of the batch was changed. Usual cause: an output that depends on the batch index",
    "fewer": "other examples were removed from the batch. Usual causes: a loss divided by the number of examples "
    "(private.step already divides by a constant), a branch on any example of the batch, a loop that stops when the "
    "whole batch has converged",
}


@dataclass(frozen=True)
class Arrangement:
    """Some examples of a batch, in some order."""

    kind: str  # how it differs from the batch
    places: tuple[int, ...]  # the examples' indices in the batch
    compared: tuple[int, ...]  # the positions in `places` that are compared
    blank: int | None = None  # the position of an emptied example

    @property
    def examples(self) -> tuple[int, ...]:
        """The indices in the batch of the compared examples."""
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
    """Return at most `most` evenly spaced indices, including the first and the last."""
    if size <= most:
        return list(range(size))
    return sorted({round(i * (size - 1) / (most - 1)) for i in range(most)})


@dataclass(frozen=True)
class _Observed:
    """The compared losses, then gradients if the trial has weights; and the generators' state after the run."""

    tensors: list[Tensor]
    random_state: object


@dataclass(frozen=True)
class Trial:
    """Runs a loss on arrangements of a batch and compares."""

    model: nn.Module  # is not changed
    run: LossFunction
    arrange: Arrange
    size: int  # the number of examples
    blank: Blank | None = None  # empties an example; None if examples cannot be emptied
    # Used instead of the model's parameters. Gradients with respect to them are compared too.
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # comparisons that could not be made

    def require_uncoupled(self) -> None:
        """Raise if losses depend on other examples.

        Random layers draw other numbers for another order or size. A model with random layers is tested there in
        `.eval()`, and in its own mode where an example is replaced.
        """
        replacements = _replacements(self.size, self.blank is not None)
        as_it_is = _Mode(self)
        if self.weights and not as_it_is.is_finite:
            return  # the random weights show nothing about this model
        if as_it_is.is_repeatable:
            as_it_is.examine(replacements)
            if not as_it_is.is_random:
                as_it_is.examine(_rearrangements(self.size))
                return
        with evaluating(self.model):
            in_eval = _Mode(self)
            if in_eval.is_random or not in_eval.is_repeatable:
                self._note("The losses are random even in .eval(): other batch sizes were not compared.")
                return
            in_eval.examine(_rearrangements(self.size) + ([] if as_it_is.is_repeatable else replacements))

    def with_random_weights(self, probe_inputs: bool) -> None:
        """Test a few examples with random weights, which block no gradient; `probe_inputs` runs the probe too."""
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
        except Exception:  # weights that the model does not accept, or too little memory
            self._note("The model does not run with random weights: gradients were not compared.")

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
        """Run an arrangement, by default with the trial's weights."""
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
            # The factors of all losses differ.
            factors = [1.0 + (0.6180339887 * (example + 1)) % 1.0 for example in arrangement.examples]
            total = (losses * torch.tensor(factors).to(losses)).sum()
            with unclipped():
                found += torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return found

    def _one_each(self, losses: object, arrangement: Arrangement) -> Tensor:
        """Return the losses as a vector. Raise if there is not one per example."""
        count = len(arrangement.places)
        if isinstance(losses, Tensor) and (losses.shape == (count,) or losses.numel() == count == 1):
            return losses.reshape(-1)
        if arrangement.kind == "everyone":
            require_losses(losses, count)
        raise CoupledExamplesError(self.refusal("loss", "fewer"))

    def refusal(self, what: str, kind: str) -> str:
        """Return the error message. It holds no data."""
        drawn = " (with random weights, which training may reach)" if self.weights else ""
        return f"The {what} of an example moved{drawn} when {_REFUSALS[kind]}. {_ADVICE}"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _Mode:
    """A trial with the layers' current training modes."""

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
        return differing([self._losses], observed.tensors[:1], limits(self._sizes[:1], FLOAT32)) is None

    def examine(self, arrangements: Sequence[Arrangement]) -> None:
        """Raise if losses or gradients move."""
        for arrangement in arrangements:
            what = self._moved(arrangement)
            if what is not None:
                raise CoupledExamplesError(self._trial.refusal(what, arrangement.kind))

    def _moved(self, arrangement: Arrangement) -> str | None:
        """Return "loss" or "gradient" if it differs from the original batch by more than rounding, else None."""
        try:
            found = self._trial.observe(arrangement)
        except CoupledExamplesError:
            raise
        except Exception as error:
            # The loss may not support an empty or a single example. The error's text may hold data.
            if is_out_of_memory(error):
                raise
            self._trial._note("The loss fails on some parts of the batch: they were not compared.")
            return None
        if found.random_state != self._random_state and self.is_random:
            return None  # other examples drew other random numbers, which is no coupling
        expected = [self._losses[list(arrangement.examples)]]
        if len(self._sizes) > 1:  # gradients are too large to keep
            same = replace(self._everyone, compared=arrangement.examples)
            expected = self._trial.observe(same).tensors
        if differing(expected, found.tensors, limits(self._sizes, FLOAT32)) is None:
            return None  # the usual case
        number = differing(expected, found.tensors, self._limits)
        return None if number is None else "gradient" if number else "loss"

    @cached_property
    def _limits(self) -> list[float]:
        """How far rounding may move each tensor, from the coarsest dtype and the model's amplification of rounding."""
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
    """Draw all trainable parameters at random, so that no gate or head is zero."""
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
    if p.dim() < 2:  # biases, scales, gates: move away from the current value and from zero
        return p + (torch.rand_like(p) / 2 + 0.25) * torch.randn_like(p).sign()
    return torch.randn_like(p) / math.sqrt(max(1, p.numel() // max(1, p.shape[0])))  # 1 / sqrt(fan-in)
