"""A loader for training loops that call `loss.backward()` on a mean loss and then `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipwise.engine.private import Private
from clipwise.integrations.loss_terms import LossTerms
from clipwise.sampling.batch_structure import map_tensors


class MeanLossLoader:
    """Yields the batches of a private run. In the body of the loop, `loss.backward()` is `private.backward(terms)`.

    Only the first backward pass after a batch is private. Later ones in the same iteration, such as that of a
    generator network, run unchanged; the run refuses to use gradients that they leave in its own parameters.

    Args:
        private: the run.
        max_physical_batch_size: yield pieces of at most this size. `optimizer.step()` after a piece that is not the
            last of its batch finds no gradients and changes nothing.
        batch_first: see `LossTerms`.
        device: where the tensors of a batch are moved to; None leaves them.
    """

    def __init__(
        self,
        private: Private,
        *,
        max_physical_batch_size: int | None = None,
        batch_first: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.private = private
        self.dataset = private.loader.fetcher.dataset
        self.batch_first = batch_first
        self.device = device
        self._pieces = private.loader.pieces(max_physical_batch_size)
        self._is_cut = max_physical_batch_size is not None
        self._terms: LossTerms | None = None

    def __len__(self) -> int:
        return len(self._pieces) if self._is_cut else len(self.private.loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self.private.loader
        for batch in self._pieces:
            self.end()  # of an earlier iterator that an exception keeps alive
            size = loader.awaited().size
            terms = self._terms = LossTerms(size, batch_first=self.batch_first)
            terms.on_backward = partial(self._backward, terms, size)
            with terms:
                yield batch if self.device is None else map_tensors(partial(_moved, self.device), batch)
            self.end()

    def end(self) -> None:
        """End the recognition of losses: torch functions run unchanged until the next batch."""
        if self._terms is not None:
            self._terms.is_active = False

    def _backward(self, terms: LossTerms, size: int, losses: Tensor) -> None:
        terms.is_active = False  # one private backward pass for each batch
        self.private.backward(losses if size else None)


def _moved(device: torch.device, value: Tensor) -> Tensor:
    return value.to(device, non_blocking=True)
