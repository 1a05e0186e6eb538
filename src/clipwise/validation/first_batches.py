"""The replacement test of a private run, on its first batches and on their collation.

An error here depends on private data, and no epsilon covers it. It is raised before anything is charged or released,
and its message is constant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from clipwise.engine.memory_shortage import is_out_of_memory, with_smaller_pieces
from clipwise.errors import CoupledExamplesError
from clipwise.sampling.augmentation import Views
from clipwise.sampling.batch_structure import arguments_of, map_tensors, take_rows, tensors_in, with_zeros
from clipwise.validation.arguments import require_takes
from clipwise.validation.replacement import Arrange, Trial

Loss = Callable[..., Tensor]

_TESTED_BATCHES = 2

_REFUSAL = (
    "The loss of an example, or its gradient, moved when other examples of its batch were replaced, removed or "
    "reordered, or when its record was collated with other records. Usual causes: mixup or batch statistics "
    "(in collate_fn, in the loss or in a frozen backbone), padding to the longest record with an average over "
    "padding, a divisor of the whole batch, selection of hard examples, a branch or a loop that depends on all "
    "examples. Compute each loss from its own example, or use Batch(max_norm=...), which bounds whole microbatches and "
    "needs far more noise. clipwise.check(model, loss, batch) gives details on public rows. This error depends on "
    "private data and is not covered by epsilon."
)


class ReplacementTest:
    """Runs the replacement test on the first batches of at least two examples.

    Args:
        model: the model to train.
        loss: returns one loss per row, called as `loss(*arguments_of(batch))`.
        views: augmented views of each example; None for the example itself.
        probe_inputs: whether to run the probe of input gradients too, with random weights.
    """

    def __init__(self, model: nn.Module, loss: Loss, views: Views | None, probe_inputs: bool) -> None:
        self._model, self._loss, self._views, self._probe_inputs = model, loss, views, probe_inputs
        self._seen: set[Hashable] = set()

    @property
    def is_pending(self) -> bool:
        """Whether further batches will be tested."""
        return len(self._seen) < _TESTED_BATCHES

    def examine(self, batch: Any, size: int, which: Hashable, arrangements: Callable[[], Sequence[Arrange]]) -> None:
        """Raise if a loss depends on other examples.

        Args:
            batch: the loader's batch, with one row per view.
            size: the number of examples.
            which: identifies the batch. A batch that passed is not tested again.
            arrangements: returns functions that collate the same records again, without views.
        """
        if not self.is_pending or which in self._seen or size < 2:
            return
        require_takes("loss", self._loss, "loss(*batch)", *arguments_of(batch))
        count = 1 if self._views is None else self._views.count

        def taken(places: Sequence[int]) -> Any:
            rows = [place * count + view for place in places for view in range(count)]
            return take_rows(batch, rows, size * count)

        def emptied(whole: Any, place: int) -> Any:
            rows, all_rows = (slice(place * count, (place + 1) * count), [len(t) for t in tensors_in(whole) if t.dim()])
            # Ids, lengths and masks stay: 0 may not be a valid value.
            return with_zeros(whole, rows, all_rows[0] if all_rows else 0, only_floats=True)

        # A packed batch cannot be rearranged by rows, only collated again.
        is_by_rows = all(len(t) == size * count for t in tensors_in(batch) if t.dim())
        others = arrangements()

        def tested(examples: int) -> None:
            rows = [Trial(self._model, self._run, taken, examples, blank=emptied)] if is_by_rows else []
            trials = rows + [Trial(self._model, self._run_collated, arrange, examples) for arrange in others]
            for number, trial in enumerate(trials):
                trial.require_uncoupled()
                if number == 0:
                    trial.with_random_weights(self._probe_inputs)

        try:
            self._with_memory(tested, size)
        except CoupledExamplesError:
            raise CoupledExamplesError(_REFUSAL) from None  # the original message depends on private data
        self._seen.add(which)

    def _with_memory(self, tested: Callable[[int], None], size: int) -> None:
        try:
            return tested(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        with_smaller_pieces(tested, size)  # outside of `except`, so that the tensors of the error's frames are freed

    def _run(self, batch: Any) -> Tensor:
        device = next(self._model.parameters()).device
        losses = self._loss(*arguments_of(map_tensors(lambda t: t.to(device), batch)))
        return losses if self._views is None else self._views.mean(losses)

    def _run_collated(self, batch: Any) -> Tensor:
        return self._run(batch if self._views is None else self._views.alike().of_batch(batch))


@cache
def recommend_check() -> None:
    """Log once per process that a hand-written loop runs no replacement test."""
    logging.getLogger("clipwise").warning(
        "No replacement test runs in this training loop: give make_private(..., loss=...), or run "
        "clipwise.check(model, loss, batch) on public rows."
    )
