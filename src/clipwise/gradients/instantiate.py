"""Book-keeping in which every gradient of every example is written out before its norm is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.bookkeeping import Book, Memory
from clipwise.gradients.derived import Path
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.forms import Written
from clipwise.gradients.join import Contribution


def by_instantiating(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """One backward pass; B gradients of each parameter, kept where memory allows and made again where not."""
    found = Book(losses, parameters, memory).gradients()
    return PerExampleGradients(
        found.batch,
        {name: _written(name, parameters[name], c) for name, c in found.by_parameter.items()},
    )


def _written(name: str, parameter: torch.nn.Parameter, c: Contribution) -> Contribution:
    def make(examples: slice) -> Tensor:
        return c.path.pull_each(c.form.instantiate(examples))[name]

    written = Written(c.form.batch, parameter.shape, c.form.dtype, make)
    return Contribution(written, Path.identity(name, parameter))
