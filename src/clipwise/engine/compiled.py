"""CompiledStep: chooses between a private step captured as CUDA graphs (captured.py) and an eager step.

The first steps are eager, with all checks of the model and the losses. So is one step in every few hundred, and every
step that cannot be captured. Both kinds use the pipeline of step.py.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipwise.engine import step
from clipwise.engine.captured import Captured, bounds_of, count_of, kinds_of, pieces_of
from clipwise.engine.context import StepContext
from clipwise.engine.memory_shortage import is_out_of_memory, with_smaller_pieces
from clipwise.errors import ConfigurationError
from clipwise.sampling.batch_structure import arguments_of, map_tensors, tensors_in
from clipwise.validation import step_inputs
from clipwise.validation.arguments import whole
from clipwise.validation.marked import plain

if TYPE_CHECKING:
    from clipwise.sampling.loader import Piece
    from clipwise.validation.replacement import Arrange

Loss = Callable[..., Tensor]

_EAGER_STEPS = 4  # before the first capture
_SMALLEST = 2  # the fewest examples that can show a dependence between examples
_LOOK_AGAIN_AFTER = 256  # replayed steps, then an eager one
_ATTEMPTS = 3
_LASTING = 32  # releases for which bounds must stay constant to make a capture worthwhile
_SPREADS = 3.0  # standard deviations above the mean, which one Poisson draw in 700 exceeds


class CaptureWarning(UserWarning):
    """A step cannot be captured, so it runs as an eager step, at the speed of one."""


class CompiledStep:
    """`step(*batch)`: a faster `private.step(loss(*batch))`. Made by `private.compiled`."""

    def __init__(self, context: StepContext, loss: Loss, size: int | None = None) -> None:
        if not callable(loss):
            raise ConfigurationError(
                "loss must be a function from a batch to one loss per example, such as "
                "lambda x, y: F.cross_entropy(model(x), y, reduction='none')."
            )
        if context.clipper.needs_outputs:
            raise ConfigurationError(
                "private.compiled cannot pass the model's outputs, which this strategy needs: call "
                "private.step(losses, outputs=outputs)."
            )
        self._context, self._loss = context, loss
        self._size = _piece_size(context) if size is None else whole("size", size, least=_SMALLEST)
        self._device = next(iter(context.parameters.values())).device
        # Tested elsewhere, or needs no test.
        is_tested = loss is context.plan.loss or context.strategy.is_coupled or context.layout.splits_gradients
        self._test = None if is_tested else context.plan_test(loss)
        self._eager = 0
        self._replayed = 0
        self._attempts = 0
        self._largest = 0  # piece so far
        self._is_replaying = False
        self._captured: Captured | None = None
        self._stays_eager = not (_is_constant(context) and _can_capture(self._device))

    def __call__(self, *batch: Any) -> bool:
        """One step on the last batch of `private.loader`. Returns whether the optimizer stepped."""
        context = self._context
        context.require_open()
        piece = context.loader.awaited()
        step_inputs.require_rows(batch, piece.size * context.views)
        if self._test is not None and self._test.is_pending:
            arrangements = partial(self._arrangements, batch, piece)
            self._test.examine(map_tensors(plain, batch), piece.size, context.which(piece), arrangements)
        batch = map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)
        if piece.index_in_batch == 0:
            self._is_replaying = self._may_replay(batch)
        if self._captured is None or not self._is_replaying:
            self._eager += piece.size >= _SMALLEST
            self._largest = max(self._largest, piece.size)
            return self._eager_step(batch, piece)
        self._replayed += 1
        return self._captured.step(map_tensors(plain, batch), piece)

    def _arrangements(self, batch: tuple[Any, ...], piece: Piece) -> Sequence[Arrange]:
        """Functions that collate the records again, if the loss gets the batch unchanged."""
        handed = self._context.handed
        is_same = handed is not None and _is_equal(batch, arguments_of(handed))
        return self._context.loader.fetcher.arrangements(piece.indices) if is_same else ()

    def _eager_step(self, batch: Sequence[Any], piece: Piece) -> bool:
        """An eager step; in smaller pieces if it runs out of memory."""
        context = self._context
        is_released = None
        try:
            # Many models cannot run on zero rows, and an empty piece needs no losses.
            is_released = step.backward(context, self._loss(*batch) if piece.size else None, None)
        except (RuntimeError, MemoryError) as error:
            # A consumed piece may have been charged. Microbatches and random choices need the whole piece.
            whole_piece = context.strategy.is_coupled or context.clipper.draws
            if not is_out_of_memory(error) or piece.consumed or piece.size < 2 or whole_piece:
                raise
        if is_released is None:
            # Outside `except`, so that the tensors in the frames of the error are freed.
            step.begin(context, piece)
            gathered = partial(self._gathered, map_tensors(plain, batch), piece.size)
            is_released = step.gather(context, piece, with_smaller_pieces(gathered, piece.size))
        return step.update(context, is_released)

    def _gathered(self, batch: Sequence[Any], count: int, size: int) -> dict[str, Tensor]:
        """The bounded sum of a batch, `size` examples at a time."""
        context, total = self._context, dict[str, Tensor]()
        for rows, here in pieces_of(batch, count * context.views, size * context.views):
            for name, found in step.clipped_rows(context, self._loss, rows, here).items():
                total[name] = total[name] + found if name in total else found
        context.guard.before_step()  # checks the passes above
        return total

    def _may_replay(self, batch: Sequence[Any]) -> bool:
        """At the beginning of a batch: whether to replay the graphs. Captures them if the first steps are done."""
        if self._captured is None:
            if self._eager >= _EAGER_STEPS and not self._stays_eager and self._is_examined():
                self._capture(map_tensors(plain, batch))
            return True
        if self._captured.bounds != bounds_of(self._context):
            self._captured, self._eager, self._attempts = None, 0, 0  # clips or noise have changed
            return True
        if self._replayed < _LOOK_AGAIN_AFTER:
            return True
        self._replayed = 0
        self._context.clipper.look_again()
        return False

    def _is_examined(self) -> bool:
        """Whether the independence probe is done: it cannot examine replayed steps."""
        probe = self._context.independence
        return probe is None or probe.is_settled

    def _capture(self, batch: Sequence[Any]) -> None:
        """Capture the step, or warn with the reason why it cannot be captured."""
        least = self._largest if self._context.strategy.is_coupled else 1
        if count_of(batch) < least:
            return  # empty, or a microbatch smaller than an earlier one: try again with the next batch
        self._attempts += 1
        try:
            self._captured = Captured(self._context, self._loss, self._size, batch)
        except (RuntimeError, NotImplementedError) as error:
            if self._attempts < _ATTEMPTS:
                return
            self._stays_eager = True
            # Torch's messages may hold sizes of the batch, which are secret.
            reason = re.sub(r"\d+", "#", str(error).strip().partition("\n")[0])
            warnings.warn(
                f"This step cannot be captured in a CUDA graph, so it runs eagerly: {reason}",
                CaptureWarning,
                stacklevel=3,
            )


def _is_constant(context: StepContext) -> bool:
    """Whether a captured step stays correct: its host code runs only once, at capture."""
    clipper, plan = context.clipper, context.plan
    return (
        # Bounds and random numbers of the host are constants in a captured step.
        clipper.is_capturable
        and clipper.lasts >= _LASTING
        and not clipper.draws
        # The host draws secure noise.
        and not any(part.grid for part in context.parts)
        # Public statistics depend on the weights, and padding supports one row per example.
        and plan.public_statistics is None
        and context.views == 1
        and not any(p.is_complex() for p in context.parameters.values())
        and plan.penalty is None
        and plan.ranks.count == 1
        and not plan.layout.is_sharded
        and context.observer is None
    )


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _piece_size(context: StepContext) -> int:
    """The number of examples of a captured step: a batch of constant size, or nearly every batch of random size."""
    given, scheme = context.loader.max_physical_batch_size, context.scheme
    L = scheme.expected_size
    spread = _SPREADS * math.sqrt(L * (1 - scheme.sample_rate)) if scheme.has_random_size else 0.0
    wanted = max(_SMALLEST, math.ceil(L + spread))
    return wanted if given is None else min(wanted, max(_SMALLEST, given))


def _is_equal(batch: Any, other: Any) -> bool:
    """Whether two batches are equal, possibly on different devices."""
    pairs = zip(tensors_in(batch), tensors_in(other), strict=False)
    return kinds_of(batch) == kinds_of(other) and all(
        torch.equal(a.detach(), b.detach().to(a.device)) for a, b in pairs
    )
