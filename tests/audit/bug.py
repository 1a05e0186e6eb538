"""A planted bug: how to plant it, the run that shows it, and the tools that must catch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import audit
from clipwise.audit.trial import run_of
from clipwise.errors import UnsupportedModelError

TOOLS = ("neighbours", "canary", "deterministic test")

# The confidence of each statistical test. They are seeded; without seeds, a hundred of them would fail by chance
# once in ten thousand times.
CONFIDENCE = 1 - 1e-6

Subject = tuple[Callable[[Any], None], Any]
Plant = Callable[[pytest.MonkeyPatch], None]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def rows(size: int = 32, features: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(size, features, generator=random), torch.randint(classes, (size,), generator=random)


def network(features: int = 5, hidden: int = 8, classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def small(**options: Any) -> Subject:
    """Two layers on 32 rows of five numbers, each drawn with probability 1/2 in each of six steps."""
    return run_of(network(), losses, rows(), **options)


def one_release(**options: Any) -> Subject:
    """The same, for one step that every record takes part in."""
    return small(sampling="full", sample_rate=None, steps=1, **options)


@dataclass(frozen=True)
class Bug:
    """One bug.

    Args:
        name: for the table.
        plant: patches the library.
        caught_by: the tools that must find it.
        subject: the run to audit.
        attacked: the run for the canary, if different.
        neighbours, canary: further arguments of the tools.
        deterministic: raises an AssertionError if the bug is planted.
    """

    name: str
    plant: Plant
    caught_by: tuple[str, ...]
    subject: Callable[[], Subject] = small
    attacked: Callable[[], Subject] = one_release
    neighbours: Mapping[str, Any] = field(default_factory=dict)
    canary: Mapping[str, Any] = field(default_factory=dict)
    deterministic: Callable[[], None] | None = None

    def is_caught(self, tool: str, planted: bool = True) -> bool | None:
        """Whether a tool finds it; None if the tool does not apply. Without planting: whether it is a false alarm."""
        if not planted:
            try:
                return self._finds(tool)
            except UnsupportedModelError:  # the engine itself refuses such a model
                return False
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            return self._finds(tool)

    def _finds(self, tool: str) -> bool | None:
        if tool == "neighbours":
            return bool(audit.neighbours(*self.subject(), **self.neighbours).findings)
        if tool == "canary":
            options = {"runs": 500, "confidence": CONFIDENCE, **self.canary}
            return not audit.canary(*self.attacked(), **options).ok
        if self.deterministic is None:
            return None
        try:
            self.deterministic()
        except AssertionError:
            return True
        return False
