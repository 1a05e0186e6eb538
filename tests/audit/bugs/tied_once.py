"""An embedding table that is also the output layer: its norm counts only the output layer."""

import pytest
import torch
from torch import Tensor, nn

from clipwise.audit.trial import run_of
from clipwise.gradients.forms import Budget, Tied
from tests.audit.bug import Bug, Subject, losses


def plant(patch: pytest.MonkeyPatch) -> None:
    def of_head(self: Tied, budget: Budget) -> Tensor:
        return self.outer.gram_squares(budget)[0]

    patch.setattr(Tied, "squared_norms", of_head)


class TiedTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return (0.1 * self.table(ids).sum(1)) @ self.table.weight.T


def tied(steps: int) -> Subject:
    torch.manual_seed(0)
    ids = torch.randint(12, (24, 5))
    return run_of(TiedTable(), losses, (ids, torch.randint(12, (24,))), sampling="full", sample_rate=None, steps=steps)


BUG = Bug(
    "tied weights counted once",
    plant,
    ("neighbours",),
    subject=lambda: tied(2),
    attacked=lambda: tied(1),
    neighbours={"records": (0, 1, 2, 3)},
)
