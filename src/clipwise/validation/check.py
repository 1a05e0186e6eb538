"""`clipwise.check` reports whether a model and a loss can be trained privately, and why not.

It runs the replacement test (validation/replacement.py). The first layer that mixes examples is found from two passes,
before and after one example is replaced: the other examples' inputs are unchanged there and their outputs change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipwise.clipping import Strategy, default_for
from clipwise.clipping.batch import copied
from clipwise.errors import ClipwiseError, ConfigurationError, CoupledExamplesError
from clipwise.gradients import FallbackWarning
from clipwise.sampling.batch_structure import arguments_of, take_rows, tensors_in, with_zeros
from clipwise.validation.arguments import require_module, require_takes
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.inventory import Inventory
from clipwise.validation.random_state import fixed_random_state
from clipwise.validation.replacement import Trial
from clipwise.validation.step_guard import BufferGuard
from clipwise.validation.step_inputs import require_losses, require_no_batch_statistics
from clipwise.validation.uncompiled import uncompiled

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Report:
    """Result of `check`: `problems` prevent private training, `notes` do not affect the guarantee."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether private training would be accepted."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = ["Accepted: this model and loss can be trained privately." if self.ok else "Refused:"]
        lines += [f"  - {problem}" for problem in self.problems]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def check(model: nn.Module, loss: Loss, batch: Any, clipping: Strategy | None = None) -> Report:
    """Report whether `loss(model, *batch)` can be trained privately.

    Args:
        model: the model, in the mode in which it will be trained.
        loss: returns one loss per example. It is called as `loss(model, batch)` if `batch` is a mapping or a tensor.
        batch: a batch as a loader returns it: a tuple or list of the loss's further arguments, or a mapping or tensor.
            Give at least two examples, synthetic or public, because the report depends on them.
        clipping: the strategy to train with; by default `PerExample`, or `Backprop` for a model of
            `layers.clip_inputs`. With `Batch` examples may depend on one another, and the loss may be a single number.

    Returns:
        A report that is true (`report.ok`) if no problem was found. This is a lint, not a proof.
    """
    require_module(model)
    if clipping is None or not clipping.is_coupled:
        model = uncompiled(model)
    size = _size(batch)
    subject = _Subject(model, loss, arguments_of(batch), size)
    require_takes("loss", loss, "loss(model, *batch)", model, *subject.batch)
    report = Report()
    strategy = default_for(model) if clipping is None else clipping
    try:
        _structure(subject, strategy, report)
        if not strategy.is_coupled:
            _coupling(subject, report)
    except CoupledExamplesError as refusal:
        report.problems.append(f"{refusal}{_where(subject)}")
    except ClipwiseError as refusal:
        report.problems.append(str(refusal))
    return report


@dataclass(frozen=True)
class _Subject:
    model: nn.Module
    loss: Loss
    batch: tuple[Any, ...]
    size: int

    def run(self, batch: tuple[Any, ...], seed: int = 0, model: nn.Module | None = None) -> Tensor:
        """Return the losses under a fixed random state, so that dropout draws the same mask every time."""
        with fixed_random_state(seed):
            return self.loss(self.model if model is None else model, *batch)

    def rows(self, places: Sequence[int]) -> Any:
        """Return a batch of the examples at these indices."""
        return take_rows(self.batch, list(places), self.size)

    def without(self, batch: Any, place: int) -> Any:
        """Return the batch with one example set to zeros."""
        return with_zeros(batch, slice(place, place + 1), self.size)


def _structure(subject: _Subject, strategy: Strategy, report: Report) -> None:
    model = subject.model
    if strategy.has_local_update:  # the step works on a copy, which may keep statistics
        model = copied(model)
    else:
        require_no_batch_statistics(model, strategy.is_coupled)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    guard, probe = BufferGuard(Inventory(model)), None if strategy.is_coupled else IndependenceProbe()
    guard.remember()
    batch = subject.batch if probe is None else probe.mark(subject.batch)
    losses = require_losses(subject.run(batch, model=model), subject.size, strategy.is_coupled)
    if not strategy.has_local_update:
        guard.compare()
    if probe is not None:
        probe.examine(losses)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.require_losses(losses, model, parameters)
    report.notes.extend(str(w.message) for w in caught if issubclass(w.category, FallbackWarning))


def _coupling(subject: _Subject, report: Report) -> None:
    model, loss = subject.model, subject.loss
    trial = Trial(
        model,
        lambda arguments: loss(model, *arguments),
        subject.rows,
        subject.size,
        blank=subject.without,
        notes=report.notes,
    )
    trial.require_uncoupled()
    trial.with_random_weights(probe_inputs=True)


@torch.no_grad()
def _where(subject: _Subject) -> str:
    """A sentence that names the first layer that mixes examples, or "" if no replacement shows it."""
    batch, size = subject.batch, subject.size
    before = subject.run(batch)
    for place in sorted({0, size // 2, size - 1}):
        replaced = subject.without(batch, place)
        others = torch.arange(size) != place
        if bool(_differs(before, subject.run(replaced))[others].any()):
            as_it_is, changed = partial(subject.run, batch), partial(subject.run, replaced)
            found = first_mixing(subject.model, as_it_is, changed, place, size)
            return f" Examples are first mixed in {found or 'the loss function, outside of all layers'}."
    return ""


def _differs(before: Tensor, after: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding, relative to the largest entry."""
    if not before.is_floating_point() or not before.numel():
        return before != after
    tolerance = 1e-5 * float(before.nan_to_num().abs().max().clamp_min(1e-30))
    return ~torch.isclose(before, after, rtol=0.0, atol=tolerance, equal_nan=True)


def _size(batch: object) -> int:
    if not isinstance(batch, (list, tuple, Mapping, Tensor)):
        raise ConfigurationError(
            "batch must be a tuple of the loss's further arguments, such as (x, y), or a mapping, not "
            f"{type(batch).__name__}."
        )
    tensors = [x for x in tensors_in(batch) if x.dim() > 0]
    if not tensors or len(tensors[0]) < 2:
        raise ConfigurationError("batch must hold tensors with at least two examples along their first axis.")
    return len(tensors[0])


Pass = Callable[[], object]  # runs model and loss on a batch


class LayerCall(NamedTuple):
    """One call of a layer."""

    layer: str  # for messages
    inputs: list[Tensor]
    outputs: list[Tensor]


def first_mixing(model: nn.Module, before: Pass, after: Pass, place: int, size: int) -> str | None:
    """Return the first layer that mixes examples, or None if they are mixed outside of all layers.

    `after` is the pass `before` with the example at index `place`, of `size` examples, replaced.
    """

    def are_mixed(one: list[Tensor], other: list[Tensor]) -> bool:
        return any(_is_mixed(a, b, place, size) for a, b in zip(one, other, strict=False))

    for one, other in zip(calls_in(model, before), calls_in(model, after), strict=False):
        if one.layer != other.layer:
            return None  # the layers that run depend on the batch: nothing can be compared
        if not are_mixed(one.inputs, other.inputs) and are_mixed(one.outputs, other.outputs):
            return one.layer
    return None


def calls_in(model: nn.Module, run: Pass) -> list[LayerCall]:
    """Return every layer call of a pass, in the order in which calls end."""
    calls: list[LayerCall] = []

    def ended(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        layer = f"layer {name!r}" if name else "the model's own forward"
        copies = ([t.detach().clone() for t in tensors_in(x)] for x in ([*args, kwargs], output))
        calls.append(LayerCall(f"{layer} ({type(module).__name__})", *copies))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(ended, name), with_kwargs=True))
        run()
    return calls


def _is_mixed(before: Tensor, after: Tensor, place: int, size: int) -> bool:
    """Whether rows of other examples moved, in every layout of examples that the shape allows."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    moved = _differs(before, after)
    others = torch.tensor([i for i in range(size) if i != place], device=moved.device)
    return bool(moved.any()) and all(
        bool(view.index_select(axis, others).any()) for view, axis in _layouts(moved, size)
    )


def _layouts(t: Tensor, size: int) -> Iterator[tuple[Tensor, int]]:
    """Yield every possible layout of the examples: along an axis, or folded into the first one."""
    for axis in range(t.dim()):
        if t.shape[axis] == size:
            yield t, axis
    if t.dim() and t.shape[0] > size and t.shape[0] % size == 0:
        folded = t.shape[0] // size
        yield t.reshape(size, folded, *t.shape[1:]), 0
        yield t.reshape(folded, size, *t.shape[1:]), 1
