"""`clipwise.check`: would this model and this loss be accepted, and if not, why?

It runs the model and the loss again with one example replaced or taken out, under the same random state,
and so also sees couplings that no gradient shows, such as a loss divided by the number of valid tokens in
the batch, or by the number of its examples.
Run it on synthetic or public rows: what it says depends on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipwise.checks import BufferGuard, require_losses, require_no_batch_statistics
from clipwise.clipping import Backprop, Batch, Strategy
from clipwise.clipping.batch import copied
from clipwise.clipping.clipped_graph import clipped_nodes, require_rows_of_examples
from clipwise.errors import ClipwiseError, ConfigurationError, CoupledExamplesError
from clipwise.given import require_module, require_takes
from clipwise.gradients import FallbackWarning, Memory, per_example_gradients
from clipwise.layers.clipped.layer import trainable_clips
from clipwise.meeting import first_meeting, first_random
from clipwise.structure import evaluating
from clipwise.validation.coupling import IndependenceProbe

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Report:
    """What `check` found: `problems` are refusals, `notes` are worth knowing and break no guarantee."""

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


def check(model: nn.Module, loss: Loss, batch: Sequence[Any], clipping: Strategy | None = None) -> Report:
    """Say whether `loss(model, *batch)` can be trained privately.

    Args:
        model: in the mode in which it will be trained.
        loss: gives one loss an example.
        batch: the loss's further arguments, each with the examples along its first axis; at least two
            examples, synthetic or public.
        clipping: the strategy to train with; one that clips single examples if left out, which for a model of
            `layers.clip_inputs` is `Backprop()`. Under one that clips whole mini-sets, such as `Batch`, examples may
            depend on one another, and the loss may be a single number.

    Returns:
        A report that is true (`report.ok`, or printed) where nothing was found. It is a lint and no proof.
    """
    require_module(model)
    size = _size(batch)
    require_takes("loss", loss, "loss(model, *batch)", model, *batch)
    report = Report()
    if clipping is None and trainable_clips(model) is not None:
        clipping = Backprop()
    is_coupled = clipping is not None and clipping.is_coupled
    structure = partial(_clipped_structure, clipping) if isinstance(clipping, Backprop) else _structure
    tests: tuple[Callable[..., None], ...] = (structure, _replacement, _removal, _random_numbers)
    if isinstance(clipping, Batch) and clipping.local_update is not None:
        tests = (_copied_structure,)
    elif is_coupled:
        tests = (_coupled_structure,)
    for test in tests:
        try:
            test(model, loss, batch, size, report)
        except CoupledExamplesError as refusal:
            report.problems.append(f"{refusal}{_where(model, loss, batch, size)}")
            break
        except ClipwiseError as refusal:
            report.problems.append(str(refusal))
            break
    return report


def _structure(model: nn.Module, loss: Loss, batch: Sequence[Any], size: int, report: Report) -> None:
    """The checks that a first training step makes."""
    losses, parameters = _examined(model, loss, batch, size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        per_example_gradients(losses, parameters, Memory())
    report.notes.extend(str(w.message) for w in caught if issubclass(w.category, FallbackWarning))


def _clipped_structure(
    clipping: Backprop, model: nn.Module, loss: Loss, batch: Sequence[Any], size: int, report: Report
) -> None:
    """The checks of a first step of backpropagation clipping."""
    layers = clipping.layers_of(model, {name: p for name, p in model.named_parameters() if p.requires_grad})
    losses, parameters = _examined(model, loss, batch, size)
    nodes, _ = clipped_nodes(losses, parameters, layers.values())
    require_rows_of_examples(losses, nodes, parameters)


def _examined(
    model: nn.Module, loss: Loss, batch: Sequence[Any], size: int
) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """Losses that pass what every step of single examples must, and what is trained."""
    require_no_batch_statistics(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    guard, probe = BufferGuard(model), IndependenceProbe()
    guard.remember()
    losses = require_losses(_run(model, loss, probe.mark(tuple(batch))), size)
    guard.compare()
    probe.examine(losses)
    return losses, parameters


def _coupled_structure(model: nn.Module, loss: Loss, batch: Sequence[Any], size: int, report: Report) -> None:
    """The checks of a first step that clips whole mini-sets."""
    require_no_batch_statistics(model, is_coupled=True)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    guard = BufferGuard(model)
    guard.remember()
    require_losses(_run(model, loss, tuple(batch)), size, is_coupled=True)
    guard.compare()


def _copied_structure(model: nn.Module, loss: Loss, batch: Sequence[Any], size: int, report: Report) -> None:
    """The checks of a local update, which works on a copy: that may learn what it likes, and the model does not."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    require_losses(_run(copied(model), loss, tuple(batch)), size, is_coupled=True)


@torch.no_grad()
def _replacement(model: nn.Module, loss: Loss, batch: Sequence[Any], size: int, report: Report) -> None:
    """Replace one example; every other example's loss must stay what it was."""
    before = _run(model, loss, batch)
    for place in _places(size):
        for source in ((place + 1) % size, None):
            after = _run(model, loss, _with_row(batch, place, size, source))
            if _moved(before, after, _others(place, size)):
                raise CoupledExamplesError(
                    "The loss of an example moved when only another example was replaced. Usual causes: a loss "
                    "divided by something of the whole batch (such as its number of valid tokens), batch "
                    "statistics, a comparison between examples. Compute each loss from its own example, or use "
                    "Batch(max_norm=...), which bounds whole mini-sets and needs far more noise."
                )


@torch.no_grad()
def _removal(model: nn.Module, loss: Loss, batch: Sequence[Any], size: int, report: Report) -> None:
    """Take one example out; every other example's loss must stay what it was. The size drawn is secret.

    Random layers draw other numbers for another size, so a model that has them is looked at in `.eval()`.
    """
    everyone = torch.arange(size)
    random = _moved(_run(model, loss, batch), _run(model, loss, batch, seed=1), everyone)
    with evaluating(model) if random else nullcontext():
        before = _run(model, loss, batch)
        if _moved(before, _run(model, loss, batch, seed=1), everyone):
            report.notes.append("The losses are random even in .eval(): no example was taken out to test.")
            return
        for place in _places(size):
            others = _others(place, size)
            after = _run(model, loss, _without_row(batch, place, size))
            if after.shape != others.shape or _moved(before[others], after, torch.arange(size - 1)):
                raise CoupledExamplesError(
                    "The loss of an example moved when another example was taken out of the batch. Usual cause: a "
                    "loss divided by the number of examples. How many are drawn is secret, and private.step divides "
                    "by a constant of its own: leave the division out."
                )


@torch.no_grad()
def _random_numbers(model: nn.Module, loss: Loss, batch: Sequence[Any], size: int, report: Report) -> None:
    """Say if examples share their random numbers: the same example everywhere, and all losses move as one."""
    alike = _rows(batch, size, lambda x: x[:1].expand_as(x).clone())
    one, other = _run(model, loss, alike), _run(model, loss, alike, seed=1)
    everyone = torch.arange(size)
    if not _moved(one, other, everyone) or _moved(one, one[:1].expand_as(one), everyone):
        return
    where = first_random(model, partial(_run, model, loss, alike), partial(_run, model, loss, alike, seed=1))
    report.notes.append(
        f"All examples of a batch share their random numbers, first in {where or 'the loss function'}: a dropout mask "
        "for the whole batch, for instance. They depend on no example, so the guarantee holds; but a mask for each "
        "example trains better."
    )


@torch.no_grad()
def _where(model: nn.Module, loss: Loss, batch: Sequence[Any], size: int) -> str:
    """A sentence about where examples meet, or nothing if no replacement shows it."""
    before = _run(model, loss, batch)
    for place in _places(size):
        replaced = _with_row(batch, place, size, None)
        if not _moved(before, _run(model, loss, replaced), _others(place, size)):
            continue
        as_it_is, changed = partial(_run, model, loss, batch), partial(_run, model, loss, replaced)
        found = first_meeting(model, as_it_is, changed, place, size)
        return f" Examples meet first in {found or 'the loss function, outside of all layers'}."
    return ""


def _places(size: int) -> list[int]:
    return sorted({0, size // 2, size - 1})


def _others(place: int, size: int) -> Tensor:
    return torch.cat([torch.arange(place), torch.arange(place + 1, size)])


def _moved(before: Tensor, after: Tensor, where: Tensor) -> bool:
    """Whether a loss changed by more than rounding."""
    tolerance = 1e-5 * before.abs().max().clamp_min(1e-30)
    return bool(((after - before).abs() > tolerance)[where].any())


def _run(model: nn.Module, loss: Loss, batch: Sequence[Any], seed: int = 0) -> Tensor:
    """The losses under a fixed random state, so that dropout draws the same mask every time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return loss(model, *batch)


def _with_row(batch: Sequence[Any], place: int, size: int, source: int | None) -> tuple[Any, ...]:
    """The batch with one example replaced by another one, or by zeros."""

    def replaced(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[place] = 0 if source is None else x[source]
        return changed

    return _rows(batch, size, replaced)


def _without_row(batch: Sequence[Any], place: int, size: int) -> tuple[Any, ...]:
    """The batch with one example taken out."""
    return _rows(batch, size, lambda x: x[_others(place, size)])


def _rows(batch: Sequence[Any], size: int, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """The batch with a change made to every tensor that holds the examples along its first axis."""

    def changed(x: Any) -> Any:
        return change(x) if isinstance(x, Tensor) and x.dim() > 0 and len(x) == size else x

    result: tuple[Any, ...] = pytree.tree_map(changed, tuple(batch))
    return result


def _size(batch: Sequence[Any]) -> int:
    if not isinstance(batch, (list, tuple)):
        raise ConfigurationError(
            f"batch must be a tuple of the loss's further arguments, such as (x, y), not {type(batch).__name__}."
        )
    tensors = [x for x in pytree.tree_leaves(tuple(batch)) if isinstance(x, Tensor) and x.dim() > 0]
    if not tensors or len(tensors[0]) < 2:
        raise ConfigurationError("batch must hold tensors with at least two examples along their first axis.")
    return len(tensors[0])
