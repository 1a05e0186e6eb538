"""The norm of an embedding bag counts an id once, however often it occurs."""

import pytest
import torch
from torch import Tensor, nn

from clipwise.audit.trial import run_of
from clipwise.gradients.forms import Budget, Rows, squared_norms
from tests.audit.bug import Bug, Subject, losses


def plant(patch: pytest.MonkeyPatch) -> None:
    def of_first(self: Rows, budget: Budget) -> Tensor:
        keys = (self.example * self.V + self.ids).tolist()
        is_first = torch.tensor([key not in keys[:k] for k, key in enumerate(keys)])
        total = torch.zeros(self.batch, dtype=torch.float64)
        return total.index_add_(0, self.example[is_first], squared_norms(self.g[is_first]))

    patch.setattr(Rows, "squared_norms", of_first)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 6, mode="sum")
        self.head = nn.Linear(6, 3)
        self.head.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


def bags(steps: int) -> Subject:
    torch.manual_seed(0)
    ids = torch.randint(12, (24, 8))
    ids[0] = 3  # one id, eight times
    return run_of(Bags(), losses, (ids, torch.randint(3, (24,))), sampling="full", sample_rate=None, steps=steps)


BUG = Bug(
    "an embedding-bag norm that drops repeats",
    plant,
    ("neighbours",),
    subject=lambda: bags(2),
    attacked=lambda: bags(1),
    neighbours={"records": (0,)},
)
