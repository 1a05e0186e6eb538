"""Loops with `accelerator.backward`, equal to the plain clipwise loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import clipwise
from tests.runs import data, network, sgd

pytest.importorskip("accelerate")
from accelerate import Accelerator

from clipwise.integrations.accelerate import make_private

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 3}], ids=["whole", "pieces"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_prepared_loop_equals_the_plain_loop(order: str, options: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer: Any = sgd(model)
    if order == "before":
        model, optimizer = accelerator.prepare(model, optimizer)
    loader = make_private(
        accelerator, model, optimizer, DataLoader(data(), 8, shuffle=True), noise_multiplier=1.0, seed=3, **options
    )
    if order == "after":
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    assert loader.private.steps == 5
    loader.private.statement()

    other = network()
    private = clipwise.make_private(other, sgd(other), data(), batch_size=8, noise_multiplier=1.0, seed=3)
    for x, y in private.loader:
        private.step(F.cross_entropy(other(x), y, reduction="none") if len(x) else None)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_gradient_accumulation_is_refused() -> None:
    model = network()
    with pytest.raises(clipwise.ConfigurationError, match="gradient_accumulation_steps"):
        make_private(Accelerator(cpu=True, gradient_accumulation_steps=2), model, sgd(model), DataLoader(data(), 8))


def test_a_prepared_loader_with_drop_last_is_refused() -> None:
    model = network()
    with pytest.raises(clipwise.ConfigurationError, match="drop_last"):
        make_private(Accelerator(cpu=True), model, sgd(model), DataLoader(data(), 8, drop_last=True))
