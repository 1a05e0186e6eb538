"""Opacus, as its users call it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.workload import Workload, losses_of


class _Losses(nn.Module):
    """The loss in the form that ghost mode needs: it sets `reduction` and needs one value per example."""

    reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return losses_of(outputs, targets)


@contextmanager
def opacus_steps(
    workload: Workload, *, mode: str, max_norm: float, noise_multiplier: float
) -> Iterator[Callable[[], None]]:
    """Steps of Opacus with `grad_sample_mode=mode`: "hooks" or "ghost".

    Modules that it does not support (recurrent ones) are replaced by its own, as it advises. Batches are drawn as
    in the non-private run; its accountant counts each step.
    """
    opacus, validators, layers = (
        importlib.import_module(name) for name in ("opacus", "opacus.validators", "opacus.layers")
    )
    if workload.views > 1:
        raise ValueError("Opacus has no views of an example")
    device = workload.inputs.device
    workload.model = validators.ModuleValidator.fix(workload.model)
    for name, layer in list(workload.model.named_children()):
        if type(layer) is nn.RNN:  # `fix` leaves it as it is, and it fails in the first step
            own = layers.DPRNN(layer.input_size, layer.hidden_size, batch_first=layer.batch_first)
            setattr(workload.model, name, own)
    workload.model.to(device)
    model, optimizer, *rest = opacus.PrivacyEngine().make_private(
        module=workload.model,
        optimizer=workload.optimizer(),
        criterion=_Losses(),
        data_loader=DataLoader(workload.dataset, batch_size=workload.batch),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_norm,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    ghost_loss, batches = rest[0] if mode == "ghost" else None, workload.batches()

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        with workload.autocast():
            outputs = model(x)
            loss = losses_of(outputs, y).mean() if ghost_loss is None else ghost_loss(outputs, y)
        loss.backward()
        optimizer.step()

    yield step
