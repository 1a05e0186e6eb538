"""The replacement test of a private run, on its first batches and on how they are collated.

A refusal here is an output that depends on private data, and no epsilon covers it. It is raised before anything is
charged or released, and its message is a constant.
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
    "The loss of an example, or its gradient, moved when other examples of its batch were replaced, taken out or put "
    "in another order, or when its record was collated with other records. Usual causes: mixup or statistics of the "
    "batch (in collate_fn, in the loss or in a frozen backbone), padding to the longest record with an average over "
    "padding, a divisor of the whole batch, a choice of hard examples, a branch or a loop that looks at all examples. "
    "Compute each loss from its own example, or use Batch(max_norm=...), which bounds whole mini-sets and needs far "
    "more noise. clipwise.check(model, loss, batch) says more, on public rows. This refusal depends on private data "
    "and is not covered by epsilon."
)


class ReplacementTest:
    """Tests the first batches of at least two examples.

    Args:
        model: that is trained.
        loss: from a batch to one loss a row, called as `loss(*arguments_of(batch))`.
        views: what is handed out of each example; None for the example itself.
        probe_inputs: also let the probe of input gradients look, with weights drawn at random.
    """

    def __init__(self, model: nn.Module, loss: Loss, views: Views | None, probe_inputs: bool) -> None:
        self._model, self._loss, self._views, self._probe_inputs = model, loss, views, probe_inputs
        self._seen: set[Hashable] = set()

    @property
    def is_pending(self) -> bool:
        """Whether there are batches still to be tested."""
        return len(self._seen) < _TESTED_BATCHES

    def examine(
        self, batch: Any, size: int, which: Hashable, arrangements: Callable[[], Sequence[Arrange]]
    ) -> None:
        """Refuse a loss that depends on other examples.

        Args:
            batch: as it was handed out, with a row for each view.
            size: the number of examples.
            which: identifies the batch. One that passed is not tested again.
            arrangements: give functions that make batches of the same records anew, without views.
        """
        if not self.is_pending or which in self._seen or size < 2:
            return
        require_takes("loss", self._loss, "loss(*batch)", *arguments_of(batch))
        count = 1 if self._views is None else self._views.count

        def taken(places: Sequence[int]) -> Any:
            rows = [place * count + view for place in places for view in range(count)]
            return take_rows(batch, rows, size * count)

        def emptied(whole: Any, place: int) -> Any:
            rows, all_rows = (
                slice(place * count, (place + 1) * count),
                [len(t) for t in tensors_in(whole) if t.dim()],
            )
            # Ids, lengths and masks stay: 0 need not be one of them.
            return with_zeros(whole, rows, all_rows[0] if all_rows else 0, only_floats=True)

        # Of a packed batch only the records can be arranged anew.
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
            raise CoupledExamplesError(_REFUSAL) from None  # what moved, and when, depends on private data
        self._seen.add(which)  # only a batch that passed

    def _with_memory(self, tested: Callable[[int], None], size: int) -> None:
        """Test all examples of a batch, or as many as memory takes."""
        try:
            return tested(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        with_smaller_pieces(tested, size)  # here the error is gone, with the tensors that its frames held

    def _run(self, batch: Any) -> Tensor:
        device = next(self._model.parameters()).device
        losses = self._loss(*arguments_of(map_tensors(lambda t: t.to(device), batch)))
        return losses if self._views is None else self._views.mean(losses)

    def _run_collated(self, batch: Any) -> Tensor:
        return self._run(batch if self._views is None else self._views.alike().of_batch(batch))


@cache
def recommend_check() -> None:
    """Log one line for a loop written by hand, once in a process."""
    logging.getLogger("clipwise").warning(
        "No replacement test runs in this training loop: give make_private(..., loss=...), or run "
        "clipwise.check(model, loss, batch) on public rows."
    )
