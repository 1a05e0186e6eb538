"""Two backward passes: the first for norms, the second for the weighted sum. No gradient is kept in between.

The published method differentiates sum_i nu_i loss_i in the second pass. That is the same sum in exact
arithmetic only. Where two large terms cancel on the way back, they may do so exactly when every loss has the
weight 1 and leave nu * u * (their size) behind when it has the weight nu: rounding does not commute with a
factor that is no power of two, and what is released is then not what was measured. Here the second pass runs
with the same weight 1, and nu_i comes in where a parameter's gradient is summed.

The second pass gives the same bits as long as the kernels do; some on a GPU add in an order that changes. So it is
measured as well, and an example whose gradient came out longer than in the first pass is brought back to that.
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
        self._muted_B = torch.zeros(batch, dtype=torch.bool)
        self._squares: dict[str, Tensor] = {}

    def squared_norms(self) -> dict[str, Tensor]:
        self._squares = _measured(self._book.gradients(retain=True))
        return self._squares

    def mute(self, muted_B: Tensor) -> None:
        self._muted_B = muted_B

    def weighted_sums(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With |w_i g_i| <= w_i n_i for every parameter, n_i being the norm that the first pass gave."""
        first = self._squares or self.squared_norms()
        second = self._book.gradients(retain=False)
        again = _measured(second)
        bad_B = ~torch.isfinite(torch.stack(list(again.values())).sum(0))
        second.mute(bad_B | self._muted_B.to(bad_B.device))
        return second.weighted_sums(
            {name: w_B * _shorter(first[name], again[name]) for name, w_B in weights.items()}
        )

    def instantiate(self, examples: slice) -> dict[str, Tensor]:
        return self._book.gradients(retain=True).instantiate(examples)


@torch.no_grad()
@ieee_arithmetic()
def _measured(found: PerExampleGradients) -> dict[str, Tensor]:
    return {name: c.form.squared_norms(Budget(0)) for name, c in found.by_parameter.items()}


def _shorter(first_B: Tensor, again_B: Tensor) -> Tensor:
    """n_first / n_again where the second is longer, else 1."""
    return torch.where(again_B > first_B, first_B / again_B, 1.0).sqrt()


def by_reweighting(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Norms from one backward pass and sums from another."""
    return Reweighted(Book(losses, parameters, memory), len(losses))
