"""Two backward passes: the first for norms, the second for the weighted sum. Nothing is kept between them.

The published method differentiates sum_i nu_i loss_i in the second pass. That is the same sum in exact
arithmetic only. Where two large terms cancel on the way back, they may do so exactly when every loss has the
weight 1 and leave nu * u * (their size) behind when it has the weight nu: rounding does not commute with a
factor that is no power of two, and what is released is then not what was measured. Here the second pass runs
with the same weight 1, gives the same bits, and nu_i comes in where a parameter's gradient is summed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clipwise.gradients.bookkeeping import Book, Memory
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.forms import Budget
from clipwise.gradients.precision import ieee_arithmetic


class Reweighted(PerExampleGradients):
    """Gradients that each pass finds again."""

    def __init__(self, book: Book, batch: int) -> None:
        super().__init__(batch, {})
        self._book = book
        self._muted_B: Tensor | None = None
        self._cancelling: dict[str, tuple[int, ...]] = {}

    @torch.no_grad()
    @ieee_arithmetic()
    def squared_norms(self) -> dict[str, Tensor]:
        first = self._book.gradients(retain=True).by_parameter
        squares = {name: c.form.squared_norms(Budget(0)) for name, c in first.items()}
        self._cancelling = {name: c.form.cancelling() for name, c in first.items()}
        return squares

    def mute(self, muted_B: Tensor) -> None:
        self._muted_B = muted_B

    def weighted_sums(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        second = self._book.gradients(retain=False)
        for name, c in second.by_parameter.items():
            c.form.add_apart(self._cancelling[name])
        if self._muted_B is not None:
            second.mute(self._muted_B)
        return second.weighted_sums(weights)

    def instantiate(self, examples: slice) -> dict[str, Tensor]:
        return self._book.gradients(retain=True).instantiate(examples)


def by_reweighting(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Norms from one backward pass and sums from another."""
    return Reweighted(Book(losses, parameters, memory), len(losses))
