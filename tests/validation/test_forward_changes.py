"""Attributes that a forward pass updates are refused; constant ones are accepted."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import UnsupportedModelError
from tests.runs import CLASSES, FEATURES, private_run


class Running:
    """User-defined statistics."""

    def __init__(self) -> None:
        self.mean, self.lengths = 0.0, [0]


class Keeping(nn.Module):
    """Changes an attribute in each forward pass."""

    def __init__(self, kept: Any, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.kept, self._act = nn.Linear(FEATURES, CLASSES), kept, act

    def forward(self, x: Tensor) -> Tensor:
        replaced = self._act(self.kept, x.detach())
        if replaced is not None:
            self.kept = replaced
        out: Tensor = self.layer(x)
        return out


def numpy_mean(kept: Any, x: Tensor) -> None:
    kept += x.mean(0).numpy() if len(x) else 0


def running(kept: Any, x: Tensor) -> None:
    kept.mean = 0.9 * kept.mean + 0.1 * float(x.sum())


LEARNING: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "numpy": (lambda: np.zeros(FEATURES), numpy_mean),
    "numpy in a dict": (lambda: {"mean": np.zeros(FEATURES)}, lambda kept, x: numpy_mean(kept["mean"], x)),
    "float": (lambda: 0.0, lambda kept, x: kept + float(x.sum())),
    "list": (list, lambda kept, x: kept.append(float(x.sum()))),
    "list of tensors": (list, lambda kept, x: kept.append(x.mean(0))),
    "dict": (dict, lambda kept, x: kept.update({float(x.sum()): 1})),
    "nested": (lambda: {"a": [(0.0,)]}, lambda kept, x: kept["a"].append((float(x.sum()),))),
    "set": (set, lambda kept, x: kept.add(float(x.sum()))),
    "deque": (lambda: deque(maxlen=3), lambda kept, x: kept.append(float(x.sum()))),
    "words": (list, lambda kept, x: kept.append(str(float(x.sum())))),
    "examples": (lambda: 0, lambda kept, x: kept + len(x)),
    "an object": (Running, running),
    "an object's list": (Running, lambda kept, x: kept.lengths.append(len(x))),
}
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "nothing": (lambda: None, lambda kept, x: None),
    "a count of calls": (lambda: 0, lambda kept, x: kept + 1),
    "several a call": (lambda: 5, lambda kept, x: kept + 1000),
    "NaN": (lambda: float("nan"), lambda kept, x: float("nan")),
    "arrays": (lambda: {"a": np.array([np.nan, 1.0]), "b": [torch.zeros(2)]}, lambda kept, x: None),
    "a new equal array": (lambda: np.ones(3), lambda kept, x: np.ones(3)),
    "a name": (lambda: "train", lambda kept, x: random.choice(["a", "b"])),
    "a generator": (lambda: np.random.default_rng(0), lambda kept, x: kept.random() and None),
}


def train(model: nn.Module, steps: int, **options: Any) -> Any:
    _, private = private_run(model, **options)
    done = 0
    while done < steps:
        for x, y in private.loader:
            done += private.step(F.cross_entropy(model(x), y, reduction="none"))
    return private


@pytest.mark.parametrize("how", LEARNING)
def test_attributes_updated_in_forward_are_refused_by_name(how: str) -> None:
    make, act = LEARNING[how]
    model = nn.Sequential(Keeping(make(), act))
    _, private = private_run(model, sampling="full" if how != "examples" else "fixed-size")
    for x, y in private.loader:
        with pytest.raises(UnsupportedModelError, match=r"Attribute '0\.kept' was set or changed"):
            private.step(F.cross_entropy(model(x), y, reduction="none"))
        break
    assert private.steps == 0


def test_a_count_that_follows_the_data_is_refused() -> None:
    model = Keeping(0, lambda kept, x: kept + int((x > 0).sum()))
    with pytest.raises(UnsupportedModelError, match="'kept'"):
        train(model, 8, sampling="fixed-size")


@pytest.mark.parametrize("how", KEPT)
def test_unchanged_attributes_are_accepted(how: str) -> None:
    make, act = KEPT[how]
    assert train(Keeping(make(), act), 10).steps == 10


def test_changes_between_batches_are_accepted() -> None:
    model = Keeping(0.0, lambda kept, x: None)
    _, private = private_run(model)
    for epoch in range(2):
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none"))
            model.kept = epoch + 0.5
    assert private.steps == 10
