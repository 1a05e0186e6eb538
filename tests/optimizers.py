"""Optimizers that write weights in unusual ways."""

from __future__ import annotations

import torch


class ThroughData(torch.optim.Optimizer):
    """Writes through `.data`, which torch does not count."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1)
