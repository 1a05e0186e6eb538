"""CompiledStep: chooses between a private step as a compiled graph and an eager step.

    traced by Inductor   forward to weighted sums in one graph (traced_sum.py), on CUDA inside of a CUDA graph
    captured             the same operations as in an eager step, replayed from CUDA graphs (captured.py)
    eager                everything else

The first steps are eager, with all checks of the model and the losses. So is one step in every few hundred. A form that
is not possible falls back to the next one, with a warning that names the reason. All use the pipeline of step.py.
"""

from __future__ import annotations

import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipwise.engine import step
from clipwise.engine.captured import Captured, bounds_of
from clipwise.engine.context import StepContext
from clipwise.engine.memory_shortage import is_out_of_memory, with_smaller_pieces
from clipwise.engine.pieces import clipped_rows, count_of, kinds_of, pieces_of
from clipwise.errors import ClipwiseError, ConfigurationError
from clipwise.sampling.batch_structure import arguments_of, map_tensors, tensors_in
from clipwise.validation.arguments import one_of, whole
from clipwise.validation.marked import plain
from clipwise.validation.step_inputs import require_rows
from clipwise.validation.uncompiled import uncompiled_loss

if TYPE_CHECKING:
    from clipwise.engine.traced_sum import TracedStep, TracedSum
    from clipwise.sampling.loader import Piece
    from clipwise.validation.replacement import Arrange

Loss = Callable[..., Tensor]

_EAGER_STEPS = 4  # before the first capture
_SMALLEST = 2  # the fewest examples that can show a dependence between examples
_LOOK_AGAIN_AFTER = 256  # replayed steps, then an eager one
_ATTEMPTS = 3
_LASTING = 32  # releases for which bounds must stay constant to make a capture worthwhile
_SPREADS = 3.0  # standard deviations above the mean, which one Poisson draw in 700 exceeds
_WORTHWHILE = 60.0  # seconds in eager steps on a CPU, about the time to compile, after which compiling pays

BACKENDS = ("auto", "inductor", "aot_eager", "cudagraphs", "eager")
_TRACED = ("inductor", "aot_eager")

_log = logging.getLogger("clipwise")


class CaptureWarning(UserWarning):
    """A step cannot be compiled in the best form, so it runs in another one, which is slower."""


class CompiledStep:
    """`step(*batch)`: a faster `private.step(loss(*batch))`. Made by `private.compiled`."""

    def __init__(self, context: StepContext, loss: Loss, size: int | None = None, backend: str = "auto") -> None:
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
        self._context = context
        self._loss = loss if context.strategy.is_coupled else uncompiled_loss(loss)
        self._size = _piece_size(context) if size is None else whole("size", size, least=_SMALLEST)
        self._backend = one_of("backend", backend, BACKENDS)
        self._device = next(iter(context.parameters.values())).device
        # Tested elsewhere, or needs no test.
        is_tested = loss is context.plan.loss or context.strategy.is_coupled or context.layout.splits_gradients
        self._test = None if is_tested else context.plan_test(loss)
        self._eager = 0
        self._eager_seconds = 0.0
        self._replayed = 0
        self._attempts = 0
        self._largest = 0  # piece so far
        self._is_replaying = False
        self._traced: TracedSum | None = None
        self._captured: Captured | TracedStep | None = None
        is_constant = _is_constant(context) and backend != "eager"
        # The release graph reduces nothing over ranks.
        self._captures = is_constant and _can_capture(self._device) and context.ranks.count == 1
        is_wanted = backend in _TRACED or (backend == "auto" and _can_compile(self._device))
        self._traces = is_constant and context.clipper.is_traceable and is_wanted

    @property
    def _stays_eager(self) -> bool:
        return not (self._captures or self._traces)

    @property
    def form(self) -> str:
        """How steps are taken now: "captured", "traced" or "eager"."""
        if self._captured is None:
            return "eager"
        return "captured" if isinstance(self._captured, Captured) else "traced"

    def __call__(self, *batch: Any) -> bool:
        """One step on the last batch of `private.loader`. Returns whether the optimizer stepped."""
        context = self._context
        step.require_open(context)
        piece = context.loader.awaited()
        require_rows(batch, piece.size * context.views)
        if self._test is not None and self._test.is_pending:
            arrangements = partial(self._arrangements, batch, piece)
            self._test.examine(map_tensors(plain, batch), piece.size, context.which(piece), arrangements)
        batch = map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)
        if piece.index_in_batch == 0:
            self._is_replaying = self._may_replay(batch)
        with nullcontext() if self._traced is None else self._traced.drawing(piece):
            if self._captured is not None and self._is_replaying:
                self._replayed += 1
                return self._captured.step(map_tensors(plain, batch), piece)
            self._eager += piece.size >= _SMALLEST
            self._largest = max(self._largest, piece.size)
            if self._traced is not None and not self._traced.is_trusted:
                self._compare(map_tensors(plain, batch), piece.size)
            begin = time.perf_counter()
            try:
                return self._eager_step(batch, piece)
            finally:
                self._eager_seconds += time.perf_counter() - begin

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
        for rows, here in pieces_of(batch, count, size, context.views):
            for name, found in clipped_rows(context, self._loss, rows, here).items():
                total[name] = total[name] + found if name in total else found
        context.guard.before_step()  # checks the passes above
        return total

    def _may_replay(self, batch: Sequence[Any]) -> bool:
        """At the beginning of a batch: whether to replay. Traces and captures if the first steps are done."""
        if self._is_outdated():
            self._traced = self._captured = None
            self._eager = self._attempts = 0
            return False
        if self._captured is None:
            if self._eager >= _EAGER_STEPS and not self._stays_eager and self._is_examined():
                self._prepare(map_tensors(plain, batch))
            return True
        if self._replayed < _LOOK_AGAIN_AFTER:
            return True
        self._replayed = 0
        self._context.clipper.look_again()
        return False

    def _is_outdated(self) -> bool:
        """Whether clips or noise have changed, or what a graph that is not inside of a CUDA graph assumes constant."""
        held = self._traced if self._captured is None else self._captured
        if held is None:
            return False
        is_changed = self._traced is not None and self.form != "captured" and not self._traced.is_current
        return is_changed or held.bounds != bounds_of(self._context)

    def _is_examined(self) -> bool:
        """Whether the independence probe is done: it cannot examine replayed steps."""
        probe = self._context.independence
        return probe is None or probe.is_settled

    def _prepare(self, batch: Sequence[Any]) -> None:
        """Trace, or capture, with the shapes of this batch."""
        least = self._largest if self._context.strategy.is_coupled else 1
        if count_of(batch) < least:
            return  # empty, or a microbatch smaller than an earlier one: try again with the next batch
        if self._traces and self._traced is None and self._is_worthwhile():
            self._trace(batch)
            if self._traces and self._traced is None:
                return  # it is tried again with the next batch
        if self._traced is not None and not self._traced.is_trusted:
            return  # the next eager steps are compared with it
        if self._captures:
            self._capture(batch)
        elif self._traced is not None:
            from clipwise.engine.traced_sum import TracedStep

            self._captured = TracedStep(self._context, self._traced)

    def _is_worthwhile(self) -> bool:
        """On a CPU, where compiling takes as long as many steps: whether the eager steps have taken as long."""
        return self._backend != "auto" or self._device.type != "cpu" or self._eager_seconds > _WORTHWHILE

    def _trace(self, batch: Sequence[Any]) -> None:
        """Trace and compile the bounded sum of a piece, or warn with the reason why that is not possible."""
        from clipwise.engine.traced_sum import TracedSum  # imports torch's compilers, which takes seconds
        from clipwise.engine.tracing import TraceError

        size = count_of(batch) if self._context.strategy.is_coupled else self._size
        self._attempts += 1
        try:
            self._traced = TracedSum(self._context, self._loss, size, batch, self._backend == "aot_eager")
            self._attempts = 0
        except TraceError as error:
            if self._attempts >= _ATTEMPTS:
                self._give_up_tracing(str(error))
        except ClipwiseError:  # of the eager passes before the trace
            raise
        except Exception as error:  # any error of a compiler: eager steps of the same code have succeeded
            self._give_up_tracing(str(error))

    def _compare(self, batch: Sequence[Any], count: int) -> None:
        """Compare the traced sum with the eager one, on a batch that is drawn and not used yet."""
        traced = self._traced
        assert traced is not None
        problem = traced.compare(batch, count)
        self._context.guard.before_step()  # checks the passes above
        if problem is not None:
            self._give_up_tracing(problem)
        elif self._device.type == "cpu" and self._backend == "auto" and traced.slower > 1:
            self._traced, self._traces = None, False
            _log.info("The compiled step is not faster than the eager one, which is used.")

    def _give_up_tracing(self, reason: str) -> None:
        self._traced, self._traces, self._attempts = None, False, 0
        then = "is captured without" if self._captures else "runs eagerly"
        self._warn(f"This step cannot be compiled by Inductor, so it {then}: ", reason)

    def _capture(self, batch: Sequence[Any]) -> None:
        """Capture the step, or warn with the reason why it cannot be captured."""
        self._attempts += 1
        try:
            self._captured = Captured(self._context, self._loss, self._size, batch, self._traced)
        except (RuntimeError, NotImplementedError) as error:
            if self._attempts < _ATTEMPTS:
                return
            self._captures = False
            if self._traced is None:
                self._warn("This step cannot be captured in a CUDA graph, so it runs eagerly: ", str(error))
            else:
                self._warn("This step cannot be captured in a CUDA graph, so it is compiled without one: ", str(error))

    def _warn(self, what: str, error: str) -> None:
        """Torch's messages may hold sizes of the batch, which are secret."""
        reason = re.sub(r"\d+", "#", error.strip().partition("\n")[0])
        warnings.warn(what + reason, CaptureWarning, stacklevel=6)


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
        # Public statistics depend on the weights, and a padded microbatch would not be the same.
        and plan.public_statistics is None
        and (context.views == 1 or not context.strategy.is_coupled)
        and not any(p.is_complex() for p in context.parameters.values())
        and plan.penalty is None
        # FSDP2 frees the parameters between steps.
        and not plan.layout.is_sharded
        and context.observer is None
    )


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _can_compile(device: torch.device) -> bool:
    """Whether "auto" compiles. On CUDA it captures: there Inductor's form is not measured yet and must be requested."""
    from clipwise.engine import inductor

    return device.type != "cuda" and inductor.is_available(device.type)


def _piece_size(context: StepContext) -> int:
    """The number of examples of a compiled step: a batch of constant size, or nearly every batch of random size.

    With several ranks it is the part of a batch on one of them, which has a random size in every scheme.
    """
    given, scheme, (_, shares) = context.loader.max_physical_batch_size, context.scheme, context.layout.share
    L = scheme.expected_size / shares
    is_random = scheme.has_random_size or shares > 1
    spread = _SPREADS * math.sqrt(L * (1 - scheme.sample_rate / shares)) if is_random else 0.0
    wanted = max(_SMALLEST, math.ceil(L + spread))
    return wanted if given is None else min(wanted, max(_SMALLEST, given))


def _is_equal(batch: Any, other: Any) -> bool:
    """Whether two batches are equal, possibly on different devices."""
    pairs = zip(tensors_in(batch), tensors_in(other), strict=False)
    return kinds_of(batch) == kinds_of(other) and all(
        torch.equal(a.detach(), b.detach().to(a.device)) for a, b in pairs
    )
