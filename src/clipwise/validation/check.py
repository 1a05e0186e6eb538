"""`clipwise.check` reports whether a model and a loss can be trained privately, and why not.

It runs the replacement test (validation/replacement.py). The test also finds coupling that no gradient shows, such as
a loss divided by the number of examples or valid tokens of the batch. The report depends on the rows: use synthetic
or public ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping import Strategy, default_for
from clipwise.clipping.local_update import copied
from clipwise.errors import ClipwiseError, ConfigurationError, CoupledExamplesError
from clipwise.gradients import FallbackWarning
from clipwise.sampling.batch_structure import arguments_of, take_rows, tensors_in, with_zeros
from clipwise.validation.arguments import require_module, require_takes
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.forward_changes import BufferGuard
from clipwise.validation.mixing_layer import first_mixing, first_random
from clipwise.validation.random_state import fixed_random_state
from clipwise.validation.replacement import Trial
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
            The first axis of each tensor counts examples. Give at least two, synthetic or public.
        clipping: the strategy to train with. The default clips single examples; for a model of `layers.clip_inputs`
            it is `Backprop()`. With a strategy that clips whole microbatches, such as `Batch`, examples may depend on
            one another, and the loss may be a single number.

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
            _random_numbers(subject, report)
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
    """Run the checks of a first training step."""
    model = subject.model
    if strategy.has_local_update:  # the step works on a copy, which may keep statistics
        model = copied(model)
    else:
        require_no_batch_statistics(model, strategy.is_coupled)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    guard, probe = BufferGuard(model), None if strategy.is_coupled else IndependenceProbe()
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
    """Run the replacement test, with the model's weights and with random ones."""
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
def _random_numbers(subject: _Subject, report: Report) -> None:
    """Add a note if all examples share their random numbers: copies of one example then have equal losses."""
    alike = subject.rows([0] * subject.size)
    one, other = subject.run(alike), subject.run(alike, seed=1)
    if not _moved(one, other) or _moved(one, one[:1].expand_as(one)):
        return
    where = first_random(subject.model, partial(subject.run, alike), partial(subject.run, alike, seed=1))
    report.notes.append(
        f"All examples of a batch share their random numbers, first in {where or 'the loss function'}, for instance "
        "one dropout mask for the whole batch. These numbers depend on no example, so the guarantee holds. One mask "
        "per example trains better."
    )


@torch.no_grad()
def _where(subject: _Subject) -> str:
    """Return a sentence that names the first layer that mixes examples, or "" if no replacement shows it."""
    batch, size = subject.batch, subject.size
    before = subject.run(batch)
    for place in sorted({0, size // 2, size - 1}):
        replaced = subject.without(batch, place)
        others = torch.arange(size) != place
        if _moved(before[others], subject.run(replaced)[others], before):
            as_it_is, changed = partial(subject.run, batch), partial(subject.run, replaced)
            found = first_mixing(subject.model, as_it_is, changed, place, size)
            return f" Examples are first mixed in {found or 'the loss function, outside of all layers'}."
    return ""


def _moved(before: Tensor, after: Tensor, scale: Tensor | None = None) -> bool:
    """Whether a loss changed by more than rounding, relative to the largest loss."""
    tolerance = 1e-5 * (before if scale is None else scale).abs().max().clamp_min(1e-30)
    return bool(((after - before).abs() > tolerance).any())


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
