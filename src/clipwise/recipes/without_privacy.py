"""Training without privacy, for comparison: the same model, batches of the same size, and the same optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from clipwise.optim.averaging import AveragedParameters
from clipwise.recipes.building import batch_loss, make_optimizer
from clipwise.recipes.interrupts import Interrupts
from clipwise.recipes.kind import Encoder
from clipwise.recipes.planning import RunPlan


def train_plainly(
    plan: RunPlan, encoder: Encoder, model: nn.Module, after: Callable[[int], object], stop: Interrupts
) -> bool:
    """Train without privacy. Returns False if it was interrupted. `after` is called with the number of each step."""
    settings, device = plan.settings, next(model.parameters()).device
    data = encoder.encode(plan.source, plan.training_rows)
    # Whole batches by index, as the private loader fetches them.
    batches = BatchSampler(RandomSampler(data), settings.batch_size, drop_last=False)
    loader = DataLoader(data, batch_size=None, sampler=batches)
    optimizer, loss = make_optimizer(model, settings), batch_loss(encoder, model)
    views = encoder.views(settings.views)
    average = None if settings.ema is None else AveragedParameters(model, settings.ema)
    model.train()
    step = 0
    while step < plan.steps:
        for batch in loader:
            if stop.requested:
                return False
            rows: list[Tensor] = [value.to(device) for value in (batch if views is None else views.of_batch(batch))]
            optimizer.zero_grad()
            loss(*rows).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if average is not None:
                average.update()
            step += 1
            after(step)
            if step == plan.steps:
                break
    if average is not None:
        with torch.no_grad():
            average.copy_to(model)
    return True
