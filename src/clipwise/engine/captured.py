"""A private step captured once and replayed: three CUDA graphs, with one device synchronization per step.

    gather   forward, backward, clip: the bounded sum of a piece, added to that of earlier pieces
    release  noise, division by the expected batch size, `.grad`
    update   the optimizer

A captured graph has constant shapes. So a batch is cut into pieces of one size, and the last piece is padded with
repeated rows of weight 0. No row is dropped. Rows of another shape or dtype than the captured ones (longer texts) are
gathered eagerly.

An eager step synchronizes to find rare cases (an example is not finite, or its gradient cancels). A captured step
collects them in a flag on the device (gradients/precision.py), which the host reads once, after the last piece and
before anything is charged or released. If the flag is set, the batch is gathered again eagerly. The key of a step is
copied to the device just before its release. The host prepares the release while the device gathers.

Legend: B examples of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipwise.engine import cuda_graphs, step
from clipwise.engine.context import StepContext
from clipwise.engine.pieces import FixedRows, clipped_rows, count_of, padded_rows, pieces_of
from clipwise.errors import StepError
from clipwise.kernels.noise import normals
from clipwise.noise.gaussian import key_words
from clipwise.noise.mechanism import Draw, in_order_of, laid_as, noise_labels, noised_per_part

if TYPE_CHECKING:
    from clipwise.engine.traced_sum import TracedSum
    from clipwise.sampling.loader import Piece

_SUM_TYPES = (torch.float32, torch.float64)


class Captured:
    """The three graphs and their shared memory.

    Attributes:
        bounds: the noise and the clips at capture.
    """

    def __init__(
        self,
        context: StepContext,
        loss: Callable[..., Tensor],
        size: int,
        batch: Sequence[Any],
        traced: TracedSum | None = None,
    ) -> None:
        """`traced`: computes the sum of a piece in the first graph. Without it, eager operations do."""
        self._context, self._loss, self._size, self._traced = context, loss, size, traced
        self.bounds = bounds_of(context)
        self._is_coupled = context.strategy.is_coupled
        if traced is not None:
            self._size = traced.rows.size
        elif self._is_coupled:
            self._size = count_of(batch)  # microbatches are neither cut nor padded, and have one view
        parameters = list(context.parameters.values())
        self._device = parameters[0].device
        if any(p.device != self._device for p in parameters):
            raise RuntimeError("the parameters are on several devices")
        self._state = state_of(context.model)
        self._rows = FixedRows(batch, self._size, context.views, self._device) if traced is None else traced.rows
        # The sums of the batch so far, in the memory of the first graph.
        self._sums: list[Tensor] = []
        self._holds_any = False
        self._rare = torch.zeros((), dtype=torch.bool, device=self._device)
        # Constants of the noise, written once so that the graph need not write them at every step.
        stds = [part.noise_std for part in context.parts]
        self._stds = torch.tensor(stds, dtype=torch.float64, device=self._device)
        L = context.clipper.divisor
        self._divisors = {t: torch.full((1,), L, dtype=t, device=self._device) for t in _SUM_TYPES}
        # The (step, piece) that the current sums can continue with; for piece 0 they are zeros.
        self._awaited: tuple[int, int] | None = None
        self._gather = cuda_graphs.capture(self._gather_piece, self._device)
        self._clear()
        self._prepare_keys()
        self._release_graph = cuda_graphs.capture(self._write_gradients, self._device)
        self._update = cuda_graphs.Update(context.optimizer, self._device, {hook.id for hook in context.step_hooks})

    def _prepare_keys(self) -> None:
        """Allocate memory for the keys of a step: one row per draw, with the labels of eager steps."""
        by_name, labels = self._sums_by_name(), list[str]()
        self._first_keys = []  # the first row of each part
        for number, part in enumerate(self._context.parts):
            self._first_keys.append(len(labels))
            labels += noise_labels(number, [by_name[name] for name in part.parameters])
        shape, pinned = (len(labels), 4), self._device.type == "cuda"
        self._labels = labels
        self._host_keys = [torch.zeros(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._keys = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def step(self, batch: Sequence[Any], piece: Piece) -> bool:
        """Gather a piece; after the last piece of a batch, release and update."""
        context = self._context
        context.in_step = True
        before = self._begin(piece)
        # A microbatch is not cut.
        size = max(piece.size, self._size) if self._is_coupled else self._size
        pieces = list(pieces_of(batch, piece.size, size, context.views))
        for rows, count in pieces:
            self._add(rows, count)
        # The host prepares the release while the device gathers.
        if bounds_of(context) != self.bounds:
            context.loader.reset()
            raise StepError(
                "Clipping constants were changed between two pieces of a batch: change them between batches, "
                "after a step that returned True."
            )
        if state_of(context.model) != self._state:
            raise StepError(
                "The model was changed after its step was captured (train() or eval(), requires_grad, a parameter "
                "or a buffer was moved): call private.compiled again."
            )
        step.begin(context, piece)  # the checks of an eager step; none of them synchronizes
        if piece.last:
            self._derive_keys()
            self._update.prepare()
        if bool(self._rare):
            self._gather_again(pieces, before)
        piece.consumed = True
        if not piece.last:
            self._awaited = context.made(), piece.index_in_batch + 1
            context.in_step = False
            return False
        with step.releasing(context):
            step.release(context, self._copy_keys, self._replay_release)
            step.update(context, step=self._update.run)
        return True

    # ----------------------------------------------------------------- gather

    def _begin(self, piece: Piece) -> list[Tensor] | None:
        """The sum over the earlier pieces of the batch; None if there is none.

        Raises if an earlier piece failed or was not gathered here: its examples could be counted twice.
        """
        context, awaited = self._context, self._awaited
        context.partial = None  # an eager step must not continue its own sum
        self._awaited = None
        continues = awaited == context.which(piece)
        if piece.index_in_batch == 0:
            if not continues:
                self._clear()
            return None
        if not continues:
            raise StepError(
                "All pieces of a batch must go through the same step function, each of them once. Begin the batch "
                "again with a new iterator of private.loader."
            )
        # If all earlier pieces were empty, the sums are still those of another batch.
        return [t.clone() for t in self._sums] if self._holds_any else None

    def _gather_piece(self) -> None:
        """Forward, backward, clip: the first graph."""
        happened: Tensor | None
        if self._traced is not None:
            clipped, happened = self._traced.run()
        else:
            clipped, happened = padded_rows(self._context, self._loss, self._rows.batch, self._rows.real_B)
        self._sums = self._in_order(clipped)
        if happened is not None:
            self._rare.logical_or_(happened)

    def _add(self, rows: Sequence[Any], count: int) -> None:
        """Gather some rows of a batch: by the graph if shapes, dtypes and microbatch size match, else eagerly."""
        earlier = [t.clone() for t in self._sums] if self._holds_any else None
        if self._rows.matches(rows) and (not self._is_coupled or count == self._size):
            self._rows.fill(rows, count)
            self._gather.replay()
        else:
            torch._foreach_copy_(self._sums, self._eager_sum(rows, count))
        if earlier is not None:
            torch._foreach_add_(self._sums, earlier)
        self._holds_any = True

    def _gather_again(self, pieces: Iterable[tuple[Sequence[Any], int]], before: list[Tensor] | None) -> None:
        """After a rare case: remove this piece from the sums and gather it eagerly."""
        self._clear()
        if before is not None:
            torch._foreach_add_(self._sums, before)
        for rows, count in pieces:
            torch._foreach_add_(self._sums, self._eager_sum(rows, count))
        self._holds_any = True

    def _eager_sum(self, rows: Sequence[Any], count: int) -> list[Tensor]:
        """The bounded sum of the rows of `count` examples, computed as in an eager step."""
        found = self._in_order(clipped_rows(self._context, self._loss, rows, count))
        self._context.guard.before_step()  # checks the pass above
        return found

    def _in_order(self, clipped: Mapping[str, Tensor]) -> list[Tensor]:
        found = []
        for name, p in self._context.parameters.items():
            dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
            # Sums of several microbatches are formed in float64 for every parameter dtype.
            found.append(in_order_of(p, clipped[name] if self._is_coupled else clipped[name].to(dtype)))
        return found

    def _clear(self) -> None:
        torch._foreach_zero_(self._sums)
        self._rare.zero_()
        self._holds_any = False

    def _sums_by_name(self) -> dict[str, Tensor]:
        return dict(zip(self._context.parameters, self._sums, strict=True))

    # ---------------------------------------------------------------- release

    def _derive_keys(self) -> None:
        """Derive the keys of this step into the one of two buffers that the last copy did not read."""
        self._host_keys.reverse()
        for number, label in enumerate(self._labels):
            self._host_keys[0][number] = key_words(self._context.keys.key.derive(label))

    def _copy_keys(self) -> dict[str, Tensor]:
        """Copy the keys to the device, for the release graph. Called after the release was charged."""
        if not self._holds_any:  # an empty batch
            torch._foreach_zero_(self._sums)
        self._host_keys[1].zero_()  # the last copy from it has finished
        self._keys.copy_(self._host_keys[0], non_blocking=True)
        return self._means

    def _replay_release(self, means: Mapping[str, Tensor]) -> None:
        """Replay the release graph. `.grad` is the graph's own memory."""
        self._release_graph.replay()
        self._awaited, self._holds_any = (self._context.made(), 0), False
        for p, grad in zip(self._context.parameters.values(), self._gradients, strict=True):
            if p.grad is not grad:
                p.grad = grad

    def _write_gradients(self) -> None:
        """Noise and division: the second graph."""
        context = self._context
        self._means = self._sums_by_name()
        noised_per_part(self._means, context.parts, context.clipper.divisor, self._draw_of)
        self._keys.zero_()  # never used again
        self._gradients = [laid_as(p, self._means[name]) for name, p in context.parameters.items()]
        for p, grad in zip(context.parameters.values(), self._gradients, strict=True):
            p.grad = grad
        context.weights.released.remember()

    def _draw_of(self, part: int, place: int, std: float, device: torch.device) -> Draw:
        """The draws of a part, with keys and constants in device memory."""
        first, std_1 = self._first_keys[part], self._stds[part : part + 1]

        def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
            return normals(self._keys[first + bucket], size, std_1, dtype, None, onto, self._divisors[dtype])

        return draw


def bounds_of(context: StepContext) -> tuple[object, ...]:
    """The noise and the clips: different clips may have the same noise."""
    return context.parts, context.clipper.clips()


def state_of(model: nn.Module) -> list[object]:
    """What a captured graph assumes constant: modes, memory addresses and `requires_grad`."""
    found: list[object] = []
    for module in model.modules():
        held = chain(module._parameters.values(), module._buffers.values())
        found.append(module.training)
        found.extend((t.data_ptr(), t.requires_grad) for t in held if t is not None)
    return found
